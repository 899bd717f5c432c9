package real

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestHandles opens files and directories by handles (name_to_handle_at(2)) when the kernel has forgotten them: on the
// same mount, on a later one, and after they were renamed on another.
func TestHandles(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	on := func(m *harness.Mount, name string) string { return filepath.Join(m.Dir, name) }
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"from", "to", "from/dir", "from/dir/sub"} {
		check(os.Mkdir(on(a, name), 0o755))
	}
	check(os.WriteFile(on(a, "from/dir/sub/file"), []byte("contents"), 0o644))
	check(os.Symlink("target", on(a, "from/dir/link")))
	names := []string{".", "from/dir", "from/dir/sub", "from/dir/sub/file", "from/dir/link"}
	handles := map[string]unix.FileHandle{}
	inodes := map[string]uint64{}
	take := func(m *harness.Mount, name string) unix.FileHandle {
		t.Helper()
		h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, on(m, name), 0)
		check(err)
		return h
	}
	for _, name := range names {
		handles[name] = take(a, name)
		var st unix.Stat_t
		check(unix.Lstat(on(a, name), &st))
		inodes[name] = st.Ino
	}
	// open opens a handle after the kernel has forgotten all, and returns where that is.
	open := func(m *harness.Mount, h unix.FileHandle) (fd int, path string, err error) {
		t.Helper()
		root, err := unix.Open(m.Dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		check(err)
		defer unix.Close(root)
		harness.DropCaches(t)
		if fd, err = unix.OpenByHandleAt(root, h, unix.O_PATH|unix.O_CLOEXEC); err != nil {
			return -1, "", err
		}
		path, err = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		check(err)
		return fd, path, nil
	}
	// Directories are found at their places; a file may be known without its name.
	all := func(what string, m *harness.Mount, place map[string]string) {
		t.Helper()
		for _, name := range names {
			fd, path, err := open(m, handles[name])
			if err != nil {
				t.Errorf("%s: handle of %s: %v", what, name, err)
				continue
			}
			var st unix.Stat_t
			check(unix.Fstatat(fd, "", &st, unix.AT_EMPTY_PATH))
			if st.Ino != inodes[name] {
				t.Errorf("%s: handle of %s is inode %d, want %d", what, name, st.Ino, inodes[name])
			}
			if want := on(m, place[name]); st.Mode&unix.S_IFMT == unix.S_IFDIR && path != want {
				t.Errorf("%s: handle of %s is %s, want %s", what, name, path, want)
			}
			if name == "from/dir/sub/file" {
				if text, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", fd)); string(text) != "contents" {
					t.Errorf("%s: file has %q, %v", what, text, err)
				}
			}
			unix.Close(fd)
		}
	}
	before := map[string]string{}
	after := map[string]string{}
	for _, name := range names {
		before[name] = name
		after[name] = strings.Replace(name, "from/dir", "to/moved", 1)
	}
	all("at once", a, before)
	all("on another mount", b, before)

	// A directory that is open while another mount renames it is two to the kernel. Both have handles.
	_, close := openDir(t, on(a, "from/dir"))
	check(os.Rename(on(b, "from/dir"), on(b, "to/moved")))
	second := take(a, "to/moved")
	if first := handles["from/dir"]; slices.Equal(second.Bytes(), first.Bytes()) {
		t.Error("the directory has one handle: this test does not test what it should")
	}
	close()
	all("after the rename", a, after)
	both := func(what string, m *harness.Mount) {
		t.Helper()
		for _, h := range []unix.FileHandle{second, handles["from/dir"], second} {
			fd, path, err := open(m, h)
			if err != nil || path != on(m, "to/moved") {
				t.Errorf("%s: %q, %v", what, path, err)
				continue
			}
			list, err := os.ReadDir(fmt.Sprintf("/proc/self/fd/%d", fd))
			if err != nil || len(list) != 2 {
				t.Errorf("%s: %v, %v", what, list, err)
			}
			unix.Close(fd)
		}
	}
	both("after the rename", a)
	a.Unmount()
	a = v.Mount()
	all("on a later mount", a, after)
	both("on a later mount", a)

	// What is gone is ESTALE.
	check(os.Remove(on(b, "to/moved/sub/file")))
	if _, path, err := open(a, handles["from/dir/sub/file"]); err != unix.ESTALE {
		t.Errorf("a file that was removed is %q, %v", path, err)
	}

	// The identity of the file system is part of what is told of files.
	var one, two unix.Statfs_t
	check(unix.Statfs(a.Dir, &one))
	check(unix.Statfs(b.Dir, &two))
	if one.Fsid != two.Fsid {
		t.Errorf("f_fsid is %v on one mount and %v on another", one.Fsid, two.Fsid)
	}
}

// TestFanotify watches a directory with fanotify(7), which names it by its handle.
func TestFanotify(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount()
	dir := filepath.Join(m.Dir, "dir")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_DIR_FID|unix.FAN_REPORT_NAME|unix.FAN_NONBLOCK|unix.FAN_CLOEXEC, 0)
	if err != nil {
		t.Skipf("missing: fanotify by handles: %v", err)
	}
	watch := os.NewFile(uintptr(fd), "fanotify")
	defer watch.Close()
	err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_CREATE|unix.FAN_ONDIR, unix.AT_FDCWD, dir)
	if errors.Is(err, unix.ENODEV) {
		t.Skip("missing: a kernel that lets inodes without f_fsid be watched; Linux 6.8 does")
	}
	if err != nil {
		t.Fatal(err)
	}
	err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, unix.FAN_CREATE|unix.FAN_ONDIR, unix.AT_FDCWD, m.Dir)
	if err != nil && !errors.Is(err, unix.ENODEV) { // the latter is what docs/posix.md says
		t.Errorf("mark of a file system without f_fsid: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "made"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	n, err := unix.Read(fd, buf)
	if err != nil {
		t.Fatal(err)
	}
	watch.Close() // it keeps the inode
	// struct fanotify_event_metadata (24 bytes), fanotify_event_info_fid (a header of 4 bytes and the fsid), struct
	// file_handle, the name.
	const metadata, info = 24, 12
	h := buf[metadata+info : n]
	length, kind := binary.NativeEndian.Uint32(h), binary.NativeEndian.Uint32(h[4:])
	handle := unix.NewFileHandle(int32(kind), h[8:8+length])
	name, _, _ := strings.Cut(string(h[8+length:]), "\x00")
	root, close := openDir(t, m.Dir)
	defer close()
	harness.DropCaches(t)
	at, err := unix.OpenByHandleAt(root, handle, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(at)
	if path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", at)); path != dir || name != "made" {
		t.Errorf("%q was made in %q, %v", name, path, err)
	}
}
