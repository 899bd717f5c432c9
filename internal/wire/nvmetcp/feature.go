package nvmetcp

import (
	"fmt"
	"time"
)

// FeatureID is which feature Set Features or Get Features is about.
type FeatureID uint8

// The features.
const (
	FeatureWriteCache         FeatureID = 0x06 // bit 0
	FeatureQueues             FeatureID = 0x07 // QueueCount
	FeatureEvents             FeatureID = 0x0B // Events
	FeatureKATO               FeatureID = 0x0F // ms
	FeatureHostBehavior       FeatureID = 0x16 // AppendHostBehavior
	FeatureHostID             FeatureID = 0x81
	FeatureReservationMask    FeatureID = 0x82
	FeatureReservationPersist FeatureID = 0x83
)

// Feature is the arguments of Set Features and Get Features.
type Feature struct {
	ID    FeatureID
	NSID  uint32
	Value uint32 // CDW11
}

// Set is Set Features; sgl is for the data of those features that have some, else NoSGL.
func (p Feature) Set(sgl SGL) Command { return p.command(OpSetFeatures, sgl) }

// Get is Get Features, whose completion has the value in DW0.
func (p Feature) Get(sgl SGL) Command { return p.command(OpGetFeatures, sgl) }

func (p Feature) command(op Opcode, sgl SGL) Command {
	return Command{Opcode: op, NSID: p.NSID, SGL: sgl, CDW10: uint32(p.ID), CDW11: p.Value}
}

// Decode takes the arguments of c.
func (p *Feature) Decode(c *Command) {
	*p = Feature{ID: FeatureID(c.CDW10), NSID: c.NSID, Value: c.CDW11}
}

// MaxQueues is the most I/O queues that can be asked for.
const MaxQueues = 0xFFFF

// QueueCount is the value of FeatureQueues for n I/O queues, 1 to MaxQueues.
func QueueCount(n int) uint32 { return uint32(uint16(n-1)) * 0x10001 }

// DecodeQueueCount is how many I/O queues a value of FeatureQueues allows: the lesser of those for submission and completion.
func DecodeQueueCount(v uint32) int { return int(min(uint16(v), uint16(v>>16))) + 1 }

// KATO is the value of FeatureKATO.
func KATO(d time.Duration) uint32 { return uint32(d / time.Millisecond) }

// HostBehaviorSize is the bytes of FeatureHostBehavior's data.
const HostBehaviorSize = 512

// AppendHostBehavior encodes the data of FeatureHostBehavior: acre is whether the host heeds CRD.
func AppendHostBehavior(b []byte, acre bool) []byte {
	at := len(b)
	b = append(b, make([]byte, HostBehaviorSize)...)
	b[at] = byte(bit(acre, 0))
	return b
}

// Events is a set of asynchronous events: OAES, and the value of FeatureEvents.
type Events uint32

// The events.
const (
	EventsNamespaces Events = 1 << 8
	EventsFirmware   Events = 1 << 9
	EventsANA        Events = 1 << 11
	EventsZones      Events = 1 << 27
	EventsDiscovery  Events = 1 << 31
)

// EventType is the kind of an asynchronous event.
type EventType uint8

// The kinds.
const (
	EventError   EventType = 0
	EventHealth  EventType = 1
	EventNotice  EventType = 2
	EventIO      EventType = 6
	EventVendor  EventType = 7
	eventTypeMax           = 7
)

// AsyncEvent is DW0 of the completion of an Asynchronous Event Request.
type AsyncEvent struct {
	Type EventType
	Info uint8
	Log  LogID // which log page tells more, and when read clears the event
}

// Events that weft knows, as Type and Info.
var (
	EventPersistentError  = AsyncEvent{EventError, 3, LogError} // the controller is to be reset
	EventNamespaceChanged = AsyncEvent{EventNotice, 0, LogChangedNamespaces}
	EventANAChanged       = AsyncEvent{EventNotice, 3, LogANA}
	EventDiscoveryChanged = AsyncEvent{EventNotice, 0xF0, LogDiscovery}
	EventReservation      = AsyncEvent{EventIO, 0, LogReservation}
)

// Is tells whether the event is of e's kind, whatever log page it names.
func (p AsyncEvent) Is(e AsyncEvent) bool { return p.Type == e.Type && p.Info == e.Info }

// AsyncEventRequest is the command that an event completes.
func AsyncEventRequest() Command { return Command{Opcode: OpAsyncEvent, SGL: NoSGL()} }

// DecodeAsyncEvent takes it.
func DecodeAsyncEvent(dw0 uint32) AsyncEvent {
	return AsyncEvent{Type: EventType(dw0 & eventTypeMax), Info: uint8(dw0 >> 8), Log: LogID(dw0 >> 16)}
}

// DW0 encodes it.
func (p AsyncEvent) DW0() uint32 {
	return uint32(p.Type&eventTypeMax) | uint32(p.Info)<<8 | uint32(p.Log)<<16
}

func (p AsyncEvent) String() string {
	switch {
	case p.Is(EventPersistentError):
		return "persistent internal error"
	case p.Is(EventNamespaceChanged):
		return "namespaces changed"
	case p.Is(EventANAChanged):
		return "ANA states changed"
	case p.Is(EventDiscoveryChanged):
		return "discovery log changed"
	case p.Is(EventReservation):
		return "reservation log available"
	}
	return fmt.Sprintf("event of type %d, info %d, log page %#02x", p.Type, p.Info, uint8(p.Log))
}
