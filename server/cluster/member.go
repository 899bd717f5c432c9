package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// startsAtOnce is how many services a member starts at a time.
const startsAtOnce = 4

// member is one incarnation of the process.
type member struct {
	n     *Node
	id    memberID
	log   *slog.Logger
	fence *fence
	host  Host
	ctx   context.Context // ends with the membership
	stop  context.CancelFunc
	tasks sync.WaitGroup
	beat  atomic.Int64 // when the last beat that succeeded began, by Config.Clock

	starts chan struct{} // has room for startsAtOnce
	kick   chan struct{} // has a token when rows are to be looked at

	mu      sync.Mutex
	view    *view
	looked  chan struct{} // closed, and replaced, when view is, and when a service has started, or stopped
	asked   uint64        // looks that were asked for
	done    uint64        // those that a look has begun after
	served  map[int]*served
	watch   watch
	given   map[int]uint64 // the epochs from which on shards were somebody else's, of those given away
	used    map[int]uint64 // the epochs with which services were made last
	peers   map[memberID]*peer
	giving  bool // a shard is being given away
	leaving bool
}

// served is a shard that is this member's.
type served struct {
	svc   Service       // nil while it starts, or does not
	gone  bool          // it is being given away
	next  time.Duration // if it did not start: when to try again
	tries int
}

// join makes a new incarnation.
func (n *Node) join(ctx context.Context) (*member, error) {
	m := &member{
		n: n, starts: make(chan struct{}, startsAtOnce), kick: make(chan struct{}, 1), looked: make(chan struct{}),
		served: map[int]*served{}, watch: newWatch(n.cfg.Lease), given: map[int]uint64{}, used: map[int]uint64{}, peers: map[memberID]*peer{},
	}
	row := schema.Member{Address: n.cfg.Address, Host: n.cfg.Host, Program: n.cfg.Program, Started: time.Now().UnixNano(), Lease: int64(n.cfg.Lease),
		Lowest: n.cfg.Speaks.Lowest, Highest: n.cfg.Speaks.Highest, Format: schema.FormatNewest}
	rand.Read(row.Token[:])
	var began time.Duration
	var maintainer *memberRow // who maintained the volume, and is dead
	for {
		// What an attempt whose outcome is not known has put may come late, and must not bring back a member that was buried: so each has an id of its own.
		rand.Read(m.id[:])
		raw, _, err := n.readVolume(ctx)
		if err != nil {
			return nil, err
		}
		var b catalog.Batch
		b.GuardEqual(schema.KeyVolume, raw)
		b.Put(schema.MemberKey(m.id), schema.Encode(&row))
		b.Put(schema.BeatKey(m.id), catalog.EncodeCounters(1))
		b.Add(schema.KeyRing, 0, 1)
		if maintainer == nil {
			b.GuardAbsent(schema.KeyMaintenance)
		} else {
			b.GuardEqual(schema.KeyMaintenance, maintainer.raw)
			maintainer.silent(&b)
			b.Delete(schema.KeyMaintenance)
			b.Delete(schema.BeatKey(maintainer.id))
		}
		began = n.cfg.Clock()
		if err = n.cfg.Engine.Commit(ctx, &b); err == nil {
			break
		}
		guard := (*catalog.GuardError)(nil)
		switch {
		case errors.As(err, &guard):
			if maintainer, err = n.awaitMaintenance(ctx); err != nil {
				return nil, err
			}
		case !errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown):
			return nil, err
		}
		if err := retry.Pause(ctx, n.cfg.Lease/20); err != nil {
			return nil, err
		}
	}
	m.log = n.log.With("member", m.id)
	m.ctx, m.stop = context.WithCancel(n.ctx)
	m.fence = &fence{Engine: n.cfg.Engine, guard: catalog.Guard{Kind: catalog.Present, Key: schema.MemberKey(m.id)}, fell: m.stop}
	m.beat.Store(int64(began))
	v, err := readView(ctx, m.fence, n.shards)
	if err == nil {
		m.view = v
		m.host, err = n.cfg.Open(ctx, &Incarnation{
			ID: m.id, Engine: m.fence, Alive: m.alive, Ring: m.ring, Has: m.has, Peers: peers{m}, Members: members{m},
		})
	}
	if err != nil {
		m.resign(ctx)
		m.stop()
		return nil, err
	}
	m.log.Info("this process serves the volume with others", "address", n.cfg.Address, "members", len(v.members), "shards", n.shards)
	return m, nil
}

// alive reports whether nobody can have buried the member yet.
func (m *member) alive() bool {
	silent := m.n.cfg.Clock() - time.Duration(m.beat.Load())
	return !m.fence.down.Load() && silent < m.n.cfg.Lease-m.n.cfg.Lease/5
}

// run does what a member does until it is buried or the Node ends. Then nothing more of it reaches the catalog, and all that has begun is told to end.
func (m *member) run() {
	m.tasks.Go(m.beats)
	m.tasks.Go(m.looks)
	<-m.ctx.Done()
	m.fence.down.Store(true)
}

// end stops what the member has left behind, without letting anything end.
func (m *member) end() {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	m.mu.Lock()
	var ending sync.WaitGroup
	for _, s := range m.served {
		if s.svc != nil {
			ending.Go(func() { s.svc.Shutdown(now) }) // ends with the service
		}
	}
	for _, p := range m.peers {
		p.close(errClosed)
	}
	m.mu.Unlock()
	m.tasks.Wait() // a service that was starting is shut down by whoever started it
	ending.Wait()
	if err := m.host.Close(); err != nil {
		m.log.Warn("close", "error", err)
	}
}

// beats raises the beat row.
func (m *member) beats() {
	lease := m.n.cfg.Lease
	failing := false
	for {
		var b catalog.Batch
		b.Add(schema.BeatKey(m.id), 0, 1)
		began := m.n.cfg.Clock()
		ctx, cancel := context.WithTimeout(m.ctx, lease)
		err := m.fence.Commit(ctx, &b)
		cancel()
		if m.ctx.Err() != nil {
			return
		}
		wait := lease / 5
		if err == nil {
			m.beat.Store(int64(began))
			wait -= m.n.cfg.Clock() - began // one that has taken long says little of now
			if failing {
				m.log.Info("the catalog can be reached again")
			}
			failing = false
		} else {
			wait = lease / 20
			if !failing {
				m.log.Warn("the catalog cannot be reached; if that lasts other metadata services take over", "lease", lease, "error", err)
			}
			failing = true
		}
		if retry.Pause(m.ctx, wait) != nil {
			return
		}
	}
}

// looks reads the rows and does what follows.
func (m *member) looks() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-m.kick:
		case <-t.C:
		}
		again, err := m.look()
		if err != nil && m.ctx.Err() == nil {
			m.log.Warn("members and shards cannot be read", "error", err)
		}
		if again {
			m.lookSoon()
		}
		t.Reset(m.n.cfg.Lease / 5)
	}
}

// lookSoon has the rows looked at once more, soon.
func (m *member) lookSoon() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// doubt has the rows looked at because somebody is not where the last look has shown him, unless that has only just been. Whoever calls him will call again.
func (m *member) doubt() {
	m.mu.Lock()
	old := m.n.cfg.Clock()-m.watch.last > m.n.cfg.Lease/50
	m.mu.Unlock()
	if old {
		m.lookSoon()
	}
}

// look is one look. again asks for another one at once.
func (m *member) look() (again bool, err error) {
	ctx, cancel := context.WithTimeout(m.ctx, m.n.cfg.Lease)
	defer cancel()
	m.mu.Lock()
	asked := m.asked
	m.mu.Unlock()
	began := m.n.cfg.Clock()
	v, err := readView(ctx, m.fence, m.n.shards)
	if err != nil {
		return false, err
	}
	over := m.n.cfg.Clock()
	m.mu.Lock()
	if v.member(m.id) == nil {
		gone := !m.leaving // or it has been said to all already
		m.mu.Unlock()
		if gone {
			m.fence.fall()
		}
		return false, nil
	}
	_, dead := m.watch.look(v.members, m.id, began, over)
	for id, p := range m.peers {
		if v.member(id) == nil {
			p.close(errClosed)
			delete(m.peers, id)
		}
	}
	m.view = v
	m.settle(v)
	m.done = asked
	m.wake()
	m.mu.Unlock()
	for _, other := range dead {
		buried, err := m.bury(ctx, other)
		if err != nil {
			return false, err
		}
		again = again || buried
	}
	if again {
		return true, nil
	}
	plan := v.plan()
	if again, err = m.take(ctx, v, plan); again || err != nil {
		return again, err
	}
	m.give(v, plan)
	return false, nil
}

// wake wakes who waits for another view or service; m.mu is held.
func (m *member) wake() {
	close(m.looked)
	m.looked = make(chan struct{})
}

// bury deletes the rows of a dead member, unless somebody else has, or it lives after all.
func (m *member) bury(ctx context.Context, other *memberRow) (buried bool, err error) {
	var b catalog.Batch
	other.bury(&b)
	b.Add(schema.KeyRing, 0, 1)
	err = m.fence.Commit(ctx, &b)
	if lost(err) {
		return true, nil // the next look tells
	}
	if err != nil {
		return false, err
	}
	m.log.Warn("another metadata service was silent for too long; its shards are taken", "silent", other.id, "address", other.Address)
	return true, nil
}

// lost reports whether a commit lost a race, or may have, so that the rows have to be read again.
func lost(err error) bool {
	guard := (*catalog.GuardError)(nil)
	return errors.As(err, &guard) || errors.Is(err, catalog.ErrConflict) || errors.Is(err, catalog.ErrUnknown)
}

// mine reports whether a view says that a shard is this member's; m.mu is held. A view may be older than what the member itself has committed.
func (m *member) mine(v *view, shard int) bool {
	row := &v.shards[shard]
	return row.owner == m.id && row.epoch > m.given[shard] && row.epoch >= m.used[shard]
}

// settle starts the services that a view says are to run; m.mu is held.
func (m *member) settle(v *view) {
	now := m.n.cfg.Clock()
	for shard := range v.shards {
		s := m.served[shard]
		switch {
		case !m.mine(v, shard) || m.leaving:
		case s == nil:
			s = new(served)
			m.served[shard] = s
			m.tasks.Go(func() { m.start(v, shard, s) }) // ends when the service has started, or does not
		case s.svc == nil && !s.gone && s.next > 0 && now >= s.next:
			s.next = 0
			m.tasks.Go(func() { m.start(v, shard, s) }) // ends as above
		}
	}
}

// start starts a service.
func (m *member) start(v *view, shard int, s *served) {
	select {
	case m.starts <- struct{}{}:
	case <-m.ctx.Done():
		return
	}
	began := time.Now()
	svc, err := m.make(v, shard)
	<-m.starts
	m.mu.Lock()
	if err == nil && m.ctx.Err() == nil {
		s.svc, s.tries = svc, 0
		m.wake()
		m.mu.Unlock()
		m.log.Info("shard is served here", "shard", shard, "after", time.Since(began).Round(time.Millisecond))
		return
	}
	s.tries++
	s.next = m.n.cfg.Clock() + min(m.n.cfg.Lease/5<<min(s.tries, 10), time.Minute)
	m.wake()
	m.mu.Unlock()
	if err == nil {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		svc.Shutdown(now)
	} else if m.ctx.Err() == nil {
		m.log.Error("shard cannot be served; trying again", "shard", shard, "error", err)
	}
}

// make makes a service with a row that none was made with before: others tell it by that from those before it.
func (m *member) make(v *view, shard int) (Service, error) {
	row, epoch := v.shards[shard].raw, v.shards[shard].epoch
	m.mu.Lock()
	used := m.used[shard] == epoch
	m.mu.Unlock()
	if used {
		var b catalog.Batch
		epoch = v.shards[shard].change(&b, m.id)
		b.Add(schema.KeyRing, 0, 1)
		done, err := m.insist(&b, shard, epoch, m.id)
		if err != nil || !done {
			return nil, errors.Join(err, errors.New("its row cannot be changed"))
		}
		row = b.Puts[0].Value
	}
	m.mu.Lock()
	m.used[shard] = epoch
	m.mu.Unlock()
	guard := catalog.Guard{Kind: catalog.Equal, Key: schema.ShardKey(shard), Value: row}
	return m.host.Service(m.ctx, shard, row, &fence{Engine: m.n.cfg.Engine, guard: guard, parent: m.fence, fell: m.lookSoon})
}

// takesAtOnce is how many shard rows are changed in one batch.
const takesAtOnce = 16

// take takes the shards without an owner that are to be this member's. again says that the rows are others now.
func (m *member) take(ctx context.Context, v *view, plan []memberID) (again bool, err error) {
	var shards []int
	for shard := range v.shards {
		if plan[shard] == m.id && v.member(v.shards[shard].owner) == nil {
			shards = append(shards, shard)
		}
	}
	for some := range slices.Chunk(shards, takesAtOnce) {
		var b catalog.Batch
		for _, shard := range some {
			v.shards[shard].change(&b, m.id)
		}
		b.Add(schema.KeyRing, 0, 1)
		if err := m.fence.Commit(ctx, &b); err != nil && !lost(err) {
			return again, err
		}
		again = true
	}
	return again, nil
}

// give begins to give away a shard that the plan has for somebody else, if none is being given away.
func (m *member) give(v *view, plan []memberID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.giving || m.leaving {
		return
	}
	shard := -1
	now := m.n.cfg.Clock()
	for k, s := range m.served {
		if now-m.watch.seen[plan[k]].at > m.n.cfg.Lease/2 { // it may be dying
			continue
		}
		if to := plan[k]; m.mine(v, k) && to != m.id && to != (memberID{}) && v.member(to) != nil && (s.svc != nil || s.next > 0) && (shard < 0 || k < shard) {
			shard = k
		}
	}
	if shard >= 0 {
		s := m.served[shard]
		s.gone, m.giving = true, true
		m.tasks.Go(func() { m.giveTo(v, shard, s, plan[shard]) }) // ends when the shard is somebody's, or with the membership
	}
}

// giveTo gives a shard to another member.
func (m *member) giveTo(v *view, shard int, s *served, to memberID) {
	log := m.log.With("shard", shard, "to", to)
	if s.svc != nil { // or it did not start
		ctx, cancel := context.WithTimeout(m.ctx, giveTimeout)
		err := s.svc.Shutdown(ctx)
		cancel()
		if err != nil {
			log.Warn("shard is given away before all calls have ended", "error", err)
		}
	}
	var b catalog.Batch
	epoch := v.shards[shard].change(&b, to)
	b.GuardPresent(schema.MemberKey(to))
	b.Add(schema.KeyRing, 0, 1)
	given, err := m.insist(&b, shard, epoch, to)
	m.mu.Lock()
	delete(m.served, shard) // if it is still this one's it is started again
	if given {
		m.given[shard] = epoch
	}
	m.wake()
	m.mu.Unlock()
	if err != nil {
		return // the membership has ended
	}
	m.lookSoon() // others are told of it
	if given {
		log.Info("shard is given to another metadata service", "address", v.member(to).Address)
		ctx, cancel := context.WithTimeout(m.ctx, tellTimeout)
		err := m.tell(ctx, v.member(to))
		cancel()
		if err != nil && m.ctx.Err() == nil {
			log.Warn("the metadata service that was given a shard is not told; it finds out by itself", "error", err)
		}
	}
	m.mu.Lock()
	m.giving = false
	m.wake()
	m.mu.Unlock()
	m.lookSoon()
}

// insist commits a batch that changes a shard's row, until it is known whether it has.
func (m *member) insist(b *catalog.Batch, shard int, epoch uint64, to memberID) (done bool, err error) {
	for {
		err := m.fence.Commit(m.ctx, b)
		if guard := (*catalog.GuardError)(nil); err != nil && !errors.As(err, &guard) {
			if retry.Pause(m.ctx, m.n.cfg.Lease/20) != nil {
				return false, m.ctx.Err()
			}
			if !errors.Is(err, catalog.ErrUnknown) {
				continue
			}
		} else if err == nil {
			return true, nil
		}
		// An attempt whose outcome was not known may be what the guard did not hold for.
		raw, err := m.fence.Get(m.ctx, schema.ShardKey(shard))
		var row schema.Shard
		if err == nil {
			err = schema.Decode(raw, &row)
		}
		switch {
		case m.ctx.Err() != nil:
			return false, m.ctx.Err()
		case err != nil:
			if retry.Pause(m.ctx, m.n.cfg.Lease/20) != nil {
				return false, m.ctx.Err()
			}
		case row.Epoch >= epoch:
			return row.Epoch > epoch || row.Member == to, nil
		default:
			present, err := m.fence.GetMany(m.ctx, [][]byte{schema.MemberKey(to)})
			if err == nil && present[0] == nil {
				return false, nil // who was to get it is no more
			}
		}
	}
}

// service returns the service of a shard, nil if there is none here now.
func (m *member) service(shard int) Service {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.served[shard]; s != nil && !s.gone && s.svc != nil {
		return s.svc
	}
	return nil
}

// awaitService is service, but waits for one that is starting.
func (m *member) awaitService(shard int, patience time.Duration) (svc Service) {
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	m.await(ctx, func() bool {
		svc = nil
		s := m.served[shard]
		if s != nil && !s.gone {
			svc = s.svc
		}
		return svc != nil || !m.starting(shard)
	})
	return svc
}

// starting reports whether the service of a shard is about to run here; m.mu is held.
func (m *member) starting(shard int) bool {
	s := m.served[shard]
	return shard >= 0 && shard < len(m.view.shards) && m.mine(m.view, shard) && (s == nil || s.svc == nil && s.next == 0 && !s.gone)
}

// has reports whether a shard is this member's, whether it is served yet or not.
func (m *member) has(shard int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mine(m.view, shard)
}

// ring is what clients are told.
func (m *member) ring() metarpc.Ring {
	m.mu.Lock()
	v := m.view
	m.mu.Unlock()
	return v.ring()
}

// awaitLook has the rows looked at, and returns when that is done and all services that are to run then have started, or did not.
func (m *member) awaitLook(ctx context.Context) error {
	m.mu.Lock()
	m.asked++
	mine := m.asked
	m.mu.Unlock()
	m.lookSoon()
	return m.await(ctx, func() bool {
		if m.done < mine {
			return false
		}
		for shard := range m.view.shards {
			if m.starting(shard) {
				return false
			}
		}
		return true
	})
}

// await waits until f, which is called with m.mu held, finds what is waited for.
func (m *member) await(ctx context.Context, f func() bool) error {
	for {
		m.mu.Lock()
		ok, changed := f(), m.looked
		m.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-m.ctx.Done():
			return ErrFenced
		}
	}
}

// leave ends the membership, after all shards were given away as far as ctx allows.
func (m *member) leave(ctx context.Context) error {
	defer m.fence.fall()
	err := m.drain(ctx, m.id, false)
	if err == nil {
		m.lookSoon()
		err = m.await(ctx, func() bool {
			if len(m.served) == 0 && !m.giving {
				return true
			}
			return m.view.member(m.id).Draining && !slices.ContainsFunc(m.view.members, func(other memberRow) bool { return !other.Draining })
		})
	}
	if err != nil && m.ctx.Err() == nil {
		m.log.Warn("not all shards could be given to other metadata services", "error", err)
	}
	m.mu.Lock()
	m.leaving = true
	var rest []Service
	for _, s := range m.served {
		if s.svc != nil && !s.gone {
			rest = append(rest, s.svc)
		}
		s.gone = true
	}
	m.mu.Unlock()
	if err == nil && len(rest) == 0 { // all were given away
		retry.Pause(ctx, farewell)
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveTimeout)
	defer cancel()
	var shutdown sync.WaitGroup
	for _, svc := range rest {
		shutdown.Go(func() { svc.Shutdown(ending) }) // ends with the service
	}
	shutdown.Wait()
	if m.ctx.Err() != nil {
		return ErrFenced
	}
	if err := m.resign(ending); err != nil {
		return err
	}
	m.mu.Lock()
	others := m.view.members
	m.mu.Unlock()
	telling, cancel := context.WithTimeout(ending, m.n.cfg.Lease/5) // by then they have looked by themselves
	defer cancel()
	var told sync.WaitGroup
	for i := range others {
		if others[i].id != m.id {
			told.Go(func() { m.tell(telling, &others[i]) }) // ends with telling
		}
	}
	told.Wait()
	return nil
}

// resign deletes the member's rows, so that its shards have no owner. None is served any more.
func (m *member) resign(ctx context.Context) error {
	var b catalog.Batch
	b.Delete(schema.MemberKey(m.id))
	b.Delete(schema.BeatKey(m.id))
	b.Add(schema.KeyRing, 0, 1)
	for {
		err := m.fence.Commit(ctx, &b)
		if errors.Is(err, ErrFenced) || err == nil {
			return nil // perhaps by an attempt whose outcome was not known
		}
		if err := retry.Pause(ctx, m.n.cfg.Lease/20); err != nil {
			return errors.Join(err, errors.New("others wait for the end of this service's member lease"))
		}
	}
}
