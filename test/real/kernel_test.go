package real

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestOneMountOnly looks at what the kernel does for a FUSE file system without asking it: docs/posix.md, "What the
// kernel keeps to itself".
func TestOneMountOnly(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	open := func(m *harness.Mount, name string, flags int) (int, error) {
		fd, err := unix.Open(filepath.Join(m.Dir, name), flags|unix.O_CLOEXEC, 0)
		if err == nil {
			t.Cleanup(func() { unix.Close(fd) })
		}
		return fd, err
	}
	opened := func(m *harness.Mount, name string, flags int) int {
		t.Helper()
		fd, err := open(m, name, flags)
		check(err)
		return fd
	}
	check(os.Mkdir(filepath.Join(a.Dir, "dir"), 0o755))
	check(os.WriteFile(filepath.Join(a.Dir, "file"), nil, 0o644))

	lock := func(m *harness.Mount) error {
		return unix.Flock(opened(m, "dir", unix.O_RDONLY), unix.LOCK_EX|unix.LOCK_NB)
	}
	if first, same, other := lock(a), lock(a), lock(b); first != nil || same != unix.EWOULDBLOCK || other != nil {
		t.Errorf("flock of a directory: %v, on the same mount %v, on another %v", first, same, other)
	}

	_, err := unix.FcntlInt(uintptr(opened(a, "file", unix.O_RDONLY)), unix.F_SETLEASE, unix.F_RDLCK)
	check(err)
	_, same := open(a, "file", unix.O_WRONLY|unix.O_NONBLOCK)
	_, other := open(b, "file", unix.O_WRONLY|unix.O_NONBLOCK)
	if same != unix.EWOULDBLOCK || other != nil {
		t.Errorf("open against a lease: on the same mount %v, on another %v", same, other)
	}

	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	check(err)
	defer unix.Close(watch)
	_, err = unix.InotifyAddWatch(watch, filepath.Join(a.Dir, "dir"), unix.IN_CREATE)
	check(err)
	hears := func(m *harness.Mount, name string) bool {
		t.Helper()
		check(os.WriteFile(filepath.Join(m.Dir, "dir", name), nil, 0o644))
		_, err := os.Stat(filepath.Join(a.Dir, "dir", name))
		check(err)
		n, err := unix.Read(watch, make([]byte, 4096))
		return err == nil && n > 0
	}
	if other, same := hears(b, "other"), hears(a, "same"); other || !same {
		t.Errorf("inotify hears of its own mount: %v, of another: %v", same, other)
	}

	if _, err := unix.IoctlGetInt(opened(a, "file", unix.O_RDONLY), unix.FS_IOC_GETFLAGS); err != unix.ENOTTY && err != unix.EOPNOTSUPP {
		t.Errorf("lsattr: %v", err)
	}

	for i := range 257 {
		err := unix.Setxattr(filepath.Join(b.Dir, "file"), fmt.Sprint("user.", i), nil, 0)
		if i < 256 {
			check(err)
		} else if err != unix.ENOSPC {
			t.Errorf("attribute number %d: %v", i+1, err)
		}
	}
}
