package metaclient

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// helloTimeout bounds connecting to one address, and then the answer to the hello.
const helloTimeout = 10 * time.Second

// conn is one connection of a session.
type conn struct {
	addr    string
	nc      net.Conn
	began   time.Time // before the hello was sent
	r       *bufio.Reader
	welcome *metarpc.Welcome
	wake    chan struct{} // wakes the writer
	closed  chan struct{} // closed when the connection is given up
	useful  bool          // the manager's: something was answered

	out      []byte // guarded by Client.mu: frames to be written
	received bool   // guarded by Client.mu: something was, since the last tick
}

// connect tries every address once, the one that worked last first, and says hello for the session, or for a new one
// if it is zero. errSessionGone tells that a service answered and has no such session.
func (c *Client) connect(ctx context.Context, session metarpc.SessionID) (*conn, error) {
	var errs []error
	c.mu.Lock()
	from := c.addr
	c.mu.Unlock()
	for i := range c.cfg.Addrs {
		index := (from + i) % len(c.cfg.Addrs)
		addr := c.cfg.Addrs[index]
		nc, err := c.dial(ctx, addr)
		if err != nil {
			errs = append(errs, connectError(addr, err))
			continue
		}
		cn, err := c.hello(ctx, nc, addr, session)
		if err == nil {
			c.mu.Lock()
			c.addr = index
			c.mu.Unlock()
			return cn, nil
		}
		nc.Close()
		if err == errSessionGone {
			return nil, err
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
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
	switch {
	case w.Version != metarpc.Version || w.Status == metarpc.StatusVersion:
		return nil, fmt.Errorf("%s speaks protocol version %d, this weft speaks %d", addr, w.Version, metarpc.Version)
	case w.Status == metarpc.StatusBadSession && session != metarpc.SessionID{}:
		return nil, errSessionGone
	case w.Status != metarpc.StatusOK:
		return nil, fmt.Errorf("metadata service at %s: %v: %s", addr, w.Status, w.Message)
	case session != metarpc.SessionID{} && w.Session != session:
		return nil, fmt.Errorf("%s answers for another session than it was asked for", addr)
	}
	if volume := c.Volume(); volume != [16]byte{} && w.Volume != volume {
		return nil, fmt.Errorf("%s serves another file system (volume %x) than the one mounted (%x)", addr, w.Volume, volume)
	}
	nc.SetDeadline(time.Time{})
	return &conn{addr: addr, nc: nc, began: began, r: r, welcome: w, wake: make(chan struct{}, 1), closed: make(chan struct{})}, nil
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
		Magic: metarpc.Magic, Lowest: metarpc.Version, Highest: metarpc.Version, Client: c.cfg.Client, Session: session,
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
	w, err := metarpc.ParseWelcome(frame)
	return w, r, err
}

// serve reads the connection until it fails, which it does at the latest when c.ctx ends.
func (c *Client) serve(cn *conn) error {
	defer onEnd(c.ctx, func() { cn.nc.Close() })()
	written := make(chan error, 1)
	go func() { written <- c.write(cn) }() // owns the sending half of cn; ends with cn.closed, or closes cn.nc
	err := c.read(cn)
	c.mu.Lock()
	c.conn = nil // what is called from now on waits for the next connection
	c.mu.Unlock()
	cn.nc.Close()
	close(cn.closed)
	if werr := <-written; werr != nil && errors.Is(err, net.ErrClosed) {
		err = werr // the writer found the fault and closed the connection
	}
	c.mu.Lock()
	c.since, c.problem = time.Now(), err
	c.mu.Unlock()
	return err
}

// queue adds an outstanding call to what is to be written; Client.mu is held.
func (cn *conn) queue(sl *slot) {
	sl.sends++
	cn.append(sl.frame)
}

// append adds a frame to what is to be written; Client.mu is held.
func (cn *conn) append(frame []byte) {
	cn.out = append(cn.out, frame...)
	select {
	case cn.wake <- struct{}{}:
	default:
	}
}

// write sends what is queued, as much as there is at once, and keeps the lease alive.
func (c *Client) write(cn *conn) error {
	lease := time.Duration(cn.welcome.Lease)
	tick := time.NewTicker(lease / 3)
	defer tick.Stop()
	var buf []byte
	for {
		select {
		case <-cn.closed:
			return nil
		case <-tick.C:
			if err := c.tick(cn); err != nil {
				cn.nc.Close()
				return err
			}
		case <-cn.wake:
		}
		if cap(buf) > 1<<20 {
			buf = nil
		}
		c.mu.Lock()
		buf, cn.out = cn.out, buf[:0]
		c.mu.Unlock()
		if len(buf) == 0 {
			continue
		}
		cn.nc.SetWriteDeadline(time.Now().Add(lease))
		if _, err := cn.nc.Write(buf); err != nil {
			cn.nc.Close()
			return err
		}
	}
}

// tick is called every third of the lease. It sends Renew if no call was answered that was sent lately, and also if
// nothing came, since it is answered at once: when the next tick finds neither that answer nor anything else the connection is
// dead.
func (c *Client) tick(cn *conn) error {
	c.mu.Lock()
	s := c.session // there is one as long as there is a connection
	silent := !cn.received
	cn.received = false
	c.mu.Unlock()
	idle := c.valid.rest() < fullLease(s.lease)-s.lease/6
	var sl *slot // nil if the last Renew is not answered
	select {
	case sl = <-s.renew:
	default:
	}
	switch {
	case sl == nil && silent:
		return fmt.Errorf("no answer from %s for %v", cn.addr, s.lease/3)
	case sl == nil:
		return nil
	case !idle && !silent:
		s.renew <- sl
		return nil
	}
	var err error
	sl.sequence++
	h := metarpc.CallHeader{Slot: sl.number, Sequence: sl.sequence, Op: metarpc.OpRenew}
	if sl.frame, err = metarpc.AppendCall(sl.frame[:0], h, &metarpc.Empty{}); err != nil {
		return err
	}
	c.submit(c.ctx, s, sl, metarpc.OpRenew, nil, true)
	return nil
}

// read handles frames until the connection fails.
func (c *Client) read(cn *conn) error {
	var buf []byte
	for {
		frame, err := metarpc.ReadFrame(cn.r, buf, metarpc.MaxFrame)
		if err != nil {
			return err
		}
		kind, err := metarpc.FrameKind(frame)
		switch {
		case err != nil:
		case kind == metarpc.KindReply:
			err = c.reply(cn, frame)
		case kind == metarpc.KindCallBack:
			err = c.callBack(cn, frame)
		default:
			err = fmt.Errorf("%w: kind %d from the service", metarpc.ErrMalformed, kind)
		}
		if err != nil {
			return err
		}
		if buf = frame[:0]; cap(buf) > 1<<20 {
			buf = nil
		}
	}
}

// reply hands a reply to the call it belongs to.
func (c *Client) reply(cn *conn, frame []byte) error {
	h, raw, err := metarpc.ParseReplyHeader(frame)
	if err != nil {
		return err
	}
	c.mu.Lock()
	cn.received = true
	var sl *slot
	if slots := c.session.slots; h.Slot < len(slots) {
		sl = slots[h.Slot]
	}
	switch {
	case sl == nil || !sl.outstanding || sl.sequence != h.Sequence:
		err = fmt.Errorf("%w: reply to call %d of slot %d, which is not waited for", metarpc.ErrMalformed, h.Sequence, h.Slot)
	case h.Status == metarpc.StatusShutdown:
		sl.sends--
		err = errShutdown // it stays outstanding
	case h.Status == metarpc.StatusBadSession:
		sl.sends--
		err = errSessionGone
	default:
		sl.outstanding = false
		sl.result.abandoned = sl.abandoned
	}
	lease := c.session.lease
	c.mu.Unlock()
	if err != nil {
		return err
	}
	cn.useful = true
	c.renewed(sl.sent, lease)
	sl.result.status, sl.result.message, sl.result.raw = h.Status, h.Message, append(sl.result.raw[:0], raw...)
	sl.finish()
	return nil
}

// callBack starts to answer a callback.
func (c *Client) callBack(cn *conn, frame []byte) error {
	h, args, err := metarpc.ParseCallBack(frame)
	if err != nil {
		return err
	}
	if a, ok := args.(*metarpc.LockReadyArgs); ok {
		return c.lockReady(cn, h.Number, a)
	}
	c.mu.Lock()
	cn.received = true
	busy := c.recalls >= maxRecalls
	if !busy {
		c.recalls++
	}
	c.mu.Unlock()
	if busy {
		return fmt.Errorf("the service sent more than %d callbacks without waiting for answers", maxRecalls)
	}
	var answer func() metarpc.Status
	switch a := args.(type) {
	case *metarpc.LayoutRecallArgs:
		c.cache.recall(a.ID, layout.Range{Off: a.Off, Len: a.Len}, false)
		answer = c.inOrder([]metarpc.LeaseItem{{ID: a.ID}}, func() metarpc.Status { return c.answer(a) })
	case *metarpc.LeaseRecallArgs:
		c.leases.recall(a.Items)
		answer = c.inOrder(a.Items, func() metarpc.Status {
			if c.cfg.OnLeaseRecall != nil {
				c.cfg.OnLeaseRecall(prior(c.ctx), a.Items)
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
	case *metarpc.CopiesStaleArgs:
		c.cache.recall(a.ID, layout.Range{Len: layout.ToEOF}, false)
		answer = func() metarpc.Status {
			if c.cfg.OnCopiesStale != nil {
				c.cfg.OnCopiesStale(a.ID, a.Copies)
			}
			return metarpc.StatusOK
		}
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
		stop := c.keepWorking(cn, h.Number)
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

// keepWorking tells the service that data servers keep the answer to a callback waiting, whenever that is so, until stop is
// called. One that comes after the answer does no harm.
func (c *Client) keepWorking(cn *conn, number uint64) (stop func()) {
	if c.cfg.Waiting == nil {
		return func() {}
	}
	every := time.Duration(cn.welcome.Lease) / 4
	var timer *time.Timer
	stopped := false
	say := func() {
		waiting := c.cfg.Waiting()
		b, err := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: number, Status: metarpc.StatusWorking})
		c.mu.Lock()
		defer c.mu.Unlock()
		if stopped || err != nil || c.conn != cn {
			return
		}
		if waiting {
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
