package fs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// turnBack does as package metaclient does with a change that the service turns back, or that is in the grace period.
func turnBack(ctx context.Context, op metarpc.Op, back bool) error {
	if y, ok := ctx.Value(metaclient.YieldKey{}).(metaclient.Yielder); ok && y.Yields(op, back) {
		return &metarpc.Error{Op: op, Status: metarpc.StatusTurnedBack}
	}
	return nil
}

// makes is a change by a thread that makes a name.
func (r *rig) makes(thread, mode uint32, name string) fuse.Status {
	h := header(layout.RootID)
	h.Pid, h.Opcode = thread, opMknod
	return r.raw.Mknod(nil, &fuse.MknodIn{InHeader: h, Mode: mode | 0644}, name, &fuse.EntryOut{})
}

// A change that the service turns back starts over, once. One that could not is made again where it is.
func TestStartOver(t *testing.T) {
	s := newService(1, 64<<10)
	r := newRig(t, s)
	r.listen()
	var turns atomic.Int32
	r.m.setHook(func(ctx context.Context, call string) error {
		if call != "MakeNode" {
			return nil
		}
		turns.Add(1)
		if err := turnBack(ctx, metarpc.OpSetAttr, true); err != nil {
			t.Error("a call that changes no name is to start over")
		}
		if err := turnBack(ctx, metarpc.OpMakeNode, false); err != nil {
			t.Error("a change in nobody's way starts over in the grace period")
		}
		return turnBack(ctx, metarpc.OpMakeNode, true)
	})
	r.want(r.makes(7, unix.S_IFREG, "a"), syscall.ESTALE, "mknod")
	r.want(r.makes(8, unix.S_IFREG, "b"), syscall.ESTALE, "mknod by another thread")
	r.want(r.makes(7, unix.S_IFREG, "a"), 0, "mknod again")
	r.want(r.makes(7, unix.S_IFREG, "c"), syscall.ESTALE, "the next mknod")
	if r.lookup(7, layout.RootID, "a") != 0 {
		t.Error("a name may be kept though its directory is in somebody's way")
	}
	r.want(r.makes(7, unix.S_IFREG, "c"), 0, "mknod again, after a look at another name")
	r.want(r.makes(8, unix.S_IFREG, "b"), 0, "mknod again, by the other thread")
	if n := r.restarts.some.Load(); n != 0 {
		t.Errorf("%d threads are remembered", n)
	}
	r.want(r.makes(7, unix.S_IFSOCK, "socket"), 0, "bind")
	r.want(r.makes(0, unix.S_IFREG, "unknown"), 0, "mknod by nobody")
	r.kernelThread = func(thread uint32) bool { return thread == 9 }
	r.want(r.makes(9, unix.S_IFREG, "kernel"), 0, "mknod by a thread of the kernel")
	if n := turns.Load(); n != 9 {
		t.Errorf("%d calls, want 9", n)
	}
}

// A file that is made elsewhere while its creation starts over is opened, since ESTALE may be answered only once.
func TestCreateStartsOver(t *testing.T) {
	s := newService(1, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	b.listen()
	create := func(name string, flags uint32) (fuse.CreateOut, fuse.Status) {
		in := &fuse.CreateIn{InHeader: header(layout.RootID), Flags: unix.O_RDWR | flags, Mode: 0644}
		in.Pid, in.Opcode = 7, opCreate
		var out fuse.CreateOut
		status := b.raw.Create(nil, in, name, &out)
		return out, status
	}
	var back atomic.Bool
	b.m.setHook(func(ctx context.Context, call string) error {
		if call == "Create" && back.Load() {
			return turnBack(ctx, metarpc.OpCreate, true)
		}
		return nil
	})
	for _, first := range []string{"turned back", "found"} {
		for _, flags := range []uint32{0, unix.O_TRUNC} {
			name := fmt.Sprint(first, flags)
			id, fh := a.create(name)
			a.write(id, 0, []byte("data"))
			a.closeFile(id, fh)
			back.Store(first == "turned back")
			_, status := create(name, flags)
			b.want(status, syscall.ESTALE, "%s", name)
			back.Store(true) // which the next one is not
			out, status := create(name, flags)
			b.want(status, 0, "%s again", name)
			if want := map[uint32]uint64{0: 4, unix.O_TRUNC: 0}[flags]; out.NodeId != uint64(id) || out.Attr.Size != want {
				t.Errorf("%s: inode %d of %d bytes, want %d of %d", name, out.NodeId, out.Attr.Size, id, want)
			}
			b.closeFile(id, out.Fh)
		}
	}
}

// A recall that cannot have names expired, since a change of this mount has the lock, says so, and the change starts
// over: at once, not when the names may not be kept any more.
func TestExpireTurnsBack(t *testing.T) {
	s := newService(1, 64<<10)
	r := newRig(t, s)
	k := r.listen()
	r.makes(testPID, unix.S_IFREG, "kept")
	if r.lookup(7, layout.RootID, "kept") == 0 {
		t.Fatal("the name may not be kept")
	}
	r.kept.asked(7)
	locked, unlocked, told := make(chan struct{}), make(chan struct{}), make(chan struct{})
	k.name = func(place) { <-unlocked }
	ctx := context.WithValue(t.Context(), metaclient.StuckKey{}, sync.OnceFunc(func() { close(told) }))
	r.m.setHook(func(ctx context.Context, call string) error {
		if call == "MakeNode" {
			close(locked)
			<-told
			return turnBack(ctx, metarpc.OpMakeNode, false) // as if it were put off elsewhere
		}
		return nil
	})
	go func() { // ends with the change
		if status := r.makes(8, unix.S_IFREG, "new"); status != fuse.Status(syscall.ESTALE) {
			t.Errorf("mknod: %v", status)
		}
		close(unlocked)
	}()
	<-locked
	began := now()
	r.expireNames(ctx, layout.RootID)
	if took := time.Duration(now() - began); took > mostKept/2 {
		t.Errorf("the recall took %v", took)
	}
}

// A change that cannot start over is not turned back for nothing: the service does not hear of it.
func TestExpireFirm(t *testing.T) {
	s := newService(1, 64<<10)
	r := newRig(t, s)
	r.kept.most = 200 * time.Millisecond
	k := r.listen()
	r.makes(testPID, unix.S_IFREG, "kept")
	r.lookup(7, layout.RootID, "kept")
	r.kept.asked(7)
	locked, over := make(chan struct{}), make(chan struct{})
	k.name = func(place) { <-over }
	ctx := context.WithValue(t.Context(), metaclient.StuckKey{}, func() { t.Error("the service is told") })
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "MakeNode" {
			close(locked)
			<-over
		}
		return nil
	})
	done := make(chan struct{})
	go func() { // ends with the change
		r.makes(8, unix.S_IFSOCK, "socket")
		close(done)
	}()
	<-locked
	r.expireNames(ctx, layout.RootID)
	close(over)
	<-done
}

func TestIsKernelThread(t *testing.T) {
	if isKernelThread(uint32(os.Getpid())) || isKernelThread(1<<31-1) {
		t.Error("a process, or none, is a thread of the kernel")
	}
	if comm, err := os.ReadFile("/proc/2/comm"); errors.Is(err, os.ErrNotExist) || string(comm) != "kthreadd\n" {
		t.Skip("process 2 is not kthreadd: this is a process namespace of its own")
	}
	if !isKernelThread(2) {
		t.Error("kthreadd is no thread of the kernel")
	}
}
