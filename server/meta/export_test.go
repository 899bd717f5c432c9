package meta

import (
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog/memory"
	"github.com/weftfs/weft/server/schema"
)

func TestParseExport(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"10.0.0.0/8", "10.0.0.0/8(ro,root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
		{"10.1.2.3(rw)", "10.1.2.3/32(rw,root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
		{"*(rw,no_root_squash)", "*(rw,no_root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
		{"2001:db8::/32(rw,all_squash,anonuid=7,anongid=8)", "2001:db8::/32(rw,root_squash,all_squash,anonuid=7,anongid=8)"},
		{"cert:tr-*(rw,path=/a//b/../c/,uids=1-2+7,gids=5,ops=9)", "cert:tr-*(rw,root_squash,no_all_squash,anonuid=65534,anongid=65534,path=/a/c,uids=1-2+7-7,gids=5-5,ops=9)"},
		{"*(path=/)", "*(ro,root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
	} {
		e, err := ParseExport(c.in)
		if err != nil || e.String() != c.want {
			t.Errorf("%s: %v, %v", c.in, e, err)
		}
		if again, err := ParseExport(e.String()); err != nil || !reflect.DeepEqual(again, e) {
			t.Errorf("%s came back as %v, %v", e, again, err)
		}
	}
	for in, names := range map[string]string{
		"":                         `""`,
		"host(rw)":                 `"host"`,
		"10.0.0.1/8(rw)":           `10.0.0.0/8`,
		"10.0.0.0/33":              `"10.0.0.0/33"`,
		"*(rw":                     `"*(rw"`,
		"*()":                      `""`,
		"*(rw,sync)":               `"sync"`,
		"*(rw,anonuid=-1)":         `"-1"`,
		"cert:(rw)":                `"cert:(rw)"`,
		"cert:[(rw)":               `"cert:[(rw)"`,
		"*(path=a)":                `"path=a"`,
		"*(uids=)":                 `"uids="`,
		"*(uids=2-1)":              `"2-1"`,
		"*(gids=1-2-3)":            `"2-3"`,
		"*(ops=0)":                 `"ops=0"`,
		"*(rw,anongid=4294967295)": `"4294967295"`,
	} {
		if _, err := ParseExport(in); err == nil || !strings.Contains(err.Error(), names) {
			t.Errorf("%q: %v, want it to name %s", in, err, names)
		}
	}
}

func TestRuleFor(t *testing.T) {
	list := []Export{
		mustExport(t, "10.0.0.1"), mustExport(t, "10.0.0.0/8(rw)"), mustExport(t, "fd00::/8"), mustExport(t, "*"), mustExport(t, "cert:trainer-*"), mustExport(t, "cert:trainer-1(rw)"),
		mustExport(t, "cert:tr*"), mustExport(t, "10.1.0.0/16"),
	}
	slices.SortStableFunc(list, moreSpecific)
	for _, c := range []struct{ address, name, want string }{
		{"10.0.0.1:5", "", "10.0.0.1/32"}, {"10.2.3.4:5", "", "10.0.0.0/8"}, {"[::ffff:10.2.3.4]:5", "", "10.0.0.0/8"}, {"[fd00::1%eth0]:5", "", "fd00::/8"},
		{"10.1.2.3:5", "", "10.1.0.0/16"}, {"11.0.0.1:5", "", "*"}, {"elsewhere", "", "*"},
		{"10.0.0.1:5", "trainer-1", "cert:trainer-1"}, {"10.0.0.1:5", "trainer-12", "cert:trainer-*"}, {"10.0.0.1:5", "tr", "cert:tr*"}, {"10.0.0.1:5", "t", "10.0.0.1/32"},
	} {
		if e, ok := ruleFor(list, c.address, c.name); !ok || e.whose() != c.want {
			t.Errorf("%s %q: %v %t, want that of %s", c.address, c.name, e, ok, c.want)
		}
	}
	list = list[:len(list)-1]
	for _, address := range []string{"11.0.0.1:5", "elsewhere"} {
		if e, ok := ruleFor(list, address, "other"); ok {
			t.Errorf("%s: %v", address, e)
		}
	}
	if e, ok := ruleFor(nil, "1.2.3.4:5", ""); !ok || !reflect.DeepEqual(e, everybody) {
		t.Errorf("without rules: %v %t", e, ok)
	}
}

func mustExport(t testing.TB, s string) Export {
	t.Helper()
	e, err := ParseExport(s)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestCaller(t *testing.T) {
	groupsOf := func(uid uint32) []uint32 { return []uint32{uid + 1000} }
	for _, c := range []struct {
		rule string
		cred metarpc.Cred
		want perm.Caller
	}{
		{"*(rw,no_root_squash)", metarpc.Cred{}, perm.Caller{Privileged: true}},
		{"*(rw)", metarpc.Cred{Groups: []uint32{0, 5}}, perm.Caller{UID: 65534, GID: 65534, Groups: []uint32{65534, 5}}},
		{"*(rw,anonuid=3,anongid=4)", metarpc.Cred{UID: 9}, perm.Caller{UID: 9, GID: 4}},
		{"*(rw,all_squash,anonuid=3,anongid=4)", metarpc.Cred{UID: 9, GID: 8, Groups: []uint32{7}}, perm.Caller{UID: 3, GID: 4}},
		{"*(rw,uids=5-9+20,gids=8)", metarpc.Cred{UID: 9, GID: 7, Groups: []uint32{8, 10}}, perm.Caller{UID: 9, GID: 65534, Groups: []uint32{8}}},
		{"*(rw,uids=5-9+20,anonuid=3)", metarpc.Cred{UID: 10, GID: 8, Groups: []uint32{8}}, perm.Caller{UID: 3, GID: 65534}},
		{"*(rw,no_root_squash,uids=5)", metarpc.Cred{}, perm.Caller{UID: 65534, GID: 65534}},
		{"*(rw,uids=20)", metarpc.Cred{UID: 20, GID: 5, Groups: []uint32{8}}, perm.Caller{UID: 20, GID: 5, Groups: []uint32{8}}},
		{"*", metarpc.Cred{UID: 9, GID: 8, ByUID: true}, perm.Caller{UID: 9, GID: 8, Groups: []uint32{1009}, ReadOnly: true}},
	} {
		if got := mustExport(t, c.rule).caller(c.cred, groupsOf); !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s of %+v: %+v", c.rule, c.cred, *got)
		}
	}
}

func TestGroupCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		g := newGroupCache()
		g.lookUp = func(uid uint32) []uint32 {
			asked++
			return []uint32{uid, uint32(asked)}
		}
		for range 2 {
			if got := g.of(5); !reflect.DeepEqual(got, []uint32{5, 1}) {
				t.Errorf("%v", got)
			}
		}
		time.Sleep(groupsValidity)
		if got := g.of(5); !reflect.DeepEqual(got, []uint32{5, 2}) {
			t.Errorf("after a minute: %v", got)
		}
		for uid := range uint32(2 * groupsKept) {
			g.of(uid)
		}
		if len(g.users) > groupsKept {
			t.Errorf("%d users are remembered", len(g.users))
		}
	})
	if got := groupsOfUser(0); len(got) == 0 {
		t.Error("root has no groups")
	}
	if got := groupsOfUser(1<<32 - 2); got != nil {
		t.Errorf("somebody who does not exist has groups %v", got)
	}
}

// TestExports is what a client sees of its rule.
func TestExports(t *testing.T) {
	h := startMemory(t)
	admin := h.client()
	admin.cred = metarpc.Cred{}
	must[metarpc.AttrResult](admin, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: layout.RootID, Mask: metarpc.SetMode, Mode: 0o777})
	f := admin.touch(layout.RootID, "f")
	rule := func(s string) *client {
		h.svc.cfg.Exports = []Export{mustExport(t, s)}
		c := h.client()
		c.cred = metarpc.Cred{}
		return c
	}
	c := rule("127.0.0.1(rw)")
	if a := c.attr(c.create(layout.RootID, "squashed")); a.UID != nobodyID || a.GID != nobodyID {
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
	h.svc.cfg.Exports = []Export{mustExport(t, "10.0.0.0/8(rw)")}
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
	h := newHost(t, memory.New()).start()
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

// Whatever is a rule comes back from its text, and lets in whom it let in.
func FuzzParseExport(f *testing.F) {
	for _, s := range []string{
		"*", "10.0.0.0/8(rw)", "fd00::/8(ro,all_squash)", "cert:tr-*(rw,path=/a//b/../c/,uids=1-2+7,gids=5,ops=9,anonuid=3,anongid=4)", "cert:[a-z]?x", "::ffff:10.0.0.1(rw,no_root_squash)", "*()",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseExport(s)
		if err != nil {
			return
		}
		again, err := ParseExport(e.String())
		if err != nil || !reflect.DeepEqual(again, e) {
			t.Fatalf("%q is %+v, and %q is %+v, %v", s, e, e.String(), again, err)
		}
		if moreSpecific(e, again) != 0 {
			t.Errorf("%v comes before itself", e)
		}
		ruleFor([]Export{e}, "10.0.0.1:5", "trainer")
	})
}
