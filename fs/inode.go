package fs

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// inode is what one mount knows of a regular file that is open here, or has been until a moment ago.
//
// Writes reach the data plane only between admit and finish, so that a change of size can keep them out and wait for
// them; see the package comment for who waits for whom.
type inode struct {
	fs    *FS
	id    layout.FileID
	data  *dataplane.File
	holds int // guarded by the shard's mu; see hold

	// size is what the service said last, or the end of a later write of ours. known says that the file has at least so
	// many bytes: nobody can have cut it without us hearing of it first. It is all there is of the file while we have a
	// lease, see exact. Both are written under mu.
	size  atomic.Int64
	known atomic.Bool

	// newborn says that CREATE was answered with attributes to keep and that the kernel may not have made its inode yet.
	newborn atomic.Bool

	times accessTimes
	reads reads

	mu sync.Mutex

	// wake is closed at the next change of what await may be waiting for.
	wake chan struct{}

	opens   int   // Open calls under way
	handles int   // open here
	writers int   // of these, those that may be written through
	wanted  bool  // the service has it open for the session; holds the inode
	removed bool  // it has no names left, so nobody will ever want what is not stable yet
	gone    error // the service does not know it any more

	// See passthrough.go. direct counts the open files that were answered without a backing.
	choosing bool // whether there is to be one
	backing  *backing
	passed   *passed
	passing  atomic.Bool // one of them is not nil; written under mu
	direct   int

	lockOwners lockOwners // nil until there is one

	// What a write would have to take away, see privileges.go.
	mode     uint32 // when last heard; 0 = never
	capsGone bool   // it has no file capabilities
	sure     bool   // both are so still
	doubted  uint64 // the clock when they may have changed; answers to older questions teach nothing
	born     bool   // made here
	blank    bool   // made here, and neither written nor closed since

	// Writes. A write belongs to the phase in which it began; a flush turns the phase over to wait for the older
	// ones without being kept waiting by newer ones.
	sizing    bool   // a truncation or append: keeps all other writes out
	recalls   int    // recalls being obeyed: keep all writes out
	recalled  uint64 // how many there have been
	writes    [2]int // at the data plane, by phase
	phase     int
	reporting int // LayoutCommits under way
	reserved  reservations
	// plain says that we write elsewhere than at reserved places, so the service asks us for the size.
	plain      bool
	leaseAsked int64 // when an append last asked for a lease (now)
	// recalledLeases counts the recalls of leases on the attributes.
	recalledLeases uint64
	// stuck counts READs and WRITEs that are waiting for the service or for one another, stuckSince is since when there
	// have been any (now).
	stuck      int
	stuckSince int64

	// Counts of acknowledged writes: all, those whose size and time the service knows, those that are durable there.
	written, provisional, durable uint64
	// end and mtime are to be reported for those that are not durable: the first byte after them, and the time of the
	// last. 0 means nothing to report.
	end, mtime int64
	// putOff is what was set of the file here, and comes with the next durable report; see putoff.go. Its Ctime is 0 if there is nothing.
	putOff  metarpc.Times
	setting int // reports of such under way

	// epoch changes when end or mtime has been cut back, so that an older report must not be sent any more.
	epoch uint64
	// blocks is what is allocated.
	blocks allocation
	// changed is the clock at the last change that makes older answers wrong about size or mtime.
	changed uint64
	// sized is the clock of the latest question whose answer told the size.
	sized uint64

	// lateErr is why acknowledged data could not be made stable when that went wrong last, late how often it has begun
	// to go wrong.
	lateErr error
	late    uint64
	failing bool
	losing  bool   // the session was lost, and what was not stable is being dropped
	lost    uint64 // what late was after the last time that happened, or that the service had taken data's place away
	lostErr error  // why that was

	doubtful []*dataplane.Error // copies that the service is to be told of
	settling bool               // that is being done; holds the inode
	exacting bool               // a segment that was written by is layout.Segment.Exacting
	quieting bool               // it is waited for that nothing is under way to copies that were given up; holds the inode
	quiet    bool               // it was, or is, and nothing was written since

	// For the flusher.
	queued   bool // in its list; holds the inode
	flushing bool // taken from it; holds the inode
	retryAt  int64
	backoff  time.Duration
}

var errNoLayout = errors.New("the metadata service gave no layout to write with")

var start = time.Now()

// now is the monotonic clock in nanoseconds, never 0.
func now() int64 { return int64(time.Since(start)) + 1 }

// await returns with mu held as soon as ok, which is called with mu held. If ctx ends first, mu is not held. On a soft mount an application does
// not wait any longer than for the service, which most of what is waited for here depends on.
func (i *inode) await(ctx context.Context, ok func() bool) error {
	i.mu.Lock()
	if ok() {
		return nil
	}
	i.mu.Unlock()
	waiting, stop := i.fs.meta.Patient(ctx, i.id)
	defer stop()
	i.mu.Lock()
	for !ok() {
		if i.wake == nil {
			i.wake = make(chan struct{})
		}
		wake := i.wake
		i.mu.Unlock()
		select {
		case <-wake:
		case <-waiting.Done():
			return context.Cause(waiting)
		}
		i.mu.Lock()
	}
	return nil
}

// notify lets every await look again. mu is held.
func (i *inode) notify() {
	if i.wake != nil {
		close(i.wake)
		i.wake = nil
	}
}

// admits reports whether a write may begin. mine says that the caller has set sizing or counts in reserved.count. mu is
// held.
func (i *inode) admits(mine bool) bool { return i.gone == nil && i.recalls == 0 && (!i.sizing || mine) }

// admission is what has to be known of a write when it is counted out.
type admission struct {
	phase   int
	session *sessionLife
	shared  bool         // others may write the same bytes: the kernel the same data file by itself, or other mounts
	place   *reservation // of an append, or nil
	n       int64        // with place: bytes
}

// admit counts a write of n bytes at off in that goes by seg, which may hold fewer. mu is held.
func (i *inode) admit(seg *layout.Segment, off, n int64) admission {
	i.count(off, min(n, seg.End()-off))
	if seg.OnNamespaces {
		i.reads.any.Store(true)
	}
	i.quiet = false
	i.exacting = i.exacting || seg.Exacting
	i.writes[i.phase]++
	return admission{phase: i.phase, session: i.session(), shared: i.passed != nil || seg.Shared}
}

// finish counts a write out that ended with err and, if it was acknowledged, records what it changed: the data now ends at
// to or later, unless it was an append to a place that the service keeps. An acknowledgement that comes after the end
// of the session is not one: others may have cut the file since.
func (i *inode) finish(a admission, to int64, err error) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if failed := dataplane.FailedCopies(err); len(failed) > 0 {
		i.doubt(failed)
	}
	if err == nil && a.session != i.session() {
		err = errOtherSession
	}
	switch {
	case a.place != nil:
		i.wroteAt(a.place, a.n, err == nil)
	case err == nil:
		i.wrote(to, 0)
	}
	if i.writes[a.phase]--; i.writes[a.phase] == 0 {
		i.notify()
		i.letGo() // it may be the write of a process that was killed
	}
	return err
}

// wrote records an acknowledged write, made now if at is 0. mu is held.
func (i *inode) wrote(to, at int64) {
	if at == 0 {
		at = time.Now().UnixNano()
	}
	i.end = max(i.end, to)
	if to > i.size.Load() {
		i.size.Store(to)
	}
	i.wroteSome(at)
}

// wroteSome is what of wrote does not concern the size. mu is held.
func (i *inode) wroteSome(at int64) {
	if i.blank {
		i.blank = false
		i.fs.filling.Store(true)
	}
	i.written++
	i.mtime = max(i.mtime, at)
	i.putOff.Mask &^= metarpc.SetMtime
	i.times.changed.Store(i.mtime)
	i.enqueue()
}

// terms are those on which a write is made; the zero value is for one that goes where it is told.
type terms struct {
	mine bool // the caller has set sizing, or counts in reserved.count
	// place is the one of an append that the service has reserved, or nil.
	place *reservation
	// through is the open file, if it is known: a lock that has been lost makes the write fail.
	through *handle
	// leased says that the place is the end of the file by what was known when recalledLeases was lease.
	leased bool
	lease  uint64
	begun  bool // the data plane has had some of it
}

// errUnleased says that the place of an append may not be the end of the file any more.
var errUnleased = errors.New("somebody else may have written to the end of the file")

// lost reports whether nothing may be written any more where the place was reserved. inode.mu is held.
func (t *terms) lost(i *inode) bool {
	return t.place != nil && (t.place.recalled || t.place.session != i.session())
}

// writes is which layout the write needs. inode.mu is held.
func (t *terms) writes(i *inode) metaclient.Writes {
	switch {
	case t.leased:
		return metaclient.AtEnd
	case t.place != nil && !i.plain:
		return metaclient.AtPlaces
	}
	return metaclient.Anywhere
}

// acquire admits a write of n bytes at off, once that is possible, and returns a segment that holds the first of them.
func (i *inode) acquire(ctx context.Context, off, n int64, t *terms) (*layout.Segment, admission, error) {
	var none admission
	for {
		if err := i.await(ctx, func() bool { return i.gone != nil || i.admits(t.mine) || t.lost(i) }); err != nil {
			return nil, none, err
		}
		if err := i.gone; err != nil {
			i.mu.Unlock()
			return nil, none, err
		}
		if t.lost(i) {
			i.mu.Unlock()
			return nil, none, errUnleased
		}
		writes := t.writes(i)
		var seg *layout.Segment
		if writes != metaclient.AtEnd { // CachedLayout does not tell whether it is for that
			seg = i.fs.meta.CachedLayout(i.id, layout.IOModeRW, off, n)
		}
		recalled := i.recalled
		if seg == nil || !seg.Contains(off, 1) || writes != metaclient.AtPlaces && !i.plain {
			i.mu.Unlock()
			var err error
			if seg, err = i.fs.meta.Layout(ctx, i.id, layout.IOModeRW, off, n, writes); err != nil {
				return nil, none, byID(i.id, err)
			}
			if seg == nil || !seg.Contains(off, 1) {
				return nil, none, errNoLayout
			}
			i.mu.Lock()
			i.plain = i.plain || writes != metaclient.AtPlaces
		}
		// A recall while mu was not held has made the segment worthless.
		if !i.admits(t.mine) || i.recalled != recalled {
			i.mu.Unlock()
			continue
		}
		// A layout of a new session is had after its predecessor's locks were found to be lost.
		if t.through != nil && t.through.lost.Load() {
			i.mu.Unlock()
			return nil, none, errLockLost
		}
		// Of an append in several parts others could see the end before the middle is written, unless the service keeps
		// the place.
		if t.lost(i) || t.leased && (i.recalledLeases != t.lease || n > seg.End()-off) {
			i.mu.Unlock()
			return nil, none, errUnleased
		}
		admitted := i.admit(seg, off, n)
		t.begun = true
		if t.place != nil {
			t.place.writing++
			admitted.place, admitted.n = t.place, min(n, seg.End()-off)
		}
		i.mu.Unlock()
		return seg, admitted, nil
	}
}

// lockSize keeps other writes and other changes of size out until unlockSize, and waits for those under way, for appends
// that have a place already, and for reports, so that nobody still tells the service of an older size.
func (i *inode) lockSize(ctx context.Context) error {
	if err := i.await(ctx, func() bool { return !i.sizing }); err != nil {
		return err
	}
	i.sizing = true
	i.mu.Unlock()
	err := i.await(ctx, func() bool { return i.writes[0]+i.writes[1]+i.reporting+i.reserved.count == 0 })
	if err != nil {
		i.unlockSize()
		return err
	}
	i.mu.Unlock()
	return nil
}

func (i *inode) unlockSize() {
	i.mu.Lock()
	i.sizing = false
	i.notify()
	i.mu.Unlock()
}

// drain waits for the writes that are under way now.
func (i *inode) drain(ctx context.Context) error {
	if err := i.await(ctx, func() bool { return i.writes[1-i.phase] == 0 }); err != nil {
		return err
	}
	old := i.phase
	i.phase = 1 - old
	i.mu.Unlock()
	// Should the phase turn again meanwhile, older writes are counted with ours and we wait for more than we need.
	if err := i.await(ctx, func() bool { return i.writes[old] == 0 }); err != nil {
		return err
	}
	i.mu.Unlock()
	return nil
}

// wait counts the caller as stuck until it calls resume.
func (i *inode) wait() (resume func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stuck++; i.stuck == 1 {
		i.stuckSince = now()
	}
	return func() {
		i.mu.Lock()
		i.stuck--
		i.mu.Unlock()
	}
}

// attrs are attributes as the application is to see them.
type attrs struct {
	metarpc.Attr
	fresh bool          // they were not overtaken by what happened here
	keep  time.Duration // how long the kernel may use them
}

// merge brings an answer of the service and what is known here together. asked is the clock before the question, which
// moves it on: an answer that comes after that to a later question says nothing of the size.
func (i *inode) merge(answer metaclient.Answer, asked uint64) attrs {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.mergeLocked(answer, asked)
}

func (i *inode) mergeLocked(answer metaclient.Answer, asked uint64) attrs {
	a := attrs{answer.Attr, i.changed <= asked, answer.Keep}
	setTimes(&a.Attr, i.putOff)
	if a.fresh {
		if asked < i.sized {
			a.Attr.Size = i.size.Load()
		}
		i.sized = max(i.sized, asked)
		i.take(&a.Attr, asked)
	}
	a.Size = i.size.Load()
	i.showUsed(&a.Attr)
	if i.mtime > a.Mtime {
		a.Mtime = i.mtime
		a.Ctime = max(a.Ctime, i.mtime)
	}
	if !a.fresh || i.written > i.durable || i.passed != nil {
		a.keep = 0 // the times will be others when the service knows of the writes
	}
	return a
}

// seen is merge for any inode, also one of which nothing is known here.
func (fs *FS) seen(answer metaclient.Answer, asked uint64) attrs {
	if answer.Attr.Mode&unix.S_IFMT == unix.S_IFREG {
		if i := fs.peek(answer.Attr.ID); i != nil {
			return i.merge(answer, asked)
		}
	}
	return attrs{answer.Attr, true, answer.Keep}
}

// take learns from an answer that is not out of date, to a question that was asked at a time by the clock, and puts
// into it what was written here and is not reported. mu is held.
func (i *inode) take(a *metarpc.Attr, asked uint64) {
	a.Size = max(a.Size, i.end)
	i.size.Store(a.Size)
	i.known.Store(true)
	i.times.heard(a)
	i.removed = a.Nlink == 0
	i.learn(a, asked)
}

// outdate makes answers to questions that were asked before now worthless. mu is held.
func (i *inode) outdate() { i.changed = i.fs.clock.Add(1) }

// exact reports whether size is the file's size at this moment, which it is under a lease. It does not block.
func (i *inode) exact() bool {
	i.lookAt()
	for range 3 {
		asked := i.fs.clock.Load()
		answer, ok := i.fs.meta.CachedAttr(i.id)
		if !ok {
			return false
		}
		if i.merge(answer, asked).fresh {
			return true
		}
	}
	return false
}

// refresh asks for the attributes, which is no call of the service under a lease, until an answer is not overtaken by what
// happens here: without one, nothing is known of what others wrote before.
func (i *inode) refresh(ctx context.Context) error {
	for {
		i.lookAt()
		i.tellPlaces(ctx)
		asked := i.fs.clock.Add(1)
		answer, err := i.fs.meta.GetAttr(ctx, i.id)
		if err != nil {
			return byID(i.id, err)
		}
		if i.merge(answer, asked).fresh {
			return nil
		}
	}
}

// freshSize is the size as it is now.
func (i *inode) freshSize(ctx context.Context) (int64, error) {
	if err := i.refresh(ctx); err != nil {
		return 0, err
	}
	return i.size.Load(), nil
}

// stabilised records how a commit ended. While commits go on failing, that is one late error.
func (i *inode) stabilised(err error) {
	i.mu.Lock()
	first := err != nil && !i.failing
	if first {
		i.lateErr = err
		i.late++
	}
	if i.failing = err != nil; i.failing {
		i.postpone()
	} else {
		i.backoff, i.retryAt = 0, 0
	}
	i.mu.Unlock()
	if first {
		i.fs.log.Error("written data cannot be made stable; it is kept, and tried again", "file", i.id, "err", err)
	}
}

// postpone sets when the flusher tries again. mu is held.
func (i *inode) postpone() {
	i.backoff = min(max(2*i.backoff, flushInterval), flushBackoff)
	i.retryAt = now() + int64(i.backoff)
}

// lateError returns the error that h has not reported yet, if it still stands or data was lost, and counts it as reported.
func (h *handle) lateError() error {
	h.i.mu.Lock()
	defer h.i.mu.Unlock()
	reported := h.late.Swap(h.i.late)
	switch {
	case reported < h.i.lost:
		return h.i.lostErr
	case reported == h.i.late || !h.i.failing:
		return nil
	}
	return h.i.lateErr
}

// setGone records that the service does not know the file any more. mu is held.
func (i *inode) setGone(err error) {
	i.gone = &staleError{i.id, err}
	i.forget()
	i.notify()
}

// forget leaves nothing to tell the service. mu is held.
func (i *inode) forget() {
	i.durable, i.provisional, i.end, i.mtime, i.putOff = i.written, i.written, 0, 0, metarpc.Times{}
	i.reserved.end, i.blocks = 0, allocation{}
}

// letGo is called when the file may not be in use any more: the service hears that, and the inode goes. Its holder
// still has it. mu is held.
func (i *inode) letGo() {
	if i.handles > 0 || i.opens > 0 || i.writes[0]+i.writes[1]+i.reporting > 0 || i.settling || i.quieting {
		return
	}
	if i.blank {
		i.blank = false
		i.fs.filling.Store(false)
	}
	if i.dirty() {
		i.enqueue()
		return
	}
	if i.wanted && !i.quiet && i.reads.any.Load() && i.data.Forsook() {
		i.quiet, i.quieting = true, true
		i.again()
		i.fs.spawn(i.quiesce) // owns the inode's quieting; ends when nothing is at copies that were given up, or with fs.ctx
		return
	}
	i.closePassed(false)
	if i.wanted {
		i.wanted, i.plain, i.blocks = false, false, allocation{}
		i.data.Forget()
		i.fs.meta.Forget(i.id)
		i.fs.meta.Release(i.id)
		i.drop()
	}
}

// quiesce lets the file go when nothing is under way any more to copies that were given up: with the layouts the service has their space back.
func (i *inode) quiesce() {
	err := i.data.Quiesce(i.fs.ctx)
	i.mu.Lock()
	i.quieting = false
	if err == nil {
		i.letGo()
	}
	i.mu.Unlock()
	i.drop()
}
