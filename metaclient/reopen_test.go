package metaclient

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// opener is a service that makes some calls only for files that are open in the session.
type opener struct {
	s      *service
	gate   chan struct{} // closed when files may be opened again
	open   [10]atomic.Bool
	begun  atomic.Int32 // Opens that reclaim
	denied atomic.Int32
}

func (o *opener) handle(op metarpc.Op, args any) (metarpc.Status, any) {
	if a, ok := args.(*metarpc.OpenArgs); ok {
		if a.Reclaim {
			o.begun.Add(1)
			select {
			case <-o.gate:
			case <-o.s.ctx.Done():
			}
		}
		o.open[a.ID].Store(true)
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: a.ID}}
	}
	if id := opened(args); id != 0 && !o.open[id].Load() {
		o.denied.Add(1)
		return metarpc.Status(syscall.EBADF), nil
	}
	switch a := args.(type) {
	case *metarpc.LayoutGetArgs:
		return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{segment(0, 100, layout.IOModeRW)}}
	case *metarpc.ReserveArgs:
		return metarpc.StatusOK, &metarpc.ReserveResult{Off: 1, Mtime: 1}
	case *metarpc.SetAttrArgs:
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: a.ID}}
	}
	return metarpc.StatusOK, nil
}

// lose ends the session, and with it what is open.
func (o *opener) lose() {
	for i := range o.open {
		o.open[i].Store(false)
	}
	o.s.forget()
	o.s.hangUp()
	time.Sleep(3 * turnMost) // until somebody reads
}

// Calls that need a file open wait in a new session until it has been opened there again, and no others do.
func TestReopenFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		o := &opener{s: s, gate: make(chan struct{})}
		s.handle = o.handle
		resets := make(chan struct{}, 10)
		c := connected(t, s, Config{OnReset: func(context.Context, int, bool) { resets <- struct{}{} }})
		ctx := t.Context()
		for id := layout.FileID(5); id <= 6; id++ {
			if _, err := c.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: id}); err != nil {
				t.Fatal(err)
			}
		}
		set := func(ctx context.Context, id layout.FileID, open bool) error {
			_, err := c.SetAttr(ctx, metarpc.Cred{}, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Open: open})
			return err
		}
		o.lose()
		synctest.Wait()
		calls := map[string]func() error{
			"layout": func() error {
				_, err := c.Layout(ctx, 5, layout.IOModeRW, 0, 9, Anywhere)
				return err
			},
			"reserve": func() error {
				return c.Reserve(ctx, &metarpc.ReserveArgs{ID: 5, Len: 9}, func(metarpc.ReserveResult) {})
			},
			"setattr": func() error { return set(ctx, 5, true) },
			"lock": func() error {
				return setLock(c, ctx, &metarpc.LockArgs{ID: 5, Owner: 1, Type: metarpc.LockWrite, End: 9, PID: 1})
			},
		}
		results := make(chan error, len(calls))
		for name, call := range calls { // some before there is a session, some after
			go func() {
				if err := call(); err != nil {
					results <- fmt.Errorf("%s: %w", name, err)
					return
				}
				results <- nil
			}()
			time.Sleep(200 * time.Millisecond)
		}
		other, gone := make(chan error, 1), make(chan error, 1)
		go func() { other <- set(ctx, 6, true) }()
		leaving, leave := context.WithCancel(ctx)
		go func() { gone <- set(leaving, 5, true) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := o.begun.Load(); n != 2 || len(results) > 0 || o.denied.Load() > 0 || len(other) > 0 {
			t.Fatalf("%d files being opened again, %d calls answered, %d with EBADF", n, len(results)+len(other), o.denied.Load())
		}
		if busy := c.State().Busy; busy > 3 { // the Opens, and perhaps Renew
			t.Errorf("%d slots are taken", busy)
		}

		if err := set(ctx, 5, false); err != nil {
			t.Errorf("by path: %v", err)
		}
		if err := set(prior(ctx), 5, true); lockStatus(err) != metarpc.Status(syscall.EBADF) {
			t.Errorf("for a recall: %v", err)
		}
		leave()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Errorf("with its context at an end: %v", err)
		}
		c.Release(6)
		if err := <-other; lockStatus(err) != metarpc.Status(syscall.EBADF) {
			t.Errorf("of a file that was closed meanwhile: %v", err)
		}
		denied := o.denied.Load()

		o.lose() // once more
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(results) > 0 || o.denied.Load() != denied {
			t.Fatalf("after another session: %d calls answered, %d with EBADF", len(results), o.denied.Load()-denied)
		}
		close(o.gate)
		for range calls {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		<-resets
		if n := o.denied.Load() - denied; n != 0 {
			t.Errorf("%d calls were answered with EBADF", n)
		}
		if err := calls["reserve"](); err != nil {
			t.Errorf("later: %v", err)
		}
		if loss := c.opens.lostSince(5); loss != nil {
			t.Error("the file still counts as not opened again")
		}
	})
}

// A file that cannot be opened again does not keep calls waiting.
func TestReopenFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if a, ok := args.(*metarpc.OpenArgs); ok && !a.Reclaim {
				return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: a.ID}}
			}
			if op == metarpc.OpOpen || op == metarpc.OpReserve {
				return metarpc.Status(syscall.ESTALE), nil
			}
			return metarpc.StatusOK, nil
		}
		c := connected(t, s, Config{})
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: 5}); err != nil {
			t.Fatal(err)
		}
		s.forget()
		s.hangUp()
		time.Sleep(3 * turnMost) // until somebody reads
		synctest.Wait()
		if err := c.Reserve(t.Context(), &metarpc.ReserveArgs{ID: 5, Len: 1}, func(metarpc.ReserveResult) {}); lockStatus(err) != metarpc.Status(syscall.ESTALE) {
			t.Error(err)
		}
	})
}
