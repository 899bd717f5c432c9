package meta

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// world is one tree made twice: in a directory of this machine and in the service. Every operation on it is done on both
// by the same user.
type world struct {
	t   testing.TB
	dir string
	c   *client
	id  layout.FileID // of what dir is
}

// as runs f with the rights of a user, on a thread of its own that ends then.
func as(t testing.TB, who metarpc.Cred, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		become(t, who, f)
	}()
	<-done
}

func become(t testing.TB, who metarpc.Cred, f func()) {
	const keep = ^uintptr(0)
	groups := append(slices.Clone(who.Groups), 0) // one more, to have an address
	for _, call := range [][4]uintptr{
		{unix.SYS_SETGROUPS, uintptr(len(who.Groups)), uintptr(unsafe.Pointer(&groups[0]))},
		{unix.SYS_SETRESGID, keep, uintptr(who.GID), keep},
		{unix.SYS_SETRESUID, keep, uintptr(who.UID), keep},
	} {
		if _, _, e := unix.RawSyscall(call[0], call[1], call[2], call[3]); e != 0 {
			t.Errorf("change of user: system call %d: %v", call[0], e)
			return
		}
	}
	runtime.KeepAlive(groups)
	f()
}

// entry makes one thing in both trees.
func (w *world) entry(path string, mode uint32, uid, gid uint32) {
	w.t.Helper()
	local := filepath.Join(w.dir, path)
	parent, name := w.split(path)
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		w.ok(unix.Mkdir(local, 0o755))
	case unix.S_IFLNK:
		w.ok(unix.Symlink("target", local))
	default:
		w.ok(unix.Mknod(local, unix.S_IFREG|0o644, 0))
	}
	args := &metarpc.MakeNodeArgs{Parent: parent, Name: name, Mode: mode&unix.S_IFMT | 0o755}
	if mode&unix.S_IFMT == unix.S_IFLNK {
		args.Target, args.Mode = "target", unix.S_IFLNK|0o777
	}
	id := must[metarpc.AttrResult](w.c, metarpc.OpMakeNode, args).Attr.ID
	w.ok(unix.Lchown(local, int(uid), int(gid)))
	set := &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetUID | metarpc.SetGID, UID: uid, GID: gid}
	must[metarpc.AttrResult](w.c, metarpc.OpSetAttr, set)
	if mode&unix.S_IFMT != unix.S_IFLNK {
		w.ok(unix.Chmod(local, mode&0o7777))
		must[metarpc.AttrResult](w.c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: mode & 0o7777})
	}
}

func (w *world) ok(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// xattr sets an attribute in both trees.
func (w *world) xattr(path, name string, value []byte) {
	w.t.Helper()
	w.ok(unix.Lsetxattr(filepath.Join(w.dir, path), name, value, 0))
	id, err := w.walk(path)
	w.ok(err)
	must[metarpc.Empty](w.c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: name, Value: value})
}

// split finds the directory of a path, whoever may look into what.
func (w *world) split(path string) (parent layout.FileID, name string) {
	w.t.Helper()
	who := w.c.cred
	w.c.cred = metarpc.Cred{}
	defer func() { w.c.cred = who }()
	dir, name := filepath.Split(path)
	parent, err := w.walk(strings.TrimSuffix(dir, "/"))
	w.ok(err)
	return parent, name
}

// walk looks a path up as the caller.
func (w *world) walk(path string) (layout.FileID, error) {
	id := w.id
	for name := range strings.SplitSeq(path, "/") {
		if name == "" {
			continue
		}
		r, err := ask[metarpc.LookupResult](w.c, metarpc.OpLookup, &metarpc.NameArgs{Parent: id, Name: name})
		if err != nil {
			return 0, err
		}
		if r.Attr.ID == 0 {
			return 0, errNoEntry
		}
		id = r.Attr.ID
	}
	return id, nil
}

// errnoOf is what a local operation or one of the service ended with.
func errnoOf(err error) syscall.Errno {
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return syscall.Errno(statusOf(err))
}

// on is an operation of the service on what a path leads to.
func on[R any](op metarpc.Op, args func(id layout.FileID) any) func(w *world, path string) error {
	return func(w *world, path string) error {
		id, err := w.walk(path)
		if err != nil {
			return err
		}
		_, err = ask[R](w.c, op, args(id))
		return err
	}
}

// operation is a system call, and what a client makes of it.
type operation struct {
	name  string
	local func(path string) error
	weft  func(w *world, path string) error
	on    []string // what it makes sense on; nil = everything there is
}

func opening(flags int, access metarpc.Access) operation {
	return operation{fmt.Sprintf("open %#x", flags), func(path string) error {
		fd, err := unix.Open(path, flags, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}, on[metarpc.AttrResult](metarpc.OpOpen, func(id layout.FileID) any {
		return &metarpc.OpenArgs{ID: id, Access: access}
	}), []string{"p/f", "p/g"}}
}

func setting(name string, local func(path string) error, args metarpc.SetAttrArgs, paths ...string) operation {
	return operation{name, local, on[metarpc.AttrResult](metarpc.OpSetAttr, func(id layout.FileID) any {
		a := args
		a.ID = id
		return &a
	}), paths}
}

func utimes(name string, atime, mtime int64, mask metarpc.AttrMask) operation {
	return setting("utimes "+name, func(path string) error {
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{{Nsec: atime}, {Nsec: mtime}}, unix.AT_SYMLINK_NOFOLLOW)
	}, metarpc.SetAttrArgs{Mask: mask})
}

func making(name string, local func(path string) error, args metarpc.MakeNodeArgs, umask uint32) operation {
	return operation{name, local, func(w *world, path string) error {
		a := args
		a.Umask = umask
		a.Parent, a.Name = w.split(path)
		_, err := ask[metarpc.AttrResult](w.c, metarpc.OpMakeNode, &a)
		return err
	}, []string{"p/new", "p/f"}}
}

func renaming(from, to string, flags uint) operation {
	return operation{fmt.Sprintf("rename %s to %s flags %d", from, to, flags), func(base string) error {
		return unix.Renameat2(unix.AT_FDCWD, filepath.Join(base, from), unix.AT_FDCWD, filepath.Join(base, to), flags)
	}, func(w *world, _ string) error {
		a := &metarpc.RenameArgs{Flags: uint32(flags)}
		a.OldParent, a.OldName = w.split(from)
		a.NewParent, a.NewName = w.split(to)
		_, err := ask[metarpc.Empty](w.c, metarpc.OpRename, a)
		return err
	}, []string{""}}
}

func setXattr(name string, value []byte, flags int) operation {
	return operation{fmt.Sprintf("setxattr %s %d bytes flags %d", name, len(value), flags), func(path string) error {
		return unix.Lsetxattr(path, name, value, flags)
	}, on[metarpc.Empty](metarpc.OpSetXattr, func(id layout.FileID) any {
		return &metarpc.XattrArgs{ID: id, Name: name, Value: value, Flags: uint32(flags)}
	}), nil}
}

func removing(path string, dir bool) operation {
	return operation{fmt.Sprintf("remove %s dir %t", path, dir), func(base string) error {
		if dir {
			return unix.Rmdir(filepath.Join(base, path))
		}
		return unix.Unlink(filepath.Join(base, path))
	}, func(w *world, _ string) error {
		a := &metarpc.RemoveArgs{Dir: dir}
		a.Parent, a.Name = w.split(path)
		_, err := ask[metarpc.RemoveResult](w.c, metarpc.OpRemove, a)
		return err
	}, []string{""}}
}

// operations are all there are, with random arguments. The local ones run under umask.
func operations(rng *rand.Rand, umask uint32) []operation {
	mode := rng.Uint32N(0o10000)
	uid, gid := randomOf(rng, testUsers), randomOf(rng, testGroups)
	list := randomList(rng).Value()
	if rng.IntN(8) == 0 {
		list = list[:rng.IntN(len(list))]
	}
	if rng.IntN(8) == 0 && len(list) > 4 {
		list[4+rng.IntN(len(list)-4)] ^= 1 << rng.IntN(8)
	}
	ops := []operation{
		{"lookup", func(path string) error {
			var st unix.Stat_t
			return unix.Lstat(path, &st)
		}, func(w *world, path string) error {
			_, err := w.walk(path)
			return err
		}, []string{"p/f", "p/none", "p/d", "p/f/x"}},
		{"readdir", func(path string) error {
			fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}, on[metarpc.ReadDirResult](metarpc.OpReadDir, func(id layout.FileID) any {
			return &metarpc.ReadDirArgs{ID: id, Limit: 100}
		}), []string{"p", "q", "p/d"}},
		opening(unix.O_RDONLY, metarpc.AccessRead),
		opening(unix.O_WRONLY, metarpc.AccessWrite),
		opening(unix.O_RDWR, metarpc.AccessRead|metarpc.AccessWrite),
		{"execute", func(path string) error {
			return unix.Faccessat(unix.AT_FDCWD, path, unix.X_OK, unix.AT_EACCESS)
		}, on[metarpc.AttrResult](metarpc.OpOpen, func(id layout.FileID) any {
			return &metarpc.OpenArgs{ID: id, Access: metarpc.AccessExec}
		}), []string{"p/f", "p/g"}},
		{"create", func(path string) error {
			fd, err := unix.Open(path, unix.O_CREAT|unix.O_RDWR, mode)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}, func(w *world, path string) error {
			a := &metarpc.CreateArgs{Mode: mode, Umask: umask, Access: metarpc.AccessRead | metarpc.AccessWrite}
			a.Parent, a.Name = w.split(path)
			_, err := ask[metarpc.CreateResult](w.c, metarpc.OpCreate, a)
			return err
		}, []string{"p/new", "p/f", "p/d"}},
		{"temporary file", func(path string) error {
			fd, err := unix.Open(path, unix.O_TMPFILE|unix.O_RDWR, mode)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}, on[metarpc.CreateResult](metarpc.OpTmpFile, func(id layout.FileID) any {
			return &metarpc.TmpFileArgs{Parent: id, Mode: mode, Umask: umask}
		}), []string{"p", "q"}},
		making("mkdir", func(path string) error { return unix.Mkdir(path, mode) }, metarpc.MakeNodeArgs{Mode: unix.S_IFDIR | mode}, umask),
		making("mknod", func(path string) error { return unix.Mknod(path, unix.S_IFREG|mode, 0) }, metarpc.MakeNodeArgs{Mode: unix.S_IFREG | mode}, umask),
		making("mkfifo", func(path string) error { return unix.Mknod(path, unix.S_IFIFO|mode, 0) }, metarpc.MakeNodeArgs{Mode: unix.S_IFIFO | mode}, umask),
		making("device", func(path string) error { return unix.Mknod(path, unix.S_IFCHR|mode, 0x103) }, metarpc.MakeNodeArgs{Mode: unix.S_IFCHR | mode, Rdev: 0x103}, umask),
		making("symlink", func(path string) error { return unix.Symlink("t", path) }, metarpc.MakeNodeArgs{Mode: unix.S_IFLNK | 0o777, Target: "t"}, umask),
		{"link", func(base string) error {
			return unix.Link(filepath.Join(base, "p/f"), filepath.Join(base, "q/new"))
		}, func(w *world, _ string) error {
			id, err := w.walk("p/f")
			if err != nil {
				return err
			}
			parent, name := w.split("q/new")
			_, err = ask[metarpc.AttrResult](w.c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: parent, Name: name})
			return err
		}, []string{""}},
		removing("p/f", false), removing("p/f", true), removing("p/d", true), removing("p/d", false), removing("p/none", false), removing("p/l", false),
		renaming("p/f", "q/new", 0), renaming("p/f", "q/g", 0), renaming("p/f", "p/g", 0), renaming("p/f", "q/g", unix.RENAME_NOREPLACE),
		renaming("p/d", "q/new", 0), renaming("p/d", "q/e", 0), renaming("p/d", "p/new", 0), renaming("p/f", "q/e", 0), renaming("p/d", "q/g", 0),
		renaming("p/f", "q/e", unix.RENAME_EXCHANGE), renaming("p/d", "q/e", unix.RENAME_EXCHANGE), renaming("p/none", "q/g", 0), renaming("p/f", "p/f", 0),
		setting("chmod", func(path string) error { return unix.Chmod(path, mode) }, metarpc.SetAttrArgs{Mask: metarpc.SetMode, Mode: mode}, "p", "p/f", "p/d"),
		setting("chown", func(path string) error { return unix.Lchown(path, int(uid), -1) }, metarpc.SetAttrArgs{Mask: metarpc.SetUID, UID: uid}),
		setting("chgrp", func(path string) error { return unix.Lchown(path, -1, int(gid)) }, metarpc.SetAttrArgs{Mask: metarpc.SetGID, GID: gid}),
		setting("chown both", func(path string) error { return unix.Lchown(path, int(uid), int(gid)) },
			metarpc.SetAttrArgs{Mask: metarpc.SetUID | metarpc.SetGID, UID: uid, GID: gid}),
		setting("truncate", func(path string) error { return unix.Truncate(path, 10) }, metarpc.SetAttrArgs{Mask: metarpc.SetSize | metarpc.SetMtime, Size: 10, Mtime: 5}, "p/f", "p/d", "q/g"),
		utimes("now", unix.UTIME_NOW, unix.UTIME_NOW, metarpc.SetAtime|metarpc.SetMtime|metarpc.SetAtimeNow|metarpc.SetMtimeNow),
		utimes("both", 5, 6, metarpc.SetAtime|metarpc.SetMtime),
		utimes("one now", unix.UTIME_OMIT, unix.UTIME_NOW, metarpc.SetMtime|metarpc.SetMtimeNow),
		utimes("one", 7, unix.UTIME_OMIT, metarpc.SetAtime),
		utimes("one of each", 7, unix.UTIME_NOW, metarpc.SetAtime|metarpc.SetMtime|metarpc.SetMtimeNow),
		setXattr("system.posix_acl_access", list, 0),
		setXattr("system.posix_acl_default", list, 0),
		setXattr("security.capability", []byte{0, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0),
	}
	for _, name := range []string{"user.a", "user.set", "trusted.a", "trusted.set", "security.a", "user.", "system.unknown", "plain"} {
		ops = append(ops, setXattr(name, []byte("v"), rng.IntN(3)))
	}
	for _, name := range []string{"user.set", "user.none", "trusted.set", "security.none", "system.posix_acl_access", "system.posix_acl_default", "system.unknown", "user.", "plain"} {
		ops = append(ops, operation{"getxattr " + name, func(path string) error {
			_, err := unix.Lgetxattr(path, name, make([]byte, 4096))
			return err
		}, on[metarpc.BytesResult](metarpc.OpGetXattr, func(id layout.FileID) any { return &metarpc.XattrArgs{ID: id, Name: name} }), nil},
			operation{"removexattr " + name, func(path string) error {
				return unix.Lremovexattr(path, name)
			}, on[metarpc.Empty](metarpc.OpRemoveXattr, func(id layout.FileID) any { return &metarpc.XattrArgs{ID: id, Name: name} }), nil})
	}
	ops = append(ops, operation{"listxattr", func(path string) error {
		_, err := unix.Llistxattr(path, make([]byte, 4096))
		return err
	}, on[metarpc.NamesResult](metarpc.OpListXattr, func(id layout.FileID) any { return &metarpc.IDArgs{ID: id} }), nil})
	return ops
}

var (
	testUsers  = []uint32{0, 101, 102, 103}
	testGroups = []uint32{0, 201, 202, 203}
)

func randomOf[T any](rng *rand.Rand, all []T) T { return all[rng.IntN(len(all))] }

// randomList is a valid access control list.
func randomList(rng *rand.Rand) perm.ACL {
	entry := func(tag perm.Tag, id uint32) perm.Entry {
		return perm.Entry{Tag: tag, Perm: uint16(rng.IntN(8)), ID: id}
	}
	l := perm.ACL{entry(perm.UserObj, perm.NoID)}
	for _, uid := range testUsers[1:] {
		if rng.IntN(3) == 0 {
			l = append(l, entry(perm.User, uid))
		}
	}
	l = append(l, entry(perm.GroupObj, perm.NoID))
	for _, gid := range testGroups[1:] {
		if rng.IntN(3) == 0 {
			l = append(l, entry(perm.Group, gid))
		}
	}
	if len(l) > 2 || rng.IntN(3) == 0 {
		l = append(l, entry(perm.Mask, perm.NoID))
	}
	return append(l, entry(perm.Other, perm.NoID))
}

// state is all that permissions depend on, of all there is.
func (w *world) localState(path string) string {
	var b strings.Builder
	local := filepath.Join(w.dir, path)
	var st unix.Stat_t
	w.ok(unix.Lstat(local, &st))
	fmt.Fprintf(&b, "%s %o %d:%d", path, st.Mode, st.Uid, st.Gid)
	buf := make([]byte, 4096)
	n, err := unix.Llistxattr(local, buf)
	w.ok(err)
	names := strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 })
	slices.Sort(names)
	for _, name := range names {
		n, err := unix.Lgetxattr(local, name, buf)
		w.ok(err)
		fmt.Fprintf(&b, " %s=%x", name, buf[:n])
	}
	b.WriteString("\n")
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		entries, err := os.ReadDir(local)
		w.ok(err)
		for _, e := range entries { // sorted
			b.WriteString(w.localState(path + "/" + e.Name()))
		}
	}
	return b.String()
}

func (w *world) weftState(path string, id layout.FileID) string {
	var b strings.Builder
	a := w.c.attr(id)
	fmt.Fprintf(&b, "%s %o %d:%d", path, a.Mode, a.UID, a.GID)
	names := must[metarpc.NamesResult](w.c, metarpc.OpListXattr, &metarpc.IDArgs{ID: id}).Names
	slices.Sort(names)
	var flags metarpc.AttrFlags
	for _, name := range names {
		flags |= schema.XattrFlags(name)
		value := must[metarpc.BytesResult](w.c, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: id, Name: name}).Value
		fmt.Fprintf(&b, " %s=%x", name, value)
	}
	b.WriteString("\n")
	if flags != a.Flags {
		w.t.Errorf("%s: flags %#x, has %q", path, a.Flags, names)
	}
	if isDir(a.Mode) {
		entries := w.c.list(id, 100)
		slices.SortFunc(entries, func(a, b metarpc.DirEntry) int { return strings.Compare(a.Name, b.Name) })
		for _, e := range entries {
			b.WriteString(w.weftState(path+"/"+e.Name, e.Attr.ID))
		}
	}
	return b.String()
}

// publicDir is a directory that every user can reach, on a file system with all kinds of attributes.
func publicDir(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("missing: root, to become other users")
	}
	dir, err := os.MkdirTemp("", "weft-perm")
	if err == nil {
		t.Cleanup(func() { os.RemoveAll(dir) })
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"system.posix_acl_access", "user.x"} {
		value := perm.ACL{{Tag: perm.UserObj, Perm: 7}, {Tag: perm.GroupObj, Perm: 5}, {Tag: perm.Other, Perm: 5}}.Value()
		if err := unix.Setxattr(dir, name, value, 0); err != nil {
			t.Skipf("missing: a file system with attributes like %s: %v", name, err)
		}
	}
	return dir
}

// restricted reports whether the kernel refuses more than file systems do (proc_sys_fs(5), protected_*).
func restricted(name string) bool {
	b, err := os.ReadFile("/proc/sys/fs/protected_" + name)
	return err == nil && !bytes.Equal(bytes.TrimSpace(b), []byte("0"))
}

// TestLikeLocal does random things as random users to random trees, on a file system of this machine and on the service,
// and expects the same errors and the same outcome.
func TestLikeLocal(t *testing.T) {
	base := publicDir(t)
	hardlinks, regular := restricted("hardlinks"), restricted("regular")
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 2))
	h := startMemory(t)
	c := h.client()
	rounds := 1000
	if testing.Short() {
		rounds = 150
	}
	met := map[syscall.Errno]bool{}
	// Chance decides which errors a few rounds meet, so there are more of them until all of these were met.
	expected := []syscall.Errno{0, syscall.EACCES, syscall.EPERM, syscall.ENOENT}
	unmet := func(e syscall.Errno) bool { return !met[e] }
	for round := 0; round < rounds || round < 10*rounds && slices.ContainsFunc(expected, unmet); round++ {
		c.cred = metarpc.Cred{}
		w := &world{t: t, dir: filepath.Join(base, fmt.Sprint(round)), c: c}
		w.ok(os.Mkdir(w.dir, 0o755))
		w.id = c.mkdir(layout.RootID, fmt.Sprint(round))
		for _, e := range []struct {
			path string
			kind uint32
		}{
			{"p", unix.S_IFDIR}, {"p/f", unix.S_IFREG}, {"p/g", unix.S_IFREG}, {"p/l", unix.S_IFLNK}, {"p/d", unix.S_IFDIR},
			{"q", unix.S_IFDIR}, {"q/g", unix.S_IFREG}, {"q/e", unix.S_IFDIR},
		} {
			mode := rng.Uint32N(0o1000)
			if rng.IntN(3) != 0 && e.kind == unix.S_IFDIR {
				mode |= 0o111 // or nearly nothing would be found
			}
			if rng.IntN(3) == 0 {
				mode |= rng.Uint32N(8) << 9
			}
			w.entry(e.path, e.kind|mode, randomOf(rng, testUsers), randomOf(rng, testGroups))
			if e.kind == unix.S_IFLNK {
				continue
			}
			if rng.IntN(3) == 0 {
				w.xattr(e.path, "system.posix_acl_access", randomList(rng).Value())
			}
			if rng.IntN(3) == 0 && e.kind == unix.S_IFDIR {
				w.xattr(e.path, "system.posix_acl_default", randomList(rng).Value())
			}
			if rng.IntN(4) == 0 {
				w.xattr(e.path, "user.set", []byte("u"))
				w.xattr(e.path, "trusted.set", []byte("t"))
			}
		}
		umask := randomOf(rng, []uint32{0, 0o22, 0o77, 0o27})
		op := randomOf(rng, operations(rng, umask))
		if op.on == nil {
			op.on = []string{"p", "p/f", "p/d", "p/l"}
		}
		path := randomOf(rng, op.on)
		who := metarpc.Cred{UID: randomOf(rng, testUsers), GID: randomOf(rng, testGroups[1:])}
		for _, gid := range testGroups[1:] {
			if rng.IntN(3) == 0 {
				who.Groups = append(who.Groups, gid)
			}
		}
		if regular && op.name == "create" && path == "p/f" || hardlinks && op.name == "link" && who.UID != 0 {
			w.ok(os.RemoveAll(w.dir))
			continue
		}
		before := w.localState("")
		if got := w.weftState("", w.id); got != before {
			t.Fatalf("seed %d round %d: before: weft\n%slocal\n%s", seed, round, got, before)
		}
		var want error
		old := unix.Umask(int(umask))
		as(t, who, func() { want = op.local(filepath.Join(w.dir, path)) })
		unix.Umask(old)
		c.cred = who
		got := op.weft(w, path)
		c.cred = metarpc.Cred{}
		met[errnoOf(want)] = true
		what := fmt.Sprintf("seed %d round %d: %s on %q, umask %#o, as %+v", seed, round, op.name, path, umask, who)
		if errnoOf(got) != errnoOf(want) {
			t.Errorf("%s: %v, want %v\n%s", what, got, want, before)
		} else if local, weft := w.localState(""), w.weftState("", w.id); local != weft {
			t.Errorf("%s\nbefore\n%slocal\n%sweft\n%s", what, before, local, weft)
		}
		w.ok(os.RemoveAll(w.dir))
		if t.Failed() {
			return
		}
	}
	if slices.ContainsFunc(expected, unmet) {
		t.Errorf("seed %d: met %v only: nothing was tested", seed, met)
	}
	checkCatalog(t, h.engine)
}
