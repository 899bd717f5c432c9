package nvmetcp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/nvmeauth/nvmeauthtest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

var (
	_ dataplane.Target    = (*nvmetcp.Target)(nil)
	_ dataplane.Validator = (*nvmetcp.Target)(nil)
)

// newInitiator makes one that is host number host.
func newInitiator(t *testing.T, host byte, change func(*nvmetcp.InitiatorConfig)) *nvmetcp.Initiator {
	t.Helper()
	cfg := nvmetcp.InitiatorConfig{
		HostNQN: someHost + string('0'+host), HostID: wire.HostID{host}, Queues: 2, KATO: 500 * time.Millisecond,
		ReconnectDelay: 50 * time.Millisecond, IOTimeout: 5 * time.Second, Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&cfg)
	}
	i, err := nvmetcp.NewInitiator(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { i.Close() })
	return i
}

func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func mustOpen(t *testing.T, i *nvmetcp.Initiator, addr string) *nvmetcp.Namespace {
	t.Helper()
	n, err := i.Open(limited(t), []string{addr}, twoPortNQN, 1)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func device(addr string, reserved bool) *layout.Device {
	return &layout.Device{
		ID: layout.DeviceID{7}, Addrs: []layout.NetAddr{{NetID: "tcp", Addr: netip.MustParseAddrPort(addr)}},
		Namespace: &layout.Namespace{NQN: twoPortNQN, NSID: 1, UUID: [16]byte{1}, Block: 512, Reserved: reserved},
	}
}

// write writes one block.
func write(t *testing.T, n *nvmetcp.Namespace) error {
	t.Helper()
	return n.Do(limited(t), &nvmetcp.Request{Command: nvmetcp.Command{Op: wire.OpWrite, Blocks: 1, Data: make([]byte, 512)}})
}

func isFenced(err error) bool {
	var status *nvmetcp.StatusError
	return errors.As(err, &status) && status.Class() == wire.ClassFenced
}

// TestInitiatorOpen: what is wrong is told apart, leaves nothing behind, and does not keep what is right from being used.
func TestInitiatorOpen(t *testing.T) {
	target := startTarget(t, func(cfg *nvme.Config) {
		s := &cfg.Subsystems[0]
		s.Namespaces = append(s.Namespaces, nvme.Namespace{NSID: 3, Backing: backing(t, spaceSize), BlockSize: 4096, NGUID: [16]byte{3}})
		cfg.Subsystems = append(cfg.Subsystems, nvme.Subsystem{NQN: twoPortNQN + ".closed", Serial: "W2", Hosts: []nvme.Host{{NQN: someHost + ".other"}}})
	})
	l, err := net.Listen("tcp", "127.0.0.1:0") // nothing listens there
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	go func() { // ends with the listener
		for {
			nc, err := web.Accept()
			if err != nil {
				return
			}
			io.WriteString(nc, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
			nc.Close()
		}
	}()
	i := newInitiator(t, 1, nil)
	good := target.Addr(1)
	for _, c := range []struct {
		addr, nqn string
		nsid      uint32
		want      string
	}{
		{l.Addr().String(), twoPortNQN, 1, "nothing listens there"},
		{web.Addr().String(), twoPortNQN, 1, "is this an NVMe/TCP port?"},
		{good, twoPortNQN + ".typo", 1, "there is no such subsystem"},
		{good, twoPortNQN + ".closed", 1, "allow host " + someHost + "1"},
		{good, twoPortNQN, 2, "has no namespace 2 for this host (there are: 1 3)"},
		{"localhost", twoPortNQN, 1, "want host:port"},
		{good, "subsystem", 1, "NQN"},
	} {
		n, err := i.Open(limited(t), []string{c.addr}, c.nqn, c.nsid)
		if n != nil || err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.addr) && strings.HasPrefix(c.nqn, "nqn.") {
			t.Errorf("%s %s %d: %v, want %q", c.addr, c.nqn, c.nsid, err, c.want)
		}
		if left := i.Stats(); len(left) != 0 {
			t.Errorf("%q: %d subsystems are left", c.want, len(left))
		}
	}
	// All at once; an address that is no good does no harm beside one that is.
	var wg sync.WaitGroup
	for k := range 8 {
		wg.Go(func() {
			nsid := []uint32{1, 3}[k%2]
			n, err := i.Open(limited(t), []string{target.Addr(uint16(1 + k/4)), l.Addr().String()}, twoPortNQN, nsid)
			if err != nil || n.NSID() != nsid {
				t.Errorf("namespace %d: %v", nsid, err)
			}
		})
	}
	wg.Wait()
	if s := i.Stats(); len(s) != 1 || len(s[0].Controllers) != 3 {
		t.Errorf("not one subsystem at three addresses: %+v", s)
	}
	// What was attached meanwhile is found.
	if err := target.AddNamespace(twoPortNQN, nvme.Namespace{NSID: 5, Backing: backing(t, spaceSize), BlockSize: 512, UUID: [16]byte{5}}); err != nil {
		t.Fatal(err)
	}
	if _, err := i.Open(limited(t), []string{good}, twoPortNQN, 5); err != nil {
		t.Error(err)
	}
	if _, err := i.Open(limited(t), []string{good}, twoPortNQN, 2); err == nil || len(i.Stats()) != 1 {
		t.Errorf("a namespace that is not there: %v, and %d subsystems", err, len(i.Stats()))
	}
	i.Close()
	if _, err := i.Open(limited(t), []string{good}, twoPortNQN, 1); !errors.Is(err, nvmetcp.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestInitiatorDial: only the device that is meant is used, and its connections are the Initiator's.
func TestInitiatorDial(t *testing.T) {
	target := startTarget(t, nil)
	i := newInitiator(t, 1, nil)
	dev := device(target.Addr(1), false)
	dial := func(change func(*layout.Namespace)) error {
		d, ns := *dev, *dev.Namespace
		change(&ns)
		d.Namespace = &ns
		tg, err := i.Dial(limited(t), &d)
		if err == nil {
			tg.Close()
		}
		return err
	}
	for want, change := range map[string]func(*layout.Namespace){
		"another namespace has its number": func(ns *layout.Namespace) { ns.UUID[0]++ },
		"or it was made anew":              func(ns *layout.Namespace) { ns.NGUID[0]++ },
		"blocks of 512 bytes":              func(ns *layout.Namespace) { ns.Block = 4096 },
		"has no namespace 4":               func(ns *layout.Namespace) { ns.NSID = 4 },
	} {
		if err := dial(change); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), dev.ID.String()) {
			t.Errorf("%q: %v", want, err)
		}
	}
	for range 2 { // Close leaves the connections
		if err := dial(func(*layout.Namespace) {}); err != nil {
			t.Fatal(err)
		}
	}
	tg, err := i.Dial(limited(t), dev)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(tg, layout.OpWrite, 1, make([]byte, 4096)); err != nil {
		t.Error(err)
	}
	i.Close()
	if err := run(tg, layout.OpWrite, 1, make([]byte, 4096)); !errors.Is(err, nvmetcp.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// run runs an op on a data file of 64 KiB.
func run(tg *nvmetcp.Target, kind layout.OpKind, handle byte, data []byte) error {
	ended := make(chan error, 1)
	tg.Start(&layout.Op{Kind: kind, File: dataFile(handle), Data: data, Done: func(op *layout.Op) { ended <- op.Err }})
	tg.Flush()
	return <-ended
}

func dataFile(handle byte) *layout.DataFile {
	return &layout.DataFile{Handles: [][]byte{{handle}}, Extents: []layout.Extent{{Len: 64 << 10, State: layout.ExtentReadWrite}}}
}

// slow is a Backing whose writes can be held.
type slow struct {
	nvme.Backing
	mu     sync.Mutex
	hold   chan struct{} // until closed
	inside atomic.Int32
	writes atomic.Int32
}

func (s *slow) WriteAt(p []byte, off int64) (int, error) {
	s.mu.Lock()
	hold := s.hold
	s.mu.Unlock()
	s.inside.Add(1)
	defer s.inside.Add(-1)
	if hold != nil {
		<-hold
	}
	s.writes.Add(1)
	return s.Backing.WriteAt(p, off)
}

// holdWrites has writes wait until release is called.
func (s *slow) holdWrites() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hold := make(chan struct{})
	s.hold = hold
	return func() {
		s.mu.Lock()
		s.hold = nil
		s.mu.Unlock()
		close(hold)
	}
}

const serviceKey, firstKey, secondKey = 1000, 77, 78

// TestInitiatorSecrets: each subsystem gets the secrets that the file has for it, and a host without the right ones does not get in.
func TestInitiatorSecrets(t *testing.T) {
	mine, theirs, other := nvmeauthtest.NewSecret(nvmeauth.SHA256), nvmeauthtest.NewSecret(nvmeauth.SHA384), nvmeauthtest.NewSecret(nvmeauth.SHA256)
	const secondNQN = twoPortNQN + ".second"
	target := startTarget(t, func(cfg *nvme.Config) {
		s := &cfg.Subsystems[0]
		s.AnyHost, s.Hosts = false, []nvme.Host{{NQN: someHost + "1", Secret: mine, ControllerSecret: theirs}}
		cfg.Subsystems = append(cfg.Subsystems, nvme.Subsystem{NQN: secondNQN, Serial: "W2", Hosts: []nvme.Host{{NQN: someHost + "1", Secret: other}}, Namespaces: []nvme.Namespace{
			{NSID: 1, Backing: backing(t, spaceSize), BlockSize: 512, UUID: [16]byte{2}},
		}})
	})
	for name, c := range map[string]struct {
		lines         string // "": no file
		first, second string // errors; "": none
	}{
		"each its own":    {"* " + other.Text() + "\n" + twoPortNQN + " " + mine.Text() + " " + theirs.Text() + "\n", "", ""},
		"one for all":     {"* " + mine.Text() + "\n", "", "authenticat"},
		"wrong":           {twoPortNQN + " " + other.Text() + "\n" + secondNQN + " " + mine.Text() + "\n", "authenticat", "authenticat"},
		"for one alone":   {secondNQN + " " + other.Text() + "\n", "give this host's secret", ""},
		"controller's":    {twoPortNQN + " " + mine.Text() + " " + other.Text() + "\n* " + other.Text(), "authenticat", ""},
		"without secrets": {"", "give this host's secret", "give this host's secret"},
	} {
		t.Run(name, func(t *testing.T) {
			var secrets *nvmeauth.Secrets
			if c.lines != "" {
				file := filepath.Join(t.TempDir(), "secrets")
				err := os.WriteFile(file, []byte(c.lines), 0o600)
				if err == nil {
					secrets, err = nvmeauth.ReadSecrets(file)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			i := newInitiator(t, 1, func(cfg *nvmetcp.InitiatorConfig) { cfg.Secrets = secrets })
			first, second := device(target.Addr(1), false), device(target.Addr(1), false)
			second.Namespace.NQN, second.Namespace.UUID = secondNQN, [16]byte{2}
			for dev, want := range map[*layout.Device]string{first: c.first, second: c.second} {
				tgt, err := i.Dial(limited(t), dev)
				if err == nil {
					tgt.Close()
				}
				if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "DHHC-1:0")) {
					t.Errorf("%s: %v, want %q", dev.Namespace.NQN, err, want)
				}
			}
		})
	}
}

// TestFencing: a service reserves a namespace, a client registers, is fenced while it writes, and comes back with another key.
func TestFencing(t *testing.T) {
	disk := &slow{Backing: backing(t, spaceSize)}
	target := startTarget(t, func(cfg *nvme.Config) { cfg.Subsystems[0].Namespaces[0].Backing = disk })
	cord := newCable(t, target.Addr(2))
	service := mustOpen(t, newInitiator(t, 1, nil), target.Addr(1))
	ctx := limited(t)
	if err := service.Preempt(ctx, serviceKey, firstKey); !errors.As(err, new(*nvmetcp.FencedError)) {
		t.Errorf("preempt by a host that is not registered: %v", err)
	}
	for range 2 {
		if err := service.Reserve(ctx, serviceKey); err != nil {
			t.Fatal(err)
		}
	}
	stranger := mustOpen(t, newInitiator(t, 2, nil), target.Addr(1))
	if err := write(t, stranger); !isFenced(err) {
		t.Errorf("a stranger writes: %v", err)
	}
	if err := stranger.Reserve(ctx, 5); !errors.As(err, new(*nvmetcp.FencedError)) || !strings.Contains(err.Error(), fmt.Sprintf("by host %x", wire.HostID{1})) {
		t.Errorf("a stranger reserves: %v", err)
	}

	var key atomic.Uint64
	key.Store(firstKey)
	i := newInitiator(t, 3, func(cfg *nvmetcp.InitiatorConfig) { cfg.Key = key.Load })
	tg, err := i.Dial(ctx, device(cord.addr(), true))
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 4096)
	if err := run(tg, layout.OpWrite, 1, data); err != nil {
		t.Fatal(err)
	}
	now, err := service.Reservation(ctx)
	keys := map[wire.HostID]uint64{}
	for _, g := range now.Registrants {
		keys[g.HostID] = g.Key
	}
	if err != nil || now.Kind != wire.ReserveExclusiveAccessRegisters || now.Holder != (wire.HostID{1}) || len(keys) != 3 ||
		keys[wire.HostID{1}] != serviceKey || keys[wire.HostID{3}] != firstKey {
		t.Errorf("%+v, %v", now, err)
	}

	release := disk.holdWrites()
	written := make(chan error, 1)
	go func() { written <- run(tg, layout.OpWrite, 1, data) }()
	waittest.Until(t, "the write is being carried out", func() bool { return disk.inside.Load() == 1 })
	fenced := make(chan error, 1)
	go func() {
		err := service.Preempt(ctx, serviceKey, firstKey)
		if n := disk.inside.Load(); n != 0 {
			t.Errorf("%d writes are being carried out when Preempt returns", n)
		}
		fenced <- err
	}()
	select {
	case err := <-fenced:
		t.Fatalf("Preempt has returned while the write was held: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	release()
	if err := <-fenced; err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil && !isFenced(err) {
		t.Errorf("the write that was under way: %v", err)
	}
	before := disk.writes.Load()
	refused := func(when string) {
		t.Helper()
		if err := run(tg, layout.OpWrite, 1, data); !errors.As(err, new(*nvmetcp.FencedError)) {
			t.Errorf("%s: %v", when, err)
		}
	}
	refused("after the fence")
	cord.cut()
	refused("on the next connection")
	if err := service.Preempt(ctx, serviceKey, firstKey); err != nil {
		t.Errorf("preempt of a key that nobody has: %v", err)
	}
	if n := disk.writes.Load(); n != before {
		t.Errorf("%d writes of a host that is fenced", n-before)
	}
	key.Store(secondKey)
	if err := i.Rekey(ctx); err != nil {
		t.Fatal(err)
	}
	if err := run(tg, layout.OpWrite, 1, data); err != nil {
		t.Errorf("with another key: %v", err)
	}
	key.Store(firstKey)
	if err := i.Rekey(ctx); err != nil { // in place of one that is registered
		t.Fatal(err)
	}
	if err := service.Preempt(ctx, serviceKey, secondKey); err != nil {
		t.Error(err)
	}
	if err := run(tg, layout.OpWrite, 1, data); err != nil {
		t.Errorf("after the old key was preempted: %v", err)
	}
	i.Close()
	if now, err := service.Reservation(ctx); err != nil || len(now.Registrants) != 2 {
		t.Errorf("after Close: %+v, %v", now, err)
	}
}

// TestRegisteredAgain: a target that is started anew knows of no registration. Nobody notices, but for those who had none.
func TestRegisteredAgain(t *testing.T) {
	disk := backing(t, spaceSize)
	start := func() *nvmetest.Target {
		return startTarget(t, func(cfg *nvme.Config) { cfg.Subsystems[0].Namespaces[0].Backing = disk })
	}
	target := start()
	cords := []*cable{newCable(t, target.Addr(1)), newCable(t, target.Addr(2))}
	ctx := limited(t)
	service := mustOpen(t, newInitiator(t, 1, nil), cords[0].addr())
	if err := service.Reserve(ctx, serviceKey); err != nil {
		t.Fatal(err)
	}
	stranger := mustOpen(t, newInitiator(t, 2, nil), cords[0].addr())
	i := newInitiator(t, 3, func(cfg *nvmetcp.InitiatorConfig) { cfg.Key = func() uint64 { return firstKey } })
	dev := device(cords[0].addr(), true)
	dev.Addrs = append(dev.Addrs, device(cords[1].addr(), true).Addrs...)
	if _, err := i.Dial(ctx, dev); err != nil {
		t.Fatal(err)
	}
	l := startLoad(mustOpen(t, i, cords[0].addr()), 1)
	for range 2 {
		old := target
		stop, cancel := context.WithTimeout(ctx, 20*time.Second)
		if err := old.Shutdown(stop); err != nil {
			t.Error(err)
		}
		cancel()
		target = start()
		for k, cord := range cords {
			cord.plug(target.Addr(uint16(1 + k)))
		}
		waittest.Until(t, "the reservation is back", func() bool {
			now, err := service.Reservation(ctx)
			return err == nil && now.Holder == wire.HostID{1} && len(now.Registrants) == 2
		})
		before := l.done.Load()
		waittest.Until(t, "the load goes on", func() bool { return l.done.Load() > before+100 })
		if err := write(t, stranger); !isFenced(err) {
			t.Errorf("a stranger writes: %v", err)
		}
	}
	l.end(t)
}

// TestAlive: nothing is sent while the host has no session, be it new, waiting for a path or to be repeated.
func TestAlive(t *testing.T) {
	disk := &slow{Backing: backing(t, spaceSize)}
	target := startTarget(t, func(cfg *nvme.Config) { cfg.Subsystems[0].Namespaces[0].Backing = disk })
	var alive atomic.Bool
	alive.Store(true)
	i := newInitiator(t, 1, func(cfg *nvmetcp.InitiatorConfig) { cfg.Alive, cfg.Key = alive.Load, func() uint64 { return firstKey } })
	if _, err := i.Dial(limited(t), device(target.Addr(1), true)); err != nil {
		t.Fatal(err)
	}
	n := mustOpen(t, i, target.Addr(1))
	if err := write(t, n); err != nil {
		t.Fatal(err)
	}
	lapsed := func(what string, err error) {
		t.Helper()
		if !errors.As(err, new(*nvmetcp.FencedError)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	before := disk.writes.Load()
	alive.Store(false)
	lapsed("a new write", write(t, n))
	lapsed("register", n.Register(limited(t), secondKey))
	alive.Store(true)
	if err := n.Register(limited(t), firstKey); err != nil {
		t.Fatal(err)
	}
	if err := target.PortDown(1); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- write(t, n) }()
	waittest.Until(t, "the write waits", func() bool { return i.Stats()[0].Namespaces[0].Waiting == 1 })
	alive.Store(false)
	if err := target.PortUp(1); err != nil {
		t.Fatal(err)
	}
	lapsed("a write that waited for a path", <-waiting)
	if n := disk.writes.Load(); n != before {
		t.Errorf("%d writes without a session", n-before)
	}
	alive.Store(true)
	if err := write(t, n); err != nil {
		t.Errorf("with a session again: %v", err)
	}
}

// TestEnded: what goes by a layout of a session that has ended is not sent, though there is another session by then.
func TestEnded(t *testing.T) {
	disk := &slow{Backing: backing(t, spaceSize)}
	target := startTarget(t, func(cfg *nvme.Config) { cfg.Subsystems[0].Namespaces[0].Backing = disk })
	i := newInitiator(t, 1, nil)
	tg, err := i.Dial(limited(t), device(target.Addr(1), false))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tg.Close() })
	ended := make(chan struct{})
	start := func(kind layout.OpKind, off int64, n int) chan error {
		file := dataFile(1)
		file.Ended = ended
		done := make(chan error, 1)
		tg.Start(&layout.Op{Kind: kind, File: file, Off: off, Data: make([]byte, n), Done: func(op *layout.Op) { done <- op.Err }})
		tg.Flush()
		return done
	}
	if err := <-start(layout.OpWrite, 0, 1000); err != nil {
		t.Fatal(err)
	}
	if err := target.PortDown(1); err != nil {
		t.Fatal(err)
	}
	waiting := map[string]chan error{
		"a write that waited for a path": start(layout.OpWrite, 0, 512),
		"a part of a block":              start(layout.OpWrite, 1024, 100),
		"another one of the same block":  start(layout.OpWrite, 1200, 100),
		"a read that waited for a path":  start(layout.OpRead, 0, 512),
	}
	waittest.Until(t, "they wait", func() bool { return i.Stats()[0].Namespaces[0].Waiting == 3 })
	before := disk.writes.Load()
	close(ended)
	if err := target.PortUp(1); err != nil {
		t.Fatal(err)
	}
	waiting["a new write"] = start(layout.OpWrite, 0, 512)
	for what, done := range waiting {
		if err := <-done; !errors.As(err, new(*nvmetcp.FencedError)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if n := disk.writes.Load(); n != before {
		t.Errorf("%d writes for a session that has ended", n-before)
	}
	if err := run(tg, layout.OpWrite, 1, make([]byte, 512)); err != nil {
		t.Errorf("by a newer layout: %v", err)
	}
}
