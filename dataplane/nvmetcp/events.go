package nvmetcp

import (
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// event is an asynchronous event that is to be told.
type event struct {
	a       *association
	request *Command // that it has answered
	event   wire.AsyncEvent
}

// newEventRequest makes an Asynchronous Event Request, which is sent again each time that it was answered.
func (a *association) newEventRequest() *Command {
	sqe := wire.AsyncEventRequest()
	cmd := &Command{Raw: &sqe, Done: a.happened}
	cmd.own = true // and it may take for ever
	return cmd
}

// arm sends an Asynchronous Event Request.
func (a *association) arm(cmd *Command) {
	if a.admin.start(cmd) {
		a.admin.flush()
	}
}

// happened takes the answer to an Asynchronous Event Request. An error ends it for good: it came with the end of the association,
// or the controller does not want so many.
func (a *association) happened(cmd *Command) {
	if cmd.Err != nil {
		return
	}
	e := wire.DecodeAsyncEvent(uint32(cmd.Result))
	c := a.c
	c.mu.Lock()
	c.events = append(c.events, event{a, cmd, e})
	c.totals.events++
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// tell is the goroutine that tells events, one after the other, and sends the requests for more. Since it does so after taking
// one, there are never more than maxEvents of an association. It ends when the Controller is closed.
func (c *Controller) tell() {
	defer c.wg.Done()
	for {
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return
		}
		for {
			c.mu.Lock()
			if len(c.events) == 0 {
				c.mu.Unlock()
				break
			}
			e := c.events[0]
			c.events = c.events[1:]
			c.mu.Unlock()
			if e.a != c.live.Load() && e.a.cause() != nil {
				continue // what it was about is read again anyway
			}
			if e.event.Is(wire.EventPersistentError) {
				e.a.fail(&resetError{"the controller reports a persistent internal error"})
				continue
			}
			e.a.arm(e.request)
			if c.cfg.OnEvent != nil {
				c.cfg.OnEvent(e.event)
			}
		}
	}
}
