package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/meta/locktable"
	"github.com/weftfs/weft/server/schema"
)

// DefaultLease is how long a member can be silent.
const DefaultLease = 5 * time.Second

const (
	helloTimeout = 10 * time.Second      // for a connection's first frames
	awayTimeout  = 8 * time.Second       // for this process to be a member again, before its clients hear that it is not: they wait helloTimeout
	tellTimeout  = 10 * time.Second      // for a member that is told to look
	giveTimeout  = 5 * time.Second       // for the calls of a shard that is given away
	startTimeout = 2 * time.Second       // for a service that is starting, before its clients are sent to look elsewhere
	aliveLook    = 50 * time.Millisecond // how often it is looked whether clients may be answered

	// farewell is how long a member that has given its shards away goes on to tell clients where these are. A client
	// that has lost its connection comes back after 0.1 s, to where the shard was, and may know no other service that
	// is still there.
	farewell = time.Second
)

// Service serves a shard. *meta.Service is one.
type Service interface {
	ServeConn(in *admit.Incoming, hello *metarpc.Hello)
	Hold(ctx context.Context, h *meta.Hold) (*meta.Held, error)
	Settle(ctx context.Context, s *meta.Settle) error
	LockWaits(after locktable.Wait) []locktable.Wait
	// Shutdown lets calls end as long as ctx allows. When it returns the service does nothing more. It may be called several times at once.
	Shutdown(ctx context.Context) error
}

// Host makes services for one incarnation of the process.
type Host interface {
	// Service starts the service of a shard, whose owner the incarnation is. row is the shard's row, which was written for this call, and for no other; what the service
	// commits to engine has no effect when the row is another one. Close of engine does nothing.
	Service(ctx context.Context, shard int, row []byte, engine catalog.Engine) (Service, error)
	// Close is called when all services have been shut down.
	Close() error
}

// Incarnation is what a Host works with.
type Incarnation struct {
	ID      [16]byte
	Engine  catalog.Engine // guarded by the member row; Close does nothing
	Alive   func() bool
	Ring    func() metarpc.Ring
	Has     func(shard int) bool // whether it is this one's
	Peers   meta.Peers
	Members meta.Members
}

// Config is what a Node works with.
type Config struct {
	Engine  catalog.Engine // not closed by the Node
	Open    func(ctx context.Context, in *Incarnation) (Host, error)
	Address string        // HOST:PORT where clients and other members reach this process
	Host    string        // for people
	Program string        // "weftd 1.2.3"
	Lease   time.Duration // for which this process can be silent; 0 = DefaultLease
	Log     *slog.Logger  // nil = slog.Default

	Door  *admit.Door                                                 // where clients and other members come in; nil = in clear text
	TLS   *rpctls.Client                                              // for connections to other members; nil = in clear text
	Dial  func(ctx context.Context, address string) (net.Conn, error) // nil = TCP, and TLS
	Clock func() time.Duration                                        // since some moment; nil = CLOCK_BOOTTIME

	// Speaks are the versions of the protocol with clients, as the services speak them; zero = all that this program knows. Tests choose others.
	Speaks metarpc.Versions
	// SpeaksToPeers are those of the protocol with other members, in the same way.
	SpeaksToPeers metarpc.Versions
}

// Validate checks the configuration.
func (c *Config) Validate() error {
	if c.Engine == nil || c.Open == nil {
		return errors.New("metadata cluster: no catalog or no services")
	}
	if c.Address == "" || len(c.Address) > metarpc.MaxAddress {
		return fmt.Errorf("metadata cluster: address of %d bytes, want 1 to %d", len(c.Address), metarpc.MaxAddress)
	}
	if host, port, err := net.SplitHostPort(c.Address); err != nil || host == "" || port == "" {
		return fmt.Errorf("metadata cluster: address %q that others are told, want HOST:PORT", c.Address)
	}
	if least, most := 100*time.Millisecond, time.Hour; c.Lease != 0 && (c.Lease < least || c.Lease > most) {
		return fmt.Errorf("metadata cluster: member lease of %v, want %v to %v", c.Lease, least, most)
	}
	return nil
}

// Node is this process among those that serve a volume.
type Node struct {
	cfg    Config
	log    *slog.Logger
	volume [16]byte
	shards int
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	tasks  sync.WaitGroup // goroutines of the Node and its connections

	mu        sync.Mutex
	present   *member // nil while it joins
	leaving   bool
	conns     map[net.Conn]struct{} // nil once stopped
	listeners map[net.Listener]struct{}
}

// Start joins the processes that serve the volume in the catalog, which is there already. Serve lets clients in; Leave or Close ends it.
func Start(ctx context.Context, cfg Config) (*Node, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Lease == 0 {
		cfg.Lease = DefaultLease
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			nc, err := descriptors.Retry(func() (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", address) })
			if err != nil || cfg.TLS == nil {
				return nc, err
			}
			return cfg.TLS.To(ctx, nc, address, rpctls.Meta)
		}
	}
	if cfg.Door == nil {
		cfg.Door = &admit.Door{Log: cfg.Log}
	}
	if cfg.Clock == nil {
		cfg.Clock = bootTime
	}
	cfg.Speaks = cfg.Speaks.Or(metarpc.Spoken)
	cfg.SpeaksToPeers = cfg.SpeaksToPeers.Or(peerrpc.Spoken)
	n := &Node{cfg: cfg, log: cfg.Log, conns: map[net.Conn]struct{}{}, listeners: map[net.Listener]struct{}{}}
	_, volume, err := n.readVolume(ctx)
	if err != nil {
		return nil, err
	}
	n.volume, n.shards = volume.ID, volume.ShardCount()
	n.ctx, n.stop = context.WithCancel(context.Background())
	m, err := n.join(ctx)
	if err != nil {
		n.stop()
		return nil, fmt.Errorf("join the metadata services of the volume: %w", err)
	}
	n.present = m
	n.tasks.Go(func() { n.run(m) }) // ends with the last incarnation, at Leave or Close
	return n, nil
}

// readVolume reads the volume's row, which must be of a format that is known here.
func (n *Node) readVolume(ctx context.Context) (raw []byte, volume schema.Volume, err error) {
	if raw, err = n.cfg.Engine.Get(ctx, schema.KeyVolume); err != nil {
		return nil, volume, fmt.Errorf("read the volume: %w", err)
	}
	if err := schema.Decode(raw, &volume); err != nil {
		return nil, volume, fmt.Errorf("the catalog's volume row: %w", err)
	}
	return raw, volume, schema.CheckFormat(volume.Format)
}

// run is one incarnation after another.
func (n *Node) run(m *member) {
	for {
		m.run()
		n.mu.Lock()
		n.present = nil
		leaving := n.leaving
		n.mu.Unlock()
		n.tasks.Go(m.end) // ends when its services have, which may take long if the catalog does not answer
		if n.ctx.Err() != nil || leaving {
			return
		}
		n.log.Warn("other metadata services have taken over from this one, which was silent for too long; it joins again", "member", m.id)
		for {
			var err error
			if m, err = n.join(n.ctx); err == nil {
				break
			}
			if n.ctx.Err() != nil {
				return
			}
			n.log.Warn("cannot join the metadata services of the volume", "error", err)
			if retry.Pause(n.ctx, n.cfg.Lease/5) != nil {
				return
			}
		}
		n.mu.Lock()
		n.present = m
		n.mu.Unlock()
	}
}

// member returns the present incarnation, if it is alive.
func (n *Node) member() *member {
	n.mu.Lock()
	m := n.present
	n.mu.Unlock()
	if m == nil || !m.alive() {
		return nil
	}
	return m
}

// awaitMember is member, but waits for it: who is let in as soon as there is one need not come again.
func (n *Node) awaitMember(patience time.Duration) *member {
	for end := time.Now().Add(patience); ; {
		m := n.member()
		if m != nil || time.Now().After(end) || retry.Pause(n.ctx, aliveLook) != nil {
			return m
		}
	}
}

// away tells clients why this process is no member.
func (n *Node) away() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.leaving || n.conns == nil {
		return "it is going down"
	}
	return "it does not reach the volume's catalog (etcd without a quorum, or a database that is down), and goes on when the catalog answers; its log says more"
}

// Leave gives all shards to other members, as far as ctx allows, lets the calls of the rest end, and ends the membership, so that nobody needs to wait for its lease. If
// ctx ends before the catalog answers, others find out by themselves.
func (n *Node) Leave(ctx context.Context) error {
	n.mu.Lock()
	n.leaving = true
	m := n.present
	n.mu.Unlock()
	var err error
	if m != nil {
		err = m.leave(ctx)
	}
	n.Close()
	return err
}

// Close ends everything at once, and tells nobody. It waits for services to end.
func (n *Node) Close() {
	n.stop()
	n.mu.Lock()
	m := n.present
	conns := n.conns
	n.conns = nil
	for l := range n.listeners {
		l.Close()
	}
	n.mu.Unlock()
	for nc := range conns {
		nc.Close()
	}
	if m != nil {
		m.fence.fall()
	}
	n.tasks.Wait()
}

// Serve lets clients and other members in through a listener until the Node ends, or the listener fails. It closes the listener.
func (n *Node) Serve(l net.Listener) error {
	defer l.Close()
	n.mu.Lock()
	if n.conns == nil {
		n.mu.Unlock()
		return net.ErrClosed
	}
	n.listeners[l] = struct{}{}
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		delete(n.listeners, l)
		n.mu.Unlock()
	}()
	in := descriptors.Listener(l)
	for {
		nc, err := in.Accept()
		if err != nil {
			if n.ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("metadata service: %w", err)
		}
		n.mu.Lock()
		if n.conns == nil {
			nc.Close()
		} else {
			n.conns[nc] = struct{}{}
			n.tasks.Go(func() { // owns the connection; ends with it
				n.serve(nc)
				n.mu.Lock()
				delete(n.conns, nc)
				n.mu.Unlock()
			})
		}
		n.mu.Unlock()
	}
}

// serve finds out who has connected.
func (n *Node) serve(nc net.Conn) {
	in, err := n.cfg.Door.Admit(nc)
	if err == nil {
		defer in.Leave()
		nc = in.Conn
	}
	if err == nil && peerrpc.IsHello(in.Frame) {
		if err = n.cfg.Door.RefusesPeer(in); err == nil {
			in.Use(func() bool { return true })
			err = n.servePeer(nc, in.R, in.Frame)
		}
		nc.Close()
		if err != nil && n.ctx.Err() == nil {
			n.cfg.Door.Complain(n.log, nc.RemoteAddr(), "connection of another metadata service ended", "error", err)
		}
		return
	}
	var hello *metarpc.Hello
	if err == nil {
		if hello, err = metarpc.ParseHello(in.Frame, n.cfg.Speaks); err != nil {
			err = fmt.Errorf("connection of something else than a weft client: %w", err)
		}
	}
	if err != nil {
		if err != io.EOF && n.ctx.Err() == nil { // who only looks whether there is somebody is not worth a line
			n.cfg.Door.Complain(n.log, nc.RemoteAddr(), "client refused", "error", err)
		}
		nc.Close()
		return
	}
	w := &metarpc.Welcome{Magic: metarpc.Magic, Volume: n.volume}
	if m := n.awaitMember(awayTimeout); m != nil {
		if svc := m.awaitService(hello.Shard, startTimeout); svc != nil {
			svc.ServeConn(in, hello)
			return
		}
		w.Status, w.Ring, w.Message = metarpc.StatusMoved, m.ring(), fmt.Sprintf("this service does not have shard %d", hello.Shard)
	} else { // nothing else that it could say would be sure to be true
		w.Status, w.Message = metarpc.StatusShutdown, n.away()
	}
	if err := n.cfg.Door.Refuses(in); err != nil {
		w.Status, w.Ring, w.Message = metarpc.Status(syscall.EACCES), metarpc.Ring{}, err.Error()
	}
	var ok bool
	if w.Version, ok = n.cfg.Speaks.Choose(hello.Versions()); !ok {
		w.Version, w.Status, w.Message = n.cfg.Speaks.Highest, metarpc.StatusVersion, metarpc.Mismatch(hello.Versions(), n.cfg.Speaks)
	}
	nc.SetWriteDeadline(time.Now().Add(helloTimeout))
	if frame, err := metarpc.AppendWelcome(nil, w); err != nil {
		n.log.Error("welcome not sent", "error", err)
	} else if _, err := nc.Write(frame); err != nil {
		n.log.Debug("welcome not sent", "address", nc.RemoteAddr().String(), "error", err)
	}
	nc.Close()
}
