// Package pebble is the embedded catalog engine: one process, one directory, on Pebble v2
// (github.com/cockroachdb/pebble, imported here as cpebble).
//
// Pebble gives an ordered store with atomic batches, a shared write-ahead log sync, merge operators and snapshots, but
// no conditions. This package adds them with latches, which cost less than any optimistic scheme because the process is
// alone with its directory. It is not for a directory on a network file system: the lock that keeps a second process
// out is a POSIX record lock, and a log sync has to mean what it says.
//
// # A commit
//
//	register in the range table, wait for earlier commits that conflict by a range
//	latch the stripes of all keys, in ascending order
//	check the guards
//	apply: the batch is in the log's queue and visible to readers
//	release latches and range entry
//	wait for the log's sync (durability Sync)
//
// The wait is outside the latches, so commits on one hot key overlap in their waits and share syncs. A commit that
// relied on another one's rows comes after it in the log, so it is durable only if that one is. The answer "a guard does
// not hold" leaves no record in the log; it waits for a barrier (an empty record that is synced) if anything visible may
// not be durable yet.
//
// A log is filled with zeros ahead of what is written to it (logFile), since a sync of a file that grows costs the file system's journal as well.
//
// # Room
//
// With Config.Reserve the directory has a file "reserve", whose space is allocated: 2 % of the disk, at least 4 MiB and
// at most 1 GiB. Pebble writes through a file system (roomFS) that gives up a part of the reserve when a write, a create
// or a rename finds no room, and tries again. Pebble itself would stop for good when it cannot write a log or the
// MANIFEST, and would retry a flush without pause. Once a part was given up, and until the reserve is whole again:
//
//	batches with Grows   are refused (catalog.ErrFull)
//	other batches        go on. Flushes and compactions remove what they delete from the disk (reclaim)
//	logs                 are not allocated ahead
//	compactions          get half of the reserve at most, since they may fail. The next one starts after 10 s
//
// The reserve takes back what the disk has free, but for a quarter of its size. A catalog can be opened with a reserve
// that is not whole. When the reserve is used up, writes that have begun wait for room. Reads go on then, and batches
// that write are refused. A catalog that is closed while a write waits has lost that write: Config.Fatal is called. A
// sync that fails for lack of room (no local file system does that) is a failed sync.
//
// # Latches
//
// A key maps to one of many stripes by hash. Three kinds of holders: shared (guards), delta (blind deltas) and exclusive
// (puts, deletes, and keys that are both guarded and changed). Holders of the same kind other than exclusive share a
// stripe; everything else waits its turn, first come first served except that all who wait with the kind whose turn it
// is get in together. So neither creates in one directory, which share its inode row and send deltas to its counter row,
// nor a directory's removal starve each other.
//
// A guard on a range of keys conflicts with any commit that writes inside the range, whether it came earlier or later;
// those wait for one another in order of arrival, and nobody else does.
//
// # Lock order
//
// Range table entry (rangeTable, waited for only by later entries), then stripes in ascending order, then Engine.logging,
// then Pebble's own locks. rangeTable.mu, latch.mu, gate.mu and Engine.snapMu are leaves: nothing is waited for while one is held.
// room.mu is a leaf, too. It is held while the reserve's file is truncated, allocated and synced.
//
// # Stored form
//
// A stored value is one byte that tells the form, then the content:
//
//	0  row      the value as the caller put it, or the counters of a counter row
//	1  change   deltas not yet joined with a row; only as a merge operand
//	2  misuse   what is left after a delta met a row that is no counter row; reads fail with ErrNotCounters
//	3  damage   what is left after an operand that makes no sense; reads fail with ErrCorrupt
//
// Forms 2 and 3 exist because a merge operator that returned an error would stop flushes, and with them the whole
// catalog, for the sake of one row. A put or delete of the row repairs it.
//
// A change is a list of fields in ascending order. Each is a byte with the field's number in the low six bits, 0x40 if
// an addend follows and 0x80 if a floor follows, then those as signed varints. It means
// field = max(field + addend, floor), a form that is closed under composition: any mix of Add and Max on a field folds
// into one such pair, so operands can be joined in any grouping.
//
// One delta in foldEvery reads the row and writes the outcome instead, so that a reader of a hot row never has to
// join more than a few hundred operands.
//
// # Damage to the files
//
// Pebble reads its table of contents, the MANIFEST, up to the first record that does not parse, since a crash may leave
// half a record. If the file was cut off it would find fewer tables, or none, and delete the rest as leftovers. The file
// "manifest.synced" says how long the MANIFEST was at its last sync, so Open can tell a torn tail from a loss:
//
//	weft catalog manifests 1
//	MANIFEST-000004 5120
//	MANIFEST-000009 98
//	crc 1f2e3d4c
//
// It holds the newest two MANIFESTs, because a crash may come between the first sync of a new one and the switch to it.
// The last line is the CRC-32C of the lines before it. The file is advisory: if it is absent, as in a catalog restored from a checkpoint, or
// does not parse, the MANIFEST must only begin with a sound record.
package pebble
