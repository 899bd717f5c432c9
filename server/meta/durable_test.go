package meta

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
)

// barriers counts commits with Sync that change nothing: what can be seen is durable when one of them returns.
type barriers struct {
	catalog.Engine
	n atomic.Int32
}

func (e *barriers) Commit(ctx context.Context, b *catalog.Batch) error {
	if len(b.Puts)+len(b.Deletes)+len(b.Deltas) == 0 && b.Durability == catalog.Sync {
		e.n.Add(1)
	}
	return e.Engine.Commit(ctx, b)
}

// TestBarriers lists the answers that a crash must not take back, though nothing was changed for them: rows that they are
// made from may be seen before they are durable.
func TestBarriers(t *testing.T) {
	e := &barriers{Engine: memorytest.New()}
	c := newHost(t, e).start().client()
	dir := c.mkdir(layout.RootID, "d")
	id := c.create(dir, "f")
	if _, err := c.layout(id, 0, 1); err != nil {
		t.Fatal(err)
	}
	report := func(id layout.FileID) func() {
		return func() {
			must[metarpc.LayoutCommitResult](c, metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: id}}})
		}
	}
	for what, ask := range map[string]func(){
		"fsync of a directory":                   report(dir),
		"fsync of a directory that is gone":      report(12345),
		"fsync of a file that nothing is new of": report(id),
		"how data files are written that are to be made stable": func() {
			must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: layout.ToEOF, Renew: true})
		},
	} {
		before := e.n.Load()
		if ask(); e.n.Load() == before {
			t.Errorf("%s: no barrier", what)
		}
	}
}
