package layout

import (
	"bytes"
	"errors"
	"math"
	"testing"
)

// segmentOf makes a segment of one mirror over width servers.
func segmentOf(r Range, unit int64, width int) *Segment {
	s := &Segment{Range: r, IOMode: IOModeRW, StripeUnit: unit, Mirrors: []Mirror{{Servers: make([]DataFile, width)}}}
	for i := range s.Mirrors[0].Servers {
		s.Mirrors[0].Servers[i].Handles = [][]byte{{byte(i)}}
	}
	return s
}

func TestSplit(t *testing.T) {
	type piece struct {
		server int
		off    int64
		n      int
	}
	all := Range{0, ToEOF}
	for _, c := range []struct {
		name   string
		seg    *Segment
		off    int64
		n, max int
		want   []piece
	}{
		{"nothing", segmentOf(all, 4096, 2), 5, 0, 100, nil},
		{"inside a unit", segmentOf(all, 4096, 3), 4096, 4096, 1 << 20, []piece{{1, 4096, 4096}}},
		{"over units", segmentOf(all, 4096, 3), 4000, 8292, 1 << 20, []piece{{0, 4000, 96}, {1, 4096, 4096}, {2, 8192, 4096}, {0, 12288, 4}}},
		{"cut by max", segmentOf(all, 4096, 2), 4000, 4000, 1000, []piece{{0, 4000, 96}, {1, 4096, 1000}, {1, 5096, 1000}, {1, 6096, 1000}, {1, 7096, 904}}},
		{"one server has no units", segmentOf(all, 4096, 1), 100, 10000, 1 << 20, []piece{{0, 100, 10000}}},
		{"one server, unit 0", segmentOf(all, 0, 1), 100, 10000, 9000, []piece{{0, 100, 9000}, {0, 9100, 1000}}},
		{"unit 0 counts as one server", segmentOf(all, 0, 2), 100, 10000, 1 << 20, []piece{{0, 100, 10000}}},
		{"unit that is no power of two", segmentOf(all, 12288, 2), 24000, 1000, 1 << 20, []piece{{1, 24000, 576}, {0, 24576, 424}}},
		{"segment that begins inside", segmentOf(Range{6000, 5000}, 4096, 2), 6000, 5000, 1 << 20, []piece{{1, 6000, 2192}, {0, 8192, 2808}}},
		{"end of all files", segmentOf(all, 1<<20, 2), math.MaxInt64 - 3, 3, 1 << 20, []piece{{1, math.MaxInt64 - 3, 3}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := make([]byte, c.n)
			got, err := c.seg.Split(nil, p, c.off, c.max)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != len(c.want) {
				t.Fatalf("%d pieces, want %d: %v", len(got), len(c.want), c.want)
			}
			for i, w := range c.want {
				g := got[i]
				if g.Server != w.server || g.Off != w.off || len(g.Data) != w.n {
					t.Errorf("piece %d: server %d, %d bytes at %d; want %v", i, g.Server, len(g.Data), g.Off, w)
				}
				if g.Server != c.seg.ServerAt(g.Off) {
					t.Errorf("piece %d at %d: ServerAt says %d", i, g.Off, c.seg.ServerAt(g.Off))
				}
				if cap(g.Data) != len(g.Data) {
					t.Errorf("piece %d: capacity reaches into the next piece", i)
				}
			}
		})
	}
}

func TestSplitErrors(t *testing.T) {
	seg := segmentOf(Range{4096, 8192}, 4096, 2)
	before := []Piece{{Server: 7}}
	for _, c := range []struct {
		off    int64
		n, max int
		beyond bool
	}{
		{4095, 1, 10, true},
		{4096, 8193, 10, true},
		{12288, 1, 10, true},
		{20000, 0, 10, true},
		{-1, 0, 10, true},
		{-5, 10, 10, true},
		{math.MaxInt64, 5, 10, true},
		{4096, 1, 0, false},
		{4096, 1, -1, false},
	} {
		got, err := seg.Split(before, make([]byte, c.n), c.off, c.max)
		if err == nil || errors.Is(err, ErrBeyondSegment) != c.beyond {
			t.Errorf("%d bytes at %d, at most %d: %v", c.n, c.off, c.max, err)
		}
		if len(got) != 1 || got[0].Server != 7 {
			t.Errorf("%d bytes at %d: pieces %v after an error", c.n, c.off, got)
		}
	}
	if _, err := seg.Split(nil, nil, 12288, 1); err != nil {
		t.Errorf("nothing at the end: %v", err)
	}
}

func TestSplitDoesNotAllocate(t *testing.T) {
	seg := segmentOf(Range{0, ToEOF}, 4096, 4)
	p := make([]byte, 1<<20)
	pieces := make([]Piece, 0, 300)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := seg.Split(pieces, p, 100, 1<<20); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Pieces in file order cover the range exactly once, alias it, keep to one unit and to max, and go where the rule says.
func FuzzSplit(f *testing.F) {
	f.Add(int64(4096), uint8(4), int64(0), uint16(10000), uint16(1000), int64(0), ToEOF)
	f.Add(int64(0), uint8(1), int64(1)<<40, uint16(1), uint16(1), int64(0), ToEOF)
	f.Add(int64(5000), uint8(3), int64(math.MaxInt64-100), uint16(100), uint16(7), int64(100), ToEOF)
	f.Add(int64(1<<20), uint8(255), int64(1<<20-1), uint16(65535), uint16(65535), int64(1), int64(1<<30))
	f.Fuzz(func(t *testing.T, unit int64, width uint8, off int64, n, max uint16, segOff, segLen int64) {
		seg := segmentOf(Range{segOff, segLen}, unit, int(width))
		if width == 0 || seg.Validate() != nil {
			return
		}
		p := make([]byte, n)
		pieces, err := seg.Split(nil, p, off, int(max))
		fits := off >= segOff && (segLen == ToEOF || off <= segOff+segLen) && int64(n) <= seg.End()-off
		if fits && max > 0 != (err == nil) {
			t.Fatalf("error %v for %d bytes at %d of %v, at most %d", err, n, off, seg.Range, max)
		}
		if err != nil {
			if len(pieces) != 0 {
				t.Fatalf("%d pieces with %v", len(pieces), err)
			}
			return
		}
		at := off
		for i, c := range pieces {
			size := int64(len(c.Data))
			if c.Off != at || size == 0 || size > int64(max) {
				t.Fatalf("piece %d: %d bytes at %d, want some, at most %d, at %d", i, size, c.Off, max, at)
			}
			if width > 1 && c.Off/unit != (c.Off+size-1)/unit {
				t.Fatalf("piece %d crosses a unit of %d: %d bytes at %d", i, unit, size, c.Off)
			}
			want := 0
			if width > 1 {
				want = int(c.Off / unit % int64(width))
			}
			if c.Server != want || seg.ServerAt(c.Off) != want {
				t.Fatalf("piece %d at %d: server %d, ServerAt %d, want %d", i, c.Off, c.Server, seg.ServerAt(c.Off), want)
			}
			for j := range c.Data {
				c.Data[j]++
			}
			at += size
		}
		if at != off+int64(n) || !bytes.Equal(p, bytes.Repeat([]byte{1}, int(n))) {
			t.Fatalf("pieces end at %d, want %d, or do not cover the range once", at, off+int64(n))
		}
	})
}

func BenchmarkSplit(b *testing.B) {
	seg := segmentOf(Range{0, ToEOF}, 1<<20, 4)
	p := make([]byte, 4<<20)
	var pieces []Piece
	b.ReportAllocs()
	for b.Loop() {
		pieces, _ = seg.Split(pieces[:0], p, 12345, 1<<20)
	}
}
