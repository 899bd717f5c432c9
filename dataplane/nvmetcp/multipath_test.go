package nvmetcp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	twoPortNQN = "nqn.2024-01.weft.test:two"
	someHost   = "nqn.2024-01.weft.test:host"
	spaceSize  = 4 << 20 // bytes
)

// startTarget serves one namespace of 512-byte blocks at two ports.
func startTarget(t *testing.T, change func(*nvme.Config)) *nvmetest.Target {
	t.Helper()
	cfg := nvme.Config{
		Subsystems: []nvme.Subsystem{{NQN: twoPortNQN, Serial: "W1", AnyHost: true, Namespaces: []nvme.Namespace{
			{NSID: 1, Backing: backing(t, spaceSize), BlockSize: 512, UUID: [16]byte{1}},
		}}},
		Ports: []nvme.Port{{ID: 1, Listen: "127.0.0.1:0"}, {ID: 2, Listen: "127.0.0.1:0"}},
		Log:   slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&cfg)
	}
	target, err := nvmetest.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := target.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return target
}

func backing(t *testing.T, size int64) *nvme.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "namespace")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	f, err := nvme.OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// hostConfig has times that make the tests short.
func hostConfig() nvmetcp.Config {
	return nvmetcp.Config{
		SubsysNQN: twoPortNQN, HostNQN: someHost, HostID: wire.HostID{1}, Queues: 2, KATO: 500 * time.Millisecond,
		ReconnectDelay: 100 * time.Millisecond, IOTimeout: 2 * time.Second, Log: slog.New(slog.DiscardHandler),
	}
}

func openSubsystem(t *testing.T, addrs ...string) (*nvmetcp.Subsystem, *nvmetcp.Namespace) {
	t.Helper()
	s, err := nvmetcp.Open(t.Context(), nvmetcp.SubsystemConfig{Controller: hostConfig(), Addrs: addrs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	n, err := s.Namespace(1)
	if err != nil {
		t.Fatal(err)
	}
	return s, n
}

// cable is between host and target: it can be cut, or go silent.
type cable struct {
	l      net.Listener
	silent atomic.Bool
	wg     sync.WaitGroup

	mu    sync.Mutex
	to    string
	conns []net.Conn
}

func newCable(t *testing.T, to string) *cable {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cable{to: to, l: l}
	c.wg.Add(1)
	go c.accept() // ends with the listener
	t.Cleanup(func() {
		l.Close()
		c.cut()
		c.wg.Wait()
	})
	return c
}

func (c *cable) addr() string { return c.l.Addr().String() }

func (c *cable) accept() {
	defer c.wg.Done()
	for {
		a, err := c.l.Accept()
		if err != nil {
			return
		}
		c.mu.Lock()
		to := c.to
		c.mu.Unlock()
		b, err := net.Dial("tcp", to)
		if err != nil {
			a.Close()
			continue
		}
		c.mu.Lock()
		c.conns = append(c.conns, a, b)
		c.mu.Unlock()
		c.wg.Add(2)
		go c.carry(a, b) // both end when a side is closed
		go c.carry(b, a)
	}
}

func (c *cable) carry(dst, src net.Conn) {
	defer c.wg.Done()
	defer dst.Close()
	defer src.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := src.Read(b)
		if err != nil {
			return
		}
		for c.silent.Load() { // what has left the sender arrives later, or never
			src.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			if _, err := src.Read(nil); err != nil && errors.Is(err, io.EOF) {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		src.SetReadDeadline(time.Time{})
		if _, err := dst.Write(b[:n]); err != nil {
			return
		}
	}
}

// plug makes it lead elsewhere, and closes all connections.
func (c *cable) plug(to string) {
	c.mu.Lock()
	c.to = to
	c.mu.Unlock()
	c.cut()
}

// cut closes all connections.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, nc := range c.conns {
		nc.(*net.TCPConn).SetLinger(0)
		nc.Close()
	}
	c.conns = nil
}

// load writes and reads regions of a namespace, each worker its own, and checks what it reads.
type load struct {
	n       *nvmetcp.Namespace
	stop    chan struct{}
	ended   chan error
	done    atomic.Int64
	longest atomic.Int64 // ns that a command took
}

const (
	workers = 8
	regions = 16
	region  = 8 // blocks
)

func startLoad(n *nvmetcp.Namespace, seed uint64) *load {
	l := &load{n: n, stop: make(chan struct{}), ended: make(chan error, workers)}
	for w := range workers {
		go func() { l.ended <- l.work(w, rand.New(rand.NewPCG(seed, uint64(w)))) }() // ends with stop
	}
	return l
}

func (l *load) work(w int, r *rand.Rand) error {
	var have [regions]int
	do := func(op wire.Opcode, i int, data []byte) error {
		began := time.Now()
		// The test's own limit: a command that does not end is an error too.
		ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
		defer cancel()
		q := &nvmetcp.Request{Command: nvmetcp.Command{Op: op, SLBA: uint64(w*regions+i) * region, Blocks: region, Data: data}}
		err := l.n.Do(ctx, q)
		l.longest.Store(max(l.longest.Load(), int64(time.Since(began))))
		l.done.Add(1)
		if err != nil {
			return fmt.Errorf("worker %d region %d: %w", w, i, err)
		}
		return nil
	}
	check := func(i int) error {
		got := make([]byte, region*512)
		if err := do(wire.OpRead, i, got); err != nil {
			return err
		}
		if have[i] != 0 && !bytes.Equal(got, content(w, i, have[i])) {
			return fmt.Errorf("worker %d region %d: %.40q, want generation %d", w, i, got, have[i])
		}
		return nil
	}
	for {
		select {
		case <-l.stop:
			for i := range regions {
				if err := check(i); err != nil {
					return err
				}
			}
			return nil
		default:
		}
		i := r.IntN(regions)
		if r.IntN(2) == 0 {
			if err := check(i); err != nil {
				return err
			}
			continue
		}
		have[i]++
		if err := do(wire.OpWrite, i, content(w, i, have[i])); err != nil {
			return err
		}
	}
}

func content(w, i, generation int) []byte {
	s := fmt.Sprintf("worker %d region %d generation %d;", w, i, generation)
	return bytes.Repeat([]byte(s), region*512/len(s)+1)[:region*512]
}

// end stops the load and reports its errors.
func (l *load) end(t *testing.T) {
	t.Helper()
	close(l.stop)
	for range workers {
		if err := <-l.ended; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d commands, the longest took %v", l.done.Load(), time.Duration(l.longest.Load()).Round(time.Millisecond))
}

// live is how many paths of the first namespace are in use; 0 also if there is none.
func live(s *nvmetcp.Subsystem) (k int) {
	if list := s.Stats().Namespaces; len(list) > 0 {
		for _, p := range list[0].Paths {
			if p.Use != "out" {
				k++
			}
		}
	}
	return k
}

// TestFailuresUnderLoad: ports go down and come back, connections are cut or go silent, controllers are dropped and ANA states change, with
// always one path that works in the end. No command fails and all data is right.
func TestFailuresUnderLoad(t *testing.T) {
	target := startTarget(t, nil)
	cables := []*cable{newCable(t, target.Addr(1)), newCable(t, target.Addr(2))}
	s, n := openSubsystem(t, cables[0].addr(), cables[1].addr())
	waittest.Until(t, "two paths", func() bool { return live(s) == 2 })
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 99))
	l := startLoad(n, seed)
	states := []wire.ANAState{wire.ANANonOptimized, wire.ANAInaccessible, wire.ANALoss, wire.ANAChange}
	for i := range 24 {
		port := uint16(1 + i%2)
		c := cables[port-1]
		what := r.IntN(5)
		switch what {
		case 0:
			if err := target.PortDown(port); err != nil {
				t.Fatal(err)
			}
		case 1:
			c.cut()
		case 2:
			c.silent.Store(true)
		case 3:
			if err := target.DropControllers(twoPortNQN, someHost); err != nil { // both
				t.Fatal(err)
			}
		case 4:
			if err := target.SetANA(port, 1, states[r.IntN(len(states))]); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
		s.SetPolicy(nvmetcp.Policy(r.IntN(4)))
		if what == 2 { // long enough to be noticed
			waittest.Until(t, "a silent path is out", func() bool { return live(s) < 2 })
			c.silent.Store(false)
		}
		if err := target.PortUp(port); err != nil {
			t.Fatal(err)
		}
		if err := target.SetANA(port, 1, wire.ANAOptimized); err != nil {
			t.Fatal(err)
		}
		waittest.Until(t, fmt.Sprintf("two paths again after failure %d (kind %d)", i, what), func() bool {
			return live(s) == 2
		})
	}
	l.end(t)
	for _, c := range s.Stats().Controllers {
		t.Logf("%+v", c)
	}
}

// TestANAUnderLoad: while states change at random, with always one usable path, everything is done.
func TestANAUnderLoad(t *testing.T) {
	target := startTarget(t, nil)
	s, n := openSubsystem(t, target.Addr(1), target.Addr(2))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 98))
	l := startLoad(n, seed)
	states := []wire.ANAState{wire.ANAOptimized, wire.ANANonOptimized, wire.ANAInaccessible, wire.ANALoss, wire.ANAChange}
	for range 200 {
		port := uint16(1 + r.IntN(2))
		if err := target.SetANA(3-port, 1, states[r.IntN(2)]); err != nil {
			t.Fatal(err)
		}
		if err := target.SetANA(port, 1, states[r.IntN(5)]); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(r.IntN(10)) * time.Millisecond)
	}
	l.end(t)
	st := s.Stats().Namespaces[0]
	t.Logf("%+v", st)
	if st.Waiting != 0 {
		t.Errorf("%d commands still wait", st.Waiting)
	}
}

// TestNamespaceChangesAtTarget: the target's namespaces come, go, grow and are replaced.
func TestNamespaceChangesAtTarget(t *testing.T) {
	target := startTarget(t, nil)
	s, n := openSubsystem(t, target.Addr(1), target.Addr(2))
	waittest.Until(t, "two paths", func() bool { return live(s) == 2 })
	extra := backing(t, 1<<20)
	if err := target.AddNamespace(twoPortNQN, nvme.Namespace{NSID: 7, Backing: extra, BlockSize: 4096, NGUID: [16]byte{7}}); err != nil {
		t.Fatal(err)
	}
	var seven *nvmetcp.Namespace
	waittest.Until(t, "namespace 7", func() (ok bool) {
		var err error
		seven, err = s.Namespace(7)
		return err == nil
	})
	if seven.Blocks() != 256 || seven.Format().BlockSize != 4096 || !seven.Format().Cached {
		t.Errorf("%d blocks, %+v", seven.Blocks(), seven.Format())
	}
	if err := target.RemoveNamespace(twoPortNQN, 7); err != nil {
		t.Fatal(err)
	}
	if err := target.AddNamespace(twoPortNQN, nvme.Namespace{NSID: 7, Backing: backing(t, 1<<20), BlockSize: 4096, NGUID: [16]byte{8}}); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "another namespace 7", func() bool {
		now, err := s.Namespace(7)
		return err == nil && now.ID() != seven.ID()
	})
	err := seven.Do(t.Context(), &nvmetcp.Request{Command: nvmetcp.Command{Op: wire.OpWrite, Blocks: 1, Data: make([]byte, 4096)}})
	if gone, ok := errors.AsType[*nvmetcp.GoneError](err); !ok || gone.Now == nil || gone.Now.NGUID != [16]byte{8} {
		t.Errorf("write to the one that was replaced: %v", err)
	}
	if n.Blocks() != spaceSize/512 {
		t.Errorf("namespace 1: %d blocks", n.Blocks())
	}
}

// TestNamespaceBackAtOnce: a namespace that is taken away and put back at once is used again each time, whatever of that the host has seen.
func TestNamespaceBackAtOnce(t *testing.T) {
	space := nvme.Namespace{NSID: 1, Backing: backing(t, spaceSize), BlockSize: 512, UUID: [16]byte{1}}
	target := startTarget(t, func(cfg *nvme.Config) { cfg.Subsystems[0].Namespaces[0] = space })
	s, n := openSubsystem(t, target.Addr(1), target.Addr(2))
	for round := range 100 {
		if err := target.RemoveNamespace(twoPortNQN, 1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(round%10) * 50 * time.Microsecond) // at another point of what the host does about it
		if err := target.AddNamespace(twoPortNQN, space); err != nil {
			t.Fatal(err)
		}
		waittest.Until(t, fmt.Sprintf("namespace 1 after round %d", round), func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			err := n.Do(ctx, &nvmetcp.Request{Command: nvmetcp.Command{Op: wire.OpRead, Blocks: 1, Data: make([]byte, 512)}})
			return err == nil && live(s) == 2
		})
	}
}

// TestFollowTarget: portals that are removed and added at the target are followed, without an error under load.
func TestFollowTarget(t *testing.T) {
	target := startTarget(t, func(cfg *nvme.Config) {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: 3, Listen: "127.0.0.1:0", Discovery: true})
	})
	cfg := nvmetcp.DiscoveryConfig{Controller: hostConfig(), Addrs: []string{target.Addr(3)}}
	cfg.Controller.SubsysNQN = ""
	found, err := nvmetcp.Discover(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	both := []string{target.Addr(1), target.Addr(2)}
	slices.Sort(both)
	if got := found.Addrs(twoPortNQN); !slices.Equal(got, both) {
		t.Fatalf("found %v, want %v", got, both)
	}
	s, n := openSubsystem(t, found.Addrs(twoPortNQN)...)
	waittest.Until(t, "two paths", func() bool { return live(s) == 2 })
	cfg.Known = found
	cfg.OnChange = func(d *nvmetcp.Directory) { s.SetAddrs(d.Addrs(twoPortNQN)) }
	d, err := nvmetcp.Follow(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	waittest.Until(t, "verified", func() bool { _, ok := d.Now(); return ok })
	l := startLoad(n, 5)
	for _, port := range []uint16{1, 2, 1} {
		if err := target.PortDown(port); err != nil {
			t.Fatal(err)
		}
		waittest.Until(t, "one address", func() bool { return len(s.Addrs()) == 1 })
		if err := target.PortUp(port); err != nil {
			t.Fatal(err)
		}
		waittest.Until(t, "two paths", func() bool { return len(s.Addrs()) == 2 && live(s) == 2 })
	}
	l.end(t)
}

// TestErrorsNameWhatToDo: each with the address and the name.
func TestErrorsNameWhatToDo(t *testing.T) {
	target := startTarget(t, func(cfg *nvme.Config) {
		cfg.Subsystems = append(cfg.Subsystems, nvme.Subsystem{NQN: "nqn.2024-01.weft.test:closed", Serial: "W2"})
	})
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
			io.WriteString(nc, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"+strings.Repeat("x", 200))
			nc.Close()
		}
	}()
	for _, c := range []struct{ addr, nqn, want string }{
		{web.Addr().String(), twoPortNQN, "is this an NVMe/TCP port?"},
		{target.Addr(1), "nqn.2024-01.weft.test:closed", "allow host " + someHost},
		{target.Addr(1), "nqn.2024-01.weft.test:none", "no such subsystem"},
	} {
		cfg := hostConfig()
		cfg.SubsysNQN = c.nqn
		_, err := nvmetcp.Open(t.Context(), nvmetcp.SubsystemConfig{Controller: cfg, Addrs: []string{c.addr}})
		for _, want := range []string{c.addr, c.nqn, c.want} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s %s: %v, want %q", c.addr, c.nqn, err, want)
			}
		}
	}
	disc := nvmetcp.DiscoveryConfig{Controller: hostConfig(), Addrs: []string{web.Addr().String()}}
	disc.Controller.SubsysNQN = ""
	if _, err := nvmetcp.Discover(t.Context(), disc); err == nil || !strings.Contains(err.Error(), "is this an NVMe/TCP port?") {
		t.Errorf("discovery at a web server: %v", err)
	}
	disc.Addrs = []string{target.Addr(1)}
	d, err := nvmetcp.Discover(t.Context(), disc)
	if err != nil || len(d.Addrs("nqn.2024-01.weft.test:closed")) != 0 || len(d.Addrs(twoPortNQN)) != 2 {
		t.Errorf("%+v, %v", d, err)
	}
	s, _ := openSubsystem(t, target.Addr(1))
	if _, err := s.Namespace(9); err == nil || !strings.Contains(err.Error(), "has no namespace 9") || !strings.Contains(err.Error(), target.Addr(1)) {
		t.Errorf("namespace 9: %v", err)
	}
}
