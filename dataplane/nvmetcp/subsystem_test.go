package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// served reads once and returns the address that served it, "" if the read waits.
func served(t *testing.T, f *fakeTarget, n *Namespace) string {
	t.Helper()
	before := map[string]int{}
	for addr := range f.ports {
		before[addr] = f.count(addr, wire.OpRead)
	}
	r := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
	time.Sleep(100 * time.Millisecond)
	if !r.over() {
		n.Detach(&r.Request)
		return ""
	}
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	for addr := range f.ports {
		if f.count(addr, wire.OpRead) > before[addr] {
			return addr
		}
	}
	return "nobody"
}

// TestANAStates walks through all states, by events.
func TestANAStates(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		for _, c := range []struct {
			a, b wire.ANAState
			want string
		}{
			{wire.ANAOptimized, wire.ANANonOptimized, addrA},
			{wire.ANANonOptimized, wire.ANAOptimized, addrB},
			{wire.ANANonOptimized, wire.ANAInaccessible, addrA},
			{wire.ANALoss, wire.ANANonOptimized, addrB},
			{wire.ANAInaccessible, wire.ANAInaccessible, ""},
			{wire.ANAChange, wire.ANAOptimized, addrB},
			{wire.ANAChange, wire.ANALoss, ""},
			{wire.ANAOptimized, wire.ANALoss, addrA},
		} {
			for by := Adaptive; by <= QueueDepth; by++ {
				s.SetPolicy(by)
				f.ports[addrA].setANA(1, c.a)
				f.ports[addrB].setANA(1, c.b)
				synctest.Wait()
				if got := served(t, f, n); got != c.want {
					t.Errorf("%v: %v and %v: read at %q, want %q", by, c.a, c.b, got, c.want)
				}
			}
		}
	})
}

// TestANAErrors: without an event, the status of a command has the log read, and the command is done elsewhere or waits; what waits is
// done as soon as an event says that it can.
func TestANAErrors(t *testing.T) {
	for _, state := range []wire.ANAState{wire.ANAInaccessible, wire.ANALoss, wire.ANAChange} {
		t.Run(state.String(), func(t *testing.T) {
			twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
				s.SetPolicy(NUMA)
				reads := f.anaReads(addrA)
				f.set(addrA, func(p *fakePort) { p.ana[1] = state; p.change++ })
				if err := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if got := f.anaReads(addrA); got == reads {
					t.Error("the ANA log was not read")
				}
				before := f.count(addrA, wire.OpWrite)
				if err := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t); err != nil {
					t.Fatal(err)
				}
				if f.count(addrA, wire.OpWrite) != before {
					t.Error("the path is used again")
				}
				f.ports[addrB].setANA(1, wire.ANAInaccessible)
				synctest.Wait()
				r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
				time.Sleep(5 * time.Second)
				if r.over() {
					t.Fatalf("ended with %v", r.Err)
				}
				began := time.Now()
				f.ports[addrA].setANA(1, wire.ANANonOptimized)
				if err := r.wait(t); err != nil {
					t.Fatal(err)
				}
				if d := time.Since(began); d > 10*time.Millisecond {
					t.Errorf("it took %v from the event", d)
				}
			})
		})
	}
}

// TestANALiar: a log that contradicts the answers is not read, nor the command sent, without end and pause.
func TestANALiar(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		for addr := range f.ports {
			f.set(addr, func(p *fakePort) {
				p.answer = func(*Command) (error, bool) { return testStatus(wire.StatusANAInaccess, false), true }
			})
		}
		r := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
		time.Sleep(time.Minute)
		for addr := range f.ports {
			if got := f.count(addr, wire.OpRead); got > 60 {
				t.Errorf("%d reads at %s in a minute", got, addr)
			}
			f.set(addr, func(p *fakePort) { p.answer = nil })
		}
		if err := r.wait(t); err != nil {
			t.Fatal(err)
		}
	})
}

// TestANAChangeTimer: a controller whose group stays in the state change is reset after twice ANATT, and not before or otherwise.
func TestANAChangeTimer(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		a := f.ports[addrA]
		a.setANA(1, wire.ANAChange)
		time.Sleep(2*testANATT - time.Second)
		a.setANA(2, wire.ANAChange) // does not begin it anew
		time.Sleep(time.Second / 2)
		if f.resets(addrA) != 0 {
			t.Fatal("reset too early")
		}
		time.Sleep(time.Second)
		if f.resets(addrA) != 1 {
			t.Fatalf("%d resets after twice ANATT", f.resets(addrA))
		}
		a.setANA(1, wire.ANAOptimized)
		a.setANA(2, wire.ANAOptimized)
		time.Sleep(testANATT)
		a.setANA(1, wire.ANAChange)
		time.Sleep(testANATT)
		a.setANA(1, wire.ANAInaccessible)
		time.Sleep(10 * testANATT)
		if f.resets(addrA) != 1 {
			t.Fatalf("%d resets although the change ended", f.resets(addrA))
		}
	})
}

// TestANAChangeTimerAfterLoss: the time of a change begins anew with the association.
func TestANAChangeTimerAfterLoss(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.ports[addrA].setANA(1, wire.ANAChange)
		time.Sleep(2*testANATT - 2*time.Second)
		f.ctl(addrA).cut(nil)
		time.Sleep(time.Second)
		f.ctl(addrA).back()
		time.Sleep(2*testANATT - time.Second)
		if f.resets(addrA) != 0 {
			t.Error("reset too early")
		}
		time.Sleep(2 * time.Second)
		if f.resets(addrA) != 1 {
			t.Errorf("%d resets after twice ANATT", f.resets(addrA))
		}
	})
}

// TestANAGroups: states are those of a controller and a group, and a namespace may move to another group.
func TestANAGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA, addrB)
		f.spaces[2] = newFakeSpace(2, 64, 2)
		f.spaces[3] = newFakeSpace(3, 64, 0)
		f.ports[addrA].ana[2] = wire.ANAInaccessible
		f.ports[addrB].ana[1] = wire.ANAInaccessible
		s, one := f.use(nil)
		synctest.Wait()
		two, err := s.Namespace(2)
		if err != nil {
			t.Fatal(err)
		}
		three, err := s.Namespace(3)
		if err != nil {
			t.Fatal(err)
		}
		if a, b := served(t, f, one), served(t, f, two); a != addrA || b != addrB {
			t.Errorf("group 1 at %q, group 2 at %q", a, b)
		}
		if served(t, f, three) == "" {
			t.Error("a namespace without a group is out of use")
		}
		f.mu.Lock()
		f.spaces[2].ns.ANAGRPID = 1
		f.mu.Unlock()
		f.ports[addrA].event(wire.EventANAChanged)
		f.ports[addrB].event(wire.EventANAChanged)
		synctest.Wait()
		if got := served(t, f, two); got != addrA {
			t.Errorf("moved to group 1: at %q", got)
		}
	})
}

// wholeLog is a controller that sends its ANA log from the start whatever the offset, as Linux does.
type wholeLog struct {
	*fakeController
	reads int
}

func (c *wholeLog) GetLogPage(_ context.Context, get wire.GetLogPage, b []byte) error {
	c.reads++
	clear(b)
	copy(b, c.port.anaLog())
	return nil
}

// TestReadWholeANA: a log that the controller sends only as a whole.
func TestReadWholeANA(t *testing.T) {
	f := newFakeTarget(t, addrA)
	p := f.ports[addrA]
	for nsid := uint32(10); nsid < 1010; nsid++ {
		f.spaces[nsid] = newFakeSpace(0, 0, 1+nsid%100)
	}
	for g := range uint32(128) {
		p.ana[g+1] = wire.ANAOptimized
	}
	ctl, _ := f.dial(t.Context(), Config{Addr: addrA})
	c := &wholeLog{fakeController: ctl.(*fakeController)}
	g, err := readANA(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if len(g.states) != 128 || len(g.groups) != 1001 {
		t.Errorf("%d groups, %d namespaces", len(g.states), len(g.groups))
	}
	if c.reads > 4 {
		t.Errorf("%d reads", c.reads)
	}
}

func TestWithoutANA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA, addrB)
		for _, p := range f.ports {
			p.ana = nil
		}
		s, n := f.use(nil)
		s.SetPolicy(RoundRobin)
		synctest.Wait()
		seen := map[string]bool{}
		for range 4 {
			seen[served(t, f, n)] = true
		}
		if !seen[addrA] || !seen[addrB] {
			t.Errorf("used: %v", seen)
		}
	})
}

// TestReadANA: the log comes in pieces, and is read again if it moves.
func TestReadANA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA)
		for nsid := uint32(10); nsid < 3000; nsid++ {
			f.spaces[nsid] = newFakeSpace(0, 0, 1+nsid%7)
		}
		p := f.ports[addrA]
		for g := range uint32(8) {
			p.ana[g+1] = wire.ANANonOptimized
		}
		p.moves = 3
		ctl, _ := f.dial(t.Context(), Config{Addr: addrA})
		g, err := readANA(t.Context(), ctl)
		if err != nil {
			t.Fatal(err)
		}
		if len(g.states) != 8 || len(g.groups) != 2991 || g.groups[20] != 1+20%7 {
			t.Errorf("%d groups, %d namespaces, 20 in %d", len(g.states), len(g.groups), g.groups[20])
		}
		p.moves = 1 << 30
		if _, err := readANA(t.Context(), ctl); !errors.Is(err, errMoves) {
			t.Errorf("of a log that always moves: %v", err)
		}
		p.moves = 0
		p.ana[9] = 7
		if _, err := readANA(t.Context(), ctl); !errors.Is(err, wire.ErrInvalid) {
			t.Errorf("of a log with an unknown state: %v", err)
		}
	})
}

// TestReconnectLooksFirst: after a reconnect nothing is sent before the namespaces were compared.
func TestReconnectLooksFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA)
		_, n := f.use(nil)
		synctest.Wait()
		other := newFakeSpace(9, 4096, 1)
		f.ctl(addrA).cut(nil)
		r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		f.set(addrA, func(p *fakePort) { p.spaces = map[uint32]*fakeSpace{1: other} })
		f.ctl(addrA).back()
		err := r.wait(t)
		if gone, ok := errors.AsType[*GoneError](err); !ok || gone.Now == nil || gone.Now.UUID[15] != 9 {
			t.Errorf("ended with %v", err)
		}
		if !bytes.Equal(other.data, make([]byte, len(other.data))) {
			t.Error("the other namespace was written to")
		}
	})
}

// TestGone: a namespace that is removed fails, and is the same when it comes back.
func TestGone(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.mu.Lock()
		was := f.spaces[1]
		delete(f.spaces, 1)
		f.mu.Unlock()
		f.ports[addrA].event(wire.EventNamespaceChanged) // the other address says nothing: the status of I/O tells
		err := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n).wait(t)
		if _, ok := errors.AsType[*GoneError](err); !ok && !errors.Is(err, wire.StatusInvalidNamespace) {
			t.Errorf("ended with %v", err)
		}
		synctest.Wait()
		err = newRequest(wire.OpRead, 0, make([]byte, 512)).start(n).wait(t)
		if _, ok := errors.AsType[*GoneError](err); !ok {
			t.Errorf("ended with %v", err)
		}
		if _, err := s.Namespace(1); err == nil || !strings.Contains(err.Error(), testNQN) || !strings.Contains(err.Error(), addrA) {
			t.Errorf("looked up: %v", err)
		}
		f.mu.Lock()
		f.spaces[1] = was
		f.mu.Unlock()
		f.ports[addrA].event(wire.EventNamespaceChanged)
		synctest.Wait()
		if err := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n).wait(t); err != nil {
			t.Fatal(err)
		}
	})
}

// TestRemovedFromOneController: the other one serves it, without an error.
func TestRemovedFromOneController(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		s.SetPolicy(NUMA)
		f.set(addrA, func(p *fakePort) { p.spaces = map[uint32]*fakeSpace{} })
		if err := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t); err != nil {
			t.Fatal(err)
		}
	})
}

func TestResize(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		f.mu.Lock()
		f.spaces[1].ns.NSZE, f.spaces[1].ns.NCAP = 8192, 8192
		f.mu.Unlock()
		f.ports[addrB].event(wire.EventNamespaceChanged)
		synctest.Wait()
		if n.Blocks() != 8192 {
			t.Errorf("%d blocks", n.Blocks())
		}
		// Both paths are in use: the other controller was asked too.
		s.SetPolicy(RoundRobin)
		seen := map[string]bool{}
		for range 4 {
			seen[served(t, f, n)] = true
		}
		if len(seen) != 2 {
			t.Errorf("used: %v", seen)
		}
		// A controller that has another size than the one told last is not used.
		smaller := *f.spaces[1]
		smaller.ns.NSZE, smaller.ns.NCAP = 100, 100
		f.set(addrA, func(p *fakePort) { p.spaces = map[uint32]*fakeSpace{1: &smaller} })
		f.ports[addrA].event(wire.EventNamespaceChanged)
		synctest.Wait()
		for range 4 {
			if got := served(t, f, n); got != addrA {
				t.Errorf("used: %q", got)
			}
		}
		if why := s.Stats().Namespaces[0].Paths[1].Why; !strings.Contains(why, "8192 blocks") {
			t.Errorf("the other path: %q", why)
		}
	})
}

// TestRefused: what cannot be one namespace is not used as one, and the error says where and what.
func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(f *fakeTarget)
		nsid   uint32 // that cannot be used at all, or
		addr   string // over which namespace 1 cannot
		want   string
	}{
		"another identifier": {func(f *fakeTarget) {
			f.ports[addrB].spaces = map[uint32]*fakeSpace{1: newFakeSpace(7, 4096, 1)}
		}, 0, addrB, "namespace 1 is uuid 00000000-0000-0000-0000-000000000007 here but uuid"},
		"another block size": {func(f *fakeTarget) {
			other := *f.spaces[1]
			other.ns.BlockShift = 12
			f.ports[addrB].spaces = map[uint32]*fakeSpace{1: &other}
		}, 0, addrB, "blocks of 4096 bytes instead of 512"},
		"smaller transfers": {func(f *fakeTarget) { f.ports[addrB].mdts = 4096 }, 0, addrB, "takes 4096 bytes"},
		"no identifier": {func(f *fakeTarget) {
			f.spaces[2] = newFakeSpace(0, 64, 1)
		}, 2, "", "no UUID, NGUID or EUI64"},
		"metadata": {func(f *fakeTarget) {
			f.spaces[2] = newFakeSpace(2, 64, 1)
			f.spaces[2].ns.Metadata = 8
		}, 2, "", "8 bytes of metadata"},
		"no blocks": {func(f *fakeTarget) {
			f.spaces[2] = newFakeSpace(2, 0, 1)
		}, 2, "", "has no blocks"},
		"zoned": {func(f *fakeTarget) {
			f.spaces[2] = newFakeSpace(2, 64, 1)
			f.spaces[2].ids.CSI, f.spaces[2].ids.HasCSI = 2, true
		}, 2, "", "command set 2"},
		"twice": {func(f *fakeTarget) {
			f.spaces[2] = newFakeSpace(1, 64, 1)
		}, 2, "", "namespace 2 and namespace 1 of " + testNQN + " both are uuid"},
		"in another subsystem": {func(f *fakeTarget) {
			f.spaces[2] = newFakeSpace(2, 64, 1)
		}, 2, "", "namespace 2 and namespace 5 of nqn.other both are uuid"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeTarget(t, addrA, addrB)
				c.change(f)
				ids := new(IDs)
				if err := ids.claim(ID{UUID: [16]byte{15: 2}}, "nqn.other", 5); err != nil {
					t.Fatal(err)
				}
				s, err := f.open(func(cfg *SubsystemConfig) {
					cfg.Addrs = []string{addrA}
					if name == "in another subsystem" {
						cfg.IDs = ids
					}
				})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				synctest.Wait()
				s.SetAddrs([]string{addrA, addrB})
				synctest.Wait()
				if c.nsid != 0 {
					_, err := s.Namespace(c.nsid)
					if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), addrA+" of "+testNQN) {
						t.Errorf("namespace %d: %v, want %q", c.nsid, err, c.want)
					}
				}
				n, err := s.Namespace(1)
				if err != nil {
					t.Fatal(err)
				}
				s.SetPolicy(RoundRobin)
				for range 4 {
					if got := served(t, f, n); c.addr != "" && got == c.addr {
						t.Errorf("read at %s", got)
					}
				}
				if c.addr != "" {
					st := s.Stats()
					if len(st.Controllers[1].Refused) != 1 || !strings.Contains(st.Controllers[1].Refused[0].Error(), c.want) {
						t.Errorf("refused at %s: %v, want %q", c.addr, st.Controllers[1].Refused, c.want)
					}
				}
			})
		})
	}
}

// TestOpenErrors: nothing can be used: the errors of all addresses are told.
func TestOpenErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA, addrB)
		f.ports[addrA].refuse = errors.New("no route")
		f.ports[addrB].admin = func(what string, _ uint32) error { return testStatus(wire.StatusInternal, true) }
		_, err := f.open(nil)
		if err == nil || !strings.Contains(err.Error(), "no route") || !strings.Contains(err.Error(), addrB+" of "+testNQN) {
			t.Errorf("got %v", err)
		}
		if _, err := f.open(func(c *SubsystemConfig) { c.Addrs = nil }); err == nil {
			t.Error("a subsystem without an address")
		}
		if _, err := f.open(func(c *SubsystemConfig) { c.Addrs = []string{"nonsense"} }); err == nil {
			t.Error("an address that is none")
		}
		if _, err := f.open(func(c *SubsystemConfig) { c.Controller.HostID = [16]byte{} }); err == nil {
			t.Error("a host without HOSTID")
		}
	})
}

// TestGivenUpSaysWhy: the error of a controller that is not expected back, and that of a request, say why.
func TestGivenUpSaysWhy(t *testing.T) {
	for _, state := range []State{StateFailing, StateDead} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakeTarget(t, addrA)
			s, n := f.use(nil)
			synctest.Wait()
			c := f.ctl(addrA)
			c.mu.Lock()
			c.why = &ConnectError{Addr: addrA, NQN: testNQN, Step: "connect admin queue", Final: true, Err: errors.New("host not allowed"), Advice: "allow it"}
			c.mu.Unlock()
			c.cut(nil)
			r := newRequest(wire.OpRead, 0, make([]byte, 512)).start(n)
			c.become(state)
			if err := r.wait(t); err == nil || !strings.Contains(err.Error(), "host not allowed: allow it") {
				t.Errorf("%v: %v", state, err)
			}
			synctest.Wait()
			if err := s.Stats().Controllers[0].Err; state == StateDead && (err == nil || !strings.Contains(err.Error(), "host not allowed: allow it")) {
				t.Errorf("%v: of the address: %v", state, err)
			}
		})
	}
}

// TestAddressLater: an address that cannot be reached at first is used as soon as it can.
func TestAddressLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA, addrB)
		f.ports[addrA].refuse = errors.New("no route")
		_, n := f.use(nil)
		time.Sleep(time.Minute)
		f.set(addrA, func(p *fakePort) { p.refuse = nil })
		time.Sleep(DefaultReconnectDelay)
		f.ctl(addrB).cut(nil)
		if got := served(t, f, n); got != addrA {
			t.Errorf("read at %q", got)
		}
	})
}

// TestSetAddrs: addresses come and go under load, without an error, and what is under way is waited for.
func TestSetAddrs(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		s.SetAddrs([]string{addrA})
		synctest.Wait()
		f.set(addrA, func(p *fakePort) { p.latency = time.Second })
		old := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		s.SetAddrs([]string{addrB})
		synctest.Wait()
		began := time.Now()
		r := newRequest(wire.OpWrite, 1, blocksOf(1, 1, 1)).start(n)
		if err := r.wait(t); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d > time.Second/2 {
			t.Errorf("the new address was used after %v", d)
		}
		if err := old.wait(t); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d < time.Second/2 || d > 2*time.Second {
			t.Errorf("the old write took %v", d)
		}
		time.Sleep(time.Minute)
		if f.ctl(addrA).State() != StateDead {
			t.Error("the old controller is still connected")
		}
		s.SetAddrs(nil)
		if got := s.Addrs(); len(got) != 1 || got[0] != addrB {
			t.Errorf("addresses: %v", got)
		}
	})
}

// TestRandomFaults: random losses, ANA changes, errors and changes of addresses under random reads and writes. No
// request fails while there is a path or one comes back, everything reads as written last, and no late copy lands over newer data.
func TestRandomFaults(t *testing.T) {
	for range 10 {
		seed := rand.Uint64()
		if !t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { randomFaults(t, rand.New(rand.NewPCG(seed, 1))) })
		}) {
			return
		}
	}
}

func randomFaults(t *testing.T, r *rand.Rand) {
	const addrC = "192.0.2.3:4420"
	f := newFakeTarget(t, addrA, addrB, addrC)
	all := []string{addrA, addrB, addrC}
	for _, p := range f.ports {
		p.latency = 20 * time.Millisecond // so that a round has some 10,000 commands
	}
	s, n := f.use(func(c *SubsystemConfig) { c.Policy = Policy(r.IntN(4)) })
	synctest.Wait()
	const workers, regions = 8, 8
	stop := make(chan struct{})
	ended := make(chan error, workers)
	for w := range workers {
		r := rand.New(rand.NewPCG(r.Uint64(), uint64(w)))
		go func() { // ends when stop is closed
			var have [regions]int // generation of each region
			for {
				select {
				case <-stop:
					for i := range have {
						slba := uint64(w*regions+i) * 4
						got := make([]byte, 4*fakeBlock)
						err := newRequest(wire.OpRead, slba, got).start(n).wait(t)
						if err == nil && have[i] != 0 && !bytes.Equal(got, blocksOf(slba, 4, have[i])) {
							err = fmt.Errorf("in the end block %d is %.40q, want generation %d", slba, got, have[i])
						}
						if err != nil {
							ended <- err
							return
						}
					}
					ended <- nil
					return
				default:
				}
				i := r.IntN(regions)
				slba := uint64(w*regions+i) * 4
				var err error
				if r.IntN(2) == 0 {
					have[i]++
					data := blocksOf(slba, 4, have[i])
					q := newRequest(wire.OpWrite, slba, data).start(n)
					if r.IntN(10) == 0 {
						time.Sleep(time.Duration(r.IntN(5)) * time.Millisecond)
						n.Detach(&q.Request)
						clear(data)
					}
					err = q.wait(t)
				} else {
					got := make([]byte, 4*fakeBlock)
					err = newRequest(wire.OpRead, slba, got).start(n).wait(t)
					if err == nil && have[i] != 0 && !bytes.Equal(got, blocksOf(slba, 4, have[i])) {
						err = fmt.Errorf("block %d is %.40q, want generation %d", slba, got, have[i])
					}
				}
				if err != nil {
					ended <- err
					return
				}
			}
		}()
	}
	states := []wire.ANAState{wire.ANAOptimized, wire.ANANonOptimized, wire.ANAInaccessible, wire.ANALoss, wire.ANAChange}
	down := map[string]bool{}
	for range 200 {
		addr := all[r.IntN(3)]
		p, c := f.ports[addr], f.ctl(addr)
		switch r.IntN(8) {
		case 0, 1:
			if c.State() == StateLive {
				down[addr] = true
				c.cut(func(*Command) (time.Duration, bool) {
					return time.Duration(r.Int64N(int64(20 * time.Second))), r.IntN(3) > 0
				})
			}
		case 2, 3, 4:
			for addr := range maps.Keys(down) {
				if c := f.ctl(addr); c.State() == StateConnecting {
					c.back()
				}
				delete(down, addr)
			}
		case 5:
			p.setANA(1, states[r.IntN(len(states))])
		case 6:
			status := []wire.Status{wire.StatusTransport, wire.StatusPathInternal, wire.StatusAborted, wire.StatusANATransition}[r.IntN(4)]
			left := r.IntN(4)
			f.set(addr, func(p *fakePort) {
				p.answer = func(*Command) (error, bool) {
					if left--; left < 0 {
						return nil, true
					}
					return testStatus(status, false), true
				}
			})
		case 7:
			if r.IntN(3) == 0 {
				k := 1 + r.IntN(3)
				s.SetAddrs(all[:k])
				for _, addr := range all[k:] {
					delete(down, addr)
				}
			} else {
				s.SetPolicy(Policy(r.IntN(4)))
			}
		}
		time.Sleep(time.Duration(r.Int64N(int64(500 * time.Millisecond))))
	}
	s.SetAddrs(all)
	time.Sleep(15 * time.Second)
	for addr, p := range f.ports {
		p.setANA(1, wire.ANAOptimized)
		if c := f.ctl(addr); c.State() == StateConnecting {
			c.back()
		}
	}
	close(stop)
	for range workers {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	time.Sleep(time.Minute) // whatever lands late has landed
	if got := sum(s); got != 0 {
		t.Errorf("%d commands are still counted as under way", got)
	}
}

// TestFlushAfterRemoval: what was started is sent by the next Flush although its address was removed in between.
func TestFlushAfterRemoval(t *testing.T) {
	twoPaths(t, nil, func(t *testing.T, f *fakeTarget, s *Subsystem, n *Namespace) {
		s.SetAddrs([]string{addrA})
		synctest.Wait()
		r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1))
		n.Start(&r.Request)
		began := time.Now()
		s.SetAddrs([]string{addrB})
		synctest.Wait()
		n.Flush()
		if err := r.wait(t); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("it took %v", d)
		}
	})
}
