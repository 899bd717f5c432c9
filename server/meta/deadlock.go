package meta

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/server/meta/locktable"
)

const (
	// deadlockPeriod is how often circles of waits that go through several shards are looked for.
	deadlockPeriod = 500 * time.Millisecond
	// maxWaits is how many waits of one shard are looked at; those that began first come first. It bounds the memory of
	// who looks: a circle with a wait beyond it is found when there are fewer.
	maxWaits = 1 << 16
)

// LockWaits is locktable.Table.Waits of this shard.
func (s *Service) LockWaits(after locktable.Wait) []locktable.Wait { return s.locks.Waits(after) }

// waitsOf returns who waits for whom in a shard, or as much of it as is looked at.
func (s *Service) waitsOf(ctx context.Context, shard int) ([]locktable.Wait, error) {
	var all []locktable.Wait
	for after := (locktable.Wait{}); len(all) < maxWaits; after = all[len(all)-1] {
		var part []locktable.Wait
		var err error
		if shard == s.cfg.Shard {
			part = s.LockWaits(after)
		} else if part, err = s.cfg.Peers.LockWaits(ctx, shard, after); err != nil {
			return nil, err
		}
		if all = append(all, part...); len(part) < locktable.WaitsPart {
			break
		}
	}
	return all, nil
}

// waitsIn returns who waits for whom in some shards, without those that do not answer in time. It asks all at the same
// time.
func (s *Service) waitsIn(ctx context.Context, shards []int) map[locktable.Edge]bool {
	ctx, cancel := context.WithTimeout(ctx, deadlockPeriod)
	defer cancel()
	var mu sync.Mutex
	edges := map[locktable.Edge]bool{}
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
				edges[locktable.Edge{Shard: shard, Wait: w}] = true
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
	var before map[locktable.Edge]bool
	for retry.Pause(s.ctx, deadlockPeriod) == nil {
		if !s.locks.WaitsLong() {
			before = nil
			continue
		}
		edges := s.waitsIn(s.ctx, shards)
		var lasting []locktable.Edge
		for e := range edges {
			if before[e] {
				lasting = append(lasting, e)
			}
		}
		before = edges
		s.tellReady(s.locks.End(s.cfg.Shard, lasting))
	}
}

// lasts reports whether all waits of a circle are still there.
func (s *Service) lasts(ctx context.Context, circle []locktable.Edge) bool {
	var shards []int
	for _, e := range circle {
		if !slices.Contains(shards, e.Shard) {
			shards = append(shards, e.Shard)
		}
	}
	edges := s.waitsIn(ctx, shards)
	return !slices.ContainsFunc(circle, func(e locktable.Edge) bool { return !edges[e] })
}
