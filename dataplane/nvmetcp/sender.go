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
	// maxVec is how many slices go into one writev; IOV_MAX of Linux.
	maxVec = 1024
	// maxHead is the most that a PDU has beside its data, in bytes; a TermReq counts whole.
	maxHead = wire.TermReqSize + wire.MaxTermReqData
	// batchHeads is the memory for headers and digests of one batch, in bytes.
	batchHeads = 256 * maxHead
	// batchBytes is how much payload goes into a batch, unless a single PDU has more. What is queued meanwhile, commands
	// above all, waits for no more than that.
	batchBytes = 1 << 20
)

// sender writes PDUs to a socket, batch by batch. One goroutine at a time may use it: the one that set queue.writing, or
// the one it handed that to. A batch is loaded with queue.mu held, when the one before it is written.
type sender struct {
	raw  syscall.RawConn
	step func(fd uintptr) bool // writeSome, made once so that using it does not allocate

	wait   bool   // write: whether to wait when the socket is full
	loaded uint64 // bytes put into batches since the connection was made
	err    error  // of the latest step
	heads  []byte // of the batch; its capacity does not change
	bytes  int    // payload of the batch
	seals  []seal // data digests that are not computed yet

	adjoins bool // the end of vec is the end of heads

	pos atomic.Uint64 // bytes written since the connection was made; changed with mu

	mu   sync.Mutex // held across each writev and digest, so that swap and sent see how far it came
	vec  [][]byte   // the batch
	next int        // the first of vec that is not wholly written
	iov  []unix.Iovec
}

// seal is a data digest to be computed.
type seal struct {
	payload int    // index in vec
	digest  []byte // where it goes
}

func (s *sender) init(raw syscall.RawConn) {
	s.raw = raw
	s.step = s.writeSome
	s.heads = make([]byte, 0, batchHeads)
}

// done tells whether the batch is written.
func (s *sender) done() bool { return s.next == len(s.vec) }

// begin starts a new batch.
func (s *sender) begin() {
	clear(s.vec)
	s.vec, s.next = s.vec[:0], 0
	s.heads, s.bytes, s.adjoins = s.heads[:0], 0, false
}

// room tells whether a PDU with so much payload fits into the batch.
func (s *sender) room(payload int) bool {
	return len(s.vec)+3 <= maxVec && len(s.heads)+maxHead <= cap(s.heads) && (s.bytes == 0 || s.bytes+payload <= batchBytes)
}

// head adds to the batch what was appended to heads: heads is now that slice.
func (s *sender) head(heads []byte) {
	at := len(s.heads)
	s.heads = heads
	s.loaded += uint64(len(heads) - at)
	if k := len(s.vec) - 1; s.adjoins {
		// What lies together goes as one slice.
		s.vec[k] = heads[at-len(s.vec[k]):]
		return
	}
	s.adjoins = true
	s.vec = append(s.vec, heads[at:])
}

// payload adds p, which is not empty, to the batch, and its digest if wanted. p must stay as it is until sent says that it was
// sent, or swap has taken it away.
func (s *sender) payload(p []byte, digest bool) {
	s.vec = append(s.vec, p)
	s.adjoins = false
	s.loaded += uint64(len(p))
	s.bytes += len(p)
	if digest {
		i, at := len(s.vec)-1, len(s.heads)
		s.head(s.heads[:at+wire.DigestSize])
		s.seals = append(s.seals, seal{i, s.heads[at:]})
	}
}

// write writes the batch until it is done or, unless wait, until the socket takes no more for now.
func (s *sender) write(wait bool) error {
	for _, d := range s.seals {
		s.mu.Lock()
		wire.AppendDigest(d.digest[:0], s.vec[d.payload])
		s.mu.Unlock()
	}
	clear(s.seals)
	s.seals = s.seals[:0]
	s.wait, s.err = wait, nil
	if err := s.raw.Write(s.step); err != nil {
		return err
	}
	return s.err
}

// writeSome is what RawConn.Write calls: with the socket known to be non-blocking, until it returns true, waiting for
// room between calls.
func (s *sender) writeSome(fd uintptr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.next < len(s.vec) {
		s.iov = s.iov[:0]
		for _, b := range s.vec[s.next:] {
			s.iov = appendVec(s.iov, b)
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

// sent tells whether everything up to end, a value of loaded, is written. It waits for a system call under way only if
// that can change the answer.
func (s *sender) sent(end uint64) bool {
	if s.pos.Load() >= end {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pos.Load() >= end
}

// swap makes what is not yet written of old come from private, which has the same bytes. Afterwards old is not touched any
// more. queue.mu is held.
func (s *sender) swap(old, private []byte) {
	if len(old) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	base := uintptr(unsafe.Pointer(unsafe.SliceData(old)))
	for i, b := range s.vec[s.next:] {
		// Another command may send from the same memory; it has the same bytes there then.
		at := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - base
		if len(b) > 0 && at < uintptr(len(old)) && len(b) <= len(old)-int(at) {
			s.vec[s.next+i] = private[at : int(at)+len(b)]
		}
	}
}

func appendVec(vec []unix.Iovec, b []byte) []unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return append(vec, v)
}
