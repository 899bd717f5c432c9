package nvme

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// TestData writes and reads at random, in all the ways that data goes, and compares with a copy.
func TestData(t *testing.T) {
	for _, o := range []hostOptions{
		{}, {flow: true}, {ic: wire.ICReq{HeaderDigest: true}}, {ic: wire.ICReq{DataDigest: true}},
		{ic: wire.ICReq{HeaderDigest: true, DataDigest: true, Align: 31}}, {ic: wire.ICReq{Align: 7}},
	} {
		t.Run(fmt.Sprintf("%+v", o.ic), func(t *testing.T) {
			for _, dir := range []string{t.TempDir(), ramDir(t)} {
				tgt := startTarget(t, testConfig(t, dir))
				h := newHost(t, tgt.Addr(1), o)
				for nsid, size := range map[uint32]uint32{1: 512, 2: 4096} {
					checkData(t, h.queue(uint16(nsid), 8), nsid, size)
				}
			}
		})
	}
}

func checkData(t *testing.T, q *hostQueue, nsid, size uint32) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(1, uint64(nsid)))
	mirror := make([]byte, testSize)
	noise := make([]byte, 2*maxTransfer)
	rand.NewChaCha8([32]byte{byte(nsid)}).Read(noise)
	for i := range 400 {
		most := min(maxTransfer/size, uint32(1)<<rnd.IntN(12))
		n := 1 + rnd.Uint32N(most)
		slba := rnd.Uint64N(uint64(testSize/size - n + 1))
		part := mirror[slba*uint64(size):][:n*size]
		switch rnd.IntN(5) {
		case 0, 1:
			copy(part, noise[rnd.IntN(maxTransfer):])
			if len(part) <= ioCapsule && rnd.IntN(2) == 0 {
				q.ok(write(nsid, slba, n, wire.CapsuleSGL(n*size)), part, nil)
			} else {
				cmd := write(nsid, slba, n, wire.TransportSGL(n*size))
				if rnd.IntN(4) == 0 {
					cmd.CDW12 |= 1 << 30
				}
				q.ok(cmd, nil, part)
			}
		case 2:
			clear(part)
			q.ok(wire.Range{NSID: nsid, SLBA: slba, Blocks: n, Deallocate: rnd.IntN(2) == 0}.Command(wire.OpWriteZeroes, wire.NoSGL()), nil, nil)
		case 3:
			clear(part)
			half := wire.DSMRange{SLBA: slba, Blocks: n / 2}
			rest := wire.DSMRange{SLBA: slba + uint64(n/2), Blocks: n - n/2}
			inCapsule := rnd.IntN(2) == 0
			b := rest.Append(half.Append(nil))
			if inCapsule {
				q.ok(wire.Deallocate(nsid, 2, true), b, nil)
			} else {
				q.ok(wire.Deallocate(nsid, 2, false), nil, b)
			}
			q.ok(flushCommand(nsid), nil, nil)
		default:
			if _, got := q.ok(read(nsid, slba, n, size), nil, nil); !bytes.Equal(got, part) {
				t.Fatalf("step %d: %d blocks at %d differ", i, n, slba)
			}
		}
	}
	for off := uint64(0); off < testSize; off += 1 << 19 {
		if _, got := q.ok(read(nsid, off/uint64(size), 1<<19/size, size), nil, nil); !bytes.Equal(got, mirror[off:off+1<<19]) {
			t.Fatalf("at %d: differs", off)
		}
	}
}
