package datafile

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

func unpaced(context.Context, int) error { return nil }

// never is for a Fill that nobody waits for.
var never = make(chan struct{})

// put writes to the good copies of a layout, and to those that are being filled, as a client does.
func (w *world) put(row schema.Layout, off int64, data []byte) {
	w.t.Helper()
	for len(data) > 0 {
		n := min(int64(len(data)), row.StripeUnit-off%row.StripeUnit)
		j := int(off / row.StripeUnit % int64(row.Width))
		for _, files := range row.Mirrors {
			f := files[j]
			if f.State == layout.CopyStale {
				continue
			}
			for i := range w.exports {
				if w.device(i).id != f.Device {
					continue
				}
				if err := w.server(i).Write(w.t.Context(), f.Handle, layout.Credential{UID: f.UID, GID: f.GID}, off, data[:n]); err != nil {
					w.t.Fatal(err)
				}
			}
		}
		data, off = data[n:], off+n
	}
}

// equalCopies checks that all copies of each column are the same, but for zeros at the end.
func (w *world) equalCopies(row schema.Layout) {
	w.t.Helper()
	for j := range row.Mirrors[0] {
		first := bytes.TrimRight(w.net.Data(row.Mirrors[0][j].Handle), "\x00")
		for i, files := range row.Mirrors {
			if files[j].State != layout.CopyGood {
				w.t.Errorf("mirror %d, column %d is %v", i, j, files[j].State)
			}
			if got := bytes.TrimRight(w.net.Data(files[j].Handle), "\x00"); !bytes.Equal(got, first) {
				w.t.Errorf("mirror %d, column %d differs: %d bytes, want %d", i, j, len(got), len(first))
			}
		}
	}
}

// fill fills all copies, chunk bytes at a time. before is called before each chunk.
func (w *world) fill(id layout.FileID, chunk int64, before func(row schema.Layout, off int64)) error {
	row, off, err := w.m.StartFill(w.t.Context(), id, nil)
	if err != nil {
		return err
	}
	for end := int64(layout.ToEOF); off < end; {
		if before != nil {
			before(row, off)
		}
		if off, end, err = w.m.Fill(w.t.Context(), id, row, off, chunk, unpaced, never); err != nil {
			return err
		}
	}
	_, err = w.m.EndFill(w.t.Context(), id, row)
	return err
}

// Copies are filled while clients write: ahead of what is copied, and behind it. Holes stay holes.
func TestFill(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		w := newWorld(t, 4)
		policy := layout.Policy{StripeUnit: 1 << 16, StripeCount: 2, Mirrors: 3}
		row := w.file(5, policy, 10<<20)
		data := make([]byte, 3<<20)
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		clear(data[1<<20 : 2<<20])
		w.put(row, 0, data)
		w.put(row, 5<<20, []byte("end"))
		if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[0][0], row.Mirrors[1][1], row.Mirrors[2][1])); err != nil {
			t.Fatal(err)
		}
		if can, err := w.m.Fillable(t.Context(), 5, nil); err != nil || !can {
			t.Fatalf("fillable: %v, %v", can, err)
		}
		writes := 0
		err := w.fill(5, 300_000, func(row schema.Layout, off int64) {
			for range 3 {
				at := rnd.Int64N(6 << 20)
				w.put(row, at, data[:rnd.IntN(1000)])
				writes++
			}
		})
		if err != nil || writes < 3 {
			t.Fatalf("%v after %d writes", err, writes)
		}
		after := w.layoutOf(5)
		w.equalCopies(after)
		if w.hasFill(5) {
			t.Error("the fill row is still there")
		}
		for j := range after.Mirrors[0] {
			on := map[layout.DeviceID]bool{}
			for _, files := range after.Mirrors {
				on[files[j].Device] = true
			}
			if len(on) != 3 {
				t.Errorf("the copies of column %d are on %d devices", j, len(on))
			}
		}
		if can, err := w.m.Fillable(t.Context(), 5, nil); err != nil || can {
			t.Errorf("fillable when all is full: %v, %v", can, err)
		}
		calm()
		w.check()
	})
}

// A Manager that is restarted goes on where the one before was, with new owners for what that had begun; a copy whose data server
// does not answer is begun elsewhere.
func TestFillRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 2}, 10<<20)
		w.put(row, 0, bytes.Repeat([]byte("data"), 1<<18))
		if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[1][0])); err != nil {
			t.Fatal(err)
		}
		first, _, err := w.m.StartFill(t.Context(), 5, nil)
		if err == nil {
			_, _, err = w.m.Fill(t.Context(), 5, first, 0, 1<<19, unpaced, never)
		}
		if err != nil {
			t.Fatal(err)
		}
		w.restart()
		calm()
		again, done, err := w.m.StartFill(t.Context(), 5, nil)
		if err != nil || done != 1<<19 {
			t.Fatalf("goes on at %d: %v", done, err)
		}
		was, is := first.Mirrors[1][0], again.Mirrors[1][0]
		if is.Number != was.Number || is.UID == was.UID {
			t.Errorf("data file %d of %d, before it was %d of %d", is.Number, is.UID, was.Number, was.UID)
		}
		for i := range w.exports {
			if w.device(i).id == is.Device {
				if err := w.server(i).Write(t.Context(), was.Handle, layout.Credential{UID: was.UID, GID: was.GID}, 0, []byte("late")); err == nil {
					t.Error("a late write of the filler before is taken")
				}
				w.exports[i].SetDown(true)
				defer w.exports[i].SetDown(false)
			}
		}
		time.Sleep(time.Minute) // until it is known that the device is away
		other, done, err := w.m.StartFill(t.Context(), 5, nil)
		if err != nil || done != 0 || other.Mirrors[1][0].Device == is.Device {
			t.Fatalf("with the data server away: %v at %d on %v", err, done, other.Mirrors[1][0].Device)
		}
		if err := w.fill(5, 1<<20, nil); err != nil {
			t.Fatal(err)
		}
		w.equalCopies(w.layoutOf(5))
		// What has become stale meanwhile does not become good.
		after := w.layoutOf(5)
		if _, err := w.m.MarkStale(t.Context(), 5, refs(after.Mirrors[1][0])); err != nil {
			t.Fatal(err)
		}
		next, _, err := w.m.StartFill(t.Context(), 5, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.m.MarkStale(t.Context(), 5, refs(next.Mirrors[1][0])); err != nil {
			t.Fatal(err)
		}
		if complete, err := w.m.EndFill(t.Context(), 5, next); err != nil || complete {
			t.Errorf("complete %v, %v", complete, err)
		}
		// Of a copy that was exchanged somebody may yet complain: it counts as stale.
		if stale, err := w.m.MarkStale(t.Context(), 5, refs(was)); err != nil || len(stale) != 2 {
			t.Errorf("stale: %v, %v", stale, err)
		}
		// Where the last good copy fails, one that is being filled may have more than that.
		next, _, err = w.m.StartFill(t.Context(), 5, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.m.MarkStale(t.Context(), 5, refs(next.Mirrors[0][0])); err != nil {
			t.Fatal(err)
		}
		if got := states(w.layoutOf(5)); got[0][0] != layout.CopyGood || got[1][0] != layout.CopyStale {
			t.Errorf("states %v", got)
		}
	})
}

// A file may go while its copies are filled; and filling may be ended by who paces it.
func TestFillGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		row := w.file(5, layout.Policy{StripeCount: 1, Mirrors: 2}, unit)
		if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[1][0])); err != nil {
			t.Fatal(err)
		}
		next, _, err := w.m.StartFill(t.Context(), 5, nil)
		if err != nil {
			t.Fatal(err)
		}
		w.remove(5)
		if _, err := w.m.EndFill(t.Context(), 5, next); err != nil {
			t.Errorf("end: %v", err)
		}
		if row, _, err := w.m.StartFill(t.Context(), 5, nil); err != nil || len(row.Mirrors) != 0 {
			t.Errorf("start: %v, %v", row, err)
		}
		if can, err := w.m.Fillable(t.Context(), 5, nil); can || err != nil {
			t.Errorf("fillable: %v, %v", can, err)
		}
		stopped := errors.New("stopped")
		row = w.file(6, layout.Policy{StripeCount: 1, Mirrors: 2}, unit)
		w.put(row, 0, []byte("data"))
		if _, err := w.m.MarkStale(t.Context(), 6, refs(row.Mirrors[1][0])); err != nil {
			t.Fatal(err)
		}
		calm() // data files are there to take its place
		if next, _, err = w.m.StartFill(t.Context(), 6, nil); err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.m.Fill(t.Context(), 6, next, 0, unit, func(context.Context, int) error { return stopped }, never); !errors.Is(err, stopped) {
			t.Errorf("fill: %v", err)
		}
		calm()
		w.check()
	})
}

// A device that is drained loses its data files to others, single ones and copies, and gets no new ones.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		single := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 4, Mirrors: 1}, 10<<20)
		double := w.file(6, layout.Policy{StripeUnit: 1 << 16, StripeCount: 2, Mirrors: 2}, 10<<20)
		data := bytes.Repeat([]byte("data"), 1<<18)
		w.put(single, 0, data)
		w.put(double, 0, data)
		drained := w.device(0).id
		if _, err := w.m.DrainDevice(t.Context(), drained, false); err != nil {
			t.Fatal(err)
		}
		ids, err := w.m.Moving(t.Context(), 0, 10)
		if err != nil || len(ids) == 0 || ids[0] != 5 {
			t.Fatalf("to be moved: %v, %v", ids, err)
		}
		for _, id := range ids {
			for len(w.onDevice(id, drained)) > 0 {
				if can, err := w.m.Fillable(t.Context(), id, nil); err != nil || !can {
					t.Fatalf("inode %d: fillable %v, %v", id, can, err)
				}
				if err := w.fill(id, 300_000, func(row schema.Layout, off int64) {
					w.put(row, 1<<20+off%1000, []byte("while it moves"))
				}); err != nil {
					t.Fatal(err)
				}
				for _, s := range w.m.Segments(w.layoutOf(id), layout.IOModeRW) {
					if _, err := s.Layout(); err != nil {
						t.Error(err)
					}
				}
				w.restart() // with the new copies full, and the old ones in place
				calm()
				if err := errors.Join(w.m.Exchange(t.Context(), id, nil), w.m.DropMoved(t.Context(), id)); err != nil {
					t.Fatal(err)
				}
			}
			after := w.layoutOf(id)
			if after.Moving || w.hasFill(id) {
				t.Errorf("inode %d is still moved", id)
			}
			w.equalCopies(after)
			got := make([]byte, 1<<20)
			for off := int64(0); off < 1<<20; off += 1 << 16 {
				j := int(off >> 16 % int64(after.Width))
				copy(got[off:off+1<<16], w.net.Data(after.Mirrors[0][j].Handle)[off:])
			}
			if !bytes.Equal(got, data) {
				t.Errorf("inode %d has other contents", id)
			}
		}
		if ids, err := w.m.Moving(t.Context(), 0, 10); err != nil || len(ids) != 0 {
			t.Errorf("still to be moved: %v, %v", ids, err)
		}
		calm()
		for _, info := range w.m.Devices(t.Context()) {
			if info.Device.ID == drained && (info.DataFiles != 0 || !info.Draining) {
				t.Errorf("the device: %+v", info)
			}
		}
		if w.file(7, layout.Policy{StripeCount: 4}, 10<<20); len(w.onDevice(7, drained)) > 0 {
			t.Error("a new file got a data file there")
		}
		w.check()
		if _, err := w.m.DrainDevice(t.Context(), drained, true); err != nil {
			t.Fatal(err)
		}
		if w.file(8, layout.Policy{StripeCount: 4}, 10<<20); len(w.onDevice(8, drained)) == 0 {
			t.Error("after the draining was canceled a new file got no data file there")
		}
	})
}

// What moves is copied from the beginning, though other copies of the file have got further.
func TestDrainWhileFilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 2}, 1<<20)
		w.put(row, 0, bytes.Repeat([]byte("data"), 1<<18))
		if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[1][0])); err != nil {
			t.Fatal(err)
		}
		if can, err := w.m.Fillable(t.Context(), 5, nil); err != nil || !can {
			t.Fatal(can, err)
		}
		first, _, err := w.m.StartFill(t.Context(), 5, nil)
		if err == nil {
			_, _, err = w.m.Fill(t.Context(), 5, first, 0, 1<<19, unpaced, never)
		}
		if err == nil {
			_, err = w.m.DrainDevice(t.Context(), row.Mirrors[0][0].Device, false)
		}
		if err != nil {
			t.Fatal(err)
		}
		next, done, err := w.m.StartFill(t.Context(), 5, nil)
		if err != nil || !next.Moving || done != 0 {
			t.Errorf("moving %v, begins at %d, %v", next.Moving, done, err)
		}
	})
}

// onDevice lists the data files that a file has on a device.
func (w *world) onDevice(id layout.FileID, dev layout.DeviceID) (files []schema.DataFile) {
	for _, of := range w.layoutOf(id).Mirrors {
		for _, f := range of {
			if f.Device == dev {
				files = append(files, f)
			}
		}
	}
	return files
}

// A copy that has failed since the filling began is not copied from.
func TestFillNotFromStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 3}, 1<<20)
		w.put(row, 0, bytes.Repeat([]byte("old"), 1<<18))
		if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[2][0])); err != nil {
			t.Fatal(err)
		}
		err := w.fill(5, 1<<19, func(row schema.Layout, off int64) {
			if off > 0 {
				return
			}
			// A client writes to all copies but the first one, and says so.
			without := row
			without.Mirrors = row.Mirrors[1:]
			w.put(without, 0, bytes.Repeat([]byte("new"), 1<<18))
			if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[0][0])); err != nil {
				t.Fatal(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		after := w.layoutOf(5)
		if got := w.net.Data(after.Mirrors[2][0].Handle); !bytes.HasPrefix(got, []byte("newnew")) || bytes.Contains(got, []byte("old")) {
			t.Errorf("the new copy has what is at its beginning %q, want what was written last", got[:6])
		}
	})
}

// asked is an engine that counts questions for rows.
type asked struct {
	catalog.Engine
	n atomic.Int64
}

func (e *asked) Get(ctx context.Context, key []byte) ([]byte, error) {
	e.n.Add(1)
	return e.Engine.Get(ctx, key)
}

func (e *asked) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	e.n.Add(1)
	return e.Engine.GetMany(ctx, keys)
}

// TestMayFill: MayFill says of many files at once what Fillable says of each, but that pools may be empty.
func TestMayFill(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 5)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		engine := &asked{Engine: w.engine}
		w.start(engine)
		calm()
		w.exports[0].SetDown(true)
		w.exports[1].SetSpace(1<<40, 0, false)
		if _, err := w.m.DrainDevice(t.Context(), w.device(2).id, false); err != nil {
			t.Fatal(err)
		}
		calm()

		var ids []layout.FileID
		for id := layout.FileID(1000); id < 2000; id++ {
			ids = append(ids, id)
			var b catalog.Batch
			switch rnd.IntN(20) {
			case 0:
				continue // it is gone
			case 1:
				b.Put(schema.LayoutKey(id), []byte{0xc1})
				w.commit(&b)
				continue
			}
			row := schema.Layout{StripeUnit: unit, Width: 1 + rnd.IntN(2), Mirrors: make([][]schema.DataFile, 1+rnd.IntN(3)), Moving: rnd.IntN(10) == 0}
			for i := range row.Mirrors {
				for range row.Width {
					file := schema.DataFile{Device: w.device(rnd.IntN(5)).id, Number: 1, Handle: []byte{1}, State: layout.CopyState(rnd.IntN(3))}
					if rnd.IntN(5) == 0 {
						file = schema.Absent()
					}
					row.Mirrors[i] = append(row.Mirrors[i], file)
				}
			}
			b.Put(schema.LayoutKey(id), schema.Encode(&row))
			if rnd.IntN(10) == 0 {
				b.Put(schema.MoveKey(id), schema.Encode(&schema.Move{Device: w.device(rnd.IntN(5)).id}))
			}
			w.commit(&b)
		}
		may := func() []layout.FileID {
			t.Helper()
			synctest.Wait()
			engine.n.Store(0)
			may, err := w.m.MayFill(t.Context(), ids)
			if n := engine.n.Load(); err != nil || n != 1 {
				t.Errorf("%d questions, %v", n, err)
			}
			return may
		}
		var can []layout.FileID
		for _, id := range ids {
			if ok, err := w.m.Fillable(t.Context(), id, nil); ok || err != nil {
				can = append(can, id)
			}
		}
		if got := may(); !slices.Equal(got, can) || len(can) < len(ids)/10 || len(can) > 9*len(ids)/10 {
			t.Errorf("%d files may be filled, %d can:\n%v\n%v", len(got), len(can), got, can)
		}
		w.m.mu.Lock()
		var pools [][]schema.DataFile
		for _, d := range w.m.devices {
			pools = append(pools, d.pool)
			d.pool = nil
		}
		w.m.mu.Unlock()
		if got := may(); !slices.Equal(got, can) {
			t.Errorf("with empty pools %d files may be filled, %d can", len(got), len(can))
		}
		w.m.mu.Lock()
		for i, d := range w.m.devices {
			d.pool = pools[i]
		}
		w.m.mu.Unlock()
	})
}
