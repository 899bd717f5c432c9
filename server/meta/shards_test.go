package meta

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta/locktable"
	"github.com/weftfs/weft/server/schema"
)

// cluster is a volume of several shards, each with a service that can be killed and started again.
type cluster struct {
	t      testing.TB
	engine catalog.Engine
	hosts  []*host
	epochs []uint64 // of the shard rows
	dirs   int      // that dirAt has made

	mu      sync.Mutex
	rng     *rand.Rand // nil: messages between services are as good as calls
	engines []*mortal  // of the services that are
	late    sync.WaitGroup
	onHold  func(from, to int, h *Hold) error   // nil: nothing; before a Hold is delivered
	settle  func(from, to int, s *Settle) error // the same for a Settle
	onWaits func(context.Context) error         // the same before somebody asks for waits
}

// mortal is the catalog as a service sees it that can lose it.
type mortal struct {
	catalog.Engine
	dead   atomic.Bool
	svc    atomic.Pointer[Service]
	mu     sync.Mutex
	before func(*catalog.Batch) error // is shown commits; nil: it is not
	after  func(*catalog.Batch, error) error
}

func (e *mortal) Commit(ctx context.Context, b *catalog.Batch) error {
	e.mu.Lock()
	before, after := e.before, e.after
	e.mu.Unlock()
	if before != nil {
		if err := before(b); err != nil {
			return err
		}
	}
	if e.dead.Load() {
		return catalog.ErrClosed
	}
	err := e.Engine.Commit(ctx, b)
	if after != nil {
		err = after(b, err)
	}
	if e.dead.Load() {
		return catalog.ErrClosed // it does not learn what it has done
	}
	return err
}

// startCluster starts the services of an empty volume. With a rng the messages between them fare badly.
func startCluster(t testing.TB, shards int, rng *rand.Rand) *cluster {
	t.Helper()
	c := &cluster{t: t, engine: memorytest.New(), epochs: make([]uint64, shards), engines: make([]*mortal, shards), rng: rng}
	t.Cleanup(c.late.Wait)
	files := newFakeFiles(c.engine)
	for k := range shards {
		h := newHost(t, c.engine)
		h.files = files
		h.config = func(cfg *Config) {
			e := &mortal{Engine: c.engine}
			c.mu.Lock()
			c.epochs[k]++
			epoch := c.epochs[k]
			c.engines[k] = e
			c.mu.Unlock()
			cfg.Engine, cfg.Shards, cfg.Shard, cfg.Peers = e, shards, k, &messenger{c, k, e}
			cfg.Alive = func() bool { return !e.dead.Load() }
			cfg.Row = schema.Encode(&schema.Shard{Member: [16]byte{byte(k + 1)}, Epoch: epoch})
			put(t, h, schema.ShardKey(k), cfg.Row)
		}
		h.started = func(svc *Service) { c.engineOf(k).svc.Store(svc) }
		h.others = c
		c.hosts = append(c.hosts, h)
		c.start(k)
	}
	return c
}

func (c *cluster) start(k int) {
	c.t.Helper()
	c.hosts[k].start()
}

// kill ends the service of a shard as a crash does: at once, whatever it is doing.
func (c *cluster) kill(k int) {
	c.engineOf(k).dead.Store(true)
	c.hosts[k].kill(c.hosts[k].svc)
}

func (c *cluster) engineOf(k int) *mortal {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.engines[k]
}

func (c *cluster) svc(k int) *Service { return c.engineOf(k).svc.Load() }

// onCommit shows the commits of the service of a shard to a function, which may keep them waiting or refuse them.
func (c *cluster) onCommit(k int, before func(*catalog.Batch) error) {
	e := c.engineOf(k)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.before = before
}

// messenger carries messages from a service to the others.
type messenger struct {
	c    *cluster
	from int
	by   *mortal
}

var errLost = errors.New("message lost")

// carry has f called at the service of a shard: with bad luck not at all, without an answer, late, or once more later.
func (m *messenger) carry(ctx context.Context, shard int, f func(context.Context, *Service) error) error {
	deliver := func(ctx context.Context) error {
		svc := m.c.svc(shard)
		if svc == nil {
			return errLost
		}
		return f(ctx, svc)
	}
	if m.by.dead.Load() {
		return errLost
	}
	luck, delay := 10, time.Duration(0)
	m.c.mu.Lock()
	if m.c.rng != nil {
		luck, delay = m.c.rng.IntN(10), time.Duration(m.c.rng.IntN(3000))*time.Microsecond
	}
	m.c.mu.Unlock()
	switch luck {
	case 0:
		return errLost
	case 1:
		deliver(ctx)
		return errLost
	case 2:
		if err := retry.Pause(ctx, delay); err != nil {
			return err
		}
	case 3, 4:
		m.c.late.Go(func() { // ends with the delay and the answer, which the end of the other service is as well
			time.Sleep(10 * delay)
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			deliver(ctx)
		})
		if luck == 3 {
			return errLost
		}
	}
	return deliver(ctx)
}

func (m *messenger) Hold(ctx context.Context, shard int, h *Hold) (*Held, error) {
	m.c.mu.Lock()
	hook := m.c.onHold
	m.c.mu.Unlock()
	if hook != nil {
		if err := hook(m.from, shard, h); err != nil {
			return nil, err
		}
	}
	answers := make(chan *Held, 2) // one may come late
	err := m.carry(ctx, shard, func(ctx context.Context, s *Service) error {
		held, err := s.Hold(ctx, h)
		if err == nil {
			answers <- held
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-answers, nil
}

func (m *messenger) Settle(ctx context.Context, shard int, st *Settle) error {
	m.c.mu.Lock()
	hook := m.c.settle
	m.c.mu.Unlock()
	if hook != nil {
		if err := hook(m.from, shard, st); err != nil {
			return err
		}
	}
	return m.carry(ctx, shard, func(ctx context.Context, s *Service) error { return s.Settle(ctx, st) })
}

func (m *messenger) LockWaits(ctx context.Context, shard int, after locktable.Wait) ([]locktable.Wait, error) {
	m.c.mu.Lock()
	hook := m.c.onWaits
	m.c.mu.Unlock()
	if hook != nil {
		if err := hook(ctx); err != nil {
			return nil, err
		}
	}
	svc := m.c.svc(shard)
	if svc == nil {
		return nil, errLost
	}
	return svc.LockWaits(after), nil
}

// client is a client with a session at each shard, whose user may do everything. Its calls go where they belong.
func (c *cluster) client() *client {
	c.t.Helper()
	var parts []*client
	for k, h := range c.hosts {
		p := h.newClient()
		p.cred = metarpc.Cred{}
		p.hello.Shard = k
		p.resend = map[[2]uint64][]byte{}
		if k > 0 {
			p.hello.Client = parts[0].hello.Client
		}
		parts = append(parts, p)
	}
	for _, p := range parts {
		p.parts = parts
		p.connect()
	}
	return parts[0]
}

// part is the client for a call.
func (c *client) part(args any) *client {
	if len(c.parts) == 0 {
		return c
	}
	id, several := subjects(args)
	if len(several) > 0 {
		id = several[0]
	}
	if id == 0 {
		return c
	}
	return c.parts[layout.ShardOf(id, len(c.parts))]
}

// comeBack has clients go on with the service of a shard that was started anew, as if they had nothing to reclaim but these files.
func (c *cluster) comeBack(k int, clients []*client, files ...layout.FileID) {
	c.t.Helper()
	for _, cl := range clients {
		p := cl.parts[k]
		p.connect()
		for _, id := range files {
			must[metarpc.AttrResult](p, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true})
		}
		must[metarpc.Empty](p, metarpc.OpReclaimComplete, &metarpc.Empty{})
	}
}

// dirAt makes a directory of a shard below the root.
func (c *cluster) dirAt(cl *client, shard int, name string) layout.FileID {
	c.t.Helper()
	return c.dirIn(layout.RootID, cl, shard, name)
}

// dirIn makes a directory of a shard in another.
func (c *cluster) dirIn(parent layout.FileID, cl *client, shard int, name string) layout.FileID {
	c.t.Helper()
	for {
		c.dirs++
		id := cl.mkdir(parent, fmt.Sprint(name, c.dirs))
		if layout.ShardOf(id, len(c.hosts)) == shard {
			return id
		}
	}
}

// check looks at what is left when nothing is going on: nothing of one change, and nothing of inodes of other shards.
func (c *cluster) check() {
	c.t.Helper()
	for k := range c.hosts {
		svc := c.svc(k)
		waittest.Until(c.t, fmt.Sprintf("shard %d: all is settled", k), func() bool {
			svc.mu.Lock()
			defer svc.mu.Unlock()
			n := 0
			for _, a := range svc.askers {
				n += len(a.holds)
			}
			for i := range svc.peers {
				n += len(svc.peers[i].live) + len(svc.peers[i].queue)
			}
			for _, l := range svc.leases {
				n += l.changing
			}
			for _, f := range svc.files {
				if f.removing || f.orphan && !f.opened() {
					n++
				}
			}
			return n == 0
		})
		svc.mu.Lock()
		for id := range svc.leases {
			if !svc.mine(id) {
				c.t.Errorf("shard %d knows leases on inode %d", k, id)
			}
		}
		for id := range svc.files {
			if !svc.mine(id) {
				c.t.Errorf("shard %d has a record of file %d", k, id)
			}
		}
		svc.mu.Unlock()
		svc.removed.mu.Lock()
		for id := range svc.removed.rows {
			if !svc.mine(id) {
				c.t.Errorf("shard %d remembers inode %d", k, id)
			}
		}
		svc.removed.mu.Unlock()
	}
	checkCatalog(c.t, c.engine)
}

// TestSubjects looks whether the shard of each call is known that is about an inode.
func TestSubjects(t *testing.T) {
	id := layout.FileID(77)
	for op := metarpc.Op(1); op.Valid(); op++ {
		args := op.NewArgs()
		v := reflect.ValueOf(args).Elem()
		about := false
		for i := range v.NumField() {
			if !v.Type().Field(i).IsExported() {
				continue
			}
			switch f := v.Field(i).Addr().Interface().(type) {
			case *layout.FileID:
				*f, about = id, true
			case *[]layout.FileID:
				*f, about = []layout.FileID{id}, true
			case *[]metarpc.SizeReport:
				*f, about = []metarpc.SizeReport{{ID: id}}, true
			}
		}
		one, several := subjects(args)
		if got := one == id || slices.Contains(several, id); got != about {
			t.Errorf("%v is about an inode: %t, known %t", op, about, got)
		}
	}
}

// TestModelShards is TestModel on a volume of three shards, of which one is restarted from time to time.
func TestModelShards(t *testing.T) {
	seed := rand.Uint64()
	steps := 3000
	if testing.Short() {
		steps = 800
	}
	for _, unlucky := range []bool{false, true} {
		t.Run(fmt.Sprintf("messages lost %t", unlucky), func(t *testing.T) {
			t.Logf("seed %d", seed)
			var luck *rand.Rand
			if unlucky {
				luck = rand.New(rand.NewPCG(seed, 2))
			}
			c := startCluster(t, 3, luck)
			m := &modelRun{t: t, h: c.hosts[0], c: c.client(), model: newModel(), rng: rand.New(rand.NewPCG(seed, 1))}
			m.shards = 3
			for i := range steps {
				m.step()
				if t.Failed() {
					t.Fatalf("at step %d", i)
				}
				if i%(steps/12) == steps/24 {
					m.restartShard(c)
				}
			}
			m.compare(m.root)
			for _, n := range m.all {
				m.stat(n)
			}
			c.check()
		})
	}
}

// restartShard kills the service of one shard, comes back and reclaims.
func (m *modelRun) restartShard(c *cluster) {
	k := m.rng.IntN(m.shards)
	c.kill(k)
	c.start(k)
	m.c.parts[k].connect()
	for _, n := range m.all {
		if m.shard(n) != k {
			continue
		}
		n.forgotten = n.forgotten || !n.exists()
		if n.open {
			must[metarpc.AttrResult](m.c, metarpc.OpOpen, &metarpc.OpenArgs{ID: n.id})
		}
	}
	c.svc(k).endGrace()
}
