package posix

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Calls that package unix does not have, or has in another form than the kernel's.

func addr[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// raw does a call that must work.
func raw(number, a, b, c uintptr) {
	if _, _, e := unix.RawSyscall(number, a, b, c); e != 0 {
		try(e)
	}
}

func errnoOf(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}
