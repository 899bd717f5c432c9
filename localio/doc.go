// Package localio reads and writes the data files of a data server on the same host by descriptors that the server lends,
// with no RPC and no network in between. What it cannot do so goes to the target that it wraps, which does it by RPC.
//
// The protocol is that of package internal/wire/localio: a [Target] looks for the server's broker, proves that both are on one
// host, and has a session with it until one of its two connections ends. Then it tries again: at once, and with pauses that
// double up to 10 minutes, which start anew when the wrapped target has made a connection.
//
// A server that is none of weft's has no broker. There an administrator's statement that a directory of this host is its export
// takes the place of the proof, once it was verified (see Exports of other servers).
//
// # Requests
//
// READ, WRITE and COMMIT go by descriptors while there is a session; everything else by RPC. A request for a file that has none
// waits for them to be lent, for a second at most. They are kept as long as they are used now and then, of a bounded
// number of files (see Descriptors). What the server refuses goes by RPC for half a minute, as the server then tells
// why. So does each single request that fails here, whatever the reason: the application gets what the server answers.
//
// A request that the file system does not end can be left if it is done in memory of its own, which Op.Leave asks for: what the
// kernel has cannot be taken back. On soft mounts it is left after Config.Patience (a WRITE by Op.Overdue). Once one that was left
// is still there after a second, all others go by RPC until it has ended. A descriptor is not given back before what was left has ended.
//
// What waits for nobody is done by the caller: reads of what is in memory, and unstable writes to a file system that is in
// memory. Mostly that is in Quick, which takes no lock: a file that is open is found by the layout's data file, and what uses it
// is counted. Reads and writes that wait for a disk go through an io_uring, or have a goroutine each where there is none; so
// do those that have parts (package fileio), and syncs.
//
// # Descriptors
//
// The Targets of a process that have a session have equal parts of the share descriptors.Lent. A Target keeps
// descriptors of files in three quarters of its part, of Config.Files files at most. When another file is lent, the
// file that was unused for longest is closed. The last quarter is for files that are being lent or closed. It is used
// up when most files are in use or have something to be synced. Further files are read and written by RPC then, and
// some unused files are synced and closed.
//
// In a shortage (package descriptors) nothing more is lent, and all unused files are closed.
//
// # Stability
//
// An UNSTABLE write by a descriptor is in the page cache of the server's file, as one by RPC is, and has the same verifier: that of
// the server when it lent the descriptor. So the ways mix: a COMMIT by RPC covers what was written here, and fdatasync(2) here
// is a COMMIT. When a descriptor is closed early (it is revoked, or the session ends), nothing needs to be sent again. Nor is a copy needed of
// what was written here: it stays in the page cache when the server goes (layout.Op.Kept, Target.token).
//
// The kernel tells each descriptor of a write-back that failed after it was opened, once. A descriptor with writes that were not
// synced is therefore closed only if it is revoked, or for want of descriptors. It is synced before, and the server is
// told to look for failures, too. When fdatasync fails here, all verifiers of that file are others from then on
// (Target.spoil), by RPC too, so that those who retain the data send it again, whoever else may have been told of the
// failure. Syncs by one descriptor run one after the other, and once one has failed the descriptor is of no use.
//
// # Fences
//
// What is revoked starts nothing more, is closed when what has begun is over, and then the server is told. The server does
// not have to trust that: it asks the kernel who can write the file, so a client that is stopped in the middle of a system
// call, or has lost its session, is waited for.
//
// # Exports of other servers
//
// An [Export] is verified before it is used, hourly, and whenever the wrapped target has made a connection: a file with a secret is made
// in the directory, for a user and a group that nobody has, and is removed again. It has to be found in the root of the export by
// LOOKUP, under a handle that ends with the one that the kernel gives for it (name_to_handle_at(2)), but for zeros to fill it up; READ
// has to give the secret to that user and nothing to another one. So the directory is the root of the export and not one below it or
// beside it, on the same storage at this moment and not on a copy, and the export does not take users for others. It is made here and
// looked for there, not the other way round, since then the export need not let clients write, nor this host's root do more than look.
//
// That also shows how the server makes its handles: what stands before the kernel's is the same for all files of the file system.
// The kernel's handle of a data file is cut out of the one in the layout by that, without knowledge of the server, and
// opened by open_by_handle_at(2) at the directory. Handles that do not fit go by RPC. That is the file that the server would read, or
// none: no path is walked in which there could be symbolic links or other files by now, and the handle has the inode's generation.
// The other way, to ask the metadata service for the file's path, would cost a call for each file and prove less. What a handle names is
// bound to the file system of the directory, not to the directory: whoever makes handles up gets as much as by RPC from a server that
// does not look where in the export a file is (no_subtree_check), and no more than the ids of the layout may read. The handles of
// one that does look (subtree_check) end with those of directories, and so are refused.
//
// Descriptors are for regular files of the directory's file system without an access control list, for reading. The data file's mode
// counts for the layout's ids as if they were the process's, but others get nothing, nor do uid 0 and gid 0. Since nobody takes these
// descriptors back, owner, mode and number of links are looked at after each READ, before its result counts: if the file was fenced by
// then, or removed, the descriptor is closed and the READ goes by RPC. What passes was read before the fence. Each second all are looked
// at so, since a removed file takes up room for as long as it is open.
//
// Writes and COMMITs go by RPC. A write cannot be undone when it turns out that the fence was there first, and no process can be
// waited for that writes without the server's knowledge. Reads go through the page cache, as the server's writes do: both see the
// same pages, also before they are stable.
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
