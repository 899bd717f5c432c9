package pebble

import "sync"

// gate counts the calls in progress, so that closing can wait for them. Unlike an RWMutex it lets a call that
// is in progress make another one while somebody waits in close: the inner call is refused.
type gate struct {
	mu     sync.RWMutex // held for a moment only
	reason error        // why calls are refused; nil while open
	closed bool         // close was called
	calls  sync.WaitGroup
}

// enter begins a call, or returns why there can be none. After a nil error the caller owes one leave.
func (g *gate) enter() error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if g.reason == nil {
		g.calls.Add(1)
	}
	return g.reason
}

func (g *gate) leave() { g.calls.Done() }

// shut refuses calls from now on, for reason.
func (g *gate) shut(reason error) {
	g.mu.Lock()
	if g.reason == nil {
		g.reason = reason
	}
	g.mu.Unlock()
}

// close refuses calls from now on and waits for those in progress. It reports false if close was called before.
func (g *gate) close(reason error) bool {
	g.shut(reason)
	g.mu.Lock()
	first := !g.closed
	g.closed = true
	g.mu.Unlock()
	g.calls.Wait()
	return first
}
