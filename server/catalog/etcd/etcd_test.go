package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
	"github.com/weftfs/weft/server/catalog/faultytest"
)

// places returns a function that gives a place for a new catalog each time, all in one cluster: the one that the environment
// variable WEFT_TEST_ETCD names by its URL, or else one of three members started for the test.
func places(t testing.TB) func() Config {
	t.Helper()
	url := os.Getenv("WEFT_TEST_ETCD")
	if url == "" {
		url = etcdserver.Start(t, 3).URL("/test")
	}
	return func() Config { return configOf(t, url) }
}

var lastPrefix atomic.Int64

func configOf(t testing.TB, url string) Config {
	t.Helper()
	cfg, err := ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Prefix += fmt.Sprintf("/%d-%d", os.Getpid(), lastPrefix.Add(1))
	cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	return cfg
}

func mustOpen(t testing.TB, cfg Config) *Engine {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	e, err := Open(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func mustClose(t testing.TB, e *Engine) {
	t.Helper()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

func mustCommit(t testing.TB, e *Engine, build func(b *catalog.Batch)) {
	t.Helper()
	b := new(catalog.Batch)
	build(b)
	if err := e.Commit(t.Context(), b); err != nil {
		t.Fatal(err)
	}
}

func counter(t testing.TB, r catalog.Reader, key string) int64 {
	t.Helper()
	value, err := r.Get(t.Context(), []byte(key))
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		t.Fatal(err)
	}
	fields, err := catalog.DecodeCounters(value)
	if err != nil {
		t.Fatal(err)
	}
	return fields.Field(0)
}

func TestContract(t *testing.T) {
	t.Parallel()
	place := places(t)
	catalogtest.Run(t, func(t *testing.T) catalog.Engine { return mustOpen(t, place()) })
}

// TestContractSpread has each call of the suite made by another one of three engines of a catalog, as by several processes.
func TestContractSpread(t *testing.T) {
	t.Parallel()
	place := places(t)
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		cfg := place()
		return catalogtest.Spread(mustOpen(t, cfg), mustOpen(t, cfg), mustOpen(t, cfg))
	})
}

func TestContractWithFaults(t *testing.T) {
	t.Parallel()
	place := places(t)
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		return catalogtest.Resolve(faultytest.New(mustOpen(t, place()), faultytest.Config{
			Seed: 1, Conflict: 0.02, Lost: 0.02, Applied: 0.02, Late: 0.02,
		}))
	})
}

func TestSnapshotsExpire(t *testing.T) {
	t.Parallel()
	place := places(t)
	catalogtest.RunExpiry(t, func(t *testing.T) catalog.Engine { return mustOpen(t, place()) })
}

func TestReopen(t *testing.T) {
	t.Parallel()
	place := places(t)
	catalogtest.RunReopen(t, func(t *testing.T) func() catalog.Engine {
		cfg := place()
		return func() catalog.Engine { return mustOpen(t, cfg) }
	})
}

// TestPlaces opens what is a catalog and what is not.
func TestPlaces(t *testing.T) {
	t.Parallel()
	cfg := places(t)()
	e := mustOpen(t, cfg)
	defer mustClose(t, e)
	raw := func(key, value string) {
		t.Helper()
		if _, err := e.cluster.txn(t.Context(), 0, &pb.TxnRequest{Success: []*pb.RequestOp{opPut([]byte(key), []byte(value))}}); err != nil {
			t.Fatal(err)
		}
	}
	raw(cfg.Prefix+"-newer/format", "weft catalog 2")
	raw(cfg.Prefix+"-other/something", "")
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   error
	}{
		{"the same", func(*Config) {}, nil},
		{"must exist", func(c *Config) { c.MustExist = true }, nil},
		{"none", func(c *Config) { c.Prefix += "-none"; c.MustExist = true }, catalog.ErrNoCatalog},
		{"newer", func(c *Config) { c.Prefix += "-newer" }, catalog.ErrNotCatalog},
		{"not one", func(c *Config) { c.Prefix += "-other" }, catalog.ErrNotCatalog},
		{"more operations than the cluster allows", func(c *Config) { c.MaxTxnOps = 1 << 12 }, catalog.ErrTooLarge},
		{"nobody there", func(c *Config) { c.Endpoints = []string{"127.0.0.1:1"} }, context.DeadlineExceeded},
	} {
		other := cfg
		c.change(&other)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if errors.Is(c.want, context.DeadlineExceeded) {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		}
		second, err := Open(ctx, other)
		cancel()
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err == nil {
			mustClose(t, second)
		} else if !strings.Contains(err.Error(), other.Prefix) {
			t.Errorf("%s: the error does not say where: %v", c.name, err)
		}
	}
}

// TestSeveralEngines has engines of the same catalog, as several processes would, add to the same rows and hand out numbers.
func TestSeveralEngines(t *testing.T) {
	t.Parallel()
	cfg := places(t)()
	var engines []*Engine
	for range 3 {
		e := mustOpen(t, cfg)
		defer mustClose(t, e)
		engines = append(engines, e)
	}
	var group sync.WaitGroup
	var adds, swaps atomic.Int64
	until := time.Now().Add(2 * time.Second)
	for w := range 24 {
		e := engines[w%len(engines)]
		group.Go(func() {
			for i := 0; i < 10 || time.Now().Before(until); i++ {
				b := new(catalog.Batch)
				b.Put(fmt.Appendf(nil, "own/%d/%d", w, i), nil)
				b.Add([]byte("adds"), 0, 1)
				if err := e.Commit(t.Context(), b); err != nil {
					t.Errorf("add: %v", err)
					return
				}
				adds.Add(1)
				old, err := e.Get(t.Context(), []byte("swaps"))
				b.Reset()
				if errors.Is(err, catalog.ErrNotFound) {
					b.GuardAbsent([]byte("swaps"))
				} else if err != nil {
					t.Errorf("get: %v", err)
					return
				} else {
					b.GuardEqual([]byte("swaps"), old)
				}
				fields, _ := catalog.DecodeCounters(old)
				b.Put([]byte("swaps"), catalog.EncodeCounters(fields.Field(0)+1))
				guard := (*catalog.GuardError)(nil)
				if err := e.Commit(t.Context(), b); err == nil {
					swaps.Add(1)
				} else if !errors.As(err, &guard) {
					t.Errorf("swap: %v", err)
					return
				}
			}
		})
	}
	group.Wait()
	for i, e := range engines {
		if n := counter(t, e, "adds"); n != adds.Load() {
			t.Errorf("engine %d: %d were added, %d are there", i, adds.Load(), n)
		}
		if n := counter(t, e, "swaps"); n != swaps.Load() {
			t.Errorf("engine %d: %d were swapped, %d are there", i, swaps.Load(), n)
		}
	}
	t.Logf("%d adds, %d swaps", adds.Load(), swaps.Load())
}

// TestPacking: many callers share transactions, also in one directory.
func TestPacking(t *testing.T) {
	t.Parallel()
	e := mustOpen(t, places(t)())
	defer mustClose(t, e)
	mustCommit(t, e, func(b *catalog.Batch) { b.Put(number('i', 1), nil) })
	const callers, each = 64, 10
	var group sync.WaitGroup
	for w := range uint64(callers) {
		group.Go(func() {
			b := new(catalog.Batch)
			for i := range uint64(each) {
				createBatch(b, 1, 100+w*each+i)
				if err := e.Commit(t.Context(), b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if n := counter(t, e, string(number('c', 1))); n != callers*each {
		t.Errorf("%d files were made, the directory counts %d", callers*each, n)
	}
	if n := e.stamp.number; n > callers*each/4 {
		t.Errorf("%d commits of %d callers took %d transactions", callers*each, callers, n)
	}
}

// TestFirstGuard packs batches that fail together with some that do not, and looks who gets which error.
func TestFirstGuard(t *testing.T) {
	t.Parallel()
	e := mustOpen(t, places(t)())
	defer mustClose(t, e)
	mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("there"), []byte("1")); b.Put([]byte("name"), nil) })
	var group sync.WaitGroup
	for w := range 60 {
		group.Go(func() {
			for i := range 5 {
				b := new(catalog.Batch)
				want := -1
				b.GuardEqual([]byte("there"), []byte("1"))
				switch w % 4 {
				case 1:
					want = b.GuardAbsent([]byte("name"))
				case 2:
					b.GuardPresent([]byte("name"))
					want = b.GuardEqual([]byte("there"), []byte("2"))
				case 3:
					b.GuardRangeEmpty([]byte("there\x00"), nil)
					want = b.GuardRangeEmpty([]byte("n"), []byte("o"))
				}
				b.Put(fmt.Appendf(nil, "a/%d/%d", w, i), nil)
				b.Add([]byte("count"), 0, 1)
				err := e.Commit(t.Context(), b)
				guard := (*catalog.GuardError)(nil)
				if want < 0 && err != nil || want >= 0 && (!errors.As(err, &guard) || guard.Index != want) {
					t.Errorf("caller %d: %v, want guard %d", w, err, want)
				}
			}
		})
	}
	group.Wait()
	if n := counter(t, e, "count"); n != 60/4*5 {
		t.Errorf("%d were applied, want %d", n, 60/4*5)
	}
}

// TestOldRevisions reads snapshots while engines have old revisions dropped, and finds the rows of engines gone that were not
// closed.
func TestOldRevisions(t *testing.T) {
	t.Parallel()
	cfg := configOf(t, etcdserver.Start(t, 1).URL("/test"))
	cfg.Retention = time.Second
	e, second := mustOpen(t, cfg), mustOpen(t, cfg)
	defer mustClose(t, e)
	defer mustClose(t, second)
	put := func(value string) {
		mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("row"), []byte(value)) })
	}
	put("old")
	lost := fmt.Appendf(nil, "%slost", e.keys.stamps)
	if _, err := e.cluster.txn(t.Context(), 0, &pb.TxnRequest{Success: []*pb.RequestOp{opPut(lost, nil)}}); err != nil {
		t.Fatal(err)
	}
	taken := time.Now()
	snap, err := e.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	put("new")
	for {
		value, err := snap.Get(t.Context(), []byte("row"))
		age := time.Since(taken)
		if errors.Is(err, catalog.ErrSnapshotExpired) {
			if age < e.Caps().MaxSnapshotAge {
				t.Errorf("a snapshot expired after %v", age)
			}
			break
		}
		if err != nil || string(value) != "old" {
			t.Fatalf("after %v: %q, %v", age, value, err)
		}
		if age > time.Minute {
			t.Fatalf("a snapshot can be read after %v, and revisions are to be kept for %v", age, cfg.Retention)
		}
		time.Sleep(cfg.Retention / marks)
	}
	for _, err := range snap.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
		if !errors.Is(err, catalog.ErrSnapshotExpired) {
			t.Errorf("scan: %v", err)
		}
	}
	stamps := func() (n int) {
		resp, err := e.cluster.rangeRead(t.Context(), &pb.RangeRequest{
			Key: e.keys.stamps, RangeEnd: catalog.PrefixEnd(e.keys.stamps), CountOnly: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		return int(resp.Count)
	}
	for begin := time.Now(); stamps() > 0; time.Sleep(cfg.Retention / marks) {
		if time.Since(begin) > time.Minute {
			t.Fatalf("%d stamps are left, none has been written for %v", stamps(), time.Since(begin))
		}
	}
	put("with another stamp")
	if n := stamps(); n != 1 {
		t.Errorf("%d stamps, want one", n)
	}
	if value, err := second.Get(t.Context(), []byte("row")); err != nil || string(value) != "with another stamp" {
		t.Errorf("%q, %v", value, err)
	}
}

// TestFull fills a cluster up, and empties it again.
func TestFull(t *testing.T) {
	t.Parallel()
	cluster := etcdserver.Start(t, 1, "--quota-backend-bytes", fmt.Sprint(4<<20))
	e := mustOpen(t, configOf(t, cluster.URL("/test")))
	defer mustClose(t, e)
	value := make([]byte, 128<<10)
	var err error
	n := 0
	for ; err == nil && n < 1000; n++ {
		err = e.Commit(t.Context(), &catalog.Batch{Puts: []catalog.Row{{Key: []byte("row"), Value: value}}})
	}
	if !errors.Is(err, catalog.ErrFull) || errors.Is(err, catalog.ErrUnknown) || !strings.Contains(err.Error(), "alarm disarm") {
		t.Fatalf("after %d puts: %v", n, err)
	}
	if got, err := e.Get(t.Context(), []byte("row")); err != nil || len(got) != len(value) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	m := e.cluster.members[0].client
	resp, err := e.cluster.rangeRead(t.Context(), &pb.RangeRequest{Key: e.keys.format})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Compact(t.Context(), resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Defragment(t.Context(), m.Endpoints()[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := m.AlarmDisarm(t.Context(), &clientv3.AlarmMember{}); err != nil {
		t.Fatal(err)
	}
	mustCommit(t, e, func(b *catalog.Batch) { b.Put([]byte("row"), []byte("short")) })
}
