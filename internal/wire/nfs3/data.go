package nfs3

import (
	"fmt"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// How many bytes to read before a payload can go to its place, without the record mark.
const (
	// ReadReplyHead and ReadReplyHeadAttrs are where the payload of a READ reply begins when the RPC verifier is empty,
	// without and with attributes.
	ReadReplyHead      = oncrpc.AcceptedSize + ReadHead
	ReadReplyHeadAttrs = oncrpc.AcceptedSize + ReadHeadAttrs

	// WriteCallHeadMin is the least offset at which the payload of a WRITE call can begin (AUTH_NONE, empty handle), so
	// that many bytes never take payload with them. WriteCallHeadMax is the greatest.
	WriteCallHeadMin = oncrpc.CallMin + 4 + 20
	WriteCallHeadMax = oncrpc.CallMax + WriteHeadMax
)

// ReadArgs is the arguments of READ (RFC 1813 3.3.6).
type ReadArgs struct {
	FH     FileHandle
	Offset uint64
	Count  uint32
}

// Append encodes the message.
func (a *ReadArgs) Append(b []byte) []byte {
	b = a.FH.Append(b)
	b = xdr.AppendUint64(b, a.Offset)
	return xdr.AppendUint32(b, a.Count)
}

// Decode takes the message.
func (a *ReadArgs) Decode(d *xdr.Decoder) error {
	a.FH.Decode(d)
	a.Offset = d.Uint64()
	a.Count = d.Uint32()
	return d.Err()
}

// ReadRes is the results of READ without the data.
type ReadRes struct {
	Status Status
	Attr   PostOpAttr
	Count  uint32 // bytes of payload
	EOF    bool   // of this data file, at that moment
}

// AppendHead encodes everything before the payload. With OK the caller sends Count bytes and xdr.Padding(Count)
// behind it; a failure ends here.
func (r *ReadRes) AppendHead(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	if r.Status != OK {
		return b
	}
	b = xdr.AppendUint32(b, r.Count)
	b = xdr.AppendBool(b, r.EOF)
	return xdr.AppendUint32(b, r.Count)
}

// DecodeHead takes everything before the payload. more is how many bytes of the record lie beyond the input of d, for
// a head that is decoded while the rest is in the socket; 0 if d has it all.
//
// After nil and OK, d.Rest is where the payload begins: Count bytes, then xdr.Pad(Count), and it was checked that the
// record has them all and that the two counts on the wire agree. That Count is not more than was asked for is left to
// the caller. With another Status Count is 0.
func (r *ReadRes) DecodeHead(d *xdr.Decoder, more int) error {
	*r = ReadRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	r.Count = d.Uint32()
	r.EOF = d.Bool()
	checkPayload(d, r.Count, more)
	return d.Err()
}

// ReadHeadLen tells how long the head of the results of READ is, from the first eight bytes of them: ReadHead or
// ReadHeadAttrs with OK, and 8 or 92 otherwise.
func ReadHeadLen(res []byte) (int, error) {
	d := xdr.NewDecoder(res)
	n := 8
	if Status(d.Uint32()) == OK {
		n = ReadHead
	}
	if d.Bool() {
		n += FattrSize
	}
	return n, d.Err()
}

// checkPayload takes the length of a payload and checks it against count and against what is left of the record.
func checkPayload(d *xdr.Decoder, count uint32, more int) {
	n := d.Uint32()
	if d.Err() != nil {
		return
	}
	if n != count {
		d.Fail(fmt.Errorf("count %d with %d bytes of data: %w", count, n, xdr.ErrInvalid))
		return
	}
	if left := int64(len(d.Rest())) + int64(more); (int64(n)+3)&^3 > left {
		d.Fail(fmt.Errorf("%d bytes of data in %d: %w", n, left, xdr.ErrTruncated))
	}
}

// WriteArgs is the arguments of WRITE (RFC 1813 3.3.7) without the data.
type WriteArgs struct {
	FH     FileHandle
	Offset uint64
	Count  uint32 // bytes of payload
	Stable Stable
}

// AppendHead encodes everything before the payload. The caller sends Count bytes and xdr.Padding(Count) behind it.
func (a *WriteArgs) AppendHead(b []byte) []byte {
	b = a.FH.Append(b)
	b = xdr.AppendUint64(b, a.Offset)
	b = xdr.AppendUint32(b, a.Count)
	b = xdr.AppendUint32(b, uint32(a.Stable))
	return xdr.AppendUint32(b, a.Count)
}

// DecodeHead takes everything before the payload. more is how many bytes of the record lie beyond the input of d, for
// a head that is decoded while the rest is in the socket; 0 if d has it all.
//
// After nil, d.Rest is where the payload begins: Count bytes, then xdr.Pad(Count), and it was checked that the record
// has them all and that the two counts on the wire agree.
func (a *WriteArgs) DecodeHead(d *xdr.Decoder, more int) error {
	a.FH.Decode(d)
	a.Offset = d.Uint64()
	a.Count = d.Uint32()
	a.Stable = enum(d, "stable_how", Unstable, FileSync)
	checkPayload(d, a.Count, more)
	return d.Err()
}

// WriteRes is the results of WRITE.
type WriteRes struct {
	Status    Status
	Wcc       WccData
	Count     uint32 // bytes written, perhaps fewer than were sent
	Committed Stable // at least what was asked for, if the server is sound
	Verf      WriteVerf
}

// Append encodes the message.
func (r *WriteRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Wcc.append(b)
	if r.Status != OK {
		return b
	}
	b = xdr.AppendUint32(b, r.Count)
	b = xdr.AppendUint32(b, uint32(r.Committed))
	return append(b, r.Verf[:]...)
}

// Decode takes the message.
func (r *WriteRes) Decode(d *xdr.Decoder) error {
	*r = WriteRes{Status: Status(d.Uint32())}
	r.Wcc.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	r.Count = d.Uint32()
	r.Committed = enum(d, "stable_how", Unstable, FileSync)
	decodeVerf(d, (*[VerfSize]byte)(&r.Verf))
	return d.Err()
}

// CommitArgs is the arguments of COMMIT (RFC 1813 3.3.21). Count 0 means from Offset to the end of the file.
type CommitArgs struct {
	FH     FileHandle
	Offset uint64
	Count  uint32
}

// Append encodes the message.
func (a *CommitArgs) Append(b []byte) []byte {
	b = a.FH.Append(b)
	b = xdr.AppendUint64(b, a.Offset)
	return xdr.AppendUint32(b, a.Count)
}

// Decode takes the message.
func (a *CommitArgs) Decode(d *xdr.Decoder) error {
	a.FH.Decode(d)
	a.Offset = d.Uint64()
	a.Count = d.Uint32()
	return d.Err()
}

// CommitRes is the results of COMMIT.
type CommitRes struct {
	Status Status
	Wcc    WccData
	Verf   WriteVerf
}

// Append encodes the message.
func (r *CommitRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Wcc.append(b)
	if r.Status != OK {
		return b
	}
	return append(b, r.Verf[:]...)
}

// Decode takes the message.
func (r *CommitRes) Decode(d *xdr.Decoder) error {
	*r = CommitRes{Status: Status(d.Uint32())}
	r.Wcc.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	decodeVerf(d, (*[VerfSize]byte)(&r.Verf))
	return d.Err()
}
