package catalogtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

// model is what the rows should be.
type model map[string][]byte

// enough is after what time the steps are enough, if they are so many.
func enough() (time.Duration, int) {
	if testing.Short() {
		return time.Second, 300
	}
	return 15 * time.Second, 2000
}

// runModel does random things to an engine and to a model, and compares every answer. It reopens the catalog after
// every reopenEvery steps, never if that is 0, and closes it at the end.
func runModel(t *testing.T, open func() catalog.Engine, steps, reopenEvery int) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := &modelRun{
		ctx: background(t), rng: rand.New(rand.NewPCG(seed, 0)), engine: open(),
		rows: model{}, snapshots: map[catalog.Snapshot]model{},
	}
	begin := time.Now()
	modelFor, fewSteps := enough()
	for step := range steps {
		if step >= fewSteps && time.Since(begin) > modelFor {
			t.Logf("%d steps of %d", step, steps)
			break
		}
		if reopenEvery > 0 && step%reopenEvery == reopenEvery-1 {
			r.dropSnapshots(t)
			if err := r.engine.Close(); err != nil {
				t.Fatalf("step %d: close: %v", step, err)
			}
			r.engine = open()
			r.check(t, step, compareScan(r.ctx, r.engine, r.rows, "", "", catalog.ScanOptions{}))
		}
		r.check(t, step, r.step())
	}
	for snap, rows := range r.snapshots {
		r.check(t, steps, compareScan(r.ctx, snap, rows, "", "", catalog.ScanOptions{}))
	}
	r.dropSnapshots(t)
	r.check(t, steps, compareScan(r.ctx, r.engine, r.rows, "", "", catalog.ScanOptions{}))
	if err := r.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

type modelRun struct {
	ctx       context.Context
	rng       *rand.Rand
	engine    catalog.Engine
	rows      model
	snapshots map[catalog.Snapshot]model
}

func (r *modelRun) check(t *testing.T, step int, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("step %d: %v", step, err)
	}
}

func (r *modelRun) dropSnapshots(t *testing.T) {
	for snap := range r.snapshots {
		if err := snap.Close(); err != nil {
			t.Fatal(err)
		}
	}
	clear(r.snapshots)
}

// key returns a key of a space small enough for keys to meet: some are prefixes of others, some hold counters.
func (r *modelRun) key() []byte {
	key := fmt.Appendf(nil, "%c", "abc\xff"[r.rng.IntN(4)])
	for range r.rng.IntN(4) {
		key = append(key, "\x00xyz"[r.rng.IntN(4)])
	}
	return key
}

// counterKey returns a key that only counters are put to.
func (r *modelRun) counterKey() []byte { return fmt.Appendf(nil, "counter/%d", r.rng.IntN(8)) }

func (r *modelRun) value() []byte { return bytes.Repeat([]byte{byte(r.rng.Uint32())}, r.rng.IntN(40)) }

func (r *modelRun) step() error {
	switch n := r.rng.IntN(100); {
	case n < 60:
		return r.commit()
	case n < 70:
		return compareGets(r.ctx, r.engine, r.rows, [][]byte{r.key(), r.counterKey(), r.key()})
	case n < 85:
		return r.scan(r.engine, r.rows)
	case n < 90 && len(r.snapshots) < 4:
		snap, err := r.engine.Snapshot(r.ctx)
		if err != nil {
			return err
		}
		r.snapshots[snap] = maps.Clone(r.rows)
		return nil
	}
	for snap, rows := range r.snapshots {
		if err := compareGets(r.ctx, snap, rows, [][]byte{r.key(), r.counterKey(), r.key()}); err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
		if err := r.scan(snap, rows); err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
		if r.rng.IntN(8) == 0 {
			delete(r.snapshots, snap)
			return snap.Close()
		}
		break
	}
	return nil
}

// commit builds a random batch whose guards mostly hold, and checks which one does not.
func (r *modelRun) commit() error {
	b := &catalog.Batch{Durability: catalog.NoSync}
	if r.rng.IntN(50) == 0 {
		b.Durability = catalog.Sync
	}
	want := -1
	for range r.rng.IntN(3) {
		index, holds := r.guard(b)
		if !holds && want < 0 {
			want = index
		}
	}
	touched := map[string]bool{}
	for range r.rng.IntN(4) {
		key, value := r.key(), r.value()
		if r.rng.IntN(4) == 0 {
			key, value = r.counterKey(), catalog.EncodeCounters(r.rng.Int64N(100), r.rng.Int64N(100))
		}
		if touched[string(key)] {
			continue
		}
		touched[string(key)] = true
		if r.rng.IntN(3) == 0 {
			b.Delete(key)
		} else {
			b.Put(key, value)
		}
	}
	for range r.rng.IntN(4) {
		if r.rng.IntN(2) == 0 {
			b.Add(r.counterKey(), r.rng.IntN(3), r.rng.Int64N(21)-10)
		} else {
			b.Max(r.counterKey(), r.rng.IntN(3), r.rng.Int64N(200))
		}
	}
	err := commit(r.ctx, r.engine, b)
	if want >= 0 {
		var guard *catalog.GuardError
		if !errors.As(err, &guard) || guard.Index != want {
			return fmt.Errorf("commit with guards %v: %w, want guard %d", b.Guards, err, want)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("commit with guards %v: %w", b.Guards, err)
	}
	for _, row := range b.Puts {
		r.rows[string(row.Key)] = row.Value
	}
	for _, key := range b.Deletes {
		delete(r.rows, string(key))
	}
	for _, d := range b.Deltas {
		fields, err := catalog.DecodeCounters(r.rows[string(d.Key)])
		if err != nil {
			return err
		}
		r.rows[string(d.Key)] = catalog.EncodeCounters(d.Apply(fields)...)
	}
	return nil
}

// guard adds a random guard, and reports whether it should hold.
func (r *modelRun) guard(b *catalog.Batch) (index int, holds bool) {
	key := r.key()
	if r.rng.IntN(3) == 0 {
		key = r.counterKey()
	}
	value, there := r.rows[string(key)]
	wrong := r.rng.IntN(8) == 0
	switch {
	case r.rng.IntN(3) == 0:
		end := catalog.PrefixEnd(key)
		empty := true
		for other := range r.rows {
			if other >= string(key) && (end == nil || other < string(end)) {
				empty = false
			}
		}
		if !empty && !wrong {
			return b.GuardAbsent([]byte("nobody puts this")), true
		}
		return b.GuardRangeEmpty(key, end), empty
	case there && wrong:
		return b.GuardAbsent(key), false
	case there && r.rng.IntN(2) == 0:
		return b.GuardPresent(key), true
	case there:
		return b.GuardEqual(key, value), true
	case wrong && r.rng.IntN(2) == 0:
		return b.GuardEqual(key, r.value()), false
	case wrong:
		return b.GuardPresent(key), false
	}
	return b.GuardAbsent(key), true
}

func (r *modelRun) scan(reader catalog.Reader, rows model) error {
	from, to := "", ""
	if r.rng.IntN(4) > 0 {
		from = string(r.key())
	}
	if r.rng.IntN(4) > 0 {
		to = string(r.key())
	}
	return compareScan(r.ctx, reader, rows, from, to, catalog.ScanOptions{
		Limit: r.rng.IntN(6), Reverse: r.rng.IntN(2) == 0, KeysOnly: r.rng.IntN(4) == 0,
	})
}

func compareGets(ctx context.Context, r catalog.Reader, rows model, keys [][]byte) error {
	values, err := r.GetMany(ctx, keys)
	if err != nil {
		return err
	}
	for i, key := range keys {
		want, there := rows[string(key)]
		if (values[i] != nil) != there || !bytes.Equal(values[i], want) {
			return fmt.Errorf("get many: %q is %q, want %q", key, values[i], want)
		}
		value, err := r.Get(ctx, key)
		if there != (err == nil) || !there && !errors.Is(err, catalog.ErrNotFound) || !bytes.Equal(value, want) {
			return fmt.Errorf("get: %q is %q, %w, want %q", key, value, err, want)
		}
	}
	return nil
}

func compareScan(ctx context.Context, r catalog.Reader, rows model, from, to string, opts catalog.ScanOptions) error {
	keys := slices.DeleteFunc(slices.Sorted(maps.Keys(rows)), func(key string) bool {
		return key < from || to != "" && key >= to
	})
	if opts.Reverse {
		slices.Reverse(keys)
	}
	if opts.Limit > 0 {
		keys = keys[:min(opts.Limit, len(keys))]
	}
	fail := func(format string, args ...any) error {
		return fmt.Errorf("scan %q to %q, %+v: "+format, append([]any{from, to, opts}, args...)...)
	}
	n := 0
	for row, err := range r.Scan(ctx, []byte(from), []byte(to), opts) {
		switch {
		case err != nil:
			return fail("%w", err)
		case n == len(keys):
			return fail("%q came after the %d rows wanted", row.Key, n)
		case string(row.Key) != keys[n]:
			return fail("row %d is %q, want %q", n, row.Key, keys[n])
		case !opts.KeysOnly && !bytes.Equal(row.Value, rows[keys[n]]):
			return fail("%q has %q, want %q", row.Key, row.Value, rows[keys[n]])
		}
		n++
	}
	if n != len(keys) {
		return fail("%d rows, want %s", n, strings.Join(keys, " "))
	}
	return nil
}
