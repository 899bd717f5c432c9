package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

func TestConfig(t *testing.T) {
	dial := func(layout.DeviceID) (dataplane.Target, error) { return nil, errFault }
	for _, c := range []dataplane.Config{{}, {Dial: dial, RetainBytes: -1}, {Dial: dial, RetainBytes: 1}} {
		if _, err := dataplane.New(c); err == nil {
			t.Errorf("New(%+v): no error", c)
		}
	}
	p, err := dataplane.New(dataplane.Config{Dial: dial})
	if err != nil {
		t.Fatal(err)
	}
	if p.RetainLimit() != 256<<20 {
		t.Errorf("default limit %d", p.RetainLimit())
	}
}

// Bytes lie where the layout says, and holes read as zeros.
func TestPlacement(t *testing.T) {
	rnd, _ := newRand(t)
	for _, c := range []struct {
		unit           int64
		count, mirrors int
		off, n         int
	}{
		{4096, 1, 1, 0, 1},
		{4096, 1, 1, 4095, 100000},
		{4096, 4, 1, 1000, 40000},
		{65536, 3, 2, 65535, 2},
		{65536, 2, 3, 100, 1 << 20},
		{1 << 20, 4, 1, 5 << 20, 3 << 20},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			e := newEnv(t, options{servers: c.count * c.mirrors})
			f, seg := e.plane.NewFile(), e.segment(c.unit, c.count, c.mirrors)
			want := make([]byte, c.off+c.n)
			copy(want[c.off:], noise(rnd, c.n))
			e.write(f, seg, int64(c.off), want[c.off:])
			for m := range c.mirrors {
				if i := differ(e.mirror(seg, m, len(want), false), want); i >= 0 {
					t.Errorf("mirror %d differs at byte %d", m, i)
				}
			}
			e.check(f, seg, 0, want)
			e.check(f, seg, int64(c.off), append(want[c.off:], make([]byte, 200000)...))
		})
	}
}

func TestBadRequests(t *testing.T) {
	e := newEnv(t, options{})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	narrow := *seg
	narrow.Range = layout.Range{Off: 100, Len: 100}
	readOnly := *seg
	readOnly.IOMode = layout.IOModeRead
	for _, c := range []struct {
		seg  *layout.Segment
		off  int64
		n    int
		want error
	}{
		{&narrow, 99, 1, layout.ErrBeyondSegment},
		{&narrow, 150, 51, layout.ErrBeyondSegment},
		{seg, -1, 5, layout.ErrBeyondSegment},
		{seg, math.MaxInt64 - 2, 5, layout.ErrBeyondSegment},
		{&readOnly, 0, 5, dataplane.ErrReadOnly},
	} {
		if err := e.startWrite(f, c.seg, c.off, make([]byte, c.n), 0).wait(t); !errors.Is(err, c.want) {
			t.Errorf("write of %d bytes at %d in %v: %v, want %v", c.n, c.off, c.seg.Range, err, c.want)
		}
		if c.want == dataplane.ErrReadOnly {
			continue
		}
		if err := e.startRead(f, c.seg, c.off, make([]byte, c.n)).wait(t); !errors.Is(err, c.want) {
			t.Errorf("read of %d bytes at %d in %v: %v, want %v", c.n, c.off, c.seg.Range, err, c.want)
		}
	}
	if err := e.startWrite(f, seg, 0, nil, 0).wait(t); err != nil {
		t.Errorf("empty write: %v", err)
	}
	if s := e.startRead(f, seg, 0, nil); s.wait(t) != nil || s.n != 0 {
		t.Errorf("empty read: %d, %v", s.n, s.err)
	}
	if _, err := f.LockRange(e.ctx(), -1, 5); err == nil {
		t.Error("LockRange at -1: no error")
	}
	if f.Dirty() {
		t.Error("requests that failed at once leave the file dirty")
	}
}

// While a write waits for the COMMIT of a weak server there is nothing to take back.
func TestDetachWeak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Weaken: true}, faultytest.Rule{Kind: layout.OpCommit, Delay: time.Second})
		w := e.startWrite(f, seg, 0, []byte("data"), layout.FileSync)
		synctest.Wait()
		w.wr.Detach()
		clear(w.wr.Data)
		if err := w.wait(t); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute) // a second Done would panic
		e.check(f, seg, 0, []byte("data"))
	})
}

// liar is a target that answers what it must not.
type liar struct {
	dataplane.Target
	answer func(op *layout.Op)
	size   int
}

func (l *liar) Start(op *layout.Op) {
	op.N, op.EOF, op.Err, op.Committed = len(op.Data), false, nil, op.Stable
	l.answer(op)
	op.Done(op)
}
func (l *liar) Flush()             {}
func (l *liar) Detach(*layout.Op)  {}
func (l *liar) Limits() (int, int) { return l.size, l.size }
func (l *liar) Close() error       { return nil }

func TestImpossibleReplies(t *testing.T) {
	seg := &layout.Segment{
		Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{{Handles: [][]byte{{1}}}}}},
	}
	for name, c := range map[string]struct {
		answer      func(op *layout.Op)
		read, write error
	}{
		"too much":          {func(op *layout.Op) { op.N = len(op.Data) + 1 }, dataplane.ErrReply, dataplane.ErrReply},
		"negative":          {func(op *layout.Op) { op.N = -1 }, dataplane.ErrReply, dataplane.ErrReply},
		"short":             {func(op *layout.Op) { op.N = 1 }, io.ErrUnexpectedEOF, dataplane.ErrReply},
		"unknown stability": {func(op *layout.Op) { op.Committed = 77 }, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			e := &env{t: t}
			e.plane = newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) { return &liar{answer: c.answer, size: 4096}, nil })
			f := e.plane.NewFile()
			if err := e.startRead(f, seg, 0, make([]byte, 5000)).wait(t); !errors.Is(err, c.read) {
				t.Errorf("read: %v, want %v", err, c.read)
			}
			if err := e.startWrite(f, seg, 0, make([]byte, 5000), 0).wait(t); !errors.Is(err, c.write) {
				t.Errorf("write: %v, want %v", err, c.write)
			}
			if c.write == nil && !f.Dirty() {
				t.Error("a stability that does not exist was taken for stable")
			}
		})
	}
}

// Overlapping writes take effect in the order of their start, whatever happens on the way.
func TestOverlapOrder(t *testing.T) {
	rnd, seed := newRand(t)
	e := newEnv(t, options{servers: 4, seed: seed, reorder: true, retain: 1 << 20, wsize: 5000})
	for _, target := range e.targets {
		target.SetRules(faultytest.Rule{Kind: layout.OpWrite, Prob: 0.3, Delay: time.Microsecond, Jitter: time.Millisecond})
	}
	f, seg := e.plane.NewFile(), e.segment(8192, 2, 2)
	want := make([]byte, 60000)
	for range 20 {
		var all []*started
		for range 50 {
			off := rnd.IntN(len(want))
			data := noise(rnd, 1+rnd.IntN(min(20000, len(want)-off)))
			copy(want[off:], data)
			stable := layout.Stability(rnd.IntN(3))
			all = append(all, e.startWrite(f, seg, int64(off), data, stable))
		}
		for _, s := range all {
			if err := s.wait(t); err != nil {
				t.Fatal(err)
			}
		}
		for m := range 2 {
			if i := differ(e.mirror(seg, m, len(want), false), want); i >= 0 {
				t.Fatalf("mirror %d: byte %d is not the last one written", m, i)
			}
		}
	}
}

// Writes that do not overlap do not wait for each other.
func TestParallelWrites(t *testing.T) {
	e := newEnv(t, options{})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	e.check(f, seg, 0, []byte{0}) // the target is made
	e.servers[0].Pause()
	var sent atomic.Int32
	e.targets[0].SetRules(faultytest.Rule{Match: func(*layout.Op) bool { sent.Add(1); return false }})
	var all []*started
	for i := range int64(100) {
		all = append(all, e.startWrite(f, seg, i*100, make([]byte, 100), 0))
	}
	over := e.startWrite(f, seg, 50, make([]byte, 100), 0)
	if n := sent.Load(); n != 100 {
		t.Errorf("%d writes were sent, want 100 and not the one that overlaps", n)
	}
	e.servers[0].Resume()
	for _, s := range append(all, over) {
		if err := s.wait(t); err != nil {
			t.Error(err)
		}
	}
}

func TestLockRange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.servers[0].Pause()
		before := e.startWrite(f, seg, 1000, make([]byte, 100), 0)
		locked := make(chan func(), 1)
		go func() {
			unlock, err := f.LockRange(t.Context(), 1050, layout.ToEOF)
			if err != nil {
				t.Error(err)
			}
			locked <- unlock
		}()
		synctest.Wait()
		after := e.startWrite(f, seg, 5000, make([]byte, 100), 0)
		beside := e.startWrite(f, seg, 0, make([]byte, 100), 0)
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if _, err := f.LockRange(ctx, 1020, 10); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("LockRange of a range in use: %v", err)
		}
		select {
		case <-locked:
			t.Fatal("LockRange does not wait for a write in flight")
		default:
		}
		e.servers[0].Resume()
		unlock := <-locked
		synctest.Wait()
		if !before.over() || !beside.over() || after.over() {
			t.Errorf("with the lock held: earlier write over %v, one beside it %v, later one %v", before.over(), beside.over(), after.over())
		}
		unlock()
		unlock()
		if err := after.wait(t); err != nil {
			t.Error(err)
		}
		if unlock, err := f.LockRange(t.Context(), 5, 0); err != nil {
			t.Error(err)
		} else {
			unlock()
		}
	})
}

// ranges records the requests of a kind that a target is given.
type ranges struct {
	mu   sync.Mutex
	list [][2]int64
	ops  []layout.Stability
}

func (r *ranges) rule(kind layout.OpKind) faultytest.Rule {
	return faultytest.Rule{Kind: kind, Match: func(op *layout.Op) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.list = append(r.list, [2]int64{op.Off, op.Off + int64(len(op.Data))})
		r.ops = append(r.ops, op.Stable)
		return false
	}}
}

func (r *ranges) sorted() [][2]int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.SortFunc(r.list, func(a, b [2]int64) int { return int(a[0] - b[0]) })
	return r.list
}

// After a restart exactly what was lost and not overwritten is sent again.
func TestResendExactly(t *testing.T) {
	t.Run("copies", func(t *testing.T) { testResendExactly(t, false) })
	t.Run("buffers", func(t *testing.T) { testResendExactly(t, true) })
}

func testResendExactly(t *testing.T, buffers bool) {
	e := newEnv(t, options{wsize: 1000})
	e.buffers = buffers
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	e.write(f, seg, 0, bytes.Repeat([]byte{1}, 3000)) // three pieces
	e.commit(f)
	e.write(f, seg, 1000, bytes.Repeat([]byte{2}, 1000))
	e.write(f, seg, 10000, bytes.Repeat([]byte{3}, 1000))
	e.write(f, seg, 20000, bytes.Repeat([]byte{4}, 1000))
	e.servers[0].Restart()
	e.write(f, seg, 10300, bytes.Repeat([]byte{5}, 100)) // of the new instance; leaves two parts of the old one
	if err := e.startWrite(f, seg, 20000, bytes.Repeat([]byte{6}, 500), layout.FileSync).wait(t); err != nil {
		t.Fatal(err)
	}
	var got ranges
	e.targets[0].SetRules(got.rule(layout.OpWrite))
	commits := e.servers[0].Count(layout.OpCommit)
	e.commit(f)
	want := [][2]int64{{1000, 2000}, {10000, 10300}, {10400, 11000}, {20500, 21000}}
	if !slices.Equal(got.sorted(), want) {
		t.Errorf("sent again: %v, want %v", got.list, want)
	}
	if n := e.servers[0].Count(layout.OpCommit) - commits; n != 2 {
		t.Errorf("%d COMMITs, want 2", n)
	}
	stable := e.mirror(seg, 0, 21000, true)
	for _, c := range []struct {
		off  int
		want byte
	}{{0, 1}, {1000, 2}, {2000, 1}, {10000, 3}, {10300, 5}, {10400, 3}, {20000, 6}, {20500, 4}} {
		if stable[c.off] != c.want {
			t.Errorf("byte %d is %d, want %d", c.off, stable[c.off], c.want)
		}
	}
	if f.Dirty() || e.plane.Retained() != 0 {
		t.Errorf("dirty %v, %d bytes retained", f.Dirty(), e.plane.Retained())
	}
	if err := f.Commit(t.Context()); err != nil || e.servers[0].Count(layout.OpCommit)-commits != 2 {
		t.Errorf("Commit of a clean file: %v, or it asked the server", err)
	}
}

// Each mirror loses and gets again its own, and one copy serves both.
func TestMirrorsShareRetained(t *testing.T) {
	e := newEnv(t, options{servers: 2})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 2)
	e.write(f, seg, 0, make([]byte, 8192))
	if n := e.plane.Retained(); n != 8192 {
		t.Errorf("%d bytes retained for 8192 written to two mirrors", n)
	}
	e.servers[1].Restart()
	var first, second ranges
	e.targets[0].SetRules(first.rule(layout.OpWrite))
	e.targets[1].SetRules(second.rule(layout.OpWrite))
	e.commit(f)
	if len(first.list) != 0 || !slices.Equal(second.sorted(), [][2]int64{{0, 8192}}) {
		t.Errorf("sent again: %v and %v", first.list, second.list)
	}
	if e.plane.Retained() != 0 {
		t.Errorf("%d bytes stay retained", e.plane.Retained())
	}
}

// A COMMIT speaks only for what was acknowledged before it was sent.
func TestCommitCoversEarlierOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.write(f, seg, 0, []byte("early"))
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Times: 1, Delay: time.Second})
		done := make(chan error, 1)
		go func() { done <- f.Commit(t.Context()) }()
		synctest.Wait() // the COMMIT is on its way
		e.write(f, seg, 5, []byte(" late"))
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if !f.Dirty() {
			t.Error("data acknowledged after the COMMIT was sent is no longer retained")
		}
		e.servers[0].Restart()
		e.commit(f)
		if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "early late" {
			t.Errorf("stable: %q", got)
		}
	})
}

// Many callers of Commit share few COMMITs.
func TestCommitShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Delay: time.Second})
		var wg sync.WaitGroup
		for i := range int64(50) {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				e.write(f, seg, i, []byte{1})
				if err := f.Commit(t.Context()); err != nil {
					t.Error(err)
				}
				if e.servers[0].Stable(&seg.Mirrors[0].Servers[0])[i] != 1 {
					t.Errorf("byte %d is not stable after Commit", i)
				}
			})
		}
		wg.Wait()
		if n := e.servers[0].Count(layout.OpCommit); n != 2 {
			t.Errorf("%d COMMITs for 50 callers, want 2", n)
		}
	})
}

// Data files are committed side by side, and lost data is sent again by several requests at a time, not by all at once.
func TestCommitWidth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 4})
		f, seg := e.plane.NewFile(), e.segment(4096, 4, 1)
		timed := func(want time.Duration) {
			t.Helper()
			begin := time.Now()
			e.commit(f)
			if d := time.Since(begin); d != want {
				t.Errorf("Commit took %v, want %v", d, want)
			}
		}
		slow := faultytest.Rule{Delay: time.Second}
		e.write(f, seg, 0, make([]byte, 16<<10))
		for _, target := range e.targets {
			target.SetRules(slow)
		}
		timed(time.Second)
		for _, target := range e.targets {
			target.SetRules()
		}
		for i := range int64(100) {
			e.write(f, seg, i*16<<10, []byte{1})
		}
		e.servers[0].Restart()
		e.targets[0].SetRules(slow)
		timed(9 * time.Second) // COMMIT, 100 WRITEs of which 16 are under way, COMMIT
	})
}

// An error of COMMIT is reported, and what it was to cover is sent again before it is believed.
func TestCommitError(t *testing.T) {
	e := newEnv(t, options{servers: 2})
	f, seg := e.plane.NewFile(), e.segment(4096, 2, 1)
	e.write(f, seg, 0, make([]byte, 8192))
	e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpCommit, Times: 1, Err: syscall.EIO, Reach: true})
	err := f.Commit(t.Context())
	var de *dataplane.Error
	if !errors.Is(err, syscall.EIO) || !errors.As(err, &de) || de.Op != layout.OpCommit || de.Device != e.servers[1].ID() {
		t.Fatalf("Commit: %v", err)
	}
	if !f.Dirty() {
		t.Fatal("data is given up after an error")
	}
	var first, second ranges
	e.targets[0].SetRules(first.rule(layout.OpWrite))
	e.targets[1].SetRules(second.rule(layout.OpWrite))
	e.commit(f)
	if len(first.list) != 0 || !slices.Equal(second.list, [][2]int64{{4096, 8192}}) {
		t.Errorf("sent again: %v and %v", first.list, second.list)
	}
	if f.Dirty() {
		t.Error("still dirty")
	}
}

// A resend that fails is reported by each Commit until it works; nothing is lost meanwhile.
func TestResendError(t *testing.T) {
	e := newEnv(t, options{})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	e.write(f, seg, 0, []byte("precious"))
	e.servers[0].Restart()
	e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.ENOSPC})
	for range 2 {
		if err := f.Commit(t.Context()); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("Commit: %v, want ENOSPC", err)
		}
	}
	e.check(f, seg, 0, []byte("precious")) // from the retained bytes
	e.targets[0].SetRules()
	e.commit(f)
	if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "precious" {
		t.Errorf("stable: %q", got)
	}
}

// A server that restarts at every COMMIT does not keep data from becoming stable.
func TestRestlessVerifier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.write(f, seg, 0, []byte("data"))
		var sent ranges
		e.targets[0].SetRules(sent.rule(layout.OpWrite), faultytest.Rule{Kind: layout.OpCommit, Restart: e.servers[0].Restart})
		begin := time.Now()
		e.commit(f)
		if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "data" {
			t.Errorf("stable: %q", got)
		}
		if !slices.Equal(sent.ops, []layout.Stability{layout.Unstable, layout.Unstable, layout.DataSync}) {
			t.Errorf("sent again as %v", sent.ops)
		}
		if d := time.Since(begin); d == 0 {
			t.Error("there was no pause between the rounds")
		}
		// If its WRITEs are never stable either, that ends with an error, and the data stays.
		e.write(f, seg, 0, []byte("more"))
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Weaken: true}, faultytest.Rule{Kind: layout.OpCommit, Restart: e.servers[0].Restart})
		if err := f.Commit(t.Context()); !errors.Is(err, dataplane.ErrVerifier) {
			t.Errorf("Commit: %v", err)
		}
		e.targets[0].SetRules()
		e.commit(f)
		if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "more" {
			t.Errorf("stable: %q", got)
		}
	})
}

// Commit returns with its context; a resend that it leaves behind does no harm when it is answered at last.
func TestCommitGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.write(f, seg, 0, []byte("aaaa"))
		giveUp := func() {
			ctx, stop := context.WithTimeout(t.Context(), time.Second)
			defer stop()
			if err := f.Commit(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Commit: %v", err)
			}
		}
		e.servers[0].Pause()
		giveUp() // in COMMIT
		e.servers[0].Resume()
		e.servers[0].Restart()
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Times: 1, Delay: time.Minute})
		giveUp() // in the resend
		over := e.startWrite(f, seg, 2, []byte("bb"), 0)
		giveUp() // waiting for the range of the earlier resend
		time.Sleep(30 * time.Second)
		if over.over() {
			t.Error("a write has overtaken the resend of older data")
		}
		if err := over.wait(t); err != nil {
			t.Error(err)
		}
		e.commit(f)
		if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "aabb" || f.Dirty() {
			t.Errorf("stable: %q, dirty %v", got, f.Dirty())
		}
	})
}

// What a COMMIT finds lost may be overwritten before it is sent again.
func TestResendWaitsForNewerWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.write(f, seg, 0, []byte("old data"))
		e.servers[0].Restart()
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Times: 1, Delay: time.Second})
		newer := e.startWrite(f, seg, 2, []byte("NEW"), 0)
		done := make(chan error, 1)
		go func() { done <- f.Commit(t.Context()) }()
		synctest.Wait()
		if newer.over() {
			t.Fatal("the write is over")
		}
		var sent ranges
		e.targets[0].SetRules(sent.rule(layout.OpWrite))
		if err := newer.wait(t); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if want := [][2]int64{{0, 2}, {5, 8}}; !slices.Equal(sent.sorted(), want) {
			t.Errorf("sent again: %v, want %v", sent.list, want)
		}
		e.commit(f)
		if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "olNEWata" {
			t.Errorf("stable: %q", got)
		}
	})
}

func TestDrop(t *testing.T) {
	e := newEnv(t, options{servers: 2})
	f, seg := e.plane.NewFile(), e.segment(4096, 2, 1)
	e.write(f, seg, 0, make([]byte, 20000))
	unlock, err := f.LockRange(t.Context(), 6000, layout.ToEOF)
	if err != nil {
		t.Fatal(err)
	}
	f.Drop(6000)
	for i := range 2 {
		e.servers[i].Restart()
	}
	unlock()
	var first, second ranges
	e.targets[0].SetRules(first.rule(layout.OpWrite))
	e.targets[1].SetRules(second.rule(layout.OpWrite))
	e.commit(f)
	if !slices.Equal(first.sorted(), [][2]int64{{0, 4096}}) || !slices.Equal(second.sorted(), [][2]int64{{4096, 6000}}) {
		t.Errorf("sent again: %v and %v", first.list, second.list)
	}
	e.write(f, seg, 0, make([]byte, 20000))
	f.Drop(0)
	if f.Dirty() || e.plane.Retained() != 0 {
		t.Errorf("after Drop(0): dirty %v, %d bytes retained", f.Dirty(), e.plane.Retained())
	}
}

// After a fence Commit goes on with the credentials of the new layout.
func TestRenew(t *testing.T) {
	e := newEnv(t, options{})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	e.write(f, seg, 0, []byte("x"))
	fenced := faultytest.Rule{Match: func(op *layout.Op) bool { return op.File.Cred.UID != 77 }, Err: syscall.EACCES}
	e.targets[0].SetRules(fenced)
	if err := f.Commit(t.Context()); !errors.Is(err, syscall.EACCES) {
		t.Fatalf("Commit: %v", err)
	}
	df := seg.Mirrors[0].Servers[0]
	df.Cred.UID = 77
	other := *e.servers[0].NewFile()
	f.Renew(&layout.Segment{Range: seg.Range, IOMode: layout.IOModeRW, StripeUnit: 4096,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{df, other}}}})
	e.commit(f)
}

// With no memory left writes are sent stable and not copied; Pressure says so in time.
func TestPoolFull(t *testing.T) {
	e := newEnv(t, options{retain: 64 << 10, wsize: 4096})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	var sent ranges
	e.targets[0].SetRules(sent.rule(layout.OpWrite))
	pressure := 0
	for i := range int64(20) {
		e.write(f, seg, i*4096, bytes.Repeat([]byte{byte(i)}, 4096))
		select {
		case <-e.plane.Pressure():
			pressure++
			if i < 8 {
				t.Errorf("pressure after %d of 16 pages", i+1)
			}
		default:
		}
	}
	if pressure != 12 {
		t.Errorf("%d signals, want one for each write with more than half of the memory used", pressure)
	}
	for i, stable := range sent.ops {
		if want := layout.Stability(min(i/16, 1)); stable != want {
			t.Errorf("write %d was sent %v, want %v", i, stable, want)
		}
	}
	if n := e.plane.Retained(); n != e.plane.RetainLimit() {
		t.Errorf("%d bytes retained, limit %d", n, e.plane.RetainLimit())
	}
	e.servers[0].Restart()
	e.commit(f)
	stable := e.mirror(seg, 0, 20*4096, true)
	for i := range 20 {
		if stable[i*4096] != byte(i) {
			t.Errorf("page %d is lost", i)
		}
	}
}

// With a dead server and many writers memory stays bounded, and each writer can leave.
func TestDeadServer(t *testing.T) {
	e := newEnv(t, options{servers: 2, retain: 1 << 20})
	f, seg := e.plane.NewFile(), e.segment(64<<10, 2, 1)
	e.check(f, seg, 0, make([]byte, 128<<10)) // the targets are made
	e.servers[0].Pause()
	const writers, size = 64, 200 << 10
	var all []*started
	for i := range writers {
		data := bytes.Repeat([]byte{byte(i + 1)}, size)
		all = append(all, e.startWrite(f, seg, int64(i*size/2), data, 0)) // each overlaps the next
		if n := e.plane.Retained(); n > e.plane.RetainLimit() || n > 1<<20 {
			t.Fatalf("%d bytes retained", n)
		}
	}
	for _, s := range all {
		s.wr.Detach()
		clear(s.wr.Data)
	}
	sent := 0
	e.servers[0].Resume()
	for i, s := range all {
		switch err := s.wait(t); {
		case err == nil:
			sent++
			if i%2 == 1 {
				t.Errorf("write %d, which had to wait for the one before it, was sent after Detach", i)
			}
		case !errors.Is(err, context.Canceled):
			t.Errorf("write %d: %v", i, err)
		}
		s.wr.Detach() // of a write that has ended
	}
	if sent != 1 {
		t.Errorf("%d writes were carried out, want the first only: the others waited for a range in the same queue", sent)
	}
	e.check(f, seg, 0, bytes.Repeat([]byte{1}, size))
	e.commit(f)
	if f.Dirty() {
		t.Error("still dirty")
	}
}

// Detach at random times: buffers are not touched afterwards, requests end once, and what was acknowledged is there.
func TestDetachRandom(t *testing.T) {
	rnd, seed := newRand(t)
	e := newEnv(t, options{servers: 2, seed: seed, reorder: true, retain: 256 << 10, rsize: 4096, wsize: 4096})
	slow := faultytest.Rule{Prob: 0.5, Delay: 1, Jitter: 300 * time.Microsecond}
	e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpRead, Prob: 0.05, Err: errFault}, slow)
	e.targets[1].SetRules(slow)
	f, seg := e.plane.NewFile(), e.segment(8192, 1, 2)
	for round := range 30 {
		type one struct {
			*started
			want []byte
		}
		var reads, writes []one
		for i := range 20 {
			off := int64(i * 10000)
			data := noise(rnd, 1+rnd.IntN(10000))
			w := one{e.startWrite(f, seg, off, data, layout.Stability(rnd.IntN(2))), bytes.Clone(data)}
			writes = append(writes, w)
			buf := make([]byte, 10000)
			reads = append(reads, one{e.startRead(f, seg, off, buf), nil})
		}
		if round%3 == 0 {
			e.servers[rnd.IntN(2)].Restart()
		}
		detached := map[*started]bool{}
		for _, i := range rnd.Perm(20) {
			if rnd.IntN(2) == 0 {
				time.Sleep(time.Duration(rnd.IntN(100)) * time.Microsecond)
			}
			if rnd.IntN(2) == 0 {
				detached[reads[i].started] = true
				reads[i].read.Detach()
				for j := range reads[i].read.Buf {
					reads[i].read.Buf[j] = 0x77
				}
			}
			if rnd.IntN(2) == 0 {
				detached[writes[i].started] = true
				writes[i].wr.Detach()
				clear(writes[i].wr.Data)
			}
		}
		for i := range 20 {
			if err := writes[i].wait(t); err == nil {
				e.check(f, seg, writes[i].wr.Off, writes[i].want)
			} else if !detached[writes[i].started] || !errors.Is(err, context.Canceled) {
				t.Fatalf("write: %v", err)
			}
			if err := reads[i].wait(t); err != nil && !(detached[reads[i].started] && errors.Is(err, context.Canceled)) {
				t.Fatalf("read: %v", err)
			}
			if detached[reads[i].started] && len(bytes.Trim(reads[i].read.Buf, "\x77")) != 0 {
				t.Fatal("a buffer was written to after Detach")
			}
		}
	}
	for _, target := range e.targets {
		target.SetRules()
	}
	e.commit(f)
	if f.Dirty() || e.plane.Retained() != 0 {
		t.Errorf("dirty %v, %d bytes retained", f.Dirty(), e.plane.Retained())
	}
}

// Detach where no server is involved: waiting for a range, for a target, for a restarted server to be settled.
func TestDetachWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.write(f, seg, 0, []byte("data"))
		e.servers[0].Restart()
		e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Delay: time.Hour})
		read := e.startRead(f, seg, 0, make([]byte, 4))
		synctest.Wait()
		if read.over() {
			t.Fatal("a read of data that may be lost ended before that was settled")
		}
		read.read.Detach()
		if err := read.wait(t); !errors.Is(err, context.Canceled) {
			t.Errorf("read: %v", err)
		}
		e.targets[0].SetRules()

		unlock, err := f.LockRange(t.Context(), 0, 10)
		if err != nil {
			t.Fatal(err)
		}
		one, two := e.startWrite(f, seg, 5, []byte("1"), 0), e.startWrite(f, seg, 5, []byte("2"), 0)
		one.wr.Detach()
		if err := one.wait(t); !errors.Is(err, context.Canceled) {
			t.Errorf("write: %v", err)
		}
		synctest.Wait()
		if two.over() {
			t.Error("the withdrawal of a write has let another past a lock")
		}
		unlock()
		if err := two.wait(t); err != nil {
			t.Error(err)
		}
		e.commit(f)
	})
}

// dialer is a Dial that waits until it is told how to end.
type dialer struct {
	calls atomic.Int32
	end   chan error
	s     *targettest.Server
}

func (d *dialer) dial(layout.DeviceID) (dataplane.Target, error) {
	d.calls.Add(1)
	if err := <-d.end; err != nil {
		return nil, err
	}
	return d.s.NewTarget(4096, 4096), nil
}

func TestDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &dialer{end: make(chan error), s: targettest.NewServer(1)}
		e := &env{t: t, servers: []*targettest.Server{d.s}}
		e.plane = newPlane(t, 0, d.dial)
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		start := func() (r, w *started) {
			r, w = e.startRead(f, seg, 0, make([]byte, 5)), e.startWrite(f, seg, 100, []byte("hello"), 0)
			synctest.Wait()
			if r.over() || w.over() {
				t.Fatal("a request ended without a target")
			}
			return r, w
		}
		r, w := start()
		d.end <- errFault
		if e1, e2 := r.wait(t), w.wait(t); !errors.Is(e1, errFault) || !errors.Is(e2, errFault) {
			t.Errorf("after Dial failed: %v, %v", e1, e2)
		}
		r, w = start()
		r2, w2 := start()
		r2.read.Detach()
		w2.wr.Detach()
		if e1, e2 := r2.wait(t), w2.wait(t); !errors.Is(e1, context.Canceled) || !errors.Is(e2, context.Canceled) {
			t.Errorf("detached: %v, %v", e1, e2)
		}
		d.end <- nil
		if e1, e2 := r.wait(t), w.wait(t); e1 != nil || e2 != nil {
			t.Errorf("after Dial worked: %v, %v", e1, e2)
		}
		e.check(f, seg, 100, []byte("hello"))
		if n := d.calls.Load(); n != 2 {
			t.Errorf("Dial was called %d times, want 2", n)
		}
	})
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
		e.write(f, seg, 0, []byte("x"))
		e.servers[0].Pause()
		r, w := e.startRead(f, seg, 0, make([]byte, 5)), e.startWrite(f, seg, 0, make([]byte, 5), 0)
		w2 := e.startWrite(f, seg, 0, make([]byte, 5), 0)
		commit := make(chan error, 1)
		go func() { commit <- f.Commit(t.Context()) }()
		synctest.Wait()
		if err := e.plane.Close(); err != nil {
			t.Error(err)
		}
		for _, s := range []*started{r, w, w2, e.startRead(f, seg, 0, make([]byte, 5)), e.startWrite(f, seg, 9, make([]byte, 5), 0)} {
			if s.wait(t) == nil {
				t.Error("a request of a closed plane worked")
			}
		}
		if <-commit == nil {
			t.Error("Commit of a closed plane worked")
		}
		// A device that was never used.
		s := targettest.NewServer(55)
		seg.Mirrors[0].Servers[0] = *s.NewFile()
		if err := e.startRead(f, seg, 0, make([]byte, 5)).wait(t); !errors.Is(err, dataplane.ErrClosed) {
			t.Errorf("read from a new device: %v", err)
		}

		d := &dialer{end: make(chan error), s: s}
		e.plane = newPlane(t, 0, d.dial)
		late := e.startRead(e.plane.NewFile(), seg, 0, make([]byte, 5))
		synctest.Wait()
		e.plane.Close()
		d.end <- nil // the target comes too late, and is closed: synctest would see its goroutine
		if err := late.wait(t); !errors.Is(err, dataplane.ErrClosed) {
			t.Errorf("read while the target was made: %v", err)
		}
	})
}

func TestMirrorChoice(t *testing.T) {
	synctest.Test(t, testMirrorChoice) // where all servers are equally fast
}

func testMirrorChoice(t *testing.T) {
	e := newEnv(t, options{servers: 4})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 4)
	want := bytes.Repeat([]byte("data"), 2000)
	e.write(f, seg, 0, want)
	reads := func(n int) (got [4]int) {
		var before [4]int
		for i, s := range e.servers {
			before[i] = s.Count(layout.OpRead)
		}
		for range n {
			e.check(f, seg, 0, want)
		}
		for i, s := range e.servers {
			got[i] = s.Count(layout.OpRead) - before[i]
		}
		return got
	}
	if got := reads(12); got != [4]int{3, 3, 3, 3} {
		t.Errorf("equal mirrors were read %v times", got)
	}
	for i, eff := range []uint32{5, 9, 9, 1} {
		seg.Mirrors[i].Servers[0].Efficiency = eff
	}
	if got := reads(6); got != [4]int{0, 3, 3, 0} {
		t.Errorf("mirrors of efficiency 5, 9, 9, 1 were read %v times", got)
	}
	// Each failure goes on to the next best, and only the last one is the caller's.
	for i := range 3 {
		e.targets[[]int{1, 2, 0}[i]].SetRules(faultytest.Rule{Kind: layout.OpRead, Err: syscall.EIO})
		e.check(f, seg, 0, want)
	}
	if got := reads(1); got != [4]int{0, 0, 0, 1} {
		t.Errorf("with one mirror left they were read %v times", got)
	}
	e.targets[3].SetRules(faultytest.Rule{Kind: layout.OpRead, Err: syscall.ESTALE})
	err := e.startRead(f, seg, 0, make([]byte, 10)).wait(t)
	if !errors.Is(err, syscall.EIO) || !errors.Is(err, syscall.ESTALE) {
		t.Errorf("read with no mirror left: %v", err)
	}
	e.targets[0].SetRules()
	e.check(f, seg, 0, want)
}

// Only the pieces that failed are read from another mirror.
func TestMirrorPieces(t *testing.T) { synctest.Test(t, testMirrorPieces) }

func testMirrorPieces(t *testing.T) {
	e := newEnv(t, options{servers: 4, rsize: 1000})
	f, seg := e.plane.NewFile(), e.segment(4096, 2, 2)
	rnd, _ := newRand(t)
	want := noise(rnd, 30000)
	e.write(f, seg, 0, want)
	for i := range 2 {
		seg.Mirrors[0].Servers[i].Efficiency = 10
	}
	e.targets[1].SetRules(faultytest.Rule{Kind: layout.OpRead, Match: func(op *layout.Op) bool { return op.Off == 4096+1000 }, Err: errFault})
	var second ranges
	e.targets[3].SetRules(second.rule(layout.OpRead))
	e.check(f, seg, 0, want)
	if !slices.Equal(second.list, [][2]int64{{5096, 6096}}) || e.servers[2].Count(layout.OpRead) != 0 {
		t.Errorf("the second mirror was asked for %v", second.list)
	}
}

// A write fails if one mirror does, after all have answered, and says which.
func TestMirrorWriteError(t *testing.T) {
	e := newEnv(t, options{servers: 3, wsize: 1000})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 3)
	e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.ENOSPC})
	e.targets[2].SetRules(faultytest.Rule{Kind: layout.OpWrite, Skip: 1, Err: syscall.EIO, Short: true})
	err := e.startWrite(f, seg, 0, make([]byte, 2000), 0).wait(t)
	if !errors.Is(err, syscall.ENOSPC) || !errors.Is(err, syscall.EIO) {
		t.Errorf("write: %v", err)
	}
	var de *dataplane.Error
	if !errors.As(err, &de) || de.Op != layout.OpWrite || de.Len != 1000 || de.Device != e.servers[0].ID() {
		t.Errorf("first failure is %+v", de)
	}
	if n := len(e.servers[1].Contents(&seg.Mirrors[1].Servers[0])); n != 2000 {
		t.Errorf("the good mirror has %d bytes", n)
	}
	for _, target := range e.targets {
		target.SetRules()
	}
	e.write(f, seg, 0, []byte("again"))
	e.commit(f)
	if f.Dirty() || e.plane.Retained() != 0 {
		t.Errorf("dirty %v, %d bytes retained", f.Dirty(), e.plane.Retained())
	}
}

// A server that keeps less than asked is committed before the write is acknowledged.
func TestWeakServer(t *testing.T) {
	e := newEnv(t, options{wsize: 1000})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	weak := faultytest.Rule{Kind: layout.OpWrite, Weaken: true}
	e.targets[0].SetRules(weak)
	if err := e.startWrite(f, seg, 0, make([]byte, 3000), layout.FileSync).wait(t); err != nil {
		t.Error(err)
	}
	if n := e.servers[0].Count(layout.OpCommit); n != 1 {
		t.Errorf("%d COMMITs for one write of three pieces", n)
	}
	if f.Dirty() {
		t.Error("a stable write leaves the file dirty")
	}
	e.targets[0].SetRules(weak, faultytest.Rule{Kind: layout.OpCommit, Times: 1, Restart: e.servers[0].Restart})
	if err := e.startWrite(f, seg, 0, make([]byte, 3000), layout.DataSync).wait(t); !errors.Is(err, dataplane.ErrNotStable) {
		t.Errorf("write lost before its COMMIT: %v", err)
	}
	e.targets[0].SetRules(weak, faultytest.Rule{Kind: layout.OpCommit, Times: 1, Err: syscall.EIO})
	if err := e.startWrite(f, seg, 0, make([]byte, 3000), layout.DataSync).wait(t); !errors.Is(err, syscall.EIO) {
		t.Errorf("write whose COMMIT failed: %v", err)
	}
	if err := e.startWrite(f, seg, 0, make([]byte, 3000), layout.DataSync).wait(t); err != nil {
		t.Error(err)
	}
}

// What was acknowledged is read back after a restart that lost it, before anybody commits.
func TestReadAfterRestart(t *testing.T) {
	e := newEnv(t, options{servers: 2, rsize: 1000})
	f, seg := e.plane.NewFile(), e.segment(4096, 2, 1)
	rnd, _ := newRand(t)
	want := noise(rnd, 20000)
	e.write(f, seg, 0, want)
	e.servers[1].Restart()
	commits := e.servers[0].Count(layout.OpCommit)
	e.check(f, seg, 0, want)
	if e.servers[0].Count(layout.OpCommit) != commits {
		t.Error("a server that did not restart was asked to commit")
	}
	e.check(f, seg, 100, want[100:200])
	if n := e.servers[0].Count(layout.OpCommit); n != 0 {
		t.Errorf("%d COMMITs for reading retained data of a server that did not restart", n)
	}
}

// A target that does not count its connections: the verifier of another write tells that data is lost.
func TestReadAfterNewVerifier(t *testing.T) {
	s := targettest.NewServer(3)
	e := &env{t: t, servers: []*targettest.Server{s}}
	e.plane = newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) {
		return struct{ dataplane.Target }{s.NewTarget(4096, 4096)}, nil
	})
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	e.write(f, seg, 0, []byte("lost"))
	s.Restart()
	e.write(f, seg, 100, []byte("new"))
	e.check(f, seg, 0, []byte("lost"))
	if got := s.Stable(&seg.Mirrors[0].Servers[0]); string(got[:4]) != "lost" {
		t.Errorf("stable: %q", got)
	}
}

// A read whose answer was on its way while the server restarted and others repaired everything.
func TestReadDuringRepair(t *testing.T) {
	for _, c := range []struct {
		name    string
		restart bool // before the read is started, and the loss noticed
	}{{"loss known at the start", true}, {"loss and repair in between", false}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t, options{})
				f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
				e.write(f, seg, 0, []byte("new"))
				lateRead := faultytest.Rule{Kind: layout.OpRead, Times: 1, Delay: 2 * time.Second, Late: 8 * time.Second}
				slowWrite := faultytest.Rule{Kind: layout.OpWrite, Times: 1, Delay: 5 * time.Second}
				e.targets[0].SetRules(lateRead, slowWrite)
				buf := make([]byte, 3)
				var read *started
				if c.restart {
					e.servers[0].Restart()
				} else {
					read = e.startRead(f, seg, 0, buf)
					e.servers[0].Restart()
				}
				done := make(chan error, 1)
				go func() { done <- f.Commit(t.Context()) }() // resends after 5 s
				synctest.Wait()
				if c.restart {
					read = e.startRead(f, seg, 0, buf)
				}
				if err := <-done; err != nil || read.over() || e.plane.Retained() != 0 {
					t.Fatalf("commit: %v; read over: %v; %d bytes retained", err, read.over(), e.plane.Retained())
				}
				if err := read.wait(t); err != nil || string(buf) != "new" {
					t.Errorf("read %q, %v", buf, err)
				}
				if n := e.servers[0].Count(layout.OpRead); n != 2 {
					t.Errorf("%d READs, want the one that was too early and another", n)
				}
			})
		})
	}
}

// Once the pools are warm a read allocates nothing and a write next to nothing.
func TestNoAllocation(t *testing.T) {
	for _, mirrors := range []int{1, 2} {
		t.Run(fmt.Sprint(mirrors), func(t *testing.T) { testNoAllocation(t, mirrors) })
	}
}

func testNoAllocation(t *testing.T, mirrors int) {
	if raceEnabled {
		t.Skip("sync.Pool drops objects at random under the race detector")
	}
	s := targettest.NewServer(1)
	e := &env{t: t, servers: []*targettest.Server{s}}
	e.plane = newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) {
		target := s.NewTarget(1<<20, 1<<20)
		t.Cleanup(func() { target.Close() })
		return target, nil
	})
	f, seg := e.plane.NewFile(), e.segment(64<<10, 1, mirrors)
	e.write(f, seg, 0, make([]byte, 1<<20))
	done := make(chan error, 1)
	buf := make([]byte, 4096)
	r := &dataplane.Read{Segment: seg, Buf: buf, Done: func(_ int, err error) { done <- err }}
	w := &dataplane.Write{Segment: seg, Data: buf, Done: func(err error) { done <- err }}
	read := func() {
		r.Off = (r.Off + 4096) % (1 << 20)
		f.StartRead(r)
		e.plane.Flush()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	write := func() {
		w.Off = (w.Off + 4096) % (1 << 20)
		f.StartWrite(w)
		e.plane.Flush()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if n := testing.AllocsPerRun(2000, read); n != 0 {
		t.Errorf("%v allocations for a read that overlaps retained data", n)
	}
	if n := testing.AllocsPerRun(2000, write); n > 1 {
		t.Errorf("%v allocations for an unstable write", n)
	}
	w.Stable = layout.FileSync
	if n := testing.AllocsPerRun(2000, write); n != 0 {
		t.Errorf("%v allocations for a stable write", n)
	}
	f.Drop(0)
	if n := testing.AllocsPerRun(2000, read); n != 0 {
		t.Errorf("%v allocations for a read", n)
	}
}

func BenchmarkRead4K(b *testing.B)  { benchmark(b, 4096, false) }
func BenchmarkRead1M(b *testing.B)  { benchmark(b, 1<<20, false) }
func BenchmarkWrite4K(b *testing.B) { benchmark(b, 4096, true) }
func BenchmarkWrite1M(b *testing.B) { benchmark(b, 1<<20, true) }

// benchmark keeps 16 requests under way, against a target that answers at once.
func benchmark(b *testing.B, size int, writes bool) {
	e := &env{t: b}
	e.plane = newPlane(b, 64<<20, func(layout.DeviceID) (dataplane.Target, error) {
		return &liar{answer: func(*layout.Op) {}, size: 1 << 20}, nil
	})
	seg := &layout.Segment{
		Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW, StripeUnit: 1 << 20, Mirrors: make([]layout.Mirror, 1),
	}
	for i := range 4 {
		seg.Mirrors[0].Servers = append(seg.Mirrors[0].Servers, layout.DataFile{Handles: [][]byte{{byte(i)}}})
	}
	f := e.plane.NewFile()
	buf := make([]byte, size)
	done := make(chan error, 16)
	b.ReportAllocs()
	b.SetBytes(int64(size))
	var reads [16]dataplane.Read
	var writing [16]dataplane.Write
	off := int64(0)
	for b.Loop() {
		for i := range 16 {
			if writes {
				writing[i] = dataplane.Write{Segment: seg, Data: buf, Off: off, Done: func(err error) { done <- err }}
				f.StartWrite(&writing[i])
			} else {
				reads[i] = dataplane.Read{Segment: seg, Buf: buf, Off: off, Done: func(_ int, err error) { done <- err }}
				f.StartRead(&reads[i])
			}
			off += int64(size)
		}
		e.plane.Flush()
		for range 16 {
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		}
		if off > 32<<20 {
			off = 0
		}
	}
}
