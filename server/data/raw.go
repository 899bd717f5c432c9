package data

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// minPages is from how many bytes on a payload is sent from the page cache, which saves two copies of it and costs a system
// call more.
const minPages = 32 << 10

// extent is n bytes of a file, which is held until they were sent.
type extent struct {
	f   *file
	off int64
	n   int
}

// fromPages does a READ whose payload the kernel is to send from the page cache, without a copy. It reports whether it did:
// what goes past the page cache, or over TLS, is read into memory.
//
// What is sent is what the file holds then: a change that is made meanwhile may be among it, as it may be in what pread(2) finds.
func (c *conn) fromPages(r *request, args *wire.ReadArgs, n int, res *wire.ReadRes) bool {
	if c.raw == nil || n < minPages || c.s.io.Reaches(n, int64(args.Offset)) {
		return false
	}
	var st unix.Stat_t
	f, status := c.s.openData(r, args.FH, mayRead, &st)
	if status != wire.OK {
		res.Status = status
		return true
	}
	defer f.mu.RUnlock()
	end := args.Offset + uint64(n)
	if end < args.Offset || end > uint64(st.Size) || xdr.Pad(n) > 0 || f.unsendable.Load() {
		c.s.cache.put(f)
		return false // the end of the file is read in the usual way
	}
	r.from = extent{f, int64(args.Offset), n}
	res.Count, res.EOF = uint32(n), end == uint64(st.Size)
	return true
}

// rawSender sends on a connection without the net package, for one goroutine at a time. Its functions are made once, so that
// using them does not allocate.
type rawSender struct {
	raw  syscall.RawConn
	err  error
	head []byte // left of what goes before the file
	from extent // left of the file
	send func(fd uintptr) bool
	vec  []unix.Iovec // at most 3 of each request, and so less than IOV_MAX
	sent int          // bytes of vec
	once func(fd uintptr) bool
}

// newRawSender returns nil if nc is no TCP connection of the kernel's alone.
func newRawSender(nc net.Conn) *rawSender {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	p := &rawSender{raw: raw}
	p.send, p.once = p.sendFile, p.sendOnce
	return p
}

// sendOnce sends what the socket takes at once.
func (p *rawSender) sendOnce(fd uintptr) bool {
	for {
		n, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p.vec))), uintptr(len(p.vec)))
		if errno == 0 {
			p.sent = int(n)
		}
		if errno != unix.EINTR {
			return true
		}
	}
}

// try sends replies as far as the socket takes them at once. It returns those of which something is left, the first without what
// has gone. After a failure that is all of them: who sends the rest finds it.
func (p *rawSender) try(replies []*request) (left []*request) {
	p.vec, p.sent = p.vec[:0], 0
	for _, r := range replies {
		if r.from.n > 0 {
			break
		}
		for _, part := range [...][]byte{r.reply, r.data, r.pad} {
			if len(part) > 0 {
				v := unix.Iovec{Base: unsafe.SliceData(part)}
				v.SetLen(len(part))
				p.vec = append(p.vec, v)
			}
		}
	}
	if len(p.vec) > 0 {
		p.raw.Write(p.once)
		clear(p.vec) // the addresses must not keep buffers alive
	}
	for i, r := range replies {
		for _, part := range [...]*[]byte{&r.reply, &r.data, &r.pad} {
			n := min(p.sent, len(*part))
			*part = (*part)[n:]
			p.sent -= n
		}
		if len(r.reply)+len(r.pad)+r.payloadSize() > 0 {
			return replies[i:]
		}
	}
	return nil
}

// errCut means that there is less in the file than there was when the length of the reply was told.
var errCut = errors.New("the file has been cut meanwhile")

// sendFile sends until all is sent, p.err is set, or the socket takes no more: then it returns false.
func (p *rawSender) sendFile(fd uintptr) bool {
	for p.err == nil && p.from.n > 0 {
		var n int
		var err error
		if len(p.head) > 0 {
			if n, err = unix.SendmsgN(int(fd), p.head, nil, nil, unix.MSG_MORE|unix.MSG_NOSIGNAL); err == nil {
				p.head = p.head[n:]
			}
		} else if n, err = unix.Sendfile(int(fd), p.from.f.fd, &p.from.off, p.from.n); err == nil {
			p.from.n -= n
			if n == 0 {
				err = errCut
			}
		}
		switch err {
		case nil, unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			p.err = err
		}
	}
	return true
}

// sendPages sends a reply with its payload from the page cache. After a failure the connection is closed, since its client
// waits for the rest. If it is the file's then the client, who asks again, gets it, or the error, in the usual way.
func (c *conn) sendPages(r *request) error {
	p := c.raw
	p.head, p.from, p.err = r.reply, r.from, nil
	c.nc.SetWriteDeadline(time.Now().Add(stallTime))
	err := p.raw.Write(p.send)
	if err == nil && p.err != nil {
		var e unix.Errno
		if gone := errors.As(p.err, &e) && (e == unix.EPIPE || e == unix.ECONNRESET); !gone {
			r.from.f.unsendable.Store(true)
		}
		err = fmt.Errorf("send a file: %w", p.err)
	}
	if err != nil {
		c.nc.Close()
		return err
	}
	c.s.io.HaveRead(r.from.f, r.from.off, r.from.n)
	return nil
}
