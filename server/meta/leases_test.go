package meta

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
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

const (
	attrs = metarpc.LeaseAttrs
	names = metarpc.LeaseNames
	data  = metarpc.LeaseData
)

// told collects what a client is called back for, and keeps the answers until it is let go.
type told struct {
	mu    sync.Mutex
	items map[layout.FileID]metarpc.Lease
	sizes []layout.FileID
	calls int
	came  chan struct{} // has room for every callback
	hold  chan struct{} // closed when answers may go out
}

// listen has a client's callbacks collected. With hold they are not answered before let is called.
func (c *client) listen(hold bool) (r *told, let func()) {
	r = &told{items: map[layout.FileID]metarpc.Lease{}, came: make(chan struct{}, 10000), hold: make(chan struct{})}
	let = sync.OnceFunc(func() { close(r.hold) })
	if !hold {
		let()
	}
	c.mu.Lock()
	c.back = func(op metarpc.BackOp, args any) metarpc.Status {
		r.mu.Lock()
		r.calls++
		switch args := args.(type) {
		case *metarpc.LeaseRecallArgs:
			for _, it := range args.Items {
				r.items[it.ID] |= it.Lease
			}
		case *metarpc.SizeQueryArgs:
			r.sizes = append(r.sizes, args.IDs...)
		}
		r.mu.Unlock()
		r.came <- struct{}{}
		<-r.hold
		return metarpc.StatusOK
	}
	c.mu.Unlock()
	c.t.Cleanup(let)
	return r, let
}

func (r *told) recalled() map[layout.FileID]metarpc.Lease {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.items)
}

// attrLease asks for attributes and returns what came with them.
func (c *client) attrLease(id layout.FileID) metarpc.Lease {
	c.t.Helper()
	return must[metarpc.AttrResult](c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}).Lease
}

// namesLease looks a name up that nobody uses.
func (c *client) namesLease(dir layout.FileID) metarpc.Lease {
	c.t.Helper()
	r := must[metarpc.LookupResult](c, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "nobody"})
	if r.Attr.ID != 0 {
		c.t.Errorf("%+v", r)
	}
	return r.Names
}

// held is what the service thinks that a client has.
func (c *client) held() map[layout.FileID]metarpc.Lease {
	svc := c.h.svc
	svc.mu.Lock()
	defer svc.mu.Unlock()
	return maps.Clone(svc.sessions[c.hello.Session].leases)
}

func rw(id layout.FileID) *metarpc.LayoutGetArgs {
	return &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: 1}
}

func TestGrants(t *testing.T) {
	h := startMemory(t)
	a, b := h.root(), h.root()
	const root = layout.RootID
	dir := a.mkdir(root, "d")
	f := a.touch(dir, "f")
	lookup := func(name string) metarpc.LookupResult {
		t.Helper()
		return must[metarpc.LookupResult](b, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: name})
	}
	if r := lookup("f"); r.Attr.ID != f || r.Lease != attrs || r.Names != names {
		t.Errorf("lookup: %+v", r)
	}
	if r := lookup("none"); r.Attr.ID != 0 || r.Lease != 0 || r.Names != names {
		t.Errorf("lookup of nothing: %+v", r)
	}
	if l := b.attrLease(dir); l != attrs {
		t.Errorf("getattr: %v", l)
	}
	r := must[metarpc.ReadDirResult](b, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Limit: 10})
	if r.Names != names || len(r.Entries) != 1 || r.Entries[0].Lease != attrs {
		t.Errorf("readdir: %+v", r)
	}
	for what, lease := range map[string]metarpc.Lease{
		"open":    must[metarpc.AttrResult](b, metarpc.OpOpen, &metarpc.OpenArgs{ID: f}).Lease,
		"create":  must[metarpc.CreateResult](b, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "new"}).Lease,
		"again":   must[metarpc.CreateResult](b, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "new"}).Lease,
		"symlink": must[metarpc.AttrResult](b, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: "to", Mode: syscall.S_IFLNK, Target: "x"}).Lease,
		"link":    must[metarpc.AttrResult](b, metarpc.OpLink, &metarpc.LinkArgs{ID: f, Parent: dir, Name: "l"}).Lease,
		"setattr": must[metarpc.AttrResult](b, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode}).Lease,
		"size":    must[metarpc.AttrResult](b, metarpc.OpSetAttr, setSize(f, 10)).Lease,
	} {
		if lease != attrs {
			t.Errorf("%s: %v", what, lease)
		}
	}

	if r := must[metarpc.AttrResult](b, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: "sub", Mode: syscall.S_IFDIR}); r.Lease != attrs|names {
		t.Errorf("mkdir: %v", r.Lease)
	}

	// A writer has a lease as long as it is the only one; nobody else has any.
	a.open(f)
	b.open(f)
	must[metarpc.LayoutResult](b, metarpc.OpLayoutGet, rw(f))
	if bl, al := b.attrLease(f), a.attrLease(f); bl != attrs || al != 0 {
		t.Errorf("writer %v, reader %v", bl, al)
	}
	got, _ := b.listen(false)
	must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, rw(f))
	if l := got.recalled(); l[f] != attrs|data {
		t.Errorf("a second writer comes: %v", l)
	}
	if bl, al := b.attrLease(f), a.attrLease(f); bl != 0 || al != 0 {
		t.Errorf("two writers: %v, %v", bl, al)
	}
	for _, c := range []*client{a, b} {
		must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{f}})
	}
	if bl, al := b.attrLease(f), a.attrLease(f); bl != attrs || al != attrs {
		t.Errorf("nobody writes: %v, %v", bl, al)
	}

	// Given back, and of what is gone.
	must[metarpc.Empty](b, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: []layout.FileID{f, dir, 999}})
	if have := b.held(); have[f] != 0 || have[dir] != 0 {
		t.Errorf("given back: %v", have)
	}
	b.attrLease(f)
	for _, name := range []string{"f", "l", "new"} {
		a.remove(dir, name)
	}
	must[metarpc.RemoveResult](a, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: "sub", Dir: true})
	_, err := ask[metarpc.AttrResult](b, metarpc.OpGetAttr, &metarpc.IDArgs{ID: 12345})
	wantStatus(t, err, metarpc.Status(syscall.ESTALE))
	_, err = ask[metarpc.LookupResult](b, metarpc.OpLookup, &metarpc.NameArgs{Parent: 12345, Name: "x"})
	wantStatus(t, err, metarpc.Status(syscall.ESTALE))
	must[metarpc.Empty](b, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{f}})
	for _, c := range []*client{a, b} {
		for id := range c.held() {
			if _, _, err := h.svc.inode(t.Context(), id); err != nil && id != dir && id != root {
				// Files that b still has open are there.
				t.Errorf("lease on inode %d: %v", id, err)
			}
		}
	}
}

// conflict is a change by one session of what another has leases on.
type conflict struct {
	name string
	op   metarpc.Op
	args any
	want map[layout.FileID]metarpc.Lease // what the other one loses
}

// TestRecallBeforeChange looks at every change from the other session: leases are recalled, the change waits for the answer,
// nobody is given such a lease meanwhile, and the session that changes keeps its own.
func TestRecallBeforeChange(t *testing.T) {
	h := startMemory(t)
	a, b, c := h.root(), h.root(), h.root()
	const root = layout.RootID
	d, e := a.mkdir(root, "d"), a.mkdir(root, "e")
	f, g, moved, over := a.touch(d, "f"), a.touch(d, "g"), a.touch(d, "moved"), a.touch(e, "over")
	twice := a.touch(d, "twice")
	must[metarpc.AttrResult](a, metarpc.OpLink, &metarpc.LinkArgs{ID: twice, Parent: e, Name: "twice"})
	sub, down := a.mkdir(d, "sub"), a.mkdir(d, "down")
	must[metarpc.Empty](a, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: f, Name: "user.old"})
	a.open(f)
	all := []layout.FileID{root, d, e, f, g, moved, over, twice, sub, down}
	isDir := func(id layout.FileID) bool { return slices.Contains([]layout.FileID{root, d, e, sub, down}, id) }
	gone := map[layout.FileID]bool{}
	for _, row := range []conflict{
		{"setattr", metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode}, map[layout.FileID]metarpc.Lease{f: attrs}},
		{"setattr of a directory", metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: d, Mask: metarpc.SetMode, Mode: 0o777}, map[layout.FileID]metarpc.Lease{d: attrs}},
		{"truncate", metarpc.OpSetAttr, setSize(f, 5), map[layout.FileID]metarpc.Lease{f: attrs | data}},
		{"create", metarpc.OpCreate, &metarpc.CreateArgs{Parent: d, Name: "new"}, map[layout.FileID]metarpc.Lease{d: attrs | names}},
		{"create what exists, but was taken for new", metarpc.OpCreate, &metarpc.CreateArgs{Parent: d, Name: "new"}, map[layout.FileID]metarpc.Lease{d: attrs | names}},
		{"mknod", metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: d, Name: "fifo", Mode: syscall.S_IFIFO}, map[layout.FileID]metarpc.Lease{d: attrs | names}},
		{"link", metarpc.OpLink, &metarpc.LinkArgs{ID: f, Parent: e, Name: "l"}, map[layout.FileID]metarpc.Lease{e: attrs | names, f: attrs}},
		{"setxattr", metarpc.OpSetXattr, &metarpc.XattrArgs{ID: f, Name: "user.new"}, map[layout.FileID]metarpc.Lease{f: attrs}},
		{"removexattr", metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: f, Name: "user.old"}, map[layout.FileID]metarpc.Lease{f: attrs}},
		{"set policy", metarpc.OpSetXattr, &metarpc.XattrArgs{ID: e, Name: "weft.layout", Value: []byte("stripe_count=1")}, map[layout.FileID]metarpc.Lease{e: attrs}},
		{"unlink one of two", metarpc.OpRemove, &metarpc.RemoveArgs{Parent: d, Name: "twice"}, map[layout.FileID]metarpc.Lease{d: attrs | names, twice: attrs}},
		{"unlink", metarpc.OpRemove, &metarpc.RemoveArgs{Parent: d, Name: "g"}, map[layout.FileID]metarpc.Lease{d: attrs | names, g: attrs}},
		{"rmdir", metarpc.OpRemove, &metarpc.RemoveArgs{Parent: d, Name: "sub", Dir: true}, map[layout.FileID]metarpc.Lease{d: attrs | names, sub: attrs | names}},
		{"rename", metarpc.OpRename, &metarpc.RenameArgs{OldParent: d, OldName: "f", NewParent: d, NewName: "f2"}, map[layout.FileID]metarpc.Lease{d: attrs | names, f: attrs}},
		{"exchange", metarpc.OpRename, &metarpc.RenameArgs{OldParent: d, OldName: "moved", NewParent: e, NewName: "over", Flags: metarpc.RenameExchange},
			map[layout.FileID]metarpc.Lease{d: attrs | names, e: attrs | names, moved: attrs, over: attrs}},
		{"rename over", metarpc.OpRename, &metarpc.RenameArgs{OldParent: e, OldName: "over", NewParent: d, NewName: "moved"},
			map[layout.FileID]metarpc.Lease{d: attrs | names, e: attrs | names, moved: attrs, over: attrs}},
		{"move a directory", metarpc.OpRename, &metarpc.RenameArgs{OldParent: d, OldName: "down", NewParent: e, NewName: "down"},
			map[layout.FileID]metarpc.Lease{d: attrs | names, e: attrs | names, down: attrs}},
		{"report without a layout", metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: f, End: 50, Mtime: 1}}, Provisional: true},
			map[layout.FileID]metarpc.Lease{f: attrs}},
		{"durable report without a layout", metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: f, End: 60, Mtime: 1}}},
			map[layout.FileID]metarpc.Lease{f: attrs}},
		{"reserve", metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 7}, map[layout.FileID]metarpc.Lease{f: attrs | data}},
		{"access time", metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: f, Atime: time.Now().UnixNano()}}}, nil},
		{"layout for reading", metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRead, Len: 1}, nil},
		{"layout for writing", metarpc.OpLayoutGet, rw(f), map[layout.FileID]metarpc.Lease{f: attrs | data}},
		{"that once more", metarpc.OpLayoutGet, rw(f), nil},
	} {
		for id := range row.want {
			if row.op == metarpc.OpRemove && (id == g || id == sub) || row.name == "rename over" && id == over {
				gone[id] = true // after this
			}
		}
		keep := func(c *client) {
			for _, id := range all {
				if gone[id] && row.want[id] == 0 {
					continue
				}
				c.attrLease(id)
				if isDir(id) {
					c.namesLease(id)
				}
			}
		}
		h.svc.mu.Lock()
		clear(h.svc.contended) // the same few inodes are in all rows
		h.svc.mu.Unlock()
		keep(a)
		keep(b)
		before := b.held()
		got, let := b.listen(true)
		h.settle()
		state := dump(t, h.engine)
		hdr, ch := a.begin(row.op, row.args)
		if len(row.want) == 0 {
			if err := a.finish(hdr, ch, row.op.NewResult()); err != nil {
				t.Errorf("%s: %v", row.name, err)
			}
			if len(got.came) != 0 {
				t.Errorf("%s: recalled %v", row.name, got.recalled())
			}
			continue
		}
		<-got.came
		if r := got.recalled(); !maps.Equal(r, row.want) {
			t.Errorf("%s: recalled %v, want %v", row.name, r, row.want)
		}
		must[metarpc.Empty](a, metarpc.OpRenew, &metarpc.Empty{}) // time for what should not happen
		select {
		case body := <-ch:
			t.Fatalf("%s: answered before the recall: %x", row.name, body)
		default:
		}
		if after := dump(t, h.engine); !maps.Equal(state, after) {
			t.Errorf("%s: committed before the recall was answered", row.name)
		}
		for id, lease := range row.want {
			// The size of a file that is being cut is told afterwards.
			if row.name != "truncate" && c.attrLease(id) != 0 || lease&names != 0 && c.namesLease(id) != 0 {
				t.Errorf("%s: lease on %d granted meanwhile", row.name, id)
			}
		}
		let()
		result := row.op.NewResult()
		if err := a.finish(hdr, ch, result); err != nil {
			t.Errorf("%s: %v", row.name, err)
		}
		if r, ok := result.(*metarpc.ReserveResult); ok { // or there is no lease until the place is written
			a.report(true, metarpc.SizeReport{ID: f, GivenUp: []uint64{r.Number}})
		}
		for id, lease := range row.want {
			if have := b.held()[id]; have != before[id]&^lease {
				t.Errorf("%s: %v on %d is left", row.name, have, id)
			}
			if gone[id] {
				continue
			}
			if want := lease &^ data; a.held()[id]&want != want {
				t.Errorf("%s: who makes the change has %v on %d, want %v", row.name, a.held()[id], id, want)
			}
			if after := c.attrLease(id); after != attrs && row.op != metarpc.OpLayoutGet || lease&names != 0 && c.namesLease(id) != names {
				t.Errorf("%s: no lease on %d afterwards", row.name, id)
			}
			must[metarpc.Empty](c, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: []layout.FileID{id}})
		}
	}
}

// TestCutTellsReaders cuts a file that another session has open without having a lease: it is told, and who asks for
// the size from then on is told the new one.
func TestCutTellsReaders(t *testing.T) {
	h := startMemory(t)
	a, b, c := h.client(), h.client(), h.client()
	f := a.touch(layout.RootID, "f")
	must[metarpc.AttrResult](a, metarpc.OpSetAttr, setSize(f, 100))
	must[metarpc.AttrResult](b, metarpc.OpOpen, &metarpc.OpenArgs{ID: f})
	must[metarpc.Empty](b, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: []layout.FileID{f}})
	got, let := b.listen(true)
	hdr, ch := a.begin(metarpc.OpSetAttr, setSize(f, 30))
	<-got.came
	if r := got.recalled(); r[f] != attrs|data {
		t.Errorf("told of %v", r)
	}
	type pending struct {
		c    *client
		hdr  metarpc.CallHeader
		ch   chan []byte
		size func() int64
	}
	var asked []pending
	for _, who := range []*client{b, c} {
		get, opened := new(metarpc.AttrResult), new(metarpc.AttrResult)
		found, listed := new(metarpc.LookupResult), new(metarpc.ReadDirResult)
		for _, row := range []struct {
			op     metarpc.Op
			args   any
			result any
			size   func() int64
		}{
			{metarpc.OpGetAttr, &metarpc.IDArgs{ID: f}, get, func() int64 { return get.Attr.Size }},
			{metarpc.OpOpen, &metarpc.OpenArgs{ID: f}, opened, func() int64 { return opened.Attr.Size }},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "f"}, found, func() int64 { return found.Attr.Size }},
			{metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: layout.RootID, Limit: 10}, listed, func() int64 { return listed.Entries[0].Attr.Size }},
		} {
			hdr, ch := who.begin(row.op, row.args)
			asked = append(asked, pending{who, hdr, ch, func() int64 {
				if err := who.finish(hdr, ch, row.result); err != nil {
					t.Error(err)
				}
				return row.size()
			}})
		}
		// A report is answered at once, as a client may make it before it answers, and does not tell the old size.
		if at := who.report(true, metarpc.SizeReport{ID: f, Atime: 1})[0]; at.Size != 30 {
			t.Errorf("report: %+v", at)
		}
	}
	for _, p := range asked {
		select {
		case <-p.ch:
			t.Error("a size is told while the cut is announced")
		default:
		}
	}
	let()
	if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
		t.Error(err)
	}
	for _, p := range asked {
		if size := p.size(); size != 30 {
			t.Errorf("size %d", size)
		}
	}
}

// TestSizeQuery checks that whoever looks at a file sees what its writers have written and not yet said.
func TestSizeQuery(t *testing.T) {
	h := startMemory(t)
	w, r := h.client(), h.client()
	dir := w.mkdir(layout.RootID, "d")
	var ids [3]layout.FileID
	for i := range ids {
		ids[i] = w.create(dir, fmt.Sprint(i))
	}
	for _, id := range ids[:2] {
		must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, rw(id))
	}
	must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: ids[2], IOMode: layout.IOModeRW, Len: 1, Append: true})
	var mu sync.Mutex
	written := int64(0)
	var asked []layout.FileID
	w.mu.Lock()
	w.back = func(op metarpc.BackOp, args any) metarpc.Status {
		q, ok := args.(*metarpc.SizeQueryArgs)
		if !ok {
			return metarpc.StatusOK
		}
		mu.Lock()
		asked = append(asked, q.IDs...)
		end := written
		mu.Unlock()
		var reports []metarpc.SizeReport
		for _, id := range q.IDs {
			reports = append(reports, metarpc.SizeReport{ID: id, End: end, Mtime: end})
		}
		w.report(true, reports...)
		return metarpc.StatusOK
	}
	w.mu.Unlock()
	grow := func() int64 {
		mu.Lock()
		defer mu.Unlock()
		written += 10
		asked = nil
		return written
	}
	check := func(what string, attr metarpc.Attr, want int64) {
		t.Helper()
		if attr.Size != want {
			t.Errorf("%s: size %d, %d bytes are written", what, attr.Size, want)
		}
	}
	f := ids[0]
	want := grow()
	check("getattr", r.attr(f), want)
	want = grow()
	check("lookup", must[metarpc.LookupResult](r, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "0"}).Attr, want)
	want = grow()
	check("open", must[metarpc.AttrResult](r, metarpc.OpOpen, &metarpc.OpenArgs{ID: f}).Attr, want)
	want = grow()
	check("create", must[metarpc.CreateResult](r, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "0"}).Attr, want)
	want = grow()
	check("setattr", must[metarpc.AttrResult](r, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode}).Attr, want)
	want = grow()
	check("link", must[metarpc.AttrResult](r, metarpc.OpLink, &metarpc.LinkArgs{ID: f, Parent: dir, Name: "l"}).Attr, want)
	want = grow()
	for _, e := range r.list(dir, 10) {
		size := want
		if e.Attr.ID == ids[2] {
			size = 0 // who only appends has nothing to say
		}
		check("readdir "+e.Name, e.Attr, size)
	}
	mu.Lock()
	slices.SortFunc(asked, cmp.Compare)
	if !slices.Equal(asked, ids[:2]) {
		t.Errorf("readdir asked for %v, want %v", asked, ids[:2])
	}
	asked = nil
	mu.Unlock()
	w.attr(f)
	r.attr(ids[2])
	mu.Lock()
	if len(asked) != 0 {
		t.Errorf("asked for %v", asked)
	}
	mu.Unlock()

	// Who asks for more than appends is asked, until it has given the layout back.
	must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, rw(ids[2]))
	must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: ids[2], IOMode: layout.IOModeRW, Len: 1, Append: true})
	want = grow()
	check("no longer just appends", r.attr(ids[2]), want)
}

// TestSizeQueriesTogether has many calls look at files of a writer that is slow to answer: they wait for two questions.
func TestSizeQueriesTogether(t *testing.T) {
	h := startMemory(t)
	w, r := h.client(), h.client()
	f := w.create(layout.RootID, "f")
	must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, rw(f))
	got, let := w.listen(true)
	const askers = 10
	var wg sync.WaitGroup
	for range askers {
		wg.Go(func() { r.attr(f) })
	}
	<-got.came
	waittest.Until(t, "all wait", func() bool { return len(r.free) == r.welcome.Slots-askers })
	must[metarpc.Empty](r, metarpc.OpRenew, &metarpc.Empty{})
	let()
	wg.Wait()
	// The first alone, those that came while it was out, and perhaps some that were still on their way.
	if got.calls > 3 {
		t.Errorf("%d questions for %d calls", got.calls, askers)
	}
}

// TestReserve appends from many sessions at once, some of which write elsewhere in the file as well.
func TestReserve(t *testing.T) {
	for kind, open := range engines {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t, open(t)).start()
			first := h.client()
			f := first.create(layout.RootID, "f")
			must[metarpc.AttrResult](first, metarpc.OpSetAttr, setSize(f, 1000))
			var mu sync.Mutex
			type place struct{ off, n int64 }
			var places []place
			var wg sync.WaitGroup
			for i := range 8 {
				c := h.client()
				c.open(f)
				wg.Go(func() {
					must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1, Append: i%4 != 0})
					for k := range int64(40) {
						n := 1 + (k*7+int64(i))%13
						r := must[metarpc.ReserveResult](c, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: n})
						off := r.Off
						mu.Lock()
						places = append(places, place{off, n})
						mu.Unlock()
						// Some are durable, so that reports leave memory all the time.
						c.report(k%3 != 0, metarpc.SizeReport{ID: f, End: off + n, Mtime: k, Ended: []uint64{r.Number}})
						if at := c.attr(f); at.Size < off+n || at.Mtime < r.Mtime { // others may be written behind it
							t.Errorf("size %d and time %d after an append to %d at %d", at.Size, at.Mtime, off+n, r.Mtime)
						}
					}
				})
			}
			wg.Wait()
			slices.SortFunc(places, func(a, b place) int { return cmp.Compare(a.off, b.off) })
			end := int64(1000)
			for _, p := range places {
				if p.off != end {
					t.Fatalf("append of %d bytes at %d, want %d", p.n, p.off, end)
				}
				end += p.n
			}
			if at := first.attr(f); at.Size != end {
				t.Errorf("size %d, want %d", at.Size, end)
			}
			_, err := ask[metarpc.ReserveResult](first, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 1<<63 - 1})
			wantStatus(t, err, metarpc.Status(syscall.EFBIG))
			_, err = ask[metarpc.ReserveResult](first, metarpc.OpReserve, &metarpc.ReserveArgs{ID: layout.RootID, Len: 1})
			wantStatus(t, err, metarpc.Status(syscall.EISDIR))
		})
	}
}

// TestReserveAsks appends to a file that another session is writing: behind what it has written.
func TestReserveAsks(t *testing.T) {
	h := startMemory(t)
	w, a := h.client(), h.client()
	f := w.create(layout.RootID, "f")
	must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, rw(f))
	w.mu.Lock()
	w.back = func(op metarpc.BackOp, args any) metarpc.Status {
		if op == metarpc.BackSizeQuery {
			w.report(true, metarpc.SizeReport{ID: f, End: 777})
		}
		return metarpc.StatusOK
	}
	w.mu.Unlock()
	if off := must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 3}).Off; off != 777 {
		t.Errorf("append at %d", off)
	}
}

// TestReserveTwice sends an append again: the place stays the same.
func TestReserveTwice(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	f := c.create(layout.RootID, "f")
	args := &metarpc.ReserveArgs{ID: f, Len: 10}
	hdr, ch := c.begin(metarpc.OpReserve, args)
	<-ch
	c.connect()
	var r metarpc.ReserveResult
	if err := c.finish(hdr, c.send(hdr, args), &r); err != nil || r.Off != 0 {
		t.Errorf("%+v %v", r, err)
	}
	c.report(true, metarpc.SizeReport{ID: f, Ended: []uint64{r.Number}})
	if at := c.attr(f); at.Size != 10 {
		t.Errorf("%+v", at)
	}
}

// TestReserveDuringCut has an append wait for a truncation, and take its place behind the new end.
func TestReserveDuringCut(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	f := a.create(layout.RootID, "f")
	must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, rw(f))
	h.files.write(t, f, 100)
	a.report(false, metarpc.SizeReport{ID: f, End: 100})
	release := h.files.hold()
	defer release()
	hdr, ch := a.begin(metarpc.OpSetAttr, setSize(f, 40))
	h.files.awaitStalled(1)
	_, err := ask[metarpc.ReserveResult](b, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
	wantStatus(t, err, metarpc.StatusGrace)
	again, againCh := b.begin(metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
	release()
	if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
		t.Error(err)
	}
	var r metarpc.ReserveResult
	if err := b.finish(again, againCh, &r); err != nil || r.Off != 40 {
		t.Errorf("%+v %v", r, err)
	}
}

func TestAtime(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	const root = layout.RootID
	f, d := a.touch(root, "f"), a.mkdir(root, "d")
	l := must[metarpc.AttrResult](a, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: root, Name: "l", Mode: syscall.S_IFLNK | 0o777, Target: "f"}).Attr.ID
	a.touch(d, "x")
	got, _ := b.listen(false)
	later := time.Now().Add(time.Minute).UnixNano()
	for _, id := range []layout.FileID{f, d, l} {
		before := b.attr(id)
		at := a.report(false, metarpc.SizeReport{ID: id, Atime: later})[0]
		want := before
		want.Atime = later
		if at != want || b.attr(id) != want {
			t.Errorf("%+v, then %+v, want %+v", at, b.attr(id), want)
		}
		if at := a.report(false, metarpc.SizeReport{ID: id, Atime: later - 5})[0]; at != want {
			t.Errorf("an earlier time: %+v", at)
		}
		if at := a.report(true, metarpc.SizeReport{ID: id, Atime: later + 5})[0]; at != want {
			t.Errorf("not durable: %+v", at)
		}
		if row := h.row(id); row.Atime != later {
			t.Errorf("%+v", row)
		}
	}
	if len(got.came) != 0 {
		t.Errorf("somebody is told of it: %v", got.recalled())
	}
}

// TestLeaseLimit has a session collect more leases than it may have, with a client that gives some back and one that does not.
func TestLeaseLimit(t *testing.T) {
	h := newHost(t, memorytest.New())
	h.leases = 40
	h.start()
	other := h.client()
	dir := other.mkdir(layout.RootID, "d")
	var ids []layout.FileID
	for i := range 100 {
		ids = append(ids, other.touch(dir, fmt.Sprint(i)))
	}
	for _, gives := range []bool{true, false} {
		c := h.client()
		shrunk := 0
		var mu sync.Mutex
		c.mu.Lock()
		c.back = func(op metarpc.BackOp, args any) metarpc.Status {
			if a, ok := args.(*metarpc.LeaseShrinkArgs); ok {
				mu.Lock()
				shrunk++
				mu.Unlock()
				if gives {
					have := slices.Collect(maps.Keys(c.held()))
					must[metarpc.Empty](c, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: have[a.Keep:]})
				}
			}
			return metarpc.StatusOK
		}
		c.mu.Unlock()
		for range 5 {
			for _, id := range ids {
				c.attrLease(id)
				if n := len(c.held()); n > 40 {
					t.Fatalf("%d leases", n)
				}
			}
		}
		mu.Lock()
		if shrunk == 0 {
			t.Errorf("gives %t: not asked", gives)
		}
		mu.Unlock()
		waittest.Until(t, "room", func() bool { return c.attrLease(ids[0]) == attrs })
		must[metarpc.Empty](c, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: ids})
		granted := 0
		for _, e := range c.list(dir, 1000) {
			if e.Lease != 0 {
				granted++
			}
		}
		if granted == 0 || granted > 20 {
			t.Errorf("%d leases for a directory", granted)
		}
	}
}

// hookPuts calls f when a batch that puts a row of this key is to be committed.
func hookPuts(e *hooked, key []byte, f func()) {
	e.hook(func(b *catalog.Batch) error {
		for _, row := range b.Puts {
			if string(row.Key) == string(key) {
				f()
			}
		}
		return nil
	})
}

// TestNoLeaseWhileCommitting asks for leases while a change that affects them is being committed.
func TestNoLeaseWhileCommitting(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	a, b := h.client(), h.client()
	f := a.touch(layout.RootID, "f")
	committing, commit := make(chan struct{}), make(chan struct{})
	hookPuts(engine, schema.InodeKey(f), sync.OnceFunc(func() {
		close(committing)
		<-commit
	}))
	hdr, ch := a.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode, Mode: 0o600})
	<-committing
	for _, c := range []*client{a, b} {
		if l := c.attrLease(f); l != 0 {
			t.Errorf("lease %v", l)
		}
	}
	close(commit)
	if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
		t.Error(err)
	}
	if l := b.attrLease(f); l != attrs {
		t.Errorf("afterwards: %v", l)
	}
	h.svc.mu.Lock()
	defer h.svc.mu.Unlock()
	for id, l := range h.svc.leases {
		if l.changing != 0 || len(l.holders) == 0 {
			t.Errorf("inode %d left as %+v", id, l)
		}
	}
}

// TestContended has two sessions take a lease from each other again and again: for a while none is granted.
func TestContended(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		f := a.touch(layout.RootID, "f")
		got, _ := b.listen(false)
		granted := 0
		for n := range 100 {
			if b.attrLease(f) != 0 {
				granted++
			}
			must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode, Mode: uint32(n % 2)})
		}
		if granted != contendedAfter || got.calls != contendedAfter {
			t.Errorf("%d leases, %d recalls in no time, want %d", granted, got.calls, contendedAfter)
		}
		if l := b.attrLease(layout.RootID); l != attrs {
			t.Errorf("another inode: %v", l)
		}
		time.Sleep(contendedFor)
		if l := b.attrLease(f); l != attrs {
			t.Errorf("later: %v", l)
		}
		must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode})
		if l := b.attrLease(f); l != 0 {
			t.Errorf("it goes on: %v", l)
		}
		time.Sleep(h.lease / 2)
		h.svc.mu.Lock()
		if len(h.svc.contended) != 0 {
			t.Errorf("remembered: %v", h.svc.contended)
		}
		h.svc.mu.Unlock()
		for n := range contendedAfter - 1 {
			if l := b.attrLease(f); l != attrs {
				t.Errorf("after a pause: %v", l)
			}
			must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode, Mode: uint32(n % 2)})
		}
	})
}
