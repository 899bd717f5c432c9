package nvmetcp

import (
	"fmt"
	"iter"
	"math"
	"time"
)

// IdentifySize is the bytes of every Identify structure.
const IdentifySize = 4096

// CNS is what an Identify command asks for.
type CNS uint8

// The structures.
const (
	CNSNamespace     CNS = 0x00 // Namespace
	CNSController    CNS = 0x01 // ControllerData
	CNSActive        CNS = 0x02 // AppendNSIDs, NSIDs
	CNSDescriptors   CNS = 0x03 // Descriptors
	CNSSetNamespace  CNS = 0x05 // of a command set
	CNSSetController CNS = 0x06 // of a command set: NVMController for CSINVM
	CNSIndependent   CNS = 0x08 // namespace, independent of its command set
)

// Command set identifiers.
const (
	CSINVM   uint8 = 0
	CSIZoned uint8 = 2
)

// Identify is the arguments of the command.
type Identify struct {
	CNS    CNS
	NSID   uint32 // for CNSActive: those greater than it are listed
	CntlID uint16
	CSI    uint8
}

// Command encodes the command.
func (p Identify) Command() Command {
	return Command{Opcode: OpIdentify, NSID: p.NSID, SGL: TransportSGL(IdentifySize), CDW10: uint32(p.CNS) | uint32(p.CntlID)<<16, CDW11: uint32(p.CSI) << 24}
}

// Decode takes the arguments of c.
func (p *Identify) Decode(c *Command) {
	*p = Identify{CNS: CNS(c.CDW10), NSID: c.NSID, CntlID: uint16(c.CDW10 >> 16), CSI: uint8(c.CDW11 >> 24)}
}

// Bits of ControllerData.CMIC.
const (
	CMICPorts       = 1 << 0 // the subsystem may have several ports
	CMICControllers = 1 << 1 // the subsystem may have several controllers
	CMICANA         = 1 << 3
)

// Bits of ControllerData.CTRATT.
const (
	CTRATTHostID128 = 1 << 0
	CTRATTTBKAS     = 1 << 6 // any command counts as keep alive
)

// Controller types.
const (
	ControllerIO        uint8 = 1
	ControllerDiscovery uint8 = 2
)

// Bits of ControllerData.ONCS.
const (
	ONCSCompare      = 1 << 0
	ONCSDSM          = 1 << 2
	ONCSWriteZeroes  = 1 << 3
	ONCSReservations = 1 << 5
	ONCSCopy         = 1 << 8
)

// Bits of ControllerData.LPA.
const (
	LPAOffset = 1 << 2 // log pages have an offset and 32-bit lengths
)

// Bits of ControllerData.VWC.
const (
	VWCPresent  = 1 << 0
	VWCFlushAll = 3 << 1 // both: Flush takes AllNamespaces
)

// Bits of ControllerData.SGLS.
const (
	SGLSSupported       = 3 << 0 // either: no alignment, or that of dwords
	SGLSKeyed           = 1 << 2
	SGLSTransport       = 1 << 21
	SGLSOffsetInCapsule = 1 << 20
)

// FUSESCompareWrite of ControllerData.FUSES says that compare-and-write is supported.
const FUSESCompareWrite = 1 << 0

// ControllerData is Identify Controller. Strings come without padding.
type ControllerData struct {
	Serial    string // SN, 20 bytes
	Model     string // MN, 40 bytes
	Firmware  string // FR, 8 bytes
	CMIC      uint8
	MDTS      uint8 // transfers of at most 2^n pages of CAP.MPSMIN; 0 says nothing, see MaxTransfer
	CntlID    uint16
	Version   Version
	OAES      Events
	CTRATT    uint32
	Type      uint8            // CNTRLTYPE
	CRDT      [3]time.Duration // retry delays, in 100 ms; the CRD of a completion counts from 1
	OACS      uint16
	AERs      int // outstanding AERs, 1 to 256 (AERL)
	LPA       uint8
	KAS       time.Duration // granularity of KATO, in 100 ms; 0 for no keep alive
	ANATT     time.Duration // longest ANA transition, in seconds
	ANACAP    uint8
	ANAGRPMAX uint32
	NANAGRPID uint32 // ANA groups
	SQES      uint8
	CQES      uint8
	CQT       time.Duration // longest time until commands of a lost association have ended, in ms
	MAXCMD    uint16        // commands in flight per I/O queue; 0 says nothing
	NN        uint32
	ONCS      uint16
	FUSES     uint16
	VWC       uint8
	AWUN      uint16
	AWUPF     uint16
	SGLS      uint32
	MNAN      uint32
	SubsysNQN string
	IOCCSZ    uint32 // of an I/O queue's command capsule, in 16 bytes
	IORCSZ    uint32 // of an I/O queue's response capsule, in 16 bytes
	ICDOFF    uint16
	FCATT     uint8
	MSDBD     uint8
	DCTYPE    uint8
}

// Append encodes the structure.
func (p *ControllerData) Append(b []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, IdentifySize)...)
	d := b[at:]
	putText(d[4:24], p.Serial, ' ')
	putText(d[24:64], p.Model, ' ')
	putText(d[64:72], p.Firmware, ' ')
	d[76] = p.CMIC
	d[77] = p.MDTS
	le.PutUint16(d[78:], p.CntlID)
	le.PutUint32(d[80:], uint32(p.Version))
	le.PutUint32(d[92:], uint32(p.OAES))
	le.PutUint32(d[96:], p.CTRATT)
	d[111] = p.Type
	for i, t := range p.CRDT {
		le.PutUint16(d[128+2*i:], uint16(t/(100*time.Millisecond)))
	}
	le.PutUint16(d[256:], p.OACS)
	d[259] = uint8(p.AERs - 1)
	d[261] = p.LPA
	le.PutUint16(d[320:], uint16(p.KAS/(100*time.Millisecond)))
	d[342] = uint8(p.ANATT / time.Second)
	d[343] = p.ANACAP
	le.PutUint32(d[344:], p.ANAGRPMAX)
	le.PutUint32(d[348:], p.NANAGRPID)
	le.PutUint16(d[386:], uint16(p.CQT/time.Millisecond))
	d[512] = p.SQES
	d[513] = p.CQES
	le.PutUint16(d[514:], p.MAXCMD)
	le.PutUint32(d[516:], p.NN)
	le.PutUint16(d[520:], p.ONCS)
	le.PutUint16(d[522:], p.FUSES)
	d[525] = p.VWC
	le.PutUint16(d[526:], p.AWUN)
	le.PutUint16(d[528:], p.AWUPF)
	le.PutUint32(d[536:], p.SGLS)
	le.PutUint32(d[540:], p.MNAN)
	putNQN(d[768:], p.SubsysNQN)
	le.PutUint32(d[1792:], p.IOCCSZ)
	le.PutUint32(d[1796:], p.IORCSZ)
	le.PutUint16(d[1800:], p.ICDOFF)
	d[1802] = p.FCATT
	d[1803] = p.MSDBD
	d[1806] = p.DCTYPE
	return b
}

// Decode takes the structure. It fails if b is short or the NQN is not a name; CheckIO checks the rest.
func (p *ControllerData) Decode(b []byte) error {
	if err := short("Identify Controller", b, IdentifySize); err != nil {
		return err
	}
	*p = ControllerData{
		Serial:    getText(b[4:24]),
		Model:     getText(b[24:64]),
		Firmware:  getText(b[64:72]),
		CMIC:      b[76],
		MDTS:      b[77],
		CntlID:    le.Uint16(b[78:]),
		Version:   Version(le.Uint32(b[80:])),
		OAES:      Events(le.Uint32(b[92:])),
		CTRATT:    le.Uint32(b[96:]),
		Type:      b[111],
		OACS:      le.Uint16(b[256:]),
		AERs:      int(b[259]) + 1,
		LPA:       b[261],
		KAS:       time.Duration(le.Uint16(b[320:])) * 100 * time.Millisecond,
		ANATT:     time.Duration(b[342]) * time.Second,
		ANACAP:    b[343],
		ANAGRPMAX: le.Uint32(b[344:]),
		NANAGRPID: le.Uint32(b[348:]),
		CQT:       time.Duration(le.Uint16(b[386:])) * time.Millisecond,
		SQES:      b[512],
		CQES:      b[513],
		MAXCMD:    le.Uint16(b[514:]),
		NN:        le.Uint32(b[516:]),
		ONCS:      le.Uint16(b[520:]),
		FUSES:     le.Uint16(b[522:]),
		VWC:       b[525],
		AWUN:      le.Uint16(b[526:]),
		AWUPF:     le.Uint16(b[528:]),
		SGLS:      le.Uint32(b[536:]),
		MNAN:      le.Uint32(b[540:]),
		IOCCSZ:    le.Uint32(b[1792:]),
		IORCSZ:    le.Uint32(b[1796:]),
		ICDOFF:    le.Uint16(b[1800:]),
		FCATT:     b[1802],
		MSDBD:     b[1803],
		DCTYPE:    b[1806],
	}
	for i := range p.CRDT {
		p.CRDT[i] = time.Duration(le.Uint16(b[128+2*i:])) * 100 * time.Millisecond
	}
	if b[768] == 0 {
		return nil // a controller older than 1.2.1 has no NQN
	}
	var err error
	if p.SubsysNQN, err = getNQN(b[768:]); err != nil {
		return fmt.Errorf("Identify Controller: %w", err)
	}
	return nil
}

// CheckIO checks that I/O is possible with this controller, as a host needs it over TCP. Discovery controllers do not pass.
func (p *ControllerData) CheckIO() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("Identify Controller: "+format+": %w", append(args, ErrInvalid)...)
	}
	switch {
	case p.Type == ControllerDiscovery:
		return bad("this is a discovery controller, not one for I/O")
	case p.KAS == 0:
		return bad("no keep alive (KAS is 0)")
	case p.IOCCSZ < CommandSize/16 || p.IOCCSZ > math.MaxUint32/16:
		return bad("IOCCSZ is %d", p.IOCCSZ)
	case p.IORCSZ < CompletionSize/16:
		return bad("IORCSZ is %d", p.IORCSZ)
	case p.ICDOFF != 0:
		return bad("in-capsule data at offset %d (ICDOFF) is not supported", p.ICDOFF)
	case p.SGLS&SGLSSupported == 0:
		return bad("no SGLs (SGLS is %#x)", p.SGLS)
	case p.SGLS&SGLSOffsetInCapsule == 0:
		return bad("no SGLs with an offset in the capsule (SGLS is %#x)", p.SGLS)
	case p.SQES&15 > 6 || p.SQES>>4 < 6:
		return bad("SQES is %#x, but entries have 64 bytes", p.SQES)
	case p.CQES&15 > 4 || p.CQES>>4 < 4:
		return bad("CQES is %#x, but entries have 16 bytes", p.CQES)
	}
	return nil
}

// CapsuleData is the bytes of data that a command capsule of an I/O queue can have, once CheckIO is passed.
func (p *ControllerData) CapsuleData() uint32 { return p.IOCCSZ*16 - CommandSize }

// MaxTransfer is the bytes that one command can move by MDTS, with pages of 2^pageShift bytes (Capabilities.PageShiftMin), but at
// most limit. MDTS 0 is no promise that all goes well (Linux says 0 and refuses more than 4 MiB), so there is always a limit.
func (p *ControllerData) MaxTransfer(pageShift uint8, limit uint64) uint64 {
	return maxTransfer(p.MDTS, pageShift, limit)
}

func maxTransfer(n, pageShift uint8, limit uint64) uint64 {
	if shift := uint(n) + uint(pageShift); n != 0 && shift < 64 {
		return min(limit, 1<<shift)
	}
	return limit
}

// NVMController is Identify Controller of the NVM command set: limits of commands that move no data. 0 says nothing.
type NVMController struct {
	VSL   uint8
	WZSL  uint8 // of Write Zeroes, as MDTS
	WUSL  uint8
	DMRL  uint8  // ranges of Dataset Management
	DMRSL uint32 // blocks of one range
	DMSL  uint64 // blocks of all ranges
}

// Decode takes the structure.
func (p *NVMController) Decode(b []byte) error {
	if err := short("Identify Controller of the NVM command set", b, IdentifySize); err != nil {
		return err
	}
	*p = NVMController{VSL: b[0], WZSL: b[1], WUSL: b[2], DMRL: b[3], DMRSL: le.Uint32(b[4:]), DMSL: le.Uint64(b[8:])}
	return nil
}

// MaxWriteZeroes is the bytes that one Write Zeroes can clear, as ControllerData.MaxTransfer. WZSL 0 leaves it to MDTS.
func (p *NVMController) MaxWriteZeroes(mdts, pageShift uint8, limit uint64) uint64 {
	if p.WZSL == 0 {
		return maxTransfer(mdts, pageShift, limit)
	}
	return maxTransfer(p.WZSL, pageShift, limit)
}

// Blocks have 2^MinBlockShift to 2^MaxBlockShift bytes.
const (
	MinBlockShift = 9
	MaxBlockShift = 16
)

// Bits of Namespace.NMIC and Namespace.NSATTR.
const (
	NMICShared           = 1 << 0
	NSATTRWriteProtected = 1 << 0
)

// DLFEATZeros in DLFEAT's bits 2:0 says that deallocated blocks read as zeros.
const (
	DLFEATReadMask = 7
	DLFEATZeros    = 1
)

// Namespace is Identify Namespace. A namespace that does not exist has NCAP 0.
type Namespace struct {
	NSZE, NCAP, NUSE uint64 // blocks
	NSFEAT           uint8
	NMIC             uint8
	RESCAP           uint8
	DLFEAT           uint8
	NAWUN            uint16
	NAWUPF           uint16
	NABSN            uint16
	NABO             uint16
	NABSPF           uint16
	NOIOB            uint16 // blocks: I/O that crosses a multiple of it is slow; 0 says nothing
	NPWG             uint16
	NPWA             uint16
	NPDG             uint16
	NOWS             uint16
	ANAGRPID         uint32
	NSATTR           uint8
	NGUID            [16]byte // big-endian
	EUI64            [8]byte  // big-endian
	BlockShift       uint8    // LBADS of the format in use: blocks of 2^n bytes
	Metadata         uint16   // MS of the format in use: bytes per block
}

// Append encodes the structure, with one format, the one in use.
func (p *Namespace) Append(b []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, IdentifySize)...)
	d := b[at:]
	le.PutUint64(d[0:], p.NSZE)
	le.PutUint64(d[8:], p.NCAP)
	le.PutUint64(d[16:], p.NUSE)
	d[24] = p.NSFEAT
	d[30] = p.NMIC
	d[31] = p.RESCAP
	d[33] = p.DLFEAT
	le.PutUint16(d[34:], p.NAWUN)
	le.PutUint16(d[36:], p.NAWUPF)
	le.PutUint16(d[40:], p.NABSN)
	le.PutUint16(d[42:], p.NABO)
	le.PutUint16(d[44:], p.NABSPF)
	le.PutUint16(d[46:], p.NOIOB)
	le.PutUint16(d[64:], p.NPWG)
	le.PutUint16(d[66:], p.NPWA)
	le.PutUint16(d[68:], p.NPDG)
	le.PutUint16(d[72:], p.NOWS)
	le.PutUint32(d[92:], p.ANAGRPID)
	d[99] = p.NSATTR
	copy(d[104:], p.NGUID[:])
	copy(d[120:], p.EUI64[:])
	le.PutUint16(d[128:], p.Metadata)
	d[130] = p.BlockShift
	return b
}

// Decode takes the structure. Of a namespace that exists it checks that the format in use is one that there is, the size of a
// block, and that the namespace has at most 2^63-1 bytes.
func (p *Namespace) Decode(b []byte) error {
	if err := short("Identify Namespace", b, IdentifySize); err != nil {
		return err
	}
	*p = Namespace{
		NSZE:     le.Uint64(b[0:]),
		NCAP:     le.Uint64(b[8:]),
		NUSE:     le.Uint64(b[16:]),
		NSFEAT:   b[24],
		NMIC:     b[30],
		RESCAP:   b[31],
		DLFEAT:   b[33],
		NAWUN:    le.Uint16(b[34:]),
		NAWUPF:   le.Uint16(b[36:]),
		NABSN:    le.Uint16(b[40:]),
		NABO:     le.Uint16(b[42:]),
		NABSPF:   le.Uint16(b[44:]),
		NOIOB:    le.Uint16(b[46:]),
		NPWG:     le.Uint16(b[64:]),
		NPWA:     le.Uint16(b[66:]),
		NPDG:     le.Uint16(b[68:]),
		NOWS:     le.Uint16(b[72:]),
		ANAGRPID: le.Uint32(b[92:]),
		NSATTR:   b[99],
		NGUID:    [16]byte(b[104:]),
		EUI64:    [8]byte(b[120:]),
	}
	if p.NCAP == 0 {
		return nil
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("Identify Namespace: "+format+": %w", append(args, ErrInvalid)...)
	}
	formats, used := int(b[25])+1, int(b[26]&15|b[26]>>5&3<<4)
	if formats <= 16 {
		used &= 15 // the high bits are reserved
	}
	if used >= formats {
		return bad("format %d of %d is in use", used, formats)
	}
	f := b[128+4*used:]
	p.Metadata, p.BlockShift = le.Uint16(f), f[2]
	switch {
	case p.BlockShift < MinBlockShift || p.BlockShift > MaxBlockShift:
		return bad("blocks of 2^%d bytes", p.BlockShift)
	case p.NSZE == 0 || p.NSZE > math.MaxInt64>>p.BlockShift:
		return bad("%d blocks of %d bytes", p.NSZE, p.BlockSize())
	case p.NCAP > p.NSZE:
		return bad("capacity of %d blocks in a size of %d", p.NCAP, p.NSZE)
	}
	return nil
}

// Exists tells whether there is such a namespace.
func (p *Namespace) Exists() bool { return p.NCAP != 0 }

// BlockSize is the bytes of a block.
func (p *Namespace) BlockSize() int { return 1 << p.BlockShift }

// Size is the bytes of the namespace.
func (p *Namespace) Size() int64 { return int64(p.NSZE << p.BlockShift) }

// nsidsPerPage is how many NSIDs a list holds.
const nsidsPerPage = IdentifySize / 4

// AppendNSIDs encodes one page of a list of active or changed namespaces: the first 1024 of nsids, which rise.
func AppendNSIDs(b []byte, nsids []uint32) []byte {
	n := min(len(nsids), nsidsPerPage)
	for _, id := range nsids[:n] {
		b = le.AppendUint32(b, id)
	}
	return append(b, make([]byte, (nsidsPerPage-n)*4)...)
}

// ActiveNSIDs takes one page of the list of active namespaces, those greater than after, and appends it to nsids. It tells
// whether the page was full, so that there may be another.
func ActiveNSIDs(nsids []uint32, b []byte, after uint32) (all []uint32, full bool, err error) {
	if err := short("list of namespaces", b, IdentifySize); err != nil {
		return nsids, false, err
	}
	for i := range nsidsPerPage {
		id := le.Uint32(b[4*i:])
		if id == 0 {
			return nsids, false, nil
		}
		if id <= after || id == AllNamespaces {
			return nsids, false, fmt.Errorf("list of namespaces: %d after %d: %w", id, after, ErrInvalid)
		}
		nsids, after = append(nsids, id), id
	}
	return nsids, true, nil
}

// Types of namespace identifiers.
const (
	nidEUI64 = 1
	nidNGUID = 2
	nidUUID  = 3
	nidCSI   = 4
)

// Descriptors is the Namespace Identification Descriptors. Those that are all zero are not there.
type Descriptors struct {
	EUI64 [8]byte
	NGUID [16]byte
	UUID  [16]byte
	CSI   uint8
	// HasCSI: CSI is there. Without it the command set is that of the controller, NVM.
	HasCSI bool
}

// Append encodes the descriptors.
func (p *Descriptors) Append(b []byte) []byte {
	at := len(b)
	add := func(t byte, v []byte) {
		b = append(b, t, byte(len(v)), 0, 0)
		b = append(b, v...)
	}
	if p.EUI64 != [8]byte{} {
		add(nidEUI64, p.EUI64[:])
	}
	if p.NGUID != [16]byte{} {
		add(nidNGUID, p.NGUID[:])
	}
	if p.UUID != [16]byte{} {
		add(nidUUID, p.UUID[:])
	}
	if p.HasCSI {
		add(nidCSI, []byte{p.CSI})
	}
	return append(b, make([]byte, at+IdentifySize-len(b))...)
}

// Decode takes the descriptors, and passes over those of unknown types.
func (p *Descriptors) Decode(b []byte) error {
	if err := short("namespace descriptors", b, IdentifySize); err != nil {
		return err
	}
	*p = Descriptors{}
	b = b[:IdentifySize]
	for len(b) >= 4 && b[1] != 0 {
		t, n := b[0], int(b[1])
		b = b[4:]
		if n > len(b) {
			return fmt.Errorf("namespace descriptors: %d bytes of type %d where %d are left: %w", n, t, len(b), ErrInvalid)
		}
		var dst []byte
		switch t {
		case nidEUI64:
			dst = p.EUI64[:]
		case nidNGUID:
			dst = p.NGUID[:]
		case nidUUID:
			dst = p.UUID[:]
		case nidCSI:
			dst = []byte{0}
		default:
			b = b[n:]
			continue
		}
		if n != len(dst) {
			return fmt.Errorf("namespace descriptors: %d bytes of type %d: %w", n, t, ErrInvalid)
		}
		copy(dst, b)
		if t == nidCSI {
			p.CSI, p.HasCSI = b[0], true
		}
		b = b[n:]
	}
	return nil
}

// nsids is the NSIDs in b.
func nsids(b []byte) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for ; len(b) >= 4; b = b[4:] {
			if !yield(le.Uint32(b)) {
				return
			}
		}
	}
}
