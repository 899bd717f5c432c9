package cluster

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// memberID names an incarnation of a process.
type memberID [16]byte

func (id memberID) String() string { return hex.EncodeToString(id[:4]) }

// view is what the rows say at one moment.
type view struct {
	epoch   uint64
	members []memberRow // in the order of ids
	shards  []shardRow
}

type memberRow struct {
	id   memberID
	raw  []byte
	beat []byte
	schema.Member
}

// lease is for how long the member can be silent.
func (m *memberRow) lease(otherwise time.Duration) time.Duration {
	if m.Lease > 0 {
		return time.Duration(m.Lease)
	}
	return otherwise
}

// silent adds to a batch the guard that the process has not beaten since the row was read.
func (m *memberRow) silent(b *catalog.Batch) {
	b.GuardRow(schema.BeatKey(m.id), m.beat)
}

// bury adds to a batch what ends a member that is dead.
func (m *memberRow) bury(b *catalog.Batch) {
	b.GuardPresent(schema.MemberKey(m.id))
	m.silent(b)
	b.Delete(schema.MemberKey(m.id))
	b.Delete(schema.BeatKey(m.id))
}

type shardRow struct {
	shard int
	raw   []byte // nil: there is none yet
	owner memberID
	epoch uint64
}

// readView reads the rows. All are of one revision of the catalog, so two views of one epoch are the same, but for beats.
func readView(ctx context.Context, engine catalog.Engine, shards int) (*view, error) {
	for {
		v, err := tryView(ctx, engine, shards)
		if !errors.Is(err, catalog.ErrSnapshotExpired) || ctx.Err() != nil {
			return v, err
		}
	}
}

func tryView(ctx context.Context, engine catalog.Engine, shards int) (*view, error) {
	snap, err := engine.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	v := &view{shards: make([]shardRow, shards)}
	for shard := range v.shards {
		v.shards[shard].shard = shard
	}
	raw, err := schema.FindRow(ctx, snap, schema.KeyRing)
	if err != nil {
		return nil, err
	}
	counters, err := catalog.DecodeCounters(raw)
	if err != nil {
		return nil, fmt.Errorf("ring row: %w", err)
	}
	v.epoch = uint64(counters.Field(0))
	if v.members, err = readMembers(ctx, snap); err != nil {
		return nil, err
	}
	from, to := schema.Of(schema.PrefixShard)
	for kv, err := range snap.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, err
		}
		row, err := readShard(kv)
		if err != nil || row.shard >= shards {
			return nil, fmt.Errorf("of %d shards: %w", shards, errors.Join(err, catalog.ErrCorrupt))
		}
		v.shards[row.shard] = row
	}
	return v, nil
}

// readShard reads the row of a shard.
func readShard(kv catalog.Row) (shardRow, error) {
	var row schema.Shard
	shard, err := schema.ShardOfKey(kv.Key), schema.Decode(kv.Value, &row)
	if err != nil || shard < 0 {
		return shardRow{}, fmt.Errorf("shard row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
	}
	return shardRow{shard: shard, raw: slices.Clone(kv.Value), owner: row.Member, epoch: row.Epoch}, nil
}

// change adds to a batch what gives the shard another owner.
func (s *shardRow) change(b *catalog.Batch, to memberID) (epoch uint64) {
	key := schema.ShardKey(s.shard)
	b.GuardRow(key, s.raw)
	b.Put(key, schema.Encode(&schema.Shard{Member: to, Epoch: s.epoch + 1}))
	return s.epoch + 1
}

// member returns a member, or nil.
func (v *view) member(id memberID) *memberRow { return find(v.members, id) }

// ring is the view as clients are told it.
func (v *view) ring() metarpc.Ring {
	r := metarpc.Ring{Epoch: v.epoch, Owners: make([]int, len(v.shards))}
	index := map[memberID]int{}
	for i := range v.members[:min(len(v.members), metarpc.MaxServices)] {
		index[v.members[i].id] = i
		r.Services = append(r.Services, v.members[i].Address)
	}
	for shard := range v.shards {
		i, ok := index[v.shards[shard].owner]
		if !ok {
			i = -1
		}
		r.Owners[shard] = i
	}
	return r
}
