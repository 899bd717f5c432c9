package posix

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// onNamespaces says that the volumes have their data on NVMe namespaces.
var onNamespaces = os.Getenv(harness.NVMeEnv) != ""

// onDiskAndMemory runs a test on a volume on the disk and on one in memory, with a directory of the same file system.
func onDiskAndMemory(t *testing.T, run func(t *testing.T, v *harness.Volume, m *harness.Mount, local string)) {
	for _, where := range []string{"disk", "memory"} {
		t.Run(where, func(t *testing.T) {
			if where == "memory" {
				var st unix.Statfs_t
				if err := unix.Statfs("/dev/shm", &st); err != nil || st.Type != unix.TMPFS_MAGIC {
					t.Skip("missing: a tmpfs at /dev/shm")
				}
				t.Setenv("TMPDIR", "/dev/shm")
			}
			v := harness.NewVolume(t, harness.Options{})
			m := v.Mount(mountOptions()...)
			run(t, v, m, t.TempDir())
			m.Unmount()
			v.Stop()
			v.Fsck()
		})
	}
}

// used is how much space the files below a directory take up.
func used(t *testing.T, dir string) (n int64) {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		st, err := d.Info()
		if err == nil {
			n += st.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return nil // data files come and go
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Space is really reserved, and really given back.
func TestFallocateSpace(t *testing.T) {
	if onNamespaces {
		t.Skip("namespaces reserve units of the device, which are not those of its file, and keep what is punched: TestFallocateUnits")
	}
	onDiskAndMemory(t, func(t *testing.T, v *harness.Volume, m *harness.Mount, local string) {
		const size, slack = 64 << 20, 4 << 20 // the catalog grows, too
		f := create(t, m.Dir+"/f")
		defer f.Close()
		before := used(t, v.Dir)
		want := func(what string, more int64) {
			t.Helper()
			if n := used(t, v.Dir) - before; n < more-slack || n > more+slack {
				t.Errorf("%s: %d bytes more are taken, want %d", what, n, more)
			}
		}
		fallocate := func(mode uint32, off, n int64) {
			t.Helper()
			if err := unix.Fallocate(int(f.Fd()), mode, off, n); err != nil {
				t.Fatalf("fallocate %#x: %v", mode, err)
			}
		}
		fallocate(unix.FALLOC_FL_KEEP_SIZE, 0, size)
		want("reserved behind the end", size)
		if st := stat(m.Dir + "/f"); st.Size != 0 {
			t.Errorf("the size is %d", st.Size)
		}
		fallocate(0, 0, size)
		want("allocated", size)
		if st := stat(m.Dir + "/f"); st.Size != size {
			t.Errorf("the size is %d", st.Size)
		}
		fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, size/4, size/2)
		want("punched", size/2)
		fallocate(unix.FALLOC_FL_ZERO_RANGE, size/2, size)
		want("zeroed beyond the end", size+size/4)
		if st := stat(m.Dir + "/f"); st.Size != size+size/2 {
			t.Errorf("the size is %d", st.Size)
		}
		if err := f.Truncate(0); err != nil {
			t.Fatal(err)
		}
		want("truncated", 0)
	})
}

// Space on namespaces is counted in units, by the service. What is punched keeps them, and a file that grows has more than it needs.
func TestFallocateUnits(t *testing.T) {
	const size = 64 << 20
	v := harness.NewVolume(t, harness.Options{NVMe: 4})
	m := v.Mount(mountOptions()...)
	f := create(t, m.Dir+"/f")
	defer f.Close()
	free := func() int64 {
		var st unix.Statfs_t
		try(unix.Statfs(m.Dir, &st))
		return int64(st.Bfree) * st.Bsize
	}
	began := free()
	for _, step := range []struct {
		what        string
		mode        uint32
		off, n      int64
		taken, size int64 // taken: at least, 0: not looked at, as it takes seconds to be seen
	}{
		{"reserved behind the end", unix.FALLOC_FL_KEEP_SIZE, 0, size, size, 0},
		{"allocated", 0, 0, size, 0, size},
		{"punched", unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, size / 4, size / 2, 0, size},
		{"zeroed beyond the end", unix.FALLOC_FL_ZERO_RANGE, size / 2, size, size + size/2, size + size/2},
	} {
		if err := unix.Fallocate(int(f.Fd()), step.mode, step.off, step.n); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		if step.taken > 0 {
			harness.Await(t, step.what, func() bool { n := began - free(); return n >= step.taken && n <= 3*step.taken })
		}
		if st := stat(m.Dir + "/f"); st.Size != step.size {
			t.Errorf("%s: the size is %d", step.what, st.Size)
		}
	}
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "truncated", func() bool { return free() == began })
}

// stat is lstat(2) of what exists.
func stat(path string) unix.Stat_t {
	var st unix.Stat_t
	try(unix.Lstat(path, &st))
	return st
}

func create(t *testing.T, path string) *os.File {
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Data and holes are where a local file of the same file system has them, when everything is on the disk.
func TestSeekLikeLocal(t *testing.T) {
	onDiskAndMemory(t, func(t *testing.T, v *harness.Volume, m *harness.Mount, local string) {
		// The kernel zeros a large folio that it cannot split at once, and so keeps data in either file now and then where
		// there was to be a hole: that is no fault if other files are alike.
		var differ []string
		for range 4 {
			// Blocks of namespaces that were written stay data.
			if differ = seekBoth(t, m.Dir, local, !onNamespaces, false); differ == nil && onNamespaces {
				differ = seekBoth(t, m.Dir, local, true, true)
			}
			if differ == nil {
				return
			}
		}
		t.Error(strings.Join(differ, "\n"))
	})
}

// seekBoth makes the same file in both directories, its contents and its holes by chance, and returns where lseek differs. punches says
// that what was written is punched, too, and coarse that fewer holes will do than in the local file, if all that is data there is data.
func seekBoth(t *testing.T, dir, local string, punches, coarse bool) (differ []string) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 8))
	files := []*os.File{create(t, dir+"/f"), create(t, local+"/f")}
	for _, f := range files {
		defer f.Close()
	}
	const most = 16 << 20
	for step := range 60 {
		off, n := rnd.Int64N(most), 1+rnd.Int64N(1<<(1+rnd.IntN(21)))
		data := bytes.Repeat([]byte{byte(step + 1)}, int(n))
		punch := rnd.IntN(3) == 0 && punches
		for _, f := range files {
			var err error
			if punch {
				err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
			} else {
				_, err = f.WriteAt(data, off)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, f := range files {
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	size := stat(local + "/f").Size
	for range 300 {
		off, whence := rnd.Int64N(size+100), []int{unix.SEEK_DATA, unix.SEEK_HOLE}[rnd.IntN(2)]
		got, err1 := unix.Seek(int(files[0].Fd()), off, whence)
		want, err2 := unix.Seek(int(files[1].Fd()), off, whence)
		fine := coarse && (whence == unix.SEEK_HOLE && got >= want || whence == unix.SEEK_DATA && err1 == nil && (got <= want || err2 != nil))
		if (got != want || err1 != err2) && !fine {
			differ = append(differ, fmt.Sprintf("lseek(%d, %d): %d, %v; a local file: %d, %v", off, whence, got, err1, want, err2))
		}
	}
	if !bytes.Equal([]byte(read(dir+"/f")), []byte(read(local+"/f"))) {
		t.Error("the contents differ")
	}
	return differ
}

// Punching or zeroing the last block of a file, of which there is only a part, leaves the holes that a local file has then.
func TestPunchTail(t *testing.T) {
	if onNamespaces {
		t.Skip("blocks of namespaces that were written stay data when they are punched; TestSeekLikeLocal looks for data that is called a hole")
	}
	onDiskAndMemory(t, func(t *testing.T, v *harness.Volume, m *harness.Mount, local string) {
		const size = 2*4096 + 3
		for _, from := range []int64{0, 4096, 5000, 8192} {
			for _, mode := range []uint32{unix.FALLOC_FL_PUNCH_HOLE, unix.FALLOC_FL_ZERO_RANGE} {
				var found [2]string
				for i, dir := range []string{local, m.Dir} {
					f := create(t, dir+"/f")
					defer f.Close()
					if _, err := f.WriteAt(bytes.Repeat([]byte{1}, size), 0); err != nil {
						t.Fatal(err)
					}
					// What is not on the disk yet counts as data for longer, and a data server may have it written when it likes.
					if err := f.Sync(); err != nil {
						t.Fatal(err)
					}
					err := unix.Fallocate(int(f.Fd()), mode|unix.FALLOC_FL_KEEP_SIZE, from, 3*4096-from)
					if err == unix.EOPNOTSUPP && i == 0 {
						break // tmpfs cannot zero
					}
					if err != nil {
						t.Fatal(err)
					}
					for off := int64(0); off < size; off += 2048 {
						data, err1 := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
						hole, err2 := unix.Seek(int(f.Fd()), off, unix.SEEK_HOLE)
						found[i] += fmt.Sprintf("from %d: data %d, %v; hole %d, %v\n", off, data, err1, hole, err2)
					}
					if st := stat(dir + "/f"); st.Size != size {
						t.Errorf("size %d", st.Size)
					}
				}
				if found[0] != "" && found[0] != found[1] {
					t.Errorf("mode %#x from %d: a local file has\n%sthe mount\n%s", mode, from, found[0], found[1])
				}
			}
		}
	})
}

// farthest is where data files on namespaces end.
const farthest = 1 << 62

// What the data servers' file system can hold works far out; the rest is EFBIG, as it is there. On namespaces that does not depend on a file system.
func TestFarOffsets(t *testing.T) {
	onDiskAndMemory(t, func(t *testing.T, v *harness.Volume, m *harness.Mount, local string) {
		files := []*os.File{create(t, m.Dir+"/f"), create(t, local+"/f")}
		for _, f := range files {
			defer f.Close()
		}
		for _, off := range []int64{1 << 40, 1<<44 - 8192, 1<<44 - 4096, 1 << 44, 20 << 40, 1 << 60, 1<<63 - 8192, 1<<63 - 4096} {
			for _, op := range []struct {
				name string
				do   func(f *os.File) error
			}{
				{"write", func(f *os.File) error { _, err := unix.Pwrite(int(f.Fd()), []byte("far"), off); return err }},
				{"truncate", func(f *os.File) error { return unix.Ftruncate(int(f.Fd()), off+5) }},
				{"fallocate", func(f *os.File) error { return unix.Fallocate(int(f.Fd()), 0, off, 4000) }},
				{"reservation", func(f *os.File) error { return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, off, 4000) }},
				{"punch", func(f *os.File) error {
					return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, 4000)
				}},
			} {
				got, want := op.do(files[0]), error(nil)
				if !onNamespaces {
					want = op.do(files[1])
				} else if off >= farthest && op.name != "truncate" && op.name != "punch" {
					want = unix.EFBIG
				}
				if got != want {
					// A striped file is longer than its data files, and holes beyond these cost nothing.
					level := t.Errorf
					if got == nil && (op.name == "truncate" || op.name == "punch") {
						level = t.Logf
					}
					level("%s at %d: %v, want %v", op.name, off, got, want)
				}
			}
			if st := stat(m.Dir + "/f"); st.Size > off {
				buf := make([]byte, 3)
				if n, err := unix.Pread(int(files[0].Fd()), buf, off); err != nil || n != 3 || string(buf) != "\x00\x00\x00" {
					t.Errorf("read at %d after the punch: %q, %v", off, buf[:n], err)
				}
			}
		}
	})
}
