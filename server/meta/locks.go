package meta

import (
	"context"
	"iter"
	"slices"
	"sync"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/locktable"
)

var (
	errBadFile = refuse(syscall.EBADF)
	errInGrace = &metarpc.Error{Status: metarpc.StatusGrace}
)

// meet tells the locks that a session has opened a file that others have open. unsure is as in locktable.Table.Opened.
// s.mu is held.
func (s *Service) meet(cl *claim, unsure bool) {
	s.locks.Opened(&cl.locks, unsure, cl.others())
}

// others are what other sessions that have the file open have of it; Service.mu is held.
func (cl *claim) others() iter.Seq[*locktable.Open] {
	return func(yield func(*locktable.Open) bool) {
		for _, o := range cl.file.claims {
			if o != cl && o.open && !yield(&o.locks) {
				return
			}
		}
	}
}

// admitLock finds out whether a call about a lock may be carried out, and who else has the file open; s.mu is held.
func (s *Service) admitLock(c *call, a *metarpc.LockArgs) (locktable.Request, error) {
	r := locktable.Request{Session: &c.sess.locks, LockArgs: a, Unsure: !c.sess.reclaimed}
	cl := c.sess.claims[a.ID]
	switch {
	case a.Type == metarpc.LockNone: // may always be
	case s.grace && !a.Reclaim:
		return r, errInGrace
	case !s.grace && a.Reclaim:
		return r, refusef(metarpc.Status(syscall.EIO), "locks can no longer be reclaimed")
	case cl == nil || !cl.open:
		return r, errBadFile
	}
	if cl != nil {
		r.Open, r.Sole = &cl.locks, true
		for range cl.others() {
			r.Sole = false
			break
		}
	}
	return r, nil
}

func (s *Service) lock(ctx context.Context, c *call, a *metarpc.LockArgs) (*metarpc.LockDone, error) {
	for checked, lasts := uint64(0), false; ; {
		s.mu.Lock()
		r, err := s.admitLock(c, a)
		if err != nil {
			s.mu.Unlock()
			return nil, err
		}
		r.Checked, r.Lasts = checked, lasts
		res, err := s.locks.Lock(r, s.mu.Unlock) // so a close that comes now takes the lock away afterwards
		s.tellReady(res.Ready)
		switch {
		case err != nil:
			return nil, err
		case res.Circle == nil:
			return &metarpc.LockDone{Shared: res.Shared}, nil
		}
		checked, lasts = res.Wait, s.lasts(ctx, res.Circle)
	}
}

func (s *Service) testLock(_ context.Context, c *call, a *metarpc.LockArgs) (*metarpc.LockResult, error) {
	if a.Type == metarpc.LockNone || a.Reclaim {
		return nil, errInvalid
	}
	s.mu.Lock()
	r, err := s.admitLock(c, a)
	if err != nil {
		s.mu.Unlock()
		return nil, err
	}
	return s.locks.Test(r, s.mu.Unlock), nil
}

// dropLocks takes away all that a session has of locks on a file, and what it waits for. Service.mu may be held.
func (s *Service) dropLocks(sess *session, id layout.FileID) {
	s.tellReady(s.locks.Drop(id, &sess.locks))
}

// forgetLocks takes all locks of a file away that does not exist any more. Service.mu may be held.
func (s *Service) forgetLocks(id layout.FileID) { s.tellReady(s.locks.Drop(id, nil)) }

// readyQueue has the messages to a client that it may have locks. They are sent one after the other, so that no client
// is flooded.
type readyQueue struct {
	mu      sync.Mutex
	queue   []metarpc.LockReadyArgs
	sending bool // there is a goroutine that sends them
}

// tellReady has clients ask for locks again. Service.mu may be held.
func (s *Service) tellReady(ready []locktable.Ready) {
	for _, r := range ready {
		r.Session.Tell(r.LockReadyArgs)
	}
}

// lockReady has the client of a session ask for a lock again.
func (s *Service) lockReady(sess *session, a metarpc.LockReadyArgs) {
	q := &sess.ready
	q.mu.Lock()
	defer q.mu.Unlock()
	if slices.Contains(q.queue, a) {
		return
	}
	q.queue = append(q.queue, a)
	if !q.sending {
		q.sending = true
		s.tasks.Go(func() { s.sendReady(sess) })
	}
}

// sendReady ends when there is nothing to be sent, or the session or the service ends.
func (s *Service) sendReady(sess *session) {
	q := &sess.ready
	for {
		q.mu.Lock()
		if len(q.queue) == 0 || sess.ctx.Err() != nil {
			q.queue, q.sending = nil, false
			q.mu.Unlock()
			return
		}
		a := q.queue[0]
		q.queue = q.queue[1:]
		q.mu.Unlock()
		s.callBack(s.ctx, sess, metarpc.BackLockReady, &a) // if it fails, the session or the service ends
	}
}
