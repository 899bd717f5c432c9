package pebble

import (
	"context"
	"io"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/weftfs/weft/server/catalog"
)

func TestWitness(t *testing.T) {
	var w witness
	w = w.set("MANIFEST-000004", 100)
	w = w.set("MANIFEST-000004", 5120)
	w = w.set("MANIFEST-000009", 98)
	const text = "weft catalog manifests 1\nMANIFEST-000004 5120\nMANIFEST-000009 98\ncrc 9c7ba2b0\n"
	if got := string(w.encode()); got != text {
		t.Errorf("encoded %q", got)
	}
	if got := decodeWitness([]byte(text)); !slices.Equal(got, w) {
		t.Errorf("decoded %v, want %v", got, w)
	}
	for i := range text {
		broken := []byte(text)
		broken[i] ^= 1
		if got := decodeWitness(broken); got != nil {
			t.Errorf("decoded %q as %v", broken, got)
		}
		if got := decodeWitness([]byte(text[:i])); got != nil {
			t.Errorf("decoded %q as %v", text[:i], got)
		}
	}
	w = w.set("MANIFEST-000012", 7)
	if w.size("MANIFEST-000004") != 0 || w.size("MANIFEST-000009") != 98 || w.size("MANIFEST-000012") != 7 {
		t.Errorf("after a third MANIFEST: %v", w)
	}
}

func FuzzDecodeWitness(f *testing.F) {
	f.Add(witness{{"MANIFEST-000004", 5120}, {"MANIFEST-000009", 98}}.encode())
	f.Add([]byte(witnessTitle + "MANIFEST-1 99999999999999999999\ncrc 00000000\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if w := decodeWitness(b); w != nil && string(w.encode()) != string(b) {
			t.Fatalf("%q decoded to %v", b, w)
		}
	})
}

// TestWitnessIsExact flushes until the MANIFEST spans several of its 32 KiB blocks, over two openings. After every sync
// the witness must name exactly what a reader finds sound: one byte more and a healthy catalog would be refused.
func TestWitnessIsExact(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "catalog")
	cfg.fs = vfs.NewMem()
	flushes := 250
	if testing.Short() {
		flushes = 130
	}
	for range 2 {
		e := mustOpen(t, cfg)
		for i := range flushes {
			b := &catalog.Batch{Durability: catalog.NoSync}
			for j := range 4 { // keys as long as possible make large entries in the MANIFEST
				key := make([]byte, catalog.MaxKey)
				copy(key, number(byte(j), uint64(i)))
				b.Put(key, nil)
			}
			if err := e.Commit(context.Background(), b); err != nil {
				t.Fatal(err)
			}
			if err := e.db.Flush(); err != nil {
				t.Fatal(err)
			}
			if i%25 == 0 {
				checkWitness(t, cfg)
			}
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if size := checkWitness(t, cfg); size < 2*32<<10 {
			t.Errorf("the MANIFEST has only %d bytes", size)
		}
	}
}

// checkWitness compares the witness with the MANIFEST and returns the size of both. Compactions may go on meanwhile,
// so it takes the witness first: the MANIFEST may have grown beyond it but must be sound up to there.
func checkWitness(t *testing.T, cfg Config) int64 {
	t.Helper()
	name, err := atomicfs.ReadMarker(cfg.fs, cfg.Dir, "manifest")
	if err != nil {
		t.Fatal(err)
	}
	checker := &manifestFS{FS: cfg.fs, log: cfg.Logger}
	if err := checker.checkManifest(cfg.Dir, name); err != nil {
		t.Fatal(err)
	}
	want := checker.witness.size(name)
	if want == 0 {
		t.Fatalf("the witness %v does not know %s", checker.witness, name)
	}
	f, err := cfg.fs.Open(cfg.fs.PathJoin(cfg.Dir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// Cut off where the witness says, there is a whole number of records.
	if sound, err := soundBytes(io.LimitReader(f, want)); err != nil || sound != want {
		t.Fatalf("%s: %d of %d bytes are sound, %v", name, sound, want, err)
	}
	return want
}
