package nfs3

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// maxDial bounds one attempt to connect; Config.Timeout does too.
const maxDial = 10 * time.Second

// briefly is how long a connection may have lived that is not replaced at once.
const briefly = time.Second

// slot is the place of one connection: none, one in the making, or one that is up. Guarded by Target.mu.
type slot struct {
	t       *Target
	running bool      // the goroutine that makes and reads connections lives
	counted bool      // in descriptors.Dialed
	conn    *conn     // that is up
	home    *path     // that it uses while that works; nil: the slot is given up when nothing is outstanding
	path    *path     // that it used last
	err     error     // of the latest loss; nil while all is well
	since   time.Time // when that was, or when the connection was made
	stalls  int       // connections ended because they stood still, see watch

	prior *predecessor // lost with requests that may still be carried out; nil: none
	held  rpcList      // of these requests those that are to be sent again
}

// start makes the slot connect. Its goroutine owns the slot's connection and the reading of it; it ends when the Target
// is closed, or when the connection is lost and nothing is outstanding that another one would be needed for. A
// connection that is not needed is made only if the share of descriptors has room. Target.mu is held.
func (s *slot) start(needed bool) {
	if !needed && descriptors.Scarce() {
		return
	}
	if s.counted = descriptors.Dialed.Take(); !s.counted && !needed {
		return
	}
	s.running = true
	s.t.wg.Add(1)
	go s.run()
}

func (s *slot) run() {
	defer s.t.wg.Done()
	for {
		nc, p, err := s.dial()
		addr := p.addr
		var secret *tls.Conn
		if err == nil && s.t.cfg.TLS != nil {
			secret, err = s.t.startTLS(p.ctx, nc, addr)
		}
		var name conns.Name
		if err == nil && !s.t.failFast {
			var on net.Conn = nc
			if secret != nil {
				on = secret
			}
			if name, err = s.join(p.ctx, on, addr); err != nil {
				nc.Close()
			}
		}
		if err != nil && p.left() && s.t.ctx.Err() == nil {
			continue // it is to be found elsewhere
		}
		var c *conn
		if err == nil {
			if c, err = newConn(s, nc, secret, addr); err == nil {
				c.name = name
			} else {
				nc.Close()
			}
		}
		if err == nil {
			err = s.serve(c)
		}
		if !s.lost(c, addr, err) {
			return
		}
	}
}

// dial waits for the back-off to end and connects. If the path is left meanwhile, as with the Target's end, it returns
// ErrClosed at once.
func (s *slot) dial() (*net.TCPConn, *path, error) {
	t := s.t
	t.mu.Lock()
	p := t.route(s)
	s.path = p
	from := s.samePort(p.addr)
	wait := time.Until(p.notBefore)
	t.mu.Unlock()
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			return nil, p, ErrClosed
		}
	}
	nc, err := t.connect(p, from)
	for descriptors.Short(err) && !t.failFast { // the server is not to blame
		select {
		case <-time.After(minDelay):
		case <-p.ctx.Done():
			return nil, p, ErrClosed
		}
		nc, err = t.connect(p, from)
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op.Err // the rest says again what and where
	}
	return nc, p, err
}

// serve uses the connection until it ends and returns why. Afterwards nothing is on it any more.
func (s *slot) serve(c *conn) error {
	t := s.t
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		c.nc.Close()
		return ErrClosed
	}
	s.conn, s.since = c, time.Now()
	t.epoch.Add(1)
	c.watch.start(c)
	t.window.connections(t.up())
	if s.err != nil {
		c.probe()
	}
	s.resume(c)
	if s.path.left() || s.home == nil {
		c.retire()
	}
	t.mindHome(s)
	t.dispatch()
	t.mu.Unlock()
	t.Flush()

	err := c.read()
	if err == io.EOF || err == io.ErrUnexpectedEOF { // the latter with TLS
		err = errHungUp
	}

	t.mu.Lock()
	c.fail(err)
	for c.writing {
		c.idle.Wait()
	}
	s.conn = nil
	ended := c.evacuate()
	t.mu.Unlock()
	for _, op := range ended {
		op.Done(op)
	}
	return c.err
}

// probe sends a NULL call on a connection that replaces a lost one, so that its reply tells whether the trouble is over.
func (c *conn) probe() {
	r := c.t.newRPC()
	r.ctl = &control{
		prog: oncrpc.ProgNFS, proc: uint32(wire.ProcNull), name: wire.ProcNull.String(),
		probe: true, end: func(error) {},
	}
	r.prepare(c.t)
	c.assign(r)
}

// evacuate takes everything outstanding from the dead connection, to be sent again on another one, before what is
// queued. It returns the ops that end instead, whose Done is to be called.
func (c *conn) evacuate() (done []*layout.Op) {
	t, s := c.t, c.slot
	if r := c.current; r != nil && isGarbage(c.err) {
		r.garbled++
	}
	if c.current != nil {
		c.calls[c.current.xid] = c.current
		c.current = nil
	}
	for _, r := range c.calls {
		sent := c.out.sent(r.end)
		changes := sent && r.changes
		if changes {
			s.bequeath(c)
		}
		r.unlink()
		switch {
		case t.closed, t.failFast, r.abandoned(), r.ctl != nil && r.ctl.probe:
			if op := t.end(r, c.err); op != nil {
				done = append(done, op)
			}
		case r.garbled == maxGarbled:
			if op := t.end(r, &ReplyError{Op: r.name(), Detail: r.detail(), Addr: c.addr, Err: c.err}); op != nil {
				done = append(done, op)
			}
		default:
			c.remove(r)
			if sent {
				r.resent = true
				t.stats.resent++
			}
			r.end = 0
			if changes {
				s.hold(r)
			} else {
				t.requeue(r)
			}
		}
	}
	return done
}

// lost records that there is no connection (c is nil if none was made), and tells whether to make another.
func (s *slot) lost(c *conn, addr netip.AddrPort, err error) bool {
	t := s.t
	t.mu.Lock()
	now := time.Now()
	var ended []*layout.Op
	p := s.path
	p.notBefore = now
	retired := err == errRetired
	switch useful := c != nil && c.proved && !isGarbage(err); {
	case useful && now.Sub(s.since) > briefly:
		p.fails = 0
	case useful:
		p.fails = 0
		p.notBefore = now.Add(jitter(minDelay)) // it may go on like this
	case !retired:
		p.failed(now)
	}
	// A connection that had nothing to do is not replaced before there is something; servers close idle ones, and so do we.
	quiet := c != nil && !c.missed && !isGarbage(err)
	again := t.live > 0 && !t.closed && (!quiet || retired) && (s.home != nil || s.prior != nil)
	if !t.closed && !quiet {
		s.mourn(now, addr, err)
		if t.failFast {
			ended = t.endAll(nil, err)
			again = false
		}
	}
	s.running = again
	if s.counted && !again {
		s.counted = false
		descriptors.Dialed.Give()
	}
	if !again && s.home == nil {
		s.forgive()
		t.slots = slices.DeleteFunc(slices.Clone(t.slots), func(o *slot) bool { return o == s })
	}
	t.window.connections(t.up())
	t.settle()
	t.dispatch() // what was evacuated may find room elsewhere
	t.mu.Unlock()
	for _, op := range ended {
		op.Done(op)
	}
	t.Flush()
	return again
}

// Refused reports whether the server's host has refused the latest attempt to connect, and there is no connection.
func (t *Target) Refused() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.slots {
		if s.conn != nil {
			return false
		}
	}
	return t.trouble.slots > 0 && errors.Is(t.trouble.err, syscall.ECONNREFUSED)
}

// trouble is what is wrong with a Target: how many slots lost their connection and did not get a working one since.
type trouble struct {
	slots int
	since time.Time
	err   error // the latest
}

// current is what is wrong now, or nil.
func (tr *trouble) current() error {
	if tr.slots == 0 {
		return nil
	}
	return tr.err
}

// mourn records the loss and logs the first of them.
func (s *slot) mourn(now time.Time, addr netip.AddrPort, err error) {
	t := s.t
	if s.err == nil {
		t.trouble.slots++
		if t.trouble.slots == 1 {
			t.trouble.since = now
			t.cfg.Log.Warn("connection to data server lost, trying again", "server", t.cfg.Name, "address", addr, "outstanding", t.live, "error", err)
		}
	}
	s.err, s.since = err, now
	t.trouble.err = fmt.Errorf("%v: %w", addr, err)
}

// settle forgets the losses of slots whose connection works again or, while another one works, is not needed for now;
// with the last of them the trouble is over.
func (t *Target) settle() {
	var works *conn
	for _, s := range t.slots {
		if c := s.conn; c != nil && c.proved && !c.dead {
			works = c
		}
	}
	if works == nil || t.trouble.slots == 0 {
		return
	}
	for _, s := range t.slots {
		if s.err != nil && (!s.running || s.conn != nil && s.conn.proved) {
			s.err = nil
			t.trouble.slots--
		}
	}
	if t.trouble.slots == 0 {
		t.cfg.Log.Info("connection to data server works again", "server", t.cfg.Name, "address", works.addr, "after", time.Since(t.trouble.since).Round(time.Millisecond))
		t.trouble.since = time.Time{}
	}
}

func isGarbage(err error) bool {
	var m *malformed
	return errors.As(err, &m)
}
