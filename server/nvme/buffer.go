package nvme

import (
	"math/bits"
	"sync"

	"github.com/weftfs/weft/internal/iobuf"
)

// buffer is a payload's memory, aligned to a page; its length is a power of two, maxTransfer at most.
type buffer struct{ b []byte }

const minBuffer = 4 << 10

// buffers has a pool for each length.
var buffers [9]sync.Pool

func sizeClass(n int) int { return bits.Len(uint(max(n, minBuffer)-1) / minBuffer) }

// bufferSize is the length of the buffer that getBuffer gives for n bytes.
func bufferSize(n int) int { return minBuffer << sizeClass(n) }

func getBuffer(n int) *buffer {
	i := sizeClass(n)
	if b, _ := buffers[i].Get().(*buffer); b != nil {
		return b
	}
	return &buffer{iobuf.Aligned(minBuffer << i)}
}

func putBuffer(b *buffer) { buffers[sizeClass(len(b.b))].Put(b) }
