// Package data is weft's data server: NFS version 3 over TCP (RFC 1813) on a directory, with MOUNT version 3 on the same
// port, so that no port mapper is needed. It keeps the data files of striped files and is no general NFS server: there
// are regular files and directories, nothing else.
//
// # On disk
//
// A server's directory holds "export", which is what clients see, "key", and "lock". The lock is held while a server
// runs. The key authenticates file handles: a handle is the kernel's own (name_to_handle_at(2)), which survives renames
// and restarts, with a MAC, so that nobody can make up one for a file outside the export. Opening by such handles
// needs CAP_DAC_READ_SEARCH, and giving files to their synthetic owners CAP_CHOWN; Open says so when they are missing.
//
// # Who may do what
//
// The process does everything as itself and judges by mode bits what the AUTH_SYS identity of a call may do, uid 0
// everything (it is the metadata service). authorize is the one place. A data file belongs to a synthetic uid and has
// mode 0640, so its uid may write and its gid read (RFC 8435 section 2.2). Fencing is a SETATTR that changes these ids:
// I/O holds the file's lock shared from the check of the ids to its end, SETATTR holds it exclusively, so when SETATTR
// has answered nothing that was allowed by the old ids can still touch the file.
//
// # Stability
//
// UNSTABLE writes are in the page cache until a COMMIT has synced the file. The write verifier is drawn at the start and
// again after every failed sync, since the kernel may have dropped what it could not write: a verifier that stays the
// same vouches for all of it. Operations that change names or attributes are on the disk before they are answered.
//
// # Requests
//
// Each connection has a reader goroutine; each request runs in a goroutine of its own; the first of them to be done
// writes the replies of all that are done by then in one system call. Requests per connection and payload bytes in
// memory are bounded; a connection that does not take its replies is closed.
//
// Lock order: file.mu before cache.mu; conn.mu alone.
package data
