package nvmetcp_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/nvme"
)

// pathsOf are the addresses at which i uses the subsystem, in order, and how many of its namespace's paths are usable.
func pathsOf(i *nvmetcp.Initiator) (addrs []string, usable int) {
	for _, s := range i.Stats() {
		for _, c := range s.Controllers {
			addrs = append(addrs, c.Addr)
		}
		for _, n := range s.Namespaces {
			for _, p := range n.Paths {
				if p.Use != "out" {
					usable++
				}
			}
		}
	}
	slices.Sort(addrs)
	return addrs, usable
}

func sorted(addrs ...string) []string {
	slices.Sort(addrs)
	return slices.Compact(addrs)
}

// TestInitiatorUse: what a Directory tells is used, what it takes back is not, whoever gives it to Open, and all else stays.
func TestInitiatorUse(t *testing.T) {
	target := startTarget(t, func(cfg *nvme.Config) {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: 3, Listen: "127.0.0.1:0"})
	})
	a, b, c := target.Addr(1), target.Addr(2), target.Addr(3)
	directory := func(addrs ...string) *nvmetcp.Directory {
		d := &nvmetcp.Directory{Portals: []nvmetcp.Portal{{NQN: twoPortNQN + ".other", Addr: a}}}
		for _, addr := range addrs {
			d.Portals = append(d.Portals, nvmetcp.Portal{NQN: twoPortNQN, Addr: addr})
		}
		return d
	}
	i := newInitiator(t, 1, nil)
	i.Use(directory(b)) // nothing is open
	n := mustOpen(t, i, a)
	check := func(want ...string) {
		t.Helper()
		waittest.Until(t, "its paths", func() bool { _, usable := pathsOf(i); return usable == len(want) })
		if got, _ := pathsOf(i); !slices.Equal(got, sorted(want...)) {
			t.Errorf("addresses %v, want %v", got, sorted(want...))
		}
		if err := write(t, n); err != nil {
			t.Error(err)
		}
	}
	check(a, b) // it was never told of a
	i.Use(directory(c))
	check(a, c)
	i.Use(directory(a, c))
	check(a, c)
	i.Use(directory(c))
	check(c)
	mustOpen(t, i, a)
	mustOpen(t, i, b)
	check(c) // both were taken away
	i.Use(directory())
	check(c)
	i.Use(directory(a))
	check(a)
	i.Use(directory(a, b))
	check(a, b)

	// One that is opened when all that it is said to be at was taken away.
	late := newInitiator(t, 2, nil)
	late.Use(directory(a))
	late.Use(directory())
	mustOpen(t, late, a)
}

// TestInitiatorMove: a subsystem is used where the devices on it are, as long as one of them is there.
func TestInitiatorMove(t *testing.T) {
	target := startTarget(t, func(cfg *nvme.Config) {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: 3, Listen: "127.0.0.1:0"})
	})
	a, b, c := target.Addr(1), target.Addr(2), target.Addr(3)
	i := newInitiator(t, 1, nil)
	n := mustOpen(t, i, a)
	at := func(id byte, addrs ...string) *layout.Device {
		d := device(a, false)
		d.ID, d.Addrs = layout.DeviceID{id}, nil
		for _, addr := range addrs {
			d.Addrs = append(d.Addrs, layout.NetAddr{NetID: "tcp", Addr: netip.MustParseAddrPort(addr)})
		}
		return d
	}
	check := func(want ...string) {
		t.Helper()
		waittest.Until(t, "its paths", func() bool {
			got, usable := pathsOf(i)
			return usable == len(want) && slices.Equal(got, sorted(want...))
		})
		if err := write(t, n); err != nil {
			t.Error(err)
		}
	}
	dial := func(d *layout.Device) {
		t.Helper()
		tg, err := i.Dial(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tg.Close() })
	}
	dial(at(1, a))
	check(a)
	i.Move(at(1, a, b)) // one more, without a call of Dial
	check(a, b)
	i.Move(at(1, b))
	check(b)
	dial(at(2, b, c)) // another device there
	check(b, c)
	i.Move(at(1, a))
	check(a, b, c)
	i.Move(at(2, c))
	check(a, c)
	dial(at(2, b)) // as when it is dialled again
	check(a, b)
}

// TestInitiatorFollow: portals that come and go under load, and a restart without anybody who answers.
func TestInitiatorFollow(t *testing.T) {
	target := startTarget(t, func(cfg *nvme.Config) {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: 3, Listen: "127.0.0.1:0", Discovery: true})
	})
	if err := target.PortDown(2); err != nil {
		t.Fatal(err)
	}
	a, b, at := target.Addr(1), target.Addr(2), []string{target.Addr(3)}
	file := filepath.Join(t.TempDir(), "cache", "discovery")
	i := newInitiator(t, 1, nil)
	if st := i.Discovery(); st != nil {
		t.Errorf("discovery that nobody asked for: %+v", st)
	}
	if err := i.Follow(at, file); err != nil {
		t.Fatal(err)
	}
	n := mustOpen(t, i, a)
	waittest.Until(t, "connected", func() bool {
		st := i.Discovery()
		return st[0].Connected && st[0].Portals == 1 && st[0].Addr == at[0]
	})
	l := startLoad(n, 7)
	uses := func(want ...string) {
		t.Helper()
		waittest.Until(t, "other paths", func() bool {
			got, usable := pathsOf(i)
			return slices.Equal(got, sorted(want...)) && usable == len(want)
		})
	}
	if err := target.PortDown(1); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "nothing is told", func() bool { return i.Discovery()[0].Portals == 0 })
	if err := target.PortUp(2); err != nil {
		t.Fatal(err)
	}
	uses(b)
	if err := target.PortUp(1); err != nil {
		t.Fatal(err)
	}
	uses(a, b)
	if err := target.PortDown(1); err != nil {
		t.Fatal(err)
	}
	uses(b)
	l.end(t)
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}

	if err := target.PortDown(3); err != nil {
		t.Fatal(err)
	}
	again := newInitiator(t, 1, nil)
	if err := again.Follow(at, file); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, again, a) // nobody listens there
	waittest.Until(t, "not connected", func() bool { st := again.Discovery()[0]; return !st.Connected && st.Err != nil })
	if err := target.PortDown(2); err != nil {
		t.Fatal(err)
	}
	if err := target.PortUp(1); err != nil {
		t.Fatal(err)
	}
	if err := target.PortUp(3); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "verified", func() bool {
		got, usable := pathsOf(again)
		return usable == 1 && slices.Equal(got, []string{a})
	})
	again.Close()

	// A file that is damaged is as none, and replaced.
	if err := os.WriteFile(file, []byte("weft discovery 1 00000000\n{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := newInitiator(t, 1, nil)
	if err := third.Follow(at, file); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "a good file", func() bool {
		b, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		d, err := nvmetcp.DecodeDirectory(b)
		return err == nil && slices.Equal(d.Addrs(twoPortNQN), []string{a})
	})
	third.Close()
	if names, err := filepath.Glob(filepath.Join(filepath.Dir(file), "*")); err != nil || !slices.Equal(names, []string{file}) {
		t.Errorf("left: %q, %v", names, err)
	}
	if err := third.Follow(at, file); err == nil {
		t.Error("a closed Initiator follows")
	}
}
