package datafile

import (
	"context"
	"errors"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const unit = 1 << 20

func TestAssignGrowth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 5)
		ino := w.inode(5, layout.Policy{})
		assign := func(off, n int64) schema.Layout {
			t.Helper()
			row, err := w.m.Assign(t.Context(), 5, ino, off, n, session, false, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if raw, err := w.engine.Get(t.Context(), schema.LayoutKey(5)); err != nil || string(raw) != string(schema.Encode(&row)) {
				t.Errorf("row returned is not the row kept: %v", err)
			}
			return row
		}
		narrow := assign(0, unit)
		if narrow.StripeUnit != unit || len(narrow.Mirrors) != 1 || len(narrow.Mirrors[0]) != 1 {
			t.Fatalf("narrow: %+v", narrow)
		}
		if again := assign(unit-1, 1); !reflect.DeepEqual(again, narrow) {
			t.Errorf("again: %+v, was %+v", again, narrow)
		}
		wide := assign(unit-1, 2)
		if wide.Width != 4 || len(wide.Mirrors[0]) != 4 || !reflect.DeepEqual(wide.Mirrors[0][0], narrow.Mirrors[0][0]) {
			t.Fatalf("wide: %+v", wide)
		}
		devices := map[layout.DeviceID]bool{}
		for _, f := range wide.Mirrors[0] {
			devices[f.Device] = true
		}
		if len(devices) != 4 {
			t.Errorf("four data files on %d devices", len(devices))
		}
		if again := assign(0, layout.ToEOF); !reflect.DeepEqual(again, wide) {
			t.Errorf("again: %+v, was %+v", again, wide)
		}
		calm()
		w.check()
	})
}

// counting counts commits.
type counting struct {
	catalog.Engine
	mu sync.Mutex
	n  int
}

func (c *counting) Commit(ctx context.Context, b *catalog.Batch) error {
	c.mu.Lock()
	c.n++
	c.mu.Unlock()
	return c.Engine.Commit(ctx, b)
}

func (c *counting) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func TestAssignWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		engine := &counting{Engine: w.engine}
		w.start(engine)
		w.file(5, layout.Policy{}, 1)
		calm()
		before := engine.count()
		if _, err := w.m.Assign(t.Context(), 5, schema.Inode{}, 10, 10, session, false, nil, nil); err != nil {
			t.Fatal(err)
		}
		if n := engine.count() - before; n != 0 {
			t.Errorf("%d commits for what is there already", n)
		}
		other := metarpc.SessionID{8}
		if _, err := w.m.Assign(t.Context(), 5, schema.Inode{}, 10, 10, other, false, nil, nil); err != nil {
			t.Fatal(err)
		}
		if n := engine.count() - before; n != 1 {
			t.Errorf("%d commits for another session", n)
		}
		for _, s := range []metarpc.SessionID{session, other} {
			if _, err := w.engine.Get(t.Context(), schema.WriterKey(5, s)); err != nil {
				t.Errorf("writer row of %v: %v", s, err)
			}
		}

		_, err := w.m.Assign(t.Context(), 6, schema.Inode{}, 0, 1, session, false, nil, nil)
		if !errors.Is(err, ErrNoInode) || !errors.Is(err, syscall.ESTALE) {
			t.Errorf("inode that does not exist: %v", err)
		}
		calm()
		w.check()
	})
}

func TestAssignMirrors(t *testing.T) {
	for _, c := range []struct{ devices, count, mirrors, width int }{
		{1, 1, 1, 1}, {1, 4, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3}, {3, 4, 2, 3}, {6, 4, 2, 4}, {8, 4, 2, 4}, {7, 2, 3, 2}, {5, 256, 4, 5},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, c.devices)
			policy := layout.Policy{StripeUnit: 1 << 16, StripeCount: c.count, Mirrors: c.mirrors}
			for id := layout.FileID(10); id < 30; id++ {
				row := w.file(id, policy, 1)
				if id%2 == 0 {
					grown, err := w.m.Assign(t.Context(), id, w.inode(id, policy), 1<<16, 1, session, false, nil, nil)
					if err != nil {
						t.Fatal(err)
					}
					for i := range row.Mirrors {
						if !reflect.DeepEqual(row.Mirrors[i][0], grown.Mirrors[i][0]) {
							t.Errorf("%+v: mirror %d lost its first data file", c, i)
						}
					}
					row = grown
				} else {
					w.inode(id+100, policy)
					row = w.file(id+100, policy, 1<<30)
				}
				if row.Width != c.width || len(row.Mirrors) != c.mirrors {
					t.Fatalf("%+v: width %d, %d mirrors", c, row.Width, len(row.Mirrors))
				}
				used := map[layout.DeviceID]int{}
				for j := range c.width {
					column := map[layout.DeviceID]bool{}
					for i := range c.mirrors {
						column[row.Mirrors[i][j].Device] = true
						used[row.Mirrors[i][j].Device]++
					}
					if len(column) != c.mirrors {
						t.Errorf("%+v: column %d has its mirrors on %d devices", c, j, len(column))
					}
				}
				if want := min(c.devices, c.width*c.mirrors); len(used) != want {
					t.Errorf("%+v: data files on %d devices, want %d", c, len(used), want)
				}
			}
			calm()
			w.check()
		})
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		ino := w.inode(5, layout.Policy{Mirrors: 2, MinCopies: 2})
		if _, err := w.m.Assign(t.Context(), 5, ino, 0, 1, session, false, nil, nil); !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), "2 copies") {
			t.Errorf("two copies on one device: %v", err)
		}
	})
}

// Small files spread over the devices, also if every second inode is a directory.
func TestSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		const files = 400
		on := map[layout.DeviceID]int{}
		for i := range files {
			row := w.file(layout.FileID(100+2*i), layout.Policy{}, 1)
			on[row.Mirrors[0][0].Device]++
			synctest.Wait() // pools refilled, so that it is the number that decides
		}
		for d, n := range on {
			if n < files/8 || n > files/2 {
				t.Errorf("%d of %d files on device %v", n, files, d)
			}
		}
		if len(on) != 4 {
			t.Errorf("files on %d of 4 devices", len(on))
		}
	})
}

func TestAssignConcurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		ids := 3 * testPool
		var wg sync.WaitGroup
		for i := range ids {
			id := layout.FileID(10 + i)
			ino := w.inode(id, layout.Policy{})
			var mu sync.Mutex
			var rows []schema.Layout
			for j := range 6 {
				wg.Go(func() {
					row, err := w.m.Assign(t.Context(), id, ino, 0, int64(j+1)*unit/2, metarpc.SessionID{byte(j)}, false, nil, nil)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					for _, other := range rows {
						if !reflect.DeepEqual(other.Mirrors[0][0], row.Mirrors[0][0]) {
							t.Errorf("inode %d has first data files %v and %v", id, other.Mirrors[0][0], row.Mirrors[0][0])
						}
					}
					rows = append(rows, row)
				})
			}
		}
		wg.Wait()
		calm()
		w.check()
		if n := len(w.rows(schema.PrefixLayout)); n != ids {
			t.Errorf("%d layouts of %d files", n, ids)
		}
	})
}

// An Assign that races with the removal of the file.
func TestAssignRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		engine := &ambush{Engine: w.engine}
		w.start(engine)
		ino := w.inode(5, layout.Policy{})
		calm()
		engine.arm(schema.LayoutKey(5), func() {
			var b catalog.Batch
			b.Delete(schema.InodeKey(5))
			w.commit(&b)
		})
		if _, err := w.m.Assign(t.Context(), 5, ino, 0, 1, session, false, nil, nil); !errors.Is(err, ErrNoInode) {
			t.Errorf("%v", err)
		}
		// One that loses its layout, and starts over.
		w.file(6, layout.Policy{}, 1)
		engine.arm(schema.LayoutKey(6), func() {
			var b catalog.Batch
			b.Delete(schema.LayoutKey(6))
			w.commit(&b)
		})
		if row, err := w.m.Assign(t.Context(), 6, schema.Inode{}, 0, 1, metarpc.SessionID{8}, false, nil, nil); err != nil || len(row.Mirrors[0]) != 1 {
			t.Errorf("%+v, %v", row, err)
		}
	})
}

// A commit that fails leaves pool and numbers as they were.
func TestCommitFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		engine := &ambush{Engine: w.engine}
		w.start(engine)
		calm()
		d := w.device(0)
		ino := w.inode(5, layout.Policy{})
		engine.arm(schema.LayoutKey(5), func() {})
		engine.err = catalog.ErrClosed
		if _, err := w.m.Assign(t.Context(), 5, ino, 0, 1, session, false, nil, nil); !errors.Is(err, catalog.ErrClosed) {
			t.Errorf("%v", err)
		}
		engine.arm(schema.DeviceKey(d.id), func() {})
		if err := d.makeFiles(t.Context(), 3); !errors.Is(err, catalog.ErrClosed) {
			t.Errorf("%v", err)
		}
		if len(d.pool) != testPool || len(d.held) != testPool {
			t.Errorf("%d data files in the pool, %d numbers held", len(d.pool), len(d.held))
		}

		w.restart()
		calm()
		w.check()
	})
}

// newFile makes an inode with what AssignNew gives it; change, if there is one, comes right before the commit.
func (w *world) newFile(id layout.FileID, policy layout.Policy, near []layout.DeviceID, change func()) (row schema.Layout, ok bool, err error) {
	w.t.Helper()
	ino := schema.Inode{Mode: syscall.S_IFREG | 0o644, Nlink: 1, Policy: schema.PolicyOf(policy)}
	var b catalog.Batch
	b.GuardAbsent(schema.InodeKey(id))
	b.Put(schema.InodeKey(id), schema.Encode(&ino))
	n := b.Len()
	row, settle, ok := w.m.AssignNew(&b, id, ino, session, near)
	if !ok {
		if b.Len() != n {
			w.t.Errorf("%d: nothing is given, but %d entries", id, b.Len()-n)
		}
		return row, false, nil
	}
	if change != nil {
		change()
	}
	err = w.engine.Commit(w.t.Context(), &b)
	settle(err)
	return row, true, err
}

// New files get their data files in the batch that makes them.
func TestAssignNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		calm()
		policies := []layout.Policy{{}, {Mirrors: 2}, {StripeCount: 1}, {StripeCount: 1, Mirrors: 3}}
		for i, policy := range policies {
			id := layout.FileID(10 + i)
			row, ok, err := w.newFile(id, policy, nil, nil)
			if !ok || err != nil {
				t.Fatalf("%+v: given %t, %v", policy, ok, err)
			}
			if asked, err := w.m.Assign(t.Context(), id, schema.Inode{Policy: schema.PolicyOf(policy)}, 0, 1, session, false, nil, nil); err != nil || !reflect.DeepEqual(asked, row) {
				t.Errorf("%+v: given %+v; asked for again, %+v, %v", policy, row, asked, err)
			}
			if _, err := w.engine.Get(t.Context(), schema.WriterKey(id, session)); err != nil {
				t.Errorf("%+v: writer row: %v", policy, err)
			}
		}
		for i := range w.exports {
			near := []layout.DeviceID{w.device(i).id}
			row, ok, err := w.newFile(layout.FileID(20+i), layout.Policy{Placement: layout.PlacementLocal}, near, nil)
			if !ok || err != nil || row.Mirrors[0][0].Device != near[0] || row.Width != 1 {
				t.Errorf("on its writer's host: %+v, %t, %v", row, ok, err)
			}
		}
		calm()
		w.remove(10)
		calm()
		w.check()
	})
}

// What a batch that is not committed took is in the pools again.
func TestAssignNewNotCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		d := w.device(0)
		have := func(what string, pool, held int) {
			t.Helper()
			w.m.mu.Lock()
			defer w.m.mu.Unlock()
			if len(d.pool) != pool || len(d.held) != held {
				t.Errorf("%s: %d data files in the pool, %d numbers held; want %d and %d", what, len(d.pool), len(d.held), pool, held)
			}
		}
		w.inode(5, layout.Policy{})
		if _, ok, err := w.newFile(5, layout.Policy{}, nil, nil); !ok || err == nil {
			t.Errorf("a file that is there: %t, %v", ok, err)
		}
		have("put back", testPool, testPool)

		lose := func() { // as when the data server is declared lost
			w.m.mu.Lock()
			held := slices.Sorted(maps.Keys(d.held))
			for _, f := range d.pool {
				held = slices.DeleteFunc(held, func(n uint64) bool { return n == f.Number })
			}
			w.m.mu.Unlock()
			var b catalog.Batch
			b.Delete(schema.GarbageKey(d.id, held[0]))
			w.commit(&b)
		}
		var guard *catalog.GuardError
		if _, ok, err := w.newFile(6, layout.Policy{}, nil, lose); !ok || !errors.As(err, &guard) {
			t.Errorf("a data file without a garbage row: %t, %v", ok, err)
		}
		have("lost", testPool-1, testPool-1)
		if _, ok, err := w.newFile(6, layout.Policy{}, nil, nil); !ok || err != nil {
			t.Errorf("another one instead: %t, %v", ok, err)
		}
		calm()
	})
}

// AssignNew waits for nothing.
func TestAssignNewNothingReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		calm()
		if _, ok, _ := w.newFile(5, layout.Policy{Mirrors: 3, MinCopies: 3}, nil, nil); ok {
			t.Error("three copies on two devices")
		}
		w.m.mu.Lock()
		pools := make([][]schema.DataFile, 2)
		for i := range pools {
			d := w.m.devices[i]
			pools[i], d.pool = d.pool, nil
		}
		w.m.mu.Unlock()
		if _, ok, _ := w.newFile(6, layout.Policy{}, nil, nil); ok {
			t.Error("a data file of an empty pool")
		}
		for _, files := range pools {
			w.m.putBack(files)
		}
		calm()
		if _, ok, err := w.newFile(6, layout.Policy{}, nil, nil); !ok || err != nil {
			t.Errorf("with full pools: %t, %v", ok, err)
		}
		calm()
		w.check()
	})
	w, _ := newBlockWorld(t, 1<<30)
	waittest.Until(w.t, "a pool", func() bool {
		w.m.mu.Lock()
		defer w.m.mu.Unlock()
		return len(w.m.devices[0].pool) > 0
	})
	if _, ok, _ := w.newFile(7, layout.Policy{}, nil, nil); ok {
		t.Error("a data file on a namespace, without space")
	}
}

// Data files that are made while garbage is being looked for are none.
func TestSweepWhileMaking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		engine := &ambush{Engine: w.engine}
		w.start(engine)
		calm()
		d := w.device(0)
		engine.arm(schema.GarbageKey(d.id, 0), func() {
			if err := d.makeFiles(t.Context(), 3); err != nil {
				t.Error(err)
			}
		})
		if _, err := d.sweepAll(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := len(dataFiles(w.exports[0])); n != testPool+3 {
			t.Errorf("%d data files, the pool should have %d", n, testPool+3)
		}
		w.check()
	})
}

// ambush runs a function before the first commit that puts or deletes a key, which fails then if err is set, or before the first
// scan of the prefix that the key is of.
type ambush struct {
	catalog.Engine
	mu  sync.Mutex
	key string
	f   func()
	err error
}

func (a *ambush) arm(key []byte, f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.key, a.f = string(key), f
}

func (a *ambush) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	a.mu.Lock()
	f := a.f
	if f != nil && strings.HasPrefix(a.key, string(from)) {
		a.f = nil
		a.mu.Unlock()
		f()
	} else {
		a.mu.Unlock()
	}
	return a.Engine.Scan(ctx, from, to, opts)
}

func (a *ambush) Commit(ctx context.Context, b *catalog.Batch) error {
	a.mu.Lock()
	var f func()
	for _, row := range b.Puts {
		if string(row.Key) == a.key {
			f, a.f = a.f, nil
		}
	}
	for _, key := range b.Deletes {
		if string(key) == a.key {
			f, a.f = a.f, nil
		}
	}
	err := a.err
	a.mu.Unlock()
	if f != nil {
		if f(); err != nil {
			return err
		}
	}
	return a.Engine.Commit(ctx, b)
}

func TestAssignCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		ino := w.inode(5, layout.Policy{})
		// Hold the file's lock, then empty the pool with the server gone: both waits end with the context.
		unlock, err := w.m.files.lock(t.Context(), 5)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.m.Assign(ctx, 5, ino, 0, 1, session, false, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("locked: %v", err)
		}
		unlock()
		if n := len(w.m.files.files); n != 0 {
			t.Errorf("%d file locks are left", n)
		}
		w.exports[0].SetDown(true)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for id := layout.FileID(10); err == nil; id++ {
			_, err = w.m.Assign(ctx, id, w.inode(id, layout.Policy{}), 0, 1, session, false, nil, nil)
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("empty pool: %v", err)
		}
		w.exports[0].SetDown(false)
		calm()
		w.check()
	})
}

func TestSegments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		if s := w.m.Segments(schema.Layout{}, layout.IOModeRead); s != nil {
			t.Errorf("segments of nothing: %+v", s)
		}
		policy := layout.Policy{Mirrors: 2, StripeCount: 2}
		row := w.file(5, policy, 1)
		check := func(mode layout.IOMode, length int64, servers int) {
			t.Helper()
			segments := w.m.Segments(row, mode)
			if len(segments) != 1 {
				t.Fatalf("%d segments", len(segments))
			}
			s := &segments[0]
			if s.Off != 0 || s.Len != length || s.IOMode != mode || s.StripeUnit != unit || len(s.Mirrors) != 2 {
				t.Errorf("segment %+v", s)
			}
			for i, files := range s.Mirrors {
				if len(files) != servers {
					t.Fatalf("%d servers", len(files))
				}
				for j, f := range files {
					own := row.Mirrors[i][j]
					if f.Device != own.Device || string(f.Handle) != string(own.Handle) || f.GID != own.GID || (f.UID == own.UID) != (mode == layout.IOModeRW) {
						t.Errorf("mode %v, server %+v of %+v", mode, f, own)
					}
					if f.UID == 0 || f.GID == 0 {
						t.Error("superuser in a layout")
					}
				}
			}
		}
		check(layout.IOModeRW, unit, 1)
		check(layout.IOModeRead, unit, 1)
		desc := w.m.Describe(row, schema.Inode{})
		if desc.StripeUnit != unit || len(desc.Mirrors) != 2 || len(desc.Mirrors[1]) != 2 || desc.Mirrors[1][1].DataFile != "" {
			t.Errorf("described: %+v", desc)
		}
		var err error
		if row, err = w.m.Assign(t.Context(), 5, w.inode(5, policy), unit, 1, session, false, nil, nil); err != nil {
			t.Fatal(err)
		}
		check(layout.IOModeRW, layout.ToEOF, 2)
		check(layout.IOModeRead, layout.ToEOF, 2)
		desc = w.m.Describe(row, schema.Inode{})
		server := desc.Mirrors[0][1]
		if !strings.HasPrefix(server.DataFile, schema.VolumeDir(volume)+"/") || !strings.HasSuffix(server.Address, ":2049:/export") {
			t.Errorf("described: %+v", server)
		}
		if desc := w.m.Describe(schema.Layout{}, schema.Inode{}); desc.StripeUnit != unit || len(desc.Mirrors) != 0 {
			t.Errorf("nothing described: %+v", desc)
		}
	})
}

// A file that is to lie on its writer's host has its first copy there, whole, and the others elsewhere; where there is no such
// device, or none that can be used, it is as any other.
func TestAssignNear(t *testing.T) {
	w := newWorld(t, 4)
	var all []layout.DeviceID
	for i := range 4 {
		all = append(all, w.device(i).id)
	}
	assign := func(id layout.FileID, policy layout.Policy, n int64, near ...layout.DeviceID) schema.Layout {
		t.Helper()
		row, err := w.m.Assign(t.Context(), id, w.inode(id, policy), 0, n, session, false, near, nil)
		if err != nil {
			t.Fatal(err)
		}
		return row
	}
	local := layout.Policy{Placement: layout.PlacementLocal}
	for id := layout.FileID(100); id < 120; id++ {
		row := assign(id, local, 10*unit, all[2])
		if row.Width != 1 || len(row.Mirrors) != 1 || len(row.Mirrors[0]) != 1 || row.Mirrors[0][0].Device != all[2] {
			t.Fatalf("%+v", row)
		}
	}
	for id := layout.FileID(200); id < 220; id++ {
		row := assign(id, layout.Policy{Placement: layout.PlacementLocal, Mirrors: 2}, 1, all[1], layout.DeviceID{9}, all[3])
		first, second := row.Mirrors[0][0].Device, row.Mirrors[1][0].Device
		if row.Width != 1 || first != all[1] && first != all[3] || first == second {
			t.Fatalf("two copies: %+v", row)
		}
	}
	for _, row := range []schema.Layout{
		assign(300, local, 10*unit), assign(301, local, 10*unit, layout.DeviceID{9}),
		assign(302, layout.Policy{Placement: layout.PlacementSpread}, 10*unit, all[0]), assign(303, layout.Policy{}, 10*unit, all[0]),
	} {
		if row.Width != 4 {
			t.Errorf("as any other: %+v", row)
		}
	}
	// What has begun elsewhere goes on as it is.
	narrow := assign(400, local, 1)
	if wide := assign(400, local, 10*unit, all[0]); wide.Width != narrow.Width || wide.Width != 4 {
		t.Errorf("begun elsewhere: %+v, was %+v", wide, narrow)
	}
}

// roomless is an engine that refuses what makes something new while it is full.
type roomless struct {
	catalog.Engine
	full atomic.Bool
}

func (e *roomless) Commit(ctx context.Context, b *catalog.Batch) error {
	if e.full.Load() && b.Grows {
		return catalog.ErrFull
	}
	return e.Engine.Commit(ctx, b)
}

// A file gets no further data files in a full catalog. Those that it has others may write, too, and there are as many in
// the pools as before.
func TestAssignInFullCatalog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		e := &roomless{Engine: w.engine}
		w.start(e)
		ino := w.inode(5, layout.Policy{})
		if _, err := w.m.Assign(t.Context(), 5, ino, 0, unit, session, false, nil, nil); err != nil {
			t.Fatal(err)
		}
		w.inode(6, layout.Policy{})
		e.full.Store(true)
		for range 3 * testPool {
			if _, err := w.m.Assign(t.Context(), 5, ino, unit, 1, session, false, nil, nil); !errors.Is(err, catalog.ErrFull) {
				t.Errorf("more data files: %v", err)
			}
			if _, err := w.m.Assign(t.Context(), 6, ino, 0, 1, session, false, nil, nil); !errors.Is(err, catalog.ErrFull) {
				t.Errorf("the first data file: %v", err)
			}
		}
		if _, err := w.m.Assign(t.Context(), 5, ino, 0, unit, metarpc.SessionID{8}, false, nil, nil); err != nil {
			t.Errorf("another writer: %v", err)
		}
		e.full.Store(false)
		if _, err := w.m.Assign(t.Context(), 5, ino, unit, 1, session, false, nil, nil); err != nil {
			t.Errorf("with room: %v", err)
		}
	})
}
