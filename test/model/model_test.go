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

	"github.com/pkg/xattr"

	"github.com/weftfs/weft/test/harness"
)

var (
	ops  = flag.Int("ops", 2000, "operations over all combinations of stripe unit and count")
	seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random operations")

	mounts  = flag.Int("mounts", 2, "mounts of the volume: each operation uses one of them, and the next one the next")
	mirrors = flag.Int("mirrors", 1, "copies of the data")
	options = flag.String("o", "", "mount options, such as cache=lease")
)

// TestModel does random operations on one mount and on a plain directory, for several ways of striping.
func TestModel(t *testing.T) { compare(t, harness.Options{}, *ops, 1, *mirrors, false) }

// TestMounts does the same on several mounts in turn, and looks at the tree through the one that did not do the last
// operation.
func TestMounts(t *testing.T) { compare(t, harness.Options{}, *ops, *mounts, *mirrors, false) }

// TestCaches has files cached on the one data server that lends descriptors, and evicted, in between.
func TestCaches(t *testing.T) {
	compare(t, harness.Options{Remote: true}, *ops, *mounts, *mirrors, true)
}

// TestNVMe does fewer on mounts of a volume whose data lies on NVMe namespaces.
func TestNVMe(t *testing.T) { compare(t, harness.Options{NVMe: 4}, *ops/3, *mounts, *mirrors, false) }

// TestNVMeMixed has copies on NVMe namespaces and NFSv3 servers.
func TestNVMeMixed(t *testing.T) {
	compare(t, harness.Options{NVMe: 4, DataServers: 4}, *ops/6, *mounts, 2, false)
}

// advise has files cached or evicted by one mount. Most are copied while the next operations go on.
func advise(root string, paths []string, r *rand.Rand) {
	for _, p := range paths {
		p = filepath.Join(root, p)
		value := "willneed"
		if r.IntN(4) == 0 {
			value = "dontneed"
		}
		if xattr.Set(p, "weft.advise", []byte(value)) != nil { // there is none, or it is no file
			continue
		}
		for range r.IntN(40) {
			if state, err := xattr.Get(p, "weft.advise"); err != nil || string(state) != "filling" {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
}

func compare(t *testing.T, opts harness.Options, ops, mounts, mirrors int, caches bool) {
	v := harness.NewVolume(t, opts)
	if caches {
		v.AddLocal(0)
	}
	var all []*harness.Mount
	for range mounts {
		all = append(all, v.Mount(strings.FieldsFunc(*options, func(c rune) bool { return c == ',' })...))
	}
	plain := t.TempDir()
	t.Logf("-seed %d -ops %d", *seed, ops)
	units, counts := []int{4 << 10, 64 << 10, 1 << 20}, []int{1, 2, 3, 4}
	for _, unit := range units {
		for _, count := range counts {
			name := fmt.Sprintf("unit-%d-count-%d", unit, count)
			t.Run(name, func(t *testing.T) {
				a, b := NewWorld(filepath.Join(all[0].Dir, name)), NewWorld(filepath.Join(plain, name))
				defer a.Close()
				defer b.Close()
				for _, w := range []*World{a, b} {
					if err := os.Mkdir(w.Root, 0o755); err != nil {
						t.Fatal(err)
					}
				}
				harness.Weft(t, "layout", "set", a.Root, "--stripe-unit", fmt.Sprint(unit), "--stripe-count", fmt.Sprint(count),
					"--mirrors", fmt.Sprint(mirrors))
				harness.Whole(t, a.Root, *options)
				s := &Script{
					Rng:     rand.New(rand.NewPCG(*seed, uint64(unit+count))),
					MaxSize: min(8<<20, max(64<<10, int64(unit)*int64(count)*3)),
				}
				n := ops / (len(units) * len(counts))
				var done []string // the last operations
				for i := range n {
					o := s.Next()
					if caches && i%2 == 0 {
						advise(filepath.Join(all[i/2%mounts].Dir, name), o.Paths(a), s.Rng)
					}
					a.Root = filepath.Join(all[i%mounts].Dir, name)
					done = append(done[max(0, len(done)-40):], fmt.Sprintf("mount %d: %s", i%mounts, o.Desc))
					if err := Step(o, a, b); err != nil {
						t.Fatalf("operation %d of %d: %v\nbefore it:\n%s", i, n, err, strings.Join(done, "\n"))
					}
					if i%200 == 199 || i == n-1 {
						a.Root = filepath.Join(all[(i+1)%mounts].Dir, name)
						if err := CompareTrees(a, b); err != nil {
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
	for _, m := range all {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}
