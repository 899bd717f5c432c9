package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/server/catalog/catalogtest/freeze"
)

// Root is the top of the source tree.
var Root = func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	panic("harness: no go.mod above the working directory")
}()

// binaries builds weft and weftd once for this test process.
var binaries = sync.OnceValues(func() (string, error) {
	cmd := exec.Command(filepath.Join(Root, "scripts", "build"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("scripts/build: %v\n%s", err, out)
	}
	return filepath.Join(Root, "bin"), nil
})

// Bin is the path of weft or weftd, freshly built.
func Bin(t testing.TB, name string) string {
	t.Helper()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// NeedMount skips a test on a machine that cannot mount FUSE file systems, or in the short loop.
func NeedMount(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("mounts: left to the long form of the test")
	}
	if os.Getuid() != 0 {
		t.Skip("missing: root, to mount")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("missing: /dev/fuse")
	}
}

// Options of a volume.
type Options struct {
	DataServers int           // default 4, or with NVMe none
	NVMe        int           // NVMe namespaces, each at a port of its own
	Lease       time.Duration // default that of weftd
	Apart       bool          // the data servers are processes of their own, which Kill and Stop leave alone
	Room        int64         // bytes of a file system for each data server that is apart, in memory; 0: they share the disk
	Disks       []*Disk       // where the data servers that are apart keep their directories, in turn
	Disk        *Disk         // where the service keeps its directory
	Devices     []string      // URLs as for weft admin device add, in place of data servers of its own; they are not stopped with the volume
	Remote      bool          // data servers lend no descriptors, so that all goes by RPC
	Cluster     bool          // three metadata services on a catalog in three etcd members; the data servers are apart
	Catalog     string        // with Cluster: URL of an empty catalog that the test keeps, in place of etcd
	Links       bool          // with Cluster: each of them has a network link that can be cut
	Args        []string      // of weftd, further ones, if there is one process of it
	Env         []string      // of weftd and of the mounts, beside that of the test, such as GOMAXPROCS=1
}

// ServersEnv makes NewVolume take these data servers, URLs as for weft admin device add, in place of its own. They are not
// stopped with the volume.
const ServersEnv = "WEFT_TEST_DATA_SERVERS"

// NVMeEnv, set to anything, makes NewVolume take NVMe namespaces in place of the data servers that are not apart.
const NVMeEnv = "WEFT_TEST_NVME"

// Volume is a weftd single.
type Volume struct {
	t    testing.TB
	opts Options
	base string // for volume, mounts and logs
	Dir  string // of weftd, below base
	Addr string // HOST:PORT of the metadata service
	run  *child // nil when stopped
	log  *os.File
	mu   sync.Mutex

	Servers []*DataServer // if they are apart
	Cluster *Cluster      // nil if there is one service
	foreign []string      // URLs of data servers that are not the volume's own
}

// NewVolume starts one and waits until it answers.
func NewVolume(t testing.TB, opts Options) *Volume {
	t.Helper()
	NeedMount(t)
	if opts.DataServers == 0 && opts.NVMe == 0 {
		opts.DataServers = 4
	}
	kind := os.Getenv(ClusterEnv)
	if kind != "" && opts.NVMe == 0 && len(opts.Devices) == 0 {
		opts.Cluster, opts.Links = true, kind == "chaos"
	}
	opts.Apart = opts.Apart || opts.Cluster
	if os.Getenv(NVMeEnv) != "" && !opts.Apart && opts.NVMe == 0 {
		opts.DataServers, opts.NVMe = 0, opts.DataServers
	}
	v := &Volume{t: t, opts: opts, base: Dir(t), Addr: FreeAddr(t)}
	v.Dir = filepath.Join(v.base, "volume")
	if opts.Disk != nil {
		v.Dir = filepath.Join(opts.Disk.Dir, "volume")
	}
	v.log = openLog(t, v.base, "weftd")
	if opts.Cluster {
		v.Cluster = newCluster(v, opts.Links)
		v.Addr = v.Cluster.addrs()
	}
	if opts.Apart {
		for i := range opts.DataServers {
			name := fmt.Sprintf("server%d", i)
			dir := filepath.Join(v.base, name)
			if n := len(opts.Disks); n > 0 {
				dir = filepath.Join(opts.Disks[i%n].Dir, name)
			}
			d := newDataServer(v, dir, opts.Room, opts.Remote)
			if n := len(opts.Disks); n > 0 {
				d.disk = opts.Disks[i%n]
			}
			v.Servers = append(v.Servers, d)
		}
	} else {
		v.foreign = strings.Fields(os.Getenv(ServersEnv))
		if len(opts.Devices) > 0 {
			v.foreign = opts.Devices
		}
	}
	v.Start()
	for _, url := range v.foreign {
		Weft(t, "admin", "device", "add", url, "--server", v.Addr)
	}
	t.Cleanup(func() { v.Stop() })
	if opts.Cluster && kind == "chaos" {
		v.Cluster.Chaos(uint64(time.Now().UnixNano()))
	}
	return v
}

// openLog makes a log file that is printed if the test fails.
func openLog(t testing.TB, dir, name string) *os.File {
	f, err := os.CreateTemp(dir, name+"-*.log")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.Close()
		if t.Failed() {
			b, _ := os.ReadFile(f.Name())
			if len(b) > 64<<10 { // room for a dump of goroutines
				b = b[len(b)-64<<10:]
			}
			t.Logf("%s:\n%s", filepath.Base(f.Name()), b)
		}
	})
	return f
}

// Start starts weftd and waits until it answers.
func (v *Volume) Start() {
	v.t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.Cluster != nil {
		v.Cluster.start()
		return
	}
	args := []string{"single", "--dir", v.Dir, "--data-servers", fmt.Sprint(v.opts.DataServers), "--listen", v.Addr}
	if v.opts.NVMe > 0 {
		args = append(args, "--nvme", fmt.Sprint(v.opts.NVMe))
	}
	if v.opts.Apart || len(v.foreign) > 0 {
		args = []string{"meta", "--dir", v.Dir, "--listen", v.Addr}
		for _, d := range v.Servers {
			args = append(args, "--data-server", d.addr+":/")
		}
	}
	if v.opts.Remote && args[0] == "single" {
		args = append(args, "--localio=off")
	}
	if v.opts.Lease > 0 {
		args = append(args, "--lease", v.opts.Lease.String())
	}
	args = append(args, v.opts.Args...)
	v.run = launch(v.t, v.log, v.opts.Env, "weftd", args...)
	deadline := time.Now().Add(30 * time.Second)
	for {
		out, err := exec.Command(Bin(v.t, "weft"), "admin", "device", "ls", "--server", v.Addr).CombinedOutput()
		if err == nil {
			return
		}
		if time.Now().After(deadline) || v.run.gone() {
			v.t.Fatalf("weftd does not answer: %s", out)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Kill ends weftd with SIGKILL.
func (v *Volume) Kill() { v.end(syscall.SIGKILL) }

// Stop ends weftd with SIGTERM; it is no error if it is not running.
func (v *Volume) Stop() { v.end(syscall.SIGTERM) }

func (v *Volume) end(sig syscall.Signal) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.Cluster != nil {
		v.Cluster.end(sig)
		return
	}
	if v.run == nil {
		return
	}
	if err := v.run.end(v.t, sig); sig == syscall.SIGTERM && err != nil {
		v.t.Errorf("weftd: %v", err)
	}
	v.run = nil
}

// Log is what weftd, and the data servers that are apart, have said so far.
func (v *Volume) Log() string {
	b, _ := os.ReadFile(v.log.Name())
	return string(b)
}

// Pause makes the metadata service, and what data servers are one process with it, stand still, Continue go on.
func (v *Volume) Pause()    { freezeProcess(v.t, v.Pid()) }
func (v *Volume) Continue() { syscall.Kill(v.Pid(), syscall.SIGCONT) }

func freezeProcess(t testing.TB, pid int) {
	t.Helper()
	if err := freeze.Process(pid); err != nil {
		t.Fatal(err)
	}
}

// Pid is weftd's process number.
func (v *Volume) Pid() int { return v.run.cmd.Process.Pid }

// Fsck checks the stopped volume and fails the test unless it is clean.
func (v *Volume) Fsck(args ...string) {
	v.t.Helper()
	where := []string{"fsck", "--dir", v.Dir}
	if v.Cluster != nil {
		where = []string{"fsck", "--catalog", v.Cluster.catalog}
	}
	out, err := exec.Command(Bin(v.t, "weftd"), append(where, args...)...).CombinedOutput()
	if err != nil {
		v.t.Errorf("weftd fsck: %v\n%s", err, out)
	}
}

// Mount is a mounted volume with its serving process.
type Mount struct {
	t   testing.TB
	Dir string
	log *os.File
	run *child // nil when unmounted
}

// Mount mounts the volume with the given -o options on a directory of its own.
func (v *Volume) Mount(options ...string) *Mount {
	v.t.Helper()
	return v.MountUnder(nil, options...)
}

// MountUnder does it with the serving process started by another program, such as unshare, which becomes that process.
func (v *Volume) MountUnder(starter []string, options ...string) *Mount {
	v.t.Helper()
	dir, err := os.MkdirTemp(v.base, "mnt")
	if err != nil {
		v.t.Fatal(err)
	}
	os.Chmod(dir, 0o755)
	return v.mountOn(dir, starter, options...)
}

// MountAgain mounts the volume where a mount was that has been unmounted.
func (v *Volume) MountAgain(m *Mount, options ...string) *Mount {
	v.t.Helper()
	return v.mountOn(m.Dir, nil, options...)
}

func (v *Volume) mountOn(dir string, starter []string, options ...string) *Mount {
	v.t.Helper()
	args := []string{"mount", "-f"}
	if len(options) > 0 {
		args = append(args, "-o", strings.Join(options, ","))
	}
	m := &Mount{t: v.t, Dir: dir, log: openLog(v.t, v.base, "mount")}
	m.run = launchUnder(v.t, starter, m.log, v.opts.Env, "weft", append(args, v.Addr+":/", dir)...)
	v.t.Cleanup(m.Unmount)
	deadline := time.Now().Add(30 * time.Second)
	for !Mounted(dir) {
		if time.Now().After(deadline) || m.run.gone() {
			m.Abort()
			v.t.Fatalf("%s is not mounted", dir)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return m
}

// Pid is the serving process's number.
func (m *Mount) Pid() int { return m.run.cmd.Process.Pid }

// Serving reports whether the serving process has not ended.
func (m *Mount) Serving() bool { return !m.run.gone() }

// Signal sends the serving process a signal, such as SIGSTOP and SIGCONT.
func (m *Mount) Signal(sig syscall.Signal) {
	m.t.Helper()
	if err := m.run.cmd.Process.Signal(sig); err != nil {
		m.t.Fatal(err)
	}
}

// Log is what the serving process has logged.
func (m *Mount) Log() string {
	b, err := os.ReadFile(m.log.Name())
	if err != nil {
		m.t.Error(err)
	}
	return string(b)
}

// AwaitCopies waits until no copies of mirrored files are left to be made anew.
func (m *Mount) AwaitCopies() {
	m.t.Helper()
	var st []struct {
		Service struct {
			Connected bool
			Stale     int64 `json:"stale_files"`
			Copied    int64 `json:"copied_bytes"`
		}
	}
	ok := waittest.Poll(5*time.Minute, 200*time.Millisecond, func() bool {
		st = nil
		if err := json.Unmarshal([]byte(Weft(m.t, "status", "--json", m.Dir)), &st); err != nil {
			m.t.Fatal(err)
		}
		return st[0].Service.Connected && st[0].Service.Stale == 0
	})
	if !ok {
		m.t.Fatalf("copies are not made anew: %+v", st[0].Service)
	}
}

// Verify compares the copies of all mirrored files.
func (m *Mount) Verify() {
	m.t.Helper()
	Weft(m.t, "admin", "verify", "--progress", "off", m.Dir)
}

// DropCaches makes the kernel forget the names and inodes that nobody uses, of all file systems.
func DropCaches(t testing.TB) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0); err != nil {
		t.Fatal(err)
	}
}

// Mounted reports whether a weft file system is mounted exactly on dir.
func Mounted(dir string) bool {
	b, err := os.ReadFile("/proc/self/mounts")
	return err == nil && bytes.Contains(b, []byte(" "+dir+" fuse.weft "))
}

// Unmount unmounts as a user would and fails the test if that does not work; a second call does nothing.
func (m *Mount) Unmount() {
	if m.run == nil {
		return
	}
	out, err := exec.Command(Bin(m.t, "weft"), "umount", m.Dir).CombinedOutput()
	if err != nil {
		m.t.Errorf("weft umount: %v: %s", err, out)
		m.run.dump()
		m.Abort()
		return
	}
	how := syscall.Signal(0) // it ends by itself
	if bytes.Contains(out, []byte("other mount namespaces")) {
		// A test that made a mount namespace meanwhile has a copy, for which the mount would be served on. Its connection is
		// not aborted by number: the namespace may end now, and another test's mount get the number.
		how = syscall.SIGKILL
	}
	m.run.end(m.t, how)
	m.run = nil
}

// Abort kills the serving process and frees the mount point, whatever hangs on it.
func (m *Mount) Abort() {
	if m.run == nil {
		return
	}
	if n, err := connection(m.Dir); err == nil {
		abort(m.t, n)
	}
	unix.Unmount(m.Dir, unix.MNT_DETACH)
	m.run.end(m.t, syscall.SIGKILL)
	m.run = nil
}

// abort ends a FUSE connection; one that is gone already needs nothing.
func abort(t testing.TB, connection int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "fusectl") // not every machine has it mounted
	if err == nil {
		err = unix.Mount("fusectl", dir, "fusectl", 0, "")
	}
	if err != nil {
		t.Error(err)
		return
	}
	os.WriteFile(fmt.Sprintf("%s/%d/abort", dir, connection), []byte("1"), 0)
	unix.Unmount(dir, unix.MNT_DETACH)
	os.Remove(dir)
}

// connection is the FUSE connection number of a mount.
func connection(dir string) (int, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 5 && f[4] == dir {
			_, minor, _ := strings.Cut(f[2], ":")
			var n int
			_, err := fmt.Sscan(minor, &n)
			return n, err
		}
	}
	return 0, errors.New("not a mount point")
}

// Weft runs weft with args and returns its standard output.
func Weft(t testing.TB, args ...string) string {
	t.Helper()
	return Run(t, "", Bin(t, "weft"), args...)
}

// Run runs a program in dir and returns its standard output; it fails the test if that fails.
func Run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, tail(out.Bytes()), tail(errs.Bytes()))
	}
	return out.String()
}

func tail(b []byte) []byte {
	if len(b) > 4096 {
		return b[len(b)-4096:]
	}
	return b
}

// Whole makes new files below a directory of a mount lie whole on this host if the options of the mount are to have the kernel
// write by itself, which it does with no others.
func Whole(t testing.TB, dir, options string) {
	t.Helper()
	if strings.Contains(options, "passthrough=rw") {
		Weft(t, "layout", "set", dir, "--placement", "local")
	}
}

// Need skips the test if a program is missing that scripts/test installs.
func Need(t testing.TB, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("missing: the program %s (scripts/test installs it)", p)
		}
	}
}

// Layout is what `weft layout FILE --json` prints.
type Layout struct {
	File        string
	Size        int64
	StripeUnit  int64 `json:"stripe_unit"`
	StripeCount int   `json:"stripe_count"`
	Mirrors     []struct {
		Servers []struct {
			Index    int
			Device   string
			Address  string
			DataFile string `json:"data_file"`
		}
	}
	Caches []struct {
		Device   string
		DataFile string `json:"data_file"`
		State    string
	}
}

// LayoutOf asks for a file's layout.
func LayoutOf(t testing.TB, path string) Layout {
	t.Helper()
	var l Layout
	if err := json.Unmarshal([]byte(Weft(t, "layout", path, "--json")), &l); err != nil {
		t.Fatal(err)
	}
	return l
}
