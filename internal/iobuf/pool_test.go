package iobuf

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"
)

func newPool(t testing.TB, limit int64) *Pool {
	t.Helper()
	p, err := New(limit)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLimits(t *testing.T) {
	for _, limit := range []int64{-1, 0, PageSize, 1 << 50} {
		if _, err := New(limit); err == nil {
			t.Errorf("New(%d) was accepted", limit)
		}
	}
	for _, c := range []struct {
		limit, want int64
		maxBuf      int
	}{
		{16 << 10, 16 << 10, 4 << 10},
		{1 << 20, 1 << 20, 256 << 10},
		{7<<20 + 5, 7 << 20, 1 << 20},
		{256 << 20, 256 << 20, MaxSize},
	} {
		p := newPool(t, c.limit)
		if p.Limit() != c.want || p.MaxBuf() != c.maxBuf {
			t.Errorf("New(%d): limit %d, largest buffer %d; want %d, %d", c.limit, p.Limit(), p.MaxBuf(), c.want, c.maxBuf)
		}
		for _, n := range []int{0, -1, c.maxBuf + 1} {
			if p.Get(n) != nil {
				t.Errorf("pool of %d gave a buffer of %d bytes", c.limit, n)
			}
		}
		var all []*Buf
		for b := p.Get(c.maxBuf); b != nil; b = p.Get(c.maxBuf) {
			all = append(all, b)
		}
		if got := int64(len(all)) * int64(c.maxBuf); got != c.want || p.Used() != c.want {
			t.Errorf("pool of %d: %d bytes in largest buffers, Used %d", c.want, got, p.Used())
		}
		for _, b := range all {
			b.Release()
		}
		if p.Used() != 0 {
			t.Errorf("Used is %d after all were released", p.Used())
		}
	}
}

// Buffers of random sizes never overlap, are aligned, stay within the limit, and leave nothing behind.
func TestRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	p := newPool(t, 8<<20)
	noise := make([]byte, 4<<20)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	type held struct {
		b    *Buf
		want []byte
	}
	var all []held
	check := func(h held) {
		if !bytes.Equal(h.b.Bytes(), h.want) {
			t.Fatalf("a buffer of %d bytes has changed", len(h.want))
		}
	}
	for range 3000 {
		if rnd.IntN(2) == 0 || len(all) == 0 {
			n := 1 + rnd.IntN(1<<(1+rnd.IntN(20)))
			b := p.Get(n)
			if b == nil {
				// The free memory may be in too small parts for n, never for a page.
				page := p.Get(PageSize)
				if page == nil && p.Used() < p.Limit() {
					t.Fatalf("no page left with %d of %d bytes used", p.Used(), p.Limit())
				} else if page != nil {
					page.Release()
				}
				continue
			}
			if len(b.Bytes()) != n || uintptr(unsafe.Pointer(&b.Bytes()[0]))%PageSize != 0 {
				t.Fatalf("buffer of %d bytes at %p, want %d aligned to %d", len(b.Bytes()), b.Bytes(), n, PageSize)
			}
			h := held{b, noise[rnd.IntN(1<<20):][:n]}
			copy(b.Bytes(), h.want)
			all = append(all, h)
		} else {
			i := rnd.IntN(len(all))
			check(all[i])
			all[i].b.Release()
			all = append(all[:i], all[i+1:]...)
		}
		var sum int64
		for _, h := range all {
			sum += int64(len(h.b.Bytes())+PageSize-1) / PageSize * PageSize
		}
		if p.Used() != sum || sum > p.Limit() {
			t.Fatalf("Used is %d, limit %d; the buffers have %d", p.Used(), p.Limit(), sum)
		}
	}
	for _, h := range all {
		check(h)
		h.b.Release()
	}
	// Everything has joined again: the largest buffers fit.
	for range p.Limit() / int64(p.MaxBuf()) {
		if p.Get(p.MaxBuf()) == nil {
			t.Fatal("memory stays fragmented after all was released")
		}
	}
}

// What Shrink gives back can be had, and what is left stays.
func TestShrink(t *testing.T) {
	p := newPool(t, 64*PageSize) // the largest buffer has 16 pages
	for _, n := range []int{16 * PageSize, 15*PageSize + 1, 9 * PageSize, PageSize + 1, 1} {
		b := p.Get(16 * PageSize)
		for i := range b.Bytes() {
			b.Bytes()[i] = byte(i / PageSize)
		}
		b.Shrink(n)
		want := int64(n+PageSize-1) / PageSize * PageSize
		if len(b.Bytes()) != n || cap(b.Bytes()) != n || p.Used() != want {
			t.Errorf("shrunk to %d: %d bytes, capacity %d, Used %d; want %d", n, len(b.Bytes()), cap(b.Bytes()), p.Used(), want)
		}
		var rest []*Buf
		for p.Used() < p.Limit() {
			r := p.Get(PageSize)
			clear(r.Bytes())
			rest = append(rest, r)
		}
		for i, v := range b.Bytes() {
			if v != byte(i/PageSize) {
				t.Fatalf("shrunk to %d: byte %d has changed", n, i)
			}
		}
		for _, r := range append(rest, b) {
			r.Release()
		}
		if p.Used() != 0 || p.Get(16*PageSize) == nil {
			t.Fatalf("shrunk to %d and released: Used %d", n, p.Used())
		}
		p = newPool(t, 64*PageSize)
	}
	defer func() {
		if recover() == nil {
			t.Error("a buffer grew")
		}
	}()
	p.Get(5).Shrink(6)
}

func TestReferences(t *testing.T) {
	p := newPool(t, 1<<20)
	b := p.Get(100)
	b.Ref()
	b.Release()
	if p.Used() != PageSize {
		t.Fatalf("Used is %d with one reference left", p.Used())
	}
	b.Release()
	if p.Used() != 0 {
		t.Fatalf("Used is %d with no reference left", p.Used())
	}
	defer func() {
		if recover() == nil {
			t.Error("a release too many went unnoticed")
		}
	}()
	new(Buf).Release()
}

func TestIdleMemoryGoesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 16<<20)
		keep := p.Get(1 << 20) // in the first block, which therefore stays
		copy(keep.Bytes(), "stay")
		var rest []*Buf
		for range 3 {
			b := p.Get(4 << 20)
			clear(b.Bytes())
			rest = append(rest, b)
		}
		if p.Resident() != 16<<20 {
			t.Fatalf("resident %d, want all", p.Resident())
		}
		before := residentPages(t, p)
		for _, b := range rest {
			b.Release()
		}
		time.Sleep(idleAfter / 2)
		p.Get(4 << 20).Release() // takes the block freed last, so the two others stay untouched
		time.Sleep(idleAfter*2 - time.Second)
		if got := p.Resident(); got != 8<<20 && got != 4<<20 {
			t.Errorf("resident %d after a while, want 4 or 8 MiB", got)
		}
		time.Sleep(3 * idleAfter)
		if got := p.Resident(); got != 4<<20 {
			t.Errorf("resident %d at last, want 4 MiB", got)
		}
		if after := residentPages(t, p); before >= 0 && after > before-12<<20/PageSize+16 {
			t.Errorf("%d pages have memory, before %d", after, before)
		}
		if string(keep.Bytes()[:4]) != "stay" {
			t.Error("a buffer in use lost its contents")
		}
		keep.Release()
		time.Sleep(3 * idleAfter)
		if got := p.Resident(); got != 0 {
			t.Errorf("resident %d with nothing in use", got)
		}
		if b := p.Get(4 << 20); b == nil || p.Resident() != 4<<20 {
			t.Error("memory that was given back cannot be used again")
		}
	})
}

// Resident is an upper bound of how much memory the pool holds, in bytes.
func (p *Pool) Resident() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(p.warm) * PageSize << p.top
}

// residentPages is what the kernel says of the pool's mapping, in pages, or -1 if the pool has none.
func residentPages(t *testing.T, p *Pool) int {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(smaps), fmt.Sprintf("%x-", uintptr(unsafe.Pointer(&p.mem[0]))))
	if !ok {
		return -1
	}
	_, after, _ = strings.Cut(after, "\nRss:")
	var kib int
	if _, err := fmt.Sscan(after, &kib); err != nil {
		t.Fatal(err)
	}
	return kib << 10 / PageSize
}

func TestNoAllocation(t *testing.T) {
	if raceEnabled {
		t.Skip("sync.Pool drops objects at random under the race detector")
	}
	p := newPool(t, 8<<20)
	if n := testing.AllocsPerRun(1000, func() { p.Get(12 << 10).Release() }); n != 0 {
		t.Errorf("%v allocations for each buffer", n)
	}
}

func BenchmarkGet(b *testing.B) {
	p := newPool(b, 64<<20)
	for _, n := range []int{4 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Get(n).Release()
			}
		})
	}
}
