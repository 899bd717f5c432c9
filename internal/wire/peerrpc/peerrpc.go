package peerrpc

//lint:file-ignore U1000 msgpack finds the fields _msgpack by reflection

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	Magic   = "weft-peer" // in the first frame
	Lowest  = 2           // version that is spoken here
	Version = 2           // the highest

	MaxFrame = 1 << 20 // bytes of a frame, without its length
	MaxHello = 4 << 10 // bytes of a frame before it is known who the peer is
	MaxItems = 4096    // inodes of one Hold, and changes of one Settle
	MaxWait  = 10 * time.Minute
)

// Spoken are the versions that are spoken here.
var Spoken = metarpc.Versions{Lowest: Lowest, Highest: Version}

// Mismatch says for people why two members that speak no version in common do not work with each other, and what to do about it.
func Mismatch(caller, callee metarpc.Versions) string {
	old := "weftd of the one that is called"
	if caller.Highest < callee.Lowest {
		old = "weftd of the one that calls"
	}
	return fmt.Sprintf("the metadata service that calls speaks %v of the protocol between services, the one that is called %v: upgrade %s", caller, callee, old)
}

// ErrMalformed is what every error of a Parse function wraps: the peer does not follow the protocol and the connection cannot go on.
var ErrMalformed = errors.New("malformed frame of a peer")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// Kind is what a frame is.
type Kind uint8

const (
	KindHello Kind = iota
	KindChallenge
	KindProof
	KindCall
	KindReply
)

// Status tells how a call, or a hello, went.
type Status uint8

const (
	StatusOK        Status = iota
	StatusFailed           // for a reason that is in the message
	StatusNotHere          // the shard is not served here
	StatusVersion          // there is no version that both speak
	StatusWrongPeer        // the callee is another member, or the caller's proof is wrong
	statusEnd
)

// Op is a call.
type Op uint8

const (
	OpHold Op = iota + 1
	OpSettle
	OpLook
	OpLockWaits
	opEnd
)

// newOps are the calls that Lowest does not have, with the versions they came with.
var newOps = map[Op]uint32{}

// In reports whether a version has the call.
func (o Op) In(version uint32) bool { return 0 < o && o < opEnd && newOps[o] <= version }

// ID names a member.
type ID = [16]byte

// Nonce is random and new in each hello and each challenge.
type Nonce [16]byte

// Hello is the first frame of a connection.
type Hello struct {
	_msgpack struct{} `msgpack:",as_array"`
	Kind     Kind
	Magic    string
	Lowest   uint32
	Highest  uint32
	From, To ID
	Nonce    Nonce
}

// Versions are those that the caller speaks.
func (h *Hello) Versions() metarpc.Versions {
	return metarpc.Versions{Lowest: h.Lowest, Highest: h.Highest}
}

// Challenge answers it.
type Challenge struct {
	_msgpack struct{} `msgpack:",as_array"`
	Kind     Kind
	Status   Status
	Message  string
	Version  uint32 // of the connection; with StatusVersion the highest that the callee speaks
	Nonce    Nonce
	Proof    [32]byte // by CalleeSide
}

// Proof is the caller's.
type Proof struct {
	_msgpack struct{} `msgpack:",as_array"`
	Kind     Kind
	Proof    [32]byte // by CallerSide
}

// Side is one of a connection.
type Side string

const (
	CallerSide Side = "caller"
	CalleeSide Side = "callee"
)

// ProofOf is what shows that a side knows the callee's token.
func ProofOf(token [16]byte, side Side, hello *Hello, challenge Nonce) (proof [32]byte) {
	mac := hmac.New(sha256.New, token[:])
	mac.Write([]byte(side))
	mac.Write(hello.From[:])
	mac.Write(hello.To[:])
	mac.Write(hello.Nonce[:])
	mac.Write(challenge[:])
	mac.Sum(proof[:0])
	return proof
}

// Call is a call. Hold, Settle and After are nil in calls of other ops.
type Call struct {
	_msgpack struct{} `msgpack:",as_array"`
	Kind     Kind
	Number   uint64
	Op       Op
	Shard    int // whose service it is for; not of Look
	Wait     int64
	Hold     *Hold
	Settle   *Settle
	After    *LockWait // of LockWaits: the last one of the part before; zero = none
}

// Hold asks for inodes of the called shard to be prepared for a change.
type Hold struct {
	_msgpack struct{} `msgpack:",as_array"`
	Shard    int      // of the asker
	Row      []byte   // the row of that shard
	To       uint64   // the epoch of the row of the called shard, as far as the asker knows
	Change   uint64
	Oldest   uint64
	Items    []HoldItem
}

// HoldItem is one of these inodes.
type HoldItem struct {
	_msgpack struct{} `msgpack:",as_array"`
	ID       layout.FileID
	Lease    metarpc.Lease
	Last     bool
}

// Settle says what became of changes.
type Settle struct {
	_msgpack struct{} `msgpack:",as_array"`
	Shard    int      // as in Hold
	Row      []byte   // as in Hold
	Oldest   uint64
	Changes  []Settled
}

// Settled is what became of one change.
type Settled struct {
	_msgpack  struct{} `msgpack:",as_array"`
	Change    uint64
	To        uint64 // as in Hold
	Committed bool
}

// LockWait is somebody who waits for another one to give up a lock.
type LockWait struct {
	_msgpack       struct{} `msgpack:",as_array"`
	Number         uint64
	Waiter, Holder LockOwner
}

// LockOwner is one who has or wants a lock.
type LockOwner struct {
	_msgpack struct{} `msgpack:",as_array"`
	Client   [16]byte
	Number   uint64
}

// Reply answers a call.
type Reply struct {
	_msgpack struct{} `msgpack:",as_array"`
	Kind     Kind
	Number   uint64
	Status   Status
	Message  string
	State    uint8  // of Hold: what became of it
	Row      []byte // of Hold
	Waits    []LockWait
}

// Append appends a frame, which points to one of the structures above, with its length, in the form of a version, and sets its kind. It fails if the frame would
// be too large, or is a call that the version does not have.
func Append(b []byte, version uint32, frame any) ([]byte, error) {
	switch f := frame.(type) {
	case *Hello:
		f.Kind = KindHello
	case *Challenge:
		f.Kind = KindChallenge
	case *Proof:
		f.Kind = KindProof
	case *Call:
		f.Kind = KindCall
		if !f.Op.In(version) {
			return b, fmt.Errorf("version %d of the protocol between services does not have call %d", version, f.Op)
		}
	case *Reply:
		f.Kind = KindReply
	default:
		panic(fmt.Sprintf("peerrpc: %T is no frame", frame))
	}
	var buf bytes.Buffer
	e := msgpack.NewEncoder(&buf)
	e.UseCompactInts(true)
	if err := e.Encode(frame); err != nil {
		return b, err
	}
	body := buf.Bytes()
	if version < Version {
		body = metarpc.Fit(nil, body, frame, version)
	}
	if len(body) > MaxFrame {
		return b, fmt.Errorf("frame of %d bytes for a peer, at most %d are allowed", len(body), MaxFrame)
	}
	b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
	return append(b, body...), nil
}

// IsHello reports whether a connection's first frame, without its length, is a peer's and no client's.
func IsHello(frame []byte) bool {
	const begin = "\x00\xa9" + Magic // behind the array's length
	return len(frame) > len(begin) && frame[0]&0xf0 == 0x90 && string(frame[1:1+len(begin)]) == begin
}

// ParseHello reads a Hello.
func ParseHello(frame []byte) (*Hello, error) {
	h := new(Hello)
	if !IsHello(frame) {
		return nil, malformed("not a hello of a peer")
	}
	if err := parse(frame, KindHello, h, Lowest); err != nil {
		return nil, err
	}
	if h.Lowest > h.Highest {
		return nil, malformed("versions %d to %d", h.Lowest, h.Highest)
	}
	return h, nil
}

// ParseChallenge reads a Challenge.
func ParseChallenge(frame []byte) (*Challenge, error) {
	c := new(Challenge)
	err := parse(frame, KindChallenge, c, Lowest)
	if err == nil && c.Status >= statusEnd {
		c.Status = StatusFailed // of a later version
	}
	return c, err
}

// ParseProof reads a Proof.
func ParseProof(frame []byte) (*Proof, error) {
	p := new(Proof)
	return p, parse(frame, KindProof, p, Lowest)
}

// ParseCall reads a Call on a connection of some version and checks it, so that whoever carries it out need not.
func ParseCall(frame []byte, version uint32) (*Call, error) {
	c := new(Call)
	if err := parse(frame, KindCall, c, version); err != nil {
		return nil, err
	}
	shards := []int{c.Shard}
	switch {
	case !c.Op.In(version):
		return nil, malformed("call %d", c.Op)
	case (c.Op == OpHold) != (c.Hold != nil) || (c.Op == OpSettle) != (c.Settle != nil):
		return nil, malformed("call %d with the arguments of another one", c.Op)
	case c.Op != OpLockWaits && c.After != nil:
		return nil, malformed("call %d after a wait", c.Op)
	case c.Wait < 0 || c.Wait > int64(MaxWait):
		return nil, malformed("call that waits for %v, want up to %v", time.Duration(c.Wait), MaxWait)
	case c.Hold != nil:
		shards = append(shards, c.Hold.Shard)
		if n := len(c.Hold.Items); n > MaxItems {
			return nil, malformed("hold of %d inodes, at most %d are allowed", n, MaxItems)
		}
		for _, item := range c.Hold.Items {
			if item.ID == 0 {
				return nil, malformed("hold of inode 0")
			}
		}
	case c.Settle != nil:
		shards = append(shards, c.Settle.Shard)
		if n := len(c.Settle.Changes); n > MaxItems {
			return nil, malformed("settlement of %d changes, at most %d are allowed", n, MaxItems)
		}
	}
	if c.Op == OpLockWaits && c.After == nil {
		c.After = new(LockWait) // of a caller that knows of no parts
	}
	for _, shard := range shards {
		if shard < 0 || shard >= layout.MaxShards {
			return nil, malformed("shard %d, want 0 to %d", shard, layout.MaxShards-1)
		}
	}
	return c, nil
}

// ParseReply reads a Reply on a connection of some version.
func ParseReply(frame []byte, version uint32) (*Reply, error) {
	r := new(Reply)
	err := parse(frame, KindReply, r, version)
	if err == nil && r.Status >= statusEnd {
		r.Status = StatusFailed
	}
	return r, err
}

// parse reads a frame whose kind is known.
func parse(frame []byte, want Kind, into any, version uint32) (err error) {
	if len(frame) < 2 || frame[0]&0xf0 != 0x90 || Kind(frame[1]) != want {
		return malformed("another frame than one of kind %d", want)
	}
	if err := metarpc.DecodeMessage(frame, into, version); err != nil {
		return malformed("frame of kind %d: %v", want, err)
	}
	return nil
}
