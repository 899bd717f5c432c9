package extent

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weftfs/weft/server/schema"
)

// The blocks of a unit, against a list of truth values.
func TestBlocks(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, blocks := range []int64{16, 64, 2048} {
		g := geometry{blocks: blocks}
		var u unit
		want := make([]bool, blocks)
		for range 3000 {
			from := rng.Int64N(blocks)
			to := from + rng.Int64N(blocks-from+1)
			if rng.IntN(10) == 0 {
				from, to = 0, blocks
			}
			valid := rng.IntN(2) == 0
			before, bitmap := slices.Clone(want), slices.Clone(u.valid)
			had := u.valid
			for i := from; i < to; i++ {
				want[i] = valid
			}
			if changed := u.put(&g, from, to, valid); changed == slices.Equal(before, want) {
				t.Fatalf("%d to %d, %t: changed %t", from, to, valid, changed)
			}
			if !slices.Equal(had, bitmap) {
				t.Fatal("put changed the bitmap that a row may share")
			}
			n := 0
			for i := range blocks {
				if u.is(i) != want[i] {
					t.Fatalf("block %d is %t", i, u.is(i))
				}
				if want[i] {
					n++
				}
			}
			state := schema.RunPartly
			switch int64(n) {
			case 0:
				state = schema.RunInvalid
			case blocks:
				state = schema.RunValid
			}
			if u.state != state || (u.valid == nil) != (state != schema.RunPartly) {
				t.Fatalf("%d of %d blocks: state %d", n, blocks, u.state)
			}
			for at := int64(0); at < blocks && state == schema.RunPartly; {
				next := u.same(at, blocks)
				end := at + 1
				for end < blocks && want[end] == want[at] {
					end++
				}
				if next != end {
					t.Fatalf("from %d: %d, want %d", at, next, end)
				}
				at = next
			}
		}
	}
}
