package nfs3

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// leanSize is from which READ on the stream keeps payload out of its buffer.
const leanSize = 16 << 10

// company is how much, in bytes, small requests may have outstanding on one connection before they use another; a power of two.
const company = 32 << 10

// maxUnknown is how many replies in a row may belong to no call.
const maxUnknown = 1000

// replyHeadMax is the longest head of a READ reply.
const replyHeadMax = oncrpc.ReplyMax + wire.ReadHeadAttrs

// conn is one TCP connection from its making to its end. Its fields are guarded by Target.mu but where they say
// otherwise.
type conn struct {
	t    *Target
	slot *slot
	nc   *net.TCPConn
	addr netip.AddrPort
	name conns.Name   // that the server knows it by; zero: the server cannot
	in   stream       // of the goroutine that reads
	out  sender       // of whoever set writing
	lean atomic.Int32 // READs of leanSize and more outstanding

	dead    bool // nothing is to be sent any more
	retired bool // gets nothing new and ends when nothing is outstanding
	err     error
	proved  bool            // a reply has come
	missed  bool            // when it ended something was outstanding
	calls   map[uint32]*rpc // outstanding, by xid; without current
	current *rpc            // whose reply is being received
	sendq   rpcList         // of those in calls that no writer has taken
	count   int             // outstanding rpcs, current included
	bytes   int             // what they cost
	bulk    int             // what those of them cost that are not small
	served  traffic
	since   time.Time // when the present spell with something outstanding began
	watch   watch
	writing bool      // somebody uses out
	idle    sync.Cond // writing became false
	drain   func()    // writeRest, made once

	unknown int // replies in a row to calls that are not outstanding

	moved bool // replies have made calls that are not flushed; of the goroutine that reads
}

// newConn makes the connection on nc, through secret if that is not nil.
func newConn(s *slot, nc *net.TCPConn, secret *tls.Conn, addr netip.AddrPort) (*conn, error) {
	t := s.t
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{t: t, slot: s, nc: nc, addr: addr, calls: make(map[uint32]*rpc, maxInFlight)}
	c.in.init(raw, t.cfg.RSize+streamBuffer)
	c.in.lean = &c.lean
	c.in.before = c.flushMoved
	c.out.init(raw)
	c.in.tls, c.out.tls = secret, secret
	c.idle.L = &t.mu
	c.drain = c.writeRest
	return c, nil
}

// fail ends the connection: the goroutine that reads it comes back with an error and cleans up. Target.mu is held. A
// second call does nothing.
func (c *conn) fail(err error) {
	if c.dead {
		return
	}
	c.dead, c.err, c.missed = true, err, c.count > 0
	c.watch.stop()
	if c.missed {
		// What the kernel has buffered should not reach the server any more: it is going to be sent again.
		c.nc.SetLinger(0)
	}
	// Close waits for a reader or writer to leave its system call, which never blocks, and neither wants Target.mu there.
	c.nc.Close()
}

// retire sees to it that the connection gets nothing new, and ends when nothing is outstanding on it.
func (c *conn) retire() {
	c.retired = true
	if c.count == 0 {
		c.fail(errRetired)
	}
}

func (c *conn) room(cost int) bool {
	return c.count == 0 || c.count < maxInFlight && c.bytes+cost <= maxInFlightBytes
}

// assign makes r, which is prepared, the connection's and queues it for sending. After a lost connection it keeps its
// xid, by which servers recognise a repetition (RFC 5531 section 9).
func (c *conn) assign(r *rpc) {
	xid := r.xid
	for xid == 0 || c.calls[xid] != nil {
		xid = c.t.nextXID()
	}
	r.setXID(xid)
	r.conn, r.state, r.end = c, stateWaiting, 0
	r.at = time.Now()
	if c.count == 0 {
		c.since = r.at
	}
	c.calls[xid] = r
	c.count++
	c.bytes += r.cost()
	if r.class() == bulk {
		c.bulk += r.cost()
		c.t.window.used += r.cost()
	}
	if r.isRead() && r.count >= leanSize {
		c.lean.Add(1)
	}
	c.sendq.pushBack(r)
}

// remove undoes assign, wherever r has got to.
func (c *conn) remove(r *rpc) {
	if c.current == r {
		c.current = nil
	} else {
		delete(c.calls, r.xid)
	}
	c.count--
	c.bytes -= r.cost()
	if r.class() == bulk {
		c.bulk -= r.cost()
		c.t.window.used -= r.cost()
	}
	if r.isRead() && r.count >= leanSize {
		c.lean.Add(-1)
	}
	r.conn = nil
	if c.retired && c.count == 0 {
		c.fail(errRetired)
	}
}

// load is what r would have to wait for. For small requests connections with little to do are alike: those that are made
// together go out together then, and so do their replies.
func (c *conn) load(r *rpc) int {
	if r.class() == small {
		return (2*c.bulk + c.bytes) &^ (company - 1) // rather behind many small ones than behind a large one
	}
	return c.bytes
}

// fillBatch puts what is queued into the sender's batch.
func (c *conn) fillBatch() {
	for r := c.sendq.head; r != nil && c.out.load(r); r = c.sendq.head {
		r.unlink()
		r.state = stateSent
	}
}

// flush writes what is queued, unless somebody is at it, and until the socket is full. Target.mu is held, and released
// meanwhile.
func (c *conn) flush() {
	if c.writing || c.dead || c.sendq.head == nil {
		return
	}
	c.writing = true
	const rounds = 4 // so that this caller does not end up writing for all others
	for i := 0; ; i++ {
		c.fillBatch()
		c.t.mu.Unlock()
		done, err := c.out.write(false)
		c.t.mu.Lock()
		if err != nil {
			c.fail(fmt.Errorf("write: %w", err))
		}
		if c.dead || done && c.sendq.head == nil {
			break
		}
		if !done || i == rounds {
			go c.drain()
			return
		}
	}
	c.stopWriting()
}

// writeRest is the goroutine that goes on where flush had to stop. It uses the connection's sender and ends when
// nothing is queued or the connection is dead.
func (c *conn) writeRest() {
	c.t.mu.Lock()
	defer c.t.mu.Unlock()
	for !c.dead {
		c.t.mu.Unlock()
		_, err := c.out.write(true)
		c.t.mu.Lock()
		if err != nil {
			c.fail(fmt.Errorf("write: %w", err))
		}
		if c.sendq.head == nil {
			break
		}
		c.fillBatch()
	}
	c.stopWriting()
}

func (c *conn) stopWriting() {
	c.writing = false
	c.idle.Broadcast()
}

// flushMoved sends what the replies received so far have made ready, before waiting for more of them.
func (c *conn) flushMoved() {
	if c.moved {
		c.moved = false
		c.t.Flush()
	}
}

// read receives replies and completes what they belong to, until the connection ends. It returns why.
func (c *conn) read() error {
	for {
		if err := c.reply(); err != nil {
			return err
		}
	}
}

// reply receives one record.
func (c *conn) reply() error {
	if err := c.in.begin(); err != nil {
		return err
	}
	head, err := c.in.head(8)
	if err != nil {
		return err
	}
	if len(head) < 8 {
		return malformedf("record of %d bytes", len(head))
	}
	if oncrpc.IsCall(head) {
		return c.called()
	}
	r, err := c.take(binary.BigEndian.Uint32(head))
	if err != nil {
		return err
	}
	if r == nil {
		return c.in.skip()
	}
	var ans answer
	if r.isRead() {
		err = c.readReply(r, &ans)
	} else {
		err = c.otherReply(r, &ans)
	}
	if err != nil {
		return err
	}
	op, err := c.complete(r, &ans)
	if err != nil {
		return err
	}
	if op != nil {
		op.Done(op)
	}
	return nil
}

// take finds whose reply has begun and makes it current. Unknown xids give nil.
func (c *conn) take(xid uint32) (*rpc, error) {
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	r := c.calls[xid]
	if r == nil {
		t.stats.unknown++
		if c.unknown++; c.unknown == maxUnknown {
			return nil, malformedf("%d replies in a row to calls that nobody made", maxUnknown)
		}
		return nil, nil
	}
	c.unknown = 0
	delete(c.calls, xid)
	c.current = r
	r.state = stateReceiving
	if !c.out.sent(r.end) {
		// To complete it would set free what is still being written.
		return nil, malformedf("reply to call %#x before it was sent", xid)
	}
	if r.isRead() && r.op != nil {
		c.in.target(r.data[r.n : r.n+r.count : r.n+r.count])
	}
	return r, nil
}

// answer is what a reply says.
type answer struct {
	refused error        // the RPC layer's; the rest is empty then
	body    []byte       // results of a control
	read    wire.ReadRes // of READ
	write   wire.WriteRes
	commit  wire.CommitRes
}

// decodeHead takes the header of the reply from head.
func decodeHead(head []byte, ans *answer) (xdr.Decoder, error) {
	d := xdr.NewDecoder(head)
	var rep oncrpc.Reply
	if err := rep.Decode(&d); err != nil {
		return d, err
	}
	ans.refused = rep.Err()
	return d, nil
}

// readReply receives the reply of a READ with the payload.
func (c *conn) readReply(r *rpc, ans *answer) error {
	head, err := c.in.head(wire.ReadReplyHead)
	if err != nil {
		return err
	}
	d, err := decodeHead(head, ans)
	if errors.Is(err, xdr.ErrTruncated) {
		// A verifier, which makes the header longer than usual.
		if head, err = c.in.head(replyHeadMax); err != nil {
			return err
		}
		d, err = decodeHead(head, ans)
	}
	if err != nil {
		return &malformed{err}
	}
	if ans.refused == nil {
		at := d.Offset()
		if len(d.Rest()) < 8 {
			if head, err = c.in.head(at + 8); err != nil {
				return err
			}
		}
		n, err := wire.ReadHeadLen(head[at:])
		if err != nil {
			return &malformed{err}
		}
		if head, err = c.in.head(at + n); err != nil {
			return err
		}
		d = xdr.NewDecoder(head[at:])
		if err := ans.read.DecodeHead(&d, c.in.left(len(head))); err != nil {
			return &malformed{err}
		}
		if int64(ans.read.Count) > int64(r.count) {
			return malformedf("%d bytes in reply to a READ of %d", ans.read.Count, r.count)
		}
		c.in.consume(at + d.Offset())
		if err := c.in.payload(int(ans.read.Count)); err != nil {
			return err
		}
	}
	return c.in.skip()
}

// otherReply receives the reply of anything else.
func (c *conn) otherReply(r *rpc, ans *answer) error {
	b, err := c.in.whole()
	if err != nil {
		return err
	}
	d, err := decodeHead(b, ans)
	if err == nil && ans.refused == nil {
		switch r.proc {
		case wire.ProcWrite:
			err = ans.write.Decode(&d)
		case wire.ProcCommit:
			err = ans.commit.Decode(&d)
		default:
			ans.body = d.Rest()
		}
	}
	if err != nil {
		return &malformed{err}
	}
	if r.proc == wire.ProcWrite && int64(ans.write.Count) > int64(r.count) {
		return malformedf("%d bytes written by a WRITE of %d", ans.write.Count, r.count)
	}
	c.in.consume(len(b))
	return nil
}

// complete does what the answer to the current rpc asks for: ends it, or sends what comes next. It returns an op whose
// Done is to be called, or an error that ends the connection, with the rpc still current.
func (c *conn) complete(r *rpc, ans *answer) (*layout.Op, error) {
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if !c.proved {
		c.proved = true
		t.stopUntil = time.Time{}
		c.slot.path.bad = false
		t.settle()
	}
	if r.ctl != nil && r.ctl.res != nil && ans.refused == nil {
		// With the lock, since the caller may give up waiting and leave.
		d := xdr.NewDecoder(ans.body)
		if err := r.ctl.res.Decode(&d); err != nil {
			return nil, &malformed{err}
		}
	}
	switch {
	case r.ctl != nil && r.ctl.probe:
		c.watch.answered(c.in.lastHeard())
	case r.class() == bulk && ans.refused == nil:
		t.window.answered(r, time.Now())
	}
	var op *layout.Op
	next, err := r.advance(t, c, ans)
	if t.closed && next != ended {
		next, err = ended, ErrClosed
	}
	switch next {
	case ended:
		op = t.end(r, err)
	case again:
		c.remove(r)
		r.garbled = 0
		r.prepare(t)
		t.requeue(r)
	case later:
		c.remove(r)
		r.garbled = 0
		t.postpone(r)
	}
	if t.queued() > 0 {
		t.dispatch()
		c.moved = true
	}
	return op, nil
}

// next is what follows an answer.
type next uint8

const (
	ended next = iota // nothing
	again             // what is left, or all of it anew
	later             // the same, after a back-off
)

// advance takes the answer into r.
func (r *rpc) advance(t *Target, c *conn, ans *answer) (next, error) {
	if r.abandoned() {
		return ended, nil
	}
	if ans.refused != nil {
		return ended, &ReplyError{Op: r.name(), Detail: r.detail(), Addr: c.addr, Err: ans.refused}
	}
	if r.ctl != nil {
		t.stats.calls++
		if r.ctl.res != nil && !r.ctl.bare && wire.Status(binary.BigEndian.Uint32(ans.body)) == wire.ErrJukebox {
			return later, nil
		}
		return ended, nil
	}
	var status wire.Status
	var count uint32
	switch r.proc {
	case wire.ProcRead:
		status, count = ans.read.Status, ans.read.Count
	case wire.ProcWrite:
		status, count = ans.write.Status, ans.write.Count
	case wire.ProcCommit:
		status = ans.commit.Status
	}
	switch {
	case status == wire.ErrJukebox:
		return later, nil
	case status != wire.OK:
		return ended, &Error{Op: r.name(), Detail: r.detail(), Status: status, Addr: c.addr}
	}
	r.delay = 0
	switch r.proc {
	case wire.ProcCommit:
		r.verifier = layout.Verifier(ans.commit.Verf)
		t.stats.commits++
		c.served.ops++
		return ended, nil
	case wire.ProcRead:
		r.eof = ans.read.EOF
		t.stats.reads++
		t.stats.bytesRead += uint64(count)
		c.served.ops++
		c.served.bytesRead += uint64(count)
	case wire.ProcWrite:
		t.stats.writes++
		t.stats.bytesWritten += uint64(count)
		c.served.ops++
		c.served.bytesWritten += uint64(count)
		lost := r.n > 0 && r.committed == layout.Unstable && r.verifier != layout.Verifier(ans.write.Verf)
		r.verifier = layout.Verifier(ans.write.Verf)
		r.committed = min(r.committed, layout.Stability(ans.write.Committed))
		if lost {
			// The server has forgotten the pieces before this one, and perhaps has this one: all again.
			if r.restarts++; r.restarts == maxRestarts {
				return ended, &ReplyError{Op: r.name(), Detail: r.detail(), Addr: c.addr, Err: errRestarts}
			}
			r.n, r.committed = 0, layout.FileSync
			return again, nil
		}
	}
	if t.cfg.Patience.Time > 0 {
		r.heard = time.Now()
	}
	r.resent = false
	r.n += int(count)
	switch {
	case r.n == len(r.data) || r.eof:
		return ended, nil
	case count > 0:
		r.empty = 0
		return again, nil
	}
	if r.empty++; r.empty == maxEmpty {
		return ended, &ReplyError{Op: r.name(), Detail: r.detail(), Addr: c.addr, Err: errNoProgress}
	}
	return again, nil
}
