package nvme

import (
	"math/bits"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/version"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	pageShift = 12
	// keepAliveUnit is the granularity of keep-alive times.
	keepAliveUnit = 100 * time.Millisecond
	// transitionTime is how long an ANA group is in the state change, at most, by what hosts are told.
	transitionTime = 10 * time.Second
)

// admin does a command of an admin queue.
func (c *conn) admin(ctrl *controller, r *request, data []byte) {
	cmd := &r.cmd
	var out []byte
	switch cmd.Opcode {
	case wire.OpKeepAlive:
	case wire.OpIdentify:
		var a wire.Identify
		a.Decode(cmd)
		out, r.status = ctrl.identify(&a)
	case wire.OpGetLogPage:
		var a wire.GetLogPage
		if r.status = a.Decode(cmd); r.status == wire.StatusSuccess {
			out, r.status = ctrl.logPage(c, &a)
		}
	case wire.OpSetFeatures:
		var a wire.Feature
		a.Decode(cmd)
		r.result, r.status = ctrl.setFeature(&a, data)
	case wire.OpGetFeatures:
		var a wire.Feature
		a.Decode(cmd)
		out, r.result, r.status = ctrl.getFeature(&a)
	case wire.OpAsyncEvent:
		status := ctrl.await(r)
		if status == wire.StatusSuccess {
			return // r is another one's
		}
		r.status = status
	case wire.OpAbort:
		r.result = 1 // not aborted
	default:
		r.status = wire.StatusInvalidOpcode
	}
	if r.status == wire.StatusSuccess && len(out) > 0 {
		if cmd.SGL.Length != uint32(len(out)) {
			r.status = wire.StatusSGLLength
		} else {
			r.data = out
		}
	}
	c.complete(r)
}

// identify returns an Identify structure. A namespace that does not exist is all zeros.
func (ctrl *controller) identify(a *wire.Identify) ([]byte, wire.Status) {
	none := func() ([]byte, wire.Status) { return make([]byte, wire.IdentifySize), wire.StatusSuccess }
	if ctrl.sub.discovery && a.CNS != wire.CNSController {
		return nil, wire.StatusInvalidField
	}
	table := ctrl.sub.table.Load()
	var n *namespace
	switch a.CNS {
	case wire.CNSNamespace, wire.CNSDescriptors, wire.CNSSetNamespace, wire.CNSIndependent:
		if a.NSID == 0 || a.NSID > MaxNamespaces {
			return nil, wire.StatusInvalidNamespace
		}
		n = table.get(a.NSID)
	}
	switch a.CNS {
	case wire.CNSNamespace:
		if n == nil {
			return none()
		}
		data := n.identify()
		return data.Append(nil), wire.StatusSuccess
	case wire.CNSController:
		data := ctrl.describe()
		return data.Append(nil), wire.StatusSuccess
	case wire.CNSActive:
		if a.NSID >= wire.AllNamespaces-1 {
			return nil, wire.StatusInvalidNamespace
		}
		i, found := slices.BinarySearch(table.ids, a.NSID)
		if found {
			i++
		}
		return wire.AppendNSIDs(nil, table.ids[i:]), wire.StatusSuccess
	case wire.CNSDescriptors:
		if n == nil {
			return nil, wire.StatusInvalidNamespace
		}
		d := wire.Descriptors{EUI64: n.EUI64, NGUID: n.NGUID, UUID: n.UUID, CSI: wire.CSINVM, HasCSI: true}
		return d.Append(nil), wire.StatusSuccess
	case wire.CNSSetNamespace:
		if a.CSI != wire.CSINVM {
			return nil, wire.StatusInvalidField
		}
		return none() // nothing of what is in there
	case wire.CNSSetController:
		if a.CSI != wire.CSINVM {
			return nil, wire.StatusInvalidField
		}
		return none() // no limits
	case wire.CNSIndependent:
		if n == nil {
			return none()
		}
		data := n.identify()
		ind := wire.IndependentNamespace{NMIC: data.NMIC, RESCAP: data.RESCAP, ANAGRPID: data.ANAGRPID, NSATTR: data.NSATTR, Ready: true}
		return ind.Append(nil), wire.StatusSuccess
	}
	return nil, wire.StatusInvalidField
}

// describe is Identify Controller.
func (ctrl *controller) describe() wire.ControllerData {
	sub := ctrl.sub
	d := wire.ControllerData{
		Serial:    sub.Serial,
		Model:     sub.Model,
		Firmware:  firmware(),
		CMIC:      wire.CMICPorts | wire.CMICControllers,
		MDTS:      uint8(bits.Len(maxTransfer>>pageShift) - 1),
		CntlID:    ctrl.id,
		Version:   wire.Version20,
		OAES:      ctrl.offers(),
		CTRATT:    wire.CTRATTHostID128 | wire.CTRATTTBKAS,
		Type:      wire.ControllerDiscovery,
		AERs:      maxEvents,
		LPA:       wire.LPAOffset,
		KAS:       keepAliveUnit,
		SGLS:      1 | wire.SGLSOffsetInCapsule | wire.SGLSTransport,
		SubsysNQN: sub.NQN,
		IOCCSZ:    (wire.CommandSize + ioCapsule) / 16,
		IORCSZ:    wire.CompletionSize / 16,
		MSDBD:     1,
		MAXCMD:    maxQueueSize,
	}
	if sub.discovery {
		return d
	}
	d.CMIC |= wire.CMICANA
	d.Type = wire.ControllerIO
	d.ANATT = transitionTime
	d.ANACAP = 0x1F // all five states
	d.ANAGRPMAX, d.NANAGRPID = MaxNamespaces, MaxNamespaces
	d.SQES, d.CQES = 0x66, 0x44
	d.NN, d.MNAN = MaxNamespaces, MaxNamespaces
	d.ONCS = wire.ONCSDSM | wire.ONCSWriteZeroes | wire.ONCSReservations
	d.VWC = wire.VWCPresent | vwcFlushOne
	return d
}

// vwcFlushOne of VWC says that Flush is for one namespace, not all of them.
const vwcFlushOne = 2 << 1

// firmware is this program's version, as far as there is room for it.
func firmware() string {
	v := version.String()
	return v[:min(len(v), 8)]
}

// identify is Identify Namespace.
func (n *namespace) identify() wire.Namespace {
	blocks := uint64(n.blocks.Load())
	d := wire.Namespace{
		NSZE: blocks, NCAP: blocks, NUSE: blocks,
		NMIC:       wire.NMICShared,
		RESCAP:     0x7E, // all six types
		DLFEAT:     wire.DLFEATZeros | 1<<3,
		ANAGRPID:   n.ANAGroup,
		NGUID:      n.NGUID,
		EUI64:      n.EUI64,
		BlockShift: uint8(n.shift),
	}
	if n.ReadOnly {
		d.NSATTR = wire.NSATTRWriteProtected
	}
	return d
}

// setFeature does Set Features. Nothing is kept for the next controller.
func (ctrl *controller) setFeature(a *wire.Feature, data []byte) (result uint64, status wire.Status) {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	switch a.ID {
	case wire.FeatureWriteCache:
		if a.Value != 1 || ctrl.sub.discovery {
			return 0, wire.StatusFeatureReadOnly
		}
	case wire.FeatureQueues:
		if ctrl.sub.discovery || uint16(a.Value) == 0xFFFF || a.Value>>16 == 0xFFFF {
			return 0, wire.StatusInvalidField
		}
		if len(ctrl.queues) > 1 {
			return 0, wire.StatusSequence
		}
		ctrl.granted = min(wire.DecodeQueueCount(a.Value), maxQueues)
		return uint64(wire.QueueCount(ctrl.granted)), wire.StatusSuccess
	case wire.FeatureEvents:
		if wire.Events(a.Value)&^ctrl.offers() != 0 {
			return 0, wire.StatusInvalidField
		}
		ctrl.events = wire.Events(a.Value)
	case wire.FeatureKATO:
		ctrl.setKeepAlive(time.Duration(a.Value) * time.Millisecond)
	case wire.FeatureHostBehavior:
		if len(data) != wire.HostBehaviorSize {
			return 0, wire.StatusSGLLength
		}
		ctrl.behavior = [wire.HostBehaviorSize]byte(data)
	default:
		return 0, wire.StatusInvalidField
	}
	return 0, wire.StatusSuccess
}

// offers is which events there are.
func (ctrl *controller) offers() wire.Events {
	if ctrl.sub.discovery {
		return wire.EventsDiscovery
	}
	return wire.EventsNamespaces | wire.EventsANA
}

// getFeature does Get Features.
func (ctrl *controller) getFeature(a *wire.Feature) (data []byte, result uint64, status wire.Status) {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	switch a.ID {
	case wire.FeatureWriteCache:
		return nil, 1, wire.StatusSuccess
	case wire.FeatureQueues:
		return nil, uint64(wire.QueueCount(ctrl.granted)), wire.StatusSuccess
	case wire.FeatureEvents:
		return nil, uint64(ctrl.events), wire.StatusSuccess
	case wire.FeatureKATO:
		return nil, uint64(wire.KATO(ctrl.keepAlive)), wire.StatusSuccess
	case wire.FeatureHostBehavior:
		return slices.Clone(ctrl.behavior[:]), 0, wire.StatusSuccess
	case wire.FeatureHostID:
		if a.Value&1 == 0 {
			return nil, 0, wire.StatusInvalidField // it has 128 bits
		}
		return slices.Clone(ctrl.hostID[:]), 0, wire.StatusSuccess
	}
	return nil, 0, wire.StatusInvalidField
}

// logPage returns a part of a log page. Reading it from its beginning takes the event away that it belongs to.
func (ctrl *controller) logPage(c *conn, a *wire.GetLogPage) ([]byte, wire.Status) {
	if a.Length > maxTransfer {
		return nil, wire.StatusInvalidField
	}
	var page []byte
	if discovery := a.ID == wire.LogDiscovery; discovery != ctrl.sub.discovery && a.ID != wire.LogError && a.ID != wire.LogHealth {
		return nil, wire.StatusLogPage
	}
	switch a.ID {
	case wire.LogError, wire.LogHealth: // nothing to tell
		page = make([]byte, 512)
	case wire.LogChangedNamespaces:
		page = ctrl.changes(a)
	case wire.LogANA:
		ctrl.looks(eventANA, a)
		page = ctrl.anaLog(a.LSP&wire.LSPANAGroups != 0)
	case wire.LogDiscovery:
		ctrl.looks(eventDiscovery, a)
		page = ctrl.t.discoveryLog(ctrl, c)
	default:
		return nil, wire.StatusLogPage
	}
	if a.Offset > uint64(len(page)) {
		return nil, wire.StatusInvalidField
	}
	out := make([]byte, a.Length)
	copy(out, page[a.Offset:])
	return out, wire.StatusSuccess
}

// looks notes that the host reads the log of an event, before the log is made: what happens from then on is told.
func (ctrl *controller) looks(e event, a *wire.GetLogPage) {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	if !a.RAE {
		ctrl.masked[e], ctrl.pending[e] = false, false
	}
}

// changes is the log of changed namespaces, which reading clears.
func (ctrl *controller) changes(a *wire.GetLogPage) []byte {
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	slices.Sort(ctrl.namespaces)
	page := wire.AppendNSIDs(nil, ctrl.namespaces)
	if !a.RAE {
		ctrl.namespaces = ctrl.namespaces[:0]
		ctrl.masked[eventNamespaces], ctrl.pending[eventNamespaces] = false, false
	}
	return page
}

// anaLog is the ANA log: the groups that have namespaces, or are not as usual.
func (ctrl *controller) anaLog(groupsOnly bool) []byte {
	states, table := ctrl.port.ana.Load(), ctrl.sub.table.Load()
	members := map[uint32][]uint32{}
	for _, id := range table.ids {
		group := table.list[id].ANAGroup
		members[group] = append(members[group], id)
	}
	var groups []byte
	count := 0
	for id := uint32(1); id <= MaxNamespaces; id++ {
		if len(members[id]) == 0 && states.states[id] == wire.ANAOptimized {
			continue
		}
		g := wire.ANAGroup{ID: id, ChangeCount: states.changes[id], State: states.states[id]}
		if groupsOnly {
			members[id] = nil
		}
		groups = wire.AppendANAGroup(groups, g, members[id])
		count++
	}
	return append(wire.ANAHeader{ChangeCount: states.change, Groups: uint16(count)}.Append(nil), groups...)
}
