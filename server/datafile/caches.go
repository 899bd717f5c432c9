package datafile

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

var (
	// ErrNoRoom: the device has not enough space for a cache. Its errno is ENOSPC.
	ErrNoRoom = fmt.Errorf("no room for it: %w", syscall.ENOSPC)
	// ErrOtherCache: the device has a cache of the file that is not full, and somebody else fills. Its errno is EBUSY.
	ErrOtherCache = fmt.Errorf("somebody else copies the file there: %w", syscall.EBUSY)
)

// CacheRoom says why a device cannot take a cache of n bytes now. pending are the bytes of the caches there that are not full.
// A device keeps as much free space as one needs to get new data files at all (see room).
func (m *Manager) CacheRoom(id layout.DeviceID, n, pending int64) error {
	d, err := m.device(id)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at := placeOf(&d.row)
	switch {
	case d.space != nil:
		return fmt.Errorf("%v is a namespace, and caches lie on data servers: %w", at, ErrNoDevice)
	case d.row.Draining:
		return fmt.Errorf("data server %v is drained: %w", at, ErrNoDevice)
	case d.condition != up:
		return fmt.Errorf("data server %v cannot be reached: %w", at, ErrNoDevice)
	case d.room() == none && !d.full():
		return fmt.Errorf("data server %v: %w: %w", at, ErrNoDevice, d.refusal())
	}
	s := &d.stat
	left := clip(s.AvailBytes) - clip(s.TotalBytes/100) - max(pending, d.cached[0]+d.cached[1])
	if d.room() != plenty || s.TotalBytes > 0 && n > left {
		return fmt.Errorf("data server %v: %w", at, ErrNoRoom)
	}
	return nil
}

// StartCache gives a file a data file on a device that is to have all of its n bytes, in state filling. Asked again by the
// same session it returns the same one: what an earlier try may still write there is what the file has. Nobody may have a layout
// for writing the file meanwhile. ok is false if the file has no data.
//
// Errors that callers can tell apart: ErrNoDevice, ErrNoRoom, ErrOtherCache.
func (m *Manager) StartCache(ctx context.Context, id layout.FileID, dev layout.DeviceID, n int64, session metarpc.SessionID) (cache schema.Cache, ok bool, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return cache, false, err
	}
	defer unlock()
	file, err := m.takeOne(ctx, dev)
	if err != nil {
		return cache, false, fmt.Errorf("cache of inode %d: %w", id, err)
	}
	used := false
	var refused error
	err = m.relayout(ctx, id, func(b *catalog.Batch, row *schema.Layout) bool {
		refused, used, ok = nil, false, columns(row) > 0
		if !ok {
			return false
		}
		for i := range row.Caches {
			old := &row.Caches[i]
			switch {
			case old.File.Device != dev:
			case old.File.State == layout.CopyFilling && old.Session == session && old.Bytes == n:
				cache, used = *old, old.File.Number == file.Number // by a try whose outcome was not known
				return false
			default:
				refused = ErrOtherCache
				return false
			}
		}
		file.State = layout.CopyFilling
		cache = schema.Cache{File: file, Bytes: n, Session: session}
		row.Caches = append(row.Caches, cache)
		b.Grows = true
		b.GuardPresent(schema.GarbageKey(dev, file.Number))
		b.Delete(schema.GarbageKey(dev, file.Number))
		b.Add(schema.InUseKey(dev), 0, 1)
		used = true
		return true
	})
	switch {
	case err != nil:
		m.sortOut(id, []schema.DataFile{file})
		return cache, false, fmt.Errorf("cache of inode %d: %w", id, err)
	case used:
		m.release([]schema.DataFile{file})
		m.promise(dev, n)
	default:
		m.putBack([]schema.DataFile{file})
	}
	return cache, ok, refused
}

// takeOne takes a data file out of a device's pool, waiting for it as long as the device can make one.
func (m *Manager) takeOne(ctx context.Context, id layout.DeviceID) (schema.DataFile, error) {
	for {
		d, err := m.device(id)
		if err == nil {
			err = m.CacheRoom(id, 0, 0)
		}
		if err != nil {
			return schema.DataFile{}, err
		}
		m.mu.Lock()
		if len(d.pool) > 0 {
			file := d.next()
			m.mu.Unlock()
			return file, nil
		}
		d.demand = max(d.demand, 1)
		kick(d.refill)
		changed := m.changed
		m.mu.Unlock()
		if err := m.wait(ctx, changed); err != nil {
			return schema.DataFile{}, fmt.Errorf("wait for a new data file: %w", err)
		}
	}
}

// promise counts what is going to be written to a device that it does not tell yet.
func (m *Manager) promise(id layout.DeviceID, n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := m.find(id); d != nil {
		d.cached[0] += n
	}
}

// EndCache makes the cache that session has filled good. It reports false if the file has it no longer.
func (m *Manager) EndCache(ctx context.Context, id layout.FileID, ref metarpc.CopyRef, session metarpc.SessionID) (good bool, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return false, err
	}
	defer unlock()
	err = m.relayout(ctx, id, func(_ *catalog.Batch, row *schema.Layout) bool {
		good = false
		for i := range row.Caches {
			c := &row.Caches[i]
			if !c.File.Is(ref) {
				continue
			}
			if good = c.File.State == layout.CopyGood; good {
				return false
			}
			if good = c.File.State == layout.CopyFilling && c.Session == session; good {
				c.File.State, c.Session, c.Made = layout.CopyGood, metarpc.SessionID{}, time.Now().UnixNano()
				return true
			}
		}
		return false
	})
	if err != nil {
		return false, fmt.Errorf("cache of inode %d is full: %w", id, err)
	}
	return good, nil
}

// StaleCaches ends caches of a file, durably: those that were being filled are garbage, which nobody has read, the others are stale until
// DiscardCaches is called. It returns the caches that such holds of, as they were, and those that it does not.
func (m *Manager) StaleCaches(ctx context.Context, id layout.FileID, such func(*schema.Cache) bool) (ended, kept []schema.Cache, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	err = m.relayout(ctx, id, func(b *catalog.Batch, row *schema.Layout) bool {
		ended, kept = nil, nil
		var left []schema.Cache
		changed := false
		for _, c := range row.Caches {
			if !such(&c) {
				kept, left = append(kept, c), append(left, c)
				continue
			}
			ended = append(ended, c)
			changed = changed || c.File.State != layout.CopyStale
			if c.File.State == layout.CopyFilling {
				m.discardFile(b, &c.File)
				continue
			}
			c.File.State = layout.CopyStale
			left = append(left, c)
		}
		row.Caches = left
		return changed
	})
	if err != nil {
		return nil, nil, fmt.Errorf("end caches of inode %d: %w", id, err)
	}
	return ended, kept, nil
}

// DiscardCaches makes garbage of stale caches that nobody reads any more.
func (m *Manager) DiscardCaches(ctx context.Context, id layout.FileID, refs []metarpc.CopyRef) error {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	err = m.relayout(ctx, id, func(b *catalog.Batch, row *schema.Layout) bool {
		before := len(row.Caches)
		row.Caches = slices.DeleteFunc(row.Caches, func(c schema.Cache) bool {
			over := c.File.State == layout.CopyStale && slices.ContainsFunc(refs, func(ref metarpc.CopyRef) bool { return c.File.Is(ref) })
			if over {
				m.discardFile(b, &c.File)
			}
			return over
		})
		return len(row.Caches) < before
	})
	if err != nil {
		return fmt.Errorf("caches of inode %d that nobody reads: %w", id, err)
	}
	m.Kick()
	return nil
}

// discardFile adds to b what makes a data file of a layout garbage.
func (m *Manager) discardFile(b *catalog.Batch, file *schema.DataFile) {
	b.Put(schema.GarbageKey(file.Device, file.Number), m.mark())
	b.Add(schema.InUseKey(file.Device), 0, -1)
}

// putCaches keeps the rows of caches by device in step with a layout that is changed from old to now.
func putCaches(b *catalog.Batch, id layout.FileID, old, now []schema.Cache) {
	for i := range old {
		dev := old[i].File.Device
		if !slices.ContainsFunc(now, func(c schema.Cache) bool { return c.File.Device == dev }) {
			b.Delete(schema.CacheKey(dev, id))
		}
	}
	for i := range now {
		use := now[i].Use()
		if !slices.ContainsFunc(old, func(c schema.Cache) bool {
			return c.File.Device == now[i].File.Device && c.Use() == use
		}) {
			b.Put(schema.CacheKey(now[i].File.Device, id), schema.Encode(&use))
		}
	}
}

// CacheSegments is the layout by which a cache is filled.
func (m *Manager) CacheSegments(cache schema.Cache) []metarpc.Segment {
	f := &cache.File
	return []metarpc.Segment{{
		Len: layout.ToEOF, IOMode: layout.IOModeRW, Flags: layout.FlagNoIOThruMDS,
		Mirrors: [][]metarpc.DataFile{{{Device: f.Device, Handle: f.Handle, UID: f.UID, GID: f.GID}}},
	}}
}
