package fs

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// phase is when a fault strikes a call.
type phase int

const (
	before phase = iota // nothing was carried out
	during              // half of a WRITE was; the reply, or what comes in its place, breaks off or comes in two parts
	after               // all was carried out
)

func (p phase) String() string { return [...]string{"before", "during", "after"}[p] }

// deed is one way in which a data server treats a call.
type deed struct {
	// One of these takes the place of the good answer:
	status wire.Status                     // of NFS
	rpc    oncrpc.Stat                     // of RPC
	count  func(n int, p phase) int        // OK, but for so many of n bytes, which are all there is if it is less than n
	tamper func(good []byte) []byte        // what is sent for the record good
	breaks func(s *nfsServer, nc net.Conn) // ends or stops the connection; nothing more is sent
	unseen func(s *nfsServer, fh []byte)   // happens before or after the call is carried out; its reply does not show it
}

// owners knows whose data files are.
type owners interface {
	owns(fh []byte, uid uint32) bool
	fence(fh []byte) // gives the file to somebody else
}

// nfsServer shows a [targettest.Server] to the network as an NFSv3 data server that strikes as told. A connection's calls are
// carried out one after the other.
type nfsServer struct {
	mem    *targettest.Server
	disk   *targettest.Target
	addr   netip.AddrPort
	owners owners

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]bool
	dark     chan struct{} // while not nil nothing is read or answered; closed when that is over
	closed   bool
	deed     *deed
	proc     wire.Proc
	phase    phase
	left     int // calls yet to be struck; -1: all
	struck   chan struct{}
	hits     int
	healed   bool // since the last strike: what a call was still about to do to the server is not done
	serving  sync.WaitGroup
}

var serverAddrs atomic.Uint32

func newNFSServer(t testing.TB, mem *targettest.Server, owners owners) *nfsServer {
	// An address of its own, so that nobody takes the port while nobody listens there.
	n := serverAddrs.Add(1)
	ip := netip.AddrFrom4([4]byte{127, 77, byte(n >> 8), byte(n)})
	s := &nfsServer{mem: mem, disk: mem.NewTarget(1<<20, 1<<20), owners: owners, addr: netip.AddrPortFrom(ip, 0), conns: map[net.Conn]bool{}}
	if err := s.listen(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.heal()
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		s.cut()
		s.serving.Wait()
		s.disk.Close()
	})
	return s
}

// listen begins to accept connections.
func (s *nfsServer) listen() error {
	ln, err := net.Listen("tcp", s.addr.String())
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener = ln
	s.addr = ln.Addr().(*net.TCPAddr).AddrPort()
	s.serving.Go(func() { // owns the listener's connections, ends with the listener
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			if s.closed || s.listener != ln {
				s.mu.Unlock()
				nc.Close()
				continue
			}
			s.conns[nc] = true
			s.serving.Go(func() { s.serve(nc) })
			s.mu.Unlock()
		}
	})
	return nil
}

// cut stops listening and resets all connections.
func (s *nfsServer) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.healed && !s.closed {
		return
	}
	if s.listener != nil {
		s.listener.Close()
		s.listener = nil
	}
	s.resetAll()
}

// resetAll resets all connections. mu is held.
func (s *nfsServer) resetAll() {
	for nc := range s.conns {
		reset(nc)
	}
}

func reset(nc net.Conn) {
	nc.(*net.TCPConn).SetLinger(0)
	nc.Close()
}

// darken stops everything until heal; the kernel still accepts connections and data.
func (s *nfsServer) darken() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dark == nil && !s.healed {
		s.dark = make(chan struct{})
	}
}

// strike has the next times calls of a procedure treated so; -1: all until heal. What it returns is closed at the first one.
func (s *nfsServer) strike(proc wire.Proc, p phase, times int, d *deed) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deed, s.proc, s.phase, s.left, s.hits, s.struck = d, proc, p, times, 0, make(chan struct{})
	s.healed = false
	return s.struck
}

// heal ends what strike began.
func (s *nfsServer) heal() error {
	s.mu.Lock()
	s.left, s.healed = 0, true
	if s.dark != nil {
		close(s.dark)
		s.dark = nil
	}
	deaf := s.listener == nil
	s.mu.Unlock()
	if deaf {
		return s.listen()
	}
	return nil
}

// next is what to do with a call.
func (s *nfsServer) next(proc wire.Proc) (*deed, phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left == 0 || proc != s.proc {
		return &deed{}, after
	}
	s.left = max(s.left-1, -1)
	if s.hits++; s.hits == 1 {
		close(s.struck)
	}
	return s.deed, s.phase
}

func (s *nfsServer) waitForLight() {
	s.mu.Lock()
	dark := s.dark
	s.mu.Unlock()
	if dark != nil {
		<-dark
	}
}

func (s *nfsServer) serve(nc net.Conn) {
	defer func() {
		nc.Close()
		s.mu.Lock()
		delete(s.conns, nc)
		s.mu.Unlock()
	}()
	for {
		var mark [oncrpc.RecordMarkSize]byte
		if _, err := io.ReadFull(nc, mark[:]); err != nil {
			return
		}
		n, last := oncrpc.ParseRecordMark(mark[:])
		rec := make([]byte, n)
		if _, err := io.ReadFull(nc, rec); err != nil || !last {
			return
		}
		s.waitForLight()
		if err := s.call(nc, rec); err != nil {
			return
		}
	}
}

// call carries out one call and answers it. After an error the connection is of no more use.
func (s *nfsServer) call(nc net.Conn, rec []byte) error {
	d := xdr.NewDecoder(rec)
	var h oncrpc.Call
	if err := h.Decode(&d); err != nil {
		return err
	}
	reply := oncrpc.Reply{XID: h.XID}
	if h.Prog != oncrpc.ProgNFS {
		reply.Stat = oncrpc.ProgUnavail
		_, err := nc.Write(record(reply.Append(nil)))
		return err
	}
	proc := wire.Proc(h.Proc)
	op := &layout.Op{File: &layout.DataFile{}}
	var fh wire.FileHandle
	switch proc {
	case wire.ProcNull:
		_, err := nc.Write(record(reply.Append(nil)))
		return err
	case wire.ProcFsinfo:
		res := wire.FsinfoRes{Rtmax: 1 << 20, Rtpref: 1 << 20, Wtmax: 1 << 20, Wtpref: 1 << 20}
		_, err := nc.Write(record(res.Append(reply.Append(nil))))
		return err
	case wire.ProcRead:
		var a wire.ReadArgs
		a.Decode(&d)
		fh, op.Kind, op.Off, op.Data = a.FH, layout.OpRead, int64(a.Offset), make([]byte, min(a.Count, 1<<20))
	case wire.ProcWrite:
		var a wire.WriteArgs
		if a.DecodeHead(&d, 0) == nil {
			fh, op.Kind, op.Off, op.Data, op.Stable = a.FH, layout.OpWrite, int64(a.Offset), d.Rest()[:a.Count], layout.Stability(a.Stable)
		}
	case wire.ProcCommit:
		var a wire.CommitArgs
		a.Decode(&d)
		fh, op.Kind, op.Off, op.Count = a.FH, layout.OpCommit, int64(a.Offset), int64(a.Count)
	default:
		return fmt.Errorf("no %v here", proc)
	}
	if d.Err() != nil {
		return d.Err()
	}
	op.File.Handles = [][]byte{fh.Bytes()}
	var sys oncrpc.AuthSys
	if err := sys.Decode(h.Cred.Body); err != nil {
		return err
	}

	deed, p := s.next(proc)
	if deed.unseen != nil && p == before {
		deed.unseen(s, fh.Bytes())
	}
	status, asked := deed.status, len(op.Data)
	if !s.owners.owns(fh.Bytes(), sys.UID) {
		status = wire.ErrAcces
	} else if err := s.carryOut(op, deed, p); err != nil {
		return err
	}
	if deed.unseen != nil && p != before {
		deed.unseen(s, fh.Bytes())
	}
	if deed.breaks != nil && p != during {
		deed.breaks(s, nc)
		return nil
	}
	if deed.rpc != oncrpc.Success {
		reply.Stat = deed.rpc
		return s.send(nc, record(reply.Append(nil)), p, deed)
	}
	if deed.breaks != nil || deed.tamper != nil {
		op.N = asked // as if
	}
	b := reply.Append(nil)
	verf := wire.WriteVerf(op.Verifier)
	switch proc {
	case wire.ProcRead:
		res := wire.ReadRes{Status: status, Count: uint32(op.N), EOF: op.EOF}
		if b = res.AppendHead(b); status == wire.OK {
			b = xdr.AppendFixedOpaque(b, op.Data[:op.N])
		}
	case wire.ProcWrite:
		b = (&wire.WriteRes{Status: status, Count: uint32(op.N), Committed: wire.Stable(op.Committed), Verf: verf}).Append(b)
	case wire.ProcCommit:
		b = (&wire.CommitRes{Status: status, Verf: verf}).Append(b)
	}
	return s.send(nc, record(b), p, deed)
}

// carryOut does of op what deed leaves of it, and sets the results as if that were what was asked for.
func (s *nfsServer) carryOut(op *layout.Op, deed *deed, p phase) error {
	whole := op.Data
	strikes := deed.status != wire.OK || deed.rpc != oncrpc.Success || deed.tamper != nil || deed.breaks != nil
	switch {
	case deed.count != nil && op.Kind == layout.OpRead:
		op.Data = whole[:deed.count(len(whole), p)]
	case op.Kind == layout.OpWrite && p == during && (strikes || deed.count != nil):
		op.Data = whole[:len(whole)/2]
	}
	if p == before && (strikes || deed.count != nil && op.Kind == layout.OpWrite) {
		return nil
	}
	done := make(chan struct{})
	op.Done = func(*layout.Op) { close(done) }
	s.disk.Start(op)
	s.disk.Flush()
	<-done
	if op.Err != nil {
		return op.Err
	}
	if deed.count != nil {
		op.EOF = false
		if op.Kind == layout.OpWrite {
			op.N = deed.count(len(whole), p)
		}
	}
	op.Data = whole
	return nil
}

// send sends what is to be sent for a good reply.
func (s *nfsServer) send(nc net.Conn, b []byte, p phase, deed *deed) error {
	if deed.tamper != nil {
		b = deed.tamper(b)
	}
	if p == during {
		half := len(b) / 2
		if _, err := nc.Write(b[:half]); err != nil {
			return err
		}
		if deed.breaks != nil {
			deed.breaks(s, nc)
			return net.ErrClosed // also if it was healed meanwhile: the other half does not come
		}
		time.Sleep(time.Millisecond) // so that they are mostly read one by one
		b = b[half:]
	}
	s.waitForLight()
	_, err := nc.Write(b)
	return err
}

// record makes msg one record of the stream.
func record(msg []byte) []byte {
	return append(oncrpctest.AppendRecordMark(nil, len(msg), true), msg...)
}

// putWord changes the word at off behind the record mark.
func putWord(b []byte, off int, v uint32) []byte {
	binary.BigEndian.PutUint32(b[oncrpc.RecordMarkSize+off:], v)
	return b
}
