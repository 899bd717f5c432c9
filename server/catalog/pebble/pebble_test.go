package pebble

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/faultytest"
)

// testConfig is a catalog with tables so small that flushes and compactions happen in a short test.
func testConfig(t testing.TB, dir string) Config {
	return Config{
		Dir: dir, MemTableBytes: minMemTableBytes, CacheBytes: 1 << 20,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Fatal:  func(err error) { t.Errorf("fatal: %v", err) },
	}
}

func mustOpen(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestContract(t *testing.T) {
	t.Parallel()
	catalogtest.Run(t, func(t *testing.T) catalog.Engine { return mustOpen(t, testConfig(t, t.TempDir())) })
}

// TestContractDefaults runs with the sizes that users get, so that everything stays in one memtable, and without waiting
// for a disk, so that commits follow one another closely.
func TestContractDefaults(t *testing.T) {
	t.Parallel()
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		cfg := testConfig(t, "catalog")
		cfg.fs = vfs.NewMem()
		cfg.MemTableBytes, cfg.CacheBytes = 0, 0
		return mustOpen(t, cfg)
	})
}

// TestContractWithFaults waits for no disk either.
func TestContractWithFaults(t *testing.T) {
	t.Parallel()
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		cfg := testConfig(t, "catalog")
		cfg.fs = vfs.NewMem()
		return catalogtest.Resolve(faultytest.New(mustOpen(t, cfg), faultytest.Config{
			Seed: 1, Conflict: 0.02, Lost: 0.02, Applied: 0.02, Late: 0.02,
		}))
	})
}

func TestReopen(t *testing.T) {
	t.Parallel()
	catalogtest.RunReopen(t, func(t *testing.T) func() catalog.Engine {
		dir := filepath.Join(t.TempDir(), "catalog")
		return func() catalog.Engine { return mustOpen(t, testConfig(t, dir)) }
	})
}

// TestCommitGivesUpWaiting cancels commits that wait for a latch or for a range: they have no effect, and nobody waits
// for them afterwards.
func TestCommitGivesUpWaiting(t *testing.T) {
	e := mustOpen(t, testConfig(t, t.TempDir()))
	key := []byte("d/key")
	write := &catalog.Batch{Puts: []catalog.Row{{Key: key}}}
	guard := new(catalog.Batch)
	guard.GuardRangeEmpty([]byte("d/"), []byte("d0"))
	guard.Put([]byte("other"), nil)

	latched := []claim{e.latches.claim(key, exclusive)}
	var ranged rangeEntry
	for name, block := range map[string]struct {
		hold, release func()
		commit        *catalog.Batch
	}{
		"latch": {
			func() {
				if err := e.latches.acquire(t.Context(), latched); err != nil {
					t.Fatal(err)
				}
			},
			func() { e.latches.release(latched) }, write,
		},
		"range": {
			func() {
				if err := e.ranges.acquire(t.Context(), &ranged, write); err != nil {
					t.Fatal(err)
				}
			},
			func() { e.ranges.release(&ranged) }, guard,
		},
	} {
		block.hold()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := e.Commit(ctx, block.commit); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
		block.release()
		for row, err := range e.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
			t.Errorf("%s: %q was written, %v", name, row.Key, err)
		}
		if len(e.ranges.entries) != 0 {
			t.Errorf("%s: a range entry is left", name)
		}
	}
	for _, b := range []*catalog.Batch{guard, write} {
		if err := e.Commit(t.Context(), b); err != nil {
			t.Error(err)
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestHotKeysShareSyncs has many callers commit to one counter row under one guarded key. If they waited for the disk
// one after the other there would be a sync for each.
func TestHotKeysShareSyncs(t *testing.T) {
	syncs := new(atomic.Int64)
	cfg := testConfig(t, "catalog")
	cfg.MemTableBytes = 4 << 20
	cfg.fs = errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSyncData && strings.HasSuffix(op.Path, ".log") {
			syncs.Add(1)
			time.Sleep(2 * time.Millisecond) // a slow disk
		}
		return nil
	}))
	e := mustOpen(t, cfg)
	dir := []byte("dir")
	if err := e.Commit(t.Context(), &catalog.Batch{Puts: []catalog.Row{{Key: dir}}}); err != nil {
		t.Fatal(err)
	}
	syncs.Store(0)
	const callers, rounds = 32, 20
	var group sync.WaitGroup
	for range callers {
		group.Go(func() {
			for range rounds {
				b := new(catalog.Batch)
				b.GuardPresent(dir)
				b.Add([]byte("counts"), 0, 1)
				if err := e.Commit(t.Context(), b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	n := syncs.Load()
	t.Logf("%d commits took %d syncs", callers*rounds, n)
	if n == 0 || n > callers*rounds/4 {
		t.Errorf("%d commits took %d syncs", callers*rounds, n)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestBarrier checks that a commit without changes waits until all that can be seen is durable, and for nothing if it is.
func TestBarrier(t *testing.T) {
	var syncs atomic.Int64
	begun, end := make(chan bool), make(chan bool)
	var slow atomic.Bool
	cfg := testConfig(t, "catalog")
	cfg.fs = errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSyncData && strings.HasSuffix(op.Path, ".log") {
			syncs.Add(1)
			if slow.CompareAndSwap(true, false) {
				begun <- true
				<-end
			}
		}
		return nil
	}))
	e := mustOpen(t, cfg)
	put := func(key string, d catalog.Durability) error {
		b := &catalog.Batch{Durability: d}
		b.Put([]byte(key), nil)
		return e.Commit(t.Context(), b)
	}
	barriers := map[string]func() error{
		"empty": func() error { return e.Commit(t.Context(), new(catalog.Batch)) },
		"guard that holds": func() error {
			b := new(catalog.Batch)
			b.GuardAbsent([]byte("nobody puts this"))
			return e.Commit(t.Context(), b)
		},
		"guard that does not hold": func() error {
			b := new(catalog.Batch)
			b.GuardPresent([]byte("nobody puts this"))
			var guard *catalog.GuardError
			if err := e.Commit(t.Context(), b); !errors.As(err, &guard) {
				return fmt.Errorf("no GuardError: %w", err)
			}
			return nil
		},
	}
	for name, barrier := range barriers {
		syncsOf := func(f func() error) int64 {
			n := syncs.Load()
			if err := f(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			return syncs.Load() - n
		}
		if n := syncsOf(func() error { return put("a", catalog.Sync) }); n == 0 {
			t.Errorf("%s: a commit without a sync", name)
		}
		if n := syncsOf(barrier); n != 0 {
			t.Errorf("%s: %d syncs when all is durable", name, n)
		}
		syncsOf(func() error { return errors.Join(put("b", catalog.NoSync), put("c", catalog.NoSync)) })
		if n := syncsOf(barrier); n == 0 {
			t.Errorf("%s: no sync behind commits with NoSync", name)
		}
		if n := syncsOf(barrier); n != 0 {
			t.Errorf("%s: %d syncs after a barrier", name, n)
		}
		slow.Store(true)
		var group sync.WaitGroup
		group.Go(func() { syncsOf(func() error { return put(name, catalog.Sync) }) })
		<-begun
		for {
			if _, err := e.Get(t.Context(), []byte(name)); err == nil {
				break // it can be seen before it is durable
			}
			runtime.Gosched()
		}
		returned := make(chan bool)
		var durable atomic.Bool
		group.Go(func() {
			syncsOf(barrier)
			if !durable.Load() {
				t.Errorf("%s: returned before what can be seen was durable", name)
			}
			close(returned)
		})
		for e.pending.Load() < 2 { // the barrier has looked
			select {
			case <-returned:
				t.Fatalf("%s: did not wait", name)
			default:
				runtime.Gosched()
			}
		}
		durable.Store(true)
		end <- true
		group.Wait()
	}
	if n := e.pending.Load(); n != 0 {
		t.Errorf("%d commits count as pending", n)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}
