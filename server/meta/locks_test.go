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
	}
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
