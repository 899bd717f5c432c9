package localio

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// foreign reaches a data server of ours as if that were somebody else's: its handles are those of the kernel between a head and
// some zeros, and without the MAC that ours have.
type foreign struct {
	*nfs3.Target
	e      *env
	epoch  atomic.Uint64             // more than that of Target
	handle atomic.Pointer[[]byte]    // by which the next file made in the directory is known instead; nil: by its own
	reads  atomic.Pointer[layout.Op] // what READ of such a file answers instead; nil: its contents
	looked atomic.Uint64             // LOOKUPs
	real   sync.Map                  // the server's handles by those that it seems to have
	squash atomic.Pointer[layout.Credential]
}

const padding = 2

// disguise returns the handle that the server seems to have for a file.
func (f *foreign) disguise(real []byte) []byte {
	const mac = 16
	fh := append(append([]byte("foreign"), real[:len(real)-mac]...), make([]byte, padding)...)
	f.real.Store(string(fh), real)
	return fh
}

func (f *foreign) Epoch() uint64 { return f.Target.Epoch() + f.epoch.Load() }

func (f *foreign) Start(op *layout.Op) {
	if op.File == nil || len(op.File.Handles) == 0 {
		f.Target.Start(op)
		return
	}
	file, done := op.File, op.Done
	df := *file
	if real, ok := f.real.Load(string(df.Handles[0])); ok {
		df.Handles = [][]byte{real.([]byte)}
	}
	if cred := f.squash.Load(); cred != nil {
		df.Cred = *cred
	}
	op.File = &df
	op.Done = func(op *layout.Op) {
		op.File, op.Done = file, done
		if as := f.reads.Load(); as != nil && op.Err == nil {
			op.N = copy(op.Data, as.Data)
		}
		done(op)
	}
	f.Target.Start(op)
}

// lookup is Export.Lookup.
func (f *foreign) lookup(ctx context.Context, name string) ([]byte, error) {
	f.looked.Add(1)
	fh, _, err := f.e.admin.Lookup(ctx, superuser, f.e.root, name)
	if err != nil {
		return nil, err
	}
	if other := f.handle.Load(); other != nil {
		return *other, nil
	}
	return f.disguise(fh), nil
}

// unknown is the address of a server that knows no program.
func unknown(t testing.TB) netip.AddrPort {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() { // ends with the listener
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			mark := make([]byte, oncrpc.RecordMarkSize)
			io.ReadFull(nc, mark)
			n, _ := oncrpc.ParseRecordMark(mark)
			b := make([]byte, n)
			io.ReadFull(nc, b)
			reply := oncrpc.Reply{XID: binary.BigEndian.Uint32(b), Stat: oncrpc.ProgUnavail}
			b = reply.Append(make([]byte, oncrpc.RecordMarkSize))
			oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
			nc.Write(b)
			nc.Close()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

// foreign returns a Target for the server as somebody else's, by a statement about dir, and what is below.
func (e *env) foreign(dir string, change func(*Config, *foreign)) (*Target, *foreign) {
	e.t.Helper()
	f := &foreign{Target: e.nfs("ds"), e: e}
	cfg := Config{
		Name: "ds", Addrs: []netip.AddrPort{unknown(e.t)}, Dir: e.sockets, Log: log(e.t),
		Export: &Export{Statement: "local-export=ds:/=" + dir, Dir: dir, Lookup: f.lookup},
	}
	if change != nil {
		change(&cfg, f)
	}
	l := New(cfg, f)
	e.t.Cleanup(func() { l.Close() })
	l.Status(context.Background())
	return l, f
}

func newForeignEnv(t testing.TB, parent string) (e *env, export string) {
	e = newEnv(t, parent, func(c *data.Config) { c.Local = data.LocalOff })
	return e, filepath.Join(e.dir, "export")
}

// newForeignFile is newFile as the foreign server names it.
func (f *foreign) newFile(mode uint32) *layout.DataFile {
	df := f.e.newFile(mode)
	df.Handles[0] = f.disguise(df.Handles[0])
	return df
}

// leftovers are files that were made to verify a statement.
func leftovers(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, probePrefix+"*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// The suite that all targets share, with reads from a directory and the rest by RPC.
func TestExportContract(t *testing.T) {
	for _, where := range []string{"disk", "memory", "threads"} {
		t.Run(where, func(t *testing.T) {
			targettest.Run(t, func(t *testing.T) targettest.Fixture {
				parent := ""
				if where == "memory" {
					parent = ramDir(t)
				}
				e, dir := newForeignEnv(t, parent)
				l, f := e.foreign(dir, nil)
				if where == "threads" {
					l.ringless.Store(true) // as where there is no io_uring
				}
				if st := l.Status(t.Context()); !st.Local || st.ReadOnly == "" {
					t.Fatalf("%+v", st)
				}
				return targettest.Fixture{Target: l, NewFile: func() *layout.DataFile { return f.newFile(0o640) }, BadFile: badFile}
			})
		})
	}
}

// Reads make no call, and see what was written by RPC before, also by others; what is made to verify the statement is removed.
func TestExportReads(t *testing.T) {
	for _, where := range []string{"disk", "memory"} {
		parent := ""
		if where == "memory" {
			parent = ramDir(t)
		}
		e, dir := newForeignEnv(t, parent)
		old, fresh := filepath.Join(dir, probePrefix+"old"), filepath.Join(dir, probePrefix+"fresh")
		for _, name := range []string{old, fresh} {
			if err := os.WriteFile(name, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chtimes(old, time.Time{}, time.Now().Add(-2*probeAge)); err != nil {
			t.Fatal(err)
		}
		l, f := e.foreign(dir, nil)
		if left := leftovers(t, dir); len(left) != 1 || left[0] != fresh {
			t.Errorf("left behind: %v", left)
		}
		df := f.newFile(0o640)
		reader := &layout.DataFile{Handles: df.Handles, Cred: layout.Credential{UID: 1<<31 - 1, GID: gid}}
		other := e.nfs("other")
		rnd := rand.New(rand.NewPCG(1, 2))
		want := make([]byte, 3<<20)
		var ops, writes uint64
		for range 100 {
			off, n := rnd.IntN(2<<20), 1+rnd.IntN(1<<20)
			for i := range want[off : off+n] {
				want[off+i] = byte(rnd.Uint32())
			}
			w := &layout.Op{Kind: layout.OpWrite, Off: int64(off), Data: want[off : off+n]}
			if rnd.IntN(2) == 0 {
				w.File = df
				w = do(l, *w)
				writes++
			} else {
				real, _ := f.real.Load(string(df.Handles[0]))
				w.File = &layout.DataFile{Handles: [][]byte{real.([]byte)}, Cred: df.Cred}
				done := make(chan struct{})
				w.Done = func(*layout.Op) { close(done) }
				other.Start(w)
				other.Flush()
				<-done
			}
			if w.Err != nil || w.N != n {
				t.Fatalf("WRITE: %d, %v", w.N, w.Err)
			}
			who := df
			if rnd.IntN(2) == 0 {
				who = reader
			}
			for _, size := range []int{n, min(n, 4096)} { // of several pages, and such as Quick does
				op := &layout.Op{Kind: layout.OpRead, File: who, Off: int64(off), Data: make([]byte, size)}
				if !l.Quick(op) {
					op = do(l, *op)
				}
				if op.Err != nil || op.N != size || !bytes.Equal(op.Data, want[off:off+size]) {
					t.Fatalf("%s: READ of %d bytes at %d: %d, %v", where, size, off, op.N, op.Err)
				}
				ops++
			}
		}
		if st := l.Status(t.Context()); st.OpsLocal != ops || st.OpsRPC != writes {
			t.Errorf("%s: %d of %d by descriptor, %d by RPC, of which %d are writes", where, st.OpsLocal, ops, st.OpsRPC, writes)
		}
	}
}

// A statement that is not true is refused, and the reason names it.
func TestExportWrong(t *testing.T) {
	e, dir := newForeignEnv(t, "")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	elsewhere, sub, memory := t.TempDir(), filepath.Join(dir, "sub"), ramDir(t)
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	readOnly := t.TempDir()
	if err := unix.Mount(dir, readOnly, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("missing: the right to mount: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(readOnly, unix.MNT_DETACH) })
	if err := unix.Mount("", readOnly, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, dir string
		change    func(*Config, *foreign)
		want      string
	}{
		{"another directory", elsewhere, nil, "a file that was made in " + elsewhere + " is not in the export"},
		{"a directory of the export", sub, nil, "is not in the export"},
		{"another file system", memory, nil, "is not in the export"},
		{"nothing", filepath.Join(elsewhere, "none"), nil, "no such file"},
		{"a file", file, nil, "not a directory"},
		{"mounted to be read", readOnly, nil, "read-only file system"},
		{"another server's file", dir, func(_ *Config, f *foreign) {
			f.handle.Store(new([]byte("another kernel's handle")))
		}, "handle, of 23 bytes"},
		{"a copy of the disk", dir, func(_ *Config, f *foreign) { f.reads.Store(&layout.Op{Data: make([]byte, nonceSize)}) }, "reads something else"},
		{"squash to the superuser", dir, func(_ *Config, f *foreign) { f.squash.Store(new(layout.Credential)) }, "everybody"},
		{"squash to nobody", dir, func(_ *Config, f *foreign) { f.squash.Store(&layout.Credential{UID: 65534, GID: 65534}) }, "squash"},
		{"no right to look", dir, func(c *Config, _ *foreign) {
			c.Export.Lookup = func(context.Context, string) ([]byte, error) { return nil, wire.ErrAcces }
		}, "does not let root"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, f := e.foreign(c.dir, c.change)
			st := l.Status(t.Context())
			if st.Local || !strings.HasPrefix(st.Because, "local-export=ds:/="+c.dir+": ") || !strings.Contains(st.Because, c.want) {
				t.Errorf("%+v", st)
			}
			f.squash.Store(nil)
			f.reads.Store(nil)
			df := f.newFile(0o640)
			if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("by RPC")}); op.Err != nil {
				t.Error(op.Err)
			}
			if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 6)}); op.Err != nil || string(op.Data) != "by RPC" {
				t.Errorf("%q, %v", op.Data, op.Err)
			}
			for _, d := range []string{dir, c.dir} {
				// The statement may be looked at once more in the background, for which there is a file for a moment.
				left := leftovers(t, d)
				for deadline := time.Now().Add(10 * time.Second); left != nil && time.Now().Before(deadline); left = leftovers(t, d) {
					time.Sleep(5 * time.Millisecond)
				}
				if left != nil {
					t.Errorf("left behind: %v", left)
				}
			}
		})
	}
}

// Without a statement, or with one about a server of ours, all goes by RPC, and the server's own reason is told.
func TestExportNone(t *testing.T) {
	e, dir := newForeignEnv(t, "")
	l, _ := e.foreign(dir, func(c *Config, _ *foreign) { c.Export = nil })
	if st := l.Status(t.Context()); st.Local || st.Because != errForeign.reason {
		t.Errorf("%+v", st)
	}
	l, f := e.foreign(dir, func(c *Config, _ *foreign) { c.Addrs = []netip.AddrPort{e.addr} })
	if st := l.Status(t.Context()); st.Local || !strings.Contains(st.Because, "--localio=off") || f.looked.Load() != 0 {
		t.Errorf("%+v", st)
	}
}

// Who may read is told by the data file's owner, group and mode.
func TestExportPermissions(t *testing.T) {
	e, dir := newForeignEnv(t, "")
	l, f := e.foreign(dir, nil)
	for _, mode := range []uint32{0o640, 0o600, 0o400, 0o440, 0o040, 0o204, 0o666, 0} {
		df := f.newFile(mode)
		for _, cred := range []layout.Credential{{UID: uid, GID: gid}, {UID: uid, GID: 1}, {UID: 1, GID: gid}, {UID: 1, GID: 1}, {UID: uid}, {GID: gid}, {}} {
			before := l.Status(t.Context()).OpsLocal
			do(l, layout.Op{Kind: layout.OpRead, File: &layout.DataFile{Handles: df.Handles, Cred: cred}, Data: make([]byte, 8)})
			local := l.Status(t.Context()).OpsLocal > before
			want := cred.UID != 0 && cred.GID != 0 && (cred.UID == uid && mode&0o400 != 0 || cred.UID != uid && cred.GID == gid && mode&0o040 != 0)
			if local != want {
				t.Errorf("mode %o, %+v: by descriptor %v, want %v", mode, cred, local, want)
			}
		}
	}
	// With an access control list the bits say something else.
	df := f.newFile(0o640)
	acl := []byte{2, 0, 0, 0}
	for _, entry := range [][3]uint32{{1, 6, 1<<32 - 1}, {2, 4, 7}, {4, 0, 1<<32 - 1}, {16, 4, 1<<32 - 1}, {32, 0, 1<<32 - 1}} {
		acl = binary.LittleEndian.AppendUint32(acl, entry[0]|entry[1]<<16)
		acl = binary.LittleEndian.AppendUint32(acl, entry[2])
	}
	if err := unix.Setxattr(e.path(), "system.posix_acl_access", acl, 0); err != nil {
		t.Skipf("missing: access control lists in %s: %v", dir, err)
	}
	before := l.Status(t.Context()).OpsLocal
	do(l, layout.Op{Kind: layout.OpRead, File: &layout.DataFile{Handles: df.Handles, Cred: layout.Credential{UID: 1, GID: gid}}, Data: make([]byte, 8)})
	if l.Status(t.Context()).OpsLocal != before {
		t.Error("read by descriptor in spite of an access control list")
	}
}

// Once the owner is another one nobody reads who had the file open, not even by what he had begun.
func TestExportFence(t *testing.T) {
	for _, where := range []string{"disk", "memory"} {
		parent := ""
		if where == "memory" {
			parent = ramDir(t)
		}
		e, dir := newForeignEnv(t, parent)
		l, f := e.foreign(dir, nil)
		df := f.newFile(0o640)
		real, _ := f.real.Load(string(df.Handles[0]))
		if err := os.WriteFile(e.path(), make([]byte, 4<<20), 0); err != nil {
			t.Fatal(err)
		}
		var fenced atomic.Bool
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				b := make([]byte, []int{100, 1 << 20}[i%2])
				for {
					late := fenced.Load()
					op := &layout.Op{Kind: layout.OpRead, File: df, Off: int64(i) * 4096, Data: b}
					if !l.Quick(op) {
						op = do(l, *op)
					}
					switch {
					case op.Err == nil && late:
						t.Errorf("%s: %d bytes after the fence", where, op.N)
						return
					case op.Err != nil && errnoOf(op.Err) != unix.EACCES:
						t.Errorf("a fenced READ: %v", op.Err)
						return
					case op.Err == nil && bytes.Contains(b[:op.N], []byte{1}):
						t.Errorf("%s: what was written after the fence is read", where)
						return
					case op.Err != nil:
						return
					}
				}
			})
		}
		waittest.Until(t, "reads", func() bool { return l.Status(t.Context()).OpsLocal > 100 })
		if err := e.fence(&layout.DataFile{Handles: [][]byte{real.([]byte)}}, layout.Credential{UID: 77, GID: 78}); err != nil {
			t.Fatal(err)
		}
		fenced.Store(true)
		if err := os.WriteFile(e.path(), bytes.Repeat([]byte{1}, 4<<20), 0); err != nil {
			t.Fatal(err)
		}
		all.Wait()
		after := &layout.DataFile{Handles: df.Handles, Cred: layout.Credential{UID: 77, GID: 78}}
		before := l.Status(t.Context()).OpsLocal
		if op := do(l, layout.Op{Kind: layout.OpRead, File: after, Data: make([]byte, 3)}); op.Err != nil || op.Data[2] != 1 || l.Status(t.Context()).OpsLocal == before {
			t.Errorf("the new owner reads %v, %v", op.Data, op.Err)
		}
	}
}

// What stands where the data file was, a symbolic link or another file, is not what its handle names; the server's answer counts. A
// removed file does not stay open.
func TestExportReplaced(t *testing.T) {
	e, dir := newForeignEnv(t, "")
	l, f := e.foreign(dir, nil)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o444); err != nil {
		t.Fatal(err)
	}
	for _, opened := range []bool{false, true} {
		for what, replace := range map[string]func(path string) error{
			"a link":       func(path string) error { return os.Symlink(secret, path) },
			"another file": func(path string) error { return os.Link(secret, path) },
			"nothing":      func(string) error { return nil },
		} {
			if what == "another file" {
				other := filepath.Join(dir, "secret")
				if err := os.WriteFile(other, []byte("secret"), 0o640); err != nil {
					t.Fatal(err)
				}
				if err := os.Chown(other, uid, gid); err != nil {
					t.Fatal(err)
				}
				replace = func(path string) error { return os.Rename(other, path) }
			}
			df := f.newFile(0o640)
			if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("public")}); op.Err != nil {
				t.Fatal(op.Err)
			}
			if opened {
				if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 6)}); op.Err != nil || string(op.Data) != "public" {
					t.Fatalf("%q, %v", op.Data, op.Err)
				}
			}
			if err := os.Remove(e.path()); err != nil {
				t.Fatal(err)
			}
			if err := replace(e.path()); err != nil {
				t.Fatal(err)
			}
			before := l.Status(t.Context()).OpsLocal
			op := &layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 6)}
			if !l.Quick(op) {
				op = do(l, *op)
			}
			if string(op.Data) == "secret" || l.Status(t.Context()).OpsLocal != before {
				t.Errorf("%s in its place: %q, %v", what, op.Data, op.Err)
			}
		}
	}
	df := f.newFile(0o640)
	if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 6)}); op.Err != nil {
		t.Fatal(op.Err)
	}
	if st := l.Status(t.Context()); st.Descriptors != 1 {
		t.Fatalf("%d descriptors", st.Descriptors)
	}
	if err := os.Remove(e.path()); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "that the removed file is closed", func() bool { return l.Status(t.Context()).Descriptors == 0 })
}

// A handle of another form, a directory, and what is no file go by RPC.
func TestExportHandles(t *testing.T) {
	e, dir := newForeignEnv(t, "")
	l, f := e.foreign(dir, nil)
	df := f.newFile(0o640)
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(dir, "pipe"), uid, gid); err != nil {
		t.Fatal(err)
	}
	pipe, _, err := unix.NameToHandleAt(unix.AT_FDCWD, filepath.Join(dir, "pipe"), 0)
	if err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	x := l.session.export
	l.mu.Unlock()
	good := df.Handles[0]
	for what, fh := range map[string][]byte{
		"a pipe":         append(append(append([]byte(nil), x.fixed...), pipe.Bytes()...), make([]byte, x.pad)...),
		"no padding":     good[:len(good)-padding],
		"more padding":   append(append([]byte(nil), good...), 0),
		"other padding":  append(append([]byte(nil), good[:len(good)-1]...), 1),
		"another head":   append([]byte("Foreign"), good[7:]...),
		"nothing":        {},
		"a head alone":   x.fixed,
		"another number": bytes.Replace(good, good[len(x.fixed):len(x.fixed)+x.size], bytes.Repeat([]byte{9}, x.size), 1),
	} {
		if fd, err := x.open(fh, df.Cred); err == nil {
			t.Errorf("%s: opened", what)
			unix.Close(fd)
		}
	}
	fd, err := x.open(good, df.Cred)
	if err != nil {
		t.Fatal(err)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY || flags&unix.O_NONBLOCK != 0 {
		t.Errorf("flags %o, %v", flags, err)
	}
	unix.Close(fd)
}

// A statement is verified again after some time.
func TestExportHourly(t *testing.T) {
	was := verifyTime
	t.Cleanup(func() { verifyTime = was })
	verifyTime = 0
	e, dir := newForeignEnv(t, "")
	l, f := e.foreign(dir, nil)
	looked := f.looked.Load()
	waittest.Until(t, "more looks than connections cause", func() bool { return f.looked.Load() > looked+4 })
	if st := l.Status(t.Context()); !st.Local {
		t.Errorf("%+v", st)
	}
	if err := os.Rename(dir, dir+".old"); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "that the directory is gone", func() bool { return !l.Near() })
}

// A statement is verified again after a reconnect. When it is no longer true its files are closed and reads go on by RPC, and when it is
// again, from the directory. Each change is logged once.
func TestExportAgain(t *testing.T) {
	e, dir := newForeignEnv(t, "")
	at := t.TempDir()
	bind := func() {
		t.Helper()
		if err := unix.Mount(dir, at, "", unix.MS_BIND, ""); err != nil {
			t.Skipf("missing: the right to mount: %v", err)
		}
	}
	bind()
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	var said lines
	l, f := e.foreign(at, func(c *Config, _ *foreign) { c.Log = slog.New(slog.NewTextHandler(&said, nil)) })
	df := f.newFile(0o640)
	if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("contents")}); op.Err != nil {
		t.Fatal(op.Err)
	}
	read := func() {
		t.Helper()
		if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 8)}); op.Err != nil || string(op.Data) != "contents" {
			t.Errorf("%q, %v", op.Data, op.Err)
		}
	}
	read()
	looked := f.looked.Load()
	f.epoch.Add(1)
	waittest.Until(t, "another look", func() bool { return f.looked.Load() > looked })
	if st := l.Status(t.Context()); !st.Local || st.Descriptors != 1 {
		t.Errorf("still true, but %+v", st)
	}
	for range 2 {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		f.epoch.Add(1)
		waittest.Until(t, "that it is no longer true", func() bool { return !l.Near() })
		if st := l.Status(t.Context()); !strings.Contains(st.Because, "is not in the export") || st.Descriptors != 0 {
			t.Errorf("%+v", st)
		}
		read()
		looked := f.looked.Load()
		waittest.Until(t, "more attempts", func() bool { return f.looked.Load() > looked+1 })
		bind()
		f.epoch.Add(1)
		waittest.Until(t, "that it is true again", l.Near)
		read()
	}
	if no, yes := said.count("is reached by RPC"), said.count("is on this host"); no != 2 || yes != 3 {
		t.Errorf("%d and %d lines in\n%s", no, yes, said.String())
	}
}

// lines is a log.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) count(what string) int { return strings.Count(l.String(), what) }
