package nvmetcp

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/nvmeauth/nvmeauthtest"
	"github.com/weftfs/weft/internal/waittest"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// TestNewAssociation learns everything anew, from a controller that has changed meanwhile.
func TestNewAssociation(t *testing.T) {
	p := newPeer(t)
	p.ctrl.MDTS = 5
	states := make(chan State, 100)
	c := p.host(func(cfg *Config) { cfg.Queues, cfg.OnState = 4, func(s State) { states <- s } })
	if l := c.Limits(); l.Queues != 4 || l.MaxTransfer != 128<<10 || l.Inline != 8192 || l.MaxBlocks != 65536 || l.Depth != 127 {
		t.Errorf("%+v", l)
	}
	p.queues, p.ctrl.MDTS, p.ctrl.CntlID, p.caps.MaxQueueSize, p.inCaps = 2, 0, 9, 10, 4096
	p.cut()
	awaitState(t, states, StateLive)
	if l := c.Limits(); l.Queues != 2 || l.MaxTransfer != maxTransfer || l.Inline != 4096 || l.Depth != 9 {
		t.Errorf("%+v", l)
	}
	if id := c.Info().Controller.CntlID; id != 9 {
		t.Errorf("controller %d", id)
	}
	if err := do(t, c, readCommand(0, 1<<20)); err != nil {
		t.Error(err)
	}
}

// TestOneQueueLost ends all queues, and says of each command whether it was sent.
func TestOneQueueLost(t *testing.T) {
	p := newPeer(t)
	var mu sync.Mutex
	var conns []*peerConn
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		conns = append(conns, pc)
		return true
	}
	c := p.host(func(cfg *Config) { cfg.Queues, cfg.QueueSize = 3, 3 })
	var sent, unsent atomic.Int32
	var wg sync.WaitGroup
	start := func(n int) {
		for range n {
			cmd := readCommand(0, 128<<10)
			wg.Add(1)
			cmd.Done = func(cmd *Command) {
				var path *PathError
				switch {
				case !errors.As(cmd.Err, &path):
					t.Error(cmd.Err)
				case path.Sent:
					sent.Add(1)
				default:
					unsent.Add(1)
					if !path.Gone.IsZero() {
						t.Error("gone is set for a command that was not sent")
					}
				}
				wg.Done()
			}
			c.Start(cmd)
		}
	}
	start(9) // 2 for each queue are sent, 1 waits
	c.Flush()
	waittest.Until(t, "6 arrived", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(conns) == 6
	})
	abort(conns[0].nc)
	wait(t, &wg)
	if sent.Load() != 6 || unsent.Load() != 3 {
		t.Errorf("%d sent, %d not", sent.Load(), unsent.Load())
	}
	// The admin queue's loss is no different.
	waittest.Until(t, "live", func() bool { return c.State() == StateLive })
	abort(c.live.Load().admin.nc)
	waittest.Until(t, "lost again", func() bool { return c.Stats().Losses == 2 })
	waittest.Until(t, "live again", func() bool { return c.State() == StateLive })
}

// TestBusyKeepAlive has Keep Alives go while all data is stuck, and none at all while answers come from a controller that takes
// any command for one.
func TestBusyKeepAlive(t *testing.T) {
	t.Run("stuck", func(t *testing.T) {
		p := newPeer(t)
		held := make(chan struct{})
		p.io = func(*peerConn, wire.Command, []byte) bool {
			<-held
			return false
		}
		p.admin = func(_ *peerConn, cmd wire.Command, _ []byte) bool { return cmd.Opcode == wire.OpGetFeatures }
		c := p.host(func(cfg *Config) { cfg.KATO = 2 * time.Second }) // a busy machine must not take as long for one
		var wg sync.WaitGroup
		for range 100 {
			wg.Add(1)
			c.Start(&Command{Op: wire.OpWrite, NSID: 1, Blocks: 16, Data: make([]byte, 8192), Done: func(*Command) { wg.Done() }})
		}
		c.Flush()
		// Admin commands that stay without an answer do not take its place either.
		ctx, cancel := context.WithCancel(t.Context())
		for range 40 {
			wg.Go(func() { c.GetFeature(ctx, wire.Feature{ID: wire.FeatureKATO}, nil) })
		}
		before := p.beats.Load()
		waittest.Until(t, "Keep Alives", func() bool { return p.beats.Load() > before+1 })
		cancel()
		close(held)
		wait(t, &wg)
		if s := c.Stats(); s.Losses != 0 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("traffic", func(t *testing.T) {
		p := newPeer(t)
		p.ctrl.CTRATT |= wire.CTRATTTBKAS
		c := p.host(func(cfg *Config) { cfg.KATO = 10 * time.Second })
		a := c.live.Load()
		if a.alive.every != 2500*time.Millisecond || !a.alive.traffic {
			t.Errorf("every %v", a.alive.every)
		}
		if d := a.info.lingers(); d != 20*time.Second {
			t.Errorf("lingers %v", d)
		}
	})
	t.Run("no answer", func(t *testing.T) {
		p := newPeer(t)
		var connected atomic.Bool // or that would fail
		p.admin = func(_ *peerConn, cmd wire.Command, _ []byte) bool {
			return cmd.Opcode == wire.OpKeepAlive && connected.Load() && p.connects.Load() == 1
		}
		c := p.host(func(cfg *Config) { cfg.KATO = time.Second })
		connected.Store(true)
		waittest.Until(t, "lost", func() bool { return c.Stats().Losses > 0 })
		waittest.Until(t, "live", func() bool { return c.State() == StateLive })
	})
	t.Run("expired", func(t *testing.T) {
		p := newPeer(t)
		var connected atomic.Bool
		p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
			if cmd.Opcode != wire.OpKeepAlive || !connected.Load() || p.connects.Load() > 1 {
				return false
			}
			pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusKeepAliveExpired})
			return true
		}
		c := p.host(func(cfg *Config) { cfg.KATO = time.Second })
		connected.Store(true)
		waittest.Until(t, "lost", func() bool { return c.Stats().Losses > 0 })
		waittest.Until(t, "live", func() bool { return c.State() == StateLive })
	})
	t.Run("none", func(t *testing.T) {
		p := newPeer(t)
		p.ctrl.Type, p.ctrl.KAS, p.ctrl.AERs, p.ctrl.OAES = wire.ControllerDiscovery, 0, 1, wire.EventsDiscovery
		c := p.host(func(cfg *Config) { cfg.Discovery = true })
		if c.Info().KATO != 0 || len(c.live.Load().io) != 0 {
			t.Error("a discovery controller has KATO or I/O queues")
		}
		var bad *RequestError
		if err := do(t, c, readCommand(0, 512)); !errors.As(err, &bad) {
			t.Error(err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.aers) != 0 {
			t.Error("AERs without keep-alive")
		}
	})
}

// TestEvents tells each event once, in order, and always has AERs outstanding, as many as are allowed.
func TestEvents(t *testing.T) {
	p := newPeer(t)
	got := make(chan wire.AsyncEvent, 1000)
	var c *Controller
	c = p.host(func(cfg *Config) {
		cfg.OnEvent = func(e wire.AsyncEvent) {
			if c != nil {
				if err := c.GetLogPage(context.Background(), wire.GetLogPage{ID: wire.LogANA, NSID: wire.AllNamespaces}, make([]byte, 8192)); err != nil {
					t.Error(err)
				}
			}
			got <- e
		}
	})
	outstanding := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.aers)
	}
	for i := range 50 {
		waittest.Until(t, "4 AERs", func() bool { return outstanding() == maxEvents })
		for range 1 + i%maxEvents {
			p.event(wire.EventANAChanged)
		}
		for range 1 + i%maxEvents {
			select {
			case e := <-got:
				if e != wire.EventANAChanged {
					t.Fatal(e)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("no event")
			}
		}
	}
	// One that asks for a reset gets it.
	waittest.Until(t, "4 AERs", func() bool { return outstanding() == maxEvents })
	p.event(wire.EventPersistentError)
	waittest.Until(t, "reset", func() bool { return p.connects.Load() == 2 })
}

// TestEventRefused lives with a controller that allows fewer AERs than it says.
func TestEventRefused(t *testing.T) {
	p := newPeer(t)
	var n atomic.Int32
	p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if cmd.Opcode != wire.OpAsyncEvent || n.Add(1) == 1 {
			return false
		}
		pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusAERLimit, DNR: true})
		return true
	}
	c := p.host(nil)
	waittest.Until(t, "refused", func() bool { return n.Load() == maxEvents })
	if err := do(t, c, readCommand(0, 512)); err != nil {
		t.Fatal(err)
	}
	if s := c.Stats(); s.Losses != 0 {
		t.Errorf("%+v", s)
	}
}

// TestResetStatus resets a controller whose answer says that it is out of step.
func TestResetStatus(t *testing.T) {
	p := newPeer(t)
	p.io = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if p.connects.Load() > 1 {
			return false
		}
		pc.answer(wire.Completion{CID: cmd.CID, Status: wire.StatusCIDConflict})
		return true
	}
	c := p.host(nil)
	var status *StatusError
	if err := do(t, c, &Command{Op: wire.OpFlush, NSID: 1}); !errors.As(err, &status) || status.Class() != wire.ClassReset {
		t.Fatal(err)
	}
	waittest.Until(t, "reset", func() bool { return p.connects.Load() == 2 && c.State() == StateLive })
	if err := do(t, c, &Command{Op: wire.OpFlush, NSID: 1}); err != nil {
		t.Fatal(err)
	}
}

// TestAdminGivenUp lets go of an admin command's memory when its caller does.
func TestAdminGivenUp(t *testing.T) {
	p := newPeer(t)
	held := make(chan struct{})
	p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if cmd.Opcode == wire.OpGetLogPage {
			<-held
		}
		return false
	}
	c := p.host(nil)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	b := []byte(strings.Repeat("x", 4096))
	if err := c.GetLogPage(ctx, wire.GetLogPage{ID: wire.LogANA}, b); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	close(held)
	if err := c.GetLogPage(t.Context(), wire.GetLogPage{ID: wire.LogANA}, make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if string(b) != strings.Repeat("x", 4096) {
		t.Error("the memory was written to")
	}
	if s := c.Stats(); s.Losses != 0 {
		t.Errorf("%+v", s)
	}
}

// TestAdminGivenUpOften: admin commands that the controller does not answer, and nobody waits for any more, leave room for Keep Alives.
func TestAdminGivenUpOften(t *testing.T) {
	p := newPeer(t)
	p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool { return cmd.Opcode == wire.OpGetFeatures }
	c := p.host(func(cfg *Config) { cfg.AdminTimeout, cfg.KATO = time.Minute, 2*time.Second })
	var wg sync.WaitGroup
	for range 2 * wire.AdminQueueSize {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if _, err := c.GetFeature(ctx, wire.Feature{ID: wire.FeatureKATO}, nil); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		time.Sleep(5 * time.Millisecond)
	}
	wait(t, &wg)
	before := p.beats.Load()
	waittest.Until(t, "two more Keep Alives", func() bool { return p.beats.Load() >= before+2 })
}

// TestAdminLost ends admin commands that have no answer in time, and those that wait for them.
func TestAdminLost(t *testing.T) {
	p := newPeer(t)
	p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool { return cmd.Opcode == wire.OpGetFeatures }
	// A busy machine must not take as long to connect, and to begin all commands.
	c := p.host(func(cfg *Config) { cfg.AdminTimeout, cfg.KATO = time.Second, time.Minute })
	var wg sync.WaitGroup
	var sent, unsent atomic.Int32
	for range 2 * adminCommands {
		wg.Go(func() {
			_, err := c.GetFeature(t.Context(), wire.Feature{ID: wire.FeatureKATO}, nil)
			var path *PathError
			switch {
			case !errors.As(err, &path):
				t.Error(err)
			case path.Sent:
				sent.Add(1)
			default:
				unsent.Add(1)
			}
		})
	}
	wait(t, &wg)
	if sent.Load() != adminCommands || unsent.Load() != adminCommands {
		t.Errorf("%d sent, %d not", sent.Load(), unsent.Load())
	}
}

// TestNamespaces asks for what there is.
func TestNamespaces(t *testing.T) {
	p := newPeer(t)
	var list []uint32
	p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if cmd.Opcode != wire.OpIdentify || wire.CNS(cmd.CDW10) != wire.CNSActive {
			return false
		}
		i := 0
		for i < len(list) && list[i] <= cmd.NSID {
			i++
		}
		pc.data(wire.C2HData{CID: cmd.CID, Last: true, Success: true}, wire.AppendNSIDs(nil, list[i:]))
		return true
	}
	c := p.host(nil)
	for _, n := range []int{0, 1, 1023, 1024, 1025, 5000} {
		list = nil
		for i := range n {
			list = append(list, uint32(3*i+1))
		}
		got, err := c.ActiveNamespaces(t.Context())
		if err != nil || len(got) != n || n > 0 && got[n-1] != list[n-1] {
			t.Errorf("%d of %d namespaces, %v", len(got), n, err)
		}
	}
	// A list that never ends.
	p.admin = func(pc *peerConn, cmd wire.Command, _ []byte) bool {
		if cmd.Opcode != wire.OpIdentify {
			return false
		}
		list = nil
		for i := range uint32(1024) {
			list = append(list, cmd.NSID+1+i)
		}
		pc.data(wire.C2HData{CID: cmd.CID, Last: true, Success: true}, wire.AppendNSIDs(nil, list))
		return true
	}
	if _, err := c.ActiveNamespaces(t.Context()); err == nil || !strings.Contains(err.Error(), testNQN) {
		t.Errorf("a list that never ends: %v", err)
	}
}

// TestClose ends everything, and leaves no goroutine.
func TestClose(t *testing.T) {
	p := newPeer(t)
	p.io = func(*peerConn, wire.Command, []byte) bool { return true }
	before := runtime.NumGoroutine()
	cfg := p.config()
	cfg.Queues, cfg.QueueSize = 2, 4
	c, err := Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 20 {
		cmd := readCommand(0, 4096)
		wg.Add(1)
		cmd.Done = func(cmd *Command) {
			if cmd.Err != ErrClosed {
				t.Error(cmd.Err)
			}
			wg.Done()
		}
		c.Start(cmd)
	}
	c.Flush()
	c.Close()
	wait(t, &wg)
	if err := do(t, c, readCommand(0, 4096)); err != ErrClosed {
		t.Error(err)
	}
	if _, err := c.Admin(t.Context(), wire.KeepAlive(), nil); err != ErrClosed {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	waittest.Until(t, "goroutines gone", func() bool { return runtime.NumGoroutine() <= before })
}

// TestReuseInDone starts a command again from its own Done.
func TestReuseInDone(t *testing.T) {
	p := newPeer(t)
	c := p.host(nil)
	var wg sync.WaitGroup
	for i := range 8 {
		n := 0
		cmd := readCommand(uint64(i), 4096)
		cmd.Done = func(cmd *Command) {
			if cmd.Err != nil {
				t.Error(cmd.Err)
			}
			if n++; n < 200 {
				c.Start(cmd)
				c.Flush()
				return
			}
			wg.Done()
		}
		wg.Add(1)
		c.Start(cmd)
	}
	c.Flush()
	wait(t, &wg)
}

// TestConfig refuses what cannot be right.
func TestConfig(t *testing.T) {
	good := Config{Addr: "h:4420", SubsysNQN: testNQN, HostNQN: hostNQN, HostID: wire.HostID{1}}
	for name, change := range map[string]func(*Config){
		"address":    func(c *Config) { c.Addr = "h" },
		"NQN":        func(c *Config) { c.SubsysNQN = "" },
		"host NQN":   func(c *Config) { c.HostNQN = "nqn.bad" },
		"HOSTID":     func(c *Config) { c.HostID = wire.HostID{} },
		"queues":     func(c *Config) { c.Queues = 1000 },
		"queue size": func(c *Config) { c.QueueSize = 1 },
		"KATO":       func(c *Config) { c.KATO = 1500 * time.Microsecond },
		"secret":     func(c *Config) { c.CtrlSecret = nvmeauthtest.NewSecret(nvmeauth.SHA256) },
		"negative":   func(c *Config) { c.IOTimeout = -1 },
	} {
		cfg := good
		change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), "nvmetcp: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := good.Validate(); err != nil || good.KATO != DefaultKATO || good.QueueSize != DefaultQueueSize || good.Queues < 1 {
		t.Errorf("%+v, %v", good, err)
	}
}
