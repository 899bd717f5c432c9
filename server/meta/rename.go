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
	"github.com/weftfs/weft/server/schema"
)

func (s *Service) rename(ctx context.Context, c *call, a *metarpc.RenameArgs) (*metarpc.Empty, error) {
	moving := false // Service.moving is held
	defer func() {
		if moving {
			s.moving <- struct{}{}
		}
	}()
	who := s.caller(c)
	if who.ReadOnly {
		return nil, errReadOnly
	}
	return change(ctx, s, c, func(t *tx) (*metarpc.Empty, error) {
		from, err := s.place(ctx, who, a.OldParent, a.OldName)
		if err != nil {
			return nil, err
		}
		to, err := s.place(ctx, who, a.NewParent, a.NewName)
		if err != nil {
			return nil, err
		}
		if to.dir == from.dir && to.name == from.name {
			to = from // which may have changed since it was read
		}
		exchange := a.Flags == metarpc.RenameExchange
		if done, err := checkRename(from, to, a.Flags); err != nil || done {
			return &metarpc.Empty{}, err
		}
		if err := s.mayRename(ctx, who, from, to, exchange); err != nil {
			return nil, err
		}
		t.affects(from.dir, metarpc.LeaseAttrs|metarpc.LeaseNames)
		t.affects(to.dir, metarpc.LeaseAttrs|metarpc.LeaseNames)
		if from.dir != to.dir && (from.isDir() || exchange && to.isDir()) {
			if !moving {
				t.holding.end() // nobody waits for this who holds what others wait for
				locked := append(slices.Clone(t.affected), metarpc.LeaseItem{ID: from.entry.ID}, metarpc.LeaseItem{ID: to.entry.ID})
				if err := t.pending.awaitMove(ctx, locked); err != nil {
					return nil, err
				}
				moving = true
			}
			if err := s.guardMove(ctx, t, from, to, exchange); err != nil {
				return nil, err
			}
		}
		from.guard(t)
		to.guard(t)
		at := now()
		if err := s.relocate(ctx, t, from, to, at); err != nil {
			return nil, err
		}
		if exchange {
			return &metarpc.Empty{}, s.exchange(ctx, t, from, to, at)
		}
		t.Delete(from.key)
		touch(t, from.dir, -1, -from.subdirs(), at)
		if to.exists() {
			touch(t, to.dir, 0, from.subdirs()-to.subdirs(), at)
			return &metarpc.Empty{}, s.unlink(ctx, t, to, at)
		}
		touch(t, to.dir, 1, from.subdirs(), at)
		return &metarpc.Empty{}, nil
	})
}

// awaitMove takes Service.moving.
func (p *pending) awaitMove(ctx context.Context, items []metarpc.LeaseItem) error {
	ctx, wait := p.waiting(ctx, items)
	defer wait.End()
	select {
	case <-p.s.moving:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *place) isDir() bool { return p.exists() && p.entry.Type == syscall.S_IFDIR }

// subdirs is what the entry counts among its directory's subdirectories.
func (p *place) subdirs() int64 {
	if p.isDir() {
		return 1
	}
	return 0
}

// checkRename finds what rename(2) refuses whoever asks and whatever the rest of the tree looks like, and whether there is nothing to do.
func checkRename(from, to *place, flags uint32) (done bool, err error) {
	switch {
	case !from.exists():
		return false, errNoEntry
	case flags == metarpc.RenameNoReplace && to.exists():
		return false, errExist
	case flags == metarpc.RenameExchange && !to.exists():
		return false, errNoEntry
	case to.exists() && from.entry.ID == to.entry.ID:
		return true, nil
	case from.entry.ID == to.dir:
		return false, errInvalid // into itself
	case flags == metarpc.RenameExchange && to.entry.ID == from.dir:
		return false, errInvalid
	}
	return false, nil
}

// checkTypes refuses that something takes the place of what is not of its kind.
func checkTypes(from, to *place, exchange bool) error {
	switch {
	case exchange || !to.exists():
	case from.isDir() && !to.isDir():
		return errNotDir
	case !from.isDir() && to.isDir():
		return errIsDir
	}
	return nil
}

// exchange is the other half of a rename that swaps two names.
func (s *Service) exchange(ctx context.Context, t *tx, from, to *place, at int64) error {
	touch(t, from.dir, 0, to.subdirs()-from.subdirs(), at)
	touch(t, to.dir, 0, from.subdirs()-to.subdirs(), at)
	return s.relocate(ctx, t, to, from, at)
}

// relocate adds to t that what is at from gets the name to.
func (s *Service) relocate(ctx context.Context, t *tx, from, to *place, at int64) error {
	row, raw, err := s.inode(ctx, from.entry.ID)
	if errors.Is(err, errStale) {
		return errRetry
	}
	if err != nil {
		return err
	}
	key := schema.InodeKey(from.entry.ID)
	t.GuardEqual(key, raw)
	row.Ctime = at
	if err := s.moveUsage(ctx, t, from.entry.ID, &row, from.dir, to.dir); err != nil {
		return err
	}
	t.Put(key, schema.Encode(&row))
	t.affects(from.entry.ID, metarpc.LeaseAttrs)
	to.put(t, from.entry.ID, row.Mode)
	return nil
}

// guardMove refuses to move a directory below itself and makes t depend on no directory changing its parent meanwhile.
// Removal needs no such care: the directories walked over are not empty, and the last one is guarded by its place.
func (s *Service) guardMove(ctx context.Context, t *tx, from, to *place, exchange bool) error {
	raw, err := schema.FindRow(ctx, s.engine, schema.KeyMoves)
	if err != nil {
		return err
	}
	moves, err := schema.DecodeCounters(schema.KeyMoves, raw)
	if err != nil {
		return err
	}
	t.GuardRow(schema.KeyMoves, raw)
	t.Put(schema.KeyMoves, catalog.EncodeCounters(moves.Field(0)+1))
	if from.isDir() {
		if err := s.notBelow(ctx, to.dir, from.entry.ID); err != nil {
			return err
		}
	}
	if exchange && to.isDir() {
		return s.notBelow(ctx, from.dir, to.entry.ID)
	}
	return nil
}

// maxDepth is where a walk to the root gives up: no path so long can be made through a path name of any system, so
// there must be a loop.
const maxDepth = 1 << 20

// notBelow is EINVAL if dir is top or lies below it.
func (s *Service) notBelow(ctx context.Context, dir, top layout.FileID) error {
	for range maxDepth {
		if dir == top {
			return errInvalid
		}
		if dir == layout.RootID {
			return nil
		}
		row, _, err := s.inode(ctx, dir)
		if errors.Is(err, errStale) {
			return errRetry
		}
		if err != nil {
			return err
		}
		dir = row.Parent
	}
	return fmt.Errorf("directory %d has no way to the root: %w", dir, catalog.ErrCorrupt)
}
