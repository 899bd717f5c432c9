package memorytest

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"

	"github.com/weftfs/weft/server/catalog"
)

// caps are those of the Pebble engine, so that what fits here fits there.
var caps = catalog.Caps{MaxBatchBytes: 16 << 20, MaxKeys: 1 << 14, MaxValue: 1 << 20}

// Engine is a catalog in memory.
type Engine struct {
	mu   sync.Mutex // held by the commit that is being applied
	root atomic.Pointer[node]
	shut atomic.Bool
}

var (
	_ catalog.Engine   = (*Engine)(nil)
	_ catalog.Snapshot = (*snapshot)(nil)
)

// New returns an empty catalog.
func New() *Engine { return new(Engine) }

// Commit implements [catalog.Engine].
func (e *Engine) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(caps); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	root, err := e.current(ctx)
	if err != nil {
		return err
	}
	for i, g := range b.Guards {
		if !holds(root, g) {
			return &catalog.GuardError{Index: i, Guard: g}
		}
	}
	for _, row := range b.Puts {
		root = root.with(bytes.Clone(row.Key), clone(row.Value))
	}
	for _, key := range b.Deletes {
		root = root.without(key)
	}
	for _, d := range b.Deltas {
		var value []byte
		if n := root.get(d.Key); n != nil {
			value = n.value
		}
		counters, err := catalog.DecodeCounters(value)
		if err != nil {
			return fmt.Errorf("delta on %q: %w", d.Key, err)
		}
		root = root.with(bytes.Clone(d.Key), catalog.EncodeCounters(d.Apply(counters)...))
	}
	e.root.Store(root)
	return nil
}

func holds(root *node, g catalog.Guard) bool {
	switch g.Kind {
	case catalog.Absent:
		return root.get(g.Key) == nil
	case catalog.Present:
		return root.get(g.Key) != nil
	case catalog.Equal:
		n := root.get(g.Key)
		return n != nil && bytes.Equal(n.value, g.Value)
	case catalog.RangeEmpty:
		return root.walk(g.Key, g.To, func(*node) bool { return false })
	}
	panic(fmt.Sprintf("memorytest: %v passed Check", g))
}

// current returns the root of the latest revision.
func (e *Engine) current(ctx context.Context) (*node, error) {
	if e.shut.Load() {
		return nil, catalog.ErrClosed
	}
	return e.root.Load(), ctx.Err()
}

// Get implements [catalog.Reader].
func (e *Engine) Get(ctx context.Context, key []byte) ([]byte, error) {
	root, err := e.current(ctx)
	if err != nil {
		return nil, err
	}
	return root.row(key)
}

// GetMany implements [catalog.Reader].
func (e *Engine) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	root, err := e.current(ctx)
	if err != nil {
		return nil, err
	}
	return root.rows(keys), nil
}

// Scan implements [catalog.Reader].
func (e *Engine) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return scan(ctx, e.current, from, to, opts)
}

// Snapshot implements [catalog.Engine].
func (e *Engine) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	root, err := e.current(ctx)
	if err != nil {
		return nil, err
	}
	return &snapshot{engine: e, root: root}, nil
}

// Caps implements [catalog.Engine].
func (e *Engine) Caps() catalog.Caps { return caps }

// Close implements [catalog.Engine].
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shut.Swap(true) {
		return catalog.ErrClosed
	}
	return nil
}

// snapshot is one version of the tree.
type snapshot struct {
	engine *Engine
	root   *node
	shut   atomic.Bool
}

func (s *snapshot) current(ctx context.Context) (*node, error) {
	if s.shut.Load() || s.engine.shut.Load() {
		return nil, catalog.ErrClosed
	}
	return s.root, ctx.Err()
}

func (s *snapshot) Get(ctx context.Context, key []byte) ([]byte, error) {
	root, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	return root.row(key)
}

func (s *snapshot) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	root, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	return root.rows(keys), nil
}

func (s *snapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return scan(ctx, s.current, from, to, opts)
}

func (s *snapshot) Close() error {
	s.shut.Store(true)
	return nil
}

func (n *node) row(key []byte) ([]byte, error) {
	if n = n.get(key); n == nil {
		return nil, catalog.ErrNotFound
	}
	return clone(n.value), nil
}

func (n *node) rows(keys [][]byte) [][]byte {
	values := make([][]byte, len(keys))
	for i, key := range keys {
		if m := n.get(key); m != nil {
			values[i] = clone(m.value)
		}
	}
	return values
}

// scan yields rows of the root that current returns when the loop begins.
func scan(
	ctx context.Context, current func(context.Context) (*node, error), from, to []byte, opts catalog.ScanOptions,
) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		root, err := current(ctx)
		if err != nil {
			yield(catalog.Row{}, err)
			return
		}
		walk := root.walk
		if opts.Reverse {
			walk = root.walkBack
		}
		left := opts.Limit
		walk(from, to, func(n *node) bool {
			if err := ctx.Err(); err != nil {
				yield(catalog.Row{}, err)
				return false
			}
			row := catalog.Row{Key: bytes.Clone(n.key)}
			if !opts.KeysOnly {
				row.Value = clone(n.value)
			}
			left--
			return yield(row, nil) && left != 0
		})
	}
}

// clone copies a value; the copy is never nil.
func clone(value []byte) []byte { return append([]byte{}, value...) }
