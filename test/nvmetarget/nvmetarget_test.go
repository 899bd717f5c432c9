package nvmetarget

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/server/nvme"
)

const nqn = "nqn.2026-01.io.weft:misbehaving"

// start starts a target with a namespace of 4096-byte blocks, and a proxy to it.
func start(t *testing.T) *Proxy {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ns")
	if err := os.WriteFile(path, make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := nvme.OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	tgt, err := nvme.New(nvme.Config{
		Subsystems: []nvme.Subsystem{{NQN: nqn, Serial: "1", AnyHost: true, Namespaces: []nvme.Namespace{{NSID: 1, Backing: f, BlockSize: 4096, NGUID: [16]byte{1}}}}},
		Ports:      []nvme.Port{{ID: 1, Listen: "127.0.0.1:0", HeaderDigest: true, DataDigest: true}},
		Log:        slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tgt.Shutdown(context.Background()) })
	return New(t, tgt.Addr(1))
}

// host is one connection of an initiator that takes everything that it may get.
type host struct {
	t    *testing.T
	nc   net.Conn
	req  wire.ICReq
	resp wire.ICResp
	to   wire.Framing
	rx   wire.Receiver
	cid  uint16
	cntl uint16
	r2ts int      // that came
	seen []uint16 // the commands to which data belonged, in the order of its PDUs
}

func dial(t *testing.T, p *Proxy, req wire.ICReq) (*host, error) {
	t.Helper()
	nc, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(30 * time.Second))
	req.MaxR2T = 1
	h := &host{t: t, nc: nc, req: req, rx: wire.Receiver{Role: wire.Host, MaxData: 1 << 20}}
	nc.Write(req.Append(nil))
	hd, b, _, err := h.recv()
	if err != nil {
		return nil, err
	}
	if err := h.resp.Decode(hd, b, &req); err != nil {
		return nil, err
	}
	h.to = wire.Framing{HeaderDigest: h.resp.HeaderDigest, DataDigest: h.resp.DataDigest, Align: h.resp.Align}
	h.rx.Framing = wire.Framing{HeaderDigest: h.resp.HeaderDigest, DataDigest: h.resp.DataDigest, Align: req.Align}
	return h, nil
}

var errDataDigest = errors.New("data digest is wrong")

func (h *host) recv() (hd wire.Header, head, data []byte, err error) {
	b := make([]byte, wire.HeaderSize)
	if _, err = io.ReadFull(h.nc, b); err != nil {
		return
	}
	if hd, err = h.rx.Decode(b); err != nil {
		return
	}
	b = append(b, make([]byte, int(hd.PLen)-len(b))...)
	if _, err = io.ReadFull(h.nc, b[wire.HeaderSize:]); err != nil {
		return
	}
	head, data = b[:hd.Before()], b[hd.Before():][:hd.Data()]
	if err = hd.Verify(head); err == nil && hd.DataDigest() > 0 && !wire.VerifyDigest(b[len(b)-4:], data) {
		err = errDataDigest
	}
	return
}

type command struct {
	wire.Command
	out  []byte // sent by R2T
	in   []byte // what came
	want int
	done bool
	dw0  uint32
}

// run does commands, all at once.
func (h *host) run(cmds ...*command) error {
	by := map[uint16]*command{}
	for _, c := range cmds {
		h.cid++
		c.CID = h.cid
		by[c.CID] = c
		p := wire.CapsuleCmd{Command: c.Command}
		var data []byte
		if c.SGL.Type == wire.SGLInCapsule {
			data = c.out
			p.Length = uint32(len(data))
		}
		h.nc.Write(h.withDigest(p.Append(nil, h.to), data))
	}
	for left := len(cmds); left > 0; {
		hd, head, data, err := h.recv()
		if err != nil {
			return err
		}
		switch hd.Type {
		case wire.PDUR2T:
			var r wire.R2T
			if err := r.Decode(hd, head); err != nil {
				return err
			}
			h.r2ts++
			c := by[r.CID]
			if c == nil || uint64(r.Offset)+uint64(r.Length) > uint64(len(c.out)) {
				return fmt.Errorf("R2T of %d bytes at %d", r.Length, r.Offset)
			}
			for off, end := r.Offset, r.Offset+r.Length; off < end; {
				n := min(h.resp.MaxH2CData, end-off)
				p := wire.H2CData{CID: r.CID, Tag: r.Tag, Offset: off, Length: n, Last: off+n == end}
				h.nc.Write(h.withDigest(p.Append(nil, h.to), c.out[off:off+n]))
				off += n
			}
		case wire.PDUC2HData:
			var d wire.C2HData
			if err := d.Decode(hd, head); err != nil {
				return err
			}
			c := by[d.CID]
			if c == nil || c.done || int(d.Offset) != len(c.in) || len(c.in)+len(data) > c.want {
				return fmt.Errorf("C2HData of %d bytes at %d", d.Length, d.Offset)
			}
			h.seen = append(h.seen, d.CID)
			c.in = append(c.in, data...)
			if d.Success {
				c.done = true
				left--
			}
		case wire.PDUCapsuleResp:
			var r wire.CapsuleResp
			if err := r.Decode(hd, head); err != nil {
				return err
			}
			c := by[r.Completion.CID]
			if c == nil || c.done {
				return fmt.Errorf("completion of command %d", r.Completion.CID)
			}
			if err := r.Completion.Err(&c.Command, false); err != nil {
				return err
			}
			c.done, c.dw0 = true, r.Completion.DW0()
			left--
		}
	}
	for _, c := range cmds {
		if len(c.in) != c.want {
			return fmt.Errorf("%d of %d bytes", len(c.in), c.want)
		}
	}
	return nil
}

func (h *host) withDigest(b, data []byte) []byte {
	b = append(b, data...)
	if h.to.DataDigest && len(data) > 0 {
		b = wire.AppendDigest(b, data)
	}
	return b
}

func read4k(slba uint64, blocks uint32) *command {
	return &command{Command: wire.Range{NSID: 1, SLBA: slba, Blocks: blocks}.Command(wire.OpRead, wire.TransportSGL(blocks*4096)), want: int(blocks) * 4096}
}

func write4k(slba uint64, data []byte) *command {
	sgl := wire.TransportSGL(uint32(len(data)))
	if len(data) <= 8192 {
		sgl = wire.CapsuleSGL(uint32(len(data)))
	}
	return &command{Command: wire.Range{NSID: 1, SLBA: slba, Blocks: uint32(len(data) / 4096)}.Command(wire.OpWrite, sgl), out: data}
}

// connect brings a controller up and returns an I/O queue of it.
func connect(t *testing.T, p *Proxy, req wire.ICReq, flow bool) *host {
	t.Helper()
	join := func(qid, cntl uint16) *host {
		h, err := dial(t, p, req)
		if err != nil {
			t.Fatal(err)
		}
		d := wire.ConnectData{CntlID: cntl, SubsysNQN: nqn, HostNQN: "nqn.2026-01.io.weft:h"}
		c := &command{Command: wire.Connect{QID: qid, QueueSize: 32, NoSQFlow: !flow}.Command(), out: d.Append(nil)}
		if err := h.run(c); err != nil {
			t.Fatal(err)
		}
		h.cntl = wire.DecodeConnectResult(c.dw0).CntlID
		return h
	}
	admin := join(0, wire.CntlIDAny)
	cc := wire.DefaultConfiguration()
	cc.Enable = true
	if err := admin.run(&command{Command: wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command()}); err != nil {
		t.Fatal(err)
	}
	return join(1, admin.cntl)
}

// TestAllowed uses the rules that a host must not notice, while data is compared.
func TestAllowed(t *testing.T) {
	slow := func() time.Duration { return time.Duration(rand.IntN(5)) * time.Millisecond }
	for name, rules := range map[string][]Rule{
		"none":       nil,
		"MaxH2CData": {MaxH2CData(4096)},
		"Align":      {Align(31)},
		"SplitR2T":   {SplitR2T(8192)},
		"SplitData":  {SplitData(3000, false)},
		"mixed":      {SplitData(5000, true)},
		"Delay":      {Delay(slow)},
		"all":        {MaxH2CData(4096), Align(31), SplitR2T(12288), SplitData(10000, true), Delay(slow)},
	} {
		t.Run(name, func(t *testing.T) {
			for _, req := range []wire.ICReq{{}, {HeaderDigest: true, DataDigest: true}, {Align: 31}} {
				p := start(t)
				p.Use(rules...)
				h := connect(t, p, req, req.Align > 0)
				rnd := rand.New(rand.NewPCG(5, 6))
				for range 6 {
					var writes, reads []*command
					for i := range uint64(6) {
						data := make([]byte, 4096*(1+rnd.IntN(40)))
						for i := range data {
							data[i] = byte(rnd.Uint32())
						}
						writes = append(writes, write4k(64*i, data))
						reads = append(reads, read4k(64*i, uint32(len(data)/4096)))
					}
					if err := h.run(writes...); err != nil {
						t.Fatal(err)
					}
					if err := h.run(reads...); err != nil {
						t.Fatal(err)
					}
					for i := range reads {
						if !bytes.Equal(reads[i].in, writes[i].out) {
							t.Fatal("data differs")
						}
					}
				}
				if v := p.Violations(); len(v) > 0 {
					t.Errorf("violations: %v", v)
				}
				switch name {
				case "MaxH2CData":
					if h.resp.MaxH2CData != 4096 {
						t.Errorf("MAXH2CDATA is %d", h.resp.MaxH2CData)
					}
				case "SplitR2T":
					if h.r2ts < 60 {
						t.Errorf("%d R2Ts", h.r2ts)
					}
				case "mixed":
					turns := 0
					for i := 1; i < len(h.seen); i++ {
						if h.seen[i] != h.seen[i-1] {
							turns++
						}
					}
					if turns < len(h.seen)/3 {
						t.Errorf("data of commands took turns %d times in %d PDUs", turns, len(h.seen))
					}
				}
			}
		})
	}
}

// TestMisbehaviour uses each of the other rules, and looks at what the host finds.
func TestMisbehaviour(t *testing.T) {
	digests := wire.ICReq{HeaderDigest: true, DataDigest: true}
	flush := func() *command {
		return &command{Command: wire.Command{Opcode: wire.OpFlush, NSID: 1, SGL: wire.NoSGL()}}
	}
	big := make([]byte, 64<<10)
	for name, tc := range map[string]struct {
		rule Rule
		req  wire.ICReq
		flow bool
		cmd  *command
		want string // part of the error; "timeout": nothing comes
	}{
		"Twice":             {Nth(2, wire.PDUCapsuleResp, Twice), wire.ICReq{}, false, flush(), "completion of command"},
		"Drop":              {Nth(2, wire.PDUCapsuleResp, Drop), wire.ICReq{}, false, flush(), "timeout"},
		"Cut":               {Nth(2, wire.PDUCapsuleResp, Cut), wire.ICReq{}, false, flush(), "reset"},
		"CutInside":         {Nth(1, wire.PDUC2HData, CutInside), wire.ICReq{}, false, read4k(0, 16), "reset"},
		"UnknownCID":        {Nth(2, wire.PDUCapsuleResp, UnknownCID), wire.ICReq{}, false, flush(), "completion of command"},
		"SpoilHeaderDigest": {Nth(2, wire.PDUCapsuleResp, SpoilHeaderDigest), digests, false, flush(), "header digest"},
		"SpoilDataDigest":   {Nth(1, wire.PDUC2HData, SpoilDataDigest), digests, false, read4k(0, 1), "data digest is wrong"},
		"PLen":              {Nth(2, wire.PDUCapsuleResp, PLen(28)), wire.ICReq{}, false, flush(), "PLEN is 28"},
		"oversize":          {Nth(1, wire.PDUC2HData, PLen(1<<32-1)), wire.ICReq{}, false, read4k(0, 1), "PLEN is 4294967295"},
		"SUCCESS alone":     {Nth(1, wire.PDUC2HData, Flags(0, wire.FlagLast)), wire.ICReq{}, false, read4k(0, 1), "SUCCESS without LAST_PDU"},
		"no SUCCESS":        {Nth(1, wire.PDUC2HData, Flags(0, wire.FlagSuccess)), wire.ICReq{}, false, read4k(0, 1), "timeout"},
		"data beyond":       {Nth(1, wire.PDUC2HData, Range(1<<30, 0)), wire.ICReq{}, false, read4k(0, 1), "C2HData of 4096 bytes at"},
		"data length":       {Nth(1, wire.PDUC2HData, Range(0, 4)), wire.ICReq{}, false, read4k(0, 1), "a length of 4100 bytes"},
		"R2T beyond":        {Nth(1, wire.PDUR2T, Range(4096, 0)), wire.ICReq{}, false, write4k(0, big), "R2T of 65536 bytes at 4096"},
		"R2T of nothing":    {Nth(1, wire.PDUR2T, Range(0, -64<<10)), wire.ICReq{}, false, write4k(0, big), "a length of 0 bytes"},
		"R2T for a read":    {Nth(1, wire.PDUC2HData, Ask(0, 4096)), wire.ICReq{}, false, read4k(0, 1), "R2T of 4096 bytes"},
		"Random":            {Nth(1, wire.PDUC2HData, Random(512, 1)), wire.ICReq{}, false, read4k(0, 1), "invalid PDU header field"},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t)
			p.Use(tc.rule)
			h := connect(t, p, tc.req, tc.flow) // has the first CapsuleResp of an I/O queue
			if tc.want == "timeout" {
				h.nc.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			}
			err := h.run(tc.cmd)
			if err == nil && name == "Twice" { // the second one comes to the next command
				err = h.run(flush())
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v; want %q", err, tc.want)
			}
			// Rules are used up, and another connection works.
			p.Use()
			if err := connect(t, p, tc.req, tc.flow).run(read4k(0, 1)); err != nil {
				t.Error(err)
			}
		})
	}
	for name, rule := range map[string]Rule{"MAXH2CDATA": MaxH2CData(512), "CPDA": Align(32)} {
		p := start(t)
		p.Use(rule)
		if _, err := dial(t, p, wire.ICReq{}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
