package meta

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

// createToWrite is a call that makes a file and asks for its layout.
func createToWrite(parent layout.FileID, name string) *metarpc.CreateArgs {
	return &metarpc.CreateArgs{Parent: parent, Name: name, Mode: 0o644, Access: metarpc.AccessWrite, Layout: true, Near: []layout.DeviceID{{7}}}
}

// rows counts what there is of the layouts of files.
func (h *host) rows() (layouts, writers int64) {
	return countRows(context.Background(), h.engine, schema.PrefixLayout), countRows(context.Background(), h.engine, schema.PrefixWriter)
}

func (h *host) wantRows(layouts, writers int64) {
	h.t.Helper()
	if l, w := h.rows(); l != layouts || w != writers {
		h.t.Errorf("%d layouts and %d writers in the catalog, want %d and %d", l, w, layouts, writers)
	}
}

// wantIdle checks that nobody is still waited for.
func (h *host) wantIdle(files int) {
	h.t.Helper()
	h.svc.mu.Lock()
	defer h.svc.mu.Unlock()
	if len(h.svc.files) != files {
		h.t.Errorf("%d files are known, want %d", len(h.svc.files), files)
	}
	for id, f := range h.svc.files {
		for _, cl := range f.claims {
			if f.granting != 0 || cl.assigning != 0 {
				h.t.Errorf("inode %d: %d granting, %d assigning", id, f.granting, cl.assigning)
			}
		}
	}
}

// TestCreateWithLayout makes a file whose layout is as good as one that was asked for, in one commit.
func TestCreateWithLayout(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	c, other := h.client(), h.client()
	c.create(layout.RootID, "earlier") // and so a number is ready
	var mu sync.Mutex
	commits := 0
	engine.hook(func(*catalog.Batch) error {
		mu.Lock()
		defer mu.Unlock()
		commits++
		return nil
	})
	r := must[metarpc.CreateResult](c, metarpc.OpCreate, createToWrite(layout.RootID, "f"))
	engine.hook(nil)
	if commits != 1 {
		t.Errorf("%d commits", commits)
	}
	id := r.Attr.ID
	if !r.Granted || len(r.Segments) != 1 || r.Segments[0].IOMode != layout.IOModeRW || r.Segments[0].Len != testUnit || r.Lease == 0 {
		t.Fatalf("%+v", r)
	}
	if !slices.Equal(h.files.near, []layout.DeviceID{{7}}) || !slices.Equal(h.files.settled, []error{nil}) {
		t.Errorf("near %v, settled %v", h.files.near, h.files.settled)
	}
	h.wantRows(1, 1)
	h.wantIdle(2)
	if end, err := c.layout(id, 0, 1); err != nil || end != testUnit {
		t.Errorf("asked for again it ends at %d, %v", end, err)
	}

	// Who looks at it is told what the writer says, and may keep nothing.
	asked := 0
	c.mu.Lock()
	c.back = func(op metarpc.BackOp, args any) metarpc.Status {
		if op == metarpc.BackSizeQuery {
			asked++
			c.report(true, metarpc.SizeReport{ID: id, End: 100, Mtime: 1 << 60})
		}
		return metarpc.StatusOK
	}
	c.mu.Unlock()
	a := must[metarpc.AttrResult](other, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessRead})
	if a.Attr.Size != 100 || a.Lease != 0 || asked != 1 {
		t.Errorf("opened by another: %+v, %d questions", a, asked)
	}
	c.report(false, metarpc.SizeReport{ID: id, End: 100, Mtime: 1 << 60})
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
	h.wantRows(1, 0)
	checkCatalog(t, engine)
}

// TestCreateWithoutLayout makes files that get none.
func TestCreateWithoutLayout(t *testing.T) {
	h := startMemory(t)
	c, root := h.client(), h.root()
	top := c.mkdir(layout.RootID, "top")
	root.limit(treeQuota(top), 1<<30, 0)
	c.create(layout.RootID, "there")
	for _, try := range []struct {
		name  string
		args  *metarpc.CreateArgs
		short bool
	}{
		{"not asked", &metarpc.CreateArgs{Parent: layout.RootID, Name: "a", Mode: 0o644, Access: metarpc.AccessWrite}, false},
		{"no data files ready", createToWrite(layout.RootID, "b"), true},
		{"quota", createToWrite(top, "c"), false},
		{"was there", createToWrite(layout.RootID, "there"), false},
	} {
		h.files.mu.Lock()
		h.files.short = try.short
		h.files.mu.Unlock()
		if r := must[metarpc.CreateResult](c, metarpc.OpCreate, try.args); r.Granted || len(r.Segments) > 0 {
			t.Errorf("%s: %+v", try.name, r)
		}
	}
	h.wantRows(0, 0)
	if slices.Contains(h.files.settled, nil) { // what was there was taken for new at first
		t.Errorf("settled %v", h.files.settled)
	}
}

// TestCreateLayoutNotCommitted makes files whose batches fail, and tells of each what became of it.
func TestCreateLayoutNotCommitted(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	c := h.client()
	dir := c.mkdir(layout.RootID, "d")
	lost := &catalog.GuardError{Index: 3}
	broken := errors.New("the disk is broken")
	for _, try := range []struct {
		name    string
		fails   []error // so many commits, one after the other
		done    bool    // the first of them all the same
		settled []error
		granted bool
	}{
		{"guard", []error{lost}, false, []error{lost, nil}, true},
		{"conflict", []error{catalog.ErrConflict, catalog.ErrConflict}, false, []error{catalog.ErrConflict, catalog.ErrConflict, nil}, true},
		{"unknown, not done", []error{catalog.ErrUnknown}, false, []error{errRetry, nil}, true},
		{"unknown, done", []error{catalog.ErrUnknown}, true, []error{nil}, true},
		{"broken", []error{broken}, false, []error{broken}, false},
	} {
		layouts, writers := h.rows()
		h.svc.mu.Lock()
		known := len(h.svc.files)
		h.svc.mu.Unlock()
		h.files.mu.Lock()
		h.files.settled = nil
		h.files.mu.Unlock()
		engine.hook(func(b *catalog.Batch) error {
			made := slices.ContainsFunc(b.Puts, func(row catalog.Row) bool { return row.Key[0] == schema.PrefixLayout })
			if !made || len(try.fails) == 0 {
				return nil
			}
			err := try.fails[0]
			try.fails = try.fails[1:]
			if try.done {
				err = errors.Join(engine.Engine.Commit(t.Context(), b), err)
			}
			return err
		})
		r, err := ask[metarpc.CreateResult](c, metarpc.OpCreate, createToWrite(dir, try.name))
		engine.hook(nil)
		if r.Granted != try.granted || (len(r.Segments) > 0) != try.granted || (err == nil) != try.granted {
			t.Errorf("%s: %+v, %v", try.name, r, err)
		}
		if !slices.EqualFunc(h.files.settled, try.settled, errors.Is) {
			t.Errorf("%s: settled %v, want %v", try.name, h.files.settled, try.settled)
		}
		n := 0
		if try.granted {
			n = 1
		}
		h.wantRows(layouts+int64(n), writers+int64(n))
		h.wantIdle(known + n)
	}
	checkCatalog(t, engine)
}

// TestCreateLayoutReplayed has the next service answer: it does not say what was granted, but that something was, and the client asks.
func TestCreateLayoutReplayed(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	args := createToWrite(layout.RootID, "f")
	hdr, ch := c.begin(metarpc.OpCreate, args)
	<-ch
	h.restart()
	c.connect()
	var r metarpc.CreateResult
	if err := c.finish(hdr, c.send(hdr, args), &r); err != nil {
		t.Fatal(err)
	}
	if !r.Granted || len(r.Segments) > 0 || r.Lease != 0 {
		t.Fatalf("%+v", r)
	}
	must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
	h.wantRows(1, 1)
	if end, err := c.layout(r.Attr.ID, 0, 1); err != nil || end != testUnit {
		t.Errorf("layout up to %d, %v", end, err)
	}
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{r.Attr.ID}})
	h.wantRows(1, 0)
	c.closeFile(r.Attr.ID)
	checkCatalog(t, h.engine)
}

// TestCreateLayoutRemoved removes a file that was made with a layout and not written.
func TestCreateLayoutRemoved(t *testing.T) {
	h := startMemory(t)
	c, other := h.client(), h.client()
	r := must[metarpc.CreateResult](c, metarpc.OpCreate, createToWrite(layout.RootID, "f"))
	other.remove(layout.RootID, "f")
	h.wantRows(1, 1)
	c.closeFile(r.Attr.ID)
	c.wantGone(r.Attr.ID)
	h.wantRows(0, 0)
	checkCatalog(t, h.engine)
}

// TestCreateLayoutRange checks that whoever makes a file of two copies has all of it alone.
func TestCreateLayoutRange(t *testing.T) {
	h := startMemory(t)
	c, other := h.client(), h.client()
	dir := c.mkdir(layout.RootID, "d")
	must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: dir, Name: xattrLayout, Value: []byte("mirrors=2")})
	recalled := make(chan metarpc.LayoutRecallArgs, 10)
	c.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status {
		recalled <- *a
		return metarpc.StatusOK
	}
	r := must[metarpc.CreateResult](c, metarpc.OpCreate, createToWrite(dir, "f"))
	if !r.Granted || len(r.Segments[0].Mirrors) != 2 {
		t.Fatalf("%+v", r)
	}
	other.open(r.Attr.ID)
	must[metarpc.LayoutResult](other, metarpc.OpLayoutGet, rw(r.Attr.ID))
	if a := <-recalled; a.ID != r.Attr.ID || a.Off != 0 {
		t.Errorf("recalled: %+v", a)
	}
}

// committed calls after when a batch that puts a layout has been committed, before that is known.
type committed struct {
	catalog.Engine
	after func(id layout.FileID)
}

func (e *committed) Commit(ctx context.Context, b *catalog.Batch) error {
	err := e.Engine.Commit(ctx, b)
	for _, row := range b.Puts {
		if err == nil && row.Key[0] == schema.PrefixLayout && e.after != nil {
			e.after(schema.IDOf(row.Key))
		}
	}
	return err
}

// TestCreateLayoutRecalled cuts a file as soon as others can know it: the layout is recalled when it has been told of.
func TestCreateLayoutRecalled(t *testing.T) {
	engine := &committed{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	c, other := h.client(), h.client()
	cut := make(chan error, 1)
	engine.after = func(id layout.FileID) {
		engine.after = nil
		go func() {
			_, err := ask[metarpc.AttrResult](other, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize})
			cut <- err
		}()
		time.Sleep(50 * time.Millisecond) // it comes to the recall
	}
	answers := make(chan chan []byte, 1)
	recalled := make(chan int, 1)
	c.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
		recalled <- len(<-answers)
		return metarpc.StatusOK
	}
	hdr, ch := c.begin(metarpc.OpCreate, createToWrite(layout.RootID, "f"))
	answers <- ch
	if n := <-recalled; n != 1 {
		t.Error("recalled before it was granted")
	}
	if err := <-cut; err != nil {
		t.Error(err)
	}
	var r metarpc.CreateResult
	if err := c.finish(hdr, ch, &r); err != nil || !r.Granted {
		t.Errorf("%+v, %v", r, err)
	}
}
