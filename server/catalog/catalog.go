package catalog

import (
	"context"
	"iter"
	"time"
)

// MaxKey is the longest key in bytes. It suits every engine planned (PostgreSQL's index rows end near 2700 bytes) and
// leaves ample room for a name of 255 bytes below a directory's id.
const MaxKey = 1024

// Engine is an ordered key-value store with atomic guarded batches. All methods may be called concurrently.
//
// After Close, and in engines that stop for good on a failed disk, every method returns [ErrClosed].
type Engine interface {
	Reader

	// Commit applies b if all its guards hold, atomically with respect to every other commit and read.
	//
	// The caller leaves b and the slices in it untouched until Commit returns, and may reuse them afterwards.
	// If ctx ends before anything was applied Commit returns ctx.Err() and b had no effect; later it waits for the
	// outcome. Errors that callers can tell apart:
	//
	//	*GuardError     a guard did not hold; nothing applied
	//	ErrConflict     lost a race inside the engine; nothing applied, try again
	//	ErrUnknown      b may or may not have been applied, and may still be
	//	ErrFull         no room in the store; nothing applied, unless it is ErrUnknown as well
	//	ErrTooLarge     over the limits of Caps; nothing applied
	//	ErrInvalid      a malformed batch, a programming error; nothing applied
	//	ErrNotCounters  see Counter rows in the package comment; nothing applied
	//	ErrClosed       nothing applied
	Commit(ctx context.Context, b *Batch) error

	// Snapshot returns a view of one revision, at least as new as every commit that returned before the call. The
	// caller closes it. It is usable for Caps().MaxSnapshotAge.
	Snapshot(ctx context.Context) (Snapshot, error)

	// Caps returns the engine's limits. They do not change while it is open.
	Caps() Caps

	// Close lets the calls in progress finish, scans included, makes every NoSync commit durable, and releases the
	// store. Snapshots still open turn to ErrClosed. Closing twice returns ErrClosed.
	Close() error
}

// Reader reads either the latest committed state (an [Engine]) or that of one revision (a [Snapshot]).
// Values and keys it returns outside a scan belong to the caller; a present value is never nil.
type Reader interface {
	// Get returns the value of key, or ErrNotFound.
	Get(ctx context.Context, key []byte) ([]byte, error)

	// GetMany returns the values of keys in their order, nil for those absent. On an Engine they may be of different
	// revisions; where that matters use guards or a Snapshot.
	GetMany(ctx context.Context, keys [][]byte) ([][]byte, error)

	// Scan yields the rows with from <= key < to in key order, or in the opposite order. An empty from means the
	// first key, an empty to means behind the last one. The row yielded is valid until the next one is asked for.
	// An error ends the scan and comes with a zero Row. ctx is looked at between rows.
	//
	// A scan of an Engine need not be of one revision: every row that is present and unchanged throughout is
	// yielded once, a row that comes or goes meanwhile may be seen or not, and keys never repeat or go back. To go on
	// after a row with key k, scan from After(k), or to k when in reverse.
	//
	// The loop body may call any method but Close.
	Scan(ctx context.Context, from, to []byte, opts ScanOptions) iter.Seq2[Row, error]
}

// Snapshot reads one revision. A snapshot older than the engine keeps gives ErrSnapshotExpired: go on by key
// from a newer one.
type Snapshot interface {
	Reader
	// Close releases the revision. It waits for reads in progress; closing twice is harmless.
	Close() error
}

// Row is a key and its value.
type Row struct {
	Key, Value []byte
}

// ScanOptions says which rows of a range are wanted, and how.
type ScanOptions struct {
	Limit    int  // most rows to yield; 0 means all
	Reverse  bool // from the last key to the first
	KeysOnly bool // leave Row.Value nil
}

// Caps are the limits of an engine. Callers split work by these and never by constants of their own.
type Caps struct {
	MaxBatchBytes  int           // most bytes of a batch as counted by Batch.Bytes
	MaxKeys        int           // most entries of a batch as counted by Batch.Len
	MaxValue       int           // longest value in bytes
	MaxSnapshotAge time.Duration // how long a snapshot can be read; 0 means until it is closed
}

// After returns the smallest key behind key, from which a forward scan goes on.
func After(key []byte) []byte {
	next := make([]byte, len(key)+1)
	copy(next, key)
	return next
}

// PrefixEnd returns the smallest key behind all keys that begin with prefix, or nil if there is none, which as the end
// of a scan means behind the last key.
func PrefixEnd(prefix []byte) []byte {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] != 0xff {
			end := make([]byte, i+1)
			copy(end, prefix)
			end[i]++
			return end
		}
	}
	return nil
}
