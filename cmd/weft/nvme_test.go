package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/wire/metarpc"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/nvme"
)

func TestHostNQN(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hostnqn")
	id := wire.HostID{0x12, 0x34, 15: 0xff}
	look := func(chosen, want string) {
		t.Helper()
		got, err := hostNQN(chosen, file, id)
		if err == nil {
			err = wire.CheckNQN(got)
		}
		if err != nil || got != want {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	look("", "nqn.2014-08.org.nvmexpress:uuid:12340000-0000-0000-0000-0000000000ff")
	if err := os.WriteFile(file, []byte("nqn.2026-01.org.example:host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	look("", "nqn.2026-01.org.example:host")
	look("nqn.2026-01.org.example:chosen", "nqn.2026-01.org.example:chosen")
	if err := os.WriteFile(file, []byte("nqn.example\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := hostNQN("", file, id); err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "nvme-hostnqn=") {
		t.Errorf("a name that is none: %v", err)
	}
}

func TestDiscoveryAddr(t *testing.T) {
	for in, want := range map[string]string{
		"nvme://h": "h:8009", "nvme://h/": "h:8009", "nvme://h:4420": "h:4420", "nvme://[::1]": "[::1]:8009", "nvme://[::1]:1": "[::1]:1",
		"nvme://h:4420/nqn.2026-01.org.example:a#1": "", "nvme://h/n": "", "nvme://h:1#1": "", "nfs://h:2049/": "", "h": "",
	} {
		if got, err := discoveryAddr(in); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
	for _, bad := range []string{"nvme://", "nvme://h:0", "nvme://h:x", "nvme://::1", "nvme://:8009"} {
		if got, err := discoveryAddr(bad); err == nil || !strings.Contains(err.Error(), bad) || !strings.Contains(err.Error(), "NQN#NSID") {
			t.Errorf("%q: %q, %v", bad, got, err)
		}
	}
}

type memory struct{ nvme.Backing }

func (memory) Size() (int64, error) { return 1 << 20, nil }

// TestAddDiscovered adds what discovery leads to: namespaces of several subsystems by all of their addresses.
func TestAddDiscovered(t *testing.T) {
	const nqn = "nqn.2026-01.org.example:"
	var cfg nvme.Config
	for i, name := range []string{"a", "b", "empty", "closed"} {
		s := nvme.Subsystem{NQN: nqn + name, Serial: name, AnyHost: true}
		for id := uint32(1); name < "c" && id <= uint32(2-i); id++ {
			s.Namespaces = append(s.Namespaces, nvme.Namespace{NSID: 3 * id, Backing: memory{}, BlockSize: 512, NGUID: [16]byte{byte(i + 1), byte(id)}})
		}
		cfg.Subsystems = append(cfg.Subsystems, s)
	}
	// The last one is told of at an address where nobody is.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nowhere := l.Addr().String()
	l.Close()
	for id, names := range [][]string{{nqn + "a", nqn + "empty"}, {nqn + "a", nqn + "b"}} {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: uint16(id + 1), Listen: "127.0.0.1:0", Subsystems: names})
	}
	cfg.Ports = append(cfg.Ports, nvme.Port{ID: 3, Listen: "127.0.0.1:0", Advertise: nowhere, Subsystems: []string{nqn + "closed"}})
	target, err := nvme.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	defer target.Shutdown(ctx)
	one, two := target.Addr(1), target.Addr(2)

	devices := map[string]int{} // by what is behind the address
	refuse := ""
	add := func(url string) (metarpc.DeviceInfo, error) {
		if url == refuse {
			return metarpc.DeviceInfo{}, errors.New(url + " is another one")
		}
		_, ns, _ := strings.Cut(strings.TrimPrefix(url, "nvme://"), "/")
		devices[ns]++
		return metarpc.DeviceInfo{Reachable: true, URL: url, Fencing: "reservations"}, nil
	}
	var out strings.Builder
	err = addDiscovered(ctx, one, add, &out)
	for _, want := range []string{nqn + "empty at " + one + " has no namespaces", nowhere, nqn + "closed"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
	want := map[string]int{nqn + "a#3": 2, nqn + "a#6": 2, nqn + "b#3": 1}
	if !reflect.DeepEqual(devices, want) {
		t.Errorf("added %v, want %v", devices, want)
	}
	if got := out.String(); !strings.Contains(got, nqn+"a at ") || !strings.Contains(got, one) || !strings.Contains(got, two) || !strings.Contains(got, "fenced by reservations") {
		t.Errorf("it says:\n%s", got)
	}

	// An address that the service cannot use is shown; the namespace is one of the volume all the same.
	refuse = fmt.Sprintf("nvme://%s/%sa#3", one, nqn)
	out.Reset()
	s := subsystem{nqn: nqn + "a", addrs: []string{one, two}}
	if err := s.add(3, add, &out); err != nil || !strings.Contains(out.String(), "not used: "+refuse+" is another one") {
		t.Errorf("%v, and it says:\n%s", err, out.String())
	}
	s.addrs = s.addrs[:1]
	if err := s.add(3, add, &out); err == nil || !strings.Contains(err.Error(), refuse) {
		t.Errorf("refused at all addresses: %v", err)
	}

	if err := addDiscovered(ctx, nowhere, add, &out); err == nil || !strings.Contains(err.Error(), nowhere) {
		t.Errorf("where nobody is: %v", err)
	}
}

// Paths of a namespace are shown with the addresses that are not connected.
func TestAddPaths(t *testing.T) {
	all := []nvmetcp.SubsystemStats{{NQN: "other"}, {
		NQN: "n", Policy: nvmetcp.QueueDepth,
		Controllers: []nvmetcp.ControllerStats{
			{Addr: "a:1", State: nvmetcp.StateLive}, {Addr: "b:2", State: nvmetcp.StateDead, Err: errors.New("refused")}, {Addr: "c:3", State: nvmetcp.StateLive},
		},
		Namespaces: []nvmetcp.NamespaceStats{{NSID: 1}, {
			NSID: 2, Waiting: 3, Trouble: errors.Join(errors.New("x"), errors.New("y")), Failovers: 7,
			Paths: []nvmetcp.PathStats{
				{Addr: "a:1", Use: "optimized", Group: 5, Latency: 123456, Commands: 12, Bytes: 48 << 10, Errors: 1},
				{Addr: "c:3", Use: "out", Why: "ANA state inaccessible"},
			},
		}},
	}}
	var u deviceUse
	u.addPaths(all, &layout.Namespace{NQN: "n", NSID: 2})
	want := deviceUse{
		Path: "nvme-tcp", Why: "nvme-policy=queue-depth", Resent: 7, Trouble: "3 requests wait for a path: x; y",
		Paths: []pathUse{
			{Address: "a:1", State: "live", Use: "optimized", Group: 5, Latency: 123456, Ops: 12, Bytes: 48 << 10, Errors: 1},
			{Address: "b:2", State: nvmetcp.StateDead.String(), Use: "out", Why: "refused"},
			{Address: "c:3", State: "live", Use: "out", Why: "ANA state inaccessible"},
		},
	}
	if !reflect.DeepEqual(u, want) {
		t.Errorf("got  %+v\nwant %+v", u, want)
	}
	u.Reads = opUse{Ops: 12, Bytes: 48 << 10, P50: 12000, P99: 13000}
	var out strings.Builder
	u.print(&out, "  ")
	if got, want := "\n"+out.String(), `
  nvme-tcp (nvme-policy=queue-depth), 1 of 3 paths usable, 0 outstanding, 7 resent
  path a:1 is live, optimized; 48 KiB in 12 commands, latency 120µs, 1 failed
  path b:2 is `+nvmetcp.StateDead.String()+`, out: refused
  path c:3 is live, out: ANA state inaccessible
  read    48 KiB in 12 requests, p50 12µs, p99 13µs
  3 requests wait for a path: x; y
`; got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
	u = deviceUse{}
	if u.addPaths(all, &layout.Namespace{NQN: "none", NSID: 2}); u.Path != "" {
		t.Errorf("a subsystem that is not known: %+v", u)
	}
}

func TestPolicyCommand(t *testing.T) {
	for in, want := range map[string]string{"/mnt": "1 operands", "/mnt fast": "want adaptive, numa", t.TempDir() + " numa": "not"} {
		if err := dispatch(t.Context(), append([]string{"nvme-policy"}, strings.Fields(in)...)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("weft nvme-policy %s: %v does not say %q", in, err, want)
		}
	}
}

func TestMayComeBack(t *testing.T) {
	away, final := &nvmetcp.ConnectError{}, &nvmetcp.ConnectError{Final: true}
	for i, c := range []struct {
		err  error
		want bool
	}{
		{away, true},
		{final, false},
		{fmt.Errorf("device: %w", errors.Join(final, away)), true},
		{errors.Join(final, final), false},
		{&nvmetcp.NoPathError{}, true},
		{&nvmetcp.GoneError{}, false},
		{fmt.Errorf("looking: %w", context.DeadlineExceeded), true},
		{errors.New("another namespace has its number"), false},
	} {
		if got := mayComeBack(c.err); got != c.want {
			t.Errorf("%d: %v: %v", i, c.err, got)
		}
	}
}

// What is known of discovery is one line, and in the JSON form under the names that scripts know.
func TestDiscoveryStatus(t *testing.T) {
	var st mountStatus
	var out strings.Builder
	if st.printDiscovery(&out); out.String() != "" {
		t.Errorf("without discovery: %q", out.String())
	}
	st.Discovery = discoveryOf([]nvmetcp.DiscoveryStats{
		{Addr: "a:8009", Connected: true, Portals: 4, Err: errors.New("before")},
		{Addr: "b:8009", Portals: 2, Err: errors.Join(errors.New("x"), errors.New("y"))},
		{Addr: "c:8009"},
	})
	st.printDiscovery(&out)
	want := "  discovery   a:8009 is connected and tells of 4 addresses; b:8009 is not connected, told of 2 addresses: x; y; c:8009 has not answered yet\n"
	if out.String() != want {
		t.Errorf("got  %s\nwant %s", out.String(), want)
	}
	b, err := json.Marshal(st.Discovery)
	if want := `[{"address":"a:8009","connected":true,"addresses":4},{"address":"b:8009","connected":false,"problem":"x; y","addresses":2},{"address":"c:8009","connected":false,"addresses":0}]`; err != nil || string(b) != want {
		t.Errorf("got  %s, %v\nwant %s", b, err, want)
	}
}

func TestDiscoveryFile(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", "/cache")
	a, err := discoveryFile([]string{"a:8009", "b:8009"})
	if err != nil || !strings.HasPrefix(a, "/cache/weft/nvme-discovery-") {
		t.Errorf("%q, %v", a, err)
	}
	if b, err := discoveryFile([]string{"a:8009"}); err != nil || b == a {
		t.Errorf("for others: %q, %v", b, err)
	}
	if os.Getuid() != 0 {
		return
	}
	t.Setenv("XDG_CACHE_HOME", "")
	if c, err := discoveryFile([]string{"a:8009", "b:8009"}); err != nil || filepath.Dir(c) != "/var/cache/weft" || filepath.Base(c) != filepath.Base(a) {
		t.Errorf("root's: %q, %v", c, err)
	}
}
