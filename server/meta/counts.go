package meta

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/catalog"
)

// counts is what calls came to.
type counts struct {
	ops [metarpc.Ops]hist.Hist

	mu       sync.Mutex
	refusals map[metarpc.Status]uint64
}

func (n *counts) took(op metarpc.Op, began time.Time) {
	if int(op) < len(n.ops) {
		n.ops[op].Add(time.Since(began))
	}
}

func (n *counts) refused(status metarpc.Status) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refusals == nil {
		n.refusals = map[metarpc.Status]uint64{}
	}
	n.refusals[status]++
}

// Stats is what a service has and has done since it was started.
type Stats struct {
	Calls    map[metarpc.Op]*hist.Counts // that were answered
	Refusals map[metarpc.Status]uint64   // those of them that were errors

	Sessions, Connected int   // of clients; and those of them with a connection
	Leases              int   // inodes that clients have leases on
	Files               int   // that are open, or written, or to be removed
	Garbage             int64 // data files that wait for removal
	Stale               int64 // files with copies that are to be made anew
	Copied              int64 // bytes for that
	Waiting             []metarpc.WaitingFiles
	Grace               bool // clients of before may still come back
	Devices             []metarpc.DeviceInfo
	Catalog             catalog.Room
}

// Counted is what calls came to, also after the service has ended.
func (s *Service) Counted() (calls map[metarpc.Op]*hist.Counts, refusals map[metarpc.Status]uint64) {
	calls, refusals = map[metarpc.Op]*hist.Counts{}, map[metarpc.Status]uint64{}
	for op := range s.counts.ops {
		if counts := s.counts.ops[op].Counts(); counts.Total() > 0 {
			calls[metarpc.Op(op)] = &counts
		}
	}
	s.counts.mu.Lock()
	defer s.counts.mu.Unlock()
	maps.Copy(refusals, s.counts.refusals)
	return calls, refusals
}

// InGrace reports whether the service waits for clients of before it was started.
func (s *Service) InGrace() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.grace
}

// Stats tells how the service is, with volume also what is the same for all services of one. What the catalog has to be asked for is left out if it does
// not answer before ctx ends.
func (s *Service) Stats(ctx context.Context, volume bool) (*Stats, error) {
	st := &Stats{}
	st.Calls, st.Refusals = s.Counted()
	s.mu.Lock()
	st.Sessions, st.Leases, st.Files, st.Grace = len(s.sessions), len(s.leases), len(s.files), s.grace
	for _, sess := range s.sessions {
		sess.mu.Lock()
		if sess.conn != nil {
			st.Connected++
		}
		sess.mu.Unlock()
	}
	s.mu.Unlock()
	st.Stale, st.Copied, st.Waiting = s.staleFiles(ctx), s.resilver.copied.Load(), s.waiting()
	if !volume {
		return st, nil
	}
	st.Garbage, st.Catalog = s.cfg.Files.GarbageCount(ctx), s.engine.Room()
	devices, err := s.devices(ctx, nil, &metarpc.Empty{})
	if err != nil {
		return st, err
	}
	st.Devices = devices.Devices
	return st, nil
}
