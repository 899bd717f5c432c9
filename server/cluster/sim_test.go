package cluster

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/meta/locktable"
	"github.com/weftfs/weft/server/schema"
)

// world is a catalog, a network, and the processes on them. It runs in a synctest bubble.
type world struct {
	t      *testing.T
	engine catalog.Engine
	volume [16]byte
	shards int
	epoch  time.Time
	log    *slog.Logger

	mu        sync.Mutex
	listeners map[string]*pipeListener
	answered  []uint64 // by shard: the greatest epoch of a service that has answered
	answers   int
	procs     []*proc
}

func newWorld(t *testing.T, shards int) *world {
	w := &world{t: t, engine: &judge{Engine: memorytest.New(), t: t, epochs: map[string]int64{}}, shards: shards, epoch: time.Now(), listeners: map[string]*pipeListener{}, answered: make([]uint64, shards)}
	w.log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	volume, err := meta.OpenVolume(t.Context(), w.engine, layout.Policy{}, shards)
	if err != nil {
		t.Fatal(err)
	}
	w.volume = volume.ID
	return w
}

// judge is a catalog that sees whether a service changes it after a later one of its shard has.
type judge struct {
	catalog.Engine
	t      *testing.T
	mu     sync.Mutex
	epochs map[string]int64
}

func (j *judge) Commit(ctx context.Context, b *catalog.Batch) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	err := j.Engine.Commit(ctx, b)
	for _, d := range b.Deltas {
		if err == nil && d.Key[0] == 'z' {
			if d.N < j.epochs[string(d.Key)] {
				j.t.Errorf("shard %d: a service of epoch %d has committed after one of epoch %d", d.Key[1], d.N, j.epochs[string(d.Key)])
			}
			j.epochs[string(d.Key)] = d.N
		}
	}
	return err
}

// pipeListener accepts what is dialled in the world.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case nc := <-l.conns:
		return nc, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

func (w *world) dial(ctx context.Context, address string) (net.Conn, error) {
	w.mu.Lock()
	l := w.listeners[address]
	w.mu.Unlock()
	if l == nil {
		return nil, errors.New("connection refused")
	}
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-l.done:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// proc is a process.
type proc struct {
	w    *world
	addr string
	edit func(*Config) // nil: the configuration is that of all
	node *Node

	mu     sync.Mutex
	paused chan struct{} // nil: it runs; closed when it goes on
	cut    chan struct{} // nil: it reaches the catalog; closed when it does again
}

// gate is where a process that is stopped does not go on.
func (p *proc) gate() {
	for {
		p.mu.Lock()
		paused := p.paused
		p.mu.Unlock()
		if paused == nil {
			return
		}
		<-paused
	}
}

func (p *proc) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused == nil {
		p.paused = make(chan struct{})
	}
}

func (p *proc) resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused != nil {
		close(p.paused)
		p.paused = nil
	}
}

func (p *proc) cutOff() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut == nil {
		p.cut = make(chan struct{})
	}
}

func (p *proc) reconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut != nil {
		close(p.cut)
		p.cut = nil
	}
}

// cable is the catalog as a process reaches it.
type cable struct {
	catalog.Engine
	p *proc
}

// pass waits until the catalog can be reached.
func (c cable) pass(ctx context.Context) error {
	for {
		c.p.gate()
		c.p.mu.Lock()
		cut := c.p.cut
		c.p.mu.Unlock()
		if cut == nil {
			return ctx.Err()
		}
		select {
		case <-cut:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c cable) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := c.pass(ctx); err != nil {
		return err
	}
	err := c.Engine.Commit(ctx, b)
	time.Sleep(time.Millisecond)
	if passed := c.pass(ctx); passed != nil { // it was cut off before the answer came
		return catalog.ErrUnknown
	}
	return err
}

func (c cable) Get(ctx context.Context, key []byte) ([]byte, error) {
	if err := c.pass(ctx); err != nil {
		return nil, err
	}
	defer c.p.gate()
	return c.Engine.Get(ctx, key)
}

func (c cable) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	if err := c.pass(ctx); err != nil {
		return nil, err
	}
	defer c.p.gate()
	return c.Engine.GetMany(ctx, keys)
}

func (c cable) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	if err := c.pass(ctx); err != nil {
		return func(yield func(catalog.Row, error) bool) { yield(catalog.Row{}, err) }
	}
	return c.Engine.Scan(ctx, from, to, opts)
}

func (c cable) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if err := c.pass(ctx); err != nil {
		return nil, err
	}
	defer c.p.gate()
	return c.Engine.Snapshot(ctx)
}

// start starts a process; the address is its own for ever.
func (w *world) start(addr string) *proc {
	p := &proc{w: w, addr: addr}
	w.mu.Lock()
	w.procs = append(w.procs, p)
	w.mu.Unlock()
	p.up()
	return p
}

// up starts the process, after it was killed or has left.
func (p *proc) up() {
	p.w.t.Helper()
	if err := p.tryUp(); err != nil {
		p.w.t.Fatal(err)
	}
}

func (p *proc) tryUp() error {
	w := p.w
	l := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
	w.mu.Lock()
	w.listeners[p.addr] = l
	w.mu.Unlock()
	cfg := Config{
		Engine: cable{w.engine, p}, Address: p.addr, Host: "h", Program: "p", Log: w.log.With("proc", p.addr),
		Open:  func(_ context.Context, in *Incarnation) (Host, error) { return &stubHost{p, in}, nil },
		Dial:  w.dial,
		Clock: func() time.Duration { return time.Since(w.epoch) },
	}
	if p.edit != nil {
		p.edit(&cfg)
	}
	n, err := Start(w.t.Context(), cfg)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.node = n
	p.mu.Unlock()
	go n.Serve(l) // ends with the node
	return nil
}

// kill ends the process without a word.
func (p *proc) kill() {
	p.resume()
	p.reconnect()
	p.node.Close()
}

// leave ends it as SIGTERM does.
func (p *proc) leave(patience time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return p.node.Leave(ctx)
}

// stubHost makes services that do nothing but answer.
type stubHost struct {
	p  *proc
	in *Incarnation
}

func (h *stubHost) Service(ctx context.Context, shard int, row []byte, engine catalog.Engine) (Service, error) {
	var is schema.Shard
	if err := schema.Decode(row, &is); err != nil {
		return nil, err
	}
	if is.Member != h.in.ID {
		return nil, fmt.Errorf("a row of %x", is.Member)
	}
	if err := retry.Pause(ctx, 100*time.Millisecond); err != nil { // it reads the catalog
		return nil, err
	}
	return &stub{host: h, shard: shard, epoch: is.Epoch, engine: engine, ended: make(chan struct{})}, nil
}

func (h *stubHost) Close() error { return nil }

type stub struct {
	host   *stubHost
	shard  int
	epoch  uint64
	engine catalog.Engine
	once   sync.Once
	ended  chan struct{}
}

var errDown = errors.New("no answer")

// ask is a call that changes the catalog, or one that is answered from memory.
func (s *stub) ask(ctx context.Context, change bool) error {
	w, p := s.host.p.w, s.host.p
	w.mu.Lock()
	newest := w.answered[s.shard]
	w.mu.Unlock()
	p.gate()
	if change {
		var b catalog.Batch
		b.Max([]byte{'z', byte(s.shard)}, 0, int64(s.epoch))
		if err := s.engine.Commit(ctx, &b); err != nil {
			return errDown
		}
	} else {
		time.Sleep(time.Millisecond)
		p.gate()
	}
	select {
	case <-s.ended:
		return errDown
	default:
	}
	if !s.host.in.Alive() {
		return errDown
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.epoch < newest {
		w.t.Errorf("shard %d: a service of epoch %d has answered what was asked after one of epoch %d had answered", s.shard, s.epoch, newest)
	}
	w.answered[s.shard] = max(w.answered[s.shard], s.epoch)
	w.answers++
	return nil
}

func (s *stub) ServeConn(in *admit.Incoming, _ *metarpc.Hello) {
	nc := in.Conn
	defer nc.Close()
	frame, err := metarpc.AppendWelcome(nil, &metarpc.Welcome{Magic: metarpc.Magic, Version: metarpc.Version, Ring: s.host.in.Ring(),
		Session: metarpc.SessionID{1}, Volume: s.host.p.w.volume, Instance: [16]byte{byte(s.epoch)}, Slots: metarpc.MinSlots, Lease: int64(time.Second)})
	if err == nil {
		nc.Write(frame)
	}
}

func (s *stub) Shutdown(ctx context.Context) error {
	s.once.Do(func() { close(s.ended) })
	return retry.Pause(context.WithoutCancel(ctx), 5*time.Millisecond)
}

// tooLarge is a change whose Hold has an answer that is larger than a frame.
const tooLarge = 99

func (s *stub) Hold(ctx context.Context, h *meta.Hold) (*meta.Held, error) {
	if err := s.ask(ctx, false); err != nil {
		return nil, err
	}
	if h.Change == tooLarge {
		return &meta.Held{Row: make([]byte, peerrpc.MaxFrame)}, nil
	}
	return &meta.Held{State: meta.HoldPending, Row: fmt.Append(nil, s.shard, h.Shard, h.Row, h.Change, h.Oldest, h.Items)}, nil
}

func (s *stub) Settle(ctx context.Context, st *meta.Settle) error {
	if len(st.Changes) != 1 || !st.Changes[0].Committed || st.Oldest != 3 || string(st.Row) != "row" {
		return fmt.Errorf("settled %+v", st)
	}
	return nil
}

func (s *stub) LockWaits(after locktable.Wait) []locktable.Wait {
	return []locktable.Wait{s.wait(), after}
}

func (s *stub) wait() locktable.Wait {
	return locktable.Wait{Number: uint64(s.shard), Waiter: locktable.Owner{Client: [16]byte{1}, Number: 2}, Holder: locktable.Owner{Number: 3}}
}

// stub returns the service of a shard in the process.
func (p *proc) stub(shard int) *stub {
	m := p.node.member()
	if m == nil {
		return nil
	}
	s, _ := m.service(shard).(*stub)
	return s
}

// owners says who serves each shard: the address, or "" where nobody does.
func (w *world) owners() []string {
	owners := make([]string, w.shards)
	for _, p := range w.procs {
		for shard := range owners {
			if s := p.stub(shard); s != nil && s.host.in.Alive() {
				if owners[shard] != "" {
					w.t.Errorf("shard %d is served by %s and %s", shard, owners[shard], p.addr)
				}
				owners[shard] = p.addr
			}
		}
	}
	return owners
}

// await waits until all shards are served, evenly by processes at these addresses.
func (w *world) await(patience time.Duration, addrs ...string) {
	w.t.Helper()
	var got map[string]int
	ok := waittest.Poll(patience, 10*time.Millisecond, func() bool {
		got = map[string]int{}
		for _, addr := range w.owners() {
			got[addr]++
		}
		even := len(got) == len(addrs)
		for _, addr := range addrs {
			even = even && got[addr] >= w.shards/len(addrs) && got[addr] <= (w.shards+len(addrs)-1)/len(addrs)
		}
		return even
	})
	if !ok {
		w.t.Fatalf("after %v shards are served by %v, want %v", patience, got, addrs)
	}
}

// clients ask random processes for random shards until stop is closed.
func (w *world) clients(stop chan struct{}, seed uint64) *sync.WaitGroup {
	var all sync.WaitGroup
	for i := range 8 {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(r.IntN(20)) * time.Millisecond):
				}
				p := w.procs[r.IntN(len(w.procs))]
				m := p.running()
				if m == nil {
					continue
				}
				if s, _ := m.service(r.IntN(w.shards)).(*stub); s != nil {
					ctx, cancel := context.WithTimeout(context.Background(), 2*DefaultLease)
					s.ask(ctx, r.IntN(2) == 0)
					cancel()
				}
			}
		})
	}
	return &all
}

// running returns the present incarnation, alive or not.
func (p *proc) running() *member {
	p.mu.Lock()
	n := p.node
	p.mu.Unlock()
	if n == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.present
}

// bubble runs f in a synctest bubble, and ends all processes after it.
func bubble(t *testing.T, shards int, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, shards)
		defer func() {
			for _, p := range w.procs {
				p.kill()
			}
			if err := w.engine.Close(); err != nil {
				t.Error(err)
			}
		}()
		f(t, w)
	})
}
