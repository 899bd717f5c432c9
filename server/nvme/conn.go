package nvme

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// stallTime is for how long a host may neither send the rest of a PDU's data nor take what is sent to it. What it holds up
	// meanwhile is memory.
	stallTime = 20 * time.Second
	// beginTime is how long a host has from connecting to its Connect command, and from that to having authenticated itself.
	beginTime = 10 * time.Second
	// lingerTime is how long a host has, after the last PDU, to see the end of the connection. One that is closed while PDUs
	// arrive is reset, and those on their way back are lost.
	lingerTime = time.Second

	// In a capsule there may be so many bytes of data.
	adminCapsule = 8 << 10
	ioCapsule    = 16 << 10
	// inputSize is how many bytes are read at once on an I/O queue, and of a queue that is none yet or is an admin queue. A
	// capsule with its data fits in either.
	inputSize      = 64 << 10
	adminInputSize = 10 << 10
	// expectedSize is how many are read at once while data is expected: what of it comes with them is copied once more.
	expectedSize = 4 << 10

	// maxWorkers is how many goroutines of a connection do what may take time.
	maxWorkers = 32
)

// conn is a host's connection, and the queue that it is. One goroutine, serve, reads PDUs, does what is done at once, and leaves
// the rest to workers.
type conn struct {
	t     *Target
	port  *port
	nc    net.Conn
	ctrl  atomic.Pointer[controller] // nil before Connect; changed with controller.mu held
	qid   uint16                     // fixed by Connect, as are the next three
	depth int                        // entries of the queue
	flow  bool                       // SQ flow control is on
	jobs  chan *request
	done  chan struct{} // closed when no command runs any more

	// What follows is of serve.
	ready    bool // ICReq was answered
	rx       wire.Receiver
	framing  wire.Framing // of what is sent
	in       []byte
	from, to int             // of in, not yet used
	auth     *authentication // nil: the host needs not prove itself
	ending   error           // why no more is read

	dead     atomic.Bool // the controller is gone: nothing begins any more
	draining atomic.Bool
	expected atomic.Int32  // requests whose data is expected in PDUs of its own
	asked    atomic.Uint64 // counts these requests, and the pieces that have come

	mu       sync.Mutex
	changed  sync.Cond  // idle has a request, or sending ends
	requests []*request // all, by their tags
	idle     []*request // of these, those that are free
	live     int        // commands that have no completion queued
	cids     [1 << 16 / 64]uint64
	head     int // SQHD
	workers  int
	resting  int // workers that wait
	held     int64
	waiting  []*request  // for memory, in their order
	watch    *time.Timer // looks whether the data comes that is expected; nil: none was yet
	watched  bool        // it runs
	ended    bool        // no more jobs
	out      []message   // to be sent
	sending  bool        // somebody sends, and owns tx
	sendErr  error
	tx       transmit
	wake     chan struct{} // starts sender
}

// request is a command and its answer.
type request struct {
	c       *conn
	tag     uint16
	cmd     wire.Command
	ns      *namespace
	off     int64 // in the namespace, in bytes
	fua     bool
	payload *buffer
	data    []byte // in payload or, until the command is done, in c.in
	want    int    // bytes of data that come in H2CData
	got     int
	spoilt  bool // a data digest was wrong
	status  wire.Status
	result  uint64
	from    extent // is sent as data
	asked   [wire.R2TSize + wire.DigestSize]byte
	first   [wire.MaxHeaderSize]byte                                       // before the data
	rest    [wire.DigestSize + wire.CapsuleRespSize + wire.DigestSize]byte // after it
}

func newConn(t *Target, p *port, nc net.Conn) (*conn, error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("it is a %T, without a descriptor", nc)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{
		t: t, port: p, nc: nc,
		depth: 1, // until Connect
		rx:    wire.Receiver{Role: wire.Controller},
		in:    make([]byte, adminInputSize),
		wake:  make(chan struct{}, 1),
		done:  make(chan struct{}),
	}
	c.changed.L = &c.mu
	c.tx.nc, c.tx.raw, c.tx.stall = nc, raw, t.stall
	c.tx.fn = c.tx.run
	return c, nil
}

// State implements callers.Conn. A queue of a controller is always in use: its host has the namespaces attached, and is
// watched by Keep Alive, or by TCP's if it asked for none.
func (c *conn) State() (calls uint64, used bool) {
	if c.ctrl.Load() == nil {
		return 0, false
	}
	return 1, true
}

// End implements callers.Conn.
func (c *conn) End() { c.nc.Close() }

// cut ends the connection at once. Commands that run end, and no others begin.
func (c *conn) cut() {
	c.dead.Store(true)
	c.nc.Close()
	c.mu.Lock()
	c.changed.Broadcast()
	c.mu.Unlock()
}

// starve is run some time after data was expected first: it cuts the connection if some still is and none has come for that time. seen
// is asked as of then.
func (c *conn) starve(seen uint64) {
	c.mu.Lock()
	now := c.asked.Load()
	idle, starved := c.ended || c.expected.Load() == 0, now == seen
	c.watched = !idle && !starved
	if c.watched {
		c.watchLocked(now)
	}
	c.mu.Unlock()
	if !idle && starved {
		c.t.log.Warn("a host does not send the data that it was asked for", "from", c.nc.RemoteAddr(), "for", c.tx.stall)
		c.cut()
	}
}

// watchLocked has starve run. mu is held.
func (c *conn) watchLocked(seen uint64) {
	c.watched = true
	c.watch = time.AfterFunc(c.tx.stall, func() { c.starve(seen) })
}

// drain makes serve return once the commands that were read are answered.
func (c *conn) drain() {
	c.draining.Store(true)
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

// limitReads bounds the reads that follow; the zero time is no bound. When the connection drains it ends them.
func (c *conn) limitReads(t time.Time) {
	c.nc.SetReadDeadline(t)
	if c.draining.Load() {
		c.nc.SetReadDeadline(time.Unix(1, 0))
	}
}

// errGone ends a connection whose controller has ended.
var errGone = errors.New("the controller has ended")

// serve answers PDUs until the host closes, breaks the protocol, drain or cut. When it returns nothing of the connection is left.
func (c *conn) serve() error {
	go c.sender() // ends when wake is closed
	c.limitReads(time.Now().Add(beginTime))
	err := c.read()
	c.mu.Lock()
	c.ended = true // so that no more is begun when memory gets free
	if c.watch != nil {
		c.watch.Stop()
	}
	if c.jobs != nil {
		close(c.jobs)
	}
	for _, r := range c.waiting {
		c.releaseLocked(r)
	}
	c.waiting = nil
	var bad *wire.ProtocolError
	if errors.As(err, &bad) && !c.dead.Load() {
		c.terminate(bad)
	}
	if !c.draining.Load() && bad == nil && !refused(err) {
		c.nc.Close()
	}
	for c.workers > 0 {
		c.changed.Wait()
	}
	c.mu.Unlock()
	if ctrl := c.ctrl.Load(); ctrl != nil {
		ctrl.detach(c)
	}
	close(c.done)
	c.flush()
	c.mu.Lock()
	for c.sending {
		c.changed.Wait()
	}
	sendErr := c.sendErr
	for _, r := range c.requests { // those that wait for data or for an event
		c.freeLocked(r)
	}
	c.mu.Unlock()
	close(c.wake)
	defer c.nc.Close()
	var ne net.Error
	switch {
	case c.dead.Load():
		return nil
	case c.draining.Load():
		c.linger()
		return nil
	case bad != nil, refused(err):
		c.linger()
		return err
	case errors.Is(sendErr, os.ErrDeadlineExceeded):
		return fmt.Errorf("the host has not taken anything for %v", c.tx.stall)
	case errors.Is(err, os.ErrDeadlineExceeded) && c.ctrl.Load() == nil:
		return fmt.Errorf("no Connect command came within %v", beginTime)
	case errors.Is(err, os.ErrDeadlineExceeded) && c.mustAuthenticate():
		return fmt.Errorf("the host has not authenticated itself within %v", beginTime)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the rest of a PDU did not come within %v", c.tx.stall)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.As(err, &ne):
		return nil // the host is gone
	}
	return err
}

// terminate tells the host why the connection ends. mu is held.
func (c *conn) terminate(bad *wire.ProtocolError) {
	p := wire.TermReq{Type: wire.Controller.TermReq(), Fatal: bad.Fatal, Info: bad.Info}
	if n := c.to - c.from; n >= wire.HeaderSize {
		p.Header = c.in[c.from:][:min(n, int(c.in[c.from+2]))]
	}
	c.queueLocked(message{head: p.Append(nil)})
}

func (c *conn) linger() {
	if nc, ok := c.nc.(interface{ CloseWrite() error }); ok && nc.CloseWrite() == nil {
		c.nc.SetReadDeadline(time.Now().Add(lingerTime))
		io.Copy(io.Discard, c.nc)
	}
}

// fill reads until n bytes are in c.in. What is queued goes out first, as this may wait: for ever only for a header of which there
// is nothing yet.
func (c *conn) fill(n int) error {
	if c.to-c.from >= n {
		return nil
	}
	c.to = copy(c.in, c.in[c.from:c.to])
	c.from = 0
	c.flush()
	limited := c.ctrl.Load() == nil || c.mustAuthenticate() // by beginTime
	for c.to-c.from < n {
		if !limited && (c.to > c.from || n != wire.HeaderSize) {
			limited = true
			c.limitReads(time.Now().Add(c.tx.stall))
			defer c.limitReads(time.Time{})
		}
		end := len(c.in)
		if c.expected.Load() > 0 {
			end = min(end, max(c.to+expectedSize, n))
		}
		m, err := c.nc.Read(c.in[c.to:end])
		if err != nil {
			return err
		}
		c.to += m
	}
	return nil
}

// need returns the next n bytes, at most len(c.in), and does not use them up.
func (c *conn) need(n int) ([]byte, error) {
	if err := c.fill(n); err != nil {
		return nil, err
	}
	return c.in[c.from:][:n:n], nil
}

// readFull reads into b what is next.
func (c *conn) readFull(b []byte) error {
	n := copy(b, c.in[c.from:c.to])
	c.from += n
	if n == len(b) {
		return nil
	}
	c.flush()
	c.limitReads(time.Now().Add(c.tx.stall))
	defer c.limitReads(time.Time{})
	_, err := io.ReadFull(c.nc, b[n:])
	return err
}

// read does what PDUs say until there are no more.
func (c *conn) read() error {
	for {
		b, err := c.need(wire.HeaderSize)
		if err != nil {
			return err
		}
		if c.dead.Load() {
			return errGone
		}
		h, err := c.rx.Decode(b)
		if err != nil {
			return err
		}
		if b, err = c.need(h.Before()); err != nil {
			return err
		}
		if err := h.Verify(b); err != nil {
			return err
		}
		switch {
		case h.Type == wire.PDUH2CTermReq:
			return c.terminated(h)
		case c.ready == (h.Type == wire.PDUICReq):
			err = &wire.ProtocolError{Fatal: wire.FatalSequence, What: fmt.Sprintf("%v out of turn", h.Type)}
		case h.Type == wire.PDUICReq:
			err = c.initialize(h, b)
		case h.Type == wire.PDUH2CData:
			err = c.receive(h, b)
		default:
			err = c.command(h)
		}
		if err == nil {
			err = c.ending
		}
		if err != nil {
			return err
		}
	}
}

// terminated returns what the host says.
func (c *conn) terminated(h wire.Header) error {
	b, err := c.need(int(h.PLen))
	if err != nil {
		return err
	}
	var p wire.TermReq
	if err := p.Decode(h, b); err != nil {
		return err
	}
	return &p
}

// initialize answers ICReq. The data of any command fits in one H2CData.
func (c *conn) initialize(h wire.Header, b []byte) error {
	var req wire.ICReq
	if err := req.Decode(h, b); err != nil {
		return err
	}
	c.from += len(b)
	c.ready = true
	resp := wire.ICResp{
		HeaderDigest: req.HeaderDigest && c.port.HeaderDigest,
		DataDigest:   req.DataDigest && c.port.DataDigest,
		MaxH2CData:   maxTransfer,
	}
	c.rx.Framing = wire.Framing{HeaderDigest: resp.HeaderDigest, DataDigest: resp.DataDigest}
	c.framing = c.rx.Framing
	c.framing.Align = req.Align
	c.rx.MaxCapsule, c.rx.MaxData = adminCapsule, maxTransfer
	c.queue(message{head: resp.Append(nil)})
	return nil
}

// command takes a capsule. Its data is left in c.in, where it lies until the next PDU is read.
func (c *conn) command(h wire.Header) error {
	n := int(h.PLen)
	b, err := c.need(n)
	if err != nil {
		return err
	}
	var p wire.CapsuleCmd
	if err := p.Decode(h, b); err != nil {
		return err
	}
	r, err := c.begin(&p.Command)
	if err != nil {
		return err
	}
	c.from += n
	data := b[h.Before():][:h.Data()]
	if d := h.DataDigest(); d > 0 && !wire.VerifyDigest(b[n-d:], data) {
		r.spoilt = true
	}
	if r.status == wire.StatusSuccess {
		r.status = r.cmd.CheckData(uint32(len(data)))
	}
	if r.status == wire.StatusSuccess && r.spoilt {
		r.status = wire.StatusTransport
	}
	if r.status != wire.StatusSuccess {
		c.complete(r)
		return nil
	}
	c.dispatch(r, data)
	return nil
}

// begin returns a request for a command. It waits while too many answers were not taken by the host.
func (c *conn) begin(cmd *wire.Command) (*request, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.live >= c.depth {
		return nil, &wire.ProtocolError{Fatal: wire.FatalLimit, What: fmt.Sprintf("more commands than the queue's %d entries", c.depth)}
	}
	for len(c.idle) == 0 {
		if len(c.requests) < 2*c.depth {
			r := &request{c: c, tag: uint16(len(c.requests))}
			c.requests = append(c.requests, r)
			c.idle = append(c.idle, r)
			break
		}
		if c.sendErr != nil || c.dead.Load() {
			return nil, errGone
		}
		if !c.sending {
			c.sending = true
			c.sendAll(false)
			continue
		}
		c.changed.Wait()
	}
	r := c.idle[len(c.idle)-1]
	c.idle = c.idle[:len(c.idle)-1]
	c.live++
	if c.head++; c.head >= c.depth {
		c.head = 0
	}
	r.cmd = *cmd
	word, bit := &c.cids[cmd.CID/64], uint64(1)<<(cmd.CID%64)
	if *word&bit != 0 {
		r.status = wire.StatusCIDConflict
	}
	*word |= bit
	return r, nil
}

// final is whether a command that got a status will get it again.
func final(s wire.Status) bool {
	switch s {
	case wire.StatusSuccess, wire.StatusTransport, wire.StatusInterrupted, wire.StatusNotReady, wire.StatusConnectBusy,
		wire.StatusPathInternal, wire.StatusANALoss, wire.StatusANAInaccess, wire.StatusANATransition:
		return false
	}
	return true
}

// complete queues the answer to a command: the data it reads, if it succeeded, and the completion.
func (c *conn) complete(r *request) {
	m := message{r: r, last: true}
	rest := r.rest[:0]
	reads := r.status == wire.StatusSuccess && r.cmd.Direction() == wire.ToHost && len(r.data)+r.from.n > 0
	success := reads && !c.flow && r.result == 0
	if reads {
		p := wire.C2HData{CID: r.cmd.CID, Length: uint32(len(r.data) + r.from.n), Last: true, Success: success}
		m.head, m.data, m.from = p.Append(r.first[:0], c.framing), r.data, r.from
		if c.framing.DataDigest {
			rest = wire.AppendDigest(rest, r.data)
		}
	} else {
		c.free(r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !success {
		p := wire.CapsuleResp{Completion: wire.Completion{
			Result: r.result, SQID: c.qid, CID: r.cmd.CID, Status: r.status, DNR: final(r.status),
		}}
		if c.flow {
			p.Completion.SQHead = uint16(c.head)
		}
		rest = p.Append(rest, c.framing)
	}
	m.tail = rest
	c.live--
	c.cids[r.cmd.CID/64] &^= 1 << (r.cmd.CID % 64)
	c.queueLocked(m)
}

// releaseLocked takes back a request that was answered. mu is held.
func (c *conn) releaseLocked(r *request) {
	c.freeLocked(r)
	r.status, r.result, r.fua, r.spoilt, r.want, r.got, r.ns = 0, 0, false, false, 0, 0, nil
	c.idle = append(c.idle, r)
	if len(c.idle) == 1 {
		c.changed.Broadcast()
	}
}

// allot gives r memory for n bytes of payload, as r.data, or puts it in the list of those that wait for it: then start is called
// when there is some. A connection may always have maxTransfer bytes, so whoever waits does so for its own connection.
func (c *conn) allot(r *request, n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) == 0 && c.allotLocked(r, n) {
		return true
	}
	r.want = n
	c.waiting = append(c.waiting, r)
	return false
}

// tryAllot is allot for what cannot wait.
func (c *conn) tryAllot(r *request, n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.waiting) == 0 && c.allotLocked(r, n)
}

func (c *conn) allotLocked(r *request, n int) bool {
	size := int64(bufferSize(n))
	if c.held+size > maxConnPayloads {
		return false
	}
	more := max(0, c.held+size-maxTransfer) - max(0, c.held-maxTransfer)
	if more > 0 && c.t.payloads.Add(more) > maxPayloads {
		c.t.payloads.Add(-more)
		return false
	}
	c.held += size
	r.payload = getBuffer(n)
	r.data = r.payload.b[:n]
	return true
}

func (c *conn) free(r *request) {
	if r.payload == nil && r.from.ns == nil {
		r.data = nil
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freeLocked(r)
}

// freeLocked gives back what r holds, and starts those that wait for memory. mu is held.
func (c *conn) freeLocked(r *request) {
	r.data = nil
	if r.from.ns != nil {
		r.from.ns.refs.Done()
		r.from = extent{}
	}
	if r.payload == nil {
		return
	}
	size := int64(len(r.payload.b))
	putBuffer(r.payload)
	r.payload = nil
	less := max(0, c.held-maxTransfer) - max(0, c.held-size-maxTransfer)
	c.held -= size
	if less > 0 {
		c.t.payloads.Add(-less)
	}
	for !c.ended && len(c.waiting) > 0 && c.allotLocked(c.waiting[0], c.waiting[0].want) {
		next := c.waiting[0]
		c.waiting = c.waiting[:copy(c.waiting, c.waiting[1:])]
		c.resume(next)
	}
}

// hand leaves a request to a worker.
func (c *conn) hand(r *request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handLocked(r)
}

func (c *conn) handLocked(r *request) {
	c.jobs <- r // has room for all requests
	if c.resting < len(c.jobs) && c.workers < maxWorkers {
		c.workers++
		go c.work() // ends with the connection
	}
}

// work does what takes time, and sends the answers.
func (c *conn) work() {
	for {
		c.mu.Lock()
		c.resting++
		c.mu.Unlock()
		r, ok := <-c.jobs
		c.mu.Lock()
		c.resting--
		if !ok {
			c.workers--
			c.changed.Broadcast()
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		if c.dead.Load() {
			continue // serve takes back what the request holds
		}
		c.perform(r)
		c.complete(r)
		if len(c.jobs) == 0 {
			c.flush()
		}
	}
}
