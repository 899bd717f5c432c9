// Package peerrpc is what processes that serve shards of one volume say to each other: pure codecs, no sockets.
//
// # Frames
//
// As in package metarpc a frame is a length (4 bytes, big-endian) and a msgpack array whose first element is the kind. It has at most [MaxFrame]
// bytes, and [MaxHello] before the caller is known. Peers connect to the address that clients connect to; the first frame tells who it is, as its magic
// is another one.
//
//	kind         sender  fields after the kind
//	0 Hello      caller  magic, lowest and highest version, from, to, nonce
//	1 Challenge  callee  status, message, version, nonce, proof
//	2 Proof      caller  proof
//	3 Call       caller  number, op, shard, wait, hold, settle, after
//	4 Reply      callee  number, status, message, state, row, waits
//
// # Who is who
//
// Members of a volume have rows in its catalog, each with a random token. Whoever can read the catalog is trusted. So both sides show that they
// know the token of the callee: a proof is the HMAC-SHA256 by the token of a word that names the side, the two members and the two nonces
// ([ProofOf]). from and to are the members' ids. A callee that is another member than to, or speaks no version that the caller speaks, says so in a Challenge with a
// status, and ends the connection; so does a side that finds the other's proof wrong. Nothing is encrypted, and frames after the proofs are not authenticated one by one.
//
// # Calls
//
// Calls of a connection are carried out concurrently, and answered in any order. The number is the caller's, and in no other call of the connection that is
// not yet answered. wait is how long the caller waits for the answer; the callee gives up then, too. What became of a call without an answer is not known.
//
//	Hold       has the service of a shard prepare inodes for a change in another one; state and row answer it
//	Settle     says what became of changes
//	LockWaits  asks who waits for locks in a shard, in parts: it is answered with the first waits after the given one, in the order of their
//	           numbers and holders. The caller asks for the next part with the last of these
//	Look       says that rows of members and shards have changed; it is answered when the callee has read them and started, or stopped, its services as they say
//
// A call whose answer would be larger than a frame fails.
//
// What they mean is said where they are made and carried out (server/meta: Hold, Settle, LockWaits; server/cluster: Look).
//
// # Versions
//
// The version of a connection is the highest that both speak; Challenge says it. Versions change as those of package metarpc do, by the same means, and
// nobody sends or takes what the version of the connection does not have. Hello, Challenge and Proof never change.
package peerrpc
