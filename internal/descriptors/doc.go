// Package descriptors divides the descriptors that a process may have among the parts of it that keep some, and helps
// it through times in which there are none.
//
// # The limit
//
// The limit is RLIMIT_NOFILE. The Go runtime raises the soft limit to the hard one (less 1) when a process starts, and
// gives the soft limit of before to the processes that it starts. Nothing in weft sets the limit: after setrlimit(2)
// children would inherit the raised one, with which programs that use select(2) fail.
//
// # Shares
//
// Each part of a process that keeps descriptors has a share of the limit:
//
//	share     of the limit  what it is for
//	Lent      3/8           data files that data servers of this host have lent (package localio)
//	Backings  1/4           data files that the kernel reads and writes by itself (package fs)
//	Dialed    1/8           connections to servers, beyond the first one to each address (packages nfs3 and nvmetcp)
//	Accepted  3/8           connections that servers have accepted
//	Files     1/8           data files that data servers keep open between requests (package server/data)
//	Tables    1/8           files of a catalog (package server/catalog/pebble)
//
// A mount uses the first three, a server the last three and sometimes Dialed. At least a quarter is left for what
// cannot be refused: the first connection to a server, the control socket, logs, what a request opens for a moment.
//
// Several members of a process may use one share, such as the data servers that it runs. Caches have equal parts of it
// ([Share.Part]); connections are counted together ([Share.Take]).
//
// When a share is used up everything goes on with fewer descriptors. Requests go by RPC, or share a connection. Files are
// opened without passthrough. A server closes the connection that was unused for longest, or refuses the new one.
//
// # Shortage
//
// EMFILE says that the process has no descriptor left, ENFILE that the host has none. Code that sees one of them calls
// [Short], which
//
//   - has caches close what is idle (see [OnShortage]), at most every 100 ms,
//   - begins a shortage, unless there is one: [Scarce] is true, and one line is logged.
//
// During a shortage caches take nothing new. It ends when no call has failed for 10 seconds and a few descriptors can
// be had on trial. Another line says so. No other line is logged for such an error.
//
// A call that failed is tried once more after idle descriptors have been closed ([Retry]). If it fails again, its
// package says how it ends: a data server answers JUKEBOX, a client connects again a little later, and no client takes
// the server for dead.
//
// # Accept loops
//
// A [Listener] returns errors of accept(2) that concern the socket itself. After all others it goes on: at once if the
// connection was gone already, and after 100 ms otherwise. Errors other than a shortage of descriptors have two log
// lines, too: one at the first failure and one at the next success.
//
// # Locks
//
// Short calls the functions that were given to OnShortage, one after the other. Its caller holds no lock that such a
// function takes. The functions do not wait for a server or a disk, and do not call Short.
package descriptors
