package usage

import (
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// Sum is what inodes come to.
type Sum struct{ Bytes, Files, Dirs int64 }

// Plus returns u and v together.
func (u Sum) Plus(v Sum) Sum { return Sum{u.Bytes + v.Bytes, u.Files + v.Files, u.Dirs + v.Dirs} }

// Minus returns u without v.
func (u Sum) Minus(v Sum) Sum { return Sum{u.Bytes - v.Bytes, u.Files - v.Files, u.Dirs - v.Dirs} }

// Inodes is what a limit of files is about.
func (u Sum) Inodes() int64 { return u.Files + u.Dirs }

// totalOf is all that is below a directory, as its counters say.
func totalOf(c catalog.Counters) Sum {
	return Sum{
		Bytes: c.Field(schema.CounterBytes) + c.Field(schema.CounterSubBytes),
		Files: c.Field(schema.CounterFiles) + c.Field(schema.CounterSubFiles),
		Dirs:  c.Field(schema.CounterSubdirs) + c.Field(schema.CounterSubDirs),
	}
}

// toldOf is what a directory has told its parent, as its row says.
func toldOf(c catalog.Counters) Sum {
	return Sum{c.Field(schema.ToldBytes), c.Field(schema.ToldFiles), c.Field(schema.ToldDirs)}
}

// Change is a batch that may change what directories and owners are charged with. It belongs to the goroutine that
// makes it.
type Change struct {
	catalog.Batch
	Shard int // of the service that commits it: the counters of owners, and of all inodes, that it changes

	changes bool
	dirtied []layout.FileID // whose usage it changes, but for the root
}

// ChangesUsage reports whether directories have something to tell once the batch is committed, see [Tree.Soon].
func (c *Change) ChangesUsage() bool { return c.changes }

// Charge adds to c that an inode has come (files is 1) or gone (-1), to all of them, at its home and at its owner. That
// a directory is one of its parent's is the caller's to add.
func (c *Change) Charge(row *schema.Inode, files int64) {
	bytes := files * row.ChargedBytes()
	if row.IsDir() {
		c.dirty(row.Parent)
	} else {
		c.chargeHome(row.Parent, bytes, files)
	}
	c.chargeOwner(row.UID, row.GID, bytes, files)
	c.Add(schema.FilesKey(c.Shard), 0, files)
}

// Recharge adds to c what an inode's new size and owner change.
func (c *Change) Recharge(before, after *schema.Inode) {
	grown := after.ChargedBytes() - before.ChargedBytes()
	if grown != 0 {
		c.chargeHome(after.Parent, grown, 0)
	}
	if before.UID == after.UID && before.GID == after.GID {
		c.chargeOwner(after.UID, after.GID, grown, 0)
		return
	}
	c.chargeOwner(before.UID, before.GID, -before.ChargedBytes(), -1)
	c.chargeOwner(after.UID, after.GID, after.ChargedBytes(), 1)
}

// Rehome gives an inode that is no directory another home, or with 0 none. Its row is the caller's to put.
func (c *Change) Rehome(row *schema.Inode, home layout.FileID) {
	if row.Parent == home {
		return
	}
	c.chargeHome(row.Parent, -row.Size, -1)
	row.Parent = home
	c.chargeHome(row.Parent, row.Size, 1)
}

func (c *Change) chargeHome(home layout.FileID, bytes, files int64) {
	if home == 0 {
		return
	}
	key := schema.CountersKey(home)
	c.add(key, schema.CounterBytes, bytes)
	c.add(key, schema.CounterFiles, files)
	c.dirty(home)
}

func (c *Change) chargeOwner(uid, gid uint32, bytes, files int64) {
	key := schema.OwnerKey(uid, gid, c.Shard)
	c.add(key, schema.OwnerBytes, bytes)
	c.add(key, schema.OwnerFiles, files)
}

func (c *Change) add(key []byte, field int, n int64) {
	if n != 0 {
		c.Add(key, field, n)
	}
}

// addSub adds to c what a directory has been told by one in it.
func (c *Change) addSub(dir layout.FileID, u Sum) {
	key := schema.CountersKey(dir)
	c.add(key, schema.CounterSubBytes, u.Bytes)
	c.add(key, schema.CounterSubFiles, u.Files)
	c.add(key, schema.CounterSubDirs, u.Dirs)
	c.dirty(dir)
}

// dirty adds to c that a directory's usage changes.
func (c *Change) dirty(dir layout.FileID) {
	c.changes = true
	if dir == layout.RootID || slices.Contains(c.dirtied, dir) {
		return
	}
	c.dirtied = append(c.dirtied, dir)
	c.Add(schema.DirtyKey(dir), 0, 1)
}
