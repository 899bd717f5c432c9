package nvmetcp

import (
	"fmt"
	"iter"
)

// ReservationType is what a reservation allows to whom.
type ReservationType uint8

// The types.
const (
	ReserveNone                     ReservationType = 0
	ReserveWriteExclusive           ReservationType = 1
	ReserveExclusiveAccess          ReservationType = 2
	ReserveWriteExclusiveRegistered ReservationType = 3 // registrants only
	ReserveExclusiveAccessRegisters ReservationType = 4 // registrants only
	ReserveWriteExclusiveAll        ReservationType = 5 // registrants only, who all hold it
	ReserveExclusiveAccessAll       ReservationType = 6 // registrants only, who all hold it
)

var reservationNames = [...]string{"none", "write exclusive", "exclusive access", "write exclusive, registrants only",
	"exclusive access, registrants only", "write exclusive, all registrants", "exclusive access, all registrants"}

func (t ReservationType) String() string {
	if int(t) < len(reservationNames) {
		return reservationNames[t]
	}
	return fmt.Sprintf("reservation type %d", uint8(t))
}

// RegisterAction is what a Reservation Register does.
type RegisterAction uint8

// The actions.
const (
	RegisterKey   RegisterAction = 0
	UnregisterKey RegisterAction = 1
	ReplaceKey    RegisterAction = 2
)

// AcquireAction is what a Reservation Acquire does.
type AcquireAction uint8

// The actions.
const (
	Acquire         AcquireAction = 0
	Preempt         AcquireAction = 1
	PreemptAndAbort AcquireAction = 2
)

// ReleaseAction is what a Reservation Release does.
type ReleaseAction uint8

// The actions.
const (
	Release ReleaseAction = 0
	Clear   ReleaseAction = 1
)

// Persist is what a Reservation Register changes about persistence through power loss.
type Persist uint8

// The changes.
const (
	PersistSame Persist = 0
	PersistOff  Persist = 2
	PersistOn   Persist = 3
)

const ignoreKey = 1 << 3

// Bytes of the data of the reservation commands.
const (
	RegisterDataSize = 16
	AcquireDataSize  = 16
	ReleaseDataSize  = 8
)

// ReservationRegister is the arguments and data of the command.
type ReservationRegister struct {
	NSID      uint32
	Action    RegisterAction
	IgnoreKey bool // IEKEY: Current is not compared
	Persist   Persist
	Current   uint64 // CRKEY
	New       uint64 // NRKEY
}

// Command encodes the command, AppendData its data.
func (p *ReservationRegister) Command(inCapsule bool) Command {
	c := reservation(OpReservationRegister, p.NSID, RegisterDataSize, inCapsule)
	c.CDW10 = uint32(p.Action&7) | ignore(p.IgnoreKey) | uint32(p.Persist&3)<<30
	return c
}

// AppendData encodes the data.
func (p *ReservationRegister) AppendData(b []byte) []byte {
	return le.AppendUint64(le.AppendUint64(b, p.Current), p.New)
}

// Decode takes the command and its data. A status other than success is the answer to it.
func (p *ReservationRegister) Decode(c *Command, data []byte) Status {
	*p = ReservationRegister{NSID: c.NSID, Action: RegisterAction(c.CDW10 & 7), IgnoreKey: c.CDW10&ignoreKey != 0, Persist: Persist(c.CDW10 >> 30)}
	if p.Action > ReplaceKey || p.Persist == 1 {
		return StatusInvalidField
	}
	if len(data) < RegisterDataSize {
		return StatusSGLLength
	}
	p.Current, p.New = le.Uint64(data), le.Uint64(data[8:])
	return StatusSuccess
}

func ignore(set bool) uint32 { return uint32(bit(set, 3)) }

func reservation(op Opcode, nsid, n uint32, inCapsule bool) Command {
	sgl := TransportSGL(n)
	if inCapsule {
		sgl = CapsuleSGL(n)
	}
	return Command{Opcode: op, NSID: nsid, SGL: sgl}
}

// ReservationAcquire is the arguments and data of the command.
type ReservationAcquire struct {
	NSID      uint32
	Action    AcquireAction
	IgnoreKey bool
	Type      ReservationType
	Current   uint64 // CRKEY
	Preempted uint64 // PRKEY
}

// Command encodes the command, AppendData its data.
func (p *ReservationAcquire) Command(inCapsule bool) Command {
	c := reservation(OpReservationAcquire, p.NSID, AcquireDataSize, inCapsule)
	c.CDW10 = uint32(p.Action&7) | ignore(p.IgnoreKey) | uint32(p.Type)<<8
	return c
}

// AppendData encodes the data.
func (p *ReservationAcquire) AppendData(b []byte) []byte {
	return le.AppendUint64(le.AppendUint64(b, p.Current), p.Preempted)
}

// Decode takes the command and its data. A status other than success is the answer to it.
func (p *ReservationAcquire) Decode(c *Command, data []byte) Status {
	*p = ReservationAcquire{NSID: c.NSID, Action: AcquireAction(c.CDW10 & 7), IgnoreKey: c.CDW10&ignoreKey != 0, Type: ReservationType(c.CDW10 >> 8)}
	if p.Action > PreemptAndAbort || p.Type == ReserveNone || p.Type > ReserveExclusiveAccessAll {
		return StatusInvalidField
	}
	if len(data) < AcquireDataSize {
		return StatusSGLLength
	}
	p.Current, p.Preempted = le.Uint64(data), le.Uint64(data[8:])
	return StatusSuccess
}

// ReservationRelease is the arguments and data of the command.
type ReservationRelease struct {
	NSID      uint32
	Action    ReleaseAction
	IgnoreKey bool
	Type      ReservationType // of the reservation that is released; not looked at by Clear
	Current   uint64          // CRKEY
}

// Command encodes the command, AppendData its data.
func (p *ReservationRelease) Command(inCapsule bool) Command {
	c := reservation(OpReservationRelease, p.NSID, ReleaseDataSize, inCapsule)
	c.CDW10 = uint32(p.Action&7) | ignore(p.IgnoreKey) | uint32(p.Type)<<8
	return c
}

// AppendData encodes the data.
func (p *ReservationRelease) AppendData(b []byte) []byte { return le.AppendUint64(b, p.Current) }

// Decode takes the command and its data. A status other than success is the answer to it.
func (p *ReservationRelease) Decode(c *Command, data []byte) Status {
	*p = ReservationRelease{NSID: c.NSID, Action: ReleaseAction(c.CDW10 & 7), IgnoreKey: c.CDW10&ignoreKey != 0, Type: ReservationType(c.CDW10 >> 8)}
	if p.Action > Clear || p.Action == Release && (p.Type == ReserveNone || p.Type > ReserveExclusiveAccessAll) {
		return StatusInvalidField
	}
	if len(data) < ReleaseDataSize {
		return StatusSGLLength
	}
	p.Current = le.Uint64(data)
	return StatusSuccess
}

// ReservationReport is the arguments of the command. Extended (128-bit host IDs) must be what CTRATTHostID128 says.
type ReservationReport struct {
	NSID     uint32
	Length   uint64 // bytes, a multiple of 4 from 4 to 2^32-4
	Extended bool   // EDS
}

// Command encodes the command.
func (p ReservationReport) Command() Command {
	c := reservation(OpReservationReport, p.NSID, uint32(p.Length), false)
	c.CDW10 = uint32(p.Length/4 - 1)
	c.CDW11 = uint32(bit(p.Extended, 0))
	return c
}

// Decode takes the arguments of c. A status other than success is the answer to it.
func (p *ReservationReport) Decode(c *Command) Status {
	*p = ReservationReport{NSID: c.NSID, Length: (uint64(c.CDW10) + 1) * 4, Extended: c.CDW11&1 != 0}
	if p.Length != uint64(c.SGL.Length) {
		return StatusSGLLength
	}
	return StatusSuccess
}

// ReservationStatus begins the report.
type ReservationStatus struct {
	Generation  uint32
	Type        ReservationType
	Registrants uint16 // REGCTL; more than the entries if the report was cut off
	Persist     bool   // PTPLS
}

// Registrant is an entry of the report.
type Registrant struct {
	CntlID uint16
	Holder bool   // RCSTS bit 0
	HostID HostID // the first 8 bytes if the report is not extended
	Key    uint64
}

// sizes of the report's header and entries
func reportSizes(extended bool) (head, entry int) {
	if extended {
		return 64, 64
	}
	return 24, 24
}

// ReservationReportSize is the bytes of a report with n entries.
func ReservationReportSize(n int, extended bool) int {
	head, entry := reportSizes(extended)
	return head + n*entry
}

// Append encodes the beginning of the report. Registrants' entries follow.
func (p *ReservationStatus) Append(b []byte, extended bool) []byte {
	head, _ := reportSizes(extended)
	b = le.AppendUint32(b, p.Generation)
	b = append(b, byte(p.Type))
	b = le.AppendUint16(b, p.Registrants)
	b = append(b, 0, 0, byte(bit(p.Persist, 0)))
	return append(b, zeros[:head-10]...)
}

// Append encodes the entry.
func (p *Registrant) Append(b []byte, extended bool) []byte {
	b = le.AppendUint16(b, p.CntlID)
	b = append(b, byte(bit(p.Holder, 0)), 0, 0, 0, 0, 0)
	if !extended {
		b = append(b, p.HostID[:8]...)
		return le.AppendUint64(b, p.Key)
	}
	b = le.AppendUint64(b, p.Key)
	b = append(b, p.HostID[:]...)
	return append(b, zeros[:32]...)
}

// Decode takes the beginning of the report.
func (p *ReservationStatus) Decode(b []byte, extended bool) error {
	head, _ := reportSizes(extended)
	if err := short("reservation report", b, head); err != nil {
		return err
	}
	*p = ReservationStatus{Generation: le.Uint32(b), Type: ReservationType(b[4]), Registrants: le.Uint16(b[5:]), Persist: b[9]&1 != 0}
	if p.Type > ReserveExclusiveAccessAll {
		return fmt.Errorf("reservation report: %v: %w", p.Type, ErrInvalid)
	}
	return nil
}

// Registrants is the entries of a report, b. It ends with the first error, which is an ErrShort if the report was cut off.
func Registrants(b []byte, extended bool) iter.Seq2[Registrant, error] {
	return func(yield func(Registrant, error) bool) {
		var status ReservationStatus
		if err := status.Decode(b, extended); err != nil {
			yield(Registrant{}, err)
			return
		}
		head, entry := reportSizes(extended)
		b := b[head:]
		for range status.Registrants {
			if err := short("reservation report: entry", b, entry); err != nil {
				yield(Registrant{}, err)
				return
			}
			r := Registrant{CntlID: le.Uint16(b), Holder: b[2]&1 != 0}
			if extended {
				r.Key = le.Uint64(b[8:])
				copy(r.HostID[:], b[16:])
			} else {
				copy(r.HostID[:], b[8:16])
				r.Key = le.Uint64(b[16:])
			}
			if !yield(r, nil) {
				return
			}
			b = b[entry:]
		}
	}
}
