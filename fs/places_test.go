package fs

import (
	"slices"
	"testing"

	"github.com/weftfs/weft/layout"
)

func TestPlaces(t *testing.T) {
	p := newPlaces()
	nodes := func(id layout.FileID) (list []uint64) {
		p.all(id, func(node uint64) bool { list = append(list, node); return true })
		return list
	}
	enter := func(at place, id layout.FileID, want uint64, wantFresh bool) uint64 {
		t.Helper()
		node, fresh := p.enter(at, id)
		if node != want || fresh != wantFresh {
			t.Errorf("%d at %v is node %d (fresh: %v), want %d (%v)", id, at, node, fresh, want, wantFresh)
		}
		return node
	}
	x, y, z := place{1, "x"}, place{1, "y"}, place{7, "x"}

	enter(x, 7, 7, false)
	enter(x, 7, 7, false)
	extra := enter(y, 7, firstExtraNode+1, true)
	enter(x, 7, 7, false)
	enter(y, 7, extra, false)
	if !p.several(7) || !slices.Equal(nodes(7), []uint64{7, extra}) || p.id(extra) != 7 {
		t.Errorf("nodes %d, %d stands for %d", nodes(7), extra, p.id(extra))
	}

	// What is renamed here is no other directory for that, wherever its parent has gone.
	p.rename(x, z, false)
	enter(z, 7, 7, false)
	enter(x, 8, 8, false)
	p.rename(x, y, true)
	enter(y, 8, 8, false)
	enter(x, 7, extra, false)
	p.rename(y, x, false) // over the other
	enter(x, 8, 8, false)

	// One that is back, where another was since, may be known elsewhere.
	p.vacate(x)
	enter(x, 8, firstExtraNode+2, true)

	p.forget(extra, 2)
	if p.id(extra) != 7 {
		t.Error("a node is gone that the kernel has looked up more often than forgotten")
	}
	p.forget(extra, 1)
	if p.id(extra) != 0 || p.several(7) {
		t.Errorf("nodes %d after the last but one was forgotten", nodes(7))
	}
	p.forget(8, 9)
	p.forget(firstExtraNode+2, 9)
	p.forget(7, 9)
	p.forget(12345, 1) // no directory
	if len(p.nodes)+len(p.at)+len(p.of) != 0 {
		t.Errorf("left over: %v %v %v", p.nodes, p.at, p.of)
	}
}
