package fileio

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

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

// Streams is what is known of the sequential transfers of a file through the page cache.
type Streams struct{ reading, writing stream }

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

func (k *Kind) readBuffered(f File, b []byte, off int64) (n int, err error) {
	n, err = Pread(f.Buffered(), b, off)
	k.HaveRead(f, off, n)
	return n, err
}

func (k *Kind) writeBuffered(f File, b []byte, off int64) (n int, err error) {
	n, err = Pwrite(f.Buffered(), b, off)
	k.HaveWritten(f, off, n)
	return n, err
}

// HaveRead notes that n bytes at off were read through the page cache by other means.
func (k *Kind) HaveRead(f File, off int64, n int) { k.leave(f, &f.Streams().reading, off, n) }

// HaveWritten notes that n bytes at off were written through it by other means.
func (k *Kind) HaveWritten(f File, off int64, n int) { k.leave(f, &f.Streams().writing, off, n) }

// leave drops pages that a stream has left behind. Should some be dirty still, their writing begins, and the next call drops
// them: hence it goes back over a step.
func (k *Kind) leave(f File, t *stream, off int64, n int) {
	if k.Memory {
		return
	}
	if from, to := t.advance(off, int64(n)); from < to {
		from = max(0, from-streamStep)
		unix.Fadvise(f.Buffered(), from, to-from, unix.FADV_DONTNEED) // no more than advice
	}
}
