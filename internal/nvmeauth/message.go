package nvmeauth

import (
	"encoding/binary"
	"fmt"
)

// MaxMessage is what a host asks for in Authentication Receive, and more than any message of this package has (1168 bytes);
// larger ones are refused. It is Linux's and SPDK's buffer.
const MaxMessage = 4096

// kind is AUTH_TYPE in the high byte and AUTH_ID in the low one.
type kind uint16

const (
	kindNegotiate kind = 0x0000
	kindFailure2  kind = 0x00F0
	kindFailure1  kind = 0x00F1
	kindChallenge kind = 0x0101
	kindReply     kind = 0x0102
	kindSuccess1  kind = 0x0103
	kindSuccess2  kind = 0x0104
)

func (k kind) String() string {
	switch k {
	case kindNegotiate:
		return "negotiate"
	case kindFailure2:
		return "failure2"
	case kindFailure1:
		return "failure1"
	case kindChallenge:
		return "challenge"
	case kindReply:
		return "reply"
	case kindSuccess1:
		return "success1"
	case kindSuccess2:
		return "success2"
	}
	return fmt.Sprintf("message %04x", uint16(k))
}

// Sizes of messages without what varies.
const (
	headerSize    = 6 // that part of all of them which tells the kind and the transaction
	negotiateSize = 8
	protocolSize  = 64
	maxIDs        = 30 // of hashes, and of groups, in a protocol descriptor
	fixedSize     = 16 // challenge, reply, success1, success2
	failureSize   = 8
)

const protocolDHCHAP = 1 // AUTHID

// Those of the host come in a command that tells their length, and must have it. Those of the controller come at the start of a
// buffer: what follows is not looked at.

func appendHeader(b []byte, k kind, tid uint16, size int) []byte {
	h := make([]byte, size)
	binary.BigEndian.PutUint16(h, uint16(k))
	binary.LittleEndian.PutUint16(h[4:], tid)
	return append(b, h...)
}

func parseHeader(b []byte) (kind, uint16, *Failure) {
	if len(b) < headerSize || len(b) > MaxMessage {
		return 0, 0, failf(IncorrectPayload, "a message of %d bytes", len(b))
	}
	return kind(binary.BigEndian.Uint16(b)), binary.LittleEndian.Uint16(b[4:]), nil
}

func badSize(k kind, n int) *Failure {
	return failf(IncorrectPayload, "a %s message of %d bytes, which is not what its fields say", k, n)
}

// negotiate is what a host can do. Numbers of hashes and groups that this package does not know are kept.
type negotiate struct {
	tid    uint16
	secure uint8 // SC_C: 0 without secure channel concatenation
	hashes []Hash
	groups []Group
}

func (m *negotiate) append(b []byte) []byte {
	at := len(b)
	b = appendHeader(b, kindNegotiate, m.tid, negotiateSize+protocolSize)
	h := b[at:]
	h[6], h[7] = m.secure, 1
	p := h[negotiateSize:]
	p[0], p[2], p[3] = protocolDHCHAP, uint8(len(m.hashes)), uint8(len(m.groups))
	for i, v := range m.hashes {
		p[4+i] = uint8(v)
	}
	for i, v := range m.groups {
		p[4+maxIDs+i] = uint8(v)
	}
	return b
}

// decode reads the first descriptor of DH-HMAC-CHAP. Its failure is ProtocolUnusable when there is none.
func (m *negotiate) decode(b []byte) *Failure {
	if len(b) < negotiateSize || len(b) != negotiateSize+int(b[7])*protocolSize {
		return badSize(kindNegotiate, len(b))
	}
	*m = negotiate{tid: binary.LittleEndian.Uint16(b[4:]), secure: b[6]}
	for p := b[negotiateSize:]; len(p) > 0; p = p[protocolSize:] {
		if p[0] != protocolDHCHAP {
			continue
		}
		if p[2] > maxIDs || p[3] > maxIDs {
			return failf(IncorrectPayload, "a negotiate message with %d hashes and %d groups, at most %d fit", p[2], p[3], maxIDs)
		}
		for _, v := range p[4:][:p[2]] {
			m.hashes = append(m.hashes, Hash(v))
		}
		for _, v := range p[4+maxIDs:][:p[3]] {
			m.groups = append(m.groups, Group(v))
		}
		return nil
	}
	return failf(ProtocolUnusable, "the host does not offer DH-HMAC-CHAP")
}

type challenge struct {
	tid       uint16
	hash      Hash
	group     Group
	seq       uint32
	challenge []byte // as long as the hash
	public    []byte // the DH value, with a group: as long as its prime, or shorter (SPDK leaves leading zeros out)
}

func (m *challenge) append(b []byte) []byte {
	at := len(b)
	b = appendHeader(b, kindChallenge, m.tid, fixedSize)
	h := b[at:]
	h[6], h[8], h[9] = uint8(len(m.challenge)), uint8(m.hash), uint8(m.group)
	binary.LittleEndian.PutUint16(h[10:], uint16(len(m.public)))
	binary.LittleEndian.PutUint32(h[12:], m.seq)
	return append(append(b, m.challenge...), m.public...)
}

// decode checks hash, group and lengths; the slices of m are b's. Failures: HashUnusable, GroupUnusable, IncorrectPayload.
func (m *challenge) decode(b []byte) *Failure {
	if len(b) < fixedSize {
		return badSize(kindChallenge, len(b))
	}
	hl, dhv := int(b[6]), int(binary.LittleEndian.Uint16(b[10:]))
	*m = challenge{
		tid: binary.LittleEndian.Uint16(b[4:]), hash: Hash(b[8]), group: Group(b[9]), seq: binary.LittleEndian.Uint32(b[12:]),
	}
	switch {
	case !m.hash.usable() || hl != m.hash.size():
		return failf(HashUnusable, "the controller chose %s, of %d bytes", m.hash, hl)
	case !m.group.usable():
		return failf(GroupUnusable, "the controller chose DH %s", m.group)
	case len(b) < fixedSize+hl+dhv:
		return badSize(kindChallenge, len(b))
	case m.seq == 0:
		return failf(IncorrectPayload, "a challenge with sequence number 0")
	}
	m.challenge, m.public = b[fixedSize:][:hl], b[fixedSize+hl:][:dhv]
	return checkPublic(m.group, m.public)
}

func checkPublic(g Group, public []byte) *Failure {
	if (g == NoGroup) != (len(public) == 0) || len(public) > g.size() {
		return failf(IncorrectPayload, "a DH value of %d bytes for group %s", len(public), g)
	}
	return nil
}

type reply struct {
	tid       uint16
	response  []byte // as long as the hash
	challenge []byte // the same, or nil if the controller need not prove itself
	seq       uint32
	public    []byte
}

func (m *reply) append(b []byte) []byte {
	at := len(b)
	b = appendHeader(b, kindReply, m.tid, fixedSize+2*len(m.response))
	h := b[at:]
	h[6] = uint8(len(m.response))
	if m.challenge != nil {
		h[8] = 1
	}
	binary.LittleEndian.PutUint16(h[10:], uint16(len(m.public)))
	binary.LittleEndian.PutUint32(h[12:], m.seq)
	copy(h[fixedSize:], m.response)
	copy(h[fixedSize+len(m.response):], m.challenge)
	return append(b, m.public...)
}

// decode does not know which hash and group are in use: whether response and public fit them remains to be seen. The slices of
// m are b's.
func (m *reply) decode(b []byte) *Failure {
	if len(b) < fixedSize {
		return badSize(kindReply, len(b))
	}
	hl, dhv := int(b[6]), int(binary.LittleEndian.Uint16(b[10:]))
	if len(b) != fixedSize+2*hl+dhv {
		return badSize(kindReply, len(b))
	}
	*m = reply{tid: binary.LittleEndian.Uint16(b[4:]), seq: binary.LittleEndian.Uint32(b[12:])}
	m.response, m.public = b[fixedSize:][:hl], b[fixedSize+2*hl:]
	switch b[8] {
	case 0: // The challenge's place is there all the same.
	case 1:
		// 0 would mean that the challenge is there for the sake of a secure channel alone.
		if m.seq == 0 {
			return failf(IncorrectPayload, "a reply with a challenge and sequence number 0")
		}
		m.challenge = b[fixedSize+hl:][:hl]
	default:
		return failf(IncorrectPayload, "a reply whose CVALID is %d", b[8])
	}
	return nil
}

type success1 struct {
	tid      uint16
	hashSize int    // also without a response
	response []byte // nil unless the host asked for it
}

func (m *success1) append(b []byte) []byte {
	at := len(b)
	b = appendHeader(b, kindSuccess1, m.tid, fixedSize)
	h := b[at:]
	h[6] = uint8(m.hashSize)
	if m.response != nil {
		h[8] = 1
	}
	return append(b, m.response...)
}

// decode leaves it to the host whether hashSize is that of the hash in use. The slice of m is b's.
func (m *success1) decode(b []byte) *Failure {
	if len(b) < fixedSize {
		return badSize(kindSuccess1, len(b))
	}
	*m = success1{tid: binary.LittleEndian.Uint16(b[4:]), hashSize: int(b[6])}
	switch b[8] {
	case 0:
	case 1:
		if len(b) < fixedSize+m.hashSize {
			return badSize(kindSuccess1, len(b))
		}
		m.response = b[fixedSize:][:m.hashSize]
	default:
		return failf(IncorrectPayload, "a success1 message whose RVALID is %d", b[8])
	}
	return nil
}

func appendSuccess2(b []byte, tid uint16) []byte {
	return appendHeader(b, kindSuccess2, tid, fixedSize)
}

// appendFailure encodes failure1 or failure2. The reason code has one value only; the explanation is what differs.
func appendFailure(b []byte, k kind, tid uint16, r Reason) []byte {
	return append(appendHeader(b, k, tid, failureSize-2), 1, uint8(r))
}

// decodeFailure gives the explanation of failure1 or failure2.
func decodeFailure(b []byte) (Reason, *Failure) {
	if len(b) < failureSize {
		return 0, failf(IncorrectPayload, "a failure message of %d bytes", len(b))
	}
	return Reason(b[7]), nil
}
