package posix

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A check gives an answer, of which only the text counts (see say): an errno, a number, contents. It runs in an empty
// directory of each file system. Where want is empty POSIX leaves a choice, or the row is one of a matrix, and the answer
// must be that of the local disk's file system.
type check struct {
	name string
	want string
	do   func(w world) any
}

// A world is the directory a check works in. Its methods make what the check needs and panic if they cannot, which is then
// the check's answer.
type world string

func (w world) at(p string) string { return filepath.Join(string(w), p) }

// file makes a file with some contents. A process forked meanwhile would have the file open for writing for a moment, so
// that it could not be executed.
func (w world) file(p, content string) string {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	try(os.WriteFile(w.at(p), []byte(content), 0o644))
	return w.at(p)
}

func (w world) dir(p string) string {
	try(unix.Mkdir(w.at(p), 0o755))
	return w.at(p)
}

func (w world) link(target, p string) string {
	try(unix.Symlink(target, w.at(p)))
	return w.at(p)
}

// kinds are what a name can stand for. Those that are there are made by make.
var kinds = []string{"missing", "file", "empty", "dir", "full", "symlink", "dirlink", "dangling", "loop", "fifo", "socket", "null"}

// make makes a file of a kind.
func (w world) make(kind, p string) string {
	switch kind {
	case "missing":
	case "file":
		w.file(p, "data")
	case "empty":
		w.file(p, "")
	case "dir":
		w.dir(p)
	case "full":
		w.dir(p)
		w.file(p+"/inside", "")
	case "symlink":
		w.file(p+".target", "target")
		w.link(filepath.Base(p)+".target", p)
	case "dirlink":
		w.dir(p + ".target")
		w.link(filepath.Base(p)+".target", p)
	case "dangling":
		w.link(filepath.Base(p)+".nowhere", p)
	case "loop":
		w.link(filepath.Base(p), p)
	case "fifo":
		try(unix.Mkfifo(w.at(p), 0o644))
	case "socket":
		try(unix.Mknod(w.at(p), unix.S_IFSOCK|0o644, 0))
	case "null":
		try(unix.Mknod(w.at(p), unix.S_IFCHR|0o644, int(unix.Mkdev(1, 3))))
	default:
		panic("no kind " + kind)
	}
	return w.at(p)
}

// tree lists what is there: names with types and, of files, contents.
func (w world) tree() string {
	var out []string
	try(filepath.WalkDir(string(w), func(path string, d os.DirEntry, err error) error {
		if err != nil || path == string(w) {
			return err
		}
		rel, _ := filepath.Rel(string(w), path)
		switch {
		case d.IsDir():
			rel += "/"
		case d.Type().IsRegular():
			rel += "=" + read(path)
		case d.Type()&os.ModeSymlink != 0:
			rel += "->" + readlink(path)
		default:
			rel += "(" + typeOf(lstat(path)) + ")"
		}
		out = append(out, rel)
		return nil
	}))
	return strings.Join(out, " ")
}

func try(err error) {
	if err != nil {
		panic(fmt.Errorf("the check itself: %w", err))
	}
}

func must[T any](v T, err error) T {
	try(err)
	return v
}

// say is the answer made of several values.
func say(vs ...any) string {
	var b strings.Builder
	for i, v := range vs {
		if i > 0 {
			b.WriteByte(' ')
		}
		switch v := v.(type) {
		case nil:
			b.WriteString("ok")
		case error:
			b.WriteString(errName(v))
		case []byte:
			b.WriteString(short(string(v)))
		default:
			fmt.Fprint(&b, v)
		}
	}
	return b.String()
}

// short shows contents: long runs of a byte are counted, and much is told by its sum.
func short(s string) string {
	if len(s) > 10000 {
		return fmt.Sprintf("%d bytes with sum %x", len(s), crc32.ChecksumIEEE([]byte(s)))
	}
	var b strings.Builder
	for len(s) > 0 {
		n := 1
		for n < len(s) && s[n] == s[0] {
			n++
		}
		if n > 3 {
			fmt.Fprintf(&b, "(%d*%s)", n, strings.Trim(fmt.Sprintf("%q", s[:1]), `"`))
		} else {
			b.WriteString(strings.Trim(fmt.Sprintf("%q", s[:n]), `"`))
		}
		s = s[n:]
	}
	if b.Len() == 0 {
		return "nothing"
	}
	return b.String()
}

func errName(err error) string {
	var e syscall.Errno
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &e) && e == unix.EOPNOTSUPP:
		return "EOPNOTSUPP" // which package unix calls ENOTSUP, the same number
	case errors.As(err, &e):
		return unix.ErrnoName(e)
	case err == io.EOF:
		return "EOF"
	}
	return err.Error()
}

// open opens and closes a file.
func open(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// opened opens a file for the time of the check.
func opened(path string, flags int) int {
	return must(unix.Open(path, flags|unix.O_CLOEXEC, 0o644))
}

func lstat(path string) unix.Stat_t {
	var st unix.Stat_t
	try(unix.Lstat(path, &st))
	return st
}

func fstat(fd int) unix.Stat_t {
	var st unix.Stat_t
	try(unix.Fstat(fd, &st))
	return st
}

func mode(path string) string { return fmt.Sprintf("%o", lstat(path).Mode&0o7777) }

func exists(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil
}

func typeOf(st unix.Stat_t) string {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "file"
	case unix.S_IFDIR:
		return "dir"
	case unix.S_IFLNK:
		return "symlink"
	case unix.S_IFIFO:
		return "fifo"
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFCHR:
		return fmt.Sprintf("char %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFBLK:
		return fmt.Sprintf("block %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	return "no type"
}

func read(path string) string     { return string(must(os.ReadFile(path))) }
func readlink(path string) string { return must(os.Readlink(path)) }

// list has the names of a directory, sorted.
func list(dir string) string {
	var names []string
	for _, e := range must(os.ReadDir(dir)) {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// apart runs f on a thread of its own, whose credentials, umask and working directory nobody else has, and which ends with
// f. The kernel keeps all of these for each thread; it is the C library that makes them one for a process.
func apart(f func() any) any {
	type result struct{ value, panicked any }
	done := make(chan result, 1)
	go func() { // ends with f
		runtime.LockOSThread() // and is not unlocked, so that the thread is not used again
		var r result
		defer func() {
			r.panicked = recover()
			done <- r
		}()
		try(unix.Unshare(unix.CLONE_FS))
		// The first thread of a process is not ended but put aside, and would be in the mount for ever.
		defer unix.Chdir("/")
		r.value = f()
	}()
	r := <-done
	if r.panicked != nil {
		panic(r.panicked)
	}
	return r.value
}

// A cred is who does something.
type cred struct {
	uid, gid int
	groups   []uint32
}

// as runs f as another user, without any capability unless it is root.
func as(c cred, f func() any) any {
	return apart(func() any {
		become(c)
		return f()
	})
}

func become(c cred) {
	var groups *uint32
	if len(c.groups) > 0 {
		groups = &c.groups[0]
	}
	raw(unix.SYS_SETGROUPS, uintptr(len(c.groups)), addr(groups), 0)
	raw(unix.SYS_SETRESGID, uintptr(c.gid), uintptr(c.gid), uintptr(c.gid))
	raw(unix.SYS_SETRESUID, uintptr(c.uid), uintptr(c.uid), uintptr(c.uid))
}

// umasked runs f with a umask.
func umasked(mask int, f func() any) any {
	return apart(func() any {
		unix.Umask(mask)
		return f()
	})
}

// within runs f with dir as the working directory.
func within(dir string, f func() any) any {
	return apart(func() any {
		try(unix.Chdir(dir))
		return f()
	})
}

// old is a time that is past on every machine.
var old = unix.Timespec{Sec: 1e9, Nsec: 123456789}

// aged sets atime and mtime to the past and returns the attributes after that. So that ctime is past, too, it lets the
// clock that file systems read tick on.
func aged(path string) unix.Stat_t {
	try(unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{old, old}, unix.AT_SYMLINK_NOFOLLOW))
	st := lstat(path)
	time.Sleep(12 * time.Millisecond) // at 100 Hz it stands still for 10 ms
	return st
}

func after(a, b unix.Timespec) bool { return a.Nano() > b.Nano() }
