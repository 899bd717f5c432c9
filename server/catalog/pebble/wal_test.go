package pebble

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A log has what was written to it, and zeros behind that for what comes next.
func TestLogZeroed(t *testing.T) {
	mem := vfs.NewMem()
	fs := &manifestFS{FS: mem, log: slog.Default(), ahead: zeroAhead}
	f, err := fs.Create("000001.log", vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	var want []byte
	grown := 0
	var size int64
	for len(want) < 3*zeroAhead {
		p := bytes.Repeat([]byte{byte(1 + len(want)%255)}, 1+rand.N(zeroAhead/8))
		want = append(want, p...) // before, as a file in memory may spoil p, to find who uses it again
		if n, err := f.Write(p); n != len(p) || err != nil {
			t.Fatal(n, err)
		}
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() != size {
			grown++
		}
		size = st.Size()
		if size < int64(len(want)) || size > int64(len(want))+zeroAhead {
			t.Fatalf("%d bytes written, the file has %d", len(want), size)
		}
	}
	if grown > 4 {
		t.Errorf("the file has grown %d times", grown)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := mem.Open("000001.log")
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	all := make([]byte, size)
	if _, err := got.ReadAt(all, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(all[:len(want)], want) || len(bytes.Trim(all[len(want):], "\x00")) > 0 {
		t.Error("the file has something else than what was written, and zeros")
	}
}
