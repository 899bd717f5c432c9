package datafile

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// present is which copies of a layout have a data file.
func present(row schema.Layout) (all [][]bool) {
	for _, files := range row.Mirrors {
		var some []bool
		for j := range files {
			some = append(some, !files[j].IsAbsent())
		}
		all = append(all, some)
	}
	return all
}

// TestFewCopies: with one of two devices away files get the copies that can be had, and the others when it is back.
func TestFewCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		calm()
		policy := layout.Policy{StripeUnit: unit, StripeCount: 2, Mirrors: 2}
		before := w.file(5, policy, 1) // of its two columns it has one
		w.put(before, 0, []byte("before"))
		w.exports[0].SetDown(true)
		time.Sleep(10 * time.Second)

		began := time.Now()
		grown, err := w.m.Assign(t.Context(), 5, w.inode(5, policy), unit, 1, session, false, nil, nil)
		if want := [][]bool{{true, true}, {true, false}}; err != nil || !reflect.DeepEqual(present(grown), want) || !w.hasFill(5) {
			t.Fatalf("a file that grows: %+v, a fill row: %v, %v", grown, w.hasFill(5), err)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("that took %v", took)
		}
		row, ok, err := w.newFile(6, policy, nil, nil)
		if want := [][]bool{{true}, {false}}; !ok || err != nil || !reflect.DeepEqual(present(row), want) || row.Width != 1 {
			t.Fatalf("a new file: %+v, %v, %v", row, ok, err)
		}
		if row.GoodCopies(0) != 1 || !w.hasFill(6) || len(row.Copies(layout.CopyStale)) != 0 {
			t.Errorf("a new file: %v, a fill row: %v", states(row), w.hasFill(6))
		}
		w.put(row, 0, []byte("new"))
		gone := w.file(7, policy, 1)
		if w.remove(7); !w.hasFill(7) || !gone.Incomplete() { // the service deletes that row
			t.Error("a file to be removed has all copies")
		}
		for _, s := range w.m.Segments(grown, layout.IOModeRW) {
			if l, err := s.Layout(); err != nil || l.Validate() != nil || l.Mirrors[1].Servers[1].State != layout.CopyStale {
				t.Errorf("granted: %+v, %v", l, err)
			}
		}
		if err := w.m.Fence(t.Context(), 6); err != nil {
			t.Error(err)
		}
		if _, err := w.m.Sync(t.Context(), w.layoutOf(6)); err != nil {
			t.Error(err)
		}
		if can, err := w.m.Fillable(t.Context(), 6, nil); can || err != nil {
			t.Errorf("it can be filled: %v, %v", can, err)
		}

		w.restart()
		time.Sleep(10 * time.Second)
		if row, _, err := w.m.StartFill(t.Context(), 6, nil); err != nil || len(row.Copies(layout.CopyFilling)) != 0 {
			t.Errorf("filled without a device: %v, %v", states(row), err)
		}
		w.exports[0].SetDown(false)
		calm()
		w.put(grown, unit, []byte("grown")) // which the copies in the first column do not have
		for id := layout.FileID(5); id < 7; id++ {
			if can, err := w.m.Fillable(t.Context(), id, nil); !can || err != nil {
				t.Errorf("%d can be filled: %v, %v", id, can, err)
			}
			if err := w.fill(id, unit, nil); err != nil {
				t.Fatal(err)
			}
			row := w.layoutOf(id)
			w.equalCopies(row)
			if w.hasFill(id) || row.Incomplete() {
				t.Errorf("%d is not complete: %v", id, states(row))
			}
		}
		calm()
		w.check()
		w.remove(5)
		w.remove(6)
		calm()
		w.check()
	})
}

// watched is an engine that shows batches before they are committed.
type watched struct {
	catalog.Engine
	see func(*catalog.Batch)
}

func (e *watched) Commit(ctx context.Context, b *catalog.Batch) error {
	e.see(b)
	return e.Engine.Commit(ctx, b)
}

// TestFormatOfCopies: the catalog gets schema.FormatCopies once, before the first layout with an absent copy. No such
// layout is made while there is a service that does not know the format.
func TestFormatOfCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		calm()
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		format := func() int {
			var volume schema.Volume
			if raw, err := w.engine.Get(t.Context(), schema.KeyVolume); err != nil || schema.Decode(raw, &volume) != nil {
				t.Fatalf("volume row %x, %v", raw, err)
			}
			return volume.Format
		}
		var raised atomic.Int64
		engine := &watched{w.engine, func(b *catalog.Batch) {
			for _, row := range b.Puts {
				switch row.Key[0] {
				case schema.KeyVolume[0]:
					raised.Add(1)
				case schema.PrefixLayout:
					var l schema.Layout
					if err := schema.Decode(row.Value, &l); err != nil || l.FewCopies() && format() != schema.FormatCopies {
						t.Errorf("%+v in a catalog of format %d, %v", l, format(), err)
					}
				}
			}
		}}
		w.start(engine)
		calm()
		two := layout.Policy{StripeCount: 1, Mirrors: 2}
		both := two
		both.MinCopies = 2
		assign := func(id layout.FileID, policy layout.Policy) error {
			_, err := w.m.Assign(t.Context(), id, w.inode(id, policy), 0, 1, session, false, nil, nil)
			return err
		}
		refused := func(id layout.FileID, policy layout.Policy) {
			t.Helper()
			if _, ok, _ := w.newFile(id, policy, nil, nil); ok {
				t.Errorf("%d is made", id)
			}
			old := (*schema.MemberError)(nil)
			if err := assign(id, policy); !errors.As(err, &old) || old.Address != "old:7049" || old.Format != schema.FormatCopies {
				t.Errorf("%d: %v", id, err)
			}
			if raw, err := w.engine.Get(t.Context(), schema.LayoutKey(id)); err == nil {
				t.Errorf("%d has layout row %x", id, raw)
			}
		}
		var b catalog.Batch
		b.Put(schema.MemberKey([16]byte{1}), schema.Encode(&schema.Member{Address: "old:7049", Format: schema.FormatCopies - 1}))
		w.commit(&b)
		refused(5, both)
		if _, ok, err := w.newFile(6, two, nil, nil); !ok || err != nil {
			t.Errorf("a file with all copies: %v, %v", ok, err)
		}
		w.exports[0].SetDown(true)
		time.Sleep(10 * time.Second)
		for id := range layout.FileID(2 * testPool) { // nothing that was taken is lost
			refused(10+id, two)
		}
		if raised.Load() != 0 {
			t.Errorf("raised %d times", raised.Load())
		}

		b.Reset()
		b.Delete(schema.MemberKey([16]byte{1}))
		w.commit(&b)
		var all sync.WaitGroup
		for id := range layout.FileID(testPool) {
			all.Go(func() { // ends at once
				if err := assign(10+id, two); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		time.Sleep(10 * time.Second) // until the pool is full
		if row, ok, err := w.newFile(20, two, nil, nil); !ok || err != nil || !row.FewCopies() {
			t.Errorf("a new file: %+v, %v, %v", row, ok, err)
		}
		if n := raised.Load(); n < 1 || format() != schema.FormatCopies {
			t.Errorf("raised %d times, format %d", n, format())
		}
		n := raised.Load()
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		w.start(engine)
		time.Sleep(10 * time.Second)
		if err := assign(21, two); err != nil || raised.Load() != n {
			t.Errorf("after a restart: %v, raised %d times more", err, raised.Load()-n)
		}
		w.exports[0].SetDown(false)
		calm()
		w.check()
	})
}

// TestAllCopies: files get all copies though a pool is empty, a device has little room, or was not looked at yet; but
// not for the sake of devices that take no data files.
func TestAllCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		calm()
		policy := layout.Policy{StripeCount: 1, Mirrors: 2}
		expect := func(id layout.FileID, what string, copies int, most time.Duration) {
			t.Helper()
			began := time.Now()
			row := w.file(id, policy, 1)
			if got := row.GoodCopies(0); got != copies || w.hasFill(id) != (copies < 2) {
				t.Errorf("%s: %d copies, a fill row: %v", what, got, w.hasFill(id))
			}
			if took := time.Since(began); took > most {
				t.Errorf("%s: it took %v", what, took)
			}
		}
		w.m.mu.Lock()
		d := w.m.devices[0]
		pool := d.pool
		d.pool = nil
		w.m.mu.Unlock()
		if _, ok, _ := w.newFile(10, policy, nil, nil); ok {
			t.Error("a new file, at once, with an empty pool")
		}
		expect(11, "an empty pool", 2, time.Second)
		w.m.putBack(pool)
		w.exports[0].SetSpace(1<<40, 1<<30, false)
		time.Sleep(10 * time.Second)
		expect(12, "little room", 2, 0)
		w.exports[0].SetSpace(1<<40, 0, false)
		time.Sleep(10 * time.Second)
		expect(13, "no room", 1, 0)
		w.exports[0].SetSpace(1<<40, 1<<39, false)
		calm()
		expect(14, "room again", 2, 0)
		if _, err := w.m.DrainDevice(t.Context(), w.device(0).id, false); err != nil {
			t.Fatal(err)
		}
		expect(15, "a device is drained", 1, 0)
		if _, err := w.m.DrainDevice(t.Context(), w.device(0).id, true); err != nil {
			t.Fatal(err)
		}

		w.restart()
		expect(16, "just started", 2, firstLook)
		w.exports[0].SetFrozen(true)
		w.restart()
		go func() { // ends at once
			time.Sleep(firstLook / 2)
			w.exports[0].SetFrozen(false)
		}()
		expect(23, "just started, and a device is slow to answer", 2, firstLook)
		w.exports[0].SetFrozen(true)
		w.restart()
		if _, ok, _ := w.newFile(17, policy, nil, nil); ok {
			t.Error("a new file, at once, when nothing is known")
		}
		expect(18, "just started, and a device does not answer", 1, firstLook)
		expect(19, "the same, later", 1, 0)
		w.exports[0].SetFrozen(false)
		calm()

		policy.MinCopies = 2
		w.exports[0].SetDown(true)
		time.Sleep(10 * time.Second)
		if _, ok, _ := w.newFile(20, policy, nil, nil); ok {
			t.Error("a new file with fewer copies than wanted")
		}
		if _, err := w.m.Assign(t.Context(), 21, w.inode(21, policy), 0, 1, session, false, nil, nil); !errors.Is(err, ErrNoDevice) {
			t.Errorf("a file with fewer copies than wanted: %v", err)
		}
		w.exports[0].SetDown(false)
		calm()
		expect(22, "all is well", 2, 0)
		told := func(exacting, few bool, row schema.Layout) {
			t.Helper()
			for _, s := range w.m.Segments(row, layout.IOModeRead) {
				if l, err := s.Layout(); err != nil || l.Exacting != exacting || l.Few != few {
					t.Errorf("exacting %v, few copies %v, %v; want %v, %v", l.Exacting, l.Few, err, exacting, few)
				}
			}
		}
		row := w.layoutOf(22)
		told(true, false, row)
		row.Mirrors[1][0].State = layout.CopyFilling
		told(true, true, row)
		row.MinCopies = 0
		told(false, false, row)
	})
}

// TestWaiting: files wait for devices that are away or full, and for one more if these do not suffice.
func TestWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		calm()
		id := func(i int) layout.DeviceID { return w.device(i).id }
		good := func(i int) schema.DataFile { return schema.DataFile{Device: id(i), Handle: []byte{1}} }
		stale, filling := good(0), good(0)
		stale.State, filling.State = layout.CopyStale, layout.CopyFilling
		var more layout.DeviceID
		expect := func(what string, want []layout.DeviceID, mirrors ...[]schema.DataFile) {
			t.Helper()
			var b catalog.Batch
			b.Put(schema.LayoutKey(5), schema.Encode(&schema.Layout{StripeUnit: unit, Width: len(mirrors[0]), Mirrors: mirrors}))
			w.commit(&b)
			sum := map[layout.DeviceID]int64{more: 1}
			err := w.m.Waiting(t.Context(), []layout.FileID{4, 5, 5}, sum) // there is no 4
			all := map[layout.DeviceID]int64{more: 1}
			for _, dev := range want {
				all[dev] += 2
			}
			if err != nil || !maps.Equal(sum, all) {
				t.Errorf("%s: %v, %v; want %v", what, sum, err, all)
			}
		}
		one := func(file schema.DataFile) []schema.DataFile { return []schema.DataFile{file} }
		absent := schema.Absent()
		expect("a place", nil, one(good(0)), one(absent))
		expect("filling", nil, one(filling), one(good(1)))
		expect("four copies, three devices", []layout.DeviceID{more}, one(good(1)), one(stale), one(absent), one(absent))
		w.exports[0].SetDown(true)
		time.Sleep(10 * time.Second)
		expect("another place", nil, one(stale), one(good(1)))
		expect("a device that is down", []layout.DeviceID{id(0)}, one(stale), one(good(1)), one(good(2)))
		expect("filling there", []layout.DeviceID{id(0)}, one(filling), one(good(1)), one(good(2)))
		expect("absent", []layout.DeviceID{id(0)}, one(good(2)), one(absent), one(good(1)))
		expect("two copies", []layout.DeviceID{id(0), more}, one(good(2)), one(absent), one(good(1)), one(absent))
		expect("in one column", []layout.DeviceID{id(0)}, []schema.DataFile{good(1), good(1)}, []schema.DataFile{good(2), good(2)}, []schema.DataFile{good(0), absent})
		expect("the good copy is down", []layout.DeviceID{id(0)}, one(good(0)), one(absent))
		w.exports[1].SetSpace(1<<40, 0, false)
		time.Sleep(10 * time.Second)
		expect("down and full", []layout.DeviceID{id(0), id(1)}, one(good(2)), one(absent))
		if _, err := w.m.DrainDevice(t.Context(), id(0), false); err != nil {
			t.Fatal(err)
		}
		expect("full", []layout.DeviceID{id(1)}, one(good(2)), one(absent))
		w.exports[0].SetDown(false)
	})
}
