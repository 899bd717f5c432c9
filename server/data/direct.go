package data

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/fileio"
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

// transfers is how data files of a server are read and written.
type transfers struct {
	fileio.Kind
	why string // all is buffered
}

// newTransfers finds out what the file system of the export can do.
func newTransfers(mode IO, export int) (transfers, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(export, &fs); err != nil {
		return transfers{}, err
	}
	memory := fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC
	d := transfers{Kind: fileio.Kind{Least: directMin, Memory: memory}}
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
		d.Align = align
	case mode == IODirect:
		return d, fmt.Errorf("its file system cannot transfer past the page cache (O_DIRECT): %w: use --io=auto or --io=buffered", err)
	default:
		d.why = fmt.Sprintf("O_DIRECT: %v", err)
	}
	if mode == IODirect {
		d.Least = d.Align
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
	if _, err := fileio.Pwrite(fd, out, align); err != nil {
		return 0, err
	}
	if n, err := fileio.Pread(fd, in, align); err != nil {
		return 0, err
	} else if n < len(in) || !bytes.Equal(in, out) {
		return 0, errors.New("what was written is not what is read")
	}
	return align, nil
}

// Buffered is the file's descriptor for the page cache.
func (f *file) Buffered() int { return f.fd }

// Streams is what is known of its sequential transfers.
func (f *file) Streams() *fileio.Streams { return &f.streams }

// Direct returns the file's descriptor for direct transfers, or fileio.NoDirect. The file keeps it. f.mu is held.
func (f *file) Direct() int {
	if fd := f.direct.Load(); fd != 0 {
		return int(fd)
	}
	mode := unix.O_RDWR
	if f.readOnly {
		mode = unix.O_RDONLY
	}
	fd, err := f.handles.openAgain(f, mode|unix.O_DIRECT)
	switch err {
	case nil:
	case unix.EINVAL, unix.EOPNOTSUPP: // as for a file whose data is compressed or encrypted
		fd = fileio.NoDirect
	default: // too many are open, or it has lost its name: this time buffered
		descriptors.Short(err)
		return fileio.NoDirect
	}
	if !f.direct.CompareAndSwap(0, int32(fd)) { // another request was faster
		if fd != fileio.NoDirect {
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
