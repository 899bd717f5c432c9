package data

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// localDir is the LocalDir of servers that do not share one with others: the host's own servers are not told of failures
// that tests make up.
var localDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "weft-")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	localDir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// testServer is a running server.
type testServer struct {
	*Server
	t    testing.TB
	dir  string
	addr string
	root wire.FileHandle
}

// start serves dir, or a new directory if it is empty, until the test ends or stop. change may change the server before.
func start(t testing.TB, dir string, change ...func(*Server)) *testServer {
	t.Helper()
	needRoot(t)
	if dir == "" {
		dir = newDir(t)
	}
	s, err := Open(Config{Dir: dir, IO: testIO, LocalDir: localDir, Log: testLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(s)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends at Shutdown
	ts := &testServer{Server: s, t: t, dir: dir, addr: l.Addr().String(), root: s.rootFH}
	t.Cleanup(func() {
		ts.stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return ts
}

// stop shuts the server down. It may be called again.
func (ts *testServer) stop() {
	ts.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := ts.Shutdown(ctx); err != nil {
		ts.t.Errorf("Shutdown: %v", err)
	}
}

// limitFiles bounds the cache.
func limitFiles(n int) func(*Server) { return func(s *Server) { s.cache.max = n } }

// openFiles is how many files the cache holds.
func (ts *testServer) openFiles() int {
	ts.cache.mu.Lock()
	defer ts.cache.mu.Unlock()
	if len(ts.cache.files) != ts.cache.recent.Len() {
		ts.t.Errorf("%d files in the cache, %d in its list", len(ts.cache.files), ts.cache.recent.Len())
	}
	return len(ts.cache.files)
}

func (ts *testServer) isOpen(fh wire.FileHandle) bool {
	ts.cache.mu.Lock()
	defer ts.cache.mu.Unlock()
	return ts.cache.files[fh] != nil
}

// refs is how many requests use f.
func (ts *testServer) refs(f *file) int {
	ts.cache.mu.Lock()
	defer ts.cache.mu.Unlock()
	return f.refs
}

// export is the path of a file of the export on the server's side.
func (ts *testServer) export(elem ...string) string {
	return filepath.Join(append([]string{ts.dir, "export"}, elem...)...)
}

func needRoot(t testing.TB) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are opened by handle and given to other users")
	}
}

func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// newDir is a new directory, in testDir if there is one.
func newDir(t testing.TB) string {
	if testDir == "" {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(testDir, "")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// ramDir is a directory in memory, unless there is a testDir.
func ramDir(t testing.TB) string {
	if testDir != "" {
		return newDir(t)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("needs a tmpfs at /dev/shm")
	}
	dir, err := os.MkdirTemp("/dev/shm", "weft-data-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// client is one connection. Any number of calls may be outstanding; replies are matched by xid.
type client struct {
	t  testing.TB
	nc net.Conn

	mu      sync.Mutex // also orders the calls on the wire
	xid     uint32
	waiting map[uint32]chan []byte
	err     error
}

func (ts *testServer) dial() *client {
	ts.t.Helper()
	nc, err := net.Dial("tcp", ts.addr)
	if err != nil {
		ts.t.Fatal(err)
	}
	return newClient(ts.t, nc)
}

// dialFrom is dial from an address of this host.
func (ts *testServer) dialFrom(ip string) *client {
	ts.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	nc, err := d.Dial("tcp", ts.addr)
	if err != nil {
		ts.t.Fatal(err)
	}
	return newClient(ts.t, nc)
}

func newClient(t testing.TB, nc net.Conn) *client {
	c := &client{t: t, nc: nc, waiting: map[uint32]chan []byte{}}
	done := make(chan struct{})
	go func() { c.receive(); close(done) }() // ends with the connection
	t.Cleanup(func() { nc.Close(); <-done })
	return c
}

func (c *client) receive() {
	in := bufio.NewReader(c.nc)
	var err error
	for {
		var reply []byte
		if reply, err = readRecord(in); err != nil {
			break
		}
		d := xdr.NewDecoder(reply)
		xid := d.Uint32()
		c.mu.Lock()
		w := c.waiting[xid]
		delete(c.waiting, xid)
		c.mu.Unlock()
		if w == nil {
			err = fmt.Errorf("reply with unknown xid %d", xid)
			c.t.Error(err)
			break
		}
		w <- reply
	}
	c.nc.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	for _, w := range c.waiting {
		close(w)
	}
	clear(c.waiting)
}

func readRecord(in io.Reader) ([]byte, error) {
	var mark [4]byte
	if _, err := io.ReadFull(in, mark[:]); err != nil {
		return nil, err
	}
	n, last := oncrpc.ParseRecordMark(mark[:])
	if !last {
		return nil, errors.New("reply in fragments")
	}
	b := make([]byte, n)
	_, err := io.ReadFull(in, b)
	return b, err
}

// as is a credential.
func as(uid, gid uint32, groups ...uint32) oncrpc.Auth {
	a := oncrpc.AuthSys{Machine: "test", UID: uid, GID: gid, GIDs: groups}
	auth, err := a.Auth()
	if err != nil {
		panic(err)
	}
	return auth
}

var super = as(0, 0)

// send sends a call and returns where its reply, the record without the mark, will come; closed if the connection ends.
func (c *client) send(call oncrpc.Call, args []byte) chan []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := make(chan []byte, 1)
	if c.err != nil {
		close(w)
		return w
	}
	c.xid++
	call.XID = c.xid
	b := call.Append(make([]byte, 4, 4+oncrpc.CallMax+len(args)))
	b = append(b, args...)
	oncrpc.PutRecordMark(b, len(b)-4, true)
	c.waiting[call.XID] = w
	c.nc.Write(b) // if it fails the reader sees it too
	return w
}

var errLost = errors.New("connection lost")

// finish waits for a reply and decodes its header; payloads lie behind what res takes.
func finish(w chan []byte, res interface{ Decode(*xdr.Decoder) error }) (rest []byte, err error) {
	b, ok := <-w
	if !ok {
		return nil, errLost
	}
	d := xdr.NewDecoder(b)
	var reply oncrpc.Reply
	if err := reply.Decode(&d); err != nil {
		return nil, err
	}
	if err := reply.Err(); err != nil {
		return nil, err
	}
	if res != nil {
		if err := res.Decode(&d); err != nil {
			return nil, err
		}
	}
	return d.Rest(), nil
}

func nfsCall(proc wire.Proc, cred oncrpc.Auth) oncrpc.Call {
	return oncrpc.Call{Prog: oncrpc.ProgNFS, Vers: wire.Version, Proc: uint32(proc), Cred: cred}
}

type appender interface{ Append([]byte) []byte }

// do makes a call of the NFS program; whatever goes wrong below the procedure's own status ends the test.
func (c *client) do(proc wire.Proc, cred oncrpc.Auth, args appender, res interface{ Decode(*xdr.Decoder) error }) {
	c.t.Helper()
	rest, err := finish(c.send(nfsCall(proc, cred), args.Append(nil)), res)
	if err != nil {
		c.t.Fatalf("%v: %v", proc, err)
	}
	if len(rest) != 0 {
		c.t.Fatalf("%v: %d bytes behind the results", proc, len(rest))
	}
}

// readHead is a READ's results with their payload.
type readHead struct {
	wire.ReadRes
	data []byte
}

func (r *readHead) Decode(d *xdr.Decoder) error {
	if err := r.DecodeHead(d, 0); err != nil {
		return err
	}
	r.data = d.FixedOpaque(int(r.Count))
	return d.Err()
}

func (c *client) read(cred oncrpc.Auth, fh wire.FileHandle, off uint64, n uint32) readHead {
	c.t.Helper()
	var res readHead
	c.do(wire.ProcRead, cred, &wire.ReadArgs{FH: fh, Offset: off, Count: n}, &res)
	return res
}

// writeCall is a WRITE's arguments with their payload.
type writeCall struct {
	wire.WriteArgs
	data []byte
}

func (w *writeCall) Append(b []byte) []byte {
	w.Count = uint32(len(w.data))
	return xdr.AppendFixedOpaque(w.AppendHead(b), w.data)
}

func (c *client) write(cred oncrpc.Auth, fh wire.FileHandle, off uint64, data []byte, stable wire.Stable) wire.WriteRes {
	c.t.Helper()
	var res wire.WriteRes
	c.do(wire.ProcWrite, cred, &writeCall{wire.WriteArgs{FH: fh, Offset: off, Stable: stable}, data}, &res)
	return res
}

// put writes all of data.
func (c *client) put(fh wire.FileHandle, off uint64, data []byte) {
	c.t.Helper()
	if res := c.write(super, fh, off, data, wire.Unstable); res.Status != wire.OK || int(res.Count) != len(data) {
		c.t.Fatalf("write of %d bytes at %d: %v, %d bytes", len(data), off, res.Status, res.Count)
	}
}

// check compares the bytes at off with want.
func (c *client) check(fh wire.FileHandle, off uint64, want []byte) {
	c.t.Helper()
	for len(want) > 0 {
		res := c.read(super, fh, off, uint32(len(want)))
		if res.Status != wire.OK || len(res.data) == 0 {
			c.t.Fatalf("read of %d bytes at %d: %v, %d bytes", len(want), off, res.Status, len(res.data))
		}
		if !bytes.Equal(res.data, want[:len(res.data)]) {
			c.t.Fatalf("read of %d bytes at %d: other contents", len(res.data), off)
		}
		want, off = want[len(res.data):], off+uint64(len(res.data))
	}
}

func (c *client) commit(cred oncrpc.Auth, fh wire.FileHandle) wire.CommitRes {
	c.t.Helper()
	var res wire.CommitRes
	c.do(wire.ProcCommit, cred, &wire.CommitArgs{FH: fh}, &res)
	return res
}

func (c *client) getattr(fh wire.FileHandle) wire.GetattrRes {
	c.t.Helper()
	var res wire.GetattrRes
	c.do(wire.ProcGetattr, super, &fh, &res)
	return res
}

func (c *client) setattr(cred oncrpc.Auth, fh wire.FileHandle, attr wire.Sattr) wire.WccRes {
	c.t.Helper()
	var res wire.WccRes
	c.do(wire.ProcSetattr, cred, &wire.SetattrArgs{FH: fh, Attr: attr}, &res)
	return res
}

func (c *client) lookup(cred oncrpc.Auth, dir wire.FileHandle, name string) wire.LookupRes {
	c.t.Helper()
	var res wire.LookupRes
	c.do(wire.ProcLookup, cred, &wire.DirOpArgs{Dir: dir, Name: name}, &res)
	return res
}

func (c *client) createAs(cred oncrpc.Auth, dir wire.FileHandle, name string, mode wire.CreateMode, attr wire.Sattr, verf wire.CreateVerf) wire.CreateRes {
	c.t.Helper()
	var res wire.CreateRes
	c.do(wire.ProcCreate, cred, &wire.CreateArgs{Where: wire.DirOpArgs{Dir: dir, Name: name}, Mode: mode, Attr: attr, Verf: verf}, &res)
	return res
}

// create makes a data file of uid and gid.
func (c *client) create(dir wire.FileHandle, name string, uid, gid uint32) wire.FileHandle {
	c.t.Helper()
	res := c.createAs(super, dir, name, wire.Guarded, owned(uid, gid), wire.CreateVerf{})
	if res.Status != wire.OK || !res.FH.Present {
		c.t.Fatalf("create %s: %v", name, res.Status)
	}
	return res.FH.FH
}

// owned is the attributes of a data file.
func owned(uid, gid uint32) wire.Sattr {
	return wire.Sattr{SetMode: true, Mode: 0o640, SetUID: true, UID: uid, SetGID: true, GID: gid}
}

func (c *client) mkdir(cred oncrpc.Auth, dir wire.FileHandle, name string, attr wire.Sattr) wire.CreateRes {
	c.t.Helper()
	var res wire.CreateRes
	c.do(wire.ProcMkdir, cred, &wire.MkdirArgs{Where: wire.DirOpArgs{Dir: dir, Name: name}, Attr: attr}, &res)
	return res
}

func (c *client) remove(cred oncrpc.Auth, dir wire.FileHandle, name string) wire.Status {
	c.t.Helper()
	var res wire.WccRes
	c.do(wire.ProcRemove, cred, &wire.DirOpArgs{Dir: dir, Name: name}, &res)
	return res.Status
}

func (c *client) rmdir(cred oncrpc.Auth, dir wire.FileHandle, name string) wire.Status {
	c.t.Helper()
	var res wire.WccRes
	c.do(wire.ProcRmdir, cred, &wire.DirOpArgs{Dir: dir, Name: name}, &res)
	return res.Status
}

func (c *client) rename(cred oncrpc.Auth, from wire.FileHandle, old string, to wire.FileHandle, name string) wire.Status {
	c.t.Helper()
	var res wire.RenameRes
	c.do(wire.ProcRename, cred, &wire.RenameArgs{From: wire.DirOpArgs{Dir: from, Name: old}, To: wire.DirOpArgs{Dir: to, Name: name}}, &res)
	return res.Status
}
