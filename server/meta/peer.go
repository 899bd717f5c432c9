package meta

import (
	"context"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/locktable"
)

// Peers are the services of the volume's other shards. Calls may be made at the same time, be lost, come late, twice and in any order; only a
// Settle must not wait behind a Hold, which may take a while.
type Peers interface {
	// Hold and Settle have Service.Hold and Service.Settle called at the service of a shard, wherever that is now. What became of a call that
	// failed is not known.
	Hold(ctx context.Context, shard int, h *Hold) (*Held, error)
	Settle(ctx context.Context, shard int, s *Settle) error
	// LockWaits has Service.LockWaits called there.
	LockWaits(ctx context.Context, shard int, after locktable.Wait) ([]locktable.Wait, error)
}

// Hold asks the service of another shard to prepare inodes of its for a change that the asker is about to commit.
type Hold struct {
	Shard  int    // of the asker
	Row    []byte // Config.Row of the asker
	To     uint64 // the epoch of the asked service's Config.Row, as far as the asker knows
	Change uint64 // names the change among those of this Row that concern the asked shard; they count up
	Oldest uint64 // those with smaller numbers are settled
	Items  []HoldItem
}

// HoldItem is an inode of which the change makes known leases wrong. With Last it loses its last name: if it is a regular file nobody else
// decides meanwhile whether it goes, otherwise it goes with the change.
type HoldItem struct {
	ID    layout.FileID
	Lease metarpc.Lease
	Last  bool
}

// HoldState is what has become of a Hold.
type HoldState uint8

const (
	HoldReady   HoldState = iota // all is prepared
	HoldPending                  // not yet: ask again
	HoldGrace                    // not before the grace period is over, or turned back: the change is to be made again
	HoldOver                     // it is settled
	HoldOther                    // nothing is held: it was meant for another service than the one that has Row
)

// Held answers a Hold. Row is Config.Row of the service that was asked. The inodes are prepared as long as that is the shard's row in the catalog:
// the batch of the change guards it.
type Held struct {
	State HoldState
	Row   []byte
}

// Settle ends holds: the changes were committed, or never will be.
type Settle struct {
	Shard   int    // as in Hold
	Row     []byte // as in Hold
	Oldest  uint64 // as in Hold
	Changes []Settled
}

// Settled is what has become of a change.
type Settled struct {
	Change    uint64
	To        uint64 // as in the Hold
	Committed bool   // or may have been
}
