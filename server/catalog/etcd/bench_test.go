package etcd

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
)

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

// rawCreate makes the transaction that createBatch would be if nobody else wrote: counters are put, not added to.
func rawCreate(ctx context.Context, e *Engine, dir, id uint64) error {
	b := new(catalog.Batch)
	createBatch(b, dir, id)
	t := new(pb.TxnRequest)
	for _, g := range b.Guards {
		g.Key = e.keys.row(g.Key)
		t.Compare = append(t.Compare, compare(&g))
	}
	for _, put := range b.Puts {
		t.Success = append(t.Success, opPut(e.keys.row(put.Key), put.Value))
	}
	t.Success = append(t.Success, opPut(e.keys.row(b.Deltas[0].Key), catalog.EncodeCounters(1, int64(id))))
	resp, err := e.cluster.txn(ctx, 0, t)
	if err == nil && !resp.Succeeded {
		err = fmt.Errorf("create %d in %d was refused", id, dir)
	}
	return err
}

// BenchmarkCreate measures durable creates in clusters of one and three members on this machine, spread over 64 directories and
// all in one; raw is one etcd transaction for each.
func BenchmarkCreate(b *testing.B) {
	for _, members := range []int{1, 3} {
		b.Run(fmt.Sprintf("members=%d", members), func(b *testing.B) {
			cluster := etcdserver.Start(b, members)
			for _, dirs := range []uint64{64, 1} {
				for _, callers := range []int{1, 16, 64} {
					for _, raw := range []bool{false, true} {
						how := "engine"
						if raw {
							how = "raw"
						}
						b.Run(fmt.Sprintf("dirs=%d/callers=%d/%s", dirs, callers, how), func(b *testing.B) {
							benchCreate(b, cluster, dirs, callers, raw)
						})
					}
				}
			}
		})
	}
}

func benchCreate(b *testing.B, cluster *etcdserver.Cluster, dirs uint64, callers int, raw bool) {
	e, ctx := benchEngine(b, cluster), context.Background()
	for dir := range dirs {
		if err := e.Commit(ctx, &catalog.Batch{Puts: []catalog.Row{{Key: number('i', dir)}}}); err != nil {
			b.Fatal(err)
		}
	}
	var next atomic.Uint64
	next.Store(1 << 20)
	b.ResetTimer()
	inParallel(b, callers, func() error {
		batch := new(catalog.Batch)
		for {
			id := next.Add(1)
			if id > 1<<20+uint64(b.N) {
				return nil
			}
			if raw {
				if err := rawCreate(ctx, e, id%dirs, id); err != nil {
					return err
				}
				continue
			}
			createBatch(batch, id%dirs, id)
			if err := e.Commit(ctx, batch); err != nil {
				return err
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
}

func benchEngine(b *testing.B, cluster *etcdserver.Cluster) *Engine {
	cfg, err := ParseURL(cluster.URL(fmt.Sprintf("/bench-%d", lastPrefix.Add(1))))
	if err != nil {
		b.Fatal(err)
	}
	e := mustOpen(b, cfg)
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Error(err)
		}
	})
	return e
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
	for _, members := range []int{1, 3} {
		cluster := etcdserver.Start(b, members)
		e, ctx := benchEngine(b, cluster), context.Background()
		const files = 10000
		batch := new(catalog.Batch)
		for id := range uint64(files) {
			batch.Put(fmt.Appendf(number('e', id%64), "file-%09d", id), make([]byte, 16))
			batch.Put(number('i', id), make([]byte, 120))
			if batch.Len() > 100 || id == files-1 {
				if err := e.Commit(ctx, batch); err != nil {
					b.Fatal(err)
				}
				batch.Reset()
			}
		}
		for _, callers := range []int{1, 16, 64} {
			for _, raw := range []bool{false, true} {
				how := "engine"
				if raw {
					how = "raw"
				}
				b.Run(fmt.Sprintf("members=%d/callers=%d/%s", members, callers, how), func(b *testing.B) {
					var next atomic.Uint64
					inParallel(b, callers, func() error {
						for {
							n := next.Add(1)
							if n > uint64(b.N) {
								return nil
							}
							id := n * 7919 % files
							for _, key := range [][]byte{fmt.Appendf(number('e', id%64), "file-%09d", id), number('i', id)} {
								if raw {
									if _, err := e.cluster.rangeRead(ctx, &pb.RangeRequest{Key: e.keys.row(key)}); err != nil {
										return err
									}
								} else if _, err := e.Get(ctx, key); err != nil {
									return err
								}
							}
						}
					})
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lookups/s")
				})
			}
		}
	}
}
