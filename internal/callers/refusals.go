package callers

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// freeRefusals have no consequence. Each counts for refusalTime, and beyond the free ones they count for refusalMost
	// together at most.
	freeRefusals = 1 << 16
	refusalTime  = time.Second / 8
	refusalMost  = 10 * time.Minute
	// turnTime is how long a call waits for its turn at most.
	turnTime = 2 * time.Second
)

// Refusals slows down addresses from which calls come that are refused: somebody there may be guessing. The zero
// Refusals is ready. Its methods may be called from any goroutine.
type Refusals struct {
	// Free is how many refusals have no consequence; 0: what doc.go says.
	Free int

	slow atomic.Int64 // until when some address is slowed down, in ns since 1970; changed with mu held

	mu      sync.Mutex
	counts  map[netip.Addr]time.Time // by address, until when its refusals count, one after the other
	cleaned time.Time
}

// Refused takes in that a call from an address was refused, and reports whether the address is slowed down now.
func (r *Refusals) Refused(a net.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	return r.charge(r.key(a, now), now) > 0
}

// Any reports whether any address is slowed down.
func (r *Refusals) Any() bool {
	slow := r.slow.Load()
	return slow != 0 && time.Now().UnixNano() < slow
}

// Turn returns how long a call from an address has to wait before it is looked at. It reports false if that would be
// too long: then the call is not looked at, and its connection is closed.
func (r *Refusals) Turn(a net.Addr) (wait time.Duration, ok bool) {
	if !r.Any() {
		return 0, true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	addr := r.key(a, now)
	until, known := r.counts[addr]
	wait = until.Sub(now) - r.free()
	switch {
	case !known, wait <= 0:
		return 0, true
	case wait > turnTime:
		return 0, false
	}
	r.charge(addr, now) // so the next one waits longer
	return wait, true
}

// free is for how long the free refusals count.
func (r *Refusals) free() time.Duration {
	if r.Free > 0 {
		return time.Duration(r.Free) * refusalTime
	}
	return freeRefusals * refusalTime
}

// charge counts a refusal, and returns for how long those count that are not free. mu is held.
func (r *Refusals) charge(addr netip.Addr, now time.Time) time.Duration {
	until := r.counts[addr]
	if until.Before(now) {
		until = now
	}
	until = until.Add(refusalTime)
	if most := now.Add(r.free() + refusalMost); until.After(most) {
		until = most
	}
	r.counts[addr] = until
	over := until.Sub(now) - r.free()
	if over > 0 {
		r.slow.Store(max(r.slow.Load(), now.Add(over).UnixNano()))
	}
	return over
}

// key is what an address counts as: an IPv6 network as one, and what is too much as another one. mu is held.
func (r *Refusals) key(a net.Addr, now time.Time) netip.Addr {
	addr := addrOf(a)
	if addr.Is6() {
		network, _ := addr.Prefix(64) // an IPv6 address has one
		addr = network.Addr()
	}
	if r.counts == nil {
		r.counts = map[netip.Addr]time.Time{}
	}
	if len(r.counts) >= maxAddrs && now.Sub(r.cleaned) >= complainEvery {
		r.cleaned = now
		for addr, until := range r.counts {
			if until.Before(now) {
				delete(r.counts, addr)
			}
		}
	}
	if _, known := r.counts[addr]; !known && len(r.counts) >= maxAddrs {
		return netip.Addr{}
	}
	return addr
}
