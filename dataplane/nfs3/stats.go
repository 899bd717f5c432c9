package nfs3

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// counters are since New; guarded by Target.mu.
type counters struct {
	reads, writes, commits, calls uint64
	bytesRead, bytesWritten       uint64
	jukebox, resent, unknown      uint64
}

// traffic is what one connection has carried; guarded by Target.mu.
type traffic struct{ ops, bytesRead, bytesWritten uint64 }

// Stats is what a Target is doing and has done.
type Stats struct {
	Name        string
	TLS         bool
	Connections []ConnStats // one for each that may exist; the last one is for small requests

	Outstanding int // requests from Start to Done, blocking calls included
	Queued      int // of them: waiting for a connection, for room on one, or for FSINFO
	Delayed     int // of them: waiting because the server said JUKEBOX

	Reads, Writes, Commits, Calls uint64 // calls answered with OK, pieces counted one by one; Calls are all others answered
	BytesRead, BytesWritten       uint64
	Jukebox                       uint64 // replies that said so
	Resent                        uint64 // calls sent again because their connection was lost
	Unknown                       uint64 // replies that nobody waited for
	Connects                      uint64 // connections made

	Window  int       // bytes of large requests that may be in flight
	Trouble time.Time // since when connections are missing that are needed; zero: none
	Err     error     // why the latest connection was lost or could not be made, if ever
}

// ConnStats is one connection.
type ConnStats struct {
	Addr        netip.AddrPort // of the connection, or to be tried next
	Up          bool
	Since       time.Time // of being up, or of the loss
	Outstanding int       // calls
	Bytes       int       // what they cost: payload and some overhead
	Err         error     // why it is not up; nil if it is, or if it is not needed
	// RTT is how long a packet and its acknowledgement have taken lately, and Retransmits how many packets were sent again, as the kernel has counted (tcp(7), TCP_INFO).
	RTT         time.Duration
	Retransmits uint32

	Ops, BytesRead, BytesWritten uint64 // READs, WRITEs and COMMITs answered with OK since it is up
}

// network asks the kernel about the connection.
func (c *conn) network() (rtt time.Duration, retransmits uint32) {
	raw, err := c.nc.SyscallConn()
	if err != nil {
		return 0, 0
	}
	raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			rtt, retransmits = time.Duration(info.Rtt)*time.Microsecond, info.Total_retrans
		}
	})
	return rtt, retransmits
}

// Stats returns a snapshot.
func (t *Target) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &t.stats
	st := Stats{
		Name: t.cfg.Name, TLS: t.cfg.TLS != nil, Outstanding: t.live, Queued: t.queued() + t.held.len, Delayed: t.delayed.len,
		Reads: n.reads, Writes: n.writes, Commits: n.commits, Calls: n.calls,
		BytesRead: n.bytesRead, BytesWritten: n.bytesWritten,
		Jukebox: n.jukebox, Resent: n.resent, Unknown: n.unknown, Connects: t.epoch.Load(),
		Window: t.window.size, Trouble: t.trouble.since, Err: t.trouble.err,
	}
	for _, s := range t.slots {
		cs := ConnStats{Addr: s.path.addr, Since: s.since, Err: s.err}
		st.Queued += s.held.len
		if c := s.conn; c != nil {
			cs.RTT, cs.Retransmits = c.network()
			cs.Addr, cs.Up, cs.Outstanding, cs.Bytes = c.addr, true, c.count, c.bytes
			cs.Ops, cs.BytesRead, cs.BytesWritten = c.served.ops, c.served.bytesRead, c.served.bytesWritten
		}
		st.Connections = append(st.Connections, cs)
	}
	return st
}
