package meta

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// TestRenameRaces moves directories into each other from several goroutines: never may a loop come about, and all
// counters are right in the end.
func TestRenameRaces(t *testing.T) {
	for kind, open := range engines {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t, open(t)).start()
			c := h.client()
			const dirs, movers, moves = 6, 4, 60
			ids := []layout.FileID{layout.RootID}
			for i := range dirs {
				ids = append(ids, c.mkdir(layout.RootID, fmt.Sprint(i)))
			}
			var moved atomic.Int64
			var wg sync.WaitGroup
			for range movers {
				c := h.client()
				wg.Go(func() {
					for range moves {
						// Each directory keeps its name, so any of them can be looked for anywhere.
						i := rand.IntN(dirs)
						args := &metarpc.RenameArgs{
							OldParent: ids[rand.IntN(len(ids))], OldName: fmt.Sprint(i),
							NewParent: ids[rand.IntN(len(ids))], NewName: fmt.Sprint(i),
						}
						if rand.IntN(4) == 0 {
							args.Flags = metarpc.RenameExchange
							args.NewName = fmt.Sprint(rand.IntN(dirs))
						}
						_, err := ask[metarpc.Empty](c, metarpc.OpRename, args)
						switch statusOf(err) {
						case metarpc.StatusOK:
							moved.Add(1)
						case metarpc.Status(syscall.ENOENT), metarpc.Status(syscall.EINVAL), metarpc.Status(syscall.ENOTEMPTY):
						default:
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if moved.Load() == 0 {
				t.Error("nothing moved")
			}
			checkCatalog(t, h.engine)
		})
	}
}

// TestTwoDirectoriesIntoEachOther is the smallest case: a into b and b into a at the same time. What decides is in the
// catalog, so it is right through two services as well.
func TestTwoDirectoriesIntoEachOther(t *testing.T) {
	engine := memorytest.New()
	h, other := newHost(t, engine).start(), newHost(t, engine).start()
	c, d := h.client(), other.client()
	for i := range 200 {
		a, b := c.mkdir(layout.RootID, fmt.Sprint("a", i)), c.mkdir(layout.RootID, fmt.Sprint("b", i))
		var errs [2]error
		var wg sync.WaitGroup
		wg.Go(func() {
			_, errs[0] = ask[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: fmt.Sprint("a", i), NewParent: b, NewName: "x"})
		})
		wg.Go(func() {
			_, errs[1] = ask[metarpc.Empty](d, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: fmt.Sprint("b", i), NewParent: a, NewName: "x"})
		})
		wg.Wait()
		s0, s1 := statusOf(errs[0]), statusOf(errs[1])
		if s0+s1 != metarpc.Status(syscall.EINVAL) || s0 != 0 && s1 != 0 {
			t.Fatalf("round %d: %v and %v, want one to succeed and one to be EINVAL", i, errs[0], errs[1])
		}
	}
	checkCatalog(t, h.engine)
}

// TestRemoveAgainstCreate removes directories while others create in them.
func TestRemoveAgainstCreate(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	for i := range 100 {
		name := fmt.Sprint(i)
		id := a.mkdir(layout.RootID, name)
		var wg sync.WaitGroup
		var errs [2]error
		wg.Go(func() {
			_, errs[0] = ask[metarpc.RemoveResult](a, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: name, Dir: true})
		})
		wg.Go(func() {
			_, errs[1] = ask[metarpc.CreateResult](b, metarpc.OpCreate, &metarpc.CreateArgs{Parent: id, Name: "f"})
		})
		wg.Wait()
		s0, s1 := statusOf(errs[0]), statusOf(errs[1])
		if !(s0 == 0 && s1 == metarpc.Status(syscall.ENOENT)) && !(s0 == metarpc.Status(syscall.ENOTEMPTY) && s1 == 0) {
			t.Fatalf("round %d: rmdir %v, create %v", i, errs[0], errs[1])
		}
	}
	checkCatalog(t, h.engine)
	h.svc.mu.Lock()
	defer h.svc.mu.Unlock()
	for id, f := range h.svc.files {
		if len(f.claims) != 1 || !f.claims[0].open {
			t.Errorf("record of inode %d: %+v", id, f)
		}
	}
}

// fill puts n empty files into a directory, with few commits.
func fill(t testing.TB, h *host, dir layout.FileID, n int) {
	t.Helper()
	const batch = 1000
	for i := 0; i < n; i += batch {
		var b usage.Change
		many := min(batch, n-i)
		for j := range many {
			id, err := h.svc.numbers.take(context.Background(), 0)
			if err != nil {
				t.Fatal(err)
			}
			b.Put(schema.EntryKey(dir, fmt.Sprint("kept", i+j)), schema.Encode(&schema.Entry{ID: id, Type: syscall.S_IFREG}))
			row := schema.Inode{Mode: syscall.S_IFREG | 0o644, Nlink: 1, Size: int64(i + j), Parent: dir}
			b.Put(schema.InodeKey(id), schema.Encode(&row))
			b.Charge(&row, 1)
		}
		b.Add(schema.CountersKey(dir), schema.CounterEntries, int64(many))
		if err := h.engine.Commit(context.Background(), &b.Batch); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReadDirWhileItChanges pages through a big directory while names come, go and change: every name that stays is
// seen exactly once.
func TestReadDirWhileItChanges(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	dir := c.mkdir(layout.RootID, "d")
	n := 100_000
	if testing.Short() {
		n = 10_000
	}
	fill(t, h, dir, n)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for w := range 2 {
		c := h.client()
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				name := fmt.Sprintf("comes-and-goes-%d-%d", w, i%500)
				c.touch(dir, name)
				must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: name, NewParent: dir, NewName: name + "-again"})
				if i%2 == 0 {
					c.mkdir(dir, name)
					must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: name, Dir: true})
				}
				c.remove(dir, name+"-again")
			}
		})
	}
	for _, page := range []int{metarpc.MaxPage, 777} {
		seen := map[string]bool{}
		kept := 0
		for _, e := range c.list(dir, page) {
			if seen[e.Name] {
				t.Errorf("%q twice", e.Name)
			}
			seen[e.Name] = true
			var i int
			if _, err := fmt.Sscanf(e.Name, "kept%d", &i); err == nil {
				kept++
				if e.Attr.Size != int64(i) || e.Cookie != schema.Cookie(e.Name) {
					t.Errorf("%+v", e)
				}
			}
		}
		if kept != n {
			t.Errorf("pages of %d: %d of %d names", page, kept, n)
		}
	}
	cancel()
	wg.Wait()
	checkCatalog(t, h.engine)
}

// TestParent asks which directory an inode is in, of those below another one.
func TestParent(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	a := c.mkdir(layout.RootID, "a")
	b := c.mkdir(a, "b")
	other := c.mkdir(layout.RootID, "other")
	f := c.touch(b, "f")
	for _, q := range []struct {
		id, top, want layout.FileID
		err           syscall.Errno
	}{
		{f, layout.RootID, b, 0}, {f, a, b, 0}, {b, a, a, 0}, {a, a, layout.RootID, 0}, {layout.RootID, layout.RootID, layout.RootID, 0},
		{f, other, 0, syscall.EACCES}, {a, b, 0, syscall.EACCES}, {12345, layout.RootID, 0, syscall.ESTALE},
	} {
		r, err := ask[metarpc.ParentResult](c, metarpc.OpParent, &metarpc.ParentArgs{ID: q.id, Top: q.top})
		if statusOf(err) != metarpc.Status(q.err) || r.Parent != q.want {
			t.Errorf("parent of %d below %d: %d, %v; want %d, %v", q.id, q.top, r.Parent, err, q.want, q.err)
		}
	}
	must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: a, OldName: "b", NewParent: other, NewName: "b"})
	if r := must[metarpc.ParentResult](c, metarpc.OpParent, &metarpc.ParentArgs{ID: b, Top: other}); r.Parent != other {
		t.Errorf("parent %d after the rename, want %d", r.Parent, other)
	}
}

// TestEqualCookies checks that names with the same cookie are not split between pages.
func TestEqualCookies(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	dir := c.mkdir(layout.RootID, "d")
	file := c.touch(layout.RootID, "f")
	// No two names with the same hash are known, so the rows are made here.
	const cookie = 1 << 40
	for i := range 5 {
		key := append(schema.EntryKey(dir, "")[:9], 0, 0, 1, 0, 0, 0, 0, 0)
		put(t, h, append(key, fmt.Sprint(i)...), schema.Encode(&schema.Entry{ID: file, Type: syscall.S_IFREG}))
	}
	put(t, h, schema.EntryKey(dir, "other"), schema.Encode(&schema.Entry{ID: file, Type: syscall.S_IFREG}))
	r := must[metarpc.ReadDirResult](c, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Limit: 2})
	if len(r.Entries) != 5 || r.EOF || r.Entries[4].Cookie != cookie {
		t.Errorf("%+v", r)
	}
	r = must[metarpc.ReadDirResult](c, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Limit: 2, Cookie: cookie})
	if len(r.Entries) != 1 || !r.EOF || r.Entries[0].Name != "other" {
		t.Errorf("%+v", r)
	}
}
