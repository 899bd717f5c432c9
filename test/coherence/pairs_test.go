package coherence

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
	"github.com/weftfs/weft/test/model"
)

var (
	seed    = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of random choices")
	long    = flag.Bool("long", false, "full sizes")
	pairs   = flag.Int("pairs", 0, "changes that are observed (default 1500, with -long 10000)")
	mounts  = flag.Int("mounts", 3, "mounts of TestPairs; with 1 the tests of two mounts use one twice, which tests them")
	options = flag.String("o", "", "mount options, such as cache=lease")
)

// lease is short, so that a test can wait for its end.
const lease = 3 * time.Second

func mountOptions() []string {
	return strings.FieldsFunc(*options, func(c rune) bool { return c == ',' })
}

// twoMounts mounts a volume twice.
func twoMounts(v *harness.Volume) (a, b *harness.Mount) {
	a = v.Mount(mountOptions()...)
	if *mounts == 1 {
		return a, a
	}
	return a, v.Mount(mountOptions()...)
}

func pairCount() int {
	switch {
	case *pairs > 0:
		return *pairs
	case *long:
		return 10000
	}
	return 1500
}

// TestPairs changes something through one mount and looks at it through another one without delay. That one has looked
// before, and has the file open, so that there is something that it could have kept. A plain directory says what there must be to see,
// and all mounts must agree also on times and inode numbers.
func TestPairs(t *testing.T) {
	t.Logf("-seed %d -pairs %d", *seed, pairCount())
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	var all []*harness.Mount
	for range *mounts {
		all = append(all, v.Mount(mountOptions()...))
	}
	observe(t, all, pairCount(), *seed)
	for _, m := range all {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}

func observe(t *testing.T, all []*harness.Mount, pairs int, seed uint64) {
	t.Helper()
	plain := model.NewWorld(t.TempDir())
	defer plain.Close()
	changer := model.NewWorld(all[0].Dir + "/pairs")
	defer changer.Close()
	if err := os.Mkdir(changer.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "layout", "set", changer.Root, "--stripe-unit", "64KiB", "--stripe-count", "3")
	harness.Whole(t, changer.Root, *options)
	rng := rand.New(rand.NewPCG(seed, 5))
	s := &model.Script{Rng: rng, MaxSize: 400 << 10}
	var done []string
	changes := 0
	for i := range pairs {
		by, at := rng.IntN(len(all)), rng.IntN(len(all))
		if by == at {
			at = (at + 1) % len(all)
		}
		o := s.Next()
		changer.Root = filepath.Join(all[by].Dir, "pairs")
		observer := model.NewWorld(filepath.Join(all[at].Dir, "pairs"))
		paths := o.Paths(changer)
		if len(paths) > 0 {
			changes++
		}
		done = append(done[max(0, len(done)-30):], fmt.Sprintf("%d: through mount %d, seen through %d: %s", i, by, at, o.Desc))
		if err := pair(o, paths, changer, observer, plain, rng.IntN(2) == 0); err != nil {
			t.Fatalf("pair %d of %d: %v\nbefore it:\n%s", i, pairs, err, strings.Join(done, "\n"))
		}
		for _, p := range paths {
			want := changer.Exact(p)
			for n, m := range all {
				if got := model.NewWorld(filepath.Join(m.Dir, "pairs")).Exact(p); got != want {
					t.Fatalf("pair %d of %d: the mounts do not agree on %s:\n  %d: %s\n  %d: %s\nbefore it:\n%s", i, pairs, p, by, want, n, got, strings.Join(done, "\n"))
				}
			}
		}
	}
	if changes < pairs/3 {
		t.Fatalf("only %d of %d operations were on something", changes, pairs)
	}
	for _, m := range all {
		if err := model.CompareTrees(model.NewWorld(filepath.Join(m.Dir, "pairs")), plain); err != nil {
			t.Fatalf("at the end, through %s: %v", m.Dir, err)
		}
	}
}

// pair looks, does one operation through changer and in plain, and looks again, first at the open files if openFirst.
func pair(o model.Op, paths []string, changer, observer, plain *model.World, openFirst bool) error {
	type eye struct {
		path        string
		weft, plain *model.Watch
	}
	var eyes []eye
	for _, p := range paths {
		e := eye{p, observer.Watch(p), plain.Watch(p)}
		defer e.weft.Close()
		defer e.plain.Close()
		eyes = append(eyes, e)
	}
	look := func(when string) error {
		for _, byName := range []bool{!openFirst, openFirst} {
			for _, e := range eyes {
				var got, want string
				if byName {
					got, want = observer.Observe(e.path), plain.Observe(e.path)
				} else {
					got, want = e.weft.Observe(), e.plain.Observe()
				}
				if got != want {
					return fmt.Errorf("%s %s, by name %v:\n  seen: %s\n  want: %s", when, e.path, byName, got, want)
				}
			}
		}
		return nil
	}
	if err := look("before it,"); err != nil {
		return err
	}
	if err := model.Step(o, changer, plain); err != nil {
		return err
	}
	return look("after it,")
}
