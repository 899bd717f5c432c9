package fs

import (
	"bytes"
	"context"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// reserving is a mount that appends where the service says, as another one has written, and a file of four bytes.
func reserving(t *testing.T, s *service) (r *rig, id layout.FileID, fh uint64) {
	r, other := newRig(t, s), newRig(t, s)
	id, fh = r.create("f")
	there := other.open(id, unix.O_WRONLY)
	other.write(id, 0, []byte("head"))
	other.want(other.fsync(id, there), 0, "fsync")
	t.Cleanup(func() {
		other.closeFile(id, there)
		r.closeFile(id, fh)
	})
	return r, id, fh
}

// outstanding is how many places nobody has said anything of.
func (s *service) outstanding() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.places)
}

func (s *service) newest() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lastPlace
}

// startAppend appends without waiting for it.
func (r *rig) startAppend(id layout.FileID, data string) <-chan fuse.Status {
	done := make(chan fuse.Status, 1)
	go func() { // ends with the append
		n, status := r.tryWrite(id, 0, []byte(data), unix.O_APPEND)
		if status == fuse.OK && n != len(data) {
			status = fuse.EIO
		}
		done <- status
	}()
	return done
}

// startRecall recalls places. It returns when that is heard, and closes answered with the answer.
func (r *rig) startRecall(t *testing.T, id layout.FileID, upto uint64) (answered <-chan struct{}) {
	done := make(chan struct{})
	go func() { // ends with the answer
		defer close(done)
		r.OnReserveRecall(t.Context(), id, upto)
	}()
	waittest.Until(t, "the recall is heard", func() bool {
		i := r.peek(id)
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.reserved.upto > 0
	})
	return done
}

// appendWithoutLayout starts an append of "record". The append has its place, and gets no layout until gate is closed.
func (r *rig) appendWithoutLayout(id layout.FileID) (done <-chan fuse.Status, gate chan struct{}) {
	gate = make(chan struct{})
	var waiting atomic.Bool
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "Layout" && waiting.CompareAndSwap(false, true) {
			<-gate
		}
		return nil
	})
	done = r.startAppend(id, "record")
	waittest.Until(r.t, "the append waits for a layout", waiting.Load)
	return done, gate
}

// Of an append that waits for its layout the place is given up at once when it is recalled, and it goes elsewhere.
func TestPlaceGivenUp(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	done, gate := r.appendWithoutLayout(id)
	r.OnReserveRecall(t.Context(), id, s.newest())
	close(gate)
	r.want(<-done, 0, "append")
	if n := r.m.called("Reserve"); n != 2 {
		t.Errorf("%d places for an append whose first one was recalled", n)
	}
	if got := r.read(id, 0, 100); string(got) != "head"+string(make([]byte, len("record")))+"record" {
		t.Errorf("%q", got)
	}
	waittest.Until(t, "the service knows what became of both", func() bool { return s.outstanding() == 0 })
}

// A place that was recalled before the mount heard of it is void.
func TestPlaceRecalledEarly(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	r.OnReserveRecall(t.Context(), id, s.newest()+1)
	r.want(<-r.startAppend(id, "record"), 0, "append")
	if n := r.m.called("Reserve"); n != 2 {
		t.Errorf("%d places", n)
	}
}

// What the data plane has is finished, and told, before a recall is answered.
func TestPlaceFinished(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	s.servers[0].Pause()
	writes := s.servers[0].Count(layout.OpWrite)
	done := r.startAppend(id, "record")
	waittest.Until(t, "the append is on its way", func() bool {
		i := r.peek(id)
		i.mu.Lock()
		defer i.mu.Unlock()
		return slices.ContainsFunc(i.reserved.list, func(p *reservation) bool { return p.writing > 0 })
	})
	answered := r.startRecall(t, id, s.newest())
	select {
	case <-answered:
		t.Error("a recall was answered while the write was on its way")
	default:
	}
	s.servers[0].Resume()
	<-answered
	if n := s.outstanding(); n != 0 {
		t.Errorf("%d places are not told of when the recall was answered", n)
	}
	r.want(<-done, 0, "append")
	if n := r.m.called("Reserve"); n != 1 || s.servers[0].Count(layout.OpWrite) == writes {
		t.Errorf("%d places", n)
	}
	r.wantRead(id, 0, 100, []byte("headrecord"))
}

// A data server may have some of an append whose WRITE has failed. A recall waits until that append is finished at its
// place, so that others do not find it twice.
func TestPlaceTriedAgain(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	gate := make(chan struct{})
	var waiting atomic.Bool
	r.m.setHook(func(ctx context.Context, call string) error {
		if call == "Layout" && r.faults[0].Applied(0) > 0 {
			waiting.Store(true)
			<-gate
		}
		return nil
	})
	r.faults[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: &testError{syscall.EACCES}, Times: 1})
	done := r.startAppend(id, "record")
	waittest.Until(t, "the append waits for another layout", waiting.Load)
	answered := r.startRecall(t, id, s.newest())
	close(gate)
	<-answered
	r.want(<-done, 0, "append")
	if n := r.m.called("Reserve"); n != 1 || s.outstanding() != 0 {
		t.Errorf("%d places, of which %d are not told of", n, s.outstanding())
	}
	r.wantRead(id, 0, 100, []byte("headrecord"))
}

// An append that was under way when the session ended may be in the file. It fails, and is not tried at another place.
func TestPlaceOfEndedSession(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, fh := reserving(t, s)
	s.servers[0].Pause()
	begun := r.startAppend(id, "begun")
	waittest.Until(t, "the append is on its way", func() bool {
		places := r.reservedPlaces(id)
		return len(places) == 1 && r.begun(id, places[0])
	})
	r.OnLost(0)
	r.OnReset(t.Context(), 0, true)
	s.servers[0].Resume()
	r.want(<-begun, syscall.EIO, "an append of before")
	if n := r.m.called("Reserve"); n != 1 {
		t.Errorf("%d places", n)
	}
	r.want(r.fsync(id, fh), syscall.EIO, "fsync")
	r.want(<-r.startAppend(id, "next"), 0, "append")
}

// The same goes for an append that found the end of the file under a lease.
func TestLeasedAppendOfEndedSession(t *testing.T) {
	s := newService(1, 64<<10)
	r := newRig(t, s)
	id, fh := r.create("f")
	r.want(<-r.startAppend(id, "head"), 0, "append")
	r.want(r.fsync(id, fh), 0, "fsync")
	s.servers[0].Pause()
	begun := r.startAppend(id, "begun")
	waittest.Until(t, "the append is on its way", func() bool {
		i := r.peek(id)
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.writes[0]+i.writes[1] > 0
	})
	r.OnLost(0)
	r.OnReset(t.Context(), 0, true)
	s.servers[0].Resume()
	r.want(<-begun, syscall.EIO, "an append of before")
	if n := r.m.called("Reserve"); n != 0 {
		t.Errorf("%d places", n)
	}
	r.want(r.fsync(id, fh), syscall.EIO, "fsync")
	r.closeFile(id, fh)
}

// The service knows of appends under a lease before the first of them, which costs one call for each layout.
func TestLeasedAppendAnnounced(t *testing.T) {
	r := newRig(t, newService(1, 64<<10))
	id, fh := r.create("f")
	r.write(id, 0, []byte("head"))
	if n := r.m.called("Layout"); n != 1 || r.m.awaited(id) {
		t.Fatalf("%d layouts, awaited: %v", n, r.m.awaited(id))
	}
	for range 3 {
		r.want(<-r.startAppend(id, "more"), 0, "append")
	}
	if n := r.m.called("Layout"); n != 2 || !r.m.awaited(id) || r.m.called("Reserve") != 0 {
		t.Errorf("%d layouts, awaited: %v, %d places", n, r.m.awaited(id), r.m.called("Reserve"))
	}
	r.closeFile(id, fh)
}

// Places that are written are told with the next append, so a loop of appends costs no other call; who asks for one
// that is under way hears of it as soon as it is written.
func TestPlacesTold(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	r.want(<-r.startAppend(id, "first"), 0, "append")
	reports := r.m.called("LayoutCommit provisional")
	for range 10 {
		r.want(<-r.startAppend(id, "x"), 0, "append")
		if n := s.outstanding(); n != 1 {
			t.Fatalf("%d places are not told of after an append", n)
		}
	}
	if n := r.m.called("LayoutCommit provisional") - reports; n != 0 {
		t.Errorf("%d reports for 10 appends", n)
	}
	s.servers[0].Pause()
	done := r.startAppend(id, "last")
	waittest.Until(t, "the append has its place", func() bool { return r.m.called("Reserve") == 12 })
	waittest.Until(t, "the append is on its way", func() bool { return len(r.reservedPlaces(id)) == 1 })
	r.OnSizeQuery(t.Context(), []layout.FileID{id})
	if n := s.outstanding(); n != 1 {
		t.Errorf("%d places are not told of, one is not written", n)
	}
	s.servers[0].Resume()
	r.want(<-done, 0, "append")
	waittest.Until(t, "it is told", func() bool { return s.outstanding() == 0 })
	if got := r.read(id, 0, 100); !bytes.HasSuffix(got, []byte("xlast")) {
		t.Errorf("%q", got)
	}
}

// A restarted service is told of the places that are not written yet.
func TestPlacesReclaimed(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	s.servers[0].Pause()
	done := r.startAppend(id, "record")
	waittest.Until(t, "the append is on its way", func() bool { return s.newest() == 1 && len(r.reservedPlaces(id)) == 1 })
	told := r.reclaimedPlaces()
	if len(told) != 1 || told[0].Number != 1 || told[0].Off != 4 || told[0].Len != int64(len("record")) || told[0].Mtime == 0 {
		t.Errorf("%+v", told)
	}
	s.servers[0].Resume()
	r.want(<-done, 0, "append")
	r.wantRead(id, 0, 100, []byte("headrecord"))
}

// A restarted service is not told of a place that was recalled. A truncation may have followed the recall, and the
// service would put other appends behind the place, where the file ended before.
func TestRecalledPlaceNotReclaimed(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	done, gate := r.appendWithoutLayout(id)
	r.OnReserveRecall(t.Context(), id, s.newest())
	if told := r.reclaimedPlaces(); len(told) != 0 {
		t.Errorf("%+v", told)
	}
	close(gate)
	r.want(<-done, 0, "append")
	if n := r.m.called("Reserve"); n != 2 {
		t.Errorf("%d places for an append whose first one was recalled", n)
	}
}

// An append that ends after it was found out what a restarted service is to be told, and before it is told, is told as
// written: the service does not know the place's number, and would give the place to others.
func TestPlaceWrittenWhileTold(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	i := r.peek(id)
	i.mu.Lock()
	before := i.report()
	i.mu.Unlock()
	r.want(<-r.startAppend(id, "record"), 0, "append")
	var end int64
	r.onCommit(func(_ context.Context, reports []metarpc.SizeReport) { end = reports[0].End })
	if _, err := r.tell(t.Context(), []report{before}, true); err != nil {
		t.Fatal(err)
	}
	r.onCommit(nil)
	if want := int64(len("headrecord")); end != want {
		t.Errorf("the service is told of %d bytes, want %d", end, want)
	}
}

// The service restarts after it has given a place and before the append goes on. The client must report the place.
// Otherwise the new instance gives the same place to another append.
func TestPlaceToldOfRestartAtOnce(t *testing.T) {
	s := newService(1, 64<<10)
	r, id, _ := reserving(t, s)
	var told []metarpc.Place
	r.m.placed = func() {
		r.m.placed = nil
		told = r.reclaimedPlaces()
	}
	r.want(<-r.startAppend(id, "record"), 0, "append")
	if len(told) != 1 || told[0].Off != int64(len("head")) || told[0].Len != int64(len("record")) {
		t.Errorf("the service is told of %+v", told)
	}
}

// onCommit has f called with what the service is told.
func (r *rig) onCommit(f func(context.Context, []metarpc.SizeReport)) {
	r.m.s.mu.Lock()
	defer r.m.s.mu.Unlock()
	r.m.commit = f
}

// reclaimedPlaces restarts the service and returns the places that it is told of.
func (r *rig) reclaimedPlaces() (told []metarpc.Place) {
	r.onCommit(func(_ context.Context, reports []metarpc.SizeReport) {
		for _, rep := range reports {
			told = append(told, rep.Reserved...)
		}
	})
	r.OnReset(context.Background(), 0, false)
	r.onCommit(nil)
	return told
}

func (r *rig) begun(id layout.FileID, p *reservation) bool {
	i := r.peek(id)
	i.mu.Lock()
	defer i.mu.Unlock()
	return p.begun()
}

func (r *rig) reservedPlaces(id layout.FileID) []*reservation {
	i := r.peek(id)
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.reserved.list)
}
