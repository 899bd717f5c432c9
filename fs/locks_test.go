package fs

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filelock"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/test/locktest"
)

// fakeLocks is how the service in memory keeps locks. It is guarded by service.mu.
type fakeLocks struct {
	tables  map[fakeFile]*filelock.Table[fakeOwner]
	waits   map[*fakeWait]bool
	changed chan struct{} // closed when somebody who waits should look again
}

type fakeFile struct {
	id    layout.FileID
	flock bool
}

type fakeOwner struct {
	m      *session
	number uint64
}

type fakeWait struct {
	file fakeFile
	want filelock.Lock[fakeOwner]
}

func (s *service) lockTable(f fakeFile) *filelock.Table[fakeOwner] {
	if s.locks.tables == nil {
		s.locks.tables, s.locks.waits = map[fakeFile]*filelock.Table[fakeOwner]{}, map[*fakeWait]bool{}
		s.locks.changed = make(chan struct{})
	}
	if s.locks.tables[f] == nil {
		s.locks.tables[f] = &filelock.Table[fakeOwner]{}
	}
	return s.locks.tables[f]
}

// waitsFor reports whether a request would wait for owner, or for somebody who does.
func (s *service) waitsFor(w *fakeWait, owner fakeOwner, depth int) bool {
	for l := range s.lockTable(w.file).Conflicts(w.want) {
		if l.Owner == owner {
			return true
		}
		for other := range s.locks.waits {
			if other.want.Owner == l.Owner && depth < 10 && s.waitsFor(other, owner, depth+1) {
				return true
			}
		}
	}
	return false
}

func (m *session) wanted(args *metarpc.LockArgs) *fakeWait {
	want := filelock.Lock[fakeOwner]{
		Owner: fakeOwner{m, args.Owner}, Type: filelock.Type(args.Type), Start: args.Start, End: args.End, PID: args.PID,
	}
	return &fakeWait{fakeFile{args.ID, args.Flock}, want}
}

func (m *session) Lock(ctx context.Context, args *metarpc.LockArgs, stable func(context.Context) error) (shared bool, err error) {
	if m.shared.Load() && stable != nil {
		if err := stable(ctx); err != nil {
			return false, err
		}
	}
	return m.shared.Load(), m.setLock(ctx, args)
}

func (m *session) setLock(ctx context.Context, args *metarpc.LockArgs) error {
	if err := m.enter(ctx, "Lock"); err != nil {
		return err
	}
	defer m.s.mu.Unlock()
	w := m.wanted(args)
	for {
		table := m.s.lockTable(w.file)
		if has := table.Owned(w.want.Owner, 0, math.MaxInt64); args.Flock && len(has) > 0 && has[0].Type != w.want.Type {
			table.Release(w.want.Owner)
		}
		_, held := table.Conflict(w.want)
		switch {
		case !held:
			table.Set(w.want)
			close(m.s.locks.changed)
			m.s.locks.changed = make(chan struct{})
			return nil
		case !args.Wait:
			return refusal(metarpc.OpLock, syscall.EAGAIN)
		case !args.Flock && m.s.waitsFor(w, w.want.Owner, 0):
			return refusal(metarpc.OpLock, syscall.EDEADLK)
		}
		changed := m.s.locks.changed
		m.s.locks.waits[w] = true
		m.s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		m.s.mu.Lock()
		delete(m.s.locks.waits, w)
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

func (m *session) TestLock(ctx context.Context, args *metarpc.LockArgs) (metarpc.LockResult, error) {
	if err := m.enter(ctx, "TestLock"); err != nil {
		return metarpc.LockResult{}, err
	}
	defer m.s.mu.Unlock()
	w := m.wanted(args)
	l, _ := m.s.lockTable(w.file).Conflict(w.want)
	r := metarpc.LockResult{Type: metarpc.LockType(l.Type), Start: l.Start, End: l.End, PID: l.PID}
	if l.Type != filelock.None && l.Owner.m != m {
		r.Host = "elsewhere"
	}
	return r, nil
}

func (m *session) DropLocks(id layout.FileID, flock bool, owner uint64, stable func(context.Context) error) <-chan struct{} {
	a := &metarpc.LockArgs{ID: id, Flock: flock, Owner: owner, End: math.MaxInt64}
	done := make(chan struct{})
	close(done)
	m.Lock(context.Background(), a, stable)
	return done
}

// lockCount is how many locks and waits there are.
func (s *service) lockCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.locks.waits)
	for _, t := range s.locks.tables {
		n += t.Len()
	}
	return n
}

// lk asks for a lock as the kernel does.
func (r *rig) lk(fh, owner uint64, typ uint32, start, end uint64, flock bool) *fuse.LkIn {
	in := &fuse.LkIn{Fh: fh, Owner: owner, Lk: fuse.FileLock{Start: start, End: end, Typ: typ, Pid: 42}}
	if flock {
		in.LkFlags = fuse.FUSE_LK_FLOCK
	}
	return in
}

func wantErrno(t *testing.T, what string, got fuse.Status, want syscall.Errno) {
	t.Helper()
	if got != fuse.Status(want) {
		t.Errorf("%s: %v, want %v", what, got, fuse.Status(want))
	}
}

// Closing a descriptor drops what the process has locked, the end of the open file the rest, and others' locks stay.
func TestLockOwners(t *testing.T) {
	s := newService(2, 1<<20)
	r := newRig(t, s)
	id, f1 := r.create("f")
	f2 := r.open(id, unix.O_RDWR)
	const proc, other, ofd = 1001, 1002, 1003
	for _, in := range []*fuse.LkIn{
		r.lk(f1, proc, unix.F_RDLCK, 0, 9, false), r.lk(f2, proc, unix.F_WRLCK, 20, 29, false),
		r.lk(f1, other, unix.F_RDLCK, 0, 9, false), r.lk(f1, ofd, unix.F_WRLCK, 40, 49, false),
		r.lk(f1, ofd, unix.F_RDLCK, 0, math.MaxInt64, true), r.lk(f2, ofd, unix.F_RDLCK, 0, math.MaxInt64, true),
	} {
		wantErrno(t, "lock", r.raw.SetLk(nil, in), 0)
	}
	if n := s.lockCount(); n != 6 {
		t.Fatalf("%d locks, want 6", n)
	}
	calls := r.m.called("Lock")
	wantErrno(t, "flush", r.raw.Flush(nil, &fuse.FlushIn{Fh: f1, LockOwner: 999}), 0)
	if r.m.called("Lock") != calls {
		t.Error("closing by who has no locks is a call")
	}
	wantErrno(t, "flush", r.raw.Flush(nil, &fuse.FlushIn{Fh: f2, LockOwner: proc}), 0)
	if n := s.lockCount(); n != 4 {
		t.Errorf("%d locks are left after a close, want 4", n)
	}
	// The process locks again, through its other descriptor only; the end of the first open file is none of its business.
	wantErrno(t, "lock", r.raw.SetLk(nil, r.lk(f2, proc, unix.F_WRLCK, 60, 69, false)), 0)
	r.release(f1)
	if n := s.lockCount(); n != 2 { // that, and f2's flock
		t.Errorf("%d locks are left after the end of the open file, want 2", n)
	}
	r.release(f2)
	if n := s.lockCount(); n != 0 {
		t.Errorf("%d locks are left", n)
	}
	wantErrno(t, "lock of a closed file", r.raw.SetLk(nil, r.lk(f1, proc, unix.F_RDLCK, 0, 9, false)), syscall.EBADF)
}

// What was written under a lock is stable when another mount can get that, and what is kept is dropped when a lock comes from there. A
// mount that is alone need not wait for a disk.
func TestLockStable(t *testing.T) {
	for name, unlock := range map[string]func(r *rig, fh uint64){
		"unlock": func(r *rig, fh uint64) {
			wantErrno(t, "unlock", r.raw.SetLk(nil, r.lk(fh, 1, unix.F_UNLCK, 0, 9, false)), 0)
		},
		"close": func(r *rig, fh uint64) {
			wantErrno(t, "close", r.raw.Flush(nil, &fuse.FlushIn{Fh: fh, LockOwner: 1}), 0)
		},
		"release": func(r *rig, fh uint64) { r.release(fh) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(2, 1<<20)
			r := newRig(t, s)
			k := r.listen()
			var dropped atomic.Int32
			k.pages = func(uint64) { dropped.Add(1) }
			for _, shared := range []bool{false, true} {
				id, f := r.create(fmt.Sprint("f", shared))
				g := r.open(id, unix.O_RDONLY)
				r.m.shared.Store(shared)
				dropped.Store(0)
				wantErrno(t, "lock", r.raw.SetLk(nil, r.lk(f, 1, unix.F_WRLCK, 0, 9, false)), 0)
				if got := dropped.Load() > 0; got != shared {
					t.Errorf("shared %v: pages are dropped: %v", shared, got)
				}
				i := r.peek(id)
				i.mu.Lock()
				i.retryAt, i.backoff = 1<<62, 0 // the flusher leaves it alone
				i.mu.Unlock()
				r.write(id, 0, []byte("data"))
				unlock(r, f)
				if stable := !i.data.Dirty() && r.durable(id) == 4; stable != shared {
					t.Errorf("shared %v: what was written is stable: %v", shared, stable)
				}
				i.mu.Lock()
				i.retryAt = 0
				i.mu.Unlock()
				if name != "release" {
					r.release(f)
				}
				r.release(g)
			}
		})
	}
}

func TestLockAnswers(t *testing.T) {
	s := newService(2, 1<<20)
	r, far := newRig(t, s), newRig(t, s)
	id, f := r.create("f")
	g := far.open(id, unix.O_RDWR)
	defer r.release(f)
	defer far.release(g)
	wantErrno(t, "lock", r.raw.SetLk(nil, r.lk(f, 1, unix.F_WRLCK, 10, 19, false)), 0)
	wantErrno(t, "locked elsewhere", far.raw.SetLk(nil, far.lk(g, 1, unix.F_RDLCK, 0, 10, false)), syscall.EAGAIN)
	wantErrno(t, "type", r.raw.SetLk(nil, r.lk(f, 1, 7, 0, 1, false)), syscall.EINVAL)
	wantErrno(t, "range", r.raw.SetLk(nil, r.lk(f, 1, unix.F_RDLCK, 2, 1, false)), syscall.EINVAL)
	wantErrno(t, "range", r.raw.SetLk(nil, r.lk(f, 1, unix.F_RDLCK, 2, math.MaxUint64, false)), syscall.EINVAL)
	for _, c := range []struct {
		r    *rig
		in   *fuse.LkIn
		want fuse.FileLock
	}{
		{r, r.lk(f, 2, unix.F_RDLCK, 0, math.MaxInt64, false), fuse.FileLock{Start: 10, End: 19, Typ: unix.F_WRLCK, Pid: 42}},
		{r, r.lk(f, 1, unix.F_RDLCK, 0, math.MaxInt64, false), fuse.FileLock{Typ: unix.F_UNLCK}},
		{far, far.lk(g, 1, unix.F_WRLCK, 0, math.MaxInt64, false), fuse.FileLock{Start: 10, End: 19, Typ: unix.F_WRLCK}},
	} {
		var out fuse.LkOut
		wantErrno(t, "getlk", c.r.raw.GetLk(nil, c.in, &out), 0)
		if out.Lk != c.want {
			t.Errorf("in the way of %+v: %+v, want %+v", c.in.Lk, out.Lk, c.want)
		}
	}

	// A wait ends with the lock, or with a signal.
	done := make(chan fuse.Status, 1)
	cancel := make(chan struct{})
	go func() { done <- far.raw.SetLkw(cancel, far.lk(g, 1, unix.F_RDLCK, 0, 10, false)) }()
	awaitWait := func() {
		for s.lockCount() != 2 {
			time.Sleep(time.Millisecond)
		}
	}
	awaitWait()
	close(cancel)
	wantErrno(t, "interrupted", <-done, syscall.EINTR)
	if n := s.lockCount(); n != 1 {
		t.Errorf("%d locks and waits, want 1", n)
	}
	go func() { done <- far.raw.SetLkw(nil, far.lk(g, 1, unix.F_RDLCK, 0, 10, false)) }()
	awaitWait()
	wantErrno(t, "unlock", r.raw.SetLkw(nil, r.lk(f, 1, unix.F_UNLCK, 0, math.MaxInt64, false)), 0)
	wantErrno(t, "lock", <-done, 0)
}

// Who has lost a lock does no further harm.
func TestLockLost(t *testing.T) {
	r := newRig(t, newService(2, 1<<20))
	id, f := r.create("f")
	g := r.open(id, unix.O_RDWR)
	wantErrno(t, "lock", r.raw.SetLk(nil, r.lk(f, 1, unix.F_WRLCK, 0, 9, false)), 0)
	wantErrno(t, "lock", r.raw.SetLk(nil, r.lk(g, 1, unix.F_WRLCK, 0, 9, true)), 0)
	try := func(fh uint64, want syscall.Errno) {
		t.Helper()
		in := fuse.WriteIn{Fh: fh}
		in.NodeId = uint64(id)
		_, status := r.raw.Write(nil, &in, []byte("x"))
		wantErrno(t, "write", status, want)
		rd := fuse.ReadIn{Fh: fh}
		rd.NodeId = uint64(id)
		got, status := r.raw.Read(nil, &rd, make([]byte, 1))
		wantErrno(t, "read", status, want)
		if got != nil {
			got.Done()
		}
		wantErrno(t, "lock", r.raw.SetLk(nil, r.lk(fh, 1, unix.F_WRLCK, 0, 9, false)), want)
	}
	try(f, 0)
	r.OnLockLost(id, false, 77) // somebody else's
	r.OnLockLost(id+1, false, 1)
	try(f, 0)
	r.OnLockLost(id, true, g)
	r.OnLockLost(id, true, g)
	try(f, 0)
	try(g, syscall.EIO)
	wantErrno(t, "unlock", r.raw.SetLk(nil, r.lk(g, 1, unix.F_UNLCK, 0, 9, false)), 0)
	wantErrno(t, "flush", r.raw.Flush(nil, &fuse.FlushIn{Fh: g, LockOwner: 1}), 0)
	r.release(g)
	if n := r.lostLocks.Load(); n != 0 {
		t.Errorf("%d open files are without their locks", n)
	}
	g = r.open(id, unix.O_RDWR)
	try(g, 0)
	r.release(g)
	r.release(f)
}

// TestLockWorker is not a test but a process of TestMountLocks.
func TestLockWorker(t *testing.T) { locktest.Serve(t) }

// Locks on a mount are like those on a local directory.
func TestMountLocks(t *testing.T) { eachTransport(t, testMountLocks) }

func testMountLocks(t *testing.T) {
	m := startMount(t)
	local := publicDir(t)
	t.Run("local", func(t *testing.T) { locktest.Run(t, local, local) })
	t.Run("mount", func(t *testing.T) { locktest.Run(t, m.dir, m.dir) })
}
