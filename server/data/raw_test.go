package data

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// fill gives a file of the export random contents with a hole.
func (ts *testServer) fill(name string, size int) []byte {
	ts.t.Helper()
	data := make([]byte, size)
	src := rand.NewChaCha8([32]byte{7})
	src.Read(data)
	hole := data[size/3 : size/2]
	clear(hole)
	f, err := os.OpenFile(ts.export(name), os.O_WRONLY, 0)
	if err != nil {
		ts.t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int{0, size / 2} {
		if _, err := f.WriteAt(data[at:at+size/3], int64(at)); err != nil {
			ts.t.Fatal(err)
		}
	}
	if err := f.Truncate(int64(size)); err != nil {
		ts.t.Fatal(err)
	}
	clear(data[size/2+size/3:])
	return data
}

// readResult is what a record of a reply to READ says.
func readResult(t *testing.T, rec []byte) (xid uint32, res readHead) {
	t.Helper()
	d := xdr.NewDecoder(rec)
	var reply oncrpc.Reply
	if err := errors.Join(reply.Decode(&d), reply.Err(), res.Decode(&d)); err != nil || res.Status != wire.OK {
		t.Fatalf("%v, %v", res.Status, err)
	}
	return reply.XID, res
}

// Many READs of all sizes, small and large ones mixed, sent together, to a client who takes its time: every reply is right,
// whichever way it is sent.
func TestReadsTogether(t *testing.T) {
	for name, dir := range map[string]string{"memory": ramDir(t), "disk": newDir(t)} {
		t.Run(name, func(t *testing.T) {
			const size, reads = 5<<20 + 123, 3000
			ts := start(t, dir)
			fh := ts.dial().create(ts.root, "f", 1, 1)
			want := ts.fill("f", size)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			args := make([]wire.ReadArgs, reads)
			var calls []byte
			for i := range args {
				count := 1 + rng.IntN(8<<10)
				switch rng.IntN(20) {
				case 0:
					count = minPages + rng.IntN(maxIO-minPages)
				case 1:
					count = 4 * rng.IntN(maxIO/4)
				case 2:
					count = minPages - 1 + rng.IntN(2)
				}
				args[i] = wire.ReadArgs{FH: fh, Offset: uint64(rng.IntN(size + 10)), Count: uint32(count)}
				b := rawCall(uint32(i), nfsCall(wire.ProcRead, super), args[i].Append(nil))
				calls = append(append(calls, oncrpctest.AppendRecordMark(nil, len(b), true)...), b...)
			}
			nc := ts.dialRaw()
			nc.(*net.TCPConn).SetReadBuffer(64 << 10)
			go nc.Write(calls) // ends at the latest with the connection
			time.Sleep(50 * time.Millisecond)
			seen := map[uint32]bool{}
			for range args {
				rec, err := readRecord(nc)
				if err != nil {
					t.Fatal(err)
				}
				xid, res := readResult(t, rec)
				if int(xid) >= reads || seen[xid] {
					t.Fatalf("xid %d, again: %v", xid, seen[xid])
				}
				seen[xid] = true
				from := min(int(args[xid].Offset), size)
				to := min(from+int(args[xid].Count), size)
				if res.EOF != (to == size) || !bytes.Equal(res.data, want[from:to]) {
					t.Fatalf("READ of %d bytes at %d: %d bytes, EOF %v, or others than there are", args[xid].Count, from, len(res.data), res.EOF)
				}
			}
			ts.stop() // the last reply is read before the server has its memory back
			ts.wantNoPayloads()
		})
	}
}

// A file that is cut after the length of the reply was told ends the connection: the client does not get other bytes for those
// that are gone. Who asks again gets what there is.
func TestCutWhileSent(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	want := ts.fill("f", 16<<20)
	nc := ts.dialRaw()
	nc.(*net.TCPConn).SetReadBuffer(64 << 10)
	const reads = 12
	for i := range reads { // more than the sockets hold
		args := wire.ReadArgs{FH: fh, Offset: uint64(i) << 20, Count: 1 << 20}
		nc.Write(marked(nfsCall(wire.ProcRead, super), args.Append(nil)))
	}
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	defer ts.cache.put(f)
	for ts.refs(f) < reads/2 { // until they are being sent
		time.Sleep(time.Millisecond)
	}
	if err := os.Truncate(ts.export("f"), 0); err != nil {
		t.Fatal(err)
	}
	whole := 0
	for {
		rec, err := readRecord(nc)
		if err != nil {
			if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the connection ended with %v", err)
			}
			break
		}
		if _, res := readResult(t, rec); res.Count == 1<<20 {
			whole++
		}
	}
	if whole == reads {
		t.Error("all replies came whole")
	}
	if res := c.read(super, fh, 0, 1<<20); res.Count != 0 || !res.EOF {
		t.Errorf("afterwards: %d bytes, EOF %v", res.Count, res.EOF)
	}
	for ts.refs(f) > 1 { // until the lost connection has let go of it
		time.Sleep(time.Millisecond)
	}
	if err := os.WriteFile(ts.export("f"), want, 0); err != nil {
		t.Fatal(err)
	}
	if res := c.read(super, fh, 0, 1<<20); !bytes.Equal(res.data, want[:1<<20]) {
		t.Error("written again it has other contents")
	}
}
