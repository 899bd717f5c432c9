package data

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/weftfs/weft/internal/wire/conns"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

const (
	// maxHead bounds a call without its payload: the RPC header and two names.
	maxHead = 16 << 10
	// maxRecord bounds a whole call.
	maxRecord = maxIO + maxHead
	// inputSize is how many bytes of calls are read at once; what of a payload comes with them is copied once more.
	inputSize = 8 << 10
	// maxSend is how much goes out at once, and what a client has to take within stallTime; the last reply is not cut.
	maxSend = 4 << 20
	// enoughIdle is how many workers of a connection may wait for the next calls.
	enoughIdle = 4
	// keepSize is the longest call or reply whose memory is kept for others.
	keepSize = 4 << 10
)

// stallTime is for how long a client may neither send the rest of a payload nor take replies. What it holds up meanwhile
// is memory that others wait for.
const stallTime = 20 * time.Second

// lingerTime is how long a client has, after its last replies, to see the end of the connection. A connection that is
// closed while calls arrive is reset, and replies on their way are lost.
const lingerTime = time.Second

// conn is a client's connection.
type conn struct {
	s        *Server
	nc       net.Conn            // changed before the first call alone, with s.mu
	secret   bool                // nc is TLS
	guest    bool                // the client has a certificate that is not that of a service
	in       record              // of the worker that reads, as is machine
	machine  string              // name in the last credential, which is nearly always that in the next one
	slot     chan struct{}       // one element for each request, from before it is read until its reply was sent
	payloads *semaphore.Weighted // bytes
	turn     chan struct{}       // has the right to read while no worker has; closed when no more calls are read
	ended    chan error          // why
	idle     atomic.Int32        // workers that wait for their turn
	draining atomic.Bool
	name     conns.Name    // guarded by s.mu; zero: the client has not named it
	socket   net.Conn      // as it was accepted: nc, or below it
	calls    atomic.Uint64 // that have begun to come
	sessions atomic.Int32  // of clients on this host that rest on it
	unused   atomic.Bool   // it was ended for that
	lost     atomic.Bool   // the client has lost it: nothing that came by it begins any more
	gone     chan struct{} // closed when nothing that came by it is carried out any more

	mu      sync.Mutex
	out     []*request // done, to be sent
	sending bool       // somebody sends, and owns what follows
	batch   []*request
	vec     net.Buffers
	rest    net.Buffers // of vec
	err     error       // sending failed
	raw     *rawSender  // nil with TLS
}

// request is one call and its reply.
type request struct {
	call    oncrpc.Call
	foreign bool // of another RPC version
	auth    oncrpc.AuthSys
	cred    *oncrpc.AuthSys // &auth; nil if the call has none
	client  net.Addr        // of who has cred
	head    []byte          // the call, without the payload of a WRITE
	args    xdr.Decoder     // behind the RPC header
	write   wire.WriteArgs
	garbage bool   // write does not decode
	reply   []byte // the record mark, the RPC header, and results up to a payload
	results int    // where in reply results begin; 0 if there are none
	payload *buffer
	data    []byte // in payload: of a WRITE, or to be sent behind reply
	from    extent // to be sent behind reply, if there is no data
	pad     []byte // to be sent behind data
}

var requests = sync.Pool{New: func() any { return new(request) }}

func newConn(s *Server, nc net.Conn) *conn {
	return &conn{
		s: s, nc: nc, socket: nc,
		in:       record{in: bufio.NewReaderSize(nc, inputSize)},
		slot:     make(chan struct{}, maxRequests),
		payloads: semaphore.NewWeighted(maxConnPayloads),
		turn:     make(chan struct{}, 1),
		ended:    make(chan error, 1),
		gone:     make(chan struct{}),
		raw:      newRawSender(nc),
	}
}

// State implements callers.Conn. One slot is that of the worker that waits for the next call.
func (c *conn) State() (calls uint64, used bool) {
	return c.calls.Load(), len(c.slot) > 1 || c.sessions.Load() > 0
}

// End implements callers.Conn.
func (c *conn) End() {
	c.unused.Store(true)
	c.socket.Close()
}

// drain makes serve return once the requests that were read are answered.
func (c *conn) drain() {
	c.draining.Store(true)
	c.limitReads(time.Time{})
}

// limitReads bounds the reads that follow; the zero time is no bound. When the connection drains it ends them.
func (c *conn) limitReads(t time.Time) {
	c.nc.SetReadDeadline(t)
	if c.draining.Load() {
		c.nc.SetReadDeadline(time.Unix(1, 0))
	}
}

// serve answers calls until the client closes, breaks the protocol, or drain. It returns when the last reply was sent.
func (c *conn) serve() error {
	if c.s.tls != nil {
		if err := c.startTLS(); err != nil {
			c.nc.Close()
			if c.unused.Load() {
				return nil
			}
			return fmt.Errorf("TLS: %w", err)
		}
	}
	c.turn <- struct{}{}
	go c.work() // ends, with those it starts, when no more calls are read
	err := <-c.ended
	for range cap(c.slot) { // until no request is left
		c.slot <- struct{}{}
	}
	defer c.nc.Close()
	c.mu.Lock()
	sendErr := c.err
	c.mu.Unlock()
	var ne net.Error
	switch {
	case c.draining.Load():
		c.announceStop()
		c.linger()
		return nil
	case errors.Is(sendErr, os.ErrDeadlineExceeded):
		return fmt.Errorf("replies were not taken within %v", stallTime)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the rest of a call did not come within %v", stallTime)
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.As(err, &ne):
		return nil // the client is gone, or nc was closed for sendErr
	}
	return err
}

func (c *conn) linger() {
	if nc, ok := c.nc.(interface{ CloseWrite() error }); ok && nc.CloseWrite() == nil {
		c.nc.SetReadDeadline(time.Now().Add(lingerTime))
		io.Copy(io.Discard, c.nc)
	}
}

// work reads calls and answers them. One worker at a time has the turn to read; when it has a call it passes the turn
// on, to a new worker if no other one is idle. So no call waits for a goroutine to wake up. Workers end when there are
// enough idle ones, and when no more calls are read; slot bounds their number.
//
// What takes less time than waking another worker is answered without passing the turn on, and the replies to calls that came
// together go out together.
func (c *conn) work() {
	for {
		c.idle.Add(1)
		_, ok := <-c.turn
		c.idle.Add(-1)
		if !ok {
			return
		}
		r, err := c.next()
		for err == nil && c.readAtOnce(r) {
			c.queue(r)
			if !c.in.whole() && !c.trySend() {
				r = nil
				break
			}
			r, err = c.next()
		}
		if err != nil {
			c.done(r)
			c.send()
			close(c.turn)
			c.ended <- err
			return
		}
		c.passTurn()
		c.send() // what is queued does not wait for r
		switch {
		case r == nil:
		case !c.takeTurn(r), c.lost.Load():
			c.done(r)
		default:
			began := time.Now()
			c.handle(r)
			c.s.counts.took(r, began)
			c.queue(r)
			c.send()
		}
		if c.idle.Load() >= enoughIdle {
			return
		}
	}
}

// takeTurn holds up a call from an address from which many were refused. It reports false if the connection is closed
// instead. The superuser is never refused, and not held up.
func (c *conn) takeTurn(r *request) bool {
	if r.cred == nil || r.cred.UID == 0 {
		return true
	}
	wait, ok := c.s.refusals.Turn(r.client)
	if !ok {
		c.socket.Close()
		return false
	}
	time.Sleep(wait)
	return true
}

// next reads a call. The worker has the turn.
func (c *conn) next() (*request, error) {
	select {
	case c.slot <- struct{}{}:
	default:
		c.send() // what is queued, too, has slots
		c.slot <- struct{}{}
	}
	r := requests.Get().(*request)
	return r, c.readCall(r)
}

// passTurn lets another worker read, a new one if none is idle.
func (c *conn) passTurn() {
	if c.idle.Load() == 0 {
		go c.work()
	}
	c.turn <- struct{}{}
}

// readCall reads one call. The payload of a WRITE goes from the socket to a buffer of its own.
func (c *conn) readCall(r *request) error {
	rec := &c.in
	if err := rec.begin(); err != nil {
		return err
	}
	c.calls.Add(1)
	r.head = rec.fill(grow(r.head[:0], wire.WriteCallHeadMax))
	d := xdr.NewDecoder(r.head)
	err := r.call.Decode(&d)
	r.foreign = err != nil && errors.As(err, new(oncrpc.RPCVersionError))
	switch {
	case rec.err != nil:
		return rec.err
	case r.foreign:
	case err != nil:
		return err
	default:
		c.identify(r)
		if r.isWrite() {
			c.readWrite(r, d)
		} else {
			c.readArgs(r, d)
		}
	}
	rec.skip()
	return rec.err
}

// grow returns b with n bytes more.
func grow(b []byte, n int) []byte { return append(b, make([]byte, n)...) }

func (r *request) isWrite() bool {
	return r.call.Prog == oncrpc.ProgNFS && r.call.Vers == wire.Version && wire.Proc(r.call.Proc) == wire.ProcWrite
}

// readArgs reads arguments of which d has the beginning. None that mean something are longer than maxHead.
func (c *conn) readArgs(r *request, d xdr.Decoder) {
	if rest := c.in.rest(); rest > 0 {
		used, have := d.Offset(), len(r.head)
		r.head = grow(r.head, min(rest, maxHead-have))
		r.head = r.head[:have+len(c.in.fill(r.head[have:]))]
		d = xdr.NewDecoder(r.head[used:])
	}
	r.args = d
}

// readWrite reads the payload of a WRITE, or as much of it as a WRITE may have, which the reply tells.
func (c *conn) readWrite(r *request, d xdr.Decoder) {
	if r.garbage = r.write.DecodeHead(&d, c.in.rest()) != nil; r.garbage {
		return
	}
	c.allot(r, int(min(r.write.Count, maxIO)), r.write.Offset)
	if c.in.rest() > c.in.in.Buffered() {
		c.limitReads(time.Now().Add(stallTime))
		defer c.limitReads(time.Time{})
	}
	have := copy(r.data, d.Rest())
	if r.garbage = len(c.in.fill(r.data[have:])) < len(r.data)-have; r.garbage {
		c.free(r)
	}
	c.in.skip()
}

// allot gives r memory for n bytes of payload that belong at off in a file, as r.data. It waits for as long as the
// connection or the server has too much of it, so no file may be locked: others who have memory may wait for the file.
func (c *conn) allot(r *request, n int, off uint64) {
	if n == 0 {
		return
	}
	skip := c.s.io.Shift(n, off)
	size := int64(bufferSize(skip + n))
	if !c.tryAcquire(size) {
		c.send()                                         // what is queued has memory, too
		c.payloads.Acquire(context.Background(), size)   // a context that does not end gives no error
		c.s.payloads.Acquire(context.Background(), size) // likewise
	}
	r.payload = getBuffer(skip + n)
	r.data = r.payload.b[skip:][:n]
}

func (c *conn) tryAcquire(size int64) bool {
	if !c.payloads.TryAcquire(size) {
		return false
	}
	if !c.s.payloads.TryAcquire(size) {
		c.payloads.Release(size)
		return false
	}
	return true
}

// free gives r's payload back.
func (c *conn) free(r *request) {
	if r.payload == nil {
		return
	}
	size := int64(len(r.payload.b))
	putBuffer(r.payload)
	r.payload, r.data = nil, nil
	c.s.payloads.Release(size)
	c.payloads.Release(size)
}

// identify decodes the credential; r.cred stays nil if it is of another flavor or malformed.
func (c *conn) identify(r *request) {
	if r.call.Cred.Flavor != oncrpc.FlavorSys {
		return
	}
	r.client = c.socket.RemoteAddr()
	r.auth.Machine = c.machine
	if r.auth.Decode(r.call.Cred.Body) == nil {
		r.cred = &r.auth
		if c.guest && r.auth.UID == 0 {
			r.auth.UID = nobody
		}
	}
	c.machine = r.auth.Machine
}

// queue adds r's reply to those that send sends.
func (c *conn) queue(r *request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = append(c.out, r)
}

// send sends what is queued, and with it what others queue meanwhile, unless somebody is at it.
func (c *conn) send() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sending {
		return
	}
	c.sending = true
	for len(c.out) > 0 {
		c.takeBatch()
		if c.err == nil {
			c.mu.Unlock()
			err := c.sendBatch()
			c.mu.Lock()
			c.err = err
		}
		for _, r := range c.batch {
			c.done(r)
		}
	}
	c.sending = false
}

// trySend is send that does not wait for the client to take anything. It reports whether nothing is left to be sent.
func (c *conn) trySend() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sending || len(c.out) == 0 {
		return true
	}
	c.sending = true
	c.takeBatch()
	left := c.batch
	if c.err == nil {
		c.mu.Unlock()
		left = c.raw.try(c.batch)
		c.mu.Lock()
	}
	for _, r := range c.batch[:len(c.batch)-len(left)] {
		c.done(r)
	}
	c.out = slices.Insert(c.out, 0, left...)
	c.sending = false
	return len(c.out) == 0
}

// takeBatch moves replies of maxSend bytes from out to batch. mu is held.
func (c *conn) takeBatch() {
	n, size := 0, 0
	for ; n < len(c.out) && size < maxSend; n++ {
		size += len(c.out[n].reply) + c.out[n].payloadSize()
	}
	c.batch = append(c.batch[:0], c.out[:n]...)
	c.out = append(c.out[:0], c.out[n:]...)
}

// sendBatch sends batch in one system call, if the socket takes it and nothing comes from the page cache. After a failure the
// connection is closed.
func (c *conn) sendBatch() error {
	c.vec = c.vec[:0]
	for _, r := range c.batch {
		if r.from.n > 0 {
			if err := c.sendVec(); err != nil {
				return err
			}
			if err := c.sendPages(r); err != nil {
				return err
			}
			continue
		}
		c.vec = append(c.vec, r.reply)
		if n := len(r.data); n > 0 {
			c.vec = append(c.vec, r.data)
			if len(r.pad) > 0 {
				c.vec = append(c.vec, r.pad)
			}
		}
	}
	return c.sendVec()
}

// sendVec sends vec, which is empty then. After a failure the connection is closed.
func (c *conn) sendVec() error {
	if len(c.vec) == 0 {
		return nil
	}
	c.nc.SetWriteDeadline(time.Now().Add(stallTime))
	c.rest = c.vec // WriteTo moves the slice it is called on
	_, err := c.rest.WriteTo(c.nc)
	if err != nil {
		c.nc.Close()
	}
	c.vec = c.vec[:0]
	return err
}

// payloadSize is how many bytes are sent behind r.reply, without their padding.
func (r *request) payloadSize() int { return len(r.data) + r.from.n }

// done gives back what r holds, its slot among it.
func (c *conn) done(r *request) {
	c.free(r)
	if r.from.f != nil {
		c.s.cache.put(r.from.f)
	}
	*r = request{head: keep(r.head), reply: keep(r.reply), auth: r.auth}
	requests.Put(r)
	<-c.slot
}

func keep(b []byte) []byte {
	if cap(b) > keepSize {
		return nil
	}
	return b[:0]
}
