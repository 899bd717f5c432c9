package fs

import (
	"context"
	"errors"
	"math"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// The kernel leaves locks to us (EnableLocks) and remembers none. It says whose they are with a number: that of a process's
// table of files for those of fcntl(2) that belong to the process, of the open file for the others. It does not say which of
// the two it is, nor are the numbers of open files unique for long. So
//
//   - locks of flock(2) get the number of our handle for their owner, which is never used twice;
//   - FLUSH, which is sent whenever a descriptor is closed, drops the locks that the process has on the file;
//   - RELEASE drops those which were set through this open file by owners who have set none through another one: for these
//     it was the last chance to say so.
//
// A lock that is lost, because the service has given up our session or would not take the lock back, makes every further
// use of the open files through which its owner had set it fail, until they are closed: the data is no longer protected.

// releaseTime is enough for most RELEASEs to get from the kernel to the service.
const releaseTime = 10 * time.Millisecond

// lockOwner is who has locks on one file.
type lockOwner struct {
	number uint64
	flock  bool
}

// lockOwners are the owners who may have locks on a file, each with the open files through which it has set them.
type lockOwners map[lockOwner]map[*handle]struct{}

// locks records, before a lock is asked for, that owner sets it through h.
func (h *handle) locks(owner lockOwner) {
	h.i.mu.Lock()
	defer h.i.mu.Unlock()
	if h.i.lockOwners == nil {
		h.i.lockOwners = lockOwners{}
	}
	through := h.i.lockOwners[owner]
	if through == nil {
		through = map[*handle]struct{}{}
		h.i.lockOwners[owner] = through
	}
	through[h] = struct{}{}
}

// killedTime is how long the end of a killed process waits for the service to know that its locks are gone. Who has waited
// for the process must not find them, and a service that is away must not hold it up.
const killedTime = time.Second

// closed drops the locks of a process on a file of which it has closed a descriptor. It returns when the service knows
// that, or killedTime after ctx ended or, on a soft mount, the service was given up; it gets to know all the same.
func (i *inode) closed(ctx context.Context, owner uint64) {
	i.mu.Lock()
	_, known := i.lockOwners[lockOwner{number: owner}]
	delete(i.lockOwners, lockOwner{number: owner})
	i.mu.Unlock()
	if !known {
		return
	}
	dropped := i.fs.meta.DropLocks(i.id, false, owner, i.stable())
	waiting, stop := i.fs.meta.Patient(ctx, i.id)
	defer stop()
	select {
	case <-dropped:
		return
	case <-waiting.Done():
	}
	select {
	case <-dropped:
	case <-time.After(killedTime):
	}
}

// unlock drops what is left of locks that were set through an open file which is no longer open.
func (h *handle) unlock() {
	var left []lockOwner
	h.i.mu.Lock()
	for owner, through := range h.i.lockOwners {
		if _, ok := through[h]; !ok {
			continue
		}
		if delete(through, h); len(through) == 0 {
			delete(h.i.lockOwners, owner)
			left = append(left, owner)
		}
	}
	lost := h.lost.Load()
	h.i.mu.Unlock()
	if lost {
		h.i.fs.lostLocks.Add(-1)
	}
	for _, owner := range left {
		h.i.fs.meta.DropLocks(h.i.id, owner.flock, owner.number, h.i.stable())
	}
}

// stable makes stable what was written here before, which may be under a lock that is about to be taken away. It is nil if there is nothing.
func (i *inode) stable() func(context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.dirty() && i.passed == nil {
		return nil
	}
	return i.makeDurable
}

// fresh drops what is kept of the file here, after another mount may have changed it under a lock.
func (i *inode) fresh(ctx context.Context) {
	i.mu.Lock()
	i.known.Store(false)
	i.outdate()
	i.mu.Unlock()
	i.fs.forgetAttrs(i.id)
	i.fs.forgetPages(ctx, i.id, i)
}

// OnLockLost is told that locks have been lost. It is for metaclient.Config.
func (fs *FS) OnLockLost(id layout.FileID, flock bool, owner uint64) {
	i := fs.holdKnown(id)
	if i == nil {
		return
	}
	defer i.drop()
	i.mu.Lock()
	defer i.mu.Unlock()
	for h := range i.lockOwners[lockOwner{owner, flock}] {
		if !h.lost.Swap(true) {
			fs.lostLocks.Add(1)
		}
	}
}

// errLockLost fails what was begun under a lock that has been lost meanwhile.
var errLockLost = errors.New("a lock that was set through the open file has been lost")

// unprotected reports whether a lock has been lost that was set through an open file. It costs next to nothing as long
// as there is no such file.
func (fs *FS) unprotected(fh uint64) bool {
	if fs.lostLocks.Load() == 0 {
		return false
	}
	h := fs.handles.get(fh)
	return h != nil && h.lost.Load()
}

// lockTypes are the types of fcntl(2).
var lockTypes = map[uint32]metarpc.LockType{
	unix.F_RDLCK: metarpc.LockRead, unix.F_WRLCK: metarpc.LockWrite, unix.F_UNLCK: metarpc.LockNone,
}

// lockRequest finds out what the kernel asks for.
func (r *raw) lockRequest(in *fuse.LkIn) (*handle, *metarpc.LockArgs, fuse.Status) {
	h := r.fs.handles.get(in.Fh)
	if h == nil {
		return nil, nil, fuse.EBADF
	}
	typ, ok := lockTypes[in.Lk.Typ]
	if !ok || in.Lk.Start > in.Lk.End || in.Lk.End > math.MaxInt64 {
		return nil, nil, fuse.EINVAL
	}
	args := &metarpc.LockArgs{
		ID: h.i.id, Owner: in.Owner, Type: typ, Start: int64(in.Lk.Start), End: int64(in.Lk.End), PID: in.Lk.Pid,
	}
	if in.LkFlags&fuse.FUSE_LK_FLOCK != 0 {
		args.Flock, args.Owner = true, in.Fh
	}
	return h, args, fuse.OK
}

// lockStatus is status for locks. That others have the lock is EAGAIN, which other calls never answer.
func (r *raw) lockStatus(err error) fuse.Status {
	if e := (*metarpc.Error)(nil); errors.As(err, &e) && e.Status == metarpc.Status(syscall.EAGAIN) {
		return fuse.EAGAIN
	}
	return r.status(err)
}

// hostname is this machine's, as the service shows it for our locks.
var hostname = sync.OnceValue(func() string {
	name, _ := os.Hostname()
	return name
})

func (r *raw) GetLk(cancel <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	h, args, status := r.lockRequest(in)
	if status != fuse.OK {
		return status
	}
	if args.Type == metarpc.LockNone {
		return fuse.EINVAL
	}
	l, err := r.fs.meta.TestLock(ctx, args)
	if err != nil {
		return r.lockStatus(byID(h.i.id, err))
	}
	out.Lk = fuse.FileLock{Typ: unix.F_UNLCK}
	if l.Type == metarpc.LockNone {
		return fuse.OK
	}
	out.Lk = fuse.FileLock{Start: uint64(l.Start), End: uint64(l.End), Typ: unix.F_RDLCK}
	if l.Type == metarpc.LockWrite {
		out.Lk.Typ = unix.F_WRLCK
	}
	if l.Host == "" || l.Host == hostname() {
		out.Lk.Pid = l.PID // that of another machine would name some other process here
	}
	return fuse.OK
}

func (r *raw) SetLk(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	return r.setLock(ctx, in, false)
}

// SetLkw waits for a lock, which is the one request that every signal ends, as programs expect that set themselves a
// time limit with alarm(2). Where they do not, the kernel sees to SA_RESTART.
func (r *raw) SetLkw(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	if in.Lk.Typ == unix.F_UNLCK {
		return r.SetLk(cancel, in)
	}
	ctx, stop := context.WithCancel(application)
	defer stop()
	go func() { // ends with the request
		select {
		case <-cancel:
			stop()
		case <-ctx.Done():
		}
	}()
	return r.setLock(ctx, in, true)
}

func (r *raw) setLock(ctx context.Context, in *fuse.LkIn, wait bool) fuse.Status {
	h, args, status := r.lockRequest(in)
	if status != fuse.OK {
		return status
	}
	args.Wait = wait
	if args.Type != metarpc.LockNone {
		if h.lost.Load() {
			return fuse.EIO
		}
		h.locks(lockOwner{args.Owner, args.Flock})
	}
	ask := func() fuse.Status {
		var stable func(context.Context) error
		if args.Type == metarpc.LockNone {
			stable = h.i.stable()
		}
		shared, err := r.fs.meta.Lock(ctx, args, stable)
		if err == nil && shared {
			h.i.fresh(ctx)
		}
		return r.lockStatus(byID(h.i.id, err))
	}
	status = ask()
	if status == fuse.EAGAIN && args.Flock {
		// The kernel tells of the end of an open file only after close(2) or exit(2), and goes on meanwhile: who has waited
		// for another process to end must not find its lock.
		select {
		case <-time.After(releaseTime):
		case <-ctx.Done():
		}
		status = ask()
	}
	return status
}
