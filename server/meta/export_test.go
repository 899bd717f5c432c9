package meta

import (
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// TestExports is what a client sees of its rule.
func TestExports(t *testing.T) {
	h := startMemory(t)
	admin := h.client()
	admin.cred = metarpc.Cred{}
	must[metarpc.AttrResult](admin, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: layout.RootID, Mask: metarpc.SetMode, Mode: 0o777})
	f := admin.touch(layout.RootID, "f")
	rule := func(s string) *client {
		h.svc.cfg.Exports = admit.Rules{mustExport(t, s)}
		c := h.client()
		c.cred = metarpc.Cred{}
		return c
	}
	c := rule("127.0.0.1(rw)")
	if a := c.attr(c.create(layout.RootID, "squashed")); a.UID != 65534 || a.GID != 65534 {
		t.Errorf("%+v", a)
	}
	_, err := ask[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessWrite})
	wantStatus(t, err, metarpc.Status(syscall.EACCES))
	c = rule("127.0.0.0/8(ro,no_root_squash)")
	for _, call := range []struct {
		op   metarpc.Op
		args any
		want syscall.Errno
	}{
		{metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead}, 0},
		{metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessWrite}, syscall.EROFS},
		{metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRead, Len: 1}, 0},
		{metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true}, 0},
		{metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1}, syscall.EBADF},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: "new"}, syscall.EROFS},
		{metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: "f", Exclusive: true}, syscall.EEXIST},
		{metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: layout.RootID}, syscall.EROFS},
		{metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "new", Mode: syscall.S_IFDIR}, syscall.EROFS},
		{metarpc.OpLink, &metarpc.LinkArgs{ID: f, Parent: layout.RootID, Name: "new"}, syscall.EROFS},
		{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "none"}, syscall.EROFS},
		{metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "none", NewParent: layout.RootID, NewName: "x"}, syscall.EROFS},
		{metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetAtimeNow}, syscall.EROFS},
		{metarpc.OpSetAttr, setSize(f, 1), syscall.EROFS},
		{metarpc.OpSetXattr, &metarpc.XattrArgs{ID: f, Name: "user.a"}, syscall.EROFS},
		{metarpc.OpSetXattr, &metarpc.XattrArgs{ID: f, Name: schema.XattrACL}, syscall.EROFS},
		{metarpc.OpSetXattr, &metarpc.XattrArgs{ID: layout.RootID, Name: xattrLayout, Value: []byte("mirrors=2")}, syscall.EROFS},
		{metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: f, Name: "user.a"}, syscall.EROFS},
	} {
		hdr, ch := c.begin(call.op, call.args)
		if err := c.finish(hdr, ch, call.op.NewResult()); statusOf(err) != metarpc.Status(call.want) {
			t.Errorf("%v %+v: %v, want %v", call.op, call.args, err, call.want)
		}
	}
	h.svc.cfg.Exports = admit.Rules{mustExport(t, "10.0.0.0/8(rw)")}
	conn, w := h.newClient().greet()
	conn.Close()
	if w.Status != metarpc.Status(syscall.EACCES) || !strings.Contains(w.Message, "127.0.0.1") {
		t.Errorf("a client without a rule: %v %q", w.Status, w.Message)
	}
}

// TestOpenDecides checks what a session may do because of what it has open, whatever the modes say by now.
func TestOpenDecides(t *testing.T) {
	h := startMemory(t)
	c, other := h.client(), h.client()
	id := c.create(layout.RootID, "f")
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: 0o6711})
	for _, c := range []*client{c, other} {
		c.cred = metarpc.Cred{UID: 100, GID: 100}
	}
	open := func(access metarpc.Access) error {
		_, err := ask[metarpc.AttrResult](other, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: access})
		return err
	}
	layoutOf := func(mode layout.IOMode) error {
		_, err := ask[metarpc.LayoutResult](other, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: mode, Len: 1})
		return err
	}
	setAttr := func(c *client, mask metarpc.AttrMask, open bool) error {
		_, err := ask[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: mask, Size: 5, Open: open})
		return err
	}
	const eacces, ebadf = metarpc.Status(syscall.EACCES), metarpc.Status(syscall.EBADF)
	wantStatus(t, layoutOf(layout.IOModeRead), ebadf)
	wantStatus(t, open(metarpc.AccessRead), eacces)
	wantStatus(t, layoutOf(layout.IOModeRead), ebadf)
	wantStatus(t, open(metarpc.AccessExec), 0)
	wantStatus(t, layoutOf(layout.IOModeRead), 0)
	wantStatus(t, layoutOf(layout.IOModeRW), ebadf)
	wantStatus(t, setAttr(other, metarpc.SetSize, true), eacces) // not for writing
	wantStatus(t, setAttr(c, metarpc.SetSize, false), eacces)
	wantStatus(t, setAttr(other, metarpc.ClearPrivileges, true), eacces)
	if a := other.report(true, metarpc.SizeReport{ID: id, End: 100, Mtime: 5})[0]; a.Size != 0 || a.Mtime == 5 {
		t.Errorf("who cannot have written reports: %+v", a)
	}
	wantStatus(t, setAttr(c, metarpc.ClearPrivileges, true), metarpc.Status(syscall.ETXTBSY)) // other executes it
	wantStatus(t, setAttr(c, metarpc.SetSize, true), metarpc.Status(syscall.ETXTBSY))
	other.closeFile(id)
	before := c.attr(id)
	wantStatus(t, setAttr(c, metarpc.ClearPrivileges, true), 0)
	if a := c.attr(id); a.Mode != syscall.S_IFREG|0o711 || a.Ctime != before.Ctime {
		t.Errorf("%+v, before %+v", a, before)
	}
	wantStatus(t, setAttr(c, metarpc.SetSize, true), 0)
	wantStatus(t, layoutOf(layout.IOModeRead), ebadf)
	// After a restart nobody is asked again.
	h.restart()
	other.connect()
	wantStatus(t, layoutOf(layout.IOModeRW), metarpc.StatusGrace) // it may be open, and not be reclaimed yet
	other.cred = metarpc.Cred{}
	must[metarpc.AttrResult](other, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true})
	other.cred = metarpc.Cred{UID: 100, GID: 100}
	wantStatus(t, layoutOf(layout.IOModeRead), 0)
}

// TestTmpFile gives files without names one, or not.
func TestTmpFile(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	c, x := h.client(), h.client()
	tmp := func() layout.FileID {
		t.Helper()
		r := must[metarpc.CreateResult](c, metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: layout.RootID, Mode: 0o666, Umask: 0o22})
		if r.Attr.Nlink != 0 || r.Attr.Mode != syscall.S_IFREG|0o644 || !r.Created {
			t.Errorf("%+v", r)
		}
		return r.Attr.ID
	}
	link := func(c *client, id layout.FileID, name string) error {
		_, err := ask[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: layout.RootID, Name: name})
		return err
	}
	orphans := func() int64 { return countRows(t.Context(), h.engine, schema.PrefixOrphan) }

	root := c.attr(layout.RootID)
	gone, named := tmp(), tmp()
	if a := c.attr(layout.RootID); a != root {
		t.Errorf("the directory changed: %+v", a)
	}
	if _, err := c.layout(named, 0, 1); err != nil {
		t.Error(err)
	}
	checkCatalog(t, h.engine)
	c.closeFile(gone)
	wantStatus(t, link(c, gone, "late"), metarpc.Status(syscall.ESTALE))
	wantStatus(t, link(c, named, "named"), 0)
	if n := orphans(); n != 0 {
		t.Errorf("%d orphans", n)
	}
	wantStatus(t, link(c, named, "again"), 0)
	c.closeFile(named)
	if a := x.attr(named); a.Nlink != 2 {
		t.Errorf("%+v", a)
	}
	// What has lost its names gets no new one.
	c.open(named)
	x.remove(layout.RootID, "named")
	x.remove(layout.RootID, "again")
	wantStatus(t, link(c, named, "back"), metarpc.Status(syscall.ENOENT))
	c.closeFile(named)

	// A restart forgets nothing.
	kept := tmp()
	h.restart()
	c.connect()
	x.connect()
	must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: kept, Reclaim: true})
	for _, back := range []*client{c, x} {
		must[metarpc.Empty](back, metarpc.OpReclaimComplete, &metarpc.Empty{})
	}
	wantStatus(t, link(c, kept, "kept"), 0)
	c.closeFile(kept)
	checkCatalog(t, h.engine)

	// Closing and naming at the same time: one of them wins.
	for range 50 {
		id := tmp()
		hdr, ch := c.begin(metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{id}})
		err := link(x, id, "race")
		if err := c.finish(hdr, ch, new(metarpc.Empty)); err != nil {
			t.Error(err)
		}
		if err == nil {
			if a := x.attr(id); a.Nlink != 1 {
				t.Errorf("%+v", a)
			}
			x.remove(layout.RootID, "race")
		} else if s := statusOf(err); s != metarpc.Status(syscall.ESTALE) {
			t.Error(err)
		}
	}
	checkCatalog(t, h.engine)
}

func mustExport(t testing.TB, s string) admit.Export {
	t.Helper()
	e, err := admit.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return e
}
