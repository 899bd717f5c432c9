package nvmetcp

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
)

// layout makes bytes of hex digits, of which @N moves on to byte N; what is passed over is zero. The result has size bytes.
func layout(t testing.TB, size int, text string) []byte {
	t.Helper()
	b := make([]byte, 0, size)
	for _, word := range strings.Fields(text) {
		if at, ok := strings.CutPrefix(word, "@"); ok {
			n, err := strconv.Atoi(at)
			if err != nil || n < len(b) || n > size {
				t.Fatalf("%s after byte %d of %d", word, len(b), size)
			}
			b = append(b, make([]byte, n-len(b))...)
			continue
		}
		x, err := hex.DecodeString(word)
		if err != nil {
			t.Fatal(err)
		}
		b = append(b, x...)
	}
	if len(b) > size {
		t.Fatalf("%d bytes instead of %d: %s", len(b), size, text)
	}
	return append(b, make([]byte, size-len(b))...)
}

// diff tells where two byte strings part.
func diff(got, want []byte) string {
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			end := min(i+16, len(got), len(want))
			return "from byte " + strconv.Itoa(i) + ":\ngot  " + hex.EncodeToString(got[i:end]) + "\nwant " + hex.EncodeToString(want[i:end])
		}
	}
	return strconv.Itoa(len(got)) + " bytes instead of " + strconv.Itoa(len(want))
}

var (
	// plain is the framing without anything, full that with digests and data at multiples of 128.
	plain = Framing{}
	full  = Framing{HeaderDigest: true, DataDigest: true, Align: 31}
)

// pdu is what the PDUs with a framing have in common.
type pdu interface {
	Append(b []byte, f Framing) []byte
	Decode(h Header, b []byte) error
}

// pduGoldens are PDUs up to their data, data bytes of which follow.
var pduGoldens = []struct {
	name string
	role Role // who receives
	f    Framing
	pdu  pdu
	data int
	size int
	hex  string
}{
	{"CapsuleCmd", Controller, plain, &CapsuleCmd{Command: readCommand}, 0, 72,
		`04 00 48 00 48000000
		 02 40 3412 01000000 @32 0000000000000000 00200000 0000005a
		 8877665544332211 0f000040`},
	{"CapsuleCmd with data", Controller, plain, &CapsuleCmd{Command: Command{Opcode: OpWrite, Flags: 0x40, CID: 1, NSID: 2, SGL: CapsuleSGL(512)}, Length: 512}, 512, 72,
		`04 00 48 48 48020000
		 01 40 0100 02000000 @32 0000000000000000 00020000 00000001`},
	{"CapsuleCmd with data, digests and padding", Controller, full, &CapsuleCmd{Command: Command{Opcode: OpWrite, Flags: 0x40, CID: 1, NSID: 2, SGL: CapsuleSGL(512)}, Length: 512}, 512, 128,
		`04 03 48 80 84020000
		 01 40 0100 02000000 @32 0000000000000000 00020000 00000001
		 @72 109314fa`},
	{"CapsuleCmd with digests, no data", Controller, full, &CapsuleCmd{Command: Command{Opcode: OpFlush, Flags: 0x40, CID: 1, NSID: 2, SGL: NoSGL()}}, 0, 76,
		`04 01 48 00 4c000000
		 00 40 0100 02000000 @32 0000000000000000 00000000 0000005a
		 @72 f1b25ebb`},
	{"CapsuleResp", Host, plain, &CapsuleResp{failed}, 0, 24,
		`05 00 18 00 18000000
		 0403020107060504 0900 0300 3412 06f6`},
	{"CapsuleResp with digest", Host, full, &CapsuleResp{failed}, 0, 28,
		`05 01 18 00 1c000000
		 0403020107060504 0900 0300 3412 06f6
		 c4b0ec5b`},
	{"H2CData", Controller, plain, &H2CData{CID: 0x1234, Tag: 0xFFFF, Offset: 0x2000, Length: 0x1000, Last: true}, 0x1000, 24,
		`06 04 18 18 18100000
		 3412 ffff 00200000 00100000 00000000`},
	{"H2CData, not the last, digests and padding", Controller, full, &H2CData{CID: 0x1234, Offset: 0x2000, Length: 0x1000}, 0x1000, 128,
		`06 03 18 80 84100000
		 3412 0000 00200000 00100000 00000000
		 7e1e30e9`},
	{"C2HData", Host, plain, &C2HData{CID: 0x1234, Offset: 0x2000, Length: 0x1000}, 0x1000, 24,
		`07 00 18 18 18100000
		 3412 0000 00200000 00100000 00000000`},
	{"C2HData, the last, for CapsuleResp too", Host, Framing{DataDigest: true}, &C2HData{CID: 0x1234, Offset: 0x2000, Length: 0x1000, Last: true, Success: true}, 0x1000, 24,
		`07 0e 18 18 1c100000
		 3412 0000 00200000 00100000 00000000`},
	{"C2HData that ends at 4 GiB", Host, plain, &C2HData{CID: 1, Offset: 0xFFFFF000, Length: 0x1000, Last: true}, 0x1000, 24,
		`07 04 18 18 18100000
		 0100 0000 00f0ffff 00100000 00000000`},
	{"R2T", Host, plain, &R2T{CID: 0x1234, Tag: 0x5678, Offset: 0x2000, Length: 0x400000}, 0, 24,
		`09 00 18 00 18000000
		 3412 7856 00200000 00004000 00000000`},
	{"R2T with digest", Host, Framing{HeaderDigest: true}, &R2T{CID: 0x1234, Tag: 0x5678, Offset: 0x2000, Length: 0x400000}, 0, 28,
		`09 01 18 00 1c000000
		 3412 7856 00200000 00004000 00000000
		 ba8264f4`},
}

var readCommand = func() Command {
	c := Range{NSID: 1, SLBA: 0x1122334455667788, Blocks: 16, FUA: true}.Command(OpRead, TransportSGL(0x2000))
	c.CID, c.Flags = 0x1234, 0x40
	return c
}()

// failed has status 0x303 with CRD 3, More and DNR.
var failed = Completion{Result: 0x0405060701020304, SQHead: 9, SQID: 3, CID: 0x1234, Status: StatusANATransition, CRD: 3, More: true, DNR: true}

func TestPDUGolden(t *testing.T) {
	for _, tt := range pduGoldens {
		t.Run(tt.name, func(t *testing.T) {
			want := layout(t, tt.size, tt.hex)
			got := tt.pdu.Append([]byte("before"), tt.f)[len("before"):]
			if !bytes.Equal(got, want) {
				t.Fatal(diff(got, want))
			}
			r := Receiver{Framing: tt.f, Role: tt.role, MaxCapsule: 8192, MaxData: 1 << 20}
			h, err := r.Decode(got)
			if err != nil {
				t.Fatal(err)
			}
			digest := 0
			if tt.f.DataDigest && tt.data > 0 {
				digest = 4
			}
			if h.Before() != tt.size || h.Data() != tt.data || h.DataDigest() != digest || int(h.PLen) != tt.size+tt.data+digest {
				t.Fatalf("%+v: %d bytes before data, %d of data, %d of digest", h, h.Before(), h.Data(), h.DataDigest())
			}
			if err := h.Verify(got); err != nil {
				t.Fatal(err)
			}
			back := fresh(tt.pdu)
			if err := back.Decode(h, got); err != nil || !reflect.DeepEqual(back, tt.pdu) {
				t.Fatalf("decoded %+v, %v", back, err)
			}
		})
	}
}

func fresh[T any](v T) T { return reflect.New(reflect.TypeOf(v).Elem()).Interface().(T) }

func TestConnectionPDUGolden(t *testing.T) {
	req := ICReq{Align: 3, HeaderDigest: true, DataDigest: true, MaxR2T: 16}
	want := layout(t, 128, `00 00 80 00 80000000 0000 03 03 0f000000`)
	if got := req.Append(nil); !bytes.Equal(got, want) {
		t.Fatal(diff(got, want))
	}
	atController := Receiver{Role: Controller}
	h, err := atController.Decode(want)
	if err != nil {
		t.Fatal(err)
	}
	var gotReq ICReq
	if err := gotReq.Decode(h, want); err != nil || gotReq != req {
		t.Fatalf("%+v, %v", gotReq, err)
	}

	resp := ICResp{Align: 31, DataDigest: true, MaxH2CData: 0x20000}
	want = layout(t, 128, `01 00 80 00 80000000 0000 1f 02 00000200`)
	if got := resp.Append(nil); !bytes.Equal(got, want) {
		t.Fatal(diff(got, want))
	}
	atHost := Receiver{Role: Host}
	if h, err = atHost.Decode(want); err != nil {
		t.Fatal(err)
	}
	var gotResp ICResp
	if err := gotResp.Decode(h, want, &req); err != nil || gotResp != resp {
		t.Fatalf("%+v, %v", gotResp, err)
	}

	term := TermReq{Type: PDUC2HTermReq, Fatal: FatalHeaderField, Info: 0x02, Header: []byte{0x04, 0x00, 0x47, 0x00}}
	want = layout(t, 28, `03 00 18 00 1c000000 0100 02000000 @24 04004700`)
	if got := term.Append(nil); !bytes.Equal(got, want) {
		t.Fatal(diff(got, want))
	}
	atHost.Framing = full // a TermReq has no digests
	if h, err = atHost.Decode(want); err != nil || h.Before() != 24 || h.Data() != 4 {
		t.Fatal(h, err)
	}
	var gotTerm TermReq
	if err := gotTerm.Decode(h, want); err != nil || !reflect.DeepEqual(gotTerm, term) {
		t.Fatalf("%+v, %v", gotTerm, err)
	}
	term.Header = make([]byte, 500)
	if n := len(term.Append(nil)); n != 152 {
		t.Fatalf("the longest TermReq has %d bytes", n)
	}
}

// TestLongestR2TCount: MAXR2T is 0's based, so its greatest value stands for one more than fits.
func TestLongestR2TCount(t *testing.T) {
	b := layout(t, 128, `00 00 80 00 80000000 0000 00 00 ffffffff`)
	r := Receiver{Role: Controller}
	h, err := r.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	var req ICReq
	if err := req.Decode(h, b); err != nil || req.MaxR2T != 1<<32-1 {
		t.Fatalf("%+v, %v", req, err)
	}
}

// structure is what the structures have in common.
type structure interface {
	Append([]byte) []byte
	Decode([]byte) error
}

var structGoldens = []struct {
	name string
	s    structure
	size int
	hex  string
}{
	{"Command", &readCommand, 64,
		`02 40 3412 01000000 @24 0000000000000000 00200000 0000005a 8877665544332211 0f000040`},
	{"Command, all fields", &Command{Opcode: OpRead, Flags: 0x41, CID: 1, NSID: 2, CDW2: 3, CDW3: 4, SGL: SGL{5, 6, SGLInCapsule}, CDW10: 10, CDW11: 11, CDW12: 12, CDW13: 13, CDW14: 14, CDW15: 15}, 64,
		`02 41 0100 02000000 03000000 04000000 0000000000000000
		 0500000000000000 06000000 00000001
		 0a000000 0b000000 0c000000 0d000000 0e000000 0f000000`},
	{"Completion", &failed, 16,
		`0403020107060504 0900 0300 3412 06f6`},
	{"ConnectData", &ConnectData{HostID: HostID{0: 1, 15: 16}, CntlID: CntlIDAny, SubsysNQN: "nqn.2014-08.a:s", HostNQN: "nqn.2014-08.a:h"}, 1024,
		`01 @15 10 ffff
		 @256 6e716e2e 323031342d30382e 613a73
		 @512 6e716e2e 323031342d30382e 613a68`},
	{"Identify Controller", &ControllerData{
		Serial: "SN1", Model: "weft", Firmware: "1.0", CMIC: CMICPorts | CMICControllers | CMICANA, MDTS: 8, CntlID: 0x1234, Version: Version20,
		OAES: EventsNamespaces | EventsANA, CTRATT: CTRATTHostID128 | CTRATTTBKAS, Type: ControllerIO,
		CRDT: [3]time.Duration{time.Second, 2 * time.Second, 25600 * time.Millisecond}, OACS: 0x0102, AERs: 4, LPA: LPAOffset, KAS: 2 * time.Second,
		ANATT: 10 * time.Second, ANACAP: 0x1F, ANAGRPMAX: 128, NANAGRPID: 127, SQES: 0x66, CQES: 0x44, CQT: 258 * time.Millisecond, MAXCMD: 256, NN: 1024,
		ONCS: ONCSDSM | ONCSWriteZeroes | ONCSReservations, FUSES: FUSESCompareWrite, VWC: VWCPresent | VWCFlushAll, AWUN: 0x0304, AWUPF: 0x0506,
		SGLS: 0x00100001, MNAN: 512, SubsysNQN: "nqn.2014-08.a:s", IOCCSZ: 0x404, IORCSZ: 1, ICDOFF: 0, FCATT: 1, MSDBD: 1, DCTYPE: 2}, 4096,
		`@4 534e31 2020202020202020202020202020202020
		 @24 77656674 202020202020202020202020202020202020202020202020202020202020202020202020
		 @64 312e30 2020202020
		 @76 0b 08 3412 00000200
		 @92 00090000 41000000
		 @111 01
		 @128 0a00 1400 0001
		 @256 0201
		 @259 03
		 @261 04
		 @320 1400
		 @342 0a 1f 80000000 7f000000
		 @386 0201
		 @512 66 44 0001 00040000 2c00 0100
		 @525 07 0403 0605
		 @536 01001000 00020000
		 @768 6e716e2e 323031342d30382e 613a73
		 @1792 04040000 01000000 0000 01 01
		 @1806 02`},
	{"Identify Controller, NVM command set", &NVMController{VSL: 1, WZSL: 2, WUSL: 3, DMRL: 4, DMRSL: 5, DMSL: 6}, 4096,
		`01 02 03 04 05000000 0600000000000000`},
	{"Identify Namespace", &Namespace{
		NSZE: 0x100000, NCAP: 0x100000, NUSE: 0x10, NSFEAT: 1, NMIC: NMICShared, RESCAP: 0xFF, DLFEAT: DLFEATZeros, NAWUN: 2, NAWUPF: 3, NABSN: 4, NABO: 5,
		NABSPF: 6, NOIOB: 0x100, NPWG: 7, NPWA: 8, NPDG: 9, NOWS: 10, ANAGRPID: 11, NSATTR: NSATTRWriteProtected, NGUID: [16]byte{0: 0xA0, 15: 0xAF},
		EUI64: [8]byte{0: 0xB0, 7: 0xB7}, BlockShift: 12, Metadata: 8}, 4096,
		`0000100000000000 0000100000000000 1000000000000000 01 00 00
		 @30 01 ff
		 @33 01 0200 0300
		 @40 0400 0500 0600 0001
		 @64 0700 0800 0900
		 @72 0a00
		 @92 0b000000
		 @99 01
		 @104 a0 @119 af b0 @127 b7
		 0800 0c 00`},
	{"no Namespace", &Namespace{}, 4096, ``},
	{"Descriptors", &Descriptors{EUI64: [8]byte{0: 0xB0, 7: 0xB7}, NGUID: [16]byte{0: 0xA0, 15: 0xAF}, UUID: [16]byte{0: 0xC0, 15: 0xCF}, CSI: CSINVM, HasCSI: true}, 4096,
		`01 08 0000 b0 @11 b7
		 02 10 0000 a0 @31 af
		 03 10 0000 c0 @51 cf
		 04 01 0000 00`},
	{"DSMRange", &DSMRange{SLBA: 0x1122334455667788, Blocks: 0x100}, 16,
		`00000000 00010000 8877665544332211`},
	{"ANAHeader", &ANAHeader{ChangeCount: 0x0102, Groups: 3}, 16,
		`0201000000000000 0300`},
	{"DiscoveryHeader", &DiscoveryHeader{Generation: 0x0102, Records: 3}, 1024,
		`0201000000000000 0300000000000000 0000`},
	{"DiscoveryEntry", &DiscoveryEntry{
		Transport: TransportTCP, Family: FamilyIPv4, Subtype: SubtypeNVM, TREQ: TREQNotSecure | TREQNoSQFlow, PortID: 1, CntlID: CntlIDAny, QueueSize: 32,
		EFlags: EFlagsPersistent, Service: "4420", SubsysNQN: "nqn.2014-08.a:s", Address: "10.0.0.1", Security: SecurityTLS13}, 1024,
		`03 01 02 06 0100 ffff 2000 0200
		 @32 34343230 20202020202020202020202020202020202020202020202020202020
		 @256 6e716e2e 323031342d30382e 613a73
		 @512 31302e302e302e31 ` + strings.Repeat("20", 248) + `
		 02`},
}

func TestStructGolden(t *testing.T) {
	for _, tt := range structGoldens {
		t.Run(tt.name, func(t *testing.T) {
			want := layout(t, tt.size, tt.hex)
			got := tt.s.Append([]byte("before"))[len("before"):]
			if !bytes.Equal(got, want) {
				t.Fatal(diff(got, want))
			}
			back := fresh(tt.s)
			if err := back.Decode(got); err != nil || !reflect.DeepEqual(back, tt.s) {
				t.Fatalf("decoded %+v, %v", back, err)
			}
		})
	}
}

// commandGoldens are commands with their arguments; args is a pointer to what the package has for them, or nil.
var commandGoldens = []struct {
	name  string
	admin bool
	dir   Direction
	cmd   Command
	hex   string
	back  func(c *Command) (got, want any)
}{
	{"Property Get", true, NoData, PropertyGet{PropCAP, true}.Command(),
		`7f 40 0000 04 @39 5a 01000000 00000000`,
		func(c *Command) (any, any) {
			var p PropertyGet
			return []any{p.Decode(c), p}, []any{StatusSuccess, PropertyGet{PropCAP, true}}
		}},
	{"Property Set", true, NoData, PropertySet{Property: PropCC, Value: 0x00460001}.Command(),
		`7f 40 0000 00 @39 5a 00000000 14000000 01004600 00000000`,
		func(c *Command) (any, any) {
			var p PropertySet
			return []any{p.Decode(c), p}, []any{StatusSuccess, PropertySet{Property: PropCC, Value: 0x00460001}}
		}},
	{"Connect", true, ToController, Connect{QID: 0, QueueSize: 32, KATO: 5 * time.Second}.Command(),
		`7f 40 0000 01 @32 00040000 00000001 0000 0000 1f00 00 00 88130000`,
		func(c *Command) (any, any) {
			var p Connect
			return []any{p.Decode(c), p}, []any{nil, Connect{QueueSize: 32, KATO: 5 * time.Second}}
		}},
	{"Connect", false, ToController, Connect{QID: 3, QueueSize: 128, NoSQFlow: true, Priority: 1}.Command(),
		`7f 40 0000 01 @32 00040000 00000001 0000 0300 7f00 05 00`,
		func(c *Command) (any, any) {
			var p Connect
			return []any{p.Decode(c), p}, []any{nil, Connect{QID: 3, QueueSize: 128, NoSQFlow: true, Priority: 1}}
		}},
	{"Authentication Send", true, ToController, Auth{Length: 0x50}.Command(true),
		`7f 40 0000 05 @32 50000000 00000001 00 01 01 e9 50000000`,
		func(c *Command) (any, any) {
			var p Auth
			return []any{p.Decode(c), p}, []any{StatusSuccess, Auth{Length: 0x50}}
		}},
	{"Authentication Receive", false, ToHost, Auth{Receive: true, Length: 0x1000}.Command(true),
		`7f 40 0000 06 @32 00100000 0000005a 00 01 01 e9 00100000`,
		func(c *Command) (any, any) {
			var p Auth
			return []any{p.Decode(c), p}, []any{StatusSuccess, Auth{Receive: true, Length: 0x1000}}
		}},
	{"Identify", true, ToHost, Identify{CNS: CNSSetNamespace, NSID: 7, CntlID: 0x0102, CSI: CSIZoned}.Command(),
		`06 40 0000 07000000 @32 00100000 0000005a 05 00 0201 00000002`,
		func(c *Command) (any, any) {
			var p Identify
			p.Decode(c)
			return p, Identify{CNS: CNSSetNamespace, NSID: 7, CntlID: 0x0102, CSI: CSIZoned}
		}},
	{"Keep Alive", true, NoData, KeepAlive(), `18 40 @39 5a`, nil},
	{"Set Features", true, ToController, Feature{ID: FeatureQueues, Value: QueueCount(8)}.Set(NoSGL()),
		`09 40 @39 5a 07000000 0700 0700`,
		func(c *Command) (any, any) {
			var p Feature
			p.Decode(c)
			return []any{p, DecodeQueueCount(p.Value)}, []any{Feature{ID: FeatureQueues, Value: 0x00070007}, 8}
		}},
	{"Set Features", true, ToController, Feature{ID: FeatureKATO, Value: KATO(5 * time.Second)}.Set(NoSGL()), `09 40 @39 5a 0f000000 88130000`, nil},
	{"Set Features", true, ToController, Feature{ID: FeatureEvents, Value: uint32(EventsNamespaces | EventsANA | EventsDiscovery)}.Set(NoSGL()), `09 40 @39 5a 0b000000 00090080`, nil},
	{"Get Features", true, ToHost, Feature{ID: FeatureReservationMask, NSID: 2}.Get(NoSGL()),
		`0a 40 0000 02000000 @39 5a 82000000`,
		func(c *Command) (any, any) {
			var p Feature
			p.Decode(c)
			return p, Feature{ID: FeatureReservationMask, NSID: 2}
		}},
	{"Asynchronous Event Request", true, NoData, AsyncEventRequest(), `0c 40 @39 5a`, nil},
	{"Get Log Page", true, ToHost, GetLogPage{ID: LogANA, LSP: LSPANAGroups, RAE: true, NSID: AllNamespaces, Offset: 0x1_0000_1000, Length: 0x50000, CSI: 1}.Command(),
		`02 40 0000 ffffffff @32 00000500 0000005a 0c 81 ff3f 0100 0000 00100000 01000000 00000001`,
		func(c *Command) (any, any) {
			var p GetLogPage
			return []any{p.Decode(c), p}, []any{StatusSuccess, GetLogPage{ID: LogANA, LSP: LSPANAGroups, RAE: true, NSID: AllNamespaces, Offset: 0x1_0000_1000, Length: 0x50000, CSI: 1}}
		}},
	{"Flush", false, NoData, Command{Opcode: OpFlush, NSID: 1, SGL: NoSGL()}, `00 40 0000 01000000 @39 5a`, nil},
	{"Write", false, ToController, Range{NSID: 1, SLBA: 0x1_0000_0002, Blocks: MaxBlocks, Limited: true}.Command(OpWrite, CapsuleSGL(0x2000)),
		`01 40 0000 01000000 @32 00200000 00000001 02000000 01000000 ffff0080`,
		func(c *Command) (any, any) {
			var p Range
			p.Decode(c)
			return p, Range{NSID: 1, SLBA: 0x1_0000_0002, Blocks: MaxBlocks, Limited: true}
		}},
	{"Compare", false, ToController, Range{NSID: 1, SLBA: 2, Blocks: 1}.Command(OpCompare, TransportSGL(512)),
		`05 40 0000 01000000 @32 00020000 0000005a 02000000 00000000 00000000`, nil},
	{"Write Zeroes", false, NoData, Range{NSID: 1, SLBA: 2, Blocks: 256, FUA: true, Deallocate: true}.Command(OpWriteZeroes, NoSGL()),
		`08 40 0000 01000000 @39 5a 02000000 00000000 ff000042`,
		func(c *Command) (any, any) {
			var p Range
			p.Decode(c)
			return p, Range{NSID: 1, SLBA: 2, Blocks: 256, FUA: true, Deallocate: true}
		}},
	{"Dataset Management", false, ToController, Deallocate(1, MaxDSMRanges, true),
		`09 40 0000 01000000 @32 00100000 00000001 ff000000 04000000`,
		func(c *Command) (any, any) {
			n, deallocate := DecodeDSM(c)
			return []any{n, deallocate}, []any{256, true}
		}},
	{"Reservation Register", false, ToController, register.Command(true),
		`0d 40 0000 01000000 @32 10000000 00000001 0a0000c0`,
		func(c *Command) (any, any) {
			var p ReservationRegister
			return []any{p.Decode(c, register.AppendData(nil)), p}, []any{StatusSuccess, register}
		}},
	{"Reservation Report", false, ToHost, ReservationReport{NSID: 1, Length: 4096, Extended: true}.Command(),
		`0e 40 0000 01000000 @32 00100000 0000005a ff030000 01000000`,
		func(c *Command) (any, any) {
			var p ReservationReport
			return []any{p.Decode(c), p}, []any{StatusSuccess, ReservationReport{NSID: 1, Length: 4096, Extended: true}}
		}},
	{"Reservation Acquire", false, ToController, acquire.Command(false),
		`11 40 0000 01000000 @32 10000000 0000005a 01030000`,
		func(c *Command) (any, any) {
			var p ReservationAcquire
			return []any{p.Decode(c, acquire.AppendData(nil)), p}, []any{StatusSuccess, acquire}
		}},
	{"Reservation Release", false, ToController, release.Command(true),
		`15 40 0000 01000000 @32 08000000 00000001 08050000`,
		func(c *Command) (any, any) {
			var p ReservationRelease
			return []any{p.Decode(c, release.AppendData(nil)), p}, []any{StatusSuccess, release}
		}},
}

var (
	register = ReservationRegister{NSID: 1, Action: ReplaceKey, IgnoreKey: true, Persist: PersistOn, Current: 0x1122334455667788, New: 2}
	acquire  = ReservationAcquire{NSID: 1, Action: Preempt, Type: ReserveWriteExclusiveRegistered, Current: 0x1122334455667788, Preempted: 2}
	release  = ReservationRelease{NSID: 1, Action: Release, IgnoreKey: true, Type: ReserveWriteExclusiveAll, Current: 0x1122334455667788}
)

func TestCommandGolden(t *testing.T) {
	for _, tt := range commandGoldens {
		t.Run(tt.name, func(t *testing.T) {
			want := layout(t, CommandSize, tt.hex)
			got := tt.cmd.Append(nil)
			if !bytes.Equal(got, want) {
				t.Fatal(diff(got, want))
			}
			var c Command
			if err := c.Decode(got); err != nil {
				t.Fatal(err)
			}
			if name := c.Name(tt.admin); name != tt.name {
				t.Errorf("name is %q", name)
			}
			if c.Direction() != tt.dir {
				t.Errorf("direction is %d", c.Direction())
			}
			capsule := uint32(0)
			if c.SGL.Type == SGLInCapsule {
				capsule = c.SGL.Length
			}
			if s := c.CheckData(capsule); s != StatusSuccess {
				t.Errorf("CheckData: %v", s)
			}
			if tt.back == nil {
				return
			}
			if got, want := tt.back(&c); !reflect.DeepEqual(got, want) {
				t.Errorf("decoded %+v instead of %+v", got, want)
			}
		})
	}
}

func TestReservationDataGolden(t *testing.T) {
	for _, tt := range []struct {
		name      string
		got, want []byte
	}{
		{"Register", register.AppendData(nil), layout(t, RegisterDataSize, `8877665544332211 0200000000000000`)},
		{"Acquire", acquire.AppendData(nil), layout(t, AcquireDataSize, `8877665544332211 0200000000000000`)},
		{"Release", release.AppendData(nil), layout(t, ReleaseDataSize, `8877665544332211`)},
	} {
		if !bytes.Equal(tt.got, tt.want) {
			t.Errorf("%s: %s", tt.name, diff(tt.got, tt.want))
		}
	}
}

var reportGoldens = []struct {
	extended bool
	size     int
	hex      string
}{
	{false, 72, `07000000 03 0200 0000 01
		@24 0100 01 @32 b0 @39 b7 8877665544332211
		@48 0200 00 @56 c0 @63 c7 0200000000000000`},
	{true, 192, `07000000 03 0200 0000 01
		@64 0100 01 @72 8877665544332211 b0 @87 b7
		@128 0200 00 @136 0200000000000000 c0 @151 c7`},
}

func TestReservationReportGolden(t *testing.T) {
	status := ReservationStatus{Generation: 7, Type: ReserveWriteExclusiveRegistered, Registrants: 2, Persist: true}
	entries := []Registrant{
		{CntlID: 1, Holder: true, HostID: HostID{0: 0xB0, 7: 0xB7}, Key: 0x1122334455667788},
		{CntlID: 2, HostID: HostID{0: 0xC0, 7: 0xC7}, Key: 2},
	}
	for _, tt := range reportGoldens {
		want := layout(t, tt.size, tt.hex)
		got := status.Append(nil, tt.extended)
		for i := range entries {
			got = entries[i].Append(got, tt.extended)
		}
		if !bytes.Equal(got, want) || len(got) != ReservationReportSize(2, tt.extended) {
			t.Fatal(diff(got, want))
		}
		var s ReservationStatus
		if err := s.Decode(got, tt.extended); err != nil || s != status {
			t.Fatalf("%+v, %v", s, err)
		}
		var back []Registrant
		for r, err := range Registrants(got, tt.extended) {
			if err != nil {
				t.Fatal(err)
			}
			back = append(back, r)
		}
		if !reflect.DeepEqual(back, entries) {
			t.Fatalf("%+v", back)
		}
	}
}

func TestANALogGolden(t *testing.T) {
	got := ANAHeader{ChangeCount: 5, Groups: 2}.Append(nil)
	got = AppendANAGroup(got, ANAGroup{ID: 1, ChangeCount: 3, State: ANAOptimized}, []uint32{1, 3})
	got = AppendANAGroup(got, ANAGroup{ID: 2, ChangeCount: 4, State: ANAChange}, nil)
	want := layout(t, 16+32+8+32, `0500000000000000 0200
		@16 01000000 02000000 0300000000000000 01
		@48 01000000 03000000
		@56 02000000 00000000 0400000000000000 0f`)
	if !bytes.Equal(got, want) {
		t.Fatal(diff(got, want))
	}
	type group struct {
		id     uint32
		change uint64
		state  ANAState
		nsids  []uint32
	}
	var back []group
	for g, err := range ANAGroups(got) {
		if err != nil {
			t.Fatal(err)
		}
		var ids []uint32
		for id := range g.NSIDs() {
			ids = append(ids, id)
		}
		back = append(back, group{g.ID, g.ChangeCount, g.State, ids})
	}
	if want := []group{{1, 3, ANAOptimized, []uint32{1, 3}}, {2, 4, ANAChange, nil}}; !reflect.DeepEqual(back, want) {
		t.Fatalf("%+v", back)
	}
}

func TestNamespaceListGolden(t *testing.T) {
	want := layout(t, IdentifySize, `02000000 03000000 00010000`)
	got := AppendNSIDs(nil, []uint32{2, 3, 256})
	if !bytes.Equal(got, want) {
		t.Fatal(diff(got, want))
	}
	if ids, full, err := ActiveNSIDs([]uint32{1}, got, 1); err != nil || full || !reflect.DeepEqual(ids, []uint32{1, 2, 3, 256}) {
		t.Fatal(ids, full, err)
	}
	many := make([]uint32, 2000)
	for i := range many {
		many[i] = uint32(i + 1)
	}
	got = AppendNSIDs(nil, many)
	ids, full, err := ActiveNSIDs(nil, got, 0)
	if err != nil || !full || len(got) != IdentifySize || !reflect.DeepEqual(ids, many[:1024]) {
		t.Fatal(len(ids), full, err)
	}
}

func TestPropertyGolden(t *testing.T) {
	capabilities := Capabilities{MaxQueueSize: 1024, Contiguous: true, ReadyTimeout: 15 * time.Second, NVM: true, CommandSets: true, PageShiftMin: 12, PageShiftMax: 16, ReadyWithMedia: true}
	const CAP = 0x0840_0820_1e01_03ff
	if got := capabilities.Property(); got != CAP {
		t.Errorf("CAP is %#x", got)
	}
	var c Capabilities
	if err := c.Decode(CAP); err != nil || c != capabilities {
		t.Errorf("%+v, %v", c, err)
	}
	config := DefaultConfiguration()
	config.Enable = true
	if got := config.Property(); got != 0x00460001 {
		t.Errorf("CC is %#x", got)
	}
	config.CommandSet, config.Shutdown = AllCommandSets, ShutdownNormal
	if got := config.Property(); got != 0x00464061 {
		t.Errorf("CC is %#x", got)
	}
	var g Configuration
	if g.Decode(0x00464061); g != config {
		t.Errorf("%+v", g)
	}
	status := ControllerStatus{Ready: true, Fatal: true, Shutdown: ShutdownComplete}
	if got := status.Property(); got != 0x0b {
		t.Errorf("CSTS is %#x", got)
	}
	var s ControllerStatus
	if s.Decode(0x0b); s != status {
		t.Errorf("%+v", s)
	}
	if v := Version(0x00010300).String(); v != "1.3.0" {
		t.Error(v)
	}
}

func TestResultGolden(t *testing.T) {
	for dw0, event := range map[uint32]AsyncEvent{
		0x000C0302: EventANAChanged, 0x00040002: EventNamespaceChanged, 0x0070F002: EventDiscoveryChanged, 0x00010300: EventPersistentError, 0x00800006: EventReservation,
	} {
		if got := DecodeAsyncEvent(dw0); got != event || !got.Is(event) || got.DW0() != dw0 {
			t.Errorf("%#08x: %v, %#08x", dw0, got, got.DW0())
		}
	}
	for dw0, result := range map[uint32]ConnectResult{
		0x00001234: {CntlID: 0x1234}, 0x00020001: {CntlID: 1, Authenticate: true}, 0x00040001: {CntlID: 1, Secure: true},
	} {
		if got := DecodeConnectResult(dw0); got != result || got.DW0() != dw0 {
			t.Errorf("%#08x: %+v, %#08x", dw0, got, got.DW0())
		}
	}
	for dw0, want := range map[uint32]string{
		0x10010: "controller ID is not accepted", 0x10100: "subsystem NQN is not accepted", 0x2C: "queue size is not accepted",
		0x10011: "parameter at byte 17 of the data is not accepted",
	} {
		if e := ConnectParam(dw0); e.Error() != want || e.DW0() != dw0 {
			t.Errorf("%#x: %v, %#x", dw0, e, e.DW0())
		}
	}
	if n := DecodeQueueCount(0x0003_0007); n != 4 {
		t.Errorf("%d queues", n)
	}
	if b := AppendHostBehavior(nil, true); len(b) != 512 || b[0] != 1 {
		t.Error(len(b), b[0])
	}
}

// TestDigest has the vectors of RFC 3720 appendix B.4.
func TestDigest(t *testing.T) {
	for _, tt := range []struct {
		data []byte
		want string
	}{
		{make([]byte, 32), "aa36918a"},
		{bytes.Repeat([]byte{0xff}, 32), "43aba862"},
		{[]byte("123456789"), "839206e3"},
	} {
		d := AppendDigest(nil, tt.data)
		if hex.EncodeToString(d) != tt.want || !VerifyDigest(d, tt.data) || VerifyDigest(d[:3], tt.data) {
			t.Errorf("%x", d)
		}
		if UpdateDigest(UpdateDigest(0, tt.data[:5]), tt.data[5:]) != le.Uint32(d) {
			t.Error("a digest in pieces is another")
		}
	}
}
