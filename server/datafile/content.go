package datafile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// Truncate cuts every data file of a layout that is longer than size, but stale copies. It waits for data servers that cannot
// be reached until ctx ends; if all that is missing are copies of what was cut elsewhere the error is a LateError. A file that grows needs no call: what lies behind the end of its data files reads as zeros.
func (m *Manager) Truncate(ctx context.Context, row schema.Layout, size int64) error {
	err := m.eachCopy(ctx, row, func(ctx context.Context, st dataStore, file *schema.DataFile) error {
		return st.Cut(ctx, file.Handle, size)
	})
	if err != nil {
		return fmt.Errorf("cut data files to %d bytes: %w", size, err)
	}
	return nil
}

// Grow makes those data files of a layout that refs names as long as size, if they are shorter. It waits for data servers that cannot be
// reached until ctx ends.
func (m *Manager) Grow(ctx context.Context, row schema.Layout, refs []metarpc.CopyRef, size int64) error {
	var calls errgroup.Group
	grow := func(file *schema.DataFile) {
		if slices.ContainsFunc(refs, file.Is) {
			calls.Go(func() error { // one data file's calls
				return m.at(ctx, file, func(st dataStore) error { return st.Grow(ctx, file.Handle, size) })
			})
		}
	}
	for _, files := range row.Mirrors {
		for i := range files {
			grow(&files[i])
		}
	}
	for i := range row.Caches {
		grow(&row.Caches[i].File)
	}
	if err := calls.Wait(); err != nil {
		return fmt.Errorf("make data files %d bytes long: %w", size, err)
	}
	return nil
}

// Whole returns a good copy on one of near that has every byte of the file at its offset, and will have: its only data file, a cache, or with
// mirrors one of several copies that are such. several says that it is not the only one.
func (m *Manager) Whole(row schema.Layout, near []layout.DeviceID, mirrors bool) (ref metarpc.CopyRef, several bool) {
	if row.Moving {
		return ref, false
	}
	several = len(row.Mirrors) > 1 || len(row.Caches) > 0
	var files []*schema.DataFile
	if row.Width == 1 && (len(row.Mirrors) == 1 || mirrors) {
		for i := range row.Mirrors {
			files = append(files, &row.Mirrors[i][0])
		}
	}
	for i := range row.Caches {
		files = append(files, &row.Caches[i].File)
	}
	for _, file := range files {
		if file.State == layout.CopyGood && slices.Contains(near, file.Device) {
			return file.Ref(), several
		}
	}
	return ref, several
}

// MayBeWhole reports whether a file may have a copy that is Whole, and no other, once it has data files.
func (m *Manager) MayBeWhole(row schema.Layout, ino schema.Inode, near []layout.DeviceID) bool {
	if len(row.Mirrors) > 0 {
		row.Caches = nil // they go
		ref, several := m.Whole(row, near, false)
		return len(ref.Handle) > 0 && !several
	}
	policy := ino.Policy.Layout().Or(defaultPolicy)
	return policy.Mirrors == 1 && len(near) > 0 && (policy.StripeCount == 1 || policy.Placement == layout.PlacementLocal)
}

// Sync makes all data of a layout stable on the data servers and returns the first byte after the last one there. It
// waits for data servers that cannot be reached until ctx ends, but not for a copy while another one has what it has: what was
// acknowledged is at all good copies, and made stable by who wrote it.
func (m *Manager) Sync(ctx context.Context, row schema.Layout) (end int64, err error) {
	row.Caches = nil  // they have nothing that is not elsewhere
	var mu sync.Mutex // guards end
	err = m.eachCopy(ctx, row, func(ctx context.Context, st dataStore, file *schema.DataFile) error {
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
// A data server that answers may not be able to fence a data file, because somebody on its host has it open for writing. If
// there is no other copy of it the error is a HeldError after a while; all others have been fenced then.
//
// The commits do not wait for the disk: whoever wants the fence to be remembered commits that it was made.
func (m *Manager) Fence(ctx context.Context, id layout.FileID) error {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	var row schema.Layout
	raw, err := schema.ReadRow(ctx, m.cfg.Engine, schema.LayoutKey(id), &row)
	if err != nil {
		return fmt.Errorf("layout of inode %d: %w", id, err)
	}
	if raw == nil {
		return nil
	}
	if len(row.Mirrors) > 1 {
		if err := m.fenceMirrored(ctx, id, row); err != nil {
			return fmt.Errorf("fence inode %d: %w", id, err)
		}
		return nil
	}
	if err := m.fenceSingle(ctx, id, row); err != nil {
		return fmt.Errorf("fence inode %d: %w", id, err)
	}
	return nil
}

// fenceSingle is Fence for a file whose columns have one copy. The file is locked.
func (m *Manager) fenceSingle(ctx context.Context, id layout.FileID, row schema.Layout) error {
	var (
		calls sync.WaitGroup
		mu    sync.Mutex // guards the rest, and is held over the commits, which change the one row
		held  HeldError
		errs  []error
	)
	for _, files := range row.Mirrors {
		for i := range files {
			file := &files[i]
			calls.Go(func() { // one data file's calls
				owner := randomOwner()
				err := m.fenceFile(ctx, file, owner)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					err = m.reown(ctx, id, file.Device, file.Number, owner)
				}
				switch {
				case errors.Is(err, errHeld):
					held.add(file)
				case err != nil:
					errs = append(errs, err)
				}
			})
		}
	}
	calls.Wait()
	if len(errs) == 0 && len(held.Held) > 0 {
		return &held
	}
	return errors.Join(errs...)
}

// reown puts a data file's new owner into the layout row, unless the file is gone.
func (m *Manager) reown(ctx context.Context, id layout.FileID, dev layout.DeviceID, number uint64, owner layout.Credential) error {
	key := schema.LayoutKey(id)
	for {
		var row schema.Layout
		raw, err := schema.ReadRow(ctx, m.cfg.Engine, key, &row)
		if err != nil || raw == nil {
			return err
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
