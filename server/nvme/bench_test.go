package nvme

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const benchSize = 64 << 20

// BenchmarkIO keeps depth commands in flight on one queue over loopback to a file in memory. The host shares the processors and
// the count of allocations; it makes none.
func BenchmarkIO(b *testing.B) {
	for _, bm := range []struct {
		op   wire.Opcode
		size int
	}{{wire.OpRead, 1 << 20}, {wire.OpWrite, 1 << 20}, {wire.OpRead, 4 << 10}, {wire.OpWrite, 4 << 10}} {
		for _, depth := range []int{1, 32} {
			name := map[wire.Opcode]string{wire.OpRead: "read", wire.OpWrite: "write"}[bm.op]
			b.Run(fmt.Sprintf("%s/%dKiB/depth%d", name, bm.size>>10, depth), func(b *testing.B) { benchmarkIO(b, bm.op, bm.size, depth) })
		}
	}
}

func benchConfig(b *testing.B) Config {
	cfg := testConfig(b, ramDir(b))
	f := cfg.Subsystems[0].Namespaces[1].Backing.(*File)
	if err := os.Truncate(fdName(f), benchSize); err != nil {
		b.Fatal(err)
	}
	data := make([]byte, 1<<20)
	for off := int64(0); off < benchSize; off += int64(len(data)) {
		f.WriteAt(data, off)
	}
	return cfg
}

func benchmarkIO(b *testing.B, op wire.Opcode, size, depth int) {
	tgt, err := New(benchConfig(b))
	if err != nil {
		b.Fatal(err)
	}
	defer tgt.Shutdown(context.Background())
	q := newHost(b, tgt.Addr(1), hostOptions{}).queue(1, 128)
	blocks := uint32(size / 4096)
	sgl := wire.TransportSGL(uint32(size))
	inCapsule := op == wire.OpWrite && size <= ioCapsule
	if inCapsule {
		sgl = wire.CapsuleSGL(uint32(size))
	}
	data := make([]byte, size)
	slots := make(chan struct{}, depth)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	go func() { // ends with the last command
		buf := make([]byte, 0, 8192)
		for i := range b.N {
			slots <- struct{}{}
			cmd := wire.CapsuleCmd{Command: wire.Range{NSID: 2, SLBA: uint64(i*size%benchSize) / 4096, Blocks: blocks}.Command(op, sgl)}
			cmd.Command.CID = uint16(i)
			if inCapsule {
				cmd.Length = uint32(size)
			}
			buf = cmd.Append(buf[:0], q.framing)
			if inCapsule {
				buf = append(buf, data...)
			}
			q.nc.Write(buf)
		}
	}()
	var send []byte
	head := make([]byte, 24)
	for done := 0; done < b.N; {
		if _, err := io.ReadFull(q.nc, head); err != nil {
			b.Fatal(err)
		}
		h, err := q.rx.Decode(head)
		if err != nil {
			b.Fatal(err)
		}
		switch h.Type {
		case wire.PDUC2HData:
			if _, err := io.ReadFull(q.nc, data); err != nil {
				b.Fatal(err)
			}
			done++
			<-slots
		case wire.PDUCapsuleResp:
			done++
			<-slots
		case wire.PDUR2T:
			var r wire.R2T
			if err := r.Decode(h, head); err != nil {
				b.Fatal(err)
			}
			p := wire.H2CData{CID: r.CID, Tag: r.Tag, Length: r.Length, Last: true}
			send = p.Append(send[:0], q.framing)
			bufs := net.Buffers{send, data}
			bufs.WriteTo(q.nc)
		}
	}
	b.StopTimer()
	q.nc.Close()
}

// BenchmarkBare is a loop that moves the same bytes in messages of the same sizes, its far end doing the same pread(2) and
// pwrite(2).
func BenchmarkBare(b *testing.B) {
	for _, size := range []int{1 << 20, 4 << 10} {
		for _, reads := range []bool{true, false} {
			for _, depth := range []int{1, 32} {
				b.Run(fmt.Sprintf("%s/%dKiB/depth%d", map[bool]string{true: "read", false: "write"}[reads], size>>10, depth), func(b *testing.B) { bare(b, reads, size, depth) })
			}
		}
	}
}

func bare(b *testing.B, reads bool, size, depth int) {
	f := benchConfig(b).Subsystems[0].Namespaces[1].Backing.(*File)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	up, down := 72, 24+size
	if !reads {
		up, down = 72+size, 24
	}
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		in, out := make([]byte, up), make([]byte, down)
		for i := 0; ; i++ {
			if _, err := io.ReadFull(nc, in); err != nil {
				return
			}
			off := int64(i * size % benchSize)
			if reads {
				f.ReadAt(out[24:], off)
			} else {
				f.WriteAt(in[72:], off)
			}
			if _, err := nc.Write(out); err != nil {
				return
			}
		}
	}()
	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	slots := make(chan struct{}, depth)
	b.SetBytes(int64(size))
	b.ResetTimer()
	go func() {
		out := make([]byte, up)
		for range b.N {
			slots <- struct{}{}
			nc.Write(out)
		}
	}()
	in := make([]byte, down)
	for range b.N {
		if _, err := io.ReadFull(nc, in); err != nil {
			b.Fatal(err)
		}
		<-slots
	}
	b.StopTimer()
}
