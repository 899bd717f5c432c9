package posix

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// A world is the directory a case works in.
type world string

func (w world) at(p string) string { return filepath.Join(string(w), p) }

// file makes a file with some contents.
func (w world) file(p, content string) string {
	if err := os.WriteFile(w.at(p), []byte(content), 0o644); err != nil {
		panic(err)
	}
	return w.at(p)
}

func (w world) dir(p string) string {
	if err := os.Mkdir(w.at(p), 0o755); err != nil {
		panic(err)
	}
	return w.at(p)
}

// open opens and closes a file.
func open(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

func stat(path string) unix.Stat_t {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		panic(err)
	}
	return st
}

func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// A check gives an answer, of which only the text counts: an errno, a number, contents.
type check struct {
	name string
	want string
	do   func(w world) any
}

const long = 255

var checks = []check{
	{"open missing", "no such file or directory", func(w world) any { return open(w.at("no"), unix.O_RDONLY) }},
	{"open below a file", "not a directory", func(w world) any { return open(w.file("f", "")+"/x", unix.O_RDONLY) }},
	{"open O_EXCL existing", "file exists", func(w world) any { return open(w.file("f", ""), unix.O_CREAT|unix.O_EXCL|unix.O_RDWR) }},
	{"open O_DIRECTORY on a file", "not a directory", func(w world) any { return open(w.file("f", ""), unix.O_DIRECTORY) }},
	{"open a directory for writing", "is a directory", func(w world) any { return open(w.dir("d"), unix.O_RDWR) }},
	{"open O_NOFOLLOW a symlink", "too many levels of symbolic links", func(w world) any {
		unix.Symlink("f", w.at("l"))
		return open(w.at("l"), unix.O_NOFOLLOW)
	}},
	{"open O_TRUNC", "0", func(w world) any {
		p := w.file("f", "some bytes")
		open(p, unix.O_WRONLY|unix.O_TRUNC)
		return stat(p).Size
	}},
	{"name of 255 bytes", "<nil>", func(w world) any { return open(w.at(strings.Repeat("n", long)), unix.O_CREAT|unix.O_RDWR) }},
	{"name of 256 bytes", "file name too long", func(w world) any { return open(w.at(strings.Repeat("n", long+1)), unix.O_CREAT|unix.O_RDWR) }},
	{"name that is not UTF-8", `["\xff\xfe\x01"]`, func(w world) any {
		w.file("\xff\xfe\x01", "")
		entries, _ := os.ReadDir(string(w))
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return fmt.Sprintf("%q", names)
	}},
	{"write and read back", "hello", func(w world) any { return read(w.file("f", "hello")) }},
	{"write past the end leaves a hole", "10240 0 x", func(w world) any {
		f, _ := os.Create(w.at("f"))
		defer f.Close()
		f.WriteAt([]byte("x"), 10239)
		b := read(w.at("f"))
		return fmt.Sprint(len(b), strings.Count(b[:10239], "x"), " ", b[10239:])
	}},
	{"read past the end", "0 EOF", func(w world) any {
		f, _ := os.Open(w.file("f", "abc"))
		defer f.Close()
		n, err := f.ReadAt(make([]byte, 10), 100)
		return fmt.Sprint(n, " ", err)
	}},
	{"truncate shorter and longer", `"ab\x00\x00"`, func(w world) any {
		p := w.file("f", "abcdef")
		unix.Truncate(p, 2)
		unix.Truncate(p, 4)
		return fmt.Sprintf("%q", read(p))
	}},
	{"truncate a directory", "is a directory", func(w world) any { return unix.Truncate(w.dir("d"), 0) }},
	{"O_APPEND", "onetwo", func(w world) any {
		p := w.file("f", "one")
		fd, _ := unix.Open(p, unix.O_WRONLY|unix.O_APPEND, 0)
		defer unix.Close(fd)
		unix.Write(fd, []byte("two"))
		return read(p)
	}},
	{"O_APPEND by two descriptors", "aabb", func(w world) any {
		p := w.file("f", "")
		one, _ := unix.Open(p, unix.O_WRONLY|unix.O_APPEND, 0)
		two, _ := unix.Open(p, unix.O_WRONLY|unix.O_APPEND, 0)
		defer unix.Close(one)
		defer unix.Close(two)
		unix.Write(one, []byte("aa"))
		unix.Write(two, []byte("bb"))
		return read(p)
	}},
	{"O_SYNC write", "5", func(w world) any {
		fd, _ := unix.Open(w.at("f"), unix.O_CREAT|unix.O_WRONLY|unix.O_SYNC, 0o644)
		defer unix.Close(fd)
		n, _ := unix.Write(fd, []byte("bytes"))
		return n
	}},
	{"write to a descriptor open for reading", "bad file descriptor", func(w world) any {
		fd, _ := unix.Open(w.file("f", ""), unix.O_RDONLY, 0)
		defer unix.Close(fd)
		_, err := unix.Write(fd, []byte("x"))
		return err
	}},
	{"shared mmap is seen by read", "Mapped", func(w world) any {
		fd, _ := unix.Open(w.file("f", "mapped"), unix.O_RDWR, 0)
		defer unix.Close(fd)
		m, err := unix.Mmap(fd, 0, 6, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		m[0] = 'M'
		if err := unix.Msync(m, unix.MS_SYNC); err != nil {
			return err
		}
		unix.Munmap(m)
		return read(w.at("f"))
	}},
	{"fsync of file and directory", "<nil> <nil>", func(w world) any {
		f, _ := os.Create(w.at("f"))
		defer f.Close()
		d, _ := os.Open(string(w))
		defer d.Close()
		return fmt.Sprint(f.Sync(), " ", d.Sync())
	}},
	{"unlinked file stays usable", "still here 0", func(w world) any {
		f, _ := os.OpenFile(w.file("f", "still here"), os.O_RDWR, 0)
		defer f.Close()
		os.Remove(w.at("f"))
		b := make([]byte, 10)
		f.ReadAt(b, 0)
		var st unix.Stat_t
		unix.Fstat(int(f.Fd()), &st)
		return fmt.Sprint(string(b), " ", st.Nlink)
	}},
	{"mkdir existing", "file exists", func(w world) any { return unix.Mkdir(w.dir("d"), 0o755) }},
	{"mkdir without parent", "no such file or directory", func(w world) any { return unix.Mkdir(w.at("a/b"), 0o755) }},
	{"rmdir not empty", "directory not empty", func(w world) any {
		w.dir("d")
		w.file("d/f", "")
		return unix.Rmdir(w.at("d"))
	}},
	{"rmdir a file", "not a directory", func(w world) any { return unix.Rmdir(w.file("f", "")) }},
	{"unlink a directory", "is a directory", func(w world) any { return unix.Unlink(w.dir("d")) }},
	{"links of a directory", "4", func(w world) any {
		w.dir("d")
		w.dir("d/a")
		w.dir("d/b")
		w.file("d/f", "")
		return stat(w.at("d")).Nlink
	}},
	{"rename over a file", "new 1", func(w world) any {
		w.file("a", "new")
		w.file("b", "old")
		unix.Rename(w.at("a"), w.at("b"))
		entries, _ := os.ReadDir(string(w))
		return fmt.Sprint(read(w.at("b")), " ", len(entries))
	}},
	{"rename a directory over a file", "not a directory", func(w world) any { return unix.Rename(w.dir("d"), w.file("f", "")) }},
	{"rename a file over a directory", "is a directory", func(w world) any { return unix.Rename(w.file("f", ""), w.dir("d")) }},
	{"rename over a directory that is not empty", "directory not empty", func(w world) any {
		w.dir("a")
		w.dir("b")
		w.file("b/f", "")
		return unix.Rename(w.at("a"), w.at("b"))
	}},
	{"rename into itself", "invalid argument", func(w world) any {
		w.dir("d")
		return unix.Rename(w.at("d"), w.at("d/e"))
	}},
	{"rename of two names of one file does nothing", "2", func(w world) any {
		w.file("a", "")
		unix.Link(w.at("a"), w.at("b"))
		unix.Rename(w.at("a"), w.at("b"))
		return stat(w.at("a")).Nlink
	}},
	{"rename RENAME_NOREPLACE", "file exists", func(w world) any {
		return unix.Renameat2(unix.AT_FDCWD, w.file("a", ""), unix.AT_FDCWD, w.file("b", ""), unix.RENAME_NOREPLACE)
	}},
	{"rename RENAME_EXCHANGE", "B", func(w world) any {
		unix.Renameat2(unix.AT_FDCWD, w.file("a", "A"), unix.AT_FDCWD, w.file("b", "B"), unix.RENAME_EXCHANGE)
		return read(w.at("a"))
	}},
	{"rename a directory across directories moves its link", "2 3", func(w world) any {
		w.dir("a")
		w.dir("b")
		w.dir("a/d")
		unix.Rename(w.at("a/d"), w.at("b/d"))
		return fmt.Sprint(stat(w.at("a")).Nlink, " ", stat(w.at("b")).Nlink)
	}},
	{"hard link", "2 same", func(w world) any {
		unix.Link(w.file("a", "same"), w.at("b"))
		return fmt.Sprint(stat(w.at("a")).Nlink, " ", read(w.at("b")))
	}},
	{"hard link to a directory", "operation not permitted", func(w world) any { return unix.Link(w.dir("d"), w.at("e")) }},
	{"symlink and readlink", "some/where 10", func(w world) any {
		unix.Symlink("some/where", w.at("l"))
		target, _ := os.Readlink(w.at("l"))
		return fmt.Sprint(target, " ", stat(w.at("l")).Size)
	}},
	{"symlink of 4095 bytes", "4095", func(w world) any {
		unix.Symlink(strings.Repeat("s", 4095), w.at("l"))
		target, _ := os.Readlink(w.at("l"))
		return len(target)
	}},
	{"readlink of a file", "invalid argument", func(w world) any {
		_, err := unix.Readlink(w.file("f", ""), make([]byte, 10))
		return err
	}},
	{"mkfifo", "fifo", func(w world) any { return node(w, unix.S_IFIFO, 0) }},
	{"mknod socket", "socket", func(w world) any { return node(w, unix.S_IFSOCK, 0) }},
	{"mknod device", "device 1 3", func(w world) any { return node(w, unix.S_IFCHR, int(unix.Mkdev(1, 3))) }},
	{"chmod", "4751", func(w world) any {
		unix.Chmod(w.file("f", ""), 0o4751)
		return fmt.Sprintf("%o", stat(w.at("f")).Mode&0o7777)
	}},
	{"chown", "7 8", func(w world) any {
		unix.Lchown(w.file("f", ""), 7, 8)
		st := stat(w.at("f"))
		return fmt.Sprint(st.Uid, " ", st.Gid)
	}},
	{"umask", "640", func(w world) any {
		defer unix.Umask(unix.Umask(0o027))
		unix.Close(must(unix.Open(w.at("f"), unix.O_CREAT|unix.O_RDWR, 0o666)))
		return fmt.Sprintf("%o", stat(w.at("f")).Mode&0o7777)
	}},
	{"set-group-ID directory", "9 2755", func(w world) any {
		d := w.dir("d")
		unix.Lchown(d, -1, 9)
		unix.Chmod(d, 0o2755)
		w.dir("d/e")
		return fmt.Sprintf("%d %o", stat(w.at("d/e")).Gid, stat(w.at("d/e")).Mode&0o7777)
	}},
	{"utimensat", "1.5 2.000000007", func(w world) any {
		unix.UtimesNanoAt(unix.AT_FDCWD, w.file("f", ""), []unix.Timespec{{Sec: 1, Nsec: 5e8}, {Sec: 2, Nsec: 7}}, 0)
		st := stat(w.at("f"))
		return fmt.Sprintf("%d.%g %d.%09d", st.Atim.Sec, float64(st.Atim.Nsec)/1e8, st.Mtim.Sec, st.Mtim.Nsec)
	}},
	{"times set before close stay", "5", func(w world) any {
		f, _ := os.Create(w.at("f"))
		f.WriteString("late data")
		unix.UtimesNanoAt(unix.AT_FDCWD, w.at("f"), []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0)
		f.Close()
		return stat(w.at("f")).Mtim.Sec
	}},
	{"times set after a write leave the size", "8192", func(w world) any {
		f, _ := os.Create(w.at("f"))
		defer f.Close()
		f.Truncate(4096)
		f.WriteAt(make([]byte, 4096), 4096)
		unix.UtimesNanoAt(unix.AT_FDCWD, w.at("f"), []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0)
		return stat(w.at("f")).Size
	}},
	{"a write moves mtime", "true", func(w world) any {
		p := w.file("f", "")
		unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0)
		w.file("f", "again")
		return stat(p).Mtim.Sec > 5
	}},
	{"creating moves the directory's mtime", "true", func(w world) any {
		d := w.dir("d")
		unix.UtimesNanoAt(unix.AT_FDCWD, d, []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0)
		w.file("d/f", "")
		return stat(d).Mtim.Sec > 5
	}},
	{"xattr round trip", "value", func(w world) any {
		p := w.file("f", "")
		unix.Setxattr(p, "user.k", []byte("value"), 0)
		b := make([]byte, 10)
		n, err := unix.Getxattr(p, "user.k", b)
		if err != nil {
			return err
		}
		return string(b[:n])
	}},
	{"xattr missing", "no data available", func(w world) any {
		_, err := unix.Getxattr(w.file("f", ""), "user.k", nil)
		return err
	}},
	{"xattr XATTR_CREATE twice", "file exists", func(w world) any {
		p := w.file("f", "")
		unix.Setxattr(p, "user.k", nil, 0)
		return unix.Setxattr(p, "user.k", nil, unix.XATTR_CREATE)
	}},
	{"xattr XATTR_REPLACE missing", "no data available", func(w world) any {
		return unix.Setxattr(w.file("f", ""), "user.k", nil, unix.XATTR_REPLACE)
	}},
	{"xattr buffer too small", "numerical result out of range", func(w world) any {
		p := w.file("f", "")
		unix.Setxattr(p, "user.k", []byte("long value"), 0)
		_, err := unix.Getxattr(p, "user.k", make([]byte, 3))
		return err
	}},
	{"xattr list", "user.a user.b", func(w world) any {
		p := w.file("f", "")
		unix.Setxattr(p, "user.a", nil, 0)
		unix.Setxattr(p, "user.b", nil, 0)
		b := make([]byte, 100)
		n, _ := unix.Listxattr(p, b)
		names := strings.Split(strings.Trim(string(b[:n]), "\x00"), "\x00")
		slices.Sort(names)
		return strings.Join(names, " ")
	}},
	{"readdir of many", "3000", func(w world) any {
		for i := range 3000 {
			unix.Close(must(unix.Open(w.at(fmt.Sprint("file-with-a-name-", i)), unix.O_CREAT|unix.O_WRONLY, 0o644)))
		}
		entries, _ := os.ReadDir(string(w))
		return len(entries)
	}},
	{"d_type", "dL-", func(w world) any {
		w.dir("a")
		unix.Symlink("x", w.at("b"))
		w.file("c", "")
		entries, _ := os.ReadDir(string(w))
		var kinds strings.Builder
		for _, e := range entries {
			kinds.WriteString(e.Type().String()[:1])
		}
		return kinds.String()
	}},
	{"inode numbers agree", "true", func(w world) any {
		w.file("f", "")
		d, _ := os.Open(string(w))
		defer d.Close()
		buf := make([]byte, 4096)
		n, _ := unix.Getdents(int(d.Fd()), buf)
		var ino [8]byte
		i := bytes.Index(buf[:n], []byte("f\x00"))
		copy(ino[:], buf[i-19:i-11])
		st := stat(w.at("f"))
		want := [8]byte{}
		for j := range want {
			want[j] = byte(st.Ino >> (8 * j))
		}
		return ino == want
	}},
	{"flock between descriptors", "resource temporarily unavailable", func(w world) any {
		p := w.file("f", "")
		one, two := must(unix.Open(p, unix.O_RDWR, 0)), must(unix.Open(p, unix.O_RDWR, 0))
		defer unix.Close(one)
		defer unix.Close(two)
		unix.Flock(one, unix.LOCK_EX)
		return unix.Flock(two, unix.LOCK_EX|unix.LOCK_NB)
	}},
	{"fallocate extends", "5000", func(w world) any {
		f, _ := os.Create(w.at("f"))
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), 0, 0, 5000); err != nil {
			return err
		}
		return stat(w.at("f")).Size
	}},
	{"fallocate punches", `"ab\x00\x00ef"`, func(w world) any {
		f, _ := os.OpenFile(w.file("f", "abcdef"), os.O_RDWR, 0)
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 2, 2); err != nil {
			return err
		}
		return fmt.Sprintf("%q", read(w.at("f")))
	}},
	{"offset too large", "invalid argument", func(w world) any {
		fd := must(unix.Open(w.at("f"), unix.O_CREAT|unix.O_RDWR, 0o644))
		defer unix.Close(fd)
		_, err := unix.Pwrite(fd, []byte("x"), 1<<63-1)
		return err
	}},
	{"statfs", "255 true", func(w world) any {
		var st unix.Statfs_t
		if err := unix.Statfs(string(w), &st); err != nil {
			return err
		}
		return fmt.Sprint(st.Namelen, " ", st.Blocks > 0 && st.Bavail <= st.Blocks)
	}},
}

// localDiffers lists the cases where a local file system of this kernel answers otherwise, with the reason.
var localDiffers = map[string]string{
	"offset too large":      "ext4 has a largest file and answers EFBIG; for FUSE the kernel itself refuses an offset that overflows",
	"symlink of 4095 bytes": "some local file systems keep less",
}

func must(fd int, err error) int {
	if err != nil {
		panic(err)
	}
	return fd
}

func node(w world, kind uint32, dev int) any {
	if err := unix.Mknod(w.at("n"), kind|0o644, dev); err != nil {
		return err
	}
	st := stat(w.at("n"))
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFIFO:
		return "fifo"
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFCHR:
		return fmt.Sprint("device ", unix.Major(st.Rdev), " ", unix.Minor(st.Rdev))
	}
	return fmt.Sprintf("mode %o", st.Mode)
}

func TestCalls(t *testing.T) {
	m := harness.NewVolume(t, harness.Options{}).Mount()
	local := t.TempDir()
	for i, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			for _, where := range []struct{ name, root string }{{"weft", m.Dir}, {"local", local}} {
				w := world(filepath.Join(where.root, fmt.Sprint(i)))
				if err := os.Mkdir(string(w), 0o755); err != nil {
					t.Fatal(err)
				}
				got := fmt.Sprint(c.do(w))
				if reason := localDiffers[c.name]; got != c.want && (where.name == "weft" || reason == "") {
					t.Errorf("%s: %s, want %s", where.name, got, c.want)
				}
			}
		})
	}
}
