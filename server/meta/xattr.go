package meta

import (
	"context"
	"errors"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
)

const (
	// xattrLayout is the attribute that shows and sets how files are laid out. It has no row and is not listed, so that
	// copying a tree with its attributes does not copy it.
	xattrLayout = "weft.layout"

	// maxXattrs is how many attributes an inode can have: so many names, of any length, fit what listxattr(2) can return.
	maxXattrs = 256
)

func xattrRange(id layout.FileID) (from, to []byte) { return schema.Of(schema.XattrKey(id, "")...) }

func (s *Service) getXattr(ctx context.Context, _ *call, a *metarpc.XattrArgs) (*metarpc.BytesResult, error) {
	if a.Name == xattrLayout {
		return s.getLayoutXattr(ctx, a.ID)
	}
	value, err := s.engine.Get(ctx, schema.XattrKey(a.ID, a.Name))
	if errors.Is(err, catalog.ErrNotFound) {
		if _, _, err := s.inode(ctx, a.ID); err != nil {
			return nil, err
		}
		return nil, errNoData
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
		raw, err := s.get(ctx, schema.LayoutKey(id), &l)
		if err != nil {
			return nil, err
		}
		if raw != nil {
			policy = layout.Policy{StripeUnit: l.StripeUnit, StripeCount: l.Width, Mirrors: len(l.Mirrors)}
		}
	default:
		return nil, errNoData
	}
	return &metarpc.BytesResult{Value: []byte(policy.String())}, nil
}

func (s *Service) setXattr(ctx context.Context, c *call, a *metarpc.XattrArgs) (*metarpc.Empty, error) {
	if a.Name == xattrLayout {
		policy, err := layout.ParsePolicy(string(a.Value))
		if err != nil {
			return nil, refusef(errInvalid.Status, "%v", err)
		}
		if a.Flags == metarpc.XattrCreate {
			return nil, errExist
		}
		return s.setPolicy(ctx, c, a.ID, policy)
	}
	key := schema.XattrKey(a.ID, a.Name)
	return s.changeXattr(ctx, c, a.ID, key, func(t *tx, row *schema.Inode, old []byte) error {
		switch {
		case old != nil && a.Flags&metarpc.XattrCreate != 0:
			return errExist
		case old == nil && a.Flags&metarpc.XattrReplace != 0:
			return errNoData
		case old == nil && row.Xattrs >= maxXattrs:
			return errNoSpace
		case old == nil:
			row.Xattrs++
		}
		t.Put(key, a.Value)
		return nil
	})
}

func (s *Service) removeXattr(ctx context.Context, c *call, a *metarpc.XattrArgs) (*metarpc.Empty, error) {
	if a.Name == xattrLayout {
		return s.setPolicy(ctx, c, a.ID, layout.Policy{})
	}
	key := schema.XattrKey(a.ID, a.Name)
	return s.changeXattr(ctx, c, a.ID, key, func(t *tx, row *schema.Inode, old []byte) error {
		if old == nil {
			return errNoData
		}
		row.Xattrs--
		t.Delete(key)
		return nil
	})
}

// changeXattr changes an attribute's row together with the inode's, which every change of an attribute guards.
func (s *Service) changeXattr(ctx context.Context, c *call, id layout.FileID, key []byte,
	edit func(t *tx, row *schema.Inode, old []byte) error) (*metarpc.Empty, error) {
	return change(ctx, s, c, func(t *tx) (*metarpc.Empty, error) {
		row, raw, err := s.inode(ctx, id)
		if err != nil {
			return nil, err
		}
		old, err := s.engine.Get(ctx, key)
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return nil, err
		}
		if err := edit(t, &row, old); err != nil {
			return nil, err
		}
		row.Ctime = now()
		t.GuardEqual(schema.InodeKey(id), raw)
		t.Put(schema.InodeKey(id), schema.Encode(&row))
		t.affects(id, metarpc.LeaseAttrs)
		return &metarpc.Empty{}, nil
	})
}

// setPolicy sets how files made in a directory from now on are laid out.
func (s *Service) setPolicy(ctx context.Context, c *call, id layout.FileID, policy layout.Policy) (*metarpc.Empty, error) {
	return change(ctx, s, c, func(t *tx) (*metarpc.Empty, error) {
		row, raw, err := s.inode(ctx, id)
		if err != nil {
			return nil, err
		}
		if !isDir(row.Mode) {
			return nil, refusef(errInvalid.Status, "%s: the layout of a file is settled when it is made; set it on the directory before", xattrLayout)
		}
		row.Policy = schema.PolicyOf(policy)
		row.Ctime = now()
		t.GuardEqual(schema.InodeKey(id), raw)
		t.Put(schema.InodeKey(id), schema.Encode(&row))
		t.affects(id, metarpc.LeaseAttrs)
		return &metarpc.Empty{}, nil
	})
}

func (s *Service) listXattr(ctx context.Context, _ *call, a *metarpc.IDArgs) (*metarpc.NamesResult, error) {
	row, _, err := s.inode(ctx, a.ID)
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
		r.Names = append(r.Names, string(kv.Key[len(from):]))
	}
	return r, nil
}
