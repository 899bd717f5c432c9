package meta

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

const testUnit = 64 << 10

// The manager of data files is what the service is made for.
var _ Files = (*datafile.Manager)(nil)

// fakeFiles stands in for data servers. It keeps layouts in the catalog as package datafile does, and the data files'
// lengths in memory.
type fakeFiles struct {
	engine catalog.Engine

	mu         sync.Mutex
	next       uint64
	length     map[uint64]int64 // of each data file, by number
	unstable   map[uint64]bool
	down       error             // what Sync and Truncate fail with
	grown      int64             // the largest size that Grow was called with
	stall      chan struct{}     // Sync and Truncate wait for it, or for ctx
	assign     error             // what Assign fails with
	assigned   func()            // called before Assign returns; nil: nothing is
	short      bool              // AssignNew has nothing
	near       []layout.DeviceID // what AssignNew was told
	settled    []error           // what became of the batches that AssignNew added to
	stale      []metarpc.CopyRef
	away       layout.DeviceID                                 // whose copies Assign makes stale; zero: none
	filled     func(ctx context.Context, r layout.Range) error // called by Fill; nil: there is nothing to fill
	fillEnd    int64                                           // what Fill returns
	perBlock   int64                                           // Fill takes a second for so much, and ends early after one such block; 0: it takes no time
	begun      func(context.Context) error                     // called by StartFill; nil: nothing is
	fillable   func(layout.FileID) bool                        // what Fillable says; nil: whether filled is there
	failing    func(layout.FileID) error                       // what Fill fails with; nil: nothing
	fillErr    error                                           // what StartFill returns
	there      bool                                            // MoveTo finds nothing to do
	moving     layout.FileID                                   // a file that is to be moved
	started    int                                             // how often StartFill was called
	stalled    int                                             // calls that wait
	blocks     map[layout.DeviceID]bool                        // which devices are namespaces
	extents    func([]metarpc.Segment) []metarpc.Segment       // what Extents makes of segments; nil: nothing else
	awaited    []layout.FileID                                 // what AwaitKnown was asked about
	settling   chan struct{}                                   // closed when AwaitKnown may return; nil = at once
	valid      map[layout.FileID][]metarpc.Written             // what Validate was told
	validate   error                                           // what Validate fails with
	barred     func(metarpc.SessionID)                         // called by FenceSession before it returns
	cut        func(size int64)                                // called by Truncate before it cuts
	reports    map[metarpc.SessionID][]metarpc.DeviceStats     // that count now
	complaints map[metarpc.SessionID][]layout.DeviceID
	states     metarpc.DeviceStatesArgs
	news       chan struct{}           // closed, and replaced, when states changes
	others     []metarpc.DeviceInfo    // what LearnDevices finds
	known      []metarpc.DeviceInfo    // what it has found, which Devices tells
	learnt     error                   // what LearnDevices fails with
	waiting    map[layout.DeviceID]int // how many files wait for each, times those that Waiting is asked about
	changed    *sync.Cond
}

func newFakeFiles(engine catalog.Engine) *fakeFiles {
	f := &fakeFiles{
		engine: engine, length: map[uint64]int64{}, unstable: map[uint64]bool{}, reports: map[metarpc.SessionID][]metarpc.DeviceStats{},
		complaints: map[metarpc.SessionID][]layout.DeviceID{}, news: make(chan struct{}),
		blocks: map[layout.DeviceID]bool{}, valid: map[layout.FileID][]metarpc.Written{}, barred: func(metarpc.SessionID) {}, cut: func(int64) {},
	}
	f.changed = sync.NewCond(&f.mu)
	return f
}

func (f *fakeFiles) Assign(ctx context.Context, id layout.FileID, ino schema.Inode, off, n int64, session metarpc.SessionID, appends bool, near []layout.DeviceID, drop func(metarpc.CopyRef) bool) (schema.Layout, error) {
	f.mu.Lock()
	err := f.assign
	f.mu.Unlock()
	if err != nil {
		return schema.Layout{}, err
	}
	for {
		var row schema.Layout
		old, err := f.engine.Get(ctx, schema.LayoutKey(id))
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return row, err
		}
		if old != nil {
			if err := schema.Decode(old, &row); err != nil {
				return row, err
			}
		} else {
			row = schema.Layout{StripeUnit: ino.Policy.StripeUnit, Width: ino.Policy.StripeCount, Mirrors: make([][]schema.DataFile, ino.Policy.Mirrors)}
		}
		want := 1
		if off+n > row.StripeUnit || n == layout.ToEOF {
			want = row.Width
		}
		f.mu.Lock()
		for i := range row.Mirrors {
			for len(row.Mirrors[i]) < want {
				f.next++
				row.Mirrors[i] = append(row.Mirrors[i], schema.DataFile{
					Device: layout.DeviceID{byte(len(row.Mirrors[i]) + 1)}, Number: f.next, Handle: []byte{1}, UID: 1000, GID: 1000,
				})
				f.length[f.next] = 0
			}
		}
		for _, files := range row.Mirrors {
			for j := range files {
				ref := metarpc.CopyRef{Device: files[j].Device, Handle: files[j].Handle}
				if drop != nil && files[j].Device == f.away && drop(ref) {
					files[j].State = layout.CopyStale
				}
			}
		}
		f.mu.Unlock()
		var b catalog.Batch
		b.GuardPresent(schema.InodeKey(id))
		if old != nil {
			b.GuardEqual(schema.LayoutKey(id), old)
		} else {
			b.GuardAbsent(schema.LayoutKey(id))
		}
		b.Put(schema.LayoutKey(id), schema.Encode(&row))
		b.Put(schema.WriterKey(id, session), schema.Encode(&schema.Writer{Awaited: appends || f.OnNamespaces(row)}))
		err = f.engine.Commit(ctx, &b)
		guard := (*catalog.GuardError)(nil)
		if errors.As(err, &guard) && guard.Index == 0 {
			return row, fmt.Errorf("inode %d: %w", id, syscall.ESTALE)
		}
		if !errors.As(err, &guard) {
			f.mu.Lock()
			assigned := f.assigned
			f.mu.Unlock()
			if assigned != nil {
				assigned()
			}
			return row, err
		}
	}
}

func (f *fakeFiles) AwaitKnown(ctx context.Context, id layout.FileID) error {
	f.mu.Lock()
	f.awaited = append(f.awaited, id)
	settling := f.settling
	f.mu.Unlock()
	if settling == nil {
		return nil
	}
	select {
	case <-settling:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// AssignNew gives data files unless there is to be a shortage of them.
func (f *fakeFiles) AssignNew(b *catalog.Batch, id layout.FileID, ino schema.Inode, session metarpc.SessionID, near []layout.DeviceID) (row schema.Layout, settle func(error), ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.short {
		return row, nil, false
	}
	row = schema.Layout{StripeUnit: ino.Policy.StripeUnit, Width: ino.Policy.StripeCount, Mirrors: make([][]schema.DataFile, ino.Policy.Mirrors)}
	for i := range row.Mirrors {
		f.next++
		row.Mirrors[i] = []schema.DataFile{{Device: layout.DeviceID{1}, Number: f.next, Handle: []byte{1}, UID: 1000, GID: 1000}}
		f.length[f.next] = 0
	}
	f.near = near
	b.GuardAbsent(schema.LayoutKey(id))
	b.Put(schema.LayoutKey(id), schema.Encode(&row))
	b.Put(schema.WriterKey(id, session), nil)
	return row, func(err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.settled = append(f.settled, err)
	}, true
}

func (f *fakeFiles) Segments(row schema.Layout, mode layout.IOMode) []metarpc.Segment {
	if len(row.Mirrors) == 0 {
		return nil
	}
	seg := metarpc.Segment{Len: row.StripeUnit, IOMode: mode, StripeUnit: row.StripeUnit}
	if len(row.Mirrors[0]) == row.Width {
		seg.Len = layout.ToEOF
	}
	for _, m := range row.Mirrors {
		var mirror []metarpc.DataFile
		for _, d := range m {
			mirror = append(mirror, metarpc.DataFile{Device: d.Device, Handle: d.Handle, UID: d.UID, GID: d.GID, State: d.State})
		}
		seg.Mirrors = append(seg.Mirrors, mirror)
	}
	for _, c := range row.Caches {
		if c.File.State == layout.CopyGood {
			seg.Mirrors = append(seg.Mirrors, slices.Repeat([]metarpc.DataFile{{Device: c.File.Device, Handle: c.File.Handle}}, len(row.Mirrors[0])))
		}
	}
	return []metarpc.Segment{seg}
}

func (f *fakeFiles) Describe(row schema.Layout, ino schema.Inode) metarpc.Described {
	return metarpc.Described{StripeUnit: ino.Policy.StripeUnit, Mirrors: make([][]metarpc.DescribedServer, len(row.Mirrors))}
}

func (f *fakeFiles) Discard(b *catalog.Batch, id layout.FileID, row schema.Layout) {
	for _, m := range row.Mirrors {
		for _, d := range m {
			b.Put(schema.GarbageKey(d.Device, d.Number), nil)
		}
	}
	for _, c := range row.Caches {
		b.Put(schema.GarbageKey(c.File.Device, c.File.Number), nil)
		b.Delete(schema.CacheKey(c.File.Device, id))
	}
}

func (f *fakeFiles) CacheRoom(dev layout.DeviceID, n, pending int64) error { return nil }

func (f *fakeFiles) OnNamespaces(row schema.Layout) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	on := func(d *schema.DataFile) bool { return f.blocks[d.Device] }
	return row.Has(on) || slices.ContainsFunc(row.Caches, func(c schema.Cache) bool { return on(&c.File) })
}

func (f *fakeFiles) Extents(_ context.Context, _ schema.Layout, segments []metarpc.Segment) ([]metarpc.Segment, error) {
	f.mu.Lock()
	extents := f.extents
	f.mu.Unlock()
	if extents != nil {
		segments = extents(segments)
	}
	return segments, nil
}

func (f *fakeFiles) Validate(_ context.Context, id layout.FileID, written []metarpc.Written) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.validate == nil {
		f.valid[id] = append(f.valid[id], written...)
	}
	return f.validate
}

func (f *fakeFiles) FenceSession(ctx context.Context, _ schema.Layout, session metarpc.SessionID) error {
	if err := f.wait(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	barred := f.barred
	f.mu.Unlock()
	barred(session)
	return nil
}

func (f *fakeFiles) CacheSegments(cache schema.Cache) []metarpc.Segment {
	return []metarpc.Segment{{
		Len: layout.ToEOF, IOMode: layout.IOModeRW, StripeUnit: testUnit,
		Mirrors: [][]metarpc.DataFile{{{Device: cache.File.Device, Handle: cache.File.Handle}}},
	}}
}

// recache changes the caches of a file.
func (f *fakeFiles) recache(ctx context.Context, id layout.FileID, change func(*schema.Layout)) error {
	for {
		old, err := f.engine.Get(ctx, schema.LayoutKey(id))
		if errors.Is(err, catalog.ErrNotFound) {
			return nil
		}
		var row schema.Layout
		if err == nil {
			err = schema.Decode(old, &row)
		}
		if err != nil {
			return err
		}
		var b catalog.Batch
		before := slices.Clone(row.Caches)
		change(&row)
		for _, c := range before {
			if !slices.ContainsFunc(row.Caches, func(now schema.Cache) bool { return now.File.Device == c.File.Device }) {
				b.Delete(schema.CacheKey(c.File.Device, id))
			}
		}
		for _, c := range row.Caches {
			use := c.Use()
			b.Put(schema.CacheKey(c.File.Device, id), schema.Encode(&use))
		}
		b.GuardEqual(schema.LayoutKey(id), old)
		b.Put(schema.LayoutKey(id), schema.Encode(&row))
		err = f.engine.Commit(ctx, &b)
		if guard := (*catalog.GuardError)(nil); !errors.As(err, &guard) {
			return err
		}
	}
}

func (f *fakeFiles) StartCache(ctx context.Context, id layout.FileID, dev layout.DeviceID, n int64, session metarpc.SessionID) (cache schema.Cache, ok bool, err error) {
	f.mu.Lock()
	f.next++
	number := f.next
	f.mu.Unlock()
	var refused error
	err = f.recache(ctx, id, func(row *schema.Layout) {
		ok = true
		for _, c := range row.Caches {
			if c.File.Device == dev {
				if cache = c; c.Session != session {
					refused = syscall.EBUSY
				}
				return
			}
		}
		cache = schema.Cache{Bytes: n, Session: session, File: schema.DataFile{
			Device: dev, Number: number, Handle: []byte{byte(number)}, State: layout.CopyFilling,
		}}
		row.Caches = append(row.Caches, cache)
	})
	return cache, ok, errors.Join(err, refused)
}

func (f *fakeFiles) EndCache(ctx context.Context, id layout.FileID, ref metarpc.CopyRef, session metarpc.SessionID) (good bool, err error) {
	err = f.recache(ctx, id, func(row *schema.Layout) {
		for i := range row.Caches {
			c := &row.Caches[i]
			if sameCopy(c.Ref(), ref) && c.Session == session && c.File.State == layout.CopyFilling {
				c.File.State, c.Session, c.Made = layout.CopyGood, metarpc.SessionID{}, time.Now().UnixNano()
			}
			good = good || sameCopy(c.Ref(), ref) && c.File.State == layout.CopyGood
		}
	})
	return good, err
}

func (f *fakeFiles) StaleCaches(ctx context.Context, id layout.FileID, such func(*schema.Cache) bool) (ended, kept []schema.Cache, err error) {
	err = f.recache(ctx, id, func(row *schema.Layout) {
		var left []schema.Cache
		ended, kept = nil, nil
		for _, c := range row.Caches {
			if !such(&c) {
				kept, left = append(kept, c), append(left, c)
				continue
			}
			ended = append(ended, c)
			if c.File.State != layout.CopyFilling {
				c.File.State = layout.CopyStale
				left = append(left, c)
			}
		}
		row.Caches = left
	})
	return ended, kept, err
}

func (f *fakeFiles) DiscardCaches(ctx context.Context, id layout.FileID, refs []metarpc.CopyRef) error {
	return f.recache(ctx, id, func(row *schema.Layout) {
		row.Caches = slices.DeleteFunc(row.Caches, func(c schema.Cache) bool {
			return c.File.State == layout.CopyStale && slices.ContainsFunc(refs, func(ref metarpc.CopyRef) bool { return sameCopy(ref, c.Ref()) })
		})
	})
}

func (f *fakeFiles) Kick() {}

// wait does what stall and down ask for.
func (f *fakeFiles) wait(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.stall != nil {
		stall := f.stall
		f.stalled++
		f.changed.Broadcast()
		f.mu.Unlock()
		var err error
		select {
		case <-stall:
		case <-ctx.Done():
			err = ctx.Err()
		}
		f.mu.Lock()
		f.stalled--
		if err != nil {
			return err
		}
	}
	return f.down
}

// hold makes Sync and Truncate wait until release is called.
func (f *fakeFiles) hold() (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stall = make(chan struct{})
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		close(f.stall)
		f.stall = nil
	})
}

// awaitStalled returns when n calls wait for release.
func (f *fakeFiles) awaitStalled(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.stalled < n {
		f.changed.Wait()
	}
}

func (f *fakeFiles) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = err
}

func (f *fakeFiles) Truncate(ctx context.Context, row schema.Layout, size int64) error {
	if err := f.wait(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut(size)
	for _, m := range row.Mirrors {
		for _, d := range m {
			f.length[d.Number] = min(f.length[d.Number], size)
		}
	}
	return nil
}

func (f *fakeFiles) Grow(ctx context.Context, row schema.Layout, refs []metarpc.CopyRef, size int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	files := slices.Concat(row.Mirrors...)
	for i := range row.Caches {
		files = append(files, row.Caches[i].File)
	}
	for i := range files {
		if slices.ContainsFunc(refs, files[i].Is) {
			f.length[files[i].Number] = max(f.length[files[i].Number], size)
			f.grown = max(f.grown, size)
		}
	}
	return nil
}

func (f *fakeFiles) Whole(row schema.Layout, near []layout.DeviceID, mirrors bool) (ref metarpc.CopyRef, several bool) {
	return (*datafile.Manager)(nil).Whole(row, near, mirrors)
}

func (f *fakeFiles) MayBeWhole(row schema.Layout, ino schema.Inode, near []layout.DeviceID) bool {
	return (*datafile.Manager)(nil).MayBeWhole(row, ino, near)
}

func (f *fakeFiles) Fence(ctx context.Context, id layout.FileID) error {
	if err := f.wait(ctx); err != nil {
		return err
	}
	key := schema.LayoutKey(id)
	for {
		old, err := f.engine.Get(ctx, key)
		if errors.Is(err, catalog.ErrNotFound) {
			return nil
		}
		var row schema.Layout
		if err == nil {
			err = schema.Decode(old, &row)
		}
		if err != nil {
			return err
		}
		for _, m := range row.Mirrors {
			for i := range m {
				m[i].UID++
				m[i].GID++
			}
		}
		var b catalog.Batch
		b.GuardEqual(key, old)
		b.Put(key, schema.Encode(&row))
		err = f.engine.Commit(ctx, &b)
		if guard := (*catalog.GuardError)(nil); !errors.As(err, &guard) {
			return err
		}
	}
}

func (f *fakeFiles) MarkStale(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef) ([]metarpc.CopyRef, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stale = append(f.stale, copies...)
	return f.stale, f.down
}

func (f *fakeFiles) Waiting(_ context.Context, ids []layout.FileID, sum map[layout.DeviceID]int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for dev, n := range f.waiting {
		sum[dev] += int64(n * len(ids))
	}
	return nil
}

func (f *fakeFiles) Fillable(_ context.Context, id layout.FileID, pinned []metarpc.CopyRef) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	can := f.filled != nil
	if f.fillable != nil {
		can = f.fillable(id)
	}
	return can && len(pinned) == 0, nil
}

func (f *fakeFiles) MayFill(ctx context.Context, ids []layout.FileID) (may []layout.FileID, err error) {
	for _, id := range ids {
		if can, _ := f.Fillable(ctx, id, nil); can {
			may = append(may, id)
		}
	}
	return may, nil
}

func (f *fakeFiles) StartFill(ctx context.Context, id layout.FileID, _ []metarpc.CopyRef) (row schema.Layout, done int64, err error) {
	f.mu.Lock()
	f.started++
	err = f.fillErr
	begun := f.begun
	f.mu.Unlock()
	if err == nil && begun != nil {
		err = begun(ctx)
	}
	if err != nil {
		return row, 0, err
	}
	raw, err := f.engine.Get(ctx, schema.LayoutKey(id))
	if err == nil {
		err = schema.Decode(raw, &row)
	}
	if err == nil {
		row.Mirrors = append(row.Mirrors, []schema.DataFile{{Device: layout.DeviceID{9}, Handle: []byte{9}, State: layout.CopyFilling}})
	}
	return row, 0, err
}

func (f *fakeFiles) Moving(_ context.Context, from layout.FileID, _ int) (ids []layout.FileID, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.moving > from {
		ids = append(ids, f.moving)
	}
	return ids, nil
}
func (f *fakeFiles) StartReplace(ctx context.Context, id layout.FileID, held []metarpc.CopyRef) (schema.Layout, error) {
	row, _, err := f.StartFill(ctx, id, nil)
	return row, err
}
func (f *fakeFiles) MoveTo(ctx context.Context, id layout.FileID, dev layout.DeviceID) (data, there bool, err error) {
	f.mu.Lock()
	there = f.there
	f.mu.Unlock()
	var b catalog.Batch
	if !there {
		b.Put(schema.MoveKey(id), schema.Encode(&schema.Move{Device: dev}))
	}
	return true, there, f.engine.Commit(ctx, &b)
}
func (f *fakeFiles) StopMove(ctx context.Context, id layout.FileID) error {
	var b catalog.Batch
	b.Delete(schema.MoveKey(id))
	return f.engine.Commit(ctx, &b)
}
func (f *fakeFiles) Exchange(context.Context, layout.FileID, []metarpc.CopyRef) error {
	return nil
}
func (f *fakeFiles) DropMoved(context.Context, layout.FileID) error { return nil }
func (f *fakeFiles) DrainDevice(ctx context.Context, id layout.DeviceID, cancel bool) (metarpc.DeviceInfo, error) {
	return f.Devices(ctx)[0], nil
}

// RemoveDevice takes no device but a lost one for drained.
func (f *fakeFiles) RemoveDevice(_ context.Context, _ layout.DeviceID, lost bool) error {
	if !lost {
		return fmt.Errorf("not drained: %w", syscall.EBUSY)
	}
	return nil
}

func (f *fakeFiles) Fill(ctx context.Context, id layout.FileID, row schema.Layout, off, n int64, copied func(context.Context, int) error, enough <-chan struct{}) (done, end int64, err error) {
	f.mu.Lock()
	block, failing := f.perBlock, f.failing
	f.mu.Unlock()
	if failing != nil {
		if err := failing(id); err != nil {
			return 0, 0, err
		}
	}
	if block > 0 { // it takes a second for each
		for done = off; done < min(off+n, f.fillEnd); {
			if err := retry.Pause(ctx, time.Second); err != nil {
				return 0, 0, err
			}
			done = min(done+block, f.fillEnd)
			select {
			case <-enough:
				n = done - off
			default:
			}
		}
		n = done - off
	}
	f.mu.Lock()
	filled := f.filled
	f.mu.Unlock()
	if filled != nil {
		if err := filled(ctx, layout.Range{Off: off, Len: n}); err != nil {
			return 0, 0, err
		}
	}
	return off + n, f.fillEnd, copied(ctx, int(min(n, f.fillEnd-off)))
}

func (f *fakeFiles) Compare(context.Context, layout.FileID, int64, int64) (int, []metarpc.Difference, error) {
	return 0, nil, nil
}

func (f *fakeFiles) EndFill(ctx context.Context, id layout.FileID, row schema.Layout) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.filled = nil
	var b catalog.Batch
	b.Delete(schema.FillKey(id))
	b.Delete(schema.MoveKey(id))
	return true, f.engine.Commit(ctx, &b)
}

func (f *fakeFiles) Sync(ctx context.Context, row schema.Layout) (end int64, err error) {
	if err := f.wait(ctx); err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range row.Mirrors {
		for _, d := range m {
			end = max(end, f.length[d.Number])
			delete(f.unstable, d.Number)
		}
	}
	return end, nil
}

// write is what a client's UNSTABLE write of the bytes before end does to the data files of one mirror.
func (f *fakeFiles) write(t *testing.T, id layout.FileID, end int64) {
	t.Helper()
	row := f.row(t, id)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range row.Mirrors {
		i := int((end - 1) / row.StripeUnit % int64(row.Width))
		n := m[i].Number
		f.length[n] = max(f.length[n], end)
		f.unstable[n] = true
	}
}

// end is the end of the longest data file.
func (f *fakeFiles) end(t *testing.T, id layout.FileID) int64 {
	t.Helper()
	row := f.row(t, id)
	f.mu.Lock()
	defer f.mu.Unlock()
	end := int64(0)
	for _, m := range row.Mirrors {
		for _, d := range m {
			end = max(end, f.length[d.Number])
		}
	}
	return end
}

func (f *fakeFiles) row(t *testing.T, id layout.FileID) (row schema.Layout) {
	t.Helper()
	raw, err := f.engine.Get(t.Context(), schema.LayoutKey(id))
	if err != nil {
		t.Fatalf("layout of %d: %v", id, err)
	}
	if err := schema.Decode(raw, &row); err != nil {
		t.Fatal(err)
	}
	return row
}

func (f *fakeFiles) Report(session metarpc.SessionID, span time.Duration, devices []metarpc.DeviceStats) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports[session] = append(f.reports[session], devices...)
}

func (f *fakeFiles) Forget(session metarpc.SessionID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.reports, session)
	delete(f.complaints, session)
}

func (f *fakeFiles) Complain(session metarpc.SessionID, devices []layout.DeviceID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.complaints[session] = devices
}

// setDown makes devices down, and that news.
func (f *fakeFiles) setDown(ids ...layout.DeviceID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.states = metarpc.DeviceStatesArgs{Prober: [16]byte{1}, Epoch: f.states.Epoch + 1}
	for _, id := range ids {
		f.states.Down = append(f.states.Down, metarpc.DownDevice{Device: id, Silent: true})
	}
	close(f.news)
	f.news = make(chan struct{})
}

func (f *fakeFiles) DeviceStates(ctx context.Context, epoch uint64) (*metarpc.DeviceStatesArgs, error) {
	for {
		f.mu.Lock()
		states, news := f.states, f.news
		f.mu.Unlock()
		if states.Epoch > epoch {
			return &states, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (f *fakeFiles) LearnDevices(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.learnt == nil {
		f.known = f.others
	}
	return f.learnt
}

func (f *fakeFiles) Devices(context.Context) []metarpc.DeviceInfo {
	f.mu.Lock()
	defer f.mu.Unlock()
	first := metarpc.DeviceInfo{Device: metarpc.Device{ID: layout.DeviceID{1}, Addrs: []string{"127.0.0.1:2049"}}, URL: "nfs://127.0.0.1:2049/a", Reachable: true}
	return append([]metarpc.DeviceInfo{first}, f.known...)
}

func (f *fakeFiles) AddDevice(ctx context.Context, url string, force bool) (metarpc.DeviceInfo, error) {
	if url != "nfs://127.0.0.1:2049/a" {
		return metarpc.DeviceInfo{}, fmt.Errorf("dial %s: %w", url, syscall.ECONNREFUSED)
	}
	return f.Devices(ctx)[0], nil
}

func (f *fakeFiles) StatFS() (total, free, avail int64) { return 1000, 500, 400 }
func (f *fakeFiles) GarbageCount(ctx context.Context) int64 {
	return countRows(ctx, f.engine, schema.PrefixGarbage)
}

func countRows(ctx context.Context, engine catalog.Engine, prefix byte) int64 {
	from, to := schema.Of(prefix)
	n := int64(0)
	for range engine.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		n++
	}
	return n
}

// logTo shows what the service logs when a test fails.
func logTo(t testing.TB) *slog.Logger {
	if _, ok := t.(*testing.B); ok {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(bytes.TrimRight(p, "\n")))
	return len(p), nil
}

// host runs a service that can be killed and started again on the same catalog.
type host struct {
	others *cluster // nil if there is one service
	t      testing.TB
	engine catalog.Engine
	files  *fakeFiles
	lease  time.Duration
	leases int // Config.Leases
	listen func() net.Listener
	dial   func() (net.Conn, error)
	// Of a service that is one of several; else nil.
	config  func(*Config)  // changes what it is started with
	started func(*Service) // is called when it is

	svc *Service
	l   net.Listener
}

// newHost starts a service on an engine, on the loopback interface.
func newHost(t testing.TB, engine catalog.Engine) *host {
	h := &host{t: t, engine: engine, files: newFakeFiles(engine), lease: time.Minute}
	h.listen = func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	h.dial = func() (net.Conn, error) { return net.Dial("tcp", h.l.Addr().String()) }
	return h
}

func (h *host) start() *host {
	h.t.Helper()
	cfg := Config{
		Engine: h.engine, Files: h.files, Log: logTo(h.t), Lease: h.lease, Slots: 16, Leases: h.leases,
		Policy: layout.Policy{StripeUnit: testUnit, StripeCount: 2}, Program: "weftd test",
	}
	if h.config != nil {
		h.config(&cfg)
	}
	svc, err := New(context.Background(), cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	h.ownRoot()
	h.svc, h.l = svc, h.listen()
	if h.started != nil {
		h.started(svc)
	}
	served := make(chan error, 1)
	go func(l net.Listener) { served <- svc.Serve(l) }(h.l)
	h.t.Cleanup(func() {
		h.kill(svc)
		if err := <-served; err != nil && !errors.Is(err, net.ErrClosed) {
			h.t.Errorf("Serve: %v", err)
		}
	})
	return h
}

// ownRoot gives a new volume's root directory to the user that clients of the tests are.
func (h *host) ownRoot() {
	h.t.Helper()
	var root schema.Inode
	raw, err := h.engine.Get(context.Background(), schema.InodeKey(layout.RootID))
	if err == nil {
		err = schema.Decode(raw, &root)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	if root.UID == 0 {
		var tx usage.Change
		before := root
		root.UID, root.GID = testCred.UID, testCred.GID
		tx.Recharge(&before, &root)
		tx.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
		if err := h.engine.Commit(context.Background(), &tx.Batch); err != nil {
			h.t.Fatal(err)
		}
	}
}

// kill stops a service without letting calls end.
func (h *host) kill(svc *Service) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	svc.Shutdown(ctx)
}

// restart kills the service and starts it again.
func (h *host) restart() {
	h.t.Helper()
	h.kill(h.svc)
	h.start()
}

// startMemory is a service on an empty catalog in memory.
func startMemory(t testing.TB) *host {
	t.Helper()
	return newHost(t, memorytest.New()).start()
}

// engines are the kinds of catalog that tests run on where durability matters.
var engines = map[string]func(testing.TB) catalog.Engine{
	"memory": func(testing.TB) catalog.Engine { return memorytest.New() },
	"pebble": func(t testing.TB) catalog.Engine {
		e, err := pebble.Open(pebble.Config{Dir: t.TempDir(), Logger: logTo(t)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		return e
	},
}

// testCred is on whose behalf clients call unless they are told otherwise.
var testCred = metarpc.Cred{UID: 7, GID: 8}

// client is a client of the protocol with no comfort.
type client struct {
	t      testing.TB
	h      *host
	cred   metarpc.Cred
	hello  metarpc.Hello
	recall func(*metarpc.LayoutRecallArgs) metarpc.Status   // nil = OK
	back   func(op metarpc.BackOp, args any) metarpc.Status // other callbacks; nil = OK
	first  chan metarpc.Status                              // what is said before the answer to any; nil = nothing
	ready  chan metarpc.LockReadyArgs                       // what LockReady said
	// granted is called with each layout, before callbacks that come after it; nil: nothing is.
	granted func(*metarpc.LayoutResult)

	mu       sync.Mutex
	welcome  *metarpc.Welcome
	conn     net.Conn
	sequence []uint64
	free     chan int
	waiting  map[[2]uint64]chan []byte // by slot and sequence
	layouts  map[[2]uint64]bool        // which of these wait for layouts

	parts  []*client            // of a volume with several shards: the clients of all of them, of which c is one
	resend map[[2]uint64][]byte // unanswered calls, which are sent again on the next connection; nil: none are
}

var clients atomic.Uint32

func (h *host) client() *client {
	h.t.Helper()
	c := h.newClient()
	c.connect()
	return c
}

// root is a client whose user may do everything.
func (h *host) root() *client {
	c := h.client()
	c.cred = metarpc.Cred{}
	return c
}

func (h *host) newClient() *client {
	c := &client{t: h.t, h: h, cred: testCred, waiting: map[[2]uint64]chan []byte{}, layouts: map[[2]uint64]bool{}, ready: make(chan metarpc.LockReadyArgs, 100)}
	number := clients.Add(1)
	c.hello = metarpc.Hello{
		Magic: metarpc.Magic, Lowest: metarpc.Lowest, Highest: metarpc.Version,
		Client: metarpc.ClientInfo{ID: [16]byte{byte(number), byte(number >> 8)}, Host: "test", PID: int(number), Program: "test", Mount: "/mnt"},
	}
	h.t.Cleanup(c.drop)
	return c
}

// greet connects and returns what the service says to the hello.
func (c *client) greet() (net.Conn, *metarpc.Welcome) {
	c.t.Helper()
	conn, err := c.h.dial()
	if err != nil {
		c.t.Fatal(err)
	}
	frame, err := metarpc.AppendHello(nil, &c.hello)
	if err == nil {
		_, err = conn.Write(frame)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	body, err := metarpc.ReadFrame(conn, nil, metarpc.MaxHello)
	if err != nil {
		c.t.Fatalf("welcome: %v", err)
	}
	w, err := metarpc.ParseWelcome(body, metarpc.Versions{Highest: math.MaxUint32})
	if err != nil {
		c.t.Fatalf("welcome: %v", err)
	}
	return conn, w
}

// connect connects, with the session it has if it has one.
func (c *client) connect() {
	c.t.Helper()
	c.drop()
	conn, w := c.greet()
	if w.Status != metarpc.StatusOK {
		c.t.Fatalf("welcome: %v %s", w.Status, w.Message)
	}
	c.mu.Lock()
	c.conn, c.welcome = conn, w
	c.hello.Session = w.Session
	if c.free == nil {
		c.free = make(chan int, w.Slots)
		c.sequence = make([]uint64, w.Slots)
		for i := range w.Slots {
			c.free <- i
		}
	}
	for _, frame := range c.resend {
		conn.Write(frame)
	}
	c.mu.Unlock()
	go c.read(conn, w.Version)
}

// drop closes the connection.
func (c *client) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// read hands out replies and answers callbacks, until the connection is closed.
func (c *client) read(conn net.Conn, version uint32) {
	r := bufio.NewReader(conn)
	var buf []byte
	for {
		var err error
		if buf, err = metarpc.ReadFrame(r, buf, metarpc.MaxFrame); err != nil {
			return
		}
		body := bytes.Clone(buf)
		kind, err := metarpc.FrameKind(body)
		switch {
		case err == nil && kind == metarpc.KindReply:
			h, rest, err := metarpc.ParseReplyHeader(body)
			if err != nil {
				c.t.Errorf("reply: %v", err)
				return
			}
			key := [2]uint64{uint64(h.Slot), h.Sequence}
			c.mu.Lock()
			if h.Status == metarpc.StatusShutdown && c.resend[key] != nil {
				c.mu.Unlock()
				continue
			}
			gets := c.layouts[key]
			delete(c.layouts, key)
			c.mu.Unlock()
			if gets && h.Status == metarpc.StatusOK && c.granted != nil {
				var r metarpc.LayoutResult
				if err := metarpc.DecodeResult(metarpc.OpLayoutGet, rest, &r); err != nil {
					c.t.Errorf("layout: %v", err)
				}
				c.granted(&r)
			}
			c.mu.Lock()
			if ch := c.waiting[key]; ch != nil {
				ch <- body
				delete(c.waiting, key)
			}
			delete(c.resend, key)
			c.mu.Unlock()
		case err == nil && kind == metarpc.KindCallBack:
			h, args, err := metarpc.ParseCallBack(body, version)
			if err != nil {
				c.t.Errorf("callback: %v", err)
				return
			}
			go func() {
				status := metarpc.StatusOK
				if c.first != nil {
					for status := range c.first {
						frame, _ := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: h.Number, Status: status})
						conn.Write(frame)
					}
				}
				switch args := args.(type) {
				case *metarpc.LayoutRecallArgs:
					if c.recall != nil {
						status = c.recall(args)
					}
				case *metarpc.LockReadyArgs:
					c.ready <- *args
				default:
					c.mu.Lock()
					back := c.back
					c.mu.Unlock()
					if back != nil {
						status = back(h.Op, args)
					}
				}
				frame, _ := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: h.Number, Status: status})
				conn.Write(frame)
			}()
		default:
			c.t.Errorf("frame of kind %v: %v", kind, err)
			return
		}
	}
}

// send sends a call and returns where its answer's frame will come.
func (c *client) send(h metarpc.CallHeader, args any) chan []byte {
	c.t.Helper()
	frame, err := metarpc.AppendCall(nil, h, args)
	if err != nil {
		c.t.Fatal(err)
	}
	ch := make(chan []byte, 1)
	c.mu.Lock()
	c.waiting[[2]uint64{uint64(h.Slot), h.Sequence}] = ch
	c.layouts[[2]uint64{uint64(h.Slot), h.Sequence}] = h.Op == metarpc.OpLayoutGet
	if c.resend != nil {
		c.resend[[2]uint64{uint64(h.Slot), h.Sequence}] = frame
	}
	conn := c.conn
	if conn != nil && h.Op.In(c.welcome.Version) {
		frame = metarpc.AppendCallAs(nil, frame, c.welcome.Version)
	}
	c.mu.Unlock()
	if conn != nil {
		conn.Write(frame) // while read goes on, or a service that writes would not read. If it fails no answer comes
	}
	return ch
}

// begin sends a call as the next one of a free slot.
func (c *client) begin(op metarpc.Op, args any) (metarpc.CallHeader, chan []byte) {
	c.t.Helper()
	slot := <-c.free
	c.mu.Lock()
	c.sequence[slot]++
	h := metarpc.CallHeader{Slot: slot, Sequence: c.sequence[slot], Op: op, Cred: c.cred}
	c.mu.Unlock()
	return h, c.send(h, args)
}

// finish waits for an answer and frees the slot.
func (c *client) finish(h metarpc.CallHeader, ch chan []byte, result any) error {
	body := <-ch
	c.free <- h.Slot
	r, rest, err := metarpc.ParseReplyHeader(body)
	if err != nil {
		return err
	}
	if r.Status != metarpc.StatusOK {
		return &metarpc.Error{Op: h.Op, Status: r.Status, Message: r.Message}
	}
	return metarpc.DecodeResult(h.Op, rest, result)
}

// ask makes a call.
func ask[R any](c *client, op metarpc.Op, args any) (R, error) {
	var r R
	c = c.part(args)
	h, ch := c.begin(op, args)
	err := c.finish(h, ch, &r)
	for c.resend != nil && statusOf(err) == metarpc.StatusGrace {
		time.Sleep(time.Millisecond)
		h, ch = c.begin(op, args)
		err = c.finish(h, ch, &r)
	}
	return r, err
}

// must makes a call that is to succeed. As clients do, it asks again for a layout that another client, which the machine
// may not have let run, has not given back within layoutWait.
func must[R any](c *client, op metarpc.Op, args any) R {
	c.t.Helper()
	r, err := ask[R](c, op, args)
	for end := time.Now().Add(20 * time.Second); statusOf(err) == metarpc.StatusLayoutUnavailable && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
		r, err = ask[R](c, op, args)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

func (c *client) mkdir(parent layout.FileID, name string) layout.FileID {
	c.t.Helper()
	return must[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: parent, Name: name, Mode: syscall.S_IFDIR | 0o755}).Attr.ID
}

// touch makes a regular file that nobody has open.
func (c *client) touch(parent layout.FileID, name string) layout.FileID {
	c.t.Helper()
	return must[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: parent, Name: name, Mode: syscall.S_IFREG | 0o644}).Attr.ID
}

func (c *client) create(parent layout.FileID, name string) layout.FileID {
	c.t.Helper()
	return must[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: parent, Name: name, Mode: 0o644}).Attr.ID
}

func (c *client) attr(id layout.FileID) metarpc.Attr {
	c.t.Helper()
	return must[metarpc.AttrResult](c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}).Attr
}

// there is EINVAL if a regular file is there, and ESTALE if it is gone: attributes are remembered, what is read as a link is not.
func (c *client) there(id layout.FileID) error {
	_, err := ask[metarpc.BytesResult](c, metarpc.OpReadLink, &metarpc.IDArgs{ID: id})
	return err
}

func (c *client) wantGone(id layout.FileID) {
	c.h.t.Helper()
	wantStatus(c.h.t, c.there(id), metarpc.Status(syscall.ESTALE))
}

func (c *client) remove(parent layout.FileID, name string) {
	c.t.Helper()
	must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: parent, Name: name})
}

func (c *client) closeFile(id layout.FileID) {
	c.t.Helper()
	must[metarpc.Empty](c, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{id}})
}

// open opens a file for reading and writing.
func (c *client) open(id layout.FileID) {
	c.t.Helper()
	must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessRead | metarpc.AccessWrite})
}

// openAwaited opens a file whose writers may still come back after a restart.
func (c *client) openAwaited(id layout.FileID) {
	c.t.Helper()
	for {
		_, err := ask[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessRead | metarpc.AccessWrite})
		if statusOf(err) != metarpc.StatusGrace {
			wantStatus(c.t, err, metarpc.StatusOK)
			return
		}
	}
}

// layout asks for a layout for writing and returns up to where it reaches. If the file is not open for writing it is opened.
func (c *client) layout(id layout.FileID, off, n int64) (end int64, err error) {
	args := &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Off: off, Len: n}
	r, err := ask[metarpc.LayoutResult](c, metarpc.OpLayoutGet, args)
	if statusOf(err) == metarpc.Status(syscall.EBADF) {
		c.open(id)
		r, err = ask[metarpc.LayoutResult](c, metarpc.OpLayoutGet, args)
	}
	if err != nil {
		return 0, err
	}
	for _, s := range r.Segments {
		end = max(end, layout.Range{Off: s.Off, Len: s.Len}.End())
	}
	return end, nil
}

func (c *client) report(provisional bool, reports ...metarpc.SizeReport) []metarpc.Attr {
	c.t.Helper()
	return must[metarpc.LayoutCommitResult](c, metarpc.OpLayoutCommit,
		&metarpc.LayoutCommitArgs{Reports: reports, Provisional: provisional}).Attrs
}

// list reads a whole directory.
func (c *client) list(dir layout.FileID, page int) []metarpc.DirEntry {
	c.t.Helper()
	var all []metarpc.DirEntry
	cookie := uint64(0)
	for {
		r := must[metarpc.ReadDirResult](c, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Cookie: cookie, Limit: page})
		all = append(all, r.Entries...)
		if r.EOF {
			return all
		}
		cookie = r.Entries[len(r.Entries)-1].Cookie
	}
}

func statusOf(err error) metarpc.Status {
	var e *metarpc.Error
	if errors.As(err, &e) {
		return e.Status
	}
	if err != nil {
		return math.MaxUint32
	}
	return metarpc.StatusOK
}

func wantStatus(t testing.TB, err error, want metarpc.Status) {
	t.Helper()
	if got := statusOf(err); got != want {
		t.Errorf("status %v (%v), want %v", got, err, want)
	}
}

// dump is all rows of the catalog but those that change by themselves.
func dump(t testing.TB, engine catalog.Engine) map[string]string {
	t.Helper()
	all := map[string]string{}
	for kv, err := range engine.Scan(context.Background(), nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if kv.Key[0] != schema.PrefixShard {
			all[string(kv.Key)] = string(kv.Value)
		}
	}
	return all
}

// put changes a row behind the service's back.
func put(t testing.TB, h *host, key, value []byte) {
	t.Helper()
	var b catalog.Batch
	b.Put(key, value)
	if err := h.engine.Commit(context.Background(), &b); err != nil {
		t.Fatal(err)
	}
}
