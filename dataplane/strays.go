package dataplane

import (
	"context"
	"sync"
)

// strays counts what is on its way to data servers and what nobody waits for as for a write: data that is sent again, and writes whose
// callers do not wait any more because the servers' patience is over.
type strays struct {
	mu    sync.Mutex
	count int
	none  chan struct{} // closed when count comes to 0; nil if nobody waits
}

func (s *strays) add(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count += n; s.count == 0 && s.none != nil {
		close(s.none)
		s.none = nil
	}
}

// AwaitStrays waits until no data of before is being sent again, and no write is on its way that has ended for its caller as Overdue. It does not
// wait for ranges, and may be called by whoever holds one.
func (f *File) AwaitStrays(ctx context.Context) error {
	for {
		f.strays.mu.Lock()
		if f.strays.count == 0 {
			f.strays.mu.Unlock()
			return nil
		}
		if f.strays.none == nil {
			f.strays.none = make(chan struct{})
		}
		none := f.strays.none
		f.strays.mu.Unlock()
		select {
		case <-none:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
