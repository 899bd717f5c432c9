package xdr

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// What can be wrong with the input. Decoder.Err wraps one of them, so errors.Is tells them apart.
var (
	// ErrTruncated: the input ends before the field does, its padding included.
	ErrTruncated = errors.New("input ends too early")
	// ErrTooLong: a length on the wire exceeds the maximum of its field.
	ErrTooLong = errors.New("length exceeds its maximum")
	// ErrInvalid: a value that its type does not have, such as a bool of 2.
	ErrInvalid = errors.New("invalid value")
)

// Error is the first thing that went wrong in a Decoder.
type Error struct {
	Offset int   // bytes of input that had been taken
	Err    error // wraps ErrTruncated, ErrTooLong or ErrInvalid, or is what was given to Fail
}

func (e *Error) Error() string { return fmt.Sprintf("xdr: at byte %d: %v", e.Offset, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Decoder is a cursor over input that it neither changes nor keeps beyond its own life. After the first error every
// method returns zero values, so the caller checks Err once, behind the last field. The zero Decoder has empty input.
//
// A Decoder is meant to live in a local variable: none of its methods lets it, or anything but the input, escape.
type Decoder struct {
	rest []byte
	size int // length of the whole input; size - len(rest) is the offset
	err  error
}

// NewDecoder returns a Decoder at the start of b.
func NewDecoder(b []byte) Decoder { return Decoder{rest: b, size: len(b)} }

// Err returns nil or an *Error with the first thing that was wrong. Input left over is no error; see Rest.
func (d *Decoder) Err() error { return d.err }

// Fail records err, unless an error was recorded before, and ends the decoding. It is for the layers above, which
// know more about what a value may be.
func (d *Decoder) Fail(err error) {
	if d.err == nil {
		d.err = &Error{Offset: d.Offset(), Err: err}
	}
	d.rest = nil
}

// Rest returns the input that no field has taken yet, without taking it: nil after an error. It aliases the input.
func (d *Decoder) Rest() []byte { return d.rest }

// Offset returns how many bytes have been taken. It means nothing after an error.
func (d *Decoder) Offset() int { return d.size - len(d.rest) }

// Uint32 takes an unsigned integer or an enum.
func (d *Decoder) Uint32() uint32 {
	if len(d.rest) < 4 {
		d.Fail(ErrTruncated)
		return 0
	}
	v := binary.BigEndian.Uint32(d.rest)
	d.rest = d.rest[4:]
	return v
}

// Uint64 takes an unsigned hyper integer.
func (d *Decoder) Uint64() uint64 {
	if len(d.rest) < 8 {
		d.Fail(ErrTruncated)
		return 0
	}
	v := binary.BigEndian.Uint64(d.rest)
	d.rest = d.rest[8:]
	return v
}

// Bool takes a bool, of which only 0 and 1 are valid.
func (d *Decoder) Bool() bool {
	v := d.Uint32()
	if v > 1 {
		d.Fail(fmt.Errorf("bool %d: %w", v, ErrInvalid))
		return false
	}
	return v == 1
}

// FixedOpaque takes n bytes and their padding, whose presence is checked and whose content is not: RFC 4506 3 asks
// for zeros, but no meaning hangs on them. The result aliases the input; it is nil after an error.
func (d *Decoder) FixedOpaque(n int) []byte {
	if n < 0 || n > len(d.rest) || Pad(n) > len(d.rest)-n {
		d.Fail(ErrTruncated)
		return nil
	}
	p := d.rest[:n:n]
	d.rest = d.rest[n+Pad(n):]
	return p
}

// Opaque takes a length of at most max, that many bytes, and their padding. The result aliases the input; it is nil
// after an error.
func (d *Decoder) Opaque(max int) []byte {
	n := d.Uint32()
	if uint64(n) > uint64(max) {
		d.Fail(fmt.Errorf("%d bytes where %d are allowed: %w", n, max, ErrTooLong))
		return nil
	}
	if uint64(n) > uint64(len(d.rest)) {
		d.Fail(ErrTruncated)
		return nil
	}
	return d.FixedOpaque(int(n))
}

// String is Opaque with a copy of the bytes as its result.
func (d *Decoder) String(max int) string { return string(d.Opaque(max)) }
