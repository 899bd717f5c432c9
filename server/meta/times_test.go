package meta

import (
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Times that a writer has set come with his durable report, and count for more than what was reported of before.
func TestReportSetTimes(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	if _, err := a.layout(id, 0, 1000); err != nil {
		t.Fatal(err)
	}
	past, recent := time.Now().Add(-time.Hour).UnixNano(), time.Now().UnixNano()
	a.report(true, metarpc.SizeReport{ID: id, End: 100, Mtime: recent})
	set := metarpc.Times{Mask: metarpc.SetMtime | metarpc.SetAtime, Mtime: past, Atime: past + 1, Ctime: time.Now().UnixNano()}
	got := a.report(false, metarpc.SizeReport{ID: id, Set: set})[0]
	want := func(what string, at metarpc.Attr) {
		t.Helper()
		if at.Mtime != past || at.Atime != past+1 || at.Ctime < set.Ctime || at.Size != 100 {
			t.Errorf("%s: %+v", what, at)
		}
	}
	want("the answer", got)
	want("for others", b.attr(id))
	if row := h.row(id); row.Mtime != past || row.Atime != past+1 || row.Size != 0 {
		t.Errorf("row: %+v", row)
	}
	a.report(false, metarpc.SizeReport{ID: id, End: 100}) // nothing was written since
	want("when the size is durable", b.attr(id))

	// What was written after that has its own time.
	later := time.Now().UnixNano()
	a.report(false, metarpc.SizeReport{ID: id, End: 200, Mtime: later, Set: metarpc.Times{Mask: metarpc.SetMtime | metarpc.SetAtime, Mtime: past + 7, Atime: 9, Ctime: later}})
	if at := b.attr(id); at.Mtime != later || at.Atime != 9 || at.Size != 200 {
		t.Errorf("%+v", at)
	}
	// An owner that was set to what he is changes the ctime only.
	a.report(false, metarpc.SizeReport{ID: id, Set: metarpc.Times{Ctime: later + 5}})
	if at := b.attr(id); at.Mtime != later || at.Atime != 9 || at.Ctime != later+5 {
		t.Errorf("%+v", at)
	}
	// Nobody but a writer sets times so.
	b.report(false, metarpc.SizeReport{ID: id, Set: set})
	if at := a.attr(id); at.Mtime != later {
		t.Errorf("%+v, set by somebody who does not write it", at)
	}
}
