package dataplane_test

import (
	"bytes"
	"errors"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// silent is a target that keeps what it is given until it is let go.
type silent struct {
	dataplane.Target

	mu      sync.Mutex
	quiet   bool
	kept    []*layout.Op
	private map[*layout.Op]bool // the data has been taken away
}

func (s *silent) Start(op *layout.Op) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.quiet {
		s.kept = append(s.kept, op)
		return
	}
	s.Target.Start(op)
}

func (s *silent) Detach(op *layout.Op) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, k := range s.kept {
		if k != op {
			continue
		}
		if op.Kind == layout.OpWrite {
			s.private[op] = true
			op.Data = bytes.Clone(op.Data)
		} else {
			s.kept = append(s.kept[:i], s.kept[i+1:]...)
			op.Err = errFault
			go op.Done(op)
		}
		return
	}
	s.Target.Detach(op)
}

// overdue says of all that is kept that its time is over.
func (s *silent) overdue(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, op := range s.kept {
		op.Overdue(op, err)
	}
}

func (s *silent) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kept)
}

// release passes on what was kept, and from now on everything.
func (s *silent) release() {
	s.mu.Lock()
	s.quiet = false
	for _, op := range s.kept {
		s.Target.Start(op)
	}
	s.kept = nil
	s.mu.Unlock()
	s.Target.Flush()
}

// TestOverdue: a write whose time is over while its outcome is unknown ends for its caller, and goes on keeping later
// writes of its range waiting until the server has answered.
func TestOverdue(t *testing.T) {
	for _, stable := range []layout.Stability{layout.Unstable, layout.FileSync} {
		t.Run(stable.String(), func(t *testing.T) {
			e := newEnv(t, options{})
			s := &silent{Target: e.targets[0], quiet: true, private: map[*layout.Op]bool{}}
			patience := layout.Patience{Time: time.Hour, Errno: syscall.ETIMEDOUT}
			p := newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) { return s, nil })
			f, seg := p.NewFile(), e.segment(64<<10, 1, 1)
			first := bytes.Repeat([]byte("a"), 1000)
			st := &started{done: make(chan struct{})}
			w := &dataplane.Write{Segment: seg, Data: first, Stable: stable, Done: func(err error) { st.end(0, err) }}
			f.StartWrite(w)
			p.Flush()
			for s.count() == 0 {
				time.Sleep(time.Millisecond)
			}
			s.overdue(patience.Over(nil))
			err := st.wait(t)
			var late *layout.TimeoutError
			if !errors.As(err, &late) || late.Errno() != syscall.ETIMEDOUT {
				t.Fatalf("error %v", err)
			}
			clear(first) // the caller's again
			w.Detach()
			second := bytes.Repeat([]byte("b"), 500)
			later := startWrite(f, p, seg, 500, second)
			other := startWrite(f, p, seg, 2000, second) // elsewhere in the file
			for s.count() != 2 {
				time.Sleep(time.Millisecond)
			}
			if !f.Dirty() || later.over() || other.over() {
				t.Fatal("the range is free")
			}
			s.release()
			if err := errors.Join(later.wait(t), other.wait(t)); err != nil {
				t.Fatal(err)
			}
			if err := f.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := append(bytes.Repeat([]byte("a"), 500), second...)
			if got := e.mirror(seg, 0, 1000, true); !bytes.Equal(got, want) {
				t.Errorf("byte %d of the data file differs", differ(got, want))
			}
		})
	}
}

func startWrite(f *dataplane.File, p *dataplane.Plane, seg *layout.Segment, off int64, data []byte) *started {
	st := &started{done: make(chan struct{})}
	f.StartWrite(&dataplane.Write{Segment: seg, Data: data, Off: off, Done: func(err error) { st.end(0, err) }})
	p.Flush()
	return st
}

// TestCommitPatience: Commit gives up in time, and what was to be committed stays.
func TestCommitPatience(t *testing.T) {
	e := newEnv(t, options{})
	s := &silent{Target: e.targets[0], private: map[*layout.Op]bool{}}
	p, err := dataplane.New(dataplane.Config{
		Dial:     func(layout.DeviceID) (dataplane.Target, error) { return s, nil },
		Patience: layout.Patience{Time: 50 * time.Millisecond, Errno: syscall.EIO},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	f, seg := p.NewFile(), e.segment(64<<10, 1, 1)
	if err := startWrite(f, p, seg, 0, []byte("kept")).wait(t); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.quiet = true
	s.mu.Unlock()
	err = f.Commit(t.Context())
	var late *layout.TimeoutError
	if !errors.As(err, &late) || late.Errno() != syscall.EIO {
		t.Fatalf("error %v", err)
	}
	if !f.Dirty() {
		t.Fatal("the data is given up")
	}
	s.release()
	for err = late; errors.As(err, &late); { // the time is short
		err = f.Commit(t.Context())
	}
	if err != nil || f.Dirty() {
		t.Errorf("error %v", err)
	}
	if got := e.mirror(seg, 0, 4, true); string(got) != "kept" {
		t.Errorf("the data file has %q", got)
	}
}

// TestSparsePatience: so do Punch, Allocate and Seek. What was asked may happen later, and until then the range is held.
func TestSparsePatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{})
		p, err := dataplane.New(dataplane.Config{
			Dial:     func(layout.DeviceID) (dataplane.Target, error) { return e.targets[0], nil },
			Patience: layout.Patience{Time: 50 * time.Millisecond, Errno: syscall.ETIMEDOUT},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		f, seg := p.NewFile(), e.segment(64<<10, 1, 1)
		if err := startWrite(f, p, seg, 0, []byte("data")).wait(t); err != nil {
			t.Fatal(err)
		}
		var late *layout.TimeoutError
		answer := make(chan struct{})
		e.targets[0].OnSparse(func(string) error { <-answer; return nil })
		ended := make(chan error, 2)
		done := func(err error) { ended <- err }
		if err := f.Punch(t.Context(), seg, 0, 4096, done); !errors.As(err, &late) || late.Errno() != syscall.ETIMEDOUT {
			t.Fatalf("punch: %v", err)
		}
		if err := f.Allocate(t.Context(), seg, 0, 8192, true, func(error) {}); !errors.As(err, &late) {
			t.Errorf("allocate behind it: %v", err)
		}
		if err := f.Allocate(t.Context(), seg, 16384, 4096, true, done); !errors.As(err, &late) {
			t.Errorf("allocate: %v", err)
		}
		if len(ended) != 0 {
			t.Fatalf("a call has ended though it was not answered: %v", <-ended)
		}
		close(answer)
		for range 2 {
			if err := <-ended; err != nil {
				t.Errorf("in the end: %v", err)
			}
		}
		if got := e.mirror(seg, 0, 4, false); string(got) != "\x00\x00\x00\x00" {
			t.Errorf("the data file has %q", got)
		}
	})
}
