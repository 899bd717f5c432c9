package etcdserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog/catalogtest/freeze"
)

// startTime is how long a member may take until it can be used. A machine with many tests on it is slow.
const startTime = time.Minute

// Cluster is a running cluster. Its methods are not for several goroutines at once.
type Cluster struct {
	t       testing.TB
	members []*member
}

type member struct {
	args   []string
	client string // host:port
	log    string
	cmd    *exec.Cmd
	ended  chan struct{} // closed when cmd has
}

// Start starts a cluster of n members, each with args behind its own, and waits until all can be used.
func Start(t testing.TB, n int, args ...string) *Cluster {
	t.Helper()
	path, err := exec.LookPath("etcd")
	if err != nil {
		t.Fatalf("no program etcd in PATH (%v): install Debian's package etcd-server", err)
	}
	dir := t.TempDir()
	// An address of its own in 127.0.0.0/8 has all ports free, also those of members that are down. The ports are below
	// those that the kernel gives to others, who may listen at all addresses.
	host := fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
	port := 10_000 + rand.IntN(20_000)
	next := func() string {
		port++
		return net.JoinHostPort(host, strconv.Itoa(port))
	}
	c := &Cluster{t: t}
	var initial []string
	for i := range n {
		name, client, peer := fmt.Sprintf("m%d", i), next(), "http://"+next()
		initial = append(initial, name+"="+peer)
		c.members = append(c.members, &member{
			client: client, log: filepath.Join(dir, name+".log"),
			args: append([]string{path,
				"--name", name, "--data-dir", filepath.Join(dir, name), "--logger", "zap", "--log-level", "warn",
				"--listen-client-urls", "http://" + client, "--advertise-client-urls", "http://" + client,
				"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
				"--initial-cluster-state", "new", "--initial-cluster-token", host,
			}, args...),
		})
	}
	t.Cleanup(func() {
		for i, m := range c.members {
			c.Kill(i)
			if t.Failed() {
				logs, _ := os.ReadFile(m.log)
				t.Logf("last of member %d:\n%s", i, logs[max(0, len(logs)-4096):])
			}
		}
	})
	for _, m := range c.members {
		m.args = append(m.args, "--initial-cluster", strings.Join(initial, ","))
		c.launch(m)
	}
	for i := range c.members {
		c.await(i)
	}
	return c
}

func (c *Cluster) launch(m *member) {
	c.t.Helper()
	log, err := os.OpenFile(m.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(m.args[0], m.args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH="+runtime.GOARCH) // without it etcd 3.4 refuses to run on arm64
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	ended, started := make(chan struct{}), make(chan error)
	go func() { // ends with the process
		runtime.LockOSThread() // Pdeathsig tells of the end of the thread that started the process
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(ended)
		}
	}()
	if err := <-started; err != nil {
		c.t.Fatal(err)
	}
	m.cmd, m.ended = cmd, ended
}

// await waits until member i answers that it is part of a cluster with a leader.
func (c *Cluster) await(i int) {
	c.t.Helper()
	m := c.members[i]
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if _, _, err := m.status(); err == nil {
			return
		} else if time.Since(begin) > startTime {
			c.t.Fatalf("etcd member %d does not answer after %v: %v", i, startTime, err)
		}
		select {
		case <-m.ended:
			logs, _ := os.ReadFile(m.log)
			c.t.Fatalf("etcd member %d ended: %v\n%s", i, m.cmd.ProcessState, logs)
		default:
		}
	}
}

// status returns the member's number and that of the leader it knows.
func (m *member) status() (id, leader string, err error) {
	client := http.Client{Timeout: 5 * time.Second}
	defer client.CloseIdleConnections()
	answer, err := client.Post("http://"+m.client+"/v3/maintenance/status", "application/json", bytes.NewBufferString("{}"))
	if err != nil {
		return "", "", err
	}
	defer answer.Body.Close()
	var s struct {
		Header struct {
			Member string `json:"member_id"`
		} `json:"header"`
		Leader string `json:"leader"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&s); err != nil {
		return "", "", err
	}
	if s.Leader == "" || s.Leader == "0" {
		return "", "", fmt.Errorf("%s: no leader", answer.Status)
	}
	return s.Header.Member, s.Leader, nil
}

// Endpoints returns host:port of every member, in order.
func (c *Cluster) Endpoints() []string {
	var all []string
	for _, m := range c.members {
		all = append(all, m.client)
	}
	return all
}

// URL returns the address of the catalog with this prefix, which begins with a slash.
func (c *Cluster) URL(prefix string) string {
	return "etcd://" + strings.Join(c.Endpoints(), ",") + prefix
}

// Leader returns which member leads.
func (c *Cluster) Leader() int {
	c.t.Helper()
	for begin := time.Now(); time.Since(begin) < startTime; time.Sleep(20 * time.Millisecond) {
		for i, m := range c.members {
			if id, leader, err := m.status(); err == nil && id == leader {
				return i
			}
		}
	}
	c.t.Fatalf("no leader after %v", startTime)
	return -1
}

// Kill ends member i at once, as the loss of its machine would, and waits until it is gone.
func (c *Cluster) Kill(i int) {
	if m := c.members[i]; m.cmd != nil {
		_ = m.cmd.Process.Kill()
		<-m.ended
	}
}

// Stop halts member i: its connections stay, and nothing is answered.
func (c *Cluster) Stop(i int) {
	c.t.Helper()
	if err := freeze.Process(c.members[i].cmd.Process.Pid); err != nil {
		c.t.Fatalf("member %d: %v", i, err)
	}
}

// Cont lets member i go on after Stop.
func (c *Cluster) Cont(i int) { c.signal(i, syscall.SIGCONT) }

func (c *Cluster) signal(i int, sig syscall.Signal) {
	c.t.Helper()
	if err := c.members[i].cmd.Process.Signal(sig); err != nil {
		c.t.Fatalf("%v to member %d: %v", sig, i, err)
	}
}

// Restart starts member i again, after Kill, with what it has stored, and waits until it can be used. Without a majority it
// cannot be: use RestartAll.
func (c *Cluster) Restart(i int) {
	c.t.Helper()
	c.launch(c.members[i])
	c.await(i)
}

// RestartAll starts all members again after all were killed.
func (c *Cluster) RestartAll() {
	c.t.Helper()
	for _, m := range c.members {
		c.launch(m)
	}
	for i := range c.members {
		c.await(i)
	}
}
