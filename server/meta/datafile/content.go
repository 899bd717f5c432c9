package datafile

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/datafile/store"
	"github.com/weftfs/weft/server/meta/schema"
)

// Truncate cuts every data file of a layout that is longer than size, but stale copies. It waits for data servers that cannot
// be reached until ctx ends; if all that is missing are copies of what was cut elsewhere the error is a LateError. A file that grows needs no call: what lies behind the end of its data files reads as zeros.
func (m *Manager) Truncate(ctx context.Context, row schema.Layout, size int64) error {
	err := m.eachCopy(ctx, row, func(ctx context.Context, st *store.Store, file *schema.DataFile) error {
		return st.Cut(ctx, file.Handle, size)
	})
	if err != nil {
		return fmt.Errorf("cut data files to %d bytes: %w", size, err)
	}
	return nil
}

// Sync makes all data of a layout stable on the data servers and returns the first byte after the last one there. It
// waits for data servers that cannot be reached until ctx ends, but not for a copy while another one has what it has: what was
// acknowledged is at all good copies, and made stable by who wrote it.
func (m *Manager) Sync(ctx context.Context, row schema.Layout) (end int64, err error) {
	row.Caches = nil  // they have nothing that is not elsewhere
	var mu sync.Mutex // guards end
	err = m.eachCopy(ctx, row, func(ctx context.Context, st *store.Store, file *schema.DataFile) error {
		size, err := st.Commit(ctx, file.Handle)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		end = max(end, size) // offsets in data files are those in the file
		return nil
	})
	if late := (*LateError)(nil); errors.As(err, &late) {
		err = nil
	}
	if err != nil {
		return 0, fmt.Errorf("make data files stable: %w", err)
	}
	return end, nil
}

// Fence gives every data file of file id new owners, so that no call made with a layout granted before changes any of
// them. It returns when the data servers have confirmed that and the layout row has the new owners; each new owner is in
// the row as soon as it is confirmed, so that those who may go on do not wait for a data server that is away. It waits for
// such until ctx ends.
//
// If the columns have several copies, these may differ in what was being written. Then the first copy of each column that is
// confirmed counts, and the others are stale when Fence returns. Nobody reads or writes those any more, so they need no new owner.
//
// The commits do not wait for the disk: whoever wants the fence to be remembered commits that it was made.
func (m *Manager) Fence(ctx context.Context, id layout.FileID) error {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	raw, err := m.cfg.Engine.Get(ctx, schema.LayoutKey(id))
	if errors.Is(err, catalog.ErrNotFound) {
		return nil
	}
	var row schema.Layout
	if err == nil {
		err = schema.Decode(raw, &row)
	}
	if err != nil {
		return fmt.Errorf("layout row of inode %d: %w", id, err)
	}
	if len(row.Mirrors) > 1 {
		if err := m.fenceMirrored(ctx, id, row); err != nil {
			return fmt.Errorf("fence inode %d: %w", id, err)
		}
		return nil
	}
	var mu sync.Mutex // held over the commits, which change the one row
	err = m.each(ctx, row, func(st *store.Store, file *schema.DataFile) error {
		owner := layout.Credential{UID: randomID(), GID: randomID()}
		if err := st.Fence(ctx, file.Handle, owner); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		return m.reown(ctx, id, file.Device, file.Number, owner)
	})
	if err != nil {
		return fmt.Errorf("fence inode %d: %w", id, err)
	}
	return nil
}

// reown puts a data file's new owner into the layout row, unless the file is gone.
func (m *Manager) reown(ctx context.Context, id layout.FileID, dev layout.DeviceID, number uint64, owner layout.Credential) error {
	key := schema.LayoutKey(id)
	for {
		raw, err := m.cfg.Engine.Get(ctx, key)
		if errors.Is(err, catalog.ErrNotFound) {
			return nil
		}
		var row schema.Layout
		if err == nil {
			err = schema.Decode(raw, &row)
		}
		if err != nil {
			return fmt.Errorf("layout row: %w", err)
		}
		for _, files := range row.Mirrors {
			for i := range files {
				if files[i].Device == dev && files[i].Number == number {
					files[i].UID, files[i].GID = owner.UID, owner.GID
				}
			}
		}
		b := catalog.Batch{Durability: catalog.NoSync}
		b.GuardEqual(key, raw)
		b.Put(key, schema.Encode(&row))
		err = m.cfg.Engine.Commit(ctx, &b)
		guard := (*catalog.GuardError)(nil)
		if !errors.As(err, &guard) && !errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown) {
			return err
		}
	}
}

// each calls f for all data files at once and joins the errors.
func (m *Manager) each(ctx context.Context, row schema.Layout, f func(*store.Store, *schema.DataFile) error) error {
	var (
		calls sync.WaitGroup
		mu    sync.Mutex // guards errs
		errs  []error
	)
	for _, files := range row.Mirrors {
		for i := range files {
			file := &files[i]
			calls.Go(func() { // one data file's calls
				d, err := m.device(file.Device)
				if err == nil {
					err = d.do(ctx, func(st *store.Store) error { return f(st, file) })
				}
				if err != nil {
					_, name := schema.DataFileName(file.Number)
					mu.Lock()
					defer mu.Unlock()
					errs = append(errs, fmt.Errorf("data file %s: %w", name, err))
				}
			})
		}
	}
	calls.Wait()
	return errors.Join(errs...)
}
