package fsck

import (
	"context"
	"fmt"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// usage is what files come to.
type usage struct{ bytes, files, dirs int64 }

func (u usage) plus(v usage) usage {
	return usage{u.bytes + v.bytes, u.files + v.files, u.dirs + v.dirs}
}

func (u usage) String() string {
	return fmt.Sprintf("%d bytes in %d files, %d directories", u.bytes, u.files, u.dirs)
}

// The fields of a directory's counters that are its usage.
var (
	directFields = [3]int{schema.CounterBytes, schema.CounterFiles, schema.CounterSubdirs}
	subFields    = [3]int{schema.CounterSubBytes, schema.CounterSubFiles, schema.CounterSubDirs}
	toldFields   = [3]int{schema.ToldBytes, schema.ToldFiles, schema.ToldDirs}
	ownerFields  = [2]int{schema.OwnerBytes, schema.OwnerFiles}
)

func usageIn(c catalog.Counters, fields [3]int) usage {
	return usage{c.Field(fields[0]), c.Field(fields[1]), c.Field(fields[2])}
}

// disturbing are the problems by which what was counted is no longer what there is. Usage is then counted anew, and that is no problem of its own.
var disturbing = map[Kind]bool{
	MissingRoot: true, DanglingEntry: true, StrayEntry: true, SecondEntry: true, Parent: true, Unlinked: true, Loop: true,
	LinkCount: true, DirCounters: true, StrayRow: true, BeyondSize: true, EntryType: true, Home: true,
}

// foundUsage is found for a consequence of something else, if there is that.
func (c *checker) foundUsage(ctx context.Context, p Problem, fix func(b *catalog.Batch) error) error {
	if !c.disturbed {
		return c.found(ctx, p, fix)
	}
	c.cfg.Log.Debug("fsck", "counted anew", p.String())
	if !c.cfg.Repair {
		return nil
	}
	var b catalog.Batch
	if err := fix(&b); err != nil {
		return fmt.Errorf("%v: %w", p, err)
	}
	return c.cfg.Engine.Commit(ctx, &b)
}

// checkUsage compares what directories and owners are charged with to what there is, after all repairs that change it.
func (c *checker) checkUsage(ctx context.Context) error {
	if !schema.CountsUsage(c.volume.Format) {
		return nil // the service that opens it counts
	}
	owners := map[[2]uint32]usage{}
	if err := c.countUsage(ctx, owners); err != nil {
		return err
	}
	if err := c.readTold(ctx); err != nil {
		return err
	}
	if err := c.checkDirectories(ctx); err != nil {
		return err
	}
	if err := c.checkOwners(ctx, owners); err != nil {
		return err
	}
	return c.scan(ctx, schema.PrefixQuota, func(key, value []byte) error {
		name := schema.QuotaOf(key)
		var row schema.Quota
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		if id := layout.FileID(name.ID); name.Kind == metarpc.QuotaTree && c.dirs[id] == nil {
			return c.stray(ctx, key, Problem{Inode: id, Detail: "quota of a directory"})
		}
		return nil
	})
}

// countUsage adds up what there is.
func (c *checker) countUsage(ctx context.Context, owners map[[2]uint32]usage) error {
	report := c.found
	if c.disturbed { // by something else than a wrong home
		report = c.foundUsage
	}
	return c.scan(ctx, schema.PrefixInode, func(key, value []byte) error {
		var row schema.Inode
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		owner := [2]uint32{row.UID, row.GID}
		if isDir(row.Mode) {
			owners[owner] = owners[owner].plus(usage{files: 1})
			return nil
		}
		owners[owner] = owners[owner].plus(usage{row.Size, 1, 0})
		id, home := schema.IDOf(key), row.Parent
		n := c.find(id)
		if home != 0 && n.state&atHome == 0 && (n.links > 0 || n.state&orphan != 0) {
			p := Problem{Kind: Home, Inode: id, Detail: fmt.Sprintf("directory %d, where it has no name", home)}
			err := report(ctx, p, func(b *catalog.Batch) error {
				return c.change(ctx, b, id, func(row *schema.Inode) { row.Parent = 0 })
			})
			if err != nil {
				return err
			}
			if c.cfg.Repair {
				home = 0
			}
		}
		if d := c.dirs[home]; d != nil {
			d.direct = d.direct.plus(usage{row.Size, 1, 0})
		}
		return nil
	})
}

// readTold reads what directories have told their parents, and which are to tell them more.
func (c *checker) readTold(ctx context.Context) error {
	err := c.scan(ctx, schema.PrefixTold, func(key, value []byte) error {
		id := schema.IDOf(key)
		if c.dirs[id] == nil || id == layout.RootID {
			return c.stray(ctx, key, Problem{Inode: id, Detail: "what a directory has told its parent"})
		}
		counters, err := catalog.DecodeCounters(value)
		if err != nil {
			return fmt.Errorf("row %q: %w", key, err)
		}
		c.dirs[id].told = usageIn(counters, toldFields)
		return nil
	})
	if err != nil {
		return err
	}
	for id, d := range c.dirs {
		if above := c.dirs[d.in]; above != nil && id != layout.RootID {
			above.sub = above.sub.plus(d.told)
		}
	}
	return c.scan(ctx, schema.PrefixDirty, func(key, _ []byte) error {
		id := schema.IDOf(key)
		if c.dirs[id] == nil || id == layout.RootID {
			return c.stray(ctx, key, Problem{Inode: id, Detail: "mark of a directory whose usage has changed"})
		}
		c.dirs[id].dirty = true
		return nil
	})
}

func (c *checker) checkDirectories(ctx context.Context) error {
	for i := range c.inodes {
		id := c.inodes[i].id
		d := c.dirs[id]
		if d == nil {
			continue
		}
		key := schema.CountersKey(id)
		counters, err := c.counters(ctx, key)
		if err != nil {
			return err
		}
		d.direct.dirs = counters.Field(schema.CounterSubdirs) // which is right by now
		direct, sub := usageIn(counters, directFields), usageIn(counters, subFields)
		if direct != d.direct || sub != d.sub {
			p := Problem{Kind: DirUsage, Inode: id, Detail: fmt.Sprintf("%v, and was told %v; has %v, and was told %v", direct, sub, d.direct, d.sub)}
			err := c.foundUsage(ctx, p, func(b *catalog.Batch) error {
				correct(b, key, directFields, direct, d.direct)
				correct(b, key, subFields, sub, d.sub)
				return nil
			})
			if err != nil {
				return err
			}
		}
		if total := d.direct.plus(d.sub); id != layout.RootID && !d.dirty && total != d.told {
			p := Problem{Kind: Told, Inode: id, Detail: fmt.Sprintf("%v, its parent was told %v", total, d.told)}
			err := c.foundUsage(ctx, p, func(b *catalog.Batch) error {
				b.Add(schema.DirtyKey(id), 0, 1)
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// correct adds to a batch what makes counters what there is.
func correct(b *catalog.Batch, key []byte, fields [3]int, is, want usage) {
	b.Add(key, fields[0], want.bytes-is.bytes)
	b.Add(key, fields[1], want.files-is.files)
	b.Add(key, fields[2], want.dirs-is.dirs)
}

func (c *checker) checkOwners(ctx context.Context, owners map[[2]uint32]usage) error {
	check := func(owner [2]uint32, is, want usage) error {
		if is == want {
			return nil
		}
		p := Problem{Kind: OwnerUsage, Detail: fmt.Sprintf("user %d, group %d: %d bytes in %d inodes, there are %d in %d",
			owner[0], owner[1], is.bytes, is.files, want.bytes, want.files)}
		return c.foundUsage(ctx, p, func(b *catalog.Batch) error {
			key := schema.OwnerKey(owner[0], owner[1], 0)
			b.Add(key, ownerFields[0], want.bytes-is.bytes)
			b.Add(key, ownerFields[1], want.files-is.files)
			return nil
		})
	}
	// The rows of an owner, one for each shard that has changed something of his, follow one another.
	var last [2]uint32
	var is usage
	done := func() error {
		want := owners[last]
		delete(owners, last)
		return check(last, is, want)
	}
	err := c.scan(ctx, schema.PrefixOwner, func(key, value []byte) error {
		counters, err := catalog.DecodeCounters(value)
		if err != nil {
			return fmt.Errorf("row %q: %w", key, err)
		}
		uid, gid := schema.OwnerOf(key)
		if owner := [2]uint32{uid, gid}; owner != last {
			if err := done(); err != nil {
				return err
			}
			last, is = owner, usage{}
		}
		is.bytes += counters.Field(schema.OwnerBytes)
		is.files += counters.Field(schema.OwnerFiles)
		return nil
	})
	if err == nil {
		err = done()
	}
	if err != nil {
		return err
	}
	for owner, want := range owners {
		if err := check(owner, usage{}, want); err != nil {
			return err
		}
	}
	return nil
}
