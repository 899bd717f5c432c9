package fsck

import (
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

func TestClean(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		r := w.check(false)
		if !r.Clean() || r.Unrepaired() != 0 {
			t.Fatalf("problems in a clean tree: %v", r.Problems)
		}
		if r.Inodes != 13 || r.Directories != 4 || r.Entries != 12 || r.DataFiles != 3+1+1+3+3+6 {
			t.Errorf("%+v", r)
		}
		if r.Orphans != 1 || r.Writers != 1 || r.Truncations != 1 || r.Garbage == 0 {
			t.Errorf("pending: %+v", r)
		}
		before := w.dump()
		if r := w.check(true); !r.Clean() {
			t.Errorf("repair of a clean tree: %v", r.Problems)
		}
		if !maps.Equal(before, w.dump()) {
			t.Error("a repair of a clean tree changed it")
		}
		w.settle()
		if r := w.check(false); !r.Clean() || r.Garbage > 6 {
			t.Errorf("later: %+v", r)
		}
	})
}

// TestProgress is told of all phases in their order, and of more and more rows.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		var phases []string
		var last Progress
		_, err := Check(t.Context(), Config{Engine: w.engine, Dial: w.net.Dial, Log: silent, Progress: func(p Progress) {
			if len(phases) == 0 || p.Phase != phases[len(phases)-1] {
				phases = append(phases, p.Phase)
			}
			if p.Rows < last.Rows || p.Share() < 0 || p.Share() >= 1 {
				t.Errorf("%+v after %+v", p, last)
			}
			last = p
		}})
		if err != nil {
			t.Fatal(err)
		}
		if len(phases) < 15 || phases[0] != "data servers" || phases[len(phases)-1] != "paths" {
			t.Errorf("phases %q", phases)
		}
		if last.Files != 13 || last.Rows < 13+12+13 || last.Share() < 0.5 {
			t.Errorf("at the end: %+v", last)
		}
	})
}

func (w *tree) dump() map[string]string {
	w.t.Helper()
	rows := map[string]string{}
	for kv, err := range w.engine.Scan(w.t.Context(), nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			w.t.Fatal(err)
		}
		rows[string(kv.Key)] = string(kv.Value)
	}
	return rows
}

// damage is one kind of damage, what is to be found, and what is to be so after the repair.
type damage struct {
	name   string
	do     func(w *tree)
	want   map[Kind]int64
	path   string // of one of the problems
	lost   bool   // bytes are gone
	left   bool   // there is no repair
	alone  bool   // takes away what other kinds of damage need
	repair func(w *tree)
}

var damages = []damage{
	{
		name: "orphan data file",
		do: func(w *tree) {
			file, st, _ := w.first(small)
			w.do(func(b *catalog.Batch) {
				var row schema.Device
				w.row(schema.DeviceKey(file.Device), &row)
				row.Next += 100
				b.Put(schema.DeviceKey(file.Device), schema.Encode(&row))
			})
			var row schema.Device
			w.row(schema.DeviceKey(file.Device), &row)
			if _, err := st.Create(w.t.Context(), row.Next-1, layout.Credential{UID: 1 << 20, GID: 1 << 20}); err != nil {
				w.t.Fatal(err)
			}
		},
		want: map[Kind]int64{OrphanDataFile: 1},
	},
	{
		name: "orphan data file with a number that was never taken",
		do: func(w *tree) {
			_, st, _ := w.first(small)
			if _, err := st.Create(w.t.Context(), 1<<40, layout.Credential{UID: 1 << 20, GID: 1 << 20}); err != nil {
				w.t.Fatal(err)
			}
		},
		want: map[Kind]int64{OrphanDataFile: 1, NextNumber: 1},
	},
	{
		name: "missing data file", alone: true,
		do: func(w *tree) {
			file, st, _ := w.first(small)
			if found, err := st.Remove(w.t.Context(), file.Number); err != nil || !found {
				w.t.Fatal(found, err)
			}
		},
		want: map[Kind]int64{Missing: 1},
		path: "/a/small",
		lost: true,
		repair: func(w *tree) {
			file, _, server := w.first(small)
			if attr, err := server.GetAttr(w.t.Context(), file.Handle); err != nil || attr.UID != file.UID {
				w.t.Errorf("data file made again: %+v, %v", attr, err)
			}
		},
	},
	{
		name: "missing data files of several columns",
		do: func(w *tree) {
			for _, file := range w.layout(wide).Mirrors[0][:2] {
				st, _ := w.at(&file)
				if found, err := st.Remove(w.t.Context(), file.Number); err != nil || !found {
					w.t.Fatal(found, err)
				}
			}
		},
		want: map[Kind]int64{Missing: 2},
		path: "/a/wide",
		lost: true,
	},
	{
		name: "data beyond the size",
		do: func(w *tree) {
			file, _, server := w.first(mirror)
			if err := server.SetAttr(w.t.Context(), file.Handle, nfs3.Sattr{SetSize: true, Size: 7 * unit}, nil); err != nil {
				w.t.Fatal(err)
			}
		},
		want: map[Kind]int64{BeyondSize: 1},
		path: "/mirror",
		repair: func(w *tree) {
			if size := w.inode(mirror).Size; size != 7*unit {
				w.t.Errorf("size %d", size)
			}
		},
	},
	{
		name: "writer without a session",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.WriterKey(written, session))
				b.Put(schema.WriterKey(written, metarpc.SessionID{9}), nil)
			})
		},
		want: map[Kind]int64{StrayRow: 1, BeyondSize: 1},
		path: "/written",
		repair: func(w *tree) {
			if size := w.inode(written).Size; size != 5*unit {
				w.t.Errorf("size %d", size)
			}
		},
	},
	{
		name: "dangling entry",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { w.entry(b, 999, dirC, "nothing", syscall.S_IFREG) }) },
		want: map[Kind]int64{DanglingEntry: 1},
		path: "/b/c/nothing",
	},
	{
		name: "dangling directory entry",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { w.entry(b, 999, dirC, "nothing", syscall.S_IFDIR) }) },
		want: map[Kind]int64{DanglingEntry: 1},
	},
	{
		name: "entry in a directory that does not exist",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.entry(b, small, 999, "small", syscall.S_IFREG)
				w.change(b, small, func(row *schema.Inode) { row.Nlink = 1 })
			})
		},
		want: map[Kind]int64{StrayEntry: 1, StrayRow: 1}, // the counters
		path: "?/small",
	},
	{
		name: "entry below a file",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.EntryKey(small, "x"), schema.Encode(&schema.Entry{ID: wide, Type: syscall.S_IFREG}))
			})
		},
		want: map[Kind]int64{StrayEntry: 1},
	},
	{
		name: "directory with two entries",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { w.entry(b, dirC, dirC, "self", syscall.S_IFDIR) }) },
		want: map[Kind]int64{SecondEntry: 1},
	},
	{
		name: "root with an entry",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { w.entry(b, layout.RootID, dirA, "up", syscall.S_IFDIR) }) },
		want: map[Kind]int64{SecondEntry: 1},
		path: "/a/up",
	},
	{
		name: "entry under a wrong cookie",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				key := schema.EntryKey(dirA, "small")
				b.Delete(key)
				wrong := append([]byte(nil), key...)
				wrong[12] ^= 1
				b.Put(wrong, schema.Encode(&schema.Entry{ID: small, Type: syscall.S_IFREG}))
			})
		},
		want: map[Kind]int64{MisplacedEntry: 1},
		path: "/a/small",
		repair: func(w *tree) {
			if !w.has(schema.EntryKey(dirA, "small")) {
				w.t.Error("the entry is not where it belongs")
			}
		},
	},
	{
		name: "entry under a wrong cookie whose place is taken",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				wrong := schema.EntryKey(dirA, "small")
				wrong[9] = 0x7f
				wrong[10] = 0xff
				b.Put(wrong, schema.Encode(&schema.Entry{ID: wide, Type: syscall.S_IFREG}))
				b.Add(schema.CountersKey(dirA), schema.CounterEntries, 1)
				w.change(b, wide, func(row *schema.Inode) { row.Nlink = 2 })
			})
		},
		want: map[Kind]int64{MisplacedEntry: 1},
		repair: func(w *tree) {
			if !w.has(schema.EntryKey(dirA, "inode-12")) {
				w.t.Error("the entry is not there under another name")
			}
		},
	},
	{
		name: "entry of a wrong type",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.EntryKey(dirA, "small"), schema.Encode(&schema.Entry{ID: small, Type: syscall.S_IFDIR}))
			})
		},
		want: map[Kind]int64{EntryType: 1},
		path: "/a/small",
	},
	{
		name: "wrong parent",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { w.change(b, dirC, func(row *schema.Inode) { row.Parent = dirA }) })
		},
		want: map[Kind]int64{Parent: 1},
		path: "/b/c",
		repair: func(w *tree) {
			if p := w.inode(dirC).Parent; p != dirB {
				w.t.Errorf("parent %d", p)
			}
		},
	},
	{
		name: "file without an entry",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.EntryKey(dirA, "small"))
				b.Add(schema.CountersKey(dirA), schema.CounterEntries, -1)
			})
		},
		want: map[Kind]int64{Unlinked: 1},
		repair: func(w *tree) {
			var e schema.Entry
			w.row(schema.EntryKey(layout.RootID, "lost+found"), &e)
			w.row(schema.EntryKey(e.ID, "inode-11"), &e)
			if e.ID != small || e.Type != syscall.S_IFREG {
				w.t.Errorf("entry in lost+found: %+v", e)
			}
			if w.inode(small).Size != 100 {
				w.t.Error("the file lost its size")
			}
		},
	},
	{
		name: "directory without an entry, and a file called lost+found",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.EntryKey(layout.RootID, "b"))
				b.Add(schema.CountersKey(layout.RootID), schema.CounterEntries, -1)
				b.Add(schema.CountersKey(layout.RootID), schema.CounterSubdirs, -1)
				w.entry(b, small, layout.RootID, "lost+found", syscall.S_IFREG)
				w.change(b, small, func(row *schema.Inode) { row.Nlink = 2 })
			})
		},
		want: map[Kind]int64{Unlinked: 1},
		repair: func(w *tree) {
			var e schema.Entry
			w.row(schema.EntryKey(layout.RootID, "lost+found.1"), &e)
			if p := w.inode(dirB).Parent; p != e.ID {
				w.t.Errorf("parent %d, lost+found is %d", p, e.ID)
			}
		},
	},
	{
		name: "a loop of directories",
		do: func(w *tree) { // /b moves into /b/c
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.EntryKey(layout.RootID, "b"))
				b.Add(schema.CountersKey(layout.RootID), schema.CounterEntries, -1)
				b.Add(schema.CountersKey(layout.RootID), schema.CounterSubdirs, -1)
				w.entry(b, dirB, dirC, "b", syscall.S_IFDIR)
				w.change(b, dirB, func(row *schema.Inode) { row.Parent = dirC })
			})
		},
		want: map[Kind]int64{Loop: 1},
		path: "?/",
	},
	{
		name: "wrong link count",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { w.change(b, linked, func(row *schema.Inode) { row.Nlink = 1 }) })
		},
		want: map[Kind]int64{LinkCount: 1},
		path: "twice",
	},
	{
		name: "wrong directory counters",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Add(schema.CountersKey(dirA), schema.CounterEntries, 5)
				b.Add(schema.CountersKey(dirB), schema.CounterSubdirs, -5)
			})
		},
		want: map[Kind]int64{DirCounters: 2},
		path: "/a",
	},
	{
		name: "no directory counters",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { b.Delete(schema.CountersKey(dirC)) }) },
		want: map[Kind]int64{DirCounters: 1},
		path: "/b/c",
	},
	{
		name: "what a directory has", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Add(schema.CountersKey(dirA), schema.CounterBytes, -7)
				b.Add(schema.CountersKey(layout.RootID), schema.CounterFiles, 1)
			})
		},
		want: map[Kind]int64{DirUsage: 2},
		path: "/a",
	},
	{
		name: "what a directory was told", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { b.Add(schema.CountersKey(layout.RootID), schema.CounterSubDirs, 1) })
		},
		want: map[Kind]int64{DirUsage: 1},
	},
	{
		name: "what a directory has told is forgotten", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { b.Delete(schema.ToldKey(dirB)) })
		},
		want: map[Kind]int64{DirUsage: 1, Told: 1},
		path: "/b",
	},
	{
		name: "a directory does not know that it has something to tell", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { b.Delete(schema.DirtyKey(dirC)) })
		},
		want: map[Kind]int64{Told: 1},
		path: "/b/c",
		repair: func(w *tree) {
			if !w.has(schema.DirtyKey(dirC)) {
				w.t.Error("it does not know yet")
			}
		},
	},
	{
		name: "what owners have", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Add(schema.OwnerKey(0, 0, 0), schema.OwnerFiles, -1)
				b.Add(schema.OwnerKey(7, 0, 0), schema.OwnerBytes, 5)
			})
		},
		want: map[Kind]int64{OwnerUsage: 2},
	},
	{
		name: "what a shard has counted of owners", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { // the sums stay as they are, but for one
				b.Add(schema.OwnerKey(0, 0, 0), schema.OwnerFiles, -2)
				b.Add(schema.OwnerKey(0, 0, 3), schema.OwnerFiles, 2)
				b.Add(schema.FilesKey(0), 0, -2)
				b.Add(schema.FilesKey(3), 0, 2)
				b.Add(schema.OwnerKey(9, 0, 3), schema.OwnerFiles, 1)
			})
		},
		want: map[Kind]int64{OwnerUsage: 1},
	},
	{
		name: "an owner is forgotten", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) { b.Delete(schema.OwnerKey(0, 0, 0)) })
		},
		want: map[Kind]int64{OwnerUsage: 1},
	},
	{
		name: "a file is charged to where it has no name", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.change(b, small, func(row *schema.Inode) { row.Parent = dirB })
				w.change(b, ghost, func(row *schema.Inode) { row.Parent = 999 })
			})
		},
		want: map[Kind]int64{Home: 2},
		path: "/a/small",
		repair: func(w *tree) {
			if row := w.inode(small); row.Parent != 0 {
				w.t.Errorf("home %d", row.Parent)
			}
		},
	},
	{
		name: "usage of directories that are gone", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.QuotaKey(metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: 999}), schema.Encode(&schema.Quota{Bytes: 1}))
				b.Put(schema.QuotaKey(metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: uint64(dirA)}), schema.Encode(&schema.Quota{Bytes: 1}))
				b.Put(schema.QuotaKey(metarpc.QuotaName{Kind: metarpc.QuotaUser, ID: 999}), schema.Encode(&schema.Quota{Files: 1}))
				b.Put(schema.ToldKey(small), catalog.EncodeCounters(1))
				b.Put(schema.DirtyKey(999), catalog.EncodeCounters(1))
			})
		},
		want: map[Kind]int64{StrayRow: 3},
	},
	{
		name: "wrong usage counter",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { b.Add(schema.FilesKey(0), 0, -3) }) },
		want: map[Kind]int64{Usage: 1},
	},
	{
		name: "wrong next inode",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { b.Put(schema.KeyNextInode, catalog.EncodeCounters(12)) }) },
		want: map[Kind]int64{NextInode: 1},
	},
	{
		name: "missing root",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.InodeKey(layout.RootID))
				b.Add(schema.FilesKey(0), 0, -1)
			})
		},
		// Without a repair everything in it hangs in the air.
		want: map[Kind]int64{MissingRoot: 1, StrayEntry: 6, StrayRow: 1, Unlinked: 5, LinkCount: 1},
	},
	{
		name: "marked as nameless, but with a name",
		do:   func(w *tree) { w.do(func(b *catalog.Batch) { b.Put(schema.OrphanKey(small), nil) }) },
		want: map[Kind]int64{LinkedOrphan: 1},
		path: "/a/small",
	},
	{
		name: "rows without an inode",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.XattrKey(999, "user.x"), []byte("y"))
				b.Put(schema.CountersKey(999), catalog.EncodeCounters(1))
				b.Put(schema.OrphanKey(999), nil)
				b.Put(schema.TruncateKey(999), schema.Encode(&schema.Truncate{}))
				b.Put(schema.WriterKey(999, session), nil)
				b.Put(schema.ReplyKey(metarpc.SessionID{9}, 3), schema.Encode(&schema.Reply{}))
				b.Put(schema.GarbageKey(layout.DeviceID{9}, 1), nil)
			})
		},
		want: map[Kind]int64{StrayRow: 7},
	},
	{
		name: "layout without an inode", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.InodeKey(wide))
				b.Delete(schema.EntryKey(dirA, "wide"))
				b.Add(schema.CountersKey(dirA), schema.CounterEntries, -1)
				b.Add(schema.FilesKey(0), 0, -1)
			})
		},
		want: map[Kind]int64{StrayRow: 1},
	},
	{
		name: "layout without an inode whose data file another file has",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				row := w.layout(small)
				b.Put(schema.LayoutKey(999), schema.Encode(&row))
				b.Add(schema.InUseKey(row.Mirrors[0][0].Device), 0, 1)
			})
		},
		want: map[Kind]int64{StrayRow: 1},
		repair: func(w *tree) {
			if file, _, server := w.first(small); true {
				if _, err := server.GetAttr(w.t.Context(), file.Handle); err != nil {
					w.t.Error(err)
				}
			}
		},
	},
	{
		name: "lost cache", alone: true,
		do: func(w *tree) {
			cache := w.cache(small)
			st, _ := w.at(&cache.File)
			if _, err := st.Remove(w.t.Context(), cache.File.Number); err != nil {
				w.t.Fatal(err)
			}
		},
		want:   map[Kind]int64{LostCache: 1},
		path:   "/a/small",
		repair: func(w *tree) { w.noCache(small) },
	},
	{
		name: "cache with the data file of another file", alone: true,
		do: func(w *tree) {
			cache := w.cache(small)
			file := w.layout(wide).Mirrors[0][0]
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, small, func(row *schema.Layout) { row.Caches[0].File = file })
				use := cache.Use()
				if file.Device != cache.File.Device {
					b.Delete(schema.CacheKey(cache.File.Device, small))
				}
				b.Put(schema.CacheKey(file.Device, small), schema.Encode(&use))
				b.Add(schema.InUseKey(cache.File.Device), 0, -1)
				b.Add(schema.InUseKey(file.Device), 0, 1)
				b.Put(schema.GarbageKey(cache.File.Device, cache.File.Number), nil)
			})
		},
		repair: func(w *tree) {
			file, _, server := w.first(wide)
			if _, err := server.GetAttr(w.t.Context(), file.Handle); err != nil {
				w.t.Error(err)
			}
		},
	},
	{
		name: "cache on a device that is not known", alone: true,
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, small, func(row *schema.Layout) {
					row.Caches = append(row.Caches, schema.Cache{File: schema.DataFile{Device: layout.DeviceID{9}, Number: 1, Handle: []byte{1}}})
				})
			})
		},
		want:   map[Kind]int64{LostCache: 1},
		repair: func(w *tree) { w.noCache(small) },
	},
	{
		name: "wrong rows of caches", alone: true,
		do: func(w *tree) {
			cache := w.cache(small)
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.CacheKey(cache.File.Device, small))
				b.Put(schema.CacheKey(cache.File.Device, wide), schema.Encode(&schema.CacheUse{}))
			})
		},
		want: map[Kind]int64{CacheRow: 2},
	},
	{
		name: "wrong number of extended attributes",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.XattrKey(empty, "user.z"), nil)
				b.Delete(schema.XattrKey(empty, "user.x"))
				b.Put(schema.XattrKey(small, "user.x"), nil)
			})
		},
		want: map[Kind]int64{XattrCount: 1, XattrFlags: 1},
		path: "/a/small",
	},
	{
		name: "an attribute that the inode does not tell of",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.XattrKey(empty, schema.XattrCapability), []byte("c"))
				w.change(b, empty, func(row *schema.Inode) { row.Xattrs++ })
			})
		},
		want: map[Kind]int64{XattrFlags: 1},
	},
	{
		name: "bad access control list",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.XattrKey(empty, schema.XattrACL), []byte("no list"))
				w.change(b, empty, func(row *schema.Inode) {
					row.Xattrs++
					row.Flags |= metarpc.AttrACL
				})
			})
		},
		want: map[Kind]int64{BadACL: 1},
	},
	{
		name: "garbage that a layout has",
		do: func(w *tree) {
			file, _, _ := w.first(small)
			w.do(func(b *catalog.Batch) { b.Put(schema.GarbageKey(file.Device, file.Number), nil) })
		},
		want: map[Kind]int64{GarbageInUse: 1},
		path: "/a/small",
		repair: func(w *tree) {
			file, _, server := w.first(small)
			if attr, err := server.GetAttr(w.t.Context(), file.Handle); err != nil || attr.Size != 100 {
				w.t.Errorf("the data file: %+v, %v", attr, err)
			}
		},
	},
	{
		name: "data file of two files",
		do: func(w *tree) { // linked takes small's data file, so its own is an orphan
			row := w.layout(small)
			was, _, _ := w.first(linked)
			w.do(func(b *catalog.Batch) {
				b.Put(schema.LayoutKey(linked), schema.Encode(&row))
				b.Put(schema.GarbageKey(was.Device, was.Number), nil)
				b.Add(schema.InUseKey(was.Device), 0, -1)
				b.Add(schema.InUseKey(row.Mirrors[0][0].Device), 0, 1)
			})
		},
		want: map[Kind]int64{SharedDataFile: 1},
		path: "twice",
		lost: true,
		repair: func(w *tree) {
			a, b := w.layout(small).Mirrors[0][0], w.layout(linked).Mirrors[0][0]
			if a.Number == b.Number {
				w.t.Error("they still share it")
			}
			_, server := w.at(&a)
			if attr, err := server.GetAttr(w.t.Context(), a.Handle); err != nil || attr.Size != 100 {
				w.t.Errorf("the data file: %+v, %v", attr, err)
			}
		},
	},
	{
		name: "number that was never taken",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				file, _, _ := w.first(small)
				var row schema.Device
				w.row(schema.DeviceKey(file.Device), &row)
				row.Next = 0
				b.Put(schema.DeviceKey(file.Device), schema.Encode(&row))
			})
		},
		want: nil, // as many as there are numbers in ascending order: looked at below
	},
	{
		name: "wrong count of data files",
		do: func(w *tree) {
			file, _, _ := w.first(small)
			w.do(func(b *catalog.Batch) { b.Add(schema.InUseKey(file.Device), 0, 2) })
		},
		want: map[Kind]int64{InUse: 1},
	},
	{
		name: "data file of a wrong owner", alone: true,
		do: func(w *tree) {
			file, _, server := w.first(small)
			if err := server.SetAttr(w.t.Context(), file.Handle, nfs3.Sattr{SetUID: true, UID: 1}, nil); err != nil {
				w.t.Fatal(err)
			}
		},
		want: map[Kind]int64{Owner: 1},
		path: "/a/small",
	},
	{
		name: "handle of another file",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, wide, func(row *schema.Layout) { row.Mirrors[0][0].Handle = []byte("0123456789abcdef") })
				w.changeLayout(b, mirror, func(row *schema.Layout) { row.Mirrors[0][0].Handle = row.Mirrors[1][1].Handle })
			})
		},
		want: map[Kind]int64{StaleHandle: 2},
		path: "/mirror",
	},
	{
		name: "unknown device in a layout",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.LayoutKey(empty), schema.Encode(&schema.Layout{
					StripeUnit: unit, Width: 1, Mirrors: [][]schema.DataFile{{{Device: layout.DeviceID{9}}}},
				}))
			})
		},
		want: map[Kind]int64{BadLayout: 1},
		path: "/a/empty",
		left: true,
	},
	{
		name: "uneven mirrors",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.LayoutKey(empty), schema.Encode(&schema.Layout{
					StripeUnit: unit, Width: 2, Mirrors: [][]schema.DataFile{{{}}, {{}, {}}},
				}))
			})
		},
		want: map[Kind]int64{BadLayout: 1},
		left: true,
	},
	{
		name: "a copy that is to be made, without a fill row, in a format that has none",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, small, func(row *schema.Layout) {
					row.Mirrors = append(row.Mirrors, []schema.DataFile{schema.Absent()})
				})
			})
		},
		want: map[Kind]int64{FillRow: 1, Format: 1},
		repair: func(w *tree) {
			if r := w.check(false); r.Copies != 1 {
				w.t.Errorf("%d copies are to be made", r.Copies)
			}
		},
	},
	{
		name: "min_copies in a format that has none",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, small, func(row *schema.Layout) { row.MinCopies = 1 })
			})
		},
		want: map[Kind]int64{Format: 1},
	},
	{
		name: "a directory with min_copies in a format that has none",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				w.change(b, dirA, func(row *schema.Inode) { row.Policy.MinCopies = 2 })
			})
		},
		want: map[Kind]int64{Format: 1},
	},
	{
		name: "a good copy without a data file",
		do: func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Put(schema.LayoutKey(empty), schema.Encode(&schema.Layout{
					StripeUnit: unit, Width: 1, Mirrors: [][]schema.DataFile{{{}}},
				}))
			})
		},
		want: map[Kind]int64{BadLayout: 1},
		left: true,
	},
	{
		name: "foreign file",
		do: func(w *tree) {
			file, st, server := w.first(small)
			dir, name := schema.DataFileName(file.Number)
			volumeDir, _, err := server.Lookup(w.t.Context(), st.Root, schema.VolumeDir(volume))
			if err != nil {
				w.t.Fatal(err)
			}
			sub, _, err := server.Lookup(w.t.Context(), volumeDir, dir)
			if err != nil {
				w.t.Fatal(err)
			}
			if _, _, err := server.Create(w.t.Context(), sub, name+".bak", nfs3.Sattr{}); err != nil {
				w.t.Fatal(err)
			}
		},
		want: map[Kind]int64{ForeignFile: 1},
		left: true,
	},
}

func TestDamage(t *testing.T) {
	for _, d := range damages {
		t.Run(strings.ReplaceAll(d.name, " ", "-"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newTree(t)
				w.settle()
				d.do(w)
				before := w.dump()
				report := w.check(false)
				if d.want != nil && !maps.Equal(report.Counts, d.want) || report.Clean() {
					t.Errorf("found %v, want %v: %v", report.Counts, d.want, report.Problems)
				}
				if report.Repaired != 0 || !maps.Equal(before, w.dump()) {
					t.Error("a check changed something")
				}
				d.look(t, report)
				if _, err := json.Marshal(report); err != nil {
					t.Error(err)
				}

				repaired := w.check(true)
				if repaired.Clean() || repaired.Unrepaired() > 0 != d.left {
					t.Errorf("%d problems left: %v", repaired.Unrepaired(), repaired.Problems)
				}
				if again := w.check(false); !again.Clean() && !d.left {
					t.Errorf("after the repair: %v", again.Problems)
				}
				if d.repair != nil {
					d.repair(w)
				}
				w.settle()
				if again := w.check(false); !again.Clean() && !d.left {
					t.Errorf("after the service ran: %v", again.Problems)
				}
			})
		})
	}
}

// look looks for path and lost in the problems.
func (d *damage) look(t *testing.T, r *Report) {
	t.Helper()
	path, lost := d.path == "", false
	for _, p := range r.Problems {
		path = path || strings.Contains(string(p.Path), d.path)
		lost = lost || p.Lost || p.Kind == SharedDataFile
		if p.Repaired || p.String() == "" {
			t.Errorf("%+v", p)
		}
	}
	if !path {
		t.Errorf("no problem has a path with %q: %v", d.path, r.Problems)
	}
	if lost != d.lost {
		t.Errorf("lost %v, want %v: %v", lost, d.lost, r.Problems)
	}
}

// Several kinds of damage at once, in an order that depends on the seed: a repair leaves nothing of it.
func TestDamageTogether(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			w := newTree(t)
			w.settle()
			var names []string
			for _, i := range rng.Perm(len(damages)) {
				if d := &damages[i]; !d.left && !d.alone && len(names) < 5 {
					names = append(names, d.name)
					d.do(w)
				}
			}
			if r := w.check(true); r.Unrepaired() != 0 {
				t.Errorf("seed %d, %q: %v", seed, names, r.Problems)
			}
			if again := w.check(false); !again.Clean() {
				t.Errorf("seed %d, %q: %v", seed, names, again.Problems)
			}
			w.settle()
			if again := w.check(false); !again.Clean() {
				t.Errorf("seed %d, %q, after the service ran: %v", seed, names, again.Problems)
			}
		})
	}
}

func TestCouldNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		run := func(why string) {
			t.Helper()
			report, err := Check(t.Context(), Config{Engine: w.engine, Dial: w.net.Dial, Log: silent})
			if !errors.Is(err, ErrCouldNotRun) || report != nil || !strings.Contains(err.Error(), why) {
				t.Errorf("%v, %v; want %q", report, err, why)
			}
		}
		w.exports[1].SetDown(true)
		run(w.exports[1].URL())
		w.exports[1].SetDown(false)

		w.exports[0].Move("10.0.0.9:1")
		w.exports[1].Move("10.0.0.1:2049")
		run("it is device")
		w.exports[1].Move("10.0.0.2:2049")
		w.exports[0].Move("10.0.0.1:2049")
		if r := w.check(false); !r.Clean() {
			t.Errorf("%v", r.Problems)
		}
		w.do(func(b *catalog.Batch) { b.Put(schema.InodeKey(500), []byte{0xc1}) })
		run("corrupt")
	})
	if _, err := Check(t.Context(), Config{Engine: memorytest.New(), Log: silent}); !errors.Is(err, ErrCouldNotRun) {
		t.Errorf("empty catalog: %v", err)
	}
}
