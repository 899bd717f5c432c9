// Package nvmetcp encodes and decodes what crosses an NVMe/TCP connection, for both ends of it: PDUs, submission and
// completion queue entries, the Fabrics, admin and I/O commands that weft uses, and the structures that they carry. The
// package has no sockets, no goroutines and no clock. It follows the NVMe Base Specification 2.0, the NVMe/TCP Transport
// Specification 1.0 and the NVM Command Set Specification 1.0. Zoned namespaces and metadata are left out.
//
// # Fixed part and payload
//
// A PDU is its header, the header's digest, padding, data and the data's digest; all but the header may be missing. Encoders
// append what stands before the data, the digest and the padding included. The sender then sends the data from where it lies, and
// after it what AppendDigest makes of it if data digests are on. A receiver reads
//
//   - HeaderSize bytes and gives them to Receiver.Decode, which knows what the two ends agreed on,
//   - the rest of Header.Before bytes, and gives all of these to Header.Verify and then to the Decode of the PDU,
//   - Header.Data bytes, straight to where they belong,
//   - Header.DataDigest bytes, 0 or 4, and compares them with VerifyDigest.
//
// # What a decoder promises
//
// A PDU that decodes has a header as long as its type says, goes in the right direction, carries the digests that were
// agreed on, holds no more data than the receiver allows, has its data where alignment wants it, and its lengths agree with
// one another. What it says about commands and buffers (command identifiers, offsets into a command's data) is for those to
// check who know them. Bits and bytes that the specification reserves are ignored, and zero when encoded.
//
// PDU errors are *ProtocolError, which has what a TermReq says. Others wrap ErrInvalid, and ErrShort where the input ended
// early. What is written in a command is not an error of the codec but for a controller to answer: such checks return a
// Status, or a *ParamError for Connect.
//
// Numbers that are 0's based on the wire are counts here, from 1. Bytes of a string that is padded come without the padding;
// apart from NQNs and addresses they may be anything, so print them with %q.
//
// Commands, completions and the headers of PDUs are decoded and encoded without allocation.
package nvmetcp
