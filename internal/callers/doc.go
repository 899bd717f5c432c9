// Package callers bounds the connections that a server has accepted, so that unused ones do not keep others out, the
// lines that the server logs about them, and how often they can guess.
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
// # Refusals
//
// Somebody who is refused may be guessing what he was not told. [Refusals] counts the refusals of an address. 65,536
// are free, since a client may have many calls under way when it is fenced. Each counts for an eighth of a second,
// one after the other. An address with more than are free is slowed down: its calls wait for their turns, eight a
// second, before they are looked at, so that right guesses come no faster than wrong ones. A call that would wait for
// more than 2 s is not looked at, and its connection is closed. This lasts 10 minutes after the last refusal at most.
//
// The addresses of an IPv6 network (64 bits) count as one. 1,024 addresses are remembered; all others count as one.
//
// # Complaints
//
// A peer may send something malformed, again and again. [Complaints] lets one line a minute pass for each address,
// which says how many lines did not pass before. It remembers 1,024 addresses; all others count as one.
package callers
