// Package extent keeps the space of NVMe namespaces that are devices of the volume: which of it is free, and which bytes of it each data
// file has. A data file is only a number here; the caller (package datafile) takes it from the device's row and never uses it twice. All is in the catalog
// (package schema), nothing is read from or written to a namespace, and nothing is known of inodes, layouts and sessions.
//
// # Units, blocks, extents
//
// A namespace is cut into units of some MiB. The first one has the [Label], the last bytes have a copy of it, and all units in between are free,
// or one data file has them, or they are condemned. A unit of a data file holds its bytes at the same offset within a unit, so that a
// data file with holes, such as the column of a striped file, takes the units that it has bytes in; stripe units should be multiples of all
// devices' units. Of the blocks of a unit each is valid or invalid by itself: what is invalid reads as zeros, whatever the
// namespace has there, and so does what has no unit. Valid become blocks that somebody says he has written (Validate).
//
//	free --Allocate--> a data file's, invalid --Validate--> valid
//	                   a data file's --Punch, Truncate, Remove--> condemned --Release--> free
//
// Each arrow is one batch that changes all rows which say so, and the counters. So a crash between two batches leaves nothing that is in no
// place or in two. What is taken is never less than what is known to clients: Allocate and Punch are durable when they
// return; of the other commits a crash may take back the last ones, in order.
//
// # Who may still write
//
// A client writes to the namespace itself, so taking bytes from a data file does not take them from whoever was told of them. They are condemned
// until the caller says, by the data file and a generation of it, that all who were told of its extents before that generation have given them back
// or are fenced. After a restart nobody may know that any more: Condemned lists what there is.
//
// The generation of a data file is raised by every batch that takes bytes from it, and goes to clients with the extents. Who commits what he
// wrote says the generation that he had. A unit remembers the generation in which the data file got it, or in which blocks of it became
// invalid; commits of an earlier one are refused (ErrStale), since what was written then was written elsewhere, or before it was cut off. So
// whoever calls Punch recalls layouts for writing from all units that the range touches, whole, or others that write in the same unit have to ask for their extents
// again.
//
// # Parts of blocks
//
// Blocks are written as a whole: who writes part of a valid one reads the rest first, and part of an invalid one adds zeros. Nobody else has a layout
// for writing of that block meanwhile. Cutting in the middle of a valid block is left to somebody who can write: Punch returns which bytes are to be
// zeros, and the caller keeps its intent until they are.
//
// # Where extents lie
//
// The map of free units is in rows of a group each. A data file begins in a group that depends on its number, and goes on behind what it has
// if that is free, or else where all that it wants is free in one piece, or in as many pieces as it takes. When it is written at its end it gets about as
// much again as it has, up to a limit; Truncate to the file's size takes back what was not used. Those who allocate at
// the same time keep to different groups, as far as there are others, so that their batches do not fail each other's guards.
//
// # Rows and batches
//
// Extents of a data file are in rows of 64 units at most. They split like leaves of a tree, and are found by their first unit. Whatever changes
// which units a data file has guards and rewrites its ExtentFile row, so there is one order of those; Validate guards nothing but
// the rows that it changes. Every batch fits the engine's limits, however large the range is: Allocate gives less, the others take
// several batches, and may be called again after a crash. The engine's batches must take at least 32 entries and 256 KiB; Allocate takes
// some 12 entries for each data file.
//
// # Locks
//
// Space.mu guards what is remembered of the groups, which are hints. It is held over no call.
package extent
