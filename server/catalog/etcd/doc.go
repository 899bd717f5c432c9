// Package etcd is a distributed catalog engine: rows in an etcd cluster (version 3.4 or newer; the tests have run on 3.4.23 and
// 3.7.3), which somebody else keeps healthy. Any number of engines, in any number of processes, may use one catalog at the same time.
//
// It is a catalog that survives the loss of any minority of the cluster, for volumes of some millions of files: etcd keeps
// all keys in memory and is not made for more than 8 GiB. The losses that etcd recovers from are a pause to callers and no error.
//
// # Keys
//
// With prefix P, which is "/weft" or what the administrator says, there are
//
//	P/format     "weft catalog 1": what keys and values mean
//	P/row/K      the row with key K, its value as it is; counter rows too
//	P/stamp/S    what became of the last transaction of an engine; S is random
//	P/history    past revisions, see Old revisions
//
// Below P/ there must be nothing else, so no prefix lies within that of another catalog.
//
// # A commit
//
// Guards are comparisons of an etcd transaction, in which the puts and deletes are made if they hold and the guarded rows
// are read if they do not. A transaction is durable on a majority before anybody can see it. So both durability classes mean
// the same, what was read can not be taken back, and an empty batch has nothing to wait for: not for a transaction whose caller has left, either.
//
// Calls cost etcd far more than rows. So one transaction of an engine is under way at a time; the batches committed
// meanwhile are packed into the next one, as many as fit the cluster's limits and can be put in a row (type pack). All are
// applied or none: if a guard does not hold, the reads tell whose, he gets his error, and the others are packed again.
// Reads of rows are packed in the same way.
//
// A delta is not blind here: the engine remembers what the counter rows it has changed were, adds up the deltas of a pack, and
// puts the sums, guarded by what they were made from. So deltas of one engine never collide. Where two engines add to the same
// row at the same time one of them is refused, gets the row with the refusal, and makes its sums anew. Counter rows that
// many processes change all the time are better kept one for each.
//
// # Numbers
//
// A call of etcd that fails may have been carried out, or may be later, even much later, when a member that was stopped goes on. So
// each transaction of an engine has a number:
//
//	if the guards hold, and the engine's stamp is what it was after the last transaction:
//	        puts and deletes; the stamp becomes this number, applied
//	else:
//	        reads, of the stamp too; if the stamp is what it was after the last transaction, it becomes this number, refused
//
// Whatever comes first, however often the call is made and by whichever member, the stamp changes, and no other copy of the call
// changes anything any more. So the engine makes the call again, of one member after the other and without giving up
// those that were asked before, until one has answered, and the stamp in that answer is the truth.
// No stamp is ever made anew under a key that a transaction has compared: an engine that finds its stamp gone makes one under
// another key. (Nesting all in one transaction that looks at the stamp would be simpler, but etcd does not count puts in nested
// ones when it looks whether there is space, and grows beyond its quota.)
//
// What is left of ErrUnknown: the caller's context ends, or the engine is closed, while there is no answer; the stamp is gone (see
// below) though a call was made whose answer is missing; the call is made again and the cluster refuses to hear it
// (permission taken away, no space).
//
// ErrFull comes for batches with Grows when the quota is nearly used up (see Quota), and for all batches while the cluster
// has the alarm NOSPACE, which an administrator takes away. Batches that only delete rows are refused as well then, as the
// stamp is put.
//
// # Quota
//
// A cluster whose quota is used up refuses also the commits that its services need to go on. So an engine keeps a reserve of
// the quota: 2 %, at least 4 MiB and at most 1 GiB. Every 2 s it reads how much of the quota is used, in the metrics of a
// member (HTTP, /metrics at the endpoint), since no call of etcd before 3.6 tells the quota. Batches with Grows are refused
// (catalog.ErrFull) when both are so:
//
//	the database file may grow by less than the reserve
//	the rest of the quota, with the free pages of the file, is less than twice the reserve
//
// They are accepted again when there is one reserve more of either. The warning before comes with two reserves more of
// both. If the members serve their metrics at another address (--listen-metrics-urls), no reserve is kept.
//
// # Old revisions
//
// etcd keeps every value a row ever had until it is told to drop those before some revision, and stops taking changes when it is full.
// So engines have it drop what is older than Config.Retention. P/history has up to ten revisions, oldest first, as decimals
// followed by spaces. An engine that has seen the row unchanged for a tenth of the retention puts it anew, with the revision
// at which it was last put behind the others. When there are more than ten, the oldest is at least the retention ago, whatever
// clocks say: it is dropped from the row, and the cluster told to drop what is before it. Stamps that were not written since
// then are removed too: an engine that ended without Close has left them. One that was only idle makes another.
//
// A snapshot is a revision and costs nothing. It can be read for the retention at least.
//
// # Lock order
//
// queue.mu, lookups.mu, gate.mu, cluster.mu and member.mu are leaves: nothing is waited for while one is held, except for the
// log-in of a member with a password under member.mu.
package etcd
