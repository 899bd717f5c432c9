package posix

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// accesses and openFlags are combined with each other and with all kinds of files.
var accesses = []flagSet{{"O_RDONLY", unix.O_RDONLY}, {"O_WRONLY", unix.O_WRONLY}, {"O_RDWR", unix.O_RDWR}}

type flagSet struct {
	name  string
	flags int
}

var openFlags = []flagSet{
	{"nothing", 0},
	{"O_CREAT", unix.O_CREAT},
	{"O_CREAT|O_EXCL", unix.O_CREAT | unix.O_EXCL},
	{"O_CREAT|O_TRUNC", unix.O_CREAT | unix.O_TRUNC},
	{"O_CREAT|O_NOFOLLOW", unix.O_CREAT | unix.O_NOFOLLOW},
	{"O_CREAT|O_EXCL|O_NOFOLLOW", unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW},
	{"O_CREAT|O_DIRECTORY", unix.O_CREAT | unix.O_DIRECTORY},
	{"O_TRUNC", unix.O_TRUNC},
	{"O_APPEND", unix.O_APPEND},
	{"O_APPEND|O_TRUNC", unix.O_APPEND | unix.O_TRUNC},
	{"O_NOFOLLOW", unix.O_NOFOLLOW},
	{"O_DIRECTORY", unix.O_DIRECTORY},
	{"O_DIRECTORY|O_NOFOLLOW", unix.O_DIRECTORY | unix.O_NOFOLLOW},
	{"O_SYNC", unix.O_SYNC},
	{"O_DSYNC", unix.O_DSYNC},
	{"O_DIRECT", unix.O_DIRECT},
	{"O_NOATIME", unix.O_NOATIME},
	{"O_PATH", unix.O_PATH},
	{"O_PATH|O_NOFOLLOW", unix.O_PATH | unix.O_NOFOLLOW},
	{"O_PATH|O_DIRECTORY", unix.O_PATH | unix.O_DIRECTORY},
	{"O_TMPFILE", unix.O_TMPFILE},
}

// openWant is what open(2) says for the kinds where that does not depend on the device or FIFO at the end of it.
func openWant(kind string, access, flags int) string {
	has := func(f int) bool { return flags&f == f }
	creates := has(unix.O_CREAT)
	writes := access != unix.O_RDONLY
	switch {
	case has(unix.O_TMPFILE): // which contains O_DIRECTORY
		if !writes {
			return "EINVAL"
		}
		switch kind {
		case "missing", "dangling":
			return "ENOENT"
		case "loop":
			return "ELOOP"
		case "dir", "full", "dirlink":
			return "" // the file system's own affair
		}
		return "ENOTDIR"
	case creates && has(unix.O_DIRECTORY):
		return "EINVAL" // since Linux 6.4
	}
	target := map[string]string{"symlink": "file", "dirlink": "dir", "dangling": "missing"}[kind]
	if target != "" || kind == "loop" {
		switch {
		case creates && has(unix.O_EXCL):
			return "EEXIST"
		case has(unix.O_PATH) && has(unix.O_NOFOLLOW):
			return "ok symlink"
		case has(unix.O_NOFOLLOW) && has(unix.O_DIRECTORY):
			return "ENOTDIR"
		case has(unix.O_NOFOLLOW), kind == "loop":
			return "ELOOP"
		}
		kind = target
	}
	switch kind {
	case "missing":
		if !creates {
			return "ENOENT"
		}
		return "ok file"
	case "dir", "full":
		switch {
		case has(unix.O_PATH):
			return "ok dir"
		case creates && has(unix.O_EXCL):
			return "EEXIST"
		case creates, writes, has(unix.O_TRUNC):
			return "EISDIR"
		case has(unix.O_DIRECT):
			return "" // whether a directory takes it is the file system's own affair
		}
		return "ok dir"
	case "file", "empty":
		switch {
		case creates && has(unix.O_EXCL):
			return "EEXIST"
		case has(unix.O_DIRECTORY):
			return "ENOTDIR"
		}
		return "ok file"
	}
	return ""
}

func openChecks() []check {
	var out []check
	for _, kind := range kinds {
		for _, set := range openFlags {
			for _, access := range accesses {
				want := openWant(kind, access.flags, set.flags)
				prefix := strings.HasPrefix(want, "ok")
				c := check{name: fmt.Sprintf("open %s %s %s", kind, access.name, set.name)}
				if !prefix {
					c.want = want
				}
				c.do = func(w world) any {
					p := w.make(kind, "it")
					fd, err := unix.Open(p, access.flags|set.flags|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o640)
					if err != nil {
						return say(err, w.tree())
					}
					defer unix.Close(fd)
					if set.flags&unix.O_PATH != 0 {
						return say("ok", typeOf(fstat(fd)), unix.Fsync(fd), w.tree())
					}
					status := must(unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0))
					_, writeErr := unix.Pwrite(fd, nil, 0)
					_, readErr := unix.Pread(fd, nil, 0)
					return say("ok", typeOf(fstat(fd)), fstat(fd).Size*boolTo(typeOf(fstat(fd)) == "file"), status&unix.O_ACCMODE, status&unix.O_APPEND != 0, writeErr, readErr, w.tree())
				}
				if c.want != "" {
					// The tree is not the table's affair where nothing was opened: nothing may have been made or changed.
					do := c.do
					c.do = func(w world) any {
						w.make(kind, "before")
						before := strings.ReplaceAll(w.tree(), "before", "it")
						try(os.RemoveAll(w.at("before")))
						try(os.RemoveAll(w.at("before.target")))
						answer := do(w).(string)
						if e, ok := strings.CutSuffix(answer, " "+before); ok {
							return e
						}
						return answer
					}
				} else if prefix {
					do := c.do
					c.do = func(w world) any {
						answer := say(do(w))
						if !strings.HasPrefix(answer, want) {
							return answer + ", want " + want
						}
						return answer
					}
				}
				out = append(out, c)
			}
		}
	}
	rw := unix.O_RDWR | unix.O_CREAT
	return append(out, []check{
		{"open below a missing directory", "ENOENT", func(w world) any { return open(w.at("no/f"), rw) }},
		{"open below a file", "ENOTDIR", func(w world) any { return open(w.file("f", "")+"/x", unix.O_RDONLY) }},
		{"open below a dangling symlink", "ENOENT", func(w world) any { return open(w.link("no", "l")+"/x", unix.O_RDONLY) }},
		{"open below a symlink to itself", "ELOOP", func(w world) any { return open(w.link("l", "l")+"/x", unix.O_RDONLY) }},
		{"open a file with a slash at the end", "ENOTDIR", func(w world) any { return open(w.file("f", "")+"/", unix.O_RDONLY) }},
		{"open O_CREAT with a slash at the end", "EISDIR", func(w world) any { return open(w.at("f")+"/", rw) }},
		{"open a directory with a slash at the end", "ok", func(w world) any { return open(w.dir("d")+"/", unix.O_RDONLY) }},
		{"open the empty path", "ENOENT", func(w world) any { return open("", unix.O_RDONLY) }},
		{"open file/.", "ENOTDIR", func(w world) any { return open(w.file("f", "")+"/.", unix.O_RDONLY) }},
		{"open dir/.", "ok", func(w world) any { return open(w.dir("d")+"/.", unix.O_RDONLY) }},
		{"open dir/..", "ok", func(w world) any { return open(w.dir("d")+"/..", unix.O_RDONLY) }},
		{"open O_CREAT .", "EISDIR", func(w world) any { return open(w.dir("d")+"/.", rw) }},
		{"open O_CREAT through a dangling symlink makes the target", "l->t t=", func(w world) any {
			w.link("t", "l")
			try(open(w.at("l"), rw))
			return w.tree()
		}},
		{"open O_CREAT O_EXCL does not follow a dangling symlink", "EEXIST l->t", func(w world) any {
			w.link("t", "l")
			return say(open(w.at("l"), rw|unix.O_EXCL), w.tree())
		}},
		{"open O_TRUNC empties", "0", func(w world) any {
			p := w.file("f", "some bytes")
			try(open(p, unix.O_WRONLY|unix.O_TRUNC))
			return lstat(p).Size
		}},
		{"open O_TRUNC while another descriptor has written", "0 xx", func(w world) any {
			p := w.file("f", "some bytes")
			fd := opened(p, unix.O_RDWR)
			defer unix.Close(fd)
			must(unix.Write(fd, []byte("more")))
			try(open(p, unix.O_WRONLY|unix.O_TRUNC))
			size := fstat(fd).Size
			must(unix.Pwrite(fd, []byte("xx"), 0))
			return say(size, read(p))
		}},
		{"open O_CREAT mode 0 is still open for writing", "2 0", func(w world) any {
			return as(cred{uid: 0, gid: 0}, func() any {
				fd := must(unix.Open(w.at("f"), rw, 0))
				defer unix.Close(fd)
				n, err := unix.Write(fd, []byte("ab"))
				try(err)
				return say(n, mode(w.at("f")))
			})
		}},
		{"open O_CREAT with all mode bits", "7777", func(w world) any {
			return umasked(0, func() any {
				unix.Close(must(unix.Open(w.at("f"), rw, 0o7777)))
				return mode(w.at("f"))
			})
		}},
		{"open O_APPEND writes at the end whatever the offset", "onetwo 6", func(w world) any {
			fd := opened(w.file("f", "one"), unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(fd)
			must(unix.Seek(fd, 0, 0))
			must(unix.Write(fd, []byte("two")))
			return say(read(w.at("f")), must(unix.Seek(fd, 0, 1)))
		}},
		{"open O_APPEND pwrite also appends", "onetwo", func(w world) any {
			fd := opened(w.file("f", "one"), unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(fd)
			must(unix.Pwrite(fd, []byte("two"), 0))
			return read(w.at("f"))
		}},
		{"open O_APPEND by two descriptors", "aabb", func(w world) any {
			p := w.file("f", "")
			one, two := opened(p, unix.O_WRONLY|unix.O_APPEND), opened(p, unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(one)
			defer unix.Close(two)
			must(unix.Write(one, []byte("aa")))
			must(unix.Write(two, []byte("bb")))
			return read(p)
		}},
		{"open O_APPEND set by fcntl", "onetwo", func(w world) any {
			fd := opened(w.file("f", "one"), unix.O_WRONLY)
			defer unix.Close(fd)
			must(unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_APPEND))
			must(unix.Write(fd, []byte("two")))
			return read(w.at("f"))
		}},
		{"open O_APPEND removed by fcntl", "two", func(w world) any {
			fd := opened(w.file("f", "one"), unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(fd)
			must(unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0))
			must(unix.Write(fd, []byte("two")))
			return read(w.at("f"))
		}},
		{"open O_APPEND after another has truncated", "x", func(w world) any {
			p := w.file("f", "long contents")
			fd := opened(p, unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(fd)
			try(unix.Truncate(p, 0))
			must(unix.Write(fd, []byte("x")))
			return read(p)
		}},
		{"open O_SYNC write", "5 bytes", func(w world) any {
			fd := opened(w.at("f"), rw|unix.O_SYNC)
			defer unix.Close(fd)
			return say(must(unix.Write(fd, []byte("bytes"))), read(w.at("f")))
		}},
		{"open O_DIRECT aligned write and read", "4096 4096 (4096*d)", func(w world) any {
			fd := opened(w.at("f"), rw|unix.O_DIRECT)
			defer unix.Close(fd)
			b := must(unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE))
			defer unix.Munmap(b)
			for i := range b {
				b[i] = 'd'
			}
			n, err := unix.Pwrite(fd, b, 0)
			try(err)
			clear(b)
			m, err := unix.Pread(fd, b, 0)
			try(err)
			return say(n, m, b)
		}},
		{"open O_DIRECT set by fcntl", "ok", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_DIRECT)
			return err
		}},
		{"open O_NOATIME of another's file", "EPERM", func(w world) any {
			p := w.file("f", "")
			try(unix.Chmod(p, 0o666))
			return as(cred{uid: 1001, gid: 1001}, func() any { return open(p, unix.O_RDONLY|unix.O_NOATIME) })
		}},
		{"open O_NOATIME of one's own file", "ok", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 1001))
			return as(cred{uid: 1001, gid: 1001}, func() any { return open(p, unix.O_RDONLY|unix.O_NOATIME) })
		}},
		{"open O_TMPFILE, write and link in", "0 data t=data 1", func(w world) any {
			fd := must(unix.Open(string(w), unix.O_TMPFILE|unix.O_RDWR, 0o640))
			defer unix.Close(fd)
			links := fstat(fd).Nlink
			must(unix.Write(fd, []byte("data")))
			b := make([]byte, 10)
			n := must(unix.Pread(fd, b, 0))
			try(unix.Linkat(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", fd), unix.AT_FDCWD, w.at("t"), unix.AT_SYMLINK_FOLLOW))
			return say(links, b[:n], w.tree(), fstat(fd).Nlink)
		}},
		{"open O_TMPFILE with O_EXCL cannot be linked", "ENOENT", func(w world) any {
			fd := must(unix.Open(string(w), unix.O_TMPFILE|unix.O_RDWR|unix.O_EXCL, 0o640))
			defer unix.Close(fd)
			return unix.Linkat(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", fd), unix.AT_FDCWD, w.at("t"), unix.AT_SYMLINK_FOLLOW)
		}},
		{"open O_TMPFILE leaves no name", "", func(w world) any {
			unix.Close(must(unix.Open(string(w), unix.O_TMPFILE|unix.O_RDWR, 0o640)))
			return say("has", list(string(w)))
		}},
		{"open O_TMPFILE mode and umask", "640", func(w world) any {
			return umasked(0o027, func() any {
				fd := must(unix.Open(string(w), unix.O_TMPFILE|unix.O_RDWR, 0o666))
				defer unix.Close(fd)
				return fmt.Sprintf("%o", fstat(fd).Mode&0o7777)
			})
		}},
		{"open O_PATH descriptor reads nothing", "EBADF", func(w world) any {
			fd := opened(w.file("f", "x"), unix.O_PATH)
			defer unix.Close(fd)
			_, err := unix.Read(fd, make([]byte, 1))
			return err
		}},
		{"open O_PATH descriptor is reopened through /proc", "x", func(w world) any {
			fd := opened(w.file("f", "x"), unix.O_PATH)
			defer unix.Close(fd)
			return read(fmt.Sprint("/proc/self/fd/", fd))
		}},
		{"open O_PATH descriptor fchmod", "EBADF", func(w world) any {
			fd := opened(w.file("f", "x"), unix.O_PATH)
			defer unix.Close(fd)
			return unix.Fchmod(fd, 0o600)
		}},
		{"open O_PATH symlink, readlinkat of it", "target", func(w world) any {
			fd := opened(w.link("target", "l"), unix.O_PATH|unix.O_NOFOLLOW)
			defer unix.Close(fd)
			b := make([]byte, 20)
			n := must(unix.Readlinkat(fd, "", b))
			return string(b[:n])
		}},
		{"open O_PATH of a file without permission", "ok", func(w world) any {
			p := w.file("f", "")
			try(unix.Chmod(p, 0))
			return as(cred{uid: 1001, gid: 1001}, func() any { return open(p, unix.O_PATH) })
		}},
		{"reopen an unlinked file through /proc", "still", func(w world) any {
			p := w.file("f", "still")
			fd := opened(p, unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Unlink(p))
			return read(fmt.Sprint("/proc/self/fd/", fd))
		}},
		{"openat2 RESOLVE_BENEATH", "EXDEV", func(w world) any { return openat2(w, w.link("/etc", "l")[len(w)+1:], unix.RESOLVE_BENEATH) }},
		{"openat2 RESOLVE_NO_SYMLINKS", "ELOOP", func(w world) any {
			w.dir("d")
			w.link("d", "l")
			return openat2(w, "l", unix.RESOLVE_NO_SYMLINKS)
		}},
		{"openat2 RESOLVE_IN_ROOT", "ok", func(w world) any {
			w.file("f", "")
			w.link("/f", "l")
			return openat2(w, "l", unix.RESOLVE_IN_ROOT)
		}},
		{"openat2 RESOLVE_CACHED of what was just opened", "", func(w world) any {
			w.file("f", "")
			err := openat2(w, "f", 0x20)
			return say(err == nil || err == unix.EAGAIN)
		}},
		{"openat2 unknown flag", "EINVAL", func(w world) any {
			_, err := unix.Openat2(unix.AT_FDCWD, string(w), &unix.OpenHow{Flags: 1 << 40})
			return err
		}},
		{"creat makes write only", "EBADF", func(w world) any {
			fd := must(unix.Creat(w.at("f"), 0o644))
			defer unix.Close(fd)
			_, err := unix.Read(fd, make([]byte, 1))
			return err
		}},
		{"two descriptors share nothing but the file", "abab", func(w world) any {
			p := w.file("f", "abcd")
			one, two := opened(p, unix.O_RDONLY), opened(p, unix.O_RDONLY)
			defer unix.Close(one)
			defer unix.Close(two)
			a, b := make([]byte, 2), make([]byte, 2)
			must(unix.Read(one, a))
			must(unix.Read(two, b))
			return string(a) + string(b)
		}},
		{"dup shares the offset", "abcd", func(w world) any {
			one := opened(w.file("f", "abcd"), unix.O_RDONLY)
			two := must(unix.Dup(one))
			defer unix.Close(one)
			defer unix.Close(two)
			a, b := make([]byte, 2), make([]byte, 2)
			must(unix.Read(one, a))
			must(unix.Read(two, b))
			return string(a) + string(b)
		}},
	}...)
}

func openat2(w world, p string, resolve uint64) error {
	dir := opened(string(w), unix.O_PATH|unix.O_DIRECTORY)
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, p, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: resolve})
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func boolTo(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
