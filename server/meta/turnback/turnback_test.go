package turnback

import (
	"context"
	"errors"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func TestTurnBack(t *testing.T) {
	items := func(ids ...layout.FileID) (list []metarpc.LeaseItem) {
		for _, id := range ids {
			list = append(list, metarpc.LeaseItem{ID: id, Lease: metarpc.LeaseNames})
		}
		return list
	}
	var w Waits
	type session struct{ int }
	a, b := &session{1}, &session{2}
	type begun struct {
		what  string
		ctx   context.Context
		wait  *Wait
		stays bool
	}
	var all []begun
	begin := func(what string, owner any, stays bool, ids ...layout.FileID) *Wait {
		ctx, wait := w.Begin(t.Context(), owner, items(ids...))
		all = append(all, begun{what, ctx, wait, stays})
		return wait
	}
	begin("one of the session", a, false, 3, 5)
	begin("another of the session", a, false, 5)
	begin("one elsewhere", a, true, 4)
	begin("one of another session", b, true, 5)
	begin("one that is held", nil, false, 5, 6)
	begin("one that is held elsewhere", nil, true, 6)
	own := begin("that for which is recalled", nil, true, 5)
	w.TurnBack(a, items(5, 7), own)
	alone := begin("that for which is recalled, and nothing else", nil, false, 8)
	w.TurnBack(a, items(8), alone)
	known := begin("the same of a session that is known", b, true, 9)
	w.TurnBack(a, items(9), known)
	for _, one := range all {
		if back := errors.Is(context.Cause(one.ctx), Error); back == one.stays {
			t.Errorf("%s: turned back: %v", one.what, back)
		}
		one.wait.End()
	}
	if len(w.list) != 0 {
		t.Errorf("%d are left", len(w.list))
	}
	var none *Wait
	none.End()
}
