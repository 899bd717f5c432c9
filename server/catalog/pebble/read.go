package pebble

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	cpebble "github.com/cockroachdb/pebble/v2"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/gate"
)

// Get implements [catalog.Reader].
func (e *Engine) Get(ctx context.Context, key []byte) ([]byte, error) {
	if err := e.begin(ctx); err != nil {
		return nil, err
	}
	defer e.gate.Leave()
	return get(e.dir, e.db, key)
}

// GetMany implements [catalog.Reader].
func (e *Engine) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	if err := e.begin(ctx); err != nil {
		return nil, err
	}
	defer e.gate.Leave()
	return getMany(ctx, e.dir, e.db, keys)
}

// Scan implements [catalog.Reader]. It is of one revision.
func (e *Engine) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		if err := e.begin(ctx); err != nil {
			yield(catalog.Row{}, err)
			return
		}
		defer e.gate.Leave()
		scan(ctx, e.dir, e.db, from, to, opts, yield)
	}
}

// begin enters the gate unless ctx has ended.
func (e *Engine) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return e.gate.Enter()
}

// Snapshot implements [catalog.Engine]. While it is open, rows deleted or replaced meanwhile keep their space.
func (e *Engine) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if err := e.begin(ctx); err != nil {
		return nil, err
	}
	defer e.gate.Leave()
	s := &snapshot{engine: e, snap: e.db.NewSnapshot()}
	e.snapMu.Lock()
	e.snapshots[s] = struct{}{}
	e.snapMu.Unlock()
	return s, nil
}

// snapshot is one revision. Its calls are calls of the engine as well.
type snapshot struct {
	engine  *Engine
	snap    *cpebble.Snapshot
	gate    gate.Gate
	closing sync.Once
	err     error // of closing
}

func (s *snapshot) begin(ctx context.Context) error {
	if err := s.engine.begin(ctx); err != nil {
		return err
	}
	if err := s.gate.Enter(); err != nil {
		s.engine.gate.Leave()
		return err
	}
	return nil
}

func (s *snapshot) end() {
	s.gate.Leave()
	s.engine.gate.Leave()
}

func (s *snapshot) Get(ctx context.Context, key []byte) ([]byte, error) {
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	defer s.end()
	return get(s.engine.dir, s.snap, key)
}

func (s *snapshot) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	defer s.end()
	return getMany(ctx, s.engine.dir, s.snap, keys)
}

func (s *snapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		if err := s.begin(ctx); err != nil {
			yield(catalog.Row{}, err)
			return
		}
		defer s.end()
		scan(ctx, s.engine.dir, s.snap, from, to, opts, yield)
	}
}

// Close implements [catalog.Snapshot]. Engine.Close calls it too and must not go on before Pebble's snapshot is
// closed, whoever closes it.
func (s *snapshot) Close() error {
	s.closing.Do(func() {
		s.gate.Close(catalog.ErrClosed)
		s.err = s.snap.Close()
		s.engine.snapMu.Lock()
		delete(s.engine.snapshots, s)
		s.engine.snapMu.Unlock()
	})
	return s.err
}

// get returns a copy of the value of key. dir is for errors.
func get(dir string, r cpebble.Reader, key []byte) ([]byte, error) {
	stored, closer, err := r.Get(key)
	if errors.Is(err, cpebble.ErrNotFound) {
		return nil, catalog.ErrNotFound
	}
	if err != nil {
		return nil, readError(dir, key, err)
	}
	value, err := decodeRow(stored)
	if err != nil {
		err = readError(dir, key, err)
	} else {
		value = append([]byte{}, value...)
	}
	if err := errors.Join(err, closer.Close()); err != nil {
		return nil, err
	}
	return value, nil
}

func getMany(ctx context.Context, dir string, r cpebble.Reader, keys [][]byte) ([][]byte, error) {
	values := make([][]byte, len(keys))
	for i, key := range keys {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		value, err := get(dir, r, key)
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return nil, err
		}
		values[i] = value
	}
	return values, nil
}

// bounds returns the options of an iterator over from <= key < to, where empty means no bound.
func bounds(from, to []byte) *cpebble.IterOptions {
	opts := new(cpebble.IterOptions)
	if len(from) > 0 {
		opts.LowerBound = from
	}
	if len(to) > 0 {
		opts.UpperBound = to
	}
	return opts
}

// scan yields the rows of a range straight out of Pebble's iterator.
func scan(
	ctx context.Context, dir string, r cpebble.Reader, from, to []byte, opts catalog.ScanOptions,
	yield func(catalog.Row, error) bool,
) {
	if len(to) > 0 && bytes.Compare(from, to) >= 0 {
		return
	}
	it, err := r.NewIter(bounds(from, to))
	if err != nil {
		yield(catalog.Row{}, readError(dir, from, err))
		return
	}
	defer it.Close() // its error is it.Error, yielded below
	first, next := it.First, it.Next
	if opts.Reverse {
		first, next = it.Last, it.Prev
	}
	left := opts.Limit
	for ok := first(); ok; ok = next() {
		if err := ctx.Err(); err != nil {
			yield(catalog.Row{}, err)
			return
		}
		row := catalog.Row{Key: it.Key()}
		if !opts.KeysOnly {
			stored, err := it.ValueAndErr()
			if err == nil {
				row.Value, err = decodeRow(stored)
			}
			if err != nil {
				yield(catalog.Row{}, readError(dir, row.Key, err))
				return
			}
		}
		left--
		if !yield(row, nil) || left == 0 {
			return
		}
	}
	if err := it.Error(); err != nil {
		yield(catalog.Row{}, readError(dir, from, err))
	}
}

// readError tells what was read where, and turns Pebble's corruption errors into ours.
func readError(dir string, key []byte, err error) error {
	if cpebble.IsCorruptionError(err) {
		return fmt.Errorf("%w: catalog %s at %q: %w", catalog.ErrCorrupt, dir, key, err)
	}
	return fmt.Errorf("catalog %s at %q: %w", dir, key, err)
}
