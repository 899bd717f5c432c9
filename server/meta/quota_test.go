package meta

import (
	"fmt"
	"sync"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

const overQuota = metarpc.Status(syscall.EDQUOT)

// How far layouts for writing reach where there is a quota of bytes, see [usage.Quotas.Allowance].
const (
	quotaShare = 4
	quotaMost  = 64 << 20
	quotaAlign = 4 << 10
)

func treeQuota(dir layout.FileID) metarpc.QuotaName {
	return metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: uint64(dir)}
}

// limit sets a quota.
func (c *client) limit(name metarpc.QuotaName, bytes, files int64) {
	c.t.Helper()
	must[metarpc.Empty](c, metarpc.OpQuotaSet, &metarpc.QuotaSetArgs{Name: name, Bytes: bytes, Files: files})
}

// quotaOf is what is told of a quota.
func (c *client) quotaOf(name metarpc.QuotaName) metarpc.QuotaInfo {
	c.t.Helper()
	r := must[metarpc.QuotasResult](c, metarpc.OpQuotas, &metarpc.QuotasArgs{Name: name})
	if len(r.Quotas) != 1 || !r.EOF {
		c.t.Fatalf("%+v", r)
	}
	return r.Quotas[0]
}

func (c *client) try(op metarpc.Op, args any) error {
	hdr, ch := c.begin(op, args)
	return c.finish(hdr, ch, op.NewResult())
}

// TestQuotaOfFiles fills a directory tree up to the last file that may be in it, in each way in which one can come there.
func TestQuotaOfFiles(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	c, root := h.client(), h.root()
	top := c.mkdir(layout.RootID, "top")
	deep := c.mkdir(c.mkdir(c.mkdir(top, "a"), "b"), "c")
	outside := c.touch(layout.RootID, "outside")
	tree := c.mkdir(layout.RootID, "tree")
	c.touch(tree, "x")
	c.touch(tree, "y")
	root.limit(treeQuota(top), 0, 10)
	for i := range 7 {
		c.touch(deep, fmt.Sprint(i))
	}
	full := func(what string) {
		t.Helper()
		for _, dir := range []layout.FileID{top, deep} {
			for _, try := range []struct {
				name string
				op   metarpc.Op
				args any
			}{
				{"create", metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "new", Mode: 0o644}},
				{"mkdir", metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: "new", Mode: syscall.S_IFDIR | 0o755}},
				{"symlink", metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: "new", Mode: syscall.S_IFLNK | 0o777, Target: "t"}},
				{"rename", metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "outside", NewParent: dir, NewName: "new"}},
				{"move", metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "tree", NewParent: dir, NewName: "new"}},
			} {
				for _, who := range []*client{c, root} {
					if err := who.try(try.op, try.args); statusOf(err) != overQuota {
						t.Errorf("%s: %s in %d: %v", what, try.name, dir, err)
					}
				}
			}
		}
	}
	full("10 of 10")
	if err := c.try(metarpc.OpCreate, &metarpc.CreateArgs{Parent: deep, Name: "3", Mode: 0o644}); err != nil {
		t.Errorf("opening what is there: %v", err)
	}
	if err := c.try(metarpc.OpLink, &metarpc.LinkArgs{ID: outside, Parent: deep, Name: "link"}); err != nil {
		t.Errorf("another name of what is counted elsewhere: %v", err)
	}
	nameless := must[metarpc.CreateResult](c, metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: deep, Mode: 0o600}).Attr.ID
	wantStatus(t, c.try(metarpc.OpLink, &metarpc.LinkArgs{ID: nameless, Parent: deep, Name: "named"}), overQuota)
	must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: deep, OldName: "1", NewParent: top, NewName: "1"})
	full("after a move inside")
	h.restart()
	c.connect()
	root.connect()
	h.svc.endGrace()
	full("after a restart")
	// A directory with two files needs room for three.
	c.remove(deep, "2")
	c.remove(deep, "3")
	moved := &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "tree", NewParent: deep, NewName: "tree"}
	wantStatus(t, c.try(metarpc.OpRename, moved), overQuota)
	c.remove(deep, "4")
	must[metarpc.Empty](c, metarpc.OpRename, moved)
	if got := root.quotaOf(treeQuota(top)); got.UsedFiles != 10 {
		t.Errorf("with the tree: %+v", got)
	}
	must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: deep, OldName: "tree", NewParent: layout.RootID, NewName: "tree"})
	if got := root.quotaOf(treeQuota(top)); got != (metarpc.QuotaInfo{Name: treeQuota(top), Path: "/top", Files: 10, UsedFiles: 7}) {
		t.Errorf("%+v", got)
	}
	st := must[metarpc.StatFSResult](c, metarpc.OpStatFS, &metarpc.IDArgs{ID: deep})
	if st.Files != 7 || st.MaxFiles != 10 || st.Total != 1000 {
		t.Errorf("%+v", st)
	}
	root.limit(treeQuota(top), metarpc.QuotaKeep, 0)
	if countRows(t.Context(), h.engine, schema.PrefixQuota) != 0 {
		t.Error("a quota without limits has a row")
	}
	c.touch(deep, "as many as I like")
	// A quota inside another, which goes with its directory.
	root.limit(treeQuota(top), 0, 100)
	inner := c.mkdir(top, "inner")
	root.limit(treeQuota(inner), 5, 1)
	c.touch(inner, "1")
	wantStatus(t, c.try(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: inner, Name: "2", Mode: syscall.S_IFREG}), overQuota)
	list := must[metarpc.QuotasResult](root, metarpc.OpQuotas, &metarpc.QuotasArgs{After: true})
	if len(list.Quotas) != 2 || list.Quotas[1].Path != "/top/inner" || list.Quotas[1].UsedFiles != 1 || !list.EOF {
		t.Errorf("%+v", list)
	}
	c.remove(inner, "1")
	must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: top, Name: "inner", Dir: true})
	if countRows(t.Context(), h.engine, schema.PrefixQuota) != 1 {
		t.Error("the quota of a directory that is gone has a row")
	}
	// Who may not.
	wantStatus(t, c.try(metarpc.OpQuotaSet, &metarpc.QuotaSetArgs{Name: treeQuota(top), Files: 1}), metarpc.Status(syscall.EPERM))
	wantStatus(t, c.try(metarpc.OpQuotas, &metarpc.QuotasArgs{After: true}), metarpc.Status(syscall.EPERM))
	wantStatus(t, root.try(metarpc.OpQuotaSet, &metarpc.QuotaSetArgs{Name: treeQuota(outside), Files: 1}), metarpc.Status(syscall.ENOTDIR))
	wantStatus(t, root.try(metarpc.OpQuotaSet, &metarpc.QuotaSetArgs{Name: treeQuota(inner), Files: 1}), metarpc.Status(syscall.ENOENT))
	h.settle()
	checkCatalog(t, h.engine)
}

// TestQuotaOfOwners is about what users and groups have.
func TestQuotaOfOwners(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	c, root := h.client(), h.root()
	user := metarpc.QuotaName{Kind: metarpc.QuotaUser, ID: uint64(testCred.UID)}
	group := metarpc.QuotaName{Kind: metarpc.QuotaGroup, ID: uint64(testCred.GID)}
	root.limit(user, 0, 4) // with the root directory
	for i := range 3 {
		c.touch(layout.RootID, fmt.Sprint(i))
	}
	wantStatus(t, c.try(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "x", Mode: syscall.S_IFREG}), overQuota)
	wantStatus(t, c.try(metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: layout.RootID, Mode: 0o600}), overQuota)
	// Root makes one of its own, and cannot give it away.
	id := root.touch(layout.RootID, "of root")
	give := &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetUID, UID: testCred.UID}
	wantStatus(t, root.try(metarpc.OpSetAttr, give), overQuota)
	c.remove(layout.RootID, "1")
	must[metarpc.AttrResult](root, metarpc.OpSetAttr, give)
	if got := root.quotaOf(user); got != (metarpc.QuotaInfo{Name: user, Files: 4, UsedFiles: 4}) {
		t.Errorf("%+v", got)
	}
	root.limit(user, 0, 0)
	root.limit(group, 1000, 0)
	id = c.create(layout.RootID, "f")
	size := func(n int64) error {
		return c.try(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: n})
	}
	wantStatus(t, size(1001), overQuota)
	if err := size(1000); err != nil {
		t.Error(err)
	}
	if got := root.quotaOf(group); got != (metarpc.QuotaInfo{Name: group, Bytes: 1000, UsedBytes: 1000, UsedFiles: 4}) {
		t.Errorf("%+v", got)
	}
	if got := root.quotaOf(user); got != (metarpc.QuotaInfo{Name: user, UsedBytes: 1000, UsedFiles: 5}) {
		t.Errorf("%+v", got)
	}
	wantStatus(t, c.try(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "x", Mode: syscall.S_IFLNK | 0o777, Target: "t"}), overQuota)
	c.touch(layout.RootID, "empty")
	h.settle()
	checkCatalog(t, h.engine)
}

// TestQuotaOfBytes is about layouts for writing.
func TestQuotaOfBytes(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	c, root := h.client(), h.root()
	top := c.mkdir(layout.RootID, "top")
	dir := c.mkdir(top, "dir")
	const size = 2 * quotaMost
	id := c.create(dir, "f")
	// What was granted before there is a quota is taken back.
	recalled := make(chan layout.FileID, 10)
	c.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status {
		recalled <- a.ID
		return metarpc.StatusOK
	}
	grant := func(id layout.FileID, off, n, want int64) {
		t.Helper()
		if end, err := c.layout(id, off, n); err != nil || end != want {
			t.Errorf("layout from %d on to %d (%v), want %d", off, end, err, want)
		}
	}
	grant(id, 0, 2*testUnit, layout.ToEOF)
	root.limit(treeQuota(top), size, 0)
	if got := <-recalled; got != id {
		t.Errorf("recalled %d", got)
	}
	c.recall = nil
	grant(id, 0, 1<<20, size/quotaShare)
	grant(id, quotaMost, 1<<20, quotaMost+(size-quotaMost)/quotaShare)
	grant(id, size-100, 100, size)
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
	grant(id, quotaMost, 1<<20, quotaMost+(size-quotaMost)/quotaShare)
	if _, err := c.layout(id, size, 1); statusOf(err) != overQuota {
		t.Errorf("beyond: %v", err)
	}
	// Another file has what the first one has not asked for yet.
	other := c.create(top, "g")
	grant(other, 0, 1<<20, (quotaMost-1<<20)/quotaShare)
	reserve := func(n int64) error {
		return c.try(metarpc.OpReserve, &metarpc.ReserveArgs{ID: other, Len: n})
	}
	wantStatus(t, reserve(quotaMost), overQuota)
	c.report(false, metarpc.SizeReport{ID: id, End: size - 100, Mtime: now()})
	c.report(false, metarpc.SizeReport{ID: other, End: 50, Mtime: now()})
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id, other}})
	if got := root.quotaOf(treeQuota(top)); got.UsedBytes != size-50 { // all is known from here on
		t.Errorf("%+v", got)
	}
	wantStatus(t, reserve(51), overQuota)
	grant(other, 50, 1, quotaAlign) // 100 bytes, in whole pages
	grant(id, 0, 1<<20, size)       // what it has may be written again
	wantStatus(t, c.try(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: size}), overQuota)
	st := must[metarpc.StatFSResult](c, metarpc.OpStatFS, &metarpc.IDArgs{ID: other})
	if used := st.Total - st.Free; st.Total != size || used < size-100 || st.Avail != st.Free {
		t.Errorf("%+v", st)
	}
	if st := must[metarpc.StatFSResult](c, metarpc.OpStatFS, &metarpc.IDArgs{ID: layout.RootID}); st.Total != 1000 || st.Avail != 400 {
		t.Errorf("outside: %+v", st)
	}
	// No kernel writes there by itself.
	if r := must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: other, IOMode: layout.IOModeRW, Len: 1, Pin: metarpc.PinOnly}); len(r.Segments) > 0 {
		t.Errorf("pinned: %+v", r)
	}
	// What is cut is free for others.
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: 0})
	grant(other, 100, 1, (100+(size-100)/quotaShare+quotaAlign-1)/quotaAlign*quotaAlign)
	// A file that can be written anywhere loses that when it comes here.
	free := c.create(layout.RootID, "free")
	c.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status {
		recalled <- a.ID
		return metarpc.StatusOK
	}
	grant(free, 0, 2*testUnit, layout.ToEOF)
	must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "free", NewParent: dir, NewName: "free"})
	for <-recalled != free {
	}
	h.settle()
	checkCatalog(t, h.engine)
}

// TestQuotaOvershoot has several sessions fill a tree at the same time: there are no more files than may be, but for those whose calls were
// under way together.
func TestQuotaOvershoot(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	root := h.root()
	top := root.mkdir(layout.RootID, "top")
	const limit, sessions = 500, 8
	must[metarpc.AttrResult](root, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: top, Mask: metarpc.SetMode, Mode: 0o777})
	root.limit(treeQuota(top), 0, limit)
	var wg sync.WaitGroup
	for i := range sessions {
		c := h.client()
		wg.Go(func() {
			for n := 0; n < limit; n++ {
				err := c.try(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: top, Name: fmt.Sprintf("%d-%d", i, n), Mode: syscall.S_IFREG | 0o644})
				if statusOf(err) == overQuota {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if got := root.quotaOf(treeQuota(top)).UsedFiles; got < limit || got > limit+sessions-1 {
		t.Errorf("%d files, the limit is %d", got, limit)
	} else {
		t.Logf("%d files, the limit is %d", got, limit)
	}
}
