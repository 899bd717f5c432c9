package meta

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// xattrLayout is the attribute that shows and sets how files are laid out. It has no row and is not listed, so that
	// copying a tree with its attributes does not copy it.
	xattrLayout = "weft.layout"

	// xattrUsage is the attribute that shows what is below a directory. It is neither listed nor set.
	xattrUsage = "weft.usage"

	// maxXattrs is how many attributes an inode can have: so many names, of any length, fit what listxattr(2) can return.
	maxXattrs = 256
)

func xattrRange(id layout.FileID) (from, to []byte) { return schema.Of(schema.XattrKey(id, "")...) }

// putXattr adds to t that an inode has an attribute, whose row is there already if existed. The inode's row, which it
// changes, is the caller's to put and to guard: every change of an attribute guards it.
func putXattr(t *tx, id layout.FileID, row *schema.Inode, name string, value []byte, existed bool) {
	if !existed {
		row.Xattrs++
		t.Grows = true
	}
	row.Flags |= schema.XattrFlags(name)
	t.Put(schema.XattrKey(id, name), value)
}

// dropXattr is the inverse of putXattr, for an attribute that the inode has.
func dropXattr(t *tx, id layout.FileID, row *schema.Inode, name string) {
	row.Xattrs--
	row.Flags &^= schema.XattrFlags(name)
	if row.Xattrs > 0 {
		row.Flags |= metarpc.AttrXattrs
	}
	t.Delete(schema.XattrKey(id, name))
}

// mayXattr finds out whether who may read or write an attribute, as xattr(7) tells. Access control lists are a matter of
// their own.
func (s *Service) mayXattr(ctx context.Context, who *perm.Caller, id layout.FileID, row *schema.Inode, name string, write bool) error {
	list, err := s.listFor(ctx, who, id, row)
	if err != nil {
		return err
	}
	return denied(who.MayXattr(subject(row), list, name, write))
}

func isACL(name string) bool { return name == schema.XattrACL || name == schema.XattrDefaultACL }

func (s *Service) getXattr(ctx context.Context, c *call, a *metarpc.XattrArgs) (*metarpc.BytesResult, error) {
	if a.Name == xattrLayout {
		return s.getLayoutXattr(ctx, a.ID)
	}
	row, err := s.inodeOrRemoved(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	if a.Name == xattrUsage {
		return s.getUsageXattr(ctx, a.ID, &row)
	}
	switch {
	case !isACL(a.Name):
		if err := s.mayXattr(ctx, s.caller(c), a.ID, &row, a.Name, false); err != nil {
			return nil, err
		}
	case row.Mode&syscall.S_IFMT == syscall.S_IFLNK:
		return nil, errNotSupported
	}
	if row.Flags&schema.XattrFlags(a.Name) != schema.XattrFlags(a.Name) {
		return nil, errNoData
	}
	value, err := schema.FindRow(ctx, s.engine, schema.XattrKey(a.ID, a.Name))
	if err == nil && value == nil {
		err = errNoData
	}
	return &metarpc.BytesResult{Value: value}, err
}

// getLayoutXattr is a directory's policy with what it inherits, or how a file is or will be laid out.
func (s *Service) getLayoutXattr(ctx context.Context, id layout.FileID) (*metarpc.BytesResult, error) {
	row, _, err := s.inode(ctx, id)
	if err != nil {
		return nil, err
	}
	policy := row.Policy.Layout().Or(s.volume.Policy.Layout())
	switch {
	case isDir(row.Mode):
	case isRegular(row.Mode):
		var l schema.Layout
		raw, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
		if err != nil {
			return nil, err
		}
		if raw != nil {
			policy = layout.Policy{StripeUnit: l.StripeUnit, StripeCount: l.Width, Mirrors: len(l.Mirrors), MinCopies: l.MinCopies}
		}
	default:
		return nil, errNoData
	}
	return &metarpc.BytesResult{Value: []byte(policy.String())}, nil
}

// getUsageXattr is what is below a directory, with all that is committed by now.
func (s *Service) getUsageXattr(ctx context.Context, id layout.FileID, row *schema.Inode) (*metarpc.BytesResult, error) {
	if !isDir(row.Mode) {
		return nil, errNoData
	}
	u, err := s.usage.Of(ctx, id)
	return &metarpc.BytesResult{Value: fmt.Appendf(nil, "bytes=%d files=%d dirs=%d", u.Bytes, u.Files, u.Dirs)}, err
}

func (s *Service) setXattr(ctx context.Context, c *call, a *metarpc.XattrArgs) (*metarpc.Empty, error) {
	if a.Name == xattrLayout {
		policy, err := layout.ParsePolicy(string(a.Value))
		if err == nil {
			err = policy.Or(s.volume.Policy.Layout()).Validate()
		}
		if err != nil {
			return nil, refusef(errInvalid.Status, "%v", err)
		}
		if a.Flags == metarpc.XattrCreate {
			return nil, errExist
		}
		return s.setPolicy(ctx, c, a.ID, policy)
	}
	if isACL(a.Name) {
		var list perm.ACL
		if len(a.Value) > 0 {
			var err error
			if list, err = perm.ParseACL(a.Value); err != nil {
				return nil, refuseList(err)
			}
		}
		return s.setACL(ctx, c, a.ID, a.Name, list)
	}
	return s.changeXattr(ctx, c, a.ID, a.Name, func(t *tx, row *schema.Inode, old []byte) error {
		if err := s.mayXattr(ctx, s.caller(c), a.ID, row, a.Name, true); err != nil {
			return err
		}
		switch {
		case old != nil && a.Flags&metarpc.XattrCreate != 0:
			return errExist
		case old == nil && a.Flags&metarpc.XattrReplace != 0:
			return errNoData
		case old == nil && row.Xattrs >= maxXattrs:
			return errNoSpace
		}
		putXattr(t, a.ID, row, a.Name, a.Value, old != nil)
		return nil
	})
}

func (s *Service) removeXattr(ctx context.Context, c *call, a *metarpc.XattrArgs) (*metarpc.Empty, error) {
	switch {
	case a.Name == xattrLayout:
		return s.setPolicy(ctx, c, a.ID, layout.Policy{})
	case isACL(a.Name):
		return s.setACL(ctx, c, a.ID, a.Name, nil)
	}
	return s.changeXattr(ctx, c, a.ID, a.Name, func(t *tx, row *schema.Inode, old []byte) error {
		err := s.mayXattr(ctx, s.caller(c), a.ID, row, a.Name, true)
		if err == errPerm && a.Name == schema.XattrCapability {
			if err = s.mayDisarm(ctx, c, a.ID, row); err == nil {
				err = s.disarm(t, c.sess, a.ID)
			}
		}
		if err != nil {
			return err
		}
		if old == nil {
			return errNoData
		}
		dropXattr(t, a.ID, row, a.Name)
		return nil
	})
}

// mayDisarm finds out whether the caller may take file capabilities away without being root: by that a client's kernel
// begins what changes the owner or the contents, and whoever may do that takes them away anyhow.
func (s *Service) mayDisarm(ctx context.Context, c *call, id layout.FileID, row *schema.Inode) error {
	who := s.caller(c)
	if who.Owns(subject(row)) || s.openForWriting(c.sess, id) || s.permission(ctx, who, id, row, metarpc.AccessWrite) == nil {
		return nil
	}
	return errPerm
}

// refuseList is the answer to a list that is none.
func refuseList(err error) error {
	errno := syscall.EINVAL
	switch {
	case errors.Is(err, perm.ErrVersion):
		errno = syscall.EOPNOTSUPP
	case errors.Is(err, perm.ErrTooLong):
		errno = syscall.E2BIG
	}
	return refusef(metarpc.Status(errno), "%v", err)
}

// setACL gives an inode an access control list, or with nil takes it away. One that says no more than a mode becomes that.
func (s *Service) setACL(ctx context.Context, c *call, id layout.FileID, name string, list perm.ACL) (*metarpc.Empty, error) {
	return s.changeXattr(ctx, c, id, name, func(t *tx, row *schema.Inode, old []byte) error {
		who := s.caller(c)
		switch {
		case who.ReadOnly:
			return errReadOnly
		case row.Mode&syscall.S_IFMT == syscall.S_IFLNK:
			return errNotSupported
		case name == schema.XattrDefaultACL && !isDir(row.Mode):
			if list != nil {
				return errAccess
			}
			return nil
		case !who.Owns(subject(row)):
			return errPerm
		}
		keep := list != nil
		if keep {
			if err := list.Check(); err != nil {
				return refuseList(err)
			}
		}
		if keep && name == schema.XattrACL {
			var whole bool
			row.Mode, whole = list.Mode(row.Mode)
			keep = !whole
			row.Mode = who.SetMode(subject(row), row.Mode)
		}
		switch {
		case keep && old == nil && row.Xattrs >= maxXattrs:
			return errNoSpace
		case keep:
			putXattr(t, id, row, name, list.Value(), old != nil)
		case old != nil:
			dropXattr(t, id, row, name)
		}
		return nil
	})
}

// changeXattr changes an attribute's row together with the inode's, which every change of an attribute guards.
func (s *Service) changeXattr(ctx context.Context, c *call, id layout.FileID, name string,
	edit func(t *tx, row *schema.Inode, old []byte) error) (*metarpc.Empty, error) {
	key := schema.XattrKey(id, name)
	arms := false
	r, err := change(ctx, s, c, func(t *tx) (*metarpc.Empty, error) {
		row, raw, err := s.inode(ctx, id)
		if err != nil {
			return nil, err
		}
		old, err := schema.FindRow(ctx, s.engine, key)
		if err != nil {
			return nil, err
		}
		before := row
		if err := edit(t, &row, old); err != nil {
			return nil, err
		}
		arms = gained(&before, &row)
		row.Ctime = now()
		t.GuardEqual(schema.InodeKey(id), raw)
		t.Put(schema.InodeKey(id), schema.Encode(&row))
		t.affects(id, metarpc.LeaseAttrs)
		return &metarpc.Empty{}, nil
	})
	if err == nil && arms {
		err = s.armed(ctx, c.sess, id)
	}
	return r, err
}

// setPolicy sets how files made in a directory from now on are laid out.
func (s *Service) setPolicy(ctx context.Context, c *call, id layout.FileID, policy layout.Policy) (*metarpc.Empty, error) {
	return change(ctx, s, c, func(t *tx) (*metarpc.Empty, error) {
		row, raw, err := s.inode(ctx, id)
		if err != nil {
			return nil, err
		}
		switch who := s.caller(c); {
		case who.ReadOnly:
			return nil, errReadOnly
		case !who.Owns(subject(&row)):
			return nil, errPerm
		case !isDir(row.Mode):
			return nil, refusef(errInvalid.Status, "%s: the layout of a file is settled when it is made; set it on the directory before", xattrLayout)
		}
		if policy.MinCopies != 0 {
			err := schema.Raise(ctx, s.engine, schema.FormatCopies, s.log)
			if old := (*schema.MemberError)(nil); errors.As(err, &old) {
				return nil, refusef(errNotSupported.Status, "%v", err)
			}
			if err != nil {
				return nil, err
			}
		}
		row.Policy = schema.PolicyOf(policy)
		row.Ctime = now()
		t.GuardEqual(schema.InodeKey(id), raw)
		t.Put(schema.InodeKey(id), schema.Encode(&row))
		t.affects(id, metarpc.LeaseAttrs)
		return &metarpc.Empty{}, nil
	})
}

func (s *Service) listXattr(ctx context.Context, c *call, a *metarpc.IDArgs) (*metarpc.NamesResult, error) {
	row, err := s.inodeOrRemoved(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	r := new(metarpc.NamesResult)
	if row.Xattrs == 0 {
		return r, nil
	}
	from, to := xattrRange(a.ID)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			return nil, err
		}
		name := string(kv.Key[len(from):])
		if strings.HasPrefix(name, "trusted.") && !s.caller(c).Privileged {
			continue
		}
		r.Names = append(r.Names, name)
	}
	return r, nil
}
