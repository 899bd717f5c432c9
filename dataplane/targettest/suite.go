package targettest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// Fixture is a target under test and what belongs to it.
type Fixture struct {
	Target  dataplane.Target
	NewFile func() *layout.DataFile // an empty data file that may be read and written
	BadFile *layout.DataFile        // one the server does not know; nil leaves out its tests
}

// patience bounds each wait for a reply.
const patience = 30 * time.Second

// Run holds targets to the contract. open is called for each test with that test's t; it registers its own cleanup.
func Run(t *testing.T, open func(t *testing.T) Fixture) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, fx Fixture)
	}{
		{"Limits", testLimits},
		{"Sizes", testSizes},
		{"EndOfFile", testEndOfFile},
		{"Holes", testHoles},
		{"Stability", testStability},
		{"Commit", testCommit},
		{"Concurrent", testConcurrent},
		{"Reuse", testReuse},
		{"StartFromDone", testStartFromDone},
		{"DetachRead", testDetachRead},
		{"DetachWrite", testDetachWrite},
		{"DetachEnded", testDetachEnded},
		{"OutOfRange", testOutOfRange},
		{"BadFile", testBadFile},
		{"Close", testClose},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

// rig is a started op that tells when it is done and how often.
type rig struct {
	layout.Op
	done  chan struct{}
	times atomic.Int32
}

func newRig(op layout.Op) *rig {
	r := &rig{Op: op, done: make(chan struct{})}
	r.Op.Done = func(got *layout.Op) {
		if got != &r.Op {
			panic("targettest: Done was called with another op than was started")
		}
		if r.times.Add(1) == 1 {
			close(r.done)
		}
	}
	return r
}

func (r *rig) wait(t *testing.T) {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		t.Fatalf("%v of %d bytes at %d: no Done after %v", r.Kind, len(r.Data), r.Off, patience)
	}
}

// do runs an op to its end.
func do(t *testing.T, fx Fixture, op layout.Op) *rig {
	t.Helper()
	r := newRig(op)
	fx.Target.Start(&r.Op)
	fx.Target.Flush()
	r.wait(t)
	return r
}

func write(t *testing.T, fx Fixture, df *layout.DataFile, off int64, data []byte, stable layout.Stability) *rig {
	t.Helper()
	r := do(t, fx, layout.Op{Kind: layout.OpWrite, File: df, Off: off, Data: data, Stable: stable})
	if r.Err != nil || r.N != len(data) {
		t.Fatalf("WRITE of %d bytes at %d: wrote %d, %v", len(data), off, r.N, r.Err)
	}
	return r
}

// read returns what an op that asks for n bytes reads.
func read(t *testing.T, fx Fixture, df *layout.DataFile, off int64, n int) ([]byte, bool) {
	t.Helper()
	r := do(t, fx, layout.Op{Kind: layout.OpRead, File: df, Off: off, Data: make([]byte, n)})
	if r.Err != nil {
		t.Fatalf("READ of %d bytes at %d: %v", n, off, r.Err)
	}
	if r.N < 0 || r.N > n || r.N < n && !r.EOF {
		t.Fatalf("READ of %d bytes at %d: %d bytes, end of file %v", n, off, r.N, r.EOF)
	}
	return r.Data[:r.N], r.EOF
}

func random(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 3))
}

func noise(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

func testLimits(t *testing.T, fx Fixture) {
	if r, w := fx.Target.Limits(); r <= 0 || w <= 0 {
		t.Errorf("limits %d and %d: want more than 0", r, w)
	}
}

func testSizes(t *testing.T, fx Fixture) {
	rnd := random(t)
	df := fx.NewFile()
	rsize, wsize := fx.Target.Limits()
	var model []byte
	src := noise(rnd, wsize+16)
	for _, n := range []int{1, 2, 3, 4, 5, 511, 512, 4095, 4096, 4097, 65536, wsize - 1, wsize} {
		if n > wsize || n < 1 {
			continue
		}
		for _, off := range []int64{0, 1, 4095, 4096, 12345} {
			data := src[rnd.IntN(16):][:n] // payloads whose memory is not aligned, too
			write(t, fx, df, off, data, layout.Unstable)
			model = extend(model, off+int64(n))
			copy(model[off:], data)
		}
	}
	for off := int64(0); off < int64(len(model)); {
		n := 1 + rnd.IntN(rsize)
		if rnd.IntN(2) == 0 {
			n = rsize
		}
		got, _ := read(t, fx, df, off, n)
		want := model[off:min(off+int64(n), int64(len(model)))]
		if !bytes.Equal(got, want) {
			t.Fatalf("READ of %d bytes at %d differs from what was written", n, off)
		}
		off += int64(n)
	}
}

func testEndOfFile(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	if got, eof := read(t, fx, df, 0, 100); len(got) != 0 || !eof {
		t.Errorf("READ of an empty file: %d bytes, end of file %v", len(got), eof)
	}
	write(t, fx, df, 0, []byte("0123456789"), layout.Unstable)
	for _, c := range []struct {
		off  int64
		n    int
		want string
		eof  bool
	}{
		{0, 11, "0123456789", true},
		{0, 10, "0123456789", true},
		{3, 4, "3456", false},
		{9, 2, "9", true},
		{10, 1, "", true},
		{1 << 20, 5, "", true},
	} {
		got, eof := read(t, fx, df, c.off, c.n)
		// A read of all that there is may leave it open.
		if string(got) != c.want || eof && !c.eof || !eof && len(got) < c.n {
			t.Errorf("READ of %d bytes at %d: %q, end of file %v; want %q, %v", c.n, c.off, got, eof, c.want, c.eof)
		}
	}
}

func testHoles(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	const at = 3<<20 + 17
	write(t, fx, df, at, []byte("end"), layout.Unstable)
	buf := bytes.Repeat([]byte{0xff}, 1000)
	r := do(t, fx, layout.Op{Kind: layout.OpRead, File: df, Off: 1 << 20, Data: buf})
	if r.Err != nil || r.N != len(buf) || len(bytes.Trim(buf, "\x00")) != 0 {
		t.Errorf("READ of a hole: %d bytes, %v, zeros: %v", r.N, r.Err, len(bytes.Trim(buf, "\x00")) == 0)
	}
	if got, _ := read(t, fx, df, at-2, 10); string(got) != "\x00\x00end" {
		t.Errorf("READ over the end of a hole: %q", got)
	}
}

func testStability(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	for _, stable := range []layout.Stability{layout.Unstable, layout.DataSync, layout.FileSync} {
		r := write(t, fx, df, 0, []byte("data"), stable)
		if r.Committed < stable || r.Committed > layout.FileSync {
			t.Errorf("asked %v, got %v", stable, r.Committed)
		}
	}
}

func testCommit(t *testing.T, fx Fixture) {
	a, b := fx.NewFile(), fx.NewFile()
	first := write(t, fx, a, 0, make([]byte, 4096), layout.Unstable)
	for _, op := range []layout.Op{
		{Kind: layout.OpCommit, File: a},
		{Kind: layout.OpCommit, File: a, Off: 100, Count: 1000},
		{Kind: layout.OpCommit, File: a, Off: 1 << 20, Count: 0},
		{Kind: layout.OpCommit, File: b}, // nothing was written
	} {
		if r := do(t, fx, op); r.Err != nil {
			t.Errorf("COMMIT at %d of %d bytes: %v", op.Off, op.Count, r.Err)
		} else if op.File == a && r.Verifier != first.Verifier {
			t.Errorf("verifier of COMMIT is %x, of WRITE %x, without a restart", r.Verifier, first.Verifier)
		}
	}
	if second := write(t, fx, a, 4096, make([]byte, 10), layout.Unstable); second.Verifier != first.Verifier {
		t.Errorf("verifier changed from %x to %x without a restart", first.Verifier, second.Verifier)
	}
}

// Many requests at a time from several goroutines, each with its own part of one of two files.
func testConcurrent(t *testing.T, fx Fixture) {
	rsize, wsize := fx.Target.Limits()
	size := min(rsize, wsize, 10000)
	files := []*layout.DataFile{fx.NewFile(), fx.NewFile()}
	seed := random(t).Uint64()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(g)))
			df, base := files[g%2], int64(g/2*20*size)
			src := noise(rnd, 20*size)
			for range 3 {
				var rigs []*rig
				for _, i := range rnd.Perm(20) {
					r := newRig(layout.Op{Kind: layout.OpWrite, File: df, Off: base + int64(i*size), Data: src[i*size:][:size]})
					rigs = append(rigs, r)
					fx.Target.Start(&r.Op)
					if rnd.IntN(4) == 0 {
						fx.Target.Flush()
					}
				}
				fx.Target.Flush()
				for _, r := range rigs {
					r.wait(t)
					if r.Err != nil || r.N != size {
						t.Errorf("WRITE at %d: %d bytes, %v", r.Off, r.N, r.Err)
					}
				}
				rigs = rigs[:0]
				for i := range 20 {
					r := newRig(layout.Op{Kind: layout.OpRead, File: df, Off: base + int64(i*size), Data: make([]byte, size)})
					rigs = append(rigs, r)
					fx.Target.Start(&r.Op)
				}
				fx.Target.Flush()
				for i, r := range rigs {
					r.wait(t)
					if r.Err != nil || !bytes.Equal(r.Data[:r.N], src[i*size:][:size]) {
						t.Errorf("READ at %d: %d bytes differ, %v", r.Off, r.N, r.Err)
					}
				}
				for i := range src {
					src[i]++
				}
			}
		})
	}
	wg.Wait()
}

// The same op again and again, as pooled requests are.
func testReuse(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	write(t, fx, df, 0, []byte("abcdefgh"), layout.Unstable)
	done := make(chan struct{}, 1)
	op := &layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 2), Done: func(*layout.Op) { done <- struct{}{} }}
	for i := range 8 {
		op.Off = int64(i)
		fx.Target.Start(op)
		fx.Target.Flush()
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatalf("round %d: no Done", i)
		}
		if want := "abcdefgh"[i:min(i+2, 8)]; op.Err != nil || string(op.Data[:op.N]) != want || op.EOF && i < 6 || !op.EOF && op.N < 2 {
			t.Fatalf("round %d: %q, end of file %v, %v; want %q", i, op.Data[:op.N], op.EOF, op.Err, want)
		}
	}
}

// Done may start and flush the next request.
func testStartFromDone(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	end := make(chan error, 1)
	left := 50
	op := &layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("x")}
	op.Done = func(op *layout.Op) {
		if left--; left == 0 || op.Err != nil {
			end <- op.Err
			return
		}
		op.Off++
		fx.Target.Start(op)
		fx.Target.Flush()
	}
	fx.Target.Start(op)
	fx.Target.Flush()
	select {
	case err := <-end:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("a request started by Done does not end")
	}
	if got, _ := read(t, fx, df, 0, 100); len(got) != 50 {
		t.Errorf("file has %d bytes, want 50", len(got))
	}
}

// dither waits for a random time around that of a request on this host.
func dither(rnd *rand.Rand) {
	if n := rnd.IntN(4); n > 0 {
		time.Sleep(time.Duration(rnd.IntN(1<<(6*n))) * time.Nanosecond)
	}
}

// After Detach the buffer is the caller's: nothing may be written there by a late reply.
func testDetachRead(t *testing.T, fx Fixture) {
	rnd := random(t)
	rsize, wsize := fx.Target.Limits()
	df := fx.NewFile()
	size := min(rsize, wsize)
	write(t, fx, df, 0, bytes.Repeat([]byte{0xaa}, size), layout.Unstable)
	var rigs []*rig
	for range 200 {
		r := newRig(layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 1+rnd.IntN(size))})
		rigs = append(rigs, r)
		fx.Target.Start(&r.Op)
		if rnd.IntN(8) > 0 { // sometimes it is not even sent
			fx.Target.Flush()
		}
		dither(rnd)
		fx.Target.Detach(&r.Op)
		for i := range r.Data {
			r.Data[i] = 0x55
		}
	}
	fx.Target.Flush()
	canceled := 0
	for _, r := range rigs {
		r.wait(t)
		switch {
		case errors.Is(r.Err, context.Canceled):
			canceled++
		case r.Err != nil:
			t.Errorf("READ ended with %v", r.Err)
		}
	}
	if got, _ := read(t, fx, df, 0, 10); !bytes.Equal(got, bytes.Repeat([]byte{0xaa}, min(10, size))) {
		t.Errorf("READ afterwards: %x", got)
	}
	for i, r := range rigs {
		if len(bytes.Trim(r.Data, "\x55")) != 0 {
			t.Fatalf("read %d: the buffer was written to after Detach", i)
		}
		if n := r.times.Load(); n != 1 {
			t.Fatalf("read %d: Done was called %d times", i, n)
		}
	}
	t.Logf("%d of %d reads were canceled", canceled, len(rigs))
}

// After Detach the data is the caller's: what it does there is not written to the server.
func testDetachWrite(t *testing.T, fx Fixture) {
	rnd := random(t)
	rsize, wsize := fx.Target.Limits()
	size := min(rsize, wsize, 100000)
	df := fx.NewFile()
	var rigs []*rig
	var want [][]byte
	for i := range 100 {
		data := bytes.Repeat([]byte{byte(1 + i)}, 1+rnd.IntN(size))
		want = append(want, slices.Clone(data))
		r := newRig(layout.Op{Kind: layout.OpWrite, File: df, Off: int64(i * size), Data: data, Stable: layout.DataSync})
		rigs = append(rigs, r)
		fx.Target.Start(&r.Op)
		if rnd.IntN(8) > 0 {
			fx.Target.Flush()
		}
		dither(rnd)
		fx.Target.Detach(&r.Op)
		clear(data)
	}
	fx.Target.Flush()
	for i, r := range rigs {
		r.wait(t)
		if r.Err != nil || r.N != len(want[i]) {
			t.Fatalf("write %d of %d bytes: %d bytes, %v", i, len(want[i]), r.N, r.Err)
		}
		if got, _ := read(t, fx, df, r.Off, len(want[i])); !bytes.Equal(got, want[i]) {
			t.Fatalf("write %d: the server has what was in the buffer after Detach", i)
		}
		if n := r.times.Load(); n != 1 {
			t.Fatalf("write %d: Done was called %d times", i, n)
		}
	}
}

func testDetachEnded(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	w := write(t, fx, df, 0, []byte("abc"), layout.Unstable)
	c := do(t, fx, layout.Op{Kind: layout.OpCommit, File: df})
	r := do(t, fx, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 3)})
	for _, r := range []*rig{w, c, r} {
		fx.Target.Detach(&r.Op)
		fx.Target.Detach(&r.Op)
		if r.Err != nil || r.times.Load() != 1 {
			t.Errorf("%v: Detach after Done changed it: %v, Done %d times", r.Kind, r.Err, r.times.Load())
		}
	}
	// A COMMIT that is let go ends in one way or another.
	late := newRig(layout.Op{Kind: layout.OpCommit, File: df})
	fx.Target.Start(&late.Op)
	fx.Target.Detach(&late.Op)
	fx.Target.Flush()
	late.wait(t)
	if late.Err != nil && !errors.Is(late.Err, context.Canceled) {
		t.Errorf("COMMIT after Detach ended with %v", late.Err)
	}
}

// Offsets at the end of what a file can have fail or find nothing; they do not wrap.
func testOutOfRange(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	write(t, fx, df, 0, []byte("start"), layout.Unstable)
	r := do(t, fx, layout.Op{Kind: layout.OpRead, File: df, Off: math.MaxInt64 - 10, Data: make([]byte, 10)})
	if r.Err == nil && r.N != 0 {
		t.Errorf("READ at the greatest offset: %d bytes", r.N)
	}
	w := do(t, fx, layout.Op{Kind: layout.OpWrite, File: df, Off: math.MaxInt64 - 10, Data: make([]byte, 10)})
	want := "start"
	if w.Err == nil { // there are file systems whose files can be so long
		want += string(make([]byte, 5))
	}
	if got, _ := read(t, fx, df, 0, 10); string(got) != want {
		t.Errorf("the file holds %q afterwards", got)
	}
}

func testBadFile(t *testing.T, fx Fixture) {
	if fx.BadFile == nil {
		t.Skip("the fixture has no BadFile")
	}
	for _, op := range []layout.Op{
		{Kind: layout.OpRead, Data: make([]byte, 10)},
		{Kind: layout.OpWrite, Data: make([]byte, 10), Stable: layout.FileSync},
		{Kind: layout.OpCommit},
	} {
		op.File = fx.BadFile
		r := do(t, fx, op)
		var e interface{ Errno() syscall.Errno }
		if !errors.As(r.Err, &e) || e.Errno() == 0 {
			t.Errorf("%v of an unknown data file: %v, want an error with an errno", op.Kind, r.Err)
		}
	}
	write(t, fx, fx.NewFile(), 0, []byte("still works"), layout.Unstable)
}

// Close ends what is outstanding; what is started afterwards fails.
func testClose(t *testing.T, fx Fixture) {
	df := fx.NewFile()
	rsize, wsize := fx.Target.Limits()
	size := min(rsize, wsize)
	var rigs []*rig
	for i := range 50 {
		op := layout.Op{Kind: layout.OpWrite, File: df, Off: int64(i * size), Data: make([]byte, size)}
		if i%2 == 1 {
			op.Kind = layout.OpRead
		}
		r := newRig(op)
		rigs = append(rigs, r)
		fx.Target.Start(&r.Op)
	}
	fx.Target.Flush()
	if err := fx.Target.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	late := newRig(layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 1)})
	fx.Target.Start(&late.Op)
	fx.Target.Flush()
	late.wait(t)
	if late.Err == nil {
		t.Error("READ after Close: no error")
	}
	for i, r := range rigs {
		r.wait(t)
		if n := r.times.Load(); n != 1 {
			t.Errorf("request %d: Done was called %d times", i, n)
		}
	}
	fx.Target.Detach(&rigs[0].Op)
}
