package datafile

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// setSizes gives data files sizes as if clients had written them.
func (w *world) setSizes(row schema.Layout, sizes ...uint64) {
	w.t.Helper()
	for i, f := range row.Mirrors[0] {
		for j := range w.exports {
			if w.device(j).id == f.Device {
				if err := w.server(j).SetAttr(w.t.Context(), f.Handle, nfs3.Sattr{SetSize: true, Size: sizes[i]}, nil); err != nil {
					w.t.Fatal(err)
				}
			}
		}
	}
}

func (w *world) sizes(row schema.Layout) (sizes []uint64) {
	for _, f := range row.Mirrors[0] {
		for j := range w.exports {
			if w.device(j).id == f.Device {
				sizes = append(sizes, dataFiles(w.exports[j])[f.Number].Size)
			}
		}
	}
	return sizes
}

func TestTruncateAndSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		row := w.file(5, layout.Policy{StripeCount: 3}, 10*unit)
		w.setSizes(row, 100, 2*unit, 10)
		if end, err := w.m.Sync(t.Context(), row); err != nil || end != 2*unit {
			t.Errorf("Sync: %d, %v", end, err)
		}
		if err := w.m.Truncate(t.Context(), row, 50); err != nil {
			t.Fatal(err)
		}
		if s := w.sizes(row); s[0] != 50 || s[1] != 50 || s[2] != 10 {
			t.Errorf("sizes after truncation: %v", s)
		}
		if err := w.m.Truncate(t.Context(), row, 1<<40); err != nil {
			t.Fatal(err)
		}
		if end, err := w.m.Sync(t.Context(), row); err != nil || end != 50 {
			t.Errorf("Sync after truncation upwards: %d, %v", end, err)
		}
		if end, err := w.m.Sync(t.Context(), schema.Layout{}); err != nil || end != 0 {
			t.Errorf("Sync of nothing: %d, %v", end, err)
		}
		if err := w.m.Truncate(t.Context(), schema.Layout{}, 0); err != nil {
			t.Error(err)
		}

		// A server that is away makes both wait; the others are done at once.
		down := w.device(0)
		w.exports[0].SetDown(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := w.m.Truncate(ctx, row, 5); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("server away: %v", err)
		}
		for i, f := range row.Mirrors[0] {
			if s := w.sizes(row)[i]; (s <= 5) == (f.Device == down.id) {
				t.Errorf("data file %d has %d bytes", i, s)
			}
		}
		time.AfterFunc(time.Minute, func() { w.exports[0].SetDown(false) })
		if err := w.m.Truncate(t.Context(), row, 5); err != nil {
			t.Error(err)
		}
		if s := w.sizes(row); max(s[0], s[1], s[2]) != 5 {
			t.Errorf("sizes in the end: %v", s)
		}

		// A data file that is gone is an answer, not a reason to wait.
		w.remove(5)
		calm()
		if _, err := w.m.Sync(t.Context(), row); !errors.Is(err, nfs3.ErrStale) {
			t.Errorf("Sync of removed data files: %v", err)
		}
		w.check()
	})
}

// A cut that is executed late must not reach bytes written since: it is bound to the state of the file in which it was
// sent.
func TestLateCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		row := w.file(5, layout.Policy{}, unit)
		w.setSizes(row, 100)
		handle := row.Mirrors[0][0].Handle
		server := w.server(0)
		calls := 0
		w.net.SetHook(func(ctx context.Context, call string, after bool) error {
			if call != "SETATTR" || after {
				return nil
			}
			if calls++; calls == 1 {
				return server.SetAttr(ctx, handle, nfs3.Sattr{SetSize: true, Size: 70}, nil) // a write gets in between
			}
			return nil
		})
		if err := w.m.Truncate(t.Context(), row, 0); err != nil {
			t.Fatal(err)
		}
		if calls != 3 { // the cut, the write, the cut again
			t.Errorf("%d calls: the first cut was not refused", calls)
		}
		if s := w.sizes(row); s[0] != 0 {
			t.Errorf("size %d after the truncation", s[0])
		}
	})
}

// TestWhole finds copies that have every byte at its offset, and makes them longer.
func TestWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		near := []layout.DeviceID{w.device(0).id}
		one := w.file(5, layout.Policy{StripeCount: 1}, unit)
		home := []layout.DeviceID{one.Mirrors[0][0].Device}
		two := w.file(6, layout.Policy{StripeCount: 1, Mirrors: 2}, unit)
		striped := w.file(7, layout.Policy{StripeCount: 3}, 10*unit)
		all := []layout.DeviceID{w.device(0).id, w.device(1).id, w.device(2).id}
		cached := func(row schema.Layout, state layout.CopyState) schema.Layout {
			row.Caches = []schema.Cache{{File: schema.DataFile{Device: layout.DeviceID{9}, Handle: []byte{9}, State: state}}}
			return row
		}
		for _, c := range []struct {
			name    string
			row     schema.Layout
			near    []layout.DeviceID
			mirrors bool
			found   bool
			several bool
		}{
			{"one copy", one, home, false, true, false},
			{"one copy, no server here", one, nil, true, false, false},
			{"two copies", two, all, true, true, true},
			{"two copies, of which none is wanted", two, all, false, false, true},
			{"striped", striped, all, true, false, false},
			{"no data file", schema.Layout{}, all, true, false, false},
			{"a cache of stripes", cached(striped, layout.CopyGood), []layout.DeviceID{{9}}, false, true, true},
			{"a cache that is being filled", cached(striped, layout.CopyFilling), []layout.DeviceID{{9}}, false, false, true},
			{"a cache elsewhere", cached(one, layout.CopyGood), home, false, true, true},
		} {
			ref, several := w.m.Whole(c.row, c.near, c.mirrors)
			if (len(ref.Handle) > 0) != c.found || several != c.several {
				t.Errorf("%s: %+v, %v", c.name, ref, several)
			}
			only := c.found && len(c.row.Mirrors) == 1 && c.row.Width == 1
			if may := w.m.MayBeWhole(c.row, schema.Inode{}, c.near); len(c.row.Mirrors) > 0 && may != only {
				t.Errorf("%s: it may be whole: %v", c.name, may)
			}
		}
		for _, c := range []struct {
			policy layout.Policy
			near   []layout.DeviceID
			want   bool
		}{
			{layout.Policy{StripeUnit: unit, StripeCount: 1, Mirrors: 1}, near, true},
			{layout.Policy{StripeUnit: unit, StripeCount: 1, Mirrors: 1}, nil, false},
			{layout.Policy{StripeUnit: unit, StripeCount: 2, Mirrors: 1}, near, false},
			{layout.Policy{StripeUnit: unit, StripeCount: 2, Mirrors: 1, Placement: layout.PlacementLocal}, near, true},
			{layout.Policy{StripeUnit: unit, StripeCount: 1, Mirrors: 2}, near, false},
		} {
			if may := w.m.MayBeWhole(schema.Layout{}, schema.Inode{Policy: schema.PolicyOf(c.policy)}, c.near); may != c.want {
				t.Errorf("new files with %+v may be whole: %v", c.policy, may)
			}
		}

		// Growing does not cut, and leaves data files alone that are not named.
		w.setSizes(one, 100)
		for _, c := range []struct{ to, want uint64 }{{50, 100}, {100, 100}, {5000, 5000}} {
			if err := w.m.Grow(t.Context(), one, one.Copies(layout.CopyGood), int64(c.to)); err != nil {
				t.Fatal(err)
			}
			if s := w.sizes(one); s[0] != c.want {
				t.Errorf("grown to %d it has %d bytes, want %d", c.to, s[0], c.want)
			}
		}
		if err := w.m.Grow(t.Context(), two, two.Copies(layout.CopyGood), 300); err != nil {
			t.Fatal(err)
		}
		if s := w.sizes(two); s[0] != 300 {
			t.Errorf("a file with two copies has %v", s)
		}
		if err := w.m.Grow(t.Context(), striped, nil, 1<<30); err != nil {
			t.Fatal(err)
		}
		if s := w.sizes(striped); max(s[0], s[1], s[2]) > 0 {
			t.Errorf("a data file that was not named was made longer: %v", s)
		}
	})
}
