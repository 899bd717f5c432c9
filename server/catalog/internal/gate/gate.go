// Package gate counts calls in progress, so that closing can wait for them.
package gate

import "sync"

// Gate counts the calls in progress, so that closing can wait for them. Unlike an RWMutex it lets a call that
// is in progress make another one while somebody waits in Close: the inner call is refused.
type Gate struct {
	mu     sync.RWMutex // held for a moment only
	reason error        // why calls are refused; nil while open
	closed bool         // Close was called
	calls  sync.WaitGroup
}

// Enter begins a call, or returns why there can be none. After a nil error the caller owes one Leave.
func (g *Gate) Enter() error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if g.reason == nil {
		g.calls.Add(1)
	}
	return g.reason
}

func (g *Gate) Leave() { g.calls.Done() }

// Shut refuses calls from now on, for reason.
func (g *Gate) Shut(reason error) {
	g.mu.Lock()
	if g.reason == nil {
		g.reason = reason
	}
	g.mu.Unlock()
}

// Close refuses calls from now on and waits for those in progress. It reports false if Close was called before.
func (g *Gate) Close(reason error) bool {
	g.Shut(reason)
	g.mu.Lock()
	first := !g.closed
	g.closed = true
	g.mu.Unlock()
	g.calls.Wait()
	return first
}
