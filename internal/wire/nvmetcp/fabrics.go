package nvmetcp

import (
	"fmt"
	"time"
)

// Property is the offset of a controller's property.
type Property uint32

// The properties.
const (
	PropCAP  Property = 0x00 // 8 bytes: Capabilities
	PropVS   Property = 0x08 // 4 bytes: version
	PropCC   Property = 0x14 // 4 bytes: Configuration
	PropCSTS Property = 0x1C // 4 bytes: ControllerStatus
	PropNSSR Property = 0x20 // 4 bytes: subsystem reset
)

// Wide tells that the property has 8 bytes.
func (p Property) Wide() bool { return p == PropCAP }

func fabrics(t FabricsType, sgl SGL) Command {
	return Command{Opcode: OpFabrics, NSID: uint32(t), SGL: sgl}
}

// PropertyGet asks for a property, which is the completion's result.
type PropertyGet struct {
	Property Property
	Wide     bool // 8 bytes instead of 4
}

// Command encodes the command. CIDs are the caller's matter, here as for the other commands.
func (p PropertyGet) Command() Command {
	c := fabrics(FabricsPropertyGet, NoSGL())
	c.CDW10 = attrib(p.Wide)
	c.CDW11 = uint32(p.Property)
	return c
}

// Decode takes the command. A status other than success is the answer to it.
func (p *PropertyGet) Decode(c *Command) Status {
	*p = PropertyGet{Property: Property(c.CDW11), Wide: c.CDW10&7 == 1}
	if c.CDW10&7 > 1 {
		return StatusInvalidField
	}
	return StatusSuccess
}

// PropertySet sets a property.
type PropertySet struct {
	Property Property
	Wide     bool // 8 bytes instead of 4
	Value    uint64
}

// Command encodes the command.
func (p PropertySet) Command() Command {
	c := fabrics(FabricsPropertySet, NoSGL())
	c.CDW10 = attrib(p.Wide)
	c.CDW11 = uint32(p.Property)
	c.CDW12 = uint32(p.Value)
	c.CDW13 = uint32(p.Value >> 32)
	return c
}

// Decode takes the command. A status other than success is the answer to it.
func (p *PropertySet) Decode(c *Command) Status {
	*p = PropertySet{Property: Property(c.CDW11), Wide: c.CDW10&7 == 1, Value: uint64(c.CDW13)<<32 | uint64(c.CDW12)}
	if c.CDW10&7 > 1 {
		return StatusInvalidField
	}
	if !p.Wide {
		p.Value = uint64(c.CDW12)
	}
	return StatusSuccess
}

func attrib(wide bool) uint32 {
	if wide {
		return 1
	}
	return 0
}

// Controller identifiers in Connect and in discovery entries.
const (
	CntlIDAny    uint16 = 0xFFFF // give me one; of a discovery entry: given out at Connect
	CntlIDStatic uint16 = 0xFFFE // of a discovery entry: the same one for the same host
)

// MinQueueSize and MaxQueueSize bound the entries of a submission queue, which holds one command less.
const (
	MinQueueSize = 2
	MaxQueueSize = 1 << 16
)

// AdminQueueSize is what hosts use for the admin queue.
const AdminQueueSize = 32

// Connect is the command with which a queue begins. Its data is ConnectData, always in the capsule.
type Connect struct {
	QID       uint16
	QueueSize int // entries, MinQueueSize to MaxQueueSize
	Priority  uint8
	NoSQFlow  bool          // submission queue flow control is off
	KATO      time.Duration // whole milliseconds, at most 2^32-1; 0 for none. Only of the admin queue
}

const connectNoSQFlow = 1 << 2

// Command encodes the command.
func (p Connect) Command() Command {
	c := fabrics(FabricsConnect, CapsuleSGL(ConnectDataSize))
	c.CDW10 = uint32(p.QID) << 16
	c.CDW11 = uint32(uint16(p.QueueSize-1)) | uint32(p.Priority&3)<<16
	if p.NoSQFlow {
		c.CDW11 |= connectNoSQFlow << 16
	}
	c.CDW12 = uint32(p.KATO / time.Millisecond)
	return c
}

// Decode takes the command. The error is nil or a *ParamError, which is to be answered with StatusConnectParameter; but with
// StatusConnectFormat if it IsFormat.
func (p *Connect) Decode(c *Command) error {
	attr := uint8(c.CDW11 >> 16)
	*p = Connect{
		QID:       uint16(c.CDW10 >> 16),
		QueueSize: int(uint16(c.CDW11)) + 1,
		Priority:  attr & 3,
		NoSQFlow:  attr&connectNoSQFlow != 0,
		KATO:      time.Duration(c.CDW12) * time.Millisecond,
	}
	switch {
	case uint16(c.CDW10) != 0:
		return &ParamError{Offset: connectRecordFormat}
	case p.QueueSize < MinQueueSize:
		return &ParamError{Offset: ConnectQueueSizeOffset}
	}
	return nil
}

// Where the parameters of Connect stand, for ParamError.
const (
	connectRecordFormat = 40

	ConnectQIDOffset       = 42 // in the command
	ConnectQueueSizeOffset = 44 // in the command
	ConnectKATOOffset      = 48 // in the command
	ConnectHostIDOffset    = 0  // in the data
	ConnectCntlIDOffset    = 16 // in the data
	ConnectSubsysNQNOffset = 256
	ConnectHostNQNOffset   = 512
)

// ParamError says which parameter of a Connect is not valid.
type ParamError struct {
	Offset uint16 // of the parameter
	InData bool   // in the data, else in the command
}

// ConnectParam is the ParamError that DW0 of a completion with StatusConnectParameter tells.
func ConnectParam(dw0 uint32) *ParamError {
	return &ParamError{Offset: uint16(dw0), InData: dw0&(1<<16) != 0}
}

// DW0 is the completion's result that says so.
func (e *ParamError) DW0() uint32 {
	dw0 := uint32(e.Offset)
	if e.InData {
		dw0 |= 1 << 16
	}
	return dw0
}

// IsFormat tells that the record format is what is wrong.
func (e *ParamError) IsFormat() bool { return !e.InData && e.Offset == connectRecordFormat }

func (e *ParamError) Error() string {
	names := map[ParamError]string{
		{connectRecordFormat, false}:    "record format",
		{ConnectQIDOffset, false}:       "queue ID",
		{ConnectQueueSizeOffset, false}: "queue size",
		{ConnectKATOOffset, false}:      "keep alive time",
		{ConnectHostIDOffset, true}:     "host ID",
		{ConnectCntlIDOffset, true}:     "controller ID",
		{ConnectSubsysNQNOffset, true}:  "subsystem NQN",
		{ConnectHostNQNOffset, true}:    "host NQN",
	}
	where := "command"
	if e.InData {
		where = "data"
	}
	if name := names[*e]; name != "" {
		return fmt.Sprintf("%s is not accepted", name)
	}
	return fmt.Sprintf("parameter at byte %d of the %s is not accepted", e.Offset, where)
}

// ConnectDataSize is the bytes of ConnectData.
const ConnectDataSize = 1024

// HostID identifies a host to reservations.
type HostID [16]byte

// ConnectData is Connect's data.
type ConnectData struct {
	HostID    HostID
	CntlID    uint16 // CntlIDAny on the admin queue of a controller that gives them out, else the controller's
	SubsysNQN string
	HostNQN   string
}

// Append encodes the data.
func (p *ConnectData) Append(b []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, ConnectDataSize)...)
	d := b[at:]
	copy(d, p.HostID[:])
	le.PutUint16(d[ConnectCntlIDOffset:], p.CntlID)
	putNQN(d[ConnectSubsysNQNOffset:], p.SubsysNQN)
	putNQN(d[ConnectHostNQNOffset:], p.HostNQN)
	return b
}

// Decode takes the data. The error is an ErrShort, or a *ParamError for a name that is not valid.
func (p *ConnectData) Decode(b []byte) error {
	if len(b) < ConnectDataSize {
		return short("connect data", b, ConnectDataSize)
	}
	*p = ConnectData{CntlID: le.Uint16(b[ConnectCntlIDOffset:])}
	copy(p.HostID[:], b)
	var err error
	if p.SubsysNQN, err = getNQN(b[ConnectSubsysNQNOffset:]); err != nil {
		return &ParamError{Offset: ConnectSubsysNQNOffset, InData: true}
	}
	if p.HostNQN, err = getNQN(b[ConnectHostNQNOffset:]); err != nil {
		return &ParamError{Offset: ConnectHostNQNOffset, InData: true}
	}
	return nil
}

// ConnectResult is DW0 of the completion of a Connect that succeeded.
type ConnectResult struct {
	CntlID       uint16
	Authenticate bool // before other commands
	Secure       bool // the same, and the connection must become a secure channel
}

// DecodeConnectResult takes it.
func DecodeConnectResult(dw0 uint32) ConnectResult {
	return ConnectResult{CntlID: uint16(dw0), Authenticate: dw0&(1<<17) != 0, Secure: dw0&(1<<18) != 0}
}

// DW0 encodes it.
func (r ConnectResult) DW0() uint32 {
	dw0 := uint32(r.CntlID)
	if r.Authenticate {
		dw0 |= 1 << 17
	}
	if r.Secure {
		dw0 |= 1 << 18
	}
	return dw0
}

// authProtocol is SPSP0, SPSP1 and SECP of the in-band authentication of NVMe.
const authProtocol = 0xE9_01_01_00

// Auth is Authentication Send and Receive.
type Auth struct {
	Receive bool
	Length  uint32 // bytes of the message, for Receive at most
}

// Command encodes the command; the data of a Send is in the capsule if inCapsule.
func (p Auth) Command(inCapsule bool) Command {
	t, sgl := FabricsAuthSend, TransportSGL(p.Length)
	if p.Receive {
		t = FabricsAuthReceive
	} else if inCapsule {
		sgl = CapsuleSGL(p.Length)
	}
	c := fabrics(t, sgl)
	c.CDW10 = authProtocol
	c.CDW11 = p.Length
	return c
}

// Decode takes the command. A status other than success is the answer to it.
func (p *Auth) Decode(c *Command) Status {
	*p = Auth{Receive: c.FabricsType() == FabricsAuthReceive, Length: c.CDW11}
	if c.CDW10&^0xFF != authProtocol || p.Length == 0 || p.Length != c.SGL.Length {
		return StatusInvalidField
	}
	return StatusSuccess
}

// Capabilities is the property CAP.
type Capabilities struct {
	MaxQueueSize     int           // entries, 2 to MaxQueueSize (MQES)
	Contiguous       bool          // CQR, which Fabrics controllers set
	ReadyTimeout     time.Duration // how long enabling and disabling may take; in 500 ms
	NVM              bool          // CSS: the NVM command set
	CommandSets      bool          // CSS: several, chosen with Configuration.CommandSet = AllCommandSets
	PageShiftMin     uint8         // 12 to 27: pages of 2^n bytes (MPSMIN)
	PageShiftMax     uint8         // MPSMAX
	ReadyWithMedia   bool          // CRMS: becomes ready with media
	ReadyIndependent bool          // CRMS: becomes ready independently of media
}

// Property encodes it.
func (p Capabilities) Property() uint64 {
	return uint64(uint16(p.MaxQueueSize-1)) |
		bit(p.Contiguous, 16) |
		uint64(uint8(p.ReadyTimeout/(500*time.Millisecond)))<<24 |
		bit(p.NVM, 37) | bit(p.CommandSets, 43) |
		uint64((p.PageShiftMin-12)&15)<<48 | uint64((p.PageShiftMax-12)&15)<<52 |
		bit(p.ReadyWithMedia, 59) | bit(p.ReadyIndependent, 60)
}

func bit(set bool, n int) uint64 {
	if set {
		return 1 << n
	}
	return 0
}

// Decode takes it, and checks that a queue can have MinQueueSize entries and that the page sizes are in order.
func (p *Capabilities) Decode(v uint64) error {
	*p = Capabilities{
		MaxQueueSize:     int(uint16(v)) + 1,
		Contiguous:       v>>16&1 != 0,
		ReadyTimeout:     time.Duration(uint8(v>>24)) * 500 * time.Millisecond,
		NVM:              v>>37&1 != 0,
		CommandSets:      v>>43&1 != 0,
		PageShiftMin:     uint8(v>>48&15) + 12,
		PageShiftMax:     uint8(v>>52&15) + 12,
		ReadyWithMedia:   v>>59&1 != 0,
		ReadyIndependent: v>>60&1 != 0,
	}
	if p.MaxQueueSize < MinQueueSize {
		return fmt.Errorf("CAP %#x: queues of %d entry: %w", v, p.MaxQueueSize, ErrInvalid)
	}
	if p.PageShiftMax < p.PageShiftMin {
		return fmt.Errorf("CAP %#x: pages of 2^%d to 2^%d bytes: %w", v, p.PageShiftMin, p.PageShiftMax, ErrInvalid)
	}
	return nil
}

// Command sets, for Configuration.
const (
	NVMCommandSet  uint8 = 0
	AllCommandSets uint8 = 6
)

// Shutdown is Configuration's request.
type Shutdown uint8

// The requests.
const (
	ShutdownNone   Shutdown = 0
	ShutdownNormal Shutdown = 1
	ShutdownAbrupt Shutdown = 2
)

// Configuration is the property CC.
type Configuration struct {
	Enable     bool
	CommandSet uint8
	PageShift  uint8 // 12 to 27: pages of 2^n bytes
	Shutdown   Shutdown
	SQShift    uint8 // 6: submission queue entries of 2^n bytes
	CQShift    uint8 // 4: completion queue entries of 2^n bytes
}

// DefaultConfiguration has the entry and page sizes that NVMe/TCP uses, and is not enabled.
func DefaultConfiguration() Configuration {
	return Configuration{PageShift: 12, SQShift: 6, CQShift: 4}
}

// Property encodes it.
func (p Configuration) Property() uint32 {
	return uint32(bit(p.Enable, 0)) | uint32(p.CommandSet&7)<<4 | uint32((p.PageShift-12)&15)<<7 |
		uint32(p.Shutdown&3)<<14 | uint32(p.SQShift&15)<<16 | uint32(p.CQShift&15)<<20
}

// Decode takes it.
func (p *Configuration) Decode(v uint32) {
	*p = Configuration{
		Enable:     v&1 != 0,
		CommandSet: uint8(v >> 4 & 7),
		PageShift:  uint8(v>>7&15) + 12,
		Shutdown:   Shutdown(v >> 14 & 3),
		SQShift:    uint8(v >> 16 & 15),
		CQShift:    uint8(v >> 20 & 15),
	}
}

// ShutdownStatus is how far a shutdown is.
type ShutdownStatus uint8

// How far.
const (
	ShutdownNotAsked ShutdownStatus = 0
	ShutdownGoingOn  ShutdownStatus = 1
	ShutdownComplete ShutdownStatus = 2
)

// ControllerStatus is the property CSTS.
type ControllerStatus struct {
	Ready    bool
	Fatal    bool // CFS
	Shutdown ShutdownStatus
}

// Property encodes it.
func (p ControllerStatus) Property() uint32 {
	return uint32(bit(p.Ready, 0)) | uint32(bit(p.Fatal, 1)) | uint32(p.Shutdown&3)<<2
}

// Decode takes it.
func (p *ControllerStatus) Decode(v uint32) {
	*p = ControllerStatus{Ready: v&1 != 0, Fatal: v&2 != 0, Shutdown: ShutdownStatus(v >> 2 & 3)}
}

// Version is the property VS, and VER of Identify Controller: major in 31:16, minor in 15:8, tertiary in 7:0.
type Version uint32

// Version20 is 2.0.
const Version20 Version = 0x00020000

func (v Version) String() string {
	return fmt.Sprintf("%d.%d.%d", uint16(v>>16), uint8(v>>8), uint8(v))
}
