package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// quiesceFile is a data file of 64 KiB in the given state, at addr.
func quiesceFile(handle byte, addr int64, state layout.ExtentState) *layout.DataFile {
	return &layout.DataFile{Handles: [][]byte{{handle}}, Extents: []layout.Extent{{Addr: addr, Len: 64 << 10, State: state}}}
}

// TestQuiesce: what was not sent for a data file is not sent any more, also when another request has to end first, and what was sent
// has ended; other data files go on.
func TestQuiesce(t *testing.T) {
	s := newMemSpace(t, Format{BlockSize: 512, MaxTransfer: 1 << 20, MaxBlocks: 65536}, 1<<20, 1)
	tg, err := NewTarget(s)
	if err != nil {
		t.Fatal(err)
	}
	defer tg.Close()
	gone, kept := quiesceFile(1, 0, layout.ExtentReadWrite), quiesceFile(2, 64<<10, layout.ExtentReadWrite)
	type ended struct {
		name string
		err  error
	}
	ends := make(chan ended, 100)
	start := func(name string, kind layout.OpKind, df *layout.DataFile, off int64, n int) {
		tg.Start(&layout.Op{Kind: kind, File: df, Off: off, Data: bytes.Repeat([]byte{1}, n), Done: func(op *layout.Op) { ends <- ended{name, op.Err} }})
	}
	s.set(func() { s.paused = true })
	before := bytes.Clone(s.now)
	start("whole blocks", layout.OpWrite, gone, 0, 4096)
	start("a part of a block", layout.OpWrite, gone, 8192, 100)
	start("another part of it", layout.OpWrite, gone, 8292, 100)
	start("read", layout.OpRead, gone, 0, 4096)
	start("kept", layout.OpWrite, kept, 0, 4096)
	tg.Flush()
	ctx, cancel := context.WithTimeout(t.Context(), testPatience)
	defer cancel()
	if err := tg.Quiesce(ctx, gone); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if e := <-ends; e.name == "kept" || e.err == nil {
			t.Errorf("%s ended: %v", e.name, e.err)
		}
	}
	s.set(func() { s.paused = false })
	if e := <-ends; e.name != "kept" || e.err != nil {
		t.Errorf("%s ended: %v", e.name, e.err)
	}
	if !bytes.Equal(s.now[:64<<10], before[:64<<10]) {
		t.Error("something was written")
	}

	// One that is being carried out.
	inside, release := make(chan struct{}), make(chan struct{})
	s.set(func() {
		s.after = func(r *Request) {
			if r.Op == wire.OpRead {
				close(inside)
				<-release
			}
		}
	})
	start("a part of a block", layout.OpWrite, gone, 100, 100)
	tg.Flush()
	<-inside
	short, stop := context.WithCancel(ctx)
	stop()
	if err := tg.Quiesce(short, gone); !errors.Is(err, context.Canceled) {
		t.Errorf("quiesced while a command is under way: %v", err)
	}
	writes := s.count(wire.OpWrite)
	close(release)
	if err := tg.Quiesce(ctx, gone); err != nil {
		t.Fatal(err)
	}
	if e := <-ends; e.err == nil {
		t.Errorf("%s ended well, though it was stopped before its write", e.name)
	}
	if n := s.count(wire.OpWrite); n != writes {
		t.Errorf("%d writes after Quiesce was called", n-writes)
	}
}

// TestWithdraw: a request that waits ends at once, one that may be carried out when that is over, and one that is repeated is not.
func TestWithdraw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA)
		_, n := f.use(nil)
		synctest.Wait()
		c := f.ctl(addrA)
		const gone = 10 * time.Second
		f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
		r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		n.Withdraw(&r.Request)
		synctest.Wait()
		if r.over() {
			t.Fatalf("ended while a controller has it: %v", r.Err)
		}
		c.cut(nil)
		synctest.Wait()
		waiting := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 2)).start(n)
		synctest.Wait()
		n.Withdraw(&waiting.Request)
		synctest.Wait()
		if !waiting.over() || !errors.Is(waiting.Err, ErrWithdrawn) {
			t.Errorf("one that waits for a path: %v", waiting.Err)
		}
		time.Sleep(gone - time.Second)
		if r.over() {
			t.Errorf("ended though it may be carried out: %v", r.Err)
		}
		time.Sleep(2 * time.Second)
		if !r.over() || !errors.Is(r.Err, ErrWithdrawn) {
			t.Errorf("when it is certain that it is not carried out any more: %v", r.Err)
		}
		f.set(addrA, func(p *fakePort) { p.latency = time.Millisecond })
		c.back()
		time.Sleep(time.Minute)
		if writes := f.count(addrA, wire.OpWrite); writes != 0 {
			t.Errorf("%d writes", writes)
		}
		n.Withdraw(&r.Request) // that has ended
		again := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 3)).start(n)
		if err := again.wait(t); err != nil {
			t.Error(err)
		}
	})
}

// TestLapsedWhileUnknown: a write that may be carried out does not end before it is certain that it is not, whether this host has a session or not.
func TestLapsedWhileUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeTarget(t, addrA)
		alive := true
		_, n := f.use(func(cfg *SubsystemConfig) { cfg.Alive = func() bool { return alive } })
		synctest.Wait()
		f.set(addrA, func(p *fakePort) { p.latency = time.Hour })
		r := newRequest(wire.OpWrite, 0, blocksOf(0, 1, 1)).start(n)
		f.ctl(addrA).cut(nil)
		synctest.Wait()
		alive = false
		f.ctl(addrA).back()
		time.Sleep(9 * time.Second)
		if r.over() {
			t.Errorf("ended though it may be carried out: %v", r.Err)
		}
		var fenced *FencedError
		if err := r.wait(t); !errors.As(err, &fenced) {
			t.Error(err)
		}
		if writes := f.count(addrA, wire.OpWrite); writes != 0 {
			t.Errorf("%d writes", writes)
		}
	})
}
