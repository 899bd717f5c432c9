package meta

import (
	"context"
	"errors"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// writtenEnds says of each file that somebody may be writing how far it was asked to be written, or reported.
func (s *Service) writtenEnds() map[layout.FileID]int64 {
	ends := map[layout.FileID]int64{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, f := range s.files {
		if end := max(f.reach, f.reported().end, f.placedEnd()); end > 0 && f.writtenByOthers(nil) {
			ends[id] = end
		}
	}
	return ends
}

// recallUnlimited takes layouts for writing back that were granted before there was a quota, or with more of it.
func (s *Service) recallUnlimited() {
	var ids []layout.FileID
	s.mu.Lock()
	for id, f := range s.files {
		if f.writtenByOthers(nil) {
			ids = append(ids, id)
		}
	}
	s.mu.Unlock()
	each(ids, func(id layout.FileID) {
		if err := s.recallOver(id); err != nil && s.ctx.Err() == nil {
			s.log.Warn("layouts from before a quota not given back", "inode", id, "error", err)
		}
	})
}

func (s *Service) recallOver(id layout.FileID) error {
	if err := s.quotas.Refresh(s.ctx); err != nil {
		return err
	}
	row, _, err := s.inode(s.ctx, id)
	if err != nil {
		return nil // it is gone
	}
	if limited, err := s.quotas.LimitsBytes(s.ctx, &row); err != nil || !limited {
		return err
	}
	s.mu.Lock()
	f := s.file(id)
	f.waiters++ // so that the record stays
	s.mu.Unlock()
	err = s.recallLayouts(s.ctx, f, layout.Range{Len: layout.ToEOF}, func(cl *claim) bool { return cl.writer })
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiters--
	s.changedFile(f)
	return err
}

func (s *Service) quotaSet(ctx context.Context, c *call, a *metarpc.QuotaSetArgs) (*metarpc.Empty, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	if err := s.quotas.Refresh(ctx); err != nil { // what there was before: who relies on that is recalled
		return nil, err
	}
	key := schema.QuotaKey(a.Name)
	_, err := change(ctx, s, nil, func(t *tx) (*struct{}, error) {
		if a.Name.Kind == metarpc.QuotaTree {
			id := layout.FileID(a.Name.ID)
			if _, err := s.directory(ctx, id); err != nil {
				return nil, err
			}
			t.GuardPresent(schema.InodeKey(id))
		}
		var row schema.Quota
		raw, err := schema.ReadRow(ctx, s.engine, key, &row)
		if err != nil {
			return nil, err
		}
		t.GuardRow(key, raw)
		if a.Bytes != metarpc.QuotaKeep {
			row.Bytes = a.Bytes
		}
		if a.Files != metarpc.QuotaKeep {
			row.Files = a.Files
		}
		if row.Bytes == 0 && row.Files == 0 {
			t.Delete(key)
		} else {
			t.Put(key, schema.Encode(&row))
		}
		return nil, nil
	})
	if err == nil {
		err = s.quotas.Settle(ctx)
	}
	return &metarpc.Empty{}, err
}

func (s *Service) quotaList(ctx context.Context, c *call, a *metarpc.QuotasArgs) (*metarpc.QuotasResult, error) {
	if err := s.admin(c); err != nil && !errors.Is(err, errReadOnly) {
		return nil, err
	}
	r, err := s.quotas.List(ctx, a)
	if err != nil || a.After || len(r.Quotas) > 0 {
		return r, err
	}
	if a.Name.Kind == metarpc.QuotaTree {
		if _, err := s.directory(ctx, layout.FileID(a.Name.ID)); err != nil {
			return nil, err
		}
	}
	info, err := s.quotas.Unlimited(ctx, a.Name)
	if err != nil {
		return nil, err
	}
	r.Quotas = []metarpc.QuotaInfo{info}
	return r, nil
}

// limitSpace makes what is said of the space of the volume what a directory tree may have in which the inode is.
func (s *Service) limitSpace(ctx context.Context, id layout.FileID, r *metarpc.StatFSResult) error {
	if trees, err := s.quotas.OfTrees(ctx); err != nil || !trees {
		return err
	}
	row, err := s.inodeOrRemoved(ctx, id)
	if err != nil {
		return err
	}
	home := id
	if !row.IsDir() {
		home = row.Parent
	}
	return s.quotas.LimitSpace(ctx, home, r)
}

// moveUsage gives what has got a name in another directory that one for its parent or home. Its row is the caller's to
// put.
func (s *Service) moveUsage(ctx context.Context, t *tx, id layout.FileID, row *schema.Inode, from, to layout.FileID) error {
	switch {
	case from == to:
	case isDir(row.Mode), row.Parent == from, row.Parent == 0:
		limited, err := s.quotas.AdmitMoved(ctx, id, row, from, to)
		if err != nil {
			return err
		}
		dir := isDir(row.Mode)
		t.onOutcome(func(committed bool) {
			if dir {
				s.usage.ForgetParents()
			}
			if limited && committed {
				s.tasks.Go(s.recallUnlimited) // ends when all have answered, or with s.ctx
			}
		})
		if !dir {
			t.Rehome(row, to)
			return nil
		}
		row.Parent = to
		return s.usage.TakeBack(ctx, &t.Change, id, from, to)
	}
	return nil
}
