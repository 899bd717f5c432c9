// Package dataplane turns reads and writes of file ranges into requests to data servers and joins the answers. It keeps
// unstable data until it is stable.
//
// It knows neither the metadata service, from which its callers get layout segments, nor any protocol: a [Target] carries
// requests to one data server, and Config.Dial makes the target of a device. Sizes of files, permissions, retries with a
// new layout and the reporting of errors to many openers of a file are the caller's business.
//
// # Start and complete
//
// [File.StartRead] and [File.StartWrite] queue and return; [Plane.Flush] at the end of a batch sends what was queued.
// A request is cut into pieces (layout.Segment.Split, then the target's limits), all pieces are started at once, a
// counter goes down as they end, and whoever brings it to zero calls Done. No goroutine is needed for that, and nothing
// is allocated once the pools are warm. Requests that cannot go on at once are put aside with a ticket and resumed later:
// behind another write to the same bytes, for a device whose target is being made, for another mirror. Goroutines run
// only where blocking code is needed: in Dial, for the resumption of what was put aside, in Commit, and to settle doubts.
//
// A request of the caller's must never leave its memory with us for longer than the caller can wait: Detach takes
// it back at any moment, whatever the server does.
//
// # Order of writes
//
// Each [File] has a queue of byte ranges. A write holds its range from StartWrite until all its pieces have ended;
// overlapping ones run in the order of their StartWrite, others in parallel. [File.LockRange] and data that is sent
// again stand in the same queue. A piece whose outcome is unknown has not ended, so its range stays held until the
// target has a definitive answer or is closed. Reads do not queue. On a soft mount (Config.Patience, and that of the
// targets) such a write ends for its caller meanwhile (Op.Overdue), and its range stays held all the same.
//
// # Copies
//
// Each stripe column of a mirrored file has several copies, one in each mirror. What a copy is good for stands in the segment
// ([layout.CopyState]). A write goes to all that are not stale, a read to one that is good. A copy that fails is an error of
// the write, of Commit or of Punch; the error names it ([FailedCopies]). The caller has the service decide, which makes it
// stale for good or says that there is no other, and then calls [File.Forsake]: the data plane asks nothing more of that
// copy, whatever segments come later, drops what it retains of it, and no longer counts its errors.
//
// A copy that does not answer is as good as failed once another copy has answered the same and Config.MirrorTimeout has passed
// since (type watch): the request ends with ErrStuck for it. A data server that has announced that it stops is waited for
// a while longer (see [Stopper]); reads do not wait for it. Then its pieces are orphans: they are still at the target, and
// the server may yet carry them out. So the range of the write stays held until they have been answered or their copy is
// forsaken. If all copies are silent nobody knows which of them is to blame, and the request waits.
//
// Of the copies that may be read one on the same host is asked (see [Nearer]), or else the one that will probably answer first (type load). A read that is late, measured by
// the server's own 95th percentile, is asked of another copy as well, and the first answer counts; that is bounded to 5 % of
// the reads (hedgeBudget). The hedge reads into memory of its own, and ends the other by Detach before that memory is copied.
// A read that is not answered for Config.MirrorTimeout goes to another copy without a bound.
//
// # Late devices
//
// Such waiting is done once for a device, not for each request (late.go):
//
//	late   it left a request unanswered for Config.MirrorTimeout after another copy had answered, and has answered
//	       nothing since. Or it refuses connections (see [Refuser]) while a good copy has answered. It is late until it
//	       answers anything. It is asked for one byte for that, again and again if the target is soft
//	stuck  it answers, but left a WRITE unanswered for so long. It is stuck until it answers a WRITE, or until all
//	       WRITEs that it left unanswered have ended. Or it left a COMMIT unanswered for so long. Then it is stuck until
//	       it answers a COMMIT or a stable WRITE
//
// Writes, COMMITs and the like treat a stuck device as a late one, but one WRITE in each Config.MirrorTimeout is sent
// to it, a stable one that is not waited for. The first COMMIT that is sent to a device which does not answer WRITEs
// gets a quarter of that time:
//
//   - A write is not sent to a copy on a late device while there is a good copy on one that is not. When that copy has
//     the data the write ends with ErrStuck for the other. If no good copy takes the data, or the device is no longer
//     late, the write is sent after all.
//   - Writes, Commit, Punch and Allocate that wait for a late device end so when a good copy has answered. The device
//     of that copy must not have been late itself when the request was sent. Of devices that were all late the first
//     one to come back does not condemn the others.
//   - A read takes a copy on a late device only if there is no other. It is not taken from a copy that is slow to one
//     on a late device, which is asked as well.
//   - If all good copies are on late devices, all are asked and waited for.
//
// The metadata service may have found out before any request has waited ([Plane.SetDown]). The device is late or stuck
// then as well. That ends when the device answers the plane, or when the service says otherwise. An answer that came
// after the service found the device down counts more than what the service says. So a new mount does not wait, nor
// does one that was idle. The plane asks a device at once when the service calls it late. It sends no trial write to a
// device that the service calls stuck. [Plane.FoundDown] returns the devices that the plane has found down by itself.
//
// A busy disk is no dead one: a device whose changes have lately taken long is waited for longer than
// Config.MirrorTimeout (device.patience).
//
// # Unstable data
//
// An UNSTABLE piece is copied once, into memory bounded by Config.RetainBytes, and sent from there, to all mirrors from
// the same copy; data that the caller has in such memory already (Write.Buf) stays where it is. When its write is
// acknowledged each data file that answered UNSTABLE keeps a reference, the verifier of the reply, and the count of
// acknowledgements of the data file. Newer acknowledged data, stable or not, cuts
// the older out. If there is no memory left the piece is sent DATA_SYNC from the caller's memory instead; so is one of a Write.Shared. An answer less
// stable than asked counts as UNSTABLE; a piece without a copy is then committed before its write is acknowledged.
//
// [File.Commit] sends one COMMIT (offset 0, count 0) to each data file that has retained data. The reply speaks
// for what was acknowledged before the COMMIT was sent. What carries its verifier is released. What does not is lost:
// its range is locked, those of its bytes that are still retained are sent again, and another COMMIT follows, in
// bounded rounds with pauses; the later rounds send DATA_SYNC, so that a server whose verifier never comes to rest gets
// there too. An error of COMMIT makes all data it was to cover count as lost, since a server may have thrown it away
// with the error and need not tell twice.
//
// Acknowledged data is dropped only by [File.Drop] and, before another client writes the same bytes, by
// [File.Surrender]. If it cannot be sent again it stays retained, Commit returns the error, and
// the next Commit tries again. So there is no error to remember between calls: either the data is stable, or the
// next Commit fails too. Who finds the file removed ends this with [File.Drop](0); after a fence, [File.Renew] brings the
// new credentials. What nobody drops takes up memory until the plane is closed, and writes go DATA_SYNC once it is full.
//
// What this host's kernel has of a file with one copy (see [Keeper], layout.Op.Kept) needs no other: it stays in the page cache when the server goes, so a COMMIT
// of any instance makes it stable. Only that it was acknowledged is noted, in a bounded number of extents (maxKept). If it turns
// out that the disk has not taken it, Commit fails (ErrNotKept) until the bytes are written anew or dropped. A COMMIT that is refused, as after a
// fence, says nothing of that.
//
// A read that overlaps retained data may reach a server that has restarted and lost it. It is found out when the
// read ends, by the target's epoch (see [Epocher]) or a verifier seen meanwhile; the data file is then settled as by
// Commit and the read repeated. If settling fails, the retained bytes are laid over what was read. Otherwise what the
// server says counts, also where it differs from retained bytes: another client may have written there since.
//
// # Holes
//
// Data servers of weft's own also reserve space, punch holes and tell holes from data (see [Sparser]); what they have
// answered is stable. [File.Punch] and [File.Allocate] hold their range like a write, until every server has answered. A
// punch cuts out what was retained there, so that nothing sent again brings it back. Other servers get zeros instead,
// which are ordinary unstable writes, and are taken to have data everywhere.
//
// # Extents
//
// The bytes of a data file on an NVMe namespace are where the layout's extents say (layout.Extent), and its target goes by
// those of the segment that a request came with; what is sent again goes by those that it was written by. What the target writes to INVALID
// extents it remembers and reads back, also for those to whom it is a hole; to all others these blocks are zeros until the service has been told. So after Commit the caller asks for what was written
// and is stable ([File.Written], for each data file the ranges), sends it with the layoutcommit, and when that was
// answered, and the segments it keeps say so, calls [File.Validated]. This must be done before a segment of a newer generation is used: that
// voids what the target knows. [File.Forget] ends the memory that this takes; it must be called before a File is given up, and
// [File.Drop] does what it takes for a file that was cut. A write to a hole fails with ESTALE, as one to a data file that is gone: the
// caller needs another layout. The space of a copy that was given up may become another file's once the layout is given back: before that
// [File.Quiesce] waits for what was started on it and is nobody's any more. See [Validator].
//
// # Statistics
//
// For each device the plane counts the requests that are at its target, and of those that have ended bytes, times (a histogram)
// and errors; see [Plane.Stats]. What a target does besides, such as connecting and sending again, it has to tell itself.
// The counters are atomic, each by itself, as every request passes them.
//
// # What may happen at the same time
//
//   - Commit and writes: a COMMIT covers exactly what was acknowledged before it was sent; later writes stay retained.
//   - Commit and Commit: one at a time for each data file (dataFile.turn); who waited looks first whether the one before
//     has done it, so that N callers cost about two COMMITs.
//   - Commit and an earlier Commit that was given up (ctx): its COMMIT is detached, its resends go on by themselves and hold
//     their ranges. What they acknowledge after a COMMIT was sent is not covered by that COMMIT (retained.sent).
//   - Resend and write: both hold the range. Once it has the range, a resend sends only what is still retained and lost.
//   - Drop and writes or resends: Drop's caller holds the range, so none is in flight in it.
//   - Drop and COMMIT: the reply finds nothing to release.
//   - Punch and COMMIT: as Drop and COMMIT, since Punch holds the range and drops what is retained there.
//   - Seek and writes: data acknowledged before it is found, at the server or among what is retained.
//   - LockRange and Commit: a resend waits for the range. A holder of LockRange that called Commit could wait for itself;
//     to drain a file, lock, unlock, then Commit.
//   - Detach and anything: a request that waits ends at once, and the ticket it leaves behind is void (its generation has
//     passed). A write that waits keeps its place in the queue, as its followers count on it, and is passed over.
//
// # Locks
//
// No lock is held while Dial, a Done of the caller, or a wait runs.
//
// watch.running is held by the timer of watch alone. request.mu (of one read or write) comes first after that. It is held while the pieces are started, so Target.Start runs under it;
// completions do not take it but for the last one. Below it are watch.mu; rangeLock.mu, then Plane.queueMu; dataFile.mu, then
// iobuf's own; and File.mu, device.mu and Plane.mu, under which nothing else is locked.
//
// dataFile.turn and held ranges are waited for by blocking code that holds no mutex: first the turn, then ranges. Who
// holds a range waits for replies only, never for a turn.
package dataplane
