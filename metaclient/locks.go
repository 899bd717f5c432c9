package metaclient

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/filelock"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// How often a lock is asked for.
const (
	graceFirst = 100 * time.Millisecond // while the service is in its grace period
	graceLast  = time.Second
	// askFirst and askLast are between two questions for a lock that others have, should the callback that it is free
	// get lost. The service forgets who has not asked for four times askLast.
	askFirst = time.Second
	askLast  = 5 * time.Second
	// cancelPatience is how long who gives up waiting for a lock waits for the service to know that.
	cancelPatience = time.Second
	reopenTries    = 10 // of a lock on a file that the service does not know to be open (yet)
)

// lockKey is an owner of locks on one file. Record locks and locks of the whole file have nothing to do with each other.
type lockKey struct {
	id    layout.FileID
	flock bool
	owner uint64
}

func keyOf(a *metarpc.LockArgs) lockKey { return lockKey{a.ID, a.Flock, a.Owner} }

type heldLock = filelock.Lock[struct{}]

// lockBook knows which locks the service holds for this session. For one owner calls are made one after the other, in
// the order in which they were asked for, so that its entry and the service do not come to disagree.
type lockBook struct {
	mu     sync.Mutex
	owners map[lockKey]*lockOwner
}

// lockOwner is what there is of one owner. It exists as long as it is in use or has locks.
type lockOwner struct {
	key   lockKey
	users int
	last  chan struct{} // closed when the last one in line is done
	held  filelock.Table[struct{}]
	waits []*lockWait
	// seconds are the places of the second calls of unlocks, as long as these have not begun.
	seconds []*place
}

// lockWait is a call of Lock that waits.
type lockWait struct {
	args  *metarpc.LockArgs
	ready chan struct{} // has a token when it is worth while to ask again
}

// place is a place in the line of an owner's calls.
type place struct {
	before <-chan struct{} // closed when those before are done; nil if there is nobody
	mine   chan struct{}
}

// use returns an owner, who stays until leave.
func (b *lockBook) use(key lockKey) *lockOwner {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.owners[key]
	if o == nil {
		if b.owners == nil {
			b.owners = map[lockKey]*lockOwner{}
		}
		o = &lockOwner{key: key}
		b.owners[key] = o
	}
	o.users++
	return o
}

func (b *lockBook) leave(o *lockOwner) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o.users--; o.users == 0 && o.held.Len() == 0 {
		delete(b.owners, o.key)
	}
}

// enter takes the last place in line. Whoever has it calls done, or leaves it with pass.
func (b *lockBook) enter(o *lockOwner) *place {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &place{before: o.last, mine: make(chan struct{})}
	o.last = p.mine
	return p
}

// enterTwice takes the last two places in line: nobody comes between them.
func (b *lockBook) enterTwice(o *lockOwner) (first, second *place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	first = &place{before: o.last, mine: make(chan struct{})}
	second = &place{before: first.mine, mine: make(chan struct{})}
	o.last = second.mine
	o.seconds = append(o.seconds, second)
	return first, second
}

// begins says that a second call begins: nobody comes before it any more who has not yet.
func (b *lockBook) begins(o *lockOwner, second *place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o.seconds = slices.DeleteFunc(o.seconds, func(p *place) bool { return p == second })
}

// enterReclaim takes the place before the next second call, or the last place. Between the two calls of an unlock the
// client makes data stable, which may have to wait until all sessions have reclaimed. The lock is held until then.
func (b *lockBook) enterReclaim(o *lockOwner) *place {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &place{before: o.last, mine: make(chan struct{})}
	if len(o.seconds) > 0 {
		p.before, o.seconds[0].before = o.seconds[0].before, p.mine
	} else {
		o.last = p.mine
	}
	return p
}

// wait returns when it is p's turn. If ctx ends first p is passed on.
func (p *place) wait(ctx context.Context) error {
	if p.before == nil {
		return nil
	}
	select {
	case <-p.before:
		return nil
	case <-ctx.Done():
		go func() { // ends when those before are done, which they are at the latest when the client is closed
			<-p.before
			p.done()
		}()
		return context.Cause(ctx)
	}
}

func (p *place) done() { close(p.mine) }

// has reports whether an owner may have a lock in the range now or when the calls under way are answered.
func (b *lockBook) has(key lockKey, start, end int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.owners[key]
	if o == nil {
		return false
	}
	if o.last != nil {
		select {
		case <-o.last:
		default:
			return true
		}
	}
	return len(o.held.Owned(struct{}{}, start, end)) > 0
}

// heard records what the service has done about a call, and returns what the owner had in the range before.
func (b *lockBook) heard(o *lockOwner, a *metarpc.LockArgs, status metarpc.Status) (before []heldLock) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before = o.held.Owned(struct{}{}, a.Start, a.End)
	if a.Flock && len(before) > 0 && before[0].Type != filelock.Type(a.Type) {
		switch status {
		case metarpc.StatusOK, metarpc.StatusLockWait, metarpc.Status(syscall.EAGAIN), metarpc.Status(syscall.ENOLCK):
			o.held.Release(struct{}{}) // a conversion takes the old lock away, whatever comes of it
			before = nil
		}
	}
	if status == metarpc.StatusOK {
		o.held.Set(heldLock{Type: filelock.Type(a.Type), Start: a.Start, End: a.End, PID: a.PID})
	}
	return before
}

// restore records that the owner is to have in the range of a what it had before.
func (b *lockBook) restore(o *lockOwner, a *metarpc.LockArgs, before []heldLock) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o.held.Set(heldLock{Start: a.Start, End: a.End})
	for _, l := range before {
		o.held.Set(l)
	}
}

// drop forgets an owner's locks, and reports whether there were any.
func (b *lockBook) drop(o *lockOwner) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return o.held.Release(struct{}{}) > 0
}

// wait makes a call of Lock be woken until endWait.
func (b *lockBook) wait(o *lockOwner, a *metarpc.LockArgs) *lockWait {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := &lockWait{args: a, ready: make(chan struct{}, 1)}
	o.waits = append(o.waits, w)
	return w
}

func (b *lockBook) endWait(o *lockOwner, w *lockWait) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o.waits = slices.DeleteFunc(o.waits, func(other *lockWait) bool { return other == w })
}

// alone reports whether nobody else waits for the same lock on behalf of the same owner.
func (b *lockBook) alone(o *lockOwner, w *lockWait) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !slices.ContainsFunc(o.waits, func(other *lockWait) bool {
		return other != w && other.args.Type == w.args.Type && other.args.Start == w.args.Start && other.args.End == w.args.End
	})
}

// wake makes those who wait for locks of an owner ask again; b.mu is held.
func (o *lockOwner) wake() {
	for _, w := range o.waits {
		select {
		case w.ready <- struct{}{}:
		default:
		}
	}
}

// all lists the owners and wakes who waits, after the service has forgotten about both.
func (b *lockBook) all() []lockKey {
	b.mu.Lock()
	defer b.mu.Unlock()
	var keys []lockKey
	for key, o := range b.owners {
		keys = append(keys, key)
		o.wake()
	}
	return keys
}

// Lock sets a lock, or takes it away (LockNone), which succeeds in the end however long the service is away. A lock that
// others have is EAGAIN or, with Wait, waited for until ctx ends. If ctx ends first the owner has afterwards what it had
// before, though not necessarily at once; calls for the same owner that come later are executed later.
//
// shared says of a lock that was granted that another session may have had it since this one last had one: what is kept of the file may be
// older. Before a lock is taken away which another session can have seen being held, stable is called, to make stable what was written under it;
// nil: there is nothing. The lock is taken away also if that fails, unless ctx has ended.
func (c *Client) Lock(ctx context.Context, args *metarpc.LockArgs, stable func(context.Context) error) (shared bool, err error) {
	a := *args
	a.Reclaim, a.Alone = false, false
	a.Wait = a.Wait && a.Type != metarpc.LockNone
	if a.Flock {
		a.Start, a.End = 0, filelock.ToEOF
	}
	if a.Type == metarpc.LockNone && !c.locks.has(keyOf(&a), a.Start, a.End) {
		return false, nil
	}
	o := c.locks.use(keyOf(&a))
	defer c.locks.leave(o)
	if a.Type == metarpc.LockNone && stable != nil {
		return false, c.untilGrace(ctx, a.ID, func() error {
			first, second := c.locks.enterTwice(o)
			return c.unlockStable(ctx, o, first, second, a, stable)
		})
	}
	var done metarpc.LockDone
	if !a.Wait {
		err = c.untilGrace(ctx, a.ID, func() error { return c.askLock(ctx, o, c.locks.enter(o), &a, &done) })
		return done.Shared, err
	}
	w := c.locks.wait(o, &a)
	defer c.locks.endWait(o, w)
	for pause := askFirst; ; pause = min(2*pause, askLast) {
		err := c.untilGrace(ctx, a.ID, func() error {
			// The answer mostly is on its way, and nothing has to be undone then.
			ctx, stop := outlasting(ctx, cancelPatience)
			defer stop()
			return c.askLock(ctx, o, c.locks.enter(o), &a, &done)
		})
		if lockStatus(err) != metarpc.StatusLockWait {
			return done.Shared, err
		}
		timer := time.NewTimer(jitter(pause))
		select {
		case <-w.ready:
			pause = askFirst
		case <-timer.C:
		case <-c.ctx.Done():
		case <-ctx.Done():
		}
		timer.Stop()
		if c.ctx.Err() != nil {
			return false, ErrClosed
		}
		if ctx.Err() != nil {
			err := c.stopWaiting(ctx, o, w, &done)
			return done.Shared, err
		}
	}
}

// unlockStable takes a lock away in two calls for an owner, or in the first alone if no other session has seen the lock.
func (c *Client) unlockStable(ctx context.Context, o *lockOwner, first, second *place, a metarpc.LockArgs, stable func(context.Context) error) error {
	a.Alone = true
	err := c.askLock(ctx, o, first, &a, nil)
	if lockStatus(err) == metarpc.StatusShared {
		failed := stable(ctx)
		c.locks.begins(o, second)
		if ctx.Err() == nil {
			if failed != nil {
				c.log.Error("what was written under a lock is not stable, and the lock is taken away", "inode", a.ID, "err", failed)
			}
			a.Alone = false
			return c.askLock(ctx, o, second, &a, nil)
		}
		err = c.wrap(metarpc.OpLock, ctx.Err())
	}
	c.locks.begins(o, second)
	if second.wait(ctx) == nil {
		second.done()
	}
	return err
}

// stopWaiting ends the waiting at the service. The lock may become free in that very moment; then the caller has it.
func (c *Client) stopWaiting(ctx context.Context, o *lockOwner, w *lockWait, done *metarpc.LockDone) error {
	if c.locks.alone(o, w) {
		a := *w.args
		a.Wait = false
		ask, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelPatience)
		defer cancel()
		if c.askLock(ask, o, c.locks.enter(o), &a, done) == nil {
			return nil
		}
	}
	return c.wrap(metarpc.OpLock, ctx.Err())
}

// outlasting returns a context that ends some time after ctx does.
func outlasting(ctx context.Context, d time.Duration) (context.Context, func()) {
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	remove := context.AfterFunc(ctx, func() { time.AfterFunc(d, cancel) })
	return run, func() {
		remove()
		cancel()
	}
}

// TestLock finds a lock that one would have to wait for; its type is LockNone if there is none.
func (c *Client) TestLock(ctx context.Context, args *metarpc.LockArgs) (metarpc.LockResult, error) {
	var r metarpc.LockResult
	err := c.untilGrace(ctx, args.ID, func() error {
		return c.do(ctx, metarpc.OpTestLock, metarpc.Cred{}, args, &r, nil)
	})
	return r, err
}

// DropLocks takes all locks of an owner on a file away. It does not wait; the channel is closed when the service knows.
// Calls for the same owner that come later are executed later. stable is as for Lock.
func (c *Client) DropLocks(id layout.FileID, flock bool, owner uint64, stable func(context.Context) error) <-chan struct{} {
	a := metarpc.LockArgs{ID: id, Flock: flock, Owner: owner, Type: metarpc.LockNone, Start: 0, End: filelock.ToEOF}
	gone := make(chan struct{})
	if !c.locks.has(keyOf(&a), a.Start, a.End) {
		close(gone)
		return gone
	}
	o := c.locks.use(keyOf(&a))
	var unlock func() error
	if stable == nil {
		p := c.locks.enter(o)
		unlock = func() error { return c.askLock(c.ctx, o, p, &a, nil) }
	} else {
		first, second := c.locks.enterTwice(o)
		unlock = func() error { return c.unlockStable(c.ctx, o, first, second, a, stable) }
	}
	c.background(func() { // owns the call; ends with its answer or with c.ctx
		defer close(gone)
		defer c.locks.leave(o)
		if err := unlock(); err != nil && c.ctx.Err() == nil {
			c.log.Error("metadata service: unlocking", "inode", id, "err", err)
		}
		c.locks.drop(o)
	})
	return gone
}

// background runs f in a goroutine that Close waits for.
func (c *Client) background(f func()) {
	c.mu.Lock()
	open := c.ctx.Err() == nil
	if open {
		c.tasks.Go(f)
	}
	c.mu.Unlock()
	if !open {
		f() // its calls fail at once
	}
}

func lockStatus(err error) metarpc.Status {
	var e *metarpc.Error
	if errors.As(err, &e) {
		return e.Status
	}
	return metarpc.StatusOK
}

// untilGrace makes a call again until the service is no longer in its grace period, and until a file that is open here
// has been opened again in a new session.
func (c *Client) untilGrace(ctx context.Context, id layout.FileID, call func() error) error {
	pause := graceFirst
	for try := 1; ; try++ {
		err := call()
		switch lockStatus(err) {
		case metarpc.StatusGrace:
		case metarpc.Status(syscall.EBADF):
			if try > reopenTries || !c.opens.holds(id) {
				return err
			}
		default:
			return err
		}
		timer := time.NewTimer(jitter(pause))
		select {
		case <-timer.C:
		case <-c.ctx.Done():
			err = ErrClosed
		case <-ctx.Done():
			err = c.wrap(metarpc.OpLock, ctx.Err())
		}
		timer.Stop()
		if c.ctx.Err() != nil || ctx.Err() != nil {
			return err
		}
		pause = min(2*pause, graceLast)
	}
}

// askLock makes one call for an owner when it is p's turn. If ctx ends before the answer has come, what comes of the call
// is undone in the background, and those next in line wait for that. done gets what the answer says, unless it is nil.
func (c *Client) askLock(ctx context.Context, o *lockOwner, p *place, a *metarpc.LockArgs, done *metarpc.LockDone) error {
	ctx, stop := c.patient(ctx)
	defer stop()
	if err := p.wait(ctx); err != nil {
		return c.wrap(metarpc.OpLock, err)
	}
	o = c.locks.use(o.key) // by the call, which may outlast the caller
	over := func() {
		p.done()
		c.locks.leave(o)
	}
	args := *a
	if done == nil {
		done = new(metarpc.LockDone)
	}
	return c.do(ctx, metarpc.OpLock, metarpc.Cred{}, &args, done, func(out *outcome) {
		if out.err != nil {
			over()
			return
		}
		status := out.status
		before := c.locks.heard(o, &args, status)
		granted := status == metarpc.StatusOK && args.Type != metarpc.LockNone
		if !out.abandoned || !granted && status != metarpc.StatusLockWait {
			over()
			return
		}
		if granted {
			c.locks.restore(o, &args, before)
		}
		c.background(func() { // owns p; ends when it is undone, or with c.ctx
			defer over()
			c.undoLock(o, &args, before, granted)
		})
	})
}

// undoLock makes the service do away with what it did about a call that nobody waited for any more: it granted it, or
// it remembers that somebody waits.
func (c *Client) undoLock(o *lockOwner, a *metarpc.LockArgs, before []heldLock, granted bool) {
	set := func(l heldLock) error {
		args := *a
		args.Wait, args.Type, args.Start, args.End = false, metarpc.LockType(l.Type), l.Start, l.End
		return c.do(c.ctx, metarpc.OpLock, metarpc.Cred{}, &args, nil, nil)
	}
	if !granted {
		// To ask without waiting ends the waiting, unless it succeeds.
		if set(heldLock{Type: filelock.Type(a.Type), Start: a.Start, End: a.End}) != nil {
			return
		}
	}
	var t filelock.Table[struct{}] // has what is to be set
	parts := before
	for _, l := range before {
		t.Set(l)
	}
	for at := a.Start; ; {
		rest := t.Owned(struct{}{}, at, a.End)
		if len(rest) == 0 {
			parts = append(parts, heldLock{Start: at, End: a.End})
			break
		}
		if rest[0].Start > at {
			parts = append(parts, heldLock{Start: at, End: rest[0].Start - 1})
		}
		if rest[0].End == a.End {
			break
		}
		at = rest[0].End + 1
	}
	for _, l := range parts {
		if l.Type == filelock.Type(a.Type) {
			continue // it is what has been granted
		}
		switch err := set(l); {
		case err == nil:
		case lockStatus(err) == metarpc.StatusGrace, c.ctx.Err() != nil:
			return // a new instance knows nothing of all this; the locks of before are reclaimed
		case l.Type != filelock.None:
			c.loseLocks(o, err)
			return
		default:
			c.log.Error("metadata service: unlocking", "inode", o.key.id, "err", err)
		}
	}
}

// loseLocks records that the service does not hold an owner's locks any more, or not all of them.
func (c *Client) loseLocks(o *lockOwner, why error) {
	if !c.locks.drop(o) {
		return
	}
	c.log.Error("metadata service: locks are lost", "inode", o.key.id, "flock", o.key.flock, "err", why)
	if c.cfg.OnLockLost != nil {
		c.cfg.OnLockLost(o.key.id, o.key.flock, o.key.owner)
	}
}

// loseAllLocks is loseLocks for a session that is lost.
func (c *Client) loseAllLocks() {
	for _, key := range c.locks.all() {
		o := c.locks.use(key)
		c.loseLocks(o, errSessionGone)
		c.locks.leave(o)
	}
}

// reclaimLocks sets again what is locked, after the service has forgotten it.
func (c *Client) reclaimLocks(ctx context.Context) {
	keys := make(chan lockKey)
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() { // reclaims locks until there are no more
			for key := range keys {
				c.reclaimOwner(ctx, key)
			}
		})
	}
	for _, key := range c.locks.all() {
		keys <- key
	}
	close(keys)
	workers.Wait()
}

func (c *Client) reclaimOwner(ctx context.Context, key lockKey) {
	o := c.locks.use(key)
	defer c.locks.leave(o)
	p := c.locks.enterReclaim(o)
	if p.wait(ctx) != nil {
		return
	}
	defer p.done()
	c.locks.mu.Lock()
	held := o.held.Owned(struct{}{}, 0, filelock.ToEOF)
	c.locks.mu.Unlock()
	a := metarpc.LockArgs{ID: key.id, Flock: key.flock, Owner: key.owner, Reclaim: true}
	for _, l := range held {
		a.Type, a.Start, a.End, a.PID = metarpc.LockType(l.Type), l.Start, l.End, l.PID
		err := c.do(ctx, metarpc.OpLock, metarpc.Cred{}, &a, nil, nil)
		if err == nil {
			continue
		}
		if ctx.Err() == nil {
			c.loseLocks(o, err)
			// Nor are the others of use, which may have come back.
			a = metarpc.LockArgs{ID: key.id, Flock: key.flock, Owner: key.owner, End: filelock.ToEOF}
			if err := c.do(ctx, metarpc.OpLock, metarpc.Cred{}, &a, nil, nil); err != nil && ctx.Err() == nil {
				c.log.Error("metadata service: unlocking", "inode", key.id, "err", err)
			}
		}
		return
	}
}

// lockReady answers the callback which says that a lock may be free.
func (c *Client) lockReady(cn *conn, number uint64, a *metarpc.LockReadyArgs) error {
	c.locks.mu.Lock()
	if o := c.locks.owners[lockKey{a.ID, a.Flock, a.Owner}]; o != nil {
		o.wake()
	}
	c.locks.mu.Unlock()
	b, err := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: number})
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = time.Now()
	cn.append(b)
	return nil
}
