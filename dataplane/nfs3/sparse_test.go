package nfs3

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

var _ dataplane.Sparser = (*Target)(nil)

// TestSparseContract runs the suites against weft's own data server.
func TestSparseContract(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: root, for the data server")
	}
	open := func(t *testing.T) targettest.Fixture {
		srv, err := data.Open(data.Config{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }() // ends at Shutdown
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := errors.Join(srv.Shutdown(ctx), <-served); err != nil {
				t.Error(err)
			}
		})
		addr := netip.MustParseAddrPort(l.Addr().String())
		tg := newTarget(t, Config{}, addr)
		root, err := Mount(t.Context(), addr, "/", nil)
		if err != nil {
			t.Fatal(err)
		}
		var files atomic.Int32
		newFile := func() *layout.DataFile {
			name := fmt.Sprint("file", files.Add(1))
			attr := wire.Sattr{SetMode: true, Mode: 0o640, SetUID: true, UID: 1000, SetGID: true, GID: 1001}
			fh, _, err := tg.Create(t.Context(), layout.Credential{}, root, name, wire.Unchecked, attr, wire.CreateVerf{})
			if err != nil {
				t.Fatal(err)
			}
			return &layout.DataFile{Handles: [][]byte{fh}, Cred: layout.Credential{UID: 1000, GID: 1001}}
		}
		return targettest.Fixture{Target: tg, NewFile: newFile, BadFile: file(badHandle)}
	}
	targettest.RunSparse(t, open)
	targettest.Run(t, open)
}

// A server without the program is asked once for each connection.
func TestSparseForeign(t *testing.T) {
	srv := newServer(t)
	var asked atomic.Int32
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.Proc(sparse.ProcAllocate) || c.proc == wire.Proc(sparse.ProcDeallocate) {
			asked.Add(1)
			return &action{rpc: &oncrpc.Reply{Stat: oncrpc.ProgUnavail}}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for range 3 {
		err := tg.Allocate(ctx, file("a"), layout.Column{}, 0, 10, true)
		var e interface{ Errno() syscall.Errno }
		if !errors.Is(err, ErrNoSparse) || !errors.As(err, &e) || e.Errno() != syscall.EOPNOTSUPP {
			t.Errorf("Allocate: %v", err)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times, want once", n)
	}
	srv.hangup()
	ok(t, tg, writeOp("a", 0, []byte("x"))) // over another connection
	if err := tg.Deallocate(ctx, file("a"), layout.Column{}, 0, 10); !errors.Is(err, ErrNoSparse) {
		t.Errorf("Deallocate: %v", err)
	}
	if n := asked.Load(); n != 2 {
		t.Errorf("asked %d times, want once for each connection", n)
	}
}

// Long ranges are done in several calls; answers that make no sense end the call.
func TestSparseProgress(t *testing.T) {
	srv := newServer(t)
	var step atomic.Int64
	srv.script = func(c *callInfo) *action {
		if c.proc != wire.Proc(sparse.ProcDeallocate) {
			return nil
		}
		var a sparse.RangeArgs
		d := xdr.NewDecoder(c.args)
		a.Decode(&d)
		if step.Load() < 0 { // a refusal
			return &action{body: (&sparse.RangeRes{Status: wire.ErrNoSpc}).Append(nil)}
		}
		return &action{body: (&sparse.RangeRes{Off: a.Off + uint64(step.Load())}).Append(nil)}
	}
	tg := newTarget(t, Config{}, srv.addr)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	punch := func(n int64) error {
		step.Store(n)
		return tg.Deallocate(ctx, file("a"), layout.Column{}, 100, 1000)
	}
	before := srv.calls(wire.Proc(sparse.ProcDeallocate))
	if err := punch(250); err != nil {
		t.Errorf("in four steps: %v", err)
	}
	if n := srv.calls(wire.Proc(sparse.ProcDeallocate)) - before; n != 4 {
		t.Errorf("%d calls, want 4", n)
	}
	for _, n := range []int64{0, 1001} {
		if e := (*ReplyError)(nil); !errors.As(punch(n), &e) {
			t.Errorf("%d bytes done of 1000: no ReplyError", n)
		}
	}
	if e := (*Error)(nil); !errors.As(punch(-1), &e) || e.Errno() != syscall.ENOSPC {
		t.Errorf("refused: %v", e)
	}
}
