package data

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// Handles outlive the server that gave them out, and files that were moved or given away, but not their files.
func TestHandlesLast(t *testing.T) {
	dir := t.TempDir()
	ts := start(t, dir)
	c := ts.dial()
	sub := c.mkdir(super, ts.root, "d", wire.Sattr{}).FH.FH
	fh := c.create(sub, "f", 1000, 1001)
	removed := c.create(sub, "g", 1000, 1001)
	c.put(fh, 0, []byte("data"))
	root := ts.root
	ts.stop()

	if err := os.Rename(ts.export("d", "f"), ts.export("moved")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(ts.export("d", "g")); err != nil {
		t.Fatal(err)
	}
	// The inode's number is likely to be taken by the next file.
	if err := os.WriteFile(ts.export("d", "new"), []byte("secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	ts = start(t, dir)
	c = ts.dial()
	equal(t, "root", ts.root, root)
	c.check(fh, 0, []byte("data"))
	equal(t, "handle", c.lookup(super, root, "moved").FH, fh)
	equal(t, "GETATTR", c.getattr(sub).Status, wire.OK)
	equal(t, "GETATTR of what was removed", c.getattr(removed).Status, wire.ErrStale)
	equal(t, "READ of what was removed", c.read(super, removed, 0, 10).Status, wire.ErrStale)
}

func TestHandlesCannotBeForged(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	for _, good := range []wire.FileHandle{fh, ts.root} {
		b := good.Bytes()
		for i := range b {
			for _, flip := range []byte{1, 0x80, 0xff} {
				forged := bytes.Clone(b)
				forged[i] ^= flip
				h, _ := wire.NewFileHandle(forged)
				if st := c.getattr(h).Status; st != wire.ErrBadHandle {
					t.Errorf("byte %d changed: %v", i, st)
				}
			}
		}
		for n := range len(b) {
			h, _ := wire.NewFileHandle(b[:n])
			if st := c.getattr(h).Status; st != wire.ErrBadHandle {
				t.Errorf("%d bytes of it: %v", n, st)
			}
		}
		longer, _ := wire.NewFileHandle(append(bytes.Clone(b), 0))
		equal(t, "a byte more", c.getattr(longer).Status, wire.ErrBadHandle)
	}

	// A file outside the export, on the same file system, with a MAC by another key.
	other := start(t, "")
	outside, _, err := other.handles.of(other.Server.root, "")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "another export's root", c.getattr(outside).Status, wire.ErrBadHandle)
}

// A file that is removed while a request has it open is closed, and stale, as soon as the request has ended, also if
// the request found it before and entered it in the cache after it was removed.
func TestRemovedWhileOpen(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	for _, cached := range []bool{true, false} {
		fh := c.create(ts.root, "f", 1, 1)
		c.put(fh, 0, []byte("data"))
		f, err := ts.get(fh)
		if err != nil {
			t.Fatal(err)
		}
		if cached {
			equal(t, "REMOVE", c.remove(super, ts.root, "f"), wire.OK)
		} else if err := os.Remove(ts.export("f")); err != nil {
			t.Fatal(err)
		}
		equal(t, "GETATTR", c.getattr(fh).Status, wire.ErrStale)
		equal(t, "READ", c.read(super, fh, 0, 4).Status, wire.ErrStale)
		equal(t, "WRITE", c.write(super, fh, 0, []byte("data"), wire.Unstable).Status, wire.ErrStale)
		if err := unix.Fstat(f.fd, new(unix.Stat_t)); err != nil {
			t.Fatal("closed under a request: ", err)
		}
		ts.cache.put(f)
		if err := unix.Fstat(f.fd, new(unix.Stat_t)); err != unix.EBADF {
			t.Errorf("still open: %v", err)
		}
	}
}

// The cache keeps no more files open than it may, and closes what was not used for longest.
func TestCacheBound(t *testing.T) {
	ts := start(t, "", limitFiles(10))
	c := ts.dial()
	var files []wire.FileHandle
	for i := range 50 {
		fh := c.create(ts.root, string(rune('A'+i)), 1, 1)
		files = append(files, fh)
		c.put(fh, 0, []byte{byte(i)})
		c.check(files[0], 0, []byte{0})
		if n := ts.openFiles(); n > 10 {
			t.Fatalf("%d files open", n)
		}
	}
	if !ts.isOpen(files[0]) || !ts.isOpen(files[49]) || ts.isOpen(files[1]) {
		t.Error("the wrong files are open")
	}
	for i, fh := range files {
		c.check(fh, 0, []byte{byte(i)})
	}
	// Files in use are not closed, however many.
	var held []*file
	for _, fh := range files {
		f, err := ts.get(fh)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, f)
	}
	for i, f := range held {
		var b [1]byte
		if n, err := unix.Pread(f.fd, b[:], 0); n != 1 || b[0] != byte(i) {
			t.Errorf("file %d: %v", i, err)
		}
		ts.cache.put(f)
	}
}

func TestTwoServers(t *testing.T) {
	ts := start(t, "")
	if _, err := Open(Config{Dir: ts.dir}); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), ts.dir) {
		t.Errorf("second server: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(ts.dir, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Config{Dir: link}); !errors.Is(err, ErrLocked) {
		t.Errorf("second server by another name: %v", err)
	}
	ts.stop()
	start(t, ts.dir)
}

func TestKey(t *testing.T) {
	ts := start(t, filepath.Join(t.TempDir(), "some", "where"))
	ts.dial().create(ts.root, "f", 1, 1)
	ts.stop()
	path := filepath.Join(ts.dir, "key")
	key, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, _ := os.Stat(path); fi.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode is %v", fi.Mode())
	}
	flipped := bytes.Clone(key)
	flipped[5] ^= 1
	for name, b := range map[string][]byte{"empty": {}, "short": key[:39], "long": append(bytes.Clone(key), 0), "flipped": flipped} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(Config{Dir: ts.dir}); err == nil || !strings.Contains(err.Error(), path+" is damaged") {
			t.Errorf("%s key: %v", name, err)
		}
	}
	os.Remove(path)
	if _, err := Open(Config{Dir: ts.dir}); err == nil || !strings.Contains(err.Error(), path+" is missing") {
		t.Errorf("no key: %v", err)
	}
	// With nothing to lose a new one is made, and an interrupted attempt is no obstacle.
	os.Remove(ts.export("f"))
	if err := os.WriteFile(path+".new", key[:10], 0o600); err != nil {
		t.Fatal(err)
	}
	again := start(t, ts.dir)
	if again.root == ts.root {
		t.Error("the new key makes the handles of the old one")
	}
}

func TestDirectoryCannotBeUsed(t *testing.T) {
	needRoot(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{file, filepath.Join(file, "below"), "/proc/weft"} {
		if _, err := Open(Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// A process without the rights of root is told at once.
func TestCapabilities(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	for bit, name := range map[int]string{
		unix.CAP_CHOWN: "CAP_CHOWN", unix.CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE",
		unix.CAP_DAC_READ_SEARCH: "CAP_DAC_READ_SEARCH", unix.CAP_FOWNER: "CAP_FOWNER",
	} {
		done := make(chan error)
		go func() { // ends with Open, and its thread with it
			runtime.LockOSThread()
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var caps [2]unix.CapUserData
			err := unix.Capget(&header, &caps[0])
			if err == nil {
				caps[0].Effective &^= 1 << bit
				err = unix.Capset(&header, &caps[0])
			}
			if err == nil {
				_, err = Open(Config{Dir: dir})
			}
			done <- err
		}()
		if err := <-done; !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// A file of another file system that is mounted in the export has no handle: on the export's it would be another file.
func TestMountInExport(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	c.mkdir(super, ts.root, "m", wire.Sattr{})
	mountRAM(t, ts.export("m"), "")
	equal(t, "LOOKUP", c.lookup(super, ts.root, "m").Status, wire.ErrXDev)
	c.names(ts.root, false, 8192, nil)
}

// mountRAM mounts a tmpfs on dir until the test ends.
func mountRAM(t testing.TB, dir, options string) {
	t.Helper()
	needRoot(t)
	if err := unix.Mount("weft-test", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("needs to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
}
