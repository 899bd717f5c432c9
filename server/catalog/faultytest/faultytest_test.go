package faultytest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/faultytest"
	"github.com/weftfs/weft/server/catalog/memorytest"
)

// TestContract holds for an engine with faults once its callers find out about unknown outcomes.
func TestContract(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	catalogtest.Run(t, func(*testing.T) catalog.Engine {
		return catalogtest.Resolve(faultytest.New(memorytest.New(), faultytest.Config{
			Seed: seed, Delay: 20 * time.Microsecond,
			Conflict: 0.05, Lost: 0.03, Applied: 0.03, Late: 0.03, Slow: 0.01,
			LateBy: time.Millisecond, SlowBy: time.Millisecond,
		}))
	})
}

func TestSnapshotsExpire(t *testing.T) {
	catalogtest.RunExpiry(t, func(*testing.T) catalog.Engine {
		return faultytest.New(memorytest.New(), faultytest.Config{Seed: 1, SnapshotReads: 100})
	})
}

// TestFaults looks at each fault by itself.
func TestFaults(t *testing.T) {
	for name, c := range map[string]struct {
		cfg     faultytest.Config
		want    error
		applied bool
	}{
		"conflict": {faultytest.Config{Conflict: 1}, catalog.ErrConflict, false},
		"lost":     {faultytest.Config{Lost: 1}, catalog.ErrUnknown, false},
		"applied":  {faultytest.Config{Applied: 1}, catalog.ErrUnknown, true},
		"late":     {faultytest.Config{Late: 1, LateBy: time.Millisecond}, catalog.ErrUnknown, true},
		"slow":     {faultytest.Config{Slow: 1, SlowBy: time.Millisecond}, nil, true},
		"none":     {faultytest.Config{}, nil, true},
	} {
		inner := memorytest.New()
		e := faultytest.New(keepOpen{inner}, c.cfg)
		b := new(catalog.Batch)
		b.Put([]byte("key"), []byte("value"))
		if err := e.Commit(t.Context(), b); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
		b.Puts[0].Value = []byte("changed after the call")
		if err := e.Close(); err != nil { // waits for late commits
			t.Errorf("%s: close: %v", name, err)
		}
		got, err := inner.Get(t.Context(), []byte("key"))
		if (err == nil) != c.applied || c.applied && string(got) != "value" {
			t.Errorf("%s: afterwards %q, %v", name, got, err)
		}
	}
}

// keepOpen is not closed with the engine around it.
type keepOpen struct{ catalog.Engine }

func (keepOpen) Close() error { return nil }

// TestFindOut commits batches that are guarded by the row which they put, and finds out of each what became of it: what was not applied then is
// not applied later.
func TestFindOut(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	inner := memorytest.New()
	e := faultytest.New(keepOpen{inner}, faultytest.Config{
		Seed: seed, Conflict: 0.1, Lost: 0.2, Applied: 0.2, Late: 0.2, LateBy: 5 * time.Millisecond,
	})
	var group sync.WaitGroup
	var unknown, refused atomic.Int64
	for w := range 8 {
		group.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			own, shared := fmt.Appendf(nil, "own/%d", w), []byte("shared")
			for range 100 {
				// The shared row is what the workers get in each other's way by.
				values, err := e.GetMany(t.Context(), [][]byte{own, shared})
				if err != nil {
					t.Error(err)
					return
				}
				var b catalog.Batch
				for i, key := range [][]byte{own, shared} {
					if values[i] == nil {
						b.GuardAbsent(key)
					} else {
						b.GuardEqual(key, values[i])
					}
				}
				b.Put(own, fmt.Appendf(nil, "%d", rng.Int64()))
				b.Put(shared, fmt.Appendf(nil, "%d", rng.Int64()))
				b.Add(fmt.Appendf(nil, "count/%d", w), 0, 1)
				err = e.Commit(t.Context(), &b)
				if errors.Is(err, catalog.ErrUnknown) {
					unknown.Add(1)
					err = catalog.FindOut(t.Context(), e, &b)
				}
				now, getErr := e.Get(t.Context(), own)
				if getErr != nil && !errors.Is(getErr, catalog.ErrNotFound) {
					t.Error(getErr)
					return
				}
				guard := (*catalog.GuardError)(nil)
				switch {
				case err == nil && string(now) != string(b.Puts[0].Value):
					t.Errorf("worker %d: found to be committed: the row is %q, not %q", w, now, b.Puts[0].Value)
				case errors.As(err, &guard):
					// Somebody may have changed the shared row after it: it counts as refused, and is there.
					refused.Add(1)
				case err != nil && !errors.Is(err, catalog.ErrConflict):
					t.Errorf("worker %d: %v", w, err)
				}
			}
		})
	}
	group.Wait()
	before := rowsOf(t, inner)
	if err := e.Close(); err != nil { // waits for late commits
		t.Fatal(err)
	}
	if after := rowsOf(t, inner); !maps.Equal(before, after) {
		t.Errorf("after all outcomes were known the rows changed from %q to %q", before, after)
	}
	if unknown.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d outcomes unknown, %d commits refused", unknown.Load(), refused.Load())
	}
}

func rowsOf(t *testing.T, e catalog.Engine) map[string]string {
	t.Helper()
	rows := map[string]string{}
	for row, err := range e.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		rows[string(row.Key)] = string(row.Value)
	}
	return rows
}

// TestFindOutEnds has FindOut say that it does not know when it cannot.
func TestFindOutEnds(t *testing.T) {
	e := faultytest.New(memorytest.New(), faultytest.Config{Lost: 1})
	b := new(catalog.Batch)
	b.Put([]byte("key"), nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := catalog.FindOut(ctx, e, b); !errors.Is(err, catalog.ErrUnknown) || !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := catalog.FindOut(t.Context(), memoryClosed(t), b); !errors.Is(err, catalog.ErrUnknown) || !errors.Is(err, catalog.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

func memoryClosed(t *testing.T) catalog.Engine {
	e := memorytest.New()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return e
}
