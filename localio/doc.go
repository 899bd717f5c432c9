// Package localio reads and writes the data files of a data server on the same host by descriptors that the server lends,
// with no RPC and no network in between. What it cannot do so goes to the target that it wraps, which does it by RPC.
//
// The protocol is that of package internal/wire/localio: a [Target] looks for the server's broker, proves that both are on one
// host, and has a session with it until one of its two connections ends. Then it tries again: at once, and with pauses that
// double up to 10 minutes, which start anew when the wrapped target has made a connection.
//
// # Requests
//
// READ, WRITE and COMMIT go by descriptors while there is a session; everything else by RPC. A request for a file that has none
// waits for them to be lent, for a second at most. What the server refuses goes by RPC for half a minute, as the server then
// tells why. So does each single request that fails here, whatever the reason: the application gets what the server answers.
//
// What waits for nobody is done by the caller: reads of what is in memory, and unstable writes to a file system that is in
// memory. Mostly that is in Quick, which takes no lock: a file that is open is found by the layout's data file, and what uses it
// is counted. Reads and writes that wait for a disk go through an io_uring, or have a goroutine each where there is none; so
// do those that have parts (package fileio), and syncs.
//
// # Stability
//
// An UNSTABLE write by a descriptor is in the page cache of the server's file, as one by RPC is, and has the same verifier: that of
// the server when it lent the descriptor. So the ways mix: a COMMIT by RPC covers what was written here, and fdatasync(2) here
// is a COMMIT. When a descriptor is closed early (it is revoked, or the session ends), nothing needs to be sent again.
//
// The kernel tells each descriptor of a write-back that failed after it was opened, once. A descriptor with writes that were not
// synced is therefore not closed for want of room; if it is revoked, the server is told to look for failures. When fdatasync
// fails here, all verifiers of that file are others from then on (Target.spoil), by RPC too, so that those who retain the data send it
// again, whoever else may have been told of the failure. Syncs by one descriptor run one after the other, and once one has failed
// the descriptor is of no use.
//
// # Fences
//
// What is revoked starts nothing more, is closed when what has begun is over, and then the server is told. The server does
// not have to trust that: it asks the kernel who can write the file, so a client that is stopped in the middle of a system
// call, or has lost its session, is waited for.
//
// # Locks
//
// Target.mu guards everything but what is atomic. The wrapped target's Start is called with it, nothing else is: no system call on
// files, no Done, no send. (A send waits at most a second, for a server that does not read.) ring.mu and file.syncing are leaves;
// the latter is held during a sync.
//
// A Done may call Detach, which waits for whoever is at the other request. So nobody calls a Done who is at a request, or who
// alone can end one: what the ring has done is ended first, and the Dones follow on a goroutine of their own.
package localio
