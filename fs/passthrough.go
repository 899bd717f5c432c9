package fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/fileio"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Passthrough says which open files the kernel serves by itself, from a data file on this host.
type Passthrough int

const (
	PassNone   Passthrough = iota
	PassReads              // those that are opened for reading
	PassWrites             // and those that are opened for writing
)

// backing is a data file that the kernel reads, and perhaps writes, in place of one of our files. Guarded by inode.mu, but for what does
// not change.
type backing struct {
	id       int32 // the kernel's number for it
	device   layout.DeviceID
	handle   []byte // of the data file
	lost     bool   // the session in which it was pinned has ended since
	mirrored bool   // there are other copies, so writes go by us
	writes   bool   // there are open files that the kernel writes by itself
	since    time.Time
	opens    int   // open files that were answered with it
	fd       int   // the data file, to see whether it was read
	atime    int64 // of the data file, when last looked at
}

// passed is a data file that the kernel writes, or has written, by itself. Guarded by inode.mu.
type passed struct {
	fd          int
	users       int   // of fd: the inode, and whoever syncs; the last one closes it
	size, mtime int64 // when last looked at
	lost        bool  // the session has ended since: what becomes of it is not known
}

// way is how an open file is served.
type way struct {
	flags uint32
	pass  *backing // nil: the kernel asks us for everything
	pid   uint32   // with pass: the process that opened it
}

// errFull says that the process has too few descriptors for more.
var errFull = errors.New("as many files are open so as the limit on descriptors (RLIMIT_NOFILE) allows")

// errShared says that a file cannot be opened for mapping and writing, since the kernel would write one copy of several.
var errShared = fmt.Errorf("it is open in passthrough, and has several copies: %w", syscall.ETXTBSY)

// How often a data file is asked for that an open file needs, and how much longer the pause gets each time.
const (
	joinTries = 5
	joinPause = 20 * time.Millisecond
)

// errReplaced says that the kernel serves the open files of an inode from a data file that need not be the inode's any more, and
// errUnlent that a file may be mapped and written, of which nobody lends the data file for writing.
var (
	errReplaced = fmt.Errorf("it is open in passthrough since before the session was lost: %w", syscall.ESTALE)
	errUnlent   = fmt.Errorf("it is open in passthrough, and its data server lends nothing for writing now: %w", syscall.ETXTBSY)
)

// direct is the way of all files that nobody lends us.
func direct() way { return way{flags: fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES} }

// choose decides how a file that is being opened is served; leave must follow.
//
// The kernel allows one backing for an inode, and as long as there is one wants it named in the answer to every open.
func (i *inode) choose(ctx context.Context, flags uint32) (way, error) {
	w := direct()
	pass := &i.fs.pass
	if pass.mode == PassNone {
		return w, nil
	}
	if err := i.await(ctx, func() bool { return !i.choosing }); err != nil {
		return w, err
	}
	defer i.mu.Unlock()
	reads := flags&unix.O_ACCMODE == unix.O_RDONLY
	alone := !reads && i.passable(flags)
	if i.backing == nil && i.direct == 0 && (reads && i.size.Load() > 0 || alone) {
		i.choosing = true
		i.mu.Unlock()
		b, fd := pass.back(ctx, i, !reads)
		i.mu.Lock()
		i.choosing = false
		i.notify()
		if i.backing = b; b != nil {
			i.passing.Store(true)
			i.watch()
			if b.writes {
				i.pass(fd)
			}
		}
	}
	b := i.backing
	if b == nil {
		i.direct++
		return w, nil
	}
	b.opens++
	if err := i.join(ctx, b, flags); err != nil {
		i.leave(way{pass: b})
		return w, err
	}
	w.pass = b
	w.flags |= fuse.FOPEN_PASSTHROUGH
	if reads || alone && b.writes {
		w.flags = fuse.FOPEN_PASSTHROUGH
	}
	return w, nil
}

// join prepares a backing, which counts another open file, for that. mu is held, and released while it waits.
func (i *inode) join(ctx context.Context, b *backing, flags uint32) error {
	pass := &i.fs.pass
	writes := flags&unix.O_ACCMODE == unix.O_RDWR && (i.passed == nil || i.passed.lost)
	switch {
	case b.mirrored && flags&unix.O_ACCMODE == unix.O_RDWR:
		return errShared
	case !b.lost && !writes:
		return nil
	}
	i.choosing = true
	defer func() {
		i.choosing = false
		i.notify()
	}()
	session := i.session()
	i.mu.Unlock()
	df, fd, err := (*layout.DataFile)(nil), -1, error(nil)
	for try := 0; try < joinTries && fd < 0 && ctx.Err() == nil && !givenUp(err); try++ { // it may not be a good moment for the service
		time.Sleep(time.Duration(try) * joinPause)
		df, _, fd, err = pass.borrow(ctx, i, writes)
	}
	i.mu.Lock()
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case fd >= 0 && (df.Device != b.device || !bytes.Equal(df.Handles[0], b.handle) || session != i.session()):
		err = errReplaced
	case fd < 0 && b.lost:
		err = errors.Join(errReplaced, err)
	case fd < 0:
		err = errors.Join(errUnlent, err)
	}
	if err != nil || !writes { // through a mapping the kernel writes the data file by itself
		if fd >= 0 {
			unix.Close(fd)
		}
	} else {
		i.pass(fd)
		i.mu.Unlock()
		err = i.unretain(ctx)
		i.mu.Lock()
		if err != nil {
			err = errors.Join(errUnlent, err)
		}
	}
	if err == nil {
		b.lost = false
	}
	return err
}

// unretain makes stable what was written here, or it could be sent again, over what the kernel writes.
func (i *inode) unretain(ctx context.Context) error {
	if err := i.drain(ctx); err != nil || !i.data.Dirty() {
		return err
	}
	_, err := i.commit(ctx, false)
	return err
}

// passable reports whether an open file may be written by the kernel: not if each write has to be acknowledged by us. mu is held.
func (i *inode) passable(flags uint32) bool {
	return i.fs.pass.mode == PassWrites && flags&(unix.O_APPEND|unix.O_SYNC|unix.O_DSYNC) == 0 &&
		!i.clears(true) && i.gone == nil
}

// leave ends the use of a way. mu is held.
func (i *inode) leave(w way) {
	b := w.pass
	if b == nil {
		if i.direct > 0 {
			i.direct--
		}
		return
	}
	if b.opens--; b.opens > 0 {
		return
	}
	i.look()
	i.backing = nil
	i.passing.Store(i.passed != nil)
	unix.Close(b.fd)
	descriptors.Backings.Give()
	i.fs.notify(func(k kernel) { k.endBacking(b.id) })
}

// pass takes a data file that the kernel may write by itself from now on. mu is held.
func (i *inode) pass(fd int) {
	i.closePassed(true)
	i.passed = &passed{fd: fd, users: 1}
	descriptors.Backings.TakeAnyway()
	i.passing.Store(true)
	i.look()
}

// closePassed closes a data file that the kernel does not write any more, once all of it is stable or somebody else sees to that. mu
// is held.
func (i *inode) closePassed(force bool) {
	if p := i.passed; p != nil && (force || i.backing == nil && !i.dirty()) {
		p.leave()
		i.passed = nil
		i.passing.Store(i.backing != nil)
	}
}

// leave ends a use of fd. inode.mu is held.
func (p *passed) leave() {
	if p.users--; p.users == 0 {
		unix.Close(p.fd)
		descriptors.Backings.Give()
	}
}

// syncPassed makes stable what the kernel has written by itself.
func (i *inode) syncPassed() error {
	i.mu.Lock()
	p := i.passed
	if p == nil || p.lost {
		i.mu.Unlock()
		return nil
	}
	p.users++
	i.mu.Unlock()
	err := fileio.Retry(unix.Fdatasync, p.fd)
	i.mu.Lock()
	p.leave()
	i.mu.Unlock()
	if err != nil {
		return fmt.Errorf("data file that the kernel has written: %w", err)
	}
	return nil
}

// watch has the next read of the backing change the time of access of the data file, if it is to change that of the file. Most file systems
// change it only if it is older than the last change, or a day. mu is held.
func (i *inode) watch() {
	b := i.backing
	var st unix.Stat_t
	if i.times.due(i.fs.accesses.rule.Load().Rule, time.Now().UnixNano()) {
		unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", b.fd), []unix.Timespec{{}, {Nsec: unix.UTIME_OMIT}}, 0)
	}
	if unix.Fstat(b.fd, &st) == nil {
		b.atime = st.Atim.Nano()
	}
}

// look takes in that the kernel has read by itself, and what it has written. mu is held.
func (i *inode) look() {
	if b := i.backing; b != nil {
		var st unix.Stat_t
		if unix.Fstat(b.fd, &st) == nil && st.Atim.Nano() != b.atime {
			i.fs.accesses.file(i)
			i.watch()
		}
	}
	p := i.passed
	var st unix.Stat_t
	if p == nil || p.lost || unix.Fstat(p.fd, &st) != nil {
		return
	}
	size, mtime := st.Size, st.Mtim.Nano()
	changed := p.mtime != 0 && (size != p.size || mtime != p.mtime && mtime != timeless)
	if p.size, p.mtime = size, mtime; changed {
		i.outdate()
		i.loseBlocks() // where it has written is not known
		i.wrote(size, mtime)
	}
	if i.end > size { // it has been cut since
		i.end = size
		i.epoch++
	}
}

// dup returns another descriptor of an open file.
func dup(fd int) (int, error) {
	return descriptors.Retry(func() (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) })
}

// timeless is the modification time that a data file has from retime until it is written again.
const timeless = int64(time.Second)

// retime has the next write of the kernel change the modification time of the data file, however soon that comes. The clock of files has
// ticks, and file systems that do not leave the tick for a time that was looked at (before Linux 6.13 all) would keep that of the
// write before. mu is held.
func (i *inode) retime() {
	if p := i.passed; p != nil && !p.lost && unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", p.fd),
		[]unix.Timespec{{Nsec: unix.UTIME_OMIT}, unix.NsecToTimespec(timeless)}, 0) == nil {
		p.mtime = timeless
	}
}

// passedLost reports whether what the kernel has written by itself through this open file has gone with a session.
func (h *handle) passedLost() bool {
	if h.way.pass == nil || h.reads {
		return false
	}
	h.i.mu.Lock()
	defer h.i.mu.Unlock()
	return h.i.passed != nil && h.i.passed.lost
}

// lookAt is look for who has not locked the inode.
func (i *inode) lookAt() {
	if !i.passing.Load() {
		return
	}
	i.mu.Lock()
	i.look()
	i.mu.Unlock()
}

// passthrough is what makes backings.
type passthrough struct {
	mode Passthrough
	// copies is a metarpc.Pin that says which copies may be read so, see Config.Passthrough; a remount changes it.
	copies atomic.Uint32
	lend   func(ctx context.Context, df *layout.DataFile, write bool) (fd int, err error)

	mu  sync.Mutex
	why error // what went wrong last, nil if it has worked since
}

// back makes a backing for a file, nil if there can be none. fd is the data file, if it is to be written.
func (p *passthrough) back(ctx context.Context, i *inode, write bool) (*backing, int) {
	b, fd, err := (*backing)(nil), -1, errFull
	if !descriptors.Scarce() && descriptors.Backings.Take() {
		if b, fd, err = p.tryBack(ctx, i, write); b == nil {
			descriptors.Backings.Give()
		}
	}
	if err != nil || b != nil {
		lack := err == errFull || descriptors.Short(err)
		p.mu.Lock()
		known := err == nil || lack || p.why != nil && p.why.Error() == err.Error()
		p.why = err
		p.mu.Unlock()
		if !known {
			i.fs.log.Warn("the kernel does not read files on this host by itself", "because", err)
		}
	}
	return b, fd
}

func (p *passthrough) tryBack(ctx context.Context, i *inode, write bool) (*backing, int, error) {
	session := i.session()
	df, several, fd, err := p.borrow(ctx, i, write)
	if fd < 0 || err != nil {
		return nil, -1, nil // whoever reads or writes finds out what is wrong, or it is said elsewhere
	}
	keep := false
	defer func() {
		if !keep {
			unix.Close(fd)
		}
	}()
	if write && i.unretain(ctx) != nil {
		return nil, -1, nil
	}
	// The kernel knows no end but that of the data file.
	size, err := i.freshSize(ctx)
	var st unix.Stat_t
	if err != nil || unix.Fstat(fd, &st) != nil || st.Size != size {
		return nil, -1, nil
	}
	k := i.fs.kernel.Load()
	if k == nil {
		return nil, -1, nil
	}
	id, err := (*k).beginBacking(fd)
	if err != nil {
		return nil, -1, err
	}
	watched := fd
	if write {
		if watched, err = dup(fd); err != nil {
			(*k).endBacking(id)
			return nil, -1, err
		}
	}
	keep = true
	return &backing{id: id, device: df.Device, handle: df.Handles[0], lost: session != i.session(), mirrored: several, writes: write, since: time.Now(), fd: watched}, fd, nil
}

// borrow has a copy of a file pinned and returns a descriptor of it, less than 0 if there is none to be had.
func (p *passthrough) borrow(ctx context.Context, i *inode, write bool) (df *layout.DataFile, several bool, fd int, err error) {
	copies := metarpc.Pin(p.copies.Load())
	mode := layout.IOModeRead
	if write {
		mode, copies = layout.IOModeRW, metarpc.PinOnly
	}
	df, several, err = i.fs.meta.Pin(ctx, i.id, mode, copies)
	if df == nil || err != nil {
		return nil, false, -1, err
	}
	fd, err = p.lend(ctx, df, write)
	return df, several, fd, err
}

// Passed is a file that the kernel reads or writes by itself.
type Passed struct {
	ID     layout.FileID
	Device layout.DeviceID
	Writes bool
	Since  time.Time
	PIDs   []int // that have opened it, as this process sees them
}

// Passed lists files that the kernel serves by itself, and says why it does not if it should.
func (fs *FS) Passed() (list []Passed, why error) {
	fs.pass.mu.Lock()
	why = fs.pass.why
	fs.pass.mu.Unlock()
	index := map[layout.FileID]int{}
	for _, fh := range fs.handles.numbers() {
		h := fs.handles.get(fh)
		if h == nil || h.way.pass == nil {
			continue
		}
		n, ok := index[h.i.id]
		if !ok {
			b := h.way.pass
			n = len(list)
			index[h.i.id] = n
			list = append(list, Passed{ID: h.i.id, Device: b.device, Writes: b.writes, Since: b.since})
		}
		if pid := int(h.way.pid); !slices.Contains(list[n].PIDs, pid) {
			list[n].PIDs = append(list[n].PIDs, pid)
		}
	}
	slices.SortFunc(list, func(a, b Passed) int { return a.Since.Compare(b.Since) })
	return list, why
}

// Requests of ioctl(2) on the FUSE device (linux/fuse.h, FUSE_DEV_IOC_BACKING_OPEN and FUSE_DEV_IOC_BACKING_CLOSE).
const (
	iocBackingOpen  = 0x4010e501
	iocBackingClose = 0x4004e502
)

// backingMap is struct fuse_backing_map (linux/fuse.h), of 16 bytes.
type backingMap struct {
	fd    int32
	flags uint32
	_     uint64
}

// beginBacking tells the kernel of a data file, and returns its number there.
func (s *Server) beginBacking(fd int) (int32, error) {
	m := backingMap{fd: int32(fd)}
	id, err := s.ioctl(iocBackingOpen, unsafe.Pointer(&m))
	switch {
	case errors.Is(err, unix.EPERM):
		err = errors.New("passthrough takes CAP_SYS_ADMIN in the first user namespace, which this process does not have")
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL):
		err = fmt.Errorf("the kernel cannot pass through to the data server's file system (%w); passthrough came with Linux 6.9", err)
	case errors.Is(err, unix.ELOOP):
		err = errors.New("the data server's directory is on a stacked file system (overlayfs, perhaps), to which the kernel does not pass through")
	}
	return int32(id), err
}

func (s *Server) endBacking(id int32) {
	s.ioctl(iocBackingClose, unsafe.Pointer(&id))
}

func (s *Server) ioctl(request uintptr, arg unsafe.Pointer) (r uintptr, err error) {
	conn, err := s.device.SyscallConn()
	if err != nil {
		return 0, err
	}
	errno := syscall.Errno(0)
	err = conn.Control(func(fd uintptr) { r, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg)) })
	if err == nil && errno != 0 {
		err = errno
	}
	return r, err
}
