package meta

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

const (
	helloTimeout = 10 * time.Second // for the client's first frame
	partTimeout  = time.Second      // for what is still to be sent on a connection that is given up
	readBuffer   = 64 << 10         // bytes

	// maxQueued is how many bytes may wait to be sent to a client before its next frame is looked at, so that one that
	// calls and does not read costs no more than that and one frame for each of its slots.
	maxQueued = 2 * metarpc.MaxFrame
)

// conn is one connection. Frames are sent by whoever has one when nobody else is sending, together with all that
// is queued meanwhile, in one writev.
type conn struct {
	net     net.Conn
	timeout time.Duration // a write that takes longer ends the connection

	mu      sync.Mutex
	queue   [][]byte
	spare   [][]byte // the queue's other array
	queued  int      // bytes in queue and in the write under way
	sending bool
	closing bool // nothing more is queued; closed when the queue has been sent
	drained chan struct{}
}

func newConn(nc net.Conn, timeout time.Duration) *conn { return &conn{net: nc, timeout: timeout} }

// enqueue puts a whole frame into the queue. If it returns true the caller has to call flush.
func (c *conn) enqueue(frame []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return false
	}
	c.queue = append(c.queue, frame)
	c.queued += len(frame)
	if c.sending {
		return false
	}
	c.sending = true
	return true
}

// flush sends what is queued until there is nothing left.
func (c *conn) flush() {
	c.mu.Lock()
	for len(c.queue) > 0 {
		batch := c.queue
		c.queue, c.spare = c.spare[:0], nil
		n := c.queued
		if !c.closing {
			c.net.SetWriteDeadline(time.Now().Add(c.timeout))
		}
		c.mu.Unlock()
		var err error
		if len(batch) == 1 {
			_, err = c.net.Write(batch[0])
		} else {
			bufs := net.Buffers(batch)
			_, err = bufs.WriteTo(c.net)
		}
		clear(batch)
		c.mu.Lock()
		c.spare = batch[:0]
		c.queued -= n
		if err != nil {
			// The reader finds the connection closed and ends; the client comes back and asks again.
			c.closing = true
			clear(c.queue)
			c.queue, c.queued = nil, 0
		}
		if c.drained != nil && c.queued < maxQueued {
			close(c.drained)
			c.drained = nil
		}
	}
	c.sending = false
	closing := c.closing
	c.mu.Unlock()
	if closing {
		c.net.Close()
	}
}

func (c *conn) send(frame []byte) {
	if c.enqueue(frame) {
		c.flush()
	}
}

// close ends the connection after what is queued was sent, or a second.
func (c *conn) close() {
	c.mu.Lock()
	c.closing = true
	now := time.Now()
	c.net.SetReadDeadline(now)
	c.net.SetWriteDeadline(now.Add(partTimeout))
	sending := c.sending
	c.mu.Unlock()
	if !sending {
		c.net.Close()
	}
}

// waitRoom returns when less than maxQueued bytes wait to be sent.
func (c *conn) waitRoom() {
	c.mu.Lock()
	for c.queued >= maxQueued {
		if c.drained == nil {
			c.drained = make(chan struct{})
		}
		drained := c.drained
		c.mu.Unlock()
		<-drained // by flush, which the write's deadline bounds
		c.mu.Lock()
	}
	c.mu.Unlock()
}

// serveConn does the hello and then reads frames until the connection ends.
func (s *Service) serveConn(nc net.Conn) {
	c := newConn(nc, s.cfg.Lease)
	s.mu.Lock()
	if s.conns == nil { // stopped
		s.mu.Unlock()
		nc.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	defer func() {
		c.close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	log := s.log.With("address", nc.RemoteAddr().String())
	nc.SetReadDeadline(time.Now().Add(helloTimeout))
	r := bufio.NewReaderSize(nc, readBuffer)
	buf, err := metarpc.ReadFrame(r, nil, metarpc.MaxHello)
	if err != nil {
		if err != io.EOF { // who only looks whether there is somebody is not worth a line
			log.Warn("connection without a hello", "error", err)
		}
		return
	}
	hello, err := metarpc.ParseHello(buf)
	if err != nil {
		log.Warn("connection of something else than a weft client", "error", err)
		return
	}
	nc.SetReadDeadline(time.Time{})
	sess, err := s.welcome(c, hello, nc.RemoteAddr().String())
	if err != nil {
		log.Warn("client refused", "host", hello.Client.Host, "error", err)
		return
	}
	for {
		c.waitRoom()
		if buf, err = metarpc.ReadFrame(r, buf, metarpc.MaxFrame); err == nil {
			err = s.receive(sess, c, buf)
		}
		if err != nil {
			break
		}
	}
	if sess.detach(c) && s.ctx.Err() == nil {
		log = log.With("session", sess)
		if errors.Is(err, metarpc.ErrMalformed) {
			log.Warn("client does not follow the protocol; connection closed", "error", err)
		} else {
			log.Info("client's connection lost", "error", err)
		}
	}
}

// errReplaced tells that the session has moved on to another connection, or is over.
var errReplaced = errors.New("the session no longer uses this connection")

// receive handles one frame of an established connection. It keeps nothing of it.
func (s *Service) receive(sess *session, c *conn, frame []byte) error {
	sess.renew()
	kind, err := metarpc.FrameKind(frame)
	if err != nil {
		return err
	}
	switch kind {
	case metarpc.KindCall:
		h, args, err := metarpc.ParseCall(frame)
		refusal := (*metarpc.Error)(nil)
		if err != nil && !errors.As(err, &refusal) {
			return err
		}
		return s.accept(sess, c, h, args, refusal)
	case metarpc.KindBackReply:
		r, err := metarpc.ParseBackReply(frame)
		if err != nil {
			return err
		}
		sess.answered(c, r)
		return nil
	}
	return fmt.Errorf("%w: frame of kind %d from a client", metarpc.ErrMalformed, kind)
}
