package nvmetcp

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// registrar plays the registrations of one host at a fakeTarget, and notes what comes to each port.
type registrar struct {
	mu    sync.Mutex
	key   uint64
	log   map[string][]string
	hold  []string // addresses at which registrations are not answered
	taken bool     // another host holds the reservation
}

// watch has all ports answer as r says.
func (r *registrar) watch(f *fakeTarget) {
	r.log = map[string][]string{}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.spaces[1].ns.RESCAP = 0xFF
	for addr, p := range f.ports {
		p.answer = func(cmd *Command) (error, bool) { return r.answer(addr, cmd) }
	}
}

func (r *registrar) answer(addr string, cmd *Command) (error, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cmd.Raw == nil {
		r.log[addr] = append(r.log[addr], "I/O")
		if r.key == 0 {
			return testStatus(wire.StatusReserved, true), true
		}
		return nil, true
	}
	if cmd.Raw.Opcode == wire.OpReservationAcquire {
		r.log[addr] = append(r.log[addr], "acquire")
		if r.taken {
			return testStatus(wire.StatusReserved, true), true
		}
		return nil, true
	}
	var a wire.ReservationRegister
	if status := a.Decode(cmd.Raw, cmd.Data); status != wire.StatusSuccess || cmd.Raw.Opcode != wire.OpReservationRegister {
		return testStatus(wire.StatusInvalidOpcode, true), true
	}
	if slices.Contains(r.hold, addr) {
		return nil, false
	}
	r.log[addr] = append(r.log[addr], "register")
	if a.Action == wire.RegisterKey && r.key != 0 && r.key != a.New {
		return testStatus(wire.StatusReserved, true), true
	}
	r.key = a.New
	return nil, true
}

// take returns what came to a port since it was last called.
func (r *registrar) take(addr string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	got := r.log[addr]
	r.log[addr] = nil
	return slices.Compact(got)
}

func (r *registrar) now() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.key
}

// registered runs test with a namespace over two paths, on which key 5 is registered.
func registered(t *testing.T, test func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace)) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA, addrB)
		r := new(registrar)
		r.watch(f)
		s, n := f.use(nil)
		s.SetPolicy(RoundRobin)
		synctest.Wait()
		if err := n.Register(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // on the other path, too
		test(t, f, r, n)
	})
}

// io writes some times, over all usable paths.
func someIO(t *testing.T, n *Namespace) (err error) {
	t.Helper()
	for range 4 {
		err = newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n).wait(t)
	}
	return err
}

// TestRegisterFirst: on each association the key is registered before anything else, also when its path gets usable only later.
func TestRegisterFirst(t *testing.T) {
	registered(t, func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace) {
		check := func(when string, want ...string) {
			t.Helper()
			synctest.Wait()
			if err := someIO(t, n); err != nil {
				t.Errorf("%s: %v", when, err)
			}
			for _, addr := range []string{addrA, addrB} {
				if got := r.take(addr); !slices.Equal(got, want) {
					t.Errorf("%s: %s got %q, want %q", when, addr, got, want)
				}
			}
		}
		check("at first", "register", "I/O")
		check("then", "I/O")
		f.ctl(addrB).cut(nil)
		f.ports[addrB].setANA(1, wire.ANAInaccessible)
		f.ctl(addrB).back()
		synctest.Wait()
		if err := someIO(t, n); err != nil {
			t.Error(err)
		}
		if got := r.take(addrB); len(got) != 0 {
			t.Errorf("the path that is not to be used got %q", got)
		}
		r.take(addrA)
		r.mu.Lock()
		r.key = 0 // the target is started anew
		r.mu.Unlock()
		f.ctl(addrA).cut(nil)
		f.ctl(addrA).back()
		f.ports[addrB].setANA(1, wire.ANAOptimized)
		check("afterwards", "register", "I/O")
		if r.now() != 5 {
			t.Errorf("key %d", r.now())
		}
	})
}

// TestRegisterNotAgain: a host that was refused does not register again by itself.
func TestRegisterNotAgain(t *testing.T) {
	registered(t, func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace) {
		r.mu.Lock()
		r.key = 0
		r.mu.Unlock()
		for range 2 {
			if err := someIO(t, n); !errors.Is(err, wire.StatusReserved) {
				t.Errorf("I/O that a reservation keeps out: %v", err)
			}
			for _, addr := range []string{addrA, addrB} {
				f.ctl(addr).cut(nil)
				f.ctl(addr).back()
			}
			synctest.Wait()
		}
		if r.now() != 0 {
			t.Error("it has registered again")
		}
		if err := n.Register(t.Context(), 6); err != nil {
			t.Fatal(err)
		}
		if err := someIO(t, n); err != nil || r.now() != 6 {
			t.Errorf("with key %d: %v", r.now(), err)
		}
	})
}

// TestRegisterAfterRefusal: a request of before may be refused while another key is being registered. The key is
// registered all the same, and on later connections.
func TestRegisterAfterRefusal(t *testing.T) {
	registered(t, func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace) {
		r.mu.Lock()
		r.hold = []string{addrA, addrB}
		r.mu.Unlock()
		time.Sleep(time.Millisecond)
		sent := clock()
		time.Sleep(time.Millisecond)
		done := make(chan error, 1)
		go func() { done <- n.Register(t.Context(), 6) }() // ends with the registration
		synctest.Wait()
		n.refused(sent)
		r.mu.Lock()
		r.key, r.hold = 0, nil // the target is started anew
		r.mu.Unlock()
		for _, addr := range []string{addrA, addrB} {
			f.ctl(addr).cut(nil)
			f.ctl(addr).back()
		}
		time.Sleep(time.Minute)
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Fatal("the key is not registered")
		}
		if err := someIO(t, n); err != nil || r.now() != 6 {
			t.Errorf("with key %d: %v", r.now(), err)
		}
	})
}

// TestRegisterLost: a registration with an older key that may yet be carried out does not outlive the newer one.
func TestRegisterLost(t *testing.T) {
	registered(t, func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace) {
		r.mu.Lock()
		r.hold = []string{addrA}
		r.mu.Unlock()
		for _, key := range []uint64{6, 7} { // A has a command with 6 when 7 is registered
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if err := n.Register(ctx, key); err != nil {
				t.Fatal(err)
			}
			cancel()
		}
		if r.now() != 7 {
			t.Errorf("key %d", r.now())
		}
		f.ctl(addrA).cut(nil)
		synctest.Wait()
		time.Sleep(9 * time.Second)
		r.mu.Lock()
		r.key = 6 // it arrives at last
		r.mu.Unlock()
		q := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		synctest.Wait()
		if q.over() {
			t.Errorf("I/O while it is not known which key is registered: %v", q.Err)
		}
		if err := q.wait(t); err != nil {
			t.Error(err)
		}
		if err := someIO(t, n); err != nil || r.now() != 7 {
			t.Errorf("with key %d: %v", r.now(), err)
		}
	})
}

// TestReserveGivenUp: when Reserve has failed, paths on which that was still to be tried get into use with the key alone.
func TestReserveGivenUp(t *testing.T) {
	for _, lost := range []bool{false, true} {
		registered(t, func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace) {
			r.mu.Lock()
			r.taken = true
			r.mu.Unlock()
			f.set(addrB, func(p *fakePort) { p.latency = time.Second })
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := n.Reserve(ctx, 5); !errors.Is(err, wire.StatusReserved) {
				t.Fatalf("of another host's reservation: %v", err)
			}
			if lost { // with its registration on the way
				f.ctl(addrB).cut(nil)
				f.ctl(addrB).back()
			}
			time.Sleep(time.Minute)
			r.take(addrA)
			r.take(addrB)
			if err := someIO(t, n); err != nil {
				t.Error(err)
			}
			for _, addr := range []string{addrA, addrB} {
				if got := r.take(addr); !slices.Equal(got, []string{"I/O"}) {
					t.Errorf("lost %v: %s got %q", lost, addr, got)
				}
			}
			f.ctl(addrB).cut(nil)
			f.ctl(addrB).back()
			time.Sleep(time.Minute)
			if got := r.take(addrB); !slices.Equal(got, []string{"register"}) {
				t.Errorf("lost %v: a new association got %q", lost, got)
			}
		})
	}
}

// TestReserveTwice: one that gives up takes nothing from another one.
func TestReserveTwice(t *testing.T) {
	registered(t, func(t *testing.T, f *fakeTarget, r *registrar, n *Namespace) {
		for _, addr := range []string{addrA, addrB} {
			f.set(addr, func(p *fakePort) { p.latency = time.Second })
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		hasty, giveUp := context.WithTimeout(ctx, time.Second/2)
		defer giveUp()
		ended := make(chan error)
		go func() { ended <- n.Reserve(hasty, 5) }()
		synctest.Wait()
		go func() { ended <- n.Reserve(ctx, 5) }()
		if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the hasty one: %v", err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		r.take(addrA)
		f.ctl(addrA).cut(nil)
		f.ctl(addrA).back()
		time.Sleep(time.Minute)
		if got := r.take(addrA); !slices.Equal(got, []string{"register", "acquire"}) {
			t.Errorf("a new association got %q", got)
		}
	})
}
