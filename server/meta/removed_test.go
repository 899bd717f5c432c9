package meta

import (
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// TestRemovedDirectory does to directories that are gone what a process can do that has one open, or is in it.
func TestRemovedDirectory(t *testing.T) {
	const noEntry, stale, noData = metarpc.Status(syscall.ENOENT), metarpc.Status(syscall.ESTALE), metarpc.Status(syscall.ENODATA)
	h := startMemory(t)
	c, other := h.client(), h.client()
	d, full := c.mkdir(layout.RootID, "d"), c.mkdir(layout.RootID, "full")
	c.touch(full, "f")
	c.remove(full, "f")
	before := c.attr(full)
	from := c.mkdir(layout.RootID, "from")
	must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "d", Dir: true})
	must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{
		OldParent: layout.RootID, OldName: "from", NewParent: layout.RootID, NewName: "full",
	})
	if a := c.attr(from); a.Nlink != 2 {
		t.Errorf("the directory that took the place: %+v", a)
	}

	for _, id := range []layout.FileID{d, full} {
		for _, who := range []*client{c, other} {
			r := must[metarpc.AttrResult](who, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id})
			if a := r.Attr; a.ID != id || a.Nlink != 0 || a.Size != 0 || !isDir(a.Mode) || a.UID != testCred.UID || r.Lease != 0 {
				t.Errorf("attributes %+v, lease %v", a, r.Lease)
			}
			wantStatus(t, sent(who, metarpc.OpLookup, &metarpc.NameArgs{Parent: id, Name: "x"}), noEntry)
			wantStatus(t, sent(who, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: id, Limit: 9}), noEntry)
			wantStatus(t, sent(who, metarpc.OpCreate, &metarpc.CreateArgs{Parent: id, Name: "x", Mode: 0o600}), noEntry)
			wantStatus(t, sent(who, metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: id, Mode: 0o600}), noEntry)
			wantStatus(t, sent(who, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: id, Name: "x", Mode: syscall.S_IFDIR}), noEntry)
			wantStatus(t, sent(who, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: id, Name: "x"}), noEntry)
			wantStatus(t, sent(who, metarpc.OpRename, &metarpc.RenameArgs{
				OldParent: layout.RootID, OldName: "full", NewParent: id, NewName: "x",
			}), noEntry)
			wantStatus(t, sent(who, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: id, Name: schema.XattrACL}), noData)
			wantStatus(t, sent(who, metarpc.OpListXattr, &metarpc.IDArgs{ID: id}), metarpc.StatusOK)
		}
	}
	if a := c.attr(full); a.Mtime != before.Mtime || a.Ctime <= before.Ctime || a.Btime != before.Btime {
		t.Errorf("times %+v, before %+v", a, before)
	}

	set := &metarpc.SetAttrArgs{ID: d, Mask: metarpc.SetMode | metarpc.SetMtime, Mode: 0o701, Mtime: 12345}
	if a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, set); a.Lease != 0 || a.Attr.Nlink != 0 {
		t.Errorf("attributes set: %+v", a)
	}
	if a := other.attr(d); a.Mode&0o7777 != 0o701 || a.Mtime != 12345 {
		t.Errorf("attributes after they were set: %+v", a)
	}
	other.cred.UID++
	wantStatus(t, sent(other, metarpc.OpSetAttr, set), metarpc.Status(syscall.EPERM))
	wantStatus(t, sent(c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: 1 << 40}), stale)
	wantStatus(t, sent(c, metarpc.OpLookup, &metarpc.NameArgs{Parent: 1 << 40, Name: "x"}), stale)
	h.svc.mu.Lock()
	for id := range h.svc.leases {
		if id == d || id == full {
			t.Errorf("there are leases on inode %d, which is gone", id)
		}
	}
	h.svc.mu.Unlock()
	checkCatalog(t, h.engine)

	h.restart()
	c = h.client()
	wantStatus(t, sent(c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: d}), stale)
}

// TestRemovedFile asks for what somebody asks for who has looked up a name just before it went.
func TestRemovedFile(t *testing.T) {
	const stale, notDir = metarpc.Status(syscall.ESTALE), metarpc.Status(syscall.ENOTDIR)
	h := startMemory(t)
	c, other := h.client(), h.client()
	file := c.touch(layout.RootID, "file")
	open := c.create(layout.RootID, "open")
	link := must[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{
		Parent: layout.RootID, Name: "link", Mode: syscall.S_IFLNK | 0o777, Target: "somewhere",
	}).Attr.ID
	wantStatus(t, sent(c, metarpc.OpLookup, &metarpc.NameArgs{Parent: file, Name: "x"}), notDir)
	for _, name := range []string{"file", "open", "link"} {
		c.remove(layout.RootID, name)
	}
	c.closeFile(open) // the last who had it
	for _, id := range []layout.FileID{file, open, link} {
		r := must[metarpc.AttrResult](other, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id})
		if r.Attr.ID != id || r.Attr.Nlink != 0 || r.Attr.UID != testCred.UID || r.Lease != 0 {
			t.Errorf("attributes %+v, lease %v", r.Attr, r.Lease)
		}
		wantStatus(t, sent(other, metarpc.OpLookup, &metarpc.NameArgs{Parent: id, Name: "x"}), stale)
		wantStatus(t, sent(other, metarpc.OpOpen, &metarpc.OpenArgs{ID: id}), stale)
	}
	wantStatus(t, sent(c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: file, Mask: metarpc.SetSize, Size: 1}), stale)
	set := &metarpc.SetAttrArgs{ID: file, Mask: metarpc.SetMode, Mode: 0o604}
	if a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, set).Attr; a.Mode != syscall.S_IFREG|0o604 || a.Nlink != 0 {
		t.Errorf("attributes set: %+v", a)
	}
	checkCatalog(t, h.engine)
}

// sent makes a call and returns how it failed.
func sent(c *client, op metarpc.Op, args any) error {
	hdr, ch := c.begin(op, args)
	return c.finish(hdr, ch, op.NewResult())
}

// TestRemovedInodesBound has more inodes removed than are remembered.
func TestRemovedInodesBound(t *testing.T) {
	var r removedInodes
	const more = 1000
	for round := range 2 { // the second time none is known anew
		for id := layout.FileID(1); id <= maxRemoved; id++ {
			r.add(id, schema.Inode{UID: uint32(round)})
		}
	}
	for id := layout.FileID(maxRemoved + 1); id <= maxRemoved+more; id++ {
		r.add(id, schema.Inode{})
	}
	for id := layout.FileID(1); id <= maxRemoved+more; id++ {
		if _, ok := r.find(id); ok != (id > more) {
			t.Fatalf("inode %d: remembered %v", id, ok)
		}
	}
	if len(r.rows) != maxRemoved || len(r.order) != maxRemoved {
		t.Errorf("%d rows, %d in order", len(r.rows), len(r.order))
	}
	if r.swap(1, schema.Inode{UID: 1}, schema.Inode{}) || r.swap(more+1, schema.Inode{UID: 9}, schema.Inode{}) ||
		!r.swap(more+1, schema.Inode{UID: 1}, schema.Inode{UID: 2}) {
		t.Error("swap does not go by the row")
	}
}
