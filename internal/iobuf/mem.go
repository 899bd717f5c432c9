//go:build !race

package iobuf

import (
	"fmt"
	"runtime"
	"syscall"
)

// reserve returns n bytes of zeroed, page-aligned memory that lives as long as p does.
func reserve(p *Pool, n int64) ([]byte, error) {
	mem, err := syscall.Mmap(-1, 0, int(n), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes for buffers: mmap: %w", n, err)
	}
	// Buffers point to their pool, so as long as one is in use the mapping stays.
	runtime.AddCleanup(p, func(mem []byte) { syscall.Munmap(mem) }, mem)
	return mem, nil
}

// giveBack returns the pages of mem to the operating system; they read as zeros afterwards.
func giveBack(mem []byte) { syscall.Madvise(mem, syscall.MADV_DONTNEED) }

// poison marks freed memory; only worth its time under the race detector.
func poison([]byte) {}
