package posix

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// fewestCross is how many cross checks there must be.
const fewestCross = 200

// A crossCheck does something through a and looks through b at once. Both are the same directory.
type crossCheck struct {
	name string
	want string
	do   func(a, b world) any
}

// same is the answer when b shows what a shows.
const same = "same"

// Changes are made through a in this tree:
//
//	f (data, also named twin), g (other), l -> f, d/ with d/x (inner), e/ (empty), p (a fifo)
//
// What they return ends what they left open.
var changes = []struct {
	name string
	do   func(a world) (end func())
}{
	{"creat", func(a world) func() { a.file("new", ""); return nil }},
	{"creat with contents", func(a world) func() { a.file("new", "contents"); return nil }},
	{"creat, left open", func(a world) func() {
		fd := opened(a.at("new"), unix.O_CREAT|unix.O_RDWR)
		return func() { unix.Close(fd) }
	}},
	{"creat in a directory", func(a world) func() { a.file("d/new", "contents"); return nil }},
	{"mkdir", func(a world) func() { a.dir("new"); return nil }},
	{"mkdir with something in it", func(a world) func() { a.dir("new"); a.file("new/y", "why"); return nil }},
	{"mkfifo", func(a world) func() { try(unix.Mkfifo(a.at("new"), 0o600)); return nil }},
	{"symlink", func(a world) func() { a.link("g", "new"); return nil }},
	{"link", func(a world) func() { try(unix.Link(a.at("g"), a.at("new"))); return nil }},
	{"link in a directory", func(a world) func() { try(unix.Link(a.at("g"), a.at("e/new"))); return nil }},
	{"unlink", func(a world) func() { try(unix.Unlink(a.at("g"))); return nil }},
	{"unlink one of two names", func(a world) func() { try(unix.Unlink(a.at("twin"))); return nil }},
	{"unlink and creat again", func(a world) func() { try(unix.Unlink(a.at("f"))); a.file("f", "another"); return nil }},
	{"rmdir", func(a world) func() { try(unix.Rmdir(a.at("e"))); return nil }},
	{"rmdir and mkdir again", func(a world) func() { try(unix.Rmdir(a.at("e"))); a.dir("e"); a.file("e/z", ""); return nil }},
	{"rm -r", func(a world) func() { try(os.RemoveAll(a.at("d"))); return nil }},
	{"rename", func(a world) func() { try(unix.Rename(a.at("f"), a.at("new"))); return nil }},
	{"rename over", func(a world) func() { try(unix.Rename(a.at("g"), a.at("f"))); return nil }},
	{"rename to another directory", func(a world) func() { try(unix.Rename(a.at("f"), a.at("d/new"))); return nil }},
	{"rename of a directory", func(a world) func() { try(unix.Rename(a.at("d"), a.at("new"))); return nil }},
	{"rename of a directory into another", func(a world) func() { try(unix.Rename(a.at("d"), a.at("e/new"))); return nil }},
	{"rename EXCHANGE", func(a world) func() {
		try(unix.Renameat2(unix.AT_FDCWD, a.at("f"), unix.AT_FDCWD, a.at("g"), unix.RENAME_EXCHANGE))
		return nil
	}},
	{"rename EXCHANGE of file and directory", func(a world) func() {
		try(unix.Renameat2(unix.AT_FDCWD, a.at("f"), unix.AT_FDCWD, a.at("d"), unix.RENAME_EXCHANGE))
		return nil
	}},
	{"symlink replaced", func(a world) func() { a.link("g", "l2"); try(unix.Rename(a.at("l2"), a.at("l"))); return nil }},
	{"chmod", func(a world) func() { try(unix.Chmod(a.at("f"), 0o4711)); return nil }},
	{"chmod of a directory", func(a world) func() { try(unix.Chmod(a.at("d"), 0o1700)); return nil }},
	{"chown", func(a world) func() { try(unix.Chown(a.at("f"), 7, 8)); return nil }},
	{"utimensat", func(a world) func() {
		try(unix.UtimesNanoAt(unix.AT_FDCWD, a.at("f"), []unix.Timespec{old, old}, 0))
		return nil
	}},
	{"setxattr", func(a world) func() { try(unix.Setxattr(a.at("f"), "user.new", []byte("v"), 0)); return nil }},
	{"setxattr of another value", func(a world) func() { try(unix.Setxattr(a.at("f"), "user.x", []byte("new value"), 0)); return nil }},
	{"removexattr", func(a world) func() { try(unix.Removexattr(a.at("f"), "user.x")); return nil }},
	{"acl", func(a world) func() {
		try(setACL(a.at("f"), accessACL, "u::rw- u:1002:rw- g::r-- m::rw- o::---"))
		return nil
	}},
	{"default acl", func(a world) func() {
		try(setACL(a.at("d"), defaultACL, "u::rwx u:1002:rw- g::r-- m::rwx o::---"))
		return nil
	}},
	{"truncate shorter", func(a world) func() { try(unix.Truncate(a.at("f"), 2)); return nil }},
	{"truncate longer", func(a world) func() { try(unix.Truncate(a.at("f"), 3*stripe)); return nil }},
	{"truncate to nothing", func(a world) func() { try(unix.Truncate(a.at("f"), 0)); return nil }},
	{"open O_TRUNC, left open", changing(unix.O_TRUNC, func(fd int) error { return nil })},
	{"write, left open", changing(0, func(fd int) error { _, err := unix.Pwrite(fd, []byte("DATA"), 0); return err })},
	{"write beyond the end, left open", changing(0, func(fd int) error { _, err := unix.Pwrite(fd, []byte("far"), 2*stripe); return err })},
	{"write of 3 MiB, left open", changing(0, func(fd int) error { _, err := unix.Pwrite(fd, pattern(3*stripe), 0); return err })},
	{"append, left open", changing(unix.O_APPEND, func(fd int) error { _, err := unix.Write(fd, []byte("more")); return err })},
	{"write and fsync, left open", changing(0, func(fd int) error {
		must(unix.Pwrite(fd, []byte("longer than before"), 0))
		return unix.Fsync(fd)
	})},
	{"write and close", func(a world) func() { a.file("f", "something else altogether"); return nil }},
	{"ftruncate after write, left open", changing(0, func(fd int) error {
		must(unix.Pwrite(fd, pattern(10000), 0))
		return unix.Ftruncate(fd, 5000)
	})},
	{"fallocate, left open", changing(0, func(fd int) error { return unix.Fallocate(fd, 0, 0, 5000) })},
	{"fallocate punch, left open", changing(0, func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 1, 2)
	})},
	{"write and chmod, left open", changing(0, func(fd int) error {
		must(unix.Pwrite(fd, []byte("longer data"), 0))
		return unix.Fchmod(fd, 0o600)
	})},
	{"write and utimens, left open", changing(0, func(fd int) error {
		must(unix.Pwrite(fd, []byte("longer data"), 0))
		return unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", fd), []unix.Timespec{old, old}, 0)
	})},
	{"write by the other name", func(a world) func() { a.file("twin", "by the twin"); return nil }},
	{"copy_file_range, left open", changing(0, func(fd int) error {
		from, to := int64(0), int64(4)
		_, err := unix.CopyFileRange(fd, &from, fd, &to, 4, 0)
		return err
	})},
	{"store through a mapping", changing(0, func(fd int) error {
		m, err := unix.Mmap(fd, 0, 4, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		m[0] = 'M'
		try(unix.Msync(m, unix.MS_SYNC))
		return unix.Munmap(m)
	})},
	{"30 files", func(a world) func() {
		for i := range 30 {
			try(unix.Mkfifo(a.at(fmt.Sprint("d/many-", i)), 0o644))
		}
		return nil
	}},
}

func changing(flags int, do func(fd int) error) func(a world) func() {
	return func(a world) func() {
		fd := opened(a.at("f"), unix.O_RDWR|flags)
		try(do(fd))
		return func() { unix.Close(fd) }
	}
}

// A view is what can be seen through a world. It is taken through b before the change, so that whatever is kept there is
// kept then, and through both after it.
type view struct{ open map[string]int }

type look struct {
	name string
	look func(w world, v view) string
}

// looks are the ways to look; each is a check for each change.
var looks = []look{
	{"stat", func(w world, v view) string {
		return w.each(func(p string) string {
			st := lstat(p)
			return say(st.Ino, fmt.Sprintf("%o", st.Mode), st.Nlink, st.Uid, st.Gid, st.Size, st.Mtim, st.Ctim)
		})
	}},
	{"names", func(w world, v view) string {
		var out []string
		for _, p := range []string{"f", "g", "twin", "l", "d", "d/x", "e", "p", "new", "d/new", "e/new", "new/x", "d/many-7", "e/z"} {
			var st, through unix.Stat_t
			out = append(out, say(p, unix.Lstat(w.at(p), &st), st.Ino, unix.Stat(w.at(p), &through), through.Ino))
		}
		return strings.Join(out, "\n")
	}},
	{"contents", func(w world, v view) string {
		return w.each(func(p string) string {
			switch lstat(p).Mode & unix.S_IFMT {
			case unix.S_IFREG:
				return say([]byte(read(p)))
			case unix.S_IFLNK:
				return readlink(p)
			}
			return ""
		})
	}},
	{"descriptors", func(w world, v view) string {
		var out []string
		for _, p := range []string{"f", "g", "d/x"} {
			fd := v.open[p]
			st := fstat(fd)
			b := make([]byte, st.Size+100)
			n, err := unix.Pread(fd, b, 0)
			out = append(out, say(p, st.Ino, fmt.Sprintf("%o", st.Mode), st.Nlink, st.Size, st.Mtim, err, b[:max(n, 0)]))
		}
		for _, p := range []string{"d", "e"} {
			fd := v.open[p]
			must(unix.Seek(fd, 0, 0))
			// Where there is nothing to read any more, a removed directory is.
			es, err := getdents(fd, 32768)
			out = append(out, say(p, names(es), err))
		}
		return strings.Join(out, "\n")
	}},
	{"xattrs", func(w world, v view) string {
		return w.each(func(p string) string {
			list := listxattr(p)
			out := say(list)
			if names, ok := list.(string); ok {
				for _, name := range strings.Fields(names) {
					out += fmt.Sprintf(" %q", getxattr(p, name))
				}
			}
			return out
		})
	}},
}

// each tells something of everything that is there.
func (w world) each(tell func(p string) string) string {
	var out []string
	try(filepath.WalkDir(string(w), func(p string, d os.DirEntry, err error) error {
		if err == nil {
			out = append(out, strings.TrimPrefix(p, string(w))+": "+tell(p))
		}
		return err
	}))
	return strings.Join(out, "\n")
}

func (w world) view() view {
	v := view{map[string]int{}}
	for _, p := range []string{"f", "g", "d/x", "d", "e"} {
		v.open[p] = opened(w.at(p), unix.O_RDONLY)
	}
	return v
}

func (v view) close() {
	for _, fd := range v.open {
		unix.Close(fd)
	}
}

func crossChecks() []crossCheck {
	var out []crossCheck
	for _, change := range changes {
		// One run of the change answers for all ways to look, unless it is to be sure that none of them helps the next.
		var once sync.Once
		var together []string
		for i, l := range looks {
			out = append(out, crossCheck{change.name + ": " + l.name, same, func(a, b world) any {
				if *long {
					return changed(a, b, change.do, looks[i:i+1])[0]
				}
				once.Do(func() {
					together = []string{"not looked at: the change or a look broke", "", "", "", ""}
					together = changed(a, b, change.do, looks)
				})
				return together[i]
			}})
		}
	}
	for _, s := range lockScripts {
		out = append(out, crossCheck{"lock: " + s.name, s.want, func(a, b world) any {
			a.file("p", "0123456789")
			return runLocks(map[byte]world{'A': a, 'B': b}, s.steps)
		}})
	}
	rw := unix.O_RDWR | unix.O_CREAT
	return append(out, []crossCheck{
		{"O_EXCL of what the other made", "EEXIST", func(a, b world) any { a.file("f", ""); return open(b.at("f"), rw|unix.O_EXCL) }},
		{"mkdir of what the other made", "EEXIST", func(a, b world) any { a.dir("d"); return unix.Mkdir(b.at("d"), 0o755) }},
		{"unlink of what the other made", "ok ENOENT", func(a, b world) any {
			a.file("f", "")
			err := unix.Unlink(b.at("f"))
			return say(err, open(a.at("f"), unix.O_RDONLY))
		}},
		{"rmdir of what the other has filled", "ENOTEMPTY", func(a, b world) any {
			a.dir("d")
			lstat(b.at("d"))
			a.file("d/f", "")
			return unix.Rmdir(b.at("d"))
		}},
		{"rename over what the other made", "1", func(a, b world) any {
			a.file("f", "0")
			try(unix.Rename(b.file("g", "1"), b.at("f")))
			return read(a.at("f"))
		}},
		{"a name that was missing is there", "ENOENT ok", func(a, b world) any {
			before := open(b.at("f"), unix.O_RDONLY)
			a.file("f", "")
			return say(before, open(b.at("f"), unix.O_RDONLY))
		}},
		{"a name comes and goes 20 times", "ok", func(a, b world) any {
			for range 20 {
				a.file("f", "")
				if err := open(b.at("f"), unix.O_RDONLY); err != nil {
					return err
				}
				try(unix.Unlink(b.at("f")))
				if err := open(a.at("f"), unix.O_RDONLY); err != unix.ENOENT {
					return say("removed and still", err)
				}
			}
			return nil
		}},
		{"mkdir and rmdir in turn", "ok", func(a, b world) any {
			for range 20 {
				try(unix.Mkdir(a.at("d"), 0o755))
				try(unix.Rmdir(b.at("d")))
			}
			return nil
		}},
		{"appends in turn", "abababababababababab", func(a, b world) any {
			a.file("f", "")
			x, y := opened(a.at("f"), unix.O_WRONLY|unix.O_APPEND), opened(b.at("f"), unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(x)
			defer unix.Close(y)
			for range 10 {
				must(unix.Write(x, []byte("a")))
				must(unix.Write(y, []byte("b")))
			}
			return read(a.at("f"))
		}},
		{"appends at once lose nothing", "100 a, 100 b", func(a, b world) any {
			a.file("f", "")
			done := make(chan error)
			go func() { done <- appendMany(a.at("f"), "a\n") }() // ends with its 100 writes
			go func() { done <- appendMany(b.at("f"), "b\n") }() // as above
			try(<-done)
			try(<-done)
			s := read(b.at("f"))
			return fmt.Sprintf("%d a, %d b", strings.Count(s, "a\n"), strings.Count(s, "b\n"))
		}},
		{"writes in turn to neighbouring places", "true", func(a, b world) any {
			a.file("f", "")
			x, y := opened(a.at("f"), unix.O_RDWR), opened(b.at("f"), unix.O_RDWR)
			defer unix.Close(x)
			defer unix.Close(y)
			all := pattern(20 * 100)
			for i := 0; i < 20; i += 2 {
				must(unix.Pwrite(x, all[i*100:i*100+100], int64(i*100)))
				must(unix.Pwrite(y, all[i*100+100:i*100+200], int64(i*100+100)))
			}
			return read(a.at("f")) == string(all) && read(b.at("f")) == string(all)
		}},
		{"writes in turn to one place", "last", func(a, b world) any {
			a.file("f", "")
			x, y := opened(a.at("f"), unix.O_RDWR), opened(b.at("f"), unix.O_RDWR)
			defer unix.Close(x)
			defer unix.Close(y)
			for range 10 {
				must(unix.Pwrite(x, []byte("1st!"), 0))
				must(unix.Pwrite(y, []byte("last"), 0))
			}
			return read(a.at("f"))
		}},
		{"truncate while the other has written more", "3 3 dat", func(a, b world) any {
			fd := opened(a.at("f"), rw)
			defer unix.Close(fd)
			must(unix.Pwrite(fd, []byte("data and more"), 0))
			try(unix.Truncate(b.at("f"), 3))
			return say(fstat(fd).Size, lstat(b.at("f")).Size, read(a.at("f")))
		}},
		{"write after the other's truncation", "(10*\\x00)x", func(a, b world) any {
			fd := opened(a.at("f"), rw)
			defer unix.Close(fd)
			must(unix.Pwrite(fd, []byte("0123456789"), 0))
			try(unix.Truncate(b.at("f"), 0))
			must(unix.Pwrite(fd, []byte("x"), 10))
			return []byte(read(b.at("f")))
		}},
		{"read at the end while the other appends", "line", func(a, b world) any {
			w := opened(a.at("f"), rw)
			r := opened(b.at("f"), unix.O_RDONLY)
			defer unix.Close(w)
			defer unix.Close(r)
			buf := make([]byte, 10)
			must(unix.Read(r, buf))
			must(unix.Write(w, []byte("line")))
			return string(buf[:must(unix.Read(r, buf))])
		}},
		{"unlinked by the other, contents stay", "still here 0", func(a, b world) any {
			fd := opened(a.file("f", "still here"), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Unlink(b.at("f")))
			return say(contents(fd), fstat(fd).Nlink)
		}},
		{"unlinked by the other, can be written", "more, still here", func(a, b world) any {
			fd := opened(a.file("f", "12345 still here"), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Unlink(b.at("f")))
			must(unix.Pwrite(fd, []byte("more,"), 0))
			return contents(fd)
		}},
		{"unlinked, open on both, written through one and read through the other", "shared", func(a, b world) any {
			x := opened(a.file("f", "before"), unix.O_RDWR)
			y := opened(b.at("f"), unix.O_RDWR)
			defer unix.Close(x)
			defer unix.Close(y)
			try(unix.Unlink(a.at("f")))
			must(unix.Pwrite(x, []byte("shared"), 0))
			return contents(y)
		}},
		{"unlinked, closed by the one who unlinked, stays for the other", "still here", func(a, b world) any {
			x := opened(a.file("f", "still here"), unix.O_RDWR)
			y := opened(b.at("f"), unix.O_RDWR)
			defer unix.Close(y)
			try(unix.Unlink(a.at("f")))
			try(unix.Close(x))
			return contents(y)
		}},
		{"unlinked, closed by the one who only read, stays for the writer", "data, stable", func(a, b world) any {
			x := opened(a.file("f", ""), unix.O_RDWR)
			y := opened(b.at("f"), unix.O_RDONLY)
			defer unix.Close(x)
			try(unix.Unlink(b.at("f")))
			must(unix.Pwrite(x, []byte("data, stable"), 0))
			try(unix.Close(y))
			try(unix.Fsync(x))
			return contents(x)
		}},
		{"replaced by the other, contents stay", "old new", func(a, b world) any {
			fd := opened(a.file("f", "old"), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Rename(b.file("g", "new"), b.at("f")))
			return say(contents(fd), read(a.at("f")))
		}},
		{"unlinked and open leaves no name", "", func(a, b world) any {
			fd := opened(a.file("f", "data"), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Unlink(b.at("f")))
			return list(string(a)) + list(string(b))
		}},
		{"a directory removed by the other is gone for who is in it", "ENOENT", func(a, b world) any {
			return within(a.dir("d"), func() any {
				try(unix.Rmdir(b.at("d")))
				return open("f", rw)
			})
		}},
		{"chmod forbids the other's users at once", "ok EACCES", func(a, b world) any {
			p := a.file("f", "")
			before := as(cred{uid: 1001, gid: 1001}, func() any { return open(b.at("f"), unix.O_RDONLY) })
			try(unix.Chmod(p, 0o600))
			return say(before, as(cred{uid: 1001, gid: 1001}, func() any { return open(b.at("f"), unix.O_RDONLY) }))
		}},
		{"chmod of a directory forbids the other's users at once", "ok EACCES", func(a, b world) any {
			a.dir("d")
			a.file("d/f", "")
			before := as(cred{uid: 1001, gid: 1001}, func() any { return open(b.at("d/f"), unix.O_RDONLY) })
			try(unix.Chmod(a.at("d"), 0o700))
			return say(before, as(cred{uid: 1001, gid: 1001}, func() any { return open(b.at("d/f"), unix.O_RDONLY) }))
		}},
		{"messages back and forth", "20", func(a, b world) any {
			a.file("f", "0")
			for i := range 10 {
				for j, w := range []world{b, a} {
					if got := read(w.at("f")); got != fmt.Sprint(2*i+j) {
						return say("read", got, "where", 2*i+j, "was written")
					}
					w.file("f", fmt.Sprint(2*i+j+1))
				}
			}
			return read(b.at("f"))
		}},
		{"a lock protects a counter", "40", func(a, b world) any {
			a.file("f", "0")
			done := make(chan any)
			for _, w := range []world{a, b} {
				go func() { // ends after 20 rounds
					defer func() { done <- recover() }()
					for range 20 {
						fd := opened(w.at("f"), unix.O_RDWR)
						try(flock(fd, unix.LOCK_EX))
						var n int
						must(fmt.Sscan(contents(fd), &n))
						must(unix.Pwrite(fd, []byte(fmt.Sprint(n+1)), 0))
						try(unix.Close(fd))
					}
				}()
			}
			for range 2 {
				if p := <-done; p != nil {
					panic(p)
				}
			}
			return read(a.at("f"))
		}},
	}...)
}

// changed makes a change through a, and answers for each way to look whether b shows what a shows.
func changed(a, b world, change func(a world) func(), ways []look) []string {
	a.file("f", "data")
	a.file("g", "other")
	try(unix.Setxattr(a.at("f"), "user.x", []byte("v"), 0))
	try(unix.Link(a.at("f"), a.at("twin")))
	a.link("f", "l")
	a.dir("d")
	a.file("d/x", "inner")
	a.dir("e")
	try(unix.Mkfifo(a.at("p"), 0o644))
	va, vb := a.view(), b.view()
	defer va.close()
	defer vb.close()
	for _, l := range looks {
		l.look(b, vb)
	}
	if end := change(a); end != nil {
		defer end()
	}
	// Through b first: looking through a might make a tell what it has kept to itself.
	var out []string
	for _, l := range ways {
		seen := attempt(func() string { return l.look(b, vb) })
		if want := attempt(func() string { return l.look(a, va) }); seen != want {
			seen = "\n through b:\n" + differing(seen, want) + "\n through a:\n" + differing(want, seen)
		} else {
			seen = same
		}
		out = append(out, seen)
	}
	return out
}

// attempt is what f says, or why it cannot.
func attempt(f func() string) (s string) {
	defer func() {
		if p := recover(); p != nil {
			s = "not to be looked at: " + say(p)
		}
	}()
	return f()
}

// differing are the lines of s that t does not have.
func differing(s, t string) string {
	var out []string
	for line := range strings.SplitSeq(s, "\n") {
		if !strings.Contains("\n"+t+"\n", "\n"+line+"\n") {
			out = append(out, "  "+line[:min(len(line), 200)])
		}
	}
	return strings.Join(out, "\n")
}

func appendMany(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for range 100 {
		if _, err := unix.Write(fd, []byte(text)); err != nil {
			return err
		}
	}
	return nil
}

func contents(fd int) string {
	b := make([]byte, 100)
	return string(b[:must(unix.Pread(fd, b, 0))])
}

// TestCross runs the cross checks on two mounts of one volume, and on a local directory bound twice, which shows that they
// are right; with -long also on a mount of weft bound twice.
func TestCross(t *testing.T) {
	keepThread(t)
	volume := harness.NewVolume(t, harness.Options{})
	mount, other := volume.Mount(mountOptions()...).Dir, volume.Mount(mountOptions()...).Dir
	disk := localPlaces(t)[0]
	t.Run("local", func(t *testing.T) { cross(t, disk.dir, bound(t, disk.dir), crossChecks()) })
	t.Run("two mounts", func(t *testing.T) { cross(t, mount, other, crossChecks()) })
	if *long {
		t.Run("one mount bound twice", func(t *testing.T) { cross(t, mount, bound(t, mount), crossChecks()) })
	}
	t.Run("space returns after the last close", func(t *testing.T) { spaceReturns(t, volume, world(mount), world(other)) })
}

// spaceReturns looks at the data servers' disks, since what else uses the disk is no matter here.
func spaceReturns(t *testing.T, v *harness.Volume, a, b world) {
	const size = 16 * stripe
	place := "/data/"
	if onNamespaces {
		place = "/nvme/" // where they are deallocated
	}
	used := func() (sum int64) {
		filepath.WalkDir(v.Dir, func(p string, d os.DirEntry, err error) error {
			var st unix.Stat_t
			if unix.Lstat(p, &st) == nil && strings.Contains(p, place) { // what has just gone does not count
				sum += st.Blocks * 512
			}
			return nil
		})
		return sum
	}
	fd := opened(a.at("large"), unix.O_RDWR|unix.O_CREAT)
	for i := range int64(16) {
		must(unix.Pwrite(fd, pattern(stripe), i*stripe))
	}
	try(unix.Fsync(fd))
	other := opened(b.at("large"), unix.O_RDWR)
	full := used()
	try(unix.Unlink(b.at("large")))
	try(unix.Close(fd))
	if n, err := unix.Pread(other, make([]byte, size), 0); n != size || err != nil {
		t.Errorf("unlinked and still open on the other mount: %d bytes, %v, want %d", n, err, size)
	}
	if now := used(); now < full-size/2 { // small files of other checks may be going
		t.Errorf("unlinked and still open on the other mount: %d bytes on the disks of %d", now, full)
	}
	try(unix.Close(other))
	harness.Await(t, "the space of a removed file to return", func() bool { return used() <= full-size })
}

// bound is another path of a mounted directory.
func bound(t *testing.T, dir string) string {
	other := harness.Dir(t)
	if err := unix.Mount(dir, other, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(other, unix.MNT_DETACH) })
	return other
}

func cross(t *testing.T, a, b string, all []crossCheck) {
	if len(all) < fewestCross {
		t.Errorf("%d cross checks, want %d at least", len(all), fewestCross)
	}
	start := time.Now()
	base := must(os.MkdirTemp(a, "cross"))
	try(os.Chmod(base, 0o755))
	var one []check
	for _, c := range all {
		one = append(one, check{c.name, c.want, func(w world) any { return c.do(w, world(filepath.Join(b, strings.TrimPrefix(string(w), a)))) }})
	}
	answers := runAll(place{"", base}, one)
	t.Logf("%d checks in %.1fs", len(one), time.Since(start).Seconds())
	for i, c := range one {
		t.Run(c.name, func(t *testing.T) {
			if answers[i] != c.want {
				t.Errorf("%s, want %s", answers[i], c.want)
			}
		})
	}
}
