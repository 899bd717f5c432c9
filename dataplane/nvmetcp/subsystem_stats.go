package nvmetcp

import "time"

// SubsystemStats is what a Subsystem is doing and has done.
type SubsystemStats struct {
	NQN         string
	Policy      Policy
	Controllers []ControllerStats // in the order of the addresses
	Namespaces  []NamespaceStats  // by number
}

// ControllerStats is one address of a subsystem.
type ControllerStats struct {
	Addr        string
	State       State   // StateDead: not connected, which is tried from time to time
	Outstanding int     // I/O commands under way, of all namespaces
	Err         error   // why it is not live, or cannot be looked at; nil if it is in use
	Refused     []error // namespaces that are not used over this address
}

// NamespaceStats is one namespace.
type NamespaceStats struct {
	NSID      uint32
	ID        ID
	BlockSize int // bytes
	Blocks    uint64
	Waiting   int    // requests that wait for a path, or for the time to be sent again
	Trouble   error  // the latest reason for that, if ever
	Failovers uint64 // requests taken from a path that failed
	Retries   uint64 // requests repeated as the controller asked for that
	Paths     []PathStats
}

// PathStats is one path to a namespace.
type PathStats struct {
	Addr     string
	State    State
	Use      string        // optimized, non-optimized or out
	Why      string        // it is out; "" if it is not
	Group    uint32        // ANA group; 0: none
	Latency  time.Duration // smoothed; 0: not known
	Commands uint64        // done
	Bytes    uint64        // of them
	Errors   uint64        // commands that ended otherwise
}

// Stats returns a snapshot.
func (s *Subsystem) Stats() SubsystemStats {
	st := SubsystemStats{NQN: s.nqn, Policy: s.Policy()}
	list := s.Namespaces()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.members {
		c := ControllerStats{Addr: m.addr, State: StateDead, Err: m.err}
		if l := m.link; l != nil {
			c.State, c.Outstanding = l.ctl.State(), int(l.commands.Load())
		}
		for _, err := range m.refused {
			c.Refused = append(c.Refused, err)
		}
		st.Controllers = append(st.Controllers, c)
	}
	for _, n := range list {
		ns := NamespaceStats{NSID: n.nsid, ID: n.id, BlockSize: n.format.BlockSize, Blocks: n.Blocks()}
		for _, p := range n.paths.Load().list {
			ps := PathStats{
				Addr: p.link.m.addr, State: p.link.ctl.State(), Use: p.usable().String(), Why: p.why, Group: p.found.group,
				Latency: time.Duration(p.latency.Load()), Commands: p.served.Load(), Bytes: p.bytes.Load(), Errors: p.failed.Load(),
			}
			switch {
			case ps.State != StateLive:
				ps.Why = "the controller is " + ps.State.String()
			case !p.link.live.Load():
				ps.Why = "the controller is being looked at"
			case p.stale.Load():
				ps.Why = "commands have failed, the controller is being looked at"
			}
			ns.Paths = append(ns.Paths, ps)
		}
		n.mu.Lock()
		ns.Waiting, ns.Trouble, ns.Failovers, ns.Retries = n.waiting, n.trouble, n.failovers, n.retries
		n.mu.Unlock()
		st.Namespaces = append(st.Namespaces, ns)
	}
	return st
}
