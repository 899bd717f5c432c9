package posix

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

var renameFlags = []struct {
	name  string
	flags uint
}{{"rename", 0}, {"rename NOREPLACE", unix.RENAME_NOREPLACE}, {"rename EXCHANGE", unix.RENAME_EXCHANGE}}

// isDir says whether a name of that kind is a directory's. A symbolic link is none, whatever it points to.
func isDir(kind string) bool { return kind == "dir" || kind == "full" }

// renameWant is what rename(2) says.
func renameWant(from, to string, flags uint) string {
	switch {
	case from == "missing":
		return "ENOENT"
	case flags == unix.RENAME_EXCHANGE:
		if to == "missing" {
			return "ENOENT"
		}
	case to == "missing":
	case flags == unix.RENAME_NOREPLACE:
		return "EEXIST"
	case isDir(from) && !isDir(to):
		return "ENOTDIR"
	case !isDir(from) && isDir(to):
		return "EISDIR"
	case to == "full":
		return "ENOTEMPTY"
	}
	return "ok"
}

func renameChecks() []check {
	var out []check
	sorts := []string{"missing", "file", "dir", "full", "symlink", "fifo", "socket", "null"}
	for _, how := range renameFlags {
		for _, from := range sorts {
			for _, to := range sorts {
				for _, across := range []bool{false, true} {
					if across && (from == "missing" || to == "socket" || to == "null" || from == "socket" || from == "null") {
						continue // what is not a directory is renamed like any other
					}
					name, want := fmt.Sprintf("%s %s to %s", how.name, from, to), renameWant(from, to, how.flags)
					target := "b"
					if across {
						name += " in another directory"
						target = "other/b"
					}
					out = append(out, check{name, want, func(w world) any {
						w.dir("other")
						a, b := w.make(from, "a"), w.make(to, target)
						var inoA, inoB uint64
						if exists(a) {
							inoA = lstat(a).Ino
						}
						if exists(b) {
							inoB = lstat(b).Ino
						}
						before := w.tree()
						err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, how.flags)
						switch {
						case err != nil:
							if w.tree() != before {
								return say(err, "and changed", before, "to", w.tree())
							}
						case lstat(b).Ino != inoA:
							return "the new name is another file's"
						case how.flags == unix.RENAME_EXCHANGE:
							if lstat(a).Ino != inoB {
								return "the old name is another file's"
							}
						case exists(a):
							return "the old name is still there"
						}
						// The links of both directories count the directories in them.
						for _, d := range []string{"", "other"} {
							dirs := 2
							for _, n := range strings.Fields(list(w.at(d))) {
								if typeOf(lstat(w.at(d+"/"+n))) == "dir" {
									dirs++
								}
							}
							if n := int(lstat(w.at(d)).Nlink); n != dirs {
								return say(err, "and", n, "links for", dirs-2, "directories in", "/"+d)
							}
						}
						return err
					}})
				}
			}
		}
	}
	rename := func(from, to string) error { return unix.Rename(from, to) }
	flagged := func(from, to string, flags uint) error {
		return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags)
	}
	return append(out, []check{
		{"rename into itself", "EINVAL", func(w world) any { return rename(w.dir("d"), w.at("d/e")) }},
		{"rename into its own subtree", "EINVAL", func(w world) any {
			w.dir("d")
			w.dir("d/e")
			w.dir("d/e/f")
			return rename(w.at("d"), w.at("d/e/f/g"))
		}},
		{"rename over its own parent", "ENOTEMPTY", func(w world) any {
			w.dir("d")
			w.dir("d/e")
			return rename(w.at("d/e"), w.at("d"))
		}},
		{"rename EXCHANGE with its own parent", "EINVAL", func(w world) any {
			w.dir("d")
			w.dir("d/e")
			return flagged(w.at("d/e"), w.at("d"), unix.RENAME_EXCHANGE)
		}},
		{"rename EXCHANGE with its own child", "EINVAL", func(w world) any {
			w.dir("d")
			w.dir("d/e")
			return flagged(w.at("d"), w.at("d/e"), unix.RENAME_EXCHANGE)
		}},
		{"rename to itself", "ok f=x", func(w world) any { return say(rename(w.file("f", "x"), w.at("f")), w.tree()) }},
		{"rename a directory to itself", "ok", func(w world) any { return rename(w.dir("d"), w.at("d")) }},
		{"rename NOREPLACE to itself", "EEXIST", func(w world) any { return flagged(w.file("f", "x"), w.at("f"), unix.RENAME_NOREPLACE) }},
		{"rename EXCHANGE with itself", "ok", func(w world) any { return flagged(w.file("f", "x"), w.at("f"), unix.RENAME_EXCHANGE) }},
		{"rename of two names of one file does nothing", "ok 2 2", func(w world) any {
			w.file("a", "")
			try(unix.Link(w.at("a"), w.at("b")))
			err := rename(w.at("a"), w.at("b"))
			return say(err, lstat(w.at("a")).Nlink, lstat(w.at("b")).Nlink)
		}},
		{"rename over a file takes a link from it", "1", func(w world) any {
			w.file("a", "")
			w.file("b", "")
			try(unix.Link(w.at("b"), w.at("c")))
			try(rename(w.at("a"), w.at("b")))
			return lstat(w.at("c")).Nlink
		}},
		{"rename NOREPLACE and EXCHANGE", "EINVAL", func(w world) any { return flagged(w.file("f", "x"), w.at("g"), 3) }},
		{"rename WHITEOUT and EXCHANGE", "EINVAL", func(w world) any { return flagged(w.file("f", "x"), w.at("g"), 6) }},
		{"rename WHITEOUT", "", func(w world) any { return flagged(w.file("f", "x"), w.at("g"), unix.RENAME_WHITEOUT) }},
		{"rename with unknown flags", "EINVAL", func(w world) any { return flagged(w.file("f", "x"), w.at("g"), 1<<10) }},
		{"rename a file to a name with a slash", "ENOTDIR", func(w world) any { return rename(w.file("f", ""), w.at("g")+"/") }},
		{"rename a file with a slash", "ENOTDIR", func(w world) any { return rename(w.file("f", "")+"/", w.at("g")) }},
		{"rename a directory to a name with a slash", "ok", func(w world) any { return rename(w.dir("d"), w.at("e")+"/") }},
		{"rename a directory with a slash", "ok", func(w world) any { return rename(w.dir("d")+"/", w.at("e")) }},
		{"rename a symlink to a directory with a slash", "ENOTDIR", func(w world) any {
			w.dir("d")
			return rename(w.link("d", "l")+"/", w.at("e"))
		}},
		{"rename .", "EBUSY", func(w world) any { return rename(w.dir("d")+"/.", w.at("e")) }},
		{"rename ..", "EBUSY", func(w world) any { return rename(w.dir("d")+"/..", w.at("e")) }},
		{"rename to .", "EBUSY", func(w world) any { return rename(w.dir("d"), w.dir("e")+"/.") }},
		{"rename to ..", "EBUSY", func(w world) any { return rename(w.dir("d"), w.dir("e")+"/..") }},
		{"rename NOREPLACE to .", "", func(w world) any { return flagged(w.dir("d"), w.dir("e")+"/.", unix.RENAME_NOREPLACE) }},
		{"rename to another file system", "EXDEV", func(w world) any { return rename(w.file("f", ""), "/proc/no") }},
		{"rename into a missing directory", "ENOENT", func(w world) any { return rename(w.file("f", ""), w.at("no/f")) }},
		{"rename below a file", "ENOTDIR", func(w world) any { return rename(w.file("f", ""), w.file("g", "")+"/f") }},
		{"rename a directory across directories moves its link", "2 3", func(w world) any {
			w.dir("a")
			w.dir("b")
			w.dir("a/d")
			try(rename(w.at("a/d"), w.at("b/d")))
			return say(lstat(w.at("a")).Nlink, lstat(w.at("b")).Nlink)
		}},
		{"rename a directory over one across directories", "2 3", func(w world) any {
			w.dir("a")
			w.dir("b")
			w.dir("a/d")
			w.dir("b/d")
			try(rename(w.at("a/d"), w.at("b/d")))
			return say(lstat(w.at("a")).Nlink, lstat(w.at("b")).Nlink)
		}},
		{"rename EXCHANGE a directory with a file across directories", "2 3", func(w world) any {
			w.dir("a")
			w.dir("b")
			w.dir("a/d")
			w.file("b/f", "")
			try(flagged(w.at("a/d"), w.at("b/f"), unix.RENAME_EXCHANGE))
			return say(lstat(w.at("a")).Nlink, lstat(w.at("b")).Nlink)
		}},
		{"rename makes .. another", "true", func(w world) any {
			w.dir("a")
			w.dir("b")
			w.dir("a/d")
			try(rename(w.at("a/d"), w.at("b/d")))
			return lstat(w.at("b/d")+"/..").Ino == lstat(w.at("b")).Ino
		}},
		{"rename of a directory moves what is in it", "b/ b/x/ b/x/y=z", func(w world) any {
			w.dir("a")
			w.dir("a/x")
			w.file("a/x/y", "z")
			try(rename(w.at("a"), w.at("b")))
			return w.tree()
		}},
		{"rename of an open file", "before and after", func(w world) any {
			fd := opened(w.file("f", "before"), unix.O_RDWR|unix.O_APPEND)
			defer unix.Close(fd)
			try(rename(w.at("f"), w.at("g")))
			must(unix.Write(fd, []byte(" and after")))
			return read(w.at("g"))
		}},
		{"rename over an open directory", "ok 0", func(w world) any {
			fd := opened(w.dir("d"), unix.O_RDONLY)
			defer unix.Close(fd)
			err := rename(w.dir("e"), w.at("d"))
			return say(err, fstat(fd).Nlink)
		}},
	}...)
}

func linkChecks() []check {
	var out []check
	for _, kind := range kinds {
		name := strings.TrimPrefix(kind, "empty")
		if name == "" {
			continue
		}
		linkWant, unlinkWant, rmdirWant := "ok 2", "ok", "ENOTDIR"
		switch {
		case kind == "missing":
			linkWant, unlinkWant, rmdirWant = "ENOENT", "ENOENT", "ENOENT"
		case kind == "dir":
			linkWant, unlinkWant, rmdirWant = "EPERM", "EISDIR", "ok"
		case kind == "full":
			linkWant, unlinkWant, rmdirWant = "EPERM", "EISDIR", "ENOTEMPTY"
		}
		out = append(out,
			check{"link " + kind, linkWant, func(w world) any {
				p := w.make(kind, "a")
				err := unix.Link(p, w.at("b"))
				if err != nil {
					return say(err)
				}
				if lstat(p).Ino != lstat(w.at("b")).Ino {
					return "two files"
				}
				return say(err, lstat(p).Nlink)
			}},
			check{"link over " + kind, map[bool]string{true: "ok", false: "EEXIST"}[kind == "missing"], func(w world) any {
				w.make(kind, "a")
				return unix.Link(w.file("f", ""), w.at("a"))
			}},
			check{"linkat AT_SYMLINK_FOLLOW " + kind, map[string]string{"missing": "ENOENT", "dir": "EPERM", "full": "EPERM", "dirlink": "EPERM", "dangling": "ENOENT", "loop": "ELOOP"}[kind] + map[bool]string{true: "ok 2"}[strings.Contains("file symlink fifo socket null", kind)], func(w world) any {
				err := unix.Linkat(unix.AT_FDCWD, w.make(kind, "a"), unix.AT_FDCWD, w.at("b"), unix.AT_SYMLINK_FOLLOW)
				if err != nil {
					return err
				}
				return say(err, lstat(w.at("b")).Nlink)
			}},
			check{"unlink " + kind, unlinkWant, func(w world) any { return unix.Unlink(w.make(kind, "a")) }},
			check{"rmdir " + kind, rmdirWant, func(w world) any { return unix.Rmdir(w.make(kind, "a")) }},
			check{"unlinkat AT_REMOVEDIR " + kind, rmdirWant, func(w world) any { return unix.Unlinkat(unix.AT_FDCWD, w.make(kind, "a"), unix.AT_REMOVEDIR) }},
			check{"mkdir over " + kind, map[bool]string{true: "ok", false: "EEXIST"}[kind == "missing"], func(w world) any { return unix.Mkdir(w.make(kind, "a"), 0o755) }},
			check{"symlink over " + kind, map[bool]string{true: "ok", false: "EEXIST"}[kind == "missing"], func(w world) any { return unix.Symlink("x", w.make(kind, "a")) }},
			check{"mkfifo over " + kind, map[bool]string{true: "ok", false: "EEXIST"}[kind == "missing"], func(w world) any { return unix.Mkfifo(w.make(kind, "a"), 0o644) }},
			check{"readlink " + kind, map[string]string{"missing": "ENOENT", "symlink": "a.target", "dirlink": "a.target", "dangling": "a.nowhere", "loop": "a"}[kind] + map[bool]string{true: "EINVAL"}[strings.Contains("file dir full fifo socket null", kind) && kind != "symlink"], func(w world) any {
				b := make([]byte, 100)
				n, err := unix.Readlink(w.make(kind, "a"), b)
				if err != nil {
					return err
				}
				return string(b[:n])
			}},
		)
	}
	return append(out, []check{
		{"unlinkat with unknown flags", "EINVAL", func(w world) any { return unix.Unlinkat(unix.AT_FDCWD, w.file("f", ""), 1) }},
		{"linkat with unknown flags", "EINVAL", func(w world) any {
			return unix.Linkat(unix.AT_FDCWD, w.file("f", ""), unix.AT_FDCWD, w.at("g"), 1)
		}},
		{"linkat AT_EMPTY_PATH", "ok 2", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			err := unix.Linkat(fd, "", unix.AT_FDCWD, w.at("g"), unix.AT_EMPTY_PATH)
			return say(err, fstat(fd).Nlink)
		}},
		{"linkat AT_EMPTY_PATH of an unlinked file", "ENOENT", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			return unix.Linkat(fd, "", unix.AT_FDCWD, w.at("g"), unix.AT_EMPTY_PATH)
		}},
		{"link across file systems", "EXDEV", func(w world) any { return unix.Link("/proc/self/status", w.at("g")) }},
		{"link into a missing directory", "ENOENT", func(w world) any { return unix.Link(w.file("f", ""), w.at("no/g")) }},
		{"link with a slash after the new name", "ENOENT", func(w world) any { return unix.Link(w.file("f", ""), w.at("g")+"/") }},
		{"link with a slash after the old name", "ENOTDIR", func(w world) any { return unix.Link(w.file("f", "")+"/", w.at("g")) }},
		{"link and write through the other name", "both", func(w world) any {
			w.file("f", "one")
			try(unix.Link(w.at("f"), w.at("g")))
			w.file("f", "both")
			return read(w.at("g"))
		}},
		{"link, chmod through the other name", "600", func(w world) any {
			w.file("f", "one")
			try(unix.Link(w.at("f"), w.at("g")))
			try(unix.Chmod(w.at("f"), 0o600))
			return mode(w.at("g"))
		}},
		{"link, unlink the first name", "1 one", func(w world) any {
			w.file("f", "one")
			try(unix.Link(w.at("f"), w.at("g")))
			try(unix.Unlink(w.at("f")))
			return say(lstat(w.at("g")).Nlink, read(w.at("g")))
		}},
		{"unlink with a slash", "ENOTDIR", func(w world) any { return unix.Unlink(w.file("f", "") + "/") }},
		{"unlink a directory with a slash", "EISDIR", func(w world) any { return unix.Unlink(w.dir("d") + "/") }},
		{"rmdir with a slash", "ok", func(w world) any { return unix.Rmdir(w.dir("d") + "/") }},
		{"rmdir .", "EINVAL", func(w world) any { return unix.Rmdir(w.dir("d") + "/.") }},
		{"rmdir ..", "ENOTEMPTY", func(w world) any { return unix.Rmdir(w.dir("d") + "/..") }},
		{"unlink .", "", func(w world) any { return unix.Unlink(w.dir("d") + "/.") }},
		{"rmdir a symlink to a directory with a slash", "ENOTDIR", func(w world) any {
			w.dir("d")
			return unix.Rmdir(w.link("d", "l") + "/")
		}},
		{"rmdir of an open directory", "0 ENOENT", func(w world) any {
			fd := opened(w.dir("d"), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Rmdir(w.at("d")))
			_, err := unix.Openat(fd, "f", unix.O_CREAT|unix.O_RDWR, 0o644)
			return say(fstat(fd).Nlink, err)
		}},
		{"mkdir with a slash", "ok", func(w world) any { return unix.Mkdir(w.at("d")+"/", 0o755) }},
		{"mkdir with slashes", "ok", func(w world) any { return unix.Mkdir(w.at("d")+"///", 0o755) }},
		{"mkdir .", "EEXIST", func(w world) any { return unix.Mkdir(string(w)+"/.", 0o755) }},
		{"mkdir ..", "EEXIST", func(w world) any { return unix.Mkdir(string(w)+"/..", 0o755) }},
		{"mkdir in a missing directory", "ENOENT", func(w world) any { return unix.Mkdir(w.at("no/d"), 0o755) }},
		{"mkdir below a file", "ENOTDIR", func(w world) any { return unix.Mkdir(w.file("f", "")+"/d", 0o755) }},
		{"mkdir in a removed directory", "ENOENT", func(w world) any {
			fd := opened(w.dir("d"), unix.O_RDONLY)
			defer unix.Close(fd)
			try(unix.Rmdir(w.at("d")))
			return unix.Mkdirat(fd, "e", 0o755)
		}},
		{"mkfifo with a slash", "ENOENT", func(w world) any { return unix.Mkfifo(w.at("p")+"/", 0o755) }},
		{"symlink with a slash after its name", "ENOENT", func(w world) any { return unix.Symlink("x", w.at("l")+"/") }},
		{"links of a directory", "2 4", func(w world) any {
			n := lstat(w.dir("d")).Nlink
			w.dir("d/a")
			w.dir("d/b")
			w.file("d/f", "")
			return say(n, lstat(w.at("d")).Nlink)
		}},
		{"links of a directory after rmdir", "3", func(w world) any {
			w.dir("d")
			w.dir("d/a")
			w.dir("d/b")
			try(unix.Rmdir(w.at("d/a")))
			return lstat(w.at("d")).Nlink
		}},
	}...)
}
