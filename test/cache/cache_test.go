package cache

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pkg/xattr"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var (
	options = flag.String("o", "", "mount options, such as transport=device")
	long    = flag.Bool("long", false, "as much as a user would")
)

// mountOptions has reads come to the mount, where they are counted.
func mountOptions() []string {
	list := []string{"passthrough=off"}
	if *options != "" {
		list = append(list, strings.Split(*options, ",")...)
	}
	return list
}

// world is a volume whose data servers are remote, but for one on this host, which has no file of those made before.
type world struct {
	t     *testing.T
	v     *harness.Volume
	a, b  *harness.Mount
	local *harness.DataServer
}

// newWorld has files made through a mount before the local data server is there.
func newWorld(t *testing.T, room int64, opts harness.Options, make func(dir string)) *world {
	t.Helper()
	opts.Remote = true
	w := &world{t: t, v: harness.NewVolume(t, opts)}
	w.a = w.v.Mount(mountOptions()...)
	make(w.a.Dir)
	harness.Weft(t, "sync", w.a.Dir)
	w.local = w.v.AddLocal(room)
	w.b = w.v.Mount(mountOptions()...)
	for _, m := range []*harness.Mount{w.a, w.b} {
		harness.Await(t, "a local data server", func() bool { // a mount looks at it when it is asked how it is
			for _, d := range devices(t, m) {
				if d.Local {
					return true
				}
			}
			return false
		})
	}
	return w
}

// end stops everything and looks whether anything is left that should not be.
func (w *world) end() {
	w.t.Helper()
	w.a.Unmount()
	w.b.Unmount()
	w.v.Stop()
	w.v.Fsck()
}

type device struct {
	ID         string
	Address    string
	Local      bool
	Caches     int64
	CacheBytes int64  `json:"cache_bytes"`
	OpsLocal   uint64 `json:"ops_local"`
	Mount      *struct {
		Reads struct{ Ops, Bytes uint64 }
	}
}

func devices(t *testing.T, m *harness.Mount) []device {
	t.Helper()
	var out []byte
	harness.Await(t, "weft status", func() (ok bool) { // a mount is there before it listens to that
		var err error
		out, err = exec.Command(harness.Bin(t, "weft"), "status", "--json", m.Dir).Output()
		return err == nil
	})
	var st []struct{ Devices []device }
	if err := json.Unmarshal(out, &st); err != nil || len(st) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	return st[0].Devices
}

// reads is what a mount has read locally, in requests, and elsewhere, in bytes.
func reads(t *testing.T, m *harness.Mount) (local, remote uint64) {
	t.Helper()
	for _, d := range devices(t, m) {
		switch {
		case d.Local:
			local += d.OpsLocal
		case d.Mount != nil:
			remote += d.Mount.Reads.Bytes
		}
	}
	return local, remote
}

// cached is how many files are cached on this host, and their bytes.
func cached(t *testing.T, m *harness.Mount) (files, bytes int64) {
	t.Helper()
	for _, d := range devices(t, m) {
		files, bytes = files+d.Caches, bytes+d.CacheBytes
	}
	return files, bytes
}

// content is n bytes that are found nowhere else.
func content(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, path string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want) {
		at := 0
		for at < min(len(got), len(want)) && got[at] == want[at] {
			at++
		}
		t.Fatalf("%s: %d bytes, want %d, they differ at %d, %v", path, len(got), len(want), at, err)
	}
}

// weft runs it and returns its exit code and all it says.
func weft(t *testing.T, args ...string) (code int, out string) {
	t.Helper()
	b, err := exec.Command(harness.Bin(t, "weft"), args...).CombinedOutput()
	exit := (*exec.ExitError)(nil)
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if exit != nil {
		code = exit.ExitCode()
	}
	return code, string(b)
}

// A tree of all kinds of files is read without the remote data servers once it is prefetched, and from them again after it is evicted.
func TestPrefetch(t *testing.T) {
	sparse := make([]byte, 40<<20)
	copy(sparse[30<<20:], content(7, 100<<10))
	files := map[string][]byte{
		"small": content(1, 100), "unit": content(2, 1<<20), "wide": content(3, 9<<20+5), "sub/deep": content(4, 3<<20), "zeros": make([]byte, 300_000),
		"empty": nil, "sparse": sparse, "one": {1},
	}
	total := 0
	w := newWorld(t, 0, harness.Options{}, func(dir string) {
		if err := os.Mkdir(dir+"/sub", 0o755); err != nil {
			t.Fatal(err)
		}
		for name, data := range files {
			write(t, filepath.Join(dir, name), data)
			total += len(data)
		}
		if err := os.Truncate(dir+"/sparse", 0); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(dir+"/sparse", os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteAt(sparse[30<<20:31<<20], 30<<20)
		}
		if err == nil {
			err = errors.Join(f.Truncate(40<<20), f.Close())
		}
		if err == nil {
			err = os.Symlink("small", dir+"/link")
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	out := harness.Weft(t, "prefetch", w.b.Dir)
	if !strings.Contains(out, "cached 7 files") || !strings.Contains(out, "1 empty") {
		t.Errorf("said %s", out)
	}
	if n, bytes := cached(t, w.b); n != 7 || bytes != int64(total) {
		t.Errorf("%d files with %d bytes are cached, want 7 with %d", n, bytes, total)
	}
	if out := harness.Weft(t, "prefetch", w.b.Dir); !strings.Contains(out, "cached 0 files") || !strings.Contains(out, "7 there already") {
		t.Errorf("the second time: %s", out)
	}
	if out := harness.Weft(t, "status", w.b.Dir); !strings.Contains(out, "7 files cached with ") {
		t.Errorf("status:\n%s", out)
	}
	for name := range files {
		path := filepath.Join(w.b.Dir, name)
		caches := harness.LayoutOf(t, path).Caches
		if name == "empty" {
			continue
		}
		if len(caches) != 1 || caches[0].State != "cached" || !strings.Contains(harness.Weft(t, "layout", path), "  cached: device ") {
			t.Errorf("%s: %+v", name, caches)
			continue
		}
		st, err := os.Stat(w.local.Path(caches[0].DataFile))
		if err != nil || st.Size() != int64(len(files[name])) || name == "sparse" && st.Sys().(*syscall.Stat_t).Blocks > 4<<20/512 {
			t.Errorf("%s: its data file is %+v, %v", name, st, err)
		}
	}
	for _, m := range []*harness.Mount{w.b, w.a} {
		before, far := reads(t, m)
		for name, data := range files {
			check(t, filepath.Join(m.Dir, name), data)
		}
		after, farther := reads(t, m)
		// What is late is asked from another data server as well, which is bounded.
		if after == before || farther-far > uint64(total/10) {
			t.Errorf("%d requests were local, and %d bytes of %d came from elsewhere", after-before, farther-far, total)
		}
	}
	if out := harness.Weft(t, "evict", w.b.Dir); !strings.Contains(out, "evicted 7 copies") {
		t.Errorf("said %s", out)
	}
	if n, _ := cached(t, w.b); n != 0 {
		t.Errorf("%d files are cached", n)
	}
	before, _ := reads(t, w.b)
	for name, data := range files {
		check(t, filepath.Join(w.b.Dir, name), data)
	}
	if after, _ := reads(t, w.b); after != before {
		t.Errorf("%d requests were local", after-before)
	}

	// Not everything can be cached, nor everywhere.
	if code, out := weft(t, "prefetch", t.TempDir()); code != 2 || !strings.Contains(out, "not on a weft mount") {
		t.Errorf("elsewhere: %d, %s", code, out)
	}
	if code, out := weft(t, "prefetch", w.b.Dir, "--cache-size", "many"); code != 1 {
		t.Errorf("many: %d, %s", code, out)
	}
	d := devices(t, w.b)
	for i := range d {
		if !d[i].Local {
			if out := harness.Weft(t, "prefetch", w.b.Dir+"/small", w.b.Dir+"/wide", "--mirror-to", d[i].ID[:12]); !strings.Contains(out, "cached ") {
				t.Errorf("to a remote one: %s", out)
			}
			break
		}
	}
	check(t, w.b.Dir+"/wide", files["wide"])
	harness.Weft(t, "evict", w.b.Dir, "--from", "all")
	if n, _ := cached(t, w.b); n != 0 {
		t.Errorf("%d files are cached", n)
	}
	w.end()
}

// What one mount writes to a file that is cached another one reads at once, in every way of writing.
func TestWriteIsSeen(t *testing.T) {
	w := newWorld(t, 0, harness.Options{}, func(dir string) { write(t, dir+"/f", content(0, 5<<20)) })
	want := content(0, 5<<20)
	reader, err := os.Open(w.b.Dir + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	for round := range 24 {
		harness.Weft(t, "prefetch", w.b.Dir+"/f")
		if n, _ := cached(t, w.b); n != 1 {
			t.Fatalf("round %d: not cached", round)
		}
		check(t, w.b.Dir+"/f", want)
		f, err := os.OpenFile(w.a.Dir+"/f", os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		piece := content(uint64(round), 70_000)
		switch round % 6 {
		case 0, 1:
			_, err = f.WriteAt(piece, int64(round)*100_000)
			copy(want[round*100_000:], piece)
		case 2:
			err = f.Truncate(int64(len(want)) - 300_000)
			want = want[:len(want)-300_000]
		case 3: // what was cut off must not come back
			err = f.Truncate(int64(len(want)) + 300_000)
			want = append(want, make([]byte, 300_000)...)
		case 4:
			_, err = f.WriteAt(piece, int64(len(want)))
			want = append(want, piece...)
		case 5:
			err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 1<<20, 1<<20)
			clear(want[1<<20 : 2<<20])
		}
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		got := make([]byte, len(want)) // before it is closed
		if n, err := reader.ReadAt(got, 0); n != len(want) || !bytes.Equal(got, want) {
			t.Fatalf("round %d: the reader has %d bytes of %d, %v", round, n, len(want), err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		check(t, w.b.Dir+"/f", want)
	}
	reader.Close()
	w.end()
}

// generation is the content of a file in the test below: a number, again and again.
func generation(n uint64, size int) []byte {
	b := make([]byte, size)
	for i := 0; i < size; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], n)
	}
	return b
}

// Files are written by one mount while another one prefetches and reads them: nobody reads anything that is older than what had been
// written when he began to read.
func TestWriters(t *testing.T) {
	const count, size = 4, 3 << 20
	w := newWorld(t, 0, harness.Options{}, func(dir string) {
		for i := range count {
			write(t, fmt.Sprintf("%s/%d", dir, i), generation(1, size))
		}
	})
	var done [count]atomic.Uint64
	var stop atomic.Bool
	var made, local int
	before, _ := reads(t, w.b)
	var work sync.WaitGroup
	for i := range count {
		done[i].Store(1)
		work.Go(func() { // writes a file again and again, with pauses in which it can be cached; ends with stop
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for n := uint64(2); !stop.Load(); n++ {
				f, err := os.OpenFile(fmt.Sprintf("%s/%d", w.a.Dir, i), os.O_WRONLY, 0)
				if err == nil {
					_, err = f.Write(generation(n, size))
				}
				if err == nil {
					done[i].Store(n)
					err = f.Close()
				}
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(time.Duration(r.IntN(600)) * time.Millisecond)
			}
		})
		work.Go(func() { // reads it; ends with stop
			r := rand.New(rand.NewPCG(uint64(i), 2))
			f, err := os.Open(fmt.Sprintf("%s/%d", w.b.Dir, i))
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			buf := make([]byte, 4096)
			for !stop.Load() {
				least := done[i].Load()
				if _, err := f.ReadAt(buf, int64(r.IntN(size/4096))*4096); err != nil {
					t.Error(err)
					return
				}
				if got := binary.LittleEndian.Uint64(buf[r.IntN(512)*8:]); got < least {
					t.Errorf("file %d: read generation %d after %d was written", i, got, least)
					return
				}
			}
		})
	}
	deadline := time.Now().Add(map[bool]time.Duration{false: 6 * time.Second, true: time.Minute}[*long])
	for time.Now().Before(deadline) && !t.Failed() {
		code, out := weft(t, "prefetch", w.b.Dir)
		if code != 0 {
			t.Errorf("prefetch: %d, %s", code, out)
		}
		if !strings.Contains(out, "cached 0 files") {
			made++
		}
	}
	stop.Store(true)
	work.Wait()
	after, _ := reads(t, w.b)
	local = int(after - before)
	t.Logf("%d prefetches have made a copy, %d reads were local", made, local)
	if made == 0 || local == 0 {
		t.Error("nothing was cached")
	}
	for i := range count {
		check(t, fmt.Sprintf("%s/%d", w.b.Dir, i), generation(done[i].Load(), size))
	}
	w.end()
}

// numbers writes a file of 4 MiB again and again, with a number each time, and pauses long enough for it to be cached. It
// goes on after an error, which whoever was lost in the middle of it gets.
const numbers = `while i=$((i+1)); do
	yes $i | dd of="$0" bs=64k count=64 iflag=fullblock conv=notrunc,nocreat status=none || sleep 0.1
	test $((i % 3)) -gt 0 || sleep 0.3
done`

// A mount dies, or stops for longer than its lease, while it writes a file that is being cached elsewhere: nobody ever reads another content
// in the cache than in the file, and afterwards it can be cached.
func TestWriterLost(t *testing.T) {
	const size = 4 << 20
	w := newWorld(t, 0, harness.Options{Lease: 2 * time.Second}, func(dir string) { write(t, dir+"/f", make([]byte, size)) })
	for _, end := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGKILL} {
		c := w.v.Mount(mountOptions()...)
		writer := exec.Command("sh", "-c", numbers, c.Dir+"/f") // not here: each process that is started would close the file, too
		writer.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		if err := writer.Start(); err != nil {
			t.Fatal(err)
		}
		endWriter := sync.OnceFunc(func() {
			syscall.Kill(-writer.Process.Pid, syscall.SIGKILL)
			writer.Wait()
		})
		t.Cleanup(endWriter)
		isCached := func() bool {
			code, out := weft(t, "prefetch", w.b.Dir+"/f")
			return code == 0 && strings.Contains(out, "cached 1 files")
		}
		harness.Await(t, "a cache between two writes", isCached)
		harness.Await(t, "a write, which has ended it", func() bool {
			n, _ := cached(t, w.b)
			return n == 0
		})
		c.Signal(end)
		harness.Await(t, "a cache after the writer was lost", isCached)
		// The file is fenced now: nothing changes any more, until the lost one begins anew.
		want, err := os.ReadFile(w.a.Dir + "/f")
		if err != nil || len(want) != size {
			t.Fatalf("%d bytes: %v", len(want), err)
		}
		for range 3 {
			check(t, w.b.Dir+"/f", want)
		}
		if n, _ := cached(t, w.b); n != 1 {
			t.Errorf("%d files are cached", n)
		}
		if end == syscall.SIGSTOP {
			c.Signal(syscall.SIGCONT)
			harness.Await(t, "a write of the one that was lost, which has ended the cache", func() bool {
				n, _ := cached(t, w.b)
				return n == 0
			})
			endWriter()
			c.Unmount()
		} else {
			c.Abort()
			endWriter()
		}
		now, err := os.ReadFile(w.a.Dir + "/f")
		if err != nil || end == syscall.SIGKILL && !bytes.Equal(now, want) {
			t.Errorf("the file has changed: %v", err)
		}
		check(t, w.b.Dir+"/f", now)
	}
	w.end()
}

// Files are removed, cut, renamed and replaced while they are prefetched.
func TestChanges(t *testing.T) {
	const count = 40
	name := func(dir string, i int) string { return fmt.Sprintf("%s/%d", dir, i) }
	w := newWorld(t, 0, harness.Options{}, func(dir string) {
		for i := range count {
			write(t, name(dir, i), content(uint64(i), 2<<20))
		}
	})
	var work sync.WaitGroup
	work.Go(func() { // ends when all are changed
		for i := range count {
			var err error
			switch i % 4 {
			case 0:
				err = os.Remove(name(w.a.Dir, i))
			case 1:
				err = os.Truncate(name(w.a.Dir, i), 1<<20)
			case 2:
				err = os.Rename(name(w.a.Dir, i), name(w.a.Dir, i+1000))
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
	for range 4 {
		if code, out := weft(t, "prefetch", w.b.Dir); code != 0 {
			t.Errorf("prefetch: %d, %s", code, out)
		}
	}
	work.Wait()
	harness.Weft(t, "prefetch", w.b.Dir)
	if n, bytes := cached(t, w.b); n != count*3/4 || bytes != count/4*(1+2+2)<<20 {
		t.Errorf("%d files with %d bytes are cached", n, bytes)
	}
	for i := range count {
		want := content(uint64(i), 2<<20)
		switch i % 4 {
		case 1:
			check(t, name(w.b.Dir, i), want[:1<<20])
		case 2:
			check(t, name(w.b.Dir, i+1000), want)
		case 3:
			check(t, name(w.b.Dir, i), want)
		}
	}
	if err := os.RemoveAll(w.a.Dir + "/1"); err != nil {
		t.Fatal(err)
	}
	w.end()
}

// The caches there may be are bounded: those used longest ago go. More than the bound is not begun.
func TestCacheSize(t *testing.T) {
	name := func(dir string, i int) string { return fmt.Sprintf("%s/%d", dir, i) }
	w := newWorld(t, 0, harness.Options{}, func(dir string) {
		for i := range 6 {
			write(t, name(dir, i), content(uint64(i), 1<<20))
		}
	})
	is := func(want ...int) {
		t.Helper()
		have := []int{}
		for i := range 6 {
			if len(harness.LayoutOf(t, name(w.b.Dir, i)).Caches) > 0 {
				have = append(have, i)
			}
		}
		if fmt.Sprint(have) != fmt.Sprint(want) {
			t.Errorf("cached are %v, want %v", have, want)
		}
	}
	for i := range 3 {
		harness.Weft(t, "prefetch", name(w.b.Dir, i), "--cache-size", "3MiB")
	}
	is(0, 1, 2)
	check(t, name(w.b.Dir, 0), content(0, 1<<20))
	harness.Weft(t, "prefetch", name(w.b.Dir, 3), "--cache-size", "3MiB")
	is(0, 2, 3)
	code, out := weft(t, "prefetch", w.b.Dir, "--cache-size", "3MiB")
	if code != 2 || !strings.Contains(out, "3 files fit") {
		t.Errorf("more than fits: %d, %s", code, out)
	}
	if n, bytes := cached(t, w.b); n != 3 || bytes != 3<<20 {
		t.Errorf("%d files with %d bytes are cached", n, bytes)
	}
	w.end()
}

// The local data server is too small: prefetch stops, and what was begun goes.
func TestFull(t *testing.T) {
	const count = 8
	name := func(dir string, i int) string { return fmt.Sprintf("%s/%d", dir, i) }
	w := newWorld(t, 24<<20, harness.Options{}, func(dir string) {
		for i := range count {
			write(t, name(dir, i), content(uint64(i), 5<<20))
		}
	})
	code, out := weft(t, "prefetch", w.b.Dir)
	if code != 2 || !strings.Contains(out, "files fit") {
		t.Errorf("prefetch: %d, %s", code, out)
	}
	for i := range count {
		check(t, name(w.b.Dir, i), content(uint64(i), 5<<20))
		for _, c := range harness.LayoutOf(t, name(w.b.Dir, i)).Caches {
			if c.State != "cached" {
				t.Errorf("file %d is %s", i, c.State)
			}
		}
	}
	// The data file of a cache that did not fit is removed in the background.
	harness.Await(t, "room on the local data server", func() bool {
		var st unix.Statfs_t
		return unix.Statfs(w.local.Dir, &st) == nil && st.Bavail > 0
	})
	w.end()
}

// startPrefetch starts it and waits until a file is being copied.
func (w *world) startPrefetch() *exec.Cmd {
	w.t.Helper()
	cmd := exec.Command(harness.Bin(w.t, "weft"), "prefetch", w.b.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	harness.Await(w.t, "a cache", func() bool {
		n, _ := cached(w.t, w.b)
		return n > 0
	})
	return cmd
}

// states are the states of all caches of files in a directory.
func states(t *testing.T, dir string, count int) map[string]int {
	t.Helper()
	all := map[string]int{}
	for i := range count {
		for _, c := range harness.LayoutOf(t, fmt.Sprintf("%s/%d", dir, i)).Caches {
			all[c.State]++
		}
	}
	return all
}

// A prefetch is interrupted, or its mount dies, or the service: nothing half is left, and what is read is right.
func TestInterrupted(t *testing.T) {
	const count, size = 24, 16 << 20
	for _, how := range []string{"SIGINT", "mount", "service"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld(t, 0, harness.Options{Lease: 3 * time.Second}, func(dir string) {
				for i := range count {
					write(t, fmt.Sprintf("%s/%d", dir, i), content(uint64(i), size))
				}
			})
			cmd := w.startPrefetch()
			switch how {
			case "SIGINT":
				cmd.Process.Signal(syscall.SIGINT)
			case "mount":
				w.b.Signal(syscall.SIGKILL)
			case "service":
				w.v.Kill()
				w.v.Start()
			}
			err := cmd.Wait()
			t.Logf("prefetch ended with %v", err)
			if how == "mount" {
				w.b.Abort()
			}
			harness.Await(t, "what was not finished is gone", func() bool {
				s := states(t, w.a.Dir, count)
				return s["filling"] == 0 && s["dropped"] == 0
			})
			for i := range count {
				check(t, fmt.Sprintf("%s/%d", w.a.Dir, i), content(uint64(i), size))
			}
			if how != "mount" {
				harness.Weft(t, "prefetch", w.b.Dir)
				if s := states(t, w.b.Dir, count); s["cached"] != count {
					t.Errorf("afterwards %v", s)
				}
				w.b.Unmount()
			}
			w.a.Unmount()
			w.v.Stop()
			w.v.Fsck()
		})
	}
}

// Ioctls as the README has them.
const (
	ioctlWillNeed = 0x5770
	ioctlDontNeed = 0x5771
)

// Scripts and programs ask for a file without the command.
func TestAdvise(t *testing.T) {
	w := newWorld(t, 0, harness.Options{}, func(dir string) { write(t, dir+"/f", content(1, 3<<20)) })
	path := w.b.Dir + "/f"
	const attr = "weft.advise"
	is := func(want string) {
		t.Helper()
		harness.Await(t, "advice "+want, func() bool {
			got, err := xattr.Get(path, attr)
			if err != nil {
				t.Fatal(err)
			}
			return string(got) == want
		})
	}
	set := func(path, value string) error {
		err := xattr.Set(path, attr, []byte(value))
		errno := syscall.Errno(0)
		errors.As(err, &errno)
		if errno != 0 {
			return errno
		}
		return err
	}
	is("none")
	if err := set(path, "willneed"); err != nil {
		t.Fatal(err)
	}
	is("cached")
	before, _ := reads(t, w.b)
	check(t, path, content(1, 3<<20))
	if after, _ := reads(t, w.b); after == before {
		t.Error("no read was local")
	}
	if err := set(path, "dontneed"); err != nil {
		t.Fatal(err)
	}
	is("none")
	for value, want := range map[string]error{"": unix.EINVAL, "random": unix.EINVAL} {
		if err := set(path, value); err != want {
			t.Errorf("%q: %v, want %v", value, err, want)
		}
	}
	if err := set(w.b.Dir, "willneed"); err != unix.EISDIR {
		t.Errorf("a directory: %v", err)
	}
	if names, err := xattr.List(path); err != nil || len(names) != 0 {
		t.Errorf("attributes %v, %v", names, err)
	}

	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ioctl := func(f *os.File, cmd uintptr) error {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), cmd, 0); errno != 0 {
			return errno
		}
		return nil
	}
	if err := ioctl(f, ioctlWillNeed); err != nil {
		t.Fatal(err)
	}
	is("cached")
	if err := ioctl(f, ioctlDontNeed); err != nil {
		t.Fatal(err)
	}
	is("none")
	if err := ioctl(f, 0x5772); err != unix.ENOTTY {
		t.Errorf("another ioctl: %v", err)
	}
	f.Close()

	// The local data server is drained: its caches go, and it can be removed.
	if err := set(path, "willneed"); err != nil {
		t.Fatal(err)
	}
	is("cached")
	local := devices(t, w.b)
	for i := range local {
		if local[i].Local {
			harness.Weft(t, "admin", "device", "drain", local[i].ID, "--server", w.v.Addr)
			is("none")
			harness.Await(t, "it is empty", func() bool {
				code, _ := weft(t, "admin", "device", "remove", local[i].ID, "--server", w.v.Addr)
				return code == 0
			})
		}
	}
	check(t, path, content(1, 3<<20))
	w.end()
}

// A cache that the kernel reads by itself stays, and is written by whoever writes the file, until it is closed.
func TestPassed(t *testing.T) {
	data := content(1, 3<<20)
	w := newWorld(t, 0, harness.Options{}, func(dir string) { write(t, dir+"/f", data) })
	c := w.v.Mount(append(mountOptions(), "passthrough=ro")...)
	path := c.Dir + "/f"
	harness.Await(t, "a local data server", func() bool {
		for _, d := range devices(t, c) {
			if d.Local {
				return true
			}
		}
		return false
	})
	harness.Weft(t, "prefetch", path)
	r, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if out := harness.Weft(t, "status", c.Dir); !strings.Contains(out, "passthrough: 1 files are served by the kernel") {
		t.Fatalf("not passed:\n%s", out)
	}
	seen := func(when string) {
		t.Helper()
		got := make([]byte, len(data)+1)
		if n, err := r.ReadAt(got, 0); n != len(data) || err != io.EOF || !bytes.Equal(got[:n], data) {
			t.Fatalf("%s: %d of %d bytes, %v, as they should be: %t", when, n, len(data), err, bytes.Equal(got[:min(n, len(data))], data[:min(n, len(data))]))
		}
	}
	seen("prefetched")
	other, err := os.OpenFile(w.a.Dir+"/f", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for i := range 100 {
		part := content(uint64(i+2), 70_000)
		off := i * 25_001
		copy(data[off:], part)
		if _, err := other.WriteAt(part, int64(off)); err != nil {
			t.Fatal(err)
		}
		seen(fmt.Sprint("after write ", i))
	}
	if _, err := os.OpenFile(path, os.O_RDWR, 0); !errors.Is(err, unix.ETXTBSY) {
		t.Errorf("opened for reading and writing: %v", err)
	}
	here, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := here.WriteAt([]byte("here"), 5); err != nil {
		t.Fatal(err)
	}
	here.Close()
	copy(data[5:], "here")
	seen("after a write on the same mount")
	for _, size := range []int{len(data) + 5000, len(data) - 70_000} {
		if err := other.Truncate(int64(size)); err != nil {
			t.Fatal(err)
		}
		data = append(data, make([]byte, 5000)...)[:size]
		seen(fmt.Sprint("cut to ", size))
	}
	if out, err := exec.Command(harness.Bin(t, "weft"), "evict", path).CombinedOutput(); err == nil || !bytes.Contains(out, []byte("has the file open")) {
		t.Errorf("evicted while it is read: %v: %s", err, out)
	}
	r.Close()
	other.Close()
	harness.Weft(t, "evict", path) // it may take a moment until the service knows that the file is closed
	if n, _ := cached(t, c); n != 0 {
		t.Errorf("%d files are cached", n)
	}
	check(t, path, data)
	c.Unmount()
	w.end()
}
