package fileio

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/iobuf"
)

// Kind is how the files of a file system are transferred.
type Kind struct {
	Align  int64 // of offsets and lengths of direct transfers, a multiple of the page size; 0: there are none
	Least  int64 // the shortest direct transfer, in bytes
	Memory bool  // the file system is in memory
}

// File is an open file.
type File interface {
	// Buffered is the descriptor for transfers through the page cache.
	Buffered() int
	// Direct is the one for transfers past it, or NoDirect. It is asked for only if there is something to transfer so.
	Direct() int
	// Streams is what is known of the file's sequential transfers.
	Streams() *Streams
}

// NoDirect in place of a descriptor means that the file cannot be transferred past the page cache.
const NoDirect = -1

// Shift is how far into a page-aligned buffer the payload of a transfer of n bytes at off begins, so that what is aligned
// in the file is aligned in memory.
func (k *Kind) Shift(n int, off uint64) int {
	if k.Align == 0 || int64(n) < k.Least {
		return 0
	}
	return int(off % iobuf.PageSize)
}

// Part returns what of a transfer of n bytes at off goes past the page cache: those from..to, or nothing.
func (k *Kind) Part(n int, off int64) (from, to int) {
	if k.Align == 0 || int64(n) < k.Least {
		return 0, 0
	}
	start := (off + k.Align - 1) &^ (k.Align - 1)
	end := (off + int64(n)) &^ (k.Align - 1)
	if end-start < k.Least {
		return 0, 0
	}
	return int(start - off), int(end - off)
}

// Reaches is whether some of a transfer of n bytes at off goes past the page cache.
func (k *Kind) Reaches(n int, off int64) bool {
	from, to := k.Part(n, off)
	return from < to
}

// Whole returns the descriptor by which all of a transfer of b at off goes; ok is false if it has parts.
func (k *Kind) Whole(f File, b []byte, off int64) (fd int, ok bool) {
	from, to := k.Part(len(b), off)
	switch {
	case from == to || !aligned(b[from:]):
		return f.Buffered(), true
	case from > 0 || to < len(b):
		return 0, false
	}
	if fd = f.Direct(); fd == NoDirect {
		fd = f.Buffered()
	}
	return fd, true
}

// aligned is whether b can be transferred directly.
func aligned(b []byte) bool { return uintptr(unsafe.Pointer(&b[0]))%iobuf.PageSize == 0 }

// Read fills b with what is at off, unless the file ends.
func (k *Kind) Read(f File, b []byte, off int64) (n int, err error) {
	from, to := k.Part(len(b), off)
	if from == to || !aligned(b[from:]) {
		return k.readBuffered(f, b, off)
	}
	direct := f.Direct()
	if direct == NoDirect {
		return k.readBuffered(f, b, off)
	}
	if n, err = Pread(f.Buffered(), b[:from], off); n < from || err != nil {
		return n, err
	}
	m, err := preadDirect(direct, b[from:to], off+int64(from))
	if n += m; n == len(b) || err != nil && err != unix.EINVAL {
		return n, err
	}
	// The unaligned end, or all, if it was cut meanwhile.
	m, err = Pread(f.Buffered(), b[n:], off+int64(n))
	return n + m, err
}

// Write writes b at off, or tells how much it did before the error.
func (k *Kind) Write(f File, b []byte, off int64) (n int, err error) {
	from, to := k.Part(len(b), off)
	if from == to || !aligned(b[from:]) {
		return k.writeBuffered(f, b, off)
	}
	direct := f.Direct()
	if direct == NoDirect {
		return k.writeBuffered(f, b, off)
	}
	if n, err = Pwrite(f.Buffered(), b[:from], off); err != nil {
		return n, err
	}
	m, err := Pwrite(direct, b[from:to], off+int64(from))
	if n += m; err != nil && err != unix.EINVAL { // which a short write leaves, as its rest is not aligned
		return n, err
	}
	m, err = Pwrite(f.Buffered(), b[n:], off+int64(n))
	return n + m, err
}

// ReadNow fills b if all of it is in memory.
func (k *Kind) ReadNow(fd int, b []byte, off int64) bool {
	var n int
	var err error
	if k.Memory {
		n, err = unix.Pread(fd, b, off)
	} else {
		n, err = unix.Preadv2(fd, [][]byte{b}, off, unix.RWF_NOWAIT)
	}
	return n == len(b) && err == nil
}

// Pread fills b unless the file ends.
func Pread(fd int, b []byte, off int64) (n int, err error) {
	for n < len(b) {
		m, err := unix.Pread(fd, b[n:], off+int64(n))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case m == 0:
			return n, nil
		default:
			n += m
		}
	}
	return n, nil
}

// preadDirect is Pread that stops at a short read: the file ends there, and what follows is not aligned.
func preadDirect(fd int, b []byte, off int64) (n int, err error) {
	for {
		if n, err = unix.Pread(fd, b, off); err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// Pwrite writes all of b, or tells how much it did before the error.
func Pwrite(fd int, b []byte, off int64) (n int, err error) {
	for n < len(b) {
		m, err := unix.Pwrite(fd, b[n:], off+int64(n))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return n, err
		case m == 0:
			return n, unix.EIO
		default:
			n += m
		}
	}
	return n, nil
}

// Retry makes a system call again when a signal has interrupted it.
func Retry(do func(fd int) error, fd int) error {
	for {
		if err := do(fd); err != unix.EINTR {
			return err
		}
	}
}

// DropPages makes the page cache forget a file of which a sync has failed, as far as nobody writes it meanwhile.
//
// When ext4 has failed to write a page, that stays in the cache as if it had been written. If it was the first one of
// its block, the block still counts as not written on the disk, while the page counts as having a block. So what is
// written to such a page later goes to the disk, and the next fsync succeeds, but the block reads as zeros when the
// page is gone.
func DropPages(fd int) {
	Retry(unix.Fdatasync, fd) // only clean pages are dropped; whether there was an error makes no difference
	unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
}
