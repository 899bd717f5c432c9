package nfs3

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// Defaults and bounds of Config.
const (
	DefaultConnections = 4
	MaxConnections     = 16 // as the Linux client's nconnect
	DefaultSize        = 1 << 20
	MinSize            = 1 << 10 // what FSINFO says below that is not believed
	MaxSize            = 64 << 20
	DefaultTimeout     = 60 * time.Second
)

// maxMachineName is how much of the host's name goes into credentials; a multiple of 4.
const maxMachineName = 64

// What may be in flight on one connection; a call that is alone may be larger. Servers stop reading when the memory
// they reserve per connection is used up, so more would only wait there.
const (
	maxInFlight      = 128
	maxInFlightBytes = 16 << 20
)

// Back-off: of connections and of JUKEBOX. A server that is back is as good as lost to us, and its copies with it, until we
// have tried; so connections are tried often.
const (
	minDelay        = 100 * time.Millisecond
	maxDelay        = time.Second
	maxJukeboxDelay = 15 * time.Second
)

// maxFree is how many rpcs are kept for reuse.
const maxFree = 1024

// maxAsked is how often FSINFO may fail before the configured sizes are taken for good.
const maxAsked = 3

// Config says where a data server is and how to use it.
type Config struct {
	Name        string           // for messages
	Addrs       []netip.AddrPort // all lead to the same server; SetAddrs tells of others
	Connections int              // most TCP connections to each address; 0: DefaultConnections
	RSize       int              // largest READ in bytes, lowered by FSINFO; 0: DefaultSize
	WSize       int              // largest WRITE
	Timeout     time.Duration    // a connection that is silent for so long while calls are outstanding is replaced; 0: DefaultTimeout
	Patience    layout.Patience  // for how long an Op may have no answer; zero: for ever
	// TLS makes every connection RPC-with-TLS (RFC 9289); nil: none does. What cannot be
	// made so is not used. The server's certificate must name its IP address.
	TLS *rpctls.Client
	// ReservedPort makes connections come from a port below 1024 if the process may use one, as root of the client's
	// machine: what exports that are "secure" ask for. Otherwise any port is used.
	ReservedPort bool
	Log          *slog.Logger // nil: slog.Default()
}

// Validate fills in the defaults and checks the rest.
func (c *Config) Validate() error {
	if c.Connections == 0 {
		c.Connections = DefaultConnections
	}
	if c.RSize == 0 {
		c.RSize = DefaultSize
	}
	if c.WSize == 0 {
		c.WSize = DefaultSize
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if err := checkAddrs(c.Name, c.Addrs); err != nil {
		return err
	}
	if c.Connections < 0 || c.Connections > MaxConnections {
		return fmt.Errorf("nfs3: %d connections, want 1 to %d", c.Connections, MaxConnections)
	}
	if min(c.RSize, c.WSize) < MinSize || max(c.RSize, c.WSize) > MaxSize {
		return fmt.Errorf("nfs3: largest READ %d and WRITE %d bytes, want %d to %d", c.RSize, c.WSize, MinSize, MaxSize)
	}
	if c.Timeout < 0 || c.Patience.Time < 0 {
		return fmt.Errorf("nfs3: timeout %v, patience %v", c.Timeout, c.Patience.Time)
	}
	return nil
}

// Target is one NFSv3 data server. Its methods may be called from any goroutine.
type Target struct {
	cfg    Config
	cred   oncrpc.Auth // template, see appendCall
	prog   uint32      // that the server at the addresses has
	client conns.Client
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // one for each slot.running

	unregister func() // takes it off those that give descriptors back

	rsize, wsize atomic.Int64 // lowered once, before the first READ or WRITE is encoded
	epoch        atomic.Uint64
	foreign      atomic.Uint64 // 1 more than the epoch in which the server was found not to have the program of package sparse

	// homeAfter and idleAfter are constants but for tests.
	homeAfter, idleAfter time.Duration

	mu       sync.Mutex
	closed   bool
	failFast bool       // a lost connection ends what was outstanding instead of sending it again
	paths    []*path    // at least one
	slots    []*slot    // as many for each path; the last one is the lane of small requests
	held     rpcList    // until the limits are known
	queues   [2]rpcList // of those that wait for a connection: small ones, and bulk
	delayed  rpcList
	window   window
	free     *rpc // linked by next
	nfree    int
	live     int // rpcs in use
	xid      uint32
	limits   limitState
	asked    int  // times FSINFO failed
	exposed  bool // it was logged that no reserved port could be had
	stats    counters
	trouble  trouble

	stopUntil time.Time // the server has said that it stops, and has this long to be back
	sweeping  bool      // a timer is going to call sweep
}

// The queues.
const (
	small = iota
	bulk
)

// limitState says whether RSize and WSize are known to suit the server.
type limitState uint8

const (
	limitsUnknown limitState = iota
	limitsAsked              // FSINFO is on its way; READs and WRITEs are held
	limitsKnown
)

// New returns a Target without connecting to anything.
func New(cfg Config) (*Target, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "weft" // servers do not depend on it
	}
	sys := oncrpc.AuthSys{Machine: host[:min(len(host), maxMachineName)]}
	cred, err := sys.Auth()
	if err != nil {
		return nil, err
	}
	t := &Target{
		cfg: cfg, cred: cred, prog: oncrpc.ProgNFS, client: newClient(), xid: rand.Uint32(), homeAfter: homeTime, idleAfter: idleTime,
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.rsize.Store(int64(cfg.RSize))
	t.wsize.Store(int64(cfg.WSize))
	for _, a := range cfg.Addrs {
		t.paths = append(t.paths, t.newPath(a))
	}
	for range cfg.Connections {
		for _, p := range t.paths {
			t.slots = append(t.slots, &slot{t: t, home: p, path: p})
		}
	}
	t.slots = append(t.slots, &slot{t: t, home: t.paths[0], path: t.paths[0]})
	t.window.init(max(cfg.RSize, cfg.WSize))
	t.unregister = descriptors.OnShortage(t.giveBack)
	return t, nil
}

// Epoch counts the connections made. A server that has restarted is met only on connections made since, so a caller that
// sees the same number before a WRITE was sent and after a READ was answered knows that one instance did both.
func (t *Target) Epoch() uint64 { return t.epoch.Load() }

// Limits returns the largest READ and WRITE, in bytes, that Start takes and the server answers in one piece. They may
// become smaller once the server was asked.
func (t *Target) Limits() (rsize, wsize int) {
	return int(t.rsize.Load()), int(t.wsize.Load())
}

// Start queues op and returns at once; Flush sends it. op and op.Data belong to the Target until Done, which is called
// exactly once, never from within Start and never with a lock held.
//
// A READ or WRITE longer than the configured RSize or WSize ends with an error.
func (t *Target) Start(op *layout.Op) {
	t.mu.Lock()
	err := t.start(op)
	t.mu.Unlock()
	if err != nil {
		op.N, op.EOF, op.Err = 0, false, err
		go op.Done(op) // not here: the caller may hold what Done wants
	}
}

func (t *Target) start(op *layout.Op) error {
	if t.closed {
		return ErrClosed
	}
	var proc wire.Proc
	most := 0
	switch op.Kind {
	case layout.OpRead:
		proc, most = wire.ProcRead, t.cfg.RSize
	case layout.OpWrite:
		proc, most = wire.ProcWrite, t.cfg.WSize
	case layout.OpCommit:
		proc = wire.ProcCommit
	default:
		return fmt.Errorf("nfs3: request of unknown kind %v", op.Kind)
	}
	if op.Kind != layout.OpCommit && len(op.Data) > most {
		return fmt.Errorf("nfs3: %v of %d bytes, the largest is %d", op.Kind, len(op.Data), most)
	}
	if end := op.Off + int64(len(op.Data)); op.Off < 0 || end < op.Off || op.Count < 0 {
		return fmt.Errorf("nfs3: %v of %d bytes at %d: bad range", op.Kind, max(op.Count, int64(len(op.Data))), op.Off)
	}
	if op.File == nil || len(op.File.Handles) == 0 || len(op.File.Handles[0]) > wire.MaxHandle {
		return fmt.Errorf("nfs3: %v: no file handle of NFSv3", op.Kind)
	}
	r := t.newRPC()
	r.op, r.proc, r.data = op, proc, op.Data
	if op.Kind == layout.OpWrite {
		r.committed = layout.FileSync // until a piece is less
	}
	op.Target = r
	if t.cfg.Patience.Time > 0 {
		r.heard = time.Now()
		t.sweepLater()
	}
	if t.limits == limitsUnknown {
		t.askLimits(op)
	}
	if t.limits == limitsAsked && op.Kind != layout.OpCommit {
		r.state = stateHeld
		t.held.pushBack(r)
	} else {
		r.prepare(t)
		t.enqueue(r)
	}
	t.dispatch()
	return nil
}

// askLimits sends FSINFO about the file of op, with op's identity; READs and WRITEs are held until the answer is there,
// for a server may well close the connection on a WRITE that is too large.
func (t *Target) askLimits(op *layout.Op) {
	t.limits = limitsAsked
	fh, _ := wire.NewFileHandle(op.File.Handles[0])
	res := new(wire.FsinfoRes)
	t.enqueueControl(&control{
		prog: oncrpc.ProgNFS, proc: uint32(wire.ProcFsinfo), name: wire.ProcFsinfo.String(),
		cred: op.File.Cred, args: fh.Append(nil), res: res,
		end: func(err error) {
			if err == nil {
				err = res.Status.Err()
			}
			t.gotLimits(res, err)
		},
	})
}

// gotLimits lets go what was held. After a failure (the first handle may be stale) the next READ or WRITE asks again,
// some times.
func (t *Target) gotLimits(res *wire.FsinfoRes, err error) {
	t.limits = limitsKnown
	if err == nil {
		lower(&t.rsize, res.Rtmax)
		lower(&t.wsize, res.Wtmax)
	} else if t.asked++; t.asked < maxAsked && !t.closed {
		t.limits = limitsUnknown
	}
	for r := t.held.head; r != nil; r = t.held.head {
		r.unlink()
		r.prepare(t)
		t.enqueue(r)
	}
}

func lower(size *atomic.Int64, most uint32) {
	if m := max(int64(most), MinSize); most > 0 && m < size.Load() {
		size.Store(m)
	}
}

// Flush sends what was started. It writes as much as the sockets take and does not wait for more.
func (t *Target) Flush() {
	t.mu.Lock()
	for _, s := range t.slots { // flush releases the lock; SetAddrs, which replaces t.slots, flushes as well
		if c := s.conn; c != nil {
			c.flush()
		}
	}
	t.mu.Unlock()
}

// Detach takes op.Data away from the Target: when it returns, the Data of op is not touched any more. A READ or COMMIT is
// ended with context.Canceled, by calling Done before Detach returns; a WRITE goes on from a private copy. If op ends
// meanwhile by itself, its Done may still be running when Detach returns. The caller must not start op again before Detach
// has returned.
func (t *Target) Detach(op *layout.Op) {
	var private []byte
	if op.Kind == layout.OpWrite {
		private = make([]byte, len(op.Data))
	}
	t.mu.Lock()
	r, _ := op.Target.(*rpc)
	if r == nil || r.op != op {
		t.mu.Unlock()
		return
	}
	if op.Kind == layout.OpWrite {
		copy(private, r.data)
		r.data = private
		r.payload = private[r.n : r.n+r.count]
		if r.conn != nil {
			r.conn.out.swap(r, r.payload)
		}
		t.mu.Unlock()
		return
	}
	if r.state == stateReceiving {
		r.conn.in.drop()
	}
	ended := r.endOp(context.Canceled)
	if r.state != stateReceiving && r.state != stateSent {
		t.drop(r) // nothing of it is on the wire
		t.dispatch()
	}
	t.mu.Unlock()
	ended.Done(ended)
	t.Flush()
}

// Close ends everything outstanding with ErrClosed and waits until the connections are gone. It must not be called from
// Done. Whether a WRITE that ends so has been or will be executed by the server is not known.
func (t *Target) Close() error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil
	}
	t.closed = true
	ended := t.endAll(nil, ErrClosed)
	for _, s := range t.slots {
		if c := s.conn; c != nil {
			c.fail(ErrClosed)
		}
	}
	t.mu.Unlock()
	t.cancel()
	for _, op := range ended {
		op.Done(op)
	}
	t.wg.Wait()
	t.unregister()
	return nil
}

// endAll ends every rpc that is on no connection and appends the ops whose Done is then to be called.
func (t *Target) endAll(ended []*layout.Op, err error) []*layout.Op {
	for l := range t.lists() {
		for l.head != nil {
			r := l.head
			if op := t.end(r, err); op != nil {
				ended = append(ended, op)
			}
		}
	}
	return ended
}

// lists are all lists of rpcs that are on no connection.
func (t *Target) lists() iter.Seq[*rpcList] {
	return func(yield func(*rpcList) bool) {
		for _, l := range []*rpcList{&t.held, &t.queues[small], &t.queues[bulk], &t.delayed} {
			if !yield(l) {
				return
			}
		}
		for _, s := range t.slots {
			if !yield(&s.held) {
				return
			}
		}
	}
}

// newRPC returns a zero rpc.
func (t *Target) newRPC() *rpc {
	t.live++
	r := t.free
	if r == nil {
		return new(rpc)
	}
	t.free = r.next
	t.nfree--
	r.next = nil
	return r
}

// drop takes r from wherever it is and makes it free. Nothing of it may be in the hands of a sender or a stream.
func (t *Target) drop(r *rpc) {
	r.unlink()
	if r.conn != nil {
		r.conn.remove(r)
	}
	t.live--
	*r = rpc{}
	if t.nfree < maxFree {
		r.next = t.free
		t.free = r
		t.nfree++
	}
}

// end ends the request of r and drops r. It returns the op whose Done is to be called without the lock, if any.
func (t *Target) end(r *rpc, err error) *layout.Op {
	if ctl := r.ctl; ctl != nil {
		ctl.resent = r.resent
		if r.conn != nil {
			ctl.addr = r.conn.addr
		}
		t.drop(r)
		ctl.end(err)
		return nil
	}
	op := r.endOp(err)
	t.drop(r)
	return op
}

// endOp takes the op from r with the results in it, and leaves r abandoned. It returns nil if r was that already.
func (r *rpc) endOp(err error) *layout.Op {
	op := r.op
	if op == nil {
		return nil
	}
	r.op, r.data = nil, nil
	op.Target = nil
	op.N, op.EOF, op.Err = r.n, r.eof, err
	op.Committed, op.Verifier = r.committed, r.verifier
	if r.n == 0 && err != nil {
		op.Committed = layout.Unstable
	}
	return op
}

// enqueue puts a prepared rpc behind those that wait for a connection.
func (t *Target) enqueue(r *rpc) {
	r.state = stateQueued
	t.queues[r.class()].pushBack(r)
}

// requeue puts a prepared rpc that was on a connection before those that wait for one.
func (t *Target) requeue(r *rpc) {
	r.state = stateQueued
	t.queues[r.class()].pushFront(r)
}

func (t *Target) enqueueControl(ctl *control) *rpc {
	r := t.newRPC()
	r.ctl = ctl
	r.prepare(t)
	t.enqueue(r)
	return r
}

// queued is how many rpcs wait for a connection.
func (t *Target) queued() int { return t.queues[small].len + t.queues[bulk].len }

// dispatch gives connections to those that wait for one, as far as there is room.
func (t *Target) dispatch() {
	for r := t.queues[small].head; r != nil; r = t.queues[small].head {
		c := t.pick(r)
		if c == nil {
			break
		}
		r.unlink()
		c.assign(r)
	}
	for r := t.queues[bulk].head; r != nil && t.window.admits(r.cost()); r = t.queues[bulk].head {
		c := t.pick(r)
		if c == nil {
			break
		}
		r.unlink()
		c.assign(r)
	}
}

// lane is the slot that is for small requests alone.
func (t *Target) lane() *slot { return t.slots[len(t.slots)-1] }

// pick returns the connection with the fewest bytes outstanding that has room for r, or nil. It sees to it that more
// connections are made if those there are have something to do. A small request that would come behind large ones
// everywhere goes to the lane, once that is up.
func (t *Target) pick(r *rpc) *conn {
	var best *conn
	up, connecting := 0, 0
	lane := t.lane()
	for _, s := range t.slots[:len(t.slots)-1] {
		switch c := s.conn; {
		case c != nil && !c.dead && !c.retired:
			up++
			if c.room(r.cost()) && (best == nil || c.load(r) < best.load(r)) {
				best = c
			}
		case s.running && (c == nil || c.dead):
			connecting++
		}
	}
	more := 0
	switch {
	case up == 0: // one attempt for each address is enough, all at once, for some may be dead
		more = len(t.paths) - connecting
	case best == nil || best.bytes > 0:
		more = 1
	}
	for _, s := range t.slots[:len(t.slots)-1] {
		if more > 0 && !s.running {
			s.start(up == 0)
			more--
		}
	}
	reserve := lane.conn
	if reserve != nil && (reserve.dead || reserve.retired) {
		reserve = nil
	}
	switch {
	case r.class() == bulk:
		if up == 0 && reserve != nil && reserve.room(r.cost()) {
			return reserve // the server gives us no other
		}
		return best
	case up == 0 || best != nil && best.bulk == 0 && t.queues[bulk].len == 0:
	case reserve == nil:
		if !lane.running {
			lane.start(false)
		}
	case reserve.room(r.cost()):
		return reserve
	default:
		return nil
	}
	if best == nil && reserve != nil && reserve.room(r.cost()) {
		return reserve
	}
	return best
}

func (t *Target) nextXID() uint32 {
	t.xid++
	return t.xid
}

// postpone queues r again after a while: the server has said JUKEBOX.
func (t *Target) postpone(r *rpc) {
	t.stats.jukebox++
	r.heard = time.Now() // it is an answer
	r.delay = min(max(2*r.delay, minDelay), maxJukeboxDelay)
	d := jitter(r.delay)
	r.state = stateDelayed
	r.retryAt = time.Now().Add(d)
	t.delayed.pushBack(r)
	time.AfterFunc(d, t.retryDue)
}

// retryDue ends the back-offs that are over. A timer that finds nothing to do belonged to an rpc that has ended.
func (t *Target) retryDue() {
	t.mu.Lock()
	now := time.Now()
	for r := t.delayed.head; r != nil; {
		next := r.next
		if !now.Before(r.retryAt) {
			r.unlink()
			r.prepare(t)
			t.enqueue(r)
		}
		r = next
	}
	t.dispatch()
	t.mu.Unlock()
	t.Flush()
}

// jitter returns d changed by at most a quarter.
func jitter(d time.Duration) time.Duration {
	return d - d/4 + rand.N(d/2)
}
