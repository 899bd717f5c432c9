package meta

import (
	"math"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	statusAgain    = metarpc.Status(syscall.EAGAIN)
	statusDeadlock = metarpc.Status(syscall.EDEADLK)
	statusBadFile  = metarpc.Status(syscall.EBADF)
	statusIO       = metarpc.Status(syscall.EIO)
)

// lockArgs asks for a record lock.
func lockArgs(id layout.FileID, owner uint64, typ metarpc.LockType, start, end int64) metarpc.LockArgs {
	return metarpc.LockArgs{ID: id, Owner: owner, Type: typ, Start: start, End: end, PID: uint32(100 + owner)}
}

// flockArgs asks for a lock of the whole file.
func flockArgs(id layout.FileID, owner uint64, typ metarpc.LockType) metarpc.LockArgs {
	a := lockArgs(id, owner, typ, 0, math.MaxInt64)
	a.Flock = true
	return a
}

func waiting(a metarpc.LockArgs) metarpc.LockArgs { a.Wait = true; return a }

func reclaiming(a metarpc.LockArgs) metarpc.LockArgs { a.Reclaim = true; return a }

// lock asks for a lock and checks the status of the answer.
func (c *client) lock(a metarpc.LockArgs, want metarpc.Status) {
	c.t.Helper()
	_, err := ask[metarpc.LockDone](c, metarpc.OpLock, &a)
	wantStatus(c.t, err, want)
}

// awaitReady waits for a callback about a lock of owner.
func (c *client) awaitReady(id layout.FileID, owner uint64, flock bool) {
	c.t.Helper()
	select {
	case got := <-c.ready:
		if want := (metarpc.LockReadyArgs{ID: id, Owner: owner, Flock: flock}); got != want {
			c.t.Errorf("callback %+v, want %+v", got, want)
		}
	case <-time.After(10 * time.Second):
		c.t.Fatalf("no callback for owner %d", owner)
	}
}

// notReady checks that no callback has come. What would be sent was queued before the answer to the last call.
func (c *client) notReady() {
	c.t.Helper()
	must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
	select {
	case got := <-c.ready:
		c.t.Errorf("callback %+v", got)
	default:
	}
}

// lockMemory is how many files, waits and counters there are in memory.
func (h *host) lockMemory() int {
	t := &h.svc.locks
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.files) + len(t.waiting) + len(t.count) + len(t.ready)
}

// age makes all waits older.
func (h *host) age(id layout.FileID, d time.Duration, asked bool) {
	t := &h.svc.locks
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range t.files[id].waits {
		w.since = w.since.Add(-d)
		if asked {
			w.asked = w.asked.Add(-d)
		}
		if !w.ready.IsZero() {
			w.ready = w.ready.Add(-d)
		}
	}
}

func TestLockConflicts(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.lock(lockArgs(id, 1, metarpc.LockRead, 0, 9), statusBadFile)
	b.open(id)

	a.lock(lockArgs(id, 1, metarpc.LockWrite, 10, 19), metarpc.StatusOK)
	b.lock(lockArgs(id, 1, metarpc.LockRead, 19, 30), statusAgain) // another session's owner 1 is another owner
	b.lock(lockArgs(id, 1, metarpc.LockRead, 20, 30), metarpc.StatusOK)
	a.lock(lockArgs(id, 2, metarpc.LockRead, 25, 25), metarpc.StatusOK)
	a.lock(lockArgs(id, 2, metarpc.LockWrite, 25, 25), statusAgain)
	// Locks of the two kinds do not know of each other.
	b.lock(flockArgs(id, 1, metarpc.LockWrite), metarpc.StatusOK)
	a.lock(flockArgs(id, 1, metarpc.LockRead), statusAgain)

	test := func(c *client, a metarpc.LockArgs, want metarpc.LockResult) {
		t.Helper()
		if got := must[metarpc.LockResult](c, metarpc.OpTestLock, &a); got != want {
			t.Errorf("in the way of %+v is %+v, want %+v", a, got, want)
		}
	}
	test(b, lockArgs(id, 1, metarpc.LockRead, 0, 100), metarpc.LockResult{Type: metarpc.LockWrite, Start: 10, End: 19, PID: 101, Host: "test"})
	test(a, lockArgs(id, 2, metarpc.LockRead, 0, 100), metarpc.LockResult{Type: metarpc.LockWrite, Start: 10, End: 19, PID: 101})
	test(a, lockArgs(id, 1, metarpc.LockRead, 0, 100), metarpc.LockResult{})
	test(a, lockArgs(id, 1, metarpc.LockWrite, 22, 24), metarpc.LockResult{Type: metarpc.LockRead, Start: 20, End: 30, PID: 101, Host: "test"})

	// Unlocking, in parts, and closing.
	a.lock(lockArgs(id, 1, metarpc.LockNone, 15, math.MaxInt64), metarpc.StatusOK)
	b.lock(lockArgs(id, 1, metarpc.LockWrite, 15, 19), metarpc.StatusOK)
	b.lock(lockArgs(id, 1, metarpc.LockWrite, 14, 19), statusAgain)
	a.closeFile(id)
	b.lock(lockArgs(id, 1, metarpc.LockWrite, 0, math.MaxInt64), metarpc.StatusOK)
	a.lock(lockArgs(id, 1, metarpc.LockNone, 0, 5), metarpc.StatusOK) // no matter that it is closed
	b.closeFile(id)
	if n := h.lockMemory(); n != 0 {
		t.Errorf("%d things are remembered of no locks", n)
	}
}

// A conversion of flock(2) gives up what there was, also when it fails; one of fcntl(2) does not.
func TestLockConversion(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	for _, c := range []*client{a, b} {
		c.lock(flockArgs(id, 1, metarpc.LockRead), metarpc.StatusOK)
		c.lock(lockArgs(id, 1, metarpc.LockRead, 0, 9), metarpc.StatusOK)
	}
	a.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), statusAgain)
	b.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), statusAgain)
	a.lock(flockArgs(id, 1, metarpc.LockWrite), statusAgain)
	b.lock(flockArgs(id, 1, metarpc.LockWrite), metarpc.StatusOK)
	a.lock(flockArgs(id, 1, metarpc.LockRead), statusAgain)
	b.lock(flockArgs(id, 1, metarpc.LockRead), metarpc.StatusOK)
	a.lock(flockArgs(id, 1, metarpc.LockRead), metarpc.StatusOK)
}

func TestLockWait(t *testing.T) {
	h := startMemory(t)
	a, b, c := h.client(), h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	c.open(id)
	for _, flock := range []bool{false, true} {
		args := func(owner uint64, typ metarpc.LockType) metarpc.LockArgs {
			if flock {
				return flockArgs(id, owner, typ)
			}
			return lockArgs(id, owner, typ, 0, 99)
		}
		a.lock(args(1, metarpc.LockWrite), metarpc.StatusOK)
		b.lock(waiting(args(1, metarpc.LockWrite)), metarpc.StatusLockWait)
		c.lock(waiting(args(1, metarpc.LockRead)), metarpc.StatusLockWait)
		a.lock(waiting(args(2, metarpc.LockRead)), metarpc.StatusLockWait)
		b.lock(waiting(args(1, metarpc.LockWrite)), metarpc.StatusLockWait) // a repetition is no second wait
		b.notReady()
		a.lock(args(1, metarpc.LockNone), metarpc.StatusOK)
		// The first one is called, and for a moment the lock is kept for it.
		b.awaitReady(id, 1, flock)
		c.notReady()
		a.lock(args(1, metarpc.LockRead), statusAgain)
		b.lock(waiting(args(1, metarpc.LockWrite)), metarpc.StatusOK)
		c.notReady()
		// The others can share.
		b.lock(args(1, metarpc.LockNone), metarpc.StatusOK)
		c.awaitReady(id, 1, flock)
		a.awaitReady(id, 2, flock)
		c.lock(waiting(args(1, metarpc.LockRead)), metarpc.StatusOK)
		a.lock(waiting(args(2, metarpc.LockRead)), metarpc.StatusOK)
		// Who gives up waiting is not called, and asking without waiting is giving up.
		b.lock(waiting(args(1, metarpc.LockWrite)), metarpc.StatusLockWait)
		b.lock(args(1, metarpc.LockWrite), statusAgain)
		b.lock(waiting(args(2, metarpc.LockWrite)), metarpc.StatusLockWait)
		b.lock(args(2, metarpc.LockNone), metarpc.StatusOK)
		c.lock(args(1, metarpc.LockNone), metarpc.StatusOK)
		a.lock(args(2, metarpc.LockNone), metarpc.StatusOK)
		b.notReady()
		eventually(t, "nothing is remembered", func() bool { return h.lockMemory() == 0 })
	}
}

// A lock is not kept for long for who does not come, and who does not ask for long does not wait.
func TestLockNobodyComes(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	all := func(typ metarpc.LockType) metarpc.LockArgs { return lockArgs(id, 1, typ, 0, math.MaxInt64) }
	a.lock(all(metarpc.LockWrite), metarpc.StatusOK)
	b.lock(waiting(all(metarpc.LockWrite)), metarpc.StatusLockWait)
	a.lock(all(metarpc.LockNone), metarpc.StatusOK)
	b.awaitReady(id, 1, false)
	a.lock(all(metarpc.LockWrite), statusAgain)
	h.age(id, 2*reserveTime, false)
	a.lock(all(metarpc.LockWrite), metarpc.StatusOK)
	h.age(id, 2*waitTime, true)
	a.lock(all(metarpc.LockNone), metarpc.StatusOK)
	b.notReady()
	eventually(t, "nothing is remembered", func() bool { return h.lockMemory() == 0 })
}

// Readers that come and go, so that there is always one, do not keep a writer waiting for ever.
func TestLockFairness(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	read := func(owner uint64) metarpc.LockArgs { return lockArgs(id, owner, metarpc.LockRead, 0, 9) }
	a.lock(read(1), metarpc.StatusOK)
	b.lock(waiting(lockArgs(id, 9, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
	a.lock(waiting(read(2)), metarpc.StatusOK)
	h.age(id, 2*fairTime, false)
	a.lock(waiting(read(3)), metarpc.StatusLockWait)
	a.lock(read(4), metarpc.StatusOK)          // who does not want to wait gets what Linux would give it
	a.lock(waiting(read(1)), metarpc.StatusOK) // who the writer waits for does not wait
	h.age(id, 2*fairTime, false)
	a.lock(waiting(read(3)), metarpc.StatusOK) // nor does anybody wait for ever
	for owner := range uint64(5) {
		a.lock(lockArgs(id, owner, metarpc.LockNone, 0, 9), metarpc.StatusOK)
	}
	b.awaitReady(id, 9, false)
}

func TestLockDeadlock(t *testing.T) {
	h := startMemory(t)
	a, b, c := h.client(), h.client(), h.client()
	f, g := a.create(layout.RootID, "f"), a.create(layout.RootID, "g")
	for _, o := range []*client{b, c} {
		o.open(f)
		o.open(g)
	}
	w := func(id layout.FileID, at int64) metarpc.LockArgs { return lockArgs(id, 1, metarpc.LockWrite, at, at) }
	a.lock(w(f, 1), metarpc.StatusOK)
	b.lock(w(f, 2), metarpc.StatusOK)
	c.lock(w(g, 3), metarpc.StatusOK)
	a.lock(waiting(w(f, 2)), metarpc.StatusLockWait)
	b.lock(waiting(w(g, 3)), metarpc.StatusLockWait)
	c.lock(waiting(w(f, 1)), statusDeadlock) // over three sessions and two files
	c.lock(w(f, 1), statusAgain)
	// The chain goes on where it was, and dissolves.
	c.lock(lockArgs(g, 1, metarpc.LockNone, 3, 3), metarpc.StatusOK)
	b.awaitReady(g, 1, false)
	b.lock(waiting(w(g, 3)), metarpc.StatusOK)
	c.lock(waiting(w(f, 1)), metarpc.StatusLockWait)
	// Who has given up is not waited through.
	a.lock(w(f, 2), statusAgain)
	b.lock(waiting(w(f, 1)), metarpc.StatusLockWait)
	b.lock(w(f, 1), statusAgain)

	// flock(2) finds no deadlocks.
	a.lock(flockArgs(f, 1, metarpc.LockWrite), metarpc.StatusOK)
	b.lock(flockArgs(g, 1, metarpc.LockWrite), metarpc.StatusOK)
	a.lock(waiting(flockArgs(g, 1, metarpc.LockWrite)), metarpc.StatusLockWait)
	b.lock(waiting(flockArgs(f, 1, metarpc.LockWrite)), metarpc.StatusLockWait)
}

// The end of a session frees its locks, and wakes who waits for them.
func TestLockSessionEnd(t *testing.T) {
	for _, how := range []string{"ended", "expired"} {
		t.Run(how, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				a, b := h.client(), h.client()
				defer renewing(b)()
				id := a.create(layout.RootID, "f")
				b.open(id)
				a.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
				a.lock(flockArgs(id, 1, metarpc.LockWrite), metarpc.StatusOK)
				b.lock(waiting(lockArgs(id, 1, metarpc.LockRead, 5, 5)), metarpc.StatusLockWait)
				a.lock(waiting(lockArgs(id, 2, metarpc.LockWrite, 5, 5)), metarpc.StatusLockWait) // ends with its session
				b.notReady()
				if how == "ended" {
					must[metarpc.Empty](a, metarpc.OpEndSession, &metarpc.Empty{})
				} else { // at 5/4 of the lease
					time.Sleep(h.lease + h.lease/5)
					b.lock(waiting(lockArgs(id, 1, metarpc.LockRead, 5, 5)), metarpc.StatusLockWait) // or it is forgotten
				}
				b.awaitReady(id, 1, false)
				b.lock(waiting(lockArgs(id, 1, metarpc.LockRead, 5, 5)), metarpc.StatusOK)
				b.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
				b.lock(flockArgs(id, 1, metarpc.LockWrite), metarpc.StatusOK)
				b.closeFile(id)
				eventually(t, "nothing is remembered", func() bool { return h.lockMemory() == 0 })
			})
		})
	}
}

// A dead writer's lock is given to others only when what it wrote can be read.
func TestLockOutlastsWrites(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	a.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
	if _, err := a.layout(id, 0, 10); err != nil {
		t.Fatal(err)
	}
	h.files.write(t, id, 10)
	release := h.files.hold()
	defer release()
	must[metarpc.Empty](a, metarpc.OpEndSession, &metarpc.Empty{})
	h.files.awaitStalled(1)
	b.lock(waiting(lockArgs(id, 1, metarpc.LockRead, 0, 9)), metarpc.StatusLockWait)
	b.notReady()
	release()
	b.awaitReady(id, 1, false)
	b.lock(waiting(lockArgs(id, 1, metarpc.LockRead, 0, 9)), metarpc.StatusOK)
	if size := b.attr(id).Size; size != 10 {
		t.Errorf("size %d, want 10", size)
	}
}

// Locks of a file that is removed are gone with it.
func TestLockRemovedFile(t *testing.T) {
	h := startMemory(t)
	a := h.client()
	id := a.create(layout.RootID, "f")
	a.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
	a.remove(layout.RootID, "f")
	a.lock(lockArgs(id, 2, metarpc.LockWrite, 0, 9), statusAgain) // it is still open
	a.closeFile(id)
	if n := h.lockMemory(); n != 0 {
		t.Errorf("%d things are remembered of no locks", n)
	}
}

// After a restart, locks come back before new ones are given.
func TestLockReclaim(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	write := lockArgs(id, 1, metarpc.LockWrite, 0, 9)
	a.lock(write, metarpc.StatusOK)
	a.lock(flockArgs(id, 1, metarpc.LockRead), metarpc.StatusOK)
	a.lock(reclaiming(write), statusIO) // nothing was restarted
	h.restart()
	for _, c := range []*client{b, a} {
		c.connect()
	}
	b.open(id)
	b.lock(write, metarpc.StatusGrace)
	b.lock(waiting(write), metarpc.StatusGrace)
	b.lock(lockArgs(id, 1, metarpc.LockNone, 0, 9), metarpc.StatusOK)
	_, err := ask[metarpc.LockResult](b, metarpc.OpTestLock, &write)
	wantStatus(t, err, metarpc.StatusGrace)
	a.lock(reclaiming(write), statusBadFile)
	a.open(id)
	a.lock(reclaiming(write), metarpc.StatusOK)
	a.lock(reclaiming(write), metarpc.StatusOK) // the answer may have been lost
	a.lock(reclaiming(flockArgs(id, 1, metarpc.LockRead)), metarpc.StatusOK)
	b.lock(reclaiming(lockArgs(id, 1, metarpc.LockRead, 5, 15)), statusIO)
	b.lock(reclaiming(lockArgs(id, 1, metarpc.LockRead, 10, 15)), metarpc.StatusOK)
	h.svc.endGrace()
	b.lock(reclaiming(lockArgs(id, 1, metarpc.LockRead, 20, 25)), statusIO)
	b.lock(write, statusAgain)
	b.lock(flockArgs(id, 1, metarpc.LockWrite), statusAgain)
	b.lock(flockArgs(id, 1, metarpc.LockRead), metarpc.StatusOK)
}

// What a session can make the service remember is bounded.
func TestLockBound(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	a.lock(lockArgs(id, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
	b.lock(lockArgs(id, 1, metarpc.LockWrite, 10, 19), metarpc.StatusOK)
	sess := h.svc.sessions[a.hello.Session]
	count := func(n int) {
		h.svc.locks.mu.Lock()
		defer h.svc.locks.mu.Unlock()
		h.svc.locks.add(sess, n)
	}
	count(maxSessionLocks - 1)
	noLock := metarpc.Status(syscall.ENOLCK)
	a.lock(lockArgs(id, 1, metarpc.LockWrite, 20, 29), noLock)
	a.lock(waiting(lockArgs(id, 1, metarpc.LockWrite, 10, 19)), noLock)
	a.lock(lockArgs(id, 1, metarpc.LockNone, 5, 5), noLock) // would be two
	b.lock(lockArgs(id, 1, metarpc.LockWrite, 20, 29), metarpc.StatusOK)
	a.lock(lockArgs(id, 1, metarpc.LockNone, 5, 9), metarpc.StatusOK)
	a.lock(lockArgs(id, 1, metarpc.LockNone, 0, 4), metarpc.StatusOK)
	a.lock(lockArgs(id, 1, metarpc.LockWrite, 30, 30), metarpc.StatusOK)
	count(1 - maxSessionLocks)
	a.closeFile(id)
	b.closeFile(id)
	if n := h.lockMemory(); n != 0 {
		t.Errorf("%d things are remembered of no locks", n)
	}
}

// TestLockShared follows what sessions are told of one another when they lock and unlock: an unlock is refused once if another one has the file
// open, or had since the lock was granted, and a lock is Shared if that was so since the last one.
func TestLockShared(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	set := func(c *client, owner uint64, shared bool) {
		t.Helper()
		args := lockArgs(id, owner, metarpc.LockWrite, int64(owner)*10, int64(owner)*10+9)
		if r := must[metarpc.LockDone](c, metarpc.OpLock, &args); r.Shared != shared {
			t.Errorf("a lock is shared: %v", r.Shared)
		}
	}
	unlock := func(c *client, owner uint64, want metarpc.Status) {
		t.Helper()
		args := lockArgs(id, owner, metarpc.LockNone, 0, math.MaxInt64)
		args.Alone = true
		c.lock(args, want)
		if want == metarpc.StatusOK {
			return
		}
		if n := must[metarpc.LockResult](b, metarpc.OpTestLock, &metarpc.LockArgs{ID: id, Owner: 99, Type: metarpc.LockRead, End: math.MaxInt64}); n.Type == metarpc.LockNone {
			t.Error("the lock is gone")
		}
		args.Alone = false
		c.lock(args, metarpc.StatusOK)
	}
	set(a, 1, false)
	unlock(a, 1, metarpc.StatusOK)
	b.open(id)
	for range 2 {
		set(a, 1, true)
		unlock(a, 1, metarpc.StatusShared)
		set(b, 2, true)
		unlock(b, 2, metarpc.StatusShared)
	}
	// It has gone, and had it open while a had one of its locks.
	set(a, 1, true)
	b.closeFile(id)
	set(a, 2, true)
	set(a, 3, false)
	unlockHeld := func(owner uint64, want metarpc.Status) {
		t.Helper()
		args := lockArgs(id, owner, metarpc.LockNone, 0, math.MaxInt64)
		args.Alone = true
		a.lock(args, want)
	}
	unlockHeld(3, metarpc.StatusShared)
	a.lock(lockArgs(id, 3, metarpc.LockNone, 0, math.MaxInt64), metarpc.StatusOK)
	a.lock(lockArgs(id, 2, metarpc.LockNone, 0, math.MaxInt64), metarpc.StatusOK)
	unlockHeld(1, metarpc.StatusShared)
	a.lock(lockArgs(id, 1, metarpc.LockNone, 0, math.MaxInt64), metarpc.StatusOK)
	set(a, 1, false)
	unlockHeld(1, metarpc.StatusOK)
	// A session that comes back after a restart may not have been alone before. What it asked of the earlier instance comes
	// before what it reclaims.
	set(a, 4, false)
	h.restart()
	a.connect()
	unlockHeld(4, metarpc.StatusShared)
	must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true})
	again := lockArgs(id, 4, metarpc.LockWrite, 40, 49)
	again.Reclaim = true
	a.lock(again, metarpc.StatusOK)
	unlockHeld(4, metarpc.StatusShared)
	a.lock(lockArgs(id, 4, metarpc.LockNone, 0, math.MaxInt64), metarpc.StatusOK)
	must[metarpc.Empty](a, metarpc.OpReclaimComplete, &metarpc.Empty{})
	b.connect()
	must[metarpc.Empty](b, metarpc.OpReclaimComplete, &metarpc.Empty{})
	set(a, 1, true)
	unlockHeld(1, metarpc.StatusOK)
}
