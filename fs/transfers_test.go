package fs

import (
	"encoding/binary"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/fs/device"
)

// loopRequest makes a request as linux/fuse.h has it.
func loopRequest(opcode uint32, node, unique uint64, args ...any) []byte {
	e := binary.NativeEndian
	b := make([]byte, 40)
	for _, a := range args {
		switch a := a.(type) {
		case uint32:
			b = e.AppendUint32(b, a)
		case uint64:
			b = e.AppendUint64(b, a)
		case []byte:
			b = append(b, a...)
		}
	}
	e.PutUint32(b[0:], uint32(len(b)))
	e.PutUint32(b[4:], opcode)
	e.PutUint64(b[8:], unique)
	e.PutUint64(b[16:], node)
	return b
}

// READs and WRITEs of the device loop go through everything of ours without an allocation. The other side of a socket pair
// is the kernel.
func TestTransferAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	defer r.closeFile(id, fh)
	r.write(id, 0, pattern(1, 64<<10))
	pair := must[[2]int](t)(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))
	kernel := pair[0]
	answer := make([]byte, 64<<10)
	call := func(request []byte) int {
		_, err := unix.Write(kernel, request)
		n, err2 := unix.Read(kernel, answer)
		if err != nil || err2 != nil || n < 16 || binary.NativeEndian.Uint32(answer[4:]) != 0 {
			t.Fatalf("%v, %v, answer %x", err, err2, answer[:max(n, 0)])
		}
		return n
	}
	const opInit, opRead, opWrite = 26, 15, 16
	must[int](t)(unix.Write(kernel, loopRequest(opInit, 0, 2, uint32(7), uint32(45), uint32(0), uint32(0), make([]byte, 48))))
	s := must[*device.Server](t)(device.New(device.Config{
		FD: pair[1], FileSystem: r.RawFileSystem(), Options: &fuse.MountOptions{Name: "test", MaxWrite: 64 << 10},
		Handler: transfers{r.FS}, Memory: 16 << 20,
	}))
	must[int](t)(unix.Read(kernel, answer))
	over := make(chan struct{})
	go func() {
		s.Serve()
		close(over)
	}()
	const faultyAllocs = 3 // for each request to a data server, by what the tests make those fail with
	const size = 4096
	transfer := func(opcode uint32, off uint64, data []byte) []byte {
		return loopRequest(opcode, r.node(id), 4, fh, off, uint32(size), uint32(0), uint64(0), uint32(unix.O_RDWR), uint32(0), data)
	}
	for _, c := range []struct {
		what    string
		request []byte
		answer  int
	}{
		{"READ", transfer(opRead, 8192, nil), 16 + size},
		{"WRITE", transfer(opWrite, 8192, pattern(2, size)), 16 + 8},
	} {
		if n := testing.AllocsPerRun(1000, func() {
			if n := call(c.request); n != c.answer {
				t.Fatalf("%s: an answer of %d bytes, want %d", c.what, n, c.answer)
			}
		}); n > faultyAllocs {
			t.Errorf("%v allocations for each %s, want the %v of package faultytest", n, c.what, faultyAllocs)
		}
	}
	unix.Close(kernel)
	<-over
	r.wantRead(id, 8192, size, pattern(2, size))
}
