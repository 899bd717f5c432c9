package meta

import (
	"bytes"
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/turnback"
	"github.com/weftfs/weft/server/schema"
)

const (
	// askTimeout is how long the service of another shard may take to answer, which it does within holdWait.
	askTimeout = 2 * time.Second
	// askPatience is how long one is asked that does not answer, before the client is told to ask again.
	askPatience = time.Second
	// firstAsk is how long it is before one is asked again, doubled each time up to lastAsk.
	firstAsk = 500 * time.Microsecond
	lastAsk  = 20 * time.Millisecond
	// settleBatch is how many changes are settled by one message.
	settleBatch = 1024
	// settleWarn is after how many failures it is said that a service does not hear of that.
	settleWarn = 12
)

// peer is what this service has to do with that of another shard. All of it is guarded by Service.mu.
type peer struct {
	live    map[uint64]struct{} // changes that may be held there
	epoch   uint64              // of the row of its last known service
	queue   []Settled           // that it is to be told of
	sending bool
}

// holding is what services of other shards hold for a change. It belongs to the goroutine that makes the change.
type holding struct {
	s         *Service
	grips     map[int]*grip // by shard
	committed bool
}

// grip is what one of them holds.
type grip struct {
	shard  int
	change uint64
	items  []HoldItem
	row    []byte // of the shard; nil until all is prepared
	to     uint64 // who may have it: the service with this epoch, and no earlier one any more
}

// loses notes that an inode loses its last name with t.
func (t *tx) loses(id layout.FileID) { t.lost = append(t.lost, id) }

// prepare has the leases recalled on what t affects, here and at other shards, and makes t depend on that these hold what it needs.
func (s *Service) prepare(ctx context.Context, p *pending, h *holding, t *tx) error {
	if s.shards == 1 {
		return p.recall(ctx, t.affected)
	}
	var local []metarpc.LeaseItem
	foreign := map[int][]HoldItem{}
	for _, it := range t.affected {
		if s.mine(it.ID) {
			local = append(local, it)
			continue
		}
		shard := layout.ShardOf(it.ID, s.shards)
		items := foreign[shard]
		i := slices.IndexFunc(items, func(other HoldItem) bool { return other.ID == it.ID })
		if i < 0 {
			i = len(items)
			items = append(items, HoldItem{ID: it.ID, Last: slices.Contains(t.lost, it.ID)})
		}
		items[i].Lease |= it.Lease
		foreign[shard] = items
	}
	waiting := ctx
	if len(foreign) > 0 {
		var wait *turnback.Wait
		waiting, wait = p.waiting(ctx, t.affected)
		defer wait.End()
	}
	var held error
	var asking sync.WaitGroup
	asking.Go(func() { held = h.get(waiting, foreign) }) // ends with the answers, or ctx
	err := p.recall(waiting, local)
	asking.Wait()
	if err = errors.Join(context.Cause(waiting), err, held); err != nil {
		return err
	}
	for shard := range foreign {
		t.GuardEqual(schema.ShardKey(shard), h.grips[shard].row)
	}
	return nil
}

// get sees to it that the services of other shards hold what is wanted, and nothing else.
func (h *holding) get(ctx context.Context, wanted map[int][]HoldItem) error {
	for shard, g := range h.grips {
		if !g.fits(wanted[shard]) {
			h.letGo(shard)
		}
	}
	var asking sync.WaitGroup
	var mu sync.Mutex
	var first error
	for shard, items := range wanted {
		if h.grips[shard] != nil {
			continue
		}
		g := h.s.newGrip(shard, items)
		if h.grips == nil {
			h.grips = map[int]*grip{}
		}
		h.grips[shard] = g
		asking.Go(func() { // ends with the answer, or ctx
			if err := h.s.ask(ctx, g); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil {
					first = err
				}
			}
		})
	}
	asking.Wait()
	return first
}

// fits reports whether what is held is what is wanted. To hold other last names than those that go would have others wait who hold what
// this change may come to wait for.
func (g *grip) fits(wanted []HoldItem) bool {
	if g.row == nil || len(wanted) == 0 {
		return false
	}
	find := func(items []HoldItem, id layout.FileID) HoldItem {
		if i := slices.IndexFunc(items, func(it HoldItem) bool { return it.ID == id }); i >= 0 {
			return items[i]
		}
		return HoldItem{}
	}
	for _, it := range wanted {
		if have := find(g.items, it.ID); have.Lease&it.Lease != it.Lease || have.Last != it.Last {
			return false
		}
	}
	return !slices.ContainsFunc(g.items, func(it HoldItem) bool { return it.Last && !find(wanted, it.ID).Last })
}

// newGrip begins a hold, which is there from now on until it is settled.
func (s *Service) newGrip(shard int, items []HoldItem) *grip {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastChange++
	s.peers[shard].live[s.lastChange] = struct{}{}
	return &grip{shard: shard, change: s.lastChange, items: items}
}

// oldest is the oldest change that may be held at p; s.mu is held.
func (p *peer) oldest() uint64 {
	oldest := uint64(math.MaxUint64)
	for change := range p.live {
		oldest = min(oldest, change)
	}
	return oldest
}

// ask asks for a hold until it is there.
func (s *Service) ask(ctx context.Context, g *grip) error {
	answered := time.Now()
	for try := 0; ; try++ {
		s.mu.Lock()
		p := &s.peers[g.shard]
		g.to = max(g.to, p.epoch)
		h := &Hold{Shard: s.cfg.Shard, Row: s.cfg.Row, To: g.to, Change: g.change, Oldest: p.oldest(), Items: g.items}
		s.mu.Unlock()
		asking, cancel := context.WithTimeout(ctx, askTimeout)
		held, err := s.cfg.Peers.Hold(asking, g.shard, h)
		cancel()
		if err == nil && held.State == HoldOther {
			if err = s.noteEpoch(g.shard, held.Row, h.To); err == nil {
				continue
			}
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && time.Since(answered) > askPatience:
			return refusef(metarpc.StatusGrace, "the service of shard %d does not answer: %v", g.shard, err)
		case err != nil:
			if err := retry.Pause(ctx, min(firstAsk<<min(try, 10), lastAsk)); err != nil {
				return err
			}
			continue
		}
		switch held.State {
		case HoldReady:
			g.row = held.Row
			return nil
		case HoldGrace:
			return refusef(metarpc.StatusGrace, "shard %d: clients may still come back, or this stood in a recall's way", g.shard)
		case HoldOver:
			return refusef(metarpc.StatusShutdown, "this is no longer the service of shard %d", s.cfg.Shard)
		}
		answered, try = time.Now(), 0
	}
}

// noteEpoch notes which service another shard has now, which must be a later one than that of an epoch.
func (s *Service) noteEpoch(shard int, raw []byte, than uint64) error {
	var row schema.Shard
	if err := schema.DecodeRow(schema.ShardKey(shard), raw, &row); err != nil {
		return err
	}
	if row.Epoch <= than {
		return errors.New("an earlier service of it does")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers[shard].epoch = max(s.peers[shard].epoch, row.Epoch)
	return nil
}

// lostHold lets go what is no longer held, if that is why a batch was not committed.
func (h *holding) lostHold(err error) {
	guard := (*catalog.GuardError)(nil)
	if len(h.grips) == 0 || !errors.As(err, &guard) {
		return
	}
	for shard := range h.grips {
		if bytes.Equal(guard.Guard.Key, schema.ShardKey(shard)) {
			h.letGo(shard)
		}
	}
}

// letGo tells one who holds something for the change that it need not any more.
func (h *holding) letGo(shard int) {
	g := h.grips[shard]
	delete(h.grips, shard)
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	h.s.settleSoon(shard, Settled{Change: g.change, To: g.to, Committed: h.committed})
}

// letLastGo lets those go who hold the last name of something else than an inode. Who waits for the right to remove one has no other.
func (h *holding) letLastGo(but layout.FileID) {
	for shard, g := range h.grips {
		if slices.ContainsFunc(g.items, func(it HoldItem) bool { return it.Last && it.ID != but }) {
			h.letGo(shard)
		}
	}
}

// end lets all go.
func (h *holding) end() {
	for shard := range h.grips {
		h.letGo(shard)
	}
}

// settleSoon tells another service that a change is settled; s.mu is held.
func (s *Service) settleSoon(shard int, c Settled) {
	p := &s.peers[shard]
	p.queue = append(p.queue, c)
	if !p.sending {
		p.sending = true
		s.tasks.Go(func() { s.sendSettled(shard) }) // ends when there is nothing more to tell, or with s.ctx
	}
}

// sendSettled tells another service what is settled until it has heard all of it, whichever instance that is: one that holds nothing ignores it.
func (s *Service) sendSettled(shard int) {
	p := &s.peers[shard]
	wait, failed := firstAsk, 0
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(p.queue) > 0 {
		batch := slices.Clone(p.queue[:min(len(p.queue), settleBatch)])
		st := &Settle{Shard: s.cfg.Shard, Row: s.cfg.Row, Oldest: p.oldest(), Changes: batch}
		s.mu.Unlock()
		asking, cancel := context.WithTimeout(s.ctx, askTimeout)
		err := s.cfg.Peers.Settle(asking, shard, st)
		cancel()
		if err != nil {
			if failed++; failed == settleWarn {
				s.log.Warn("another service does not hear what it need not hold any more; trying again", "shard", shard, "error", err)
			}
			wait = min(2*wait, time.Second)
			err = retry.Pause(s.ctx, wait)
			if s.mu.Lock(); err != nil {
				return
			}
			continue
		}
		wait, failed = firstAsk, 0
		s.mu.Lock()
		p.queue = p.queue[len(batch):]
		for _, c := range batch {
			delete(p.live, c.Change)
		}
	}
	p.queue, p.sending = nil, false
}

// foreignAttr is what a session is told of an inode of another shard that it finds by a name: of a directory its attributes, of anything else
// the type. What else there is to know only that shard's service knows.
func (s *Service) foreignAttr(ctx context.Context, entry schema.Entry) (metarpc.Attr, error) {
	if entry.Type == syscall.S_IFDIR {
		return s.attributes(ctx, nil, entry.ID)
	}
	return metarpc.Attr{ID: entry.ID, Mode: entry.Type}, nil
}
