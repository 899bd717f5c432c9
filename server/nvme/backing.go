package nvme

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/fileio"
)

// Backing is where a namespace keeps its bytes. Its methods are called by many goroutines at once.
type Backing interface {
	Size() (int64, error)                    // in bytes
	ReadAt(p []byte, off int64) (int, error) // as io.ReaderAt
	WriteAt(p []byte, off int64) (int, error)
	// Sync makes stable what was written before. Once it has failed it never succeeds again: nobody knows what is lost.
	Sync() error
	// Zero makes n bytes at off read as zeros, and gives their space back if release is set and that is possible.
	Zero(off, n int64, release bool) error
}

// File is a Backing in a file or a block device.
type File struct {
	fd      int
	kind    fileio.Kind
	streams fileio.Streams

	begun  atomic.Uint64 // syncs, counted before the system call
	mu     sync.Mutex    // held during a sync
	failed error         // what a sync said once

	unsendable atomic.Bool // sendfile(2) failed
}

// OpenFile opens a file, or a block device, that exists. It belongs to this process alone (flock(2)) until Close, unless it is read-only.
func OpenFile(path string, readOnly bool) (*File, error) {
	flags, lock := unix.O_RDWR, unix.LOCK_EX
	if readOnly {
		flags, lock = unix.O_RDONLY, unix.LOCK_SH
	}
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := &File{fd: fd}
	if err := f.prepare(lock); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

func (f *File) prepare(lock int) error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return err
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFBLK {
		return errors.New("a namespace is kept in a regular file or a block device")
	}
	if err := unix.Flock(f.fd, lock|unix.LOCK_NB); err != nil {
		if err == unix.EWOULDBLOCK {
			return errors.New("another process serves it")
		}
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(f.fd, &fs); err != nil {
		return err
	}
	f.kind.Memory = fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC
	if lock == unix.LOCK_EX {
		fileio.DropPages(f.fd) // the process before may have been told that a sync failed
	}
	return nil
}

// Buffered is for package fileio, as are the next two.
func (f *File) Buffered() int { return f.fd }

// Direct tells that everything goes through the page cache.
func (f *File) Direct() int { return fileio.NoDirect }

// Streams is what is known of sequential transfers.
func (f *File) Streams() *fileio.Streams { return &f.streams }

// Close closes the file, which nothing may use any more.
func (f *File) Close() error { return unix.Close(f.fd) }

// Size is the length of the file, in bytes.
func (f *File) Size() (int64, error) { return unix.Seek(f.fd, 0, io.SeekEnd) }

// ReadAt reads through the page cache.
func (f *File) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.kind.Read(f, p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

// WriteAt writes to the page cache.
func (f *File) WriteAt(p []byte, off int64) (int, error) { return f.kind.Write(f, p, off) }

// Sync is fdatasync(2). There is one at a time, which serves all who came before it began.
func (f *File) Sync() error {
	covers := f.begun.Load() + 1 // the first sync that begins after this
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed != nil || f.begun.Load() >= covers {
		return f.failed
	}
	f.begun.Add(1)
	if err := fileio.Retry(fdatasync, f.fd); err != nil {
		f.failed = fmt.Errorf("fdatasync: %w", err)
	}
	return f.failed
}

// fdatasync is the system call; a test puts another in its place.
var fdatasync = unix.Fdatasync

// Zero lets the file system do it, or writes zeros where it cannot.
func (f *File) Zero(off, n int64, release bool) error {
	modes := []uint32{unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE}
	if release {
		modes = modes[1:]
	}
	for _, mode := range modes {
		err := fileio.Retry(func(fd int) error { return unix.Fallocate(fd, mode, off, n) }, f.fd)
		if err != unix.EOPNOTSUPP && err != unix.ENOSYS && err != unix.EINVAL {
			return err
		}
	}
	for n > 0 {
		m, err := f.WriteAt(zeros[:min(n, int64(len(zeros)))], off)
		if err != nil {
			return err
		}
		off, n = off+int64(m), n-int64(m)
	}
	return nil
}

var zeros [256 << 10]byte

// readNow fills p if what it reads is in memory.
func (f *File) readNow(p []byte, off int64) bool { return f.kind.ReadNow(f.fd, p, off) }
