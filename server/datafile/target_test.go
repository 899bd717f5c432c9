package datafile

import (
	"bytes"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// moved moves a file's data as the service does, in so many steps at most. It reports whether that were all. between is called with
// the layout before each piece is copied.
func (w *world) moved(id layout.FileID, steps int, between func(schema.Layout, int64)) bool {
	w.t.Helper()
	ctx := w.t.Context()
	if can, err := w.m.Fillable(ctx, id, nil); err != nil || !can {
		return err == nil
	}
	var row schema.Layout
	var off int64
	for _, f := range []func() error{
		func() (err error) {
			row, off, err = w.m.StartFill(ctx, id, nil)
			return err
		},
		func() (err error) {
			filling := len(row.Copies(layout.CopyFilling)) > 0
			for end := int64(layout.ToEOF); filling && off < end; {
				if between != nil {
					between(row, off)
				}
				if off, end, err = w.m.Fill(ctx, id, row, off, 300_000, unpaced, never); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			_, err := w.m.EndFill(ctx, id, row)
			return err
		},
		func() error { return w.m.Exchange(ctx, id, nil) },
		func() error { return w.m.DropMoved(ctx, id) },
	} {
		if steps--; steps < 0 {
			return false
		}
		if err := f(); err != nil {
			w.t.Fatal(err)
		}
	}
	return true
}

// content reads the first copy of a file's data.
func (w *world) content(row schema.Layout, n int) []byte {
	got := make([]byte, n)
	for off := 0; off < n; off += int(row.StripeUnit) {
		end := min(n, off+int(row.StripeUnit))
		data := w.net.Data(row.Mirrors[0][off/int(row.StripeUnit)%row.Width].Handle)
		if off < len(data) {
			copy(got[off:end], data[off:])
		}
	}
	return got
}

func (w *world) isMoving(id layout.FileID) bool {
	dev, err := w.m.moveTarget(w.t.Context(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	return dev != layout.DeviceID{}
}

// A file's data moves to the device that somebody names, while it is written, whenever the service is restarted.
func TestMoveTo(t *testing.T) {
	const size = 1 << 20
	for _, c := range []struct {
		name   string
		policy layout.Policy
		size   int // of what has been written
		whole  bool
	}{
		{"striped", layout.Policy{StripeUnit: 1 << 16, StripeCount: 4, Mirrors: 1}, size, true},
		{"one of four columns", layout.Policy{StripeUnit: 1 << 16, StripeCount: 4, Mirrors: 1}, 1000, true},
		{"one column", layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 1}, size, true},
		{"mirrored", layout.Policy{StripeUnit: 1 << 16, StripeCount: 2, Mirrors: 2}, size, false},
	} {
		for stop, all := 0, false; !all && !t.Failed(); stop++ {
			t.Run(fmt.Sprintf("%s, restarted after %d steps", c.name, stop), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, 4)
					row := w.file(5, c.policy, int64(c.size))
					data := bytes.Repeat([]byte("data"), c.size/4)
					w.put(row, 0, data)
					to := w.device(0).id
					for i := range w.exports { // to where the whole file is not yet
						if row.Mirrors[0][0].Device == to || len(row.Mirrors) > 1 && row.Mirrors[1][0].Device == to {
							to = w.device(i).id
						}
					}
					if has, there, err := w.m.MoveTo(t.Context(), 5, to); err != nil || !has || there {
						t.Fatalf("data %v, there %v, %v", has, there, err)
					}
					if _, _, err := w.m.MoveTo(t.Context(), 5, row.Mirrors[0][0].Device); !errors.Is(err, syscall.EBUSY) {
						t.Errorf("to another device meanwhile: %v", err)
					}
					late := []byte("while it moves")
					between := func(row schema.Layout, off int64) {
						at := off % int64(c.size/2)
						w.put(row, at, late)
						copy(data[at:], late)
					}
					all = w.moved(5, stop, between)
					w.restart()
					calm()
					if !w.moved(5, 100, between) || w.isMoving(5) {
						t.Fatal("it is still moved")
					}
					after := w.layoutOf(5)
					if after.Moving || w.hasFill(5) || len(after.Mirrors) != c.policy.Mirrors {
						t.Errorf("the layout is %+v", after)
					}
					for j, file := range after.Mirrors[0] {
						if c.policy.Mirrors > 1 && after.Mirrors[1][j].Device == to {
							continue
						}
						if file.Device != to {
							t.Errorf("column %d is on %v, want %v", j, file.Device, to)
						}
					}
					if c.whole && (after.Width != 1 || len(after.Mirrors[0]) != 1) {
						t.Errorf("%d of %d data files", len(after.Mirrors[0]), after.Width)
					}
					if got := w.content(after, len(data)); !bytes.Equal(got, data) {
						t.Error("other contents")
					}
					for _, mode := range []layout.IOMode{layout.IOModeRead, layout.IOModeRW} {
						for _, s := range w.m.Segments(after, mode) {
							if _, err := s.Layout(); err != nil || c.whole && s.Len != layout.ToEOF {
								t.Errorf("segment of %d bytes: %v", s.Len, err)
							}
						}
					}
					w.equalCopies(after)
					w.owned(after)
					if has, there, err := w.m.MoveTo(t.Context(), 5, to); err != nil || !has || !there || w.isMoving(5) {
						t.Errorf("once more: data %v, there %v, %v", has, there, err)
					}
					if err := w.m.Fence(t.Context(), 5); err != nil {
						t.Error(err)
					}
					calm()
					w.check()
				})
			})
		}
	}
}

// A file whose only data file is there already needs no copying; one that was never written has none.
func TestMoveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeCount: 4}, 1)
		if has, there, err := w.m.MoveTo(t.Context(), 5, row.Mirrors[0][0].Device); err != nil || !has || !there {
			t.Errorf("data %v, there %v, %v", has, there, err)
		}
		if after := w.layoutOf(5); after.Width != 1 || !after.Mirrors[0][0].Same(&row.Mirrors[0][0]) {
			t.Errorf("%+v", after)
		}
		w.inode(6, layout.Policy{})
		if has, there, err := w.m.MoveTo(t.Context(), 6, row.Mirrors[0][0].Device); err != nil || has || !there {
			t.Errorf("empty: data %v, there %v, %v", has, there, err)
		}
		calm()
		w.check()
	})
}

// A device that is not there, away, full or drained takes nothing; what had begun is given up, and a fence in the midst of it does no
// harm.
func TestMoveGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 3}, 10<<20)
		data := bytes.Repeat([]byte("data"), 1<<18)
		w.put(row, 0, data)
		to := w.device(0)
		refused := func(what string, want syscall.Errno) {
			t.Helper()
			if _, _, err := w.m.MoveTo(t.Context(), 5, to.id); !errors.Is(err, want) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if _, _, err := w.m.MoveTo(t.Context(), 5, layout.DeviceID{9}); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("a device that is not known: %v", err)
		}
		w.exports[0].SetDown(true)
		time.Sleep(time.Minute)
		refused("away", syscall.ENODEV)
		w.exports[0].SetDown(false)
		w.exports[0].SetSpace(1<<30, 0, true)
		time.Sleep(time.Minute)
		refused("full", syscall.ENOSPC)
		w.exports[0].SetSpace(1<<30, 1<<30, false)
		calm()
		if _, err := w.m.DrainDevice(t.Context(), to.id, false); err != nil {
			t.Fatal(err)
		}
		refused("drained", syscall.ENODEV)
		if _, err := w.m.DrainDevice(t.Context(), to.id, true); err != nil {
			t.Fatal(err)
		}
		calm()
		unchanged := func(what string) {
			t.Helper()
			if after := w.layoutOf(5); after.Moving || after.Width != 3 || !bytes.Equal(w.content(after, len(data)), data) {
				t.Errorf("%s: %+v", what, after)
			}
		}
		if _, _, err := w.m.MoveTo(t.Context(), 5, to.id); err != nil {
			t.Fatal(err)
		}
		w.moved(5, 2, nil)
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.m.Exchange(t.Context(), 5, nil), w.m.DropMoved(t.Context(), 5)); err != nil {
			t.Fatal(err)
		}
		unchanged("after a fence")
		if !w.isMoving(5) {
			t.Error("a fence ends the moving")
		}
		// It becomes stale in one column.
		w.moved(5, 2, nil)
		moving := w.layoutOf(5)
		if _, err := w.m.MarkStale(t.Context(), 5, refs(moving.Mirrors[1][1])); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.m.Exchange(t.Context(), 5, nil), w.m.DropMoved(t.Context(), 5)); err != nil {
			t.Fatal(err)
		}
		unchanged("after a failed write")
		// It is full, and then both it and what it was copied from are complained of.
		w.moved(5, 3, nil)
		moving = w.layoutOf(5)
		for _, f := range []schema.DataFile{moving.Mirrors[0][0], moving.Mirrors[1][0]} {
			if _, err := w.m.MarkStale(t.Context(), 5, refs(f)); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(w.m.Exchange(t.Context(), 5, nil), w.m.DropMoved(t.Context(), 5)); err != nil {
			t.Fatal(err)
		}
		unchanged("after both failed")
		if got := states(w.layoutOf(5)); got[0][0] != layout.CopyGood {
			t.Errorf("states %v", got)
		}
		// The target goes.
		w.moved(5, 1, nil)
		w.exports[0].SetDown(true)
		time.Sleep(time.Minute)
		if err := w.m.StopMove(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		if !w.moved(5, 100, nil) { // there is nothing to be filled but what cannot be fenced, which is stale then
			t.Error("it goes on")
		}
		unchanged("after the device is gone")
		w.exports[0].SetDown(false)
		calm()
		w.check()
		// A file that goes while it is moved.
		if _, _, err := w.m.MoveTo(t.Context(), 5, to.id); err != nil {
			t.Fatal(err)
		}
		w.moved(5, 2, nil)
		w.remove(5)
		if err := w.m.StopMove(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		calm()
		w.check()
	})
}

// While one data file is in all columns a fence gives it one owner, and it is cut once.
func TestMoveFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 3}, 10<<20)
		data := bytes.Repeat([]byte("data"), 1<<18)
		w.put(row, 0, data)
		to := w.device(0).id
		if _, _, err := w.m.MoveTo(t.Context(), 5, to); err != nil {
			t.Fatal(err)
		}
		w.moved(5, 4, nil) // and not the old ones dropped
		moving := w.layoutOf(5)
		if !moving.Moving || !schema.OneFile(moving.Mirrors[0]) {
			t.Fatalf("%+v", moving)
		}
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		if err := w.m.Truncate(t.Context(), w.layoutOf(5), 100_000); err != nil {
			t.Fatal(err)
		}
		if end, err := w.m.Sync(t.Context(), w.layoutOf(5)); err != nil || end != 100_000 {
			t.Errorf("ends at %d: %v", end, err)
		}
		if err := w.m.DropMoved(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		after := w.layoutOf(5)
		if after.Width != 1 || w.owned(after)[0].UID == moving.Mirrors[0][0].UID || !bytes.Equal(w.content(after, 100_000), data[:100_000]) {
			t.Errorf("%+v", after)
		}
		calm()
		w.check()
	})
}

// What is pinned stays where it is, and nothing takes its place; other columns move.
func TestMovePinned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 3}, 10<<20)
		w.put(row, 0, bytes.Repeat([]byte("data"), 1<<18))
		to := w.device(0).id
		if _, _, err := w.m.MoveTo(t.Context(), 5, to); err != nil {
			t.Fatal(err)
		}
		fillable := func(pinned []metarpc.CopyRef) bool {
			t.Helper()
			can, err := w.m.Fillable(t.Context(), 5, pinned)
			if err != nil {
				t.Fatal(err)
			}
			return can
		}
		pinned := refs(row.Mirrors[0][1])
		if fillable(pinned) || !fillable(nil) {
			t.Error("a file with a pinned data file is moved, or one without is not")
		}
		if got, _, err := w.m.StartFill(t.Context(), 5, pinned); err != nil || got.Moving {
			t.Errorf("moving %v, %v", got.Moving, err)
		}
		w.moved(5, 3, nil)
		if fillable(pinned) || !fillable(nil) {
			t.Error("what is full takes the place of a pinned data file, or cannot be used without one")
		}
		if !w.moved(5, 100, nil) || w.isMoving(5) {
			t.Error("still moved")
		}
		double := w.file(6, layout.Policy{StripeUnit: 1 << 16, StripeCount: 2, Mirrors: 2}, 10<<20)
		w.put(double, 0, bytes.Repeat([]byte("data"), 1<<18))
		drained := double.Mirrors[0][0].Device
		if _, err := w.m.DrainDevice(t.Context(), drained, false); err != nil {
			t.Fatal(err)
		}
		calm()
		w.m.mu.Lock()
		all, unpinned := w.m.movesFor(&double, nil, false), w.m.movesFor(&double, refs(double.Mirrors[0][0]), false)
		w.m.mu.Unlock()
		if len(all) != len(unpinned)+1 {
			t.Errorf("%d of %d columns move off a drained device", len(unpinned), len(all))
		}
		calm()
	})
}

// A drain of both devices of a file moves what is not pinned, and only that.
func TestDrainPinned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(6, layout.Policy{StripeUnit: unit, StripeCount: 1, Mirrors: 2}, unit)
		w.put(row, 0, bytes.Repeat([]byte("data"), 1<<10))
		for i := range 2 {
			if _, err := w.m.DrainDevice(t.Context(), row.Mirrors[i][0].Device, false); err != nil {
				t.Fatal(err)
			}
		}
		calm()
		pinned := refs(row.Mirrors[0][0])
		if ok, err := w.m.Fillable(t.Context(), 6, pinned); !ok || err != nil {
			t.Fatal(ok, err)
		}
		w.m.StartFill(t.Context(), 6, pinned) // which may find the pools empty
		calm()
		l, _, err := w.m.StartFill(t.Context(), 6, pinned)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.m.Fill(t.Context(), 6, l, 0, 1<<30, unpaced, never); err != nil {
			t.Fatal(err)
		}
		if _, err := w.m.EndFill(t.Context(), 6, l); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.m.Exchange(t.Context(), 6, pinned), w.m.DropMoved(t.Context(), 6)); err != nil {
			t.Fatal(err)
		}
		now := w.layoutOf(6)
		if !now.Has(func(file *schema.DataFile) bool { return file.Is(pinned[0]) && file.State == layout.CopyGood }) {
			t.Errorf("the pinned copy has gone: %+v", now)
		}
		if now.Has(func(file *schema.DataFile) bool { return file.Same(&row.Mirrors[1][0]) }) {
			t.Errorf("the other one has not: %+v", now)
		}
		calm()
	})
}
