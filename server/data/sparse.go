package data

import (
	"math"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/fileio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/layout"
)

const (
	// sparseTime is how long one call goes on before it answers with what it has done: a fence waits for it, and its
	// client takes a connection on which nothing comes for a dead one.
	sparseTime = 500 * time.Millisecond
	// sparseStep is the most that one system call reserves, in bytes.
	sparseStep = 256 << 20
)

// sparse runs a procedure of the program of that name.
func (s *Server) sparse(r *request, reply *oncrpc.Reply) {
	var res results
	switch sparse.Proc(r.call.Proc) {
	case sparse.ProcAllocate:
		res = call(r, s.allocate)
	case sparse.ProcDeallocate:
		res = call(r, s.deallocate)
	case sparse.ProcSeek:
		res = call(r, s.seek)
	default:
		reply.Stat = oncrpc.ProcUnavail
		r.finish(reply, nil)
		return
	}
	if res == nil {
		reply.Stat = oncrpc.GarbageArgs
	}
	r.finish(reply, res)
}

// sparseRange is the range of a call.
func sparseRange(a *sparse.RangeArgs) (off, end int64, col layout.Column, status wire.Status) {
	if a.Off > math.MaxInt64 || a.Length > math.MaxInt64-a.Off {
		return 0, 0, col, wire.ErrFBig
	}
	if a.Column.Count > 1 {
		col = layout.Column{Unit: int64(a.Column.Unit), Count: int(a.Column.Count), Index: int(a.Column.Index)}
	}
	return int64(a.Off), int64(a.Off + a.Length), col, wire.OK
}

// allocate reserves space for each part of the range and makes it stable.
func (s *Server) allocate(r *request, a *sparse.AllocateArgs) results {
	off, end, col, status := sparseRange(&a.RangeArgs)
	if status != wire.OK {
		return &sparse.RangeRes{Status: status}
	}
	var st unix.Stat_t
	f, status := s.openData(r, a.FH, mayWrite, &st)
	if status != wire.OK {
		return &sparse.RangeRes{Status: status}
	}
	defer s.closeData(f)
	var mode uint32
	if a.KeepSize {
		mode = unix.FALLOC_FL_KEEP_SIZE
	}
	done, err := eachPart(off, end, col, func(from, to int64) (int64, error) {
		to = from + min(to-from, sparseStep)
		return to, f.fallocate(mode, from, to)
	})
	if err == nil {
		err = s.stabilize(f)
	}
	return &sparse.RangeRes{Status: sparseStatus(err), Off: uint64(done)}
}

// deallocate punches holes into each part of the range and makes that stable.
//
// A part that covers what there is of the last block takes all of the block, since a hole cannot be less, and those who
// call know of the file's end only. Meanwhile nobody may write behind the end: hence the lock is held exclusively, and what
// clients on this host could write by is taken back.
func (s *Server) deallocate(r *request, a *sparse.RangeArgs) results {
	off, end, col, status := sparseRange(a)
	if status != wire.OK {
		return &sparse.RangeRes{Status: status}
	}
	f, err := s.get(a.FH)
	if err != nil {
		return &sparse.RangeRes{Status: statusOf(err)}
	}
	defer s.cache.put(f)
	done, err := s.punch(r, f, off, end, col)
	if err == nil {
		err = s.stabilize(f)
	}
	return &sparse.RangeRes{Status: sparseStatus(err), Off: uint64(done)}
}

func (s *Server) punch(r *request, f *file, off, end int64, col layout.Column) (done int64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var st unix.Stat_t
	if status := s.admit(r, f, mayWrite, &st); status != wire.OK {
		s.noteRefusal(r, status)
		return off, status
	}
	tail := blockEnd(st.Size, max(st.Blksize, sparseBlock))
	const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	return eachPart(off, end, col, func(from, to int64) (int64, error) {
		upTo := to
		if to >= st.Size && tail > to {
			var now unix.Stat_t // who gave something back may have written before
			if alone, _, err := s.alone(f); alone && err == nil && unix.Fstat(f.fd, &now) == nil && now.Size == st.Size {
				to = tail
			}
		}
		err := f.fallocate(mode, from, to)
		if err == unix.EFBIG { // the part reaches beyond what a file of this file system can have: no other one has anything
			upTo, err = end, nil
			if from < tail {
				err = f.fallocate(mode, from, tail)
			}
		}
		return upTo, err
	})
}

// blockEnd is the end of the block in which a file of the given size ends, or size if there is no such offset.
func blockEnd(size, block int64) int64 {
	if over := size % block; over > 0 && size <= math.MaxInt64-block {
		return size + block - over
	}
	return size
}

// fallocate is fallocate(2) of [from, to).
func (f *file) fallocate(mode uint32, from, to int64) error {
	f.sync.dirty.Store(true)
	return fileio.Retry(func(fd int) error { return unix.Fallocate(fd, mode, from, to-from) }, f.fd)
}

// sparseStatus is statusOf for system calls that a file system, or the kernel, may not have.
func sparseStatus(err error) wire.Status {
	if err == unix.ENOSYS {
		return wire.ErrNotSupp
	}
	return statusOf(err)
}

// eachPart has do deal with what the range has of the column, part after part. do returns how far it got. When it has taken
// long, eachPart stops: everything before done is done.
func eachPart(off, end int64, col layout.Column, do func(from, to int64) (int64, error)) (done int64, err error) {
	for began := time.Now(); off < end && time.Since(began) < sparseTime; {
		from, to := col.Next(off, end)
		if from == to {
			return end, nil
		}
		if to, err = do(from, to); err != nil {
			return off, err
		}
		off = to
	}
	return off, nil
}

// seek looks for data or a hole in what the range has of the column. The file's position, which it moves, is of no use to
// anybody.
func (s *Server) seek(r *request, a *sparse.SeekArgs) results {
	off, end, col, status := sparseRange(&a.RangeArgs)
	if status != wire.OK {
		return &sparse.SeekRes{Status: status}
	}
	var st unix.Stat_t
	f, status := s.openData(r, a.FH, mayRead, &st)
	if status != wire.OK {
		return &sparse.SeekRes{Status: status}
	}
	defer s.closeData(f)
	for began := time.Now(); off < end && time.Since(began) < sparseTime; {
		from, to := col.Next(off, end)
		if from == to {
			off = end
			break
		}
		at, err := seekFile(f.fd, from, st.Size, a.What)
		if err != nil {
			return &sparse.SeekRes{Status: sparseStatus(err)}
		}
		if at < to {
			return &sparse.SeekRes{Found: true, Off: uint64(at)}
		}
		off = min(at, end)
	}
	return &sparse.SeekRes{Off: uint64(off)}
}

// sparseBlock is what the last data of a file is rounded up to, in bytes. The striped file that has it may be longer; in a
// file of its own that long, the block would be data to its end.
const sparseBlock = 4 << 10

// seekFile is lseek(2) in a file of the given size, but that there is a hole behind the end; math.MaxInt64 for no data.
func seekFile(fd int, off, size int64, what sparse.What) (int64, error) {
	tail := blockEnd(size, sparseBlock)
	least := off
	if off >= size && off < tail { // what the rest of the block is, the last byte tells
		off = size - 1
	}
	whence := unix.SEEK_DATA
	if what == sparse.Hole {
		whence = unix.SEEK_HOLE
	}
	at, err := unix.Seek(fd, off, whence)
	switch {
	case err == unix.ENXIO && what == sparse.Hole:
		return least, nil
	case err == unix.ENXIO:
		return math.MaxInt64, nil
	case err == nil && what == sparse.Hole && at == size:
		at = tail
	}
	return max(at, least), err
}
