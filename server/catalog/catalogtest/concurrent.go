package catalogtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

// raceFor is how long each test below looks for a race. It is a time and not a count, so that engines of very different
// speed are tested as hard as they allow.
func raceFor() time.Duration {
	if testing.Short() {
		return 200 * time.Millisecond
	}
	return 500 * time.Millisecond
}

// parallel runs work n times at once, each with its number and a random source of its own, and waits for all. All begin
// at the same moment.
func parallel(t *testing.T, n int, work func(i int, rng *rand.Rand) error) {
	t.Helper()
	var group sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		group.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			<-start
			if err := work(i, rng); err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
		})
	}
	close(start)
	group.Wait()
}

// race runs step in n workers at once, again and again for raceFor but at least ten times each. It returns how many
// steps each worker did.
func race(t *testing.T, n int, step func(worker, i int, rng *rand.Rand) error) []int64 {
	t.Helper()
	steps := make([]int64, n)
	begin := time.Now()
	parallel(t, n, func(w int, rng *rand.Rand) error {
		for i := 0; i < 10 || time.Since(begin) < raceFor(); i++ {
			if err := step(w, i, rng); err != nil {
				return err
			}
			steps[w]++
		}
		return nil
	})
	return steps
}

func sum(numbers []int64) int64 {
	var n int64
	for _, m := range numbers {
		n += m
	}
	return n
}

// update reads key, and commits a batch that is guarded by what it read, until that succeeds.
func update(
	ctx context.Context, e catalog.Engine, d catalog.Durability, keys [][]byte, change func(b *catalog.Batch, old [][]byte),
) error {
	for {
		old, err := e.GetMany(ctx, keys)
		if err != nil {
			return err
		}
		b := &catalog.Batch{Durability: d}
		for i, key := range keys {
			if old[i] == nil {
				b.GuardAbsent(key)
			} else {
				b.GuardEqual(key, old[i])
			}
		}
		change(b, old)
		err = commit(ctx, e, b)
		var guard *catalog.GuardError
		if !errors.As(err, &guard) {
			return err
		}
	}
}

// durability gives every 64th step the stronger class: both are mixed, and the disk does not set the pace.
func durability(step int) catalog.Durability {
	if step%64 == 0 {
		return catalog.Sync
	}
	return catalog.NoSync
}

func testCompareAndSwap(t *testing.T, e catalog.Engine) {
	ctx, key := background(t), []byte("n")
	steps := race(t, 32, func(_, i int, _ *rand.Rand) error {
		return update(ctx, e, durability(i), [][]byte{key}, func(b *catalog.Batch, old [][]byte) {
			fields, _ := catalog.DecodeCounters(old[0])
			b.Put(key, catalog.EncodeCounters(fields.Field(0)+1))
		})
	})
	wantCounters(t, e, "n", sum(steps))
}

func testBank(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const accounts, each = 12, 100
	keys := make([][]byte, accounts)
	fill := new(catalog.Batch)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "account/%d", i)
		fill.Put(keys[i], catalog.EncodeCounters(each))
	}
	mustCommit(t, e, fill)
	race(t, 8, func(_, i int, rng *rand.Rand) error {
		from, to := rng.IntN(accounts), rng.IntN(accounts-1)
		if to >= from {
			to++
		}
		return update(ctx, e, durability(i), [][]byte{keys[from], keys[to]}, func(b *catalog.Batch, old [][]byte) {
			a, _ := catalog.DecodeCounters(old[0])
			z, _ := catalog.DecodeCounters(old[1])
			n := rng.Int64N(a.Field(0) + 1)
			b.Put(keys[from], catalog.EncodeCounters(a.Field(0)-n))
			b.Put(keys[to], catalog.EncodeCounters(z.Field(0)+n))
		})
	})
	var total int64
	for _, key := range keys {
		n := counters(t, e, string(key)).Field(0)
		if n < 0 {
			t.Errorf("%s has %d", key, n)
		}
		total += n
	}
	if total != accounts*each {
		t.Errorf("the accounts have %d, want %d", total, accounts*each)
	}
}

// testRmdir lets creates race against the removal of their directory. Never may both succeed, nor may a child be left
// without its directory.
func testRmdir(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const creators = 3
	removed, kept := 0, 0
	begin := time.Now()
	for round := 0; round < 20 || time.Since(begin) < 2*raceFor(); round++ {
		dir := fmt.Appendf(nil, "dir/%06d", round)
		first := fmt.Appendf(nil, "entry/%06d/", round)
		count := fmt.Appendf(nil, "count/%06d", round)
		mustCommit(t, e, &catalog.Batch{Puts: []catalog.Row{{Key: dir}}, Durability: catalog.NoSync})
		made := make([]bool, creators)
		gone := false
		parallel(t, 1+creators, func(i int, _ *rand.Rand) error {
			b := &catalog.Batch{Durability: durability(round)}
			b.GuardPresent(dir)
			if i == creators {
				b.GuardRangeEmpty(first, catalog.PrefixEnd(first))
				b.Delete(dir)
				return tryCommit(ctx, e, b, &gone)
			}
			child := fmt.Appendf(nil, "%s%d", first, i)
			b.GuardAbsent(child)
			b.Put(child, []byte("inode"))
			b.Add(count, 0, 1)
			return tryCommit(ctx, e, b, &made[i])
		})
		entries := 0
		for _, ok := range made {
			if ok {
				entries++
			}
		}
		if gone && entries > 0 {
			t.Fatalf("round %d: the directory was removed and %d entries made in it", round, entries)
		}
		if !gone && entries != creators {
			t.Fatalf("round %d: the directory stayed but only %d of %d entries could be made", round, entries, creators)
		}
		rows := 0
		for _, err := range e.Scan(ctx, first, catalog.PrefixEnd(first), catalog.ScanOptions{KeysOnly: true}) {
			if err != nil {
				t.Fatal(err)
			}
			rows++
		}
		if rows != entries || counters(t, e, string(count)).Field(0) != int64(entries) {
			t.Fatalf("round %d: %d entries made, %d there", round, entries, rows)
		}
		if gone {
			removed++
		} else {
			kept++
		}
	}
	t.Logf("%d directories removed, %d kept", removed, kept)
}

// tryCommit commits b. A guard that does not hold is no error; applied tells which it was.
func tryCommit(ctx context.Context, e catalog.Engine, b *catalog.Batch, applied *bool) error {
	err := commit(ctx, e, b)
	var guard *catalog.GuardError
	if errors.As(err, &guard) {
		return nil
	}
	*applied = err == nil
	return err
}

// testWriteSkew has rings of two and of three batches that each rely on the absence of what the next one writes: some of
// a ring must succeed, but not all. The conditions are points and ranges, the writes puts and deltas.
func testWriteSkew(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	for name, build := range map[string]func(b *catalog.Batch, mine, other []byte){
		"absent, put": func(b *catalog.Batch, mine, other []byte) { b.GuardAbsent(other); b.Put(mine, nil) },
		"absent, add": func(b *catalog.Batch, mine, other []byte) { b.GuardAbsent(other); b.Add(mine, 0, 1) },
		"range, put": func(b *catalog.Batch, mine, other []byte) {
			b.GuardRangeEmpty(other, catalog.After(other))
			b.Put(mine, nil)
		},
		"range, max": func(b *catalog.Batch, mine, other []byte) {
			b.GuardRangeEmpty(other, catalog.After(other))
			b.Max(mine, 0, 1)
		},
		// The names are short, so that the keys in one range have few bytes in common.
		"p": func(b *catalog.Batch, mine, other []byte) {
			b.GuardRangeEmpty(other, catalog.PrefixEnd(other))
			b.Put(append(mine, "/row"...), nil)
		},
		"a": func(b *catalog.Batch, mine, other []byte) {
			b.GuardRangeEmpty(other, catalog.PrefixEnd(other))
			b.Add(append(mine, "/row"...), 0, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			for round := 0; round < 20 || time.Since(begin) < raceFor(); round++ {
				ring := 2 + round%2
				key := func(i int) []byte { return fmt.Appendf(nil, "%s/%d/%d.", name, round, i%ring) }
				applied := make([]bool, ring)
				parallel(t, ring, func(i int, _ *rand.Rand) error {
					b := &catalog.Batch{Durability: catalog.NoSync}
					build(b, key(i), key(i+1))
					return tryCommit(ctx, e, b, &applied[i])
				})
				if !slices.Contains(applied, true) || !slices.Contains(applied, false) {
					t.Fatalf("round %d: applied %v", round, applied)
				}
			}
		})
	}
}

func testConcurrentDeltas(t *testing.T, e catalog.Engine) {
	ctx, hot := background(t), []byte("hot")
	const workers = 16
	highest := make([]int64, workers)
	steps := race(t, workers, func(w, i int, rng *rand.Rand) error {
		b := &catalog.Batch{Durability: durability(i)}
		now := rng.Int64N(1 << 40)
		highest[w] = max(highest[w], now)
		b.Add(hot, 0, 1)
		b.Max(hot, 1, now)
		b.Add(hot, 2, -int64(w))
		b.Add(fmt.Appendf(nil, "own/%02d", w), 0, 1)
		return commit(ctx, e, b)
	})
	var weighed int64
	for w, n := range steps {
		weighed -= int64(w) * n
		wantCounters(t, e, fmt.Sprintf("own/%02d", w), n)
	}
	wantCounters(t, e, "hot", sum(steps), slices.Max(highest), weighed)
}

// testDeltasAgainstGuards mixes blind deltas with guarded rewrites of the same row. Each rewrite moves everything
// counted so far to another field, so a lost delta or a stale guard shows in the sum.
func testDeltasAgainstGuards(t *testing.T, e catalog.Engine) {
	ctx, key := background(t), []byte("row")
	const workers = 8
	steps := race(t, workers, func(w, i int, _ *rand.Rand) error {
		if w == 0 {
			return update(ctx, e, durability(i), [][]byte{key}, func(b *catalog.Batch, old [][]byte) {
				fields, _ := catalog.DecodeCounters(old[0])
				b.Put(key, catalog.EncodeCounters(0, fields.Field(1)+fields.Field(0)))
			})
		}
		b := &catalog.Batch{Durability: durability(i)}
		b.Add(key, 0, 1)
		return commit(ctx, e, b)
	})
	got := counters(t, e, "row")
	if have, want := got.Field(0)+got.Field(1), sum(steps[1:]); have != want {
		t.Errorf("the deltas sum up to %d, want %d", have, want)
	}
}

// testGuardedDeltas hands out numbers: a batch is guarded by the counter row's value and adds to it. No number may be
// handed out twice.
func testGuardedDeltas(t *testing.T, e catalog.Engine) {
	ctx, key := background(t), []byte("next")
	taken := make([][]int64, 8)
	race(t, len(taken), func(w, i int, _ *rand.Rand) error {
		var number int64
		err := update(ctx, e, durability(i), [][]byte{key}, func(b *catalog.Batch, old [][]byte) {
			fields, _ := catalog.DecodeCounters(old[0])
			number = fields.Field(0)
			b.Add(key, 0, 1)
		})
		taken[w] = append(taken[w], number)
		return err
	})
	all := slices.Sorted(slices.Values(slices.Concat(taken...)))
	for i, n := range all {
		if n != int64(i) {
			t.Fatalf("number %d of %d was handed out twice or never", i, len(all))
		}
	}
	wantCounters(t, e, "next", int64(len(all)))
}

// testOverlapping commits batches over the same few keys, all values equal within one batch, each in another order: in
// every snapshot no mixture may show. It finds deadlocks too.
func testOverlapping(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const keys = 6
	race(t, 8, func(w, i int, rng *rand.Rand) error {
		b := &catalog.Batch{Durability: durability(i)}
		value := fmt.Appendf(nil, "%d/%d", w, i)
		for _, k := range rng.Perm(keys) {
			key := []byte{'k', byte('a' + k)}
			switch k % 3 {
			case 0:
				b.Put(key, value)
			case 1:
				b.Delete(key)
				b.Put(append(key, '2'), value)
			default:
				b.GuardRangeEmpty(append(slices.Clone(key), '3'), append(slices.Clone(key), '4'))
				b.Put(key, value)
			}
		}
		if err := commit(ctx, e, b); err != nil {
			return err
		}
		snap, err := e.Snapshot(ctx)
		if err != nil {
			return err
		}
		seen := ""
		for row, err := range snap.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
			if err == nil && seen != "" && string(row.Value) != seen {
				err = fmt.Errorf("%s next to %s", row.Value, seen)
			}
			if err != nil {
				return errors.Join(err, snap.Close())
			}
			seen = string(row.Value)
		}
		return snap.Close()
	})
}
