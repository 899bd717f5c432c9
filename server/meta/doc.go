// Package meta is the metadata service: it keeps the names, attributes, sizes and layouts of a volume in a catalog and
// serves them to clients over the protocol of package metarpc. It moves no file data and knows no data server; what has
// to be done there it asks of [Files] (package datafile).
//
// # What is where
//
// Whatever must outlive the service is in the catalog (package schema). In memory is only what clients can bring back
// after a restart: which files their sessions have open, the sizes and times of files that they wrote but that are
// not yet stable, and which leases they have. A namespace operation reads what it needs, builds one batch whose guards name
// everything it relied on, and starts over with fresh reads when a guard did not hold. The reply of a call that may not be executed twice is a
// row of that same batch.
//
// # A change, and the leases of others
//
// Who has leases on an inode is in memory, in a record of the inode (type leased). A change says which inodes it affects
// (tx.affects), and change does the rest before it commits:
//
//	mark     the inode is being changed: no lease on it is granted
//	recall   sessions that have leases on it, but not the one that asks, drop what they keep, and answer
//	commit   and the lease records of those who answered are gone
//	unmark   also if the commit failed for good; between two tries the marks stay
//
// A commit whose outcome is unknown is followed by finding out (findOut; catalog, Unknown outcomes), before anything is done that depends on it: the marks stay, what other services
// hold is held, data files that were taken are neither used nor given back, the call is not answered. So it is also if the session ends, whose clean-up waits for its calls; if
// the service stops nothing is settled any more, and the next one reads what there is. Every batch that has an answer guards the slot's reply row, as it was
// before: to find out, the row is changed (schema.Reply.Fences), after which the batch cannot be committed, or is found to have been. A batch without an answer is committed again.
//
// A lease is registered before the rows are read that are told under it. So a change that these rows do not show yet finds
// it and recalls it; the reply and the recall may overtake each other, but clients do not keep the answer to a question
// that was asked before a recall came. A recall that is not answered ends the session, as every callback. Its
// client may not notice until its own lease has run out, so a change waits until then, counted from its last frame.
//
// Leases on the attributes of a regular file are also kept away by writers: while another session has the writer flag
// (claim.writer), none is granted. The flag is set before a layout for writing recalls the leases there are. Instead of
// being given a lease, who asks for attributes gets true ones: the writers are asked how far they have got (askWriters),
// one question at a time for each session, in which all that is waiting to be asked goes together. A session that
// only appends where Reserve has told it to is asked only while it has places. A session that has ended without its
// doing is not asked either, its data files are (makeSure).
//
// The recall of a lease on names may have to wait for a change of the same client, whose kernel holds the lock of the
// directory, and that change for another client, which waits for the recall. So all waiting for clients, for services of
// other shards, for the removal of a file and for Service.moving is in Service.waits (package turnback). When a client says
// StatusStuck, its changes that wait and affect the same inodes are turned back. So are holds for changes of other
// services, as it is not known here whose changes these are.
//
// Answers in the catalog are stored without leases.
//
// Rows that are read may not be durable yet. Two calls end with a commit for that reason, even if there is nothing to
// change: a durable LayoutCommit, and LayoutGet with Renew, which tells a client what copies it has to make stable.
//
// A client may make LayoutCommit and LayoutReturn, and nothing else, before it answers a recall or a question. So nothing
// may be held while calling back that these wait for, and they call back nobody themselves: a LayoutCommit recalls
// leases only on files that the session has no layout for, which no recall makes a client report. They wait for one thing,
// the commit of a truncation, which has made all its recalls before.
//
// # Who is let in
//
// Package admit has the door at which connections come in, and what a client may do by the rules for its address or the name in
// its certificate. A session has the grant of its last connection, and gets another when the rules change (rules.go). The
// grant bounds the caller that each call has, and the inodes that calls may be about (Service.within).
// Locks: Service.mu before session.mu; rules.mu is held with none of them.
//
// A connection has 10 s for its hello, with the handshake if there is one, and is one of a bounded number (package
// callers). It is in use while its hello is being answered, and then as long as its session is renewed; one of another
// member always is. Lines in the log about what is wrong with connections are limited by address.
//
// # Shards
//
// A Service serves one shard of the volume (layout.ShardOf), from which clients have sessions of their own. All that is in memory, and all that is
// done in the background, is of inodes of that shard: sessions and their leases, open files, layouts and locks; orphans, truncations, fences, new
// copies, moves, caches; so the limit of the caches on a device is one for each shard, and what Status counts is the shard's, but for the garbage.
// What one service knows in memory of an inode no other can know. The rows of all inodes, however, every service may read, and change in a guarded batch.
//
// Who serves a shard is in its row (schema.ShardKey), which has another epoch with each service that takes it over, after the earlier one can commit
// nothing more (Config.Row; package cluster sees to it). A service that does not know whether it has been followed (Config.Alive) goes on executing
// calls, which is harmless as it cannot commit, but sends nothing that a client could take for an answer. By answers alone clients get leases,
// layouts and locks, and prolong their leases: those that were given before are over when the grace period of the follower is, as after a restart.
// Clients that hear nothing connect again, in vain: that they are silent then costs none of them its session (Service.unheard), however long it lasts.
//
// A new inode is of the shard of its directory, a new directory of any. Of a name that leads to an inode of another shard, what is told is its
// number and type, and of a directory its attributes as they are in the catalog, but no lease: what else there is to know, reports of writers for example, only
// its own service knows. No record of such an inode is made (Service.mine).
//
// An operation is executed by the service of its first directory, a link by that of the inode. It may affect inodes of other shards: the directory
// that something is moved to or linked in, what is moved or replaced or removed. Before the batch is committed the services of these hold them (Hold):
//
//	mark      as above
//	recall    from all sessions there, also that of the client which asks: what it keeps it keeps by that session
//	removing  of a regular file that loses its last name, see Mutexes; of anything else that goes, what it was is remembered there (removedInodes)
//
// at all shards at the same time, and at the same time as the recalls here. They hold it until they hear that the change is settled (Settle), over tries
// of the batch as long as these need the same. The batch guards each such shard's row as it was when the hold was answered: a hold that was
// lost with its service has been followed by one that knows nothing of it, and the batch fails, and all is asked for again. A service answers no Hold
// in its grace period, as it does not know yet what to recall.
//
// A regular file of another shard that loses its last name is not removed with it, as only its own service knows whether somebody has it open:
// the batch leaves it without a name, with an orphan row. Whether that happened its service sees in the catalog when the hold is settled, and removes the file unless
// it is open. Should it hear of nothing, as it has died, the next one finds the row. Whatever else has lost its last name goes with the batch.
//
// The answer to the client does not wait for the holders to hear that the change is settled. They hear it in the background,
// for as long as it takes (sendSettled).
//
// Messages may be lost, late, doubled and in any order. The changes of a service count up, and each message says which one is the oldest that
// is not settled everywhere yet at the one it goes to: what is older and comes late is nothing to it, and what is younger and settled it remembers (asker). A Hold
// says for which service it is, by the epoch, so that a follower does not take a late one for new; who has followed says so, and is asked again.
// A hold whose asker never settles it ends when the asker's shard has another row, for which that is looked at once a second: then nothing of that asker can be committed
// any more, and what was, is in the catalog.
//
// Who waits for whom. Marks are shared, and nobody waits for one. A recall waits for clients, who answer it whatever they wait for, or for
// their leases to be over. That leaves removing, and the order of moves (Service.moving). A change has one removing at most, here or at another shard: a change
// that comes to wait for another one, because the name leads elsewhere by then, first lets go what it holds (letLastGo, grip.fits), and so does
// one that comes to wait for its turn to move. While a change has removing it waits for recalls and commits only, so nobody waits in a circle. Whoever
// moves a directory to another parent has the turn of his process; between processes the guard of the row that counts the moves puts them in order, and
// the turn only spares them most of the tries. A service that does not answer is waited for askPatience, and one in its grace period not at all:
// then everything is let go, and the client asks again.
//
// # Calls
//
// The goroutine that reads a connection executes the call that it has read, and goes on reading when that is answered: what needs not wait is answered without
// waking another thread, which takes longer than most calls do. The context of the call is a turn. All who wait ask it for Done first, commits included (patient), and
// then another goroutine reads on, so that calls of one session are executed side by side, share a sync, and can wait for one another. So
// whatever waits for something that may come through a connection has to do it with the context of its call, or with one made of it.
//
// A change that the catalog has no room for (catalog.ErrFull) is answered with ENOSPC. The log says so once, and not with
// each call. A catalog that keeps a reserve (catalog.Roomy) refuses only batches that make something new, which have
// Batch.Grows: inodes, links, extended attributes, and data files or extents of a file. The reserve serves sessions and
// replies, changes of what exists, removals, and the work in the background.
//
// CREATE and MAKENODE guess, the first time they are tried, that the directory is as it was when it was read last and that the name is not there, since clients have
// looked it up before (newPlace). Guards of the batch say whether that is so. An error that a guess led to is none: the next try reads.
//
// CREATE may grant a layout for writing in the batch that makes the file (grantNew), to a client that says it is about to write. It does so only if
// that takes no time and nothing has to be found out: there are data files ready, none of them on a namespace, and no quota of bytes. Before the commit the session
// is a writer, has all of a file with copies alone, and holds up recalls until the answer is on its way, as with LAYOUTGET. The answer that is
// stored says that a layout was granted and not which, since it may have been recalled by the time another instance gives it: the client gives
// it back, or asks for it. An answer that is repeated by the same instance says which, though it may have been recalled as well; that the client sees (package metarpc).
//
// # Permission
//
// The service decides who may do what, as the Linux VFS does and in its order (package perm, perm.go, xattr.go), by the
// credential of each call after what the client's export rule makes of it (package admit). A lookup and every
// operation on a name needs the right to look into the directory, what is done to an inode by its number the right to do
// that. What open(2) allowed holds as long as the session has the file open: layouts, and SetAttr with Open, ask for no more
// than that. Getting attributes and reading links is free for all, as it is for whoever has got as far as to the inode.
//
// What an inode row says of the inode's attributes (Flags) changes with them in one batch, so most checks read
// nothing but the row. Capabilities of root are one: there are callers who are root, and all others.
//
// # Programs
//
// A session that opens a file for execution, which has set-ID bits or capabilities, holds off those of other sessions
// who would change its contents (programs.go), until it closes the file. They get ETXTBSY, as from a local file system:
// for an open for writing, for a truncation, and for a ClearPrivileges, with which a client's write begins. The mode,
// owner and attributes can be changed at any time, and another file may take the name. While a change that takes the
// privileges away is under way, such an open is refused (ETXTBSY). It does not wait, or a program that somebody
// executes all the time would never be overwritten.
//
// A session writes without asking whether there are privileges, once it knows that there are none. So when a file has
// got some, and before that is answered, the sessions that have it open for writing get a recall of its attributes,
// with a lease or without. It comes after the commit: who asks before it would hear of none.
//
// A client that opens again after a restart what it had open for execution says so (AccessExec with Reclaim).
//
// # Removed inodes
//
// Clients do not tell which directories are open, or the working directory of somebody; to ask for each opendir(3) would
// cost a call. Nor can the kernel look up a name and get the attributes of what it leads to in one step. So the last
// removed inodes are remembered in memory (removedInodes): their attributes, with no links, can be got and set, and there
// is nothing in directories (ENOENT). No lease on them is given. One that was removed before the service started, or too many
// others ago, is ESTALE like an inode that never was. So is the data of a removed file, which nobody had open.
//
// # Start and grace
//
// At the start every session in the catalog is known, and has one lease to come back. Until each of them has said that it
// has reclaimed what it had (ReclaimComplete), or its lease is over, the service is in its grace period: changes are put off,
// since somebody may rely on a lease that this instance does not know of, and so are layouts for writing to a session
// that had none on the file. A file without names is kept, since a session may yet say that it has it open. The size of a file
// whose writers have not reported yet is asked of its data files, so that nobody sees it shorter than before the
// restart. Truncations that a crash cut short go on in the background.
//
// Data files tell too much of a file that sessions append to: they may lack bytes in front of the end, and may have
// some of an append that its session will try again, maybe at another place. Namespaces tell nothing. So writer rows
// say which sessions append, also under a lease, or write on namespaces (schema.Writer). Such a session is awaited
// (Service.awaits):
//
//	waiting     every call that tells the size waits for it (awaitTold) for graceWait, then the client asks again
//	not waiting who opens a file again (showReclaimed), or two would wait for each other. It is told what is known: the
//	            file is at least so long. No lease on the attributes is granted, and the data files are not asked
//	until       ReclaimComplete, also after the grace period. A report alone is not enough: it may have been under way
//	            since before the restart, and say nothing of places
//	or until    the session has ended. Then its file is fenced, and the data files tell. That is waited for as long as a
//	            lease at most. On a namespace nothing counts that the session has not reported
//
// Reserve, as other changes, waits for all of the grace period. Rows of earlier versions say nothing: for those the
// data files are asked.
//
// A session with a place and no layout yet has no such row. It has written nothing at the place. After a restart it
// tells of the place again, and then writes there. So the service grants no lease on attributes in the grace period:
// another session could append at the same place under such a lease.
//
// Nobody is granted anything of a file on namespaces, nor is one cut, gated or removed, before that is over (Service.quiet), and for a lease if there
// are sessions that had ended before: of their clients it is not known what they were reading, and they may not have noticed.
//
// # Copies that differ
//
// Clients write all copies of a mirrored file. One who cannot write a copy says so (LayoutError), and acknowledges the write
// only after the answer, which comes when these things are done, in this order:
//
//	mark     the copy is stale, durably; or it stays, being the last good one of its column, and the client waits for it
//	tell     all who have the file open are called back (CopiesStale), and no longer read or write the copy
//
// So no reader takes for good a copy that lacks an acknowledged write. Clients answer this callback at once, whatever they are
// waiting for: two who report at the same time would otherwise wait for each other, and a recall of layouts waits for
// writes which wait for the answer to a report. Who does not answer is waited for until his lease is over, also if
// his session had ended before (fading). In the grace period all sessions that have not come back are called.
//
// A crash after mark leaves a stale copy that some may still read: no write was acknowledged without it yet. The client asks
// again, finds the copy stale, and all are told then. A crash before leaves nothing.
//
// The writer row is the intent: a client with a layout for writing may have written to some copies only. If its session
// is lost the file is fenced, by which one copy of each column becomes the truth and the others stale. A client that ends its
// session has reported, or had nothing to. A truncation marks copies that do not answer while others have been cut.
//
// # Ranges
//
// A client keeps what it has written until the data server has made it stable, and sends it again if the server loses it.
// Should another client have written the same bytes meanwhile, that would put older bytes over newer ones. So a range is
// one session's to write: whoever else wants it has it recalled, and the client makes stable and forgets what it keeps
// there before it answers. A session that is alone has all of the file, and is asked for nothing.
//
// Two kinds of files are never written otherwise (ranges.go, exclusive):
//
//	copies       two clients that wrote the same bytes of a mirrored file at the same time could leave its copies different, pinned caches
//	             counted. So whoever writes has what he writes alone. Whoever reads is not counted
//	namespaces   where the bytes of a file on NVMe namespaces are changes when somebody writes it, and what is cut off is given to
//	             other files. So a range is read by any number of sessions, or written by one
//
// Of other files a portion that changes hands twice within sharedTime becomes shared (shares.go): it is recalled from all, and then granted
// to any number of sessions as Shared. They write it stable, and keep nothing of it. A portion is the MiB that was asked for; one beside a
// shared portion is twice as large as that. A file of which something was taken maxTakes times within sharedTime is one portion. After sharedTime a
// portion is recalled and measured anew: a session that is the only one left to write it gets it alone. Other exceptions:
//
//	appends      sessions that write only where Reserve has told them to (claim.appends) are not in each other's way
//	passthrough  what a kernel writes by itself cannot be recalled: while it may, all of the file is shared
//	versions     while a session that writes the file knows nothing of shared segments (version 5 and before) nothing is shared
//
// A claim has the ranges that its session may write (ranges), those that it shares (shares) and, of a file on namespaces, those that it may read (reads): at least
// what it does have, as what a client gives up unasked it does not say. Its own reads and writes are not in each other's way.
//
//	free    nobody else has what is asked for in a way that speaks against it, in units of a MiB: it is granted with all around it of which that
//	        is true as well. One client alone gets the whole file, and need not ask again
//	taken   others have some of it: that, and what follows up to where somebody else has the next range, is taken (file.taking). They keep it for
//	        holdTime since they last got something, then it is recalled from them and no one else, as before a truncation
//	        (recallRange); who has lost his session is fenced first
//	given   it is the asker's, and kept for him for promiseTime should he have been told to ask again meanwhile
//
// One range of a file is taken at a time. What does not touch it, and nobody else has, is granted meanwhile; what does is granted to nobody, so readers
// who come one after the other do not keep a writer out. A call waits for its turn for layoutWait at
// most. Nobody keeps a range because of another one that he waits for: a call asks for all that one write touches, and a client that waits
// for a layout answers recalls. What the answer to a recall may wait for is given without a turn: LayoutCommit, LayoutError, and the
// renewal of a layout after a fence (renewed), which grants nothing. Who asks to read up to the end of a file does not say how much of that he needs now:
// the unit where it begins is what is taken for him.
//
// A range leaves a claim when it was recalled by somebody who kept it from being granted again at once (recallRange); after other recalls (settleTimes,
// fence) the client may have got it back before the answer is looked at, so the claim keeps it. Reads end with the open file at the latest.
//
// A file gets or loses copies under a gate of the whole file, after which nobody has a range of it. Ranges are in memory: a
// service that starts takes every writer for one that has everything, and who reclaims a file on namespaces for one that reads all of it, and finds out
// by recalling.
//
// # Files on namespaces
//
// What is told of such a file in a layout, beside its data files, is where its bytes are (Files.Extents). That is looked up when the range is the session's, and
// from the layout row as it is then, while recalls wait for the answer to be on its way (file.granting). It begins at the stripe unit that was
// asked for, as there may be more than can be told. If the space that Assign has found for a writer is gone again, by a truncation that came in between, the client is told
// to ask again.
//
// Space that a file loses is free for others at once. So nobody has a layout of it when it goes: gates and truncations close the file to readers, too
// (awaitGrant), and recall from them (recallLayouts) and from the session that cuts; readers give back layouts that have a cache before
// it is discarded (recallReads); and a file is removed only when nobody can still have it open, or be writing (awaitBarred).
//
// LayoutCommit says which blocks have been written that were invalid before. They become valid (Files.Validate) before the size is recorded, whose durable commit makes
// both durable. Whoever has a layout for writing may say so, in the grace period and while his layout is recalled, too.
//
// # What is pinned
//
// A kernel that reads or writes a copy by itself (FUSE passthrough) cannot be told to use another one. So its client has the
// copy pinned, with the layout (LayoutGetArgs.Pin, pins.go): it stays good and where it is until the session closes the file. That is in
// memory, and reclaimed with the open file.
//
//	one copy     that it is the file's data file suffices; it is not moved
//	several      only while nobody may write; who writes later writes this copy, too, and waits if it fails, as for the last good one
//	a fence      that would choose between copies, or replace one that cannot be fenced, waits until none is pinned
//	growing      makes data files longer, whose end is the only one that a kernel knows, under the intent of a truncation; after a crash
//	             all that may be pinned, as nobody knows yet what is
//	a cache      is not made of a file that a kernel may be writing
//
// Who is about to change copies asks what is pinned and has nothing more pinned until he is done (freezePins); who pins reads the layout
// again afterwards. Until the grace period is over nobody is sure that nothing is. What waits is told in the status (holdUp).
//
// # New copies
//
// One worker makes new copies of files that have stale ones, or were made with fewer than they are to have
// (resilver.go), a file at a time:
//
//	tell     everybody once more which copies are stale
//	gate     the whole file: no layout for writing is out, nobody cuts it
//	start    a new data file takes the place of each stale one, in one batch; the old one is garbage
//	open     clients get layouts in which the new copies are written, and not read
//	gate     a range; copy it from a good copy; record that; open; and so on to the end that the good copies have
//	end      the new copies are good; clients are told to ask for layouts again
//
// What clients write outside the range that is being copied goes to the new copies as well as to the good ones, so
// each byte is either copied after it was written or written to both. A gate (gated) is a recall of the layouts for
// writing in the range, while none are granted there, with the file's sizing held; lost sessions are fenced before.
// What these have said of a file on namespaces counts durably before, as a namespace does not tell where a file ends.
// A client that cannot write a new copy reports it like any other.
//
// The worker is least urgent, and gets on nevertheless (fillGates):
//
//	recall    who waits for the range, or for the file's sizing, ends the gate, and so does idlePatience. After maxLost such gates clients are
//	          first asked for the range while it is open; then the gate has little to wait for, and only idlePatience ends it
//	copy      who waits has the gate end with the block that is being copied; so much is done. A block has a second (Files.Fill)
//	pause     afterwards others have the file for twice as long as it was closed
//	pace      what may be copied in a second is waited for while nothing is closed
//
// Files that have copies to be made are in the catalog, and nowhere else: the worker goes through their rows. So does
// another one (waitingLoop) that counts for each data server how many files wait for it. After a
// failure the next pass begins behind that file: one that fails each time has the device left alone, from which those
// behind it are to be copied.
//
// The same worker moves data files off devices that are drained, single ones as well. The file gets a mirror more for that, which
// has the data files that are filled and is absent elsewhere (schema.Layout.Moving). When they are full there is another gate
// of the whole file, under which they change places with those they were copied from (Exchange), everybody is told that these
// are stale, and they become garbage with the extra mirror (DropMoved). A crash in between leaves the extra mirror, and the
// next worker goes on there. While a file is moved it gets no new columns.
//
// Somebody may want a file's data on a device that he names (LayoutMove, moves.go). That is a row, put and deleted by [Files], and a record
// in memory by which it is told how far it is. The file is then moved like one on a drained device, but by a goroutine of its own, a
// few at a time; a later instance begins these after its grace period. If the device cannot take the data any more the row is deleted, and
// whoever asks next hears why. One copies data of a file at a time (beginFill): a fence stops him, the others come back later.
//
// After a crash the worker goes on where the fill row says. What the one before had under way could come late, and
// over what clients have written since: so data files that were being filled get new owners first, under a gate of
// the whole file. So it is after an error, when a write of the worker itself may come late, unless they are given up
// for that (package datafile).
//
// # Copies are compared
//
// A session that may change the volume has the copies of a range of a file compared (Verify, verify.go), as it is done for copying: under a gate of the range, so
// that all that was written there is at all good copies, and up to the end of the file. Stale copies, and those that are being filled, are not compared. Where good
// ones differ most of them are right; without a majority the first one is taken to be. With Repair the others become stale as if a client had not been
// able to write them (giveUp), and are made anew.
//
// # Caches
//
// A cache is a copy of a whole file for readers: one data file (schema.Layout.Caches), in layouts for reading one more mirror. It is
// none of the mirrors: that it fails, or goes, costs the file nothing. No client has a layout for writing without the cache as long as it may be read:
//
//	start    under a gate of the whole file a data file gets into the layout row, filling; the client copies what it reads
//	done     it is good, durably, if it is still there; readers are told to ask for layouts again
//	stale    it is to go: durably out of what readers get
//	tell     all who have the file open are called back (CopiesStale)
//	discard  the data file is garbage
//
// The last three steps (dropCaches) come before a layout for writing is granted, before a new size is committed, and before a file
// is fenced. Who grants a layout reads the layout row anyway, and sees there whether there is anything to drop, also what a
// crash has left between these steps: a stale cache in a row has readers that are not told yet. One that is filling has no readers and goes
// at once. What a client still writes to it is in a data file that nobody gets.
//
// Until then nobody has written, so whatever a client has copied, and may write once more after an error, is what the file has.
// A cache that is filling goes with the session that fills it.
//
// A copy that a client's kernel reads without asking (claim.pins) cannot be taken from it. A cache with a pin stays when layouts for writing are
// granted, and is in them; it is cut with the file; a writer who cannot write it asks again and again until the pin is gone, as for
// the last good copy. What a lost writer has written to it nobody knows: a fence waits for the pin. Who pins a copy does so
// while no caches are being dropped (file.dropping), and looks then whether the copy is still good.
//
// Which caches a device has is in rows of their own, in one batch with the layout's, and in memory (cacheTable), with the order
// in which they were used, which a restart makes that in which they were made. A client that asks for a cache says how many
// bytes there may be; others are dropped for it, by one call at a time for each device.
//
// # Devices that are down
//
// Each session is told which devices are down (DeviceStates), by one goroutine of its own while there is news: the
// latest states, then the next ones when it has answered. One loop waits for news from Files and looks at all
// sessions, every tellPause at most; a session that gets a connection is looked at then. Nothing waits for what
// clients answer.
//
// # The end of a session
//
// A session ends when its client says so, lets its lease run out, or leaves a callback unanswered for a lease. It is
// first marked in the catalog, so that no later instance takes it back. Then, in the background and for as long as data
// servers take to answer:
//
//	bar      it from the namespaces of each file that it may have read or written there, if its client did not end it
//	         (Files.FenceSession), once its client knows that it is over, by its own clock at the latest
//	close    each file it had open
//	fence    each file it may have written, if its client did not end it: that may be asleep and write later, so the data
//	         files get new owners, which data servers have to confirm; others are given new layouts
//	release  each such file is made stable and gets the size that its data files have
//
// Its row is deleted last, so a crash does not lose the work. If the outcome of the commit by which the session was made was unknown at first, the row stays
// until the service ends: a late commit is refused because of it. Until a file is fenced no layout for writing it is granted, nor one
// for reading if it is on namespaces, no place in it is reserved, and it is not cut. Until it is barred from one that it was only reading, nobody
// is granted to write what it was reading. If a data server is away that can take long; it is said in the log. Files on namespaces do not hold up the others of the session.
//
// Data files that cannot be fenced, because somebody on the data server's host holds them open, are replaced within fence (replaceHeld):
//
//	recall   the layouts of others who write the file; none are granted meanwhile
//	copy     to new data files; what the old ones still get is of unknown outcome, or comes too late
//	fence    which takes the new ones for the truth
//	tell     all who have the file open that the old ones are stale, before anybody may write the new ones
//
// and then they change places as after a move. Whoever copies data of the file for another reason is stopped first (beginFill), and what he
// was moving is given up.
//
// # Truncation
//
// Shortening a file goes through four steps, in which the file has a cut (type cut). While it recalls the layouts of
// other writers, no layout past the new size is granted. Of a file on namespaces those of readers and of the caller are recalled as well, and
// all of each, and none is granted: what stays gets another generation of extents, and no client can use two at once without losing what it
// has written by the older one and not yet told of. Then leases are recalled, and who has the file open is told, who
// may otherwise rely on what he knows of its size; who asks for the size from then on waits until it is set, as he would not
// be told again. Then size and intent are committed; a report of a size that comes meanwhile waits for the outcome. Then
// the data files are cut; a report that comes now speaks of bytes that are gone and is clipped. The size row is what
// others see from the third step on. Whenever a session may have written past the size that the service knows, setting any
// size goes this way, because what is known may be too little.
//
// # Appends
//
// Reserve gives an append a place behind all that is reported and all other places. It finds that end and adds the
// place under Service.mu in one step; file.moves tells it whether a report has left memory for the inode row that it
// read. A place is the claim's (reservations.go) until its session says that it is written, and is a report from then
// on, or that it is given up.
//
//	shown     a file ends at its first place for everybody (hidePlaces). That is looked at after the inode row was
//	          read: ends of places only grow, so the size does not go backwards
//	asked     before a size is told those who have places are asked, the asker as well, as the last append of each
//	          is reported with its next one
//	awaited   the call then waits for the places that were there when it came and lie in front of what has been
//	          reported (file.shown)
//	recalled  after placePatience; a session that leaves that unanswered for placeAnswer is ended. Its places stay
//	          until it is fenced, and everybody waits for them, as nobody knows whether they are written. After
//	          placeWait the client is told to ask again
//	cut       setSize recalls all places first, when f.cut keeps new ones away. A session that sets the size has
//	          finished its own
//
// The owner of a place finishes the append that it has begun there, reports that by LayoutCommit, and answers the recall.
// It may need a layout, which it gets also while a cut waits for the place (file.uncut). Places
// are in memory, and reclaimed. Before anything is written at a place, the writer row says that the session is
// awaited: it gets the row with its layout, after it has the place; if it has the row already, for other writes,
// Reserve adds that first (announceAppends). Who appends under a lease asks for a layout with Await first. Quotas count
// places as reported.
//
// # Times that are set
//
// Of the times that are reported of a file's writes the latest counts, and it is told again until it is durable. So before
// a modification time is set, the layouts of other writers are recalled, as for a truncation: what they have written so
// far is then durable, and nothing older than the set time comes after it. Who has lost his session is not waited for, as
// the times that he reported are forgotten.
//
// # Usage and quotas
//
// They are in package usage. A tx is a usage.Change, so the batch of a change also changes what directories and owners are
// charged with. Usage is no part of attributes, so nobody's lease is recalled because of it.
//
// The service admits what is new before it commits it. What writers have asked to write (file.reach) counts as if they had
// reported it (writtenEnds). Layouts from before a quota are recalled when it is noticed (recallUnlimited), also after a file
// or directory was moved into a tree. No file with a quota of bytes is pinned for writing; one that is already goes on until it
// is closed.
//
// # Locks of files
//
// They are in package locktable, in memory; clients set them again after a restart. A session has locks only on files that it
// has open. When it ends without having closed a file it may have written, others get its locks after the file was made
// stable. A session that has yet to reclaim what it had counts as one that is not alone: an unlock that the earlier instance
// has not answered comes before that.
//
// # Mutexes
//
// No mutex is held over a catalog call, a call to a data server, or a write to a connection.
//
//	Service.mu   sessions, all file, claim and lease records, and what is held for other services and by them. Held for moments.
//	cacheTable.mu which caches there are. Taken alone.
//	locktable.Table has one for the locks of files, and readyQueue.mu is for messages about them. Taken with Service.mu held or without.
//	removedInodes.mu removed inodes. Taken alone.
//	usage.Tree has one for the parents of directories. Taken alone.
//	turnback.Waits has one for the list of changes that wait. Taken with the others held or without.
//	session.mu   a session's slots, connection and callbacks. Taken with Service.mu held or without.
//	conn.mu      a connection's queue of frames. Taken with session.mu held or without.
//
// What has to exclude others for longer is a flag in the file record that is waited for (Service.wait): removing, from
// the decision whether somebody has the file open until the batch that removes it is done, also one of another service; and sizing, over a truncation
// over finding the size that a dead client left, or over the copying of a range. Nobody waits for one while having the other. Both may be held over a
// recall: neither LayoutCommit nor LayoutReturn waits for them. A range that is being taken (taking) is the third; who takes it has neither of the
// others, and who waits for it is the caller of a LayoutGet, which nothing else waits for. Directories that change
// their parent are put in order by a guarded catalog row, and inside this process by a token (Service.moving) as well, so
// that they need not fail each other's guards; another token reserves inode numbers. Usage and
// quotas have tokens, too (package usage), which nobody waits for with a mutex held.
package meta
