package nvme

import (
	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// tcpEstablished is the state of a TCP connection of which neither side has closed its end (linux/tcp_states.h).
const tcpEstablished = 1

// endLost ends the associations that a host which connects has lost, and have not noticed it yet: those of which a
// connection was closed or reset by the host, while a command holds up what would read that, or the target was stopped.
// Losing any connection ends an association for the host. Commands that it has sent and that did not begin never will.
func (t *Target) endLost(d *wire.ConnectData) {
	t.mu.Lock()
	defer t.mu.Unlock()
	lost := map[*controller]bool{}
	for c := range t.conns {
		if ctrl := c.ctrl.Load(); ctrl != nil && ctrl.isOf(d) && c.hungUp() {
			lost[ctrl] = true
		}
	}
	t.cut(func(c *conn) bool { return lost[c.ctrl.Load()] })
	for ctrl := range lost {
		t.remove(ctrl)
	}
}

// isOf is whether the controller is one that a host has in the subsystem to which it connects.
func (ctrl *controller) isOf(d *wire.ConnectData) bool {
	return ctrl.hostNQN == d.HostNQN && ctrl.sub.NQN == d.SubsysNQN
}

// hungUp is whether the host has closed the connection, as the kernel knows before what the host has sent is read.
func (c *conn) hungUp() bool {
	var info *unix.TCPInfo
	var err error
	ctlErr := c.tx.raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	switch {
	case ctlErr != nil:
		return true // it is closed here
	case err != nil:
		return false // it is no TCP connection
	}
	return info.State != tcpEstablished
}
