package nfs3

import (
	"time"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// sweepLater sees to it that sweep runs in a while. Target.mu is held.
func (t *Target) sweepLater() {
	if !t.sweeping {
		t.sweeping = true
		time.AfterFunc(t.cfg.Patience.Time/16, t.sweep)
	}
}

// sweep gives up the Ops that had no answer for Config.Patience. A WRITE that may have reached the server does not end,
// for it may still be carried out: its caller is told (Op.Overdue). What such WRITEs hold is bounded by the window.
func (t *Target) sweep() {
	limit := time.Now().Add(-t.cfg.Patience.Time)
	var ended []*layout.Op
	t.mu.Lock()
	t.sweeping = false
	look := func(r *rpc) {
		if r.op == nil || r.heard.After(limit) {
			return
		}
		err := t.cfg.Patience.Over(t.trouble.current())
		sent := r.state == stateSent
		if r.proc == wire.ProcWrite && (sent || r.resent) {
			if r.op.Overdue != nil && !r.overdue {
				r.overdue = true
				r.op.Overdue(r.op, err)
			}
			return
		}
		ended = append(ended, r.endOp(err))
		if !sent {
			t.drop(r)
		}
	}
	for l := range t.lists() {
		for r := l.head; r != nil; {
			next := r.next
			look(r)
			r = next
		}
	}
	for _, s := range t.slots {
		if c := s.conn; c != nil {
			for _, r := range c.calls {
				look(r)
			}
			if r := c.current; r != nil && r.op != nil && !r.heard.After(limit) {
				c.fail(errSlow) // then it can be ended
			}
		}
	}
	if t.live > 0 && !t.closed {
		t.sweepLater()
	}
	t.dispatch()
	t.mu.Unlock()
	for _, op := range ended {
		op.Done(op)
	}
	t.Flush()
}
