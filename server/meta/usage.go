package meta

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// usagePeriod is how long changes of usage are collected in directories before these tell their parents.
const usagePeriod = 150 * time.Millisecond

// Many directories do not keep a distant engine busy: the time to the next pass is usageShare times as long as the last one took, but not
// longer than usageMost.
const (
	usageShare = 9
	usageMost  = 2 * time.Second
)

// usageLook is how often a service looks for what others have told its directories.
const usageLook = time.Second

// usage is what files come to.
type usage struct{ bytes, files, dirs int64 }

func (u usage) plus(v usage) usage {
	return usage{u.bytes + v.bytes, u.files + v.files, u.dirs + v.dirs}
}

func (u usage) minus(v usage) usage {
	return usage{u.bytes - v.bytes, u.files - v.files, u.dirs - v.dirs}
}

// inodes is what a limit of files is about.
func (u usage) inodes() int64 { return u.files + u.dirs }

// totalOf is all that is below a directory, as its counters say.
func totalOf(c catalog.Counters) usage {
	return usage{
		bytes: c.Field(schema.CounterBytes) + c.Field(schema.CounterSubBytes),
		files: c.Field(schema.CounterFiles) + c.Field(schema.CounterSubFiles),
		dirs:  c.Field(schema.CounterSubdirs) + c.Field(schema.CounterSubDirs),
	}
}

// toldOf is what a directory has told its parent, as its row says.
func toldOf(c catalog.Counters) usage {
	return usage{c.Field(schema.ToldBytes), c.Field(schema.ToldFiles), c.Field(schema.ToldDirs)}
}

// sizeOf is what an inode is charged with besides itself.
func sizeOf(row *schema.Inode) int64 {
	if isDir(row.Mode) {
		return 0
	}
	return row.Size
}

// charge adds to t that an inode has come (files is 1) or gone (-1), to all of them, at its home and at its owner. That a directory is one of its parent's is
// in what touch adds.
func charge(t *tx, row *schema.Inode, files int64) {
	bytes := files * sizeOf(row)
	if isDir(row.Mode) {
		t.dirty(row.Parent)
	} else {
		chargeHome(t, row.Parent, bytes, files)
	}
	chargeOwner(t, row.UID, row.GID, bytes, files)
	t.Add(schema.FilesKey(t.shard), 0, files)
}

// recharge adds to t what an inode's new size and owner change.
func recharge(t *tx, before, after *schema.Inode) {
	grown := sizeOf(after) - sizeOf(before)
	if grown != 0 {
		chargeHome(t, after.Parent, grown, 0)
	}
	if before.UID == after.UID && before.GID == after.GID {
		chargeOwner(t, after.UID, after.GID, grown, 0)
		return
	}
	chargeOwner(t, before.UID, before.GID, -sizeOf(before), -1)
	chargeOwner(t, after.UID, after.GID, sizeOf(after), 1)
}

// rehome gives an inode that is no directory another home, or none. Its row is the caller's to put.
func rehome(t *tx, row *schema.Inode, home layout.FileID) {
	if row.Parent == home {
		return
	}
	chargeHome(t, row.Parent, -row.Size, -1)
	row.Parent = home
	chargeHome(t, row.Parent, row.Size, 1)
}

func chargeHome(t *tx, home layout.FileID, bytes, files int64) {
	if home == 0 {
		return
	}
	key := schema.CountersKey(home)
	addTo(t, key, schema.CounterBytes, bytes)
	addTo(t, key, schema.CounterFiles, files)
	t.dirty(home)
}

func chargeOwner(t *tx, uid, gid uint32, bytes, files int64) {
	key := schema.OwnerKey(uid, gid, t.shard)
	addTo(t, key, schema.OwnerBytes, bytes)
	addTo(t, key, schema.OwnerFiles, files)
}

func addTo(t *tx, key []byte, field int, n int64) {
	if n != 0 {
		t.Add(key, field, n)
	}
}

// addSub adds to t what a directory has been told by one in it.
func addSub(t *tx, dir layout.FileID, u usage) {
	key := schema.CountersKey(dir)
	addTo(t, key, schema.CounterSubBytes, u.bytes)
	addTo(t, key, schema.CounterSubFiles, u.files)
	addTo(t, key, schema.CounterSubDirs, u.dirs)
	t.dirty(dir)
}

// dirty adds to t that a directory's usage changes.
func (t *tx) dirty(dir layout.FileID) {
	t.usage = true
	if dir == layout.RootID || slices.Contains(t.dirtied, dir) {
		return
	}
	t.dirtied = append(t.dirtied, dir)
	t.Add(schema.DirtyKey(dir), 0, 1)
}

// takeBack adds to t that what a directory has told its parent is not in that one any more: it goes, or moves, and then tells
// the new one at once.
func (s *Service) takeBack(ctx context.Context, t *tx, dir, from, to layout.FileID) error {
	key := schema.ToldKey(dir)
	raw, err := schema.FindRow(ctx, s.engine, key)
	if err != nil {
		return err
	}
	counters, err := schema.DecodeCounters(key, raw)
	if err != nil {
		return err
	}
	t.GuardRow(key, raw)
	addSub(t, from, usage{}.minus(toldOf(counters)))
	if to != 0 {
		addSub(t, to, toldOf(counters))
		return nil
	}
	if raw != nil {
		t.Delete(key)
	}
	t.Delete(schema.DirtyKey(dir))
	return nil
}

// moveUsage gives what has got a name in another directory that one for its parent or home. Its row is the caller's to put.
func (s *Service) moveUsage(ctx context.Context, t *tx, id layout.FileID, row *schema.Inode, from, to layout.FileID) error {
	switch {
	case from == to:
	case isDir(row.Mode), row.Parent == from, row.Parent == 0:
		limited, err := s.admitMoved(ctx, id, row, from, to)
		if err != nil {
			return err
		}
		dir := isDir(row.Mode)
		t.onOutcome(func(committed bool) {
			if dir {
				s.forgetParents()
			}
			if limited && committed {
				s.tasks.Go(s.recallUnlimited) // ends when all have answered, or with s.ctx
			}
		})
		if !dir {
			rehome(t, row, to)
			return nil
		}
		row.Parent = to
		return s.takeBack(ctx, t, id, from, to)
	}
	return nil
}

// usageTable is what the service knows of usage beside the catalog.
type usageTable struct {
	kick  chan struct{}             // there may be dirty directories
	token chan struct{}             // has one token, for whoever makes directories tell their parents
	told  atomic.Pointer[time.Time] // all that were dirty then, of all shards, have told; nil: not since the start

	mu      sync.Mutex
	parents map[layout.FileID]layout.FileID // of directories; may be out of date where others serve the volume as well
}

// parentsKept is of how many directories the parent is remembered.
const parentsKept = 1 << 16

func (u *usageTable) init() {
	u.kick = make(chan struct{}, 1)
	u.token = make(chan struct{}, 1)
	u.token <- struct{}{}
	u.parents = map[layout.FileID]layout.FileID{}
}

// usageSoon has directories tell their parents what has changed.
func (s *Service) usageSoon() {
	select {
	case s.usage.kick <- struct{}{}:
	default:
	}
}

// usageLoop has dirty directories of the shard tell their parents, until the service stops. The services of other shards do not say that they have told one of this
// shard, or renamed something there, so with several shards it looks every now and then.
func (s *Service) usageLoop() {
	wait := usagePeriod
	var look <-chan time.Time
	if s.shards > 1 {
		ticker := time.NewTicker(usageLook)
		defer ticker.Stop()
		look = ticker.C
	}
	for {
		select {
		case <-s.usage.kick:
		case <-look:
		case <-s.ctx.Done():
			return
		}
		if retry.Pause(s.ctx, wait) != nil {
			return
		}
		began := time.Now()
		if retry.Persist(s.ctx, s.log, "usage of directories", func() error { return s.propagate(s.ctx) }) != nil {
			return
		}
		wait = max(usagePeriod, min(usageShare*time.Since(began), usageMost))
	}
}

// propagate has every directory of the shard that is dirty now tell its parent, and those above that are the shard's too, each once and the deepest first.
func (s *Service) propagate(ctx context.Context) error {
	select {
	case <-s.usage.token:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { s.usage.token <- struct{}{} }()
	began := time.Now()
	const page = 4096
	from, to := schema.Of(schema.PrefixDirty)
	for {
		var dirs []layout.FileID
		n := 0
		for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: page, KeysOnly: true}) {
			if err != nil {
				return err
			}
			if id := schema.IDOf(kv.Key); s.mine(id) {
				dirs = append(dirs, id)
			}
			from = catalog.After(kv.Key)
			n++
		}
		if err := s.propagateAll(ctx, dirs, false); err != nil {
			return err
		}
		if n < page {
			if s.shards == 1 {
				s.usage.told.Store(&began)
			}
			return nil
		}
	}
}

// settleUsage has all that is committed when it is called told to all directories above, whatever their shards.
//
// Other services do the same at the same time: what is dirty is looked for in one revision, since what one of them tells makes another directory dirty; and each is
// followed up to the root also when it has nothing to tell, since somebody else may have done it just now.
func (s *Service) settleUsage(ctx context.Context) error {
	if s.shards == 1 {
		return s.propagate(ctx)
	}
	select {
	case <-s.usage.token:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { s.usage.token <- struct{}{} }()
	began := time.Now()
	dirs, err := s.dirtyNow(ctx)
	if err != nil {
		return err
	}
	s.forgetParents() // another service may have moved directories
	if err := s.propagateAll(ctx, dirs, true); err != nil {
		return err
	}
	s.usage.told.Store(&began)
	return nil
}

// dirtyNow are the dirty directories of all shards at one moment.
func (s *Service) dirtyNow(ctx context.Context) (dirs []layout.FileID, err error) {
	snap, err := s.engine.Snapshot(ctx)
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

// propagateAll has directories tell their parents, and these theirs: if they have anything to tell and are the shard's, or with whole anyway.
func (s *Service) propagateAll(ctx context.Context, dirs []layout.FileID, whole bool) error {
	var todo dirHeap
	for _, id := range dirs {
		chain, err := s.ancestors(ctx, id)
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
		parent, told, err := s.tellParent(ctx, d.id)
		if err != nil {
			return fmt.Errorf("directory %d: %w", d.id, err)
		}
		if parent != 0 && parent != layout.RootID && (whole || told && s.mine(parent)) {
			heap.Push(&todo, deepDir{parent, d.depth - 1})
		}
	}
	return nil
}

// tellParent has a directory tell its parent what has changed since the last time, and takes it for clean if nothing changes meanwhile.
func (s *Service) tellParent(ctx context.Context, dir layout.FileID) (parent layout.FileID, told bool, err error) {
	hot := false // what is in it changes too often for it to become clean now
	for try := range retry.Tries {
		if err := retry.BackOff(ctx, try); err != nil {
			return 0, false, err
		}
		dirtyKey := schema.DirtyKey(dir)
		// Read before the counters: so it is another one if these change later.
		dirty, err := schema.FindRow(ctx, s.engine, dirtyKey)
		if err != nil {
			return 0, false, err
		}
		keys := [][]byte{schema.InodeKey(dir), schema.CountersKey(dir), schema.ToldKey(dir)}
		raw, err := s.engine.GetMany(ctx, keys)
		if err != nil {
			return 0, false, err
		}
		var t tx
		t.Durability = catalog.NoSync // what a crash takes back is told again
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
		news := total.minus(toldOf(before))
		t.GuardRow(keys[0], raw[0]) // it still has this parent
		t.GuardRow(keys[2], raw[2])
		clean := -1
		if dirty != nil && !hot {
			clean = t.GuardEqual(dirtyKey, dirty)
			t.Delete(dirtyKey)
		}
		if news != (usage{}) {
			t.Put(keys[2], catalog.EncodeCounters(total.bytes, total.files, total.dirs))
			addSub(&t, row.Parent, news)
		}
		if len(t.Puts)+len(t.Deletes) == 0 {
			if dirty != nil {
				s.usageSoon()
			}
			return row.Parent, false, nil
		}
		err = s.engine.Commit(ctx, &t.Batch)
		switch guard := (*catalog.GuardError)(nil); {
		case err == nil:
			if hot {
				s.usageSoon()
			}
			return row.Parent, news != (usage{}), nil
		case errors.As(err, &guard):
			hot = hot || guard.Index == clean
		case errors.Is(err, catalog.ErrConflict), errors.Is(err, catalog.ErrUnknown):
		default:
			return 0, false, err
		}
	}
	s.usageSoon() // others keep changing it
	return 0, false, nil
}

// ancestors are the directories from one up to the root, itself first. One that has no way to the root has those that it has.
func (s *Service) ancestors(ctx context.Context, dir layout.FileID) ([]layout.FileID, error) {
	var chain []layout.FileID
	for dir != 0 {
		chain = append(chain, dir)
		if dir == layout.RootID {
			break
		}
		if len(chain) > maxPathDepth {
			s.forgetParents() // some are from before a rename
			break
		}
		s.usage.mu.Lock()
		parent, ok := s.usage.parents[dir]
		s.usage.mu.Unlock()
		if !ok {
			row, _, err := s.inode(ctx, dir)
			if errors.Is(err, errStale) {
				break
			}
			if err != nil {
				return nil, err
			}
			parent = row.Parent
			s.usage.mu.Lock()
			if len(s.usage.parents) >= parentsKept {
				clear(s.usage.parents)
			}
			s.usage.parents[dir] = parent
			s.usage.mu.Unlock()
		}
		dir = parent
	}
	return chain, nil
}

// maxPathDepth is how deep directories are looked for. Below that usage is still counted, but not always told to all above at once.
const maxPathDepth = 1 << 14

// forgetParents is called when a directory has changed its parent.
func (s *Service) forgetParents() {
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	clear(s.usage.parents)
}

// usageOf is all that is below a directory, with all that is committed when it is called.
func (s *Service) usageOf(ctx context.Context, dir layout.FileID) (usage, error) {
	if err := s.settleUsage(ctx); err != nil {
		return usage{}, err
	}
	counters, err := schema.ReadCounters(ctx, s.engine, dir)
	return totalOf(counters), err
}
