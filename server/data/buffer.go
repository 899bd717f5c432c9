package data

import (
	"math/bits"
	"sync"

	"github.com/weftfs/weft/internal/iobuf"
)

// buffer is a payload's memory, aligned to a page. From maxPlain on its length is a page more than a power of two: a
// payload that begins inside a page, as its place in the file does, fits too.
type buffer struct{ b []byte }

const (
	minBuffer = 4 << 10
	maxPlain  = 64 << 10
)

// buffers has a pool for each length.
var buffers [11]sync.Pool

func sizeClass(n int) int {
	if n > maxPlain {
		n -= iobuf.PageSize
	}
	return bits.Len(uint(max(n, minBuffer)-1) / minBuffer)
}

// bufferSize is the length of the buffer that getBuffer gives for n bytes.
func bufferSize(n int) int { return classSize(sizeClass(n)) }

func classSize(i int) int {
	size := minBuffer << i
	if size >= maxPlain {
		size += iobuf.PageSize
	}
	return size
}

func getBuffer(n int) *buffer {
	i := sizeClass(n)
	if b, _ := buffers[i].Get().(*buffer); b != nil {
		return b
	}
	return &buffer{iobuf.Aligned(classSize(i))}
}

func putBuffer(b *buffer) { buffers[sizeClass(len(b.b))].Put(b) }
