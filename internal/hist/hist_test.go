package hist

import (
	"testing"
	"time"
)

func TestHist(t *testing.T) {
	var h Hist
	for _, took := range []time.Duration{-5, 0, 1, 3, 4, 1000, 1023, 1024, 1 << 62} {
		h.Add(took)
	}
	c := h.Counts()
	for i, want := range map[int]uint64{0: 2, 1: 1, 2: 1, 3: 1, 10: 2, 11: 1, Buckets - 1: 1} {
		if c.N[i] != want {
			t.Errorf("bucket %d has %d, want %d", i, c.N[i], want)
		}
	}
	if c.Total() != 9 || c.Sum != -5+1+3+4+1000+1023+1024+1<<62 {
		t.Errorf("%d with a sum of %d", c.Total(), c.Sum)
	}
	d := c
	d.Join(&c)
	if d.Total() != 18 || d.N[10] != 4 {
		t.Errorf("joined: %+v", d)
	}
	if n := testing.AllocsPerRun(100, func() { h.Add(time.Millisecond) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
