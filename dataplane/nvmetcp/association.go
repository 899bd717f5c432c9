package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// abort closes a connection at once. What was not sent yet is thrown away, and cannot arrive later.
func abort(nc net.Conn) {
	if tcp, ok := nc.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	nc.Close()
}

// setUserTimeout makes the kernel give up a connection whose bytes are not acknowledged for as long as we would wait for an answer.
func setUserTimeout(raw syscall.RawConn, d time.Duration) error {
	return raw.Control(func(fd uintptr) {
		// A refinement: without it the commands' own time-outs end the connection.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
}

// association is the connections to a controller from Connect to their common end: losing any of them ends all.
type association struct {
	c     *Controller
	began time.Time
	info  *Info
	admin *queue
	io    []*queue
	wg    sync.WaitGroup // of the goroutines that use the connections
	room  chan struct{}  // a token for each admin command of a caller, from do until its slot is free
	down  chan struct{}  // closed when it has failed

	tended  atomic.Bool // tend looks after the commands' time-outs
	alive   keepAlive   // of tend
	beat    Command     // Keep Alive
	beating atomic.Bool

	transactions atomic.Uint32 // of authentication
	counted      atomic.Int32  // connections, in descriptors.Dialed

	mu     sync.Mutex
	queues []*queue
	err    error     // why it failed
	closed time.Time // when all its connections were closed
}

func newAssociation(c *Controller) *association {
	return &association{c: c, began: time.Now(), down: make(chan struct{}), room: make(chan struct{}, adminCommands)}
}

// now is the time since the association began.
func (a *association) now() time.Duration { return time.Since(a.began) }

// add makes the queue part of the association and starts the goroutine that reads it, which ends with the connection.
func (a *association) add(q *queue) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		abort(q.nc)
		return a.err
	}
	a.queues = append(a.queues, q)
	a.wg.Add(1)
	go q.read()
	return nil
}

// start puts cmd on a queue.
func (a *association) start(cmd *Command) error {
	if err := a.check(cmd); err != nil {
		return &RequestError{Op: cmd.name(), Err: err}
	}
	cmd.data, cmd.limit = cmd.Data, a.c.cfg.IOTimeout
	if !a.pick(cmd.cost()).start(cmd) {
		return a.c.noPath()
	}
	return nil
}

// check tells what is wrong with cmd, as far as that can be known here.
func (a *association) check(cmd *Command) error {
	n := len(cmd.Data)
	limits := &a.info.Limits
	sqe := cmd.encode()
	dir := sqe.Direction()
	switch {
	case len(a.io) == 0:
		return errors.New("the controller has no I/O queues")
	case n > limits.MaxTransfer:
		return fmt.Errorf("%d bytes of data, the controller takes %d", n, limits.MaxTransfer)
	case n%4 != 0:
		return fmt.Errorf("%d bytes of data, want whole dwords", n)
	case n > 0 && dir != wire.ToController && dir != wire.ToHost:
		return errors.New("data for a command that has none")
	case cmd.Raw == nil && !cmd.ranged() && cmd.Op != wire.OpFlush:
		return errors.New("want Read, Write, Compare, Write Zeroes or Flush, or the command as Raw")
	case !cmd.ranged():
		return nil
	case cmd.Blocks == 0 || cmd.Blocks > uint32(limits.MaxBlocks):
		return fmt.Errorf("%d blocks, want 1 to %d", cmd.Blocks, limits.MaxBlocks)
	case cmd.Op != wire.OpWriteZeroes && (n == 0 || n%int(cmd.Blocks) != 0):
		return fmt.Errorf("%d bytes of data for %d blocks", n, cmd.Blocks)
	case cmd.SLBA+uint64(cmd.Blocks) < cmd.SLBA:
		return fmt.Errorf("%d blocks at %d", cmd.Blocks, cmd.SLBA)
	}
	return nil
}

// pick returns the queue on which a command that costs so much has to wait least. For small ones queues with little to do are
// alike: those that are started together go out together then.
func (a *association) pick(cost int64) *queue {
	grain := int64(1)
	if cost < company {
		grain = company
	}
	best, least := a.io[0], a.io[0].cost.Load()/grain
	for _, q := range a.io[1:] {
		if least == 0 {
			break
		}
		if n := q.cost.Load() / grain; n < least {
			best, least = q, n
		}
	}
	return best
}

func (a *association) flush() {
	for _, q := range a.io {
		q.flush()
	}
}

// fail ends the association for the given reason: no connection of it is used any more. Of several calls the first counts.
// No lock may be held.
func (a *association) fail(err error) {
	a.mu.Lock()
	if a.err != nil {
		a.mu.Unlock()
		return
	}
	a.err = err
	queues := a.queues
	a.mu.Unlock()
	a.c.live.CompareAndSwap(a, nil)
	for _, q := range queues {
		q.kill()
	}
	a.mu.Lock()
	a.closed = time.Now()
	a.mu.Unlock()
	close(a.down)
}

// stop ends all commands of an association that has failed, and returns why that was.
func (a *association) stop() error {
	<-a.down // if another one is just ending it: then it is known when the connections were closed
	a.wg.Wait()
	a.uncount()
	a.c.live.CompareAndSwap(a, nil) // it may have come to that after it failed
	sent, unsent := a.lost()
	for _, q := range a.all() {
		a.c.account(q)
		for _, cmd := range q.orphans(sent, unsent) {
			cmd.Done(cmd)
		}
	}
	return a.cause()
}

// lost is what the commands of an association that has failed end with: those that were sent and those that were not.
func (a *association) lost() (sent, unsent error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if errors.Is(a.err, ErrClosed) {
		return a.err, a.err
	}
	cfg := &a.c.cfg
	u := &PathError{Addr: cfg.Addr, NQN: cfg.SubsysNQN, State: StateResetting, Err: a.err}
	s := *u
	s.Sent = true
	if a.info != nil && a.info.KATO > 0 {
		s.Gone = a.closed.Add(a.info.lingers())
	}
	return &s, u
}

// call runs a command of our own on q and waits for its answer, for limit at most. If ctx ends first the command is let go of.
func (a *association) call(ctx context.Context, q *queue, sqe *wire.Command, data []byte, limit time.Duration) (wire.Completion, error) {
	return a.run(ctx, q, &Command{Raw: sqe, Data: data}, limit)
}

// run is call of a command of which Raw and Data are set.
func (a *association) run(ctx context.Context, q *queue, cmd *Command, limit time.Duration) (wire.Completion, error) {
	sqe, data := cmd.Raw, cmd.Data
	if !a.tended.Load() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, &TimeoutError{Op: sqe.Name(q.admin()), After: limit})
		defer cancel()
	}
	ended := make(chan struct{})
	cmd.NSID, cmd.Done = sqe.NSID, func(*Command) { close(ended) }
	if sqe.Opcode == wire.OpFabrics {
		cmd.NSID = 0 // it is the type there
	}
	cmd.data, cmd.limit, cmd.own = data, limit, true
	if !q.start(cmd) {
		return wire.Completion{}, a.cause()
	}
	q.flush()
	var err error
	select {
	case <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-a.down:
		err = a.cause()
	}
	if err != nil {
		q.detach(cmd)
		<-ended
		if errors.Is(cmd.Err, context.Canceled) {
			return wire.Completion{}, err
		}
	}
	return wire.Completion{Result: cmd.Result, Status: cmd.Status}, cmd.Err
}

// cause is why the association failed.
func (a *association) cause() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// statusError is what cmd ends with that was answered with a status other than success.
func (a *association) statusError(q *queue, cmd *Command, sqe *wire.Command, answer *wire.Completion) error {
	err := answer.Err(sqe, q.admin())
	if err == nil {
		return nil
	}
	e := &StatusError{CommandError: err.(*wire.CommandError), NSID: cmd.NSID, SLBA: cmd.SLBA, Blocks: cmd.Blocks, Addr: a.c.cfg.Addr, NQN: a.c.cfg.SubsysNQN}
	if a.info != nil && answer.CRD > 0 {
		e.Delay = a.info.retryDelay(answer.CRD)
	}
	return e
}

// adminCommands is how many admin commands of the callers may be in flight. The admin queue has room for more: events and
// keep-alive always find theirs.
const adminCommands = 16

// maxEvents is how many Asynchronous Event Requests are kept at the controller.
const maxEvents = 4

// do runs an admin command.
func (a *association) do(ctx context.Context, sqe *wire.Command, data []byte) (wire.Completion, error) {
	select {
	case a.room <- struct{}{}:
	case <-ctx.Done():
		return wire.Completion{}, context.Cause(ctx)
	case <-a.down:
		_, unsent := a.lost()
		return wire.Completion{}, unsent
	}
	cmd := &Command{Raw: sqe, Data: data}
	cmd.token = true
	answer, err := a.run(ctx, a.admin, cmd, a.c.cfg.AdminTimeout)
	if err != nil && err == a.cause() {
		err, _ = a.lost()
	}
	return answer, err
}

// keepAlive decides when a Keep Alive is to be sent.
type keepAlive struct {
	every   time.Duration // 0: never
	traffic bool          // any answer since the last time serves as well
	next    time.Duration // when to look, as association.now
	answers uint64        // until the last time
}

// due tells whether to send one now, when so many answers have come, busy if the last one has none.
func (k *keepAlive) due(now time.Duration, answers uint64, busy bool) bool {
	if k.every == 0 || now < k.next || busy {
		return false
	}
	k.next = now + k.every
	heard := answers != k.answers
	k.answers = answers
	return !k.traffic || !heard
}

// keep makes tend send Keep Alives: often enough that one comes before the controller's time is over even if it is late.
func (a *association) keep() {
	if a.info.KATO == 0 {
		return
	}
	a.alive = keepAlive{every: a.info.KATO / 2, traffic: a.info.traffic()}
	if a.alive.traffic {
		a.alive.every = a.info.KATO / 4
	}
	sqe := wire.KeepAlive()
	a.beat.Raw = &sqe
	a.beat.Done = func(cmd *Command) {
		if isStatus(cmd.Err) {
			a.fail(cmd.Err) // it has expired, or is not what we think it is
		}
		a.beating.Store(false)
	}
	a.beat.own = true
}

// tend is the goroutine that looks after the association: that it hears Keep Alives, and that no command waits too long. It ends
// when the association fails.
func (a *association) tend() {
	defer a.wg.Done()
	cfg := &a.c.cfg
	tick := min(cfg.IOTimeout, cfg.AdminTimeout) / 8
	if a.info.KATO > 0 {
		tick = min(tick, a.info.KATO/16)
	}
	tick = max(tick, time.Millisecond)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-a.down:
			return
		}
		now := a.now()
		for _, q := range a.all() {
			if err := q.overdue(now); err != nil {
				a.fail(fmt.Errorf("queue %d: %w", q.id, err))
				return
			}
		}
		if a.alive.due(now, a.answers(), a.beating.Load()) && a.beating.CompareAndSwap(false, true) {
			a.beat.limit = a.info.KATO
			a.admin.start(&a.beat)
			a.admin.flush()
		}
	}
}

// answers is how many answers have come on all queues.
func (a *association) answers() (n uint64) {
	for _, q := range a.all() {
		n += q.answers.Load()
	}
	return n
}

// all is the queues that there are.
func (a *association) all() []*queue {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.queues
}
