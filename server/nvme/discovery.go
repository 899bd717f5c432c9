package nvme

import (
	"net"
	"net/netip"
	"slices"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// serves is whether hosts reach a subsystem at the port.
func (p *port) serves(s *subsystem) bool {
	return !p.Discovery && (p.Subsystems == nil || slices.Contains(p.Subsystems, s.NQN))
}

// discoveryLog is the discovery log for a host: this service, the referrals of the port that it has come to, and the subsystems
// that it may connect to, at each port where they are reached.
func (t *Target) discoveryLog(ctrl *controller, c *conn) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	near, _ := netip.ParseAddrPort(c.nc.LocalAddr().String())
	var entries []wire.DiscoveryEntry
	add := func(p *port, subtype uint8, nqn string) {
		if e, ok := entryOf(p.advertised(near.Addr())); ok {
			e.Subtype, e.PortID, e.SubsysNQN = subtype, p.ID, nqn
			if subtype == wire.SubtypeDiscovery {
				e.EFlags = wire.EFlagsDuplicate | wire.EFlagsPersistent // all ports tell the same, but for referrals
			}
			entries = append(entries, e)
		}
	}
	add(ctrl.port, wire.SubtypeDiscovery, wire.DiscoveryNQN)
	for _, r := range ctrl.port.Referrals {
		if e, ok := entryOf(r.Addr); ok {
			e.Subtype, e.PortID, e.SubsysNQN = wire.SubtypeReferral, r.PortID, r.NQN
			if r.NQN == "" {
				e.SubsysNQN = wire.DiscoveryNQN
			}
			entries = append(entries, e)
		}
	}
	for _, p := range t.sortedPorts() {
		for _, nqn := range t.sortedNames() {
			if s := t.subsystems[nqn]; p.listener != nil && !s.discovery && p.serves(s) && s.admits(ctrl.hostNQN) {
				add(p, wire.SubtypeNVM, nqn)
			}
		}
	}
	b := wire.DiscoveryHeader{Generation: t.generation.Load(), Records: uint64(len(entries))}.Append(nil)
	for i := range entries {
		b = entries[i].Append(b)
	}
	return b
}

func (t *Target) sortedPorts() (list []*port) {
	for _, p := range t.ports {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *port) int { return int(a.ID) - int(b.ID) })
	return list
}

func (t *Target) sortedNames() (list []string) {
	for nqn := range t.subsystems {
		list = append(list, nqn)
	}
	slices.Sort(list)
	return list
}

// advertised is the HOST:PORT by which a port is told of to a host that has come to the address near.
func (p *port) advertised(near netip.Addr) string {
	if p.Advertise != "" {
		return p.Advertise
	}
	at, err := netip.ParseAddrPort(p.Listen)
	if err != nil || !at.Addr().IsUnspecified() {
		return p.Listen
	}
	return netip.AddrPortFrom(near.Unmap(), at.Port()).String()
}

// entryOf begins an entry for an address; ok is false if it is none.
func entryOf(addr string) (e wire.DiscoveryEntry, ok bool) {
	host, service, err := net.SplitHostPort(addr)
	if err != nil {
		return e, false
	}
	e = wire.DiscoveryEntry{
		Transport: wire.TransportTCP,
		Family:    wire.FamilyIPv4,
		TREQ:      wire.TREQNoSQFlow,
		CntlID:    wire.CntlIDAny,
		QueueSize: wire.AdminQueueSize,
		Service:   service,
		Address:   host,
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Is6() {
		e.Family = wire.FamilyIPv6
	}
	return e, true
}
