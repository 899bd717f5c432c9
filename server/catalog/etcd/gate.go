package etcd

import (
	"sync"

	"github.com/weftfs/weft/server/catalog"
)

// gate counts the calls in progress, so that closing can wait for them. A call in progress may make another one, which is
// refused once somebody waits.
type gate struct {
	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup
}

// enter begins a call, or returns ErrClosed. After a nil error the caller owes one leave.
func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return catalog.ErrClosed
	}
	g.calls.Add(1)
	return nil
}

func (g *gate) leave() { g.calls.Done() }

// close refuses calls from now on. It reports false if they were refused before. calls.Wait waits for those in progress.
func (g *gate) close() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	first := !g.closed
	g.closed = true
	return first
}
