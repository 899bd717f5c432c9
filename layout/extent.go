package layout

import (
	"fmt"
	"math"
)

// Extent is bytes of a data file that lie together on an NVMe namespace (RFC 8154 section 2.3, by way of RFC 9561).
type Extent struct {
	Off, Len int64 // in the data file; multiples of the namespace's block
	Addr     int64 // byte on the namespace where it begins, a multiple of the block; 0 of a hole
	State    ExtentState
}

// ExtentState is what an extent is good for. The numbers are those of RFC 8154's PNFS_SCSI_*_DATA.
type ExtentState uint8

const (
	ExtentReadWrite ExtentState = iota // read it, write it
	ExtentRead                         // read it
	ExtentInvalid                      // it reads as zeros, without I/O; who writes it writes whole blocks and commits them
	ExtentNone                         // a hole: it reads as zeros, without I/O
	extentStateEnd
)

func (s ExtentState) String() string {
	switch s {
	case ExtentReadWrite:
		return "read-write"
	case ExtentRead:
		return "read"
	case ExtentInvalid:
		return "invalid"
	case ExtentNone:
		return "none"
	}
	return fmt.Sprintf("extent state(%d)", uint8(s))
}

// MinBlock is the smallest block that a namespace can have: what every offset of an extent is a multiple of.
const MinBlock = 512

// End is the first byte after the extent.
func (e *Extent) End() int64 { return e.Off + e.Len }

func validateExtents(extents []Extent) error {
	if len(extents) > MaxExtents {
		return fmt.Errorf("%d extents, want at most %d", len(extents), MaxExtents)
	}
	var end int64
	for i := range extents {
		e := &extents[i]
		switch {
		case e.State >= extentStateEnd:
			return fmt.Errorf("extent %d: %v", i, e.State)
		case e.Len <= 0 || e.Off < end || e.Addr < 0 || e.Len > math.MaxInt64-max(e.Off, e.Addr):
			return fmt.Errorf("extent %d: %d bytes at %d, on the namespace at %d; the one before ends at %d", i, e.Len, e.Off, e.Addr, end)
		case (e.Off|e.Len|e.Addr)%MinBlock != 0:
			return fmt.Errorf("extent %d: %d bytes at %d, on the namespace at %d: no multiples of %d", i, e.Len, e.Off, e.Addr, MinBlock)
		case e.State == ExtentNone && e.Addr != 0:
			return fmt.Errorf("extent %d: a hole at %d on the namespace", i, e.Addr)
		}
		end = e.End()
	}
	return nil
}
