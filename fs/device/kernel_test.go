package device

import (
	"bytes"
	"encoding/binary"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/internal/waittest"
)

const (
	testMaxWrite = 128 << 10
	patience     = time.Minute
)

// kernel is the other side of the device: messages of a socket pair begin and end like requests and answers.
type kernel struct {
	t      testing.TB
	s      *Server
	h      *testHandler
	conn   *os.File
	served chan struct{}
	last   uint64
}

// answer is what the kernel was told.
type answer struct {
	unique uint64
	errno  syscall.Errno
	data   []byte
}

func newKernel(t testing.TB, change ...func(*Config)) *kernel {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	ok(t, err)
	ok(t, unix.SetNonblock(pair[0], true)) // so that os.File has deadlines
	k := &kernel{t: t, h: newTestHandler(), conn: os.NewFile(uintptr(pair[0]), "kernel"), served: make(chan struct{})}
	cfg := Config{
		FD: pair[1], FileSystem: fuse.NewDefaultRawFileSystem(), Handler: k.h, Memory: 16 << 20,
		Options: &fuse.MountOptions{Name: "test", MaxWrite: testMaxWrite},
	}
	for _, f := range change {
		f(&cfg)
	}
	init := make([]byte, 64)
	for i, v := range []uint32{7, 45, 1 << 20, 1<<0 | 1<<5} { // version, read-ahead, ASYNC_READ and BIG_WRITES
		binary.NativeEndian.PutUint32(init[4*i:], v)
	}
	k.send(k.message(opInit, init))
	k.s, err = New(cfg)
	ok(t, err)
	if a := k.receive(); a.unique != k.last || a.errno != 0 || len(a.data) < 24 {
		t.Fatalf("answer to INIT: %+v", a)
	}
	go func() {
		k.s.Serve()
		close(k.served)
	}()
	t.Cleanup(k.unmount)
	return k
}

// unmount is the end of the mount.
func (k *kernel) unmount() {
	k.conn.Close()
	select {
	case <-k.served:
	case <-time.After(patience):
		k.t.Fatal("Serve does not return")
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// message makes a request with the next number.
func (k *kernel) message(opcode uint32, args []byte) []byte {
	k.last += 2
	e := binary.NativeEndian
	b := make([]byte, inHeaderSize, inHeaderSize+len(args))
	e.PutUint32(b[0:], uint32(inHeaderSize+len(args)))
	e.PutUint32(b[4:], opcode)
	e.PutUint64(b[8:], k.last)
	e.PutUint64(b[16:], 77) // node
	e.PutUint32(b[32:], 88) // thread
	return append(b, args...)
}

// transfer makes a READ or, with data, a WRITE.
func (k *kernel) transfer(opcode uint32, off uint64, size int, data []byte) []byte {
	e := binary.NativeEndian
	b := make([]byte, headSize-inHeaderSize)
	e.PutUint64(b[0:], 99) // handle
	e.PutUint64(b[8:], off)
	e.PutUint32(b[16:], uint32(size))
	e.PutUint32(b[20:], fuse.WRITE_KILL_SUIDGID)
	e.PutUint32(b[32:], unix.O_NOATIME)
	return k.message(opcode, append(b, data...))
}

func (k *kernel) send(b []byte) {
	k.t.Helper()
	k.conn.SetWriteDeadline(time.Now().Add(patience))
	_, err := k.conn.Write(b)
	ok(k.t, err)
}

// read and write send a request and return its number.
func (k *kernel) read(off uint64, size int) uint64 {
	k.t.Helper()
	k.send(k.transfer(opRead, off, size, nil))
	return k.last
}

func (k *kernel) write(off uint64, data []byte) uint64 {
	k.t.Helper()
	k.send(k.transfer(opWrite, off, len(data), data))
	return k.last
}

func (k *kernel) interrupt(unique uint64) {
	k.t.Helper()
	k.send(makeInterrupt(unique))
}

// getattr sends something that go-fuse answers, with ENOSYS.
func (k *kernel) getattr() uint64 {
	k.t.Helper()
	k.send(k.message(3, make([]byte, 16)))
	return k.last
}

func (k *kernel) receive() answer {
	k.t.Helper()
	b := make([]byte, 256<<10)
	k.conn.SetReadDeadline(time.Now().Add(patience))
	n, err := k.conn.Read(b)
	ok(k.t, err)
	e := binary.NativeEndian
	if n < outHeaderSize || int(e.Uint32(b)) != n {
		k.t.Fatalf("an answer of %d bytes: %x", n, b[:min(n, 32)])
	}
	return answer{unique: e.Uint64(b[8:]), errno: syscall.Errno(-int32(e.Uint32(b[4:]))), data: b[outHeaderSize:n]}
}

// expect receives the answer to one request.
func (k *kernel) expect(unique uint64, errno syscall.Errno) []byte {
	k.t.Helper()
	a := k.receive()
	if a.unique != unique || a.errno != errno {
		k.t.Fatalf("answer to %d: %v; want %d: %v", a.unique, a.errno, unique, errno)
	}
	return a.data
}

// settle waits until no memory is in use but what the readers read into: answers come before that.
func (k *kernel) settle() {
	k.t.Helper()
	var reads, writes int64
	ok := waittest.Poll(patience, time.Millisecond, func() bool {
		reads, writes = k.s.reads.Used(), k.s.writes.Used()
		return reads == 0 && writes == int64(k.s.readers)*testMaxWrite
	})
	if !ok {
		k.t.Fatalf("still in use: %d bytes for READs, %d for WRITEs", reads, writes)
	}
}

// silent fails if there is an answer to anything but a GETATTR that is sent now.
func (k *kernel) silent() {
	k.t.Helper()
	k.expect(k.getattr(), syscall.ENOSYS)
}

// testHandler has files whose bytes are their offsets, and ends requests in a goroutine of its own.
type testHandler struct {
	held    atomic.Bool // requests stay until release
	gone    atomic.Bool // callers are dying
	watched atomic.Int32
	flushes atomic.Int32
	buffers *iobuf.Pool // of WriteBuffer; nil: it has none

	mu       sync.Mutex
	cond     *sync.Cond
	started  []*testTransfer
	detached int
	kept     []kept
}

// kept is the data of a WRITE that was in a WriteBuffer.
type kept struct {
	buf *iobuf.Buf
	off int64
}

func newTestHandler() *testHandler {
	h := &testHandler{}
	h.cond = sync.NewCond(&h.mu)
	return h
}

type testTransfer struct {
	h *testHandler
	r *Request

	mu       sync.Mutex // held while Request.Data is used
	detached bool
}

func (h *testHandler) NewTransfer(r *Request) Transfer { return &testTransfer{h: h, r: r} }

func (h *testHandler) Flush() {
	h.flushes.Add(1)
	if !h.held.Load() {
		h.release()
	}
}

func (h *testHandler) WriteBuffer(n int) *iobuf.Buf {
	if h.buffers == nil {
		return nil
	}
	return h.buffers.Get(n)
}

// release ends what was started.
func (h *testHandler) release() int {
	h.mu.Lock()
	list := h.started
	h.started = nil
	h.mu.Unlock()
	for _, c := range list {
		go c.end()
	}
	return len(list)
}

// endOne ends what was started first.
func (h *testHandler) endOne() {
	h.mu.Lock()
	c := h.started[0]
	h.started = h.started[1:]
	h.mu.Unlock()
	c.end()
}

func (h *testHandler) Abandoned(finished <-chan struct{}, _ uint32, _ bool) bool {
	h.watched.Add(1)
	for !h.gone.Load() {
		select {
		case <-finished:
			return false
		case <-time.After(time.Millisecond):
		}
	}
	return true
}

func (c *testTransfer) Start() {
	c.detached = false
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	c.h.started = append(c.h.started, c)
	c.h.cond.Broadcast()
}

func (c *testTransfer) Detach() {
	c.mu.Lock()
	c.detached = true
	c.mu.Unlock()
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	c.h.detached++
}

// await waits until n requests have been started and not ended.
func (h *testHandler) await(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.started) < n {
		h.cond.Wait()
	}
}

func pattern(b []byte, off int64) {
	for i := range b {
		b[i] = byte((off + int64(i)) * 7 >> 3)
	}
}

func (c *testTransfer) end() { c.r.Done(c.move()) }

func (c *testTransfer) move() (int, syscall.Errno) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.r
	switch {
	case c.detached:
		return 0, syscall.EINTR
	case r.Node != 77 || r.Fh != 99 || r.Pid != 88 || r.Flags != unix.O_NOATIME || r.WriteFlags != fuse.WRITE_KILL_SUIDGID:
		return 0, syscall.EPROTO
	case !r.Write:
		pattern(r.Data, r.Off)
		return len(r.Data), 0
	}
	if r.Buf != nil {
		if b := r.Buf.Bytes(); len(b) != len(r.Data) || &b[0] != &r.Data[0] {
			return 0, syscall.EBADF
		}
		r.Buf.Ref()
		c.h.mu.Lock()
		c.h.kept = append(c.h.kept, kept{r.Buf, r.Off})
		c.h.mu.Unlock()
	}
	want := make([]byte, len(r.Data))
	pattern(want, r.Off)
	if !bytes.Equal(r.Data, want) {
		return 0, syscall.EBADMSG
	}
	return len(r.Data), 0
}
