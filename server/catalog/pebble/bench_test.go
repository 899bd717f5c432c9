package pebble

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
)

// syncFloor returns how many times a second this disk syncs a write of 512 bytes at the end of a file, now. A
// durable figure means nothing without it: disks differ a hundredfold, and rented ones change by the minute.
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

func benchEngine(b *testing.B) *Engine {
	e := mustOpen(b, Config{Dir: b.TempDir()})
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
	for _, dirs := range []uint64{64, 1} {
		for _, callers := range []int{1, 16, 64} {
			b.Run(fmt.Sprintf("dirs=%d/callers=%d", dirs, callers), func(b *testing.B) {
				e, ctx := benchEngine(b), context.Background()
				for dir := range dirs {
					if err := e.Commit(ctx, &catalog.Batch{Puts: []catalog.Row{{Key: number('i', dir)}}}); err != nil {
						b.Fatal(err)
					}
				}
				var next atomic.Uint64
				next.Store(1 << 20)
				floor := syncFloor(b)
				b.ReportAllocs()
				b.ResetTimer()
				inParallel(b, callers, func() error {
					batch := new(catalog.Batch)
					for {
						id := next.Add(1)
						if id > 1<<20+uint64(b.N) {
							return nil
						}
						createBatch(batch, id%dirs, id)
						if err := e.Commit(ctx, batch); err != nil {
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

// BenchmarkLookup measures a directory entry and its inode, read one after the other.
func BenchmarkLookup(b *testing.B) {
	for _, callers := range []int{1, 16} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			e, ctx := benchEngine(b), context.Background()
			const files = 100000
			if err := fillFiles(ctx, e, files); err != nil {
				b.Fatal(err)
			}
			var next atomic.Uint64
			b.ReportAllocs()
			b.ResetTimer()
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
}

func fillFiles(ctx context.Context, e *Engine, files uint64) error {
	for dir := range uint64(64) {
		if err := e.Commit(ctx, &catalog.Batch{Puts: []catalog.Row{{Key: number('i', dir)}}, Durability: catalog.NoSync}); err != nil {
			return err
		}
	}
	b := new(catalog.Batch)
	for id := range files {
		createBatch(b, id%64, id)
		if id < 64 {
			b.Puts = b.Puts[:1] // their inodes are the directories
		}
		b.Durability = catalog.NoSync
		if err := e.Commit(ctx, b); err != nil {
			return err
		}
	}
	return nil
}

// BenchmarkScan measures rows a second of one directory, values included.
func BenchmarkScan(b *testing.B) {
	e, ctx := benchEngine(b), context.Background()
	if err := fillFiles(ctx, e, 100000); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	rows := 0
	for b.Loop() {
		for _, err := range e.Scan(ctx, number('e', 5), number('e', 6), catalog.ScanOptions{}) {
			if err != nil {
				b.Fatal(err)
			}
			rows++
		}
	}
	b.ReportMetric(float64(rows)/b.Elapsed().Seconds(), "rows/s")
}

// BenchmarkHotCounters measures reading a counter row while a great many deltas lie in the memtable; see foldEvery.
func BenchmarkHotCounters(b *testing.B) {
	e, ctx := benchEngine(b), context.Background()
	key := number('c', 1)
	for i := range int64(200000) {
		batch := &catalog.Batch{Durability: catalog.NoSync}
		batch.Add(key, 0, 1)
		batch.Max(key, 1, i)
		if err := e.Commit(ctx, batch); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		b.StopTimer()
		batch := &catalog.Batch{Durability: catalog.NoSync} // a chain of another length each time
		batch.Add(key, 0, 1)
		if err := e.Commit(ctx, batch); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if _, err := e.Get(ctx, key); err != nil {
			b.Fatal(err)
		}
	}
}
