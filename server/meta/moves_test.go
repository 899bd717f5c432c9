package meta

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// fillWith has the fake data files filled by f, up to end.
func (f *fakeFiles) fillWith(end int64, fill func(context.Context, layout.Range) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.filled, f.fillEnd = fill, end
}

// TestLayoutMove moves a file's data: the caller is told how far that is, the owner and root alone may ask for it, and it goes on when
// the service is started again.
func TestLayoutMove(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c, root := h.client(), h.root()
		defer renewing(c)()
		f := c.create(layout.RootID, "f")
		must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, rw(f))
		args := &metarpc.LayoutMoveArgs{ID: f, Device: layout.DeviceID{9}}
		other := h.client()
		other.cred.UID++
		if _, err := ask[metarpc.LayoutMoveResult](other, metarpc.OpLayoutMove, args); !refusedWith(err, syscall.EPERM) {
			t.Errorf("asked by another user: %v", err)
		}
		copying := make(chan struct{}, 100)
		release := make(chan struct{})
		hold := func(ctx context.Context, r layout.Range) error {
			if r.Off == 0 {
				copying <- struct{}{}
				select {
				case <-release:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		}
		h.files.fillWith(gateBytes+5, hold)
		start := time.Now()
		if r := must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); r.Finished || r.Done != 0 {
			t.Errorf("at the beginning: %+v", r)
		}
		if took := time.Since(start); took != moveWait {
			t.Errorf("answered after %v", took)
		}
		<-copying
		if _, err := ask[metarpc.LayoutMoveResult](root, metarpc.OpLayoutMove, &metarpc.LayoutMoveArgs{ID: f, Device: layout.DeviceID{8}}); !refusedWith(err, syscall.EBUSY) {
			t.Errorf("to another device: %v", err)
		}
		c.drop()
		root.drop()
		other.drop()
		h.restart()
		c.connect()
		must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
		time.Sleep(2 * h.lease) // the other clients do not come back
		<-copying
		close(release)
		synctest.Wait()
		if n := countRows(t.Context(), h.engine, schema.PrefixMove); n != 0 {
			t.Errorf("%d moves are left", n)
		}
		h.files.mu.Lock()
		h.files.there = true
		h.files.mu.Unlock()
		if r := must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); !r.Finished || r.Size != 0 {
			t.Errorf("afterwards: %+v", r)
		}
	})
}

func refusedWith(err error, errno syscall.Errno) bool {
	var refused *metarpc.Error
	return errors.As(err, &refused) && refused.Status == metarpc.Status(errno)
}

// TestLayoutMoveFails gives a move up that no device can take, and waits for one that it is held up by.
func TestLayoutMoveFails(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		f := c.create(layout.RootID, "f")
		must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, rw(f))
		args := &metarpc.LayoutMoveArgs{ID: f, Device: layout.DeviceID{9}}
		full := func(err error) {
			h.files.mu.Lock()
			defer h.files.mu.Unlock()
			h.files.fillErr = err
		}
		full(fmt.Errorf("no room: %w", syscall.ENOSPC))
		h.files.fillWith(5, func(context.Context, layout.Range) error { return nil })
		if _, err := ask[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); !refusedWith(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "no room") {
			t.Errorf("no room: %v", err)
		}
		if n := countRows(t.Context(), h.engine, schema.PrefixMove); n != 0 {
			t.Errorf("%d moves are left", n)
		}
		full(nil)
		// Somebody's kernel reads it.
		h.svc.mu.Lock()
		cl := h.svc.files[f].claims[0]
		cl.pin = metarpc.CopyRef{Device: layout.DeviceID{1}, Handle: []byte{1}}
		h.svc.mu.Unlock()
		h.files.fillWith(5, func(context.Context, layout.Range) error { return nil })
		must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args)
		if r := must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); r.Finished || !strings.HasPrefix(r.Waits, "test, where") {
			t.Errorf("while it is pinned: %+v", r)
		}
		h.svc.mu.Lock()
		cl.pin = metarpc.CopyRef{}
		h.svc.mu.Unlock()
		time.Sleep(2 * moveAgain)
		h.files.mu.Lock()
		h.files.there = true
		h.files.mu.Unlock()
		if r := must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); !r.Finished {
			t.Errorf("afterwards: %+v", r)
		}
		// A file that goes.
		h.files.fillWith(5, func(ctx context.Context, _ layout.Range) error { <-ctx.Done(); return ctx.Err() })
		h.files.mu.Lock()
		h.files.there = false
		h.files.mu.Unlock()
		must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args)
		c.remove(layout.RootID, "f")
		c.closeFile(f)
		time.Sleep(gatePatience + 2*moveAgain)
		if n := countRows(t.Context(), h.engine, schema.PrefixMove); n != 0 {
			t.Errorf("%d moves of a file that is gone are left", n)
		}
	})
}

// TestLayoutMoveAgain tries again what does not succeed, and gives it up in the end.
func TestLayoutMoveAgain(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		f := c.create(layout.RootID, "f")
		must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, rw(f))
		args := &metarpc.LayoutMoveArgs{ID: f, Device: layout.DeviceID{9}}
		tries := 0
		h.files.fillWith(5, func(context.Context, layout.Range) error { tries++; return errors.New("broken") })
		if r := must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); r.Finished || !strings.Contains(r.Waits, "broken") {
			t.Errorf("at first: %+v", r)
		}
		time.Sleep(moveAgain << (moveTries - 1))
		if _, err := ask[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); !refusedWith(err, syscall.EIO) || !strings.Contains(err.Error(), "broken") {
			t.Errorf("in the end: %v", err)
		}
		if n := countRows(t.Context(), h.engine, schema.PrefixMove); n != 0 || tries < moveTries {
			t.Errorf("%d moves are left after %d tries", n, tries)
		}
		h.files.fillWith(5, func(context.Context, layout.Range) error { return nil })
		if r := must[metarpc.LayoutMoveResult](c, metarpc.OpLayoutMove, args); !r.Finished {
			t.Errorf("asked once more: %+v", r)
		}
	})
}
