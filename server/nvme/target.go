package nvme

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/callers"
	"github.com/weftfs/weft/internal/descriptors"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Bounds of a target.
const (
	maxTransfer     = 1 << 20   // bytes of one command's data, a power of two
	maxQueueSize    = 1024      // entries
	maxQueues       = 128       // I/O queues of a controller
	maxControllers  = 1024      // of a subsystem
	maxRegistrants  = 1024      // hosts with a reservation key, of a namespace
	maxPayloads     = 256 << 20 // bytes of payload in memory, over all connections, beyond maxTransfer of each
	maxConnPayloads = 16 << 20  // and of one connection
)

// Target serves subsystems at ports.
type Target struct {
	log        *slog.Logger
	payloads   atomic.Int64  // bytes, up to maxPayloads
	generation atomic.Uint64 // of the discovery log
	proofs     chan struct{} // an element for each step of an authentication that runs

	callers    callers.Table
	complaints callers.Complaints // about them

	mu         sync.Mutex
	stall      time.Duration         // stallTime, but in tests
	subsystems map[string]*subsystem // the discovery service is one
	ports      map[uint16]*port
	conns      map[*conn]bool
	closing    bool
	closed     chan struct{}  // closed at the end of Shutdown
	wg         sync.WaitGroup // of connections
}

// subsystem has its controllers and hosts guarded by Target.mu.
type subsystem struct {
	Subsystem
	discovery   bool
	hosts       map[string]Host
	table       atomic.Pointer[table] // replaced with Target.mu held
	controllers map[uint16]*controller
	lastID      uint16 // of a controller
}

// table has the namespaces of a subsystem and never changes.
type table struct {
	list []*namespace // by NSID; nil: none
	ids  []uint32     // in rising order
}

func (t *table) get(nsid uint32) *namespace {
	if nsid < uint32(len(t.list)) {
		return t.list[nsid]
	}
	return nil
}

func newTable(list []*namespace) *table {
	t := &table{list: list}
	for id, n := range list {
		if n != nil {
			t.ids = append(t.ids, uint32(id))
		}
	}
	return t
}

// namespace is served until it is gone.
type namespace struct {
	Namespace
	shift   uint           // of the block size
	file    *File          // the backing, if it is one
	blocks  atomic.Int64   // size
	refs    sync.WaitGroup // of extents
	failing atomic.Bool

	// mu is held shared from the check whether a command may run to its end.
	mu       sync.RWMutex
	gone     bool
	reserved reservations
}

// port has its listener guarded by Target.mu.
type port struct {
	Port
	t        *Target
	listener net.Listener // nil: the port is down
	ana      atomic.Pointer[anaTable]
}

// anaTable has the states of all groups at a port, by their numbers, and never changes.
type anaTable struct {
	change  uint64
	states  [MaxNamespaces + 1]wire.ANAState
	changes [MaxNamespaces + 1]uint64
}

// New makes a target that listens at its ports.
func New(cfg Config) (*Target, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("NVMe target: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	t := &Target{
		log:        cfg.Log,
		stall:      stallTime,
		subsystems: map[string]*subsystem{},
		ports:      map[uint16]*port{},
		conns:      map[*conn]bool{},
		closed:     make(chan struct{}),
		proofs:     make(chan struct{}, runtime.GOMAXPROCS(0)),
	}
	t.generation.Store(uint64(time.Now().Unix())) // so that a target which was started again shows another one
	disc := newSubsystem(Subsystem{NQN: wire.DiscoveryNQN, Serial: "weft", AnyHost: true})
	disc.discovery = true
	t.subsystems[disc.NQN] = disc
	for _, s := range cfg.Subsystems {
		sub := newSubsystem(s)
		t.subsystems[s.NQN] = sub
		for _, n := range s.Namespaces {
			if err := t.add(sub, n); err != nil {
				return nil, fmt.Errorf("NVMe target: subsystem %q: %w", s.NQN, err)
			}
		}
	}
	for _, cfg := range cfg.Ports {
		p := &port{Port: cfg, t: t}
		table := &anaTable{}
		for i := range table.states {
			table.states[i] = wire.ANAOptimized
		}
		for group, state := range cfg.ANA {
			table.states[group] = state
		}
		p.ana.Store(table)
		t.ports[p.ID] = p
		if err := t.PortUp(p.ID); err != nil {
			t.Shutdown(context.Background())
			return nil, err
		}
	}
	return t, nil
}

func newSubsystem(cfg Subsystem) *subsystem {
	s := &subsystem{Subsystem: cfg, hosts: map[string]Host{}, controllers: map[uint16]*controller{}}
	if s.Model == "" {
		s.Model = "weft"
	}
	for _, h := range cfg.Hosts {
		s.hosts[h.NQN] = h
	}
	s.table.Store(&table{})
	return s
}

// add adds a namespace. t.mu is held, or nobody knows the target yet.
func (t *Target) add(s *subsystem, cfg Namespace) error {
	file, _ := cfg.Backing.(*File)
	for _, other := range t.subsystems {
		for _, n := range other.table.Load().list {
			if n != nil && file != nil && n.file == file { // it would have other reservations, and a fence would not hold
				return fmt.Errorf("namespace %d: its file is namespace %d of subsystem %q already", cfg.NSID, n.NSID, other.NQN)
			}
		}
	}
	old := s.table.Load()
	if old.get(cfg.NSID) != nil {
		return fmt.Errorf("namespace %d is there already", cfg.NSID)
	}
	n := &namespace{Namespace: cfg, file: file, shift: 9}
	if n.BlockSize == 4096 {
		n.shift = 12
	}
	if n.ANAGroup == 0 {
		n.ANAGroup = 1
	}
	if _, err := n.measure(); err != nil {
		return err
	}
	list := slices.Clone(old.list)
	if need := int(cfg.NSID) + 1 - len(list); need > 0 {
		list = append(list, make([]*namespace, need)...)
	}
	list[cfg.NSID] = n
	s.table.Store(newTable(list))
	return nil
}

// measure takes the size of the backing, and tells whether it is another one.
func (n *namespace) measure() (changed bool, err error) {
	size, err := n.Backing.Size()
	if err == nil && size>>n.shift == 0 {
		err = errors.New("its backing is smaller than a block")
	}
	if err != nil {
		return false, fmt.Errorf("namespace %d: %w", n.NSID, err)
	}
	return n.blocks.Swap(size>>n.shift) != size>>n.shift, nil
}

// PortUp makes a port listen, again after PortDown.
func (t *Target) PortUp(id uint16) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.ports[id]
	switch {
	case p == nil:
		return fmt.Errorf("NVMe target: there is no port %d", id)
	case t.closing:
		return errors.New("NVMe target: it is shut down")
	case p.listener != nil:
		return nil
	}
	l, err := net.Listen("tcp", p.Listen)
	if err != nil {
		return fmt.Errorf("NVMe target port %d: %w", id, err)
	}
	p.listener, p.Listen = l, l.Addr().String()
	go t.accept(p, l) // ends when the listener is closed
	t.discoveryChanged()
	return nil
}

// PortDown ends what listens at a port and the controllers that were reached there. When it returns none of their commands runs.
func (t *Target) PortDown(id uint16) error {
	t.mu.Lock()
	p := t.ports[id]
	if p == nil {
		t.mu.Unlock()
		return fmt.Errorf("NVMe target: there is no port %d", id)
	}
	if p.listener != nil {
		p.listener.Close()
		p.listener = nil
	}
	ended := t.cut(func(c *conn) bool { return c.port == p }) // first: nobody is told that the controller is not ready
	for _, s := range t.subsystems {
		for _, ctrl := range s.controllers {
			if ctrl.port == p {
				t.remove(ctrl)
			}
		}
	}
	t.discoveryChanged()
	t.mu.Unlock()
	await(ended)
	return nil
}

// cut ends connections and returns them. t.mu is held.
func (t *Target) cut(which func(*conn) bool) (ended []*conn) {
	for c := range t.conns {
		if which(c) {
			c.cut()
			ended = append(ended, c)
		}
	}
	return ended
}

// await waits until no command of connections that were cut runs.
func await(ended []*conn) {
	for _, c := range ended {
		<-c.done
	}
}

// Addr is where a port listens, as HOST:PORT; empty if there is no such port.
func (t *Target) Addr(id uint16) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.ports[id]; p != nil {
		return p.Listen
	}
	return ""
}

// SetANA changes the state of a group at a port, and tells the hosts.
func (t *Target) SetANA(portID uint16, group uint32, state wire.ANAState) error {
	if err := checkANA(group, state); err != nil {
		return fmt.Errorf("NVMe target: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.ports[portID]
	if p == nil {
		return fmt.Errorf("NVMe target: there is no port %d", portID)
	}
	table := *p.ana.Load()
	if table.states[group] == state {
		return nil
	}
	table.change++
	table.states[group], table.changes[group] = state, table.change
	p.ana.Store(&table)
	for _, s := range t.subsystems {
		for _, ctrl := range s.controllers {
			if ctrl.port == p && !s.discovery {
				ctrl.raise(eventANA)
			}
		}
	}
	return nil
}

// find returns a subsystem that is no discovery service. t.mu is held.
func (t *Target) find(nqn string) (*subsystem, error) {
	if s := t.subsystems[nqn]; s != nil && !s.discovery {
		return s, nil
	}
	return nil, fmt.Errorf("NVMe target: there is no subsystem %q", nqn)
}

// AddNamespace adds a namespace to a subsystem, and tells the hosts.
func (t *Target) AddNamespace(nqn string, cfg Namespace) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.find(nqn)
	if err != nil {
		return err
	}
	if err = cfg.validate(); err == nil {
		err = t.add(s, cfg)
	}
	if err != nil {
		return fmt.Errorf("NVMe target: subsystem %q: %w", nqn, err)
	}
	s.changed(cfg.NSID)
	return nil
}

// RemoveNamespace takes a namespace away, and tells the hosts. When it returns nothing uses the backing any more.
func (t *Target) RemoveNamespace(nqn string, nsid uint32) error {
	t.mu.Lock()
	s, err := t.find(nqn)
	var n *namespace
	if err == nil {
		if n = s.table.Load().get(nsid); n == nil {
			err = fmt.Errorf("NVMe target: subsystem %q: there is no namespace %d", nqn, nsid)
		}
	}
	if err != nil {
		t.mu.Unlock()
		return err
	}
	list := slices.Clone(s.table.Load().list)
	list[nsid] = nil
	s.table.Store(newTable(list))
	s.changed(nsid)
	t.mu.Unlock()
	n.mu.Lock()
	n.gone = true
	n.mu.Unlock()
	n.refs.Wait()
	return nil
}

// Resize takes the size of a namespace's backing, which was changed, and tells the hosts. Before a backing is cut its namespace is
// removed.
func (t *Target) Resize(nqn string, nsid uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.find(nqn)
	if err != nil {
		return err
	}
	n := s.table.Load().get(nsid)
	if n == nil {
		return fmt.Errorf("NVMe target: subsystem %q: there is no namespace %d", nqn, nsid)
	}
	changed, err := n.measure()
	if err != nil {
		return fmt.Errorf("NVMe target: subsystem %q: %w", nqn, err)
	}
	if changed {
		s.changed(nsid)
	}
	return nil
}

// changed tells hosts that a namespace came, went, or has another size. Target.mu is held.
func (s *subsystem) changed(nsid uint32) {
	for _, ctrl := range s.controllers {
		ctrl.namespaceChanged(nsid)
	}
}

// AllowHost lets a host connect to a subsystem, or changes its secrets.
func (t *Target) AllowHost(nqn string, h Host) error {
	if err := h.validate(nqn); err != nil {
		return fmt.Errorf("NVMe target: subsystem %q: %w", nqn, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.find(nqn)
	if err != nil {
		return err
	}
	s.hosts[h.NQN] = h
	t.discoveryChanged()
	return nil
}

// DisallowHost refuses a host from now on, and ends its controllers. When it returns none of their commands runs. A
// subsystem that is open to any host is so no longer.
func (t *Target) DisallowHost(nqn, host string) error {
	t.mu.Lock()
	s, err := t.find(nqn)
	if err != nil {
		t.mu.Unlock()
		return err
	}
	s.AnyHost = false
	delete(s.hosts, host)
	ended := t.drop(s, func(ctrl *controller) bool { return ctrl.hostNQN == host })
	t.discoveryChanged()
	t.mu.Unlock()
	await(ended)
	return nil
}

// DropControllers ends all of a host's controllers, or all of a subsystem's if host is empty, as if their hosts were
// unreachable: they may connect again. When it returns none of their commands runs.
func (t *Target) DropControllers(nqn, host string) error {
	t.mu.Lock()
	s, err := t.find(nqn)
	if err != nil {
		t.mu.Unlock()
		return err
	}
	ended := t.drop(s, func(ctrl *controller) bool { return host == "" || ctrl.hostNQN == host })
	t.mu.Unlock()
	await(ended)
	return nil
}

// drop ends controllers, and returns the connections that have to end, those of controllers that ended before among them. t.mu is held.
func (t *Target) drop(s *subsystem, which func(*controller) bool) (ended []*conn) {
	ended = t.cut(func(c *conn) bool {
		ctrl := c.ctrl.Load()
		return ctrl != nil && ctrl.sub == s && which(ctrl)
	})
	for _, ctrl := range s.controllers {
		if which(ctrl) {
			t.remove(ctrl)
		}
	}
	return ended
}

// dropOne ends one controller; the connections end by themselves.
func (t *Target) dropOne(ctrl *controller) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cut(func(c *conn) bool { return c.ctrl.Load() == ctrl })
	t.remove(ctrl)
}

// remove forgets a controller. t.mu is held.
func (t *Target) remove(ctrl *controller) {
	if ctrl.sub.controllers[ctrl.id] == ctrl {
		delete(ctrl.sub.controllers, ctrl.id)
		ctrl.stop()
	}
}

// discoveryChanged tells hosts that the discovery log is another one. t.mu is held.
func (t *Target) discoveryChanged() {
	t.generation.Add(1)
	for _, ctrl := range t.subsystems[wire.DiscoveryNQN].controllers {
		ctrl.raise(eventDiscovery)
	}
}

// accept accepts connections at a port until its listener is closed.
func (t *Target) accept(p *port, l net.Listener) {
	in := descriptors.Listener(l)
	for {
		nc, err := in.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				t.log.Error("connections are not accepted any more", "addr", l.Addr(), "err", err)
			}
			return
		}
		t.start(p, l, nc)
	}
}

// start serves a connection, unless there are too many or the port went down.
func (t *Target) start(p *port, l net.Listener, nc net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closing || p.listener != l {
		nc.Close()
		return
	}
	c, err := newConn(t, p, nc)
	if err != nil {
		t.log.Error("cannot serve a connection", "host", nc.RemoteAddr(), "err", err)
		nc.Close()
		return
	}
	if !t.callers.Enter(c, nc.RemoteAddr()) {
		if dropped, ok := t.complaints.Pass(nc.RemoteAddr()); ok {
			t.log.Error("too many connections in use: another one is refused", "host", nc.RemoteAddr(), "connections", len(t.conns), "not_logged", dropped)
		}
		nc.Close()
		return
	}
	t.conns[c] = true
	t.wg.Add(1)
	go func() { // owns the connection and ends with it
		defer t.wg.Done()
		if err := c.serve(); err != nil {
			if dropped, ok := t.complaints.Pass(nc.RemoteAddr()); ok {
				t.log.Warn("connection closed", "host", nc.RemoteAddr(), "queue", c.qid, "err", err, "not_logged", dropped)
			}
		}
		t.callers.Leave(c)
		t.mu.Lock()
		delete(t.conns, c)
		t.mu.Unlock()
	}()
}

// Shutdown stops listening, lets commands that have begun end and be answered, and closes everything. When ctx ends first the
// connections are cut, and only the commands that run are waited for. Backings are not closed.
func (t *Target) Shutdown(ctx context.Context) error {
	t.mu.Lock()
	first := !t.closing
	t.closing = true
	for _, p := range t.ports {
		if p.listener != nil {
			p.listener.Close()
			p.listener = nil
		}
	}
	for c := range t.conns {
		c.drain()
	}
	t.mu.Unlock()
	if first {
		go func() { // ends with the last connection
			t.wg.Wait()
			close(t.closed)
		}()
	}
	select {
	case <-t.closed:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	t.cut(func(*conn) bool { return true })
	t.mu.Unlock()
	<-t.closed
	return ctx.Err()
}
