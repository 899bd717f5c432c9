package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/layout"
)

// frozen is a server that does what it is asked and tells nobody for so long.
func frozen(d time.Duration) faultytest.Rule { return faultytest.Rule{Late: d} }

// expectStuck holds that a write failed for the copies on one server alone.
func (e *env) expectStuck(err error, server int) {
	e.t.Helper()
	failed := dataplane.FailedCopies(err)
	if !errors.Is(err, dataplane.ErrStuck) || len(failed) != 1 || failed[0].Device != e.servers[server].ID() {
		e.t.Fatalf("%v, failed %v", err, failed)
	}
}

// makeLate freezes server 1 and has it found late.
func (e *env) makeLate() {
	e.t.Helper()
	e.targets[1].SetRules(frozen(time.Hour))
	e.expectStuck(e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("late"), 0).wait(e.t), 1)
}

// Many files in turn wait once for a server that does not answer or refuses connections, whatever is done to them.
func TestLateOnce(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t, options{servers: 2})
			type old struct {
				f   *dataplane.File
				seg *layout.Segment
			}
			var files []old
			for range 40 {
				o := old{e.plane.NewFile(), e.segment(4096, 1, 2)}
				e.write(o.f, o.seg, 0, []byte("old"))
				files = append(files, o)
			}
			e.targets[1].SetRules(frozen(time.Hour))
			e.targets[1].Refuse(refuse)
			limit := 2 * mirrorTimeout
			if refuse {
				limit = mirrorTimeout / 2
			}
			start := time.Now()
			for i, o := range files {
				var err error
				switch i % 4 {
				case 0:
					err = e.startWrite(o.f, o.seg, 0, []byte("new"), layout.Unstable).wait(t)
				case 1:
					err = o.f.Commit(context.Background())
				case 2:
					err = e.startWrite(o.f, o.seg, 0, []byte("new"), layout.FileSync).wait(t)
				case 3:
					e.check(o.f, o.seg, 0, []byte("old"))
					continue
				}
				e.expectStuck(err, 1)
				// Nothing that was not sent holds the range.
				o.f.Forsake(copyOf(o.seg, 1, 0))
				e.write(o.f, o.seg, 0, []byte("again"))
				e.commit(o.f)
				if got := e.mirror(o.seg, 0, 5, true); string(got) != "again" {
					t.Errorf("the good copy has %q", got)
				}
			}
			if took := time.Since(start); took > limit {
				t.Errorf("refused %v: %v for %d files, want at most %v", refuse, took, len(files), limit)
			}
		})
	}
}

// Nothing is sent to a late server but the write that it was found late by, and a question.
func TestLateSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		e.makeLate()
		before := e.servers[1].Count(layout.OpWrite)
		held := e.plane.Retained()
		for range 100 {
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			e.expectStuck(e.startWrite(f, seg, 0, make([]byte, 4096), 0).wait(t), 1)
			f.Forsake(copyOf(seg, 1, 0))
			e.commit(f)
		}
		if n := e.servers[1].Count(layout.OpWrite) - before; n != 0 {
			t.Errorf("it was sent %d writes", n)
		}
		if n := e.plane.Retained(); n != held {
			t.Errorf("%d bytes are retained, were %d", n, held)
		}
	})
}

// A late server that answers anything is written and read like any other.
func TestLateRecovers(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t, options{servers: 2})
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			e.write(f, seg, 0, []byte("old"))
			e.targets[1].SetRules(frozen(time.Minute))
			e.targets[1].Refuse(refuse)
			e.expectStuck(e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("late"), 0).wait(t), 1)
			e.expectStuck(e.startWrite(f, seg, 0, []byte("new"), 0).wait(t), 1)
			e.targets[1].SetRules()
			e.targets[1].Refuse(false)
			time.Sleep(2 * time.Minute) // nothing else asks it
			e.write(f, seg, 0, []byte("again"))
			e.commit(f)
			for m := range 2 {
				if got := e.mirror(seg, m, 5, true); string(got) != "again" {
					t.Errorf("copy %d has %q", m, got)
				}
			}
			before := e.servers[1].Count(layout.OpRead)
			for range 200 {
				e.check(f, seg, 0, []byte("again"))
			}
			if e.servers[1].Count(layout.OpRead) == before {
				t.Error("it is not read any more")
			}
			// Late again: it is waited for again, once.
			e.targets[1].SetRules(frozen(time.Hour))
			start := time.Now()
			e.expectStuck(e.startWrite(f, seg, 0, []byte("x"), 0).wait(t), 1)
			if took := time.Since(start); took < mirrorTimeout {
				t.Errorf("given up after %v", took)
			}
		})
	}
}

// A server that answers others is not late for leaving one request unanswered.
func TestSlowIsNotLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		other, seg2 := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.write(other, seg2, 0, []byte("old"))
		e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Late: time.Hour, Times: 1})
		s := e.startWrite(f, seg, 0, []byte("slow"), 0)
		for !s.over() {
			e.write(other, seg2, 0, []byte("new"))
			time.Sleep(mirrorTimeout / 10)
		}
		e.expectStuck(s.err, 1)
		e.write(other, seg2, 0, []byte("newer"))
	})
}

// If all servers are late, writes are sent to all and wait for all; the first to come back does not condemn the other.
func TestAllLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 3})
		pair := func(a, b int) *layout.Segment {
			seg := e.segment(4096, 1, 2)
			seg.Mirrors[0].Servers[0], seg.Mirrors[1].Servers[0] = *e.servers[a].NewFile(), *e.servers[b].NewFile()
			return seg
		}
		f, seg := e.plane.NewFile(), pair(1, 2)
		e.write(f, seg, 0, []byte("old"))
		for i, back := range []time.Duration{patience / 2, patience/2 + mirrorTimeout/2} {
			e.targets[i+1].SetRules(frozen(back))
			e.expectStuck(e.startWrite(e.plane.NewFile(), pair(0, i+1), 0, []byte("late"), 0).wait(t), i+1)
		}
		start := time.Now()
		e.write(f, seg, 0, []byte("new")) // without an error of either
		if took := time.Since(start); took < patience/2-3*mirrorTimeout {
			t.Errorf("took %v", took)
		}
		e.targets[1].SetRules()
		e.targets[2].SetRules()
		e.commit(f)
		e.check(f, seg, 0, []byte("new"))
	})
}

// A write that no good copy takes is sent to a late one after all, which has it once it is back.
func TestLateIsLast(t *testing.T) {
	for _, buffers := range []bool{false, true} {
		for _, stable := range []layout.Stability{layout.Unstable, layout.FileSync} {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t, options{servers: 2})
				e.buffers = buffers
				f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
				e.targets[1].SetRules(frozen(time.Minute))
				e.expectStuck(e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("late"), 0).wait(t), 1)
				e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.EIO})
				s := e.startWrite(f, seg, 0, []byte("data"), stable)
				<-s.done
				failed := dataplane.FailedCopies(s.err)
				if len(failed) != 1 || failed[0].Device != e.servers[0].ID() {
					t.Fatalf("%v", s.err)
				}
				if got := e.mirror(seg, 1, 4, false); string(got) != "data" {
					t.Errorf("the last copy has %q", got)
				}
			})
		}
	}
}

// A good copy that dies while another is held back does not keep the write waiting once that is back.
func TestLateReturnsUnderWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.targets[1].SetRules(frozen(10 * time.Second))
		e.expectStuck(e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("late"), 0).wait(t), 1)
		e.targets[0].SetRules(frozen(time.Hour))
		e.targets[1].SetRules()
		start := time.Now()
		s := e.startWrite(f, seg, 0, []byte("data"), 0)
		e.expectStuck(s.wait(t), 0)
		if took := time.Since(start); took > 10*time.Second+3*mirrorTimeout {
			t.Errorf("took %v", took)
		}
		if got := e.mirror(seg, 1, 4, false); string(got) != "data" {
			t.Errorf("the copy has %q", got)
		}
	})
}

// A write that was detached while a piece is held back ends, and touches its memory no more.
func TestLateDetach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		e.makeLate()
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Delay: time.Second, Err: syscall.EIO})
		s := e.startWrite(f, seg, 0, []byte("data"), layout.FileSync)
		s.wr.Detach()
		if err := s.wait(t); len(dataplane.FailedCopies(err)) != 2 {
			t.Errorf("%v", err)
		}
	})
}

// Reads in turn wait once for a server that does not answer, also if they alone find it late, and avoid it then.
func TestLateReads(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t, options{servers: 2})
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			want := bytes.Repeat([]byte("data"), 100)
			e.write(f, seg, 0, want)
			e.commit(f)
			e.targets[1].SetRules(frozen(time.Hour))
			e.targets[1].Refuse(refuse)
			start := time.Now()
			for range 100 {
				e.check(f, seg, 0, want)
				time.Sleep(10 * time.Second) // for long enough to be forgotten as slow
			}
			if took := time.Since(start) - 1000*time.Second; took > 2*mirrorTimeout {
				t.Errorf("refused %v: took %v", refuse, took)
			}
			// A copy that is slow is not left for one on a late server.
			e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpRead, Late: 5 * mirrorTimeout})
			s := e.startRead(f, seg, 0, make([]byte, len(want)))
			if err := s.wait(t); err != nil {
				t.Error(err)
			}
		})
	}
}

// A soft target gives up the question, too; the server is late until it has answered one.
func TestLateSoft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		patience := layout.Patience{Time: 5 * time.Second, Errno: syscall.EIO}
		e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpRead, Delay: patience.Time, Err: patience.Over(nil)}, frozen(time.Hour))
		write := func() (time.Duration, error) {
			start := time.Now()
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			err := e.startWrite(f, seg, 0, []byte("data"), 0).wait(t)
			return time.Since(start), err
		}
		for i := range 5 {
			took, err := write()
			e.expectStuck(err, 1)
			if i > 0 && took > mirrorTimeout/2 {
				t.Errorf("write %d took %v", i, took)
			}
			time.Sleep(7 * time.Second)
		}
		e.targets[1].SetRules()
		time.Sleep(2 * patience.Time)
		if _, err := write(); err != nil {
			t.Error(fmt.Errorf("after its return: %w", err))
		}
	})
}

// A server whose file system is frozen answers reads. It is waited for once by writes, until it answers one, or gives
// up.
func TestStuckOnce(t *testing.T) {
	gaveUp := (&layout.Patience{Time: time.Minute, Errno: syscall.EIO}).Over(nil)
	for name, rule := range map[string]faultytest.Rule{
		"frozen": {Kind: layout.OpWrite, Late: time.Minute},
		"soft":   {Kind: layout.OpWrite, Delay: time.Minute, Err: gaveUp},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t, options{servers: 2})
				old, oldSeg := e.plane.NewFile(), e.segment(4096, 1, 2)
				e.write(old, oldSeg, 0, []byte("old"))
				e.commit(old)
				e.targets[1].SetRules(rule)
				start, reads := time.Now(), e.servers[1].Count(layout.OpRead)
				for range 40 {
					f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
					e.expectStuck(e.startWrite(f, seg, 0, []byte("new"), 0).wait(t), 1)
					f.Forsake(copyOf(seg, 1, 0))
					e.commit(f)
					e.check(old, oldSeg, 0, []byte("old"))
				}
				if took := time.Since(start); took > 2*mirrorTimeout {
					t.Errorf("took %v", took)
				}
				if n := e.servers[1].Count(layout.OpRead) - reads; n < 5 {
					t.Errorf("it was read %d times", n)
				}
				time.Sleep(2 * time.Minute) // what it was found stuck by has ended
				if name == "soft" {
					start = time.Now()
					e.expectStuck(e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("new"), 0).wait(t), 1)
					if took := time.Since(start); took < mirrorTimeout {
						t.Errorf("given up after %v", took)
					}
					time.Sleep(2 * time.Minute)
				}
				e.targets[1].SetRules()
				f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
				e.write(f, seg, 0, []byte("again"))
				e.commit(f)
				if got := e.mirror(seg, 1, 5, true); string(got) != "again" {
					t.Errorf("the copy has %q", got)
				}
			})
		})
	}
}

// hangs is a disk that does not answer: what has to reach it waits, and the rest does not.
func hangs(d time.Duration) faultytest.Rule {
	return faultytest.Rule{Late: d, Match: func(op *layout.Op) bool { return op.Kind == layout.OpCommit || op.Stable != layout.Unstable }}
}

// A server whose disk hangs takes WRITEs. It is waited for once by COMMITs, whether the data was written before or is
// written then, until what has to reach the disk is answered.
func TestUnsyncedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		var files []*dataplane.File
		var segs []*layout.Segment
		for range 40 {
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			files, segs = append(files, f), append(segs, seg)
			e.write(f, seg, 0, []byte("old"))
		}
		e.targets[1].SetRules(hangs(time.Hour))
		start := time.Now()
		for i, f := range files {
			e.expectStuck(f.Commit(context.Background()), 1)
			f.Forsake(copyOf(segs[i], 1, 0))
			e.check(f, segs[i], 0, []byte("old"))
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			e.expectStuck(e.startWrite(f, seg, 0, []byte("new"), 0).wait(t), 1)
			f.Forsake(copyOf(seg, 1, 0))
			e.commit(f)
		}
		if took := time.Since(start); took > 3*mirrorTimeout/2 {
			t.Errorf("took %v", took)
		}
		// Trials are not waited for either.
		e.targets[0].SetRules(faultytest.Rule{Late: mirrorTimeout / 20})
		start = time.Now()
		for range 10 {
			time.Sleep(2 * mirrorTimeout)
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			e.expectStuck(e.startWrite(f, seg, 0, []byte("new"), 0).wait(t), 1)
			f.Forsake(copyOf(seg, 1, 0))
		}
		if took := time.Since(start) - 20*mirrorTimeout; took > mirrorTimeout {
			t.Errorf("trials took %v", took)
		}
		e.targets[0].SetRules()
		e.targets[1].SetRules()
		time.Sleep(2 * mirrorTimeout)
		// The trial WRITE is answered, which ends the verdict.
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.startWrite(f, seg, 0, []byte("trial"), 0).wait(t)
		f, seg = e.plane.NewFile(), e.segment(4096, 1, 2)
		e.write(f, seg, 0, []byte("again"))
		e.commit(f)
		if got := e.mirror(seg, 1, 5, true); string(got) != "again" {
			t.Errorf("the copy has %q", got)
		}
	})
}

// A server that was away when it left a COMMIT unanswered is written like any other when it is back.
func TestUnsyncedAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.write(f, seg, 0, []byte("old"))
		e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpCommit, Late: time.Hour}, frozen(time.Minute)) // nobody waits for the COMMIT
		e.expectStuck(f.Commit(context.Background()), 1)
		f.Forsake(copyOf(seg, 1, 0))
		time.Sleep(2 * time.Minute)
		e.targets[1].SetRules(frozen(time.Millisecond))
		var writes []*started
		for range 3 {
			writes = append(writes, e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("new"), 0))
		}
		for _, s := range writes {
			if err := s.wait(t); err != nil {
				t.Error(err)
			}
		}
	})
}

// A server that was away for a short time is no slow one: it is not waited for longer the next time.
func TestAwayIsNotSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		for i := range 3 {
			e.targets[1].SetRules(frozen(3 * mirrorTimeout))
			f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
			start := time.Now()
			e.expectStuck(e.startWrite(f, seg, 0, []byte("data"), layout.FileSync).wait(t), 1)
			if took := time.Since(start); took > 3*mirrorTimeout/2 {
				t.Errorf("time %d: %v", i, took)
			}
			e.targets[1].SetRules()
			time.Sleep(4 * mirrorTimeout) // it has answered all
		}
	})
}
