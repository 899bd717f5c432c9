package nvmetcp

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"time"

	"github.com/weftfs/weft/internal/nvmeauth"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Defaults and bounds of Config. Those of time are the Linux host's, but for the reconnects, which begin sooner.
const (
	DefaultQueueSize       = 128
	MaxQueueSize           = 1024
	MaxQueues              = 256
	leastQueues            = 4 // by default: large reads that share a connection take a third more processor time, most of it in the kernel
	DefaultKATO            = 5 * time.Second
	DefaultReconnectDelay  = 10 * time.Second
	DefaultCtrlLossTimeout = 600 * time.Second
	DefaultIOTimeout       = 30 * time.Second
	DefaultAdminTimeout    = 60 * time.Second
)

// Config says which controller to connect to, as whom, and how to use it.
type Config struct {
	Addr      string      // host:port; a name is looked up again at each attempt to connect
	SubsysNQN string      // of the subsystem; with Discovery, "": the one of all of them
	HostNQN   string      // of this host
	HostID    wire.HostID // of this host, not zero; reservations belong to it, so no two clients may share one
	Discovery bool        // a discovery controller: it has no I/O queues

	Queues    int           // I/O queues, each a TCP connection; 0: one for each P, and four at least. The controller may grant fewer
	QueueSize int           // entries of each, of which one stays free; 0: DefaultQueueSize. The controller may have fewer
	KATO      time.Duration // keep-alive time-out, in whole milliseconds; 0: DefaultKATO, or none for a discovery controller

	HeaderDigest, DataDigest bool // CRC-32C of headers, of data; without the controller's consent there is no connection

	// Secret is what this host proves itself by on each queue if it is asked to, and CtrlSecret what the controller then has to
	// prove itself by. Zero: none.
	Secret, CtrlSecret nvmeauth.Secret

	// ReconnectDelay bounds the time between two attempts to connect again: the first is made after 1 s or less, and then
	// the time doubles. 0: DefaultReconnectDelay.
	ReconnectDelay time.Duration
	// CtrlLossTimeout is how long a controller may be away until it is given up. 0: DefaultCtrlLossTimeout; less than 0: for ever.
	CtrlLossTimeout time.Duration
	// FastFail is how long a controller may be away until it no longer counts as one that may come back (StateFailing).
	// 0: as long as it is not given up.
	FastFail time.Duration
	// IOTimeout and AdminTimeout are how long a command may stay without an answer until the connections are closed. 0: the defaults.
	IOTimeout, AdminTimeout time.Duration

	// OnState is told each change of the state, in order. It must be short
	// and must not call Close or Reset. May be nil.
	OnState func(State)
	// OnEvent is told each event that the controller reports, in a goroutine of its own, one after the other: it may
	// call Admin and what is built on it. Events are lost with a connection, so what they are about must be read again in
	// StateLive. May be nil.
	OnEvent func(wire.AsyncEvent)
	Log     *slog.Logger // nil: slog.Default()
}

// Validate fills in the defaults and checks the rest.
func (c *Config) Validate() error {
	if c.Discovery && c.SubsysNQN == "" {
		c.SubsysNQN = wire.DiscoveryNQN
	}
	if c.Queues == 0 {
		c.Queues = min(max(runtime.GOMAXPROCS(0), leastQueues), MaxQueues)
	}
	if c.Discovery {
		c.Queues = 0
	}
	orDefault(&c.QueueSize, DefaultQueueSize)
	if !c.Discovery {
		orDefault(&c.KATO, DefaultKATO)
	}
	orDefault(&c.ReconnectDelay, DefaultReconnectDelay)
	orDefault(&c.CtrlLossTimeout, DefaultCtrlLossTimeout)
	orDefault(&c.IOTimeout, DefaultIOTimeout)
	orDefault(&c.AdminTimeout, DefaultAdminTimeout)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if _, _, err := net.SplitHostPort(c.Addr); err != nil {
		return fmt.Errorf("nvmetcp: address %q: want host:port", c.Addr)
	}
	for _, nqn := range []string{c.SubsysNQN, c.HostNQN} {
		if err := wire.CheckNQN(nqn); err != nil {
			return fmt.Errorf("nvmetcp: %w", err)
		}
	}
	if c.HostID == (wire.HostID{}) {
		return errors.New("nvmetcp: the host has no HOSTID: give it a UUID of its own")
	}
	if c.Queues < 0 || c.Queues > MaxQueues {
		return fmt.Errorf("nvmetcp: %d I/O queues, want 1 to %d", c.Queues, MaxQueues)
	}
	if c.QueueSize < 2 || c.QueueSize > MaxQueueSize {
		return fmt.Errorf("nvmetcp: queue size %d, want 2 to %d", c.QueueSize, MaxQueueSize)
	}
	if c.KATO < 0 || c.KATO != 0 && c.KATO < 100*time.Millisecond || c.KATO > time.Hour || c.KATO%time.Millisecond != 0 {
		return fmt.Errorf("nvmetcp: keep-alive time-out %v, want 100ms to 1h in whole milliseconds", c.KATO)
	}
	if !c.CtrlSecret.IsZero() && c.Secret.IsZero() {
		return errors.New("nvmetcp: a secret of the controller but none of the host: the controller proves itself only to a host that does")
	}
	if min(c.ReconnectDelay, c.FastFail, c.IOTimeout, c.AdminTimeout) < 0 {
		return fmt.Errorf("nvmetcp: reconnect delay %v, fast-fail time %v, time-outs %v and %v: none may be negative",
			c.ReconnectDelay, c.FastFail, c.IOTimeout, c.AdminTimeout)
	}
	return nil
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}
