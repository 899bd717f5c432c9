package nvmetcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// InitiatorConfig says as whom namespaces are used, and how. What Config and SubsystemConfig have as well means the same here.
type InitiatorConfig struct {
	HostNQN string
	HostID  wire.HostID // of this mount or service alone: reservations belong to it

	Policy   Policy
	Patience layout.Patience

	Queues                                                     int
	KATO, ReconnectDelay, CtrlLossTimeout, FastFail, IOTimeout time.Duration
	HeaderDigest, DataDigest                                   bool
	Secrets                                                    *nvmeauth.Secrets // nil: none

	// Key is the reservation key that this host registers on namespaces that are layout.Namespace.Reserved; nil: none.
	Key func() uint64
	// Alive is asked before each command is sent, or sent again, and must be quick; nil: always. When it returns false requests end with
	// a *[FencedError], and no key is registered.
	Alive func() bool
	Log   *slog.Logger // nil: slog.Default()
}

// Initiator is the namespaces that a mount or a service uses: one Subsystem for each NQN, opened when it is first needed. Its
// methods may be called from any goroutine.
type Initiator struct {
	cfg  InitiatorConfig
	ids  IDs
	dial func(context.Context, Config) (controller, error) // Connect, but for tests

	mu         sync.Mutex // above Subsystem.mu
	closed     bool
	policy     Policy
	subsystems map[string]*opened
	reserved   map[*Namespace]struct{}   // on which Key is registered
	discovery  *Discovery                // nil: nobody is followed
	dir        *Directory                // see Use
	withdrawn  map[Portal]struct{}       // that were in an earlier Directory and are not in dir; without From
	places     map[layout.DeviceID]place // where devices are that Dial was called for
}

// place is where a device is: at these addresses of a subsystem.
type place struct {
	nqn   string
	addrs []string
}

// opened is a Subsystem of an Initiator.
type opened struct {
	s     *Subsystem
	users int  // calls of Open that are not decided
	kept  bool // one of them has found its namespace
}

// NewInitiator makes an Initiator. It connects to nothing.
func NewInitiator(cfg InitiatorConfig) (*Initiator, error) {
	i := &Initiator{
		cfg: cfg, policy: cfg.Policy, subsystems: map[string]*opened{}, reserved: map[*Namespace]struct{}{},
		dir: new(Directory), withdrawn: map[Portal]struct{}{}, places: map[layout.DeviceID]place{},
	}
	i.dial = func(ctx context.Context, cfg Config) (controller, error) { return Connect(ctx, cfg) }
	c := i.controller(wire.DiscoveryNQN)
	if err := defaults(&c); err != nil {
		return nil, err
	}
	i.cfg.Log = c.Log
	return i, nil
}

// controller is the Config of a subsystem's controllers.
func (i *Initiator) controller(nqn string) Config {
	c := &i.cfg
	secret, ctrlSecret := c.Secrets.For(nqn)
	return Config{
		SubsysNQN: nqn, HostNQN: c.HostNQN, HostID: c.HostID, Queues: c.Queues, KATO: c.KATO, ReconnectDelay: c.ReconnectDelay,
		CtrlLossTimeout: c.CtrlLossTimeout, FastFail: c.FastFail, IOTimeout: c.IOTimeout, HeaderDigest: c.HeaderDigest, DataDigest: c.DataDigest,
		Secret: secret, CtrlSecret: ctrlSecret, Log: c.Log,
	}
}

// Open returns a namespace, by its number, of the subsystem nqn. addrs, as host:port, are added to the addresses at which that is
// used, but for those that discovery has taken away (see Use), and stay if they cannot be reached while others can. The Namespace is good
// until the Initiator is closed.
//
// The errors say for each address what is wrong and what to do: nothing listens, no NVMe/TCP port, no such subsystem, the host is not allowed,
// the namespace is not there, has no blocks, metadata, no identifier or one that another has. One that is write protected is opened: see
// WriteProtected.
func (i *Initiator) Open(ctx context.Context, addrs []string, nqn string, nsid uint32) (*Namespace, error) {
	o, err := i.use(addrs, nqn)
	if err != nil {
		return nil, err
	}
	n, err := o.s.find(ctx, nsid)
	i.mu.Lock()
	o.users--
	o.kept = o.kept || err == nil
	left := o.users == 0 && !o.kept && i.subsystems[nqn] == o
	if left {
		delete(i.subsystems, nqn)
	}
	i.mu.Unlock()
	if left {
		o.s.Close()
	}
	return n, err
}

// use returns the subsystem, which is used at addrs from now on, too.
func (i *Initiator) use(addrs []string, nqn string) (*opened, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return nil, ErrClosed
	}
	addrs = i.followed(nqn, addrs)
	o := i.subsystems[nqn]
	if o == nil {
		s, err := newSubsystem(SubsystemConfig{
			Controller: i.controller(nqn), Addrs: addrs, Policy: i.policy, Patience: i.cfg.Patience, IDs: &i.ids, Alive: i.cfg.Alive,
		}, i.dial)
		if err != nil {
			return nil, err
		}
		o = &opened{s: s}
		i.subsystems[nqn] = o
	} else if err := o.s.add(addrs); err != nil {
		return nil, err
	}
	o.users++
	return o, nil
}

// Dial makes the target of a device that is a namespace, which must have the device's identifiers and block size. If it is Reserved
// the key is registered before Dial returns, and again whenever that may have been forgotten. The caller closes the Target; the connections
// stay.
func (i *Initiator) Dial(ctx context.Context, dev *layout.Device) (*Target, error) {
	want := dev.Namespace
	if want == nil {
		return nil, fmt.Errorf("nvmetcp: device %s is no namespace", dev.ID)
	}
	i.Move(dev)
	n, err := i.Open(ctx, addrsOf(dev), want.NQN, want.NSID)
	if err == nil {
		err = n.is(want)
	}
	if err == nil && want.Reserved && i.cfg.Key != nil {
		i.mu.Lock()
		i.reserved[n] = struct{}{}
		i.mu.Unlock()
		err = n.Register(ctx, i.cfg.Key())
	}
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", dev.ID, err)
	}
	return NewTarget(n)
}

// addrsOf is the addresses of a device, as host:port.
func addrsOf(dev *layout.Device) (addrs []string) {
	for _, a := range dev.Addrs {
		addrs = append(addrs, a.Addr.String())
	}
	return addrs
}

// Move tells where a device is now that is dialled, or is about to be. Its subsystem is used at the device's addresses
// from now on, and no longer at those that it had before and no other device has. What discovery tells counts as in
// Open.
func (i *Initiator) Move(dev *layout.Device) {
	if dev.Namespace == nil {
		return
	}
	now := place{dev.Namespace.NQN, addrsOf(dev)}
	i.mu.Lock()
	defer i.mu.Unlock()
	was := i.places[dev.ID]
	i.places[dev.ID] = now
	o := i.subsystems[now.nqn]
	if o == nil || was.nqn != now.nqn || slices.Equal(was.addrs, now.addrs) {
		return
	}
	addrs := slices.DeleteFunc(o.s.Addrs(), func(addr string) bool {
		return slices.Contains(was.addrs, addr) && !i.anyAt(now.nqn, addr)
	})
	for _, addr := range now.addrs {
		if !slices.Contains(addrs, addr) {
			addrs = append(addrs, addr)
		}
	}
	o.s.SetAddrs(i.followed(now.nqn, addrs))
}

// anyAt reports whether a device is at an address of a subsystem. mu is held.
func (i *Initiator) anyAt(nqn, addr string) bool {
	for _, p := range i.places {
		if p.nqn == nqn && slices.Contains(p.addrs, addr) {
			return true
		}
	}
	return false
}

// is tells what n is that the device is not.
func (n *Namespace) is(want *layout.Namespace) error {
	id := n.ID()
	switch {
	case want.NGUID != [16]byte{} && want.NGUID != id.NGUID, want.EUI64 != [8]byte{} && want.EUI64 != id.EUI64, want.UUID != [16]byte{} && want.UUID != id.UUID:
		had := ID{UUID: want.UUID, NGUID: want.NGUID, EUI64: want.EUI64}
		return fmt.Errorf("nvmetcp: namespace %d of %s is %v, the device is %v: another namespace has its number, or it was made anew; it is not used", n.nsid, n.s.nqn, id, had)
	case want.Block != int64(n.format.BlockSize):
		return fmt.Errorf("nvmetcp: namespace %d of %s has blocks of %d bytes, the device has %d: it was formatted anew, and is not used", n.nsid, n.s.nqn, n.format.BlockSize, want.Block)
	}
	return nil
}

// Rekey registers Key on all namespaces that are Reserved, in place of what was registered before: the session is another one. I/O waits
// until that was done, also if ctx ends before.
func (i *Initiator) Rekey(ctx context.Context) error {
	if i.cfg.Key == nil {
		return nil
	}
	key := i.cfg.Key()
	return i.eachReserved(func(n *Namespace) error { return n.Register(ctx, key) })
}

// eachReserved runs do for all namespaces that are Reserved, at once.
func (i *Initiator) eachReserved(do func(*Namespace) error) error {
	i.mu.Lock()
	list := slices.Collect(maps.Keys(i.reserved))
	i.mu.Unlock()
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for at, n := range list {
		wg.Go(func() { errs[at] = do(n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// SetPolicy changes how paths are chosen, from the next command on.
func (i *Initiator) SetPolicy(p Policy) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.policy = p
	for _, o := range i.subsystems {
		o.s.SetPolicy(p)
	}
}

// Stats returns a snapshot of each subsystem, by name.
func (i *Initiator) Stats() []SubsystemStats {
	var list []SubsystemStats
	for _, s := range i.all() {
		list = append(list, s.Stats())
	}
	return list
}

// all is the subsystems, by name.
func (i *Initiator) all() []*Subsystem {
	i.mu.Lock()
	defer i.mu.Unlock()
	var list []*Subsystem
	for _, o := range i.subsystems {
		list = append(list, o.s)
	}
	slices.SortFunc(list, func(a, b *Subsystem) int { return cmp.Compare(a.nqn, b.nqn) })
	return list
}

// unregisterTime bounds the time in which Close takes back the keys that Dial has registered.
const unregisterTime = 2 * time.Second

// Close leaves discovery, takes back what Dial has registered, if that is quick, ends all requests with ErrClosed and closes the connections.
func (i *Initiator) Close() error {
	i.mu.Lock()
	was, discovery := i.closed, i.discovery
	i.closed = true
	i.mu.Unlock()
	if was {
		return nil
	}
	if discovery != nil {
		discovery.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), unregisterTime)
	defer cancel()
	if err := i.eachReserved(func(n *Namespace) error { return n.unregister(ctx) }); err != nil {
		i.cfg.Log.Info("reservation keys stay registered", "error", err)
	}
	for _, s := range i.all() {
		s.Close()
	}
	return nil
}
