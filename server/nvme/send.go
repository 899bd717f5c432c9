package nvme

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// message is what is sent for a request: head, then data or the bytes of a file, then tail.
type message struct {
	head, data, tail []byte
	from             extent
	r                *request // nil: of no request
	last             bool     // r is over when this was sent
}

// extent is n bytes of a namespace's file, which the kernel sends from the page cache. It has one of the namespace's references.
type extent struct {
	ns   *namespace
	file *File
	off  int64
	n    int
}

// maxVec is how many pieces go out in one system call; less than IOV_MAX.
const maxVec = 512

// transmit sends a batch of messages on a connection without the net package, for one goroutine at a time.
type transmit struct {
	nc    net.Conn
	raw   syscall.RawConn
	stall time.Duration // how long the socket may take nothing
	batch []message
	next  int  // the first of batch of which something is left
	done  int  // the first of batch that was not given back
	block bool // wait for the socket
	err   error
	fn    func(fd uintptr) bool // run, made once
	vec   []unix.Iovec
	hdr   unix.Msghdr
}

// errCut means that there is less in the file than its namespace has.
var errCut = errors.New("the file of a namespace has been cut")

// pending is whether something of the batch is left.
func (p *transmit) pending() bool { return p.next < len(p.batch) }

// send sends the batch, or with block false what the socket takes of it at once.
func (p *transmit) send(block bool) {
	p.block = block
	if block {
		p.nc.SetWriteDeadline(time.Now().Add(p.stall))
		defer p.nc.SetWriteDeadline(time.Time{}) // it would be in the way of the next who does not wait
	}
	if err := p.raw.Write(p.fn); err != nil && p.err == nil {
		p.err = err
	}
}

func (p *transmit) run(fd uintptr) bool {
	for p.pending() && p.err == nil {
		var err error
		if m := &p.batch[p.next]; m.from.n > 0 && len(m.head) == 0 {
			err = p.sendFile(fd, m)
		} else {
			err = p.sendVec(fd)
		}
		switch err {
		case nil, unix.EINTR:
		case unix.EAGAIN:
			if p.block {
				p.nc.SetWriteDeadline(time.Now().Add(p.stall)) // from the last progress on
			}
			return !p.block
		default:
			p.err = err
		}
	}
	return true
}

func (p *transmit) sendFile(fd uintptr, m *message) error {
	n, err := unix.Sendfile(int(fd), m.from.file.fd, &m.from.off, m.from.n)
	if err == nil && n == 0 {
		err = errCut
	}
	if err != nil {
		if err != unix.EAGAIN && err != unix.EINTR && err != unix.EPIPE && err != unix.ECONNRESET {
			m.from.file.unsendable.Store(true) // read into memory from now on, which can tell why
			err = fmt.Errorf("send a file: %w", err)
		}
		return err
	}
	if m.from.n -= n; m.from.n == 0 {
		m.from.file.kind.HaveRead(m.from.file, m.from.off-int64(n), n)
		if len(m.tail) == 0 {
			p.next++
		}
	}
	return nil
}

// sendVec sends what is in memory, up to the next piece of a file.
func (p *transmit) sendVec(fd uintptr) error {
	vec, flags := p.vec[:0], unix.MSG_NOSIGNAL
	for i := p.next; i < len(p.batch) && len(vec) <= maxVec-3; i++ {
		m := &p.batch[i]
		vec = appendVec(vec, m.head)
		if m.from.n > 0 {
			flags |= unix.MSG_MORE
			break
		}
		vec = appendVec(appendVec(vec, m.data), m.tail)
	}
	p.vec = vec
	p.hdr.Iov = unsafe.SliceData(vec)
	p.hdr.SetIovlen(len(vec))
	n, _, errno := unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&p.hdr)), uintptr(flags))
	clear(vec) // the addresses must not keep buffers alive
	if errno != 0 {
		return errno
	}
	p.sent(int(n))
	return nil
}

func appendVec(vec []unix.Iovec, b []byte) []unix.Iovec {
	if len(b) == 0 {
		return vec
	}
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return append(vec, v)
}

// sent takes n bytes off the batch.
func (p *transmit) sent(n int) {
	for p.pending() {
		m := &p.batch[p.next]
		take(&m.head, &n)
		if m.from.n > 0 {
			return
		}
		take(&m.data, &n)
		take(&m.tail, &n)
		if len(m.head)+len(m.data)+len(m.tail) > 0 {
			return
		}
		p.next++
	}
}

func take(b *[]byte, n *int) {
	k := min(*n, len(*b))
	*b = (*b)[k:]
	*n -= k
}

// queue adds a message to those that flush sends.
func (c *conn) queue(m message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queueLocked(m)
}

func (c *conn) queueLocked(m message) {
	if c.sendErr == nil {
		c.out = append(c.out, m)
	} else if m.last {
		c.releaseLocked(m.r)
	}
}

// flush sends what is queued as far as the socket takes it at once, and leaves the rest to the sender. It does nothing if
// somebody is at it, who then sends that, too.
func (c *conn) flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.sending && len(c.out) > 0 {
		c.sending = true
		c.sendAll(false)
	}
}

// sender sends what did not go at once. It ends when wake is closed.
func (c *conn) sender() {
	for range c.wake {
		c.mu.Lock()
		c.sendAll(true)
		c.mu.Unlock()
	}
}

// sendAll sends until nothing is queued, or with block false until the socket takes no more: then the sender goes on. Whoever
// calls it has set sending and holds mu, which is given back meanwhile.
func (c *conn) sendAll(block bool) {
	p := &c.tx
	for c.sendErr == nil && (p.pending() || len(c.out) > 0) {
		if !p.pending() {
			clear(p.batch)
			p.batch, c.out = c.out, p.batch[:0]
			p.next, p.done = 0, 0
		}
		c.mu.Unlock()
		p.send(block)
		c.mu.Lock()
		c.sendErr = p.err
		for ; p.done < p.next; p.done++ {
			if m := &p.batch[p.done]; m.last {
				c.releaseLocked(m.r)
			}
		}
		if !block && c.sendErr == nil && p.pending() {
			c.wake <- struct{}{} // has room: there is one for whom sending is set
			return
		}
	}
	if c.sendErr != nil {
		c.nc.Close()
		for _, m := range append(p.batch[p.done:], c.out...) {
			if m.last {
				c.releaseLocked(m.r)
			}
		}
		p.batch, c.out, p.next, p.done = nil, nil, 0, 0
	}
	c.sending = false
	c.changed.Broadcast()
}
