package model

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var (
	ops  = flag.Int("ops", 2000, "operations over all combinations of stripe unit and count")
	seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random operations")
)

// TestModel does random operations on a mount and on a plain directory, for several ways of striping.
func TestModel(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount()
	plain := t.TempDir()
	t.Logf("-seed %d -ops %d", *seed, *ops)
	units, counts := []int{4 << 10, 64 << 10, 1 << 20}, []int{1, 2, 3, 4}
	for _, unit := range units {
		for _, count := range counts {
			name := fmt.Sprintf("unit-%d-count-%d", unit, count)
			t.Run(name, func(t *testing.T) {
				a, b := newWorld(filepath.Join(m.Dir, name)), newWorld(filepath.Join(plain, name))
				defer a.close()
				defer b.close()
				for _, w := range []*world{a, b} {
					if err := os.Mkdir(w.root, 0o755); err != nil {
						t.Fatal(err)
					}
				}
				harness.Weft(t, "layout", "set", a.root, "--stripe-unit", fmt.Sprint(unit), "--stripe-count", fmt.Sprint(count))
				s := &script{
					rng:     rand.New(rand.NewPCG(*seed, uint64(unit+count))),
					maxSize: min(8<<20, max(64<<10, int64(unit)*int64(count)*3)),
				}
				n := *ops / (len(units) * len(counts))
				var done []string // the last operations
				for i := range n {
					o := s.next()
					done = append(done[max(0, len(done)-40):], o.desc)
					if err := step(o, a, b); err != nil {
						t.Fatalf("operation %d of %d: %v\nbefore it:\n%s", i, n, err, strings.Join(done, "\n"))
					}
					if i%200 == 199 || i == n-1 {
						if err := compareTrees(a, b); err != nil {
							t.Fatalf("after operation %d of %d: %v", i, n, err)
						}
					}
				}
			})
			if t.Failed() {
				return
			}
		}
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}
