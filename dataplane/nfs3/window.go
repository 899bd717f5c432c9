package nfs3

import (
	"math/bits"
	"time"
)

const (
	// minWindow is what may be in flight on each connection, in bytes, however long it takes.
	minWindow = 2 << 20
	// baseTime is for how long the shortest reply time counts, at least; the way may get longer. A new one is looked for
	// with the least window, or it would contain the waiting that the window itself makes.
	baseTime = 30 * time.Second
)

// window bounds the bytes of large requests that are on connections, by delay as TCP Vegas does: what a request took
// longer than the shortest one lately it must have waited for others, which tells how much of the window waits at the
// server. The window grows while that is less than half of the least window, and shrinks while it is more than that. So a
// server that is far away gets many requests, and one that is merely slow few: what has not been sent can still be
// ended, or sent elsewhere, and small requests do not wait behind it.
//
// Guarded by Target.mu.
type window struct {
	size, used  int // bytes
	least, most int
	largest     int // request

	// A round is as many answers as fit the window.
	round    int     // bytes answered in it
	waited   float64 // the least part of an answer's time in it that was waiting
	hindered bool    // the window has held something up in it

	// The shortest replies by size of request, from 128 KiB doubling; 0 is none. base is of the time before since.
	base, next [8]time.Duration
	since      time.Time
}

func (w *window) init(largest int) {
	w.largest = largest
	w.connections(1)
	w.waited = 1
}

// connections says how many connections there are.
func (w *window) connections(n int) {
	n = max(n, 1)
	w.least = n * max(minWindow, 2*(w.largest+overhead))
	w.most = max(w.least, n*maxInFlightBytes)
	w.size = min(max(w.size, w.least), w.most)
}

// admits tells whether a request that costs so much may be sent. One that is alone may.
func (w *window) admits(cost int) bool {
	if w.used > 0 && w.used+cost > w.size {
		w.hindered = true
		return false
	}
	return true
}

// answered takes the answer to r, which counts as used still.
func (w *window) answered(r *rpc, now time.Time) {
	took := max(now.Sub(r.at), 1)
	if now.Sub(w.since) > baseTime {
		w.base, w.next, w.since = w.next, [8]time.Duration{}, now
		w.size = w.least
	}
	i := min(max(bits.Len(uint(r.count-1))-17, 0), len(w.base)-1)
	if w.next[i] == 0 || took < w.next[i] {
		w.next[i] = took
	}
	base := w.next[i]
	if b := w.base[i]; b > 0 {
		base = min(base, b)
	}
	w.waited = min(w.waited, 1-float64(base)/float64(took))
	if w.round += r.cost(); w.round < w.size {
		return
	}
	if w.hindered {
		switch waiting := int(w.waited * float64(w.size)); {
		case waiting < w.least/2:
			w.size = min(w.size+w.size/8, w.most)
		case waiting > w.least:
			w.size = max(w.size-w.size/8, w.least)
		}
	}
	w.round, w.waited, w.hindered = 0, 1, false
}
