package datafile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

var (
	volume  = [16]byte{1, 2, 3}
	session = metarpc.SessionID{7}
)

const testPool = 4

// world is a catalog, data servers, and perhaps a Manager on them.
type world struct {
	t       *testing.T
	engine  *memorytest.Engine
	net     *storetest.Net
	exports []*storetest.Export
	resolve store.Resolver // nil: the system's
	m       *Manager
}

// newWorld starts a Manager with so many devices, all looked at.
func newWorld(t *testing.T, devices int) *world {
	w := &world{t: t, engine: memorytest.New(), net: storetest.New()}
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: schema.Format, ID: volume}))
	w.commit(&b)
	w.start(w.engine)
	for range devices {
		e := w.export()
		if _, err := w.m.AddDevice(t.Context(), e.URL(), false); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func (w *world) export() *storetest.Export {
	e := w.net.Export(fmt.Sprintf("10.0.0.%d:2049", len(w.exports)+1), "/export")
	w.exports = append(w.exports, e)
	return e
}

func (w *world) start(engine catalog.Engine) {
	w.t.Helper()
	m, err := New(Config{
		Engine: engine, Volume: volume, Dial: w.net.Dial, Resolve: w.resolve, PoolSize: testPool,
		Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.m = m
	w.t.Cleanup(func() { m.Close() })
}

// restart closes the Manager and starts another.
func (w *world) restart() {
	w.t.Helper()
	if err := w.m.Close(); err != nil {
		w.t.Fatal(err)
	}
	w.start(w.engine)
}

// inode puts a regular file's inode row.
func (w *world) inode(id layout.FileID, policy layout.Policy) schema.Inode {
	w.t.Helper()
	ino := schema.Inode{Mode: syscall.S_IFREG | 0o644, Nlink: 1, Policy: schema.PolicyOf(policy)}
	var b catalog.Batch
	b.Put(schema.InodeKey(id), schema.Encode(&ino))
	w.commit(&b)
	return ino
}

func (w *world) commit(b *catalog.Batch) {
	w.t.Helper()
	if err := w.engine.Commit(w.t.Context(), b); err != nil {
		w.t.Fatal(err)
	}
}

// file makes an inode and assigns [0, n).
func (w *world) file(id layout.FileID, policy layout.Policy, n int64) schema.Layout {
	w.t.Helper()
	row, err := w.m.Assign(w.t.Context(), id, w.inode(id, policy), 0, n, session, false, nil, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return row
}

// remove deletes a file as the service does.
func (w *world) remove(id layout.FileID) {
	w.t.Helper()
	var b catalog.Batch
	raw, err := w.engine.Get(w.t.Context(), schema.LayoutKey(id))
	if err != nil {
		w.t.Fatal(err)
	}
	var row schema.Layout
	if err := schema.Decode(raw, &row); err != nil {
		w.t.Fatal(err)
	}
	b.GuardEqual(schema.LayoutKey(id), raw)
	b.Delete(schema.LayoutKey(id))
	b.Delete(schema.InodeKey(id))
	b.Delete(schema.WriterKey(id, session))
	w.m.Discard(&b, id, row)
	w.commit(&b)
	w.m.Kick()
}

// server is a data server's calls.
func (w *world) server(i int) store.Server {
	w.t.Helper()
	at, err := parseURL(w.exports[i].URL())
	if err != nil {
		w.t.Fatal(err)
	}
	addrs, err := store.Resolve(w.t.Context(), at.host, at.port)
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := w.net.Dial("test", addrs, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// dataFiles are the numbers of the data files that an export has.
func dataFiles(e *storetest.Export) map[uint64]nfs3.Fattr {
	files := map[uint64]nfs3.Fattr{}
	e.Walk(func(path string, attr nfs3.Fattr) {
		parts := strings.Split(path, "/")
		var n uint64
		if attr.Type != nfs3.TypeReg || len(parts) != 4 {
			return
		}
		if _, err := fmt.Sscanf(parts[3], "%016x", &n); err == nil {
			files[n] = attr
		}
	})
	return files
}

// device is the device that an export is.
func (w *world) device(i int) *device {
	w.t.Helper()
	for _, d := range w.m.all() {
		if d.url().String() == w.exports[i].URL() {
			return d
		}
	}
	w.t.Fatalf("export %d is no device", i)
	return nil
}

// rows reads all rows of a prefix.
func (w *world) rows(prefix byte) map[string][]byte {
	w.t.Helper()
	rows := map[string][]byte{}
	from, to := schema.Of(prefix)
	for kv, err := range w.engine.Scan(context.Background(), from, to, catalog.ScanOptions{}) {
		if err != nil {
			w.t.Fatal(err)
		}
		rows[string(kv.Key)] = append([]byte(nil), kv.Value...)
	}
	return rows
}

// check proves that nothing leaked: every data file is in exactly one layout or in the pool, every layout's data
// files exist, and the counters tell how many there are.
func (w *world) check() {
	w.t.Helper()
	type name struct {
		device layout.DeviceID
		number uint64
	}
	owner := map[name]layout.FileID{}
	inUse := map[layout.DeviceID]int64{}
	caches := w.rows(schema.PrefixCache)
	for key, value := range w.rows(schema.PrefixLayout) {
		var row schema.Layout
		if err := schema.Decode(value, &row); err != nil {
			w.t.Fatal(err)
		}
		id := schema.IDOf([]byte(key))
		all := row.Mirrors
		for _, c := range row.Caches {
			all = append(all, []schema.DataFile{c.File})
			var use schema.CacheUse
			if raw := caches[string(schema.CacheKey(c.File.Device, id))]; raw == nil || schema.Decode(raw, &use) != nil || use != c.Use() {
				w.t.Errorf("the row of a cache of %d: %+v, want %+v", id, use, c.Use())
			}
			delete(caches, string(schema.CacheKey(c.File.Device, id)))
		}
		for _, files := range all {
			for _, f := range files {
				if f.IsAbsent() {
					continue
				}
				n := name{f.Device, f.Number}
				if other, taken := owner[n]; taken {
					w.t.Errorf("data file %v is in the layouts of %d and %d", n, other, id)
				}
				owner[n] = id
				inUse[f.Device]++
			}
		}
	}
	if len(caches) > 0 {
		w.t.Errorf("%d rows of caches that there are not", len(caches))
	}
	if w.rows(schema.PrefixInUse)[string(schema.InUseKey(layout.DeviceID{}))] != nil {
		w.t.Error("copies that are absent are counted")
	}
	garbage := w.rows(schema.PrefixGarbage)
	if garbage[string(schema.GarbageKey(layout.DeviceID{}, 0))] != nil {
		w.t.Error("copies that are absent are garbage")
	}
	for i := range w.exports {
		d := w.device(i)
		if len(d.pool) != len(d.held) {
			w.t.Errorf("export %d: %d data files in the pool, %d numbers held", i, len(d.pool), len(d.held))
		}
		files := dataFiles(w.exports[i])
		for number, attr := range files {
			n := name{d.id, number}
			_, owned := owner[n]
			_, held := d.held[number]
			_, row := garbage[string(schema.GarbageKey(d.id, number))]
			if owned == held || held != row {
				w.t.Errorf("export %d, data file %x: in a layout %v, in the pool %v, garbage row %v", i, number, owned, held, row)
			}
			if attr.Mode != 0o640 || attr.UID < firstID || attr.UID >= lastID || attr.GID < firstID {
				w.t.Errorf("export %d, data file %x: mode %o, uid %d, gid %d", i, number, attr.Mode, attr.UID, attr.GID)
			}
		}
		for n, id := range owner {
			if _, ok := files[n.number]; n.device == d.id && !ok {
				w.t.Errorf("export %d, data file %x of inode %d is missing", i, n.number, id)
			}
		}
		raw, err := w.engine.Get(w.t.Context(), schema.InUseKey(d.id))
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			w.t.Fatal(err)
		}
		counters, err := catalog.DecodeCounters(raw)
		if err != nil || counters.Field(0) != inUse[d.id] {
			w.t.Errorf("export %d: counter says %v data files (%v), %d are in layouts", i, counters, err, inUse[d.id])
		}
	}
	if n := w.m.GarbageCount(w.t.Context()); n != 0 {
		w.t.Errorf("%d pieces of garbage are left", n)
	}
}

// calm waits until all pools are full and all garbage is gone, in the time of a synctest bubble. It does not end on a full minute after
// what was before: then a full device is asked again, whose answer leaves garbage for a moment.
func calm() { time.Sleep(5*time.Minute + 17*time.Second) }
