package meta

import (
	"bytes"
	"context"
	"math"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/locktable"
)

// crossing has u and v each hold a lock that the other waits for, at two services. v's wait is the one that ends.
func (c *cluster) crossing() (u, v *client, fu, fv layout.FileID) {
	c.t.Helper()
	u, v = c.client(), c.client()
	if bytes.Compare(u.hello.Client.ID[:], v.hello.Client.ID[:]) > 0 {
		u, v = v, u
	}
	fu, fv = u.create(c.dirAt(u, 0, "d"), "f"), u.create(c.dirAt(u, 1, "d"), "f")
	v.open(fu)
	v.open(fv)
	u.lock(lockArgs(fu, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
	v.lock(lockArgs(fv, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
	u.lock(waiting(lockArgs(fv, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
	v.lock(waiting(lockArgs(fu, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
	v.parts[0].awaitReady(fu, 1, false)
	return u, v, fu, fv
}

func TestDeadlockOfShards(t *testing.T) {
	u, v, fu, fv := startCluster(t, 2, nil).crossing()
	v.lock(waiting(lockArgs(fu, 1, metarpc.LockWrite, 0, 9)), statusDeadlock)
	v.lock(lockArgs(fv, 1, metarpc.LockNone, 0, 9), metarpc.StatusOK)
	u.parts[1].awaitReady(fv, 1, false)
	u.lock(waiting(lockArgs(fv, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusOK)
}

// Who was found in a circle that is none any more waits on, and is found in the next one.
func TestDeadlockOver(t *testing.T) {
	u, v, fu, fv := startCluster(t, 2, nil).crossing()
	u.lock(lockArgs(fv, 1, metarpc.LockNone, 0, 9), metarpc.StatusOK) // it was interrupted
	v.lock(waiting(lockArgs(fu, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
	v.lock(waiting(lockArgs(fu, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
	u.lock(waiting(lockArgs(fv, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait) // another wait
	v.parts[0].awaitReady(fu, 1, false)
	v.lock(waiting(lockArgs(fu, 1, metarpc.LockWrite, 0, 9)), statusDeadlock)
}

// Nobody is refused on the word of a service that does not repeat it.
func TestDeadlockUnconfirmed(t *testing.T) {
	c := startCluster(t, 2, nil)
	_, v, fu, _ := c.crossing()
	c.mu.Lock()
	c.onWaits = func(context.Context) error { return errLost }
	c.mu.Unlock()
	v.lock(waiting(lockArgs(fu, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
}

// All shards are asked at the same time.
func TestWaitsOfShards(t *testing.T) {
	c := startCluster(t, 3, nil)
	var asked atomic.Int32
	both := make(chan struct{})
	c.onWaits = func(ctx context.Context) error {
		if asked.Add(1) == 2 {
			close(both)
		}
		select {
		case <-both:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	u, v := c.client(), c.client()
	for shard := range 3 {
		f := u.create(c.dirAt(u, shard, "d"), "f")
		v.open(f)
		u.lock(lockArgs(f, 1, metarpc.LockWrite, 0, 9), metarpc.StatusOK)
		v.lock(waiting(lockArgs(f, 1, metarpc.LockWrite, 0, 9)), metarpc.StatusLockWait)
	}
	if edges := c.svc(0).waitsIn(t.Context(), []int{0, 1, 2}); len(edges) != 3 {
		t.Errorf("waits %v, want one of each shard", edges)
	}
}

// A part has room in a frame whatever it says.
func TestWaitsPart(t *testing.T) {
	most := peerrpc.LockOwner{Client: [16]byte(bytes.Repeat([]byte{255}, 16)), Number: math.MaxUint64}
	wait := peerrpc.LockWait{Number: math.MaxUint64, Waiter: most, Holder: most}
	if _, err := peerrpc.Append(nil, peerrpc.Version, &peerrpc.Reply{Number: math.MaxUint64, Waits: slices.Repeat([]peerrpc.LockWait{wait}, locktable.WaitsPart)}); err != nil {
		t.Error(err)
	}
}
