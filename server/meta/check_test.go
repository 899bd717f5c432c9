package meta

import (
	"context"
	"slices"
	"syscall"
	"testing"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// checkCatalog tests that what belongs together in the catalog fits together.
func checkCatalog(t testing.TB, engine catalog.Engine) {
	t.Helper()
	ctx := context.Background()
	snap, err := engine.Snapshot(ctx) // the service tells directories' usage to their parents meanwhile
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	inodes := map[layout.FileID]schema.Inode{}
	counters := map[layout.FileID]catalog.Counters{}
	links := map[layout.FileID]uint32{}
	entries, subdirs := map[layout.FileID]int64{}, map[layout.FileID]int64{}
	orphans, layouts, xattrs := map[layout.FileID]bool{}, map[layout.FileID]bool{}, map[layout.FileID]int{}
	parents := map[layout.FileID]layout.FileID{}
	var inUse int64
	owners, told, dirty := map[string]usage.Sum{}, map[layout.FileID]usage.Sum{}, map[layout.FileID]bool{}
	for kv, err := range snap.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		var bad error
		switch kv.Key[0] {
		case schema.PrefixInode:
			var row schema.Inode
			bad = schema.Decode(kv.Value, &row)
			inodes[schema.IDOf(kv.Key)] = row
		case schema.PrefixCounters:
			counters[schema.IDOf(kv.Key)], bad = catalog.DecodeCounters(kv.Value)
		case schema.PrefixEntry:
			dir, cookie, name := schema.EntryOf(kv.Key)
			var row schema.Entry
			bad = schema.Decode(kv.Value, &row)
			if cookie != schema.Cookie(name) {
				t.Errorf("entry %q of %d has cookie %d", name, dir, cookie)
			}
			entries[dir]++
			links[row.ID]++
			if row.Type == syscall.S_IFDIR {
				subdirs[dir]++
				parents[row.ID] = dir
			}
		case schema.PrefixOrphan:
			orphans[schema.IDOf(kv.Key)] = true
		case schema.PrefixLayout:
			layouts[schema.IDOf(kv.Key)] = true
		case schema.PrefixXattr:
			xattrs[schema.IDOf(kv.Key)]++
		case schema.PrefixFiles:
			var c catalog.Counters
			c, bad = catalog.DecodeCounters(kv.Value)
			inUse += c.Field(0)
		case schema.PrefixOwner:
			var c catalog.Counters
			c, bad = catalog.DecodeCounters(kv.Value)
			uid, gid := schema.OwnerOf(kv.Key)
			key := string(schema.OwnerKey(uid, gid, 0))
			owners[key] = owners[key].Plus(usage.Sum{Bytes: c.Field(schema.OwnerBytes), Files: c.Field(schema.OwnerFiles)})
		case schema.PrefixTold:
			var c catalog.Counters
			c, bad = catalog.DecodeCounters(kv.Value)
			told[schema.IDOf(kv.Key)] = usage.Sum{Bytes: c.Field(schema.ToldBytes), Files: c.Field(schema.ToldFiles), Dirs: c.Field(schema.ToldDirs)}
		case schema.PrefixDirty:
			dirty[schema.IDOf(kv.Key)] = true
		}
		if bad != nil {
			t.Errorf("row %q: %v", kv.Key, bad)
		}
	}
	if inUse != int64(len(inodes)) {
		t.Errorf("usage says %d inodes, there are %d", inUse, len(inodes))
	}
	checkUsage(t, inodes, counters, owners, told, dirty)
	homes := map[layout.FileID]layout.FileID{}
	for kv := range snap.Scan(ctx, []byte{schema.PrefixEntry}, []byte{schema.PrefixEntry + 1}, catalog.ScanOptions{}) {
		var row schema.Entry
		if dir, _, _ := schema.EntryOf(kv.Key); schema.Decode(kv.Value, &row) == nil && inodes[row.ID].Parent == dir {
			homes[row.ID] = dir
		}
	}
	for id, row := range inodes {
		if id != layout.RootID && row.Parent != homes[id] {
			t.Errorf("inode %d has the home %d, where it has no name", id, row.Parent)
		}
	}
	for id, row := range inodes {
		if row.Xattrs != xattrs[id] {
			t.Errorf("inode %d says %d attributes, has %d", id, row.Xattrs, xattrs[id])
		}
		delete(xattrs, id)
		if row.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			if row.Nlink != links[id] || (row.Nlink == 0) != orphans[id] {
				t.Errorf("inode %d says %d links, has %d, orphan %t", id, row.Nlink, links[id], orphans[id])
			}
			delete(orphans, id)
			delete(layouts, id)
			continue
		}
		c := counters[id]
		if c.Field(schema.CounterEntries) != entries[id] || c.Field(schema.CounterSubdirs) != subdirs[id] {
			t.Errorf("directory %d counts %d entries, %d directories; has %d, %d", id,
				c.Field(schema.CounterEntries), c.Field(schema.CounterSubdirs), entries[id], subdirs[id])
		}
		delete(counters, id)
		if id == layout.RootID {
			continue
		}
		if links[id] != 1 || row.Parent != parents[id] {
			t.Errorf("directory %d has %d names, says parent %d, is in %d", id, links[id], row.Parent, parents[id])
		}
		seen := []layout.FileID{}
		for at := id; at != layout.RootID; at = parents[at] {
			if slices.Contains(seen, at) || parents[at] == 0 {
				t.Errorf("directory %d is not below the root: %v", id, seen)
				break
			}
			seen = append(seen, at)
		}
	}
	for id := range links {
		if _, ok := inodes[id]; !ok {
			t.Errorf("a name of inode %d, which does not exist", id)
		}
	}
	for what, n := range map[string]int{"counters": len(counters), "orphan": len(orphans), "layout": len(layouts), "attributes": len(xattrs)} {
		if n != 0 {
			t.Errorf("%d %s rows without an inode they belong to", n, what)
		}
	}
}

// checkUsage tests what directories and owners are charged with.
func checkUsage(t testing.TB, inodes map[layout.FileID]schema.Inode, counters map[layout.FileID]catalog.Counters,
	owners map[string]usage.Sum, told map[layout.FileID]usage.Sum, dirty map[layout.FileID]bool) {
	t.Helper()
	direct, sub, owned := map[layout.FileID]usage.Sum{}, map[layout.FileID]usage.Sum{}, map[string]usage.Sum{}
	for id, row := range inodes {
		key := string(schema.OwnerKey(row.UID, row.GID, 0))
		owned[key] = owned[key].Plus(usage.Sum{Bytes: row.ChargedBytes(), Files: 1})
		switch {
		case !isDir(row.Mode):
			direct[row.Parent] = direct[row.Parent].Plus(usage.Sum{Bytes: row.Size, Files: 1})
		case id != layout.RootID:
			sub[row.Parent] = sub[row.Parent].Plus(told[id])
		}
	}
	for id, row := range inodes {
		if !isDir(row.Mode) {
			continue
		}
		c := counters[id]
		if got := (usage.Sum{Bytes: c.Field(schema.CounterBytes), Files: c.Field(schema.CounterFiles)}); got != direct[id] {
			t.Errorf("directory %d is charged with %+v, of which there is %+v", id, got, direct[id])
		}
		if got := (usage.Sum{Bytes: c.Field(schema.CounterSubBytes), Files: c.Field(schema.CounterSubFiles), Dirs: c.Field(schema.CounterSubDirs)}); got != sub[id] {
			t.Errorf("directory %d was told %+v, its directories have told %+v", id, got, sub[id])
		}
		if id != layout.RootID && !dirty[id] && told[id] != totalOf(c) {
			t.Errorf("directory %d has told %+v, is clean, and has %+v", id, told[id], totalOf(c))
		}
		delete(told, id)
		delete(dirty, id)
	}
	for key, got := range owners {
		if got != owned[key] {
			t.Errorf("owner %x has %+v, there is %+v", key[1:], got, owned[key])
		}
		delete(owned, key)
	}
	if len(told)+len(dirty)+len(owned) > 0 {
		t.Errorf("rows of directories that are gone: told %v, dirty %v; owners without a row: %v", told, dirty, owned)
	}
}

// totalOf is all that is below a directory, as its counters say.
func totalOf(c catalog.Counters) usage.Sum {
	return usage.Sum{
		Bytes: c.Field(schema.CounterBytes) + c.Field(schema.CounterSubBytes),
		Files: c.Field(schema.CounterFiles) + c.Field(schema.CounterSubFiles),
		Dirs:  c.Field(schema.CounterSubdirs) + c.Field(schema.CounterSubDirs),
	}
}
