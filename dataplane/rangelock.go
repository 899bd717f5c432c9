package dataplane

import (
	"sync"

	"github.com/weftfs/weft/internal/rangemap"
)

// rangeLock orders requests for overlapping ranges of one file: first come, first served, each alone. Waiting needs no
// goroutine; the last blocker's release resumes the waiter.
//
// For every byte the table knows the last request that covers it. A new request waits for those it finds in its range
// and takes their place in the table, so each waits only for its direct predecessors: the work does not grow with the
// square of the length of a queue.
type rangeLock struct {
	mu    sync.Mutex
	table rangemap.Map[*rangeNode]
	nodes int // held or waiting
}

// rangeNode is one request's part in the queue.
type rangeNode struct {
	off, end  int64
	owner     ticket // who is resumed when the range is granted
	blockers  int
	waiters   []*rangeNode // one entry for each of their blockers that this is
	granted   bool
	abandoned bool       // nobody wants it any more: to be released as soon as it is granted
	link      *rangeNode // scratch of release
}

var rangeNodes = sync.Pool{New: func() any { return new(rangeNode) }}

// acquire queues a request for [off, end), which must not be empty. If granted is set the range is held; if not,
// owner is resumed by p once it is. The node is the caller's until release or abandon.
func (r *rangeLock) acquire(off, end int64, owner ticket) (n *rangeNode, granted bool) {
	n = rangeNodes.Get().(*rangeNode)
	n.off, n.end, n.owner = off, end, owner
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodes++
	if r.table.Len() > 0 {
		r.table.Overlapping(off, end, func(e *rangemap.Entry[*rangeNode]) bool {
			n.blockers++
			e.Val.waiters = append(e.Val.waiters, n)
			return true
		})
		if n.blockers > 0 {
			r.table.Cut(off, end, ignoreNode, ignoreNode)
		}
	}
	r.table.Insert(off, end, n)
	n.granted = n.blockers == 0
	return n, n.granted
}

func ignoreNode(**rangeNode) {}

// release gives a held range free and resumes those for whom it was the last obstacle.
func (r *rangeLock) release(p *Plane, n *rangeNode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.releaseLocked(p, n)
}

func (r *rangeLock) releaseLocked(p *Plane, n *rangeNode) {
	for n != nil {
		next := n.link
		r.table.DeleteFunc(n.off, n.end, func(e *rangemap.Entry[*rangeNode]) bool { return e.Val == n })
		r.nodes--
		for i, w := range n.waiters {
			n.waiters[i] = nil
			if w.blockers--; w.blockers > 0 {
				continue
			}
			w.granted = true
			if w.abandoned {
				w.link, next = next, w
				continue
			}
			p.later(w.owner)
		}
		*n = rangeNode{waiters: n.waiters[:0]}
		rangeNodes.Put(n)
		n = next
	}
}

// abandon withdraws a request, granted or not. A waiting one keeps its place in the queue, since others may wait for it,
// but is passed over.
func (r *rangeLock) abandon(p *Plane, n *rangeNode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n.granted {
		r.releaseLocked(p, n)
	} else {
		n.abandoned = true
	}
}

// idle reports whether nobody holds or waits for a range.
func (r *rangeLock) idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.nodes == 0
}
