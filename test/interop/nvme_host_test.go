package interop

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/nvmeauth/nvmeauthtest"
	"github.com/weftfs/weft/test/harness"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// nvmeConfig is a host of its own at each of the target's two ports.
func nvmeConfig(ports map[string]string, port int) nvmetcp.Config {
	return nvmetcp.Config{
		Addr:      net.JoinHostPort(ports["LAB_HOST"], strings.Fields(ports["LAB_NVME_PORTS"])[port]),
		SubsysNQN: ports["LAB_NQN0"],
		HostNQN:   "nqn.2024-01.weft.test:host",
		HostID:    wire.HostID{1, 2, 3, byte(port)},
		Queues:    2,
	}
}

func nvmeConnect(t *testing.T, cfg nvmetcp.Config) *nvmetcp.Controller {
	t.Helper()
	c, err := nvmetcp.Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestNVMeTarget has the kernel's NVMe/TCP target: both ports, both namespaces (of 512 and 4096 bytes a block), with and without
// digests, by every way that data can go.
func TestNVMeTarget(t *testing.T) {
	ports := harness.StartVM(t)
	for port := range 2 {
		for _, digests := range []bool{false, true} {
			t.Run(fmt.Sprintf("port %d digests %v", port, digests), func(t *testing.T) {
				cfg := nvmeConfig(ports, port)
				cfg.HeaderDigest, cfg.DataDigest = digests, digests
				c := nvmeConnect(t, cfg)
				nsids, err := c.ActiveNamespaces(t.Context())
				if err != nil || len(nsids) != 2 {
					t.Fatalf("namespaces %v, %v", nsids, err)
				}
				for i, nsid := range nsids {
					ns, err := c.IdentifyNamespace(t.Context(), nsid)
					if err != nil {
						t.Fatal(err)
					}
					if want := []int{512, 4096}[i]; ns.BlockSize() != want || ns.Size() != 512<<20 {
						t.Fatalf("namespace %d: %d bytes in blocks of %d, want 512 MiB of %d", nsid, ns.Size(), ns.BlockSize(), want)
					}
					d, err := c.NamespaceDescriptors(t.Context(), nsid)
					if err != nil || d.UUID == [16]byte{} {
						t.Fatalf("descriptors %+v, %v", d, err)
					}
					exchange(t, c, nsid, ns)
				}
				groups := anaStates(t, c)
				want := map[uint32]wire.ANAState{uint32(1 + port): wire.ANAOptimized, uint32(2 - port): wire.ANANonOptimized}
				for id, state := range want {
					if groups[id] != state {
						t.Errorf("ANA group %d is %v here, want %v", id, groups[id], state)
					}
				}
			})
		}
	}
	t.Run("read back", func(t *testing.T) { nvmeReadBack(t, ports) })
	t.Run("refused", func(t *testing.T) { nvmeRefused(t, ports) })
	t.Run("events", func(t *testing.T) { nvmeEvents(t, ports) })
	t.Run("keep alive", func(t *testing.T) { nvmeKeepAlive(t, ports) })
	t.Run("authentication", func(t *testing.T) { nvmeAuthentication(t, ports) })
	t.Run("lost", func(t *testing.T) { nvmeLost(t, ports) })
}

// anaStates reads the ANA log.
func anaStates(t *testing.T, c *nvmetcp.Controller) map[uint32]wire.ANAState {
	t.Helper()
	id := c.Info().Controller
	b := make([]byte, wire.ANAHeaderSize+wire.ANAGroupSize*id.NANAGRPID+4*id.MNAN)
	if err := c.GetLogPage(t.Context(), wire.GetLogPage{ID: wire.LogANA, NSID: wire.AllNamespaces}, b); err != nil {
		t.Fatal(err)
	}
	groups := map[uint32]wire.ANAState{}
	for g, err := range wire.ANAGroups(b) {
		if err != nil {
			t.Fatal(err)
		}
		groups[g.ID] = g.State
	}
	return groups
}

// exchange writes random pieces of a part of the namespace, many at once, and reads them back in others.
func exchange(t *testing.T, c *nvmetcp.Controller, nsid uint32, ns *wire.Namespace) {
	t.Helper()
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("namespace %d: seed %#x", nsid, seed)
	const size = 16 << 20
	model := make([]byte, size)
	for i := range model {
		model[i] = byte(rnd.Uint32())
	}
	blocks := uint64(size >> ns.BlockShift)
	start := rnd.Uint64N(ns.NSZE - blocks)
	all := func(op wire.Opcode, buf []byte) {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var failed error
		for at := uint64(0); at < blocks; {
			n := uint64(1 + rnd.IntN(8))
			if rnd.IntN(2) == 0 {
				n = rnd.Uint64N(1<<20>>ns.BlockShift) + 1
			}
			n = uint64(c.Limits().Span(ns, start+at, min(n, blocks-at)))
			wg.Add(1)
			c.Start(&nvmetcp.Command{
				Op: op, NSID: nsid, SLBA: start + at, Blocks: uint32(n), FUA: op == wire.OpWrite && rnd.IntN(4) == 0,
				Data: buf[at<<ns.BlockShift : (at+n)<<ns.BlockShift],
				Done: func(cmd *nvmetcp.Command) {
					if cmd.Err != nil {
						mu.Lock()
						failed = cmd.Err
						mu.Unlock()
					}
					wg.Done()
				},
			})
			if at += n; rnd.IntN(8) == 0 {
				c.Flush()
			}
		}
		c.Flush()
		wg.Wait()
		if failed != nil {
			t.Fatal(failed)
		}
	}
	all(wire.OpWrite, model)
	if err := c.Do(t.Context(), &nvmetcp.Command{Op: wire.OpFlush, NSID: nsid}); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, size)
	all(wire.OpRead, got)
	if !bytes.Equal(got, model) {
		t.Fatalf("namespace %d: what was read is not what was written", nsid)
	}
	// What has no data of its own, and what is refused.
	if err := c.Do(t.Context(), &nvmetcp.Command{Op: wire.OpWriteZeroes, NSID: nsid, SLBA: start, Blocks: 8}); err != nil {
		t.Fatal(err)
	}
	clear(model[:8<<ns.BlockShift])
	all(wire.OpRead, got)
	if !bytes.Equal(got, model) {
		t.Fatalf("namespace %d: zeroes are not where they should be", nsid)
	}
	beyond := &nvmetcp.Command{Op: wire.OpRead, NSID: nsid, SLBA: ns.NSZE - 1, Blocks: 2, Data: make([]byte, 2<<ns.BlockShift)}
	var status *nvmetcp.StatusError
	if err := c.Do(t.Context(), beyond); !errors.As(err, &status) || !strings.Contains(err.Error(), "nqn.") {
		t.Fatalf("a read beyond the end: %v", err)
	}
}

// nvmeReadBack has the kernel's initiator read what ours has written.
func nvmeReadBack(t *testing.T, ports map[string]string) {
	c := nvmeConnect(t, nvmeConfig(ports, 0))
	data := make([]byte, 1<<20)
	for nsid, block := range map[uint32]int{1: 512, 2: 4096} {
		sum := sha256.New()
		for at := range uint64(16) {
			crand.Read(data)
			sum.Write(data)
			n := uint32(len(data) / block)
			if err := c.Do(t.Context(), &nvmetcp.Command{Op: wire.OpWrite, NSID: nsid, SLBA: at * uint64(n), Blocks: n, Data: data}); err != nil {
				t.Fatal(err)
			}
		}
		out := harness.Guest(t, nvmeShell+fmt.Sprintf(`
			lab connect s0 >&2
			await dev %d >/dev/null
			head -c 16M /dev/$(dev %[1]d) | sha256sum
			nvme disconnect-all >&2`, nsid))
		if want := hex.EncodeToString(sum.Sum(nil)); !strings.HasPrefix(out, want) {
			t.Errorf("namespace %d: the kernel reads what has the sum %s, want %s", nsid, out, want)
		}
	}
}

// nvmeRefused has what cannot be connected to, each with an error that says what to do.
func nvmeRefused(t *testing.T, ports map[string]string) {
	for _, test := range []struct {
		name, want string
		final      bool
		change     func(*nvmetcp.Config)
	}{
		{"subsystem", "no such subsystem at this port", true, func(c *nvmetcp.Config) { c.SubsysNQN = "nqn.2024-01.weft.lab:none" }},
		{"discovery", "discovery controller", true, func(c *nvmetcp.Config) { c.SubsysNQN = wire.DiscoveryNQN }},
		{"port", "NVMe/TCP port", false, func(c *nvmetcp.Config) { c.Addr = net.JoinHostPort(ports["LAB_HOST"], ports["LAB_SSH_PORT"]) }},
	} {
		cfg := nvmeConfig(ports, 0)
		test.change(&cfg)
		c, err := nvmetcp.Connect(t.Context(), cfg)
		if err == nil {
			c.Close()
			t.Errorf("%s: connected", test.name)
			continue
		}
		var ce *nvmetcp.ConnectError
		if !errors.As(err, &ce) || ce.Final != test.final || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), cfg.Addr) {
			t.Errorf("%s: %v (final: %v); want %q", test.name, err, ce != nil && ce.Final, test.want)
		}
		t.Log(err)
	}
	cfg := nvmeConfig(ports, 0)
	cfg.Discovery, cfg.SubsysNQN = true, ""
	cfg.Addr = net.JoinHostPort(ports["LAB_HOST"], ports["LAB_NVME_DISC_PORT"])
	c := nvmeConnect(t, cfg)
	b := make([]byte, wire.DiscoveryHeaderSize)
	var head wire.DiscoveryHeader
	if err := c.GetLogPage(t.Context(), wire.GetLogPage{ID: wire.LogDiscovery}, b); err != nil {
		t.Fatal(err)
	}
	if err := head.Decode(b); err != nil || head.Records == 0 {
		t.Errorf("discovery log: %+v, %v", head, err)
	}
}

// nvmeEvents changes an ANA state and waits to be told.
func nvmeEvents(t *testing.T, ports map[string]string) {
	cfg := nvmeConfig(ports, 0)
	events := make(chan wire.AsyncEvent, 16)
	cfg.OnEvent = func(e wire.AsyncEvent) { events <- e }
	c := nvmeConnect(t, cfg)
	for _, state := range []wire.ANAState{wire.ANAInaccessible, wire.ANANonOptimized, wire.ANAOptimized} {
		harness.Guest(t, fmt.Sprintf("lab ana 1 1 %v", state))
		deadline := time.After(time.Minute)
		for anaStates(t, c)[1] != state {
			select {
			case e := <-events:
				if !e.Is(wire.EventANAChanged) {
					t.Fatalf("event %v", e)
				}
			case <-deadline:
				t.Fatalf("no event for %v", state)
			}
		}
		var status *nvmetcp.StatusError
		err := c.Do(t.Context(), &nvmetcp.Command{Op: wire.OpRead, NSID: 1, Blocks: 1, Data: make([]byte, 512)})
		if want := state.Status(); want == 0 && err != nil || want != 0 && (!errors.As(err, &status) || status.Status != want || status.Class() != wire.ClassANA) {
			t.Errorf("a read in state %v: %v", state, err)
		}
	}
}

// nvmeKeepAlive is idle for several times KATO, and then busy with writes for so long.
func nvmeKeepAlive(t *testing.T, ports map[string]string) {
	cfg := nvmeConfig(ports, 0)
	cfg.KATO = 2 * time.Second
	c := nvmeConnect(t, cfg)
	time.Sleep(10 * time.Second)
	if s := c.Stats(); s.State != nvmetcp.StateLive || s.Losses != 0 {
		t.Fatalf("after being idle: %+v", s)
	}
	data := make([]byte, 1<<20)
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); {
		var wg sync.WaitGroup
		for i := range 32 {
			wg.Add(1)
			c.Start(&nvmetcp.Command{Op: wire.OpWrite, NSID: 1, SLBA: uint64(i) << 11, Blocks: 1 << 11, Data: data, Done: func(*nvmetcp.Command) { wg.Done() }})
		}
		c.Flush()
		wg.Wait()
	}
	if s := c.Stats(); s.State != nvmetcp.StateLive || s.Losses != 0 {
		t.Fatalf("after being busy: %+v", s)
	}
}

// nvmeAuthentication has secrets that are right and wrong, on one side and on both.
func nvmeAuthentication(t *testing.T, ports map[string]string) {
	for _, group := range []string{"null", "ffdhe2048", "ffdhe8192"} {
		cfg := nvmeConfig(ports, 0)
		cfg.SubsysNQN = ports["LAB_NQN1"]
		cfg.HostNQN += "." + group
		if group == "null" {
			// A host that is not allowed at all.
			harness.Guest(t, "echo 0 >/sys/kernel/config/nvmet/subsystems/"+cfg.SubsysNQN+"/attr_allow_any_host")
			if c, err := nvmetcp.Connect(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "allow host "+cfg.HostNQN) {
				t.Errorf("%v, %v", c, err)
			}
		}
		mine, theirs := nvmeauthtest.NewSecret(nvmeauth.SHA256), nvmeauthtest.NewSecret(nvmeauth.SHA512)
		harness.Guest(t, strings.NewReplacer("HOST", cfg.HostNQN, "SUBSYS", cfg.SubsysNQN, "KEY", mine.Text(), "CTRL", theirs.Text(), "GROUP", group).Replace(`
			cd /sys/kernel/config/nvmet
			mkdir hosts/HOST
			echo -n 'KEY' >hosts/HOST/dhchap_key
			echo -n 'CTRL' >hosts/HOST/dhchap_ctrl_key
			echo -n 'GROUP' >hosts/HOST/dhchap_dhgroup
			ln -s /sys/kernel/config/nvmet/hosts/HOST subsystems/SUBSYS/allowed_hosts/HOST`))
		var none nvmeauth.Secret
		for _, test := range []struct {
			name         string
			secret, ctrl nvmeauth.Secret
			want         string
		}{
			{"host", mine, none, ""}, {"both", mine, theirs, ""}, {"none", none, none, "give this host's secret"},
			{"wrong", theirs, none, "compare"}, {"wrong controller", mine, mine, "compare"},
		} {
			cfg.Secret, cfg.CtrlSecret = test.secret, test.ctrl
			c, err := nvmetcp.Connect(t.Context(), cfg)
			if test.want != "" {
				var ce *nvmetcp.ConnectError
				if err == nil {
					c.Close()
				}
				if !errors.As(err, &ce) || !strings.Contains(err.Error(), test.want) {
					t.Errorf("%s, %s: %v", group, test.name, err)
				}
				t.Log(err)
				continue
			}
			if err != nil {
				t.Errorf("%s, %s: %v", group, test.name, err)
				continue
			}
			if err := c.Do(t.Context(), &nvmetcp.Command{Op: wire.OpRead, NSID: 1, Blocks: 1, Data: make([]byte, 512)}); err != nil {
				t.Errorf("%s, %s: %v", group, test.name, err)
			}
			c.Close()
		}
	}
}

// nvmeLost takes the port away under load, and brings it back.
func nvmeLost(t *testing.T, ports map[string]string) {
	cfg := nvmeConfig(ports, 1)
	cfg.KATO, cfg.ReconnectDelay, cfg.IOTimeout = 2*time.Second, time.Second, 4*time.Second
	cfg.CtrlLossTimeout = -1
	states := make(chan nvmetcp.State, 100)
	cfg.OnState = func(s nvmetcp.State) { states <- s }
	c := nvmeConnect(t, cfg)
	_, port, _ := net.SplitHostPort(cfg.Addr)
	for how, undo := range map[string]string{"lab port 2 off": "lab port 2 on", "lab block " + port: "lab unblock " + port} {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() {
				buf := make([]byte, 64<<10)
				for ctx.Err() == nil && errs[i] == nil {
					errs[i] = c.Do(context.Background(), &nvmetcp.Command{Op: wire.OpWrite, NSID: 1, SLBA: uint64(i) * 128, Blocks: 128, Data: buf})
				}
			})
		}
		time.Sleep(time.Second)
		harness.Guest(t, how)
		await(t, states, nvmetcp.StateResetting)
		wg.Wait()
		cancel()
		for _, err := range errs {
			var path *nvmetcp.PathError
			if !errors.As(err, &path) || path.Sent && path.Gone.Before(time.Now()) {
				t.Errorf("%s: %v", how, err)
			}
		}
		t.Log(errs[0])
		harness.Guest(t, undo)
		await(t, states, nvmetcp.StateLive)
		if err := c.Do(t.Context(), &nvmetcp.Command{Op: wire.OpFlush, NSID: 1}); err != nil {
			t.Fatal(err)
		}
	}
}

func await(t *testing.T, states <-chan nvmetcp.State, want nvmetcp.State) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case s := <-states:
			if s == want {
				return
			}
		case <-deadline:
			t.Fatalf("not %v", want)
		}
	}
}
