package meta

import (
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// appender is a client that appends to a file.
type appender struct {
	*client
	file  layout.FileID
	asked atomic.Int32 // what came: questions for sizes
	upto  atomic.Uint64
}

// newAppender has the file open and a layout for appending to it. back says what it answers when places are recalled,
// nil: at once.
func newAppender(h *host, f layout.FileID, back func(*metarpc.ReserveRecallArgs) metarpc.Status) *appender {
	a := &appender{client: h.client(), file: f}
	must[metarpc.AttrResult](a.client, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessWrite})
	must[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1, Append: true})
	a.mu.Lock()
	defer a.mu.Unlock()
	a.back = func(op metarpc.BackOp, args any) metarpc.Status {
		switch args := args.(type) {
		case *metarpc.SizeQueryArgs:
			a.asked.Add(1)
		case *metarpc.ReserveRecallArgs:
			a.upto.Store(args.Upto)
			if back != nil {
				return back(args)
			}
		}
		return metarpc.StatusOK
	}
	return a
}

func (a *appender) reserve(n int64) metarpc.ReserveResult {
	return must[metarpc.ReserveResult](a.client, metarpc.OpReserve, &metarpc.ReserveArgs{ID: a.file, Len: n})
}

func (a *appender) ended(numbers ...uint64) {
	a.report(true, metarpc.SizeReport{ID: a.file, Ended: numbers})
}

// inBubble runs a test in time of its own, with a file that two sessions append to and a third one looks at.
func inBubble(t *testing.T, do func(h *host, f layout.FileID, reader *client)) {
	bubble(t, func(t *testing.T, h *host) {
		reader := h.client()
		do(h, reader.touch(layout.RootID, "f"), reader)
	})
}

// A size is shown as far as all appends in front of it are written. Who has a place is asked first, so an append that
// has returned counts; one that nothing lies behind keeps nobody waiting.
func TestPlacesHidden(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a, b := newAppender(h, f, nil), newAppender(h, f, nil)
		began := time.Now()
		first := a.reserve(10)
		if got := reader.attr(f).Size; got != 0 || a.asked.Load() != 1 {
			t.Errorf("size %d while the only append is not written, asked %d times", got, a.asked.Load())
		}
		second := b.reserve(5)
		if second.Off != 10 {
			t.Errorf("second place at %d", second.Off)
		}
		if got := reader.attr(f).Size; got != 0 || time.Since(began) != 0 {
			t.Errorf("size %d after %v, nothing is written", got, time.Since(began))
		}
		b.ended(second.Number)
		hdr, ch := reader.begin(metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
		synctest.Wait()
		if len(ch) != 0 {
			t.Error("the size was told with an unwritten place in front of its end")
		}
		time.Sleep(placePatience / 2)
		a.ended(first.Number)
		var r metarpc.AttrResult
		if err := reader.finish(hdr, ch, &r); err != nil || r.Attr.Size != 15 || r.Attr.Mtime != max(first.Mtime, second.Mtime) {
			t.Errorf("%+v, %v", r.Attr, err)
		}
		if a.upto.Load() != 0 {
			t.Error("a place was recalled that was written in time")
		}
	})
}

// A place that is not written in time is recalled, and read as zeros if it is given up with something behind it. One
// behind which there is nothing is used again.
func TestPlacesLate(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a, b := newAppender(h, f, nil), newAppender(h, f, nil)
		first, second := a.reserve(10), b.reserve(5)
		b.ended(second.Number)
		began := time.Now()
		if got := reader.attr(f).Size; got != 15 || time.Since(began) != placePatience || a.upto.Load() != first.Number {
			t.Errorf("size %d after %v, recalled up to %d of %d", got, time.Since(began), a.upto.Load(), first.Number)
		}
		a.ended(first.Number) // too late, and no harm
		third := a.reserve(10)
		a.report(true, metarpc.SizeReport{ID: f, GivenUp: []uint64{third.Number}})
		if again := b.reserve(3); again.Off != third.Off || again.Number <= third.Number {
			t.Errorf("%+v after %+v was given up", again, third)
		}
	})
}

// In the grace period no place is recalled: its owner may need a layout to finish what it has begun there, and gets none.
// Sessions that wait for the place are told to ask again.
func TestPlacesInGrace(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a, b := newAppender(h, f, nil), newAppender(h, f, nil)
		first, second := a.reserve(10), b.reserve(5)
		h.files.write(t, f, 15)
		b.report(false, metarpc.SizeReport{ID: f, End: 15, Mtime: second.Mtime, Ended: []uint64{second.Number}})
		h.restart()
		for _, w := range []*appender{a, b} {
			w.connect()
			must[metarpc.AttrResult](w.client, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessWrite, Reclaim: true})
		}
		told := metarpc.Place{Number: first.Number, Off: first.Off, Len: 10, Mtime: first.Mtime}
		a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{told}})
		for _, w := range []*appender{a, b} {
			must[metarpc.Empty](w.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
		}
		reader.connect()
		_, err := ask[metarpc.AttrResult](reader, metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
		if wantStatus(t, err, metarpc.StatusGrace); a.upto.Load() != 0 {
			t.Errorf("recalled up to %d", a.upto.Load())
		}
		must[metarpc.Empty](reader, metarpc.OpReclaimComplete, &metarpc.Empty{})
		if got := reader.attr(f).Size; got != 15 || a.upto.Load() != first.Number {
			t.Errorf("size %d, recalled up to %d of %d", got, a.upto.Load(), first.Number)
		}
	})
}

// A session that does not say what becomes of its place loses it with its life, and is fenced first.
func TestPlacesOfSilent(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		silent := make(chan struct{})
		a := newAppender(h, f, func(*metarpc.ReserveRecallArgs) metarpc.Status {
			<-silent
			return metarpc.StatusOK
		})
		defer close(silent)
		b := newAppender(h, f, nil)
		a.reserve(10)
		second := b.reserve(5)
		h.files.write(t, f, 15)
		b.report(false, metarpc.SizeReport{ID: f, End: 15, Mtime: second.Mtime, Ended: []uint64{second.Number}})
		release := h.files.hold() // the fence
		began := time.Now()
		hdr, ch := reader.begin(metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
		h.files.awaitStalled(1)
		if took := time.Since(began); took != placePatience+placeAnswer {
			t.Errorf("fenced after %v", took)
		}
		synctest.Wait()
		if len(ch) != 0 {
			t.Error("the size was told before the session that had the place was fenced")
		}
		release()
		var r metarpc.AttrResult
		if err := reader.finish(hdr, ch, &r); err != nil || r.Attr.Size != 15 {
			t.Errorf("%+v, %v", r.Attr, err)
		}
	})
}

// The file is cut when all places are written or given up, whoever cuts it, and those who have finished theirs are not
// asked.
func TestPlacesCut(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		var a *appender
		var done metarpc.ReserveResult
		writing := make(chan struct{})
		a = newAppender(h, f, func(args *metarpc.ReserveRecallArgs) metarpc.Status {
			<-writing
			a.ended(done.Number)
			return metarpc.StatusOK
		})
		done = a.reserve(10)
		unsent := a.reserve(5)
		hdr, ch := reader.begin(metarpc.OpSetAttr, setSize(f, 4))
		synctest.Wait()
		if len(ch) != 0 || a.upto.Load() != unsent.Number {
			t.Errorf("cut before the places are gone: recalled up to %d of %d", a.upto.Load(), unsent.Number)
		}
		// An append that is begun may need a layout for another try.
		begin := time.Now()
		if end, err := a.layout(f, 6, 4); err != nil || end != 10 || time.Since(begin) != 0 {
			t.Errorf("layout at the place up to %d after %v, %v", end, time.Since(begin), err)
		}
		_, err := a.layout(f, 15, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		place, placed := a.begin(metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
		close(writing)
		if err := reader.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
			t.Error(err)
		}
		var again metarpc.ReserveResult
		if err := a.finish(place, placed, &again); err != nil || again.Off != 4 {
			t.Errorf("an append beside the cut: %+v, %v", again, err)
		}
		a.upto.Store(0)
		a.back = nil
		if r := must[metarpc.AttrResult](a.client, metarpc.OpSetAttr, setSize(f, 0)); r.Attr.Size != 0 || a.upto.Load() != 0 {
			t.Errorf("size %d, recalled from the one who cuts", r.Attr.Size)
		}
		if off := a.reserve(1).Off; off != 0 {
			t.Errorf("append at %d of an empty file", off)
		}
	})
}

// Ended places travel with the next Reserve.
func TestPlacesEndedByReserve(t *testing.T) {
	h := startMemory(t)
	reader := h.client()
	f := reader.touch(layout.RootID, "f")
	a := newAppender(h, f, nil)
	first := a.reserve(10)
	must[metarpc.ReserveResult](a.client, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5, Ended: []uint64{first.Number, 12345}})
	if got := reader.attr(f).Size; got != 10 {
		t.Errorf("size %d", got)
	}
	// A listing shows the same, and so does who asks for nothing.
	for _, e := range reader.list(layout.RootID, 10) {
		if e.Attr.Size != 10 {
			t.Errorf("listed with %d bytes", e.Attr.Size)
		}
	}
	if got := a.report(true, metarpc.SizeReport{ID: f, Atime: 1})[0].Size; got != 10 {
		t.Errorf("size %d in the answer to a report", got)
	}
}

// No lease on attributes is granted beside a place, be it the session's own.
func TestPlacesNoLease(t *testing.T) {
	h := startMemory(t)
	a := h.client()
	f := a.create(layout.RootID, "f")
	place := must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
	for _, c := range []*client{a, h.client()} {
		if lease := c.attrLease(f); lease != 0 {
			t.Errorf("lease %v", lease)
		}
	}
	a.report(true, metarpc.SizeReport{ID: f, Ended: []uint64{place.Number}})
	if lease := a.attrLease(f); lease == 0 {
		t.Error("no lease afterwards")
	}
}

// A place is told again after a restart, and keeps its number.
func TestPlacesReclaimed(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	f := a.create(layout.RootID, "f")
	rwAppend := &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1, Append: true}
	must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, rwAppend)
	place := must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 100})
	h.restart()
	b.connect()
	must[metarpc.Empty](b, metarpc.OpReclaimComplete, &metarpc.Empty{})
	a.connect()
	must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
	told := metarpc.Place{Number: place.Number, Off: place.Off, Len: 100, Mtime: place.Mtime}
	a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{told}})
	must[metarpc.Empty](a, metarpc.OpReclaimComplete, &metarpc.Empty{})
	late := told
	late.Number, late.Off = place.Number+1000, 100
	a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{late}}) // does not count any more
	next := must[metarpc.ReserveResult](b, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
	if next.Off != place.Off+100 || next.Number <= place.Number {
		t.Errorf("%+v after %+v", next, place)
	}
	b.report(true, metarpc.SizeReport{ID: f, GivenUp: []uint64{next.Number}})
	if got := b.attr(f).Size; got != 0 {
		t.Errorf("size %d before the place is written", got)
	}
	a.report(true, metarpc.SizeReport{ID: f, Ended: []uint64{place.Number}})
	if got := b.attr(f).Size; got != 100 {
		t.Errorf("size %d", got)
	}
}

// wantGrace has a client ask for attributes of a file, and be told to ask again.
func (c *client) wantGrace(f layout.FileID) {
	c.t.Helper()
	_, err := ask[metarpc.AttrResult](c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
	wantStatus(c.t, err, metarpc.StatusGrace)
}

// comeBack opens a file again after a restart.
func (a *appender) comeBack() metarpc.AttrResult {
	a.t.Helper()
	a.connect()
	return must[metarpc.AttrResult](a.client, metarpc.OpOpen, &metarpc.OpenArgs{ID: a.file, Reclaim: true})
}

func (c *client) reclaimed() {
	c.t.Helper()
	must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
}

// After a restart nobody is told how long a file is before those who append to it have told of their places, and
// nobody gets a place: the data files may have what lies behind one that is not written. Those who only begin to come
// back do not wait for each other.
func TestPlacesAwaited(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a, b := newAppender(h, f, nil), newAppender(h, f, nil)
		first, second := a.reserve(10), b.reserve(5)
		h.files.write(t, f, 15)
		b.report(true, metarpc.SizeReport{ID: f, End: 15, Mtime: second.Mtime, Ended: []uint64{second.Number}})
		h.restart()
		reader.connect()
		reader.wantGrace(f)
		reader.reclaimed()
		reader.wantGrace(f)
		_, err := ask[metarpc.ReadDirResult](reader, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: layout.RootID, Limit: 10})
		wantStatus(t, err, metarpc.StatusGrace)
		for _, w := range []*appender{a, b} {
			began := time.Now()
			if r := w.comeBack(); r.Attr.Size != 0 || r.Lease != 0 || time.Since(began) != 0 {
				t.Errorf("%+v after %v", r, time.Since(began))
			}
			w.wantGrace(f)
		}
		b.report(true, metarpc.SizeReport{ID: f, End: 15, Mtime: second.Mtime})
		b.reclaimed()
		a.report(true, metarpc.SizeReport{ID: f, Atime: 1}) // which it had under way and says nothing of its place
		reader.wantGrace(f)
		_, err = ask[metarpc.ReserveResult](b.client, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
		wantStatus(t, err, metarpc.StatusGrace)
		a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{{Number: first.Number, Off: first.Off, Len: 10, Mtime: first.Mtime}}})
		a.reclaimed()
		hdr, ch := reader.begin(metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
		synctest.Wait()
		if len(ch) != 0 {
			t.Error("the size was told with an unwritten place in front of its end")
		}
		a.ended(first.Number)
		var r metarpc.AttrResult
		if err := reader.finish(hdr, ch, &r); err != nil || r.Attr.Size != 15 {
			t.Errorf("%+v, %v", r.Attr, err)
		}
	})
}

// A session that opens a file again after a restart does not wait for the appends of others: these may need layouts, which
// are granted when all sessions have reclaimed. A session that takes longer than the grace period is awaited all the same.
func TestPlacesReclaimedSlowly(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a, b := newAppender(h, f, nil), newAppender(h, f, nil)
		first, second := a.reserve(10), b.reserve(5)
		h.files.write(t, f, 15)
		h.restart()
		reader.connect()
		defer renewing(reader)()
		reader.reclaimed()
		a.comeBack()
		defer renewing(a.client)()
		a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{
			{Number: first.Number, Off: first.Off, Len: 10, Mtime: first.Mtime},
		}})
		began := time.Now()
		b.comeBack()
		defer renewing(b.client)()
		if waited := time.Since(began); waited != 0 {
			t.Errorf("opened again after %v", waited)
		}
		a.ended(first.Number)
		a.reclaimed()
		time.Sleep(2 * h.lease)
		reader.wantGrace(f)
		b.report(true, metarpc.SizeReport{ID: f, End: 15, Mtime: second.Mtime})
		b.reclaimed()
		if got := reader.attr(f).Size; got != 15 {
			t.Errorf("size %d", got)
		}
	})
}

// An OPEN that is put off after a restart, because another session is awaited, does not close a file that its session
// has reclaimed meanwhile. Applications have that open, and it may have no name left.
func TestOpenPutOffBesideReclaim(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a, b := newAppender(h, f, nil), newAppender(h, f, nil)
		h.restart()
		reader.connect()
		reader.reclaimed()
		a.connect()
		hdr, ch := a.begin(metarpc.OpOpen, &metarpc.OpenArgs{ID: f})
		synctest.Wait()
		must[metarpc.AttrResult](a.client, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
		a.reclaimed()
		wantStatus(t, a.finish(hdr, ch, new(metarpc.AttrResult)), metarpc.StatusGrace)
		b.comeBack()
		b.reclaimed()
		must[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1})
		// One that is refused, and has not been opened otherwise, leaves nothing open.
		stranger := h.client()
		stranger.cred.UID = 1000
		_, err := ask[metarpc.AttrResult](stranger, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessWrite})
		wantStatus(t, err, metarpc.Status(syscall.EACCES))
		_, err = ask[metarpc.LayoutResult](stranger, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRead, Len: 1})
		wantStatus(t, err, metarpc.Status(syscall.EBADF))
	})
}

// No row says that a session has a place before it has a layout. So nobody gets a lease on the attributes before that
// session is back: an append under such a lease would go to the same place.
func TestNoLeaseBesideUnknownPlace(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	f := b.create(layout.RootID, "f")
	a.open(f)
	place := must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 10})
	h.restart()
	b.connect()
	if r := must[metarpc.AttrResult](b, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true}); r.Lease != 0 {
		t.Errorf("%v is granted with OPEN", r.Lease)
	}
	b.reclaimed()
	if r := must[metarpc.AttrResult](b, metarpc.OpGetAttr, &metarpc.IDArgs{ID: f}); r.Lease != 0 {
		t.Errorf("%v is granted in the grace period", r.Lease)
	}
	a.connect()
	must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
	a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{{Number: place.Number, Off: place.Off, Len: 10, Mtime: place.Mtime}}})
	a.reclaimed()
	if r := must[metarpc.AttrResult](b, metarpc.OpGetAttr, &metarpc.IDArgs{ID: f}); r.Lease != 0 {
		t.Errorf("%v is granted beside a place", r.Lease)
	}
	a.report(true, metarpc.SizeReport{ID: f, GivenUp: []uint64{place.Number}})
	if r := must[metarpc.AttrResult](b, metarpc.OpGetAttr, &metarpc.IDArgs{ID: f}); r.Lease&metarpc.LeaseAttrs == 0 {
		t.Error("no lease is granted when there is no place any more")
	}
}

// A place that is given up after a restart does not count, although something of it was written before.
func TestPlacesAwaitedGivenUp(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a := newAppender(h, f, nil)
		place := a.reserve(10)
		h.files.write(t, f, 7)
		h.restart()
		reader.connect()
		reader.reclaimed()
		a.comeBack()
		a.report(true, metarpc.SizeReport{ID: f, Reserved: []metarpc.Place{{Number: place.Number, Off: place.Off, Len: 10, Mtime: place.Mtime}}})
		a.reclaimed()
		if got := reader.attr(f).Size; got != 0 {
			t.Errorf("size %d", got)
		}
		a.report(true, metarpc.SizeReport{ID: f, GivenUp: []uint64{place.Number}})
		if got := reader.attr(f).Size; got != 0 {
			t.Errorf("size %d after it was given up", got)
		}
	})
}

// One who does not come back is waited for until the data files get nothing of him any more.
func TestPlacesAwaitedInVain(t *testing.T) {
	inBubble(t, func(h *host, f layout.FileID, reader *client) {
		a := newAppender(h, f, nil)
		a.reserve(10)
		h.files.write(t, f, 10)
		h.restart()
		reader.connect()
		defer renewing(reader)()
		reader.reclaimed()
		release := h.files.hold() // the fence
		began := time.Now()
		for time.Since(began) < h.lease {
			reader.wantGrace(f)
		}
		time.Sleep(h.lease / 2)
		hdr, ch := reader.begin(metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
		synctest.Wait()
		if len(ch) != 0 {
			t.Error("the size was told while an append may still arrive")
		}
		release()
		var r metarpc.AttrResult
		if err := reader.finish(hdr, ch, &r); err != nil || r.Attr.Size != 10 || a.asked.Load() != 0 {
			t.Errorf("%+v, %v, asked %d times", r.Attr, err, a.asked.Load())
		}
	})
}

// Of an append under a lease that is not acknowledged data files may have some. Its session will try it again, maybe at
// another place. So the data files are not asked how long the file is while that session may come back, also if it had
// its layout for other writes before.
func TestLeasedAppenderAwaited(t *testing.T) {
	for _, before := range []bool{false, true} {
		inBubble(t, func(h *host, f layout.FileID, reader *client) {
			a := h.client()
			a.open(f)
			if before {
				must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, rw(f))
			}
			get := rw(f)
			get.Await = true
			must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, get)
			must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, rw(f))
			a.report(false, metarpc.SizeReport{ID: f, End: 10, Mtime: 5})
			h.files.write(t, f, 15)
			h.restart()
			reader.connect()
			reader.reclaimed()
			reader.wantGrace(f)
			a.connect()
			must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
			a.report(true, metarpc.SizeReport{ID: f, End: 10, Mtime: 5})
			a.reclaimed()
			if got := reader.attr(f).Size; got != 10 {
				t.Errorf("size %d, of which 10 bytes are acknowledged", got)
			}
		})
	}
}

// A namespace does not tell where a file ends, so whoever writes one is awaited, for as long as he may come back.
func TestNamespaceWriterAwaited(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 3)
		a, lost, reader := w[0], w[1], w[2]
		f := a.id
		lost.mustGet(0, 1, all)
		lost.report(false, metarpc.SizeReport{ID: f, End: 1000, Mtime: 5})
		a.must(layout.IOModeRW, testUnit, 1, upTo(testUnit, layout.ToEOF))
		a.report(true, metarpc.SizeReport{ID: f, End: 9000, Mtime: 6})
		h.restart()
		defer renewing(reader.client)()
		reader.connect()
		reader.reclaimed()
		reader.wantGrace(f)
		a.connect()
		a.report(true, metarpc.SizeReport{ID: f, End: 9000, Mtime: 6})
		a.reclaimed()
		defer renewing(a.client)()
		reader.wantGrace(f)
		time.Sleep(h.lease + h.lease/2)
		if got := reader.attr(f).Size; got != 9000 {
			t.Errorf("size %d", got)
		}
	})
}

// A session that has its row for other writes says in it that it appends before it gets a place, and it stays said.
func TestPlacesAnnounced(t *testing.T) {
	h := startMemory(t)
	a := h.client()
	f := a.create(layout.RootID, "f")
	says := func(want bool) {
		t.Helper()
		key := schema.WriterKey(f, a.hello.Session)
		raw, err := h.engine.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		var row schema.Writer
		if err := schema.Decode(raw, &row); err != nil || row.Awaited != want {
			t.Errorf("%+v, %v", row, err)
		}
	}
	if _, err := a.layout(f, 0, 1); err != nil {
		t.Fatal(err)
	}
	says(false)
	must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
	says(true)
	if _, err := a.layout(f, 3*testUnit, 1); err != nil {
		t.Fatal(err)
	}
	says(true)
}

// A client that knows nothing of numbers reports its places as it always did: ahead of the write.
func TestPlacesOfOldClient(t *testing.T) {
	h := startMemory(t)
	reader := h.client()
	f := reader.touch(layout.RootID, "f")
	old, _ := h.greets(metarpc.Versions{Lowest: metarpc.Lowest, Highest: 5})
	old.open(f)
	if r := must[metarpc.ReserveResult](old, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 7}); r.Number != 0 {
		t.Errorf("%+v", r)
	}
	if got := reader.attr(f).Size; got != 7 {
		t.Errorf("size %d", got)
	}
	must[metarpc.AttrResult](reader, metarpc.OpSetAttr, setSize(f, 0))
}

// What was found out about quotas before a truncation does not count after it.
func TestPlacesQuotaBesideCut(t *testing.T) {
	h := startMemory(t)
	root, a := h.root(), h.root()
	top := root.mkdir(layout.RootID, "top")
	f := a.create(top, "f")
	root.limit(treeQuota(top), 100, 0)
	must[metarpc.AttrResult](a, metarpc.OpSetAttr, setSize(f, 100))
	_, err := ask[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 50})
	wantStatus(t, err, metarpc.Status(syscall.EDQUOT))
	first := must[metarpc.AttrResult](a, metarpc.OpSetAttr, setSize(f, 0))
	place := must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 80})
	if first.Attr.Size != 0 || place.Off != 0 {
		t.Errorf("%+v", place)
	}
	// A place counts before it is written, and no more when it is given up.
	_, err = ask[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 50})
	wantStatus(t, err, metarpc.Status(syscall.EDQUOT))
	must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 50, GivenUp: []uint64{place.Number}})
}
