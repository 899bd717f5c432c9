// Package fs shows a weft volume to the kernel: it gives POSIX meaning to what the metadata service (package
// metaclient) and the data servers (package dataplane) do. It knows no sockets and no wire formats, keeps no page cache
// and no cache of names, and decides nothing about where data lies.
//
// # Inodes
//
// The node ids of FUSE are inode numbers ([layout.FileID]), which are never used twice; the generation is always 0 and
// FORGET means nothing. The root of the mount is node 1, whichever directory of the volume it shows. State is kept only
// of regular files that are open here or have data that is not stable (type inode); of directories there is none.
//
// The kernel checks permissions (default_permissions). Locks are kept by the service, see locks.go. The kernel may keep
// attributes and names for Config.Validity, and never remembers that a name does not exist. Everything else is
// asked of the service each time, also at each open(2): what another mount has written and closed is seen by whoever opens
// the file afterwards.
//
// # Reading and writing
//
// [FS.StartRead] and [FS.StartWrite] never block. If the size and the layout are known and nothing stands in the way,
// the request goes to the data plane as it is and its Done comes from there. Whatever else may be the case (no layout
// yet, a size that must be asked for, an append, a synchronous write, an error, a recall) moves the request to a
// goroutine with plain blocking code. The handlers for go-fuse's server are a thin layer that starts and waits.
//
// Reads are clipped at the size that is known. One that reaches beyond it asks the service unless it has just been
// asked; in a file that is only read the size is refreshed in the background, so that its shrinking is noticed.
//
// An error that means the data server does not take the layout (any more) makes the request try again with a new one,
// a few times; while the service has no layout to give it is waited for. Other errors go to the application, see
// classify.
//
// # What is durable when
//
// A write is acknowledged when the data servers have it. The data plane keeps the data until it is stable. With the
// count of acknowledged writes the inode has the end and the time of those which the service has not been told of for good.
//
//   - close(2) waits for the writes under way and reports size and time provisionally, so that others see them.
//   - fsync(2), and each write through O_SYNC or O_DSYNC, makes data stable and then size and time durable.
//   - The flusher does the same for every file about a second after it was written to, or when memory runs short.
//   - rename(2) over another file does it for the file that takes its place.
//   - A recall does it for the file that is recalled.
//
// A size is never reported durably before the data below it that was written here is stable. Data that cannot be made
// stable stays in memory and is tried again. fsync fails as long as that is so; close(2) reports it once for each
// open file that was there when it began (a late error). Data of files without names is dropped after the last close.
//
// # Order of writes and sizes
//
// Truncations, appends, and settings of the modification time are carried out one at a time for each file and wait
// for all writes and reports under way, while new ones wait for them (lockSize). So no report of before such a change can
// reach the service after it; inode.epoch makes those that were prepared and not yet sent void. Calls that must keep that
// order are carried through even when the application that wanted them is gone (carry).
//
// Answers of the service may be overtaken by what happens here meanwhile. FS.clock counts such events, inode.changed
// remembers the file's last one, and an answer to a question asked before it teaches nothing (merge).
//
// # Holes
//
// fallocate(2) and lseek(2) for data and holes go to the data servers (see dataplane.File.Punch, Allocate and Seek). What
// changes data files counts as a write under way. st_blocks is st_size in blocks, whatever is allocated: only the data
// servers know, and to ask them all at each stat(2) would cost too much.
//
// # Who waits for whom
//
// Two mounts may truncate one file at the same time. Each waits for the service, which waits for the other to answer
// its recall. So OnRecall waits for requests to data servers and for LayoutCommits only, which the service answers
// whatever else it does; never for lockSize, which is held while the service is asked. A write counts as under way
// only from admit to finish, while the data plane has it, and never waits for the service in between; a recall keeps new
// ones out and then waits for the count to fall to zero.
//
// Requests of the kernel are never waited for by anything here but by Mount's server, and no notifications are sent to
// the kernel, so no request can wait for its own answer.
//
// # Access times
//
// Reads, listings and the following of symbolic links change the time of the last access as Config.Atime says (relatime).
// It is noted in memory and shown by this mount at once; the service hears of it some seconds later, in one call for many
// files, and other mounts then or later: access times are exempt from what is said of other attributes.
//
// # Interrupts
//
// See request.go: an interrupted request goes on unless its caller is dying; only waiting for a lock ends with every
// signal. If the caller is dying, a READ or WRITE gives its buffer
// back (Detach) before it is answered; a WRITE that was sent goes on from a copy.
//
// # Goroutines
//
// Those that outlive a request run under FS.ctx and are counted in FS.work: the flusher and its batches, requests
// that were taken over, calls that are carried through, refreshes of sizes. Close ends them all. Close makes everything
// stable first, as far as it is given time.
//
// # Lock order
//
// inode.mu, then shard.mu, flusher.mu, accesses.mu, and the locks inside Meta's methods that do not block (CachedLayout, Forget,
// Release) and inside dataplane.File.Dirty. handleTable.mu, transfer.mu and request.mu are taken alone. No mutex is held
// while anything blocks or while the data plane is given a request, since that may call Done at once.
package fs
