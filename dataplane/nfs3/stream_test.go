package nfs3

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"testing"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// rawFile is a RawConn of files that never make wait: a pipe without a writer to read, /dev/null to write.
type rawFile struct{ in, out *os.File }

func (f rawFile) Control(func(uintptr)) error { return errors.ErrUnsupported }

func (f rawFile) Read(step func(fd uintptr) bool) error {
	if !step(f.in.Fd()) {
		return errors.New("a pipe without a writer has nothing to wait for")
	}
	return nil
}

func (f rawFile) Write(step func(fd uintptr) bool) error {
	if !step(f.out.Fd()) {
		return errors.New("/dev/null is full")
	}
	return nil
}

// newFakeConn returns a Target with one connection, on which in is all that the server ever sends.
func newFakeConn(t *testing.T, in []byte) (*Target, *conn) {
	pr, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pr.Close(); null.Close() })
	if _, err := pw.Write(in); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	tg, err := New(Config{Addrs: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:2049")}, Connections: 1, RSize: 4096})
	if err != nil {
		t.Fatal(err)
	}
	tg.limits, tg.xid = limitsKnown, 0
	s := tg.slots[0]
	c := &conn{t: tg, slot: s, calls: map[uint32]*rpc{}}
	raw := rawFile{pr, null}
	c.in.init(raw, tg.cfg.RSize+streamBuffer)
	c.in.lean, c.in.before = &c.lean, c.flushMoved
	c.out.init(raw)
	c.idle.L = &tg.mu
	s.conn, s.running = c, true
	return tg, c
}

// FuzzReplies takes any bytes as what the server sends while a READ, a WRITE, a COMMIT and a GETATTR, with the xids 1 to 4,
// are outstanding.
func FuzzReplies(f *testing.F) {
	record := func(b []byte) []byte { return append(oncrpctest.AppendRecordMark(nil, len(b), true), b...) }
	head := func(xid uint32) []byte { return (&oncrpc.Reply{XID: xid}).Append(nil) }
	attr := wire.PostOpAttr{Present: true, Attr: wire.Fattr{Type: wire.TypeReg}}
	read := (&wire.ReadRes{Count: 5, EOF: true, Attr: attr}).AppendHead(head(1))
	read = xdr.AppendFixedOpaque(read, []byte("hello"))
	short := xdr.AppendFixedOpaque((&wire.ReadRes{Count: 5}).AppendHead(head(1)), []byte("hello"))
	write := (&wire.WriteRes{Count: 50}).Append(head(2))
	commit := (&wire.CommitRes{}).Append(head(3))
	getattr := (&wire.GetattrRes{Attr: attr.Attr}).Append(head(4))
	for _, b := range [][]byte{read, short, write, commit, getattr} {
		f.Add(record(b), false)
		f.Add(append(cut(b, 33), record(getattr)...), true)
	}
	f.Add(record((&oncrpc.Reply{XID: 1, Stat: oncrpc.AuthError}).Append(nil)), false)
	f.Fuzz(func(t *testing.T, in []byte, lean bool) {
		if len(in) > 60<<10 {
			return // more than a pipe takes
		}
		tg, c := newFakeConn(t, in)
		if lean {
			c.lean.Add(1)
		}
		buf := bytes.Repeat([]byte{0xee}, 200)
		for _, r := range []*request{newOp(layout.OpRead, "f", 0, buf[50:150]), newOp(layout.OpWrite, "f", 0, make([]byte, 100)), newOp(layout.OpCommit, "f", 0, nil)} {
			r.Done = func(op *layout.Op) {
				if op.N > len(op.Data) {
					t.Errorf("%v: %d of %d bytes", op.Kind, op.N, len(op.Data))
				}
			}
			tg.Start(&r.Op)
		}
		tg.mu.Lock()
		fh, _ := wire.NewFileHandle([]byte("f"))
		tg.enqueueControl(&control{prog: oncrpc.ProgNFS, proc: uint32(wire.ProcGetattr), args: fh.Append(nil), res: new(wire.GetattrRes), end: func(error) {}})
		tg.dispatch()
		tg.mu.Unlock()
		tg.Flush()
		err := c.read()
		var m *malformed
		if !errors.Is(err, io.EOF) && !errors.As(err, &m) {
			t.Fatalf("error %v", err)
		}
		if bytes.Count(buf[:50], []byte{0xee})+bytes.Count(buf[150:], []byte{0xee}) != 100 {
			t.Fatal("bytes outside the buffer were written")
		}
	})
}
