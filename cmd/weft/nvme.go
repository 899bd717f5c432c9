package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// discoveryPort is that of NVMe/TCP discovery controllers.
const discoveryPort = "8009"

// hostNQNFile is where programs for the kernel's NVMe host keep its name.
const hostNQNFile = "/etc/nvme/hostnqn"

// hostNQN is the name of this host at NVMe targets: the one that was chosen, or else what file says, or else one made of id.
func hostNQN(chosen, file string, id wire.HostID) (string, error) {
	if chosen != "" {
		return chosen, nil
	}
	b, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]), nil
	}
	name := strings.TrimSpace(string(b))
	if err == nil {
		err = wire.CheckNQN(name)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: mend it, or choose another name with nvme-hostnqn=NQN", file, err)
	}
	return name, nil
}

// parseDiscovery reads HOST[:PORT][+HOST[:PORT]...], discovery controllers. A comma would end the option.
func parseDiscovery(s string) ([]string, error) {
	var addrs []string
	for _, h := range strings.Split(s, "+") {
		addr, err := parseHostPort(h, discoveryPort)
		if err != nil {
			return nil, fmt.Errorf("%w; want HOST[:PORT], of several with + between them", err)
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// discoveryFile is where mounts keep what these discovery controllers told last: in $XDG_CACHE_HOME/weft, or else root
// of the host in /var/cache/weft and others in ~/.cache/weft.
func discoveryFile(addrs []string) (string, error) {
	dir := "/var/cache"
	if !hostRoot() || os.Getenv("XDG_CACHE_HOME") != "" {
		var err error
		if dir, err = os.UserCacheDir(); err != nil {
			return "", err
		}
	}
	sum := sha256.Sum256([]byte(strings.Join(addrs, "+")))
	return filepath.Join(dir, "weft", fmt.Sprintf("nvme-discovery-%x", sum[:8])), nil
}

// newInitiator makes the host side of NVMe namespaces; it connects to discovery controllers only, and does not wait for them. The host id is the
// client's alone, since reservations belong to it.
func (d *daemon) newInitiator(id wire.HostID) error {
	name, err := hostNQN(d.cfg.options.hostNQN, hostNQNFile, id)
	if err != nil {
		return err
	}
	secrets, err := readSecrets(d.cfg.options.secrets)
	if err != nil {
		return fmt.Errorf("option nvme-secretfile: %w", err)
	}
	d.nvme, err = nvmetcp.NewInitiator(nvmetcp.InitiatorConfig{
		HostNQN: name, HostID: id, Policy: d.cfg.options.policy, Patience: d.cfg.options.patience(), KATO: d.cfg.options.kato,
		Key: d.reservationKey, Alive: func() bool { return d.meta.Alive(layout.RootID) }, // there are namespaces on volumes of one shard only
		Secrets: secrets,
	})
	if err != nil || len(d.cfg.options.discovery) == 0 {
		return err
	}
	file, err := discoveryFile(d.cfg.options.discovery)
	if err != nil {
		slog.Warn("what NVMe discovery tells is not kept for the next start", "err", err)
	}
	return d.nvme.Follow(d.cfg.options.discovery, file)
}

// readSecrets reads a file of secrets, if there is one.
func readSecrets(file string) (*nvmeauth.Secrets, error) {
	if file == "" {
		return nil, nil
	}
	return nvmeauth.ReadSecrets(file)
}

// reservationKey is that of the session, or between sessions that of the last one.
func (d *daemon) reservationKey() uint64 {
	if id := d.meta.State().Session; id != (metarpc.SessionID{}) {
		d.key.Store(id.Key())
	}
	return d.key.Load()
}

// rekeyTime is how long a new session waits for namespaces to know it. I/O to one that does not yet waits by itself.
const rekeyTime = 5 * time.Second

// rekey makes namespaces take this host for the new session's.
func (d *daemon) rekey(ctx context.Context) {
	done := make(chan struct{})
	go func() { // ends when all know the key, or with ctx
		defer close(done)
		if err := d.nvme.Rekey(ctx); err != nil {
			slog.Warn("NVMe namespaces do not know the new session yet", "err", err)
		}
	}()
	select {
	case <-done:
	case <-time.After(rekeyTime):
	}
}

// maxRedial bounds the pause between attempts to reach a namespace for the first time.
const maxRedial = 10 * time.Second

// dialNamespace makes the way to a namespace. One that is away is waited for as long as the mount waits for data servers.
func (d *daemon) dialNamespace(dev layout.Device) (dataplane.Target, error) {
	defer d.mayHaveMoved() // since the service was asked
	ctx, patience := d.ctx, d.cfg.options.patience()
	if patience.Time > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience.Time)
		defer cancel()
	}
	for pause := time.Second; ; pause = min(2*pause, maxRedial) {
		d.spaces.Store(dev.ID, dev.Namespace)
		key := d.reservationKey()
		target, err := d.nvme.Dial(ctx, &dev)
		if err == nil {
			if d.reservationKey() != key { // the session has changed meanwhile, and Dial may have been the last to register
				d.rekey(ctx)
			}
			return target, nil
		}
		if d.ctx.Err() == nil && !mayComeBack(err) {
			return nil, err
		}
		slog.Warn("an NVMe namespace cannot be reached, trying again", "device", dev.ID, "err", filename.OneLine(err))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			if d.ctx.Err() != nil {
				return nil, err
			}
			return nil, patience.Over(err)
		}
		if now, err := d.meta.Device(ctx, dev.ID); err == nil && now.Namespace != nil {
			dev = now // it may have moved
		}
	}
}

// mayComeBack reports whether trying again can help with a namespace that could not be reached: something was not there, or did not answer.
func mayComeBack(err error) bool {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		return slices.ContainsFunc(several.Unwrap(), mayComeBack)
	}
	switch e := err.(type) {
	case nil:
		return false
	case *nvmetcp.ConnectError:
		return !e.Final
	case *nvmetcp.PathError, *nvmetcp.NoPathError, *nvmetcp.FencedError, *layout.TimeoutError:
		return true
	}
	return err == context.DeadlineExceeded || mayComeBack(errors.Unwrap(err))
}

// discoveryAddr is the address in nvme://HOST[:PORT], the URL of a discovery controller; empty if url is another one.
func discoveryAddr(url string) (string, error) {
	at, ok := strings.CutPrefix(url, "nvme://")
	if at = strings.TrimSuffix(at, "/"); !ok || strings.ContainsAny(at, "/#") {
		return "", nil
	}
	addr, err := parseHostPort(at, discoveryPort)
	if err != nil {
		return "", fmt.Errorf("%q: %w; want nvme://HOST:PORT/NQN#NSID for a namespace, or nvme://HOST[:PORT] for all that the discovery controller there tells of", url, err)
	}
	return addr, nil
}

// subsystem is what discovery has found, with its namespaces.
type subsystem struct {
	nqn        string
	addrs      []string
	namespaces []uint32
	err        error // why those are not known
}

func (s *subsystem) url(addr string, nsid uint32) string {
	u := url.URL{Scheme: "nvme", Host: addr, Path: s.nqn, Fragment: strconv.FormatUint(uint64(nsid), 10)}
	return u.String()
}

// discover asks the discovery controller at addr and those that it refers to which subsystems there are, and these for their
// namespaces. What it told of and cannot be used is in skipped.
func discover(ctx context.Context, addr string, host nvmetcp.Config, secrets *nvmeauth.Secrets) (found []subsystem, skipped []string, err error) {
	asked := host
	asked.Secret, asked.CtrlSecret = secrets.For(wire.DiscoveryNQN)
	dir, err := nvmetcp.Discover(ctx, nvmetcp.DiscoveryConfig{Controller: asked, Addrs: []string{addr}})
	if err != nil {
		return nil, nil, err
	}
	for _, nqn := range dir.Subsystems() {
		s := subsystem{nqn: nqn, addrs: dir.Addrs(nqn)}
		var failed error
		for _, at := range s.addrs {
			if s.namespaces, s.err = activeNamespaces(ctx, at, nqn, host, secrets); s.err == nil {
				break
			}
			failed = errors.Join(failed, s.err)
		}
		if s.err != nil {
			s.err = failed
		} else if len(s.namespaces) == 0 {
			s.err = fmt.Errorf("subsystem %s at %s has no namespaces: make one, and attach it to the controller", nqn, strings.Join(s.addrs, ", "))
		}
		found = append(found, s)
	}
	if len(found) == 0 {
		err = fmt.Errorf("discovery at %s tells host %s of no subsystem: check that there is one, and that it allows this host", addr, host.HostNQN)
	}
	return found, dir.Skipped, err
}

// activeNamespaces connects to a subsystem and asks which namespaces it has.
func activeNamespaces(ctx context.Context, addr, nqn string, host nvmetcp.Config, secrets *nvmeauth.Secrets) ([]uint32, error) {
	host.Addr, host.SubsysNQN, host.Queues = addr, nqn, 1
	host.Secret, host.CtrlSecret = secrets.For(nqn)
	c, err := nvmetcp.Connect(ctx, host)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ids, err := c.ActiveNamespaces(ctx)
	if err != nil {
		return nil, fmt.Errorf("namespaces of %s at %s: %w", nqn, addr, err)
	}
	return ids, nil
}

// addDiscovered makes all namespaces part of the volume that the discovery controller at addr leads to.
func addDiscovered(ctx context.Context, addr string, secrets *nvmeauth.Secrets, add func(url string) (metarpc.DeviceInfo, error), out io.Writer) error {
	host := nvmetcp.Config{Log: quietLog()}
	host.HostID = wire.HostID(clientInfo("").ID)
	var err error
	if host.HostNQN, err = hostNQN("", hostNQNFile, host.HostID); err != nil {
		return err
	}
	found, skipped, err := discover(ctx, addr, host, secrets)
	for _, why := range skipped {
		fmt.Fprintf(out, "not used: %s\n", why)
	}
	for i := range found {
		s := &found[i]
		if s.err != nil {
			err = errors.Join(err, s.err)
			continue
		}
		fmt.Fprintf(out, "%s at %s: %d namespaces\n", s.nqn, strings.Join(s.addrs, ", "), len(s.namespaces))
		for _, nsid := range s.namespaces {
			err = errors.Join(err, s.add(nsid, add, out))
		}
	}
	return err
}

// add makes a namespace part of the volume, by all addresses that the service can reach it at.
func (s *subsystem) add(nsid uint32, add func(url string) (metarpc.DeviceInfo, error), out io.Writer) error {
	var info metarpc.DeviceInfo
	var failed error
	added := false
	for _, addr := range s.addrs {
		now, err := add(s.url(addr, nsid))
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		info, added = now, true
	}
	if !added {
		return failed
	}
	printDevices(out, []deviceStatus{deviceOf(info)}, "  ")
	if failed != nil {
		fmt.Fprintf(out, "    not used: %s\n", filename.OneLine(failed))
	}
	return nil
}

// runPolicy has a mount choose among paths in another way.
func runPolicy(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nIt holds until the mount ends; the mount option of the same name says how it begins.\n")
	if err := parse(c, fl, args, 2, 2); err != nil {
		return err
	}
	if _, err := nvmetcp.ParsePolicy(fl.Arg(1)); err != nil {
		return usagef("nvme-policy: %q: %v", fl.Arg(1), errPolicy)
	}
	m, err := mountAt(fl.Arg(0))
	if err != nil {
		return err
	}
	return control(ctx, m, controlRequest{Op: "nvme policy", Name: filename.JSON(fl.Arg(1))}, &struct{}{})
}

// addPaths says how a mount reaches a namespace. Each address is there, also one that is not connected.
func (u *deviceUse) addPaths(all []nvmetcp.SubsystemStats, ns *layout.Namespace) {
	i := slices.IndexFunc(all, func(s nvmetcp.SubsystemStats) bool { return s.NQN == ns.NQN })
	if i < 0 {
		return
	}
	s := &all[i]
	u.Path, u.Why = "nvme-tcp", "nvme-policy="+s.Policy.String()
	var paths []nvmetcp.PathStats
	if i := slices.IndexFunc(s.Namespaces, func(n nvmetcp.NamespaceStats) bool { return n.NSID == ns.NSID }); i >= 0 {
		n := &s.Namespaces[i]
		paths, u.Resent = n.Paths, n.Failovers
		if n.Waiting > 0 && n.Trouble != nil {
			u.Trouble = fmt.Sprintf("%d requests wait for a path: %s", n.Waiting, filename.OneLine(n.Trouble))
		}
	}
	for _, c := range s.Controllers {
		p := pathUse{Address: c.Addr, State: c.State.String(), Use: "out"}
		if i := slices.IndexFunc(paths, func(p nvmetcp.PathStats) bool { return p.Addr == c.Addr }); i >= 0 {
			at := &paths[i]
			p.Use, p.Why, p.Group, p.Latency = at.Use, at.Why, at.Group, int64(at.Latency)
			p.Ops, p.Bytes, p.Errors = at.Commands, at.Bytes, at.Errors
		} else if err := errors.Join(append(slices.Clone(c.Refused), c.Err)...); err != nil {
			p.Why = filename.OneLine(err)
		}
		u.Paths = append(u.Paths, p)
	}
}

// discoveryStatus is how a mount stands with a discovery controller that it follows.
type discoveryStatus struct {
	Address   string `json:"address"`
	Connected bool   `json:"connected"`
	Problem   string `json:"problem,omitempty"` // why not
	Addresses int    `json:"addresses"`         // that it tells of, or told of last
}

func discoveryOf(all []nvmetcp.DiscoveryStats) []discoveryStatus {
	var list []discoveryStatus
	for _, s := range all {
		st := discoveryStatus{Address: s.Addr, Connected: s.Connected, Addresses: s.Portals}
		if !s.Connected && s.Err != nil {
			st.Problem = filename.OneLine(s.Err)
		}
		list = append(list, st)
	}
	return list
}

func (d *discoveryStatus) String() string {
	switch {
	case d.Connected:
		return fmt.Sprintf("%s is connected and tells of %d addresses", d.Address, d.Addresses)
	case d.Problem == "":
		return d.Address + " has not answered yet"
	}
	return fmt.Sprintf("%s is not connected, told of %d addresses: %s", d.Address, d.Addresses, d.Problem)
}

func (p *pathUse) print(w io.Writer, indent string) {
	fmt.Fprintf(w, "%spath %s is %s, %s", indent, p.Address, p.State, p.Use)
	also(w, p.Ops > 0, "; %s in %d commands, latency %v", humanize.IBytes(p.Bytes), p.Ops, rough(p.Latency))
	also(w, p.Errors > 0, ", %d failed", p.Errors)
	also(w, p.Why != "", ": %s", p.Why)
	fmt.Fprintln(w)
}
