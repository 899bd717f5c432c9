package meta

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// maxLinks is how many names an inode can have, as in ext4.
const maxLinks = 65000

func now() int64 { return time.Now().UnixNano() }

func isDir(mode uint32) bool     { return mode&syscall.S_IFMT == syscall.S_IFDIR }
func isRegular(mode uint32) bool { return mode&syscall.S_IFMT == syscall.S_IFREG }

// inode reads an inode, ESTALE if there is none of that number.
func (s *Service) inode(ctx context.Context, id layout.FileID) (row schema.Inode, raw []byte, err error) {
	raw, err = schema.ReadRow(ctx, s.engine, schema.InodeKey(id), &row)
	if err == nil && raw == nil {
		err = errStale
	}
	return row, raw, err
}

// regular is inode for what only a regular file has.
func (s *Service) regular(ctx context.Context, id layout.FileID) (row schema.Inode, raw []byte, err error) {
	row, raw, err = s.inode(ctx, id)
	if err == nil && !isRegular(row.Mode) {
		err = notRegular(row.Mode)
	}
	return row, raw, err
}

func notRegular(mode uint32) error {
	if isDir(mode) {
		return errIsDir
	}
	return errInvalid
}

// attributes reads what stat(2) shows a session of an inode.
func (s *Service) attributes(ctx context.Context, sess *session, id layout.FileID) (metarpc.Attr, error) {
	reported, err := s.reports(ctx, id)
	if err != nil {
		return metarpc.Attr{}, err
	}
	keys := [][]byte{schema.InodeKey(id), schema.CountersKey(id)}
	raw, err := s.engine.GetMany(ctx, keys)
	if err != nil {
		return metarpc.Attr{}, err
	}
	if raw[0] == nil {
		return metarpc.Attr{}, errStale
	}
	var row schema.Inode
	if err := schema.DecodeRow(keys[0], raw[0], &row); err != nil {
		return metarpc.Attr{}, err
	}
	counters, err := schema.DecodeCounters(keys[1], raw[1])
	if err != nil {
		return metarpc.Attr{}, err
	}
	return s.shownWith(id, attrOf(id, &row, counters, reported[0].to(sess))), nil
}

// attrOf puts together what stat(2) shows: counters are a directory's, reported is of a regular file. A directory's size is the
// number of its entries.
func attrOf(id layout.FileID, row *schema.Inode, counters catalog.Counters, reported report) metarpc.Attr {
	a := metarpc.Attr{
		ID: id, Mode: row.Mode, Nlink: row.Nlink, UID: row.UID, GID: row.GID, Rdev: row.Rdev, Size: row.Size,
		Atime: row.Atime, Mtime: row.Mtime, Ctime: row.Ctime, Btime: row.Btime, Flags: row.Flags,
	}
	switch row.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		a.Nlink = uint32(2 + max(counters.Field(schema.CounterSubdirs), 0))
		a.Size = max(counters.Field(schema.CounterEntries), 0)
		a.Mtime = max(a.Mtime, counters.Field(schema.CounterMtime))
		a.Ctime = max(a.Ctime, counters.Field(schema.CounterCtime))
	case syscall.S_IFREG:
		written := *row
		applyReport(&written, reported, now())
		a.Size, a.Mtime, a.Ctime = written.Size, written.Mtime, written.Ctime
		if reported.writer == nil {
			a.Used = row.Used
		}
	}
	return a
}

// applyReport gives an inode the size and times of a report. It gives the same to who stats a file before and after the
// report is made durable, so that nobody sees the change time move without a change.
//
// Reports of several writers may come in any order, so the later time wins. Only a time in the future gives way: it was
// set by hand, and a write since then replaces it.
func applyReport(row *schema.Inode, r report, now int64) {
	row.Size = max(row.Size, r.end)
	if r.mtime == 0 {
		return
	}
	if row.Mtime > now {
		row.Mtime = r.mtime
	}
	row.Mtime = max(row.Mtime, r.mtime)
	row.Ctime = max(row.Ctime, r.mtime)
}

// applyTimes gives a file the times that its writer has set.
func applyTimes(row *schema.Inode, set metarpc.Times) {
	if set.Mask&metarpc.SetAtime != 0 {
		row.Atime = set.Atime
	}
	if set.Mask&metarpc.SetMtime != 0 {
		row.Mtime = set.Mtime
	}
	row.Ctime = max(row.Ctime, set.Ctime)
}

// touch adds to t that names came to or went from a directory.
func touch(t *tx, dir layout.FileID, entries, subdirs int64, now int64) {
	key := schema.CountersKey(dir)
	if entries != 0 {
		t.Add(key, schema.CounterEntries, entries)
	}
	if subdirs != 0 {
		t.Add(key, schema.CounterSubdirs, subdirs)
	}
	t.Max(key, schema.CounterMtime, now)
	t.Max(key, schema.CounterCtime, now)
}

func (s *Service) getAttr(ctx context.Context, c *call, a *metarpc.IDArgs) (*metarpc.AttrResult, error) {
	if err := s.awaitTold(ctx, a.ID); err != nil {
		return nil, err
	}
	attr, lease, err := s.show(ctx, c.sess, a.ID)
	if errors.Is(err, errStale) {
		if row, ok := s.removed.find(a.ID); ok {
			return &metarpc.AttrResult{Attr: removedAttr(a.ID, &row)}, nil
		}
	}
	return &metarpc.AttrResult{Attr: attr, Lease: lease}, err
}

func (s *Service) readLink(ctx context.Context, _ *call, a *metarpc.IDArgs) (*metarpc.BytesResult, error) {
	row, _, err := s.inode(ctx, a.ID)
	if err == nil && row.Mode&syscall.S_IFMT != syscall.S_IFLNK {
		err = errInvalid
	}
	return &metarpc.BytesResult{Value: []byte(row.Target)}, err
}
