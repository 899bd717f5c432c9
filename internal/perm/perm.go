package perm

import (
	"slices"
	"strings"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Caller is the user on whose behalf something is done.
type Caller struct {
	UID, GID   uint32
	Groups     []uint32 // supplementary
	Privileged bool     // may do what Linux lets CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_CHOWN and CAP_FSETID do
	ReadOnly   bool     // may change nothing
}

// In reports whether w is in a group.
func (w *Caller) In(gid uint32) bool { return w.GID == gid || slices.Contains(w.Groups, gid) }

// Inode has the attributes of an inode that decide who may use it.
type Inode struct {
	Mode     uint32 // type and permission bits, as in st_mode
	UID, GID uint32
	Flags    metarpc.AttrFlags
}

func (i Inode) is(kind uint32) bool { return i.Mode&syscall.S_IFMT == kind }

// Owns reports whether w may do what only the owner of i may do.
func (w *Caller) Owns(i Inode) bool { return w.Privileged || w.UID == i.UID }

// Asks reports whether the access control list of i decides what w may do.
func (w *Caller) Asks(i Inode) bool {
	return !w.Owns(i) && i.Flags&metarpc.AttrACL != 0 && i.Mode&0o070 != 0 // Linux does not ask a list whose mask is empty
}

// Access is 0 if w may access i as wanted, EACCES if not, and EROFS if w may change nothing at all. The list is that of
// i if w.Asks, or nil.
func (w *Caller) Access(i Inode, list ACL, want metarpc.Access) syscall.Errno {
	if w.ReadOnly && want&metarpc.AccessWrite != 0 && (i.is(syscall.S_IFREG) || i.is(syscall.S_IFDIR) || i.is(syscall.S_IFLNK)) {
		return syscall.EROFS // bytes for devices and pipes do not go into the file system
	}
	granted := i.Mode
	switch {
	case w.Privileged:
		// Root may not execute a file that nobody may execute.
		if i.is(syscall.S_IFDIR) || want&metarpc.AccessExec == 0 || i.Mode&0o111 != 0 {
			return 0
		}
	case w.UID == i.UID:
		granted >>= 6
	case list != nil:
		granted = 0
		if list.Allows(w, i.UID, i.GID, uint16(want)) {
			granted = 7
		}
	case w.In(i.GID):
		granted >>= 3
	}
	if uint32(want)&^granted&7 != 0 {
		return syscall.EACCES
	}
	return 0
}

// Sticky reports whether w may take only own names from a directory in which it may write.
func (w *Caller) Sticky(dir Inode) bool { return dir.Mode&syscall.S_ISVTX != 0 && !w.Owns(dir) }

// MaySet is 0 if w may set what a asks for. open says that w has the file open for writing; if not,
// the list is as for Access.
func (w *Caller) MaySet(i Inode, list ACL, open bool, a *metarpc.SetAttrArgs) syscall.Errno {
	has := func(m metarpc.AttrMask) bool { return a.Mask&m != 0 }
	if w.ReadOnly {
		return syscall.EROFS
	}
	write := syscall.Errno(0)
	if !open {
		write = w.Access(i, list, metarpc.AccessWrite)
	}
	if has(metarpc.SetSize) && write != 0 {
		return write
	}
	// Only the owner sets one time alone, or a time other than the present; but a truncation says when it was.
	const now = metarpc.SetAtimeNow | metarpc.SetMtimeNow
	explicit := has(metarpc.SetAtime) && !has(metarpc.SetAtimeNow) ||
		has(metarpc.SetMtime) && !has(metarpc.SetMtimeNow) && !has(metarpc.SetSize)
	switch {
	case w.Owns(i):
	case a.Mask&now == now:
		if write != 0 {
			return write
		}
	case explicit, has(now) && !has(metarpc.SetSize):
		return syscall.EPERM
	}
	const always = metarpc.SetMode | metarpc.SetUID | metarpc.SetGID
	switch {
	case has(metarpc.SetUID) && !w.Privileged && !(w.UID == i.UID && a.UID == i.UID):
		return syscall.EPERM
	case has(metarpc.SetGID) && !w.Privileged && !(w.UID == i.UID && (a.GID == i.GID || w.In(a.GID))):
		return syscall.EPERM
	case has(metarpc.SetMode) && i.is(syscall.S_IFLNK):
		return syscall.EOPNOTSUPP
	case has(metarpc.SetMode) && !w.Owns(i):
		return syscall.EPERM
	case has(metarpc.ClearPrivileges) && !has(always) && !w.Owns(i):
		return write
	}
	return 0
}

// Set gives i the owner and the mode that a asks for and MaySet has allowed. An inode that gets another owner or is
// truncated loses its set-ID bits, and its file capabilities if disarm is true. ACL.Chmod adapts the list to the mode.
func (w *Caller) Set(i *Inode, a *metarpc.SetAttrArgs) (disarm bool) {
	const owner = metarpc.SetUID | metarpc.SetGID
	if !i.is(syscall.S_IFDIR) {
		executable := i.Mode&syscall.S_IXGRP != 0
		drop := uint32(0)
		switch {
		case a.Mask&owner != 0:
			// chown(2) does it for everybody. A set-group-ID bit without group execution is not one of execution.
			drop = syscall.S_ISUID
			if executable || !w.Privileged && !w.In(i.GID) {
				drop |= syscall.S_ISGID
			}
		case a.Mask&metarpc.ClearPrivileges != 0:
			drop = syscall.S_ISUID
			if executable {
				drop |= syscall.S_ISGID
			}
		case a.Mask&metarpc.SetSize != 0 && !w.Privileged:
			drop = syscall.S_ISUID
			if executable || !w.In(i.GID) {
				drop |= syscall.S_ISGID
			}
		}
		i.Mode &^= drop
		disarm = a.Mask&(owner|metarpc.ClearPrivileges|metarpc.SetSize) != 0
	}
	if a.Mask&metarpc.SetUID != 0 {
		i.UID = a.UID
	}
	if a.Mask&metarpc.SetGID != 0 {
		i.GID = a.GID
	}
	if a.Mask&metarpc.SetMode != 0 {
		i.Mode = w.SetMode(*i, i.Mode&syscall.S_IFMT|a.Mode)
	}
	return disarm
}

// SetMode is the mode that i has when w sets this one.
func (w *Caller) SetMode(i Inode, mode uint32) uint32 {
	if !w.Privileged && !w.In(i.GID) {
		mode &^= syscall.S_ISGID
	}
	return mode
}

// New returns the inode that w makes in a directory, and its access control list, which is nil if the mode says it all.
// The directory's default list is defaults. The mode is that of the system call: umask applies only without a default
// list.
func (w *Caller) New(dir Inode, defaults ACL, mode, umask uint32) (Inode, ACL) {
	i := Inode{Mode: mode, UID: w.UID, GID: w.GID}
	if i.is(syscall.S_IFDIR) {
		i.Mode &^= syscall.S_ISUID | syscall.S_ISGID // mkdir(2) ignores them
	}
	if dir.Mode&syscall.S_ISGID != 0 {
		i.GID = dir.GID
		const both = syscall.S_ISGID | syscall.S_IXGRP
		switch {
		case i.is(syscall.S_IFDIR):
			i.Mode |= syscall.S_ISGID
		case mode&both == both:
			i.Mode = w.SetMode(i, i.Mode) // or anybody could make programs that run with the directory's group
		}
	}
	var list ACL
	switch {
	case i.is(syscall.S_IFLNK):
	case defaults == nil:
		i.Mode &^= umask & 0o777
	default:
		i.Mode, list = defaults.Inherit(i.Mode)
	}
	return i, list
}

// MayXattr is 0 if w may read or write an extended attribute, as xattr(7) says. The list is as for Access. The
// attributes that hold access control lists are not meant.
func (w *Caller) MayXattr(i Inode, list ACL, name string, write bool) syscall.Errno {
	refusal, access := syscall.ENODATA, metarpc.AccessRead
	if write {
		refusal, access = syscall.EPERM, metarpc.AccessWrite
		if w.ReadOnly {
			return syscall.EROFS
		}
	}
	space, rest, _ := strings.Cut(name, ".")
	known := false
	switch space {
	case "security":
		known = true
		if write && !w.Privileged {
			return syscall.EPERM
		}
	case "system":
	case "trusted":
		known = true
		if !w.Privileged {
			return refusal
		}
	case "user":
		known = true
		if !i.is(syscall.S_IFREG) && !i.is(syscall.S_IFDIR) {
			return refusal
		}
		if write && i.is(syscall.S_IFDIR) && w.Sticky(i) {
			return syscall.EPERM
		}
		fallthrough
	default:
		if errno := w.Access(i, list, access); errno != 0 {
			return errno
		}
	}
	switch {
	case !known || space == name:
		return syscall.EOPNOTSUPP
	case rest == "":
		return syscall.EINVAL
	}
	return 0
}
