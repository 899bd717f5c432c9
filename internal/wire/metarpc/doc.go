// Package metarpc is the metadata protocol between weft's clients and its metadata service: frames, messages and their
// msgpack form. It holds codecs only; package metaclient and package server/meta hold the connections.
//
// # Frames
//
// A connection is TCP. Each side sends frames: a big-endian uint32 length L (1 to [MaxFrame]) and L bytes, one msgpack
// array whose first element is the frame kind. Structures are msgpack arrays with their fields in the order of the Go
// type, all of those that the version of the connection has, but for those that are said to be
// optional: they are the last of their structure, and all there or all left out. Names, texts and link
// targets are msgpack str whatever their bytes are, []byte and [16]byte are bin, numbers take any msgpack integer that
// fits, and only a list or a []byte may be nil. A frame that does not decode, or is of a kind not allowed there, ends the
// connection. A Call whose header decodes but whose arguments do not, or are out of bounds, is answered with
// StatusBadArgs, or with ENAMETOOLONG, ERANGE or E2BIG where a user can make the mistake ([ParseCall]).
//
//	kind          sender   fields after the kind
//	0 Hello       client   magic, lowest and highest version, client, session, shard
//	1 Welcome     service  magic, version, status, message, session, volume, instance, slots, lease, ring, top
//	2 Call        client   slot, sequence, op, credential, arguments
//	3 Reply       service  slot, sequence, status, message, result
//	4 CallBack    service  number, op, arguments
//	5 BackReply   client   number, status
//
// # Hello
//
// The client's first frame is Hello, with the magic string "weft", the versions it speaks, who it is ([ClientInfo]) and
// the session it wants to go on with, or a zero session for a new one. Welcome answers it. A status other than OK
// (StatusVersion, StatusBadSession, ...) comes with a message for people and ends the connection. StatusShutdown is the
// answer of a service that cannot serve now, such as one that does not reach its catalog, and may later. Every Welcome
// of a version that both speak names the volume. A client believes nothing of one that names another volume than its
// own, or none: that there is no such session does not end the session then, and where shards are is not taken in.
// Whoever receives something else than the expected hello is not talking to a weft peer. Before the hello is done a
// frame has at most [MaxHello] bytes.
//
// # Versions
//
// A connection has the version that Welcome says: the highest that both sides speak ([Versions.Choose]). If there is none, the status is StatusVersion, with
// the service's highest version and a message that tells both ranges, and which side is to be upgraded. In every version Hello starts with the magic
// and the range of versions, and Welcome with the magic, version, status and message.
//
// A new version may add fields at the end of structures, calls, callbacks, and statuses. Fields keep their places and meanings, and one that is zero means what was meant without
// it. Nobody sends what the version of the connection does not have: fields are left out, and of calls and callbacks the sender finds another way. So a
// structure has as many fields as some version has, at most those of the connection's version; missing ones are zero, and any other number is
// refused. That is so of every message but two:
//
//	Hello   nothing is chosen yet: what it has more than is known is not looked at, and ClientInfo never has other fields
//	Reply   an answer may be repeated, as it was, by another service on a connection of another version: clients take the form of any version that they speak
//
// A call that is sent again on a connection of an older version is without what that one lacks. If that is the call itself, it fails with EOPNOTSUPP, unless it may have
// been executed. A service may find in the catalog answers that a newer one has stored. It repeats them, and looks at nothing but how they begin (CreatedID).
//
// Version 3 is the first. In version 4 MetaService says which versions a service speaks. Version 5 has CLIENTSET and
// CLIENTLIST, and SessionInfo counts calls. Version 6 has what keeps a file's bytes in order when several sessions write it.
// Version 7 has DEVICESTATES and REPORTDEVICES, for devices that do not answer. StatusResult says which data servers
// files with too few copies wait for, and Segment says whether a file has too few. In version 8 Welcome says which
// directory a client is confined to, and LAYOUTGET who appends under a lease. Version 9 has PARENT, for file handles, and
// in it StatusResult says how much room the catalog has. Version 10 has StatusStuck and StatusTurnedBack.
//
// # Shards
//
// The inodes of a volume are divided among its shards by number (layout.ShardOf), of which small volumes have one. A session is for
// one shard, and a client has one for each that it needs. Each shard is served by one service at a time, which may be another one after a while:
// that is then a restarted service at another address. Every Welcome says who has which shard (Ring). A service that is asked for a
// shard that it does not have answers StatusMoved, with the ring. If nobody has the shard, or the one who is said to have it does not answer, the client
// asks the others again.
//
// A call is made in the session of the shard of its inode: Lookup, Create, MakeNode, Remove, ReadDir and TmpFile in that of the directory, Rename
// in that of the old directory, Link in that of the inode that gets the name; what is about no inode in any. Calls with several inodes have those of one shard. What is
// answered of an inode of another shard has no lease; of a directory it is all attributes as they were then, of any other inode no more than number and
// type. So the client asks again in that shard's session. Create does not open a file that was there and is another shard's. A call in the session of another
// shard than that of its inode is answered with StatusBadArgs.
//
// MetaList tells of all services of the volume, MetaDrain has one of them give its shards to the others; a service that shares its catalog with nobody
// answers EOPNOTSUPP.
//
// # Sessions, slots, exactly once
//
// A session outlives connections and restarts of the service: it is a catalog record. It is bound to one connection at
// a time, the newest. It lives as long as a frame of the client arrives at least every lease interval (Renew is the
// call that does nothing else); then the service ends it, makes what it knows of the client's sizes durable, and frees
// what it held open. A client that learns of StatusBadSession starts a new session and reclaims by Open and LayoutCommit.
//
// Each call uses a slot, numbered from 0 to Welcome.Slots-1, on which no other call is outstanding, and the slot's next
// sequence number, starting at 1. The number of slots is that of the session's first Welcome. After a lost connection
// the client sends each unanswered call again, unchanged, on the next connection of the same session. The service
// answers a sequence number it has answered before with the first answer; one it is executing with that execution's
// answer; a lower one with StatusBadSequence. For a call that changes the catalog the answer is part of the same catalog
// batch as the change, so this holds across a crash of the service. Other calls may be executed twice, which nobody can
// tell. A restarted service has only the sequence numbers of calls that changed the catalog, so it takes any greater one
// as the slot's next.
//
// StatusShutdown and StatusBadSession as replies to a call say that it was not executed because of this frame; they are
// never recorded as its answer. A service that shuts down finishes the calls that it has begun. A client
// that gets StatusShutdown waits for the answers to its other calls, a few seconds at most, before it leaves.
//
// Replies come in any order. A reply other than StatusOK carries a message and no result.
//
// # Callbacks
//
// The service calls the client on the same connection: CallBack carries a number unique on that connection, BackReply
// answers it. A client answers within the lease; the service ends the session of one that does not. As long as data
// servers keep the client waiting, whose writes a callback has it finish, it says StatusWorking, each time within the lease, and
// answers later: if it lost its session, it would lose what it was told to make stable. A callback that a lost connection
// leaves unanswered is sent again, under a new number, on the session's next connection.
//
// The recall of a lease on names may have to wait for changes of the same client: the kernel of the client holds the lock
// of the directory until they are answered, and they may be waiting for the recall of another session's lease. Such a
// client says StatusStuck, several times if need be, and answers later. The service then answers those changes of the
// session with StatusTurnedBack that are waiting for somebody else, or with StatusGrace if the service of another shard
// does so: nothing was changed. The client lets the lock go and makes them again, or just makes them again in a while.
//
// A client of a restarted service takes back what it had: it opens files again and sets locks again (Reclaim), reports
// sizes, and then says ReclaimComplete. Until every session that the service knew has said so, or its lease has run out,
// changes of names and attributes and new locks are put off (StatusGrace): somebody may still rely on a lease, or come
// back for a lock, that this instance does not know of.
//
// # Leases
//
// A session may keep what the service tells it of an inode, and answer questions from that, while it has a lease on it:
// LeaseAttrs for attributes, extended attributes and the target of a symbolic link, LeaseNames for which names a
// directory has and which it lacks. Replies say which leases come with them. They last until the service recalls them or
// the session's lease time, counted from the sending of the last call that was answered, is over. A lease may be
// given back with LeaseReturn; LeaseShrink asks for it.
//
// A change that would make what others keep wrong recalls their leases first (LeaseRecall), grants none until it is
// committed, and only then is answered. The session that asks for the change keeps its leases and knows itself what
// has changed: Create, MakeNode and Remove add one to the directory's entries or take one away, the same to its links if it is a directory that
// comes or goes, and set its times of modification and change to the new inode's time of birth, or RemoveResult.At, if they are earlier.
// The lease on its names that comes with a new directory says that it has none. A reply and a recall may overtake each other: an answer to a question that was asked before a recall of that
// inode arrived, or before a change of it by the same session was answered, must not be kept.
//
// Nobody but the writer has LeaseAttrs on a file that some session may write (has a layout for writing of). Whoever
// asks for attributes of such a file gets true ones: the service asks the writers first (SizeQuery). A file that is cut is
// recalled also from those who just have it open, so that who does not hear of it may go on reading below the size that
// it knows. LeaseData in a recall says that contents have changed or are about to.
//
// # Locks
//
// Lock sets and removes locks, TestLock finds what is in the way. With Wait, a lock that others have is answered with
// StatusLockWait, and LockReady calls when asking again may succeed; asking without Wait, or removing, ends the waiting.
// EDEADLK is the answer if waiting would never end. Locks end with the session. A lock that cannot be reclaimed is EIO.
//
// An unlock with Alone is refused with StatusShared, and the lock stays, if another session has the file open or has had it
// since the lock was granted. The client then makes stable what it has written under the lock, and unlocks without Alone.
// A lock that is granted with LockDone.Shared may have been another session's before: the client drops what it keeps of the
// file before it goes on.
//
// # Layouts and sizes
//
// LayoutGet answers segments that cover the asked range (package layout). Writers report with LayoutCommit: End is the
// first byte after the last one written, Mtime the time of the last write. A provisional report is kept in the
// service's memory: it makes size and time visible to others when a file is closed. A durable one is recorded before
// the reply; the client sends it when the data is stable on the data servers. The service's size of a file is the
// largest End reported since the last truncation. After a restart of the service clients send their provisional
// reports again. A durable report that says nothing new is answered when everything
// is durable that the service has shown so far. So is one of a directory, which fsync of the directory sends.
//
// Attr.Used says how much of a file is allocated where the service knows it, which it does not ask data servers. A new file has nothing, and a file
// that is cut to nothing; from there on its writer counts, and says so in its durable reports (SizeReport.Used). The service does not know it any more
// when a report of what was written lacks it, several sessions had layouts for writing at a time, one was lost that had, or the file was cut in
// the middle; and it does not say it to others while a session has a layout for writing.
//
// Create grants the layout of a new file, or of the beginning of it, with the answer if the client wants that and nobody has to be waited for. That answer is not
// executed again but repeated when it was lost: a recall of that file which came before it, on whatever connection, is for what it grants.
//
// LayoutRecall makes the client finish its writes in the range, make them stable, and forget its layouts and retained
// data there before it answers. The service does this before it truncates a file that others may write. The reply that
// grants a layout is sent before a recall of it.
//
// A session that has a layout for writing of a file, and the lease on its attributes, may set its times, and its owner and group to what they are, for
// a caller who owns the file, without a call: nobody else learns them but through it, and it tells them (SizeReport.Set) with the first durable LayoutCommit of the
// file, at the latest before it answers a recall of the lease or a SizeQuery. What it has written after that is reported as always.
//
// A segment that is Shared may be written by several sessions at the same time. Their writes are acknowledged when they are
// stable, and nothing is kept of them that could be sent again. Of all else no two sessions have layouts for writing of the
// same byte, but those that asked with Append, who write only where Reserve has told them to. Files with several copies or
// with data on NVMe namespaces have no segments that are Shared, and a session of an older version gets none.
//
// A LayoutGet for writing is answered with all
// around the asked range that no other session has; if others have some of the range, it is recalled from them, in multiples of 1 MiB, and
// the call waits. After half a second it is answered with StatusLayoutUnavailable; what is recalled for it is then kept for it for 5 seconds, in
// which the client asks again. Off and Len should be what is about to be written: more is taken from others for nothing.
//
// Of a file that has data on NVMe namespaces the same holds for layouts for reading and for writing: a range is read by any number of sessions, or
// written by one, which may read it as well. Layouts for reading are recalled like the others, also while the client's own SetAttr with a size is executed. Before it answers
// a recall the client has finished the reads and the writes in the range that it had begun, and has told with LayoutCommit which blocks it has written
// (SizeReport.Written): they become valid before the size is recorded. If blocks were taken away since, the call is ESTALE and names the inode; it is
// EPERM from a session that has no layout for writing. A segment is answered that holds Off, and begins not far before it; if the data files have
// no space there, a LayoutGet for writing is answered with StatusLayoutUnavailable. Layouts for reading end when the file is closed.
//
// A client that has to make stable what it has written, and is refused by a data server because the file was fenced meanwhile, asks with
// LayoutGetArgs.Renew for the credentials to do so with. The answer does not wait for recalls, as those wait for it, and grants nothing: it is not kept,
// and nothing new is written by it. It is EPERM if the session has no layout for writing of the file, and StatusLayoutUnavailable while a fence is under way.
//
// LayoutError names copies (data files) that may lack a write which others have, because they failed or did not answer. The
// service makes them stale, but for the last good copy of a column, and answers when nobody relies on them any more: it calls
// CopiesStale at all who have the file open, the reporter as well, with all copies of the file that are stale. A client that
// is called so never reads or writes these copies again, and answers without waiting for anything.
//
// CacheStart begins a copy of a whole file for readers, a cache: the client copies to the segment it gets what it reads from the file,
// all of it, commits that and says CacheDone. While somebody may write the file there are no caches: whoever gets a layout for
// writing, or sets the size, gets it when they are gone, as CopiesStale has told all who have the file open. Then, and when CacheDrop has
// taken it away, CacheDone is EBUSY. A cache is in layouts for reading as one more mirror, all of whose columns are the same data
// file: what a data file has at an offset is what the file has there. Of a file that a client has open by a descriptor of a cache
// (it is pinned) layouts for writing have the cache as well, and CacheDrop is EBUSY. What a client has not finished goes with its session.
//
// LayoutStats says every minute or so what a session has done at the devices since it last said so, if that is anything.
// The service chooses by it where new data files go; nothing of it is kept for longer than some minutes.
//
// Verify compares the good copies of a mirrored file, a range at a time, for whoever may change the volume; layouts for writing there are recalled
// before. A bad copy is made stale as by LayoutError.
//
// LayoutMove makes the service copy a file's data to a device, while the file is in use: to one data file if there is one copy of it, else
// the first copy of each column that has none there. The service remembers it, also across a restart; the caller, who must own the file,
// asks again from time to time, and is answered after half a second at the latest. What cannot be moved is told once, to whoever asks next:
// ENODEV, the device is not known, not reached, or drained; ENOSPC; EBUSY, the file is being moved elsewhere.
//
// Reserve finds the place of an append, behind all others, so that each append of any client has a place of its own.
// The time of that step is the time of the append; its client reports no other. The service keeps the place, by its
// number, until the session says that it is written (Ended) or that it never will be (GivenUp), with the next Reserve
// or LayoutCommit. Until then the file is shown to everybody as far as the first place that is not written. A place
// that was given up reads as zeros if something was written behind it; otherwise it is the next append's.
//
// An append that has returned is visible at once: before the service tells a size it asks those who have places
// (SizeQuery), the asking session as well. A session that is asked while it writes a place reports it as soon as it is
// written. If something is written behind a place that is not, or its session does not answer, the service waits for a
// second and then recalls the place (ReserveRecall). The session finishes the appends that data servers may have some
// of, reports that, and answers; its other places are void, and the appends take new ones. A session that neither
// answers nor says StatusWorking for two seconds is ended and fenced. No lease on the attributes is granted beside a
// place.
//
// A truncation recalls all places first. Until they are written or given up, layouts are granted there. The session
// that asks for the truncation has finished its own appends before. After a restart of the service a session tells of
// its places again (Reserved), before ReclaimComplete. It leaves out the places that were recalled: nothing is written
// there, and the file may have been truncated since the recall. A place that no session reports
// is lost. Therefore the service gives a place only after it has sent the answer with the place before. The client
// records each place when it reads the answer, before it reports its places.
//
// In versions before 6 a place has no number: it counts as written when Reserve is answered, and is not recalled.
//
// # Devices that do not answer
//
// The service probes each device. DeviceStates tells all sessions which devices are down, when that changes, and when a
// session gets a connection if any was down before. It is sent as well when a device has come to have other addresses:
// with it all is void that Devices has answered before. It holds as long as the connection. It is a hint: what a
// device has answered to the client since the service found it down (DownDevice.For) is newer. The client answers
// without waiting for anything. A session is not told of another change before it has answered; it gets the latest
// states then.
//
// A client that finds by itself that a device does not answer, or takes no writes, says so with ReportDevices at once,
// and again every few seconds as long as that is so, unless the service itself has told it. It makes one report to each
// service that it has a session with, and an empty one at the end. The service probes the device at once and believes
// its own probe alone. If that is answered, DeviceInfo.Complaints counts the clients.
//
// # File handles
//
// A client that has nothing but the number of an inode asks for its attributes by GetAttr. Parent tells the directory
// that it is in, and whether it is below the directory that the client shows: an inode elsewhere is EACCES. A file
// counts as being where it is charged (see below); one that is charged to no directory counts as being everywhere.
//
// # Usage and quotas
//
// The attribute weft.usage of a directory says what is below it: bytes=N files=N dirs=N, the files without the directories. QuotaSet limits what
// there may be below a directory, or belong to a user or a group. What would go beyond is EDQUOT: to make or to move an inode there, to give it to
// somebody, to make a file longer, and a LayoutGet for writing past what is left. Under a quota layouts reach no further than what is left, and
// not far; a client asks again where its layout ends.
//
// # Directories
//
// ReadDir pages through a directory in the order of entry cookies, which are a hash of the name: an entry keeps its
// cookie as long as it exists, whatever comes and goes beside it. A page holds the entries whose cookie is greater than
// the asked one; entries of equal cookie are never split between pages. Cookies are at least [FirstCookie], so that a
// client can number "." and ".." itself. They are spread over 63 bits: clients show programs the upper 31, and count on
// few entries having the same.
package metarpc
