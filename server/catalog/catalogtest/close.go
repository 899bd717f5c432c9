package catalogtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/server/catalog"
)

func testClosed(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	put(t, e, "a", "1")
	snap, err := e.Snapshot(ctx)
	if err != nil {
		t.Fatal(err)
	}
	later := e.Scan(ctx, nil, nil, catalog.ScanOptions{})
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	check := func(name string, err error) {
		if !errors.Is(err, catalog.ErrClosed) {
			t.Errorf("%s: got %v, want ErrClosed", name, err)
		}
	}
	check("close", e.Close())
	check("commit", e.Commit(ctx, batch(func(b *catalog.Batch) { b.Put([]byte("b"), nil) })))
	_, err = e.Snapshot(ctx)
	check("snapshot", err)
	for name, r := range map[string]catalog.Reader{"engine": e, "snapshot": snap} {
		_, err = r.Get(ctx, []byte("a"))
		check(name+" get", err)
		_, err = r.GetMany(ctx, [][]byte{[]byte("a")})
		check(name+" get many", err)
		err = nil
		for _, err = range r.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
			break
		}
		check(name+" scan", err)
	}
	for _, err = range later {
		break
	}
	check("a scan made before", err)
	if err := snap.Close(); err != nil {
		t.Errorf("closing a snapshot of a closed catalog: %v", err)
	}
	if e.Caps() == (catalog.Caps{}) {
		t.Error("no caps")
	}
}

// testCloseWhileBusy closes while everything is in use: each call succeeds or says ErrClosed, and none hangs.
func testCloseWhileBusy(t *testing.T, e catalog.Engine) {
	ctx := background(t)
	var busy atomic.Int32
	started := make(chan struct{})
	parallel(t, 9, func(i int, rng *rand.Rand) error {
		if i == 8 {
			<-started
			return e.Close()
		}
		for n := 0; ; n++ {
			if n == 5 && busy.Add(1) == 8 {
				close(started)
			}
			if err := useOnce(ctx, e, i, n); err != nil {
				if errors.Is(err, catalog.ErrClosed) {
					return nil
				}
				return err
			}
		}
	})
}

// useOnce does one thing of each kind.
func useOnce(ctx context.Context, e catalog.Engine, worker, n int) error {
	b := &catalog.Batch{Durability: durability(n)}
	key := fmt.Appendf(nil, "%d/%d", worker, n%20)
	b.Put(key, key)
	b.GuardRangeEmpty([]byte("x"), nil)
	if err := commit(ctx, e, b); err != nil {
		return err
	}
	snap, err := e.Snapshot(ctx)
	if err != nil {
		return err
	}
	for _, r := range []catalog.Reader{e, snap} {
		for row, err := range r.Scan(ctx, nil, nil, catalog.ScanOptions{Limit: 20}) {
			if err != nil {
				return err
			}
			if _, err := e.Get(ctx, row.Key); err != nil {
				return err
			}
		}
	}
	if worker%2 == 0 && n < 2 {
		return nil // left open for Engine.Close
	}
	return snap.Close()
}

// testReopen commits with both durability classes, closes, and looks again.
func testReopen(t *testing.T, open func() catalog.Engine) {
	e := open()
	put(t, e, "sync", "1")
	mustCommit(t, e, batch(func(b *catalog.Batch) { b.Add([]byte("counter"), 0, 3); b.Max([]byte("counter"), 1, 9) }))
	lazy := batch(func(b *catalog.Batch) { b.Put([]byte("lazy"), []byte("2")); b.Add([]byte("counter"), 0, 4) })
	lazy.Durability = catalog.NoSync
	mustCommit(t, e, lazy)
	wantGuard(t, commit(background(t), e, batch(func(b *catalog.Batch) { b.GuardAbsent([]byte("lazy")) })), 0)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	want := "counter=" + string(catalog.EncodeCounters(7, 9)) + " lazy=2 sync=1"
	for range 3 {
		e = open()
		wantContents(t, e, want)
		mustCommit(t, e, new(catalog.Batch))
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
