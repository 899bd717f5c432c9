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
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/catalog/memory"
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
	e := &bounded{Engine: memory.New()}
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
