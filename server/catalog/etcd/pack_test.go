package etcd

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/weftfs/weft/server/catalog"
)

// requestOf returns the request that build makes.
func requestOf(t *testing.T, build func(b *catalog.Batch)) *request {
	b := new(catalog.Batch)
	build(b)
	return newRequest(t.Context(), b, keysBelow("/test"))
}

// TestPackOrder adds a second batch to a pack that changes "there" and "gone", requires "dir", and adds to the counters "sum".
func TestPackOrder(t *testing.T) {
	keys := keysBelow("/test")
	for name, c := range map[string]struct {
		build func(b *catalog.Batch)
		want  verdict
		guard int // the one foreseen to fail, or -1
	}{
		"nothing in common":   {func(b *catalog.Batch) { b.GuardAbsent([]byte("x")); b.Put([]byte("x"), nil) }, added, -1},
		"same row put":        {func(b *catalog.Batch) { b.Put([]byte("there"), []byte("2")) }, added, -1},
		"same row deleted":    {func(b *catalog.Batch) { b.Delete([]byte("there")) }, added, -1},
		"same counters":       {func(b *catalog.Batch) { b.Add([]byte("sum"), 0, 1) }, added, -1},
		"counters of its own": {func(b *catalog.Batch) { b.Add([]byte("x"), 0, 1); b.Put([]byte("x"), nil) }, added, -1},
		"guard on a changed row that holds": {func(b *catalog.Batch) {
			b.GuardEqual([]byte("there"), []byte("1"))
		}, later, -1},
		"guard on a changed row that does not": {func(b *catalog.Batch) { b.GuardAbsent([]byte("there")) }, added, 0},
		"guard on a deleted row":               {func(b *catalog.Batch) { b.GuardPresent([]byte("gone")) }, added, 0},
		"behind a guard that the pack has": {func(b *catalog.Batch) {
			b.GuardPresent([]byte("dir"))
			b.GuardAbsent([]byte("there"))
		}, added, 1},
		"behind a guard of which nothing is known": {func(b *catalog.Batch) {
			b.GuardPresent([]byte("x"))
			b.GuardAbsent([]byte("there"))
		}, later, -1},
		"range with a row":                {func(b *catalog.Batch) { b.GuardRangeEmpty([]byte("t"), []byte("u")) }, added, 0},
		"range with a deleted row":        {func(b *catalog.Batch) { b.GuardRangeEmpty([]byte("g"), []byte("h")) }, later, -1},
		"range of nothing that changes":   {func(b *catalog.Batch) { b.GuardRangeEmpty([]byte("v"), nil) }, added, -1},
		"guard on counters":               {func(b *catalog.Batch) { b.GuardPresent([]byte("sum")); b.Add([]byte("sum"), 0, 1) }, later, -1},
		"delta on what is no counter row": {func(b *catalog.Batch) { b.Add([]byte("there"), 0, 1) }, later, -1},
	} {
		p := newPack(&Config{MaxTxnOps: minTxnOps, MaxRequestBytes: minRequestBytes})
		counters := counterRows{string(keys.row([]byte("sum"))): {catalog.EncodeCounters(40), true}}
		first := requestOf(t, func(b *catalog.Batch) {
			b.GuardPresent([]byte("dir"))
			b.Put([]byte("there"), []byte("1"))
			b.Delete([]byte("gone"))
			b.Add([]byte("sum"), 0, 1)
		})
		if got := p.add(first, counters); got != added {
			t.Fatalf("the first batch: %v", got)
		}
		second := requestOf(t, c.build)
		if got := p.add(second, counters); got != c.want || second.guard != c.guard {
			t.Errorf("%s: %v, guard %d; want %v, %d", name, got, second.guard, c.want, c.guard)
		}
		want := int64(41)
		if name == "same counters" {
			want = 42
		}
		sum, err := catalog.DecodeCounters(p.after[string(keys.row([]byte("sum")))].value)
		if err != nil || sum.Field(0) != want {
			t.Errorf("%s: the sum is %v, %v; want %d", name, sum, err, want)
		}
	}
}

// TestPackLimits fills packs, and looks that no transaction is over the limits.
func TestPackLimits(t *testing.T) {
	cfg := Config{MaxTxnOps: minTxnOps, MaxRequestBytes: minRequestBytes}
	for name, build := range map[string]func(b *catalog.Batch, i int){
		"puts":   func(b *catalog.Batch, i int) { b.Put(fmt.Append(nil, i), nil) },
		"guards": func(b *catalog.Batch, i int) { b.GuardAbsent(fmt.Append(nil, i)) },
		"creates": func(b *catalog.Batch, i int) {
			createBatch(b, uint64(i%7), uint64(100+i))
		},
		"long values": func(b *catalog.Batch, i int) { b.Put(fmt.Append(nil, i), make([]byte, 50000)) },
		"long keys":   func(b *catalog.Batch, i int) { b.Add(fmt.Appendf(nil, "%0*d", catalog.MaxKey, i), 63, 1) },
	} {
		p := newPack(&cfg)
		n := 0
		for ; ; n++ {
			r := requestOf(t, func(b *catalog.Batch) { build(b, n) })
			counters := counterRows{}
			for _, key := range counters.missing(r) {
				counters.learn(key, row{catalog.EncodeCounters(make([]int64, catalog.MaxFields)...), true})
			}
			if p.add(r, counters) != added {
				break
			}
		}
		txn := p.txn()
		if most := cfg.MaxTxnOps - reservedOps; len(txn.Compare) > most || len(txn.Success) > most || len(txn.Failure) > most {
			t.Errorf("%s: %d comparisons, %d and %d operations, of at most %d", name, len(txn.Compare), len(txn.Success), len(txn.Failure), most)
		}
		size := proto.Size(txn)
		if size > cfg.MaxRequestBytes {
			t.Errorf("%s: %d bytes of at most %d", name, size, cfg.MaxRequestBytes)
		}
		t.Logf("%s: %d batches, %d bytes", name, n, size)
		if n < 10 {
			t.Errorf("%s: %d batches in a transaction", name, n)
		}
	}
}
