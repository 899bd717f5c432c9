package nvmetcp

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// A CID is the number of a slot and, above it, how often that was used: an answer that comes late or twice does not
	// pass for one to the next command in the slot.
	tagBits = 12
	tagMask = 1<<tagBits - 1

	// maxR2T is how many R2Ts a command may have outstanding.
	maxR2T = 4

	// overhead is what a command costs beside its data, in bytes, when queues are compared.
	overhead = 512
	// company is how much, in bytes, small commands may have outstanding on one queue before they use another; a power of
	// two. What goes to one queue goes out together, and so do the answers.
	company = 32 << 10
)

// queue is one connection, which is a submission and a completion queue.
type queue struct {
	a     *association
	id    uint16
	nc    net.Conn
	in    stream // of the goroutine that reads
	out   sender // of whoever set writing
	send  wire.Framing
	recv  wire.Receiver
	inl   int // most bytes of data in a capsule
	chunk int // most bytes of data in an H2CData

	answers   atomic.Uint64 // that have come
	cost      atomic.Int64  // of the commands that are on the queue
	unflushed atomic.Bool
	more      atomic.Bool // read has received more answers, and will flush when it has ended their commands
	drain     func()      // writeRest, made once

	mu        sync.Mutex
	dead      bool
	slots     []slot
	free      []uint16 // indexes of those not in use; the last is used next
	waiting   cmdList  // for a slot
	capsules  slotList // commands to be sent
	transfers slotList // commands with R2Ts to be served
	lingering int      // slots that are answered but not wholly sent
	current   *slot    // whose data is being received
	writing   bool     // somebody uses out
	idle      sync.Cond
	stats     traffic
}

// slot is the place of a command that is in flight. Guarded by queue.mu.
type slot struct {
	tag   uint16
	uses  uint16
	busy  bool
	sqe   wire.Command
	cmd   *Command // nil: let go of
	token bool     // as the command's

	dir     wire.Direction
	inline  bool          // data goes in the capsule
	data    []byte        // nil: let go of
	size    int           // bytes of data
	since   time.Duration // when it was put here, after association.began
	limit   time.Duration // how long it may stay; 0: for ever
	capsule uint64        // out.loaded behind the capsule; 0: not loaded
	end     uint64        // out.loaded behind the last PDU loaded

	got   int  // bytes received
	last  bool // no more will come
	bad   bool // a digest was wrong
	asked int  // bytes that R2Ts have asked for
	r2t   [maxR2T]wire.R2T
	nr2t  int    // of r2t
	done  uint32 // bytes loaded of r2t[0]

	answered bool // with completion; it is not wholly sent yet
	answer   wire.Completion

	list       *slotList // that it is in
	prev, next *slot
}

func newQueue(a *association, id uint16, nc net.Conn, size int) *queue {
	q := &queue{a: a, id: id, nc: nc, slots: make([]slot, size), free: make([]uint16, size)}
	for i := range q.slots {
		q.slots[i].tag = uint16(i)
		q.free[i] = uint16(size - 1 - i)
	}
	q.in.before = q.caughtUp
	q.idle.L = &q.mu
	q.drain = q.writeRest
	return q
}

func (q *queue) admin() bool { return q.id == 0 }

// start takes cmd, unless the queue is dead.
func (q *queue) start(cmd *Command) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dead {
		return false
	}
	cmd.Status, cmd.Result, cmd.Err = 0, 0, nil
	cmd.home.Store(q)
	q.cost.Add(cmd.cost())
	if len(q.free) == 0 {
		q.waiting.pushBack(cmd)
	} else {
		q.assign(cmd)
	}
	q.unflushed.Store(true)
	return true
}

// assign gives cmd a slot and queues it for sending.
func (q *queue) assign(cmd *Command) {
	tag := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	s := &q.slots[tag]
	s.uses++
	*s = slot{tag: tag, uses: s.uses, busy: true, cmd: cmd, token: cmd.token, data: cmd.data, size: len(cmd.data), limit: cmd.limit}
	s.since = q.a.now()
	cmd.slot = s
	s.sqe = cmd.encode()
	s.sqe.CID = s.uses<<tagBits | tag
	if s.size > 0 {
		s.dir = s.sqe.Direction()
	}
	switch {
	case s.size == 0:
		s.sqe.SGL = wire.NoSGL()
	case s.dir == wire.ToController && (s.size <= q.inl || s.sqe.Opcode == wire.OpFabrics):
		s.inline = true
		s.sqe.SGL = wire.CapsuleSGL(uint32(s.size))
	default:
		s.sqe.SGL = wire.TransportSGL(uint32(s.size))
	}
	if s.expectsMuch() {
		q.in.lean.Add(1)
	}
	q.capsules.pushBack(s)
}

func (s *slot) expectsMuch() bool { return s.dir == wire.ToHost && s.size >= leanSize }

// release makes the slot free for the next command.
func (q *queue) release(s *slot) {
	s.unlink()
	if s.expectsMuch() {
		q.in.lean.Add(-1)
	}
	s.busy = false
	s.cmd, s.data = nil, nil
	if s.token {
		<-q.a.room
	}
	q.free = append(q.free, s.tag)
	if cmd := q.waiting.head; cmd != nil {
		q.waiting.remove(cmd)
		q.assign(cmd)
		q.unflushed.Store(true)
	}
}

// letGo takes cmd off the queue. Its Done is the caller's business.
func (q *queue) letGo(cmd *Command) {
	cmd.slot, cmd.data = nil, nil
	q.cost.Add(-cmd.cost())
	cmd.home.Store(nil)
}

// find returns the slot of a command that waits for its answer.
func (q *queue) find(cid uint16, what string) (*slot, error) {
	tag := int(cid & tagMask)
	if tag >= len(q.slots) || !q.slots[tag].busy || q.slots[tag].answered || q.slots[tag].sqe.CID != cid {
		return nil, sequenceError("%s for command %#x, which is not outstanding", what, cid)
	}
	s := &q.slots[tag]
	if s.capsule == 0 || !q.out.sent(s.capsule) {
		return nil, sequenceError("%s for command %#x before it was sent", what, cid)
	}
	return s, nil
}

// detach is [Controller.Detach].
func (q *queue) detach(cmd *Command) {
	var private []byte
	goesOn := cmd.modifies()
	if n := len(cmd.Data); goesOn && n > 0 {
		private = make([]byte, n)
	}
	q.mu.Lock()
	if cmd.home.Load() != q {
		q.mu.Unlock()
		return // it has ended
	}
	s := cmd.slot
	if goesOn {
		if private != nil {
			copy(private, cmd.data)
			if s != nil {
				q.out.swap(s.data, private)
				s.data = private
			}
			cmd.data = private
		}
		q.mu.Unlock()
		return
	}
	if s == nil {
		q.waiting.remove(cmd)
		if cmd.token {
			<-q.a.room
		}
	} else {
		if q.current == s {
			q.in.drop()
		}
		s.cmd = nil
		if s.capsule == 0 {
			q.release(s) // nothing of it is on the wire
		} else if s.dir == wire.ToController && len(s.data) > 0 {
			private = make([]byte, len(s.data))
			copy(private, s.data)
			q.out.swap(s.data, private)
			s.data = private
		} else {
			s.data = nil
		}
	}
	q.letGo(cmd)
	q.mu.Unlock()
	cmd.Err = context.Canceled
	cmd.Done(cmd)
}

// fill loads the next batch: commands first, then data for those that were asked for it, in turn.
func (q *queue) fill() {
	q.out.begin()
	for s := q.capsules.head; s != nil; s = q.capsules.head {
		n := 0
		if s.inline {
			n = s.size
		}
		if !q.out.room(n) {
			return
		}
		s.unlink()
		pdu := wire.CapsuleCmd{Command: s.sqe, Length: uint32(n)}
		q.out.head(pdu.Append(q.out.heads, q.send))
		if n > 0 {
			q.out.payload(s.data, q.send.DataDigest)
		}
		s.capsule, s.end = q.out.loaded, q.out.loaded
	}
	for s := q.transfers.head; s != nil; s = q.transfers.head {
		r := &s.r2t[0]
		n := min(r.Length-s.done, uint32(q.chunk))
		if !q.out.room(int(n)) {
			return
		}
		pdu := wire.H2CData{CID: s.sqe.CID, Tag: r.Tag, Offset: r.Offset + s.done, Length: n, Last: s.done+n == r.Length}
		q.out.head(pdu.Append(q.out.heads, q.send))
		q.out.payload(s.data[pdu.Offset:][:n], q.send.DataDigest)
		s.end = q.out.loaded
		s.done += n
		s.unlink()
		if pdu.Last {
			s.nr2t--
			copy(s.r2t[:], s.r2t[1:1+s.nr2t])
			s.done = 0
		}
		if s.nr2t > 0 {
			q.transfers.pushBack(s)
		}
	}
}

func (q *queue) queued() bool { return q.capsules.head != nil || q.transfers.head != nil }

// caughtUp is called before read may wait for more to come.
func (q *queue) caughtUp() {
	q.more.Store(false)
	q.flush()
}

// flush writes what is queued, unless somebody is at it or about to be, until the socket is full. Then a goroutine that lives
// until all is written takes over.
func (q *queue) flush() {
	if !q.unflushed.Load() || q.more.Load() || !q.unflushed.Swap(false) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.writing || q.dead || !q.queued() {
		return
	}
	q.writing = true
	const rounds = 4 // so that this caller does not end up writing for all others
	for i := 0; q.writeBatch(false); i++ {
		if !q.out.done() || i == rounds {
			q.a.wg.Add(1)
			go q.drain()
			return
		}
	}
	q.stopWriting()
}

// writeRest is the goroutine that goes on where flush had to stop. It uses the queue's sender and ends when nothing is queued or
// the connection is lost.
func (q *queue) writeRest() {
	defer q.a.wg.Done()
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.writeBatch(true) {
	}
	q.stopWriting()
}

// writeBatch writes what is left of the batch, or the next one, and returns whether there is more to do. mu is held, and
// released meanwhile.
func (q *queue) writeBatch(wait bool) (more bool) {
	if q.out.done() {
		q.fill()
	}
	q.mu.Unlock()
	err := q.out.write(wait)
	if err != nil {
		q.a.fail(fmt.Errorf("write: %w", err))
	}
	q.mu.Lock()
	if q.lingering > 0 && q.out.done() {
		q.bury()
	}
	return !q.dead && (!q.out.done() || q.queued())
}

func (q *queue) stopWriting() {
	q.writing = false
	q.idle.Broadcast()
}

// bury ends the commands that were answered before they were wholly sent, and are now. mu is held, and released meanwhile.
func (q *queue) bury() {
	for i := range q.slots {
		s := &q.slots[i]
		if !s.busy || !s.answered || !q.out.sent(s.end) || q.dead {
			continue
		}
		q.lingering--
		if cmd := q.finish(s); cmd != nil {
			q.mu.Unlock()
			cmd.Done(cmd)
			q.mu.Lock()
		}
	}
}

// finish ends the command in s with its answer and frees the slot. It returns the command whose Done is to be called, if any.
func (q *queue) finish(s *slot) *Command {
	cmd := s.cmd
	q.stats.commands++
	switch {
	case s.answer.Status != wire.StatusSuccess:
		q.stats.errors++
	case s.dir == wire.ToHost:
		q.stats.read += uint64(s.size)
	case s.dir == wire.ToController:
		q.stats.written += uint64(s.size)
	}
	if cmd != nil {
		q.letGo(cmd)
		cmd.Status, cmd.Result = s.answer.Status, s.answer.Result
		switch {
		case s.answer.Status != wire.StatusSuccess:
			cmd.Err = q.a.statusError(q, cmd, &s.sqe, &s.answer)
		case s.bad:
			cmd.Err = &DigestError{Op: s.sqe.Name(q.admin()), NSID: cmd.NSID, SLBA: cmd.SLBA, Blocks: cmd.Blocks, Addr: q.a.c.cfg.Addr, NQN: q.a.c.cfg.SubsysNQN}
		}
	}
	q.release(s)
	return cmd
}

// kill closes the connection: what is in the socket's buffers does not reach the controller any more. Whoever uses the
// socket comes back with an error.
func (q *queue) kill() {
	q.mu.Lock()
	q.dead = true
	q.mu.Unlock()
	abort(q.nc)
}

// orphans takes all commands off a dead queue that nobody uses any more and ends them with sent or unsent, according to whether
// the controller may have got them.
func (q *queue) orphans(sent, unsent error) (orphans []*Command) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.writing {
		q.idle.Wait()
	}
	for i := range q.slots {
		s := &q.slots[i]
		if !s.busy {
			continue
		}
		if cmd := s.cmd; cmd != nil {
			cmd.Err = unsent
			if s.capsule != 0 && q.out.sent(s.capsule) {
				cmd.Err = sent
			}
			if s.answered {
				// The answer is as good as it was; only our own data is not all sent, and will not be.
				cmd.Status, cmd.Result, cmd.Err = s.answer.Status, s.answer.Result, q.a.statusError(q, cmd, &s.sqe, &s.answer)
			}
			q.letGo(cmd)
			orphans = append(orphans, cmd)
		}
		s.unlink()
		s.busy, s.cmd, s.data = false, nil, nil
	}
	for cmd := q.waiting.head; cmd != nil; cmd = q.waiting.head {
		q.waiting.remove(cmd)
		q.letGo(cmd)
		cmd.Err = unsent
		orphans = append(orphans, cmd)
	}
	return orphans
}

// overdue returns an error if a command has no answer for too long.
func (q *queue) overdue(now time.Duration) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.slots {
		if s := &q.slots[i]; s.busy && s.limit > 0 && now-s.since >= s.limit {
			return &TimeoutError{Op: s.sqe.Name(q.admin()), After: s.limit}
		}
	}
	return nil
}

// outstanding is how many commands are on the queue.
func (q *queue) outstanding() int { return len(q.slots) - len(q.free) + q.waiting.len }

// cmdList is a list of commands.
type cmdList struct {
	head, tail *Command
	len        int
}

func (l *cmdList) pushBack(c *Command) {
	l.len++
	c.prev, c.next = l.tail, nil
	if l.tail == nil {
		l.head = c
	} else {
		l.tail.next = c
	}
	l.tail = c
}

func (l *cmdList) remove(c *Command) {
	l.len--
	if c.prev == nil {
		l.head = c.next
	} else {
		c.prev.next = c.next
	}
	if c.next == nil {
		l.tail = c.prev
	} else {
		c.next.prev = c.prev
	}
	c.prev, c.next = nil, nil
}

// slotList is a list of slots, each of which is in one list at most.
type slotList struct{ head, tail *slot }

func (l *slotList) pushBack(s *slot) {
	s.list, s.prev, s.next = l, l.tail, nil
	if l.tail == nil {
		l.head = s
	} else {
		l.tail.next = s
	}
	l.tail = s
}

// unlink takes s out of the list that it is in, if any.
func (s *slot) unlink() {
	l := s.list
	if l == nil {
		return
	}
	if s.prev == nil {
		l.head = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		l.tail = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.list, s.prev, s.next = nil, nil, nil
}
