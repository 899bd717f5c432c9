// Package nfs3 is the client of one NFSv3 data server: READ, WRITE and COMMIT in the start/complete form that the data
// plane wants, over several TCP connections, and the other procedures as blocking calls for whoever manages data files.
// What NFSv3 has no words for, reserving space and holes, it asks of weft's own data servers (package sparse); a server that
// lacks that program is asked once for each connection.
//
// It knows nothing of stripes, mirrors, layouts, retained writes or the metadata service. It never looks at the
// verifiers it reports, except within one Op; what an Unstable write needs until its COMMIT is the caller's business.
//
// # Requests
//
// A [Target] is "hard" unless Config.Patience says otherwise: an Op ends with what the server answered, however long that
// takes, unless it is detached or the Target is closed. A soft Target ends what had no answer for so long with a
// [layout.TimeoutError], except a WRITE that was sent, whose outcome nobody knows: of that it tells by Op.Overdue.
// Inside, and invisible to the caller,
//
//   - a READ or WRITE that the server cut short goes on with the rest; three answers in a row that bring nothing end
//     it with a [ReplyError];
//   - JUKEBOX is repeated after 0.1 s, doubling up to 15 s;
//   - what was outstanding on a connection that is lost is sent again on another one, with the same xid. READ and
//     COMMIT can be repeated at will; of what changes something no original may be carried out after its repetition was
//     answered (see Lost connections);
//   - if the verifier changes between two pieces of one unstable WRITE, the server has lost the first piece and the
//     whole of it is sent again.
//
// Any other status is an [Error], any other failure that the server is to blame for a [ReplyError]. A weaker
// stability than was asked for is reported in Op.Committed as the server gave it.
//
// Of the blocking calls some must not be repeated blindly: CREATE is sent UNCHECKED or EXCLUSIVE by callers that can
// be interrupted (GUARDED after a resend may say EXIST of the file it made itself), REMOVE and RMDIR take NOENT for
// success after a resend, and MKDIR takes EXIST for success then and looks the directory up.
//
// # Connections
//
// A connection is made when there is something to send, and further ones when those that are up have some work in
// flight already: up to Config.Connections for each address, and one more, the lane, for small requests (64 KiB or less,
// COMMIT, everything but READ and WRITE) while all others have large ones. A request goes to the connection with the
// fewest bytes outstanding; small ones go together, to the first that has little to do. What is in flight is bounded for
// each connection, and that of large requests also for the server, by a window that follows the delay (see window); the
// rest waits in queues, small requests in one of their own.
//
// The first connection to each address is always made. Further ones count in descriptors.Dialed, and are not made when
// that is used up, or in a shortage of descriptors. In a shortage the connections with nothing outstanding are closed,
// except one. An attempt to connect that fails for that reason is repeated every 0.1 s, and the server is not blamed.
//
// A connection that is lost is made again, after a back-off of 0.1 to 1 s for each address, as long as there are
// requests. While an address does not work its connections are made to the others; it is tried again every minute, and
// once it answers they come back, each when nothing is outstanding on it.
//
// The server may come to have other addresses (SetAddrs). To an address that it no longer has no connection is made, an
// attempt to make one ends at once, and a connection that is there gets nothing new. It ends when nothing is
// outstanding on it, or with what is said below. What was outstanding then goes to another address.
//
// A connection on which something is outstanding is reset (see watch)
//
//   - if nothing was heard on it for Config.Timeout;
//   - if it does not answer a NULL call while others are answered;
//   - if the server's host acknowledges no packet for 5 s, as when a firewall has forgotten the connection.
//
// One that was not used for 5 minutes is closed, and one whose server's host is gone meanwhile after 15 s (keep-alives).
// A reply that cannot be understood ends its connection, since nothing behind it can be trusted; a request whose replies
// were such three times ends with a ReplyError.
//
// Before the first READ or WRITE, FSINFO is asked, with the handle and identity of that request, and Limits shrinks
// to what the server can take. Requests cut to the old limits are continued inside.
//
// With Config.TLS every connection asks for TLS first (RFC 9289) and is not used if that fails; there is no way back to
// clear text. Then reads and writes block, in memory of the connection's own, and payloads are copied once more.
//
// # Lost connections
//
// The original of a request that is sent again may still be in the server: in its socket, or in a write to a disk that
// does not answer. Carried out late, it would undo what was written after its repetition was answered. So a slot whose
// connection is lost with changes outstanding (WRITE, SETATTR, CREATE, MKDIR, REMOVE, RMDIR, RENAME, ALLOCATE,
// DEALLOCATE) keeps those, and its next connection begins with END (package conns): it is used once the server says
// that it carries out nothing any more of what came by the lost one. That may take as long as a disk takes; it is then
// as with a server that does not answer. Every connection begins with JOIN, so that the server knows which one is
// meant. A server that stops as planned says so as its last word (STOP), see [Target.Stopping].
//
// A server that does not have the program gets the repetitions by a connection from the same port, with the same xids.
// That is what duplicate reply caches know requests by. If the port cannot be had another one will do.
//
// # Buffers
//
// The payload of a READ goes from the socket into Op.Data, but for the few bytes that arrive together with the head of
// the reply, when up to 256 KiB of it have come (SO_RCVLOWAT), not packet by packet; that of a WRITE goes from Op.Data
// by writev. All reading and writing is in non-blocking system calls, each under the mutex that guards the addresses
// it uses. So Detach can take a buffer away between two of them: what the server still sends is dropped, what is still
// to be sent comes from a copy, and the connection lives on.
//
// # Goroutines and locks
//
// Each configured connection has at most one goroutine that dials and then reads and completes replies, so Done runs
// on it: neither Close nor a blocking call may be made from there. An address that does not work has one that tries it. Whoever calls Flush writes until the socket is
// full; then a goroutine that lives until the queue is empty takes over.
//
// Lock order: Target.mu, then stream.mu or sender.mu. The latter two are held across one non-blocking system call, and
// nothing is called with them. No lock is held while Done runs.
package nfs3
