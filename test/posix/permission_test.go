package posix

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Who does something to a file of user 1001 and group 2001, and which bits of its mode are theirs.
const (
	owner = 1001
	group = 2001
)

var whos = []struct {
	name  string
	shift int // of their bits in the mode; root has none
	cred  cred
}{
	{"owner", 6, cred{uid: owner, gid: 3001}},
	{"group", 3, cred{uid: 1002, gid: group}},
	{"supplementary group", 3, cred{uid: 1003, gid: 3003, groups: []uint32{4000, group}}},
	{"40th supplementary group", 3, cred{uid: 1004, gid: 3004, groups: fortyGroups()}},
	{"other", 0, cred{uid: 1005, gid: 3005, groups: []uint32{4000}}},
	{"root", -1, cred{}},
}

func fortyGroups() []uint32 {
	var g []uint32
	for i := range uint32(39) {
		g = append(g, 5000+i)
	}
	return append(g, group)
}

// Calls on a file f in a directory that everybody may enter, and what they need: bits of the file, or being its owner.
var fileCalls = []struct {
	name  string
	needs uint32 // of the file's rwx
	owner bool   // does it have to be the owner, and root
	or    bool   // is either enough
	errno string
	do    func(p string) error
}{
	{"open for reading", 4, false, false, "EACCES", func(p string) error { return open(p, unix.O_RDONLY) }},
	{"open for writing", 2, false, false, "EACCES", func(p string) error { return open(p, unix.O_WRONLY) }},
	{"open for both", 6, false, false, "EACCES", func(p string) error { return open(p, unix.O_RDWR) }},
	{"open O_TRUNC", 2, false, false, "EACCES", func(p string) error { return open(p, unix.O_WRONLY|unix.O_TRUNC) }},
	{"truncate", 2, false, false, "EACCES", func(p string) error { return unix.Truncate(p, 1) }},
	{"getxattr user.x", 4, false, false, "EACCES", func(p string) error { _, err := unix.Getxattr(p, "user.x", make([]byte, 9)); return err }},
	{"setxattr user.x", 2, false, false, "EACCES", func(p string) error { return unix.Setxattr(p, "user.x", []byte("y"), 0) }},
	{"removexattr user.x", 2, false, false, "EACCES", func(p string) error { return unix.Removexattr(p, "user.x") }},
	{"utimensat now", 2, true, true, "EACCES", func(p string) error { return unix.UtimesNanoAt(unix.AT_FDCWD, p, nil, 0) }},
	{"utimensat", 0, true, false, "EPERM", func(p string) error {
		return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{old, old}, 0)
	}},
	{"chmod", 0, true, false, "EPERM", func(p string) error { return unix.Chmod(p, 0o600) }},
	{"access R_OK", 4, false, false, "EACCES", func(p string) error { return unix.Access(p, unix.R_OK) }},
	{"access W_OK", 2, false, false, "EACCES", func(p string) error { return unix.Access(p, unix.W_OK) }},
	{"access X_OK", 1, false, false, "EACCES", func(p string) error { return unix.Access(p, unix.X_OK) }},
	{"access R_OK|W_OK|X_OK", 7, false, false, "EACCES", func(p string) error { return unix.Access(p, 7) }},
}

// Calls in a directory d with a file f and a directory e, and what they need of d's rwx.
var dirCalls = []struct {
	name  string
	needs uint32
	do    func(d string) error
}{
	{"stat in it", 1, func(d string) error { return unix.Lstat(d+"/f", new(unix.Stat_t)) }},
	{"open a file in it", 1, func(d string) error { return open(d+"/f", unix.O_RDONLY) }},
	{"read it", 4, func(d string) error { return open(d, unix.O_RDONLY) }},
	{"chdir", 1, func(d string) error { return unix.Chdir(d) }},
	{"create in it", 3, func(d string) error { return open(d+"/n", unix.O_CREAT|unix.O_WRONLY) }},
	{"mkdir in it", 3, func(d string) error { return unix.Mkdir(d+"/n", 0o755) }},
	{"symlink in it", 3, func(d string) error { return unix.Symlink("x", d+"/n") }},
	{"mkfifo in it", 3, func(d string) error { return unix.Mkfifo(d+"/n", 0o644) }},
	{"unlink in it", 3, func(d string) error { return unix.Unlink(d + "/f") }},
	{"rmdir in it", 3, func(d string) error { return unix.Rmdir(d + "/e") }},
	{"rename in it", 3, func(d string) error { return unix.Rename(d+"/f", d+"/g") }},
	{"rename out of it", 3, func(d string) error { return unix.Rename(d+"/f", d+"/../open/f") }},
	{"rename into it", 3, func(d string) error { return unix.Rename(d+"/../open/mine", d+"/n") }},
}

func permissionChecks() []check {
	var out []check
	for _, who := range whos {
		// Their bits are some, and everybody else's the others.
		for bits := range uint32(8) {
			if len(who.cred.groups) > 0 && bits != 0 && bits != 4 && bits != 3 && bits != 7 {
				continue // a file system either knows of the groups or does not
			}
			theirs := bits << max(who.shift, 0)
			perm := theirs | (0o111*(7-bits))&^(7<<max(who.shift, 0))
			allowed := bits
			if who.shift < 0 { // root may do all but execute what nobody may
				perm = 0o111 * bits
				allowed = 6 | bits&1
			}
			for _, call := range fileCalls {
				ok := allowed&call.needs == call.needs
				isOwner := who.name == "owner" || who.name == "root"
				if call.or {
					ok = ok || isOwner
				} else if call.owner {
					ok = isOwner
				}
				want := "ok"
				if !ok {
					want = call.errno
				}
				out = append(out, check{fmt.Sprintf("%s by %s, mode %03o", call.name, who.name, perm), want, func(w world) any {
					p := w.file("f", "data")
					try(unix.Setxattr(p, "user.x", []byte("x"), 0))
					try(unix.Chown(p, owner, group))
					try(unix.Chmod(p, perm))
					return as(who.cred, func() any { return call.do(p) })
				}})
			}
			if who.shift < 0 {
				continue
			}
			for _, call := range dirCalls {
				want := "ok"
				if bits&call.needs != call.needs {
					want = "EACCES"
				}
				out = append(out, check{fmt.Sprintf("%s by %s, directory's mode %03o", call.name, who.name, perm), want, func(w world) any {
					d := w.dir("d")
					w.file("d/f", "")
					w.dir("d/e")
					w.dir("open")
					w.file("open/mine", "")
					try(unix.Chmod(w.at("open"), 0o777))
					try(unix.Chown(d, owner, group))
					try(unix.Chmod(d, perm))
					return as(who.cred, func() any { return call.do(d) })
				}})
			}
		}
	}
	// Sticky directories: who may remove what.
	for _, dirOwner := range []int{0, 1001, 1005} {
		for _, fileOwner := range []int{0, 1001, 1005} {
			want := "EPERM"
			if dirOwner == 1001 || fileOwner == 1001 {
				want = "ok"
			}
			for _, call := range []struct {
				name string
				do   func(d string) error
			}{
				{"unlink", func(d string) error { return unix.Unlink(d + "/f") }},
				{"rmdir", func(d string) error { return unix.Rmdir(d + "/e") }},
				{"rename", func(d string) error { return unix.Rename(d+"/f", d+"/g") }},
				{"rename over", func(d string) error { return unix.Rename(d+"/../mine", d+"/f") }},
				{"rename EXCHANGE", func(d string) error {
					return unix.Renameat2(unix.AT_FDCWD, d+"/../mine", unix.AT_FDCWD, d+"/f", unix.RENAME_EXCHANGE)
				}},
			} {
				out = append(out, check{fmt.Sprintf("%s by 1001 in sticky directory of %d, file of %d", call.name, dirOwner, fileOwner), want, func(w world) any {
					d := w.dir("d")
					w.file("d/f", "")
					w.dir("d/e")
					for _, p := range []string{"d/f", "d/e"} {
						try(unix.Chown(w.at(p), fileOwner, -1))
					}
					w.file("mine", "")
					try(unix.Chown(w.at("mine"), 1001, -1))
					try(unix.Chmod(string(w), 0o777))
					try(unix.Chown(d, dirOwner, -1))
					try(unix.Chmod(d, 0o1777))
					return as(cred{uid: 1001, gid: 1001}, func() any { return call.do(d) })
				}})
			}
		}
	}
	user := cred{uid: 1001, gid: 1001, groups: []uint32{2001}}
	owned := func(w world, c cred, do func(p string) error) any {
		p := w.file("f", "data")
		try(unix.Chown(p, 1001, 1001))
		return as(c, func() any { return do(p) })
	}
	// chown by whom to what.
	for _, c := range []struct {
		who      string
		cred     cred
		uid, gid int
		want     string
	}{
		{"root", cred{}, 5, 6, "ok"}, {"owner", user, 1001, -1, "ok"}, {"owner", user, 1002, -1, "EPERM"}, {"owner", user, -1, 1001, "ok"},
		{"owner", user, -1, 2001, "ok"}, {"owner", user, -1, 2002, "EPERM"}, {"owner", user, -1, -1, "ok"}, {"owner", user, 0, 0, "EPERM"},
		{"other", cred{uid: 1005, gid: 1001}, -1, -1, "ok"}, {"other", cred{uid: 1005, gid: 1001}, 1005, -1, "EPERM"}, {"other", cred{uid: 1005, gid: 1001}, -1, 1001, "EPERM"},
	} {
		out = append(out, check{fmt.Sprintf("chown by %s to %d:%d", c.who, c.uid, c.gid), c.want, func(w world) any {
			return owned(w, c.cred, func(p string) error { return unix.Chown(p, c.uid, c.gid) })
		}})
	}
	// Bits that give rights are taken away by those who could misuse them.
	for _, bits := range []uint32{0o6777, 0o6755, 0o6644, 0o2711} {
		for _, c := range []struct {
			name string
			do   func(p string) error
		}{
			{"write", func(p string) error { return os.WriteFile(p+"", []byte("x"), 0) }},
			{"pwrite", func(p string) error {
				return onFd(p, func(fd int) error { _, err := unix.Pwrite(fd, []byte("x"), 0); return err })
			}},
			{"write of nothing", func(p string) error { return onFd(p, func(fd int) error { _, err := unix.Write(fd, nil); return err }) }},
			{"truncate", func(p string) error { return unix.Truncate(p, 1) }},
			{"ftruncate", func(p string) error { return onFd(p, func(fd int) error { return unix.Ftruncate(fd, 1) }) }},
			{"fallocate", func(p string) error { return onFd(p, func(fd int) error { return unix.Fallocate(fd, 0, 0, 100) }) }},
			{"open O_TRUNC", func(p string) error { return open(p, unix.O_WRONLY|unix.O_TRUNC) }},
			{"open for writing", func(p string) error { return open(p, unix.O_WRONLY) }},
			{"copy_file_range", func(p string) error {
				return onFd(p, func(fd int) error {
					from, to := int64(0), int64(2)
					_, err := unix.CopyFileRange(fd, &from, fd, &to, 2, 0)
					return err
				})
			}},
			{"chown to oneself", func(p string) error { return unix.Chown(p, 1001, -1) }},
			{"chgrp", func(p string) error { return unix.Chown(p, -1, 2001) }},
			{"chown -1 -1", func(p string) error { return unix.Chown(p, -1, -1) }},
			{"rename", func(p string) error { return unix.Rename(p, p+"2") }},
			{"utimensat", func(p string) error { return unix.UtimesNanoAt(unix.AT_FDCWD, p, nil, 0) }},
			{"setxattr", func(p string) error { return unix.Setxattr(p, "user.x", nil, 0) }},
		} {
			for _, who := range []struct {
				name string
				cred cred
			}{{"owner", user}, {"root", cred{}}} {
				out = append(out, check{fmt.Sprintf("mode %04o after %s by %s", bits, c.name, who.name), "", func(w world) any {
					p := w.file("f", "data")
					try(unix.Chmod(string(w), 0o777))
					try(unix.Chown(p, 1001, 1001))
					try(unix.Chmod(p, bits))
					err := as(who.cred, func() any { return c.do(p) })
					if !exists(p) {
						p += "2"
					}
					return say(err, mode(p))
				}})
			}
		}
	}
	return append(out, []check{
		{"another process with 40 groups", "1004 ok", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, owner, group))
			try(unix.Chmod(p, 0o640))
			return as(cred{uid: 1004, gid: 3004, groups: fortyGroups()}, func() any { return inChild("ids", p) })
		}},
		{"another process without the group", "1005 EACCES", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, owner, group))
			try(unix.Chmod(p, 0o640))
			return as(cred{uid: 1005, gid: 3005}, func() any { return inChild("ids", p) })
		}},
		{"descriptor keeps its rights after chmod", "ok 4", func(w world) any {
			p := w.file("f", "data")
			try(unix.Chown(p, 1001, 1001))
			return as(user, func() any {
				fd := opened(p, unix.O_RDWR)
				defer unix.Close(fd)
				try(unix.Fchmod(fd, 0))
				n, err := unix.Pwrite(fd, []byte("more"), 0)
				return say(err, n)
			})
		}},
		{"descriptor keeps its rights after the user has changed", "4", func(w world) any {
			p := w.file("f", "data")
			try(unix.Chmod(p, 0o600))
			return apart(func() any {
				fd := opened(p, unix.O_RDWR)
				defer unix.Close(fd)
				become(user)
				return must(unix.Pwrite(fd, []byte("more"), 0))
			})
		}},
		{"search permission is asked of each directory of a path", "EACCES", func(w world) any {
			w.dir("a")
			w.dir("a/b")
			w.file("a/b/f", "")
			try(unix.Chmod(w.at("a"), 0o700))
			return as(user, func() any { return open(w.at("a/b/f"), unix.O_RDONLY) })
		}},
		{"rename of another's directory needs to write it for ..", "EACCES", func(w world) any {
			w.dir("a")
			w.dir("b")
			w.dir("a/d")
			try(unix.Chmod(w.at("a"), 0o777))
			try(unix.Chmod(w.at("b"), 0o777))
			return as(user, func() any { return unix.Rename(w.at("a/d"), w.at("b/d")) })
		}},
		{"new file has its maker's owner and group", "1001 1001", func(w world) any {
			try(unix.Chmod(string(w), 0o777))
			return as(user, func() any {
				try(open(w.at("f"), unix.O_CREAT|unix.O_RDWR))
				st := lstat(w.at("f"))
				return say(st.Uid, st.Gid)
			})
		}},
		{"faccessat2 AT_EACCESS", "ok", func(w world) any {
			return as(user, func() any { return unix.Faccessat2(unix.AT_FDCWD, string(w), unix.R_OK, unix.AT_EACCESS) })
		}},
		{"faccessat2 AT_SYMLINK_NOFOLLOW of a dangling symlink", "ok", func(w world) any {
			return unix.Faccessat2(unix.AT_FDCWD, w.link("no", "l"), unix.R_OK, unix.AT_SYMLINK_NOFOLLOW)
		}},
		{"faccessat2 AT_EMPTY_PATH", "ok", func(w world) any {
			fd := opened(string(w), unix.O_PATH)
			defer unix.Close(fd)
			return unix.Faccessat2(fd, "", unix.R_OK, unix.AT_EMPTY_PATH)
		}},
		{"access of a missing file", "ENOENT", func(w world) any { return unix.Access(w.at("no"), unix.F_OK) }},
		{"access with a wrong mode", "EINVAL", func(w world) any { return unix.Access(string(w), 8) }},
		{"access through a dangling symlink", "ENOENT", func(w world) any { return unix.Access(w.link("no", "l"), unix.F_OK) }},
		{"access goes by the real user", "EACCES", func(w world) any {
			p := w.file("f", "")
			try(unix.Chmod(p, 0o600))
			return apart(func() any {
				raw(unix.SYS_SETRESUID, 1001, 0, 0)
				return unix.Access(p, unix.R_OK)
			})
		}},
		{"open goes by the effective user", "ok", func(w world) any {
			p := w.file("f", "")
			try(unix.Chmod(p, 0o600))
			return apart(func() any {
				raw(unix.SYS_SETRESUID, 1001, 0, 0)
				return open(p, unix.O_RDONLY)
			})
		}},
		{"open goes by the file system user", "EACCES 1001", func(w world) any {
			p := w.file("f", "")
			try(unix.Chmod(p, 0o600))
			try(unix.Chmod(string(w), 0o777))
			return apart(func() any {
				raw(unix.SYS_SETFSUID, 1001, 0, 0)
				err := open(p, unix.O_RDONLY)
				try(open(w.at("g"), unix.O_CREAT|unix.O_RDWR))
				return say(err, lstat(w.at("g")).Uid)
			})
		}},
		{"security.capability is dropped by a write", "ENODATA", func(w world) any {
			p := w.file("f", "data")
			// Version 2, one capability: what setcap(8) writes.
			try(unix.Setxattr(p, "security.capability", []byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0))
			try(onFd(p, func(fd int) error { _, err := unix.Pwrite(fd, []byte("x"), 0); return err }))
			_, err := unix.Getxattr(p, "security.capability", nil)
			return err
		}},
		{"security.capability is dropped by chown", "ENODATA", func(w world) any {
			p := w.file("f", "data")
			try(unix.Setxattr(p, "security.capability", []byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0))
			try(unix.Chown(p, 1001, 1001))
			_, err := unix.Getxattr(p, "security.capability", nil)
			return err
		}},
	}...)
}

func onFd(p string, f func(fd int) error) error {
	fd, err := unix.Open(p, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		if fd, err = unix.Open(p, unix.O_WRONLY|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
	}
	defer unix.Close(fd)
	return f(fd)
}

func modeChecks() []check {
	var out []check
	for _, m := range []uint32{0, 0o1, 0o444, 0o644, 0o777, 0o1777, 0o2755, 0o4755, 0o7777} {
		for _, kind := range []string{"file", "dir", "fifo", "socket"} {
			out = append(out, check{fmt.Sprintf("chmod %04o %s", m, kind), fmt.Sprintf("%o", m), func(w world) any {
				p := w.make(kind, "it")
				try(unix.Chmod(p, m))
				return mode(p)
			}})
		}
	}
	// What is made has the asked mode without the umask's bits, and a set-group-ID directory gives its group.
	for _, mask := range []int{0, 0o022, 0o077, 0o777} {
		for _, parent := range []uint32{0o777, 0o2777} {
			for _, c := range []struct {
				name string
				mode uint32
				do   func(p string) error
			}{
				{"creat", 0o666, func(p string) error { return closing(unix.Open(p, unix.O_CREAT|unix.O_RDWR, 0o666)) }},
				{"creat 2775", 0o2775, func(p string) error { return closing(unix.Open(p, unix.O_CREAT|unix.O_RDWR, 0o2775)) }},
				{"mkdir", 0o777, func(p string) error { return unix.Mkdir(p, 0o777) }},
				{"mkdir 1777", 0o1777, func(p string) error { return unix.Mkdir(p, 0o1777) }},
				{"mkfifo", 0o666, func(p string) error { return unix.Mkfifo(p, 0o666) }},
				{"mknod socket", 0o666, func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o666, 0) }},
				{"symlink", 0o777, func(p string) error { return unix.Symlink("x", p) }},
			} {
				out = append(out, check{fmt.Sprintf("%s with umask %03o in a directory of mode %04o", c.name, mask, parent), "", func(w world) any {
					d := w.dir("d")
					try(unix.Chown(d, 1009, 2009))
					try(unix.Chmod(d, parent))
					return apart(func() any {
						become(cred{uid: 1001, gid: 1001})
						unix.Umask(mask)
						if err := c.do(d + "/n"); err != nil {
							return err
						}
						st := lstat(d + "/n")
						return say(mode(d+"/n"), st.Uid, st.Gid)
					})
				}})
			}
		}
	}
	return append(out, []check{
		{"chmod 2755 by an owner who is not in the group", "755", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 2001))
			return as(cred{uid: 1001, gid: 1001}, func() any { try(unix.Chmod(p, 0o2755)); return mode(p) })
		}},
		{"chmod 2755 by an owner who is in the group", "2755", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 2001))
			return as(cred{uid: 1001, gid: 1001, groups: []uint32{2001}}, func() any { try(unix.Chmod(p, 0o2755)); return mode(p) })
		}},
		{"chmod 2755 by an owner who is in the group as the 40th", "2755", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 2001))
			return as(cred{uid: 1001, gid: 1001, groups: fortyGroups()}, func() any { try(unix.Chmod(p, 0o2755)); return mode(p) })
		}},
		{"chmod 2755 of a directory by an owner who is not in the group", "755", func(w world) any {
			p := w.dir("d")
			try(unix.Chown(p, 1001, 2001))
			return as(cred{uid: 1001, gid: 1001}, func() any { try(unix.Chmod(p, 0o2755)); return mode(p) })
		}},
		{"chmod 1644 of a file by its owner", "", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 1001))
			return as(cred{uid: 1001, gid: 1001}, func() any { err := unix.Chmod(p, 0o1644); return say(err, mode(p)) })
		}},
		{"fchmod", "600", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Fchmod(fd, 0o600))
			return mode(w.at("f"))
		}},
		{"fchown", "7 8", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Fchown(fd, 7, 8))
			return say(fstat(fd).Uid, fstat(fd).Gid)
		}},
		{"fchmod of an unlinked file", "600", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			try(unix.Fchmod(fd, 0o600))
			return fmt.Sprintf("%o", fstat(fd).Mode&0o7777)
		}},
		{"lchown of a symlink", "7 8 0", func(w world) any {
			w.file("f", "")
			try(unix.Lchown(w.link("f", "l"), 7, 8))
			return say(lstat(w.at("l")).Uid, lstat(w.at("l")).Gid, lstat(w.at("f")).Uid)
		}},
		{"chown through a symlink", "0 7", func(w world) any {
			w.file("f", "")
			try(unix.Chown(w.link("f", "l"), 7, 8))
			return say(lstat(w.at("l")).Uid, lstat(w.at("f")).Uid)
		}},
		{"chown to the largest ids", "4294967294 4294967294", func(w world) any {
			try(unix.Chown(w.file("f", ""), 1<<32-2, 1<<32-2))
			return say(lstat(w.at("f")).Uid, lstat(w.at("f")).Gid)
		}},
		{"fchownat AT_EMPTY_PATH", "7", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_PATH)
			defer unix.Close(fd)
			try(unix.Fchownat(fd, "", 7, -1, unix.AT_EMPTY_PATH))
			return fstat(fd).Uid
		}},
	}...)
}

func closing(fd int, err error) error {
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}
