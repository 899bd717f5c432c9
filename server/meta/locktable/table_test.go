package locktable

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	again    = metarpc.Status(syscall.EAGAIN)
	deadlock = metarpc.Status(syscall.EDEADLK)
	noLock   = metarpc.Status(syscall.ENOLCK)
	waits    = metarpc.StatusLockWait
	ok       = metarpc.StatusOK
)

// world is a table and what it has said.
type world struct {
	t     *testing.T
	table *Table
	ready []Ready // in the order in which the table said it, without what the clients have taken
	n     byte
}

// client is a session that has all files open.
type client struct {
	*world
	sess  Session
	end   context.CancelFunc
	opens map[layout.FileID]*Open
}

func newWorld(t *testing.T) *world { return &world{t: t, table: New()} }

func (w *world) client() *client {
	w.n++
	c := &client{world: w, opens: map[layout.FileID]*Open{}}
	c.sess.Client, c.sess.Host = [16]byte{w.n}, "host"
	c.sess.Life, c.end = context.WithCancel(w.t.Context())
	return c
}

// record is a record lock, whole one of the whole file.
func record(id layout.FileID, owner uint64, typ metarpc.LockType, start, end int64) metarpc.LockArgs {
	return metarpc.LockArgs{ID: id, Owner: owner, Type: typ, Start: start, End: end, PID: uint32(100 + owner)}
}

func whole(id layout.FileID, owner uint64, typ metarpc.LockType) metarpc.LockArgs {
	return metarpc.LockArgs{ID: id, Owner: owner, Type: typ, Flock: true}
}

func waiting(a metarpc.LockArgs) metarpc.LockArgs { a.Wait = true; return a }

func (c *client) request(a metarpc.LockArgs) Request {
	if c.opens[a.ID] == nil {
		c.opens[a.ID] = new(Open)
	}
	return Request{Session: &c.sess, LockArgs: &a, Open: c.opens[a.ID]}
}

// lock checks the status of the answer to a call.
func (c *client) lock(a metarpc.LockArgs, want metarpc.Status) {
	c.t.Helper()
	entered := false
	res, err := c.table.Lock(c.request(a), func() { entered = true })
	c.ready = append(c.ready, res.Ready...)
	got := ok
	if e := (*metarpc.Error)(nil); errors.As(err, &e) {
		got = e.Status
	}
	if got != want || !entered || res.Circle != nil {
		c.t.Errorf("lock %+v: %v, want %v", a, got, want)
	}
}

// awaitReady checks that the next one to be told is c, about a lock of owner.
func (c *client) awaitReady(id layout.FileID, owner uint64, flock bool) {
	c.t.Helper()
	want := metarpc.LockReadyArgs{ID: id, Owner: owner, Flock: flock}
	if len(c.ready) == 0 || c.ready[0].Session != &c.sess || c.ready[0].LockReadyArgs != want {
		c.t.Fatalf("told are %+v, want %+v", c.ready, want)
	}
	c.ready = c.ready[1:]
}

// nobody checks that nobody is told.
func (w *world) nobody() {
	w.t.Helper()
	if len(w.ready) > 0 {
		w.t.Errorf("told are %+v", w.ready)
	}
}

// empty checks that nothing is remembered of no locks.
func (w *world) empty(clients ...*client) {
	w.t.Helper()
	if n := len(w.table.files) + len(w.table.waiting); n != 0 {
		w.t.Errorf("%d things are remembered", n)
	}
	for _, c := range clients {
		if c.sess.count != 0 {
			w.t.Errorf("a session has %d locks and waits", c.sess.count)
		}
	}
}

func (c *client) drop(id layout.FileID) { c.ready = append(c.ready, c.table.Drop(id, &c.sess)...) }

func TestConflicts(t *testing.T) {
	w := newWorld(t)
	a, b := w.client(), w.client()
	a.lock(record(1, 1, metarpc.LockWrite, 10, 19), ok)
	b.lock(record(1, 1, metarpc.LockRead, 19, 30), again) // another session's owner 1 is another owner
	b.lock(record(1, 1, metarpc.LockRead, 20, 30), ok)
	a.lock(record(1, 2, metarpc.LockRead, 25, 25), ok)
	a.lock(record(1, 2, metarpc.LockWrite, 25, 25), again)
	// Locks of the two kinds do not know of each other.
	b.lock(whole(1, 1, metarpc.LockWrite), ok)
	a.lock(whole(1, 1, metarpc.LockRead), again)

	test := func(c *client, a metarpc.LockArgs, want metarpc.LockResult) {
		t.Helper()
		if got := w.table.Test(c.request(a), func() {}); *got != want {
			t.Errorf("in the way of %+v is %+v, want %+v", a, got, want)
		}
	}
	test(b, record(1, 1, metarpc.LockRead, 0, 100), metarpc.LockResult{Type: metarpc.LockWrite, Start: 10, End: 19, PID: 101, Host: "host"})
	test(a, record(1, 2, metarpc.LockRead, 0, 100), metarpc.LockResult{Type: metarpc.LockWrite, Start: 10, End: 19, PID: 101})
	test(a, record(1, 1, metarpc.LockRead, 0, 100), metarpc.LockResult{})
	test(a, record(2, 1, metarpc.LockRead, 0, 100), metarpc.LockResult{})

	// Unlocking, in parts, and closing.
	a.lock(record(1, 1, metarpc.LockNone, 15, math.MaxInt64), ok)
	b.lock(record(1, 1, metarpc.LockWrite, 15, 19), ok)
	b.lock(record(1, 1, metarpc.LockWrite, 14, 19), again)
	a.drop(1)
	b.lock(record(1, 1, metarpc.LockWrite, 0, math.MaxInt64), ok)
	b.drop(1)
	w.empty(a, b)
}

// A conversion of flock(2) gives up what there was, also when it fails; one of fcntl(2) does not.
func TestConversion(t *testing.T) {
	w := newWorld(t)
	a, b := w.client(), w.client()
	for _, c := range []*client{a, b} {
		c.lock(whole(1, 1, metarpc.LockRead), ok)
		c.lock(record(1, 1, metarpc.LockRead, 0, 9), ok)
	}
	a.lock(record(1, 1, metarpc.LockWrite, 0, 9), again)
	b.lock(record(1, 1, metarpc.LockWrite, 0, 9), again)
	a.lock(whole(1, 1, metarpc.LockWrite), again)
	b.lock(whole(1, 1, metarpc.LockWrite), ok)
	a.lock(whole(1, 1, metarpc.LockRead), again)
	b.lock(whole(1, 1, metarpc.LockRead), ok)
	a.lock(whole(1, 1, metarpc.LockRead), ok)
}

func TestWait(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.client(), w.client(), w.client()
	for _, flock := range []bool{false, true} {
		args := func(owner uint64, typ metarpc.LockType) metarpc.LockArgs {
			if flock {
				return whole(1, owner, typ)
			}
			return record(1, owner, typ, 0, 99)
		}
		a.lock(args(1, metarpc.LockWrite), ok)
		b.lock(waiting(args(1, metarpc.LockWrite)), waits)
		c.lock(waiting(args(1, metarpc.LockRead)), waits)
		a.lock(waiting(args(2, metarpc.LockRead)), waits)
		b.lock(waiting(args(1, metarpc.LockWrite)), waits) // a repetition is no second wait
		w.nobody()
		a.lock(args(1, metarpc.LockNone), ok)
		// The first one is told, and for a moment the lock is kept for it.
		b.awaitReady(1, 1, flock)
		w.nobody()
		a.lock(args(1, metarpc.LockRead), again)
		b.lock(waiting(args(1, metarpc.LockWrite)), ok)
		w.nobody()
		// The others can share.
		b.lock(args(1, metarpc.LockNone), ok)
		c.awaitReady(1, 1, flock)
		a.awaitReady(1, 2, flock)
		c.lock(waiting(args(1, metarpc.LockRead)), ok)
		a.lock(waiting(args(2, metarpc.LockRead)), ok)
		// Who gives up waiting is not told, and asking without waiting is giving up.
		b.lock(waiting(args(1, metarpc.LockWrite)), waits)
		b.lock(args(1, metarpc.LockWrite), again)
		b.lock(waiting(args(2, metarpc.LockWrite)), waits)
		b.lock(args(2, metarpc.LockNone), ok)
		c.lock(args(1, metarpc.LockNone), ok)
		a.lock(args(2, metarpc.LockNone), ok)
		w.nobody()
		w.empty(a, b, c)
	}
}

// A lock is not kept for long for a client that does not come, and a wait that is not asked for again ends, as does
// that of a session that has ended.
func TestNobodyComes(t *testing.T) {
	for name, away := range map[string]func(b *client){
		"silent": func(*client) { time.Sleep(waitTime) },
		"ended":  func(b *client) { b.end() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				a, b := w.client(), w.client()
				all := func(typ metarpc.LockType) metarpc.LockArgs { return record(1, 1, typ, 0, math.MaxInt64) }
				a.lock(all(metarpc.LockWrite), ok)
				b.lock(waiting(all(metarpc.LockWrite)), waits)
				a.lock(all(metarpc.LockNone), ok)
				b.awaitReady(1, 1, false)
				a.lock(all(metarpc.LockWrite), again)
				time.Sleep(reserveTime)
				a.lock(all(metarpc.LockWrite), ok)
				away(b)
				a.lock(all(metarpc.LockNone), ok)
				w.nobody()
				w.empty(a, b)
			})
		})
	}
}

// Readers that come and go, so that there is always one, do not keep a writer waiting for ever.
func TestFairness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.client(), w.client()
		read := func(owner uint64) metarpc.LockArgs { return record(1, owner, metarpc.LockRead, 0, 9) }
		a.lock(read(1), ok)
		b.lock(waiting(record(1, 9, metarpc.LockWrite, 0, 9)), waits)
		a.lock(waiting(read(2)), ok)
		time.Sleep(fairTime + 1)
		a.lock(waiting(read(3)), waits)
		a.lock(read(4), ok)          // without waiting, as Linux would
		a.lock(waiting(read(1)), ok) // the writer waits for it
		a.awaitReady(1, 3, false)
		time.Sleep(fairTime + 1)
		a.lock(waiting(read(3)), ok) // nobody waits for ever
		for owner := range uint64(5) {
			a.lock(record(1, owner, metarpc.LockNone, 0, 9), ok)
		}
		b.awaitReady(1, 9, false)
	})
}

func TestDeadlock(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.client(), w.client(), w.client()
	const f, g = 1, 2
	write := func(id layout.FileID, at int64) metarpc.LockArgs { return record(id, 1, metarpc.LockWrite, at, at) }
	a.lock(write(f, 1), ok)
	b.lock(write(f, 2), ok)
	c.lock(write(g, 3), ok)
	a.lock(waiting(write(f, 2)), waits)
	b.lock(waiting(write(g, 3)), waits)
	c.lock(waiting(write(f, 1)), deadlock) // over three sessions and two files
	c.lock(write(f, 1), again)
	// The chain goes on where it was, and dissolves.
	c.lock(record(g, 1, metarpc.LockNone, 3, 3), ok)
	b.awaitReady(g, 1, false)
	b.lock(waiting(write(g, 3)), ok)
	c.lock(waiting(write(f, 1)), waits)
	// A client that has given up is not waited through.
	a.lock(write(f, 2), again)
	b.lock(waiting(write(f, 1)), waits)
	b.lock(write(f, 1), again)

	// flock(2) finds no deadlocks.
	a.lock(whole(f, 1, metarpc.LockWrite), ok)
	b.lock(whole(g, 1, metarpc.LockWrite), ok)
	a.lock(waiting(whole(g, 1, metarpc.LockWrite)), waits)
	b.lock(waiting(whole(f, 1, metarpc.LockWrite)), waits)
}

// A wait in a circle through other shards has its caller look for the circle again, and is refused only if that is
// still there.
func TestEnd(t *testing.T) {
	w := newWorld(t)
	a, b := w.client(), w.client()
	a.lock(record(1, 1, metarpc.LockWrite, 0, 9), ok)
	want := waiting(record(1, 1, metarpc.LockWrite, 0, 9))
	b.lock(want, waits)
	is := w.table.Waits(Wait{})
	if len(is) != 1 {
		t.Fatalf("waits %+v", is)
	}
	circle := []Edge{{Shard: 3, Wait: is[0]}, {Shard: 4, Wait: Wait{Number: 1, Waiter: is[0].Holder, Holder: is[0].Waiter}}}
	same := func(got []Edge) bool {
		return len(got) == 2 && slices.Contains(got, circle[0]) && slices.Contains(got, circle[1])
	}
	w.ready = w.table.End(4, circle) // there the other one is to end
	w.nobody()
	for _, lasts := range []bool{false, true} {
		w.ready = w.table.End(3, circle)
		b.awaitReady(1, 1, false)
		r := b.request(want)
		res, err := w.table.Lock(r, func() {})
		if err != nil || !same(res.Circle) || res.Wait != is[0].Number {
			t.Fatalf("%+v, %v", res, err)
		}
		r.Checked, r.Lasts = res.Wait, lasts
		expected := errWait
		if lasts {
			expected = errDeadlock
		}
		if res, err := w.table.Lock(r, func() {}); err != expected || res.Circle != nil {
			t.Errorf("the circle lasts, %t: %+v, %v", lasts, res, err)
		}
	}
	if len(w.table.Waits(Wait{})) != 0 {
		t.Error("a wait that was refused is there")
	}
}

// What a session can make the table remember is bounded.
func TestBound(t *testing.T) {
	w := newWorld(t)
	a, b := w.client(), w.client()
	a.lock(record(1, 1, metarpc.LockWrite, 0, 9), ok)
	b.lock(record(1, 1, metarpc.LockWrite, 10, 19), ok)
	a.sess.count += maxSessionLocks - 1
	a.lock(record(1, 1, metarpc.LockWrite, 20, 29), noLock)
	a.lock(waiting(record(1, 1, metarpc.LockWrite, 10, 19)), noLock)
	a.lock(record(1, 1, metarpc.LockNone, 5, 5), noLock) // would be two
	b.lock(record(1, 1, metarpc.LockWrite, 20, 29), ok)
	a.lock(record(1, 1, metarpc.LockNone, 5, 9), ok)
	a.lock(record(1, 1, metarpc.LockNone, 0, 4), ok)
	a.lock(record(1, 1, metarpc.LockWrite, 30, 30), ok)
	a.sess.count -= maxSessionLocks - 1
	a.drop(1)
	b.drop(1)
	w.empty(a, b)
}

// A file that is gone has no locks, whoever had them.
func TestDropAll(t *testing.T) {
	w := newWorld(t)
	a, b := w.client(), w.client()
	a.lock(record(1, 1, metarpc.LockWrite, 0, 9), ok)
	b.lock(whole(1, 1, metarpc.LockRead), ok)
	b.lock(waiting(record(1, 1, metarpc.LockRead, 5, 5)), waits)
	w.ready = w.table.Drop(1, nil)
	w.nobody()
	w.empty(a, b)
}

// An unlock is refused once if another session has the file open, or had since the lock was granted, and a lock is
// Shared if that was so since the last one.
func TestShared(t *testing.T) {
	w := newWorld(t)
	a, b := w.client(), w.client()
	open := func(c *client, unsure bool, others ...*client) {
		c.opens[1] = new(Open)
		w.table.Opened(c.opens[1], unsure, func(yield func(*Open) bool) {
			for _, o := range others {
				yield(o.opens[1])
			}
		})
	}
	set := func(c *client, sole, want bool) {
		t.Helper()
		r := c.request(record(1, 1, metarpc.LockWrite, 0, 9))
		r.Sole = sole
		if res, err := w.table.Lock(r, func() {}); err != nil || res.Shared != want {
			t.Errorf("a lock is shared: %t, %v", res.Shared, err)
		}
	}
	unlock := func(c *client, shared bool) {
		t.Helper()
		r := c.request(record(1, 1, metarpc.LockNone, 0, math.MaxInt64))
		r.Alone = true
		if _, err := w.table.Lock(r, func() {}); (err == errShared) != shared {
			t.Errorf("an unlock: %v", err)
		} else if shared {
			c.lock(record(1, 1, metarpc.LockNone, 0, math.MaxInt64), ok)
		}
	}
	open(a, false)
	set(a, true, false)
	unlock(a, false)
	set(a, true, false)
	open(b, false, a)
	unlock(a, true)
	for range 2 {
		set(b, false, true)
		unlock(b, true)
		set(a, false, true)
		unlock(a, true)
	}
	// b has closed the file, which it had open since a was granted its last lock.
	set(a, true, true)
	unlock(a, false)
	set(a, true, false)
	unlock(a, false)
	// What was before is not known.
	r := a.request(record(1, 1, metarpc.LockNone, 0, 9))
	r.Alone, r.Unsure = true, true
	if _, err := w.table.Lock(r, func() {}); err != errShared {
		t.Errorf("an unlock by a session that may have met others: %v", err)
	}
	open(a, true)
	set(a, true, true)
	unlock(a, false)
}

func TestVictims(t *testing.T) {
	owner := func(n uint64) Owner { return Owner{Client: [16]byte{byte(n)}, Number: n} }
	edge := func(shard int, number, waiter, holder uint64) Edge {
		return Edge{shard, Wait{number, owner(waiter), owner(holder)}}
	}
	for name, c := range map[string]struct {
		edges []Edge
		want  map[int][]uint64 // by shard
	}{
		"nobody waits":  {nil, nil},
		"a chain":       {[]Edge{edge(0, 1, 1, 2), edge(1, 1, 2, 3), edge(0, 2, 4, 3)}, nil},
		"two":           {[]Edge{edge(0, 1, 1, 2), edge(1, 7, 2, 1)}, map[int][]uint64{1: {7}}},
		"three":         {[]Edge{edge(0, 1, 3, 1), edge(1, 2, 1, 2), edge(2, 3, 2, 3)}, map[int][]uint64{0: {1}}},
		"in one shard":  {[]Edge{edge(0, 1, 1, 2), edge(0, 2, 2, 1)}, map[int][]uint64{0: {2}}},
		"two circles":   {[]Edge{edge(0, 1, 1, 2), edge(1, 2, 2, 1), edge(0, 3, 3, 4), edge(1, 4, 4, 3)}, map[int][]uint64{1: {2, 4}}},
		"two holders":   {[]Edge{edge(0, 5, 2, 9), edge(0, 5, 2, 1), edge(1, 2, 1, 2)}, map[int][]uint64{0: {5}}},
		"a tail":        {[]Edge{edge(0, 1, 9, 2), edge(0, 2, 1, 2), edge(1, 3, 2, 1)}, map[int][]uint64{1: {3}}},
		"circle within": {[]Edge{edge(0, 1, 3, 2), edge(1, 1, 2, 1), edge(2, 1, 1, 2), edge(2, 2, 1, 3)}, map[int][]uint64{0: {1}, 1: {1}}},
	} {
		for shard := range 3 {
			circles := victims(shard, c.edges)
			got := slices.Sorted(maps.Keys(circles))
			if !slices.Equal(got, c.want[shard]) {
				t.Errorf("%s: shard %d gives up %d, want %d", name, shard, got, c.want[shard])
			}
			for number, circle := range circles {
				if !slices.ContainsFunc(circle, func(e Edge) bool { return e.Shard == shard && e.Number == number }) {
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

// TestWaits has more waits than are told at a time.
func TestWaits(t *testing.T) {
	const holders, waiters = 300, 100
	w := newWorld(t)
	holder, waiter := w.client(), w.client()
	want := map[[2]Owner]bool{}
	for i := range uint64(holders) {
		for _, start := range []int64{0, 10} { // each is in the way twice
			holder.lock(record(1, i, metarpc.LockRead, start, start+4), ok)
		}
		for j := range uint64(waiters) {
			want[[2]Owner{{waiter.sess.Client, j}, {holder.sess.Client, i}}] = true
		}
	}
	for j := range uint64(waiters) {
		for _, end := range []int64{20, 30} { // and waits for all of them twice
			waiter.lock(waiting(record(1, j, metarpc.LockWrite, 0, end)), waits)
		}
	}
	got := map[[2]Owner]int{}
	parts := 0
	for after := (Wait{}); ; parts++ {
		part := w.table.Waits(after)
		if len(part) > WaitsPart {
			t.Fatalf("%d waits at a time, at most %d are wanted", len(part), WaitsPart)
		}
		for _, w := range part {
			if w.compare(after) <= 0 {
				t.Fatalf("%+v after %+v", w, after)
			}
			after = w
			got[[2]Owner{w.Waiter, w.Holder}]++
		}
		if len(part) < WaitsPart {
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
}

func TestWaitsLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.client(), w.client()
		a.lock(record(1, 1, metarpc.LockWrite, 0, 9), ok)
		b.lock(waiting(record(1, 1, metarpc.LockWrite, 0, 9)), waits)
		if w.table.WaitsLong() {
			t.Error("a new wait is long")
		}
		time.Sleep(longWait + 1)
		if !w.table.WaitsLong() {
			t.Error("an old wait is not long")
		}
	})
}
