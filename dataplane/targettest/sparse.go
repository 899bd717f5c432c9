package targettest

import (
	"context"
	"math"
	"syscall"

	"github.com/weftfs/weft/layout"
)

// BlockSize is that of a Server's holes, in bytes.
const BlockSize = 4096

// blockState is what a block of a data file is. A greater one takes the place of a smaller one.
type blockState uint8

const (
	holeBlock     blockState = iota
	reservedBlock            // takes up space, and is a hole to Seek
	dataBlock
)

// setBlocks makes the blocks that [off, end) touches at least st.
func setBlocks(b []blockState, off, end int64, st blockState) []blockState {
	if off >= end {
		return b
	}
	for n := (end + BlockSize - 1) / BlockSize; int64(len(b)) < n; {
		b = append(b, holeBlock)
	}
	for i := off / BlockSize; i*BlockSize < end; i++ {
		b[i] = max(b[i], st)
	}
	return b
}

// cutBlocks leaves those of the first size bytes.
func cutBlocks(b []blockState, size int64) []blockState {
	if size >= int64(len(b))*BlockSize {
		return b
	}
	return b[:(size+BlockSize-1)/BlockSize]
}

// punch makes [off, end) zeros, and the whole blocks in it holes, among them the last one if all that the file has of it
// is in the range.
func punch(data []byte, blocks []blockState, off, end int64) {
	size := int64(len(data))
	if off < size {
		clear(data[off:min(end, size)])
	}
	if end >= size {
		end = max(end, (size+BlockSize-1)/BlockSize*BlockSize)
	}
	for i := (off + BlockSize - 1) / BlockSize; i < int64(len(blocks)) && (i+1)*BlockSize <= end; i++ {
		blocks[i] = holeBlock
	}
}

// Foreign makes the server one that can neither reserve space nor tell holes from data.
func (s *Server) Foreign() { s.set(func() { s.foreign = true }) }

// Room sets how many more bytes can be reserved.
func (s *Server) Room(n int64) { s.set(func() { s.room = n }) }

// Taken is how many bytes of space a data file takes up.
func (s *Server) Taken(df *layout.DataFile) (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.files[string(df.Handles[0])].blocks {
		if b != holeBlock {
			n += BlockSize
		}
	}
	return n
}

// sparseError is a refusal of a call that is no Op.
type sparseError struct {
	call string
	err  syscall.Errno
}

func (e *sparseError) Error() string        { return e.call + ": " + e.err.Error() }
func (e *sparseError) Errno() syscall.Errno { return e.err }

// sparse runs one of the calls of dataplane.Sparser on each part of the range that the column has, with s.mu held, until
// it returns false.
func (t *Target) sparse(ctx context.Context, call string, df *layout.DataFile, col layout.Column, off, n int64, do func(f *memFile, from, to int64) bool) error {
	s := t.s
	wake := context.AfterFunc(ctx, func() { s.set(func() {}) })
	defer wake()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.paused && !t.closed && ctx.Err() == nil {
		s.changed.Wait()
	}
	f := s.files[string(df.Handles[0])]
	switch {
	case t.closed:
		return ErrClosed
	case ctx.Err() != nil:
		return ctx.Err()
	case s.foreign:
		return &sparseError{call, syscall.EOPNOTSUPP}
	case f == nil:
		return &sparseError{call, syscall.ESTALE}
	case off < 0 || n < 0 || off > math.MaxInt64-n || call == "ALLOCATE" && off > maxFile-n:
		return &sparseError{call, syscall.EFBIG}
	}
	for at := off; ; {
		from, to := col.Next(at, off+n)
		if from == to || !do(f, from, to) {
			return nil
		}
		at = to
	}
}

// Allocate implements dataplane.Sparser.
func (t *Target) Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, keepSize bool) error {
	full := false
	err := t.sparse(ctx, "ALLOCATE", df, col, off, n, func(f *memFile, from, to int64) bool {
		before := int64(len(f.blocks))
		for i := from / BlockSize; i*BlockSize < to; i++ {
			if i >= before || f.blocks[i] == holeBlock {
				if full = t.s.room < BlockSize; full {
					return false
				}
				t.s.room -= BlockSize
			}
		}
		f.blocks, f.stableBlocks = setBlocks(f.blocks, from, to, reservedBlock), setBlocks(f.stableBlocks, from, to, reservedBlock)
		if !keepSize {
			f.now, f.stable = extend(f.now, to), extend(f.stable, to)
		}
		return true
	})
	if err == nil && full {
		err = &sparseError{"ALLOCATE", syscall.ENOSPC}
	}
	return err
}

// Deallocate implements dataplane.Sparser.
func (t *Target) Deallocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64) error {
	return t.sparse(ctx, "DEALLOCATE", df, col, off, n, func(f *memFile, from, to int64) bool {
		punch(f.now, f.blocks, from, to)
		punch(f.stable, f.stableBlocks, from, to)
		return true
	})
}

// Seek implements dataplane.Sparser.
func (t *Target) Seek(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, hole bool) (at int64, found bool, err error) {
	err = t.sparse(ctx, "SEEK", df, col, off, n, func(f *memFile, from, to int64) bool {
		for at = from; at < to; at = (at/BlockSize + 1) * BlockSize {
			i := at / BlockSize
			if !hole && i >= int64(len(f.blocks)) {
				return false
			}
			if isHole := i >= int64(len(f.blocks)) || f.blocks[i] != dataBlock; isHole == hole {
				found = true
				return false
			}
		}
		return true
	})
	if !found {
		at = 0
	}
	return at, found, err
}
