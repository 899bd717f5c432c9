package coherence

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// stall is how long one operation may take, beyond what the disk was seen to take, and not counting the moments in which
// this process did not run either. A recall waits a second for a thread that the machine does not let run; without turning
// back what stands in its way it would take 5 s.
const stall = 3 * time.Second

// TestBothChange has two mounts that create, rename and remove in two directories, so that each always has leases on what
// the other changes, and the lock of a directory while the other wants it to forget names there. There is one processor
// for each process of weft, where what waits for itself stands still.
func TestBothChange(t *testing.T) {
	duration := 10 * time.Second
	if *long {
		duration = 10 * time.Minute
	}
	t.Logf("-seed %d", *seed)
	v := harness.NewVolume(t, harness.Options{Lease: lease, Env: []string{"GOMAXPROCS=1"}})
	a, b := twoMounts(v)
	all := []*harness.Mount{a, b}
	dir := func(m *harness.Mount) string { return filepath.Join(m.Dir, "busy") }
	for _, name := range []string{dir(a), filepath.Join(dir(a), "sub")} {
		if err := os.Mkdir(name, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const perMount = 3
	workers := make([]worker, perMount*len(all))
	end := time.Now().Add(duration)
	var wg sync.WaitGroup
	for i := range workers {
		w := &workers[i]
		w.rng = rand.New(rand.NewPCG(*seed, uint64(i)))
		w.dir = dir(all[i%len(all)])
		w.begun.Store(time.Now().UnixNano())
		wg.Add(1)
		go func() { // ends at end, or with an error
			defer wg.Done()
			for time.Now().Before(end) && w.err == nil {
				w.step()
			}
		}()
	}
	floor, pauses := measureDisk(t, end), measurePauses(end)
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }() // ends with the workers
	for stuck := false; !stuck; {
		select {
		case <-ended:
			stuck = true
		case <-time.After(time.Second):
			for i := range workers {
				if since := time.Since(time.Unix(0, workers[i].begun.Load())); since > 30*time.Second {
					what := workers[i].doing.Load()
					for _, m := range all {
						m.Abort()
					}
					t.Fatalf("worker %d has been doing %v for %v", i, *what, since)
				}
			}
		}
	}
	slow, paused := <-floor, <-pauses
	ops, worst, what := 0, time.Duration(0), ""
	for i := range workers {
		w := &workers[i]
		if w.err != nil {
			t.Errorf("worker %d: %v", i, w.err)
		}
		ops += w.ops
		if w.worst > worst {
			worst, what = w.worst, w.what
		}
		for _, op := range w.slow {
			if took := op.without(paused); took > stall+slow {
				t.Errorf("worker %d: %s took %v of %v in which the machine ran (the disk: at most %v)", i, op.what, took, op.end.Sub(op.begun), slow)
			}
		}
	}
	t.Logf("%d operations, the slowest %v (%s); the disk's slowest fsync meanwhile %v", ops, worst, what, slow)
	if ops < int(duration/time.Second)*20 {
		t.Errorf("only %d operations in %v", ops, duration)
	}
	for _, sub := range []string{"", "sub"} {
		if a, b := names(t, filepath.Join(dir(a), sub)), names(t, filepath.Join(dir(b), sub)); a != b {
			t.Errorf("the mounts see different names:\n%s\n%s", a, b)
		}
	}
	for _, m := range all {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}

// TestSameName has two mounts open one new name at the same time, by absolute and by relative paths. Both have leases on
// the names, so each may have to start over, and finds then that the other was first. Both succeed all the same.
func TestSameName(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := twoMounts(v)
	rounds := 30
	if *long {
		rounds = 3000
	}
	for k := range rounds {
		sub := fmt.Sprint("d", k)
		if err := os.Mkdir(filepath.Join(a.Dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
		var looked, done sync.WaitGroup
		looked.Add(2)
		for _, m := range []*harness.Mount{a, b} {
			done.Go(func() { // ends when it has opened the file
				dir, err := unix.Open(filepath.Join(m.Dir, sub), unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				if err != nil {
					t.Error(err)
				}
				defer unix.Close(dir)
				for range 2 { // the second time the name is kept
					unix.Fstatat(dir, "none", new(unix.Stat_t), 0)
				}
				name := "same"
				if k%2 == 0 {
					name = filepath.Join(m.Dir, sub, name)
				}
				looked.Done()
				looked.Wait()
				fd, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o644)
				if err != nil {
					t.Errorf("round %d: open %s: %v", k, name, err)
				}
				unix.Close(fd)
			})
		}
		done.Wait()
	}
}

func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(entries)
}

// measureDisk writes and syncs a small file again and again until end, and says how long the slowest time was.
func measureDisk(t *testing.T, end time.Time) <-chan time.Duration {
	f, err := os.Create(filepath.Join(t.TempDir(), "floor"))
	if err != nil {
		t.Fatal(err)
	}
	worst := make(chan time.Duration, 1)
	go func() { // ends at end
		defer f.Close()
		var slow time.Duration
		for time.Now().Before(end) {
			begun := time.Now()
			f.WriteAt(make([]byte, 4096), 0)
			f.Sync()
			slow = max(slow, time.Since(begun))
			time.Sleep(20 * time.Millisecond)
		}
		worst <- slow
	}()
	return worst
}

// span is a time in which something happened.
type span struct {
	begun, end time.Time
	what       string
}

// without is how long s was, less what others took of it; those do not overlap.
func (s span) without(others []span) time.Duration {
	took := s.end.Sub(s.begun)
	for _, o := range others {
		begun, end := o.begun, o.end
		if begun.Before(s.begun) {
			begun = s.begun
		}
		if end.After(s.end) {
			end = s.end
		}
		took -= max(0, end.Sub(begun))
	}
	return took
}

// measurePauses sleeps for moments until end, and says when one took much longer.
func measurePauses(end time.Time) <-chan []span {
	const moment = 5 * time.Millisecond
	all := make(chan []span, 1)
	go func() { // ends at end
		var list []span
		for last := time.Now(); last.Before(end); {
			time.Sleep(moment)
			now := time.Now()
			if now.Sub(last) > 10*moment {
				list = append(list, span{begun: last.Add(moment), end: now})
			}
			last = now
		}
		all <- list
	}()
	return all
}

// worker does operations on a few names of a directory. Others do too, so that names may exist or not.
type worker struct {
	dir   string
	rng   *rand.Rand
	begun atomic.Int64 // of the operation under way, nanoseconds since 1970
	doing atomic.Pointer[string]

	ops   int
	worst time.Duration
	what  string // that took so long
	slow  []span // operations that took longer than stall
	err   error
}

func (w *worker) name() string {
	return filepath.Join(w.dir, []string{".", "sub"}[w.rng.IntN(2)], string("abcdef"[w.rng.IntN(6)]))
}

func (w *worker) step() {
	a, b := w.name(), w.name()
	var what string
	var do func() error
	switch n := w.rng.IntN(10); {
	case n < 3:
		what, do = "create "+filepath.Base(a), func() error {
			fd, err := unix.Open(a, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o644)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}
	case n < 6:
		what, do = "rename "+filepath.Base(a)+" to "+filepath.Base(b), func() error { return unix.Rename(a, b) }
	case n < 8:
		what, do = "unlink "+filepath.Base(a), func() error { return unix.Unlink(a) }
	case n < 9:
		what, do = "stat "+filepath.Base(a), func() error { return unix.Stat(a, new(unix.Stat_t)) }
	default:
		what, do = "list", func() error {
			_, err := os.ReadDir(w.dir)
			return err
		}
	}
	w.doing.Store(&what)
	begun := time.Now()
	w.begun.Store(begun.UnixNano())
	err := do()
	end := time.Now()
	if took := end.Sub(begun); took > w.worst {
		w.worst, w.what = took, what
	}
	if end.Sub(begun) > stall {
		w.slow = append(w.slow, span{begun, end, what})
	}
	w.begun.Store(time.Now().Add(time.Hour).UnixNano()) // nothing
	w.ops++
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) {
		w.err = fmt.Errorf("%s: %w", what, err)
	}
}

// TestAppends has many writers on two mounts that append records to one file. Every record is there, whole, once, and those
// of each writer are in their order.
func TestAppends(t *testing.T) {
	t.Logf("-seed %d", *seed)
	records := 120
	if *long {
		records = 5000
	}
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := twoMounts(v)
	all := []*harness.Mount{a, b}
	const perMount = 3
	writers := perMount * len(all)
	var wg sync.WaitGroup
	for i := range writers {
		wg.Add(1)
		go func() { // ends with its records
			defer wg.Done()
			rng := rand.New(rand.NewPCG(*seed, uint64(i)))
			fd, err := unix.Open(filepath.Join(all[i%len(all)].Dir, "log"), unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_CLOEXEC, 0o644)
			if err != nil {
				t.Errorf("writer %d: %v", i, err)
				return
			}
			defer unix.Close(fd)
			var last int64
			for n := range records {
				b := record(i, n, rng)
				got, err := unix.Write(fd, b)
				if err != nil || got != len(b) {
					t.Errorf("writer %d: record %d: %d bytes of %d: %v", i, n, got, len(b), err)
					return
				}
				var st unix.Stat_t
				if err := unix.Fstat(fd, &st); err != nil || st.Size < last+int64(len(b)) {
					t.Errorf("writer %d: the size is %d (%v), after %d and an append of %d bytes", i, st.Size, err, last, len(b))
					return
				}
				last = st.Size
			}
		}()
	}
	wg.Wait()
	for n, m := range all {
		b, err := os.ReadFile(m.Dir + "/log")
		if err != nil {
			t.Fatal(err)
		}
		if err := checkRecords(b, writers, records); err != nil {
			t.Errorf("through mount %d: %v", n, err)
		}
	}
	for _, m := range all {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}

const recordHead = 4 + 4 + 4 + sha256.Size

// record is length, writer, number, digest of the rest, and random bytes: mostly few, sometimes more than a stripe unit.
func record(writer, number int, rng *rand.Rand) []byte {
	n := recordHead + rng.IntN(300)
	switch rng.IntN(20) {
	case 0:
		n += rng.IntN(1 << 20)
	case 1, 2, 3:
		n += rng.IntN(64 << 10)
	}
	b := make([]byte, n)
	binary.BigEndian.PutUint32(b, uint32(n))
	binary.BigEndian.PutUint32(b[4:], uint32(writer))
	binary.BigEndian.PutUint32(b[8:], uint32(number))
	for i := recordHead; i < n; i++ {
		b[i] = byte(rng.Uint32())
	}
	sum := sha256.Sum256(b[recordHead:])
	copy(b[12:], sum[:])
	return b
}

func checkRecords(b []byte, writers, records int) error {
	next := make([]uint32, writers)
	for off := 0; off < len(b); {
		rest := b[off:]
		if len(rest) < recordHead {
			return fmt.Errorf("%d bytes left over at %d", len(rest), off)
		}
		n := int(binary.BigEndian.Uint32(rest))
		writer, number := binary.BigEndian.Uint32(rest[4:]), binary.BigEndian.Uint32(rest[8:])
		if n < recordHead || n > len(rest) || int(writer) >= writers {
			return fmt.Errorf("no record at %d of %d: %x", off, len(b), rest[:recordHead])
		}
		if sum := sha256.Sum256(rest[recordHead:n]); !bytes.Equal(sum[:], rest[12:recordHead]) {
			return fmt.Errorf("record %d of writer %d at %d is not whole", number, writer, off)
		}
		if number != next[writer] {
			return fmt.Errorf("record %d of writer %d at %d, want %d", number, writer, off, next[writer])
		}
		next[writer]++
		off += n
	}
	for i, n := range next {
		if int(n) != records {
			return fmt.Errorf("writer %d: %d records of %d", i, n, records)
		}
	}
	return nil
}

// lines are those of s that hold one of words.
func lines(s string, words ...string) []string {
	var found []string
	for _, line := range strings.Split(s, "\n") {
		for _, w := range words {
			if strings.Contains(line, w) {
				found = append(found, line)
				break
			}
		}
	}
	return found
}
