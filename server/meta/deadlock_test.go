package meta

import (
	"bytes"
	"context"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/filelock"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/layout"
)

func TestVictims(t *testing.T) {
	owner := func(n uint64) LockOwner { return LockOwner{Client: [16]byte{byte(n)}, Number: n} }
	edge := func(shard int, number, waiter, holder uint64) lockEdge {
		return lockEdge{shard, LockWait{number, owner(waiter), owner(holder)}}
	}
	for name, c := range map[string]struct {
		edges []lockEdge
		want  map[int][]uint64 // by shard
	}{
		"nobody waits":  {nil, nil},
		"a chain":       {[]lockEdge{edge(0, 1, 1, 2), edge(1, 1, 2, 3), edge(0, 2, 4, 3)}, nil},
		"two":           {[]lockEdge{edge(0, 1, 1, 2), edge(1, 7, 2, 1)}, map[int][]uint64{1: {7}}},
		"three":         {[]lockEdge{edge(0, 1, 3, 1), edge(1, 2, 1, 2), edge(2, 3, 2, 3)}, map[int][]uint64{0: {1}}},
		"in one shard":  {[]lockEdge{edge(0, 1, 1, 2), edge(0, 2, 2, 1)}, map[int][]uint64{0: {2}}},
		"two circles":   {[]lockEdge{edge(0, 1, 1, 2), edge(1, 2, 2, 1), edge(0, 3, 3, 4), edge(1, 4, 4, 3)}, map[int][]uint64{1: {2, 4}}},
		"two holders":   {[]lockEdge{edge(0, 5, 2, 9), edge(0, 5, 2, 1), edge(1, 2, 1, 2)}, map[int][]uint64{0: {5}}},
		"a tail":        {[]lockEdge{edge(0, 1, 9, 2), edge(0, 2, 1, 2), edge(1, 3, 2, 1)}, map[int][]uint64{1: {3}}},
		"circle within": {[]lockEdge{edge(0, 1, 3, 2), edge(1, 1, 2, 1), edge(2, 1, 1, 2), edge(2, 2, 1, 3)}, map[int][]uint64{0: {1}, 1: {1}}},
	} {
		for shard := range 3 {
			circles := victims(shard, c.edges)
			got := slices.Sorted(maps.Keys(circles))
			if !slices.Equal(got, c.want[shard]) {
				t.Errorf("%s: shard %d gives up %d, want %d", name, shard, got, c.want[shard])
			}
			for number, circle := range circles {
				if !slices.ContainsFunc(circle, func(e lockEdge) bool { return e.shard == shard && e.Number == number }) {
					t.Errorf("%s: wait %d of shard %d is not in its circle %v", name, number, shard, circle)
				}
				for i, e := range circle {
					if next := circle[(i+1)%len(circle)]; next.Holder != e.Waiter || !slices.Contains(c.edges, e) {
						t.Errorf("%s: %v is no circle", name, circle)
					}
				}
			}
		}
	}
}

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

// TestLockWaits has more waits than are told at a time.
func TestLockWaits(t *testing.T) {
	const holders, waiters = 300, 100
	h := startMemory(t)
	c := h.client()
	id := c.create(layout.RootID, "f")
	sess := h.svc.sessions[c.welcome.Session]
	table, now := &h.svc.locks, time.Now()
	table.mu.Lock()
	f := &lockedFile{id: id}
	table.files[id] = f
	want := map[[2]LockOwner]bool{}
	for i := range uint64(holders) {
		holder := lockOwner{sess, 1<<63 + i}
		for _, start := range []int64{0, 10} { // each is in the way twice
			table.add(sess, f.records.Set(fileLock{Owner: holder, Type: filelock.Read, Start: start, End: start + 4}))
		}
		for j := range uint64(waiters) {
			want[[2]LockOwner{{sess.client.ID, 1<<62 + j}, holder.global()}] = true
		}
	}
	for j := range uint64(waiters) {
		for _, end := range []int64{20, 30} { // and waits for all of them twice
			lock := fileLock{Owner: lockOwner{sess, 1<<62 + j}, Type: filelock.Write, Start: 0, End: end}
			table.beginWait(&lockWait{file: f, want: lock, since: now, asked: now})
		}
	}
	table.mu.Unlock()

	got := map[[2]LockOwner]int{}
	parts := 0
	for after := (LockWait{}); ; parts++ {
		part := h.svc.LockWaits(after)
		if len(part) > waitsPart {
			t.Fatalf("%d waits at a time, at most %d are wanted", len(part), waitsPart)
		}
		for _, w := range part {
			if w.compare(after) <= 0 {
				t.Fatalf("%+v after %+v", w, after)
			}
			after = w
			got[[2]LockOwner{w.Waiter, w.Holder}]++
		}
		if len(part) < waitsPart {
			break
		}
	}
	for pair, n := range got {
		if !want[pair] || n > 2 {
			t.Fatalf("told %d times: %v", n, pair)
		}
	}
	if len(got) != len(want) || parts < 2 {
		t.Errorf("%d of %d waits are told in %d full parts", len(got), len(want), parts)
	}
	edges, err := h.svc.waitsOf(t.Context(), 0)
	if err != nil || len(edges) < len(want) || len(edges) > maxWaits+waitsPart {
		t.Errorf("%d waits are looked at, %v", len(edges), err)
	}
}

// A part has room in a frame whatever it says.
func TestWaitsPart(t *testing.T) {
	most := peerrpc.LockOwner{Client: [16]byte(bytes.Repeat([]byte{255}, 16)), Number: math.MaxUint64}
	wait := peerrpc.LockWait{Number: math.MaxUint64, Waiter: most, Holder: most}
	if _, err := peerrpc.Append(nil, peerrpc.Version, &peerrpc.Reply{Number: math.MaxUint64, Waits: slices.Repeat([]peerrpc.LockWait{wait}, waitsPart)}); err != nil {
		t.Error(err)
	}
}
