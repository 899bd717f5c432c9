package meta

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// verify compares the copies of a range of a file while nobody writes there, and has those made anew that are found to be wrong.
func (s *Service) verify(ctx context.Context, c *call, a *metarpc.VerifyArgs) (*metarpc.VerifyResult, error) {
	err := s.admin(c)
	if err == nil {
		err = s.awaitGrace(ctx)
	}
	if err != nil {
		return nil, err
	}
	ino, _, err := s.regular(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	var row schema.Layout
	if _, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(a.ID), &row); err != nil {
		return nil, err
	}
	r := &metarpc.VerifyResult{Next: layout.ToEOF, Size: ino.Size, Stale: len(row.Copies(layout.CopyStale))+len(row.Copies(layout.CopyFilling)) > 0}
	if len(row.Mirrors) < 2 {
		return r, nil // its writers are not troubled
	}
	err = s.gated(ctx, a.ID, layout.Range{Off: a.Off, Len: a.Len}, func(ctx context.Context) error {
		ino, _, err := s.regular(ctx, a.ID) // which has all that was written in the range
		if err != nil {
			return err
		}
		if r.Size = ino.Size; a.Off < ino.Size {
			n := min(a.Len, ino.Size-a.Off)
			r.Copies, r.Differ, err = s.cfg.Files.Compare(ctx, a.ID, a.Off, n)
			if n == a.Len {
				r.Next = a.Off + n
			}
		}
		return err
	})
	if _, _, gone := s.inode(ctx, a.ID); err != nil && errors.Is(gone, errStale) {
		return nil, errStale // it was removed meanwhile
	}
	if e := (*metarpc.Error)(nil); err != nil && ctx.Err() == nil && !errors.As(err, &e) {
		return nil, refusef(metarpc.Status(syscall.EIO), "inode %d: its copies at %d cannot be compared: %v", a.ID, a.Off, err)
	}
	if err != nil || len(r.Differ) == 0 {
		return r, err
	}
	s.log.Error("copies of a file differ", "inode", a.ID, "offset", r.Differ[0].Off, "places", len(r.Differ))
	if !a.Repair {
		return r, nil
	}
	var bad []metarpc.CopyRef
	for _, d := range r.Differ {
		for _, ref := range d.Bad {
			if !slices.ContainsFunc(bad, func(o metarpc.CopyRef) bool { return sameCopy(o, ref) }) {
				bad = append(bad, ref)
			}
		}
	}
	kept, err := s.giveUp(ctx, a.ID, bad)
	r.Repaired = err == nil && !kept
	return r, err
}
