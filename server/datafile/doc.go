// Package datafile is the metadata service's side of the data servers: which devices there are and how they are, which
// data files a regular file has, and how data files come and go. It keeps all that in the catalog (package schema). It
// knows nothing of sessions, names and sizes, and moves no data.
//
// There is one [Manager] per catalog, which takes every garbage row that is not in its own pool for garbage; or one in each of several processes, see below.
//
// # The life of a data file
//
//	number taken    one batch raises Device.Next and writes garbage rows for several numbers; durable
//	made            CREATE on the data server; the file now waits in the Manager's memory, in the device's pool
//	assigned        one batch deletes the garbage row and puts the file into a layout row
//	discarded       one batch deletes the layout row and writes the garbage row again
//	removed         when the garbage row is durable: REMOVE on the data server, then the row is deleted
//
// A crash at any point leaves a garbage row for every data file that no layout has; the next Manager removes it. A number
// is never used twice, so a REMOVE that is executed late does no harm. A CREATE of the previous Manager that is executed
// late would leave a file without a row; so the garbage row of a file that was not found is kept for some seconds more
// if an earlier Manager wrote it.
//
// A commit may not say whether it was made (catalog, Unknown outcomes). One that changes a file's layout is then made again until it is known what became of it,
// whoever has asked for it, while the file stays locked (findOut). Data files that it would have given away stay held meanwhile; afterwards they are the file's, or
// in the pool again (sortOut). Numbers of which it is not known whether they were taken are not used: if they were, they are garbage.
//
// # Several processes
//
// With Config.Member there may be Managers of other processes on the catalog. All that is decided is decided by guarded batches, so what remains is to know
// whose a garbage row is, and of what the others do:
//
//	garbage   a row has the member that has the data file in its pool, or that is to remove it; who discards a data file puts himself. Rows of members that are no
//	          more, and those of nobody, are dealt with by whoever Config.Collects says, at the next sweep: first a member's row is found to be gone, then,
//	          some seconds later, garbage rows are read. What such a member has put into a layout meanwhile has no row then, and it cannot put more
//	devices   the rows are looked at every second, one that is not known when it is met in a layout, and all before a client is told where devices are, as it may have a
//	          layout of another process. Until then data files may be taken on a device that is drained,
//	          which move away again. Removal waits until other Managers have seen that a device is drained and removed what was in their pools
//	numbers   Device.Next is raised by a batch that is guarded by the row, as ever
//	new ones  an empty export that several are told of at the same time gets the same id from all
//	silence   while Config.Alive says that others may have taken over nothing is sent to data servers but probes. What was sent just before may be carried out late: a CREATE
//	          leaves a data file that fsck finds; a REMOVE is of a number that is never used again
//
// How busy devices are each Manager hears from its own clients only, and each asks every data server how it is. There are no namespaces then: what fences a
// client from these is its one session, and space that was taken is freed by the one Manager that there is.
//
// # Devices come and go
//
//	added      the volume's directory is made there, with a label that has the device's id; then the Device row is written
//	drained    Device.Draining: no new data files; those of the pool are garbage, those of layouts move elsewhere
//	removed    garbage is removed there; then one batch deletes the rows of the device and of its counter
//
// The last batch is guarded by all that could still lead to the device: it is drained in the very row that is deleted, its
// counter of data files in layouts is nought, and it has no garbage row. Every data file has a garbage row until the batch that
// puts it into a layout, which is guarded by that row and raises the counter: so of two batches that assign and remove one
// wins. New numbers are guarded by the Device row. A crash before the batch leaves a drained device with less garbage.
//
// A data server that is gone for good is declared lost: its garbage rows are deleted instead, as many at a time as fit a batch,
// each time guarded by the Device row. Data files that layouts have there are not given up that way.
//
// The label, the pulse file and the empty directories stay. An export that is added with a label that no row is known for gets its id back; its
// numbers begin at the time of day in seconds times 2^24, where none can have been taken, so that nothing that is executed late,
// and no data file that was left there (an orphan for fsck), is taken for a new one.
//
// # How a device is
//
// Each second a data server gets a NULL, with 2 s to answer. Every 2 s it gets a pulse: a stable WRITE of a block to the
// pulse file (package store). A pulse is waited for as long as it takes, and there is one at a time. Every 5 s the device
// is asked for its space.
//
//	unknown       not looked at since the start, or since its address changed
//	up            it answers, and has answered a pulse since it was down
//	not writable  up, but full, or read-only by the answer to a pulse: it gets no new data files, copies or caches. All
//	              else is sent there
//	down          connections are refused, or two probes in a row had no answer; a pulse has none for 4 s (a frozen file
//	              system), or two in a row failed (EIO)
//
// A disk that is only slow gets longer for a pulse: twice as long again as its slowest pulse lately took, 10 s at most.
//
// Pulses that fail become rare, 15 s apart: a data server whose sync fails has clients write again what they keep. One is
// sent at once when the device answers again, or has more space.
//
// The name of a data server's host is looked up each time it cannot be reached, and every 30 s while it can. Addresses
// that are added are used at once, with the others. If none is left of those that were used, the data server must have
// shown its label at the new ones first. A namespace's paths look names up by themselves. Clients are told only what
// addresses a device was reached at, once it was, and when these change (DeviceStates).
//
// DeviceStates says which devices are down, and whether they answer nothing or take no writes, to somebody who has
// heard of all up to an epoch. Each change makes an epoch. Clients say which devices do not answer them (Complain):
// that is a reason to probe the device and to send a pulse at once, and nothing else. A complaint that a pulse has
// contradicted which was sent after it is counted in DeviceInfo, and logged, until the client takes it back, no
// longer repeats it, or has gone.
//
// In place of the NULL a namespace needs a path. Its pulse writes a block of zeros behind the label, and may take 10 s:
// keep-alives may have to find first that a path is dead. A namespace that is write protected is not writable.
//
// Assign makes copies on devices that are down stale, in the same commit, if their column has a good copy on one that
// is up: so not each file waits for such a device. Its caller says which copies must stay good.
//
// Once each column has a copy that has answered, Truncate and Sync do not wait for copies on devices that are down,
// and a second for others. A device that was waited for in vain is late, until it answers such a call or a pulse, and
// is not waited for meanwhile: so many files in turn wait once. One that has announced that it stops is waited for as
// long as it is up. Truncate names the copies (LateError), and the truncation is not over before they are stale
// (package meta).
//
// # Which data files a file gets
//
// None until it is written to, or made by somebody who is about to (AssignNew: then only what is in the pools at once, and with the batch that makes
// the file). For a range within the first stripe unit, one in each mirror; for a range that goes
// further, one for each of the W servers of each mirror. What a file has is only added to, but for stale copies, and W is
// settled when the second one is added. New data files go to data servers that are reachable and have room; files begin
// at a device that depends on a hash of their number, so that small ones spread.
//
// A device counts for a new column if it is up and has room. There may be fewer of these than mirrors, but at least as
// many as the policy's MinCopies: then the column gets what can be had, in the first mirrors, and is absent in the
// others (schema.Absent). With the same batch the file gets a fill row, so the absent copies are made like new ones for
// stale copies. That is decided for each grant. Nothing is left out because of
//
//	an empty pool       its device is up, so the pool is waited for
//	a device unknown    it was not looked at since the start, or since it moved: it is waited for, firstLook at most. After that
//	                    it does not count. Otherwise nobody could make files for 10 s after a start while a host is dead
//	little room         devices with little room are taken if those with plenty are too few
//
// Copies become stale whatever MinCopies is. But segments say where a column has fewer good ones
// (layout.Segment.Few), and clients make fsync wait for that. They have dropped layouts that say otherwise when a
// copy counts as stale.
//
// Two things count against a device: that it is clearly busier than the least busy one, and that a clearly smaller share of its
// space is free than of the one with the most (byDrawbacks). Of the devices on which a file has equally few data files, the
// next one goes to one with the fewest of these drawbacks. Neither outweighs the other, so a new device that is empty gets no
// more than its turn while it is the busy one.
//
// How busy a device is, clients report (Report): the number of requests that they have under way there on average. The reports of one
// client are smoothed, and each stands for as long again as the time it speaks of; after that it counts half for each such time,
// and it is soon forgotten, as at the end of the session. None of it is in the catalog.
//
// # Copies
//
// A column of a mirrored file has several copies, each a data file on another device:
//
//	good     has every byte that was acknowledged
//	stale    may lack some; it is neither read nor written any more, and never becomes good again
//	filling  a new data file that takes the place of a stale one; clients write it, nobody reads it
//
// MarkStale makes copies stale, each change in one durable batch that is guarded by the row it was decided on: so of two
// who name different copies of a column the first one wins, and the last good copy of a column stays, whoever complains of
// it. As long as a layout has copies that are not good, or absent, there is a fill row for the file.
//
// Since a stale data file is done with, what is still on its way to it does no harm: it needs no fence. Fence of a file with
// copies therefore takes the first copy of each column whose data server has confirmed its new owner for the truth, and makes
// the others stale in the batch that records the owner. That also settles what a lost client may have written to some copies only.
//
// A fill that nobody waits for uses devices that are fit: up, with nothing in the last probe and pulse that says
// otherwise. When a client complains of a copy (MarkStale), or a truncation has waited for one in vain, the device is
// sent a pulse at once, and is not fit before it has answered; Fillable waits a second for that. A block of it has a
// second. What fails then is held against the device (failFill), and fills leave that alone for 5 s, then 10 s, up to
// 5 min, until one goes well; other devices take its part. When a device goes down its calls end at once. What
// becomes of the copy:
//
//	the source fails      another one is read; if there is none the copy stays, filled so far
//	the target answers    with an error: it is given up (FillError), and another place is looked for
//	the target is late    it is given up if it has not taken one block, else it stays
//	the target goes down  it stays, and StartFill gives it up if there is another place
//
// A copy that stays gets a new owner before it is filled on, so a late write does no harm.
//
// All of a file is filled: a stale data file is never used again, since what was under way to it would have to be
// fenced, and nothing durable says what was written since it became stale.
//
// Good copies are compared (compare.go) under a gate of the range, in units of 4 KiB: a data file that ends earlier has zeros there. What most copies have is right,
// and without a majority what the first one has.
//
// # Moves
//
// What moves is filled in a mirror more (schema.Layout.Moving), and changes places then with what it was copied from:
//
//	StartFill    the extra mirror, with empty data files for what moves; absent elsewhere
//	Fill         as for any copies; clients write both
//	EndFill      the new ones are good
//	Exchange     they have the places of the old ones, which are stale in the extra mirror
//	DropMoved    the extra mirror goes, and what is in it is garbage
//
// Away from drained devices each data file moves to another device. To a device that somebody has named (MoveTo; a Move row, until DropMoved or
// StopMove) the first copy of each column moves which has none there. If there is one copy, all columns move to one data file:
// since offsets in data files are those of the file, one can have them all. It is in every column of the extra mirror, counts as one
// data file for counters and garbage, gets one owner, and stays to be filled until Exchange, which makes it good in all columns, or stale in all if
// it is in one of them. DropMoved makes one column of it. So a layout has one data file in several columns while it is Moving, and only then.
//
// Data files that are pinned do not begin to move (package meta).
//
// # Caches
//
// A layout may have caches beside its mirrors: single data files that have all of the file, since an offset in a data file is one in the
// file. They are good, stale or filling as copies are, but count for no column, have no fill row, and are not moved. A device
// has at most one cache of a file, and a row for it. Cutting a file cuts its caches; everything else that is done to data files
// leaves them alone.
//
// # Fences
//
// A layout is worth as much as the synthetic owners in it: a user and a group, 31 random bits each. A layout for
// writing has both, one for reading the group alone. Fence gives all data files of a file new ones, waits until each
// data server shows that it knows them, and puts them into the layout row. Whoever has an older layout is refused
// from then on, also those who may go on writing: they ask for the layout again. A fence that was cut short leaves a
// layout row with owners that are out of date; who asked for the fence has to ask again, and records that it must.
//
// A data server that answers JUKEBOX for as long as heldTime cannot confirm: somebody on its host has the data file open for writing, whom
// it cannot take that from (package server/data). If there is no other copy that can be fenced, Fence says so (HeldError), and the data
// file is replaced:
//
//	StartReplace  the extra mirror of a move, with an empty data file for each that is held
//	Fill, EndFill it is full: a second copy of the column, though others may write the first one
//	Fence         which now finds a copy that can be fenced, and makes the one that is held stale
//	Exchange      they change places; the one that is held is garbage after DropMoved
//
// Others wait for that Fill, so it waits for devices as any call (no enough).
//
// Up to the Fence the mirror may be dropped, and is after a crash. A data server that cannot be reached is not replaced around, as there is
// nothing to copy from.
//
// # Namespaces
//
// A device may be an NVMe namespace. What it has the package extent keeps in the catalog; a data file is its number there (8 bytes, big-endian, as a
// handle), has no owner and no end, and is made without I/O. What is read and written there, the labels and copies, goes through one Initiator
// of the Manager, whose HostID is the volume's id. It follows Config.Discovery; what that tells is not recorded in rows, so clients do not hear of it.
//
//	added      what is on it is looked at; then the label is written at its beginning and its end, and one batch writes the rows
//	looked at  identifiers, block, size, label and reservation are the device's; a copy of the label that is damaged is written anew
//	removed    garbage is freed; one batch deletes the rows; then the label is overwritten
//
// A namespace is known by its identifiers, whatever address it is reached at: one that is added again gets one more. What is on a namespace that is no
// device is not touched unless somebody insists, and what has a label of a device of the volume not even then, as it may be that device's.
//
// Assign gives the data files the space that they lack for the range, in the batch that has their layout row and is guarded by the inode and
// that row: so nothing is given to a file that was removed, and what has units is in a layout or has a garbage row at any time. Extents completes what Segments has made by what
// the catalog has then. It is for the caller to know that this stays true for as long as somebody uses it. Validate makes blocks valid that a
// client has written, stably. The stripe unit of a new file is a multiple of the units of all namespaces.
//
// Space is freed when it is taken from a data file (Truncate, garbage), in the next batch, and deallocated on the namespace in between, if the controller can do
// that: whatever is taken, nobody has a layout of it for reading or
// writing then. For that the caller recalls layouts before it cuts a file, replaces copies, ends a move or removes a file, and has a session
// that does not answer fenced (FenceSession) before it counts what that had as given back. So what an earlier Manager has taken and not freed, a new one frees without
// asking: those who may use it had given it back before it was taken, and get nothing again. What the service itself had under way to the namespace is another matter: a Manager
// waits for its own commands, whatever becomes of the caller, before anything else is done to the data file. Commands of an earlier Manager
// end with its connections; garbage that it has left, and what it has taken and not freed, is freed some seconds after the namespace was met, and copies that it was filling
// begin anew in other data files.
//
// FenceSession preempts the registration of the session's client where the service keeps a reservation (exclusive access, registrants only), which it looks after.
// Elsewhere it waits from when it was first asked until the client's controllers have ended, since clients send nothing once their
// session may be over. Fence does nothing on namespaces but wait for the service's own commands.
//
// Fill gives copies on namespaces the space that they lack, but for zeros, which need none, and copies from such up to the file's size. A copy that is being
// filled is stale if the namespace has no space for what is written to the file. Caches do not lie on namespaces.
//
// # Locks
//
// In the order in which they may be taken, each before those after it:
//
//	Manager.adding   held while a device is added or removed, over calls to a data server
//	Manager.files    one lock for each file, held over Assign and Fence, and until it is known what they have committed
//	device.changing  one lock for each data file on a namespace, held while something is done to it there
//	device.rowMu     held over commits that change the Device row
//	Manager.mu       guards the state of all devices, held over no call
package datafile
