package nvmetcp

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// serve lets a server of ours have the memory as a namespace, and connects to it.
func serve(t *testing.T, memory *memSpace) (*Namespace, *nvmetest.Target) {
	const nqn = "nqn.2024-01.weft.test:files"
	memory.format.Cached = true // as is the server's
	quiet := slog.New(slog.DiscardHandler)
	server, err := nvmetest.New(nvme.Config{
		Subsystems: []nvme.Subsystem{{NQN: nqn, Serial: "W1", AnyHost: true, Namespaces: []nvme.Namespace{
			{NSID: 1, Backing: memory, BlockSize: uint32(memory.format.BlockSize), UUID: [16]byte{1}},
		}}},
		Ports: []nvme.Port{{ID: 1, Listen: "127.0.0.1:0"}},
		Log:   quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testPatience)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), testPatience)
	defer cancel()
	s, err := Open(ctx, SubsystemConfig{Addrs: []string{server.Addr(1)}, Controller: Config{
		SubsysNQN: nqn, HostNQN: "nqn.2024-01.weft.test:host", HostID: wire.HostID{1}, Queues: 2,
		KATO: time.Second, ReconnectDelay: 50 * time.Millisecond, Log: quiet,
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	n, err := s.Namespace(1)
	if err != nil {
		t.Fatal(err)
	}
	return n, server
}

// The suite of all targets, over connections to a server.
func TestTargetWireContract(t *testing.T) {
	for _, block := range []int{512, 4096} {
		open := func(t *testing.T, states ...layout.ExtentState) targettest.Fixture {
			memory := newMemSpace(t, Format{BlockSize: block}, 20<<20, 1)
			n, _ := serve(t, memory)
			return targettest.Fixture{
				Target: &sized{Target: newTestTarget(t, n), sizes: map[string]int64{}},
				NewFile: func() *layout.DataFile {
					return memory.file(6<<20, func() layout.ExtentState { return states[memory.rnd.IntN(len(states))] })
				},
			}
		}
		targettest.Run(t, func(t *testing.T) targettest.Fixture {
			return open(t, layout.ExtentReadWrite, layout.ExtentInvalid)
		})
		targettest.RunSparse(t, func(t *testing.T) targettest.Fixture { return open(t, layout.ExtentInvalid) })
	}
}

// TestTargetModel over connections, which are cut when the power fails.
func TestTargetWireModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	memory := newMemSpace(t, Format{BlockSize: 4096}, 4<<20, seed)
	n, server := serve(t, memory)
	var mu sync.Mutex
	fail := func(chance float64) {
		mu.Lock()
		defer mu.Unlock()
		if err := server.PortDown(1); err != nil {
			t.Error(err)
		}
		memory.fail(chance)
		if err := server.PortUp(1); err != nil {
			t.Error(err)
		}
	}
	testModel(t, memory, n, 300, 4, fail, seed)
}
