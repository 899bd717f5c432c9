package dataplane

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/weftfs/weft/layout"
)

// lockClient is a waiter that counts how often it was granted its range.
type lockClient struct {
	mu      sync.Mutex
	granted int
	wake    chan *lockClient
}

func (c *lockClient) resume(uint64, error) {
	c.mu.Lock()
	c.granted++
	c.mu.Unlock()
	c.wake <- c
}

func newTestPlane(t testing.TB) *Plane {
	p, err := New(Config{Dial: func(layout.DeviceID) (Target, error) { return nil, ErrClosed }, RetainBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Random requests, releases and withdrawals against the definition: a request runs when no earlier one that overlaps it
// is left.
func TestRangeLockModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 2))
	p := newTestPlane(t)
	var r rangeLock
	type request struct {
		node     *rangeNode
		c        *lockClient
		off, end int64
		held     bool
		gone     bool // withdrawn while it waited; keeps its place until it would have been granted
	}
	var all []*request // in order of arrival, until released
	wake := make(chan *lockClient, 1000)
	blocked := func(i int) bool {
		for _, q := range all[:i] {
			if q.off < all[i].end && all[i].off < q.end {
				return true
			}
		}
		return false
	}
	// settle applies to the model what a release sets going and checks that the lock does the same.
	settle := func() {
		due := map[*lockClient]bool{}
		for again := true; again; {
			again = false
			for i := 0; i < len(all); i++ {
				q := all[i]
				if q.held || blocked(i) {
					continue
				}
				again = true
				if q.gone {
					all = append(all[:i], all[i+1:]...)
					i--
				} else {
					q.held = true
					due[q.c] = true
				}
			}
		}
		for len(due) > 0 {
			c := <-wake
			if !due[c] {
				t.Fatal("a request was granted that is blocked or had been granted")
			}
			delete(due, c)
		}
	}
	for range 20000 {
		if n := len(all); n < 40 && rnd.IntN(2) == 0 {
			q := &request{c: &lockClient{wake: wake}, off: rnd.Int64N(100)}
			q.end = q.off + 1 + rnd.Int64N(20)
			if rnd.IntN(30) == 0 {
				q.end = 1 << 62
			}
			var granted bool
			q.node, granted = r.acquire(q.off, q.end, ticket{who: q.c})
			all = append(all, q)
			if granted == blocked(n) {
				t.Fatalf("request %d granted at once: %v", n, granted)
			}
			q.held = granted
		} else if n > 0 {
			i := rnd.IntN(n)
			switch q := all[i]; {
			case q.held && rnd.IntN(4) > 0:
				all = append(all[:i], all[i+1:]...)
				r.release(p, q.node)
			case q.held:
				all = append(all[:i], all[i+1:]...)
				r.abandon(p, q.node)
			case !q.gone:
				q.gone = true
				r.abandon(p, q.node)
			}
			settle()
		}
	}
	for len(all) > 0 {
		for i, q := range all {
			if q.held {
				all = append(all[:i], all[i+1:]...)
				r.release(p, q.node)
				break
			}
		}
		settle()
	}
	if !r.idle() || r.table.Len() != 0 {
		t.Errorf("idle %v, %d extents left", r.idle(), r.table.Len())
	}
	select {
	case <-wake:
		t.Error("somebody was granted twice")
	default:
	}
}

// A long queue for the same bytes, and its withdrawal, cost no more than its length.
func TestRangeLockQueue(t *testing.T) {
	p := newTestPlane(t)
	var r rangeLock
	const n = 100000
	wake := make(chan *lockClient, 1)
	first, granted := r.acquire(0, 10, ticket{})
	if !granted {
		t.Fatal("not granted")
	}
	var nodes []*rangeNode
	for range n {
		node, granted := r.acquire(5, 15, ticket{who: &lockClient{wake: wake}})
		if granted {
			t.Fatal("granted beside another")
		}
		nodes = append(nodes, node)
	}
	for _, node := range nodes[:n-1] {
		r.abandon(p, node)
	}
	r.release(p, first)
	if c := <-wake; c.granted != 1 {
		t.Error("the last of the queue was not granted its range once")
	}
	r.release(p, nodes[n-1])
	if !r.idle() {
		t.Error("something is left")
	}
}

func BenchmarkRangeLock(b *testing.B) {
	p := newTestPlane(b)
	var r rangeLock
	var held [4096]*rangeNode
	rnd := rand.New(rand.NewPCG(1, 1))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		slot := &held[i%len(held)]
		if *slot != nil {
			r.release(p, *slot)
		}
		off := int64(i%len(held))<<20 + rnd.Int64N(1000)
		*slot, _ = r.acquire(off, off+4096, ticket{})
	}
}
