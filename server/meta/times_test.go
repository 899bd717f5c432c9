package meta

import (
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// TestSetTimeOfOthersWrites sets the times of a file that another session has written and not yet reported for good.
func TestSetTimeOfOthersWrites(t *testing.T) {
	for _, appends := range []bool{false, true} {
		h := startMemory(t)
		a, b := h.client(), h.client()
		id := a.create(layout.RootID, "f")
		b.open(id)
		var written int64
		a.back = func(op metarpc.BackOp, _ any) metarpc.Status {
			if op == metarpc.BackSizeQuery {
				a.report(true, metarpc.SizeReport{ID: id, End: 100, Mtime: written})
			}
			return metarpc.StatusOK
		}
		recalls := 0
		a.recall = func(args *metarpc.LayoutRecallArgs) metarpc.Status {
			recalls++
			if *args != (metarpc.LayoutRecallArgs{ID: id, Len: layout.ToEOF}) {
				t.Errorf("recall of %+v", args)
			}
			a.report(false, metarpc.SizeReport{ID: id, End: 100, Mtime: written})
			return metarpc.StatusOK
		}
		must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{
			ID: id, IOMode: layout.IOModeRW, Len: 100, Append: appends,
		})
		const old = 1e18
		set := func(c *client, mask metarpc.AttrMask) metarpc.Attr {
			t.Helper()
			return must[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: mask, Mtime: old}).Attr
		}
		same := func(when string, c *client, want int64) {
			t.Helper()
			if got := c.attr(id); got.Mtime != want {
				t.Errorf("appends %v, %s: mtime %d, want %d", appends, when, got.Mtime, want)
			}
		}
		written = now()
		if !appends {
			same("written", b, written)
		}
		if got := set(b, metarpc.SetMtime); got.Mtime != old || recalls != 1 {
			t.Errorf("appends %v: set to %d after %d recalls", appends, got.Mtime, recalls)
		}
		same("set", a, old)
		if row := h.row(id); row.Mtime != old || row.Size != 100 {
			t.Errorf("appends %v: row %+v", appends, row)
		}
		a.report(false, metarpc.SizeReport{ID: id, End: 100}) // nothing was written since
		written = 0
		same("reported again", b, old)
		if at := set(b, metarpc.SetMtimeNow).Mtime; at <= old || recalls != 2 {
			t.Errorf("appends %v: now is %d, after %d recalls", appends, at, recalls)
		}

		// What follows troubles nobody.
		set(a, metarpc.SetMtime)
		set(b, metarpc.SetAtime)
		b.cred.UID++
		wantStatus(t, sent(b, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMtime}), metarpc.Status(syscall.EPERM))
		if recalls != 2 {
			t.Errorf("appends %v: %d recalls", appends, recalls)
		}
		same("in the end", b, old)
		checkCatalog(t, h.engine)
	}
}
