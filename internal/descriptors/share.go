package descriptors

import (
	"math"
	"sync/atomic"
	"syscall"
)

// limit is how many descriptors the process may have. Nothing changes that while it runs, see doc.go.
var limit = func() int64 {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return 1024 // what every process gets
	}
	return int64(min(l.Cur, math.MaxInt32))
}()

// The shares.
var (
	Lent     = &Share{eighths: 3}
	Backings = &Share{eighths: 2}
	Dialed   = &Share{eighths: 1}
	Accepted = &Share{eighths: 3}
	Files    = &Share{eighths: 1}
	Tables   = &Share{eighths: 1}
)

// Share is a part of the descriptors of the process.
type Share struct {
	eighths int64
	members atomic.Int64
	taken   atomic.Int64
}

// Size is how many descriptors the share has.
func (s *Share) Size() int { return max(1, int(limit*s.eighths/8)) }

// Join makes the caller a member, until it calls Leave.
func (s *Share) Join() { s.members.Add(1) }

// Leave ends a membership.
func (s *Share) Leave() { s.members.Add(-1) }

// Part is how many descriptors a member may keep now.
func (s *Share) Part() int { return max(1, s.Size()/max(1, int(s.members.Load()))) }

// Take counts a descriptor, which Give gives back. It returns false, and counts nothing, if the share is used up.
func (s *Share) Take() bool {
	if s.taken.Add(1) > int64(s.Size()) {
		s.taken.Add(-1)
		return false
	}
	return true
}

// TakeAnyway counts a descriptor that cannot be refused.
func (s *Share) TakeAnyway() { s.taken.Add(1) }

// Give ends the count of a descriptor, which was closed.
func (s *Share) Give() { s.taken.Add(-1) }
