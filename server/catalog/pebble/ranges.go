package pebble

import (
	"bytes"
	"context"
	"slices"
	"sync"

	"github.com/weftfs/weft/server/catalog"
)

// rangeTable makes a commit that guards a range wait for commits that write inside it, and the other way round.
//
// It holds the commits between their registration and their apply, which are few. A newcomer waits for those
// registered earlier, never for later ones, so no cycle can arise.
type rangeTable struct {
	mu      sync.Mutex
	entries []*rangeEntry // in no order
	ranged  int           // entries whose batch guards a range
}

// rangeEntry is a commit in a rangeTable.
type rangeEntry struct {
	batch *catalog.Batch
	at    int           // index in entries
	done  chan struct{} // closed when the entry leaves; nil while nobody waits for it
}

// acquire registers e for b and waits for the commits it conflicts with, or returns ctx.Err() and leaves again.
func (t *rangeTable) acquire(ctx context.Context, e *rangeEntry, b *catalog.Batch) error {
	e.batch = b
	ranged := guardsRange(b)
	var waits []chan struct{}
	t.mu.Lock()
	if ranged || t.ranged > 0 {
		for _, other := range t.entries {
			if writesInto(b, other.batch) || writesInto(other.batch, b) {
				if other.done == nil {
					other.done = make(chan struct{})
				}
				waits = append(waits, other.done)
			}
		}
	}
	e.at = len(t.entries)
	t.entries = append(t.entries, e)
	if ranged {
		t.ranged++
	}
	t.mu.Unlock()

	for _, done := range waits {
		select {
		case <-done:
		case <-ctx.Done():
			t.release(e)
			return ctx.Err()
		}
	}
	return nil
}

func (t *rangeTable) release(e *rangeEntry) {
	t.mu.Lock()
	last := len(t.entries) - 1
	t.entries[e.at] = t.entries[last]
	t.entries[e.at].at = e.at
	t.entries[last] = nil
	t.entries = t.entries[:last]
	if guardsRange(e.batch) {
		t.ranged--
	}
	done := e.done
	t.mu.Unlock()
	if done != nil {
		close(done)
	}
	*e = rangeEntry{}
}

func guardsRange(b *catalog.Batch) bool {
	return slices.ContainsFunc(b.Guards, func(g catalog.Guard) bool { return g.Kind == catalog.RangeEmpty })
}

// writesInto reports whether w writes a key inside a range that g guards.
func writesInto(w, g *catalog.Batch) bool {
	for i := range g.Guards {
		guard := &g.Guards[i]
		if guard.Kind != catalog.RangeEmpty {
			continue
		}
		inside := func(key []byte) bool {
			return bytes.Compare(key, guard.Key) >= 0 && (len(guard.To) == 0 || bytes.Compare(key, guard.To) < 0)
		}
		if slices.ContainsFunc(w.Puts, func(r catalog.Row) bool { return inside(r.Key) }) ||
			slices.ContainsFunc(w.Deletes, inside) ||
			slices.ContainsFunc(w.Deltas, func(d catalog.Delta) bool { return inside(d.Key) }) {
			return true
		}
	}
	return false
}
