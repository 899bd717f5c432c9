// Package nvme is an NVMe/TCP target: subsystems whose namespaces are kept in files, served at TCP ports to any NVMe/TCP host,
// the Linux kernel's among them. It follows the NVMe Base Specification 2.0, the NVMe/TCP Transport Specification 1.0 and the NVM
// Command Set Specification 1.0. There are no zoned namespaces, no metadata, no Compare, no fused commands, and no TLS.
//
// # Subsystems and ports
//
// Every port answers discovery, and serves the subsystems that it is configured with. All ports of a target are told of in its
// discovery log, to hosts that may connect; the log's generation begins at the time of the start, so a target that was started again is
// known by it. A port has states of ANA groups of its own. A controller belongs to the port at which it was made.
//
// A Control changes states, namespaces, allowed hosts and ports at run time, and events tell hosts. Package nvmetest uses one;
// the targets of weftd do not change.
//
// A host that has a secret authenticates itself on each queue (package nvmeauth), and gets 0x191 for anything else before. It may do
// so again later. One that fails is told, and its connection ends.
//
// # When a host is lost
//
// A controller ends when its admin connection does, when the host is silent for its keep-alive time (any command
// counts; so it takes up to twice that time), or by a Control. All its connections are cut then, and no
// command begins any more. The host's next admin Connect is answered when none runs any more. It ends what the host has
// lost and the target did not notice yet (it was stopped, or a command waits for a disk), which the state of the TCP
// connections tells: so no Write of a lost association is done after the host has sent it again. A method that takes
// something from a host (DisallowHost, DropControllers, PortDown, RemoveNamespace) returns when no command of it runs
// any more, and what did not begin never will: it is a fence. A preempted reservation is one, too: commands hold their
// namespace's lock shared from the check of reservations to their end, and reservation commands hold it exclusively. A
// Read that was allowed before may only be on its way to the host. Reservations are of a host's identifier, so no two
// hosts, by their names, are connected to a subsystem with the same one.
//
// # Stability
//
// Writes go to the page cache, which hosts are told is a volatile write cache that cannot be turned off. Flush, and FUA behind the
// write or the read, are fdatasync(2); those that come together share one. Once it has failed it fails for ever, as nobody can know what the kernel
// has dropped. Reservations are kept in memory.
//
// What is in the page cache outlives the process, but NVMe has no write verifier to say so: weft's host (package
// nvmetcp) takes each lost association for a loss of what was not flushed, and writes it again.
//
// # Requests
//
// A connection is a queue. One goroutine reads its PDUs and does what does not wait: admin commands, small Reads of what is in
// memory, small Writes. It leaves the rest to workers of the connection, of which there are as many as are needed, up to a bound.
// Data that comes in a capsule is written from where it was read to; other data is asked for by one R2T, for all of it, and goes
// from the socket to memory from which it is written. Large Reads of what is in memory are sent from the page cache
// (sendfile(2)), unless there is a data digest. What they send is what is there then, so it may be that of a Write that
// began after the Read.
//
// Answers are sent by whoever has one, with all that are there by then, as far as the socket takes them at once. The rest is left to
// another goroutine, so that a host that takes nothing does not stop the reading of what it sends. With SQ flow control off, a
// Read's completion is in its last PDU (SUCCESS).
//
// Everything is bounded: connections as package callers says, commands by the queue's entries, answers that the host
// does not take by twice that, after which nothing more is read. Memory for payloads is bounded for a connection and
// for the target, but each connection may always have enough for one command: who waits for memory waits for commands
// of its own connection. A host that for 20 seconds sends neither the rest of a PDU nor any data that it was asked for,
// or takes nothing of what is sent, is cut off, as is one that breaks the protocol; it is told why (C2HTermReq). Read
// and Write do not allocate.
//
// Lock order: Target.mu, controller.mu, conn.mu. namespace.mu is taken with none of these held, and conn.mu may be taken with
// it. File.mu is a leaf.
package nvme
