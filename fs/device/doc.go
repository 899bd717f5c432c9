// Package device serves a FUSE mount by a loop of its own on the FUSE device (linux/fuse.h, fs/fuse/dev.c). READ and WRITE
// are decoded here and started, and answered by whoever completes them: no goroutine waits for one, and requests that
// are there together go to the data servers together. Every other request is handed to go-fuse's ProtocolServer in a
// goroutine of its own, where it may block.
//
// It knows nothing of files: what a READ or WRITE means is up to the [Handler].
//
// # Reading
//
// Readers are goroutines of which the one that has the turn (Server.turn) reads. It takes requests, starting each, until
// the device has no more, or maxBatch of them. Then it ends the batch ([Handler].Flush), and waits if there are none. One
// reader is best for small requests: several would be woken in turn, and each would send its own batch. The data of a
// large WRITE is copied two or three times on its way to a socket: by reading the device, by the Handler unless it was read
// into the Handler's memory, and by sending. So whoever has read one gives the turn away before it starts it, and the copies
// of several go on at the same time.
//
// To wait is poll(2), which blocks a thread: to wait with Go's poller would take one more wake-up per request.
// With a single thread for Go code (GOMAXPROCS=1) it is the poller after all, as the runtime notices only after
// milliseconds that a thread of its has gone to sleep in a system call; and each batch lets other goroutines run.
//
// # Memory
//
// A request arrives as a head and a payload: the 80 bytes of struct fuse_in_header and fuse_write_in, and what follows, in
// a buffer of MaxWrite bytes at a page boundary. A WRITE of more than smallWrite bytes keeps the buffer, and the reader
// takes another one; smaller ones are copied into a buffer of their size. The memory of a READ is taken when it is
// started. It belongs to the request until its Done.
//
// The Handler may have to keep the data of a WRITE, so it can lend memory for it ([Handler].WriteBuffer). How much is only known
// when the request has been read; so the reader borrows as much as the WRITEs before had, and puts it before its own buffer, in
// place of that buffer's beginning. What is not used is given back, at the latest when there is no request. If the WRITE was
// larger than expected, the part read into the Handler's memory is copied to its place in the buffer.
//
// READs and WRITEs have Config.Memory bytes each. A READ that finds none waits without stopping others. A WRITE has been
// read by then, and its reader does not go on until there is memory. When none goes on, no INTERRUPT is read either; so
// the callers of all requests are watched meanwhile, and those that are dying give their memory back.
//
// # Interrupts
//
// After an INTERRUPT for a READ or WRITE a goroutine asks the Handler whether its caller still wants it. If not, the
// request is detached from its memory and answered with EINTR; its Done, should that come later, answers nothing.
// An INTERRUPT for any other request goes to the ProtocolServer, which closes the channel that its handler was given. One
// that finds nothing is answered EAGAIN, which makes the kernel repeat it if there is a request that has not come so
// far.
//
// FORGET and BATCH_FORGET have no answer and must not block; they are handled by the reader itself.
//
// # The end
//
// Reads of the device fail with ENODEV once the mount is gone and with ECONNABORTED once the connection was aborted. Then
// the readers end, and everything in flight is interrupted until it is answered; Serve returns after that. A READ
// or WRITE whose Done has not come by then has been detached, and touches only its Request.
//
// # Lock order
//
// Request.mu, Server.mu and Server.queueMu are taken alone. Request.starting is the one lock that is held while the Handler
// is called; it guards nothing but tells when Start has returned.
package device
