package datafile

import (
	"context"
	"errors"
	"fmt"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// commit is Engine.Commit of a batch that changes rows of a file, which is locked, with an outcome that is known unless ctx ends: see findOut.
func (m *Manager) commit(ctx context.Context, id layout.FileID, b *catalog.Batch) error {
	err := m.cfg.Engine.Commit(ctx, b)
	if errors.Is(err, catalog.ErrUnknown) {
		err = m.findOut(ctx, id, b)
	}
	return err
}

// findOut is catalog.FindOut for a batch that changes rows of a file, which is locked. If it returns ErrUnknown, as ctx has ended, it is still being found out, and
// the file stays locked until it is known: so nobody else is in the way, or sees what may change yet. The batch is guarded by the layout row that it
// changes, and is not used again.
func (m *Manager) findOut(ctx context.Context, id layout.FileID, b *catalog.Batch) error {
	unlock := m.files.keep(id)
	known := make(chan error, 1)
	m.tasks.Go(func() { // ends when it is known, or with Close
		defer unlock()
		known <- catalog.FindOut(m.ctx, m.cfg.Engine, b)
	})
	select {
	case err := <-known:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", catalog.ErrUnknown, ctx.Err())
	}
}

// AwaitKnown waits until it is known what has been committed for a file by calls that have returned.
func (m *Manager) AwaitKnown(ctx context.Context, id layout.FileID) error {
	unlock, err := m.files.lock(ctx, id)
	if err == nil {
		unlock()
	}
	return err
}

// sortOut releases data files that were taken for a file, or puts them back, whichever is right: that is in the catalog when the file is not locked any
// more. As long as they are held only the batch that gives one to a file deletes its garbage row.
func (m *Manager) sortOut(id layout.FileID, taken []schema.DataFile) {
	if len(taken) == 0 {
		return
	}
	m.tasks.Go(func() { // ends when that is done, or with Close
		if m.AwaitKnown(m.ctx, id) != nil {
			return
		}
		var keys [][]byte
		for i := range taken {
			keys = append(keys, schema.GarbageKey(taken[i].Device, taken[i].Number))
		}
		for wait := firstWait; ; wait = min(2*wait, sweepAgain) {
			values, err := m.cfg.Engine.GetMany(m.ctx, keys)
			if err == nil {
				var given, left []schema.DataFile
				for i := range taken {
					if values[i] == nil {
						given = append(given, taken[i])
					} else {
						left = append(left, taken[i])
					}
				}
				m.release(given)
				m.putBack(left)
				return
			}
			if retry.Pause(m.ctx, wait) != nil {
				return
			}
		}
	})
}
