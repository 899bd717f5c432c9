package device

import (
	"encoding/binary"
	"math"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// Operations (enum fuse_opcode) that are handled here, or whose answers have a size that their request says.
const (
	opForget      = 2
	opRead        = 15
	opWrite       = 16
	opGetxattr    = 22
	opListxattr   = 23
	opInit        = 26
	opReaddir     = 28
	opInterrupt   = 36
	opIoctl       = 39
	opNotifyReply = 41
	opBatchForget = 42
	opReaddirplus = 44
)

// Sizes in linux/fuse.h, in bytes.
const (
	inHeaderSize  = 40 // struct fuse_in_header
	outHeaderSize = 16 // struct fuse_out_header
	headSize      = 80 // and struct fuse_read_in or fuse_write_in, which look alike
	writeOutSize  = 8  // struct fuse_write_out
	initInSize    = 24 // struct fuse_init_in from inHeaderSize on, without what is unused
	interruptSize = inHeaderSize + 8
	// minBuffer is FUSE_MIN_READ_BUFFER, the least that the kernel lets the device be read with.
	minBuffer = 8192
)

// head is the begin of a request.
type head [headSize]byte

// header is what every request has (struct fuse_in_header).
type header struct {
	opcode uint32
	unique uint64 // never 0
	node   uint64
	pid    uint32
}

// parseHeader decodes the header of a request of n bytes, of which h has the first.
func parseHeader(h *head, n int) (hdr header, ok bool) {
	e := binary.NativeEndian
	hdr = header{opcode: e.Uint32(h[4:]), unique: e.Uint64(h[8:]), node: e.Uint64(h[16:]), pid: e.Uint32(h[32:])}
	return hdr, n >= inHeaderSize && uint64(e.Uint32(h[0:])) == uint64(n) && hdr.unique != 0
}

// transferIn is what a READ or WRITE asks for (struct fuse_read_in, fuse_write_in).
type transferIn struct {
	fh         uint64
	off        int64
	size       int
	writeFlags uint32 // of a READ other ones, which do not matter
	flags      uint32
}

// parseTransfer decodes a READ or WRITE of n bytes whose header is sound.
func parseTransfer(h *head, n, maxSize int, write bool) (t transferIn, errno syscall.Errno) {
	e := binary.NativeEndian
	if n < headSize {
		return t, syscall.EIO
	}
	off, size := e.Uint64(h[48:]), e.Uint32(h[56:])
	switch {
	case uint64(size) > uint64(maxSize) || off > math.MaxInt64-uint64(size):
		return t, syscall.EINVAL
	case write && int(size) != n-headSize:
		return t, syscall.EIO
	}
	return transferIn{
		fh: e.Uint64(h[40:]), off: int64(off), size: int(size), writeFlags: e.Uint32(h[60:]), flags: e.Uint32(h[72:]),
	}, 0
}

// interrupted decodes an INTERRUPT: it is the number of the request that is meant, or 0.
func interrupted(h *head, n int) uint64 {
	if n < interruptSize {
		return 0
	}
	return binary.NativeEndian.Uint64(h[inHeaderSize:])
}

// makeInterrupt is an INTERRUPT of ours.
func makeInterrupt(unique uint64) []byte {
	e := binary.NativeEndian
	b := make([]byte, interruptSize)
	e.PutUint32(b[0:], interruptSize)
	e.PutUint32(b[4:], opInterrupt)
	e.PutUint64(b[8:], unique|1) // FUSE_INT_REQ_BIT
	e.PutUint64(b[inHeaderSize:], unique)
	return b
}

// answerSize is a bound on the answer to a request that is not handled here, or not ok if it asks for more than maxSize
// bytes, or than an extended attribute can have.
func answerSize(opcode uint32, h *head, n, maxSize int) (size int, ok bool) {
	var asked uint32
	at := 0
	switch opcode {
	case opReaddir, opReaddirplus:
		at = 56
	case opGetxattr, opListxattr:
		at = 40
	case opIoctl:
		at = 68
	}
	if at != 0 && n >= at+4 {
		asked = binary.NativeEndian.Uint32(h[at:])
	}
	const (
		fixed  = outHeaderSize + 288 // as go-fuse has it
		others = 8192                // among them a symbolic link's target, up to 4 KiB
		xattr  = 64 << 10            // XATTR_SIZE_MAX, XATTR_LIST_MAX
	)
	return max(others, fixed+int(asked)), uint64(asked) <= uint64(max(maxSize, xattr))
}

// answered reports whether the kernel waits for an answer to a request.
func answered(opcode uint32) bool {
	switch opcode {
	case opForget, opBatchForget, opInterrupt, opNotifyReply:
		return false
	}
	return true
}

// putOutHeader encodes the header of an answer of n bytes altogether.
func putOutHeader(b []byte, n int, errno syscall.Errno, unique uint64) {
	e := binary.NativeEndian
	e.PutUint32(b[0:], uint32(n))
	e.PutUint32(b[4:], uint32(-int32(errno)))
	e.PutUint64(b[8:], unique)
}

// putWriteOut encodes a struct fuse_write_out.
func putWriteOut(b []byte, n int) {
	binary.NativeEndian.PutUint32(b[0:], uint32(n))
	binary.NativeEndian.PutUint32(b[4:], 0)
}

// parseInit decodes what the kernel offers.
func parseInit(h *head, n int) (in fuse.InitIn, ok bool) {
	if n < inHeaderSize+initInSize-8 {
		return in, false
	}
	e := binary.NativeEndian
	in.Major, in.Minor = e.Uint32(h[40:]), e.Uint32(h[44:])
	in.MaxReadAhead, in.Flags = e.Uint32(h[48:]), e.Uint32(h[52:])
	if n >= inHeaderSize+initInSize-4 {
		in.Flags2 = e.Uint32(h[56:]) // since 7.36
	}
	return in, true
}
