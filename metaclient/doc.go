// Package metaclient speaks to weft's metadata service: one session with calls, callbacks, leases, and what a client
// keeps of layouts and devices. The protocol is described in package internal/wire/metarpc. Attributes and names are
// not cached here, and nothing here knows of data servers beyond their addresses.
//
// # Calls
//
// A call takes a slot, is encoded into the slot's buffer, and stays there until its answer has come, so that it can be
// sent again, byte for byte, on the session's next connection. A call waits through lost connections and restarts of
// the service for as long as its context lives. When the context ends first the caller leaves and the call is abandoned: its
// slot stays taken, and it is sent again like others, until the answer comes and is thrown away.
//
// When the session itself is lost (its lease ran out while the service could not be reached) a new one is begun. Calls
// that were never sent, or that may be executed twice, go on in the new session; for the others nobody knows whether
// they were executed, which is an [OutcomeError].
//
// Some slots are kept back: one for Renew, and some for calls with the contexts given to OnRecall and OnReset. Without
// them two clients could each have all slots taken by calls that wait for the other to answer a recall.
//
// # What is held for a session
//
// Open and LayoutGet make the service hold something for the session, Close and LayoutReturn give it back. A ledger
// for each pair sees to it that the two are never outstanding at once for one file, since the service may execute them
// in any order. Giving back is lazy and in batches.
//
// Layouts granted by replies and taken by recalls are applied to the cache by the goroutine that reads the connection,
// hence in the order in which the service sent them.
//
// # Locks
//
// The client knows which locks the service holds for it, so that it can set them again in a restarted service, right
// after it has opened the files again. Those that do not come back, or were lost with the session, are reported
// (OnLockLost). Waiting for a lock is asking again, when the service calls back and every few seconds besides; it takes
// no slot. For one owner on one file the calls are made one after the other. One that was abandoned and granted all the
// same is undone before the next one is made.
//
// # Goroutines
//
// A client has a manager, which connects and then reads the connection; a writer for each connection; and a janitor,
// which gives back. A recall runs in its own goroutine, of which there are at most maxRecalls, and so does the work
// after a lost session or a restarted service. All end with Close.
//
// # Lock order
//
// Client.mu, cache.mu, lockBook.mu, ledger.mu and deviceTable.mu are never held together, and none of them while blocking.
package metaclient
