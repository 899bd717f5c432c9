package meta

import (
	"testing"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// used looks at what a client, and the catalog, know to be allocated of a file.
func (c *client) used(what string, id layout.FileID, want, row metarpc.Used) {
	c.h.t.Helper()
	if got := c.attr(id).Used; got != want {
		c.h.t.Errorf("%s: a client is told %d, want %d", what, got, want)
	}
	if got := c.h.row(id).Used; got != row {
		c.h.t.Errorf("%s: the catalog has %d, want %d", what, got, row)
	}
}

// write is a layout for writing of all of a file.
func (c *client) write(id layout.FileID) {
	c.h.t.Helper()
	if _, err := c.layout(id, 0, layout.ToEOF); err != nil {
		c.h.t.Fatal(err)
	}
}

func (c *client) giveBack(id layout.FileID) {
	c.h.t.Helper()
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
}

// TestUsed has one client write a file, and another look at it.
func TestUsed(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	none, some := metarpc.UsedOf(0), metarpc.UsedOf(2*4096)

	b.used("a new file", id, none, none)
	a.write(id)
	b.used("while it may be written", id, 0, none)
	a.used("for its writer", id, none, none)
	a.report(true, metarpc.SizeReport{ID: id, End: 9000, Mtime: 1, Used: some})
	b.used("provisionally written", id, 0, none)
	if got := a.report(false, metarpc.SizeReport{ID: id, End: 9000, Mtime: 1, Used: some}); got[0].Used != some {
		t.Errorf("the report was answered with %+v", got)
	}
	b.used("reported", id, 0, some)
	a.report(false, metarpc.SizeReport{ID: id, Atime: 5})
	a.giveBack(id)
	b.used("not written any more", id, some, some)

	// Sizes that a client sets.
	must[metarpc.AttrResult](b, metarpc.OpSetAttr, setSize(id, 1<<30))
	b.used("longer", id, some, some)
	must[metarpc.AttrResult](b, metarpc.OpSetAttr, setSize(id, 5000))
	b.used("cut where nobody knows what is there", id, 0, 0)
	must[metarpc.AttrResult](b, metarpc.OpSetAttr, setSize(id, 0))
	b.used("cut to nothing", id, none, none)
	a.write(id)
	a.report(false, metarpc.SizeReport{ID: id, End: 9000, Mtime: 1, Used: metarpc.UsedOf(9000)})
	a.giveBack(id)
	must[metarpc.AttrResult](b, metarpc.OpSetAttr, setSize(id, 5000))
	b.used("cut, having no holes", id, some, some)

	// It is not known any more as soon as a writer says so, or does not say anything, as earlier versions.
	a.write(id)
	a.report(false, metarpc.SizeReport{ID: id, Used: metarpc.UsedLost})
	a.used("the writer does not know", id, 0, 0)
	a.report(false, metarpc.SizeReport{ID: id, Used: some})
	a.used("it knows again", id, some, some)
	a.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 2})
	a.used("the writer does not say", id, 0, 0)
	a.giveBack(id)

	// Nor from a session that may not write.
	b.report(false, metarpc.SizeReport{ID: id, Used: some})
	b.used("told by a reader", id, 0, 0)
}

// TestUsedTogether has two clients write one file: what either of them counts is not all.
func TestUsedTogether(t *testing.T) {
	h := startMemory(t)
	a, b, c := h.client(), h.client(), h.client()
	id := a.create(layout.RootID, "f")
	none := metarpc.UsedOf(0)
	b.open(id)
	a.write(id)
	b.write(id)
	a.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 1, Used: metarpc.UsedOf(1)})
	a.used("two write", id, 0, 0)
	b.giveBack(id)
	a.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 2, Used: metarpc.UsedOf(1)})
	a.used("another has written", id, 0, 0)
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, 0))
	a.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 3, Used: metarpc.UsedOf(3)})
	a.used("another has cut it", id, 0, 0)
	a.giveBack(id)
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, 0))
	c.used("all over", id, none, none)
	a.write(id)
	a.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 4, Used: metarpc.UsedOf(1)})
	a.giveBack(id)
	c.used("one writes alone", id, metarpc.UsedOf(1), metarpc.UsedOf(1))
}

// TestUsedLost has writers go that have not said what they have written.
func TestUsedLost(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	b.open(id)
	a.write(id)
	h.svc.mu.Lock()
	sess := h.svc.sessions[a.welcome.Session]
	h.svc.mu.Unlock()
	h.svc.end(sess, "the test ends it")
	waittest.Until(t, "nothing is left of the session's writing", func() bool { return h.row(id).Used == 0 })
	b.used("its writer is gone", id, 0, 0)

	// A service that starts does not know who wrote beside whom before.
	id = b.create(layout.RootID, "g")
	b.write(id)
	b.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 1, Used: metarpc.UsedOf(1)})
	h.restart()
	b.connect()
	h.svc.endGrace()
	if got := h.row(id).Used; got != metarpc.UsedOf(1) {
		t.Errorf("after a restart: %d", got)
	}
	b.report(false, metarpc.SizeReport{ID: id, End: 1, Mtime: 2, Used: metarpc.UsedOf(1)})
	b.used("reported to another instance", id, 0, 0)
}
