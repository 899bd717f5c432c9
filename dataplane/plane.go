package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
)

// Target carries requests to one data server.
//
// Every method may be called from any goroutine, and all but Close also from a Done that the target itself is calling.
type Target interface {
	// Start takes a request. It never blocks and does no I/O; the request goes out at the next Flush or before.
	// op.Done is called exactly once, whatever happens, at the latest when the target is closed.
	Start(op *layout.Op)
	// Flush sends what was started. It does not wait for replies.
	Flush()
	// Detach makes the target let go of op.Data: after it returned the target neither reads nor writes it. A READ ends
	// with context.Canceled unless it has already ended otherwise; so should a COMMIT, whose caller has given up; a WRITE
	// goes on from a private copy. Done is still called, before or after Detach returns. Detach of a request that has
	// ended does nothing. It may wait, but not for the server.
	Detach(op *layout.Op)
	// Limits are the largest READ and WRITE that may be started, in bytes.
	Limits() (rsize, wsize int)
	// Close ends all requests with an error.
	Close() error
}

// Epocher is what a Target also offers if it can tell when its server may have restarted.
type Epocher interface {
	// Epoch is a number that has changed before the first reply of a server instance which may not be the one before:
	// for a target on connections, the number of times that one was made anew. Too many changes cost a COMMIT when
	// uncommitted data is read back; one too few lets such a read return what the server had before the write.
	Epoch() uint64
}

// Nearer is what a Target also offers if its server may be on the same host.
type Nearer interface {
	// Near reports whether it is: then it is read, as long as it works, whatever other copies there are.
	Near() bool
}

// Stopper is what a Target also offers if data servers announce that they stop.
type Stopper interface {
	// Stopping reports whether the server has announced that, and should be back soon: its copies are waited for, for
	// longer than Config.MirrorTimeout.
	Stopping() bool
}

// Keeper is what a Target also offers if its writes may be in the hands of this host's kernel when they are answered.
type Keeper interface {
	// Keeps reports whether UNSTABLE writes will probably be Kept, see layout.Op. Then no copy of them is needed.
	Keeps() bool
}

// Quicker is what a Target also offers if it can do requests while the caller waits.
type Quicker interface {
	// Quick does op, as Start and Flush would, if that takes no longer than to pass it on, and reports whether it has. Then Done is
	// not called; otherwise nothing has happened.
	Quick(op *layout.Op) bool
}

// Refuser is what a Target also offers if it can tell that its server is not there.
type Refuser interface {
	// Refused reports whether the latest attempt to connect was refused, and no connection was made since.
	Refused() bool
}

// Config of a Plane.
type Config struct {
	// Dial makes the target for a device: once per device, or again for the next request after it failed. It is called
	// in a goroutine of its own and may block. The plane closes what it returns.
	Dial func(layout.DeviceID) (Target, error)
	// RetainBytes bounds the memory for unstable data, in bytes. Default 256 MiB.
	RetainBytes int64
	// Patience bounds Commit, as the targets' own does reads and writes. Default: none.
	Patience layout.Patience
	// MirrorTimeout is how long a copy may leave a request unanswered that another copy has answered. Then no request
	// waits for it any longer, until the device answers. A device that has lately been slow with writes gets more
	// time, up to eleven times as much. Default 1 s.
	MirrorTimeout time.Duration
	// OnDown is called when a device is found late or stuck, see Plane.FoundDown. It must not block, nor call the
	// plane. nil = nobody wants to know.
	OnDown func()
	Log    *slog.Logger // default slog.Default()
}

const (
	// maxKept bounds the extents that are retained while writes are not copied, as those take next to no memory.
	maxKept              = 1 << 16
	defaultRetainBytes   = 256 << 20
	defaultMirrorTimeout = time.Second
)

// Validate checks the configuration.
func (c Config) Validate() error {
	if c.Dial == nil {
		return errors.New("data plane: no Dial function")
	}
	if c.RetainBytes < 0 {
		return fmt.Errorf("data plane: RetainBytes is %d", c.RetainBytes)
	}
	if c.MirrorTimeout < 0 {
		return fmt.Errorf("data plane: MirrorTimeout is %v", c.MirrorTimeout)
	}
	return nil
}

// Plane is the data path of one mount.
type Plane struct {
	cfg      Config
	pool     *iobuf.Pool
	pressure chan struct{}
	turn     atomic.Uint32 // round robin among equal mirrors
	extents  atomic.Int64  // retained, of all files
	// unflushed says that a device has requests since its last Flush. It is set after the device's own.
	unflushed atomic.Bool
	hedges    hedgeBudget
	watch     *watch
	devices   atomic.Pointer[map[layout.DeviceID]*device]

	mu     sync.Mutex // guards changes of devices, and closed
	closed bool

	queueMu  sync.Mutex
	queue    []ticket // to be resumed
	spare    []ticket // the slice to use next
	draining bool
}

// New makes a plane. It does no I/O.
func New(cfg Config) (*Plane, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.RetainBytes == 0 {
		cfg.RetainBytes = defaultRetainBytes
	}
	if cfg.MirrorTimeout == 0 {
		cfg.MirrorTimeout = defaultMirrorTimeout
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	pool, err := iobuf.New(cfg.RetainBytes)
	if err != nil {
		return nil, fmt.Errorf("data plane: memory for unstable data: %w", err)
	}
	p := &Plane{cfg: cfg, pool: pool, pressure: make(chan struct{}, 1)}
	p.watch = newWatch(p)
	p.devices.Store(&map[layout.DeviceID]*device{})
	return p, nil
}

// Close closes all targets, which ends every request. Data that is still retained is lost.
func (p *Plane) Close() error {
	p.mu.Lock()
	p.closed = true
	p.watch.timer.Stop()
	devices := *p.devices.Load()
	p.mu.Unlock()
	var errs []error
	for _, d := range devices {
		if c := d.conn.Load(); c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

func (p *Plane) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// Retained is how many bytes of memory hold unstable data, rounded up to pages for each piece.
func (p *Plane) Retained() int64 { return p.pool.Used() }

// RetainLimit is the bound on Retained.
func (p *Plane) RetainLimit() int64 { return p.pool.Limit() }

// Pressure gives a signal while more than half of the memory for unstable data is in use: files should be committed.
func (p *Plane) Pressure() <-chan struct{} { return p.pressure }

// Flush sends what StartRead and StartWrite have queued since the last call. Call it at the end of each batch.
func (p *Plane) Flush() {
	if !p.unflushed.Load() || !p.unflushed.Swap(false) {
		return
	}
	for _, d := range *p.devices.Load() {
		if d.unflushed.Load() && d.unflushed.Swap(false) {
			d.conn.Load().Flush()
		}
	}
}

// Buffer returns n bytes of the memory for unstable data, or nil if it has no more so large. What is written from there
// (Write.Buf) is not copied.
func (p *Plane) Buffer(n int) *iobuf.Buf {
	if n > p.pool.MaxBuf() {
		return nil
	}
	b := p.pool.Get(n)
	if b == nil || p.pool.Used() > p.pool.Limit()/2 {
		select {
		case p.pressure <- struct{}{}:
		default:
		}
	}
	return b
}

// later resumes a waiter soon, from a goroutine. What goes on after a wait may copy a megabyte and start many requests;
// the goroutine that ended the wait, often a target's reader, must not be held up by it.
func (p *Plane) later(t ticket) {
	p.queueMu.Lock()
	defer p.queueMu.Unlock()
	p.queue = append(p.queue, t)
	if !p.draining {
		p.draining = true
		// This goroutine owns the resumption of queued waiters; it ends when there are none.
		go p.drain()
	}
}

func (p *Plane) drain() {
	for {
		p.queueMu.Lock()
		batch := p.queue
		if len(batch) == 0 {
			p.draining = false
			p.queueMu.Unlock()
			return
		}
		p.queue = p.spare
		p.queueMu.Unlock()
		for _, t := range batch {
			t.who.resume(t.gen, nil)
		}
		p.Flush()
		clear(batch)
		p.queueMu.Lock()
		p.spare = batch[:0]
		p.queueMu.Unlock()
	}
}

// patiently runs do, which waits for data servers, with a context that ends when Config.Patience is over.
func (p *Plane) patiently(ctx context.Context, do func(context.Context) error) error {
	limit := p.cfg.Patience
	if limit.Time == 0 {
		return do(ctx)
	}
	soft, cancel := context.WithTimeout(ctx, limit.Time)
	defer cancel()
	err := do(soft)
	if err != nil && soft.Err() != nil && ctx.Err() == nil {
		return limit.Over(err)
	}
	return err
}
