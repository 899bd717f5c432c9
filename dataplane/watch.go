package dataplane

import (
	"sync"
	"sync/atomic"
	"time"
)

// watch looks after requests of mirrored files: one of which a copy does not answer must not wait for it as long as another
// copy does. It is one timer for the whole plane, which is set only while there are such requests.
type watch struct {
	p     *Plane
	start time.Time // what now counts from

	running sync.Mutex // held by run

	mu    sync.Mutex
	first *request
	timer *time.Timer
	armed int64    // when the timer fires (now); 0 = it is not set
	batch []ticket // scratch of run
}

func newWatch(p *Plane) *watch {
	w := &watch{p: p, start: time.Now()}
	w.timer = time.AfterFunc(time.Hour, w.run)
	w.timer.Stop()
	return w
}

// lookAfter is how often a write is looked at, in nanoseconds.
func (p *Plane) lookAfter() int64 { return int64(p.cfg.MirrorTimeout) / 4 }

// lookSoon is how often one is looked at that has sent a trial, which it does not wait for.
func (p *Plane) lookSoon() int64 { return int64(p.cfg.MirrorTimeout) / 64 }

// now is the monotonic clock in nanoseconds, never 0.
func (w *watch) now() int64 { return int64(time.Since(w.start)) + 1 }

// add watches a request that is being started, from due on. q.mu is held.
func (w *watch) add(q *request, due int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	q.watched, q.due = true, due
	q.before, q.after = nil, w.first
	if w.first != nil {
		w.first.before = q
	}
	w.first = q
	w.arm(due)
}

// arm sets the timer if it is not set for an earlier time. mu is held.
func (w *watch) arm(due int64) {
	if w.armed != 0 && w.armed <= due {
		return
	}
	w.armed = due
	w.timer.Reset(time.Duration(max(due-w.now(), 0)))
}

// remove ends the watching of a request, all of whose pieces have ended.
func (w *watch) remove(q *request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !q.watched {
		return
	}
	q.watched = false
	if q.before == nil {
		w.first = q.after
	} else {
		q.before.after = q.after
	}
	if q.after != nil {
		q.after.before = q.before
	}
	q.before, q.after = nil, nil
}

// hurry has all requests looked at now, because a copy was given up or a device was found late.
func (w *watch) hurry() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.first == nil {
		return
	}
	for q := w.first; q != nil; q = q.after {
		q.due = 0
	}
	w.armed = 0
	w.arm(w.now())
}

// run looks at the requests that are due.
func (w *watch) run() {
	w.running.Lock()
	defer w.running.Unlock()
	w.mu.Lock()
	at := w.now()
	w.armed = at // nobody sets the timer meanwhile
	due := w.batch[:0]
	for q := w.first; q != nil; q = q.after {
		if q.due <= at {
			due = append(due, ticket{q.kind, q.gen})
			q.due = at + int64(w.p.cfg.MirrorTimeout) // until it has been looked at
		}
	}
	w.mu.Unlock()
	for _, t := range due {
		t.who.(finisher).look(t.gen, at)
	}
	w.p.Flush()
	clear(due)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.batch, w.armed = due[:0], 0
	for q := w.first; q != nil; q = q.after {
		w.arm(q.due)
	}
}

// again sets when a watched request is to be looked at next.
func (w *watch) again(q *request, due int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if q.watched {
		q.due = due
		w.arm(due)
	}
}

// begun is how a look at a request starts: it returns nil if the request has ended, or is another one by now. Otherwise
// q.mu is held, and a count of pending keeps finish away.
func (q *request) begun(gen uint64) bool {
	q.mu.Lock()
	if q.gen != gen || !q.running || !q.hold() {
		q.mu.Unlock()
		return false
	}
	return true
}

// States of a piece.
const (
	pieceOut      uint32 = iota // at the target
	pieceEnded                  // answered
	pieceOrphaned               // its request no longer waits for it
	pieceHeld                   // not sent, as its device is late
)

// orphans keeps the range of a write or punch held that has ended while some of its requests have not: nothing else may be
// written there before they can do no harm, because they were answered or their copies are given up.
type orphans struct {
	file  *File
	node  *rangeNode // set by who ends what holds the range
	count atomic.Int32
}

func (o *orphans) drop() {
	if o.count.Add(-1) == 0 && o.node != nil {
		o.file.locks.release(o.file.plane, o.node)
	}
}
