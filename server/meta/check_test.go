package meta

import (
	"context"
	"slices"
	"syscall"
	"testing"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
)

// checkCatalog tests that what belongs together in the catalog fits together.
func checkCatalog(t testing.TB, engine catalog.Engine) {
	t.Helper()
	ctx := context.Background()
	inodes := map[layout.FileID]schema.Inode{}
	counters := map[layout.FileID]catalog.Counters{}
	links := map[layout.FileID]uint32{}
	entries, subdirs := map[layout.FileID]int64{}, map[layout.FileID]int64{}
	orphans, layouts, xattrs := map[layout.FileID]bool{}, map[layout.FileID]bool{}, map[layout.FileID]int{}
	parents := map[layout.FileID]layout.FileID{}
	var usage int64
	for kv, err := range engine.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
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
		case schema.KeyUsage[0]:
			var c catalog.Counters
			c, bad = catalog.DecodeCounters(kv.Value)
			usage = c.Field(0)
		}
		if bad != nil {
			t.Errorf("row %q: %v", kv.Key, bad)
		}
	}
	if usage != int64(len(inodes)) {
		t.Errorf("usage says %d inodes, there are %d", usage, len(inodes))
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
