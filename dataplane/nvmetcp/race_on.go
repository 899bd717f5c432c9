//go:build race

package nvmetcp

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The race detector does not see what system calls made here do, as it does for those of package net: raceWritev goes
// before a writev and raceReadv after a readv of n bytes. They mark the memory touched, and order what comes before a
// write before what follows the read of it at the other end, if that is in this process. Package syscall orders reads and
// writes even of no bytes.

const raceEnabled = true

func raceWritev(fd uintptr, vec []unix.Iovec) {
	for _, v := range vec {
		runtime.RaceReadRange(unsafe.Pointer(v.Base), int(v.Len))
	}
	syscall.Write(int(fd), nil)
}

func raceReadv(fd uintptr, vec []unix.Iovec, n int) {
	syscall.Read(int(fd), nil)
	for _, v := range vec {
		k := min(n, int(v.Len))
		if k == 0 {
			return
		}
		runtime.RaceWriteRange(unsafe.Pointer(v.Base), k)
		n -= k
	}
}
