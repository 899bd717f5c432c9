package interop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/test/harness"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// TestNVMePaths has a subsystem of the kernel's NVMe/TCP target over both of its ports, found by discovery: ANA states that change,
// ports that are refused, go silent or are removed, and a namespace that is taken away, under a load that checks what it reads.
func TestNVMePaths(t *testing.T) {
	ports := harness.StartVM(t)
	cfg := nvmeConfig(ports, 0)
	cfg.KATO, cfg.ReconnectDelay, cfg.IOTimeout = 2*time.Second, time.Second, 8*time.Second
	cfg.Addr = ""
	disc := nvmetcp.DiscoveryConfig{Controller: cfg, Addrs: []string{net.JoinHostPort(ports["LAB_HOST"], ports["LAB_NVME_DISC_PORT"])}}
	disc.Controller.SubsysNQN = ""
	found, err := nvmetcp.Discover(t.Context(), disc)
	if err != nil {
		t.Fatal(err)
	}
	var both []string
	tcp := strings.Fields(ports["LAB_NVME_PORTS"])
	for _, port := range tcp {
		both = append(both, net.JoinHostPort(ports["LAB_HOST"], port))
	}
	if got := found.Addrs(cfg.SubsysNQN); !slices.Equal(got, both) || len(found.Subsystems()) != 3 {
		t.Fatalf("found %+v, want 3 subsystems and %v", found, both)
	}
	host, err := nvmetcp.NewInitiator(nvmetcp.InitiatorConfig{
		HostNQN: cfg.HostNQN, HostID: cfg.HostID, Queues: cfg.Queues, KATO: cfg.KATO, ReconnectDelay: cfg.ReconnectDelay, IOTimeout: cfg.IOTimeout,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	var spaces [3]*nvmetcp.Namespace // by number
	for nsid := 1; nsid < len(spaces); nsid++ {
		if spaces[nsid], err = host.Open(t.Context(), both, cfg.SubsysNQN, uint32(nsid)); err != nil {
			t.Fatal(err)
		}
	}
	disc.Known = found
	disc.OnChange = host.Use
	follow, err := nvmetcp.Follow(t.Context(), disc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { follow.Close() })
	within := func(what string, ok func() bool) {
		t.Helper()
		if !waittest.Poll(2*time.Minute, 20*time.Millisecond, ok) {
			t.Fatalf("not: %s; %+v", what, host.Stats())
		}
	}
	// uses are what namespace nsid's paths are used for, by port.
	uses := func(nsid int) string {
		var use []string
		for _, n := range host.Stats()[0].Namespaces {
			for _, p := range n.Paths {
				if int(n.NSID) == nsid {
					use = append(use, p.Use)
				}
			}
		}
		return strings.Join(use, " ")
	}
	within("paths as the ANA groups have it", func() bool {
		return uses(1) == "optimized non-optimized" && uses(2) == "non-optimized optimized"
	})
	within("discovery verified", func() bool { _, ok := follow.Now(); return ok })

	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	stop := make(chan struct{})
	ended := make(chan error, 8)
	var done, longest atomic.Int64
	for w := range 8 {
		go func() { ended <- pathWorker(spaces, w, rand.New(rand.NewPCG(seed, uint64(w))), stop, &done, &longest) }() // ends with stop
	}
	step := func(what, use string) {
		t.Helper()
		before := done.Load()
		harness.Guest(t, what)
		began := time.Now()
		within(what+": "+use, func() bool { return uses(1) == use })
		at := time.Since(began)
		within("commands are done after "+what, func() bool { return done.Load() > before+20 })
		t.Logf("%s: %q after %v", what, use, at.Round(time.Millisecond))
	}
	step("lab ana 2 1 optimized", "optimized optimized")
	for _, state := range []string{"non-optimized", "inaccessible", "change", "persistent-loss", "optimized"} {
		use := state
		if state != "optimized" && state != "non-optimized" {
			use = "out"
		}
		step("lab ana 1 1 "+state, use+" optimized")
		host.SetPolicy(nvmetcp.Policy(rand.IntN(4)))
	}
	step("lab refuse "+tcp[0], "out optimized")
	step("lab unblock "+tcp[0], "optimized optimized")
	step("lab block "+tcp[1], "optimized out")
	step("lab unblock "+tcp[1], "optimized optimized")
	// A whole port that goes takes its discovery along, so nobody says that it is not to come back.
	step("lab port 2 off", "optimized out")
	step("lab port 2 on", "optimized optimized")
	link := "/sys/kernel/config/nvmet/ports/2/subsystems/" + cfg.SubsysNQN
	step("rm "+link, "optimized")
	if got := host.Stats()[0].Controllers; len(got) != 1 || got[0].Addr != both[0] {
		t.Errorf("with the subsystem taken from port 2: %+v, want %s alone", got, both[0])
	}
	step("ln -s /sys/kernel/config/nvmet/subsystems/"+cfg.SubsysNQN+" "+link, "optimized optimized")
	close(stop)
	for range 8 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d commands, the longest took %v", done.Load(), time.Duration(longest.Load()).Round(time.Millisecond))

	read := func() error {
		return spaces[1].Do(t.Context(), &nvmetcp.Request{Command: nvmetcp.Command{Op: wire.OpRead, Blocks: 1, Data: make([]byte, 512)}})
	}
	harness.Guest(t, "lab ns s0 1 off")
	within("namespace 1 is gone", func() bool { _, gone := errors.AsType[*nvmetcp.GoneError](read()); return gone })
	harness.Guest(t, "lab ns s0 1 on")
	within("namespace 1 is back", func() bool { return read() == nil })
}

// pathWorker writes and reads a part of both namespaces of its own, and checks what it reads.
func pathWorker(spaces [3]*nvmetcp.Namespace, w int, r *rand.Rand, stop <-chan struct{}, done, longest *atomic.Int64) error {
	const regions, size = 8, 16 << 10
	var have [3][regions]int
	content := func(nsid, i, generation int) []byte {
		line := fmt.Sprintf("namespace %d worker %d region %d generation %d;", nsid, w, i, generation)
		return bytes.Repeat([]byte(line), size/len(line)+1)[:size]
	}
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		nsid, i := 1+r.IntN(2), r.IntN(regions)
		n := spaces[nsid]
		blocks := uint32(size / n.Format().BlockSize)
		cmd := &nvmetcp.Request{Command: nvmetcp.Command{Op: wire.OpRead, SLBA: uint64(w*regions+i) * uint64(blocks), Blocks: blocks, Data: make([]byte, size)}}
		if r.IntN(2) == 0 {
			have[nsid][i]++
			cmd.Op, cmd.Data = wire.OpWrite, content(nsid, i, have[nsid][i])
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		err := n.Do(ctx, cmd)
		cancel()
		longest.Store(max(longest.Load(), int64(time.Since(began))))
		done.Add(1)
		if err != nil {
			return fmt.Errorf("worker %d: %w", w, err)
		}
		if g := have[nsid][i]; cmd.Op == wire.OpRead && g != 0 && !bytes.Equal(cmd.Data, content(nsid, i, g)) {
			return fmt.Errorf("worker %d: read %.60q, want generation %d of region %d", w, cmd.Data, g, i)
		}
	}
}
