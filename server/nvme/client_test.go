package nvme

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	testNQN = "nqn.2026-01.io.weft:test"
	hostNQN = "nqn.2026-01.io.weft:host"
)

var quiet = slog.New(slog.DiscardHandler)

// backingFile makes a file of size bytes.
func backingFile(t testing.TB, dir string, size int64) *File {
	t.Helper()
	path := filepath.Join(dir, "ns")
	for n := 0; ; n++ {
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			break
		}
		path += "x"
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	f, err := OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func ramDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "nvme")
	if err != nil {
		t.Skip("missing: /dev/shm")
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

const testSize = 8 << 20

// testConfig is a subsystem with a namespace of 512-byte blocks in group 1 and one of 4096 in group 2, at ports 1 and 2.
func testConfig(t testing.TB, dir string) Config {
	t.Helper()
	cfg := Config{
		Subsystems: []Subsystem{{NQN: testNQN, Serial: "S1", AnyHost: true}},
		Ports: []Port{
			{ID: 1, Listen: "127.0.0.1:0", HeaderDigest: true, DataDigest: true},
			{ID: 2, Listen: "127.0.0.1:0", ANA: map[uint32]wire.ANAState{1: wire.ANANonOptimized}},
		},
		Log: quiet,
	}
	for i, size := range []uint32{512, 4096} {
		f := backingFile(t, dir, testSize)
		t.Cleanup(func() { f.Close() })
		cfg.Subsystems[0].Namespaces = append(cfg.Subsystems[0].Namespaces, Namespace{
			NSID: uint32(i + 1), Backing: f, BlockSize: size, ANAGroup: uint32(i + 1), NGUID: [16]byte{1, 15: byte(i)}, UUID: [16]byte{2, 15: byte(i)},
		})
	}
	return cfg
}

func startTarget(t testing.TB, cfg Config) *Target {
	t.Helper()
	tgt, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := tgt.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return tgt
}

func (t *Target) control() control { return control{t} }

func flushCommand(nsid uint32) wire.Command {
	return wire.Command{Opcode: wire.OpFlush, NSID: nsid, SGL: wire.NoSGL()}
}

// hostQueue is one connection of a host that does one thing at a time.
type hostQueue struct {
	t       testing.TB
	nc      net.Conn
	rx      wire.Receiver
	framing wire.Framing
	resp    wire.ICResp
	cid     uint16
	early   []wire.Completion // of others than the one that do waits for
}

// pdu is what came.
type pdu struct {
	wire.Header
	head []byte
	data []byte
}

func dial(t testing.TB, addr string, req wire.ICReq) *hostQueue {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(60 * time.Second))
	q := &hostQueue{t: t, nc: nc, rx: wire.Receiver{Role: wire.Host, MaxData: 1 << 24}}
	if req.MaxR2T == 0 {
		req.MaxR2T = 1
	}
	q.write(req.Append(nil))
	p := q.recv()
	if err := q.resp.Decode(p.Header, p.head, &req); err != nil {
		t.Fatal(err)
	}
	q.framing = wire.Framing{HeaderDigest: q.resp.HeaderDigest, DataDigest: q.resp.DataDigest, Align: q.resp.Align}
	q.rx.Framing = q.framing
	q.rx.Framing.Align = req.Align
	return q
}

func (q *hostQueue) write(b []byte) {
	q.t.Helper()
	if _, err := q.nc.Write(b); err != nil {
		q.t.Fatal(err)
	}
}

func (q *hostQueue) recv() pdu {
	q.t.Helper()
	p, err := q.tryRecv()
	if err != nil {
		q.t.Fatal(err)
	}
	return p
}

func (q *hostQueue) tryRecv() (p pdu, err error) {
	b := make([]byte, wire.HeaderSize)
	if _, err := io.ReadFull(q.nc, b); err != nil {
		return p, err
	}
	if p.Header, err = q.rx.Decode(b); err != nil {
		return p, err
	}
	b = append(b, make([]byte, int(p.PLen)-len(b))...)
	if _, err := io.ReadFull(q.nc, b[wire.HeaderSize:]); err != nil {
		return p, err
	}
	p.head = b[:p.Before()]
	if err := p.Verify(p.head); err != nil {
		return p, err
	}
	p.data = b[p.Before():][:p.Data()]
	if p.DataDigest() > 0 && !wire.VerifyDigest(b[len(b)-4:], p.data) {
		return p, errors.New("data digest is wrong")
	}
	return p, nil
}

// send sends a command, with data in the capsule, and returns its identifier.
func (q *hostQueue) send(cmd wire.Command, inCapsule []byte) uint16 {
	q.t.Helper()
	q.cid++
	cmd.CID = q.cid
	c := wire.CapsuleCmd{Command: cmd, Length: uint32(len(inCapsule))}
	b := append(c.Append(nil, q.framing), inCapsule...)
	if q.framing.DataDigest && len(inCapsule) > 0 {
		b = wire.AppendDigest(b, inCapsule)
	}
	q.write(b)
	return q.cid
}

// sendData answers an R2T in pieces of at most piece bytes.
func (q *hostQueue) sendData(r wire.R2T, data []byte, piece uint32) {
	q.t.Helper()
	for off, end := r.Offset, r.Offset+r.Length; off < end; {
		n := min(piece, end-off)
		p := wire.H2CData{CID: r.CID, Tag: r.Tag, Offset: off, Length: n, Last: off+n == end}
		b := append(p.Append(nil, q.framing), data[off:off+n]...)
		if q.framing.DataDigest {
			b = wire.AppendDigest(b, data[off:off+n])
		}
		q.write(b)
		off += n
	}
}

// do does a command: in goes in the capsule, out by R2T. It returns what was read, too.
func (q *hostQueue) do(cmd wire.Command, in, out []byte) (wire.Completion, []byte) {
	q.t.Helper()
	return q.finish(q.send(cmd, in), out)
}

// finish waits for the completion of a command.
func (q *hostQueue) finish(cid uint16, out []byte) (wire.Completion, []byte) {
	q.t.Helper()
	for i, c := range q.early {
		if c.CID == cid {
			q.early = append(q.early[:i], q.early[i+1:]...)
			return c, nil
		}
	}
	var got []byte
	for {
		p := q.recv()
		switch p.Type {
		case wire.PDUR2T:
			var r wire.R2T
			if err := r.Decode(p.Header, p.head); err != nil {
				q.t.Fatal(err)
			}
			q.sendData(r, out, q.resp.MaxH2CData)
		case wire.PDUC2HData:
			var d wire.C2HData
			if err := d.Decode(p.Header, p.head); err != nil {
				q.t.Fatal(err)
			}
			if d.CID != cid || int(d.Offset) != len(got) {
				q.t.Fatalf("data of command %d at %d; want %d at %d", d.CID, d.Offset, cid, len(got))
			}
			got = append(got, p.data...)
			if d.Success {
				return wire.Completion{CID: cid}, got
			}
		case wire.PDUCapsuleResp:
			var c wire.CapsuleResp
			if err := c.Decode(p.Header, p.head); err != nil {
				q.t.Fatal(err)
			}
			if c.Completion.CID == cid {
				return c.Completion, got
			}
			q.early = append(q.early, c.Completion)
		default:
			q.t.Fatalf("%v came", p.Type)
		}
	}
}

// ok does a command that must succeed.
func (q *hostQueue) ok(cmd wire.Command, in, out []byte) (wire.Completion, []byte) {
	q.t.Helper()
	c, got := q.do(cmd, in, out)
	if c.Status != wire.StatusSuccess {
		q.t.Fatalf("%s: %v", cmd.Name(false), c.Status)
	}
	return c, got
}

// status does a command and returns what it gets.
func (q *hostQueue) status(cmd wire.Command, in, out []byte) wire.Status {
	q.t.Helper()
	c, _ := q.do(cmd, in, out)
	return c.Status
}

// testHost is a controller as a host has it.
type testHost struct {
	t     testing.TB
	addr  string
	opts  hostOptions
	admin *hostQueue
	id    uint16
}

type hostOptions struct {
	ic     wire.ICReq
	nqn    string // empty: hostNQN
	subsys string // empty: testNQN
	hostID byte
	kato   time.Duration
	flow   bool // SQ flow control
}

func (o *hostOptions) connect(q *hostQueue, c wire.Connect, cntlID uint16) wire.Completion {
	d := wire.ConnectData{HostID: wire.HostID{9, 15: o.hostID}, CntlID: cntlID, SubsysNQN: testNQN, HostNQN: hostNQN}
	if o.nqn != "" {
		d.HostNQN = o.nqn
	}
	if o.subsys != "" {
		d.SubsysNQN = o.subsys
	}
	c.NoSQFlow = !o.flow
	comp, _ := q.do(c.Command(), d.Append(nil), nil)
	return comp
}

// newHost brings a controller up.
func newHost(t testing.TB, addr string, opts hostOptions) *testHost {
	t.Helper()
	h := &testHost{t: t, addr: addr, opts: opts, admin: dial(t, addr, opts.ic)}
	comp := opts.connect(h.admin, wire.Connect{QueueSize: wire.AdminQueueSize, KATO: opts.kato}, wire.CntlIDAny)
	if comp.Status != wire.StatusSuccess {
		t.Fatalf("connect: %v %#x", comp.Status.Text(wire.SetFabrics), comp.Result)
	}
	h.id = wire.DecodeConnectResult(comp.DW0()).CntlID
	cc := wire.DefaultConfiguration()
	cc.Enable = true
	h.admin.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
	comp, _ = h.admin.ok(wire.PropertyGet{Property: wire.PropCSTS}.Command(), nil, nil)
	var st wire.ControllerStatus
	if st.Decode(comp.DW0()); !st.Ready {
		t.Fatalf("CSTS is %+v", st)
	}
	return h
}

// queue connects an I/O queue.
func (h *testHost) queue(qid uint16, size int) *hostQueue {
	h.t.Helper()
	q := dial(h.t, h.addr, h.opts.ic)
	if comp := h.opts.connect(q, wire.Connect{QID: qid, QueueSize: size}, h.id); comp.Status != wire.StatusSuccess {
		h.t.Fatalf("connect queue %d: %v %#x", qid, comp.Status.Text(wire.SetFabrics), comp.Result)
	}
	return q
}

func (h *testHost) identify(a wire.Identify) []byte {
	h.t.Helper()
	_, b := h.admin.ok(a.Command(), nil, nil)
	return b
}

func (h *testHost) log(a wire.GetLogPage) []byte {
	h.t.Helper()
	_, b := h.admin.ok(a.Command(), nil, nil)
	return b
}

func write(nsid uint32, slba uint64, blocks uint32, sgl wire.SGL) wire.Command {
	return wire.Range{NSID: nsid, SLBA: slba, Blocks: blocks}.Command(wire.OpWrite, sgl)
}

func read(nsid uint32, slba uint64, blocks uint32, size uint32) wire.Command {
	return wire.Range{NSID: nsid, SLBA: slba, Blocks: blocks}.Command(wire.OpRead, wire.TransportSGL(blocks*size))
}
