package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// SubsystemConfig says how to use a subsystem.
type SubsystemConfig struct {
	// Controller is what every controller's Config is made of: all but Addr, Discovery, OnState and OnEvent.
	Controller Config
	// Addrs are the addresses of the subsystem, as host:port, at least one.
	Addrs []string
	// Policy chooses among paths.
	Policy Policy
	// Patience is for how long requests may wait for a path. None ("hard"): as long as a controller may come back.
	Patience layout.Patience
	// IDs is where this process notes which namespace is whose; nil: it is not compared with other subsystems.
	IDs *IDs
	// Alive is asked before each command to a namespace is sent, or sent again, and must be quick; nil: always. When it returns false the
	// request ends with a *[FencedError].
	Alive func() bool
}

// Subsystem is the controllers of one NVMe subsystem, each at an address of its own, and the namespaces that they share. An
// address whose controller cannot be reached is tried again for as long as it is there.
//
// Its methods may be called from any goroutine.
type Subsystem struct {
	cfg    SubsystemConfig
	nqn    string
	policy atomic.Uint32
	losses atomic.Uint64 // of associations
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	dial   func(context.Context, Config) (controller, error) // Connect, but for tests
	// links are all that are connected. A path may be gone from its namespace while something that was started on it is still to be flushed.
	links atomic.Pointer[[]*link]

	mu      sync.Mutex
	members []*member
	spaces  map[uint32]*Namespace
	changed chan struct{} // closed and made anew with each change
}

// newSubsystem begins to connect to the addresses.
func newSubsystem(cfg SubsystemConfig, dial func(context.Context, Config) (controller, error)) (*Subsystem, error) {
	if err := checkAddrs(cfg.Controller, cfg.Addrs); err != nil {
		return nil, err
	}
	if err := defaults(&cfg.Controller); err != nil {
		return nil, err
	}
	if cfg.IDs == nil {
		cfg.IDs = new(IDs)
	}
	s := &Subsystem{cfg: cfg, nqn: cfg.Controller.SubsysNQN, dial: dial, spaces: map[uint32]*Namespace{}, changed: make(chan struct{})}
	s.policy.Store(uint32(cfg.Policy))
	s.links.Store(new([]*link))
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.SetAddrs(cfg.Addrs)
	return s, nil
}

// defaults fills in c, which has no address yet.
func defaults(c *Config) error {
	c.Addr = "unset:0"
	err := c.Validate()
	c.Addr = ""
	return err
}

// NQN is the subsystem's name.
func (s *Subsystem) NQN() string { return s.nqn }

// Policy is how paths are chosen now.
func (s *Subsystem) Policy() Policy { return Policy(s.policy.Load()) }

// SetPolicy changes how paths are chosen, from the next command on.
func (s *Subsystem) SetPolicy(p Policy) {
	s.policy.Store(uint32(p))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.spaces {
		n.paths.Store(newPathSet(n.paths.Load().list)) // what was used last is nothing to the new policy
	}
}

// SetAddrs makes addrs the subsystem's addresses: new ones are connected to, and those that are missing are left when what they
// are doing has ended. Without any address the old ones stay, as there is nothing to use in their place.
func (s *Subsystem) SetAddrs(addrs []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return
	}
	if len(addrs) == 0 {
		s.cfg.Controller.Log.Warn("NVMe subsystem has no address any more, keeping the old ones", "nqn", s.nqn)
		return
	}
	var keep []*member
	for _, m := range s.members {
		if slices.Contains(addrs, m.addr) {
			keep = append(keep, m)
		} else {
			s.cfg.Controller.Log.Info("NVMe address removed", "address", m.addr, "nqn", s.nqn)
			m.leave()
		}
	}
	for _, addr := range addrs {
		if !slices.ContainsFunc(keep, func(m *member) bool { return m.addr == addr }) {
			m := newMember(s, addr)
			keep = append(keep, m)
			s.wg.Add(1)
			// This goroutine owns the member; it ends when its address is removed or the subsystem closed.
			go m.run()
		}
	}
	s.members = keep
	s.tell()
}

// Addrs are the addresses in use.
func (s *Subsystem) Addrs() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var addrs []string
	for _, m := range s.members {
		addrs = append(addrs, m.addr)
	}
	return addrs
}

// Namespaces are the namespaces that are there, by number.
func (s *Subsystem) Namespaces() []*Namespace {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*Namespace
	for _, n := range s.spaces {
		if len(n.paths.Load().list) > 0 {
			list = append(list, n)
		}
	}
	slices.SortFunc(list, func(a, b *Namespace) int { return int(a.nsid) - int(b.nsid) })
	return list
}

// Namespace returns one by its number. The error says what is known of it, and which there are.
func (s *Subsystem) Namespace(nsid uint32) (*Namespace, error) {
	list := s.Namespaces()
	for _, n := range list {
		if n.nsid == nsid {
			return n, nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, m := range s.members {
		if err := m.refused[nsid]; err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	there := "there are none"
	if len(list) > 0 {
		var names []string
		for _, n := range list {
			names = append(names, fmt.Sprint(n.nsid))
		}
		there = "there are: " + strings.Join(names, " ")
	}
	return nil, fmt.Errorf("nvmetcp: %s at %s has no namespace %d for this host (%s): give another number, or attach it at the target",
		s.nqn, strings.Join(s.addrs(), ", "), nsid, there)
}

// find returns a namespace when it has been found, on any controller. It gives up when all of them have been looked at once more
// without finding it, with what is known of it, or cannot be reached, with why, or when ctx ends.
func (s *Subsystem) find(ctx context.Context, nsid uint32) (*Namespace, error) {
	var asked map[*member]uint64 // scans before they were asked to look again
	for {
		s.mu.Lock()
		changed := s.changed
		n := s.spaces[nsid]
		there := n != nil && len(n.paths.Load().list) > 0
		settled, reached := true, false
		var errs []error
		for _, m := range s.members {
			switch {
			case m.link == nil && m.err != nil:
				errs = append(errs, m.err)
			case m.link == nil || !m.scanned && m.err == nil:
				settled = false
			case m.scanned && m.link.ctl.State() != StateLive:
				errs = append(errs, m.link.lost())
			case !m.scanned:
				errs = append(errs, m.err)
			default:
				reached = true
				settled = settled && (asked == nil || m.scans > asked[m])
			}
		}
		if !there && settled && reached && asked == nil {
			asked, settled = map[*member]uint64{}, false
			for _, m := range s.members {
				asked[m] = m.scans
				m.again()
			}
		}
		closed := s.ctx.Err() != nil
		s.mu.Unlock()
		switch {
		case closed:
			return nil, ErrClosed
		case there:
			return n, nil
		case settled && !reached:
			return nil, errors.Join(errs...)
		case settled:
			return s.Namespace(nsid)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, errors.Join(append(errs, fmt.Errorf("nvmetcp: looking for namespace %d of %s at %s: %w", nsid, s.nqn, strings.Join(s.Addrs(), ", "), ctx.Err()))...)
		}
	}
}

// add adds addresses. Calls of it and SetAddrs come one after the other.
func (s *Subsystem) add(addrs []string) error {
	if err := checkAddrs(s.cfg.Controller, addrs); err != nil {
		return err
	}
	have := s.Addrs()
	for _, addr := range addrs {
		if !slices.Contains(have, addr) {
			have = append(have, addr)
		}
	}
	s.SetAddrs(have)
	return nil
}

// checkAddrs tells what is wrong with addresses or the rest of c.
func checkAddrs(c Config, addrs []string) error {
	if len(addrs) == 0 {
		return fmt.Errorf("nvmetcp: subsystem %s: no address", c.SubsysNQN)
	}
	for _, addr := range addrs {
		c.Addr = addr
		if err := c.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// addrs is Addrs with mu held.
func (s *Subsystem) addrs() []string {
	var addrs []string
	for _, m := range s.members {
		addrs = append(addrs, m.addr)
	}
	return addrs
}

// Close ends all requests with ErrClosed and closes the connections.
func (s *Subsystem) Close() error {
	s.mu.Lock()
	s.cancel()
	for _, n := range s.spaces {
		n.close(ErrClosed)
		s.cfg.IDs.release(n.id, s.nqn, n.nsid)
	}
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// tell says that something has changed. mu is held.
func (s *Subsystem) tell() {
	close(s.changed)
	s.changed = make(chan struct{})
	for _, n := range s.spaces {
		n.wake()
	}
}

// hopeless returns nil if some controller has a path to n, or may have one later; else why none has.
func (s *Subsystem) hopeless(n *Namespace) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.spaces[n.nsid]; now != n {
		e := &GoneError{NQN: s.nqn, NSID: n.nsid, ID: n.id}
		if now != nil {
			e.Now = &now.id
		}
		return e
	}
	var errs []error
	gone := len(s.members) > 0
	for _, m := range s.members {
		err := m.hopeless(n)
		if err == nil {
			return nil
		}
		if _, ok := errors.AsType[*GoneError](err); !ok {
			gone = false
		}
		errs = append(errs, err)
	}
	if gone {
		return &GoneError{NQN: s.nqn, NSID: n.nsid, ID: n.id}
	}
	return &NoPathError{NQN: s.nqn, NSID: n.nsid, Err: errors.Join(errs...)}
}

// apply takes in what a scan of l has found.
func (s *Subsystem) apply(m *member, l *link, list []found, refused map[uint32]error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := m.refused
	m.refused = refused
	seen := map[*Namespace]bool{}
	for _, f := range list {
		n, err := s.place(m, l, f)
		if err != nil {
			m.refused[f.nsid] = err
			continue
		}
		seen[n] = true
	}
	for _, n := range s.spaces {
		if !seen[n] {
			s.unlink(n, l, "the controller no longer has it")
		}
	}
	for nsid, err := range m.refused {
		if was := before[nsid]; was == nil || was.Error() != err.Error() {
			s.cfg.Controller.Log.Error("NVMe namespace refused", "nsid", nsid, "error", err)
		}
	}
	m.scanned = true
	m.scans++
	m.err = nil
	s.refresh()
}

// place finds the namespace that f is, or makes it, and gives it a path on l. mu is held.
func (s *Subsystem) place(m *member, l *link, f found) (*Namespace, error) {
	n := s.spaces[f.nsid]
	if n != nil && n.id != f.id {
		s.unlink(n, l, "replaced by another namespace")
		for _, p := range n.paths.Load().list {
			if p.link.live.Load() {
				return nil, fmt.Errorf("nvmetcp: %s of %s: namespace %d is %v here but %v at %s: not used, make the target's ports serve the same one",
					m.addr, s.nqn, f.nsid, f.id, n.id, p.link.m.addr)
			}
		}
		s.cfg.Controller.Log.Error("NVMe namespace replaced by another", "address", m.addr, "nqn", s.nqn, "nsid", f.nsid, "was", n.id.String(), "is", f.id.String())
		s.forget(n)
		n = nil
	}
	if n == nil || len(n.paths.Load().list) == 0 {
		if err := s.cfg.IDs.claim(f.id, s.nqn, f.nsid); err != nil {
			return nil, fmt.Errorf("nvmetcp: %s of %s: %w", m.addr, s.nqn, err)
		}
	}
	if n == nil {
		n = &Namespace{s: s, nsid: f.nsid, id: f.id, format: f.format}
		n.blocks.Store(f.blocks)
		n.paths.Store(newPathSet(nil))
		s.spaces[f.nsid] = n
		for _, other := range s.members {
			if other != m && other.refused[f.nsid] != nil {
				other.again()
			}
		}
	}
	n.fixed.Store(f.fixed)
	if err := n.format.accepts(f.format); err != nil {
		s.unlink(n, l, "other format")
		return nil, fmt.Errorf("nvmetcp: %s of %s: namespace %d %w: not used over this address", m.addr, s.nqn, f.nsid, err)
	}
	set := n.paths.Load()
	i := slices.IndexFunc(set.list, func(p *path) bool { return p.link == l })
	if i < 0 {
		p := &path{link: l, found: f}
		s.cfg.Controller.Log.Info("NVMe path found", "address", l.m.addr, "nqn", s.nqn, "nsid", n.nsid, "id", n.id.String())
		list := append(slices.Clone(set.list), p)
		slices.SortStableFunc(list, func(a, b *path) int { return s.position(a) - s.position(b) })
		n.paths.Store(newPathSet(list))
		if n.blocks.Load() != f.blocks && !s.anyOther(n, p) {
			n.resize(f.blocks)
		}
		return n, nil
	}
	p := set.list[i]
	if p.found.blocks != f.blocks {
		n.resize(f.blocks)
		for _, other := range set.list {
			if other != p {
				other.link.m.want(other.link, needScan)
			}
		}
	}
	p.found = f
	p.stale.Store(false)
	return n, nil
}

// position orders paths as the addresses were given. mu is held.
func (s *Subsystem) position(p *path) int { return slices.Index(s.members, p.link.m) }

// anyOther reports whether n has a live path beside p. mu is held.
func (s *Subsystem) anyOther(n *Namespace, p *path) bool {
	return slices.ContainsFunc(n.paths.Load().list, func(q *path) bool { return q != p && q.link.live.Load() })
}

func (n *Namespace) resize(blocks uint64) {
	if was := n.blocks.Swap(blocks); was != blocks {
		n.s.cfg.Controller.Log.Info("NVMe namespace has another size", "nqn", n.s.nqn, "nsid", n.nsid, "blocks", blocks, "was", was)
	}
}

// unlink takes the path on l from n. mu is held.
func (s *Subsystem) unlink(n *Namespace, l *link, why string) {
	set := n.paths.Load()
	i := slices.IndexFunc(set.list, func(p *path) bool { return p.link == l })
	if i < 0 {
		return
	}
	s.cfg.Controller.Log.Info("NVMe path removed", "address", l.m.addr, "nqn", s.nqn, "nsid", n.nsid, "why", why)
	list := slices.Delete(slices.Clone(set.list), i, i+1)
	n.paths.Store(newPathSet(list))
	set.list[i].class.Store(uint32(classOut)) // for a request that waits to be repeated on it
	if len(list) == 0 {
		s.cfg.IDs.release(n.id, s.nqn, n.nsid)
	}
}

// forget drops a namespace for good. mu is held.
func (s *Subsystem) forget(n *Namespace) {
	delete(s.spaces, n.nsid)
	for _, p := range n.paths.Load().list {
		s.unlink(n, p.link, "the namespace is gone")
	}
	n.wake()
}

// drop takes all paths on l away.
func (s *Subsystem) drop(l *link, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.spaces {
		s.unlink(n, l, why)
	}
	s.refresh()
}

// refresh sets the class of every path anew and has what waits looked at. mu is held.
func (s *Subsystem) refresh() {
	for _, n := range s.spaces {
		set := n.paths.Load()
		turned := false
		for _, p := range set.list {
			c, why := p.judge(n)
			p.why = why
			if was := class(p.class.Swap(uint32(c))); was != c {
				turned = true
				s.cfg.Controller.Log.Info("NVMe path", "address", p.link.m.addr, "nqn", s.nqn, "nsid", n.nsid, "use", c.String(), "why", why)
			}
		}
		if turned {
			n.paths.Store(newPathSet(set.list)) // those used last are looked for again, as Linux does
		}
	}
	s.tell()
}

// judge is what a policy may do with p, as far as the controller tells, and why not more. Subsystem.mu is held.
func (p *path) judge(n *Namespace) (class, string) {
	if want := n.blocks.Load(); p.found.blocks != want {
		return classOut, fmt.Sprintf("has %d blocks, the namespace has %d", p.found.blocks, want)
	}
	c, why := p.link.ana.class(p.found.nsid, p.found.group)
	if c != classOut && n.reg.key != 0 && !n.reg.refused && !p.enlisted() {
		return classOut, "the reservation key is to be registered"
	}
	return c, why
}

// needs are what is to be read from a controller.
type need uint8

const (
	needANA  need = 1 << iota // the ANA log
	needScan                  // the namespaces, and the ANA log
	needKey                   // and to be told: reservation keys
)

// member is one address of a subsystem.
type member struct {
	s     *Subsystem
	addr  string
	ctx   context.Context
	leave context.CancelFunc
	kick  chan struct{} // capacity 1: something is needed, or has changed

	// Guarded by Subsystem.mu.
	link    *link
	scanned bool   // link has been looked at at least once
	scans   uint64 // how often any has been
	err     error
	since   time.Time // of err, without a connection meanwhile
	final   bool      // err is for good, as far as the controller tells
	refused map[uint32]error

	mu sync.Mutex // a leaf, of what links have of it
}

func newMember(s *Subsystem, addr string) *member {
	m := &member{s: s, addr: addr, kick: make(chan struct{}, 1), since: time.Now()}
	m.ctx, m.leave = context.WithCancel(s.ctx)
	return m
}

// again has the namespaces scanned. Subsystem.mu is held.
func (m *member) again() {
	if m.link != nil {
		m.want(m.link, needScan)
	}
}

// want says what is needed of a link.
func (m *member) want(l *link, what need) {
	m.mu.Lock()
	l.need |= what
	m.mu.Unlock()
	m.poke()
}

// suspect says that what is known of a link seems to be wrong. It is looked at soon: at once the first time, later if that did not help.
func (m *member) suspect(l *link, what need) {
	m.mu.Lock()
	l.suspects |= what
	m.mu.Unlock()
	m.poke()
}

func (m *member) poke() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// hopeless is nil if the member has a path to n or may have one later, else why not. Subsystem.mu is held.
func (m *member) hopeless(n *Namespace) error {
	l := m.link
	if l == nil {
		cfg := &m.s.cfg.Controller
		away := time.Since(m.since)
		if m.err == nil || !m.final && (cfg.CtrlLossTimeout < 0 || away < cfg.CtrlLossTimeout) && (cfg.FastFail == 0 || away < cfg.FastFail) {
			return nil
		}
		return m.err
	}
	switch state := l.ctl.State(); {
	case state == StateFailing || state == StateDead:
		return fmt.Errorf("%s of %s is %v: %w", m.addr, m.s.nqn, state, l.lost())
	case state != StateLive || !l.live.Load():
		return nil
	}
	if err := m.refused[n.nsid]; err != nil {
		if passing(err) {
			return nil
		}
		return err
	}
	for _, p := range n.paths.Load().list {
		if p.link == l {
			return nil
		}
	}
	return &GoneError{NQN: m.s.nqn, NSID: n.nsid, ID: n.id}
}

// run is the goroutine of the member: it connects, keeps what is known of the controller fresh, and connects anew when the
// controller was given up.
func (m *member) run() {
	defer m.s.wg.Done()
	for {
		l, err := m.connect()
		if err != nil {
			m.failed(err)
		} else {
			m.serve(l)
			m.end(l)
		}
		select {
		case <-m.ctx.Done():
			return
		case <-time.After(m.s.cfg.Controller.ReconnectDelay):
		}
	}
}

// connect makes a link.
func (m *member) connect() (*link, error) {
	l := &link{m: m, node: nodeOf(m.addr), need: needANA | needScan}
	cfg := m.s.cfg.Controller
	cfg.Addr, cfg.Discovery = m.addr, false
	cfg.OnState = func(s State) { m.state(l, s) }
	cfg.OnEvent = func(e wire.AsyncEvent) { m.event(l, e) }
	ctl, err := m.s.dial(m.ctx, cfg)
	if err != nil {
		return nil, err
	}
	l.ctl = ctl
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.link = l
	links := append(slices.Clone(*m.s.links.Load()), l)
	m.s.links.Store(&links)
	return l, nil
}

// failed notes that there is no connection.
func (m *member) failed(err error) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if m.ctx.Err() != nil {
		return
	}
	if m.err == nil {
		m.s.cfg.Controller.Log.Warn("NVMe address cannot be used, trying again", "address", m.addr, "nqn", m.s.nqn, "error", err,
			slog.Duration("every", m.s.cfg.Controller.ReconnectDelay))
	}
	refused, ok := errors.AsType[*ConnectError](err)
	m.err, m.final = err, ok && refused.Final
	m.s.tell()
}

// state is told each state of a link's controller.
func (m *member) state(l *link, s State) {
	m.mu.Lock()
	if s != StateLive {
		l.live.Store(false)
		if s == StateResetting || s == StateDead {
			m.s.losses.Add(1)
			l.epoch++
		}
		l.need = needANA | needScan // anything may have changed meanwhile
	}
	m.mu.Unlock()
	m.poke()
}

// serve keeps what is known of a link fresh until its controller is given up or the member is left.
func (m *member) serve(l *link) {
	var change anaTimer
	defer change.stop()
	var failures, doubts backoff
	var retry, doubt <-chan time.Time
	for {
		state := l.ctl.State()
		if state == StateDead {
			return
		}
		if state != StateLive {
			change.stop() // what the next association says of its groups counts
		}
		if doubt == nil {
			m.mu.Lock()
			if l.suspects != 0 {
				l.need, l.suspects = l.need|l.suspects, 0
				doubt = time.After(doubts.next())
			}
			m.mu.Unlock()
		}
		if state == StateLive && retry == nil {
			if err := m.refresh(l, &change); err == nil {
				failures.reset()
			} else if m.ctx.Err() == nil {
				if err != errLapsed {
					m.unreadable(err)
				}
				retry = time.After(failures.next())
			}
		}
		m.s.mu.Lock()
		m.s.tell()
		m.s.mu.Unlock()
		select {
		case <-m.ctx.Done():
			return
		case <-m.kick:
		case <-retry:
			retry = nil
		case <-doubt:
			doubt = nil
			m.mu.Lock()
			if l.suspects == 0 {
				doubts.reset()
			}
			m.mu.Unlock()
		case <-change.c():
			change.stop()
			l.ctl.Reset("ANA groups in the state change for more than twice ANATT")
		}
	}
}

// unreadable notes that a controller is there but does not say what it has.
func (m *member) unreadable(err error) {
	err = fmt.Errorf("nvmetcp: %s of %s: %w", m.addr, m.s.nqn, err)
	m.s.cfg.Controller.Log.Warn("NVMe controller cannot be looked at, trying again", "error", err)
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if !m.scanned {
		m.err = err
	}
}

// refresh reads what is needed of a live controller, and makes the link usable.
func (m *member) refresh(l *link, change *anaTimer) error {
	for {
		m.mu.Lock()
		need, epoch := l.need, l.epoch
		l.need = 0
		m.mu.Unlock()
		if need == 0 {
			return nil
		}
		association := l.ctl.Info().Association
		err := m.read(l, need, change)
		if err == nil {
			err = m.enlist(l, association)
		}
		m.mu.Lock()
		if err != nil {
			l.need |= need
		}
		same := l.epoch == epoch
		if err == nil && same {
			// Under mu: state cannot tell of a loss in between, so nothing goes to an association that was not looked at.
			l.looked.Store(association)
			l.live.Store(true)
		}
		m.mu.Unlock()
		if err != nil {
			if !same {
				return nil // lost meanwhile, which was told
			}
			return err
		}
		m.s.mu.Lock()
		m.s.refresh()
		m.s.mu.Unlock()
	}
}

// read reads what is needed. The log of changed namespaces comes first: reading it arms its event again, so what changes after that is told, and
// is read once more. It stands for the ANA log, too, whose groups are those that have namespaces: it changes as these come and go, of which
// there is no other event.
func (m *member) read(l *link, need need, change *anaTimer) error {
	ctx := m.ctx
	info := l.ctl.Info()
	if need&needScan != 0 && info.Controller.OAES&wire.EventsNamespaces != 0 {
		// What has changed does not matter, as everything is looked at.
		get := wire.GetLogPage{ID: wire.LogChangedNamespaces, NSID: wire.AllNamespaces}
		if err := l.ctl.GetLogPage(ctx, get, make([]byte, wire.IdentifySize)); err != nil {
			return fmt.Errorf("log of changed namespaces: %w", err)
		}
	}
	if need&(needANA|needScan) != 0 {
		var g *anaGroups
		if info.Controller.CMIC&wire.CMICANA != 0 {
			var err error
			if g, err = readANA(ctx, l.ctl); err != nil {
				return err
			}
		}
		change.update(g, info.Controller.ANATT)
		m.s.setANA(l, g)
	}
	if need&needScan != 0 {
		list, refused, err := scan(ctx, l.ctl, m.addr+" of "+m.s.nqn)
		if err != nil {
			return err
		}
		for _, err := range refused {
			if passing(err) {
				m.suspect(l, needScan)
			}
		}
		m.s.apply(m, l, list, refused)
	}
	return nil
}

// setANA takes in a new ANA log.
func (s *Subsystem) setANA(l *link, g *anaGroups) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.ana = g
	for _, n := range s.spaces {
		for _, p := range n.paths.Load().list {
			if p.link == l && p.stale.Load() {
				p.stale.Store(false)
			}
		}
	}
}

// event is told each event of a link's controller.
func (m *member) event(l *link, e wire.AsyncEvent) {
	switch {
	case e.Is(wire.EventANAChanged):
		m.want(l, needANA)
	case e.Is(wire.EventNamespaceChanged):
		m.want(l, needScan)
	}
}

// leaveTime is how long the commands of an address that is left may take.
const leaveTime = 30 * time.Second

// end takes a link out of use and closes it, when what it is doing has ended.
func (m *member) end(l *link) {
	m.mu.Lock()
	l.live.Store(false)
	m.s.losses.Add(1)
	l.epoch++
	m.mu.Unlock()
	m.s.mu.Lock()
	m.link, m.scanned = nil, false
	if m.err == nil {
		m.err = fmt.Errorf("nvmetcp: %s of %s: given up: %w", m.addr, m.s.nqn, l.lost())
	}
	m.since = time.Time{} // it had its time
	m.s.mu.Unlock()
	m.s.drop(l, "the controller is left")
	for deadline := time.Now().Add(leaveTime); l.commands.Load() > 0 && l.ctl.State() == StateLive && m.s.ctx.Err() == nil && time.Now().Before(deadline); {
		l.ctl.Flush()
		time.Sleep(10 * time.Millisecond)
	}
	m.s.mu.Lock()
	links := slices.DeleteFunc(slices.Clone(*m.s.links.Load()), func(o *link) bool { return o == l })
	m.s.links.Store(&links)
	m.s.mu.Unlock()
	l.ctl.Close()
}

// backoff is growing times between attempts.
type backoff struct{ last time.Duration }

func (b *backoff) next() time.Duration {
	b.last = min(max(2*b.last, 50*time.Millisecond), 2*time.Second)
	return b.last
}

func (b *backoff) reset() { b.last = 0 }
