package metaclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func leaseTableOf(limit int) *leaseTable {
	l := newLeaseTable(limit)
	l.wake = func() {}
	return l
}

// Inode 1 is a directory in which "f" is inode 7.
func (l *leaseTable) tell(asked uint64) (attrs, names bool) {
	return l.looked(asked, 1, "f", &metarpc.LookupResult{Attr: metarpc.Attr{ID: 7, Size: 3}, Lease: metarpc.LeaseAttrs, Names: metarpc.LeaseNames})
}

// What makes an answer worthless that is on its way, and what does not.
func TestAnswersNotKept(t *testing.T) {
	both := metarpc.LeaseAttrs | metarpc.LeaseNames
	recall := func(id layout.FileID, lease metarpc.Lease) func(*leaseTable) {
		return func(l *leaseTable) { l.recall([]metarpc.LeaseItem{{ID: id, Lease: lease}}) }
	}
	change := func(end bool, ids []layout.FileID, names ...nameKey) func(*leaseTable) {
		return func(l *leaseTable) {
			if ch := l.begin(ids, false, names...); end {
				l.end(ch, nil)
			}
		}
	}
	meant := func(end bool, k nameKey) func(*leaseTable) {
		return func(l *leaseTable) {
			if ch, _, _ := l.meant(true, nil, k); end {
				l.end(ch, nil)
			}
		}
	}
	f, g := nameKey{1, "f"}, nameKey{1, "g"}
	for _, c := range []struct {
		name         string
		between      func(*leaseTable) // question and answer
		attrs, names bool              // are kept
	}{
		{"nothing", func(*leaseTable) {}, true, true},
		{"recall of the inode", recall(7, metarpc.LeaseAttrs), false, true},
		{"recall of names", recall(1, metarpc.LeaseNames), true, false},
		{"recall of the directory's attributes", recall(1, metarpc.LeaseAttrs), true, true},
		{"recall of contents", recall(7, metarpc.LeaseData), true, true},
		{"recall of another inode", recall(8, both), true, true},
		{"change of the inode under way", change(false, []layout.FileID{7}), false, true},
		{"change of the inode", change(true, []layout.FileID{7}), false, true},
		{"change of the directory", change(true, []layout.FileID{1}), true, true},
		{"change of the name under way", change(false, nil, f), true, false},
		{"change of the name", change(true, nil, f), true, false},
		{"change of another name", change(true, nil, g), true, true},
		{"same name in another directory", change(true, nil, nameKey{2, "f"}), true, true},
		{"change of who knows what under way", meant(false, g), false, true},
		{"change of who knows what", meant(true, g), false, false},
		{"reset", func(l *leaseTable) { l.clear() }, false, false},
		{"inode being given back", func(l *leaseTable) { l.answered(l.ask(), &metarpc.Attr{ID: 7}, metarpc.LeaseAttrs); l.shrink(0) }, false, true},
		{"directory being given back", func(l *leaseTable) {
			l.looked(l.ask(), 1, "x", &metarpc.LookupResult{Names: metarpc.LeaseNames})
			l.shrink(0)
		}, true, false},
		{"inode given back", func(l *leaseTable) {
			l.answered(l.ask(), &metarpc.Attr{ID: 7}, metarpc.LeaseAttrs)
			l.shrink(0)
			l.given(l.batch(10))
		}, false, true},
		{"directory given back", func(l *leaseTable) {
			l.looked(l.ask(), 1, "x", &metarpc.LookupResult{Names: metarpc.LeaseNames})
			l.shrink(0)
			l.given(l.batch(10))
		}, true, false},
		{"more recalls than there are marks for", func(l *leaseTable) {
			for id := range layout.FileID(maxMarks + 1) {
				l.recall([]metarpc.LeaseItem{{ID: 100 + id, Lease: metarpc.LeaseAttrs}})
			}
		}, false, false},
		{"more changes of names than there are marks for", func(l *leaseTable) {
			for i := range maxMarks + 1 {
				l.end(l.begin(nil, false, nameKey{1, fmt.Sprint(i)}), nil)
			}
		}, false, false},
	} {
		l := leaseTableOf(100)
		asked := l.ask()
		c.between(l)
		attrs, names := l.tell(asked)
		if attrs != c.attrs || names != c.names {
			t.Errorf("%s: attributes kept %t, want %t; name kept %t, want %t", c.name, attrs, c.attrs, names, c.names)
		}
		if _, ok := l.attrs(7); ok != c.attrs {
			t.Errorf("%s: attributes known %t", c.name, ok)
		}
		if _, attr, ok := l.lookup(1, "f"); (ok && attr.ID != 0) != (c.attrs && c.names) {
			t.Errorf("%s: name known %t", c.name, ok)
		}
		if len(l.marks) > maxMarks || len(l.nameMarks) > maxMarks {
			t.Errorf("%s: %d and %d marks", c.name, len(l.marks), len(l.nameMarks))
		}
		// What is asked afterwards is kept, unless something is still under way.
		if len(l.pending)+len(l.nameChanges)+len(l.giving)+l.unknown == 0 {
			if attrs, names := l.tell(l.ask()); !attrs || !names {
				t.Errorf("%s: nothing is kept any more", c.name)
			}
		}
	}
}

// What ends what is known, and what of it.
func TestKnownUntil(t *testing.T) {
	f, g := nameKey{1, "f"}, nameKey{1, "g"}
	for _, c := range []struct {
		name         string
		then         func(*leaseTable)
		attrs, child bool // are still known
	}{
		{"nothing", func(*leaseTable) {}, true, true},
		{"recall of the inode", func(l *leaseTable) { l.recall([]metarpc.LeaseItem{{ID: 7, Lease: metarpc.LeaseAttrs}}) }, false, true},
		{"recall of names", func(l *leaseTable) { l.recall([]metarpc.LeaseItem{{ID: 1, Lease: metarpc.LeaseNames}}) }, true, false},
		{"recall of contents", func(l *leaseTable) { l.recall([]metarpc.LeaseItem{{ID: 7, Lease: metarpc.LeaseData}}) }, true, true},
		{"change of the inode", func(l *leaseTable) { l.begin([]layout.FileID{7}, false) }, false, true},
		{"change of the name", func(l *leaseTable) { l.begin(nil, false, f) }, true, false},
		{"change of the name and what it means", func(l *leaseTable) { l.meant(false, nil, f) }, false, false},
		{"change of another name, whose inode is not known", func(l *leaseTable) { l.meant(true, nil, g) }, false, true},
		{"what a change means is recalled", func(l *leaseTable) {
			l.looked(l.ask(), 2, "h", &metarpc.LookupResult{Attr: metarpc.Attr{ID: 9}, Lease: metarpc.LeaseAttrs, Names: metarpc.LeaseNames})
			if _, children, ok := l.meant(false, nil, nameKey{2, "h"}); !ok || children[0] != 9 {
				t.Errorf("%v, %t", children, ok)
			}
			if _, ok := l.attrs(7); !ok {
				t.Error("a change of another inode that is known")
			}
			l.recall([]metarpc.LeaseItem{{ID: 2, Lease: metarpc.LeaseNames}})
		}, false, true},
		{"two changes of what a name means", func(l *leaseTable) {
			l.looked(l.ask(), 2, "h", &metarpc.LookupResult{Names: metarpc.LeaseNames})
			l.meant(false, nil, nameKey{2, "h"})
			l.begin(nil, false, nameKey{2, "h"})
		}, false, true},
		{"reset", func(l *leaseTable) { l.clear() }, false, false},
		{"shrinking", func(l *leaseTable) { l.shrink(0) }, false, false},
	} {
		l := leaseTableOf(100)
		l.tell(l.ask())
		c.then(l)
		_, attrs := l.attrs(7)
		l.mu.Lock()
		_, name := l.child(1, "f")
		l.mu.Unlock()
		if attrs != c.attrs || name != c.child {
			t.Errorf("%s: attributes known %t, name known %t", c.name, attrs, name)
		}
	}
	// Without knowing what a name means a change is not begun, if that matters.
	l := leaseTableOf(100)
	if _, _, ok := l.meant(false, nil, f); !ok {
		t.Error("nothing is kept that could become wrong")
	}
	l = leaseTableOf(100)
	l.tell(l.ask())
	if _, _, ok := l.meant(false, nil, g); ok || len(l.changes)+len(l.nameChanges) != 0 {
		t.Error("a change of nobody knows what was begun")
	}
}

// What comes without a lease of its own is kept only under one that there was when the question was asked.
func TestKeptUnderEarlierLease(t *testing.T) {
	l := leaseTableOf(100)
	before := l.ask()
	l.tell(before)
	after := l.ask()
	for _, asked := range []uint64{before, after} {
		want := asked == after
		l.linked(asked, 7, "target")
		l.gotXattr(asked, 7, "user.a", []byte("v"))
		l.gotList(asked, 7, []string{"user.a"})
		if got := l.link(7) != ""; got != want {
			t.Errorf("target kept %t, want %t", got, want)
		}
		l.mu.Lock()
		e := l.find(7)
		if (len(e.values) > 0) != want || e.listed != want || (l.xattrs > 0) != want {
			t.Errorf("extended attributes kept %v, %t, %d bytes; want %t", e.values, e.listed, l.xattrs, want)
		}
		if got := l.keep(asked, &metarpc.Attr{ID: 7, Size: 4}, 0); got != want {
			t.Errorf("attributes kept %t, want %t", got, want)
		}
		if got := l.keepName(asked, 1, "x", 0, 0); got != want {
			t.Errorf("name kept %t, want %t", got, want)
		}
		if l.keep(asked, &metarpc.Attr{ID: 8}, 0) || l.keepName(asked, 2, "x", 0, 0) {
			t.Error("kept without a lease")
		}
		l.mu.Unlock()
	}
	if a, ok := l.attrs(7); !ok || a.Size != 4 {
		t.Errorf("%+v, %t", a, ok)
	}
	l.recall([]metarpc.LeaseItem{{ID: 7, Lease: metarpc.LeaseAttrs}})
	if l.xattrs != 0 {
		t.Errorf("%d bytes of nothing", l.xattrs)
	}
	// Much is not kept.
	l.tell(l.ask())
	l.gotXattr(l.ask(), 7, "user.a", make([]byte, xattrBytes))
	if _, ok := l.inodes[7].values["user.a"]; ok || l.xattrs != 0 {
		t.Error("a large value was kept")
	}
}

// Those used last stay, and what has no room is given back.
func TestLeaseLimit(t *testing.T) {
	l := leaseTableOf(4)
	woken := 0
	l.wake = func() { woken++ }
	for id := layout.FileID(10); id < 20; id++ {
		l.answered(l.ask(), &metarpc.Attr{ID: id}, metarpc.LeaseAttrs)
		l.attrs(10)
	}
	for id, want := range map[layout.FileID]bool{10: true, 16: false, 17: true, 19: true} {
		if _, ok := l.attrs(id); ok != want {
			t.Errorf("inode %d known %t", id, ok)
		}
	}
	items := l.batch(metarpc.MaxBatch)
	if len(items) != 6 || woken != 6 || items[0] != (metarpc.LeaseItem{ID: 11, Lease: metarpc.LeaseAttrs}) {
		t.Errorf("to be given back %v, woken %d times", items, woken)
	}
	l.given(items)
	for i := range 10 {
		l.looked(l.ask(), 1, fmt.Sprint(i), &metarpc.LookupResult{Names: metarpc.LeaseNames})
	}
	if inodes, names := l.len(); inodes != 4 || names != 4 {
		t.Errorf("%d inodes, %d names", inodes, names)
	}
	if _, _, ok := l.lookup(1, "9"); !ok {
		t.Error("the last name is not known")
	}
	if _, _, ok := l.lookup(1, "5"); ok {
		t.Error("there is no room for that name")
	}
	l.shrink(0)
	if inodes, names := l.len(); inodes != 0 || names != 0 || len(l.giving) != 5 { // directory 1 took the place of one
		t.Errorf("%d inodes, %d names, %d being given back", inodes, names, len(l.giving))
	}
}

// leaser is a service that gives leases on everything. Names are in directory 1, and mean themselves.
type leaser struct {
	flags atomic.Uint32 // of all inodes
	mu    sync.Mutex
	gone  map[string]bool
	back  []layout.FileID
	fail  metarpc.Status
}

func (s *leaser) handle(op metarpc.Op, args any) (metarpc.Status, any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != metarpc.StatusOK && op.Once() {
		return s.fail, nil
	}
	attr := func(id layout.FileID) metarpc.Attr {
		return metarpc.Attr{ID: id, Nlink: 1, Flags: metarpc.AttrFlags(s.flags.Load())}
	}
	of := func(id layout.FileID) (metarpc.Status, any) {
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: attr(id), Lease: metarpc.LeaseAttrs}
	}
	switch a := args.(type) {
	case *metarpc.IDArgs:
		switch op {
		case metarpc.OpReadLink:
			return metarpc.StatusOK, &metarpc.BytesResult{Value: []byte("target")}
		case metarpc.OpListXattr:
			return metarpc.StatusOK, &metarpc.NamesResult{Names: []string{"user.a", "trusted.b"}}
		}
		return of(a.ID)
	case *metarpc.OpenArgs:
		return of(a.ID)
	case *metarpc.SetAttrArgs:
		return of(a.ID)
	case *metarpc.NameArgs:
		r := &metarpc.LookupResult{Lease: metarpc.LeaseAttrs, Names: metarpc.LeaseNames}
		if !s.gone[a.Name] {
			r.Attr = attr(idOf(a.Name))
		}
		return metarpc.StatusOK, r
	case *metarpc.CreateArgs:
		delete(s.gone, a.Name)
		made := attr(idOf(a.Name))
		made.Btime = 1
		return metarpc.StatusOK, &metarpc.CreateResult{Attr: made, Created: true, Lease: metarpc.LeaseAttrs}
	case *metarpc.MakeNodeArgs:
		delete(s.gone, a.Name)
		made := attr(idOf(a.Name))
		made.Mode, made.Btime = a.Mode, 2
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: made, Lease: metarpc.LeaseAttrs | metarpc.LeaseNames}
	case *metarpc.RemoveArgs:
		return metarpc.StatusOK, &metarpc.RemoveResult{At: 3}
	case *metarpc.LinkArgs:
		return of(a.ID)
	case *metarpc.ReadDirArgs:
		r := &metarpc.ReadDirResult{EOF: true, Names: metarpc.LeaseNames}
		for i := range uint64(3) {
			name := fmt.Sprint(i)
			r.Entries = append(r.Entries, metarpc.DirEntry{Name: name, Cookie: 16 + i, Attr: attr(idOf(name)), Lease: metarpc.LeaseAttrs})
		}
		return metarpc.StatusOK, r
	case *metarpc.XattrArgs:
		if op == metarpc.OpGetXattr && a.Name == "user.none" {
			return metarpc.Status(syscall.ENODATA), nil
		}
		if op == metarpc.OpGetXattr {
			return metarpc.StatusOK, &metarpc.BytesResult{Value: []byte(a.Name)}
		}
	case *metarpc.LayoutCommitArgs:
		return metarpc.StatusOK, &metarpc.LayoutCommitResult{Attrs: []metarpc.Attr{attr(a.Reports[0].ID)}}
	case *metarpc.LeaseReturnArgs:
		s.back = append(s.back, a.IDs...)
	}
	return metarpc.StatusOK, nil
}

// asks is the number of calls of f, beside those of the janitors.
func asks(c *Client, f func()) (n int) {
	count := func() (n int) {
		for op, calls := range c.State().Calls {
			if op != metarpc.OpRenew && op != metarpc.OpLeaseReturn && op != metarpc.OpClose {
				n += int(calls)
			}
		}
		return n
	}
	before := count()
	f()
	return count() - before
}

// How many calls things need that are known, or not any more.
func TestCallsUnderLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := &leaser{gone: map[string]bool{"none": true, "new": true, "dir": true}}
		s.handle = l.handle
		c := connected(t, s, Config{})
		ctx, root, user := t.Context(), metarpc.Cred{}, metarpc.Cred{UID: 5}
		ok := func(a Answer, err error) {
			t.Helper()
			if err != nil || a.Keep <= 20*time.Second || a.Keep > 27*time.Second {
				t.Errorf("keep for %v, %v", a.Keep, err)
			}
		}
		entries := func(n int64) func() {
			return func() {
				t.Helper()
				if a, err := c.GetAttr(ctx, 1); err != nil || a.Attr.Size != n || a.Attr.Mtime != n || a.Attr.Nlink != uint32(n) {
					t.Errorf("a directory of %d: %+v, %v", n, a.Attr, err)
				}
			}
		}
		lookup := func(name string, there bool) func() {
			return func() {
				t.Helper()
				a, err := c.Lookup(ctx, root, 1, name)
				if there == errors.Is(err, errNoName) || a.KeepName <= 20*time.Second || there && a.Attr.ID != idOf(name) {
					t.Errorf("%s: inode %d, keep for %v, %v", name, a.Attr.ID, a.KeepName, err)
				}
			}
		}
		xattr := func(cred metarpc.Cred, name, want string, errno syscall.Errno) func() {
			return func() {
				t.Helper()
				v, err := c.GetXattr(ctx, cred, 7, name)
				if string(v) != want || errno != 0 && !isStatus(err, errno) || errno == 0 && err != nil {
					t.Errorf("%s: %q, %v", name, v, err)
				}
			}
		}
		list := func(cred metarpc.Cred, want ...string) func() {
			return func() {
				t.Helper()
				if names, err := c.ListXattr(ctx, cred, 7); !slices.Equal(names, want) || err != nil {
					t.Errorf("list for %d: %q, %v", cred.UID, names, err)
				}
			}
		}
		flags := func(f metarpc.AttrFlags) func() {
			return func() {
				l.flags.Store(uint32(f))
				c.SetAttr(ctx, root, &metarpc.SetAttrArgs{ID: 7})
			}
		}
		for i, step := range []struct {
			do   func()
			want int
		}{
			{func() { ok(c.GetAttr(ctx, 7)) }, 1},
			{func() { ok(c.GetAttr(ctx, 7)) }, 0},
			{func() { ok(c.SetAttr(ctx, root, &metarpc.SetAttrArgs{ID: 7})) }, 1},
			{func() { ok(c.GetAttr(ctx, 7)) }, 0},
			{func() { ok(c.Open(ctx, root, &metarpc.OpenArgs{ID: 8})) }, 1},
			{func() { ok(c.GetAttr(ctx, 8)) }, 0},
			{func() { c.LayoutCommit(ctx, []metarpc.SizeReport{{ID: 8}}, true) }, 1},
			{func() { ok(c.GetAttr(ctx, 8)) }, 0},
			{func() { c.Reserve(ctx, &metarpc.ReserveArgs{ID: 8, Len: 1}, func(metarpc.ReserveResult) {}) }, 1},
			{func() { c.LayoutCommit(ctx, []metarpc.SizeReport{{ID: 8}}, true) }, 1},
			{func() { ok(c.GetAttr(ctx, 8)) }, 1}, // the report was answered with a size in front of the place

			{lookup("a", true), 1},
			{lookup("a", true), 0},
			{func() { ok(c.GetAttr(ctx, idOf("a"))) }, 0},
			{lookup("none", false), 1},
			{lookup("none", false), 0},
			{func() { ok(c.GetAttr(ctx, 1)) }, 1},
			{func() { c.Create(ctx, root, &metarpc.CreateArgs{Parent: 1, Name: "new"}) }, 1},
			{lookup("new", true), 0},
			{lookup("a", true), 0},
			{entries(1), 0}, // the answer told
			{func() { c.MakeNode(ctx, root, &metarpc.MakeNodeArgs{Parent: 1, Name: "dir", Mode: syscall.S_IFDIR}) }, 1},
			{lookup("dir", true), 0},
			{entries(2), 0},
			{func() {
				if _, err := c.Lookup(ctx, root, idOf("dir"), "x"); !errors.Is(err, errNoName) { // it is empty
					t.Error(err)
				}
			}, 0},
			{func() { c.Create(ctx, root, &metarpc.CreateArgs{Parent: idOf("dir"), Name: "x"}) }, 1},
			{func() {
				if a, err := c.Lookup(ctx, root, idOf("dir"), "x"); err != nil || a.Attr.ID != idOf("x") {
					t.Errorf("x: %+v, %v", a, err)
				}
				if _, err := c.Lookup(ctx, root, idOf("dir"), "y"); !errors.Is(err, errNoName) {
					t.Error(err)
				}
			}, 0},
			{func() { c.Link(ctx, root, 7, 1, "link") }, 1},
			{func() {
				if a, err := c.Lookup(ctx, root, 1, "link"); err != nil || a.Attr.ID != 7 {
					t.Errorf("link: %+v, %v", a, err)
				}
			}, 0},
			{func() { c.Remove(ctx, root, 1, "a", false) }, 1},
			{lookup("a", false), 0},
			{func() { ok(c.GetAttr(ctx, idOf("a"))) }, 1},
			{func() { ok(c.GetAttr(ctx, 1)) }, 1},                  // which the link has changed
			{func() { c.Remove(ctx, root, 1, "other", false) }, 2}, // which inode changes is asked for
			{func() {
				c.Rename(ctx, root, &metarpc.RenameArgs{OldParent: 1, OldName: "new", NewParent: 1, NewName: "a"})
			}, 1},
			{lookup("new", false), 0},
			{func() {
				c.leases.mu.Lock()
				defer c.leases.mu.Unlock()
				if id, ok := c.leases.child(1, "a"); id != idOf("new") || !ok {
					t.Errorf("renamed: %d, %t", id, ok)
				}
			}, 0},
			{func() { c.ReadDir(ctx, root, 1, 0, 10) }, 1},
			{lookup("0", true), 0},
			{lookup("2", true), 0},
			{func() {
				flags := uint32(metarpc.RenameExchange)
				c.Rename(ctx, root, &metarpc.RenameArgs{OldParent: 1, OldName: "0", NewParent: 1, NewName: "2", Flags: flags})
			}, 1},
			{func() { ok(c.GetAttr(ctx, idOf("2"))) }, 1},
			{func() {
				if a, err := c.Lookup(ctx, root, 1, "0"); err != nil || a.Attr.ID != idOf("2") {
					t.Errorf("exchanged: %+v, %v", a, err)
				}
			}, 0},

			{func() { c.ReadLink(ctx, root, 7) }, 1},
			{func() {
				if target, err := c.ReadLink(ctx, root, 7); target != "target" || err != nil {
					t.Errorf("%q, %v", target, err)
				}
			}, 0},
			{xattr(root, "user.a", "", syscall.ENODATA), 0}, // attributes say so
			{list(root), 0},
			{flags(metarpc.AttrXattrs), 1},
			{xattr(root, "system.posix_acl_access", "", syscall.ENODATA), 0},
			{xattr(root, "system.posix_acl_default", "", syscall.ENODATA), 0},
			{xattr(root, "security.capability", "", syscall.ENODATA), 0},
			{xattr(user, "user.a", "user.a", 0), 1},
			{xattr(root, "user.a", "user.a", 0), 0},
			{xattr(root, "user.none", "", syscall.ENODATA), 1},
			{xattr(user, "user.none", "", syscall.ENODATA), 0},
			{xattr(root, "trusted.b", "trusted.b", 0), 1},
			{xattr(root, "trusted.b", "trusted.b", 0), 0},
			{xattr(user, "trusted.b", "", syscall.ENODATA), 0},
			{list(user, "user.a"), 1},
			{list(root, "user.a", "trusted.b"), 1},
			{list(root, "user.a", "trusted.b"), 0},
			{list(user, "user.a"), 0},
			{xattr(root, "weft.layout", "weft.layout", 0), 1},
			{xattr(root, "weft.layout", "weft.layout", 0), 1},
			{flags(metarpc.AttrXattrs | metarpc.AttrACL | metarpc.AttrDefaultACL | metarpc.AttrCapability), 1},
			{xattr(root, "system.posix_acl_access", "system.posix_acl_access", 0), 1},
			{xattr(root, "system.posix_acl_default", "system.posix_acl_default", 0), 1},
			{xattr(root, "security.capability", "security.capability", 0), 1},
			{xattr(root, "security.capability", "security.capability", 0), 0},
			{func() { c.SetXattr(ctx, root, 7, "user.a", nil, 0) }, 1},
			{xattr(root, "security.capability", "security.capability", 0), 1},
			{func() { c.RemoveXattr(ctx, root, 7, "user.a") }, 1},
			{xattr(root, "security.capability", "security.capability", 0), 1},
		} {
			if n := asks(c, step.do); n != step.want {
				t.Errorf("step %d: %d calls, want %d", i, n, step.want)
			}
		}
		if st := c.State(); st.Leases == 0 || st.Names == 0 || !st.Alive || st.Calls[metarpc.OpRename] != 2 {
			t.Errorf("%+v", st)
		}
	})
}

func (s *service) backCall(t *testing.T, h metarpc.BackHeader, args any) {
	b, err := metarpc.AppendCallBack(nil, metarpc.Version, h, args)
	if err != nil {
		t.Fatal(err)
	}
	s.send(b)
}

// A recall works at once, and is answered when the kernel has heard of it, one after the other for one inode.
func TestLeaseRecall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = (&leaser{}).handle
		told, heard := make(chan []metarpc.LeaseItem, 10), make(chan struct{})
		queried := make(chan []layout.FileID, 10)
		c := connected(t, s, Config{
			OnLeaseRecall: func(ctx context.Context, items []metarpc.LeaseItem) {
				told <- items
				<-heard
			},
			OnSizeQuery: func(ctx context.Context, ids []layout.FileID) {
				if _, err := c0(ctx); err != nil {
					t.Error(err)
				}
				queried <- ids
			},
		})
		c.GetAttr(t.Context(), 7)
		items := []metarpc.LeaseItem{{ID: 7, Lease: metarpc.LeaseAttrs | metarpc.LeaseData}}
		s.backCall(t, metarpc.BackHeader{Number: 1, Op: metarpc.BackLeaseRecall}, &metarpc.LeaseRecallArgs{Items: items})
		s.backCall(t, metarpc.BackHeader{Number: 2, Op: metarpc.BackLeaseRecall}, &metarpc.LeaseRecallArgs{Items: append(items, metarpc.LeaseItem{ID: 8, Lease: metarpc.LeaseAttrs})})
		synctest.Wait()
		if _, ok := c.CachedAttr(7); ok {
			t.Error("known after the recall")
		}
		if len(told) != 1 || len(s.backs) != 0 {
			t.Errorf("%d recalls told, %d answered", len(told), len(s.backs))
		}
		s.backCall(t, metarpc.BackHeader{Number: 3, Op: metarpc.BackSizeQuery}, &metarpc.SizeQueryArgs{IDs: []layout.FileID{7}})
		if ids := <-queried; ids[0] != 7 {
			t.Error(ids)
		}
		if b := <-s.backs; b.Number != 3 || b.Status != metarpc.StatusOK {
			t.Errorf("%+v", b)
		}
		heard <- struct{}{}
		if b := <-s.backs; b.Number != 1 || b.Status != metarpc.StatusOK || !slices.Equal(<-told, items) {
			t.Errorf("%+v", b)
		}
		synctest.Wait()
		if got := <-told; len(got) != 2 {
			t.Errorf("second recall of %v", got)
		}
		close(heard)
		if b := <-s.backs; b.Number != 2 {
			t.Errorf("%+v", b)
		}
		synctest.Wait()
		if len(c.recalling) != 0 {
			t.Error("recalls are still in line")
		}
	})
}

// A recall of places may wait for more than data servers: as long as it is under way the service hears of it.
func TestReserveRecall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		finished := make(chan struct{})
		c := connected(t, s, Config{
			OnReserveRecall: func(context.Context, layout.FileID, uint64) { <-finished },
			Waiting:         func() bool { return false },
		})
		c.GetAttr(t.Context(), 7)
		s.backCall(t, metarpc.BackHeader{Number: 1, Op: metarpc.BackReserveRecall}, &metarpc.ReserveRecallArgs{ID: 7, Upto: 3})
		began := time.Now()
		for range 4 {
			if b := <-s.backs; b.Number != 1 || b.Status != metarpc.StatusWorking {
				t.Errorf("%+v", b)
			}
		}
		if waited := time.Since(began); waited > 2*time.Second {
			t.Errorf("the service has heard 4 times in %v", waited)
		}
		close(finished)
		if b := <-s.backs; b.Number != 1 || b.Status != metarpc.StatusOK {
			t.Errorf("%+v", b)
		}
	})
}

// c0 is there to see that the context of callbacks gets slots of its own.
func c0(ctx context.Context) (bool, error) {
	if ctx.Value(priorKey{}) == nil {
		return false, errors.New("context of an ordinary call")
	}
	return true, nil
}

// What has no room is told to the kernel, and then given back.
func TestLeaseReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := &leaser{}
		s.handle = l.handle
		var told []layout.FileID
		c := connected(t, s, Config{OnLeaseRecall: func(ctx context.Context, items []metarpc.LeaseItem) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if len(l.back) != len(told) {
				t.Error("given back before the kernel knew")
			}
			for _, it := range items {
				told = append(told, it.ID)
			}
		}})
		for id := layout.FileID(10); id < 20; id++ {
			c.GetAttr(t.Context(), id)
		}
		s.backCall(t, metarpc.BackHeader{Number: 1, Op: metarpc.BackLeaseShrink}, &metarpc.LeaseShrinkArgs{Keep: 4})
		if b := <-s.backs; b.Number != 1 || b.Status != metarpc.StatusOK {
			t.Errorf("%+v", b)
		}
		want := []layout.FileID{10, 11, 12, 13, 14, 15}
		if !slices.Equal(l.back, want) || !slices.Equal(told, want) {
			t.Errorf("given back %v, told %v", l.back, told)
		}
		if n := asks(c, func() { c.GetAttr(t.Context(), 15); c.GetAttr(t.Context(), 16) }); n != 1 {
			t.Errorf("%d calls", n)
		}
		c.leases.mu.Lock()
		c.leases.limit = 3
		c.leases.mu.Unlock()
		c.GetAttr(t.Context(), 30)
		time.Sleep(time.Second)
		synctest.Wait()
		if l.mu.Lock(); len(l.back) != 9 || len(c.leases.giving) != 0 {
			t.Errorf("given back %v, on their way %v", l.back, c.leases.giving)
		}
		l.mu.Unlock()
	})
}

// Leases hold for nine tenths of their time after the sending of the last call that was answered, and no longer.
func TestLeaseExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = (&leaser{}).handle
		// A service that, while holding is set, hears but does not answer.
		gate := make(chan struct{})
		var holding atomic.Bool
		s.early = func(metarpc.Op) metarpc.Status {
			if holding.Load() {
				<-gate
			}
			return metarpc.StatusOK
		}
		s.welcome = func(_ net.Conn, w *metarpc.Welcome) bool {
			if holding.Load() {
				<-gate
			}
			return true
		}
		var told []metarpc.LeaseItem
		c := connected(t, s, Config{OnLeaseRecall: func(_ context.Context, items []metarpc.LeaseItem) { told = append(told, items...) }})
		c.GetAttr(t.Context(), 7)
		// Being idle does not end them.
		time.Sleep(10 * s.lease)
		if a, ok := c.CachedAttr(7); !ok || !c.Alive() || a.Keep < s.lease/2 {
			t.Errorf("known %t for %v", ok, a.Keep)
		}
		// The last call before is sent now.
		time.Sleep(time.Second)
		sent := time.Now()
		c.StatFS(t.Context(), layout.RootID)
		holding.Store(true)
		for time.Since(sent) < s.lease*9/10 {
			if a, ok := c.CachedAttr(7); !ok || a.Keep != s.lease*9/10-time.Since(sent) {
				t.Fatalf("%v after a call: known %t for %v", time.Since(sent), ok, a.Keep)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if _, ok := c.CachedAttr(7); ok || c.Alive() {
			t.Error("known after the lease")
		}
		if len(told) != 0 {
			t.Errorf("told of %v", told)
		}
		holding.Store(false)
		close(gate)
		time.Sleep(time.Minute)
		synctest.Wait()
		if !c.Alive() {
			t.Error("not alive again")
		}
		if _, ok := c.CachedAttr(7); ok {
			t.Error("what was known before is known again")
		}
		if len(told) != 1 || told[0] != (metarpc.LeaseItem{ID: 7, Lease: metarpc.LeaseAttrs}) {
			t.Errorf("told of %v", told)
		}
	})
}

// After a restart, and after the end of a session, nothing is known; who keeps something is told first, and the service
// last.
func TestLeasesReset(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("lost ", lost), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				s.handle = (&leaser{}).handle
				var c *Client
				var order []string
				complete := func() uint64 { return c.State().Calls[metarpc.OpReclaimComplete] }
				c = connected(t, s, Config{
					OnLeaseRecall: func(_ context.Context, items []metarpc.LeaseItem) {
						order = append(order, fmt.Sprint("recall of ", len(items)))
					},
					OnReset: func(_ context.Context, _ int, wasLost bool) {
						order = append(order, fmt.Sprint("reset ", wasLost, " ", complete()))
						time.Sleep(time.Second)
					},
				})
				c.Lookup(t.Context(), metarpc.Cred{}, 1, "a")
				s.mu.Lock()
				s.instance[0]++
				s.mu.Unlock()
				if lost {
					s.forget()
				}
				s.hangUp()
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if _, ok := c.CachedAttr(idOf("a")); ok || c.State().Leases != 0 || c.State().Names != 0 {
					t.Error("something is known")
				}
				if want := []string{"recall of 2", fmt.Sprint("reset ", lost, " 0")}; !slices.Equal(order, want) || complete() != 1 {
					t.Errorf("%q, %d times complete", order, complete())
				}
				if !c.Alive() {
					t.Error("not alive")
				}
			})
		})
	}
}

// A reset that another one interrupts is not forgotten, and ReclaimComplete is for the instance that it was meant for.
func TestResetDuringReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var instances []byte
		block := make(chan struct{})
		var blocking atomic.Bool
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpReclaimComplete {
				s.mu.Lock()
				instances = append(instances, s.instance[0])
				s.mu.Unlock()
			}
			return metarpc.StatusOK, nil
		}
		s.early = func(op metarpc.Op) metarpc.Status {
			if op == metarpc.OpReclaimComplete && blocking.Load() {
				<-block
			}
			return metarpc.StatusOK
		}
		complete := func() []byte {
			s.mu.Lock()
			defer s.mu.Unlock()
			return slices.Clone(instances)
		}
		var lost []bool
		c := connected(t, s, Config{OnReset: func(ctx context.Context, _ int, l bool) {
			lost = append(lost, l)
			select {
			case <-time.After(time.Minute):
			case <-ctx.Done():
			}
		}})
		restart := func(forget bool) {
			s.mu.Lock()
			s.instance[0]++
			s.mu.Unlock()
			if forget {
				s.forget()
			}
			s.hangUp()
			time.Sleep(10 * time.Second)
			synctest.Wait()
		}
		restart(true)  // 2: the session is lost
		restart(false) // 3
		time.Sleep(time.Minute)
		synctest.Wait()
		if !slices.Equal(lost, []bool{true, true}) || !slices.Equal(complete(), []byte{3}) {
			t.Errorf("lost %v, complete in instances %v", lost, complete())
		}
		// The call of one instance does not reach the next one, even if it was sent and not answered.
		blocking.Store(true)
		restart(false) // 4
		time.Sleep(time.Minute)
		blocking.Store(false)
		restart(false) // 5
		close(block)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if slices.Contains(complete(), 5) {
			t.Errorf("complete before the end of the reset: instances %v", complete())
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !slices.Equal(lost, []bool{true, true, false, false}) || !slices.Contains(complete(), 5) || !c.State().Connected {
			t.Errorf("lost %v, complete in instances %v", lost, complete())
		}
	})
}

// A call that is put off is made again until it is done or nobody wants it any more, and keeps nothing meanwhile.
func TestGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := &leaser{fail: metarpc.StatusGrace}
		s.handle = l.handle
		c := connected(t, s, Config{})
		done := make(chan error)
		go func() {
			_, err := c.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: 7})
			done <- err
		}()
		time.Sleep(10 * time.Second)
		if a, err := c.GetAttr(t.Context(), 7); err != nil || a.Keep != 0 {
			t.Errorf("attributes during a change are kept for %v, %v", a.Keep, err)
		}
		l.mu.Lock()
		l.fail = metarpc.StatusOK
		l.mu.Unlock()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if n := s.executed(metarpc.OpSetAttr); n < 3 || n > 45 { // each pause is 250 ms or more, but for the first ones
			t.Errorf("%d attempts in 10 s", n)
		}
		if _, ok := c.CachedAttr(7); !ok {
			t.Error("the answer was not kept")
		}
		l.mu.Lock()
		l.fail = metarpc.StatusGrace
		l.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if err := c.Remove(ctx, metarpc.Cred{}, 1, "a", false); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		synctest.Wait()
		if len(c.leases.pending)+len(c.leases.nameChanges)+len(c.leases.changes) != 0 || c.State().Busy != 0 {
			t.Errorf("left behind: %v, %v", c.leases.pending, c.leases.nameChanges)
		}
	})
}

// A change whose caller has left, and one of which nobody knows whether it was made, keep the inode from being known until
// there is an answer.
func TestUnknownOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := &leaser{}
		gate := make(chan struct{})
		b := &blocker{op: metarpc.OpSetAttr, gate: gate, ctx: s.ctx, next: l.handle}
		s.handle = b.handle
		c := connected(t, s, Config{})
		c.GetAttr(t.Context(), 7)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.SetAttr(ctx, metarpc.Cred{}, &metarpc.SetAttrArgs{ID: 7}); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if a, err := c.GetAttr(t.Context(), 7); err != nil || a.Keep != 0 {
			t.Errorf("keep for %v, %v", a.Keep, err)
		}
		gate <- struct{}{}
		synctest.Wait()
		if a, err := c.GetAttr(t.Context(), 7); err != nil || a.Keep == 0 {
			t.Errorf("after the answer: keep for %v, %v", a.Keep, err)
		}
		if _, ok := c.CachedAttr(7); !ok {
			t.Error("not known after the answer")
		}
		// With the session the outcome is lost, and what there was.
		done := make(chan error)
		go func() {
			_, err := c.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: 7})
			done <- err
		}()
		synctest.Wait()
		s.forget()
		s.hangUp()
		var unknown *OutcomeError
		if err := <-done; !errors.As(err, &unknown) {
			t.Error(err)
		}
		synctest.Wait()
		if _, ok := c.CachedAttr(7); ok || len(c.leases.pending) != 0 {
			t.Errorf("known %t, pending %v", ok, c.leases.pending)
		}
	})
}

// In a new session a file that is open may be used before it has been opened again.
func TestNotYetOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var open atomic.Bool
		next := layouts(t, nil)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			switch op {
			case metarpc.OpOpen:
				if args.(*metarpc.OpenArgs).Reclaim {
					time.Sleep(time.Second)
				}
				open.Store(true)
			case metarpc.OpLayoutGet, metarpc.OpReserve:
				if !open.Load() {
					return metarpc.Status(syscall.EBADF), nil
				}
			}
			if op == metarpc.OpReserve {
				return metarpc.StatusOK, &metarpc.ReserveResult{Off: 5, Mtime: 1}
			}
			return next(op, args)
		}
		c := connected(t, s, Config{})
		use := func() (int64, error) {
			_, err := c.Layout(t.Context(), 5, layout.IOModeRW, 0, 1, Anywhere)
			off := int64(0)
			err2 := c.Reserve(t.Context(), &metarpc.ReserveArgs{ID: 5, Len: 1}, func(r metarpc.ReserveResult) { off = r.Off })
			return off, errors.Join(err, err2)
		}
		if _, err := use(); !isStatus(err, syscall.EBADF) || s.executed(metarpc.OpLayoutGet) != 1 {
			t.Errorf("not open at all: %v", err)
		}
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: 5}); err != nil {
			t.Fatal(err)
		}
		s.forget()
		open.Store(false)
		s.hangUp()
		if off, err := use(); err != nil || off != 5 {
			t.Errorf("%d, %v", off, err)
		}
	})
}

// Layouts for appends are not used for writing anywhere, until that was asked for, and the service is told of appends
// under a lease once.
func TestAppendLayouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var asked []string
		next := layouts(t, nil)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if a, ok := args.(*metarpc.LayoutGetArgs); ok {
				asked = append(asked, fmt.Sprint(a.Append, a.Await))
			}
			return next(op, args)
		}
		c := connected(t, s, Config{})
		id := layout.FileID(5)
		ask := func(writes Writes) {
			t.Helper()
			if seg, err := c.Layout(t.Context(), id, layout.IOModeRW, 0, 1, writes); seg == nil || err != nil {
				t.Errorf("%v, %v", seg, err)
			}
		}
		ask(AtPlaces)
		ask(AtPlaces)
		if c.CachedLayout(5, layout.IOModeRW, 0, 1) != nil || c.CachedLayout(5, layout.IOModeRead, 0, 1) == nil {
			t.Error("a layout for appends is one for writing, or none for reading")
		}
		ask(Anywhere)
		ask(AtPlaces)
		ask(Anywhere)
		ask(AtEnd) // the service knows since it was asked for AtPlaces
		if c.CachedLayout(5, layout.IOModeRW, 0, 1) == nil || !slices.Equal(asked, []string{"true false", "false false"}) {
			t.Errorf("asked %v", asked)
		}
		id, asked = 6, nil
		ask(Anywhere)
		ask(AtEnd)
		ask(AtPlaces)
		ask(Anywhere)
		ask(AtEnd)
		c.DropLayout(id, 0)
		ask(AtEnd)
		ask(Anywhere)
		if !slices.Equal(asked, []string{"false false", "false true", "false true"}) {
			t.Errorf("asked %v", asked)
		}
	})
}

// Finding what is known allocates nothing.
func TestHitsDoNotAllocate(t *testing.T) {
	s := newService(t)
	s.handle = (&leaser{gone: map[string]bool{"none": true}}).handle
	c := connected(t, s, Config{})
	ctx := t.Context()
	for name, f := range map[string]func() bool{
		"GetAttr":    func() bool { a, err := c.GetAttr(ctx, 7); return err == nil && a.Attr.ID == 7 },
		"CachedAttr": func() bool { c.GetAttr(ctx, 7); _, ok := c.CachedAttr(7); return ok },
		"Lookup": func() bool {
			a, err := c.Lookup(ctx, metarpc.Cred{}, 1, "a")
			return err == nil && a.Attr.ID == idOf("a")
		},
		"no name": func() bool { _, err := c.Lookup(ctx, metarpc.Cred{}, 1, "none"); return err == errNoName },
		"no xattr": func() bool {
			c.GetAttr(ctx, 7)
			_, err := c.GetXattr(ctx, metarpc.Cred{}, 7, "security.capability")
			return err == errNoXattr
		},
	} {
		if !f() {
			t.Errorf("%s does not work", name)
		}
		if n := testing.AllocsPerRun(100, func() { f() }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkHits(b *testing.B) {
	l := leaseTableOf(leaseInodes)
	v := &Volume{clients: make([]atomic.Pointer[Client], 1)}
	c := &Client{v: v, leases: l, valid: validity{start: time.Now()}}
	v.clients[0].Store(c)
	c.valid.extend(time.Now(), time.Hour)
	const files = 10_000
	names := make([]string, files)
	for i := range layout.FileID(files) {
		names[i] = fmt.Sprintf("file-%06d", i)
		l.looked(l.ask(), 1, names[i], &metarpc.LookupResult{Attr: metarpc.Attr{ID: 100 + i}, Lease: metarpc.LeaseAttrs, Names: metarpc.LeaseNames})
	}
	ctx := context.Background()
	b.Run("GetAttr", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for i := 0; pb.Next(); i++ {
				if _, err := v.GetAttr(ctx, layout.FileID(100+i%files)); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
	b.Run("Lookup", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for i := 0; pb.Next(); i++ {
				if _, err := v.Lookup(ctx, metarpc.Cred{}, 1, names[i%files]); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
}
