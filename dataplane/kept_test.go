package dataplane_test

import (
	"bytes"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/layout"
)

// keeper is a target whose unstable writes are kept as long as its number is not 0.
type keeper struct {
	*faultytest.Target
	number atomic.Uint64
	plain  atomic.Bool // the next writes are not kept, though that was to be expected
}

func (k *keeper) Keeps() bool { return k.number.Load() != 0 }

func (k *keeper) Start(op *layout.Op) {
	done := op.Done
	op.Done = func(op *layout.Op) {
		op.Done = done
		if op.Err == nil && (op.Kind == layout.OpCommit || op.Kind == layout.OpWrite && !k.plain.Load()) {
			op.Kept = k.number.Load()
		}
		done(op)
	}
	k.Target.Start(op)
}

func newKeeper(t *testing.T) (*env, *keeper) {
	e := newEnv(t, options{})
	k := &keeper{Target: e.targets[0]}
	k.number.Store(7)
	e.plane = newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) { return k, nil })
	return e, k
}

// What this host's kernel has is not copied, and stable after a COMMIT of whichever instance of the server.
func TestKept(t *testing.T) {
	e, k := newKeeper(t)
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	e.write(f, seg, 0, bytes.Repeat([]byte{1}, 10000))
	if !f.Dirty() || e.plane.Retained() != 0 {
		t.Errorf("dirty %t, %d bytes in memory", f.Dirty(), e.plane.Retained())
	}
	writes := e.servers[0].Count(layout.OpWrite)
	e.servers[0].Restart() // with another verifier; that this server loses the data does not matter here
	e.commit(f)
	if f.Dirty() || e.servers[0].Count(layout.OpWrite) != writes {
		t.Errorf("dirty %t after a COMMIT; %d writes were sent again", f.Dirty(), e.servers[0].Count(layout.OpWrite)-writes)
	}

	// Refused, as after a fence, is not lost.
	e.write(f, seg, 0, []byte("abc"))
	e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Times: 1, Err: syscall.EACCES})
	if err := f.Commit(t.Context()); !errors.Is(err, syscall.EACCES) {
		t.Errorf("refused: %v", err)
	}
	e.commit(f)

	// Where it was expected to be kept and is not, it is stable at once.
	k.plain.Store(true)
	e.write(f, seg, 0, []byte("plain"))
	if f.Dirty() || string(e.servers[0].Stable(&seg.Mirrors[0].Servers[0])) != "plain" {
		t.Errorf("stable: %q", e.servers[0].Stable(&seg.Mirrors[0].Servers[0]))
	}

	// And where it is not to be expected there is a copy.
	k.number.Store(0)
	e.write(f, seg, 0, []byte("copied"))
	if e.plane.Retained() == 0 {
		t.Error("there is no copy")
	}
	e.servers[0].Restart()
	e.commit(f)
	if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != "copied" {
		t.Errorf("stable: %q", got)
	}
}

// What somebody else may write is not sent again: it is stable at once, or with this host's kernel.
func TestShared(t *testing.T) {
	e, k := newKeeper(t)
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	write := func(what, data string) {
		t.Helper()
		done := make(chan error, 1)
		f.StartWrite(&dataplane.Write{Segment: seg, Data: []byte(data), Stable: layout.Unstable, Shared: true, Done: func(err error) { done <- err }})
		e.plane.Flush()
		if err := <-done; err != nil || e.plane.Retained() != 0 {
			t.Errorf("%s: %v, %d bytes in memory", what, err, e.plane.Retained())
		}
	}
	stable := func(what, want string) {
		t.Helper()
		if got := e.servers[0].Stable(&seg.Mirrors[0].Servers[0]); string(got) != want {
			t.Errorf("%s: stable %q, want %q", what, got, want)
		}
	}
	write("kept", "0123")
	stable("kept", "")
	if !f.Dirty() {
		t.Error("kept: nothing is to be committed")
	}
	e.commit(f)
	k.plain.Store(true)
	write("not kept after all", "abcd")
	stable("not kept after all", "abcd")
	k.number.Store(0)
	write("not kept", "ABCD")
	stable("not kept", "ABCD")
	if f.Dirty() {
		t.Error("not kept: something is to be committed")
	}
	writes := e.servers[0].Count(layout.OpWrite)
	e.servers[0].Restart()
	e.commit(f)
	if n := e.servers[0].Count(layout.OpWrite) - writes; n != 0 {
		t.Errorf("%d writes were sent again", n)
	}
}

// What the disk has not taken is an error until it is written anew.
func TestKeptLost(t *testing.T) {
	e, k := newKeeper(t)
	f, seg := e.plane.NewFile(), e.segment(4096, 1, 1)
	lost := func(when string) {
		t.Helper()
		for range 2 {
			if err := f.Commit(t.Context()); !errors.Is(err, dataplane.ErrNotKept) {
				t.Errorf("%s: %v", when, err)
			}
		}
		buf := make([]byte, 8)
		if s := e.startRead(f, seg, 0, buf); s.wait(t) != nil || string(buf) != "01234567" {
			t.Errorf("%s: read %q, %v", when, buf, s.err)
		}
	}
	e.write(f, seg, 0, []byte("01234567"))
	k.number.Store(8)
	lost("another number")
	e.write(f, seg, 2, []byte("2345"))
	lost("the rest of it")
	e.write(f, seg, 0, []byte("01234567"))
	e.commit(f)

	e.write(f, seg, 0, []byte("01234567"))
	e.targets[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Times: 1, Err: syscall.EIO})
	if err := f.Commit(t.Context()); !errors.Is(err, syscall.EIO) {
		t.Errorf("COMMIT fails: %v", err)
	}
	lost("COMMIT has failed")
	f.Drop(0)
	e.commit(f)
	if f.Dirty() {
		t.Error("dirty after Drop")
	}
}
