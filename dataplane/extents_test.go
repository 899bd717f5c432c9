package dataplane

import (
	"math/rand/v2"
	"testing"
)

// A map of extents against an array with one value per byte.
func TestExtentsModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	const size = 2000
	var m extents[int]
	var model [size]int
	live := map[int]int{} // references of each value, as dup and drop count them
	drop := func(v *int) { live[*v]-- }
	dup := func(v *int) { live[*v]++ }
	for step := range 20000 {
		off := rnd.Int64N(size)
		end := min(size, off+1+rnd.Int64N(1<<(1+rnd.IntN(8))))
		switch val := step + 1; rnd.IntN(5) {
		case 0:
			m.cut(off, end, drop, dup)
			clear(model[off:end])
		case 1:
			which := rnd.IntN(3)
			m.deleteFunc(off, end, func(e *extent[int]) bool {
				if e.val%3 != which {
					return false
				}
				live[e.val]--
				clear(model[e.off:e.end])
				return true
			})
		default:
			m.cut(off, end, drop, dup)
			m.insert(off, end, val)
			live[val]++
			for i := off; i < end; i++ {
				model[i] = val
			}
		}
		if step%17 != 0 {
			continue
		}
		var got [size]int
		count, last := 0, int64(0)
		pieces := map[int]int{}
		m.overlapping(0, size, func(e *extent[int]) bool {
			if e.off < last || e.end <= e.off {
				t.Fatalf("step %d: extent [%d, %d) after %d", step, e.off, e.end, last)
			}
			last = e.end
			for i := e.off; i < e.end; i++ {
				got[i] = e.val
			}
			count++
			pieces[e.val]++
			return true
		})
		if got != model {
			t.Fatalf("step %d: contents differ", step)
		}
		if count != m.count {
			t.Fatalf("step %d: count is %d, there are %d", step, m.count, count)
		}
		for v, n := range live {
			if n != pieces[v] {
				t.Fatalf("step %d: value %d is there %d times, counted %d", step, v, pieces[v], n)
			}
		}
		for l, leaf := range m.leaves {
			if len(leaf) == 0 || len(leaf) > leafMax {
				t.Fatalf("step %d: leaf %d has %d extents", step, l, len(leaf))
			}
		}
	}
}

func TestExtentsOverlappingStops(t *testing.T) {
	var m extents[int]
	for i := range int64(200) {
		m.insert(i*10, i*10+5, int(i))
	}
	var got []int
	m.overlapping(105, 1<<40, func(e *extent[int]) bool {
		got = append(got, e.val)
		return len(got) < 3
	})
	if len(got) != 3 || got[0] != 11 || got[2] != 13 {
		t.Errorf("visited %v, want 11 to 13", got)
	}
	m.overlapping(5, 10, func(e *extent[int]) bool {
		t.Errorf("[5, 10) is free but has %d", e.val)
		return true
	})
}

func TestExtentsReuseMemory(t *testing.T) {
	var m extents[int]
	nop := func(*int) {}
	m.insert(0, 1, 1)
	if n := testing.AllocsPerRun(100, func() {
		m.cut(0, 1, nop, nop)
		m.insert(0, 1, 1)
	}); n != 0 {
		t.Errorf("%v allocations for each insertion", n)
	}
}

func BenchmarkExtentsRandom(b *testing.B) {
	var m extents[[7]int64]
	nop := func(*[7]int64) {}
	rnd := rand.New(rand.NewPCG(1, 1))
	const blocks = 1 << 16
	for b.Loop() {
		off := rnd.Int64N(blocks) << 12
		m.cut(off, off+4096, nop, nop)
		m.insert(off, off+4096, [7]int64{})
	}
}
