package meta

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/acl"
	"github.com/weftfs/weft/server/schema"
)

// Who may do what is decided here, in the order in which the Linux VFS decides it (fs/namei.c, fs/attr.c, fs/xattr.c,
// fs/posix_acl.c), so that an application sees the same errno on weft as on a local file system. A client's kernel has
// usually decided the same before; the service does not rely on it.

// permission is EACCES unless who may access an inode as wanted, EROFS if he is to change nothing at all.
func (s *Service) permission(ctx context.Context, who *caller, id layout.FileID, row *schema.Inode, want metarpc.Access) error {
	if who.readOnly && want&metarpc.AccessWrite != 0 {
		switch row.Mode & syscall.S_IFMT {
		case syscall.S_IFREG, syscall.S_IFDIR, syscall.S_IFLNK: // what is written to others is not in the file system
			return errReadOnly
		}
	}
	granted := row.Mode
	switch {
	case who.privileged:
		// Root may not execute what nobody may.
		if isDir(row.Mode) || want&metarpc.AccessExec == 0 || row.Mode&0o111 != 0 {
			return nil
		}
	case who.uid == row.UID:
		granted >>= 6
	case row.Flags&metarpc.AttrACL != 0 && row.Mode&0o070 != 0: // Linux does not ask a list whose mask is empty
		list, err := s.list(ctx, id, schema.XattrACL)
		if err != nil {
			return err
		}
		if list != nil {
			granted = 0
			if list.Allows(who, row.UID, row.GID, uint16(want)) {
				granted = 7
			}
			break
		}
		fallthrough // it has gone since row was read
	case who.In(row.GID):
		granted >>= 3
	}
	if uint32(want)&^granted&7 != 0 {
		return errAccess
	}
	return nil
}

// list reads an access control list; nil if the inode has none.
func (s *Service) list(ctx context.Context, id layout.FileID, name string) (acl.List, error) {
	key := schema.XattrKey(id, name)
	value, err := s.find(ctx, key)
	if err != nil || value == nil {
		return nil, err
	}
	list, err := acl.Parse(value)
	if err == nil {
		err = list.Check()
	}
	if err != nil {
		return nil, fmt.Errorf("row %q: %w: %w", key, catalog.ErrCorrupt, err)
	}
	return list, nil
}

// owns reports whether who may do what only the owner may.
func (w *caller) owns(row *schema.Inode) bool { return w.privileged || w.uid == row.UID }

// mayInsert finds out whether who may make a name in p's directory, which exists.
func (s *Service) mayInsert(ctx context.Context, who *caller, p *place) error {
	return s.permission(ctx, who, p.dir, &p.parent, metarpc.AccessWrite|metarpc.AccessExec)
}

// mayDelete finds out whether who may take away the name that is in p.
func (s *Service) mayDelete(ctx context.Context, who *caller, p *place) error {
	if err := s.mayInsert(ctx, who, p); err != nil {
		return err
	}
	if p.parent.Mode&syscall.S_ISVTX == 0 || who.owns(&p.parent) {
		return nil
	}
	row, _, err := s.inode(ctx, p.entry.ID)
	if errors.Is(err, errStale) {
		return errRetry
	}
	if err == nil && !who.owns(&row) {
		err = errPerm
	}
	return err
}

// mayRename finds out whether who may rename what is in from to to, and whether the one may take the place of the other.
func (s *Service) mayRename(ctx context.Context, who *caller, from, to *place, exchange bool) error {
	err := s.mayDelete(ctx, who, from)
	if err == nil && to.exists() {
		err = s.mayDelete(ctx, who, to)
	} else if err == nil {
		err = s.mayInsert(ctx, who, to)
	}
	if err == nil {
		err = checkTypes(from, to, exchange)
	}
	if err != nil || from.dir == to.dir {
		return err
	}
	// The ".." of a directory changes.
	for _, p := range []*place{from, to} {
		if !p.isDir() || p == to && !exchange {
			continue
		}
		row, _, err := s.inode(ctx, p.entry.ID)
		if errors.Is(err, errStale) {
			return errRetry
		}
		if err == nil {
			err = s.permission(ctx, who, p.entry.ID, &row, metarpc.AccessWrite)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// openForWriting reports whether the session has a file open for writing.
func (s *Service) openForWriting(sess *session, id layout.FileID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	cl := sess.claims[id]
	return cl != nil && cl.open && cl.write
}

// maySet finds out whether the caller may set what a asks for.
func (s *Service) maySet(ctx context.Context, c *call, row *schema.Inode, a *metarpc.SetAttrArgs) error {
	who := s.caller(c)
	const always = metarpc.SetMode | metarpc.SetUID | metarpc.SetGID
	has := func(m metarpc.AttrMask) bool { return a.Mask&m != 0 }
	if who.readOnly {
		return errReadOnly
	}
	written := false // the right to write has been shown
	write := func() error {
		if written || a.Open && s.openForWriting(c.sess, a.ID) {
			written = true
			return nil
		}
		err := s.permission(ctx, who, a.ID, row, metarpc.AccessWrite)
		written = err == nil
		return err
	}
	if has(metarpc.SetSize) {
		if err := write(); err != nil {
			return err
		}
	}
	// A time other than now, or one of the two only, is the owner's to set, but whoever cuts the file says when that was.
	now := metarpc.SetAtimeNow | metarpc.SetMtimeNow
	explicit := has(metarpc.SetAtime) && !has(metarpc.SetAtimeNow) || has(metarpc.SetMtime) && !has(metarpc.SetMtimeNow) && !written
	switch {
	case who.owns(row):
	case has(now) && a.Mask&now == now:
		if err := write(); err != nil {
			return err
		}
	case explicit, has(now) && !written:
		return errPerm
	}
	switch {
	case has(metarpc.SetUID) && !who.privileged && !(who.uid == row.UID && a.UID == row.UID):
		return errPerm
	case has(metarpc.SetGID) && !who.privileged && !(who.uid == row.UID && (a.GID == row.GID || who.In(a.GID))):
		return errPerm
	case has(metarpc.SetMode) && row.Mode&syscall.S_IFMT == syscall.S_IFLNK:
		return errNotSupported
	case has(metarpc.SetMode) && !who.owns(row):
		return errPerm
	case has(metarpc.ClearPrivileges) && !has(always) && !who.owns(row):
		return write()
	}
	return nil
}

// set adds to t what a asks for, which maySet has allowed, and what follows from it: an inode that gets another owner or is
// cut loses the privileges of set-ID bits and file capabilities, and an access control list follows the mode. It changes row,
// which the caller puts if it has changed.
func (s *Service) set(ctx context.Context, t *tx, who *caller, row *schema.Inode, a *metarpc.SetAttrArgs, now int64) error {
	const owner = metarpc.SetUID | metarpc.SetGID
	drop := uint32(0) // mode bits
	if !isDir(row.Mode) {
		executable := row.Mode&syscall.S_IXGRP != 0
		switch {
		case a.Mask&owner != 0:
			// chown(2) does it for everybody. A set-group-ID bit without group execution is not one of execution.
			drop = syscall.S_ISUID
			if executable || !who.privileged && !who.In(row.GID) {
				drop |= syscall.S_ISGID
			}
		case a.Mask&metarpc.ClearPrivileges != 0:
			drop = syscall.S_ISUID
			if executable {
				drop |= syscall.S_ISGID
			}
		case a.Mask&metarpc.SetSize != 0 && !who.privileged:
			drop = syscall.S_ISUID
			if executable || !who.In(row.GID) {
				drop |= syscall.S_ISGID
			}
		}
		if a.Mask&(owner|metarpc.ClearPrivileges|metarpc.SetSize) != 0 && row.Flags&metarpc.AttrCapability != 0 {
			dropXattr(t, a.ID, row, schema.XattrCapability)
		}
	}
	row.Mode &^= drop
	if a.Mask&metarpc.SetUID != 0 {
		row.UID = a.UID
	}
	if a.Mask&metarpc.SetGID != 0 {
		row.GID = a.GID
	}
	if a.Mask&metarpc.SetMode != 0 {
		row.Mode = row.Mode&syscall.S_IFMT | a.Mode
		if !who.privileged && !who.In(row.GID) {
			row.Mode &^= syscall.S_ISGID
		}
		if row.Flags&metarpc.AttrACL != 0 {
			list, err := s.list(ctx, a.ID, schema.XattrACL)
			if err != nil {
				return err
			}
			if list != nil { // else it goes at this moment, and t's guards will not hold
				t.Put(schema.XattrKey(a.ID, schema.XattrACL), list.Chmod(row.Mode).Value())
			}
		}
	}
	switch {
	case a.Mask&metarpc.SetAtimeNow != 0:
		row.Atime = now
	case a.Mask&metarpc.SetAtime != 0:
		row.Atime = a.Atime
	}
	switch {
	case a.Mask&metarpc.SetMtimeNow != 0:
		row.Mtime = now
	case a.Mask&metarpc.SetMtime != 0:
		row.Mtime = a.Mtime
	}
	if a.Mask != metarpc.ClearPrivileges {
		row.Ctime = now
	}
	return nil
}

// newborn is an inode about to be made, and what it inherits.
type newborn struct {
	row    schema.Inode
	xattrs map[string][]byte
}

// newInode is an inode made on behalf of who in the directory of p. The mode is that of the system call: umask applies
// only where the directory has no default list.
func (s *Service) newInode(ctx context.Context, who *caller, p *place, mode, umask uint32, now int64) (*newborn, error) {
	n := &newborn{row: schema.Inode{
		Mode: mode, Nlink: 1, UID: who.uid, GID: who.gid, Atime: now, Mtime: now, Ctime: now, Btime: now,
	}}
	row := &n.row
	if isRegular(mode) {
		row.Used = metarpc.UsedOf(0)
	}
	if isDir(mode) {
		row.Mode &^= syscall.S_ISUID | syscall.S_ISGID // mkdir(2) ignores them
	}
	if p.parent.Mode&syscall.S_ISGID != 0 {
		row.GID = p.parent.GID
		const both = syscall.S_ISGID | syscall.S_IXGRP
		switch {
		case isDir(mode):
			row.Mode |= syscall.S_ISGID
		case mode&both == both && !who.privileged && !who.In(row.GID):
			row.Mode &^= syscall.S_ISGID // or anybody could make programs that run with the directory's group
		}
	}
	if mode&syscall.S_IFMT == syscall.S_IFLNK {
		return n, nil
	}
	var list acl.List
	if p.parent.Flags&metarpc.AttrDefaultACL != 0 {
		var err error
		if list, err = s.list(ctx, p.dir, schema.XattrDefaultACL); err != nil {
			return nil, err
		}
	}
	if list == nil {
		row.Mode &^= umask & 0o777
		return n, nil
	}
	n.xattrs = map[string][]byte{}
	if isDir(mode) {
		n.xattrs[schema.XattrDefaultACL] = list.Value()
	}
	var access acl.List
	if row.Mode, access = list.Inherit(row.Mode); access != nil {
		n.xattrs[schema.XattrACL] = access.Value()
	}
	return n, nil
}

// put adds the attributes that a new inode has from the start to t; its row is the caller's to put after that.
func (n *newborn) put(t *tx, id layout.FileID) {
	for name, value := range n.xattrs {
		putXattr(t, id, &n.row, name, value, false)
	}
}

// mayTransfer finds out whether the session may have a layout: it needs the file open, for writing if it is to write.
func (s *Service) mayTransfer(sess *session, a *metarpc.LayoutGetArgs) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	cl := sess.claims[a.ID]
	open := cl != nil && cl.open
	switch {
	case open && (cl.write || a.IOMode != layout.IOModeRW):
		return nil
	case !sess.reclaimed: // it has not said yet what it had open at the earlier instance
		return refusef(metarpc.StatusGrace, "inode %d is not open yet", a.ID)
	case open:
		return refusef(metarpc.Status(syscall.EBADF), "inode %d is not open for writing", a.ID)
	}
	return refusef(metarpc.Status(syscall.EBADF), "inode %d is not open", a.ID)
}

// honest is reports without what is said of files that the session cannot have written: it has no right to a layout for
// writing, and had none; nor may it set times without one.
func (s *Service) honest(sess *session, reports []metarpc.SizeReport) []metarpc.SizeReport {
	reports = slices.Clone(reports)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range reports {
		cl := sess.claims[reports[i].ID]
		if cl == nil || !(cl.open && cl.write || cl.writer || cl.report != report{}) {
			reports[i].End, reports[i].Mtime, reports[i].Used = 0, 0, 0
		}
		if cl == nil || !cl.writer {
			reports[i].Set = metarpc.Times{}
		}
	}
	return reports
}
