package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// wantStat checks that a call failed below its procedure in the way of want.
func wantStat(t *testing.T, what string, err error, want oncrpc.Stat) {
	t.Helper()
	var e *oncrpc.Error
	if !errors.As(err, &e) || e.Stat != want {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func TestOtherCalls(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	call := func(prog, vers, proc uint32, args []byte) error {
		_, err := finish(c.send(oncrpc.Call{Prog: prog, Vers: vers, Proc: proc, Cred: super}, args), nil)
		return err
	}
	long := make([]byte, 3<<20)
	for _, args := range [][]byte{nil, fh.Append(nil), long} {
		wantStat(t, "NFSACL", call(oncrpc.ProgNFSACL, 3, 0, args), oncrpc.ProgUnavail)
		wantStat(t, "portmapper", call(oncrpc.ProgPortmap, 2, 3, args), oncrpc.ProgUnavail)
		for _, prog := range []uint32{oncrpc.ProgNFS, oncrpc.ProgMount} {
			for _, vers := range []uint32{0, 2, 4} {
				err := call(prog, vers, 1, args)
				wantStat(t, "version", err, oncrpc.ProgMismatch)
				var e *oncrpc.Error
				if errors.As(err, &e) && (e.Low != 3 || e.High != 3) {
					t.Errorf("versions %d to %d", e.Low, e.High)
				}
			}
		}
		wantStat(t, "procedure 22", call(oncrpc.ProgNFS, 3, 22, args), oncrpc.ProcUnavail)
		if err := call(oncrpc.ProgNFS, 3, 0, args); err != nil {
			t.Errorf("NULL: %v", err)
		}
	}
	// Every procedure with arguments that end too early.
	for proc := wire.ProcNull + 1; proc <= wire.ProcCommit; proc++ {
		wantStat(t, proc.String(), call(oncrpc.ProgNFS, 3, uint32(proc), []byte{0, 0, 0}), oncrpc.GarbageArgs)
		wantStat(t, proc.String(), call(oncrpc.ProgNFS, 3, uint32(proc), xdr.AppendUint32(nil, 65)), oncrpc.GarbageArgs)
	}
	// Arguments that are longer than need be are read as far as they go.
	if err := call(oncrpc.ProgNFS, 3, uint32(wire.ProcGetattr), append(fh.Append(nil), long...)); err != nil {
		t.Error(err)
	}
	equal(t, "the connection lives", c.getattr(fh).Status, wire.OK)
}

func TestCredentials(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	call := func(proc wire.Proc, cred oncrpc.Auth) error {
		_, err := finish(c.send(nfsCall(proc, cred), ts.root.Append(nil)), nil)
		return err
	}
	good := super.Body
	for _, tt := range []struct {
		name string
		cred oncrpc.Auth
		want oncrpc.AuthStat
	}{
		{"none", oncrpc.Auth{}, oncrpc.AuthTooWeak},
		{"GSS", oncrpc.Auth{Flavor: oncrpc.FlavorGSS, Body: good}, oncrpc.AuthTooWeak},
		{"TLS", oncrpc.Auth{Flavor: oncrpc.FlavorTLS}, oncrpc.AuthTooWeak},
		{"cut", oncrpc.Auth{Flavor: oncrpc.FlavorSys, Body: good[:len(good)-4]}, oncrpc.AuthBadCred},
		{"empty", oncrpc.Auth{Flavor: oncrpc.FlavorSys}, oncrpc.AuthBadCred},
		{"17 groups", oncrpc.Auth{Flavor: oncrpc.FlavorSys, Body: append(xdr.AppendUint32(bytes.Clone(good[:len(good)-4]), 17), make([]byte, 17*4)...)}, oncrpc.AuthBadCred},
	} {
		var e *oncrpc.Error
		if err := call(wire.ProcGetattr, tt.cred); !errors.As(err, &e) || e.Stat != oncrpc.AuthError || e.AuthStat != tt.want {
			t.Errorf("credential %s: %v, want %v", tt.name, err, tt.want)
		}
		// After a bad one a good one is good.
		if err := call(wire.ProcGetattr, super); err != nil {
			t.Error(err)
		}
	}
	// NULL is answered whoever asks; with the answer that there is no TLS to one who asks for it.
	if err := call(wire.ProcNull, oncrpc.Auth{}); err != nil {
		t.Error(err)
	}
	wantStat(t, "TLS", call(wire.ProcNull, oncrpc.Auth{Flavor: oncrpc.FlavorTLS}), oncrpc.AuthError)
}

// rawCall is a record without its mark.
func rawCall(xid uint32, call oncrpc.Call, args []byte) []byte {
	call.XID = xid
	return append(call.Append(nil), args...)
}

func TestRPCVersion(t *testing.T) {
	ts := start(t, "")
	nc := ts.dialRaw()
	b := rawCall(77, nfsCall(wire.ProcNull, super), nil)
	binary.BigEndian.PutUint32(b[8:], 3)
	nc.Write(append(oncrpctest.AppendRecordMark(nil, len(b), true), b...))
	var reply oncrpc.Reply
	rec, err := readRecord(nc)
	d := xdr.NewDecoder(rec)
	if err != nil || reply.Decode(&d) != nil {
		t.Fatalf("no reply: %v", err)
	}
	equal(t, "xid", reply.XID, 77)
	equal(t, "stat", reply.Stat, oncrpc.RPCMismatch)
	equal(t, "lowest version", reply.Low, oncrpc.Version)
}

func (ts *testServer) dialRaw() net.Conn {
	ts.t.Helper()
	nc, err := net.Dial("tcp", ts.addr)
	if err != nil {
		ts.t.Fatal(err)
	}
	ts.t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(2 * time.Minute)) // for all of a test, also on a busy machine
	return nc
}

// A call may come in any number of fragments.
func TestFragments(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	data := bytes.Repeat([]byte("0123456789abcde"), 5000)
	write := (&writeCall{wire.WriteArgs{FH: fh, Stable: wire.FileSync}, data}).Append(nil)
	for _, cut := range []int{1, 3, 7, 20, 1000, 40_000} {
		c.setattr(super, fh, wire.Sattr{SetSize: true})
		nc := ts.dialRaw()
		for xid, args := range map[uint32][]byte{1: fh.Append(nil), 2: write} {
			call := nfsCall(wire.ProcWrite, super)
			if xid == 1 {
				call = nfsCall(wire.ProcGetattr, super)
			}
			b := rawCall(xid, call, args)
			var stream []byte
			for len(b) > 0 {
				n := min(cut, len(b))
				if cut < 1000 && len(b) < len(data)-10_000 {
					n = len(b) // the first bytes are the interesting ones
				}
				stream = oncrpctest.AppendRecordMark(stream, n, n == len(b))
				stream, b = append(stream, b[:n]...), b[n:]
			}
			nc.Write(stream)
		}
		for range 2 {
			rec, err := readRecord(nc)
			if err != nil {
				t.Fatalf("fragments of %d: %v", cut, err)
			}
			if status := binary.BigEndian.Uint32(rec[oncrpc.AcceptedSize:]); status != 0 {
				t.Errorf("fragments of %d: status %d", cut, status)
			}
		}
		c.check(fh, 0, data)
	}

	// A last fragment may be empty.
	nc := ts.dialRaw()
	b := rawCall(9, nfsCall(wire.ProcGetattr, super), fh.Append(nil))
	nc.Write(oncrpctest.AppendRecordMark(append(oncrpctest.AppendRecordMark(nil, len(b), false), b...), 0, true))
	if rec, err := readRecord(nc); err != nil || len(rec) < 100 {
		t.Errorf("%d bytes, %v", len(rec), err)
	}
}

// Where the two counts of a WRITE disagree, or the payload is not all there, nothing is written and the connection goes on.
func TestWriteCounts(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	head := func(count, length uint32) []byte {
		b := (&wire.WriteArgs{FH: fh, Count: count}).AppendHead(nil)
		binary.BigEndian.PutUint32(b[len(b)-4:], length)
		return b
	}
	for _, tt := range []struct {
		name string
		args []byte
	}{
		{"count below the data", append(head(8, 12), make([]byte, 12)...)},
		{"count above the data", append(head(16, 12), make([]byte, 12)...)},
		{"less than said", append(head(2000, 2000), make([]byte, 1000)...)},
		{"nothing of it", head(4, 4)},
		{"no padding", append(head(5, 5), make([]byte, 5)...)},
		{"huge", append(head(1<<32-1, 1<<32-1), make([]byte, 100)...)},
		{"stable_how 3", func() []byte {
			b := append(head(4, 4), make([]byte, 4)...)
			binary.BigEndian.PutUint32(b[len(b)-12:], 3)
			return b
		}()},
	} {
		for _, fragments := range []bool{false, true} {
			nc := ts.dialRaw()
			b := rawCall(5, nfsCall(wire.ProcWrite, super), tt.args)
			if fragments {
				nc.Write(append(oncrpctest.AppendRecordMark(nil, 50, false), b[:50]...))
				b = b[50:]
			}
			nc.Write(append(oncrpctest.AppendRecordMark(nil, len(b), true), b...))
			b = rawCall(6, nfsCall(wire.ProcGetattr, super), fh.Append(nil))
			nc.Write(append(oncrpctest.AppendRecordMark(nil, len(b), true), b...))
			for range 2 {
				rec, err := readRecord(nc)
				d := xdr.NewDecoder(rec)
				var reply oncrpc.Reply
				if err != nil || reply.Decode(&d) != nil {
					t.Fatalf("%s: no reply: %v", tt.name, err)
				}
				if reply.XID == 5 {
					equal(t, tt.name, reply.Stat, oncrpc.GarbageArgs)
				}
			}
		}
	}
	equal(t, "size", c.getattr(fh).Attr.Size, 0)
	ts.stop()
	ts.wantNoPayloads()
}

// wantNoPayloads checks that all memory for payloads was given back.
func (ts *testServer) wantNoPayloads() {
	ts.t.Helper()
	if !ts.payloads.TryAcquire(maxPayloads) {
		ts.t.Error("memory for payloads was not given back")
	}
}

// What is no call at all ends the connection, and only that.
func TestNoCalls(t *testing.T) {
	ts := start(t, "")
	other := ts.dial()
	reply := oncrpc.Reply{XID: 1}
	answer := reply.Append(nil)
	null := rawCall(1, nfsCall(wire.ProcNull, super), nil)
	for name, b := range map[string][]byte{
		"a reply":        append(oncrpctest.AppendRecordMark(nil, len(answer), true), answer...),
		"nothing":        oncrpctest.AppendRecordMark(nil, 0, true),
		"half a header":  append(oncrpctest.AppendRecordMark(nil, 20, true), null[:20]...),
		"2 GiB":          oncrpctest.AppendRecordMark(nil, oncrpc.MaxFragment, true),
		"5 MiB":          oncrpctest.AppendRecordMark(nil, 5<<20, false),
		"HTTP":           []byte("GET / HTTP/1.1\r\n\r\n"),
		"TLS":            {22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3},
		"fragments of 0": bytes.Repeat(oncrpctest.AppendRecordMark(nil, 0, false), 100),
	} {
		nc := ts.dialRaw()
		nc.Write(b)
		nc.(*net.TCPConn).CloseWrite()
		if rest, err := io.ReadAll(nc); len(rest) != 0 {
			t.Errorf("%s: answered by %d bytes, %v", name, len(rest), err)
		}
	}
	equal(t, "another connection", other.getattr(ts.root).Status, wire.OK)
}

// Calls of one connection are answered as they get done: one that waits for a file does not hold up the others.
func TestOutOfOrder(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	slow := c.create(ts.root, "slow", 1, 1)
	fast := c.create(ts.root, "fast", 1, 1)
	f, err := ts.get(slow)
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	args := (&writeCall{wire.WriteArgs{FH: slow}, []byte("slow")}).Append(nil)
	waiting := c.send(nfsCall(wire.ProcWrite, super), args)
	c.put(fast, 0, []byte("fast"))
	c.check(fast, 0, []byte("fast"))
	select {
	case <-waiting:
		t.Error("the first call was answered")
	default:
	}
	f.mu.Unlock()
	ts.cache.put(f)
	var res wire.WriteRes
	if _, err := finish(waiting, &res); err != nil || res.Status != wire.OK {
		t.Errorf("%v, %v", res.Status, err)
	}
	c.check(slow, 0, []byte("slow"))
}

// Replies of every length come whole when many are outstanding.
func TestPipelining(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i % 251)
	}
	c.put(fh, 0, data)
	const n = 500 // more than run at once
	var replies [n]chan []byte
	for i := range n {
		args := wire.ReadArgs{FH: fh, Offset: uint64(i), Count: uint32(i * i)}
		replies[i] = c.send(nfsCall(wire.ProcRead, super), args.Append(nil))
	}
	for i, w := range replies {
		var res readHead
		rest, err := finish(w, &res)
		if err != nil || res.Status != wire.OK || len(rest) != 0 || !bytes.Equal(res.data, data[i:i+i*i]) {
			t.Fatal(fmt.Errorf("READ of %d at %d: %v, %d bytes, %w", i*i, i, res.Status, len(res.data), err))
		}
	}
}
