package coherence

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestReadAhead reads a file from front to back, so that it is read ahead, and changes on another mount what comes next.
func TestReadAhead(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rnd := rand.New(rand.NewPCG(*seed, 1))
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := twoMounts(v)
	const size, block = 32 << 20, 128 << 10
	want := bytes.Repeat([]byte{'-'}, size)
	if err := os.WriteFile(filepath.Join(a.Dir, "f"), want, 0o644); err != nil {
		t.Fatal(err)
	}
	f := open(t, filepath.Join(b.Dir, "f"), os.O_RDONLY)
	rounds := 8
	if *long {
		rounds = 60
	}
	got := make([]byte, block)
	for round := range rounds {
		// There is no lease for the reader before the writer's size is durable and its layout is back.
		time.Sleep(1500 * time.Millisecond)
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Size != size {
			t.Fatalf("round %d: size %d, %v", round, st.Size, err)
		}
		change := rnd.IntN(20) * block
		for off := 0; off < change+16*block; off += block {
			if off == change {
				at := off + rnd.IntN(8*block)
				mark := bytes.Repeat([]byte{byte('a' + round%26)}, 1+rnd.IntN(2*block))
				copy(want[at:], mark)
				t.Logf("round %d: %d bytes at %d are changed before %d are read", round, len(mark), at, off)
				g := open(t, filepath.Join(a.Dir, "f"), os.O_WRONLY)
				if _, err := g.WriteAt(mark, int64(at)); err != nil {
					t.Fatal(err)
				}
				if err := g.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := f.ReadAt(got, int64(off)); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want[off:off+block]) {
				t.Fatalf("round %d: other data at %d", round, off)
			}
		}
	}
}
