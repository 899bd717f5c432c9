package meta

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// graceWait is how long a change waits for the end of the grace period before its client is told to ask again, so that
// such calls do not keep all slots.
const graceWait = 500 * time.Millisecond

func (s *Service) open(ctx context.Context, c *call, a *metarpc.OpenArgs) (*metarpc.AttrResult, error) {
	attr, lease, err := s.openFile(ctx, c, a)
	return &metarpc.AttrResult{Attr: attr, Lease: lease}, err
}

// openFile makes a regular file open for the caller's session, and returns its attributes.
func (s *Service) openFile(ctx context.Context, c *call, a *metarpc.OpenArgs) (metarpc.Attr, metarpc.Lease, error) {
	sess, id, who := c.sess, a.ID, s.caller(c)
	s.mu.Lock()
	f := s.file(id)
	for f.removing {
		if err := s.wait(ctx, f); err != nil {
			s.mu.Unlock()
			return metarpc.Attr{}, 0, err
		}
	}
	cl := f.claim(sess)
	before := cl.open
	cl.write = cl.write && before
	if !before {
		cl.pin, cl.exec, cl.opened = metarpc.CopyRef{}, false, false
	}
	cl.opening++
	var endExecution func(privileged bool) error
	if a.Access&metarpc.AccessExec != 0 {
		endExecution = s.beginExecution(cl)
	}
	if a.Reclaim && s.grace && len(a.Pinned.Handle) > 0 {
		cl.pin = a.Pinned // nobody has relied on that it is not
	}
	cl.open = true // from here on it is kept; if it is there now, it stays
	if !before {
		s.meet(cl, a.Reclaim)
	}
	s.mu.Unlock()
	show := s.show
	if a.Reclaim {
		show = s.showReclaimed
	}
	attr, lease, err := show(ctx, sess, id)
	switch {
	case err != nil:
	case !isRegular(attr.Mode):
		err = notRegular(attr.Mode)
	case !a.Reclaim:
		row := schema.Inode{Mode: attr.Mode, UID: attr.UID, GID: attr.GID, Flags: attr.Flags}
		err = s.permission(ctx, who, id, &row, a.Access)
	}
	s.mu.Lock()
	if endExecution != nil {
		if e := endExecution(err == nil && isPrivileged(attr.Mode, attr.Flags)); err == nil {
			err = e
		}
	}
	if err == nil && !a.Reclaim && a.Access&metarpc.AccessWrite != 0 && s.files[id].executed(sess) {
		err = errTextBusy
	}
	cl.opening--
	cl.opened = cl.opened || err == nil
	s.mu.Unlock()
	if err != nil {
		// Another call of the session may have opened it. If closing fails, the end of the session does it.
		s.closeSuch(ctx, sess, id, func(cl *claim) bool { return !cl.opened && cl.opening == 0 })
		return attr, lease, err
	}
	if a.Reclaim {
		// Where it has layouts for reading it does not say.
		on, err := s.onNamespaces(ctx, id)
		if err != nil {
			return attr, lease, err
		}
		s.mu.Lock()
		if on && cl.open {
			cl.reads = []layout.Range{{Len: layout.ToEOF}}
		}
		s.mu.Unlock()
	}
	if a.Reclaim && len(a.Pinned.Handle) > 0 {
		if err := s.repin(ctx, sess, id, a.Pinned); err != nil {
			return attr, lease, err
		}
	}
	if a.Access&metarpc.AccessWrite != 0 || a.Reclaim && !who.ReadOnly {
		s.mu.Lock()
		cl.write = cl.open // not if it is closed or gone meanwhile
		s.mu.Unlock()
	}
	return attr, lease, nil
}

func (s *Service) close(ctx context.Context, c *call, a *metarpc.CloseArgs) (*metarpc.Empty, error) {
	// Side by side, as each file that is removed with it takes a commit, and those that are made at the same time are one.
	var files errgroup.Group
	files.SetLimit(closeWidth)
	for _, id := range a.IDs {
		files.Go(func() error {
			err := s.closeFile(ctx, c.sess, id)
			if err == nil {
				s.dropLocks(c.sess, id)
			}
			return err
		})
	}
	return &metarpc.Empty{}, files.Wait()
}

// closeWidth is how many files of a call are closed at a time.
const closeWidth = 32

// closeFile makes a file no longer open for a session, and removes it if that was what kept it. If that fails the file
// stays open for the session.
func (s *Service) closeFile(ctx context.Context, sess *session, id layout.FileID) error {
	return s.closeSuch(ctx, sess, id, func(*claim) bool { return true })
}

// closeSuch is closeFile if the session's claim is such, which is called with s.mu held.
func (s *Service) closeSuch(ctx context.Context, sess *session, id layout.FileID, such func(*claim) bool) error {
	s.mu.Lock()
	f := s.files[id]
	for f != nil && f.removing {
		if err := s.wait(ctx, f); err != nil {
			s.mu.Unlock()
			return err
		}
		f = s.files[id]
	}
	cl := sess.claims[id]
	if cl == nil || !cl.open || !such(cl) {
		if f != nil {
			s.changedFile(f)
		}
		s.mu.Unlock()
		return nil
	}
	cl.open = false
	if !f.orphan || s.grace || f.opened() {
		cl.reads = nil
		s.changedFile(f)
		s.mu.Unlock()
		return nil
	}
	cl.open = true
	s.mu.Unlock()
	return s.removeOrphan(ctx, id, sess)
}

// removeOrphan removes a file without names, unless a session other than closing has it open.
func (s *Service) removeOrphan(ctx context.Context, id layout.FileID, closing *session) error {
	_, err := change(ctx, s, nil, func(t *tx) (*metarpc.Empty, error) {
		gone := false
		s.mu.Lock()
		f := s.file(id)
		for f.removing {
			if err := s.wait(ctx, f); err != nil {
				s.mu.Unlock()
				return nil, err
			}
		}
		kept := false
		for _, cl := range f.claims {
			kept = kept || cl.open && cl.sess != closing
		}
		if kept || !f.orphan {
			if cl := f.claimOf(closing); cl != nil {
				cl.open, cl.reads = false, nil
			}
			s.changedFile(f)
			s.mu.Unlock()
			return nil, nil
		}
		f.removing = true
		s.mu.Unlock()
		t.onOutcome(func(committed bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			f.removing = false
			if committed || gone {
				s.gone(f)
			} else {
				s.changedFile(f)
			}
		})
		row, raw, err := s.inode(ctx, id)
		if gone = errors.Is(err, errStale); gone { // by an earlier try whose outcome was unknown
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		t.GuardEqual(schema.InodeKey(id), raw)
		t.Delete(schema.OrphanKey(id))
		if err := s.discard(ctx, t, id); err != nil {
			return nil, err
		}
		s.rememberRemoved(id, row, nil, row.Ctime)
		return nil, s.destroy(ctx, t, id, &row)
	})
	return err
}

// claimOf returns what sess has to do with f, nil if there is nothing; Service.mu is held.
func (f *file) claimOf(sess *session) *claim {
	if sess == nil {
		return nil
	}
	return sess.claims[f.id]
}

// beginRemoval decides whether a file that loses its last name goes or is kept because a session has it open. Until t's outcome is known nobody else decides about the file, and who opens
// it waits.
func (s *Service) beginRemoval(ctx context.Context, t *tx, id layout.FileID) (keep bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	if f.removing {
		waiting, wait := t.pending.waiting(ctx, t.affected)
		defer wait.End()
		for f.removing {
			if err := s.wait(waiting, f); err != nil {
				return false, context.Cause(waiting)
			}
		}
	}
	f.removing = true
	keep = f.opened()
	t.onOutcome(func(committed bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.removing = false
		switch {
		case !committed:
			s.changedFile(f)
		case !keep:
			s.gone(f)
		default:
			f.orphan = true
			s.changedFile(f)
			if !f.opened() { // what kept it ended meanwhile
				s.reap(id)
			}
		}
	})
	return keep, nil
}

// reap removes orphans in the background.
func (s *Service) reap(ids ...layout.FileID) {
	s.tasks.Go(func() { // ends when each file is gone or somebody has it open, or with s.ctx
		each(ids, func(id layout.FileID) {
			retry.Persist(s.ctx, s.log, fmt.Sprintf("removal of inode %d, which has no name", id), func() error {
				return s.removeOrphan(s.ctx, id, nil)
			})
		})
	})
}

// checkGrace ends the grace period if no session may still come back for something.
func (s *Service) checkGrace() {
	s.mu.Lock()
	over := s.grace
	for _, sess := range s.sessions {
		over = over && sess.reclaimed
	}
	s.mu.Unlock()
	if over {
		s.endGrace()
	}
}

// sure notes that nothing more is expected of a session, but for files for which it is awaited; Service.mu is held.
func (s *Service) sure(sess *session) {
	for _, cl := range sess.claims {
		if cl.unsure && !s.awaits(cl) {
			cl.unsure = false
			s.changedFile(cl.file)
		}
	}
}

func (s *Service) reclaimComplete(_ context.Context, c *call, _ *metarpc.Empty) (*metarpc.Empty, error) {
	s.mu.Lock()
	if s.sessions[c.sess.id] == c.sess { // else nobody knows any more what it does
		c.sess.reclaimed = true
		s.sure(c.sess)
	}
	s.mu.Unlock()
	s.checkGrace()
	return &metarpc.Empty{}, nil
}

// awaitGrace waits for the end of the grace period, and then has the client ask again.
func (s *Service) awaitGrace(ctx context.Context) error { return s.awaitOver(ctx, s.graceOver) }

// awaitQuiet is awaitGrace that waits for s.quiet.
func (s *Service) awaitQuiet(ctx context.Context) error { return s.awaitOver(ctx, s.quiet) }

func (s *Service) awaitOver(ctx context.Context, over <-chan struct{}) error {
	select {
	case <-over:
		return nil
	default:
	}
	timer := time.NewTimer(graceWait)
	defer timer.Stop()
	select {
	case <-over:
		return nil
	case <-timer.C:
		return refusef(metarpc.StatusGrace, "clients may still come back for what they had before the restart")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// endGrace ends the grace period, in which nobody else could know what sessions have, and removes the orphans that none of
// them claimed.
func (s *Service) endGrace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.grace {
		return
	}
	s.grace = false
	close(s.graceOver)
	var orphans []layout.FileID
	for id, f := range s.files {
		if f.orphan && !f.removing && !f.opened() {
			orphans = append(orphans, id)
		}
	}
	for _, sess := range s.sessions {
		s.sure(sess)
	}
	s.reap(orphans...)
	s.log.Info("grace period over", "unclaimed files without names", len(orphans))
}
