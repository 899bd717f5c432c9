package postgres_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/server/catalog/postgres"
)

// syncFloor returns how many times a second this disk syncs a write of 512 bytes at the end of a file, now.
func syncFloor(b *testing.B) float64 {
	f, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 512)
	n, start := 0, time.Now()
	for ; time.Since(start) < 300*time.Millisecond; n++ {
		if _, err := f.WriteAt(block, 0); err != nil {
			b.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
	}
	return float64(n) / time.Since(start).Seconds()
}

// benchDatabase is a server that syncs, unless WEFT_TEST_POSTGRES names another one.
func benchDatabase(b *testing.B) string {
	if own := os.Getenv("WEFT_TEST_POSTGRES"); own != "" {
		return own
	}
	return pgserver.Start(b, pgserver.Options{Durable: true}).URL()
}

func benchEngine(b *testing.B, base string) *postgres.Engine {
	e := mustOpen(b, postgres.Config{URL: newTable(b, base)})
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Error(err)
		}
	})
	return e
}

func number(prefix byte, n uint64) []byte { return binary.BigEndian.AppendUint64([]byte{prefix}, n) }

// createBatch is what creating a file commits: the directory is there and the name is not; entry, inode and layout; the
// directory's times and counts.
func createBatch(b *catalog.Batch, dir, id uint64) {
	entry := fmt.Appendf(number('e', dir), "file-%09d", id)
	b.Reset()
	b.GuardPresent(number('i', dir))
	b.GuardAbsent(entry)
	b.Put(entry, make([]byte, 16))
	b.Put(number('i', id), make([]byte, 120))
	b.Put(number('l', id), make([]byte, 64))
	counts := number('c', dir)
	b.Add(counts, 0, 1)
	b.Max(counts, 1, int64(id))
}

// BenchmarkCreate measures durable creates, spread over 64 directories and all in one.
func BenchmarkCreate(b *testing.B) {
	base := benchDatabase(b)
	for _, dirs := range []uint64{64, 1} {
		for _, callers := range []int{1, 16, 64} {
			b.Run(fmt.Sprintf("dirs=%d/callers=%d", dirs, callers), func(b *testing.B) {
				e, ctx := benchEngine(b, base), context.Background()
				for dir := range dirs {
					if err := e.Commit(ctx, &catalog.Batch{Puts: []catalog.Row{{Key: number('i', dir)}}}); err != nil {
						b.Fatal(err)
					}
				}
				var next atomic.Uint64
				next.Store(1 << 20)
				create := func(batch *catalog.Batch, id uint64) error {
					createBatch(batch, id%dirs, id)
					return e.Commit(ctx, batch)
				}
				inParallel(b, callers, func() error { return create(new(catalog.Batch), next.Add(1)) }) // makes the connections
				floor := syncFloor(b)
				b.ReportAllocs()
				b.ResetTimer()
				end := next.Load() + uint64(b.N)
				inParallel(b, callers, func() error {
					batch := new(catalog.Batch)
					for {
						id := next.Add(1)
						if id > end {
							return nil
						}
						if err := create(batch, id); err != nil {
							return err
						}
					}
				})
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
				b.ReportMetric(floor, "floor-syncs/s")
			})
		}
	}
}

// inParallel runs work in so many goroutines and waits for them.
func inParallel(b *testing.B, n int, work func() error) {
	errs := make(chan error, n)
	for range n {
		go func() { errs <- work() }() // ends with work
	}
	for range n {
		if err := <-errs; err != nil {
			b.Error(err)
		}
	}
}

// BenchmarkRead measures a directory entry and its inode, read one after the other, and the rows of a scan.
func BenchmarkRead(b *testing.B) {
	e, ctx := benchEngine(b, benchDatabase(b)), context.Background()
	const files = 20000
	batch := new(catalog.Batch)
	for id := range uint64(files) {
		batch.Put(fmt.Appendf(number('e', id%64), "file-%09d", id), make([]byte, 16))
		batch.Put(number('i', id), make([]byte, 120))
		if batch.Len() > 1000 || id == files-1 {
			if err := e.Commit(ctx, batch); err != nil {
				b.Fatal(err)
			}
			batch.Reset()
		}
	}
	for _, callers := range []int{1, 16} {
		b.Run(fmt.Sprintf("lookup/callers=%d", callers), func(b *testing.B) {
			var next atomic.Uint64
			b.ReportAllocs()
			inParallel(b, callers, func() error {
				for {
					n := next.Add(1)
					if n > uint64(b.N) {
						return nil
					}
					id := n * 7919 % files
					if _, err := e.Get(ctx, fmt.Appendf(number('e', id%64), "file-%09d", id)); err != nil {
						return err
					}
					if _, err := e.Get(ctx, number('i', id)); err != nil {
						return err
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lookups/s")
		})
	}
	b.Run("scan", func(b *testing.B) {
		rows := 0
		b.ReportAllocs()
		for b.Loop() {
			for _, err := range e.Scan(ctx, number('i', 0), number('j', 0), catalog.ScanOptions{}) {
				if err != nil {
					b.Fatal(err)
				}
				rows++
			}
		}
		b.ReportMetric(float64(rows)/b.Elapsed().Seconds(), "rows/s")
	})
}

// BenchmarkHotCounters measures reading a counter row that has had very many deltas.
func BenchmarkHotCounters(b *testing.B) {
	e, ctx := benchEngine(b, benchDatabase(b)), context.Background()
	key := number('c', 1)
	inParallel(b, 16, func() error {
		for i := range int64(1000) {
			batch := &catalog.Batch{Durability: catalog.NoSync}
			batch.Add(key, 0, 1)
			batch.Max(key, 1, i)
			if err := e.Commit(ctx, batch); err != nil {
				return err
			}
		}
		return nil
	})
	for b.Loop() {
		if _, err := e.Get(ctx, key); err != nil {
			b.Fatal(err)
		}
	}
}
