package meta

import (
	"bytes"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

// TestErrnos walks a table of calls and what they answer, each on the tree that the earlier ones left.
func TestErrnos(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	const root = layout.RootID
	dir := c.mkdir(root, "dir")
	full := c.mkdir(root, "full")
	inner := c.mkdir(full, "inner")
	file := c.touch(root, "file")
	other := c.touch(root, "other")
	lnk := must[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: root, Name: "lnk", Mode: syscall.S_IFLNK | 0o777, Target: "file"}).Attr.ID
	gone := c.touch(root, "gone")
	c.remove(root, "gone")
	goneDir := c.mkdir(root, "gonedir")
	must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "gonedir", Dir: true})

	rename := func(op layout.FileID, on string, np layout.FileID, nn string, flags uint32) *metarpc.RenameArgs {
		return &metarpc.RenameArgs{OldParent: op, OldName: on, NewParent: np, NewName: nn, Flags: flags}
	}
	xattr := func(id layout.FileID, name, value string, flags uint32) *metarpc.XattrArgs {
		return &metarpc.XattrArgs{ID: id, Name: name, Value: []byte(value), Flags: flags}
	}
	node := func(parent layout.FileID, name string, mode uint32) *metarpc.MakeNodeArgs {
		return &metarpc.MakeNodeArgs{Parent: parent, Name: name, Mode: mode}
	}
	long := strings.Repeat("x", metarpc.MaxName+1)
	for i, row := range []struct {
		op   metarpc.Op
		args any
		want syscall.Errno
	}{
		{metarpc.OpGetAttr, &metarpc.IDArgs{ID: file}, 0},
		{metarpc.OpGetAttr, &metarpc.IDArgs{ID: gone}, 0}, // remembered
		{metarpc.OpGetAttr, &metarpc.IDArgs{ID: 999999}, syscall.ESTALE},
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: root, Name: "file"}, 0},
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: root, Name: "none"}, 0}, // with an answer that says so
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: file, Name: "none"}, syscall.ENOTDIR},
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: goneDir, Name: "none"}, syscall.ENOENT},
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: root, Name: long}, syscall.ENAMETOOLONG},
		{metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: gone, Mask: metarpc.SetMode, Mode: 0o644}, 0},
		{metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: dir, Mask: metarpc.SetSize}, syscall.EISDIR},
		{metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: lnk, Mask: metarpc.SetSize}, syscall.EINVAL},
		{metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: gone, Mask: metarpc.SetSize}, syscall.ESTALE},

		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: root, Name: "file", Exclusive: true}, syscall.EEXIST},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: root, Name: "file"}, 0},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: root, Name: "dir"}, syscall.EISDIR},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: root, Name: "lnk"}, syscall.EEXIST},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: file, Name: "x"}, syscall.ENOTDIR},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: goneDir, Name: "x"}, syscall.ENOENT},
		{metarpc.OpMakeNode, node(root, "dir", syscall.S_IFDIR), syscall.EEXIST},
		{metarpc.OpMakeNode, node(file, "x", syscall.S_IFDIR), syscall.ENOTDIR},
		{metarpc.OpMakeNode, node(goneDir, "x", syscall.S_IFIFO), syscall.ENOENT},

		{metarpc.OpLink, &metarpc.LinkArgs{ID: dir, Parent: root, Name: "x"}, syscall.EPERM},
		{metarpc.OpLink, &metarpc.LinkArgs{ID: file, Parent: root, Name: "other"}, syscall.EEXIST},
		{metarpc.OpLink, &metarpc.LinkArgs{ID: gone, Parent: root, Name: "x"}, syscall.ESTALE},
		{metarpc.OpLink, &metarpc.LinkArgs{ID: file, Parent: other, Name: "x"}, syscall.ENOTDIR},
		{metarpc.OpLink, &metarpc.LinkArgs{ID: file, Parent: dir, Name: "hard"}, 0},

		{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "none"}, syscall.ENOENT},
		{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "dir"}, syscall.EISDIR},
		{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "file", Dir: true}, syscall.ENOTDIR},
		{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "full", Dir: true}, syscall.ENOTEMPTY},
		{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: file, Name: "x"}, syscall.ENOTDIR},

		{metarpc.OpRename, rename(root, "none", root, "x", 0), syscall.ENOENT},
		{metarpc.OpRename, rename(root, "file", goneDir, "x", 0), syscall.ENOENT},
		{metarpc.OpRename, rename(root, "file", other, "x", 0), syscall.ENOTDIR},
		{metarpc.OpRename, rename(root, "file", root, "dir", 0), syscall.EISDIR},
		{metarpc.OpRename, rename(root, "dir", root, "file", 0), syscall.ENOTDIR},
		{metarpc.OpRename, rename(root, "dir", root, "full", 0), syscall.ENOTEMPTY},
		{metarpc.OpRename, rename(full, "inner", root, "full", 0), syscall.ENOTEMPTY},
		{metarpc.OpRename, rename(root, "full", full, "x", 0), syscall.EINVAL},
		{metarpc.OpRename, rename(root, "full", inner, "x", 0), syscall.EINVAL},
		{metarpc.OpRename, rename(root, "file", root, "other", metarpc.RenameNoReplace), syscall.EEXIST},
		{metarpc.OpRename, rename(root, "file", dir, "hard", metarpc.RenameNoReplace), syscall.EEXIST},
		{metarpc.OpRename, rename(root, "file", dir, "hard", 0), 0}, // two names of one inode: nothing happens
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: root, Name: "file"}, 0},
		{metarpc.OpRename, rename(root, "file", root, "none", metarpc.RenameExchange), syscall.ENOENT},
		{metarpc.OpRename, rename(root, "full", inner, "none", metarpc.RenameExchange), syscall.ENOENT},
		{metarpc.OpRename, rename(full, "inner", root, "full", metarpc.RenameExchange), syscall.EINVAL},
		{metarpc.OpRename, rename(root, "full", full, "inner", metarpc.RenameExchange), syscall.EINVAL},
		{metarpc.OpRename, rename(root, "file", full, "inner", metarpc.RenameExchange), 0},
		{metarpc.OpLookup, &metarpc.NameArgs{Parent: inner, Name: "x"}, 0}, // still a directory
		{metarpc.OpRename, rename(root, "file", full, "inner", metarpc.RenameExchange), 0},
		{metarpc.OpRename, rename(root, "full", root, "file", 99), syscall.EINVAL},

		{metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: file, Limit: 1}, syscall.ENOTDIR},
		{metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: goneDir, Limit: 1}, syscall.ENOENT},
		{metarpc.OpReadLink, &metarpc.IDArgs{ID: lnk}, 0},
		{metarpc.OpReadLink, &metarpc.IDArgs{ID: file}, syscall.EINVAL},

		{metarpc.OpGetXattr, xattr(file, "user.a", "", 0), syscall.ENODATA},
		{metarpc.OpGetXattr, xattr(gone, "user.a", "", 0), syscall.ENODATA},
		{metarpc.OpSetXattr, xattr(file, "user.a", "1", metarpc.XattrReplace), syscall.ENODATA},
		{metarpc.OpSetXattr, xattr(file, "user.a", "1", metarpc.XattrCreate), 0},
		{metarpc.OpSetXattr, xattr(file, "user.a", "1", metarpc.XattrCreate), syscall.EEXIST},
		{metarpc.OpSetXattr, xattr(file, "user.a", "2", metarpc.XattrReplace), 0},
		{metarpc.OpSetXattr, xattr(gone, "user.a", "2", 0), syscall.ESTALE},
		{metarpc.OpSetXattr, xattr(file, "user.b", strings.Repeat("v", metarpc.MaxXattr+1), 0), syscall.E2BIG},
		{metarpc.OpSetXattr, xattr(file, "user.b", strings.Repeat("v", metarpc.MaxXattr), 0), 0},
		{metarpc.OpRemoveXattr, xattr(file, "user.b", "", 0), 0},
		{metarpc.OpRemoveXattr, xattr(file, "user.b", "", 0), syscall.ENODATA},
		{metarpc.OpListXattr, &metarpc.IDArgs{ID: gone}, 0},
		{metarpc.OpSetXattr, xattr(dir, "weft.layout", "stripe_count=0", 0), syscall.EINVAL},
		{metarpc.OpSetXattr, xattr(dir, "weft.layout", "colour=blue", 0), syscall.EINVAL},
		{metarpc.OpSetXattr, xattr(dir, "weft.layout", "min_copies=2", 0), syscall.EINVAL}, // files have one copy
		{metarpc.OpSetXattr, xattr(dir, "weft.layout", "mirrors=2 min_copies=2", 0), 0},
		{metarpc.OpSetXattr, xattr(dir, "weft.layout", "min_copies=1", 0), 0},
		{metarpc.OpSetXattr, xattr(file, "weft.layout", "stripe_count=1", 0), syscall.EINVAL},
		{metarpc.OpGetXattr, xattr(lnk, "weft.layout", "", 0), syscall.ENODATA},

		{metarpc.OpOpen, &metarpc.OpenArgs{ID: dir}, syscall.EISDIR},
		{metarpc.OpOpen, &metarpc.OpenArgs{ID: lnk}, syscall.EINVAL},
		{metarpc.OpOpen, &metarpc.OpenArgs{ID: gone}, syscall.ESTALE},
		{metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: gone, IOMode: layout.IOModeRW, Len: 1}, syscall.ESTALE},
		{metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: dir, IOMode: layout.IOModeRead, Len: 1}, syscall.EISDIR},
		{metarpc.OpDescribeLayout, &metarpc.IDArgs{ID: dir}, syscall.EISDIR},
		{metarpc.OpDescribeLayout, &metarpc.IDArgs{ID: file}, 0},
		{metarpc.OpRemoveDevice, &metarpc.RemoveDeviceArgs{Lost: true}, syscall.EPERM},
		{metarpc.OpAddDevice, &metarpc.AddDeviceArgs{URL: "nfs://127.0.0.1:2049/a"}, syscall.EPERM},
		{metarpc.OpAddDevice, &metarpc.AddDeviceArgs{URL: "nfs://nowhere:1/x"}, syscall.ECONNREFUSED},
		{metarpc.OpAddDevice, &metarpc.AddDeviceArgs{URL: "nfs://127.0.0.1:2049/a"}, 0},
		{metarpc.OpRemoveDevice, &metarpc.RemoveDeviceArgs{}, syscall.EBUSY},
		{metarpc.OpRemoveDevice, &metarpc.RemoveDeviceArgs{Lost: true}, 0},
	} {
		result := row.op.NewResult()
		if row.op == metarpc.OpAddDevice && row.want != syscall.EPERM {
			c.cred = metarpc.Cred{}
		}
		hdr, ch := c.begin(row.op, row.args)
		err := c.finish(hdr, ch, result)
		want := metarpc.Status(row.want)
		if a, ok := row.args.(*metarpc.RenameArgs); ok && a.Flags > metarpc.RenameExchange {
			want = metarpc.StatusBadArgs
		}
		if got := statusOf(err); got != want {
			t.Errorf("row %d: %v %+v: %v, want %v", i, row.op, row.args, err, want)
		}
	}
	c.closeFile(file)
	checkCatalog(t, h.engine)
}

// A directory gets min_copies when the catalog has the format for that, which it gets once all services know it.
func TestMinCopiesFormat(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	c := h.client()
	dir := c.mkdir(layout.RootID, "d")
	member := schema.MemberKey([16]byte{1})
	put(t, h, member, schema.Encode(&schema.Member{Address: "old:7049", Format: schema.FormatCopies - 1}))
	set := func(policy string) error {
		_, err := ask[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: dir, Name: xattrLayout, Value: []byte(policy)})
		return err
	}
	format := func() int {
		vol, err := readVolume(t.Context(), engine)
		if err != nil {
			t.Fatal(err)
		}
		return vol.Format
	}
	if err := set("mirrors=2"); err != nil {
		t.Errorf("what all know: %v", err)
	}
	err := set("mirrors=2 min_copies=2")
	wantStatus(t, err, metarpc.Status(syscall.EOPNOTSUPP))
	if err == nil || !strings.Contains(err.Error(), "the metadata service at old:7049 () does not know format 9") {
		t.Errorf("it says %v", err)
	}
	if row, _, err := h.svc.inode(t.Context(), dir); err != nil || row.Policy.MinCopies != 0 || format() != schema.Format {
		t.Errorf("%+v, format %d, %v", row.Policy, format(), err)
	}
	var b catalog.Batch
	b.Delete(member)
	if err := engine.Commit(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	raised := 0
	engine.hook(func(b *catalog.Batch) error {
		for _, row := range b.Puts {
			if row.Key[0] == schema.KeyVolume[0] {
				raised++
			} else if bytes.Equal(row.Key, schema.InodeKey(dir)) && raised != 1 {
				t.Errorf("the row of the directory is put after the format was raised %d times", raised)
			}
		}
		return nil
	})
	for range 2 {
		if err := set("mirrors=2 min_copies=2"); err != nil {
			t.Fatal(err)
		}
	}
	engine.hook(nil)
	if row, _, err := h.svc.inode(t.Context(), dir); err != nil || row.Policy.MinCopies != 2 || format() != schema.FormatCopies || raised != 1 {
		t.Errorf("%+v, format %d, raised %d times, %v", row.Policy, format(), raised, err)
	}
	checkCatalog(t, h.engine)
}

func TestLinkLimit(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.touch(layout.RootID, "f")
	row, _, err := h.svc.inode(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	row.Nlink = maxLinks - 1
	put(t, h, schema.InodeKey(id), schema.Encode(&row))
	must[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: layout.RootID, Name: "g"})
	_, err = ask[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: layout.RootID, Name: "h"})
	wantStatus(t, err, metarpc.Status(syscall.EMLINK))
}

func TestXattrs(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.touch(layout.RootID, "f")
	names := map[string]bool{}
	for i := range maxXattrs {
		name := fmt.Sprintf("user.%d\xff", i)
		names[name] = true
		must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: name, Value: []byte(name)})
	}
	_, err := ask[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: "user.more"})
	wantStatus(t, err, metarpc.Status(syscall.ENOSPC))
	listed := must[metarpc.NamesResult](c, metarpc.OpListXattr, &metarpc.IDArgs{ID: id}).Names
	if len(listed) != len(names) {
		t.Errorf("%d names listed, want %d", len(listed), len(names))
	}
	for _, name := range listed {
		v := must[metarpc.BytesResult](c, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: id, Name: name}).Value
		if string(v) != name || !names[name] {
			t.Errorf("attribute %q is %q", name, v)
		}
	}
	must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: listed[0]}) // empty value
	if v := must[metarpc.BytesResult](c, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: id, Name: listed[0]}).Value; len(v) != 0 {
		t.Errorf("attribute is %q, want nothing", v)
	}
	checkCatalog(t, h.engine)
	c.remove(layout.RootID, "f")
	checkCatalog(t, h.engine)
}

// TestLayoutPolicy follows a policy from the volume through directories to files.
func TestLayoutPolicy(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	policy := func(id layout.FileID) string {
		t.Helper()
		return string(must[metarpc.BytesResult](c, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: id, Name: xattrLayout}).Value)
	}
	set := func(id layout.FileID, value string) {
		t.Helper()
		must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: xattrLayout, Value: []byte(value)})
	}
	volume := fmt.Sprintf("stripe_unit=%d stripe_count=2 mirrors=1", testUnit)
	a := c.mkdir(layout.RootID, "a")
	early := c.touch(a, "early")
	set(a, "stripe_count=3")
	below := c.mkdir(a, "below")
	file := c.touch(below, "file")
	changed := fmt.Sprintf("stripe_unit=%d stripe_count=3 mirrors=1", testUnit)
	for id, want := range map[layout.FileID]string{layout.RootID: volume, early: volume, a: changed, below: changed, file: changed} {
		if got := policy(id); got != want {
			t.Errorf("policy of %d is %q, want %q", id, got, want)
		}
	}
	if _, err := c.layout(file, 0, 1); err != nil {
		t.Fatal(err)
	}
	set(below, "mirrors=2")
	if got := policy(file); got != changed {
		t.Errorf("policy of a file with data is %q, want %q", got, changed)
	}
	must[metarpc.Empty](c, metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: a, Name: xattrLayout})
	if got := policy(a); got != volume {
		t.Errorf("policy after removal is %q, want %q", got, volume)
	}
	if names := must[metarpc.NamesResult](c, metarpc.OpListXattr, &metarpc.IDArgs{ID: a}).Names; len(names) != 0 {
		t.Errorf("listed: %q", names)
	}
}

func TestSetGID(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	c.cred.Groups = []uint32{55}
	dir := c.mkdir(layout.RootID, "d")
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{
		ID: dir, Mask: metarpc.SetMode | metarpc.SetGID, Mode: 0o2775, GID: 55,
	})
	if a := c.attr(c.touch(dir, "f")); a.UID != 7 || a.GID != 55 || a.Mode != syscall.S_IFREG|0o644 {
		t.Errorf("file: %+v", a)
	}
	if a := c.attr(c.mkdir(dir, "s")); a.GID != 55 || a.Mode != syscall.S_IFDIR|0o2755 {
		t.Errorf("directory: %+v", a)
	}
	if a := c.attr(c.touch(layout.RootID, "f")); a.GID != 8 {
		t.Errorf("file elsewhere: %+v", a)
	}
	f := c.touch(layout.RootID, "suid")
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode, Mode: 0o6755})
	c.cred = metarpc.Cred{}
	a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetUID, UID: 9}).Attr
	if a.Mode != syscall.S_IFREG|0o755 || a.UID != 9 {
		t.Errorf("after chown: %+v", a)
	}
}

// TestTimes checks which call moves which time.
func TestTimes(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	const root = layout.RootID
	dir := c.mkdir(root, "d")
	file := c.touch(dir, "f")
	type times struct{ mtime, ctime bool }
	step := func(what string, id layout.FileID, want times, do func()) {
		t.Helper()
		before := c.attr(id)
		time.Sleep(time.Microsecond)
		do()
		after := c.attr(id)
		got := times{after.Mtime > before.Mtime, after.Ctime > before.Ctime}
		if got != want || after.Mtime < before.Mtime || after.Ctime < before.Ctime || after.Atime != before.Atime {
			t.Errorf("%s: moved %+v, want %+v", what, got, want)
		}
	}
	both, change, none := times{true, true}, times{false, true}, times{}
	step("create in a directory", dir, both, func() { c.touch(dir, "g") })
	step("create in a directory, its parent", root, none, func() { c.touch(dir, "h") })
	step("remove from a directory", dir, both, func() { c.remove(dir, "h") })
	step("link", file, change, func() {
		must[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: file, Parent: root, Name: "hard"})
	})
	step("unlink", file, change, func() { c.remove(root, "hard") })
	step("rename", file, change, func() {
		must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: "f", NewParent: dir, NewName: "f2"})
	})
	step("chmod", file, change, func() {
		must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: file, Mask: metarpc.SetMode, Mode: 0o600})
	})
	step("truncate", file, both, func() {
		must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: file, Mask: metarpc.SetSize, Size: 10})
	})
	step("setxattr", file, change, func() {
		must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: file, Name: "user.a"})
	})
	step("lookup", dir, none, func() { must[metarpc.LookupResult](c, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "f2"}) })

	// A time set by hand stays, in the past too, until the next change.
	for _, id := range []layout.FileID{dir, file} {
		a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{
			ID: id, Mask: metarpc.SetMtime | metarpc.SetAtime, Mtime: 12345, Atime: 6789,
		}).Attr
		if b := c.attr(id); a != b || a.Mtime != 12345 || a.Atime != 6789 {
			t.Errorf("inode %d: set %+v, is %+v", id, a, b)
		}
	}
	c.touch(dir, "i")
	if a := c.attr(dir); a.Mtime < a.Btime {
		t.Errorf("mtime %d after a change", a.Mtime)
	}
	a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: file, Mask: metarpc.SetMtimeNow}).Attr
	if a.Mtime < a.Btime || a.Mtime != a.Ctime {
		t.Errorf("mtime now: %+v", a)
	}
}

func TestCountsAndStatus(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	d := c.mkdir(layout.RootID, "d")
	c.mkdir(d, "e")
	f := c.create(d, "f")
	if a := c.attr(d); a.Nlink != 3 || a.Size != 2 {
		t.Errorf("directory: %+v", a)
	}
	if a := c.attr(layout.RootID); a.Nlink != 3 || a.Mode != syscall.S_IFDIR|0o755 {
		t.Errorf("root: %+v", a)
	}
	if _, err := c.layout(f, 0, 1); err != nil {
		t.Fatal(err)
	}
	sf := must[metarpc.StatFSResult](c, metarpc.OpStatFS, &metarpc.IDArgs{ID: f})
	if sf != (metarpc.StatFSResult{Total: 1000, Free: 500, Avail: 400, Files: 4}) {
		t.Errorf("statfs: %+v", sf)
	}
	st := must[metarpc.StatusResult](c, metarpc.OpStatus, &metarpc.Empty{})
	if st.Program != "weftd test" || st.Grace || len(st.Sessions) != 1 || st.Sessions[0].Opens != 1 || st.Sessions[0].Layouts != 1 ||
		st.Sessions[0].Client != c.hello.Client || st.Sessions[0].Address == "" || time.Since(time.Unix(0, st.Sessions[0].Renewed)) > time.Minute {
		t.Errorf("status: %+v", st)
	}
	if dev := must[metarpc.DevicesResult](c, metarpc.OpDevices, &metarpc.Empty{}); len(dev.Devices) != 1 {
		t.Errorf("devices: %+v", dev)
	}
	must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
}

// TestOthersDevices: a client may have a layout which names a device that another service has added since this one looked.
func TestOthersDevices(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	h.files.mu.Lock()
	h.files.others = []metarpc.DeviceInfo{{Device: metarpc.Device{ID: layout.DeviceID{2}, Addrs: []string{"127.0.0.1:2050"}}}}
	h.files.mu.Unlock()
	if dev := must[metarpc.DevicesResult](c, metarpc.OpDevices, &metarpc.Empty{}); len(dev.Devices) != 2 || dev.Devices[1].Device.ID != (layout.DeviceID{2}) {
		t.Errorf("devices: %+v", dev)
	}
	h.files.mu.Lock()
	h.files.learnt = catalog.ErrCorrupt
	h.files.mu.Unlock()
	var r metarpc.DevicesResult
	hdr, ch := c.begin(metarpc.OpDevices, &metarpc.Empty{})
	if err := c.finish(hdr, ch, &r); statusOf(err) != metarpc.StatusInternal {
		t.Errorf("devices of which it is not known whether they are all: %+v, %v", r, err)
	}
}

// TestLayoutStats hands reports on, and has them forgotten with the session.
func TestLayoutStats(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	count := func(c *client) int {
		h.files.mu.Lock()
		defer h.files.mu.Unlock()
		return len(h.files.reports[c.welcome.Session])
	}
	report := &metarpc.LayoutStatsArgs{Span: 5, Devices: []metarpc.DeviceStats{{Outstanding: 1}, {Outstanding: 2}}}
	for _, c := range []*client{a, b} {
		must[metarpc.Empty](c, metarpc.OpLayoutStats, report)
	}
	if count(a) != 2 || count(b) != 2 {
		t.Errorf("reports of %d and %d devices, want 2 and 2", count(a), count(b))
	}
	must[metarpc.Empty](a, metarpc.OpEndSession, &metarpc.Empty{})
	waittest.Until(t, "the report is forgotten", func() bool { return count(a) == 0 })
	if count(b) != 2 {
		t.Error("another session's report is forgotten, too")
	}
}
