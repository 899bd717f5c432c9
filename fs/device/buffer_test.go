package device

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/iobuf"
)

func withBuffers(t *testing.T, limit int64) *kernel {
	pool, err := iobuf.New(limit)
	ok(t, err)
	k := newKernel(t, func(c *Config) { c.Handler.(*testHandler).buffers = pool })
	return k
}

// patterned is n bytes as they are in a file at off.
func patterned(n int, off int64) []byte {
	b := make([]byte, n)
	pattern(b, off)
	return b
}

// From the second on the WRITEs of a stream are in memory of the Handler, and smaller ones take as much of it as they have.
func TestWriteBuffer(t *testing.T) {
	k := withBuffers(t, 1<<20)
	for i, c := range []struct {
		size, used int // bytes; of the pool
	}{
		{100 << 10, 0},
		{100 << 10, 100 << 10},
		{66 << 10, 68 << 10}, // whole pages
		{testMaxWrite, 0},    // more than was expected
		{testMaxWrite, testMaxWrite},
		{4 << 10, 0},
		{testMaxWrite, testMaxWrite},
	} {
		k.expect(k.write(uint64(i), patterned(c.size, int64(i))), 0)
		if used := k.used(int64(c.used)); used != int64(c.used) {
			t.Errorf("WRITE %d, of %d bytes: %d bytes of the Handler's memory are in use, want %d", i, c.size, used, c.used)
		}
		k.forget(0)
	}
}

// used is how much of the Handler's memory is in use, when that has come to want or does not.
func (k *kernel) used(want int64) (n int64) {
	k.t.Helper()
	k.settle()
	for deadline := time.Now().Add(patience / 10); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if n = k.h.buffers.Used(); n == want { // a reader that waits has none
			break
		}
	}
	return n
}

// forget releases what the Handler keeps, but for the last n.
func (k *kernel) forget(n int) {
	k.t.Helper()
	k.h.mu.Lock()
	defer k.h.mu.Unlock()
	for len(k.h.kept) > n {
		e := k.h.kept[0]
		if !bytes.Equal(e.buf.Bytes(), patterned(len(e.buf.Bytes()), e.off)) {
			k.t.Fatalf("%d bytes at %d have changed since they were written", len(e.buf.Bytes()), e.off)
		}
		e.buf.Release()
		k.h.kept = k.h.kept[1:]
	}
}

// Whatever the sizes and however little memory there is, each WRITE has its data, and what is kept stays as it was.
func TestWriteBuffers(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	k := withBuffers(t, 1<<20)
	inBuffers := 0
	for range 300 {
		size := 1 + rnd.IntN(testMaxWrite)
		if rnd.IntN(3) == 0 {
			size = 1 + rnd.IntN(smallWrite)
		}
		off := rnd.Int64N(1 << 30)
		k.expect(k.write(uint64(off), patterned(size, off)), 0)
		if rnd.IntN(4) == 0 {
			k.expect(k.read(uint64(off), size), 0)
		}
		if rnd.IntN(8) == 0 {
			k.h.mu.Lock()
			inBuffers += len(k.h.kept)
			k.h.mu.Unlock()
			k.forget(rnd.IntN(8))
		}
	}
	if inBuffers < 20 {
		t.Errorf("%d WRITEs were in memory of the Handler", inBuffers)
	}
	k.forget(0)
	if used := k.used(0); used != 0 {
		t.Errorf("%d bytes of the Handler's memory are still in use", used)
	}
}
