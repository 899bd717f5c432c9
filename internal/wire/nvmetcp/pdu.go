package nvmetcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

var le = binary.LittleEndian

// What is wrong with bytes that do not decode. ErrShort is an ErrInvalid.
var (
	ErrInvalid = errors.New("not valid NVMe")
	ErrShort   = fmt.Errorf("%w: too short", ErrInvalid)
)

// short tells that b is less than the n bytes of what.
func short(what string, b []byte, n int) error {
	if len(b) >= n {
		return nil
	}
	return fmt.Errorf("%s: %d of %d bytes: %w", what, len(b), n, ErrShort)
}

// PDUType is a PDU's first byte.
type PDUType uint8

// The types.
const (
	PDUICReq       PDUType = 0x00
	PDUICResp      PDUType = 0x01
	PDUH2CTermReq  PDUType = 0x02
	PDUC2HTermReq  PDUType = 0x03
	PDUCapsuleCmd  PDUType = 0x04
	PDUCapsuleResp PDUType = 0x05
	PDUH2CData     PDUType = 0x06
	PDUC2HData     PDUType = 0x07
	PDUR2T         PDUType = 0x09
)

// Sizes of headers in bytes, without a digest. The first HeaderSize bytes are common to all.
const (
	HeaderSize      = 8
	ICSize          = 128
	TermReqSize     = 24
	CapsuleCmdSize  = HeaderSize + CommandSize
	CapsuleRespSize = HeaderSize + CompletionSize
	DataSize        = 24
	R2TSize         = 24

	MaxHeaderSize  = 252 // the longest Header.Before, digest and padding included
	MaxTermReqData = 128 // the offending header in a TermReq
	DigestSize     = 4
	MaxAlign       = 31 // of HPDA and CPDA
	MinMaxH2CData  = 4096
)

// Flags is a PDU's second byte.
type Flags uint8

// The flags.
const (
	FlagHeaderDigest Flags = 1 << 0
	FlagDataDigest   Flags = 1 << 1
	FlagLast         Flags = 1 << 2
	FlagSuccess      Flags = 1 << 3
)

// Role is an end of a connection.
type Role uint8

// The ends.
const (
	Host Role = iota
	Controller
)

func (r Role) String() string {
	if r == Host {
		return "host"
	}
	return "controller"
}

// kinds is what each type is like; a name says that the type exists.
var kinds = [...]struct {
	name    string
	to      Role
	hlen    uint8
	digest  bool // carries a header digest if they are on
	data    bool // may carry data
	must    bool // must carry data
	defined Flags
}{
	PDUICReq:       {name: "ICReq", to: Controller, hlen: ICSize},
	PDUICResp:      {name: "ICResp", to: Host, hlen: ICSize},
	PDUH2CTermReq:  {name: "H2CTermReq", to: Controller, hlen: TermReqSize},
	PDUC2HTermReq:  {name: "C2HTermReq", to: Host, hlen: TermReqSize},
	PDUCapsuleCmd:  {name: "CapsuleCmd", to: Controller, hlen: CapsuleCmdSize, digest: true, data: true, defined: FlagHeaderDigest | FlagDataDigest},
	PDUCapsuleResp: {name: "CapsuleResp", to: Host, hlen: CapsuleRespSize, digest: true, defined: FlagHeaderDigest},
	PDUH2CData:     {name: "H2CData", to: Controller, hlen: DataSize, digest: true, data: true, must: true, defined: FlagHeaderDigest | FlagDataDigest | FlagLast},
	PDUC2HData:     {name: "C2HData", to: Host, hlen: DataSize, digest: true, data: true, must: true, defined: FlagHeaderDigest | FlagDataDigest | FlagLast | FlagSuccess},
	PDUR2T:         {name: "R2T", to: Host, hlen: R2TSize, digest: true, defined: FlagHeaderDigest},
}

func (t PDUType) known() bool { return int(t) < len(kinds) && kinds[t].name != "" }

func (t PDUType) String() string {
	if t.known() {
		return kinds[t].name
	}
	return fmt.Sprintf("PDU type %#02x", uint8(t))
}

// FatalStatus is the reason that a TermReq gives (FES).
type FatalStatus uint16

// The reasons.
const (
	FatalHeaderField  FatalStatus = 1 // the PDU header has a bad field; FEI is its offset
	FatalSequence     FatalStatus = 2 // a PDU that was not to come now
	FatalHeaderDigest FatalStatus = 3 // FEI is the digest that was received
	FatalDataRange    FatalStatus = 4 // data out of the command's range
	FatalLimit        FatalStatus = 5 // more R2Ts, or more data, than allowed
	FatalUnsupported  FatalStatus = 6 // a parameter that is not supported; FEI is its offset
)

var fatalNames = [...]string{
	FatalHeaderField:  "invalid PDU header field",
	FatalSequence:     "PDU sequence error",
	FatalHeaderDigest: "header digest error",
	FatalDataRange:    "data transfer out of range",
	FatalLimit:        "R2T or data transfer limit exceeded",
	FatalUnsupported:  "unsupported parameter",
}

func (s FatalStatus) String() string {
	if int(s) < len(fatalNames) && fatalNames[s] != "" {
		return fatalNames[s]
	}
	return fmt.Sprintf("fatal error status %#x", uint16(s))
}

// ProtocolError is a PDU that must not be. The connection cannot go on; Fatal and Info are for the TermReq.
type ProtocolError struct {
	Fatal FatalStatus
	Info  uint32 // FEI
	What  string
}

func (e *ProtocolError) Error() string { return fmt.Sprintf("%s: %v", e.What, e.Fatal) }

// Unwrap is ErrInvalid.
func (e *ProtocolError) Unwrap() error { return ErrInvalid }

// badField is a ProtocolError for the header field at offset off.
func badField(off uint32, format string, args ...any) error {
	return &ProtocolError{Fatal: FatalHeaderField, Info: off, What: fmt.Sprintf(format, args...)}
}

// Framing is how one end lays out the PDUs that it sends, once ICReq and ICResp have been exchanged. The zero Framing is the
// one for those two.
type Framing struct {
	HeaderDigest bool
	DataDigest   bool
	Align        uint8 // the receiver's HPDA or CPDA: data starts at multiples of (Align+1)*4 bytes; at most MaxAlign
}

// pdo is where data begins after a header of hlen bytes, a digest included.
func (f Framing) pdo(hlen int) int {
	unit := (int(f.Align) + 1) * 4
	return (hlen + unit - 1) / unit * unit
}

// start appends the common header of a PDU with data bytes of data, and HLEN-8 zeros. The flags for digests are added.
func (f Framing) start(b []byte, t PDUType, flags Flags, data uint32) []byte {
	kind := &kinds[t]
	hlen := int(kind.hlen)
	pdo, plen := 0, hlen
	if kind.digest && f.HeaderDigest {
		flags |= FlagHeaderDigest
		plen += DigestSize
	}
	if data > 0 {
		if kind.data {
			pdo = f.pdo(plen)
			plen = pdo
			if f.DataDigest {
				flags |= FlagDataDigest
				plen += DigestSize
			}
		}
		plen += int(data)
	}
	b = append(b, byte(t), byte(flags), kind.hlen, byte(pdo))
	b = le.AppendUint32(b, uint32(plen))
	return append(b, zeros[:hlen-HeaderSize]...)
}

// finish appends the digest and the padding to the header that begins at b[at].
func (f Framing) finish(b []byte, at int) []byte {
	h := b[at:]
	if Flags(h[1])&FlagHeaderDigest != 0 {
		b = AppendDigest(b, h)
	}
	if pdo := int(h[3]); pdo > 0 {
		b = append(b, zeros[:at+pdo-len(b)]...)
	}
	return b
}

var zeros [MaxHeaderSize]byte

// Receiver is what one end accepts.
type Receiver struct {
	Framing           // what the sender was told to do
	Role       Role   // the end that receives
	MaxCapsule uint32 // bytes of data in a CapsuleCmd
	MaxData    uint32 // bytes of data in an H2CData or C2HData
}

// Header is a PDU's common header. One that Receiver.Decode returned is valid.
type Header struct {
	Type  PDUType
	Flags Flags // without the bits that the type does not define
	HLen  uint8 // bytes of the header, without digest
	PDO   uint8 // where the data begins, from the start of the PDU; 0 if there is none
	PLen  uint32
}

// Before is how many bytes stand before the data, those of the common header included: header, digest and padding. At most
// MaxHeaderSize.
func (h Header) Before() int {
	if h.PDO != 0 {
		return int(h.PDO)
	}
	return int(h.HLen) + h.Digest()
}

// Digest is the bytes of the header's digest, which begins at HLen: 0 or 4.
func (h Header) Digest() int {
	if h.Flags&FlagHeaderDigest != 0 {
		return DigestSize
	}
	return 0
}

// Data is the bytes of data. For a TermReq that is the offending header.
func (h Header) Data() int { return int(h.PLen) - h.Before() - h.DataDigest() }

// DataDigest is the bytes of the data's digest: 0 or 4.
func (h Header) DataDigest() int {
	if h.Flags&FlagDataDigest != 0 {
		return DigestSize
	}
	return 0
}

// Decode takes the common header from the first HeaderSize bytes of b and checks it, errors being *ProtocolError. When a PDU
// may come (ICReq first) is left to the caller.
func (r *Receiver) Decode(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, short("PDU header", b, HeaderSize)
	}
	h := Header{Type: PDUType(b[0]), Flags: Flags(b[1]), HLen: b[2], PDO: b[3], PLen: le.Uint32(b[4:])}
	if !h.Type.known() {
		return Header{}, badField(0, "%v is not known; the peer may not be an NVMe/TCP port", h.Type)
	}
	kind := &kinds[h.Type]
	h.Flags &= kind.defined
	switch {
	case kind.to != r.Role:
		return Header{}, badField(0, "%v sent to a %v", h.Type, r.Role)
	case h.HLen != kind.hlen:
		return Header{}, badField(2, "%v: HLEN is %d instead of %d", h.Type, h.HLen, kind.hlen)
	case kind.digest && (h.Flags&FlagHeaderDigest != 0) != r.HeaderDigest:
		return Header{}, badField(1, "%v: header digest %v, but agreed on %v", h.Type, !r.HeaderDigest, r.HeaderDigest)
	case h.Flags&FlagSuccess != 0 && h.Flags&FlagLast == 0:
		return Header{}, badField(1, "%v: SUCCESS without LAST_PDU", h.Type)
	}

	least := uint32(h.HLen) + uint32(h.Digest())
	most := least
	if h.Type == PDUH2CTermReq || h.Type == PDUC2HTermReq {
		most += MaxTermReqData
	}
	if !kind.data || !kind.must && h.PLen == least {
		if h.PLen < least || h.PLen > most {
			return Header{}, badField(4, "%v: PLEN is %d", h.Type, h.PLen)
		}
		if h.Flags&FlagDataDigest != 0 {
			return Header{}, badField(1, "%v: a digest of no data", h.Type)
		}
		h.PDO = 0 // reserved where there is no data
		return h, nil
	}

	limit := r.MaxData
	if h.Type == PDUCapsuleCmd {
		limit = r.MaxCapsule
	}
	unit := (uint32(r.Align) + 1) * 4
	before := uint64(h.PDO) + uint64(h.DataDigest())
	switch {
	case (h.Flags&FlagDataDigest != 0) != r.DataDigest:
		return Header{}, badField(1, "%v: data digest %v, but agreed on %v", h.Type, !r.DataDigest, r.DataDigest)
	case uint32(h.PDO) < least || uint32(h.PDO)%unit != 0:
		return Header{}, badField(3, "%v: PDO is %d with a header of %d bytes and an alignment of %d", h.Type, h.PDO, least, unit)
	case uint64(h.PLen) <= before:
		return Header{}, badField(4, "%v: PLEN is %d, but the data begins at %d", h.Type, h.PLen, h.PDO)
	case uint64(h.PLen)-before > uint64(limit):
		return Header{}, badField(4, "%v: PLEN is %d, which is more than %d bytes of data", h.Type, h.PLen, limit)
	}
	return h, nil
}

// Verify checks the header's digest, if it has one; b is what stands before the data. The error is a *ProtocolError.
func (h Header) Verify(b []byte) error {
	if h.Flags&FlagHeaderDigest == 0 {
		return nil
	}
	n := int(h.HLen)
	if len(b) < n+DigestSize {
		return short("PDU header with digest", b, n+DigestSize)
	}
	if !VerifyDigest(b[n:], b[:n]) {
		return &ProtocolError{FatalHeaderDigest, le.Uint32(b[n:]), fmt.Sprintf("%v: digest is not that of the header", h.Type)}
	}
	return nil
}

// body checks that h is of type t and b its whole header.
func (h Header) body(t PDUType, b []byte) error {
	if h.Type != t {
		return &ProtocolError{Fatal: FatalSequence, What: fmt.Sprintf("%v instead of %v", h.Type, t)}
	}
	if len(b) < int(kinds[t].hlen) {
		return short(kinds[t].name, b, int(kinds[t].hlen))
	}
	return nil
}

// Digests as ICReq and ICResp have them.
const (
	icHeaderDigest = 1 << 0
	icDataDigest   = 1 << 1
)

func icDigests(header, data bool) (d byte) {
	if header {
		d |= icHeaderDigest
	}
	if data {
		d |= icDataDigest
	}
	return d
}

// ICReq is the first PDU, the host's wishes.
type ICReq struct {
	Align        uint8 // HPDA: of data that comes to the host; at most MaxAlign
	HeaderDigest bool
	DataDigest   bool
	MaxR2T       uint32 // outstanding R2Ts per command; 1 to 2^32-1
}

// Append encodes the PDU.
func (p *ICReq) Append(b []byte) []byte {
	at := len(b)
	b = Framing{}.start(b, PDUICReq, 0, 0)
	h := b[at:]
	h[10] = p.Align
	h[11] = icDigests(p.HeaderDigest, p.DataDigest)
	le.PutUint32(h[12:], p.MaxR2T-1)
	return b
}

// Decode takes the PDU; b is its whole header.
func (p *ICReq) Decode(h Header, b []byte) error {
	if err := h.body(PDUICReq, b); err != nil {
		return err
	}
	if pfv := le.Uint16(b[8:]); pfv != 0 {
		return unsupported(8, "ICReq: PDU format version %d", pfv)
	}
	if b[10] > MaxAlign {
		return badField(10, "ICReq: HPDA is %d", b[10])
	}
	n := le.Uint32(b[12:])
	if n < math.MaxUint32 {
		n++
	}
	*p = ICReq{Align: b[10], HeaderDigest: b[11]&icHeaderDigest != 0, DataDigest: b[11]&icDataDigest != 0, MaxR2T: n}
	return nil
}

func unsupported(off uint32, format string, args ...any) error {
	return &ProtocolError{Fatal: FatalUnsupported, Info: off, What: fmt.Sprintf(format, args...)}
}

// ICResp is the controller's answer to ICReq.
type ICResp struct {
	Align        uint8 // CPDA: of data that goes to the controller; at most MaxAlign
	HeaderDigest bool
	DataDigest   bool
	MaxH2CData   uint32 // bytes of data in an H2CData; a multiple of 4, at least MinMaxH2CData
}

// Append encodes the PDU.
func (p *ICResp) Append(b []byte) []byte {
	at := len(b)
	b = Framing{}.start(b, PDUICResp, 0, 0)
	h := b[at:]
	h[10] = p.Align
	h[11] = icDigests(p.HeaderDigest, p.DataDigest)
	le.PutUint32(h[12:], p.MaxH2CData)
	return b
}

// Decode takes the PDU that answers req; b is its whole header. Digests that were not asked for are an error; fewer than that
// are the controller's right.
func (p *ICResp) Decode(h Header, b []byte, req *ICReq) error {
	if err := h.body(PDUICResp, b); err != nil {
		return err
	}
	*p = ICResp{Align: b[10], HeaderDigest: b[11]&icHeaderDigest != 0, DataDigest: b[11]&icDataDigest != 0, MaxH2CData: le.Uint32(b[12:])}
	switch pfv := le.Uint16(b[8:]); {
	case pfv != 0:
		return unsupported(8, "ICResp: PDU format version %d", pfv)
	case p.Align > MaxAlign:
		return badField(10, "ICResp: CPDA is %d", p.Align)
	case p.HeaderDigest && !req.HeaderDigest || p.DataDigest && !req.DataDigest:
		return badField(11, "ICResp: a digest is on that was not asked for")
	case p.MaxH2CData < MinMaxH2CData || p.MaxH2CData%4 != 0:
		return badField(12, "ICResp: MAXH2CDATA is %d", p.MaxH2CData)
	}
	return nil
}

// CapsuleCmd is a command, with in-capsule data perhaps.
type CapsuleCmd struct {
	Command Command
	Length  uint32 // bytes of in-capsule data
}

// Append encodes what stands before the data.
func (p *CapsuleCmd) Append(b []byte, f Framing) []byte {
	at := len(b)
	b = f.start(b, PDUCapsuleCmd, 0, p.Length)
	p.Command.put((*[CommandSize]byte)(b[at+HeaderSize:]))
	return f.finish(b, at)
}

// Decode takes the PDU; b is its whole header.
func (p *CapsuleCmd) Decode(h Header, b []byte) error {
	if err := h.body(PDUCapsuleCmd, b); err != nil {
		return err
	}
	p.Length = uint32(h.Data())
	return p.Command.Decode(b[HeaderSize:])
}

// CapsuleResp is a completion.
type CapsuleResp struct {
	Completion Completion
}

// Append encodes the PDU.
func (p *CapsuleResp) Append(b []byte, f Framing) []byte {
	at := len(b)
	b = f.start(b, PDUCapsuleResp, 0, 0)
	p.Completion.put((*[CompletionSize]byte)(b[at+HeaderSize:]))
	return f.finish(b, at)
}

// Decode takes the PDU; b is its whole header.
func (p *CapsuleResp) Decode(h Header, b []byte) error {
	if err := h.body(PDUCapsuleResp, b); err != nil {
		return err
	}
	return p.Completion.Decode(b[HeaderSize:])
}

// H2CData is a piece of the data that an R2T asked for.
type H2CData struct {
	CID    uint16 // of the command
	Tag    uint16 // of the R2T
	Offset uint32 // bytes from the start of the command's data
	Length uint32 // bytes in this PDU; not 0, and Offset+Length is at most 2^32
	Last   bool   // of the R2T
}

// Append encodes what stands before the data.
func (p *H2CData) Append(b []byte, f Framing) []byte {
	var flags Flags
	if p.Last {
		flags |= FlagLast
	}
	at := len(b)
	b = f.start(b, PDUH2CData, flags, p.Length)
	putTransfer(b[at:], p.CID, p.Tag, p.Offset, p.Length)
	return f.finish(b, at)
}

// Decode takes the PDU; b is its whole header.
func (p *H2CData) Decode(h Header, b []byte) error {
	if err := h.body(PDUH2CData, b); err != nil {
		return err
	}
	*p = H2CData{CID: le.Uint16(b[8:]), Tag: le.Uint16(b[10:]), Offset: le.Uint32(b[12:]), Length: le.Uint32(b[16:]), Last: h.Flags&FlagLast != 0}
	return checkTransfer(h, p.Offset, p.Length, uint32(h.Data()))
}

// C2HData is a piece of the data that a command reads.
type C2HData struct {
	CID     uint16
	Offset  uint32 // bytes from the start of the command's data
	Length  uint32 // bytes in this PDU; not 0, and Offset+Length is at most 2^32
	Last    bool   // of the command
	Success bool   // the command succeeded with result 0, and no CapsuleResp follows; only with Last
}

// Append encodes what stands before the data.
func (p *C2HData) Append(b []byte, f Framing) []byte {
	var flags Flags
	if p.Last {
		flags |= FlagLast
	}
	if p.Success {
		flags |= FlagSuccess
	}
	at := len(b)
	b = f.start(b, PDUC2HData, flags, p.Length)
	putTransfer(b[at:], p.CID, 0, p.Offset, p.Length)
	return f.finish(b, at)
}

// Decode takes the PDU; b is its whole header.
func (p *C2HData) Decode(h Header, b []byte) error {
	if err := h.body(PDUC2HData, b); err != nil {
		return err
	}
	*p = C2HData{CID: le.Uint16(b[8:]), Offset: le.Uint32(b[12:]), Length: le.Uint32(b[16:]), Last: h.Flags&FlagLast != 0, Success: h.Flags&FlagSuccess != 0}
	return checkTransfer(h, p.Offset, p.Length, uint32(h.Data()))
}

// R2T asks for data of a command that writes.
type R2T struct {
	CID    uint16
	Tag    uint16 // any value; H2CData returns it
	Offset uint32 // bytes from the start of the command's data
	Length uint32 // bytes; not 0, and Offset+Length is at most 2^32
}

// Append encodes the PDU.
func (p *R2T) Append(b []byte, f Framing) []byte {
	at := len(b)
	b = f.start(b, PDUR2T, 0, 0)
	putTransfer(b[at:], p.CID, p.Tag, p.Offset, p.Length)
	return f.finish(b, at)
}

// Decode takes the PDU; b is its whole header.
func (p *R2T) Decode(h Header, b []byte) error {
	if err := h.body(PDUR2T, b); err != nil {
		return err
	}
	*p = R2T{CID: le.Uint16(b[8:]), Tag: le.Uint16(b[10:]), Offset: le.Uint32(b[12:]), Length: le.Uint32(b[16:])}
	return checkTransfer(h, p.Offset, p.Length, p.Length)
}

func putTransfer(b []byte, cid, tag uint16, off, n uint32) {
	le.PutUint16(b[8:], cid)
	le.PutUint16(b[10:], tag)
	le.PutUint32(b[12:], off)
	le.PutUint32(b[16:], n)
}

// checkTransfer checks the range of a data PDU or R2T; have is the bytes of data that PLEN leaves.
func checkTransfer(h Header, off, n, have uint32) error {
	if n == 0 || n != have {
		return badField(16, "%v: a length of %d bytes with %d bytes of data", h.Type, n, have)
	}
	if uint64(off)+uint64(n) > 1<<32 {
		return &ProtocolError{FatalDataRange, 12, fmt.Sprintf("%v: %d bytes at offset %d", h.Type, n, off)}
	}
	return nil
}

// TermReq ends a connection. Role.TermReq says which of the two types an end sends.
type TermReq struct {
	Type   PDUType // PDUH2CTermReq or PDUC2HTermReq
	Fatal  FatalStatus
	Info   uint32 // FEI
	Header []byte // of the PDU that was wrong; at most MaxTermReqData bytes. Decode makes it alias the data
}

// TermReq is the type of the TermReq that this end sends.
func (r Role) TermReq() PDUType {
	if r == Host {
		return PDUH2CTermReq
	}
	return PDUC2HTermReq
}

// Append encodes the PDU, with the offending header, of which it takes the first MaxTermReqData bytes.
func (p *TermReq) Append(b []byte) []byte {
	at := len(b)
	data := p.Header[:min(len(p.Header), MaxTermReqData)]
	b = Framing{}.start(b, p.Type, 0, uint32(len(data)))
	le.PutUint16(b[at+8:], uint16(p.Fatal))
	le.PutUint32(b[at+10:], p.Info)
	return append(b, data...)
}

// Decode takes the PDU; b is all h.PLen bytes of it.
func (p *TermReq) Decode(h Header, b []byte) error {
	if h.Type != PDUH2CTermReq && h.Type != PDUC2HTermReq {
		return h.body(PDUC2HTermReq, b)
	}
	if err := short(h.Type.String(), b, max(int(h.PLen), TermReqSize)); err != nil {
		return err
	}
	*p = TermReq{Type: h.Type, Fatal: FatalStatus(le.Uint16(b[8:])), Info: le.Uint32(b[10:]), Header: b[TermReqSize:h.PLen]}
	return nil
}

func (p *TermReq) Error() string {
	return fmt.Sprintf("the peer ended the connection: %v, %#x", p.Fatal, p.Info)
}
