package metaclient

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Volume is a file system as its metadata services have it: a Client, which is a session, for each shard that something was asked of. Its
// methods may be called by many goroutines. Calls about an inode or a directory are its Client's of that name; an inode whose service
// cannot be reached keeps nobody waiting who asks for those of others.
type Volume struct {
	cfg     Config
	log     *slog.Logger
	dial    func(ctx context.Context, addr string) (net.Conn, error)
	places  places
	devices deviceTable
	down    downTable
	report  chan struct{} // has the services told of devices that do not answer

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	clients []atomic.Pointer[Client] // by shard; nil = not needed so far

	mu     sync.Mutex // of who adds to clients
	closed bool
}

// VolumeState is how a Volume is, for people.
type VolumeState struct {
	// State is that of the one session, if there is one. Of several it has the sums; it is connected and alive if all are, and what is said of
	// one connection is of the first that does not work, or else of the first.
	State
	Ring     metarpc.Ring // which service has which shard, as far as is known here
	Sessions []State      // in the order of their shards
}

// Dial connects and begins a session. Every address is tried once, and every service that one of them tells of; the error says for each what
// is wrong. If one of them says that the shards are about to move it is tried again until ctx ends, which bounds Dial only.
func Dial(ctx context.Context, cfg Config) (*Volume, error) {
	d := net.Dialer{
		// The tick of the writer finds a dead peer while there are calls; this one finds it soon, and lets a NAT know that the
		// connection is in use.
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
	return start(ctx, cfg, func(ctx context.Context, addr string) (net.Conn, error) {
		nc, err := descriptors.Retry(func() (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) })
		if err != nil || cfg.TLS == nil {
			return nc, err
		}
		return cfg.TLS.To(ctx, nc, addr, rpctls.Meta)
	})
}

func start(ctx context.Context, cfg Config, dial func(context.Context, string) (net.Conn, error)) (*Volume, error) {
	if len(cfg.Addrs) == 0 {
		return nil, errors.New("no address of a metadata service is given")
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.UsagePeriod == 0 {
		cfg.UsagePeriod = DefaultUsagePeriod
	}
	cfg.Speaks = cfg.Speaks.Or(metarpc.Spoken)
	v := &Volume{cfg: cfg, log: cfg.Log, dial: dial, places: places{given: cfg.Addrs}, report: make(chan struct{}, 1)}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	c, cn, err := v.reach(ctx)
	if err != nil {
		v.cancel()
		return nil, err
	}
	v.clients = make([]atomic.Pointer[Client], len(cn.welcome.Ring.Owners))
	if len(v.clients) > 1 {
		c.log = c.log.With("shard", c.shard)
	}
	c.install(cn)
	v.clients[c.shard].Store(c)
	c.run(cn)
	v.tasks.Go(v.watchIdle)
	if cfg.Usage != nil {
		v.tasks.Go(v.reportUsage) // sends LayoutStats; ends with v.ctx
	}
	if cfg.Down != nil {
		v.tasks.Go(v.reportDown)
	}
	return v, nil
}

// reach connects to the service of the first shard, which has the root, or to any other: one session is enough to begin with.
func (v *Volume) reach(ctx context.Context) (*Client, *conn, error) {
	retry := backoff{most: movedPause}
	c := v.newClient(0)
	for {
		cn, err := c.connect(ctx, metarpc.SessionID{}, true)
		if err == nil {
			return c, cn, nil
		}
		for _, shard := range v.places.first() {
			if shard == 0 {
				continue // it was tried
			}
			other := v.newClient(shard)
			if cn, e := other.connect(ctx, metarpc.SessionID{}, true); e == nil {
				return other, cn, nil
			}
		}
		if len(v.places.known().Owners) == 0 || !retry.wait(ctx) {
			return nil, nil, err
		}
	}
}

// of returns the Client of an inode's shard. If there is none yet, one begins to connect; its calls wait for that.
func (v *Volume) of(id layout.FileID) *Client {
	if c := v.have(id); c != nil {
		return c
	}
	return v.begin(v.shard(id))
}

// have is of, but nil if there is none yet.
func (v *Volume) have(id layout.FileID) *Client { return v.clients[v.shard(id)].Load() }

func (v *Volume) shard(id layout.FileID) int {
	if len(v.clients) == 1 {
		return 0
	}
	return layout.ShardOf(id, len(v.clients))
}

func (v *Volume) begin(shard int) *Client {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c := v.clients[shard].Load(); c != nil {
		return c
	}
	c := v.newClient(shard)
	c.log = c.log.With("shard", shard)
	if v.closed {
		c.cancel() // all its calls fail with ErrClosed
		return c
	}
	v.clients[shard].Store(c)
	c.run(nil)
	return c
}

// all returns the Clients that there are, at least one.
func (v *Volume) all() (list []*Client) {
	for i := range v.clients {
		if c := v.clients[i].Load(); c != nil {
			list = append(list, c)
		}
	}
	return list
}

// any returns a Client for what each service can do, one that is connected if there is one.
func (v *Volume) any() *Client {
	list := v.all()
	for _, c := range list {
		if c.connected() {
			return c
		}
	}
	return list[0]
}

// Shards is how many shards the volume has. It never changes.
func (v *Volume) Shards() int { return len(v.clients) }

// Top is the directory of the volume that the rules for clients confine this one to, as a service has told last. It is
// empty if there is none, or the service is too old to tell.
func (v *Volume) Top() string {
	v.places.mu.Lock()
	defer v.places.mu.Unlock()
	return v.places.top
}

// Close ends all sessions and stops everything. Calls that are not answered end with ErrClosed. ctx bounds the wait for
// the services, not the stopping.
func (v *Volume) Close(ctx context.Context) error {
	v.mu.Lock()
	v.closed = true
	v.mu.Unlock()
	v.cancel()
	v.tasks.Wait()
	list := v.all()
	errs := make([]error, len(list))
	var all sync.WaitGroup
	for i, c := range list {
		all.Go(func() { errs[i] = c.Close(ctx) }) // ends one session
	}
	all.Wait()
	return errors.Join(errs...)
}

// State tells how the volume is.
func (v *Volume) State() VolumeState {
	st := VolumeState{Ring: v.places.known()}
	for _, c := range v.all() {
		st.Sessions = append(st.Sessions, c.State())
	}
	st.State = st.Sessions[0]
	st.Calls, st.Took = map[metarpc.Op]uint64{}, map[metarpc.Op]*hist.Counts{}
	st.Reconnects, st.Busy, st.Layouts, st.Leases, st.Names = 0, 0, 0, 0, 0
	for i := range st.Sessions {
		s := &st.Sessions[i]
		if st.Connected && !s.Connected {
			st.Addr, st.Connected, st.Since, st.Problem = s.Addr, s.Connected, s.Since, s.Problem
		}
		st.Alive = st.Alive && s.Alive
		st.Reconnects += s.Reconnects
		st.Busy += s.Busy
		st.Layouts += s.Layouts
		st.Leases += s.Leases
		st.Names += s.Names
		for op, n := range s.Calls {
			st.Calls[op] += n
		}
		for op, counts := range s.Took {
			if st.Took[op] == nil {
				st.Took[op] = &hist.Counts{}
			}
			st.Took[op].Join(counts)
		}
	}
	return st
}
