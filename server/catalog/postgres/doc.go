// Package postgres is the catalog engine on PostgreSQL (14 or newer, by pgx), for any number of metadata services at a
// time, on a server that somebody else keeps healthy: with a synchronous standby, the loss of the primary costs a pause.
//
// It is not for databases that only speak PostgreSQL's protocol, nor for a pooler between weft and the server: it relies on
// advisory locks, on read committed with a snapshot for each statement of a function, and on prepared statements. Who wants
// to know about another server runs this package's tests with WEFT_TEST_POSTGRES=URL.
//
// # What is stored
//
//	weft           k, v                  a row
//	               since, adds, maxes    of a counter row that has had deltas, otherwise null
//	weft_changes   k, id, c              a change of counter row k that is not in v yet, in the form of package fold
//	weft_ids       a sequence            numbers the changes
//
// The names begin with Config.URL's weft_table. The table's comment is "weft catalog", and the version of the format. The
// function weft_commit applies a batch; its name ends in a digest of its text, so programs of different versions find each its own.
//
// # A commit
//
// One call of the function, which is one transaction and one round trip:
//
//	lock     advisory locks until the end of the transaction, in ascending order
//	check    the guards; the first that does not hold is the answer
//	write    puts, deletes, changes
//	commit   by the server: it waits for disk and standby, then shows what was written, then releases the locks
//
// Each statement of the function sees what was committed before it began, so the checks see everything that was done under the
// locks by those who had them before. All that conflicts meets at a lock, and nobody waits for anything else. So commits are
// strictly serialisable, and row locks, deadlocks and serialization failures do not come up. A lock writes nothing, which
// SELECT FOR KEY SHARE would, and a key or a range need not be there to be locked.
//
// The numbers of locks are hashes; two keys with one number merely wait for each other. Of a batch they are:
//
//	shared      everything; a key that is guarded, or has a delta; the class of a key that may come into being
//	exclusive   a key that is put or deleted; the class of a range that is guarded
//
// A class are the keys with the same first nine bytes: a range within one, such as the entries of a directory, is kept empty by
// its lock, which inserters share. Longer ranges, and batches with very many locks, take "everything" exclusively. Reads take no locks.
//
// # Counter rows
//
// A guard and a delta on one key both share its lock, since guards must not exclude guards, nor deltas deltas, and locks have two
// modes only. That guards exclude deltas follows from the form of the row:
//
//	plain     (since is null)   guards hold it shared; a delta needs the lock alone and gives the row the other form
//	counters  (since is set)    deltas hold it shared and add to weft_changes; a guard on its value needs the lock alone
//
// Who finds that he needs a lock alone that he shares tries to get it without waiting. If others have it he gives up, and the batch
// goes the longer way, as a transaction in which all locks on keys are exclusive from the beginning (Engine.carefully). A
// guard on a value that has changes outside the row goes that way too, and joins them first.
//
// Readers join v with the changes whose id is above since, in the order of ids. That order has to be the one in which they
// became visible, as far as it matters. Additions to a field commute, and so do maxima, but not with each other: adds and maxes
// say which fields are added to and which are raised, and a delta of the other kind needs the lock alone, and turns the bit
// over. So all changes that are written at the same time commute, and others have ids in the order of their commits.
//
// Put and delete leave the changes where they are: a plain row has none, and one that becomes a counter row again gets a since
// above their ids.
//
// Changes are joined in the background (folder.go), after so many by this process, and all that are there now and then:
//
//	nobody has the row     its lock is taken alone, without waiting, and they go into v; since goes above them
//	somebody has it        those that are visible are deleted, and become one with the least of their ids. No lock is needed: what
//	                       becomes visible later commutes with all of them but those from before its bit was turned, and these were
//	                       visible, so the least id is below its own. If v is joined or replaced meanwhile the least id is not above
//	                       since, and the change does not count any more, as those that it was made of
//
// # Durability
//
// Sync is synchronous_commit=on (or remote_apply, if the server says so; less is overruled), NoSync is off, for that transaction. A
// batch that writes nothing, and one whose guard does not hold, emits a logical message: its commit waits, and it is behind
// all that could be seen in the log. If the wait for the standby is cancelled, the server keeps the commit and sends a
// warning; that is ErrUnknown.
//
// # Lost connections
//
// ErrUnknown is what a commit returns whose connection was lost after it was sent, or ended by a server going down. Errors
// of severity ERROR mean that nothing was applied, and so does everything that comes before. Then, and with reads, the
// engine tries again until ctx ends: another connection, another host of the URL, whichever accepts writes. The state is
// logged when it changes. A host that vanishes without a word is noticed after some ten seconds; a server that is stopped, on a
// host that is not, is waited for.
//
// A context that ends has the server cancel the statement, and the answer is waited for.
//
// # Snapshots
//
// A snapshot is a transaction that only reads, on a connection of its own. It expires after Config.SnapshotAge, as the server
// can remove no old row versions while it is open, and when its connection is lost. Sixteen can be open; who wants another
// one waits.
//
// Lock order: snapshot.turn, then Engine.snapMu. folder.mu, reachability.mu and the gate's are leaves.
package postgres
