package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	addrA = "192.0.2.1:4420"
	addrB = "192.0.2.2:4420"
)

// twoPaths runs a test in a bubble of time, with a namespace over two addresses.
func twoPaths(t *testing.T, change func(*SubsystemConfig), test func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA, addrB)
		s, n := f.use(change)
		synctest.Wait()
		test(t, f, s, n)
		if got := sum(s); got != 0 {
			t.Errorf("%d commands are still counted as under way", got)
		}
	})
}

// sum is the commands under way on all links.
func sum(s *Subsystem) (commands int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.members {
		if m.link != nil {
			commands += m.link.commands.Load()
		}
	}
	return commands
}

func (f *fakeTarget) count(addr string, op wire.Opcode) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ports[addr].ops[op]
}

func (f *fakeTarget) ctl(addr string) *fakeController {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ports[addr].ctl
}

// optimized makes only one address optimized, the others inaccessible.
func (f *fakeTarget) optimized(addr string) {
	for a, p := range f.ports {
		if a != addr {
			p.setANA(1, wire.ANAInaccessible)
		}
	}
	f.ports[addr].setANA(1, wire.ANAOptimized)
	synctest.Wait()
}

func TestReadAndWrite(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		want := blocksOf(7, 8, 1)
		if err := newRequest(wire.OpWrite, 7, want).start(n).wait(t); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if err := newRequest(wire.OpRead, 7, got).start(n).wait(t); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("read: %v, equal: %v", err, bytes.Equal(got, want))
		}
		if err := newRequest(wire.OpFlush, 0, nil).start(n).wait(t); err != nil {
			t.Fatal(err)
		}
		if n.Blocks() != 4096 || n.Format().BlockSize != fakeBlock || n.ID().UUID[15] != 1 {
			t.Errorf("namespace: %d blocks, %+v, %v", n.Blocks(), n.Format(), n.ID())
		}
	})
}

// TestPathLost: what a lost path has is done on the other one: reads and what was not sent at once, a write that was sent only when the
// association counts as gone.
func TestPathLost(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.optimized(addrA)
		f.ports[addrB].setANA(1, wire.ANAOptimized)
		s.SetPolicy(NUMA) // stays on A
		f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
		synctest.Wait()
		read := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
		write := newRequest(wire.OpWrite, 1, blocksOf(1, 1, 1)).start(n)
		unsent := newRequest(wire.OpWrite, 2, blocksOf(2, 1, 1))
		n.Start(&unsent.Request)
		time.Sleep(time.Second)
		cut := time.Now()
		f.ctl(addrA).cut(nil)
		for _, r := range []*testRequest{read, unsent} {
			if err := r.wait(t); err != nil {
				t.Fatal(err)
			}
		}
		if d := time.Since(cut); d > 10*time.Millisecond {
			t.Errorf("the read and the write that was not sent took %v", d)
		}
		if err := write.wait(t); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(cut); d < 10*time.Second || d > 10*time.Second+100*time.Millisecond {
			t.Errorf("the write that was sent took %v, want the 10 s until the association is gone", d)
		}
		if got := f.count(addrB, wire.OpWrite); got != 2 {
			t.Errorf("%d writes at %s, want 2", got, addrB)
		}
	})
}

// TestOldCopyDoesNotLandOverNewData: a write whose connection was lost lands late; a new one to the same blocks comes behind it.
func TestOldCopyDoesNotLandOverNewData(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.optimized(addrA)
		f.ports[addrB].setANA(1, wire.ANAOptimized)
		s.SetPolicy(NUMA)
		f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
		synctest.Wait()
		old := newRequest(wire.OpWrite, 5, blocksOf(5, 4, 1)).start(n)
		time.Sleep(time.Second)
		f.ctl(addrA).cut(func(*Command) (time.Duration, bool) { return time.Hour, true }) // as late as can be
		if err := old.wait(t); err != nil {
			t.Fatal(err)
		}
		want := blocksOf(5, 4, 2)
		if err := newRequest(wire.OpWrite, 5, want).start(n).wait(t); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		got := make([]byte, len(want))
		if err := newRequest(wire.OpRead, 5, got).start(n).wait(t); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("read: %v, got %.40q", err, got)
		}
	})
}

// TestWriteOnAddressRemoved: a write that the controller of an address which is left has not answered is not repeated before that has given
// the association up, however long its keep-alive time is.
func TestWriteOnAddressRemoved(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.optimized(addrA)
		f.set(addrA, func(p *fakePort) { p.latency, p.kato = time.Hour, 5*time.Minute })
		r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		f.ports[addrB].setANA(1, wire.ANAOptimized)
		s.SetAddrs([]string{addrB})
		time.Sleep(leaveTime + 4*time.Minute)
		if r.over() {
			t.Fatalf("ended too early, with %v", r.Err)
		}
		if err := r.wait(t); err != nil {
			t.Fatal(err)
		}
	})
}

func TestJudge(t *testing.T) {
	lost := func(sent bool) error { return &PathError{Sent: sent, Gone: time.Now().Add(time.Hour)} }
	status := func(s wire.Status, dnr bool) error { return testStatus(s, dnr) }
	for _, c := range []struct {
		err   error
		write bool
		want  action
		need  need
	}{
		{lost(false), true, doOther, needANA | needScan},
		{lost(true), true, doWait, needANA | needScan},
		{lost(true), false, doOther, needANA | needScan},
		{ErrClosed, false, doOther, 0},
		{ErrClosed, true, doWait, 0},
		{&DigestError{}, false, doRetry, 0},
		{&RequestError{}, true, doFail, 0},
		{context.Canceled, false, doFail, 0},
		{status(wire.StatusInvalidField, false), true, doFail, 0},
		{status(wire.StatusDataTransfer, false), true, doRetry, 0},
		{status(wire.StatusInternal, false), true, doRetry, 0},
		{status(wire.StatusInternal, true), true, doFail, 0},
		{status(wire.StatusAborted, false), true, doRetry, 0},
		{status(wire.StatusTransport, false), true, doRetry, 0},
		{status(wire.StatusInvalidNamespace, true), true, doOther, needScan},
		{status(wire.StatusSequence, false), true, doOther, needANA | needScan},
		{status(wire.StatusSequence, true), true, doOther, needANA | needScan},
		{status(wire.StatusWriteProtected, false), true, doFail, 0},
		{status(wire.StatusLBARange, true), true, doFail, 0},
		{status(wire.StatusCapacity, false), true, doFail, 0},
		{status(wire.StatusNotReady, false), true, doRetry, 0},
		{status(wire.StatusReserved, false), true, doFail, 0},
		{status(wire.StatusReadError, false), false, doFail, 0},
		{status(wire.StatusPathInternal, false), true, doOther, needScan},
		{status(wire.StatusANALoss, false), true, doOther, needANA},
		{status(wire.StatusANAInaccess, false), true, doOther, needANA},
		{status(wire.StatusANATransition, false), true, doOther, needANA},
		{status(wire.StatusANAInaccess, true), true, doFail, 0},
		{status(wire.StatusCtrlPathing, false), true, doOther, needScan},
		{status(wire.StatusHostPathAbort, false), true, doOther, needScan},
	} {
		if v := judge(c.err, c.write); v.what != c.want || v.need != c.need {
			t.Errorf("%v (write: %v): %+v, want action %d, need %d", c.err, c.write, v, c.want, c.need)
		}
	}
	if v := judge(&PathError{Sent: true}, true); v.delay != goneAtLatest {
		t.Errorf("a loss without a known end waits %v", v.delay)
	}
}

// TestRetries: an error is retried on the same path, five times, after the delay that the controller wants.
func TestRetries(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		s.SetPolicy(RoundRobin)
		for _, c := range []struct {
			fail    int
			dnr, ok bool
			tries   int
		}{{5, false, true, 6}, {6, false, false, 6}, {1, true, false, 1}} {
			left, tries := c.fail, 0
			var where []string
			for addr := range f.ports {
				f.set(addr, func(p *fakePort) {
					p.answer = func(*Command) (error, bool) {
						tries++
						where = append(where, addr)
						if left--; left < 0 {
							return nil, true
						}
						e := testStatus(wire.StatusInternal, c.dnr)
						e.Delay = 300 * time.Millisecond
						return e, true
					}
				})
			}
			began := time.Now()
			err := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n).wait(t)
			if (err == nil) != c.ok || tries != c.tries {
				t.Errorf("%+v: %v after %d tries", c, err, tries)
			}
			if d, want := time.Since(began), time.Duration(tries-1)*300*time.Millisecond; d < want || d > want+50*time.Millisecond {
				t.Errorf("%+v: took %v, want %v", c, d, want)
			}
			for _, addr := range where {
				if addr != where[0] {
					t.Errorf("%+v: tried at %v", c, where)
					break
				}
			}
		}
	})
}

// TestInternalPathError: another path is used at once, and it does not go on for ever.
func TestInternalPathError(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		bad := func(*Command) (error, bool) { return testStatus(wire.StatusPathInternal, false), true }
		f.set(addrA, func(p *fakePort) { p.answer = bad })
		began := time.Now()
		for range 20 {
			if err := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t); err != nil {
				t.Fatal(err)
			}
		}
		if d := time.Since(began); d > 100*time.Millisecond {
			t.Errorf("20 writes took %v", d)
		}
		f.set(addrB, func(p *fakePort) { p.answer = bad })
		err := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t)
		if !errors.Is(err, wire.StatusPathInternal) {
			t.Errorf("with both paths bad: %v", err)
		}
		if d := time.Since(began); d < 100*time.Millisecond || d > time.Minute {
			t.Errorf("it was given up after %v", d)
		}
	})
}

// TestHard: requests wait while a controller may come back, and fail when none may.
func TestHard(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.ctl(addrA).cut(nil)
		f.ctl(addrB).cut(nil)
		r := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
		time.Sleep(5 * time.Minute)
		if r.over() {
			t.Fatalf("ended with %v", r.Err)
		}
		f.ctl(addrA).become(StateFailing)
		time.Sleep(time.Minute)
		if r.over() {
			t.Fatalf("ended with %v", r.Err)
		}
		f.ctl(addrB).back()
		if err := r.wait(t); err != nil {
			t.Fatal(err)
		}
		f.ctl(addrB).cut(nil)
		r = newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
		time.Sleep(time.Minute)
		f.set(addrB, func(p *fakePort) { p.refuse = errors.New("no route") })
		f.ctl(addrB).become(StateDead)
		err := r.wait(t)
		if _, ok := errors.AsType[*NoPathError](err); !ok {
			t.Fatalf("ended with %v", err)
		}
		// A path that comes back after all is used again.
		f.ctl(addrA).back()
		synctest.Wait()
		if err := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n).wait(t); err != nil {
			t.Fatal(err)
		}
		f.set(addrB, func(p *fakePort) { p.refuse = nil })
		time.Sleep(time.Minute)
		f.ctl(addrA).cut(nil)
		if err := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n).wait(t); err != nil {
			t.Fatalf("over the address that was given up and came back: %v", err)
		}
	})
}

// TestSoft: requests that find no path end after the time that was given.
func TestSoft(t *testing.T) {
	soft := func(c *SubsystemConfig) {
		c.Patience = layout.Patience{Time: 20 * time.Second, Errno: syscall.ETIMEDOUT}
	}
	twoPaths(t, soft, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.optimized(addrA)
		f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
		write := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		time.Sleep(15 * time.Second)
		f.ctl(addrA).cut(nil)
		f.ctl(addrB).cut(nil)
		began := time.Now()
		read := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
		for _, c := range []struct {
			r    *testRequest
			want time.Duration
		}{{write, 10 * time.Second}, {read, 20 * time.Second}} {
			err := c.r.wait(t)
			timeout, ok := errors.AsType[*layout.TimeoutError](err)
			if !ok || timeout.Errno() != syscall.ETIMEDOUT {
				t.Errorf("ended with %v", err)
			}
			// The write not before it is known that it does not land any more.
			if d := time.Since(began); d < c.want || d > c.want+time.Second {
				t.Errorf("%v after %v, want %v", c.r.Op, d, c.want)
			}
		}
	})
}

func TestCloseSubsystem(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
		f.set(addrB, func(p *fakePort) { p.latency = time.Hour })
		var rs []*testRequest
		for i := range 6 {
			rs = append(rs, newRequest(wire.OpWrite, uint64(i), blocksOf(0, 1, 1)).start(n))
		}
		f.ctl(addrA).cut(nil) // some wait
		began := time.Now()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		rs = append(rs, newRequest(wire.OpRead, 0, make([]byte, 512)).start(n))
		for _, r := range rs {
			if err := r.wait(t); !errors.Is(err, ErrClosed) {
				t.Errorf("ended with %v", err)
			}
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("took %v", d)
		}
	})
}

// TestDetach: whatever state a request is in, its Data is let go of; a read ends, a write is done with what it had.
func TestDetachOnAnyPath(t *testing.T) {
	for _, state := range []string{"under way", "held", "failing over"} {
		t.Run(state, func(t *testing.T) {
			twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
				f.optimized(addrA)
				switch state {
				case "under way", "failing over":
					f.set(addrA, func(p *fakePort) { p.latency = time.Minute })
				case "held":
					f.ctl(addrA).cut(nil)
					f.ctl(addrB).cut(nil)
				}
				want := blocksOf(3, 2, 1)
				data := bytes.Clone(want)
				write := newRequest(wire.OpWrite, 3, data).start(n)
				buf := make([]byte, 512)
				read := newRequest(wire.OpRead, 3, buf).start(n)
				time.Sleep(time.Second)
				n.Detach(&write.Request)
				n.Detach(&read.Request)
				n.Detach(&write.Request)
				clear(data)
				if !errors.Is(read.wait(t), context.Canceled) {
					t.Errorf("the read ended with %v", read.Err)
				}
				switch state {
				case "failing over":
					f.ports[addrB].setANA(1, wire.ANAOptimized)
					f.ctl(addrA).cut(nil)
				case "held":
					f.ctl(addrA).back()
				}
				if err := write.wait(t); err != nil {
					t.Fatal(err)
				}
				n.Detach(&write.Request) // nothing
				f.mu.Lock()
				defer f.mu.Unlock()
				if got := f.spaces[1].data[3*512 : 5*512]; !bytes.Equal(got, want) {
					t.Errorf("written: %.40q", got)
				}
				if !bytes.Equal(buf, make([]byte, 512)) {
					t.Error("the read's buffer was touched")
				}
			})
		})
	}
}

// TestNoAllocations: once warm, a command over the good path allocates nothing and starts no goroutine.
func TestNoAllocations(t *testing.T) {
	f := newFakeTarget(t, addrA, addrB)
	for _, p := range f.ports {
		p.latency = 0
	}
	s, n := f.use(nil)
	r := new(Request)
	ended := false
	r.Command = Command{Op: wire.OpRead, Blocks: 1, Data: make([]byte, 512)}
	r.Done = func(*Request) { ended = true }
	for by := Adaptive; by <= QueueDepth; by++ {
		s.SetPolicy(by)
		if got := testing.AllocsPerRun(100, func() {
			ended = false
			n.Start(r)
			n.Flush()
			if !ended || r.Err != nil {
				t.Fatalf("ended: %v, %v", ended, r.Err)
			}
		}); got != 0 {
			t.Errorf("%v: %v allocations for each command", by, got)
		}
	}
}

func BenchmarkStart(b *testing.B) {
	for _, paths := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("paths=%d", paths), func(b *testing.B) {
			s := testSet(1, make([]class, paths)...)
			for _, p := range s.list {
				p.class.Store(uint32(classOptimized))
			}
			b.ReportAllocs()
			for b.Loop() {
				s.choose(Adaptive, 0, 4096, clock())
			}
		})
	}
}
