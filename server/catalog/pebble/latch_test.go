package pebble

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/weftfs/weft/server/catalog"
)

// hold acquires l in a goroutine of its own and tells when it has it.
func hold(ctx context.Context, l *latch, m mode) <-chan error {
	held := make(chan error, 1)
	go func() { held <- l.acquire(ctx, m) }() // ends when the latch is held or ctx ends
	synctest.Wait()
	return held
}

func isHeld(held <-chan error) bool {
	synctest.Wait()
	return len(held) == 1
}

func TestLatchModes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		for _, first := range []mode{shared, delta, exclusive} {
			for _, second := range []mode{shared, delta, exclusive} {
				var l latch
				if err := l.acquire(ctx, first); err != nil {
					t.Fatal(err)
				}
				held := hold(ctx, &l, second)
				if want := first == second && first != exclusive; isHeld(held) != want {
					t.Errorf("mode %d joins mode %d: %v, want %v", second, first, !want, want)
				}
				l.release()
				if !isHeld(held) {
					t.Errorf("mode %d does not get the latch after mode %d", second, first)
				}
				l.release()
				if l.holders != 0 || len(l.queue) != 0 {
					t.Errorf("%+v is left", &l)
				}
			}
		}
	})
}

// TestLatchOrder checks that newcomers do not overtake the one whose turn it is, and that all of one mode get in together.
func TestLatchOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		var l latch
		if err := l.acquire(ctx, shared); err != nil {
			t.Fatal(err)
		}
		writer := hold(ctx, &l, exclusive)
		adders := []<-chan error{hold(ctx, &l, delta), hold(ctx, &l, delta)}
		reader := hold(ctx, &l, shared) // could join the holder, but the writer came first
		adders = append(adders, hold(ctx, &l, delta))
		if isHeld(writer) || isHeld(reader) {
			t.Fatal("somebody overtook")
		}
		l.release()
		if !isHeld(writer) || isHeld(adders[0]) || isHeld(reader) {
			t.Fatal("it is the writer's turn, alone")
		}
		l.release()
		if !isHeld(adders[0]) || !isHeld(adders[1]) || !isHeld(adders[2]) || isHeld(reader) {
			t.Fatal("it is the adders' turn, all of them")
		}
		l.release()
		l.release()
		if isHeld(reader) {
			t.Fatal("one adder still holds the latch")
		}
		l.release()
		if !isHeld(reader) {
			t.Fatal("it is the reader's turn")
		}
	})
}

// TestLatchCancel gives up waiting: the place in the queue goes to whoever it kept out.
func TestLatchCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var l latch
		if err := l.acquire(t.Context(), shared); err != nil {
			t.Fatal(err)
		}
		writer := hold(ctx, &l, exclusive)
		reader := hold(t.Context(), &l, shared)
		if isHeld(reader) {
			t.Fatal("the reader overtook the writer")
		}
		cancel()
		if err := <-writer; !errors.Is(err, context.Canceled) {
			t.Fatalf("the writer got %v", err)
		}
		if !isHeld(reader) {
			t.Fatal("the reader still waits for the writer that gave up")
		}
		l.release()
		l.release()
		if l.holders != 0 || len(l.queue) != 0 {
			t.Errorf("%+v is left", &l)
		}
	})
}

func TestClaims(t *testing.T) {
	table := &latchTable{seed: maphash.MakeSeed()}
	a, z := []byte("a"), []byte("z")
	b := new(catalog.Batch)
	b.GuardPresent(a)
	b.GuardEqual(a, nil)
	b.GuardAbsent([]byte("put"))
	b.Put([]byte("put"), nil)
	b.Delete([]byte("deleted"))
	b.GuardPresent([]byte("guarded and added"))
	b.Add([]byte("guarded and added"), 0, 1)
	b.Add(z, 0, 1)
	b.Max(z, 0, 1)
	b.Add([]byte("folded"), 0, 1)
	b.GuardRangeEmpty([]byte("m"), []byte("n"))
	want := map[string]mode{
		"a": shared, "put": exclusive, "deleted": exclusive, "guarded and added": exclusive, "z": delta, "folded": exclusive,
	}
	var c commit
	c.plan(b)
	for i := range c.groups {
		c.groups[i].fold = string(c.groups[i].key()) == "folded"
	}
	claims := table.claims(nil, b, c.groups)
	if !slices.IsSortedFunc(claims, func(a, b claim) int { return int(a.stripe) - int(b.stripe) }) {
		t.Errorf("%v is not in ascending order", claims)
	}
	for key, m := range want {
		stripe := table.claim([]byte(key), m).stripe
		got := slices.DeleteFunc(slices.Clone(claims), func(c claim) bool { return c.stripe != stripe })
		if len(got) != 1 {
			t.Errorf("%s: claims %v", key, got)
		} else if got[0].mode != m && got[0].mode != exclusive { // exclusive if two keys met in one stripe
			t.Errorf("%s is claimed in mode %d, want %d", key, got[0].mode, m)
		}
	}
	if len(claims) > len(want) {
		t.Errorf("%d claims for %d keys", len(claims), len(want))
	}
}

func TestPlan(t *testing.T) {
	b := new(catalog.Batch)
	for _, key := range []string{"a", "a", "b", "a", "put", "deleted", "c"} {
		b.Add([]byte(key), 0, 1)
	}
	b.Put([]byte("put"), nil)
	b.Delete([]byte("deleted"))
	folds := map[string]int{}
	for range 200 * foldEvery {
		var c commit
		c.plan(b)
		var got string
		for _, g := range c.groups {
			got += fmt.Sprintf("%s%d ", g.key(), len(g.deltas))
			if g.fold {
				folds[string(g.key())]++
			}
		}
		if got != "a2 b1 a1 put1 deleted1 c1 " {
			t.Fatalf("groups %s", got)
		}
	}
	if folds["a"]+folds["put"]+folds["deleted"] > 0 {
		t.Errorf("folded a row that the batch changes elsewhere too: %v", folds)
	}
	for _, key := range []string{"b", "c"} {
		if n := folds[key]; n < 100 || n > 400 {
			t.Errorf("%s was folded %d times of %d", key, n, 200*foldEvery)
		}
	}
}

func TestRangeTable(t *testing.T) {
	guard := func(from, to string) *catalog.Batch {
		b := new(catalog.Batch)
		b.GuardRangeEmpty([]byte(from), []byte(to))
		return b
	}
	put := &catalog.Batch{Puts: []catalog.Row{{Key: []byte("d/1")}}}
	remove := &catalog.Batch{Deletes: [][]byte{[]byte("d/1")}}
	add := &catalog.Batch{Deltas: []catalog.Delta{{Key: []byte("d/1")}}}
	both := guard("d/", "d0")
	both.Puts = put.Puts
	for _, c := range []struct {
		name          string
		first, second *catalog.Batch
		waits         bool
	}{
		{"put inside", guard("d/", "d0"), put, true},
		{"delete inside", guard("d/", "d0"), remove, true},
		{"delta inside", guard("d/", "d0"), add, true},
		{"put at the start", guard("d/1", "d0"), put, true},
		{"put at the end", guard("d/", "d/1"), put, false},
		{"put before", guard("d/2", ""), put, false},
		{"no end", guard("d/", ""), put, true},
		{"no start", guard("", "e"), put, true},
		{"two guards", guard("d/", "d0"), guard("d/", "d0"), false},
		{"two puts", put, put, false},
		{"both do both", both, both, true},
	} {
		for _, swap := range []bool{false, true} {
			first, second := c.first, c.second
			if swap {
				first, second = second, first
			}
			synctest.Test(t, func(t *testing.T) {
				var table rangeTable
				var e1, e2, e3 rangeEntry
				if err := table.acquire(t.Context(), &e1, first); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				canceled := make(chan error, 1)
				go func() { canceled <- table.acquire(ctx, &e3, second) }() // ends when ctx is cancelled, or at once
				synctest.Wait()
				cancel()
				if err := <-canceled; err == nil {
					table.release(&e3)
				} else if !c.waits || !errors.Is(err, context.Canceled) {
					t.Errorf("%s, swapped %v: %v", c.name, swap, err)
				}
				held := make(chan error, 1)
				go func() { held <- table.acquire(t.Context(), &e2, second) }() // ends when e1 is released
				if isHeld(held) == c.waits {
					t.Errorf("%s, swapped %v: waits %v, want %v", c.name, swap, !c.waits, c.waits)
				}
				table.release(&e1)
				if !isHeld(held) {
					t.Errorf("%s, swapped %v: still waits", c.name, swap)
				}
				table.release(&e2)
				if len(table.entries) != 0 || table.ranged != 0 {
					t.Errorf("%s: %+v is left", c.name, table.entries)
				}
			})
		}
	}
}
