package fold

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/weftfs/weft/server/catalog"
)

// TestGrouping applies random deltas one by one, and joined in two groups that are stored in between: the counters must be
// the same.
func TestGrouping(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 5000 {
		var one, two Change
		var want catalog.Counters
		n := rng.IntN(12)
		for i := range n {
			d := catalog.Delta{Op: catalog.OpAdd, Field: rng.IntN(3), N: rng.Int64N(41) - 20}
			if rng.IntN(2) == 0 {
				d.Op = catalog.OpMax
			}
			want = d.Apply(want)
			if i < n/2 {
				one = one.AddDelta(&d)
			} else {
				two = two.AddDelta(&d)
			}
		}
		stored, ok := Decode(two.Append(nil))
		if !ok || !slices.Equal(stored, two) {
			t.Fatalf("%v came back as %v, %v", two, stored, ok)
		}
		apart := stored.Apply(one.Apply(nil))
		for _, f := range stored {
			one = one.Add(f)
		}
		if joined := one.Apply(nil); !slices.Equal(joined, want) || !slices.Equal(apart, want) {
			t.Fatalf("joined %v, apart %v, want %v", joined, apart, want)
		}
	}
}

// FuzzDecode gives Decode anything. What it takes must mean the same when it is stored again.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add(Change{{0, 5, math.MinInt64}, {1, 0, 7}, {63, -1, math.MaxInt64}}.Append(nil))
	f.Add([]byte{0xc0, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, stored []byte) {
		c, ok := Decode(stored)
		if !ok {
			return
		}
		again, ok := Decode(c.Append(nil))
		if !ok || !slices.Equal(again, c) {
			t.Errorf("%x is %v, and stored again %v, %v", stored, c, again, ok)
		}
		c.Apply(nil)
	})
}
