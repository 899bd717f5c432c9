// Package meta is the metadata service: it keeps the names, attributes, sizes and layouts of a volume in a catalog and
// serves them to clients over the protocol of package metarpc. It moves no file data and knows no data server; what has
// to be done there it asks of [Files] (package datafile).
//
// # What is where
//
// Whatever must outlive the service is in the catalog (package schema). In memory is only what clients can bring back
// after a restart: which files their sessions have open, and the sizes and times of files that they wrote but that are
// not yet stable. A namespace operation reads what it needs, builds one batch whose guards name everything it relied on,
// and starts over with fresh reads when a guard did not hold. The reply of a call that may not be executed twice is a
// row of that same batch.
//
// # Permission
//
// The service decides who may do what, as the Linux VFS does and in its order (perm.go, xattr.go, package acl), by the
// credential of each call after what the client's export rule makes of it (caller.go, export.go). A lookup and every
// operation on a name needs the right to look into the directory, what is done to an inode by its number the right to do
// that. What open(2) allowed holds as long as the session has the file open: layouts, and SetAttr with Open, ask for no more
// than that. Getting attributes and reading links is free for all, as it is for whoever has got as far as to the inode.
//
// What an inode row says of the inode's attributes (Flags) changes with them in one batch, so most checks read
// nothing but the row. Capabilities of root are one: there are callers who are root, and all others.
//
// # Start and grace
//
// At the start every session in the catalog is known, and has one lease to come back. Until that time is over, and each
// session that came back has had a lease to reclaim what it holds, the service is in its grace period: a file that loses
// its last name then is kept, since a session may yet say that it has it open. The size of a file whose writers have not
// reported yet is asked of its data files, so that nobody sees it shorter than before the restart. Truncations that a
// crash cut short go on in the background.
//
// # The end of a session
//
// A session ends when its client says so, lets its lease run out, or leaves a callback unanswered for a lease. It is
// first marked in the catalog, so that no later instance takes it back. Then, in the background and for as long as data
// servers take to answer, each file it had open is closed, each file it may have written is made stable and gets
// the size that its data files have. Its row is deleted last, so a crash does not lose the work.
//
// # Truncation
//
// Shortening a file goes through three steps, in which the file has a cut (type cut). While it recalls the layouts of
// other writers, no layout past the new size is granted. Then size and intent are committed; a report of a size that
// comes meanwhile waits for the outcome. Then the data files are cut; a report that comes now speaks of bytes that are
// gone and is clipped. The size row is what others see from the second step on. Whenever a session may have written
// past the size that the service knows, setting any size goes this way, because what is known may be too little.
//
// # Locks
//
// No mutex is held over a catalog call, a call to a data server, or a write to a connection.
//
//	Service.mu   sessions, and all file and claim records. Held for moments.
//	session.mu   a session's slots, connection and callbacks. Taken with Service.mu held or without.
//	conn.mu      a connection's queue of frames. Taken with session.mu held or without.
//
// What has to exclude others for longer is a flag in the file record that is waited for (Service.wait): removing, from
// the decision whether somebody has the file open until the batch that removes it is done; and sizing, over a truncation
// or over finding the size that a dead client left. Nobody waits for one while having the other. Directories that change
// their parent are put in order by a guarded catalog row, and inside this process by a token (Service.moving) as well, so
// that they need not fail each other's guards; another token reserves inode numbers.
package meta
