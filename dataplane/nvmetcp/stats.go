package nvmetcp

import "time"

// traffic is what a queue has carried; guarded by queue.mu.
type traffic struct {
	commands, errors, badDigests uint64
	read, written                uint64 // bytes
}

func (t *traffic) add(o *traffic) {
	t.commands += o.commands
	t.errors += o.errors
	t.badDigests += o.badDigests
	t.read += o.read
	t.written += o.written
}

// totals is what a Controller has done; guarded by Controller.mu.
type totals struct {
	past     traffic // of I/O queues that are gone
	losses   uint64
	attempts int       // to connect, that failed since the loss
	since    time.Time // of the loss; zero: connected
	err      error     // of the latest attempt, or the loss
	events   uint64
}

// Stats is what a Controller is doing and has done.
type Stats struct {
	Addr, NQN string
	State     State
	Since     time.Time // when the controller was lost; zero: it was not, or is back
	Err       error     // why it was lost, or why the latest attempt to connect failed; nil if it is connected
	Attempts  int       // to connect that failed since then
	Losses    uint64    // of connections, each of which ended all

	Queues      int
	Outstanding int   // I/O commands from Start to Done
	Bytes       int64 // of them, with some overhead for each

	Commands, Errors        uint64 // I/O commands answered, and with an error
	BytesRead, BytesWritten uint64
	BadDigests              uint64 // data that came with a wrong digest
	Events                  uint64 // that the controller has reported
}

// Stats returns a snapshot.
func (c *Controller) Stats() Stats {
	c.mu.Lock()
	t := c.totals
	c.mu.Unlock()
	st := Stats{
		Addr: c.cfg.Addr, NQN: c.cfg.SubsysNQN, State: c.State(), Since: t.since, Err: t.err, Attempts: t.attempts, Losses: t.losses, Events: t.events,
	}
	sum := t.past
	if a := c.live.Load(); a != nil {
		st.Queues = len(a.io)
		for _, q := range a.io {
			q.mu.Lock()
			sum.add(&q.stats)
			st.Outstanding += q.outstanding()
			q.mu.Unlock()
			st.Bytes += q.cost.Load()
		}
	}
	st.Commands, st.Errors, st.BadDigests, st.BytesRead, st.BytesWritten = sum.commands, sum.errors, sum.badDigests, sum.read, sum.written
	return st
}

// account keeps what a queue that is gone has carried.
func (c *Controller) account(q *queue) {
	if q.admin() {
		return
	}
	q.mu.Lock()
	sum := q.stats
	q.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.totals.past.add(&sum)
}
