package faultytest_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

var (
	_ dataplane.Target  = (*faultytest.Target)(nil)
	_ dataplane.Epocher = (*faultytest.Target)(nil)

	errFault = errors.New("fault on demand")
)

// With faults that leave results alone the wrapper is as good a target as any.
func TestContract(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  faultytest.Config
	}{
		{"plain", faultytest.Config{}},
		{"reorder", faultytest.Config{Seed: 1, Reorder: true}},
		{"late", faultytest.Config{Seed: 3, Rules: []faultytest.Rule{{Prob: 0.5, Late: 100 * time.Microsecond}}}},
		{"delay", faultytest.Config{Seed: 2, Rules: []faultytest.Rule{{Prob: 0.5, Delay: time.Microsecond, Jitter: 200 * time.Microsecond}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			open := func(t *testing.T) targettest.Fixture {
				s := targettest.NewServer(1)
				target := faultytest.New(s.NewTarget(32<<10, 32<<10), c.cfg)
				t.Cleanup(func() { target.Close() })
				return targettest.Fixture{
					Target:  target,
					NewFile: s.NewFile,
					BadFile: &layout.DataFile{Device: s.ID(), Handles: [][]byte{[]byte("no such file")}},
				}
			}
			targettest.Run(t, open)
			targettest.RunSparse(t, open)
		})
	}
}

type rig struct {
	s  *targettest.Server
	t  *faultytest.Target
	df *layout.DataFile
}

func newRig(t *testing.T, cfg faultytest.Config) *rig {
	s := targettest.NewServer(9)
	r := &rig{s: s, t: faultytest.New(s.NewTarget(1<<20, 1<<20), cfg), df: s.NewFile()}
	t.Cleanup(func() { r.t.Close() })
	return r
}

func (r *rig) do(op layout.Op) *layout.Op {
	done := make(chan struct{})
	op.File, op.Done = r.df, func(*layout.Op) { close(done) }
	r.t.Start(&op)
	r.t.Flush()
	<-done
	return &op
}

func (r *rig) write(off int64, data string) *layout.Op {
	return r.do(layout.Op{Kind: layout.OpWrite, Off: off, Data: []byte(data), Stable: layout.DataSync})
}

func TestErrors(t *testing.T) {
	r := newRig(t, faultytest.Config{Rules: []faultytest.Rule{{Kind: layout.OpWrite, Skip: 1, Times: 2, Err: errFault}}})
	for i, want := range []error{nil, errFault, errFault, nil} {
		if op := r.write(int64(i), "x"); op.Err != want {
			t.Errorf("write %d: %v, want %v", i, op.Err, want)
		}
		if op := r.do(layout.Op{Kind: layout.OpRead, Data: make([]byte, 1)}); op.Err != nil {
			t.Errorf("read %d: %v", i, op.Err)
		}
	}
	if got := r.s.Contents(r.df); string(got) != "x\x00\x00x" {
		t.Errorf("contents %q: writes that failed have reached the server, or others have not", got)
	}
	if n := r.t.Applied(0); n != 2 {
		t.Errorf("rule was applied %d times, want 2", n)
	}
}

func TestErrorAfterEffect(t *testing.T) {
	r := newRig(t, faultytest.Config{Rules: []faultytest.Rule{{Kind: layout.OpWrite, Err: errFault, Reach: true}}})
	if op := r.write(0, "there"); op.Err != errFault || op.N != 0 {
		t.Errorf("%d bytes, %v", op.N, op.Err)
	}
	if got := r.s.Contents(r.df); string(got) != "there" {
		t.Errorf("contents %q", got)
	}
}

func TestShort(t *testing.T) {
	r := newRig(t, faultytest.Config{Seed: 4, Rules: []faultytest.Rule{{Kind: layout.OpWrite, Times: 20, Err: errFault, Short: true}}})
	seen := map[int]bool{}
	for i := range 20 {
		off := int64(i * 10)
		op := r.write(off, "0123456789")
		if op.Err != errFault || op.N < 0 || op.N >= 10 {
			t.Fatalf("short write: %d bytes, %v", op.N, op.Err)
		}
		got := r.s.Contents(r.df)
		if tail := got[min(int(off), len(got)):]; string(tail) != "0123456789"[:op.N] {
			t.Fatalf("server has %q, reply says %d bytes", tail, op.N)
		}
		r.t.SetRules()
		r.write(off, "..........")
		r.t.SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: errFault, Short: true})
		seen[op.N] = true
	}
	if len(seen) < 3 {
		t.Errorf("only lengths %v", seen)
	}
}

func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, faultytest.Config{Rules: []faultytest.Rule{{Delay: time.Second, Jitter: time.Second}}})
		begin := time.Now()
		r.write(0, "x")
		if d := time.Since(begin); d < time.Second || d >= 2*time.Second {
			t.Errorf("took %v, want 1 s to 2 s", d)
		}
	})
}

func TestLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, faultytest.Config{Rules: []faultytest.Rule{{Late: time.Second}}})
		begin := time.Now()
		go func() {
			time.Sleep(time.Millisecond)
			if got := r.s.Contents(r.df); string(got) != "x" {
				t.Errorf("contents %q before the answer", got)
			}
		}()
		r.write(0, "x")
		if d := time.Since(begin); d != time.Second {
			t.Errorf("took %v, want 1 s", d)
		}
	})
}

func TestReorder(t *testing.T) {
	r := newRig(t, faultytest.Config{Seed: 11, Reorder: true})
	var mu sync.Mutex
	var order []int64
	var wg sync.WaitGroup
	for i := range int64(30) {
		wg.Add(1)
		r.t.Start(&layout.Op{Kind: layout.OpWrite, File: r.df, Off: i, Data: []byte{1}, Done: func(op *layout.Op) {
			mu.Lock()
			order = append(order, op.Off)
			mu.Unlock()
			wg.Done()
		}})
	}
	r.t.Flush()
	wg.Wait()
	if slices.IsSorted(order) {
		t.Error("requests came in the order of their start")
	}
}

func TestRestart(t *testing.T) {
	r := newRig(t, faultytest.Config{})
	r.t.SetRules(faultytest.Rule{Kind: layout.OpCommit, Times: 1, Restart: r.s.Restart})
	first := r.do(layout.Op{Kind: layout.OpWrite, Data: []byte("lost"), Stable: layout.Unstable})
	epoch := r.t.Epoch()
	commit := r.do(layout.Op{Kind: layout.OpCommit})
	if commit.Err != nil || commit.Verifier == first.Verifier || r.t.Epoch() == epoch {
		t.Errorf("COMMIT: verifier %x after %x, epoch %d after %d, %v", commit.Verifier, first.Verifier, r.t.Epoch(), epoch, commit.Err)
	}
	if got := r.s.Contents(r.df); len(got) != 0 {
		t.Errorf("contents %q", got)
	}
}

func TestWeaken(t *testing.T) {
	r := newRig(t, faultytest.Config{Rules: []faultytest.Rule{{Kind: layout.OpWrite, Weaken: true}}})
	if op := r.write(0, "x"); op.Err != nil || op.Committed != layout.Unstable {
		t.Errorf("%v, %v", op.Committed, op.Err)
	}
}

// The same seed makes the same faults.
func TestSeed(t *testing.T) {
	run := func(seed uint64) []byte {
		r := newRig(t, faultytest.Config{Seed: seed, Rules: []faultytest.Rule{{Kind: layout.OpWrite, Prob: 0.5, Err: errFault}}})
		for i := range int64(64) {
			r.write(i, "x")
		}
		return r.s.Contents(r.df)
	}
	a, b, c := run(1), run(1), run(2)
	if !bytes.Equal(a, b) || bytes.Equal(a, c) {
		t.Errorf("seed 1: %q and %q, seed 2: %q", a, b, c)
	}
}

// quiet is a target that is a dataplane.Validator, of which only Quiesce is called.
type quiet struct {
	dataplane.Target
	dataplane.Validator
	told int
}

func (q *quiet) Quiesce(context.Context, *layout.DataFile) error {
	q.told++
	return nil
}

// TestQuiesce: what is held back ends, of the data file that is meant alone, and the wrapped target is told.
func TestQuiesce(t *testing.T) {
	s := targettest.NewServer(3)
	inner := &quiet{Target: s.NewTarget(1<<20, 1<<20)}
	target := faultytest.New(inner, faultytest.Config{Rules: []faultytest.Rule{{Delay: time.Hour}}})
	var dfs [2]*layout.DataFile
	var ends [2]chan error
	for i := range dfs {
		dfs[i], ends[i] = s.NewFile(), make(chan error, 1)
		target.Start(&layout.Op{Kind: layout.OpWrite, File: dfs[i], Data: []byte("x"), Done: func(op *layout.Op) { ends[i] <- op.Err }})
	}
	target.Flush()
	if err := target.Quiesce(t.Context(), dfs[0]); err != nil || inner.told != 1 {
		t.Errorf("told %d times, %v", inner.told, err)
	}
	if err := <-ends[0]; err != faultytest.ErrQuiesced {
		t.Error(err)
	}
	target.Close()
	if err := <-ends[1]; err != faultytest.ErrClosed {
		t.Error(err)
	}
}
