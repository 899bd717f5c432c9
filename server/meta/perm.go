package meta

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// caller finds out on whose behalf c is executed.
func (s *Service) caller(c *call) *perm.Caller {
	if c.who == nil {
		c.sess.mu.Lock()
		e := c.sess.grant.Export
		c.sess.mu.Unlock()
		c.who = e.Caller(c.h.Cred, s.groups.Of)
	}
	return c.who
}

// subject is what of an inode decides who may use it.
func subject(row *schema.Inode) perm.Inode {
	return perm.Inode{Mode: row.Mode, UID: row.UID, GID: row.GID, Flags: row.Flags}
}

// denied is the answer to a caller that package perm does not allow something. Callers compare it with these.
func denied(errno syscall.Errno) error {
	switch errno {
	case 0:
		return nil
	case syscall.EPERM:
		return errPerm
	case syscall.EACCES:
		return errAccess
	case syscall.EROFS:
		return errReadOnly
	}
	return refuse(errno)
}

// permission is EACCES unless who may access an inode as wanted, EROFS if who may change nothing at all. A client's kernel
// has usually decided the same before; the service does not rely on it.
func (s *Service) permission(ctx context.Context, who *perm.Caller, id layout.FileID, row *schema.Inode, want metarpc.Access) error {
	list, err := s.listFor(ctx, who, id, row)
	if err != nil {
		return err
	}
	return denied(who.Access(subject(row), list, want))
}

// listFor reads the access control list of an inode if it decides what who may do.
func (s *Service) listFor(ctx context.Context, who *perm.Caller, id layout.FileID, row *schema.Inode) (perm.ACL, error) {
	if !who.Asks(subject(row)) {
		return nil, nil
	}
	return s.list(ctx, id, schema.XattrACL)
}

// list reads an access control list; nil if the inode has none.
func (s *Service) list(ctx context.Context, id layout.FileID, name string) (perm.ACL, error) {
	key := schema.XattrKey(id, name)
	value, err := schema.FindRow(ctx, s.engine, key)
	if err != nil || value == nil {
		return nil, err
	}
	list, err := perm.ParseACL(value)
	if err == nil {
		err = list.Check()
	}
	if err != nil {
		return nil, fmt.Errorf("row %q: %w: %w", key, catalog.ErrCorrupt, err)
	}
	return list, nil
}

// mayInsert finds out whether who may make a name in p's directory, which exists.
func (s *Service) mayInsert(ctx context.Context, who *perm.Caller, p *place) error {
	return s.permission(ctx, who, p.dir, &p.parent, metarpc.AccessWrite|metarpc.AccessExec)
}

// mayDelete finds out whether who may take away the name that is in p.
func (s *Service) mayDelete(ctx context.Context, who *perm.Caller, p *place) error {
	if err := s.mayInsert(ctx, who, p); err != nil {
		return err
	}
	if !who.Sticky(subject(&p.parent)) {
		return nil
	}
	row, _, err := s.inode(ctx, p.entry.ID)
	if errors.Is(err, errStale) {
		return errRetry
	}
	if err == nil && !who.Owns(subject(&row)) {
		err = errPerm
	}
	return err
}

// mayRename finds out whether who may rename what is in from to to, and whether the one may take the place of the other.
func (s *Service) mayRename(ctx context.Context, who *perm.Caller, from, to *place, exchange bool) error {
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
	open := a.Open && s.openForWriting(c.sess, a.ID)
	var list perm.ACL
	if !open {
		var err error
		if list, err = s.listFor(ctx, who, a.ID, row); err != nil {
			return err
		}
	}
	return denied(who.MaySet(subject(row), list, open, a))
}

// set adds to t what a asks for, which maySet has allowed, and what follows from it: an inode that gets another owner or is
// cut loses the privileges of set-ID bits and file capabilities, and an access control list follows the mode. It changes row,
// which the caller puts if it has changed.
func (s *Service) set(ctx context.Context, t *tx, who *perm.Caller, row *schema.Inode, a *metarpc.SetAttrArgs, now int64) error {
	i := subject(row)
	if who.Set(&i, a) && row.Flags&metarpc.AttrCapability != 0 {
		dropXattr(t, a.ID, row, schema.XattrCapability)
	}
	row.Mode, row.UID, row.GID = i.Mode, i.UID, i.GID
	if a.Mask&metarpc.SetMode != 0 && row.Flags&metarpc.AttrACL != 0 {
		list, err := s.list(ctx, a.ID, schema.XattrACL)
		if err != nil {
			return err
		}
		if list != nil { // else it goes at this moment, and t's guards will not hold
			t.Put(schema.XattrKey(a.ID, schema.XattrACL), list.Chmod(row.Mode).Value())
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
func (s *Service) newInode(ctx context.Context, who *perm.Caller, p *place, mode, umask uint32, now int64) (*newborn, error) {
	var defaults perm.ACL
	if p.parent.Flags&metarpc.AttrDefaultACL != 0 && mode&syscall.S_IFMT != syscall.S_IFLNK {
		var err error
		if defaults, err = s.list(ctx, p.dir, schema.XattrDefaultACL); err != nil {
			return nil, err
		}
	}
	i, list := who.New(subject(&p.parent), defaults, mode, umask)
	n := &newborn{row: schema.Inode{
		Mode: i.Mode, Nlink: 1, UID: i.UID, GID: i.GID, Atime: now, Mtime: now, Ctime: now, Btime: now,
	}}
	if isRegular(mode) {
		n.row.Used = metarpc.UsedOf(0)
	}
	if defaults != nil {
		n.xattrs = map[string][]byte{}
		if isDir(mode) {
			n.xattrs[schema.XattrDefaultACL] = defaults.Value()
		}
		if list != nil {
			n.xattrs[schema.XattrACL] = list.Value()
		}
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
