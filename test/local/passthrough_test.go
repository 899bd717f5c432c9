package local

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of what is random; printed if a test fails")

// passing is what weft status says of what the kernel serves by itself.
type passing struct {
	PID         int `json:"pid"`
	Passthrough []struct {
		Inode uint64
		Mode  string
		PIDs  []int `json:"pids"`
	}
	Why     string `json:"no_passthrough"`
	Service struct {
		Connected bool
		HeldUp    []struct {
			Inode uint64
			What  string
			Hosts []string
		} `json:"held_up"`
	}
	Devices []struct {
		Address   string
		DataFiles int64 `json:"data_files"`
	}
}

func passingOf(t *testing.T, m *harness.Mount) passing {
	t.Helper()
	var st []passing
	out := harness.Weft(t, "status", "--json", m.Dir)
	if err := json.Unmarshal([]byte(out), &st); err != nil || len(st) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	return st[0]
}

// mode is how the kernel serves a file by itself, "" if it does not.
func mode(t *testing.T, m *harness.Mount, f *os.File) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	for _, p := range passingOf(t, m).Passthrough {
		if p.Inode == st.Ino {
			if !slices.Contains(p.PIDs, os.Getpid()) {
				t.Errorf("it is said to be open in %v, not in %d", p.PIDs, os.Getpid())
			}
			return p.Mode
		}
	}
	return ""
}

func wantMode(t *testing.T, m *harness.Mount, f *os.File, want string) {
	t.Helper()
	if got := mode(t, m, f); got != want {
		t.Errorf("%s is open in passthrough %q, want %q: %+v", f.Name(), got, want, passingOf(t, m))
	}
}

// wholeVolume is a volume whose files are whole on this host, with a mount.
func wholeVolume(t *testing.T, opts harness.Options, options ...string) (*harness.Volume, *harness.Mount) {
	t.Helper()
	v := harness.NewVolume(t, opts)
	m := v.Mount(append(mountOptions(), options...)...)
	devices(t, m) // when it answers
	harness.Weft(t, "layout", "set", m.Dir, "--placement", "local")
	return v, m
}

func open(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func put(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, what string, f io.ReaderAt, data []byte) {
	t.Helper()
	got := make([]byte, len(data)+1)
	n, err := f.ReadAt(got, 0)
	if err != io.EOF || !bytes.Equal(got[:n], data) {
		t.Errorf("%s: %d bytes %.40q, %v; want %d bytes %.40q", what, n, got[:n], err, len(data), data)
	}
}

func wantSize(t *testing.T, path string, size int64) {
	t.Helper()
	st, err := os.Stat(path)
	if err != nil || st.Size() != size {
		t.Errorf("%s has %v bytes, want %d: %v", path, st, size, err)
	}
}

// text is n bytes that differ from place to place.
func text(n int) []byte {
	b := make([]byte, 0, n+16)
	for len(b) < n {
		b = fmt.Appendf(b, "%015x\n", len(b))
	}
	return b[:n]
}

// answers counts what the serving process answers the kernel while f runs.
func answers(t *testing.T, m *harness.Mount, f func()) int {
	t.Helper()
	harness.Need(t, "strace")
	out := filepath.Join(t.TempDir(), "trace")
	trace := exec.Command("strace", "-f", "-yy", "-s", "0", "-e", "trace=write,writev,pwritev,pwritev2,splice,io_uring_enter", "-o", out, "-p", fmt.Sprint(m.Pid()))
	trace.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := trace.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "strace", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.Pid()))
		return err == nil && !strings.Contains(string(b), "TracerPid:\t0\n")
	})
	f()
	trace.Process.Signal(syscall.SIGINT)
	trace.Wait()
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return len(regexp.MustCompile(`\(\d+<[^>]*/dev/fuse`).FindAll(b, -1))
}

// descriptors counts those of a process.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// A file on this host that is open for reading is read by the kernel, whichever way, and nothing is left of that afterwards.
func TestPassthroughRead(t *testing.T) {
	_, m := wholeVolume(t, harness.Options{})
	data := text(3<<20 + 17)
	put(t, m.Dir+"/f", data)
	harness.Weft(t, "sync", m.Dir)
	readAll := func(f *os.File) {
		want(t, "pread", f, data)
		if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, data) {
			t.Errorf("read %d bytes: %v", len(got), err)
		}
		for _, flags := range []int{unix.MAP_SHARED, unix.MAP_PRIVATE} {
			got, err := unix.Mmap(int(f.Fd()), 0, len(data), unix.PROT_READ, flags)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("mmap of %d bytes: %v", len(got), err)
				continue
			}
			unix.Munmap(got)
		}
	}
	f := open(t, m.Dir+"/f", os.O_RDONLY)
	wantMode(t, m, f, "ro")
	if n := answers(t, m, func() { readAll(f) }); n > 0 {
		t.Errorf("%d requests while the kernel was to read by itself", n)
	}
	f.Close()
	harness.Await(t, "the end of passthrough", func() bool { return len(passingOf(t, m).Passthrough) == 0 })

	// What counts requests sees some where there are some.
	g := open(t, m.Dir+"/f", os.O_RDWR)
	wantMode(t, m, g, "")
	if n := answers(t, m, func() { want(t, "daemon", g, data) }); n == 0 {
		t.Error("no request of a file that is not passed")
	}
	g.Close()

	var before int
	for n := range 1100 {
		f, err := os.Open(m.Dir + "/f")
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if n == 99 {
			before = descriptors(t, m.Pid())
		}
	}
	harness.Await(t, "no more descriptors than before", func() bool { return descriptors(t, m.Pid()) <= before+2 })
}

// Files that are not one data file on this host are served by the daemon.
func TestPassthroughNot(t *testing.T) {
	for _, c := range []struct {
		name    string
		opts    harness.Options
		options []string
		layout  []string
		size    int
	}{
		{"off", harness.Options{}, []string{"passthrough=off"}, nil, 100_000},
		{"striped", harness.Options{}, []string{"passthrough=rw"}, []string{"--placement", "spread"}, 3 << 20},
		{"mirrored", harness.Options{}, []string{"passthrough=rw"}, []string{"--mirrors", "2"}, 100_000},
		{"empty", harness.Options{}, nil, nil, 0},
		{"localio=off", harness.Options{}, []string{"localio=off", "passthrough=rw"}, nil, 100_000},
		{"servers that lend nothing", harness.Options{Remote: true}, []string{"passthrough=rw"}, nil, 100_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, m := wholeVolume(t, c.opts, c.options...)
			if c.layout != nil {
				harness.Weft(t, append([]string{"layout", "set", m.Dir}, c.layout...)...)
			}
			data := text(c.size)
			put(t, m.Dir+"/f", data)
			for _, flags := range []int{os.O_RDONLY, os.O_RDWR} {
				if c.size == 0 && flags == os.O_RDWR {
					continue // it is to be written
				}
				f := open(t, m.Dir+"/f", flags)
				wantMode(t, m, f, "")
				want(t, "not passed", f, data)
				f.Close()
			}
		})
	}
}

// While a file is open in passthrough for reading, it can be opened in all other ways, and all see the same.
func TestPassthroughJoin(t *testing.T) {
	_, m := wholeVolume(t, harness.Options{})
	path := m.Dir + "/f"
	data := text(64 << 10)
	put(t, path, data)
	r := open(t, path, os.O_RDONLY)
	mapped, err := unix.Mmap(int(r.Fd()), 0, len(data), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	wantMode(t, m, r, "ro")
	same := func(what string, others ...*os.File) {
		t.Helper()
		for _, f := range append(others, r) {
			want(t, what, f, data)
		}
		if n := min(len(mapped), len(data)); !bytes.Equal(mapped[:n], data[:n]) {
			t.Errorf("%s: it is not in the mapping", what)
		}
		wantSize(t, path, int64(len(data)))
	}
	write := func(f *os.File, at int, s string) {
		t.Helper()
		if _, err := f.WriteAt([]byte(s), int64(at)); err != nil {
			t.Error(err)
		}
		copy(data[at:], s)
	}
	for n, flags := range []int{os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_SYNC} {
		f := open(t, path, flags)
		write(f, 1000*(n+1), fmt.Sprintf("written with %x", flags))
		same("write")
		if flags != os.O_WRONLY {
			same("write", f)
		}
		f.Close()
		same("write and close")
	}
	second := open(t, path, os.O_RDONLY)
	same("second reader", second)
	a := open(t, path, os.O_WRONLY|os.O_APPEND)
	if _, err := a.WriteString("appended"); err != nil {
		t.Error(err)
	}
	data = append(data, "appended"...)
	same("append", second)

	// Shared mappings for writing, which the kernel serves from the data file.
	rw := open(t, path, os.O_RDWR)
	shared, err := unix.Mmap(int(rw.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	before, _ := os.Stat(path)
	time.Sleep(20 * time.Millisecond) // the clock of files has ticks
	copy(shared[100:], "by a mapping")
	copy(data[100:], "by a mapping")
	same("shared mapping", rw, second)
	if err := rw.Sync(); err != nil {
		t.Error(err)
	}
	if after, _ := os.Stat(path); !after.ModTime().After(before.ModTime()) {
		t.Errorf("written by a mapping, modified %v, before that %v", after.ModTime(), before.ModTime())
	}
	write(rw, 200, "by the daemon")
	same("write", rw)
	if string(shared[200:213]) != "by the daemon" {
		t.Errorf("the mapping has %q", shared[200:213])
	}
	unix.Munmap(shared)

	direct := open(t, path, os.O_RDONLY|syscall.O_DIRECT)
	block, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		t.Fatal(err)
	}
	if n, err := direct.ReadAt(block, 0); err != nil || !bytes.Equal(block[:n], data[:n]) || n != len(block) {
		t.Errorf("O_DIRECT: %d bytes, %v", n, err)
	}
	fd, err := unix.Open(path, unix.O_PATH, 0)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != int64(len(data)) {
		t.Errorf("fstat of O_PATH: %d bytes, %v", st.Size, err)
	}
	unix.Close(fd)
	if err := os.Truncate(path, 5000); err != nil {
		t.Error(err)
	}
	data = data[:5000]
	want(t, "truncated", r, data)
	if err := rw.Truncate(9000); err != nil {
		t.Error(err)
	}
	data = append(data, make([]byte, 4000)...)
	want(t, "truncated to more", r, data)
	wantMode(t, m, r, "ro")

	prog, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.Dir+"/true", prog, 0o755); err != nil {
		t.Fatal(err)
	}
	p := open(t, m.Dir+"/true", os.O_RDONLY)
	for range 3 {
		if out, err := exec.Command(m.Dir + "/true").CombinedOutput(); err != nil {
			t.Errorf("a program: %v: %s", err, out)
		}
	}
	wantMode(t, m, p, "ro")
}

// A file that is open without a backing, and mapped, is not given one: the kernel would refuse the open.
func TestPassthroughAfterDirect(t *testing.T) {
	_, m := wholeVolume(t, harness.Options{})
	path := m.Dir + "/f"
	data := text(64 << 10)
	put(t, path, data)
	w := open(t, path, os.O_RDWR)
	shared, err := unix.Mmap(int(w.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	copy(shared[10:], "mapped")
	copy(data[10:], "mapped")
	if err := unix.Msync(shared, unix.MS_SYNC); err != nil {
		t.Error(err)
	}
	w.Close() // the mapping keeps it open
	r := open(t, path, os.O_RDONLY)
	wantMode(t, m, r, "")
	want(t, "beside a mapping", r, data)
	unix.Munmap(shared)
	r.Close()
	harness.Await(t, "passthrough once nothing is open", func() bool {
		r := open(t, path, os.O_RDONLY)
		defer r.Close()
		want(t, "by itself", r, data)
		return mode(t, m, r) == "ro"
	})
}

// Many open, read, write, map and close the same few files in all ways at the same time: no open fails, and what is read is what
// was written. Each byte of a file is at any time one that somebody has written there.
func TestPassthroughStress(t *testing.T) {
	for _, option := range []string{"passthrough=ro", "passthrough=rw"} {
		t.Run(option, func(t *testing.T) {
			t.Logf("-args -seed %d", *seed)
			_, m := wholeVolume(t, harness.Options{}, option)
			const size = 32 << 10
			const files = 3
			for n := range files {
				put(t, fmt.Sprintf("%s/%d", m.Dir, n), bytes.Repeat([]byte{byte('a' + n)}, size))
			}
			var all sync.WaitGroup
			end := time.Now().Add(4 * time.Second)
			for worker := range 12 {
				all.Go(func() { // ends with the time
					r := rand.New(rand.NewPCG(*seed, uint64(worker)))
					for time.Now().Before(end) && !t.Failed() {
						n := r.IntN(files)
						flags := []int{os.O_RDONLY, os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_SYNC, os.O_RDONLY | syscall.O_DIRECT}[r.IntN(6)]
						if err := useFile(fmt.Sprintf("%s/%d", m.Dir, n), flags, r, size, byte('a'+n)); err != nil {
							t.Errorf("file %d with flags %x: %v", n, flags, err)
						}
					}
				})
			}
			all.Wait()
			harness.Await(t, "the end of passthrough", func() bool { return len(passingOf(t, m).Passthrough) == 0 })
			for n := range files {
				wantSize(t, fmt.Sprintf("%s/%d", m.Dir, n), size)
			}
		})
	}
}

// useFile opens a file of size bytes, does something with it, and closes it. Its bytes are c, or that in upper case.
func useFile(path string, flags int, r *rand.Rand, size int, c byte) error {
	fd, err := unix.Open(path, flags, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	good := func(what string, b []byte) error {
		for at, x := range b {
			if x != c && x != c-'a'+'A' {
				return fmt.Errorf("%s: %q at %d of %d", what, x, at, len(b))
			}
		}
		return nil
	}
	var errs []error
	if flags&unix.O_ACCMODE != unix.O_WRONLY {
		m, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("mmap: %w", err)
		}
		defer unix.Munmap(m)
		b := m
		if flags&unix.O_DIRECT == 0 {
			b = make([]byte, size)
			if n, err := unix.Pread(fd, b, 0); err != nil || n != size {
				errs = append(errs, fmt.Errorf("read %d bytes: %w", n, err))
			}
		}
		errs = append(errs, good("read", b), good("mapping", m))
	}
	if flags&unix.O_ACCMODE != unix.O_RDONLY {
		if r.IntN(2) == 0 {
			c -= 'a' - 'A'
		}
		off := r.IntN(size)
		if _, err := unix.Pwrite(fd, bytes.Repeat([]byte{c}, 1+r.IntN(size-off)), int64(off)); err != nil {
			errs = append(errs, err)
		}
		if r.IntN(4) == 0 {
			errs = append(errs, unix.Fsync(fd))
		}
	}
	return errors.Join(errs...)
}

// What is done to a file on another mount is seen at once where it is open in passthrough.
func TestPassthroughOtherMount(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{})
	b := v.Mount(append(mountOptions(), "passthrough=off")...)
	c := v.Mount(append(mountOptions(), "localio=off")...)
	data := text(10_000)
	put(t, a.Dir+"/f", data)
	r := open(t, a.Dir+"/f", os.O_RDONLY)
	wantMode(t, a, r, "ro")
	for n := range 100 {
		w := open(t, []*harness.Mount{b, c}[n%2].Dir+"/f", os.O_RDWR)
		s := fmt.Sprintf("round %d", n)
		at := []int{n * 100, len(data)}[n%3/2]
		if _, err := w.WriteAt([]byte(s), int64(at)); err != nil {
			t.Fatal(err)
		}
		data = append(data[:at], append([]byte(s), data[min(len(data), at+len(s)):]...)...)
		want(t, s, r, data)
		w.Close()
	}
	wantMode(t, a, r, "ro")
	for _, size := range []int{20_000, 300, 5_000, 0, 100} {
		if err := os.Truncate(b.Dir+"/f", int64(size)); err != nil {
			t.Fatal(err)
		}
		data = append(data[:min(size, len(data))], make([]byte, size-min(size, len(data)))...)
		want(t, fmt.Sprintf("truncated to %d", size), r, data)
		wantSize(t, a.Dir+"/f", int64(size))
	}
	put(t, b.Dir+"/g", []byte("another"))
	old := open(t, a.Dir+"/g", os.O_RDONLY)
	wantMode(t, a, old, "ro")
	put(t, b.Dir+"/h", []byte("new"))
	if err := os.Rename(b.Dir+"/h", b.Dir+"/g"); err != nil {
		t.Fatal(err)
	}
	want(t, "replaced", old, []byte("another"))
	if got, err := os.ReadFile(a.Dir + "/g"); err != nil || string(got) != "new" {
		t.Errorf("%q, %v", got, err)
	}
	if err := os.Remove(b.Dir + "/f"); err != nil {
		t.Fatal(err)
	}
	want(t, "removed", r, data)
	want(t, "replaced", old, []byte("another"))
}

// With passthrough=rw the kernel writes by itself; others see what it has written at once.
func TestPassthroughWrite(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{}, "passthrough=rw")
	b := v.Mount(append(mountOptions(), "passthrough=off")...)
	path, there := a.Dir+"/f", b.Dir+"/f"
	data := text(1 << 20)
	f := open(t, path, os.O_RDWR|os.O_CREATE) // a new file, too
	wantMode(t, a, f, "rw")
	if _, err := f.Write(data[:1]); err != nil { // at the first one the kernel asks for capabilities
		t.Fatal(err)
	}
	n := answers(t, a, func() {
		for at := 0; at < len(data); at += 64 << 10 {
			if _, err := f.WriteAt(data[at:at+64<<10], int64(at)); err != nil {
				t.Error(err)
			}
		}
		want(t, "written", f, data)
	})
	if n > 0 {
		t.Errorf("%d requests while the kernel was to write by itself", n)
	}
	wantSize(t, there, int64(len(data)))
	wantSize(t, path, int64(len(data)))
	for n := range 30 {
		before, err := os.Stat(there)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
		if _, err := f.WriteAt([]byte("more"), int64(len(data))); err != nil {
			t.Fatal(err)
		}
		data = append(data, "more"...)
		after, err := os.Stat(there)
		if err != nil || after.Size() != int64(len(data)) || !after.ModTime().After(before.ModTime()) {
			t.Fatalf("round %d: on the other mount it has %d bytes of %d, modified %v, before that %v: %v", n, after.Size(), len(data), after.ModTime(), before.ModTime(), err)
		}
		if got, err := os.ReadFile(there); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("round %d: on the other mount %d bytes of %d: %v", n, len(got), len(data), err)
		}
	}

	// Another mount appends, and truncates, and is seen; so is what the kernel writes afterwards.
	for n := range 10 {
		w := open(t, there, os.O_WRONLY|os.O_APPEND)
		if _, err := w.WriteString("appended"); err != nil {
			t.Fatal(err)
		}
		w.Close()
		data = append(data, "appended"...)
		want(t, "append on another mount", f, data)
		for _, m := range []string{there, path} {
			size := []int{100, 5000, 0, 70_000}[n%4]
			if err := os.Truncate(m, int64(size)); err != nil {
				t.Fatal(err)
			}
			data = append(data[:min(size, len(data))], make([]byte, size-min(size, len(data)))...)
			want(t, "truncated", f, data)
			wantSize(t, there, int64(size))
			wantSize(t, path, int64(size))
			if _, err := f.WriteAt([]byte("after that"), int64(len(data))); err != nil {
				t.Fatal(err)
			}
			data = append(data, "after that"...)
			wantSize(t, there, int64(len(data)))
			if got, err := os.ReadFile(there); err != nil || !bytes.Equal(got, data) {
				t.Errorf("on the other mount %d bytes of %d: %v", len(got), len(data), err)
			}
		}
	}
	wantMode(t, a, f, "rw")

	// A time that is set is later than what was written before, as cp -p wants it.
	when := time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)
	if _, err := f.WriteAt([]byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, when, when); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Error(err)
	}
	harness.Weft(t, "sync", a.Dir)
	for _, p := range []string{path, there} {
		if st, err := os.Stat(p); err != nil || !st.ModTime().Equal(when) {
			t.Errorf("%s was modified %v, want %v: %v", p, st.ModTime(), when, err)
		}
	}

	// What each write has to be acknowledged for is not passed.
	for _, flags := range []int{os.O_RDWR | os.O_APPEND, os.O_RDWR | os.O_SYNC, os.O_WRONLY | syscall.O_DSYNC} {
		f := open(t, path, flags)
		wantMode(t, a, f, "")
		f.Close()
	}
	put(t, a.Dir+"/suid", text(100))
	if err := os.Chmod(a.Dir+"/suid", 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	s := open(t, a.Dir+"/suid", os.O_RDWR)
	wantMode(t, a, s, "")
}

// Two mounts write the same file by the kernel.
func TestPassthroughTwoWriters(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{}, "passthrough=rw")
	b := v.Mount(append(mountOptions(), "passthrough=rw")...)
	devices(t, b)
	var data []byte
	f := open(t, a.Dir+"/f", os.O_RDWR|os.O_CREATE)
	g := open(t, b.Dir+"/f", os.O_RDWR)
	wantMode(t, a, f, "rw")
	wantMode(t, b, g, "rw")
	for n := range 100 {
		w, r := f, g
		if n%2 > 0 {
			w, r = g, f
		}
		s := fmt.Sprintf("round %d\n", n)
		if _, err := w.WriteAt([]byte(s), int64(len(data))); err != nil {
			t.Fatal(err)
		}
		data = append(data, s...)
		want(t, s, r, data)
		for _, f := range []*os.File{f, g} {
			if st, err := f.Stat(); err != nil || st.Size() != int64(len(data)) {
				t.Fatalf("%s has %d bytes of %d: %v", f.Name(), st.Size(), len(data), err)
			}
		}
	}
	if err := errors.Join(f.Sync(), f.Close(), g.Close()); err != nil {
		t.Error(err)
	}
	for _, m := range []*harness.Mount{a, b} {
		wantSize(t, m.Dir+"/f", int64(len(data)))
	}
}

// What was written by the kernel and made stable is there after everything has been killed, also with its size.
func TestPassthroughDurable(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{Lease: 2 * time.Second}, "passthrough=rw")
	data := text(300_001)
	put(t, a.Dir+"/closed", data)
	cp := exec.Command("cp", a.Dir+"/closed", a.Dir+"/copied")
	if out, err := cp.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	harness.Weft(t, "sync", a.Dir)
	f := open(t, a.Dir+"/synced", os.O_RDWR|os.O_CREATE)
	wantMode(t, a, f, "rw")
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	unsynced := open(t, a.Dir+"/unsynced", os.O_RDWR|os.O_CREATE)
	if _, err := unsynced.Write(data); err != nil {
		t.Fatal(err)
	}
	a.Abort()
	f.Close()
	unsynced.Close()
	v.Kill()
	v.Start()
	b := v.Mount(mountOptions()...)
	for _, name := range []string{"closed", "copied", "synced"} {
		if got, err := os.ReadFile(b.Dir + "/" + name); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes of %d: %v", name, len(got), len(data), err)
		}
	}
	// The data file knows how far the dead client had got.
	if got, err := os.ReadFile(b.Dir + "/unsynced"); err != nil || !bytes.Equal(got, data) {
		t.Errorf("not made stable: %d bytes of %d: %v", len(got), len(data), err)
	}
	b.Unmount()
	v.Stop()
	v.Fsck()
}

// A time that is set counts until the next write, however soon that comes, and both outlive all processes.
func TestPassthroughTouch(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{Lease: 2 * time.Second}, "passthrough=rw")
	b := v.Mount(append(mountOptions(), "passthrough=off")...)
	f := open(t, a.Dir+"/f", os.O_RDWR|os.O_CREATE)
	wantMode(t, a, f, "rw")
	size := int64(0)
	old := time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)
	wantTime := func(what, path string, ok func(time.Time) bool) {
		t.Helper()
		if st, err := os.Stat(path); err != nil || st.Size() != size || !ok(st.ModTime()) {
			t.Fatalf("%s: %s has %d bytes of %d, modified %v: %v", what, path, st.Size(), size, st.ModTime(), err)
		}
	}
	set := func(at time.Time) bool { return at.Equal(old) }
	lately := func(at time.Time) bool { return time.Since(at) < time.Hour }
	for n := range 50 {
		for k := range 3 { // before that, after that, and longer
			if k == 1 {
				if err := os.Chtimes(f.Name(), old, old); err != nil {
					t.Fatal(err)
				}
				if n%2 == 0 {
					wantTime("set", b.Dir+"/f", set)
				}
			}
			at := int64(0)
			if k == 2 {
				at = size
			}
			if _, err := f.WriteAt([]byte{byte(n)}, at); err != nil {
				t.Fatal(err)
			}
			size = max(size, at+1)
			if k == 1 {
				wantTime("written after that", b.Dir+"/f", lately)
			}
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	g := open(t, a.Dir+"/g", os.O_RDWR|os.O_CREATE)
	if _, err := g.Write(text(int(size))); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chtimes(g.Name(), old, old), g.Sync()); err != nil {
		t.Fatal(err)
	}
	a.Abort()
	f.Close()
	g.Close()
	b.Unmount()
	v.Kill()
	v.Start()
	b = v.Mount(mountOptions()...)
	wantTime("written, after a restart", b.Dir+"/f", lately)
	wantTime("set, after a restart", b.Dir+"/g", set)
	b.Unmount()
	v.Stop()
	v.Fsck()
}

// The service is killed when a longer size is set and the data file that the kernel reads has yet to grow: with the next one it has.
func TestPassthroughGrowKilled(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{Apart: true, DataServers: 1}, "passthrough=rw")
	b := v.Mount(append(mountOptions(), "passthrough=off")...)
	data := text(10_000)
	put(t, a.Dir+"/f", data)
	put(t, a.Dir+"/g", data)
	harness.Weft(t, "sync", a.Dir)
	r := open(t, a.Dir+"/f", os.O_RDONLY)
	w := open(t, a.Dir+"/g", os.O_RDWR)
	wantMode(t, a, r, "ro")
	wantMode(t, a, w, "rw")
	paths := append(dataFilesOf(t, v, b.Dir+"/f"), dataFilesOf(t, v, b.Dir+"/g")...)
	v.Servers[0].Pause()
	done := make(chan error, 2)
	for _, name := range []string{"f", "g"} {
		go func() { done <- os.Truncate(b.Dir+"/"+name, 20_000) }() // ends when there is a service again
		harness.Await(t, "the size of "+name, func() bool {
			st, err := os.Stat(b.Dir + "/" + name)
			return err == nil && st.Size() == 20_000
		})
	}
	v.Kill()
	v.Servers[0].Continue()
	v.Start()
	data = append(data, make([]byte, 10_000)...)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for _, path := range paths {
		wantSize(t, path, 20_000)
	}
	want(t, "read by the kernel", r, data)
	want(t, "read and written by the kernel", w, data)
	if _, err := w.WriteAt([]byte("at the end"), 20_000); err != nil {
		t.Error(err)
	}
	data = append(data, "at the end"...)
	for _, m := range []*harness.Mount{a, b} {
		wantSize(t, m.Dir+"/g", int64(len(data)))
	}
	r.Close()
	w.Close()
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}

// What goes by RPC to a file that the kernel writes is not sent again over what the kernel has written since, when the data server was
// killed meanwhile.
func TestPassthroughSentAgain(t *testing.T) {
	v, m := wholeVolume(t, harness.Options{Apart: true, DataServers: 1}, "passthrough=rw")
	server := v.Servers[0]
	data := text(8192)
	put(t, m.Dir+"/f", data)
	f := open(t, m.Dir+"/f", os.O_RDWR)
	w := open(t, m.Dir+"/f", os.O_WRONLY|os.O_APPEND)
	wantMode(t, m, f, "rw")
	server.Kill()
	server.Remote = true
	server.Start()
	harness.Await(t, "RPC", func() bool { return !devices(t, m)[0].Local })
	before := devices(t, m)[0].OpsRPC
	if _, err := w.Write(bytes.Repeat([]byte("RPC!"), 1024)); err != nil {
		t.Fatal(err)
	}
	if devices(t, m)[0].OpsRPC == before {
		t.Error("the write did not go by RPC")
	}
	if _, err := f.WriteAt(bytes.Repeat([]byte("new!"), 512), 8192); err != nil {
		t.Fatal(err)
	}
	data = append(append(data, bytes.Repeat([]byte("new!"), 512)...), bytes.Repeat([]byte("RPC!"), 512)...)
	want(t, "written over it", f, data)
	server.Kill()
	server.Forget()
	server.Start()
	for _, file := range []*os.File{w, f} {
		if err := file.Sync(); err != nil {
			t.Error(err)
		}
		want(t, "after fsync", f, data)
	}
	f.Close()
	w.Close()
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// When the service is started again, what is open in passthrough works on, and is known to be: it is not moved from a data server that is
// drained, which is told in the status, until it is closed.
func TestPassthroughDrain(t *testing.T) {
	v, m := wholeVolume(t, harness.Options{})
	data := text(100_000)
	put(t, m.Dir+"/f", data)
	r := open(t, m.Dir+"/f", os.O_RDONLY)
	wantMode(t, m, r, "ro")
	v.Kill()
	want(t, "without a service", r, data)
	v.Start()
	want(t, "with another service", r, data)
	harness.Await(t, "the service", func() bool { return passingOf(t, m).Service.Connected })
	address := harness.LayoutOf(t, m.Dir+"/f").Mirrors[0].Servers[0].Address
	device := harness.LayoutOf(t, m.Dir+"/f").Mirrors[0].Servers[0].Device
	harness.Weft(t, "admin", "device", "drain", device, "--server", v.Addr)
	harness.Await(t, "what is held up, in the status", func() bool {
		held := passingOf(t, m).Service.HeldUp
		return len(held) == 1 && strings.Contains(held[0].What, "moving") && len(held[0].Hosts) == 1
	})
	if out := harness.Weft(t, "status", m.Dir); !strings.Contains(out, "held up") || !strings.Contains(out, fmt.Sprint(os.Getpid())) {
		t.Errorf("who holds it up is not in\n%s", out)
	}
	w := open(t, m.Dir+"/f", os.O_WRONLY)
	if _, err := w.WriteAt([]byte("written meanwhile"), 10); err != nil {
		t.Error(err)
	}
	w.Close()
	copy(data[10:], "written meanwhile")
	want(t, "written meanwhile", r, data)
	if now := harness.LayoutOf(t, m.Dir+"/f").Mirrors[0].Servers[0].Address; now != address {
		t.Errorf("moved from %s to %s while the kernel read it", address, now)
	}
	r.Close()
	harness.Await(t, "the move", func() bool {
		return harness.LayoutOf(t, m.Dir+"/f").Mirrors[0].Servers[0].Address != address && passingOf(t, m).Service.HeldUp == nil
	})
	if got, err := os.ReadFile(m.Dir + "/f"); err != nil || !bytes.Equal(got, data) {
		t.Errorf("moved: %d bytes: %v", len(got), err)
	}
}

// Of a file with several copies the kernel reads one where nobody can write. It does not become stale: who cannot write it
// waits.
func TestPassthroughMirrors(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Apart: true, DataServers: 3})
	w := v.Mount(append(mountOptions(), "passthrough=rw", "mirror-timeout=2s")...)
	devices(t, w)
	harness.Weft(t, "layout", "set", w.Dir, "--mirrors", "2", "--placement", "local")
	data := text(100_000)
	put(t, w.Dir+"/f", data)
	harness.Weft(t, "sync", w.Dir)
	m := v.Mount(append(mountOptions(), "ro")...)
	devices(t, m)
	var r *os.File
	harness.Await(t, "passthrough when nobody writes any more", func() bool {
		r = open(t, m.Dir+"/f", os.O_RDONLY)
		if mode(t, m, r) == "ro" {
			return true
		}
		r.Close()
		return false
	})
	f := open(t, w.Dir+"/f", os.O_RDWR)
	wantMode(t, w, f, "")
	if _, err := f.WriteAt([]byte("both are there"), 0); err != nil {
		t.Error(err)
	}
	f.Close() // or every process that the test starts would wait as the writer does, when it closes its copy
	copy(data, "both are there")
	want(t, "both copies are written", r, data)
	pinned := v.ServerAt(harness.LayoutOf(t, w.Dir+"/f").Mirrors[0].Servers[0].Address)
	held := func() bool {
		for _, h := range passingOf(t, w).Service.HeldUp {
			if strings.Contains(h.What, "cannot be written") && len(h.Hosts) == 1 {
				return true
			}
		}
		return false
	}
	for _, end := range []string{"the server is back", "the reader is gone"} {
		before := slices.Clone(data)
		pinned.Kill()
		done := make(chan error, 1)
		go func() { // ends when the server is back, or the reader gone
			dd := exec.Command("dd", "of="+w.Dir+"/f", "conv=notrunc", "status=none")
			dd.Stdin = strings.NewReader("until " + end)
			done <- dd.Run()
		}()
		harness.Await(t, "what the writer waits for, in the status", held)
		select {
		case err := <-done:
			t.Errorf("written without the copy that the kernel reads: %v", err)
		default:
		}
		if end == "the server is back" {
			want(t, "while the writer waits", r, before)
			pinned.Start()
		} else {
			r.Close()
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		copy(data, "until "+end)
		if end == "the server is back" {
			want(t, end, r, data)
		}
	}
	if held() {
		t.Error("still held up when nothing is open in passthrough")
	}
	got, err := os.ReadFile(m.Dir + "/f")
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("the other copy: %d bytes %.40q: %v", len(got), got, err)
	}
	pinned.Start()
}

// The kernel does not pass through to a file system that is on top of others: that is said, and everything works.
func TestPassthroughStacked(t *testing.T) {
	harness.NeedMount(t)
	dir := harness.Dir(t)
	for _, d := range []string{"lower", "upper", "work", "over"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	over := filepath.Join(dir, "over")
	if err := unix.Mount("overlay", over, "overlay", 0, fmt.Sprintf("index=on,nfs_export=on,lowerdir=%s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", dir)); err != nil {
		t.Skipf("missing: overlayfs (%v)", err)
	}
	t.Cleanup(func() { unix.Unmount(over, unix.MNT_DETACH) })
	t.Setenv("TMPDIR", over)
	t.Run("volume", func(t *testing.T) { // with directories of its own, there
		_, m := wholeVolume(t, harness.Options{}, "passthrough=rw")
		data := text(100_000)
		put(t, m.Dir+"/f", data)
		for _, flags := range []int{os.O_RDONLY, os.O_RDWR} {
			f := open(t, m.Dir+"/f", flags)
			wantMode(t, m, f, "")
			want(t, "by the daemon", f, data)
			f.Close()
		}
		if why := passingOf(t, m).Why; !strings.Contains(why, "stacked") {
			t.Errorf("not passed because %q", why)
		}
		if out := harness.Weft(t, "status", m.Dir); !strings.Contains(out, "passthrough: no, because ") {
			t.Errorf("not in\n%s", out)
		}
	})
}

// When a mount dies with a file open in passthrough for writing, others go on.
func TestPassthroughKilled(t *testing.T) {
	v, a := wholeVolume(t, harness.Options{Lease: 2 * time.Second}, "passthrough=rw")
	b := v.Mount(append(mountOptions(), "passthrough=rw")...)
	f := open(t, a.Dir+"/f", os.O_RDWR|os.O_CREATE)
	if _, err := f.WriteString("before"); err != nil {
		t.Fatal(err)
	}
	wantMode(t, a, f, "rw")
	a.Abort()
	put(t, b.Dir+"/g", []byte("other files"))
	if _, err := f.WriteAt([]byte("the kernel goes on"), 0); err == nil {
		want(t, "what it has written", f, []byte("the kernel goes on"))
	}
	f.Close() // now nobody can write any more
	if got, err := os.ReadFile(b.Dir + "/f"); err != nil || len(got) == 0 {
		t.Errorf("%q, %v", got, err)
	}
	put(t, b.Dir+"/f", []byte("after"))
	if got, err := os.ReadFile(b.Dir + "/f"); err != nil || string(got) != "after" {
		t.Errorf("%q, %v", got, err)
	}
}
