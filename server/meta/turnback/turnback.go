// Package turnback ends the waiting of changes that stand in the way of a recall.
//
// The kernel of a client holds the lock of a directory until a change of names in it is answered. A recall of the same
// client has to wait for that lock, and the change may be waiting for another client, which waits for the recall. So
// whoever waits for clients on behalf of a change is in a [Waits]. A client whose changes stand in the way of a recall
// says so, and the service turns those back that are waiting. A change that does not wait is about to be answered, unless
// it waits at the service of another shard and what it needs of this one is held already: then the recall takes as
// long as names are kept.
//
// Lock order: Waits.mu may be taken with any other mutex held, and nothing is locked with it held.
package turnback

import (
	"context"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Error is why the waiting of a change ends that is turned back: the cause of its context.
var Error = &metarpc.Error{Status: metarpc.StatusTurnedBack, Message: "it stood in the way of a recall"}

// Waits are the changes that wait for clients. The zero Waits is empty.
type Waits struct {
	mu   sync.Mutex
	list []*Wait
}

// Wait is a change that waits, in the list of in. A nil Wait is one that cannot be turned back.
type Wait struct {
	in     *Waits
	owner  any
	items  []metarpc.LeaseItem
	cancel context.CancelCauseFunc
}

// Begin adds a change that waits with the returned context, until End. The owner is the session that has made the
// change, or nil if the client is not known here: then the change stands in everybody's way. items are of the inodes that
// it affects, whose locks the kernel of that client may hold.
func (w *Waits) Begin(ctx context.Context, owner any, items []metarpc.LeaseItem) (context.Context, *Wait) {
	ctx, cancel := context.WithCancelCause(ctx)
	wait := &Wait{in: w, owner: owner, items: items, cancel: cancel}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, wait)
	return ctx, wait
}

// End follows Begin when the waiting is over.
func (wait *Wait) End() {
	if wait == nil {
		return
	}
	wait.cancel(nil)
	w := wait.in
	w.mu.Lock()
	defer w.mu.Unlock()
	if i := slices.Index(w.list, wait); i >= 0 {
		last := len(w.list) - 1
		w.list[i], w.list[last] = w.list[last], nil
		w.list = w.list[:last]
	}
}

// TurnBack ends the waiting of changes of an owner, and of those whose owner is not known, that may hold the lock of an
// inode that is recalled. The change by for which it is recalled, if that is in the list, goes on. But if nothing else
// stands in the way, and its owner is not known, it may be a change of the client itself that is asked to forget.
func (w *Waits) TurnBack(owner any, recalled []metarpc.LeaseItem, by *Wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	others := false
	for _, wait := range w.list {
		stands := slices.ContainsFunc(wait.items, func(it metarpc.LeaseItem) bool {
			return slices.ContainsFunc(recalled, func(r metarpc.LeaseItem) bool { return r.ID == it.ID })
		})
		if wait != by && (wait.owner == owner || wait.owner == nil) && stands {
			wait.cancel(Error)
			others = true
		}
	}
	if by != nil && by.owner == nil && !others {
		by.cancel(Error)
	}
}
