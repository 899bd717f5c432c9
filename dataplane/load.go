package dataplane

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// load is how busy a data server is with reads of mirrored files, and how fast it has been lately. All of it may be a little
// out of step: it decides who is asked, not what is right.
type load struct {
	outstanding atomic.Int64 // bytes
	latency     atomic.Int64 // nanoseconds, smoothed
	quantile    atomic.Int64 // nanoseconds, the 95th percentile
	sampled     atomic.Int64 // when there last was an answer (watch.now)
}

const (
	// latencyShare is what a new answer counts for in the smoothed latency: one part in so many.
	latencyShare = 8
	// forgetLatency is how long a server that nobody asks is held to be slow: after each such time half as slow.
	forgetLatency = time.Second
	// minLatency is below what differences do not count.
	minLatency = int64(100 * time.Microsecond)
	// minLate is how long a read takes at least before it is late.
	minLate = int64(time.Millisecond)
)

// cost is what it would cost to read n bytes now. A server with twice the efficiency is worth twice the wait.
func (l *load) cost(n int, efficiency uint32, at int64) float64 {
	latency := max(l.faded(at), minLatency)
	return float64(l.outstanding.Load()+int64(n)) * float64(latency) / (1 + float64(efficiency))
}

// faded is the smoothed latency after a time without answers.
func (l *load) faded(at int64) int64 {
	idle := (at - l.sampled.Load()) / int64(forgetLatency)
	return l.latency.Load() >> min(max(idle, 0), 62)
}

// late is how long a read may take before another mirror is asked as well; there must have been reads before.
func (l *load) late() int64 {
	if q := l.quantile.Load(); q > 0 {
		return max(q, minLate)
	}
	return int64(10 * time.Millisecond)
}

// begin notes that a read of a mirrored file goes out.
func (pc *piece) begin() {
	pc.mirrored = true
	pc.conn.dev.load.outstanding.Add(int64(len(pc.op.Data)))
}

// timed notes that such a read has ended, and ends its rival, if there is one.
func (pc *piece) timed(at int64) {
	dev := pc.conn.dev
	dev.load.outstanding.Add(-int64(len(pc.op.Data)))
	dev.load.sample(at-pc.began, at)
	rival := pc.of
	if rival == nil {
		rival = pc.hedge.Load()
	}
	if rival != nil && pc.op.Err == nil && rival.state.Load() == pieceOut {
		// Not here: a target on the same host may have to wait for a disk. The request waits for it.
		q := pc.owner
		q.pending.Add(1)
		go func() { // ends when nobody reads into the rival's memory any more
			rival.conn.Detach(&rival.op)
			q.drop()
		}()
	}
}

// sample takes in that an answer took n nanoseconds.
func (l *load) sample(n, at int64) {
	old := l.faded(at - n)
	if old == 0 {
		old = n
	}
	l.latency.Store(max(1, old+(n-old)/latencyShare))
	// The estimate goes up by 19 steps or down by one, which comes to rest where one in 20 is above it.
	q := l.quantile.Load()
	if q == 0 {
		q = 2 * n
	}
	step := max(1, q/64)
	if n > q {
		q += min(19*step, n-q)
	} else {
		q -= step
	}
	l.quantile.Store(max(1, q))
	l.sampled.Store(at)
}

// hedgeBudget bounds the reads that are sent twice to 5 % of all of mirrored files. Each read earns a twentieth of one, and a
// few are kept for when many are late at once.
type hedgeBudget struct{ twentieths atomic.Int64 }

const (
	hedgePrice = 20
	hedgeSaved = 16 * hedgePrice
)

func (b *hedgeBudget) earn() {
	if b.twentieths.Load() < hedgeSaved {
		b.twentieths.Add(1)
	}
}

func (b *hedgeBudget) spend() bool {
	for {
		have := b.twentieths.Load()
		if have < hedgePrice {
			return false
		}
		if b.twentieths.CompareAndSwap(have, have-hedgePrice) {
			return true
		}
	}
}

// scratch is memory that hedges read into.
var scratch sync.Pool

func getScratch(n int) []byte {
	if b, ok := scratch.Get().(*[]byte); ok && cap(*b) >= n {
		return (*b)[:n]
	}
	return make([]byte, n, 1<<max(12, bits.Len(uint(n-1))))
}

func putScratch(b []byte) { scratch.Put(&b) }
