package dataplane

import (
	"sync"
	"time"

	"github.com/weftfs/weft/layout"
)

// Slowest is the request to a data server that has taken longest, of those that something was made of.
type Slowest struct {
	mu     sync.Mutex
	device layout.DeviceID
	took   time.Duration
}

// SlowestKey is under which the context of a Commit may have a *Slowest.
type SlowestKey struct{}

func (s *Slowest) add(device layout.DeviceID, took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if took > s.took {
		s.device, s.took = device, took
	}
}

// Get returns 0 if there was no request.
func (s *Slowest) Get() (layout.DeviceID, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.device, s.took
}

// Reset makes it as new.
func (s *Slowest) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.device, s.took = layout.DeviceID{}, 0
}

// tellSlowest has the pieces, which have ended or are waited for no longer, taken into slowest. mu is held.
func (q *request) tellSlowest() {
	if q.slowest == nil {
		return
	}
	now := q.file.plane.watch.now()
	for _, pc := range q.pieces {
		if pc.state.Load() == pieceHeld {
			continue
		}
		took := now - pc.began
		if pc.state.Load() == pieceEnded {
			took = pc.took
		}
		q.slowest.add(pc.conn.dev.id, time.Duration(took))
	}
}
