package data

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// BenchmarkIO keeps depth requests in flight on one connection over loopback to a directory in memory. Client and server
// share the processors and the count of allocations; the client makes none.
func BenchmarkIO(b *testing.B) {
	for _, bm := range []struct {
		proc wire.Proc
		size int
	}{
		{wire.ProcRead, 1 << 20}, {wire.ProcWrite, 1 << 20}, {wire.ProcRead, 4 << 10}, {wire.ProcWrite, 4 << 10},
	} {
		for _, depth := range []int{1, 16} {
			b.Run(fmt.Sprintf("%v/%dKiB/depth%d", bm.proc, bm.size>>10, depth), func(b *testing.B) {
				benchmarkIO(b, bm.proc, bm.size, depth)
			})
		}
	}
}

func benchmarkIO(b *testing.B, proc wire.Proc, size, depth int) {
	const fileSize = 64 << 20
	ts := start(b, ramDir(b))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	data := make([]byte, maxIO)
	for off := 0; off < fileSize; off += maxIO {
		c.put(fh, uint64(off), data)
	}
	data = data[:size]
	nc, err := net.Dial("tcp", ts.addr)
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()

	call := nfsCall(proc, as(1000, 1001))
	head := call.Append(make([]byte, 4))
	offAt := len(head) + 4 + xdr.Padded(len(fh.Bytes()))
	if proc == wire.ProcRead {
		head = (&wire.ReadArgs{FH: fh, Count: uint32(size)}).Append(head)
		oncrpc.PutRecordMark(head, len(head)-4, true)
	} else {
		head = (&wire.WriteArgs{FH: fh, Count: uint32(size)}).AppendHead(head)
		oncrpc.PutRecordMark(head, len(head)-4+size, true)
	}
	n := 0
	var vec [2][]byte
	var bufs net.Buffers
	send := func() {
		binary.BigEndian.PutUint32(head[4:], uint32(n))
		binary.BigEndian.PutUint64(head[offAt:], uint64(n)*uint64(size)%fileSize)
		n++
		if proc == wire.ProcRead {
			_, err = nc.Write(head)
		} else {
			vec = [2][]byte{head, data}
			bufs = vec[:]
			_, err = bufs.WriteTo(nc)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	in := bufio.NewReaderSize(nc, 8<<10)
	buf := make([]byte, size+1024)
	receive := func() {
		if _, err := io.ReadFull(in, buf[:4]); err != nil {
			b.Fatal(err)
		}
		m, _ := oncrpc.ParseRecordMark(buf)
		if _, err := io.ReadFull(in, buf[:m]); err != nil {
			b.Fatal(err)
		}
		if status := binary.BigEndian.Uint32(buf[oncrpc.AcceptedSize:]); status != 0 || proc == wire.ProcRead && m < size {
			b.Fatalf("status %d, %d bytes", status, m)
		}
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime(b)
	for range depth {
		send()
	}
	for range b.N - depth { // or none, and a few requests more than b.N
		receive()
		send()
	}
	for range depth {
		receive()
	}
	b.ReportMetric(float64(cpuTime(b)-cpu)/float64(b.N), "cpu-ns/op")
}

// cpuTime is how long this process, client and server, has used processors. It is steadier than the clock where others
// use them, too.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
