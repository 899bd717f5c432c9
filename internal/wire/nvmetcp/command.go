package nvmetcp

import "fmt"

// Opcode is a command's first byte. Admin and I/O commands use the same numbers for different things.
type Opcode uint8

// Commands for the admin queue.
const (
	OpGetLogPage  Opcode = 0x02
	OpIdentify    Opcode = 0x06
	OpAbort       Opcode = 0x08
	OpSetFeatures Opcode = 0x09
	OpGetFeatures Opcode = 0x0A
	OpAsyncEvent  Opcode = 0x0C
	OpKeepAlive   Opcode = 0x18
)

// Commands for I/O queues.
const (
	OpFlush               Opcode = 0x00
	OpWrite               Opcode = 0x01
	OpRead                Opcode = 0x02
	OpCompare             Opcode = 0x05
	OpWriteZeroes         Opcode = 0x08
	OpDatasetManagement   Opcode = 0x09
	OpReservationRegister Opcode = 0x0D
	OpReservationReport   Opcode = 0x0E
	OpReservationAcquire  Opcode = 0x11
	OpReservationRelease  Opcode = 0x15
)

// OpFabrics is the one opcode of Fabrics commands, for all queues; FabricsType says which.
const OpFabrics Opcode = 0x7F

// FabricsType is which Fabrics command.
type FabricsType uint8

// The Fabrics commands.
const (
	FabricsPropertySet FabricsType = 0x00
	FabricsConnect     FabricsType = 0x01
	FabricsPropertyGet FabricsType = 0x04
	FabricsAuthSend    FabricsType = 0x05
	FabricsAuthReceive FabricsType = 0x06
	FabricsDisconnect  FabricsType = 0x08
)

// Set is which commands an opcode, or a command specific status, is to be looked for in.
type Set uint8

// The sets.
const (
	SetIO Set = iota
	SetAdmin
	SetFabrics
)

var opNames = [...]map[uint8]string{
	SetIO: {
		uint8(OpFlush): "Flush", uint8(OpWrite): "Write", uint8(OpRead): "Read", uint8(OpCompare): "Compare",
		uint8(OpWriteZeroes): "Write Zeroes", uint8(OpDatasetManagement): "Dataset Management",
		uint8(OpReservationRegister): "Reservation Register", uint8(OpReservationReport): "Reservation Report",
		uint8(OpReservationAcquire): "Reservation Acquire", uint8(OpReservationRelease): "Reservation Release",
	},
	SetAdmin: {
		uint8(OpGetLogPage): "Get Log Page", uint8(OpIdentify): "Identify", uint8(OpAbort): "Abort",
		uint8(OpSetFeatures): "Set Features", uint8(OpGetFeatures): "Get Features",
		uint8(OpAsyncEvent): "Asynchronous Event Request", uint8(OpKeepAlive): "Keep Alive",
	},
	SetFabrics: {
		uint8(FabricsPropertySet): "Property Set", uint8(FabricsConnect): "Connect", uint8(FabricsPropertyGet): "Property Get",
		uint8(FabricsAuthSend): "Authentication Send", uint8(FabricsAuthReceive): "Authentication Receive",
		uint8(FabricsDisconnect): "Disconnect",
	},
}

// CommandSize is the bytes of a Command.
const CommandSize = 64

// AllNamespaces is the NSID that stands for every namespace.
const AllNamespaces = 0xFFFFFFFF

// flagsSGL is PSDT 01b: the data pointer is an SGL. Fabrics allows nothing else.
const (
	flagsSGL  = 0x40
	flagsPSDT = 0xC0
)

// Fused says that a command is half of a pair which is done as one.
type Fused uint8

// The halves.
const (
	FusedNot    Fused = 0
	FusedFirst  Fused = 1
	FusedSecond Fused = 2
)

// Command is a submission queue entry. MPTR is not here: it is ignored, and zero when encoded.
type Command struct {
	Opcode Opcode
	Flags  uint8 // FUSE in 1:0, PSDT in 7:6. Append makes PSDT that of an SGL
	CID    uint16
	NSID   uint32 // of a Fabrics command: FCTYPE in 7:0
	CDW2   uint32
	CDW3   uint32
	SGL    SGL
	CDW10  uint32
	CDW11  uint32
	CDW12  uint32
	CDW13  uint32
	CDW14  uint32
	CDW15  uint32
}

func (c *Command) put(b *[CommandSize]byte) {
	b[0] = byte(c.Opcode)
	b[1] = c.Flags&^flagsPSDT | flagsSGL
	le.PutUint16(b[2:], c.CID)
	le.PutUint32(b[4:], c.NSID)
	le.PutUint32(b[8:], c.CDW2)
	le.PutUint32(b[12:], c.CDW3)
	le.PutUint64(b[16:], 0)
	c.SGL.put((*[SGLSize]byte)(b[24:]))
	le.PutUint32(b[40:], c.CDW10)
	le.PutUint32(b[44:], c.CDW11)
	le.PutUint32(b[48:], c.CDW12)
	le.PutUint32(b[52:], c.CDW13)
	le.PutUint32(b[56:], c.CDW14)
	le.PutUint32(b[60:], c.CDW15)
}

// Append encodes the entry.
func (c *Command) Append(b []byte) []byte {
	b = append(b, zeros[:CommandSize]...)
	c.put((*[CommandSize]byte)(b[len(b)-CommandSize:]))
	return b
}

// Decode takes the entry from the first CommandSize bytes of b. It fails only if b is shorter.
func (c *Command) Decode(b []byte) error {
	if len(b) < CommandSize {
		return short("command", b, CommandSize)
	}
	*c = Command{
		Opcode: Opcode(b[0]),
		Flags:  b[1],
		CID:    le.Uint16(b[2:]),
		NSID:   le.Uint32(b[4:]),
		CDW2:   le.Uint32(b[8:]),
		CDW3:   le.Uint32(b[12:]),
		CDW10:  le.Uint32(b[40:]),
		CDW11:  le.Uint32(b[44:]),
		CDW12:  le.Uint32(b[48:]),
		CDW13:  le.Uint32(b[52:]),
		CDW14:  le.Uint32(b[56:]),
		CDW15:  le.Uint32(b[60:]),
	}
	c.SGL.get((*[SGLSize]byte)(b[24:]))
	return nil
}

// FabricsType is which Fabrics command this is, if its opcode is OpFabrics.
func (c *Command) FabricsType() FabricsType { return FabricsType(c.NSID) }

// Fused is which half of a fused pair the command is.
func (c *Command) Fused() Fused { return Fused(c.Flags & 3) }

// Direction is where a command's data goes.
type Direction uint8

// The directions.
const (
	NoData Direction = iota
	ToController
	ToHost
	BothWays
)

// Direction is where the data goes, as the opcode (of Fabrics commands: the type) says in its two low bits.
func (c *Command) Direction() Direction {
	if c.Opcode == OpFabrics {
		return Direction(c.FabricsType() & 3)
	}
	return Direction(c.Opcode & 3)
}

// Set is the command's set, on an admin queue or an I/O queue.
func (c *Command) Set(admin bool) Set {
	switch {
	case c.Opcode == OpFabrics:
		return SetFabrics
	case admin:
		return SetAdmin
	}
	return SetIO
}

// Name is what the specification calls the command, on an admin queue or an I/O queue.
func (c *Command) Name(admin bool) string {
	set, n := c.Set(admin), uint8(c.Opcode)
	if set == SetFabrics {
		n = uint8(c.FabricsType())
	}
	if name := opNames[set][n]; name != "" {
		return name
	}
	return fmt.Sprintf("%s command %#02x", [...]string{SetIO: "I/O", SetAdmin: "admin", SetFabrics: "Fabrics"}[set], n)
}

// SGLType is an SGL descriptor's type and subtype.
type SGLType uint8

// The descriptors of NVMe/TCP.
const (
	SGLInCapsule SGLType = 0x01 // data block, address is an offset in the capsule
	SGLTransport SGLType = 0x5A // transport data block: by R2T and H2CData, or C2HData
)

// SGLSize is the bytes of an SGL descriptor.
const SGLSize = 16

// SGL is an SGL descriptor, of which a command has one.
type SGL struct {
	Address uint64 // offset in the capsule's data for SGLInCapsule, else 0
	Length  uint32 // bytes
	Type    SGLType
}

// TransportSGL is for n bytes that go in PDUs of their own.
func TransportSGL(n uint32) SGL { return SGL{Length: n, Type: SGLTransport} }

// CapsuleSGL is for n bytes that go in the capsule.
func CapsuleSGL(n uint32) SGL { return SGL{Length: n, Type: SGLInCapsule} }

// NoSGL is for a command without data.
func NoSGL() SGL { return SGL{Type: SGLTransport} }

func (s *SGL) put(b *[SGLSize]byte) {
	le.PutUint64(b[0:], s.Address)
	le.PutUint32(b[8:], s.Length)
	le.PutUint32(b[12:], uint32(s.Type)<<24)
}

func (s *SGL) get(b *[SGLSize]byte) {
	*s = SGL{Address: le.Uint64(b[0:]), Length: le.Uint32(b[8:]), Type: SGLType(b[15])}
}

// CheckData is for a controller: it checks that the command says truly how its data travels, with capsule bytes of data in the
// capsule. If the status is StatusSuccess the data is SGL.Length bytes: with SGLInCapsule they are those of the capsule, else they
// go in PDUs of their own. Other statuses are to be answered with DNR.
func (c *Command) CheckData(capsule uint32) Status {
	if c.Flags&flagsPSDT != flagsSGL {
		return StatusInvalidField
	}
	switch c.SGL.Type {
	case SGLInCapsule:
		switch {
		case c.SGL.Address != 0 || c.SGL.Length > capsule:
			return StatusSGLOffset
		case c.Direction() != ToController && c.SGL.Length > 0, c.SGL.Length < capsule:
			return StatusInvalidField
		}
	case SGLTransport:
		if capsule != 0 {
			return StatusInvalidField
		}
	default:
		return StatusSGLType
	}
	return StatusSuccess
}

// CompletionSize is the bytes of a Completion.
const CompletionSize = 16

// Completion is a completion queue entry.
type Completion struct {
	Result uint64 // DW0 in the low half, DW1 in the high half
	SQHead uint16
	SQID   uint16
	CID    uint16
	Status Status
	CRD    uint8 // which of the controller's retry delays to wait, 1 to 3; 0 none
	More   bool  // the error log has more about it
	DNR    bool  // do not retry
}

// DW0 is the low half of the result.
func (c *Completion) DW0() uint32 { return uint32(c.Result) }

func (c *Completion) put(b *[CompletionSize]byte) {
	le.PutUint64(b[0:], c.Result)
	le.PutUint16(b[8:], c.SQHead)
	le.PutUint16(b[10:], c.SQID)
	le.PutUint16(b[12:], c.CID)
	s := uint16(c.Status&statusMask)<<1 | uint16(c.CRD&3)<<12
	if c.More {
		s |= 1 << 14
	}
	if c.DNR {
		s |= 1 << 15
	}
	le.PutUint16(b[14:], s)
}

// Append encodes the entry.
func (c *Completion) Append(b []byte) []byte {
	b = append(b, zeros[:CompletionSize]...)
	c.put((*[CompletionSize]byte)(b[len(b)-CompletionSize:]))
	return b
}

// Decode takes the entry from the first CompletionSize bytes of b. It fails only if b is shorter.
func (c *Completion) Decode(b []byte) error {
	if len(b) < CompletionSize {
		return short("completion", b, CompletionSize)
	}
	s := le.Uint16(b[14:])
	*c = Completion{
		Result: le.Uint64(b[0:]),
		SQHead: le.Uint16(b[8:]),
		SQID:   le.Uint16(b[10:]),
		CID:    le.Uint16(b[12:]),
		Status: Status(s>>1) & statusMask,
		CRD:    uint8(s >> 12 & 3),
		More:   s&(1<<14) != 0,
		DNR:    s&(1<<15) != 0,
	}
	return nil
}

// Err is nil if the command succeeded, else a *CommandError. cmd is what was completed, admin says on which kind of queue.
func (c *Completion) Err(cmd *Command, admin bool) error {
	if c.Status == StatusSuccess {
		return nil
	}
	return &CommandError{Name: cmd.Name(admin), Set: cmd.Set(admin), Status: c.Status, CRD: c.CRD, DNR: c.DNR, Result: c.Result}
}
