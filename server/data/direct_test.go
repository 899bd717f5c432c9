package data

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/sparse"
)

// testIO is how servers that tests start read and write; testDir, if not empty, is where. See inAllModes.
var (
	testIO  IO
	testDir string
)

// ext4Dir is a directory on ext4, where direct transfers are more than a word.
func ext4Dir(t *testing.T) string {
	dir := t.TempDir()
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type == unix.EXT4_SUPER_MAGIC {
		return dir
	}
	image, mount := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 1<<30), os.Mkdir(mount, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"mkfs.ext4", "-q", "-F", image}, {"mount", "-o", "loop", image, mount}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("missing: an ext4 file system, as %s is none and %v fails: %v: %s", dir, args, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, 0); err != nil {
			t.Error(err)
		}
	})
	return mount
}

// inAllModes runs a test on ext4 and in memory, with each way to read and write.
func inAllModes(t *testing.T, run func(t *testing.T)) {
	needRoot(t)
	for _, where := range []struct {
		name string
		dir  func(*testing.T) string
	}{{"ext4", ext4Dir}, {"tmpfs", func(t *testing.T) string { return ramDir(t) }}} {
		for _, mode := range []IO{IOAuto, IODirect, IOBuffered} {
			t.Run(fmt.Sprint(where.name, "-", mode), func(t *testing.T) {
				dir := where.dir(t)
				if mode == IODirect && !hasDirect(t, dir) {
					t.Skipf("missing: O_DIRECT on %s", where.name)
				}
				testIO, testDir = mode, dir
				defer func() { testIO, testDir = IOAuto, "" }()
				run(t)
			})
		}
	}
}

func hasDirect(t *testing.T, dir string) bool {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	_, err = probeDirect(fd)
	return err == nil
}

// The tests of everything that moves bytes, in every mode.
func TestModes(t *testing.T) {
	inAllModes(t, func(t *testing.T) {
		for _, test := range []struct {
			name string
			run  func(*testing.T)
		}{
			{"ReadWrite", TestReadWrite}, {"Largest", TestLargest}, {"WriteCounts", TestWriteCounts}, {"Concurrency", TestConcurrency},
			{"Fence", TestFence}, {"NoAllocation", TestNoAllocation}, {"ScarcePayloadMemory", TestScarcePayloadMemory},
			{"Verifier", TestVerifier}, {"FailedSync", TestFailedSync}, {"SyncsAreShared", TestSyncsAreShared},
			{"DirtyFileLeavesTheCache", TestDirtyFileLeavesTheCache}, {"NoSpace", TestNoSpace}, {"ReadOnly", TestReadOnly},
			{"RemovedWhileOpen", TestRemovedWhileOpen}, {"CacheBound", TestCacheBound},
			{"NothingIsLeft", TestNothingIsLeft},
		} {
			t.Run(test.name, test.run)
		}
	})
}

// Writers of neighbouring ranges, which share blocks, and of all alignments, with reads, holes and commits in between: every
// range has what its writer last wrote, for the server, for others on its machine, and on the disk. Nothing fails.
func TestMixedAlignment(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	inAllModes(t, func(t *testing.T) {
		ts := start(t, "")
		setup := ts.dial()
		fh := setup.create(ts.root, "f", 7, 8)
		const size, workers, steps = 12 << 20, 4, 60
		want := make([]byte, size)
		rnd := rand.New(rand.NewPCG(seed, 0))
		cuts := []int{0, size}
		for range 2*workers - 1 {
			cuts = append(cuts, rnd.IntN(size))
		}
		slices.Sort(cuts)
		setup.put(fh, size-1, []byte{0})
		var wg sync.WaitGroup
		for w := range workers {
			c := ts.dial()
			rnd := rand.New(rand.NewPCG(seed, uint64(w+1)))
			wg.Go(func() {
				for step := range steps {
					i := w + workers*rnd.IntN(2) // of the two ranges of this worker
					from, to := cuts[i], cuts[i+1]
					if to-from < 2 {
						continue
					}
					off := from + rnd.IntN(to-from)
					n := 1 + rnd.IntN(min(to-off, 1<<(1+rnd.IntN(22))))
					switch rnd.IntN(4) {
					case 0: // all of it
						off, n = from, min(to-from, maxIO)
					case 1: // whole blocks
						if a := (off + 4095) &^ 4095; a+4096 <= to {
							off, n = a, min(max(n&^4095, 4096), (to-a)&^4095)
						}
					}
					mine := want[off : off+n]
					switch rnd.IntN(8) {
					case 0:
						clear(mine)
						if res := c.deallocate(super, fh, uint64(off), uint64(n), sparse.Column{}); res.Status != wire.OK {
							t.Errorf("DEALLOCATE: %v", res.Status)
						}
					case 1:
						if res := c.commit(super, fh); res.Status != wire.OK {
							t.Errorf("COMMIT: %v", res.Status)
						}
					case 2, 3, 4:
						c.check(fh, uint64(off), mine)
					default:
						for i := range mine {
							mine[i] = byte(i) ^ byte(step*workers+w)
						}
						if res := c.write(super, fh, uint64(off), mine, wire.Stable(rnd.IntN(3))); res.Status != wire.OK || int(res.Count) != n {
							t.Errorf("WRITE of %d bytes at %d: %v, %d", n, off, res.Status, res.Count)
						}
					}
				}
			})
		}
		wg.Wait()
		setup.check(fh, 0, want)
		if got, err := os.ReadFile(ts.export("f")); err != nil || !bytes.Equal(got, want) {
			t.Errorf("another process finds other contents: %v", err)
		}
		if res := setup.commit(super, fh); res.Status != wire.OK {
			t.Errorf("COMMIT: %v", res.Status)
		}
		f, err := os.Open(ts.export("f"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		if got, err := os.ReadFile(ts.export("f")); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the disk has other contents: %v", err)
		}
	})
}

// Large requests to auto leave nothing in the page cache of a disk, wherever they begin; buffered ones do.
func TestPageCache(t *testing.T) {
	needRoot(t)
	dir := ext4Dir(t)
	if !hasDirect(t, dir) {
		t.Skip("missing: O_DIRECT on ext4")
	}
	defer func() { testIO = IOAuto }()
	for _, mode := range []IO{IOAuto, IOBuffered} {
		for _, shift := range []uint64{0, 4096, 1000} {
			testIO = mode
			ts := start(t, filepath.Join(dir, fmt.Sprint(mode, shift)))
			c := ts.dial()
			fh := c.create(ts.root, "f", 7, 8)
			c.put(fh, shift, make([]byte, 2<<20))
			c.check(fh, shift, make([]byte, 2<<20))
			pages := cachedPages(t, ts.export("f"))
			if few := pages <= 64; few != (mode == IOAuto) {
				t.Errorf("%v: %d pages in the page cache after a transfer of 2 MiB at %d", mode, pages, shift)
			}
			ts.stop()
		}
	}
}

// cachedPages is how many pages of a file are in the page cache.
func cachedPages(t *testing.T, path string) (n int) {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	in := make([]byte, (len(mem)+4095)/4096)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&in[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, b := range in {
		n += int(b & 1)
	}
	return n
}

// What the file system cannot do is told at the start.
func TestNoDirect(t *testing.T) {
	needRoot(t)
	if _, err := ParseIO("fast"); err == nil || !strings.Contains(err.Error(), "auto, direct, buffered") {
		t.Errorf("ParseIO: %v", err)
	}
	if m, err := ParseIO("direct"); m != IODirect || err != nil {
		t.Errorf("ParseIO: %v, %v", m, err)
	}
	fd, err := unix.Open("/proc", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := newTransfers(IODirect, fd); err == nil || !strings.Contains(err.Error(), "--io=buffered") {
		t.Errorf("direct on a file system without files of ours: %v", err)
	}
	if d, err := newTransfers(IOAuto, fd); err != nil || d.Align != 0 {
		t.Errorf("auto on it: %+v, %v", d, err)
	}
}
