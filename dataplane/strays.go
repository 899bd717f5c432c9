package dataplane

import (
	"context"
	"sync"
)

// strays counts requests on their way to data servers that no caller waits for: data that is sent again, and writes
// whose callers were told Overdue.
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

// AwaitStrays waits until no data is being sent again, and no write is on its way that has ended for its caller as
// Overdue. It waits for no range, so a caller may hold one. It returns ctx.Err() if ctx ends first.
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
