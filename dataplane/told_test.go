package dataplane_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/layout"
)

// tell tells the plane that server 1 is down since so long, or with less than zero that nothing is.
func (e *env) tell(silent bool, since time.Duration) {
	var down []dataplane.DownDevice
	if since >= 0 {
		down = append(down, dataplane.DownDevice{Device: e.servers[1].ID(), Silent: silent, For: since})
	}
	e.plane.SetDown(down)
}

// no time may pass while f runs.
func (e *env) atOnce(what string, f func()) {
	e.t.Helper()
	start := time.Now()
	f()
	if took := time.Since(start); took > 0 {
		e.t.Errorf("%s took %v", what, took)
	}
}

// A plane that is told of a server that is silent, or takes no writes, waits for it in no write, fsync or read, and
// sends it no writes.
func TestToldDown(t *testing.T) {
	for _, silent := range []bool{true, false} {
		for _, used := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t, options{servers: 2})
				old, oldSeg := e.plane.NewFile(), e.segment(4096, 1, 2)
				unstable, unstableSeg := e.plane.NewFile(), e.segment(4096, 1, 2)
				if used {
					e.write(old, oldSeg, 0, []byte("old"))
					e.commit(old)
					e.write(unstable, unstableSeg, 0, []byte("unstable"))
				}
				rules := []faultytest.Rule{{Kind: layout.OpWrite, Late: time.Hour}, {Kind: layout.OpCommit, Late: time.Hour}}
				if silent {
					rules = []faultytest.Rule{frozen(time.Hour)}
				}
				e.targets[1].SetRules(rules...)
				time.Sleep(time.Minute)
				e.tell(silent, 0)
				told := time.Now()
				writes := e.servers[1].Count(layout.OpWrite)
				for i := range 20 {
					e.atOnce("a write", func() {
						f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
						e.expectStuck(e.startWrite(f, seg, 0, []byte("new"), 0).wait(t), 1)
						f.Forsake(copyOf(seg, 1, 0))
						e.commit(f)
						e.check(f, seg, 0, []byte("new"))
					})
					if i%5 == 0 {
						e.tell(silent, time.Since(told)) // once more, with what else has changed
					}
					time.Sleep(mirrorTimeout)
				}
				if used {
					e.atOnce("an fsync", func() { e.expectStuck(unstable.Commit(e.ctx()), 1) })
					e.atOnce("a read", func() { e.check(old, oldSeg, 0, []byte("old")) })
				}
				if n := e.servers[1].Count(layout.OpWrite) - writes; n > 0 {
					t.Errorf("it was sent %d writes", n)
				}
				if down := e.plane.FoundDown(); len(down) > 0 {
					t.Errorf("%v were found down, of which it was told", down)
				}
				// It is well again.
				e.targets[1].SetRules()
				e.tell(silent, -1)
				f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
				e.write(f, seg, 0, []byte("again"))
				if got := e.mirror(seg, 1, 5, false); string(got) != "again" {
					t.Errorf("the copy has %q", got)
				}
			})
		}
	}
}

// The plane asks a server at once that it was told is down. An answer of the server ends the verdict.
func TestToldWrongly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.write(f, seg, 0, []byte("old"))
		reads := e.servers[1].Count(layout.OpRead)
		time.Sleep(time.Minute)
		// It has answered since: nothing is asked.
		e.tell(true, 2*time.Minute)
		synctest.Wait()
		e.write(f, seg, 0, []byte("a"))
		if n := e.servers[1].Count(layout.OpRead); n != reads {
			t.Errorf("it was asked %d times", n-reads)
		}
		// It has not: it is asked, and used when it has answered.
		time.Sleep(time.Minute)
		e.tell(true, 0)
		synctest.Wait()
		if n := e.servers[1].Count(layout.OpRead); n != reads+1 {
			t.Errorf("it was asked %d times, want once", n-reads)
		}
		e.write(f, seg, 0, []byte("b"))
		e.tell(true, time.Second) // the same once more
		e.write(f, seg, 0, []byte("c"))
		// It takes no writes: an answer to one that is under way, or was sent since, ends that.
		e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Late: mirrorTimeout / 2, Times: 1})
		time.Sleep(time.Millisecond) // after the answer to the last one
		s := e.startWrite(f, seg, 0, []byte("d"), 0)
		e.tell(false, 0)
		e.expectStuck(s.wait(t), 1)
		time.Sleep(mirrorTimeout)
		e.write(f, seg, 100, []byte("e"))
		// It stops, and has said so: it is waited for.
		e.targets[1].Announce(true)
		e.targets[1].SetRules(frozen(2 * mirrorTimeout))
		time.Sleep(time.Second)
		e.tell(true, 0)
		e.write(f, seg, 0, []byte("f"))
	})
}

// A server that was never used, and of which the plane was told wrongly, is asked by the first write, and used soon.
func TestToldBeforeUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Late: time.Millisecond})
		e.tell(true, time.Hour)
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		e.write(f, seg, 0, []byte("new")) // with both copies: it has answered before the other one
		if got := e.mirror(seg, 1, 3, false); string(got) != "new" {
			t.Errorf("the copy has %q", got)
		}
	})
}

// The plane says what it has found itself, once for each time, and until the server answers.
func TestFoundDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2})
		expect := func(what string, times int64, down ...layout.DeviceID) {
			t.Helper()
			if got := e.plane.FoundDown(); !slices.Equal(got, down) || e.found.Load() != times {
				t.Errorf("%s: %v, found %d times; want %v, %d times", what, got, e.found.Load(), down, times)
			}
		}
		id := e.servers[1].ID()
		expect("at first", 0)
		e.targets[1].SetRules(frozen(time.Minute))
		write := func() {
			e.expectStuck(e.startWrite(e.plane.NewFile(), e.segment(4096, 1, 2), 0, []byte("late"), 0).wait(t), 1)
		}
		write()
		write()
		expect("late", e.found.Load(), id)
		if n := e.found.Load(); n < 1 || n > 2 { // late, and stuck
			t.Errorf("found %d times", n)
		}
		e.targets[1].SetRules()
		time.Sleep(2 * time.Minute)
		before := e.found.Load()
		expect("answered", before)
		e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Late: time.Minute})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
		s := e.startWrite(f, seg, 0, []byte("stuck"), 0)
		time.Sleep(mirrorTimeout / 2)
		for range 8 {
			e.check(f, seg, 0, []byte("stuck")) // it answers reads
		}
		e.expectStuck(s.wait(t), 1)
		write()
		expect("stuck", before+1, id)
	})
}
