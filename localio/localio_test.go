package localio

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
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

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/fileio"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"
)

var (
	_ dataplane.Target  = (*Target)(nil)
	_ dataplane.Epocher = (*Target)(nil)
	_ dataplane.Sparser = (*Target)(nil)
	_ Remote            = (*nfs3.Target)(nil)
)

var badFile = &layout.DataFile{Handles: [][]byte{bytes.Repeat([]byte{7}, 40)}, Cred: layout.Credential{UID: uid, GID: gid}}

// The suite that all targets share: on a disk and in memory, with large requests past the page cache and through it, also for
// reading only.
func TestContract(t *testing.T) {
	for _, c := range []struct {
		where string
		mode  data.IO
		how   string
	}{
		{"disk", data.IOAuto, "ring"}, {"disk", data.IODirect, "ring"}, {"disk", data.IOBuffered, "ring"}, {"memory", data.IOAuto, ""},
		{"disk", data.IODirect, "threads"}, {"disk", data.IOAuto, "readonly"},
		{"disk", data.IODirect, "leave"}, {"disk", data.IOBuffered, "leave"},
	} {
		t.Run(fmt.Sprint(c.where, "-", c.mode, "-", c.how), func(t *testing.T) {
			targettest.Run(t, func(t *testing.T) targettest.Fixture {
				dir := ""
				if c.where == "memory" {
					dir = ramDir(t)
				}
				e := newEnv(t, dir, func(d *data.Config) { d.IO = c.mode })
				target := e.target(func(l *Config) { l.ReadOnly = c.how == "readonly" })
				if c.how == "threads" {
					target.ringless.Store(true) // as where there is no io_uring
				}
				fixture := targettest.Fixture{Target: target, NewFile: func() *layout.DataFile { return e.newFile(0o640) }, BadFile: badFile}
				if c.how == "leave" {
					fixture.Target = leaving{target}
				}
				return fixture
			})
		})
	}
}

// leaving is a Target all of whose requests may be left.
type leaving struct{ *Target }

func (l leaving) Start(op *layout.Op) {
	op.Leave = true
	l.Target.Start(op)
}

// cut ends sessions until the test does.
func cut(t *testing.T, target *Target) {
	stop := make(chan struct{})
	var cutting sync.WaitGroup
	cutting.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			target.mu.Lock()
			if s := target.session; s != nil {
				s.nc.Close()
			}
			target.mu.Unlock()
		}
	})
	t.Cleanup(func() { close(stop); cutting.Wait() })
}

// What can be done by descriptors makes no call.
func TestNoCalls(t *testing.T) {
	for _, where := range []string{"disk", "memory"} {
		dir := ""
		if where == "memory" {
			dir = ramDir(t)
		}
		e := newEnv(t, dir, nil)
		l := e.local()
		df := e.newFile(0o640)
		want := make([]byte, 1<<20)
		rand.NewChaCha8([32]byte{1}).Read(want)
		w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: want})
		c := do(l, layout.Op{Kind: layout.OpCommit, File: df})
		if w.Err != nil || c.Err != nil || w.Verifier != c.Verifier || w.Committed != layout.Unstable {
			t.Fatalf("WRITE %v, %v; COMMIT %v; verifiers %x and %x", w.Err, w.Committed, c.Err, w.Verifier, c.Verifier)
		}
		for _, n := range []int{1, 4096, 200 << 10, 1 << 20} {
			r := do(l, layout.Op{Kind: layout.OpRead, File: df, Off: int64(len(want) - n), Data: make([]byte, n)})
			if r.Err != nil || r.N != n || !bytes.Equal(r.Data, want[len(want)-n:]) {
				t.Errorf("READ of %d bytes: %d, %v", n, r.N, r.Err)
			}
		}
		r := do(l, layout.Op{Kind: layout.OpRead, File: df, Off: int64(len(want)), Data: make([]byte, 10)})
		if r.Err != nil || r.N != 0 || !r.EOF {
			t.Errorf("READ behind the end: %d, %v, %v", r.N, r.EOF, r.Err)
		}
		for _, stable := range []layout.Stability{layout.DataSync, layout.FileSync} {
			w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: want[:100], Stable: stable})
			if w.Err != nil || w.Committed != stable || w.N != 100 {
				t.Errorf("%v WRITE: %d, %v, %v", stable, w.N, w.Committed, w.Err)
			}
		}
		st := l.Status(context.Background())
		rpc := l.Remote.(*nfs3.Target).Stats()
		if st.OpsLocal != 9 || st.OpsRPC != 0 || rpc.Reads+rpc.Writes+rpc.Commits+rpc.Calls != 0 || st.Descriptors != 1 {
			t.Errorf("%s: %d by descriptor, %d by RPC, %+v", where, st.OpsLocal, st.OpsRPC, rpc)
		}
	}
}

// Why a server is not local stands in the status.
func TestWhyNot(t *testing.T) {
	off := newEnv(t, "", func(c *data.Config) { c.Local = data.LocalOff })
	if st := off.target(nil).Status(context.Background()); st.Local || !strings.Contains(st.Because, "--localio=off") {
		t.Errorf("a server without a broker: %+v", st)
	}
	on := newEnv(t, "", nil)
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "none")} {
		st := on.target(func(c *Config) { c.Dir = dir }).Status(context.Background())
		if st.Local || !strings.Contains(st.Because, "another host") || !strings.Contains(st.Because, dir) {
			t.Errorf("a directory without the socket: %+v", st)
		}
	}
	open := t.TempDir()
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if st := on.target(func(c *Config) { c.Dir = open }).Status(context.Background()); st.Local || !strings.Contains(st.Because, "root alone") {
		t.Errorf("a directory that everybody may write to: %+v", st)
	}
	ro := newEnv(t, "", func(c *data.Config) { c.Local = data.LocalRO })
	if st := ro.target(nil).Status(context.Background()); !st.Local || !strings.Contains(st.ReadOnly, "--localio=ro") {
		t.Errorf("a broker for reading only: %+v", st)
	}
	// A server without the program: its listener is somebody else's.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			nc.Close()
		}
	}()
	on.addr = netip.MustParseAddrPort(l.Addr().String())
	if st := on.target(nil).Status(context.Background()); st.Local || !strings.Contains(st.Because, "cannot be asked") {
		t.Errorf("a server that hangs up: %+v", st)
	}
}

// Who may read or write by RPC has descriptors for it, and nobody else; the superuser, who may do all, has none.
func TestPermissions(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	r := e.nfs("plain")
	for _, mode := range []uint32{0o640, 0o600, 0o400, 0o440, 0o200, 0o220, 0o666, 0o060, 0} {
		df := e.newFile(mode)
		path := e.path()
		for _, cred := range []layout.Credential{{UID: uid, GID: gid}, {UID: uid, GID: 1}, {UID: 1, GID: gid}, {UID: 1, GID: 1}, {}} {
			for _, kind := range []layout.OpKind{layout.OpRead, layout.OpWrite} {
				who := &layout.DataFile{Handles: df.Handles, Cred: cred}
				before := l.Status(context.Background()).OpsLocal
				by := layout.Op{Kind: kind, File: who, Data: make([]byte, 4096)}
				done := make(chan struct{})
				by.Done = func(*layout.Op) { close(done) }
				r.Start(&by)
				r.Flush()
				<-done
				got := do(l, layout.Op{Kind: kind, File: who, Data: make([]byte, 4096)})
				if (got.Err == nil) != (by.Err == nil) || errnoOf(got.Err) != errnoOf(by.Err) {
					t.Errorf("mode %o, %+v, %v: %v, by RPC %v", mode, cred, kind, got.Err, by.Err)
				}
				byDescriptor := l.Status(context.Background()).OpsLocal > before
				want := by.Err == nil && cred.UID != 0
				if kind == layout.OpWrite && cred.UID == uid && mode&0o400 == 0 || kind == layout.OpWrite && cred.UID != uid && cred.GID == gid && mode&0o040 == 0 {
					want = false // descriptors for writing can be read, too
				}
				if byDescriptor != want {
					t.Errorf("mode %o, %+v, %v: by descriptor %v, want %v", mode, cred, kind, byDescriptor, want)
				}
			}
		}
		l.mu.Lock()
		for k, f := range l.session.files {
			if f.state != open {
				continue
			}
			flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
			if err != nil || flags&unix.O_ACCMODE == unix.O_RDONLY == k.write || flags&(unix.O_APPEND|unix.O_TRUNC|unix.O_CREAT) != 0 {
				t.Errorf("%s for %+v: flags %o, %v", path, k, flags, err)
			}
		}
		l.mu.Unlock()
	}
}

func errnoOf(err error) any {
	var e interface{ Errno() unix.Errno }
	if errors.As(err, &e) {
		return e.Errno()
	}
	return nil
}

// A fence under many writers: nothing of theirs reaches the file once it is answered, what they were told was written is there,
// and those with the new owner go on without RPC.
func TestFence(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, where := range []string{"disk", "memory"} {
		dir := ""
		if where == "memory" {
			dir = ramDir(t)
		}
		e := newEnv(t, dir, nil)
		l := e.local()
		df := e.newFile(0o640)
		const writers, block = 64, 32 << 10
		for round := range 5 {
			var failed atomic.Int32
			var last [writers]atomic.Int32
			stop := make(chan struct{})
			var all sync.WaitGroup
			for i := range writers {
				all.Go(func() {
					for n := int32(1); ; n++ {
						b := bytes.Repeat([]byte{byte(n)}, block)
						op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Off: int64(i * block), Data: b})
						if op.Err != nil {
							failed.Add(1)
							if e := errnoOf(op.Err); e != unix.EACCES {
								t.Errorf("a fenced WRITE: %v", op.Err)
							}
							return
						}
						last[i].Store(n)
						select {
						case <-stop:
							t.Error("a fence that does nothing")
							return
						default:
						}
					}
				})
			}
			time.Sleep(time.Duration(seed>>round%20) * time.Millisecond)
			next := layout.Credential{UID: df.Cred.UID + 1, GID: gid}
			if err := e.fence(df, next); err != nil {
				t.Fatal(err)
			}
			at, err := os.ReadFile(e.path())
			if err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(10*time.Second, func() { close(stop) })
			all.Wait()
			after, err := os.ReadFile(e.path())
			if err != nil || !bytes.Equal(at, after) {
				t.Fatalf("%s: the file changes after the fence: %v", where, err)
			}
			if failed.Load() != writers {
				t.Errorf("%d of %d writers were fenced", failed.Load(), writers)
			}
			for i := range writers {
				if n := last[i].Load(); n > 0 && at[i*block] != byte(n) {
					t.Errorf("writer %d was told of %d, the file has %d", i, byte(n), at[i*block])
				}
			}
			df = &layout.DataFile{Handles: df.Handles, Cred: next}
			before := l.Status(context.Background()).OpsLocal
			if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: make([]byte, block)}); op.Err != nil {
				t.Error(op.Err)
			}
			if l.Status(context.Background()).OpsLocal == before {
				t.Error("the new owner writes by RPC")
			}
		}
	}
}

// A file that a process goes on writing to is not fenced, whether the server knows of it or not, until that process has closed it.
func TestFenceWaits(t *testing.T) {
	e := newEnv(t, "", nil)
	for _, restart := range []bool{false, true} {
		l := e.local()
		df := e.newFile(0o640)
		if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("x")}); op.Err != nil {
			t.Fatal(op.Err)
		}
		// As a client would that does not close what is revoked.
		l.mu.Lock()
		var kept int
		for _, f := range l.session.files {
			kept, _ = unix.Dup(f.fd)
		}
		l.mu.Unlock()
		if restart {
			e.restart()
		}
		fenced := make(chan error, 1)
		go func() { fenced <- e.fence(df, layout.Credential{UID: 77, GID: 78}) }()
		select {
		case err := <-fenced:
			t.Fatalf("restart %v: fenced while a process could write: %v", restart, err)
		case <-time.After(1500 * time.Millisecond):
		}
		if _, err := unix.Pwrite(kept, []byte("y"), 0); err != nil {
			t.Fatal(err)
		}
		unix.Close(kept)
		if err := <-fenced; err != nil {
			t.Error(err)
		}
		l.Close()
	}
}

// A hole at the end of a file that is being written: nothing of what is written behind it gets lost.
func TestPunchUnderWrites(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	df := e.newFile(0o640)
	for i := range int64(50) {
		size := 1000 * (i + 1)
		if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Off: size - 1, Data: []byte{1}}); op.Err != nil {
			t.Fatal(op.Err)
		}
		op := layout.Op{Kind: layout.OpWrite, File: df, Off: size, Data: bytes.Repeat([]byte{2}, 700)}
		done := begin(l, &op)
		if err := l.Deallocate(context.Background(), df, layout.Column{}, 0, size); err != nil {
			t.Fatal(err)
		}
		<-done
		r := do(l, layout.Op{Kind: layout.OpRead, File: df, Off: size - 1, Data: make([]byte, 701)})
		if op.Err != nil || r.Err != nil || r.Data[0] != 0 || !bytes.Equal(r.Data[1:], op.Data) {
			t.Fatalf("after %d bytes: %v, %v: %x", size, op.Err, r.Err, r.Data)
		}
	}
}

// After an fdatasync that failed here no verifier is what it was, by descriptor or by RPC, until another one fails.
func TestFailedSync(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	df, other := e.newFile(0o640), e.newFile(0o640)
	defer func() { fdatasync = unix.Fdatasync }()
	first := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("x")})
	apart := do(l, layout.Op{Kind: layout.OpWrite, File: other, Data: []byte("x")})
	fdatasync = func(int) error { return unix.EIO }
	failed := do(l, layout.Op{Kind: layout.OpCommit, File: df}) // which RPC does then
	fdatasync = unix.Fdatasync
	if failed.Err != nil || failed.Verifier == first.Verifier {
		t.Fatalf("COMMIT: %v, verifier %x", failed.Err, failed.Verifier)
	}
	for _, local := range []bool{true, false} {
		l.live.Store(local)
		w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("y")})
		c := do(l, layout.Op{Kind: layout.OpCommit, File: df})
		if w.Err != nil || c.Err != nil || w.Verifier != failed.Verifier || c.Verifier != failed.Verifier {
			t.Errorf("afterwards, local %v: %x and %x, %v, %v; want %x", local, w.Verifier, c.Verifier, w.Err, c.Err, failed.Verifier)
		}
		if c := do(l, layout.Op{Kind: layout.OpCommit, File: other}); c.Verifier != apart.Verifier {
			t.Errorf("local %v: another file has verifier %x, had %x", local, c.Verifier, apart.Verifier)
		}
	}
}

// By whichever way something is written and committed, as long as the server is the same one the verifier is; also
// if the descriptor was revoked meanwhile.
func TestOneVerifier(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	df := e.newFile(0o640)
	want := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("x")}).Verifier
	for i := range 8 {
		l.live.Store(i&1 == 0)
		w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("x")})
		if i&2 == 0 {
			df = &layout.DataFile{Handles: df.Handles, Cred: layout.Credential{UID: df.Cred.UID + 1, GID: gid}}
			if err := e.fence(df, df.Cred); err != nil {
				t.Fatal(err)
			}
		}
		l.live.Store(i&4 == 0)
		c := do(l, layout.Op{Kind: layout.OpCommit, File: df})
		if w.Verifier != want || c.Verifier != want || w.Err != nil || c.Err != nil {
			t.Errorf("round %d: WRITE %x, %v; COMMIT %x, %v; want %x", i, w.Verifier, w.Err, c.Verifier, c.Err, want)
		}
	}
}

// A server that ends or is replaced: requests go on by RPC, and without it again once it is back. What was not
// committed has another verifier if the server cannot vouch for it.
func TestRestart(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	df := e.newFile(0o640)
	for i := range 4 {
		w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte{byte(i)}})
		e.stop()
		loses := i%2 == 1
		if loses {
			if err := os.Remove(filepath.Join(e.dir, "verifier")); err != nil {
				t.Fatal(err)
			}
		}
		e.start(e.addr.String())
		c := do(l, layout.Op{Kind: layout.OpCommit, File: df})
		r := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 1)})
		if w.Err != nil || c.Err != nil || r.Err != nil || r.Data[0] != byte(i) {
			t.Fatalf("WRITE %v, COMMIT %v, READ %v: %x", w.Err, c.Err, r.Err, r.Data)
		}
		if (w.Verifier != c.Verifier) != loses {
			t.Errorf("verifiers %x and %x of two servers; it was lost in between: %v", w.Verifier, c.Verifier, loses)
		}
		waittest.Until(t, "local again", func() bool { return l.Status(context.Background()).Local })
	}
}

// What has lost its name is closed at once, so that its space is free.
func TestRemoved(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	df := e.newFile(0o640)
	if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: make([]byte, 4096)}); op.Err != nil {
		t.Fatal(op.Err)
	}
	if err := e.admin.Remove(context.Background(), superuser, e.root, filepath.Base(e.path())); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "no descriptors", func() bool { return l.Status(context.Background()).Descriptors == 0 })
	if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 1)}); errnoOf(op.Err) != unix.ESTALE {
		t.Errorf("READ of a removed file: %v", op.Err)
	}
}

// Descriptors are bounded; those with data that is not stable stay.
func TestManyFiles(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.target(func(c *Config) { c.Files = 4 })
	var dirty []*layout.DataFile
	var verifiers []layout.Verifier
	write := func(i byte, stable bool) {
		df := e.newFile(0o640)
		w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte{i}})
		if w.Err != nil {
			t.Fatal(w.Err)
		}
		if !stable {
			dirty, verifiers = append(dirty, df), append(verifiers, w.Verifier)
			return
		}
		if c := do(l, layout.Op{Kind: layout.OpCommit, File: df}); c.Err != nil || c.Verifier != w.Verifier {
			t.Fatal(c.Err)
		}
	}
	for i := range byte(40) {
		write(i, i%10 != 0)
	}
	// One that is answered may still be in use when the next one is opened.
	waittest.Until(t, "few descriptors", func() bool {
		write(40, true)
		return l.Status(context.Background()).Descriptors <= 4+1
	})
	for i, df := range dirty {
		if c := do(l, layout.Op{Kind: layout.OpCommit, File: df}); c.Err != nil || c.Verifier != verifiers[i] {
			t.Errorf("COMMIT of %d: %v, verifier %x, want %x", i, c.Err, c.Verifier, verifiers[i])
		}
	}
}

// Descriptors that nobody uses are closed after a while, but not what was written and not synced.
func TestIdle(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.target(func(c *Config) { c.Idle = 10 * time.Millisecond })
	df := e.newFile(0o640)
	if w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("abc")}); w.Err != nil {
		t.Fatal(w.Err)
	}
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if n := l.Status(t.Context()).Descriptors; n != 1 {
			t.Fatalf("%d descriptors while there is something to be synced", n)
		}
	}
	if c := do(l, layout.Op{Kind: layout.OpCommit, File: df}); c.Err != nil {
		t.Fatal(c.Err)
	}
	waittest.Until(t, "no descriptors", func() bool { return l.Status(t.Context()).Descriptors == 0 })
	buf := make([]byte, 3)
	if r := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: buf}); r.Err != nil || string(buf) != "abc" {
		t.Errorf("read %q, %v", buf, r.Err)
	}
}

var wantSwitches = flag.Int64("switches", 2000, "how often TestSwitches changes the way at least")

// Each request by another way than the one before, on a plane with load from several sides: what is read is what was written.
func TestSwitches(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, where := range []string{"disk", "memory"} {
		t.Run(where, func(t *testing.T) {
			dir := ""
			if where == "memory" {
				dir = ramDir(t)
			}
			switches(t, seed, newEnv(t, dir, nil))
		})
	}
}

func switches(t *testing.T, seed uint64, e *env) {
	l := e.local()
	cut(t, l)
	p, err := dataplane.New(dataplane.Config{Dial: func(layout.DeviceID) (dataplane.Target, error) { return l, nil }, RetainBytes: 32 << 20, Log: log(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	df := *e.newFile(0o640)
	seg := &layout.Segment{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW, Mirrors: []layout.Mirror{{Servers: []layout.DataFile{df}}}}
	f := p.NewFile()
	var switches atomic.Int64
	stop := make(chan struct{})
	var toggling sync.WaitGroup
	toggling.Go(func() {
		rnd := rand.New(rand.NewPCG(seed, 99))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rnd.IntN(200)) * time.Microsecond):
			}
			l.live.Store(!l.live.Load())
			switches.Add(1)
		}
	})
	const workers, region = 4, 1 << 20
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(w)))
			want := make([]byte, region)
			base := int64(w * region)
			for step := 0; step < 400 || switches.Load() < *wantSwitches; step++ {
				off := rnd.IntN(region)
				n := 1 + rnd.IntN(min(region-off, 1<<(4+rnd.IntN(17))))
				done := make(chan error, 1)
				end := func(_ int, err error) { done <- err }
				if rnd.IntN(2) == 0 {
					for i := range n {
						want[off+i] = byte(rnd.Uint32())
					}
					f.StartWrite(&dataplane.Write{Segment: seg, Data: want[off : off+n], Off: base + int64(off), Done: func(err error) { end(0, err) }})
				} else {
					got := make([]byte, n)
					f.StartRead(&dataplane.Read{Segment: seg, Buf: got, Off: base + int64(off), Done: func(n int, err error) {
						if err == nil && !bytes.Equal(got, want[off:off+n]) {
							err = fmt.Errorf("other bytes than were written at %d", base+int64(off))
						}
						end(n, err)
					}})
				}
				p.Flush()
				if err := <-done; err != nil {
					t.Errorf("worker %d, step %d: %v", w, step, err)
					return
				}
				if step%50 == 49 {
					if err := f.Commit(context.Background()); err != nil {
						t.Errorf("worker %d: %v", w, err)
					}
				}
			}
		})
	}
	all.Wait()
	close(stop)
	toggling.Wait()
	if err := f.Commit(context.Background()); err != nil || p.Retained() != 0 {
		t.Errorf("Commit: %v; %d bytes retained", err, p.Retained())
	}
	st := l.Status(context.Background())
	t.Logf("%d switches, %d requests by descriptor, %d by RPC", switches.Load(), st.OpsLocal, st.OpsRPC)
	if st.OpsLocal == 0 || st.OpsRPC == 0 {
		t.Error("one of the ways was not taken")
	}
}

// The kernel tells a descriptor of a failure once: of two syncs at a time both must hear of it.
func TestTwoSyncs(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	df := e.newFile(0o640)
	do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("x")})
	write := writeFile
	defer func() { writeFile, fdatasync = write, unix.Fdatasync }()
	var writes, n atomic.Int32
	written, both := make(chan struct{}), make(chan struct{})
	writeFile = func(k *fileio.Kind, f fileio.File, b []byte, off int64) (int, error) {
		n, err := write(k, f, b, off)
		if writes.Add(1) == 2 {
			close(written)
		}
		return n, err
	}
	fdatasync = func(fd int) error {
		switch n.Add(1) {
		case 1: // consumes the error
			<-written
			select {
			case <-both:
			case <-time.After(200 * time.Millisecond):
			}
			return unix.EIO
		case 2: // the other, for which nothing is left
			select {
			case <-both:
			default:
				close(both)
			}
			return nil
		}
		return unix.Fdatasync(fd)
	}
	a := &layout.Op{Kind: layout.OpWrite, File: df, Data: []byte("a"), Stable: layout.DataSync}
	b := &layout.Op{Kind: layout.OpWrite, File: df, Off: 4096, Data: []byte("b"), Stable: layout.DataSync}
	da, db := begin(l, a), begin(l, b)
	<-da
	<-db
	if n := l.Status(context.Background()).OpsRPC; n != 2 {
		t.Errorf("%d of 2 writes went by RPC after a sync that failed", n)
	}
}

// Without descriptors there is no ring, and nothing else happens.
func TestNoRing(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	few := old
	few.Cur = uint64(fd)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	r, err := newRing(nil, nil)
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); e != nil {
		t.Fatal(e)
	}
	if err == nil {
		r.close()
		t.Error("a ring without a descriptor")
	}
}

// slowRemote takes its time in Start.
type slowRemote struct {
	Remote
	in, out      chan struct{}
	started      atomic.Bool
	flushedAfter atomic.Bool
}

func (r *slowRemote) Start(op *layout.Op) { r.in <- struct{}{}; <-r.out; r.started.Store(true) }
func (r *slowRemote) Flush() {
	if r.started.Load() {
		r.flushedAfter.Store(true)
	}
}
func (r *slowRemote) Limits() (int, int) { return 1 << 20, 1 << 20 }
func (r *slowRemote) Epoch() uint64      { return 0 }
func (r *slowRemote) Close() error       { return nil }

// A Flush of somebody else, in the middle of a Start by RPC, does not take away the one that follows.
func TestFlushOfAnother(t *testing.T) {
	r := &slowRemote{in: make(chan struct{}), out: make(chan struct{})}
	l := New(Config{Name: "x", Addrs: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}}, r)
	defer l.Close()
	l.Status(context.Background())
	done := make(chan int)
	go func() {
		l.Start(&layout.Op{Kind: layout.OpRead, File: &layout.DataFile{}, Data: make([]byte, 1), Done: func(*layout.Op) {}})
		l.Flush()
		close(done)
	}()
	<-r.in
	l.Flush() // somebody else's
	r.out <- struct{}{}
	<-done
	if !r.flushedAfter.Load() {
		t.Error("started and flushed, but the remote was not flushed since")
	}
}

// Detach from within a Done, of what the ring has not begun, or not reaped.
func TestDetachInDone(t *testing.T) {
	e := newEnv(t, "", func(d *data.Config) { d.IO = data.IOBuffered })
	l := e.local()
	df := e.newFile(0o640)
	if w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: make([]byte, 1<<20)}); w.Err != nil {
		t.Fatal(w.Err)
	}
	ok := make(chan struct{})
	go func() {
		defer close(ok)
		for range 200 {
			var wg sync.WaitGroup
			wg.Add(2)
			a := &layout.Op{Kind: layout.OpWrite, File: df, Off: 0, Data: make([]byte, 512<<10)}
			b := &layout.Op{Kind: layout.OpWrite, File: df, Off: 512 << 10, Data: make([]byte, 512<<10)}
			a.Done = func(*layout.Op) { l.Detach(b); wg.Done() }
			b.Done = func(*layout.Op) { wg.Done() }
			l.Start(a)
			l.Start(b)
			l.Flush()
			wg.Wait()
		}
	}()
	select {
	case <-ok:
	case <-time.After(10 * time.Second):
		panic("a Done waits for the goroutine that it runs on") // which t.Fatal would, too, as Close does
	}
}
