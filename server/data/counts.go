package data

import (
	"encoding/binary"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/hist"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"golang.org/x/sys/unix"
)

// counts is what calls of NFS came to.
type counts struct {
	procs [wire.ProcCommit + 1]hist.Hist

	mu     sync.Mutex
	errors map[wire.Status]uint64
}

// took notes that a request was answered, but for the sending of the answer.
func (n *counts) took(r *request, began time.Time) {
	if r.call.Prog != oncrpc.ProgNFS || int(r.call.Proc) >= len(n.procs) {
		return
	}
	n.procs[r.call.Proc].Add(time.Since(began))
	if r.results == 0 || len(r.reply) < r.results+4 {
		return
	}
	if status := wire.Status(binary.BigEndian.Uint32(r.reply[r.results:])); status != wire.OK && r.call.Proc != 0 {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.errors == nil {
			n.errors = map[wire.Status]uint64{}
		}
		n.errors[status]++
	}
}

// Stats is what a server has and has done since it was started.
type Stats struct {
	Procs       map[wire.Proc]*hist.Counts // calls of NFS
	Errors      map[wire.Status]uint64     // those of them that were
	Connections int
	Free, Total int64 // bytes of the file system
}

// Stats tells how the server is.
func (s *Server) Stats() (*Stats, error) {
	st := &Stats{Procs: map[wire.Proc]*hist.Counts{}, Errors: map[wire.Status]uint64{}}
	for proc := range s.counts.procs {
		if counts := s.counts.procs[proc].Counts(); counts.Total() > 0 {
			st.Procs[wire.Proc(proc)] = &counts
		}
	}
	s.counts.mu.Lock()
	for status, n := range s.counts.errors {
		st.Errors[status] = n
	}
	s.counts.mu.Unlock()
	s.mu.Lock()
	st.Connections = len(s.conns)
	s.mu.Unlock()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(s.root, &fs); err != nil {
		return st, err
	}
	st.Free, st.Total = int64(fs.Bavail)*fs.Bsize, int64(fs.Blocks)*fs.Bsize
	return st, nil
}
