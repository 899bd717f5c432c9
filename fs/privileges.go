package fs

import (
	"context"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// capability is the extended attribute that gives a program capabilities.
const capability = "security.capability"

// setIDBits are those that a write takes from a mode, as the kernel would (setattr_should_drop_suidgid): the
// set-user-ID bit, and the set-group-ID bit of a file that its group may execute.
func setIDBits(mode uint32) uint32 {
	bits := mode & unix.S_ISUID
	if mode&unix.S_IXGRP != 0 {
		bits |= mode & unix.S_ISGID
	}
	return bits
}

// learn takes in the privileges of a file from the answer to a question that was asked at a time by the clock. mu is
// held.
func (i *inode) learn(a *metarpc.Attr, asked uint64) {
	if asked < i.doubted {
		return
	}
	i.mode = a.Mode
	i.capsGone = a.Flags&metarpc.AttrCapability == 0
	i.sure = true
}

// doubtPrivileges says that the file may have been given some: the next write asks. mu is held.
func (i *inode) doubtPrivileges() {
	i.doubted = i.fs.clock.Add(1)
	i.sure = false
}

// armed is doubtPrivileges for a file that may not be known here, by a change of this mount that has been answered.
func (fs *FS) armed(id layout.FileID) {
	if i := fs.holdKnown(id); i != nil {
		defer i.drop()
		i.mu.Lock()
		i.doubtPrivileges()
		i.mu.Unlock()
	}
}

// clears reports whether a write has to take privileges away first, or may have to. setID says that the writer may not
// keep the set-ID bits. mu is held.
func (i *inode) clears(setID bool) bool {
	return !i.sure || !i.capsGone || setID && setIDBits(i.mode) != 0
}

// learnPrivileges asks until it is known what the file has. It opens the file once more: that, unlike GETATTR, waits
// for nobody who writes.
func (i *inode) learnPrivileges(ctx context.Context) error {
	for {
		i.mu.Lock()
		sure := i.sure
		i.mu.Unlock()
		if sure {
			return nil
		}
		if err := i.open(ctx, nobody, 0); err != nil {
			return err
		}
		i.cancelOpen()
	}
}

// clearPrivileges takes from a file about to be written what would let its new contents run with privileges: file
// capabilities, and with setID the set-ID bits, if it has any of those. The kernel leaves that to us
// (FUSE_HANDLE_KILLPRIV_V2); otherwise it would ask for an extended attribute before each write.
//
// The kernel sees nothing of it in the answer to a write. So it is made to ask for the attributes again before that.
func (i *inode) clearPrivileges(ctx context.Context, setID bool) error {
	if err := i.learnPrivileges(ctx); err != nil {
		return err
	}
	i.mu.Lock()
	caps, bits := !i.capsGone, setIDBits(i.mode) != 0
	i.mu.Unlock()
	if !caps && !(setID && bits) {
		return nil
	}
	asked := i.fs.clock.Add(1)
	if bits && !setID {
		// Root keeps the bits, but not if the service takes it for nobody special.
		err := i.fs.meta.RemoveXattr(ctx, nobody, i.id, capability)
		if e, _ := errnoOf(err); err == nil || e == syscall.ENODATA {
			i.mu.Lock()
			i.capsGone = i.capsGone || asked >= i.doubted
			i.mu.Unlock()
			return nil
		}
	}
	args := &metarpc.SetAttrArgs{ID: i.id, Mask: metarpc.ClearPrivileges, Open: true}
	a, err := i.fs.meta.SetAttr(ctx, nobody, args)
	if err != nil {
		i.fs.unsure(err, i.id)
		return byID(i.id, err)
	}
	i.merge(a, asked)
	i.fs.forgetAttrs(i.id)
	i.mu.Lock()
	i.learn(&a.Attr, asked) // also if the answer has been overtaken by writes
	i.mu.Unlock()
	return nil
}
