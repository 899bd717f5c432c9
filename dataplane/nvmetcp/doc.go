// Package nvmetcp is an NVMe/TCP host: the connection to one controller, with its queues, in the start/complete form that the
// data plane wants, and what is needed to look after it.
//
// It knows nothing of layouts, files and data servers.
//
// # Commands
//
// A [Command] that is started ends exactly once, by its Done: with the controller's answer, or with a [*PathError] when the
// connection that it was on is lost or there is none. Nothing is repeated here, since what may be repeated, where and
// when is for those to say who know the other paths. A PathError tells what there is to know: whether the controller may have
// got the command, and from when on it certainly has given up the association to which it belonged, so that a write that
// nobody knows the outcome of cannot land any more.
//
// A queue is a TCP connection, by default as many as there are Ps. A command goes to the one with the fewest bytes
// outstanding; small ones go together, to the first that has little to do. When the queue has all the commands
// in flight that it can have, the rest waits there. SQ flow control is off: a queue of N entries has at most N-1
// commands.
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
// Lock order: Controller.turn, association.mu, queue.mu, stream.mu or sender.mu; Controller.mu is a leaf. The last two of a
// queue are held across one non-blocking system call or the making of one digest. No lock but turn is held while a function of
// the caller runs, and turn only for OnState.
package nvmetcp
