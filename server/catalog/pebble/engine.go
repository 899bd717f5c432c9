package pebble

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	cpebble "github.com/cockroachdb/pebble/v2"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/fold"
	"github.com/weftfs/weft/server/catalog/internal/gate"
)

// caps keeps a batch well below half a default memtable, from where on Pebble treats it as a table of its own.
var caps = catalog.Caps{MaxBatchBytes: 16 << 20, MaxKeys: 1 << 14, MaxValue: 1 << 20}

// Engine is a catalog in a directory. It has the directory's lock until Close.
type Engine struct {
	dir     string
	db      *cpebble.DB
	lock    *cpebble.Lock
	fatal   func(error)
	failing sync.Once // the first failed write

	gate    gate.Gate
	latches *latchTable
	ranges  rangeTable
	room    *room // nil: there is no reserve
	keeper  sync.WaitGroup
	logging sync.RWMutex // read-locked while a commit writes the log, locked while Checkpoint copies it
	pending atomic.Int64 // commits that may be visible and are not known to be durable, and barriers under way
	lazy    atomic.Int64 // those of them that were NoSync and have returned

	snapMu    sync.Mutex
	snapshots map[*snapshot]struct{} // the open ones
}

var (
	_ catalog.Engine   = (*Engine)(nil)
	_ catalog.Roomy    = (*Engine)(nil)
	_ catalog.Snapshot = (*snapshot)(nil)
)

// Caps implements [catalog.Engine].
func (e *Engine) Caps() catalog.Caps { return caps }

// Commit implements [catalog.Engine]. It never returns ErrConflict.
func (e *Engine) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(caps); err != nil {
		return err
	}
	if err := e.gate.Enter(); err != nil {
		return err
	}
	defer e.gate.Leave()
	if err := ctx.Err(); err != nil {
		return err
	}
	if writes(b) && e.room.isUsedUp() {
		return e.room.full()
	}

	c := commits.Get().(*commit)
	defer c.put()
	c.plan(b)
	if err := e.ranges.acquire(ctx, &c.entry, b); err != nil {
		return err
	}
	c.claims = e.latches.claims(c.claims[:0], b, c.groups)
	if err := e.latches.acquire(ctx, c.claims); err != nil {
		e.ranges.release(&c.entry)
		return err
	}
	e.logging.RLock()
	defer e.logging.RUnlock()
	pending, err := e.apply(c, b)
	e.latches.release(c.claims)
	e.ranges.release(&c.entry)

	switch {
	case pending != nil:
		return e.await(pending)
	case b.Durability == catalog.Sync && (err == nil && !writes(b) || isGuard(err)):
		if syncErr := e.barrier(); syncErr != nil {
			return syncErr
		}
	}
	return err
}

func writes(b *catalog.Batch) bool { return len(b.Puts)+len(b.Deletes)+len(b.Deltas) > 0 }

func isGuard(err error) bool {
	var guard *catalog.GuardError
	return errors.As(err, &guard)
}

// apply checks the guards and makes b visible; the latches of b are held. If b is to be synced it returns the
// batch to await.
func (e *Engine) apply(c *commit, b *catalog.Batch) (*cpebble.Batch, error) {
	for i := range b.Guards {
		ok, err := e.holds(&b.Guards[i])
		if err != nil {
			return nil, fmt.Errorf("guard %d: %w", i, err)
		}
		if !ok {
			return nil, &catalog.GuardError{Index: i, Guard: b.Guards[i]}
		}
	}
	if !writes(b) {
		return nil, nil
	}
	if b.Grows && e.room.isShort() {
		return nil, e.room.full()
	}
	pb := e.db.NewBatch()
	if err := e.fill(pb, c, b); err != nil {
		return nil, errors.Join(err, pb.Close())
	}
	e.pending.Add(1) // after an error for good, as the engine stops then
	if b.Durability == catalog.NoSync {
		if err := e.db.Apply(pb, cpebble.NoSync); err != nil {
			return nil, e.unknown(err)
		}
		e.lazy.Add(1)
		return nil, pb.Close()
	}
	if err := e.db.ApplyNoSyncWait(pb, cpebble.Sync); err != nil {
		return nil, e.unknown(err)
	}
	return pb, nil
}

// await waits until a batch given to ApplyNoSyncWait is durable.
func (e *Engine) await(pb *cpebble.Batch) error {
	if err := pb.SyncWait(); err != nil {
		return e.unknown(err)
	}
	e.pending.Add(-1)
	return pb.Close()
}

// barrier waits until everything visible is durable. Unless it is already, a record without content goes through the
// log behind it all.
func (e *Engine) barrier() error {
	if e.pending.Load() == 0 {
		return nil
	}
	e.pending.Add(1)
	lazy := e.lazy.Swap(0)
	pb := e.db.NewBatch()
	if err := pb.LogData(nil, nil); err != nil {
		return errors.Join(err, pb.Close())
	}
	if err := e.db.ApplyNoSyncWait(pb, cpebble.Sync); err != nil {
		return e.unknown(err)
	}
	err := e.await(pb)
	if err == nil {
		e.pending.Add(-lazy)
	}
	return err
}

// unknown stops the engine because a write to the log failed: neither this commit nor any later one can be
// acknowledged, and earlier ones are safe.
func (e *Engine) unknown(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = fmt.Errorf("%w: make room on its disk and start again: %w", catalog.ErrFull, err)
	}
	err = fmt.Errorf("write the log of catalog %s: %w", e.dir, err)
	e.fail(err)
	return fmt.Errorf("%w: %w", catalog.ErrUnknown, err)
}

// fail makes every later call return ErrClosed and reports err, once.
func (e *Engine) fail(err error) {
	e.failing.Do(func() {
		e.gate.Shut(fmt.Errorf("%w after a failure: %w", catalog.ErrClosed, err))
		e.fatal(err)
	})
}

// holds reports whether a guard does. Its key is latched, or its range registered.
func (e *Engine) holds(g *catalog.Guard) (bool, error) {
	if g.Kind == catalog.RangeEmpty {
		return e.empty(g.Key, g.To)
	}
	stored, closer, err := e.db.Get(g.Key)
	if errors.Is(err, cpebble.ErrNotFound) {
		return g.Kind == catalog.Absent, nil
	}
	if err != nil {
		return false, readError(e.dir, g.Key, err)
	}
	ok := g.Kind == catalog.Present
	if g.Kind == catalog.Equal {
		var value []byte
		if value, err = decodeRow(stored); err != nil {
			err = readError(e.dir, g.Key, err)
		}
		ok = err == nil && bytes.Equal(value, g.Value)
	}
	return ok, errors.Join(err, closer.Close())
}

// empty reports whether no row has from <= key < to.
func (e *Engine) empty(from, to []byte) (bool, error) {
	it, err := e.db.NewIter(bounds(from, to))
	if err != nil {
		return false, readError(e.dir, from, err)
	}
	found := it.First()
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		return false, readError(e.dir, from, err)
	}
	return !found, nil
}

// foldEvery is one in how many deltas is written as a row, see Stored form in the package comment. A read of a
// hot row joins that many operands on average, which costs some 10 µs, and a fold costs about one such read.
const foldEvery = 128

// commit is the scratch space of one Commit call.
type commit struct {
	entry  rangeEntry
	claims []claim
	groups []deltaGroup
	change fold.Change
	value  []byte
}

var commits = sync.Pool{New: func() any { return new(commit) }}

// put gives c back. It drops what belongs to the caller.
func (c *commit) put() {
	clear(c.groups)
	commits.Put(c)
}

// deltaGroup are neighbouring deltas of a batch that have the same key; they become one operand.
type deltaGroup struct {
	deltas []catalog.Delta
	fold   bool // write the row they lead to instead
}

func (g *deltaGroup) key() []byte { return g.deltas[0].Key }

// plan groups the deltas of b and draws those to fold.
func (c *commit) plan(b *catalog.Batch) {
	c.groups = c.groups[:0]
	for first := 0; first < len(b.Deltas); {
		end := first + 1
		for end < len(b.Deltas) && bytes.Equal(b.Deltas[end].Key, b.Deltas[first].Key) {
			end++
		}
		g := deltaGroup{deltas: b.Deltas[first:end]}
		g.fold = rand.N(foldEvery) == 0 && onlyWriter(b, first, end)
		c.groups = append(c.groups, g)
		first = end
	}
}

// onlyWriter reports whether nothing but Deltas[first:end] of b changes their key, so that what the row will be follows
// from what it is before b.
func onlyWriter(b *catalog.Batch, first, end int) bool {
	key := b.Deltas[first].Key
	same := func(d catalog.Delta) bool { return bytes.Equal(d.Key, key) }
	return !slices.ContainsFunc(b.Deltas[:first], same) && !slices.ContainsFunc(b.Deltas[end:], same) &&
		!slices.ContainsFunc(b.Puts, func(r catalog.Row) bool { return bytes.Equal(r.Key, key) }) &&
		!slices.ContainsFunc(b.Deletes, func(k []byte) bool { return bytes.Equal(k, key) })
}

// fill puts the writes of b into pb in the order that the catalog package defines.
func (e *Engine) fill(pb *cpebble.Batch, c *commit, b *catalog.Batch) error {
	for i := range b.Puts {
		setRow(pb, b.Puts[i].Key, b.Puts[i].Value)
	}
	for _, key := range b.Deletes {
		if err := pb.Delete(key, nil); err != nil {
			return err
		}
	}
	for i := range c.groups {
		g := &c.groups[i]
		c.change = c.change[:0]
		for j := range g.deltas {
			c.change = c.change.AddDelta(&g.deltas[j])
		}
		if g.fold {
			folded, err := e.fold(pb, g.key(), c.change)
			if err != nil {
				return err
			}
			if folded {
				continue
			}
		}
		c.value = appendChange(c.value[:0], c.change)
		if err := pb.Merge(g.key(), c.value, nil); err != nil {
			return err
		}
	}
	return nil
}

// fold writes the row that key has after ch. It reports false if there is a row that is no counter row; its latch is
// held exclusively.
func (e *Engine) fold(pb *cpebble.Batch, key []byte, ch fold.Change) (bool, error) {
	value, err := get(e.dir, e.db, key)
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		if errors.Is(err, catalog.ErrNotCounters) {
			return false, nil
		}
		return false, err
	}
	counters, err := catalog.DecodeCounters(value)
	if err != nil {
		return false, nil
	}
	setRow(pb, key, catalog.EncodeCounters(ch.Apply(counters)...))
	return true, nil
}

// setRow adds a put to pb.
func setRow(pb *cpebble.Batch, key, value []byte) {
	op := pb.SetDeferred(len(key), 1+len(value))
	copy(op.Key, key)
	op.Value[0] = formRow
	copy(op.Value[1:], value)
	_ = op.Finish() // fails only if the batch indexes its keys, and it does not
}

// Close implements [catalog.Engine].
func (e *Engine) Close() error {
	if e.room != nil {
		e.room.end() // ends the waiting for room
	}
	if !e.gate.Close(catalog.ErrClosed) {
		return catalog.ErrClosed
	}
	e.keeper.Wait()
	e.snapMu.Lock()
	open := e.snapshots
	e.snapshots = nil
	e.snapMu.Unlock()
	var err error
	for s := range open {
		err = errors.Join(err, s.Close())
	}
	if err = errors.Join(err, e.db.Close(), e.lock.Close(), e.room.close()); err != nil {
		return fmt.Errorf("close catalog %s: %w", e.dir, err)
	}
	return nil
}
