package datafile

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// drain drains a device.
func (w *world) drain(d *device) {
	w.t.Helper()
	if _, err := w.m.DrainDevice(w.t.Context(), d.id, false); err != nil {
		w.t.Fatal(err)
	}
}

// noRows makes sure that the catalog has forgotten a device.
func (w *world) noRows(id layout.DeviceID) {
	w.t.Helper()
	for _, prefix := range []byte{schema.PrefixDevice, schema.PrefixInUse, schema.PrefixGarbage} {
		for key := range w.rows(prefix) {
			if strings.HasPrefix(key[1:], string(id[:])) {
				w.t.Errorf("row %q is left", key)
			}
		}
	}
	for _, info := range w.m.Devices(w.t.Context()) {
		if info.Device.ID == id {
			w.t.Errorf("still known: %+v", info)
		}
	}
}

// A device is removed when it is drained and empty, and nothing is left there. It can be added again.
func TestRemoveDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		const unit = 1 << 16
		row := w.file(5, layout.Policy{StripeUnit: unit, StripeCount: 3, Mirrors: 1}, 10<<20)
		w.put(row, 0, make([]byte, 3*unit))
		calm()
		d := w.device(0)
		busy := func(why string) {
			t.Helper()
			for _, lost := range []bool{false, true} {
				err := w.m.RemoveDevice(t.Context(), d.id, lost)
				if !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), why) {
					t.Errorf("removed: %v, want %q", err, why)
				}
			}
		}
		busy("not drained")
		w.drain(d)
		busy("1 data files")
		if err := w.fill(5, unit, nil); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.m.Exchange(t.Context(), 5, nil), w.m.DropMoved(t.Context(), 5)); err != nil {
			t.Fatal(err)
		}
		if err := w.m.RemoveDevice(t.Context(), d.id, false); err != nil {
			t.Fatal(err)
		}
		w.noRows(d.id)
		if files := dataFiles(w.exports[0]); len(files) != 0 {
			t.Errorf("left there: %v", files)
		}
		synctest.Wait()
		w.m.mu.Lock()
		if d.server != nil {
			t.Error("it is still connected")
		}
		w.m.mu.Unlock()
		if err := d.do(t.Context(), func(dataStore) error { return nil }); !errors.Is(err, errRemoved) {
			t.Errorf("a late call: %v", err)
		}
		if err := w.m.RemoveDevice(t.Context(), d.id, false); err != nil {
			t.Errorf("once more: %v", err)
		}
		removed := w.exports[0]
		w.exports = w.exports[1:]
		if w.file(6, layout.Policy{StripeCount: 3}, 10<<20); len(w.onDevice(6, d.id)) > 0 {
			t.Error("a new file got a data file there")
		}
		w.restart()
		calm()
		w.check()
		w.noRows(d.id)

		w.exports = append(w.exports, removed)
		info, err := w.m.AddDevice(t.Context(), removed.URL(), false)
		if err != nil || info.Device.ID != d.id || info.Draining || info.DataFiles != 0 {
			t.Errorf("added again: %+v, %v", info, err)
		}
		if w.file(7, layout.Policy{StripeCount: 3}, 10<<20); len(w.onDevice(7, d.id)) != 1 || w.onDevice(7, d.id)[0].Number < d.row.Next {
			t.Errorf("a new file has %v there, numbers up to %d were taken before", w.onDevice(7, d.id), d.row.Next)
		}
		calm()
		w.check()
	})
}

// What is to be removed on a device that cannot be reached is forgotten only if the device is declared lost.
func TestRemoveLostDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.file(5, layout.Policy{StripeCount: 2}, 10<<20)
		calm()
		d := w.device(0)
		w.exports[0].SetDown(true)
		w.drain(d)
		w.remove(5)
		for _, wait := range []time.Duration{0, time.Minute} { // before it is known that it is down, and after
			time.Sleep(wait)
			if err := w.m.RemoveDevice(t.Context(), d.id, false); err == nil || !strings.Contains(err.Error(), "--lost") {
				t.Errorf("cannot be reached: %v", err)
			}
		}
		if err := w.m.RemoveDevice(t.Context(), d.id, true); err != nil {
			t.Fatal(err)
		}
		w.noRows(d.id)

		// It was not.
		w.exports[0].SetDown(false)
		if info, err := w.m.AddDevice(t.Context(), w.exports[0].URL(), false); err != nil || info.Device.ID != d.id {
			t.Fatalf("added again: %+v, %v", info, err)
		}
		calm()
		left := dataFiles(w.exports[0])
		w.file(6, layout.Policy{StripeCount: 2}, 10<<20)
		for _, file := range w.onDevice(6, d.id) {
			if file.Number < d.row.Next {
				t.Errorf("number %d again", file.Number)
			}
		}
		if pool := len(w.device(0).held); len(left) <= pool {
			t.Errorf("%d data files, %d of them in the pool: those from before are missing", len(left), pool)
		}
	})
}

// A crash, or an outcome that is not known, leaves what can be removed again. Without garbage nothing needs to be reached.
func TestRemoveDeviceAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		d := w.device(0)
		w.drain(d)
		cut := errors.New("cut")
		trap := &ambush{Engine: w.engine, err: cut}
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		w.start(trap)
		trap.arm(schema.DeviceKey(d.id), func() {})
		if err := w.m.RemoveDevice(t.Context(), d.id, false); !errors.Is(err, cut) {
			t.Fatalf("removed: %v", err)
		}
		w.restart()
		calm()
		if info := w.m.Devices(t.Context()); len(info) != 2 {
			t.Fatalf("%+v", info)
		}
		if files := dataFiles(w.exports[0]); len(files) != 0 {
			t.Errorf("a drained device has %d data files ready", len(files))
		}
		w.exports[0].SetDown(true)
		trap.err = catalog.ErrUnknown
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		w.start(trap)
		trap.arm(schema.DeviceKey(d.id), func() { // it was applied
			var b catalog.Batch
			b.Delete(schema.DeviceKey(d.id))
			b.Delete(schema.InUseKey(d.id))
			w.commit(&b)
		})
		if err := w.m.RemoveDevice(t.Context(), d.id, false); err != nil {
			t.Errorf("with an outcome that was not known: %v", err)
		}
		w.noRows(d.id)
	})
}

// Of a removal and what puts a data file there one wins.
func TestRemoveDeviceRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		calm()
		trap := &ambush{Engine: w.engine}
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		w.start(trap)
		calm()

		// A data file, the first one there, comes just before the removal.
		unused := w.device(2)
		w.drain(unused)
		calm()
		add := func(n int64) {
			var b catalog.Batch
			b.Add(schema.InUseKey(unused.id), 0, n)
			w.commit(&b)
		}
		trap.arm(schema.DeviceKey(unused.id), func() { add(1) })
		if err := w.m.RemoveDevice(t.Context(), unused.id, false); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("with a first data file: %v", err)
		}
		add(-1)
		if err := w.m.RemoveDevice(t.Context(), unused.id, false); err != nil {
			t.Error(err)
		}
		w.noRows(unused.id)
		w.exports = w.exports[:2]

		// The removal comes between the choice of the data files and their commit.
		gone := w.device(0)
		trap.arm(schema.LayoutKey(5), func() {
			w.drain(gone)
			err := w.m.RemoveDevice(context.Background(), gone.id, false)
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "not done after 30s") {
				t.Errorf("with a data file that is being assigned: %v", err)
			}
			if err := w.m.RemoveDevice(context.Background(), gone.id, true); err != nil {
				t.Error(err)
			}
		})
		row := w.file(5, layout.Policy{StripeCount: 2}, 10<<20)
		if len(w.onDevice(5, gone.id)) != 0 || row.Width != 1 {
			t.Errorf("the file is on a device that was removed: %+v", row)
		}
		w.noRows(gone.id)

		// The commit comes first, on a device that had data files before.
		w.exports = w.exports[1:]
		d := w.device(0)
		w.remove(5)
		calm()
		w.drain(d)
		calm()
		trap.arm(schema.DeviceKey(d.id), func() {
			var b catalog.Batch
			b.Put(schema.LayoutKey(6), schema.Encode(&row))
			b.Add(schema.InUseKey(d.id), 0, 1)
			w.commit(&b)
		})
		if err := w.m.RemoveDevice(t.Context(), d.id, true); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "1 data files") {
			t.Errorf("with a new layout: %v", err)
		}
		if infos := w.m.Devices(t.Context()); len(infos) != 1 || infos[0].DataFiles != 1 {
			t.Errorf("%+v", infos)
		}
	})
}
