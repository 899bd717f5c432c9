package extent

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

func TestGeometry(t *testing.T) {
	for _, c := range []struct {
		block, size, unit int64
		want              string // part of the message; empty: fine
		limit, group      int64
		perRow            int
	}{
		{4096, 1000 << 20, 1 << 20, "", 999, 64, 64},
		{512, 1000 << 20, 1 << 20, "", 999, 64, 64},
		{512, 4 << 40, 64 << 20, "", 65535, 1024, 1},
		{4096, 30 << 40, 1 << 20, "", 30<<20 - 1, 8192, 64},
		{65536, 1000<<20 + 65536, 1 << 20, "", 1000, 64, 64},
		{512, 4<<20 - 512, 1 << 20, "at least 4", 0, 0, 0},
		{512, 4<<20 + 1, 1 << 20, "no multiple", 0, 0, 0},
		{256, 1 << 30, 1 << 20, "blocks of 256", 0, 0, 0},
		{131072, 1 << 30, 1 << 20, "blocks of 131072", 0, 0, 0},
		{0, 1 << 30, 1 << 20, "blocks of 0", 0, 0, 0},
		{520, 1 << 30, 1 << 20, "blocks of 520", 0, 0, 0},
		{512, 1 << 30, 1 << 19, "units of 524288", 0, 0, 0},
		{512, 1 << 30, 3 << 20, "units of 3145728", 0, 0, 0},
		{512, 1 << 40, 128 << 20, "units of 134217728", 0, 0, 0},
		{512, 1 << 30, 0, "units of 0", 0, 0, 0},
	} {
		ns, err := NewNamespace(ident, c.block, c.size, c.unit)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		if g := geometryOf(&ns); g.limit != c.limit || g.group != c.group || g.perRow != c.perRow {
			t.Errorf("%+v: %+v", c, g)
		}
	}
	if _, err := NewNamespace(Identity{}, 512, 1<<30, 1<<20); err == nil {
		t.Error("a namespace without identity is taken")
	}
}

func TestImage(t *testing.T) {
	g := geometry{limit: 100, group: 64}
	m := g.empty(1)
	if m.free() != 36 || m.has(35) || !m.has(36) || !g.empty(0).has(0) || g.empty(0).has(1) {
		t.Errorf("%x, %x", m, g.empty(0))
	}
	m.set(0, 10)
	m.set(12, 14)
	m.set(20, 21)
	for _, c := range []struct{ near, n, from, to int64 }{
		{-1, 1, 10, 11}, {-1, 2, 10, 12}, {-1, 3, 14, 17}, {-1, 7, 21, 28}, {-1, 100, 21, 36}, {11, 9, 11, 12}, {14, 2, 14, 16}, {12, 2, 10, 12}, {30, 99, 30, 36},
	} {
		if from, to := m.run(c.near, c.n); from != c.from || to != c.to {
			t.Errorf("%d near %d: %d to %d, want %d to %d", c.n, c.near, from, to, c.from, c.to)
		}
	}
	back, err := g.decodeGroup(1, m.encode())
	if err != nil || !slices.Equal(back, m) {
		t.Errorf("%x, %v", back, err)
	}
	if _, err := g.decodeGroup(1, make([]byte, 9)); err == nil {
		t.Error("a row of 9 bytes is taken")
	}
	m.clear(0, 10)
	m.set(0, 64)
	if from, to := m.run(-1, 1); from != to || m.free() != 0 {
		t.Errorf("%d to %d of nothing", from, to)
	}
}

// A catalog gets the later format with the first namespace, and not before.
func TestAdd(t *testing.T) {
	e := memorytest.New()
	s := format(t, e, 4096, mib, 100)
	raw, err := e.Get(t.Context(), schema.KeyVolume)
	var v schema.Volume
	if err != nil || schema.Decode(raw, &v) != nil || v.Format != schema.FormatNamespaces || v.ID != volume {
		t.Errorf("%+v, %v", v, err)
	}
	clean(t, s)
	if st, _ := s.Stat(t.Context()); st != (Stat{Total: 98 * mib, Free: 98 * mib}) {
		t.Errorf("%+v", st)
	}
	var b catalog.Batch
	if err := Add(t.Context(), e, &b, dev, s.Namespace()); err != nil {
		t.Fatal(err)
	}
	var guard *catalog.GuardError
	if err := e.Commit(t.Context(), &b); !errors.As(err, &guard) {
		t.Errorf("added twice: %v", err)
	}
	if _, err := Open(t.Context(), e, layout.DeviceID{1}); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("%v", err)
	}

	allocate(t, s, 1, 0, 1)
	drop := func() error {
		var b catalog.Batch
		s.Drop(&b)
		return e.Commit(t.Context(), &b)
	}
	if err := drop(); !errors.As(err, &guard) {
		t.Errorf("dropped with a data file: %v", err)
	}
	if err := s.Remove(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if err := drop(); !errors.As(err, &guard) {
		t.Errorf("dropped with condemned units: %v", err)
	}
	if err := s.Release(t.Context(), 1, math.MaxUint64); err != nil {
		t.Fatal(err)
	}
	if err := drop(); err != nil {
		t.Error(err)
	}
	for row, err := range e.Scan(t.Context(), nil, nil, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil || string(row.Key) != string(schema.KeyVolume) {
			t.Errorf("left: %q, %v", row.Key, err)
		}
	}
}

// The life of a data file, with what clients are told at each point.
func TestLife(t *testing.T) {
	for _, p := range places(t) {
		t.Run(p.name, func(t *testing.T) {
			e := p.open(t)
			s := format(t, e, 4096, mib, 100)
			const f = 0 // begins in group 0
			g := allocate(t, s, f, 5000, 1)
			if g.Generation != 1 || text(g.Extents) != "4K+1020K@1028K:inv" {
				t.Errorf("%+v", g)
			}
			if got := whole(t, s, f, layout.IOModeRead); got != "0+1:none" {
				t.Errorf("reader: %s", got)
			}
			validate(t, s, f, 1, 4096, 8192)
			validate(t, s, f, 1, 4096, 8192)
			if got := whole(t, s, f, layout.IOModeRW); got != "0+4K@1:inv 4K+8K@1028K:rw 12K+1012K@1036K:inv" {
				t.Errorf("%s", got)
			}
			if got := whole(t, s, f, layout.IOModeRead); got != "0+4K:none 4K+8K@1028K:r 12K+1012K:none" {
				t.Errorf("reader: %s", got)
			}
			if size, err := s.Size(t.Context(), f); size != 12288 || err != nil {
				t.Errorf("size %d, %v", size, err)
			}
			// It grows by as much as it has, behind what it has.
			g = allocate(t, s, f, mib, 1)
			if text(g.Extents) != "1+1@2:inv" {
				t.Errorf("%s", text(g.Extents))
			}
			g = allocate(t, s, f, 2*mib, 1)
			if text(g.Extents) != "2+1@3:inv" { // no more than a part of the free space
				t.Errorf("%s", text(g.Extents))
			}
			validate(t, s, f, 1, 0, 3*mib)
			allocate(t, s, f, 5*mib, 2*mib)
			if got := whole(t, s, f, layout.IOModeRW); got != "0+3@1:rw 3+2:none 5+2@4:inv" {
				t.Errorf("%s", got)
			}
			for _, c := range []struct {
				off, n int64
				want   string
			}{
				{0, 1, "0+4K@1:rw"},
				{3*mib - 1, 2, "3068K+4K@4092K:rw 3+4K:none"},
				{4 * mib, 10 * mib, "4+1:none 5+2@4:inv 7+7:none"},
				{40 * mib, mib, "40+1:none"},
			} {
				list, _, err := s.Lookup(t.Context(), f, layout.Range{Off: c.off, Len: c.n}, layout.IOModeRW, 100)
				if text(list) != c.want || err != nil {
					t.Errorf("%d bytes at %d: %s, want %s, %v", c.n, c.off, text(list), c.want, err)
				}
			}
			if list, _, err := s.Lookup(t.Context(), f, layout.Range{Len: 14 * mib}, layout.IOModeRW, 2); text(list) != "0+3@1:rw 3+2:none" || err != nil {
				t.Errorf("cut to two: %s, %v", text(list), err)
			}
			clean(t, s)

			// What is punched out waits until its generation is dead.
			zeros, gen, err := s.Punch(t.Context(), f, layout.Range{Off: mib - 4096, Len: mib + 8192})
			if err != nil || len(zeros) != 0 || gen != 2 {
				t.Errorf("%v, %d, %v", zeros, gen, err)
			}
			want := "0+1020K@1:rw 1020K+4K@2044K:inv 1+1:none 2+4K@3:inv 2052K+1020K@3076K:rw 3+2:none 5+2@4:inv"
			if got := whole(t, s, f, layout.IOModeRW); got != want {
				t.Errorf("%s", got)
			}
			if _, gen, err := s.Punch(t.Context(), f, layout.Range{Off: mib - 4096, Len: mib + 8192}); err != nil || gen != 2 {
				t.Errorf("again: %d, %v", gen, err)
			}
			for _, c := range []struct {
				generation uint64
				off, n     int64
				want       error
			}{
				{1, 0, 4096, ErrStale}, // the same unit
				{1, 2 * mib, 4096, ErrStale},
				{1, mib, 4096, ErrNotAllocated},
				{2, mib, 4096, ErrNotAllocated},
				{2, 4 * mib, 4096, ErrNotAllocated},
				{2, 5 * mib, 3 * mib, ErrNotAllocated},
				{2, 50 * mib, 4096, ErrNotAllocated},
				{2, 0, 100, ErrInvalid},
				{2, 100, 4096, ErrInvalid},
				{2, 0, layout.ToEOF, ErrInvalid},
				{2, -4096, 4096, ErrInvalid},
				{1, 5 * mib, 2 * mib, nil},
				{2, 2 * mib, 4096, nil},
			} {
				err := s.Validate(t.Context(), f, c.generation, layout.Column{}, []layout.Range{{Off: c.off, Len: c.n}})
				if !errors.Is(err, c.want) {
					t.Errorf("%+v: %v", c, err)
				}
			}
			if err := s.Validate(t.Context(), 99, 1, layout.Column{}, []layout.Range{{Len: 4096}}); !errors.Is(err, ErrNotAllocated) {
				t.Errorf("of no data file: %v", err)
			}
			if st, err := s.Stat(t.Context()); st.Condemned != mib || st.Total-st.Free != 5*mib || err != nil {
				t.Errorf("%+v, %v", st, err)
			}
			if g = allocate(t, s, f, mib, mib); text(g.Extents) == "1+1@2:inv" || g.Generation != 2 {
				t.Errorf("given away again: %s", text(g.Extents))
			}
			if err := s.Validate(t.Context(), f, 1, layout.Column{}, []layout.Range{{Off: mib, Len: 4096}}); !errors.Is(err, ErrStale) {
				t.Errorf("written before it was punched out: %v", err)
			}
			if err := s.Release(t.Context(), f, 1); err != nil {
				t.Error(err)
			}
			if st, _ := s.Stat(t.Context()); st.Condemned != mib {
				t.Errorf("released with a generation that had it: %+v", st)
			}
			clean(t, s)

			s = open(t, p.open(t))
			var waiting []Waiting
			if err := s.Condemned(t.Context(), func(w Waiting) error { waiting = append(waiting, w); return nil }); err != nil {
				t.Error(err)
			}
			if fmt.Sprint(waiting) != fmt.Sprint([]Waiting{{f, 2, mib}}) {
				t.Errorf("%v", waiting)
			}
			if err := s.Release(t.Context(), f, 2); err != nil {
				t.Error(err)
			}
			if st, _ := s.Stat(t.Context()); st.Condemned != 0 {
				t.Errorf("%+v", st)
			}
			if g = allocate(t, s, 1<<40, 0, mib); g.Generation != 1 {
				t.Errorf("%+v", g)
			}
			var files []File
			if err := s.List(t.Context(), func(f File) error { files = append(files, f); return nil }); err != nil {
				t.Error(err)
			}
			if fmt.Sprint(files) != fmt.Sprint([]File{{f, 2, 5 * mib}, {1 << 40, 1, mib}}) {
				t.Errorf("%v", files)
			}
			clean(t, s)
			if _, gen, err := s.Truncate(t.Context(), f, 2*mib+100); err != nil || gen != 3 {
				t.Errorf("%d, %v", gen, err)
			}
			if size, err := s.Size(t.Context(), f); size != 2*mib+4096 || err != nil {
				t.Errorf("size %d, %v", size, err)
			}
			for range 2 {
				if err := s.Remove(t.Context(), f); err != nil {
					t.Error(err)
				}
			}
			if got := whole(t, s, f, layout.IOModeRW); got != "" {
				t.Errorf("removed: %s", got)
			}
			if err := s.Release(t.Context(), f, math.MaxUint64); err != nil {
				t.Error(err)
			}
			if st, _ := s.Stat(t.Context()); st.Free != st.Total-mib {
				t.Errorf("%+v", st)
			}
			clean(t, s)
		})
	}
}

// The parts of valid blocks that a Punch leaves to whoever can write.
func TestEdges(t *testing.T) {
	s := format(t, memorytest.New(), 4096, mib, 100)
	allocate(t, s, 0, 0, 4*mib)
	validate(t, s, 0, 1, 0, 2*mib+8192)
	addr := func(off int64) int64 { return off + mib }
	for _, c := range []struct {
		off, end int64
		want     [][2]int64 // offset and length
	}{
		{0, 4096, nil},
		{100, 200, [][2]int64{{100, 100}}},
		{0, 100, [][2]int64{{0, 100}}},
		{100, 4096, [][2]int64{{100, 3996}}},
		{100, 4097, [][2]int64{{100, 3996}, {4096, 1}}},
		{5000, 20000, [][2]int64{{5000, 8192 - 5000}, {16384, 20000 - 16384}}},
		{mib - 1, mib + 1, [][2]int64{{mib - 1, 1}, {mib, 1}}},
		{2*mib + 8191, 4 * mib, [][2]int64{{2*mib + 8191, 1}}},
		{2*mib + 8192, 2*mib + 8193, nil}, // it is not valid
		{4*mib - 1, math.MaxInt64, nil},
		{2*mib + 100, math.MaxInt64, [][2]int64{{2*mib + 100, 3996}}},
	} {
		before := whole(t, s, 0, layout.IOModeRead)
		n := c.end - c.off
		zeros, _, err := s.Punch(t.Context(), 0, layout.Range{Off: c.off, Len: n})
		if err != nil {
			t.Fatal(err)
		}
		var want []layout.Extent
		for _, z := range c.want {
			want = append(want, layout.Extent{Off: z[0], Len: z[1], Addr: addr(z[0])})
		}
		if !slices.Equal(zeros, want) {
			t.Errorf("%d to %d: %+v, want %+v", c.off, c.end, zeros, want)
		}
		if n < 4096 && whole(t, s, 0, layout.IOModeRead) != before {
			t.Errorf("%d to %d: less than a block, and it has changed", c.off, c.end)
		}
		// Whoever writes the zeros, writes the rest of the block as it was: nothing else has changed.
		g := allocate(t, s, 0, 0, 4*mib)
		validate(t, s, 0, g.Generation, 0, 2*mib+8192)
		if got := whole(t, s, 0, layout.IOModeRead); !strings.HasPrefix(got, "0+2056K@1:r") {
			t.Fatalf("%s", got)
		}
	}
	clean(t, s)
}

// A striped file takes the units of its columns, each in one piece, and no column begins in another's group.
func TestStripes(t *testing.T) {
	e := memorytest.New()
	s := format(t, e, 4096, mib, 1000)
	var requests []Request
	for i := range 4 {
		requests = append(requests, Request{
			Space: s, Number: uint64(100 + i), Column: layout.Column{Unit: mib, Count: 4, Index: i}, Range: layout.Range{Off: 512, Len: 31 * mib},
		})
	}
	grants, err := Allocate(t.Context(), requests, nil)
	if err != nil {
		t.Fatal(err)
	}
	groups := map[int64]bool{}
	for i, g := range grants {
		var had []string
		var addr int64
		for _, x := range g.Extents {
			if x.State != layout.ExtentNone {
				had = append(had, fmt.Sprintf("%d+%d", x.Off/mib, x.Len/mib))
				if addr != 0 && x.Addr != addr {
					t.Errorf("column %d: at %d, want %d", i, x.Addr, addr)
				}
				addr = x.Addr + x.Len
				groups[x.Addr/mib/s.geo.group] = true
			}
		}
		want := ""
		for u := i; u < 32; u += 4 {
			want += fmt.Sprintf(" %d+1", u)
		}
		if got := " " + strings.Join(had, " "); got != want {
			t.Errorf("column %d: %s, want %s", i, got, want)
		}
		if err := s.Validate(t.Context(), requests[i].Number, g.Generation, requests[i].Column, []layout.Range{{Off: 0, Len: 32 * mib}}); err != nil {
			t.Errorf("column %d: %v", i, err)
		}
	}
	if len(groups) != 4 {
		t.Errorf("four data files in %d groups", len(groups))
	}
	if st, _ := s.Stat(t.Context()); st.Total-st.Free != 32*mib {
		t.Errorf("%+v", st)
	}
	clean(t, s)
}

// A data file that is written from its beginning to its end doubles, up to a limit, and is in few pieces.
func TestGrowth(t *testing.T) {
	s := format(t, memorytest.New(), 4096, mib, 100000)
	var most int64
	calls := 0
	for off := int64(0); off < 4<<30; calls++ {
		g := allocate(t, s, 5, off, 1)
		end := g.Extents[len(g.Extents)-1].End()
		most = max(most, end-off)
		if off = end; calls > 1000 {
			t.Fatal("it does not grow")
		}
	}
	if most != maxGrowth || calls > 4<<30/maxGrowth+8 {
		t.Errorf("%d calls, %d bytes at a time", calls, most)
	}
	list, gen, err := s.Lookup(t.Context(), 5, layout.Range{Len: layout.ToEOF}, layout.IOModeRW, layout.MaxExtents)
	if err != nil || gen != 1 || len(list) > 40 {
		t.Errorf("%d extents, generation %d, %v", len(list), gen, err)
	}
	if _, _, err := s.Truncate(t.Context(), 5, 3<<30+1); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), 5, 2); err != nil {
		t.Fatal(err)
	}
	if st, _ := s.Stat(t.Context()); st.Total-st.Free != 3<<30+mib {
		t.Errorf("%+v", st)
	}
	clean(t, s)
}

// A data file that is appended to and cut to its size again and again has full rows.
func TestAppends(t *testing.T) {
	s := format(t, memorytest.New(), 4096, mib, 1000)
	for i := range int64(300) {
		g := allocate(t, s, 5, i*mib, 1)
		validate(t, s, 5, g.Generation, i*mib, mib)
		_, gen, err := s.Truncate(t.Context(), 5, (i+1)*mib)
		if err == nil {
			err = s.Release(t.Context(), 5, gen)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := rows(t, s); n > 300/64+2 {
		t.Errorf("%d rows", n)
	}
	clean(t, s)
}

// rows is how many rows of extents there are, and of data files.
func rows(t *testing.T, s *Space) (n int) {
	from, to := schema.OfDevice(schema.PrefixExtents, dev)
	for _, err := range s.engine.Scan(t.Context(), from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

// Who allocates while somebody else does goes to another group, so that neither is in the other's way.
func TestApart(t *testing.T) {
	e := &meanwhile{Engine: memorytest.New()}
	s := format(t, e, 4096, mib, 600)
	b := uint64(2)
	for s.home(b) != s.home(1) {
		b++
	}
	before := e.commits
	e.f = func() { allocate(t, s, b, 0, mib) }
	allocate(t, s, 1, 0, mib)
	if n := e.commits - before; n != 2 {
		t.Errorf("%d commits for two data files", n)
	}
	clean(t, s)
}

// The last units are given to whoever asks, in as many pieces as it takes; and then there are none.
func TestNoSpace(t *testing.T) {
	for name, e := range map[string]catalog.Engine{"wide": memorytest.New(), "narrow": squeeze(memorytest.New())} {
		t.Run(name, func(t *testing.T) {
			s := format(t, e, 4096, mib, 300)
			for i := range uint64(298) {
				allocate(t, s, i, 0, 1)
			}
			_, err := Allocate(t.Context(), []Request{{Space: s, Number: 1000, Range: layout.Range{Len: 1}}}, nil)
			if !errors.Is(err, ErrNoSpace) || !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%v", err)
			}
			for i := uint64(0); i < 298; i += 3 {
				if err := s.Remove(t.Context(), i); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := Allocate(t.Context(), []Request{{Space: s, Number: 1000, Range: layout.Range{Len: 1}}}, nil); !errors.Is(err, ErrNoSpace) {
				t.Errorf("with condemned units only: %v", err)
			}
			other := open(t, e) // frees what s does not know of
			for i := uint64(0); i < 298; i += 3 {
				if err := other.Release(t.Context(), i, math.MaxUint64); err != nil {
					t.Fatal(err)
				}
			}
			calls := 0
			for off := int64(0); off < 100*mib; calls++ {
				g, err := Allocate(t.Context(), []Request{{Space: s, Number: 1000, Range: layout.Range{Off: off, Len: 200 * mib}}}, nil)
				if err != nil {
					t.Fatalf("at %d: %v", off/mib, err)
				}
				if off = g[0].Extents[len(g[0].Extents)-1].End(); calls > 200 {
					t.Fatal("no end")
				}
			}
			if name == "wide" && calls > 5 { // groups
				t.Errorf("%d calls", calls)
			}
			if _, err := Allocate(t.Context(), []Request{{Space: s, Number: 1000, Range: layout.Range{Off: 100 * mib, Len: 1}}}, nil); !errors.Is(err, ErrNoSpace) {
				t.Errorf("%v", err)
			}
			if st, _ := s.Stat(t.Context()); st.Free != 0 || st.Condemned != 0 {
				t.Errorf("%+v", st)
			}
			clean(t, s)
		})
	}
}

// What the caller adds goes with it or not at all.
func TestWith(t *testing.T) {
	e := memorytest.New()
	s := format(t, e, 4096, mib, 100)
	request := []Request{{Space: s, Number: 3, Range: layout.Range{Len: 1}}}
	with := func(b *catalog.Batch) {
		b.GuardPresent([]byte("zz layout"))
		b.Put([]byte("zz row"), []byte("x"))
	}
	var guard *catalog.GuardError
	if _, err := Allocate(t.Context(), request, with); !errors.As(err, &guard) || guard.Index != 0 {
		t.Errorf("%v", err)
	}
	if st, _ := s.Stat(t.Context()); st.Free != st.Total || whole(t, s, 3, layout.IOModeRW) != "" {
		t.Errorf("%+v", st)
	}
	var b catalog.Batch
	b.Put([]byte("zz layout"), nil)
	commit(t, e, &b)
	for range 2 { // the second time there is nothing to allocate
		if _, err := Allocate(t.Context(), request, with); err != nil {
			t.Error(err)
		}
		b.Reset()
		b.GuardPresent([]byte("zz row"))
		b.Delete([]byte("zz row"))
		commit(t, e, &b)
	}
	for _, tc := range []struct {
		layout.Range
		want error
	}{
		{layout.Range{Off: -1, Len: 1}, ErrInvalid},
		{layout.Range{Off: 0, Len: 0}, ErrInvalid},
		{layout.Range{Off: 0, Len: layout.ToEOF}, ErrTooFar},
		{layout.Range{Off: MaxBytes - 1, Len: 2}, ErrTooFar},
		{layout.Range{Off: math.MaxInt64 - 1, Len: 1}, ErrTooFar},
	} {
		if _, err := Allocate(t.Context(), []Request{{Space: s, Number: 3, Range: tc.Range}}, nil); !errors.Is(err, tc.want) {
			t.Errorf("%v: %v, want %v", tc.Range, err, tc.want)
		}
	}
	if g := allocate(t, s, 4, MaxBytes-1, 1); len(g.Extents) != 1 {
		t.Errorf("the last unit: %+v", g)
	}
	for _, r := range []layout.Range{{Off: MaxBytes - 1<<20, Len: 1 << 21}, {Off: MaxBytes, Len: 4096}, {Off: 1<<63 - 5000, Len: 4998}} { // there is nothing behind it
		got, _, err := s.Lookup(t.Context(), 4, r, layout.IOModeRead, 10)
		if end := got[len(got)-1].End(); err != nil || len(got) != 1 || got[0].State != layout.ExtentNone || got[0].Off > r.Off || end < r.End() {
			t.Errorf("what is in %v: %+v, %v", r, got, err)
		}
	}
	for _, size := range []int64{MaxBytes, math.MaxInt64 - 1} {
		if zeros, _, err := s.Truncate(t.Context(), 4, size); err != nil || len(zeros) != 0 {
			t.Errorf("truncate to %d: %+v, %v", size, zeros, err)
		}
	}
	if f, err := s.File(t.Context(), 4); err != nil || f.Bytes == 0 {
		t.Errorf("the last unit, after that: %+v, %v", f, err)
	}
	if _, err := Allocate(t.Context(), append(request, request...), nil); err != nil && !errors.Is(err, catalog.ErrInvalid) {
		t.Errorf("named twice: %v", err)
	}
	clean(t, s)
}

// Two who free the same units, while these are given away again.
func TestReleaseTwice(t *testing.T) {
	e := memorytest.New()
	s := format(t, e, 4096, mib, 4)
	allocate(t, s, 1, 0, 2*mib)
	if err := s.Remove(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	other := &meanwhile{Engine: e}
	late := open(t, other)
	other.f = func() {
		if err := s.Release(t.Context(), 1, math.MaxUint64); err != nil {
			t.Error(err)
		}
		allocate(t, s, 2, 0, 2*mib) // the map is as it was
	}
	if err := late.Release(t.Context(), 1, math.MaxUint64); err != nil {
		t.Error(err)
	}
	if st, _ := s.Stat(t.Context()); st.Free != 0 || other.f != nil {
		t.Errorf("%+v", st)
	}
	clean(t, s)
}

// meanwhile has something happen before its first commit.
type meanwhile struct {
	catalog.Engine
	f       func()
	commits int
}

func (m *meanwhile) Commit(ctx context.Context, b *catalog.Batch) error {
	m.commits++
	if f := m.f; f != nil {
		m.f = nil
		f()
	}
	return m.Engine.Commit(ctx, b)
}

// What somebody else makes valid at the same time is done.
func TestValidateTwice(t *testing.T) {
	e := &meanwhile{Engine: memorytest.New()}
	s := format(t, e, 4096, mib, 64)
	g := allocate(t, s, 1, 0, 2*mib)
	e.f = func() { validate(t, s, 1, g.Generation, 0, mib) }
	validate(t, s, 1, g.Generation, 0, mib)
	clean(t, s)
}

// Many at a time, through two Spaces.
func TestConcurrent(t *testing.T) {
	for _, p := range places(t) {
		t.Run(p.name, func(t *testing.T) {
			e := p.open(t)
			spaces := []*Space{format(t, e, 4096, mib, 600), open(t, e)}
			ctx := timed(t)
			var work sync.WaitGroup
			for w := range 6 {
				work.Go(func() { // one client's data files
					s := spaces[w%2]
					for i := range 15 {
						number := uint64(100*w + i)
						for off := int64(0); off < 8*mib; off += 2 * mib {
							g, err := Allocate(ctx, []Request{
								{Space: s, Number: number, Range: layout.Range{Off: off, Len: 2 * mib}},
								{Space: s, Number: uint64(5000 + w), Range: layout.Range{Off: off, Len: 1}},
							}, nil)
							if err != nil {
								t.Error(err)
								return
							}
							if err := s.Validate(ctx, number, g[0].Generation, layout.Column{}, []layout.Range{{Off: off, Len: mib}}); err != nil {
								t.Error(err)
							}
						}
						if i%3 > 0 {
							continue
						}
						if err := errors.Join(s.Remove(ctx, number), s.Release(ctx, number, math.MaxUint64)); err != nil {
							t.Error(err)
						}
					}
				})
			}
			// All of them share one data file, too.
			for w := range 4 {
				work.Go(func() {
					s := spaces[w%2]
					for i := range int64(10) {
						r := layout.Range{Off: (4*i + int64(w)) * mib, Len: mib}
						g, err := Allocate(ctx, []Request{{Space: s, Number: 9999, Range: r}}, nil)
						if err == nil {
							err = s.Validate(ctx, 9999, g[0].Generation, layout.Column{}, []layout.Range{r})
						}
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
			work.Wait()
			if size, err := spaces[0].Size(ctx, 9999); size != 40*mib || err != nil {
				t.Errorf("%d, %v", size, err)
			}
			if got := whole(t, spaces[0], 9999, layout.IOModeRead); strings.Contains(strings.TrimSuffix(got, "none"), "none") {
				t.Errorf("a hole in what was written: %s", got)
			}
			clean(t, spaces[0])
		})
	}
}

// A large and scattered data file, with batches that take little of it at a time.
func TestSmallBatches(t *testing.T) {
	e := squeeze(memorytest.New())
	s := format(t, e, 512, 16*mib, 700) // 4 units in a row
	const n = 300
	for i := range int64(n) {
		at := i * 7 % n
		allocate(t, s, 1, at*16*mib, 1)
		validate(t, s, 1, 1, at*16*mib+512, 512)
	}
	rows := 0
	from, to := schema.OfDevice(schema.PrefixExtents, dev)
	for kv, err := range e.Scan(t.Context(), from, to, catalog.ScanOptions{}) {
		if err != nil || len(kv.Value) > maxRowBitmap+maxRowUnits*40 {
			t.Errorf("row of %d bytes, %v", len(kv.Value), err)
		}
		rows++
	}
	if rows < n/4 || rows > n {
		t.Errorf("%d rows for %d units", rows, n)
	}
	if err := s.Validate(t.Context(), 1, 1, layout.Column{}, []layout.Range{{Len: n * 16 * mib}, {Off: 512, Len: 1024}, {Len: 512}}); err != nil {
		t.Error(err)
	}
	if list, _, err := s.Lookup(t.Context(), 1, layout.Range{Len: n * 16 * mib}, layout.IOModeRead, layout.MaxExtents); err != nil ||
		list[len(list)-1].End() != n*16*mib || slices.ContainsFunc(list, func(e layout.Extent) bool { return e.State != layout.ExtentRead }) {
		t.Errorf("%d extents, %v", len(list), err)
	}
	// And one whose rows have a unit each, and get another.
	for off := int64(0); off < 160*16*mib; {
		g := allocate(t, s, 2, off, 1)
		off = g.Extents[len(g.Extents)-1].End()
	}
	for i := range int64(40) {
		if _, _, err := s.Punch(t.Context(), 2, layout.Range{Off: (4*i + 1) * 16 * mib, Len: 3 * 16 * mib}); err != nil {
			t.Fatal(err)
		}
	}
	for off, calls := int64(0), 0; off < 160*16*mib; calls++ {
		g, err := Allocate(t.Context(), []Request{{
			Space: s, Number: 2, Column: layout.Column{Unit: 16 * mib, Count: 4, Index: 1}, Range: layout.Range{Off: off, Len: 160*16*mib - off},
		}}, nil)
		if err != nil || calls > 100 {
			t.Fatal(err)
		}
		off = g[0].Extents[len(g[0].Extents)-1].End()
	}
	if err := s.Remove(t.Context(), 2); err != nil {
		t.Error(err)
	}
	if err := s.Release(t.Context(), 2, math.MaxUint64); err != nil {
		t.Error(err)
	}
	if zeros, _, err := s.Punch(t.Context(), 1, layout.Range{Off: 100, Len: (n - 1) * 16 * mib}); err != nil || len(zeros) != 2 {
		t.Errorf("%+v, %v", zeros, err)
	}
	clean(t, s)
	if err := s.Remove(t.Context(), 1); err != nil {
		t.Error(err)
	}
	if err := s.Release(t.Context(), 1, math.MaxUint64); err != nil {
		t.Error(err)
	}
	if st, _ := s.Stat(t.Context()); st.Free != st.Total {
		t.Errorf("%+v", st)
	}
	if e.keys > e.caps.MaxKeys || e.keys < e.caps.MaxKeys/2 {
		t.Errorf("batches of up to %d entries", e.keys)
	}
	clean(t, s)
}

// A namespace that was dropped gives nothing any more, though somebody has it open.
func TestAllocateAfterDrop(t *testing.T) {
	e := memorytest.New()
	s := format(t, e, 4096, mib, 256)
	var b catalog.Batch
	s.Drop(&b)
	commit(t, e, &b)
	grants, err := Allocate(timed(t), []Request{{Space: s, Number: 1, Range: layout.Range{Len: mib}}}, nil)
	if !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("granted %+v, %v", grants, err)
	}
	from, to := schema.OfDevice(schema.PrefixExtents, dev)
	for kv := range e.Scan(t.Context(), from, to, catalog.ScanOptions{}) {
		t.Errorf("row %q of a namespace that is not there", kv.Key)
	}
}

// A commit of far more than the data file has takes no memory for it.
func TestValidateTooMuch(t *testing.T) {
	s := format(t, memorytest.New(), 4096, mib, 256)
	g := allocate(t, s, 1, 0, 8*mib)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := s.Validate(timed(t), 1, g.Generation, layout.Column{Unit: 64 << 10, Count: 2}, []layout.Range{{Len: 1 << 40}})
	runtime.ReadMemStats(&after)
	if !errors.Is(err, ErrNotAllocated) {
		t.Error(err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 16*mib {
		t.Errorf("it took %d MiB of memory", n/mib)
	}
}
