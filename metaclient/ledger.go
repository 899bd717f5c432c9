package metaclient

import (
	"context"
	"sync"

	"github.com/weftfs/weft/layout"
)

// ledger knows, for each file, what the service holds for this session: an open, or layouts. Taking (Open, LayoutGet)
// and giving back (Close, LayoutReturn) are never outstanding together for one file; taking may be with itself.
// The zero ledger with a wake is ready for use.
type ledger struct {
	wake func() // there is something to give back

	mu    sync.Mutex
	files map[layout.FileID]*held
	queue []layout.FileID // to be looked at by batch
}

type held struct {
	wanted bool          // taken by somebody who has not let go
	drop   bool          // the service may hold it though nobody wants it
	takes  int           // calls outstanding that take, or will when giving is over
	giving chan struct{} // closed when the call outstanding that gives back has ended; nil without one
	lost   chan struct{} // closed when it has been tried to take it again in a new session; nil if that is not needed
}

// file returns the record of id, making it if there is none; l.mu is held.
func (l *ledger) file(id layout.FileID) *held {
	h := l.files[id]
	if h == nil {
		if l.files == nil {
			l.files = make(map[layout.FileID]*held)
		}
		h = &held{}
		l.files[id] = h
	}
	return h
}

// settle looks what is to be done for a file after a change; l.mu is held.
func (l *ledger) settle(id layout.FileID, h *held) {
	if h.takes > 0 || h.giving != nil || h.wanted {
		return
	}
	if !h.drop {
		delete(l.files, id)
		return
	}
	l.queue = append(l.queue, id)
	l.wake()
}

// take waits until nothing of id is being given back, and keeps it so until end.
func (l *ledger) take(ctx context.Context, id layout.FileID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.file(id)
	h.takes++
	for h.giving != nil {
		giving := h.giving
		l.mu.Unlock()
		select {
		case <-giving:
		case <-ctx.Done():
		}
		l.mu.Lock()
		if ctx.Err() != nil {
			h.takes--
			l.settle(id, h)
			return context.Cause(ctx)
		}
	}
	return nil
}

// end follows take when the call has ended. taken says that the service now holds it and the caller wants it.
func (l *ledger) end(id layout.FileID, taken bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.file(id)
	h.takes--
	h.wanted = h.wanted || taken
	l.settle(id, h)
}

// stray says that the service holds it, for a caller that has left or without take.
func (l *ledger) stray(id layout.FileID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.file(id)
	h.drop = true
	l.settle(id, h)
}

// hold says that the service holds it and the caller wants it.
func (l *ledger) hold(id layout.FileID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.file(id).wanted = true
}

// letGo says that nobody wants it any more.
func (l *ledger) letGo(id layout.FileID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.files[id]
	if h == nil {
		return
	}
	h.drop = h.drop || h.wanted || h.takes > 0
	h.wanted = false
	h.endLoss()
	l.settle(id, h)
}

// holds reports whether somebody wants it.
func (l *ledger) holds(id layout.FileID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.files[id]
	return h != nil && h.wanted
}

// all lists what somebody wants.
func (l *ledger) all() []layout.FileID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []layout.FileID
	for id, h := range l.files {
		if h.wanted {
			ids = append(ids, id)
		}
	}
	return ids
}

// batch takes up to n files that are to be given back; given follows when the call has ended.
func (l *ledger) batch(n int) []layout.FileID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []layout.FileID
	looked := 0
	for _, id := range l.queue {
		if len(ids) == n {
			break
		}
		looked++
		// What is taken again, or wanted, comes back to the queue when that is over.
		if h := l.files[id]; h != nil && h.drop && !h.wanted && h.takes == 0 && h.giving == nil {
			h.drop, h.giving = false, make(chan struct{})
			ids = append(ids, id)
		}
	}
	if l.queue = l.queue[looked:]; len(l.queue) == 0 {
		l.queue = nil
	}
	return ids
}

// given follows batch.
func (l *ledger) given(ids []layout.FileID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		h := l.files[id]
		close(h.giving)
		h.giving = nil
		l.settle(id, h)
	}
}
