package nvme

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// termination waits for the end of the connection and returns why it ended, or nil if nothing was said.
func (q *hostQueue) termination() *wire.TermReq {
	q.t.Helper()
	for {
		var b [wire.HeaderSize]byte
		if _, err := io.ReadFull(q.nc, b[:]); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				q.t.Fatal("the connection did not end")
			}
			return nil
		}
		h, err := q.rx.Decode(b[:])
		if err != nil {
			q.t.Fatal(err)
		}
		rest := make([]byte, int(h.PLen)-len(b))
		if _, err := io.ReadFull(q.nc, rest); err != nil {
			return nil
		}
		if h.Type == wire.PDUC2HTermReq {
			var p wire.TermReq
			if err := p.Decode(h, append(b[:], rest...)); err != nil {
				q.t.Fatal(err)
			}
			return &p
		}
	}
}

// TestProtocolErrors has the target end connections, and say why.
func TestProtocolErrors(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	h := newHost(t, tgt.Addr(1), hostOptions{})
	digests := newHost(t, tgt.Addr(1), hostOptions{ic: wire.ICReq{HeaderDigest: true, DataDigest: true}})
	qid := uint16(0)
	h2c := func(q *hostQueue, p wire.H2CData, n int) {
		q.write(append(p.Append(nil, q.framing), make([]byte, n)...))
	}
	expectR2T := func(q *hostQueue) (r wire.R2T) {
		p := q.recv()
		if err := r.Decode(p.Header, p.head); err != nil {
			t.Fatal(err)
		}
		return r
	}
	capsule := func(q *hostQueue, cmd wire.Command, n int) []byte {
		p := wire.CapsuleCmd{Command: cmd, Length: uint32(n)}
		return append(p.Append(nil, q.framing), make([]byte, n)...)
	}
	for name, tc := range map[string]struct {
		h    *testHost
		do   func(q *hostQueue)
		want wire.FatalStatus
	}{
		"unknown type": {h, func(q *hostQueue) { q.write([]byte{0x55, 0, 8, 0, 8, 0, 0, 0}) }, wire.FatalHeaderField},
		"ICReq again":  {h, func(q *hostQueue) { q.write((&wire.ICReq{MaxR2T: 1}).Append(nil)) }, wire.FatalSequence},
		"a host's PDU": {h, func(q *hostQueue) { q.write((&wire.CapsuleResp{}).Append(nil, q.framing)) }, wire.FatalHeaderField},
		"PLEN 4 GiB":   {h, func(q *hostQueue) { q.write([]byte{4, 0, 72, 72, 255, 255, 255, 255}) }, wire.FatalHeaderField},
		"capsule":      {h, func(q *hostQueue) { q.write(capsule(q, flushCommand(1), ioCapsule+4)) }, wire.FatalHeaderField},
		"data unasked": {h, func(q *hostQueue) { h2c(q, wire.H2CData{CID: 9, Tag: 3, Length: 512, Last: true}, 512) }, wire.FatalHeaderField},
		"data of a read": {h, func(q *hostQueue) {
			q.send(read(1, 0, 1, 512), nil)
			h2c(q, wire.H2CData{CID: 1, Length: 512, Last: true}, 512)
		}, wire.FatalHeaderField},
		"data too long": {h, func(q *hostQueue) {
			q.send(write(1, 0, 1, wire.TransportSGL(512)), nil)
			r := expectR2T(q)
			h2c(q, wire.H2CData{CID: r.CID, Tag: r.Tag, Length: 1024, Last: true}, 1024)
		}, wire.FatalDataRange},
		"data at the wrong place": {h, func(q *hostQueue) {
			q.send(write(1, 0, 2, wire.TransportSGL(1024)), nil)
			r := expectR2T(q)
			h2c(q, wire.H2CData{CID: r.CID, Tag: r.Tag, Offset: 512, Length: 512, Last: true}, 512)
		}, wire.FatalDataRange},
		"data twice": {h, func(q *hostQueue) {
			q.send(write(1, 0, 1, wire.TransportSGL(512)), nil)
			r := expectR2T(q)
			h2c(q, wire.H2CData{CID: r.CID, Tag: r.Tag, Length: 512, Last: true}, 512)
			h2c(q, wire.H2CData{CID: r.CID, Tag: r.Tag, Length: 512, Last: true}, 512)
		}, wire.FatalHeaderField},
		"last too early": {h, func(q *hostQueue) {
			q.send(write(1, 0, 2, wire.TransportSGL(1024)), nil)
			r := expectR2T(q)
			h2c(q, wire.H2CData{CID: r.CID, Tag: r.Tag, Length: 512, Last: true}, 512)
		}, wire.FatalDataRange},
		"too many commands": {h, func(q *hostQueue) {
			for range 9 {
				q.send(write(1, 0, 1, wire.TransportSGL(512)), nil) // wait for data
			}
		}, wire.FatalLimit},
		"header digest": {digests, func(q *hostQueue) {
			b := capsule(q, flushCommand(1), 0)
			b[20] ^= 1
			q.write(b)
		}, wire.FatalHeaderDigest},
		"no digests": {digests, func(q *hostQueue) { q.write((&wire.CapsuleCmd{Command: flushCommand(1)}).Append(nil, wire.Framing{})) }, wire.FatalHeaderField},
	} {
		qid++
		q := tc.h.queue(qid, 8)
		tc.do(q)
		if got := q.termination(); got == nil || got.Fatal != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
	for name, b := range map[string][]byte{
		"HTTP":             []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"command first":    (&wire.CapsuleCmd{Command: flushCommand(1)}).Append(nil, wire.Framing{}),
		"HPDA 32":          func() []byte { b := (&wire.ICReq{MaxR2T: 1}).Append(nil); b[10] = 32; return b }(),
		"protocol version": func() []byte { b := (&wire.ICReq{MaxR2T: 1}).Append(nil); b[8] = 1; return b }(),
	} {
		nc, err := net.Dial("tcp", tgt.Addr(1))
		if err != nil {
			t.Fatal(err)
		}
		nc.SetDeadline(time.Now().Add(30 * time.Second))
		nc.Write(b)
		q := &hostQueue{t: t, nc: nc, rx: wire.Receiver{Role: wire.Host}}
		if q.termination() == nil {
			t.Errorf("%s: nothing was said", name)
		}
		nc.Close()
	}
	h.queue(100, 8).ok(read(1, 0, 1, 512), nil, nil)
	digests.queue(100, 8).ok(read(1, 0, 1, 512), nil, nil)
}

// TestDataDigest has wrong data digests fail a command and nothing else.
func TestDataDigest(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	h := newHost(t, tgt.Addr(1), hostOptions{ic: wire.ICReq{DataDigest: true}})
	q := h.queue(1, 8)
	data := bytes.Repeat([]byte{5}, 1024)
	p := wire.CapsuleCmd{Command: write(1, 0, 2, wire.CapsuleSGL(1024)), Length: 1024}
	p.Command.CID = 500
	q.write(append(append(p.Append(nil, q.framing), data...), 1, 2, 3, 4))
	c, _ := q.finish(500, nil)
	if c.Status != wire.StatusTransport || c.DNR {
		t.Errorf("in capsule: %v, DNR %v", c.Status, c.DNR)
	}
	cid := q.send(write(1, 0, 2, wire.TransportSGL(1024)), nil)
	var r wire.R2T
	m := q.recv()
	if err := r.Decode(m.Header, m.head); err != nil {
		t.Fatal(err)
	}
	for i, spoil := range []byte{1, 0} { // the first of two pieces is wrong
		d := wire.H2CData{CID: cid, Tag: r.Tag, Offset: uint32(i * 512), Length: 512, Last: i == 1}
		b := wire.AppendDigest(append(d.Append(nil, q.framing), data[:512]...), data[:512])
		b[len(b)-1] ^= spoil
		q.write(b)
	}
	if c, _ := q.finish(cid, nil); c.Status != wire.StatusTransport || c.DNR {
		t.Errorf("by R2T: %v, DNR %v", c.Status, c.DNR)
	}
	if _, got := q.ok(read(1, 0, 2, 512), nil, nil); !bytes.Equal(got, make([]byte, 1024)) {
		t.Error("data with a wrong digest was written")
	}
}

// TestStatuses is what commands get that are wrong.
func TestStatuses(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	cfg.Subsystems[0].Namespaces[1].ReadOnly = true
	tgt := startTarget(t, cfg)
	h := newHost(t, tgt.Addr(1), hostOptions{})
	q := h.queue(1, 8)
	edit := func(c wire.Command, f func(*wire.Command)) wire.Command { f(&c); return c }
	const blocks = testSize / 512
	for name, tc := range map[string]struct {
		cmd  wire.Command
		in   int
		want wire.Status
	}{
		"beyond the end":      {read(1, blocks, 1, 512), 0, wire.StatusLBARange},
		"across the end":      {read(1, blocks-1, 2, 512), 0, wire.StatusLBARange},
		"overflow":            {read(1, 1<<64-1, 2, 512), 0, wire.StatusLBARange},
		"write beyond":        {write(1, blocks, 1, wire.CapsuleSGL(512)), 512, wire.StatusLBARange},
		"no namespace":        {read(3, 0, 1, 512), 0, wire.StatusInvalidNamespace},
		"namespace 0":         {read(0, 0, 1, 512), 0, wire.StatusInvalidNamespace},
		"flush all":           {flushCommand(wire.AllNamespaces), 0, wire.StatusInvalidNamespace},
		"opcode":              {edit(read(1, 0, 1, 512), func(c *wire.Command) { c.Opcode = 0x70 }), 0, wire.StatusInvalidOpcode},
		"compare":             {edit(write(1, 0, 1, wire.CapsuleSGL(512)), func(c *wire.Command) { c.Opcode = wire.OpCompare }), 512, wire.StatusInvalidOpcode},
		"fused":               {edit(read(1, 0, 1, 512), func(c *wire.Command) { c.Flags |= 1 }), 0, wire.StatusInvalidField},
		"too long":            {read(1, 0, maxTransfer/512+1, 512), 0, wire.StatusInvalidField},
		"SGL too short":       {edit(read(1, 0, 2, 512), func(c *wire.Command) { c.SGL.Length = 512 }), 0, wire.StatusSGLLength},
		"SGL too long":        {edit(read(1, 0, 1, 512), func(c *wire.Command) { c.SGL.Length = 1024 }), 0, wire.StatusSGLLength},
		"SGL type":            {edit(read(1, 0, 1, 512), func(c *wire.Command) { c.SGL.Type = 0x20 }), 0, wire.StatusSGLType},
		"read in the capsule": {edit(read(1, 0, 1, 512), func(c *wire.Command) { c.SGL = wire.CapsuleSGL(512) }), 512, wire.StatusInvalidField},
		"capsule without":     {write(1, 0, 1, wire.CapsuleSGL(512)), 0, wire.StatusSGLOffset},
		"capsule offset":      {edit(write(1, 0, 1, wire.CapsuleSGL(512)), func(c *wire.Command) { c.SGL.Address = 4 }), 512, wire.StatusSGLOffset},
		"write protected":     {write(2, 0, 1, wire.CapsuleSGL(4096)), 4096, wire.StatusWriteProtected},
		"zero protected":      {wire.Range{NSID: 2, Blocks: 1}.Command(wire.OpWriteZeroes, wire.NoSGL()), 0, wire.StatusWriteProtected},
		"flush protected":     {flushCommand(2), 0, wire.StatusSuccess},
		"read protected":      {read(2, 0, 1, 4096), 0, wire.StatusSuccess},
		"authentication":      {wire.Auth{Receive: true, Length: 64}.Command(false), 0, wire.StatusInvalidOpcode},
	} {
		comp, _ := q.do(tc.cmd, make([]byte, tc.in), nil)
		if comp.Status != tc.want || comp.DNR != (tc.want != wire.StatusSuccess) {
			t.Errorf("%s: %v, DNR %v; want %v", name, comp.Status, comp.DNR, tc.want)
		}
	}
	var n wire.Namespace
	if err := n.Decode(h.identify(wire.Identify{CNS: wire.CNSNamespace, NSID: 2})); err != nil || n.NSATTR != wire.NSATTRWriteProtected {
		t.Errorf("namespace 2: %+v %v", n, err)
	}
	beyond := wire.DSMRange{SLBA: blocks - 1, Blocks: 2}
	if st := q.status(wire.Deallocate(1, 1, true), beyond.Append(nil), nil); st != wire.StatusLBARange {
		t.Errorf("deallocate across the end: %v", st)
	}
	// The same identifier twice: the first waits for its data.
	p := wire.CapsuleCmd{Command: write(1, 0, 1, wire.TransportSGL(512))}
	p.Command.CID = 900
	q.write(p.Append(nil, q.framing))
	q.write(p.Append(nil, q.framing))
	for {
		if m := q.recv(); m.Type == wire.PDUCapsuleResp {
			var c wire.CapsuleResp
			if err := c.Decode(m.Header, m.head); err != nil || c.Completion.Status != wire.StatusCIDConflict {
				t.Errorf("identifier in use: %+v %v", c, err)
			}
			break
		}
	}
}

// TestFlowControl looks at SQHD and SUCCESS with SQ flow control on and off.
func TestFlowControl(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	for _, flow := range []bool{false, true} {
		q := newHost(t, tgt.Addr(1), hostOptions{flow: flow}).queue(1, 4)
		for i := range 10 {
			c, _ := q.ok(flushCommand(1), nil, nil)
			want := uint16(0)
			if flow {
				want = uint16(i+2) % 4 // Connect was the first
			}
			if c.SQHead != want || c.SQID != 1 {
				t.Errorf("flow control %v: SQHD %d of queue %d after %d commands, want %d", flow, c.SQHead, c.SQID, i+1, want)
			}
		}
		q.send(read(1, 0, 1, 512), nil)
		p := q.recv()
		if success := p.Flags&wire.FlagSuccess != 0; success == flow {
			t.Errorf("flow control %v: SUCCESS is %v", flow, success)
		}
	}
}

// slow is a backing that holds writes up until it may go on.
type slow struct {
	*File
	begun chan struct{}
	goOn  chan struct{}
	wrote atomic.Int32
}

func (s *slow) WriteAt(p []byte, off int64) (int, error) {
	s.begun <- struct{}{}
	<-s.goOn
	s.wrote.Add(1)
	return s.File.WriteAt(p, off)
}

// TestFence shows that what takes something from a host waits for its commands that run, and that no others begin.
func TestFence(t *testing.T) {
	for name, fence := range map[string]func(tgt *Target) error{
		"DisallowHost":    func(tgt *Target) error { return tgt.control().DisallowHost(testNQN, hostNQN) },
		"DropControllers": func(tgt *Target) error { return tgt.control().DropControllers(testNQN, "") },
		"PortDown":        func(tgt *Target) error { return tgt.control().PortDown(1) },
		"RemoveNamespace": func(tgt *Target) error { return tgt.control().RemoveNamespace(testNQN, 1) },
		"Shutdown": func(tgt *Target) error {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			tgt.Shutdown(ctx)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t, t.TempDir())
			s := &slow{File: cfg.Subsystems[0].Namespaces[0].Backing.(*File), begun: make(chan struct{}, 100), goOn: make(chan struct{})}
			cfg.Subsystems[0].Namespaces[0].Backing = s
			tgt := startTarget(t, cfg)
			q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 64)
			for range 40 { // the first is done by who reads the commands, and the others are in its buffer
				q.send(write(1, 0, 1, wire.CapsuleSGL(512)), make([]byte, 512))
			}
			<-s.begun
			done := make(chan error)
			go func() { done <- fence(tgt) }()
			select {
			case <-done:
				t.Error("it did not wait for a command that runs")
			case <-time.After(50 * time.Millisecond): // it may take longer to come that far, and then this shows nothing
			}
			close(s.goOn)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			wrote := s.wrote.Load()
			time.Sleep(20 * time.Millisecond)
			if s.wrote.Load() != wrote {
				t.Error("a command began behind the fence")
			}
			if name == "RemoveNamespace" || name == "Shutdown" || name == "PortDown" {
				return
			}
			again := dial(t, tgt.Addr(1), wire.ICReq{})
			comp := (&hostOptions{}).connect(again, wire.Connect{QueueSize: 32}, wire.CntlIDAny)
			if want := map[bool]wire.Status{true: wire.StatusConnectHost, false: wire.StatusSuccess}[name == "DisallowHost"]; comp.Status != want {
				t.Errorf("connect afterwards: %v", comp.Status)
			}
		})
	}
}

// TestStalledHost has a host ask for much and take nothing: what is kept for it is bounded, others are served, and it is cut off
// in the end. Another one begins to write everywhere and sends nothing.
func TestStalledHost(t *testing.T) {
	t.Parallel()
	tgt := startTarget(t, testConfig(t, ramDir(t)))
	tgt.setStall(3 * time.Second)
	h := newHost(t, tgt.Addr(1), hostOptions{ic: wire.ICReq{DataDigest: true}}) // so that reads need memory
	q := h.queue(1, 512)
	q.nc.(*net.TCPConn).SetReadBuffer(4096)
	w := h.queue(2, 512)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { // ends when the connection does
		for range 10000 {
			cmd := wire.CapsuleCmd{Command: read(1, 0, maxTransfer/512, 512)}
			cmd.Command.CID++
			if _, err := q.nc.Write(cmd.Append(nil, q.framing)); err != nil {
				return
			}
		}
	})
	for range 511 {
		w.send(write(1, 0, maxTransfer/512, wire.TransportSGL(maxTransfer)), nil)
	}
	other := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 8)
	for range 200 {
		other.ok(read(2, 0, 16, 4096), nil, nil)
		if n := tgt.payloads.Load(); n > 2*maxConnPayloads {
			t.Fatalf("%d bytes of payload in memory", n)
		}
	}
	awaitClosed(t, tgt, q)
	w.nc.Close()
	h.admin.nc.Close()
	waittest.Until(t, "all memory is given back", func() bool { return tgt.payloads.Load() == 0 })
}

// TestDataNeverSent: a host that is asked for data and sends none, but other commands, loses that connection.
func TestDataNeverSent(t *testing.T) {
	t.Parallel()
	tgt := startTarget(t, testConfig(t, ramDir(t)))
	tgt.setStall(2 * time.Second) // a busy machine must not take as long for data
	h := newHost(t, tgt.Addr(1), hostOptions{})
	good, bad := h.queue(1, 8), h.queue(2, 8)
	for _, q := range []*hostQueue{good, bad} { // one that sends it stays
		q.ok(write(1, 0, 128, wire.TransportSGL(64<<10)), nil, make([]byte, 64<<10))
	}
	bad.send(write(1, 0, 128, wire.TransportSGL(64<<10)), nil)
	cmd := wire.CapsuleCmd{Command: flushCommand(1)}
	waittest.Until(t, "the connection ends", func() bool {
		cmd.Command.CID = cmd.Command.CID%1000 + 100
		_, err := bad.nc.Write(cmd.Append(nil, bad.framing))
		return err != nil
	})
	waittest.Until(t, "all memory is given back", func() bool { return tgt.payloads.Load() == 0 })
	good.ok(write(1, 0, 128, wire.TransportSGL(64<<10)), nil, make([]byte, 64<<10))
}

func (t *Target) setStall(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stall = d
}

// TestSlowHost has a host take what is sent later than it can be sent at once, but in time, and go on after more than that time.
func TestSlowHost(t *testing.T) {
	t.Parallel()
	tgt := startTarget(t, testConfig(t, ramDir(t)))
	tgt.setStall(2 * time.Second)
	q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 64)
	var cids []uint16
	for range 32 {
		cids = append(cids, q.send(read(1, 0, maxTransfer/512, 512), nil))
	}
	time.Sleep(500 * time.Millisecond)
	got := map[uint16]bool{}
	for range cids {
		p := q.recv()
		got[binary.LittleEndian.Uint16(p.head[8:])] = true
	}
	if len(got) != len(cids) {
		t.Errorf("%d answers to %d commands", len(got), len(cids))
	}
	time.Sleep(3 * time.Second)
	for range 3 {
		q.ok(read(1, 0, 8, 512), nil, nil)
	}
}

// TestShutdown lets commands that were read end, and answers them.
func TestShutdown(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	s := &slow{File: cfg.Subsystems[0].Namespaces[0].Backing.(*File), begun: make(chan struct{}, 100), goOn: make(chan struct{})}
	cfg.Subsystems[0].Namespaces[0].Backing = s
	tgt := startTarget(t, cfg)
	q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 64)
	fua := wire.Range{NSID: 1, Blocks: 1, FUA: true}.Command(wire.OpWrite, wire.CapsuleSGL(512))
	cid := q.send(fua, bytes.Repeat([]byte{1}, 512))
	<-s.begun
	done := make(chan error)
	go func() { done <- tgt.Shutdown(context.Background()) }()
	waittest.Until(t, "it begins", func() bool { tgt.mu.Lock(); defer tgt.mu.Unlock(); return tgt.closing })
	close(s.goOn)
	if c, _ := q.finish(cid, nil); c.Status != wire.StatusSuccess {
		t.Errorf("write: %v", c.Status)
	}
	if _, err := q.tryRecv(); !errors.Is(err, io.EOF) {
		t.Errorf("then: %v", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestBackingFails maps errors of a backing to statuses.
func TestBackingFails(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	b := &failing{File: cfg.Subsystems[0].Namespaces[0].Backing.(*File)}
	cfg.Subsystems[0].Namespaces[0].Backing = b
	tgt := startTarget(t, cfg)
	q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 8)
	for _, tc := range []struct {
		err   error
		write wire.Status
	}{{nil, wire.StatusSuccess}, {unix.EIO, wire.StatusWriteFault}, {unix.ENOSPC, wire.StatusCapacity}, {unix.EROFS, wire.StatusWriteProtected}, {nil, wire.StatusSuccess}} {
		b.mu.Lock()
		b.err = tc.err
		b.mu.Unlock()
		if st := q.status(write(1, 0, 1, wire.CapsuleSGL(512)), make([]byte, 512), nil); st != tc.write {
			t.Errorf("%v: write: %v", tc.err, st)
		}
		want := wire.StatusSuccess
		if tc.err != nil {
			want = wire.StatusReadError
		}
		if st := q.status(read(1, 0, 1, 512), nil, nil); st != want {
			t.Errorf("%v: read: %v", tc.err, st)
		}
	}
}

type failing struct {
	*File
	mu  sync.Mutex
	err error
}

func (f *failing) fails() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *failing) ReadAt(p []byte, off int64) (int, error) {
	if err := f.fails(); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

func (f *failing) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fails(); err != nil {
		return 0, err
	}
	return f.File.WriteAt(p, off)
}

// TestFile is about what a backing promises: one owner, and a sync that failed once fails for ever.
func TestFile(t *testing.T) {
	f := backingFile(t, t.TempDir(), 1<<20)
	if _, err := OpenFile(fdName(f), false); err == nil {
		t.Error("a file was opened twice")
	}
	if _, err := OpenFile(t.TempDir(), true); err == nil {
		t.Error("a directory was opened")
	}
	defer func() { fdatasync = unix.Fdatasync }()
	var syncs atomic.Int32
	fdatasync = func(int) error { syncs.Add(1); return nil }
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := f.Sync(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := syncs.Load(); n < 1 || n > 50 {
		t.Errorf("%d syncs", n)
	}
	fdatasync = func(int) error { return unix.EIO }
	if err := f.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("sync: %v", err)
	}
	fdatasync = unix.Fdatasync
	if err := f.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("sync after a failed one: %v", err)
	}
	// A file that was cut: reads tell.
	if err := os.Truncate(fdName(f), 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, 8192), 0); err == nil {
		t.Error("more was read than there is")
	}
	f.Close()
}

// FuzzConn sends bytes to a queue that works, after ICReq and Connect.
func FuzzConn(f *testing.F) {
	tgt, err := New(testConfig(f, f.TempDir()))
	if err != nil {
		f.Fatal(err)
	}
	defer tgt.Shutdown(context.Background())
	h := newHost(f, tgt.Addr(1), hostOptions{})
	h.admin.nc.SetDeadline(time.Time{})
	fr := wire.Framing{}
	for _, cmd := range []wire.Command{read(1, 0, 8, 512), write(1, 0, 1, wire.TransportSGL(512)), flushCommand(1), wire.Deallocate(1, 1, false)} {
		f.Add((&wire.CapsuleCmd{Command: cmd}).Append(nil, fr))
	}
	d := wire.H2CData{CID: 1, Length: 16, Last: true}
	f.Add(append((&wire.CapsuleCmd{Command: write(1, 0, 1, wire.TransportSGL(512))}).Append(nil, fr), append(d.Append(nil, fr), make([]byte, 16)...)...))
	f.Add((&wire.TermReq{Type: wire.PDUH2CTermReq, Fatal: 1}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		q := dial(t, tgt.Addr(1), wire.ICReq{})
		defer q.nc.Close()
		h.opts.connect(q, wire.Connect{QID: 1, QueueSize: 8}, h.id)
		q.nc.Write(b)
		q.nc.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, q.nc)
		probe := dial(t, tgt.Addr(1), wire.ICReq{})
		defer probe.nc.Close()
		probe.status(wire.KeepAlive(), nil, nil)
	})
}

// TestRandomBytes damages what a host sends, in all places, and looks whether others are served.
func TestRandomBytes(t *testing.T) {
	tgt := startTarget(t, testConfig(t, ramDir(t)))
	rnd := rand.New(rand.NewPCG(3, 4))
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	h := newHost(t, tgt.Addr(2), hostOptions{})
	good := h.queue(1, 8)
	wg.Go(func() {
		for i := byte(0); !stop.Load(); i++ {
			data := bytes.Repeat([]byte{i}, 8192)
			good.ok(write(2, 0, 2, wire.TransportSGL(8192)), nil, data)
			if _, got := good.ok(read(2, 0, 2, 4096), nil, nil); !bytes.Equal(got, data) {
				t.Error("another host's data is wrong")
			}
		}
	})
	for i := range 400 {
		q := dial(t, tgt.Addr(1), wire.ICReq{HeaderDigest: i%4 == 0, DataDigest: i%3 == 0})
		bad := &hostOptions{nqn: hostNQN + "bad", hostID: 1}
		comp := bad.connect(q, wire.Connect{QueueSize: 32, KATO: time.Minute}, wire.CntlIDAny)
		if comp.Status != wire.StatusSuccess {
			t.Fatal(comp.Status)
		}
		if i%2 == 0 {
			cc := wire.DefaultConfiguration()
			cc.Enable = true
			q.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
			io := dial(t, tgt.Addr(1), wire.ICReq{})
			bad.connect(io, wire.Connect{QID: 1, QueueSize: 32}, wire.DecodeConnectResult(comp.DW0()).CntlID)
			defer q.nc.Close()
			q = io
		}
		var b []byte
		for range 1 + rnd.IntN(20) {
			cmd := wire.CapsuleCmd{Command: wire.Command{
				Opcode: wire.Opcode(rnd.IntN(32)), Flags: 0x40, CID: uint16(rnd.IntN(40)), NSID: 1, CDW10: rnd.Uint32N(64), CDW11: rnd.Uint32N(4), CDW12: rnd.Uint32N(64),
				SGL: wire.SGL{Length: rnd.Uint32N(1 << 14), Type: []wire.SGLType{wire.SGLTransport, wire.SGLInCapsule}[rnd.IntN(2)]},
			}}
			if cmd.Command.SGL.Type == wire.SGLInCapsule {
				cmd.Length = cmd.Command.SGL.Length
			}
			b = append(cmd.Append(b, q.framing), make([]byte, cmd.Length)...)
			if q.framing.DataDigest && cmd.Length > 0 {
				b = append(b, 1, 2, 3, 4)
			}
		}
		for range rnd.IntN(4) {
			b[rnd.IntN(len(b))] = byte(rnd.Uint32())
		}
		q.nc.Write(b)
		q.nc.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, q.nc)
		q.nc.Close()
	}
}

// stuck is a backing that holds reads and writes up until it may go on.
type stuck struct {
	*File
	begun chan struct{}
	goOn  chan struct{}
}

func (s *stuck) ReadAt(p []byte, off int64) (int, error) {
	s.begun <- struct{}{}
	<-s.goOn
	return s.File.ReadAt(p, off)
}

// TestDataForRead has a host send data for a Read, which was put off for want of memory: no R2T has asked for any.
func TestDataForRead(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	s := &stuck{File: cfg.Subsystems[0].Namespaces[0].Backing.(*File), begun: make(chan struct{}, 100), goOn: make(chan struct{})}
	cfg.Subsystems[0].Namespaces[0].Backing = s
	tgt := startTarget(t, cfg)
	q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 64)
	var asked wire.R2T
	for range maxConnPayloads / maxTransfer {
		q.send(write(1, 0, maxTransfer/512, wire.TransportSGL(maxTransfer)), nil)
		p := q.recv()
		if err := asked.Decode(p.Header, p.head); err != nil {
			t.Fatal(err)
		}
	}
	cid := q.send(read(1, 0, maxTransfer/512, 512), nil)
	q.sendData(asked, make([]byte, maxTransfer), maxTransfer) // its memory is the Read's afterwards
	select {
	case <-s.begun:
	case <-time.After(20 * time.Second):
		t.Fatal("the Read does not begin")
	}
	c, r := requestOf(tgt, cid)
	data := wire.H2CData{CID: cid, Tag: r.tag, Length: 512}
	q.write(append(data.Append(nil, q.framing), make([]byte, 512)...))
	waittest.Until(t, "the data is looked at", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.ended || r.got > 0
	})
	close(s.goOn)
	q.nc.SetReadDeadline(time.Now().Add(5 * time.Second))
	if got := q.termination(); got == nil || got.Fatal != wire.FatalHeaderField {
		t.Errorf("the connection ended with %v", got)
	}
}

// requestOf finds a command that runs.
func requestOf(tgt *Target, cid uint16) (*conn, *request) {
	tgt.mu.Lock()
	defer tgt.mu.Unlock()
	for c := range tgt.conns {
		c.mu.Lock()
		for _, r := range c.requests {
			if c.qid != 0 && r.cmd.CID == cid {
				c.mu.Unlock()
				return c, r
			}
		}
		c.mu.Unlock()
	}
	return nil, nil
}

// TestFenceOfGone takes a host's rights when its controller has ended already, but a command of it runs still.
func TestFenceOfGone(t *testing.T) {
	for name, fence := range map[string]func(tgt *Target) error{
		"DisallowHost":    func(tgt *Target) error { return tgt.control().DisallowHost(testNQN, hostNQN) },
		"DropControllers": func(tgt *Target) error { return tgt.control().DropControllers(testNQN, hostNQN) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t, t.TempDir())
			s := &slow{File: cfg.Subsystems[0].Namespaces[0].Backing.(*File), begun: make(chan struct{}, 100), goOn: make(chan struct{})}
			cfg.Subsystems[0].Namespaces[0].Backing = s
			tgt := startTarget(t, cfg)
			h := newHost(t, tgt.Addr(1), hostOptions{})
			q := h.queue(1, 64)
			q.send(write(1, 0, 1, wire.CapsuleSGL(512)), make([]byte, 512))
			<-s.begun
			h.admin.nc.Close()
			waittest.Until(t, "the controller ends", func() bool {
				tgt.mu.Lock()
				defer tgt.mu.Unlock()
				return len(tgt.subsystems[testNQN].controllers) == 0
			})
			done := make(chan error)
			go func() { done <- fence(tgt) }()
			select {
			case <-done:
				t.Error("it did not wait for a command that runs")
				close(s.goOn)
				return
			case <-time.After(50 * time.Millisecond): // it may take longer to come that far, and then this shows nothing
			}
			close(s.goOn)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestLogFlood has a host that nobody knows ask for long log pages and take none.
func TestLogFlood(t *testing.T) {
	const n = 400
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	q := dial(t, tgt.Addr(1), wire.ICReq{})
	opts := hostOptions{subsys: wire.DiscoveryNQN}
	if comp := opts.connect(q, wire.Connect{QueueSize: maxQueueSize}, wire.CntlIDAny); comp.Status != wire.StatusSuccess {
		t.Fatal(comp.Status)
	}
	cc := wire.DefaultConfiguration()
	cc.Enable = true
	q.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range n {
		q.send(wire.GetLogPage{ID: wire.LogDiscovery, Length: maxTransfer}.Command(), nil)
	}
	waittest.Until(t, "all are done", func() bool {
		tgt.mu.Lock()
		defer tgt.mu.Unlock()
		for c := range tgt.conns {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.head > n && c.live == 0
		}
		return false
	})
	runtime.GC()
	runtime.ReadMemStats(&after)
	if more := int64(after.HeapAlloc) - int64(before.HeapAlloc); more > 4*maxConnPayloads {
		t.Errorf("a connection keeps %d MiB of memory in use", more>>20)
	}
	for range n { // those that did not fit may be tried again
		p := q.recv()
		var c wire.CapsuleResp
		if p.Type == wire.PDUCapsuleResp && (c.Decode(p.Header, p.head) != nil || c.Completion.Status != wire.StatusInterrupted || c.Completion.DNR) {
			t.Fatalf("log page: %+v", c)
		}
	}
}

// TestPartOfHeader has a host begin a PDU, and send no more of it.
func TestPartOfHeader(t *testing.T) {
	t.Parallel()
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	tgt.setStall(time.Second)
	h := newHost(t, tgt.Addr(1), hostOptions{})
	q, idle := h.queue(1, 8), h.queue(2, 8)
	q.ok(flushCommand(1), nil, nil)
	q.nc.SetReadDeadline(time.Now().Add(20 * time.Second))
	q.write((&wire.CapsuleCmd{Command: flushCommand(1)}).Append(nil, q.framing)[:20])
	if got := q.termination(); got != nil {
		t.Errorf("%v", got)
	}
	idle.ok(flushCommand(1), nil, nil)
}

// TestForcedRead has a Read with FUA make stable what it reads.
func TestForcedRead(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	q := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 8)
	defer func() { fdatasync = unix.Fdatasync }()
	var syncs atomic.Int32
	fdatasync = func(int) error { syncs.Add(1); return nil }
	for _, blocks := range []uint32{1, minPages / 512} {
		before := syncs.Load()
		q.ok(write(1, 0, blocks, wire.TransportSGL(blocks*512)), nil, make([]byte, blocks*512))
		q.ok(wire.Range{NSID: 1, Blocks: blocks, FUA: true}.Command(wire.OpRead, wire.TransportSGL(blocks*512)), nil, nil)
		if syncs.Load() == before {
			t.Errorf("%d blocks: nothing was made stable", blocks)
		}
	}
}

// TestIdleDiscovery has a host that asked for no keep-alive be forgotten by the discovery service all the same.
func TestIdleDiscovery(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	q := dial(t, tgt.Addr(1), wire.ICReq{})
	if comp := (&hostOptions{subsys: wire.DiscoveryNQN}).connect(q, wire.Connect{QueueSize: 32}, wire.CntlIDAny); comp.Status != wire.StatusSuccess {
		t.Fatal(comp.Status)
	}
	tgt.mu.Lock()
	defer tgt.mu.Unlock()
	for _, ctrl := range tgt.subsystems[wire.DiscoveryNQN].controllers {
		ctrl.mu.Lock()
		defer ctrl.mu.Unlock()
		if ctrl.timer == nil {
			t.Error("it may stay for ever")
		}
	}
}

// TestOneFile refuses a file that is another namespace already, whose reservations would not hold for it.
func TestOneFile(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	tgt := startTarget(t, cfg)
	again := cfg.Subsystems[0].Namespaces[0]
	again.NSID = 9
	if err := tgt.control().AddNamespace(testNQN, again); err == nil {
		t.Error("a file is two namespaces")
	}
	if err := tgt.control().RemoveNamespace(testNQN, 1); err != nil {
		t.Fatal(err)
	}
	if err := tgt.control().AddNamespace(testNQN, again); err != nil {
		t.Error(err)
	}
	cfg.Subsystems = append(cfg.Subsystems, Subsystem{NQN: testNQN + "2", Serial: "S2", Namespaces: cfg.Subsystems[0].Namespaces[:1]})
	if _, err := New(cfg); err == nil {
		t.Error("a file is a namespace of two subsystems")
	}
}

// TestNewAssociation has a host connect again while a Write of its old association runs still: what it writes now must not be
// overwritten by that.
func TestNewAssociation(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	s := &slow{File: cfg.Subsystems[0].Namespaces[0].Backing.(*File), begun: make(chan struct{}, 100), goOn: make(chan struct{})}
	cfg.Subsystems[0].Namespaces[0].Backing = s
	tgt := startTarget(t, cfg)
	h := newHost(t, tgt.Addr(1), hostOptions{})
	h.queue(1, 64).send(write(1, 0, 1, wire.CapsuleSGL(512)), make([]byte, 512))
	<-s.begun
	h.admin.nc.Close()
	waittest.Until(t, "the controller ends", func() bool {
		tgt.mu.Lock()
		defer tgt.mu.Unlock()
		return len(tgt.subsystems[testNQN].controllers) == 0
	})
	newHost(t, tgt.Addr(1), hostOptions{nqn: hostNQN + "2"}) // another host does not wait
	done := make(chan int32, 1)
	q := dial(t, tgt.Addr(2), wire.ICReq{})
	go func() {
		(&hostOptions{}).connect(q, wire.Connect{QueueSize: 32}, wire.CntlIDAny)
		done <- s.wrote.Load()
	}()
	select {
	case <-done:
		t.Error("it is connected while the old Write runs")
	case <-time.After(50 * time.Millisecond): // it may take longer to come that far, and then this shows nothing
	}
	close(s.goOn)
	if !t.Failed() && <-done != 1 {
		t.Error("the Write had not ended")
	}
}
