package catalogtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

// Run checks that engines behave as package catalog says. Each call of open returns a new empty catalog; the suite
// closes it.
func Run(t *testing.T, open func(t *testing.T) catalog.Engine) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, catalog.Engine)
	}{
		{"Get", testGet},
		{"GetMany", testGetMany},
		{"Guards", testGuards},
		{"FirstGuardReported", testFirstGuard},
		{"NothingApplied", testNothingApplied},
		{"GuardsSeeStateBefore", testGuardsSeeStateBefore},
		{"OrderInBatch", testOrderInBatch},
		{"InvalidBatches", testInvalid},
		{"Limits", testLimits},
		{"BuffersAreCopied", testBuffers},
		{"EmptyBatch", testEmptyBatch},
		{"Counters", testCounters},
		{"CountersMisused", testCountersMisused},
		{"Scan", testScan},
		{"ScanResumes", testScanResumes},
		{"ScanBody", testScanBody},
		{"ScanWhileRowsComeAndGo", testScanChurn},
		{"Snapshot", testSnapshot},
		{"SnapshotWhileCommitting", testSnapshotChurn},
		{"Context", testContext},
		{"CompareAndSwapCounter", testCompareAndSwap},
		{"BankTransfers", testBank},
		{"CreateAgainstRmdir", testRmdir},
		{"WriteSkew", testWriteSkew},
		{"RealTime", testRealTime},
		{"SerialOrder", testSerialOrder},
		{"ConcurrentDeltas", testConcurrentDeltas},
		{"DeltaOrder", testDeltaOrder},
		{"ManyDeltas", testManyDeltas},
		{"DeltasAgainstGuards", testDeltasAgainstGuards},
		{"GuardedDeltas", testGuardedDeltas},
		{"OverlappingBatches", testOverlapping},
		{"Model", func(t *testing.T, e catalog.Engine) { runModel(t, func() catalog.Engine { return e }, 20000, 0) }},
		{"CloseWhileBusy", testCloseWhileBusy},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := open(t)
			t.Cleanup(func() {
				if err := e.Close(); err != nil && !errors.Is(err, catalog.ErrClosed) {
					t.Errorf("close: %v", err)
				}
			})
			c.run(t, e)
		})
	}
	t.Run("Closed", func(t *testing.T) { testClosed(t, open(t)) })
}

// RunReopen checks that what was committed is there after Close. Each call of place returns a function that opens
// one and the same catalog, which is empty at first; it is called again only after Close.
func RunReopen(t *testing.T, place func(t *testing.T) (open func() catalog.Engine)) {
	t.Run("Durability", func(t *testing.T) { testReopen(t, place(t)) })
	t.Run("Model", func(t *testing.T) { runModel(t, place(t), 20000, 1500) })
}

// limit bounds each wait of the suite; reaching it is a failure.
const limit = 10 * time.Minute

// background returns a context that ends with the test, or at the suite's limit.
func background(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// commit commits b, again after each ErrConflict. It may be called from any goroutine.
func commit(ctx context.Context, e catalog.Engine, b *catalog.Batch) error {
	for {
		err := e.Commit(ctx, b)
		if !errors.Is(err, catalog.ErrConflict) {
			return err
		}
	}
}

func mustCommit(t *testing.T, e catalog.Engine, b *catalog.Batch) {
	t.Helper()
	if err := commit(background(t), e, b); err != nil {
		t.Fatalf("commit: %v", err)
	}
}

// batch returns a batch that calls build.
func batch(build func(b *catalog.Batch)) *catalog.Batch {
	b := new(catalog.Batch)
	build(b)
	return b
}

// put commits rows given as key, value, key, value.
func put(t *testing.T, e catalog.Engine, rows ...string) {
	t.Helper()
	mustCommit(t, e, batch(func(b *catalog.Batch) {
		for i := 0; i < len(rows); i += 2 {
			b.Put([]byte(rows[i]), []byte(rows[i+1]))
		}
	}))
}

// contents returns all rows as "key=value key=value".
func contents(t *testing.T, r catalog.Reader) string {
	t.Helper()
	return scan(t, r, "", "", catalog.ScanOptions{})
}

// scan returns the rows of a range as "key=value key=value", or "key key" if only keys are asked for.
func scan(t *testing.T, r catalog.Reader, from, to string, opts catalog.ScanOptions) string {
	t.Helper()
	var rows []string
	for row, err := range r.Scan(background(t), []byte(from), []byte(to), opts) {
		if err != nil {
			t.Fatalf("scan %q to %q: %v", from, to, err)
		}
		switch {
		case opts.KeysOnly && row.Value != nil:
			t.Fatalf("scan of keys only yielded the value %q", row.Value)
		case opts.KeysOnly:
			rows = append(rows, string(row.Key))
		default:
			rows = append(rows, fmt.Sprintf("%s=%s", row.Key, row.Value))
		}
	}
	return strings.Join(rows, " ")
}

func wantContents(t *testing.T, r catalog.Reader, want string) {
	t.Helper()
	if got := contents(t, r); got != want {
		t.Fatalf("rows are %q, want %q", got, want)
	}
}

// wantGuard fails unless err says that guard index did not hold.
func wantGuard(t *testing.T, err error, index int) {
	t.Helper()
	var guard *catalog.GuardError
	if !errors.As(err, &guard) {
		t.Fatalf("got %v, want a GuardError", err)
	}
	if guard.Index != index {
		t.Fatalf("got %v, want guard %d", err, index)
	}
}

// counters returns the fields of a counter row, none if it is absent.
func counters(t *testing.T, r catalog.Reader, key string) catalog.Counters {
	t.Helper()
	value, err := r.Get(background(t), []byte(key))
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		t.Fatalf("get %q: %v", key, err)
	}
	fields, err := catalog.DecodeCounters(value)
	if err != nil {
		t.Fatalf("counters %q: %v", key, err)
	}
	return fields
}

func wantCounters(t *testing.T, r catalog.Reader, key string, want ...int64) {
	t.Helper()
	value, err := r.Get(background(t), []byte(key))
	if err != nil {
		t.Fatalf("get %q: %v", key, err)
	}
	if !bytes.Equal(value, catalog.EncodeCounters(want...)) {
		t.Fatalf("counters %q are %x, want %d", key, value, want)
	}
}
