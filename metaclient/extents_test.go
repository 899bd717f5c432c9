package metaclient

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// What the service says last of a file on namespaces counts, whatever was granted before; the rest of what was granted stays.
func TestCacheOfExtents(t *testing.T) {
	const eof = layout.ToEOF
	grant := func(mode layout.IOMode, off, n int64, generation uint64) layout.Segment {
		return layout.Segment{Range: layout.Range{Off: off, Len: n}, IOMode: mode, OnNamespaces: generation > 0, Mirrors: []layout.Mirror{
			{Servers: []layout.DataFile{{Device: layout.DeviceID{1}, Handles: [][]byte{{1}}, Generation: generation}}},
		}}
	}
	read, rw := layout.IOModeRead, layout.IOModeRW
	for name, c := range map[string]struct {
		granted []layout.Segment // one after the other
		want    string           // mode, range and generation of what is kept
	}{
		"written after it was read": {[]layout.Segment{grant(read, 0, eof, 1), grant(rw, 4096, 4096, 1)},
			"rw [4096, 8192) 1, read [0, 4096) 1, read [8192, end) 1"},
		"written at the beginning": {[]layout.Segment{grant(read, 0, 8192, 1), grant(rw, 0, 4096, 1)}, "rw [0, 4096) 1, read [4096, 8192) 1"},
		"written to the end":       {[]layout.Segment{grant(read, 0, 8192, 1), grant(rw, 4096, eof, 1)}, "rw [4096, end) 1, read [0, 4096) 1"},
		"all written":              {[]layout.Segment{grant(read, 0, 8192, 1), grant(rw, 0, eof, 1)}, "rw [0, end) 1"},
		"more written":             {[]layout.Segment{grant(rw, 0, 8192, 1), grant(rw, 4096, 8192, 1)}, "rw [4096, 12288) 1, rw [0, 4096) 1"},
		"read anew":                {[]layout.Segment{grant(read, 0, 8192, 1), grant(read, 4096, eof, 1)}, "read [4096, end) 1, read [0, 4096) 1"},
		"read after it was written": {[]layout.Segment{grant(rw, 0, 4096, 1), grant(read, 0, eof, 1)},
			"read [0, end) 1, rw [0, 4096) 1"},
		"read after a newer write":    {[]layout.Segment{grant(rw, 0, 8192, 1), grant(read, 0, 4096, 2)}, "read [0, 4096) 2, rw [4096, 8192) 1"},
		"beside":                      {[]layout.Segment{grant(read, 0, 4096, 1), grant(rw, 4096, 4096, 1)}, "rw [4096, 8192) 1, read [0, 4096) 1"},
		"moved to a namespace":        {[]layout.Segment{grant(read, 0, eof, 0), grant(rw, 0, 4096, 1)}, "rw [0, 4096) 1, read [4096, end) 0"},
		"on data servers, as it was":  {[]layout.Segment{grant(read, 0, eof, 0), grant(rw, 0, 4096, 0)}, "rw [0, 4096) 0, read [0, end) 0"},
		"on data servers, both modes": {[]layout.Segment{grant(rw, 0, 4096, 0), grant(read, 0, eof, 0)}, "read [0, end) 0, rw [0, 4096) 0"},
	} {
		k := cache{limit: 10}
		for _, s := range c.granted {
			k.add(7, []layout.Segment{s}, Anywhere)
		}
		var got []string
		for _, s := range k.files[7].Value.(*cached).layout.Segments {
			got = append(got, fmt.Sprint(s.IOMode, " ", s.Range, " ", s.Mirrors[0].Servers[0].Generation))
		}
		if text := strings.Join(got, ", "); text != c.want {
			t.Errorf("%s: %s; want %s", name, text, c.want)
		}
	}

	k := cache{limit: 10}
	k.add(7, []layout.Segment{grant(read, 0, 4096, 0), grant(rw, 0, 4096, 1), grant(read, 4096, 4096, 1)}, Anywhere)
	k.recall(7, layout.Range{Off: 4096, Len: eof}, true)
	if k.find(7, read, 4096, 1, Anywhere) != nil || k.find(7, rw, 0, 1, Anywhere) == nil {
		t.Error("more or less is forgotten than what reaches past 4096")
	}
	k.recall(7, layout.Range{Len: eof}, true)
	if k.find(7, rw, 0, 1, Anywhere) != nil || k.find(7, read, 0, 1, Anywhere) == nil {
		t.Error("more or less is forgotten than what is on namespaces")
	}
}

// Reports go in as many calls as their ranges take, and the size of a file with or after the last of its own.
func TestManyRanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var told []string
		var ranges []metarpc.Range
		fail := -1
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			a, ok := args.(*metarpc.LayoutCommitArgs)
			if !ok {
				return metarpc.StatusOK, nil
			}
			if fail == 0 {
				return metarpc.Status(syscall.ESTALE), nil
			}
			fail--
			r, total := &metarpc.LayoutCommitResult{}, 0
			for _, rep := range a.Reports {
				n := 0
				for _, w := range rep.Written {
					n += len(w.Ranges)
					if rep.ID == 2 {
						ranges = append(ranges, w.Ranges...)
					}
				}
				total += n
				told = append(told, fmt.Sprintf("%d: %d to %d", rep.ID, n, rep.End))
				r.Attrs = append(r.Attrs, metarpc.Attr{ID: rep.ID, Size: rep.End})
			}
			if total > metarpc.MaxRanges {
				t.Errorf("%d ranges in one call", total)
			}
			told = append(told, "-")
			return metarpc.StatusOK, r
		}
		c := connected(t, s, Config{})
		written := func(handle byte, n int) metarpc.Written {
			w := metarpc.Written{Copy: metarpc.CopyRef{Device: layout.DeviceID{1}, Handle: []byte{handle}}, Generation: 3}
			for i := range int64(n) {
				w.Ranges = append(w.Ranges, metarpc.Range{Off: i * 1024, Len: 512})
			}
			return w
		}
		const most = metarpc.MaxRanges
		reports := []metarpc.SizeReport{
			{ID: 1, End: 10, Written: []metarpc.Written{written(1, 10)}},
			{ID: 2, End: 20, Written: []metarpc.Written{written(2, most-10), written(3, most+5)}},
			{ID: 3, End: 30},
			{ID: 4, End: 40, Written: []metarpc.Written{written(4, most)}},
			{ID: 5, End: 50},
		}
		want := []string{"1: 10 to 10", fmt.Sprintf("2: %d to 0", most-10), "-", fmt.Sprintf("2: %d to 0", most), "-", "2: 5 to 20", "3: 0 to 30",
			fmt.Sprintf("4: %d to 0", most-5), "-", "4: 5 to 40", "5: 0 to 50", "-"}
		attrs, err := c.LayoutCommit(t.Context(), reports, false)
		if err != nil || !slices.Equal(told, want) {
			t.Fatalf("%v, told %q, want %q", err, told, want)
		}
		var sizes []int64
		for _, a := range attrs {
			sizes = append(sizes, a.Size)
		}
		if !slices.Equal(sizes, []int64{10, 20, 30, 40, 50}) {
			t.Errorf("sizes %v", sizes)
		}
		if all := slices.Concat(reports[1].Written[0].Ranges, reports[1].Written[1].Ranges); !slices.Equal(ranges, all) || len(all) != 2*most-5 {
			t.Errorf("%d ranges of file 2 were told, not those %d that were written", len(ranges), len(all))
		}
		fail = 1
		var status *metarpc.Error
		if attrs, err = c.LayoutCommit(t.Context(), reports, false); !errors.As(err, &status) || status.Errno() != syscall.ESTALE || len(attrs) != 1 {
			t.Errorf("%v, %d answers; want ESTALE after the first", err, len(attrs))
		}
	})
}

// A layout on namespaces ends with the session in which it was granted, and not with the connection.
func TestExtentsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			a, ok := args.(*metarpc.LayoutGetArgs)
			if !ok {
				return metarpc.StatusOK, &metarpc.Empty{}
			}
			servers := []metarpc.DataFile{{Device: layout.DeviceID{1}, Handle: []byte{1}}, {Device: layout.DeviceID{2}, Handle: []byte{2}, Generation: 1}}
			return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{{
				Len: layout.ToEOF, IOMode: a.IOMode, StripeUnit: 4096, Mirrors: [][]metarpc.DataFile{servers},
			}}}
		}
		reset := make(chan bool, 1)
		c := connected(t, s, Config{OnReset: func(_ context.Context, _ int, lost bool) { reset <- lost }})
		granted := func() []layout.DataFile {
			t.Helper()
			seg, err := c.Layout(t.Context(), 7, layout.IOModeRead, 0, 1, Anywhere)
			if err != nil {
				t.Fatal(err)
			}
			return seg.Mirrors[0].Servers
		}
		over := func(f *layout.DataFile) bool {
			select {
			case <-f.Ended:
				return true
			default:
				return false
			}
		}
		files := granted()
		if files[0].Ended != nil {
			t.Error("a data file on a data server ends with the session")
		}
		s.hangUp()
		synctest.Wait()
		if over(&files[1]) {
			t.Error("the layout has ended with a connection")
		}
		s.forget()
		if !<-reset {
			t.Error("the session was not lost")
		}
		if !over(&files[1]) {
			t.Error("the layout has outlived its session")
		}
		if now := granted(); over(&now[1]) {
			t.Error("the layout of the next session has ended")
		}
	})
}
