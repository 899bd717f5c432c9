package device

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/iobuf"
)

// instant ends every request at once.
type instant struct{ testHandler }

type instantTransfer struct{ r *Request }

func (*instant) NewTransfer(r *Request) Transfer { return &instantTransfer{r} }
func (*instant) Flush()                          {}
func (c *instantTransfer) Start()                { c.r.Done(len(c.r.Data), 0) }
func (*instantTransfer) Detach()                 {}

// After warm-up READ and WRITE allocate nothing.
func TestAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	pool, err := iobuf.New(1 << 20)
	ok(t, err)
	k := newKernel(t, func(c *Config) { c.Handler = &instant{testHandler{buffers: pool}} })
	raw, err := k.conn.SyscallConn()
	ok(t, err)
	answer := make([]byte, testMaxWrite+outHeaderSize)
	var request []byte
	var n int
	send := func(fd uintptr) bool {
		_, err := unix.Write(int(fd), request)
		return err != unix.EAGAIN
	}
	receive := func(fd uintptr) bool {
		n, err = unix.Read(int(fd), answer)
		return err != unix.EAGAIN
	}
	for _, c := range []struct {
		what    string
		request []byte
		want    int
	}{
		{"READ of 4 KiB", k.transfer(opRead, 0, 4096, nil), outHeaderSize + 4096},
		{"READ of 64 KiB", k.transfer(opRead, 0, 64<<10, nil), outHeaderSize + 64<<10},
		{"WRITE of 4 KiB", k.transfer(opWrite, 0, 4096, make([]byte, 4096)), outHeaderSize + writeOutSize},
		{"WRITE of 128 KiB", k.transfer(opWrite, 0, testMaxWrite, make([]byte, testMaxWrite)), outHeaderSize + writeOutSize},
	} {
		request = c.request
		allocs := testing.AllocsPerRun(500, func() {
			raw.Write(send)
			raw.Read(receive)
			if n != c.want || binary.NativeEndian.Uint32(answer[4:]) != 0 {
				t.Fatalf("%s: an answer of %d bytes: %x", c.what, n, answer[:min(n, outHeaderSize)])
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations", c.what, allocs)
		}
	}
}
