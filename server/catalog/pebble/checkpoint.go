package pebble

import (
	"context"
	"fmt"

	cpebble "github.com/cockroachdb/pebble/v2"
)

// Checkpoint makes a copy of the catalog in dir, which must not exist while its parent does: a catalog of its own that
// Open opens, with everything that was committed before the call, NoSync commits included. Tables are hard links if dir
// is on the same file system, so that it costs little time; their space is taken until the copy is removed.
//
// Commits go on meanwhile, except while the log is copied. Pebble reads a log that is being written from the start to
// the end, so the copy could have a hole in front of a record, and Pebble refuses to open that. A flush starts a new
// log first, so that the copy is short.
func (e *Engine) Checkpoint(ctx context.Context, dir string) error {
	if err := e.begin(ctx); err != nil {
		return err
	}
	defer e.gate.Leave()
	if err := e.db.Flush(); err != nil {
		return fmt.Errorf("flush catalog %s: %w", e.dir, err)
	}
	e.logging.Lock()
	defer e.logging.Unlock()
	if err := e.db.Checkpoint(dir, cpebble.WithFlushedWAL()); err != nil {
		return fmt.Errorf("checkpoint of catalog %s in %s: %w", e.dir, dir, err)
	}
	return nil
}
