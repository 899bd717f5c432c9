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
		if err := t.portUp(p.ID); err != nil {
			t.Shutdown(context.Background())
			return nil, err
		}
	}
	if cfg.Control != nil {
		cfg.Control(control{t})
	}
	return t, nil
}

type control struct{ *Target }

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

// portUp makes a port listen.
func (t *Target) portUp(id uint16) error {
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

// Addr is where a port listens, as HOST:PORT; empty if there is no such port.
func (t *Target) Addr(id uint16) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.ports[id]; p != nil {
		return p.Listen
	}
	return ""
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
