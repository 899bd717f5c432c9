package fsck

import (
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

const (
	unit = 1 << 20

	uncounted = 3 // a format without usage, of volumes in which that is not what a test is about
)

var (
	volume  = [16]byte{0xab, 1}
	session = metarpc.SessionID{7}
	silent  = slog.New(slog.DiscardHandler)
)

// The inodes of the tree.
const (
	dirA    layout.FileID = 10 + iota // /a
	small                             // /a/small, one data file
	wide                              // /a/wide, a data file on each device
	dirB                              // /b
	dirC                              // /b/c
	symlink                           // /b/c/link
	linked                            // /twice and /b/c/twice
	empty                             // /a/empty, without data files, with an extended attribute
	mirror                            // /mirror, two mirrors
	ghost                             // no name, marked
	written                           // /written, whose writer has not reported the size
	cut                               // /cut, with a truncation under way
	end
)

// tree is a volume with a bit of everything, nothing of it damaged.
type tree struct {
	t       *testing.T
	engine  *memorytest.Engine
	net     *storetest.Net
	exports []*storetest.Export
	m       *datafile.Manager
}

// newTree builds the volume and closes the Manager again.
func newTree(t *testing.T) *tree {
	w := &tree{t: t, engine: memorytest.New(), net: storetest.New()}
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: schema.Format, ID: volume}))
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(end)))
	root := schema.Inode{Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID}
	b.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
	b.Add(schema.FilesKey(0), 0, 1)
	b.Put(schema.SessionKey(session), schema.Encode(&schema.Session{}))
	b.Put(schema.ReplyKey(session, 0), schema.Encode(&schema.Reply{Sequence: 1}))
	w.commit(&b)

	w.start()
	for i := range 3 {
		e := w.net.Export(fmt.Sprintf("10.0.0.%d:2049", i+1), "/export")
		w.exports = append(w.exports, e)
		if _, err := w.m.AddDevice(t.Context(), e.URL(), false); err != nil {
			t.Fatal(err)
		}
	}
	w.add(dirA, layout.RootID, "a", syscall.S_IFDIR)
	w.add(small, dirA, "small", syscall.S_IFREG)
	w.add(wide, dirA, "wide", syscall.S_IFREG)
	w.add(dirB, layout.RootID, "b", syscall.S_IFDIR)
	w.add(dirC, dirB, "c", syscall.S_IFDIR)
	w.add(symlink, dirC, "link", syscall.S_IFLNK)
	w.add(linked, layout.RootID, "twice", syscall.S_IFREG)
	w.add(empty, dirA, "empty", syscall.S_IFREG)
	w.add(mirror, layout.RootID, "mirror", syscall.S_IFREG)
	w.add(written, layout.RootID, "written", syscall.S_IFREG)
	w.add(cut, layout.RootID, "cut", syscall.S_IFREG)
	w.write(small, 1, 100, 100)
	w.write(wide, 1, 10*unit, 10*unit)
	w.write(linked, 1, 5, 5)
	w.write(mirror, 2, 3*unit, 3*unit)
	w.write(written, 1, 5*unit, 10)
	w.write(cut, 1, 5*unit, 10)

	b.Reset()
	w.entry(&b, linked, dirC, "twice", syscall.S_IFREG)
	w.change(&b, linked, func(row *schema.Inode) { row.Nlink = 2 })
	w.change(&b, empty, func(row *schema.Inode) { row.Xattrs, row.Flags = 1, metarpc.AttrXattrs })
	b.Put(schema.XattrKey(empty, "user.x"), []byte("y"))
	b.Put(schema.WriterKey(written, session), nil)
	b.Put(schema.TruncateKey(cut), schema.Encode(&schema.Truncate{Size: 10}))
	gone := schema.Inode{Mode: syscall.S_IFREG}
	b.Put(schema.InodeKey(ghost), schema.Encode(&gone))
	b.Put(schema.OrphanKey(ghost), nil)
	b.Add(schema.FilesKey(0), 0, 1)
	w.commit(&b)
	w.countUsage()
	time.Sleep(time.Second) // the pools are full
	w.stop()
	return w
}

// countUsage puts the rows of usage of the tree: everything is told, but what /b/c has.
func (w *tree) countUsage() {
	w.t.Helper()
	var b catalog.Batch
	charge := func(id, home layout.FileID) {
		size := w.inode(id).Size
		w.change(&b, id, func(row *schema.Inode) { row.Parent = home })
		b.Add(schema.CountersKey(home), schema.CounterBytes, size)
		b.Add(schema.CountersKey(home), schema.CounterFiles, 1)
	}
	tell := func(dir, above layout.FileID, bytes, files, dirs int64) {
		b.Put(schema.ToldKey(dir), catalog.EncodeCounters(bytes, files, dirs))
		b.Add(schema.CountersKey(above), schema.CounterSubBytes, bytes)
		b.Add(schema.CountersKey(above), schema.CounterSubFiles, files)
		b.Add(schema.CountersKey(above), schema.CounterSubDirs, dirs)
	}
	for _, id := range []layout.FileID{small, wide, empty} {
		charge(id, dirA)
	}
	for _, id := range []layout.FileID{linked, mirror, written, cut} {
		charge(id, layout.RootID)
	}
	charge(symlink, dirC)
	tell(dirA, layout.RootID, 100+10*unit, 3, 0)
	tell(dirC, dirB, 77, 0, 0)
	b.Add(schema.DirtyKey(dirC), 0, 3)
	tell(dirB, layout.RootID, 77, 0, 1)
	b.Add(schema.OwnerKey(0, 0, 0), schema.OwnerFiles, 13)
	b.Add(schema.OwnerKey(0, 0, 0), schema.OwnerBytes, 100+10*unit+5+3*unit+10+10)
	w.commit(&b)
}

func (w *tree) start() {
	w.t.Helper()
	m, err := datafile.New(datafile.Config{Engine: w.engine, Volume: volume, Dial: w.net.Dial, PoolSize: 2, Log: silent})
	if err != nil {
		w.t.Fatal(err)
	}
	w.m = m
}

func (w *tree) stop() {
	w.t.Helper()
	if err := w.m.Close(); err != nil {
		w.t.Fatal(err)
	}
}

// settle runs the Manager long enough to collect all garbage, in the time of a synctest bubble.
func (w *tree) settle() {
	w.t.Helper()
	w.start()
	time.Sleep(5 * time.Minute)
	if n := w.m.GarbageCount(w.t.Context()); n != 0 {
		w.t.Errorf("%d pieces of garbage are left", n)
	}
	w.stop()
}

func (w *tree) commit(b *catalog.Batch) {
	w.t.Helper()
	if err := w.engine.Commit(context.Background(), b); err != nil {
		w.t.Fatal(err)
	}
}

// do commits what f puts into a batch.
func (w *tree) do(f func(b *catalog.Batch)) {
	w.t.Helper()
	var b catalog.Batch
	f(&b)
	w.commit(&b)
}

func (w *tree) entry(b *catalog.Batch, id, dir layout.FileID, name string, kind uint32) {
	b.Put(schema.EntryKey(dir, name), schema.Encode(&schema.Entry{ID: id, Type: kind}))
	b.Add(schema.CountersKey(dir), schema.CounterEntries, 1)
	if kind == syscall.S_IFDIR {
		b.Add(schema.CountersKey(dir), schema.CounterSubdirs, 1)
	}
}

func (w *tree) add(id, dir layout.FileID, name string, kind uint32) {
	w.t.Helper()
	row := schema.Inode{Mode: kind | 0o755, Nlink: 1}
	if kind == syscall.S_IFDIR {
		row.Parent = dir
	}
	w.do(func(b *catalog.Batch) {
		b.Put(schema.InodeKey(id), schema.Encode(&row))
		b.Add(schema.FilesKey(0), 0, 1)
		w.entry(b, id, dir, name, kind)
	})
}

func (w *tree) inode(id layout.FileID) (row schema.Inode) {
	w.t.Helper()
	w.row(schema.InodeKey(id), &row)
	return row
}

func (w *tree) layout(id layout.FileID) (row schema.Layout) {
	w.t.Helper()
	w.row(schema.LayoutKey(id), &row)
	return row
}

func (w *tree) row(key []byte, row any) {
	w.t.Helper()
	raw, err := w.engine.Get(w.t.Context(), key)
	if err != nil {
		w.t.Fatalf("row %q: %v", key, err)
	}
	if err := schema.Decode(raw, row); err != nil {
		w.t.Fatal(err)
	}
}

func (w *tree) has(key []byte) bool {
	_, err := w.engine.Get(w.t.Context(), key)
	return err == nil
}

func (w *tree) change(b *catalog.Batch, id layout.FileID, f func(*schema.Inode)) {
	w.t.Helper()
	row := w.inode(id)
	f(&row)
	b.Put(schema.InodeKey(id), schema.Encode(&row))
}

func (w *tree) changeLayout(b *catalog.Batch, id layout.FileID, f func(*schema.Layout)) {
	w.t.Helper()
	row := w.layout(id)
	f(&row)
	b.Put(schema.LayoutKey(id), schema.Encode(&row))
}

// write assigns data files for the first length bytes, makes them as long as clients would, and sets the file's size.
func (w *tree) write(id layout.FileID, mirrors int, length, size int64) {
	w.t.Helper()
	ino := w.inode(id)
	ino.Policy = schema.PolicyOf(layout.Policy{StripeUnit: unit, StripeCount: 3, Mirrors: mirrors})
	row, err := w.m.Assign(w.t.Context(), id, ino, 0, length, session, false, nil, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, files := range row.Mirrors {
		for i := range files {
			_, server := w.at(&files[i])
			err := server.SetAttr(w.t.Context(), files[i].Handle, nfs3.Sattr{SetSize: true, Size: uint64(length)}, nil)
			if err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.do(func(b *catalog.Batch) {
		b.Delete(schema.WriterKey(id, session))
		w.change(b, id, func(row *schema.Inode) { row.Size, row.Policy = size, ino.Policy })
	})
}

// at returns the store and server that a data file is on.
func (w *tree) at(file *schema.DataFile) (*store.Store, store.Server) {
	w.t.Helper()
	var row schema.Device
	w.row(schema.DeviceKey(file.Device), &row)
	addrs, err := store.Resolve(w.t.Context(), row.Host, row.Port)
	if err != nil {
		w.t.Fatal(err)
	}
	server, err := w.net.Dial("test", addrs, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	st, err := store.Open(w.t.Context(), server, row.Export, volume)
	if err != nil {
		w.t.Fatal(err)
	}
	return st, server
}

// cache gives a file a cache.
func (w *tree) cache(id layout.FileID) schema.Cache {
	w.t.Helper()
	w.start()
	defer w.stop()
	time.Sleep(time.Second)
	dev := w.m.Devices(w.t.Context())[0].Device.ID
	cache, ok, err := w.m.StartCache(w.t.Context(), id, dev, w.inode(id).Size, session)
	if err == nil && ok {
		ok, err = w.m.EndCache(w.t.Context(), id, cache.Ref(), session)
	}
	if err != nil || !ok {
		w.t.Fatal(ok, err)
	}
	return w.layout(id).Caches[0]
}

func (w *tree) noCache(id layout.FileID) {
	w.t.Helper()
	if caches := w.layout(id).Caches; len(caches) > 0 {
		w.t.Errorf("caches of inode %d: %+v", id, caches)
	}
}

// first returns the first data file of an inode, and where it is.
func (w *tree) first(id layout.FileID) (schema.DataFile, *store.Store, store.Server) {
	w.t.Helper()
	file := w.layout(id).Mirrors[0][0]
	st, server := w.at(&file)
	return file, st, server
}

func (w *tree) check(repair bool) *Report {
	w.t.Helper()
	report, err := Check(w.t.Context(), Config{Engine: w.engine, Dial: w.net.Dial, Repair: repair, Log: silent})
	if err != nil {
		w.t.Fatal(err)
	}
	return report
}
