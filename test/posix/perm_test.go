package posix

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// user is who does something.
type user struct {
	uid, gid uint32
	groups   []uint32
}

// as runs f with the rights of a user, on a thread that ends then.
func (u user) as(f func()) {
	done := make(chan any)
	go func() {
		defer func() {
			v := recover()
			if v != nil {
				v = fmt.Sprintf("%v\n%s", v, debug.Stack())
			}
			done <- v
		}()
		runtime.LockOSThread()
		u.become()
		f()
	}()
	if v := <-done; v != nil { // what went wrong, and where
		panic(v)
	}
}

// become gives this thread, which must be locked, the rights of a user.
func (u user) become() {
	const keep = ^uintptr(0)
	groups := append(slices.Clone(u.groups), 0) // one more, to have an address
	for _, call := range [][4]uintptr{
		{unix.SYS_SETGROUPS, uintptr(len(u.groups)), uintptr(unsafe.Pointer(&groups[0]))},
		{unix.SYS_SETRESGID, keep, uintptr(u.gid), keep},
		{unix.SYS_SETRESUID, keep, uintptr(u.uid), keep},
	} {
		if _, _, e := unix.RawSyscall(call[0], call[1], call[2], call[3]); e != 0 {
			panic(e)
		}
	}
	runtime.KeepAlive(groups)
}

// aclOf is an access control list in the form of linux/posix_acl_xattr.h; an entry is tag, permissions, id.
func aclOf(entries ...[3]uint32) []byte {
	b := []byte{2, 0, 0, 0}
	for _, e := range entries {
		b = append(b, byte(e[0]), 0, byte(e[1]), 0, byte(e[2]), byte(e[2]>>8), byte(e[2]>>16), byte(e[2]>>24))
	}
	return b
}

const noID = 1<<32 - 1

// permissionCases return what they have seen, which is to be the same on weft as on a local file system.
var permissionCases = []struct {
	name string
	run  func(w world, say func(format string, args ...any))
}{
	{"many groups", func(w world, say func(string, ...any)) {
		d := w.dir("d")
		try(os.Chown(d, 0, 5039))
		try(os.Chmod(d, 0o070))
		var groups []uint32
		for i := range uint32(40) {
			groups = append(groups, 5000+i)
		}
		user{101, 201, groups}.as(func() { say("member: %v", open(d+"/f", unix.O_CREAT|unix.O_RDWR)) })
		user{101, 201, groups[:39]}.as(func() { say("not a member: %v", open(d+"/g", unix.O_CREAT|unix.O_RDWR)) })
		user{101, 201, groups}.as(func() {
			say("member again: %v", unix.Unlink(d+"/f"))
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 0, ^uintptr(0)); e != 0 {
				panic(e)
			}
			user{101, 201, nil}.become()
			say("after setgroups: %v", open(d+"/f", unix.O_CREAT|unix.O_RDWR))
		})
	}},
	{"temporary files", func(w world, say func(string, ...any)) {
		fd, err := unix.Open(string(w), unix.O_TMPFILE|unix.O_RDWR, 0o640)
		try(err)
		defer unix.Close(fd)
		n, err := unix.Write(fd, []byte("contents"))
		var st unix.Stat_t
		try(unix.Fstat(fd, &st))
		say("%d %v, mode %o, %d links, %d bytes", n, err, st.Mode, st.Nlink, st.Size)
		path := fmt.Sprintf("/proc/self/fd/%d", fd)
		say("link: %v", unix.Linkat(unix.AT_FDCWD, path, unix.AT_FDCWD, w.at("f"), unix.AT_SYMLINK_FOLLOW))
		say("another: %v", unix.Linkat(fd, "", unix.AT_FDCWD, w.at("g"), unix.AT_EMPTY_PATH))
		try(unix.Fstat(fd, &st))
		say("%d links, %q", st.Nlink, read(w.at("f")))
		try(unix.Unlink(w.at("f")))
		try(unix.Unlink(w.at("g")))
		say("after unlink: %v", unix.Linkat(fd, "", unix.AT_FDCWD, w.at("h"), unix.AT_EMPTY_PATH))
		ex, err := unix.Open(string(w), unix.O_TMPFILE|unix.O_RDWR|unix.O_EXCL, 0o640)
		try(err)
		defer unix.Close(ex)
		say("O_EXCL: %v", unix.Linkat(ex, "", unix.AT_FDCWD, w.at("h"), unix.AT_EMPTY_PATH))
		say("on a file: %v", open(w.file("x", ""), unix.O_TMPFILE|unix.O_RDWR))
		user{101, 201, nil}.as(func() { say("where nothing may be made: %v", open(string(w), unix.O_TMPFILE|unix.O_RDWR)) })
		late, err := unix.Open(string(w), unix.O_TMPFILE|unix.O_WRONLY, 0o640)
		try(err)
		try(unix.Linkat(late, "", unix.AT_FDCWD, w.at("late"), unix.AT_EMPTY_PATH))
		unix.Write(late, []byte("written after it had a name"))
		try(unix.Close(late))
		say("%q", read(w.at("late")))
	}},
	{"inherited lists", func(w world, say func(string, ...any)) {
		d := w.dir("d")
		try(unix.Setxattr(d, "system.posix_acl_default", aclOf([3]uint32{1, 7, noID}, [3]uint32{2, 6, 101}, [3]uint32{4, 5, noID},
			[3]uint32{16, 7, noID}, [3]uint32{32, 0, noID}), 0))
		old := unix.Umask(0o077)
		f := world(d).file("f", "text")
		s := world(d).dir("s")
		try(unix.Mknod(s+"/pipe", unix.S_IFIFO|0o666, 0))
		g := w.file("g", "")
		unix.Umask(old)
		try(unix.Chmod(d, 0o755))
		for _, p := range []string{d, f, s, s + "/pipe", g} {
			say("%o", stat(p).Mode)
			for _, name := range []string{"system.posix_acl_access", "system.posix_acl_default"} {
				buf := make([]byte, 1000)
				n, err := unix.Getxattr(p, name, buf)
				say("%s %x %v", name, buf[:max(n, 0)], err)
			}
			n, err := unix.Listxattr(p, make([]byte, 1000))
			say("list %d %v", n, err)
		}
		read := func(who string, u user) {
			u.as(func() {
				say("%s: read %v, write %v, execute %v", who, open(f, unix.O_RDONLY), open(f, unix.O_WRONLY),
					unix.Faccessat(unix.AT_FDCWD, f, unix.X_OK, unix.AT_EACCESS))
			})
		}
		read("named", user{101, 201, nil})
		read("other", user{102, 201, nil})
		try(os.Chmod(f, 0o640))
		read("masked", user{101, 201, nil})
		say("%v", unix.Removexattr(f, "system.posix_acl_access"))
		read("without a list", user{101, 201, nil})
		say("%o", stat(f).Mode)
		say("bad list: %v", unix.Setxattr(f, "system.posix_acl_access", aclOf([3]uint32{1, 7, noID}), 0))
		say("default of a file: %v", unix.Setxattr(f, "system.posix_acl_default", aclOf([3]uint32{1, 7, noID}, [3]uint32{4, 5, noID}, [3]uint32{32, 0, noID}), 0))
		user{101, 201, nil}.as(func() {
			say("not the owner: %v", unix.Setxattr(d, "system.posix_acl_access", aclOf([3]uint32{1, 7, noID}, [3]uint32{4, 5, noID}, [3]uint32{32, 7, noID}), 0))
		})
		say("a mode: %v", unix.Setxattr(d, "system.posix_acl_access", aclOf([3]uint32{1, 7, noID}, [3]uint32{4, 5, noID}, [3]uint32{32, 7, noID}), 0))
		say("%o", stat(d).Mode)
	}},
	{"privileges of programs", func(w world, say func(string, ...any)) {
		cap := []byte{0, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
		for _, who := range []user{{0, 0, nil}, {101, 201, nil}} {
			for name, change := range map[string]func(p string){
				"write": func(p string) {
					fd, err := unix.Open(p, unix.O_WRONLY, 0)
					try(err)
					unix.Write(fd, []byte("x"))
					try(unix.Close(fd))
				},
				"truncate": func(p string) { try(unix.Truncate(p, 1)) },
				"open":     func(p string) { try(open(p, unix.O_WRONLY|unix.O_TRUNC)) },
				"ftruncate": func(p string) {
					fd, err := unix.Open(p, unix.O_WRONLY, 0)
					try(err)
					try(unix.Ftruncate(fd, 1))
					try(unix.Close(fd))
				},
			} {
				p := w.file(fmt.Sprint(name, who.uid), "program")
				try(os.Chown(p, 102, 202))
				try(unix.Chmod(p, 0o6777))
				try(unix.Setxattr(p, "security.capability", cap, 0))
				who.as(func() { change(p) })
				_, err := unix.Getxattr(p, "security.capability", make([]byte, 100))
				defer say("%s by %d: %o, capability %v", name, who.uid, stat(p).Mode, err)
			}
		}
		p := w.file("chown", "program")
		try(unix.Chmod(p, 0o6755))
		try(os.Chown(p, 102, 202))
		say("chown: %o", stat(p).Mode)
		try(unix.Chown(p, 101, 202))
		user{101, 201, nil}.as(func() { try(unix.Chmod(p, 0o2755)) })
		say("set-group-ID of another group: %o", stat(p).Mode)
	}},
	{"what was allowed once", func(w world, say func(string, ...any)) {
		d := w.dir("d")
		world(d).file("a", "")
		try(os.Chmod(d, 0o700))
		dir, err := unix.Open(d, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		try(err)
		defer unix.Close(dir)
		f := w.file("f", "some text")
		try(os.Chown(f, 101, 201))
		user{101, 201, nil}.as(func() {
			n, err := unix.ReadDirent(dir, make([]byte, 4096))
			say("read a directory opened by root: %t %v", n > 0, err)
			say("open it: %v", open(d, unix.O_RDONLY))
			fd, err := unix.Open(f, unix.O_RDWR, 0)
			try(err)
			defer unix.Close(fd)
			try(unix.Fchmod(fd, 0))
			buf := make([]byte, 100)
			n, err = unix.Pread(fd, buf, 0)
			say("read: %q %v", buf[:max(n, 0)], err)
			_, err = unix.Pwrite(fd, []byte("more"), 5)
			say("write: %v", err)
			say("ftruncate: %v", unix.Ftruncate(fd, 7))
			say("truncate: %v", unix.Truncate(f, 3))
			say("open again: %v", open(f, unix.O_RDONLY))
		})
		say("%q", read(f))
	}},
	{"limits of attributes", func(w world, say func(string, ...any)) {
		f := w.file("f", "")
		long := "user." + strings.Repeat("x", 250)
		say("long name: %v", unix.Setxattr(f, long, []byte("v"), 0))
		say("too long: %v", unix.Setxattr(f, long+"x", []byte("v"), 0))
		say("too large: %v", unix.Setxattr(f, "user.a", make([]byte, 65537), 0))
		try(unix.Setxattr(f, "user.a", make([]byte, 1000), 0))
		_, err := unix.Getxattr(f, "user.a", make([]byte, 999))
		say("short buffer: %v", err)
		_, err = unix.Listxattr(f, make([]byte, 3))
		say("short list: %v", err)
		n, err := unix.Listxattr(f, nil)
		say("list: %d %v", n, err)
		try(unix.Setxattr(f, "trusted.a", nil, 0))
		user{101, 201, nil}.as(func() {
			n, err := unix.Listxattr(f, make([]byte, 1000))
			say("list of a user: %d %v", n, err)
		})
	}},
}

// TestPermissions does the same as various users here and on a local file system.
func TestPermissions(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount(mountOptions()...)
	try(os.Chmod(m.Dir, 0o755))
	local := harness.Dir(t)
	for _, dir := range []string{local, m.Dir} {
		if err := unix.Setxattr(dir, "system.posix_acl_access", aclOf([3]uint32{1, 7, noID}, [3]uint32{4, 5, noID}, [3]uint32{32, 5, noID}), 0); err != nil {
			if dir == local {
				t.Skipf("missing: access control lists on %s: %v", dir, err)
			}
			t.Fatal(err)
		}
	}
	for _, c := range permissionCases {
		t.Run(c.name, func(t *testing.T) {
			var said [2][]string
			for i, dir := range []string{local, m.Dir} {
				func() {
					defer func() {
						if v := recover(); v != nil {
							t.Fatalf("on %s: %v\n%s", dir, v, debug.Stack())
						}
					}()
					w := world(world(dir).dir(strings.ReplaceAll(c.name, " ", "-")))
					c.run(w, func(format string, args ...any) { said[i] = append(said[i], fmt.Sprintf(format, args...)) })
				}()
				if c.name == "privileges of programs" {
					slices.Sort(said[i]) // a map gave the order
				}
			}
			for i := range max(len(said[0]), len(said[1])) {
				if i >= len(said[0]) || i >= len(said[1]) || said[0][i] != said[1][i] {
					t.Errorf("line %d\nlocal %q\nweft  %q", i, said[0], said[1])
					break
				}
			}
		})
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}
