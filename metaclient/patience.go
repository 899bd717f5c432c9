package metaclient

import (
	"context"
	"time"

	"github.com/weftfs/weft/layout"
)

// softKey is under which a context says who waits: without a *Client the daemon, with one an application. If that is not nil, the context is
// one that patient made for it.
type softKey struct{}

// Soft marks the context of calls that an application waits for: on a soft mount they are given up (Config.Patience).
func Soft(ctx context.Context) context.Context {
	return context.WithValue(ctx, softKey{}, (*Client)(nil))
}

// Hard takes away what Soft has done, for what is to be carried through though an application waits for it.
func Hard(ctx context.Context) context.Context { return context.WithValue(ctx, softKey{}, nil) }

// Patient returns a context for who waits for something that the service of an inode's shard has to answer first. If ctx is marked by Soft
// it ends when a call to that service would be given up, with the call's error as its cause. stop is called when the waiting is over.
func (v *Volume) Patient(ctx context.Context, id layout.FileID) (waiting context.Context, stop func()) {
	return v.of(id).patient(ctx)
}

// patient is Volume.Patient for the service of this session. It gives up when nothing was heard of that for as long as Config.Patience says,
// whatever the reason. From half of that time on it asks for a sign of life, which comes at once, whatever else the service does, unless it must not
// answer anything as it does not know whether it may (package server/meta).
func (c *Client) patient(ctx context.Context) (waiting context.Context, stop func()) {
	limit := c.cfg.Patience
	watched, soft := ctx.Value(softKey{}).(*Client)
	if limit.Time == 0 || !soft || watched == c {
		return ctx, func() {}
	}
	began := time.Now()
	waiting, cancel := context.WithCancelCause(context.WithValue(ctx, softKey{}, c))
	go func() { // watches the service; ends with the waiting
		for {
			silent := time.Since(c.lastHeard(began))
			rest := limit.Time - silent
			switch {
			case rest <= 0:
				cancel(limit.Over(nil))
				return
			case silent < limit.Time/2:
				rest = limit.Time/2 - silent
			default:
				c.probe()
			}
			if !sleep(waiting, rest) {
				return
			}
		}
	}()
	return waiting, func() { cancel(nil) }
}

// lastHeard is when something came from the service, or began if that is later.
func (c *Client) lastHeard(began time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heard.After(began) {
		return c.heard
	}
	return began
}

// probe has the connection's writer ask the service for a sign of life. It does not wait for either.
func (c *Client) probe() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return
	}
	select {
	case c.conn.probed <- struct{}{}:
	default:
	}
}
