package nvme

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"

	"github.com/weftfs/weft/internal/nvmeauth"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Config of a target.
type Config struct {
	Subsystems []Subsystem
	Ports      []Port
	Log        *slog.Logger  // nil: slog.Default()
	Control    func(Control) // New calls it with what changes the target later; nil: nothing does
}

// Control changes a target while it serves. Package nvmetest has it for tests; the targets of weftd do not change.
type Control interface {
	// PortUp makes a port listen, again after PortDown.
	PortUp(id uint16) error
	// PortDown ends what listens at a port and the controllers that were reached there. When it returns none of their
	// commands runs.
	PortDown(id uint16) error
	// SetANA changes the state of a group at a port, and tells the hosts.
	SetANA(portID uint16, group uint32, state wire.ANAState) error
	// AddNamespace adds a namespace to a subsystem, and tells the hosts.
	AddNamespace(nqn string, cfg Namespace) error
	// RemoveNamespace takes a namespace away, and tells the hosts. When it returns nothing uses the backing any more.
	RemoveNamespace(nqn string, nsid uint32) error
	// Resize takes the size of a namespace's backing, which was changed, and tells the hosts. A namespace is removed before
	// its backing is truncated.
	Resize(nqn string, nsid uint32) error
	// AllowHost lets a host connect to a subsystem, or changes its secrets.
	AllowHost(nqn string, h Host) error
	// DisallowHost refuses a host from now on, and ends its controllers. When it returns none of their commands runs. A
	// subsystem that is open to any host is so no longer.
	DisallowHost(nqn, host string) error
	// DropControllers ends all of a host's controllers, or all of a subsystem's if host is empty, as if their hosts were
	// unreachable: they may connect again. When it returns none of their commands runs.
	DropControllers(nqn, host string) error
}

// Subsystem is a set of namespaces that hosts connect to by its name.
type Subsystem struct {
	NQN        string
	Serial     string // up to 20 printable ASCII characters
	Model      string // up to 40; empty: "weft"
	AnyHost    bool   // hosts need not be in Hosts
	Hosts      []Host
	Namespaces []Namespace
}

// Host is one that may connect to a subsystem. One that has a secret must prove that it knows it (DH-HMAC-CHAP), on every queue;
// with a ControllerSecret the target proves itself, too, if it is asked to.
type Host struct {
	NQN              string
	Secret           nvmeauth.Secret
	ControllerSecret nvmeauth.Secret
}

func (h *Host) validate(nqn string) error {
	err := wire.CheckNQN(h.NQN)
	if err == nil && !h.Secret.IsZero() {
		cfg := h.config(nqn)
		err = cfg.Validate()
	} else if err == nil && !h.ControllerSecret.IsZero() {
		err = errors.New("a secret for the target alone proves nothing: the host needs one, too")
	}
	if err != nil {
		return fmt.Errorf("host %q: %w", h.NQN, err)
	}
	return nil
}

// Namespace is what a subsystem has at a number.
type Namespace struct {
	NSID      uint32   // 1 to MaxNamespaces
	Backing   Backing  // a File is of one namespace only
	BlockSize uint32   // 512 or 4096 bytes; what of the backing is no whole block at its end is not used
	NGUID     [16]byte // all zeros: none; the same for the next two. One of them is needed
	UUID      [16]byte
	EUI64     [8]byte
	ANAGroup  uint32 // 1 to MaxNamespaces; 0: 1
	ReadOnly  bool
}

// Port is an address hosts connect to.
type Port struct {
	ID     uint16
	Listen string // HOST:PORT; port 0: one that is free
	// Advertise is the HOST:PORT that discovery tells of this port. Empty: what it listens at; in place of an address that stands
	// for all, that by which the host that asks has come.
	Advertise  string
	Discovery  bool     // serves discovery alone
	Subsystems []string // NQNs of those that are reached here; nil: all
	// ANA has the states of groups that are not optimized.
	ANA       map[uint32]wire.ANAState
	Referrals []Referral
	// HeaderDigest and DataDigest are granted to hosts that ask for them.
	HeaderDigest, DataDigest bool
}

// Referral is another discovery service that is told of.
type Referral struct {
	PortID uint16
	Addr   string // HOST:PORT
	NQN    string // empty: the well-known one
}

// MaxNamespaces is how many a subsystem may have, and its highest NSID and ANA group.
const MaxNamespaces = 1024

// Validate tells what is wrong with a configuration.
func (c *Config) Validate() error {
	names := map[string]bool{}
	for i := range c.Subsystems {
		s := &c.Subsystems[i]
		if err := s.validate(); err != nil {
			return fmt.Errorf("subsystem %q: %w", s.NQN, err)
		}
		if names[s.NQN] {
			return fmt.Errorf("subsystem %q is there twice", s.NQN)
		}
		names[s.NQN] = true
	}
	ids := map[uint16]bool{}
	for i := range c.Ports {
		p := &c.Ports[i]
		if ids[p.ID] {
			return fmt.Errorf("port %d is there twice", p.ID)
		}
		ids[p.ID] = true
		for _, nqn := range p.Subsystems {
			if !names[nqn] {
				return fmt.Errorf("port %d: there is no subsystem %q", p.ID, nqn)
			}
		}
		for group, state := range p.ANA {
			if err := checkANA(group, state); err != nil {
				return fmt.Errorf("port %d: %w", p.ID, err)
			}
		}
		if p.Advertise != "" {
			if _, _, err := net.SplitHostPort(p.Advertise); err != nil {
				return fmt.Errorf("port %d is advertised as %q: want HOST:PORT", p.ID, p.Advertise)
			}
		}
		for _, r := range p.Referrals {
			if _, _, err := net.SplitHostPort(r.Addr); err != nil {
				return fmt.Errorf("port %d: referral to %q: want HOST:PORT", p.ID, r.Addr)
			}
		}
	}
	return nil
}

func (s *Subsystem) validate() error {
	if err := wire.CheckNQN(s.NQN); err != nil {
		return err
	}
	if s.NQN == wire.DiscoveryNQN {
		return errors.New("this is the name of the discovery service, which is always there")
	}
	if s.Serial == "" || !printable(s.Serial, 20) {
		return fmt.Errorf("serial number %q: want 1 to 20 printable ASCII characters", s.Serial)
	}
	if !printable(s.Model, 40) {
		return fmt.Errorf("model %q: want up to 40 printable ASCII characters", s.Model)
	}
	for _, h := range s.Hosts {
		if err := h.validate(s.NQN); err != nil {
			return err
		}
	}
	seen := map[uint32]bool{}
	for i := range s.Namespaces {
		n := &s.Namespaces[i]
		if seen[n.NSID] {
			return fmt.Errorf("namespace %d is there twice", n.NSID)
		}
		seen[n.NSID] = true
		if err := n.validate(); err != nil {
			return err
		}
	}
	return nil
}

func (n *Namespace) validate() error {
	switch {
	case n.NSID == 0 || n.NSID > MaxNamespaces:
		return fmt.Errorf("namespace %d: want 1 to %d", n.NSID, MaxNamespaces)
	case n.Backing == nil:
		return fmt.Errorf("namespace %d has no backing", n.NSID)
	case n.BlockSize != 512 && n.BlockSize != 4096:
		return fmt.Errorf("namespace %d: blocks of %d bytes: want 512 or 4096", n.NSID, n.BlockSize)
	case n.ANAGroup > MaxNamespaces:
		return fmt.Errorf("namespace %d: ANA group %d: want 1 to %d", n.NSID, n.ANAGroup, MaxNamespaces)
	case n.NGUID == [16]byte{} && n.UUID == [16]byte{} && n.EUI64 == [8]byte{}:
		return fmt.Errorf("namespace %d has no identifier: it needs an NGUID, a UUID or an EUI64", n.NSID)
	}
	return nil
}

func checkANA(group uint32, state wire.ANAState) error {
	if group == 0 || group > MaxNamespaces {
		return fmt.Errorf("ANA group %d: want 1 to %d", group, MaxNamespaces)
	}
	switch state {
	case wire.ANAOptimized, wire.ANANonOptimized, wire.ANAInaccessible, wire.ANALoss, wire.ANAChange:
		return nil
	}
	return fmt.Errorf("ANA group %d: there is no state %#x", group, uint8(state))
}

func printable(s string, most int) bool {
	return len(s) <= most && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}
