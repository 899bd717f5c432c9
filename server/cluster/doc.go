// Package cluster lets several processes serve one volume: it says which of them has which shard, and moves shards between them. It knows nothing of
// what a service does (package meta), and needs a catalog that several processes can use at a time.
//
// # Members
//
// A process is a member, by a random id that is new with each start and after each fence: an incarnation. It joins by one batch with three changes: its member row, which
// says where it is and which versions it knows, its beat row, and the ring counter. The batch is guarded by the volume row, so that who is too old for the catalog does not join
// (package schema, "Formats"). Then it does three things until it ends:
//
//	beat   about five times per member lease it raises its beat row
//	look   as often, and at once when another member says so, it reads all rows that there are of members and shards, in one snapshot, and does what follows from them
//	serve  it lets clients and other members in through one port
//
// Every batch that the process commits is guarded (fence): what a service commits by its shard's row as it was written for this service, anything else by the presence of the
// member row. So deleting the member row ends what the process may do itself, and changing a shard's row what a service of the shard may do, at a point in the one
// order of all commits; also what was sent before and is carried out late.
//
// # Life and death
//
// A member's lease is in its row. All times are differences on clocks that nobody sets, each member's own, and count while the process is stopped or the machine suspended (CLOCK_BOOTTIME). They need not agree, only
// run alike. While a virtual machine is stopped its clock may stand still, too: what the catalog has is then still protected by the fence, but answers from
// memory may be out of date for as long as it takes to notice.
//
//	alive   the last beat that succeeded began less than the lease, minus a fifth, ago. Only who is alive answers: a service asks after it has executed a call, and
//	        before it answers
//	dead    a look found the same beat as one that ended at least a lease earlier. The beat had begun before that, so the member was not alive any more
//	        when this is found, however long either was stopped. Who has not looked for half a lease begins anew: the catalog may have been away for all
//	buried  one batch, guarded by the beat row as it was seen, deletes its member row and its beat row. Its shards have no owner then
//
// A member whose commit fails by the fence, or that does not find its own row, has been buried. It stops all its services without letting anything end, and joins again with
// another id. What is stuck in a call to the catalog or a data server may take long to end, but can do no harm to the catalog meanwhile.
//
// A member that cannot reach the catalog is not alive after a while, but nobody buries it who cannot either; if a later beat succeeds it goes on
// as if nothing had been.
//
// # Shards
//
// The row of a shard says who has it, and an epoch that grows with each change. A service of a shard runs only where the row says so.
//
//	take    a shard without an owner: its row, guarded by what it was; then the service starts, as after a crash
//	give    a shard to a living member: the service is shut down, so that calls end or hear StatusShutdown and connections are closed; then the row,
//	        guarded by what it was and by the new owner's member row; then the new owner is told to look, and starts the service. A member gives one shard at a
//	        time, and waits for the new owner to serve it, so that most of a volume is served at any time
//
// Who is to have what all members find from the rows alone (view.plan): all have equally many, or one more, no more moves than has to, and ties are broken by
// rendezvous hashing. Two who act on different views cannot both succeed. A member whose row says that it is draining is to have none. It may leave when it has none: one batch deletes its rows. Shards that
// it still has have no owner then.
//
// A member that has given all its shards away tells clients for a second more (farewell) where these are: a client
// learns of other services only when it says hello, and the ones that it knew may have left.
//
// A client that comes while the member is not alive, or is starting the service of the shard, waits for some seconds,
// and so gets its answer as soon as there is one.
//
// Clients are told who has what (metarpc.Ring). Its epoch is the ring counter, which every batch raises that changes a row of a member or a shard; as all is read in one snapshot,
// two rings of one epoch are the same.
//
// # Maintenance
//
// A process that changes the catalog as no service does (weftd fsck --repair) has the volume to itself ([Maintain]). It has a row, of which there is one at most, and beats like a
// member, with a lease of its own (MaintenanceLease):
//
//	begin    it looks until every member is dead, or one lives: then it ends, and says which one. The dead are buried, and one batch, guarded by that there are no members and
//	         nobody maintains the volume, puts its row and its beat row
//	unseat   each shard's row that names an owner gets another epoch and no owner, so that what is still on its way from services of the dead has no effect
//	work     every batch is guarded by its row. It ends by itself when a beat has not succeeded for the lease minus a fifth
//	end      one batch deletes the rows
//
// The batch by which a member joins is guarded by that the row is not there. If it is, who wants to join looks at the beat: if that changes he is refused, and told who maintains the
// volume; if it does not for the lease, he joins by a batch that deletes both rows, guarded by what they were. In that way the next maintenance begins as well.
//
// # Peers
//
// Members speak to each other over the port that clients use (package peerrpc). Connections are made when needed, to the address in the member row, and kept.
// Each has the highest version that both members speak.
//
// # Failures
//
//	a member is killed      buried after a lease and one look; each shard is up again when its service has read the catalog
//	it is stopped           the same; when it goes on it cannot commit, nor answer what it executed, and finds that it was buried
//	it is cut off from      it stops answering before it is buried
//	the catalog
//	the catalog is away     all stop answering; when it is back they go on as they were
//	the catalog is full     the same, as nobody can beat: changes are refused with ENOSPC until then
//	a peer is cut off       calls to it fail; a shard that is given to it is found by it at its next look
//	a maintenance is        nobody can join before its lease is over
//	killed
//	a service does not      its member keeps the shard and tries again
//	start
//
// # Locks
//
//	member.mu   view, watch, services. Held for moments, over no call
//	Node.mu     the present incarnation, connections. Taken with member.mu held or without
//	peer.mu     a connection's calls. Taken alone
package cluster
