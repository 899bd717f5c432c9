package fs

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func (m *session) onCommit(f func(context.Context, []metarpc.SizeReport)) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.commit = f
}

// newShardsRig is a rig on a volume of two shards, with a file of each that is open and has data that is not stable.
func newShardsRig(t *testing.T, change ...func(*Config)) (r *rig, ids [2]layout.FileID, fhs [2]uint64) {
	s := newService(1, 1<<20)
	s.shards = 2
	r = newRig(t, s, change...)
	for shard := range ids {
		s.mu.Lock()
		s.last = layout.FileID((2+shard)*layout.ShardChunk + 5)
		s.mu.Unlock()
		ids[shard], fhs[shard] = r.create([]string{"f", "g"}[shard])
		if got := r.shardOf(ids[shard]); got != shard {
			t.Fatalf("inode %d is of shard %d", ids[shard], got)
		}
		r.write(ids[shard], 0, pattern(uint64(shard), 1000))
	}
	return r, ids, fhs
}

// With the session of one shard goes what was written to its files, and nothing else.
func TestShardLost(t *testing.T) {
	r, ids, fhs := newShardsRig(t)
	before := [2]*sessionLife{r.sessions[0].Load(), r.sessions[1].Load()}
	r.OnLost(1)
	if r.sessions[0].Load() != before[0] || before[0].ctx.Err() != nil {
		t.Error("the session of shard 0 has ended, too")
	}
	if r.sessions[1].Load() == before[1] || before[1].ctx.Err() == nil {
		t.Error("the session of shard 1 has not ended")
	}
	r.OnReset(t.Context(), 1, true)
	r.want(r.fsync(ids[1], fhs[1]), syscall.EIO, "fsync of what was lost")
	r.want(r.fsync(ids[1], fhs[1]), 0, "fsync after that was told")
	r.want(r.fsync(ids[0], fhs[0]), 0, "fsync of another shard's file")
	if a, b := r.durable(ids[0]), r.durable(ids[1]); a != 1000 || b != 0 {
		t.Errorf("sizes of %d and %d were reported, want 1000 and 0", a, b)
	}
	for shard := range ids {
		r.closeFile(ids[shard], fhs[shard])
	}
}

// A restarted service is told of its own files.
func TestShardReset(t *testing.T) {
	r, ids, fhs := newShardsRig(t)
	for shard := range ids {
		r.want(r.flush(ids[shard], fhs[shard]), 0, "flush")
	}
	told := map[layout.FileID]int{}
	r.m.onCommit(func(ctx context.Context, reports []metarpc.SizeReport) {
		for _, rep := range reports {
			if ctx.Value(resetKey{}) != nil { // not one of the flusher's
				told[rep.ID]++
			}
		}
	})
	r.OnReset(context.WithValue(t.Context(), resetKey{}, true), 0, false)
	if told[ids[0]] != 1 || told[ids[1]] != 0 {
		t.Errorf("told %v, want of inode %d", told, ids[0])
	}
	for shard := range ids {
		r.closeFile(ids[shard], fhs[shard])
	}
}

type resetKey struct{}

// As long as one service is away the others are told of sizes and access times.
func TestShardAway(t *testing.T) {
	away := make(chan struct{})
	r, ids, fhs := newShardsRig(t, withAtime(Atime{Rule: AtimeStrict}))
	r.m.onCommit(func(ctx context.Context, reports []metarpc.SizeReport) {
		for _, rep := range reports {
			if r.shardOf(rep.ID) != r.shardOf(reports[0].ID) {
				t.Errorf("inodes %d and %d are reported together", reports[0].ID, rep.ID)
			}
		}
		if r.shardOf(reports[0].ID) == 1 {
			select {
			case <-away:
			case <-ctx.Done():
			}
		}
	})
	synced := make(chan error, 1)
	go func() { synced <- r.Sync(t.Context()) }() // ends when all services have been told
	waittest.Until(t, "what is synced is durable where that is possible", func() bool { return r.durable(ids[0]) == 1000 })
	r.write(ids[0], 1000, []byte("more"))
	waittest.Until(t, "the flusher goes on", func() bool { return r.durable(ids[0]) == 1004 })
	start := time.Now()
	for _, id := range ids {
		r.read(id, 0, 10)
	}
	waittest.Until(t, "the access time", func() bool { return !r.atimeAtService(ids[0]).Before(start) })
	if r.atimeAtService(ids[1]).After(start) {
		t.Error("the service that is away was told")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := r.accesses.set(ctx, ids[0]); err != nil {
		t.Errorf("to set the time of access waits for another shard: %v", err)
	}
	select {
	case err := <-synced:
		t.Errorf("sync returned before everything was durable: %v", err)
	default:
	}
	close(away)
	if err := <-synced; err != nil {
		t.Error(err)
	}
	waittest.Until(t, "everything is told", func() bool {
		return r.durable(ids[1]) == 1000 && !r.atimeAtService(ids[1]).Before(start)
	})
	for shard := range ids {
		r.closeFile(ids[shard], fhs[shard])
	}
}
