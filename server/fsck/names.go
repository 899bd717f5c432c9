package fsck

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

func isDir(mode uint32) bool { return mode&syscall.S_IFMT == syscall.S_IFDIR }

// checkInodes reads all inodes, and which of them are marked as nameless.
func (c *checker) checkInodes(ctx context.Context) error {
	err := c.scan(ctx, schema.PrefixInode, func(key, value []byte) error {
		var row schema.Inode
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		c.remember(schema.IDOf(key), &row)
		if row.Policy.MinCopies != 0 {
			return c.checkFormat(ctx, schema.FormatCopies)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if root := c.find(layout.RootID); root == nil || !isDir(root.mode) {
		if err := c.missingRoot(ctx, root != nil); err != nil {
			return err
		}
	}
	if err := c.checkNextInode(ctx); err != nil {
		return err
	}
	return c.scan(ctx, schema.PrefixOrphan, func(key, _ []byte) error {
		n := c.find(schema.IDOf(key))
		if n == nil {
			return c.stray(ctx, key, Problem{Inode: schema.IDOf(key), Detail: "mark of a nameless inode"})
		}
		n.state |= orphan
		return nil
	})
}

// remember adds an inode whose number is above all there are.
func (c *checker) remember(id layout.FileID, row *schema.Inode) {
	c.inodes = append(c.inodes, inode{id: id, home: row.Parent, size: row.Size, mode: row.Mode, nlink: row.Nlink, extra: -int32(row.Xattrs), told: row.Flags})
	if isDir(row.Mode) {
		c.dirs[id] = &directory{parent: row.Parent}
	}
}

// missingRoot makes a root directory. If something else has its number there is no telling what happened.
func (c *checker) missingRoot(ctx context.Context, other bool) error {
	p := Problem{Kind: MissingRoot, Inode: layout.RootID}
	if other {
		return errors.New("the root is not a directory")
	}
	row := newDirectory(0o755, layout.RootID)
	err := c.found(ctx, p, func(b *catalog.Batch) error {
		b.GuardAbsent(schema.InodeKey(layout.RootID))
		b.Put(schema.InodeKey(layout.RootID), schema.Encode(&row))
		b.Add(schema.FilesKey(0), 0, 1)
		return nil
	})
	if err == nil && c.cfg.Repair {
		rest := c.inodes
		c.inodes = nil
		c.remember(layout.RootID, &row)
		c.inodes = append(c.inodes, rest...)
	}
	return err
}

func newDirectory(mode uint32, parent layout.FileID) schema.Inode {
	now := time.Now().UnixNano()
	return schema.Inode{Mode: syscall.S_IFDIR | mode, Parent: parent, Atime: now, Mtime: now, Ctime: now, Btime: now}
}

// checkNextInode comes before anything that may need a new inode.
func (c *checker) checkNextInode(ctx context.Context) error {
	counters, err := c.counters(ctx, schema.KeyNextInode)
	if err != nil {
		return err
	}
	least := int64(layout.RootID) + 1
	if n := len(c.inodes); n > 0 {
		least = max(least, int64(c.inodes[n-1].id)+1)
	}
	next := counters.Field(0)
	if next >= least {
		return nil
	}
	return c.found(ctx, Problem{Kind: NextInode, Detail: fmt.Sprintf("%d, want at least %d", next, least)}, func(b *catalog.Batch) error {
		b.Max(schema.KeyNextInode, 0, least)
		return nil
	})
}

// checkEntries looks at every directory entry.
func (c *checker) checkEntries(ctx context.Context) error {
	var misplaced []Problem // moved afterwards, so that the scan does not meet them again
	err := c.scan(ctx, schema.PrefixEntry, func(key, value []byte) error {
		c.report.Entries++
		if dir, cookie, name := schema.EntryOf(key); cookie != schema.Cookie(name) {
			misplaced = append(misplaced, Problem{Kind: MisplacedEntry, Detail: fmt.Sprintf("cookie %d", cookie), dir: dir, name: name, key: key})
		}
		return c.checkEntry(ctx, key, value)
	})
	if err != nil {
		return err
	}
	for i := range misplaced {
		if err := c.misplaced(ctx, misplaced[i]); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) checkEntry(ctx context.Context, key, value []byte) error {
	var e schema.Entry
	if err := schema.DecodeRow(key, value, &e); err != nil {
		return err
	}
	dir, _, name := schema.EntryOf(key)
	p := Problem{Inode: e.ID, dir: dir, name: name}
	in, n := c.dirs[dir], c.find(e.ID)
	dirEntry := isDir(e.Type)
	if n != nil {
		dirEntry = isDir(n.mode)
	}
	remove := func(b *catalog.Batch) error {
		b.GuardEqual(key, value)
		b.Delete(key)
		if in != nil {
			b.Add(schema.CountersKey(dir), schema.CounterEntries, -1)
			if dirEntry {
				b.Add(schema.CountersKey(dir), schema.CounterSubdirs, -1)
			}
		}
		return nil
	}
	switch {
	case in == nil:
		p.Kind, p.Detail = StrayEntry, fmt.Sprintf("in directory %d", dir)
	case n == nil:
		p.Kind = DanglingEntry
	case e.ID == layout.RootID:
		p.Kind = SecondEntry
	case dirEntry && c.dirs[e.ID].in != 0:
		p.Kind, p.Detail = SecondEntry, fmt.Sprintf("the first is %q in directory %d", c.dirs[e.ID].name, c.dirs[e.ID].in)
	}
	if p.Kind != "" {
		if err := c.found(ctx, p, remove); err != nil {
			return err
		}
		if in != nil && !c.cfg.Repair {
			in.count(dirEntry) // the directory's counters have it
		}
		return nil
	}

	n.links++
	if n.home == dir {
		n.state |= atHome
	}
	in.count(dirEntry)
	if dirEntry {
		d := c.dirs[e.ID]
		d.in, d.name = dir, name
		if d.parent != dir {
			p := Problem{Kind: Parent, Inode: e.ID, Detail: fmt.Sprintf("%d, is in %d", d.parent, dir)}
			err := c.found(ctx, p, func(b *catalog.Batch) error {
				return c.change(ctx, b, e.ID, func(row *schema.Inode) { row.Parent = dir })
			})
			if err != nil {
				return err
			}
		}
	}
	want := schema.Entry{ID: e.ID, Type: n.mode & syscall.S_IFMT}
	if e.Type != want.Type {
		p.Kind, p.Detail = EntryType, fmt.Sprintf("%#o, the inode has %#o", e.Type, want.Type)
		fixed := schema.Encode(&want)
		return c.found(ctx, p, func(b *catalog.Batch) error {
			b.GuardEqual(key, value)
			b.Put(key, fixed)
			return nil
		})
	}
	return nil
}

// count counts an entry.
func (d *directory) count(isDir bool) {
	d.entries++
	if isDir {
		d.subdirs++
	}
}

// misplaced moves an entry to the key that it is looked up by, or, if there is an entry of that name, to another name.
func (c *checker) misplaced(ctx context.Context, p Problem) error {
	var e schema.Entry
	value, err := schema.ReadRow(ctx, c.cfg.Engine, p.key, &e)
	if err != nil || value == nil {
		return err // or it was removed for another reason
	}
	p.Inode = e.ID
	return c.found(ctx, p, func(b *catalog.Batch) error {
		proper := schema.EntryKey(p.dir, p.name)
		if _, err := c.cfg.Engine.Get(ctx, proper); err == nil {
			if proper, err = c.freeEntry(ctx, p.dir, fmt.Sprintf("inode-%d", e.ID)); err != nil {
				return err
			}
		}
		b.GuardEqual(p.key, value)
		b.Delete(p.key)
		b.GuardAbsent(proper)
		b.Put(proper, value)
		return nil
	})
}

// checkConnected finds inodes and directories that no path leads to.
func (c *checker) checkConnected(ctx context.Context) error {
	for i := 0; i < len(c.inodes); i++ { // lost+found may come at the end
		n := &c.inodes[i]
		switch {
		case n.id == layout.RootID:
		case n.links == 0 && n.state&orphan != 0:
			c.report.Orphans++
		case n.links == 0:
			if err := c.unlinked(ctx, n.id); err != nil {
				return err
			}
		case n.state&orphan != 0:
			err := c.found(ctx, Problem{Kind: LinkedOrphan, Inode: n.id}, func(b *catalog.Batch) error {
				b.Delete(schema.OrphanKey(n.id))
				return nil
			})
			if err != nil {
				return err
			}
		}
	}

	const (
		connected = 1 + iota
		onPath
	)
	seen := map[layout.FileID]int{layout.RootID: connected}
	for i := 0; i < len(c.inodes); i++ {
		var path []layout.FileID
		id := c.inodes[i].id
		for c.dirs[id] != nil && seen[id] == 0 {
			seen[id] = onPath
			path = append(path, id)
			id = c.dirs[id].in
		}
		if seen[id] == onPath { // came back to a directory of this path
			if err := c.loop(ctx, id); err != nil {
				return err
			}
		}
		for _, id := range path {
			seen[id] = connected
		}
	}
	return nil
}

// unlinked links an inode into lost+found.
func (c *checker) unlinked(ctx context.Context, id layout.FileID) error {
	p := Problem{Kind: Unlinked, Inode: id}
	if !c.cfg.Repair {
		return c.found(ctx, p, nil)
	}
	return c.intoLost(ctx, p, func(b *catalog.Batch) {})
}

// loop breaks a loop of directories at id.
func (c *checker) loop(ctx context.Context, id layout.FileID) error {
	d := c.dirs[id]
	p := Problem{Kind: Loop, Inode: id, Detail: fmt.Sprintf("%q in directory %d, which is inside it", d.name, d.in)}
	if !c.cfg.Repair {
		return c.found(ctx, p, nil)
	}
	from, name := d.in, d.name
	err := c.intoLost(ctx, p, func(b *catalog.Batch) {
		b.GuardPresent(schema.EntryKey(from, name))
		b.Delete(schema.EntryKey(from, name))
		b.Add(schema.CountersKey(from), schema.CounterEntries, -1)
		b.Add(schema.CountersKey(from), schema.CounterSubdirs, -1)
	})
	if err != nil {
		return err
	}
	c.dirs[from].entries--
	c.dirs[from].subdirs--
	c.find(id).links--
	return nil
}

// intoLost repairs p by an entry for its inode in lost+found, together with what more adds to the batch.
func (c *checker) intoLost(ctx context.Context, p Problem, more func(b *catalog.Batch)) error {
	if c.lost == 0 {
		if err := c.findLost(ctx); err != nil {
			return fmt.Errorf("lost+found: %w", err)
		}
	}
	n := c.find(p.Inode)
	name := fmt.Sprintf("inode-%d", n.id)
	key, err := c.freeEntry(ctx, c.lost, name)
	if err != nil {
		return err
	}
	err = c.found(ctx, p, func(b *catalog.Batch) error {
		more(b)
		b.GuardAbsent(key)
		b.Put(key, schema.Encode(&schema.Entry{ID: n.id, Type: n.mode & syscall.S_IFMT}))
		b.Add(schema.CountersKey(c.lost), schema.CounterEntries, 1)
		if isDir(n.mode) {
			b.Add(schema.CountersKey(c.lost), schema.CounterSubdirs, 1)
		}
		return c.change(ctx, b, n.id, func(row *schema.Inode) {
			if isDir(row.Mode) {
				row.Parent = c.lost
			} else {
				row.Nlink, row.Parent = 1, 0
			}
		})
	})
	if err != nil {
		return err
	}
	n.links++
	n.nlink = 1
	c.dirs[c.lost].count(isDir(n.mode))
	if d := c.dirs[n.id]; d != nil {
		_, _, d.name = schema.EntryOf(key)
		d.in, d.parent = c.lost, c.lost
	}
	return nil
}

// freeEntry returns the key of an entry that does not exist yet: name, or name.1 and so on.
func (c *checker) freeEntry(ctx context.Context, dir layout.FileID, name string) ([]byte, error) {
	key := schema.EntryKey(dir, name)
	for i := 1; ; i++ {
		_, err := c.cfg.Engine.Get(ctx, key)
		if errors.Is(err, catalog.ErrNotFound) {
			return key, nil
		}
		if err != nil {
			return nil, err
		}
		key = schema.EntryKey(dir, fmt.Sprintf("%s.%d", name, i))
	}
}

// findLost finds the directory lost+found, or makes one.
func (c *checker) findLost(ctx context.Context) error {
	const name = "lost+found"
	value, err := c.cfg.Engine.Get(ctx, schema.EntryKey(layout.RootID, name))
	if err == nil {
		var e schema.Entry
		if err := schema.DecodeRow([]byte(name), value, &e); err != nil {
			return err
		}
		if c.dirs[e.ID] != nil {
			c.lost = e.ID
			return nil
		}
	} else if !errors.Is(err, catalog.ErrNotFound) {
		return err
	}
	key, err := c.freeEntry(ctx, layout.RootID, name)
	if err != nil {
		return err
	}
	next, err := c.cfg.Engine.Get(ctx, schema.KeyNextInode)
	if err != nil {
		return err
	}
	counters, err := catalog.DecodeCounters(next)
	if err != nil {
		return err
	}
	id := layout.FileID(counters.Field(0))
	row := newDirectory(0o700, layout.RootID)
	root := schema.CountersKey(layout.RootID)
	var b catalog.Batch
	b.GuardEqual(schema.KeyNextInode, next)
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(id)+1))
	b.GuardAbsent(key)
	b.Put(key, schema.Encode(&schema.Entry{ID: id, Type: syscall.S_IFDIR}))
	b.Put(schema.InodeKey(id), schema.Encode(&row))
	b.Add(root, schema.CounterEntries, 1)
	b.Add(root, schema.CounterSubdirs, 1)
	b.Max(root, schema.CounterMtime, row.Mtime)
	b.Max(root, schema.CounterCtime, row.Ctime)
	b.Add(schema.FilesKey(0), 0, 1)
	if err := c.cfg.Engine.Commit(ctx, &b); err != nil {
		return err
	}
	c.lost = id
	c.remember(id, &row)
	c.find(id).links = 1
	c.dirs[id].in = layout.RootID
	_, _, c.dirs[id].name = schema.EntryOf(key)
	c.dirs[layout.RootID].count(true)
	return nil
}

// checkLinks compares link counts with the entries found.
func (c *checker) checkLinks(ctx context.Context) error {
	for i := range c.inodes {
		n := &c.inodes[i]
		if isDir(n.mode) || n.links == 0 || n.nlink == n.links {
			continue
		}
		p := Problem{Kind: LinkCount, Inode: n.id, Detail: fmt.Sprintf("%d, has %d entries", n.nlink, n.links)}
		err := c.found(ctx, p, func(b *catalog.Batch) error {
			return c.change(ctx, b, n.id, func(row *schema.Inode) { row.Nlink = n.links })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// checkCounters compares the counters of directories with the entries found.
func (c *checker) checkCounters(ctx context.Context) error {
	check := func(id layout.FileID, counters catalog.Counters) error {
		d := c.dirs[id]
		entries, subdirs := counters.Field(schema.CounterEntries), counters.Field(schema.CounterSubdirs)
		if entries == d.entries && subdirs == d.subdirs {
			return nil
		}
		p := Problem{Kind: DirCounters, Inode: id, Detail: fmt.Sprintf("%d entries, %d subdirectories; has %d and %d", entries, subdirs, d.entries, d.subdirs)}
		return c.found(ctx, p, func(b *catalog.Batch) error {
			b.Add(schema.CountersKey(id), schema.CounterEntries, d.entries-entries)
			b.Add(schema.CountersKey(id), schema.CounterSubdirs, d.subdirs-subdirs)
			return nil
		})
	}
	err := c.scan(ctx, schema.PrefixCounters, func(key, value []byte) error {
		id := schema.IDOf(key)
		if c.dirs[id] == nil {
			return c.stray(ctx, key, Problem{Inode: id, Detail: "counters of a directory"})
		}
		counters, err := catalog.DecodeCounters(value)
		if err != nil {
			return fmt.Errorf("row %q: %w", key, err)
		}
		c.dirs[id].counted = true
		return check(id, counters)
	})
	if err != nil {
		return err
	}
	for i := range c.inodes {
		if id := c.inodes[i].id; c.dirs[id] != nil && !c.dirs[id].counted {
			if err := check(id, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// stray records a row that belongs to nothing.
func (c *checker) stray(ctx context.Context, key []byte, p Problem) error {
	p.Kind = StrayRow
	return c.found(ctx, p, func(b *catalog.Batch) error {
		b.Delete(key)
		return nil
	})
}

// checkRows looks at what else belongs to inodes and sessions.
func (c *checker) checkRows(ctx context.Context) error {
	err := c.scan(ctx, schema.PrefixSession, func(key, _ []byte) error {
		c.sessions[string(key[1:])] = true
		return nil
	})
	if err != nil {
		return err
	}
	err = c.scan(ctx, schema.PrefixReply, func(key, _ []byte) error {
		if c.sessions[string(key[1:17])] {
			return nil
		}
		return c.stray(ctx, key, Problem{Detail: fmt.Sprintf("reply to session %x", key[1:17])})
	})
	if err != nil {
		return err
	}
	err = c.scan(ctx, schema.PrefixXattr, func(key, value []byte) error {
		n := c.find(schema.IDOf(key))
		if n == nil {
			return c.stray(ctx, key, Problem{Inode: schema.IDOf(key), Detail: fmt.Sprintf("extended attribute %q", key[9:])})
		}
		name := string(key[9:])
		if name == schema.XattrACL || name == schema.XattrDefaultACL {
			if err := checkList(value); err != nil {
				p := Problem{Kind: BadACL, Inode: n.id, Detail: fmt.Sprintf("%s: %v", name, err)}
				err := c.found(ctx, p, func(b *catalog.Batch) error {
					b.GuardEqual(key, value)
					b.Delete(key)
					return c.change(ctx, b, n.id, func(row *schema.Inode) {
						row.Xattrs--
						row.Flags &^= schema.XattrFlags(name) &^ metarpc.AttrXattrs
					})
				})
				if err != nil {
					return err
				}
				if c.cfg.Repair {
					n.extra++ // the inode tells of one less
					n.told &^= schema.XattrFlags(name) &^ metarpc.AttrXattrs
					return nil
				}
			}
		}
		n.extra++
		n.flags |= schema.XattrFlags(name)
		return nil
	})
	if err != nil {
		return err
	}
	for i := range c.inodes {
		n := &c.inodes[i]
		if n.told != n.flags {
			p := Problem{Kind: XattrFlags, Inode: n.id, Detail: fmt.Sprintf("%#x, want %#x", uint32(n.told), uint32(n.flags))}
			err := c.found(ctx, p, func(b *catalog.Batch) error {
				return c.change(ctx, b, n.id, func(row *schema.Inode) { row.Flags = n.flags })
			})
			if err != nil {
				return err
			}
		}
		if n.extra == 0 {
			continue
		}
		p := Problem{Kind: XattrCount, Inode: n.id, Detail: fmt.Sprintf("has %+d more than it says", n.extra)}
		err := c.found(ctx, p, func(b *catalog.Batch) error {
			return c.change(ctx, b, n.id, func(row *schema.Inode) { row.Xattrs += int(n.extra) })
		})
		if err != nil {
			return err
		}
	}
	err = c.scan(ctx, schema.PrefixTruncate, func(key, value []byte) error {
		var row schema.Truncate
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		n := c.find(schema.IDOf(key))
		if n == nil {
			return c.stray(ctx, key, Problem{Inode: schema.IDOf(key), Detail: "truncation"})
		}
		n.state |= unsettled
		c.report.Truncations++
		return nil
	})
	if err != nil {
		return err
	}
	return c.scan(ctx, schema.PrefixWriter, func(key, _ []byte) error {
		n := c.find(schema.IDOf(key))
		if n == nil || !c.sessions[string(key[9:])] {
			// Without its session nobody finds out the size; checkSizes does.
			return c.stray(ctx, key, Problem{Inode: schema.IDOf(key), Detail: fmt.Sprintf("writer, session %x", key[9:])})
		}
		n.state |= unsettled
		c.report.Writers++
		return nil
	})
}

// checkList finds what is wrong with the value of an access control list.
func checkList(value []byte) error {
	list, err := perm.ParseACL(value)
	if err == nil {
		err = list.Check()
	}
	return err
}

// checkTotals compares what was counted with the counters, after all repairs.
func (c *checker) checkTotals(ctx context.Context) error {
	c.report.Volume = fmt.Sprintf("%x", c.volume.ID)
	c.report.Inodes = int64(len(c.inodes))
	c.report.Directories = int64(len(c.dirs))
	used := int64(0)
	err := c.scan(ctx, schema.PrefixFiles, func(key, value []byte) error {
		counters, err := catalog.DecodeCounters(value)
		if err != nil {
			return fmt.Errorf("row %q: %w", key, err)
		}
		used += counters.Field(0)
		return nil
	})
	if err != nil {
		return err
	}
	if used != c.report.Inodes {
		p := Problem{Kind: Usage, Detail: fmt.Sprintf("%d inodes, there are %d", used, c.report.Inodes)}
		err := c.found(ctx, p, func(b *catalog.Batch) error {
			b.Add(schema.FilesKey(0), 0, c.report.Inodes-used)
			return nil
		})
		if err != nil {
			return err
		}
	}
	for _, d := range c.sortedDevices() {
		counters, err := c.counters(ctx, schema.InUseKey(d.id))
		if err != nil {
			return err
		}
		c.report.DataFiles += d.inUse
		n := counters.Field(0)
		if n == d.inUse {
			continue
		}
		p := Problem{Kind: InUse, Device: d.url, Detail: fmt.Sprintf("%d data files, there are %d", n, d.inUse)}
		err = c.found(ctx, p, func(b *catalog.Batch) error {
			b.Add(schema.InUseKey(d.id), 0, d.inUse-n)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
