package nvmetcp

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	testNQN  = "nqn.2024-01.weft.test:subsystem"
	hostNQN  = "nqn.2024-01.weft.test:host"
	peerSize = 8 << 20 // of the one namespace, in blocks of 512 bytes
)

// peer is a controller whose behaviour tests replace piece by piece. The hooks are set before the first connection is made and
// called from the goroutines of the connections.
type peer struct {
	t    testing.TB
	l    net.Listener
	wg   sync.WaitGroup
	disk []byte
	dmu  sync.Mutex

	resp    wire.ICResp
	rawResp func(resp []byte) []byte // the ICResp, or what comes instead
	ctrl    wire.ControllerData
	caps    wire.Capabilities
	queues  int
	inCaps  int // bytes of data in capsules of I/O queues
	connect func(pc *peerConn, args wire.Connect, c *wire.Completion)
	admin   func(pc *peerConn, cmd wire.Command, data []byte) bool // true: dealt with
	io      func(pc *peerConn, cmd wire.Command, data []byte) bool
	h2c     func(pc *peerConn, p wire.H2CData, data []byte) bool
	chop    bool  // send in pieces
	align   uint8 // of the data that is sent

	connects   atomic.Int32 // of admin queues
	beats      atomic.Int32
	terms      chan wire.TermReq
	aers       []asked // guarded by mu
	mu         sync.Mutex
	conns      map[*peerConn]bool
	connectArg map[uint16]wire.Connect
}

// asked is an AER that waits.
type asked struct {
	pc  *peerConn
	cid uint16
}

// peerConn is one connection.
type peerConn struct {
	p    *peer
	nc   net.Conn
	qid  uint16
	cc   wire.Configuration
	send wire.Framing
	recv wire.Receiver
	wmu  sync.Mutex
	out  []byte
	in   []byte

	rnd *rand.Rand // with wmu

	writes map[uint16]*peerWrite
}

// peerWrite is a write that waits for its data.
type peerWrite struct {
	cmd wire.Command
	buf []byte
	got int
}

func newPeer(t testing.TB) *peer {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{
		t: t, l: l, disk: make([]byte, peerSize), queues: 64, inCaps: 8192, terms: make(chan wire.TermReq, 100),
		resp: wire.ICResp{MaxH2CData: 128 << 10}, conns: map[*peerConn]bool{}, connectArg: map[uint16]wire.Connect{},
		caps: wire.Capabilities{MaxQueueSize: 128, ReadyTimeout: 5 * time.Second, NVM: true, PageShiftMin: 12, PageShiftMax: 12},
		ctrl: wire.ControllerData{
			CntlID: 7, Version: wire.Version20, OAES: wire.EventsANA, Type: wire.ControllerIO, AERs: 4, LPA: wire.LPAOffset, KAS: 100 * time.Millisecond,
			SQES: 0x66, CQES: 0x44, NN: 1, SGLS: 1 | wire.SGLSOffsetInCapsule, SubsysNQN: testNQN, IORCSZ: 1,
		},
	}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *peer) config() Config {
	return Config{
		Addr: p.l.Addr().String(), SubsysNQN: testNQN, HostNQN: hostNQN, HostID: wire.HostID{1}, Queues: 1,
		ReconnectDelay: 10 * time.Millisecond, IOTimeout: 20 * time.Second, AdminTimeout: 20 * time.Second,
		Log: slog.New(slog.DiscardHandler),
	}
}

// host connects to the peer.
func (p *peer) host(change func(*Config)) *Controller {
	p.t.Helper()
	cfg := p.config()
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := Connect(ctx, cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	return c
}

// cut ends all connections.
func (p *peer) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for pc := range p.conns {
		abort(pc.nc)
	}
}

func (p *peer) accept() {
	for {
		nc, err := p.l.Accept()
		if err != nil {
			return
		}
		pc := &peerConn{p: p, nc: nc, rnd: rand.New(rand.NewPCG(1, 2)), in: make([]byte, 4096), writes: map[uint16]*peerWrite{}}
		p.mu.Lock()
		p.conns[pc] = true
		p.mu.Unlock()
		p.wg.Go(func() {
			err := pc.serve()
			nc.Close()
			p.mu.Lock()
			delete(p.conns, pc)
			p.mu.Unlock()
			var op *net.OpError
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.As(err, &op) {
				p.t.Errorf("peer, queue %d: %v", pc.qid, err)
			}
		})
	}
}

// pdu reads the next PDU: its header, what stands before the data, and the data, all valid until the next call.
func (pc *peerConn) pdu() (h wire.Header, head, data []byte, err error) {
	b := pc.in[:wire.HeaderSize]
	if _, err := io.ReadFull(pc.nc, b); err != nil {
		return h, nil, nil, err
	}
	if h, err = pc.recv.Decode(b); err != nil {
		return h, nil, nil, err
	}
	if int(h.PLen) > len(pc.in) {
		pc.in = append(make([]byte, 0, h.PLen), b...)[:h.PLen]
	}
	b = pc.in[:h.PLen]
	if _, err := io.ReadFull(pc.nc, b[wire.HeaderSize:]); err != nil {
		return h, nil, nil, err
	}
	head, data = b[:h.Before()], b[h.Before():][:h.Data()]
	if err := h.Verify(head); err != nil {
		return h, nil, nil, err
	}
	if h.DataDigest() > 0 && !wire.VerifyDigest(b[h.Before()+h.Data():], data) {
		return h, nil, nil, errors.New("data digest is wrong")
	}
	if h.Type == wire.PDUH2CTermReq {
		head = b
	}
	return h, head, data, nil
}

// write sends bytes as they are.
func (pc *peerConn) write(b []byte) {
	if pc.p.chop {
		for len(b) > 0 {
			n := min(len(b), 1+pc.rnd.IntN(50))
			if n > 40 {
				n = min(len(b), 1000*n)
			}
			pc.nc.Write(b[:n])
			b = b[n:]
		}
		return
	}
	pc.nc.Write(b) // an error is the connection's end, which serve sees
}

// answer completes a command.
func (pc *peerConn) answer(c wire.Completion) {
	pc.wmu.Lock()
	defer pc.wmu.Unlock()
	r := wire.CapsuleResp{Completion: c}
	pc.out = r.Append(pc.out[:0], pc.send)
	pc.write(pc.out)
}

// data sends a piece of what a command reads.
func (pc *peerConn) data(d wire.C2HData, b []byte) {
	pc.wmu.Lock()
	defer pc.wmu.Unlock()
	d.Length = uint32(len(b))
	pc.out = append(d.Append(pc.out[:0], pc.send), b...)
	if pc.send.DataDigest {
		pc.out = wire.AppendDigest(pc.out, b)
	}
	pc.write(pc.out)
}

func (pc *peerConn) r2t(r wire.R2T) {
	pc.wmu.Lock()
	defer pc.wmu.Unlock()
	pc.out = r.Append(pc.out[:0], pc.send)
	pc.write(pc.out)
}

func (pc *peerConn) raw(b []byte) {
	pc.wmu.Lock()
	defer pc.wmu.Unlock()
	pc.write(b)
}

func (pc *peerConn) serve() error {
	pc.recv = wire.Receiver{Role: wire.Controller, MaxCapsule: fabricsInline, MaxData: maxTransfer}
	h, head, _, err := pc.pdu()
	if err != nil {
		return err
	}
	var req wire.ICReq
	if err := req.Decode(h, head); err != nil {
		return err
	}
	resp := pc.p.resp
	if req.HeaderDigest {
		resp.HeaderDigest = true
	}
	if req.DataDigest {
		resp.DataDigest = true
	}
	b := resp.Append(nil)
	if pc.p.rawResp != nil {
		b = pc.p.rawResp(b)
	}
	pc.raw(b)
	pc.send = wire.Framing{HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest, Align: pc.p.align}
	pc.recv.Framing = wire.Framing{HeaderDigest: req.HeaderDigest, DataDigest: req.DataDigest, Align: resp.Align}
	pc.recv.MaxData = resp.MaxH2CData
	for {
		h, head, data, err := pc.pdu()
		if err != nil {
			return err
		}
		switch h.Type {
		case wire.PDUCapsuleCmd:
			var p wire.CapsuleCmd
			if err := p.Decode(h, head); err != nil {
				return err
			}
			if status := p.Command.CheckData(p.Length); status != 0 {
				return status
			}
			if p.Command.Opcode == wire.OpFabrics || pc.qid == 0 {
				pc.adminCommand(p.Command, data)
			} else if pc.p.io == nil || !pc.p.io(pc, p.Command, data) {
				pc.ioCommand(p.Command, data)
			}
		case wire.PDUH2CData:
			var p wire.H2CData
			if err := p.Decode(h, head); err != nil {
				return err
			}
			if pc.p.h2c == nil || !pc.p.h2c(pc, p, data) {
				pc.h2cData(p, data)
			}
		case wire.PDUH2CTermReq:
			var p wire.TermReq
			if err := p.Decode(h, head); err != nil {
				return err
			}
			select {
			case pc.p.terms <- p:
			default: // nobody asks
			}
			return nil
		default:
			return errors.New(h.Type.String())
		}
	}
}

func (pc *peerConn) adminCommand(cmd wire.Command, data []byte) {
	p := pc.p
	if p.admin != nil && p.admin(pc, cmd, data) {
		return
	}
	c := wire.Completion{CID: cmd.CID}
	ctrl := p.ctrl
	if ctrl.IOCCSZ == 0 {
		ctrl.IOCCSZ = uint32(4 + p.inCaps/16)
	}
	switch {
	case cmd.Opcode == wire.OpFabrics:
		switch cmd.FabricsType() {
		case wire.FabricsConnect:
			var args wire.Connect
			args.Decode(&cmd)
			pc.qid = args.QID
			p.mu.Lock()
			p.connectArg[args.QID] = args
			p.mu.Unlock()
			if args.QID == 0 {
				p.connects.Add(1)
			} else {
				pc.recv.MaxCapsule = uint32(p.inCaps)
			}
			c.Result = uint64(wire.ConnectResult{CntlID: ctrl.CntlID}.DW0())
			if p.connect != nil {
				p.connect(pc, args, &c)
			}
		case wire.FabricsPropertyGet:
			var args wire.PropertyGet
			args.Decode(&cmd)
			switch args.Property {
			case wire.PropCAP:
				c.Result = p.caps.Property()
			case wire.PropVS:
				c.Result = uint64(ctrl.Version)
			case wire.PropCSTS:
				s := wire.ControllerStatus{Ready: pc.cc.Enable}
				if pc.cc.Shutdown != 0 {
					s.Shutdown = wire.ShutdownComplete
				}
				c.Result = uint64(s.Property())
			}
		case wire.FabricsPropertySet:
			var args wire.PropertySet
			args.Decode(&cmd)
			pc.cc.Decode(uint32(args.Value))
		}
	case cmd.Opcode == wire.OpIdentify:
		var args wire.Identify
		args.Decode(&cmd)
		var b []byte
		switch args.CNS {
		case wire.CNSController:
			b = ctrl.Append(nil)
		case wire.CNSNamespace:
			ns := wire.Namespace{NSZE: peerSize / 512, NCAP: peerSize / 512, BlockShift: 9}
			b = ns.Append(nil)
		default:
			b = make([]byte, wire.IdentifySize)
		}
		pc.data(wire.C2HData{CID: cmd.CID, Last: true}, b)
	case cmd.Opcode == wire.OpSetFeatures:
		var args wire.Feature
		args.Decode(&cmd)
		if args.ID == wire.FeatureQueues {
			c.Result = uint64(wire.QueueCount(p.queues))
		}
	case cmd.Opcode == wire.OpGetLogPage:
		pc.data(wire.C2HData{CID: cmd.CID, Last: true}, make([]byte, cmd.SGL.Length))
	case cmd.Opcode == wire.OpAsyncEvent:
		p.mu.Lock()
		p.aers = append(p.aers, asked{pc, cmd.CID})
		p.mu.Unlock()
		return
	case cmd.Opcode == wire.OpKeepAlive:
		p.beats.Add(1)
	}
	pc.answer(c)
}

// at is the part of the disk that the command is about.
func (pc *peerConn) at(cmd *wire.Command) []byte {
	var r wire.Range
	r.Decode(cmd)
	return pc.p.disk[r.SLBA*512:][:r.Blocks*512]
}

func (pc *peerConn) ioCommand(cmd wire.Command, data []byte) {
	switch cmd.Opcode {
	case wire.OpRead:
		pc.p.dmu.Lock()
		defer pc.p.dmu.Unlock()
		pc.data(wire.C2HData{CID: cmd.CID, Last: true, Success: true}, pc.at(&cmd))
		return
	case wire.OpWrite:
		if len(data) == 0 {
			pc.writes[cmd.CID] = &peerWrite{cmd: cmd, buf: make([]byte, cmd.SGL.Length)}
			pc.r2t(wire.R2T{CID: cmd.CID, Tag: 9, Length: cmd.SGL.Length})
			return
		}
		pc.p.dmu.Lock()
		copy(pc.at(&cmd), data)
		pc.p.dmu.Unlock()
	}
	pc.answer(wire.Completion{CID: cmd.CID})
}

// h2cData takes data of a write; the last of it completes the command.
func (pc *peerConn) h2cData(p wire.H2CData, data []byte) {
	w := pc.writes[p.CID]
	if w == nil {
		pc.p.t.Errorf("data for command %#x, which asks for none", p.CID)
		return
	}
	copy(w.buf[p.Offset:], data)
	if w.got += len(data); w.got == len(w.buf) {
		delete(pc.writes, p.CID)
		pc.p.dmu.Lock()
		copy(pc.at(&w.cmd), w.buf)
		pc.p.dmu.Unlock()
		pc.answer(wire.Completion{CID: p.CID})
	}
}

// event answers the newest AER.
func (p *peer) event(e wire.AsyncEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.aers[len(p.aers)-1]
	p.aers = p.aers[:len(p.aers)-1]
	a.pc.answer(wire.Completion{CID: a.cid, Result: uint64(e.DW0())})
}

// do runs cmd with a limit.
func do(t testing.TB, c *Controller, cmd *Command) error {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), 30*time.Second, errors.New("the test's time is over"))
	defer cancel()
	err := c.Do(ctx, cmd)
	if ctx.Err() != nil {
		t.Fatal("a command does not end")
	}
	return err
}

func readCommand(slba uint64, n int) *Command {
	return &Command{Op: wire.OpRead, NSID: 1, SLBA: slba, Blocks: uint32(n / 512), Data: make([]byte, n)}
}

func writeCommand(slba uint64, data []byte) *Command {
	return &Command{Op: wire.OpWrite, NSID: 1, SLBA: slba, Blocks: uint32(len(data) / 512), Data: data}
}

func pattern(seed uint64, n int) []byte {
	rnd := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, 0, n+8)
	for len(b) < n {
		b = binary.LittleEndian.AppendUint64(b, rnd.Uint64())
	}
	return b[:n]
}
