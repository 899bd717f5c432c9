package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weftfs/weft/layout"
)

const (
	// deadTime is for how long data servers are waited for that are out of reach when a mount is to end.
	deadTime = 5 * time.Second
	// mirrorMargin is how much longer than mirror-timeout it is at least: then the other copies are good enough.
	mirrorMargin = 3 * time.Second
	// reachTime is how often it is looked.
	reachTime = 250 * time.Millisecond
)

// unreachableServer is why a mount that is to end does not wait until everything is stable.
type unreachableServer struct {
	device layout.DeviceID
	since  time.Time
	err    error
}

func (e *unreachableServer) Error() string {
	return fmt.Sprintf("data server %v cannot be reached since %s: %v", e.device, e.since.Format(time.RFC3339), e.err)
}

func (e *unreachableServer) Unwrap() error { return e.err }

// whileReachable returns a context that ends with an unreachableServer once two things have been so for deadTime: all
// data servers that have requests are out of reach, and nothing has become stable. A data server that is only slow is
// waited for.
func (d *daemon) whileReachable(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() { // ends with ctx
		patience := max(deadTime, d.cfg.options.mirror+mirrorMargin)
		retained, progress := d.data.Retained(), time.Now()
		tick := time.NewTicker(reachTime)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if now := d.data.Retained(); now != retained {
				retained, progress = now, time.Now()
			}
			if dead := d.allUnreachable(); dead != nil && time.Since(dead.since) >= patience && time.Since(progress) >= patience {
				cancel(dead)
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// allUnreachable returns the data server that went out of reach last, if all that have requests are out of reach.
func (d *daemon) allUnreachable() (last *unreachableServer) {
	for _, st := range d.data.Stats() {
		if st.Outstanding == 0 {
			continue
		}
		target := rpcTarget(st.Target)
		if target == nil {
			return nil
		}
		t := target.Stats()
		if t.Trouble.IsZero() {
			return nil
		}
		if last == nil || t.Trouble.After(last.since) {
			last = &unreachableServer{st.Device, t.Trouble, t.Err}
		}
	}
	return last
}

// causeOf is err, with the reason if it is that ctx has ended.
func causeOf(ctx context.Context, err error) error {
	var dead *unreachableServer
	if err != nil && errors.As(context.Cause(ctx), &dead) {
		return errors.Join(dead, err)
	}
	return err
}
