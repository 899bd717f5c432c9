package catalogtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

func testScan(t *testing.T, e catalog.Engine) {
	put(t, e, "a", "1", "b", "2", "b\x00", "3", "ba", "4", "c", "", "\xff", "6", "\x00", "0")
	for _, c := range []struct {
		from, to string
		opts     catalog.ScanOptions
		want     string
	}{
		{"", "", catalog.ScanOptions{}, "\x00=0 a=1 b=2 b\x00=3 ba=4 c= \xff=6"},
		{"", "", catalog.ScanOptions{Reverse: true}, "\xff=6 c= ba=4 b\x00=3 b=2 a=1 \x00=0"},
		{"", "", catalog.ScanOptions{KeysOnly: true}, "\x00 a b b\x00 ba c \xff"},
		{"", "", catalog.ScanOptions{KeysOnly: true, Reverse: true, Limit: 3}, "\xff c ba"},
		{"", "", catalog.ScanOptions{Limit: 2}, "\x00=0 a=1"},
		{"", "", catalog.ScanOptions{Limit: 7}, "\x00=0 a=1 b=2 b\x00=3 ba=4 c= \xff=6"},
		{"", "", catalog.ScanOptions{Limit: 8}, "\x00=0 a=1 b=2 b\x00=3 ba=4 c= \xff=6"},
		{"b", "c", catalog.ScanOptions{}, "b=2 b\x00=3 ba=4"},
		{"b", "c", catalog.ScanOptions{Reverse: true, Limit: 2}, "ba=4 b\x00=3"},
		{"b\x00", "ba", catalog.ScanOptions{}, "b\x00=3"},
		{"", "b", catalog.ScanOptions{}, "\x00=0 a=1"},
		{"bb", "", catalog.ScanOptions{}, "c= \xff=6"},
		{"bb", "c", catalog.ScanOptions{}, ""},
		{"c", "c", catalog.ScanOptions{}, ""},
		{"c", "b", catalog.ScanOptions{}, ""},
		{"c", "b", catalog.ScanOptions{Reverse: true}, ""},
		{"\xff\x00", "", catalog.ScanOptions{}, ""},
		{"b", string(catalog.PrefixEnd([]byte("b"))), catalog.ScanOptions{}, "b=2 b\x00=3 ba=4"},
		{"\xff", string(catalog.PrefixEnd([]byte("\xff"))), catalog.ScanOptions{}, "\xff=6"},
	} {
		if got := scan(t, e, c.from, c.to, c.opts); got != c.want {
			t.Errorf("scan %q to %q, %+v: %q, want %q", c.from, c.to, c.opts, got, c.want)
		}
	}
	// An iterator can be used again, and then reads what is there then.
	all := e.Scan(background(t), nil, nil, catalog.ScanOptions{})
	for range 2 {
		var keys []string
		for row, err := range all {
			if err != nil {
				t.Fatal(err)
			}
			keys = append(keys, string(row.Key))
		}
		if want := strings.Split(scan(t, e, "", "", catalog.ScanOptions{KeysOnly: true}), " "); len(keys) != len(want) {
			t.Errorf("scan yielded %q, want %q", keys, want)
		}
		mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete([]byte("c")) }))
	}
}

// testScanResumes reads all rows in pages, in both directions, while rows around the resumption points are deleted.
func testScanResumes(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const rows = 100
	fill := new(catalog.Batch)
	for i := range rows {
		fill.Put(fmt.Appendf(nil, "%03d", i), fmt.Appendf(nil, "value %d", i))
	}
	for page := 1; page <= 33; page += 8 {
		for _, reverse := range []bool{false, true} {
			mustCommit(t, e, fill)
			var from, to []byte
			var seen []string
			for {
				n := 0
				var last []byte
				for row, err := range e.Scan(ctx, from, to, catalog.ScanOptions{Limit: page, Reverse: reverse}) {
					if err != nil {
						t.Fatal(err)
					}
					n++
					last = bytes.Clone(row.Key)
					seen = append(seen, string(row.Key))
				}
				if n < page {
					break
				}
				if reverse {
					to = last
				} else {
					from = catalog.After(last)
				}
				mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete(last) }))
			}
			for i, key := range seen {
				want := i
				if reverse {
					want = rows - 1 - i
				}
				if key != fmt.Sprintf("%03d", want) {
					t.Fatalf("page %d, reverse %v: row %d is %s", page, reverse, i, key)
				}
			}
			if len(seen) != rows {
				t.Errorf("page %d, reverse %v: %d rows, want %d", page, reverse, len(seen), rows)
			}
		}
	}
}

// testScanBody commits, reads and scans inside the loop, and leaves it early.
func testScanBody(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	put(t, e, "a", "1", "b", "2", "c", "3")
	for row, err := range e.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		key := bytes.Clone(row.Key)
		mustCommit(t, e, batch(func(b *catalog.Batch) {
			b.GuardRangeEmpty([]byte("x"), nil)
			b.GuardPresent(key)
			b.Put(key, []byte("seen"))
		}))
		if got, err := e.Get(ctx, key); err != nil || string(got) != "seen" {
			t.Fatalf("get %q in the loop: %q, %v", key, got, err)
		}
		if n := len(strings.Fields(contents(t, e))); n != 3 {
			t.Fatalf("a scan in the loop found %d rows", n)
		}
		if string(key) == "b" {
			break
		}
	}
	wantContents(t, e, "a=seen b=seen c=3")

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n := 0
	var last error
	for _, err := range e.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
		n++
		last = err
		cancel()
	}
	if n != 2 || !errors.Is(last, context.Canceled) {
		t.Errorf("a scan whose context was cancelled in its loop yielded %d times, %v", n, last)
	}
}

// testScanChurn scans while rows come and go. Rows that stay must be seen exactly once, in order, with their value.
func testScanChurn(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const steady = 500
	fill := new(catalog.Batch)
	for i := range steady {
		fill.Put(fmt.Appendf(nil, "%04d", i*2), fmt.Appendf(nil, "steady %04d", i*2))
		if fill.Len() == e.Caps().MaxKeys || i == steady-1 {
			mustCommit(t, e, fill)
			fill.Reset()
		}
	}
	done := make(chan struct{})
	var churn sync.WaitGroup
	for w := range 2 {
		churn.Go(func() { // ends when done is closed
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for {
				select {
				case <-done:
					return
				default:
				}
				b := new(catalog.Batch)
				key := fmt.Appendf(nil, "%04d", rng.IntN(steady)*2+1)
				if rng.IntN(2) == 0 {
					b.Put(key, key)
				} else {
					b.Delete(key)
				}
				if err := commit(ctx, e, b); err != nil {
					t.Errorf("commit: %v", err)
					return
				}
			}
		})
	}
	for round := range 40 {
		opts := catalog.ScanOptions{Reverse: round%2 == 1, KeysOnly: round%4 > 1}
		last, found := "", 0
		for row, err := range e.Scan(ctx, nil, nil, opts) {
			if err != nil {
				t.Fatal(err)
			}
			key := string(row.Key)
			if last != "" && (key <= last) != opts.Reverse {
				t.Fatalf("round %d: %s came after %s", round, key, last)
			}
			last = key
			if (key[3]-'0')%2 == 0 {
				found++
				if !opts.KeysOnly && string(row.Value) != "steady "+key {
					t.Fatalf("round %d: %s has %q", round, key, row.Value)
				}
			}
		}
		if found != steady {
			t.Errorf("round %d: %d of %d steady rows", round, found, steady)
		}
	}
	close(done)
	churn.Wait()
}

func testSnapshot(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	put(t, e, "a", "1", "b", "2")
	mustCommit(t, e, batch(func(b *catalog.Batch) { b.Add([]byte("c"), 0, 1) }))
	old, err := e.Snapshot(ctx)
	if err != nil {
		t.Fatal(err)
	}
	put(t, e, "a", "changed", "d", "new")
	mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete([]byte("b")); b.Add([]byte("c"), 0, 5) }))
	now, err := e.Snapshot(ctx)
	if err != nil {
		t.Fatal(err)
	}
	put(t, e, "e", "later")

	one, six := string(catalog.EncodeCounters(1)), string(catalog.EncodeCounters(6))
	for range 2 {
		wantContents(t, old, "a=1 b=2 c="+one)
		wantContents(t, now, "a=changed c="+six+" d=new")
	}
	wantCounters(t, old, "c", 1)
	if got, err := old.Get(ctx, []byte("d")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("get of a later row: %q, %v", got, err)
	}
	values, err := old.GetMany(ctx, [][]byte{[]byte("b"), []byte("d"), []byte("a")})
	if err != nil || string(values[0]) != "2" || values[1] != nil || string(values[2]) != "1" {
		t.Errorf("get many: %q, %v", values, err)
	}
	if got := scan(t, old, "a", "c", catalog.ScanOptions{Reverse: true, Limit: 1}); got != "b=2" {
		t.Errorf("scan: %q", got)
	}
	if err := old.Close(); err != nil {
		t.Error(err)
	}
	if err := old.Close(); err != nil {
		t.Errorf("closing a snapshot again: %v", err)
	}
	if _, err := old.Get(ctx, []byte("a")); !errors.Is(err, catalog.ErrClosed) {
		t.Errorf("get of a closed snapshot: %v", err)
	}
	wantContents(t, now, "a=changed c="+six+" d=new")
	if err := now.Close(); err != nil {
		t.Error(err)
	}
	wantContents(t, e, "a=changed c="+six+" d=new e=later")
}

// testSnapshotChurn moves one unit between rows all the time; every snapshot must show the whole sum in every way to
// read it, twice.
func testSnapshotChurn(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	const rows, sum = 8, 800
	keys := make([][]byte, rows)
	fill := new(catalog.Batch)
	for i := range keys {
		keys[i] = []byte{'r', byte('0' + i)}
		fill.Put(keys[i], catalog.EncodeCounters(sum/rows))
	}
	mustCommit(t, e, fill)
	done := make(chan struct{})
	var churn sync.WaitGroup
	for w := range 4 {
		churn.Go(func() { // ends when done is closed
			rng := rand.New(rand.NewPCG(uint64(w), 2))
			for {
				select {
				case <-done:
					return
				default:
				}
				b := new(catalog.Batch)
				b.Add(keys[rng.IntN(rows)], 0, -1)
				b.Add(keys[rng.IntN(rows)], 0, 1)
				if err := commit(ctx, e, b); err != nil {
					t.Errorf("commit: %v", err)
					return
				}
			}
		})
	}
	// The longer it lasts, the more versions of these rows there are.
	begin := time.Now()
	for i := 0; i < 10 || i < 50 && time.Since(begin) < 4*raceFor(); i++ {
		snap, err := e.Snapshot(ctx)
		if err != nil {
			t.Fatal(err)
		}
		first := contents(t, snap)
		var single, scanned, many int64
		for _, key := range keys {
			single += counters(t, snap, string(key)).Field(0)
		}
		values, err := snap.GetMany(ctx, keys)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			fields, _ := catalog.DecodeCounters(v)
			many += fields.Field(0)
		}
		for row, err := range snap.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			fields, _ := catalog.DecodeCounters(row.Value)
			scanned += fields.Field(0)
		}
		if single != sum || scanned != sum || many != sum {
			t.Fatalf("sums are %d, %d, %d; want %d", single, scanned, many, sum)
		}
		wantContents(t, snap, first)
		if err := snap.Close(); err != nil {
			t.Error(err)
		}
	}
	close(done)
	churn.Wait()
}
