package meta

import (
	"context"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

func (s *Service) readDir(ctx context.Context, c *call, a *metarpc.ReadDirArgs) (*metarpc.ReadDirResult, error) {
	names := s.lease(c.sess, a.ID, metarpc.LeaseNames)
	dir, err := s.directory(ctx, a.ID)
	if err == nil {
		err = s.permission(ctx, s.caller(c), a.ID, &dir, metarpc.AccessRead)
	}
	if err != nil {
		s.noNames(c.sess, a.ID, err)
		return nil, err
	}
	cookie := a.Cookie
	for {
		entries, eof, err := s.names(ctx, a.ID, cookie, a.Limit)
		if err != nil {
			return nil, err
		}
		if len(entries) > 0 {
			cookie = entries[len(entries)-1].Cookie
		}
		if entries, err = s.fill(ctx, c.sess, entries); err != nil {
			return nil, err
		}
		if len(entries) > 0 || eof { // else all of them were removed since
			return &metarpc.ReadDirResult{Entries: entries, EOF: eof, Names: names}, nil
		}
	}
}

// names reads the entries after cookie: limit of them, and those with the same cookie as the last. Of the attributes it
// sets the number and the type.
func (s *Service) names(ctx context.Context, dir layout.FileID, cookie uint64, limit int) (entries []metarpc.DirEntry, eof bool, err error) {
	from, to := schema.EntriesAfter(dir, cookie)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, false, err
		}
		_, cookie, name := schema.EntryOf(kv.Key)
		if len(entries) >= limit && cookie != entries[len(entries)-1].Cookie {
			return entries, false, nil
		}
		var row schema.Entry
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return nil, false, err
		}
		entries = append(entries, metarpc.DirEntry{Name: name, Cookie: cookie, Attr: metarpc.Attr{ID: row.ID, Mode: row.Type}})
	}
	return entries, true, nil
}

// typeOnly reports whether nothing but number and type is told of an entry, as another service knows the rest.
func (s *Service) typeOnly(e *metarpc.DirEntry) bool {
	return !s.mine(e.Attr.ID) && e.Attr.Mode != syscall.S_IFDIR
}

// fill gives entries their attributes, and drops those whose inode is gone.
func (s *Service) fill(ctx context.Context, sess *session, entries []metarpc.DirEntry) ([]metarpc.DirEntry, error) {
	ids := make([]layout.FileID, len(entries))
	keys := make([][]byte, 0, len(entries))
	for i := range entries {
		ids[i] = entries[i].Attr.ID
		if s.typeOnly(&entries[i]) {
			continue
		}
		keys = append(keys, schema.InodeKey(ids[i]))
		if entries[i].Attr.Mode == syscall.S_IFDIR {
			keys = append(keys, schema.CountersKey(ids[i]))
		}
	}
	s.mu.Lock()
	for i := range entries {
		// Not all that there can be, so that going through large directories leaves room for what is used.
		entries[i].Lease = s.leaseUpTo(s.cfg.Leases/2, sess, ids[i], metarpc.LeaseAttrs)
	}
	s.mu.Unlock()
	if err := s.settleSize(ctx, sess, ids...); err != nil {
		return nil, err
	}
	reported, err := s.reports(ctx, ids...)
	if err != nil {
		return nil, err
	}
	raw, err := s.engine.GetMany(ctx, keys)
	if err != nil {
		return nil, err
	}
	filled := entries[:0]
	at := 0
	for i, e := range entries {
		if s.typeOnly(&e) {
			filled = append(filled, e)
			continue
		}
		inode := at
		at++
		var counters catalog.Counters
		if e.Attr.Mode == syscall.S_IFDIR {
			if counters, err = schema.DecodeCounters(keys[at], raw[at]); err != nil {
				return nil, err
			}
			at++
		}
		if raw[inode] == nil {
			s.noLease(sess, ids[i])
			continue
		}
		var row schema.Inode
		if err := schema.DecodeRow(keys[inode], raw[inode], &row); err != nil {
			return nil, err
		}
		e.Attr = s.shownWith(ids[i], attrOf(ids[i], &row, counters, reported[i].to(sess)))
		filled = append(filled, e)
	}
	return filled, nil
}
