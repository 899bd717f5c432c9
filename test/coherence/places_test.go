package coherence

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestMovedDirectory uses a directory that somebody has open on one mount and that is renamed on the other: first of all in
// a rename, which looks its names up while no directory may move, and then through both its old and its new place.
func TestMovedDirectory(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := twoMounts(v)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	on := func(m *harness.Mount, name string) string { return filepath.Join(m.Dir, name) }
	for _, name := range []string{"from", "to", "from/dir", "from/dir/below"} {
		check(os.Mkdir(on(a, name), 0o755))
	}
	dir, err := unix.Open(on(a, "from/dir"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check(err)
	below, err := unix.Open(on(a, "from/dir/below"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check(err)

	check(os.Rename(on(b, "from/dir"), on(b, "to/dir")))
	check(os.Rename(on(a, "to/dir"), on(a, "from/again")))

	var before, path, open unix.Stat_t
	check(unix.Stat(on(a, "from/again/below"), &before))
	for n, place := range []struct {
		path string
		fd   int
	}{{"from/again", dir}, {"from/again/below", below}} {
		name := on(a, place.path)
		check(unix.Fchmod(place.fd, 0o750+uint32(n)))
		check(unix.Stat(name, &path))
		if path.Mode&0o777 != 0o750+uint32(n) {
			t.Errorf("%s has mode %#o after it was changed through a descriptor", place.path, path.Mode)
		}
		check(unix.Chmod(name, 0o700))
		check(unix.Fstat(place.fd, &open))
		if open.Mode&0o777 != 0o700 || open.Ino != path.Ino {
			t.Errorf("inode %d has mode %#o after inode %d was changed by its name", open.Ino, open.Mode, path.Ino)
		}
		for range 3 { // so that the kernel knows there is none, if it keeps that
			if err := unix.Fstatat(place.fd, "new", &open, 0); err != unix.ENOENT {
				t.Fatalf("a file that is not there: %v", err)
			}
		}
		check(os.WriteFile(filepath.Join(name, "new"), nil, 0o644))
		if err := unix.Fstatat(place.fd, "new", &open, 0); err != nil {
			t.Errorf("a file made in %s is not seen through the descriptor: %v", place.path, err)
		}
		check(unix.Unlinkat(place.fd, "new", 0))
		if _, err := os.Stat(filepath.Join(name, "new")); !os.IsNotExist(err) {
			t.Errorf("a file removed through the descriptor is there in %s: %v", place.path, err)
		}
	}
	check(unix.Fstat(below, &open))
	if open.Ino != before.Ino {
		t.Errorf("inode %d was %d", open.Ino, before.Ino)
	}
	check(os.Rename(on(b, "from/again/below"), on(b, "from/again/beside")))
	check(os.Rename(on(a, "from/again/beside"), on(a, "to/beside")))
	check(os.Remove(on(b, "to/beside")))
	check(unix.Fstat(below, &open))
	if open.Nlink != 0 {
		t.Errorf("%d links of a removed directory", open.Nlink)
	}
	unix.Close(dir)
	unix.Close(below)
	for _, m := range []*harness.Mount{a, b} {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}
