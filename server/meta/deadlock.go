package meta

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// A wait for a lock that would never end is refused at once if all that wait for each other do so in this shard (lockTable.deadlock). Otherwise
// it is found by asking the other shards, some time later: whoever has somebody waiting for long gets the waits of all shards, twice. What was there
// both times was there at one moment, between the two askings, as who waits in one place neither gets nor gives up what he has in another.
//
// The wait that is to end is marked with the circle it is in, and its client told to ask again. By then somebody else may have left the circle. So the
// call looks once more, and is refused only if each wait of the circle is still there.
const (
	deadlockPeriod = 500 * time.Millisecond
	deadlockAge    = 300 * time.Millisecond // of the oldest wait, before others are asked

	// waitsPart is how many waits a service tells at a time: less than a frame of package peerrpc has room for.
	waitsPart = 1 << 13
	// maxWaits is how many waits of one shard are looked at; those that began first come first. It bounds the memory of who looks: a circle with a
	// wait beyond it is found when there are fewer.
	maxWaits = 1 << 16
)

// LockOwner is whoever has or wants a lock, in all shards the same.
type LockOwner struct {
	Client [16]byte
	Number uint64
}

func (o LockOwner) compare(p LockOwner) int {
	return cmp.Or(bytes.Compare(o.Client[:], p.Client[:]), cmp.Compare(o.Number, p.Number))
}

// LockWait says that one owner of a record lock waits for another one to give up his. Number names the wait, among those of its shard; they count up.
type LockWait struct {
	Number         uint64
	Waiter, Holder LockOwner
}

// compare puts the waits of a shard in the order in which they are told.
func (w LockWait) compare(x LockWait) int {
	return cmp.Or(cmp.Compare(w.Number, x.Number), w.Holder.compare(x.Holder))
}

// lockEdge is a wait in one of the shards.
type lockEdge struct {
	shard int
	LockWait
}

func (o lockOwner) global() LockOwner { return LockOwner{o.sess.client.ID, o.number} }

// LockWaits returns who waits for whom in this shard, one part at a time: up to waitsPart of those that come after the given one, by their numbers
// and then by their holders. If it returns fewer there are no more. Who waits for somebody for several locks is told of once in a part, with the least number.
func (s *Service) LockWaits(after LockWait) []LockWait {
	t, now := &s.locks, time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	var waits []*lockWait
	for _, of := range t.waiting {
		for _, w := range of {
			if w.number >= after.Number && w.live(now) {
				waits = append(waits, w)
			}
		}
	}
	slices.SortFunc(waits, func(v, w *lockWait) int { return cmp.Compare(v.number, w.number) })
	var part []LockWait
	told := map[[2]LockOwner]bool{}
	for _, w := range waits {
		waiter, begin := w.want.Owner.global(), len(part)
		for l := range w.file.records.Conflicts(w.want) {
			is := LockWait{w.number, waiter, l.Owner.global()}
			if pair := [2]LockOwner{waiter, is.Holder}; is.compare(after) > 0 && !told[pair] {
				told[pair] = true
				part = append(part, is)
			}
		}
		slices.SortFunc(part[begin:], LockWait.compare)
		if len(part) >= waitsPart {
			return part[:waitsPart]
		}
	}
	return part
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

// waitsOf returns who waits for whom in a shard, or as much of it as is looked at.
func (s *Service) waitsOf(ctx context.Context, shard int) ([]LockWait, error) {
	var all []LockWait
	for after := (LockWait{}); len(all) < maxWaits; after = all[len(all)-1] {
		var part []LockWait
		var err error
		if shard == s.cfg.Shard {
			part = s.LockWaits(after)
		} else if part, err = s.cfg.Peers.LockWaits(ctx, shard, after); err != nil {
			return nil, err
		}
		if all = append(all, part...); len(part) < waitsPart {
			break
		}
	}
	return all, nil
}

// waitsIn returns who waits for whom in some shards, without those that do not answer in time. It asks all at the same time.
func (s *Service) waitsIn(ctx context.Context, shards []int) map[lockEdge]bool {
	ctx, cancel := context.WithTimeout(ctx, deadlockPeriod)
	defer cancel()
	var mu sync.Mutex
	edges := map[lockEdge]bool{}
	var asking sync.WaitGroup
	for _, shard := range shards {
		asking.Go(func() { // ends with ctx
			waits, err := s.waitsOf(ctx, shard)
			if err != nil {
				return // it is asked again soon
			}
			mu.Lock()
			defer mu.Unlock()
			for _, w := range waits {
				edges[lockEdge{shard, w}] = true
			}
		})
	}
	asking.Wait()
	return edges
}

// watchDeadlocks finds those waits of this shard that would never end because of waits in others. It ends with s.ctx.
func (s *Service) watchDeadlocks() {
	var shards []int
	for shard := range s.shards {
		shards = append(shards, shard)
	}
	var before map[lockEdge]bool
	for pause(s.ctx, deadlockPeriod) == nil {
		if !s.locks.waitsLong() {
			before = nil
			continue
		}
		edges := s.waitsIn(s.ctx, shards)
		var lasting []lockEdge
		for e := range edges {
			if before[e] {
				lasting = append(lasting, e)
			}
		}
		before = edges
		for number, circle := range victims(s.cfg.Shard, lasting) {
			s.endDeadlock(number, circle)
		}
	}
}

// victims returns the waits of a shard that end so that others can go on, each with a circle that it is in: of each circle that of the greatest owner, so that all
// shards choose the same one.
func victims(shard int, edges []lockEdge) map[uint64][]lockEdge {
	next := map[LockOwner][]lockEdge{}
	for _, e := range edges {
		next[e.Waiter] = append(next[e.Waiter], e)
	}
	found := map[uint64][]lockEdge{}
	for _, e := range edges {
		if e.shard != shard || found[e.Number] != nil {
			continue
		}
		by := map[LockOwner]lockEdge{} // the wait by which an owner was come to
		for todo := []lockEdge{e}; len(todo) > 0; {
			last := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			if _, seen := by[last.Holder]; seen || last.Holder.compare(e.Waiter) > 0 {
				continue
			}
			by[last.Holder] = last
			if last.Holder == e.Waiter {
				circle := []lockEdge{last}
				for o := last.Waiter; o != e.Waiter; o = by[o].Waiter {
					circle = append(circle, by[o])
				}
				found[e.Number] = circle
				break
			}
			todo = append(todo, next[last.Holder]...)
		}
	}
	return found
}

// endDeadlock marks a wait, and has its client ask again, who may then be refused.
func (s *Service) endDeadlock(number uint64, circle []lockEdge) {
	t := &s.locks
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, waits := range t.waiting {
		for _, w := range waits {
			if w.number == number {
				w.circle = circle
				s.callReady(w.want.Owner.sess, metarpc.LockReadyArgs{ID: w.file.id, Owner: w.want.Owner.number})
			}
		}
	}
}

// lasts reports whether all waits of a circle are still there.
func (s *Service) lasts(ctx context.Context, circle []lockEdge) bool {
	var shards []int
	for _, e := range circle {
		if !slices.Contains(shards, e.shard) {
			shards = append(shards, e.shard)
		}
	}
	edges := s.waitsIn(ctx, shards)
	return !slices.ContainsFunc(circle, func(e lockEdge) bool { return !edges[e] })
}
