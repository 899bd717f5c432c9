package catalog

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestAfter(t *testing.T) {
	key := make([]byte, 1, 10)
	key[0] = 'a'
	next := After(key)
	if string(next) != "a\x00" {
		t.Errorf("After(a) = %q", next)
	}
	if next[0] = 'b'; key[0] != 'a' {
		t.Error("After shares memory with its argument")
	}
	if string(After(nil)) != "\x00" {
		t.Errorf("After(nil) = %q", After(nil))
	}
}

func TestPrefixEnd(t *testing.T) {
	for prefix, want := range map[string]string{
		"a": "b", "a\xff": "b", "a\x00": "a\x01", "\x00": "\x01", "a\xff\xff": "b", "a\xfe\xff": "a\xff", "": "", "\xff\xff": "",
	} {
		p := []byte(prefix)
		end := PrefixEnd(p)
		if string(end) != want || (end == nil) != (want == "") || string(p) != prefix {
			t.Errorf("PrefixEnd(%q) = %q, want %q", prefix, end, want)
		}
	}
}

func TestCountersGolden(t *testing.T) {
	for _, c := range []struct {
		fields []int64
		want   string
	}{
		{nil, ""},
		{[]int64{1}, "0100000000000000"},
		{[]int64{-1, 0x0102030405060708}, "ffffffffffffffff0807060504030201"},
		{[]int64{math.MinInt64, math.MaxInt64}, "0000000000000080ffffffffffffff7f"},
	} {
		value := EncodeCounters(c.fields...)
		if hex.EncodeToString(value) != c.want {
			t.Errorf("%d: %x, want %s", c.fields, value, c.want)
		}
		if fields, err := DecodeCounters(value); err != nil || !slices.Equal(fields, c.fields) {
			t.Errorf("%s: %d, %v; want %d", c.want, fields, err, c.fields)
		}
	}
	if c := (Counters{7}); c.Field(0) != 7 || c.Field(1) != 0 || c.Field(MaxFields-1) != 0 {
		t.Error("Field")
	}
}

func FuzzDecodeCounters(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8})
	f.Add(make([]byte, 8*MaxFields+8))
	f.Fuzz(func(t *testing.T, value []byte) {
		fields, err := DecodeCounters(value)
		switch {
		case err == nil && (len(fields) > MaxFields || !bytes.Equal(EncodeCounters(fields...), value)):
			t.Fatalf("%x decoded to %d", value, fields)
		case err != nil && !errors.Is(err, ErrNotCounters):
			t.Fatal(err)
		}
	})
}

func TestAddSaturated(t *testing.T) {
	const lowest, highest = math.MinInt64, math.MaxInt64
	for _, c := range [][3]int64{
		{1, 2, 3}, {-1, 1, 0}, {highest, 0, highest}, {highest, 1, highest}, {1, highest, highest},
		{highest, highest, highest}, {lowest, -1, lowest}, {lowest, lowest, lowest}, {lowest, highest, -1}, {lowest, 0, lowest},
	} {
		if got := AddSaturated(c[0], c[1]); got != c[2] {
			t.Errorf("%d + %d = %d, want %d", c[0], c[1], got, c[2])
		}
	}
}

func TestBatchSize(t *testing.T) {
	b := new(Batch)
	if i := b.GuardAbsent([]byte("12")); i != 0 {
		t.Errorf("the first guard is %d", i)
	}
	b.GuardPresent([]byte("12"))
	b.GuardEqual([]byte("12"), []byte("345"))
	if i := b.GuardRangeEmpty([]byte("12"), []byte("3456")); i != 3 {
		t.Errorf("the fourth guard is %d", i)
	}
	b.Put([]byte("1"), []byte("2345"))
	b.Delete([]byte("123"))
	b.Add([]byte("12"), 0, 1)
	b.Max([]byte("1"), 0, 1)
	if got, want := b.Len(), 8; got != want {
		t.Errorf("Len is %d, want %d", got, want)
	}
	if got, want := b.Bytes(), 2+2+5+6+5+3+2+deltaBytes+1+deltaBytes; got != want {
		t.Errorf("Bytes is %d, want %d", got, want)
	}
}

// TestCheckNames looks for the entry in question in what Check says; that Check refuses is for the engines' suite.
func TestCheckNames(t *testing.T) {
	caps := Caps{MaxBatchBytes: 5000, MaxKeys: 100, MaxValue: 1000}
	for want, build := range map[string]func(*Batch){
		"guard 1: ":          func(b *Batch) { b.GuardAbsent([]byte("a")); b.GuardAbsent(nil) },
		"put 2: ":            func(b *Batch) { b.Put([]byte("a"), nil); b.Put([]byte("b"), nil); b.Put(nil, nil) },
		"delete 0: ":         func(b *Batch) { b.Delete(nil) },
		"delta 0: ":          func(b *Batch) { b.Add([]byte("a"), 64, 1) },
		`"twice"`:            func(b *Batch) { b.Put([]byte("twice"), nil); b.Delete([]byte("twice")) },
		`"large" has 1001 `:  func(b *Batch) { b.Put([]byte("large"), make([]byte, 1001)) },
		"101 entries":        func(b *Batch) { b.Deltas = make([]Delta, 101) },
		"5001 bytes":         func(b *Batch) { b.Put(make([]byte, 1000), make([]byte, 4001)) },
		`"b" to "a"`:         func(b *Batch) { b.GuardRangeEmpty([]byte("b"), []byte("a")) },
		"guard kind 9":       func(b *Batch) { b.Guards = []Guard{{Kind: 9}} },
		"unknown durability": func(b *Batch) { b.Durability = 2 },
	} {
		b := new(Batch)
		build(b)
		if err := b.Check(caps); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Check says %v, want %s in it", err, want)
		}
	}
}

func TestGuardError(t *testing.T) {
	for want, g := range map[string]Guard{
		`guard 3 does not hold: absent "k"`:            {Kind: Absent, Key: []byte("k")},
		`guard 3 does not hold: present "k"`:           {Kind: Present, Key: []byte("k")},
		`guard 3 does not hold: equal "k"`:             {Kind: Equal, Key: []byte("k"), Value: []byte("secret")},
		`guard 3 does not hold: range empty "k" to ""`: {Kind: RangeEmpty, Key: []byte("k")},
	} {
		if got := (&GuardError{Index: 3, Guard: g}).Error(); got != "catalog: "+want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
