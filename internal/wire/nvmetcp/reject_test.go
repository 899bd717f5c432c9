package nvmetcp

import (
	"errors"
	"io"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/quick"
	"time"
)

// TestHeaderRejected: each is a PDU that would be right but for one thing.
func TestHeaderRejected(t *testing.T) {
	digests := Framing{HeaderDigest: true, DataDigest: true}
	for _, tt := range []struct {
		name  string
		role  Role
		f     Framing
		hex   string
		fatal FatalStatus
		info  uint32
	}{
		{"unknown type", Host, plain, `08 00 18 00 18000000`, FatalHeaderField, 0},
		{"unknown type beyond the table", Host, plain, `48 54 54 50 2f312e31`, FatalHeaderField, 0},
		{"CapsuleCmd to a host", Host, plain, `04 00 48 00 48000000`, FatalHeaderField, 0},
		{"H2CData to a host", Host, plain, `06 04 18 18 18100000`, FatalHeaderField, 0},
		{"H2CTermReq to a host", Host, plain, `02 00 18 00 18000000`, FatalHeaderField, 0},
		{"CapsuleResp to a controller", Controller, plain, `05 00 18 00 18000000`, FatalHeaderField, 0},
		{"R2T to a controller", Controller, plain, `09 00 18 00 18000000`, FatalHeaderField, 0},
		{"HLEN of another type", Host, plain, `05 00 48 00 18000000`, FatalHeaderField, 2},
		{"HLEN 0", Host, plain, `09 00 00 00 18000000`, FatalHeaderField, 2},
		{"no header digest", Host, digests, `09 00 18 00 18000000`, FatalHeaderField, 1},
		{"header digest not agreed on", Host, plain, `09 01 18 00 1c000000`, FatalHeaderField, 1},
		{"no data digest", Host, digests, `07 05 18 1c 1c100000`, FatalHeaderField, 1},
		{"data digest not agreed on", Host, plain, `07 06 18 18 1c100000`, FatalHeaderField, 1},
		{"digest of no data", Controller, digests, `04 03 48 00 4c000000`, FatalHeaderField, 1},
		{"SUCCESS without LAST", Host, plain, `07 08 18 18 18100000`, FatalHeaderField, 1},
		{"ICReq with data", Controller, plain, `00 00 80 80 84000000`, FatalHeaderField, 4},
		{"ICResp too short", Host, plain, `01 00 80 00 7f000000`, FatalHeaderField, 4},
		{"CapsuleResp with data", Host, plain, `05 00 18 18 1c000000`, FatalHeaderField, 4},
		{"CapsuleResp without its digest", Host, digests, `05 01 18 00 18000000`, FatalHeaderField, 4},
		{"R2T of PLEN 0", Host, plain, `09 00 18 00 00000000`, FatalHeaderField, 4},
		{"TermReq too short", Host, plain, `03 00 18 00 17000000`, FatalHeaderField, 4},
		{"TermReq too long", Host, plain, `03 00 18 00 99000000`, FatalHeaderField, 4},
		{"C2HData without data", Host, plain, `07 04 18 18 18000000`, FatalHeaderField, 4},
		{"C2HData without data and PDO", Host, plain, `07 04 18 00 18000000`, FatalHeaderField, 3},
		{"C2HData that is shorter than PDO", Host, plain, `07 04 18 40 20000000`, FatalHeaderField, 4},
		{"C2HData of nothing but a digest", Host, Framing{DataDigest: true}, `07 06 18 18 1c000000`, FatalHeaderField, 4},
		{"data in the header", Host, plain, `07 04 18 14 18100000`, FatalHeaderField, 3},
		{"data in the header's digest", Host, digests, `07 07 18 18 1c100000`, FatalHeaderField, 3},
		{"data that is not aligned", Controller, Framing{Align: 3}, `06 04 18 18 18100000`, FatalHeaderField, 3},
		{"data at no multiple of 4", Host, plain, `07 04 18 1a 1a100000`, FatalHeaderField, 3},
		{"CapsuleCmd shorter than its header", Controller, plain, `04 00 48 00 47000000`, FatalHeaderField, 3},
		{"capsule data without PDO", Controller, plain, `04 00 48 00 48020000`, FatalHeaderField, 3},
		{"capsule data too long", Controller, plain, `04 00 48 48 4c200000`, FatalHeaderField, 4},
		{"C2HData too long", Host, plain, `07 04 18 18 1c001000`, FatalHeaderField, 4},
		{"PLEN that is all ones", Host, plain, `07 04 18 18 ffffffff`, FatalHeaderField, 4},
		{"H2CData too long", Controller, plain, `06 04 18 18 1c001000`, FatalHeaderField, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Receiver{Framing: tt.f, Role: tt.role, MaxCapsule: 8192, MaxData: 1 << 20}
			h, err := r.Decode(layout(t, HeaderSize, tt.hex))
			checkProtocolError(t, h, err, tt.fatal, tt.info)
		})
	}
	r := Receiver{Role: Host}
	if _, err := r.Decode(make([]byte, 7)); !errors.Is(err, ErrShort) {
		t.Error(err)
	}
}

func checkProtocolError(t *testing.T, got any, err error, fatal FatalStatus, info uint32) {
	t.Helper()
	var p *ProtocolError
	if !errors.As(err, &p) || p.Fatal != fatal || p.Info != info || !errors.Is(err, ErrInvalid) {
		t.Errorf("%+v, %v (%+v); want %v at %#x", got, err, p, fatal, info)
	}
}

// TestHeaderTaken: what a careless reader might refuse.
func TestHeaderTaken(t *testing.T) {
	for _, tt := range []struct {
		name         string
		role         Role
		f            Framing
		hex          string
		flags        Flags
		before, data int
	}{
		{"reserved flags", Host, plain, `05 fe 18 00 18000000`, 0, 24, 0},
		{"PDO where there is no data", Host, plain, `09 00 18 18 18000000`, 0, 24, 0},
		{"PDO of a capsule without data", Controller, plain, `04 00 48 48 48000000`, 0, 72, 0},
		{"more padding than alignment asks for", Host, plain, `07 04 18 fc 00010000`, FlagLast, MaxHeaderSize, 4},
		{"data of odd length", Host, plain, `07 0c 18 18 19000000`, FlagLast | FlagSuccess, 24, 1},
		{"the longest data", Host, Framing{DataDigest: true}, `07 06 18 18 1c001000`, FlagLast | FlagDataDigest, 24, 1 << 20},
		{"ICReq, digests or not", Controller, full, `00 03 80 00 80000000`, 0, 128, 0},
	} {
		r := Receiver{Framing: tt.f, Role: tt.role, MaxCapsule: 8192, MaxData: 1 << 20}
		h, err := r.Decode(layout(t, HeaderSize, tt.hex))
		if err != nil || h.Flags != tt.flags || h.Before() != tt.before || h.Data() != tt.data {
			t.Errorf("%s: %+v, %v", tt.name, h, err)
		}
	}
}

func TestPDURejected(t *testing.T) {
	type decoder func(h Header, b []byte) error
	of := func(p pdu) decoder { return p.Decode }
	resp := func(h Header, b []byte) error { return new(ICResp).Decode(h, b, &ICReq{HeaderDigest: true}) }
	for _, tt := range []struct {
		name   string
		role   Role
		size   int
		hex    string
		decode decoder
		fatal  FatalStatus
		info   uint32
	}{
		{"another type", Host, 24, `09 00 18 00 18000000`, of(&CapsuleResp{}), FatalSequence, 0},
		{"no TermReq", Host, 24, `09 00 18 00 18000000`, new(TermReq).Decode, FatalSequence, 0},
		{"ICReq version", Controller, 128, `00 00 80 00 80000000 0100`, new(ICReq).Decode, FatalUnsupported, 8},
		{"ICReq alignment", Controller, 128, `00 00 80 00 80000000 0000 20`, new(ICReq).Decode, FatalHeaderField, 10},
		{"ICResp version", Host, 128, `01 00 80 00 80000000 0100 00 00 00100000`, resp, FatalUnsupported, 8},
		{"ICResp alignment", Host, 128, `01 00 80 00 80000000 0000 20 00 00100000`, resp, FatalHeaderField, 10},
		{"ICResp digest", Host, 128, `01 00 80 00 80000000 0000 00 03 00100000`, resp, FatalHeaderField, 11},
		{"ICResp with little data", Host, 128, `01 00 80 00 80000000 0000 00 01 fc0f0000`, resp, FatalHeaderField, 12},
		{"ICResp with odd data", Host, 128, `01 00 80 00 80000000 0000 00 01 02100000`, resp, FatalHeaderField, 12},
		{"C2HData: more than PLEN has", Host, 24, `07 04 18 18 18100000 0100 0000 00000000 01100000`, of(&C2HData{}), FatalHeaderField, 16},
		{"C2HData: less than PLEN has", Host, 24, `07 04 18 18 18100000 0100 0000 00000000 ff0f0000`, of(&C2HData{}), FatalHeaderField, 16},
		{"C2HData: beyond 4 GiB", Host, 24, `07 04 18 18 18100000 0100 0000 01f0ffff 00100000`, of(&C2HData{}), FatalDataRange, 12},
		{"H2CData: no length", Controller, 24, `06 04 18 18 18100000`, of(&H2CData{}), FatalHeaderField, 16},
		{"H2CData: beyond 4 GiB", Controller, 24, `06 04 18 18 18100000 0100 0000 01f0ffff 00100000`, of(&H2CData{}), FatalDataRange, 12},
		{"R2T: no length", Host, 24, `09 00 18 00 18000000 0100`, of(&R2T{}), FatalHeaderField, 16},
		{"R2T: beyond 4 GiB", Host, 24, `09 00 18 00 18000000 0100 0000 ffffffff 02000000`, of(&R2T{}), FatalDataRange, 12},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := layout(t, tt.size, tt.hex)
			r := Receiver{Role: tt.role, MaxCapsule: 8192, MaxData: 1 << 20}
			h, err := r.Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			checkProtocolError(t, h, tt.decode(h, b), tt.fatal, tt.info)
		})
	}
}

// TestPDUShort: no decoder reads behind what it was given.
func TestPDUShort(t *testing.T) {
	for _, tt := range pduGoldens {
		b := tt.pdu.Append(nil, tt.f)
		r := Receiver{Framing: tt.f, Role: tt.role, MaxCapsule: 8192, MaxData: 1 << 20}
		h, err := r.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		for n := range int(h.HLen) {
			if err := fresh(tt.pdu).Decode(h, b[:n:n]); !errors.Is(err, ErrShort) {
				t.Fatalf("%s, %d bytes: %v", tt.name, n, err)
			}
		}
		for n := range int(h.HLen) + h.Digest() {
			if err := h.Verify(b[:n:n]); h.Digest() > 0 && !errors.Is(err, ErrShort) {
				t.Fatalf("%s, digest in %d bytes: %v", tt.name, n, err)
			}
		}
	}
	for _, tt := range structGoldens {
		b := tt.s.Append(nil)
		if _, ok := tt.s.(*DiscoveryHeader); ok {
			b = b[:18]
		}
		for n := range b {
			if err := fresh(tt.s).Decode(b[:n:n]); !errors.Is(err, ErrShort) {
				t.Fatalf("%s, %d bytes: %v", tt.name, n, err)
			}
		}
	}
}

func TestHeaderDigestWrong(t *testing.T) {
	b := (&R2T{CID: 1, Length: 4}).Append(nil, full)
	r := Receiver{Framing: full, Role: Host}
	h, err := r.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b {
		b[i] ^= 0x10
		checkProtocolError(t, i, h.Verify(b), FatalHeaderDigest, le.Uint32(b[24:]))
		b[i] ^= 0x10
	}
	if err := h.Verify(b); err != nil {
		t.Error(err)
	}
}

func TestCheckData(t *testing.T) {
	write, read := Command{Opcode: OpWrite, Flags: flagsSGL}, Command{Opcode: OpRead, Flags: flagsSGL}
	with := func(c Command, sgl SGL) Command { c.SGL = sgl; return c }
	prp := with(write, NoSGL())
	prp.Flags = 0
	for _, tt := range []struct {
		name    string
		c       Command
		capsule uint32
		want    Status
	}{
		{"all of the capsule", with(write, CapsuleSGL(512)), 512, StatusSuccess},
		{"more than the capsule", with(write, CapsuleSGL(516)), 512, StatusSGLOffset},
		{"less than the capsule", with(write, CapsuleSGL(508)), 512, StatusInvalidField},
		{"an offset", with(write, SGL{Address: 4, Length: 508, Type: SGLInCapsule}), 512, StatusSGLOffset},
		{"an offset that is all ones", with(write, SGL{Address: 1<<64 - 1, Length: 1, Type: SGLInCapsule}), 512, StatusSGLOffset},
		{"a read in the capsule", with(read, CapsuleSGL(512)), 512, StatusInvalidField},
		{"a read in no capsule", with(read, CapsuleSGL(512)), 0, StatusSGLOffset},
		{"a capsule nobody speaks of", with(write, TransportSGL(512)), 512, StatusInvalidField},
		{"an SGL of another kind", with(write, SGL{Length: 512, Type: 0x40}), 0, StatusSGLType},
		{"PRPs", prp, 0, StatusInvalidField},
	} {
		if got := tt.c.CheckData(tt.capsule); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func TestCommandRejected(t *testing.T) {
	data := make([]byte, 16)
	for _, tt := range []struct {
		name string
		got  Status
		want Status
	}{
		{"Property Get of 16 bytes", new(PropertyGet).Decode(&Command{CDW10: 2}), StatusInvalidField},
		{"Property Set of 16 bytes", new(PropertySet).Decode(&Command{CDW10: 2}), StatusInvalidField},
		{"Auth of another protocol", new(Auth).Decode(&Command{CDW10: 0x01_01_01_00, CDW11: 4, SGL: SGL{Length: 4}}), StatusInvalidField},
		{"Auth without bytes", new(Auth).Decode(&Command{CDW10: authProtocol}), StatusInvalidField},
		{"Auth of two lengths", new(Auth).Decode(&Command{CDW10: authProtocol, CDW11: 4, SGL: SGL{Length: 8}}), StatusInvalidField},
		{"Get Log Page at an odd offset", new(GetLogPage).Decode(&Command{CDW12: 2, SGL: SGL{Length: 4}}), StatusInvalidField},
		{"Get Log Page of two lengths", new(GetLogPage).Decode(&Command{SGL: SGL{Length: 8}}), StatusSGLLength},
		{"Register action", new(ReservationRegister).Decode(&Command{CDW10: 3}, data), StatusInvalidField},
		{"Register persistence", new(ReservationRegister).Decode(&Command{CDW10: 1 << 30}, data), StatusInvalidField},
		{"Register data", new(ReservationRegister).Decode(&Command{}, data[:15]), StatusSGLLength},
		{"Acquire action", new(ReservationAcquire).Decode(&Command{CDW10: 0x103}, data), StatusInvalidField},
		{"Acquire type 0", new(ReservationAcquire).Decode(&Command{CDW10: 0}, data), StatusInvalidField},
		{"Acquire type 7", new(ReservationAcquire).Decode(&Command{CDW10: 0x700}, data), StatusInvalidField},
		{"Acquire data", new(ReservationAcquire).Decode(&Command{CDW10: 0x100}, data[:15]), StatusSGLLength},
		{"Release action", new(ReservationRelease).Decode(&Command{CDW10: 0x102}, data), StatusInvalidField},
		{"Release type 0", new(ReservationRelease).Decode(&Command{CDW10: 0}, data), StatusInvalidField},
		{"Release data", new(ReservationRelease).Decode(&Command{CDW10: 0x100}, data[:7]), StatusSGLLength},
		{"Clear has no type", new(ReservationRelease).Decode(&Command{CDW10: 1}, data), StatusSuccess},
		{"Report of two lengths", new(ReservationReport).Decode(&Command{SGL: SGL{Length: 8}}), StatusSGLLength},
		{"Report of all ones", new(ReservationReport).Decode(&Command{CDW10: 1<<32 - 1}), StatusSGLLength},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %v", tt.name, tt.got)
		}
	}
}

func TestConnectRejected(t *testing.T) {
	for _, tt := range []struct {
		name   string
		err    error
		want   ParamError
		format bool
	}{
		{"record format", new(Connect).Decode(&Command{CDW10: 1, CDW11: 31}), ParamError{40, false}, true},
		{"queue of one entry", new(Connect).Decode(&Command{}), ParamError{44, false}, false},
		{"no subsystem", new(ConnectData).Decode(layout(t, 1024, `@512 61`)), ParamError{256, true}, false},
		{"no host", new(ConnectData).Decode(layout(t, 1024, `@256 61`)), ParamError{512, true}, false},
		{"long subsystem", new(ConnectData).Decode(layout(t, 1024, `@256 `+strings.Repeat("61", 224)+` @512 61`)), ParamError{256, true}, false},
		{"host without end", new(ConnectData).Decode(layout(t, 1024, `@256 61 @512 `+strings.Repeat("61", 256))), ParamError{512, true}, false},
		{"host with a control character", new(ConnectData).Decode(layout(t, 1024, `@256 61 @512 611b`)), ParamError{512, true}, false},
		{"host that is not UTF-8", new(ConnectData).Decode(layout(t, 1024, `@256 61 @512 61ff`)), ParamError{512, true}, false},
	} {
		var p *ParamError
		if !errors.As(tt.err, &p) || *p != tt.want || p.IsFormat() != tt.format {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
	}
}

func TestStructRejected(t *testing.T) {
	id := func(text string) []byte { return layout(t, IdentifySize, text) }
	const size = `0000100000000000 0000100000000000 `
	for _, tt := range []struct {
		name string
		err  error
		want string
	}{
		{"CAP with queues of one entry", new(Capabilities).Decode(0), "1 entry"},
		{"CAP with page sizes the wrong way round", new(Capabilities).Decode(1 | 4<<48), "2^16 to 2^12"},
		{"controller with a bad NQN", new(ControllerData).Decode(id(`@768 01`)), "NQN"},
		{"namespace with a format it has not", new(Namespace).Decode(id(size + `@25 00 01 @132 00000900`)), "format 1 of 1"},
		{"namespace with all bits of format set", new(Namespace).Decode(id(size + `@25 ff 6f`)), "2^0"},
		{"namespace with blocks of 1 byte", new(Namespace).Decode(id(size + `@128 00000000`)), "2^0"},
		{"namespace with blocks of 2^64 bytes", new(Namespace).Decode(id(size + `@128 00004000`)), "2^64"},
		{"namespace of 2^63 bytes", new(Namespace).Decode(id(`0000000000004000 0100000000000000 @128 00000900`)), "blocks of 512"},
		{"namespace with more capacity than size", new(Namespace).Decode(id(`0100000000000000 0200000000000000 @128 00000900`)), "capacity of 2"},
		{"namespace with capacity and no size", new(Namespace).Decode(id(`@8 02 @128 00000900`)), "0 blocks"},
		{"descriptor of a wrong length", new(Descriptors).Decode(id(`03 08 0000`)), "8 bytes of type 3"},
		{"descriptor behind the end", new(Descriptors).Decode(id(strings.Repeat(`09 ff 0000 `+strings.Repeat("ee", 255)+" ", 15) + `09 ff 0000 `)), "are left"},
		{"discovery log of another format", new(DiscoveryHeader).Decode(layout(t, 1024, `@16 0100`)), "format 1"},
		{"discovery entry with a bad address", new(DiscoveryEntry).Decode(layout(t, 1024, `03 01 02 @256 61 @512 310a32`)), `1\n2`},
		{"discovery entry with a bad port", new(DiscoveryEntry).Decode(layout(t, 1024, `03 01 02 @32 20ff @256 61 @512 31`)), `\xff`},
		{"discovery entry without a name", new(DiscoveryEntry).Decode(layout(t, 1024, `03 01 02 @512 31`)), "NQN is empty"},
		{"report of an unknown type", new(ReservationStatus).Decode(layout(t, 24, `@4 07`), false), "type 7"},
	} {
		if !errors.Is(tt.err, ErrInvalid) || errors.Is(tt.err, ErrShort) || !strings.Contains(tt.err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
	}
	if err := new(DiscoveryEntry).Decode(layout(t, 1024, `01 01 02 @512 01`)); err != nil {
		t.Error("entry of another transport:", err)
	}
	if err := new(DiscoveryEntry).Decode(make([]byte, 1024)); err != nil {
		t.Error("entry of zeros:", err)
	}
}

// TestNamespaceFormats: the index of the format in use has high bits only where there are more than 16.
func TestNamespaceFormats(t *testing.T) {
	const size = `0000100000000000 0000100000000000 `
	for _, tt := range []struct {
		hex   string
		shift uint8
	}{
		{size + `@25 11 21 @196 00000c00`, 12}, // format 17 of 18
		{size + `@25 01 21 @132 00000c00`, 12}, // format 1 of 2
	} {
		var n Namespace
		if err := n.Decode(layout(t, IdentifySize, tt.hex)); err != nil || n.BlockShift != tt.shift {
			t.Errorf("%+v, %v", n, err)
		}
	}
	n := Namespace{NSZE: 3, BlockShift: 12}
	if n.Exists() || n.BlockSize() != 4096 || n.Size() != 12288 {
		t.Error(n.Exists(), n.BlockSize(), n.Size())
	}
}

// TestUnknownDescriptor: types not known are passed over.
func TestUnknownDescriptor(t *testing.T) {
	var d Descriptors
	if err := d.Decode(layout(t, IdentifySize, `7f 03 0000 010203 04 01 0000 02`)); err != nil || !d.HasCSI || d.CSI != CSIZoned {
		t.Errorf("%+v, %v", d, err)
	}
}

func TestCheckIO(t *testing.T) {
	good := ControllerData{Type: ControllerIO, KAS: time.Second, IOCCSZ: 0x404, IORCSZ: 1, SGLS: SGLSOffsetInCapsule | 1, SQES: 0x66, CQES: 0x44}
	if err := good.CheckIO(); err != nil || good.CapsuleData() != 16384 {
		t.Fatal(err, good.CapsuleData())
	}
	for want, spoil := range map[string]func(*ControllerData){
		"discovery":          func(c *ControllerData) { c.Type = ControllerDiscovery },
		"KAS":                func(c *ControllerData) { c.KAS = 0 },
		"IOCCSZ is 3":        func(c *ControllerData) { c.IOCCSZ = 3 },
		"IOCCSZ is 42949672": func(c *ControllerData) { c.IOCCSZ = 1<<32 - 1 },
		"IORCSZ":             func(c *ControllerData) { c.IORCSZ = 0 },
		"ICDOFF":             func(c *ControllerData) { c.ICDOFF = 1 },
		"no SGLs (":          func(c *ControllerData) { c.SGLS = SGLSOffsetInCapsule },
		"offset in the":      func(c *ControllerData) { c.SGLS = 1 },
		"SQES":               func(c *ControllerData) { c.SQES = 0x77 },
		"CQES":               func(c *ControllerData) { c.CQES = 0x33 },
	} {
		c := good
		spoil(&c)
		if err := c.CheckIO(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestMaxTransfer(t *testing.T) {
	for _, tt := range []struct {
		mdts, shift uint8
		want        uint64
	}{{0, 12, 1 << 20}, {5, 12, 1 << 17}, {8, 12, 1 << 20}, {10, 12, 1 << 20}, {52, 12, 1 << 20}, {255, 12, 1 << 20}, {1, 16, 1 << 17}} {
		c := ControllerData{MDTS: tt.mdts}
		if got := c.MaxTransfer(tt.shift, 1<<20); got != tt.want {
			t.Errorf("MDTS %d: %d", tt.mdts, got)
		}
	}
	n := NVMController{}
	if got := n.MaxWriteZeroes(5, 12, 1<<30); got != 1<<17 {
		t.Errorf("WZSL 0: %d", got)
	}
	n.WZSL = 6
	if got := n.MaxWriteZeroes(5, 12, 1<<30); got != 1<<18 {
		t.Errorf("WZSL 6: %d", got)
	}
}

func TestListsRejected(t *testing.T) {
	page := func(text string) []byte { return layout(t, IdentifySize, text) }
	for _, tt := range []struct {
		name  string
		hex   string
		after uint32
	}{
		{"falling", `02000000 01000000`, 0},
		{"twice", `02000000 02000000`, 0},
		{"not greater than asked for", `02000000`, 2},
		{"all namespaces", `01000000 ffffffff`, 0},
	} {
		if _, _, err := ActiveNSIDs(nil, page(tt.hex), tt.after); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	if _, _, err := ActiveNSIDs(nil, make([]byte, 4095), 0); !errors.Is(err, ErrShort) {
		t.Error(err)
	}
}

func TestANALogRejected(t *testing.T) {
	for _, tt := range []struct {
		name  string
		size  int
		hex   string
		good  int // groups before the error
		short bool
	}{
		{"header cut off", 15, ``, 0, true},
		{"group cut off", 79, `@8 0200 @16 01000000 @32 01`, 1, true},
		{"namespaces cut off", 55, `@8 0100 @16 01000000 02000000 @32 01 @48 01000000 020000`, 0, true},
		{"more namespaces than there can be", 64, `@8 0100 @16 01000000 ffffffff @32 01`, 0, true},
		{"more namespaces than 32 bits of bytes", 64, `@8 0100 @16 01000000 00000040 @32 01`, 0, true},
		{"group 0", 64, `@8 0100 @32 01`, 0, false},
		{"unknown state", 64, `@8 0100 @16 01000000 @32 05`, 0, false},
		{"state 0", 64, `@8 0100 @16 01000000`, 0, false},
		{"namespaces that fall", 56, `@8 0100 @16 01000000 02000000 @32 01 @48 02000000 01000000`, 0, false},
		{"namespace 0", 56, `@8 0100 @16 01000000 02000000 @32 01`, 0, false},
	} {
		good, errs := 0, 0
		for _, err := range ANAGroups(layout(t, tt.size, tt.hex)) {
			if err == nil {
				good++
				continue
			}
			errs++
			if !errors.Is(err, ErrInvalid) || errors.Is(err, ErrShort) != tt.short {
				t.Errorf("%s: %v", tt.name, err)
			}
		}
		if errs != 1 || good != tt.good {
			t.Errorf("%s: %d errors behind %d groups", tt.name, errs, good)
		}
	}
}

func TestRegistrantsCutOff(t *testing.T) {
	for _, extended := range []bool{false, true} {
		b := (&ReservationStatus{Registrants: 65535}).Append(nil, extended)
		b = (&Registrant{Key: 1}).Append(b, extended)
		var last error
		n := 0
		for _, err := range Registrants(b, extended) {
			n, last = n+1, err
		}
		if n != 2 || !errors.Is(last, ErrShort) {
			t.Errorf("%d, %v", n, last)
		}
		for _, err := range Registrants(b[:23], extended) {
			if !errors.Is(err, ErrShort) {
				t.Error(err)
			}
		}
	}
}

func TestWithin(t *testing.T) {
	for _, tt := range []struct {
		slba   uint64
		blocks uint32
		want   bool
	}{{0, 100, true}, {99, 1, true}, {99, 2, false}, {100, 1, false}, {1<<64 - 1, 1, false}, {1<<64 - 1, 2, false}} {
		if got := (Range{SLBA: tt.slba, Blocks: tt.blocks}).Within(100); got != tt.want {
			t.Errorf("%+v", tt)
		}
		if got := (DSMRange{SLBA: tt.slba, Blocks: tt.blocks}).Within(100); got != tt.want {
			t.Errorf("%+v", tt)
		}
	}
}

func TestCheckNQN(t *testing.T) {
	for name, ok := range map[string]bool{
		DiscoveryNQN: true,
		"nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555": true,
		"nqn.2016-06.io.spdk:cnode1":    true,
		"blktests-subsystem-1":          true,
		"nqn.2024-01.weft:äöü":          true,
		strings.Repeat("a", MaxNQN):     true,
		strings.Repeat("a", MaxNQN+1):   false,
		"":                              false,
		"nqn.":                          false,
		"nqn.2014.08.org.nvmexpress:s":  false,
		"nqn.2014-8.org.nvmexpress:s":   false,
		"nqn.20145-8.org.nvmexpress:s":  false,
		"nqn.2014-08":                   false,
		"nqn.2014-08.":                  false,
		"nqn.2016-06.io.spdk:with a":    false,
		"nqn.2016-06.io.spdk:\x00":      false,
		"nqn.2016-06.io.spdk:\u0085":    false,
		"nqn.2016-06.io.spdk:\xff":      false,
		"nqn.2016-06.io.spdk:new\nline": false,
	} {
		if err := CheckNQN(name); (err == nil) != ok || err != nil && !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestStatuses walks the table: the order is that of the specification, each row is found, and no name is there twice.
func TestStatuses(t *testing.T) {
	names := map[string]bool{}
	for i, row := range statuses {
		if i > 0 {
			last := statuses[i-1]
			if row.status < last.status || row.status == last.status && row.set <= last.set {
				t.Errorf("%#03x stands behind %#03x", uint16(row.status), uint16(last.status))
			}
		}
		if row.status&^statusMask != 0 || row.set != 0 && row.status&statusTypeMask != statusTypeCommand {
			t.Errorf("%#03x: %+v", uint16(row.status), row)
		}
		if row.name == "" || names[row.name] {
			t.Errorf("%#03x: name %q", uint16(row.status), row.name)
		}
		names[row.name] = true
		if got := row.status.row(row.set); got != row {
			t.Errorf("%#03x of set %d is %+v", uint16(row.status), row.set, got)
		}
		if row.status != StatusSuccess && (row.errno == 0 || row.class == ClassDone) {
			t.Errorf("%v: errno %d, class %v", row.name, row.errno, row.class)
		}
		if path := row.status&statusTypeMask == statusTypePath; path != (row.class == ClassPath || row.class == ClassANA) {
			t.Errorf("%v: class %v", row.name, row.class)
		}
	}
	for status, class := range map[Status]Class{
		StatusSuccess: ClassDone, StatusInvalidField: ClassFail, StatusCIDConflict: ClassReset, StatusInternal: ClassRetry, StatusInvalidNamespace: ClassRescan,
		StatusSequence: ClassReset, StatusWriteProtected: ClassFail, StatusReserved: ClassFenced, StatusReadError: ClassMedia, StatusPathInternal: ClassPath,
		StatusANALoss: ClassANA, StatusANAInaccess: ClassANA, StatusANATransition: ClassANA, StatusHostPathAbort: ClassPath, StatusCompareFailed: ClassFail,
	} {
		if status.Class() != class {
			t.Errorf("%v: %v", status, status.Class())
		}
	}
	for status, errno := range map[Status]syscall.Errno{
		StatusWriteProtected: syscall.EROFS, StatusReadOnlyRange: syscall.EROFS, StatusCapacity: syscall.ENOSPC, StatusReadError: syscall.EIO,
		0x0FF: syscall.EIO, 0x1FF: syscall.EIO, 0x2FF: syscall.EIO, 0x3FF: syscall.EIO, 0x4FF: syscall.EIO, 0x7FF: syscall.EIO,
	} {
		if status.Errno() != errno {
			t.Errorf("%v: %v", status, status.Errno())
		}
	}
	for status, class := range map[Status]Class{0x0FF: ClassFail, 0x1FF: ClassFail, 0x2FF: ClassMedia, 0x3FF: ClassPath, 0x7FF: ClassFail} {
		if status.Class() != class {
			t.Errorf("%v: %v", status, status.Class())
		}
	}
}

func TestCommandError(t *testing.T) {
	connect := Connect{QueueSize: 32}.Command()
	c := Completion{Status: StatusConnectParameter, Result: 0x10100, DNR: true}
	err := c.Err(&connect, true)
	if want := "Connect: invalid parameters (0x182): subsystem NQN is not accepted"; err.Error() != want {
		t.Error(err)
	}
	if !errors.Is(err, StatusConnectParameter) {
		t.Error("the error is not its status")
	}
	write := Range{Blocks: 1}.Command(OpWrite, NoSGL())
	err = c.Err(&write, false)
	if want := "Write: attempted write to read only range (0x182)"; err.Error() != want {
		t.Error(err)
	}
	var e *CommandError
	if !errors.As(err, &e) || e.Errno() != syscall.EROFS || e.Class() != ClassFail {
		t.Errorf("%+v", e)
	}
	c = Completion{}
	if err := c.Err(&write, false); err != nil {
		t.Error(err)
	}
	for _, tt := range []struct {
		status Status
		dnr    bool
		want   Class
	}{
		{StatusInternal, false, ClassRetry}, {StatusInternal, true, ClassFail}, {StatusANAInaccess, false, ClassANA}, {StatusANAInaccess, true, ClassFail},
		{StatusPathInternal, true, ClassFail}, {StatusSequence, true, ClassReset}, {StatusReserved, true, ClassFenced}, {StatusReadError, true, ClassMedia},
	} {
		c := Completion{Status: tt.status, DNR: tt.dnr}
		if c.Class() != tt.want {
			t.Errorf("%v, DNR %v: %v", tt.status, tt.dnr, c.Class())
		}
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		(&Command{Opcode: 0xC0}).Name(true):                    "admin command 0xc0",
		(&Command{Opcode: 0xC0}).Name(false):                   "I/O command 0xc0",
		(&Command{Opcode: OpFabrics, NSID: 0x3F}).Name(true):   "Fabrics command 0x3f",
		(&Command{Opcode: 0x02}).Name(true):                    "Get Log Page",
		(&Command{Opcode: 0x02}).Name(false):                   "Read",
		PDUType(8).String():                                    "PDU type 0x08",
		FatalStatus(7).String():                                "fatal error status 0x7",
		FatalLimit.String():                                    "R2T or data transfer limit exceeded",
		ANAState(5).String():                                   "ANA state 0x5",
		ReservationType(7).String():                            "reservation type 7",
		AsyncEvent{1, 2, 3}.String():                           "event of type 1, info 2, log page 0x03",
		Class(99).String():                                     "class 99",
		ClassAuth.String():                                     "authenticate",
		ANALoss.String() + Host.String() + Controller.String(): "persistent-losshostcontroller",
		(&TermReq{Fatal: FatalSequence, Info: 3}).Error():      "the peer ended the connection: PDU sequence error, 0x3",
	} {
		if got != want {
			t.Errorf("%q instead of %q", got, want)
		}
	}
	for s, want := range map[ANAState]Status{ANAOptimized: StatusSuccess, ANANonOptimized: StatusSuccess, ANAInaccessible: 0x302, ANALoss: 0x301, ANAChange: 0x303} {
		if s.Status() != want {
			t.Errorf("%v: %v", s, s.Status())
		}
	}
}

// TestRoundTrips makes up values of structures whose fields may be anything.
func TestRoundTrips(t *testing.T) {
	trip := func(v structure) bool {
		back := fresh(v)
		return back.Decode(v.Append(nil)) == nil && reflect.DeepEqual(back, v)
	}
	for _, f := range []any{
		func(v Command) bool { v.Flags = v.Flags&^flagsPSDT | flagsSGL; return trip(&v) },
		func(v Completion) bool { v.Status &= statusMask; v.CRD &= 3; return trip(&v) },
		func(v NVMController) bool { return trip(&v) },
		func(v DSMRange) bool { return trip(&v) },
		func(v ANAHeader) bool { return trip(&v) },
	} {
		if err := quick.Check(f, nil); err != nil {
			t.Error(err)
		}
	}
}

// TestFramings sends every PDU in every framing through one stream.
func TestFramings(t *testing.T) {
	for align := range uint8(MaxAlign + 1) {
		for bits := range 4 {
			f := Framing{HeaderDigest: bits&1 != 0, DataDigest: bits&2 != 0, Align: align}
			for _, tt := range pduGoldens {
				data := make([]byte, tt.data)
				for i := range data {
					data[i] = byte(i)
				}
				stream := append(tt.pdu.Append(nil, f), data...)
				if f.DataDigest && tt.data > 0 {
					stream = AppendDigest(stream, data)
				}
				r := Receiver{Framing: f, Role: tt.role, MaxCapsule: 8192, MaxData: 1 << 20}
				in := strings.NewReader(string(stream))
				head := make([]byte, MaxHeaderSize)
				if _, err := io.ReadFull(in, head[:HeaderSize]); err != nil {
					t.Fatal(err)
				}
				h, err := r.Decode(head)
				if err != nil {
					t.Fatalf("%s, %+v: %v", tt.name, f, err)
				}
				if _, err := io.ReadFull(in, head[HeaderSize:h.Before()]); err != nil {
					t.Fatal(err)
				}
				back := fresh(tt.pdu)
				if err := errors.Join(h.Verify(head[:h.Before()]), back.Decode(h, head[:h.Before()])); err != nil || !reflect.DeepEqual(back, tt.pdu) {
					t.Fatalf("%s, %+v: %+v, %v", tt.name, f, back, err)
				}
				rest, err := io.ReadAll(in)
				if err != nil || len(rest) != h.Data()+h.DataDigest() || h.Before()%4 != 0 {
					t.Fatalf("%s, %+v: %d bytes left of %+v", tt.name, f, len(rest), h)
				}
				if h.DataDigest() > 0 && !VerifyDigest(rest[h.Data():], rest[:h.Data()]) {
					t.Fatalf("%s, %+v: data digest", tt.name, f)
				}
				if h.Data() > 0 && h.Before()%((int(align)+1)*4) != 0 {
					t.Fatalf("%s, %+v: data at %d", tt.name, f, h.Before())
				}
			}
		}
	}
}
