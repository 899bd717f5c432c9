package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// reserveType is the reservation that the service keeps: registrants read and write, nobody else does, and it ends with its holder's
// registration only.
const reserveType = wire.ReserveExclusiveAccessRegisters

// Reservation is who may use a namespace.
type Reservation struct {
	Kind        wire.ReservationType // wire.ReserveNone: anybody
	Holder      wire.HostID          // zero: none, or all registrants hold it
	Registrants []Registrant
}

// Registrant is a host that is registered, whatever controllers it uses.
type Registrant struct {
	HostID wire.HostID
	Key    uint64
}

// registration is what this host wants to have on a namespace. It is made on each association, by whoever looks after that, before
// anything else is sent there, as a target that was restarted may know nothing of it. Subsystem.mu guards it.
type registration struct {
	key     uint64 // 0: none
	reserve bool   // hold the reservation, too
	asked   uint64 // how often Reserve was called
	made    int64  // last, or asked for since, by clock
	refused bool   // a command was since: another host has taken the registration away, and it is not made again without being asked for
	err     error  // why it cannot be made; nil: nothing is known against it

	// A command with this key was lost, and may be carried out until gone.
	lost uint64
	gone time.Time
}

// Register registers key, in place of the one that this host may have registered before. It is registered again on each new connection.
// I/O waits until that was done, also if ctx ends before. A host that another one has taken the registration from does not register again
// without this being called.
func (n *Namespace) Register(ctx context.Context, key uint64) error {
	return n.enlist(ctx, "register", func(g *registration) { g.key = key })
}

// Reserve registers key and takes the reservation "exclusive access, registrants only", which is fine if this host holds it already, and again on each new
// connection. It fails with a *[FencedError] if another host holds one. When it has failed the key stays registered, and the reservation is
// not taken any more; one that was asked for when ctx ended may be there all the same.
func (n *Namespace) Reserve(ctx context.Context, key uint64) error {
	var asked uint64
	err := n.enlist(ctx, "reserve", func(g *registration) {
		g.asked++
		g.key, g.reserve, asked = key, true, g.asked
	})
	if err == nil {
		return nil
	}
	n.s.mu.Lock()
	if n.reg.asked == asked { // else somebody else wants it
		n.reg.reserve = false // what is under way with it is made once more, without: see listed
	}
	n.s.mu.Unlock()
	if errors.Is(err, wire.StatusReserved) {
		if now, rerr := n.Reservation(ctx); rerr == nil {
			return &FencedError{fmt.Errorf("nvmetcp: namespace %d of %s is reserved (%v) by host %x: have that one give it up: %w", n.nsid, n.s.nqn, now.Kind, now.Holder, err)}
		}
	}
	return err
}

// enlist changes what is wanted and waits until it is so, on some path.
func (n *Namespace) enlist(ctx context.Context, what string, change func(*registration)) error {
	if !n.format.Reservable {
		return fmt.Errorf("nvmetcp: namespace %d of %s takes no reservations: turn them on at the target", n.nsid, n.s.nqn)
	}
	s := n.s
	s.mu.Lock()
	change(&n.reg)
	n.reg.refused, n.reg.err, n.reg.made = false, nil, clock() // what is still refused was sent before
	s.relist(n)
	for {
		changed, err := s.changed, n.reg.err
		made := slices.ContainsFunc(n.paths.Load().list, func(p *path) bool { return p.link.live.Load() && p.enlisted() })
		s.mu.Unlock()
		switch {
		case err != nil:
			return fmt.Errorf("nvmetcp: %s: %w", what, err)
		case made:
			return nil
		case s.ctx.Err() != nil:
			return ErrClosed
		case !s.alive():
			return &FencedError{errLapsed}
		}
		if err := s.hopeless(n); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("nvmetcp: %s on namespace %d of %s: %w", what, n.nsid, s.nqn, ctx.Err())
		}
		s.mu.Lock()
	}
}

// relist has n's registration made anew on all paths, which are out until then. mu is held.
func (s *Subsystem) relist(n *Namespace) {
	for _, p := range n.paths.Load().list {
		p.listed = 0
		p.link.m.want(p.link, needKey)
	}
	s.refresh()
}

// enlisted reports whether the registration was made on the association that is used, or cannot be. Subsystem.mu is held.
func (p *path) enlisted() bool { return p.listed != 0 && p.listed == p.link.looked.Load() }

// alive reports whether anything may be sent to namespaces.
func (s *Subsystem) alive() bool { return s.cfg.Alive == nil || s.cfg.Alive() }

// errLapsed is why nothing is sent.
var errLapsed = errors.New("nvmetcp: the session of this host is over, or may be: nothing is sent until there is one")

// enlisting is a registration that is to be made on a path.
type enlisting struct {
	n       *Namespace
	p       *path
	key     uint64
	reserve bool
	wait    time.Duration // for an older one that may be carried out still
}

// unlisted returns a registration to be made on an association of l, not on the paths in skip.
func (s *Subsystem) unlisted(l *link, association uint64, skip []*path) (e enlisting, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.spaces {
		g := &n.reg
		if g.key == 0 || g.refused {
			continue
		}
		for _, p := range n.paths.Load().list {
			if p.link != l || p.listed == association || slices.Contains(skip, p) {
				continue
			}
			if c, _ := l.ana.class(n.nsid, p.found.group); c == classOut {
				continue // its turn comes when it is not any more
			}
			e = enlisting{n: n, p: p, key: g.key, reserve: g.reserve}
			if g.lost != 0 && g.lost != g.key {
				e.wait = time.Until(g.gone)
			}
			return e, true
		}
	}
	return e, false
}

// enlist makes the registrations that are wanted of an association.
func (m *member) enlist(l *link, association uint64) error {
	var skip []*path
	for {
		e, ok := m.s.unlisted(l, association, skip)
		if !ok {
			return nil
		}
		if e.wait > 0 {
			select {
			case <-time.After(e.wait):
			case <-m.ctx.Done():
				return m.ctx.Err()
			}
		}
		if !m.s.alive() {
			return errLapsed
		}
		err := e.make(m.ctx, l, association)
		if passing(err) {
			m.suspect(l, needKey|needANA)
			skip = append(skip, e.p)
			continue
		}
		if m.s.listed(&e, association, err); err != nil && !isStatus(err) {
			return fmt.Errorf("registration: %w", err)
		}
	}
}

// make sends the commands.
func (e *enlisting) make(ctx context.Context, l *link, association uint64) error {
	register := wire.ReservationRegister{NSID: e.n.nsid, Action: wire.RegisterKey, IgnoreKey: true, New: e.key}
	err := l.do(ctx, association, register.Command(true), register.AppendData(nil))
	if errors.Is(err, wire.StatusReserved) { // there is another key
		register.Action = wire.ReplaceKey
		err = l.do(ctx, association, register.Command(true), register.AppendData(nil))
	}
	if err != nil || !e.reserve {
		return err
	}
	acquire := wire.ReservationAcquire{NSID: e.n.nsid, Action: wire.Acquire, Type: reserveType, Current: e.key}
	return l.do(ctx, association, acquire.Command(true), acquire.AppendData(nil))
}

// listed notes how a registration has ended.
func (s *Subsystem) listed(e *enlisting, association uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := &e.n.reg
	if lost, ok := errors.AsType[*PathError](err); ok && lost.Sent {
		if g.lost, g.gone = e.key, lost.Gone; g.gone.IsZero() {
			g.gone = time.Now().Add(goneAtLatest)
		}
		if g.key != e.key {
			s.relist(e.n)
		}
	}
	if err != nil && !isStatus(err) || g.key != e.key || g.reserve != e.reserve {
		return // once more
	}
	e.p.listed, g.made = association, clock()
	if g.err = err; err != nil {
		s.cfg.Controller.Log.Error("NVMe namespace cannot be registered on", "address", e.p.link.m.addr, "nqn", s.nqn, "nsid", e.n.nsid, "error", err)
	}
}

// do runs a command that is no I/O on an association, and waits for its end. If ctx ends first it goes on.
func (l *link) do(ctx context.Context, association uint64, sqe wire.Command, data []byte) error {
	ended := make(chan struct{})
	cmd := &Command{Raw: &sqe, NSID: sqe.NSID, Data: data, Association: association, Done: func(*Command) { close(ended) }}
	l.ctl.Start(cmd)
	l.ctl.Flush()
	select {
	case <-ended:
		return cmd.Err
	case <-ctx.Done():
	}
	l.ctl.Detach(cmd)
	return ctx.Err()
}

// refused notes that a request of ours that was sent at began was refused for a reservation.
func (n *Namespace) refused(began int64) {
	n.s.mu.Lock()
	defer n.s.mu.Unlock()
	if n.reg.key != 0 && began > n.reg.made && !n.reg.refused {
		n.reg.refused = true
		n.s.refresh()
	}
}

// unregister takes the registration back, unless it holds the reservation, which would end with it.
func (n *Namespace) unregister(ctx context.Context) error {
	n.s.mu.Lock()
	none := n.reg.key == 0 || n.reg.refused || n.reg.reserve
	n.reg.key = 0
	n.s.mu.Unlock()
	if none {
		return nil
	}
	register := wire.ReservationRegister{Action: wire.UnregisterKey, IgnoreKey: true}
	sqe := register.Command(true)
	return n.Do(ctx, &Request{Command: Command{Raw: &sqe, Data: register.AppendData(nil)}})
}

// Clear ends the reservation and all registrations, and has none made again. It does nothing if this host has not registered.
func (n *Namespace) Clear(ctx context.Context) error {
	n.s.mu.Lock()
	key := n.reg.key
	n.reg.key, n.reg.reserve = 0, false
	n.s.mu.Unlock()
	if key == 0 {
		return nil
	}
	release := wire.ReservationRelease{Action: wire.Clear, Current: key}
	sqe := release.Command(true)
	return n.Do(ctx, &Request{Command: Command{Raw: &sqe, Data: release.AppendData(nil)}})
}

// Preempt takes the registration of victim, the key of another host, away, with key as our own. When it returns nil the commands of that
// host have ended, and no new ones are carried out. It is fine if nobody has that key.
func (n *Namespace) Preempt(ctx context.Context, key, victim uint64) error {
	acquire := wire.ReservationAcquire{Action: wire.PreemptAndAbort, Type: reserveType, Current: key, Preempted: victim}
	sqe := acquire.Command(true)
	err := n.Do(ctx, &Request{Command: Command{Raw: &sqe, Data: acquire.AppendData(nil)}})
	if !errors.Is(err, wire.StatusReserved) {
		return err
	}
	now, rerr := n.Reservation(ctx)
	if rerr != nil {
		return fmt.Errorf("%w; who is registered: %w", err, rerr)
	}
	ours, theirs := false, false
	for _, g := range now.Registrants {
		ours = ours || g.HostID == n.s.cfg.Controller.HostID && g.Key == key
		theirs = theirs || g.Key == victim
	}
	switch {
	case !ours:
		return &FencedError{fmt.Errorf("this host is not registered with the key %#x: %w", key, err)}
	case !theirs:
		return nil
	}
	return err
}

// reportSize is how many bytes of a report are asked for at first.
const reportSize = 4096

// Reservation asks who may use the namespace.
func (n *Namespace) Reservation(ctx context.Context) (Reservation, error) {
	for size := reportSize; ; {
		report := wire.ReservationReport{Length: uint64(size), Extended: true}
		sqe, b := report.Command(), make([]byte, size)
		if err := n.Do(ctx, &Request{Command: Command{Raw: &sqe, Data: b}}); err != nil {
			return Reservation{}, err
		}
		var head wire.ReservationStatus
		if err := head.Decode(b, true); err != nil {
			return Reservation{}, n.unreadable(err)
		}
		res := Reservation{Kind: head.Type}
		var bad error
		for g, err := range wire.Registrants(b, true) {
			if bad = err; err != nil {
				break
			}
			res.Registrants = append(res.Registrants, Registrant{g.HostID, g.Key})
			if g.Holder && head.Type != wire.ReserveWriteExclusiveAll && head.Type != wire.ReserveExclusiveAccessAll {
				res.Holder = g.HostID
			}
		}
		if bad == nil {
			return res, nil
		}
		need := min(wire.ReservationReportSize(int(head.Registrants), true), n.format.MaxTransfer&^3)
		if !errors.Is(bad, wire.ErrShort) || need <= size {
			return Reservation{}, n.unreadable(bad)
		}
		size = need
	}
}

func (n *Namespace) unreadable(err error) error {
	return fmt.Errorf("nvmetcp: namespace %d of %s: %w", n.nsid, n.s.nqn, err)
}
