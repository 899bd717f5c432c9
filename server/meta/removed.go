package meta

import (
	"context"
	"errors"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
)

// maxRemoved is how many removed directories are remembered.
const maxRemoved = 1 << 16

// removedDirs has the directories that were removed last, since a process may still have one open or be in it, of which
// the service is not told. The zero removedDirs is empty. It says something only of inodes that have no row.
type removedDirs struct {
	mu    sync.Mutex
	rows  map[layout.FileID]schema.Inode
	order []layout.FileID // a ring of up to maxRemoved, each of which may have a row
	next  int             // where in order the oldest one is, once that is full
}

// add remembers a directory that is about to be removed, with its last row.
func (r *removedDirs) add(id layout.FileID, row schema.Inode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rows == nil {
		r.rows = map[layout.FileID]schema.Inode{}
	}
	_, known := r.rows[id]
	r.rows[id] = row
	switch {
	case known:
	case len(r.order) < maxRemoved:
		r.order = append(r.order, id)
	default:
		delete(r.rows, r.order[r.next])
		r.order[r.next] = id
		r.next = (r.next + 1) % maxRemoved
	}
}

// find returns the last row of a directory that has been removed.
func (r *removedDirs) find(id layout.FileID) (row schema.Inode, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	row, ok = r.rows[id]
	return row, ok
}

// swap replaces a row, unless it is not old any more.
func (r *removedDirs) swap(id layout.FileID, old, row schema.Inode) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now, ok := r.rows[id]; !ok || now != old {
		return false
	}
	r.rows[id] = row
	return true
}

// rememberRemoved is called before the removal of a directory is committed, so that nobody finds neither its row nor this.
// A removal that fails leaves its row, and then what is remembered means nothing.
func (s *Service) rememberRemoved(id layout.FileID, row schema.Inode, counters catalog.Counters, at int64) {
	row.Mtime = max(row.Mtime, counters.Field(schema.CounterMtime))
	row.Ctime = at
	row.Xattrs, row.Flags = 0, 0
	s.removed.add(id, row)
}

// removedAttr is what is shown of a removed directory.
func removedAttr(id layout.FileID, row *schema.Inode) metarpc.Attr {
	a := attrOf(id, row, nil, report{})
	a.Nlink = 0
	return a
}

// inodeOrRemoved is inode for what a removed directory still has.
func (s *Service) inodeOrRemoved(ctx context.Context, id layout.FileID) (schema.Inode, error) {
	row, _, err := s.inode(ctx, id)
	if errors.Is(err, errStale) {
		if last, ok := s.removed.find(id); ok {
			return last, nil
		}
	}
	return row, err
}

// inRemoved is the answer to what asks for something in a directory that has no row: there is nothing in a removed one.
func (s *Service) inRemoved(id layout.FileID) error {
	if _, ok := s.removed.find(id); ok {
		return errNoEntry
	}
	return errStale
}

// setRemoved is setAttr for a removed directory.
func (s *Service) setRemoved(ctx context.Context, c *call, a *metarpc.SetAttrArgs) (*metarpc.AttrResult, error) {
	for {
		before, ok := s.removed.find(a.ID)
		if !ok {
			return nil, errStale
		}
		row := before
		if err := s.maySet(ctx, c, &row, a); err != nil {
			return nil, err
		}
		if err := s.set(ctx, new(tx), s.caller(c), &row, a, now()); err != nil {
			return nil, err
		}
		if s.removed.swap(a.ID, before, row) {
			return &metarpc.AttrResult{Attr: removedAttr(a.ID, &row)}, nil
		}
	}
}
