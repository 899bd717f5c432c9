package metaclient

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// session is one session with the service: its slots, and the calls in them. Client.mu guards what is said to be.
type session struct {
	id    metarpc.SessionID
	lease time.Duration
	slots []*slot

	free  chan *slot    // for ordinary calls
	prior chan *slot    // for calls of OnRecall, OnReset and Close only
	renew chan *slot    // for Renew only
	ended chan struct{} // closed when the session is over
}

// slot holds one call. Whoever took it from a channel owns it until submit; from then until the call is answered or lost
// it is outstanding, and afterwards it belongs to the caller again or, if that has left, to who found out.
type slot struct {
	number   int
	pool     chan *slot // where it returns to
	sequence uint64
	frame    []byte    // the call in the form of metarpc.Version, from submit on unchanged
	sent     time.Time // not before submit; on later connections again

	op   metarpc.Op
	hook func(*outcome)

	outstanding bool // these three are guarded by Client.mu
	abandoned   bool // the caller has left
	sends       int  // connections on which the call was sent and may have been executed

	done   chan struct{} // has a token when result is set and the caller has not left
	result outcome
}

// outcome is what became of a call.
type outcome struct {
	err       error // no answer: an *OutcomeError, ErrClosed, errAgain, or the reason why it was never sent
	status    metarpc.Status
	message   string
	raw       []byte // the result's bytes, valid until the slot is used again
	abandoned bool   // nobody else looks at this outcome
}

func newSession(w *metarpc.Welcome) *session {
	s := &session{
		id: w.Session, lease: time.Duration(w.Lease),
		free: make(chan *slot, w.Slots), prior: make(chan *slot, w.Slots), renew: make(chan *slot, 1),
		ended: make(chan struct{}),
	}
	kept := max(1, w.Slots/8)
	for i := range w.Slots {
		sl := &slot{number: i, done: make(chan struct{}, 1)}
		s.slots = append(s.slots, sl)
		switch {
		case i == 0:
			sl.pool = s.renew
		case i <= kept:
			sl.pool = s.prior
		default:
			sl.pool = s.free
		}
		sl.pool <- sl
	}
	return s
}

// bigBuffer is the capacity above which a slot's buffer is not kept for the next call.
const bigBuffer = 16 << 10

// release makes a slot that is not outstanding ready for the next call.
func (sl *slot) release() {
	sl.result, sl.hook = outcome{raw: sl.result.raw[:0]}, nil
	if cap(sl.frame) > bigBuffer {
		sl.frame = nil
	}
	if cap(sl.result.raw) > bigBuffer {
		sl.result.raw = nil
	}
	sl.pool <- sl
}

// finish tells whoever is concerned that the slot's result is set; the slot is no longer outstanding.
func (sl *slot) finish() {
	if sl.hook != nil && sl.result.err != errAgain && (!sl.putOff() || sl.result.abandoned) {
		sl.hook(&sl.result)
	}
	if sl.result.abandoned {
		sl.release()
	} else {
		sl.done <- struct{}{}
	}
}

// putOff reports whether the caller is to make the call again in a while. Locks are not asked for here again: whoever does
// that has to let the reclaiming of locks go first.
func (sl *slot) putOff() bool {
	if sl.result.err != nil {
		return false
	}
	grace := sl.result.status == metarpc.StatusGrace && sl.op != metarpc.OpLock && sl.op != metarpc.OpTestLock
	return grace || sl.turnedBack()
}

// turnedBack reports whether the call was in the way of a recall.
func (sl *slot) turnedBack() bool { return sl.result.status == metarpc.StatusTurnedBack }

// lost ends a call whose session is over. One that may have been executed and must not be twice is an OutcomeError;
// others go on in the next session, if anybody still waits for them.
func (sl *slot) lost(cause error) {
	switch {
	case cause == ErrClosed:
		sl.result.err = ErrClosed
	case sl.op.Once() && sl.sends > 0, sl.abandoned:
		sl.result.err = &OutcomeError{Op: sl.op, Cause: cause}
	default:
		sl.result.err = errAgain
	}
	sl.result.abandoned = sl.abandoned
	sl.finish()
}

// refuse ends an outstanding call that the service is too old for; Client.mu is held. A newer one may have executed it before.
func (sl *slot) refuse() {
	sl.outstanding = false
	sl.result.abandoned = sl.abandoned
	if sl.op.Once() && sl.sends > 0 {
		sl.result.err = &OutcomeError{Op: sl.op, Cause: errTooOld}
		return
	}
	sl.result.status, sl.result.message = metarpc.Status(syscall.EOPNOTSUPP), errTooOld.Error()
}

// errAgain ends a call that goes on in the next session.
var errAgain = errors.New("to be called again")

type priorKey struct{}

// prior marks the context of calls that others may wait for, so that they get slots of their own.
func prior(ctx context.Context) context.Context { return context.WithValue(ctx, priorKey{}, true) }

// acquire waits for a session and a slot of it.
func (c *Client) acquire(ctx context.Context) (*session, *slot, error) {
	for {
		if c.ctx.Err() != nil {
			return nil, nil, ErrClosed
		}
		c.mu.Lock()
		s, begun := c.session, c.begun
		c.mu.Unlock()
		// After that: what ends with a session (OnLost) gets no slot of the next one.
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		if s == nil {
			select {
			case <-begun:
			case <-ctx.Done():
			case <-c.ctx.Done():
			}
			continue
		}
		select {
		case sl := <-s.free:
			return s, sl, nil
		default:
		}
		var reserve chan *slot
		if ctx.Value(priorKey{}) != nil {
			reserve = s.prior
		}
		select {
		case sl := <-s.free:
			return s, sl, nil
		case sl := <-reserve:
			return s, sl, nil
		case <-s.ended:
		case <-ctx.Done():
		case <-c.ctx.Done():
		}
	}
}

// submit makes a slot with a frame outstanding and sends it; abandoned says that nobody will wait. It reports false if
// the session is over, or ctx with which the service is told that all is reclaimed: it could be another instance by now. With a connection, the caller may read
// the answer from there (readFor).
func (c *Client) submit(ctx context.Context, s *session, sl *slot, op metarpc.Op, hook func(*outcome), abandoned bool) (reads *conn, ok bool) {
	c.mu.Lock()
	if c.session != s || op == metarpc.OpReclaimComplete && ctx.Err() != nil {
		c.mu.Unlock()
		return nil, false
	}
	sl.op, sl.hook, sl.sent = op, hook, time.Now()
	c.sent[op].Add(1)
	sl.outstanding, sl.abandoned, sl.sends = true, abandoned, 0
	cn := c.conn
	if cn == nil {
		c.mu.Unlock()
		return nil, true
	}
	if !c.queue(cn, sl) {
		c.mu.Unlock()
		sl.finish()
		return nil, true
	}
	alone := cn.calls == 1 && sl.sent.Sub(cn.calledBack) >= backQuiet
	c.mu.Unlock()
	c.flush(cn)
	if alone {
		return cn, true
	}
	if len(cn.token) > 0 {
		cn.kick()
	}
	return nil, true
}

// renewInstead makes a Renew of an outstanding call. Nobody remembers the call: the service was restarted, and has no
// record of calls that change nothing.
func (sl *slot) renewInstead() {
	h := metarpc.CallHeader{Slot: sl.number, Sequence: sl.sequence, Op: metarpc.OpRenew}
	frame, err := metarpc.AppendCall(sl.frame[:0], h, &metarpc.Empty{})
	if err != nil { // a frame of fixed size
		panic(err)
	}
	sl.op, sl.frame = metarpc.OpRenew, frame
}

// abandon leaves an outstanding call to itself. It reports false if its outcome is already there or about to be.
func (c *Client) abandon(sl *slot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if sl.outstanding {
		sl.abandoned = true
	}
	return sl.outstanding
}

// YieldKey is under which the context of a call may have a Yielder.
type YieldKey struct{}

// Yielder is asked when the service has put a change off, which it was sent for somebody who may hold locks meanwhile.
type Yielder interface {
	// Yields reports whether a call is to end with StatusTurnedBack instead of being made again here, so that its caller
	// lets go of the locks and starts over. back says that the service has turned the change back since it stood in the way of
	// a recall of this client.
	Yields(op metarpc.Op, back bool) bool
}

// WaitedKey is under which the context of a call may have an *atomic.Int64, to which the nanoseconds are added that it took.
type WaitedKey struct{}

// Call makes a call and waits for its answer, through lost connections, until ctx ends. args points to the arguments of
// op, result to a zero value of its result or is nil. A status other than StatusOK is a *metarpc.Error; an
// *OutcomeError tells that nobody knows whether the call was executed. After the end of ctx the call may still be
// executed, once.
func (c *Client) Call(ctx context.Context, op metarpc.Op, uid, gid uint32, args, result any) error {
	return c.do(ctx, op, metarpc.Cred{UID: uid, GID: gid}, args, result, nil)
}

// do is Call with a hook, which learns the call's outcome exactly once, also when the caller has left before. The hook
// runs in the goroutine that reads the connection when there is an answer, before anything that the service sent later
// is looked at. It must be short.
func (c *Client) do(ctx context.Context, op metarpc.Op, cred metarpc.Cred, args, result any, hook func(*outcome)) error {
	never := func(err error) error { // the end of a call that is in no slot
		if hook != nil {
			hook(&outcome{err: err})
		}
		return err
	}
	if waited, ok := ctx.Value(WaitedKey{}).(*atomic.Int64); ok {
		began := time.Now()
		defer func() { waited.Add(int64(time.Since(began))) }()
	}
	ctx, stop := c.patient(ctx)
	defer stop()
	grace := backoff{most: gracePause}
	for {
		s, sl, err := c.acquire(ctx)
		if err != nil {
			return never(c.wrap(op, err))
		}
		if reopened := c.reopening(ctx, args); reopened != nil {
			sl.release()
			select {
			case <-reopened:
			case <-ctx.Done():
			case <-c.ctx.Done():
			}
			continue
		}
		h := metarpc.CallHeader{Slot: sl.number, Sequence: sl.sequence + 1, Op: op, Cred: cred}
		sl.frame, err = metarpc.AppendCall(sl.frame[:0], h, args)
		if err != nil {
			sl.release()
			return never(c.wrap(op, err))
		}
		sl.sequence++
		cn, ok := c.submit(ctx, s, sl, op, hook, false)
		if !ok {
			sl.sequence-- // it was not sent
			sl.release()
			continue
		}
		if cn != nil {
			c.readFor(cn, sl)
		}
		select {
		case <-sl.done:
		case <-ctx.Done():
			if c.abandon(sl) {
				return c.wrap(op, context.Cause(ctx))
			}
			<-sl.done
		}
		o := &sl.result
		err = o.err
		switch {
		case err == errAgain:
			continue
		case sl.putOff():
			back := sl.turnedBack()
			sl.release()
			if y, ok := ctx.Value(YieldKey{}).(Yielder); ok && y.Yields(op, back) {
				return never(&metarpc.Error{Op: op, Status: metarpc.StatusTurnedBack, Message: "it stood in a recall's way"})
			}
			if !grace.wait(ctx) {
				return never(c.wrap(op, context.Cause(ctx)))
			}
			continue
		case err != nil:
		case o.status != metarpc.StatusOK:
			err = &metarpc.Error{Op: op, Status: o.status, Message: o.message}
		case result != nil:
			err = metarpc.DecodeResult(op, o.raw, result)
		}
		sl.release()
		return err
	}
}
