package posix

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

type entry struct {
	name string
	ino  uint64
	off  int64
	typ  byte
}

// getdents reads entries from where a directory's descriptor stands, with a buffer of n bytes.
func getdents(fd, n int) ([]entry, error) {
	buf := make([]byte, n)
	n, err := unix.Getdents(fd, buf)
	if err != nil {
		return nil, err
	}
	var out []entry
	for b := buf[:n]; len(b) > 0; {
		d := (*unix.Dirent)(unsafe.Pointer(&b[0]))
		name, _, _ := bytes.Cut(b[19:d.Reclen], []byte{0})
		out = append(out, entry{string(name), d.Ino, d.Off, d.Type})
		b = b[d.Reclen:]
	}
	return out, nil
}

// all reads what remains.
func all(fd, n int) []entry {
	var out []entry
	for {
		es := must(getdents(fd, n))
		if len(es) == 0 {
			return out
		}
		out = append(out, es...)
	}
}

func names(es []entry) []string {
	var out []string
	for _, e := range es {
		out = append(out, e.name)
	}
	slices.Sort(out)
	return out
}

// many makes n files f000 and so on.
func (w world) many(n int) {
	for i := range n {
		try(unix.Mkfifo(w.at(fmt.Sprintf("f%03d", i)), 0o644))
	}
}

func dirChecks() []check {
	var out []check
	for _, c := range []struct {
		n, buf int
	}{{0, 4096}, {1, 4096}, {3, 48}, {20, 64}, {150, 200}, {150, 32768}} {
		out = append(out, check{fmt.Sprintf("readdir of %d entries, %d bytes at a time", c.n, c.buf), fmt.Sprint(c.n+2, " true"), func(w world) any {
			w.many(c.n)
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			es := names(all(fd, c.buf))
			return say(len(es), len(slices.Compact(es)) == c.n+2 && es[0] == "." && es[1] == "..")
		}})
	}
	types := map[string]byte{"file": unix.DT_REG, "dir": unix.DT_DIR, "symlink": unix.DT_LNK, "fifo": unix.DT_FIFO, "socket": unix.DT_SOCK, "null": unix.DT_CHR}
	for kind, typ := range types {
		out = append(out, check{"d_type and d_ino of " + kind, fmt.Sprint(typ, " true"), func(w world) any {
			p := w.make(kind, "it")
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			for _, e := range all(fd, 4096) {
				if e.name == "it" {
					return say(e.typ, e.ino == lstat(p).Ino)
				}
			}
			return "not found"
		}})
	}
	dot := func(name string, of func(w world) string) check {
		return check{"d_ino of " + name, "true", func(w world) any {
			fd := opened(w.dir("d"), unix.O_RDONLY)
			defer unix.Close(fd)
			for _, e := range all(fd, 4096) {
				if e.name == name {
					return e.ino == lstat(of(w)).Ino
				}
			}
			return "not found"
		}}
	}
	out = append(out, dot(".", func(w world) string { return w.at("d") }), dot("..", func(w world) string { return string(w) }))
	reading := func(w world, n int) int { w.many(n); return opened(string(w), unix.O_RDONLY) }
	return append(out, []check{
		{"rewinddir sees what was made since", "2 3", func(w world) any {
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			n := len(all(fd, 4096))
			w.file("new", "")
			must(unix.Seek(fd, 0, 0))
			return say(n, len(all(fd, 4096)))
		}},
		{"rewinddir does not see what was removed since", "5 4", func(w world) any {
			fd := reading(w, 3)
			defer unix.Close(fd)
			n := len(all(fd, 4096))
			try(unix.Unlink(w.at("f001")))
			must(unix.Seek(fd, 0, 0))
			return say(n, len(all(fd, 4096)))
		}},
		{"seekdir goes back to each entry", "true", func(w world) any {
			fd := reading(w, 30)
			defer unix.Close(fd)
			es := all(fd, 4096)
			for i := range es[:len(es)-1] {
				must(unix.Seek(fd, es[i].off, 0))
				if again := must(getdents(fd, 64)); again[0].name != es[i+1].name {
					return say("after", es[i].name, "comes", again[0].name, "and not", es[i+1].name)
				}
			}
			return true
		}},
		{"seekdir after the entry there was removed", "true", func(w world) any {
			fd := reading(w, 30)
			defer unix.Close(fd)
			es := all(fd, 4096)
			try(unix.Unlink(w.at(slices.DeleteFunc(slices.Clone(es[:12]), func(e entry) bool { return e.name[0] == '.' })[8].name)))
			must(unix.Seek(fd, es[14].off, 0))
			return must(getdents(fd, 64))[0].name == es[15].name
		}},
		{"seekdir in another descriptor", "true", func(w world) any {
			fd := reading(w, 30)
			defer unix.Close(fd)
			es := all(fd, 4096)
			other := opened(string(w), unix.O_RDONLY)
			defer unix.Close(other)
			must(unix.Seek(other, es[20].off, 0))
			return must(getdents(other, 64))[0].name == es[21].name
		}},
		{"deleting all while reading finds all", "0", func(w world) any {
			fd := reading(w, 200)
			defer unix.Close(fd)
			for {
				es := must(getdents(fd, 300))
				if len(es) == 0 {
					break
				}
				for _, e := range es {
					if e.name[0] == 'f' {
						try(unix.Unlink(w.at(e.name)))
					}
				}
			}
			return len(must(os.ReadDir(string(w))))
		}},
		{"creating while reading shows the old ones once", "true", func(w world) any {
			fd := reading(w, 100)
			defer unix.Close(fd)
			var seen []string
			for i := 0; ; i++ {
				es := must(getdents(fd, 300))
				if len(es) == 0 {
					break
				}
				seen = append(seen, names(es)...)
				if i < 50 {
					w.file(fmt.Sprint("new", i), "")
				}
			}
			seen = slices.DeleteFunc(seen, func(s string) bool { return s[0] != 'f' })
			slices.Sort(seen)
			return len(seen) == 100 && len(slices.Compact(seen)) == 100
		}},
		{"renaming while reading shows the others once", "true", func(w world) any {
			fd := reading(w, 100)
			defer unix.Close(fd)
			seen := names(must(getdents(fd, 300)))
			try(unix.Rename(w.at("f050"), w.at("renamed")))
			seen = append(seen, names(all(fd, 300))...)
			seen = slices.DeleteFunc(seen, func(s string) bool { return s[0] != 'f' || s == "f050" })
			slices.Sort(seen)
			return len(slices.Compact(seen)) == 99
		}},
		{"two descriptors read by themselves", "52 52", func(w world) any {
			a := reading(w, 50)
			b := opened(string(w), unix.O_RDONLY)
			defer unix.Close(a)
			defer unix.Close(b)
			first := must(getdents(a, 300))
			n := len(all(b, 4096))
			return say(len(first)+len(all(a, 4096)), n)
		}},
		{"getdents with a buffer too small", "EINVAL", func(w world) any {
			fd := reading(w, 1)
			defer unix.Close(fd)
			_, err := getdents(fd, 10)
			return err
		}},
		{"getdents of a removed directory", "", func(w world) any {
			fd := opened(w.dir("d"), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Rmdir(w.at("d")))
			es, err := getdents(fd, 4096)
			return say(len(es), err)
		}},
		{"readdir of a name that fills the buffer", "1", func(w world) any {
			w.file(strings.Repeat("n", 255), "")
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			return len(slices.DeleteFunc(all(fd, 280), func(e entry) bool { return e.name[0] == '.' }))
		}},
		{"getcwd", "true", func(w world) any {
			return within(w.dir("d"), func() any { return getcwd() == w.at("d") })
		}},
		{"getcwd after rename", "true", func(w world) any {
			return within(w.dir("d"), func() any {
				try(unix.Rename(w.at("d"), w.at("e")))
				return getcwd() == w.at("e")
			})
		}},
		{"getcwd of a removed directory", "ENOENT", removed(func(w world) any { return getcwd() })},
		{"creat in a removed working directory", "ENOENT", removed(func(w world) any { return open("f", unix.O_CREAT|unix.O_RDWR) })},
		{"mkdir in a removed working directory", "ENOENT", removed(func(w world) any { return unix.Mkdir("d", 0o755) })},
		{"stat . in a removed working directory", "ok", removed(func(w world) any { return unix.Stat(".", new(unix.Stat_t)) })},
		{"stat .. in a removed working directory", "ok", removed(func(w world) any { return unix.Stat("..", new(unix.Stat_t)) })},
		{"open . in a removed working directory", "ok", removed(func(w world) any { return open(".", unix.O_RDONLY) })},
		{"link into a removed working directory", "ENOENT", removed(func(w world) any { return unix.Link(w.file("f", ""), "g") })},
		{"rename into a removed working directory", "ENOENT", removed(func(w world) any { return unix.Rename(w.file("f", ""), "g") })},
		{"symlink in a removed working directory", "ENOENT", removed(func(w world) any { return unix.Symlink("f", "g") })},
		{"chmod of a removed working directory", "ok", removed(func(w world) any { return unix.Chmod(".", 0o700) })},
		{"chdir .. from a removed working directory", "ok", removed(func(w world) any { return unix.Chdir("..") })},
		{"chdir to a file", "ENOTDIR", func(w world) any { return apart(func() any { return unix.Chdir(w.file("f", "")) }) }},
		{"chdir to a missing directory", "ENOENT", func(w world) any { return apart(func() any { return unix.Chdir(w.at("no")) }) }},
		{"chdir through a symlink", "true", func(w world) any {
			w.dir("d")
			return within(w.link("d", "l"), func() any { return getcwd() == w.at("d") })
		}},
		{"openat of a directory that was renamed", "x", func(w world) any {
			w.dir("d")
			w.file("d/f", "x")
			fd := opened(w.at("d"), unix.O_PATH)
			defer unix.Close(fd)
			try(unix.Rename(w.at("d"), w.at("e")))
			f := must(unix.Openat(fd, "f", unix.O_RDONLY, 0))
			defer unix.Close(f)
			b := make([]byte, 3)
			return string(b[:must(unix.Read(f, b))])
		}},
		{"openat of a file", "ENOTDIR", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			_, err := unix.Openat(fd, "x", unix.O_RDONLY, 0)
			return err
		}},
		{"openat with a wrong descriptor", "EBADF", func(w world) any { _, err := unix.Openat(-5, "x", unix.O_RDONLY, 0); return err }},
		{"calls relative to a descriptor", "d/ d/e/ d/g= d/l->x", func(w world) any {
			fd := opened(w.dir("d"), unix.O_RDONLY|unix.O_DIRECTORY)
			defer unix.Close(fd)
			try(unix.Mkdirat(fd, "e", 0o755))
			try(unix.Symlinkat("x", fd, "l"))
			unix.Close(must(unix.Openat(fd, "f", unix.O_CREAT|unix.O_RDWR, 0o644)))
			try(unix.Linkat(fd, "f", fd, "h", 0))
			try(unix.Renameat(fd, "f", fd, "g"))
			try(unix.Unlinkat(fd, "h", 0))
			try(unix.Mknodat(fd, "n", unix.S_IFIFO|0o644, 0))
			try(unix.Fchmodat(fd, "n", 0o600, 0))
			try(unix.Fchownat(fd, "n", 1, 1, 0))
			try(unix.Unlinkat(fd, "n", 0))
			return w.tree()
		}},
		{"name_to_handle_at and open_by_handle_at", "x", func(w world) any {
			w.file("f", "x")
			h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, w.at("f"), 0)
			if err != nil {
				return err
			}
			d := opened(string(w), unix.O_RDONLY)
			defer unix.Close(d)
			fd, err := unix.OpenByHandleAt(d, h, unix.O_RDONLY)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			b := make([]byte, 3)
			return string(b[:must(unix.Read(fd, b))])
		}},
	}...)
}

func getcwd() any {
	b := make([]byte, 4096)
	n, err := unix.Getcwd(b)
	if err != nil {
		return err
	}
	return string(b[:n-1])
}

// removed runs f with a working directory that has been removed.
func removed(f func(w world) any) func(w world) any {
	return func(w world) any {
		return within(w.dir("cwd"), func() any {
			try(unix.Rmdir(w.at("cwd")))
			return f(w)
		})
	}
}

// events are what inotify told of a directory while f ran.
func events(dir string, f func()) string {
	fd := must(unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC))
	defer unix.Close(fd)
	must(unix.InotifyAddWatch(fd, dir, unix.IN_ALL_EVENTS&^(unix.IN_OPEN|unix.IN_ACCESS|unix.IN_CLOSE_NOWRITE)))
	// A program that another check starts meanwhile would have f's descriptors until it is executed, and close them late.
	func() {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		f()
	}()
	buf := make([]byte, 4096)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return errName(err)
	}
	var out []string
	for b := buf[:n]; len(b) > 0; {
		mask, size := binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[12:])
		name := strings.TrimRight(string(b[16:16+size]), "\x00")
		for bit, text := range map[uint32]string{unix.IN_CREATE: "create", unix.IN_DELETE: "delete", unix.IN_MODIFY: "modify", unix.IN_ATTRIB: "attrib",
			unix.IN_MOVED_FROM: "from", unix.IN_MOVED_TO: "to", unix.IN_CLOSE_WRITE: "close", unix.IN_DELETE_SELF: "gone", unix.IN_MOVE_SELF: "moved", unix.IN_IGNORED: "end"} {
			if mask&bit != 0 {
				out = append(out, strings.TrimSpace(text+" "+name))
			}
		}
		b = b[16+size:]
	}
	return strings.Join(out, ", ")
}

func otherChecks() []check {
	var out []check
	for _, c := range []struct {
		name, want string
		do         func(w world)
	}{
		{"creat", "create n, close n", func(w world) { try(open(w.at("d/n"), unix.O_CREAT|unix.O_RDWR)) }},
		{"mkdir", "create n", func(w world) { w.dir("d/n") }},
		{"symlink", "create n", func(w world) { w.link("x", "d/n") }},
		{"mkfifo", "create n", func(w world) { try(unix.Mkfifo(w.at("d/n"), 0o644)) }},
		{"link", "create n", func(w world) { try(unix.Link(w.at("peer"), w.at("d/n"))) }},
		{"unlink", "delete f", func(w world) { try(unix.Unlink(w.at("d/f"))) }},
		{"rmdir", "delete e", func(w world) { try(unix.Rmdir(w.at("d/e"))) }},
		{"rename", "from f, to g", func(w world) { try(unix.Rename(w.at("d/f"), w.at("d/g"))) }},
		{"rename out", "from f", func(w world) { try(unix.Rename(w.at("d/f"), w.at("g"))) }},
		{"rename in", "to n", func(w world) { try(unix.Rename(w.at("peer"), w.at("d/n"))) }},
		{"chmod", "attrib f", func(w world) { try(unix.Chmod(w.at("d/f"), 0o600)) }},
		{"chown", "attrib f", func(w world) { try(unix.Chown(w.at("d/f"), 1, 1)) }},
		{"utimensat", "attrib f", func(w world) { try(unix.UtimesNanoAt(unix.AT_FDCWD, w.at("d/f"), []unix.Timespec{old, old}, 0)) }},
		{"setxattr", "attrib f", func(w world) { try(unix.Setxattr(w.at("d/f"), "user.x", nil, 0)) }},
		{"truncate", "modify f", func(w world) { try(unix.Truncate(w.at("d/f"), 1)) }},
		{"write", "modify f, close f", func(w world) {
			try(onFd(w.at("d/f"), func(fd int) error { _, err := unix.Write(fd, []byte("x")); return err }))
		}},
		{"open O_TRUNC", "modify f, close f", func(w world) { try(open(w.at("d/f"), unix.O_WRONLY|unix.O_TRUNC)) }},
	} {
		out = append(out, check{"inotify: " + c.name, c.want, func(w world) any {
			w.dir("d")
			w.dir("d/e")
			w.file("d/f", "data")
			w.file("peer", "")
			return events(w.at("d"), func() { c.do(w) })
		}})
	}
	return append(out, []check{
		{"inotify: the directory is removed", "gone, end", func(w world) any {
			return events(w.dir("d"), func() { try(unix.Rmdir(w.at("d"))) })
		}},
		{"inotify: the directory is renamed", "moved", func(w world) any {
			return events(w.dir("d"), func() { try(unix.Rename(w.at("d"), w.at("e"))) })
		}},
		{"statfs is sane", "255 true true true", func(w world) any {
			var st unix.Statfs_t
			try(unix.Statfs(string(w), &st))
			return say(st.Namelen, st.Bsize > 0 && st.Frsize > 0, st.Blocks > 0 && st.Bavail <= st.Bfree && st.Bfree <= st.Blocks, st.Files >= st.Ffree)
		}},
		{"fstatfs agrees with statfs", "true", func(w world) any {
			var a, b unix.Statfs_t
			try(unix.Statfs(string(w), &a))
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Fstatfs(fd, &b))
			return a.Type == b.Type && a.Fsid == b.Fsid && a.Blocks == b.Blocks && a.Bsize == b.Bsize
		}},
		{"st_dev is that of the directory", "true", func(w world) any { return lstat(w.file("f", "")).Dev == lstat(string(w)).Dev }},
		{"st_blksize", "true", func(w world) any { return lstat(w.file("f", "")).Blksize >= 512 }},
		{"pathconf of names and links, by trying", "ok", func(w world) any { return unix.Mkdir(w.at(strings.Repeat("x", 255)), 0o755) }},
		{"FS_IOC_GETFLAGS", "true", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			_, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
			return err == nil || err == unix.ENOTTY || err == unix.EOPNOTSUPP
		}},
		{"FICLONE", "EOPNOTSUPP", func(w world) any {
			a, b := opened(w.file("a", "x"), unix.O_RDWR), opened(w.file("b", "y"), unix.O_RDWR)
			defer unix.Close(a)
			defer unix.Close(b)
			return unix.IoctlFileClone(a, b)
		}},
		{"poll of a file", "true", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDWR)
			defer unix.Close(fd)
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}
			n := must(unix.Poll(p, 0))
			return n == 1 && p[0].Revents == unix.POLLIN|unix.POLLOUT
		}},
		{"epoll of a file", "EPERM", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDWR)
			defer unix.Close(fd)
			ep := must(unix.EpollCreate1(unix.EPOLL_CLOEXEC))
			defer unix.Close(ep)
			return unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN})
		}},
		{"F_GETLEASE of an open file", "", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDWR)
			defer unix.Close(fd)
			n, err := unix.FcntlInt(uintptr(fd), unix.F_GETLEASE, 0)
			return say(n, err)
		}},
		{"memory sealing is not for files", "EINVAL", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDWR)
			defer unix.Close(fd)
			_, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
			return err
		}},
	}...)
}

// longChecks make what takes long to make.
func longChecks() []check {
	return []check{
		{"65000 links and no more", "65000 EMLINK", func(w world) any {
			p := w.file("f", "")
			for i := 1; i < 70000; i++ {
				err := unix.Link(p, w.at(fmt.Sprint("l", i)))
				if err != nil {
					return say(lstat(p).Nlink, err)
				}
			}
			return "more than 70000"
		}},
		{"65000 subdirectories", "true 65000", func(w world) any {
			for i := range 65000 {
				try(unix.Mkdir(w.at(fmt.Sprint("d", i)), 0o755))
			}
			n := lstat(string(w)).Nlink
			return say(n == 65002 || n == 1, len(must(os.ReadDir(string(w)))))
		}},
	}
}
