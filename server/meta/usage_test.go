package meta

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// settle has all directories tell their parents, so that nothing changes the catalog by itself any more.
func (h *host) settle() {
	h.t.Helper()
	for try := 0; ; try++ {
		all := []*host{h}
		if h.others != nil {
			all = h.others.hosts
		}
		for _, h := range all {
			if err := h.svc.usage.Propagate(context.Background()); err != nil {
				h.t.Fatal(err)
			}
		}
		if n := countRows(context.Background(), h.engine, schema.PrefixDirty); n == 0 {
			return
		} else if try > 100 {
			h.t.Fatalf("%d directories stay dirty", n)
		}
	}
}

// unsure is an engine whose commits sometimes do not say how they ended, whoever makes them.
type unsure struct {
	catalog.Engine
	on atomic.Bool
}

func (e *unsure) Commit(ctx context.Context, b *catalog.Batch) error {
	if e.on.Load() && len(b.Deltas) > 0 {
		switch rand.N(20) {
		case 0:
			return errors.Join(e.Engine.Commit(ctx, b), catalog.ErrUnknown)
		case 1:
			return catalog.ErrUnknown
		}
	}
	return e.Engine.Commit(ctx, b)
}

// walk adds up what is below a directory, as du(1) does.
func (c *client) walk(dir layout.FileID, seen map[layout.FileID]bool) (u usage.Sum) {
	for _, e := range c.list(dir, 100) {
		if isDir(e.Attr.Mode) {
			u = u.Plus(c.walk(e.Attr.ID, seen)).Plus(usage.Sum{Dirs: 1})
		} else if !seen[e.Attr.ID] {
			seen[e.Attr.ID] = true
			u = u.Plus(usage.Sum{Bytes: e.Attr.Size, Files: 1})
		}
	}
	return u
}

// TestUsage does random things while commits do not say how they ended and the service is killed, and compares what is counted with what
// there is.
func TestUsage(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	engine := &unsure{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	c := h.root()
	dirs := []layout.FileID{layout.RootID}
	for i := range 8 {
		dirs = append(dirs, c.mkdir(dirs[rng.IntN(len(dirs))], fmt.Sprint("d", i)))
	}
	name := func() string { return fmt.Sprint("f", rng.IntN(12)) }
	dir := func() layout.FileID { return dirs[rng.IntN(len(dirs))] }
	var files []layout.FileID
	file := func() layout.FileID { return files[rng.IntN(len(files))] }
	// What fails for a good reason is as good as what does not.
	try := func(op metarpc.Op, args any) {
		t.Helper()
		hdr, ch := c.begin(op, args)
		if err := c.finish(hdr, ch, op.NewResult()); statusOf(err) > 1000 && statusOf(err) != metarpc.StatusGrace {
			t.Fatalf("%v %+v: %v", op, args, err)
		}
	}
	steps := 3000
	if testing.Short() {
		steps = 600
	}
	for i := range steps {
		engine.on.Store(true)
		switch rng.IntN(14) {
		case 0, 1:
			r, err := ask[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir(), Name: name(), Mode: 0o644})
			if err == nil {
				files = append(files, r.Attr.ID)
			}
		case 2:
			try(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir(), Name: name(), Mode: syscall.S_IFLNK | 0o777, Target: "somewhere"})
		case 3:
			r, err := ask[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir(), Name: name(), Mode: syscall.S_IFDIR | 0o755})
			if err == nil && len(dirs) < 30 {
				dirs = append(dirs, r.Attr.ID)
			}
		case 4:
			r, err := ask[metarpc.CreateResult](c, metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: dir(), Mode: 0o600})
			if err == nil {
				files = append(files, r.Attr.ID)
			}
		case 5, 6:
			try(metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir(), Name: name(), Dir: rng.IntN(3) == 0})
		case 7, 8:
			names := []string{name(), fmt.Sprint("d", rng.IntN(8))}
			flags := []uint32{0, metarpc.RenameNoReplace, metarpc.RenameExchange}
			try(metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir(), OldName: names[rng.IntN(2)], NewParent: dir(), NewName: names[rng.IntN(2)], Flags: flags[rng.IntN(3)]})
		}
		if len(files) > 0 {
			switch rng.IntN(10) {
			case 0:
				try(metarpc.OpLink, &metarpc.LinkArgs{ID: file(), Parent: dir(), Name: name()})
			case 1:
				try(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: file(), Mask: metarpc.SetSize, Size: rng.Int64N(1000)})
			case 2:
				args := &metarpc.SetAttrArgs{ID: file(), Mask: metarpc.SetUID | metarpc.SetGID, UID: rng.Uint32N(3), GID: rng.Uint32N(3)}
				if rng.IntN(4) == 0 {
					args.ID = dir()
				}
				try(metarpc.OpSetAttr, args)
			case 3, 4:
				id := file()
				if _, err := c.layout(id, 0, 1000); err == nil {
					try(metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: id, End: rng.Int64N(2000), Mtime: now()}}, Provisional: rng.IntN(4) == 0})
				}
			case 5:
				try(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: dir(), Mask: metarpc.SetMtime, Mtime: int64(i)})
			case 6:
				try(metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{file()}})
			}
		}
		if i%500 != 499 {
			continue
		}
		engine.on.Store(false)
		checkCatalog(t, engine)
		if i%1000 == 999 {
			h.restart()
			c.connect()
			must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
			files = nil
		}
		for _, d := range dirs {
			if r, err := ask[metarpc.AttrResult](c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: d}); statusOf(err) == metarpc.Status(syscall.ESTALE) || err == nil && r.Attr.Nlink == 0 {
				continue // it was removed
			}
			got, err := h.svc.usage.Of(t.Context(), d)
			if err != nil {
				t.Fatal(err)
			}
			// Without the sizes that are reported and not durable, and without what has its home outside.
			if want := c.walk(d, map[layout.FileID]bool{}); got.Dirs != want.Dirs || d == layout.RootID && got.Files > want.Files {
				t.Errorf("step %d: directory %d has %+v, there is %+v", i, d, got, want)
			}
		}
		h.settle()
		checkCatalog(t, engine)
		if t.Failed() {
			t.FailNow()
		}
	}
}

// TestUsageWhileItChanges has directories change their parents, come and go, while they tell these what is in them.
func TestUsageWhileItChanges(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := h.svc.usage.Propagate(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	c := h.client()
	tops := []layout.FileID{c.mkdir(layout.RootID, "0"), c.mkdir(layout.RootID, "1")}
	for i := range 4 {
		c := h.client()
		name := fmt.Sprint("dir", i)
		id := c.mkdir(tops[0], name)
		files := h.client()
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				files.touch(id, fmt.Sprint(n))
				if n%3 == 2 {
					files.remove(id, fmt.Sprint(n-1))
				}
			}
		})
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: tops[n%2], OldName: name, NewParent: tops[1-n%2], NewName: name})
				fleeting := c.mkdir(id, "fleeting")
				c.touch(fleeting, "x")
				c.remove(fleeting, "x")
				must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: id, Name: "fleeting", Dir: true})
			}
		})
	}
	for ctx.Err() == nil && !t.Failed() {
		checkCatalog(t, h.engine)
	}
	wg.Wait()
	h.settle()
	checkCatalog(t, h.engine)
}

// TestUsageOfDeepTrees compares usage with what there is where all is durable and has one name.
func TestUsageOfDeepTrees(t *testing.T) {
	for kind, open := range engines {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t, open(t)).start()
			c := h.client()
			top := c.mkdir(layout.RootID, "top")
			at, want := top, usage.Sum{}
			var chain []layout.FileID
			for i := range 30 {
				chain = append(chain, at)
				id := c.create(at, "file")
				c.layout(id, 0, 1)
				c.report(false, metarpc.SizeReport{ID: id, End: int64(1000 * (i + 1)), Mtime: now()})
				want = want.Plus(usage.Sum{Bytes: int64(1000 * (i + 1)), Files: 1, Dirs: 1})
				at = c.mkdir(at, "dir")
			}
			check := func(dir layout.FileID, want usage.Sum) {
				t.Helper()
				value := must[metarpc.BytesResult](c, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: dir, Name: "weft.usage"}).Value
				if text := fmt.Sprintf("bytes=%d files=%d dirs=%d", want.Bytes, want.Files, want.Dirs); string(value) != text {
					t.Errorf("directory %d: %q, want %q", dir, value, text)
				}
			}
			check(top, want)
			check(layout.RootID, want.Plus(usage.Sum{Dirs: 1}))
			// The half below goes elsewhere, and one file out of it.
			must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: chain[14], OldName: "dir", NewParent: layout.RootID, NewName: "half"})
			must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: chain[29], OldName: "file", NewParent: top, NewName: "last"})
			half := usage.Sum{Files: 14, Dirs: 15}
			for i := 15; i < 29; i++ {
				half.Bytes += int64(1000 * (i + 1))
			}
			check(chain[15], half)
			check(top, want.Minus(half).Minus(usage.Sum{Dirs: 1}))
			check(layout.RootID, want.Plus(usage.Sum{Dirs: 1}))
			h.settle()
			checkCatalog(t, h.engine)
			// In between others know it without asking.
			c.touch(at, "one more")
			waittest.Until(t, "the root is told", func() bool {
				counters, err := schema.ReadCounters(t.Context(), h.svc.engine, layout.RootID)
				return err == nil && totalOf(counters) == want.Plus(usage.Sum{Files: 1, Dirs: 1})
			})
		})
	}
}

// failing is an engine on which only so many commits succeed.
type failing struct {
	catalog.Engine
	left int
}

func (e *failing) Commit(ctx context.Context, b *catalog.Batch) error {
	if e.left--; e.left < 0 {
		return catalog.ErrClosed
	}
	return e.Engine.Commit(ctx, b)
}

// TestUpgrade opens a volume of an earlier format, and dies in between.
func TestUpgrade(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	c := h.root()
	dirs := []layout.FileID{layout.RootID, c.mkdir(layout.RootID, "a")}
	dirs = append(dirs, c.mkdir(dirs[1], "b"), c.mkdir(dirs[1], "empty"))
	for i := range 2500 {
		c.touch(dirs[i%3], fmt.Sprint(i))
	}
	for i := range 20 {
		id := c.create(dirs[i%3], fmt.Sprint("big", i))
		must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize | metarpc.SetUID, Size: 100, UID: uint32(i % 4)})
		must[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: dirs[(i+1)%3], Name: fmt.Sprint("twice", i)})
		must[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: dirs[i%3], Name: fmt.Sprint("thrice", i)})
	}
	open := must[metarpc.CreateResult](c, metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: dirs[1], Mode: 0o600}).Attr.ID
	want, err := h.svc.usage.Of(t.Context(), dirs[1])
	if err != nil {
		t.Fatal(err)
	}
	h.settle()
	h.kill(h.svc)
	older(t, h.engine, open)
	for n := 0; ; n++ {
		_, err := OpenVolume(t.Context(), &failing{h.engine, n}, layout.Policy{}, 1)
		if err == nil {
			t.Logf("%d commits", n)
			break
		}
		if n > 100 || !errors.Is(err, catalog.ErrClosed) {
			t.Fatal(err)
		}
	}
	h.start()
	h.settle()
	checkCatalog(t, h.engine)
	// Which of its names a file has its home by was not known any more.
	got, err := h.svc.usage.Of(t.Context(), dirs[1])
	if err != nil || got.Dirs != want.Dirs || got.Files > want.Files+20 || got.Files < want.Files-20 {
		t.Errorf("%+v (%v), had %+v", got, err, want)
	}
	all, err := h.svc.usage.Of(t.Context(), layout.RootID)
	if err != nil || all != (usage.Sum{Bytes: 2000, Files: 2520, Dirs: 3}) {
		t.Errorf("%+v (%v) in all", all, err)
	}
}

// older makes the catalog what earlier versions wrote, with the mark of an upgrade that has not come far: stray is an inode without a name.
func older(t *testing.T, engine catalog.Engine, stray layout.FileID) {
	t.Helper()
	var b catalog.Batch
	for kv, err := range engine.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		switch key := append([]byte(nil), kv.Key...); kv.Key[0] {
		case schema.PrefixInode:
			var row schema.Inode
			if err := schema.Decode(kv.Value, &row); err != nil {
				t.Fatal(err)
			}
			if !isDir(row.Mode) {
				row.Parent = 0
				if id := schema.IDOf(key); id%5 == 0 || id == stray {
					row.Parent = 77
				}
				b.Put(key, schema.Encode(&row))
			}
		case schema.PrefixCounters:
			c, err := catalog.DecodeCounters(kv.Value)
			if err != nil {
				t.Fatal(err)
			}
			if len(c) > 4 && schema.IDOf(key)%2 == 0 {
				c = c[:4]
			}
			for i := 4; i < len(c); i++ {
				c[i] = 5
			}
			b.Put(key, catalog.EncodeCounters(c...))
		case schema.PrefixDirty, schema.PrefixTold:
			b.Delete(key)
		case schema.PrefixOwner:
			b.Put(key, catalog.EncodeCounters(7, 7))
		case schema.KeyVolume[0]:
			var v schema.Volume
			if err := schema.Decode(kv.Value, &v); err != nil {
				t.Fatal(err)
			}
			row, err := msgpack.Marshal(&struct {
				_msgpack struct{} `msgpack:",as_array"`
				Format   int
				ID       [16]byte
				Created  int64
				Policy   schema.Policy
			}{Format: 3, ID: v.ID, Created: v.Created, Policy: v.Policy})
			if err != nil {
				t.Fatal(err)
			}
			b.Put(key, row)
		}
	}
	if err := engine.Commit(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
}

// TestUsageOfShards has what is committed in directories of services that tell nobody counted by another, for usage and for quotas, while it comes and while it goes.
func TestUsageOfShards(t *testing.T) {
	c := startCluster(t, 3, nil)
	cl := c.client()
	top := c.dirAt(cl, 0, "top")
	deep := top
	for i := range 6 {
		deep = c.dirIn(deep, cl, 1+i%2, "d")
	}
	c.hosts[0].settle()
	for k := 1; k < 3; k++ {
		c.onCommit(k, func(b *catalog.Batch) error {
			if slices.ContainsFunc(b.Puts, func(p catalog.Row) bool { return p.Key[0] == schema.PrefixTold }) {
				return catalog.ErrConflict
			}
			return nil
		})
	}
	count := func() int64 {
		t.Helper()
		u, err := c.svc(0).usage.Of(t.Context(), top)
		if err != nil {
			t.Fatal(err)
		}
		if want := cl.walk(top, map[layout.FileID]bool{}); u != want {
			t.Fatalf("counted %+v, there are %+v", u, want)
		}
		return u.Inodes()
	}
	const more = 20
	cl.limit(treeQuota(top), 0, count()+more)
	for round := range 3 {
		for i := range more {
			cl.touch(deep, fmt.Sprint(i))
		}
		count()
		if err := c.svc(0).quotas.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantStatus(t, cl.try(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: top, Name: "too much", Mode: syscall.S_IFREG}), overQuota)
		for i := range more {
			cl.remove(deep, fmt.Sprint(i))
		}
		cl.touch(top, fmt.Sprint("fits ", round))
		cl.remove(top, fmt.Sprint("fits ", round))
		count()
	}
}
