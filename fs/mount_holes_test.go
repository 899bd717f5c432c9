package fs

import (
	"bytes"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Random changes of a file on a mount and of one in memory: contents, sizes, and what lseek(2) finds must be the same.
func TestMountHoles(t *testing.T) { eachTransport(t, testMountHoles) }

func testMountHoles(t *testing.T) {
	m := startMount(t)
	local, err := os.MkdirTemp("/dev/shm", "weft-fs-test")
	if err != nil {
		t.Skipf("missing: a tmpfs at /dev/shm: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(local) })
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 6))
	files := []*os.File{must[*os.File](t)(os.Create(m.path("f"))), must[*os.File](t)(os.Create(local + "/f"))}
	for _, f := range files {
		defer f.Close()
	}
	const most = 8 << 20 // several stripe units
	both := func(step int, what string, do func(f *os.File) (int64, error)) {
		t.Helper()
		got, err1 := do(files[0])
		want, err2 := do(files[1])
		if got != want || !errors.Is(err1, err2) && err1 != err2 {
			t.Fatalf("step %d: %s: %d, %v; on tmpfs %d, %v", step, what, got, err1, want, err2)
		}
	}
	for step := range 250 {
		off := rnd.Int64N(most)
		n := 1 + rnd.Int64N(min(most-off, 1<<(1+rnd.IntN(22))))
		if rnd.IntN(3) == 0 { // whole blocks
			off, n = off&^4095, (n+4095)&^4095
		}
		switch rnd.IntN(8) {
		case 0, 1:
			data := pattern(uint64(step), int(n))
			both(step, "write", func(f *os.File) (int64, error) {
				n, err := f.WriteAt(data, off)
				return int64(n), err
			})
		case 2:
			both(step, "truncate", func(f *os.File) (int64, error) { return 0, f.Truncate(off) })
		case 3, 4:
			// No reservations: in what is reserved tmpfs takes some blocks for data whose ends were punched.
			both(step, "punch", func(f *os.File) (int64, error) { return 0, unix.Fallocate(int(f.Fd()), punchOut, off, n) })
		case 5:
			both(step, "seek for data", func(f *os.File) (int64, error) { return unix.Seek(int(f.Fd()), off, unix.SEEK_DATA) })
		case 6:
			both(step, "seek for a hole", func(f *os.File) (int64, error) { return unix.Seek(int(f.Fd()), off, unix.SEEK_HOLE) })
		case 7:
			if rnd.IntN(4) == 0 {
				m.command("restart")
			}
			ok(t, files[0].Sync())
		}
		both(step, "size", func(f *os.File) (int64, error) {
			st, err := f.Stat()
			return st.Size(), err
		})
	}
	got, want := must[[]byte](t)(os.ReadFile(m.path("f"))), must[[]byte](t)(os.ReadFile(local+"/f"))
	if !bytes.Equal(got, want) {
		t.Error("the contents differ")
	}
}

// System calls that the kernel makes requests of its own from, or answers itself.
func TestMountCopies(t *testing.T) { eachTransport(t, testMountCopies) }

func testMountCopies(t *testing.T) {
	m := startMount(t)
	data := pattern(3, 3_000_000)
	ok(t, os.WriteFile(m.path("src"), data, 0644))
	src := must[*os.File](t)(os.OpenFile(m.path("src"), os.O_RDWR, 0))
	defer src.Close()
	from := int(src.Fd())
	for _, c := range []struct {
		name string
		copy func(t *testing.T, to int) error
	}{
		{"copy_file_range", func(t *testing.T, to int) error {
			for off := int64(0); off < int64(len(data)); {
				n, err := unix.CopyFileRange(from, &off, to, nil, len(data), 0)
				if err != nil || n == 0 {
					return errors.Join(err, io.ErrUnexpectedEOF)
				}
			}
			return nil
		}},
		{"sendfile", func(t *testing.T, to int) error {
			for off := int64(0); off < int64(len(data)); {
				n, err := unix.Sendfile(to, from, &off, len(data))
				if err != nil || n == 0 {
					return errors.Join(err, io.ErrUnexpectedEOF)
				}
			}
			return nil
		}},
		{"splice", func(t *testing.T, to int) error {
			var p [2]int
			ok(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
			defer unix.Close(p[0])
			defer unix.Close(p[1])
			for off := int64(0); off < int64(len(data)); {
				n, err := unix.Splice(from, &off, p[1], nil, 1<<16, 0)
				if err != nil || n == 0 {
					return errors.Join(err, io.ErrUnexpectedEOF)
				}
				for n > 0 {
					k, err := unix.Splice(p[0], nil, to, nil, int(n), 0)
					if err != nil {
						return err
					}
					n -= k
				}
			}
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			// The pages that such a call leaves must not outlive a write.
			for round := range 2 {
				data[100] += byte(round)
				must[int](t)(src.WriteAt(data[100:101], 100))
				dst := must[*os.File](t)(os.Create(m.path(c.name)))
				ok(t, c.copy(t, int(dst.Fd())))
				ok(t, dst.Close())
				if got := must[[]byte](t)(os.ReadFile(m.path(c.name))); !bytes.Equal(got, data) {
					t.Errorf("round %d: the copy differs", round)
				}
			}
			ok(t, unix.Fallocate(from, punchOut, 4096, 8192))
			clear(data[4096:][:8192])
			dst := must[*os.File](t)(os.Create(m.path(c.name)))
			ok(t, c.copy(t, int(dst.Fd())))
			ok(t, dst.Close())
			if got := must[[]byte](t)(os.ReadFile(m.path(c.name))); !bytes.Equal(got, data) {
				t.Error("after a punch the copy differs")
			}
		})
	}
	for advice := range unix.FADV_NOREUSE + 1 {
		if err := unix.Fadvise(from, 0, 1<<20, advice); err != nil {
			t.Errorf("posix_fadvise %d: %v", advice, err)
		}
	}
	if _, _, e := unix.Syscall(unix.SYS_READAHEAD, uintptr(from), 0, 1<<20); e != 0 {
		t.Errorf("readahead: %v", e)
	}
	must[int](t)(src.WriteAt([]byte("new"), 0)) // must not be hidden by pages read ahead
	buf := make([]byte, 3)
	must[int](t)(src.ReadAt(buf, 0))
	if string(buf) != "new" {
		t.Errorf("read %q after readahead", buf)
	}
	if err := unix.SyncFileRange(from, 0, 0, unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER); err != nil {
		t.Errorf("sync_file_range: %v", err)
	}
}

// Offsets at the end of what there is: what the data servers cannot hold is EFBIG, whoever finds out.
func TestMountFarOffsets(t *testing.T) { eachTransport(t, testMountFarOffsets) }

func testMountFarOffsets(t *testing.T) {
	m := startMount(t)
	f := must[*os.File](t)(os.Create(m.path("f")))
	defer f.Close()
	fd := int(f.Fd())
	const far = 20 << 40
	if _, err := unix.Pwrite(fd, []byte("x"), far); err != unix.EFBIG { // the servers of this test hold no more than 256 MiB
		t.Errorf("write at 20 TiB: %v", err)
	}
	ok(t, f.Truncate(far))
	buf := make([]byte, 10)
	if n, err := f.ReadAt(buf, far-10); n != 10 || err != nil || !bytes.Equal(buf, make([]byte, 10)) {
		t.Errorf("read of a hole at 20 TiB: %d, %v", n, err)
	}
	ok(t, unix.Fallocate(fd, punchOut, 1<<40, far))
	if err := unix.Fallocate(fd, keepSize, far, 4096); err != unix.EFBIG {
		t.Errorf("fallocate at 20 TiB: %v", err)
	}
	if off, err := unix.Seek(fd, far-5, unix.SEEK_HOLE); err != nil || off != far-5 {
		t.Errorf("seek for a hole: %d, %v", off, err)
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_DATA); err != unix.ENXIO {
		t.Errorf("seek for data: %v", err)
	}
	ok(t, f.Truncate(math.MaxInt64))
	if st := must[os.FileInfo](t)(f.Stat()); st.Size() != math.MaxInt64 {
		t.Errorf("size %d", st.Size())
	}
	ok(t, f.Truncate(0))
	for _, c := range []struct {
		name string
		do   func() error
		want error
	}{
		{"write at the last offset", func() error { _, err := unix.Pwrite(fd, []byte("x"), math.MaxInt64); return err }, unix.EINVAL}, // the kernel's answer everywhere
		{"write before it", func() error { _, err := unix.Pwrite(fd, []byte("x"), math.MaxInt64-1); return err }, unix.EFBIG},
		{"fallocate past it", func() error { return unix.Fallocate(fd, 0, math.MaxInt64-10, 100) }, unix.EFBIG},
		{"fallocate of nothing", func() error { return unix.Fallocate(fd, 0, 0, 0) }, unix.EINVAL},
		{"fallocate at a negative offset", func() error { return unix.Fallocate(fd, 0, -1, 10) }, unix.EINVAL},
		{"truncate to a negative size", func() error { return unix.Ftruncate(fd, -1) }, unix.EINVAL},
		{"collapse", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_COLLAPSE_RANGE, 0, 4096) }, unix.EOPNOTSUPP},
	} {
		if err := c.do(); err != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// The kernel asks for access times again after a read, and relatime is the default.
func TestMountAtime(t *testing.T) { eachTransport(t, testMountAtime) }

func testMountAtime(t *testing.T) {
	m := startMount(t)
	ok(t, os.WriteFile(m.path("f"), []byte("data"), 0644))
	ok(t, os.Mkdir(m.path("d"), 0755))
	ok(t, os.Symlink("f", m.path("l")))
	atime := func(name string) int64 {
		var st unix.Stat_t
		ok(t, unix.Lstat(m.path(name), &st))
		return st.Atim.Nano()
	}
	access := map[string]func(){
		"f": func() { must[[]byte](t)(os.ReadFile(m.path("f"))) },
		"d": func() { must[[]os.DirEntry](t)(os.ReadDir(m.path("d"))) },
		"l": func() { must[string](t)(os.Readlink(m.path("l"))) },
	}
	for name, do := range access {
		start := time.Now().UnixNano()
		do()
		first := atime(name)
		do()
		if again := atime(name); first < start || again != first {
			t.Errorf("%s: accessed at %d or later, and is %d, then %d", name, start, first, again)
		}
	}
	past := unix.Timespec{Sec: 1000}
	ok(t, unix.UtimesNanoAt(unix.AT_FDCWD, m.path("f"), []unix.Timespec{past, {Nsec: unix.UTIME_OMIT}}, 0))
	if got := atime("f"); got != past.Nano() {
		t.Errorf("set to %d, is %d", past.Nano(), got)
	}
	f := must[*os.File](t)(os.OpenFile(m.path("f"), os.O_RDONLY|unix.O_NOATIME, 0))
	defer f.Close()
	must[[]byte](t)(io.ReadAll(f))
	if got := atime("f"); got != past.Nano() {
		t.Errorf("O_NOATIME: %d", got)
	}
}
