package meta

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// errRetry from a build function means that what it read does not fit together, because somebody is changing it.
var errRetry = errors.New("changed while it was read")

// errContended ends a change that never got through.
var errContended = fmt.Errorf("given up after %d tries: others kept changing the same rows", retry.Tries)

// tx is one attempt at a change: its batch, and who wants to know whether it was committed.
type tx struct {
	usage.Change
	first    bool // no try of the change came before this one
	guessed  bool // it relies on what was read before, and so do errors
	outcome  []func(committed bool)
	affected []metarpc.LeaseItem
	lost     []layout.FileID // that lose their last names, of other shards
	pending  *pending        // the change
	holding  *holding        // what the services of those hold for the change
	answer   []byte          // as it is sent
	reply    []byte          // the row that the batch has of it
	err      error           // when the outcome is told: why it was not committed
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
// With a nil c the change is nobody's answer. Such a change can do no harm twice, in the sense of catalog.FindOut.
//
// Of a try whose outcome is unknown it is found out, whatever becomes of ctx: until then what has been marked stays so, and nobody is told an
// outcome. If the service stops before, nobody ever is: it is the next instance's to see.
func change[R any](ctx context.Context, s *Service, c *call, build func(*tx) (*R, error)) (*R, error) {
	p := pending{s: s}
	if c != nil {
		p.by, p.turns = c.sess, c.from.version >= metarpc.TurnsBack
	}
	h := holding{s: s}
	known := true
	defer func() {
		if known {
			p.end()
			h.end()
		}
	}()
	for try := range retry.Tries {
		if err := retry.BackOff(ctx, try); err != nil {
			return nil, err
		}
		t := &tx{Change: usage.Change{Shard: s.cfg.Shard}, pending: &p, holding: &h, first: try == 0}
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
			if errors.Is(err, catalog.ErrUnknown) {
				ctx.Done() // see turn
				if err = s.findOut(c, t); errors.Is(err, catalog.ErrUnknown) {
					known = false
					return nil, err
				}
			}
			h.lostHold(err)
		}
		t.err = err
		t.settle(err == nil)
		if t.ChangesUsage() {
			s.usage.Soon()
		}
		if err == nil {
			h.committed = true
			if c != nil {
				c.frame = t.answer
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
	stored := t.answer
	if bare := withoutLease(result); err == nil && bare != result {
		stored, err = c.reply(bare)
	}
	if err != nil {
		return err
	}
	t.reply = schema.Encode(&schema.Reply{Sequence: c.h.Sequence, Frame: stored})
	c.putReply(&t.Batch, t.reply)
	err = s.engine.Commit(ctx, &t.Batch)
	if err == nil {
		c.row = t.reply
	}
	return err
}

// putReply has a batch put the reply row of c's slot, which is guarded by what it was: of all tries and fences of the calls of a slot each is committed only
// right after those that have been.
func (c *call) putReply(b *catalog.Batch, row []byte) {
	key := schema.ReplyKey(c.sess.id, c.h.Slot)
	b.GuardRow(key, c.row)
	b.Put(key, row)
}

// findOut finds out what became of t, whose outcome is unknown. It returns nil if it was committed, and ErrUnknown if the service stops before that is
// known. With any other error it was not, and never will be.
func (s *Service) findOut(c *call, t *tx) error {
	if c == nil {
		return catalog.FindOut(s.ctx, s.engine, &t.Batch)
	}
	committed := false
	var closed error
	err := retry.Persist(s.ctx, s.log, fmt.Sprintf("outcome of a call of session %v", c.sess), func() (err error) {
		if committed, err = s.fenceReply(c, t); errors.Is(err, catalog.ErrClosed) {
			closed = err
			return nil
		}
		return err
	})
	switch err = errors.Join(err, closed); {
	case err != nil:
		return errors.Join(catalog.ErrUnknown, err)
	case !committed:
		return errRetry
	}
	return nil
}

// fenceReply sees to it that t is not committed any more, or finds that it was.
func (s *Service) fenceReply(c *call, t *tx) (committed bool, err error) {
	var last schema.Reply
	key := schema.ReplyKey(c.sess.id, c.h.Slot)
	if c.row != nil {
		if err := schema.DecodeRow(key, c.row, &last); err != nil {
			return false, err
		}
	}
	fence := schema.Encode(&schema.Reply{Sequence: c.h.Sequence, Fences: last.Fences + 1})
	for try := 0; ; try++ {
		if err := retry.BackOff(s.ctx, try); err != nil {
			return false, err
		}
		var b catalog.Batch
		c.putReply(&b, fence)
		err := s.engine.Commit(s.ctx, &b)
		row := fence
		if guard := (*catalog.GuardError)(nil); errors.As(err, &guard) {
			row, err = schema.FindRow(s.ctx, s.engine, key)
		}
		switch {
		case err != nil && again(err):
		case err != nil:
			return false, err
		case bytes.Equal(row, fence), bytes.Equal(row, t.reply):
			c.row = row
			return bytes.Equal(row, t.reply), nil
		default:
			return false, fmt.Errorf("another service has executed calls of session %v", c.sess)
		}
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
