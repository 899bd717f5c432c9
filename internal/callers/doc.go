// Package callers bounds the connections that a server has accepted, so that unused ones do not keep others out, and
// the lines that the server logs about them.
//
// # Bounds
//
// A [Table] holds all connections of a server, and says of each new one whether there is room:
//
//   - All together count in the share descriptors.Accepted of the process.
//   - One address has an eighth of that at most, but 256 in any case: so many are needed by hosts behind one NAT.
//
// At the bound of its address, or of all, a new connection takes the place of the one that was unused for longest there.
// If all are in use, the new one is closed.
//
// A connection is in use as long as its server says so ([Conn.State]): a call is being answered, or something depends
// on the connection, such as open files. One on which no call has come yet is not in use.
//
// # Times
//
// A connection ends when no call has come within 10 s, which include a handshake, and when it was not used for 10
// minutes, which is looked at every minute. Clients connect again when they have something to say.
//
// # Complaints
//
// A peer may send something malformed, again and again. [Complaints] lets one line a minute pass for each address,
// which says how many lines did not pass before. It remembers 1,024 addresses; all others count as one.
package callers
