package nfs3

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/porttest"
	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// server is an NFSv3 server in memory that misbehaves as told. Files are named by their handles and exist once
// written; each call is served by a goroutine of its own.
type server struct {
	addr  netip.AddrPort
	attrs bool // whether replies carry attributes
	fsize uint32
	// script says what to do with a call; nil or a nil answer: what a good server does.
	script func(c *callInfo) *action
	// ends answers END; nil: there is no program for connections that are lost.
	ends func(conns.Name) bool

	mu     sync.Mutex
	files  map[string][]byte
	verf   wire.WriteVerf
	ln     net.Listener
	closed bool
	conns  map[net.Conn]bool
	ncalls map[wire.Proc]int
	nconns int
	wg     sync.WaitGroup
}

const (
	badHandle = "bad"   // names no file
	maxFile   = 1 << 30 // bytes
)

// callInfo is what a script can look at.
type callInfo struct {
	srv  *server
	conn net.Conn
	nth  int // of the calls of this procedure, from 1
	nc   int // the connection's number, from 1
	xid  uint32
	cred oncrpc.Auth
	proc wire.Proc
	off  uint64
	n    int    // count asked for
	data []byte // of WRITE
	args []byte // all arguments, encoded
}

// action is what a server does instead of answering well.
type action struct {
	wait    <-chan struct{} // first, before the call is executed
	after   <-chan struct{} // after it is executed, before the reply
	silent  bool            // no reply
	hangup  bool            // close the connection
	raw     []byte          // send this instead of the reply
	rpc     *oncrpc.Reply   // send this header instead of the reply
	body    []byte          // send these results
	status  wire.Status
	limit   int             // read or write at most so much; -1: nothing
	cut     int             // send the reply in fragments of so many bytes
	twice   bool            // send the reply twice
	half    <-chan struct{} // wait after half of the reply
	halfway chan<- struct{} // closed when half of the reply was sent
	verfLen int             // bytes of the RPC verifier
	weak    bool            // committed: UNSTABLE
	extra   int             // garbage behind the results
}

func newServer(t testing.TB) *server {
	s := &server{attrs: true, fsize: 1 << 20, files: map[string][]byte{}, conns: map[net.Conn]bool{}, ncalls: map[wire.Proc]int{}}
	s.verf = wire.WriteVerf{1}
	s.listen(t, porttest.For(t))
	t.Cleanup(s.close)
	return s
}

func (s *server) listen(t testing.TB, addr string) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.closed = false
	s.mu.Unlock()
	s.ln = ln
	s.addr = ln.Addr().(*net.TCPAddr).AddrPort()
	s.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			if s.closed {
				s.mu.Unlock()
				c.Close()
				return
			}
			s.conns[c] = true
			s.nconns++
			nc := s.nconns
			s.mu.Unlock()
			s.wg.Go(func() { s.serve(c, nc) })
		}
	})
}

// close hangs up on everybody and waits for all goroutines.
func (s *server) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.ln.Close()
	s.hangup()
	s.wg.Wait()
}

func (s *server) hangup() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		delete(s.conns, c)
		c.Close()
	}
}

func (s *server) calls(p wire.Proc) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ncalls[p]
}

func (s *server) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nconns
}

func (s *server) setVerf(v byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.verf = wire.WriteVerf{v}
}

func (s *server) put(handle string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[handle] = bytes.Clone(data)
}

func (s *server) get(handle string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.files[handle])
}

func (s *server) serve(c net.Conn, nc int) {
	defer func() {
		c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	var wmu sync.Mutex // replies do not mix
	for {
		var mark [4]byte
		if _, err := io.ReadFull(c, mark[:]); err != nil {
			return
		}
		n, last := oncrpc.ParseRecordMark(mark[:])
		if !last || n > 64<<20 {
			return
		}
		rec := make([]byte, n)
		if _, err := io.ReadFull(c, rec); err != nil {
			return
		}
		s.wg.Go(func() {
			if !s.call(c, nc, rec, &wmu) {
				s.mu.Lock()
				delete(s.conns, c)
				s.mu.Unlock()
				c.Close()
			}
		})
	}
}

// call serves one record; false asks to hang up.
func (s *server) call(c net.Conn, nc int, rec []byte, wmu *sync.Mutex) bool {
	d := xdr.NewDecoder(rec)
	var h oncrpc.Call
	if h.Decode(&d) != nil {
		return false
	}
	if h.Prog == conns.Program {
		return s.lost(c, &h, &d, wmu)
	}
	if h.Cred.Flavor != oncrpc.FlavorSys {
		return false
	}
	info := &callInfo{srv: s, conn: c, nc: nc, xid: h.XID, cred: h.Cred, proc: wire.Proc(h.Proc), args: d.Rest()}
	var fh wire.FileHandle
	var stable wire.Stable
	switch info.proc {
	case wire.ProcRead:
		var a wire.ReadArgs
		a.Decode(&d)
		fh, info.off, info.n = a.FH, a.Offset, int(a.Count)
	case wire.ProcWrite:
		var a wire.WriteArgs
		a.DecodeHead(&d, 0)
		fh, info.off, info.n, stable = a.FH, a.Offset, int(a.Count), a.Stable
		if d.Err() == nil {
			info.data = d.Rest()[:a.Count]
		}
	case wire.ProcCommit:
		var a wire.CommitArgs
		a.Decode(&d)
		fh, info.off, info.n = a.FH, a.Offset, int(a.Count)
	case wire.ProcFsinfo, wire.ProcGetattr:
		fh.Decode(&d)
	}
	if d.Err() != nil {
		return false
	}
	s.mu.Lock()
	s.ncalls[info.proc]++
	info.nth = s.ncalls[info.proc]
	script := s.script
	s.mu.Unlock()
	var act *action
	if script != nil {
		act = script(info)
	}
	if act == nil {
		act = &action{}
	}
	if act.wait != nil {
		<-act.wait
	}

	rep := oncrpc.Reply{XID: h.XID, Verf: oncrpc.Auth{Body: make([]byte, act.verfLen)}}
	b := append([]byte(nil), 0, 0, 0, 0)
	switch {
	case act.rpc != nil:
		r := *act.rpc
		r.XID = h.XID
		b = r.Append(b)
	case act.body != nil:
		b = append(rep.Append(b), act.body...)
	case h.Prog == oncrpc.ProgMount:
		b = rep.Append(b)
		fh, _ := wire.NewFileHandle([]byte("root"))
		b = (&wire.MountRes{Status: act.status, FH: fh, Flavors: []oncrpc.Flavor{oncrpc.FlavorSys}}).Append(b)
	default:
		b = rep.Append(b)
		b = s.results(b, info, fh.String(), string(fh.Bytes()), stable, act, &d)
	}
	b = append(b, make([]byte, act.extra)...)
	if act.after != nil {
		<-act.after
	}
	if act.hangup {
		return false
	}
	if act.silent {
		return true
	}
	wmu.Lock()
	defer wmu.Unlock()
	if act.raw != nil {
		c.Write(act.raw)
		return true
	}
	if act.cut > 0 {
		b = cut(b[4:], act.cut)
	} else {
		oncrpc.PutRecordMark(b, len(b)-4, true)
	}
	if act.twice {
		c.Write(b)
	}
	if act.half != nil {
		c.Write(b[:len(b)/2])
		close(act.halfway)
		<-act.half
		b = b[len(b)/2:]
	}
	c.Write(b)
	return true
}

// lost serves the program of package conns, if ends is set.
func (s *server) lost(c net.Conn, h *oncrpc.Call, d *xdr.Decoder, wmu *sync.Mutex) bool {
	var name conns.Name
	if name.Decode(d) != nil {
		return false
	}
	rep := oncrpc.Reply{XID: h.XID}
	if s.ends == nil {
		rep.Stat = oncrpc.ProgUnavail
	}
	b := rep.Append(make([]byte, oncrpc.RecordMarkSize))
	if s.ends != nil && conns.Proc(h.Proc) == conns.ProcEnd {
		b = (&conns.EndRes{Ended: s.ends(name)}).Append(b)
	}
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	wmu.Lock()
	defer wmu.Unlock()
	c.Write(b)
	return true
}

// refuseJoin reads the JOIN that begins a connection and answers that there is no such program.
func refuseJoin(c net.Conn) error {
	b := make([]byte, oncrpc.RecordMarkSize)
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	n, _ := oncrpc.ParseRecordMark(b)
	call := make([]byte, n)
	if _, err := io.ReadFull(c, call); err != nil {
		return err
	}
	rep := oncrpc.Reply{XID: binary.BigEndian.Uint32(call), Stat: oncrpc.ProgUnavail}
	b = rep.Append(b)
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	_, err := c.Write(b)
	return err
}

// cut makes a record of fragments.
func cut(msg []byte, size int) (b []byte) {
	for len(msg) > size {
		b = oncrpctest.AppendRecordMark(b, size, false)
		b = append(b, msg[:size]...)
		msg = msg[size:]
		if size%2 == 1 {
			b = oncrpctest.AppendRecordMark(b, 0, false)
		}
	}
	b = oncrpctest.AppendRecordMark(b, len(msg), true)
	return append(b, msg...)
}

func (s *server) results(b []byte, c *callInfo, hexName, name string, stable wire.Stable, act *action, d *xdr.Decoder) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == badHandle {
		act.status = wire.ErrStale
	}
	attr := wire.PostOpAttr{Present: s.attrs, Attr: wire.Fattr{Type: wire.TypeReg, Size: uint64(len(s.files[name]))}}
	n := c.n
	switch {
	case act.limit > 0:
		n = min(n, act.limit)
	case act.limit < 0:
		n = 0
	}
	switch c.proc {
	case wire.ProcNull:
		return b
	case wire.ProcRead:
		res := wire.ReadRes{Status: act.status, Attr: attr}
		if res.Status != wire.OK {
			return res.AppendHead(b)
		}
		f := s.files[name]
		f = f[min(c.off, uint64(len(f))):]
		res.EOF = n >= len(f) && act.limit == 0
		f = f[:min(n, len(f))]
		res.Count = uint32(len(f))
		b = res.AppendHead(b)
		return xdr.AppendFixedOpaque(b, f)
	case wire.ProcWrite:
		if !s.conns[c.conn] {
			return b // it has been sent again, and what came after that must not be overwritten
		}
		res := wire.WriteRes{Status: act.status, Wcc: wire.WccData{After: attr}, Verf: s.verf, Committed: stable, Count: uint32(n)}
		if act.weak {
			res.Committed = wire.Unstable
		}
		if c.off > maxFile {
			res.Status = wire.ErrFBig
		}
		if res.Status == wire.OK {
			f := s.files[name]
			if need := int(c.off) + n - len(f); need > 0 {
				f = append(f, make([]byte, need)...)
			}
			copy(f[c.off:], c.data[:n])
			s.files[name] = f
		}
		return res.Append(b)
	case wire.ProcCommit:
		return (&wire.CommitRes{Status: act.status, Wcc: wire.WccData{After: attr}, Verf: s.verf}).Append(b)
	case wire.ProcFsinfo:
		return (&wire.FsinfoRes{Status: act.status, Attr: attr, Rtmax: s.fsize, Rtpref: s.fsize, Wtmax: s.fsize, Wtpref: s.fsize}).Append(b)
	case wire.ProcGetattr:
		return (&wire.GetattrRes{Status: act.status, Attr: wire.Fattr{Type: wire.TypeReg, Size: uint64(len(s.files[name]))}}).Append(b)
	case wire.ProcRemove, wire.ProcRmdir:
		var a wire.DirOpArgs
		a.Decode(d)
		status := act.status
		if _, ok := s.files[a.Name]; !ok && status == wire.OK {
			status = wire.ErrNoEnt
		}
		delete(s.files, a.Name)
		return (&wire.WccRes{Status: status}).Append(b)
	case wire.ProcMkdir:
		var a wire.MkdirArgs
		a.Decode(d)
		res := wire.CreateRes{Status: act.status}
		if _, ok := s.files[a.Where.Name]; ok && res.Status == wire.OK {
			res.Status = wire.ErrExist
		}
		if res.Status == wire.OK {
			s.files[a.Where.Name] = nil
			fh, _ := wire.NewFileHandle([]byte(a.Where.Name))
			res.FH = wire.PostOpFH{Present: true, FH: fh}
		}
		return res.Append(b)
	case wire.ProcLookup:
		var a wire.DirOpArgs
		a.Decode(d)
		res := wire.LookupRes{Status: act.status}
		if _, ok := s.files[a.Name]; !ok && res.Status == wire.OK {
			res.Status = wire.ErrNoEnt
		}
		res.FH, _ = wire.NewFileHandle([]byte(a.Name))
		res.Attr = wire.PostOpAttr{Present: true, Attr: wire.Fattr{Type: wire.TypeDir}}
		return res.Append(b)
	}
	panic(fmt.Sprintf("test server: no %v", c.proc))
}

// newTarget returns a Target for addrs whose log goes to the test, and closes it with the test.
func newTarget(t testing.TB, cfg Config, addrs ...netip.AddrPort) *Target {
	t.Helper()
	cfg.Name = t.Name()
	cfg.Addrs = addrs
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	tg, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		done := make(chan struct{})
		go func() { tg.Close(); close(done) }()
		wait(t, done, "Close")
	})
	return tg
}

// wait fails the test if ch is not ready soon.
func wait(t testing.TB, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(20 * time.Second):
		panic("waited too long for " + what)
	}
}

func file(handle string) *layout.DataFile {
	return &layout.DataFile{Handles: [][]byte{[]byte(handle)}, Cred: layout.Credential{UID: 1234, GID: 5678}}
}

// request is an Op that can be waited for. Done twice panics.
type request struct {
	layout.Op
	done chan struct{}
}

func newOp(kind layout.OpKind, handle string, off int64, data []byte) *request {
	r := &request{done: make(chan struct{})}
	r.Op = layout.Op{Kind: kind, File: file(handle), Off: off, Data: data, Done: func(*layout.Op) { close(r.done) }}
	return r
}

func readOp(handle string, off int64, n int) *request {
	return newOp(layout.OpRead, handle, off, make([]byte, n))
}

func writeOp(handle string, off int64, data []byte) *request {
	return newOp(layout.OpWrite, handle, off, data)
}

// start starts and flushes.
func start(tg *Target, rs ...*request) {
	for _, r := range rs {
		tg.Start(&r.Op)
	}
	tg.Flush()
}

// do runs requests to their ends.
func do(t testing.TB, tg *Target, rs ...*request) {
	t.Helper()
	start(tg, rs...)
	for _, r := range rs {
		wait(t, r.done, r.Kind.String())
	}
}

// ok is do for requests that succeed with all of their data.
func ok(t testing.TB, tg *Target, rs ...*request) {
	t.Helper()
	do(t, tg, rs...)
	for _, r := range rs {
		if r.Err != nil || r.N != len(r.Data) {
			t.Fatalf("%v of %d bytes at %d: %d bytes, error %v", r.Kind, len(r.Data), r.Off, r.N, r.Err)
		}
	}
}

// pattern is n bytes that tell where they belong.
func pattern(n int, seed uint64) []byte {
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		seed = seed*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[i:], seed)
	}
	return b[:n:n]
}
