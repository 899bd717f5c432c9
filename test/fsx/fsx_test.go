package fsx

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var (
	ops     = flag.Int("ops", 0, "operations on one mount; a tenth of it with O_DIRECT, and by two processes (default 4000, with -long 1000000)")
	seed    = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random operations")
	long    = flag.Bool("long", false, "many operations")
	options = flag.String("o", "", "mount options, such as cache=lease")
	mounts  = flag.Int("mounts", 2, "mounts of the two processes that take turns, 1 or 2")
	local   = flag.String("dir", "", "use this directory instead of mounts")
)

func operations() int {
	switch {
	case *ops > 0:
		return *ops
	case *long:
		return 1_000_000
	}
	return 4000
}

// place gives directories of n mounts of one volume, and a function that ends it all and checks the volume.
func place(t *testing.T, opts harness.Options, n int) (dirs []string, end func()) {
	t.Logf("-seed %d -ops %d", *seed, operations())
	if *local != "" {
		dir, err := os.MkdirTemp(*local, "fsx")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		return []string{dir, dir}[:n], func() {}
	}
	v := harness.NewVolume(t, opts)
	var all []*harness.Mount
	for range n {
		m := v.Mount(strings.FieldsFunc(*options, func(c rune) bool { return c == ',' })...)
		all, dirs = append(all, m), append(dirs, m.Dir)
	}
	return dirs, func() {
		for _, m := range all {
			m.Unmount()
		}
		v.Stop()
		v.Fsck()
	}
}

// striping is a policy of the directory a file is in, with a size at which there are several stripes.
type striping struct{ unit, count, max int }

var stripings = []striping{{4 << 10, 4, 256 << 10}, {64 << 10, 3, 768 << 10}, {1 << 20, 2, 3 << 20}}

// in makes a directory with that policy.
func (s striping) in(t *testing.T, dir string) string {
	t.Helper()
	dir = filepath.Join(dir, s.String())
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if *local == "" {
		harness.Weft(t, "layout", "set", dir, "--stripe-unit", strconv.Itoa(s.unit), "--stripe-count", strconv.Itoa(s.count))
		harness.Whole(t, dir, *options)
	}
	return dir
}

func (s striping) String() string { return fmt.Sprintf("unit-%d-count-%d", s.unit, s.count) }

// exercises runs the operations of one form on all stripings.
func exercises(t *testing.T, opts harness.Options, n int, f form) {
	dirs, end := place(t, opts, 1)
	for i, s := range stripings {
		t.Run(s.String(), func(t *testing.T) {
			f.max = int64(s.max)
			x, err := newFile(filepath.Join(s.in(t, dirs[0]), "file"), f, *seed, uint64(i))
			if err != nil {
				t.Fatal(err)
			}
			defer x.close()
			if err := x.exercise(n / len(stripings)); err != nil {
				t.Fatal(err)
			}
			var counts []string
			for kind, n := range x.tally {
				counts = append(counts, fmt.Sprintf("%s %d", kind, n))
			}
			sort.Strings(counts)
			t.Log(strings.Join(counts, ", "))
		})
		if t.Failed() {
			return
		}
	}
	end()
}

func TestFile(t *testing.T) {
	exercises(t, harness.Options{}, operations(), form{align: 1, maps: true})
}

func TestDirect(t *testing.T) {
	exercises(t, harness.Options{}, operations()/10, form{align: 512, flags: unix.O_DIRECT, maps: true})
}

// TestNVMe has the file on NVMe namespaces.
func TestNVMe(t *testing.T) {
	if *local != "" {
		t.Skip("-dir says where the file is")
	}
	exercises(t, harness.Options{NVMe: 4}, operations()/4, form{align: 1, maps: true})
}

// TestTurns has two processes, each with the file open through a mount of its own, who take turns under a lock. Both draw
// the same operations; who has the turn does them to the file and first compares all of it with what it must be by now.
// Without mappings: those of two mounts are not coherent.
func TestTurns(t *testing.T) {
	dirs, end := place(t, harness.Options{}, *mounts)
	s := stripings[0]
	dir := s.in(t, dirs[0])
	if err := os.WriteFile(filepath.Join(dir, "turn"), []byte(turnText(0)), 0o644); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	for who := range 2 {
		cmd := harness.Self(fmt.Sprintf("%s=%d", turnEnv, who), "-seed", fmt.Sprint(*seed), "-ops", strconv.Itoa(operations()),
			"-dir", filepath.Join(dirs[who%len(dirs)], s.String()))
		var said strings.Builder
		cmd.Stdout = &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { // ends with the process
			err := cmd.Wait()
			if err != nil {
				err = fmt.Errorf("process %d: %w\n%s", who, err, said.String())
			}
			ended <- err
		}()
		defer cmd.Process.Kill()
	}
	for range 2 {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	end()
}

// turnEnv makes this test binary one of the two processes of TestTurns.
const turnEnv = "WEFT_FSX_TURN"

func TestMain(m *testing.M) {
	flag.Parse()
	who, err := strconv.Atoi(os.Getenv(turnEnv))
	if err != nil {
		os.Exit(m.Run())
	}
	if err := takeTurns(who); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// turnText is what the file "turn" holds: how many turns are over.
func turnText(n int) string { return fmt.Sprintf("%012d", n) }

func takeTurns(who int) error {
	s := stripings[0]
	x, err := newFile(filepath.Join(*local, "file"), form{max: int64(s.max), align: 1}, *seed, 77)
	if err != nil {
		return err
	}
	defer x.close()
	turn, err := os.OpenFile(filepath.Join(*local, "turn"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer turn.Close()
	lock := func(how int16) error {
		for {
			err := unix.FcntlFlock(turn.Fd(), unix.F_SETLKW, &unix.Flock_t{Type: how})
			if !errors.Is(err, unix.EINTR) {
				return err
			}
		}
	}
	shared := rand.New(rand.NewPCG(*seed, 78)) // drawn from alike by both
	for mine, n := 0, 0; mine < operations()/10; n++ {
		owner, length := shared.IntN(2), 1+shared.IntN(12)
		mine += length
		if owner != who {
			for range length {
				x.next()
			}
			continue
		}
		for had := false; !had; {
			if err := lock(unix.F_WRLCK); err != nil {
				return fmt.Errorf("lock: %w", err)
			}
			b := make([]byte, len(turnText(0)))
			if _, err := turn.ReadAt(b, 0); err != nil {
				return fmt.Errorf("read whose turn it is: %w", err)
			}
			over, err := strconv.Atoi(string(b))
			switch {
			case err != nil:
				return fmt.Errorf("whose turn it is: %q", b)
			case over > n:
				return x.failed(fmt.Errorf("turn %d is over, which was for this process", n))
			case over == n:
				if err := x.turn(length); err != nil {
					return err
				}
				if _, err := turn.WriteAt([]byte(turnText(n+1)), 0); err != nil {
					return err
				}
				had = true
			}
			if err := lock(unix.F_UNLCK); err != nil {
				return fmt.Errorf("unlock: %w", err)
			}
			if !had {
				time.Sleep(200 * time.Microsecond) // let the other one have the lock
			}
		}
	}
	return nil
}

// turn compares the file with what all turns so far have made of it, and does n operations.
func (x *file) turn(n int) error {
	if err := x.compare(0, int64(len(x.good))); err != nil {
		return x.failed(fmt.Errorf("before it, when the lock was had: %w", err))
	}
	for range n {
		if err := x.run(x.next()); err != nil {
			return x.failed(err)
		}
	}
	return nil
}
