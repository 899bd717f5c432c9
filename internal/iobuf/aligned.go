package iobuf

import "unsafe"

// Aligned returns n bytes of new memory that belongs to no pool, aligned to PageSize. The garbage collector frees it.
func Aligned(n int) []byte {
	b := make([]byte, n) // which large ones are by themselves
	if n > 0 && misaligned(b) > 0 {
		b = make([]byte, n+PageSize)
		b = b[PageSize-misaligned(b):][:n:n]
	}
	return b
}

// misaligned is how far behind a page's beginning b begins, in bytes.
func misaligned(b []byte) int { return int(uintptr(unsafe.Pointer(&b[0])) % PageSize) }
