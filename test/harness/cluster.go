package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// ClusterEnv makes NewVolume start three metadata services on a catalog in three etcd members, in place of one with a catalog of its own. Set to
// chaos, one or the other of them is killed, stopped or cut off all the time. Volumes on namespaces, and those that a test wants to have otherwise,
// have one service all the same.
const ClusterEnv = "WEFT_TEST_CLUSTER"

// members is how many services and etcd members there are.
const members = 3

// Cluster is what a volume has of metadata services and etcd members.
type Cluster struct {
	v        *Volume
	bridge   string // network link to all; empty if they have this host's network
	subnet   int    // number of its network
	Services [members]*Member
	Etcd     [members]*Member // nil with Options.Catalog
	catalog  string           // URL
	begun    bool             // the services have been up
	calm     func()           // ends the chaos; nil: there is none
	chaos    func()           // begins it again; nil: there was none
}

// Member is one of these processes.
type Member struct {
	c       *Cluster
	Name    string
	Addr    string // HOST:PORT for clients
	program string
	args    []string
	netns   string // its network namespace, and the link to it; empty if it has none
	run     *child // nil when it does not run
}

// newCluster makes the members of a volume and starts etcd. With links each has a network namespace of its own.
func newCluster(v *Volume, links bool) *Cluster {
	t := v.t
	t.Helper()
	c := &Cluster{v: v, catalog: v.opts.Catalog}
	if links {
		Need(t, "ip", "nsenter")
		c.bridge, c.subnet = fmt.Sprintf("wb%d", os.Getpid()), freeSubnet(t)
		Run(t, "", "ip", "link", "add", c.bridge, "type", "bridge")
		t.Cleanup(func() { exec.Command("ip", "link", "del", c.bridge).Run() })
		Run(t, "", "ip", "addr", "add", c.host(1)+"/24", "dev", c.bridge)
		Run(t, "", "ip", "link", "set", c.bridge, "up")
	}
	if c.catalog == "" {
		c.startEtcd()
	}
	for i := range c.Services {
		m := c.member(fmt.Sprintf("meta%d", i), 21+i)
		c.Services[i] = m
		m.program = Bin(t, "weftd")
		m.args = []string{"meta", "--catalog", c.catalog, "--dir", filepath.Join(v.base, m.Name), "--listen", m.Addr}
		if v.opts.Lease > 0 {
			m.args = append(m.args, "--lease", v.opts.Lease.String())
		}
	}
	return c
}

// startEtcd makes the catalog.
func (c *Cluster) startEtcd() {
	v, t := c.v, c.v.t
	t.Helper()
	Need(t, "etcd")
	var initial, endpoints []string
	peers := [members]string{}
	for i := range members {
		c.Etcd[i] = c.member(fmt.Sprintf("etcd%d", i), 11+i)
		peers[i] = c.address(11 + i)
		initial = append(initial, fmt.Sprintf("etcd%d=http://%s", i, peers[i]))
		endpoints = append(endpoints, c.Etcd[i].Addr)
	}
	for i, m := range c.Etcd {
		m.program = "etcd"
		m.args = []string{
			"--name", m.Name, "--data-dir", filepath.Join(v.base, m.Name), "--logger", "zap", "--log-level", "error",
			"--listen-client-urls", "http://" + m.Addr, "--advertise-client-urls", "http://" + m.Addr,
			"--listen-peer-urls", "http://" + peers[i], "--initial-advertise-peer-urls", "http://" + peers[i],
			"--initial-cluster", strings.Join(initial, ","), "--initial-cluster-state", "new", "--initial-cluster-token", v.base,
			"--unsafe-no-fsync", // what is killed here are processes, not hosts
		}
		if out, _ := exec.Command("etcd", "--help").CombinedOutput(); !strings.Contains(string(out), "unsafe-no-fsync") {
			m.args = m.args[:len(m.args)-1]
		}
	}
	c.catalog = "etcd://" + strings.Join(endpoints, ",") + "/weft"
	for _, m := range c.Etcd {
		m.Start()
	}
}

// host is an address of the bridge's network.
func (c *Cluster) host(n int) string { return fmt.Sprintf("198.18.%d.%d", c.subnet, n) }

// freeSubnet is a number for a network that no other run has here, not even one that was killed and has left its bridge.
func freeSubnet(t testing.TB) int {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for n := range 256 {
		if !slices.ContainsFunc(addrs, func(a net.Addr) bool { return strings.HasPrefix(a.String(), fmt.Sprintf("198.18.%d.", n)) }) {
			return n
		}
	}
	t.Fatal("all networks of 198.18.0.0/16 are in use: remove the bridges that killed tests have left (ip link, wb...)")
	return 0
}

// address is one where nobody listens, for the n-th host.
func (c *Cluster) address(n int) string {
	if c.bridge == "" {
		return FreeAddr(c.v.t)
	}
	_, port, _ := net.SplitHostPort(FreeAddr(c.v.t))
	return net.JoinHostPort(c.host(n), port)
}

// member makes one that does not run yet.
func (c *Cluster) member(name string, n int) *Member {
	t := c.v.t
	m := &Member{c: c, Name: name, Addr: c.address(n)}
	if c.bridge != "" {
		m.netns = fmt.Sprintf("%s-%s", c.bridge, name)
		link := fmt.Sprintf("w%d-%d", os.Getpid(), n)
		Run(t, "", "ip", "netns", "add", m.netns)
		t.Cleanup(func() { exec.Command("ip", "netns", "del", m.netns).Run() })
		Run(t, "", "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", m.netns)
		Run(t, "", "ip", "link", "set", link, "master", c.bridge, "up")
		for _, args := range []string{"link set lo up", "addr add " + c.host(n) + "/24 dev eth0", "link set eth0 up"} {
			Run(t, "", "ip", append([]string{"-n", m.netns}, strings.Fields(args)...)...)
		}
	}
	t.Cleanup(func() { m.end(syscall.SIGKILL) })
	return m
}

// Start starts it again.
func (m *Member) Start() {
	argv := append([]string{m.program}, m.args...)
	if m.netns != "" {
		argv = append([]string{"nsenter", "--net=/run/netns/" + m.netns}, argv...)
	}
	m.run = launchProgram(m.c.v.t, m.c.v.log, m.c.v.opts.Env, argv...)
}

// Kill ends it with SIGKILL, Stop with SIGTERM; it is no error if it does not run.
func (m *Member) Kill() { m.end(syscall.SIGKILL) }
func (m *Member) Stop() { m.end(syscall.SIGTERM) }

func (m *Member) end(sig syscall.Signal) {
	if m.run == nil {
		return
	}
	m.run.cmd.Process.Signal(syscall.SIGCONT)
	m.run.end(m.c.v.t, sig)
	m.run = nil
}

// Running reports whether it was started and has not ended.
func (m *Member) Running() bool { return m.run != nil && !m.run.gone() }

// Freeze stops it where it is, until Thaw.
func (m *Member) Freeze() { freezeProcess(m.c.v.t, m.run.cmd.Process.Pid) }
func (m *Member) Thaw()   { m.run.cmd.Process.Signal(syscall.SIGCONT) }

// Cut takes it off the network, until Heal. Connections stay as they are.
func (m *Member) Cut()  { Run(m.c.v.t, "", "ip", "-n", m.netns, "link", "set", "eth0", "down") }
func (m *Member) Heal() { Run(m.c.v.t, "", "ip", "-n", m.netns, "link", "set", "eth0", "up") }

// addrs are those of the services, as a mount names them.
func (c *Cluster) addrs() string {
	var all []string
	for _, m := range c.Services {
		all = append(all, m.Addr)
	}
	return strings.Join(all, ",")
}

// start starts the services that do not run and waits until each answers.
func (c *Cluster) start() {
	t := c.v.t
	t.Helper()
	for _, m := range c.Services {
		if m.run == nil {
			m.Start()
		}
	}
	for _, m := range c.Services {
		c.Await(m)
	}
	if !c.begun {
		c.begun = true
		for _, d := range c.v.Servers {
			Weft(t, "admin", "device", "add", d.URL(), "--server", c.v.Addr)
		}
	}
	if c.chaos != nil {
		c.chaos()
	}
}

// end sends all services a signal and waits for their ends.
func (c *Cluster) end(sig syscall.Signal) {
	c.Calm()
	for _, m := range c.Services {
		m.end(sig)
	}
}

// Await waits until a service answers, whoever has the shards.
func (c *Cluster) Await(m *Member) {
	t := c.v.t
	t.Helper()
	var out []byte
	answers := false
	waittest.Poll(time.Minute, 50*time.Millisecond, func() bool {
		var err error
		out, err = exec.Command(Bin(t, "weft"), "admin", "device", "ls", "--server", m.Addr).CombinedOutput()
		answers = err == nil
		return answers || !m.Running()
	})
	if !answers {
		t.Fatalf("%s does not answer: %s", m.Name, out)
	}
}

// Owners is which service each shard has, by its place in Services. It first waits until all services have shards.
func (c *Cluster) Owners() (owners []int) {
	t := c.v.t
	t.Helper()
	Await(t, "shards for all services", func() bool {
		var st struct {
			Shards   int
			Services []struct {
				Address string
				Shards  []int
			}
		}
		if err := json.Unmarshal([]byte(Weft(t, "admin", "meta", "ls", "--json", "--server", c.v.Addr)), &st); err != nil {
			t.Fatal(err)
		}
		owners = make([]int, st.Shards)
		all, least := 0, st.Shards
		for _, s := range st.Services {
			all += len(s.Shards)
			least = min(least, len(s.Shards))
			for _, shard := range s.Shards {
				owners[shard] = slices.IndexFunc(c.Services[:], func(m *Member) bool { return m.Addr == s.Address })
			}
		}
		return all == st.Shards && len(st.Services) == members && least >= st.Shards/members
	})
	return owners
}

// Spread makes a new directory below a mount for each service, in a shard that it has, and returns their names.
func (c *Cluster) Spread(mount string) (names [members]string) {
	t := c.v.t
	t.Helper()
	owners := c.Owners()
	for i, m := range c.Services {
		for n := 0; names[i] == ""; n++ {
			name := fmt.Sprintf("%s-%d", m.Name, n)
			if owners[MakeDir(t, filepath.Join(mount, name), len(owners))] == i {
				names[i] = name
			}
		}
	}
	return names
}

// MakeDir makes a directory, if it is not there yet, and returns which of so many shards it is in.
func MakeDir(t testing.TB, path string, shards int) int {
	t.Helper()
	err := os.Mkdir(path, 0o755)
	if errors.Is(err, os.ErrExist) {
		err = nil
	}
	var st syscall.Stat_t
	if err == nil {
		err = syscall.Stat(path, &st)
	}
	if err != nil {
		t.Fatal(err)
	}
	return layout.ShardOf(layout.FileID(st.Ino), shards)
}

// Chaos does harm to one member after the other, chosen by seed, until Calm is called, and again when the services are started after a stop.
// What it does is in the log of weftd. Most of the etcd members are well at any time.
func (c *Cluster) Chaos(seed uint64) {
	c.v.t.Helper()
	c.v.t.Logf("chaos: seed %d", seed)
	c.chaos = func() {
		end, ended := make(chan struct{}), make(chan struct{})
		go func() { // ends with Calm, when all members are well
			defer close(ended)
			c.harm(rand.New(rand.NewPCG(seed, 0)), end)
		}()
		c.calm = func() {
			close(end)
			<-ended
		}
	}
	c.chaos()
}

// Calm ends the chaos, with all members well again, until the services are started next.
func (c *Cluster) Calm() {
	if c.calm != nil {
		c.calm()
		c.calm = nil
	}
}

// harm does it until end is closed.
func (c *Cluster) harm(r *rand.Rand, end <-chan struct{}) {
	wait := func(most time.Duration) {
		select {
		case <-time.After(time.Duration(r.Int64N(int64(most)))):
		case <-end:
		}
	}
	say := func(what, name string) {
		fmt.Fprintf(c.v.log, "time=%s chaos: %s %s\n", time.Now().Format("2006-01-02T15:04:05.000Z07:00"), what, name)
	}
	for {
		wait(4 * time.Second)
		select {
		case <-end:
			return
		default:
		}
		m := c.Services[r.IntN(members)]
		if r.IntN(3) == 0 && c.Etcd[0] != nil {
			m = c.Etcd[r.IntN(members)]
		}
		what := []string{"kill", "stop", "freeze", "cut"}[r.IntN(4)]
		if what == "cut" && m.netns == "" {
			what = "freeze"
		}
		say(what, m.Name)
		switch what {
		case "kill":
			m.Kill()
			wait(8 * time.Second)
			m.Start()
		case "stop":
			m.Stop()
			wait(4 * time.Second)
			m.Start()
		case "freeze":
			m.Freeze()
			wait(12 * time.Second)
			m.Thaw()
		case "cut":
			m.Cut()
			wait(12 * time.Second)
			m.Heal()
		}
		say("back:", m.Name)
	}
}
