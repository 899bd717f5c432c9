package nvme

import (
	"io"
	"net"
	"runtime"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// TestNoAllocations has the target do Reads and Writes of all kinds without allocating, once it is warm.
func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	tgt := startTarget(t, testConfig(t, ramDir(t)))
	q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 8)
	for name, tc := range map[string]struct {
		op   wire.Opcode
		size uint32
		sgl  wire.SGL
	}{
		"read 4 KiB":             {wire.OpRead, 4 << 10, wire.TransportSGL(4 << 10)},
		"read 1 MiB":             {wire.OpRead, 1 << 20, wire.TransportSGL(1 << 20)},
		"write 4 KiB in capsule": {wire.OpWrite, 4 << 10, wire.CapsuleSGL(4 << 10)},
		"write 4 KiB":            {wire.OpWrite, 4 << 10, wire.TransportSGL(4 << 10)},
		"write 1 MiB":            {wire.OpWrite, 1 << 20, wire.TransportSGL(1 << 20)},
	} {
		cmd := wire.CapsuleCmd{Command: wire.Range{NSID: 2, Blocks: tc.size / 4096}.Command(tc.op, tc.sgl)}
		data := make([]byte, tc.size)
		if tc.sgl.Type == wire.SGLInCapsule {
			cmd.Length = tc.size
		}
		capsule := append(cmd.Append(nil, q.framing), data[:cmd.Length]...)
		head, send := make([]byte, 24), make([]byte, 0, 64)
		once := func() {
			q.nc.Write(capsule)
			for {
				if _, err := io.ReadFull(q.nc, head); err != nil {
					t.Fatal(err)
				}
				h, err := q.rx.Decode(head)
				if err != nil {
					t.Fatal(err)
				}
				switch h.Type {
				case wire.PDUC2HData:
					io.ReadFull(q.nc, data)
					return
				case wire.PDUCapsuleResp:
					return
				}
				var r wire.R2T
				if err := r.Decode(h, head); err != nil {
					t.Fatal(err)
				}
				p := wire.H2CData{CID: r.CID, Tag: r.Tag, Length: r.Length, Last: true}
				send = p.Append(send[:0], q.framing)
				q.nc.(*net.TCPConn).Write(send)
				q.nc.Write(data)
			}
		}
		const n = 300
		for range 20 {
			once()
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range n {
			once()
		}
		runtime.ReadMemStats(&after)
		// What the runtime does meanwhile, and what a collection took from the pools, counts, too.
		if got := after.Mallocs - before.Mallocs; got > n/3 {
			t.Errorf("%s: %d allocations for %d commands", name, got, n)
		}
	}
}
