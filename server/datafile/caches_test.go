package datafile

import (
	"bytes"
	"errors"
	"reflect"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// startCache begins a cache that is to be had.
func (w *world) startCache(id layout.FileID, dev layout.DeviceID, n int64) schema.Cache {
	w.t.Helper()
	cache, ok, err := w.m.StartCache(w.t.Context(), id, dev, n, session)
	if err != nil || !ok {
		w.t.Fatalf("start: %v, %v", ok, err)
	}
	return cache
}

func (w *world) endCache(id layout.FileID, ref metarpc.CopyRef) bool {
	w.t.Helper()
	good, err := w.m.EndCache(w.t.Context(), id, ref, session)
	if err != nil {
		w.t.Fatal(err)
	}
	return good
}

func (w *world) staleCaches(id layout.FileID) []schema.Cache {
	w.t.Helper()
	ended, _, err := w.m.StaleCaches(w.t.Context(), id, func(*schema.Cache) bool { return true })
	if err != nil {
		w.t.Fatal(err)
	}
	return ended
}

// TestCaches makes a cache, shows it to readers, cuts it and takes it away. With a restart after each step nothing leaks either.
func TestCaches(t *testing.T) {
	for _, restart := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 3)
			row := w.file(5, layout.Policy{StripeCount: 2, Mirrors: 1}, 10*unit)
			dev := w.device(2).id
			step := func() {
				t.Helper()
				calm()
				if restart {
					w.restart()
					calm()
				}
				w.check()
			}
			mirrors := func(mode layout.IOMode) [][]metarpc.DataFile {
				t.Helper()
				seg := w.m.Segments(w.layoutOf(5), mode)[0]
				if _, err := seg.Layout(); err != nil {
					t.Fatal(err)
				}
				return seg.Mirrors
			}
			if _, ok, err := w.m.StartCache(t.Context(), 6, dev, 1, session); ok || err != nil {
				t.Errorf("cache of a file without data: %v, %v", ok, err)
			}
			if _, _, err := w.m.StartCache(t.Context(), 5, layout.DeviceID{9}, 1, session); err == nil {
				t.Error("cache on a device that there is not")
			}
			cache := w.startCache(5, dev, 10*unit)
			step()
			if again := w.startCache(5, dev, 10*unit); !bytes.Equal(again.File.Handle, cache.File.Handle) {
				t.Error("asked again the service has another data file")
			}
			if _, _, err := w.m.StartCache(t.Context(), 5, dev, 10*unit, metarpc.SessionID{8}); !errors.Is(err, syscall.EBUSY) {
				t.Errorf("another session: %v", err)
			}
			step()
			if n := len(mirrors(layout.IOModeRead)); n != 1 {
				t.Errorf("%d mirrors before the cache is full", n)
			}
			if good, _ := w.m.EndCache(t.Context(), 5, cache.Ref(), metarpc.SessionID{8}); good {
				t.Error("another session ends it")
			}
			for range 2 {
				if !w.endCache(5, cache.Ref()) {
					t.Error("the end")
				}
			}
			step()
			got := mirrors(layout.IOModeRead)
			if len(got) != 2 || len(got[1]) != 2 || !bytes.Equal(got[1][0].Handle, cache.File.Handle) || !bytes.Equal(got[1][1].Handle, cache.File.Handle) ||
				got[1][0].Efficiency >= got[0][0].Efficiency || got[1][0].UID != lastID {
				t.Errorf("readers get %+v", got)
			}
			if d := w.m.Describe(w.layoutOf(5), schema.Inode{}); len(d.Mirrors) != 1 || len(d.Caches) != 1 || d.Caches[0].Server.Device != dev || d.Caches[0].Bytes != 10*unit {
				t.Errorf("described as %+v", d)
			}

			// What goes on with the file leaves the cache as it is; what cuts it cuts the cache.
			if err := w.m.Fence(t.Context(), 5); err != nil {
				t.Error(err)
			}
			if stale, err := w.m.MarkStale(t.Context(), 5, []metarpc.CopyRef{cache.Ref()}); err != nil || len(stale) != 0 {
				t.Errorf("a failed cache is %v, %v", stale, err)
			}
			if err := w.server(2).SetAttr(t.Context(), cache.File.Handle, nfs3.Sattr{SetSize: true, Size: 10 * unit}, nil); err != nil {
				t.Fatal(err)
			}
			if err := w.m.Truncate(t.Context(), w.layoutOf(5), unit); err != nil {
				t.Error(err)
			}
			if attr := dataFiles(w.exports[2])[cache.File.Number]; attr.Size != unit {
				t.Errorf("after the cut the cache has %d bytes", attr.Size)
			}
			if end, err := w.m.Sync(t.Context(), row); end != 0 || err != nil {
				t.Errorf("the file ends at %d by what its caches have, %v", end, err)
			}
			step()

			// Out of layouts first, then garbage.
			if ended := w.staleCaches(5); len(ended) != 1 || ended[0].File.State != layout.CopyGood {
				t.Errorf("ended: %+v", ended)
			}
			if n := len(mirrors(layout.IOModeRead)); n != 1 || w.endCache(5, cache.Ref()) {
				t.Errorf("%d mirrors with a stale cache", n)
			}
			step()
			if _, _, err := w.m.StartCache(t.Context(), 5, dev, 1, session); !errors.Is(err, syscall.EBUSY) {
				t.Errorf("another one while some may read it: %v", err)
			}
			for range 2 {
				if err := w.m.DiscardCaches(t.Context(), 5, []metarpc.CopyRef{cache.Ref()}); err != nil {
					t.Error(err)
				}
				step()
			}
			if n := len(w.layoutOf(5).Caches); n != 0 {
				t.Errorf("%d caches are left", n)
			}

			// One that was not full goes at once, and the rest with the file.
			w.startCache(5, dev, 10*unit)
			w.staleCaches(5)
			step()
			w.startCache(5, dev, 10*unit)
			other := w.startCache(5, row.Mirrors[0][0].Device, 10*unit)
			w.endCache(5, other.Ref())
			step()
			w.remove(5)
			step()
		})
	}
}

// A device that is drained, away or full gets no cache.
func TestCacheRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		d := w.device(0)
		w.m.mu.Lock()
		d.stat.TotalBytes, d.stat.AvailBytes = 1000<<10, 500<<10
		w.m.mu.Unlock()
		if err := w.m.CacheRoom(d.id, 490<<10, 0); err != nil {
			t.Error(err)
		}
		for _, c := range []struct{ n, pending int64 }{{491 << 10, 0}, {400 << 10, 91 << 10}} {
			if err := w.m.CacheRoom(d.id, c.n, c.pending); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%d bytes while %d are to come: %v", c.n, c.pending, err)
			}
		}
		w.file(5, layout.Policy{StripeCount: 1, Mirrors: 1}, unit)
		w.startCache(5, d.id, 300<<10)
		if err := w.m.CacheRoom(d.id, 200<<10, 0); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("what was promised is not counted: %v", err)
		}
		calm()
		if _, err := w.m.DrainDevice(t.Context(), d.id, false); err != nil {
			t.Fatal(err)
		}
		if err := w.m.CacheRoom(d.id, 1, 0); !errors.Is(err, ErrNoDevice) {
			t.Errorf("a drained one: %v", err)
		}
		// Its cache keeps it from being removed.
		if err := w.m.RemoveDevice(t.Context(), d.id, false); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("removed: %v", err)
		}
		w.staleCaches(5)
		if w.layoutOf(5).Mirrors[0][0].Device != d.id {
			if err := w.m.RemoveDevice(t.Context(), d.id, false); err != nil {
				t.Error(err)
			}
		}
	})
}

// A layout without caches has the row that it had before there were any; with one, an earlier version refuses it.
func TestLayoutRows(t *testing.T) {
	type old struct {
		//lint:ignore U1000 msgpack finds it by reflection
		_msgpack   struct{} `msgpack:",as_array"`
		StripeUnit int64
		Width      int
		Mirrors    [][]schema.DataFile
		Moving     bool
	}
	row := schema.Layout{StripeUnit: unit, Width: 3, Mirrors: [][]schema.DataFile{{{Number: 5, Handle: []byte{1}}}}, Moving: true}
	b, err := msgpack.Marshal(&old{StripeUnit: unit, Width: 3, Mirrors: row.Mirrors, Moving: true})
	if err != nil || !bytes.Equal(b, schema.Encode(&row)) {
		t.Errorf("%x, want %x, %v", schema.Encode(&row), b, err)
	}
	for range 2 {
		var got schema.Layout
		if err := schema.Decode(schema.Encode(&row), &got); err != nil || !reflect.DeepEqual(got, row) {
			t.Errorf("%+v, want %+v, %v", got, row, err)
		}
		row.Caches = []schema.Cache{{File: schema.DataFile{Number: 6, Handle: []byte{2}}, Bytes: 7, Made: 8}}
	}
	if err := msgpack.Unmarshal(schema.Encode(&row), new(old)); err == nil {
		t.Error("an earlier version ignores caches")
	}
}
