package meta

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
)

// bounded is an engine that may have no room.
type bounded struct {
	catalog.Engine
	full atomic.Bool
}

func (e *bounded) Commit(ctx context.Context, b *catalog.Batch) error {
	if e.full.Load() && len(b.Puts)+len(b.Deletes)+len(b.Deltas) > 0 {
		return fmt.Errorf("%w: make room", catalog.ErrFull)
	}
	return e.Engine.Commit(ctx, b)
}

// counting counts the lines of a log.
type counting struct {
	slog.Handler
	lines map[string]*atomic.Int32
}

func (h counting) Handle(ctx context.Context, r slog.Record) error {
	if n := h.lines[r.Message]; n != nil {
		n.Add(1)
	}
	return h.Handler.Handle(ctx, r)
}

// A catalog without room is ENOSPC for whoever wants to change something, and is spoken of once.
func TestCatalogFull(t *testing.T) {
	full, again, failed := new(atomic.Int32), new(atomic.Int32), new(atomic.Int32)
	e := &bounded{Engine: memorytest.New()}
	h := newHost(t, e)
	h.config = func(cfg *Config) {
		cfg.Log = slog.New(counting{logTo(t).Handler(), map[string]*atomic.Int32{
			"the catalog is full: nothing can be changed in the volume until there is room": full, "the catalog has room again": again, "call failed": failed,
		}})
	}
	h.start()
	c := h.client()
	f := c.create(layout.RootID, "f")
	for round := range int32(2) {
		e.full.Store(true)
		for range 3 {
			_, err := ask[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "d", Mode: syscall.S_IFDIR | 0o755})
			wantStatus(t, err, metarpc.Status(syscall.ENOSPC))
			_, err = c.layout(f, 0, 1)
			wantStatus(t, err, metarpc.Status(syscall.ENOSPC))
		}
		c.attr(f)
		e.full.Store(false)
		if _, err := c.layout(f, 0, 1); err != nil {
			t.Error(err)
		}
		c.mkdir(layout.RootID, fmt.Sprint("d", round))
		if full.Load() != round+1 || again.Load() != round+1 || failed.Load() != 0 {
			t.Errorf("it was said %d times that there is no room, %d that there is, and %d that a call failed", full.Load(), again.Load(), failed.Load())
		}
		f = c.create(layout.RootID, fmt.Sprint("f", round))
	}
}

// reserved is an engine that has only a reserve left while it is full.
type reserved struct {
	catalog.Engine
	full atomic.Bool
}

func (e *reserved) Commit(ctx context.Context, b *catalog.Batch) error {
	if e.full.Load() && b.Grows {
		if err := e.Engine.Commit(ctx, &catalog.Batch{Guards: b.Guards}); err != nil {
			return err
		}
		return fmt.Errorf("%w: make room", catalog.ErrFull)
	}
	return e.Engine.Commit(ctx, b)
}

func (e *reserved) Room() catalog.Room {
	full := e.full.Load()
	return catalog.Room{Free: 3, Size: 100, Reserve: 2, Low: full, Full: full}
}

// While a catalog with a reserve is full, nothing new is made, and everything else goes on. The service reports the state.
func TestCatalogReserve(t *testing.T) {
	full := new(atomic.Int32)
	e := &reserved{Engine: memorytest.New()}
	h := newHost(t, e)
	h.config = func(cfg *Config) {
		cfg.Log = slog.New(counting{logTo(t).Handler(), map[string]*atomic.Int32{
			"the catalog is full: nothing can be changed in the volume until there is room": full,
		}})
	}
	h.start()
	c, root := h.client(), h.root()
	dir := c.mkdir(layout.RootID, "dir")
	f := c.create(dir, "f")
	if _, err := c.layout(f, 0, testUnit); err != nil {
		t.Fatal(err)
	}
	named := c.touch(dir, "named")
	must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: named, Name: "user.old", Value: []byte("1")})
	room := func() metarpc.CatalogRoom {
		return must[metarpc.StatusResult](root, metarpc.OpStatus, &metarpc.Empty{}).Catalog
	}
	if r := room(); r != (metarpc.CatalogRoom{Free: 3, Size: 100, Reserve: 2}) {
		t.Errorf("with room: %+v", r)
	}
	e.full.Store(true)
	if r := room(); !r.Low || !r.Full {
		t.Errorf("without: %+v", r)
	}
	noSpace := func(what string, err error) {
		t.Helper()
		if statusOf(err) != metarpc.Status(syscall.ENOSPC) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := ask[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "new", Mode: 0o644})
	noSpace("create", err)
	for what, args := range map[string]*metarpc.MakeNodeArgs{
		"mkdir":   {Mode: syscall.S_IFDIR | 0o755},
		"symlink": {Mode: syscall.S_IFLNK | 0o777, Target: "there"},
		"mknod":   {Mode: syscall.S_IFIFO | 0o644},
	} {
		args.Parent, args.Name = dir, what
		_, err := ask[metarpc.AttrResult](c, metarpc.OpMakeNode, args)
		noSpace(what, err)
	}
	_, err = ask[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: named, Parent: dir, Name: "link"})
	noSpace("link", err)
	_, err = ask[metarpc.CreateResult](c, metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: dir, Mode: 0o600})
	noSpace("tmpfile", err)
	_, err = ask[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: named, Name: "user.new", Value: []byte("1")})
	noSpace("setxattr", err)
	_, err = ask[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "named", Mode: 0o644, Exclusive: true})
	wantStatus(t, err, metarpc.Status(syscall.EEXIST))

	c.open(named)
	must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: named, Name: "user.old", Value: []byte("2")})
	must[metarpc.Empty](c, metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: named, Name: "user.old"})
	if _, err := c.layout(f, 0, testUnit); err != nil {
		t.Errorf("a layout of what there is: %v", err)
	}
	c.report(false, metarpc.SizeReport{ID: f, End: 10, Mtime: 1})
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetSize, Size: 5})
	must[metarpc.LockDone](c, metarpc.OpLock, &metarpc.LockArgs{ID: f, Owner: 1, Type: metarpc.LockWrite, End: 9})
	must[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: "named", NewParent: dir, NewName: "renamed"})
	c.closeFile(named)
	c.remove(dir, "renamed")
	other := h.client()
	other.attr(f)
	c.closeFile(f)
	c.remove(dir, "f")
	must[metarpc.RemoveResult](c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "dir", Dir: true})
	if n := full.Load(); n != 0 {
		t.Errorf("it was said %d times that nothing can be changed", n)
	}
	e.full.Store(false)
	c.mkdir(layout.RootID, "dir")
}
