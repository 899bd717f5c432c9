// Package catalog is the ordered key-value store the metadata service keeps everything in, seen as one interface.
//
// An [Engine] maps byte-string keys, ordered by bytes.Compare, to byte-string values. Its one way to write is
// [Engine.Commit] of a [Batch]: guards, puts, deletes and blind deltas that take effect together or not at all, in
// one round trip. The metadata service is stateless above it, so several processes may use one catalog at a time if
// the engine is a distributed one; nothing here assumes that a single process writes.
//
// It is not a transaction manager: there is no interactive read-write transaction. An operation reads what it needs,
// then commits a batch whose guards name everything it relied on, and starts over when a guard did not hold. It does
// not know what the keys mean; that is the metadata service's own layout.
//
// # Order and isolation
//
// Commits are strictly serialisable: there is one order of all commits that respects real time, and each commit's
// guards held in the state right before it. A read that starts after a commit returned sees that commit.
//
// # Within one batch
//
// Guards look at the state before the batch. Then puts and deletes take effect, then deltas, whatever the order of the
// calls was; deltas of one batch apply in the order they were added. So Delete and Add of one key leave a fresh counter
// row. A key may be put or deleted once in a batch; a second put or delete of it is [ErrInvalid].
//
// # Durability
//
// A commit with [Sync] returns when it and everything ordered before it survives the loss of the process and of power.
// One with [NoSync] returns earlier; it survives if any later Sync commit does. An empty batch with Sync is a barrier:
// it returns when everything committed so far is durable, as far as that is known to be committed; see Unknown outcomes.
//
// Reads may show a commit before it is durable, while its own Commit call still waits. A commit that builds on
// such a read is ordered after it and so cannot survive without it. A [GuardError] of a Sync batch is returned only
// when the state it reports is durable, so an answer such as "exists" is never taken back by a crash; an answer
// made from reads alone may be, and a caller who must not take it back commits a barrier first.
//
// # Unknown outcomes
//
// After [ErrUnknown] a commit may have been made, or be made later, also after other commits of the same caller, and after an empty batch: that
// makes durable what has been committed, and says nothing of what is still on its way. What makes sure that a batch is not applied any more is
// that one of its guards does not hold and never will again. So who must know what became of a batch has it
//
//	guard a row and change it, as the reply record of a request, and commits another batch, the fence, that guards what that row was before and
//	puts something that it never was. If the fence is committed, the batch was not applied and never will be; if its guard does not
//	hold, the row tells whether the batch was applied, or an earlier try of the fence
//
//	or commits the batch itself again, if it can do no harm twice ([FindOut])
//
// # Counter rows
//
// A counter row is an array of little-endian int64 fields, see [EncodeCounters]. [Batch.Add] and [Batch.Max] change a
// field without reading the row, so they never conflict with each other. A row that is absent counts as all zeros, and
// a delta makes it present; a field beyond the row's end makes the row longer, with zeros in between. A sum that leaves
// the range of int64 stops at its end. A delta on a row that is no counter row gives [ErrNotCounters], from the commit
// or, since deltas are blind, from every later read of that row until it is put or deleted.
package catalog
