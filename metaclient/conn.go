package metaclient

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	// helloTimeout bounds connecting to one address, and then the answer to the hello.
	helloTimeout = 10 * time.Second
	// slowHello is how long an address may take before the next one is asked, too.
	slowHello = time.Second

	// Where there are other services to go to, it is looked each silentRound whether anything has come while calls are
	// not answered. After silentAsk rounds without anything the service is asked for a sign of life, after silentLeave
	// rounds the connection is given up. Rounds are counted, and not time: a client that was itself stopped finds one
	// round over when it goes on.
	silentRound = 500 * time.Millisecond
	silentAsk   = 4
	silentLeave = 8
	// idleAsk is after how long without a word from a service it is asked for a sign of life though no calls wait: the
	// one that follows it puts changes off until all sessions are back. Each idleRound it is looked.
	idleAsk   = 3 * time.Second
	idleRound = idleAsk / 2

	// leaveWait bounds the wait for the answers to other calls when a service is shutting down. The service finishes
	// these calls, but may be killed before.
	leaveWait = 5 * time.Second
)

// conn is one connection of a session.
type conn struct {
	addr    string
	nc      net.Conn
	began   time.Time // before the hello was sent
	r       *bufio.Reader
	welcome *metarpc.Welcome
	wake    chan struct{} // wakes the writer
	probed  chan struct{} // has the writer ask for a sign of life
	closed  chan struct{} // closed when the connection is given up
	token   chan struct{} // has the token when nobody reads
	kicked  chan struct{} // wakes the reader
	turns   atomic.Uint64 // how often callers have read

	// Of whoever has the token, and after that of the manager.
	frame  []byte // what was read last
	ended  error  // why nobody can read any more
	useful bool   // something was answered

	// Guarded by Client.mu.
	out        []byte      // frames to be written
	spare      []byte      // out's other array
	writing    bool        // somebody writes, and will write what is in out when that is done
	fault      error       // why writing failed
	ticked     time.Time   // when tick was called last, or the connection made
	calls      int         // that were sent and are not answered
	leaver     *time.Timer // gives the connection up: the service is shutting down; nil: it is not, as far as is known
	calledBack time.Time   // when the service did last
	watcher    *time.Timer // runs watch
	watching   bool        // it is set
	silent     int         // rounds in which nothing came
	seen       time.Time   // Client.heard as the last round found it
}

// greeting is what became of asking one address.
type greeting struct {
	cn  *conn
	err error
	at  string
}

// connect looks for the shard's service where it is said to be, then where it was last, then everywhere else, and says
// hello for the session, or for a new one if it is zero. Addresses are asked one after the other, each when the one
// before has failed, or has kept us waiting for slowHello; then both are waited for. What services say about where
// shards are is followed at once. errSessionGone tells that the service answered and has no such session; errMoved
// (errors.Is) that services answered, but not the shard's.
//
// An address that does not answer is waited for as long as that may take, and meanwhile the others are asked again and
// again: the shard may be about to become theirs. With once connect fails instead if one has said that the shard is not
// its.
func (c *Client) connect(ctx context.Context, session metarpc.SessionID, once bool) (*conn, error) {
	c.mu.Lock()
	last := c.addr
	c.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel() // before that
	answers := make(chan greeting)
	waiting := map[string]bool{} // addresses that have not answered
	tried := map[string]bool{}   // those, and others that are not to be asked now
	var errs []error
	for {
		var next <-chan time.Time
		addr := c.v.places.next(c.shard, last, tried)
		moved := errors.Is(errors.Join(errs...), errMoved)
		switch {
		case addr != "":
			tried[addr], waiting[addr] = true, true
			asking.Go(func() { // asks one address; ends with ctx at the latest
				cn, err := c.try(ctx, addr, session)
				select {
				case answers <- greeting{cn, err, addr}:
				case <-ctx.Done():
					if err == nil {
						cn.nc.Close()
					}
				}
			})
			next = time.After(slowHello)
		case len(waiting) == 0, moved && once:
			return nil, errors.Join(errs...)
		case len(errs) > 0 && !once:
			c.failed(errors.Join(errs...))
			pause := backoffMax
			if moved {
				pause = movedPause
			}
			next = time.After(jitter(pause))
		}
		select {
		case g := <-answers:
			delete(waiting, g.at)
			switch {
			case g.err == nil:
				c.mu.Lock()
				c.addr = g.at
				c.mu.Unlock()
				return g.cn, nil
			case g.err == errSessionGone:
				return nil, g.err
			}
			errs = append(errs, g.err)
		case <-next:
			if addr == "" {
				tried, errs = maps.Clone(waiting), nil
			}
		case <-ctx.Done():
			return nil, errors.Join(append(errs, ctx.Err())...)
		}
	}
}

// try connects to one address and says hello.
func (c *Client) try(ctx context.Context, addr string, session metarpc.SessionID) (*conn, error) {
	dialing, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	nc, err := c.v.dial(dialing, addr)
	if err != nil {
		return nil, connectError(addr, err)
	}
	cn, err := c.hello(ctx, nc, addr, session)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return cn, nil
}

// hello exchanges the first frames on a connection.
func (c *Client) hello(ctx context.Context, nc net.Conn, addr string, session metarpc.SessionID) (*conn, error) {
	began := time.Now()
	nc.SetDeadline(began.Add(helloTimeout))
	stop := onEnd(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	w, r, err := c.greet(nc, session)
	stop()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, helloError(addr, err)
	}
	if w.Status == metarpc.StatusVersion {
		return nil, fmt.Errorf("metadata service at %s: %s", addr, w.Message)
	}
	if !c.cfg.Speaks.Has(w.Version) {
		return nil, fmt.Errorf("%s answers in version %d of the metadata protocol, this weft speaks %v", addr, w.Version, c.cfg.Speaks)
	}
	if err := c.v.places.learn(addr, w); err != nil {
		return nil, err // whatever else it says is not about our volume
	}
	switch {
	case w.Status == metarpc.StatusBadSession && session != metarpc.SessionID{}:
		return nil, errSessionGone
	case w.Status == metarpc.StatusMoved:
		return nil, fmt.Errorf("%s %w (shard %d)", addr, errMoved, c.shard)
	case w.Status == metarpc.StatusShutdown:
		return nil, &UnavailableError{addr, w.Message}
	case w.Status != metarpc.StatusOK:
		return nil, fmt.Errorf("metadata service at %s: %v: %s", addr, w.Status, w.Message)
	case session != metarpc.SessionID{} && w.Session != session:
		return nil, fmt.Errorf("%s answers for another session than it was asked for", addr)
	}
	nc.SetDeadline(time.Time{})
	return &conn{addr: addr, nc: nc, began: began, r: r, welcome: w, wake: make(chan struct{}, 1), probed: make(chan struct{}, 1),
		closed: make(chan struct{}), token: make(chan struct{}, 1), kicked: make(chan struct{}, 1)}, nil
}

// onEnd runs f in a goroutine of its own if ctx ends before stop is called; after stop it no longer runs.
func onEnd(ctx context.Context, f func()) (stop func()) {
	ran := make(chan struct{})
	remove := context.AfterFunc(ctx, func() {
		defer close(ran)
		f()
	})
	return func() {
		if !remove() {
			<-ran
		}
	}
}

// greet sends Hello and reads Welcome.
func (c *Client) greet(nc net.Conn, session metarpc.SessionID) (*metarpc.Welcome, *bufio.Reader, error) {
	hello, err := metarpc.AppendHello(nil, &metarpc.Hello{
		Magic: metarpc.Magic, Lowest: c.cfg.Speaks.Lowest, Highest: c.cfg.Speaks.Highest, Client: c.cfg.Client, Session: session, Shard: c.shard,
	})
	if err != nil {
		return nil, nil, err
	}
	if _, err := nc.Write(hello); err != nil {
		return nil, nil, err
	}
	r := bufio.NewReaderSize(nc, 64<<10)
	frame, err := metarpc.ReadFrame(r, nil, metarpc.MaxHello)
	if err != nil {
		return nil, nil, err
	}
	w, err := metarpc.ParseWelcome(frame, c.cfg.Speaks)
	return w, r, err
}

// serve reads the connection until it fails, which it does at the latest when c.ctx ends.
func (c *Client) serve(cn *conn) error {
	defer onEnd(c.ctx, cn.hangUp)()
	written := make(chan struct{})
	go func() { // ends with cn.closed, or closes cn.nc
		defer close(written)
		c.write(cn)
	}()
	err := c.read(cn)
	c.mu.Lock()
	c.conn = nil // what is called from now on waits for the next connection
	c.mu.Unlock()
	cn.nc.Close()
	close(cn.closed)
	<-written
	c.v.setDown(c.shard, nil)
	c.mu.Lock()
	if cn.leaver != nil {
		cn.leaver.Stop()
	}
	if cn.fault != nil && errors.Is(err, net.ErrClosed) {
		err = cn.fault // who wrote found it and closed the connection
	}
	c.since, c.problem = time.Now(), err
	c.mu.Unlock()
	return err
}

// opIn is another function in tests, as there is no call that only some versions have.
var opIn = metarpc.Op.In

// queue adds an outstanding call to what is to be written; Client.mu is held. Who calls it sees to it that it is written. It reports false if the
// service is too old for the call, which is not outstanding any more: the caller then calls finish, without Client.mu.
func (c *Client) queue(cn *conn, sl *slot) bool {
	if !opIn(sl.op, cn.welcome.Version) {
		sl.refuse()
		return false
	}
	sl.sends++
	cn.calls++
	cn.out = metarpc.AppendCallAs(cn.out, sl.frame, cn.welcome.Version)
	if !cn.watching {
		c.startWatch(cn, 0)
	}
	return true
}

// startWatch has the service watched as long as calls are not answered, of which nothing was heard for so many rounds;
// Client.mu is held.
func (c *Client) startWatch(cn *conn, silent int) {
	cn.watching, cn.silent, cn.seen = true, silent, c.heard
	if cn.watcher == nil {
		cn.watcher = time.AfterFunc(silentRound, func() { c.watch(cn) })
	} else {
		cn.watcher.Reset(silentRound)
	}
}

// watch looks, each silentRound, whether anything has come while calls are not answered. A service that is asked for a
// sign of life gives it at once, whatever else it does, unless it must not answer anything; then the shard may be
// another one's. What one session finds the others of the volume at the same service need not find by themselves.
func (c *Client) watch(cn *conn) {
	several := c.v.places.several()
	c.mu.Lock()
	if c.conn != cn || cn.calls == 0 {
		cn.watching = false
		c.mu.Unlock()
		return
	}
	cn.silent++
	if c.heard.After(cn.seen) || !several {
		cn.silent = 0
	}
	cn.seen = c.heard
	silent := cn.silent
	cn.watcher.Reset(silentRound)
	c.mu.Unlock()
	switch {
	case silent >= silentLeave:
		c.fail(cn, fmt.Errorf("no sign of life from %s for %v", cn.addr, silentLeave*silentRound))
	case silent >= silentAsk:
		c.v.suspect(cn.addr)
	}
}

// suspect has the service at an address asked for a sign of life in each session that has not heard of it lately.
func (v *Volume) suspect(addr string) {
	for _, c := range v.all() {
		if at, heard := c.lastWord(); at == addr && time.Since(heard) >= silentAsk*silentRound {
			c.askAlive()
		}
	}
}

// watchIdle has each service asked for a sign of life, in one session, of which nothing was heard for idleAsk. It ends
// with v.ctx.
func (v *Volume) watchIdle() {
	for sleep(v.ctx, idleRound) {
		if !v.places.several() {
			continue
		}
		newest := map[string]*Client{} // whose session has heard last of the service at an address
		words := map[string]time.Time{}
		for _, c := range v.all() {
			if at, heard := c.lastWord(); at != "" && (newest[at] == nil || heard.After(words[at])) {
				newest[at], words[at] = c, heard
			}
		}
		for at, c := range newest {
			if time.Since(words[at]) >= idleAsk {
				c.askAlive()
			}
		}
	}
}

// lastWord is the address that the session is connected to, empty if it is not, and when something came from there.
func (c *Client) lastWord() (at string, heard time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return "", time.Time{}
	}
	return c.conn.addr, c.heard
}

// askAlive asks the service for a sign of life, of which nothing was heard for a while, and has it left if there is
// none.
func (c *Client) askAlive() {
	c.mu.Lock()
	if cn := c.conn; cn != nil && !cn.watching {
		c.startWatch(cn, silentAsk)
	}
	c.mu.Unlock()
	c.probe()
}

// append adds a frame to what is to be written, and has the writer write it; Client.mu is held.
func (cn *conn) append(frame []byte) {
	cn.out = append(cn.out, frame...)
	cn.post()
}

// post has the writer write what is queued.
func (cn *conn) post() {
	select {
	case cn.wake <- struct{}{}:
	default:
	}
}

// write sends what nobody else does, and keeps the lease alive.
func (c *Client) write(cn *conn) {
	tick := time.NewTicker(time.Duration(cn.welcome.Lease) / 3)
	defer tick.Stop()
	for {
		select {
		case <-cn.closed:
			return
		case <-tick.C:
			if err := c.tick(cn); err != nil {
				c.fail(cn, err)
			}
		case <-cn.probed:
			c.mu.Lock()
			s := c.session // see tick
			c.mu.Unlock()
			if err := c.renew(s); err != nil {
				c.fail(cn, err)
			}
		case <-cn.wake:
			c.flush(cn)
		}
	}
}

// flush sends what is queued, as much as there is at once, unless somebody is sending, who then sends that too. So who calls while nobody
// else does need not wake anybody to have it sent.
func (c *Client) flush(cn *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(cn.out) > 0 && !cn.writing && cn.fault == nil {
		buf := cn.out
		cn.out, cn.spare, cn.writing = cn.spare, nil, true
		c.mu.Unlock()
		cn.nc.SetWriteDeadline(time.Now().Add(time.Duration(cn.welcome.Lease)))
		_, err := cn.nc.Write(buf)
		if err != nil {
			c.fail(cn, err)
		}
		c.mu.Lock()
		cn.writing = false
		if cap(buf) <= 1<<20 {
			cn.spare = buf[:0]
		}
	}
}

// fail gives a connection up because of err.
func (c *Client) fail(cn *conn, err error) {
	c.mu.Lock()
	if cn.fault == nil {
		cn.fault = err
	}
	c.mu.Unlock()
	cn.hangUp()
}

// hangUp ends the connection, of which its reader takes note.
func (cn *conn) hangUp() {
	cn.nc.Close()
	cn.kick()
}

// tick is called every third of the lease. It sends Renew if no call was answered that was sent lately, and also if
// nothing came, since it is answered at once: when a Renew has been on its way from one tick to the next, in which neither its answer nor
// anything else came, the connection is dead.
func (c *Client) tick(cn *conn) error {
	c.mu.Lock()
	s := c.session // there is one as long as there is a connection
	silent := !c.heard.After(cn.ticked)
	dead := silent && s.slots[0].outstanding && !s.slots[0].sent.After(cn.ticked)
	c.mu.Unlock()
	if dead {
		return fmt.Errorf("no answer from %s for %v", cn.addr, s.lease/3)
	}
	var err error
	if idle := c.valid.rest() < fullLease(s.lease)-s.lease/6; idle || silent {
		err = c.renew(s)
	}
	c.mu.Lock()
	cn.ticked = time.Now() // not before the Renew was sent
	c.mu.Unlock()
	return err
}

// renew sends Renew, unless there is one on its way.
func (c *Client) renew(s *session) (err error) {
	var sl *slot
	select {
	case sl = <-s.renew:
	default:
		return nil
	}
	sl.sequence++
	h := metarpc.CallHeader{Slot: sl.number, Sequence: sl.sequence, Op: metarpc.OpRenew}
	if sl.frame, err = metarpc.AppendCall(sl.frame[:0], h, &metarpc.Empty{}); err != nil {
		return err
	}
	c.submit(c.ctx, s, sl, metarpc.OpRenew, nil, true)
	return nil
}

// reply hands a reply to the call it belongs to.
func (c *Client) reply(cn *conn, frame []byte) error {
	h, raw, err := metarpc.ParseReplyHeader(frame)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.heard = time.Now()
	var sl *slot
	if slots := c.session.slots; h.Slot < len(slots) {
		sl = slots[h.Slot]
	}
	switch {
	case sl == nil || !sl.outstanding || sl.sequence != h.Sequence:
		err = fmt.Errorf("%w: reply to call %d of slot %d, which is not waited for", metarpc.ErrMalformed, h.Sequence, h.Slot)
	case h.Status == metarpc.StatusShutdown: // the call stays outstanding
		sl.sends--
		cn.calls--
		err = c.leave(cn)
		c.mu.Unlock()
		return err
	case h.Status == metarpc.StatusBadSession:
		sl.sends--
		err = errSessionGone
	default:
		sl.outstanding = false
		cn.calls--
		sl.result.abandoned = sl.abandoned
	}
	lease := c.session.lease
	var left error
	if cn.leaver != nil {
		left = c.leave(cn)
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	cn.useful = true
	c.took[sl.op].Add(time.Since(sl.sent))
	c.renewed(sl.sent, lease)
	sl.result.status, sl.result.message, sl.result.raw = h.Status, h.Message, append(sl.result.raw[:0], raw...)
	sl.finish()
	return left
}

// leave returns errShutdown when all calls on a connection are answered, so that the caller gives it up; mu is held.
// A service that shuts down finishes the calls that it has begun. Their answers may contain places of appends, and a
// restarted service does not know these. After leaveWait the caller gives up the connection in any case.
func (c *Client) leave(cn *conn) error {
	if cn.calls == 0 {
		return errShutdown
	}
	if cn.leaver == nil {
		cn.leaver = time.AfterFunc(leaveWait, func() { c.fail(cn, errShutdown) })
	}
	return nil
}

// callBack starts to answer a callback.
func (c *Client) callBack(cn *conn, frame []byte) error {
	h, args, err := metarpc.ParseCallBack(frame, cn.welcome.Version)
	if err != nil {
		return err
	}
	if a, ok := args.(*metarpc.LockReadyArgs); ok {
		return c.lockReady(cn, h.Number, a)
	}
	c.mu.Lock()
	c.heard = time.Now()
	busy := c.recalls >= maxRecalls
	if !busy {
		c.recalls++
	}
	c.mu.Unlock()
	if busy {
		return fmt.Errorf("the service sent more than %d callbacks without waiting for answers", maxRecalls)
	}
	var answer func() metarpc.Status
	waiting, every := c.cfg.Waiting, time.Duration(cn.welcome.Lease)/4 // to tell that it is being worked on
	switch a := args.(type) {
	case *metarpc.LayoutRecallArgs:
		c.cache.calledBack(a.ID, layout.Range{Off: a.Off, Len: a.Len})
		answer = c.inOrder([]metarpc.LeaseItem{{ID: a.ID}}, func() metarpc.Status { return c.answer(a) })
	case *metarpc.LeaseRecallArgs:
		c.leases.recall(a.Items)
		answer = c.inOrder(a.Items, func() metarpc.Status {
			if c.cfg.OnLeaseRecall != nil {
				ctx := context.WithValue(prior(c.ctx), StuckKey{}, func() { c.stuck(cn, h.Number) })
				c.cfg.OnLeaseRecall(ctx, a.Items)
			}
			return metarpc.StatusOK
		})
	case *metarpc.SizeQueryArgs:
		answer = func() metarpc.Status {
			if c.cfg.OnSizeQuery != nil {
				c.cfg.OnSizeQuery(prior(c.ctx), a.IDs)
			}
			return metarpc.StatusOK
		}
	case *metarpc.ReserveRecallArgs:
		answer = func() metarpc.Status {
			if c.cfg.OnReserveRecall != nil {
				c.cfg.OnReserveRecall(prior(c.ctx), a.ID, a.Upto)
			}
			return metarpc.StatusOK
		}
		every, waiting = min(every, reserveWorking), func() bool { return true }
	case *metarpc.CopiesStaleArgs:
		c.cache.calledBack(a.ID, layout.Range{Len: layout.ToEOF})
		answer = func() metarpc.Status {
			if c.cfg.OnCopiesStale != nil {
				c.cfg.OnCopiesStale(a.ID, a.Copies)
			}
			return metarpc.StatusOK
		}
	case *metarpc.DeviceStatesArgs:
		c.v.setDown(c.shard, a)
		c.v.expireDevices()
		answer = func() metarpc.Status { return metarpc.StatusOK }
	case *metarpc.LeaseShrinkArgs:
		answer = func() metarpc.Status {
			c.leases.shrink(a.Keep)
			c.returnLeases(prior(c.ctx))
			return metarpc.StatusOK
		}
	default:
		return fmt.Errorf("%w: callback %v, which this client does not answer", metarpc.ErrMalformed, h.Op)
	}
	// Owns the answer to one callback; ends when what the callback asks for is done, whose context ends with c.ctx.
	c.tasks.Go(func() {
		stop := c.keepWorking(cn, h.Number, waiting, every)
		status := answer()
		stop()
		b, err := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: h.Number, Status: status})
		c.mu.Lock()
		defer c.mu.Unlock()
		c.recalls--
		if err == nil && c.conn == cn { // otherwise the service asks again on the next connection
			cn.append(b)
		}
	})
	return nil
}

// StuckKey is under which the context of Config.OnLeaseRecall has a func() for a recall. It tells a service that turns
// changes back that those of this client stand in the way, and may be called again and again.
type StuckKey struct{}

// stuck tells the service that changes of this client stand in the way of a callback.
func (c *Client) stuck(cn *conn, number uint64) {
	b, err := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: number, Status: metarpc.StatusStuck})
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.conn == cn && cn.welcome.Version >= metarpc.TurnsBack {
		cn.append(b)
	}
}

// reserveWorking is how often a service hears that ReserveRecall is being worked on, which it does not wait for as long
// as for others. An append that is to be finished may wait for a layout as well as for data servers.
const reserveWorking = 500 * time.Millisecond

// keepWorking tells the service that the answer to a callback is kept waiting, every so often when that is so, until
// stop is called. One that comes after the answer does no harm.
func (c *Client) keepWorking(cn *conn, number uint64, waiting func() bool, every time.Duration) (stop func()) {
	if waiting == nil {
		return func() {}
	}
	var timer *time.Timer
	stopped := false
	say := func() {
		working := waiting()
		b, err := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: number, Status: metarpc.StatusWorking})
		c.mu.Lock()
		defer c.mu.Unlock()
		if stopped || err != nil || c.conn != cn {
			return
		}
		if working {
			cn.append(b)
		}
		timer.Reset(every)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	timer = time.AfterFunc(every, say)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		stopped = true
		timer.Stop()
	}
}

// inOrder returns a function that runs f when all earlier ones that inOrder returned for one of the inodes have ended.
// It must be called.
func (c *Client) inOrder(items []metarpc.LeaseItem, f func() metarpc.Status) func() metarpc.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	var before []chan struct{}
	mine := make(chan struct{})
	for _, it := range items {
		if last := c.recalling[it.ID]; last != nil && last != mine {
			before = append(before, last)
		}
		c.recalling[it.ID] = mine
	}
	return func() metarpc.Status {
		for _, ch := range before {
			<-ch
		}
		defer func() {
			close(mine)
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, it := range items {
				if c.recalling[it.ID] == mine {
					delete(c.recalling, it.ID)
				}
			}
		}()
		return f()
	}
}

// answer does what a recall asks for.
func (c *Client) answer(a *metarpc.LayoutRecallArgs) metarpc.Status {
	if c.cfg.OnRecall != nil {
		if err := c.cfg.OnRecall(prior(c.ctx), a.ID, a.Off, a.Len); err != nil {
			c.log.Error("metadata service: answering a recall", "inode", a.ID, "off", a.Off, "len", a.Len, "err", err)
			var known interface{ Errno() syscall.Errno }
			if errors.As(err, &known) && known.Errno() != 0 {
				return metarpc.Status(known.Errno())
			}
			return metarpc.Status(syscall.EIO)
		}
	}
	c.cache.recall(a.ID, layout.Range{Off: a.Off, Len: a.Len}, false)
	return metarpc.StatusOK
}

// jitter takes up to half off a delay, so that the clients of a restarted service do not come all at once.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }
