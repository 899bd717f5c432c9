package meta

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/admit"
)

const (
	partTimeout = time.Second // for what is still to be sent on a connection that is given up

	// maxQueued is how many bytes may wait to be sent to a client before its next frame is looked at, so that one that
	// calls and does not read costs no more than that and one frame for each of its slots.
	maxQueued = 2 * metarpc.MaxFrame
)

// conn is one connection. Frames are sent by whoever has one when nobody else is sending, together with all that
// is queued meanwhile, in one writev.
type conn struct {
	net     net.Conn
	secret  bool          // it is TLS
	timeout time.Duration // a write that takes longer ends the connection
	version uint32        // of the protocol

	mu      sync.Mutex
	queue   [][]byte
	spare   [][]byte // the queue's other array
	queued  int      // bytes in queue and in the write under way
	sending bool
	closing bool // nothing more is queued; closed when the queue has been sent
	drained chan struct{}
}

func newConn(in *admit.Incoming, timeout time.Duration, version uint32) *conn {
	return &conn{net: in.Conn, secret: in.Secret, timeout: timeout, version: version}
}

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
		} else if c.secret { // one record rather than one for each
			_, err = c.net.Write(bytes.Join(batch, nil))
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

// serve does the hello and then the rest.
func (s *Service) serve(nc net.Conn) {
	in, err := s.cfg.Door.Admit(nc)
	var hello *metarpc.Hello
	if err == nil {
		defer in.Leave()
		if hello, err = metarpc.ParseHello(in.Frame, s.cfg.Speaks); err != nil {
			err = fmt.Errorf("connection of something else than a weft client: %w", err)
		}
	}
	if err != nil {
		if err != io.EOF { // who only looks whether there is somebody is not worth a line
			s.cfg.Door.Complain(s.log, nc.RemoteAddr(), "client refused", "error", err)
		}
		if in != nil {
			nc = in.Conn
		}
		nc.Close()
		return
	}
	s.ServeConn(in, hello)
}

// ServeConn serves a connection that has been admitted, until it ends. It closes the connection.
func (s *Service) ServeConn(in *admit.Incoming, hello *metarpc.Hello) {
	nc := in.Conn
	in.Use(func() bool { return true }) // the hello is being answered
	version, ok := s.cfg.Speaks.Choose(hello.Versions())
	if !ok {
		version = s.cfg.Speaks.Highest // which welcome says
	}
	c := newConn(in, s.cfg.Lease, version)
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
	if !s.awaitAlive() {
		return
	}
	sess, err := s.welcome(c, in, hello)
	if err != nil {
		s.cfg.Door.Complain(s.log, nc.RemoteAddr(), "client refused", "host", hello.Client.Host, "error", err)
		return
	}
	in.Use(func() bool { return sess.idle() <= s.cfg.Lease }) // it renews
	rd := &reader{s: s, sess: sess, conn: c, r: in.R, frames: in.Frames(), ended: make(chan error, 1)}
	rd.run()
	err = <-rd.ended
	if sess.detach(c) && s.ctx.Err() == nil {
		log := s.log.With("session", sess)
		if errors.Is(err, metarpc.ErrMalformed) {
			s.cfg.Door.Complain(log, nc.RemoteAddr(), "client does not follow the protocol; connection closed", "error", err)
		} else {
			log.Info("client's connection lost", "address", nc.RemoteAddr().String(), "error", err)
		}
	}
}

// errReplaced tells that the session has moved on to another connection, or is over.
var errReplaced = errors.New("the session no longer uses this connection")

// reader reads the connection of an established session. One goroutine at a time has it: it executes the calls that it reads, and so
// answers what need not wait without waking anybody. Before it waits it gives the reader to another (turn).
type reader struct {
	s    *Service
	sess *session
	conn *conn
	r    *bufio.Reader
	buf  []byte

	frames *atomic.Uint64 // that have come
	ended  chan error     // why nobody reads any more
}

// run reads until the connection ends, or another goroutine has the reader.
func (rd *reader) run() {
	for {
		rd.conn.waitRoom()
		var err error
		kept := true
		if rd.buf, err = metarpc.ReadFrame(rd.r, rd.buf, metarpc.MaxFrame); err == nil {
			kept, err = rd.s.receive(rd, rd.buf)
		}
		if err != nil {
			rd.ended <- err
			return
		}
		if !kept {
			return
		}
	}
}

// turn is the context of a call that is executed by whoever has the reader of its connection. It is asked for its Done by all who are about to wait, and then has
// another goroutine go on reading: what is waited for may come through this connection.
type turn struct {
	context.Context
	rd    *reader
	given atomic.Bool // the reader, to another goroutine
}

func (t *turn) Done() <-chan struct{} {
	if t.given.CompareAndSwap(false, true) {
		t.rd.s.readOn(t.rd)
	}
	return t.Context.Done()
}

// keep takes the reader back after the call. It reports false if another goroutine has it.
func (t *turn) keep() bool { return t.given.CompareAndSwap(false, true) }

// idleReaders is how many goroutines that have executed a call and lost their reader meanwhile are kept for the next one.
const idleReaders = 64

// readOn has another goroutine go on reading: one of those that have nothing to read any more, whose stack has grown to what calls need, or else a new one.
func (s *Service) readOn(rd *reader) {
	select {
	case s.readers <- rd:
	default:
		s.tasks.Go(func() { // ends when there are enough that have nothing to read, or with s.ctx
			rd.run()
			for s.idle.Add(1) <= idleReaders {
				select {
				case rd = <-s.readers:
					s.idle.Add(-1)
				case <-s.ctx.Done():
					return
				}
				rd.run()
			}
			s.idle.Add(-1)
		})
	}
}

// patient is an engine whose commits are waited for, and of which is said when it is full.
type patient struct {
	catalog.Engine
	log  *slog.Logger
	full atomic.Bool // the last commit that had something to write found no room
}

// Commit implements [catalog.Engine].
func (e *patient) Commit(ctx context.Context, b *catalog.Batch) error {
	ctx.Done() // see turn
	err := e.Engine.Commit(ctx, b)
	switch full := errors.Is(err, catalog.ErrFull); {
	case full && e.Room().Full: // which was logged, by the engine or here
	case full && e.full.CompareAndSwap(false, true):
		e.log.Error("the catalog is full: nothing can be changed in the volume until there is room", "error", err)
	case err == nil && e.full.Load() && len(b.Puts)+len(b.Deltas) > 0 && e.full.CompareAndSwap(true, false):
		e.log.Info("the catalog has room again")
	}
	return err
}

// Room implements [catalog.Roomy].
func (e *patient) Room() catalog.Room {
	r := catalog.RoomOf(e.Engine)
	full := e.full.Load()
	r.Low, r.Full = r.Low || full, r.Full || full
	return r
}

// receive handles one frame of an established connection. It keeps nothing of it. It reports whether the caller still has the reader.
func (s *Service) receive(rd *reader, frame []byte) (kept bool, err error) {
	rd.sess.renew()
	rd.frames.Add(1)
	kind, err := metarpc.FrameKind(frame)
	if err != nil {
		return true, err
	}
	switch kind {
	case metarpc.KindCall:
		if !s.awaitAlive() {
			return true, errReplaced
		}
		h, args, err := metarpc.ParseCall(frame, rd.conn.version)
		refusal := (*metarpc.Error)(nil)
		if err != nil && !errors.As(err, &refusal) {
			return true, err
		}
		return s.accept(rd, h, args, refusal)
	case metarpc.KindBackReply:
		r, err := metarpc.ParseBackReply(frame)
		if err != nil {
			return true, err
		}
		rd.sess.answered(rd.conn, r)
		return true, nil
	}
	return true, fmt.Errorf("%w: frame of kind %d from a client", metarpc.ErrMalformed, kind)
}
