package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// maxANALog bounds the ANA log, in bytes.
	maxANALog = 4 << 20
	// logChunk is how much of a log is read at once: every controller takes that.
	logChunk = 4096
	// maxRestarts is how often the reading of a log that changes meanwhile is begun anew.
	maxRestarts = 10
	// defaultANATT is how long a change may take on a controller that does not say it.
	defaultANATT = 10 * time.Second
)

// anaGroups is the ANA state of each group on one controller; nil if it has no ANA.
type anaGroups struct {
	count  uint64 // CHGCNT of the log
	states map[uint32]wire.ANAState
	groups map[uint32]uint32 // by namespace, as the log has them
}

// class is what may be done with a namespace of a group, and why not more.
func (g *anaGroups) class(nsid, group uint32) (class, string) {
	if g == nil || g.states == nil {
		return classOptimized, ""
	}
	if now := g.groups[nsid]; now != 0 {
		group = now // namespaces may move between groups
	}
	if group == 0 {
		return classOptimized, ""
	}
	switch state := g.states[group]; state {
	case wire.ANAOptimized:
		return classOptimized, ""
	case wire.ANANonOptimized:
		return classNonOptimized, ""
	case 0:
		return classOut, fmt.Sprintf("the ANA log has no group %d", group)
	default:
		return classOut, fmt.Sprintf("ANA group %d: %v", group, state)
	}
}

// changing reports whether a group is in the state change.
func (g *anaGroups) changing() bool {
	if g == nil {
		return false
	}
	for _, s := range g.states {
		if s == wire.ANAChange {
			return true
		}
	}
	return false
}

// errMoves is a log that changes faster than it can be read.
var errMoves = errors.New("the log changes while it is read, again and again: look at what changes at the target")

// readANA reads the ANA log, at once if the controller can send so much, since Linux takes no notice of an offset; else in pieces, which
// belong together if CHGCNT is the same in the end. That last look also arms the event again.
func readANA(ctx context.Context, c controller) (*anaGroups, error) {
	for range maxRestarts {
		g, whole, err := readANAOnce(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("ANA log: %w", err)
		}
		if whole {
			return g, nil
		}
	}
	return nil, fmt.Errorf("ANA log: %w", errMoves)
}

func readANAOnce(ctx context.Context, c controller) (g *anaGroups, whole bool, err error) {
	var log []byte
	var head wire.ANAHeader
	g = &anaGroups{states: map[uint32]wire.ANAState{}, groups: map[uint32]uint32{}}
	for next := logChunk; ; {
		piece := make([]byte, next)
		if err := c.GetLogPage(ctx, wire.GetLogPage{ID: wire.LogANA, RAE: true, NSID: wire.AllNamespaces, Offset: uint64(len(log))}, piece); err != nil {
			return nil, false, err
		}
		log = append(log, piece...)
		if err := head.Decode(log); err != nil {
			return nil, false, err
		}
		clear(g.states)
		clear(g.groups)
		err = nil
		for group, bad := range wire.ANAGroups(log) {
			if err = bad; err != nil {
				break
			}
			g.states[group.ID] = group.State
			for nsid := range group.NSIDs() {
				g.groups[nsid] = group.ID
			}
		}
		if err == nil {
			break
		}
		if !errors.Is(err, wire.ErrShort) || len(log) >= maxANALog {
			// It may be two logs whose pieces do not fit. If it is not, it is wrong.
			if moved, merr := anaMoved(ctx, c, head.ChangeCount); merr != nil || moved {
				return nil, false, merr
			}
			return nil, false, err
		}
		next = max(c.Limits().MaxTransfer, logChunk)
		if 2*len(log) <= next {
			log, next = nil, 2*len(log)
		}
	}
	g.count = head.ChangeCount
	moved, err := anaMoved(ctx, c, head.ChangeCount)
	return g, !moved, err
}

// anaMoved reads the log's head again.
func anaMoved(ctx context.Context, c controller, count uint64) (bool, error) {
	b := make([]byte, wire.ANAHeaderSize)
	if err := c.GetLogPage(ctx, wire.GetLogPage{ID: wire.LogANA, NSID: wire.AllNamespaces}, b); err != nil {
		return false, err
	}
	var head wire.ANAHeader
	err := head.Decode(b)
	return head.ChangeCount != count, err
}

// anaTimer runs while a group of a controller is in the state change.
type anaTimer struct{ t *time.Timer }

// update starts or stops the timer by what the log says. It runs from the first log on that has such a group.
func (a *anaTimer) update(g *anaGroups, anatt time.Duration) {
	switch {
	case !g.changing():
		a.stop()
	case a.t == nil:
		if anatt == 0 {
			anatt = defaultANATT
		}
		a.t = time.NewTimer(2 * anatt)
	}
}

func (a *anaTimer) stop() {
	if a.t != nil {
		a.t.Stop()
		a.t = nil
	}
}

// c is the channel of the timer, nil if it does not run.
func (a *anaTimer) c() <-chan time.Time {
	if a.t == nil {
		return nil
	}
	return a.t.C
}
