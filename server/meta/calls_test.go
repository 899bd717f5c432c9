package meta

import (
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// TestHandlers has a handler for each op, and a refusal for what is none.
func TestHandlers(t *testing.T) {
	for op := metarpc.Op(1); op.Valid(); op++ {
		if int(op) >= len(handlers) || handlers[op] == nil {
			t.Errorf("%v has no handler", op)
		}
	}
	if len(handlers) != metarpc.Ops {
		t.Errorf("handlers for ops below %d, of which there are those below %d", len(handlers), metarpc.Ops)
	}
	h := startMemory(t)
	c := h.client()
	h.svc.mu.Lock()
	sess := h.svc.sessions[c.welcome.Session]
	h.svc.mu.Unlock()
	for _, op := range []metarpc.Op{0, metarpc.Op(metarpc.Ops), 0xffff} {
		call := &call{sess: sess, h: metarpc.CallHeader{Slot: 1, Sequence: 1, Op: op}}
		h.svc.answer(call, &metarpc.Empty{}, nil)
		r, _, err := metarpc.ParseReplyHeader(call.frame[4:])
		if err != nil || r.Status != metarpc.StatusBadArgs {
			t.Errorf("%v: answer %+v (%v)", op, r, err)
		}
	}
}
