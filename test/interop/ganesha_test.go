package interop

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/test/harness"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// export is a directory that Ganesha exports with these settings, of which vfs is one.
type export struct {
	dir, settings string
}

const vfs = "FSAL { Name = VFS; }"

// ganesha is a running NFS-Ganesha.
type ganesha struct {
	t          testing.TB
	conf       string
	base       string
	nfs, mount string // ports
	cmd        *exec.Cmd
	ended      chan struct{}
}

// background starts a program that dies with the test. Its output goes to log.
func background(t testing.TB, log string, name string, args ...string) (*exec.Cmd, chan struct{}) {
	t.Helper()
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }() // ends with the process
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended
		if t.Failed() {
			b, _ := os.ReadFile(log)
			t.Logf("%s:\n%s", log, b[max(0, len(b)-4096):])
		}
	})
	return cmd, ended
}

// startGanesha starts a server with these exports on ports of its own.
func startGanesha(t testing.TB, exports ...export) *ganesha {
	t.Helper()
	aloneWithGanesha(t)
	return newGanesha(t, exports...)
}

// aloneWithGanesha waits until no other test runs NFS-Ganesha, and starts a port mapper if there is none: that is one for the
// machine.
func aloneWithGanesha(t testing.TB) {
	t.Helper()
	harness.Need(t, "rpcbind", "ganesha.nfsd")
	if os.Getuid() != 0 {
		t.Skip("missing: root, for NFS-Ganesha")
	}
	lock, err := os.OpenFile("/run/weft-test-ganesha.lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", "127.0.0.1:111"); err == nil {
		c.Close()
	} else {
		os.MkdirAll("/run/rpcbind", 0o755)
		background(t, filepath.Join(harness.Dir(t), "rpcbind.log"), "rpcbind", "-f")
		harness.AwaitListen(t, "127.0.0.1:111")
	}
}

// newGanesha is startGanesha for a test that has called aloneWithGanesha.
func newGanesha(t testing.TB, exports ...export) *ganesha {
	t.Helper()
	base := harness.Dir(t)
	g := &ganesha{t: t, base: base, conf: filepath.Join(base, "ganesha.conf")}
	_, g.nfs, _ = net.SplitHostPort(harness.FreeAddr(t))
	_, g.mount, _ = net.SplitHostPort(harness.FreeAddr(t))
	_, nlm, _ := net.SplitHostPort(harness.FreeAddr(t))
	_, quota, _ := net.SplitHostPort(harness.FreeAddr(t))
	var conf strings.Builder
	fmt.Fprintf(&conf, `
NFS_CORE_PARAM {
	Protocols = 3;
	NFS_Port = %s;  MNT_Port = %s;  NLM_Port = %s;  Rquota_Port = %s;
	Enable_NLM = false;  Enable_RQUOTA = false;  Enable_UDP = false;
	Bind_addr = 127.0.0.1;
	mount_path_pseudo = false;
}
NFSv4 { Graceless = true; RecoveryBackend = fs; RecoveryRoot = %s; }
NFS_KRB5 { Active_krb5 = false; }
LOG { Default_Log_Level = EVENT; }
`, g.nfs, g.mount, nlm, quota, base)
	for i, e := range exports {
		fmt.Fprintf(&conf, `
EXPORT { Export_Id = %d; Path = %s; Pseudo = /e%d; Protocols = 3; Transports = TCP; SecType = sys;
	MaxRead = 4194304; MaxWrite = 4194304; PrefRead = 1048576; PrefWrite = 1048576;
	%s }
`, i+1, e.dir, i+1, e.settings)
	}
	if err := os.WriteFile(g.conf, []byte(conf.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	g.start()
	return g
}

func (g *ganesha) start() {
	g.t.Helper()
	log := filepath.Join(g.base, "ganesha.log")
	g.cmd, g.ended = background(g.t, log, "ganesha.nfsd", "-F", "-f", g.conf, "-L", log, "-p", filepath.Join(g.base, "pid"), "-N", "EVENT")
	harness.AwaitListen(g.t, "127.0.0.1:"+g.nfs)
	harness.AwaitListen(g.t, "127.0.0.1:"+g.mount)
}

func (g *ganesha) kill() {
	g.cmd.Process.Kill()
	<-g.ended
}

// subdir makes a directory that belongs to root.
func subdir(t testing.TB, base, name string) string {
	t.Helper()
	dir := filepath.Join(base, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

const (
	access = "Access_Type = RW; Squash = No_Root_Squash; PrivilegedPort = false; "
	open   = access + vfs
)

// TestGaneshaContract holds targets to their contract against NFS-Ganesha, plain and behind a wrapper that delays and
// reorders.
func TestGaneshaContract(t *testing.T) {
	dir := harness.Dir(t)
	g := startGanesha(t, export{dir, open})
	nfs := netip.MustParseAddrPort("127.0.0.1:" + g.nfs)
	root, err := nfs3.Mount(t.Context(), netip.MustParseAddrPort("127.0.0.1:"+g.mount), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	var files atomic.Int32
	for _, wrapped := range []bool{false, true} {
		t.Run(map[bool]string{false: "plain", true: "faulty"}[wrapped], func(t *testing.T) {
			targettest.Run(t, func(t *testing.T) targettest.Fixture {
				tg, err := nfs3.New(nfs3.Config{Name: "ganesha", Addrs: []netip.AddrPort{nfs}, Log: slog.New(slog.DiscardHandler)})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { tg.Close() })
				fx := targettest.Fixture{
					Target:  tg,
					BadFile: &layout.DataFile{Handles: [][]byte{[]byte("not a handle of this server")}},
					NewFile: func() *layout.DataFile {
						attr := wire.Sattr{SetMode: true, Mode: 0o640, SetUID: true, UID: 4000, SetGID: true, GID: 4001}
						fh, _, err := tg.Create(t.Context(), layout.Credential{}, root, fmt.Sprint("file", files.Add(1)), wire.Guarded, attr, wire.CreateVerf{})
						if err != nil {
							t.Fatal(err)
						}
						return &layout.DataFile{Handles: [][]byte{fh}, Cred: layout.Credential{UID: 4000, GID: 4001}}
					},
				}
				if wrapped {
					seed := rand.Uint64()
					t.Logf("seed %d", seed)
					fx.Target = faultytest.New(tg, faultytest.Config{
						Seed: seed, Reorder: true, Rules: []faultytest.Rule{{Prob: 0.3, Delay: time.Millisecond, Jitter: 5 * time.Millisecond}},
					})
					t.Cleanup(func() { fx.Target.Close() })
				}
				return fx
			})
		})
	}
}

// TestGaneshaDevices adds exports of NFS-Ganesha as data servers, good ones and bad ones, and uses them.
func TestGaneshaDevices(t *testing.T) {
	base := harness.Dir(t)
	dirs := map[string]string{}
	for _, name := range []string{"one", "two", "squashed", "readonly", "everybody"} {
		dirs[name] = subdir(t, base, name)
	}
	if err := os.Chmod(dirs["everybody"], 0o777); err != nil {
		t.Fatal(err)
	}
	g := startGanesha(t,
		export{dirs["one"], "Access_Type = RW; Squash = No_Root_Squash; PrivilegedPort = true;" + vfs}, // as "secure"
		export{dirs["two"], open},
		export{dirs["squashed"], "Access_Type = RW; Squash = Root_Squash; PrivilegedPort = false;" + vfs},
		export{dirs["readonly"], "Access_Type = RO; Squash = No_Root_Squash; PrivilegedPort = false;" + vfs},
		export{dirs["everybody"], "Access_Type = RW; Squash = Root_Squash; PrivilegedPort = false;" + vfs},
	)
	addr := harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "meta", "--dir", harness.Dir(t), "--listen", addr)
	harness.AwaitListen(t, addr)
	add := func(url string) (string, error) {
		out, err := exec.Command(harness.Bin(t, "weft"), "admin", "device", "add", "--server", addr, url).CombinedOutput()
		return string(out), err
	}
	for _, tc := range []struct{ url, want string }{
		{"nfs://127.0.0.1" + dirs["squashed"], "root squash"},
		{"nfs://127.0.0.1" + dirs["everybody"], "root squash"},
		{"nfs://127.0.0.1" + dirs["readonly"], "Access_Type = RW"},
		{"nfs://127.0.0.1" + base + "/nothing", "does not export"},
		{"nfs://127.0.0.1:" + g.nfs + dirs["two"] + "?mountport=" + freePort(t), "refused"},
		{"nfs://127.0.0.1:" + freePort(t) + dirs["two"], "refused"},
	} {
		out, err := add(tc.url)
		if err == nil || !strings.Contains(out, tc.want) {
			t.Errorf("%s: %v, %q; want %q", tc.url, err, out, tc.want)
		}
	}
	for _, name := range []string{"squashed", "everybody"} {
		filepath.WalkDir(dirs[name], func(path string, e fs.DirEntry, err error) error {
			if strings.HasPrefix(e.Name(), "device-") {
				t.Errorf("%s was left behind", path)
			}
			return err
		})
	}
	// By the port mapper, and with both ports said.
	for _, url := range []string{"nfs://127.0.0.1" + dirs["one"], "nfs://127.0.0.1:" + g.nfs + dirs["two"] + "?mountport=" + g.mount} {
		if out, err := add(url); err != nil || !strings.Contains(out, g.nfs) {
			t.Fatalf("%s: %v\n%s", url, err, out)
		}
	}
	m := harness.MountAt(t, addr, "wsize=4MiB,rsize=4MiB")
	data := make([]byte, 20<<20)
	rand.NewChaCha8([32]byte{1}).Read(data)
	file := filepath.Join(m.Dir, "file")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	l := harness.LayoutOf(t, file)
	if len(l.Mirrors) != 1 || len(l.Mirrors[0].Servers) != 2 {
		t.Errorf("layout %+v, want one over two servers", l)
	}
	got, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v: contents differ", len(got), err)
	}
	// A restart: what is not stable is sent again, and whoever writes meanwhile waits. Nobody writes from this process: to
	// start another one it would have to close its copy of the file, which waits for the server.
	harness.Need(t, "fio")
	fio, ended := background(t, filepath.Join(base, "fio.log"), "fio", "--name=v", "--directory="+m.Dir, "--rw=randwrite", "--bs=64k", "--size=32m",
		"--numjobs=2", "--rate=8m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--end_fsync=1", "--verify_state_save=0")
	harness.Await(t, "the file of fio", func() bool { _, err := os.Stat(filepath.Join(m.Dir, "v.0.0")); return err == nil })
	time.Sleep(time.Second)
	g.kill()
	time.Sleep(1100 * time.Millisecond) // its verifier has a resolution of a second
	g.start()
	<-ended
	if !fio.ProcessState.Success() {
		t.Errorf("fio: %v", fio.ProcessState)
	}
	harness.Run(t, m.Dir, "cp", "-a", filepath.Join(harness.Root, "layout"), "tree")
	harness.Run(t, m.Dir, "diff", "-r", filepath.Join(harness.Root, "layout"), "tree")
	m.Unmount()
}

func freePort(t testing.TB) string {
	_, port, _ := net.SplitHostPort(harness.FreeAddr(t))
	return port
}

// TestGaneshaReplyCache: what is sent again from the port of the connection that was lost, with the same xid, Ganesha
// knows and does not carry out again; from another port it does. So the port is worth keeping (dataplane/nfs3, Lost
// connections).
func TestGaneshaReplyCache(t *testing.T) {
	dir := harness.Dir(t)
	g := startGanesha(t, export{dir, open})
	addr := netip.MustParseAddrPort("127.0.0.1:" + g.nfs)
	root, err := nfs3.Mount(t.Context(), netip.MustParseAddrPort("127.0.0.1:"+g.mount), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	rootFH, err := wire.NewFileHandle(root)
	if err != nil {
		t.Fatal(err)
	}
	sys := oncrpc.AuthSys{Machine: "test"}
	cred, err := sys.Auth()
	if err != nil {
		t.Fatal(err)
	}
	// mkdir makes a directory and returns the status, which is EXIST if a call that has made it is carried out again.
	// Without an address it could not be repeated: somebody else has got the port that it should come from, or Ganesha
	// still has the first call in hand, whose reply it sends before it puts it into the cache, and drops the second.
	mkdir := func(local net.Addr, name string, xid uint32) (net.Addr, wire.Status) {
		t.Helper()
		d := net.Dialer{LocalAddr: local, Timeout: time.Minute, Control: func(_, _ string, raw syscall.RawConn) error {
			return raw.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
		}}
		nc, err := d.Dial("tcp", addr.String())
		if local != nil && (errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL)) {
			return nil, wire.OK
		}
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		nc.(*net.TCPConn).SetLinger(0)
		limit := time.Minute
		if local != nil {
			limit = 3 * time.Second
		}
		nc.SetDeadline(time.Now().Add(limit))
		call := oncrpc.Call{XID: xid, Prog: oncrpc.ProgNFS, Vers: wire.Version, Proc: uint32(wire.ProcMkdir), Cred: cred}
		b := call.Append(make([]byte, oncrpc.RecordMarkSize))
		b = (&wire.MkdirArgs{Where: wire.DirOpArgs{Dir: rootFH, Name: name}}).Append(b)
		oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
		if _, err := nc.Write(b); err != nil {
			t.Fatal(err)
		}
		var mark [oncrpc.RecordMarkSize]byte
		_, err = io.ReadFull(nc, mark[:])
		if local != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, wire.OK
		}
		if err != nil {
			t.Fatal(err)
		}
		n, _ := oncrpc.ParseRecordMark(mark[:])
		b = make([]byte, n)
		if _, err := io.ReadFull(nc, b); err != nil {
			t.Fatal(err)
		}
		dec := xdr.NewDecoder(b)
		var reply oncrpc.Reply
		var res wire.CreateRes
		if err := errors.Join(reply.Decode(&dec), reply.Err(), res.Decode(&dec)); err != nil {
			t.Fatal(err)
		}
		return nc.LocalAddr(), res.Status
	}
	for xid := range uint32(10) {
		name := fmt.Sprint("d", xid)
		local, status := mkdir(nil, name, xid)
		if status != wire.OK {
			t.Fatal(status)
		}
		again, status := mkdir(local, name, xid)
		if again == nil {
			continue
		}
		if status != wire.OK {
			t.Errorf("again from the same port: %v", status)
		}
		if _, status := mkdir(nil, name, xid); status != wire.ErrExist {
			t.Errorf("again from another port: %v", status)
		}
		return
	}
	t.Error("no call could be repeated from its port")
}
