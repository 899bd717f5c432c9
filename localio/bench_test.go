package localio

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// BenchmarkRead4K is random reads of what is in memory, by 16 callers, on a plane.
func BenchmarkRead4K(b *testing.B) {
	e := newEnv(b, ramDir(b), nil)
	l := e.local()
	p, err := dataplane.New(dataplane.Config{Dial: func(layout.DeviceID) (dataplane.Target, error) { return l, nil }})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	const size = 64 << 20
	df := *e.newFile(0o640)
	seg := &layout.Segment{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW, Mirrors: []layout.Mirror{{Servers: []layout.DataFile{df}}}}
	for off := int64(0); off < size; off += 1 << 20 {
		if op := do(l, layout.Op{Kind: layout.OpWrite, File: &df, Off: off, Data: make([]byte, 1<<20)}); op.Err != nil {
			b.Fatal(op.Err)
		}
	}
	f := p.NewFile()
	const callers = 16
	b.ReportAllocs()
	b.ResetTimer()
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			done := make(chan error, 1)
			r := &dataplane.Read{Segment: seg, Buf: make([]byte, 4096), Done: func(_ int, err error) { done <- err }}
			for range b.N / callers {
				r.Off = rand.Int64N(size/4096) * 4096
				f.StartRead(r)
				p.Flush()
				if err := <-done; err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}
