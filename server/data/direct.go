package data

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/iobuf"
)

// IO tells how a server reads and writes data files.
type IO int

const (
	// IOAuto goes past the page cache with large requests, where the file system can do that.
	IOAuto IO = iota
	// IODirect does so always: the file system must be able to.
	IODirect
	// IOBuffered goes through the page cache, and drops from it what streams have left behind.
	IOBuffered
)

var ioNames = [...]string{"auto", "direct", "buffered"}

func (m IO) String() string { return ioNames[m] }

// ParseIO is the inverse of String.
func ParseIO(name string) (IO, error) {
	for i, n := range ioNames {
		if n == name {
			return IO(i), nil
		}
	}
	return 0, fmt.Errorf("%q: want %s", name, strings.Join(ioNames[:], ", "))
}

const (
	// directMin is the least number of bytes, whole blocks, that auto transfers past the page cache. Smaller requests would
	// wait for the device one by one, where the page cache reads ahead and joins writes.
	directMin = 256 << 10
	// maxDirectAlign bounds what a file system may want offsets to be aligned to, in bytes.
	maxDirectAlign = 64 << 10
)

// directIO is how data files of a server are transferred past the page cache.
type directIO struct {
	align  int64  // of offsets and lengths, a multiple of the page size; 0: all is buffered
	least  int64  // transfers that are not shorter, in bytes
	why    string // all is buffered
	memory bool   // the file system is in memory
}

// newDirectIO finds out what the file system of the export can do.
func newDirectIO(mode IO, export int) (directIO, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(export, &fs); err != nil {
		return directIO{}, err
	}
	memory := fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC
	d := directIO{least: directMin, memory: memory}
	switch {
	case mode == IOBuffered:
		d.why = "it was asked for"
		return d, nil
	case mode == IOAuto && memory:
		d.why = "there is nothing else in memory"
		return d, nil
	}
	align, err := probeDirect(export)
	switch {
	case err == nil:
		d.align = align
	case mode == IODirect:
		return d, fmt.Errorf("its file system cannot transfer past the page cache (O_DIRECT): %w: use --io=auto or --io=buffered", err)
	default:
		d.why = fmt.Sprintf("O_DIRECT: %v", err)
	}
	if mode == IODirect {
		d.least = d.align
	}
	return d, nil
}

// probeDirect returns what offsets must be aligned to in a file of the directory that is open for direct transfers, after
// it has made one of each kind. Kernels before 6.1 do not tell the alignment.
func probeDirect(dir int) (align int64, err error) {
	fd, err := unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	align = iobuf.PageSize
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 {
			return 0, unix.EOPNOTSUPP
		}
		align = max(align, int64(st.Dio_offset_align))
		if align > maxDirectAlign || align&(align-1) != 0 || st.Dio_mem_align > iobuf.PageSize {
			return 0, fmt.Errorf("offsets must be aligned to %d bytes and memory to %d: %w", st.Dio_offset_align, st.Dio_mem_align, unix.EOPNOTSUPP)
		}
	}
	b := iobuf.Aligned(int(2 * align))
	out, in := b[:align], b[align:]
	for i := range out {
		out[i] = byte(i%251 + 1)
	}
	if _, err := pwrite(fd, out, align); err != nil {
		return 0, err
	}
	if n, err := pread(fd, in, align); err != nil {
		return 0, err
	} else if n < len(in) || !bytes.Equal(in, out) {
		return 0, errors.New("what was written is not what is read")
	}
	return align, nil
}

// shift is how far into a page-aligned buffer the payload of a transfer of n bytes at off begins, so that what is aligned
// in the file is aligned in memory.
func (d *directIO) shift(n int, off uint64) int {
	if d.align == 0 || int64(n) < d.least {
		return 0
	}
	return int(off % iobuf.PageSize)
}

// part returns what of a transfer of n bytes at off goes past the page cache: those from..to, or nothing.
func (d *directIO) part(n int, off int64) (from, to int) {
	if d.align == 0 || int64(n) < d.least {
		return 0, 0
	}
	start := (off + d.align - 1) &^ (d.align - 1)
	end := (off + int64(n)) &^ (d.align - 1)
	if end-start < d.least {
		return 0, 0
	}
	return int(start - off), int(end - off)
}

// reaches is whether some of a transfer of n bytes at off goes past the page cache.
func (d *directIO) reaches(n int, off int64) bool {
	from, to := d.part(n, off)
	return from < to
}

// aligned is whether b can be transferred directly.
func aligned(b []byte) bool { return uintptr(unsafe.Pointer(&b[0]))%iobuf.PageSize == 0 }

// noDirect in directFD means that the file cannot be opened for direct transfers.
const noDirect = -1

// directFD returns the file's descriptor for direct transfers, or noDirect. The file keeps it.
func (s *Server) directFD(f *file) int {
	if fd := f.direct.Load(); fd != 0 {
		return int(fd)
	}
	fd, err := s.handles.openDirect(f)
	switch err {
	case nil:
	case unix.EINVAL, unix.EOPNOTSUPP: // as for a file whose data is compressed or encrypted
		fd = noDirect
	default: // too many are open, or it has lost its name: this time buffered
		return noDirect
	}
	if !f.direct.CompareAndSwap(0, int32(fd)) { // another request was faster
		if fd != noDirect {
			unix.Close(fd)
		}
		return int(f.direct.Load())
	}
	return fd
}

// close closes a file that nobody uses any more.
func (f *file) close() {
	unix.Close(f.fd)
	if fd := f.direct.Load(); fd > 0 {
		unix.Close(int(fd))
	}
}

// readFile fills b with what is at off, unless the file ends.
func (s *Server) readFile(f *file, b []byte, off int64) (n int, err error) {
	from, to := s.io.part(len(b), off)
	if from == to || !aligned(b[from:]) {
		return s.readBuffered(f, b, off)
	}
	fd := s.directFD(f)
	if fd == noDirect {
		return s.readBuffered(f, b, off)
	}
	if n, err = pread(f.fd, b[:from], off); n < from || err != nil {
		return n, err
	}
	m, err := preadDirect(fd, b[from:to], off+int64(from))
	if n += m; n == len(b) || err != nil && err != unix.EINVAL {
		return n, err
	}
	// The unaligned end, or all, if it was cut meanwhile.
	m, err = pread(f.fd, b[n:], off+int64(n))
	return n + m, err
}

// preadDirect is pread that stops at a short read: the file ends there, and what follows is not aligned.
func preadDirect(fd int, b []byte, off int64) (n int, err error) {
	for {
		if n, err = unix.Pread(fd, b, off); err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// writeFile writes b at off, or tells how much it did before the error.
func (s *Server) writeFile(f *file, b []byte, off int64) (n int, err error) {
	from, to := s.io.part(len(b), off)
	if from == to || !aligned(b[from:]) {
		return s.writeBuffered(f, b, off)
	}
	fd := s.directFD(f)
	if fd == noDirect {
		return s.writeBuffered(f, b, off)
	}
	if n, err = pwrite(f.fd, b[:from], off); err != nil {
		return n, err
	}
	m, err := pwrite(fd, b[from:to], off+int64(from))
	if n += m; err != nil && err != unix.EINVAL { // which a short write leaves, as its rest is not aligned
		return n, err
	}
	m, err = pwrite(f.fd, b[n:], off+int64(n))
	return n + m, err
}

const (
	// streamMin is the least request, in bytes, that is looked at as part of a stream.
	streamMin = 32 << 10
	// streamSpan is how far from the stream's front a request may be, in bytes: in a data file there are the gaps of the
	// other columns, and requests overtake one another. So much of a file stays in the page cache, too: what is shorter stays
	// for the next reader.
	streamSpan = 256 << 20
	// streamStep is how much is dropped at once, in bytes.
	streamStep = 8 << 20
)

// stream is what is known of the sequential transfer of a file that is looked for. What several requests do to it at the
// same time need not be exact: it decides about the page cache only.
type stream struct {
	front   atomic.Int64 // the largest end of a request
	dropped atomic.Int64 // from where on pages may be left of it
}

// advance counts a request, and returns the range [from, to) that the stream has left behind, or nothing.
func (t *stream) advance(off, n int64) (from, to int64) {
	if n < streamMin {
		return 0, 0
	}
	end, front := off+n, t.front.Load()
	if off < front-streamSpan || off > front+streamSpan {
		t.front.Store(end)
		t.dropped.Store(off)
		return 0, 0
	}
	if end <= front {
		return 0, 0
	}
	t.front.Store(end)
	from = t.dropped.Load()
	to = end - streamSpan
	if to-from < streamStep || !t.dropped.CompareAndSwap(from, to) {
		return 0, 0
	}
	return from, to
}

func (s *Server) readBuffered(f *file, b []byte, off int64) (n int, err error) {
	n, err = pread(f.fd, b, off)
	s.leave(f, &f.reading, off, n)
	return n, err
}

func (s *Server) writeBuffered(f *file, b []byte, off int64) (n int, err error) {
	n, err = pwrite(f.fd, b, off)
	s.leave(f, &f.writing, off, n)
	return n, err
}

// leave drops pages that a stream has left behind. Should some be dirty still, their writing begins, and the next call drops
// them: hence it goes back over a step.
func (s *Server) leave(f *file, t *stream, off int64, n int) {
	if s.io.memory {
		return
	}
	if from, to := t.advance(off, int64(n)); from < to {
		from = max(0, from-streamStep)
		unix.Fadvise(f.fd, from, to-from, unix.FADV_DONTNEED) // no more than advice
	}
}
