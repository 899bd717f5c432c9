package nvmetcp

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// costPerCommand is what a command counts beside its bytes, so that commands without data are seen too.
const costPerCommand = 4096

// latencyHalf is after how long without a new measurement a path's latency counts half: a path that was slow is tried again.
const latencyHalf = time.Second

// epoch is when clock was 0.
var epoch = time.Now()

// clock is a time that only goes forward, in ns.
func clock() int64 { return int64(time.Since(epoch)) }

// controller is what is needed of a Controller. It is an interface so that tests can play one with a clock of their own.
type controller interface {
	Start(*Command)
	Flush()
	Detach(*Command)
	ActiveNamespaces(context.Context) ([]uint32, error)
	IdentifyNamespace(context.Context, uint32) (*wire.Namespace, error)
	NamespaceDescriptors(context.Context, uint32) (*wire.Descriptors, error)
	GetLogPage(context.Context, wire.GetLogPage, []byte) error
	State() State
	lastError() error // why it is not live, if it is not
	Info() *Info
	Limits() Limits
	Reset(reason string)
	Close() error
}

// link is one connected controller, with what all commands together make of it, whichever namespace they are for.
type link struct {
	m    *member
	ctl  controller
	node int // memory node of the network interface, or -1

	live     atomic.Bool   // connected, and looked at since
	looked   atomic.Uint64 // at this association
	commands atomic.Int64
	cost     atomic.Int64 // bytes, and costPerCommand for each command
	// unflushed says that something was started since the last Flush.
	unflushed atomic.Bool

	// Guarded by member.mu.
	need     need
	suspects need   // the same, when suspicion is over
	epoch    uint64 // counts the associations that were lost

	ana *anaGroups // guarded by Subsystem.mu
}

// lost is why the controller is not live any more.
func (l *link) lost() error {
	if err := l.ctl.lastError(); err != nil {
		return err
	}
	return errors.New("connection lost")
}

// path is one namespace on one link.
type path struct {
	link *link

	class   atomic.Uint32 // by the controller's latest scan and ANA log
	stale   atomic.Bool   // these are known to be wrong, or not known: out until they are read again
	latency atomic.Int64  // smoothed, ns; 0: not known yet
	seen    atomic.Int64  // when latency was measured last, by clock

	served, bytes, failed atomic.Uint64

	// Guarded by Subsystem.mu.
	found  found
	listed uint64 // the association on which the namespace's registration was made, or cannot be
	why    string // it is out; "" if it is not
}

// usable is the path's class at this moment.
func (p *path) usable() class {
	if p.stale.Load() || !p.link.live.Load() {
		return classOut
	}
	return class(p.class.Load())
}

// started and ended keep the account of a command of n bytes.
func (p *path) started(n int) {
	p.link.commands.Add(1)
	p.link.cost.Add(int64(n) + costPerCommand)
}

func (p *path) ended(n int) {
	p.link.commands.Add(-1)
	p.link.cost.Add(-int64(n) - costPerCommand)
}

// measured takes in the latency of one command that ended well at now.
func (p *path) measured(took, now int64) {
	if old := p.expected(now); old == 0 {
		p.latency.Store(max(took, 1))
	} else {
		p.latency.Store(max(old+(took-old)/8, 1)) // two at once may lose one of them: it is an average
	}
	p.seen.Store(now)
}

// expected is the smoothed latency in ns as far as it is still believed, 0 if nothing is known.
func (p *path) expected(now int64) int64 {
	l := p.latency.Load()
	if l == 0 {
		return 0
	}
	halves := max(now-p.seen.Load(), 0) / int64(latencyHalf)
	return max(l>>min(halves, 62), 1)
}
