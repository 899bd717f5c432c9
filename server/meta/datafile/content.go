package datafile

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/weftfs/weft/server/meta/datafile/store"
	"github.com/weftfs/weft/server/meta/schema"
)

// Truncate cuts every data file of a layout that is longer than size. It waits for data servers that cannot be reached
// until ctx ends. A file that grows needs no call: what lies behind the end of its data files reads as zeros.
func (m *Manager) Truncate(ctx context.Context, row schema.Layout, size int64) error {
	err := m.each(ctx, row, func(st *store.Store, file *schema.DataFile) error {
		return st.Cut(ctx, file.Handle, size)
	})
	if err != nil {
		return fmt.Errorf("cut data files to %d bytes: %w", size, err)
	}
	return nil
}

// Sync makes all data of a layout stable on the data servers and returns the first byte after the last one there. It
// waits for data servers that cannot be reached until ctx ends.
func (m *Manager) Sync(ctx context.Context, row schema.Layout) (end int64, err error) {
	var mu sync.Mutex // guards end
	err = m.each(ctx, row, func(st *store.Store, file *schema.DataFile) error {
		size, err := st.Commit(ctx, file.Handle)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		end = max(end, size) // offsets in data files are those in the file
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("make data files stable: %w", err)
	}
	return end, nil
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
