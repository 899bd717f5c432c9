// Package data is weft's data server: NFS version 3 over TCP (RFC 1813) on a directory, with MOUNT version 3 on the same
// port, so that no port mapper is needed. It keeps the data files of striped files and is no general NFS server: there
// are regular files and directories, nothing else, and a file has one name.
//
// Beside these two it serves weft's own program for reserved space and holes, see package sparse.
//
// # On disk
//
// A server's directory holds "export", which is what clients see, "key", and "lock". The lock is held while a server
// runs. The key authenticates file handles: a handle is the kernel's own (name_to_handle_at(2)), which survives renames
// and restarts, with a MAC, so that nobody can make up one for a file outside the export. For the same reason ".." has
// no handle. A key that is damaged, or missing though there are files, is an error at the start: with another key no
// handle that was given out would be valid. A server needs the capabilities CAP_CHOWN, CAP_DAC_OVERRIDE,
// CAP_DAC_READ_SEARCH and CAP_FOWNER, and says so when it lacks one.
//
// # Who may do what
//
// The process does everything as itself and judges by mode bits what the AUTH_SYS identity of a call may do, uid 0
// everything (it is the metadata service). authorize and authorizeChange are the only places. A data file belongs to a
// synthetic uid and has mode 0640, so its uid may write and its gid read (RFC 8435 section 2.2). Fencing is a SETATTR
// that changes these ids: I/O holds the file's lock shared from the check of the ids to its end, SETATTR holds it
// exclusively, so when SETATTR has answered nothing that was allowed by the old ids can still touch the file.
//
// # Stability
//
// UNSTABLE writes are in the page cache until a COMMIT has synced the file. The write verifier is drawn at the start and
// again after every failed sync, since the kernel may have dropped what it could not write: a verifier that stays the
// same vouches for all of it. To learn of every failure the server keeps a file open until its data was synced, and
// runs one sync of a file at a time, for all who wait. Operations that change names or attributes are on the disk before
// they are answered: what was made, and the directory that names it. So are ALLOCATE and DEALLOCATE.
//
// # Requests
//
// Each connection has workers that take turns in reading; who has read a call answers it, and whoever is done first
// sends the replies of all that are done by then in one system call. A request that waits holds up no other one.
//
// Everything is bounded: connections and open files by the limit on descriptors, requests of a connection from before
// they are read until their replies were sent, and payload bytes in memory, of a connection and of the server (512 MiB).
// A client that neither sends the rest of a payload nor takes replies for 20 seconds is cut off, since that memory is
// what others wait for. READ and WRITE do not allocate.
//
// There is no duplicate request cache. A repeated CREATE, in the modes UNCHECKED and EXCLUSIVE, finds what the first one
// made; after a lost connection a client takes NOENT to a repeated REMOVE for success.
//
// Lock order: file.mu before syncState.mu; cache.mu and conn.mu are leaves. Memory for payloads is never waited for with
// a lock held.
package data
