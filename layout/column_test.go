package layout

import (
	"fmt"
	"math"
	"testing"
)

func TestColumnNext(t *testing.T) {
	const top = math.MaxInt64
	for _, c := range []struct {
		col              Column
		off, end         int64
		wantOff, wantEnd int64
	}{
		{Column{}, 3, 10, 3, 10},
		{Column{}, 10, 10, 10, 10},
		{Column{Unit: 4, Count: 1}, 3, 10, 3, 10},
		{Column{4, 3, 0}, 0, 100, 0, 4},
		{Column{4, 3, 0}, 3, 100, 3, 4},
		{Column{4, 3, 0}, 4, 100, 12, 16},
		{Column{4, 3, 2}, 0, 100, 8, 12},
		{Column{4, 3, 2}, 0, 10, 8, 10},
		{Column{4, 3, 2}, 0, 8, 8, 8},
		{Column{4, 3, 1}, 8, 15, 15, 15},
		{Column{4096, 4, 3}, top - 1, top, top - 1, top},
		{Column{4096, 4, 2}, top - 1, top, top, top},
		{Column{1 << 30, 4096, 0}, top - 5, top, top, top},
	} {
		off, end := c.col.Next(c.off, c.end)
		if off != c.wantOff || end != c.wantEnd {
			t.Errorf("%+v.Next(%d, %d) = %d, %d; want %d, %d", c.col, c.off, c.end, off, end, c.wantOff, c.wantEnd)
		}
	}
}

// The columns of a segment have each byte once, where ServerAt says.
func TestColumns(t *testing.T) {
	for _, width := range []int{1, 2, 5} {
		seg := &Segment{Range: Range{Len: ToEOF}, StripeUnit: 3, Mirrors: []Mirror{{Servers: make([]DataFile, width)}}}
		for from := range int64(20) {
			owner := map[int64]string{}
			for i := range width {
				for at := from; ; {
					off, end := seg.Column(i).Next(at, 50)
					if off == end {
						break
					}
					for b := off; b < end; b++ {
						owner[b] += fmt.Sprint(i)
					}
					at = end
				}
			}
			for b := from; b < 50; b++ {
				if want := fmt.Sprint(seg.ServerAt(b)); owner[b] != want {
					t.Fatalf("%d servers, from %d: byte %d is in the columns %q, want %s", width, from, b, owner[b], want)
				}
			}
		}
	}
}
