// Package locktable has the locks of fcntl(2) and of flock(2) of the files of one shard, and decides who gets one.
//
// They are kept in memory: clients set them again after a restart. A session has locks only on files that it has open;
// the caller calls [Table.Drop] when a file is no longer open for a session.
//
// A lock is granted only as the answer to a call. A request that has to wait is remembered, and named to the caller as
// [Ready] when the lock may be free; the client then asks again, and for a moment (reserveTime) the lock is kept for
// it. Nobody relies on that message to arrive: waiting clients ask again every few seconds, and a wait that is not
// asked for again in waitTime is forgotten.
//
// # Stability
//
// Of a file that a session has open the table knows ([Open]) whether another session has had it open since this one was
// granted the first of its locks, and the last one. So an unlock with LockArgs.Alone is refused with StatusShared while
// another session may have the lock next, and the client makes stable what it has written; and it learns with a lock
// ([Result].Shared) that what it keeps of the file may be older. A session that comes back after a restart counts as
// not alone.
//
// # Deadlocks
//
// A wait that would never end is refused at once if all waits of its circle are in this table. A circle through several
// shards is found by whoever asks them all, twice: what was there both times was there at one moment, between the two
// questions, as an owner that waits in one place neither gets nor gives up what it has in another. The wait that is to
// end is marked with its circle ([Table.End]), and its client told to ask again. By then another owner may have left
// the circle, so that call looks once more, and is refused only if each wait of the circle is still there.
//
// A Table has one mutex. Nothing else is locked with it held.
package locktable
