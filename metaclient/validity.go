package metaclient

import (
	"sync/atomic"
	"time"
)

// validity is until when leases hold by our own clock. The monotonic clock stands still while the machine is suspended,
// the other one can be set back: so both must agree.
type validity struct {
	start      time.Time
	mono, wall atomic.Int64 // nanoseconds since start and since 1970
}

// rest is how long leases still hold; they do not if it is not positive.
func (v *validity) rest() time.Duration {
	now := time.Now()
	return time.Duration(min(v.mono.Load()-int64(now.Sub(v.start)), v.wall.Load()-now.UnixNano()))
}

// extend says that a call that was sent at a time has been answered. There is one caller at a time.
func (v *validity) extend(sent time.Time, lease time.Duration) {
	d := fullLease(lease)
	v.mono.Store(max(v.mono.Load(), int64(sent.Sub(v.start)+d)))
	v.wall.Store(max(v.wall.Load(), sent.UnixNano()+int64(d)))
}

// fullLease is how long leases hold after the sending of a call: clocks may run at different speeds.
func fullLease(lease time.Duration) time.Duration { return lease / 10 * 9 }

// end says that leases no longer hold.
func (v *validity) end() {
	v.mono.Store(0)
	v.wall.Store(0)
}
