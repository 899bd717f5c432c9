package meta

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
)

const (
	maxTries  = 200                    // of one change, before the service says that it cannot do it
	firstWait = 500 * time.Microsecond // longest wait before the third try, doubled for each further one
	lastWait  = 20 * time.Millisecond  // up to this
)

// errRetry from a build function means that what it read does not fit together, because somebody is changing it.
var errRetry = errors.New("changed while it was read")

// errContended ends a change that never got through.
var errContended = fmt.Errorf("given up after %d tries: others kept changing the same rows", maxTries)

// tx is one attempt at a change: its batch, and who wants to know whether it was committed.
type tx struct {
	catalog.Batch
	first    bool // no try of the change came before this one
	guessed  bool // it relies on what was read before, and so do errors
	outcome  []func(committed bool)
	affected []metarpc.LeaseItem
	usage    bool            // it changes usage
	dirtied  []layout.FileID // whose usage, but for the root
	lost     []layout.FileID // that lose their last names, of other shards
	holding  *holding        // what the services of those hold for the change
	answer   []byte          // as it is sent,
	stored   []byte          // and as it is stored with the batch
	err      error           // when the outcome is told: why it was not committed, which may not be known for certain
}

// affects says what of an inode will no longer be as others know it.
func (t *tx) affects(id layout.FileID, lease metarpc.Lease) {
	t.affected = append(t.affected, metarpc.LeaseItem{ID: id, Lease: lease})
}

// onOutcome has f called once when it is known whether the batch was committed, the last one first.
func (t *tx) onOutcome(f func(committed bool)) { t.outcome = append(t.outcome, f) }

func (t *tx) settle(committed bool) {
	for i := len(t.outcome) - 1; i >= 0; i-- {
		t.outcome[i](committed)
	}
}

// change does what a call that may be executed only once asks for. build reads what it needs and fills a batch whose
// guards name all it relied on; it is called again, with a fresh tx, as often as a guard does not hold. Its result goes
// into the same batch as the call's answer. If it leaves the batch empty there is nothing to do and to remember.
//
// Leases of others on what the batch affects are recalled before it is committed, and none are granted from then on until
// the change is visible or given up.
//
// What is affected of inodes of other shards is held by their services meanwhile.
//
// With a nil c the change is nobody's answer.
func change[R any](ctx context.Context, s *Service, c *call, build func(*tx) (*R, error)) (*R, error) {
	p := pending{s: s}
	if c != nil {
		p.by = c.sess
	}
	h := holding{s: s}
	defer func() {
		p.end()
		h.end()
	}()
	for try := range maxTries {
		if err := backOff(ctx, try); err != nil {
			return nil, err
		}
		t := &tx{holding: &h, first: try == 0}
		result, err := build(t)
		if err != nil && t.guessed {
			err = errRetry
		}
		if err == nil && t.Len() == 0 {
			t.settle(false)
			return result, nil
		}
		if err == nil {
			err = s.prepare(ctx, &p, &h, t)
		}
		if err == nil {
			err = s.commit(ctx, c, t, result)
			h.lostHold(err)
		}
		t.err = err
		if errors.Is(err, catalog.ErrUnknown) && c != nil {
			h.doubt = true
			if err = s.findOut(ctx, c, t); err == nil {
				t.err = nil
			}
		}
		late := false
		if guard := (*catalog.GuardError)(nil); err != nil && h.doubt && !again(err) && !errors.As(err, &guard) && c.h.Op != metarpc.OpSetAttr {
			// What speaks against the change may be its own work: that of a try which was committed after findOut had looked.
			late = s.findOut(ctx, c, t) == nil
		}
		t.settle(err == nil)
		if t.usage {
			s.usageSoon()
		}
		if err == nil || late {
			h.committed = true
			if late {
				c.late = true
				result = new(R) // the answer is in c.frame
			}
			return result, nil
		}
		if guard := (*catalog.GuardError)(nil); !again(err) && !errors.As(err, &guard) {
			return nil, err
		}
	}
	return nil, errContended
}

// again reports whether an error, which is no guard's, is a reason to try a change again.
func again(err error) bool {
	return errors.Is(err, errRetry) || errors.Is(err, catalog.ErrConflict) || errors.Is(err, catalog.ErrUnknown)
}

// commit commits t, with the answer of c if there is a call.
func (s *Service) commit(ctx context.Context, c *call, t *tx, result any) error {
	if c == nil {
		return s.engine.Commit(ctx, &t.Batch)
	}
	var err error
	t.answer, err = c.reply(result)
	t.stored = t.answer
	if bare := withoutLease(result); err == nil && bare != result {
		t.stored, err = c.reply(bare)
	}
	if err != nil {
		return err
	}
	t.Put(schema.ReplyKey(c.sess.id, c.h.Slot), schema.Encode(&schema.Reply{Sequence: c.h.Sequence, Frame: t.stored}))
	if err := s.engine.Commit(ctx, &t.Batch); err != nil {
		return err
	}
	c.frame = t.answer
	return nil
}

// findOut looks whether t, the try of c whose outcome is unknown, was committed, or an earlier one, and then sets the answer;
// errRetry if not. Should it be committed later still, the guards of the next try do not hold, and what that one reads
// is this one's work: before the change is refused for that, it is looked again.
func (s *Service) findOut(ctx context.Context, c *call, t *tx) error {
	for try := 0; ; try++ {
		if err := backOff(ctx, try); err != nil {
			return err
		}
		err := s.engine.Commit(ctx, new(catalog.Batch)) // what is read next must not be lost in a crash
		if err == nil {
			break
		}
		if !again(err) {
			return err
		}
	}
	var row schema.Reply
	raw, err := s.get(ctx, schema.ReplyKey(c.sess.id, c.h.Slot), &row)
	if err == nil && (raw == nil || row.Sequence != c.h.Sequence) {
		err = errRetry
	}
	if err == nil {
		if c.frame = row.Frame; bytes.Equal(row.Frame, t.stored) { // else it is that of an earlier try
			c.frame = t.answer
		}
	}
	return err
}

// backOff waits before a try: not at all before the first two, then for a random time, so that whoever collided goes
// apart.
func backOff(ctx context.Context, try int) error {
	if try < 2 {
		return ctx.Err()
	}
	return pause(ctx, rand.N(min(firstWait<<min(try-2, 10), lastWait)))
}

func pause(ctx context.Context, wait time.Duration) error {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// persist calls f until it succeeds or ctx ends, more and more seldom, and logs when it begins and ends to fail.
func (s *Service) persist(ctx context.Context, what string, f func() error) error {
	wait := 100 * time.Millisecond
	var since time.Time
	for {
		err := f()
		switch {
		case err == nil && since.IsZero():
			return nil
		case err == nil:
			s.log.Info(what+": succeeded", "after", time.Since(since).Round(time.Millisecond))
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case since.IsZero():
			since = time.Now()
			s.log.Warn(what+": failed; trying again", "error", err)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
		wait = min(2*wait, 15*time.Second)
	}
}

// status is what a client is told of err. What is not an answer but a failure of the service goes to the log.
func (s *Service) status(c *call, err error) (metarpc.Status, string) {
	if e := (*metarpc.Error)(nil); errors.As(err, &e) {
		return e.Status, e.Message
	}
	if c.sess.ctx.Err() != nil {
		return metarpc.StatusShutdown, "the service or the session is going down"
	}
	if errors.Is(err, catalog.ErrFull) { // patient says so once
		return errNoSpace.Status, err.Error()
	}
	s.log.Error("call failed", "op", c.h.Op, "session", c.sess, "error", err)
	return metarpc.StatusInternal, err.Error()
}
