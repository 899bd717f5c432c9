package usage

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// period is how long changes of usage are collected in directories before these tell their parents.
const period = 150 * time.Millisecond

// Many directories do not keep a distant engine busy: the time to the next pass is pauseShare times as long as the last
// one took, but not longer than pauseMost.
const (
	pauseShare = 9
	pauseMost  = 2 * time.Second
)

// lookEvery is how often a service looks for what others have told its directories.
const lookEvery = time.Second

// Tree carries what directories have changed up to the directories above them, for one shard of the volume.
type Tree struct {
	engine        catalog.Engine
	log           *slog.Logger
	shard, shards int

	kick  chan struct{}             // there may be dirty directories
	token chan struct{}             // has one token, for whoever makes directories tell their parents
	told  atomic.Pointer[time.Time] // all that were dirty then, of all shards, have told; nil: not since the start

	mu      sync.Mutex
	parents map[layout.FileID]layout.FileID // of directories; may be out of date where others serve the volume as well
}

// parentsKept is of how many directories the parent is remembered.
const parentsKept = 1 << 16

// NewTree returns the Tree of one of the shards of a volume that has so many. Nothing is told before somebody calls
// Run, or asks for usage.
func NewTree(engine catalog.Engine, shard, shards int, log *slog.Logger) *Tree {
	t := &Tree{
		engine: engine, log: log, shard: shard, shards: shards,
		kick: make(chan struct{}, 1), token: make(chan struct{}, 1), parents: map[layout.FileID]layout.FileID{},
	}
	t.token <- struct{}{}
	return t
}

// mine reports whether a directory is of the shard.
func (t *Tree) mine(id layout.FileID) bool {
	return t.shards == 1 || layout.ShardOf(id, t.shards) == t.shard
}

// Soon has directories tell their parents what has changed, when Run comes to it.
func (t *Tree) Soon() {
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

// Run has dirty directories of the shard tell their parents, until ctx ends. The services of other shards do not say
// that they have told one of this shard, or renamed something there, so with several shards it looks every now and
// then.
func (t *Tree) Run(ctx context.Context) {
	wait := period
	var look <-chan time.Time
	if t.shards > 1 {
		ticker := time.NewTicker(lookEvery)
		defer ticker.Stop()
		look = ticker.C
	}
	for {
		select {
		case <-t.kick:
		case <-look:
		case <-ctx.Done():
			return
		}
		if retry.Pause(ctx, wait) != nil {
			return
		}
		began := time.Now()
		if retry.Persist(ctx, t.log, "usage of directories", func() error { return t.Propagate(ctx) }) != nil {
			return
		}
		wait = max(period, min(pauseShare*time.Since(began), pauseMost))
	}
}

// Propagate has every directory of the shard that is dirty now tell its parent, and those above that are the shard's
// too, each once and the deepest first.
func (t *Tree) Propagate(ctx context.Context) error {
	select {
	case <-t.token:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { t.token <- struct{}{} }()
	began := time.Now()
	const page = 4096
	from, to := schema.Of(schema.PrefixDirty)
	for {
		var dirs []layout.FileID
		n := 0
		for kv, err := range t.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: page, KeysOnly: true}) {
			if err != nil {
				return err
			}
			if id := schema.IDOf(kv.Key); t.mine(id) {
				dirs = append(dirs, id)
			}
			from = catalog.After(kv.Key)
			n++
		}
		if err := t.propagateAll(ctx, dirs, false); err != nil {
			return err
		}
		if n < page {
			if t.shards == 1 {
				t.told.Store(&began)
			}
			return nil
		}
	}
}

// Settle has all that is committed when it is called told to all directories above, whatever their shards.
//
// Other services do the same at the same time: what is dirty is looked for in one revision, since what one of them
// tells makes another directory dirty; and each is followed up to the root also when it has nothing to tell, since
// somebody else may have done it just now.
func (t *Tree) Settle(ctx context.Context) error {
	if t.shards == 1 {
		return t.Propagate(ctx)
	}
	select {
	case <-t.token:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { t.token <- struct{}{} }()
	began := time.Now()
	dirs, err := t.dirtyNow(ctx)
	if err != nil {
		return err
	}
	t.ForgetParents() // another service may have moved directories
	if err := t.propagateAll(ctx, dirs, true); err != nil {
		return err
	}
	t.told.Store(&began)
	return nil
}

// dirtyNow are the dirty directories of all shards at one moment.
func (t *Tree) dirtyNow(ctx context.Context) (dirs []layout.FileID, err error) {
	snap, err := t.engine.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	from, to := schema.Of(schema.PrefixDirty)
	for kv, err := range snap.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, schema.IDOf(kv.Key))
	}
	return dirs, nil
}

// deepDir is a directory, and how far it is from the root.
type deepDir struct {
	id    layout.FileID
	depth int
}

// dirHeap has the deepest directories first, and what is in it twice one after the other.
type dirHeap []deepDir

func (h dirHeap) Len() int { return len(h) }
func (h dirHeap) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[j].depth, h[i].depth), cmp.Compare(h[i].id, h[j].id)) < 0
}
func (h dirHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *dirHeap) Push(x any)   { *h = append(*h, x.(deepDir)) }
func (h *dirHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// propagateAll has directories tell their parents, and these theirs: if they have anything to tell and are the shard's,
// or with whole anyway.
func (t *Tree) propagateAll(ctx context.Context, dirs []layout.FileID, whole bool) error {
	var todo dirHeap
	for _, id := range dirs {
		chain, err := t.Ancestors(ctx, id)
		if err != nil {
			return err
		}
		todo = append(todo, deepDir{id, len(chain)})
	}
	heap.Init(&todo)
	last := layout.FileID(0)
	for len(todo) > 0 {
		d := heap.Pop(&todo).(deepDir)
		if d.id == last {
			continue // several have told it
		}
		last = d.id
		parent, told, err := t.tellParent(ctx, d.id)
		if err != nil {
			return fmt.Errorf("directory %d: %w", d.id, err)
		}
		if parent != 0 && parent != layout.RootID && (whole || told && t.mine(parent)) {
			heap.Push(&todo, deepDir{parent, d.depth - 1})
		}
	}
	return nil
}

// tellParent has a directory tell its parent what has changed since the last time, and takes it for clean if nothing
// changes meanwhile.
func (t *Tree) tellParent(ctx context.Context, dir layout.FileID) (parent layout.FileID, told bool, err error) {
	hot := false // what is in it changes too often for it to become clean now
	for try := range retry.Tries {
		if err := retry.BackOff(ctx, try); err != nil {
			return 0, false, err
		}
		dirtyKey := schema.DirtyKey(dir)
		// Read before the counters: so it is another one if these change later.
		dirty, err := schema.FindRow(ctx, t.engine, dirtyKey)
		if err != nil {
			return 0, false, err
		}
		keys := [][]byte{schema.InodeKey(dir), schema.CountersKey(dir), schema.ToldKey(dir)}
		raw, err := t.engine.GetMany(ctx, keys)
		if err != nil {
			return 0, false, err
		}
		var c Change
		c.Durability = catalog.NoSync // what a crash takes back is told again
		var row schema.Inode
		if raw[0] != nil { // else it is gone, and there is nothing left to tell
			if err := schema.DecodeRow(keys[0], raw[0], &row); err != nil {
				return 0, false, err
			}
		}
		counters, err := schema.DecodeCounters(keys[1], raw[1])
		if err != nil {
			return 0, false, err
		}
		before, err := schema.DecodeCounters(keys[2], raw[2])
		if err != nil {
			return 0, false, err
		}
		total := totalOf(counters)
		news := total.Minus(toldOf(before))
		c.GuardRow(keys[0], raw[0]) // it still has this parent
		c.GuardRow(keys[2], raw[2])
		clean := -1
		if dirty != nil && !hot {
			clean = c.GuardEqual(dirtyKey, dirty)
			c.Delete(dirtyKey)
		}
		if news != (Sum{}) {
			c.Put(keys[2], catalog.EncodeCounters(total.Bytes, total.Files, total.Dirs))
			c.addSub(row.Parent, news)
		}
		if len(c.Puts)+len(c.Deletes) == 0 {
			if dirty != nil {
				t.Soon()
			}
			return row.Parent, false, nil
		}
		err = t.engine.Commit(ctx, &c.Batch)
		switch guard := (*catalog.GuardError)(nil); {
		case err == nil:
			if hot {
				t.Soon()
			}
			return row.Parent, news != (Sum{}), nil
		case errors.As(err, &guard):
			hot = hot || guard.Index == clean
		case errors.Is(err, catalog.ErrConflict), errors.Is(err, catalog.ErrUnknown):
		default:
			return 0, false, err
		}
	}
	t.Soon() // others keep changing it
	return 0, false, nil
}

// Ancestors are the directories from one up to the root, itself first. One that has no way to the root has those that
// it has.
func (t *Tree) Ancestors(ctx context.Context, dir layout.FileID) ([]layout.FileID, error) {
	var chain []layout.FileID
	for dir != 0 {
		chain = append(chain, dir)
		if dir == layout.RootID {
			break
		}
		if len(chain) > maxPathDepth {
			t.ForgetParents() // some are from before a rename
			break
		}
		t.mu.Lock()
		parent, ok := t.parents[dir]
		t.mu.Unlock()
		if !ok {
			var row schema.Inode
			raw, err := schema.ReadRow(ctx, t.engine, schema.InodeKey(dir), &row)
			if err != nil {
				return nil, err
			}
			if raw == nil {
				break
			}
			parent = row.Parent
			t.mu.Lock()
			if len(t.parents) >= parentsKept {
				clear(t.parents)
			}
			t.parents[dir] = parent
			t.mu.Unlock()
		}
		dir = parent
	}
	return chain, nil
}

// maxPathDepth is how deep directories are looked for. Below that usage is still counted, but not always told to all
// above at once.
const maxPathDepth = 1 << 14

// ForgetParents is called when a directory has changed its parent.
func (t *Tree) ForgetParents() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.parents)
}

// Of is all that is below a directory, with all that is committed when it is called.
func (t *Tree) Of(ctx context.Context, dir layout.FileID) (Sum, error) {
	if err := t.Settle(ctx); err != nil {
		return Sum{}, err
	}
	counters, err := schema.ReadCounters(ctx, t.engine, dir)
	return totalOf(counters), err
}

// TakeBack adds to c that what a directory has told its parent, from, is not in that one any more. A directory that
// moves to another one tells that at once. If to is 0 it goes, and its quota with it.
func (t *Tree) TakeBack(ctx context.Context, c *Change, dir, from, to layout.FileID) error {
	key := schema.ToldKey(dir)
	raw, err := schema.FindRow(ctx, t.engine, key)
	if err != nil {
		return err
	}
	counters, err := schema.DecodeCounters(key, raw)
	if err != nil {
		return err
	}
	c.GuardRow(key, raw)
	c.addSub(from, Sum{}.Minus(toldOf(counters)))
	if to != 0 {
		c.addSub(to, toldOf(counters))
		return nil
	}
	if raw != nil {
		c.Delete(key)
	}
	c.Delete(schema.DirtyKey(dir))
	c.Delete(schema.QuotaKey(metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: uint64(dir)}))
	return nil
}
