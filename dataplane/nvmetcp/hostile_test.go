package nvmetcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// resp, data and r2t are PDUs as they must not be.
func resp(c wire.Completion) []byte {
	p := wire.CapsuleResp{Completion: c}
	return p.Append(nil, wire.Framing{})
}

func c2h(cid uint16, off, length uint32, flags wire.Flags, data []byte) []byte {
	p := wire.C2HData{CID: cid, Offset: off, Length: length}
	b := p.Append(nil, wire.Framing{})
	b[1] = byte(flags)
	return append(b, data...)
}

func r2tPDU(cid, tag uint16, off, length uint32) []byte {
	p := wire.R2T{CID: cid, Tag: tag, Offset: off, Length: length}
	return p.Append(nil, wire.Framing{})
}

func patch(b []byte, off int, v ...byte) []byte {
	copy(b[off:], v)
	return b
}

// TestWrongPDUs has a controller answer a read of 4096 bytes, or a write of 64 KiB that does not fit the capsule, with what it must
// not send. The command ends with a PathError that says that the controller may have got it, the controller is told why, and
// the next association works.
func TestWrongPDUs(t *testing.T) {
	some := make([]byte, 4096)
	for _, test := range []struct {
		name  string
		write bool
		fatal wire.FatalStatus // that the controller is told; 0: nothing
		pdus  func(cid uint16) []byte
	}{
		{"unknown type", false, 1, func(uint16) []byte { return []byte{0x42, 0, 8, 0, 8, 0, 0, 0} }},
		{"ICResp again", false, 2, func(uint16) []byte { r := wire.ICResp{MaxH2CData: 4096}; return r.Append(nil) }},
		{"a host's PDU", false, 1, func(cid uint16) []byte {
			p := wire.H2CData{CID: cid, Length: 4}
			return append(p.Append(nil, wire.Framing{}), 0, 0, 0, 0)
		}},
		{"HLEN", false, 1, func(cid uint16) []byte { return patch(resp(wire.Completion{CID: cid}), 2, 16) }},
		{"PLEN short", false, 1, func(cid uint16) []byte { return patch(resp(wire.Completion{CID: cid}), 4, 8) }},
		{"PLEN of 4 GiB", false, 1, func(cid uint16) []byte { return patch(c2h(cid, 0, 4096, 0, nil), 4, 255, 255, 255, 255) }},
		{"PLEN less than data", false, 1, func(cid uint16) []byte { return patch(c2h(cid, 0, 4096, 0, some), 4, 100, 0, 0, 0) }},
		{"PDO in the header", false, 1, func(cid uint16) []byte { return patch(c2h(cid, 0, 4096, 0, some), 3, 20) }},
		{"digest not agreed on", false, 1, func(cid uint16) []byte { return patch(resp(wire.Completion{CID: cid}), 1, 1) }},
		{"data digest not agreed on", false, 1, func(cid uint16) []byte { return c2h(cid, 0, 4096, wire.FlagDataDigest, some) }},
		{"data of nothing", false, 1, func(cid uint16) []byte { return patch(c2h(cid, 0, 4, 0, some[:4]), 16, 0) }},
		{"data behind the buffer", false, 4, func(cid uint16) []byte { return c2h(cid, 4096, 4, 0, some[:4]) }},
		{"data over the end", false, 4, func(cid uint16) []byte {
			return append(c2h(cid, 0, 4000, 0, some[:4000]), c2h(cid, 4000, 100, 0, some[:100])...)
		}},
		{"offset that overflows", false, 4, func(cid uint16) []byte { return c2h(cid, 0xFFFFFFFC, 8, 0, some[:8]) }},
		{"offset that just does not", false, 4, func(cid uint16) []byte { return c2h(cid, 0xFFFFFFF8, 8, 0, some[:8]) }},
		{"gap", false, 4, func(cid uint16) []byte { return c2h(cid, 8, 8, 0, some[:8]) }},
		{"overlap", false, 4, func(cid uint16) []byte {
			return append(c2h(cid, 0, 8, 0, some[:8]), c2h(cid, 4, 8, 0, some[:8])...)
		}},
		{"data behind the last", false, 2, func(cid uint16) []byte {
			return append(c2h(cid, 0, 8, wire.FlagLast, some[:8]), c2h(cid, 8, 8, 0, some[:8])...)
		}},
		{"SUCCESS without LAST", false, 1, func(cid uint16) []byte { return c2h(cid, 0, 4096, wire.FlagSuccess, some) }},
		{"SUCCESS without all data", false, 4, func(cid uint16) []byte {
			return c2h(cid, 0, 8, wire.FlagLast|wire.FlagSuccess, some[:8])
		}},
		{"success without data", false, 4, func(cid uint16) []byte { return resp(wire.Completion{CID: cid}) }},
		{"answer to nobody", false, 2, func(cid uint16) []byte { return resp(wire.Completion{CID: cid + 1}) }},
		{"answer to CID FFFF", false, 2, func(cid uint16) []byte { return resp(wire.Completion{CID: 0xFFFF}) }},
		{"answer to an earlier use", false, 2, func(cid uint16) []byte { return resp(wire.Completion{CID: cid - 1<<tagBits}) }},
		{"data for nobody", false, 2, func(cid uint16) []byte { return c2h(cid+1, 0, 4, 0, some[:4]) }},
		{"answer twice", true, 2, func(cid uint16) []byte {
			return append(resp(wire.Completion{CID: cid, Status: wire.StatusInternal}), resp(wire.Completion{CID: cid})...)
		}},
		{"R2T for a read", false, 2, func(cid uint16) []byte { return r2tPDU(cid, 1, 0, 4096) }},
		{"R2T for nobody", true, 2, func(cid uint16) []byte { return r2tPDU(cid+1, 1, 0, 4096) }},
		{"R2T over the end", true, 4, func(cid uint16) []byte { return r2tPDU(cid, 1, 4096, 64<<10) }},
		{"R2T behind the end", true, 4, func(cid uint16) []byte { return r2tPDU(cid, 1, 0xFFFFFFF0, 16) }},
		{"R2T of nothing", true, 1, func(cid uint16) []byte { return r2tPDU(cid, 1, 0, 0) }},
		{"R2T for all of it twice", true, 5, func(cid uint16) []byte {
			return append(r2tPDU(cid, 1, 0, 64<<10), r2tPDU(cid, 2, 0, 4)...)
		}},
		{"data for a write", true, 2, func(cid uint16) []byte { return c2h(cid, 0, 8, 0, some[:8]) }},
		{"success of a write without its data", true, 4, func(cid uint16) []byte { return resp(wire.Completion{CID: cid}) }},
		{"success of a write without some data", true, 4, func(cid uint16) []byte {
			return append(r2tPDU(cid, 1, 0, 60<<10), resp(wire.Completion{CID: cid})...)
		}},
		{"TermReq", false, 0, func(uint16) []byte {
			p := wire.TermReq{Type: wire.PDUC2HTermReq, Fatal: wire.FatalLimit, Info: 7, Header: some[:72]}
			return p.Append(nil)
		}},
		{"TermReq that is long", false, 1, func(uint16) []byte {
			p := wire.TermReq{Type: wire.PDUC2HTermReq, Fatal: wire.FatalLimit}
			return patch(p.Append(nil), 4, 200, 0)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPeer(t)
			p.inCaps = 4096
			var once sync.Once
			p.io = func(pc *peerConn, cmd wire.Command, _ []byte) (dealt bool) {
				once.Do(func() {
					pc.raw(test.pdus(cmd.CID))
					dealt = true
				})
				return dealt
			}
			p.h2c = func(*peerConn, wire.H2CData, []byte) bool { return p.connects.Load() == 1 }
			states := make(chan State, 100)
			c := p.host(func(cfg *Config) { cfg.OnState = func(s State) { states <- s } })
			cmd := func() *Command {
				if test.write {
					return writeCommand(0, make([]byte, 64<<10))
				}
				return readCommand(0, 4096)
			}
			first := cmd()
			err := do(t, c, first)
			if test.name == "answer twice" {
				var status *StatusError
				if !errors.As(err, &status) {
					t.Fatal(err)
				}
			} else {
				var path *PathError
				if !errors.As(err, &path) || !path.Sent || path.Gone.IsZero() || path.Addr == "" || path.NQN != testNQN {
					t.Fatalf("ended with %v", err)
				}
				t.Log(err)
			}
			if test.fatal != 0 {
				select {
				case term := <-p.terms:
					if term.Fatal != test.fatal {
						t.Errorf("the controller was told %v, want %v", term.Fatal, test.fatal)
					}
				case <-time.After(10 * time.Second):
					t.Error("the controller was not told")
				}
			}
			awaitState(t, states, StateLive)
			if err := do(t, c, cmd()); err != nil {
				t.Errorf("after it: %v", err)
			}
			if s := c.Stats(); s.Losses != 1 {
				t.Errorf("%d losses", s.Losses)
			}
		})
	}
}

func awaitState(t testing.TB, states <-chan State, want State) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case s := <-states:
			if s == want {
				return
			}
		case <-deadline:
			t.Fatalf("not %v", want)
		}
	}
}

// TestHeaderDigestWrong gives a connection up whose header digest is wrong.
func TestHeaderDigestWrong(t *testing.T) {
	p := newPeer(t)
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		r := wire.CapsuleResp{Completion: wire.Completion{CID: cmd.CID}}
		b := r.Append(nil, pc.send)
		b[len(b)-1] ^= 1
		pc.raw(b)
		return true
	}
	c := p.host(func(cfg *Config) { cfg.HeaderDigest = true })
	var path *PathError
	if err := do(t, c, &Command{Op: wire.OpFlush, NSID: 1}); !errors.As(err, &path) {
		t.Fatal(err)
	}
	if term := <-p.terms; term.Fatal != wire.FatalHeaderDigest {
		t.Error(term.Fatal)
	}
}

// TestDataDigestWrong ends only the command whose data is wrong, when its answer is there.
func TestDataDigestWrong(t *testing.T) {
	for _, success := range []bool{false, true} {
		p := newPeer(t)
		goOn := make(chan struct{})
		n := 0
		p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
			if n++; n > 1 {
				return false
			}
			d := wire.C2HData{CID: cmd.CID, Last: true, Success: success, Length: 4096}
			b := d.Append(nil, pc.send)
			pc.raw(append(b, make([]byte, 4096)...)) // whose digest comes later
			<-goOn
			pc.raw([]byte{1, 2, 3, 4})
			if !success {
				pc.answer(wire.Completion{CID: cmd.CID})
			}
			return true
		}
		c := p.host(func(cfg *Config) { cfg.DataDigest = true })
		done := make(chan error, 1)
		cmd := readCommand(0, 4096)
		cmd.Done = func(cmd *Command) { done <- cmd.Err }
		c.Start(cmd)
		c.Flush()
		select {
		case err := <-done:
			t.Fatalf("ended before the digest was there: %v", err)
		case <-time.After(20 * time.Millisecond):
		}
		close(goOn)
		var bad *DigestError
		if err := <-done; !errors.As(err, &bad) || !strings.Contains(err.Error(), testNQN) {
			t.Fatal(err)
		}
		if err := do(t, c, readCommand(0, 4096)); err != nil {
			t.Fatal(err)
		}
		if s := c.Stats(); s.Losses != 0 || s.BadDigests != 1 {
			t.Errorf("%+v", s)
		}
	}
}

// TestStatuses passes the controller's answers on, with M set or not, after part of the data or without an R2T.
func TestStatuses(t *testing.T) {
	p := newPeer(t)
	p.inCaps = 4096
	p.ctrl.CRDT = [3]time.Duration{100 * time.Millisecond, 2 * time.Second}
	p.io = func(pc *peerConn, cmd wire.Command, data []byte) bool {
		switch {
		case cmd.Opcode == wire.OpRead:
			pc.data(wire.C2HData{CID: cmd.CID}, make([]byte, 512))
			pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusReadError, More: true, DNR: true})
		case cmd.Opcode == wire.OpFlush:
			pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusANAInaccess, More: true, Result: 5})
		case len(data) == 0:
			pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusCapacity, CRD: 2})
		default:
			pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusReserved})
		}
		return true
	}
	c := p.host(nil)
	for _, test := range []struct {
		cmd    *Command
		status wire.Status
		class  wire.Class
		delay  time.Duration
	}{
		{readCommand(0, 4096), wire.StatusReadError, wire.ClassMedia, 0},
		{&Command{Op: wire.OpFlush, NSID: 1}, wire.StatusANAInaccess, wire.ClassANA, 0},
		{writeCommand(5, make([]byte, 64<<10)), wire.StatusCapacity, wire.ClassFail, 2 * time.Second},
		{writeCommand(5, make([]byte, 512)), wire.StatusReserved, wire.ClassFenced, 0},
	} {
		err := do(t, c, test.cmd)
		var e *StatusError
		if !errors.As(err, &e) || e.Status != test.status || test.cmd.Status != test.status || e.Class() != test.class || e.Delay != test.delay || !errors.Is(err, test.status) {
			t.Errorf("%v: %v", test.status, err)
		}
		for _, part := range []string{p.l.Addr().String(), testNQN, "namespace 1"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q does not name %s", err, part)
			}
		}
	}
	if s := c.Stats(); s.Losses != 0 || s.Errors != 4 {
		t.Errorf("%+v", s)
	}
}

// TestEarlyAnswer has a write fail while its data is still being sent: the command ends when the last byte is out, its CID is not
// used before.
func TestEarlyAnswer(t *testing.T) {
	p := newPeer(t)
	p.inCaps = 4096
	p.resp.MaxH2CData = 8 << 20
	held := make(chan struct{})
	answered := make(chan struct{})
	var first uint16
	n := 0
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if cmd.Opcode != wire.OpWrite {
			return false
		}
		if n++; n > 1 {
			if cmd.CID == first {
				p.t.Error("the CID is used again")
			}
			return false
		}
		first = cmd.CID
		pc.r2t(wire.R2T{CID: cmd.CID, Length: 1 << 20})
		time.Sleep(50 * time.Millisecond) // much of it is in the sockets' buffers now
		pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusInternal})
		close(answered)
		<-held
		return true
	}
	p.h2c = func(pc *peerConn, d wire.H2CData, data []byte) bool { return d.CID == first }
	c := p.host(nil)
	// The sockets' buffers would take it all.
	q := c.live.Load().io[0]
	q.nc.(*net.TCPConn).SetWriteBuffer(4096)
	done := make(chan error, 1)
	cmd := writeCommand(0, make([]byte, 1<<20))
	cmd.Done = func(cmd *Command) { done <- cmd.Err }
	c.Start(cmd)
	c.Flush()
	<-answered
	time.Sleep(20 * time.Millisecond)
	ended := false
	select {
	case <-done:
		ended = true
	default:
	}
	q.mu.Lock()
	loaded := q.out.loaded
	q.mu.Unlock()
	all := q.out.sent(loaded)
	if ended && !all {
		t.Error("ended while its data was still being sent")
	}
	if all {
		t.Log("the sockets took it all")
	}
	close(held)
	if !ended {
		var status *StatusError
		if err := <-done; !errors.As(err, &status) {
			t.Fatal(err)
		}
	}
	if err := do(t, c, writeCommand(0, make([]byte, 64<<10))); err != nil {
		t.Fatal(err)
	}
	if s := c.Stats(); s.Losses != 0 {
		t.Errorf("%+v", s)
	}
}

// TestEarlyAnswerUnsent has a write fail before its data is sent: it ends at once, though another one's is stuck, and its data
// stays here.
func TestEarlyAnswerUnsent(t *testing.T) {
	p := newPeer(t)
	p.inCaps, p.resp.MaxH2CData = 4096, 1<<20
	held := make(chan struct{})
	var cids []uint16
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if cids = append(cids, cmd.CID); len(cids) < 16 {
			return true
		}
		for _, cid := range cids {
			pc.r2t(wire.R2T{CID: cid, Length: 1 << 20})
		}
		pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusInternal})
		<-held
		return true
	}
	p.h2c = func(pc *peerConn, d wire.H2CData, data []byte) bool {
		if d.CID == cids[15] {
			t.Error("data was sent for a command that has failed")
		}
		pc.answer(wire.Completion{CID: d.CID})
		return true
	}
	c := p.host(nil)
	done := make(chan *Command, 16)
	for i := range 16 {
		cmd := writeCommand(uint64(i), make([]byte, 1<<20))
		cmd.Done = func(cmd *Command) { done <- cmd }
		c.Start(cmd)
	}
	c.Flush()
	if cmd := <-done; cmd.SLBA != 15 || cmd.Status != wire.StatusInternal {
		t.Fatalf("write %d: %v", cmd.SLBA, cmd.Err)
	}
	close(held)
	for range 15 {
		if cmd := <-done; cmd.Err != nil {
			t.Fatal(cmd.Err)
		}
	}
}

// TestTooEarly gives the connection up when an R2T, or an answer, comes for a command that is still on its way out.
func TestTooEarly(t *testing.T) {
	for name, pdu := range map[string]func(cid uint16) []byte{
		"R2T":    func(cid uint16) []byte { return r2tPDU(cid, 0, 0, 4) },
		"answer": func(cid uint16) []byte { return resp(wire.Completion{CID: cid}) },
		"data":   func(cid uint16) []byte { return c2h(cid, 0, 4, 0, make([]byte, 4)) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t)
			p.inCaps = 1 << 20
			full := make(chan *peerConn, 1)
			held := make(chan struct{})
			p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
				select {
				case full <- pc:
				default:
				}
				<-held // and reads no more
				return true
			}
			p.ctrl.IOCCSZ = 4 + 1<<20/16
			c := p.host(nil)
			q := c.live.Load().io[0]
			var wg sync.WaitGroup
			for range 20 {
				cmd := writeCommand(0, make([]byte, 1<<20))
				wg.Add(1)
				cmd.Done = func(cmd *Command) {
					var path *PathError
					if !errors.As(cmd.Err, &path) {
						t.Error(cmd.Err)
					}
					wg.Done()
				}
				c.Start(cmd)
			}
			c.Flush()
			pc := <-full
			q.mu.Lock()
			last := q.slots[19].sqe.CID
			q.mu.Unlock()
			pc.raw(pdu(last))
			waittest.Until(t, "lost", func() bool { return c.Stats().Losses > 0 })
			close(held)
			wait(t, &wg)
		})
	}
}

// TestICResp refuses what the answer to ICReq must not be, with an error that says what to do.
func TestICResp(t *testing.T) {
	for _, test := range []struct {
		name, want string
		resp       func([]byte) []byte
		digest     bool
	}{
		{"MAXH2CDATA", "MAXH2CDATA", func(b []byte) []byte { return patch(b, 12, 0, 8, 0, 0) }, false},
		{"MAXH2CDATA odd", "MAXH2CDATA", func(b []byte) []byte { return patch(b, 12, 2, 0x20, 0, 0) }, false},
		{"PFV", "version", func(b []byte) []byte { return patch(b, 8, 1) }, false},
		{"CPDA", "CPDA", func(b []byte) []byte { return patch(b, 10, 32) }, false},
		{"more digests", "not asked for", func(b []byte) []byte { return patch(b, 11, 3) }, false},
		{"fewer digests", "turn them off here", func(b []byte) []byte { return patch(b, 11, 0) }, true},
		{"other PDU", "instead of ICResp", func(b []byte) []byte { return resp(wire.Completion{}) }, false},
		{"web server", "NVMe/TCP port", func(b []byte) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") }, false},
		{"length", "PLEN", func(b []byte) []byte { return patch(b, 4, 0, 0, 1, 0) }, false},
	} {
		p := newPeer(t)
		p.rawResp = test.resp
		cfg := p.config()
		cfg.HeaderDigest = test.digest
		c, err := Connect(t.Context(), cfg)
		if err == nil {
			c.Close()
			t.Errorf("%s: connected", test.name)
			continue
		}
		var ce *ConnectError
		if !errors.As(err, &ce) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), cfg.Addr) || !strings.Contains(err.Error(), testNQN) {
			t.Errorf("%s: %v; want %q", test.name, err, test.want)
		}
	}
}

// TestSetUpRefused has everything that can go wrong while a controller is brought up.
func TestSetUpRefused(t *testing.T) {
	answer := func(op wire.Opcode, c wire.Completion) func(*peer) {
		return func(p *peer) {
			p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
				if cmd.Opcode != op {
					return false
				}
				c.CID = cmd.CID
				pc.answer(c)
				return true
			}
		}
	}
	connect := func(qid uint16, c wire.Completion) func(*peer) {
		return func(p *peer) {
			p.connect = func(_ *peerConn, args wire.Connect, got *wire.Completion) {
				if args.QID == qid {
					cid := got.CID
					*got = c
					got.CID = cid
				}
			}
		}
	}
	for _, test := range []struct {
		name, want string
		final      bool
		change     func(*peer)
	}{
		{"host", "allow host " + hostNQN, true, connect(0, wire.Completion{Status: wire.StatusConnectHost, DNR: true})},
		{"subsystem", "no such subsystem", true, connect(0, wire.Completion{Status: wire.StatusConnectParameter, DNR: true, Result: 0x10100})},
		{"busy", "no controller free", false, connect(0, wire.Completion{Status: wire.StatusConnectBusy})},
		{"controller ID", "controller ID", true, connect(0, wire.Completion{Result: 0xFFFF})},
		{"I/O queue", "I/O queue 1", true, connect(1, wire.Completion{Status: wire.StatusConnectParameter, DNR: true, Result: 0x2C})},
		{"other controller", "belongs to controller", true, connect(1, wire.Completion{Result: 8})},
		{"secure channel", "TLS", true, connect(0, wire.Completion{Result: uint64(wire.ConnectResult{CntlID: 7, Secure: true}.DW0())})},
		{"CAP", "entr", true, func(p *peer) { p.caps.MaxQueueSize = 1 }},
		{"identity", "Connect said", true, func(p *peer) {
			p.connect = func(_ *peerConn, args wire.Connect, c *wire.Completion) { c.Result = 9 }
		}},
		{"KAS", "KAS", true, func(p *peer) { p.ctrl.KAS = 0 }},
		{"SGLS", "SGL", true, func(p *peer) { p.ctrl.SGLS = 1 }},
		{"IOCCSZ", "IOCCSZ", true, func(p *peer) { p.ctrl.IOCCSZ = 3 }},
		{"ICDOFF", "ICDOFF", true, func(p *peer) { p.ctrl.ICDOFF = 1 }},
		{"NQN", "nqn.2024-01.other", true, func(p *peer) { p.ctrl.SubsysNQN = "nqn.2024-01.other:name" }},
		{"discovery", "discovery controller", true, func(p *peer) { p.ctrl.Type = wire.ControllerDiscovery }},
		{"features", "ask for I/O queues", false, answer(wire.OpSetFeatures, wire.Completion{Status: wire.StatusInternal})},
		{"identify", "identify", false, answer(wire.OpIdentify, wire.Completion{Status: wire.StatusInternal})},
		{"no data", "bytes succeeded with 0", false, answer(wire.OpIdentify, wire.Completion{})},
		{"fatal", "fatal", false, func(p *peer) {
			p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
				if cmd.Opcode != wire.OpFabrics || cmd.FabricsType() != wire.FabricsPropertyGet || cmd.CDW11 != uint32(wire.PropCSTS) {
					return false
				}
				pc.answer(wire.Completion{CID: cmd.CID, Result: 2})
				return true
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPeer(t)
			p.ctrl.OAES = 0
			test.change(p)
			c, err := Connect(t.Context(), p.config())
			if err == nil {
				c.Close()
				t.Fatal("connected")
			}
			var ce *ConnectError
			if !errors.As(err, &ce) || ce.Final != test.final || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), testNQN) || !strings.Contains(err.Error(), ce.Addr) {
				t.Errorf("%v (final: %v); want %q", err, ce != nil && ce.Final, test.want)
			}
			t.Log(err)
			waittest.Until(t, "no connection is left", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return len(p.conns) == 0
			})
		})
	}
}

// TestSetUpStalls bounds the time of a controller that does not answer, at any step.
func TestSetUpStalls(t *testing.T) {
	for step := range 9 {
		p := newPeer(t)
		n := 0
		if step == 0 {
			p.rawResp = func([]byte) []byte { return nil }
		}
		p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
			n++
			return n == step
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		cfg := p.config()
		if step > 0 {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
			cfg.AdminTimeout = 50 * time.Millisecond
		}
		c, err := Connect(ctx, cfg)
		cancel()
		if err == nil {
			c.Close()
			t.Fatalf("step %d: connected", step)
		}
		var timeout *TimeoutError
		if step == 0 && !errors.Is(err, context.DeadlineExceeded) || step > 0 && !errors.As(err, &timeout) {
			t.Errorf("step %d: %v", step, err)
		}
		t.Log(err)
	}
}

// TestRandomBytes has a controller send anything, as I/O and during the set-up.
func TestRandomBytes(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	var mu sync.Mutex
	garbage := func(cid uint16) []byte {
		mu.Lock()
		defer mu.Unlock()
		b := make([]byte, rnd.IntN(20000))
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		switch rnd.IntN(4) {
		case 0:
			return b
		case 1: // a good header at first
			return append(c2h(cid, 0, uint32(len(b)+4), 0, nil), b...)
		case 2:
			g := append(c2h(cid, 0, 512, 0, b[:min(512, len(b))]), resp(wire.Completion{CID: cid})...)
			g[rnd.IntN(len(g))] ^= 1 << rnd.IntN(8)
			return g
		}
		g := r2tPDU(cid, 0, uint32(rnd.IntN(1<<17)), uint32(rnd.IntN(1<<17)))
		binary.LittleEndian.PutUint16(g[rnd.IntN(len(g)-1):], uint16(rnd.Uint32()))
		return g
	}
	p := newPeer(t)
	p.inCaps = 4096
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		pc.raw(garbage(cmd.CID))
		abort(pc.nc)
		return true
	}
	states := make(chan State, 1000)
	c := p.host(func(cfg *Config) { cfg.OnState = func(s State) { states <- s } })
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range 200 {
		var cmd *Command
		guard := bytes.Repeat([]byte{0xA5}, 12288)
		if i%2 == 0 {
			cmd = readCommand(0, 4096)
			cmd.Data = guard[4096:8192:8192]
		} else {
			cmd = writeCommand(0, make([]byte, 128<<10))
		}
		if err := do(t, c, cmd); err == nil && i%2 == 1 {
			t.Fatal("a write without its data succeeded")
		}
		for k, b := range guard {
			if (k < 4096 || k >= 8192) && b != 0xA5 {
				t.Fatal("memory beside the buffer was written to")
			}
		}
		awaitState(t, states, StateLive)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if n := after.HeapAlloc - min(before.HeapAlloc, after.HeapAlloc); n > 64<<20 {
		t.Errorf("%d MiB more memory", n>>20)
	}
	for range 100 {
		mu.Lock()
		at := rnd.IntN(1000)
		mu.Unlock()
		q := newPeer(t)
		n := 0
		q.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
			if n++; n != 1+at%7 {
				return false
			}
			pc.raw(garbage(cmd.CID))
			abort(pc.nc)
			return true
		}
		if c, err := Connect(t.Context(), q.config()); err == nil {
			c.Close()
		}
		q.l.Close()
	}
}

// TestSilence ends commands of a controller that does not answer: connections are closed first, so that the memory is free.
func TestSilence(t *testing.T) {
	p := newPeer(t)
	wake := make(chan struct{})
	var silent *peerConn
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		silent = pc
		<-wake
		pc.data(wire.C2HData{CID: cmd.CID, Last: true, Success: true}, bytes.Repeat([]byte{1}, 4096))
		return true
	}
	c := p.host(func(cfg *Config) { cfg.IOTimeout, cfg.KATO = 200*time.Millisecond, time.Second })
	cmd := readCommand(0, 4096)
	began := time.Now()
	err := do(t, c, cmd)
	var path *PathError
	var timeout *TimeoutError
	if !errors.As(err, &path) || !path.Sent || !errors.As(err, &timeout) || timeout.Op != "Read" {
		t.Fatal(err)
	}
	// The peer has KATO to notice, and CQT, from the end of the connection on.
	if path.Gone.Sub(began) < 1200*time.Millisecond || time.Until(path.Gone) > time.Second {
		t.Errorf("gone %v after the start, in %v", path.Gone.Sub(began), time.Until(path.Gone))
	}
	close(wake)
	waittest.Until(t, "connected again", func() bool { return p.connects.Load() == 2 })
	if !bytes.Equal(cmd.Data, make([]byte, 4096)) {
		t.Error("data came after the end")
	}
	_ = silent
}

// TestUnsentStaysUnsent closes a connection whose controller reads nothing: what waits in our socket's buffer never arrives, and
// what was not sent is said to be so.
func TestUnsentStaysUnsent(t *testing.T) {
	p := newPeer(t)
	p.inCaps, p.ctrl.IOCCSZ = 1<<20, 4+1<<20/16
	held := make(chan struct{})
	arrived := make(chan uint64, 200)
	var old atomic.Pointer[peerConn]
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		old.CompareAndSwap(nil, pc)
		<-held
		var r wire.Range
		r.Decode(&cmd)
		arrived <- r.SLBA
		return true
	}
	c := p.host(nil)
	var mu sync.Mutex
	sent := map[uint64]bool{}
	var wg sync.WaitGroup
	const n = 120
	for i := range n {
		cmd := writeCommand(uint64(i), make([]byte, 256<<10))
		wg.Add(1)
		cmd.Done = func(cmd *Command) {
			var path *PathError
			if !errors.As(cmd.Err, &path) {
				t.Error(cmd.Err)
			} else {
				mu.Lock()
				sent[cmd.SLBA] = path.Sent
				mu.Unlock()
			}
			wg.Done()
		}
		c.Start(cmd)
	}
	c.Flush()
	time.Sleep(20 * time.Millisecond)
	c.Reset("a test")
	wait(t, &wg)
	close(held)
	waittest.Until(t, "all that arrives is read", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.conns[old.Load()]
	})
	l := 0
	for _, s := range sent {
		if s {
			l++
		}
	}
	if l == 0 || l == n {
		t.Fatalf("%d of %d were sent", l, n)
	}
	p.cut()
	p.l.Close()
	c.Close()
	p.wg.Wait()
	close(arrived)
	if len(arrived) >= l {
		t.Errorf("%d writes arrived, as many as were sent", len(arrived))
	}
	for slba := range arrived {
		if !sent[slba] {
			t.Errorf("write %d arrived but was said to be unsent", slba)
		}
	}
}

// TestLateCompletions has an answer come again when its slot has another command, which it would end: a Flush has nothing that
// could be missing.
func TestLateCompletions(t *testing.T) {
	p := newPeer(t)
	var old wire.Completion
	n := 0
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if n++; n == 1 {
			old = wire.Completion{CID: cmd.CID}
		}
		if n == 5 {
			pc.answer(old)
			return true
		}
		return false
	}
	c := p.host(func(cfg *Config) { cfg.QueueSize = 2 })
	for i := range 5 {
		err := do(t, c, &Command{Op: wire.OpFlush, NSID: 1})
		var path *PathError
		if i < 4 && err != nil || i == 4 && !errors.As(err, &path) {
			t.Fatalf("Flush %d: %v", i, err)
		}
	}
}
