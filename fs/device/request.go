package device

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/weftfs/weft/internal/iobuf"
)

// Handler serves READs and WRITEs.
type Handler interface {
	// NewTransfer returns what serves r each time it is used. That is called seldom, as requests are used again.
	NewTransfer(r *Request) Transfer
	// Flush ends a batch of requests that were started.
	Flush()
	// WriteBuffer returns n bytes of memory that the Handler would like the data of a WRITE to be in, or nil.
	WriteBuffer(n int) *iobuf.Buf
	// Abandoned waits until either the request is finished or nobody is left who wants it, and reports the latter. If not
	// interrupted, nothing has happened so far that would say so.
	Abandoned(finished <-chan struct{}, pid uint32, interrupted bool) bool
}

// Transfer serves one Request.
type Transfer interface {
	// Start starts what the Request says and never blocks. Request.Done is called exactly once for each Start, by any
	// goroutine, possibly before Start returns.
	Start()
	// Detach makes Request.Data free: when it returns nothing uses it any more. Done is called all the same, perhaps later.
	// It waits for no server.
	Detach()
}

// Request is a READ or WRITE. From Start until Done the Handler has it and its Data.
type Request struct {
	Write bool
	Node  uint64 // of the file
	Fh    uint64
	Off   int64
	Data  []byte // a READ's is to be filled, a WRITE's to be written
	// Buf begins with Data if that is in memory of Handler.WriteBuffer, and is nil otherwise. The Handler may keep it by a
	// reference; Data does not change before the last Release.
	Buf   *iobuf.Buf
	Pid   uint32 // the thread that asks; 0 = it cannot be seen from here
	Flags uint32 // of open(2)
	// WriteFlags are a WRITE's (FUSE_WRITE_CACHE and others).
	WriteFlags uint32

	s        *Server
	transfer Transfer
	size     int        // bytes that a READ asks for
	buf      *iobuf.Buf // holds Data
	large    bool       // a WRITE that has kept what it was read into
	waits    bool       // for memory, in Server.waiting; guarded by Server.queueMu
	out      [outHeaderSize + writeOutSize]byte
	vec      [2][]byte
	number   uint64 // unique, for the answer
	// holders are those who still touch the request: whoever starts it, whoever calls Done, and a watcher.
	holders atomic.Int32
	// starting is held until the request was started.
	starting sync.Mutex

	mu       sync.Mutex
	unique   uint64        // 0: not in use
	answered bool          // or about to be
	finished chan struct{} // closed when it is answered; nil while nobody watches
}

// Done ends the request, with the number of bytes that were read or written, or an error.
func (r *Request) Done(n int, errno syscall.Errno) {
	if r.claim() {
		r.answer(n, errno)
	}
	r.drop()
}

// claim is what one must do before answering: it returns true once.
func (r *Request) claim() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.answered {
		return false
	}
	r.answered = true
	if r.finished != nil {
		close(r.finished)
	}
	return true
}

// answer tells the kernel. The payload of a READ is copied by the kernel only.
func (r *Request) answer(n int, errno syscall.Errno) {
	r.vec[0] = r.out[:outHeaderSize]
	vec := r.vec[:1]
	size := outHeaderSize
	switch {
	case errno != 0:
	case r.Write:
		r.vec[0] = r.out[:]
		putWriteOut(r.out[outHeaderSize:], n)
		size += writeOutSize
	case n > 0:
		r.vec[1] = r.Data[:n]
		vec = r.vec[:2]
		size += n
	}
	putOutHeader(r.out[:], size, errno, r.number)
	r.s.send(vec)
	r.vec[1] = nil
	r.s.active.Done()
}

// drop ends a hold; the last one makes the request and its memory free.
func (r *Request) drop() {
	if r.holders.Add(-1) > 0 {
		return
	}
	r.mu.Lock()
	r.unique = 0
	r.mu.Unlock()
	r.free()
	r.Data, r.Buf, r.large, r.finished = nil, nil, false, nil
	r.s.put(r)
}

// free gives the memory back.
func (r *Request) free() {
	if r.buf == nil {
		return
	}
	r.buf.Release()
	r.buf = nil
	r.s.freed(r.Write)
}

// begin starts the request. starting is held; begin releases it.
func (r *Request) begin() {
	r.transfer.Start()
	r.starting.Unlock()
	r.drop()
}

// watch begins to look after the caller of the request unique, if that is this one, and reports whether it is. Who watches
// is a goroutine that ends with the request.
func (r *Request) watch(unique uint64, interrupted bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unique != unique {
		return false
	}
	if !r.answered && r.finished == nil {
		r.finished = make(chan struct{})
		r.holders.Add(1)
		go r.lookAfter(r.finished, interrupted)
	}
	return true
}

func (r *Request) lookAfter(finished <-chan struct{}, interrupted bool) {
	defer r.drop()
	if !r.s.handler.Abandoned(finished, r.Pid, interrupted) {
		return
	}
	if r.s.unqueue(r) {
		r.starting.Unlock()
		r.drop() // for whoever would have started it
		r.Done(0, syscall.EINTR)
		return
	}
	r.starting.Lock()
	//lint:ignore SA2001 it waits until the request was started
	r.starting.Unlock()
	r.transfer.Detach()
	if r.claim() {
		r.answer(0, syscall.EINTR)
		r.free()
	}
}
