package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

var (
	_ dataplane.Target    = (*Target)(nil)
	_ dataplane.Epocher   = (*Target)(nil)
	_ dataplane.Sparser   = (*Target)(nil)
	_ dataplane.Validator = (*Target)(nil)
)

const testPatience = 30 * time.Second

// started is an op that was started.
type started struct {
	layout.Op
	done  chan struct{}
	times atomic.Int32
}

func start(t *Target, op layout.Op) *started {
	s := &started{Op: op, done: make(chan struct{})}
	s.Op.Done = func(*layout.Op) {
		if s.times.Add(1) == 1 {
			close(s.done)
		}
	}
	t.Start(&s.Op)
	t.Flush()
	return s
}

func (s *started) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-s.done:
	case <-time.After(testPatience):
		t.Fatalf("%v of %d bytes at %d does not end", s.Kind, len(s.Data), s.Off)
	}
	return s.Err
}

func (s *started) running() bool {
	select {
	case <-s.done:
		return false
	default:
		return true
	}
}

func mustWrite(t *testing.T, target *Target, df *layout.DataFile, off int64, data []byte, stable layout.Stability) *started {
	t.Helper()
	s := start(target, layout.Op{Kind: layout.OpWrite, File: df, Off: off, Data: data, Stable: stable})
	if err := s.wait(t); err != nil || s.N != len(data) {
		t.Fatalf("WRITE of %d bytes at %d: %d bytes, %v", len(data), off, s.N, err)
	}
	return s
}

func mustRead(t *testing.T, target *Target, df *layout.DataFile, off int64, n int) []byte {
	t.Helper()
	s := start(target, layout.Op{Kind: layout.OpRead, File: df, Off: off, Data: bytes.Repeat([]byte{0x7f}, n)})
	if err := s.wait(t); err != nil || s.N != n || s.EOF {
		t.Fatalf("READ of %d bytes at %d: %d bytes, end of file %v, %v", n, off, s.N, s.EOF, err)
	}
	return s.Data
}

func mustCommit(t *testing.T, target *Target, df *layout.DataFile) layout.Verifier {
	t.Helper()
	s := start(target, layout.Op{Kind: layout.OpCommit, File: df})
	if err := s.wait(t); err != nil {
		t.Fatalf("COMMIT: %v", err)
	}
	return s.Verifier
}

func isZeros(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

var cachedFormat = Format{BlockSize: 512, MaxTransfer: 64 << 10, MaxBlocks: 1 << 16, Cached: true}

// oneExtent is a data file of 64 KiB that lie together in one extent.
func oneExtent(s *memSpace, state layout.ExtentState) *layout.DataFile {
	df := s.file(512, func() layout.ExtentState { return state })
	df.Extents = []layout.Extent{{Len: 64 << 10, Addr: 1 << 20, State: state}}
	return df
}

func errnoIs(err error, want syscall.Errno) bool {
	var e interface{ Errno() syscall.Errno }
	return errors.As(err, &e) && e.Errno() == want
}

func TestTargetHoles(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 1)
	target := newTestTarget(t, s)
	df := &layout.DataFile{Handles: [][]byte{{1}}, Extents: []layout.Extent{
		{Off: 512, Len: 512, Addr: 1 << 20, State: layout.ExtentInvalid},
		{Off: 1024, Len: 512, State: layout.ExtentNone},
		{Off: 2048, Len: 512, Addr: 2 << 20, State: layout.ExtentRead},
		{Off: 2560, Len: 512, Addr: 3 << 20, State: layout.ExtentInvalid},
	}}
	s.set(func() { copy(s.now[2<<20:], "valid") })
	if got := mustRead(t, target, df, 0, 2048); !isZeros(got) {
		t.Error("holes and what is not valid do not read as zeros")
	}
	if got := mustRead(t, target, df, 2040, 20); !isZeros(got[:8]) || string(got[8:13]) != "valid" {
		t.Errorf("READ of an extent that is for reading: %q", got)
	}
	if got := mustRead(t, target, df, math.MaxInt64-100, 100); !isZeros(got) {
		t.Error("READ far behind the extents: not zeros")
	}
	if n := s.count(wire.OpRead); n != 1 {
		t.Errorf("%d commands were sent to read one block", n)
	}
	writes := s.count(wire.OpWrite)
	for _, r := range []layout.Range{{Off: 0, Len: 1}, {Off: 500, Len: 100}, {Off: 1000, Len: 100}, {Off: 2047, Len: 2}, {Off: 2500, Len: 100}, {Off: 3000, Len: 1000}} {
		w := start(target, layout.Op{Kind: layout.OpWrite, File: df, Off: r.Off, Data: make([]byte, r.Len)})
		if err := w.wait(t); !errnoIs(err, syscall.ESTALE) {
			t.Errorf("WRITE to %v, which the layout is not for: %v, want ESTALE", r, err)
		}
		err := target.Allocate(context.Background(), df, layout.Column{}, r.Off, r.Len, false)
		if !errnoIs(err, syscall.ESTALE) {
			t.Errorf("ALLOCATE of %v, which the layout is not for: %v, want ESTALE", r, err)
		}
	}
	if n := s.count(wire.OpWrite); n != writes {
		t.Errorf("writes that were refused have sent %d commands", n-writes)
	}
	odd := &layout.DataFile{Handles: [][]byte{{2}}, Extents: []layout.Extent{{Len: 512, Addr: 100}}}
	if err := start(target, layout.Op{Kind: layout.OpRead, File: odd, Data: make([]byte, 10)}).wait(t); err == nil {
		t.Error("an extent that begins within a block was read")
	}
}

// What was written to INVALID extents is there for readers to whom it is a hole, since they asked before the service knew of it.
func TestTargetOwnHoles(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 1)
	target := newTestTarget(t, s)
	rw := &layout.DataFile{Handles: [][]byte{{1}}, Generation: 1, Extents: []layout.Extent{
		{Off: 0, Len: 2048, Addr: 1 << 20, State: layout.ExtentInvalid}, {Off: 2048, Len: 2048, Addr: 2 << 20, State: layout.ExtentInvalid}}}
	data := bytes.Repeat([]byte("written "), 192)
	mustWrite(t, target, rw, 1024, data, layout.Unstable)
	want := append(make([]byte, 1024), data...)
	want = append(want, make([]byte, 4096-len(want))...)
	for name, df := range map[string]*layout.DataFile{
		"nothing":       {Handles: rw.Handles, Generation: 1},
		"a hole":        {Handles: rw.Handles, Generation: 1, Extents: []layout.Extent{{Off: 0, Len: 4096, State: layout.ExtentNone}}},
		"some of it":    {Handles: rw.Handles, Generation: 1, Extents: rw.Extents[:1]},
		"a hole, later": {Handles: rw.Handles, Generation: 1, Extents: []layout.Extent{{Off: 2048, Len: 512, State: layout.ExtentNone}}},
	} {
		if got := mustRead(t, target, df, 0, 4096); !bytes.Equal(got, want) {
			t.Errorf("%s: what was written is not what is read", name)
		}
		if got := mustRead(t, target, df, 1000, 100); !bytes.Equal(got, want[1000:1100]) {
			t.Errorf("%s: part of what was written is not what is read", name)
		}
		for _, c := range []struct {
			off, want int64
			hole      bool
		}{{512, 1024, false}, {512, 512, true}, {1024, 2560, true}, {2048, 2048, false}} {
			at, found, err := target.Seek(t.Context(), df, layout.Column{}, c.off, 4096-c.off, c.hole)
			if err != nil || !found || at != c.want {
				t.Errorf("%s: seek from %d of a hole %v: %d, %v, %v; want %d", name, c.off, c.hole, at, found, err, c.want)
			}
		}
	}
	reads := s.count(wire.OpRead)
	if got := mustRead(t, target, &layout.DataFile{Handles: rw.Handles, Generation: 2}, 0, 4096); !isZeros(got) || s.count(wire.OpRead) != reads {
		t.Error("a hole of a newer generation is not zeros")
	}
}

// What is lost is sent again to where it was written, though the segment that was used last has only other extents.
func TestResendByOwnExtents(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 1)
	plane, err := dataplane.New(dataplane.Config{
		Dial: func(layout.DeviceID) (dataplane.Target, error) { return NewTarget(s) }, RetainBytes: 1 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer plane.Close()
	f := plane.NewFile()
	ctx, cancel := context.WithTimeout(t.Context(), testPatience)
	defer cancel()
	for i := range int64(3) {
		df := layout.DataFile{Handles: [][]byte{{1}}, Generation: 1, Extents: []layout.Extent{
			{Off: i * 4096, Len: 4096, Addr: 1<<20 + i*8192, State: layout.ExtentState(2 * (i % 2))}}}
		seg := &layout.Segment{Range: layout.Range{Off: i * 4096, Len: 4096}, IOMode: layout.IOModeRW, OnNamespaces: true,
			Mirrors: []layout.Mirror{{Servers: []layout.DataFile{df}}}}
		done := make(chan error, 1)
		f.StartWrite(&dataplane.Write{Segment: seg, Data: bytes.Repeat([]byte{byte(i + 1)}, 4096), Off: i * 4096, Done: func(err error) { done <- err }})
		plane.Flush()
		if err := await(ctx, done); err != nil {
			t.Fatal(err)
		}
	}
	s.fail(1)
	f.Renew(&layout.Segment{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{{Handles: [][]byte{{1}}}}}}})
	if err := f.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range int64(3) {
		at := 1<<20 + i*8192
		if got := s.stable[at : at+4096]; !bytes.Equal(got, bytes.Repeat([]byte{byte(i + 1)}, 4096)) {
			t.Errorf("write %d is not where it belongs", i)
		}
	}
	if all := f.Written(); len(all) != 1 || !slices.Equal(all[0].Ranges, []layout.Range{{Off: 4096, Len: 4096}}) {
		t.Errorf("written is %v", all)
	}
}

func TestTargetInvalid(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 2)
	target := newTestTarget(t, s)
	df := oneExtent(s, layout.ExtentInvalid)
	ctx := context.Background()

	w := mustWrite(t, target, df, 1000, []byte("data"), layout.Unstable)
	if w.Committed != layout.Unstable {
		t.Errorf("a write to a cache is %v", w.Committed)
	}
	if n := s.count(wire.OpRead); n != 0 {
		t.Error("a block that nobody has written was read")
	}
	want := make([]byte, 3000)
	copy(want[1000:], "data")
	if got := mustRead(t, target, df, 0, 3000); !bytes.Equal(got, want) {
		t.Error("READ differs")
	}
	if got := target.Written(df); len(got) != 0 {
		t.Errorf("%v is told before it is stable", got)
	}
	if v := mustCommit(t, target, df); v != w.Verifier {
		t.Error("the verifier has changed")
	}
	if got := target.Written(df); !slices.Equal(got, []layout.Range{{Off: 512, Len: 512}}) {
		t.Errorf("written is %v", got)
	}
	if w := mustWrite(t, target, df, 1024, []byte("more"), layout.DataSync); w.Committed < layout.DataSync {
		t.Errorf("a write that was to be stable is %v", w.Committed)
	}
	if got := target.Written(df); !slices.Equal(got, []layout.Range{{Off: 512, Len: 1024}}) {
		t.Errorf("written is %v", got)
	}
	if at, found, err := target.Seek(ctx, df, layout.Column{}, 0, 4096, false); at != 512 || !found || err != nil {
		t.Errorf("data begins at %d, %v, %v", at, found, err)
	}
	if at, found, err := target.Seek(ctx, df, layout.Column{}, 600, 4096, true); at != 1536 || !found || err != nil {
		t.Errorf("a hole begins at %d, %v, %v", at, found, err)
	}

	target.Validated(df, target.Written(df))
	if got := target.Written(df); len(got) != 0 {
		t.Errorf("%v is told although it is valid", got)
	}
	copy(want[1024:], "more")
	if got := mustRead(t, target, df, 0, 3000); !bytes.Equal(got, want) {
		t.Error("READ with an older segment differs")
	}
	mustWrite(t, target, df, 1000, want[1000:1030], layout.DataSync)
	if got := target.Written(df); len(got) != 0 {
		t.Errorf("%v is told although it is valid", got)
	}
	newer := *df
	newer.Extents = []layout.Extent{
		{Len: 512, Addr: 1 << 20, State: layout.ExtentInvalid},
		{Off: 512, Len: 1024, Addr: 1<<20 + 512},
		{Off: 1536, Len: 62<<10 + 512, Addr: 1<<20 + 1536, State: layout.ExtentInvalid},
	}
	target.Forget(df)
	if len(target.files) != 0 {
		t.Error("something is known of a data file all of which is valid")
	}
	if got := mustRead(t, target, &newer, 0, 3000); !bytes.Equal(got, want) {
		t.Error("READ with a newer segment differs")
	}

	// What a newer segment calls valid need not be told, whoever has said so to the service.
	mustWrite(t, target, df, 4096, make([]byte, 1024), layout.FileSync)
	newer.Extents = []layout.Extent{{Off: 4096, Len: 512, Addr: 1<<20 + 4096}}
	if got := target.Written(&newer); !slices.Equal(got, []layout.Range{{Off: 4608, Len: 512}}) {
		t.Errorf("written is %v", got)
	}

	// Another generation ends it all.
	mustWrite(t, target, df, 8192, []byte("old"), layout.FileSync)
	next := *df
	next.Generation++
	if got := mustRead(t, target, &next, 8192, 512); !isZeros(got) {
		t.Error("READ finds what was written to an earlier generation")
	}
	if got := target.Written(&next); len(got) != 0 {
		t.Errorf("%v is told of an earlier generation", got)
	}
	if len(target.files) != 0 {
		t.Error("something is known of an earlier generation")
	}
	mustWrite(t, target, &next, 0, []byte("new"), layout.FileSync)
	for _, kind := range []layout.OpKind{layout.OpRead, layout.OpWrite} {
		if err := start(target, layout.Op{Kind: kind, File: df, Data: make([]byte, 10)}).wait(t); !errnoIs(err, syscall.ESTALE) {
			t.Errorf("%v with extents of an earlier generation: %v, want ESTALE", kind, err)
		}
	}
	target.Cut(&next, 1)
	if got := mustRead(t, target, &next, 0, 3); string(got) != "new" {
		t.Errorf("the block that the file is cut in is %q", got)
	}
	target.Cut(&next, 0)
	if got := mustRead(t, target, &next, 0, 3); !isZeros(got) || len(target.files) != 0 {
		t.Errorf("what was cut off is %q; %d data files are known", got, len(target.files))
	}
}

// Of what was lost nothing is read, neither what was written nor what the device held before.
func TestTargetLoss(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 3)
	target := newTestTarget(t, s)
	df := oneExtent(s, layout.ExtentInvalid)
	stable := mustWrite(t, target, df, 0, bytes.Repeat([]byte{1}, 512), layout.Unstable)
	mustCommit(t, target, df)
	mustWrite(t, target, df, 10, []byte("unstable"), layout.Unstable)
	mustWrite(t, target, df, 512, bytes.Repeat([]byte{2}, 600), layout.Unstable)
	epoch := target.Epoch()
	s.fail(1)
	if target.Epoch() == epoch {
		t.Error("the epoch has not changed")
	}
	if v := mustCommit(t, target, df); v == stable.Verifier {
		t.Error("the verifier has not changed")
	}
	if got := mustRead(t, target, df, 0, 2048); !bytes.Equal(got[:512], bytes.Repeat([]byte{1}, 512)) || !isZeros(got[512:]) {
		t.Error("what was lost is not zeros")
	}
	if got := target.Written(df); !slices.Equal(got, []layout.Range{{Len: 512}}) {
		t.Errorf("written is %v", got)
	}
	mustWrite(t, target, df, 600, []byte("again"), layout.Unstable)
	if got := mustRead(t, target, df, 512, 512); string(got[88:93]) != "again" || !isZeros(got[:88]) || !isZeros(got[93:]) {
		t.Error("a write to a block that was lost has not made the rest of it zeros")
	}

	// The power fails before the Flush is carried out.
	w := mustWrite(t, target, df, 2048, bytes.Repeat([]byte{3}, 512), layout.Unstable)
	s.set(func() { s.paused = true })
	c := start(target, layout.Op{Kind: layout.OpCommit, File: df})
	s.fail(1)
	s.set(func() { s.paused = false })
	if err := c.wait(t); err != nil || c.Verifier == w.Verifier {
		t.Errorf("COMMIT after a loss: %v, the verifier is that of the write: %v", err, c.Verifier == w.Verifier)
	}
	if got := target.Written(df); !slices.Equal(got, []layout.Range{{Len: 512}}) {
		t.Errorf("written is %v", got)
	}

	// The power fails before the command is carried out.
	mustWrite(t, target, df, 4096, []byte("data"), layout.Unstable)
	s.set(func() { s.paused = true })
	for _, n := range []int{512, 100} {
		r := start(target, layout.Op{Kind: layout.OpRead, File: df, Off: 4096, Data: make([]byte, n)})
		s.fail(1)
		s.set(func() { s.paused = false })
		if err := r.wait(t); err != nil || !isZeros(r.Data) {
			t.Errorf("READ brings what the device held: %v", err)
		}
		mustWrite(t, target, df, 4096, []byte("data"), layout.Unstable)
		s.set(func() { s.paused = true })
	}
	s.set(func() { s.paused = false })

	// The power fails after the command was carried out and before it is answered.
	failing := func(op wire.Opcode) {
		var once atomic.Bool
		s.set(func() {
			s.after = func(r *Request) {
				if r.Op == op && !once.Swap(true) {
					s.fail(1)
				}
			}
		})
	}
	failing(wire.OpWrite)
	w = mustWrite(t, target, df, 8192, bytes.Repeat([]byte{3}, 512), layout.Unstable)
	if v := mustCommit(t, target, df); v == w.Verifier {
		t.Error("the verifier of a write that was lost is that of the COMMIT")
	}
	if got := mustRead(t, target, df, 8192, 512); !isZeros(got) {
		t.Error("READ brings what the device held where a write was lost")
	}
	mustWrite(t, target, df, 12288, bytes.Repeat([]byte{4}, 512), layout.Unstable)
	failing(wire.OpRead)
	mustWrite(t, target, df, 12300, []byte("x"), layout.Unstable)
	if got := mustRead(t, target, df, 12288, 512); string(got[12:13]) != "x" || !isZeros(got[:12]) || !isZeros(got[13:]) {
		t.Error("a block was changed whose content was lost while it was being read")
	}
}

// Neighbours in one block survive each other, and wait for each other.
func TestTargetNeighbours(t *testing.T) {
	for _, state := range []layout.ExtentState{layout.ExtentReadWrite, layout.ExtentInvalid} {
		t.Run(state.String(), func(t *testing.T) {
			s := newMemSpace(t, cachedFormat, 4<<20, 4)
			target := newTestTarget(t, s)
			df := oneExtent(s, state)
			s.set(func() { clear(s.now[1<<20:][:64<<10]); s.paused, s.shuffle = true, true })
			var all []*started
			want := make([]byte, 2048)
			for i := range 64 {
				data := bytes.Repeat([]byte{byte(1 + i)}, 32)
				copy(want[i*32:], data)
				all = append(all, start(target, layout.Op{Kind: layout.OpWrite, File: df, Off: int64(i * 32), Data: data}))
				if i%3 == 0 {
					target.Detach(&all[i].Op)
					clear(data)
				}
			}
			s.set(func() {
				if n := len(s.queue); n != 4 {
					t.Errorf("%d commands are under way for four blocks", n)
				}
				s.paused = false
			})
			for _, w := range all {
				if err := w.wait(t); err != nil {
					t.Fatal(err)
				}
			}
			if got := mustRead(t, target, df, 0, 2048); !bytes.Equal(got, want) {
				t.Error("a neighbour was lost")
			}
			var wg sync.WaitGroup
			for i := range 16 {
				wg.Go(func() {
					for k := range 100 {
						data := bytes.Repeat([]byte{byte(k)}, 32)
						mustWrite(t, target, df, int64(i*32), data, layout.Unstable)
						copy(want[i*32:], data)
					}
				})
			}
			wg.Wait()
			if got := mustRead(t, target, df, 0, 2048); !bytes.Equal(got, want) {
				t.Error("a neighbour was lost")
			}
			if len(target.locks) != 0 {
				t.Errorf("%d blocks are still locked", len(target.locks))
			}
		})
	}
}

// A write is let go of in each of its stages.
func TestTargetDetachWrite(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 5)
	target := newTestTarget(t, s)
	df := oneExtent(s, layout.ExtentReadWrite)
	s.set(func() { clear(s.now[1<<20:][:64<<10]); s.paused = true })
	data := [][]byte{bytes.Repeat([]byte{1}, 1300), bytes.Repeat([]byte{2}, 100)}
	first := start(target, layout.Op{Kind: layout.OpWrite, File: df, Off: 100, Data: data[0]}) // both of its ends are being read
	second := start(target, layout.Op{Kind: layout.OpWrite, File: df, Off: 0, Data: data[1]})  // waits for a block
	for i, w := range []*started{first, second} {
		target.Detach(&w.Op)
		target.Detach(&w.Op)
		clear(data[i])
	}
	s.set(func() { s.paused = false })
	for _, w := range []*started{first, second} {
		if err := w.wait(t); err != nil || w.N != len(w.Data) {
			t.Fatalf("%d bytes, %v", w.N, err)
		}
	}
	want := append(bytes.Repeat([]byte{2}, 100), bytes.Repeat([]byte{1}, 1300)...)
	if got := mustRead(t, target, df, 0, 1400); !bytes.Equal(got, want) {
		t.Error("the namespace has what was in the buffer after Detach")
	}

	// While the changed block is being written.
	third := bytes.Repeat([]byte{3}, 10)
	var w *started
	reached := make(chan struct{})
	s.set(func() {
		s.after = func(r *Request) {
			if r.Op == wire.OpRead {
				s.set(func() { s.paused = true })
				close(reached)
			}
		}
	})
	w = start(target, layout.Op{Kind: layout.OpWrite, File: df, Off: 600, Data: third})
	<-reached
	target.Detach(&w.Op)
	clear(third)
	s.set(func() { s.after, s.paused = nil, false })
	if err := w.wait(t); err != nil {
		t.Fatal(err)
	}
	if got := mustRead(t, target, df, 600, 10); !bytes.Equal(got, bytes.Repeat([]byte{3}, 10)) {
		t.Errorf("the namespace has %x", got)
	}

	// A READ of parts of blocks, and of whole ones, that is never answered.
	s.set(func() { s.paused = true })
	buf := make([]byte, 2000)
	r := start(target, layout.Op{Kind: layout.OpRead, File: df, Off: 100, Data: buf})
	target.Detach(&r.Op)
	if r.running() || !errors.Is(r.Err, context.Canceled) {
		t.Errorf("READ after Detach: running %v, %v", r.running(), r.Err)
	}
	c := start(target, layout.Op{Kind: layout.OpCommit, File: df})
	target.Detach(&c.Op)
	if c.running() || !errors.Is(c.Err, context.Canceled) {
		t.Errorf("COMMIT after Detach: running %v, %v", c.running(), c.Err)
	}
	s.set(func() { s.paused = false })
	mustCommit(t, target, df)
	if !isZeros(buf) || r.times.Load() != 1 || c.times.Load() != 1 {
		t.Error("the buffer was written to after Detach, or Done called twice")
	}
}

// Close ends everything, though nothing is answered any more.
func TestTargetClose(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 6)
	target := newTestTarget(t, s)
	df := oneExtent(s, layout.ExtentReadWrite)
	s.set(func() { s.paused = true })
	var all []*started
	data := make([]byte, 3000)
	for i := range 20 {
		for _, op := range []layout.Op{
			{Kind: layout.OpWrite, File: df, Off: int64(100 * i), Data: data},
			{Kind: layout.OpRead, File: df, Off: int64(100 * i), Data: make([]byte, 3000)},
			{Kind: layout.OpCommit, File: df},
			{Kind: layout.OpRead, File: df, Off: 1 << 30, Data: make([]byte, 10)},
		} {
			all = append(all, start(target, op))
		}
	}
	punched := make(chan error, 1)
	go func() { punched <- target.Deallocate(context.Background(), df, layout.Column{}, 0, 40000) }()
	waittest.Until(t, "zeroing begins", func() bool { return s.queued(wire.OpWriteZeroes) > 0 })
	target.Close()
	for i, op := range all {
		if op.running() {
			t.Fatalf("op %d is still running", i)
		}
		if op.Err == nil && op.Off != 1<<30 {
			t.Errorf("op %d has ended well", i)
		}
	}
	select {
	case err := <-punched:
		if err == nil {
			t.Error("DEALLOCATE has ended well")
		}
	case <-time.After(testPatience):
		t.Fatal("DEALLOCATE does not end")
	}
	for i := range data {
		data[i] = 0xff
	}
	s.set(func() { s.paused = false })
	waittest.Until(t, "what goes on behind it has ended", func() bool { return len(target.locked()) == 0 })
	for i, op := range all {
		if n := op.times.Load(); n != 1 {
			t.Errorf("op %d: Done was called %d times", i, n)
		}
	}
	s.set(func() {
		if bytes.Contains(s.now[1<<20:][:64<<10], bytes.Repeat([]byte{0xff}, 32)) {
			t.Error("data was taken after Close")
		}
	})
}

// queued is how many commands op wait.
func (s *memSpace) queued(op wire.Opcode) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.queue {
		if r.Op == op {
			n++
		}
	}
	return n
}

// locked are the addresses of the blocks that are locked.
func (t *Target) locked() (all []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for addr := range t.locks {
		all = append(all, addr)
	}
	return all
}

// COMMITs of all data files share a Flush that begins after them.
func TestTargetCommit(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 8<<20, 7)
	target := newTestTarget(t, s)
	df := oneExtent(s, layout.ExtentInvalid)
	other := &layout.DataFile{Handles: [][]byte{{9, 9}}, Extents: []layout.Extent{{Len: 8192, Addr: 4 << 20, State: layout.ExtentInvalid}}}
	s.set(func() { s.paused = true })
	first := start(target, layout.Op{Kind: layout.OpCommit, File: df})
	var late []*Request
	s.set(func() { late, s.queue, s.paused = s.queue, nil, false }) // the writes overtake it
	mustWrite(t, target, df, 0, make([]byte, 512), layout.Unstable)
	mustWrite(t, target, other, 0, make([]byte, 512), layout.Unstable)
	s.set(func() { s.queue, s.paused = append(s.queue, late...), false })
	if err := first.wait(t); err != nil {
		t.Fatal(err)
	}
	for _, df := range []*layout.DataFile{df, other} {
		if got := target.Written(df); len(got) > 0 {
			t.Errorf("%v was written after the Flush had begun", got)
		}
	}
	s.set(func() { s.paused = true })
	first = start(target, layout.Op{Kind: layout.OpCommit, File: df})
	s.set(func() { late, s.queue, s.paused = s.queue, nil, false })
	mustWrite(t, target, df, 100, make([]byte, 512), layout.Unstable) // of which one block is stable by then in what was written before
	s.set(func() { s.paused = true })
	var all []*started
	for i := range 20 {
		all = append(all, start(target, layout.Op{Kind: layout.OpCommit, File: []*layout.DataFile{df, other}[i%2]}))
	}
	if n := s.queued(wire.OpFlush); n != 0 {
		t.Errorf("%d Flushes wait beside the one under way", n)
	}
	s.set(func() {
		s.queue, s.paused = append(s.queue, late...), false
		s.after = func(*Request) { s.set(func() { s.paused = true }) } // the next one waits
	})
	if err := first.wait(t); err != nil {
		t.Fatal(err)
	}
	for _, df := range []*layout.DataFile{df, other} {
		if got := target.Written(df); len(got) == 0 || got[0].Off != 0 {
			t.Errorf("written is %v after the first COMMIT", got)
		}
	}
	s.set(func() { s.after, s.paused = nil, false })
	for _, c := range all {
		if err := c.wait(t); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.count(wire.OpFlush); n != 3 {
		t.Errorf("%d Flushes for %d COMMITs", n, 1+len(all))
	}
	for df, n := range map[*layout.DataFile]int64{df: 1024, other: 512} {
		if got := target.Written(df); !slices.Equal(got, []layout.Range{{Len: n}}) {
			t.Errorf("written is %v", got)
		}
	}

	// A Flush that fails may have lost anything, of all data files.
	w := mustWrite(t, target, other, 512, make([]byte, 512), layout.Unstable)
	s.set(func() {
		s.refuse = func(r *Request) error {
			if r.Op == wire.OpFlush {
				return wire.StatusWriteFault
			}
			return nil
		}
	})
	epoch := target.Epoch()
	if err := start(target, layout.Op{Kind: layout.OpCommit, File: df}).wait(t); !errnoIs(err, syscall.EIO) {
		t.Errorf("COMMIT whose Flush fails: %v", err)
	}
	failed := target.Epoch()
	mustWrite(t, target, other, 1024, make([]byte, 512), layout.Unstable)
	s.set(func() {
		s.refuse = func(*Request) error { return layout.Patience{Time: 1, Errno: syscall.EIO}.Over(wire.StatusInternal) }
	})
	if err := start(target, layout.Op{Kind: layout.OpCommit, File: df}).wait(t); !errnoIs(err, syscall.EIO) {
		t.Errorf("COMMIT whose Flush was given up: %v", err)
	}
	if got := target.Written(other); len(got) != 1 || got[0].Len != 512 || target.Epoch() != failed {
		t.Errorf("a Flush that nobody knows of: written is %v, epoch changed: %v", got, target.Epoch() != failed)
	}
	s.set(func() { s.refuse = nil })
	if v := mustCommit(t, target, other); v == w.Verifier || target.Epoch() == epoch {
		t.Error("neither verifier nor epoch tell that a Flush has failed")
	}
	if got := target.Written(other); !slices.Equal(got, []layout.Range{{Len: 512}, {Off: 1024, Len: 512}}) {
		t.Errorf("written is %v", got)
	}
}

func TestTargetErrors(t *testing.T) {
	s := newMemSpace(t, cachedFormat, 4<<20, 8)
	target := newTestTarget(t, s)
	df := oneExtent(s, layout.ExtentReadWrite)
	for status, want := range map[wire.Status]syscall.Errno{
		wire.StatusReserved:       syscall.EACCES,
		wire.StatusPreempted:      syscall.EACCES,
		wire.StatusWriteFault:     syscall.EIO,
		wire.StatusReadError:      syscall.EIO,
		wire.StatusCapacity:       syscall.ENOSPC,
		wire.StatusWriteProtected: syscall.EROFS,
	} {
		s.set(func() { s.refuse = func(*Request) error { return fmt.Errorf("command: %w", status) } })
		for _, op := range []layout.Op{
			{Kind: layout.OpRead, File: df, Data: make([]byte, 1000)},
			{Kind: layout.OpWrite, File: df, Data: make([]byte, 1000)},
			{Kind: layout.OpWrite, File: df, Data: make([]byte, 48<<10), Off: 4096},
			{Kind: layout.OpCommit, File: df},
		} {
			r := start(target, op)
			if err := r.wait(t); !errnoIs(err, want) || r.N != 0 {
				t.Errorf("%v that ends with %v: %d bytes, %v; want %v", op.Kind, status, r.N, err, want)
			}
		}
	}
	s.set(func() { s.refuse = nil })
	mustWrite(t, target, df, 10, []byte("works"), layout.Unstable)
}

// Punching writes zeros where something is, in whatever way the controller can.
func TestTargetPunch(t *testing.T) {
	for _, able := range []bool{true, false} {
		s := newMemSpace(t, cachedFormat, 8<<20, 9)
		if !able {
			s.refuse = func(r *Request) error {
				if r.Op == wire.OpWriteZeroes {
					return wire.StatusInvalidOpcode
				}
				return nil
			}
		}
		target := newTestTarget(t, s)
		df := oneExtent(s, layout.ExtentInvalid)
		df.Extents = append(df.Extents, layout.Extent{Off: 128 << 10, Len: 1 << 20, Addr: 2 << 20})
		ctx := context.Background()
		writes := s.count(wire.OpWrite)
		if err := target.Deallocate(ctx, df, layout.Column{}, 100, 60<<10); err != nil {
			t.Fatal(err)
		}
		if s.count(wire.OpWrite) != writes || s.count(wire.OpWriteZeroes) != 0 {
			t.Error("zeros were written where there was nothing")
		}
		s.set(func() {
			for i := range s.now[2<<20:][:1<<20] {
				s.now[2<<20+i] = 5
			}
			copy(s.stable, s.now)
		})
		mustWrite(t, target, df, 1000, bytes.Repeat([]byte{5}, 10000), layout.Unstable)
		if err := target.Deallocate(ctx, df, layout.Column{}, 2000, 1<<20); err != nil {
			t.Fatal(err)
		}
		s.fail(1)
		if got := mustRead(t, target, df, 1536, 10000); !isZeros(got[464:]) {
			t.Error("what was punched is not zeros after the power has failed")
		}
		end := int64(2000 + 1<<20)
		want := append(make([]byte, end-(128<<10)), bytes.Repeat([]byte{5}, 100)...)
		if got := mustRead(t, target, df, 128<<10, len(want)); !bytes.Equal(got, want) {
			t.Error("what was punched is not zeros, or more was punched")
		}
		if target.noZeroes.Load() == able {
			t.Error("Write Zeroes was not used as it could")
		}
	}
}

// A transfer of whole blocks costs no memory.
func TestTargetAllocates(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, format := range formats {
		s := newMemSpace(t, format, 32<<20, 10)
		s.inline = true
		target := newTestTarget(t, s)
		valid := s.file(4<<20, readWrite)
		fresh := s.file(4<<20, invalid)
		done := false
		op := &layout.Op{Data: make([]byte, 1<<20), Done: func(*layout.Op) { done = true }}
		for _, kind := range []layout.OpKind{layout.OpWrite, layout.OpRead} {
			for _, df := range []*layout.DataFile{valid, fresh} {
				op.Kind, op.File = kind, df
				once := func() {
					done = false
					target.Start(op)
					target.Flush()
					if !done || op.Err != nil {
						t.Fatal(done, op.Err)
					}
				}
				for range 3 {
					once()
				}
				if n := testing.AllocsPerRun(100, once); n > 0 {
					t.Errorf("%+v: %v: %v allocations", format, kind, n)
				}
			}
		}
	}
}
