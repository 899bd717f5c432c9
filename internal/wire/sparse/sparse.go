package sparse

import (
	"fmt"
	"math"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// The program.
const (
	Program = 0x20776674
	Version = 1
)

// Proc is a procedure.
type Proc uint32

// The procedures.
const (
	ProcNull Proc = iota
	ProcAllocate
	ProcDeallocate
	ProcSeek
)

var procNames = [...]string{"NULL", "ALLOCATE", "DEALLOCATE", "SEEK"}

func (p Proc) String() string {
	if int(p) < len(procNames) {
		return procNames[p]
	}
	return fmt.Sprintf("sparse procedure %d", uint32(p))
}

// Column says which bytes of a range are meant: those of the units u with u mod Count == Index, or all if Count is at most
// 1. A decoded one can be trusted: Unit is 1 to math.MaxInt64 and Index less than Count if there is more than one.
type Column struct {
	Unit         uint64 // bytes
	Count, Index uint32
}

func (c *Column) append(b []byte) []byte {
	b = xdr.AppendUint64(b, c.Unit)
	b = xdr.AppendUint32(b, c.Count)
	return xdr.AppendUint32(b, c.Index)
}

func (c *Column) decode(d *xdr.Decoder) {
	c.Unit = d.Uint64()
	c.Count = d.Uint32()
	c.Index = d.Uint32()
	if d.Err() == nil && c.Count > 1 && (c.Unit == 0 || c.Unit > math.MaxInt64 || c.Index >= c.Count) {
		d.Fail(fmt.Errorf("column %d of %d with units of %d bytes: %w", c.Index, c.Count, c.Unit, xdr.ErrInvalid))
	}
}

// RangeArgs is the arguments of DEALLOCATE, and the beginning of those of the others.
type RangeArgs struct {
	FH          nfs3.FileHandle
	Off, Length uint64
	Column      Column
}

// Append encodes the message.
func (a *RangeArgs) Append(b []byte) []byte {
	b = a.FH.Append(b)
	b = xdr.AppendUint64(b, a.Off)
	b = xdr.AppendUint64(b, a.Length)
	return a.Column.append(b)
}

// Decode takes the message.
func (a *RangeArgs) Decode(d *xdr.Decoder) error {
	a.FH.Decode(d)
	a.Off = d.Uint64()
	a.Length = d.Uint64()
	a.Column.decode(d)
	return d.Err()
}

// AllocateArgs is the arguments of ALLOCATE.
type AllocateArgs struct {
	RangeArgs
	KeepSize bool
}

// Append encodes the message.
func (a *AllocateArgs) Append(b []byte) []byte {
	b = a.RangeArgs.Append(b)
	return xdr.AppendBool(b, a.KeepSize)
}

// Decode takes the message.
func (a *AllocateArgs) Decode(d *xdr.Decoder) error {
	a.RangeArgs.Decode(d)
	a.KeepSize = d.Bool()
	return d.Err()
}

// RangeRes is the results of ALLOCATE and DEALLOCATE. Without OK there is nothing but the status.
type RangeRes struct {
	Status nfs3.Status
	Off    uint64 // all before it is done
}

// Append encodes the message.
func (r *RangeRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	if r.Status != nfs3.OK {
		return b
	}
	return xdr.AppendUint64(b, r.Off)
}

// Decode takes the message.
func (r *RangeRes) Decode(d *xdr.Decoder) error {
	*r = RangeRes{Status: nfs3.Status(d.Uint32())}
	if r.Status == nfs3.OK {
		r.Off = d.Uint64()
	}
	return d.Err()
}

// What is what a SEEK looks for.
type What uint32

// What there is to find.
const (
	Data What = 0
	Hole What = 1
)

// SeekArgs is the arguments of SEEK.
type SeekArgs struct {
	RangeArgs
	What What
}

// Append encodes the message.
func (a *SeekArgs) Append(b []byte) []byte {
	b = a.RangeArgs.Append(b)
	return xdr.AppendUint32(b, uint32(a.What))
}

// Decode takes the message.
func (a *SeekArgs) Decode(d *xdr.Decoder) error {
	a.RangeArgs.Decode(d)
	a.What = What(d.Uint32())
	if d.Err() == nil && a.What > Hole {
		d.Fail(fmt.Errorf("SEEK for %d: %w", uint32(a.What), xdr.ErrInvalid))
	}
	return d.Err()
}

// SeekRes is the results of SEEK. Without OK there is nothing but the status.
type SeekRes struct {
	Status nfs3.Status
	Found  bool
	Off    uint64 // where, or before which nothing was found
}

// Append encodes the message.
func (r *SeekRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	if r.Status != nfs3.OK {
		return b
	}
	b = xdr.AppendBool(b, r.Found)
	return xdr.AppendUint64(b, r.Off)
}

// Decode takes the message.
func (r *SeekRes) Decode(d *xdr.Decoder) error {
	*r = SeekRes{Status: nfs3.Status(d.Uint32())}
	if r.Status == nfs3.OK {
		r.Found = d.Bool()
		r.Off = d.Uint64()
	}
	return d.Err()
}
