package nfs3

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

var (
	_ dataplane.Target  = (*Target)(nil)
	_ dataplane.Epocher = (*Target)(nil)
)

// TestContract runs the suite that all targets share, against a good server.
func TestContract(t *testing.T) {
	targettest.Run(t, func(t *testing.T) targettest.Fixture {
		srv := newServer(t)
		var files atomic.Int32
		return targettest.Fixture{
			Target:  newTarget(t, Config{RSize: 128 << 10, WSize: 64 << 10}, srv.addr),
			NewFile: func() *layout.DataFile { return file(fmt.Sprint("file", files.Add(1))) },
			BadFile: file(badHandle),
		}
	})
}
