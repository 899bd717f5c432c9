package nvmetarget

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"
	"github.com/weftfs/weft/test/harness"
)

// TestVolume makes a volume of what discovery leads to: two subsystems, each at two ports, of which one goes away and comes back while
// a mount writes and reads.
func TestVolume(t *testing.T) {
	harness.NeedMount(t)
	const name = "nqn.2026-01.io.weft:volume"
	dir := harness.Dir(t)
	cfg := nvme.Config{Log: slog.New(slog.DiscardHandler)}
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprint("ns", i))
		var used []byte
		if i == 2 { // it has somebody's data
			used = bytes.Repeat([]byte("data"), 1<<18)
		}
		if err := os.WriteFile(path, used, 0o600); err != nil {
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
		cfg.Subsystems = append(cfg.Subsystems, nvme.Subsystem{
			NQN: fmt.Sprint(name, i), Serial: fmt.Sprint(i), AnyHost: true,
			Namespaces: []nvme.Namespace{{NSID: 1, Backing: f, BlockSize: 4096, NGUID: [16]byte{0x77, 15: byte(i)}}},
		})
	}
	both := []string{name + "0", name + "1"}
	for id := range uint16(2) {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: id + 1, Listen: harness.FreeAddr(t), Subsystems: both})
	}
	cfg.Ports = append(cfg.Ports, nvme.Port{ID: 3, Listen: "127.0.0.1:0", Subsystems: []string{name + "2"}, Advertise: "127.0.0.1:1"})
	target, err := nvmetest.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		target.Shutdown(ctx)
	})
	// The one that is in use is not told of by discovery, and added last.
	if err := target.PortDown(3); err != nil {
		t.Fatal(err)
	}

	addr := harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "meta", "--dir", filepath.Join(dir, "meta"), "--listen", addr)
	harness.AwaitListen(t, addr)
	out := harness.Weft(t, "admin", "device", "add", "nvme://"+target.Addr(1), "--server", addr)
	for _, want := range append(both, target.Addr(1), target.Addr(2)) {
		if !strings.Contains(out, want) {
			t.Errorf("adding what discovery leads to does not show %s:\n%s", want, out)
		}
	}
	type device struct {
		Address, Fencing string
		Reachable        bool
		Portals          []string
		Mount            struct {
			Paths []struct{ Address, Use string }
		}
	}
	var devices []device
	if err := json.Unmarshal([]byte(harness.Weft(t, "admin", "device", "ls", "--json", "--server", addr)), &devices); err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		if !strings.HasPrefix(d.Address, "nvme://") || !d.Reachable || len(d.Portals) != 2 || !strings.Contains(d.Fencing, "reservations") {
			t.Errorf("device %+v", d)
		}
	}
	if len(devices) != 2 {
		t.Fatalf("%d devices, want 2", len(devices))
	}

	m := harness.MountAt(t, addr, "nvme-policy=round-robin")
	// usable is how many paths can be used.
	usable := func() (n int) {
		var st []struct{ Devices []device }
		if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil {
			t.Fatal(err)
		}
		for _, d := range st[0].Devices {
			for _, p := range d.Mount.Paths {
				if p.Use != "out" {
					n++
				}
			}
		}
		return n
	}
	data := make([]byte, 24<<20)
	rng := rand.NewChaCha8([32]byte{1})
	rng.Read(data)
	file := filepath.Join(m.Dir, "file")
	write := func(what string) {
		t.Helper()
		rng.Read(data[:8<<20])
		if err := os.WriteFile(file, data, 0o644); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%s: %d bytes, %v; wrong bytes: %v", what, len(got), err, !bytes.Equal(got, data))
		}
	}
	write("two ports")
	harness.Await(t, "4 usable paths", func() bool { return usable() == 4 })
	for _, s := range harness.LayoutOf(t, file).Mirrors[0].Servers {
		if !strings.HasPrefix(s.Address, "nvme://") {
			t.Errorf("data file at %q", s.Address)
		}
	}
	ended := make(chan error)
	go func() {
		time.Sleep(50 * time.Millisecond) // while it is written
		ended <- target.PortDown(2)
	}()
	write("one port goes")
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "2 usable paths", func() bool { return usable() == 2 })
	write("one port")
	if err := target.PortUp(2); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "4 usable paths again", func() bool { return usable() == 4 })
	write("two ports again")

	// A namespace with something on it.
	if err := target.PortUp(3); err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("nvme://%s/%s2#1", target.Addr(3), name)
	b, err := exec.Command(harness.Bin(t, "weft"), "admin", "device", "add", url, "--server", addr).CombinedOutput()
	if err == nil || !strings.Contains(string(b), "--force") || !strings.Contains(string(b), name+"2") {
		t.Errorf("a namespace that has data: %v, %s", err, b)
	}
	harness.Weft(t, "admin", "device", "add", "--force", url, "--server", addr)
	m.Unmount()
}
