package cluster

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/schema"
)

// members tells of all members, and has one of them drained.
type members struct{ m *member }

var _ meta.Members = members{}

// List implements [meta.Members].
func (ms members) List(ctx context.Context) (*metarpc.MetaListResult, error) {
	m := ms.m
	sessions := make([]int, m.n.shards)
	from, to := schema.Of(schema.PrefixSession)
	for kv, err := range m.fence.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("count sessions: %w", err)
		}
		var row schema.Session
		if err := schema.Decode(kv.Value, &row); err != nil {
			return nil, fmt.Errorf("session row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
		}
		if !row.Ended && row.Shard >= 0 && row.Shard < len(sessions) {
			sessions[row.Shard]++
		}
	}
	now := m.n.cfg.Clock()
	m.mu.Lock()
	defer m.mu.Unlock()
	r := &metarpc.MetaListResult{Shards: m.n.shards}
	for i := range m.view.members {
		other := &m.view.members[i]
		s := metarpc.MetaService{Address: other.Address, Host: other.Host, Program: other.Program, Started: other.Started,
			Lowest: other.Lowest, Highest: other.Highest}
		if seen, ok := m.watch.seen[other.id]; ok {
			s.Silent = int64(now - seen.at)
		}
		switch {
		case time.Duration(s.Silent) >= other.lease(m.n.cfg.Lease):
			s.State = metarpc.MetaSilent
		case other.Draining:
			s.State = metarpc.MetaDraining
		}
		for shard := range m.view.shards {
			if m.view.shards[shard].owner == other.id {
				s.Shards = append(s.Shards, shard)
				s.Sessions += sessions[shard]
			}
		}
		r.Services = append(r.Services, s)
	}
	return r, nil
}

// Drain implements [meta.Members].
func (ms members) Drain(ctx context.Context, address string, cancel bool) error {
	m := ms.m
	if err := m.awaitLook(ctx); err != nil {
		return err
	}
	var found *memberRow
	others := 0
	m.mu.Lock()
	for i := range m.view.members {
		switch other := &m.view.members[i]; {
		case other.Address != address:
			if !other.Draining {
				others++
			}
		case found == nil || other.Started > found.Started: // an earlier one of that address is as good as dead
			found = other
		}
	}
	m.mu.Unlock()
	switch {
	case found == nil:
		return fmt.Errorf("no metadata service of the volume is at %s, see weft admin meta ls: %w", address, syscall.ENOENT)
	case !cancel && others == 0:
		return fmt.Errorf("there is no other metadata service that could take the shards of the one at %s: %w", address, syscall.EBUSY)
	}
	if err := m.drain(ctx, found.id, cancel); err != nil {
		return err
	}
	if found.id != m.id {
		if err := m.tell(ctx, found); err != nil && ctx.Err() == nil {
			m.log.Info("the metadata service that is to be drained is not told; it finds out by itself", "address", address, "error", err)
		}
	}
	return nil
}

// drain records whether a member is draining.
func (m *member) drain(ctx context.Context, id memberID, cancel bool) error {
	key := schema.MemberKey(id)
	for {
		raw, err := m.fence.Get(ctx, key)
		if errors.Is(err, catalog.ErrNotFound) {
			return fmt.Errorf("the metadata service has just gone: %w", syscall.ENOENT)
		}
		if err != nil {
			return err
		}
		var row schema.Member
		if err := schema.Decode(raw, &row); err != nil {
			return fmt.Errorf("member row: %w", err)
		}
		if row.Draining == !cancel {
			m.lookSoon()
			return nil
		}
		row.Draining = !cancel
		var b catalog.Batch
		b.GuardEqual(key, raw)
		b.Put(key, schema.Encode(&row))
		b.Add(schema.KeyRing, 0, 1)
		if err := m.fence.Commit(ctx, &b); err != nil && !lost(err) {
			return err
		}
	}
}
