package pebble

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/server/catalog"
)

// smallDisk is a file system in memory with so many bytes.
func smallDisk(t *testing.T, size int64) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("missing: root, to mount")
	}
	dir := t.TempDir()
	if err := unix.Mount("weft-test", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=755", size)); err != nil {
		t.Skipf("missing: a mount of a tmpfs (%v)", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// lines is a log.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, string(p))
	return len(p), nil
}

func (l *lines) count(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.all {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// hog is another program that fills the disk.
type hog struct {
	t *testing.T
	f *os.File
}

func newHog(t *testing.T, dir string) *hog {
	f, err := os.Create(filepath.Join(dir, "other"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &hog{t, f}
}

// eat takes what is free, but for so many bytes.
func (h *hog) eat(leave int64) {
	h.t.Helper()
	_, free, err := space(filepath.Dir(h.f.Name()))
	if err != nil {
		h.t.Fatal(err)
	}
	size, err := h.f.Seek(0, io.SeekEnd)
	if err != nil {
		h.t.Fatal(err)
	}
	if free > leave {
		if err := fallocate(h.f, size, free-leave); err != nil && !isFull(err) {
			h.t.Fatal(err)
		}
	}
}

func (h *hog) giveBack() {
	h.t.Helper()
	if err := h.f.Truncate(0); err != nil {
		h.t.Fatal(err)
	}
}

// roomConfig is a catalog with a reserve in dir, and what it logs.
func roomConfig(t *testing.T, dir string) (Config, *lines) {
	log := new(lines)
	cfg := testConfig(t, filepath.Join(dir, "catalog"))
	cfg.Reserve = true
	cfg.MemTableBytes = 0
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log: %q", log.all)
		}
	})
	return cfg, log
}

// put commits a row of n bytes that cannot be compressed.
func put(t *testing.T, e *Engine, key string, n int, grows bool) error {
	value := make([]byte, n)
	for i := range value {
		value[i] = byte(rand.Uint32())
	}
	b := catalog.Batch{Grows: grows}
	b.Put([]byte(key), value)
	return e.Commit(t.Context(), &b)
}

// grow makes rows until there is no room, and returns how many.
func grow(t *testing.T, e *Engine, name string, size int) int {
	t.Helper()
	for n := range 1_000_000 {
		if err := put(t, e, fmt.Sprint(name, n), size, true); err != nil {
			if !errors.Is(err, catalog.ErrFull) || errors.Is(err, catalog.ErrUnknown) {
				t.Fatalf("row %d: %v", n, err)
			}
			return n
		}
	}
	t.Fatal("there is always room")
	return 0
}

// mayGrow waits until rows can be made again.
func mayGrow(t *testing.T, e *Engine) {
	t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := put(t, e, "again", 10, true)
		if err == nil {
			return
		}
		if !errors.Is(err, catalog.ErrFull) || time.Since(begin) > 2*time.Minute {
			t.Fatalf("after %v: %v; %+v", time.Since(begin), err, e.Room())
		}
	}
}

// allocated is how many bytes the files have that match.
func allocated(t *testing.T, pattern string) (n int64) {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err == nil {
			n += st.Blocks * 512
		}
	}
	return n
}

// TestDiskFilled has somebody else fill the disk: nothing new can be made, everything else goes on, also in a catalog
// that is opened then, and when there is room all is as before.
func TestDiskFilled(t *testing.T) {
	t.Parallel()
	const size = 48 << 20
	dir := smallDisk(t, size)
	cfg, log := roomConfig(t, dir)
	e := mustOpen(t, cfg)
	if n := allocated(t, filepath.Join(cfg.Dir, reserveName)); n != reserveLeast {
		t.Fatalf("the reserve has %d bytes", n)
	}
	if r := e.Room(); r.Full || r.Low || r.Reserve != reserveLeast || r.Size != size || r.Free < size/2 {
		t.Errorf("at first: %+v", r)
	}
	for i := range 100 {
		if err := put(t, e, fmt.Sprint("old", i), 100, true); err != nil {
			t.Fatal(err)
		}
	}
	if n := allocated(t, filepath.Join(cfg.Dir, "*.log")); n > size/100+4096 {
		t.Errorf("the log has %d bytes, of a disk with %d", n, size)
	}
	other := newHog(t, dir)
	other.eat(6 << 20)
	for begin := time.Now(); !e.Room().Low; time.Sleep(50 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatalf("nobody is warned: %+v", e.Room())
		}
	}
	if e.Room().Full || log.count("nearly full") != 1 {
		t.Errorf("before it is full: %+v", e.Room())
	}
	other.eat(200 << 10)
	made := grow(t, e, "new", 500)
	if r := e.Room(); !r.Full || !r.Low || log.count("its disk is full") != 1 {
		t.Errorf("after %d rows: %+v", made, r)
	}
	goesOn := func() {
		t.Helper()
		grow(t, e, "filler", 500) // opening a catalog removes logs
		for i := range 2000 {
			if err := put(t, e, "old0", 400, false); err != nil {
				t.Fatalf("change %d: %v", i, err)
			}
		}
		var b catalog.Batch
		for i := range made / 2 {
			b.Delete(fmt.Append(nil, "new", i))
		}
		b.GuardPresent([]byte("old0"))
		if err := e.Commit(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
		if value, err := e.Get(t.Context(), []byte("old1")); err != nil || len(value) != 100 {
			t.Errorf("%d bytes, %v", len(value), err)
		}
		if err := put(t, e, "more", 1, true); !errors.Is(err, catalog.ErrFull) {
			t.Errorf("a new row: %v", err)
		}
		grown := catalog.Batch{Grows: true}
		grown.GuardAbsent([]byte("old1"))
		grown.Put([]byte("old1"), nil)
		if err := e.Commit(t.Context(), &grown); !isGuard(err) {
			t.Errorf("a row that is there: %v", err)
		}
	}
	goesOn()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	other.eat(0)
	e = mustOpen(t, cfg)
	if !e.Room().Full {
		t.Error("it has room after it was opened again")
	}
	goesOn()
	if made == 0 || log.count("\n") > 20 {
		t.Errorf("%d rows were made, %d lines logged", made, log.count("\n"))
	}
	other.giveBack()
	mayGrow(t, e)
	reserve := filepath.Join(cfg.Dir, reserveName)
	if r := e.Room(); r.Full || r.Reserve != reserveLeast || allocated(t, reserve) != reserveLeast {
		t.Errorf("with room: %+v", r)
	}
	if log.count("has room again") != 1 {
		t.Error("it is not said that there is room again")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestFilledItself has the catalog fill the disk. When its rows are deleted it has room.
func TestFilledItself(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t, 16<<20)
	cfg, _ := roomConfig(t, dir)
	e := mustOpen(t, cfg)
	made := grow(t, e, "row", 4000)
	for i := range made {
		var b catalog.Batch
		b.Delete(fmt.Append(nil, "row", i))
		if err := e.Commit(t.Context(), &b); err != nil {
			t.Fatalf("delete %d of %d: %v", i, made, err)
		}
	}
	again := 0
	for end := time.Now().Add(time.Minute); again < made/2 && time.Now().Before(end); { // as room is made in the background
		mayGrow(t, e)
		again += grow(t, e, fmt.Sprint("again", again, "-"), 4000)
	}
	if again < made/2 {
		t.Errorf("%d rows fit at first, %d after they were deleted", made, again)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestReserveUsedUp has somebody else take what the catalog gives up of its reserve, too. Then writes wait, and reads go on.
func TestReserveUsedUp(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t, 16<<20)
	cfg, _ := roomConfig(t, dir)
	e := mustOpen(t, cfg)
	if err := put(t, e, "old", 100, true); err != nil {
		t.Fatal(err)
	}
	other := newHog(t, dir)
	ended, stop := make(chan error), make(chan struct{})
	go func() { // ends with stop, or when a commit is refused as something else waits
		for i := 0; ; i++ {
			err := put(t, e, fmt.Sprint("change", i%10), 3000, false)
			select {
			case <-stop:
			default:
				if err == nil {
					continue
				}
			}
			ended <- err
			return
		}
	}()
	for begin := time.Now(); !e.room.isUsedUp(); {
		other.eat(0)
		if time.Since(begin) > time.Minute {
			t.Fatalf("the reserve is not used up: %+v", e.Room())
		}
	}
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if err := put(t, e, "refused", 1, false); errors.Is(err, catalog.ErrFull) && !errors.Is(err, catalog.ErrUnknown) {
			break
		} else if time.Since(begin) > time.Minute {
			t.Fatal(err)
		}
	}
	if value, err := e.Get(t.Context(), []byte("old")); err != nil || len(value) != 100 {
		t.Errorf("%d bytes, %v", len(value), err)
	}
	close(stop)
	other.giveBack()
	if err := <-ended; err != nil && !errors.Is(err, catalog.ErrFull) {
		t.Errorf("the commit that waited: %v", err)
	}
	mayGrow(t, e)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestNoRoomOnce has each kind of operation fail for lack of room, and succeed when it is repeated. Nothing is lost.
func TestNoRoomOnce(t *testing.T) {
	dir := smallDisk(t, 16<<20)
	for what, fails := range map[string]func(errorfs.Op) bool{
		"log create":    func(op errorfs.Op) bool { return op.Kind == errorfs.OpCreate && isLog(op.Path) },
		"log reuse":     func(op errorfs.Op) bool { return op.Kind == errorfs.OpReuseForWrite },
		"log write":     func(op errorfs.Op) bool { return op.Kind == errorfs.OpFileWrite && isLog(op.Path) },
		"log zeros":     func(op errorfs.Op) bool { return op.Kind == errorfs.OpFileWriteAt },
		"preallocation": func(op errorfs.Op) bool { return op.Kind == errorfs.OpFilePreallocate },
		"table create":  func(op errorfs.Op) bool { return op.Kind == errorfs.OpCreate && strings.HasSuffix(op.Path, ".sst") },
		"table write":   func(op errorfs.Op) bool { return op.Kind == errorfs.OpFileWrite && strings.HasSuffix(op.Path, ".sst") },
		"MANIFEST create": func(op errorfs.Op) bool {
			return op.Kind == errorfs.OpCreate && strings.Contains(op.Path, manifestPrefix)
		},
		"MANIFEST write": func(op errorfs.Op) bool {
			return op.Kind == errorfs.OpFileWrite && strings.Contains(op.Path, manifestPrefix)
		},
		"marker create": func(op errorfs.Op) bool { return op.Kind == errorfs.OpCreate && strings.Contains(op.Path, "marker.") },
		"other write": func(op errorfs.Op) bool {
			return op.Kind == errorfs.OpFileWrite && strings.HasSuffix(op.Path, ".dbtmp")
		},
		"rename": func(op errorfs.Op) bool { return op.Kind == errorfs.OpRename },
	} {
		t.Run(what, func(t *testing.T) {
			var count atomic.Int32
			cfg, _ := roomConfig(t, dir)
			cfg.MemTableBytes = minMemTableBytes
			cfg.fs = errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if n := count.Load(); n < 10 && fails(op) && count.Add(1)%2 == 1 {
					return syscall.ENOSPC
				}
				return nil
			}))
			const rows = 200
			for round := range 2 {
				e := mustOpen(t, cfg)
				for i := range rows {
					if err := put(t, e, fmt.Sprint("row", round, i), 1000, false); err != nil {
						t.Fatal(err)
					}
				}
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if count.Load() < 2 {
				t.Errorf("it happened %d times", count.Load())
			}
			e := mustOpen(t, cfg)
			for i := range 2 * rows {
				if _, err := e.Get(t.Context(), fmt.Append(nil, "row", i/rows, i%rows)); err != nil {
					t.Fatalf("row %d: %v", i, err)
				}
			}
			if err := errors.Join(e.Close(), os.RemoveAll(cfg.Dir)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestOpenWithoutRoom opens a catalog that has no reserve, on a disk without any room, and with some.
func TestOpenWithoutRoom(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t, 16<<20)
	cfg, _ := roomConfig(t, dir)
	e := mustOpen(t, cfg)
	if err := put(t, e, "old", 100, true); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(cfg.Dir, reserveName)); err != nil {
		t.Fatal(err)
	}
	other := newHog(t, dir)
	other.eat(0)
	if _, err := Open(cfg); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("without any room: %v", err)
	}
	other.giveBack()
	other.eat(2 << 20)
	e = mustOpen(t, cfg)
	if r := e.Room(); !r.Full || r.Reserve < reserveLeast/8 || r.Reserve == reserveLeast {
		t.Errorf("with little room: %+v", r)
	}
	if err := put(t, e, "old", 50, false); err != nil {
		t.Error(err)
	}
	other.giveBack()
	mayGrow(t, e)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestReserveCopied takes up a reserve that a copy of the catalog has made one of holes.
func TestReserveCopied(t *testing.T) {
	dir := smallDisk(t, 16<<20)
	cfg, _ := roomConfig(t, dir)
	name := filepath.Join(cfg.Dir, reserveName)
	err := errors.Join(os.Mkdir(cfg.Dir, 0o755), os.WriteFile(name, nil, 0o600), os.Truncate(name, 2*reserveLeast))
	if err != nil {
		t.Fatal(err)
	}
	e := mustOpen(t, cfg)
	if n, r := allocated(t, name), e.Room(); n != reserveLeast || r.Reserve != reserveLeast || r.Full {
		t.Errorf("%d bytes are allocated; %+v", n, r)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestFlood has an error come again and again: it is told once, without the stack that comes with it.
func TestFlood(t *testing.T) {
	log := new(lines)
	listener := events(slog.New(slog.NewTextHandler(log, nil)))
	_, err := vfs.Default.Open("/nowhere/at/all")
	for range 1000 {
		listener.BackgroundError(err)
	}
	if len(log.all) != 1 || log.count("/nowhere/at/all") != 1 || len(log.all[0]) > 300 {
		t.Errorf("%d lines: %q", len(log.all), log.all[:min(len(log.all), 2)])
	}
}
