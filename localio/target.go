package localio

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/localio"
)

// Remote is the target that is wrapped: it does everything by RPC. Its methods are those of package dataplane's Target,
// Epocher, Refuser, Stopper and Sparser, and it never calls a Done from within Start.
type Remote interface {
	Start(op *layout.Op)
	Flush()
	Detach(op *layout.Op)
	Limits() (rsize, wsize int)
	Close() error
	Epoch() uint64
	Refused() bool
	Stopping() bool
	Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, keepSize bool) error
	Deallocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64) error
	Seek(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, hole bool) (at int64, found bool, err error)
}

// Config says where a data server is and what to do at it.
type Config struct {
	Name     string           // for messages
	Addrs    []netip.AddrPort // of the data server; SetAddrs tells of others
	TLS      *rpctls.Client   // nil: none
	ReadOnly bool             // writes go by RPC
	Dir      string           // where brokers have their sockets; empty: wire.Dir
	Files    int              // most files kept open, if the share of descriptors allows so many; 0: DefaultFiles
	Idle     time.Duration    // for how long one is that is not used, or up to twice that; 0: DefaultIdle
	Patience layout.Patience  // for how long the file system may have a request, see leave; zero: for ever
	Export   *Export          // if it is none of weft's; nil: then all goes by RPC
	Log      *slog.Logger     // nil: slog.Default()
}

// DefaultFiles is for how many data files descriptors are kept, and DefaultIdle for how long they are that nobody uses, at least.
const (
	DefaultFiles = 1024
	DefaultIdle  = time.Minute
)

const (
	// openTime is how long a request waits for descriptors, and refuseTime for how long a refusal counts.
	openTime   = time.Second
	refuseTime = 30 * time.Second
	// relieveTime is how often who waits for a request looks whether the one who could end it waits, too.
	relieveTime = 5 * time.Millisecond
	// small is the largest request, in bytes, that is done by the caller: another goroutine would cost more. smallOnDisk is that
	// where it may turn out that not all of it is in memory.
	small       = 4 << 20
	smallOnDisk = 128 << 10
	// maxHere is how many at a time.
	maxHere = 16
	// easeFiles is how many unused files are closed at a time to make room, and how many of them a session syncs at a
	// time.
	easeFiles = 16
)

// Pauses between attempts to get a session.
const (
	minPause = 100 * time.Millisecond
	maxPause = 10 * time.Minute
	lookTime = time.Second // how often it is looked whether the wrapped target has a new connection
)

// Target is a data server, which may be on this host. Its methods may be called from any goroutine.
type Target struct {
	Remote
	cfg    Config
	cancel context.CancelFunc
	tasks  sync.WaitGroup // what looks for sessions, and requests that are under way
	first  chan struct{}  // closed after the first attempt
	local  atomic.Uint64  // requests done by descriptors
	remote atomic.Uint64  // and by RPC
	live   atomic.Bool    // there is a session
	called atomic.Bool    // Remote was given requests since its last Flush
	here   atomic.Int32   // tasks that are done by callers of Flush
	stuck  atomic.Int32   // tasks that were left and that the file system still has

	current atomic.Pointer[session] // the same as session

	ringMu   sync.Mutex           // held to make it
	ring     atomic.Pointer[ring] // nil: there is none, perhaps not yet
	ringless atomic.Bool          // nor will there be one

	unregister func() // takes it off those that give descriptors back

	mu      sync.Mutex
	session *session // nil: there is none
	since   time.Time
	why     error            // there is none
	addrs   []netip.AddrPort // of the data server
	closed  bool
	begun   []*task // not flushed, from next on
	next    int
	tasksOf map[*layout.Op]*task
	spares  []*task

	sweeping bool // a timer is going to call sweep

	kept   uint64      // see token
	salts  sync.Map    // from nfs3.FileHandle to layout.Verifier, see spoil
	spoilt atomic.Bool // there are some
}

// task is a request that goes by descriptors, or is to. Guarded by Target.mu.
type task struct {
	op      *layout.Op // nil: it has been taken away
	own     *layout.Op // what is done in place of op, see separate; nil: op is
	file    *file
	busy    bool          // somebody is at it
	since   time.Time     // when that began
	wanted  bool          // its memory is
	over    chan struct{} // closed when nobody is at it any more, if that is wanted
	overdue bool          // Op.Overdue was called
	stuck   bool          // it counts in Target.stuck
}

// maxSpares is how many tasks are kept for reuse.
const maxSpares = 1024

// New returns a Target around remote, which it closes when it is closed, and begins to look for the server's broker.
func New(cfg Config, remote Remote) *Target {
	if cfg.Dir == "" {
		cfg.Dir = wire.Dir
	}
	if cfg.Files == 0 {
		cfg.Files = DefaultFiles
	}
	if cfg.Idle == 0 {
		cfg.Idle = DefaultIdle
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &Target{
		Remote: remote, cfg: cfg, addrs: cfg.Addrs, cancel: cancel, first: make(chan struct{}), tasksOf: map[*layout.Op]*task{},
		since: time.Now(), why: errors.New("the data server has not been asked yet"), kept: rand.Uint64() | 1,
	}
	t.unregister = descriptors.OnShortage(t.giveBack)
	t.tasks.Go(func() { t.keep(ctx) }) // ends with ctx
	return t
}

// SetAddrs tells at which addresses the data server is now. It is looked for there when there is no session the next
// time, which is soon after Remote has connected to it.
func (t *Target) SetAddrs(addrs []netip.AddrPort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.addrs = addrs
}

// bound is for how many files descriptors may be held now, at two for each. most is for how many they are kept, which
// leaves room for files that are being lent or closed.
func (t *Target) bound() int { return max(1, descriptors.Lent.Part()/2) }
func (t *Target) most() int  { return min(t.cfg.Files, max(1, t.bound()*3/4)) }

// giveBack closes all files that nobody uses, and returns how many descriptors they had at least.
func (t *Target) giveBack() int {
	if s := t.current.Load(); s != nil {
		return s.giveBack(math.MaxInt)
	}
	return 0
}

// keep gets sessions, one after the other.
func (t *Target) keep(ctx context.Context) {
	pause, asked := minPause, false
	for ctx.Err() == nil {
		epoch := t.Remote.Epoch()
		s, err := t.prove(ctx)
		if errors.Is(err, errForeign) && t.cfg.Export != nil {
			s, err = t.statement(ctx)
		}
		if err == nil {
			pause = minPause
			t.begin(s)
			if !asked {
				close(t.first)
			}
			err = s.serve(ctx)
		}
		t.lost(s, err)
		if s == nil && !asked {
			close(t.first)
		}
		asked = true
		if none := (*errNoBroker)(nil); errors.As(err, &none) {
			pause = maxPause
		}
		if descriptors.Short(err) {
			pause = lookTime
		}
		if t.rest(ctx, pause, epoch) {
			pause = minPause
		} else {
			pause = min(2*pause, maxPause)
		}
	}
}

// rest waits. It reports whether it was cut short because Remote has made a connection since its epoch was this one.
func (t *Target) rest(ctx context.Context, d time.Duration, epoch uint64) bool {
	for ; ; d -= lookTime {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(min(d, lookTime)):
		}
		if d <= lookTime {
			return false
		}
		if t.Remote.Epoch() != epoch {
			return true
		}
	}
}

// begin puts a session to use. From now on the Target has a part of the share of lent descriptors.
func (t *Target) begin(s *session) {
	descriptors.Lent.Join()
	t.mu.Lock()
	t.session, t.since, t.why = s, time.Now(), nil
	t.current.Store(s)
	t.live.Store(true)
	t.mu.Unlock()
	t.cfg.Log.Info("the data server is on this host: its files are read and written without it", "device", t.cfg.Name, "read_only", s.readOnly)
}

// lost ends a session, if there was one, and notes why there is none.
func (t *Target) lost(s *session, err error) {
	t.mu.Lock()
	t.live.Store(false)
	t.session = nil
	t.current.Store(nil)
	known := t.why != nil && t.why.Error() == err.Error()
	if !known {
		t.since, t.why = time.Now(), err
	}
	closed := t.closed
	t.mu.Unlock()
	if s != nil {
		s.end()
		descriptors.Lent.Leave()
	}
	if !known && !closed {
		t.cfg.Log.Info("the data server is reached by RPC", "device", t.cfg.Name, "because", err)
	}
}

// Status is how a Target reaches its data server.
type Status struct {
	Local       bool
	Because     string    // not Local
	ReadOnly    string    // why writes go by RPC though it is Local; empty: they do not
	Since       time.Time // of the one or the other
	OpsLocal    uint64    // requests done by descriptors
	OpsRPC      uint64    // and by RPC
	Descriptors int       // data files that are open
}

// Status waits until it has been tried to reach the data server otherwise than by RPC, or ctx ends.
func (t *Target) Status(ctx context.Context) Status {
	select {
	case <-t.first:
	case <-ctx.Done():
	}
	st := Status{OpsLocal: t.local.Load(), OpsRPC: t.remote.Load()}
	t.mu.Lock()
	defer t.mu.Unlock()
	st.Since = t.since
	if t.session == nil {
		st.Because = t.why.Error()
		return st
	}
	st.Local, st.ReadOnly, st.Descriptors = true, t.session.readOnly, t.session.recent.Len()
	if t.cfg.ReadOnly {
		st.ReadOnly = "it was mounted with localio=ro"
	}
	return st
}

// Near reports whether the data server is on this host.
func (t *Target) Near() bool { return t.live.Load() }

// Quick does op at once if its data file is open and that takes no longer than to have another goroutine do it. It reports whether
// it has; then Done is not called.
func (t *Target) Quick(op *layout.Op) bool {
	s := t.current.Load()
	if s == nil || !t.live.Load() || !s.quick(op) || !t.suits(op) {
		return false
	}
	f := s.recall(op)
	if f == nil || !f.acquire() {
		return false
	}
	defer f.release()
	if op.Kind == layout.OpCommit {
		f.dirty.Store(false)
	}
	if err := f.do(op, true); err != nil {
		if err != errWaits {
			t.mu.Lock()
			t.failed(f, op, err)
			t.mu.Unlock()
		}
		return false
	}
	if op.Kind == layout.OpWrite {
		f.dirty.Store(true)
	}
	t.local.Add(1)
	return true
}

// Start queues op and returns at once; Flush does it. See package dataplane's Target.
func (t *Target) Start(op *layout.Op) {
	if !t.live.Load() || !t.suits(op) {
		t.byRPC(op)
		return
	}
	t.mu.Lock()
	if t.session == nil || t.closed {
		t.mu.Unlock()
		t.byRPC(op)
		return
	}
	k := t.take()
	k.op = op
	t.tasksOf[op] = k
	t.begun = append(t.begun, k)
	t.mu.Unlock()
}

// suits reports whether op may go by descriptors. What is malformed Remote refuses.
func (t *Target) suits(op *layout.Op) bool {
	switch op.Kind {
	case layout.OpRead:
	case layout.OpWrite, layout.OpCommit:
		if t.cfg.ReadOnly {
			return false
		}
	default:
		return false
	}
	rsize, wsize := t.Remote.Limits()
	return t.stuck.Load() == 0 && op.Off >= 0 && op.Off+int64(len(op.Data)) >= op.Off && op.Count >= 0 && len(op.Data) <= min(rsize, wsize) &&
		(len(op.Data) > 0) == (op.Kind != layout.OpCommit) && op.File != nil && len(op.File.Handles) > 0
}

func (t *Target) byRPC(op *layout.Op) {
	t.remote.Add(1)
	op.Kept = 0
	if op.Kind == layout.OpCommit || t.spoilt.Load() {
		t.saltLater(op)
	}
	t.Remote.Start(op)
	t.called.Store(true) // not before: another Flush would take it away
}

// take returns a task. mu is held.
func (t *Target) take() *task {
	n := len(t.spares)
	if n == 0 {
		return new(task)
	}
	k := t.spares[n-1]
	t.spares = t.spares[:n-1]
	return k
}

// give takes a task back that nobody has any more. mu is held.
func (t *Target) give(k *task) {
	if k.stuck {
		t.stuck.Add(-1)
	}
	*k = task{}
	if len(t.spares) < maxSpares {
		t.spares = append(t.spares, k)
	}
}

// Flush does what was started, or has it done if that may take time.
func (t *Target) Flush() {
	begun := false
	for {
		t.mu.Lock()
		k := t.pop()
		if k == nil {
			t.mu.Unlock()
			break
		}
		f, ask := t.find(k.op)
		if f == nil {
			t.hand(k)
			continue
		}
		if f.state == open && f.acquire() {
			t.beginTask(k, f)
		}
		t.tasks.Add(1)
		t.mu.Unlock()
		if begun && k.file != nil && f.session.quick(k.op) {
			t.ring.Load().flush() // a Done may wait for what is in there
			begun = false
		}
		if k.file != nil && f.session.quick(k.op) && t.atOnce(k) {
			t.tasks.Done()
			continue
		}
		if k.file != nil && !t.separate(k) {
			t.tasks.Done()
			continue
		}
		if k.file != nil && t.queued(k) {
			begun = true
			continue
		}
		go func() { // ends with the request
			defer t.tasks.Done()
			if ask != nil {
				f.session.send(ask)
			}
			if t.await(k, f) && (k.own != nil || t.separate(k)) {
				t.perform(k, false)
			}
		}()
	}
	if begun {
		t.ring.Load().flush()
	}
	if t.called.Load() && t.called.Swap(false) {
		t.Remote.Flush()
	}
}

// atOnce does a task here and now, unless it would wait, or too many are at that: a Done may start the next request, and so on.
func (t *Target) atOnce(k *task) bool {
	defer t.here.Add(-1)
	return t.here.Add(1) <= maxHere && t.perform(k, true)
}

// pop returns the next task that was begun. mu is held.
func (t *Target) pop() *task {
	for t.next < len(t.begun) {
		k := t.begun[t.next]
		t.begun[t.next] = nil
		t.next++
		if k.op != nil {
			return k
		}
		t.give(k)
	}
	t.begun, t.next = t.begun[:0], 0
	return nil
}

// beginTask makes f, which was acquired, the file of a task that somebody is at from now on. mu is held.
func (t *Target) beginTask(k *task, f *file) {
	k.file, k.busy = f, true
	if t.cfg.Patience.Time > 0 {
		k.since = time.Now()
		t.sweepLater()
	}
	if k.op.Kind == layout.OpCommit {
		f.dirty.Store(false)
	}
	f.session.remember(k.op, f)
}

// find returns the file for op, open or on its way; nil if op goes by RPC. ask, if not nil, is to be sent to have it lent. mu is held.
func (t *Target) find(op *layout.Op) (f *file, ask *wire.Open) {
	s := t.session
	if s == nil {
		return nil, nil
	}
	fh, err := nfs3.NewFileHandle(op.File.Handles[0])
	if err != nil {
		return nil, nil
	}
	f, write := s.lookup(key{fh, op.File.Cred, true}), true
	if op.Kind == layout.OpCommit && (f == nil || f.state != open) {
		return nil, nil // nothing was written by it
	}
	if op.Kind == layout.OpRead && (f == nil || f.state != open) {
		f, write = s.lookup(key{fh, op.File.Cred, false}), false
	}
	switch {
	case f == nil && (write && s.readOnly != "" || s.full()):
		return nil, nil
	case f == nil:
		return s.ask(key{fh, op.File.Cred, write})
	case f.state == refused:
		return nil, nil
	}
	return f, nil
}

// await waits until k's file is open. Otherwise k goes by RPC.
func (t *Target) await(k *task, f *file) bool {
	if k.file != nil {
		return true
	}
	late := time.NewTimer(openTime)
	select {
	case <-f.known:
	case <-late.C:
	}
	late.Stop()
	t.mu.Lock()
	switch {
	case k.op == nil:
		t.give(k)
		t.mu.Unlock()
		return false
	case f.state != open || !f.acquire():
		t.hand(k)
		t.Remote.Flush()
		return false
	}
	t.beginTask(k, f)
	t.mu.Unlock()
	return true
}

// hand gives a task to Remote. mu is held; hand releases it.
func (t *Target) hand(k *task) {
	op := k.op
	delete(t.tasksOf, op)
	over := k.over
	unwanted := k.wanted && op.Kind != layout.OpWrite
	if k.wanted && !unwanted {
		op.Data = append([]byte(nil), op.Data...)
	}
	t.give(k)
	if !unwanted {
		// With mu held, so that whoever does not find the task finds the request there.
		t.byRPC(op)
	}
	t.mu.Unlock()
	if over != nil {
		close(over)
	}
	if unwanted {
		cancelled(op)
	}
}

// perform does a task by its file. With now it does so only if that does not wait, and reports whether it did.
func (t *Target) perform(k *task, now bool) bool {
	err := k.file.do(k.work(), now)
	if err == errWaits {
		return false
	}
	t.finish(k, err)
	return true
}

// finish ends a task that somebody is at. After an error it goes by RPC.
func (t *Target) finish(k *task, err error) {
	f := k.file
	if !t.rejoin(k, err) {
		f.release()
		return
	}
	op := k.op
	if err == nil {
		t.settle(k)
		op.Done(op)
	} else {
		t.mu.Lock()
		t.failed(f, op, err)
		k.file = nil
		t.hand(k)
		t.Remote.Flush()
	}
	f.release()
}

// settle ends a task that has worked, but for Done and the use of its file.
func (t *Target) settle(k *task) {
	op := k.op
	t.mu.Lock()
	if op.Kind == layout.OpWrite && op.Committed == layout.Unstable {
		k.file.dirty.Store(true)
	}
	delete(t.tasksOf, op)
	over := k.over
	t.give(k)
	t.mu.Unlock()
	if over != nil {
		close(over)
	}
	t.local.Add(1)
}

// failed takes in that op could not be done by f, which the caller uses. mu is held.
func (t *Target) failed(f *file, op *layout.Op, err error) {
	lost := (*syncError)(nil) // after which the descriptor is of no use
	full := !errors.As(err, &lost) && (errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT))
	if f.state == open && (op.Kind != layout.OpRead && !full || err == errGone) {
		f.retire() // the last one that uses it closes it
	}
}

// Detach takes op.Data away. If the file system is at it, Detach waits for that, unless the request has Leave set or is
// a COMMIT.
func (t *Target) Detach(op *layout.Op) {
	t.mu.Lock()
	k := t.tasksOf[op]
	switch {
	case k == nil:
		t.mu.Unlock()
		t.Remote.Detach(op)
	case k.own != nil && op.Kind == layout.OpWrite:
		k.wanted = true // and given back already
		t.leaveSoon(k)
		t.mu.Unlock()
	case k.own != nil:
		t.takeAway(op, k)
		t.leaveSoon(k)
		t.mu.Unlock()
		cancelled(op)
	case k.busy:
		k.wanted = true
		if k.over == nil {
			k.over = make(chan struct{})
		}
		over := k.over
		t.mu.Unlock()
		t.awaitOver(over)
	case op.Kind == layout.OpWrite:
		op.Data = append([]byte(nil), op.Data...)
		t.mu.Unlock()
	default:
		t.takeAway(op, k)
		t.mu.Unlock()
		cancelled(op)
	}
}

// takeAway takes its op from a task; whoever comes to that finds none. mu is held.
func (t *Target) takeAway(op *layout.Op, k *task) {
	delete(t.tasksOf, op)
	k.op = nil
}

// cancelled ends an op that was detached.
func cancelled(op *layout.Op) {
	op.N, op.EOF, op.Err = 0, false, context.Canceled
	op.Done(op)
}

// awaitOver waits until nobody is at a request any more. Those who call Dones may be waiting for who calls it.
func (t *Target) awaitOver(over <-chan struct{}) {
	tick := time.NewTicker(relieveTime)
	defer tick.Stop()
	for {
		if r := t.ring.Load(); r != nil {
			r.relieve()
		}
		select {
		case <-over:
			return
		case <-tick.C:
		}
	}
}

// Close ends the session, waits for what is under way, and closes Remote, which ends the rest.
func (t *Target) Close() error {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.cancel()
	t.Flush()
	t.tasks.Wait()
	t.unregister()
	if r := t.ring.Load(); r != nil {
		r.close()
	}
	return t.Remote.Close()
}
