package localio

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// Dir is where the sockets are.
const Dir = "/run/weft/localio"

// The RPC program.
const (
	Program = 0x20776675
	Version = 1
)

// Proc is a procedure of the RPC program.
type Proc uint32

// The procedures.
const (
	ProcNull Proc = iota
	ProcIdentity
	ProcProbe
)

// Bounds of the protocol.
const (
	MaxMessage = 512 // bytes of a packet
	MaxOpens   = 64  // OPENs of a connection that wait for their answers
	maxReason  = 256
)

// ExporterLabel and ExporterSize are what the channel is derived with from a TLS connection (RFC 8446 section 7.5).
const (
	ExporterLabel = "EXPORTER-weft-local-1"
	ExporterSize  = 32
)

// ID is the identity of a server, or of one of its instances.
type ID [16]byte

func (id ID) String() string { return hex.EncodeToString(id[:]) }

// Socket is the path of the socket of a server's broker.
func Socket(dir string, server ID) string { return filepath.Join(dir, server.String()) }

// Nonce is a secret that is used once.
type Nonce [32]byte

// Proof is what the client shows by RPC.
type Proof [sha256.Size]byte

// MakeProof returns the proof that the nonces of a broker and a client give.
func MakeProof(broker, client Nonce, server, instance ID, channel []byte) (p Proof) {
	h := sha256.New()
	h.Write([]byte("weft-local-1"))
	h.Write(broker[:])
	h.Write(client[:])
	h.Write(server[:])
	h.Write(instance[:])
	h.Write(channel)
	h.Sum(p[:0])
	return p
}

// Identity is the results of GET_IDENTITY.
type Identity struct {
	Server ID
	Local  bool   // there is a broker
	Reason string // why not
}

// Append encodes the message.
func (m *Identity) Append(b []byte) []byte {
	b = append(b, m.Server[:]...)
	b = xdr.AppendBool(b, m.Local)
	return xdr.AppendString(b, clip(m.Reason))
}

// Decode takes the message.
func (m *Identity) Decode(d *xdr.Decoder) error {
	copy(m.Server[:], d.FixedOpaque(len(m.Server)))
	m.Local = d.Bool()
	m.Reason = d.String(maxReason)
	return d.Err()
}

// ProbeArgs is the arguments of PROBE.
type ProbeArgs struct {
	Server, Instance ID
	Proof            Proof
}

// Append encodes the message.
func (m *ProbeArgs) Append(b []byte) []byte {
	b = append(b, m.Server[:]...)
	b = append(b, m.Instance[:]...)
	return append(b, m.Proof[:]...)
}

// Decode takes the message.
func (m *ProbeArgs) Decode(d *xdr.Decoder) error {
	copy(m.Server[:], d.FixedOpaque(len(m.Server)))
	copy(m.Instance[:], d.FixedOpaque(len(m.Instance)))
	copy(m.Proof[:], d.FixedOpaque(len(m.Proof)))
	return d.Err()
}

// clip shortens a reason to what a message may carry.
func clip(reason string) string { return reason[:min(len(reason), maxReason)] }

// Message is a packet on the UNIX socket: one of the types below.
type Message interface {
	kind() uint32
	append([]byte) []byte
}

// The messages.
type (
	Hello struct {
		Version uint32
		Server  ID
	}
	Challenge struct {
		Server, Instance ID
		Nonce            Nonce
	}
	Reveal  struct{ Nonce Nonce }
	Granted struct {
		Align, Least int64 // of direct transfers, bytes; Align 0: there are none
		Memory       bool  // the file system is in memory
		ReadOnly     string
	}
	Refused struct{ Reason string }
	Open    struct {
		ID       uint32
		File     nfs3.FileHandle
		UID, GID uint32
		Write    bool
	}
	Opened struct {
		ID       uint32
		Status   nfs3.Status
		Verifier nfs3.WriteVerf
	}
	Revoke struct{ ID uint32 }
	Closed struct {
		ID       uint32
		Unstable bool // something was written that was not synced
	}
)

// The types, as they are numbered.
const (
	kindHello = iota + 1
	kindChallenge
	kindReveal
	kindGranted
	kindRefused
	kindOpen
	kindOpened
	kindRevoke
	kindClosed
)

func (*Hello) kind() uint32     { return kindHello }
func (*Challenge) kind() uint32 { return kindChallenge }
func (*Reveal) kind() uint32    { return kindReveal }
func (*Granted) kind() uint32   { return kindGranted }
func (*Refused) kind() uint32   { return kindRefused }
func (*Open) kind() uint32      { return kindOpen }
func (*Opened) kind() uint32    { return kindOpened }
func (*Revoke) kind() uint32    { return kindRevoke }
func (*Closed) kind() uint32    { return kindClosed }

// Append encodes a packet.
func Append(b []byte, m Message) []byte { return m.append(xdr.AppendUint32(b, m.kind())) }

// Decode decodes a packet, which may hold nothing else.
func Decode(b []byte) (Message, error) {
	d := xdr.NewDecoder(b)
	var m Message
	switch kind := d.Uint32(); kind {
	case kindHello:
		h := &Hello{Version: d.Uint32()}
		copy(h.Server[:], d.FixedOpaque(len(h.Server)))
		m = h
	case kindChallenge:
		c := &Challenge{}
		copy(c.Server[:], d.FixedOpaque(len(c.Server)))
		copy(c.Instance[:], d.FixedOpaque(len(c.Instance)))
		copy(c.Nonce[:], d.FixedOpaque(len(c.Nonce)))
		m = c
	case kindReveal:
		r := &Reveal{}
		copy(r.Nonce[:], d.FixedOpaque(len(r.Nonce)))
		m = r
	case kindGranted:
		g := &Granted{Align: int64(d.Uint64()), Least: int64(d.Uint64()), Memory: d.Bool(), ReadOnly: d.String(maxReason)}
		if d.Err() == nil && (g.Align < 0 || g.Align&(g.Align-1) != 0 || g.Least < g.Align) {
			d.Fail(fmt.Errorf("direct transfers of %d bytes and more, aligned to %d: %w", g.Least, g.Align, xdr.ErrInvalid))
		}
		m = g
	case kindRefused:
		m = &Refused{Reason: d.String(maxReason)}
	case kindOpen:
		o := &Open{ID: d.Uint32()}
		o.File.Decode(&d)
		o.UID, o.GID, o.Write = d.Uint32(), d.Uint32(), d.Bool()
		m = o
	case kindOpened:
		o := &Opened{ID: d.Uint32(), Status: nfs3.Status(d.Uint32())}
		copy(o.Verifier[:], d.FixedOpaque(len(o.Verifier)))
		m = o
	case kindRevoke:
		m = &Revoke{ID: d.Uint32()}
	case kindClosed:
		m = &Closed{ID: d.Uint32(), Unstable: d.Bool()}
	default:
		d.Fail(fmt.Errorf("message of type %d: %w", kind, xdr.ErrInvalid))
	}
	if d.Err() == nil && len(d.Rest()) > 0 {
		d.Fail(fmt.Errorf("%d bytes behind a message: %w", len(d.Rest()), xdr.ErrInvalid))
	}
	if err := d.Err(); err != nil {
		return nil, fmt.Errorf("localio: %w", err)
	}
	return m, nil
}

func (m *Hello) append(b []byte) []byte {
	b = xdr.AppendUint32(b, m.Version)
	return append(b, m.Server[:]...)
}

func (m *Challenge) append(b []byte) []byte {
	b = append(b, m.Server[:]...)
	b = append(b, m.Instance[:]...)
	return append(b, m.Nonce[:]...)
}

func (m *Reveal) append(b []byte) []byte { return append(b, m.Nonce[:]...) }

func (m *Granted) append(b []byte) []byte {
	b = xdr.AppendUint64(b, uint64(m.Align))
	b = xdr.AppendUint64(b, uint64(m.Least))
	b = xdr.AppendBool(b, m.Memory)
	return xdr.AppendString(b, clip(m.ReadOnly))
}

func (m *Refused) append(b []byte) []byte { return xdr.AppendString(b, clip(m.Reason)) }

func (m *Open) append(b []byte) []byte {
	b = xdr.AppendUint32(b, m.ID)
	b = m.File.Append(b)
	b = xdr.AppendUint32(b, m.UID)
	b = xdr.AppendUint32(b, m.GID)
	return xdr.AppendBool(b, m.Write)
}

func (m *Opened) append(b []byte) []byte {
	b = xdr.AppendUint32(b, m.ID)
	b = xdr.AppendUint32(b, uint32(m.Status))
	return append(b, m.Verifier[:]...)
}

func (m *Revoke) append(b []byte) []byte { return xdr.AppendUint32(b, m.ID) }

func (m *Closed) append(b []byte) []byte {
	b = xdr.AppendUint32(b, m.ID)
	return xdr.AppendBool(b, m.Unstable)
}
