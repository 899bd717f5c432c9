package nvme

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// controller is what a host talks to: an admin queue and I/O queues.
type controller struct {
	t       *Target
	sub     *subsystem
	port    *port
	id      uint16
	hostNQN string
	hostID  hostID
	ready   atomic.Bool // CSTS.RDY
	seen    atomic.Bool // a command, since the keep-alive timer began

	mu         sync.Mutex
	gone       bool
	config     wire.Configuration
	status     wire.ControllerStatus
	queues     map[uint16]*conn
	granted    int           // I/O queues
	keepAlive  time.Duration // 0: none
	timer      *time.Timer
	behavior   [wire.HostBehaviorSize]byte
	events     wire.Events  // those that are wanted
	requests   []*request   // that wait for an event
	pending    [events]bool // happened, and there was no request
	masked     [events]bool // told, and the log was not read since
	namespaces []uint32     // changed since the log was read; overflowed: wire.AllNamespaces alone
}

// event is a kind of asynchronous event.
type event int

const (
	eventNamespaces event = iota
	eventANA
	eventDiscovery
	events
)

// eventKinds has what turns an event on, and what is told of it.
var eventKinds = [events]struct {
	wants wire.Events
	what  wire.AsyncEvent
}{
	eventNamespaces: {wire.EventsNamespaces, wire.EventNamespaceChanged},
	eventANA:        {wire.EventsANA, wire.EventANAChanged},
	eventDiscovery:  {wire.EventsDiscovery, wire.EventDiscoveryChanged},
}

const (
	// maxEvents is how many Asynchronous Event Requests a host may have waiting.
	maxEvents = 4
	// maxChanged is how many namespaces the log of changes has; one more and it says that there are too many.
	maxChanged = 1024
)

// touch notes that the host lives.
func (ctrl *controller) touch() {
	if !ctrl.seen.Load() {
		ctrl.seen.Store(true)
	}
}

// setKeepAlive begins with a time after which a host that sends nothing is taken for dead: it is found silent after up to twice
// as long. mu is held.
func (ctrl *controller) setKeepAlive(d time.Duration) {
	ctrl.keepAlive = d
	if ctrl.timer != nil {
		ctrl.timer.Stop()
		ctrl.timer = nil
	}
	if d > 0 && !ctrl.gone {
		ctrl.seen.Store(false)
		ctrl.timer = time.AfterFunc(d, ctrl.expire)
	}
}

func (ctrl *controller) expire() {
	ctrl.mu.Lock()
	if ctrl.gone || ctrl.timer == nil {
		ctrl.mu.Unlock()
		return
	}
	if ctrl.seen.Swap(false) {
		ctrl.timer.Reset(ctrl.keepAlive)
		ctrl.mu.Unlock()
		return
	}
	ctrl.mu.Unlock()
	ctrl.t.log.Warn("a host is silent, its controller ends", "subsystem", ctrl.sub.NQN, "host", ctrl.hostNQN, "controller", ctrl.id,
		"keep_alive", ctrl.keepAlive)
	ctrl.t.dropOne(ctrl)
}

// stop ends what the controller does by itself. Its connections are cut by whoever calls it, with Target.mu held.
func (ctrl *controller) stop() {
	ctrl.ready.Store(false)
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	ctrl.gone = true
	if ctrl.timer != nil {
		ctrl.timer.Stop()
	}
	ctrl.requests = nil
}

// detach takes a connection away that has ended. With the admin queue the controller ends: no command of the old association
// may be done when its host begins another one.
func (ctrl *controller) detach(c *conn) {
	ctrl.mu.Lock()
	if ctrl.queues[c.qid] == c {
		delete(ctrl.queues, c.qid)
	}
	ctrl.mu.Unlock()
	if c.qid != 0 {
		return
	}
	ctrl.t.mu.Lock()
	defer ctrl.t.mu.Unlock()
	ctrl.t.remove(ctrl)
	if !c.draining.Load() {
		ctrl.t.cut(func(other *conn) bool { return other != c && other.ctrl.Load() == ctrl })
	}
}

// raise tells the host of an event, unless it was told and has not looked yet.
func (ctrl *controller) raise(e event) {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	ctrl.raiseLocked(e)
}

func (ctrl *controller) raiseLocked(e event) {
	switch {
	case ctrl.gone, ctrl.masked[e], ctrl.events&eventKinds[e].wants == 0:
	case len(ctrl.requests) == 0:
		ctrl.pending[e] = true
	default:
		last := len(ctrl.requests) - 1
		r := ctrl.requests[last]
		ctrl.requests = ctrl.requests[:last]
		ctrl.tell(r, e)
		r.c.flush()
	}
}

// tell answers an Asynchronous Event Request. mu is held.
func (ctrl *controller) tell(r *request, e event) {
	ctrl.pending[e], ctrl.masked[e] = false, true
	r.result = uint64(eventKinds[e].what.DW0())
	r.c.complete(r)
}

// await keeps an Asynchronous Event Request until there is an event.
func (ctrl *controller) await(r *request) wire.Status {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	if len(ctrl.requests) >= maxEvents {
		return wire.StatusAERLimit
	}
	for e := range events {
		if ctrl.pending[e] {
			ctrl.tell(r, e)
			return wire.StatusSuccess
		}
	}
	if !ctrl.gone {
		ctrl.requests = append(ctrl.requests, r)
	}
	return wire.StatusSuccess
}

// namespaceChanged notes a change for the log.
func (ctrl *controller) namespaceChanged(nsid uint32) {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	switch {
	case len(ctrl.namespaces) > 0 && ctrl.namespaces[0] == wire.AllNamespaces, slices.Contains(ctrl.namespaces, nsid):
	case len(ctrl.namespaces) == maxChanged:
		ctrl.namespaces = append(ctrl.namespaces[:0], wire.AllNamespaces)
	default:
		ctrl.namespaces = append(ctrl.namespaces, nsid)
	}
	ctrl.raiseLocked(eventNamespaces)
}

// configure does a Property Set of CC.
func (ctrl *controller) configure(v uint32) wire.Status {
	var cc wire.Configuration
	cc.Decode(v)
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	was := ctrl.config
	if cc.Enable && !was.Enable {
		if cc.PageShift != 12 || cc.CommandSet != wire.NVMCommandSet && cc.CommandSet != wire.AllCommandSets ||
			!ctrl.sub.discovery && (cc.SQShift != 6 || cc.CQShift != 4) {
			ctrl.status.Fatal = true
			return wire.StatusInvalidField
		}
		ctrl.status = wire.ControllerStatus{Ready: true}
	}
	if !cc.Enable && was.Enable {
		ctrl.status = wire.ControllerStatus{}
		ctrl.events, ctrl.pending, ctrl.masked, ctrl.namespaces = 0, [events]bool{}, [events]bool{}, nil
		for _, r := range ctrl.requests {
			r.status = wire.StatusAborted
			r.c.complete(r)
		}
		ctrl.requests = nil
	}
	if cc.Shutdown != wire.ShutdownNone && was.Shutdown == wire.ShutdownNone {
		ctrl.status.Shutdown = wire.ShutdownComplete
	}
	if cc.Shutdown == wire.ShutdownNone && was.Shutdown != wire.ShutdownNone {
		ctrl.status.Shutdown = wire.ShutdownNotAsked
	}
	ctrl.config = cc
	ctrl.ready.Store(ctrl.status == wire.ControllerStatus{Ready: true} && !ctrl.gone)
	return wire.StatusSuccess
}
