package faultytest

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// Rule says which requests fail and how. Effects can be combined.
type Rule struct {
	Kind  layout.OpKind         // 0: every kind
	Match func(*layout.Op) bool // nil: every request of the kind; must not keep the op
	Skip  int                   // leave out the first so many that match
	Times int                   // apply to so many then, 0: to all
	Prob  float64               // apply with this chance, 0: always

	Restart func()        // called before the request is passed on, to restart the server behind the target
	Delay   time.Duration // pass the request on later, by Delay and up to Jitter more
	Jitter  time.Duration
	Late    time.Duration // keep back the answer for so long
	Err     error         // end the request with this error, without passing it on
	Reach   bool          // with Err: pass it on first, so that it takes effect though the answer is an error
	Short   bool          // with Err: pass on a beginning of the data first, and say so in N (READ and WRITE)
	Weaken  bool          // WRITE: answer that the data is UNSTABLE
}

// Config of a Target.
type Config struct {
	Seed    uint64
	Rules   []Rule // the first that applies counts
	Reorder bool   // pass on what was started between two Flushes in random order
}

// ErrQuiesced ends what was held back when its data file was quiesced.
var ErrQuiesced = errors.New("faulty target quiesced")

// ErrClosed ends what was held back when the target was closed.
var ErrClosed = errors.New("faulty target closed")

// Target is a target with faults.
type Target struct {
	inner   dataplane.Target
	reorder bool

	mu      sync.Mutex
	rnd     *rand.Rand
	rules   []*rule
	started []*entry // not flushed
	entries map[*layout.Op]*entry
	closed  bool

	onSparse func(call string) error // nil: pass it on

	refused  atomic.Bool
	stopping atomic.Bool
}

type rule struct {
	Rule
	seen, applied int
}

// entry is a request on its way.
type entry struct {
	t    *Target
	op   *layout.Op // the caller's
	rule Rule
	n    int // how much of the data is passed on

	mu     sync.Mutex
	passed bool      // inner was given to the wrapped target
	ended  bool      // Done is about to be called
	inner  layout.Op // what the wrapped target gets
}

// New wraps a target, which the wrapper closes.
func New(inner dataplane.Target, cfg Config) *Target {
	t := &Target{
		inner: inner, reorder: cfg.Reorder,
		rnd: rand.New(rand.NewPCG(cfg.Seed, 5)), entries: map[*layout.Op]*entry{},
	}
	t.SetRules(cfg.Rules...)
	return t
}

// SetRules replaces the rules, and their counts.
func (t *Target) SetRules(rules ...Rule) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rules = nil
	for _, r := range rules {
		t.rules = append(t.rules, &rule{Rule: r})
	}
}

// Applied is how often rule i has been applied.
func (t *Target) Applied(i int) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.rules[i].applied
}

// choose finds the rule for an op and makes the random choices. mu is held.
func (t *Target) choose(op *layout.Op) (Rule, int) {
	for _, r := range t.rules {
		if r.Kind != 0 && r.Kind != op.Kind || r.Match != nil && !r.Match(op) {
			continue
		}
		if r.seen++; r.seen <= r.Skip || r.Times > 0 && r.applied >= r.Times || r.Prob > 0 && t.rnd.Float64() >= r.Prob {
			continue
		}
		r.applied++
		res, n := r.Rule, len(op.Data)
		if res.Jitter > 0 {
			res.Delay += time.Duration(t.rnd.Int64N(int64(res.Jitter)))
		}
		if res.Short && op.Kind != layout.OpCommit {
			n = t.rnd.IntN(len(op.Data))
		}
		return res, n
	}
	return Rule{}, len(op.Data)
}

// Start implements dataplane.Target.
func (t *Target) Start(op *layout.Op) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		end(op, ErrClosed)
		return
	}
	e := &entry{t: t, op: op}
	e.rule, e.n = t.choose(op)
	e.inner = layout.Op{Kind: op.Kind, File: op.File, Off: op.Off, Data: op.Data[:e.n], Count: op.Count, Stable: op.Stable, Leave: op.Leave, Done: e.done}
	t.entries[op] = e
	t.started = append(t.started, e)
	t.mu.Unlock()
}

// Flush implements dataplane.Target.
func (t *Target) Flush() {
	t.mu.Lock()
	batch := t.started
	t.started = nil
	if t.reorder {
		t.rnd.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
	}
	t.mu.Unlock()
	for _, e := range batch {
		if e.rule.Delay > 0 {
			time.AfterFunc(e.rule.Delay, func() {
				e.pass()
				t.inner.Flush()
			})
		} else {
			e.pass()
		}
	}
	t.inner.Flush()
}

// pass gives the request to the wrapped target, or ends it in its place.
func (e *entry) pass() {
	if e.rule.Restart != nil {
		e.rule.Restart()
	}
	e.mu.Lock()
	switch {
	case e.ended:
		e.mu.Unlock()
	case e.rule.Err == nil || e.rule.Reach || e.rule.Short && e.n > 0:
		e.passed = true
		e.t.inner.Start(&e.inner)
		e.mu.Unlock()
	default:
		e.finish(e.rule.Err)
	}
}

// finish ends a request in place of the wrapped target. e.mu is held; finish releases it.
func (e *entry) finish(err error) {
	e.ended = true
	e.t.forget(e)
	e.mu.Unlock()
	end(e.op, err)
}

func end(op *layout.Op, err error) {
	op.N, op.EOF, op.Committed, op.Err = 0, false, 0, err
	op.Done(op)
}

func (t *Target) forget(e *entry) {
	t.mu.Lock()
	if t.entries[e.op] == e { // one that was detached may have been started again since
		delete(t.entries, e.op)
	}
	t.mu.Unlock()
}

// done takes over the wrapped target's answer. It cannot take e.mu: Start and Detach may call it.
func (e *entry) done(*layout.Op) {
	if e.rule.Late == 0 {
		e.t.forget(e)
		e.answer()
		return
	}
	time.AfterFunc(e.rule.Late, func() {
		e.mu.Lock()
		ended := e.ended
		e.ended = true
		e.t.forget(e)
		e.mu.Unlock()
		if !ended {
			e.answer()
		}
	})
}

// answer ends the request as the wrapped target and the rule say.
func (e *entry) answer() {
	op, inner := e.op, &e.inner
	op.N, op.EOF, op.Committed, op.Verifier, op.Err = inner.N, inner.EOF, inner.Committed, inner.Verifier, inner.Err
	if op.Err == nil && e.rule.Err != nil {
		op.Err, op.EOF = e.rule.Err, false
		if !e.rule.Short {
			op.N = 0
		}
	}
	if e.rule.Weaken && op.Kind == layout.OpWrite {
		op.Committed = layout.Unstable
	}
	op.Done(op)
}

// Detach implements dataplane.Target.
func (t *Target) Detach(op *layout.Op) {
	t.mu.Lock()
	e := t.entries[op]
	t.mu.Unlock()
	if e == nil {
		return
	}
	e.mu.Lock()
	switch {
	case e.ended:
		e.mu.Unlock()
	case e.passed:
		t.inner.Detach(&e.inner)
		if e.rule.Late > 0 && op.Kind != layout.OpWrite {
			e.finish(context.Canceled)
		} else {
			e.mu.Unlock()
		}
	case op.Kind == layout.OpWrite:
		e.inner.Data = slices.Clone(e.inner.Data)
		e.mu.Unlock()
	default:
		e.finish(context.Canceled)
	}
}

// Limits implements dataplane.Target.
func (t *Target) Limits() (rsize, wsize int) { return t.inner.Limits() }

// Announce has the server announce that it stops, or be back.
func (t *Target) Announce(stops bool) { t.stopping.Store(stops) }

// Stopping implements dataplane.Stopper.
func (t *Target) Stopping() bool { return t.stopping.Load() }

// Epoch implements dataplane.Epocher if the wrapped target does.
func (t *Target) Epoch() uint64 {
	if e, ok := t.inner.(dataplane.Epocher); ok {
		return e.Epoch()
	}
	return 0
}

// Refuse makes the target say that its server refuses connections, or no longer so.
func (t *Target) Refuse(refused bool) { t.refused.Store(refused) }

// Refused implements dataplane.Refuser.
func (t *Target) Refused() bool { return t.refused.Load() }

// Close implements dataplane.Target.
func (t *Target) Close() error {
	t.mu.Lock()
	t.closed = true
	var open []*entry
	for _, e := range t.entries {
		open = append(open, e)
	}
	t.mu.Unlock()
	for _, e := range open {
		e.mu.Lock()
		if e.ended || e.passed && e.rule.Late == 0 {
			e.mu.Unlock()
		} else {
			e.finish(ErrClosed)
		}
	}
	return t.inner.Close()
}
