package dataplane

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/layout"
)

// DeviceStats is what a Plane has done at a device since it was made.
type DeviceStats struct {
	Device                 layout.DeviceID
	Reads, Writes, Commits OpStats
	Outstanding            int64     // requests at the target, also those that nobody waits for any more
	Down                   bool      // it is late or stuck: mirrored data goes on without it
	Errors                 uint64    // requests that failed, and attempts to make the target
	Err                    error     // the latest of them, nil if there was none
	ErrTime                time.Time // when that was

	Target Target // what Config.Dial has made, nil before; it stays the plane's
}

// Ops is how many requests there were.
func (s *DeviceStats) Ops() uint64 { return s.Reads.Ops() + s.Writes.Ops() + s.Commits.Ops() }

// OpStats is what requests of one kind came to. Those that failed or were detached do not count.
type OpStats struct {
	Bytes   uint64
	Time    time.Duration // from start to end, of all requests together
	Latency Latency
}

// Ops is how many requests there were.
func (s *OpStats) Ops() (n uint64) {
	for _, count := range s.Latency {
		n += count
	}
	return n
}

// Latency counts requests by the time they took, as [hist.Counts] does.
type Latency [hist.Buckets]uint64

// Quantile is a time that about the share q of the requests did not exceed, 0 < q <= 1. It is wrong by a factor of 1.5 at most.
// Without requests it is 0.
func (l *Latency) Quantile(q float64) time.Duration {
	total := uint64(0)
	for _, count := range l {
		total += count
	}
	left := uint64(math.Ceil(q * float64(total)))
	for i, count := range l {
		if left <= count {
			return time.Duration((3 << i) / 4) // the middle of 2^(i-1) and 2^i
		}
		left -= count
	}
	return 0 // total was less than left: never
}

// Stats returns what was done at each device that there were requests for, in the order of their ids. Requests that end
// meanwhile may be in some of a device's numbers and not yet in others.
func (p *Plane) Stats() []DeviceStats {
	var all []DeviceStats
	for _, d := range *p.devices.Load() {
		u := &d.usage
		st := DeviceStats{
			Device: d.id, Outstanding: u.outstanding.Load(), Errors: u.errors.Load(), Down: d.lateToWrite(),
			Reads: u.kind(layout.OpRead).stats(), Writes: u.kind(layout.OpWrite).stats(), Commits: u.kind(layout.OpCommit).stats(),
		}
		if f := u.failed.Load(); f != nil {
			st.Err, st.ErrTime = f.err, f.at
		}
		if c := d.conn.Load(); c != nil {
			st.Target = c.Target
		}
		all = append(all, st)
	}
	slices.SortFunc(all, func(a, b DeviceStats) int { return slices.Compare(a.Device[:], b.Device[:]) })
	return all
}

// Outstanding is how many requests are at data servers, also those that nobody waits for any more.
func (p *Plane) Outstanding() (n int64) {
	for _, d := range *p.devices.Load() {
		n += d.usage.outstanding.Load()
	}
	return n
}

// usage is what DeviceStats is made of.
type usage struct {
	outstanding atomic.Int64
	kinds       [layout.OpCommit]tally
	errors      atomic.Uint64
	failed      atomic.Pointer[failure]
}

type tally struct {
	bytes atomic.Uint64
	times hist.Hist
}

type failure struct {
	err error
	at  time.Time
}

func (u *usage) kind(k layout.OpKind) *tally { return &u.kinds[k-layout.OpRead] }

// ended takes in that a request has, which was counted as outstanding, after so many nanoseconds.
func (u *usage) ended(op *layout.Op, took int64) {
	u.outstanding.Add(-1)
	u.took(op, took)
}

// took is ended of a request that was never outstanding.
func (u *usage) took(op *layout.Op, took int64) {
	if op.Err != nil {
		if !errors.Is(op.Err, context.Canceled) {
			u.fail(op.Err)
		}
		return
	}
	t := u.kind(op.Kind)
	t.times.Add(time.Duration(took))
	t.bytes.Add(uint64(max(op.N, 0)))
}

func (u *usage) fail(err error) {
	u.errors.Add(1)
	u.failed.Store(&failure{err, time.Now()})
}

func (t *tally) stats() OpStats {
	times := t.times.Counts()
	return OpStats{Bytes: t.bytes.Load(), Time: times.Sum, Latency: times.N}
}
