package etcd

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
)

// unknownAfter is how long a caller whose context has ended waits for the outcome of what was sent.
const unknownAfter = 5 * time.Second

// Commit implements [catalog.Engine]. Both durability classes mean the same. ErrUnknown comes if ctx ends, or the engine is
// closed, while the cluster does not answer, and hardly ever otherwise; see Numbers in the package comment.
func (e *Engine) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(e.caps); err != nil {
		return err
	}
	if err := e.refuse(ctx, b); err != nil {
		return err
	}
	ctx, end, err := e.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if b.Len() == 0 {
		return nil // whatever anybody can have seen is durable; what is on its way is for a guard to stop
	}
	r := newRequest(ctx, b, e.keys)
	if err := e.lookBefore(ctx, r); err != nil {
		return e.because(err)
	}
	if r.guard < 0 {
		if err := e.await(ctx, r); err != nil {
			return e.because(err)
		}
	}
	if r.guard >= 0 {
		return &catalog.GuardError{Index: r.guard, Guard: b.Guards[r.guard]}
	}
	return nil
}

// lookBefore looks whether the ranges are empty that r has guards on, and whether its other guards hold then. The comparison
// that guards a range reads all rows there are, values included, while the members apply nothing else; so it is made only when
// there were none a moment ago.
func (e *Engine) lookBefore(ctx context.Context, r *request) error {
	if !slices.ContainsFunc(r.guards, func(g catalog.Guard) bool { return g.Kind == catalog.RangeEmpty }) {
		return nil
	}
	p := newPack(&e.cfg)
	for _, g := range r.guards {
		p.require(condition{Guard: g})
	}
	p.requests = []*request{r}
	resp, err := e.cluster.txnRead(ctx, &pb.TxnRequest{Success: p.reads()})
	if err == nil {
		_, err = p.judge(resp.Responses, counterRows{})
	}
	return err
}

// await queues r and waits for its outcome.
func (e *Engine) await(ctx context.Context, r *request) error {
	e.queue.add(r)
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
	}
	if e.queue.remove(r) {
		return ctx.Err()
	}
	timer := time.NewTimer(unknownAfter)
	defer timer.Stop()
	select {
	case <-r.done:
	case <-timer.C:
		if e.queue.leave(r) {
			return fmt.Errorf("%w: %w, and no member of the cluster has answered for %v", catalog.ErrUnknown, ctx.Err(), unknownAfter)
		}
	}
	return r.err
}

// queue has the requests that wait to be packed.
type queue struct {
	mu      sync.Mutex
	waiting []*request
	filled  chan struct{} // has an element if there may be something in waiting
}

func (q *queue) add(r *request) {
	q.mu.Lock()
	q.waiting = append(q.waiting, r)
	q.mu.Unlock()
	select {
	case q.filled <- struct{}{}:
	default:
	}
}

// remove takes r back. It reports false if r was sent.
func (q *queue) remove(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := slices.Index(q.waiting, r)
	if at >= 0 {
		q.waiting = slices.Delete(q.waiting, at, at+1)
	}
	return at >= 0
}

// leave says that nobody waits for r any more. It reports false if r is done.
func (q *queue) leave(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-r.done:
		return false
	default:
		r.left = true
		return true
	}
}

// finish tells the outcome of requests that were sent.
func (q *queue) finish(err error, requests []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range requests {
		r.over(err)
	}
}

// again takes requests back that were sent and not applied: those that never can be are done, the others come before all
// that wait.
func (q *queue) again(requests []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	stay := make([]*request, 0, len(requests))
	for _, r := range requests {
		switch {
		case r.guard >= 0:
			r.over(nil)
		case r.left || r.ctx.Err() != nil:
			r.over(r.ctx.Err())
		default:
			stay = append(stay, r)
		}
	}
	q.waiting = slices.Insert(q.waiting, 0, stay...)
}

// first returns up to n requests that wait, oldest first.
func (q *queue) first(n int) []*request {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Clone(q.waiting[:min(n, len(q.waiting))])
}

// sort goes through the first n requests, oldest first, and takes those out that where finds a place for.
func (q *queue) sort(n int, where func(*request) (taken bool)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, len(q.waiting))
	stay := q.waiting[:0]
	for _, r := range q.waiting[:n] {
		if !where(r) {
			stay = append(stay, r)
		}
	}
	q.waiting = slices.Delete(q.waiting, len(stay), n)
}

// committer sends what is queued, one transaction at a time, until the engine's life ends.
func (e *Engine) committer() {
	counters := counterRows{}
	for {
		select {
		case <-e.queue.filled:
		case <-e.life.Done():
			e.queue.sort(math.MaxInt, func(r *request) bool { return r.over(catalog.ErrClosed) })
			return
		}
		for e.life.Err() == nil {
			waiting := e.queue.first(e.cfg.MaxTxnOps)
			if len(waiting) == 0 {
				break
			}
			if err := e.load(counters, waiting); err != nil {
				e.queue.sort(len(waiting), func(r *request) bool { return len(counters.missing(r)) > 0 && r.over(err) })
				continue
			}
			p := newPack(&e.cfg)
			e.queue.sort(len(waiting), func(r *request) bool {
				if len(counters.missing(r)) > 0 {
					return false // it came, or its rows did not fit, since load
				}
				switch p.add(r, counters) {
				case added:
					return true
				case misused:
					return r.over(fmt.Errorf("a delta: %w", catalog.ErrNotCounters))
				}
				return false
			})
			if len(p.requests) > 0 {
				e.send(p, counters)
			}
		}
	}
}

// load reads the counter rows that requests add to, as far as counters does not know them and one transaction can.
func (e *Engine) load(counters counterRows, requests []*request) error {
	var ops []*pb.RequestOp
	var keys []string
	for _, r := range requests {
		counters.forget(r)
		for _, key := range counters.missing(r) {
			if len(keys) < e.cfg.MaxTxnOps && !slices.Contains(keys, key) {
				keys = append(keys, key)
				ops = append(ops, opRange(&pb.RangeRequest{Key: []byte(key)}))
			}
		}
	}
	if len(keys) == 0 {
		return nil
	}
	resp, err := e.cluster.txnRead(e.life, &pb.TxnRequest{Success: ops})
	if err != nil {
		return err
	}
	for i, key := range keys {
		counters.learn(key, rowOf(resp.Responses[i]))
	}
	return nil
}

// send sends p, waits for its outcome, and tells it to those who asked, or has them wait for another transaction.
func (e *Engine) send(p *pack, counters counterRows) {
	applied, answers, sure, err := e.carryOut(p)
	if err == nil && !applied {
		var found bool
		if found, err = p.judge(answers, counters); err == nil && sure && !found {
			err = fmt.Errorf("etcd refused a transaction of %d conditions that all hold", len(p.compares))
		}
	}
	switch {
	case err != nil:
		e.queue.finish(err, append(p.requests, p.doomed...))
	case applied:
		counters.learnFrom(p)
		e.queue.finish(nil, append(p.requests, p.doomed...))
	default:
		e.queue.again(append(p.requests, p.doomed...))
	}
}

// carryOut makes the transaction of p, see [stamp.carryOut]. One that changes nothing may be made any number of times.
func (e *Engine) carryOut(p *pack) (applied bool, answers []*pb.ResponseOp, sure bool, err error) {
	t := p.txn()
	if len(p.order) > 0 {
		return e.stamp.carryOut(e, t)
	}
	resp, err := e.cluster.txnRead(e.life, t)
	if err != nil {
		return false, nil, false, err
	}
	return resp.Succeeded, resp.Responses, true, nil
}
