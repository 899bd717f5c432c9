package nfs3

import (
	"crypto/tls"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/xdr"
)

// maxVec is how many slices go into one writev; IOV_MAX of Linux.
const maxVec = 1024

// sender writes calls to a socket, batch by batch. One goroutine at a time may use write and load: the one that set
// conn.writing, or the one it handed that to.
type sender struct {
	raw  syscall.RawConn
	tls  *tls.Conn             // instead of raw, if not nil
	step func(fd uintptr) bool // writeSome, made once so that using it does not allocate

	wait   bool   // write: whether to wait when the socket is full
	loaded uint64 // bytes put into batches since the connection was made
	err    error  // of the latest step

	pos atomic.Uint64 // bytes written since the connection was made; changed with mu

	mu   sync.Mutex // held across each writev, so that swap and sent see how far it came
	vec  [][]byte   // the batch
	next int        // the first of vec that is not wholly written
	iov  []unix.Iovec

	stage []byte // of writeTLS
}

func (s *sender) init(raw syscall.RawConn) {
	s.raw = raw
	s.step = s.writeSome
}

// load adds a call to the batch and returns false, changing nothing, if the batch is full. It is called between
// writes, with Target.mu held.
func (s *sender) load(r *rpc) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == len(s.vec) {
		clear(s.vec)
		s.vec, s.next = s.vec[:0], 0
	}
	if len(s.vec)+3 > maxVec {
		return false
	}
	s.loaded += uint64(r.wireLen())
	r.end = s.loaded
	s.vec = append(s.vec, r.head)
	if len(r.payload) > 0 {
		r.vec = len(s.vec)
		s.vec = append(s.vec, r.payload)
		if p := xdr.Padding(len(r.payload)); len(p) > 0 {
			s.vec = append(s.vec, p)
		}
	}
	return true
}

// write writes the batch until it is done or, unless wait, until the socket takes no more for now.
func (s *sender) write(wait bool) (done bool, err error) {
	if s.tls != nil {
		if !wait {
			return false, nil
		}
		return true, s.writeTLS()
	}
	s.wait, s.err = wait, nil
	if err := s.raw.Write(s.step); err != nil {
		return false, err
	}
	return s.next == len(s.vec), s.err
}

// writeSome is what RawConn.Write calls: with the socket known to be non-blocking, until it returns true, waiting for
// room between calls.
func (s *sender) writeSome(fd uintptr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.next < len(s.vec) {
		s.iov = s.iov[:0]
		for _, b := range s.vec[s.next:] {
			v := unix.Iovec{Base: unsafe.SliceData(b)}
			v.SetLen(len(b))
			s.iov = append(s.iov, v)
		}
		raceWritev(fd, s.iov)
		n, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(s.iov))), uintptr(len(s.iov)))
		clear(s.iov) // the addresses must not keep buffers alive
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			return !s.wait
		case errno != 0:
			s.err = errno
			return true
		case n == 0:
			s.err = io.ErrShortWrite
			return true
		}
		s.advance(int(n))
	}
	return true
}

// advance notes that n bytes more of the batch are written. mu is held.
func (s *sender) advance(n int) {
	s.pos.Add(uint64(n))
	for n > 0 {
		b := s.vec[s.next]
		if n < len(b) {
			s.vec[s.next] = b[n:]
			return
		}
		n -= len(b)
		s.vec[s.next] = nil
		s.next++
	}
}

// stageSize is how much is encrypted at once.
const stageSize = 128 << 10

// writeTLS writes the batch by way of memory of our own, since it blocks. What was copied there counts as written.
func (s *sender) writeTLS() error {
	if s.stage == nil {
		s.stage = make([]byte, 0, stageSize)
	}
	for {
		s.mu.Lock()
		s.stage = s.stage[:0]
		for _, b := range s.vec[s.next:] {
			s.stage = append(s.stage, b[:min(len(b), cap(s.stage)-len(s.stage))]...)
		}
		s.advance(len(s.stage))
		s.mu.Unlock()
		if len(s.stage) == 0 {
			return nil
		}
		if _, err := s.tls.Write(s.stage); err != nil {
			return err
		}
	}
}

// sent tells whether the call that ends at end is wholly written. It waits for a system call under way only if that
// can change the answer.
func (s *sender) sent(end uint64) bool {
	if end == 0 {
		return false
	}
	if s.pos.Load() >= end {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pos.Load() >= end
}

// swap makes what is not yet written of r's payload come from payload, which has the same bytes. Afterwards the old
// one is not touched any more.
func (s *sender) swap(r *rpc, payload []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(payload) == 0 || r.end == 0 || s.pos.Load() >= r.end {
		return
	}
	if left := len(s.vec[r.vec]); left > 0 {
		s.vec[r.vec] = payload[len(payload)-left:]
	}
}
