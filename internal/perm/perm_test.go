package perm

import (
	"reflect"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// server/meta TestLikeLocal compares with what Linux decides, with many more cases than these.

var (
	root   = Caller{Privileged: true}
	owner  = Caller{UID: 1, GID: 1}
	member = Caller{UID: 2, GID: 2, Groups: []uint32{9}}
	other  = Caller{UID: 3, GID: 3}
	reader = Caller{Privileged: true, ReadOnly: true}
)

func inode(mode uint32) Inode { return Inode{Mode: mode, UID: 1, GID: 9} }

func TestAccess(t *testing.T) {
	const r, w, x = metarpc.AccessRead, metarpc.AccessWrite, metarpc.AccessExec
	list := ACL{{UserObj, 7, NoID}, {User, 4, 3}, {GroupObj, 0, NoID}, {Mask, 7, NoID}, {Other, 0, NoID}}
	listed := inode(syscall.S_IFREG | 0o070)
	listed.Flags = metarpc.AttrACL
	for _, c := range []struct {
		who  Caller
		i    Inode
		want metarpc.Access
		errs syscall.Errno
	}{
		{owner, inode(syscall.S_IFREG | 0o407), r, 0},
		{owner, inode(syscall.S_IFREG | 0o477), w, syscall.EACCES}, // although everybody else may
		{member, inode(syscall.S_IFREG | 0o060), r | w, 0},
		{member, inode(syscall.S_IFREG | 0o707), r, syscall.EACCES},
		{other, inode(syscall.S_IFREG | 0o005), r | x, 0},
		{other, inode(syscall.S_IFREG | 0o771), r, syscall.EACCES},
		{root, inode(syscall.S_IFREG), r | w, 0},
		{root, inode(syscall.S_IFREG | 0o666), x, syscall.EACCES},
		{root, inode(syscall.S_IFREG | 0o001), x, 0},
		{root, inode(syscall.S_IFDIR), x, 0},
		{reader, inode(syscall.S_IFREG | 0o777), r | x, 0},
		{reader, inode(syscall.S_IFREG | 0o777), w, syscall.EROFS},
		{reader, inode(syscall.S_IFIFO | 0o777), w, 0},
		{other, listed, r, 0},
		{other, listed, w, syscall.EACCES},
		{member, listed, r, syscall.EACCES},
		{owner, listed, r, syscall.EACCES}, // the list is not asked for the owner
	} {
		var asked ACL
		if c.who.Asks(c.i) {
			asked = list
		}
		if got := c.who.Access(c.i, asked, c.want); got != c.errs {
			t.Errorf("%+v, %+v, %d: %v, want %v", c.who, c.i, c.want, got, c.errs)
		}
	}
	listed.Mode = syscall.S_IFREG | 0o007
	if member.Asks(listed) {
		t.Error("a list whose mask is empty is asked")
	}
}

func TestSticky(t *testing.T) {
	for _, c := range []struct {
		who    Caller
		mode   uint32
		sticky bool
	}{
		{owner, 0o1777, false}, {root, 0o1777, false}, {other, 0o777, false}, {other, 0o1777, true},
	} {
		if got := c.who.Sticky(inode(syscall.S_IFDIR | c.mode)); got != c.sticky {
			t.Errorf("%+v, %#o: %t", c.who, c.mode, got)
		}
	}
}

func TestMaySet(t *testing.T) {
	const now = metarpc.SetAtimeNow | metarpc.SetMtimeNow
	mode := func(m uint32) metarpc.SetAttrArgs { return metarpc.SetAttrArgs{Mask: metarpc.SetMode, Mode: m} }
	set := func(mask metarpc.AttrMask) metarpc.SetAttrArgs { return metarpc.SetAttrArgs{Mask: mask} }
	group := func(gid uint32) metarpc.SetAttrArgs { return metarpc.SetAttrArgs{Mask: metarpc.SetGID, GID: gid} }
	inGroup := owner
	inGroup.Groups = []uint32{5}
	for _, c := range []struct {
		who  Caller
		mode uint32
		open bool
		args metarpc.SetAttrArgs
		errs syscall.Errno
	}{
		{owner, syscall.S_IFREG, false, mode(0o777), 0},
		{other, syscall.S_IFREG | 0o777, false, mode(0o777), syscall.EPERM},
		{root, syscall.S_IFREG, false, mode(0o777), 0},
		{root, syscall.S_IFLNK | 0o777, false, mode(0o777), syscall.EOPNOTSUPP},
		{reader, syscall.S_IFREG, false, mode(0o777), syscall.EROFS},
		{owner, syscall.S_IFREG, false, metarpc.SetAttrArgs{Mask: metarpc.SetUID, UID: 1}, 0},
		{owner, syscall.S_IFREG, false, metarpc.SetAttrArgs{Mask: metarpc.SetUID, UID: 2}, syscall.EPERM},
		{owner, syscall.S_IFREG, false, group(9), 0}, // it has it already
		{owner, syscall.S_IFREG, false, group(5), syscall.EPERM},
		{inGroup, syscall.S_IFREG, false, group(5), 0},
		{other, syscall.S_IFREG | 0o006, false, set(metarpc.SetSize), 0},
		{other, syscall.S_IFREG | 0o004, false, set(metarpc.SetSize), syscall.EACCES},
		{other, syscall.S_IFREG | 0o004, true, set(metarpc.SetSize), 0}, // ftruncate(2)
		{owner, syscall.S_IFREG, false, set(metarpc.SetSize), syscall.EACCES},
		{other, syscall.S_IFREG | 0o006, false, set(now), 0},
		{other, syscall.S_IFREG | 0o004, false, set(now), syscall.EACCES},
		{other, syscall.S_IFREG | 0o006, false, set(metarpc.SetMtimeNow), syscall.EPERM}, // one of the two
		{other, syscall.S_IFREG | 0o006, false, set(metarpc.SetMtime), syscall.EPERM},
		{other, syscall.S_IFREG | 0o006, false, set(metarpc.SetSize | metarpc.SetMtime), 0},
		{other, syscall.S_IFREG | 0o006, false, set(metarpc.SetSize | metarpc.SetAtime), syscall.EPERM},
		{owner, syscall.S_IFREG, false, set(metarpc.SetAtime | metarpc.SetMtime), 0},
		{other, syscall.S_IFREG | 0o006, false, set(metarpc.ClearPrivileges), 0},
		{other, syscall.S_IFREG | 0o004, false, set(metarpc.ClearPrivileges), syscall.EACCES},
		{owner, syscall.S_IFREG, false, set(metarpc.ClearPrivileges), 0},
	} {
		if got := c.who.MaySet(inode(c.mode), nil, c.open, &c.args); got != c.errs {
			t.Errorf("%+v, mode %#o, open %t, %+v: %v, want %v", c.who, c.mode, c.open, c.args, got, c.errs)
		}
	}
}

func TestSet(t *testing.T) {
	const all = syscall.S_ISUID | syscall.S_ISGID | 0o777
	for _, c := range []struct {
		who    Caller
		mode   uint32
		args   metarpc.SetAttrArgs
		want   Inode
		disarm bool
	}{
		{root, syscall.S_IFREG | all, metarpc.SetAttrArgs{Mask: metarpc.SetUID, UID: 7}, Inode{Mode: syscall.S_IFREG | 0o777, UID: 7, GID: 9}, true},
		{root, syscall.S_IFREG | 0o6707, metarpc.SetAttrArgs{Mask: metarpc.SetGID, GID: 7}, Inode{Mode: syscall.S_IFREG | 0o2707, UID: 1, GID: 7}, true},
		{root, syscall.S_IFDIR | all, metarpc.SetAttrArgs{Mask: metarpc.SetUID, UID: 7}, Inode{Mode: syscall.S_IFDIR | all, UID: 7, GID: 9}, false},
		{other, syscall.S_IFREG | all, metarpc.SetAttrArgs{Mask: metarpc.SetSize}, Inode{Mode: syscall.S_IFREG | 0o777, UID: 1, GID: 9}, true},
		{root, syscall.S_IFREG | all, metarpc.SetAttrArgs{Mask: metarpc.SetSize}, Inode{Mode: syscall.S_IFREG | all, UID: 1, GID: 9}, true},
		{root, syscall.S_IFREG | all, metarpc.SetAttrArgs{Mask: metarpc.ClearPrivileges}, Inode{Mode: syscall.S_IFREG | 0o777, UID: 1, GID: 9}, true},
		{owner, syscall.S_IFREG | all, metarpc.SetAttrArgs{Mask: metarpc.SetMode, Mode: 0o6711}, Inode{Mode: syscall.S_IFREG | 0o4711, UID: 1, GID: 9}, false},
		{root, syscall.S_IFREG | all, metarpc.SetAttrArgs{Mask: metarpc.SetMode, Mode: 0o6711}, Inode{Mode: syscall.S_IFREG | 0o6711, UID: 1, GID: 9}, false},
	} {
		i := inode(c.mode)
		if disarm := c.who.Set(&i, &c.args); i != c.want || disarm != c.disarm {
			t.Errorf("%+v, mode %#o, %+v: %+v, %t", c.who, c.mode, c.args, i, disarm)
		}
	}
}

func TestNew(t *testing.T) {
	defaults := ACL{{UserObj, 7, NoID}, {User, 7, 5}, {GroupObj, 5, NoID}, {Mask, 7, NoID}, {Other, 0, NoID}}
	for _, c := range []struct {
		dir      uint32
		defaults ACL
		mode     uint32
		want     Inode
		list     ACL
	}{
		{0o777, nil, syscall.S_IFREG | 0o666, Inode{Mode: syscall.S_IFREG | 0o644, UID: 3, GID: 3}, nil},
		{0o777, nil, syscall.S_IFLNK | 0o777, Inode{Mode: syscall.S_IFLNK | 0o777, UID: 3, GID: 3}, nil},
		{0o777, nil, syscall.S_IFDIR | 0o6777, Inode{Mode: syscall.S_IFDIR | 0o755, UID: 3, GID: 3}, nil},
		{0o2777, nil, syscall.S_IFDIR | 0o777, Inode{Mode: syscall.S_IFDIR | 0o2755, UID: 3, GID: 9}, nil},
		{0o2777, nil, syscall.S_IFREG | 0o2711, Inode{Mode: syscall.S_IFREG | 0o711, UID: 3, GID: 9}, nil},
		{0o2777, nil, syscall.S_IFREG | 0o2701, Inode{Mode: syscall.S_IFREG | 0o2701, UID: 3, GID: 9}, nil},
		{0o777, defaults, syscall.S_IFREG | 0o666, Inode{Mode: syscall.S_IFREG | 0o660, UID: 3, GID: 3},
			ACL{{UserObj, 6, NoID}, {User, 7, 5}, {GroupObj, 5, NoID}, {Mask, 6, NoID}, {Other, 0, NoID}}},
		{0o777, defaults, syscall.S_IFLNK | 0o777, Inode{Mode: syscall.S_IFLNK | 0o777, UID: 3, GID: 3}, nil},
	} {
		i, list := other.New(inode(syscall.S_IFDIR|c.dir), c.defaults, c.mode, 0o022)
		if i != c.want || !reflect.DeepEqual(list, c.list) {
			t.Errorf("in %#o, mode %#o: %+v, %v", c.dir, c.mode, i, list)
		}
	}
}

func TestMayXattr(t *testing.T) {
	for _, c := range []struct {
		who         Caller
		mode        uint32
		name        string
		read, write syscall.Errno
	}{
		{owner, syscall.S_IFREG | 0o600, "user.a", 0, 0},
		{other, syscall.S_IFREG | 0o604, "user.a", 0, syscall.EACCES},
		{other, syscall.S_IFDIR | 0o1777, "user.a", 0, syscall.EPERM},
		{root, syscall.S_IFLNK | 0o777, "user.a", syscall.ENODATA, syscall.EPERM},
		{reader, syscall.S_IFREG | 0o600, "user.a", 0, syscall.EROFS},
		{other, syscall.S_IFREG, "security.a", 0, syscall.EPERM},
		{root, syscall.S_IFREG, "security.a", 0, 0},
		{owner, syscall.S_IFREG | 0o600, "trusted.a", syscall.ENODATA, syscall.EPERM},
		{root, syscall.S_IFREG, "trusted.a", 0, 0},
		{root, syscall.S_IFREG, "user.", syscall.EINVAL, syscall.EINVAL},
		{root, syscall.S_IFREG, "user", syscall.EOPNOTSUPP, syscall.EOPNOTSUPP},
		{root, syscall.S_IFREG, "system.a", syscall.EOPNOTSUPP, syscall.EOPNOTSUPP},
		{root, syscall.S_IFREG, "a.b", syscall.EOPNOTSUPP, syscall.EOPNOTSUPP},
	} {
		i := inode(c.mode)
		read, write := c.who.MayXattr(i, nil, c.name, false), c.who.MayXattr(i, nil, c.name, true)
		if read != c.read || write != c.write {
			t.Errorf("%+v, %#o, %s: %v, %v", c.who, c.mode, c.name, read, write)
		}
	}
}
