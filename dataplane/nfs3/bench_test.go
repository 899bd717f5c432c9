package nfs3

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// fastServer answers READ with the same bytes for ever and drops what is written. Once warm it does not allocate.
func fastServer(t testing.TB) netip.AddrPort {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() { fastServe(c) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

func fastServe(c net.Conn) {
	defer c.Close()
	if refuseJoin(c) != nil {
		return
	}
	in := bufio.NewReaderSize(c, 64<<10)
	data := make([]byte, 4<<20)
	rec := make([]byte, 4<<20+1<<10)
	var out []byte
	var vec net.Buffers
	for {
		mark, err := in.Peek(4)
		if err != nil {
			return
		}
		n, _ := oncrpc.ParseRecordMark(mark)
		in.Discard(4)
		rec = rec[:n]
		if _, err := io.ReadFull(in, rec); err != nil {
			return
		}
		d := xdr.NewDecoder(rec)
		var h oncrpc.Call
		h.Decode(&d)
		at := len(out)
		out = append(out, 0, 0, 0, 0)
		rep := oncrpc.Reply{XID: h.XID}
		out = rep.Append(out)
		attr := wire.PostOpAttr{Present: true, Attr: wire.Fattr{Type: wire.TypeReg}}
		payload := 0
		switch wire.Proc(h.Proc) {
		case wire.ProcRead:
			var a wire.ReadArgs
			a.Decode(&d)
			payload = int(a.Count)
			res := wire.ReadRes{Attr: attr, Count: a.Count}
			out = res.AppendHead(out)
		case wire.ProcWrite:
			var a wire.WriteArgs
			a.DecodeHead(&d, 0)
			res := wire.WriteRes{Count: a.Count, Committed: a.Stable, Wcc: wire.WccData{After: attr}}
			out = res.Append(out)
		case wire.ProcFsinfo:
			res := wire.FsinfoRes{Rtmax: 4 << 20, Wtmax: 4 << 20}
			out = res.Append(out)
		}
		oncrpc.PutRecordMark(out[at:], len(out)-at-4+payload, true)
		if payload <= 16<<10 {
			out = append(out, data[:payload]...)
			if in.Buffered() > 0 && len(out) < 256<<10 {
				continue
			}
			if _, err := c.Write(out); err != nil {
				return
			}
		} else {
			vec = append(vec[:0], out, data[:payload])
			all := vec
			if _, err := vec.WriteTo(c); err != nil {
				return
			}
			vec = all
		}
		out = out[:0]
	}
}

// keepBusy runs n requests with depth of them at any time, each on its own buffer.
func keepBusy(tg *Target, kind layout.OpKind, size, depth, n int) error {
	var left, running atomic.Int64
	var failed atomic.Pointer[layout.Op]
	left.Store(int64(n - depth))
	running.Store(int64(depth))
	done := make(chan struct{})
	f := file("f")
	again := make(chan *layout.Op, depth)
	finish := func(op *layout.Op) {
		if op.Err != nil || op.N != size {
			failed.Store(op)
		}
		again <- op
	}
	ops := make([]layout.Op, depth)
	for i := range ops {
		ops[i] = layout.Op{Kind: kind, File: f, Data: make([]byte, size), Done: finish}
		tg.Start(&ops[i])
	}
	tg.Flush()
	go func() {
		defer close(done)
		for running.Load() > 0 {
			op := <-again
			for more := true; more; {
				if left.Add(-1) >= 0 {
					tg.Start(op)
				} else {
					running.Add(-1)
				}
				select {
				case op = <-again:
				default:
					more = false
				}
			}
			tg.Flush()
		}
	}()
	<-done
	if op := failed.Load(); op != nil {
		return fmt.Errorf("%v: %d of %d bytes, error %v", op.Kind, op.N, size, op.Err)
	}
	return nil
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	tg := newTarget(t, Config{}, fastServer(t))
	for _, kind := range []layout.OpKind{layout.OpRead, layout.OpWrite} {
		for _, size := range []int{4096, 1 << 20} {
			const depth = 8
			done := make(chan struct{}, depth)
			var ops [depth]layout.Op
			for i := range ops {
				ops[i] = layout.Op{Kind: kind, File: file("f"), Data: make([]byte, size), Done: func(*layout.Op) { done <- struct{}{} }}
			}
			run := func() {
				for i := range ops {
					tg.Start(&ops[i])
				}
				tg.Flush()
				for range ops {
					<-done
				}
			}
			for range 100 {
				run()
			}
			if n := testing.AllocsPerRun(100, run); n >= 1 {
				t.Errorf("%v of %d bytes: %.2f allocations for %d requests", kind, size, n, depth)
			}
		}
	}
}

func BenchmarkTarget(b *testing.B) {
	for _, bc := range []struct {
		kind        layout.OpKind
		size, depth int
		conns       int
	}{
		{layout.OpRead, 1 << 20, 1, 4}, {layout.OpRead, 1 << 20, 8, 4}, {layout.OpWrite, 1 << 20, 1, 4}, {layout.OpWrite, 1 << 20, 8, 4},
		{layout.OpRead, 4096, 1, 4}, {layout.OpRead, 4096, 16, 4}, {layout.OpRead, 4096, 64, 4}, {layout.OpWrite, 4096, 16, 4},
		{layout.OpRead, 4096, 16, 1}, {layout.OpRead, 4096, 64, 1}, {layout.OpRead, 1 << 20, 8, 1}, {layout.OpWrite, 1 << 20, 8, 1},
	} {
		b.Run(fmt.Sprintf("%v/%dKiB/depth%d/conns%d", bc.kind, bc.size>>10, bc.depth, bc.conns), func(b *testing.B) {
			tg := newTarget(b, Config{Connections: bc.conns}, fastServer(b))
			if err := keepBusy(tg, bc.kind, bc.size, bc.depth, bc.depth); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(bc.size))
			b.ReportAllocs()
			b.ResetTimer()
			if err := keepBusy(tg, bc.kind, bc.size, min(bc.depth, b.N), b.N); err != nil {
				b.Fatal(err)
			}
		})
	}
}
