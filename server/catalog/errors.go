package catalog

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound: the key is absent.
	ErrNotFound = errors.New("catalog: not found")
	// ErrConflict: the commit lost a race inside the engine and had no effect; the same batch may be tried again.
	ErrConflict = errors.New("catalog: conflict, try again")
	// ErrUnknown: the commit may or may not have happened, and may still happen; see Unknown outcomes in the package comment.
	ErrUnknown = errors.New("catalog: outcome unknown")
	// ErrTooLarge: the batch or one of its values is over a limit in Caps.
	ErrTooLarge = errors.New("catalog: too large")
	// ErrFull: the store has no room for the commit until somebody makes room, as the error says. If the batch has Grows
	// and the engine is [Roomy], batches without Grows may still succeed; else none does. Reads go on. The commit had no
	// effect, unless the error is ErrUnknown as well: then the engine does not go on either.
	ErrFull = errors.New("catalog: full")
	// ErrInvalid: the batch breaks a rule that no engine could follow; a programming error.
	ErrInvalid = errors.New("catalog: invalid batch")
	// ErrNotCounters: the row is not a counter row, though a delta was added to it or counters were asked for.
	ErrNotCounters = errors.New("catalog: not a counter row")
	// ErrSnapshotExpired: the revision of the snapshot is no longer kept.
	ErrSnapshotExpired = errors.New("catalog: snapshot expired")
	// ErrClosed: the engine or snapshot is closed, or the engine stopped after a failed write.
	ErrClosed = errors.New("catalog: closed")

	// ErrLocked: another user holds the catalog, and the engine allows one.
	ErrLocked = errors.New("catalog: already open elsewhere")
	// ErrCorrupt: what is stored cannot be what was written.
	ErrCorrupt = errors.New("catalog: corrupt")
	// ErrNotCatalog: there is something at that place, but no catalog.
	ErrNotCatalog = errors.New("catalog: not a catalog")
	// ErrNoCatalog: there is nothing at that place, and the engine was told not to make a catalog.
	ErrNoCatalog = errors.New("catalog: no catalog there")
)

// GuardError says that a guard of a batch did not hold, so that nothing was applied.
type GuardError struct {
	Index int   // the first guard that did not hold, as returned by the Guard method that added it
	Guard Guard // that guard; its slices are the caller's own
}

func (e *GuardError) Error() string {
	return fmt.Sprintf("catalog: guard %d does not hold: %v", e.Index, e.Guard)
}
