package meta

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// benchmark runs calls from one client over the loopback interface, one at a time and 16 at a time, on each kind of
// catalog.
func benchmark(b *testing.B, prepare func(c *client) func(i int64) error) {
	for kind, open := range engines {
		for _, parallel := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/%d", kind, parallel), func(b *testing.B) {
				h := newHost(b, open(b)).start()
				do := prepare(h.client())
				var next atomic.Int64
				b.SetParallelism(parallel)
				b.ReportAllocs()
				b.ResetTimer()
				if parallel == 1 {
					for i := range int64(b.N) {
						if err := do(i); err != nil {
							b.Fatal(err)
						}
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						if err := do(next.Add(1)); err != nil {
							b.Error(err)
							return
						}
					}
				})
			})
		}
	}
}

func BenchmarkCreate(b *testing.B) {
	benchmark(b, func(c *client) func(int64) error {
		dir := c.mkdir(layout.RootID, "d")
		return func(i int64) error {
			_, err := ask[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: fmt.Sprint(i), Mode: 0o644})
			return err
		}
	})
}

func BenchmarkLookup(b *testing.B) {
	benchmark(b, func(c *client) func(int64) error {
		const files = 1000
		for i := range files {
			c.touch(layout.RootID, fmt.Sprint(i))
		}
		return func(i int64) error {
			_, err := ask[metarpc.LookupResult](c, metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: fmt.Sprint(i % files)})
			return err
		}
	})
}

func BenchmarkReadDir(b *testing.B) {
	h := startMemory(b)
	c := h.client()
	dir := c.mkdir(layout.RootID, "d")
	fill(b, h, dir, metarpc.MaxPage)
	b.ReportAllocs()
	for b.Loop() {
		r := must[metarpc.ReadDirResult](c, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Limit: metarpc.MaxPage})
		if !r.EOF || len(r.Entries) != metarpc.MaxPage {
			b.Fatalf("%d entries", len(r.Entries))
		}
	}
}
