package nvmetcp

import "hash/crc32"

// castagnoli makes hash/crc32 use the CPU's instruction, where it has one.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Digest is the CRC-32C of b. Data in pieces is digested with UpdateDigest, from 0.
func Digest(b []byte) uint32 { return crc32.Update(0, castagnoli, b) }

// UpdateDigest is the digest of what d is the digest of, followed by b.
func UpdateDigest(d uint32, b []byte) uint32 { return crc32.Update(d, castagnoli, b) }

// AppendDigest appends the digest of of to b.
func AppendDigest(b, of []byte) []byte { return le.AppendUint32(b, Digest(of)) }

// VerifyDigest tells whether the first DigestSize bytes of d are the digest of b.
func VerifyDigest(d, b []byte) bool { return len(d) >= DigestSize && le.Uint32(d) == Digest(b) }
