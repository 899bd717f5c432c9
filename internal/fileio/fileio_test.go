package fileio

import (
	"math/rand/v2"
	"testing"
)

// Which part of a transfer is direct.
func TestDirectPart(t *testing.T) {
	d := Kind{Align: 4096, Least: 16 << 10}
	for _, c := range []struct{ off, n, from, to int64 }{
		{0, 16 << 10, 0, 16 << 10},
		{0, 16<<10 - 1, 0, 0},
		{1, 16 << 10, 0, 0},
		{1, 20<<10 - 1, 4095, 20<<10 - 1},
		{4095, 24 << 10, 1, 20<<10 + 1},
		{4096, 1<<20 + 5, 0, 1 << 20},
	} {
		from, to := d.Part(int(c.n), c.off)
		if int64(from) != c.from || int64(to) != c.to {
			t.Errorf("of %d bytes at %d: [%d, %d), want [%d, %d)", c.n, c.off, from, to, c.from, c.to)
		}
	}
	if from, to := (&Kind{Least: 1}).Part(1<<20, 0); from != to {
		t.Error("direct where the file system cannot")
	}
}

// A stream is followed through gaps and requests out of order; what it has left behind is told once.
func TestStream(t *testing.T) {
	var s stream
	var freed int64
	const n, end = 1 << 20, 1 << 30
	for off := int64(0); off < end; off += 4 * n {
		for _, at := range []int64{off + n, off} {
			from, to := s.advance(at, n)
			if from == to {
				continue
			}
			if from != freed || to > at+n-streamSpan {
				t.Fatalf("at %d: [%d, %d) after %d", at, from, to, freed)
			}
			freed = to
		}
	}
	if freed < end-streamSpan-streamStep-4*n {
		t.Errorf("dropped to %d only", freed)
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		if from, to := s.advance(rnd.Int64N(1<<50), n); from != to {
			t.Fatalf("random requests are a stream: [%d, %d)", from, to)
		}
	}
}
