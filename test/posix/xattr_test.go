package posix

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

func getxattr(p, name string) any {
	b := make([]byte, 1<<16)
	n, err := unix.Lgetxattr(p, name, b)
	if err != nil {
		return err
	}
	return string(b[:n])
}

// listxattr has the names, without those that a security module gives to every file.
func listxattr(p string) any {
	b := make([]byte, 1<<16)
	n, err := unix.Llistxattr(p, b)
	if err != nil {
		return err
	}
	names := slices.DeleteFunc(strings.Split(strings.TrimSuffix(string(b[:n]), "\x00"), "\x00"), func(s string) bool { return s == "security.selinux" })
	slices.Sort(names)
	return strings.Join(names, " ")
}

func xattrChecks() []check {
	var out []check
	for _, kind := range []string{"file", "dir", "symlink", "fifo", "socket", "null"} {
		for _, space := range []string{"user.x", "trusted.x", "security.x", "system.x", "none.x", "user.", "x"} {
			want := ""
			switch {
			case space == "user." && (kind == "file" || kind == "dir"):
				want = "EINVAL"
			case space == "user.x" && (kind == "file" || kind == "dir"), space == "trusted.x", space == "security.x":
				want = "ok value ok ENODATA"
			case space == "user.x":
				want = "EPERM"
			}
			out = append(out, check{fmt.Sprintf("xattr %s on %s", space, kind), want, func(w world) any {
				p := w.make(kind, "it")
				if err := unix.Lsetxattr(p, space, []byte("value"), 0); err != nil {
					return err
				}
				v := getxattr(p, space)
				return say("ok", v, unix.Lremovexattr(p, space), getxattr(p, space))
			}})
			out = append(out, check{fmt.Sprintf("xattr %s on %s by a user", space, kind), "", func(w world) any {
				p := w.make(kind, "it")
				try(unix.Lchown(p, 1001, 1001))
				return as(cred{uid: 1001, gid: 1001}, func() any {
					return say(unix.Lsetxattr(p, space, []byte("value"), 0), getxattr(p, space), unix.Lremovexattr(p, space))
				})
			}})
		}
		out = append(out, check{"xattr list of " + kind, "trusted.a trusted.b", func(w world) any {
			p := w.make(kind, "it")
			try(unix.Lsetxattr(p, "trusted.b", nil, 0))
			try(unix.Lsetxattr(p, "trusted.a", nil, 0))
			return listxattr(p)
		}})
	}
	for _, n := range []int{0, 1, 100, 4000, 65535, 65536, 65537} {
		want := fmt.Sprint("ok ", n, " true")
		if n > 65536 {
			want = "E2BIG 0 false"
		}
		out = append(out, check{fmt.Sprintf("xattr value of %d bytes", n), want, func(w world) any {
			p := w.file("f", "")
			v := pattern(n)
			err := unix.Setxattr(p, "user.v", v, 0)
			b := make([]byte, 1<<17)
			m, e := unix.Getxattr(p, "user.v", b)
			if e != nil {
				m = 0
			}
			return say(err, m, e == nil && bytes.Equal(b[:m], v))
		}})
	}
	for _, n := range []int{6, 100, 254, 255, 256} {
		want := "ok true"
		if n > 255 {
			want = "ERANGE false"
		}
		out = append(out, check{fmt.Sprintf("xattr name of %d bytes", n), want, func(w world) any {
			p := w.file("f", "")
			name := "user." + strings.Repeat("n", n-5)
			return say(unix.Setxattr(p, name, []byte("v"), 0), listxattr(p) == name)
		}})
	}
	for _, there := range []bool{false, true} {
		for _, f := range []flagSet{{"no flag", 0}, {"XATTR_CREATE", unix.XATTR_CREATE}, {"XATTR_REPLACE", unix.XATTR_REPLACE}, {"both flags", 3}, {"an unknown flag", 4}} {
			want := "ok new"
			switch {
			case f.flags == 4:
				want = "EINVAL old"
			case f.flags == 3:
				want = ""
			case there && f.flags == 1:
				want = "EEXIST old"
			case !there && f.flags == 2:
				want = "ENODATA ENODATA"
			}
			if f.flags == 4 && !there {
				want = "EINVAL ENODATA"
			}
			out = append(out, check{fmt.Sprintf("setxattr with %s, there %v", f.name, there), want, func(w world) any {
				p := w.file("f", "")
				if there {
					try(unix.Setxattr(p, "user.x", []byte("old"), 0))
				}
				return say(unix.Setxattr(p, "user.x", []byte("new"), f.flags), getxattr(p, "user.x"))
			}})
		}
	}
	return append(out, []check{
		{"getxattr tells the size", "5", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", []byte("value"), 0))
			return must(unix.Getxattr(p, "user.x", nil))
		}},
		{"getxattr into too little", "ERANGE", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", []byte("value"), 0))
			_, err := unix.Getxattr(p, "user.x", make([]byte, 4))
			return err
		}},
		{"listxattr tells the size", "14", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", nil, 0))
			try(unix.Setxattr(p, "user.y", nil, 0))
			n := must(unix.Listxattr(p, nil))
			if b := make([]byte, n); bytes.Contains(b[:must(unix.Listxattr(p, b))], []byte("security.selinux\x00")) {
				n -= len("security.selinux\x00")
			}
			return n
		}},
		{"listxattr into too little", "ERANGE", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", nil, 0))
			_, err := unix.Listxattr(p, make([]byte, 3))
			return err
		}},
		{"removexattr missing", "ENODATA", func(w world) any { return unix.Removexattr(w.file("f", ""), "user.x") }},
		{"getxattr missing", "ENODATA", func(w world) any { return getxattr(w.file("f", ""), "user.x") }},
		{"setxattr shorter", "v", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", []byte("long value"), 0))
			try(unix.Setxattr(p, "user.x", []byte("v"), 0))
			return getxattr(p, "user.x")
		}},
		{"xattr of binary bytes", "true", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", []byte("\x00\xff\x00"), 0))
			return getxattr(p, "user.x") == "\x00\xff\x00"
		}},
		{"xattr name of bytes that are not UTF-8", "user.\xff\xfe", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.\xff\xfe", nil, 0))
			return listxattr(p)
		}},
		{"50 xattrs", "50", func(w world) any {
			p := w.file("f", "")
			for i := range 50 {
				try(unix.Setxattr(p, fmt.Sprint("user.name-", i), []byte("value"), 0))
			}
			return len(strings.Fields(listxattr(p).(string)))
		}},
		{"xattrs until there is no room", "ENOSPC ok ok ok", func(w world) any {
			p := w.file("f", "")
			value := bytes.Repeat([]byte("v"), 200)
			var err error
			for i := 0; i < 300 && err == nil; i++ {
				err = unix.Setxattr(p, fmt.Sprint("user.name-", i), value, 0)
			}
			// Those that are there can be changed, and removed to make room for others.
			return say(err, unix.Setxattr(p, "user.name-0", []byte("new"), 0), unix.Removexattr(p, "user.name-1"),
				unix.Setxattr(p, "user.other", value, 0))
		}},
		{"xattrs go with rename and link", "v v", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", []byte("v"), 0))
			try(unix.Rename(p, w.at("g")))
			try(unix.Link(w.at("g"), w.at("h")))
			return say(getxattr(w.at("g"), "user.x"), getxattr(w.at("h"), "user.x"))
		}},
		{"xattrs of a replaced file are gone", "ENODATA", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", []byte("v"), 0))
			try(unix.Rename(w.file("g", ""), p))
			return getxattr(p, "user.x")
		}},
		{"fsetxattr of an unlinked file", "v", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			try(unix.Fsetxattr(fd, "user.x", []byte("v"), 0))
			b := make([]byte, 5)
			n := must(unix.Fgetxattr(fd, "user.x", b))
			return string(b[:n])
		}},
		{"fsetxattr through O_PATH", "EBADF", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_PATH)
			defer unix.Close(fd)
			return unix.Fsetxattr(fd, "user.x", []byte("v"), 0)
		}},
		{"setxattr follows a symlink", "v", func(w world) any {
			w.file("f", "")
			try(unix.Setxattr(w.link("f", "l"), "user.x", []byte("v"), 0))
			return getxattr(w.at("f"), "user.x")
		}},
		{"user xattr in a sticky directory of another", "EPERM", func(w world) any {
			d := w.dir("d")
			try(unix.Chmod(d, 0o1777))
			return as(cred{uid: 1001, gid: 1001}, func() any { return unix.Setxattr(d, "user.x", nil, 0) })
		}},
		{"trusted xattrs are not listed to users", "user.x", func(w world) any {
			p := w.file("f", "")
			try(unix.Setxattr(p, "user.x", nil, 0))
			try(unix.Setxattr(p, "trusted.x", nil, 0))
			return as(cred{uid: 1001, gid: 1001}, func() any { return listxattr(p) })
		}},
		{"security.capability that is nonsense", "EINVAL", func(w world) any { return unix.Setxattr(w.file("f", ""), "security.capability", []byte("no"), 0) }},
	}...)
}
