package metaclient

import (
	"context"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const unit = 1 << 20

// segment is a wire segment of one server.
func segment(off, n int64, mode layout.IOMode) metarpc.Segment {
	return metarpc.Segment{Off: off, Len: n, IOMode: mode, StripeUnit: unit, Mirrors: [][]metarpc.DataFile{{{Handle: []byte{1}}}}}
}

// layouts grants the first unit for what lies in it, and the whole file otherwise.
func layouts(t *testing.T, get func(*metarpc.LayoutGetArgs) (metarpc.Status, *metarpc.LayoutResult)) func(metarpc.Op, any) (metarpc.Status, any) {
	return func(op metarpc.Op, args any) (metarpc.Status, any) {
		switch a := args.(type) {
		case *metarpc.LayoutGetArgs:
			if get != nil {
				if status, r := get(a); status != metarpc.StatusOK || r != nil {
					return status, r
				}
			}
			if a.IOMode == layout.IOModeRW && a.Off+a.Len <= unit {
				return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{segment(0, unit, a.IOMode)}}
			}
			return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{segment(0, layout.ToEOF, a.IOMode)}}
		case *metarpc.OpenArgs:
			return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: a.ID}}
		case *metarpc.LayoutCommitArgs:
			return metarpc.StatusOK, &metarpc.LayoutCommitResult{Attrs: make([]metarpc.Attr, len(a.Reports))}
		case *metarpc.CreateArgs:
			r := &metarpc.CreateResult{Attr: metarpc.Attr{ID: idOf(a.Name)}, Created: a.Exclusive}
			if a.Layout {
				r.Granted, r.Segments = true, []metarpc.Segment{segment(0, unit, layout.IOModeRW)}
			}
			return metarpc.StatusOK, r
		}
		return metarpc.StatusOK, nil
	}
}

func TestLayoutCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var asked []string
		s.handle = layouts(t, func(a *metarpc.LayoutGetArgs) (metarpc.Status, *metarpc.LayoutResult) {
			asked = append(asked, fmt.Sprintf("%d %v %d+%d", a.ID, a.IOMode, a.Off, a.Len))
			return metarpc.StatusOK, nil
		})
		c := connected(t, s, Config{})
		for _, step := range []struct {
			mode   layout.IOMode
			off, n int64
			asks   string // "" = from the cache
			end    int64
		}{
			{layout.IOModeRW, 0, 10, "5 rw 0+10", unit},
			{layout.IOModeRW, 100, unit, "", unit}, // the first part of it
			{layout.IOModeRead, 5, 5, "", unit},    // a layout for writing is one for reading
			{layout.IOModeRW, unit, 10, "5 rw 1048576+10", layout.ToEOF},
			{layout.IOModeRW, 1 << 40, 10, "", layout.ToEOF},
			{layout.IOModeRead, 1 << 40, 10, "", layout.ToEOF},
		} {
			asked = nil
			before := c.CachedLayout(5, step.mode, step.off, step.n)
			seg, err := c.Layout(t.Context(), 5, step.mode, step.off, step.n, Anywhere)
			if err != nil {
				t.Fatal(err)
			}
			want := []string{step.asks}
			if step.asks == "" {
				want = nil
			}
			if !slices.Equal(asked, want) || seg.End() != step.end || (before == nil) != (step.asks != "") {
				t.Errorf("%+v: asked %q, got %v, before %v", step, asked, seg.Range, before)
			}
		}
		// A layout for reading is none for writing, and is asked for as a whole.
		asked = nil
		if _, err := c.Layout(t.Context(), 6, layout.IOModeRead, 7, 5, Anywhere); err != nil || asked[0] != fmt.Sprint("6 read 7+", layout.ToEOF) {
			t.Errorf("%v, asked %q", err, asked)
		}
		if c.CachedLayout(6, layout.IOModeRW, 7, 5) != nil {
			t.Error("a layout for reading is given for writing")
		}
		if got := c.State().Layouts; got != 2 {
			t.Errorf("%d files cached", got)
		}
		if n := testing.AllocsPerRun(100, func() { c.CachedLayout(5, layout.IOModeRW, 1<<40, 10) }); n != 0 {
			t.Errorf("CachedLayout allocates %v times", n)
		}
		// Dropping is local, forgetting gives back.
		c.DropLayout(5, unit)
		if c.CachedLayout(5, layout.IOModeRW, 0, 1) != nil {
			t.Error("a segment that reaches past the cut was kept")
		}
		time.Sleep(time.Second)
		if n := s.executed(metarpc.OpLayoutReturn); n != 0 {
			t.Errorf("%d returns after DropLayout", n)
		}
		c.Forget(5)
		c.Forget(6)
		c.Forget(7) // never had any
		time.Sleep(time.Second)
		if n := s.executed(metarpc.OpLayoutReturn); n != 1 || c.State().Layouts != 0 {
			t.Errorf("%d returns, %d files cached", n, c.State().Layouts)
		}
	})
}

func TestHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = layouts(t, func(a *metarpc.LayoutGetArgs) (metarpc.Status, *metarpc.LayoutResult) {
			if a.IOMode == layout.IOModeRead && a.Off >= unit {
				return metarpc.StatusOK, &metarpc.LayoutResult{}
			}
			return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{segment(0, unit, a.IOMode)}}
		})
		c := connected(t, s, Config{})
		for range 2 {
			if seg, err := c.Layout(t.Context(), 5, layout.IOModeRead, unit, 10, Anywhere); seg != nil || err != nil {
				t.Errorf("hole: %v, %v", seg, err)
			}
		}
		if n := s.executed(metarpc.OpLayoutGet); n != 2 {
			t.Errorf("%d questions: a hole was remembered", n)
		}
		if seg, err := c.Layout(t.Context(), 5, layout.IOModeRead, 0, 10, Anywhere); seg == nil || err != nil {
			t.Errorf("data: %v, %v", seg, err)
		}
		if _, err := c.Layout(t.Context(), 5, layout.IOModeRW, unit, 10, Anywhere); !errors.Is(err, metarpc.ErrMalformed) {
			t.Errorf("writing where nothing is granted: %v", err)
		}
	})
}

func TestLayoutUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		n := 0
		s.handle = layouts(t, func(a *metarpc.LayoutGetArgs) (metarpc.Status, *metarpc.LayoutResult) {
			if n++; n <= 8 {
				return metarpc.StatusLayoutUnavailable, nil
			}
			return metarpc.StatusOK, nil
		})
		c := connected(t, s, Config{})
		began := time.Now()
		if _, err := c.Layout(t.Context(), 5, layout.IOModeRW, 0, 1, Anywhere); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took < 5*time.Second || took > 20*time.Second {
			t.Errorf("eight refusals took %v", took)
		}
		n = -1000
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := c.Layout(ctx, 6, layout.IOModeRW, 0, 1, Anywhere)
		var status *metarpc.Error
		if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &status) || status.Status != metarpc.StatusLayoutUnavailable {
			t.Error(err)
		}
	})
}

// TestRenewLayout asks for the credentials of what was written before: that is no layout, and is not kept.
func TestRenewLayout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		n := 0
		s.handle = layouts(t, func(a *metarpc.LayoutGetArgs) (metarpc.Status, *metarpc.LayoutResult) {
			if !a.Renew {
				t.Errorf("asked for %+v", a)
			}
			if n++; n <= 2 {
				return metarpc.StatusLayoutUnavailable, nil
			}
			return metarpc.StatusOK, nil
		})
		c := connected(t, s, Config{})
		segments, err := c.Renew(t.Context(), 5)
		if err != nil || len(segments) == 0 || n != 3 {
			t.Errorf("%d segments, %v after %d calls", len(segments), err, n)
		}
		if seg := c.CachedLayout(5, layout.IOModeRW, 0, 1); seg != nil {
			t.Errorf("kept: %+v", seg)
		}
	})
}

// The cache has room for so many files, and those used last stay.
func TestCacheLimit(t *testing.T) {
	k := cache{limit: 3}
	whole := []layout.Segment{{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW}}
	for id := range layout.FileID(5) {
		k.add(id, whole, Anywhere)
		k.find(0, layout.IOModeRW, 0, 1, Anywhere)
	}
	for id, want := range map[layout.FileID]bool{0: true, 1: false, 2: false, 3: true, 4: true} {
		if got := k.find(id, layout.IOModeRW, 0, 1, Anywhere) != nil; got != want {
			t.Errorf("file %d: cached %t", id, got)
		}
	}
	for i := range int64(2 * fileSegments) {
		k.add(9, []layout.Segment{{Range: layout.Range{Off: i * 10, Len: 10}, IOMode: layout.IOModeRead}}, Anywhere)
	}
	if n := len(k.files[9].Value.(*cached).layout.Segments); n != fileSegments {
		t.Errorf("%d segments of one file", n)
	}
	if k.find(9, layout.IOModeRead, 2*fileSegments*10-1, 1, Anywhere) == nil {
		t.Error("the last one is not among them")
	}
	before := k.find(9, layout.IOModeRead, 2*fileSegments*10-1, 1, Anywhere)
	want := *before
	k.add(9, whole, Anywhere)
	k.recall(9, layout.Range{Off: 0, Len: 1}, false)
	if before.Range != want.Range || k.find(9, layout.IOModeRead, 5, 1, Anywhere) != nil {
		t.Errorf("a segment in use has changed to %v, or was not recalled", before.Range)
	}
}

// What is granted before a recall is gone after it, and a recall is answered when the work is done.
func TestRecall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = layouts(t, nil)
		work := make(chan error)
		var c *Client
		c = connected(t, s, Config{OnRecall: func(ctx context.Context, id layout.FileID, off, n int64) error {
			if id != 5 || off != unit || n != layout.ToEOF {
				t.Errorf("recall of %d at %d+%d", id, off, n)
			}
			if c.CachedLayout(5, layout.IOModeRead, unit, 1) != nil {
				t.Error("the layout was still given out")
			}
			return <-work
		}})
		get := func(off int64) {
			if _, err := c.Layout(t.Context(), 5, layout.IOModeRead, off, 1, Anywhere); err != nil {
				t.Fatal(err)
			}
		}
		get(0)
		s.recall(1, 5, unit, layout.ToEOF)
		synctest.Wait()
		if len(s.backs) != 0 {
			t.Error("answered before the work was done")
		}
		get(0) // granted before the answer: may be what was being recalled
		work <- nil
		if b := <-s.backs; b.Number != 1 || b.Status != metarpc.StatusOK {
			t.Errorf("answer %+v", b)
		}
		if c.CachedLayout(5, layout.IOModeRead, 0, 1) != nil {
			t.Error("a layout survived the answer")
		}

		s.recall(2, 5, unit, layout.ToEOF)
		work <- &metarpc.Error{Status: metarpc.Status(syscall.ENOSPC)}
		if b := <-s.backs; b.Number != 2 || b.Status != metarpc.Status(syscall.ENOSPC) {
			t.Errorf("answer %+v", b)
		}
		s.recall(3, 5, unit, layout.ToEOF)
		work <- errors.New("no errno")
		if b := <-s.backs; b.Number != 3 || b.Status != metarpc.Status(syscall.EIO) {
			t.Errorf("answer %+v", b)
		}

		// The answer to a callback of a lost connection is of no use to the next one.
		s.recall(4, 5, unit, layout.ToEOF)
		synctest.Wait()
		s.hangUp()
		time.Sleep(time.Second)
		work <- nil
		synctest.Wait()
		if len(s.backs) != 0 {
			t.Error("an answer went to the wrong connection")
		}
		s.recall(5, 5, unit, layout.ToEOF)
		work <- nil
		if b := <-s.backs; b.Number != 5 {
			t.Errorf("answer %+v", b)
		}
	})
}

// All ordinary slots wait for a recall to be answered, for which calls are needed.
func TestRecallWhenAllSlotsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		answered := make(chan struct{})
		next := layouts(t, nil)
		b := &blocker{op: metarpc.OpSetAttr, gate: answered, ctx: s.ctx, next: func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpSetAttr {
				return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: 1}}
			}
			return next(op, args)
		}}
		s.handle = b.handle
		var c *Client
		c = connected(t, s, Config{OnRecall: func(ctx context.Context, id layout.FileID, off, n int64) error {
			_, err := c.LayoutCommit(ctx, []metarpc.SizeReport{{ID: id, End: 1}}, false)
			return err
		}})
		var wg sync.WaitGroup
		for range 2 * s.slots {
			wg.Go(func() {
				if _, err := c.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: 1, Mask: metarpc.SetSize}); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		for i := range 5 {
			s.recall(uint64(i), 5, 0, 1)
		}
		for range 5 {
			if b := <-s.backs; b.Status != metarpc.StatusOK {
				t.Errorf("answer %+v", b)
			}
		}
		close(answered)
		wg.Wait()
	})
}

// A service that floods the client with callbacks loses the connection.
func TestTooManyRecalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var most, now atomic.Int32
		release := make(chan struct{})
		c := connected(t, s, Config{OnRecall: func(context.Context, layout.FileID, int64, int64) error {
			most.Store(max(most.Load(), now.Add(1)))
			<-release
			now.Add(-1)
			return nil
		}})
		for i := range uint64(maxRecalls) {
			s.recall(i, layout.FileID(5+i), 0, 1)
		}
		synctest.Wait()
		if !c.State().Connected || now.Load() != maxRecalls {
			t.Errorf("connected %t, %d recalls", c.State().Connected, now.Load())
		}
		s.recall(maxRecalls, 5, 0, 1)
		synctest.Wait()
		if c.State().Connected {
			t.Error("the connection was kept")
		}
		close(release)
		time.Sleep(time.Second)
		if !c.State().Connected || most.Load() != maxRecalls {
			t.Errorf("connected %t, at most %d recalls", c.State().Connected, most.Load())
		}
	})
}

func TestOpenRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var closed []layout.FileID
		next := layouts(t, nil)
		gate := make(chan struct{})
		b := &blocker{op: metarpc.OpOpen, gate: gate, ctx: s.ctx, next: func(op metarpc.Op, args any) (metarpc.Status, any) {
			if a, ok := args.(*metarpc.CloseArgs); ok {
				closed = append(closed, a.IDs...)
			}
			return next(op, args)
		}}
		s.handle = b.handle
		c := connected(t, s, Config{})
		ctx := t.Context()

		// An Open whose caller has left is undone when its answer comes.
		short, cancel := context.WithTimeout(ctx, time.Second)
		if _, err := c.Open(short, metarpc.Cred{}, &metarpc.OpenArgs{ID: 5}); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		cancel()
		if len(closed) != 0 {
			t.Error("closed before it was open")
		}
		// But not if there is another caller by then.
		short, cancel = context.WithTimeout(ctx, time.Second)
		go c.Open(short, metarpc.Cred{}, &metarpc.OpenArgs{ID: 6})
		synctest.Wait()
		opened := make(chan error)
		go func() { _, err := c.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: 6}); opened <- err }()
		time.Sleep(2 * time.Second)
		cancel()
		close(gate)
		if err := <-opened; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if !slices.Equal(closed, []layout.FileID{5}) {
			t.Errorf("closed %v, want 5", closed)
		}
		// Releases add up to few calls.
		for id := range layout.FileID(2000) {
			c.opens.hold(100 + id)
			c.Release(100 + id)
		}
		c.Release(6)
		c.Release(6)
		c.Release(99) // never opened
		calls := s.executed(metarpc.OpClose)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := s.executed(metarpc.OpClose) - calls; n > 3 || len(closed) != 1+2000+1 {
			t.Errorf("%d files closed by %d calls", len(closed), n)
		}
		if len(c.opens.files) != 0 || c.opens.queue != nil {
			t.Errorf("the ledger still has %v, %v", c.opens.files, c.opens.queue)
		}

		// Create opens. What was there before is opened once more, because its Close may be on the way.
		opens := s.executed(metarpc.OpOpen)
		made, created, err := c.Create(ctx, metarpc.Cred{}, &metarpc.CreateArgs{Parent: 1, Name: "new", Exclusive: true})
		if err != nil || !created || !c.opens.holds(made.Attr.ID) || s.executed(metarpc.OpOpen) != opens {
			t.Errorf("new file: %v", err)
		}
		found, created, err := c.Create(ctx, metarpc.Cred{}, &metarpc.CreateArgs{Parent: 1, Name: "old"})
		if err != nil || created || !c.opens.holds(found.Attr.ID) || s.executed(metarpc.OpOpen) != opens+1 {
			t.Errorf("old file: %v", err)
		}
	})
}

// A Create whose caller has left leaves nothing open.
func TestAbandonedCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		gate := make(chan struct{})
		b := &blocker{op: metarpc.OpCreate, gate: gate, ctx: s.ctx, next: layouts(t, nil)}
		s.handle = b.handle
		c := connected(t, s, Config{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, err := c.Create(ctx, metarpc.Cred{}, &metarpc.CreateArgs{Parent: 1, Name: "a", Exclusive: true, Layout: true}); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		close(gate)
		time.Sleep(time.Second)
		synctest.Wait()
		if s.executed(metarpc.OpClose) != 1 || len(c.opens.files) != 0 {
			t.Errorf("%d closes, ledger %v", s.executed(metarpc.OpClose), c.opens.files)
		}
		if s.executed(metarpc.OpLayoutReturn) != 1 || len(c.grants.files) != 0 || c.cache.len() != 0 {
			t.Errorf("%d returns of layouts, ledger %v", s.executed(metarpc.OpLayoutReturn), c.grants.files)
		}
	})
}

// A file that comes with a layout is written without asking for one, and gives it back when it is let go.
func TestCreateWithLayout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var near []layout.DeviceID
		granted, segments := true, []metarpc.Segment{segment(0, unit, layout.IOModeRW)}
		next := layouts(t, nil)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if a, ok := args.(*metarpc.CreateArgs); ok && a.Layout {
				near = a.Near
				return metarpc.StatusOK, &metarpc.CreateResult{Attr: metarpc.Attr{ID: idOf(a.Name)}, Created: true, Granted: granted, Segments: segments}
			}
			return next(op, args)
		}
		c := connected(t, s, Config{Near: func() []layout.DeviceID { return []layout.DeviceID{{7}} }})
		create := func(name string) layout.FileID {
			t.Helper()
			a, created, err := c.Create(t.Context(), metarpc.Cred{}, &metarpc.CreateArgs{Parent: 1, Name: name, Exclusive: true, Layout: true})
			if err != nil || !created {
				t.Fatal(created, err)
			}
			return a.Attr.ID
		}
		id := create("a")
		if !slices.Equal(near, []layout.DeviceID{{7}}) {
			t.Errorf("near %v", near)
		}
		if seg := c.CachedLayout(id, layout.IOModeRW, 0, 1); seg == nil || seg.End() != unit {
			t.Errorf("cached: %v", seg)
		}
		if _, err := c.Layout(t.Context(), id, layout.IOModeRW, 0, unit, Anywhere); err != nil || s.executed(metarpc.OpLayoutGet) != 0 {
			t.Errorf("%v, asked %d times", err, s.executed(metarpc.OpLayoutGet))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := s.executed(metarpc.OpLayoutReturn); n != 0 {
			t.Errorf("%d returns of what is used", n)
		}
		c.Forget(id)
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := s.executed(metarpc.OpLayoutReturn); n != 1 || len(c.grants.files) != 0 {
			t.Errorf("%d returns, ledger %v", n, c.grants.files)
		}

		// What another instance has granted is given back, or asked for.
		segments = nil
		id = create("b")
		if _, err := c.Layout(t.Context(), id, layout.IOModeRW, 0, 1, Anywhere); err != nil || s.executed(metarpc.OpLayoutGet) != 1 {
			t.Errorf("%v, asked %d times", err, s.executed(metarpc.OpLayoutGet))
		}
		create("c")
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := s.executed(metarpc.OpLayoutReturn); n < 2 || !c.grants.holds(id) || c.grants.holds(idOf("c")) {
			t.Errorf("%d returns, ledger %v", n, c.grants.files)
		}
		granted = false
		create("d")
		synctest.Wait()
		if len(c.cache.creations) != 0 || c.grants.files[idOf("d")] != nil {
			t.Errorf("%d creations, ledger %v", len(c.cache.creations), c.grants.files)
		}
	})
}

// An answer that was lost is given again after its layout was recalled: the recall wins.
func TestRecallOvertakesCreate(t *testing.T) {
	for _, recalled := range []string{"a", "b"} {
		synctest.Test(t, func(t *testing.T) {
			s := newService(t)
			next := layouts(t, nil)
			s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
				if a, ok := args.(*metarpc.CreateArgs); ok {
					return metarpc.StatusOK, &metarpc.CreateResult{Attr: metarpc.Attr{ID: idOf(a.Name)}, Created: true, Granted: true,
						Segments: []metarpc.Segment{segment(0, layout.ToEOF, layout.IOModeRW)}}
				}
				return next(op, args)
			}
			var resent atomic.Bool
			s.cut = func(point string, op metarpc.Op) bool {
				if op != metarpc.OpCreate {
					return false
				}
				if point == "received" && resent.Load() { // what waited for a connection comes first
					s.recall(1, idOf(recalled), unit, 1)
					<-s.backs
				}
				return point == "executed" && !resent.Swap(true)
			}
			c := connected(t, s, Config{})
			a, created, err := c.Create(t.Context(), metarpc.Cred{}, &metarpc.CreateArgs{Parent: 1, Name: "a", Exclusive: true, Layout: true})
			if err != nil || !created {
				t.Fatal(created, err)
			}
			if kept := c.CachedLayout(a.Attr.ID, layout.IOModeRW, 0, 1) != nil; kept != (recalled == "b") {
				t.Errorf("recall of %s: layout kept %t", recalled, kept)
			}
			synctest.Wait()
			if !c.grants.holds(a.Attr.ID) || s.executed(metarpc.OpCreate) != 1 {
				t.Errorf("ledger %v, executed %d times", c.grants.files, s.executed(metarpc.OpCreate))
			}
		})
	}
}

// Taking and giving back are never outstanding together for one file, whatever callers do and however the connection
// fares, and in the end the service holds what callers want.
func TestNeverBoth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seed := mrand.Uint64()
		t.Logf("seed %d", seed)
		s := newService(t)
		const files = 4
		var mu sync.Mutex
		rng := mrand.New(mrand.NewPCG(seed, 2))
		roll := func(n int) int {
			mu.Lock()
			defer mu.Unlock()
			return rng.IntN(n)
		}
		type pair struct {
			take, give int
			held       bool
		}
		var opens, grants [files + 1]pair
		// begin and end are called around a slow execution, in which the order is up to chance.
		during := func(p *pair, give bool) {
			mu.Lock()
			if give {
				p.give++
			} else {
				p.take++
			}
			if p.give > 0 && p.take > 0 {
				t.Error("both outstanding for one file")
			}
			mu.Unlock()
			time.Sleep(time.Duration(roll(40)) * time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			if give {
				p.give--
			} else {
				p.take--
			}
			p.held = !give
		}
		next := layouts(t, nil)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			switch a := args.(type) {
			case *metarpc.OpenArgs:
				during(&opens[a.ID], false)
			case *metarpc.LayoutGetArgs:
				during(&grants[a.ID], false)
			case *metarpc.CloseArgs:
				for _, id := range a.IDs {
					during(&opens[id], true)
				}
			case *metarpc.LayoutReturnArgs:
				for _, id := range a.IDs {
					during(&grants[id], true)
				}
			}
			return next(op, args)
		}
		var calm atomic.Bool
		s.cut = func(string, metarpc.Op) bool { return !calm.Load() && roll(100) == 0 }
		c := connected(t, s, Config{})
		var wg sync.WaitGroup
		wanted := [files + 1]bool{}
		for id := layout.FileID(1); id <= files; id++ {
			wg.Go(func() {
				for range 200 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(roll(100))*time.Millisecond)
					if roll(2) == 0 {
						if _, err := c.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: id}); err == nil {
							wanted[id] = true
						}
					} else {
						c.Release(id)
						wanted[id] = false
					}
					if roll(2) == 0 {
						c.Layout(ctx, id, layout.IOModeRW, 0, 1, Anywhere)
					} else {
						c.Forget(id)
					}
					time.Sleep(time.Duration(roll(30)) * time.Millisecond)
					cancel()
				}
			})
		}
		wg.Wait()
		calm.Store(true)
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for id := 1; id <= files; id++ {
			if opens[id].held != wanted[id] {
				t.Errorf("file %d: open at the service %t, wanted %t", id, opens[id].held, wanted[id])
			}
			if cached := c.CachedLayout(layout.FileID(id), layout.IOModeRW, 0, 1) != nil; cached && !grants[id].held {
				t.Errorf("file %d: layout is cached but given back", id)
			}
		}
	})
}
