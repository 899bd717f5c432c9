package meta

import (
	"context"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// tmpFile makes a file that starts as an orphan. The directory decides about everything but is not changed.
func (s *Service) tmpFile(ctx context.Context, c *call, a *metarpc.TmpFileArgs) (*metarpc.CreateResult, error) {
	return change(ctx, s, c, func(t *tx) (*metarpc.CreateResult, error) {
		who := s.caller(c)
		dir, err := s.directory(ctx, a.Parent)
		if err != nil {
			return nil, err
		}
		p := &place{dir: a.Parent, parent: dir}
		if err := s.mayInsert(ctx, who, p); err != nil {
			return nil, err
		}
		id, err := s.numbers.take(ctx, s.cfg.Shard)
		if err != nil {
			return nil, err
		}
		n, err := s.newInode(ctx, who, p, syscall.S_IFREG|a.Mode, a.Umask, now())
		if err != nil {
			return nil, err
		}
		n.row.Nlink, n.row.Linkable = 0, true
		n.row.Policy = s.policy(&dir)
		if err := s.quotas.AdmitNew(ctx, 0, &n.row); err != nil {
			return nil, err
		}
		s.openNew(t, c.sess, id)
		s.mu.Lock()
		s.file(id).orphan = true
		s.mu.Unlock()
		t.Grows = true
		n.put(t, id)
		t.GuardPresent(schema.InodeKey(a.Parent))
		t.Put(schema.InodeKey(id), schema.Encode(&n.row))
		t.Put(schema.OrphanKey(id), nil)
		t.Charge(&n.row, 1)
		return &metarpc.CreateResult{Attr: attrOf(id, &n.row, nil, report{}), Created: true}, nil
	})
}

// beginNaming keeps a file without names, should id be one, from being removed until t's outcome is known. If that is
// that it has a name, the last close is none of its business any more.
func (s *Service) beginNaming(ctx context.Context, t *tx, id layout.FileID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[id]
	for f != nil && f.removing {
		if err := s.wait(ctx, f); err != nil {
			return err
		}
		f = s.files[id]
	}
	if f == nil || !f.orphan {
		return nil
	}
	f.removing = true
	t.onOutcome(func(committed bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.removing = false
		f.orphan = f.orphan && !committed
		s.changedFile(f)
	})
	return nil
}
