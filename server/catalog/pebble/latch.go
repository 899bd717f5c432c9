package pebble

import (
	"cmp"
	"context"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/weftfs/weft/server/catalog"
)

// mode is how a commit holds a stripe.
type mode uint8

const (
	shared    mode = iota + 1 // guards
	delta                     // blind deltas
	exclusive                 // puts, deletes, and any mix of modes
)

// latch is one stripe. Holders of mode shared or delta share it with their like.
type latch struct {
	mu      sync.Mutex
	holders int
	mode    mode // of the holders
	queue   []*latchWaiter
}

type latchWaiter struct {
	mode  mode
	ready chan struct{} // closed when the waiter has become a holder
}

// acquire waits for the latch, or returns ctx.Err().
func (l *latch) acquire(ctx context.Context, m mode) error {
	l.mu.Lock()
	if len(l.queue) == 0 && l.admits(m) {
		l.mode = m
		l.holders++
		l.mu.Unlock()
		return nil
	}
	w := &latchWaiter{m, make(chan struct{})}
	l.queue = append(l.queue, w)
	l.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.queue, w); i >= 0 {
		l.queue = slices.Delete(l.queue, i, i+1)
		l.grant() // those behind w may have waited only for it
	} else {
		l.drop()
	}
	return ctx.Err()
}

func (l *latch) release() {
	l.mu.Lock()
	l.drop()
	l.mu.Unlock()
}

// drop gives up one hold. l.mu is held.
func (l *latch) drop() {
	l.holders--
	if l.holders == 0 {
		l.grant()
	}
}

// admits reports whether a holder of mode m could join now. l.mu is held.
func (l *latch) admits(m mode) bool { return l.holders == 0 || l.mode == m && m != exclusive }

// grant lets in the first waiter and all others of its mode, if it may hold the latch now. l.mu is held.
//
// Those others overtake whoever waits in between, but newcomers go behind the queue, so nobody waits for ever.
func (l *latch) grant() {
	if len(l.queue) == 0 || !l.admits(l.queue[0].mode) {
		return
	}
	l.mode = l.queue[0].mode
	l.queue = slices.DeleteFunc(l.queue, func(w *latchWaiter) bool {
		if w.mode != l.mode || !l.admits(w.mode) {
			return false
		}
		l.holders++
		close(w.ready)
		return true
	})
}

// stripes is how many latches there are. Only the commits between their first latch and their apply hold some, which
// are about as many as there are cores, so a false conflict is rare; the table takes 200 KiB.
const stripes = 4096

type latchTable struct {
	seed    maphash.Seed
	latches [stripes]latch
}

// claim is a stripe that a commit wants, and how.
type claim struct {
	stripe uint16
	mode   mode
}

func (t *latchTable) claim(key []byte, m mode) claim {
	return claim{uint16(maphash.Bytes(t.seed, key) % stripes), m}
}

// claims appends what b needs to dst, at most one claim for each stripe, in ascending order. Deltas whose group is to be
// folded count as writes.
func (t *latchTable) claims(dst []claim, b *catalog.Batch, groups []deltaGroup) []claim {
	for i := range b.Guards {
		if b.Guards[i].Kind != catalog.RangeEmpty {
			dst = append(dst, t.claim(b.Guards[i].Key, shared))
		}
	}
	for i := range b.Puts {
		dst = append(dst, t.claim(b.Puts[i].Key, exclusive))
	}
	for _, key := range b.Deletes {
		dst = append(dst, t.claim(key, exclusive))
	}
	for i := range groups {
		m := delta
		if groups[i].fold {
			m = exclusive
		}
		dst = append(dst, t.claim(groups[i].key(), m))
	}
	slices.SortFunc(dst, func(a, b claim) int { return cmp.Compare(a.stripe, b.stripe) })
	n := 0
	for _, c := range dst {
		if n > 0 && dst[n-1].stripe == c.stripe {
			if dst[n-1].mode != c.mode {
				dst[n-1].mode = exclusive
			}
			continue
		}
		dst[n] = c
		n++
	}
	return dst[:n]
}

// acquire takes all claims, which are in ascending order, or none if ctx ends first.
func (t *latchTable) acquire(ctx context.Context, claims []claim) error {
	for i, c := range claims {
		if err := t.latches[c.stripe].acquire(ctx, c.mode); err != nil {
			t.release(claims[:i])
			return err
		}
	}
	return nil
}

func (t *latchTable) release(claims []claim) {
	for _, c := range claims {
		t.latches[c.stripe].release()
	}
}
