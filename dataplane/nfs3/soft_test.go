package nfs3

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// TestPatience: what has no answer for too long ends, but for WRITEs that the server may have.
func TestPatience(t *testing.T) {
	patience := layout.Patience{Time: time.Second, Errno: syscall.ETIMEDOUT} // a busy machine must not take as long for an answer
	gaveUp := func(t *testing.T, err error) {
		t.Helper()
		var late *layout.TimeoutError
		if !errors.As(err, &late) || late.Errno() != syscall.ETIMEDOUT {
			t.Errorf("error %v", err)
		}
	}
	t.Run("nobody there", func(t *testing.T) {
		srv := newServer(t)
		srv.close()
		tg := newTarget(t, Config{Patience: patience}, srv.addr)
		rs := []*request{readOp("f", 0, 10), writeOp("f", 0, []byte("x")), newOp(layout.OpCommit, "f", 0, nil)}
		do(t, tg, rs...)
		for _, r := range rs {
			gaveUp(t, r.Err)
			if !errors.Is(r.Err, syscall.ECONNREFUSED) {
				t.Errorf("%v: the reason is missing: %v", r.Kind, r.Err)
			}
		}
	})
	t.Run("no answer", func(t *testing.T) {
		srv := newServer(t)
		gate := make(chan struct{})
		srv.script = func(c *callInfo) *action {
			if c.proc == wire.ProcFsinfo || c.off >= 100 {
				return nil
			}
			return &action{wait: gate}
		}
		tg := newTarget(t, Config{Connections: 1, Patience: patience}, srv.addr)
		overdue := make(chan error, 2)
		w := writeOp("f", 0, []byte("late"))
		w.Overdue = func(_ *layout.Op, err error) { overdue <- err }
		r, c := readOp("f", 0, 10), newOp(layout.OpCommit, "f", 0, nil)
		start(tg, w, r, c)
		wait(t, r.done, "READ")
		gaveUp(t, r.Err)
		wait(t, c.done, "COMMIT")
		gaveUp(t, c.Err)
		select {
		case err := <-overdue:
			gaveUp(t, err)
		case <-time.After(20 * time.Second):
			t.Fatal("nobody says that the WRITE is overdue")
		}
		ok(t, tg, writeOp("f", 100, []byte("others")))
		select {
		case <-w.done:
			t.Fatal("the WRITE has ended with an unknown outcome")
		case <-overdue:
			t.Fatal("overdue twice")
		case <-time.After(2 * patience.Time):
		}
		close(gate)
		wait(t, w.done, "WRITE")
		if w.Err != nil || w.N != 4 {
			t.Errorf("%d bytes, error %v", w.N, w.Err)
		}
	})
	t.Run("half of an answer", func(t *testing.T) {
		srv := newServer(t)
		srv.put("f", make([]byte, 100000))
		gate := make(chan struct{})
		defer close(gate)
		srv.script = func(c *callInfo) *action {
			if c.proc == wire.ProcRead {
				return &action{half: gate, halfway: make(chan struct{})}
			}
			return nil
		}
		tg := newTarget(t, Config{Connections: 1, Patience: patience}, srv.addr)
		r := readOp("f", 0, 100000)
		do(t, tg, r)
		gaveUp(t, r.Err)
	})
	t.Run("JUKEBOX is an answer", func(t *testing.T) {
		srv := newServer(t)
		srv.script = func(c *callInfo) *action {
			if c.proc == wire.ProcRead && c.nth < 5 { // 0.1 + 0.2 + 0.4 + 0.8 s
				return &action{status: wire.ErrJukebox}
			}
			return nil
		}
		srv.put("f", make([]byte, 10))
		tg := newTarget(t, Config{Patience: layout.Patience{Time: 1400 * time.Millisecond, Errno: syscall.EIO}}, srv.addr)
		ok(t, tg, readOp("f", 0, 10))
	})
}
