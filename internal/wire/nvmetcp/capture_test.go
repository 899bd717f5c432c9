package nvmetcp

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// capture is a recorded PDU.
type capture struct {
	first bool // of a connection
	admin bool
	to    Role
	pdu   []byte
	head  bool // the data is left out
}

// captures reads testdata/linux-6.12.txt, which tells its own form.
func captures(t testing.TB) (all []capture) {
	t.Helper()
	text, err := os.ReadFile("testdata/linux-6.12.txt")
	if err != nil {
		t.Fatal(err)
	}
	var next capture
	for line := range strings.Lines(string(text)) {
		word := strings.Fields(line)
		if len(word) == 0 || word[0] == "#" {
			continue
		}
		if word[0] == "connection" {
			next = capture{first: true, admin: word[1] == "admin"}
			continue
		}
		c := next
		next.first = false
		if c.head = word[0] == "~"; c.head {
			word = word[1:]
		}
		if c.to = Controller; word[0] == "<" {
			c.to = Host
		}
		size, err := strconv.Atoi(word[1])
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		c.pdu = layout(t, size, strings.Join(word[2:], " "))
		all = append(all, c)
	}
	return all
}

// TestCaptures decodes what Linux sent and checks that this package sends the same, PDUs, commands and structures. seen counts
// what was compared.
func TestCaptures(t *testing.T) {
	seen := map[string]int{}
	var framing Framing
	var req ICReq
	var commands map[uint16]Command
	for i, c := range captures(t) {
		if c.first {
			framing, commands = Framing{}, map[uint16]Command{}
		}
		r := Receiver{Framing: framing, Role: c.to, MaxCapsule: 16384, MaxData: 1 << 20}
		h, err := r.Decode(c.pdu)
		if err != nil {
			t.Fatalf("PDU %d: %v", i, err)
		}
		b := c.pdu[:h.Before()]
		data := c.pdu[h.Before():]
		if c.head == (len(data) == h.Data()+h.DataDigest()) {
			t.Fatalf("PDU %d: %d bytes behind %+v", i, len(data), h)
		}
		if err := h.Verify(b); err != nil {
			t.Fatal(err)
		}
		if h.DataDigest() > 0 && !c.head {
			if !VerifyDigest(data[h.Data():], data[:h.Data()]) {
				t.Fatalf("PDU %d: data digest", i)
			}
			data = data[:h.Data()]
			seen["data digest"]++
		}
		seen[h.Type.String()]++

		var again []byte
		switch h.Type {
		case PDUICReq:
			err = req.Decode(h, b)
			again = req.Append(nil)
		case PDUICResp:
			var p ICResp
			err = p.Decode(h, b, &req)
			again = p.Append(nil)
			framing = Framing{HeaderDigest: p.HeaderDigest, DataDigest: p.DataDigest, Align: p.Align}
		case PDUCapsuleCmd:
			var p CapsuleCmd
			err = p.Decode(h, b)
			again = p.Append(nil, framing)
			commands[p.Command.CID] = p.Command
			name := p.Command.Name(c.admin)
			seen[name]++
			if s := p.Command.CheckData(p.Length); s != StatusSuccess {
				t.Errorf("%s: %v", name, s)
			}
			if c.head {
				data = make([]byte, h.Data())
			}
			built, payload := rebuild(t, &p.Command, c.admin, data)
			built.CID, built.Flags = p.Command.CID, p.Command.Flags
			if built != p.Command {
				t.Errorf("%s is %+v instead of %+v", name, built, p.Command)
			}
			if !bytes.Equal(payload, data) {
				t.Errorf("%s: data %s", name, diff(payload, data))
			}
		case PDUCapsuleResp:
			var p CapsuleResp
			err = p.Decode(h, b)
			again = p.Append(nil, framing)
			cmd := commands[p.Completion.CID]
			answer(t, seen, &p.Completion, &cmd, c.admin)
		case PDUH2CData:
			var p H2CData
			err = p.Decode(h, b)
			again = p.Append(nil, framing)
		case PDUC2HData:
			var p C2HData
			err = p.Decode(h, b)
			again = p.Append(nil, framing)
			if !c.head {
				cmd := commands[p.CID]
				structures(t, seen, &cmd, data)
			}
		case PDUR2T:
			var p R2T
			err = p.Decode(h, b)
			again = p.Append(nil, framing)
		}
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("PDU %d, %v: %v, %s", i, h.Type, err, diff(again, b))
		}
	}
	for _, what := range []string{
		"ICReq", "ICResp", "CapsuleCmd", "CapsuleResp", "H2CData", "C2HData", "R2T", "data digest",
		"Connect", "Property Get", "Property Set", "Identify", "Set Features", "Get Features", "Asynchronous Event Request", "Get Log Page", "Keep Alive",
		"Flush", "Read", "Write", "Compare", "Write Zeroes", "Dataset Management", "Reservation Register", "Reservation Report", "Reservation Acquire", "Reservation Release",
		"ANA states changed", "CAP", "discovery controller", "controller", "namespace", "descriptors", "active namespaces", "NVM controller", "ANA log", "discovery log",
		"Connect: invalid parameters (0x182): subsystem NQN is not accepted", "Compare: invalid command opcode (0x001)",
	} {
		if seen[what] == 0 {
			t.Errorf("nothing was compared of: %s", what)
		}
	}
}

// rebuild encodes the command, and its data, from what it decodes to.
func rebuild(t *testing.T, c *Command, admin bool, data []byte) (Command, []byte) {
	inCapsule := c.SGL.Type == SGLInCapsule
	status := StatusSuccess
	var built Command
	payload := data
	switch set := c.Set(admin); {
	case set == SetFabrics && c.FabricsType() == FabricsPropertyGet:
		var p PropertyGet
		status = p.Decode(c)
		built = p.Command()
	case set == SetFabrics && c.FabricsType() == FabricsPropertySet:
		var p PropertySet
		status = p.Decode(c)
		built = p.Command()
	case set == SetFabrics && c.FabricsType() == FabricsConnect:
		var p Connect
		var d ConnectData
		if err := p.Decode(c); err != nil {
			t.Error(err)
		}
		if err := d.Decode(data); err != nil {
			t.Error(err)
		}
		built, payload = p.Command(), d.Append(nil)
	case set == SetAdmin && c.Opcode == OpIdentify:
		var p Identify
		p.Decode(c)
		built = p.Command()
	case set == SetAdmin && c.Opcode == OpGetLogPage:
		var p GetLogPage
		status = p.Decode(c)
		built = p.Command()
	case set == SetAdmin && (c.Opcode == OpSetFeatures || c.Opcode == OpGetFeatures):
		var p Feature
		p.Decode(c)
		built = p.command(c.Opcode, c.SGL)
	case set == SetAdmin && c.Opcode == OpAsyncEvent:
		built = AsyncEventRequest()
	case set == SetAdmin && c.Opcode == OpKeepAlive:
		built = KeepAlive()
	case set == SetIO && c.Opcode == OpFlush:
		built = Command{Opcode: OpFlush, NSID: c.NSID, SGL: NoSGL()}
	case set == SetIO && c.Opcode == OpDatasetManagement:
		n, _ := DecodeDSM(c)
		var r DSMRange
		if err := r.Decode(data); err != nil || n != 1 || r != (DSMRange{Blocks: 128}) {
			t.Errorf("%d ranges, %+v, %v", n, r, err)
		}
		built, payload = Deallocate(c.NSID, n, inCapsule), append(r.Append(nil), make([]byte, len(data)-DSMRangeSize)...)
		built.SGL = c.SGL // Linux sends a page, however many ranges there are
	case set == SetIO && c.Opcode == OpReservationRegister:
		var p ReservationRegister
		status = p.Decode(c, data)
		built, payload = p.Command(inCapsule), p.AppendData(nil)
	case set == SetIO && c.Opcode == OpReservationAcquire:
		var p ReservationAcquire
		status = p.Decode(c, data)
		built, payload = p.Command(inCapsule), p.AppendData(nil)
	case set == SetIO && c.Opcode == OpReservationRelease:
		var p ReservationRelease
		status = p.Decode(c, data)
		// nvme-cli sends 16 bytes, of which 8 mean something.
		built, payload = p.Command(inCapsule), append(p.AppendData(nil), make([]byte, len(data)-ReleaseDataSize)...)
		built.SGL = c.SGL
	case set == SetIO && c.Opcode == OpReservationReport:
		var p ReservationReport
		status = p.Decode(c)
		built = p.Command()
	default:
		var p Range
		p.Decode(c)
		built = p.Command(c.Opcode, c.SGL)
	}
	if status != StatusSuccess {
		t.Errorf("%s: %v", c.Name(admin), status)
	}
	return built, payload
}

// answer checks results.
func answer(t *testing.T, seen map[string]int, c *Completion, cmd *Command, admin bool) {
	if err := c.Err(cmd, admin); err != nil {
		seen[err.Error()]++
		return
	}
	switch cmd.Set(admin) {
	case SetFabrics:
		var p PropertyGet
		if cmd.FabricsType() == FabricsPropertyGet && p.Decode(cmd) == StatusSuccess && p.Property == PropCAP {
			seen["CAP"]++
			var got Capabilities
			want := Capabilities{MaxQueueSize: 1024, ReadyTimeout: 7500 * time.Millisecond, NVM: true, CommandSets: true, PageShiftMin: 12, PageShiftMax: 12}
			if err := got.Decode(c.Result); err != nil || got != want || got.Property() != c.Result {
				t.Errorf("CAP %#x: %+v, %v", c.Result, got, err)
			}
		}
	case SetAdmin:
		if cmd.Opcode == OpAsyncEvent {
			e := DecodeAsyncEvent(c.DW0())
			seen[e.String()]++
		}
	}
}

// structures checks the data of Identify and Get Log Page.
func structures(t *testing.T, seen map[string]int, cmd *Command, b []byte) {
	check := func(what string, s structure, skip ...[2]int) {
		seen[what]++
		if err := s.Decode(b); err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		want := bytes.Clone(b)
		for _, s := range skip {
			clear(want[s[0]:s[1]])
		}
		again := s.Append(nil)
		if again = again[:min(len(again), len(want))]; !bytes.Equal(again, want) {
			t.Errorf("%s: %+v: %s", what, s, diff(again, want))
		}
	}
	switch cmd.Opcode {
	case OpIdentify:
		var p Identify
		p.Decode(cmd)
		switch p.CNS {
		case CNSController:
			// RAB and IEEE; ACL; FRMW; ELPE and NPSS; NWPC; PSD0: of no use here
			unused := [][2]int{{72, 76}, {258, 259}, {260, 261}, {262, 264}, {531, 532}, {2048, 2080}}
			var c ControllerData
			if err := c.Decode(b); err == nil && c.Type == ControllerDiscovery {
				check("discovery controller", &c, unused...)
				break
			}
			check("controller", &c, unused...)
			if err := c.CheckIO(); err != nil || c.CapsuleData() != 16384 || c.SubsysNQN != "nqn.2024-01.weft.lab:s0" || c.CMIC != 0x0B || c.ANATT != 10*time.Second {
				t.Errorf("%+v, %v", c, err)
			}
		case CNSNamespace:
			var n Namespace
			check("namespace", &n)
			if n.Size() != 512<<20 || n.BlockSize() != 512 && n.BlockSize() != 4096 {
				t.Errorf("%+v", n)
			}
		case CNSDescriptors:
			seen["descriptors"]++
			var d Descriptors // their order is not fixed, so the bytes may differ
			if err := d.Decode(b); err != nil || d.UUID == [16]byte{} || d.NGUID == [16]byte{} || !d.HasCSI {
				t.Errorf("%+v, %v", d, err)
			}
		case CNSActive:
			ids, full, err := ActiveNSIDs(nil, b, cmd.NSID)
			if err != nil || full || len(ids) == 0 || !bytes.Equal(AppendNSIDs(nil, ids), b) {
				t.Errorf("%d, %v", ids, err)
			}
			seen["active namespaces"]++
		case CNSSetController:
			check("NVM controller", &NVMController{})
		}
	case OpGetLogPage:
		switch LogID(cmd.CDW10) {
		case LogDiscovery:
		case LogANA:
			seen["ANA log"]++
			if got, want := anaText(t, b), "1 optimized [1]; 2 non-optimized [2]; "; got != want {
				t.Errorf("ANA log: %s", got)
			}
			return
		default:
			return
		}
		var head DiscoveryHeader
		if err := head.Decode(b); err != nil || head.Records == 0 {
			t.Errorf("%+v, %v", head, err)
		}
		var all []string
		for at := DiscoveryHeaderSize; at < len(b); at += DiscoveryEntrySize {
			var e DiscoveryEntry
			if err := e.Decode(b[at:]); err != nil {
				t.Error(err)
			}
			var again DiscoveryEntry
			if err := again.Decode(e.Append(nil)); err != nil || !reflect.DeepEqual(e, again) {
				t.Errorf("%+v became %+v, %v", e, again, err)
			}
			all = append(all, fmt.Sprintf("%d %s:%s %s", e.Subtype, e.Address, e.Service, e.SubsysNQN))
		}
		if len(b) > DiscoveryHeaderSize {
			seen["discovery log"]++
			if len(all) != int(head.Records) {
				t.Errorf("%+v: %q", head, all)
			}
		}
	}
}

// anaText writes the groups of an ANA log, b, that have namespaces.
func anaText(t *testing.T, b []byte) string {
	var text string
	for g, err := range ANAGroups(b) {
		if err != nil {
			t.Error(err)
		}
		if ids := slices.Collect(g.NSIDs()); len(ids) > 0 {
			text += fmt.Sprintf("%d %v %d; ", g.ID, g.State, ids)
		}
	}
	return text
}
