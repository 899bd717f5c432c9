// Package xdr encodes and decodes the External Data Representation of RFC 4506: big-endian units of four bytes.
//
// Encoding appends to a byte slice and cannot fail. Decoding goes through a Decoder, a cursor that remembers the first
// thing that was wrong, so that a decoder of a message reads as the list of its fields with one check at the end.
// Lengths are compared with the caller's maximum and with the remaining input before anything is allocated or sliced.
//
// The package knows nothing of messages; oncrpc and nfs3 are built on it. It does no I/O, keeps no state and
// everything in it may be used from several goroutines, except that one Decoder belongs to one goroutine.
package xdr
