package meta

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/meta/locktable"
	"github.com/weftfs/weft/server/meta/turnback"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// Service serves a shard of a volume, which for most volumes is all of it. There may be one for a shard at a time.
type Service struct {
	cfg      Config
	engine   *patient
	log      *slog.Logger
	volume   schema.Volume
	shards   int    // of the volume
	epoch    uint64 // of Config.Row
	instance [16]byte
	started  time.Time
	numbers  *numbers
	groups   *admit.Groups
	moving   chan struct{} // has one token, for whoever moves a directory to another parent
	ctx      context.Context
	stop     context.CancelFunc
	tasks    sync.WaitGroup // every goroutine of the service
	draining atomic.Bool    // no new call is executed
	hellos   sync.WaitGroup // those being answered; none is added once draining is set
	readers  chan *reader   // to goroutines that have nothing to read
	idle     atomic.Int32   // how many those are
	unheard  atomic.Int64   // nanoseconds since started, when it was last found that clients cannot be heard

	counts   counts
	locks    *locktable.Table
	caches   cacheTable
	resilver resilver
	mayMove  chan struct{} // has room for movesAtOnce, for those who move files
	removed  removedInodes
	usage    *usage.Tree
	quotas   *usage.Quotas
	rules    rules
	dirs     dirTable

	mu           sync.Mutex
	sessions     map[metarpc.SessionID]*session // those that have not ended
	fading       map[*session]struct{}          // those that have, but whose clients may not know it yet
	files        map[layout.FileID]*file
	moves        map[layout.FileID]*move // those that have begun, and those whose failure nobody has heard of yet
	leases       map[layout.FileID]*leased
	contended    map[layout.FileID]contention
	waits        turnback.Waits     // has a lock of its own
	devicesEpoch uint64             // of the newest states of devices that clients are told
	lastPlace    uint64             // the number of the last place of an append; those of an earlier instance are smaller
	lastChange   uint64             // the number of the last one that another service holds something for
	peers        []peer             // by shard
	askers       map[askerID]*asker // who asks for holds
	grace        bool
	graceOver    chan struct{} // closed at the end of the grace period
	graceEnd     time.Time
	quiet        chan struct{}      // see resume; set before anybody else runs
	conns        map[*conn]struct{} // nil once stopped
	listeners    map[net.Listener]struct{}
}

// New makes the service of the volume in the catalog, which it makes if the catalog is empty, and takes up what an
// earlier instance left. Serve lets clients in. The caller calls Shutdown in the end, and closes catalog and data files
// after that.
func New(ctx context.Context, cfg Config) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	volume, err := OpenVolume(ctx, cfg.Engine, cfg.Policy, cfg.Shards)
	if err != nil {
		return nil, err
	}
	if cfg.Shard >= volume.ShardCount() {
		return nil, fmt.Errorf("metadata service: shard %d of a volume that has %d", cfg.Shard, volume.ShardCount())
	}
	if volume.ShardCount() > 1 && (cfg.Peers == nil || cfg.Row == nil) {
		return nil, fmt.Errorf("metadata service: the volume has %d shards: it can be served only together with the services of the others", volume.ShardCount())
	}
	var row schema.Shard
	if cfg.Row != nil {
		if err := schema.DecodeRow(schema.ShardKey(cfg.Shard), cfg.Row, &row); err != nil {
			return nil, fmt.Errorf("metadata service: %w", err)
		}
	}
	s := &Service{
		epoch:     row.Epoch,
		shards:    volume.ShardCount(),
		cfg:       cfg,
		engine:    &patient{Engine: cfg.Engine, log: cfg.Log},
		log:       cfg.Log,
		volume:    volume,
		started:   time.Now(),
		numbers:   newNumbers(cfg.Engine, volume.ShardCount()),
		groups:    admit.NewGroups(),
		moving:    make(chan struct{}, 1),
		sessions:  map[metarpc.SessionID]*session{},
		fading:    map[*session]struct{}{},
		files:     map[layout.FileID]*file{},
		moves:     map[layout.FileID]*move{},
		mayMove:   make(chan struct{}, movesAtOnce),
		leases:    map[layout.FileID]*leased{},
		contended: map[layout.FileID]contention{},
		caches:    newCacheTable(),
		graceOver: make(chan struct{}),
		readers:   make(chan *reader),
		conns:     map[*conn]struct{}{},
		listeners: map[net.Listener]struct{}{},
		peers:     make([]peer, volume.ShardCount()),
		askers:    map[askerID]*asker{},
		dirs:      dirTable{rows: map[layout.FileID][]byte{}},
		lastPlace: uint64(now()),
		locks:     locktable.New(),
	}
	for i := range s.peers {
		s.peers[i].live = map[uint64]struct{}{}
	}
	s.usage = usage.NewTree(s.engine, cfg.Shard, s.shards, s.log)
	s.quotas = s.usage.Quotas(s.writtenEnds, func() { s.tasks.Go(s.recallUnlimited) }) // ends when all have answered, or with s.ctx
	s.resilver.kick = make(chan struct{}, 1)
	s.resilver.fillers = map[layout.FileID]*filler{}
	rand.Read(s.instance[:])
	s.moving <- struct{}{}
	s.graceEnd = s.started.Add(cfg.Lease)
	s.ctx, s.stop = context.WithCancel(context.Background())
	if err := s.load(ctx); err != nil {
		s.stop()
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	s.resume()
	s.tasks.Go(s.watchLeases)
	s.tasks.Go(s.watchRules)
	s.tasks.Go(s.watchDevices)
	s.tasks.Go(s.resilverLoop)
	s.tasks.Go(s.waitingLoop)
	if s.shards > 1 {
		s.tasks.Go(s.watchHolds)
		s.tasks.Go(s.watchDeadlocks)
	}
	s.tasks.Go(func() { s.usage.Run(s.ctx) })
	s.usage.Soon() // what an earlier instance left
	return s, nil
}

// Serve lets clients in through a listener until Shutdown, or until the listener fails. It closes the listener.
func (s *Service) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if s.conns == nil || s.draining.Load() {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
	}()
	s.log.Info("metadata service listens", "address", l.Addr().String())
	in := descriptors.Listener(l)
	for {
		nc, err := in.Accept()
		if err != nil {
			if s.draining.Load() {
				return nil
			}
			return fmt.Errorf("metadata service: %w", err)
		}
		s.mu.Lock()
		if s.conns == nil {
			nc.Close()
		} else {
			s.tasks.Go(func() { s.serve(nc) }) // owns the connection; ends with it
		}
		s.mu.Unlock()
	}
}

// Shutdown lets the calls being executed end, as long as ctx allows, tells the rest StatusShutdown, and stops all that
// the service does. What is then not done is done by the next instance. It returns ctx's error if it did not wait for
// all calls.
func (s *Service) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.draining.Store(true)
	for l := range s.listeners {
		l.Close()
	}
	s.mu.Unlock()
	ended := make(chan struct{})
	go func() { // ends when all calls have, at the latest when s.stop makes them
		defer close(ended)
		// The next instance waits in its grace period for every session. Its client has to know of it.
		s.hellos.Wait()
		s.mu.Lock()
		sessions := slices.Collect(maps.Values(s.sessions))
		s.mu.Unlock()
		for _, sess := range sessions {
			sess.mu.Lock()
			//lint:ignore SA2001 a call that found the service not draining under this lock has been counted
			sess.mu.Unlock()
			sess.running.Wait()
		}
	}()
	var err error
	select {
	case <-ended:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.stop()
	s.mu.Lock()
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	for c := range conns {
		c.close()
	}
	s.tasks.Wait()
	<-ended
	s.log.Info("metadata service stopped")
	return err
}
