package nfs3

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"
)

// hostile is an address at which connections are maltreated, until it is told to pass them on to a good server.
type hostile struct {
	ln   net.Listener
	good atomic.Bool
	only atomic.Int32                     // 1 + index of the only maltreatment; 0: each has its turn
	met  [len(maltreatments)]atomic.Int32 // connections by maltreatment
	open sync.Map                         // of net.Conn
	wg   sync.WaitGroup
}

// maltreatment is what can be done to a connection, which is closed afterwards. first is a call that came, with its
// record mark, or shorter if there is none.
type maltreatment struct {
	name string
	do   func(c net.Conn, rnd *rand.Rand, first []byte)
}

var maltreatments = [...]maltreatment{
	{"hang up", func(net.Conn, *rand.Rand, []byte) {}},
	{"silence", func(c net.Conn, _ *rand.Rand, _ []byte) { io.Copy(io.Discard, c) }},
	{"garbage", func(c net.Conn, rnd *rand.Rand, _ []byte) {
		b := make([]byte, 1+rnd.IntN(1<<20))
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		c.Write(b)
	}},
	{"huge record", func(c net.Conn, rnd *rand.Rand, first []byte) {
		flood(c, oncrpctest.AppendRecordMark(nil, oncrpc.MaxFragment, true), first[4:], make([]byte, 64<<10))
	}},
	{"huge record in pieces", func(c net.Conn, _ *rand.Rand, first []byte) {
		part := append(oncrpctest.AppendRecordMark(nil, 64<<10, false), make([]byte, 64<<10)...)
		flood(c, append(oncrpctest.AppendRecordMark(nil, 4, false), first[4:8]...), nil, part)
	}},
	{"empty fragments", func(c net.Conn, _ *rand.Rand, _ []byte) {
		flood(c, nil, nil, make([]byte, 4096)) // marks of length 0 that are not the last
	}},
	{"small fragments", func(c net.Conn, _ *rand.Rand, _ []byte) {
		flood(c, nil, nil, bytes.Repeat(append(oncrpctest.AppendRecordMark(nil, 1, false), 0), 1000))
	}},
	{"replies to nobody", func(c net.Conn, rnd *rand.Rand, _ []byte) {
		rep := (&oncrpc.Reply{XID: rnd.Uint32()}).Append([]byte{0, 0, 0, 0})
		oncrpc.PutRecordMark(rep, len(rep)-4, true)
		flood(c, nil, nil, bytes.Repeat(rep, 100))
	}},
	{"calls instead of replies", func(c net.Conn, _ *rand.Rand, first []byte) { c.Write(first) }},
	{"half a reply", func(c net.Conn, _ *rand.Rand, first []byte) {
		c.Write(append(oncrpctest.AppendRecordMark(nil, 1000, true), first[4:8]...))
		io.Copy(io.Discard, c)
	}},
	{"a reply in drops", func(c net.Conn, _ *rand.Rand, first []byte) {
		b := (&oncrpc.Reply{XID: binary.BigEndian.Uint32(first[4:])}).Append(nil)
		for _, v := range []uint32{0, 0, 1000, 0, 1000} { // of READ: there are 1000 bytes to come
			b = xdr.AppendUint32(b, v)
		}
		b = append(oncrpctest.AppendRecordMark(nil, len(b)+1000, true), b...)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
			b = []byte{0}
			time.Sleep(5 * time.Millisecond)
		}
	}},
	{"endless verifier", func(c net.Conn, _ *rand.Rand, first []byte) {
		rep := xdr.AppendUint32(append([]byte(nil), first[4:8]...), 1)
		rep = xdr.AppendUint32(rep, 0)       // accepted
		rep = xdr.AppendUint32(rep, 0)       // AUTH_NONE
		rep = xdr.AppendUint32(rep, 1<<32-1) // of so many bytes
		c.Write(append(oncrpctest.AppendRecordMark(nil, len(rep), true), rep...))
		io.Copy(io.Discard, c)
	}},
	{"more than was asked for", func(c net.Conn, _ *rand.Rand, first []byte) {
		rep := (&oncrpc.Reply{XID: binary.BigEndian.Uint32(first[4:])}).Append(nil)
		for _, v := range []uint32{0, 0, 1 << 31, 0, 1 << 31, 1, 2, 3} { // OK of READ; no status of anything else that is not short
			rep = xdr.AppendUint32(rep, v)
		}
		c.Write(append(oncrpctest.AppendRecordMark(nil, len(rep), true), rep...))
		io.Copy(io.Discard, c)
	}},
}

// flood sends the beginning and then part again and again, until the other side has had enough.
func flood(c net.Conn, mark, begin, part []byte) {
	if _, err := c.Write(append(mark, begin...)); err != nil {
		return
	}
	for {
		if _, err := c.Write(part); err != nil {
			return
		}
	}
}

func newHostile(t *testing.T, srv *server, seed uint64) *hostile {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hostile{ln: ln}
	var nth atomic.Uint64
	h.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			h.open.Store(c, true)
			h.wg.Go(func() {
				defer h.open.Delete(c)
				defer c.Close()
				n := nth.Add(1)
				rnd := rand.New(rand.NewPCG(seed, n))
				if h.good.Load() {
					h.pass(c, srv)
					return
				}
				// Half of the connections are maltreated from the first call on, JOIN, the others from the next one on.
				if (h.only.Load() > 0 || rnd.IntN(2) == 0) && refuseJoin(c) != nil {
					return
				}
				first := make([]byte, 64<<10)
				k, err := io.ReadAtLeast(c, first, 44)
				if err != nil {
					return
				}
				i := int(n) % len(maltreatments)
				if only := int(h.only.Load()); only > 0 {
					i = only - 1
				}
				h.met[i].Add(1)
				maltreatments[i].do(c, rnd, first[:k])
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		h.hangup()
		h.wg.Wait()
	})
	return h
}

func (h *hostile) hangup() {
	h.open.Range(func(c, _ any) bool { c.(net.Conn).Close(); return true })
}

func (h *hostile) pass(c net.Conn, srv *server) {
	s, err := net.Dial("tcp", srv.addr.String())
	if err != nil {
		return
	}
	defer s.Close()
	h.wg.Go(func() { io.Copy(s, c); s.Close() })
	io.Copy(c, s)
}

// TestHostile: whatever a server sends, memory is bounded and nothing breaks; each request ends with what a good server
// says or with an error; and once the server is good again everything works.
func TestHostile(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	before := runtime.NumGoroutine()
	srv := newServer(t)
	want := pattern(256<<10, seed)
	srv.put("f", want)
	h := newHostile(t, srv, seed)
	addr := h.ln.Addr().(*net.TCPAddr).AddrPort()
	tg := newTarget(t, Config{Timeout: 300 * time.Millisecond}, addr)
	var rs []*request
	for i := range 8 {
		off := int64(i) * 1000
		rs = append(rs, readOp("f", off, 1000), readOp("f", 0, len(want)), writeOp("g", off, want[off:off+1000]), newOp(layout.OpCommit, "g", 0, nil))
	}
	start(tg, rs...)
	nulls := make(chan error, 1)
	go func() { nulls <- tg.Null(t.Context()) }()

	runtime.GC()
	var base, now runtime.MemStats
	runtime.ReadMemStats(&base)
	begin := time.Now()
	everything := func() bool {
		for i := range h.met {
			if h.met[i].Load() == 0 {
				return false
			}
		}
		return true
	}
	for !everything() {
		if time.Since(begin) > 100*time.Second {
			t.Fatal("not everything was tried")
		}
		time.Sleep(100 * time.Millisecond)
		r := readOp("f", 0, 1000) // so that there is always something to do
		start(tg, r)
		rs = append(rs, r)
		runtime.GC()
		runtime.ReadMemStats(&now)
		if grown := int64(now.HeapAlloc) - int64(base.HeapAlloc); grown > 32<<20 {
			t.Fatalf("%d bytes of memory more", grown)
		}
	}
	h.good.Store(true)
	h.hangup()
	for _, r := range rs {
		wait(t, r.done, "a request to a hostile server")
		var broken *ReplyError
		switch {
		case r.Err != nil && !errors.As(r.Err, &broken):
			t.Errorf("%v: error %v", r.Kind, r.Err)
		case r.Err == nil && r.Kind == layout.OpRead && !bytes.Equal(r.Data[:r.N], want[r.Off:][:r.N]):
			t.Errorf("READ of %d bytes at %d: contents differ", r.N, r.Off)
		}
	}
	if err := <-nulls; err != nil && !errors.As(err, new(*ReplyError)) {
		t.Errorf("NULL: %v", err)
	}
	r := readOp("f", 0, len(want))
	ok(t, tg, r, writeOp("g", 0, want), newOp(layout.OpCommit, "g", 0, nil))
	if !bytes.Equal(r.Data, want) || !bytes.Equal(srv.get("g"), want) {
		t.Error("contents differ")
	}
	if err := tg.Close(); err != nil {
		t.Error(err)
	}
	h.ln.Close()
	h.hangup()
	srv.close()
	waittest.Until(t, "goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
}

// TestReplyInDrops: a reply that never ends is none, though something is heard all the time.
func TestReplyInDrops(t *testing.T) {
	srv := newServer(t)
	want := pattern(1000, 1)
	srv.put("f", want)
	i := slices.IndexFunc(maltreatments[:], func(m maltreatment) bool { return m.name == "a reply in drops" })
	h := newHostile(t, srv, 1)
	h.only.Store(int32(i + 1))
	tg := newTarget(t, Config{Timeout: 100 * time.Millisecond, Connections: 1}, h.ln.Addr().(*net.TCPAddr).AddrPort())
	r := readOp("f", 0, len(want))
	start(tg, r)
	waittest.Until(t, "two connections in vain", func() bool { return h.met[i].Load() >= 2 })
	h.good.Store(true) // the next one
	wait(t, r.done, "the read")
	if r.Err != nil || !bytes.Equal(r.Data[:r.N], want) {
		t.Errorf("read %d bytes, %v", r.N, r.Err)
	}
}
