package meta

import (
	"context"
	"errors"
	"math"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// reserve finds the place of an append, and keeps it for the session until that has said what became of it. It is in
// memory only, and the client tells of it again after a restart. A place whose answer died with the service is lost,
// and reads as zeros if something is written behind it. Therefore the next place is given only after the answer with
// the place before is sent.
//
// A client that does not number its places reports each one ahead of the write.
func (s *Service) reserve(ctx context.Context, c *call, a *metarpc.ReserveArgs) (*metarpc.ReserveResult, error) {
	s.mu.Lock()
	s.settlePlaces(c.sess.claims[a.ID], a.Ended, a.GivenUp)
	s.mu.Unlock()
	if _, _, err := s.regular(ctx, a.ID); err != nil {
		return nil, err
	}
	if err := s.awaitGrace(ctx); err != nil { // somebody may have a place that this instance does not know of
		return nil, err
	}
	p := pending{s: s, by: c.sess}
	defer p.end()
	if err := p.recall(ctx, []metarpc.LeaseItem{{ID: a.ID, Lease: metarpc.LeaseAttrs | metarpc.LeaseData}}); err != nil {
		return nil, err
	}
	if err := s.askWriters(ctx, c.sess, false, a.ID); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(a.ID)
	f.waiters++ // so that moves goes on counting
	defer func() {
		f.waiters--
		s.changedFile(f)
	}()
	for {
		if err := s.awaitAppend(ctx, f); err != nil {
			return nil, err
		}
		moves := f.moves
		placed := f.placedEnd()
		s.mu.Unlock()
		said, err := s.reports(ctx, a.ID)
		row, _, gone := s.regular(ctx, a.ID)
		full := error(nil)
		if err == nil && gone == nil {
			full = s.admitAppend(ctx, a, &row, max(said[0].end, placed))
		}
		s.mu.Lock()
		if err == nil {
			err = gone
		}
		if err != nil {
			return nil, err
		}
		if moves != f.moves || f.cut != nil || f.placing > 0 || f.unsure() || f.unfenced() {
			continue // what was reported may be neither in the row that was read nor in memory now, and quotas may have room again
		}
		if full != nil {
			return nil, full
		}
		off := max(row.Size, f.reported().end, f.placedEnd())
		if a.Len > math.MaxInt64-off {
			return nil, refuse(syscall.EFBIG)
		}
		cl := f.claim(c.sess)
		if cl.writer && !cl.awaited {
			if err := s.announceAppends(ctx, c, cl, row); err != nil {
				return nil, err
			}
			continue
		}
		at := now()
		if !metarpc.BackReserveRecall.In(c.from.version) {
			cl.report = cl.report.and(report{end: off + a.Len, mtime: at})
			f.raise(off + a.Len)
			return &metarpc.ReserveResult{Off: off, Mtime: at}, nil
		}
		f.placing++
		c.sent = func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			f.placing--
			s.changedFile(f)
		}
		return &metarpc.ReserveResult{Off: off, Mtime: at, Number: s.addPlace(cl, off, a.Len, at)}, nil
	}
}

// announceAppends has the row of a session say that it is awaited, which it got for other writes; s.mu is held, and
// released meanwhile. The row of a session that has none yet says it when it is put.
func (s *Service) announceAppends(ctx context.Context, c *call, cl *claim, row schema.Inode) error {
	id := cl.file.id
	cl.assigning++
	s.mu.Unlock()
	_, err := s.cfg.Files.Assign(ctx, id, row, 0, 1, c.sess.id, true, nil, nil)
	if err != nil && ctx.Err() != nil {
		err = errors.Join(err, s.cfg.Files.AwaitKnown(s.ctx, id))
	}
	if err != nil {
		err = s.assignError(ctx, c, id, err)
	}
	s.mu.Lock()
	cl.assigning--
	cl.awaited = err == nil
	return err
}

// admitAppend is EDQUOT if the quotas of a file have no room for what is about to be appended to it. Else nobody would take back that
// it is longer.
func (s *Service) admitAppend(ctx context.Context, a *metarpc.ReserveArgs, row *schema.Inode, said int64) error {
	more := layout.Range{Off: max(row.Size, said), Len: a.Len}.End() - row.Size
	return s.quotas.AdmitLonger(ctx, a.ID, row, more)
}

// awaitAppend waits until nobody cuts f, or may still be writing to it unasked, and all answers with places are sent;
// s.mu is held. A client that would wait long is told to ask again.
func (s *Service) awaitAppend(ctx context.Context, f *file) error {
	ctx, cancel := context.WithTimeoutCause(ctx, layoutWait, refusef(metarpc.StatusGrace,
		"inode %d is being truncated, fenced or appended to", f.id))
	defer cancel()
	for f.cut != nil || f.placing > 0 || f.unfenced() {
		if err := s.wait(ctx, f); err != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}
