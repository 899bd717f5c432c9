package meta

import (
	"context"
	"errors"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// maxRemoved is how many removed inodes are remembered.
const maxRemoved = 1 << 16

// removedInodes has the inodes that were removed last. Of a directory that a process has open, or is in, the service is not
// told; and who has looked up a name may ask for the attributes of the inode when that is gone already. The zero
// removedInodes is empty. It says something only of inodes that have no row.
type removedInodes struct {
	mu    sync.Mutex
	rows  map[layout.FileID]schema.Inode
	order []layout.FileID // a ring of up to maxRemoved, each of which may have a row
	next  int             // where in order the oldest one is, once that is full
}

// add remembers an inode that is about to be removed, with its last row.
func (r *removedInodes) add(id layout.FileID, row schema.Inode) {
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

// find returns the last row of an inode that has been removed.
func (r *removedInodes) find(id layout.FileID) (row schema.Inode, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	row, ok = r.rows[id]
	return row, ok
}

// swap replaces a row, unless it is not old any more.
func (r *removedInodes) swap(id layout.FileID, old, row schema.Inode) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now, ok := r.rows[id]; !ok || now != old {
		return false
	}
	r.rows[id] = row
	return true
}

// rememberRemoved is called before the removal of an inode is committed, so that nobody finds neither its row nor this.
// A removal that fails leaves its row, and then what is remembered means nothing. counters are those of a directory.
func (s *Service) rememberRemoved(id layout.FileID, row schema.Inode, counters catalog.Counters, at int64) {
	row.Mtime = max(row.Mtime, counters.Field(schema.CounterMtime))
	row.Ctime = at
	row.Xattrs, row.Flags = 0, 0
	row.Target = "" // as it may be long
	s.removed.add(id, row)
}

// removedAttr is what is shown of a removed inode.
func removedAttr(id layout.FileID, row *schema.Inode) metarpc.Attr {
	a := attrOf(id, row, nil, report{})
	a.Nlink = 0
	return a
}

// inodeOrRemoved is inode for what a removed one still has.
func (s *Service) inodeOrRemoved(ctx context.Context, id layout.FileID) (schema.Inode, error) {
	row, _, err := s.inode(ctx, id)
	if errors.Is(err, errStale) {
		if last, ok := s.removed.find(id); ok {
			return last, nil
		}
	}
	return row, err
}

// inRemoved is the answer to what asks for something in a directory that has no row: there is nothing in a removed one. One of another shard
// was there once, or the client would not know it.
func (s *Service) inRemoved(id layout.FileID) error {
	if !s.mine(id) {
		return errNoEntry
	}
	if row, ok := s.removed.find(id); ok && isDir(row.Mode) {
		return errNoEntry
	}
	return errStale
}

// setRemoved is setAttr for a removed inode, which has no data.
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
