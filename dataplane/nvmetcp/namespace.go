package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// maxTries is how often a command is repeated that the controller has answered with an error, as Linux has it, and to how many associations
// it is sent that end by a breach of the protocol.
const maxTries = 5

// Request is one command to a Namespace. From Start until Done it and Data belong to the namespace. It may be used again, also from
// its own Done, but not before a Detach of it has returned.
type Request struct {
	// Command is what to do, and afterwards how it ended. NSID, Association and Command.Done are set by Start. Err is also a *[GoneError], a
	// *[NoPathError], a *layout.TimeoutError, a *[FencedError] since the host has no session, or ErrWithdrawn.
	Command
	// Done is called exactly once, from any goroutine, never from within Start; it must be short and not block.
	Done func(*Request)
	// Ended, if it is not nil, is closed when the request must not be sent (again): it ends with a *[FencedError] then instead of being sent.
	Ended <-chan struct{}

	ns    *Namespace
	path  *path // that has it, or had it last
	began int64 // on path, by clock
	bound func(*Command)

	mu        sync.Mutex // of what Detach needs; below Namespace.mu
	live      bool       // between Start and Done
	detached  bool
	withdrawn bool
	detaching int    // calls of Detach that the controller is busy with
	private   []byte // instead of Data, once detached

	// Guarded by Namespace.mu once the first path has failed.
	started    int64 // by clock
	until      int64 // not to be sent before
	unknown    bool  // it may still be carried out, until then
	same       bool  // on path, if that is usable
	tries      int
	pathTries  int
	breaks     int // associations that have ended by a breach of the protocol while they had it
	why        error
	held       bool
	prev, next *Request
}

// Namespace is one namespace of a Subsystem, over all the paths to it. Its methods may be called from any goroutine.
//
// A command whose path fails is sent on another one. What is written so is not sent again before the controller that may have got it is known
// to have given it up (PathError.Gone). While there is no path commands wait, as long as a controller may come back and for no longer
// than SubsystemConfig.Patience.
type Namespace struct {
	s      *Subsystem
	nsid   uint32
	id     ID
	format Format

	fixed  atomic.Bool
	blocks atomic.Uint64
	paths  atomic.Pointer[pathSet]
	reg    registration // guarded by Subsystem.mu

	mu         sync.Mutex // below Subsystem.mu, above Request.mu
	head, tail *Request   // held: waiting for a path, or for a time
	waiting    int
	pumping    bool
	again      bool
	closed     error // ends everything
	timer      *time.Timer
	trouble    error // the latest
	failovers  uint64
	retries    uint64
}

// NSID is the namespace's number in its subsystem.
func (n *Namespace) NSID() uint32 { return n.nsid }

// ID is what the namespace is known by anywhere.
func (n *Namespace) ID() ID { return n.id }

// Format is how its blocks are to be used.
func (n *Namespace) Format() Format { return n.format }

// Blocks is its size now, in blocks of Format.
func (n *Namespace) Blocks() uint64 { return n.blocks.Load() }

// WriteProtected reports whether it refuses to be written to.
func (n *Namespace) WriteProtected() bool { return n.fixed.Load() }

// Usable reports whether there is a path that can be used now.
func (n *Namespace) Usable() bool {
	return slices.ContainsFunc(n.paths.Load().list, func(p *path) bool { return p.usable() != classOut })
}

// Lost is how often what was written and not flushed may have been lost: a connection to a controller of the subsystem was, of
// which nobody knows why. Nothing is sent on a new connection before that has counted.
func (n *Namespace) Lost() uint64 { return n.s.losses.Load() }

// Start queues r and returns at once, without any I/O; it goes out at the next Flush or before.
func (n *Namespace) Start(r *Request) {
	if r.bound == nil {
		r.bound = r.ended
	}
	r.NSID, r.Command.Done = n.nsid, r.bound
	if r.Raw != nil {
		r.Raw.NSID = n.nsid
	}
	r.Status, r.Result, r.Err = 0, 0, nil
	r.ns, r.path = n, nil
	r.mu.Lock()
	r.live, r.detached, r.withdrawn, r.private = true, false, false, nil
	r.mu.Unlock()
	now := clock()
	r.started, r.until, r.unknown, r.same, r.tries, r.pathTries, r.breaks, r.why = now, now, false, false, 0, 0, 0, nil
	if n.s.alive() && !r.lapsed() {
		if p := n.choose(r, now); p != nil && r.send(p, now) {
			return
		}
	}
	n.mu.Lock()
	n.hold(r) // also for what must not be sent: it does not end within Start
	n.mu.Unlock()
}

// lapsed reports whether r was for a session that has ended.
func (r *Request) lapsed() bool {
	select {
	case <-r.Ended:
		return true
	default:
		return false
	}
}

// Flush sends what was started.
func (n *Namespace) Flush() {
	for _, l := range *n.s.links.Load() {
		if l.unflushed.Load() && l.unflushed.Swap(false) {
			l.ctl.Flush()
		}
	}
}

// Do starts r, whose Done it sets, and waits for its end. If ctx ends first r is detached; what writes goes on, and the error is that of ctx.
func (n *Namespace) Do(ctx context.Context, r *Request) error {
	ended := make(chan struct{})
	r.Done = func(*Request) { close(ended) }
	n.Start(r)
	n.Flush()
	select {
	case <-ended:
		return r.Err
	case <-ctx.Done():
	}
	n.Detach(r)
	return ctx.Err()
}

// Detach takes r.Data away from the namespace: when it returns, that is not touched any more. What reads ends with
// context.Canceled; what writes to the namespace goes on, from a private copy. Detach of a Request that has ended does nothing.
func (n *Namespace) Detach(r *Request) {
	n.mu.Lock()
	r.mu.Lock()
	if !r.live {
		r.mu.Unlock()
		n.mu.Unlock()
		return
	}
	if !r.detached && r.modifies() {
		r.private = bytes.Clone(r.Data)
	}
	r.detached = true
	held, p := r.held, r.path
	if !held {
		r.detaching++
	}
	r.mu.Unlock()
	cancel := held && !r.modifies()
	if cancel {
		n.drop(r)
	} else if held {
		r.Data = r.private
	}
	n.mu.Unlock()
	switch {
	case cancel:
		r.end(context.Canceled)
	case !held:
		if p != nil {
			p.link.ctl.Detach(&r.Command)
		}
		r.mu.Lock()
		r.detaching--
		r.mu.Unlock()
		n.wake() // it may have come back meanwhile
	}
}

// ErrWithdrawn ends what was withdrawn.
var ErrWithdrawn = errors.New("nvmetcp: the request was withdrawn")

// Withdraw has r not be sent any more. If it waits to be, it ends with ErrWithdrawn: at once, or when a controller that may have got it is known to
// have given it up. What was given to a controller ends by that one's answer, if there is one. Withdraw of a Request that has ended does nothing.
func (n *Namespace) Withdraw(r *Request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r.mu.Lock()
	r.withdrawn = r.live
	wake := r.live && r.held
	r.mu.Unlock()
	if wake {
		n.wakeLocked()
	}
}

// choose returns the path for r now, or nil.
func (n *Namespace) choose(r *Request, now int64) *path {
	if r.same && r.path.usable() != classOut {
		return r.path
	}
	node, by := 0, Policy(n.s.policy.Load())
	if by == NUMA || by == RoundRobin {
		node = topology().here()
	}
	return n.paths.Load().choose(by, node, len(r.Data), now)
}

// send gives r to a path, unless that is going away at this moment.
func (r *Request) send(p *path, now int64) bool {
	r.path, r.began = p, now
	r.Association = p.link.looked.Load() // and not the one that may have come when Start is called
	p.started(len(r.Data))
	if p.usable() == classOut {
		p.ended(len(r.Data)) // member.end looks at what was started after it has made the link not live
		return false
	}
	p.link.ctl.Start(&r.Command)
	p.link.unflushed.Store(true)
	return true
}

// ended takes r back from its path.
func (r *Request) ended(*Command) {
	p, now := r.path, clock()
	p.ended(len(r.Data))
	if r.Err != nil {
		p.failed.Add(1)
		r.ns.failed(r, now)
		return
	}
	p.measured(now-r.began, now)
	p.served.Add(1)
	p.bytes.Add(uint64(len(r.Data)))
	r.end(nil)
}

// end gives r back to its owner.
func (r *Request) end(err error) {
	r.Err = err
	r.mu.Lock()
	r.live, r.private = false, nil
	r.mu.Unlock()
	r.Done(r)
}

// failed decides what becomes of r, whose path has ended it with an error.
func (n *Namespace) failed(r *Request, now int64) {
	p, v := r.path, judge(r.Err, r.modifies())
	if r.Raw == nil && fenced(r.Err) { // a reservation command that conflicts says nothing of that
		n.refused(r.began)
	}
	if v.need != 0 {
		p.stale.Store(true)
		p.link.m.suspect(p.link, v.need)
	}
	if v.what == doWait && errors.Is(r.Err, ErrClosed) {
		v.delay = max(v.delay, p.link.ctl.Info().lingers())
	}
	r.until, r.unknown, r.same = now+int64(v.delay), false, false
	switch v.what {
	case doRetry:
		r.tries++
		r.same = true
	case doOther:
		if v.reset {
			p.link.ctl.Reset(r.Err.Error())
		}
		if v.reset || v.need == needScan { // the others end by themselves
			r.pathTries++
		}
	case doWait:
		r.unknown = true
	}
	if broke(r.Err) {
		r.breaks++
	}
	if v.what == doFail || r.tries > maxTries || r.pathTries > maxTries*max(len(n.paths.Load().list), 1) || v.alone && n.choose(r, now) == nil {
		r.end(r.Err)
		return
	}
	n.mu.Lock()
	r.why, n.trouble = r.Err, r.Err
	if v.what == doRetry {
		n.retries++
	} else {
		n.failovers++
	}
	n.hold(r)
	n.mu.Unlock()
}

// hold puts r on the list of those that wait. mu is held.
func (n *Namespace) hold(r *Request) {
	r.mu.Lock()
	if r.private != nil {
		r.Data = r.private
	}
	r.held = true
	r.mu.Unlock()
	r.prev, r.next = n.tail, nil
	if n.tail != nil {
		n.tail.next = r
	} else {
		n.head = r
	}
	n.tail = r
	n.waiting++
	n.wakeLocked()
}

// drop takes r off the list. mu is held.
func (n *Namespace) drop(r *Request) {
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		n.head = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	} else {
		n.tail = r.prev
	}
	r.prev, r.next = nil, nil
	r.mu.Lock()
	r.held = false
	r.mu.Unlock()
	n.waiting--
}

// wake has those that wait looked at, soon: paths, states or times have changed.
func (n *Namespace) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.head != nil {
		n.wakeLocked()
	}
}

func (n *Namespace) wakeLocked() {
	n.again = true
	if !n.pumping {
		n.pumping = true
		// This goroutine owns the sending of what waits; it ends when none of that can be sent now.
		go n.pump()
	}
}

// pump sends what can be sent of those that wait and ends what has no hope.
func (n *Namespace) pump() {
	for {
		n.mu.Lock()
		if !n.again {
			n.pumping = false
			n.mu.Unlock()
			return
		}
		n.again = false
		n.mu.Unlock()
		hopeless := n.s.hopeless(n)
		limit := n.s.cfg.Patience
		now := clock()
		next := int64(math.MaxInt64)
		var over *Request // linked by next

		n.mu.Lock()
		for r := n.head; r != nil; {
			this := r
			r = r.next
			err := n.verdict(this, now, limit, hopeless, &next)
			if err != nil {
				n.drop(this)
				this.Err = err
				this.next, over = over, this
			}
		}
		if n.timer != nil {
			n.timer.Stop()
			n.timer = nil
		}
		if next != math.MaxInt64 {
			n.timer = time.AfterFunc(time.Duration(next-now), n.wake)
		}
		n.mu.Unlock()
		n.Flush()
		for over != nil {
			this := over
			over, this.next = this.next, nil
			this.end(this.Err)
		}
	}
}

// verdict sends r if it can be sent, or returns the error to end it with, or leaves it and makes next the time at which that
// changes, if that is earlier. mu is held.
func (n *Namespace) verdict(r *Request, now int64, limit layout.Patience, hopeless error, next *int64) error {
	r.mu.Lock()
	detaching, detached, withdrawn := r.detaching > 0, r.detached, r.withdrawn
	r.mu.Unlock()
	if detaching {
		return nil // Detach wakes us
	}
	if n.closed != nil {
		return n.closed
	}
	if detached && !r.modifies() {
		return context.Canceled
	}
	early := r.until > now
	if early {
		*next = min(*next, r.until)
	}
	if early && r.unknown {
		return nil
	}
	if withdrawn {
		return ErrWithdrawn
	}
	if r.breaks >= maxTries {
		return fmt.Errorf("%w: as were the %d before that had this command: is the target's software right? It is not sent again", r.why, maxTries-1)
	}
	if !n.s.alive() || r.lapsed() {
		return &FencedError{errLapsed}
	}
	if limit.Time > 0 {
		deadline := r.started + int64(limit.Time)
		if deadline <= now {
			why := r.why
			if why == nil {
				why = n.trouble
			}
			return limit.Over(why)
		}
		*next = min(*next, deadline)
	}
	if early {
		return nil
	}
	p := n.choose(r, now)
	if p == nil {
		if hopeless != nil && r.why != nil {
			return fmt.Errorf("%w; it was tried: %w", hopeless, r.why)
		}
		return hopeless
	}
	n.drop(r)
	if !r.send(p, now) {
		n.hold(r)
	}
	return nil
}

// close ends all requests with err, now and later.
func (n *Namespace) close(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = err
	n.paths.Store(newPathSet(nil))
	if n.head != nil {
		n.wakeLocked()
	}
}

// GoneError is a request to a namespace that is no longer there.
type GoneError struct {
	NQN  string
	NSID uint32
	ID   ID
	Now  *ID // what has its number now, or nil
}

func (e *GoneError) Error() string {
	s := fmt.Sprintf("nvmetcp: namespace %d (%v) of %s is gone", e.NSID, e.ID, e.NQN)
	if e.Now != nil {
		s += fmt.Sprintf(": another one (%v) has its number, which is not used in its place", e.Now)
	}
	return s
}

// Errno returns ENODEV.
func (e *GoneError) Errno() syscall.Errno { return syscall.ENODEV }

// NoPathError is a request for which there is no path, nor is one expected.
type NoPathError struct {
	NQN  string
	NSID uint32
	Err  error // why, for each address
}

func (e *NoPathError) Error() string {
	return fmt.Sprintf("nvmetcp: no path to namespace %d of %s, and none is expected back: %v", e.NSID, e.NQN, e.Err)
}

// Unwrap returns why.
func (e *NoPathError) Unwrap() error { return e.Err }

// Errno returns EIO.
func (e *NoPathError) Errno() syscall.Errno { return syscall.EIO }

// action is what to do with a request whose path has ended it.
type action uint8

const (
	doFail  action = iota
	doRetry        // on the same path if possible, after delay; counted
	doOther        // on any path
	doWait         // on any path, after delay: until then it may still be carried out
)

// judgement is an action and what else an error asks for.
type judgement struct {
	what  action
	delay time.Duration
	need  need // the path is out until this was read
	alone bool // fails if there is no other path at this moment
	reset bool // reset the controller
}

// broke reports whether a command was lost with an association that one side has ended for what the other had sent: it may be
// that command's doing. Connections that are lost otherwise may be so for any number of times.
func broke(err error) bool {
	lost, ok := errors.AsType[*PathError](err)
	if !ok || !lost.Sent {
		return false
	}
	_, wrong := errors.AsType[*wire.ProtocolError](lost.Err)
	return wrong || errors.Is(lost.Err, errTermReq)
}

// goneAtLatest is after how long a lost association counts as given up if its controller's times are not known.
const goneAtLatest = 60 * time.Second

// judge tells what to do about an error of a command, which modifies the namespace or not.
func judge(err error, modifies bool) judgement {
	if lost, ok := errors.AsType[*PathError](err); ok {
		v := judgement{what: doOther, need: needANA | needScan}
		if lost.Sent && modifies {
			v.what, v.delay = doWait, goneAtLatest
			if !lost.Gone.IsZero() {
				v.delay = max(time.Until(lost.Gone), 0)
			}
		}
		return v
	}
	if errors.Is(err, ErrClosed) { // the path was taken away
		if modifies {
			return judgement{what: doWait, delay: goneAtLatest}
		}
		return judgement{what: doOther}
	}
	if _, ok := errors.AsType[*DigestError](err); ok {
		return judgement{what: doRetry}
	}
	answer, ok := errors.AsType[*StatusError](err)
	if !ok {
		return judgement{what: doFail}
	}
	if answer.Status == wire.StatusInvalidNamespace { // here; it may be there on another controller
		return judgement{what: doOther, need: needScan, alone: true}
	}
	if answer.Status.Class() == wire.ClassReset { // the controller is not one to be used, whatever it says about the command
		return judgement{what: doOther, need: needANA | needScan, reset: true}
	}
	if !answer.DNR {
		switch answer.Class() {
		case wire.ClassPath:
			return judgement{what: doOther, need: needScan}
		case wire.ClassANA:
			return judgement{what: doOther, need: needANA}
		case wire.ClassRetry:
			return judgement{what: doRetry, delay: answer.Delay}
		}
	}
	return judgement{what: doFail}
}
