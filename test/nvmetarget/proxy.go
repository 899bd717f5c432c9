package nvmetarget

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Rule gets a PDU of the target and sends what the host is to get. It runs with the connection's other rules one at a time.
type Rule func(c *Conn, p *PDU, send func(*PDU))

// PDU is one on its way to the host. The common header's lengths follow from Head and Data when it is sent, and digests are added.
type PDU struct {
	Type  wire.PDUType
	Flags wire.Flags // those for digests are added
	Head  []byte     // HLEN bytes; the common header is in the first 8
	Data  []byte

	PLen         uint32 // if not 0, what the header says, which need not be true
	SpoilHeader  bool   // the header digest is wrong
	SpoilData    bool   // the data digest is wrong
	Raw          []byte // if not nil, these bytes are sent, and nothing else counts
	CutAfter     bool   // then the connection is reset
	headerDigest bool
}

// CID is that of the command which a CapsuleResp, C2HData or R2T belongs to.
func (p *PDU) CID() uint16 {
	if p.Type == wire.PDUCapsuleResp {
		return le.Uint16(p.Head[wire.HeaderSize+12:])
	}
	return le.Uint16(p.Head[8:])
}

// SetCID changes it.
func (p *PDU) SetCID(cid uint16) {
	if p.Type == wire.PDUCapsuleResp {
		le.PutUint16(p.Head[wire.HeaderSize+12:], cid)
	} else {
		le.PutUint16(p.Head[8:], cid)
	}
}

// Offset and Length are DATAO and DATAL of a C2HData, R2TO and R2TL of an R2T.
func (p *PDU) Offset() uint32 { return le.Uint32(p.Head[12:]) }

// Length is that of Offset's comment.
func (p *PDU) Length() uint32 { return le.Uint32(p.Head[16:]) }

// SetRange changes both.
func (p *PDU) SetRange(off, n uint32) {
	le.PutUint32(p.Head[12:], off)
	le.PutUint32(p.Head[16:], n)
}

// Clone copies the header; the data is shared.
func (p *PDU) Clone() *PDU {
	q := *p
	q.Head = append([]byte(nil), p.Head...)
	return &q
}

var le = binary.LittleEndian

// encode returns the bytes for a receiver with this framing.
func (p *PDU) encode(f wire.Framing) []byte {
	if p.Raw != nil {
		return p.Raw
	}
	b := append([]byte(nil), p.Head...)
	flags := p.Flags &^ (wire.FlagHeaderDigest | wire.FlagDataDigest)
	before := len(b)
	if p.headerDigest && f.HeaderDigest {
		flags |= wire.FlagHeaderDigest
		before += wire.DigestSize
	}
	pdo, plen := 0, before
	if len(p.Data) > 0 {
		unit := (int(f.Align) + 1) * 4
		pdo = (before + unit - 1) / unit * unit
		if plen = pdo + len(p.Data); f.DataDigest {
			flags |= wire.FlagDataDigest
			plen += wire.DigestSize
		}
	}
	b[0], b[1], b[2], b[3] = byte(p.Type), byte(flags), byte(len(p.Head)), byte(pdo)
	if le.PutUint32(b[4:], uint32(plen)); p.PLen != 0 {
		le.PutUint32(b[4:], p.PLen)
	}
	if flags&wire.FlagHeaderDigest != 0 {
		b = wire.AppendDigest(b, b)
		if p.SpoilHeader {
			b[len(b)-1] ^= 1
		}
	}
	if len(p.Data) > 0 {
		b = append(append(b, make([]byte, pdo-len(b))...), p.Data...)
		if f.DataDigest {
			b = wire.AppendDigest(b, p.Data)
			if p.SpoilData {
				b[len(b)-1] ^= 1
			}
		}
	}
	return b
}

// Proxy stands between hosts and a target.
type Proxy struct {
	t      testing.TB
	target string
	l      net.Listener
	wg     sync.WaitGroup

	mu         sync.Mutex
	rules      []Rule
	conns      map[*Conn]bool
	violations []error
}

// New makes a proxy to the target at HOST:PORT, which ends with the test. It passes everything on until there are rules.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{t: t, target: target, l: l, conns: map[*Conn]bool{}}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		l.Close()
		p.Reset()
		p.wg.Wait()
	})
	return p
}

// Addr is where hosts connect to.
func (p *Proxy) Addr() string { return p.l.Addr().String() }

// Use replaces the rules, for the PDUs that come from now on. Rules have state, and are the proxy's from then on.
func (p *Proxy) Use(rules ...Rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = rules
}

// Reset cuts all connections, on both sides.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Cut()
	}
}

func (p *Proxy) accept() {
	for {
		host, err := p.l.Accept()
		if err != nil {
			return
		}
		target, err := net.Dial("tcp", p.target)
		if err != nil {
			host.Close()
			continue
		}
		c := &Conn{p: p, host: host, target: target, commands: map[uint16]wire.Command{}, cut: map[uint16]*request{}}
		p.mu.Lock()
		p.conns[c] = true
		p.mu.Unlock()
		p.wg.Go(func() { // ends, as does the goroutine that it starts, when one side is closed
			if err := c.handshake(); err == nil {
				p.wg.Go(func() {
					c.upstream()
					c.Cut()
				})
				c.downstream()
			}
			c.Cut()
			p.mu.Lock()
			delete(p.conns, c)
			p.mu.Unlock()
		})
	}
}

// Conn is a connection through the proxy.
type Conn struct {
	p            *Proxy
	host, target net.Conn

	mu       sync.Mutex // guards what follows, and the order of what goes to the host
	qid      uint16
	toHost   wire.Framing
	align    uint8                   // what the host was told
	maxData  uint32                  // the same
	commands map[uint16]wire.Command // of the host, not completed
	cut      map[uint16]*request     // R2Ts that SplitR2T has cut, by command
}

// request is an R2T of the target for which the host is asked in pieces.
type request struct {
	r2t       *PDU
	tag       uint16
	next, end uint32 // what the host has not been asked for
	piece     uint32
	send      func(*PDU)
}

// ask asks the host for the next piece, if there is one. The tags are any.
func (r *request) ask() {
	if r.next == r.end {
		return
	}
	n := min(r.piece, r.end-r.next)
	p := r.r2t.Clone()
	p.SetRange(r.next, n)
	le.PutUint16(p.Head[10:], uint16(-(r.next / r.piece)))
	r.next += n
	r.send(p)
}

// QID is the queue, 0 until a Connect has said otherwise. It is for rules, as is the next.
func (c *Conn) QID() uint16 { return c.qid }

// Command is a command of the host that was not completed.
func (c *Conn) Command(cid uint16) (cmd wire.Command, ok bool) {
	cmd, ok = c.commands[cid]
	return cmd, ok
}

// Cut resets the connection on both sides.
func (c *Conn) Cut() {
	for _, nc := range []net.Conn{c.host, c.target} {
		if tcp, ok := nc.(*net.TCPConn); ok {
			tcp.SetLinger(0)
		}
		nc.Close()
	}
}

// read takes the next PDU from a connection; raw is all of its bytes, which it shares.
func read(nc net.Conn, rx *wire.Receiver) (p *PDU, raw []byte, err error) {
	b := make([]byte, wire.HeaderSize)
	if _, err := io.ReadFull(nc, b); err != nil {
		return nil, nil, err
	}
	h, err := rx.Decode(b)
	if err != nil {
		return nil, nil, err
	}
	b = append(b, make([]byte, int(h.PLen)-len(b))...)
	if _, err := io.ReadFull(nc, b[wire.HeaderSize:]); err != nil {
		return nil, nil, err
	}
	p = &PDU{Type: h.Type, Flags: h.Flags, Head: b[:h.HLen:h.HLen], Data: b[h.Before():][:h.Data()], headerDigest: h.Digest() > 0}
	return p, b, nil
}

// handshake passes ICReq and ICResp on. What the host is told about digests is what the target says, whatever rules do.
func (c *Conn) handshake() error {
	req, raw, err := read(c.host, &wire.Receiver{Role: wire.Controller})
	if err != nil {
		return err
	}
	var ask wire.ICReq
	if err := ask.Decode(wire.Header{Type: req.Type, HLen: wire.ICSize}, req.Head); err != nil {
		return err
	}
	if _, err := c.target.Write(raw); err != nil {
		return err
	}
	resp, _, err := read(c.target, &wire.Receiver{Role: wire.Host})
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var answer wire.ICResp
	if err := answer.Decode(wire.Header{Type: resp.Type, HLen: wire.ICSize}, resp.Head, &ask); err != nil {
		return err
	}
	c.run(resp)
	c.toHost = wire.Framing{HeaderDigest: answer.HeaderDigest, DataDigest: answer.DataDigest, Align: ask.Align}
	return nil
}

// run applies the rules to a PDU. mu is held.
func (c *Conn) run(p *PDU) {
	c.p.mu.Lock()
	rules := c.p.rules
	c.p.mu.Unlock()
	c.chain(rules, p)
}

func (c *Conn) chain(rules []Rule, p *PDU) {
	if len(rules) == 0 {
		c.emit(p)
		return
	}
	rules[0](c, p, func(p *PDU) { c.chain(rules[1:], p) })
}

// emit sends a PDU to the host.
func (c *Conn) emit(p *PDU) {
	if p.Raw == nil && (p.Type == wire.PDUCapsuleResp || p.Type == wire.PDUC2HData && p.Flags&wire.FlagSuccess != 0) {
		delete(c.commands, p.CID())
	}
	c.host.Write(p.encode(c.toHost)) // a failure shows when the host is read from
	if p.CutAfter {
		c.Cut()
	}
}

// downstream takes what the target sends.
func (c *Conn) downstream() {
	c.mu.Lock()
	rx := wire.Receiver{Role: wire.Host, MaxData: 1 << 24, Framing: c.toHost}
	c.mu.Unlock()
	for {
		p, _, err := read(c.target, &rx)
		if err != nil {
			return
		}
		c.mu.Lock()
		c.run(p)
		c.mu.Unlock()
	}
}

// upstream passes on what the host sends.
func (c *Conn) upstream() {
	c.mu.Lock()
	rx := wire.Receiver{Role: wire.Controller, MaxCapsule: 1 << 24, MaxData: 1 << 24, Framing: c.toHost}
	c.mu.Unlock()
	rx.Align = 0 // fromHost looks
	for {
		p, raw, err := read(c.host, &rx)
		if err != nil {
			if errors.Is(err, wire.ErrInvalid) {
				c.p.violated(err)
			}
			return
		}
		c.mu.Lock()
		next, changed := c.fromHost(p)
		c.mu.Unlock()
		if changed && p.headerDigest {
			wire.AppendDigest(raw[:len(p.Head)], p.Head) // in place
		}
		if _, err := c.target.Write(raw); err != nil {
			return
		}
		if next != nil {
			c.mu.Lock()
			next()
			c.mu.Unlock()
		}
	}
}

// fromHost notes what the host sends, and changes the header so that the target does not see what SplitR2T does. next, if it is
// there, is to be done when the PDU has gone.
func (c *Conn) fromHost(p *PDU) (next func(), changed bool) {
	if unit := (int(c.align) + 1) * 4; len(p.Data) > 0 && int(p.Head[3])%unit != 0 {
		c.p.violated(fmt.Errorf("%v: data begins at %d, want a multiple of %d", p.Type, p.Head[3], unit))
	}
	switch p.Type {
	case wire.PDUCapsuleCmd:
		var cmd wire.Command
		cmd.Decode(p.Head[wire.HeaderSize:])
		c.commands[cmd.CID] = cmd
		if cmd.Opcode == wire.OpFabrics && cmd.FabricsType() == wire.FabricsConnect {
			c.qid = uint16(cmd.CDW10 >> 16)
		}
	case wire.PDUH2CData:
		if c.maxData > 0 && uint32(len(p.Data)) > c.maxData {
			c.p.violated(fmt.Errorf("H2CData of %d bytes, MAXH2CDATA is %d", len(p.Data), c.maxData))
		}
		cid := le.Uint16(p.Head[8:])
		r := c.cut[cid]
		if r == nil {
			return nil, false
		}
		le.PutUint16(p.Head[10:], r.tag)
		end := p.Offset() + p.Length()
		if p.Flags&wire.FlagLast == 0 {
			return nil, true
		}
		if end == r.end {
			delete(c.cut, cid)
			return nil, true
		}
		p.Head[1] &^= byte(wire.FlagLast)
		return r.ask, true
	}
	return nil, false
}

// violated notes that the host did what it may not.
func (p *Proxy) violated(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.violations = append(p.violations, err)
}

// Violations is what hosts have done that they may not, as far as the proxy looks: PDUs that do not decode, data that is not
// aligned as Align has told, or more of it than MaxH2CData.
func (p *Proxy) Violations() []error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.violations)
}
