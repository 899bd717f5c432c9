package nvme

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// unhex takes hex with spaces, and adds zeros up to size bytes.
func unhex(t *testing.T, s string, size int) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return append(b, make([]byte, size-len(b))...)
}

// TestGoldenHandshake compares what crosses the connection until a controller is enabled with bytes made by hand from the
// specification.
func TestGoldenHandshake(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	nc, err := net.Dial("tcp", tgt.Addr(1))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	exchange := func(name string, send, want []byte) {
		t.Helper()
		if _, err := nc.Write(send); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		for n := 0; n < len(got); {
			m, err := nc.Read(got[n:])
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			n += m
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%s:\ngot  %x\nwant %x", name, got, want)
		}
	}
	// Both digests are asked for and granted; data to the host at multiples of 4; one R2T.
	exchange("ICReq", unhex(t, "00 00 80 00 80000000 0000 00 00 00000000", 128), unhex(t, "01 00 80 00 80000000 0000 00 00 00001000", 128))

	connect := unhex(t, "04 00 48 48 48040000"+"7f 40 0100 01000000 00000000 00000000 0000000000000000"+"0000000000000000 00040000 000000 01"+
		"0000 0000 1f00 04 00 00000000", 72)
	data := make([]byte, 1024)
	data[0] = 7
	data[16], data[17] = 0xFF, 0xFF
	copy(data[256:], testNQN)
	copy(data[512:], hostNQN)
	// Controller 1, no authentication; SQHD is reserved as flow control is off.
	exchange("Connect", append(connect, data...), unhex(t, "05 00 18 00 18000000 01000000 00000000 0000 0000 0100 0000", 24))

	property := func(kind, attrib, cid, off, value string) []byte {
		return unhex(t, "04 00 48 00 48000000"+"7f 40"+cid+kind+"000000"+"00000000 00000000 0000000000000000"+"0000000000000000 00000000 000000 5a"+
			attrib+"000000"+off+value, 72)
	}
	// MQES 1023, CQR, TO 15 s, CSS bits 37 and 43.
	exchange("CAP", property("04", "01", "0200", "00000000", ""), unhex(t, "05 00 18 00 18000000 ff03011e 20080000 0000 0000 0200 0000", 24))
	exchange("VS", property("04", "00", "0300", "08000000", ""), unhex(t, "05 00 18 00 18000000 00000200 00000000 0000 0000 0300 0000", 24))
	exchange("CC", property("00", "00", "0400", "14000000", "01004600"), unhex(t, "05 00 18 00 18000000 00000000 00000000 0000 0000 0400 0000", 24))
	exchange("CSTS", property("04", "00", "0500", "1c000000", ""), unhex(t, "05 00 18 00 18000000 01000000 00000000 0000 0000 0500 0000", 24))
	// There is no such property: 0x002 with DNR.
	exchange("NSSR", property("04", "00", "0600", "20000000", ""), unhex(t, "05 00 18 00 18000000 00000000 00000000 0000 0000 0600 0480", 24))
}

func TestConnect(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	cfg.Subsystems[0].AnyHost = false
	cfg.Subsystems[0].Hosts = []Host{{NQN: hostNQN}}
	cfg.Ports = append(cfg.Ports, Port{ID: 3, Listen: "127.0.0.1:0", Discovery: true})
	tgt := startTarget(t, cfg)
	h := newHost(t, tgt.Addr(1), hostOptions{})
	for _, tc := range []struct {
		name   string
		opts   hostOptions
		port   uint16
		c      wire.Connect
		cntl   uint16
		status wire.Status
		dw0    uint32
	}{
		{"", hostOptions{}, 1, wire.Connect{QueueSize: 32}, wire.CntlIDAny, wire.StatusSuccess, 2},
		{"unknown subsystem", hostOptions{subsys: testNQN + "x"}, 1, wire.Connect{QueueSize: 32}, wire.CntlIDAny, wire.StatusConnectParameter, 0x10100},
		{"subsystem not at this port", hostOptions{}, 3, wire.Connect{QueueSize: 32}, wire.CntlIDAny, wire.StatusConnectParameter, 0x10100},
		{"host not allowed", hostOptions{nqn: hostNQN + "x"}, 1, wire.Connect{QueueSize: 32}, wire.CntlIDAny, wire.StatusConnectHost, 0},
		{"controller ID", hostOptions{}, 1, wire.Connect{QueueSize: 32}, 1, wire.StatusConnectParameter, 0x10010},
		{"I/O queue", hostOptions{}, 1, wire.Connect{QID: 1, QueueSize: 1024}, h.id, wire.StatusSuccess, uint32(h.id)},
		{"I/O queue, no such controller", hostOptions{}, 1, wire.Connect{QID: 1, QueueSize: 32}, 77, wire.StatusConnectParameter, 0x10010},
		{"I/O queue, other port", hostOptions{}, 2, wire.Connect{QID: 1, QueueSize: 32}, h.id, wire.StatusConnectParameter, 0x10010},
		{"I/O queue, other host ID", hostOptions{hostID: 1}, 1, wire.Connect{QID: 1, QueueSize: 32}, h.id, wire.StatusConnectParameter, 0x10000},
		{"I/O queue, too long", hostOptions{}, 1, wire.Connect{QID: 1, QueueSize: 1025}, h.id, wire.StatusConnectParameter, 0x2C},
		{"I/O queue, too many", hostOptions{}, 1, wire.Connect{QID: maxQueues + 1, QueueSize: 32}, h.id, wire.StatusConnectParameter, 0x2A},
		{"queue of one entry", hostOptions{}, 1, wire.Connect{QueueSize: 1}, wire.CntlIDAny, wire.StatusConnectParameter, 0x2C},
		{"discovery", hostOptions{subsys: wire.DiscoveryNQN, nqn: hostNQN + "x"}, 3, wire.Connect{QueueSize: 32}, wire.CntlIDAny, wire.StatusSuccess, 1},
	} {
		q := dial(t, tgt.Addr(tc.port), wire.ICReq{})
		comp := tc.opts.connect(q, tc.c, tc.cntl)
		if comp.Status != tc.status || comp.DW0() != tc.dw0 {
			t.Errorf("%s: %v %#x; want %v %#x", tc.name, comp.Status.Text(wire.SetFabrics), comp.DW0(), tc.status.Text(wire.SetFabrics), tc.dw0)
		}
		if comp.DNR != (comp.Status != wire.StatusSuccess) {
			t.Errorf("%s: DNR is %v", tc.name, comp.DNR)
		}
		if tc.name == "I/O queue" { // stays
			again := dial(t, tgt.Addr(1), wire.ICReq{})
			if comp := tc.opts.connect(again, tc.c, h.id); comp.Status != wire.StatusSequence {
				t.Errorf("queue in use: %v", comp.Status)
			}
			if comp := tc.opts.connect(q, tc.c, h.id); comp.Status != wire.StatusSequence {
				t.Errorf("second Connect: %v", comp.Status)
			}
			// Its connection ends, and there may be another one, which stays open: an association that has a closed
			// connection ends if its host makes another one before the target has noticed.
			q.nc.Close()
			awaitClosed(t, tgt, q)
			again = dial(t, tgt.Addr(1), wire.ICReq{})
			if comp := tc.opts.connect(again, wire.Connect{QID: 1, QueueSize: 8}, h.id); comp.Status != wire.StatusSuccess {
				t.Errorf("queue that is free again: %v", comp.Status)
			}
		}
	}
	// A record format that does not exist; commands before Connect, before the controller is enabled, and after.
	q := dial(t, tgt.Addr(1), wire.ICReq{})
	if st := q.status(wire.KeepAlive(), nil, nil); st != wire.StatusSequence {
		t.Errorf("before Connect: %v", st)
	}
	cmd := wire.Connect{QueueSize: 32}.Command()
	cmd.CDW10 |= 1
	if st := q.status(cmd, make([]byte, wire.ConnectDataSize), nil); st != wire.StatusConnectFormat {
		t.Errorf("record format: %v", st)
	}
	(&hostOptions{}).connect(q, wire.Connect{QueueSize: 32}, wire.CntlIDAny)
	if st := q.status(wire.KeepAlive(), nil, nil); st != wire.StatusSequence {
		t.Errorf("before CC.EN: %v", st)
	}
	io := h.queue(2, 8)
	io.ok(flushCommand(1), nil, nil)
	if st := io.status(wire.PropertyGet{Property: wire.PropVS}.Command(), nil, nil); st != wire.StatusInvalidOpcode {
		t.Errorf("property on an I/O queue: %v", st)
	}
	cc := wire.DefaultConfiguration()
	cc.Enable, cc.Shutdown = true, wire.ShutdownNormal
	h.admin.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
	comp, _ := h.admin.ok(wire.PropertyGet{Property: wire.PropCSTS}.Command(), nil, nil)
	var st wire.ControllerStatus
	if st.Decode(comp.DW0()); st.Shutdown != wire.ShutdownComplete {
		t.Errorf("after shutdown CSTS is %+v", st)
	}
	if st := io.status(flushCommand(1), nil, nil); st != wire.StatusSequence {
		t.Errorf("after shutdown: %v", st)
	}
	h = newHost(t, tgt.Addr(1), hostOptions{})
	cc = wire.DefaultConfiguration()
	cc.CQShift = 5
	h.admin.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
	if cc.Enable = true; h.admin.status(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil) != wire.StatusInvalidField {
		t.Error("CC with entries of another size was taken")
	}
}

// awaitClosed waits until nothing of a connection is left at the target.
func awaitClosed(t *testing.T, tgt *Target, q *hostQueue) {
	t.Helper()
	waittest.Until(t, "the connection ends", func() bool {
		tgt.mu.Lock()
		defer tgt.mu.Unlock()
		for c := range tgt.conns {
			if c.nc.RemoteAddr().String() == q.nc.LocalAddr().String() {
				return false
			}
		}
		return true
	})
}

func TestIdentify(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	h := newHost(t, tgt.Addr(1), hostOptions{})
	var c wire.ControllerData
	if err := c.Decode(h.identify(wire.Identify{CNS: wire.CNSController})); err != nil {
		t.Fatal(err)
	}
	if err := c.CheckIO(); err != nil {
		t.Error(err)
	}
	if c.CntlID != h.id || c.SubsysNQN != testNQN || c.Serial != "S1" || c.MaxTransfer(12, 1<<40) != maxTransfer || c.CapsuleData() != ioCapsule ||
		c.CMIC != 0xB || c.KAS != 100*time.Millisecond || c.AERs != 4 || c.VWC != 5 || c.ONCS != 0x2C || c.CTRATT != 0x41 {
		t.Errorf("controller: %+v", c)
	}
	for nsid, want := range map[uint32]wire.Namespace{1: {NSZE: testSize / 512, BlockShift: 9, ANAGRPID: 1}, 2: {NSZE: testSize / 4096, BlockShift: 12, ANAGRPID: 2}} {
		var n wire.Namespace
		if err := n.Decode(h.identify(wire.Identify{CNS: wire.CNSNamespace, NSID: nsid})); err != nil {
			t.Fatal(err)
		}
		if n.NSZE != want.NSZE || n.BlockShift != want.BlockShift || n.ANAGRPID != want.ANAGRPID || n.NGUID != [16]byte{1, 15: byte(nsid - 1)} || n.Metadata != 0 || n.NMIC != 1 {
			t.Errorf("namespace %d: %+v", nsid, n)
		}
		var d wire.Descriptors
		if err := d.Decode(h.identify(wire.Identify{CNS: wire.CNSDescriptors, NSID: nsid})); err != nil {
			t.Fatal(err)
		}
		if d.NGUID != n.NGUID || d.UUID != [16]byte{2, 15: byte(nsid - 1)} || d.EUI64 != [8]byte{} || !d.HasCSI {
			t.Errorf("descriptors: %+v", d)
		}
		if b := h.identify(wire.Identify{CNS: wire.CNSIndependent, NSID: nsid}); binary.LittleEndian.Uint32(b[4:]) != want.ANAGRPID || b[14] != 1 {
			t.Errorf("independent: %x", b[:16])
		}
	}
	for _, tc := range []struct {
		after uint32
		want  []uint32
	}{{0, []uint32{1, 2}}, {1, []uint32{2}}, {2, nil}, {77, nil}} {
		got, full, err := wire.ActiveNSIDs(nil, h.identify(wire.Identify{CNS: wire.CNSActive, NSID: tc.after}), tc.after)
		if !slices.Equal(got, tc.want) || full || err != nil {
			t.Errorf("namespaces after %d: %v %v %v", tc.after, got, full, err)
		}
	}
	var n wire.Namespace
	if err := n.Decode(h.identify(wire.Identify{CNS: wire.CNSNamespace, NSID: 3})); err != nil || n.Exists() {
		t.Errorf("a namespace that is not there: %+v %v", n, err)
	}
	h.identify(wire.Identify{CNS: wire.CNSSetController, CSI: wire.CSINVM})
	h.identify(wire.Identify{CNS: wire.CNSSetNamespace, CSI: wire.CSINVM, NSID: 1})
	for _, tc := range []struct {
		a    wire.Identify
		want wire.Status
	}{
		{wire.Identify{CNS: wire.CNSNamespace}, wire.StatusInvalidNamespace},
		{wire.Identify{CNS: wire.CNSNamespace, NSID: wire.AllNamespaces}, wire.StatusInvalidNamespace},
		{wire.Identify{CNS: wire.CNSDescriptors, NSID: 3}, wire.StatusInvalidNamespace},
		{wire.Identify{CNS: wire.CNSSetController, CSI: wire.CSIZoned}, wire.StatusInvalidField},
		{wire.Identify{CNS: 0x7F}, wire.StatusInvalidField},
	} {
		if st := h.admin.status(tc.a.Command(), nil, nil); st != tc.want {
			t.Errorf("%+v: %v, want %v", tc.a, st, tc.want)
		}
	}
	short := wire.Identify{CNS: wire.CNSController}.Command()
	short.SGL.Length = 512
	if st := h.admin.status(short, nil, nil); st != wire.StatusSGLLength {
		t.Errorf("Identify of 512 bytes: %v", st)
	}
}

func TestFeatures(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	h := newHost(t, tgt.Addr(1), hostOptions{})
	set := func(id wire.FeatureID, v uint32) (wire.Status, uint32) {
		t.Helper()
		c, _ := h.admin.do(wire.Feature{ID: id, Value: v}.Set(wire.NoSGL()), nil, nil)
		return c.Status, c.DW0()
	}
	get := func(id wire.FeatureID) uint32 {
		t.Helper()
		c, _ := h.admin.ok(wire.Feature{ID: id}.Get(wire.NoSGL()), nil, nil)
		return c.DW0()
	}
	if st, v := set(wire.FeatureQueues, wire.QueueCount(3)); st != 0 || wire.DecodeQueueCount(v) != 3 {
		t.Errorf("3 queues: %v %#x", st, v)
	}
	if st, v := set(wire.FeatureQueues, wire.QueueCount(1000)); st != 0 || wire.DecodeQueueCount(v) != maxQueues {
		t.Errorf("1000 queues: %v %#x", st, v)
	}
	if st, _ := set(wire.FeatureQueues, 0xFFFF); st != wire.StatusInvalidField {
		t.Errorf("65536 queues: %v", st)
	}
	set(wire.FeatureQueues, wire.QueueCount(1))
	if comp := h.opts.connect(dial(t, h.addr, wire.ICReq{}), wire.Connect{QID: 2, QueueSize: 8}, h.id); comp.Status != wire.StatusConnectParameter {
		t.Errorf("queue 2 of 1: %v", comp.Status)
	}
	h.queue(1, 8)
	if st, _ := set(wire.FeatureQueues, wire.QueueCount(2)); st != wire.StatusSequence {
		t.Errorf("with queues: %v", st)
	}
	if st, _ := set(wire.FeatureEvents, uint32(wire.EventsANA|wire.EventsNamespaces)); st != 0 || get(wire.FeatureEvents) != uint32(wire.EventsANA|wire.EventsNamespaces) {
		t.Errorf("events: %v", st)
	}
	if st, _ := set(wire.FeatureEvents, uint32(wire.EventsZones)); st != wire.StatusInvalidField {
		t.Errorf("events that are not offered: %v", st)
	}
	if st, _ := set(wire.FeatureKATO, 30000); st != 0 || get(wire.FeatureKATO) != 30000 {
		t.Errorf("keep alive: %v", st)
	}
	if get(wire.FeatureWriteCache) != 1 {
		t.Error("the write cache is off")
	}
	if st, _ := set(wire.FeatureWriteCache, 0); st != wire.StatusFeatureReadOnly {
		t.Errorf("write cache: %v", st)
	}
	behavior := wire.AppendHostBehavior(nil, true)
	h.admin.ok(wire.Feature{ID: wire.FeatureHostBehavior}.Set(wire.CapsuleSGL(wire.HostBehaviorSize)), behavior, nil)
	if _, got := h.admin.ok(wire.Feature{ID: wire.FeatureHostBehavior}.Get(wire.TransportSGL(wire.HostBehaviorSize)), nil, nil); !bytes.Equal(got, behavior) {
		t.Errorf("host behavior: %x", got)
	}
	if _, got := h.admin.ok(wire.Feature{ID: wire.FeatureHostID, Value: 1}.Get(wire.TransportSGL(16)), nil, nil); got[0] != 9 {
		t.Errorf("host ID: %x", got)
	}
	if st, _ := set(0x7E, 0); st != wire.StatusInvalidField {
		t.Errorf("unknown feature: %v", st)
	}
	if comp, _ := h.admin.ok(wire.Command{Opcode: wire.OpAbort, SGL: wire.NoSGL(), CDW10: 1<<16 | 1}, nil, nil); comp.DW0() != 1 {
		t.Errorf("Abort: %#x", comp.DW0())
	}
	for _, id := range []wire.LogID{wire.LogError, wire.LogHealth} {
		if b := h.log(wire.GetLogPage{ID: id, Length: 512}); !bytes.Equal(b, make([]byte, 512)) {
			t.Errorf("log %#x is not zero", id)
		}
	}
	if st := h.admin.status(wire.GetLogPage{ID: wire.LogDiscovery, Length: 4096}.Command(), nil, nil); st != wire.StatusLogPage {
		t.Errorf("discovery log of another controller: %v", st)
	}
}

// event waits for the answer to an Asynchronous Event Request.
func (q *hostQueue) event(cid uint16) wire.AsyncEvent {
	q.t.Helper()
	c, _ := q.finish(cid, nil)
	if c.Status != wire.StatusSuccess {
		q.t.Fatalf("event: %v", c.Status)
	}
	return wire.DecodeAsyncEvent(c.DW0())
}

func TestEvents(t *testing.T) {
	dir := t.TempDir()
	tgt := startTarget(t, testConfig(t, dir))
	h := newHost(t, tgt.Addr(1), hostOptions{})
	h.admin.ok(wire.Feature{ID: wire.FeatureEvents, Value: uint32(wire.EventsANA | wire.EventsNamespaces)}.Set(wire.NoSGL()), nil, nil)
	aer := h.admin.send(wire.AsyncEventRequest(), nil)
	f := backingFile(t, dir, 1<<20)
	defer f.Close()
	if err := tgt.control().AddNamespace(testNQN, Namespace{NSID: 7, Backing: f, BlockSize: 512, NGUID: [16]byte{7}}); err != nil {
		t.Fatal(err)
	}
	if e := h.admin.event(aer); e != wire.EventNamespaceChanged {
		t.Errorf("event: %v", e)
	}
	// The next change is not told of before the log was read; then it is in there.
	aer = h.admin.send(wire.AsyncEventRequest(), nil)
	if err := os.Truncate(fdName(f), 2<<20); err != nil {
		t.Fatal(err)
	}
	if err := tgt.control().Resize(testNQN, 7); err != nil {
		t.Fatal(err)
	}
	if err := tgt.control().SetANA(1, 2, wire.ANAInaccessible); err != nil {
		t.Fatal(err)
	}
	if e := h.admin.event(aer); e != wire.EventANAChanged {
		t.Errorf("event: %v", e)
	}
	for _, want := range [][]uint32{{7}, nil} {
		ids, _, err := wire.ActiveNSIDs(nil, h.log(wire.GetLogPage{ID: wire.LogChangedNamespaces, Length: 4096}), 0)
		if !slices.Equal(ids, want) || err != nil {
			t.Errorf("changed: %v %v; want %v", ids, err, want)
		}
	}
	var n wire.Namespace
	if err := n.Decode(h.identify(wire.Identify{CNS: wire.CNSNamespace, NSID: 7})); err != nil || n.NSZE != 2<<20/512 {
		t.Errorf("namespace 7: %+v %v", n, err)
	}
	// An event without a request waits for one.
	if err := tgt.control().RemoveNamespace(testNQN, 7); err != nil {
		t.Fatal(err)
	}
	if e := h.admin.event(h.admin.send(wire.AsyncEventRequest(), nil)); e != wire.EventNamespaceChanged {
		t.Errorf("event: %v", e)
	}
	for range maxEvents {
		h.admin.send(wire.AsyncEventRequest(), nil)
	}
	if st := h.admin.status(wire.AsyncEventRequest(), nil, nil); st != wire.StatusAERLimit {
		t.Errorf("one request too many: %v", st)
	}
	q := h.queue(1, 8)
	if st := q.status(read(7, 0, 1, 512), nil, nil); st != wire.StatusInvalidNamespace {
		t.Errorf("read of a namespace that is gone: %v", st)
	}
	// Requests that wait are given back when the controller is disabled.
	cc := wire.DefaultConfiguration()
	h.admin.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
	if len(h.admin.early) != maxEvents || h.admin.early[0].Status != wire.StatusAborted {
		t.Errorf("requests that were given back: %+v", h.admin.early)
	}
}

func fdName(f *File) string {
	name, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(f.fd))
	return name
}

func TestANA(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	h1, h2 := newHost(t, tgt.Addr(1), hostOptions{}), newHost(t, tgt.Addr(2), hostOptions{})
	q1, q2 := h1.queue(1, 8), h2.queue(1, 8)
	states := func(h *testHost) (count uint64, got map[uint32]wire.ANAState) {
		t.Helper()
		b := h.log(wire.GetLogPage{ID: wire.LogANA, Length: 4096})
		var head wire.ANAHeader
		if err := head.Decode(b); err != nil {
			t.Fatal(err)
		}
		got = map[uint32]wire.ANAState{}
		for g, err := range wire.ANAGroups(b) {
			if err != nil {
				t.Fatal(err)
			}
			got[g.ID] = g.State
			if ids := slices.Collect(g.NSIDs()); !slices.Equal(ids, []uint32{g.ID}) {
				t.Errorf("group %d has %v", g.ID, ids)
			}
		}
		return head.ChangeCount, got
	}
	before, got := states(h1)
	if len(got) != 2 || got[1] != wire.ANAOptimized || got[2] != wire.ANAOptimized {
		t.Errorf("port 1: %v", got)
	}
	if _, got := states(h2); got[1] != wire.ANANonOptimized || got[2] != wire.ANAOptimized {
		t.Errorf("port 2: %v", got)
	}
	if b := h1.log(wire.GetLogPage{ID: wire.LogANA, Length: 4096, LSP: wire.LSPANAGroups}); b[16+4] != 0 {
		t.Error("namespaces are in the log without namespaces")
	}
	for _, tc := range []struct {
		state wire.ANAState
		want  wire.Status
	}{
		{wire.ANAInaccessible, wire.StatusANAInaccess}, {wire.ANALoss, wire.StatusANALoss}, {wire.ANAChange, wire.StatusANATransition},
		{wire.ANANonOptimized, wire.StatusSuccess}, {wire.ANAOptimized, wire.StatusSuccess},
	} {
		if err := tgt.control().SetANA(1, 1, tc.state); err != nil {
			t.Fatal(err)
		}
		comp, _ := q1.do(read(1, 0, 1, 512), nil, nil)
		if comp.Status != tc.want || comp.DNR {
			t.Errorf("%v: %v, DNR %v", tc.state, comp.Status, comp.DNR)
		}
		if st := q1.status(write(1, 0, 1, wire.CapsuleSGL(512)), make([]byte, 512), nil); st != tc.want {
			t.Errorf("%v: write: %v", tc.state, st)
		}
		q1.ok(read(2, 0, 1, 4096), nil, nil)
		q2.ok(read(1, 0, 1, 512), nil, nil)
		after, got := states(h1)
		if after <= before || got[1] != tc.state {
			t.Errorf("log after %v: count %d then %d, %v", tc.state, before, after, got)
		}
		before = after
	}
	if tgt.control().SetANA(1, 1, 9) == nil || tgt.control().SetANA(9, 1, wire.ANAOptimized) == nil || tgt.control().SetANA(1, 0, wire.ANAOptimized) == nil {
		t.Error("a state, port or group was taken that does not exist")
	}
}

func TestKeepAlive(t *testing.T) {
	t.Parallel()
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	silent := newHost(t, tgt.Addr(1), hostOptions{kato: 2 * time.Second})
	silentQueue := silent.queue(1, 8)
	busy := newHost(t, tgt.Addr(1), hostOptions{kato: 3 * time.Second})
	q := busy.queue(1, 8)
	// I/O counts as keep alive. More than twice the time goes by, for either.
	for range 70 {
		q.ok(read(1, 0, 1, 512), nil, nil)
		time.Sleep(100 * time.Millisecond)
	}
	busy.admin.ok(wire.KeepAlive(), nil, nil)
	for _, q := range []*hostQueue{silent.admin, silentQueue} {
		if _, err := q.tryRecv(); err == nil || strings.Contains(err.Error(), "timeout") {
			t.Errorf("queue of a silent host: %v", err)
		}
	}
}

func TestDiscovery(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	cfg.Subsystems[0].AnyHost = false
	cfg.Subsystems[0].Hosts = []Host{{NQN: hostNQN}}
	cfg.Ports = append(cfg.Ports, Port{ID: 3, Listen: "127.0.0.1:0", Discovery: true, Referrals: []Referral{{PortID: 9, Addr: "192.0.2.1:8009"}, {Addr: "[2001:db8::1]:8009", NQN: testNQN + ":d"}}})
	cfg.Ports[1].Advertise = "192.0.2.7:4420"
	tgt := startTarget(t, cfg)
	h := newHost(t, tgt.Addr(3), hostOptions{subsys: wire.DiscoveryNQN})
	other := newHost(t, tgt.Addr(1), hostOptions{subsys: wire.DiscoveryNQN, nqn: hostNQN + "x"})
	type entry struct {
		subtype uint8
		nqn     string
		addr    string
	}
	read := func(h *testHost) (uint64, []entry) {
		t.Helper()
		var head wire.DiscoveryHeader
		if err := head.Decode(h.log(wire.GetLogPage{ID: wire.LogDiscovery, Length: 1024, RAE: true})); err != nil {
			t.Fatal(err)
		}
		var got []entry
		for i := range head.Records {
			var e wire.DiscoveryEntry
			if err := e.Decode(h.log(wire.GetLogPage{ID: wire.LogDiscovery, Length: 1024, Offset: 1024 * (i + 1)})); err != nil {
				t.Fatal(err)
			}
			got = append(got, entry{e.Subtype, e.SubsysNQN, net.JoinHostPort(e.Address, e.Service)})
		}
		return head.Generation, got
	}
	before, got := read(h)
	if want := []entry{
		{wire.SubtypeDiscovery, wire.DiscoveryNQN, tgt.Addr(3)},
		{wire.SubtypeReferral, wire.DiscoveryNQN, "192.0.2.1:8009"},
		{wire.SubtypeReferral, testNQN + ":d", "[2001:db8::1]:8009"},
		{wire.SubtypeNVM, testNQN, tgt.Addr(1)},
		{wire.SubtypeNVM, testNQN, "192.0.2.7:4420"},
	}; !slices.Equal(got, want) {
		t.Errorf("log: %v\nwant %v", got, want)
	}
	if _, got := read(other); len(got) != 1 {
		t.Errorf("a host that may not connect sees %v", got)
	}
	for _, h := range []*testHost{h, other} {
		h.admin.ok(wire.Feature{ID: wire.FeatureEvents, Value: uint32(wire.EventsDiscovery)}.Set(wire.NoSGL()), nil, nil)
	}
	for _, change := range []func() error{
		func() error { return tgt.control().PortDown(2) },
		func() error { return tgt.control().PortUp(2) },
		func() error { return tgt.control().AllowHost(testNQN, Host{NQN: hostNQN + "x"}) },
	} {
		aer := h.admin.send(wire.AsyncEventRequest(), nil)
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if e := h.admin.event(aer); e != wire.EventDiscoveryChanged {
			t.Errorf("event: %v", e)
		}
		var after uint64
		if after, got = read(h); after <= before {
			t.Errorf("generation %d after %d", after, before)
		}
		before = after
	}
	if len(got) != 5 {
		t.Errorf("log in the end: %v", got)
	}
	if _, got := read(other); len(got) != 3 {
		t.Errorf("a host that may connect now sees %v", got)
	}
	if st := h.admin.status(wire.Identify{CNS: wire.CNSActive}.Command(), nil, nil); st != wire.StatusInvalidField {
		t.Errorf("namespaces of the discovery service: %v", st)
	}
	if comp := h.opts.connect(dial(t, h.addr, wire.ICReq{}), wire.Connect{QID: 1, QueueSize: 8}, h.id); comp.Status != wire.StatusConnectParameter {
		t.Errorf("I/O queue of the discovery service: %v", comp.Status)
	}
	p := &port{Port: Port{Listen: "[::]:4420"}}
	if got := p.advertised(netip.MustParseAddr("192.0.2.5")); got != "192.0.2.5:4420" {
		t.Errorf("a port at all addresses is told of as %s", got)
	}
}
