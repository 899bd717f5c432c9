package data

import (
	"strings"

	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/localio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// programs are those served here, each in one version.
var programs = map[uint32]uint32{
	oncrpc.ProgNFS:   wire.Version,
	oncrpc.ProgMount: wire.Version,
	sparse.Program:   sparse.Version,
	localio.Program:  localio.Version,
	conns.Program:    conns.Version,
}

// results is what every procedure's results can do.
type results interface{ Append([]byte) []byte }

// handle answers r: it fills r.reply and, for a READ, r.data.
func (c *conn) handle(r *request) {
	s := c.s
	reply := oncrpc.Reply{XID: r.call.XID}
	version, known := programs[r.call.Prog]
	switch {
	case r.foreign:
		reply.Stat, reply.Low, reply.High = oncrpc.RPCMismatch, oncrpc.Version, oncrpc.Version
	case !known:
		reply.Stat = oncrpc.ProgUnavail
	case r.call.Vers != version:
		reply.Stat, reply.Low, reply.High = oncrpc.ProgMismatch, version, version
	}
	if reply.Stat != oncrpc.Success {
		r.finish(&reply, nil)
		return
	}
	if r.call.Proc == 0 { // NULL of all programs, whoever asks
		if r.call.Cred.Flavor == oncrpc.FlavorTLS {
			// There is no TLS, or it is too late for it (RFC 9289 section 4.1).
			reply.Stat, reply.AuthStat = oncrpc.AuthError, oncrpc.AuthBadCred
		}
		r.finish(&reply, nil)
		return
	}
	if s.required && !c.secret {
		reply.Stat, reply.AuthStat = oncrpc.AuthError, oncrpc.AuthTooWeak
		r.finish(&reply, nil)
		return
	}
	if c.guest && !forGuests(&r.call) {
		reply.Stat, reply.AuthStat = oncrpc.AuthError, oncrpc.AuthTooWeak
		r.finish(&reply, nil)
		return
	}
	if r.call.Prog == oncrpc.ProgMount {
		s.mount(r, &reply)
		return
	}
	if r.call.Prog == localio.Program {
		c.local(r, &reply)
		return
	}
	if r.call.Prog == conns.Program {
		c.connections(r, &reply)
		return
	}
	if r.cred == nil {
		reply.Stat, reply.AuthStat = oncrpc.AuthError, oncrpc.AuthTooWeak
		if r.call.Cred.Flavor == oncrpc.FlavorSys {
			reply.AuthStat = oncrpc.AuthBadCred
		}
		r.finish(&reply, nil)
		return
	}
	if r.call.Prog == sparse.Program {
		s.sparse(r, &reply)
		return
	}
	switch proc := wire.Proc(r.call.Proc); proc {
	case wire.ProcRead:
		c.read(r, &reply)
	case wire.ProcWrite:
		c.write(r, &reply)
	case wire.ProcReaddir:
		s.readdir(r, &reply)
	case wire.ProcReaddirPlus:
		s.readdirPlus(r, &reply)
	default:
		res, ok := s.procedure(r, proc)
		if !ok {
			reply.Stat = oncrpc.ProcUnavail
		} else if res == nil {
			reply.Stat = oncrpc.GarbageArgs
		}
		r.finish(&reply, res)
	}
}

// procedure runs one with ordinary results: nil for arguments that do not decode, false for a procedure that is none.
func (s *Server) procedure(r *request, proc wire.Proc) (results, bool) {
	switch proc {
	case wire.ProcGetattr:
		return call(r, s.getattr), true
	case wire.ProcSetattr:
		return call(r, s.setattr), true
	case wire.ProcLookup:
		return call(r, s.lookup), true
	case wire.ProcAccess:
		return call(r, s.access), true
	case wire.ProcReadlink:
		return call(r, s.readlink), true
	case wire.ProcCreate:
		return call(r, s.create), true
	case wire.ProcMkdir:
		return call(r, s.mkdir), true
	case wire.ProcSymlink:
		return call(r, func(r *request, a *wire.SymlinkArgs) results { return s.refuseNode(a.Where.Dir) }), true
	case wire.ProcMknod:
		return call(r, func(r *request, a *wire.MknodArgs) results { return s.refuseNode(a.Where.Dir) }), true
	case wire.ProcRemove:
		return call(r, s.remove), true
	case wire.ProcRmdir:
		return call(r, s.rmdir), true
	case wire.ProcRename:
		return call(r, s.rename), true
	case wire.ProcLink:
		return call(r, func(r *request, a *wire.LinkArgs) results { return s.refuseLink(a) }), true
	case wire.ProcFsstat:
		return call(r, s.fsstat), true
	case wire.ProcFsinfo:
		return call(r, s.fsinfo), true
	case wire.ProcPathconf:
		return call(r, s.pathconf), true
	case wire.ProcCommit:
		return call(r, s.commit), true
	}
	return nil, false
}

// call decodes the arguments and runs do with them.
func call[A any, P interface {
	*A
	Decode(*xdr.Decoder) error
}](r *request, do func(*request, P) results) results {
	var args A
	if P(&args).Decode(&r.args) != nil {
		return nil
	}
	return do(r, P(&args))
}

// begin starts the reply; what is appended afterwards are results.
func (r *request) begin(reply *oncrpc.Reply) {
	r.reply = reply.Append(append(r.reply[:0], 0, 0, 0, 0))
	r.results = 0
	if reply.Stat == oncrpc.Success {
		r.results = len(r.reply)
	}
}

// end completes the record mark.
func (r *request) end() {
	n := r.payloadSize()
	r.pad = xdr.Padding(n)
	oncrpc.PutRecordMark(r.reply, len(r.reply)-oncrpc.RecordMarkSize+n+len(r.pad), true)
}

func (r *request) finish(reply *oncrpc.Reply, res results) {
	r.begin(reply)
	if res != nil {
		r.reply = res.Append(r.reply)
	}
	r.end()
}

// mount serves the MOUNT program: one export, for everybody, and no memory of who mounted it.
func (s *Server) mount(r *request, reply *oncrpc.Reply) {
	var res results
	switch wire.MountProc(r.call.Proc) {
	case wire.MountProcMnt:
		res = call(r, func(r *request, a *wire.MountPath) results {
			if strings.Trim(a.Path, "/") != "" { // there is only one export, and it is the root
				return &wire.MountRes{Status: wire.ErrNoEnt}
			}
			return &wire.MountRes{FH: s.rootFH, Flavors: []oncrpc.Flavor{oncrpc.FlavorSys}}
		})
		if res == nil {
			reply.Stat = oncrpc.GarbageArgs
		}
	case wire.MountProcDump:
		res = &wire.DumpRes{}
	case wire.MountProcUmnt, wire.MountProcUmntAll:
	case wire.MountProcExport:
		res = &wire.ExportRes{Exports: []wire.Export{{Dir: "/"}}}
	default:
		reply.Stat = oncrpc.ProcUnavail
	}
	r.finish(reply, res)
}
