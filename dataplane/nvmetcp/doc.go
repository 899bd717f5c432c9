// Package nvmetcp is an NVMe/TCP host: the connection to one controller, with its queues, in the start/complete form that the
// data plane wants, and what is needed to look after it; subsystems, whose namespaces are used over all paths to them; and
// discovery.
//
// But for [Target], which carries requests for data files that are extents of a namespace, it knows nothing of files and data servers.
//
// # Commands
//
// A [Command] that is started ends exactly once, by its Done: with the controller's answer, or with a [*PathError] when the
// connection that it was on is lost or there is none. Nothing is repeated here, since what may be repeated, where and
// when is for those to say who know the other paths. A PathError tells what there is to know: whether the controller may have
// got the command, and from when on it certainly has given up the association to which it belonged, so that a write that
// nobody knows the outcome of cannot land any more.
//
// A queue is a TCP connection, by default as many as there are Ps, and four at least; fewer, but one, if the share
// descriptors.Dialed is used up. A command goes to the one with the fewest bytes outstanding; small ones go together,
// to the first that has little to do. When the queue has all the commands in flight that it can have, the rest waits
// there. SQ flow control is off: a queue of N entries has at most N-1 commands.
//
// Writes that fit the capsule go in it. Others go when the controller asks for them, in any number of R2Ts at once up to the
// four that we allow, cut to MAXH2CDATA; between two of these PDUs other commands get their turn. Data that is read may come in any number
// of pieces, those of different commands mixed.
//
// # Connection and reconnection
//
// [Connect] brings a controller up: ICReq and ICResp on each connection, Connect and, if the controller asks for it, authentication
// (package nvmeauth), the enabling of the controller, Identify,
// its features, requests for events, and the I/O queues. Losing any of the connections ends all of them, that is the association:
// sockets are closed at once, so that nothing which was not sent arrives later; then all commands end; then the controller is
// connected again, after a second at first and then ever more slowly, until Config.CtrlLossTimeout is over or it says that it is
// no use (DNR). Everything is learned anew then, since it may be another one.
//
// An association is given up when a connection is lost, when a command has no answer within its time-out (the connections are closed
// before it ends, since its buffer may be in use until then), when a Keep Alive has none within KATO, when the controller
// reports that it is broken, and when it sends what it must not send: a PDU that is malformed or out of place, an answer to no
// command or to one not sent, data beside the command's buffer, R2Ts for more than the command's data, success
// without all of it. It is told so by a TermReq if it takes what is sent. A data digest that is wrong ends only the
// command, with a [*DigestError], once its answer is there.
//
// Keep Alives have the admin queue's connection, and so never wait behind data; nor do the admin commands of callers, of which
// only so many are in flight at once, take their place. Asynchronous Event Requests are always outstanding; each event sends the next one
// and is told by Config.OnEvent.
//
// # Paths
//
// A [Subsystem] has one Controller at each address, and connects again for as long as the address is given. Namespaces are joined by NSID
// when UUID, NGUID, EUI64 and command set are equal; what differs in these, in block size or limits is refused, as is an identifier that
// another namespace has. After every connect the ANA log is read and the namespaces are looked at, and nothing is sent on an
// association before: each command is for the one that was looked at (Command.Association). The same is done for events, when a command's status says that something is not as it was, and when a controller
// comes back; the log of changed namespaces is read before the others, as that arms their event again, and the ANA log with each look, as its groups come and go with namespaces; a state that does not fit what commands say, and a namespace that the controller
// cannot tell about just now, are asked for again at growing intervals. The size that a controller told last
// is the namespace's, and controllers that tell another one are out of use. A group that stays in the state change for twice ANATT gets
// its controller reset. A namespace that every controller has lost is gone, and the same object works again when it comes back; another
// one with its NSID is another object.
//
// A [Request] to a [Namespace] is a Command on the path that the [Policy] chooses. What becomes of it when that ends with an error:
//
//   - A status that asks for a retry: up to five times, on the same path, after the delay that CRD means.
//   - ANA and other path statuses: on another path at once. The path is out until it was looked at.
//   - No answer, or not sent: on another path. A command that may have been carried out and changes the namespace waits until
//     PathError.Gone, since its old copy could land behind newer data; what waits so has not ended, so its caller, who never has two writes
//     to the same blocks under way, does not send newer data either.
//   - No answer, as either side has ended the connection for what the other had sent: the same, but after five times in all it is the caller's.
//   - Anything else is the caller's.
//
// With no usable path requests wait while some controller may come back, or for as long as Patience says, and fail when none may. Flush goes to one
// path, as Linux does it: the controllers of a subsystem that share a namespace share its cache.
//
// A Request that was withdrawn is not sent (again). It ends when no controller can carry it out any more, as does one that SubsystemConfig.Alive
// forbids to be sent: that is asked right before each sending, so what a host whose session is over has sent is all that its controllers get,
// and that ends with their associations. Nor is it sent when Request.Ended is closed, which is that of the session in which a data file's layout
// was granted: what has waited, for a path or elsewhere, until there is another session would write to blocks that may be another file's by then.
//
// # Reservations
//
// What is registered on a namespace, and the reservation, are of the host (its HOSTID), on all controllers. So one [Initiator] is one host. Targets
// may forget them when they start anew. So what [Namespace.Register] and [Namespace.Reserve] are called for is done by the goroutines of
// the addresses, on every association before its paths come into use, and on those that there are while all paths are out of use; the calls
// wait for the first. That is Register, or Replace if there is another key, both with IEKEY, then Acquire if the reservation is wanted. An answer that
// speaks of the path has it tried later; another error stays with the namespace, whose I/O goes on to be refused or not.
//
// Commands with an older key may be under way elsewhere. If such a one is answered, the newer key is registered after it. If its connection is lost the newer
// key is registered once more after PathError.Gone, and no I/O goes out before.
//
// A host whose I/O was refused after it had registered has been fenced. It does not register again by itself, on no association; whoever has another session
// calls Register ([Initiator.Rekey]). Nor does it when Alive says no. [Namespace.Preempt] names the type of the reservation, as it must, and
// is an ordinary Request, which is repeated elsewhere after PathError.Gone only; if it is refused and the report does not show the key, somebody has
// done it before, maybe we.
//
// # Discovery
//
// [Discover] reads the log of one discovery controller and of those it refers to; [Follow] stays connected to all of them, as a port tells
// events only to those connected to it. A log is read in pieces and again when GENCTR moved. What a controller told counts until it says
// something else: one that does not answer takes no address away. A subsystem whose last address is taken away keeps it.
//
// An [Initiator] that follows discovery controllers uses what they tell beside the addresses that Open is given: a controller need not tell of all, as
// Linux's tells only of the port that was asked. What was told once and is not told any more is used no longer, whoever gives it to Open. What they
// told last is kept in a file, with which the next start begins and which is verified as soon as one of them answers.
//
// # Buffers
//
// The payload of a read goes from the socket into Command.Data, but for the few bytes that arrive together with headers; that
// of a write goes from Command.Data by writev. All reading and writing is in non-blocking system calls, each under the
// mutex that guards the addresses it uses. So Detach can take a buffer away between two of them: what the controller still sends is
// dropped, what is still to be sent comes from a copy, and the connection lives on.
//
// A CID is used again only when the command was answered and our own last byte for it was sent. It contains a count of uses, so
// that an answer which comes late or twice is recognised.
//
// # Goroutines and locks
//
// A Controller has one goroutine that waits for its association to end and makes the next one, and one that tells events. An association
// has one for each queue, which reads it and on which Done runs, and one that sends Keep Alives and looks for commands
// that take too long. Whoever calls Flush writes until the socket is full; then a goroutine that lives until the queue
// is empty takes over. While the one that reads has more answers than the one whose Done runs, Flush leaves it to that one, which
// writes before it waits: what Done starts for answers that came together goes out together.
//
// A Subsystem has one for each address, and a Discovery one for each connection. A Namespace has one while requests wait that can be sent;
// on the good path a command takes no lock but its own and needs no memory.
//
// Lock order of paths: Initiator.mu, Subsystem.mu, Namespace.mu, Request.mu, then those of a Controller; member.mu is a leaf that OnState and OnEvent
// take. Discovery.turn is above Discovery.mu and Initiator.mu and held while OnChange runs.
//
// Lock order: Controller.turn, association.mu, queue.mu, stream.mu or sender.mu; Controller.mu is a leaf. The last two of a
// queue are held across one non-blocking system call or the making of one digest. No lock but turn is held while a function of
// the caller runs, and turn only for OnState.
package nvmetcp
