package data

import (
	"math/bits"
	"sync"
)

// buffer is a payload's memory. Its length is a power of two from minBuffer to maxIO.
type buffer struct{ b []byte }

const minBuffer = 4 << 10

// buffers has a pool for each length.
var buffers [11]sync.Pool

func sizeClass(n int) int { return bits.Len(uint(max(n, minBuffer)-1) / minBuffer) }

// bufferSize is the length of the buffer that getBuffer gives for n bytes.
func bufferSize(n int) int { return minBuffer << sizeClass(n) }

func getBuffer(n int) *buffer {
	i := sizeClass(n)
	if b, _ := buffers[i].Get().(*buffer); b != nil {
		return b
	}
	return &buffer{make([]byte, minBuffer<<i)}
}

func putBuffer(b *buffer) { buffers[sizeClass(len(b.b))].Put(b) }
