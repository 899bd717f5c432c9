package datafile

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

// states are the states of a layout's copies, mirror by mirror.
func states(row schema.Layout) (all [][]layout.CopyState) {
	for _, files := range row.Mirrors {
		var of []layout.CopyState
		for _, f := range files {
			of = append(of, f.State)
		}
		all = append(all, of)
	}
	return all
}

func refs(files ...schema.DataFile) (refs []metarpc.CopyRef) {
	for _, f := range files {
		refs = append(refs, metarpc.CopyRef{Device: f.Device, Handle: f.Handle})
	}
	return refs
}

// hasFill reports whether there is a row that says that not all copies are good.
func (w *world) hasFill(id layout.FileID) bool {
	_, err := w.engine.Get(w.t.Context(), schema.FillKey(id))
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		w.t.Fatal(err)
	}
	return err == nil
}

// TestAssignDropsDown: an Assign makes copies on devices that are down stale, if there is another one to be used.
func TestAssignDropsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		row := w.file(5, layout.Policy{Mirrors: 2}, 10)
		first := 0
		if w.device(1).id == row.Mirrors[0][0].Device {
			first = 1
		}
		agree := true
		assign := func(by byte, drop bool) [][]layout.CopyState {
			t.Helper()
			ask := func(ref metarpc.CopyRef) bool { return agree }
			if !drop {
				ask = nil
			}
			row, err := w.m.Assign(t.Context(), 5, w.inode(5, layout.Policy{Mirrors: 2}), 0, 10, metarpc.SessionID{by}, false, nil, ask)
			if err != nil {
				t.Fatal(err)
			}
			return states(row)
		}
		good := [][]layout.CopyState{{layout.CopyGood}, {layout.CopyGood}}
		expect := func(what string, got, want [][]layout.CopyState) {
			t.Helper()
			if !reflect.DeepEqual(got, want) || w.hasFill(5) != !reflect.DeepEqual(want, good) {
				t.Errorf("%s: %v, a fill row: %v", what, got, w.hasFill(5))
			}
		}
		expect("all are up", assign(20, true), good)
		for _, e := range w.exports {
			e.SetDown(true)
		}
		time.Sleep(10 * time.Second)
		expect("none is up", assign(21, true), good)
		w.exports[1-first].SetDown(false)
		time.Sleep(20 * time.Second)
		expect("nobody asks", assign(22, false), good)
		agree = false
		expect("not to be dropped", assign(23, true), good)
		agree = true
		want := [][]layout.CopyState{{layout.CopyStale}, {layout.CopyGood}}
		expect("one is down", assign(24, true), want)
		expect("again", assign(24, true), want)
		w.exports[first].SetDown(false)
		time.Sleep(20 * time.Second)
		expect("it is back", assign(24, true), want)
	})
}

func TestMarkStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeCount: 2, Mirrors: 2}, 10*unit)
		mark := func(files ...schema.DataFile) int {
			t.Helper()
			stale, err := w.m.MarkStale(t.Context(), 5, refs(files...))
			if err != nil {
				t.Fatal(err)
			}
			return len(stale)
		}
		if n := mark(schema.DataFile{Device: row.Mirrors[0][0].Device, Handle: []byte("another")}); n != 1 || w.hasFill(5) {
			t.Errorf("a data file of nobody's: %d copies stale", n)
		}
		if n := mark(row.Mirrors[0][0]); n != 1 || !w.hasFill(5) {
			t.Errorf("the first copy: %d copies stale", n)
		}
		// Of two clients that report different copies of a column only the first gets its way; another column is another matter.
		if n := mark(row.Mirrors[1][0]); n != 1 {
			t.Errorf("the last good copy: %d copies stale", n)
		}
		if n := mark(row.Mirrors[0][1], row.Mirrors[1][1]); n != 2 {
			t.Errorf("both copies of the other column: %d copies stale", n)
		}
		got := states(w.layoutOf(5))
		if got[0][0] != layout.CopyStale || got[1][0] != layout.CopyGood || got[0][1] == got[1][1] {
			t.Errorf("states %v", got)
		}
		for _, s := range w.m.Segments(w.layoutOf(5), layout.IOModeRW) {
			l, err := s.Layout()
			if err != nil {
				t.Fatal(err)
			}
			if l.Mirrors[0].Servers[0].State != layout.CopyStale {
				t.Error("clients are not told")
			}
		}
		w.restart()
		if got := states(w.layoutOf(5)); got[0][0] != layout.CopyStale {
			t.Errorf("after a restart: %v", got)
		}
		if stale, err := w.m.MarkStale(t.Context(), 99, nil); err != nil || stale != nil {
			t.Errorf("no such file: %v, %v", stale, err)
		}
		calm()
		w.remove(5)
		calm()
		w.check()
	})
}

// A fence leaves one copy of each column, of which the data server has confirmed the new owner; a server that is away does not
// hold it up as long as there is another copy.
func TestFenceMirrored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		row := w.file(5, layout.Policy{StripeCount: 3, Mirrors: 2}, 10*unit)
		w.exports[0].SetDown(true)
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		after := w.layoutOf(5)
		if !w.hasFill(5) {
			t.Error("nobody knows that there are stale copies")
		}
		for j := range after.Mirrors[0] {
			if n := after.GoodCopies(j); n != 1 {
				t.Errorf("column %d has %d good copies", j, n)
			}
			for i := range after.Mirrors {
				f, was := after.Mirrors[i][j], row.Mirrors[i][j]
				if f.State != layout.CopyGood {
					continue
				}
				if f.Device == w.device(0).id || f.UID == was.UID {
					t.Errorf("column %d: device %v, owner %d, was %d", j, f.Device, f.UID, was.UID)
				}
			}
		}
		// With one copy left it waits for that.
		for i := range w.exports {
			w.exports[i].SetDown(true)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := w.m.Fence(ctx, 5); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("all servers away: %v", err)
		}
		time.AfterFunc(time.Minute, func() {
			for i := range w.exports {
				w.exports[i].SetDown(false)
			}
		})
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Error(err)
		}
	})
}

// Truncate names the copies that are late while others have been cut; Sync does not need them.
func TestLateCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		row := w.file(5, layout.Policy{StripeCount: 1, Mirrors: 2}, 10*unit)
		w.exports[0].SetDown(true)
		var late *LateError
		if err := w.m.Truncate(t.Context(), row, 1); !errors.As(err, &late) || len(late.Late) != 1 || late.Late[0].Device != w.device(0).id {
			t.Errorf("truncation: %v", err)
		}
		if _, err := w.m.Sync(t.Context(), row); err != nil {
			t.Errorf("sync: %v", err)
		}
		if _, err := w.m.MarkStale(t.Context(), 5, late.Late); err != nil {
			t.Fatal(err)
		}
		if err := w.m.Truncate(t.Context(), w.layoutOf(5), 1); err != nil {
			t.Errorf("truncation without the stale copy: %v", err)
		}
		w.exports[0].SetDown(false)
	})
}

// cut truncates a file and says how long that took. The copy on device 0 is late, or is not.
func (w *world) cut(row schema.Layout, late bool) time.Duration {
	w.t.Helper()
	began := time.Now()
	err := w.m.Truncate(w.t.Context(), row, 1)
	var e *LateError
	switch {
	case !late && err != nil, late && (!errors.As(err, &e) || len(e.Late) != 1 || e.Late[0].Device != w.device(0).id):
		w.t.Errorf("cut: %v, want a late copy: %t", err, late)
	}
	return time.Since(began)
}

// mirrored makes files with two copies on two devices.
func (w *world) mirrored(count int) (rows []schema.Layout) {
	for i := range count {
		row := w.file(layout.FileID(5+i), layout.Policy{StripeCount: 1, Mirrors: 2}, unit)
		w.setSizes(row, 100)
		w.setSizes(schema.Layout{Mirrors: row.Mirrors[1:]}, 100)
		rows = append(rows, row)
	}
	return rows
}

// TestCutSkips: truncations wait a second, once, for copies on a device that does not answer, and not when it is known
// to be down. A device that answers again is waited for again.
func TestCutSkips(t *testing.T) {
	for name, set := range map[string]func(*storetest.Export, bool){"down": (*storetest.Export).SetDown, "frozen": (*storetest.Export).SetFrozen} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2)
				rows := w.mirrored(5)
				calm()
				set(w.exports[0], true)
				var took time.Duration
				for _, row := range rows[:3] {
					took += w.cut(row, true)
				}
				if took != lateCopy {
					t.Errorf("three files took %v, want %v", took, lateCopy)
				}
				time.Sleep(10 * time.Second)
				if took := w.cut(rows[3], true); took > 0 {
					t.Errorf("it is down: %v", took)
				}
				set(w.exports[0], false)
				calm()
				w.cut(rows[4], false)

				// Not down meanwhile.
				set(w.exports[0], true)
				w.cut(rows[0], true)
				set(w.exports[0], false)
				time.Sleep(pulsePeriod + probePeriod)
				w.cut(rows[0], false)
			})
		})
	}
}

// TestCutWaitsForStop: a truncation waits for a copy whose data server has announced that it stops, until that is
// back, or is down.
func TestCutWaitsForStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		rows := w.mirrored(2)
		calm()
		stop := func(away time.Duration) {
			w.exports[0].SetStopping(true)
			w.exports[0].SetDown(true)
			time.AfterFunc(away, func() {
				w.exports[0].SetDown(false)
				w.exports[0].SetStopping(false)
			})
		}
		const short = 2500 * time.Millisecond
		stop(short)
		if took := w.cut(rows[0], false); took != short {
			t.Errorf("it was away for %v: %v", short, took)
		}
		calm()
		stop(time.Minute)
		if took := w.cut(rows[1], true); took < misses*probePatience || took > misses*probePatience+2*probePeriod {
			t.Errorf("it stays away: %v", took)
		}
		time.Sleep(time.Minute)
	})
}

// TestComplaints: a device that clients have complained of is no target of fills before it has answered a pulse, which
// is sent at once. That is waited for, for a second at most.
func TestComplaints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		row := w.mirrored(1)[0]
		complain := func() {
			t.Helper()
			if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[1][0])); err != nil {
				t.Fatal(err)
			}
		}
		on := slices.IndexFunc(w.exports, func(e *storetest.Export) bool {
			return w.device(slices.Index(w.exports, e)).id == row.Mirrors[1][0].Device
		})
		fillable := func(want bool, most time.Duration) {
			t.Helper()
			began := time.Now()
			can, err := w.m.Fillable(t.Context(), 5, nil)
			if took := time.Since(began); can != want || took > most || err != nil {
				t.Errorf("fillable: %t after %v, %v; want %t after %v", can, took, err, want, most)
			}
		}
		calm()
		complain()
		fillable(true, 0)
		time.Sleep(2 * justAnswered)
		w.exports[on].SetFrozen(true)
		complain()
		fillable(false, fillPatience)
		fillable(false, 0)
		w.exports[on].SetFrozen(false)
		time.Sleep(time.Millisecond)
		fillable(true, 0)
	})
}
