package datafile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

// exportOf is the export that a data file is on.
func (w *world) exportOf(f schema.DataFile) *storetest.Export {
	w.t.Helper()
	for i := range w.exports {
		if w.device(i).id == f.Device {
			return w.exports[i]
		}
	}
	w.t.Fatalf("device %v is not known", f.Device)
	return nil
}

// replaced fences a file as the service does, and replaces what is held. It does so many steps at most, and reports whether that were all.
func (w *world) replaced(id layout.FileID, steps int) bool {
	w.t.Helper()
	ctx := w.t.Context()
	err := w.m.Fence(ctx, id)
	var held *HeldError
	if err != nil && !errors.As(err, &held) {
		w.t.Fatal(err)
	}
	var row schema.Layout
	settle := func() error { return errors.Join(w.m.Exchange(ctx, id, nil), w.m.DropMoved(ctx, id)) }
	for _, f := range []func() error{
		func() error {
			if held == nil {
				return settle()
			}
			if old := w.layoutOf(id); old.Moving {
				extra := old.Mirrors[len(old.Mirrors)-1]
				if _, err := w.m.MarkStale(ctx, id, refs(extra...)); err != nil {
					return err
				}
				return settle()
			}
			return nil
		},
		func() (err error) {
			if held != nil {
				row, err = w.m.StartReplace(ctx, id, held.Held)
			}
			return err
		},
		func() error {
			for off, end := int64(0), int64(layout.ToEOF); held != nil && off < end; {
				if off, end, err = w.m.Fill(ctx, id, row, off, 1<<20, unpaced, nil); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			_, err := w.m.EndFill(ctx, id, row)
			return err
		},
		func() error { return w.m.Fence(ctx, id) },
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

// A data file that is held is replaced, whenever the service is restarted; the others of the file are fenced as ever.
func TestReplaceHeld(t *testing.T) {
	for stop := 0; ; stop++ {
		all := false
		t.Run(fmt.Sprintf("restarted after %d steps", stop), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 4)
				row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 2, Mirrors: 1}, 10<<20)
				data := bytes.Repeat([]byte("data"), 1<<18)
				w.put(row, 0, data)
				free, old := row.Mirrors[0][0], row.Mirrors[0][1]
				w.exportOf(old).SetHeld(old.Handle, true)
				start := time.Now()
				var held *HeldError
				if err := w.m.Fence(t.Context(), 5); !errors.As(err, &held) || len(held.HeldCopies()) != 1 || !old.Is(held.HeldCopies()[0]) {
					t.Fatalf("fence: %v", err)
				}
				if took := time.Since(start); took < heldTime || took > 2*heldTime {
					t.Errorf("held after %v", took)
				}
				if now := w.layoutOf(5).Mirrors[0]; now[0].UID == free.UID || now[1].UID != old.UID {
					t.Errorf("owners %d and %d, before they were %d and %d", now[0].UID, now[1].UID, free.UID, old.UID)
				}
				all = w.replaced(5, stop)
				w.restart()
				calm()
				if !w.replaced(5, 100) {
					t.Fatal("it has more than 100 steps")
				}
				after := w.layoutOf(5)
				if after.Moving || len(after.Mirrors) != 1 || w.hasFill(5) {
					t.Errorf("the layout is %+v", after)
				}
				fresh := after.Mirrors[0][1]
				if fresh.Same(&old) || fresh.Device != old.Device || !after.Mirrors[0][0].Same(&free) {
					t.Errorf("it is %v/%d, was %v/%d", fresh.Device, fresh.Number, old.Device, old.Number)
				}
				w.equalCopies(after)
				for off := int64(0); off < int64(len(data)); off += 1 << 16 {
					j := int(off >> 16 % 2)
					if !bytes.Equal(w.net.Data(after.Mirrors[0][j].Handle)[off:off+1<<16], data[off:off+1<<16]) {
						t.Fatalf("other contents at %d", off)
					}
				}
				w.owned(after)
				calm()
				w.check() // the old one is removed as well, though it is held
			})
		})
		if all || t.Failed() {
			return
		}
	}
}

// Where the device has no room the data file goes elsewhere. A data server that is away holds nothing up but itself: its data files
// are not replaced.
func TestReplaceElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		row := w.file(5, layout.Policy{StripeCount: 1, Mirrors: 1}, unit)
		w.put(row, 0, []byte("data"))
		old := row.Mirrors[0][0]
		w.exportOf(old).SetHeld(old.Handle, true)
		w.exportOf(old).SetSpace(1<<30, 0, true)
		time.Sleep(time.Minute) // until that is known
		if !w.replaced(5, 100) {
			t.Fatal("not replaced")
		}
		fresh := w.layoutOf(5).Mirrors[0][0]
		if fresh.Device == old.Device || string(w.net.Data(fresh.Handle)) != "data" {
			t.Errorf("on %v is %q, it was on %v", fresh.Device, w.net.Data(fresh.Handle), old.Device)
		}
		e := w.exportOf(fresh)
		e.SetHeld(fresh.Handle, true)
		e.SetDown(true)
		ctx, cancel := context.WithTimeout(t.Context(), 10*heldTime)
		defer cancel()
		var held *HeldError
		if err := w.m.Fence(ctx, 5); errors.As(err, &held) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("fence of what is away: %v", err)
		}
		e.SetDown(false)
		calm()
		w.check()
	})
}

// Copies that are held do not matter as long as another one can be fenced.
func TestReplaceMirrored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeCount: 1, Mirrors: 2}, unit)
		w.put(row, 0, []byte("data"))
		first, second := row.Mirrors[0][0], row.Mirrors[1][0]
		w.exportOf(first).SetHeld(first.Handle, true)
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		if got := states(w.layoutOf(5)); got[0][0] != layout.CopyStale || got[1][0] != layout.CopyGood {
			t.Errorf("states %v", got)
		}
		if err := w.fill(5, 1<<20, nil); err != nil {
			t.Fatal(err)
		}
		row = w.layoutOf(5)
		w.exportOf(row.Mirrors[0][0]).SetHeld(row.Mirrors[0][0].Handle, true)
		w.exportOf(second).SetDown(true)
		if !w.replaced(5, 100) { // from the one that is held
			t.Fatal("not replaced")
		}
		after := w.layoutOf(5)
		if got := states(after); got[0][0] != layout.CopyGood || got[1][0] != layout.CopyStale || after.Mirrors[0][0].Same(&row.Mirrors[0][0]) {
			t.Errorf("states %v, data file %d, before it was %d", got, after.Mirrors[0][0].Number, row.Mirrors[0][0].Number)
		}
		if got := string(w.net.Data(after.Mirrors[0][0].Handle)); got != "data" {
			t.Errorf("%q", got)
		}
		w.exportOf(second).SetDown(false)
		calm()
		if err := w.fill(5, 1<<20, nil); err != nil {
			t.Fatal(err)
		}
		w.equalCopies(w.layoutOf(5))
		calm()
		w.check()
	})
}
