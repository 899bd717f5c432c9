package metaclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// maxRecalls bounds the recalls that are being answered; a service that sends more without waiting for answers loses
// the connection.
const maxRecalls = 1024

// Config says which service to use and as whom.
type Config struct {
	Addrs  []string // HOST:PORT, tried in turn; services that they tell of are tried as well
	Client metarpc.ClientInfo
	TLS    *rpctls.Client // nil = connections are in clear text
	Log    *slog.Logger   // nil = slog.Default()

	// OnRecall finishes writes in [off, off+n) of a file, makes them stable and forgets what is kept of that range;
	// n may be layout.ToEOF. The recall is answered when it returns. It is called in a goroutine of its own, several at
	// once. Its calls must be made with ctx, which gives them slots when all others are taken. nil = there is never
	// anything to do.
	OnRecall func(ctx context.Context, id layout.FileID, off, n int64) error
	// OnLeaseRecall makes the kernel forget what it keeps of these inodes. What the client keeps of them is gone before. The
	// recall is answered when it returns. It is also called with all that there was a lease on when the leases are lost with
	// the session or the instance of the service. As OnRecall, it is called in a goroutine of its own and makes its calls
	// with ctx; recalls of one inode, by either, come one after the other. While changes that wait for the service stand in
	// the way of the kernel it calls what ctx has under StuckKey. nil = there is never anything to do.
	OnLeaseRecall func(ctx context.Context, items []metarpc.LeaseItem)
	// OnCopiesStale gives copies of a file up: they are neither read nor written any more. It does not wait for anything.
	OnCopiesStale func(id layout.FileID, copies []metarpc.CopyRef)
	// OnSizeQuery reports, by a provisional LayoutCommit, what has been written to these files. It is called like OnRecall.
	OnSizeQuery func(ctx context.Context, ids []layout.FileID)
	// OnReserveRecall has appends to a file whose places have numbers up to upto find other places, but for those that
	// are begun, which it waits for, and reports which of them are written. nil = there are none.
	OnReserveRecall func(ctx context.Context, id layout.FileID, upto uint64)
	// OnLost is called when the session of a shard has ended without us, before another one is begun: nothing may be done in that one
	// on the strength of what was so in the old one. Inodes of other shards are not concerned. It must not block or make calls. nil = nobody
	// wants to know.
	OnLost func(shard int)
	// OnReset is called, in a goroutine of its own, after a new session of a shard had to be begun (lost: what others were kept from
	// changing until then may have been changed, locks are gone) or the service was restarted, or is another one: provisional sizes of the
	// shard's files must be reported again. Those that are open have been opened again before. Cached layouts are gone. Its calls must be made
	// with ctx, which ends when the volume is closed or the shard's next reset comes. nil = nothing to do.
	OnReset func(ctx context.Context, shard int, lost bool)
	// OnLockLost is called when locks of an owner on a file, which the service had granted, have been lost: with the
	// session, or because a restarted service has given them to somebody else. It must not block. nil = nobody wants to
	// know.
	OnLockLost func(id layout.FileID, flock bool, owner uint64)

	// Patience is for how long calls with contexts marked by Soft go on while nothing is heard of the service. Then they end with its Over,
	// and are what they are if their context ends. All others are hard. The zero value makes all so.
	Patience layout.Patience
	// Waiting reports whether there are requests that data servers have not answered. As long as there are, OnRecall and
	// OnLeaseRecall may take longer than a lease. nil = there are none.
	Waiting func() bool
	// Near returns the data servers on this host, at most metarpc.MaxNear. nil = there are none.
	Near func() []layout.DeviceID
	// Lending are those of them that lend files to be kept open, as Pin wants them. nil = there are none.
	Lending func() []layout.DeviceID

	// Usage says what was done at each device since the client was made, the numbers only grow (but Outstanding). After
	// each UsagePeriod what has come since is reported to the service. It is called by one goroutine. nil = nothing is reported.
	Usage       func() []metarpc.DeviceStats
	UsagePeriod time.Duration // 0 = DefaultUsagePeriod

	// OnDown learns of all devices that are down as metadata services find, when that changes: they are told once
	// more, with whatever else has changed, until they are not. One call comes after the other. It must not block, or
	// call the Volume. nil = nobody wants to know.
	OnDown func(down []metarpc.DownDevice)
	// OnDevices learns that what Device answers may have changed. One call need not have ended when the next one comes. It
	// must not block, or call the Volume. nil = nobody wants to know.
	OnDevices func()
	// Down returns the devices that do not answer this client, or take none of its writes, as its own requests find.
	// It is called by one goroutine, every few seconds and after ReportDown. nil = nothing is reported.
	Down func() []layout.DeviceID

	// Speaks are the versions of the protocol; zero = all that this program knows. Tests choose others.
	Speaks metarpc.Versions
}

// Client is the session with the service of one shard. Its methods may be called by many goroutines. What they need of inodes of other shards
// they ask the Volume's other Clients.
type Client struct {
	cfg   Config
	log   *slog.Logger
	v     *Volume
	shard int

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	opens     ledger   // Open and Close
	grants    ledger   // LayoutGet and LayoutReturn
	pins      sync.Map // from layout.FileID to metarpc.CopyRef
	execs     sync.Map // layout.FileID of what is open for execution, among others
	locks     lockBook
	cache     cache
	leases    *leaseTable
	valid     validity                   // of leases
	turnsBack atomic.Bool                // the service does, see metarpc.StatusTurnedBack
	chores    chan struct{}              // wakes the janitor
	returns   chan struct{}              // wakes who gives leases back
	sent      [metarpc.Ops]atomic.Uint64 // calls of each kind
	took      [metarpc.Ops]hist.Hist     // those that were answered, from when they were sent last

	mu          sync.Mutex
	session     *session      // nil between sessions
	conn        *conn         // nil while there is none
	begun       chan struct{} // closed when there is a session again
	addr        string        // of the service it is connected to, or was last
	instance    [16]byte
	since       time.Time // when the connection was made or lost
	problem     error     // why there is no connection
	heard       time.Time // when something came from the service, on any connection
	reconnects  int
	recalls     int                             // being answered
	recalling   map[layout.FileID]chan struct{} // closed when the last recall of the inode is done
	lost        bool                            // a session was, and OnReset has not returned since
	cancelReset context.CancelFunc
	resetDone   chan struct{} // of the last reset
}

// State is how a session is, for people.
type State struct {
	Shard      int
	Addr       string // of the service it is connected to, or was last
	Connected  bool
	Since      time.Time // when the connection was made or lost
	Problem    error     // why there is no connection
	Reconnects int
	Session    metarpc.SessionID
	Volume     [16]byte
	Instance   [16]byte
	Lease      time.Duration
	Slots      int // of the session
	Busy       int // slots with a call that is not answered
	Layouts    int // files with cached layouts
	Leases     int // inodes on which there are leases
	Names      int // of which it is known what they mean
	Alive      bool
	Calls      map[metarpc.Op]uint64       // sent, for each kind
	Took       map[metarpc.Op]*hist.Counts // those that were answered
}

// newClient makes a Client that does nothing yet.
func (v *Volume) newClient(shard int) *Client {
	c := &Client{
		cfg: v.cfg, log: v.log, v: v, shard: shard,
		chores: make(chan struct{}, 1), returns: make(chan struct{}, 1), begun: make(chan struct{}),
		cache: cache{limit: cacheFiles}, recalling: map[layout.FileID]chan struct{}{},
		leases: newLeaseTable(leaseInodes), valid: validity{start: time.Now()},
	}
	c.leases.wake = func() { wake(c.returns) }
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.opens.wake, c.grants.wake = func() { wake(c.chores) }, func() { wake(c.chores) }
	return c
}

// run starts what a Client does by itself. cn is its connection, nil if there is none yet.
func (c *Client) run(cn *conn) {
	c.tasks.Go(func() { c.manage(cn) }) // owns the connection of the moment; ends with c.ctx
	c.tasks.Go(c.janitor)               // sends Close and LayoutReturn; ends with c.ctx
	c.tasks.Go(c.leaseJanitor)          // sends LeaseReturn; ends with c.ctx
}

// foreign reports whether an inode is of another shard.
func (c *Client) foreign(id layout.FileID) bool { return c.v.shard(id) != c.shard }

func (c *Client) connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn != nil
}

// Close ends the session and stops everything. Calls that are not answered end with ErrClosed. ctx bounds the wait for
// the service, not the stopping.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	never := c.since.IsZero()
	c.mu.Unlock()
	if never { // there is no session to be ended, nor is one waited for
		c.cancel()
	}
	err := c.do(prior(ctx), metarpc.OpEndSession, metarpc.Cred{}, &metarpc.Empty{}, nil, func(o *outcome) {
		if o.err == nil && o.status == metarpc.StatusOK {
			c.cancel() // before the reader sees the service hang up, so that nobody connects again
		}
	})
	c.cancel()
	c.mu.Lock()
	//lint:ignore SA2001 a caller that found the client open under this lock has begun its task
	c.mu.Unlock()
	c.tasks.Wait()
	if errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// Instance is the service's, which changes with each of its starts.
func (c *Client) Instance() [16]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.instance
}

// State tells how the client is.
func (c *Client) State() State {
	layouts := c.cache.len()
	leases, names := c.leases.len()
	calls := map[metarpc.Op]uint64{}
	for op := range c.sent {
		if n := c.sent[op].Load(); n > 0 {
			calls[metarpc.Op(op)] = n
		}
	}
	took := map[metarpc.Op]*hist.Counts{}
	for op := range c.took {
		if counts := c.took[op].Counts(); counts.Total() > 0 {
			took[metarpc.Op(op)] = &counts
		}
	}
	volume := c.v.places.volumeID()
	c.mu.Lock()
	defer c.mu.Unlock()
	st := State{
		Shard: c.shard, Addr: c.addr, Connected: c.conn != nil, Since: c.since, Problem: c.problem, Reconnects: c.reconnects,
		Volume: volume, Instance: c.instance, Layouts: layouts,
		Leases: leases, Names: names, Alive: c.Alive(), Calls: calls, Took: took,
	}
	if s := c.session; s != nil {
		st.Session, st.Lease, st.Slots = s.id, s.lease, len(s.slots)
		for _, sl := range s.slots {
			if sl.outstanding {
				st.Busy++
			}
		}
	}
	return st
}

// manage keeps the client connected: it reads cn until it fails, connects again, and so on until c.ctx ends. Without cn it connects first.
func (c *Client) manage(cn *conn) {
	var retry backoff
	if cn == nil {
		if cn = c.reach(nil, &retry); cn == nil {
			return
		}
		c.install(cn)
	}
	for {
		err := c.serve(cn)
		if c.ctx.Err() != nil {
			c.endSession(ErrClosed)
			return
		}
		c.log.Warn("metadata service: connection lost", "addr", cn.addr, "err", err)
		if cn.useful {
			retry = backoff{}
		}
		if cn = c.reach(err, &retry); cn == nil {
			return
		}
		c.install(cn)
		c.log.Info("metadata service: connected again", "addr", cn.addr)
	}
}

// reach connects, however long that takes. err is why there is no connection any more, nil if there has not been one. It returns nil when c.ctx
// has ended.
func (c *Client) reach(err error, retry *backoff) *conn {
	began := time.Now()
	for {
		if errors.Is(err, errSessionGone) {
			c.log.Warn("metadata service: session lost, beginning a new one")
			if c.cfg.OnLost != nil {
				c.cfg.OnLost(c.shard)
			}
			c.endSession(err)
		}
		retry.most = c.pause()
		if errors.Is(err, errMoved) {
			retry.most = movedPause
		}
		if err != nil && !retry.waitFrom(c.ctx, began) {
			c.endSession(ErrClosed)
			return nil
		}
		var cn *conn
		began = time.Now()
		if cn, err = c.connect(c.ctx, c.sessionID(), false); err == nil {
			return cn
		}
		if c.ctx.Err() == nil {
			c.failed(err)
		}
	}
}

// pause is the longest delay between attempts to connect. A service that is there again ends the session if it does not hear of it for a lease.
func (c *Client) pause() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == nil {
		return backoffMax
	}
	return min(backoffMax, c.session.lease/3)
}

func (c *Client) sessionID() metarpc.SessionID {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == nil {
		return metarpc.SessionID{}
	}
	return c.session.id
}

// failed records why there is no connection, and logs it if it is another reason than before.
func (c *Client) failed(err error) {
	c.mu.Lock()
	before := c.problem
	c.problem = err
	c.mu.Unlock()
	if before == nil || before.Error() != err.Error() {
		c.log.Warn("metadata service: no connection, trying on", "err", err)
	}
}

// install makes cn the session's connection, beginning a session if there is none, and sends what is not answered.
// Only the manager calls it, and Dial before there is a manager.
func (c *Client) install(cn *conn) {
	w := cn.welcome
	c.turnsBack.Store(w.Version >= metarpc.TurnsBack)
	first := c.since.IsZero() // only this goroutine changes what is read here without the lock
	fresh := c.session == nil
	reset := !first && (fresh || c.instance != w.Instance)
	var items []metarpc.LeaseItem
	if reset { // before any reply is read: the service may not know of what it granted before
		c.cache.clear()
		items = c.leases.clear()
	}
	if reset && fresh {
		c.loseAllLocks()
		c.opens.lose()
	}
	if first { // there are no leases that could have run out; what was asked before this is kept
		c.valid.extend(cn.began, time.Duration(w.Lease))
	} else {
		c.renewed(cn.began, time.Duration(w.Lease))
	}
	c.v.expireDevices()

	var refused []*slot
	defer func() {
		for _, sl := range refused {
			sl.finish()
		}
	}()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.instance = w.Instance
	if fresh {
		c.session = newSession(w)
		close(c.begun)
	}
	if !first {
		c.reconnects++
	}
	for _, sl := range c.session.slots {
		if sl.outstanding {
			if sl.op == metarpc.OpReclaimComplete && reset {
				sl.renewInstead()
			}
			if !c.queue(cn, sl) {
				refused = append(refused, sl)
			}
			cn.post()
		}
	}
	now := time.Now()
	c.conn, c.since, c.problem = cn, now, nil
	c.heard, cn.ticked = now, now
	if reset {
		c.lost = c.lost || fresh
		c.startReset(items)
	}
}

// startReset begins the work after a reset, once that of an earlier reset has ended; c.mu is held. items are the leases that
// there were.
func (c *Client) startReset(items []metarpc.LeaseItem) {
	if c.cancelReset != nil {
		c.cancelReset()
	}
	ctx, cancel := context.WithCancel(prior(c.ctx))
	before, done, lost := c.resetDone, make(chan struct{}), c.lost
	c.cancelReset, c.resetDone = cancel, done
	// Owns the reclaiming after this reset; ends with it, with the next reset, or with c.ctx.
	c.tasks.Go(func() {
		defer close(done)
		defer cancel()
		c.leasesLost(ctx, items)
		if before != nil {
			<-before
		}
		c.reclaim(ctx)
		c.reclaimLocks(ctx)
		if c.cfg.OnReset != nil && ctx.Err() == nil {
			c.cfg.OnReset(ctx, c.shard, lost)
		}
		c.mu.Lock()
		if ctx.Err() == nil { // or the next reset goes on with it
			c.lost = false
		}
		c.mu.Unlock()
		if err := c.do(ctx, metarpc.OpReclaimComplete, metarpc.Cred{}, &metarpc.Empty{}, nil, nil); err != nil && ctx.Err() == nil {
			c.log.Error("metadata service: reclaiming", "err", err)
		}
	})
}

// endSession gives up the session, if there is one. Calls that wait learn what has become of theirs.
func (c *Client) endSession(cause error) {
	c.mu.Lock()
	s := c.session
	if s == nil {
		c.mu.Unlock()
		return
	}
	c.valid.end()
	c.session, c.begun = nil, make(chan struct{})
	var lost []*slot
	for _, sl := range s.slots {
		if sl.outstanding {
			sl.outstanding = false
			lost = append(lost, sl)
		}
	}
	c.mu.Unlock()
	close(s.ended)
	for _, sl := range lost {
		sl.lost(cause)
	}
}

// wake tells a janitor that there is something to give back.
func wake(janitor chan struct{}) {
	select {
	case janitor <- struct{}{}:
	default:
	}
}

// gather is how long the janitor lets things to be given back add up, so that it needs few calls.
const gather = 20 * time.Millisecond

func (c *Client) janitor() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.chores:
		}
		if !sleep(c.ctx, gather) {
			return
		}
		c.giveBack(&c.opens, metarpc.OpClose, func(ids []layout.FileID) any { return &metarpc.CloseArgs{IDs: ids} })
		c.giveBack(&c.grants, metarpc.OpLayoutReturn, func(ids []layout.FileID) any { return &metarpc.LayoutReturnArgs{IDs: ids} })
	}
}

// leaseJanitor is one of its own, as it waits for the kernel.
func (c *Client) leaseJanitor() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.returns:
		}
		if !sleep(c.ctx, gather) {
			return
		}
		c.returnLeases(prior(c.ctx))
	}
}

func (c *Client) giveBack(l *ledger, op metarpc.Op, args func([]layout.FileID) any) {
	for {
		ids := l.batch(metarpc.MaxBatch)
		if len(ids) == 0 {
			return
		}
		err := c.Call(c.ctx, op, 0, 0, args(ids), nil)
		if err != nil && c.ctx.Err() == nil {
			c.log.Error("metadata service: giving back", "op", op, "files", len(ids), "err", err)
		}
		l.given(ids)
	}
}

// reclaim opens again what is open, after the service may have forgotten it.
func (c *Client) reclaim(ctx context.Context) {
	files := make(chan layout.FileID)
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() { // reclaims files until there are no more
			for id := range files {
				if err := c.reopen(ctx, id); err != nil && ctx.Err() == nil {
					c.log.Error("metadata service: a file that is open cannot be opened again", "inode", id, "err", err)
				}
			}
		})
	}
	for _, id := range c.opens.all() {
		files <- id
	}
	close(files)
	workers.Wait()
}

func (c *Client) reopen(ctx context.Context, id layout.FileID) error {
	if err := c.opens.take(ctx, id); err != nil {
		return err
	}
	if !c.opens.holds(id) { // released meanwhile
		c.opens.end(id, false)
		return nil
	}
	loss := c.opens.lostSince(id)
	args := &metarpc.OpenArgs{ID: id, Reclaim: true, Pinned: c.pinned(id)}
	if _, ok := c.execs.Load(id); ok {
		args.Access = metarpc.AccessExec
	}
	err := c.do(ctx, metarpc.OpOpen, metarpc.Cred{}, args, nil, func(o *outcome) { c.opens.end(id, false) })
	if ctx.Err() == nil { // or the next reset goes on with it
		c.opens.retried(id, loss)
	}
	return err
}

// backoff is the delay between attempts to connect.
type backoff struct{ last, most time.Duration } // most is 0 for backoffMax

const (
	backoffMin = 100 * time.Millisecond
	backoffMax = 5 * time.Second
	movedPause = 500 * time.Millisecond // at most, while services say that nobody has the shard: one of them is about to take it
	gracePause = 500 * time.Millisecond // at most, while a service puts a call off, which it says no sooner than after so long
)

// wait sleeps for the next delay and reports whether ctx still lives.
func (b *backoff) wait(ctx context.Context) bool { return b.waitFrom(ctx, time.Now()) }

// waitFrom is wait for what counts from when the attempt before began: one that has taken long itself is not followed
// by a pause.
func (b *backoff) waitFrom(ctx context.Context, began time.Time) bool {
	most := b.most
	if most == 0 {
		most = backoffMax
	}
	b.last = min(max(2*b.last, backoffMin), most)
	return sleep(ctx, jitter(b.last)-time.Since(began))
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// wrap adds to the end of a caller's context what the call was and, if that is why, that there is no connection.
func (c *Client) wrap(op metarpc.Op, err error) error {
	c.mu.Lock()
	problem := c.problem
	c.mu.Unlock()
	if problem != nil {
		return fmt.Errorf("metadata service: %v: %w (no connection: %v)", op, err, problem)
	}
	return fmt.Errorf("metadata service: %v: %w", op, err)
}
