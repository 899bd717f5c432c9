package metaclient

import (
	"context"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// In a new session no file is open until it has been opened again. Calls that the service makes only for who has the file
// open are held back until then, or the application would see EBADF of a file that it has open.

// lose says that the service no longer holds anything, so that what somebody wants has to be taken again.
func (l *ledger) lose() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.files {
		if h.wanted {
			h.endLoss() // who waits looks again
			h.lost = make(chan struct{})
		}
	}
}

// lostSince returns what is closed when it has been tried to take id again, nil if that is not needed.
func (l *ledger) lostSince(id layout.FileID) chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.files[id]; h != nil {
		return h.lost
	}
	return nil
}

// retried says that it has been tried to take id again, after the loss that lostSince told of.
func (l *ledger) retried(id layout.FileID, loss chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.files[id]; h != nil && h.lost == loss {
		h.endLoss()
	}
}

// endLoss lets go on who waits for lost; ledger.mu is held.
func (h *held) endLoss() {
	if h.lost != nil {
		close(h.lost)
		h.lost = nil
	}
}

// opened returns the file that has to be open for a call, 0 if there is none.
func opened(args any) layout.FileID {
	switch a := args.(type) {
	case *metarpc.LayoutGetArgs:
		return a.ID
	case *metarpc.ReserveArgs:
		return a.ID
	case *metarpc.LockArgs:
		return a.ID
	case *metarpc.SetAttrArgs:
		if a.Open {
			return a.ID
		}
	}
	return 0
}

// reopening returns what a call has to wait for before it is made in the session that there is; nil if it may be made. Those
// that reclaim, or that others may wait for, never wait.
func (c *Client) reopening(ctx context.Context, args any) chan struct{} {
	id := opened(args)
	if id == 0 || ctx.Value(priorKey{}) != nil {
		return nil
	}
	return c.opens.lostSince(id)
}
