package catalogtest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"testing"

	"github.com/weftfs/weft/server/catalog"
)

func testGet(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	binary := "\x00\xff\x00 binary"
	put(t, e, "a", "1", "empty", "", binary, binary)
	for key, want := range map[string]string{"a": "1", "empty": "", binary: binary} {
		got, err := e.Get(ctx, []byte(key))
		if err != nil || got == nil || string(got) != want {
			t.Errorf("get %q: %q, %v; want %q", key, got, err, want)
		}
	}
	for _, key := range []string{"", "b", "a\x00", binary[:1]} {
		if got, err := e.Get(ctx, []byte(key)); !errors.Is(err, catalog.ErrNotFound) {
			t.Errorf("get %q: %q, %v; want ErrNotFound", key, got, err)
		}
	}
	put(t, e, "a", "2")
	mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete([]byte("empty")); b.Delete([]byte("never was")) }))
	if got, err := e.Get(ctx, []byte("a")); err != nil || string(got) != "2" {
		t.Errorf("get after a second put: %q, %v", got, err)
	}
	if got, err := e.Get(ctx, []byte("empty")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("get after delete: %q, %v", got, err)
	}
}

func testGetMany(t *testing.T, e catalog.Engine) {
	put(t, e, "a", "1", "b", "", "c", "3")
	keys := [][]byte{[]byte("c"), []byte("x"), []byte("a"), []byte("c"), []byte("b"), []byte("")}
	got, err := e.GetMany(background(t), keys)
	if err != nil {
		t.Fatal(err)
	}
	want := [][]byte{[]byte("3"), nil, []byte("1"), []byte("3"), {}, nil}
	if len(got) != len(want) {
		t.Fatalf("got %d values, want %d", len(got), len(want))
	}
	for i := range want {
		if !bytes.Equal(got[i], want[i]) || (got[i] == nil) != (want[i] == nil) {
			t.Errorf("value %d is %#v, want %#v", i, got[i], want[i])
		}
	}
	if got, err := e.GetMany(background(t), nil); err != nil || len(got) != 0 {
		t.Errorf("no keys: %q, %v", got, err)
	}
}

// guardCases are guards on the rows a=1 c=3 empty=.
var guardCases = []struct {
	name  string
	guard func(*catalog.Batch) int
	holds bool
}{
	{"absent key is absent", func(b *catalog.Batch) int { return b.GuardAbsent([]byte("b")) }, true},
	{"present key is absent", func(b *catalog.Batch) int { return b.GuardAbsent([]byte("a")) }, false},
	{"row with an empty value is absent", func(b *catalog.Batch) int { return b.GuardAbsent([]byte("empty")) }, false},
	{"present key is present", func(b *catalog.Batch) int { return b.GuardPresent([]byte("a")) }, true},
	{"row with an empty value is present", func(b *catalog.Batch) int { return b.GuardPresent([]byte("empty")) }, true},
	{"absent key is present", func(b *catalog.Batch) int { return b.GuardPresent([]byte("b")) }, false},
	{"prefix of a key is present", func(b *catalog.Batch) int { return b.GuardPresent([]byte("empt")) }, false},
	{"equal value", func(b *catalog.Batch) int { return b.GuardEqual([]byte("a"), []byte("1")) }, true},
	{"equal empty value", func(b *catalog.Batch) int { return b.GuardEqual([]byte("empty"), nil) }, true},
	{"other value", func(b *catalog.Batch) int { return b.GuardEqual([]byte("a"), []byte("2")) }, false},
	{"longer value", func(b *catalog.Batch) int { return b.GuardEqual([]byte("a"), []byte("1\x00")) }, false},
	{"value of an absent key", func(b *catalog.Batch) int { return b.GuardEqual([]byte("b"), nil) }, false},
	{"empty range", func(b *catalog.Batch) int { return b.GuardRangeEmpty([]byte("a\x00"), []byte("c")) }, true},
	{"range ends before a row", func(b *catalog.Batch) int { return b.GuardRangeEmpty([]byte("b"), []byte("c")) }, true},
	{"range begins at a row", func(b *catalog.Batch) int { return b.GuardRangeEmpty([]byte("a"), []byte("b")) }, false},
	{"row in the middle", func(b *catalog.Batch) int { return b.GuardRangeEmpty([]byte("b"), []byte("d")) }, false},
	{"empty start of all keys", func(b *catalog.Batch) int { return b.GuardRangeEmpty(nil, []byte("a")) }, true},
	{"start of all keys", func(b *catalog.Batch) int { return b.GuardRangeEmpty(nil, []byte("b")) }, false},
	{"empty end of all keys", func(b *catalog.Batch) int { return b.GuardRangeEmpty([]byte("f"), nil) }, true},
	{"end of all keys", func(b *catalog.Batch) int { return b.GuardRangeEmpty([]byte("e"), nil) }, false},
	{"all keys", func(b *catalog.Batch) int { return b.GuardRangeEmpty(nil, nil) }, false},
}

const guardRows = "a=1 c=3 empty="

func testGuards(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	put(t, e, "a", "1", "c", "3", "empty", "")
	for _, c := range guardCases {
		for _, durability := range []catalog.Durability{catalog.Sync, catalog.NoSync} {
			b := &catalog.Batch{Durability: durability}
			c.guard(b)
			b.Put([]byte("zz"), []byte("written"))
			err := commit(ctx, e, b)
			if c.holds {
				if err != nil {
					t.Errorf("%s: %v", c.name, err)
				}
				wantContents(t, e, guardRows+" zz=written")
				mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete([]byte("zz")) }))
				continue
			}
			wantGuard(t, err, 0)
			wantContents(t, e, guardRows)
		}
		// A batch of guards alone answers the same question.
		b := new(catalog.Batch)
		c.guard(b)
		if err := commit(ctx, e, b); (err == nil) != c.holds {
			t.Errorf("%s, alone: %v", c.name, err)
		}
	}
}

func testFirstGuard(t *testing.T, e catalog.Engine) {
	put(t, e, "a", "1")
	b := new(catalog.Batch)
	b.GuardPresent([]byte("a"))
	b.GuardEqual([]byte("a"), []byte("1"))
	want := b.GuardAbsent([]byte("a"))
	b.GuardRangeEmpty([]byte("a"), []byte("b"))
	b.GuardPresent([]byte("b"))
	err := commit(background(t), e, b)
	wantGuard(t, err, want)
	var guard *catalog.GuardError
	if errors.As(err, &guard); guard.Guard.Kind != catalog.Absent || string(guard.Guard.Key) != "a" {
		t.Errorf("the guard is %v", guard.Guard)
	}
}

func testNothingApplied(t *testing.T, e catalog.Engine) {
	put(t, e, "a", "1", "b", "2")
	b := new(catalog.Batch)
	b.GuardPresent([]byte("absent"))
	b.Put([]byte("a"), []byte("changed"))
	b.Put([]byte("new"), []byte("row"))
	b.Delete([]byte("b"))
	b.Add([]byte("counter"), 0, 1)
	wantGuard(t, commit(background(t), e, b), 0)
	wantContents(t, e, "a=1 b=2")
}

func testGuardsSeeStateBefore(t *testing.T, e catalog.Engine) {
	b := new(catalog.Batch)
	b.GuardAbsent([]byte("a"))
	b.GuardRangeEmpty([]byte("a"), []byte("c"))
	b.Put([]byte("a"), []byte("1"))
	b.Put([]byte("b"), []byte("2"))
	mustCommit(t, e, b)
	wantContents(t, e, "a=1 b=2")
	wantGuard(t, commit(background(t), e, b), 0)

	b = new(catalog.Batch)
	b.GuardEqual([]byte("a"), []byte("1"))
	b.GuardPresent([]byte("b"))
	b.Put([]byte("a"), []byte("3"))
	b.Delete([]byte("b"))
	mustCommit(t, e, b)
	wantContents(t, e, "a=3")
}

func testOrderInBatch(t *testing.T, e catalog.Engine) {
	row, key := catalog.EncodeCounters(100, 7), []byte("c")
	for _, c := range []struct {
		name  string
		build func(*catalog.Batch)
		want  []int64
	}{
		{"put, add", func(b *catalog.Batch) { b.Put(key, row); b.Add(key, 0, 1) }, []int64{101, 7}},
		{"add, put", func(b *catalog.Batch) { b.Add(key, 0, 1); b.Put(key, row) }, []int64{101, 7}},
		{"delete, add", func(b *catalog.Batch) { b.Delete(key); b.Add(key, 1, 5) }, []int64{0, 5}},
		{"add, delete", func(b *catalog.Batch) { b.Add(key, 1, 5); b.Delete(key) }, []int64{0, 5}},
		{"add, max", func(b *catalog.Batch) { b.Add(key, 0, 5); b.Max(key, 0, 10) }, []int64{50 + 5}},
		{"max, add", func(b *catalog.Batch) { b.Max(key, 0, 60); b.Add(key, 0, 5) }, []int64{60 + 5}},
		{"max, add, max", func(b *catalog.Batch) { b.Max(key, 0, 60); b.Add(key, 0, -20); b.Max(key, 0, 45) }, []int64{45}},
		{"apart", func(b *catalog.Batch) {
			b.Max(key, 0, 60)
			b.Add([]byte("other"), 0, 1)
			b.Add(key, 0, 5)
		}, []int64{60 + 5}},
	} {
		mustCommit(t, e, batch(func(b *catalog.Batch) { b.Put(key, catalog.EncodeCounters(50)) }))
		mustCommit(t, e, batch(c.build))
		t.Log(c.name)
		wantCounters(t, e, "c", c.want...)
	}
}

func testInvalid(t *testing.T, e catalog.Engine) {
	a, long := []byte("a"), bytes.Repeat([]byte("k"), catalog.MaxKey+1)
	put(t, e, "a", "1")
	for name, build := range map[string]func(*catalog.Batch){
		"two puts":          func(b *catalog.Batch) { b.Put(a, nil); b.Put([]byte("a"), nil) },
		"put and delete":    func(b *catalog.Batch) { b.Put(a, nil); b.Delete([]byte("a")) },
		"two deletes":       func(b *catalog.Batch) { b.Delete(a); b.Delete([]byte("a")) },
		"empty key put":     func(b *catalog.Batch) { b.Put(nil, a) },
		"empty key deleted": func(b *catalog.Batch) { b.Delete(nil) },
		"empty key guarded": func(b *catalog.Batch) { b.GuardAbsent(nil) },
		"empty key added":   func(b *catalog.Batch) { b.Add(nil, 0, 1) },
		"long key put":      func(b *catalog.Batch) { b.Put(long, a) },
		"long key guarded":  func(b *catalog.Batch) { b.GuardEqual(long, a) },
		"field below":       func(b *catalog.Batch) { b.Add(a, -1, 1) },
		"field above":       func(b *catalog.Batch) { b.Max(a, catalog.MaxFields, 1) },
		"range backwards":   func(b *catalog.Batch) { b.GuardRangeEmpty([]byte("b"), a) },
		"range of no keys":  func(b *catalog.Batch) { b.GuardRangeEmpty(a, a) },
		"guard kind":        func(b *catalog.Batch) { b.Guards = append(b.Guards, catalog.Guard{Key: a}) },
		"delta operation":   func(b *catalog.Batch) { b.Deltas = append(b.Deltas, catalog.Delta{Key: a}) },
		"durability":        func(b *catalog.Batch) { b.Durability = 99 },
		"many puts": func(b *catalog.Batch) {
			for i := range 100 {
				b.Put([]byte{1, byte(i)}, nil)
			}
			b.Delete([]byte{1, 42})
		},
	} {
		b := batch(build)
		b.Put([]byte("z"), []byte("must not be written"))
		if err := commit(background(t), e, b); !errors.Is(err, catalog.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	wantContents(t, e, "a=1")
}

func testLimits(t *testing.T, e catalog.Engine) {
	ctx, caps := background(t), e.Caps()
	if caps.MaxKeys < 100 || caps.MaxValue < 64<<10 || caps.MaxBatchBytes < caps.MaxValue {
		t.Fatalf("%+v is less than the metadata service needs for one operation", caps)
	}
	longest := bytes.Repeat([]byte("k"), catalog.MaxKey)
	value := bytes.Repeat([]byte("v"), caps.MaxValue)
	if caps.MaxBatchBytes >= len(longest)+len(value) {
		mustCommit(t, e, batch(func(b *catalog.Batch) { b.Put(longest, value) }))
		if got, err := e.Get(ctx, longest); err != nil || !bytes.Equal(got, value) {
			t.Errorf("the longest row came back as %d bytes, %v", len(got), err)
		}
		mustCommit(t, e, batch(func(b *catalog.Batch) { b.GuardRangeEmpty(catalog.After(longest), nil); b.Delete(longest) }))
	}
	for name, b := range map[string]*catalog.Batch{
		"value": batch(func(b *catalog.Batch) { b.Put([]byte("a"), append(value, 'v')) }),
		"guard": batch(func(b *catalog.Batch) { b.GuardEqual([]byte("a"), append(value, 'v')) }),
		"keys": batch(func(b *catalog.Batch) {
			for i := range caps.MaxKeys + 1 {
				b.Delete([]byte{byte(i >> 16), byte(i >> 8), byte(i)})
			}
		}),
		"bytes": batch(func(b *catalog.Batch) {
			for i := 0; b.Bytes() <= caps.MaxBatchBytes; i++ {
				b.Put([]byte{1, byte(i >> 8), byte(i)}, value)
			}
		}),
	} {
		if err := commit(ctx, e, b); !errors.Is(err, catalog.ErrTooLarge) {
			t.Errorf("%s: got %v, want ErrTooLarge", name, err)
		}
	}
	wantContents(t, e, "")

	full := new(catalog.Batch)
	for i := range caps.MaxKeys {
		full.Put([]byte{1, byte(i >> 16), byte(i >> 8), byte(i)}, nil)
	}
	mustCommit(t, e, full)
	n := 0
	for _, err := range e.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != caps.MaxKeys {
		t.Errorf("a batch of %d rows left %d", caps.MaxKeys, n)
	}
}

// testBuffers changes every slice after it was handed over or returned.
func testBuffers(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	key, value := []byte("key"), []byte("value")
	b := new(catalog.Batch)
	b.Put(key, value)
	b.Add([]byte("counter"), 0, 1)
	mustCommit(t, e, b)
	copy(key, "xxx")
	copy(value, "xxxxx")
	b.Reset()
	if b.Len() != 0 || b.Bytes() != 0 {
		t.Errorf("Reset left %d entries, %d bytes", b.Len(), b.Bytes())
	}
	got, err := e.Get(ctx, []byte("key"))
	if err != nil || string(got) != "value" {
		t.Fatalf("get: %q, %v", got, err)
	}
	copy(got, "yyyyy")
	many, err := e.GetMany(ctx, [][]byte{[]byte("key")})
	if err != nil || string(many[0]) != "value" {
		t.Fatalf("get many: %q, %v", many, err)
	}
	copy(many[0], "zzzzz")
	if got, err := e.Get(ctx, []byte("key")); err != nil || string(got) != "value" {
		t.Fatalf("get: %q, %v", got, err)
	}
	wantCounters(t, e, "counter", 1)
}

func testEmptyBatch(t *testing.T, e catalog.Engine) {
	lazy := batch(func(b *catalog.Batch) { b.Put([]byte("a"), []byte("1")) })
	lazy.Durability = catalog.NoSync
	mustCommit(t, e, lazy)
	mustCommit(t, e, new(catalog.Batch))
	mustCommit(t, e, &catalog.Batch{Durability: catalog.NoSync})
	wantContents(t, e, "a=1")
}

func testCounters(t *testing.T, e catalog.Engine) {
	key := []byte("c")
	for _, c := range []struct {
		name  string
		build func(*catalog.Batch)
		want  []int64
	}{
		{"an absent row counts as zeros", func(b *catalog.Batch) { b.Add(key, 2, 5) }, []int64{0, 0, 5}},
		{"fields are apart", func(b *catalog.Batch) { b.Add(key, 0, -3) }, []int64{-3, 0, 5}},
		{"max raises", func(b *catalog.Batch) { b.Max(key, 1, 10) }, []int64{-3, 10, 5}},
		{"max never lowers", func(b *catalog.Batch) { b.Max(key, 1, 9) }, []int64{-3, 10, 5}},
		{"several at once", func(b *catalog.Batch) { b.Add(key, 0, 1); b.Max(key, 1, 11); b.Add(key, 2, 1) }, []int64{-2, 11, 6}},
		{"zero makes the row longer", func(b *catalog.Batch) { b.Add(key, 3, 0) }, []int64{-2, 11, 6, 0}},
		{"put sets the row", func(b *catalog.Batch) { b.Put(key, catalog.EncodeCounters(1, 2)) }, []int64{1, 2}},
		{"on top of a put", func(b *catalog.Batch) { b.Add(key, 1, 40); b.Max(key, 2, -1) }, []int64{1, 42, 0}},
		{"put of an empty row", func(b *catalog.Batch) { b.Put(key, nil) }, []int64{}},
		{"max of zeros", func(b *catalog.Batch) { b.Max(key, 0, -5) }, []int64{0}},
		{"to the top", func(b *catalog.Batch) { b.Add(key, 0, math.MaxInt64) }, []int64{math.MaxInt64}},
		{"not beyond", func(b *catalog.Batch) { b.Add(key, 0, 1) }, []int64{math.MaxInt64}},
		{"max with the least", func(b *catalog.Batch) { b.Max(key, 0, math.MinInt64) }, []int64{math.MaxInt64}},
		{"to the bottom", func(b *catalog.Batch) { b.Put(key, nil); b.Add(key, 0, math.MinInt64) }, []int64{math.MinInt64}},
		{"nor below", func(b *catalog.Batch) { b.Add(key, 0, -1) }, []int64{math.MinInt64}},
		{"last field", func(b *catalog.Batch) { b.Delete(key); b.Add(key, catalog.MaxFields-1, 1) },
			append(make([]int64, catalog.MaxFields-1), 1)},
	} {
		mustCommit(t, e, batch(c.build))
		t.Log(c.name)
		wantCounters(t, e, "c", c.want...)
		mustCommit(t, e, batch(func(b *catalog.Batch) { // what guards see is what Get returns
			b.GuardPresent(key)
			b.GuardEqual(key, catalog.EncodeCounters(c.want...))
		}))
	}
	mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete(key) }))
	wantContents(t, e, "")
	mustCommit(t, e, batch(func(b *catalog.Batch) { b.GuardAbsent(key); b.Add(key, 0, 0) }))
	wantCounters(t, e, "c", 0)
}

// testCountersMisused allows both answers that package catalog does.
func testCountersMisused(t *testing.T, e catalog.Engine) {
	ctx, key := background(t), []byte("name")
	for _, value := range []string{"seven b", string(make([]byte, 8*(catalog.MaxFields+1)))} {
		put(t, e, "name", value, "other", "1")
		err := commit(ctx, e, batch(func(b *catalog.Batch) { b.Add(key, 0, 1); b.Put([]byte("other"), []byte("2")) }))
		if err == nil {
			for range 2 {
				if got, err := e.Get(ctx, key); !errors.Is(err, catalog.ErrNotCounters) {
					t.Errorf("get: %q, %v; want ErrNotCounters", got, err)
				}
				err := commit(ctx, e, batch(func(b *catalog.Batch) { b.Max(key, 1, 1) }))
				if err != nil && !errors.Is(err, catalog.ErrNotCounters) {
					t.Error(err)
				}
			}
			mustCommit(t, e, batch(func(b *catalog.Batch) { b.GuardEqual([]byte("other"), []byte("2")); b.GuardPresent(key) }))
		} else {
			if !errors.Is(err, catalog.ErrNotCounters) {
				t.Errorf("commit: %v, want ErrNotCounters", err)
			}
			wantContents(t, e, "name="+value+" other=1")
		}
		mustCommit(t, e, batch(func(b *catalog.Batch) { b.Delete(key); b.Add(key, 0, 1) }))
		wantCounters(t, e, "name", 1)
	}
}

func testContext(t *testing.T, e catalog.Engine) {
	put(t, e, "a", "1")
	snap, err := e.Snapshot(background(t))
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	ctx, cancel := context.WithCancelCause(background(t))
	cancel(errors.New("not this one"))
	check := func(name string, err error) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want context.Canceled", name, err)
		}
	}
	check("commit", e.Commit(ctx, batch(func(b *catalog.Batch) { b.Put([]byte("b"), nil) })))
	_, err = e.Snapshot(ctx)
	check("snapshot", err)
	for name, r := range map[string]catalog.Reader{"engine": e, "snapshot": snap} {
		_, err = r.Get(ctx, []byte("a"))
		check(name+" get", err)
		_, err = r.GetMany(ctx, [][]byte{[]byte("a")})
		check(name+" get many", err)
		for _, err = range r.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
			check(name+" scan", err)
		}
	}
	wantContents(t, e, "a=1")
}
