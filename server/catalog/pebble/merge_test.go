package pebble

import (
	"encoding/hex"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	cpebble "github.com/cockroachdb/pebble/v2"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/fold"
)

func TestChangeGolden(t *testing.T) {
	for _, c := range []struct {
		deltas []catalog.Delta
		want   string // form, then for each field: number and flags, addend, floor
	}{
		{nil, "01"},
		{[]catalog.Delta{{Op: catalog.OpAdd, Field: 0, N: 1}}, "01 40 02"},
		{[]catalog.Delta{{Op: catalog.OpAdd, Field: 63, N: -1}}, "01 7f 01"},
		{[]catalog.Delta{{Op: catalog.OpMax, Field: 2, N: 64}}, "01 82 8001"},
		{[]catalog.Delta{{Op: catalog.OpAdd, Field: 5, N: 0}}, "01 05"},
		{[]catalog.Delta{{Op: catalog.OpMax, Field: 1, N: 10}, {Op: catalog.OpAdd, Field: 1, N: 3}}, "01 c1 06 1a"},
		{[]catalog.Delta{{Op: catalog.OpAdd, Field: 1, N: 3}, {Op: catalog.OpMax, Field: 1, N: 10}}, "01 c1 06 14"},
		{[]catalog.Delta{{Op: catalog.OpAdd, Field: 4, N: 1}, {Op: catalog.OpAdd, Field: 3, N: 2}}, "01 43 04 44 02"},
	} {
		var ch fold.Change
		for _, d := range c.deltas {
			ch = ch.AddDelta(&d)
		}
		want, err := hex.DecodeString(string(slices.DeleteFunc([]byte(c.want), func(b byte) bool { return b == ' ' })))
		if err != nil {
			t.Fatal(err)
		}
		operand := appendChange(nil, ch)
		if !slices.Equal(operand, want) {
			t.Errorf("%v: %x, want %s", c.deltas, operand, c.want)
		}
		if back, ok := decodeChange(operand); !ok || !slices.Equal(back, ch) {
			t.Errorf("%v: decoded %v, %v", c.deltas, back, ok)
		}
	}
}

func TestDecodeChangeRefuses(t *testing.T) {
	for name, operand := range map[string]string{
		"no addend":           "0140",
		"no floor":            "0181",
		"addend, no floor":    "01c002",
		"unfinished addend":   "014080",
		"eleven-byte addend":  "0140ffffffffffffffffffff01",
		"field twice":         "0140024002",
		"fields out of order": "0141024002",
	} {
		b, err := hex.DecodeString(operand)
		if err != nil {
			t.Fatal(err)
		}
		if c, ok := decodeChange(b); ok {
			t.Errorf("%s: decoded as %v", name, c)
		}
	}
}

// mergeAll merges stored values, oldest first, in a random grouping and order of calls as Pebble may.
func mergeAll(t testing.TB, rng *rand.Rand, operands [][]byte, includesBase bool) []byte {
	for len(operands) > 1 {
		first := rng.IntN(len(operands) - 1)
		end := first + 2 + rng.IntN(len(operands)-first-1)
		part := operands[first:end]
		bottom := includesBase && first == 0
		merged := mergeOnce(t, part, rng.IntN(2) == 0, bottom)
		operands = slices.Concat(operands[:first], [][]byte{merged}, operands[end:])
	}
	return mergeOnce(t, operands, true, includesBase)
}

// mergeOnce merges operands, oldest first, taking them in from the oldest or from the newest.
func mergeOnce(t testing.TB, operands [][]byte, fromOldest, includesBase bool) []byte {
	operands = slices.Clone(operands)
	take := cpebble.ValueMerger.MergeNewer
	if !fromOldest {
		slices.Reverse(operands)
		take = cpebble.ValueMerger.MergeOlder
	}
	m, err := counterMerger.Merge([]byte("key"), operands[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range operands[1:] {
		if err := take(m, o); err != nil {
			t.Fatal(err)
		}
	}
	stored, closer, err := m.Finish(includesBase)
	if err != nil || closer != nil {
		t.Fatalf("finish: %v, %v", closer, err)
	}
	return stored
}

// TestMergeAssociative compares merging in any grouping with applying the deltas one by one.
func TestMergeAssociative(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var want catalog.Counters
		var operands [][]byte
		if rng.IntN(2) == 0 {
			for range rng.IntN(4) {
				want = append(want, rng.Int64N(100)-50)
			}
			operands = append(operands, append([]byte{formRow}, catalog.EncodeCounters(want...)...))
		}
		for range 1 + rng.IntN(8) {
			var c fold.Change
			for range 1 + rng.IntN(4) {
				d := catalog.Delta{Op: catalog.OpAdd, Field: rng.IntN(4), N: rng.Int64N(41) - 20}
				if rng.IntN(2) == 0 {
					d.Op = catalog.OpMax
				}
				want = d.Apply(want)
				c = c.AddDelta(&d)
			}
			operands = append(operands, appendChange(nil, c))
		}
		value, err := decodeRow(mergeAll(t, rng, operands, true))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if got, err := catalog.DecodeCounters(value); err != nil || !slices.Equal(got, want) {
			t.Fatalf("seed %d: %v, %v; want %v", seed, got, err, want)
		}
	}
}

// TestMergeSaturates checks that composing changes never wraps around.
func TestMergeSaturates(t *testing.T) {
	add := func(n int64) []byte {
		return appendChange(nil, fold.Change(nil).AddDelta(&catalog.Delta{Op: catalog.OpAdd, N: n}))
	}
	for _, c := range []struct {
		operands [][]byte
		want     int64
	}{
		{[][]byte{add(math.MaxInt64), add(1)}, math.MaxInt64},
		{[][]byte{add(math.MinInt64), add(-1)}, math.MinInt64},
		{[][]byte{add(math.MaxInt64), add(math.MaxInt64), add(math.MaxInt64)}, math.MaxInt64},
	} {
		for _, fromOldest := range []bool{true, false} {
			value, err := decodeRow(mergeOnce(t, c.operands, fromOldest, true))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := catalog.DecodeCounters(value); err != nil || got.Field(0) != c.want {
				t.Errorf("%x: %v, %v; want %d", c.operands, got, err, c.want)
			}
		}
	}
}

// TestMergeNeverFails merges things that make no sense; the outcome is an error of reading, up to the next row.
func TestMergeNeverFails(t *testing.T) {
	add := []byte{formChange, 0x40, 2}
	short, row := []byte{formRow, 1, 2, 3}, append([]byte{formRow}, catalog.EncodeCounters(5)...)
	for _, c := range []struct {
		name     string
		operands [][]byte // oldest first
		want     error
	}{
		{"delta on a short row", [][]byte{short, add}, catalog.ErrNotCounters},
		{"delta on a long row", [][]byte{make([]byte, 1+8*(catalog.MaxFields+1)), add}, catalog.ErrNotCounters},
		{"more deltas", [][]byte{short, add, add, add}, catalog.ErrNotCounters},
		{"delta on misuse", [][]byte{{formMisuse}, add}, catalog.ErrNotCounters},
		{"empty operand", [][]byte{row, {}, add}, catalog.ErrCorrupt},
		{"unknown form", [][]byte{row, {99}, add}, catalog.ErrCorrupt},
		{"cut off", [][]byte{row, {formChange, 0x40}, add}, catalog.ErrCorrupt},
		{"delta on damage", [][]byte{{formDamage}, add}, catalog.ErrCorrupt},
		{"a row repairs damage", [][]byte{{99}, add, row, add}, nil},
		{"a row repairs misuse", [][]byte{short, add, row, add}, nil},
	} {
		for seed := range uint64(20) {
			value, err := decodeRow(mergeAll(t, rand.New(rand.NewPCG(seed, 0)), c.operands, true))
			if c.want != nil {
				if !errors.Is(err, c.want) {
					t.Errorf("%s: %x, %v; want %v", c.name, value, err, c.want)
				}
				continue
			}
			if got, _ := catalog.DecodeCounters(value); err != nil || got.Field(0) != 6 {
				t.Errorf("%s: %v, %v; want 6", c.name, got, err)
			}
		}
	}
}

func TestDecodeRowRefuses(t *testing.T) {
	for _, stored := range [][]byte{nil, {formChange}, {formDamage}, {99, 1}} {
		if value, err := decodeRow(stored); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("%x: %x, %v; want ErrCorrupt", stored, value, err)
		}
	}
}

// FuzzMerger feeds operands of any bytes. Whatever they are, merging gives a stored value that merging understands.
func FuzzMerger(f *testing.F) {
	f.Add([]byte{formRow, 1, 0, 0, 0, 0, 0, 0, 0}, []byte{formChange, 0xc1, 6, 0x1a}, []byte{formChange, 0x45, 3}, true)
	f.Add([]byte{formRow, 1}, []byte{formChange, 0xc1}, []byte{}, false)
	f.Add([]byte{formMisuse}, []byte{formDamage}, []byte{formChange, 0x40, 0x80}, true)
	f.Fuzz(func(t *testing.T, oldest, middle, newest []byte, includesBase bool) {
		operands := [][]byte{oldest, middle, newest}
		up := mergeOnce(t, operands, true, includesBase)
		down := mergeOnce(t, operands, false, includesBase)
		for _, stored := range [][]byte{up, down} {
			_, err := decodeRow(stored)
			if len(stored) > 0 && stored[0] == formChange {
				if _, ok := decodeChange(stored); !ok || includesBase {
					t.Fatalf("merged to the change %x", stored)
				}
			} else if err != nil && stored[0] != formMisuse && stored[0] != formDamage {
				t.Fatalf("merged to %x: %v", stored, err)
			}
		}
	})
}
