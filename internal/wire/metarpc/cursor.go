package metarpc

import (
	"encoding/binary"
	"math"
)

// First bytes of the msgpack values that the protocol uses (msgpack specification, "Formats").
const (
	codeNil     = 0xc0
	codeFalse   = 0xc2
	codeTrue    = 0xc3
	codeBin8    = 0xc4
	codeBin16   = 0xc5
	codeBin32   = 0xc6
	codeUint8   = 0xcc
	codeUint16  = 0xcd
	codeUint32  = 0xce
	codeUint64  = 0xcf
	codeInt8    = 0xd0
	codeInt16   = 0xd1
	codeInt32   = 0xd2
	codeInt64   = 0xd3
	codeStr8    = 0xd9
	codeStr16   = 0xda
	codeStr32   = 0xdb
	codeArray16 = 0xdc
	codeArray32 = 0xdd
)

func isFixArray(code byte) bool { return code&0xf0 == 0x90 } // length in the low four bits
func isFixStr(code byte) bool   { return code&0xe0 == 0xa0 } // length in the low five bits
func isFixInt(code byte) bool   { return code < 0x80 || code >= 0xe0 }

// cursor reads msgpack values strictly and remembers the first thing that is wrong; after that everything reads as
// zero. It never allocates by a length it read.
type cursor struct {
	b     []byte
	err   error
	short bool // see shape.walk
}

func (c *cursor) fail(format string, args ...any) {
	if c.err == nil {
		c.err = malformed(format, args...)
	}
	c.b = nil
}

// take returns the next n bytes, or nil.
func (c *cursor) take(n uint64) []byte {
	if n > uint64(len(c.b)) {
		c.fail("%d bytes wanted, %d left", n, len(c.b))
		return nil
	}
	p := c.b[:n]
	c.b = c.b[n:]
	return p
}

// number reads n bytes as a big-endian number.
func (c *cursor) number(n uint64) uint64 {
	p := c.take(n)
	if p == nil {
		return 0
	}
	var full [8]byte
	copy(full[8-n:], p)
	return binary.BigEndian.Uint64(full[:])
}

func (c *cursor) code() byte { return byte(c.number(1)) }

// isNil takes a nil if one is next.
func (c *cursor) isNil() bool {
	if len(c.b) == 0 || c.b[0] != codeNil {
		return false
	}
	c.b = c.b[1:]
	return true
}

// array reads an array's length, which may be no more than there are bytes left: no element takes less than one.
func (c *cursor) array() int {
	var n uint64
	switch code := c.code(); {
	case isFixArray(code):
		n = uint64(code & 0x0f)
	case code == codeArray16:
		n = c.number(2)
	case code == codeArray32:
		n = c.number(4)
	default:
		c.fail("code %#x where an array belongs", code)
	}
	if n > uint64(len(c.b)) {
		c.fail("array of %d elements in %d bytes", n, len(c.b))
		return 0
	}
	return int(n)
}

// exactly reads the length of an array that must have n elements.
func (c *cursor) exactly(n int) {
	if got := c.array(); c.err == nil && got != n {
		c.fail("array of %d elements, want %d", got, n)
	}
}

// str reads a string, which may be any bytes.
func (c *cursor) str() []byte {
	switch code := c.code(); {
	case isFixStr(code):
		return c.take(uint64(code & 0x1f))
	case code == codeStr8:
		return c.take(c.number(1))
	case code == codeStr16:
		return c.take(c.number(2))
	case code == codeStr32:
		return c.take(c.number(4))
	default:
		c.fail("code %#x where a string belongs", code)
		return nil
	}
}

// bin reads a byte string.
func (c *cursor) bin() []byte {
	switch code := c.code(); code {
	case codeBin8:
		return c.take(c.number(1))
	case codeBin16:
		return c.take(c.number(2))
	case codeBin32:
		return c.take(c.number(4))
	default:
		c.fail("code %#x where bytes belong", code)
		return nil
	}
}

// bin16 reads the 16 bytes of an identity.
func (c *cursor) bin16() (id [16]byte) {
	if p := c.bin(); c.err == nil && len(p) != len(id) {
		c.fail("%d bytes where 16 belong", len(p))
	} else {
		copy(id[:], p)
	}
	return id
}

func (c *cursor) bool() bool {
	switch code := c.code(); code {
	case codeTrue:
		return true
	case codeFalse:
	default:
		c.fail("code %#x where a truth value belongs", code)
	}
	return false
}

// integer reads a number of any width: its two's complement bits and whether it is negative.
func (c *cursor) integer() (bits uint64, negative bool) {
	signed := func(v int64) (uint64, bool) { return uint64(v), v < 0 }
	switch code := c.code(); {
	case isFixInt(code):
		return signed(int64(int8(code)))
	case code == codeUint8:
		return c.number(1), false
	case code == codeUint16:
		return c.number(2), false
	case code == codeUint32:
		return c.number(4), false
	case code == codeUint64:
		return c.number(8), false
	case code == codeInt8:
		return signed(int64(int8(c.number(1))))
	case code == codeInt16:
		return signed(int64(int16(c.number(2))))
	case code == codeInt32:
		return signed(int64(int32(c.number(4))))
	case code == codeInt64:
		return signed(int64(c.number(8)))
	default:
		c.fail("code %#x where a number belongs", code)
		return 0, false
	}
}

// uint reads a number from 0 to 2^bits-1.
func (c *cursor) uint(bits int) uint64 {
	v, negative := c.integer()
	if c.err == nil && (negative || bits < 64 && v>>bits != 0) {
		c.fail("a number does not fit %d unsigned bits", bits)
	}
	if c.err != nil {
		return 0
	}
	return v
}

// int reads a signed number of the given width.
func (c *cursor) int(bits int) int64 {
	v, negative := c.integer()
	limit := uint64(math.MaxInt64) >> (64 - bits)
	if c.err == nil && (!negative && v > limit || negative && ^v > limit) {
		c.fail("a number does not fit %d signed bits", bits)
	}
	if c.err != nil {
		return 0
	}
	return int64(v)
}

// end checks that nothing is left.
func (c *cursor) end() error {
	if c.err == nil && len(c.b) != 0 {
		c.fail("%d bytes too many", len(c.b))
	}
	return c.err
}
