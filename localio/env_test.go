package localio

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/porttest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// env is a data server and how it is reached.
type env struct {
	t       testing.TB
	dir     string // of the data server
	sockets string
	addr    netip.AddrPort
	config  data.Config
	server  *data.Server
	admin   *nfs3.Target // the superuser's
	root    []byte
	files   atomic.Int32
}

const uid, gid = 1000, 2000

var superuser layout.Credential

func log(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// newEnv starts a data server in a directory of the given one, which may be empty.
func newEnv(t testing.TB, parent string, change func(*data.Config)) *env {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are opened by handle and given to other users")
	}
	if parent == "" {
		parent = t.TempDir()
	}
	e := &env{t: t, dir: filepath.Join(parent, "ds"), sockets: t.TempDir()}
	e.config = data.Config{Dir: e.dir, LocalDir: e.sockets, Log: log(t)}
	if change != nil {
		change(&e.config)
	}
	e.start(porttest.For(t))
	t.Cleanup(e.stop)
	e.admin = e.nfs("admin")
	root, err := nfs3.Mount(context.Background(), e.addr, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	e.root = root
	return e
}

func (e *env) start(addr string) {
	e.t.Helper()
	s, err := data.Open(e.config)
	if err != nil {
		e.t.Fatal(err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		e.t.Fatal(err)
	}
	e.addr = netip.MustParseAddrPort(l.Addr().String())
	go s.Serve(l) // ends at Shutdown
	e.server = s
}

func (e *env) stop() {
	if e.server == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	e.server.Shutdown(ctx)
	e.server = nil
}

// restart ends the server and starts another one at its address.
func (e *env) restart() {
	e.t.Helper()
	e.stop()
	e.start(e.addr.String())
}

func (e *env) nfs(name string) *nfs3.Target {
	e.t.Helper()
	t, err := nfs3.New(nfs3.Config{Name: name, Addrs: []netip.AddrPort{e.addr}, Connections: 2, Log: log(e.t)})
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { t.Close() })
	return t
}

// target returns a Target, and waits until it is settled how it reaches the server.
func (e *env) target(change func(*Config)) *Target {
	e.t.Helper()
	cfg := Config{Name: "ds", Addrs: []netip.AddrPort{e.addr}, Dir: e.sockets, Log: log(e.t)}
	if change != nil {
		change(&cfg)
	}
	t := New(cfg, e.nfs("ds"))
	e.t.Cleanup(func() { t.Close() })
	t.Status(context.Background())
	return t
}

// local returns a Target that must be local.
func (e *env) local() *Target {
	e.t.Helper()
	t := e.target(nil)
	if st := t.Status(context.Background()); !st.Local {
		e.t.Fatalf("not local: %s", st.Because)
	}
	return t
}

// newFile makes an empty data file of the given mode.
func (e *env) newFile(mode uint32) *layout.DataFile {
	e.t.Helper()
	set := wire.Sattr{SetMode: true, Mode: mode, SetUID: true, UID: uid, SetGID: true, GID: gid}
	fh, _, err := e.admin.Create(context.Background(), superuser, e.root, fmt.Sprint("file", e.files.Add(1)), wire.Unchecked, set, wire.CreateVerf{})
	if err != nil {
		e.t.Fatal(err)
	}
	return &layout.DataFile{Handles: [][]byte{fh}, Cred: layout.Credential{UID: uid, GID: gid}}
}

// path is where the file that was made last is.
func (e *env) path() string {
	return filepath.Join(e.dir, "export", fmt.Sprint("file", e.files.Load()))
}

func (e *env) fence(df *layout.DataFile, to layout.Credential) error {
	set := wire.Sattr{SetUID: true, UID: to.UID, SetGID: true, GID: to.GID}
	_, err := e.admin.SetAttr(context.Background(), superuser, df.Handles[0], set, nil)
	return err
}

// begin starts an op.
func begin(t *Target, op *layout.Op) chan struct{} {
	done := make(chan struct{})
	op.Done = func(*layout.Op) { close(done) }
	t.Start(op)
	t.Flush()
	return done
}

func do(t *Target, op layout.Op) *layout.Op {
	<-begin(t, &op)
	return &op
}

// ramDir is a directory in memory.
func ramDir(t testing.TB) string {
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("missing: a tmpfs at /dev/shm")
	}
	dir, err := os.MkdirTemp("/dev/shm", "weft-localio-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
