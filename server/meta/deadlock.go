package meta

import (
	"bytes"
	"context"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// A wait for a lock that would never end is refused at once if all that wait for each other do so in this shard (lockTable.deadlock). Otherwise
// it is found by asking the other shards, some time later: whoever has somebody waiting for long gets the waits of all shards, twice. What was there
// both times was there at one moment, between the two askings, as who waits in one place neither gets nor gives up what he has in another.
const (
	deadlockPeriod = 500 * time.Millisecond
	deadlockAge    = 300 * time.Millisecond // of the oldest wait, before others are asked
)

// LockOwner is whoever has or wants a lock, in all shards the same.
type LockOwner struct {
	Client [16]byte
	Number uint64
}

func (o LockOwner) compare(p LockOwner) int {
	if c := bytes.Compare(o.Client[:], p.Client[:]); c != 0 {
		return c
	}
	switch {
	case o.Number < p.Number:
		return -1
	case o.Number > p.Number:
		return 1
	}
	return 0
}

// LockWait says that one owner of a record lock waits for another one to give up his. Number names the wait, among those of its shard.
type LockWait struct {
	Number         uint64
	Waiter, Holder LockOwner
}

// lockEdge is a wait in one of the shards.
type lockEdge struct {
	shard int
	LockWait
}

func (o lockOwner) global() LockOwner { return LockOwner{o.sess.client.ID, o.number} }

// LockWaits returns who waits for whom in this shard.
func (s *Service) LockWaits() []LockWait {
	t, now := &s.locks, time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []LockWait
	for owner, waits := range t.waiting {
		for _, w := range waits {
			if !w.live(now) {
				continue
			}
			for l := range w.file.records.Conflicts(w.want) {
				all = append(all, LockWait{w.number, owner.global(), l.Owner.global()})
			}
		}
	}
	return all
}

// waitsLong reports whether somebody waits for a record lock, and not only since now.
func (t *lockTable) waitsLong() bool {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, waits := range t.waiting {
		if slices.ContainsFunc(waits, func(w *lockWait) bool { return w.live(now) && now.Sub(w.since) > deadlockAge }) {
			return true
		}
	}
	return false
}

// watchDeadlocks finds those waits of this shard that would never end because of waits in others. It ends with s.ctx.
func (s *Service) watchDeadlocks() {
	var before map[lockEdge]bool
	for pause(s.ctx, deadlockPeriod) == nil {
		if !s.locks.waitsLong() {
			before = nil
			continue
		}
		edges := map[lockEdge]bool{}
		for shard := range s.shards {
			waits := s.LockWaits()
			if shard != s.cfg.Shard {
				ctx, cancel := context.WithTimeout(s.ctx, deadlockPeriod)
				var err error
				waits, err = s.cfg.Peers.LockWaits(ctx, shard)
				cancel()
				if err != nil { // it is asked again soon
					continue
				}
			}
			for _, w := range waits {
				edges[lockEdge{shard, w}] = true
			}
		}
		var lasting []lockEdge
		for e := range edges {
			if before[e] {
				lasting = append(lasting, e)
			}
		}
		before = edges
		for _, number := range victims(s.cfg.Shard, lasting) {
			s.endDeadlock(number)
		}
	}
}

// victims returns the waits of a shard that end so that others can go on: of each circle that of the greatest owner, so that all shards choose the
// same one.
func victims(shard int, edges []lockEdge) []uint64 {
	next := map[LockOwner][]LockOwner{}
	for _, e := range edges {
		next[e.Waiter] = append(next[e.Waiter], e.Holder)
	}
	var found []uint64
	for _, e := range edges {
		if e.shard != shard || slices.Contains(found, e.Number) {
			continue
		}
		seen := map[LockOwner]bool{}
		for todo := []LockOwner{e.Holder}; len(todo) > 0; {
			o := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			if o == e.Waiter {
				found = append(found, e.Number)
				break
			}
			if o.compare(e.Waiter) < 0 && !seen[o] {
				seen[o] = true
				todo = append(todo, next[o]...)
			}
		}
	}
	return found
}

// endDeadlock has a wait refused when its client asks again, which it is told to do.
func (s *Service) endDeadlock(number uint64) {
	t := &s.locks
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, waits := range t.waiting {
		for _, w := range waits {
			if w.number == number {
				w.deadlock = true
				s.callReady(w.want.Owner.sess, metarpc.LockReadyArgs{ID: w.file.id, Owner: w.want.Owner.number})
			}
		}
	}
}
