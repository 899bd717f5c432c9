package nvme

import (
	"bytes"
	"slices"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// reservations are those of one namespace (NVMe Base 8.8). namespace.mu guards them: commands hold it shared from their check to
// their end, so a fenced host's have ended when a preempt is answered. They are lost when the target ends.
type reservations struct {
	generation  uint32
	kind        wire.ReservationType // 0: nobody holds one
	holder      hostID               // unless all registrants hold it
	registrants []registrant         // by host
}

// hostID tells hosts apart. What it registered holds for all of its controllers.
type hostID = wire.HostID

type registrant struct {
	host hostID
	cntl uint16 // controller that registered
	key  uint64
}

func (r *reservations) find(host hostID) (i int, ok bool) {
	return slices.BinarySearchFunc(r.registrants, host, func(a registrant, b hostID) int { return bytes.Compare(a.host[:], b[:]) })
}

// shared is whether all registrants hold a reservation of this kind.
func shared(kind wire.ReservationType) bool {
	return kind == wire.ReserveWriteExclusiveAll || kind == wire.ReserveExclusiveAccessAll
}

func (r *reservations) holds(host hostID) bool {
	if r.kind == 0 {
		return false
	}
	if shared(r.kind) {
		_, ok := r.find(host)
		return ok
	}
	return r.holder == host
}

// admits is whether a host may read, or write, which Flush counts as, too.
func (r *reservations) admits(host hostID, write bool) bool {
	switch r.kind {
	case 0:
		return true
	case wire.ReserveWriteExclusive:
		return !write || r.holder == host
	case wire.ReserveExclusiveAccess:
		return r.holder == host
	case wire.ReserveWriteExclusiveRegistered, wire.ReserveWriteExclusiveAll:
		if !write {
			return true
		}
	}
	_, ok := r.find(host)
	return ok
}

// remove takes away the registrations that match, and the reservation if nobody is left to hold it.
func (r *reservations) remove(match func(registrant) bool) (n int) {
	before := len(r.registrants)
	r.registrants = slices.DeleteFunc(r.registrants, match)
	if r.kind != 0 {
		if _, ok := r.find(r.holder); shared(r.kind) && len(r.registrants) == 0 || !shared(r.kind) && !ok {
			r.drop()
		}
	}
	return before - len(r.registrants)
}

func (r *reservations) drop() { r.kind, r.holder = 0, hostID{} }

func (r *reservations) acquire(host hostID, kind wire.ReservationType) {
	r.drop()
	r.kind = kind
	if !shared(kind) {
		r.holder = host
	}
}

// register does Reservation Register. What survives a loss of power is not offered, so the last state can only be asked to
// stay as it is, or not to survive.
func (r *reservations) register(host hostID, cntl uint16, a *wire.ReservationRegister) wire.Status {
	i, known := r.find(host)
	if a.Persist == wire.PersistOn {
		return wire.StatusInvalidField
	}
	switch a.Action {
	case wire.RegisterKey:
		switch {
		case a.New == 0:
			return wire.StatusInvalidField
		case known && r.registrants[i].key != a.New:
			return wire.StatusReserved
		case known:
			return wire.StatusSuccess
		case len(r.registrants) >= maxRegistrants:
			return wire.StatusInternal
		}
		r.registrants = slices.Insert(r.registrants, i, registrant{host, cntl, a.New})
	case wire.UnregisterKey:
		if !known || !a.IgnoreKey && r.registrants[i].key != a.Current {
			return wire.StatusReserved
		}
		r.remove(func(g registrant) bool { return g.host == host })
	case wire.ReplaceKey:
		switch {
		case !known, !a.IgnoreKey && r.registrants[i].key != a.Current:
			return wire.StatusReserved
		case a.New == 0:
			return wire.StatusInvalidField
		}
		r.registrants[i].key = a.New
	default:
		return wire.StatusInvalidField
	}
	r.generation++
	return wire.StatusSuccess
}

// take does Reservation Acquire.
func (r *reservations) take(host hostID, a *wire.ReservationAcquire) wire.Status {
	i, known := r.find(host)
	switch {
	case a.IgnoreKey:
		return wire.StatusInvalidField
	case !known, r.registrants[i].key != a.Current:
		return wire.StatusReserved
	}
	switch a.Action {
	case wire.Acquire:
		switch {
		case r.kind == 0:
			r.acquire(host, a.Type)
		case r.kind != a.Type, !r.holds(host):
			return wire.StatusReserved
		}
		return wire.StatusSuccess
	case wire.Preempt, wire.PreemptAndAbort: // no command of a preempted host goes on in either case
		return r.preempt(host, a)
	}
	return wire.StatusInvalidField
}

// preempt removes the registrants with a key, and takes the reservation from its holder if that is among them.
func (r *reservations) preempt(host hostID, a *wire.ReservationAcquire) wire.Status {
	others := func(g registrant) bool { return g.host != host && g.key == a.Preempted }
	switch {
	case r.kind != 0 && shared(r.kind) && a.Preempted == 0:
		r.remove(func(g registrant) bool { return g.host != host })
		r.acquire(host, a.Type)
	case a.Preempted == 0:
		return wire.StatusInvalidField
	case r.kind != 0 && !shared(r.kind) && r.holderKey() == a.Preempted:
		// A host that preempts itself gets a reservation of another type, and stays registered.
		r.remove(others)
		r.acquire(host, a.Type)
	default:
		if r.remove(func(g registrant) bool { return g.key == a.Preempted }) == 0 {
			return wire.StatusReserved
		}
	}
	r.generation++
	return wire.StatusSuccess
}

// holderKey is the key of the one host that holds the reservation.
func (r *reservations) holderKey() uint64 {
	if i, ok := r.find(r.holder); ok {
		return r.registrants[i].key
	}
	return 0
}

// release does Reservation Release.
func (r *reservations) release(host hostID, a *wire.ReservationRelease) wire.Status {
	i, known := r.find(host)
	if a.IgnoreKey {
		return wire.StatusInvalidField
	}
	if !known || r.registrants[i].key != a.Current {
		return wire.StatusReserved
	}
	switch a.Action {
	case wire.Release:
		if !r.holds(host) {
			return wire.StatusSuccess
		}
		if r.kind != a.Type {
			return wire.StatusInvalidField
		}
		r.drop()
	case wire.Clear:
		r.registrants, r.generation = nil, r.generation+1
		r.drop()
	default:
		return wire.StatusInvalidField
	}
	return wire.StatusSuccess
}

// report encodes what Reservation Report tells.
func (r *reservations) report() []byte {
	status := wire.ReservationStatus{Generation: r.generation, Type: r.kind, Registrants: uint16(len(r.registrants))}
	b := status.Append(nil, true)
	for _, g := range r.registrants {
		entry := wire.Registrant{CntlID: g.cntl, Holder: r.holds(g.host), HostID: g.host, Key: g.key}
		b = entry.Append(b, true)
	}
	return b
}

// reserve does a reservation command. What was begun by others before ends first.
func (c *conn) reserve(r *request) wire.Status {
	ctrl, n := c.ctrl.Load(), r.ns
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
		return wire.StatusInvalidNamespace
	}
	if c.dead.Load() {
		return wire.StatusAborted
	}
	switch r.cmd.Opcode {
	case wire.OpReservationRegister:
		var a wire.ReservationRegister
		if status := a.Decode(&r.cmd, r.data); status != wire.StatusSuccess {
			return status
		}
		return n.reserved.register(ctrl.hostID, ctrl.id, &a)
	case wire.OpReservationAcquire:
		var a wire.ReservationAcquire
		if status := a.Decode(&r.cmd, r.data); status != wire.StatusSuccess {
			return status
		}
		return n.reserved.take(ctrl.hostID, &a)
	case wire.OpReservationRelease:
		var a wire.ReservationRelease
		if status := a.Decode(&r.cmd, r.data); status != wire.StatusSuccess {
			return status
		}
		return n.reserved.release(ctrl.hostID, &a)
	}
	var a wire.ReservationReport
	status := a.Decode(&r.cmd)
	if status == wire.StatusSuccess && !a.Extended {
		status = wire.StatusHostID // hosts have identifiers of 128 bits
	}
	clear(r.data[copy(r.data, n.reserved.report()):])
	return status
}
