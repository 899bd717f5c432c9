package nvmetcp

import (
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// streamBuffer is the size of the receive buffer. A PDU without its data is at most 255 bytes.
	streamBuffer = 64 << 10
	// streamLean is how much is received into the buffer at once when large payloads are expected, since what lands there
	// of a payload must be copied: the header of a data PDU and what may come before it.
	streamLean = 96
	// leanSize is from which reads on the stream keeps payload out of its buffer.
	leanSize = 16 << 10
	// lowWaterMin and lowWaterMax bound how many bytes of a payload are waited for at once.
	lowWaterMin = 64 << 10
	lowWaterMax = 256 << 10
)

// stream takes PDUs from a socket. It belongs to the goroutine that reads the connection, except dst.
type stream struct {
	raw    syscall.RawConn
	step   func(fd uintptr) bool // readSome, made once so that using it does not allocate
	before func()                // called before the stream may have to wait
	lean   atomic.Int32          // more than 0: expect large payloads

	buf  []byte
	r, w int // buf[r:w] is received and not consumed

	// For step and from it.
	want   int // bytes that buf should hold from r on
	direct int // bytes to receive into dst first
	got    int // bytes received into dst, or dropped
	err    error
	lowat  int // SO_RCVLOWAT; 0 as it was

	digest bool   // whether sum is wanted
	sum    uint32 // digest of the payload so far

	mu  sync.Mutex // held across each readv, so that drop can take dst away
	dst []byte     // where the rest of the payload goes; nil: nowhere
	iov [2]unix.Iovec
}

func (s *stream) init(raw syscall.RawConn) {
	s.raw = raw
	s.step = s.readSome
	s.buf = make([]byte, streamBuffer)
}

// head returns the next k bytes, much less than the size of the buffer, without consuming them. The result is valid until
// the next use of the stream.
func (s *stream) head(k int) ([]byte, error) {
	for s.w-s.r < k {
		if s.r+k > len(s.buf) {
			s.w = copy(s.buf, s.buf[s.r:s.w])
			s.r = 0
		}
		s.want, s.direct = k, 0
		if err := s.recv(); err != nil {
			return nil, err
		}
	}
	return s.buf[s.r : s.r+k], nil
}

// consume drops k bytes that head has returned.
func (s *stream) consume(k int) { s.r += k }

// buffered is how many bytes were received and not consumed.
func (s *stream) buffered() int { return s.w - s.r }

// payload moves the next n bytes to dst, which has room for them, or drops them if dst is nil or becomes so. With digest
// set it computes their digest.
func (s *stream) payload(n int, digest bool) (sum uint32, err error) {
	s.digest, s.sum = digest, 0
	for n > 0 {
		k := n
		if have := s.w - s.r; have > 0 {
			k = min(k, have)
			b := s.buf[s.r : s.r+k]
			if digest {
				s.sum = wire.UpdateDigest(s.sum, b)
			}
			s.mu.Lock()
			if s.dst != nil {
				copy(s.dst, b)
				s.dst = s.dst[k:]
			}
			s.mu.Unlock()
			s.r += k
		} else {
			s.want, s.direct = 0, k
			if err := s.recv(); err != nil {
				return 0, err
			}
			k = s.got
		}
		n -= k
	}
	return s.sum, nil
}

// target says where the next payload goes. Until drop, or the payload's end, dst belongs to the stream.
func (s *stream) target(dst []byte) {
	s.mu.Lock()
	s.dst = dst
	s.mu.Unlock()
}

// drop takes the payload's place away; when it returns, it is not touched any more. Any goroutine may call it.
func (s *stream) drop() { s.target(nil) }

// recv waits until at least one byte was received. With direct set nothing lies in the buffer.
func (s *stream) recv() error {
	s.before()
	if s.r == s.w {
		s.r, s.w = 0, 0
	}
	if err := s.raw.Read(s.step); err != nil {
		return err
	}
	return s.err
}

// readSome is what RawConn.Read calls until it returns true, waiting for input between calls.
func (s *stream) readSome(fd uintptr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := len(s.buf)
	if s.lean.Load() > 0 {
		end = min(end, max(s.w+streamLean, s.r+s.want))
	}
	vec, first, spare := s.iov[:0], s.direct, s.buf[s.w:end]
	if s.direct > 0 {
		if s.dst != nil {
			vec = appendVec(vec, s.dst[:s.direct])
		} else {
			first = min(first, len(s.buf)) // dropped with the buffer as the bin, which is empty now
			vec = appendVec(vec, s.buf[:first])
			spare = nil
		}
	}
	if len(spare) > 0 {
		vec = appendVec(vec, spare)
	}
	for {
		n, _, errno := unix.Syscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(vec))), uintptr(len(vec)))
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			s.lowWater(int(fd))
			return false
		case errno != 0:
			s.err = errno
		case n == 0:
			s.err = io.EOF
		default:
			raceReadv(fd, vec, int(n))
			s.err = nil
			s.got = min(int(n), first)
			s.w += int(n) - s.got
			if s.digest && s.got > 0 {
				s.sum = wire.UpdateDigest(s.sum, unsafe.Slice(vec[0].Base, s.got))
			}
			if s.dst != nil {
				s.dst = s.dst[s.got:]
			}
		}
		clear(vec) // the addresses must not keep buffers alive
		return true
	}
}

// lowWater keeps the kernel from waking us for a payload piece by piece as its packets come.
func (s *stream) lowWater(fd int) {
	n := 1
	if s.direct >= lowWaterMin {
		n = min(s.direct, lowWaterMax)
	}
	if n != s.lowat && unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, n) == nil {
		s.lowat = n
	}
}
