package pebble

import (
	"context"
	"fmt"

	cpebble "github.com/cockroachdb/pebble/v2"
)

// Checkpoint makes a copy of the catalog in dir, which must not exist while its parent does: a catalog of its own that Open opens, with
// everything that was committed before the call, NoSync commits included. Tables are hard links if dir is on the same file system, so that
// it costs little time; their space is taken until the copy is removed. Commits go on meanwhile.
func (e *Engine) Checkpoint(ctx context.Context, dir string) error {
	if err := e.begin(ctx); err != nil {
		return err
	}
	defer e.gate.Leave()
	if err := e.db.Checkpoint(dir, cpebble.WithFlushedWAL()); err != nil {
		return fmt.Errorf("checkpoint of catalog %s in %s: %w", e.dir, dir, err)
	}
	return nil
}
