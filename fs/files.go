package fs

import (
	"context"
	"math"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/metaclient"
)

// opened fills the answer to open(2). Data does not go through the page cache, except for mmap(2) and with
// Config.CachePages, and writes of one file need not wait for one another. FOPEN_NOFLUSH would be good for a file that is
// only read, but closing it has to drop locks.
//
// If the file may be read or written by the kernel itself (passthrough.go), the flags say so.
func (r *raw) opened(ctx context.Context, out *fuse.OpenOut, i *inode, flags, pid uint32) error {
	w, err := i.choose(ctx, flags)
	if err != nil {
		i.cancelOpen()
		return err
	}
	if w.pass != nil {
		w.pid = processOf(pid)
	}
	out.Fh = i.newHandle(flags&unix.O_ACCMODE == unix.O_RDONLY, w)
	out.OpenFlags = w.flags
	if w.pass != nil {
		out.BackingID = w.pass.id
		return nil
	}
	if flags&unix.O_ACCMODE == unix.O_RDONLY {
		if keep, cached := r.fs.pages.opened(i); cached && flags&unix.O_DIRECT == 0 {
			out.OpenFlags = keep
		}
	}
	return nil
}

// accessOf is what a file is opened for.
func accessOf(flags uint32) (access metarpc.Access) {
	const exec = 0x20 // __FMODE_EXEC, which execve(2) opens with
	switch flags & unix.O_ACCMODE {
	case unix.O_WRONLY:
		access = metarpc.AccessWrite
	case unix.O_RDWR:
		access = metarpc.AccessRead | metarpc.AccessWrite
	default:
		access = metarpc.AccessRead
	}
	if flags&exec != 0 {
		access = metarpc.AccessExec
	}
	if flags&unix.O_TRUNC != 0 {
		access |= metarpc.AccessWrite
	}
	return access
}

func (r *raw) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	i := r.fs.hold(r.fs.id(in.NodeId))
	defer i.drop()
	if err := i.openFor(ctx, in); err != nil {
		return r.status(err)
	}
	return r.status(r.opened(ctx, out, i, in.Flags, in.Pid))
}

// openFor opens the file at the service, which checks that the caller may, and keeps the file should it be removed.
func (i *inode) openFor(ctx context.Context, in *fuse.OpenIn) error {
	a, err := i.openAs(ctx, cred(&in.InHeader), accessOf(in.Flags))
	if err != nil {
		return err
	}
	if accessOf(in.Flags)&metarpc.AccessExec != 0 {
		if err := i.execute(ctx, in.Pid, &a); err != nil {
			i.cancelOpen()
			return err
		}
	}
	if in.Flags&unix.O_TRUNC != 0 {
		_, err = i.emptyOpened(ctx, &in.InHeader, in.Mode)
	}
	return err
}

// emptyOpened truncates an open file for O_TRUNC and returns its new attributes. flags are the kernel's open flags.
func (i *inode) emptyOpened(ctx context.Context, in *fuse.InHeader, flags uint32) (attrs, error) {
	args := &metarpc.SetAttrArgs{ID: i.id, Mask: metarpc.SetSize, Open: true}
	clearSetID := flags&fuse.OPEN_KILL_SUIDGID != 0
	a, err := i.fs.setAttr(ctx, cred(in), args, clearSetID)
	if err != nil {
		i.cancelOpen()
		return attrs{}, err
	}
	if clearSetID { // of which the kernel sees the size alone
		i.fs.forgetAttrs(i.id)
	}
	return a, nil
}

// openFound is for a file that another client has made since the kernel looked the name up. The kernel has to look again,
// since it checks permissions, type and O_TRUNC only of files that it finds. If it has looked again already, the file
// is opened here. The service has checked the permissions.
func (i *inode) openFound(ctx *request, in *fuse.CreateIn, a metaclient.Answer) (metaclient.Answer, error) {
	if !ctx.firm.Load() || a.Attr.Mode&unix.S_IFMT != unix.S_IFREG {
		i.cancelOpen()
		ctx.again()
		return a, syscall.ESTALE
	}
	if in.Flags&unix.O_TRUNC == 0 {
		return a, nil
	}
	now, err := i.emptyOpened(ctx, &in.InHeader, in.OpenFlags)
	a.Attr = now.Attr
	return a, err
}

func (r *raw) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	ctx.name = name
	if err := checkName(name); err != nil {
		return r.status(err)
	}
	fs := r.fs
	asked := fs.clock.Add(1)
	args := &metarpc.CreateArgs{
		Parent: fs.id(in.NodeId), Name: name, Mode: in.Mode & 07777, Exclusive: in.Flags&unix.O_EXCL != 0,
		Umask: in.Umask & 07777, Access: accessOf(in.Flags),
	}
	// Whoever appends asks for a layout for appends.
	args.Layout = args.Access&metarpc.AccessWrite != 0 && in.Flags&unix.O_APPEND == 0 && fs.filling.Load()
	made, created, err := fs.meta.Create(ctx, cred(&in.InHeader), args)
	if err != nil {
		fs.unsure(err, args.Parent)
		return r.status(err)
	}
	i := fs.hold(made.Attr.ID)
	defer i.drop()
	i.mu.Lock()
	i.opens++
	i.opened()
	i.born, i.blank = i.born || created, i.blank || created
	if created {
		i.learn(&made.Attr, asked)
	}
	i.mu.Unlock()
	if !created {
		if made, err = i.openFound(ctx, in, made); err != nil {
			return r.status(err)
		}
	}
	if err := r.opened(ctx, &out.OpenOut, i, in.Flags, in.Pid); err != nil {
		return r.status(err)
	}
	status := r.entry(ctx, &in.InHeader, &out.EntryOut, place{in.NodeId, name}, made, asked, nil)
	if !created {
		return status
	}
	i.newborn.Store(true)
	if a, ok := fs.meta.CachedAttr(i.id); ok && i.merge(a, asked).keep > 0 { // what is recalled from now on finds it newborn
		out.SetAttrTimeout(min(a.Keep, newbornKeep))
	} else {
		i.newborn.Store(false)
	}
	return status
}

// readCall is one READ on its way. It is the ReadResult, too, and returns to the pool when go-fuse is done with it.
type readCall struct {
	Read
	flight
	n     int
	errno syscall.Errno
	over  chan struct{}
}

var readCalls = sync.Pool{New: func() any {
	c := &readCall{over: make(chan struct{}, 1)}
	c.Read.Done = func(n int, errno syscall.Errno) {
		c.n, c.errno = n, errno
		c.over <- struct{}{}
	}
	return c
}}

// Bytes, Size and Done make readCall a fuse.ReadResult.
func (c *readCall) Bytes([]byte) ([]byte, fuse.Status) { return c.Buf[:c.n], fuse.OK }

func (c *readCall) Size() int { return c.n }

func (c *readCall) Done() {
	c.Buf = nil
	readCalls.Put(c)
}

func (r *raw) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if r.fs.unprotected(in.Fh) {
		return nil, fuse.EIO
	}
	c := readCalls.Get().(*readCall)
	c.flight = flight{op: opRead, pid: in.Pid, id: r.fs.id(in.NodeId), began: time.Now()}
	r.fs.flights.start(&c.flight)
	c.fill(r.fs.id(in.NodeId), in.Fh, int64(in.Offset), buf, in.Flags)
	r.fs.StartRead(&c.Read)
	r.fs.Flush()
	answered := r.await(c.over, cancel, in.Pid, c.Detach)
	if !answered {
		r.fs.flights.end(&c.flight)
		return nil, fuse.EINTR // c is left to whoever calls Done
	}
	r.fs.answered(&c.flight, &c.journey, "", c.Off, c.n)
	r.fs.watched.add(&c.flight, false, c.n)
	if c.errno != 0 {
		defer c.Done()
		return nil, fuse.Status(c.errno)
	}
	return c, fuse.OK
}

// await waits for a request that was started. If the caller has gone meanwhile, it takes back the buffer, which go-fuse
// will use for other requests as soon as the handler returns, and reports false unless the request is over now.
func (r *raw) await(over <-chan struct{}, cancel <-chan struct{}, pid uint32, detach func()) bool {
	select {
	case <-over:
		return true
	default:
	}
	select {
	case <-over:
		return true
	case <-cancel:
	}
	if !r.fs.abandoned(over, pid, true) {
		return true
	}
	detach()
	select {
	case <-over:
		return true
	default:
		return false
	}
}

// writeCall is one WRITE on its way.
type writeCall struct {
	Write
	flight
	n     int
	errno syscall.Errno
	over  chan struct{}
}

var writeCalls = sync.Pool{New: func() any {
	c := &writeCall{over: make(chan struct{}, 1)}
	c.Write.Done = func(n int, errno syscall.Errno) {
		c.n, c.errno = n, errno
		c.over <- struct{}{}
	}
	return c
}}

func (r *raw) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if r.fs.unprotected(in.Fh) {
		return 0, fuse.EIO
	}
	c := writeCalls.Get().(*writeCall)
	c.flight = flight{op: opWrite, pid: in.Pid, id: r.fs.id(in.NodeId), began: time.Now()}
	r.fs.flights.start(&c.flight)
	c.fill(r.fs.id(in.NodeId), in.Fh, int64(in.Offset), data, in.Flags, in.WriteFlags)
	r.fs.StartWrite(&c.Write)
	r.fs.Flush()
	answered := r.await(c.over, cancel, in.Pid, c.Detach)
	if !answered {
		r.fs.flights.end(&c.flight)
		return 0, fuse.EINTR // c is left to whoever calls Done
	}
	r.fs.answered(&c.flight, &c.journey, "", c.Off, c.n)
	n, errno := c.n, c.errno
	r.fs.watched.add(&c.flight, true, n)
	c.Data = nil
	writeCalls.Put(c)
	return uint32(n), fuse.Status(errno)
}

// Writev is Write for transports whose data may come in pieces. go-fuse joins those itself when it is told to.
func (r *raw) Writev(cancel <-chan struct{}, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	if len(data) != 1 {
		return 0, fuse.ENOSYS
	}
	return r.Write(cancel, in, data[0])
}

// Flush must never be answered with ENOSYS, or the kernel will not ask again for any file.
func (r *raw) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	ctx.closes = true
	defer ctx.end()
	h := r.fs.handles.get(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	h.i.newborn.Store(false)
	var err error
	if !h.reads {
		err = h.flush(ctx)
	}
	// After that, so that the next one to have the lock finds what was written.
	h.i.closed(ctx, in.LockOwner)
	return fuse.Status(r.fs.dataErrno(h.i.id, err))
}

func (r *raw) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	h := r.fs.handles.get(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	return fuse.Status(r.fs.dataErrno(h.i.id, h.fsync(ctx)))
}

// Release waits for nothing: the kernel does not wait for it.
func (r *raw) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) { r.fs.release(in.Fh) }

// Lseek finds data and holes; the kernel answers all other uses of lseek(2) itself.
func (r *raw) Lseek(cancel <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	h := r.fs.handles.get(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	at, err := h.i.seek(ctx, int64(min(in.Offset, math.MaxInt64)), in.Whence)
	if err != nil {
		return h.i.status(err)
	}
	out.Offset = uint64(at)
	return fuse.OK
}

func (r *raw) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	h := r.fs.handles.get(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	if in.Offset > math.MaxInt64 || in.Length > math.MaxInt64-in.Offset {
		return fuse.Status(syscall.EFBIG)
	}
	return h.i.status(h.i.fallocate(ctx, in.Mode, int64(in.Offset), int64(in.Length), in.Uid != 0))
}
