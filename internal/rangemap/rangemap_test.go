package rangemap

import (
	"math/rand/v2"
	"testing"
)

// A map against an array with one value per byte.
func TestMapModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	const size = 2000
	var m Map[int]
	var model [size]int
	live := map[int]int{} // references of each value, as dup and drop count them
	drop := func(v *int) { live[*v]-- }
	dup := func(v *int) { live[*v]++ }
	for step := range 20000 {
		off := rnd.Int64N(size)
		end := min(size, off+1+rnd.Int64N(1<<(1+rnd.IntN(8))))
		switch val := step + 1; rnd.IntN(5) {
		case 0:
			m.Cut(off, end, drop, dup)
			clear(model[off:end])
		case 1:
			which := rnd.IntN(3)
			m.DeleteFunc(off, end, func(e *Entry[int]) bool {
				if e.Val%3 != which {
					return false
				}
				live[e.Val]--
				clear(model[e.Off:e.End])
				return true
			})
		default:
			m.Cut(off, end, drop, dup)
			m.Insert(off, end, val)
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
		m.Overlapping(0, size, func(e *Entry[int]) bool {
			if e.Off < last || e.End <= e.Off {
				t.Fatalf("step %d: entry [%d, %d) after %d", step, e.Off, e.End, last)
			}
			last = e.End
			for i := e.Off; i < e.End; i++ {
				got[i] = e.Val
			}
			count++
			pieces[e.Val]++
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
				t.Fatalf("step %d: leaf %d has %d entries", step, l, len(leaf))
			}
		}
	}
}

func TestMapOverlappingStops(t *testing.T) {
	var m Map[int]
	for i := range int64(200) {
		m.Insert(i*10, i*10+5, int(i))
	}
	var got []int
	m.Overlapping(105, 1<<40, func(e *Entry[int]) bool {
		got = append(got, e.Val)
		return len(got) < 3
	})
	if len(got) != 3 || got[0] != 11 || got[2] != 13 {
		t.Errorf("visited %v, want 11 to 13", got)
	}
	m.Overlapping(5, 10, func(e *Entry[int]) bool {
		t.Errorf("[5, 10) is free but has %d", e.Val)
		return true
	})
}

func TestMapReuseMemory(t *testing.T) {
	var m Map[int]
	nop := func(*int) {}
	m.Insert(0, 1, 1)
	if n := testing.AllocsPerRun(100, func() {
		m.Cut(0, 1, nop, nop)
		m.Insert(0, 1, 1)
	}); n != 0 {
		t.Errorf("%v allocations for each insertion", n)
	}
}

func BenchmarkMapRandom(b *testing.B) {
	var m Map[[7]int64]
	nop := func(*[7]int64) {}
	rnd := rand.New(rand.NewPCG(1, 1))
	const blocks = 1 << 16
	for b.Loop() {
		off := rnd.Int64N(blocks) << 12
		m.Cut(off, off+4096, nop, nop)
		m.Insert(off, off+4096, [7]int64{})
	}
}
