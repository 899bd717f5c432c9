package admit

import (
	"sync"
	"time"
)

// Meters bound how often clients call. The zero Meters is ready for use.
type Meters struct {
	mu      sync.Mutex
	clients map[string]*meter
}

// Take returns how long a call of a client has to wait that may make so many in a second.
func (t *Meters) Take(client string, perSecond int) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.clients[client]
	if m == nil {
		if t.clients == nil {
			t.clients = map[string]*meter{}
		}
		m = &meter{}
		t.clients[client] = m
	}
	return m.take(time.Now(), perSecond)
}

// Tidy forgets clients that have not called lately.
func (t *Meters) Tidy() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for client, m := range t.clients {
		if time.Since(m.next) > meterBurst {
			delete(t.clients, client)
		}
	}
}

// meter lets so many calls of a client through in a second.
type meter struct {
	next time.Time // when the next call would be let through if they came one after the other
}

// meterBurst is how much of what was not used can be made up for.
const meterBurst = 100 * time.Millisecond

// take is Meters.Take at a time.
func (m *meter) take(now time.Time, perSecond int) time.Duration {
	if earliest := now.Add(-meterBurst); m.next.Before(earliest) {
		m.next = earliest
	}
	wait := m.next.Sub(now)
	m.next = m.next.Add(time.Second / time.Duration(perSecond))
	return max(wait, 0)
}
