package nvmetarget

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"
	"github.com/weftfs/weft/test/harness"
)

// TestFollow: a mount and the service go to where discovery tells that a subsystem is now, while there is I/O, and are there at once when they
// start again without a discovery controller.
func TestFollow(t *testing.T) {
	harness.NeedMount(t)
	for _, name := range []string{"weft", "weftd"} {
		harness.Bin(t, name) // with the build cache that there is
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dir := harness.Dir(t)
	path := filepath.Join(dir, "ns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 512<<20); err != nil {
		t.Fatal(err)
	}
	f, err := nvme.OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	cfg := nvme.Config{
		Subsystems: []nvme.Subsystem{{NQN: nqn, Serial: "1", AnyHost: true, Namespaces: []nvme.Namespace{{NSID: 1, Backing: f, BlockSize: 4096, NGUID: [16]byte{7}}}}},
		Log:        slog.New(slog.DiscardHandler),
	}
	for id := range uint16(3) {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: id + 1, Listen: harness.FreeAddr(t), Discovery: id == 2})
	}
	target, err := nvmetest.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		target.Shutdown(ctx)
	})
	port := func(change func(uint16) error, id uint16) {
		t.Helper()
		if err := change(id); err != nil {
			t.Fatal(err)
		}
	}
	port(target.PortDown, 2)

	addr := harness.FreeAddr(t)
	serve := func() *harness.Proc {
		p := harness.Spawn(t, "weftd", "meta", "--dir", filepath.Join(dir, "meta"), "--listen", addr, "--nvme-discovery", target.Addr(3))
		harness.AwaitListen(t, addr)
		return p
	}
	service := serve()
	harness.Weft(t, "admin", "device", "add", fmt.Sprintf("nvme://%s/%s#1", target.Addr(1), nqn), "--server", addr)
	option := "nvme-discovery=nobody.invalid+" + target.Addr(3)
	m := harness.MountAt(t, addr, option)
	// paths are the addresses in use, and connected is whether a discovery controller is.
	paths := func() (addrs []string, connected bool) {
		var st []struct {
			Discovery []struct {
				Connected bool
			}
			Devices []struct {
				Mount struct {
					Paths []struct{ Address, Use string }
				}
			}
		}
		if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil {
			t.Fatal(err)
		}
		for _, p := range st[0].Devices[0].Mount.Paths {
			addrs = append(addrs, strings.TrimSpace(p.Address+map[bool]string{true: " out"}[p.Use == "out"]))
		}
		return addrs, len(st[0].Discovery) == 1 && st[0].Discovery[0].Connected
	}
	follows := func(id uint16) func() bool {
		return func() bool {
			addrs, connected := paths()
			return connected && slices.Equal(addrs, []string{target.Addr(id)})
		}
	}
	harness.Await(t, "the first port", follows(1))

	data := make([]byte, 4<<20)
	rng := rand.NewChaCha8([32]byte{2})
	rounds, stop, ended := atomic.Int64{}, make(chan struct{}), make(chan error, 1)
	file := filepath.Join(m.Dir, "file")
	round := func() error {
		rng.Read(data)
		if err := os.WriteFile(file, data, 0o644); err != nil {
			return err
		}
		if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, data) {
			return fmt.Errorf("%d bytes, %v; wrong bytes: %v", len(got), err, !bytes.Equal(got, data))
		}
		rounds.Add(1)
		return nil
	}
	go func() { // ends with stop, or an error
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if err := round(); err != nil {
				ended <- err
				return
			}
		}
	}()
	more := func() {
		t.Helper()
		from := rounds.Load()
		harness.Await(t, "more I/O", func() bool { return rounds.Load() > from+1 || len(ended) > 0 })
	}
	more()
	port(target.PortDown, 1)
	port(target.PortUp, 2)
	harness.Await(t, "the second port", follows(2))
	more()
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if out, want := harness.Weft(t, "status", m.Dir), "discovery   "+target.Addr(3)+" is connected and tells of 1 addresses"; !strings.Contains(out, want) {
		t.Errorf("no %q in\n%s", want, out)
	}
	m.Unmount()
	service.End(syscall.SIGTERM)

	// The volume itself knows of the first port alone.
	port(target.PortDown, 3)
	serve()
	m = harness.MountAt(t, addr, option)
	file = filepath.Join(m.Dir, "file")
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("after the restart: %d bytes, %v; wrong bytes: %v", len(got), err, !bytes.Equal(got, data))
	}
	if err := round(); err != nil {
		t.Fatalf("after the restart: %v", err)
	}
	if addrs, connected := paths(); connected || !slices.Contains(addrs, target.Addr(2)) {
		t.Errorf("without discovery: paths %v, connected: %v", addrs, connected)
	}
	harness.Await(t, "the service's way to the namespace", func() bool {
		return strings.Contains(harness.Weft(t, "admin", "device", "ls", "--json", "--server", addr), `"reachable":true`)
	})
	port(target.PortUp, 3)
	harness.Await(t, "discovery again", func() bool { _, connected := paths(); return connected })
	m.Unmount()
}
