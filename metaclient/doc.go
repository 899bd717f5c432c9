// Package metaclient speaks to weft's metadata services: sessions with calls, callbacks, leases, and what a client
// keeps of layouts, devices, attributes and names. The protocol is described in package internal/wire/metarpc. Nothing here
// knows of data servers beyond their addresses.
//
// # Shards
//
// A [Volume] is what Dial returns. It has a [Client], which is a session, for each shard of the volume that something was asked of: the first one
// connects in Dial, each other one when a call first needs it. A call goes to the Client of the shard that the protocol says, which makes it in its
// session as if there were no others. So what follows of one session is so of each; while one is without a service, only its own calls wait.
//
// A Client looks for its service where the newest ring says that the shard is, then where it was last, then at all addresses that
// were given or told. An address that keeps it waiting for slowHello is waited for while the next ones are asked, and
// those that have said that the shard is not theirs are asked again meanwhile. When all have failed it pauses, for less
// than a lease, which is how long a service that is there again waits for it; an attempt that has itself taken as long
// is followed by none. Every answer to a hello teaches all Clients where the shards are (type places). The service
// that a shard has moved to is to the Client one that was restarted.
//
// Where an answer in one session is about an inode of another shard, it has the number and nothing that may be kept of the inode. Lookup then asks the
// other Client for attributes, which may have them under a lease: the name is kept by the session of the directory, the attributes by
// that of the inode, and a name that both know costs no call. Each has a time of its own for which it may be kept. Create opens
// what it finds at the other Client.
//
// What a call in one session changes of inodes of other shards, another session of ours may know. That one does not know of the call: unlike the
// session that makes a change, it is told by a recall like everybody else's. Its service has that answered before the change is
// committed, and from then on grants nothing until it knows what became of the change; the change is answered when it is committed. So when it is
// answered the other session has seen a recall and keeps nothing older: an answer is kept only if it was asked for after the recall arrived (see
// below) and came with a lease, which was granted after the change. Nothing has to be known here of changes across two sessions but this: Rename to a directory of another shard may replace an inode of the
// shard that carries it out, and that one does not recall what our session knows. As what the new name means is for another session to know, and may
// change before the rename does, everything that is known of attributes is forgotten (not so with RenameNoReplace, which replaces nothing).
//
// # Calls
//
// A call takes a slot, is encoded into the slot's buffer, and stays there until its answer has come, so that it can be
// sent again, unchanged, on the session's next connection; where an older version of the protocol is spoken there, without what that one lacks. A call waits through lost connections and restarts of
// the service for as long as its context lives. When the context ends first the caller leaves and the call is abandoned: its
// slot stays taken, and it is sent again like others, until the answer comes and is thrown away.
//
// Where a volume has several services, one of which nothing was heard while calls wait is asked for a sign of life
// (Renew), and its connection given up if none comes (watch): it may be stopped, or cut off, and another one follow it.
// Other sessions at the same address are given up with it, and each service is asked now and then without calls, too
// (watchIdle): the one that follows puts changes off until all sessions are back.
//
// With Config.Patience, calls that an application waits for (Soft) are given up when nothing at all was heard of the shard's service for so
// long: the context ends for the call, which is abandoned like any other, and so may be executed later. It does not matter why nothing is heard:
// there is no connection and none can be made, or nothing comes through it. A service that has lost its catalog and does not know whether another one has
// followed it answers nothing, and so is not heard either. One that works on the call, or puts it off, is: before the
// time is over it is asked for a sign of life (Renew). So no call, and no waiting for a lock, is given up because it takes long. What the client and its
// user do by themselves (Close and LayoutReturn, Renew, reclaiming, what is answered to recalls) waits for ever, as without Patience.
//
// When the session itself is lost (its lease ran out while the service could not be reached) a new one is begun. Calls
// that were never sent, or that may be executed twice, go on in the new session; for the others nobody knows whether
// they were executed, which is an [OutcomeError].
//
// Some slots are kept back: one for Renew, and some for calls with the contexts given to OnRecall and OnReset. Without
// them two clients could each have all slots taken by calls that wait for the other to answer a recall.
//
// # What is held for a session
//
// Open and LayoutGet make the service hold something for the session, Close and LayoutReturn give it back. A ledger
// for each pair sees to it that the two are never outstanding at once for one file, since the service may execute them
// in any order. Giving back is lazy and in batches.
//
// In a new session files are opened again at once. Calls that need a file open (LayoutGet, Reserve, Lock, SetAttr through a
// descriptor) wait until that has been tried, except with the contexts given to OnRecall and OnReset.
//
// Layouts granted by replies and taken by recalls are applied to the cache by the goroutine that reads the connection,
// hence in the order in which the service sent them. Create may be answered with a layout, too. It is executed once, so its answer may come again after a
// recall: what is recalled while calls that make files are under way is remembered for these (type creation).
//
// A segment whose data files lie on NVMe namespaces says where the bytes were when it was granted. So what is granted later takes its
// range away from older segments (outdates): a file that was read and is then written is read by the layout for writing, where that
// reaches. What the user of the client has written there, and where that counts already, is told with LayoutCommit, in as many calls as
// the ranges take. It ends with the session (DataFile.Ended): no credentials of the data file keep out what was begun before.
//
// # What is kept under leases
//
// Attributes, extended attributes, targets of symbolic links, and names that are there or are not, are kept while the
// session has a lease on the inode, and answered without a call. Leases hold by our own clock: for nine tenths of their
// time after the sending of the last call that was answered. Once that is over, as after the end of the session or a
// restart of the service, all is forgotten, and the user of the client is told (OnLeaseRecall) what was leased. What is
// used longest ago is given back when there is too much, after the user has been told.
//
// An answer is kept only if its question was asked after everything that may have made it wrong: a recall that arrived, a
// change by this session that was answered, a lease that was given back. A clock of the client counts these events; the
// marks of leaseTable say for each inode, its names, and each name that was changed here, when the last one was. While a
// change of this session is not answered, however long that takes after its caller has left, what it affects is neither known
// nor kept. Of the directory in which a name is made or removed the answer tells what becomes: its entries by one more or less and its
// times, and that in whatever order several are answered. So it is known again when all are. A directory that this session has made is known
// to have no names but those it was told of, as long as there is the lease on its names that came with the answer. What comes without a lease (extended attributes, sizes after LayoutCommit, the names that a change has made) is
// kept under one that there was already when it was asked for. Remove and Rename change inodes that the service does not
// name in its answer: the names are looked up before if that is needed, and if they may mean something else by the time of
// the change everything that is known of inodes is forgotten.
//
// Changes of this client may stand in the way of a recall: the user of the client may hold locks while a change waits for
// the service, and need them for OnLeaseRecall. Then the service is told (StuckKey). It turns the changes back that wait for
// others, and the user is asked whether to let the locks go and start over, or whether the change is made again in a
// while (YieldKey). A user that waits in the grace period is asked, too. Services before version 10 do not turn changes
// back, so names are kept for a second at most under their leases.
//
// # Locks
//
// The client knows which locks the service holds for it, so that it can set them again in a restarted service, right
// after it has opened the files again. Those that do not come back, or were lost with the session, are reported
// (OnLockLost). Waiting for a lock is asking again, when the service calls back and every few seconds besides; it takes
// no slot. For one owner on one file the calls are made one after the other. One that was abandoned and granted all the
// same is undone before the next one is made. An unlock is first asked for with LockArgs.Alone, if something was written; if that is refused,
// it is made stable (the stable of Lock and DropLocks), and asked for again, before anything else that the owner has asked for.
//
// # Devices
//
// What services say of devices (Device) is kept until a session gets a connection, or is told of devices: then the user
// asks anew (OnDevices) where those are that it uses. So devices are followed to other addresses while requests wait
// for them.
//
// Services say which devices are down (DeviceStates), in each session; all that is said in them is put together, the
// newest of each prober, and told the user (OnDown). It is forgotten with the connection on which it was said, since
// a service tells each connection anew. What the user finds by itself (Down) is reported to each service once, in one
// of the sessions with it, unless that service has said the same: at once (ReportDown), every metarpc.ReportPeriod as
// long as it is so, and at the end.
//
// # Goroutines
//
// A Client has a manager, which connects and then reads the connection, as far as callers do not (see reading.go); a
// writer for each connection, of what callers do not write themselves; and two janitors, one of which gives leases
// back and the other everything else. A Volume has a goroutine that watches services without calls, and a reporter,
// which tells one of the services every minute what was done at devices (Config.Usage), if anything was, and one that
// tells them of devices that do not answer (Config.Down). A recall runs in its own goroutine, of which there are at
// most maxRecalls, and so does the work after a lost session or a restarted service. All end with Close. A call that
// may be given up has a goroutine that watches the service, and ends with the call.
//
// # Lock order
//
// Volume.mu is held while a Client is made, which takes none of the following. places.mu, Client.mu, cache.mu,
// downTable.mu, leaseTable.mu, lockBook.mu, ledger.mu and deviceTable.mu are never held together, and none of them
// while blocking. downTable.mu is held while OnDown runs.
package metaclient
