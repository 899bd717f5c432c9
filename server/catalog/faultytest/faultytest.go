package faultytest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

// Config says which faults there are. A chance is between 0 and 1; those of Commit are tried in the order they have here,
// at most one applies.
type Config struct {
	Seed uint64

	Delay time.Duration // every call waits for a random time up to this before anything else

	Conflict float64 // chance of ErrConflict; nothing is applied
	Lost     float64 // chance of ErrUnknown for a commit that is not applied
	Applied  float64 // chance of ErrUnknown for a commit that is applied
	Late     float64 // chance of ErrUnknown for a commit that is applied after the answer, within LateBy
	Slow     float64 // chance of a commit that is applied and answered after SlowBy only

	LateBy, SlowBy time.Duration

	// SnapshotReads is after how many reads at most (a Get, a GetMany, or one row of a scan) a snapshot expires; 0: never.
	SnapshotReads int
}

// Engine is an engine with faults. Closing it closes the wrapped one.
type Engine struct {
	inner catalog.Engine
	cfg   Config

	mu  sync.Mutex
	rng *rand.Rand

	lateMu sync.Mutex // late begins no more once Close waits for it
	closed bool
	late   sync.WaitGroup // commits that are applied after their answer
}

var (
	_ catalog.Engine   = (*Engine)(nil)
	_ catalog.Snapshot = (*snapshot)(nil)
)

// New wraps inner.
func New(inner catalog.Engine, cfg Config) *Engine {
	return &Engine{inner: inner, cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0))}
}

// upTo returns a random duration below limit.
func (e *Engine) upTo(limit time.Duration) time.Duration {
	if limit <= 0 {
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return time.Duration(e.rng.Int64N(int64(limit)))
}

// chance draws one of the weights, or returns -1 for none of them.
func (e *Engine) chance(weights ...float64) int {
	e.mu.Lock()
	x := e.rng.Float64()
	e.mu.Unlock()
	for i, w := range weights {
		if x < w {
			return i
		}
		x -= w
	}
	return -1
}

// wait waits, or returns why it did not.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *Engine) delay(ctx context.Context) error { return wait(ctx, e.upTo(e.cfg.Delay)) }

// Commit implements [catalog.Engine]. What the wrapped engine refuses as malformed gets no other fault.
func (e *Engine) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(e.inner.Caps()); err != nil {
		return err
	}
	if err := e.delay(ctx); err != nil {
		return err
	}
	c := &e.cfg
	switch e.chance(c.Conflict, c.Lost, c.Applied, c.Late, c.Slow) {
	case 0:
		return fmt.Errorf("%w: injected", catalog.ErrConflict)
	case 1:
		return fmt.Errorf("%w: injected", catalog.ErrUnknown)
	case 2:
		if err := e.inner.Commit(ctx, b); err != nil {
			return err
		}
		return fmt.Errorf("%w: injected", catalog.ErrUnknown)
	case 3:
		later, own := e.upTo(c.LateBy), clone(b)
		e.lateMu.Lock()
		if !e.closed { // otherwise it is never applied
			e.late.Go(func() { // ends after LateBy; Close waits for it
				time.Sleep(later)
				for errors.Is(e.inner.Commit(context.Background(), own), catalog.ErrConflict) {
				}
			})
		}
		e.lateMu.Unlock()
		return fmt.Errorf("%w: injected", catalog.ErrUnknown)
	case 4:
		if err := wait(ctx, c.SlowBy); err != nil {
			return err
		}
	}
	return e.inner.Commit(ctx, b)
}

// clone returns a copy that shares nothing with b, which its caller may use again.
func clone(b *catalog.Batch) *catalog.Batch {
	c := &catalog.Batch{Durability: b.Durability, Grows: b.Grows}
	for _, g := range b.Guards {
		g.Key, g.Value, g.To = bytes.Clone(g.Key), bytes.Clone(g.Value), bytes.Clone(g.To)
		c.Guards = append(c.Guards, g)
	}
	for _, row := range b.Puts {
		c.Put(bytes.Clone(row.Key), bytes.Clone(row.Value))
	}
	for _, key := range b.Deletes {
		c.Delete(bytes.Clone(key))
	}
	for _, d := range b.Deltas {
		d.Key = bytes.Clone(d.Key)
		c.Deltas = append(c.Deltas, d)
	}
	return c
}

// Get implements [catalog.Reader].
func (e *Engine) Get(ctx context.Context, key []byte) ([]byte, error) {
	if err := e.delay(ctx); err != nil {
		return nil, err
	}
	return e.inner.Get(ctx, key)
}

// GetMany implements [catalog.Reader].
func (e *Engine) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	if err := e.delay(ctx); err != nil {
		return nil, err
	}
	return e.inner.GetMany(ctx, keys)
}

// Scan implements [catalog.Reader].
func (e *Engine) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		if err := e.delay(ctx); err != nil {
			yield(catalog.Row{}, err)
			return
		}
		e.inner.Scan(ctx, from, to, opts)(yield)
	}
}

// Snapshot implements [catalog.Engine].
func (e *Engine) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if err := e.delay(ctx); err != nil {
		return nil, err
	}
	inner, err := e.inner.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	s := &snapshot{engine: e, inner: inner}
	if n := e.cfg.SnapshotReads; n > 0 {
		e.mu.Lock()
		s.left.Store(1 + e.rng.Int64N(int64(n)))
		e.mu.Unlock()
	}
	return s, nil
}

// Caps implements [catalog.Engine].
func (e *Engine) Caps() catalog.Caps {
	caps := e.inner.Caps()
	if e.cfg.SnapshotReads > 0 && caps.MaxSnapshotAge == 0 {
		caps.MaxSnapshotAge = time.Nanosecond // nobody may rely on one
	}
	return caps
}

// Close implements [catalog.Engine].
func (e *Engine) Close() error {
	e.lateMu.Lock()
	e.closed = true
	e.lateMu.Unlock()
	e.late.Wait()
	return e.inner.Close()
}

type snapshot struct {
	engine *Engine
	inner  catalog.Snapshot
	left   atomic.Int64 // reads until it expires, if Config.SnapshotReads is set
}

// read counts a read.
func (s *snapshot) read() error {
	if s.engine.cfg.SnapshotReads > 0 && s.left.Add(-1) < 0 {
		return fmt.Errorf("%w: injected", catalog.ErrSnapshotExpired)
	}
	return nil
}

func (s *snapshot) Get(ctx context.Context, key []byte) ([]byte, error) {
	if err := s.read(); err != nil {
		return nil, err
	}
	return s.inner.Get(ctx, key)
}

func (s *snapshot) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	if err := s.read(); err != nil {
		return nil, err
	}
	return s.inner.GetMany(ctx, keys)
}

func (s *snapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		for row, err := range s.inner.Scan(ctx, from, to, opts) {
			if err == nil {
				err = s.read()
			}
			if err != nil {
				yield(catalog.Row{}, err)
				return
			}
			if !yield(row, nil) {
				return
			}
		}
	}
}

func (s *snapshot) Close() error { return s.inner.Close() }
