package posix

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// moved says which times of a file differ from before and are of now.
func moved(before, st unix.Stat_t) string {
	var out []string
	for _, x := range []struct {
		name      string
		then, now unix.Timespec
	}{{"atime", before.Atim, st.Atim}, {"mtime", before.Mtim, st.Mtim}, {"ctime", before.Ctim, st.Ctim}} {
		if x.then == x.now {
			continue
		}
		if d := time.Since(time.Unix(x.now.Unix())); d > time.Minute || d < -time.Second {
			out = append(out, x.name+" wrong")
			continue
		}
		out = append(out, x.name)
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, "+")
}

func timeChecks() []check {
	var out []check
	// What each call changes of the file and of its directory.
	for _, c := range []struct {
		name, kind, file, dir string
		do                    func(w world, p string) error
	}{
		{"creat", "missing", "", "mtime+ctime", func(w world, p string) error { return open(p, unix.O_CREAT|unix.O_RDWR) }},
		{"open", "file", "none", "none", func(w world, p string) error { return open(p, unix.O_RDWR) }},
		{"open O_CREAT existing", "file", "none", "none", func(w world, p string) error { return open(p, unix.O_RDWR|unix.O_CREAT) }},
		{"open O_TRUNC", "file", "mtime+ctime", "none", func(w world, p string) error { return open(p, unix.O_RDWR|unix.O_TRUNC) }},
		{"open O_TRUNC empty", "empty", "mtime+ctime", "none", func(w world, p string) error { return open(p, unix.O_RDWR|unix.O_TRUNC) }},
		{"write", "file", "mtime+ctime", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error { _, err := unix.Write(fd, []byte("x")); return err })
		}},
		{"write of nothing", "file", "none", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error { _, err := unix.Write(fd, nil); return err })
		}},
		{"truncate", "file", "mtime+ctime", "none", func(w world, p string) error { return unix.Truncate(p, 1) }},
		{"truncate longer", "file", "mtime+ctime", "none", func(w world, p string) error { return unix.Truncate(p, 100) }},
		{"fallocate", "file", "mtime+ctime", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error { return unix.Fallocate(fd, 0, 0, 10000) })
		}},
		{"fallocate punch", "file", "mtime+ctime", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error {
				return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 2)
			})
		}},
		{"copy_file_range to it", "file", "mtime+ctime", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error {
				return onFd(w.at("peer"), func(in int) error { _, err := unix.CopyFileRange(in, nil, fd, nil, 3, 0); return err })
			})
		}},
		{"read", "file", "atime", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error { _, err := unix.Read(fd, make([]byte, 2)); return err })
		}},
		{"read of nothing", "file", "none", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error { _, err := unix.Read(fd, nil); return err })
		}},
		{"read O_NOATIME", "file", "none", "none", func(w world, p string) error {
			fd := opened(p, unix.O_RDONLY|unix.O_NOATIME)
			defer unix.Close(fd)
			_, err := unix.Read(fd, make([]byte, 2))
			return err
		}},
		{"chmod", "file", "ctime", "none", func(w world, p string) error { return unix.Chmod(p, 0o600) }},
		{"chmod to the same", "file", "ctime", "none", func(w world, p string) error { return unix.Chmod(p, 0o644) }},
		{"chown", "file", "ctime", "none", func(w world, p string) error { return unix.Chown(p, 7, 7) }},
		{"chown to the same", "file", "ctime", "none", func(w world, p string) error { return unix.Chown(p, 0, 0) }},
		{"chown -1 -1", "file", "ctime", "none", func(w world, p string) error { return unix.Chown(p, -1, -1) }},
		{"link", "file", "ctime", "mtime+ctime", func(w world, p string) error { return unix.Link(p, p+"2") }},
		{"unlink one of two names", "file", "ctime", "mtime+ctime", func(w world, p string) error { return unix.Unlink(w.at("d/twin")) }},
		{"unlink", "fifo", "", "mtime+ctime", func(w world, p string) error { return unix.Unlink(p) }},
		{"rename", "file", "ctime", "mtime+ctime", func(w world, p string) error { return unix.Rename(p, w.at("d/renamed")) }},
		{"rename out", "file", "ctime", "mtime+ctime", func(w world, p string) error { return unix.Rename(p, w.at("renamed")) }},
		{"rename over it", "dir", "", "mtime+ctime", func(w world, p string) error { w.dir("other"); return unix.Rename(w.at("other"), p) }},
		{"rename of a directory", "dir", "ctime", "mtime+ctime", func(w world, p string) error { return unix.Rename(p, w.at("d/renamed")) }},
		{"rename NOREPLACE that fails", "file", "none", "none", func(w world, p string) error {
			unix.Renameat2(unix.AT_FDCWD, w.at("peer"), unix.AT_FDCWD, p, unix.RENAME_NOREPLACE)
			return nil
		}},
		{"mkdir", "missing", "", "mtime+ctime", func(w world, p string) error { return unix.Mkdir(p, 0o755) }},
		{"mkdir in it", "dir", "mtime+ctime", "none", func(w world, p string) error { return unix.Mkdir(p+"/x", 0o755) }},
		{"mkdir that fails", "dir", "none", "none", func(w world, p string) error { unix.Mkdir(p, 0o755); return nil }},
		{"rmdir", "dir", "", "mtime+ctime", func(w world, p string) error { return unix.Rmdir(p) }},
		{"symlink", "missing", "", "mtime+ctime", func(w world, p string) error { return unix.Symlink("x", p) }},
		{"mkfifo", "missing", "", "mtime+ctime", func(w world, p string) error { return unix.Mkfifo(p, 0o644) }},
		{"readdir", "full", "atime", "none", func(w world, p string) error { list(p); return nil }},
		{"readlink", "symlink", "atime", "none", func(w world, p string) error { readlink(p); return nil }},
		{"setxattr", "file", "ctime", "none", func(w world, p string) error { return unix.Setxattr(p, "user.y", []byte("v"), 0) }},
		{"setxattr to the same", "file", "ctime", "none", func(w world, p string) error { return unix.Setxattr(p, "user.x", []byte("v"), 0) }},
		{"removexattr", "file", "ctime", "none", func(w world, p string) error { return unix.Removexattr(p, "user.x") }},
		{"getxattr", "file", "none", "none", func(w world, p string) error { getxattr(p, "user.x"); return nil }},
		{"utimensat of now", "file", "atime+mtime+ctime", "none", func(w world, p string) error { return unix.UtimesNanoAt(unix.AT_FDCWD, p, nil, 0) }},
		{"utimensat of the same", "file", "ctime", "none", func(w world, p string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{old, old}, 0)
		}},
		{"utimensat OMIT both", "file", "none", "none", func(w world, p string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}, 0)
		}},
		{"utimensat NOW and OMIT", "file", "atime+ctime", "none", func(w world, p string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_OMIT}}, 0)
		}},
		{"utimensat OMIT and NOW", "file", "mtime+ctime", "none", func(w world, p string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_NOW}}, 0)
		}},
		{"utimensat of a symlink", "symlink", "mtime+ctime", "none", func(w world, p string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{old, {Nsec: unix.UTIME_NOW}}, unix.AT_SYMLINK_NOFOLLOW)
		}},
		{"stat", "file", "none", "none", func(w world, p string) error { lstat(p); return nil }},
		{"access", "file", "none", "none", func(w world, p string) error { return unix.Access(p, 4) }},
		{"fsync", "file", "none", "none", func(w world, p string) error { return onFd(p, unix.Fsync) }},
		{"mmap and read", "file", "atime", "none", func(w world, p string) error {
			return onFd(p, func(fd int) error {
				m, err := unix.Mmap(fd, 0, 4, unix.PROT_READ, unix.MAP_SHARED)
				if err == nil {
					err = unix.Munmap(m)
				}
				return err
			})
		}},
		{"lock", "file", "none", "none", func(w world, p string) error { return onFd(p, func(fd int) error { return flock(fd, unix.LOCK_EX) }) }},
	} {
		name := fmt.Sprintf("times after %s (%s)", c.name, c.kind)
		run := func(w world) (string, string) {
			w.dir("d")
			p := w.make(c.kind, "d/it")
			w.file("peer", "peer")
			var before unix.Stat_t
			if c.kind == "file" {
				try(unix.Link(p, w.at("d/twin")))
				try(unix.Setxattr(p, "user.x", []byte("v"), 0))
			}
			if c.kind != "missing" {
				try(unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{old, old}, unix.AT_SYMLINK_NOFOLLOW))
			}
			beforeDir := aged(w.at("d"))
			if c.kind != "missing" {
				before = lstat(p)
			}
			try(c.do(w, p))
			file := "gone"
			for _, q := range []string{p, w.at("d/renamed"), w.at("renamed")} {
				if exists(q) {
					file = moved(before, lstat(q))
					if c.kind == "missing" {
						st := lstat(q)
						file = say(moved(before, st), st.Mtim == st.Ctim)
					}
					break
				}
			}
			return file, moved(beforeDir, lstat(w.at("d")))
		}
		out = append(out, check{name + ", file", c.file, func(w world) any { file, _ := run(w); return file }})
		out = append(out, check{name + ", directory", c.dir, func(w world) any { _, dir := run(w); return dir }})
	}
	// relatime: a read moves atime only if it is not later than mtime or ctime, or is a day old.
	for _, c := range []struct {
		name, want   string
		atime, mtime int64 // seconds from now
	}{{"older than mtime", "true", -3600, -60}, {"a day old", "true", -86500, -90000}, {"newer than mtime", "false", 600, -3600}} {
		out = append(out, check{"relatime: atime " + c.name, c.want, func(w world) any {
			p := w.file("f", "data")
			now := time.Now().Unix()
			at := unix.Timespec{Sec: now + c.atime}
			try(unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{at, {Sec: now + c.mtime}}, 0))
			read(p)
			return lstat(p).Atim != at
		}})
	}
	// utimensat by those who may and may not.
	user := cred{uid: 1001, gid: 1001}
	now, omit := unix.Timespec{Nsec: unix.UTIME_NOW}, unix.Timespec{Nsec: unix.UTIME_OMIT}
	for _, ts := range []struct {
		name                  string
		ts                    []unix.Timespec
		owner, writer, reader string
	}{
		{"null", nil, "ok", "ok", "EACCES"}, {"now now", []unix.Timespec{now, now}, "ok", "ok", "EACCES"}, {"omit omit", []unix.Timespec{omit, omit}, "ok", "ok", "ok"},
		{"now omit", []unix.Timespec{now, omit}, "ok", "EPERM", "EPERM"}, {"omit now", []unix.Timespec{omit, now}, "ok", "EPERM", "EPERM"},
		{"set set", []unix.Timespec{old, old}, "ok", "EPERM", "EPERM"}, {"set now", []unix.Timespec{old, now}, "ok", "EPERM", "EPERM"}, {"set omit", []unix.Timespec{old, omit}, "ok", "EPERM", "EPERM"},
		{"wrong nanoseconds", []unix.Timespec{{Nsec: 1e9}, old}, "EINVAL", "EINVAL", "EINVAL"}, {"negative nanoseconds", []unix.Timespec{{Nsec: -1}, old}, "EINVAL", "EINVAL", "EINVAL"},
	} {
		for who, want := range map[string]string{"owner": ts.owner, "one who may write": ts.writer, "one who may read": ts.reader} {
			out = append(out, check{fmt.Sprintf("utimensat %s by %s", ts.name, who), want, func(w world) any {
				p := w.file("f", "")
				switch who {
				case "owner":
					try(unix.Chown(p, 1001, 1001))
					try(unix.Chmod(p, 0o444))
				case "one who may write":
					try(unix.Chmod(p, 0o666))
				}
				return as(user, func() any { return unix.UtimesNanoAt(unix.AT_FDCWD, p, ts.ts, 0) })
			}})
		}
	}
	for _, sec := range []int64{0, -1, -86400 * 365 * 60, 1 << 31, 1<<32 - 1, 1 << 32, 8e9, 9e9} {
		want := fmt.Sprint(sec, " 987654321")
		if sec < -1<<31 || sec > 8e9 {
			want = ""
		}
		out = append(out, check{fmt.Sprintf("mtime of %d s", sec), want, func(w world) any {
			p := w.file("f", "")
			try(unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{old, {Sec: sec, Nsec: 987654321}}, 0))
			st := lstat(p)
			return say(st.Mtim.Sec, st.Mtim.Nsec)
		}})
	}
	return append(out, []check{
		{"times set before close stay", "5", func(w world) any {
			fd := opened(w.at("f"), unix.O_CREAT|unix.O_RDWR)
			must(unix.Write(fd, []byte("late data")))
			try(unix.UtimesNanoAt(unix.AT_FDCWD, w.at("f"), []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0))
			try(unix.Close(fd))
			return lstat(w.at("f")).Mtim.Sec
		}},
		{"times set before fsync stay", "5", func(w world) any {
			fd := opened(w.at("f"), unix.O_CREAT|unix.O_RDWR)
			defer unix.Close(fd)
			must(unix.Write(fd, []byte("late data")))
			try(unix.UtimesNanoAt(unix.AT_FDCWD, w.at("f"), []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0))
			try(unix.Fsync(fd))
			return fstat(fd).Mtim.Sec
		}},
		{"times set after a write leave the size", "8192", func(w world) any {
			fd := opened(w.at("f"), unix.O_CREAT|unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Ftruncate(fd, 4096))
			must(unix.Pwrite(fd, make([]byte, 4096), 4096))
			try(unix.UtimesNanoAt(unix.AT_FDCWD, w.at("f"), []unix.Timespec{{Sec: 5}, {Sec: 5}}, 0))
			return fstat(fd).Size
		}},
		{"futimens", "5 7", func(w world) any {
			fd := opened(w.at("f"), unix.O_CREAT|unix.O_RDWR)
			defer unix.Close(fd)
			ts := [2]unix.Timespec{{Sec: 5}, {Sec: 6, Nsec: 7}}
			_, _, e := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, addr(&ts[0]), 0, 0, 0)
			try(errnoOf(e))
			return say(fstat(fd).Atim.Sec, fstat(fd).Mtim.Nsec)
		}},
		{"statx has a birth time that stays", "true true", func(w world) any {
			p := w.file("f", "")
			var a, b unix.Statx_t
			try(unix.Statx(unix.AT_FDCWD, p, 0, unix.STATX_BTIME|unix.STATX_BASIC_STATS, &a))
			aged(p)
			try(unix.Chmod(p, 0o600))
			try(unix.Statx(unix.AT_FDCWD, p, 0, unix.STATX_BTIME|unix.STATX_BASIC_STATS, &b))
			return say(a.Mask&unix.STATX_BTIME != 0 && time.Since(time.Unix(a.Btime.Sec, 0)) < time.Minute, a.Btime == b.Btime)
		}},
		{"statx AT_EMPTY_PATH", "ok 3", func(w world) any {
			fd := opened(w.file("f", "abc"), unix.O_PATH)
			defer unix.Close(fd)
			var st unix.Statx_t
			err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_SIZE, &st)
			return say(err, st.Size)
		}},
		{"statx AT_STATX_FORCE_SYNC", "ok 3", func(w world) any {
			var st unix.Statx_t
			err := unix.Statx(unix.AT_FDCWD, w.file("f", "abc"), unix.AT_STATX_FORCE_SYNC, unix.STATX_SIZE, &st)
			return say(err, st.Size)
		}},
		{"statx unknown flag", "EINVAL", func(w world) any {
			return unix.Statx(unix.AT_FDCWD, string(w), 1<<20, unix.STATX_SIZE, new(unix.Statx_t))
		}},
		{"stat and statx agree", "true", func(w world) any {
			p := w.file("f", "abc")
			var x unix.Statx_t
			try(unix.Statx(unix.AT_FDCWD, p, 0, unix.STATX_BASIC_STATS, &x))
			st := lstat(p)
			return x.Ino == st.Ino && x.Size == uint64(st.Size) && uint32(x.Mode) == st.Mode && x.Mtime.Nsec == uint32(st.Mtim.Nsec) && x.Ctime.Sec == st.Ctim.Sec && x.Blocks == uint64(st.Blocks)
		}},
		{"mtimes of successive writes grow", "true", func(w world) any {
			fd := opened(w.at("f"), unix.O_CREAT|unix.O_RDWR)
			defer unix.Close(fd)
			must(unix.Write(fd, []byte("x")))
			before := fstat(fd).Mtim
			time.Sleep(12 * time.Millisecond)
			must(unix.Write(fd, []byte("x")))
			return after(fstat(fd).Mtim, before)
		}},
		{"mtime and ctime agree after a write", "true", func(w world) any {
			st := lstat(w.file("f", "x"))
			return st.Mtim == st.Ctim
		}},
		{"ctime is not mtime that was set", "true", func(w world) any {
			st := aged(w.file("f", "x"))
			return after(st.Ctim, st.Mtim)
		}},
	}...)
}
