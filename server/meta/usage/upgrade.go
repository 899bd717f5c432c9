package usage

import (
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// upgrade gives a catalog of an earlier format the rows of usage, before anybody serves it. What it puts follows from
// the rest of the catalog, and earlier versions do not mind it, so it begins anew after a crash; that it is done is the
// volume's format. In memory it has owners, and the numbers of files with several names.
type upgrade struct {
	engine catalog.Engine
	volume []byte // as stored; every batch guards it
	batch  catalog.Batch
	owners map[[2]uint32]Sum
	many   map[layout.FileID]struct{} // files with several names that have got a home
	dirs   int64
}

// Upgrade gives the catalog of a volume whose format is from before usage was counted the rows of usage, and the volume
// the format that has them. raw is the row of the volume. Nobody serves the volume meanwhile.
func Upgrade(ctx context.Context, engine catalog.Engine, raw []byte, vol schema.Volume) (schema.Volume, error) {
	began := time.Now()
	slog.Info("the catalog is of an earlier version: its usage is counted once", "volume", fmt.Sprintf("%x", vol.ID), "format", vol.Format)
	u := &upgrade{engine: engine, volume: raw, owners: map[[2]uint32]Sum{}, many: map[layout.FileID]struct{}{}}
	for _, step := range []func(context.Context) error{u.clear, u.homes, u.inodes} {
		if err := step(ctx); err != nil {
			return vol, err
		}
	}
	inodes := int64(0)
	for owner, n := range u.owners {
		inodes += n.Files
		u.batch.Put(schema.OwnerKey(owner[0], owner[1], 0), catalog.EncodeCounters(n.Bytes, n.Files))
		if err := u.commit(ctx, false); err != nil {
			return vol, err
		}
	}
	vol.AddUsage()
	if err := schema.RaiseFormat(ctx, engine, &u.batch, vol.Format); err != nil {
		return vol, err
	}
	u.batch.Put(schema.KeyVolume, schema.Encode(&vol))
	err := u.commit(ctx, true)
	if err == nil {
		slog.Info("usage is counted", "inodes", inodes, "directories", u.dirs, "owners", len(u.owners), "took", time.Since(began).Round(time.Millisecond))
	}
	return vol, err
}

// commit commits what has been collected, if that is much or the last.
func (u *upgrade) commit(ctx context.Context, last bool) error {
	caps := u.engine.Caps()
	if !last && u.batch.Len() < min(1000, caps.MaxKeys/2) && u.batch.Bytes() < caps.MaxBatchBytes/2 {
		return nil
	}
	u.batch.GuardEqual(schema.KeyVolume, u.volume)
	if !last {
		u.batch.Durability = catalog.NoSync
	}
	err := u.engine.Commit(ctx, &u.batch)
	u.batch.Reset()
	return err
}

// clear takes away what an upgrade that was not finished has left, and earlier versions may have made wrong since.
func (u *upgrade) clear(ctx context.Context) error {
	for kv, err := range u.scan(ctx, schema.PrefixCounters) {
		if err != nil {
			return err
		}
		if c, err := schema.DecodeCounters(kv.Key, kv.Value); err != nil {
			return err
		} else if len(c) > schema.CounterBytes {
			u.batch.Put(append([]byte(nil), kv.Key...), catalog.EncodeCounters(c[:schema.CounterBytes]...))
		}
		if err := u.commit(ctx, false); err != nil {
			return err
		}
	}
	for kv, err := range u.scan(ctx, schema.PrefixOwner) {
		if err != nil {
			return err
		}
		u.batch.Delete(append([]byte(nil), kv.Key...))
		if err := u.commit(ctx, false); err != nil {
			return err
		}
	}
	return u.commit(ctx, true)
}

func (u *upgrade) scan(ctx context.Context, prefix byte) func(func(catalog.Row, error) bool) {
	from, to := schema.Of(prefix)
	return u.engine.Scan(ctx, from, to, catalog.ScanOptions{})
}

// homes gives every file with a name a home, and directories their own usage. They tell their parents when the volume
// is served.
func (u *upgrade) homes(ctx context.Context) error {
	dir, n := layout.FileID(0), Sum{}
	for kv, err := range u.scan(ctx, schema.PrefixEntry) {
		if err != nil {
			return err
		}
		in, _, _ := schema.EntryOf(kv.Key)
		if in != dir {
			if err := u.directory(ctx, dir, n); err != nil {
				return err
			}
			dir, n = in, Sum{}
		}
		var entry schema.Entry
		if err := schema.DecodeRow(kv.Key, kv.Value, &entry); err != nil {
			return err
		}
		if entry.Type == syscall.S_IFDIR {
			continue
		}
		key := schema.InodeKey(entry.ID)
		var row schema.Inode
		raw, err := schema.ReadRow(ctx, u.engine, key, &row)
		if err != nil {
			return err
		}
		if raw == nil {
			continue // which fsck tells
		}
		if row.Nlink > 1 {
			if _, ok := u.many[entry.ID]; ok {
				continue
			}
			u.many[entry.ID] = struct{}{}
		}
		if row.Parent != dir {
			row.Parent = dir
			u.batch.Put(key, schema.Encode(&row))
		}
		n = n.Plus(Sum{Bytes: row.Size, Files: 1})
		if err := u.commit(ctx, false); err != nil {
			return err
		}
	}
	if err := u.directory(ctx, dir, n); err != nil {
		return err
	}
	return u.commit(ctx, true)
}

// directory puts what is in a directory.
func (u *upgrade) directory(ctx context.Context, dir layout.FileID, n Sum) error {
	if dir == 0 {
		return nil
	}
	key := schema.CountersKey(dir)
	c, err := schema.ReadCounters(ctx, u.engine, dir)
	if err != nil {
		return err
	}
	for len(c) <= schema.CounterFiles {
		c = append(c, 0)
	}
	c[schema.CounterBytes], c[schema.CounterFiles] = n.Bytes, n.Files
	u.batch.Put(key, catalog.EncodeCounters(c...))
	if dir != layout.RootID {
		u.batch.Put(schema.DirtyKey(dir), catalog.EncodeCounters(1))
	}
	u.dirs++
	return u.commit(ctx, false)
}

// inodes counts what belongs to whom. What has no name has no home.
func (u *upgrade) inodes(ctx context.Context) error {
	for kv, err := range u.scan(ctx, schema.PrefixInode) {
		if err != nil {
			return err
		}
		var row schema.Inode
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return err
		}
		owner := [2]uint32{row.UID, row.GID}
		u.owners[owner] = u.owners[owner].Plus(Sum{Bytes: row.ChargedBytes(), Files: 1})
		if !row.IsDir() && row.Nlink == 0 && row.Parent != 0 {
			row.Parent = 0
			u.batch.Put(append([]byte(nil), kv.Key...), schema.Encode(&row))
			if err := u.commit(ctx, false); err != nil {
				return err
			}
		}
	}
	return u.commit(ctx, true)
}
