package fs

import (
	"context"
	"errors"
	"math"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// fallocate is fallocate(2). The kernel has refused lengths of 0 and files that are none. setID says that the caller may not
// keep the set-user-ID and set-group-ID bits.
//
// Data servers that cannot reserve space or punch holes are sent zeros (see dataplane.File.Punch and Allocate); to reserve
// space behind the end of the file is refused with them. If there is not enough space, part of the range may be reserved.
func (i *inode) fallocate(ctx context.Context, mode uint32, off, n int64, setID bool) error {
	if n > math.MaxInt64-off {
		return syscall.EFBIG
	}
	end, keep := off+n, mode&unix.FALLOC_FL_KEEP_SIZE != 0
	switch mode {
	case 0, unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
		unix.FALLOC_FL_ZERO_RANGE, unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE:
	default:
		return syscall.EOPNOTSUPP
	}
	if err := i.clearPrivileges(ctx, setID); err != nil {
		return err
	}
	size, err := i.freshSize(ctx)
	if err != nil {
		return err
	}
	defer i.allocated(mode&unix.FALLOC_FL_PUNCH_HOLE == 0 && (!keep || end <= size))
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) != 0 {
		if err := i.punch(ctx, off, min(end, size)); err != nil {
			return err
		}
	}
	if mode&unix.FALLOC_FL_PUNCH_HOLE != 0 {
		return nil
	}
	if err := i.allocate(ctx, off, min(end, size), false); err != nil {
		return err
	}
	// What lies behind the end is reserved before any data file becomes longer than the file is.
	err = i.allocate(ctx, max(off, size), end, true)
	switch {
	case keep && mode&unix.FALLOC_FL_ZERO_RANGE != 0 && errors.Is(err, dataplane.ErrUnsupported):
		return nil // the zeros are there
	case keep:
		return err
	case errors.Is(err, dataplane.ErrUnsupported):
		if err := i.allocate(ctx, max(off, size), end, false); err != nil {
			return err
		}
		return i.extend(ctx, end)
	case err != nil:
		return err
	}
	// First the file, and then its data files: a caller may be killed in between.
	if err := i.extend(ctx, end); err != nil {
		return err
	}
	return i.allocate(ctx, max(off, size), end, false)
}

// punch makes [off, end) read as zeros.
func (i *inode) punch(ctx context.Context, off, end int64) error {
	return i.eachSegment(ctx, off, end, true, func(seg *layout.Segment, off, n int64, ended func(error)) error {
		return i.data.Punch(ctx, seg, off, n, ended)
	})
}

// allocate reserves space for [off, end).
func (i *inode) allocate(ctx context.Context, off, end int64, keepSize bool) error {
	return i.eachSegment(ctx, off, end, false, func(seg *layout.Segment, off, n int64, ended func(error)) error {
		return i.data.Allocate(ctx, seg, off, n, keepSize, ended)
	})
}

// errNoChange counts a write out that has left the contents and the times as they were.
var errNoChange = errors.New("nothing was changed")

// eachSegment has do change what one segment has of [off, end), and so on. Each such change counts as a write until ended
// is called. punch says that it changes what can be read, and that there is nothing to do where no data is.
func (i *inode) eachSegment(ctx context.Context, off, end int64, punch bool, do func(seg *layout.Segment, off, n int64, ended func(error)) error) error {
	var again retries
	for off < end {
		n, err := i.oneSegment(ctx, off, end, punch, do)
		if err != nil {
			if err = again.after(ctx, i, err); err != nil {
				return err
			}
		}
		off += n
	}
	return nil
}

// oneSegment returns how many bytes are done.
func (i *inode) oneSegment(ctx context.Context, off, end int64, punch bool, do func(seg *layout.Segment, off, n int64, ended func(error)) error) (int64, error) {
	if punch {
		seg, err := i.fs.meta.Layout(ctx, i.id, layout.IOModeRead, off, end-off, metaclient.Anywhere)
		if err != nil {
			return 0, byID(i.id, err)
		}
		if seg == nil {
			return end - off, nil
		}
	}
	seg, admitted, err := i.acquire(ctx, off, end-off, &terms{})
	if _, errno := classify(err); punch && errno == syscall.EFBIG {
		return end - off, nil // nothing can be there
	}
	if err != nil {
		return 0, err
	}
	n := min(end, seg.End()) - off
	_, arrived := atData(ctx)
	err = do(seg, off, n, func(err error) {
		if err == nil && !punch {
			err = errNoChange
		}
		i.finish(admitted, 0, err)
	})
	arrived()
	if err != nil {
		i.doubtBlocks()
	}
	if i.data.Dirty() { // zeros that were written
		i.mu.Lock()
		i.enqueue()
		i.mu.Unlock()
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// extend makes the file at least end bytes long. It does so the way writes do: nobody else's longer file is cut.
func (i *inode) extend(ctx context.Context, end int64) error {
	if err := i.await(ctx, func() bool { return i.gone != nil || i.admits(false) }); err != nil {
		return err
	}
	if err := i.gone; err != nil {
		i.mu.Unlock()
		return err
	}
	if end > i.size.Load() {
		i.wrote(end, 0)
	}
	i.mu.Unlock()
	return i.makeDurable(ctx)
}

// seek is lseek(2) with SEEK_DATA or SEEK_HOLE.
func (i *inode) seek(ctx context.Context, off int64, whence uint32) (int64, error) {
	if whence != unix.SEEK_DATA && whence != unix.SEEK_HOLE {
		return 0, syscall.EINVAL
	}
	size, err := i.freshSize(ctx)
	if err != nil {
		return 0, err
	}
	if off < 0 || off >= size {
		return 0, syscall.ENXIO
	}
	hole := whence == unix.SEEK_HOLE
	var again retries
	for off < size {
		at, found, next, err := i.seekOnce(ctx, off, size, hole)
		switch {
		case err != nil:
			if err := again.after(ctx, i, err); err != nil {
				return 0, err
			}
			continue
		case found:
			return at, nil
		}
		off = next
	}
	if hole {
		return size, nil
	}
	return 0, syscall.ENXIO
}

// seekOnce looks in the segment at off; if there is nothing, next is where to go on.
func (i *inode) seekOnce(ctx context.Context, off, size int64, hole bool) (at int64, found bool, next int64, err error) {
	seg, r, err := i.readSegment(ctx, off, size-off)
	if err != nil {
		return 0, false, 0, err
	}
	if seg == nil {
		return off, hole, size, nil // no data file from here on
	}
	defer i.endRead(r)
	next = min(seg.End(), size)
	_, arrived := atData(ctx)
	defer arrived()
	at, found, err = i.data.Seek(ctx, seg, off, next-off, hole)
	return at, found, next, err
}

// status is what the application gets to see of err: our own refusals, which are bare errnos, as they are.
func (i *inode) status(err error) fuse.Status {
	if e, ok := err.(syscall.Errno); ok {
		return fuse.Status(e)
	}
	return fuse.Status(i.fs.dataErrno(i.id, err))
}
