package nfs3

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

func TestReadWriteCommit(t *testing.T) {
	for _, attrs := range []bool{false, true} {
		srv := newServer(t)
		srv.attrs = attrs
		tg := newTarget(t, Config{}, srv.addr)
		for i, n := range []int{0, 1, 2, 3, 4, 5, 4096, 16384, 65535, 65536, 65537, 1<<20 - 1, 1 << 20} {
			name := fmt.Sprintf("file%d", i)
			off := int64(7 * i)
			data := pattern(n, uint64(i))
			w := writeOp(name, off, data)
			w.Stable = layout.DataSync
			ok(t, tg, w)
			if w.Committed != layout.DataSync || w.Verifier != (layout.Verifier{1}) {
				t.Errorf("WRITE of %d: committed %v, verifier %x", n, w.Committed, w.Verifier)
			}
			r := readOp(name, off, n)
			ok(t, tg, r)
			if !bytes.Equal(r.Data, data) {
				t.Fatalf("READ of %d bytes returned others", n)
			}
			c := newOp(layout.OpCommit, name, 0, nil)
			c.Count = 1 << 33
			ok(t, tg, c)
			if c.Verifier != (layout.Verifier{1}) {
				t.Errorf("COMMIT: verifier %x", c.Verifier)
			}
		}
		// At the end of the file.
		srv.put("f", pattern(1000, 1))
		r := readOp("f", 900, 4096)
		do(t, tg, r)
		if r.Err != nil || r.N != 100 || !r.EOF || !bytes.Equal(r.Data[:100], pattern(1000, 1)[900:]) {
			t.Errorf("READ across the end: %d bytes, EOF %v, error %v", r.N, r.EOF, r.Err)
		}
		r = readOp("f", 5000, 10)
		do(t, tg, r)
		if r.Err != nil || r.N != 0 || !r.EOF {
			t.Errorf("READ behind the end: %d bytes, EOF %v, error %v", r.N, r.EOF, r.Err)
		}
		if srv.calls(wire.ProcFsinfo) != 1 {
			t.Errorf("%d FSINFO calls, want 1", srv.calls(wire.ProcFsinfo))
		}
	}
}

func TestCredential(t *testing.T) {
	srv := newServer(t)
	got := make(chan oncrpc.AuthSys, 10)
	srv.script = func(c *callInfo) *action {
		var a oncrpc.AuthSys
		if err := a.Decode(c.cred.Body); err != nil {
			t.Error(err)
		}
		got <- a
		return nil
	}
	tg := newTarget(t, Config{}, srv.addr)
	ok(t, tg, writeOp("f", 0, []byte("x")))
	for range 2 { // FSINFO, WRITE
		if a := <-got; a.UID != 1234 || a.GID != 5678 || len(a.GIDs) != 0 || a.Machine == "" {
			t.Errorf("credential %+v", a)
		}
	}
	if _, err := tg.GetAttr(t.Context(), layout.Credential{}, []byte("f")); err != nil {
		t.Fatal(err)
	}
	if a := <-got; a.UID != 0 || a.GID != 0 {
		t.Errorf("credential %+v", a)
	}
}

func TestStartRefuses(t *testing.T) {
	srv := newServer(t)
	tg := newTarget(t, Config{RSize: 4096, WSize: 8192}, srv.addr)
	noFile := readOp("f", 0, 1)
	noFile.File = nil
	long := readOp("f", 0, 1)
	long.File = &layout.DataFile{Handles: [][]byte{make([]byte, 65)}}
	for _, r := range []*request{
		readOp("f", 0, 4097), writeOp("f", 0, make([]byte, 8193)), readOp("f", -1, 1), readOp("f", 1<<63-1, 2),
		newOp(9, "f", 0, nil), noFile, long,
	} {
		do(t, tg, r)
		if r.Err == nil {
			t.Errorf("%v of %d bytes at %d was accepted", r.Kind, len(r.Data), r.Off)
		}
	}
	if n := srv.connections(); n != 0 {
		t.Errorf("%d connections made for nothing", n)
	}
	for _, cfg := range []Config{
		{}, {Addrs: []netip.AddrPort{{}}}, {Addrs: []netip.AddrPort{srv.addr}, Connections: 17},
		{Addrs: []netip.AddrPort{srv.addr}, RSize: 100}, {Addrs: []netip.AddrPort{srv.addr}, Timeout: -1},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New(%+v) succeeded", cfg)
		}
	}
}

func TestReorder(t *testing.T) {
	srv := newServer(t)
	const n = 40
	data := pattern(n*8192, 3)
	srv.put("f", data)
	var mu sync.Mutex
	var gates []chan struct{}
	srv.script = func(c *callInfo) *action {
		if c.proc != wire.ProcRead {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		g := make(chan struct{})
		gates = append(gates, g)
		if len(gates) == n {
			// All are here: reply in the opposite order.
			go func(gates []chan struct{}) {
				for i := len(gates) - 1; i >= 0; i-- {
					close(gates[i])
					time.Sleep(time.Millisecond)
				}
			}(gates)
		}
		return &action{wait: g}
	}
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	var rs []*request
	for i := range n {
		rs = append(rs, readOp("f", int64(i)*8192, 8192))
	}
	ok(t, tg, rs...)
	for i, r := range rs {
		if !bytes.Equal(r.Data, data[i*8192:][:8192]) {
			t.Errorf("request %d got the data of another", i)
		}
	}
}

func TestShort(t *testing.T) {
	srv := newServer(t)
	srv.script = func(c *callInfo) *action {
		switch c.proc {
		case wire.ProcRead, wire.ProcWrite:
			if c.nth%3 == 0 {
				return &action{limit: -1} // nothing, which is no progress but legal
			}
			return &action{limit: 1001}
		}
		return nil
	}
	tg := newTarget(t, Config{}, srv.addr)
	data := pattern(20000, 4)
	w := writeOp("f", 5, data)
	ok(t, tg, w)
	r := readOp("f", 5, len(data))
	ok(t, tg, r)
	if !bytes.Equal(r.Data, data) || !bytes.Equal(srv.get("f")[5:], data) {
		t.Error("contents differ")
	}
}

func TestNoProgress(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 100))
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcRead && c.nth == 1 {
			return &action{limit: 10}
		}
		if c.proc == wire.ProcRead || c.proc == wire.ProcWrite {
			return &action{limit: -1}
		}
		return nil
	}
	tg := newTarget(t, Config{}, srv.addr)
	r, w := readOp("f", 0, 100), writeOp("f", 0, make([]byte, 100))
	do(t, tg, r, w)
	for _, r := range []*request{r, w} {
		var e *ReplyError
		if !errors.As(r.Err, &e) || e.Errno() != syscall.EIO || e.Addr != srv.addr {
			t.Errorf("%v: error %v", r.Kind, r.Err)
		}
	}
	if r.N != 10 || w.N != 0 {
		t.Errorf("READ %d bytes, WRITE %d", r.N, w.N)
	}
	if n := srv.calls(wire.ProcRead); n != 1+maxEmpty {
		t.Errorf("%d READ calls, want %d", n, 1+maxEmpty)
	}
}

func TestStatus(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 100))
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcFsinfo {
			return nil
		}
		return &action{status: wire.ErrDQuot}
	}
	for _, srv.attrs = range []bool{false, true} {
		tg := newTarget(t, Config{}, srv.addr)
		r, w, c := readOp("f", 0, 100), writeOp("f", 0, make([]byte, 100)), newOp(layout.OpCommit, "f", 0, nil)
		do(t, tg, r, w, c)
		for _, r := range []*request{r, w, c} {
			var e *Error
			if !errors.As(r.Err, &e) || e.Status != wire.ErrDQuot || e.Errno() != syscall.EDQUOT || e.Op != r.Kind.String() || e.Addr != srv.addr || r.N != 0 {
				t.Errorf("%v: %d bytes, error %v", r.Kind, r.N, r.Err)
			}
		}
		if _, err := tg.GetAttr(t.Context(), layout.Credential{}, []byte("f")); !isStatus(err, wire.ErrDQuot) {
			t.Errorf("GETATTR: %v", err)
		}
	}
}

func TestRefused(t *testing.T) {
	srv := newServer(t)
	for _, rep := range []oncrpc.Reply{
		{Stat: oncrpc.ProgUnavail}, {Stat: oncrpc.ProgMismatch, Low: 4, High: 4}, {Stat: oncrpc.ProcUnavail}, {Stat: oncrpc.GarbageArgs},
		{Stat: oncrpc.SystemErr}, {Stat: oncrpc.RPCMismatch, Low: 3, High: 3}, {Stat: oncrpc.AuthError, AuthStat: oncrpc.AuthTooWeak},
	} {
		srv.mu.Lock()
		srv.script = func(*callInfo) *action { return &action{rpc: &rep} }
		srv.mu.Unlock()
		tg := newTarget(t, Config{}, srv.addr)
		r, w, c := readOp("f", 0, 100), writeOp("f", 0, make([]byte, 100)), newOp(layout.OpCommit, "f", 0, nil)
		do(t, tg, r, w, c)
		null := tg.Null(t.Context())
		for _, err := range []error{r.Err, w.Err, c.Err, null} {
			var e *oncrpc.Error
			var re *ReplyError
			if !errors.As(err, &re) || !errors.As(err, &e) || e.Stat != rep.Stat || re.Errno() != e.Errno() {
				t.Errorf("%v: error %v", rep.Stat, err)
			}
		}
	}
}

func TestJukebox(t *testing.T) {
	srv := newServer(t)
	xids := make(chan uint32, 10)
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcWrite {
			xids <- c.xid
		}
		if c.proc != wire.ProcFsinfo && c.nth <= 2 {
			return &action{status: wire.ErrJukebox}
		}
		return nil
	}
	tg := newTarget(t, Config{}, srv.addr)
	data := pattern(5000, 5)
	begin := time.Now()
	ok(t, tg, writeOp("f", 0, data))
	if d := time.Since(begin); d < 200*time.Millisecond {
		t.Errorf("two back-offs took %v", d)
	}
	if a, b := <-xids, <-xids; a == b {
		t.Error("repeated with the same xid: a server's cache would say JUKEBOX for ever")
	}
	if !bytes.Equal(srv.get("f"), data) {
		t.Error("contents differ")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := tg.GetAttr(ctx, layout.Credential{}, []byte("f")); err != nil {
		t.Error(err)
	}
	if st := tg.Stats(); st.Jukebox != 4 || st.Outstanding != 0 || st.Delayed != 0 {
		t.Errorf("stats %+v", st)
	}
}

// Who does not wait any longer for a server that says JUKEBOX learns that it was this that he waited for.
func TestJukeboxForEver(t *testing.T) {
	srv := newServer(t)
	said := make(chan struct{}, 100)
	srv.script = func(c *callInfo) *action {
		if c.proc != wire.ProcGetattr {
			return nil
		}
		said <- struct{}{}
		return &action{status: wire.ErrJukebox}
	}
	tg := newTarget(t, Config{}, srv.addr)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { // ends with the second answer that is asked for
		<-said
		<-said
		cancel()
	}()
	if _, err := tg.GetAttr(ctx, layout.Credential{}, []byte("f")); !errors.Is(err, context.Canceled) || !errors.Is(err, ErrDelayed) {
		t.Errorf("GETATTR: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err := tg.GetAttr(ctx, layout.Credential{}, []byte("f")); errors.Is(err, ErrDelayed) {
		t.Errorf("GETATTR that was not sent: %v", err)
	}
}

// TestConnectionLost hangs up at various calls; everything must be done in the end, with the same xid.
func TestConnectionLost(t *testing.T) {
	srv := newServer(t)
	data := pattern(64*4096, 6)
	srv.put("r", data)
	var dropped atomic.Int32
	var mu sync.Mutex
	came, lost := map[uint32]int{}, map[uint32]bool{} // by xid
	srv.script = func(c *callInfo) *action {
		mu.Lock()
		defer mu.Unlock()
		came[c.xid]++
		if c.proc != wire.ProcFsinfo && c.nth%10 == 9 && dropped.Add(1) <= 6 {
			lost[c.xid] = true
			return &action{hangup: true}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 2}, srv.addr)
	var rs []*request
	for i := range 64 {
		off := int64(i) * 4096
		rs = append(rs, readOp("r", off, 4096), writeOp("w", off, data[off:][:4096]))
	}
	ok(t, tg, rs...)
	for i := 0; i < len(rs); i += 2 {
		if !bytes.Equal(rs[i].Data, data[rs[i].Off:][:4096]) {
			t.Errorf("READ at %d: contents differ", rs[i].Off)
		}
	}
	if !bytes.Equal(srv.get("w"), data) {
		t.Error("written contents differ")
	}
	mu.Lock()
	for xid := range lost {
		if came[xid] < 2 {
			t.Errorf("call %#x did not come again with its xid", xid)
		}
	}
	st := tg.Stats()
	if st.Resent == 0 || len(lost) == 0 || st.Connects < 2 {
		t.Errorf("stats %+v", st)
	}
	mu.Unlock()
	waittest.Until(t, "all well", func() bool { return tg.Stats().Trouble.IsZero() })
}

// TestGarbage has a server that first sends something senseless and then behaves.
func TestGarbage(t *testing.T) {
	mark := func(n int, last bool) []byte { return oncrpctest.AppendRecordMark(nil, n, last) }
	zeros := bytes.Repeat(mark(0, false), maxFragments+10)
	for _, tc := range []struct {
		name string
		raw  func(c *callInfo) []byte
	}{
		{"huge record", func(c *callInfo) []byte {
			return append(mark(1<<31-1, true), (&oncrpc.Reply{XID: c.xid}).Append(nil)...)
		}},
		{"record too large for its kind", func(c *callInfo) []byte {
			return append(mark(128<<10, true), (&oncrpc.Reply{XID: c.xid}).Append(nil)...)
		}},
		{"endless fragments", func(c *callInfo) []byte {
			return append(mark(100, false), bytes.Repeat([]byte{1}, 1<<20)...)
		}},
		{"empty fragments", func(*callInfo) []byte { return zeros }},
		{"empty record", func(*callInfo) []byte { return mark(0, true) }},
		{"text", func(*callInfo) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") }},
		{"a call", func(c *callInfo) []byte {
			b := (&oncrpc.Call{XID: c.xid}).Append(mark(0, true))
			oncrpc.PutRecordMark(b, len(b)-4, true)
			return b
		}},
		{"header only", func(c *callInfo) []byte {
			return (&oncrpc.Reply{XID: c.xid}).Append(mark(oncrpc.AcceptedSize, true))
		}},
		{"more data than asked for", func(c *callInfo) []byte {
			b := (&oncrpc.Reply{XID: c.xid}).Append(mark(0, true))
			if c.proc == wire.ProcRead {
				b = (&wire.ReadRes{Count: uint32(c.n) + 4}).AppendHead(b)
				b = append(b, make([]byte, c.n+8)...)
			} else {
				b = (&wire.WriteRes{Count: uint32(c.n) + 4}).Append(b)
			}
			oncrpc.PutRecordMark(b, len(b)-4, true)
			return b
		}},
		{"less data than promised", func(c *callInfo) []byte {
			b := (&oncrpc.Reply{XID: c.xid}).Append(nil)
			b = (&wire.ReadRes{Count: uint32(c.n)}).AppendHead(b)
			b = append(b, make([]byte, c.n/2)...)
			return cut(b, 999)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			srv := newServer(t)
			data := pattern(20000, 7)
			srv.put("r", data)
			srv.script = func(c *callInfo) *action {
				if c.proc != wire.ProcFsinfo && c.nth == 1 {
					return &action{raw: tc.raw(c)}
				}
				return nil
			}
			tg := newTarget(t, Config{Connections: 1}, srv.addr)
			buf := bytes.Repeat([]byte{0xee}, 30000)
			r := newOp(layout.OpRead, "r", 0, buf[5000:25000])
			w := writeOp("w", 0, data)
			ok(t, tg, r, w)
			if !bytes.Equal(r.Data, data) || !bytes.Equal(srv.get("w"), data) {
				t.Error("contents differ")
			}
			for _, b := range append(buf[:5000:5000], buf[25000:]...) {
				if b != 0xee {
					t.Fatal("bytes outside the buffer were written")
				}
			}
			if n := srv.connections(); n < 2 {
				t.Errorf("%d connections: the garbled one was not replaced", n)
			}
		})
	}
}

// TestAlwaysGarbled: a request that the server cannot answer sensibly must not be repeated for ever.
func TestAlwaysGarbled(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 100))
	srv.script = func(c *callInfo) *action {
		if c.off != 1 && c.proc != wire.ProcGetattr {
			return nil
		}
		b := (&oncrpc.Reply{XID: c.xid}).Append(oncrpctest.AppendRecordMark(nil, 28, true))
		return &action{raw: append(b, 0, 0, 0, 0)}
	}
	for _, r := range []*request{readOp("f", 1, 10), writeOp("f", 1, make([]byte, 10)), newOp(layout.OpCommit, "f", 1, nil), nil} {
		tg := newTarget(t, Config{Connections: 1}, srv.addr)
		var err error
		if r == nil {
			_, err = tg.GetAttr(t.Context(), layout.Credential{}, []byte("f"))
		} else {
			do(t, tg, r)
			err = r.Err
		}
		var e *ReplyError
		if !errors.As(err, &e) || e.Errno() != syscall.EIO || !errors.Is(err, xdr.ErrTruncated) {
			t.Errorf("error %v", err)
		}
		ok(t, tg, readOp("f", 0, 10))
	}
}

// TestEarlyReply has a server that answers a WRITE of which it has read no more than the head: the call may not end
// while its data is being sent.
func TestEarlyReply(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if refuseJoin(c) != nil {
				continue
			}
			b := make([]byte, 40000)
			for n := 0; n < 500; {
				k, err := c.Read(b[n:])
				if err != nil {
					break
				}
				n += k
			}
			if proc := binary.BigEndian.Uint32(b[24:]); proc == uint32(wire.ProcNull) {
				// The probe of a second connection; the WRITE is behind it.
				c.Write(cut((&oncrpc.Reply{XID: binary.BigEndian.Uint32(b[4:])}).Append(nil), 100))
				n, _ := oncrpc.ParseRecordMark(b)
				b = b[4+n:]
			}
			rep := (&oncrpc.Reply{XID: binary.BigEndian.Uint32(b[4:])}).Append(nil)
			c.Write(cut((&wire.WriteRes{Count: 12 << 20}).Append(rep), 1000))
		}
	}()
	tg := newTarget(t, Config{Connections: 1, WSize: 12 << 20}, ln.Addr().(*net.TCPAddr).AddrPort())
	tg.limits = limitsKnown
	w := writeOp("f", 0, make([]byte, 12<<20))
	do(t, tg, w)
	var e *ReplyError
	if !errors.As(w.Err, &e) || !strings.Contains(w.Err.Error(), "before it was sent") {
		t.Errorf("error %v", w.Err)
	}
}

func TestUnknownReplies(t *testing.T) {
	srv := newServer(t)
	data := pattern(300000, 8)
	srv.put("f", data)
	srv.script = func(c *callInfo) *action {
		if c.proc != wire.ProcRead {
			return nil
		}
		// Each reply comes twice; the first one of all is preceded by a large one that nobody wants.
		if c.nth == 1 {
			b := (&oncrpc.Reply{XID: c.xid + 1<<20}).Append(nil)
			c.conn.Write(cut(append(b, make([]byte, 200000)...), 70001))
		}
		return &action{twice: true}
	}
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	for i := range 10 {
		r := readOp("f", int64(i*30000), 30000)
		ok(t, tg, r)
		if !bytes.Equal(r.Data, data[i*30000:][:30000]) {
			t.Fatal("contents differ")
		}
	}
	waittest.Until(t, "the last duplicate", func() bool { return tg.Stats().Unknown == 11 })
	if st := tg.Stats(); st.Connects != 1 {
		t.Errorf("%d connections", st.Connects)
	}
}

func TestFragments(t *testing.T) {
	srv := newServer(t)
	srv.fsize = 300000
	data := pattern(300000, 9)
	srv.put("f", data)
	var size atomic.Int64
	srv.script = func(c *callInfo) *action { return &action{cut: int(size.Load())} }
	tg := newTarget(t, Config{}, srv.addr)
	for _, tc := range []struct{ cut, read int }{{1, 999}, {3, 5000}, {4, 4096}, {43, 50000}, {131, 150000}, {9000, 300000}, {65536, 300000}, {1 << 20, 300000}} {
		size.Store(int64(tc.cut))
		for _, srv.attrs = range []bool{false, true} {
			r, r2 := readOp("f", 1, tc.read), readOp("f", 2, 10)
			w := writeOp("w", 0, data[:100])
			if tc.read == len(data) {
				r.Off = 0
			}
			ok(t, tg, r, w, r2)
			if !bytes.Equal(r.Data, data[r.Off:][:tc.read]) || !bytes.Equal(r2.Data, data[2:12]) {
				t.Fatalf("fragments of %d: contents differ", tc.cut)
			}
		}
	}
	if st := tg.Stats(); st.Resent != 0 || st.Err != nil {
		t.Errorf("stats %+v", st)
	}
}

// TestVerifierAndSurplus: a long RPC verifier moves everything behind it, and bytes behind the results mean nothing.
func TestVerifierAndSurplus(t *testing.T) {
	srv := newServer(t)
	data := pattern(100000, 10)
	srv.put("f", data)
	srv.script = func(c *callInfo) *action { return &action{verfLen: 4 * (c.nth * 7 % 101), extra: c.nth % 50} }
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	for i := range 40 {
		r, w := readOp("f", int64(i), 50000), writeOp("w", 0, data[:1000])
		ok(t, tg, r, w)
		if !bytes.Equal(r.Data, data[i:][:50000]) {
			t.Fatal("contents differ")
		}
	}
	if st := tg.Stats(); st.Connects != 1 {
		t.Errorf("stats %+v", st)
	}
}

func TestWriteVerifier(t *testing.T) {
	data := pattern(10000, 11)
	t.Run("changes between pieces", func(t *testing.T) {
		srv := newServer(t)
		srv.script = func(c *callInfo) *action {
			if c.proc != wire.ProcWrite {
				return nil
			}
			switch c.nth {
			case 1:
				return &action{limit: 4000}
			case 2: // the server has restarted and lost the first piece
				c.srv.setVerf(2)
				c.srv.put("f", nil)
			}
			return nil
		}
		tg := newTarget(t, Config{}, srv.addr)
		w := writeOp("f", 0, data)
		ok(t, tg, w)
		if w.Verifier != (layout.Verifier{2}) || !bytes.Equal(srv.get("f"), data) {
			t.Errorf("verifier %x, contents equal: %v", w.Verifier, bytes.Equal(srv.get("f"), data))
		}
	})
	t.Run("does not matter when stable", func(t *testing.T) {
		srv := newServer(t)
		srv.script = func(c *callInfo) *action {
			if c.proc == wire.ProcWrite {
				c.srv.setVerf(byte(c.nth))
				return &action{limit: 4000}
			}
			return nil
		}
		tg := newTarget(t, Config{}, srv.addr)
		w := writeOp("f", 0, data)
		w.Stable = layout.FileSync
		ok(t, tg, w)
		if n := srv.calls(wire.ProcWrite); n != 3 || w.Committed != layout.FileSync {
			t.Errorf("%d calls, committed %v", n, w.Committed)
		}
	})
	t.Run("changes for ever", func(t *testing.T) {
		srv := newServer(t)
		srv.script = func(c *callInfo) *action {
			if c.proc == wire.ProcWrite {
				c.srv.setVerf(byte(c.nth))
				return &action{limit: 4000}
			}
			return nil
		}
		tg := newTarget(t, Config{}, srv.addr)
		w := writeOp("f", 0, data)
		do(t, tg, w)
		if !errors.Is(w.Err, errRestarts) {
			t.Errorf("error %v", w.Err)
		}
	})
	t.Run("weaker than asked", func(t *testing.T) {
		srv := newServer(t)
		srv.script = func(c *callInfo) *action { return &action{weak: c.nth == 2, limit: 4000} }
		tg := newTarget(t, Config{}, srv.addr)
		w := writeOp("f", 0, data)
		w.Stable = layout.FileSync
		ok(t, tg, w)
		if w.Committed != layout.Unstable {
			t.Errorf("committed %v", w.Committed)
		}
	})
}

func TestLimits(t *testing.T) {
	srv := newServer(t)
	srv.fsize = 30000
	tooLarge := false
	gate := make(chan struct{})
	srv.script = func(c *callInfo) *action {
		tooLarge = tooLarge || c.n > 30000
		if c.proc == wire.ProcFsinfo {
			return &action{wait: gate}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	if r, w := tg.Limits(); r != DefaultSize || w != DefaultSize {
		t.Errorf("limits %d, %d", r, w)
	}
	data := pattern(1<<20, 12)
	w := writeOp("f", 0, data)
	start(tg, w)
	waittest.Until(t, "FSINFO", func() bool { return srv.calls(wire.ProcFsinfo) == 1 })
	if st := tg.Stats(); st.Queued != 1 {
		t.Errorf("stats %+v", st)
	}
	close(gate)
	wait(t, w.done, "WRITE")
	r := readOp("f", 0, len(data))
	ok(t, tg, r)
	if !bytes.Equal(r.Data, data) || w.N != len(data) || w.Err != nil {
		t.Errorf("contents differ, or %v", w.Err)
	}
	if r, w := tg.Limits(); r != 30000 || w != 30000 {
		t.Errorf("limits %d, %d", r, w)
	}
	if tooLarge {
		t.Error("a call was larger than the server said it takes")
	}
}

func TestLimitsUnknown(t *testing.T) {
	srv := newServer(t)
	srv.fsize = 5000
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcFsinfo && c.nth < maxAsked {
			return &action{status: wire.ErrStale}
		}
		return nil
	}
	tg := newTarget(t, Config{}, srv.addr)
	for range maxAsked + 2 {
		ok(t, tg, writeOp("f", 0, make([]byte, 10000)))
	}
	if n := srv.calls(wire.ProcFsinfo); n != maxAsked {
		t.Errorf("%d FSINFO calls, want %d", n, maxAsked)
	}
	if r, _ := tg.Limits(); r != 5000 {
		t.Errorf("rsize %d", r)
	}
	// A server that never tells.
	srv2 := newServer(t)
	srv2.script = func(c *callInfo) *action {
		if c.proc == wire.ProcFsinfo {
			return &action{rpc: &oncrpc.Reply{Stat: oncrpc.ProcUnavail}}
		}
		return nil
	}
	tg = newTarget(t, Config{}, srv2.addr)
	for range maxAsked + 2 {
		ok(t, tg, writeOp("f", 0, make([]byte, 10000)))
	}
	if n := srv2.calls(wire.ProcFsinfo); n != maxAsked {
		t.Errorf("%d FSINFO calls, want %d", n, maxAsked)
	}
}

// TestSilence: a connection on which nothing comes back is replaced, one that is merely idle or slow is not.
func TestSilence(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 1<<20))
	srv.script = func(c *callInfo) *action {
		if c.nc == 1 && c.proc == wire.ProcRead {
			return &action{silent: true}
		}
		return nil
	}
	const timeout = 1500 * time.Millisecond // a busy machine must not be silent for so long
	tg := newTarget(t, Config{Connections: 1, Timeout: timeout}, srv.addr)
	ok(t, tg, writeOp("f", 0, make([]byte, 1)))
	time.Sleep(2 * timeout) // idle
	if n := srv.connections(); n != 1 {
		t.Fatalf("an idle connection was replaced: %d", n)
	}
	ok(t, tg, readOp("f", 0, 1000), readOp("f", 0, 2000))
	if n := srv.connections(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
	if st := tg.Stats(); !errors.Is(st.Err, errSilent) || st.Resent != 2 || !st.Trouble.IsZero() {
		t.Errorf("stats %+v", st)
	}

	// One call that takes long does not matter while others are answered.
	slow := make(chan struct{})
	srv.mu.Lock()
	srv.script = func(c *callInfo) *action {
		if c.off == 77 {
			return &action{wait: slow}
		}
		return nil
	}
	srv.mu.Unlock()
	r := readOp("f", 77, 10)
	start(tg, r)
	for end := time.Now().Add(2 * timeout); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		ok(t, tg, readOp("f", 0, 10))
	}
	close(slow)
	wait(t, r.done, "the slow READ")
	if n := srv.connections(); n != 2 {
		t.Errorf("a slow connection was replaced: %d", n)
	}
}

// TestStuckWriter: the server accepts and never reads, so the socket fills up.
func TestStuckWriter(t *testing.T) {
	srv := newServer(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	const timeout = 2 * time.Second // a busy machine must not keep Flush for so long
	tg := newTarget(t, Config{Connections: 1, Timeout: timeout}, ln.Addr().(*net.TCPAddr).AddrPort(), srv.addr)
	tg.limits = limitsKnown
	var rs []*request
	data := pattern(1<<20, 13)
	for i := range 16 {
		rs = append(rs, writeOp("f", int64(i)<<20, data))
	}
	begin := time.Now()
	start(tg, rs...)
	if d := time.Since(begin); d > timeout*9/10 {
		t.Errorf("Flush took %v", d)
	}
	for _, r := range rs {
		wait(t, r.done, "WRITE")
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	if got := srv.get("f"); !bytes.Equal(got, bytes.Repeat(data, 16)) {
		t.Error("contents differ")
	}
}

func TestRefuseThenAccept(t *testing.T) {
	srv := newServer(t)
	addr := srv.addr
	srv.close()
	var log logBuffer
	tg := newTarget(t, Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, addr)
	w := writeOp("f", 0, []byte("hello"))
	start(tg, w)
	waittest.Until(t, "failed attempts", func() bool { return tg.Stats().Err != nil })
	time.Sleep(300 * time.Millisecond)
	if st := tg.Stats(); !errors.Is(st.Err, syscall.ECONNREFUSED) || st.Trouble.IsZero() || st.Connections[0].Up || st.Outstanding == 0 {
		t.Errorf("stats %+v", st)
	}
	srv.listen(t, addr.String())
	wait(t, w.done, "WRITE")
	if w.Err != nil || string(srv.get("f")) != "hello" {
		t.Errorf("error %v", w.Err)
	}
	// Down and up again: the same without new requests in between, and one line for each change.
	waittest.Until(t, "all well", func() bool { return tg.Stats().Trouble.IsZero() })
	srv.close()
	w = writeOp("f", 0, []byte("HELLO"))
	start(tg, w)
	time.Sleep(50 * time.Millisecond)
	srv.listen(t, addr.String())
	wait(t, w.done, "WRITE")
	waittest.Until(t, "all well", func() bool { return tg.Stats().Trouble.IsZero() })
	if n := strings.Count(log.String(), "\n"); n != 4 && n != 2 { // 2: the server was back before anybody noticed
		t.Errorf("log:\n%s", log.String())
	}
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestTwoAddresses(t *testing.T) {
	dead := newServer(t)
	dead.close()
	srv := newServer(t)
	for _, addrs := range [][]netip.AddrPort{{dead.addr, srv.addr}, {srv.addr, dead.addr}} {
		tg := newTarget(t, Config{Connections: 3}, addrs...)
		begin := time.Now()
		ok(t, tg, writeOp("f", 0, make([]byte, 1000)))
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("took %v", d)
		}
	}
}

// silentAddress is one that does not even refuse connections.
func silentAddress(t *testing.T) netip.AddrPort {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	in := sa.(*unix.SockaddrInet4)
	addr := netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port))
	for full := false; !full; { // nobody accepts, so the queue fills up and the kernel ignores who comes
		c, err := net.DialTimeout("tcp", addr.String(), 100*time.Millisecond)
		if full = err != nil; !full {
			t.Cleanup(func() { c.Close() })
		}
	}
	return addr
}

// TestSilentAddress has one address of two that does not even refuse.
func TestSilentAddress(t *testing.T) {
	addr := silentAddress(t)
	srv := newServer(t)
	for _, addrs := range [][]netip.AddrPort{{addr, srv.addr}, {srv.addr, addr}} {
		tg := newTarget(t, Config{}, addrs...)
		begin := time.Now()
		ok(t, tg, writeOp("f", 0, make([]byte, 1000)))
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("took %v", d)
		}
	}
}

// TestIdleClose: a server that closes an idle connection is no trouble, and nothing is done about it until the next
// request.
func TestIdleClose(t *testing.T) {
	srv := newServer(t)
	var log logBuffer
	tg := newTarget(t, Config{Connections: 1, Log: slog.New(slog.NewTextHandler(&log, nil))}, srv.addr)
	ok(t, tg, writeOp("f", 0, []byte("a")))
	srv.hangup()
	waittest.Until(t, "the loss", func() bool { return !tg.Stats().Connections[0].Up })
	time.Sleep(20 * time.Millisecond)
	if n := srv.connections(); n != 1 {
		t.Errorf("%d connections", n)
	}
	epoch := tg.Epoch()
	ok(t, tg, writeOp("f", 0, []byte("b")))
	if tg.Epoch() == epoch {
		t.Error("the epoch has not changed with the connection")
	}
	epoch = tg.Epoch()
	ok(t, tg, writeOp("f", 0, []byte("c")))
	if tg.Epoch() != epoch {
		t.Error("the epoch has changed without a new connection")
	}
	if log.String() != "" || srv.connections() != 2 {
		t.Errorf("%d connections, log %q", srv.connections(), log.String())
	}
}

// TestConcurrent has many goroutines read and write their own ranges while connections are lost, with short replies and
// JUKEBOX mixed in.
func TestConcurrent(t *testing.T) {
	srv := newServer(t)
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcFsinfo {
			return nil
		}
		switch rand.N(200) {
		case 0:
			return &action{hangup: true}
		case 1:
			return &action{status: wire.ErrJukebox}
		case 2, 3, 4, 5, 6:
			return &action{limit: 1 + rand.N(c.n+1)}
		case 7, 8, 9:
			return &action{cut: 1000 + rand.N(5000)}
		case 10:
			return &action{twice: true}
		}
		return nil
	}
	tg := newTarget(t, Config{}, srv.addr)
	const workers, size = 16, 64 << 10
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			name := fmt.Sprint("f", i%3)
			for k := range rounds {
				n := 1 + rand.N(size)
				off := int64(i)*size + int64(rand.N(size-n+1))
				data := pattern(n, uint64(i*1000+k))
				w := writeOp(name, off, bytes.Clone(data))
				ok(t, tg, w)
				r := readOp(name, off, n)
				ok(t, tg, r)
				if !bytes.Equal(r.Data, data) {
					t.Errorf("worker %d round %d: %d bytes at %d differ", i, k, n, off)
				}
			}
		})
	}
	wg.Wait()
	if st := tg.Stats(); st.Outstanding != 0 || st.Queued != 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestManyConnections(t *testing.T) {
	srv := newServer(t)
	gate := make(chan struct{})
	data := pattern(1<<20, 14)
	srv.put("f", data)
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcRead {
			return &action{wait: gate}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 4}, srv.addr)
	var rs []*request
	for range 70 {
		rs = append(rs, readOp("f", 0, 1<<20))
	}
	start(tg, rs...)
	waittest.Until(t, "four connections, as full as the window allows", func() bool {
		st := tg.Stats()
		total := 0
		for _, c := range st.Connections {
			total += c.Bytes
		}
		if total > st.Window {
			t.Fatalf("%d bytes in flight, the window is %d", total, st.Window)
		}
		return st.Queued == 70-4*2
	})
	// With a wide window the connections are what bounds it.
	tg.mu.Lock()
	tg.window.size = tg.window.most
	tg.dispatch()
	tg.mu.Unlock()
	tg.Flush()
	for i, c := range tg.Stats().Connections {
		if want := maxInFlightBytes / (1<<20 + overhead); i < 4 && c.Outstanding != want || c.Bytes > maxInFlightBytes {
			t.Errorf("connection %d has %d requests, want %d", i, c.Outstanding, want)
		}
	}
	close(gate)
	for _, r := range rs {
		wait(t, r.done, "READ")
		if r.Err != nil || !bytes.Equal(r.Data, data) {
			t.Fatal("contents differ", r.Err)
		}
	}
	st := tg.Stats()
	ops, carried := uint64(0), uint64(0)
	for i, c := range st.Connections {
		if i < 4 && c.Ops == 0 {
			t.Errorf("connection %d has carried nothing: %+v", i, c)
		}
		ops, carried = ops+c.Ops, carried+c.BytesRead
	}
	if ops != 70 || carried != 70<<20 || st.Reads != ops || st.BytesRead != carried {
		t.Errorf("connections have carried %d requests and %d bytes, all of it is %d and %d", ops, carried, st.Reads, st.BytesRead)
	}
	// Small ones: bounded by number.
	gate2 := make(chan struct{})
	srv.mu.Lock()
	srv.script = func(c *callInfo) *action { return &action{wait: gate2} }
	srv.mu.Unlock()
	rs = rs[:0]
	for range 5*maxInFlight + 10 {
		rs = append(rs, readOp("f", 0, 10))
	}
	start(tg, rs...)
	waittest.Until(t, "connections that are full", func() bool { return tg.Stats().Queued == 10 })
	close(gate2)
	for _, r := range rs {
		wait(t, r.done, "READ")
	}
}

func TestClose(t *testing.T) {
	before := runtime.NumGoroutine()
	srv := newServer(t)
	srv.put("f", make([]byte, 1000))
	srv.script = func(c *callInfo) *action {
		switch {
		case c.off == 1:
			return &action{status: wire.ErrJukebox}
		case c.off == 2:
			return &action{silent: true}
		}
		return nil
	}
	dead := newServer(t)
	dead.close()
	tg, down := newTarget(t, Config{}, srv.addr), newTarget(t, Config{}, dead.addr)
	ok(t, tg, writeOp("f", 0, []byte("x")))
	rs := []*request{readOp("f", 1, 10), writeOp("f", 1, make([]byte, 10)), readOp("f", 2, 10), writeOp("f", 2, make([]byte, 10)), newOp(layout.OpCommit, "f", 2, nil)}
	start(tg, rs...)
	downOps := []*request{readOp("f", 0, 10), newOp(layout.OpCommit, "f", 0, nil)}
	start(down, downOps...)
	nulls := make(chan error, 1)
	go func() { nulls <- down.Null(context.Background()) }()
	waittest.Until(t, "requests at the server", func() bool {
		st := tg.Stats()
		return st.Delayed == 2 && st.Queued == 0 && down.Stats().Outstanding >= 4
	})
	unflushed := readOp("f", 0, 10)
	tg.Start(&unflushed.Op)
	for _, tg := range []*Target{tg, down} {
		if err := tg.Close(); err != nil {
			t.Error(err)
		}
	}
	late := readOp("f", 0, 10)
	do(t, tg, late)
	for _, r := range append(append(rs, unflushed, late), downOps...) {
		wait(t, r.done, "an op after Close")
		if !errors.Is(r.Err, ErrClosed) {
			t.Errorf("%v at %d: error %v", r.Kind, r.Off, r.Err)
		}
	}
	if err := <-nulls; !errors.Is(err, ErrClosed) {
		t.Errorf("NULL: %v", err)
	}
	if err := tg.Null(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("NULL after Close: %v", err)
	}
	if st := tg.Stats(); st.Outstanding != 0 || st.Queued != 0 || st.Delayed != 0 {
		t.Errorf("stats %+v", st)
	}
	srv.close()
	waittest.Until(t, "goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
}
