package posix

import (
	"encoding/binary"
	"fmt"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// Tags of access control list entries as the kernel keeps them in extended attributes.
var aclTags = map[string]uint16{"u:": 1, "u": 2, "g:": 4, "g": 8, "m:": 0x10, "o:": 0x20}

const (
	accessACL  = "system.posix_acl_access"
	defaultACL = "system.posix_acl_default"
)

// acl makes an attribute's value of entries such as "u::rwx u:1002:r-x g::r-- m::rwx o::---".
func acl(text string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for e := range strings.FieldsSeq(text) {
		f := strings.Split(e, ":")
		id, tag := uint32(1<<32-1), f[0]+":"
		if f[1] != "" {
			tag = f[0]
			must(fmt.Sscan(f[1], &id))
		}
		var perm uint16
		for i, c := range "rwx" {
			if strings.ContainsRune(f[2], c) {
				perm |= 4 >> i
			}
		}
		b = binary.LittleEndian.AppendUint16(b, aclTags[tag])
		b = binary.LittleEndian.AppendUint16(b, perm)
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}

// aclText is the reverse of acl.
func aclText(p, name string) any {
	v, ok := getxattr(p, name).(string)
	if !ok {
		return getxattr(p, name)
	}
	b := []byte(v)
	var out []string
	for b = b[4:]; len(b) >= 8; b = b[8:] {
		for text, tag := range aclTags {
			if tag == binary.LittleEndian.Uint16(b) {
				perm := binary.LittleEndian.Uint16(b[2:])
				e := strings.TrimSuffix(text, ":") + ":"
				if !strings.HasSuffix(text, ":") {
					e += fmt.Sprint(binary.LittleEndian.Uint32(b[4:]))
				}
				e += ":"
				for i, c := range "rwx" {
					if perm&(4>>i) != 0 {
						e += string(c)
					} else {
						e += "-"
					}
				}
				out = append(out, e)
			}
		}
	}
	return strings.Join(out, " ")
}

func setACL(p, name, text string) error { return unix.Lsetxattr(p, name, acl(text), 0) }

func aclChecks() []check {
	var out []check
	const full = "u::rw- u:1002:rw- g::r-- g:2002:r-- m::rw- o::---"
	// What a list lets whom do: a file of 1001 and group 2001.
	for _, list := range []string{
		"u::rw- g::r-- o::---",
		"u::rw- u:1002:rw- g::--- m::rw- o::---",
		"u::rw- u:1002:rw- g::r-- m::r-- o::rw-",
		"u::rw- u:1002:--- g::rw- m::rw- o::rw-",
		"u::r-- u:1001:rw- g::--- m::rw- o::rw-",
		"u::rw- g::--- g:2002:rw- m::rw- o::---",
		"u::rw- g::r-- g:2002:-w- m::rw- o::---",
		"u::rw- g::rw- g:2002:r-- m::r-- o::rw-",
		"u::--- u:1002:rw- g::rw- m::--- o::rw-",
	} {
		for _, who := range []struct {
			name string
			cred cred
		}{
			{"owner", cred{uid: 1001, gid: 9}}, {"1002", cred{uid: 1002, gid: 9}}, {"group", cred{uid: 1003, gid: 2001}}, {"2002", cred{uid: 1003, gid: 9, groups: []uint32{2002}}},
			{"both groups", cred{uid: 1003, gid: 2001, groups: []uint32{2002}}}, {"1002 of 2002", cred{uid: 1002, gid: 2002}}, {"other", cred{uid: 1003, gid: 9}}, {"root", cred{}},
		} {
			for _, how := range []struct {
				name  string
				flags int
			}{{"r", unix.O_RDONLY}, {"w", unix.O_WRONLY}, {"rw", unix.O_RDWR}} {
				out = append(out, check{fmt.Sprintf("acl %s: open %s by %s", list, how.name, who.name), aclWant(list, who.cred, how.name), func(w world) any {
					p := w.file("f", "")
					try(unix.Chown(p, 1001, 2001))
					try(setACL(p, accessACL, list))
					return as(who.cred, func() any { return open(p, how.flags) })
				}})
			}
		}
	}
	for _, bad := range []struct{ name, list string }{
		{"no owner", "g::r-- o::---"}, {"no group", "u::r-- o::---"}, {"no other", "u::r-- g::---"}, {"a user and no mask", "u::r-- u:1002:r-- g::--- o::---"},
		{"two owners", "u::r-- u::r-- g::--- o::---"}, {"two masks", "u::r-- g::--- m::r-- m::r-- o::---"}, {"the wrong order", "o::--- u::r-- g::---"},
	} {
		out = append(out, check{"acl with " + bad.name, "EINVAL", func(w world) any { return setACL(w.file("f", ""), accessACL, bad.list) }})
		out = append(out, check{"default acl with " + bad.name, "EINVAL", func(w world) any { return setACL(w.dir("d"), defaultACL, bad.list) }})
	}
	for _, kind := range []string{"file", "dir", "symlink", "fifo", "socket", "null"} {
		want, def := full, "EACCES"
		switch kind {
		case "symlink":
			want, def = "EOPNOTSUPP", "EOPNOTSUPP"
		case "dir":
			def = full
		}
		out = append(out, check{"acl of " + kind, want, func(w world) any {
			p := w.make(kind, "it")
			if err := setACL(p, accessACL, full); err != nil {
				return err
			}
			return aclText(p, accessACL)
		}})
		out = append(out, check{"default acl of " + kind, def, func(w world) any {
			p := w.make(kind, "it")
			if err := setACL(p, defaultACL, full); err != nil {
				return err
			}
			return aclText(p, defaultACL)
		}})
	}
	// Inheritance: what is made in a directory with a default list, by what mode and umask.
	for _, list := range []string{"u::rwx g::r-x o::---", "u::rwx u:1002:rwx g::r-x m::rwx o::r--", "u::rw- u:1002:r-- g::rwx g:2002:rwx m::r-x o::rwx"} {
		for _, mask := range []int{0, 0o022, 0o077} {
			for _, c := range []struct {
				name string
				do   func(p string) error
			}{
				{"creat 666", func(p string) error { return closing(unix.Open(p, unix.O_CREAT|unix.O_RDWR, 0o666)) }},
				{"creat 640", func(p string) error { return closing(unix.Open(p, unix.O_CREAT|unix.O_RDWR, 0o640)) }},
				{"mkdir 777", func(p string) error { return unix.Mkdir(p, 0o777) }},
				{"mkdir 700", func(p string) error { return unix.Mkdir(p, 0o700) }},
				{"mkfifo 666", func(p string) error { return unix.Mkfifo(p, 0o666) }},
				{"symlink", func(p string) error { return unix.Symlink("x", p) }},
			} {
				out = append(out, check{fmt.Sprintf("default acl %s: %s with umask %03o", list, c.name, mask), "", func(w world) any {
					d := w.dir("d")
					if err := setACL(d, defaultACL, list); err != nil {
						return err
					}
					return umasked(mask, func() any {
						try(c.do(d + "/n"))
						return say(mode(d+"/n"), "|", aclText(d+"/n", accessACL), "|", aclText(d+"/n", defaultACL))
					})
				}})
			}
		}
	}
	with := func(do func(w world, p string) any) func(w world) any {
		return func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 2001))
			try(setACL(p, accessACL, full))
			return do(w, p)
		}
	}
	out = append(out, []check{
		{"acl shows as the mode's group bits", "660", with(func(w world, p string) any { return mode(p) })},
		{"acl that is a mode is kept as the mode", "754 ENODATA", func(w world) any {
			p := w.file("f", "")
			try(setACL(p, accessACL, "u::rwx g::r-x o::r--"))
			return say(mode(p), getxattr(p, accessACL))
		}},
		{"chmod changes the mask", "u::rwx u:1002:rw- g::r-- g:2002:r-- m::r-x o::r--", with(func(w world, p string) any {
			try(unix.Chmod(p, 0o754))
			return aclText(p, accessACL)
		})},
		{"chmod 0 takes all", "0 u::--- u:1002:rw- g::r-- g:2002:r-- m::--- o::---", with(func(w world, p string) any {
			try(unix.Chmod(p, 0))
			return say(mode(p), aclText(p, accessACL))
		})},
		{"setting the acl changes the mode", "751", with(func(w world, p string) any {
			try(setACL(p, accessACL, "u::rwx u:1002:rw- g::r-- m::r-x o::--x"))
			return mode(p)
		})},
		{"removing the acl leaves the mode", "ENODATA 660", with(func(w world, p string) any {
			try(unix.Removexattr(p, accessACL))
			return say(getxattr(p, accessACL), mode(p))
		})},
		{"removing an acl that is not there", "ok", func(w world) any { return unix.Removexattr(w.file("f", ""), accessACL) }},
		{"getting an acl that is not there", "ENODATA", func(w world) any { return getxattr(w.file("f", ""), accessACL) }},
		{"getting a default acl of a file", "ENODATA", func(w world) any { return getxattr(w.file("f", ""), defaultACL) }},
		{"acl is listed", "system.posix_acl_access", with(func(w world, p string) any { return listxattr(p) })},
		{"default acl is listed", "system.posix_acl_default", func(w world) any {
			try(setACL(w.dir("d"), defaultACL, full))
			return listxattr(w.at("d"))
		}},
		{"acl set by another", "EPERM", with(func(w world, p string) any {
			return as(cred{uid: 1002, gid: 9}, func() any { return setACL(p, accessACL, full) })
		})},
		{"acl set by the owner", "ok", with(func(w world, p string) any {
			return as(cred{uid: 1001, gid: 9}, func() any { return setACL(p, accessACL, full) })
		})},
		{"acl read by anybody", full, with(func(w world, p string) any {
			return as(cred{uid: 1005, gid: 9}, func() any { return aclText(p, accessACL) })
		})},
		{"acl removed by another", "EPERM", with(func(w world, p string) any {
			return as(cred{uid: 1002, gid: 9}, func() any { return unix.Removexattr(p, accessACL) })
		})},
		{"acl by an owner not in the group clears set-group-ID", "660", func(w world) any {
			p := w.file("f", "")
			try(unix.Chown(p, 1001, 2001))
			try(unix.Chmod(p, 0o2775))
			return as(cred{uid: 1001, gid: 9}, func() any { try(setACL(p, accessACL, full)); return mode(p) })
		}},
		{"acl moves ctime only", "ctime", func(w world) any {
			p := w.file("f", "")
			before := aged(p)
			try(setACL(p, accessACL, full))
			return moved(before, lstat(p))
		}},
		{"acl goes with rename", full, with(func(w world, p string) any {
			try(unix.Rename(p, w.at("g")))
			return aclText(w.at("g"), accessACL)
		})},
		{"acl stays after chown", full, with(func(w world, p string) any {
			try(unix.Chown(p, 7, 7))
			return aclText(p, accessACL)
		})},
		{"acl of an unknown version", "EOPNOTSUPP", func(w world) any {
			b := acl(full)
			b[0] = 9
			return unix.Setxattr(w.file("f", ""), accessACL, b, 0)
		}},
		{"acl of odd length", "EINVAL", func(w world) any { return unix.Setxattr(w.file("f", ""), accessACL, acl(full)[:11], 0) }},
		{"acl that is empty removes", "ok ENODATA", with(func(w world, p string) any {
			return say(unix.Setxattr(p, accessACL, acl(""), 0), getxattr(p, accessACL))
		})},
		{"default acl that is empty removes", "ENODATA", func(w world) any {
			d := w.dir("d")
			try(setACL(d, defaultACL, full))
			try(unix.Setxattr(d, defaultACL, acl(""), 0))
			return getxattr(d, defaultACL)
		}},
		{"acl of 100 users", "103", func(w world) any {
			list := "u::rw-"
			for i := range 100 {
				list += fmt.Sprintf(" u:%d:r--", 1000+i)
			}
			p := w.file("f", "")
			try(setACL(p, accessACL, list+" g::r-- m::rw- o::---"))
			return len(strings.Fields(aclText(p, accessACL).(string))) - 1
		}},
		{"acl lets search a directory", "EACCES ok", func(w world) any {
			d := w.dir("d")
			w.file("d/f", "")
			try(setACL(d, accessACL, "u::rwx u:1002:--x g::--- m::rwx o::---"))
			other := as(cred{uid: 1005, gid: 9}, func() any { return open(d+"/f", unix.O_RDONLY) })
			return say(other, as(cred{uid: 1002, gid: 9}, func() any { return open(d+"/f", unix.O_RDONLY) }))
		}},
		{"acl lets create in a directory", "EACCES ok", func(w world) any {
			d := w.dir("d")
			try(setACL(d, accessACL, "u::rwx g::--- g:2002:-wx m::rwx o::---"))
			other := as(cred{uid: 1005, gid: 9}, func() any { return unix.Mkdir(d+"/e", 0o755) })
			return say(other, as(cred{uid: 1002, gid: 9, groups: fortyWith(2002)}, func() any { return unix.Mkdir(d+"/e", 0o755) }))
		}},
		{"acl and access(2)", "ok EACCES", with(func(w world, p string) any {
			return say(as(cred{uid: 1002, gid: 9}, func() any { return unix.Access(p, unix.W_OK) }), as(cred{uid: 1005, gid: 9}, func() any { return unix.Access(p, unix.R_OK) }))
		})},
	}...)
	if _, err := exec.LookPath("setfacl"); err == nil {
		tool := func(name string, args ...string) string { return string(must(exec.Command(name, args...).Output())) }
		out = append(out, []check{
			{"setfacl and getfacl", "user::rw- user:1002:rwx group::r-- mask::rwx other::r--", func(w world) any {
				p := w.file("f", "")
				tool("setfacl", "-m", "u:1002:rwx", p)
				return strings.Join(strings.Fields(tool("getfacl", "-ncE", p)), " ")
			}},
			{"setfacl -d is inherited", "user::rw- user:1002:rwx group::r-x mask::r-- other::r--", func(w world) any {
				d := w.dir("d")
				tool("setfacl", "-d", "-m", "u:1002:rwx", d)
				w.file("d/f", "")
				return strings.Join(strings.Fields(tool("getfacl", "-ncE", d+"/f")), " ")
			}},
			{"setfacl -b", "user::rw- group::r-- other::r--", func(w world) any {
				p := w.file("f", "")
				tool("setfacl", "-m", "g:2002:rwx", p)
				tool("setfacl", "-b", p)
				return strings.Join(strings.Fields(tool("getfacl", "-ncE", p)), " ")
			}},
		}...)
	}
	return out
}

func fortyWith(g uint32) []uint32 { return append(fortyGroups()[:39], g) }

// aclWant does what acl(5) says under ACCESS CHECK ALGORITHM, for a file of 1001 and group 2001.
func aclWant(list string, c cred, how string) string {
	if c.uid == 0 {
		return "ok"
	}
	in := func(g int) bool {
		for _, x := range c.groups {
			if int(x) == g {
				return true
			}
		}
		return c.gid == g
	}
	has := func(perm string) bool {
		for _, r := range how {
			if !strings.ContainsRune(perm, r) {
				return false
			}
		}
		return true
	}
	mask, named, other := "rwx", "", ""
	var groups []string
	for e := range strings.FieldsSeq(list) {
		f := strings.Split(e, ":")
		var id int
		fmt.Sscan(f[1], &id)
		switch {
		case f[0] == "u" && f[1] == "":
			if c.uid == 1001 {
				return map[bool]string{true: "ok", false: "EACCES"}[has(f[2])]
			}
		case f[0] == "u" && id == c.uid:
			named = f[2]
		case f[0] == "g" && (f[1] == "" && in(2001) || f[1] != "" && in(id)):
			groups = append(groups, f[2])
		case f[0] == "m":
			mask = f[2]
		case f[0] == "o":
			other = f[2]
		}
	}
	ok := has(other)
	if mask == "---" {
		// Linux then looks at the mode alone, whose group bits are the mask (acl_permission_check in fs/namei.c).
		ok = ok && !in(2001)
	} else if named != "" {
		ok = has(named) && has(mask)
	} else if len(groups) > 0 {
		ok = false
		for _, g := range groups {
			ok = ok || has(g) && has(mask)
		}
	}
	return map[bool]string{true: "ok", false: "EACCES"}[ok]
}
