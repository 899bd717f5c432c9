package nfs3

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// state is where an rpc is.
type state uint8

const (
	stateFree      state = iota
	stateHeld            // in Target.held, until the limits are known
	stateQueued          // in Target.queue, until a connection has room
	stateDelayed         // in Target.delayed, until a back-off ends
	stateLost            // in slot.held, until what the lost connection had is over
	stateWaiting         // in conn.calls and conn.sendq: has a connection, no writer has taken it yet
	stateSent            // in conn.calls: a writer has taken it and perhaps written it
	stateReceiving       // conn.current: its reply has begun
)

const (
	// headMax bounds everything of a call before its payload; see maxMachineName.
	headMax = oncrpc.RecordMarkSize + oncrpc.CallMin + 20 + maxMachineName + wire.WriteHeadMax
	// overhead is what a call without payload counts for when bytes outstanding are compared.
	overhead = 256

	// smallSize is the payload up to which a request counts as small.
	smallSize = 64 << 10

	maxEmpty   = 3 // replies in a row without progress
	maxGarbled = 3 // replies that cannot be understood

	maxRestarts = 8 // changes of the verifier during one WRITE
)

// rpc is one request of a caller, from Start to Done: at any moment at most one call to the server, and one after the
// other several of them if the server cuts it short. It is guarded by Target.mu, but for the bytes of head and payload
// while a sender has them.
//
// An rpc with neither op nor ctl is abandoned: it only waits for its reply, to drop it.
type rpc struct {
	op  *layout.Op
	ctl *control

	state      state
	list       *rpcList // that it is in, with prev and next
	prev, next *rpc

	conn *conn
	at   time.Time // when conn got it
	xid  uint32
	end  uint64 // where the call ends in what the connection sends; 0 until a writer has taken it
	vec  int    // index of the payload in sender.vec

	// The call under way.
	proc    wire.Proc
	head    []byte // in buf: record mark, header, arguments up to the payload
	payload []byte // behind the head on the wire: a piece of data, or the arguments of ctl
	count   int    // bytes of data asked for
	changes bool   // carried out late, it could undo something that was done after its repetition

	// The whole request.
	data      []byte // what Op.Data was, or the private copy of a detached WRITE
	n         int    // bytes of it that are done
	eof       bool
	committed layout.Stability // least of the pieces
	verifier  layout.Verifier  // of the latest piece
	empty     int              // replies in a row without progress
	garbled   int              // replies that could not be understood
	restarts  int              // times that a verifier changed under way
	resent    bool             // a call that was wholly sent lost its connection: perhaps it was executed
	heard     time.Time        // latest answer, or the start; unless patience is endless
	overdue   bool             // Op.Overdue was called
	delay     time.Duration    // latest back-off
	retryAt   time.Time

	buf [headMax]byte
}

// control is a request that is no Op: a blocking call, or one of the Target's own.
type control struct {
	prog, proc uint32
	vers       uint32 // 0: that of NFS and MOUNT
	cred       layout.Credential
	name       string // of the procedure
	args       []byte
	res        result // nil if there are none
	bare       bool   // of a program whose results do not begin with a status of NFS
	probe      bool   // belongs to one connection: not sent again when that is lost

	end    func(err error) // called once with Target.mu held, after res was filled
	resent bool            // at the end: see rpc
	addr   netip.AddrPort  // at the end: of who answered
}

func (r *rpc) abandoned() bool { return r.op == nil && r.ctl == nil }

func (r *rpc) isRead() bool { return r.proc == wire.ProcRead }

func (r *rpc) cost() int { return overhead + r.count }

// class is the queue of a prepared rpc.
func (r *rpc) class() int {
	if r.count > smallSize {
		return bulk
	}
	return small
}

// name and detail are for errors.
func (r *rpc) name() string {
	if r.ctl != nil {
		return r.ctl.name
	}
	return r.proc.String()
}

func (r *rpc) detail() string {
	switch {
	case r.op == nil:
		return ""
	case r.op.Kind == layout.OpCommit:
		return fmt.Sprintf(" of %d bytes at %d", r.op.Count, r.op.Off)
	}
	return fmt.Sprintf(" of %d bytes at %d", len(r.data), r.op.Off)
}

// prepare encodes the next call of r: the whole request, or what is left of it up to the limits.
func (r *rpc) prepare(t *Target) {
	r.xid, r.end = 0, 0
	if r.ctl != nil {
		r.changes = r.ctl.changes()
		vers := r.ctl.vers
		if vers == 0 {
			vers = wire.Version
		}
		r.head = t.appendCall(r.buf[:0], r.ctl.prog, vers, r.ctl.proc, r.ctl.cred)
		r.payload = r.ctl.args
		r.mark()
		return
	}
	op := r.op
	r.changes = op.Kind == layout.OpWrite
	h := t.appendCall(r.buf[:0], oncrpc.ProgNFS, wire.Version, uint32(r.proc), op.File.Cred)
	fh, _ := wire.NewFileHandle(op.File.Handles[0]) // the length was checked by Start
	off := uint64(op.Off) + uint64(r.n)
	switch op.Kind {
	case layout.OpRead:
		r.count = min(len(r.data)-r.n, int(t.rsize.Load()))
		a := wire.ReadArgs{FH: fh, Offset: off, Count: uint32(r.count)}
		h = a.Append(h)
	case layout.OpWrite:
		r.count = min(len(r.data)-r.n, int(t.wsize.Load()))
		r.payload = r.data[r.n : r.n+r.count]
		a := wire.WriteArgs{FH: fh, Offset: off, Count: uint32(r.count), Stable: wire.Stable(op.Stable)}
		h = a.AppendHead(h)
	case layout.OpCommit:
		a := wire.CommitArgs{FH: fh, Offset: off}
		if op.Count <= math.MaxUint32 {
			a.Count = uint32(op.Count) // beyond, 0 commits more than was asked for
		}
		h = a.Append(h)
	}
	r.head = h
	r.mark()
}

func (r *rpc) mark() {
	n := len(r.head) - oncrpc.RecordMarkSize + xdr.Padded(len(r.payload))
	oncrpc.PutRecordMark(r.head, n, true)
}

// setXID gives the prepared call its number.
func (r *rpc) setXID(xid uint32) {
	r.xid = xid
	binary.BigEndian.PutUint32(r.head[oncrpc.RecordMarkSize:], xid)
}

// wireLen is how many bytes the prepared call has on the wire.
func (r *rpc) wireLen() int { return len(r.head) + xdr.Padded(len(r.payload)) }

// appendCall appends an empty record mark and the header of a call. The credential is the Target's template with the
// identity put in: uid, gid and an empty list of groups are the last three words of an AUTH_SYS body.
func (t *Target) appendCall(b []byte, prog, vers, proc uint32, cred layout.Credential) []byte {
	b = append(b, 0, 0, 0, 0)
	h := oncrpc.Call{Prog: prog, Vers: vers, Proc: proc, Cred: t.cred}
	b = h.Append(b)
	verf := 8
	id := b[len(b)-verf-12:]
	binary.BigEndian.PutUint32(id, cred.UID)
	binary.BigEndian.PutUint32(id[4:], cred.GID)
	return b
}

// rpcList is a queue of rpcs, each of which is in one queue at most.
type rpcList struct {
	head, tail *rpc
	len        int
}

func (l *rpcList) pushBack(r *rpc) {
	r.list, r.prev, r.next = l, l.tail, nil
	if l.tail == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
	l.len++
}

func (l *rpcList) pushFront(r *rpc) {
	r.list, r.prev, r.next = l, nil, l.head
	if l.head == nil {
		l.tail = r
	} else {
		l.head.prev = r
	}
	l.head = r
	l.len++
}

// unlink takes r out of the list it is in, if any.
func (r *rpc) unlink() {
	l := r.list
	if l == nil {
		return
	}
	if r.prev == nil {
		l.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		l.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.list, r.prev, r.next = nil, nil, nil
	l.len--
}
