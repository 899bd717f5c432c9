// Package local tests whole systems whose data servers are on the client's host.
package local

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var options = flag.String("o", "", "mount options, such as transport=device")

func mountOptions() []string {
	if *options == "" {
		return nil
	}
	return strings.Split(*options, ",")
}

// device is what weft status says of one.
type device struct {
	ID       string
	Address  string
	Local    bool
	Reason   string
	OpsLocal uint64 `json:"ops_local"`
	OpsRPC   uint64 `json:"ops_rpc"`
}

func parse(t *testing.T, status []byte) []device {
	t.Helper()
	var st []struct{ Devices []device }
	if err := json.Unmarshal(status, &st); err != nil || len(st) != 1 {
		t.Fatalf("%v: %s", err, status)
	}
	return st[0].Devices
}

func devices(t *testing.T, m *harness.Mount) []device {
	t.Helper()
	var out []byte
	harness.Await(t, "weft status", func() (ok bool) { // a mount is there before it listens to that
		var err error
		out, err = exec.Command(harness.Bin(t, "weft"), "status", "--json", m.Dir).Output()
		return err == nil
	})
	return parse(t, out)
}

// What is local, and why something is not, is seen at once, also before anything was read or written.
func TestStatus(t *testing.T) {
	for _, c := range []struct {
		name   string
		remote bool
		option string
		line   string
		local  bool
	}{
		{"default", false, "localio=rw", "local: yes", true},
		{"reading", false, "localio=ro", "local: yes, for reading only, because it was mounted with localio=ro", true},
		{"off", false, "localio=off", "local: no, because it was mounted with localio=off", false},
		{"server off", true, "localio=rw", "local: no, because the data server was started with --localio=off", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := harness.NewVolume(t, harness.Options{Remote: c.remote})
			m := v.Mount(append(mountOptions(), c.option)...)
			devices(t, m) // when the mount answers
			if n := strings.Count(harness.Weft(t, "status", m.Dir), c.line+"\n"); n != 4 {
				t.Errorf("%d lines %q of 4 in\n%s", n, c.line, harness.Weft(t, "status", m.Dir))
			}
			want := bytes.Repeat([]byte("weft"), 2<<20)
			if err := os.WriteFile(m.Dir+"/f", want, 0o644); err != nil {
				t.Fatal(err)
			}
			harness.Weft(t, "sync", m.Dir)
			if got, err := os.ReadFile(m.Dir + "/f"); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("read %d bytes: %v", len(got), err)
			}
			for _, d := range devices(t, m) {
				if d.Local != c.local || (d.OpsLocal > 0) != c.local || (d.OpsRPC > 0) == (c.option == "localio=rw" && c.local) {
					t.Errorf("%+v", d)
				}
			}
		})
	}
}

// layoutOf is the number of data servers in each copy of a new file, and the first server of each copy.
func layoutOf(t *testing.T, path string) (width int, first []string) {
	t.Helper()
	if err := os.WriteFile(path, bytes.Repeat([]byte("weft"), 2<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, m := range harness.LayoutOf(t, path).Mirrors {
		width = len(m.Servers)
		first = append(first, m.Servers[0].Device)
	}
	return width, first
}

// Where files are to lie on the host of who writes them, they do, whole; a second copy lies elsewhere.
func TestPlacement(t *testing.T) {
	m := harness.NewVolume(t, harness.Options{}).Mount(mountOptions()...)
	harness.Weft(t, "layout", "set", m.Dir, "--placement", "local")
	if out := harness.Weft(t, "layout", m.Dir); !strings.Contains(out, "placement local") {
		t.Errorf("the policy is %s", out)
	}
	if width, first := layoutOf(t, m.Dir+"/one"); width != 1 || len(first) != 1 {
		t.Errorf("%d copies on %d servers each", len(first), width)
	}
	harness.Weft(t, "layout", "set", m.Dir, "--mirrors", "2")
	if width, first := layoutOf(t, m.Dir+"/two"); width != 1 || len(first) != 2 || first[0] == first[1] {
		t.Errorf("%d copies on %d servers each: %v", len(first), width, first)
	}
	harness.Weft(t, "layout", "set", m.Dir, "--mirrors", "1", "--placement", "spread")
	if width, _ := layoutOf(t, m.Dir+"/spread"); width != 4 {
		t.Errorf("spread over %d", width)
	}
}

// What is read and written makes no system call on a socket to a data server.
func TestSystemCalls(t *testing.T) {
	harness.Need(t, "strace")
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount(mountOptions()...)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	write := func(name string) {
		if err := os.WriteFile(filepath.Join(m.Dir, name), want, 0o644); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, "sync", m.Dir)
	}
	write("before")
	var ports []string
	for _, d := range devices(t, m) {
		u, err := url.Parse(d.Address)
		if err != nil || !d.Local {
			t.Fatalf("%+v: %v", d, err)
		}
		ports = append(ports, u.Port())
	}
	out := filepath.Join(t.TempDir(), "trace")
	trace := exec.Command("strace", "-f", "-yy", "-s", "0", "-e", "trace=%network,read,write,readv,writev,pread64,preadv,preadv2,pwrite64,pwritev,pwritev2,sendfile,splice,fdatasync,io_uring_enter",
		"-o", out, "-p", fmt.Sprint(m.Pid()))
	trace.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := trace.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "strace", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.Pid()))
		return err == nil && !strings.Contains(string(b), "TracerPid:\t0\n")
	})
	for range 2 {
		if got, err := os.ReadFile(m.Dir + "/before"); err != nil || !bytes.Equal(got, want) {
			t.Errorf("read %d bytes: %v", len(got), err)
		}
		write("before")
	}
	trace.Process.Signal(syscall.SIGINT)
	trace.Wait()
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	calls := regexp.MustCompile(`<TCP[^>]*->[^>]*:(` + strings.Join(ports, "|") + `)\]>`)
	if bad := calls.FindAll(b, -1); bad != nil {
		t.Errorf("%d system calls to data servers, such as with %s", len(bad), bad[0])
	}
	// Reads and writes that wait for the disk go through a ring.
	for _, call := range []string{`(pread|pwrite)[^(]*\(\d+<[^>]*/export/|io_uring_enter\(`, `fdatasync\(\d+<[^>]*/export/`} {
		if !regexp.MustCompile(call).Match(b) {
			t.Errorf("no %s in %d lines", call, bytes.Count(b, []byte("\n")))
		}
	}
}

// A client that was stopped while it had descriptors to write by, and is fenced: others wait for it, as nobody can take them
// back, until it goes on, or is no more. Then nothing of what it writes is seen.
func TestStopped(t *testing.T) {
	for _, end := range []syscall.Signal{syscall.SIGCONT, syscall.SIGKILL} {
		t.Run(end.String(), func(t *testing.T) {
			v := harness.NewVolume(t, harness.Options{Lease: 2 * time.Second})
			a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
			f, err := os.Create(a.Dir + "/f")
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt(bytes.Repeat([]byte("old"), 100_000), 0); err != nil {
				t.Fatal(err)
			}
			a.Signal(syscall.SIGSTOP)
			cut := make(chan error, 1)
			go func() { cut <- os.Truncate(b.Dir+"/f", 10) }() // ends once the other one is out of the way
			harness.Await(t, "who is waited for, in the log", func() bool {
				return strings.Contains(v.Log(), "has a data file open for writing that is to be fenced") && strings.Contains(v.Log(), fmt.Sprint(a.Pid()))
			})
			select {
			case err := <-cut:
				t.Fatalf("truncated while a process could write: %v", err)
			default:
			}
			a.Signal(end)
			if err := <-cut; err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(b.Dir+"/f", []byte("new"), 0o644); err != nil {
				t.Error(err)
			}
			f.Sync() // what it wrote is lost, or there is nobody to ask
			if got, err := os.ReadFile(b.Dir + "/f"); err != nil || string(got) != "new" {
				t.Errorf("%q, %v", got, err)
			}
			if end == syscall.SIGKILL {
				a.Abort()
			}
		})
	}
}

// networkEnv tells the test binary that it is in a network namespace of its own.
const networkEnv = "WEFT_TEST_NETWORK"

// In containers, with mounts, processes and network of their own, what decides is whether they have the directory of sockets.
func TestContainers(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "unshare", "ip", "nsenter")
	if os.Getenv(networkEnv) == "" {
		cmd := exec.Command("unshare", "-n", "sh", "-c", `ip link set lo up && exec "$@"`, "sh", os.Args[0], "-test.run=^TestContainers$", "-test.v", "-o="+*options)
		cmd.Env = append(os.Environ(), networkEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Error(err)
		}
		return
	}
	harness.Run(t, "", "sh", "-c", "ip link add weft0 type veth peer name weft1 && ip addr add 198.18.77.1/24 dev weft0 && ip link set weft0 up && "+
		"ip link add weft2 type veth peer name weft3 && ip addr add 198.18.78.1/24 dev weft2 && ip link set weft2 up")
	const addr = "198.18.77.1:7049"
	harness.Spawn(t, "weftd", "single", "--dir", filepath.Join(harness.Dir(t), "volume"), "--listen", addr)
	harness.AwaitListen(t, addr)
	shared := startContainer(t, addr, "weft1", "198.18.77.2", "198.18.77.1", "true")
	apart := startContainer(t, addr, "weft3", "198.18.78.2", "198.18.78.1", "mount -t tmpfs none /run/weft")
	want := bytes.Repeat([]byte("weft"), 2<<20)
	if err := os.WriteFile(filepath.Join(apart.dir, "f"), want, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(shared.dir, "f")); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes: %v", len(got), err)
	}
	for _, d := range shared.devices(t) {
		if !d.Local || d.OpsLocal == 0 || d.OpsRPC > 0 {
			t.Errorf("with the directory of sockets: %+v", d)
		}
	}
	for _, d := range apart.devices(t) {
		if d.Local || !strings.Contains(d.Reason, "/run/weft/localio") || d.OpsLocal > 0 || d.OpsRPC == 0 {
			t.Errorf("without it: %+v", d)
		}
	}
}

// container is a mount in namespaces of its own.
type container struct {
	pid   int    // of unshare
	dir   string // as seen from here
	mount string // as seen from inside
}

func startContainer(t *testing.T, addr, link, ip, gateway, setup string) container {
	t.Helper()
	dir := harness.Dir(t)
	script := `ip link set lo up
until ip link show "$0" >/dev/null 2>&1; do sleep 0.05; done
ip addr add "$1/24" dev "$0" && ip link set "$0" up && ip route add default via "$2" && eval "$3" || exit
shift 3
exec "$@"`
	cmd := exec.Command("unshare", "-n", "-m", "-p", "-f", "--kill-child", "--mount-proc", "--propagation", "private", "sh", "-c", script,
		link, ip, gateway, setup, harness.Bin(t, "weft"), "mount", "-f")
	if *options != "" {
		cmd.Args = append(cmd.Args, "-o", *options)
	}
	cmd.Args = append(cmd.Args, addr+":/", dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s: %s", link, out.String())
		}
	})
	harness.Await(t, "a network namespace", func() bool {
		ours, err := os.Readlink("/proc/self/ns/net")
		theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
		return err == nil && err2 == nil && ours != theirs
	})
	harness.Run(t, "", "ip", "link", "set", link, "netns", fmt.Sprint(cmd.Process.Pid))
	c := container{cmd.Process.Pid, fmt.Sprintf("/proc/%d/root%s", cmd.Process.Pid, dir), dir}
	harness.Await(t, "a mount in "+link, func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", c.pid))
		return strings.Contains(string(b), " "+dir+" fuse.weft ")
	})
	return c
}

func (c container) devices(t *testing.T) []device {
	t.Helper()
	child, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", c.pid)) // which is in the namespace of processes, too
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("nsenter", "-t", strings.Fields(string(child))[0], "-m", "-p", harness.Bin(t, "weft"), "status", "--json", c.mount).Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return parse(t, out)
}
