package nvmetcp

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// State is what a Controller is doing.
type State int32

// The states of a Controller.
const (
	StateLive       State = iota // commands are sent
	StateResetting               // the connections are closed, what was outstanding is being ended
	StateConnecting              // being connected again; may come back soon
	StateFailing                 // the same for longer than Config.FastFail: what waits for it had better not
	StateDead                    // closed, or given up
)

var stateNames = [...]string{"live", "resetting", "connecting", "failing", "dead"}

func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return "unknown"
	}
	return stateNames[s]
}

// Command is one command for an I/O queue. From Start until Done it and Data belong to the Controller.
//
// A Command may be used again, also from its own Done.
type Command struct {
	Op     wire.Opcode // Read, Write, Compare, WriteZeroes or Flush; others by Raw
	NSID   uint32
	SLBA   uint64 // first block; not of Flush
	Blocks uint32 // 1 to 65536; not of Flush
	FUA    bool   // of Write and WriteZeroes: stable when it is done
	// Raw is used instead of all these, if not nil: any other command, as package wire makes it. Its CID and SGL are set here.
	Raw *wire.Command
	// Data is the destination of what reads and the source of what writes, in whole dwords and no longer than
	// Limits.MaxTransfer; of Read and Write, all their blocks.
	Data []byte
	// Association is the only one that the command may be sent on, as Info has it: for who has looked at what is behind it. 0: any.
	Association uint64
	Done        func(*Command) // called exactly once, from any goroutine; must be short and not block

	// Set before Done.
	Status wire.Status // the controller's answer, if there was one
	Result uint64      // DW0 and DW1 of the answer
	// Err is nil if the command succeeded. Else it is a *StatusError, a *DigestError or a *PathError, context.Canceled after
	// Detach, ErrClosed, or a *RequestError.
	Err error

	home atomic.Pointer[queue] // that has the command; changed with its mu
	inner
}

// Limits is what the connected controller takes. It may change with each association.
type Limits struct {
	MaxTransfer int   // most bytes of data of one command
	MaxBlocks   int   // most blocks of one command
	MaxZeroes   int64 // most bytes of one Write Zeroes
	Inline      int   // most bytes written that go with the command, without another round trip
	Queues      int   // I/O queues
	Depth       int   // commands in flight on each
}

// Span is how many of n blocks from slba on, at least one, go into one command of namespace ns: no more than can be moved at
// once, and none beyond the next boundary that the namespace does not like to be crossed (NOIOB).
func (l Limits) Span(ns *wire.Namespace, slba, n uint64) uint32 {
	n = min(n, uint64(l.MaxBlocks), max(uint64(l.MaxTransfer)>>ns.BlockShift, 1))
	if b := uint64(ns.NOIOB); b > 0 {
		n = min(n, b-slba%b)
	}
	return uint32(n)
}

// Controller is the connection to one NVMe/TCP controller, which is made again when it is lost. Its methods may be called
// from any goroutine.
type Controller struct {
	cfg       Config
	ctx       context.Context
	cancel    context.CancelCauseFunc
	wg        sync.WaitGroup
	establish func(context.Context) (*association, error) // connect, but for tests
	farewell  func(*association)                          // association.close, but for tests

	live  atomic.Pointer[association] // nil unless commands can be sent
	info  atomic.Pointer[Info]
	made  atomic.Uint64 // associations
	state atomic.Int32

	turn sync.Mutex // held while OnState runs, so that it is told one state after the other

	wake chan struct{} // there are events

	mu     sync.Mutex // a leaf
	events []event
	totals totals
}

// Connect connects to the controller that cfg names and brings it up. ctx bounds that alone.
//
// Its errors name the address and the NQN and say what to do; an *[ConnectError] tells whether trying again can help.
func Connect(ctx context.Context, cfg Config) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := newController(cfg)
	a, err := c.establish(ctx)
	if err != nil {
		c.cancel(ErrClosed)
		return nil, err
	}
	c.cfg.Log.Info("connected to NVMe controller", c.attrs("cntlid", a.info.Controller.CntlID, "queues", len(a.io))...)
	c.wg.Add(2)
	go c.run(a)
	go c.tell()
	return c, nil
}

func newController(cfg Config) *Controller {
	c := &Controller{cfg: cfg, wake: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.establish, c.farewell = c.connect, (*association).close
	return c
}

// attrs are args behind those that every log line has.
func (c *Controller) attrs(args ...any) []any {
	return append([]any{"address", c.cfg.Addr, "nqn", c.cfg.SubsysNQN}, args...)
}

// State is what the Controller is doing now.
func (c *Controller) State() State { return State(c.state.Load()) }

// Info is what is known of the controller, as of the latest association.
func (c *Controller) Info() *Info { return c.info.Load() }

// Limits is what the controller takes, as of the latest association.
func (c *Controller) Limits() Limits { return c.info.Load().Limits }

// Start queues cmd and returns at once, without any I/O; it goes out at the next Flush or before. cmd.Done is called
// exactly once, whatever happens, never from within Start and never with a lock held.
//
// While the Controller is not live cmd ends with a *[PathError]: who has other paths can use them.
func (c *Controller) Start(cmd *Command) {
	a := c.live.Load()
	var err error
	if a == nil || cmd.Association != 0 && cmd.Association != a.info.Association {
		err = c.noPath()
	} else {
		err = a.start(cmd)
	}
	if err != nil {
		cmd.Status, cmd.Result, cmd.Err = 0, 0, err
		go cmd.Done(cmd) // not here: the caller may hold what Done wants
	}
}

// Flush sends what was started. It writes as much as the sockets take and does not wait for more.
func (c *Controller) Flush() {
	if a := c.live.Load(); a != nil {
		a.flush()
	}
}

// Detach takes cmd.Data away from the Controller: when it returns, that is not touched any more. A command that writes
// nothing to the namespace ends with context.Canceled, by calling Done before Detach returns; one that does goes on, from a
// private copy. If cmd ends meanwhile by itself, its Done may still be running when Detach returns. The caller must not
// start cmd again before Detach has returned.
func (c *Controller) Detach(cmd *Command) {
	if q := cmd.home.Load(); q != nil {
		q.detach(cmd)
	}
}

// Do starts cmd, whose Done it sets, and waits for its end. If ctx ends first it is detached; a command that writes
// then goes on, and the error is that of ctx.
func (c *Controller) Do(ctx context.Context, cmd *Command) error {
	ended := make(chan struct{})
	cmd.Done = func(*Command) { close(ended) }
	c.Start(cmd)
	c.Flush()
	select {
	case <-ended:
		return cmd.Err
	case <-ctx.Done():
	}
	c.Detach(cmd)
	return ctx.Err()
}

// Reset closes all connections, ends what is outstanding with a *[PathError] and connects again: at once, if it has not just
// done so. A Controller that
// is not live is left as it is.
func (c *Controller) Reset(reason string) {
	if a := c.live.Load(); a != nil {
		a.fail(&resetError{reason})
	}
}

// Close ends everything outstanding with ErrClosed, shuts the controller down if that is quick, and waits until the
// connections are gone. It must not be called from Done, OnState or OnEvent. Whether a write that ends so has been
// or will be carried out is not known.
func (c *Controller) Close() error {
	c.cancel(ErrClosed)
	c.live.Store(nil)
	c.wg.Wait()
	return nil
}

// noPath is why nothing can be sent while there is no association.
func (c *Controller) noPath() error {
	if c.ctx.Err() != nil {
		return ErrClosed
	}
	s := c.State()
	if s == StateLive {
		s = StateResetting // as it is about to be
	}
	return &PathError{Addr: c.cfg.Addr, NQN: c.cfg.SubsysNQN, State: s, Err: c.lastError()}
}

// lost records the end of an association.
func (c *Controller) lost(cause error) {
	c.cfg.Log.Warn("NVMe controller lost, connecting again", c.attrs("error", cause)...)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.totals.since, c.totals.err = time.Now(), cause
	c.totals.losses++
}

// failedAgain records a failed attempt to connect.
func (c *Controller) failedAgain(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.totals.err = err
	c.totals.attempts++
}

// regained records that there is an association again.
func (c *Controller) regained(after time.Duration) {
	c.cfg.Log.Info("connected to NVMe controller again", c.attrs("after", after.Round(time.Millisecond))...)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.totals.since, c.totals.err, c.totals.attempts = time.Time{}, nil, 0
}

// giveUp records that there will be no further attempt.
func (c *Controller) giveUp(err error) {
	if err == ErrClosed {
		return
	}
	c.cfg.Log.Error("NVMe controller given up", c.attrs("error", err)...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.totals.err == nil || err != errControllerLoss {
		c.totals.err = err
	}
}

func (c *Controller) lastError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.totals.err
}
