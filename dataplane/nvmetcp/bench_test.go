package nvmetcp

import (
	"fmt"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// BenchmarkTarget is our own target in the same process: so many commands of one size at once.
func BenchmarkTarget(b *testing.B) {
	for _, bench := range []struct {
		op          wire.Opcode
		size, depth int
	}{{wire.OpRead, 4 << 10, 32}, {wire.OpWrite, 4 << 10, 32}, {wire.OpRead, 1 << 20, 8}, {wire.OpWrite, 1 << 20, 8}} {
		op := wire.Command{Opcode: bench.op}
		b.Run(fmt.Sprintf("%s/%d", op.Name(false), bench.size), func(b *testing.B) {
			_, cfg := startTarget(b)
			c := connect(b, cfg)
			done := make(chan *Command, bench.depth)
			for i := range bench.depth {
				cmd := readCommand(uint64(i*bench.size/512)%(peerSize/512), bench.size)
				cmd.Op = bench.op
				cmd.Done = func(cmd *Command) { done <- cmd }
				done <- cmd
			}
			b.SetBytes(int64(bench.size))
			b.ReportAllocs()
			for i := range b.N + bench.depth {
				cmd := <-done
				if cmd.Err != nil {
					b.Fatal(cmd.Err)
				}
				if i < b.N {
					c.Start(cmd)
					if len(done) == 0 || i == b.N-1 {
						c.Flush()
					}
				}
			}
		})
	}
}
