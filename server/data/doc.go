// Package data is weft's data server: NFS version 3 over TCP (RFC 1813) on a directory, with MOUNT version 3 on the same
// port, so that no port mapper is needed. It keeps the data files of striped files and is no general NFS server: there
// are regular files and directories, nothing else, and a file has one name.
//
// Beside these two it serves weft's own programs: for reserved space and holes (package sparse), for clients on the
// same host (package localio), and for connections that a client has lost (package conns).
//
// # On disk
//
// A server's directory holds "export", which is what clients see, "key", "verifier" (see The write verifier), and
// "lock". The lock is held while a server runs. The key authenticates file handles, and the server's identity is made
// from it: a handle is the kernel's own (name_to_handle_at(2)), which survives renames and restarts, with a MAC, so
// that nobody can make up one for a file outside the export. For the same reason ".." has no handle. A key that is
// damaged, or missing though there are files, is an error at the start: with another key no handle that was given out
// would be valid. A server needs the capabilities CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER, and
// says so when it lacks one.
//
// # Who may do what
//
// The process does everything as itself and judges by mode bits what the AUTH_SYS identity of a call may do, uid 0
// everything (it is the metadata service). authorize and authorizeChange are the only places. A data file belongs to a
// synthetic uid and gid and has mode 0640 (RFC 8435 section 2.2). Who has both may write, who has the gid may read.
// That is more than RFC 8435 asks for, where the uid is enough: both together have 62 random bits. An address from
// which many calls are refused is slowed down (package callers). Fencing is a SETATTR that changes these ids: I/O
// holds the file's lock shared from the check of the ids to its end, SETATTR (and DEALLOCATE) exclusively, so when
// SETATTR has answered nothing that was allowed by the old ids can still change the file, and a READ that was allowed
// by them can only be on its way to the client.
//
// # Clients on the same host
//
// They are lent descriptors of data files by the broker (package localio has the protocol), under the file's lock and by the functions
// that authorize READ and WRITE. So there are writers that hold no lock of ours. What takes the lock exclusively
// to keep writers out, SETATTR of ids and modes, and DEALLOCATE where it goes beyond what was asked for, first revokes what was lent, and then
// makes sure that nobody can write the file: by a lease (fcntl(2)), which the kernel grants only while nobody else has the file open. A write
// lease on the descriptor that is always open is the quick way. If others read the file, a read-only descriptor takes its place
// for a moment and a read lease tells whether there are writers. That counts also those who lost their session, got descriptors from a
// server that ran here before, or have given them on; so nothing needs to be remembered about clients. While there is a writer SETATTR
// answers JUKEBOX, and the log says who. REMOVE does not ask: what has no name any more may be written by whoever has it open. So the
// metadata service can always get rid of a data file that it cannot fence, by replacing it.
//
// Descriptors can be written by other means than ours, so what they say about stability is theirs: a COMMIT syncs whatever is in the page
// cache, and a file to which something unstable was written by a descriptor stays open until it was synced, to learn of a failure.
//
// # Stability
//
// UNSTABLE writes are in the page cache until a COMMIT has synced the file. To learn of every failure the server keeps
// a file open until its data was synced, and runs one sync of a file at a time, for all who wait. Operations that
// change names or attributes are on the disk before they are answered: what was made, and the directory that names it.
// So are ALLOCATE and DEALLOCATE.
//
// # The write verifier
//
// A verifier that stays the same says that all writes answered with it are on the disk, or in the page cache and will
// be. The page cache outlives the process. So the verifier does, too, and after kill -9 or an upgrade clients send
// nothing again. DIR/verifier is a note with the verifier and what it depends on. A server that is started takes the
// verifier from there if all of this is the same:
//
//   - The boot id of the kernel (/proc/sys/kernel/random/boot_id).
//   - The mount of the export's file system (findMount), which is another one after the file system was unmounted.
//   - The inode of the note, as a copy of a directory has not got what was written after it was made.
//   - The word in the note of failures, and syncfs(2), which tells of a write-back that failed while no server ran.
//
// Else it draws a verifier. It also does after every failed sync, since the kernel may have dropped what it could not
// write. The note is on the disk before the failure is answered. It is overwritten in place, which needs no space. If
// even that fails, WRITE and COMMIT get NFS3ERR_IO from then on, and descriptors for writing are revoked and not lent,
// until the file system is unmounted and mounted again: ext4 and XFS, for instance, turn off a file system that has
// lost its journal.
//
// After a failed sync, or where the kernel may have failed to write a page while no server ran, a file's pages are
// dropped from the page cache before it is written again, see fileio.DropPages: on ext4 what is written to such a page
// may never get to the disk, though fsync succeeds. From a failure on until the file system is mounted anew, servers
// drop the pages of all files that they open.
//
// The servers of a file system share a second note, LocalDir/failures-MAJ:MIN, which is locked (flock(2)) while it is
// used and not on that file system. It says that nothing is written any more, and it has the word: the kernel tells
// only one caller of syncfs that something could not be written, and whoever is told changes the word, so that all
// servers draw a verifier when they are started next. A server that asks changes it before, and back if all is well: if
// it is killed in between, the answer counts as bad. Without such notes (LocalDir cannot be used, or the kernel does
// not tell mounts apart) each start draws a verifier, and DIR/verifier is emptied.
//
// What a verifier cannot see:
//
//   - A program that is not a data server, or one with another LocalDir, may call syncfs and be told of a failure while
//     no server runs. While one runs the files tell.
//   - A disk that loses what it said it had written, such as one that ignores flushes and loses power apart from its
//     host.
//   - Contents of the disk that are put back below a mounted file system.
//   - Other writers of data files, and clients' descriptors: these hear of failures themselves (package localio).
//
// Shutdown first syncs what was written, for 5 seconds at most, so that the next server's syncfs has little to wait
// for. What it does not get to is in the page cache.
//
// # The page cache
//
// A READ or WRITE is cut in up to three parts (package fileio): the whole blocks go past the page cache, by a second descriptor of the file
// that is open with O_DIRECT, the ends before and behind them through it. Config.IO tells from which size on; what the file
// system can do is tried once, at the start, with blocks of what it says it needs (STATX_DIOALIGN) and a page at least. A
// file that cannot be opened so, or refuses such a transfer with EINVAL, is read and written through the page cache. A
// payload lies as far behind the beginning of a page in memory as in the file, so its whole blocks are aligned in both.
//
// Both ways see one file, since the kernel orders them: a direct READ first writes dirty pages of its range; a direct WRITE
// does so too, and drops the pages before it begins and again before it returns, so that what a buffered READ brought in
// meanwhile does not stay. It cannot drop a page that has become dirty meanwhile, and would then report an error of the
// file although nothing is lost. Hence the parts are whole pages, so that the buffered ends of neighbours are none of
// theirs; and the file systems (ext4, XFS, btrfs) hold the inode's lock over a WRITE, shared if it is direct and exclusively
// if buffered, so that no page, nor the folio it is part of, becomes dirty in between. A program that writes a data file by
// mmap while it is served could do it; none may.
//
// Stability has one rule for both. A direct WRITE that was answered is on the device but maybe in its cache, and the extents
// and the size that lead to it may be in memory: it is UNSTABLE like any other, marks the file dirty, and one fdatasync of
// the first descriptor covers everything. Nothing is ever synced by the second descriptor: a failure is told once for each
// descriptor, and the first one, which was open before all writes, is where it is looked for. A direct WRITE that fails says
// so at once, and no verifier changes for it; the buffered ends before it count as written.
//
// Holes are punched, and files cut, with the file's lock held exclusively or under the kernel's, which waits for direct
// transfers. SEEK finds what a direct WRITE has written when that was answered, since only then it counts as data.
//
// A READ of 32 KiB and more of what is not transferred directly is sent from the page cache (sendfile(2)), unless it reaches the
// file's end or the connection is TLS. Its length is told before its bytes are taken, after the lock was let go, so they may be
// those of a WRITE that began after the READ. If they are gone, or cannot be read, the connection ends, and the file is read
// into memory from then on, which can tell why.
//
// What is buffered in sequence is dropped from the page cache behind it, at some distance: a file that is shorter stays.
//
// # TLS
//
// With Config.TLS a client whose first call on a connection asks for it gets RPC-with-TLS (RFC 9289): the answer, the
// handshake, and everything else inside. A later question is refused. With Config.RequireTLS all calls but NULL outside
// get AUTH_TOOWEAK.
//
// If clients need a certificate, a client that is not a service by it (package rpctls) is a guest. It is nobody's root, and may call READ, WRITE,
// COMMIT, FSINFO, and what the programs LOCALIO and SPARSE have. Handles cannot be made up, and nothing that it may call tells
// the owner of a data file: it has both from layouts. That says nothing of clear text, which only Config.RequireTLS keeps out. A connection whose certificate is revoked or expires is cut within seconds.
//
// # Requests
//
// Each connection has workers that take turns in reading; who has read a call answers it, and whoever is done first
// sends the replies of all that are done by then in one system call. A request that waits holds up no other one. A small READ of
// what is in memory does not wait: whoever reads calls answers it before the next one, and sends the replies when no whole call
// is there any more.
//
// Everything is bounded: connections as package callers says, open files by a share of the limit on descriptors
// (package descriptors), requests of a connection from before they are read until their replies were sent, and payload
// bytes in memory, of a connection and of the server (512 MiB). A client that neither sends the rest of a payload nor
// takes replies for 20 seconds is cut off, since that memory is what others wait for. READ and WRITE do not allocate.
// In a shortage of descriptors the files that no request uses are closed, unless something in them is to be synced. A
// request that gets no descriptor even so is answered with JUKEBOX.
//
// There is no duplicate request cache. A repeated CREATE, in the modes UNCHECKED and EXCLUSIVE, finds what the first
// one made; after a lost connection a client takes NOENT to a repeated REMOVE for success. Before it repeats anything
// that changes something it ends the lost connection (program of package conns): calls that were read and have not
// begun are dropped, those that have begun are waited for, and END says whether all are over. So the original of a
// WRITE is never carried out after its repetition was answered. A process that is gone carries out nothing: the lock on
// the directory is free only then.
//
// Lock order: Server.mu is held over no call but a socket's Close; file.mu before syncState.mu and session.out;
// syncState.mu before verifier.mu, and that before the lock of the failures; broker.mu, cache.mu and conn.mu are leaves.
// Memory for payloads is never waited for with a lock held.
package data
