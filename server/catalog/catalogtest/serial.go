package catalogtest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

// testRealTime has writers that raise a row of their own and tell when a commit has returned, and readers that must see
// at least what had been told before they began, in every way to read and to guard.
func testRealTime(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const writers, readers = 4, 8
	var done [writers]atomic.Int64
	key := func(w int) []byte { return fmt.Appendf(nil, "row/%d", w) }
	number := func(value []byte) int64 {
		fields, _ := catalog.DecodeCounters(value)
		return fields.Field(0)
	}
	for w := range writers {
		put(t, e, string(key(w)), string(catalog.EncodeCounters(0)))
	}
	race(t, writers+readers, func(worker, i int, rng *rand.Rand) error {
		if worker < writers {
			n := int64(i + 1)
			b := &catalog.Batch{Durability: durability(i)}
			switch worker % 2 {
			case 0:
				b.Put(key(worker), catalog.EncodeCounters(n))
			default:
				b.Add(key(worker), 0, 1)
			}
			err := commit(ctx, e, b)
			done[worker].Store(n)
			return err
		}
		w := rng.IntN(writers)
		least := done[w].Load()
		var value []byte
		var err error
		switch how := rng.IntN(5); how {
		case 0:
			value, err = e.Get(ctx, key(w))
		case 1:
			var values [][]byte
			if values, err = e.GetMany(ctx, [][]byte{key(w)}); err == nil {
				value = values[0]
			}
		case 2:
			for row, scanErr := range e.Scan(ctx, key(w), catalog.After(key(w)), catalog.ScanOptions{}) {
				value, err = bytes.Clone(row.Value), scanErr
			}
		case 3:
			var snap catalog.Snapshot
			if snap, err = e.Snapshot(ctx); err != nil {
				return err
			}
			value, err = snap.Get(ctx, key(w))
			err = errors.Join(err, snap.Close())
		case 4: // what is behind cannot be equal any more
			if least == 0 {
				return nil
			}
			b := &catalog.Batch{Durability: catalog.NoSync}
			b.GuardEqual(key(w), catalog.EncodeCounters(least-1))
			err = commit(ctx, e, b)
			if guard := (*catalog.GuardError)(nil); errors.As(err, &guard) {
				return nil
			}
			return fmt.Errorf("a guard held on the value of %s before the last one known: %w", key(w), err)
		}
		if n := number(value); err == nil && n < least {
			err = fmt.Errorf("%s is %d after the commit of %d had returned", key(w), n, least)
		}
		return err
	})
}

// step is a commit of testSerialOrder: it read both lists, which its guards held fast, and appended its number to one.
type step struct {
	number     uint64
	lists      [2]int
	seen       [2]int // how long they were
	begin, end time.Duration
}

// testSerialOrder looks for a cycle in what commits saw of each other. Rows hold lists of the numbers of those that
// wrote them; a commit is guarded by two lists and appends to the first. So it is known which came before which in every
// row, and with the order in real time that must be a partial order.
func testSerialOrder(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const lists, workers = 6, 8
	key := func(list int) []byte { return fmt.Appendf(nil, "list/%d", list) }
	var mu sync.Mutex
	var steps []step
	var last atomic.Uint64
	begin := time.Now()
	race(t, workers, func(w, i int, rng *rand.Rand) error {
		s := step{number: last.Add(1), lists: [2]int{rng.IntN(lists), rng.IntN(lists)}}
		if s.lists[0] == s.lists[1] {
			s.lists[1] = (s.lists[1] + 1) % lists
		}
		s.begin = time.Since(begin)
		for range 3 { // then give up: another pair may be less contended
			old, err := e.GetMany(ctx, [][]byte{key(s.lists[0]), key(s.lists[1])})
			if err != nil {
				return err
			}
			b := &catalog.Batch{Durability: durability(i)}
			for k, value := range old {
				s.seen[k] = len(value) / 8
				if value == nil {
					b.GuardAbsent(key(s.lists[k]))
				} else {
					b.GuardEqual(key(s.lists[k]), value)
				}
			}
			b.Put(key(s.lists[0]), binary.BigEndian.AppendUint64(bytes.Clone(old[0]), s.number))
			err = commit(ctx, e, b)
			if guard := (*catalog.GuardError)(nil); errors.As(err, &guard) {
				continue
			}
			s.end = time.Since(begin)
			mu.Lock()
			steps = append(steps, s)
			mu.Unlock()
			return err
		}
		return nil
	})
	var final [lists][]uint64
	for list := range final {
		value, err := e.Get(ctx, key(list))
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			t.Fatal(err)
		}
		for ; len(value) > 0; value = value[8:] {
			final[list] = append(final[list], binary.BigEndian.Uint64(value))
		}
	}
	t.Logf("%d commits", len(steps))
	if cycle := findCycle(steps, final[:]); cycle != "" {
		t.Error(cycle)
	}
}

// findCycle returns a description of the first contradiction in the order of steps, or "".
func findCycle(steps []step, final [][]uint64) string {
	index := map[uint64]int{}
	for i, s := range steps {
		index[s.number] = i
	}
	// What must come after each step. Behind the steps there is a moment for each, its end, and these form a chain: a step
	// that began later comes after the moment.
	after := make([][]int, 2*len(steps))
	byEnd := slices.SortedFunc(slices.Values(steps), func(a, b step) int { return cmp.Compare(a.end, b.end) })
	for m, s := range byEnd {
		after[index[s.number]] = append(after[index[s.number]], len(steps)+m)
		if m > 0 {
			after[len(steps)+m-1] = append(after[len(steps)+m-1], len(steps)+m)
		}
	}
	written := 0
	for i, s := range steps {
		for k, list := range s.lists {
			row, n := final[list], s.seen[k]
			if n > len(row) || k == 0 && (n == len(row) || row[n] != s.number) {
				return fmt.Sprintf("%+v is not in list %d where it was put", s, list)
			}
			if k == 0 {
				written++
				n++ // the next one is who wrote behind it
			}
			if s.seen[k] > 0 {
				before, known := index[row[s.seen[k]-1]]
				if !known {
					return fmt.Sprintf("list %d has %d, which nobody committed", list, row[s.seen[k]-1])
				}
				after[before] = append(after[before], i)
			}
			if n < len(row) {
				after[i] = append(after[i], index[row[n]])
			}
		}
		ended, _ := slices.BinarySearchFunc(byEnd, s.begin, func(s step, begin time.Duration) int { return cmp.Compare(s.end, begin) })
		if ended > 0 {
			after[len(steps)+ended-1] = append(after[len(steps)+ended-1], i)
		}
	}
	total := 0
	for _, row := range final {
		total += len(row)
	}
	if total != written {
		return fmt.Sprintf("%d entries in all lists after %d commits", total, written)
	}
	const unseen, open, finished = 0, 1, 2
	state := make([]int, len(after))
	var visit func(i int) string
	visit = func(i int) string {
		state[i] = open
		for _, j := range after[i] {
			if state[j] == open {
				return fmt.Sprintf("%+v and %+v are on a cycle", byNode(steps, byEnd, i), byNode(steps, byEnd, j))
			}
			if state[j] == unseen {
				if cycle := visit(j); cycle != "" {
					return cycle
				}
			}
		}
		state[i] = finished
		return ""
	}
	for i := range after {
		if state[i] == unseen {
			if cycle := visit(i); cycle != "" {
				return cycle
			}
		}
	}
	return ""
}

// byNode returns the step of a node of findCycle: one itself, or the one that ended in that moment.
func byNode(steps, byEnd []step, node int) step {
	if node < len(steps) {
		return steps[node]
	}
	return byEnd[node-len(steps)]
}

// testDeltaOrder lets an Add and a Max of one field race, which do not commute, while somebody reads: what was seen in
// between tells which came first, and the end must agree.
func testDeltaOrder(t *testing.T, e catalog.Engine) {
	ctx, key := background(t), []byte("row")
	begin := time.Now()
	between := 0
	for round := int64(0); round < 20 || time.Since(begin) < 2*raceFor(); round++ {
		mustCommit(t, e, &catalog.Batch{
			Puts: []catalog.Row{{Key: key, Value: catalog.EncodeCounters(0)}}, Durability: catalog.NoSync,
		})
		if round%2 == 1 { // the row has had deltas before
			b := &catalog.Batch{Durability: catalog.NoSync}
			b.Add(key, 0, 0)
			mustCommit(t, e, b)
		}
		seen := make([]int64, 0, 1000)
		var running atomic.Int32
		running.Store(2)
		parallel(t, 3, func(i int, _ *rand.Rand) error {
			b := &catalog.Batch{Durability: catalog.NoSync}
			switch i {
			case 0:
				defer running.Add(-1)
				b.Max(key, 0, 10)
				return commit(ctx, e, b)
			case 1:
				defer running.Add(-1)
				b.Add(key, 0, 5)
				return commit(ctx, e, b)
			}
			for running.Load() > 0 {
				value, err := e.Get(ctx, key)
				if err != nil {
					return err
				}
				fields, err := catalog.DecodeCounters(value)
				if err != nil {
					return err
				}
				seen = append(seen, fields.Field(0))
			}
			return nil
		})
		end := counters(t, e, "row").Field(0)
		last := int64(0)
		for _, n := range seen {
			switch {
			case n < last:
				t.Fatalf("round %d: %d came after %d", round, n, last)
			case n == 0, n == end:
			case n == 5 && end == 10, n == 10 && end == 15:
				between++
			default:
				t.Fatalf("round %d: %d was seen, and %d is the end", round, n, end)
			}
			last = n
		}
		if end != 10 && end != 15 {
			t.Fatalf("round %d: max 10 and add 5 made %d", round, end)
		}
	}
	t.Logf("%d reads in between", between)
}

// testManyDeltas adds so often to one row that an engine which keeps deltas apart has to join them, and reads meanwhile:
// nothing acknowledged may be missing, nothing may be counted that was not asked for.
func testManyDeltas(t *testing.T, e catalog.Engine) {
	ctx, key := background(t), []byte("hot")
	const workers = 8
	each := 400
	if testing.Short() {
		each = 100
	}
	var begun, ended atomic.Int64
	parallel(t, workers+2, func(w int, _ *rand.Rand) error {
		for i := range each {
			if w < workers {
				b := &catalog.Batch{Durability: catalog.NoSync}
				b.Add(key, 0, 1)
				b.Max(key, 1, begun.Add(1))
				if err := commit(ctx, e, b); err != nil {
					return err
				}
				ended.Add(1)
				continue
			}
			least := ended.Load()
			value, err := e.Get(ctx, key)
			if i%2 == 1 {
				var values [][]byte
				if values, err = e.GetMany(ctx, [][]byte{[]byte("absent"), key}); err == nil {
					value = values[1]
				}
			}
			most := begun.Load()
			if errors.Is(err, catalog.ErrNotFound) {
				err = nil
			}
			if err != nil {
				return err
			}
			fields, err := catalog.DecodeCounters(value)
			if err != nil {
				return err
			}
			if n := fields.Field(0); n < least || n > most {
				return fmt.Errorf("%d deltas counted, %d were acknowledged before and %d begun", n, least, most)
			}
			if n := fields.Field(1); n < least || n > most {
				return fmt.Errorf("the highest number is %d, %d were acknowledged before and %d begun", n, least, most)
			}
		}
		return nil
	})
	n := int64(workers * each)
	wantCounters(t, e, "hot", n, n)
	b := new(catalog.Batch)
	b.GuardEqual(key, catalog.EncodeCounters(n, n))
	b.Add(key, 0, 1)
	mustCommit(t, e, b)
	wantCounters(t, e, "hot", n+1, n)
}

// RunExpiry checks that a walk over all rows can go on after ErrSnapshotExpired. Engines whose snapshots do not expire
// within so short a time pass it too.
func RunExpiry(t *testing.T, open func(t *testing.T) catalog.Engine) {
	e := open(t)
	ctx := background(t)
	const steady = 1000
	fill := new(catalog.Batch)
	for i := range steady {
		fill.Put(fmt.Appendf(nil, "%04d", i), []byte("steady"))
		if fill.Len() == e.Caps().MaxKeys || i == steady-1 {
			mustCommit(t, e, fill)
			fill.Reset()
		}
	}
	snapshots := 0
	for next, finished := 0, false; !finished; {
		snapshots++
		if snapshots > steady {
			t.Fatal("snapshots expire before they yield a row")
		}
		err := walk(ctx, e, &next)
		switch {
		case err == nil:
			finished = true
		case !errors.Is(err, catalog.ErrSnapshotExpired):
			t.Fatal(err)
		}
		if finished && next != steady {
			t.Errorf("%d rows, want %d", next, steady)
		}
	}
	t.Logf("%d snapshots", snapshots)
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// walk reads the rows from number *next on in one snapshot, and counts it up.
func walk(ctx context.Context, e catalog.Engine, next *int) (err error) {
	snap, err := e.Snapshot(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	for row, err := range snap.Scan(ctx, fmt.Appendf(nil, "%04d", *next), nil, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		if string(row.Key) != fmt.Sprintf("%04d", *next) {
			return fmt.Errorf("row %d is %q", *next, row.Key)
		}
		*next++
	}
	return nil
}
