package oncrpc

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"github.com/weftfs/weft/internal/wire/xdr"
)

// Version is the version of the RPC protocol itself.
const Version = 2

// Program numbers.
const (
	ProgPortmap    = 100000 // portmapper and rpcbind, port 111
	ProgNFS        = 100003
	ProgMount      = 100005
	ProgNLM        = 100021 // locks that go with NFSv3
	ProgNSM        = 100024 // restart notifications that go with NLM
	ProgNFSACL     = 100227
	ProgNFSLocalIO = 400122 // Linux: proves that client and server share a host
)

// Sizes in bytes.
const (
	RecordMarkSize = 4
	MaxFragment    = 1<<31 - 1 // what the 31 bits of a record mark can say

	MaxAuthBody    = 400 // body of a credential or verifier (RFC 5531 8.2)
	MaxMachineName = 255 // AUTH_SYS
	MaxGIDs        = 16  // AUTH_SYS

	authMax      = 8 + MaxAuthBody
	CallMin      = 24 + 8 + 8             // call header with AUTH_NONE twice
	CallMax      = 24 + authMax + authMax // call header with the longest credential and verifier
	AcceptedSize = 24                     // header of a successful reply whose verifier is empty
	ReplyMax     = 16 + authMax + 8       // longest reply header: accepted, PROG_MISMATCH
)

// PutRecordMark writes the mark of a fragment of n bytes (at most MaxFragment) to b[:4]. The mark itself is not counted
// in n; last says that the fragment ends its message (RFC 5531 11).
func PutRecordMark(b []byte, n int, last bool) {
	v := uint32(n)
	if last {
		v |= 1 << 31
	}
	binary.BigEndian.PutUint32(b, v)
}

// ParseRecordMark reads a mark from b[:4]. The caller bounds n, and the sum of it over the fragments of one message,
// before it allocates; fragments of length 0 that are not the last are legal and must be bounded in number.
func ParseRecordMark(b []byte) (n int, last bool) {
	v := binary.BigEndian.Uint32(b)
	return int(v &^ (1 << 31)), v>>31 == 1
}

// Message types (RFC 5531 9).
const (
	msgCall  = 0
	msgReply = 1
)

// IsCall reports whether a message of which b holds 8 bytes or more is a call, and not a reply.
func IsCall(b []byte) bool { return binary.BigEndian.Uint32(b[4:]) == msgCall }

// Call is the header of a call.
type Call struct {
	XID              uint32
	Prog, Vers, Proc uint32
	Cred, Verf       Auth // zero values are AUTH_NONE; decoded bodies alias the input
}

// RPCVersionError is what Call.Decode returns for a call of another RPC version. XID is set then, and the answer is a
// Reply with Stat RPCMismatch.
type RPCVersionError uint32

func (e RPCVersionError) Error() string { return fmt.Sprintf("oncrpc: RPC version %d", uint32(e)) }

// Append appends the header; the arguments follow it.
func (c *Call) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, c.XID)
	b = xdr.AppendUint32(b, msgCall)
	b = xdr.AppendUint32(b, Version)
	b = xdr.AppendUint32(b, c.Prog)
	b = xdr.AppendUint32(b, c.Vers)
	b = xdr.AppendUint32(b, c.Proc)
	b = c.Cred.append(b)
	return c.Verf.append(b)
}

// Decode takes the header and leaves d at the arguments. It does not look at program, version, procedure or flavors.
//
// The error wraps an RPCVersionError when the caller speaks another RPC version. Of a message that is not a call it
// wraps xdr.ErrInvalid, and there is no answer. XID is set after any error but one in the first four bytes.
func (c *Call) Decode(d *xdr.Decoder) error {
	*c = Call{XID: d.Uint32()}
	if t := d.Uint32(); t != msgCall {
		d.Fail(fmt.Errorf("message type %d instead of a call: %w", t, xdr.ErrInvalid))
	}
	if v := d.Uint32(); v != Version {
		d.Fail(RPCVersionError(v))
	}
	c.Prog = d.Uint32()
	c.Vers = d.Uint32()
	c.Proc = d.Uint32()
	c.Cred.decode(d)
	c.Verf.decode(d)
	return d.Err()
}

// Stat is the outcome of a call as the header of its reply tells it. Values up to SystemErr are accept_stat of
// RFC 5531 9; the last two are the two forms of a denied reply, which on the wire are numbered by themselves.
type Stat uint32

// The outcomes.
const (
	Success      Stat = 0 // results follow
	ProgUnavail  Stat = 1 // the server does not have the program
	ProgMismatch Stat = 2 // nor this version of it; Low and High say which ones
	ProcUnavail  Stat = 3 // nor this procedure
	GarbageArgs  Stat = 4 // the arguments could not be decoded
	SystemErr    Stat = 5 // for instance out of memory
	RPCMismatch  Stat = 6 // denied: RPC version, Low and High say which ones the server has
	AuthError    Stat = 7 // denied: credential or verifier, AuthStat says why
)

var statNames = [...]string{"SUCCESS", "PROG_UNAVAIL", "PROG_MISMATCH", "PROC_UNAVAIL", "GARBAGE_ARGS", "SYSTEM_ERR", "RPC_MISMATCH", "AUTH_ERROR"}

func (s Stat) String() string {
	if int(s) < len(statNames) {
		return statNames[s]
	}
	return fmt.Sprintf("RPC status %d", uint32(s))
}

// reply_stat and reject_stat (RFC 5531 9).
const (
	replyAccepted     = 0
	replyDenied       = 1
	rejectRPCMismatch = 0
	rejectAuthError   = 1
)

// Reply is the header of a reply.
type Reply struct {
	XID       uint32
	Stat      Stat
	Verf      Auth     // of an accepted reply; the decoded body aliases the input
	AuthStat  AuthStat // with AuthError
	Low, High uint32   // with ProgMismatch and RPCMismatch
}

// Append appends the header; with Success the results follow it.
func (r *Reply) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, r.XID)
	b = xdr.AppendUint32(b, msgReply)
	switch r.Stat {
	case RPCMismatch:
		b = xdr.AppendUint32(b, replyDenied)
		b = xdr.AppendUint32(b, rejectRPCMismatch)
		b = xdr.AppendUint32(b, r.Low)
		return xdr.AppendUint32(b, r.High)
	case AuthError:
		b = xdr.AppendUint32(b, replyDenied)
		b = xdr.AppendUint32(b, rejectAuthError)
		return xdr.AppendUint32(b, uint32(r.AuthStat))
	}
	b = xdr.AppendUint32(b, replyAccepted)
	b = r.Verf.append(b)
	b = xdr.AppendUint32(b, uint32(r.Stat))
	if r.Stat == ProgMismatch {
		b = xdr.AppendUint32(b, r.Low)
		b = xdr.AppendUint32(b, r.High)
	}
	return b
}

// Decode takes the header and, with Success, leaves d at the results. Its error says that the header is malformed;
// that the call failed is told by Err. XID is set after any error but one in the first four bytes.
func (r *Reply) Decode(d *xdr.Decoder) error {
	*r = Reply{XID: d.Uint32()}
	if t := d.Uint32(); t != msgReply {
		d.Fail(fmt.Errorf("message type %d instead of a reply: %w", t, xdr.ErrInvalid))
	}
	switch s := d.Uint32(); s {
	case replyAccepted:
		r.Verf.decode(d)
		r.Stat = Stat(d.Uint32())
		if r.Stat > SystemErr {
			d.Fail(fmt.Errorf("accept_stat %d: %w", uint32(r.Stat), xdr.ErrInvalid))
		}
	case replyDenied:
		switch s := d.Uint32(); s {
		case rejectRPCMismatch:
			r.Stat = RPCMismatch
		case rejectAuthError:
			r.Stat = AuthError
			r.AuthStat = AuthStat(d.Uint32())
		default:
			d.Fail(fmt.Errorf("reject_stat %d: %w", s, xdr.ErrInvalid))
		}
	default:
		d.Fail(fmt.Errorf("reply_stat %d: %w", s, xdr.ErrInvalid))
	}
	if r.Stat == ProgMismatch || r.Stat == RPCMismatch {
		r.Low = d.Uint32()
		r.High = d.Uint32()
	}
	return d.Err()
}

// Err returns nil for Success and otherwise an *Error that says what the server answered.
func (r *Reply) Err() error {
	if r.Stat == Success {
		return nil
	}
	return &Error{Stat: r.Stat, AuthStat: r.AuthStat, Low: r.Low, High: r.High}
}

// Error is a reply other than SUCCESS: the server has read the call and did not run the procedure (with SystemErr it
// may have been run).
type Error struct {
	Stat      Stat
	AuthStat  AuthStat // with AuthError
	Low, High uint32   // with ProgMismatch and RPCMismatch
}

func (e *Error) Error() string {
	switch e.Stat {
	case ProgMismatch, RPCMismatch:
		return fmt.Sprintf("oncrpc: %v, server has versions %d to %d", e.Stat, e.Low, e.High)
	case AuthError:
		return fmt.Sprintf("oncrpc: %v, %v", e.Stat, e.AuthStat)
	}
	return "oncrpc: " + e.Stat.String()
}

// Errno returns EACCES for AuthError, EOPNOTSUPP for ProcUnavail and otherwise EIO.
func (e *Error) Errno() syscall.Errno {
	switch e.Stat {
	case AuthError:
		return syscall.EACCES
	case ProcUnavail:
		return syscall.EOPNOTSUPP
	}
	return syscall.EIO
}
