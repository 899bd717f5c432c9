package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// MaintenanceLease is how long who maintains a volume can be silent.
const MaintenanceLease = 3 * DefaultLease

// errSilent is why a maintenance ends before it is done.
var errSilent = errors.New("the catalog could not be reached for so long that metadata services may use it again; start anew")

// MaintenanceConfig says what Maintain works with.
type MaintenanceConfig struct {
	Engine  catalog.Engine       // not closed
	Program string               // what is done, for people: "weftd fsck --repair"
	Host    string               // for people
	Log     *slog.Logger         // nil = slog.Default
	Clock   func() time.Duration // nil = CLOCK_BOOTTIME
}

// Maintain calls f when nobody uses the volume, and keeps metadata services from joining until f returns. What f commits to its engine has no effect once somebody else
// may use the volume, which ends its context. If somebody lives who uses it, f is not called, and the error names him.
func Maintain(ctx context.Context, cfg MaintenanceConfig, f func(context.Context, catalog.Engine) error) error {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Clock == nil {
		cfg.Clock = bootTime
	}
	m, err := cfg.begin(ctx)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	m.fence.fell = func() { stop(errSilent) }
	ended := make(chan struct{})
	go func() { // ends with ctx
		defer close(ended)
		m.beats(ctx)
	}()
	if err = m.unseat(ctx); err == nil {
		err = f(ctx, m.fence)
	}
	stop(nil)
	<-ended
	if context.Cause(ctx) == errSilent {
		return errors.Join(errSilent, err)
	}
	return errors.Join(err, m.end(context.WithoutCancel(ctx)))
}

// maintenance is the maintenance of a volume by this process.
type maintenance struct {
	cfg   *MaintenanceConfig
	id    memberID
	fence *fence
	beat  time.Duration // when the last beat that succeeded began
}

// begin puts the row, in a batch that deletes those of the dead.
func (cfg *MaintenanceConfig) begin(ctx context.Context) (*maintenance, error) {
	for {
		members, old, err := alone(ctx, cfg.Engine, cfg.Clock)
		if err != nil {
			return nil, err
		}
		m := &maintenance{cfg: cfg}
		rand.Read(m.id[:])
		row := schema.Encode(&schema.Maintenance{ID: m.id, Program: cfg.Program, Host: cfg.Host, Started: time.Now().UnixNano(), Lease: int64(MaintenanceLease)})
		for some := range slices.Chunk(members, takesAtOnce) {
			var b catalog.Batch
			for i := range some {
				some[i].bury(&b)
			}
			if err := cfg.Engine.Commit(ctx, &b); err != nil && !lost(err) {
				return nil, err
			}
		}
		var b catalog.Batch
		b.GuardRangeEmpty(schema.Of(schema.PrefixMember)) // or somebody has joined, or lives after all
		switch {
		case old == nil:
			b.GuardAbsent(schema.KeyMaintenance)
		default:
			b.GuardEqual(schema.KeyMaintenance, old.raw)
			old.silent(&b)
			b.Delete(schema.BeatKey(old.id))
		}
		b.Put(schema.KeyMaintenance, row)
		b.Put(schema.BeatKey(m.id), catalog.EncodeCounters(1))
		m.beat = cfg.Clock()
		switch err := cfg.Engine.Commit(ctx, &b); {
		case err == nil:
			m.fence = &fence{Engine: cfg.Engine, guard: catalog.Guard{Kind: catalog.Equal, Key: schema.KeyMaintenance, Value: row}}
			return m, nil
		case !lost(err):
			return nil, err
		}
	}
}

// unseat changes the rows of all shards that somebody had, so that what the services of dead members have sent, or send when they are no longer stopped, has no effect.
func (m *maintenance) unseat(ctx context.Context) error {
	for {
		var had []shardRow
		from, to := schema.Of(schema.PrefixShard)
		for kv, err := range m.fence.Scan(ctx, from, to, catalog.ScanOptions{}) {
			if err != nil {
				return err
			}
			row, err := readShard(kv)
			if err != nil {
				return err
			}
			if row.owner != (memberID{}) {
				had = append(had, row)
			}
		}
		if len(had) == 0 {
			return nil
		}
		for some := range slices.Chunk(had, takesAtOnce) {
			var b catalog.Batch
			for i := range some {
				some[i].change(&b, memberID{})
			}
			b.Add(schema.KeyRing, 0, 1)
			if err := m.fence.Commit(ctx, &b); err != nil && !lost(err) {
				return err
			}
		}
	}
}

// beats raises the beat row until ctx ends, or the maintenance, which it does in time before anybody else takes it for dead.
func (m *maintenance) beats(ctx context.Context) {
	failing := false
	for wait := MaintenanceLease / 5; retry.Pause(ctx, wait) == nil; {
		began := m.cfg.Clock()
		left := m.beat + MaintenanceLease - MaintenanceLease/5 - began
		if left <= 0 {
			m.fence.fall()
			return
		}
		var b catalog.Batch
		b.Add(schema.BeatKey(m.id), 0, 1)
		try, cancel := context.WithTimeout(ctx, left)
		err := m.fence.Commit(try, &b)
		cancel()
		if err == nil {
			m.beat, failing, wait = began, false, MaintenanceLease/5
			continue
		}
		wait = MaintenanceLease / 60
		if ctx.Err() == nil && !failing {
			m.cfg.Log.Warn("the catalog cannot be reached; if that lasts this is given up", "lease", MaintenanceLease, "error", err)
		}
		failing = true
	}
}

// endPatience is how long end tries. After it others wait for the lease to be over.
const endPatience = 10 * time.Second

// end deletes the rows, so that nobody has to wait for the lease.
func (m *maintenance) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	var b catalog.Batch
	b.Delete(schema.KeyMaintenance)
	b.Delete(schema.BeatKey(m.id))
	for {
		err := m.fence.Commit(ctx, &b)
		if err == nil || errors.Is(err, ErrFenced) { // perhaps by an attempt whose outcome was not known
			return nil
		}
		if retry.Pause(ctx, DefaultLease/20) != nil {
			return fmt.Errorf("metadata services can join in %v only: %w", MaintenanceLease, err)
		}
	}
}

// readMaintainer returns the row of whoever maintains the volume, nil if nobody does.
func readMaintainer(ctx context.Context, r catalog.Reader) (*memberRow, error) {
	var row schema.Maintenance
	raw, err := schema.ReadRow(ctx, r, schema.KeyMaintenance, &row)
	if err != nil {
		return nil, fmt.Errorf("row of who maintains the volume: %w", err)
	}
	if raw == nil {
		return nil, nil
	}
	m := &memberRow{id: row.ID, raw: raw, Member: schema.Member{Program: row.Program, Host: row.Host, Started: row.Started, Lease: row.Lease}}
	m.beat, err = schema.FindRow(ctx, r, schema.BeatKey(row.ID))
	return m, err
}

// maintained says why the volume cannot be used.
func maintained(m *memberRow) error {
	return fmt.Errorf("%s, on %s, has had the volume to itself since %s: wait until it has ended, or stop it",
		m.Program, m.Host, time.Unix(0, m.Started).Format(time.DateTime))
}

// awaitMaintenance returns when nobody maintains the volume, or with the row of one who is dead. The error says that somebody lives who does.
func (n *Node) awaitMaintenance(ctx context.Context) (dead *memberRow, err error) {
	for w := newWatch(MaintenanceLease); ; {
		began := n.cfg.Clock()
		snap, err := n.cfg.Engine.Snapshot(ctx) // as the row and the beat belong together
		if err != nil {
			return nil, err
		}
		m, err := readMaintainer(ctx, snap)
		snap.Close()
		if m == nil || err != nil {
			return nil, err
		}
		living, dead := w.look([]memberRow{*m}, memberID{}, began, n.cfg.Clock())
		switch {
		case len(living) > 0:
			return nil, maintained(m)
		case len(dead) > 0:
			return dead[0], nil
		}
		if err := retry.Pause(ctx, n.cfg.Lease/20); err != nil {
			return nil, err
		}
	}
}
