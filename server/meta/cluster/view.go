package cluster

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
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

type shardRow struct {
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
	raw, err := snap.Get(ctx, schema.KeyRing)
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		return nil, err
	}
	counters, err := catalog.DecodeCounters(raw)
	if err != nil {
		return nil, fmt.Errorf("ring row: %w", err)
	}
	v.epoch = uint64(counters.Field(0))
	from, to := schema.Of(schema.PrefixMember)
	for kv, err := range snap.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, err
		}
		m := memberRow{raw: slices.Clone(kv.Value)}
		if err := schema.Decode(m.raw, &m.Member); err != nil || len(kv.Key) != 1+len(m.id) {
			return nil, fmt.Errorf("member row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
		}
		m.id = memberID(kv.Key[1:])
		v.members = append(v.members, m)
	}
	from, to = schema.Of(schema.PrefixBeat)
	for kv, err := range snap.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, err
		}
		if m := v.member(memberID(kv.Key[1:])); m != nil {
			m.beat = slices.Clone(kv.Value)
		}
	}
	from, to = schema.Of(schema.PrefixShard)
	for kv, err := range snap.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, err
		}
		var row schema.Shard
		shard, err := schema.ShardOfKey(kv.Key), schema.Decode(kv.Value, &row)
		if err != nil || shard < 0 || shard >= shards {
			return nil, fmt.Errorf("row of shard %d of %d: %w", shard, shards, errors.Join(err, catalog.ErrCorrupt))
		}
		v.shards[shard] = shardRow{raw: slices.Clone(kv.Value), owner: row.Member, epoch: row.Epoch}
	}
	return v, nil
}

// member returns a member, or nil.
func (v *view) member(id memberID) *memberRow {
	i, ok := slices.BinarySearchFunc(v.members, id, func(m memberRow, id memberID) int { return slices.Compare(m.id[:], id[:]) })
	if !ok {
		return nil
	}
	return &v.members[i]
}

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
