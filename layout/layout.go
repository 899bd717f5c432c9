package layout

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/netip"
)

// FileID is the number of an inode in a volume. It is never used twice and is what stat(2) shows as st_ino.
type FileID uint64

// RootID is the inode of the volume's root directory.
const RootID FileID = 1

// A volume has shards, among which its metadata services divide the inodes. Numbers are given out in chunks of ShardChunk that
// lie one after the other, and the inodes of a chunk are all in one shard.
const (
	ShardChunk = 4096
	MaxShards  = 1024
)

// ShardOf is the shard, 0 to shards-1, of an inode in a volume that has so many, at least one.
func ShardOf(id FileID, shards int) int { return int(uint64(id) / ShardChunk % uint64(shards)) }

// DeviceID names a device: one data server, whatever its addresses (RFC 8881 section 3.3.14).
type DeviceID [16]byte

func (id DeviceID) String() string { return hex.EncodeToString(id[:]) }

// Stateid is the NFSv4 stateid a layout carries for each data server; NFSv3 has no use for it.
type Stateid [16]byte

// IOMode is what a layout may be used for (RFC 8881 section 3.3.20).
type IOMode uint32

const (
	IOModeRead IOMode = 1
	IOModeRW   IOMode = 2
	IOModeAny  IOMode = 3 // in returns and recalls only
)

func (m IOMode) String() string {
	switch m {
	case IOModeRead:
		return "read"
	case IOModeRW:
		return "rw"
	case IOModeAny:
		return "any"
	}
	return fmt.Sprintf("iomode(%d)", uint32(m))
}

// Flags are the layout-wide flags of RFC 8435 section 5.1.
type Flags uint32

const (
	FlagNoLayoutCommit Flags = 1 << iota
	FlagNoIOThruMDS
	FlagNoReadIO
	FlagWriteOneMirror
)

// ToEOF as the length of a range means: to the end of the file, wherever that is.
const ToEOF int64 = math.MaxInt64

// Range is the bytes [Off, Off+Len) of a file; Len may be ToEOF.
type Range struct {
	Off, Len int64
}

// End is the first byte after the range, at most math.MaxInt64.
func (r Range) End() int64 {
	if r.Len > math.MaxInt64-r.Off {
		return math.MaxInt64
	}
	return r.Off + r.Len
}

// Contains reports whether the n bytes at off lie in the range.
func (r Range) Contains(off, n int64) bool {
	return off >= r.Off && n <= r.End()-off
}

// Overlaps reports whether the ranges share a byte.
func (r Range) Overlaps(o Range) bool {
	return r.Len > 0 && o.Len > 0 && r.Off < o.End() && o.Off < r.End()
}

func (r Range) String() string {
	if r.Len == ToEOF {
		return fmt.Sprintf("[%d, end)", r.Off)
	}
	return fmt.Sprintf("[%d, %d)", r.Off, r.End())
}

// Credential is an AUTH_SYS identity without supplementary groups: what a data server is shown (RFC 8435 section 2.2).
type Credential struct {
	UID, GID uint32
}

// DataFile is one stripe column of one mirror: a file on a data server.
type DataFile struct {
	Device     DeviceID
	Efficiency uint32 // higher is better (RFC 8435 section 5.1)
	Stateid    Stateid
	// Handles holds one file handle per protocol version the device offers (Device.Versions), in the same order.
	Handles [][]byte
	// Cred is the synthetic identity to use. A READ layout's owns nothing and has only the data file's group.
	Cred Credential
	// State says what this copy of the column is good for. RFC 8435 leaves mirrors that are out of date out of a layout as a
	// whole; here it is each column's copies.
	State CopyState
	// Extents say where the data file's bytes are on a device that is an NVMe namespace: in the order of their offsets, of which no
	// two extents have the same. What is in no extent is a hole. Other devices have none.
	Extents []Extent
	// Generation is the data file's when the extents were told; it goes back with what was written there. It is 1 at least, also of a
	// data file without extents, and 0 on other devices.
	Generation uint64
	// Ended is closed when the session has ended in which a layout on a namespace was granted: nothing is sent by it any more, also in the next
	// session, as its blocks may be another file's by then. nil: never.
	Ended <-chan struct{}
}

// OnNamespace reports whether the data file lies on an NVMe namespace.
func (f *DataFile) OnNamespace() bool { return f.Generation != 0 || len(f.Extents) > 0 }

// CopyState is what one of the copies of a stripe column is good for.
type CopyState uint8

const (
	CopyGood    CopyState = iota // read it, write it
	CopyStale                    // it lacks a write: it is neither read nor written, ever again
	CopyFilling                  // it is being made: writes go to it as well, it is not read
	copyStateEnd
)

func (s CopyState) String() string {
	switch s {
	case CopyGood:
		return "good"
	case CopyStale:
		return "stale"
	case CopyFilling:
		return "filling"
	}
	return fmt.Sprintf("copy state(%d)", uint8(s))
}

// Mirror is one copy of the segment's data; server i holds the units u with u mod len(Servers) == i.
type Mirror struct {
	Servers []DataFile
}

// Efficiency of a mirror is the sum over its servers (RFC 8435 section 5.1).
func (m *Mirror) Efficiency() uint64 {
	var sum uint64
	for i := range m.Servers {
		sum += uint64(m.Servers[i].Efficiency)
	}
	return sum
}

// Segment is a layout for one range of one file.
type Segment struct {
	Range
	IOMode     IOMode
	StripeUnit int64 // bytes; unimportant when there is one server per mirror
	Mirrors    []Mirror
	Flags      Flags
	StatsHint  uint32 // seconds between layoutstats, 0 = the client's choice
	// OnNamespaces says that data files of it lie on NVMe namespaces (DataFile.OnNamespace).
	OnNamespaces bool
	// Shared says that other clients may write the same bytes: a write is acknowledged once it is stable, and nothing is
	// kept of it that could be sent again.
	Shared bool
	// Exacting says that what is synced is to be at several copies of each column (Policy.MinCopies), and Few that
	// some column has fewer good ones now.
	Exacting, Few bool
}

// Limits that Validate holds segments and devices to; they bound what a decoder may allocate.
const (
	MaxMirrors    = 4096
	MaxServers    = 4096
	MaxVersions   = 16
	MaxAddresses  = 64
	MaxHandle     = 128 // NFS4_FHSIZE; an NFSv3 handle has at most 64
	MaxExtents    = 1 << 14
	MinStripeUnit = 4 << 10
	MaxStripeUnit = 1 << 30
)

// ErrBeyondSegment tells that a range leaves the segment it was to be split by.
var ErrBeyondSegment = errors.New("range leaves the layout segment")

// Width is the number of data servers per mirror.
func (s *Segment) Width() int { return len(s.Mirrors[0].Servers) }

// ServerAt is the index, in every mirror, of the data server that holds byte off of the file (RFC 8435 section 6).
func (s *Segment) ServerAt(off int64) int {
	w := int64(s.Width())
	if w == 1 || s.StripeUnit == 0 {
		return 0
	}
	return int(off / s.StripeUnit % w)
}

// Validate checks what RFC 8435 demands of a segment, so that later code can trust it.
func (s *Segment) Validate() error {
	switch {
	case s.Off < 0 || s.Len <= 0:
		return fmt.Errorf("layout segment: bad range: offset %d, length %d", s.Off, s.Len)
	case s.IOMode != IOModeRead && s.IOMode != IOModeRW:
		return fmt.Errorf("layout segment: bad iomode %d", s.IOMode)
	case len(s.Mirrors) == 0 || len(s.Mirrors) > MaxMirrors:
		return fmt.Errorf("layout segment: %d mirrors, want 1 to %d", len(s.Mirrors), MaxMirrors)
	}
	w := len(s.Mirrors[0].Servers)
	if w == 0 || w > MaxServers {
		return fmt.Errorf("layout segment: %d data servers in a mirror, want 1 to %d", w, MaxServers)
	}
	if s.StripeUnit < 0 || w > 1 && s.StripeUnit == 0 {
		return fmt.Errorf("layout segment: stripe unit %d with %d data servers", s.StripeUnit, w)
	}
	for i := range s.Mirrors {
		if n := len(s.Mirrors[i].Servers); n != w {
			return fmt.Errorf("layout segment: mirror %d has %d data servers, mirror 0 has %d", i, n, w)
		}
		for j := range s.Mirrors[i].Servers {
			if err := s.Mirrors[i].Servers[j].validate(); err != nil {
				return fmt.Errorf("layout segment: mirror %d, server %d: %w", i, j, err)
			}
		}
	}
	for j := range w {
		good := false
		for i := range s.Mirrors {
			good = good || s.Mirrors[i].Servers[j].State == CopyGood
		}
		if !good {
			return fmt.Errorf("layout segment: no good copy of column %d", j)
		}
	}
	return nil
}

func (f *DataFile) validate() error {
	if len(f.Handles) == 0 || len(f.Handles) > MaxVersions {
		return fmt.Errorf("%d file handles, want 1 to %d", len(f.Handles), MaxVersions)
	}
	for _, h := range f.Handles {
		if len(h) == 0 || len(h) > MaxHandle {
			return fmt.Errorf("file handle of %d bytes, want 1 to %d", len(h), MaxHandle)
		}
	}
	if f.State >= copyStateEnd {
		return fmt.Errorf("%v", f.State)
	}
	return validateExtents(f.Extents)
}

// Layout is what a client holds of one file: segments in no particular order, possibly overlapping.
type Layout struct {
	Segments []Segment
}

// Find returns a segment that may be used for m and holds the byte at off, and how many of the n bytes there it
// covers; nil and 0 if the layout has none. Of several it returns the one that covers most.
func (l *Layout) Find(m IOMode, off, n int64) (*Segment, int64) {
	var best *Segment
	var most int64
	for i := range l.Segments {
		s := &l.Segments[i]
		if m == IOModeRW && s.IOMode != IOModeRW || m == IOModeRead && s.IOMode == IOModeRW && s.Flags&FlagNoReadIO != 0 {
			continue
		}
		if !s.Contains(off, 1) {
			continue
		}
		if c := min(n, s.End()-off); c > most {
			best, most = s, c
		}
	}
	return best, most
}

// Version is a protocol a device speaks (RFC 8435 section 4.1).
type Version struct {
	Version, Minor uint32
	RSize, WSize   uint32 // largest READ and WRITE payload, bytes
	TightlyCoupled bool
}

// NetAddr is one address of a device.
type NetAddr struct {
	NetID string // "tcp", "tcp6", "rdma", "rdma6"
	Addr  netip.AddrPort
}

// Device is a data server, or an NVMe namespace: where it is and what it speaks.
type Device struct {
	ID       DeviceID
	Addrs    []NetAddr
	Versions []Version // of NFS; a namespace has none
	// Namespace is what the device is if it is one; Addrs are ports of its subsystem then.
	Namespace *Namespace
}

// Namespace is an NVMe namespace that is a device: how it is found, and known again wherever it is reached.
type Namespace struct {
	NQN   string // of its subsystem
	NSID  uint32
	NGUID [16]byte // zero if it has none, as the two below; it has at least one of them
	EUI64 [8]byte
	UUID  [16]byte
	Block int64 // bytes
	// Reserved says that the service keeps a reservation: who wants to read or write registers with the session's key before.
	Reserved bool
}

// MaxNQN is the length of an NVMe Qualified Name (NVMe Base 4.5).
const MaxNQN = 223

func (n *Namespace) validate() error {
	switch {
	case n.NQN == "" || len(n.NQN) > MaxNQN:
		return fmt.Errorf("subsystem name of %d bytes, want 1 to %d", len(n.NQN), MaxNQN)
	case n.NSID == 0 || n.NSID == math.MaxUint32:
		return fmt.Errorf("namespace id %d", n.NSID)
	case n.NGUID == [16]byte{} && n.EUI64 == [8]byte{} && n.UUID == [16]byte{}:
		return errors.New("a namespace without an identifier")
	case n.Block < MinBlock || n.Block&(n.Block-1) != 0:
		return fmt.Errorf("blocks of %d bytes", n.Block)
	}
	return nil
}

// Validate checks that a device can be used at all.
func (d *Device) Validate() error {
	if len(d.Addrs) == 0 || len(d.Addrs) > MaxAddresses {
		return fmt.Errorf("device %s: %d addresses, want 1 to %d", d.ID, len(d.Addrs), MaxAddresses)
	}
	if d.Namespace != nil {
		if err := d.Namespace.validate(); err != nil {
			return fmt.Errorf("device %s: %w", d.ID, err)
		}
	} else if len(d.Versions) == 0 || len(d.Versions) > MaxVersions {
		return fmt.Errorf("device %s: %d protocol versions, want 1 to %d", d.ID, len(d.Versions), MaxVersions)
	}
	for _, a := range d.Addrs {
		if !a.Addr.IsValid() || a.Addr.Port() == 0 {
			return fmt.Errorf("device %s: bad address %q", d.ID, a.Addr)
		}
	}
	return nil
}
