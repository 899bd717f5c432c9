package nfs3

import (
	"crypto/tls"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/oncrpc"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

const (
	// streamBuffer is the size of the receive buffer, and so bounds a reply that has no payload of its own.
	streamBuffer = 64 << 10
	// streamLean is how much is received into the buffer at once when large payloads are expected, since what lands
	// there of a payload must be copied: as much as a READ reply has before its payload.
	streamLean = oncrpc.RecordMarkSize + wire.ReadReplyHeadAttrs
	// lowWaterMin and lowWaterMax bound how many bytes of a payload are waited for at once.
	lowWaterMin = 64 << 10
	lowWaterMax = 256 << 10
	// maxFragments bounds the fragments of a record. A server that cuts its replies into 9000 bytes, as some do,
	// needs 117 for 1 MiB.
	maxFragments = 4096
)

// stream takes records from a socket. It belongs to the goroutine that reads the connection, except dst.
//
// Between begin and the end of a record, frag is how many bytes of the record's current fragment lie ahead of r, those
// not received yet included. Marks of further fragments are cut out of the buffer as they come.
type stream struct {
	raw    syscall.RawConn
	tls    *tls.Conn             // instead of raw, if not nil
	step   func(fd uintptr) bool // readSome, made once so that using it does not allocate
	before func()                // called before the stream may have to wait
	lean   *atomic.Int32         // more than 0: expect large payloads
	began  time.Time
	heard  atomic.Int64 // when bytes came last, in nanoseconds after began
	since  atomic.Int64 // when the mark of the current record came, in the same way; 0 between records

	buf  []byte
	r, w int // buf[r:w] is received and not consumed
	frag int
	last bool // the current fragment is the record's last
	n    int  // fragments of this record so far
	size int  // bytes of them together
	max  int  // most bytes of a record

	// For step and from it.
	want   int // bytes that buf should hold from r on
	direct int // bytes to receive into dst first
	got    int // bytes received into dst, or dropped
	err    error
	lowat  int // SO_RCVLOWAT; 0 as it was

	mu  sync.Mutex // held across each readv, so that drop can take dst away
	dst []byte     // where the rest of the payload goes; nil: nowhere
	iov [2]unix.Iovec
}

func (s *stream) init(raw syscall.RawConn, maxRecord int) {
	s.raw = raw
	s.began = time.Now()
	s.step = s.readSome
	s.buf = make([]byte, streamBuffer)
	s.max = maxRecord
}

// begin waits for the mark of the next record.
func (s *stream) begin() error {
	s.frag, s.last, s.n, s.size = 0, false, 0, 0
	s.since.Store(0)
	if err := s.nextFragment(); err != nil {
		return err
	}
	s.since.Store(s.heard.Load())
	return nil
}

// nextFragment takes the mark behind the current fragment out of the stream and makes the next fragment part of it.
func (s *stream) nextFragment() error {
	if err := s.fill(s.frag + oncrpc.RecordMarkSize); err != nil {
		return err
	}
	at := s.r + s.frag
	n, last := oncrpc.ParseRecordMark(s.buf[at:s.w])
	s.n++
	s.size += n
	if s.n > maxFragments || s.size > s.max {
		return malformedf("%d bytes or more in %d fragments", s.size, s.n)
	}
	if s.frag == 0 {
		s.r += oncrpc.RecordMarkSize
	} else {
		copy(s.buf[at:], s.buf[at+oncrpc.RecordMarkSize:s.w])
		s.w -= oncrpc.RecordMarkSize
	}
	s.frag += n
	s.last = last
	return nil
}

// fill receives until k bytes, at most the size of the buffer, lie ahead of r.
func (s *stream) fill(k int) error {
	for s.w-s.r < k {
		if s.r+k > len(s.buf) {
			s.w = copy(s.buf, s.buf[s.r:s.w])
			s.r = 0
		}
		s.want, s.direct = k, 0
		if err := s.recv(); err != nil {
			return err
		}
	}
	return nil
}

// head returns the first k bytes of what is left of the record, or all of it if that is less, without consuming them.
// k is much less than the size of the buffer. The result is valid until the next use of the stream.
func (s *stream) head(k int) ([]byte, error) {
	for s.frag < k && !s.last {
		if err := s.nextFragment(); err != nil {
			return nil, err
		}
	}
	k = min(k, s.frag)
	if err := s.fill(k); err != nil {
		return nil, err
	}
	return s.buf[s.r : s.r+k], nil
}

// whole returns all that is left of a record without a payload, as head does.
func (s *stream) whole() ([]byte, error) {
	const most = streamBuffer - oncrpc.RecordMarkSize
	for !s.last && s.frag <= most {
		if err := s.nextFragment(); err != nil {
			return nil, err
		}
	}
	if s.frag > most {
		return nil, malformedf("%d bytes or more where no payload is expected", s.size)
	}
	return s.head(s.frag)
}

// left is how many bytes of the record there are, at most, after the next k.
func (s *stream) left(k int) int {
	if s.last {
		return s.frag - k
	}
	return s.max - (s.size - s.frag) - k
}

// consume drops k bytes that head has returned.
func (s *stream) consume(k int) {
	s.r += k
	s.frag -= k
}

// payload moves the next n bytes of the record to dst, which has room for them, or drops them if dst is nil or
// becomes so.
func (s *stream) payload(n int) error {
	for n > 0 {
		if s.frag == 0 {
			if s.last {
				return malformedf("record ends %d bytes before its payload", n)
			}
			if err := s.nextFragment(); err != nil {
				return err
			}
			continue
		}
		k := min(n, s.frag)
		if have := s.w - s.r; have > 0 {
			k = min(k, have)
			s.mu.Lock()
			if s.dst != nil {
				copy(s.dst, s.buf[s.r:s.r+k])
				s.dst = s.dst[k:]
			}
			s.mu.Unlock()
			s.r += k
		} else if s.tls != nil {
			if err := s.recv(); err != nil {
				return err
			}
			continue
		} else {
			s.want, s.direct = 0, k
			if err := s.recv(); err != nil {
				return err
			}
			k = s.got
		}
		n -= k
		s.frag -= k
	}
	return nil
}

// skip drops what is left of the record.
func (s *stream) skip() error {
	s.drop()
	for {
		if err := s.payload(s.frag); err != nil {
			return err
		}
		if s.last {
			return nil
		}
		if err := s.nextFragment(); err != nil {
			return err
		}
	}
}

// target says where the payload of the record goes. Until drop, or the payload's end, dst belongs to the stream.
func (s *stream) target(dst []byte) {
	s.mu.Lock()
	s.dst = dst
	s.mu.Unlock()
}

// drop takes the payload's place away; when it returns, it is not touched any more. Any goroutine may call it.
func (s *stream) drop() { s.target(nil) }

// lastHeard is when bytes came last. Any goroutine may ask.
func (s *stream) lastHeard() time.Time { return s.began.Add(time.Duration(s.heard.Load())) }

// unfinished is when the record began that is not complete yet; ok is false if there is none. Any goroutine may ask.
func (s *stream) unfinished() (since time.Time, ok bool) {
	n := s.since.Load()
	return s.began.Add(time.Duration(n)), n != 0
}

// recv waits until at least one byte was received. With direct set nothing lies in the buffer.
func (s *stream) recv() error {
	s.before()
	if s.r == s.w {
		s.r, s.w = 0, 0
	}
	if s.tls != nil {
		// Into our own memory alone, since it blocks: the payload is copied from there.
		var n int
		n, s.err = s.tls.Read(s.buf[s.w:])
		if s.w += n; n > 0 {
			s.err = nil // one that lasts comes again
		}
	} else if err := s.raw.Read(s.step); err != nil {
		return err
	}
	if s.err == nil {
		s.heard.Store(int64(time.Since(s.began)))
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
			if s.dst != nil {
				s.dst = s.dst[s.got:]
			}
		}
		clear(vec) // the addresses must not keep buffers alive
		return true
	}
}

// lowWater keeps the kernel from waking us for a payload piece by piece as its packets come. On a slow link a piece must come
// well before the connection counts as silent.
func (s *stream) lowWater(fd int) {
	n := 1
	if s.direct >= lowWaterMin {
		n = min(s.direct, lowWaterMax)
	}
	if n != s.lowat && unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, n) == nil {
		s.lowat = n
	}
}

func appendVec(vec []unix.Iovec, b []byte) []unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return append(vec, v)
}
