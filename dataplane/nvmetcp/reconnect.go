package nvmetcp

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// firstDelay bounds the time before the first attempt to connect again.
const firstDelay = time.Second

// run is the goroutine that owns the Controller's life after Connect: it waits for the association to end, ends what was
// outstanding on it and makes the next one. It ends when the Controller is closed or given up.
func (c *Controller) run(a *association) {
	defer c.wg.Done()
	for a != nil {
		select {
		case <-a.down:
		case <-c.ctx.Done():
			c.live.Store(nil)
			c.farewell(a)
		}
		c.become(StateResetting)
		lost := time.Now()
		cause := a.stop()
		if errors.Is(cause, ErrClosed) {
			break
		}
		c.lost(cause)
		delay := min(firstDelay, c.cfg.ReconnectDelay)
		if errors.Is(cause, ErrReset) && lost.Sub(a.began) > delay {
			delay = 0
		}
		if a = c.reconnect(lost, delay); a != nil {
			c.become(StateLive)
		}
	}
	c.become(StateDead)
}

// reconnect makes the next association, first after delay, or returns nil if the Controller is closed or given up.
func (c *Controller) reconnect(lost time.Time, delay time.Duration) *association {
	ctx := c.ctx
	if c.cfg.CtrlLossTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, lost.Add(c.cfg.CtrlLossTimeout), errControllerLoss)
		defer cancel()
	}
	if c.cfg.FastFail > 0 {
		timer := time.AfterFunc(c.cfg.FastFail-time.Since(lost), func() { c.expire() })
		defer timer.Stop()
	}
	c.become(StateConnecting)
	for {
		timer := time.NewTimer(jitter(delay))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			c.giveUp(context.Cause(ctx))
			return nil
		}
		a, err := c.establish(ctx)
		if err == nil {
			c.regained(time.Since(lost))
			return a
		}
		c.failedAgain(err)
		var refused *ConnectError
		switch {
		case ctx.Err() != nil:
			c.giveUp(context.Cause(ctx))
			return nil
		case errors.As(err, &refused) && refused.Final:
			c.giveUp(err)
			return nil
		}
		delay = min(max(2*delay, firstDelay), c.cfg.ReconnectDelay)
	}
}

// jitter shortens d by up to a fifth, so that those who have lost the same server do not come back together.
func jitter(d time.Duration) time.Duration {
	return d - time.Duration(rand.Float64()*float64(d)/5)
}

// expire makes the Controller one that is not expected back soon.
func (c *Controller) expire() {
	c.turn.Lock()
	defer c.turn.Unlock()
	if c.State() == StateConnecting {
		c.enter(StateFailing)
	}
}

// become enters a state.
func (c *Controller) become(s State) {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.enter(s)
}

// enter sets the state and tells it. turn is held.
func (c *Controller) enter(s State) {
	c.state.Store(int32(s))
	if c.cfg.OnState != nil {
		c.cfg.OnState(s)
	}
}
