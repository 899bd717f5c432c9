package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

var (
	_ dataplane.Sparser = (*targettest.Target)(nil)
	_ dataplane.Sparser = (*faultytest.Target)(nil)
)

const block = targettest.BlockSize

// The model knows of each block whether something was written there that was not punched since.

func (m *model) touch(off, end int) {
	for b := off / block; b*block < end; b++ {
		m.touched[b] = true
	}
}

func (m *model) untouch(off, end int) {
	for b := (off + block - 1) / block; (b+1)*block <= end; b++ {
		delete(m.touched, b)
	}
}

func (m *model) someRange() (off, n int) {
	off = m.rnd.IntN(m.maxSize)
	return off, m.length(m.maxSize - off)
}

func ignore(error) {}

func (m *model) punch() {
	off, n := m.someRange()
	if m.rnd.IntN(20) == 0 {
		m.e.servers[m.rnd.IntN(len(m.e.servers))].Restart()
	}
	if err := m.f.Punch(m.e.ctx(), m.segmentFor(off, n), int64(off), int64(n), ignore); err != nil {
		m.e.t.Fatalf("punch of %d bytes at %d: %v", n, off, err)
	}
	if off < len(m.want) {
		clear(m.want[off:min(off+n, len(m.want))])
	}
	if m.foreign {
		m.touch(off, off+n) // by zeros
	} else {
		m.untouch(off, off+n)
	}
}

func (m *model) allocate() {
	off, n := m.someRange()
	keep := m.rnd.IntN(2) == 0
	err := m.f.Allocate(m.e.ctx(), m.segmentFor(off, n), int64(off), int64(n), keep, ignore)
	switch {
	case keep && m.foreign && errors.Is(err, dataplane.ErrUnsupported):
	case err != nil:
		m.e.t.Fatalf("allocation of %d bytes at %d: %v", n, off, err)
	case m.foreign:
		m.touch(off, off+n)
	}
}

// zero is whether the file reads as zeros in [off, end).
func (m *model) zero(off, end int) bool {
	return off >= len(m.want) || len(bytes.Trim(m.want[off:min(end, len(m.want))], "\x00")) == 0
}

func (m *model) seek() {
	off, n := m.someRange()
	t := m.e.t
	at, found, err := m.f.Seek(m.e.ctx(), m.segmentFor(off, n), int64(off), int64(n), false)
	if err != nil {
		t.Fatalf("seek: %v", err)
	}
	end := off + n
	if found {
		end = int(at)
	}
	if end < off || end > off+n || !m.zero(off, end) {
		t.Errorf("seek for data in %d bytes at %d: %d, %v, and there is some before", n, off, at, found)
	}
	if found && !m.touched[end/block] && !m.foreign {
		t.Errorf("seek for data in %d bytes at %d: %d, where there is none", n, off, at)
	}
	at, found, err = m.f.Seek(m.e.ctx(), m.segmentFor(off, n), int64(off), int64(n), true)
	if err != nil {
		t.Fatalf("seek: %v", err)
	}
	end = off + n
	if found {
		end = int(at)
	}
	if end < off || end > off+n || found && !m.zero(end, end+1) {
		t.Errorf("seek for a hole in %d bytes at %d: %d, %v, and it is none", n, off, at, found)
	}
	for b := off / block; (b+1)*block <= end && !m.foreign; b++ {
		if !m.touched[b] {
			t.Errorf("seek for a hole in %d bytes at %d: %d, %v, and block %d is one before", n, off, at, found, b)
			break
		}
	}
}

// Data and holes of stripe columns, retained or stable, at both mirrors.
func TestSeek(t *testing.T) {
	e := newEnv(t, options{servers: 6})
	f, seg := e.plane.NewFile(), e.segment(2*block, 3, 2)
	const unit = 2 * block
	// Units 0 to 2 are data, then a hole up to unit 7, of which the second block is data.
	e.write(f, seg, 0, bytes.Repeat([]byte{1}, 3*unit))
	e.write(f, seg, 7*unit+block, []byte("data"))
	check := func(when string) {
		t.Helper()
		for _, c := range []struct {
			off   int64
			hole  bool
			found bool
			want  int64
		}{
			{0, false, true, 0},
			{0, true, true, 3 * unit},
			{unit + 5, false, true, unit + 5},
			{3 * unit, false, true, 7*unit + block},
			{3 * unit, true, true, 3 * unit},
			{7*unit + block, false, true, 7*unit + block},
			{8 * unit, false, false, 0},
			{8 * unit, true, true, 8 * unit},
		} {
			at, found, err := f.Seek(e.ctx(), seg, c.off, 100*unit-c.off, c.hole)
			if err != nil || found != c.found || at != c.want {
				t.Errorf("%s: seek from %d, hole %v: %d, %v, %v; want %d, %v", when, c.off, c.hole, at, found, err, c.want, c.found)
			}
		}
		if at, found, err := f.Seek(e.ctx(), seg, 0, 3*unit, true); err != nil || found {
			t.Errorf("%s: a hole at %d in what is all data, %v", when, at, err)
		}
	}
	check("retained")
	for _, s := range e.servers {
		s.Restart() // has lost everything; what is retained counts
	}
	check("lost")
	e.commit(f)
	check("stable")
	for _, target := range e.targets[:3] {
		target.OnSparse(func(string) error { return errFault })
	}
	check("from the other mirror")
	e.targets[4].OnSparse(func(string) error { return errFault })
	if _, _, err := f.Seek(e.ctx(), seg, 0, unit*3, true); !errors.Is(err, errFault) {
		t.Errorf("without any mirror of a column: %v", err)
	}
	if _, _, err := f.Seek(e.ctx(), &layout.Segment{Range: layout.Range{Len: 10}, Mirrors: seg.Mirrors}, 5, 6, true); !errors.Is(err, layout.ErrBeyondSegment) {
		t.Errorf("beyond the segment: %v", err)
	}
}

// What was punched does not come back, whatever the servers lose.
func TestPunchRetained(t *testing.T) {
	for _, foreign := range []bool{false, true} {
		e := newEnv(t, options{servers: 4})
		if foreign {
			e.servers[1].Foreign()
		}
		f, seg := e.plane.NewFile(), e.segment(block, 2, 2)
		want := bytes.Repeat([]byte{7}, 8*block)
		e.write(f, seg, 0, want)
		if err := f.Punch(e.ctx(), seg, block+10, 4*block, ignore); err != nil {
			t.Fatal(err)
		}
		clear(want[block+10:][:4*block])
		for _, s := range e.servers {
			s.Restart()
		}
		e.check(f, seg, 0, want)
		e.commit(f)
		for m := range seg.Mirrors {
			if i := differ(e.mirror(seg, m, len(want), true), want); i >= 0 {
				t.Errorf("foreign %v: byte %d of mirror %d is not what was left", foreign, i, m)
			}
		}
		if e.plane.Retained() != 0 {
			t.Errorf("%d bytes are retained after commit", e.plane.Retained())
		}
	}
}

// While a file is moved into one data file that is in all columns of a mirror: the holes of all of them come to be there.
func TestPunchGathered(t *testing.T) {
	e := newEnv(t, options{servers: 4})
	f, seg := e.plane.NewFile(), e.segment(block, 2, 2)
	seg.Mirrors[1].Servers[1] = seg.Mirrors[1].Servers[0]
	want := bytes.Repeat([]byte{7}, 8*block)
	e.write(f, seg, 0, want)
	if err := f.Punch(e.ctx(), seg, block+10, 4*block, ignore); err != nil {
		t.Fatal(err)
	}
	clear(want[block+10:][:4*block])
	e.check(f, seg, 0, want)
	e.commit(f)
	for m := range seg.Mirrors {
		if i := differ(e.mirror(seg, m, len(want), true), want); i >= 0 {
			t.Errorf("byte %d of mirror %d is not what was left", i, m)
		}
	}
}

// A punch that nobody waits for any more keeps its range until the server has answered.
func TestPunchAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		f, seg := e.plane.NewFile(), e.segment(0, 1, 1)
		e.write(f, seg, 0, bytes.Repeat([]byte{7}, 100))
		e.commit(f)
		e.servers[0].Pause()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		ended := make(chan error, 2)
		if err := f.Punch(ctx, seg, 0, 50, func(err error) { ended <- err }); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("punch: %v", err)
		}
		w := e.startWrite(f, seg, 10, []byte("abc"), layout.Unstable)
		other := e.startWrite(f, seg, 60, []byte("xyz"), layout.Unstable)
		if len(ended) > 0 || w.over() || !f.Dirty() {
			t.Error("the punch is over before the server has answered")
		}
		e.servers[0].Resume()
		for _, s := range []*started{w, other} {
			if err := s.wait(t); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-ended; err != nil {
			t.Errorf("punch: %v", err)
		}
		want := make([]byte, 100)
		copy(want[50:], bytes.Repeat([]byte{7}, 50))
		copy(want[10:], "abc")
		copy(want[60:], "xyz")
		e.check(f, seg, 0, want)

		// One that waits for its turn is withdrawn, and never happens.
		unlock, err := f.LockRange(e.ctx(), 0, 100)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel = context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if err := f.Punch(ctx, seg, 0, 100, func(err error) { ended <- err }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("punch: %v", err)
		}
		if err := <-ended; err == nil {
			t.Error("a punch that was withdrawn has succeeded")
		}
		unlock()
		e.check(f, seg, 0, want)
		if len(ended) > 0 {
			t.Error("ended was called twice")
		}
	})
}

func TestAllocate(t *testing.T) {
	for mirrors := range 2 {
		t.Run(fmt.Sprint(mirrors+1), func(t *testing.T) { testAllocate(t, mirrors+1) })
	}
}

func testAllocate(t *testing.T, mirrors int) {
	e := newEnv(t, options{servers: 2 * mirrors})
	f, seg := e.plane.NewFile(), e.segment(2*block, 2, mirrors)
	e.write(f, seg, 0, []byte("data"))
	taken := func() (n int64) {
		for i := range e.servers {
			n += e.servers[i].Taken(&seg.Mirrors[i/2].Servers[i%2])
		}
		return n
	}
	if err := f.Allocate(e.ctx(), seg, 0, 6*block, true, ignore); err != nil {
		t.Fatal(err)
	}
	if got, want := taken(), int64(mirrors*6*block); got != want {
		t.Errorf("%d bytes are taken, want %d", got, want)
	}
	if got := e.servers[1].Contents(&seg.Mirrors[0].Servers[1]); len(got) != 0 {
		t.Errorf("a data file was made %d bytes long", len(got))
	}
	if err := f.Allocate(e.ctx(), seg, 0, 6*block, false, ignore); err != nil {
		t.Fatal(err)
	}
	if got := e.servers[1].Contents(&seg.Mirrors[0].Servers[1]); len(got) != 4*block {
		t.Errorf("a data file is %d bytes long, want %d", len(got), 4*block)
	}
	e.check(f, seg, 0, append([]byte("data"), make([]byte, 8*block)...))
	e.servers[2*mirrors-1].Room(block)
	var errno interface{ Errno() syscall.Errno }
	if err := f.Allocate(e.ctx(), seg, 0, 100*block, false, ignore); !errors.As(err, &errno) || errno.Errno() != syscall.ENOSPC {
		t.Errorf("on a full server: %v", err)
	}
	read := *seg
	read.IOMode = layout.IOModeRead
	if err := f.Allocate(e.ctx(), &read, 0, 1, false, ignore); !errors.Is(err, dataplane.ErrReadOnly) {
		t.Errorf("with a segment for reading: %v", err)
	}
	if f.Allocate(e.ctx(), seg, 5, 0, false, ignore) != nil || f.Punch(e.ctx(), seg, 5, 0, ignore) != nil {
		t.Error("nothing cannot be allocated, or punched")
	}
}

// A server that cannot reserve gets zeros, but not where there is data, be it that it has lost that.
func TestAllocateForeign(t *testing.T) {
	e := newEnv(t, options{servers: 2})
	for _, s := range e.servers {
		s.Foreign()
	}
	f, seg := e.plane.NewFile(), e.segment(2*block, 2, 1)
	want := make([]byte, 20*block)
	put := func(off int, s string) {
		copy(want[off:], s)
		e.write(f, seg, int64(off), []byte(s))
	}
	put(block+7, "first")
	put(5*block, "second")
	e.commit(f)
	put(9*block-2, "third")
	e.servers[0].Restart()
	e.servers[1].Restart()
	if err := f.Allocate(e.ctx(), seg, 0, 20*block, true, ignore); !errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("and keep the size: %v", err)
	}
	before := e.servers[0].Count(layout.OpWrite) + e.servers[1].Count(layout.OpWrite)
	if err := f.Allocate(e.ctx(), seg, 100, 20*block-100, false, ignore); err != nil {
		t.Fatal(err)
	}
	if n := e.servers[0].Count(layout.OpWrite) + e.servers[1].Count(layout.OpWrite) - before; n == 0 {
		t.Error("nothing was written")
	}
	e.check(f, seg, 0, want)
	e.commit(f)
	if got := e.servers[0].Taken(&seg.Mirrors[0].Servers[0]) + e.servers[1].Taken(&seg.Mirrors[0].Servers[1]); got != 20*block {
		t.Errorf("%d bytes are taken, want %d", got, 20*block)
	}
	if at, found, err := f.Seek(e.ctx(), seg, 3*block, 5*block, false); err != nil || !found || at != 3*block {
		t.Errorf("seek for data: %d, %v, %v", at, found, err)
	}
	if at, found, err := f.Seek(e.ctx(), seg, 0, 20*block, true); err != nil || found {
		t.Errorf("seek for a hole: %d, %v, %v", at, found, err)
	}
}

// An error of one mirror is the call's.
func TestPunchError(t *testing.T) {
	e := newEnv(t, options{servers: 2})
	f, seg := e.plane.NewFile(), e.segment(0, 1, 2)
	e.write(f, seg, 0, []byte("data"))
	e.targets[1].OnSparse(func(call string) error {
		if call == "DEALLOCATE" {
			return errFault
		}
		return nil
	})
	if err := f.Punch(e.ctx(), seg, 0, 4, ignore); !errors.Is(err, errFault) {
		t.Errorf("punch: %v", err)
	}
	e.targets[1].OnSparse(nil)
	if err := f.Punch(e.ctx(), seg, 0, 4, ignore); err != nil {
		t.Errorf("punch: %v", err)
	}
	e.check(f, seg, 0, make([]byte, 4))
}
