package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/layout"
)

// mirrorTimeout is what planes of the tests have.
const mirrorTimeout = time.Second

// hang makes a server answer nothing of a kind for an hour, though it carries out what it is asked.
func hang(kind layout.OpKind) faultytest.Rule { return faultytest.Rule{Kind: kind, Late: time.Hour} }

func copyOf(seg *layout.Segment, mirror, column int) []*layout.DataFile {
	return []*layout.DataFile{&seg.Mirrors[mirror].Servers[column]}
}

// A copy that does not answer while another does is given up after a while. What was written stays out of reach for later
// writes until the service has given up the copy, or it has answered.
func TestStuckWrite(t *testing.T) {
	for _, stable := range []layout.Stability{layout.Unstable, layout.FileSync} {
		for _, forsaken := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t, options{servers: 2})
				f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
				e.targets[1].SetRules(hang(layout.OpWrite))
				start := time.Now()
				err := e.startWrite(f, seg, 0, []byte("first"), stable).wait(t)
				if took := time.Since(start); took < mirrorTimeout || took > 2*mirrorTimeout {
					t.Errorf("took %v", took)
				}
				failed := dataplane.FailedCopies(err)
				if !errors.Is(err, dataplane.ErrStuck) || len(failed) != 1 || failed[0].Device != e.servers[1].ID() {
					t.Fatalf("write: %v, failed %v", err, failed)
				}
				e.targets[1].SetRules()
				synctest.Wait() // it has answered a read, so it is late no more
				again := e.startWrite(f, seg, 0, []byte("again"), stable)
				elsewhere := e.startWrite(f, seg, 100, []byte("there"), stable)
				if err := elsewhere.wait(t); err != nil {
					t.Errorf("write elsewhere: %v", err)
				}
				time.Sleep(3 * mirrorTimeout)
				if again.over() {
					t.Error("a write did not wait for one whose outcome is not known")
				}
				if forsaken {
					f.Forsake(copyOf(seg, 1, 0))
				} else {
					time.Sleep(time.Hour) // until it has answered after all
				}
				if err := again.wait(t); err != nil {
					t.Errorf("write in the same place: %v", err)
				}
				e.check(f, seg, 0, []byte("again"))
				e.commit(f)
				if got := e.mirror(seg, 0, 5, true); string(got) != "again" {
					t.Errorf("the good copy has %q", got)
				}
				if f.Dirty() {
					t.Error("still dirty")
				}
			})
		}
	}
}

// A write of which no copy has been taken waits: nobody can say which of them is the one that fails.
func TestAllStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		for _, target := range e.targets {
			target.SetRules(faultytest.Rule{Kind: layout.OpWrite, Late: 10 * mirrorTimeout})
		}
		start := time.Now()
		s := e.startWrite(f, seg, 0, []byte("data"), layout.Unstable)
		<-s.done
		if took := time.Since(start); s.err != nil || took < 10*mirrorTimeout {
			t.Errorf("%v after %v", s.err, took)
		}
	})
}

// A copy that is given up while a write is under way no longer counts; the write is acknowledged by the others.
func TestForsakeUnderWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 3})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 3)
		e.targets[1].SetRules(hang(layout.OpWrite))
		s := e.startWrite(f, seg, 0, []byte("data"), layout.Unstable)
		synctest.Wait()
		if s.over() {
			t.Fatal("over too early")
		}
		start := time.Now()
		f.Forsake(copyOf(seg, 1, 0))
		if err := s.wait(t); err != nil || time.Since(start) > time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		e.write(f, seg, 4, []byte("more"))
		e.commit(f)
		for range 4 {
			e.check(f, seg, 0, []byte("datamore"))
		}
		if n := e.servers[1].Count(layout.OpRead) + e.servers[1].Count(layout.OpCommit); n != 0 {
			t.Errorf("the copy that was given up was asked %d times", n)
		}
		// When the segment has no other copy any more, another one is needed.
		f.Forsake(copyOf(seg, 0, 0))
		f.Forsake(copyOf(seg, 2, 0))
		if err := e.startWrite(f, seg, 0, []byte("x"), 0).wait(t); !errors.Is(err, dataplane.ErrForsaken) {
			t.Errorf("write: %v", err)
		}
		if err := e.startRead(f, seg, 0, make([]byte, 1)).wait(t); !errors.Is(err, dataplane.ErrForsaken) {
			t.Errorf("read: %v", err)
		}
		if err := f.Punch(e.ctx(), seg, 0, 1, func(error) {}); !errors.Is(err, dataplane.ErrForsaken) {
			t.Errorf("punch: %v", err)
		}
	})
}

// Commit goes on without a copy that does not answer, once that is given up.
func TestStuckCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 4})
		f, seg := e.plane.NewFile(), e.segment(4096, 2, 2)
		e.write(f, seg, 0, bytes.Repeat([]byte("data"), 4000))
		e.targets[1].SetRules(hang(layout.OpCommit))
		err := f.Commit(context.Background())
		failed := dataplane.FailedCopies(err)
		if !errors.Is(err, dataplane.ErrStuck) || len(failed) == 0 {
			t.Fatalf("commit: %v", err)
		}
		for _, e := range failed {
			f.Forsake([]*layout.DataFile{e.File})
		}
		if err := f.Commit(context.Background()); err != nil || f.Dirty() {
			t.Errorf("commit without it: %v, dirty %v", err, f.Dirty())
		}
	})
}

// A server that has announced that it stops is waited for by writes and COMMITs, and not by reads. When its time is over
// it is as any other.
func TestAnnouncedStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.write(f, seg, 0, []byte("data"))
		e.targets[1].SetRules(hang(layout.OpCommit), hang(layout.OpRead), hang(layout.OpWrite))
		var before []*started // one of two at least asks server 1
		for range 4 {
			before = append(before, e.startRead(f, seg, 0, make([]byte, 4)))
		}
		e.targets[1].Announce(true)
		start := time.Now()
		for _, s := range before {
			if err := s.wait(t); err != nil {
				t.Error(err)
			}
		}
		for range 6 {
			e.check(f, seg, 0, []byte("data"))
		}
		if took := time.Since(start); took > mirrorTimeout {
			t.Errorf("6 reads took %v", took)
		}
		committed := make(chan error, 1)
		go func() { committed <- f.Commit(context.Background()) }() // ends when the copy is given up
		write := e.startWrite(f, seg, 100, []byte("more"), layout.Unstable)
		time.Sleep(3 * mirrorTimeout)
		if write.over() || len(committed) > 0 {
			t.Error("a write or COMMIT did not wait for the server")
		}
		e.targets[1].Announce(false)
		start = time.Now()
		for _, err := range []error{write.wait(t), <-committed} {
			if failed := dataplane.FailedCopies(err); !errors.Is(err, dataplane.ErrStuck) || len(failed) != 1 || failed[0].Device != e.servers[1].ID() {
				t.Errorf("%v, failed %v", err, failed)
			}
		}
		if took := time.Since(start); took < mirrorTimeout/2 || took > 2*mirrorTimeout {
			t.Errorf("took %v after the server's time was over", took)
		}
		f.Forsake(copyOf(seg, 1, 0))
	})
}

// A server that cannot reserve space has answered, too.
func TestStuckAllocate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		e.servers[0].Foreign()
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		answer := make(chan struct{})
		e.targets[1].OnSparse(func(string) error { <-answer; return nil })
		start := time.Now()
		err := f.Allocate(e.ctx(), seg, 0, 4096, false, ignore)
		if failed := dataplane.FailedCopies(err); !errors.Is(err, dataplane.ErrStuck) || len(failed) != 1 || failed[0].Device != e.servers[1].ID() {
			t.Errorf("allocate: %v, failed %v", err, failed)
		}
		if took := time.Since(start); took > 2*mirrorTimeout {
			t.Errorf("took %v", took)
		}
		f.Forsake(copyOf(seg, 1, 0))
		close(answer)
		if err := f.Allocate(e.ctx(), seg, 0, 4096, false, ignore); err != nil {
			t.Errorf("allocate without it: %v", err)
		}
	})
}

// A copy that is being filled is written and not read; one that is stale neither.
func TestCopyStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 3})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 3)
		seg.Mirrors[1].Servers[0].State = layout.CopyStale
		seg.Mirrors[2].Servers[0].State = layout.CopyFilling
		e.write(f, seg, 0, []byte("data"))
		e.commit(f)
		for range 6 {
			e.check(f, seg, 0, []byte("data"))
		}
		for i, want := range []struct{ reads, writes bool }{{true, true}, {false, false}, {false, true}} {
			if r, w := e.servers[i].Count(layout.OpRead), e.servers[i].Count(layout.OpWrite); (r > 0) != want.reads || (w > 0) != want.writes {
				t.Errorf("copy %d: %d reads, %d writes", i, r, w)
			}
		}
		// An error of the copy that is being filled is one.
		e.targets[2].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.EIO})
		err := e.startWrite(f, seg, 0, []byte("x"), 0).wait(t)
		if failed := dataplane.FailedCopies(err); len(failed) != 1 || failed[0].Device != e.servers[2].ID() {
			t.Errorf("write: %v", err)
		}
	})
}

// A read that is late is asked of another mirror as well. That is bounded; a mirror that does not answer at all is left, whatever
// the bound.
func TestHedge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		want := bytes.Repeat([]byte("data"), 1000)
		e.write(f, seg, 0, want)
		e.commit(f)
		timed := func() time.Duration {
			start := time.Now()
			e.check(f, seg, 0, want)
			return time.Since(start)
		}
		for range 400 {
			timed()
		}
		count := func() int { return e.servers[0].Count(layout.OpRead) + e.servers[1].Count(layout.OpRead) }
		before := count()
		// One answer in ten takes 50 ms; now and then it is the hedge that is slow.
		for _, target := range e.targets {
			target.SetRules(faultytest.Rule{Kind: layout.OpRead, Prob: 0.1, Late: 50 * time.Millisecond})
		}
		slow := 0
		const reads = 2000
		for range reads {
			if timed() >= 50*time.Millisecond {
				slow++
			}
		}
		if slow > reads/10*9/10 || count()-before > reads+reads/20+16 {
			t.Errorf("%d of %d reads were slow, %d were sent", slow, reads, count()-before)
		}
		e.targets[0].SetRules(hang(layout.OpRead))
		e.targets[1].SetRules()
		for range 100 {
			if took := timed(); took > 2*mirrorTimeout {
				t.Fatalf("a read waited %v for a mirror that does not answer", took)
			}
		}
	})
}

// A server that is slow gets fewer reads, and is asked again when it may have become fast.
func TestSlowMirror(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		want := []byte("data")
		e.write(f, seg, 0, want)
		e.commit(f)
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpRead, Late: 20 * time.Millisecond})
		e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpRead, Late: time.Millisecond})
		for range 50 {
			e.check(f, seg, 0, want)
		}
		before := e.servers[0].Count(layout.OpRead)
		for range 100 {
			e.check(f, seg, 0, want)
		}
		if n := e.servers[0].Count(layout.OpRead) - before; n > 20 {
			t.Errorf("the slow mirror was asked %d times of 100", n)
		}
		e.targets[0].SetRules()
		time.Sleep(time.Minute)
		for range 10 {
			e.check(f, seg, 0, want)
		}
		before = e.servers[0].Count(layout.OpRead)
		for range 100 {
			e.check(f, seg, 0, want)
		}
		if n := e.servers[0].Count(layout.OpRead) - before; n < 40 {
			t.Errorf("the mirror that is fast now was asked %d times of 100", n)
		}
	})
}

// nearTarget is on the same host as long as near says so.
type nearTarget struct {
	dataplane.Target
	near atomic.Bool
}

func (t *nearTarget) Near() bool { return t.near.Load() }

// A copy on the same host is read, whatever the others' efficiency, unless it fails.
func TestNear(t *testing.T) {
	e := newEnv(t, options{servers: 3})
	seg := e.segment(4096, 1, 3)
	seg.Mirrors[0].Servers[0].Efficiency = 1000
	near := &nearTarget{Target: e.targets[1]}
	e.plane = newPlane(t, 0, func(id layout.DeviceID) (dataplane.Target, error) {
		for i, s := range e.servers {
			if s.ID() == id && i != 1 {
				return e.targets[i], nil
			}
		}
		return near, nil
	})
	f := e.plane.NewFile()
	e.write(f, seg, 0, []byte("first")) // dials them all
	e.commit(f)
	const reads = 50
	readBy := func() (n [3]uint64) {
		t.Helper()
		for i, st := range e.plane.Stats() {
			n[i] -= st.Reads.Ops()
		}
		for range reads {
			e.check(f, seg, 0, []byte("first"))
		}
		for i, st := range e.plane.Stats() {
			n[i] += st.Reads.Ops()
		}
		return n
	}
	at := slices.IndexFunc(e.plane.Stats(), func(st dataplane.DeviceStats) bool { return st.Device == e.servers[1].ID() })
	if n := readBy(); n[at] > reads/10 {
		t.Errorf("%d of %d reads by a copy that is less efficient", n[at], reads)
	}
	near.near.Store(true)
	if n := readBy(); n[at] < reads*9/10 { // one that takes long on a busy machine is hedged
		t.Errorf("%d of %d reads by the copy that is near", n[at], reads)
	}
	e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpRead, Err: syscall.EIO})
	if n := readBy(); n[at] != 0 || n[0]+n[1]+n[2] < reads {
		t.Errorf("%v reads while the copy that is near fails", n)
	}
}

// fickle is near for so many questions.
type fickle struct {
	dataplane.Target
	n  atomic.Int32
	at int32
}

func (f *fickle) Near() bool { return f.n.Add(1) <= f.at }

// A server that is no longer near while a copy is chosen.
func TestNearEnds(t *testing.T) {
	for _, mirrors := range []int{2, 3} {
		e := newEnv(t, options{servers: mirrors})
		byID := map[layout.DeviceID]dataplane.Target{}
		f := &fickle{Target: e.targets[0], at: 1 << 30}
		for i, s := range e.servers {
			byID[s.ID()] = e.targets[i]
		}
		byID[e.servers[0].ID()] = f
		e.plane = newPlane(t, 0, func(id layout.DeviceID) (dataplane.Target, error) { return byID[id], nil })
		seg := e.segment(64<<10, 1, mirrors)
		file := e.plane.NewFile()
		e.write(file, seg, 0, make([]byte, 100))
		e.check(file, seg, 0, make([]byte, 100))
		for at := int32(0); at < 6; at++ {
			f.n.Store(0)
			f.at = at
			e.check(file, seg, 0, make([]byte, 100))
		}
	}
}
