package meta

import (
	"context"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/filelock"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Locks of fcntl(2) and of flock(2) are kept in memory: clients set them again after a restart, in the grace period. A
// session has locks only on files that it has open, so closing is what ends them at the latest.
//
// A lock is granted only as the answer to a call. Who has to wait is remembered, called back when the lock may be free,
// and asks again; for a moment (reserveTime) the lock is kept for it. Nobody relies on the callback to arrive: waiting
// clients ask again every few seconds, and who does not ask for a while (waitTime) no longer waits.
const (
	// maxSessionLocks bounds what one session can make the service remember: locks, and waits for locks.
	maxSessionLocks = 1 << 16
	// reserveTime is how long a lock is kept for who has been called back.
	reserveTime = time.Second
	// waitTime is how long a wait is remembered that is not asked for again.
	waitTime = 20 * time.Second
	// fairTime is how long somebody may be overtaken by others who want to share a lock that it wants for itself. From
	// then on they wait behind it, though no longer than that themselves: it may be they whom a holder waits for.
	fairTime = 2 * time.Second
)

var (
	errBadFile  = refuse(syscall.EBADF)
	errAgain    = refuse(syscall.EAGAIN)
	errDeadlock = refuse(syscall.EDEADLK)
	errNoLock   = refuse(syscall.ENOLCK)
	errLockWait = &metarpc.Error{Status: metarpc.StatusLockWait}
	errInGrace  = &metarpc.Error{Status: metarpc.StatusGrace}
	errShared   = &metarpc.Error{Status: metarpc.StatusShared}
)

// lockOwner is whoever has or wants a lock.
type lockOwner struct {
	sess   *session
	number uint64
}

type fileLock = filelock.Lock[lockOwner]

// lockTable has the locks of all files.
type lockTable struct {
	mu      sync.Mutex
	files   map[layout.FileID]*lockedFile
	waiting map[lockOwner][]*lockWait            // for record locks, the edges of the graph in which deadlocks are found
	count   map[*session]int                     // locks and waits
	ready   map[*session][]metarpc.LockReadyArgs // to be sent; an entry has a goroutine that sends it
	last    uint64                               // number of a wait
}

// lockedFile is what there is of locks on one file. It exists as long as there is something.
type lockedFile struct {
	id      layout.FileID
	records filelock.Table[lockOwner] // fcntl(2)
	whole   filelock.Table[lockOwner] // flock(2)
	waits   []*lockWait               // in the order in which they began
}

// lockWait is a request that was answered with StatusLockWait.
type lockWait struct {
	file  *lockedFile
	flock bool
	want  fileLock
	since time.Time
	asked time.Time // last
	ready time.Time // when its client was called back since; zero = not

	number uint64     // names it
	circle []lockEdge // not nil: it was found to be one of these, of which none would ever end
}

func (t *lockTable) init() {
	t.files, t.waiting = map[layout.FileID]*lockedFile{}, map[lockOwner][]*lockWait{}
	t.count, t.ready = map[*session]int{}, map[*session][]metarpc.LockReadyArgs{}
}

// meet notes that a session has opened a file that others have open. unsure says that they may have had it open before the service was
// started. Service.mu is held.
func (s *Service) meet(cl *claim, unsure bool) {
	s.locks.mu.Lock()
	defer s.locks.mu.Unlock()
	cl.met, cl.stale = unsure, unsure
	for _, o := range cl.file.claims {
		if o != cl && o.open {
			cl.met, cl.stale, o.met, o.stale = true, true, true, true
		}
	}
}

// granted notes that a session has been granted a lock, and reports whether what it keeps of the file may be older. first says that it had
// none, alone that no other session has the file open. locks.mu is held.
func (f *lockedFile) granted(cl *claim, first, alone bool) (stale bool) {
	stale = cl.stale
	cl.stale = !alone
	if first && alone {
		cl.met = false
	}
	return stale
}

// locks reports whether a session has locks on f; locks.mu is held.
func (f *lockedFile) locks(sess *session) bool {
	for _, locks := range []*filelock.Table[lockOwner]{&f.records, &f.whole} {
		for l := range locks.All() {
			if l.Owner.sess == sess {
				return true
			}
		}
	}
	return false
}

// enterLocks takes s.locks.mu if the call may be carried out, and finds what it is about. cl may be nil if the call takes a lock away; alone
// says that no other session has the file open.
func (s *Service) enterLocks(c *call, a *metarpc.LockArgs) (f *lockedFile, cl *claim, want fileLock, alone bool, err error) {
	want = fileLock{
		Owner: lockOwner{c.sess, a.Owner}, Type: filelock.Type(a.Type), Start: a.Start, End: a.End, PID: a.PID,
	}
	if a.Flock {
		want.Start, want.End = 0, filelock.ToEOF
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	cl = c.sess.claims[a.ID]
	switch {
	case a.Type == metarpc.LockNone && a.Alone && !c.sess.reclaimed: // who has had the file open is not known yet
		return nil, nil, want, false, errShared
	case a.Type == metarpc.LockNone: // may always be
	case s.grace && !a.Reclaim:
		return nil, nil, want, false, errInGrace
	case !s.grace && a.Reclaim:
		return nil, nil, want, false, refusef(metarpc.Status(syscall.EIO), "locks can no longer be reclaimed")
	case cl == nil || !cl.open:
		return nil, nil, want, false, errBadFile
	}
	// Before Service.mu is given back: who closes the file takes the locks away afterwards.
	s.locks.mu.Lock()
	f = s.locks.files[a.ID]
	if f == nil {
		f = &lockedFile{id: a.ID}
		s.locks.files[a.ID] = f
	}
	alone = cl != nil && !slices.ContainsFunc(cl.file.claims, func(o *claim) bool { return o != cl && o.open })
	return f, cl, want, alone, nil
}

// table has f's locks of one kind.
func (f *lockedFile) table(flock bool) *filelock.Table[lockOwner] {
	if flock {
		return &f.whole
	}
	return &f.records
}

func (s *Service) lock(ctx context.Context, c *call, a *metarpc.LockArgs) (*metarpc.LockDone, error) {
	f, cl, want, alone, err := s.enterLocks(c, a)
	if err != nil {
		return nil, err
	}
	never := uint64(0)
	if w := f.waitOf(want, a.Flock); a.Wait && w != nil && w.circle != nil {
		number, circle := w.number, w.circle
		s.locks.mu.Unlock()
		if s.lasts(ctx, circle) {
			never = number
		}
		if f, cl, want, alone, err = s.enterLocks(c, a); err != nil {
			return nil, err
		}
	}
	defer s.locks.mu.Unlock()
	defer s.locks.tidy(f)
	unlocks := a.Type == metarpc.LockNone
	if unlocks && a.Alone && cl != nil && cl.met {
		return nil, errShared
	}
	first := !unlocks && cl.met && !f.locks(c.sess)
	if err := s.setLock(f, want, a, never); err != nil {
		return nil, err
	}
	r := new(metarpc.LockDone)
	if !unlocks && !a.Reclaim {
		r.Shared = f.granted(cl, first, alone)
	}
	return r, nil
}

// setLock carries out a call of Lock. never is the number of a wait that would never end; 0 = none is known. locks.mu is held.
func (s *Service) setLock(f *lockedFile, want fileLock, a *metarpc.LockArgs, never uint64) error {
	t, locks, now := &s.locks, f.table(a.Flock), time.Now()
	sess := want.Owner.sess
	has := locks.Owned(want.Owner, want.Start, want.End)
	if a.Flock && len(has) > 0 && want.Type != filelock.None {
		if has[0].Type == want.Type {
			return nil
		}
		// A conversion takes the old lock away first, also if it fails then (flock(2)).
		t.add(sess, -locks.Release(want.Owner))
	}
	old := f.waitOf(want, a.Flock)
	freed := len(has) > 0 // others may have what the owner gives up, or a part of it
	defer func() {
		if freed {
			s.wake(f, a.Flock, now)
		}
	}()
	if want.Type != filelock.None {
		holder, held := locks.Conflict(want)
		blocked := held || !a.Reclaim && f.reserved(want, a.Flock, now) || a.Wait && f.overtakes(want, a.Flock, old, now)
		switch {
		case !blocked:
		case a.Reclaim:
			return refusef(metarpc.Status(syscall.EIO), "another client, on %s, has the lock", holder.Owner.sess.client.Host)
		case !a.Wait:
			freed = t.endWait(old) || freed
			return errAgain
		case held && !a.Flock && (t.deadlock(f, want, now) || old != nil && old.number == never):
			freed = t.endWait(old) || freed
			return errDeadlock
		case old != nil:
			old.asked, old.ready, old.circle = now, time.Time{}, nil
			return errLockWait
		case t.count[sess] >= maxSessionLocks:
			return errNoLock
		default:
			t.beginWait(&lockWait{file: f, flock: a.Flock, want: want, since: now, asked: now})
			return errLockWait
		}
	}
	freed = t.endWait(old) || freed
	if t.count[sess] >= maxSessionLocks && (want.Type != filelock.None || splits(locks, want)) {
		return errNoLock
	}
	t.add(sess, locks.Set(want))
	return nil
}

// splits reports whether unlocking would make two locks of one.
func splits(locks *filelock.Table[lockOwner], want fileLock) bool {
	has := locks.Owned(want.Owner, max(want.Start, 1)-1, min(want.End, filelock.ToEOF-1)+1)
	return len(has) == 1 && has[0].Start < want.Start && has[0].End > want.End
}

// waitOf finds the wait that a request repeats, or ends; locks.mu is held.
func (f *lockedFile) waitOf(want fileLock, flock bool) *lockWait {
	for _, w := range f.waits {
		if w.flock == flock && w.want.Owner == want.Owner && w.want.Start == want.Start && w.want.End == want.End &&
			(w.want.Type == want.Type || want.Type == filelock.None) {
			return w
		}
	}
	return nil
}

// live reports whether somebody still waits.
func (w *lockWait) live(now time.Time) bool {
	return now.Sub(w.asked) < waitTime && w.want.Owner.sess.ctx.Err() == nil
}

// called reports whether the lock is being kept for w.
func (w *lockWait) called(now time.Time) bool {
	return !w.ready.IsZero() && now.Sub(w.ready) < reserveTime && w.live(now)
}

// reserved reports whether the lock is being kept for somebody else; locks.mu is held.
func (f *lockedFile) reserved(want fileLock, flock bool, now time.Time) bool {
	return slices.ContainsFunc(f.waits, func(w *lockWait) bool {
		return w.flock == flock && w.want.Conflicts(&want) && w.called(now)
	})
}

// overtakes reports whether a request that is ready to wait would overtake one that has waited for too long. old is the
// request's own wait. Who has a lock on the file already must not wait behind those who wait for that. locks.mu is held.
func (f *lockedFile) overtakes(want fileLock, flock bool, old *lockWait, now time.Time) bool {
	if old != nil && now.Sub(old.since) > fairTime || f.table(flock).Owned(want.Owner, 0, filelock.ToEOF) != nil {
		return false
	}
	return slices.ContainsFunc(f.waits, func(w *lockWait) bool {
		return w.flock == flock && w.want.Conflicts(&want) && now.Sub(w.since) > fairTime &&
			(old == nil || w.since.Before(old.since)) && w.live(now)
	})
}

// deadlock reports whether the owner of want would wait for itself, directly or through others who wait; locks.mu is
// held.
func (t *lockTable) deadlock(f *lockedFile, want fileLock, now time.Time) bool {
	seen := map[lockOwner]bool{}
	var todo []lockOwner
	inTheWay := func(f *lockedFile, want fileLock) {
		for l := range f.records.Conflicts(want) {
			if !seen[l.Owner] {
				seen[l.Owner] = true
				todo = append(todo, l.Owner)
			}
		}
	}
	for inTheWay(f, want); len(todo) > 0; {
		owner := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if owner == want.Owner {
			return true
		}
		for _, w := range t.waiting[owner] {
			if w.live(now) {
				inTheWay(w.file, w.want)
			}
		}
	}
	return false
}

// add counts what a session has; locks.mu is held.
func (t *lockTable) add(sess *session, n int) {
	if t.count[sess] += n; t.count[sess] == 0 {
		delete(t.count, sess)
	}
}

func (t *lockTable) beginWait(w *lockWait) {
	t.last++
	w.number = t.last
	w.file.waits = append(w.file.waits, w)
	if !w.flock {
		t.waiting[w.want.Owner] = append(t.waiting[w.want.Owner], w)
	}
	t.add(w.want.Owner.sess, 1)
}

// endWait forgets a wait, if there is one; locks.mu is held. It reports whether a lock was being kept for it.
func (t *lockTable) endWait(w *lockWait) bool {
	if w == nil {
		return false
	}
	is := func(o *lockWait) bool { return o == w }
	w.file.waits = slices.DeleteFunc(w.file.waits, is)
	owner := w.want.Owner
	if rest := slices.DeleteFunc(t.waiting[owner], is); len(rest) > 0 {
		t.waiting[owner] = rest
	} else {
		delete(t.waiting, owner)
	}
	t.add(owner.sess, -1)
	return !w.ready.IsZero()
}

// tidy drops f if it says nothing any more; locks.mu is held.
func (t *lockTable) tidy(f *lockedFile) {
	if f.records.Len() == 0 && f.whole.Len() == 0 && len(f.waits) == 0 {
		delete(t.files, f.id)
	}
}

// wake calls back who may have the lock now, the one that has waited longest first; locks.mu is held.
func (s *Service) wake(f *lockedFile, flock bool, now time.Time) {
	for _, w := range slices.Clone(f.waits) {
		switch {
		case w.flock != flock || w.called(now):
			continue
		case !w.live(now):
			s.locks.endWait(w)
			continue
		}
		if _, held := f.table(flock).Conflict(w.want); held || f.reserved(w.want, flock, now) {
			continue
		}
		w.ready = now
		s.callReady(w.want.Owner.sess, metarpc.LockReadyArgs{ID: f.id, Owner: w.want.Owner.number, Flock: flock})
	}
}

// callReady sends LockReady in the background, one after the other, so that no client is flooded; locks.mu is held.
func (s *Service) callReady(sess *session, a metarpc.LockReadyArgs) {
	t := &s.locks
	queue, sending := t.ready[sess]
	if slices.Contains(queue, a) {
		return
	}
	t.ready[sess] = append(queue, a)
	if sending {
		return
	}
	// Owns the session's queue; ends when that is empty, or the session or the service ends.
	s.tasks.Go(func() {
		for {
			t.mu.Lock()
			queue := t.ready[sess]
			if len(queue) == 0 || sess.ctx.Err() != nil {
				delete(t.ready, sess)
				t.mu.Unlock()
				return
			}
			a := queue[0]
			t.ready[sess] = queue[1:]
			t.mu.Unlock()
			s.callBack(s.ctx, sess, metarpc.BackLockReady, &a) // if it fails, the session or the service ends
		}
	})
}

func (s *Service) testLock(_ context.Context, c *call, a *metarpc.LockArgs) (*metarpc.LockResult, error) {
	if a.Type == metarpc.LockNone || a.Reclaim {
		return nil, errInvalid
	}
	f, _, want, _, err := s.enterLocks(c, a)
	if err != nil {
		return nil, err
	}
	defer s.locks.mu.Unlock()
	defer s.locks.tidy(f)
	l, held := f.table(a.Flock).Conflict(want)
	if !held {
		return &metarpc.LockResult{}, nil
	}
	r := &metarpc.LockResult{Type: metarpc.LockType(l.Type), Start: l.Start, End: l.End, PID: l.PID}
	if l.Owner.sess != c.sess {
		r.Host = l.Owner.sess.client.Host
	}
	return r, nil
}

// dropLocks takes away all that a session has of locks on a file, and what it waits for. Service.mu may be held.
func (s *Service) dropLocks(sess *session, id layout.FileID) {
	s.unlockFile(id, func(o lockOwner) bool { return o.sess == sess })
}

// forgetLocks takes all locks of a file away that does not exist any more. Service.mu may be held.
func (s *Service) forgetLocks(id layout.FileID) {
	s.unlockFile(id, func(lockOwner) bool { return true })
}

func (s *Service) unlockFile(id layout.FileID, whose func(lockOwner) bool) {
	t := &s.locks
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.files[id]
	if f == nil {
		return
	}
	for _, w := range slices.Clone(f.waits) {
		if whose(w.want.Owner) {
			t.endWait(w)
		}
	}
	now := time.Now()
	for _, flock := range []bool{false, true} {
		locks := f.table(flock)
		owners := map[lockOwner]bool{}
		for l := range locks.All() {
			if whose(l.Owner) {
				owners[l.Owner] = true
			}
		}
		for o := range owners {
			t.add(o.sess, -locks.Release(o))
		}
		s.wake(f, flock, now)
	}
	t.tidy(f)
}
