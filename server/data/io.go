package data

import (
	"errors"
	"math"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// statusOf turns an error of a system call, or one that is a status already, into the protocol's.
func statusOf(err error) wire.Status {
	if err == nil {
		return wire.OK
	}
	var st wire.Status
	var e unix.Errno
	switch {
	case errors.As(err, &st):
		return st
	case !errors.As(err, &e):
		return wire.ErrServerFault
	}
	switch e {
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS:
		descriptors.Short(e)
		return wire.ErrJukebox // ours to get over; the client tries again
	}
	return wire.StatusOf(e)
}

// openData returns a data file, its lock held shared, for a caller who needs the rights in want; closeData ends that.
func (s *Server) openData(r *request, fh wire.FileHandle, want uint32, st *unix.Stat_t) (*file, wire.Status) {
	f, err := s.get(fh)
	if err != nil {
		return nil, statusOf(err)
	}
	f.mu.RLock()
	if status := s.admit(r, f, want, st); status != wire.OK {
		s.closeData(f)
		s.noteRefusal(r, status)
		return nil, status
	}
	return f, wire.OK
}

// noteRefusal counts a call that was refused for the address that it has come from.
func (s *Server) noteRefusal(r *request, status wire.Status) {
	if status != wire.ErrAcces || !s.refusals.Refused(r.client) {
		return
	}
	if dropped, ok := s.complaints.Pass(r.client); ok {
		s.log.Warn("many calls from an address are refused, which may be guesses: it is slowed down", "client", r.client, "not_logged", dropped)
	}
}

// admit looks whether f, whose lock is held, is a data file and the caller has the rights in want.
func (s *Server) admit(r *request, f *file, want uint32, st *unix.Stat_t) wire.Status {
	err := s.stat(f, st)
	switch {
	case err != nil:
		return statusOf(err)
	case f.dir:
		return wire.ErrIsDir
	case !authorize(r.cred, st, want):
		return wire.ErrAcces
	case f.readOnly && want == mayWrite:
		return wire.ErrROFS
	}
	return wire.OK
}

func (s *Server) closeData(f *file) {
	f.mu.RUnlock()
	s.cache.put(f)
}

// read does a READ: at most maxIO bytes, into a buffer that goes out behind the results. Attributes are left out of the
// replies to READ, WRITE and COMMIT: clients of striped files have them from the metadata service.
func (c *conn) read(r *request, reply *oncrpc.Reply) {
	var args wire.ReadArgs
	if args.Decode(&r.args) != nil {
		reply.Stat = oncrpc.GarbageArgs
		r.finish(reply, nil)
		return
	}
	n := int(min(args.Count, maxIO))
	var res wire.ReadRes
	if !c.fromPages(r, &args, n, &res) {
		c.allot(r, n, args.Offset)
		res.Status = c.s.readData(r, &args, &res)
		if res.Count == 0 {
			c.free(r)
		}
		r.data = r.data[:res.Count]
	}
	r.begin(reply)
	r.reply = res.AppendHead(r.reply)
	r.end()
}

// readAtOnce does a small READ of what is in memory, and reports whether it did: nothing that it does waits.
func (c *conn) readAtOnce(r *request) bool {
	if c.raw == nil || c.s.required || c.s.refusals.Any() || r.cred == nil || r.foreign || r.call.Prog != oncrpc.ProgNFS ||
		r.call.Vers != wire.Version || wire.Proc(r.call.Proc) != wire.ProcRead {
		return false
	}
	var args wire.ReadArgs
	d := r.args
	if args.Decode(&d) != nil || args.Count == 0 || args.Count >= minPages || c.s.io.Reaches(int(args.Count), int64(args.Offset)) {
		return false
	}
	f := c.s.cache.hit(args.FH)
	if f == nil {
		return false
	}
	defer c.s.cache.put(f)
	if !f.mu.TryRLock() {
		return false
	}
	defer f.mu.RUnlock()
	var st unix.Stat_t
	if c.s.admit(r, f, mayRead, &st) != wire.OK || args.Offset >= uint64(st.Size) {
		return false
	}
	left := uint64(st.Size) - args.Offset
	n := int(min(uint64(args.Count), left))
	if !c.tryAcquire(int64(bufferSize(n))) {
		return false
	}
	r.payload = getBuffer(n)
	r.data = r.payload.b[:n]
	if !c.s.io.ReadNow(f.fd, r.data, int64(args.Offset)) {
		c.free(r)
		return false
	}
	r.begin(&oncrpc.Reply{XID: r.call.XID})
	r.reply = (&wire.ReadRes{Count: uint32(n), EOF: uint64(n) == left}).AppendHead(r.reply)
	r.end()
	return true
}

// readData reads into r.data as much as there is.
func (s *Server) readData(r *request, args *wire.ReadArgs, res *wire.ReadRes) wire.Status {
	var st unix.Stat_t
	f, status := s.openData(r, args.FH, mayRead, &st)
	if status != wire.OK {
		return status
	}
	defer s.closeData(f)
	if args.Offset >= uint64(st.Size) {
		res.EOF = true
		return wire.OK
	}
	left := st.Size - int64(args.Offset)
	want := r.data[:min(int64(len(r.data)), left)]
	n, err := s.io.Read(f, want, int64(args.Offset))
	if err != nil {
		return statusOf(err)
	}
	res.Count = uint32(n)
	res.EOF = int64(n) == left || n < len(want) // the latter if the file was cut meanwhile
	return wire.OK
}

// write does a WRITE of the payload that was read with the call.
func (c *conn) write(r *request, reply *oncrpc.Reply) {
	if r.garbage {
		reply.Stat = oncrpc.GarbageArgs
		r.finish(reply, nil)
		return
	}
	var res wire.WriteRes
	// The verifier of before: if a sync fails meanwhile, this write may be among what is lost.
	res.Verf = *c.s.verifier.now.Load()
	res.Status = c.s.writeData(r, &res)
	c.free(r)
	r.begin(reply)
	r.reply = res.Append(r.reply)
	r.end()
}

func (s *Server) writeData(r *request, res *wire.WriteRes) wire.Status {
	args := &r.write
	if s.verifier.refused.Load() {
		return wire.ErrIO
	}
	var st unix.Stat_t
	f, status := s.openData(r, args.FH, mayWrite, &st)
	if status != wire.OK {
		return status
	}
	defer s.closeData(f)
	if args.Offset > math.MaxInt64-uint64(len(r.data)) {
		return wire.ErrFBig
	}
	n, err := s.io.Write(f, r.data, int64(args.Offset))
	if n > 0 {
		f.sync.dirty.Store(true)
		err = nil // what is left the client sends again, and gets the error then
	}
	if err == nil && args.Stable != wire.Unstable {
		if _, err = s.sync(f, args.Stable == wire.FileSync); err == nil && f.sync.failed.Load() {
			err = unix.EIO // another sync has failed after this request began: the client sends it again
		}
	}
	res.Count, res.Committed = uint32(n), args.Stable
	return statusOf(err)
}

// commit syncs the whole file, whatever range was asked for: the kernel has no cheaper way that also keeps what is
// needed to find the data.
func (s *Server) commit(r *request, a *wire.CommitArgs) results {
	res := &wire.CommitRes{}
	if s.verifier.refused.Load() {
		res.Status = wire.ErrIO
		return res
	}
	var st unix.Stat_t
	f, status := s.openData(r, a.FH, mayWrite, &st)
	if status != wire.OK {
		res.Status = status
		return res
	}
	defer s.closeData(f)
	verf, err := s.sync(f, false)
	res.Status, res.Verf = statusOf(err), verf
	return res
}
