package locktable

import (
	"context"
	"iter"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/filelock"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

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
	errAgain    = &metarpc.Error{Status: metarpc.Status(syscall.EAGAIN)}
	errDeadlock = &metarpc.Error{Status: metarpc.Status(syscall.EDEADLK)}
	errNoLock   = &metarpc.Error{Status: metarpc.Status(syscall.ENOLCK)}
	errWait     = &metarpc.Error{Status: metarpc.StatusLockWait}
	errShared   = &metarpc.Error{Status: metarpc.StatusShared}
)

// Session is a session that has or wants locks.
type Session struct {
	Client [16]byte        // names its client, in all shards the same
	Host   string          // for people
	Life   context.Context // ends with the session

	// Tell has the client ask for a lock again; it does not wait. It is for the caller, who has been told that a lock
	// is ready.
	Tell func(metarpc.LockReadyArgs)

	count int // locks and waits, guarded by the table
}

// Open says that a session has a file open, and whether another session has had it open, as far as the table is told:
// since this one was granted the first of the locks that it has (met), and since it was granted the last one (stale).
type Open struct{ met, stale bool }

// Ready says that the client of a session may have a lock now, and is to ask for it again.
type Ready struct {
	Session *Session
	metarpc.LockReadyArgs
}

// Request is a call about a lock.
type Request struct {
	Session *Session
	*metarpc.LockArgs
	Open *Open // of the session; nil if it has nothing to do with the file, and then unlocks
	Sole bool  // no other session has the file open
	// Unsure says that it is not known yet whether another session has had it open.
	Unsure bool
	// Checked is the number of the wait whose Circle was looked for again, 0 if none was; Lasts says that it is still
	// there.
	Checked uint64
	Lasts   bool
}

// Result is the answer to a call about a lock.
type Result struct {
	Shared bool    // what the session keeps of the file may be older than what others wrote
	Ready  []Ready // who is to be told, also with an error
	// Circle, if not nil, is what the call, which has not been answered, would wait for itself through. It is to be
	// made again with Checked = Wait.
	Circle []Edge
	Wait   uint64
}

// owner is whoever has or wants a lock.
type owner struct {
	sess   *Session
	number uint64
}

type fileLock = filelock.Lock[owner]

// Table has the locks of all files.
type Table struct {
	mu      sync.Mutex
	files   map[layout.FileID]*file
	waiting map[owner][]*wait // for record locks, the edges of the graph in which deadlocks are found
	last    uint64            // number of a wait
}

// New is a Table of no locks.
func New() *Table {
	return &Table{files: map[layout.FileID]*file{}, waiting: map[owner][]*wait{}}
}

// file is what there is of locks on one file. It exists as long as there is something.
type file struct {
	id      layout.FileID
	records filelock.Table[owner] // fcntl(2)
	whole   filelock.Table[owner] // flock(2)
	waits   []*wait               // in the order in which they began
}

// wait is a request that was answered with StatusLockWait.
type wait struct {
	file  *file
	flock bool
	want  fileLock
	since time.Time
	asked time.Time // last
	ready time.Time // when its client was called back since; zero = not

	number uint64 // names it
	circle []Edge // not nil: it was found to be one of these, of which none would ever end
}

// Opened notes that o's session has opened a file that others have open. unsure says that they may have had it open
// before that was noted.
func (t *Table) Opened(o *Open, unsure bool, others iter.Seq[*Open]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o.met, o.stale = unsure, unsure
	for other := range others {
		o.met, o.stale, other.met, other.stale = true, true, true, true
	}
}

// locks reports whether a session has locks on f; t.mu is held.
func (f *file) locks(sess *Session) bool {
	for _, locks := range []*filelock.Table[owner]{&f.records, &f.whole} {
		for l := range locks.All() {
			if l.Owner.sess == sess {
				return true
			}
		}
	}
	return false
}

// want is the lock that a request is about.
func (r *Request) want() fileLock {
	l := fileLock{Owner: owner{r.Session, r.Owner}, Type: filelock.Type(r.Type), Start: r.Start, End: r.End, PID: r.PID}
	if r.Flock {
		l.Start, l.End = 0, filelock.ToEOF
	}
	return l
}

// file is the record of a file, made if there is none; t.mu is held. The caller tidies it.
func (t *Table) file(id layout.FileID) *file {
	f := t.files[id]
	if f == nil {
		f = &file{id: id}
		t.files[id] = f
	}
	return f
}

// table has f's locks of one kind.
func (f *file) table(flock bool) *filelock.Table[owner] {
	if flock {
		return &f.whole
	}
	return &f.records
}

// Lock carries out a call of Lock. The caller may hold a lock of its own that orders this with Opened and Drop: entered
// is called as soon as they would wait for this.
func (t *Table) Lock(r Request, entered func()) (res Result, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	entered()
	f, want := t.file(r.ID), r.want()
	defer t.tidy(f)
	old := f.waitOf(want, r.Flock)
	if r.Wait && old != nil && old.circle != nil && old.number != r.Checked {
		return Result{Circle: old.circle, Wait: old.number}, nil
	}
	unlocks := r.Type == metarpc.LockNone
	if unlocks && r.Alone && (r.Unsure || r.Open != nil && r.Open.met) {
		return Result{}, errShared
	}
	first := !unlocks && r.Open.met && !f.locks(r.Session)
	res.Ready, err = t.set(f, want, &r)
	if err == nil && !unlocks && !r.Reclaim {
		res.Shared = r.Open.stale
		r.Open.stale = !r.Sole
		if first && r.Sole {
			r.Open.met = false
		}
	}
	return res, err
}

// set does what Lock is for; t.mu is held.
func (t *Table) set(f *file, want fileLock, r *Request) (ready []Ready, err error) {
	locks, now := f.table(r.Flock), time.Now()
	sess := r.Session
	has := locks.Owned(want.Owner, want.Start, want.End)
	if r.Flock && len(has) > 0 && want.Type != filelock.None {
		if has[0].Type == want.Type {
			return nil, nil
		}
		// A conversion takes the old lock away first, also if it fails then (flock(2)).
		sess.count -= locks.Release(want.Owner)
	}
	old := f.waitOf(want, r.Flock)
	freed := len(has) > 0 // others may have what the owner gives up, or a part of it
	defer func() {
		if freed {
			ready = t.wake(f, r.Flock, now)
		}
	}()
	if want.Type != filelock.None {
		holder, held := locks.Conflict(want)
		blocked := held || !r.Reclaim && f.reserved(want, r.Flock, now) || r.Wait && f.overtakes(want, r.Flock, old, now)
		switch {
		case !blocked:
		case r.Reclaim:
			return nil, &metarpc.Error{Status: metarpc.Status(syscall.EIO), Message: "another client, on " + holder.Owner.sess.Host + ", has the lock"}
		case !r.Wait:
			freed = t.endWait(old) || freed
			return nil, errAgain
		case held && !r.Flock && (t.deadlock(f, want, now) || old != nil && old.number == r.Checked && r.Lasts):
			freed = t.endWait(old) || freed
			return nil, errDeadlock
		case old != nil:
			old.asked, old.ready, old.circle = now, time.Time{}, nil
			return nil, errWait
		case sess.count >= maxSessionLocks:
			return nil, errNoLock
		default:
			t.beginWait(&wait{file: f, flock: r.Flock, want: want, since: now, asked: now})
			return nil, errWait
		}
	}
	freed = t.endWait(old) || freed
	if sess.count >= maxSessionLocks && (want.Type != filelock.None || splits(locks, want)) {
		return nil, errNoLock
	}
	sess.count += locks.Set(want)
	return nil, nil
}

// splits reports whether unlocking would make two locks of one.
func splits(locks *filelock.Table[owner], want fileLock) bool {
	has := locks.Owned(want.Owner, max(want.Start, 1)-1, min(want.End, filelock.ToEOF-1)+1)
	return len(has) == 1 && has[0].Start < want.Start && has[0].End > want.End
}

// waitOf finds the wait that a request repeats, or ends; t.mu is held.
func (f *file) waitOf(want fileLock, flock bool) *wait {
	for _, w := range f.waits {
		if w.flock == flock && w.want.Owner == want.Owner && w.want.Start == want.Start && w.want.End == want.End &&
			(w.want.Type == want.Type || want.Type == filelock.None) {
			return w
		}
	}
	return nil
}

// live reports whether somebody still waits.
func (w *wait) live(now time.Time) bool {
	return now.Sub(w.asked) < waitTime && w.want.Owner.sess.Life.Err() == nil
}

// called reports whether the lock is being kept for w.
func (w *wait) called(now time.Time) bool {
	return !w.ready.IsZero() && now.Sub(w.ready) < reserveTime && w.live(now)
}

// reserved reports whether the lock is being kept for somebody else; t.mu is held.
func (f *file) reserved(want fileLock, flock bool, now time.Time) bool {
	return slices.ContainsFunc(f.waits, func(w *wait) bool {
		return w.flock == flock && w.want.Conflicts(&want) && w.called(now)
	})
}

// overtakes reports whether a request that is ready to wait would overtake one that has waited for too long. old is the
// request's own wait. Who has a lock on the file already must not wait behind those who wait for that. t.mu is held.
func (f *file) overtakes(want fileLock, flock bool, old *wait, now time.Time) bool {
	if old != nil && now.Sub(old.since) > fairTime || f.table(flock).Owned(want.Owner, 0, filelock.ToEOF) != nil {
		return false
	}
	return slices.ContainsFunc(f.waits, func(w *wait) bool {
		return w.flock == flock && w.want.Conflicts(&want) && now.Sub(w.since) > fairTime &&
			(old == nil || w.since.Before(old.since)) && w.live(now)
	})
}

// deadlock reports whether the owner of want would wait for itself, directly or through others who wait; t.mu is held.
func (t *Table) deadlock(f *file, want fileLock, now time.Time) bool {
	seen := map[owner]bool{}
	var todo []owner
	inTheWay := func(f *file, want fileLock) {
		for l := range f.records.Conflicts(want) {
			if !seen[l.Owner] {
				seen[l.Owner] = true
				todo = append(todo, l.Owner)
			}
		}
	}
	for inTheWay(f, want); len(todo) > 0; {
		o := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if o == want.Owner {
			return true
		}
		for _, w := range t.waiting[o] {
			if w.live(now) {
				inTheWay(w.file, w.want)
			}
		}
	}
	return false
}

func (t *Table) beginWait(w *wait) {
	t.last++
	w.number = t.last
	w.file.waits = append(w.file.waits, w)
	if !w.flock {
		t.waiting[w.want.Owner] = append(t.waiting[w.want.Owner], w)
	}
	w.want.Owner.sess.count++
}

// endWait forgets a wait, if there is one; t.mu is held. It reports whether a lock was being kept for it.
func (t *Table) endWait(w *wait) bool {
	if w == nil {
		return false
	}
	is := func(v *wait) bool { return v == w }
	w.file.waits = slices.DeleteFunc(w.file.waits, is)
	o := w.want.Owner
	if rest := slices.DeleteFunc(t.waiting[o], is); len(rest) > 0 {
		t.waiting[o] = rest
	} else {
		delete(t.waiting, o)
	}
	o.sess.count--
	return !w.ready.IsZero()
}

// tidy drops f if it says nothing any more; t.mu is held.
func (t *Table) tidy(f *file) {
	if f.records.Len() == 0 && f.whole.Len() == 0 && len(f.waits) == 0 {
		delete(t.files, f.id)
	}
}

// wake names those that may have the lock now, the one that has waited longest first; t.mu is held.
func (t *Table) wake(f *file, flock bool, now time.Time) (ready []Ready) {
	for _, w := range slices.Clone(f.waits) {
		switch {
		case w.flock != flock || w.called(now):
			continue
		case !w.live(now):
			t.endWait(w)
			continue
		}
		if _, held := f.table(flock).Conflict(w.want); held || f.reserved(w.want, flock, now) {
			continue
		}
		w.ready = now
		ready = append(ready, w.tell())
	}
	return ready
}

// tell says that w is to be asked for again.
func (w *wait) tell() Ready {
	return Ready{w.want.Owner.sess, metarpc.LockReadyArgs{ID: w.file.id, Owner: w.want.Owner.number, Flock: w.flock}}
}

// Test carries out a call of TestLock: it returns a lock that is in the way of the one that is asked about. entered is
// as in Lock.
func (t *Table) Test(r Request, entered func()) *metarpc.LockResult {
	t.mu.Lock()
	defer t.mu.Unlock()
	entered()
	f := t.file(r.ID)
	defer t.tidy(f)
	l, held := f.table(r.Flock).Conflict(r.want())
	if !held {
		return &metarpc.LockResult{}
	}
	res := &metarpc.LockResult{Type: metarpc.LockType(l.Type), Start: l.Start, End: l.End, PID: l.PID}
	if l.Owner.sess != r.Session {
		res.Host = l.Owner.sess.Host
	}
	return res
}

// Drop takes away all that a session has of locks on a file, and what it waits for; all sessions if sess is nil. It
// returns who may have a lock now.
func (t *Table) Drop(id layout.FileID, sess *Session) (ready []Ready) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.files[id]
	if f == nil {
		return nil
	}
	whose := func(o owner) bool { return sess == nil || o.sess == sess }
	for _, w := range slices.Clone(f.waits) {
		if whose(w.want.Owner) {
			t.endWait(w)
		}
	}
	now := time.Now()
	for _, flock := range []bool{false, true} {
		locks := f.table(flock)
		owners := map[owner]bool{}
		for l := range locks.All() {
			if whose(l.Owner) {
				owners[l.Owner] = true
			}
		}
		for o := range owners {
			o.sess.count -= locks.Release(o)
		}
		ready = append(ready, t.wake(f, flock, now)...)
	}
	t.tidy(f)
	return ready
}
