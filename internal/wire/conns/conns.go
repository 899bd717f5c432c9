package conns

import (
	"fmt"

	"github.com/weftfs/weft/internal/wire/xdr"
)

// The program.
const (
	Program = 0x20776676
	Version = 1
)

// Proc is a procedure.
type Proc uint32

// The procedures.
const (
	ProcNull Proc = iota
	ProcJoin
	ProcEnd
	ProcStop
)

var procNames = [...]string{"NULL", "JOIN", "END", "STOP"}

func (p Proc) String() string {
	if int(p) < len(procNames) {
		return procNames[p]
	}
	return fmt.Sprintf("conns procedure %d", uint32(p))
}

// Client is the identity of a client, which is a secret.
type Client [16]byte

// Name is the arguments of JOIN and END. The zero Name belongs to no connection.
type Name struct {
	Client Client
	Number uint64 // 0: all of the client
}

// Append encodes the message.
func (n *Name) Append(b []byte) []byte {
	b = xdr.AppendFixedOpaque(b, n.Client[:])
	return xdr.AppendUint64(b, n.Number)
}

// Decode takes the message.
func (n *Name) Decode(d *xdr.Decoder) error {
	copy(n.Client[:], d.FixedOpaque(len(n.Client)))
	n.Number = d.Uint64()
	return d.Err()
}

// Covers reports whether an END of n ends the connection of that name.
func (n *Name) Covers(o Name) bool {
	return o.Number != 0 && n.Client == o.Client && (n.Number == 0 || n.Number == o.Number)
}

// EndRes is the results of END.
type EndRes struct {
	Ended bool // nothing of what was sent on the connections is carried out any more
}

// Append encodes the message.
func (r *EndRes) Append(b []byte) []byte { return xdr.AppendBool(b, r.Ended) }

// Decode takes the message.
func (r *EndRes) Decode(d *xdr.Decoder) error {
	r.Ended = d.Bool()
	return d.Err()
}
