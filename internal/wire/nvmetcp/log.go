package nvmetcp

import (
	"fmt"
	"iter"
)

// LogID is a log page.
type LogID uint8

// The log pages.
const (
	LogError             LogID = 0x01
	LogHealth            LogID = 0x02
	LogChangedNamespaces LogID = 0x04 // as AppendNSIDs has them; AllNamespaces alone: too many for the log
	LogANA               LogID = 0x0C // ANAHeader, ANAGroups
	LogDiscovery         LogID = 0x70 // DiscoveryHeader, DiscoveryEntry
	LogReservation       LogID = 0x80
)

// LSPANAGroups of GetLogPage.LSP asks for the ANA log without NSIDs.
const LSPANAGroups = 1

// GetLogPage is the arguments of the command.
type GetLogPage struct {
	ID     LogID
	LSP    uint8  // 0 to 127
	RAE    bool   // retain: reading does not clear the event
	NSID   uint32 // AllNamespaces for those logs that are the controller's, or 0
	Offset uint64 // bytes, a multiple of 4
	Length uint64 // bytes, a multiple of 4 from 4 to 2^32-4
	CSI    uint8
}

// Command encodes the command.
func (p GetLogPage) Command() Command {
	numd := uint32(p.Length/4 - 1)
	c := Command{
		Opcode: OpGetLogPage,
		NSID:   p.NSID,
		SGL:    TransportSGL(uint32(p.Length)),
		CDW10:  uint32(p.ID) | uint32(p.LSP&0x7F)<<8 | uint32(bit(p.RAE, 15)) | numd<<16,
		CDW11:  numd >> 16,
		CDW12:  uint32(p.Offset),
		CDW13:  uint32(p.Offset >> 32),
		CDW14:  uint32(p.CSI) << 24,
	}
	return c
}

// Decode takes the arguments of c. A status other than success is the answer to it.
func (p *GetLogPage) Decode(c *Command) Status {
	*p = GetLogPage{
		ID:     LogID(c.CDW10),
		LSP:    uint8(c.CDW10 >> 8 & 0x7F),
		RAE:    c.CDW10>>15&1 != 0,
		NSID:   c.NSID,
		Offset: uint64(c.CDW13)<<32 | uint64(c.CDW12),
		Length: (uint64(c.CDW11&0xFFFF)<<16 | uint64(c.CDW10>>16) + 1) * 4,
		CSI:    uint8(c.CDW14 >> 24),
	}
	if p.Offset%4 != 0 {
		return StatusInvalidField
	}
	if p.Length != uint64(c.SGL.Length) {
		return StatusSGLLength
	}
	return StatusSuccess
}

// ANAState is a controller's access to the namespaces of an ANA group.
type ANAState uint8

// The states.
const (
	ANAOptimized    ANAState = 0x1
	ANANonOptimized ANAState = 0x2
	ANAInaccessible ANAState = 0x3
	ANALoss         ANAState = 0x4
	ANAChange       ANAState = 0xF
)

// Status is what I/O gets in this state.
func (s ANAState) Status() Status {
	switch s {
	case ANAInaccessible:
		return StatusANAInaccess
	case ANALoss:
		return StatusANALoss
	case ANAChange:
		return StatusANATransition
	}
	return StatusSuccess
}

var anaNames = map[ANAState]string{
	ANAOptimized:    "optimized",
	ANANonOptimized: "non-optimized",
	ANAInaccessible: "inaccessible",
	ANALoss:         "persistent-loss",
	ANAChange:       "change",
}

func (s ANAState) String() string {
	if name := anaNames[s]; name != "" {
		return name
	}
	return fmt.Sprintf("ANA state %#x", uint8(s))
}

// Sizes in the ANA log.
const (
	ANAHeaderSize = 16
	ANAGroupSize  = 32 // without NSIDs
)

// ANAHeader begins the ANA log.
type ANAHeader struct {
	ChangeCount uint64 // moves with the log
	Groups      uint16
}

// Append encodes the header.
func (p ANAHeader) Append(b []byte) []byte {
	b = le.AppendUint64(b, p.ChangeCount)
	b = le.AppendUint16(b, p.Groups)
	return append(b, zeros[:6]...)
}

// Decode takes the header from the first ANAHeaderSize bytes of b.
func (p *ANAHeader) Decode(b []byte) error {
	if err := short("ANA log", b, ANAHeaderSize); err != nil {
		return err
	}
	*p = ANAHeader{ChangeCount: le.Uint64(b), Groups: le.Uint16(b[8:])}
	return nil
}

// ANAGroup is one group of the ANA log.
type ANAGroup struct {
	ID          uint32 // not 0
	ChangeCount uint64
	State       ANAState
	nsids       []byte
}

// NSIDs is the group's namespaces in the log, which rise. They alias the log.
func (p *ANAGroup) NSIDs() iter.Seq[uint32] { return nsids(p.nsids) }

// AppendANAGroup encodes a group with its namespaces, which rise.
func AppendANAGroup(b []byte, p ANAGroup, nsids []uint32) []byte {
	b = le.AppendUint32(b, p.ID)
	b = le.AppendUint32(b, uint32(len(nsids)))
	b = le.AppendUint64(b, p.ChangeCount)
	b = append(b, byte(p.State))
	b = append(b, zeros[:15]...)
	for _, id := range nsids {
		b = le.AppendUint32(b, id)
	}
	return b
}

// decode takes the group and returns what is behind it.
func (p *ANAGroup) decode(b []byte) ([]byte, error) {
	if err := short("ANA group", b, ANAGroupSize); err != nil {
		return nil, err
	}
	*p = ANAGroup{ID: le.Uint32(b), ChangeCount: le.Uint64(b[8:]), State: ANAState(b[16] & 15)}
	n := uint64(le.Uint32(b[4:])) * 4
	if p.ID == 0 || anaNames[p.State] == "" {
		return nil, fmt.Errorf("ANA group %d: %v: %w", p.ID, p.State, ErrInvalid)
	}
	b = b[ANAGroupSize:]
	if n > uint64(len(b)) {
		return nil, fmt.Errorf("ANA group %d: %d namespaces in %d bytes: %w", p.ID, n/4, len(b), ErrShort)
	}
	p.nsids = b[:n:n]
	last := uint32(0)
	for id := range nsids(p.nsids) {
		if id <= last || id == AllNamespaces {
			return nil, fmt.Errorf("ANA group %d: namespace %d after %d: %w", p.ID, id, last, ErrInvalid)
		}
		last = id
	}
	return b[n:], nil
}

// ANAGroups is the groups of a whole ANA log, b. It ends with the first error, which is an ErrShort if b is too short for what
// it says.
func ANAGroups(b []byte) iter.Seq2[ANAGroup, error] {
	return func(yield func(ANAGroup, error) bool) {
		var head ANAHeader
		if err := head.Decode(b); err != nil {
			yield(ANAGroup{}, err)
			return
		}
		rest := b[ANAHeaderSize:]
		for range head.Groups {
			var g ANAGroup
			var err error
			rest, err = g.decode(rest)
			if !yield(g, err) || err != nil {
				return
			}
		}
	}
}

// Sizes in the discovery log.
const (
	DiscoveryHeaderSize = 1024
	DiscoveryEntrySize  = 1024
)

// DiscoveryHeader begins the discovery log.
type DiscoveryHeader struct {
	Generation uint64
	Records    uint64
}

// Append encodes the header.
func (p DiscoveryHeader) Append(b []byte) []byte {
	b = le.AppendUint64(b, p.Generation)
	b = le.AppendUint64(b, p.Records)
	return append(b, make([]byte, DiscoveryHeaderSize-16)...)
}

// Decode takes the header; 18 bytes of b are enough.
func (p *DiscoveryHeader) Decode(b []byte) error {
	if err := short("discovery log", b, 18); err != nil {
		return err
	}
	*p = DiscoveryHeader{Generation: le.Uint64(b), Records: le.Uint64(b[8:])}
	if f := le.Uint16(b[16:]); f != 0 {
		return fmt.Errorf("discovery log: record format %d: %w", f, ErrInvalid)
	}
	return nil
}

// Values in a DiscoveryEntry.
const (
	TransportRDMA uint8 = 1
	TransportFC   uint8 = 2
	TransportTCP  uint8 = 3

	FamilyIPv4 uint8 = 1
	FamilyIPv6 uint8 = 2

	SubtypeReferral  uint8 = 1 // another discovery service
	SubtypeNVM       uint8 = 2
	SubtypeDiscovery uint8 = 3 // this discovery service

	TREQSecureMask   uint8 = 3
	TREQSecure       uint8 = 1 // a secure channel is required
	TREQNotSecure    uint8 = 2
	TREQNoSQFlow     uint8 = 1 << 2 // Connect.NoSQFlow is supported
	EFlagsDuplicate        = 1 << 0
	EFlagsPersistent       = 1 << 1 // the discovery service takes persistent connections

	SecurityNone  uint8 = 0
	SecurityTLS13 uint8 = 2
)

// DiscoveryEntry is one record of the discovery log.
type DiscoveryEntry struct {
	Transport uint8
	Family    uint8
	Subtype   uint8
	TREQ      uint8
	PortID    uint16
	CntlID    uint16
	QueueSize uint16 // most entries of the admin queue (ASQSZ)
	EFlags    uint16
	Service   string // TRSVCID: the port in decimal
	SubsysNQN string
	Address   string // TRADDR
	Security  uint8  // TSAS of TCP
}

// Append encodes the entry.
func (p *DiscoveryEntry) Append(b []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, DiscoveryEntrySize)...)
	d := b[at:]
	d[0], d[1], d[2], d[3] = p.Transport, p.Family, p.Subtype, p.TREQ
	le.PutUint16(d[4:], p.PortID)
	le.PutUint16(d[6:], p.CntlID)
	le.PutUint16(d[8:], p.QueueSize)
	le.PutUint16(d[10:], p.EFlags)
	putText(d[32:64], p.Service, ' ')
	putNQN(d[256:], p.SubsysNQN)
	putText(d[512:768], p.Address, ' ')
	d[768] = p.Security
	return b
}

// Decode takes the entry from the first DiscoveryEntrySize bytes of b. The strings end at a NUL or trailing spaces, and may be
// anything if the transport is not TransportTCP. Of one that is, the NQN is a name and the address and the service are printable
// ASCII. The error is an ErrShort only if b is.
func (p *DiscoveryEntry) Decode(b []byte) error {
	if err := short("discovery entry", b, DiscoveryEntrySize); err != nil {
		return err
	}
	*p = DiscoveryEntry{
		Transport: b[0],
		Family:    b[1],
		Subtype:   b[2],
		TREQ:      b[3],
		PortID:    le.Uint16(b[4:]),
		CntlID:    le.Uint16(b[6:]),
		QueueSize: le.Uint16(b[8:]),
		EFlags:    le.Uint16(b[10:]),
		Service:   getText(b[32:64]),
		SubsysNQN: getText(b[256:512]),
		Address:   getText(b[512:768]),
		Security:  b[768],
	}
	if p.Transport != TransportTCP {
		return nil
	}
	if err := checkName(p.SubsysNQN); err != nil {
		return fmt.Errorf("discovery entry: %w", err)
	}
	for _, s := range []string{p.Service, p.Address} {
		for i := range len(s) {
			if s[i] <= ' ' || s[i] > '~' {
				return fmt.Errorf("discovery entry: address %q, port %q: %w", p.Address, p.Service, ErrInvalid)
			}
		}
	}
	return nil
}
