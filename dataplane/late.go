package dataplane

import (
	"context"
	"errors"

	"github.com/weftfs/weft/layout"
)

// A device is late after it has left something unanswered for too long that another copy has answered, or has refused a connection, until it
// answers anything. It is one verdict for all requests: writes do not wait for a late device, and reads avoid it. A late device always has a
// question of ours to answer, so it is no longer late once it is back, whatever else is asked of it.

// late reports whether the device is late.
func (d *device) late() bool { return d.lateAt.Load() > d.heard.Load() }

// hear takes in that a request has ended with err.
func (d *device) hear(err error, at int64) {
	if err != nil {
		var over *layout.TimeoutError
		if errors.Is(err, context.Canceled) || errors.As(err, &over) {
			return // not an answer
		}
	}
	if at > d.heard.Load() {
		d.heard.Store(at)
	}
}

// foundLate makes the device late, unless it has answered anything after since. It is asked for a byte of df at off. q.mu may be held.
// Somebody flushes later.
func (d *device) foundLate(df *layout.DataFile, off, since int64) {
	if d.heard.Load() > since {
		return
	}
	first := !d.late()
	d.lateAt.Store(d.plane.watch.now())
	d.ask(df, off)
	if first {
		d.plane.watch.hurry()
	}
}

// ask sends the question that a late device has to answer, if it has none. It does not count as outstanding, as nobody waits for it.
func (d *device) ask(df *layout.DataFile, off int64) {
	if !d.asking.CompareAndSwap(false, true) {
		return
	}
	op := &layout.Op{Kind: layout.OpRead, File: df, Off: off, Data: make([]byte, 1)}
	op.Done = func(op *layout.Op) {
		d.hear(op.Err, d.plane.watch.now())
		d.asking.Store(false)
		if d.late() { // a soft target has given up, or the device was found late meanwhile
			go func() { // ends at once; not here, with the target's locks
				d.ask(df, off)
				d.plane.Flush()
			}()
		}
	}
	d.conn.Load().start(op)
}

// refuses reports whether the device takes no connections.
func (c *conn) refuses() bool { return c.refused != nil && c.refused() }
