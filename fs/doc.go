// Package fs shows a weft volume to the kernel: it gives POSIX meaning to what the metadata service (package
// metaclient) and the data servers (package dataplane) do. It knows no sockets and no wire formats, keeps no data but what
// it reads ahead and no cache of names or attributes (the kernel and package metaclient do), and decides nothing about where
// data lies.
//
// # Inodes
//
// The node ids of FUSE are inode numbers ([layout.FileID]), which are never used twice; the generation is always 0. The root
// of the mount is node 1, whichever directory of the volume it shows. A directory that was renamed on another mount may be
// known to the kernel at its old place and at its new one, under two node ids (places.go), so for directories FORGET counts.
// Node ids are what file handles are made of, so each leads to the same inode for ever (lookupNode).
// State is kept only of regular files that are open here or have data that is not stable (type inode).
//
// The kernel checks permissions (default_permissions) and access control lists, which it asks for as extended attributes;
// the service checks them again, for the user, group and groups that come with each call (cred.go). Locks are kept by the
// service, see locks.go. If another mount has the file open, an unlock, also by close(2), makes stable before what was written
// here (inode.stable), and a lock makes what is read afterwards fresh (inode.fresh).
//
// # What the kernel may keep
//
// A change that was answered on one mount is seen by everything that begins afterwards on any other. Whatever is kept
// anywhere is kept under a lease ([metaclient.Answer]), for no longer than that is sure to last, and forgotten when it is
// recalled, before the recall is answered. The kernel is told by notifications (notify.go), which may overtake answers that
// are on their way to it. So it is given something to keep only in answers that it drops itself if they have been
// overtaken (Linux 6.18, fs/fuse):
//
//   - Attributes in answers to GETATTR and STATX. A request notes the connection's attribute version before it is sent,
//     INVAL_INODE gives the inode a newer one, and an answer to an older request changes nothing (fuse_change_attributes).
//     The inode exists as long as the request, so the notification cannot miss it.
//   - Names, and that there is no such name, in answers to LOOKUP, CREATE and their like, for 5 s at most: see Names.
//
// Nothing else is so guarded. Answers to SETATTR and LINK are applied whatever has happened since. INVAL_INODE misses an
// inode that a LOOKUP, CREATE or READDIRPLUS has been answered with and that the kernel has yet to make, in the context of a
// process that may not be running; waiting for the answer to be written would not help. Such answers carry attributes that
// are not to be kept, and READDIRPLUS is not used: the kernel asks again, package metaclient answers from its cache, and the
// service hears nothing of it. That is one GETATTR for each inode that is new to the kernel, but for files that it makes.
//
// Between the answer to CREATE and the end of open(2) the kernel checks the new file's attributes. For that it may keep those in the
// answer, for some milliseconds. A recall that comes before it has made the inode tries until it has (inode.newborn).
//
// Whoever answers GETATTR adds what was written here and the service has not been told of; then it is not kept either, as
// the time will be another one when it has.
//
// # Names
//
// A recall of a directory's names makes the kernel ask again for each of them that it may keep (kept.go). INVAL_ENTRY with
// EXPIRE_ONLY (Linux 6.2) does that and drops no entry. So overlays on the mount, what is mounted inside it, the names of
// running programs and working directories stay; without that flag, and with INC_EPOCH, they do not. A kernel that
// lacks the flag is given no names to keep. Linux 6.19 and 7.0 expire only names that are there, so they may not keep the
// answer that a name is not.
//
// An answer that is under way is ordered with the notification if its thread holds the directory's lock, for which the
// notification waits. That is so for every name that is new to the kernel, and for each answer that there is none. When a
// thread looks a known name up again it holds no lock. Its answer may come into force at any time until the thread runs on,
// and counts from then. So before names are expired a recall waits for each thread that was answered about one of them
// without the lock (asker), until one of these shows that it has made use of the answer:
//
//   - It makes another request. All requests are counted but those that the kernel may send later than the thread makes them.
//   - It has ended.
//   - It sleeps, 300 ms after the answer. Then the answer has been written, and the thread was woken by it.
//   - A second has passed.
//
// After LOOKUP a thread makes another request at once, as the attributes are not kept. So there is next to nothing to wait
// for, but for threads that open with O_PATH or wait for the lock of a directory. A thread with no number here gets no name to keep.
//
// A notification may have to wait for a request of ours that holds the directory's lock and is itself waiting for the
// service, which waits for the recall. If no name was expired for 20 ms, the service is told that the recall is stuck
// (metarpc.StatusStuck), and turns back the changes of this mount that wait. Such a request is answered with ESTALE
// (restarts.go). So the kernel lets go of the lock, for which the notification waits, and makes the system call again, which
// no program sees. Meanwhile all names are expired in the directories of the request, and its thread's next request
// waits for that, so that the change that is made again is in nobody's way.
//
// Some changes cannot start over, as who makes them would see ESTALE: those that have already, bind(2) of a socket,
// those of the kernel's NFS server, and those whose thread has no number here. Nor can one start over that waits for
// something else than an answer that puts it off, such as a service that has died. In their case a recall goes on when
// the time for which the names may be kept has passed since the last thread made use of its answer. That time is 5 s.
// It is 1 s on a soft mount, whose calls should not take long, and with a service that turns nothing back (before
// version 10).
//
// A system call with a relative path that starts over may take the lock before the notification does, if both want
// it at once (kernel/locking/rwsem.c lets writers overtake). If that happens to two mounts that want to change one
// directory, each waits for the other, and time has to pass. So after a recall nothing is kept in the directory for a
// second, or for half a minute if time had to pass, and from then on an eighth of the time since the recall.
//
// CREATE is answered with ESTALE also if somebody else has just made the file, so that the kernel opens it. If it has
// started over already, this mount opens it in its answer to CREATE.
//
// An answer to a question from before a recall has ended is not kept, nor one from before a rename of this mount in the
// directory: the kernel may apply it to the entry at its new place.
//
// A rename keeps an entry's time, and takes it to a directory whose lease is another. Usually package metaclient knows what the
// new name means under a lease; then the entry counts as one of both directories before the rename is made, since the
// kernel has it at the old place until it hears of the rename. Otherwise the rename starts over, or if it cannot, it is
// answered when the time has passed.
//
// # Reading and writing
//
// [FS.StartRead] and [FS.StartWrite] never block. If the size and the layout are known and nothing stands in the way,
// the request goes to the data plane as it is and its Done comes from there. Whatever else may be the case (no layout
// yet, a size that must be asked for, an append, a synchronous write, an error, a recall) moves the request to a
// goroutine with plain blocking code.
//
// Two transports call them (MountConfig.Transport). Package device starts what the kernel has sent, and lets Done answer
// (transfers.go). Under go-fuse's server the handlers of READ and WRITE are a thin layer that starts and waits. All other
// handlers are the same.
//
// A file that is made to be written is made with its layout (metarpc.CreateArgs.Layout) if the last one was written of which it is known (FS.filling): so of
// files that are unpacked or copied each but the first costs no call for a layout, and of those that are only made, as by touch(1), none takes data files.
//
// A size is exact while there is a lease on the attributes: nobody else writes to the file then. Without one, what is known
// is a lower bound, since a file that is cut is recalled from all who have it open. So a read below it needs no question as
// long as the session lives for sure (Meta.Alive), and one that reaches beyond asks.
//
// An append under a lease goes to the end that is known here, and needs no call; lockSize keeps others out. Without a
// lease, and if it takes more than one layout, each WRITE has its place reserved by the service, where it goes as a
// whole, several at once (reservations.go). Whoever recalls the lease learns of the appends that have been made, and
// one that has not reached the data servers by then starts again (terms.lease). Some of them may have it all the
// same, so the service is told that this mount appends (metaclient.AtEnd), and does not ask them for the size after a
// restart.
//
// The service keeps a place until it hears that it is written, or given up: from the next Reserve, a report, or at once
// if it has asked. Until then nobody is shown what lies behind it. So such a write says nothing of the size known here:
// others may be about to write in front of it, and whoever reads on asks the service, which is told of the written
// places first (tellPlaces). OnReserveRecall makes places void where nothing is begun: their appends take new ones.
// An append that is begun is finished at its place, however often it has to be tried, so that it is there once.
//
// An error that means the data server does not take the layout (any more) makes the request try again with a new one,
// a few times; while the service has no layout to give it is waited for. One that concerns a copy of mirrored data is
// reported, whether or not somebody still waits for the request, and the request tries again without the copy if it has
// been given up (copies.go). Other errors go to the application, see
// classify.
//
// # Passthrough
//
// The kernel can be given a data file on this host to read, and with PassWrites to write, in place of one of ours that it holds
// whole (passthrough.go). Then no request comes to us but those that open and close the file and that ask for or set
// attributes; size and times are those of the data file, which is looked at whenever they matter (inode.look) and made stable by fsync(2),
// as what was written through us. That it was read is seen by its time of access; so it is not on a data server whose file system keeps
// none (noatime).
//
// A backing is made at the first open, when the service has pinned the copy (Meta.Pin), and goes with the last open file that was
// answered with it. Meanwhile every open must be answered with it, or the kernel makes it fail; and none may have been answered
// without it that is still there. Opens that each write has to be acknowledged for (O_APPEND, O_SYNC, files with set-ID bits or
// capabilities) are answered with FOPEN_DIRECT_IO as well: then the kernel asks us, and uses the data file for mmap(2) alone. It would
// write one of several copies there, so a file that has them cannot be opened for reading and writing then (ETXTBSY). Of one that has none the data
// file is lent for writing for such an open, or it fails, too (inode.join).
//
// Descriptors of data files count in descriptors.Backings. When that is used up, and in a shortage, files are opened
// without a backing.
//
// What is written through us while the kernel may write the same data file must not be sent again, over what is newer: nothing is retained of it
// (dataplane.Write.Shared), nor of what was written before (inode.unretain).
//
// A file that gets set-ID bits or capabilities while it is open for writing so keeps them when it is written: the kernel leaves it to the
// WRITE to take them away. O_APPEND that is set later, by fcntl(2), is the kernel's, and knows of appends on other hosts only what
// the data file says.
//
// What the kernel has open cannot be taken back, by a recall, at the end of the session, or when we are killed. It may go on reading what
// was replaced since; what it writes then is lost, and fsync(2) and close(2) say so. After the session was lost the service is asked again
// for the data file before another open joins; if it is another one by now, the open is ESTALE.
//
// # Reading ahead
//
// An open file that is read from front to back, one read after the other, is read ahead (readahead.go): as far as it has been
// read so, up to Config.ReadAhead. What was read ahead is good for reads that begin while there is a lease on the attributes
// and neither size nor times nor the count of writes here are others than before it was asked for; no write may be under way.
// So nothing has to be dropped when a lease is recalled: the next read does.
//
// # What is durable when
//
// A write is acknowledged when the data servers have it. The data plane keeps the data until it is stable. With the
// count of acknowledged writes the inode has the end and the time of those which the service has not been told of for good.
//
//   - close(2) waits for the writes under way and reports size and time provisionally, so that others see them, but for a size alone that
//     data servers tell, too, should we be gone, and for the first of a new file (inode.mayWait). With Config.StableClose it does as fsync(2).
//   - fsync(2), and each write through O_SYNC or O_DSYNC, makes data stable and then size and time durable.
//   - The flusher does the same for every file about a second after it was written to, or when memory runs short.
//   - rename(2) over another file does it for the file that takes its place.
//   - A recall does it for the file that is recalled. What data servers refuse to take then is given up, as another client is
//     to write there, and reported like what is lost with a session (inode.surrender).
//
// What other mounts may write at the same time is Shared in the layout: it is written stable, and nothing is kept of it that
// could be sent again.
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
// remembers the file's last one, and an answer to a question asked before it teaches nothing (merge): whoever must know asks again.
// For the answer to a report the service asks no other writer, so it makes no size smaller that is known (told). Questions
// move the clock on, too, as answers may come in another order: of two the one to the later question tells the size.
//
// # Set-ID bits and file capabilities
//
// They go when the file is overwritten, and no program is executed with those of before (privileges.go, given.go).
//
// The kernel leaves it to the answerer of WRITE, FALLOCATE, SETATTR and OPEN with O_TRUNC to take them away
// (FUSE_HANDLE_KILLPRIV_V2), and of all but SETATTR it takes over the size and the times alone. So INVAL_INODE is sent
// after the service has answered and before the kernel is. That also makes answers to older GETATTRs worthless. Access
// control lists change the mode in the same way.
//
// A write goes by the mode that was heard last, if it is certain that nobody has given the file privileges since
// (inode.sure). A recall of the lease, a change of this mount and a new session of the service end that, and the next
// write asks. The service tells sessions that have the file open for writing when it has been given privileges, with a
// lease or without (package server/meta). A write of a mapping's pages takes them away whoever wrote it.
//
// execve(2) takes the set-ID bits from what the kernel was told last, be that outdated or not: between its check of
// permissions and that moment it asks nothing but OPEN. So the answer to OPEN for execution is where the order is
// decided (given.mayExecute):
//
//	the kernel was told of no other privileges than the present ones     it may be executed
//	others were given, and the thread has not asked since                ESTALE and INVAL_INODE, and it asks
//	the thread was answered with the present ones since                  it may be executed
//	that answer may have been overtaken, or it is open for writing here  ETXTBSY
//
// Only the thread's own question counts: its answer has been made use of by the time OPEN comes. It must have been
// asked after whatever lets the kernel drop answers: an INVAL_INODE, or the last WRITE, which ends with the RELEASE of
// the file.
//
// After OPEN this mount's kernel lets nobody write the program (ETXTBSY), and the service nobody of another mount.
//
// # Caches
//
// A file that is copied to a cache (caches.go) is open here meanwhile, and read like any other. What is written to the data file of
// the cache has a dataplane.File of its own. The service takes the cache away before anybody may write the file, and the end of
// the copying is its decision: so nothing here has to be kept out. A mount copies a file once at a time, and returns when none
// of its writes is on its way any more, as a late one could come after those of somebody who writes the cache, too.
//
// # Holes
//
// fallocate(2) and lseek(2) for data and holes go to the data servers (see dataplane.File.Punch, Allocate and Seek). What
// changes data files counts as a write under way. st_blocks is st_size in blocks, whatever is allocated: only the data
// servers know, and to ask them all at each stat(2) would cost too much.
//
// # Files on namespaces
//
// What a layout says of data files on NVMe namespaces holds only until it is given back, as the service may then give their blocks to other
// files. So reads are counted, each before it looks for its segment (reads.go), and OnRecall, having taken the segments away, waits for those
// that had begun, and then for what may still be at copies that were given up; so does letGo, which gives layouts back unasked. New ones ask for another layout. What a read brings counts only if the session it began in still lives
// at its end (believe); otherwise it begins again.
//
// What was written to blocks that are not valid yet is told with the durable size, once it is stable: only then others see it, and only then is
// the file not dirty any more. That is what the flusher, fsync(2) and recalls do. A report that the service refuses with ESTALE or EPERM says that it has
// taken the blocks, or the layout, away since: the data is lost, as with the session, and each handle reports that once, as EIO.
//
// When this mount cuts a file, the service frees the blocks before it answers, and tells a newer generation of the data files from then on. So
// everything is told before, and reads are kept out until the answer (startCut).
//
// # Pages
//
// By default files are opened for direct I/O, and pages are there for mmap(2) only. The kernel drops them at each open, and
// we do (INVAL_INODE with a range) when a recall says that contents change. What others have mapped meanwhile they see change
// once they touch it again; what they write to their mapping reaches the data servers when their kernel likes, or at
// msync(2): that, and not the order of the two, is what holds between mounts.
//
// With Config.CachePages a file opened for reading only, under a lease, is read through the page cache, and pages are kept
// from one open to the next while the lease lasts and size and times are the same (keptPages). They are dropped when it is
// recalled. Files opened for writing are always direct, so that writes go through and appends may go elsewhere than the
// kernel thinks; it drops the pages they touch, before and after. Once the lease is gone, a file that is still open that way
// is checked at each read: the kernel asks for the attributes, which nothing lets it keep, and drops the pages if size or
// modification time have changed (AUTO_INVAL_DATA).
//
// # Who waits for whom
//
// Two mounts may truncate one file at the same time. Each waits for the service, which waits for the other to answer
// its recall. So OnRecall, OnLeaseRecall, OnReserveRecall and OnSizeQuery wait for requests to data servers and for
// LayoutCommits only, which the service answers whatever else it does; never for lockSize, which is held while the
// service is asked. OnReserveRecall also waits for layouts, which the service grants at a place while it waits for
// that. A write counts as under way only from admit to finish, while the data plane has it, and never waits
// for the service in between; OnRecall keeps new ones out and then waits for the count to fall to zero, OnLeaseRecall
// waits for those that had begun. In the same way a read of what lies on namespaces counts only while the data plane
// has it, from beginRead to endRead.
//
// What OnRecall makes stable may have been fenced: then commit asks for credentials only (Meta.Renew), and for no layout, whose turn may
// come after this recall.
//
// A write that has failed at one of several copies is not under way any more, but it is not acknowledged either before the
// service has decided about the copy (settleCopies), which calls OnCopiesStale at all mounts first. OnCopiesStale waits for
// nothing.
//
// A file may have to have several good copies of what was synced (layout.Segment.Exacting). If there are fewer fsync,
// and a write with O_SYNC or O_DSYNC, waits for new ones when the data is stable at those that there are (makeSafe).
// Nothing else waits, so that the layout can be recalled for making the copies.
//
// What notifications wait for in the kernel:
//
//   - INVAL_ENTRY for the directory's lock, which requests of ours hold: see Names. It is sent by a goroutine, while
//     another one has the requests start over.
//   - INVAL_INODE without a range for nothing but an inode that is just being made or freed. That takes no request of ours,
//     since dirty pages are written at the latest when the last file and mapping are closed. A WRITE handler may send it.
//   - INVAL_INODE with a range for the locks of the file's pages, which are held by READs of them, and for dirty pages of
//     mappings to be written by WRITEs. No handler sends it; a recall lets a goroutine do so, and waits for that. But a READ
//     or WRITE may need something that the service gives only when the recall has been answered: a layout, its turn
//     behind a truncation. inode.stuck counts those that wait for anything but data servers. If there have been any for
//     stuckPatience, the recall stops waiting, and the pages are dropped when those requests are over. So a page that is being
//     read or written back through such a jam may be seen for that long by those who map it, or read it by CachePages.
//
// A notification is a write(2) that may block; it blocks a thread, not the other goroutines, whatever GOMAXPROCS is. maxForgetting
// bounds the threads. FORGET and RELEASE wait for nothing.
//
// # When the session is lost
//
// The service ends the session of a client it has not heard of for the time of the lease, and keeps what that had
// written from reaching the data servers later. OnLost drops data that is not stable, since others may have written there
// meanwhile, and counts a late error for each file that had some; each handle reports it once, as EIO. Until that is done
// nothing of the file is committed (inode.losing).
//
// What is under way then belongs to the old session (FS.sessions) and comes to nothing in the next one: reports of sizes end,
// acknowledgements of data servers do not count, places that were reserved are gone. Writes that the application was not told
// of begin again with new layouts, but for those through an open file whose lock is lost (locks.go).
//
// A volume of several shards has a session for each. All this is then so of the files of one shard, and others are not concerned: what is told of many files at
// once (sizes, access times) is told each service separately, and what waits for one holds up nothing that another one is told.
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
// # Soft mounts
//
// What an application waits for has a context that metaclient.Soft has marked: requests, waiting for locks, and what
// READs and WRITEs need that the data plane does not have. So on a soft mount the metadata service is waited for no
// longer than Meta says (metaclient.Config.Patience), be it in a call, behind another request that waits for it
// (inode.await), or for a call that is carried through (carry), which itself goes on. All that the mount does by
// itself, as making data durable in the background or answering recalls, waits for ever; so nothing is lost but the
// patience of the application. A change that was given up may have been made or may yet be: the kernel is told to ask
// again (unsure). An fsync that waits for further copies ends after Config.Patience.
//
// # Goroutines
//
// Those that outlive a request run under FS.ctx and are counted in FS.work: the flusher and its batches, requests
// that were taken over, calls that are carried through, pages being dropped, losses. Close ends them all. Close makes everything
// stable first, as far as it is given time.
//
// # Lock order
//
// keptPages.mu and window.mu, then inode.mu, then readAhead.mu, bucket.mu, flusher.mu, accesses.mu, places.mu, and the locks inside Meta's methods that do not block
// (CachedLayout, CachedAttr, Forget, Release) and inside dataplane.File.Dirty. handleTable.mu, transfer.mu, caching.mu,
// given.mu, keptNames.mu, restarts.mu and request.mu are taken alone. No mutex is held
// while anything blocks or while the data plane is given a request, since that may call Done at once.
package fs
