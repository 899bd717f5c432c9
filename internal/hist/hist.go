// Package hist counts how long things took, in so few instructions that it is done for each request.
package hist

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Buckets is how many counts there are: bucket i has times of less than 2^i nanoseconds and at least half of that, the last one also what took longer,
// which is hours.
const Buckets = 44

// Hist is a histogram that many goroutines add to. The zero value is empty.
type Hist struct {
	n   [Buckets]atomic.Uint64
	sum atomic.Int64 // nanoseconds
}

// Add counts one.
func (h *Hist) Add(took time.Duration) {
	h.n[min(bits.Len64(uint64(max(took, 0))), Buckets-1)].Add(1)
	h.sum.Add(int64(took))
}

// Counts is what there is at a moment; of what is added meanwhile one number may have more than another.
func (h *Hist) Counts() (c Counts) {
	for i := range h.n {
		c.N[i] = h.n[i].Load()
	}
	c.Sum = time.Duration(h.sum.Load())
	return c
}

// Counts is the content of a histogram.
type Counts struct {
	N   [Buckets]uint64
	Sum time.Duration
}

// Join adds what another one has.
func (c *Counts) Join(other *Counts) {
	for i, n := range other.N {
		c.N[i] += n
	}
	c.Sum += other.Sum
}

// Total is how many there are.
func (c *Counts) Total() (total uint64) {
	for _, n := range c.N {
		total += n
	}
	return total
}
