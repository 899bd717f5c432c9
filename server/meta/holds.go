package meta

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/turnback"
	"github.com/weftfs/weft/server/schema"
)

const (
	// holdWait is how long a Hold waits for what it asks before it is answered that it is to be asked again.
	holdWait = 500 * time.Millisecond
	// holdLook is how often it is looked whether the askers of holds that are older than that are still the services of their shards.
	holdLook = time.Second
)

// askerID names a service of another shard that asks for holds: the one that has had the shard since its row got an epoch.
type askerID struct {
	shard int
	epoch uint64
}

// asker is such a service. All of it, and of its holds, is guarded by Service.mu.
type asker struct {
	askerID
	row     []byte
	oldest  uint64 // changes of smaller numbers are settled
	settled map[uint64]struct{}
	holds   map[uint64]*hold
}

// hold is what is prepared here for a change of another service.
type hold struct {
	items []HoldItem
	begun time.Time
	ready chan struct{} // closed when all is prepared
	back  chan struct{} // closed when it is turned back
	ctx   context.Context
	end   context.CancelFunc // it is settled
	look  bool               // the change may have been committed
}

// asker returns the record of an asker, made if there is none; s.mu is held.
func (s *Service) asker(shard int, raw []byte, oldest uint64) (*asker, error) {
	var row schema.Shard
	if err := schema.DecodeRow(schema.ShardKey(shard), raw, &row); err != nil {
		return nil, err
	}
	id := askerID{shard, row.Epoch}
	a := s.askers[id]
	if a == nil {
		for earlier, other := range s.askers {
			if earlier.shard == shard && earlier.epoch < row.Epoch && len(other.holds) == 0 {
				delete(s.askers, earlier) // what still comes from there ends when it is found that its asker is over
			}
		}
		a = &asker{askerID: id, row: bytes.Clone(raw), settled: map[uint64]struct{}{}, holds: map[uint64]*hold{}}
		s.askers[id] = a
	}
	if oldest > a.oldest {
		a.oldest = oldest
		for change := range a.settled {
			if change < oldest {
				delete(a.settled, change)
			}
		}
		for change := range a.holds {
			if change < oldest { // that it is settled was known once, when there was another record of this asker
				a.settle(Settled{Change: change, Committed: true})
			}
		}
	}
	return a, nil
}

// Hold prepares inodes for a change that the service of another shard is about to commit: no leases on them are granted, those there are have been
// recalled from all sessions, and who could remove a regular file that loses its last name waits. It may be called again and again with the same
// arguments, and after the Settle that ends it.
func (s *Service) Hold(ctx context.Context, h *Hold) (*Held, error) {
	for _, it := range h.Items {
		if !s.mine(it.ID) {
			return nil, fmt.Errorf("hold of inode %d, which is of shard %d: this is shard %d", it.ID, layout.ShardOf(it.ID, s.shards), s.cfg.Shard)
		}
	}
	// Somebody may rely on a lease, or have a file open, that this instance does not know of.
	if err := s.awaitGrace(ctx); err != nil {
		if refusal := (*metarpc.Error)(nil); errors.As(err, &refusal) {
			return &Held{State: HoldGrace}, nil
		}
		return nil, err
	}
	if h.To != s.epoch { // it may be settled long ago, which the one knew that it was sent to
		return &Held{State: HoldOther, Row: s.cfg.Row}, nil
	}
	hd, err := s.joinHold(h)
	if err != nil {
		return nil, err
	}
	if hd == nil {
		return &Held{State: HoldOver}, nil
	}
	timer := time.NewTimer(holdWait)
	defer timer.Stop()
	select {
	case <-hd.ready:
		return &Held{State: HoldReady, Row: s.cfg.Row}, nil
	case <-hd.back:
		return &Held{State: HoldGrace}, nil
	case <-timer.C:
		return &Held{State: HoldPending}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-hd.ctx.Done():
		if s.ctx.Err() != nil {
			return nil, net.ErrClosed
		}
		return &Held{State: HoldOver}, nil
	}
}

// joinHold finds a hold or begins it; nil if it is settled.
func (s *Service) joinHold(h *Hold) (*hold, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil { // stopped
		return nil, net.ErrClosed
	}
	a, err := s.asker(h.Shard, h.Row, h.Oldest)
	if err != nil {
		return nil, err
	}
	if _, settled := a.settled[h.Change]; settled || h.Change < a.oldest {
		return nil, nil
	}
	hd := a.holds[h.Change]
	if hd == nil {
		hd = &hold{items: h.Items, begun: time.Now(), ready: make(chan struct{}), back: make(chan struct{})}
		hd.ctx, hd.end = context.WithCancel(s.ctx)
		a.holds[h.Change] = hd
		s.tasks.Go(func() { s.keepHold(hd) }) // ends when the hold is settled and what came of it is done, or with s.ctx
	}
	return hd, nil
}

// keepHold prepares what a hold asks for, keeps it so until it is settled, and then does what the change has left to do here.
func (s *Service) keepHold(hd *hold) {
	p := pending{s: s}
	defer p.end()
	items := make([]metarpc.LeaseItem, len(hd.items))
	for i, it := range hd.items {
		items[i] = metarpc.LeaseItem{ID: it.ID, Lease: it.Lease}
	}
	ctx, wait := s.waits.Begin(hd.ctx, nil, items)
	p.wait = wait
	err := p.recall(ctx, items)
	var files []*file
	for _, it := range hd.items {
		if err != nil {
			break
		}
		if !it.Last {
			continue
		}
		var f *file
		if f, err = s.holdLast(ctx, it.ID); f != nil {
			files = append(files, f)
		}
	}
	switch {
	case err == nil:
		close(hd.ready)
	case context.Cause(ctx) == error(turnback.Error):
		close(hd.back)
	}
	wait.End()
	<-hd.ctx.Done()
	s.mu.Lock()
	look := hd.look // a hold that ends with the service may be settled just now
	s.mu.Unlock()
	for _, f := range files {
		s.dropLast(f, look)
	}
}

// holdLast prepares an inode for the loss of its last name. Of a regular file the removal is the caller's then, and the file is returned;
// anything else is remembered in case that it goes.
func (s *Service) holdLast(ctx context.Context, id layout.FileID) (f *file, err error) {
	err = retry.Persist(ctx, s.log, fmt.Sprintf("removal of inode %d by another service", id), func() error {
		row, _, err := s.inode(ctx, id)
		switch {
		case errors.Is(err, errStale): // the guards of the change will not hold
			return nil
		case err != nil:
			return err
		case isRegular(row.Mode):
			f, err = s.takeRemoval(ctx, id)
			return err
		}
		counters, err := schema.ReadCounters(ctx, s.engine, id)
		if err == nil {
			s.rememberRemoved(id, row, counters, now())
		}
		return err
	})
	return f, err
}

// takeRemoval waits until nobody decides whether a file goes, and takes that right.
func (s *Service) takeRemoval(ctx context.Context, id layout.FileID) (*file, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for f.removing {
		if err := s.wait(ctx, f); err != nil {
			return nil, err
		}
	}
	f.removing = true
	return f, nil
}

// dropLast ends what takeRemoval has begun. A file that has lost its last name, which look says is possible, goes unless somebody has it open.
func (s *Service) dropLast(f *file, look bool) {
	var orphan []byte
	if look {
		err := retry.Persist(s.ctx, s.log, fmt.Sprintf("removal of inode %d by another service", f.id), func() (err error) {
			orphan, err = schema.FindRow(s.ctx, s.engine, schema.OrphanKey(f.id))
			return err
		})
		if err != nil {
			return // the next instance finds it
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f.removing = false
	if orphan != nil {
		f.orphan = true
		if !f.opened() {
			s.reap(f.id)
		}
	}
	s.changedFile(f)
}

// Settle ends holds, also those of earlier services of the shard. It may be called more than once, and before the Hold.
func (s *Service) Settle(_ context.Context, st *Settle) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		return net.ErrClosed
	}
	for _, c := range st.Changes {
		if c.To > s.epoch {
			return fmt.Errorf("this is no longer the service of shard %d", s.cfg.Shard)
		}
	}
	a, err := s.asker(st.Shard, st.Row, st.Oldest)
	if err != nil {
		return err
	}
	for _, c := range st.Changes {
		a.settle(c)
	}
	return nil
}

// settle ends the hold of a change, should there be one; Service.mu is held.
func (a *asker) settle(c Settled) {
	if c.Change >= a.oldest {
		a.settled[c.Change] = struct{}{}
	}
	if hd := a.holds[c.Change]; hd != nil {
		delete(a.holds, c.Change)
		hd.look = c.Committed
		hd.end()
	}
}

// watchHolds ends the holds of services that are over: nothing of theirs can be committed any more, and what was is in the catalog. It ends
// with s.ctx.
func (s *Service) watchHolds() {
	ticker := time.NewTicker(holdLook)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		var old []*asker
		for _, a := range s.askers {
			for _, hd := range a.holds {
				if time.Since(hd.begun) > holdLook {
					old = append(old, a)
					break
				}
			}
		}
		s.mu.Unlock()
		for _, a := range old {
			row, err := schema.FindRow(s.ctx, s.engine, schema.ShardKey(a.shard))
			if err != nil {
				if s.ctx.Err() == nil {
					s.log.Warn("it cannot be found out whether another service is over", "shard", a.shard, "error", err)
				}
				continue
			}
			if bytes.Equal(row, a.row) {
				continue
			}
			s.mu.Lock()
			n := len(a.holds)
			for change := range a.holds {
				a.settle(Settled{Change: change, Committed: true})
			}
			s.mu.Unlock()
			s.log.Info("ended what was held for a service that is over", "shard", a.shard, "changes", n)
		}
	}
}
