package device

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/iobuf"
)

// Config of a Server.
type Config struct {
	// FD is the FUSE device with a mount whose INIT has not been read. It is the Server's from New on.
	FD int
	// FileSystem serves everything but READ and WRITE; what it is told of those is not used.
	FileSystem fuse.RawFileSystem
	// Options are those of fuse.NewServer, as far as they concern the protocol. MaxWrite is set, and not more than the
	// kernel allows.
	Options *fuse.MountOptions
	Handler Handler
	// Memory for READs, and as much again for WRITEs, in bytes. Default 512 MiB; it is at least enough for a few
	// requests of MaxWrite.
	Memory int64
	Log    *slog.Logger // nil means slog.Default()
}

const (
	defaultMemory = 512 << 20
	// smallWrite is up to which size a WRITE's data is copied, so that the buffer it came in can be used again at once.
	smallWrite = 64 << 10
	// maxBatch bounds the requests of a batch.
	maxBatch = 64
	// maxReaders bounds how many large WRITEs are read or started at once.
	maxReaders = 4
	// watchInterval is how often those are looked for who have left requests behind, while the device is not read or not
	// there any more.
	watchInterval = 100 * time.Millisecond
)

// Server serves one mount.
type Server struct {
	cfg      Config
	handler  Handler
	log      *slog.Logger
	protocol *fuse.ProtocolServer
	kernel   fuse.InitIn
	fd       int
	poller   syscall.RawConn // waits for requests; nil: poll(2) does
	file     *os.File        // what poller belongs to
	readers  int

	turn     chan struct{} // has an element while nobody reads the device
	expected int           // bytes of data of the next large WRITE; of whoever has the turn
	reading  sync.WaitGroup
	active   sync.WaitGroup // what has not been answered
	reads    *iobuf.Pool
	writes   *iobuf.Pool
	starving atomic.Int32  // readers that wait for memory
	memory   chan struct{} // gets an element when memory for WRITEs became free while any of them waits

	mu    sync.Mutex
	all   []*Request // every one there is
	spare []*Request // those not in use
	calls map[uint64]struct{}

	queueMu   sync.Mutex
	waiting   []*Request // READs without memory, in order; abandoned ones are nil
	queued    atomic.Int32
	admitting bool
}

// New answers the kernel's INIT. If it fails the device is closed.
func New(cfg Config) (*Server, error) {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	s := &Server{
		cfg: cfg, handler: cfg.Handler, log: cfg.Log, fd: cfg.FD,
		protocol: fuse.NewProtocolServer(cfg.FileSystem, cfg.Options),
		readers:  min(max(runtime.GOMAXPROCS(0), 2), maxReaders),
		turn:     make(chan struct{}, 1), memory: make(chan struct{}, 1), calls: map[uint64]struct{}{},
	}
	if err := s.start(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *Server) start() (err error) {
	memory := max(s.cfg.Memory, int64(s.bufferSize())*int64(s.readers+4))
	if s.reads, err = iobuf.New(memory); err != nil {
		return err
	}
	if s.writes, err = iobuf.New(memory); err != nil {
		return err
	}
	if size := s.bufferSize(); size > s.writes.MaxBuf() {
		return fmt.Errorf("requests of %d bytes: there are no buffers of more than %d", size, s.writes.MaxBuf())
	}
	if err := s.init(); err != nil {
		return err
	}
	if err := unix.SetNonblock(s.fd, true); err != nil {
		return fmt.Errorf("FUSE device: %w", err)
	}
	if runtime.GOMAXPROCS(0) == 1 {
		s.file = os.NewFile(uintptr(s.fd), "/dev/fuse")
		s.poller, err = s.file.SyscallConn()
	}
	return err
}

func (s *Server) close() error {
	if s.file != nil {
		return s.file.Close()
	}
	return unix.Close(s.fd)
}

// bufferSize is how much is read behind the head of a request.
func (s *Server) bufferSize() int { return max(s.cfg.Options.MaxWrite, minBuffer) }

// init reads and answers the first request.
func (s *Server) init() error {
	in := input{s: s, buf: s.writes.Get(s.bufferSize())}
	defer in.buf.Release()
	for {
		in.receive()
		if !errors.Is(in.err, unix.EINTR) {
			break
		}
	}
	hdr, ok := parseHeader(&in.head, in.n)
	switch {
	case in.err != nil:
		return fmt.Errorf("FUSE device: %w", in.err)
	case !ok || hdr.opcode != opInit:
		return fmt.Errorf("FUSE device: the first request is no INIT: %d bytes, operation %d", in.n, hdr.opcode)
	}
	if s.kernel, ok = parseInit(&in.head, in.n); !ok {
		return fmt.Errorf("FUSE device: an INIT of %d bytes", in.n)
	}
	out := make([]byte, minBuffer)
	n, status := s.protocol.HandleRequest(in.bytes(), [][]byte{out})
	if !status.Ok() || n < outHeaderSize {
		return fmt.Errorf("FUSE device: INIT of version %d.%d: %v", s.kernel.Major, s.kernel.Minor, status)
	}
	if _, err := unix.Write(s.fd, out[:n]); err != nil {
		return fmt.Errorf("FUSE device: answer to INIT: %w", err)
	}
	return nil
}

// KernelSettings is what the kernel has said of itself.
func (s *Server) KernelSettings() *fuse.InitIn { return &s.kernel }

// Serve serves the mount until it is gone and everything was answered. It is called once.
func (s *Server) Serve() {
	s.turn <- struct{}{}
	for range s.readers {
		s.reading.Add(1)
		go s.read() // ends when the mount is gone
	}
	s.reading.Wait()
	finished := make(chan struct{})
	go func() { // ends with what is in flight
		s.active.Wait()
		close(finished)
	}()
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		s.watchAll(true)
		for _, unique := range s.callsInFlight() {
			s.protocol.HandleRequest([][]byte{makeInterrupt(unique)}, [][]byte{make([]byte, minBuffer)})
		}
		select {
		case <-finished:
			if err := s.close(); err != nil {
				s.log.Warn("FUSE device", "err", err)
			}
			return
		case <-tick.C:
		}
	}
}

// input is what a reader reads into.
type input struct {
	s     *Server
	head  head
	buf   *iobuf.Buf
	first *iobuf.Buf // nil, or in place of the first bytes of buf: memory of Handler.WriteBuffer
	vec   [3][]byte
	poll  [1]unix.PollFd
	step  func(fd uintptr) bool // for the poller; made once so that using it does not allocate

	n   int // bytes of the request
	err error
}

// receive reads a request, if there is one.
func (in *input) receive() {
	s := in.s
	if in.first == nil && s.expected > 0 {
		in.first = s.handler.WriteBuffer(s.expected)
	}
	vec := append(in.vec[:0], in.head[:], in.buf.Bytes())
	if in.first != nil {
		n := len(in.first.Bytes())
		vec = append(vec[:1], in.first.Bytes(), in.buf.Bytes()[n:])
	}
	in.n, in.err = unix.Readv(s.fd, vec)
	if errors.Is(in.err, unix.EAGAIN) {
		in.forget()
	}
}

// forget gives first back.
func (in *input) forget() {
	if in.first != nil {
		in.first.Release()
		in.first = nil
	}
}

// payload is the first n bytes behind the head.
func (in *input) payload(n int) []byte {
	if in.first != nil {
		b := in.first.Bytes()
		if n <= len(b) {
			return b[:n]
		}
		copy(in.buf.Bytes(), b)
	}
	return in.buf.Bytes()[:n]
}

// bytes is the request.
func (in *input) bytes() [][]byte {
	if in.n <= headSize {
		return [][]byte{in.head[:in.n]}
	}
	return [][]byte{in.head[:], in.payload(in.n - headSize)}
}

// await waits until there may be a request; with the poller it receives it, too.
func (in *input) await() {
	s := in.s
	if s.poller != nil {
		if err := s.poller.Read(in.step); err != nil {
			in.err = err
		}
		return
	}
	in.poll[0] = unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN}
	_, _ = unix.Poll(in.poll[:], -1) // receive finds out what is wrong
	in.receive()
}

// read is a reader.
func (s *Server) read() {
	defer s.reading.Done()
	in := &input{s: s}
	in.step = func(uintptr) bool {
		in.receive()
		return !errors.Is(in.err, unix.EAGAIN)
	}
	in.buf = s.receiveBuffer()
	defer func() {
		in.buf.Release() // a reader ends with its turn, and has a buffer then
		in.forget()
	}()
	<-s.turn
	defer func() { s.turn <- struct{}{} }()
	b := batch{s: s}
	for {
		in.receive()
		if errors.Is(in.err, unix.EAGAIN) {
			b.end()
			in.await()
		}
		switch {
		case in.err == nil && in.n > 0:
		case errors.Is(in.err, unix.EAGAIN), errors.Is(in.err, unix.EINTR), errors.Is(in.err, unix.ENOENT):
			continue // ENOENT: the request went away while it was read
		default:
			b.end()
			// The mount is gone (ENODEV) or the connection was aborted.
			if in.err != nil && !errors.Is(in.err, unix.ENODEV) && !errors.Is(in.err, unix.ECONNABORTED) {
				s.log.Error("the FUSE device cannot be read", "err", in.err)
			}
			return
		}
		if r := b.take(in); r != nil {
			b.end()
			s.turn <- struct{}{}
			r.begin()
			s.handler.Flush()
			if in.buf == nil {
				in.buf = s.receiveBuffer()
			}
			<-s.turn
		} else if b.taken++; b.taken == maxBatch {
			b.end()
		}
	}
}

// batch is what a reader has started since it flushed.
type batch struct {
	s       *Server
	taken   int  // requests
	started bool // READs or WRITEs are among them
	spawned bool // others were given to goroutines
}

// end sends what was started, and lets goroutines go on that the reader would hold up.
func (b *batch) end() {
	yield := b.spawned || b.s.poller != nil
	if b.started {
		b.s.handler.Flush()
	}
	b.taken, b.started, b.spawned = 0, false, false
	if yield {
		// They are on this thread's list, and it is about to sleep in a system call.
		runtime.Gosched()
	}
}

// take takes the request that was received. It starts it, or hands it over, but returns a WRITE that keeps what it was read
// into.
func (b *batch) take(in *input) (large *Request) {
	s := b.s
	hdr, ok := parseHeader(&in.head, in.n)
	if !ok {
		head := in.head[:min(in.n, headSize)]
		s.log.Error("the kernel has sent something that is no request", "bytes", in.n, "head", fmt.Sprintf("%x", head))
		return nil
	}
	switch hdr.opcode {
	case opRead, opWrite:
		r, errno := s.transfer(&hdr, in)
		switch {
		case errno != 0:
			s.refuse(&hdr, errno)
			return nil
		case r == nil:
			return nil // it waits for memory
		case r.large:
			return r
		}
		r.begin()
		b.started = true
	case opInterrupt:
		if s.interrupt(interrupted(&in.head, in.n)) {
			return nil
		}
		s.call(&hdr, in)
		b.spawned = true
	case opForget, opBatchForget:
		s.protocol.HandleRequest(in.bytes(), nil)
	default:
		s.call(&hdr, in)
		b.spawned = true
	}
	return nil
}

// transfer makes a Request of what was received and gives it memory, or queues it if there is none. It returns it with
// Request.starting held.
func (s *Server) transfer(hdr *header, in *input) (*Request, syscall.Errno) {
	write := hdr.opcode == opWrite
	t, errno := parseTransfer(&in.head, in.n, s.cfg.Options.MaxWrite, write)
	if errno != 0 {
		return nil, errno
	}
	r := s.get()
	r.starting.Lock()
	r.Write, r.Node, r.Fh, r.Off, r.Pid, r.Flags = write, hdr.node, t.fh, t.off, hdr.pid, t.flags
	r.WriteFlags, r.size, r.number = t.writeFlags, t.size, hdr.unique
	r.holders.Store(2)
	s.active.Add(1)
	queue := false
	switch {
	case t.size == 0:
	case write:
		r.take(in, t.size)
	default:
		if s.queued.Load() == 0 {
			r.buf = s.reads.Get(t.size)
		}
		if queue = r.buf == nil; !queue {
			r.Data = r.buf.Bytes()
		}
	}
	r.mu.Lock()
	r.unique, r.answered = hdr.unique, false
	r.mu.Unlock()
	if queue {
		s.enqueue(r)
		return nil, 0
	}
	return r, 0
}

// take gives a WRITE of n bytes its data: a copy if that is small, otherwise the buffer that it is in.
func (r *Request) take(in *input, n int) {
	s := r.s
	data := in.payload(n)
	if n <= smallWrite {
		if r.buf = s.writes.Get(n); r.buf != nil {
			r.Data = r.buf.Bytes()
			copy(r.Data, data)
			return
		}
	}
	r.Data, r.large = data, true
	// A stream's WRITEs are mostly of the same size, and an occasional smaller one does not change that.
	s.expected = max(n, s.expected-s.expected/8)
	if in.first == nil || n > len(in.first.Bytes()) {
		r.buf, in.buf = in.buf, nil
		in.forget() // it was too small
		return
	}
	in.first.Shrink(n)
	r.buf, r.Buf, in.first = in.first, in.first, nil
}

// refuse answers a request that makes no sense.
func (s *Server) refuse(hdr *header, errno syscall.Errno) {
	s.log.Error("the kernel has sent a request that is not understood", "operation", hdr.opcode, "node", hdr.node, "answer", errno)
	if answered(hdr.opcode) {
		s.fail(hdr.unique, errno)
	}
}

// fail answers with an error.
func (s *Server) fail(unique uint64, errno syscall.Errno) {
	out := make([]byte, outHeaderSize)
	putOutHeader(out, len(out), errno, unique)
	s.send([][]byte{out})
}

// send writes an answer to the device. It may find the request gone (ENOENT), or the mount.
func (s *Server) send(vec [][]byte) {
	for {
		_, err := unix.Writev(s.fd, vec)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ECONNABORTED):
		case errors.Is(err, unix.EINTR):
			continue
		default:
			s.log.Warn("the kernel does not take an answer", "err", err)
		}
		return
	}
}

// get returns a Request that is not in use.
func (s *Server) get() *Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.spare); n > 0 {
		r := s.spare[n-1]
		s.spare = s.spare[:n-1]
		return r
	}
	r := &Request{s: s}
	r.transfer = s.handler.NewTransfer(r)
	s.all = append(s.all, r)
	return r
}

func (s *Server) put(r *Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spare = append(s.spare, r)
}

// requests lists all of them, used or not.
func (s *Server) requests() []*Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[:len(s.all):len(s.all)]
}

// interrupt looks after the caller of a READ or WRITE, and reports whether unique is one.
func (s *Server) interrupt(unique uint64) bool {
	if unique == 0 {
		return true
	}
	for _, r := range s.requests() {
		if r.watch(unique, true) {
			return true
		}
	}
	return false
}

// watchAll looks after the callers of all READs and WRITEs.
func (s *Server) watchAll(interrupted bool) {
	for _, r := range s.requests() {
		r.mu.Lock()
		unique := r.unique
		r.mu.Unlock()
		if unique != 0 {
			r.watch(unique, interrupted)
		}
	}
}
