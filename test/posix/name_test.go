package posix

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func nameChecks() []check {
	var out []check
	// Names of all bytes there are but / and NUL, sixteen to a check.
	for first := 0; first < 256; first += 16 {
		out = append(out, check{fmt.Sprintf("names with bytes %#02x to %#02x", first, first+15), "ok", func(w world) any {
			for b := first; b < first+16; b++ {
				if b == 0 || b == '/' {
					continue
				}
				for _, name := range []string{string([]byte{byte(b)}) + "x", "x" + string([]byte{byte(b)})} {
					w.file(name, "here")
					if es := must(os.ReadDir(string(w))); len(es) != 1 || es[0].Name() != name || read(w.at(name)) != "here" {
						return fmt.Sprintf("%q made, %q found", name, es[0].Name())
					}
					try(unix.Unlink(string(w) + "/" + name))
				}
			}
			return nil
		}})
	}
	// Every call that makes or takes a name, with the longest name and one that is too long.
	for _, n := range []int{255, 256, 4096} {
		long := strings.Repeat("n", n)
		want, missing := "ok", "ENOENT"
		if n > 255 {
			want, missing = "ENAMETOOLONG", "ENAMETOOLONG"
		}
		for _, call := range []struct {
			name, want string
			do         func(w world, p string) error
		}{
			{"open O_CREAT", want, func(w world, p string) error { return open(p, unix.O_CREAT|unix.O_RDWR) }},
			{"open", missing, func(w world, p string) error { return open(p, unix.O_RDONLY) }},
			{"stat", missing, func(w world, p string) error { return unix.Lstat(p, new(unix.Stat_t)) }},
			{"mkdir", want, func(w world, p string) error { return unix.Mkdir(p, 0o755) }},
			{"rmdir", missing, func(w world, p string) error { return unix.Rmdir(p) }},
			{"unlink", missing, func(w world, p string) error { return unix.Unlink(p) }},
			{"mkfifo", want, func(w world, p string) error { return unix.Mkfifo(p, 0o644) }},
			{"symlink", want, func(w world, p string) error { return unix.Symlink("x", p) }},
			{"link to", want, func(w world, p string) error { return unix.Link(w.file("f", ""), p) }},
			{"link from", missing, func(w world, p string) error { return unix.Link(p, w.at("g")) }},
			{"rename to", want, func(w world, p string) error { return unix.Rename(w.file("f", ""), p) }},
			{"rename from", missing, func(w world, p string) error { return unix.Rename(p, w.at("g")) }},
			{"truncate", missing, func(w world, p string) error { return unix.Truncate(p, 0) }},
			{"chmod", missing, func(w world, p string) error { return unix.Chmod(p, 0o644) }},
			{"readlink", missing, func(w world, p string) error { _, err := unix.Readlink(p, make([]byte, 1)); return err }},
			{"setxattr", missing, func(w world, p string) error { return unix.Setxattr(p, "user.x", nil, 0) }},
		} {
			out = append(out, check{fmt.Sprintf("%s with a name of %d bytes", call.name, n), call.want, func(w world) any {
				return within(string(w), func() any { return call.do(w, long[:min(n, 4095)]) })
			}})
		}
	}
	for _, n := range []int{0, 1, 59, 60, 255, 256, 1023, 1024, 4095, 4096} {
		want := fmt.Sprint(n, " ", n, " true")
		switch n {
		case 0:
			want = "ENOENT"
		case 4096:
			want = "ENAMETOOLONG"
		}
		out = append(out, check{fmt.Sprintf("symlink of %d bytes", n), want, func(w world) any {
			target := strings.Repeat("s", n)
			if err := unix.Symlink(target, w.at("l")); err != nil {
				return err
			}
			got := readlink(w.at("l"))
			return say(len(got), lstat(w.at("l")).Size, got == target)
		}})
	}
	for _, n := range []int{1, 39, 40, 41} {
		want := "ok"
		if n > 40 {
			want = "ELOOP"
		}
		out = append(out, check{fmt.Sprintf("open through %d symlinks", n), want, func(w world) any {
			w.file("l0", "")
			for i := range n {
				w.link(fmt.Sprint("l", i), fmt.Sprint("l", i+1))
			}
			return open(w.at(fmt.Sprint("l", n)), unix.O_RDONLY)
		}})
	}
	return append(out, []check{
		{"path of 4095 bytes", "ok", func(w world) any {
			return within(string(w), func() any { return open(strings.Repeat("./", 2046)+"fff", unix.O_CREAT|unix.O_RDWR) })
		}},
		{"path of 4096 bytes", "ENAMETOOLONG", func(w world) any {
			return within(string(w), func() any { return open(strings.Repeat("./", 2046)+"ffff", unix.O_CREAT|unix.O_RDWR) })
		}},
		{"path deeper than 4096 bytes, step by step", "ok 40", func(w world) any {
			return within(string(w), func() any {
				name := strings.Repeat("d", 200)
				for i := range 40 {
					if err := unix.Mkdir(name, 0o755); err != nil {
						return say(err, i)
					}
					try(unix.Chdir(name))
				}
				return say(open("f", unix.O_CREAT|unix.O_RDWR), 40)
			})
		}},
		{"symlink with 255 bytes of dots and slashes", "ok", func(w world) any {
			w.file("f", "")
			return open(w.link(strings.Repeat("./", 1000)+"f", "l"), unix.O_RDONLY)
		}},
		{"symlink's slash at the end to a file", "ENOTDIR", func(w world) any {
			w.file("f", "")
			return open(w.link("f/", "l"), unix.O_RDONLY)
		}},
		{"symlink to ..", "true", func(w world) any {
			w.dir("d")
			var st unix.Stat_t
			try(unix.Stat(w.link("..", "d/l"), &st))
			return st.Ino == lstat(string(w)).Ino
		}},
		{"symlink mode is 777", "777", func(w world) any { return mode(w.link("x", "l")) }},
		{"chmod of a symlink changes its target", "600", func(w world) any {
			w.file("f", "")
			try(unix.Chmod(w.link("f", "l"), 0o600))
			return mode(w.at("f"))
		}},
		{"fchmodat2 AT_SYMLINK_NOFOLLOW of a symlink", "EOPNOTSUPP", func(w world) any {
			return unix.Fchmodat(unix.AT_FDCWD, w.link("f", "l"), 0o600, unix.AT_SYMLINK_NOFOLLOW)
		}},
		{"readlink into a small buffer cuts", "ab", func(w world) any {
			b := make([]byte, 2)
			n := must(unix.Readlink(w.link("abcdef", "l"), b))
			return string(b[:n])
		}},
		{"names differ by case", "A=1 a=2", func(w world) any { w.file("A", "1"); w.file("a", "2"); return w.tree() }},
		{"names differ by normal form", "2", func(w world) any {
			w.file("e\u0301", "")
			w.file("\u00e9", "")
			return len(must(os.ReadDir(string(w))))
		}},
		{"name ... is a name", "...=x", func(w world) any { w.file("...", "x"); return w.tree() }},
	}...)
}

func nodeChecks() []check {
	var out []check
	for _, n := range []struct {
		name, want string
		mode       uint32
		dev        uint64
	}{
		{"file", "file 644 1", unix.S_IFREG, 0}, {"fifo", "fifo 644 1", unix.S_IFIFO, 0}, {"socket", "socket 644 1", unix.S_IFSOCK, 0},
		{"char 1:3", "char 1:3 644 1", unix.S_IFCHR, unix.Mkdev(1, 3)}, {"char 4095:1048575", "char 4095:1048575 644 1", unix.S_IFCHR, unix.Mkdev(4095, 1048575)},
		{"block 7:0", "block 7:0 644 1", unix.S_IFBLK, unix.Mkdev(7, 0)}, {"block 259:70000", "block 259:70000 644 1", unix.S_IFBLK, unix.Mkdev(259, 70000)},
		{"no type", "file 644 1", 0, 0}, {"directory", "EPERM", unix.S_IFDIR, 0}, {"symlink", "EINVAL", unix.S_IFLNK, 0},
	} {
		out = append(out, check{"mknod " + n.name, n.want, func(w world) any {
			if err := unix.Mknod(w.at("n"), n.mode|0o644, int(n.dev)); err != nil {
				return err
			}
			st := lstat(w.at("n"))
			return say(typeOf(st), mode(w.at("n")), st.Nlink)
		}})
		if n.mode != unix.S_IFDIR && n.mode != unix.S_IFLNK {
			want := "ok"
			if n.mode == unix.S_IFCHR || n.mode == unix.S_IFBLK {
				want = "EPERM"
			}
			out = append(out, check{"mknod by a user " + n.name, want, func(w world) any {
				try(unix.Chmod(string(w), 0o777))
				return as(cred{uid: 1001, gid: 1001}, func() any { return unix.Mknod(w.at("n"), n.mode|0o644, int(n.dev)) })
			}})
		}
	}
	sockAt := func(w world) (s int, name *unix.SockaddrUnix, end func()) {
		s = must(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
		// Names of sockets have 107 bytes, less than the paths of test directories.
		d := opened(string(w), unix.O_PATH)
		return s, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/s", d)}, func() { try(errors.Join(unix.Close(s), unix.Close(d))) }
	}
	return append(out, []check{
		{"device null can be read and written", "0 1", func(w world) any {
			fd := opened(w.make("null", "n"), unix.O_RDWR)
			defer unix.Close(fd)
			n := must(unix.Read(fd, make([]byte, 1)))
			return say(n, must(unix.Write(fd, []byte("x"))))
		}},
		{"fifo carries bytes", "through", func(w world) any {
			p := w.make("fifo", "p")
			r := opened(p, unix.O_RDONLY|unix.O_NONBLOCK)
			defer unix.Close(r)
			wr := opened(p, unix.O_WRONLY)
			defer unix.Close(wr)
			must(unix.Write(wr, []byte("through")))
			b := make([]byte, 20)
			n := must(unix.Read(r, b))
			return string(b[:n])
		}},
		{"fifo opened for writing without a reader", "ENXIO", func(w world) any { return open(w.make("fifo", "p"), unix.O_WRONLY|unix.O_NONBLOCK) }},
		{"fifo opens wait for each other", "met", func(w world) any {
			p := w.make("fifo", "p")
			go func() { os.WriteFile(p, []byte("met"), 0) }() // ends when the reader has come
			return read(p)
		}},
		{"fifo unlinked stays usable", "x", func(w world) any {
			p := w.make("fifo", "p")
			fd := opened(p, unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Unlink(p))
			must(unix.Write(fd, []byte("x")))
			b := make([]byte, 1)
			must(unix.Read(fd, b))
			return string(b)
		}},
		{"fifo has size 0 with bytes in it", "0", func(w world) any {
			fd := opened(w.make("fifo", "p"), unix.O_RDWR)
			defer unix.Close(fd)
			must(unix.Write(fd, []byte("x")))
			return lstat(w.at("p")).Size
		}},
		{"socket bind makes a node", "socket 755", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			if err := unix.Bind(s, name); err != nil {
				return err
			}
			return say(typeOf(lstat(w.at("s"))), mode(w.at("s")))
		}},
		{"socket bind to an existing name", "EADDRINUSE", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			w.file("s", "")
			return unix.Bind(s, name)
		}},
		{"socket connect and talk", "hello", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			try(unix.Bind(s, name))
			try(unix.Listen(s, 1))
			c := must(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
			defer unix.Close(c)
			if err := unix.Connect(c, name); err != nil {
				return err
			}
			a, _, err := unix.Accept(s)
			try(err)
			defer unix.Close(a)
			must(unix.Write(c, []byte("hello")))
			b := make([]byte, 10)
			n := must(unix.Read(a, b))
			return string(b[:n])
		}},
		{"socket connect to a node without listener", "ECONNREFUSED", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			w.make("socket", "s")
			return unix.Connect(s, name)
		}},
		{"socket connect to a file", "ECONNREFUSED", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			w.file("s", "")
			return unix.Connect(s, name)
		}},
		{"socket connect after rename", "ok", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			try(unix.Bind(s, name))
			try(unix.Listen(s, 1))
			try(unix.Rename(w.at("s"), w.at("t")))
			c := must(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
			defer unix.Close(c)
			return unix.Connect(c, &unix.SockaddrUnix{Name: strings.TrimSuffix(name.Name, "s") + "t"})
		}},
		{"socket connect without permission", "EACCES", func(w world) any {
			s, name, end := sockAt(w)
			defer end()
			try(unix.Bind(s, name))
			try(unix.Listen(s, 1))
			try(unix.Chmod(w.at("s"), 0o700))
			return within(string(w), func() any {
				become(cred{uid: 1001, gid: 1001})
				c := must(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
				defer unix.Close(c)
				return unix.Connect(c, &unix.SockaddrUnix{Name: "s"})
			})
		}},
		{"open a socket", "ENXIO", func(w world) any { return open(w.make("socket", "s"), unix.O_RDONLY) }},
		{"inode numbers are not used again at once", "true", func(w world) any {
			seen := map[uint64]bool{}
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			seen[fstat(fd).Ino] = true
			for range 20 {
				if seen[lstat(w.file("f", "")).Ino] {
					return false
				}
				try(unix.Unlink(w.at("f")))
			}
			return true
		}},
		{"inode number stays", "true", func(w world) any {
			ino := lstat(w.file("f", "")).Ino
			try(unix.Rename(w.at("f"), w.at("g")))
			w.file("g", "written")
			time.Sleep(time.Millisecond)
			return lstat(w.at("g")).Ino == ino
		}},
	}...)
}
