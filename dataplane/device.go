package dataplane

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/weftfs/weft/layout"
)

// waiter is something that was put aside and goes on later: a request, or a goroutine behind a channel.
type waiter interface {
	// resume goes on, or fails if err is set. A gen that is no longer the waiter's own means that it ended meanwhile.
	resume(gen uint64, err error)
}

// ticket names one waiting of a waiter. Tickets outlive what they name without harm: requests are recycled, so whoever
// holds a ticket may meet another request in the same memory, and generations tell them apart.
type ticket struct {
	who waiter
	gen uint64
}

// wakeup is the waiter for blocking code.
type wakeup chan error

func newWakeup() wakeup { return make(wakeup, 1) }

func (w wakeup) resume(_ uint64, err error) { w <- err }

// device is one data server: the target that reaches it, once it has been made.
type device struct {
	plane     *Plane
	id        layout.DeviceID
	conn      atomic.Pointer[conn] // nil until dialled
	unflushed atomic.Bool          // conn was given requests since its last Flush
	load      load
	usage     usage

	// Times are watch.now; see late.go.
	heard      atomic.Int64 // when it last answered anything
	heardWrite atomic.Int64 // when it last answered a WRITE
	heardSync  atomic.Int64 // when it last answered a COMMIT or a stable WRITE
	lateAt     atomic.Int64 // when it was found late
	backAt     atomic.Int64 // when it last answered after it had been late for a while
	stuckAt    atomic.Int64 // when a WRITE found it stuck
	unsyncedAt atomic.Int64 // when a COMMIT found it stuck
	triedAt    atomic.Int64 // when a WRITE was sent to see whether it still is
	slow       atomic.Int64 // how long a change took, in nanoseconds
	slowAt     atomic.Int64 // when that had ended
	stuck      atomic.Int32 // WRITEs that were given up as unanswered and have not ended
	asking     atomic.Bool  // it has a question to answer, see ask
	toldSilent atomic.Int64 // since when it answers nothing, as Plane.SetDown was told; 0 = it was not
	toldStuck  atomic.Int64 // since when it takes no writes, likewise

	known atomic.Pointer[layout.DataFile] // a data file there that it can be asked for; nil = there was none yet

	mu        sync.Mutex
	waiting   []ticket        // for conn; a dial is running if not empty
	lossNoted layout.Verifier // of the last restart that was logged
}

// conn is a target in use.
type conn struct {
	Target
	dev     *device
	epoch   func() uint64
	near    func() bool
	quick   func(*layout.Op) bool // nil: there is nothing that the target could do so
	keeps   func() bool
	refused func() bool // nil: the target cannot tell

	stopping func() bool
}

// start queues a request at the target; whoever calls it flushes later.
func (c *conn) start(op *layout.Op) {
	c.Target.Start(op)
	if !c.dev.unflushed.Load() {
		c.dev.unflushed.Store(true)
	}
	if p := c.dev.plane; !p.unflushed.Load() {
		p.unflushed.Store(true)
	}
}

// do starts an op and waits until it has ended. If ctx ends first the op is detached and do returns without waiting for
// it, so an op with Data must not be given a ctx that can end. The op must not be used again.
func (c *conn) do(ctx context.Context, op *layout.Op) error {
	done := make(chan struct{})
	u, watch := &c.dev.usage, c.dev.plane.watch
	began := watch.now()
	u.outstanding.Add(1)
	op.Done = func(*layout.Op) {
		at := watch.now()
		u.ended(op, at-began)
		c.dev.hear(op, at, at-began)
		close(done)
	}
	c.Target.Start(op)
	c.Target.Flush()
	select {
	case <-done:
		return op.Err
	case <-ctx.Done():
		c.Target.Detach(op)
		return ctx.Err()
	}
}

// device returns the state of a device, making it when it is new.
func (p *Plane) device(id layout.DeviceID) *device {
	if d := (*p.devices.Load())[id]; d != nil {
		return d
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := *p.devices.Load()
	if d := old[id]; d != nil {
		return d
	}
	d := &device{plane: p, id: id}
	m := maps.Clone(old)
	m[id] = d
	p.devices.Store(&m)
	return d
}

// connect returns the device's target. If there is none yet it returns nil, sees to it that one is made, and resumes t
// when that has worked or failed.
func (p *Plane) connect(id layout.DeviceID, t ticket) *conn {
	d := p.device(id)
	if c := d.conn.Load(); c != nil {
		return c
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.conn.Load(); c != nil {
		return c
	}
	d.waiting = append(d.waiting, t)
	if len(d.waiting) == 1 {
		// This goroutine owns the making of the device's target; it ends when Dial has returned.
		go p.dial(d)
	}
	return nil
}

func (p *Plane) dial(d *device) {
	err := p.makeConn(d)
	d.mu.Lock()
	waiting := d.waiting
	d.waiting = nil
	d.mu.Unlock()
	for _, t := range waiting {
		if err != nil {
			t.who.resume(t.gen, err)
		} else {
			p.later(t)
		}
	}
	p.Flush() // reads that failed go to another mirror at once
}

// makeConn makes the device's target and puts it to use.
func (p *Plane) makeConn(d *device) error {
	if p.isClosed() {
		return ErrClosed
	}
	target, err := p.cfg.Dial(d.id)
	if err != nil {
		d.usage.fail(err)
		return fmt.Errorf("device %s: %w", d.id, err)
	}
	c := &conn{Target: target, dev: d, epoch: func() uint64 { return 0 }, near: func() bool { return false }, keeps: func() bool { return false }}
	c.stopping = func() bool { return false }
	if e, ok := target.(Epocher); ok {
		c.epoch = e.Epoch
	}
	if n, ok := target.(Nearer); ok {
		c.near = n.Near
	}
	if s, ok := target.(Stopper); ok {
		c.stopping = s.Stopping
	}
	if k, ok := target.(Keeper); ok {
		c.keeps = k.Keeps
	}
	if q, ok := target.(Quicker); ok {
		c.quick = q.Quick
	}
	if r, ok := target.(Refuser); ok {
		c.refused = r.Refused
	}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		d.conn.Store(c) // under mu, so that Close either sees it or is seen
	}
	p.mu.Unlock()
	if closed {
		target.Close()
		return ErrClosed
	}
	return nil
}

// Connect makes the device's target, if there is none yet.
func (p *Plane) Connect(ctx context.Context, id layout.DeviceID) error {
	_, err := p.connectWait(ctx, id)
	return err
}

// connectWait is connect for blocking code.
func (p *Plane) connectWait(ctx context.Context, id layout.DeviceID) (*conn, error) {
	w := newWakeup()
	if c := p.connect(id, ticket{who: w}); c != nil {
		return c, nil
	}
	select {
	case err := <-w:
		if err != nil {
			return nil, err
		}
		return p.device(id).conn.Load(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
