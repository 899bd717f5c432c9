package xdr

import "encoding/binary"

// zeros is what Padding hands out; it is never written.
var zeros [3]byte

// Pad returns the number of zero bytes (0 to 3) that follow n bytes of opaque data on the wire.
func Pad(n int) int { return -n & 3 }

// Padded returns n rounded up to whole units of four bytes: n + Pad(n).
func Padded(n int) int { return (n + 3) &^ 3 }

// Padding returns the Pad(n) zero bytes themselves, for a writev that ends with a payload. The slice is shared and must
// not be written to.
func Padding(n int) []byte { return zeros[:Pad(n)] }

// AppendUint32 appends an unsigned integer, which is also the form of an enum (RFC 4506 4.2 and 4.3).
func AppendUint32(b []byte, v uint32) []byte { return binary.BigEndian.AppendUint32(b, v) }

// AppendUint64 appends an unsigned hyper integer (RFC 4506 4.5).
func AppendUint64(b []byte, v uint64) []byte { return binary.BigEndian.AppendUint64(b, v) }

// AppendBool appends 0 or 1 as four bytes (RFC 4506 4.4).
func AppendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 0, 0, 0, 1)
	}
	return append(b, 0, 0, 0, 0)
}

// AppendFixedOpaque appends p and its padding without a length (RFC 4506 4.9).
func AppendFixedOpaque(b, p []byte) []byte {
	b = append(b, p...)
	return append(b, Padding(len(p))...)
}

// AppendOpaque appends the length of p, p and its padding (RFC 4506 4.10). The caller keeps len(p) below 4 GiB.
func AppendOpaque(b, p []byte) []byte {
	b = AppendUint32(b, uint32(len(p)))
	return AppendFixedOpaque(b, p)
}

// AppendString is AppendOpaque for a string (RFC 4506 4.11).
func AppendString(b []byte, s string) []byte {
	b = AppendUint32(b, uint32(len(s)))
	b = append(b, s...)
	return append(b, Padding(len(s))...)
}
