package data

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/rpctls/tlstest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/localio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// patience is how long what must happen may take.
const patience = 10 * time.Second

// localServer is a running server with sockets of its own.
type localServer struct {
	*testServer
	sockets string
}

// startLocal serves dir with its socket in sockets; both are made if they are empty.
func startLocal(t testing.TB, dir, sockets string, change ...func(*Config)) *localServer {
	t.Helper()
	needRoot(t)
	if dir == "" {
		dir = newDir(t)
	}
	if sockets == "" {
		sockets = socketDir(t)
	}
	cfg := Config{Dir: dir, IO: testIO, LocalDir: sockets, Log: testLog(t)}
	for _, f := range change {
		f(&cfg)
	}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends at Shutdown
	ts := &localServer{&testServer{Server: s, t: t, dir: dir, addr: l.Addr().String(), root: s.rootFH}, sockets}
	t.Cleanup(func() {
		ts.stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return ts
}

// socketDir is a directory with a path short enough for sockets in it.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "weft-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (ts *localServer) socket() *net.UnixAddr {
	return &net.UnixAddr{Name: localio.Socket(ts.sockets, ts.id), Net: "unixpacket"}
}

// counts is how much the broker knows of.
func (ts *localServer) counts() (sessions, lent, probes int) {
	b := ts.broker
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.sessions), len(b.lent), len(b.probes)
}

// wantNothing waits until the broker knows of nothing any more.
func (ts *localServer) wantNothing() {
	ts.t.Helper()
	waittest.Until(ts.t, "the broker forgets", func() bool {
		sessions, lent, probes := ts.counts()
		return sessions == 0 && lent == 0 && probes == 0
	})
}

// wantNotLent waits until CLOSED has come for all that was lent.
func (ts *localServer) wantNotLent() {
	ts.t.Helper()
	waittest.Until(ts.t, "all is given back", func() bool { _, lent, _ := ts.counts(); return lent == 0 })
}

// evict drives a file out of the server's cache.
func (ts *localServer) evict(c *client, fh wire.FileHandle) {
	ts.t.Helper()
	ts.cache.mu.Lock()
	ts.cache.max = 1
	ts.cache.mu.Unlock()
	n := time.Now().UnixNano()
	waittest.Until(ts.t, "the file leaves the cache", func() bool {
		n++
		c.getattr(c.create(ts.root, fmt.Sprint("evict", n), 1, 1))
		return !ts.isOpen(fh)
	})
}

// local makes a call of the program of package localio, without a credential.
func (c *client) local(proc localio.Proc, args appender, res interface{ Decode(*xdr.Decoder) error }) {
	c.t.Helper()
	var b []byte
	if args != nil {
		b = args.Append(nil)
	}
	_, err := finish(c.send(oncrpc.Call{Prog: localio.Program, Vers: localio.Version, Proc: uint32(proc)}, b), res)
	if err != nil {
		c.t.Fatalf("localio procedure %d: %v", proc, err)
	}
}

func (c *client) identity() (id localio.Identity) {
	c.t.Helper()
	c.local(localio.ProcIdentity, nil, &id)
	return id
}

// show sends the proof for a challenge.
func (c *client) show(ch *localio.Challenge, nonce localio.Nonce, channel []byte) {
	c.t.Helper()
	c.local(localio.ProcProbe, &localio.ProbeArgs{
		Server: ch.Server, Instance: ch.Instance,
		Proof: localio.MakeProof(ch.Nonce, nonce, ch.Server, ch.Instance, channel),
	}, nil)
}

func newNonce() (n localio.Nonce) {
	rand.Read(n[:])
	return n
}

// peer is a client's connection to the broker.
type peer struct {
	t     testing.TB
	nc    *net.UnixConn
	id    uint32     // of the last OPEN
	files []*os.File // that came, so that no finalizer closes them
}

func (ts *localServer) knock() *peer {
	ts.t.Helper()
	nc, err := net.DialUnix("unixpacket", nil, ts.socket())
	if err != nil {
		ts.t.Fatal(err)
	}
	p := &peer{t: ts.t, nc: nc}
	ts.t.Cleanup(func() {
		nc.Close()
		for _, f := range p.files {
			f.Close()
		}
	})
	return p
}

// hello knocks and is challenged.
func (ts *localServer) hello() (*peer, *localio.Challenge) {
	ts.t.Helper()
	p := ts.knock()
	p.say(&localio.Hello{Version: localio.Version, Server: ts.id})
	return p, hear[*localio.Challenge](p)
}

// meet does the handshake with proof by c.
func (ts *localServer) meet(c *client) *peer {
	ts.t.Helper()
	p, ch := ts.hello()
	nonce := newNonce()
	c.show(ch, nonce, nil)
	p.say(&localio.Reveal{Nonce: nonce})
	hear[*localio.Granted](p)
	return p
}

func (p *peer) say(m localio.Message) {
	p.t.Helper()
	if _, err := p.nc.Write(localio.Append(nil, m)); err != nil {
		p.t.Fatalf("%T: %v", m, err)
	}
}

// receive returns the next message and what comes with it.
func (p *peer) receive() (localio.Message, []*os.File, error) {
	p.nc.SetReadDeadline(time.Now().Add(patience))
	b, oob := make([]byte, localio.MaxMessage), make([]byte, unix.CmsgSpace(8*4))
	n, oobn, _, _, err := p.nc.ReadMsgUnix(b, oob)
	if n == 0 && err == nil {
		err = io.EOF
	}
	if err != nil {
		return nil, nil, err
	}
	m, err := localio.Decode(b[:n])
	if err != nil || oobn == 0 {
		return m, nil, err
	}
	scms, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return nil, nil, err
	}
	var files []*os.File
	for i := range scms {
		fds, err := unix.ParseUnixRights(&scms[i])
		if err != nil {
			return nil, nil, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "lent"))
		}
	}
	p.files = append(p.files, files...)
	return m, files, nil
}

// hear is the next message, which is an M.
func hear[M localio.Message](p *peer) M {
	p.t.Helper()
	m, _, err := p.receive()
	got, ok := m.(M)
	if !ok {
		p.t.Fatalf("heard %T %+v, %v; want %T", m, m, err, got)
	}
	return got
}

// wantEnd checks that nothing more comes.
func (p *peer) wantEnd() {
	p.t.Helper()
	m, _, err := p.receive()
	if m != nil || !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		p.t.Fatalf("heard %T %+v, %v; want the end", m, m, err)
	}
}

// wantRefused checks that a reason with the word and the end come.
func (p *peer) wantRefused(word string) {
	p.t.Helper()
	if reason := hear[*localio.Refused](p).Reason; !strings.Contains(reason, word) {
		p.t.Errorf("refused: %q, want a word of %q", reason, word)
	}
	p.wantEnd()
}

// loaned is the answer to an OPEN.
type loaned struct {
	id    uint32
	verf  wire.WriteVerf
	files []*os.File
}

func (l *loaned) close() {
	for _, f := range l.files {
		f.Close()
	}
}

// open asks for descriptors; nothing else may come before the answer.
func (p *peer) open(fh wire.FileHandle, uid, gid uint32, write bool) (wire.Status, *loaned) {
	p.t.Helper()
	p.id++
	p.say(&localio.Open{ID: p.id, File: fh, UID: uid, GID: gid, Write: write})
	m, files, err := p.receive()
	o, ok := m.(*localio.Opened)
	if !ok || o.ID != p.id {
		p.t.Fatalf("OPEN %d is answered by %T %+v, %v", p.id, m, m, err)
	}
	if (o.Status == wire.OK) != (len(files) > 0) {
		p.t.Fatalf("OPENED with %v and %d descriptors", o.Status, len(files))
	}
	return o.Status, &loaned{p.id, o.Verifier, files}
}

func (p *peer) mustOpen(fh wire.FileHandle, uid, gid uint32, write bool) *loaned {
	p.t.Helper()
	status, l := p.open(fh, uid, gid, write)
	if status != wire.OK {
		p.t.Fatalf("OPEN: %v", status)
	}
	return l
}

// giveBack closes what was lent and says so.
func (p *peer) giveBack(l *loaned) {
	p.t.Helper()
	l.close()
	p.say(&localio.Closed{ID: l.id})
}

// fence gives a file to uid.
func (c *client) fence(fh wire.FileHandle, uid uint32) wire.Status {
	c.t.Helper()
	return c.setattr(super, fh, wire.Sattr{SetUID: true, UID: uid}).Status
}

// fencing begins what fence does.
func (c *client) fencing(fh wire.FileHandle, uid uint32) chan []byte {
	return c.send(nfsCall(wire.ProcSetattr, super), (&wire.SetattrArgs{FH: fh, Attr: wire.Sattr{SetUID: true, UID: uid}}).Append(nil))
}

func (c *client) wantFenced(w chan []byte) {
	c.t.Helper()
	var res wire.WccRes
	if _, err := finish(w, &res); err != nil || res.Status != wire.OK {
		c.t.Errorf("SETATTR: %v, %v", res.Status, err)
	}
}

// The handshake as it should be; what is granted says what direct transfers work with the descriptors that come then.
func TestLocalHandshake(t *testing.T) {
	for _, tt := range []struct {
		name string
		dir  func(testing.TB) string
		mode IO
	}{{"disk", newDir, IOAuto}, {"disk direct", newDir, IODirect}, {"disk buffered", newDir, IOBuffered}, {"memory", ramDir, IOAuto}} {
		t.Run(tt.name, func(t *testing.T) {
			needRoot(t)
			dir := tt.dir(t)
			if tt.mode == IODirect && !hasDirect(t, dir) {
				t.Skip("missing: O_DIRECT")
			}
			ts := startLocal(t, dir, "", func(c *Config) { c.IO = tt.mode })
			c := ts.dial()
			id := c.identity()
			if id.Server != ts.id || id.Server == (localio.ID{}) || !id.Local || id.Reason != "" {
				t.Fatalf("identity %+v", id)
			}
			p, ch := ts.hello()
			if ch.Server != ts.id || ch.Instance == (localio.ID{}) || ch.Nonce == (localio.Nonce{}) {
				t.Fatalf("challenge %+v", ch)
			}
			nonce := newNonce()
			c.show(ch, nonce, nil)
			p.say(&localio.Reveal{Nonce: nonce})
			g := hear[*localio.Granted](p)
			var fs unix.Statfs_t
			if err := unix.Statfs(dir, &fs); err != nil {
				t.Fatal(err)
			}
			equal(t, "memory", g.Memory, fs.Type == unix.TMPFS_MAGIC)
			equal(t, "read-only because", g.ReadOnly, "")
			direct := tt.mode == IODirect || tt.mode == IOAuto && !g.Memory && hasDirect(t, dir)
			if (g.Align > 0) != direct || tt.mode == IODirect && g.Least != g.Align {
				t.Fatalf("granted %+v, direct transfers: %v", g, direct)
			}
			l := p.mustOpen(c.create(ts.root, "f", 7, 8), 7, 8, true)
			if (len(l.files) == 2) != direct {
				t.Fatalf("%d descriptors", len(l.files))
			}
			if direct {
				b := iobuf.Aligned(int(g.Least))
				rand.Read(b)
				if _, err := l.files[1].WriteAt(b, g.Align); err != nil {
					t.Error(err)
				}
				if got, err := os.ReadFile(ts.export("f")); err != nil || !bytes.Equal(got[g.Align:], b) {
					t.Errorf("written directly, %d bytes, %v: contents differ", len(got), err)
				}
			}
		})
	}
}

// Two starts have one identity and different instances; the key cannot be had from the identity.
func TestLocalIdentity(t *testing.T) {
	ts := startLocal(t, "", "")
	_, first := ts.hello()
	key, err := os.ReadFile(filepath.Join(ts.dir, "key"))
	if err != nil || bytes.Contains(key, ts.id[:8]) {
		t.Errorf("the identity is of the key, %v", err)
	}
	ts.stop()
	if _, err := os.Lstat(ts.socket().Name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket of a server that has ended: %v", err)
	}
	ts = startLocal(t, ts.dir, ts.sockets)
	_, second := ts.hello()
	if first.Server != second.Server || first.Instance == second.Instance || first.Nonce == second.Nonce {
		t.Errorf("%+v, and after a restart %+v", first, second)
	}
}

// What is no handshake ends the connection, with a reason if the client can do something about it.
func TestLocalRefused(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	other := ts.id
	other[15]++
	p := ts.knock()
	p.say(&localio.Hello{Version: localio.Version, Server: other})
	p.wantRefused("another data server")
	p = ts.knock()
	p.say(&localio.Hello{Version: localio.Version + 1, Server: ts.id})
	p.wantRefused("version")

	hello := &localio.Hello{Version: localio.Version, Server: ts.id}
	for _, m := range []localio.Message{
		&localio.Challenge{}, &localio.Reveal{}, &localio.Granted{}, &localio.Refused{}, &localio.Open{}, &localio.Opened{},
		&localio.Revoke{}, &localio.Closed{},
	} {
		p := ts.knock()
		p.say(m)
		p.wantEnd()
		if _, ok := m.(*localio.Reveal); !ok {
			p, _ = ts.hello()
			p.say(m)
			p.wantEnd()
		}
	}
	p, _ = ts.hello()
	p.say(hello)
	p.wantEnd()
	for _, m := range []localio.Message{hello, &localio.Challenge{}, &localio.Granted{}, &localio.Refused{}, &localio.Opened{}, &localio.Revoke{}} {
		p := ts.meet(c)
		p.say(m)
		p.wantEnd()
	}
	ts.wantNothing()
}

// A process of another user is refused, whatever the modes of directory and socket are by now.
func TestLocalOtherUser(t *testing.T) {
	ts := startLocal(t, "", "")
	if err := errors.Join(os.Chmod(ts.sockets, 0o711), os.Chmod(ts.socket().Name, 0o777)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, localio.MaxMessage)
	done := make(chan error)
	go func() { // ends with what it read, and its thread with it
		runtime.LockOSThread()
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); e != 0 {
			done <- e
			return
		}
		nc, err := net.DialUnix("unixpacket", nil, ts.socket())
		if err == nil {
			defer nc.Close()
			nc.SetReadDeadline(time.Now().Add(patience))
			var n int
			n, err = nc.Read(b)
			b = b[:n]
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	m, err := localio.Decode(b)
	if r, ok := m.(*localio.Refused); !ok || !strings.Contains(r.Reason, "65534") {
		t.Errorf("heard %T %+v, %v", m, m, err)
	}
}

// A proof counts once, for one challenge, for one instance, and not for long.
func TestLocalReplay(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	nonce := newNonce()
	granted, old := ts.hello()
	c.show(old, nonce, nil)
	granted.say(&localio.Reveal{Nonce: nonce})
	hear[*localio.Granted](granted)

	for name, show := range map[string]func(*localio.Challenge){
		"no PROBE":                     func(*localio.Challenge) {},
		"the PROBE of another session": func(*localio.Challenge) { c.show(old, nonce, nil) },
		"another nonce":                func(ch *localio.Challenge) { c.show(ch, newNonce(), nil) },
		"another instance": func(ch *localio.Challenge) {
			other := *ch
			other.Instance[0]++
			c.show(&other, nonce, nil)
		},
		"another instance, proof of this one": func(ch *localio.Challenge) {
			c.local(localio.ProcProbe, &localio.ProbeArgs{Server: ch.Server, Proof: localio.MakeProof(ch.Nonce, nonce, ch.Server, ch.Instance, nil)}, nil)
		},
		"another server, proof of this one": func(ch *localio.Challenge) {
			c.local(localio.ProcProbe, &localio.ProbeArgs{Instance: ch.Instance, Proof: localio.MakeProof(ch.Nonce, nonce, ch.Server, ch.Instance, nil)}, nil)
		},
		"a channel where there is none": func(ch *localio.Challenge) { c.show(ch, nonce, make([]byte, localio.ExporterSize)) },
		"too old": func(ch *localio.Challenge) {
			c.show(ch, nonce, nil)
			ts.broker.mu.Lock()
			defer ts.broker.mu.Unlock()
			for i := range ts.broker.probes {
				ts.broker.probes[i].at = ts.broker.probes[i].at.Add(-probeTime)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, ch := ts.hello()
			show(ch)
			p.say(&localio.Reveal{Nonce: nonce})
			p.wantRefused("no proof")
		})
	}
	granted.say(&localio.Reveal{Nonce: nonce})
	granted.wantEnd()
	// One who has tried in vain has used up the challenge.
	p, ch := ts.hello()
	p.say(&localio.Reveal{Nonce: newNonce()})
	p.wantRefused("no proof")
	c.show(ch, nonce, nil)
	p, _ = ts.hello()
	p.say(&localio.Reveal{Nonce: nonce})
	p.wantRefused("no proof")
}

// PROBEs that nobody asks for take no more than so much memory, and the last ones count.
func TestLocalManyProbes(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	p, ch := ts.hello()
	for range 2 * maxProbes {
		c.show(ch, newNonce(), nil)
	}
	nonce := newNonce()
	c.show(ch, nonce, nil)
	if _, _, n := ts.counts(); n > maxProbes {
		t.Errorf("%d probes", n)
	}
	p.say(&localio.Reveal{Nonce: nonce})
	hear[*localio.Granted](p)
}

// Where the address leads to another server of the host, its socket is no proof.
func TestLocalOtherServer(t *testing.T) {
	here := startLocal(t, "", "")
	there := startLocal(t, "", here.sockets)
	if here.id == there.id {
		t.Fatal("two servers have one identity")
	}
	c := there.dial()
	p, ch := here.hello()
	nonce := newNonce()
	c.show(ch, nonce, nil)
	p.say(&localio.Reveal{Nonce: nonce})
	p.wantRefused("no proof")
	there.meet(c)
	here.meet(here.dial())
}

// What was granted ends with the RPC connection that carried the proof, and that alone; nothing is left of either.
func TestLocalConnectionEnds(t *testing.T) {
	ts := startLocal(t, "", "")
	c, other := ts.dial(), ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	p, kept := ts.meet(c), ts.meet(other)
	p.mustOpen(fh, 7, 8, true)
	late, ch := ts.hello()
	nonce := newNonce()
	c.show(ch, nonce, nil)
	c.nc.Close()
	p.wantEnd()
	waittest.Until(t, "the probe is forgotten", func() bool { _, _, n := ts.counts(); return n == 0 })
	late.say(&localio.Reveal{Nonce: nonce})
	late.wantRefused("no proof")
	waittest.Until(t, "one session is left", func() bool { n, lent, _ := ts.counts(); return n == 1 && lent == 0 })

	l := kept.mustOpen(fh, 7, 8, false)
	kept.nc.Close()
	l.close()
	ts.wantNothing()
	ts.meet(other)
}

// A server that ends does not wait for clients.
func TestLocalShutdown(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	p := ts.meet(c)
	p.mustOpen(c.create(ts.root, "f", 7, 8), 7, 8, true)
	idle := ts.knock()
	waittest.Until(t, "two sessions", func() bool { n, _, _ := ts.counts(); return n == 2 })
	ts.stop()
	p.wantEnd()
	idle.wantEnd()
	ts.wantNothing()
}

// Descriptors are open for what was asked and nothing besides; what cannot be opened gets the status that it gets by RPC.
func TestLocalOpen(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	dir := c.mkdir(super, ts.root, "d", owned(7, 8)).FH.FH
	stale := gone(c, ts.root)
	bad, err := wire.NewFileHandle(append(bytes.Clone(fh.Bytes()[:len(fh.Bytes())-1]), fh.Bytes()[len(fh.Bytes())-1]^1))
	if err != nil {
		t.Fatal(err)
	}
	c.put(fh, 0, []byte("contents"))
	p := ts.meet(c)
	for write, want := range map[bool]int{false: unix.O_RDONLY, true: unix.O_RDWR} {
		for i, f := range p.mustOpen(fh, 7, 8, write).files {
			flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
			if err != nil {
				t.Fatal(err)
			}
			if flags&unix.O_ACCMODE != want || flags&(unix.O_APPEND|unix.O_CREAT|unix.O_TRUNC|unix.O_EXCL|unix.O_PATH|unix.O_SYNC) != 0 ||
				(flags&unix.O_DIRECT != 0) != (i == 1) {
				t.Errorf("descriptor %d for writing %v: flags %#x", i, write, flags)
			}
		}
		for _, tt := range []struct {
			name string
			fh   wire.FileHandle
			uid  uint32
			want wire.Status
		}{
			{"by the superuser", fh, 0, wire.ErrAcces},
			{"of a directory", dir, 7, wire.ErrIsDir},
			{"of the root", ts.root, 7, wire.ErrIsDir},
			{"of a made-up handle", bad, 7, wire.ErrBadHandle},
			{"of no handle", wire.FileHandle{}, 7, wire.ErrBadHandle},
			{"of a removed file", stale, 7, wire.ErrStale},
		} {
			status, _ := p.open(tt.fh, tt.uid, 8, write)
			equal(t, fmt.Sprintf("OPEN %s, for writing %v", tt.name, write), status, tt.want)
		}
	}
	c.check(fh, 0, []byte("contents"))
	equal(t, "size", c.getattr(fh).Attr.Size, 8)
	if n := len(p.files); n < 2 || n > 4 {
		t.Errorf("%d descriptors came", n)
	}
}

// A server that lends for reading alone says so, and why.
func TestLocalReadOnly(t *testing.T) {
	ts := startLocal(t, "", "", func(c *Config) { c.Local = LocalRO })
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	p, ch := ts.hello()
	nonce := newNonce()
	c.show(ch, nonce, nil)
	p.say(&localio.Reveal{Nonce: nonce})
	if g := hear[*localio.Granted](p); g.ReadOnly == "" {
		t.Error("no reason")
	}
	status, _ := p.open(fh, 7, 8, true)
	equal(t, "OPEN for writing", status, wire.ErrNotSupp)
	p.mustOpen(fh, 7, 8, false)
}

// A server without a broker has no socket and says why; a PROBE is answered all the same.
func TestLocalOff(t *testing.T) {
	ts := startLocal(t, "", "", func(c *Config) { c.Local = LocalOff })
	c := ts.dial()
	if id := c.identity(); id.Server != ts.id || id.Local || !strings.Contains(id.Reason, "--localio=off") {
		t.Errorf("identity %+v", id)
	}
	c.local(localio.ProcProbe, &localio.ProbeArgs{Server: ts.id}, nil)
	if _, err := os.Lstat(ts.socket().Name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket: %v", err)
	}
}

// The program's other calls are answered as those of any.
func TestLocalCalls(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	call := func(vers, proc uint32, args []byte) error {
		_, err := finish(c.send(oncrpc.Call{Prog: localio.Program, Vers: vers, Proc: proc}, args), nil)
		return err
	}
	if err := call(localio.Version, uint32(localio.ProcNull), nil); err != nil {
		t.Error(err)
	}
	wantStat(t, "version 2", call(2, 1, nil), oncrpc.ProgMismatch)
	wantStat(t, "procedure 3", call(localio.Version, 3, nil), oncrpc.ProcUnavail)
	args := (&localio.ProbeArgs{Server: ts.id, Instance: ts.instance}).Append(nil)
	wantStat(t, "a short PROBE", call(localio.Version, uint32(localio.ProcProbe), args[:len(args)-4]), oncrpc.GarbageArgs)
}

// OPEN grants what READ and WRITE do to the same identity, but for writing only to one who may also read.
func TestLocalRights(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	p := ts.meet(c)
	granted := 0
	for _, mode := range []uint32{0o640, 0o600, 0o400, 0o444, 0o222, 0, 0o060, 0o606, 0o666, 0o240} {
		attr := owned(7, 8)
		attr.Mode = mode
		fh := c.createAs(super, ts.root, fmt.Sprintf("f%o", mode), wire.Guarded, attr, wire.CreateVerf{}).FH.FH
		for _, id := range []struct{ uid, gid uint32 }{{7, 8}, {7, 1}, {1, 8}, {1, 1}, {8, 7}} {
			read := c.read(as(id.uid, id.gid), fh, 0, 1).Status
			write := c.write(as(id.uid, id.gid), fh, 0, []byte("x"), wire.Unstable).Status
			if write == wire.OK && read != wire.OK {
				write = wire.ErrAcces
			}
			for w, want := range map[bool]wire.Status{false: read, true: write} {
				status, l := p.open(fh, id.uid, id.gid, w)
				equal(t, fmt.Sprintf("mode %o, uid %d, gid %d, for writing %v", mode, id.uid, id.gid, w), status, want)
				if status == wire.OK {
					granted++
				}
				p.giveBack(l)
			}
		}
	}
	if granted == 0 {
		t.Error("nothing was granted")
	}
}

// A file that belongs to the superuser and that others may write is fenced like any, or they get no descriptors.
func TestLocalSuperusersFile(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	attr := owned(0, 8)
	attr.Mode = 0o666
	fh := c.createAs(super, ts.root, "f", wire.Guarded, attr, wire.CreateVerf{}).FH.FH
	p := ts.meet(c)
	if status, l := p.open(fh, 7, 8, true); status == wire.OK {
		if status := c.fence(fh, 9); status != wire.ErrJukebox {
			_, err := l.files[0].WriteAt([]byte("x"), 0)
			t.Errorf("SETATTR: %v, and a write then: %v", status, err)
		}
	}
}

// Whoever can still write holds a fence up, whatever becomes of its session and whatever it says; nothing is changed then.
func TestLocalFence(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	c.put(fh, 0, []byte("contents"))
	before := c.getattr(fh).Attr
	wantHeld := func(what string) {
		t.Helper()
		res := c.setattr(super, fh, wire.Sattr{SetUID: true, UID: 9, SetMode: true, Mode: 0o600, SetSize: true})
		equal(t, what, res.Status, wire.ErrJukebox)
		equal(t, "attributes", c.getattr(fh).Attr, before)
	}
	p := ts.meet(c)
	l := p.mustOpen(fh, 7, 8, true)
	wantHeld("SETATTR while a client ignores REVOKE")
	wantHeld("SETATTR again")
	if _, err := l.files[0].WriteAt([]byte("c"), 0); err != nil {
		t.Error(err)
	}
	before = c.getattr(fh).Attr
	l.close()
	equal(t, "SETATTR once it is closed", c.fence(fh, 9), wire.OK)
	equal(t, "owner", c.getattr(fh).Attr.UID, 9)
	status, _ := p.openAfterRevoke(fh, 7, 8, true)
	equal(t, "OPEN by who is fenced", status, wire.ErrAcces)

	// One that says CLOSED and lies.
	p.say(&localio.Closed{ID: l.id})
	l = p.mustOpen(fh, 9, 8, true)
	p.say(&localio.Closed{ID: l.id})
	ts.wantNotLent()
	before = c.getattr(fh).Attr
	wantHeld("SETATTR after a false CLOSED")
	// One that has lost its session.
	p.nc.Close()
	ts.wantNothing()
	wantHeld("SETATTR after the session")
	l.close()
	equal(t, "SETATTR once it is closed", c.fence(fh, 7), wire.OK)
	ts.wantNothing()
}

// openAfterRevoke is open for a client that has not listened to REVOKEs.
func (p *peer) openAfterRevoke(fh wire.FileHandle, uid, gid uint32, write bool) (wire.Status, *loaned) {
	p.t.Helper()
	hear[*localio.Revoke](p)
	return p.open(fh, uid, gid, write)
}

// A duplicate of a descriptor, and a shared mapping, can write as well.
func TestLocalFenceCopies(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	c.put(fh, 0, []byte("contents"))
	p := ts.meet(c)
	l := p.mustOpen(fh, 7, 8, true)
	m, err := unix.Mmap(int(l.files[0].Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	p.giveBack(l)
	equal(t, "SETATTR of what is mapped", c.fence(fh, 9), wire.ErrJukebox)
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
	equal(t, "SETATTR then", c.fence(fh, 9), wire.OK)
}

// Read-only descriptors are asked for and do not hold a fence up.
func TestLocalFenceReaders(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	p := ts.meet(c)
	l := p.mustOpen(fh, 7, 8, false)
	for uid := range uint32(3) {
		equal(t, "SETATTR while a reader is there", c.fence(fh, 20+uid), wire.OK)
	}
	equal(t, "revoked", hear[*localio.Revoke](p).ID, l.id)
	if _, err := l.files[0].WriteAt([]byte("x"), 0); err == nil {
		t.Error("a reader can write")
	}
}

// REVOKE comes once to each who has something, and to nobody else; CLOSED lets the waiting SETATTR go on.
func TestLocalRevoke(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh, other := c.create(ts.root, "f", 7, 8), c.create(ts.root, "g", 7, 8)
	p, reader, bystander := ts.meet(c), ts.meet(c), ts.meet(ts.dial())
	l, twice, r := p.mustOpen(fh, 7, 8, true), p.mustOpen(fh, 7, 8, false), reader.mustOpen(fh, 1, 8, false)
	bystander.mustOpen(other, 7, 8, true)

	equal(t, "SETATTR by who may not", c.setattr(as(7, 8), fh, wire.Sattr{SetUID: true, UID: 9}).Status, wire.ErrPerm)
	p.giveBack(p.mustOpen(other, 7, 8, false)) // no REVOKE came before

	w := c.fencing(fh, 9)
	ids := map[uint32]bool{hear[*localio.Revoke](p).ID: true, hear[*localio.Revoke](p).ID: true}
	if !ids[l.id] || !ids[twice.id] {
		t.Errorf("revoked: %v, want %d and %d", ids, l.id, twice.id)
	}
	equal(t, "revoked", hear[*localio.Revoke](reader).ID, r.id)
	p.giveBack(l)
	reader.giveBack(r)
	p.giveBack(twice)
	c.wantFenced(w)
	bystander.mustOpen(other, 7, 8, true)

	l = p.mustOpen(fh, 9, 8, true)
	equal(t, "SETATTR", c.fence(fh, 7), wire.ErrJukebox)
	equal(t, "SETATTR", c.fence(fh, 7), wire.ErrJukebox)
	equal(t, "revoked", hear[*localio.Revoke](p).ID, l.id)
	p.giveBack(l)
	p.giveBack(p.mustOpen(fh, 9, 8, true)) // no other REVOKE came before
	equal(t, "SETATTR", c.fence(fh, 7), wire.OK)
}

// What does not take rights away revokes nothing.
func TestLocalKept(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh, other := c.create(ts.root, "f", 7, 8), c.create(ts.root, "g", 7, 8)
	p := ts.meet(c)
	p.mustOpen(fh, 7, 8, true)
	equal(t, "SETATTR of size and times", c.setattr(super, fh, wire.Sattr{SetSize: true, Size: 5, MtimeHow: wire.ServerTime}).Status, wire.OK)
	equal(t, "RENAME", c.rename(super, ts.root, "f", ts.root, "h"), wire.OK)
	c.put(fh, 0, []byte("x"))
	p.mustOpen(other, 7, 8, false)
}

// A file that has lost its name is revoked, whether the server has it open or not, so that its space is freed.
func TestLocalRemoved(t *testing.T) {
	for name, remove := range map[string]func(*client, wire.FileHandle) wire.Status{
		"REMOVE": func(c *client, root wire.FileHandle) wire.Status { return c.remove(super, root, "f") },
		"RENAME": func(c *client, root wire.FileHandle) wire.Status { return c.rename(super, root, "g", root, "f") },
	} {
		for _, cached := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, cached %v", name, cached), func(t *testing.T) {
				ts := startLocal(t, "", "")
				c := ts.dial()
				fh := c.create(ts.root, "f", 7, 8)
				other := c.create(ts.root, "g", 7, 8)
				p := ts.meet(c)
				l := p.mustOpen(fh, 7, 8, true)
				if !cached {
					ts.evict(c, fh)
				}
				equal(t, name, remove(c, ts.root), wire.OK)
				p.say(&localio.Open{ID: 100, File: other, UID: 7, GID: 8})
				equal(t, "revoked", hear[*localio.Revoke](p).ID, l.id)
				hear[*localio.Opened](p)
			})
		}
	}
}

// Descriptors that a client has not taken out of its socket hold a fence up, also after the session, until the socket is closed.
func TestLocalNotReceived(t *testing.T) {
	ts := startLocal(t, "", "")
	c, carrier := ts.dial(), ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	p := ts.meet(carrier)
	p.say(&localio.Open{ID: 1, File: fh, UID: 7, GID: 8, Write: true})
	raw, err := p.nc.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, "OPENED", func() bool {
		var n int
		raw.Control(func(fd uintptr) { n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) })
		return n == 1
	})
	equal(t, "SETATTR", c.fence(fh, 9), wire.ErrJukebox)
	carrier.nc.Close()
	ts.wantNothing()
	equal(t, "SETATTR after the session", c.fence(fh, 9), wire.ErrJukebox)
	p.nc.Close()
	equal(t, "SETATTR once the socket is closed", c.fence(fh, 9), wire.OK)
}

// A server knows nothing of what the one before it lent, and is held up all the same, whatever it lends itself.
func TestLocalRestart(t *testing.T) {
	for _, mode := range []Local{LocalRW, LocalRO, LocalOff} {
		t.Run(mode.String(), func(t *testing.T) {
			ts := startLocal(t, "", "")
			c := ts.dial()
			fh := c.create(ts.root, "f", 7, 8)
			p := ts.meet(c)
			l := p.mustOpen(fh, 7, 8, true)
			ts.stop()
			p.wantEnd()
			ts = startLocal(t, ts.dir, ts.sockets, func(c *Config) { c.Local = mode })
			c = ts.dial()
			equal(t, "SETATTR", c.fence(fh, 9), wire.ErrJukebox)
			equal(t, "owner", c.getattr(fh).Attr.UID, 7)
			l.close()
			equal(t, "SETATTR once it is closed", c.fence(fh, 9), wire.OK)
		})
	}
}

// A client that asks and asks and takes no answers is cut off, and what was sent to it holds nothing up when it is gone.
func TestLocalAnswersNotTaken(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	p := ts.meet(c)
	p.nc.SetWriteDeadline(time.Now().Add(patience))
	for id := uint32(1); ; id++ {
		_, err := p.nc.Write(localio.Append(nil, &localio.Open{ID: id, File: fh, UID: 7, GID: 8, Write: true}))
		if errors.Is(err, os.ErrDeadlineExceeded) || id > maxLoans {
			t.Fatalf("%d OPENs: %v", id, err)
		}
		if err != nil {
			break
		}
	}
	ts.wantNothing()
	p.nc.Close()
	equal(t, "SETATTR", c.fence(fh, 9), wire.OK)
	ts.meet(c).mustOpen(fh, 9, 8, true)
}

// The number of an OPEN is used once at a time, and there are so many.
func TestLocalLoans(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh, other := c.create(ts.root, "f", 7, 8), c.create(ts.root, "g", 7, 8)
	p := ts.meet(c)
	l := p.mustOpen(fh, 7, 8, true)
	p.id = l.id - 1
	status, _ := p.open(other, 7, 8, false)
	equal(t, "OPEN of a number that is in use", status, wire.ErrJukebox)
	// It still is the first one's.
	w := c.fencing(fh, 9)
	equal(t, "revoked", hear[*localio.Revoke](p).ID, l.id)
	p.giveBack(l)
	c.wantFenced(w)
	p.id = l.id - 1
	p.giveBack(p.mustOpen(fh, 9, 8, true))
	p.say(&localio.Closed{ID: 12345})

	var last *loaned
	for range maxLoans {
		last = p.mustOpen(fh, 9, 8, false)
		last.close()
	}
	status, _ = p.open(fh, 9, 8, false)
	equal(t, "OPEN of one more", status, wire.ErrJukebox)
	p.giveBack(last)
	p.mustOpen(fh, 9, 8, false)
	ts.meet(c).mustOpen(fh, 9, 8, false)
	p.nc.Close()
}

// There are so many clients; one more is told, and admitted when one has gone.
func TestLocalSessions(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	idle := make([]*peer, maxSessions)
	for i := range idle {
		idle[i] = ts.knock()
	}
	p := ts.knock()
	p.wantRefused("already")
	if n, _, _ := ts.counts(); n != maxSessions {
		t.Errorf("%d sessions", n)
	}
	idle[0].nc.Close()
	waittest.Until(t, "a session ends", func() bool { n, _, _ := ts.counts(); return n < maxSessions })
	ts.meet(c)
}

// The socket that a server which was killed has left is replaced; that of one which lives is not, and a server that finds it says
// why it has none.
func TestLocalSocket(t *testing.T) {
	ts := startLocal(t, "", "")
	ts.broker.l.SetUnlinkOnClose(false)
	ts.stop()
	if _, err := os.Lstat(ts.socket().Name); err != nil {
		t.Fatal(err)
	}
	ts = startLocal(t, ts.dir, ts.sockets)
	ts.meet(ts.dial())

	dir := newDir(t)
	key, err := os.ReadFile(filepath.Join(ts.dir, "key"))
	if err := errors.Join(err, os.WriteFile(filepath.Join(dir, "key"), key, 0o600)); err != nil {
		t.Fatal(err)
	}
	twin := startLocal(t, dir, ts.sockets)
	c := twin.dial()
	if id := c.identity(); id.Server != ts.id || id.Local || !strings.Contains(id.Reason, "copy") {
		t.Errorf("identity %+v of a copy", id)
	}
	equal(t, "SETATTR", c.fence(c.create(twin.root, "f", 7, 8), 9), wire.OK)
	p := ts.meet(ts.dial())
	twin.stop()
	p.mustOpen(ts.dial().create(ts.root, "f", 7, 8), 7, 8, true)
	ts.meet(ts.dial())
}

// Sockets are only where nobody else can put any.
func TestLocalSocketDir(t *testing.T) {
	needRoot(t)
	for name, spoil := range map[string]func(dir string) error{
		"writable by all":     func(dir string) error { return os.Chmod(dir, 0o777) },
		"writable by a group": func(dir string) error { return os.Chmod(dir, 0o770) },
		"of another user":     func(dir string) error { return os.Chown(dir, 7, 0) },
		"a link": func(dir string) error {
			return errors.Join(os.Mkdir(dir+"-", 0o700), os.Remove(dir), os.Symlink(dir+"-", dir))
		},
		"a file":                       func(dir string) error { return errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o600)) },
		"with a longer path":           nil,
		"with something else in place": nil,
	} {
		t.Run(name, func(t *testing.T) {
			sockets := filepath.Join(socketDir(t), "s")
			switch {
			case spoil != nil:
				if err := errors.Join(os.Mkdir(sockets, 0o700), spoil(sockets)); err != nil {
					t.Fatal(err)
				}
			case name == "with a longer path":
				sockets = filepath.Join(sockets, strings.Repeat("x", 100))
			}
			dir := newDir(t)
			if name == "with something else in place" {
				ts := startLocal(t, dir, sockets)
				ts.stop()
				if err := os.MkdirAll(filepath.Join(ts.socket().Name, "x"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			ts := startLocal(t, dir, sockets)
			c := ts.dial()
			if id := c.identity(); id.Server != ts.id || id.Local || id.Reason == "" {
				t.Errorf("identity %+v", id)
			}
			equal(t, "SETATTR", c.fence(c.create(ts.root, "f", 7, 8), 9), wire.OK)
		})
	}
}

// What is no message ends a session, wherever it comes, and only that one.
func TestLocalGarbage(t *testing.T) {
	seed := mrand.Uint64()
	t.Logf("seed %d", seed)
	rnd := mrand.New(mrand.NewPCG(seed, 0))
	chacha := mrand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	other := ts.meet(ts.dial())
	where := []func() *peer{
		ts.knock,
		func() *peer { p, _ := ts.hello(); return p },
		func() *peer { return ts.meet(c) },
	}
	packet := func() []byte {
		b := make([]byte, rnd.IntN(2*localio.MaxMessage))
		chacha.Read(b)
		if rnd.IntN(2) == 0 && len(b) >= 4 {
			copy(b, []byte{0, 0, 0, byte(1 + rnd.IntN(10))})
		}
		return b
	}
	whole := map[int]bool{ // lengths of what random bytes behind a type could make a message
		len(localio.Append(nil, &localio.Hello{})): true, len(localio.Append(nil, &localio.Reveal{})): true, 8: true, 12: true,
	}
	for i := range 300 {
		b := packet()
		for whole[len(b)] {
			b = packet()
		}
		p := where[i%len(where)]()
		if _, err := p.nc.Write(b); err != nil {
			t.Fatal(err)
		}
		p.wantEnd()
		p.nc.Close()
	}
	good := localio.Append(nil, &localio.Open{ID: 1, File: fh, UID: 7, GID: 8})
	for n := range len(good) {
		p := ts.meet(c)
		p.nc.Write(good[:n])
		p.wantEnd()
		p.nc.Close()
	}
	p := ts.meet(c)
	p.nc.Write(append(good, 0, 0, 0, 0))
	p.wantEnd()
	other.mustOpen(fh, 7, 8, true)
	other.nc.Close()
	ts.wantNothing()
}

// By RPC and by descriptors it is one file, before and after fences; the server's own descriptors serve the new owner.
func TestLocalData(t *testing.T) {
	onFileSystems(t, func(t *testing.T, dir string) {
		ts := startLocal(t, dir, "")
		c := ts.dial()
		fh := c.create(ts.root, "f", 7, 8)
		p := ts.meet(c)
		const size = 1 << 20
		data := iobuf.Aligned(2 * size)
		rand.Read(data)
		for i := range 3 {
			uid := uint32(7 + i)
			off := int64(i) * 2 * size
			l := p.mustOpen(fh, uid, 8, true)
			res := c.write(as(uid, 8), fh, uint64(off), data[:size], wire.Unstable)
			if res.Status != wire.OK || res.Count != size {
				t.Fatalf("WRITE of owner %d: %v, %d bytes", uid, res.Status, res.Count)
			}
			small := c.write(as(uid, 8), fh, uint64(off), data[:100], wire.Unstable)
			equal(t, "small WRITE", small.Status, wire.OK)
			got := iobuf.Aligned(2 * size)
			for _, f := range l.files {
				if n, err := f.ReadAt(got[:size], off); n != size || !bytes.Equal(got[:size], data[:size]) {
					t.Errorf("read what RPC wrote: %d bytes, %v", n, err)
				}
			}
			last := l.files[len(l.files)-1]
			if _, err := last.WriteAt(data[size:], off+size); err != nil {
				t.Fatal(err)
			}
			if read := c.read(as(uid, 8), fh, uint64(off), 2*size); read.Status != wire.OK || !bytes.Equal(read.data, data) {
				t.Errorf("READ of owner %d: %v, %d bytes", uid, read.Status, len(read.data))
			}
			p.giveBack(l)
			ts.wantNotLent()
			equal(t, "SETATTR", c.fence(fh, uid+1), wire.OK)
			equal(t, "WRITE of who is fenced", c.write(as(uid, 8), fh, 0, []byte("x"), wire.Unstable).Status, wire.ErrAcces)
			commit := c.commit(as(uid+1, 8), fh)
			equal(t, "COMMIT", commit.Status, wire.OK)
			equal(t, "verifier", commit.Verf, res.Verf)
		}
		for i := range 3 {
			c.check(fh, uint64(i)*2*size, data)
		}
	})
}

// A fence puts another descriptor in the place of the one that writes went to: before that it syncs, and a failure is told as
// always, by the verifier.
func TestLocalFenceSyncs(t *testing.T) {
	syncs := watchSyncs(t)
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	verf := c.write(super, fh, 0, []byte("dirty"), wire.Unstable).Verf
	syncs.failNext()
	c.fence(fh, 9)
	if commit := c.commit(super, fh); commit.Status != wire.OK || commit.Verf == verf {
		t.Errorf("COMMIT after a sync that failed: %v, verifier is the same: %v", commit.Status, commit.Verf == verf)
	}
	verf = c.write(super, fh, 0, []byte("dirty"), wire.Unstable).Verf
	equal(t, "SETATTR", c.fence(fh, 7), wire.OK)
	equal(t, "verifier", c.commit(super, fh).Verf, verf)
	c.check(fh, 0, []byte("dirty"))
}

// What a client has written and not synced is as after a WRITE: it has the verifier, and the file stays open until a sync has told
// whether all is well.
func TestLocalUnstable(t *testing.T) {
	syncs := watchSyncs(t)
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	verf := c.write(super, fh, 0, []byte("x"), wire.FileSync).Verf
	p := ts.meet(c)
	for _, unstable := range []bool{false, true} {
		l := p.mustOpen(fh, 7, 8, true)
		equal(t, "verifier", l.verf, verf)
		if _, err := l.files[0].WriteAt([]byte("data"), 0); err != nil {
			t.Fatal(err)
		}
		if !unstable {
			if err := l.files[0].Sync(); err != nil {
				t.Fatal(err)
			}
		}
		l.close()
		p.say(&localio.Closed{ID: l.id, Unstable: unstable})
		ts.wantNotLent()
		syncs.take()
		ts.evict(c, fh)
		equal(t, "synced by the server", slices.Contains(syncs.take(), ts.ino("f")), unstable)
	}
	l := p.mustOpen(fh, 7, 8, true)
	l.close()
	p.say(&localio.Closed{ID: l.id, Unstable: true})
	ts.wantNotLent()
	syncs.failNext()
	equal(t, "COMMIT", c.commit(super, fh).Status, wire.ErrIO)
	l = p.mustOpen(fh, 7, 8, true)
	if l.verf == verf {
		t.Error("the verifier of before")
	}
}

// What a client writes behind the end while it is asked for its descriptors is not taken for what DEALLOCATE cuts off.
func TestLocalDeallocate(t *testing.T) {
	onFileSystems(t, func(t *testing.T, dir string) {
		ts := startLocal(t, dir, "")
		c := ts.dial()
		fh := c.create(ts.root, "f", 7, 8)
		c.put(fh, 0, bytes.Repeat([]byte("x"), 100))
		p := ts.meet(c)
		l := p.mustOpen(fh, 7, 8, true)
		args := &sparse.RangeArgs{FH: fh, Length: 100}
		w := c.send(sparseCall(sparse.ProcDeallocate, super), args.Append(nil))
		hear[*localio.Revoke](p)
		if _, err := l.files[0].WriteAt([]byte("behind the end"), 100); err != nil {
			t.Fatal(err)
		}
		p.giveBack(l)
		var res sparse.RangeRes
		if _, err := finish(w, &res); err != nil || res.Status != wire.OK {
			t.Fatalf("DEALLOCATE: %v, %v", res.Status, err)
		}
		c.check(fh, 0, append(make([]byte, 100), "behind the end"...))

		// Nor of one that keeps them.
		l = p.mustOpen(fh, 7, 8, true)
		if res := c.deallocate(super, fh, 0, 114, sparse.Column{}); res.Status != wire.OK {
			t.Fatalf("DEALLOCATE: %v", res.Status)
		}
		c.check(fh, 0, make([]byte, 114))
		if _, err := l.files[0].WriteAt([]byte("behind the end"), 114); err != nil {
			t.Fatal(err)
		}
		c.check(fh, 114, []byte("behind the end"))
	})
}

// Clients that open, write and close all the time change nothing from a fence's answer on.
func TestLocalFenceUnderLoad(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	const size, fences, nobody = 512 << 10, 15, 100
	c.put(fh, 0, make([]byte, size))
	stop := make(chan struct{})
	var writers sync.WaitGroup
	defer writers.Wait()
	defer close(stop)
	for i := range 3 {
		p, rpc := ts.meet(c), ts.dial()
		writers.Go(func() {
			data := iobuf.Aligned(size)
			for id := uint32(1); ; id++ {
				select {
				case <-stop:
					return
				default:
				}
				for j := range data {
					data[j] = byte(id*3 + uint32(i))
				}
				if i == 0 { // also by RPC
					finish(rpc.send(nfsCall(wire.ProcWrite, as(7, 8)), (&writeCall{wire.WriteArgs{FH: fh}, data}).Append(nil)), nil)
				}
				p.nc.Write(localio.Append(nil, &localio.Open{ID: id, File: fh, UID: 7, GID: 8, Write: true}))
				for {
					m, files, err := p.receive()
					if err != nil {
						t.Error(err)
						return
					}
					if _, ok := m.(*localio.Revoke); ok {
						continue
					}
					for _, f := range files {
						if _, err := f.WriteAt(data, 0); err != nil {
							t.Error(err)
						}
					}
					for _, f := range files {
						f.Close()
					}
					if len(files) > 0 {
						p.nc.Write(localio.Append(nil, &localio.Closed{ID: id}))
					}
					break
				}
			}
		})
	}
	fenced := func(uid uint32) {
		t.Helper()
		for range 100 {
			switch status := c.fence(fh, uid); status {
			case wire.OK:
				return
			case wire.ErrJukebox:
			default:
				t.Fatalf("SETATTR: %v", status)
			}
		}
		t.Fatal("SETATTR does not come through")
	}
	for range fences {
		fenced(nobody)
		before := c.read(super, fh, 0, size)
		time.Sleep(2 * time.Millisecond)
		if after := c.read(super, fh, 0, size); !bytes.Equal(before.data, after.data) {
			t.Fatal("somebody wrote behind a fence")
		}
		fenced(7)
		time.Sleep(5 * time.Millisecond)
	}
}

// With TLS a proof is of the very connection that carries it.
func TestLocalTLS(t *testing.T) {
	needRoot(t)
	files := tlstest.New(t).Issue()
	server, err := rpctls.NewServer(rpctls.Files{Cert: files.Cert, Key: files.Key})
	if err != nil {
		t.Fatal(err)
	}
	trust, err := rpctls.NewClient(rpctls.TLS, rpctls.Files{CA: files.CA})
	if err != nil {
		t.Fatal(err)
	}
	ts := startLocal(t, "", "", func(c *Config) { c.TLS, c.RequireTLS = server, true })
	dial := func() (*client, []byte) {
		t.Helper()
		addr := netip.MustParseAddrPort(ts.addr)
		nc, err := net.Dial("tcp", ts.addr)
		if err != nil {
			t.Fatal(err)
		}
		tc, err := trust.Handshake(t.Context(), nc, addr.Addr(), oncrpc.Call{XID: 1, Prog: oncrpc.ProgNFS, Vers: wire.Version})
		if err != nil {
			t.Fatal(err)
		}
		state := tc.ConnectionState()
		channel, err := state.ExportKeyingMaterial(localio.ExporterLabel, nil, localio.ExporterSize)
		if err != nil {
			t.Fatal(err)
		}
		return newClient(t, tc), channel
	}
	c, channel := dial()
	_, other := dial()
	if !c.identity().Local {
		t.Error("no broker")
	}
	for name, wrong := range map[string][]byte{"no": nil, "another connection's": other, "a shorter": channel[:31]} {
		p, ch := ts.hello()
		nonce := newNonce()
		c.show(ch, nonce, wrong)
		p.say(&localio.Reveal{Nonce: nonce})
		t.Log(name, "channel")
		p.wantRefused("no proof")
	}
	p, ch := ts.hello()
	nonce := newNonce()
	c.show(ch, nonce, channel)
	p.say(&localio.Reveal{Nonce: nonce})
	hear[*localio.Granted](p)
	p.mustOpen(c.create(ts.root, "f", 7, 8), 7, 8, true)

	clear := ts.dial()
	_, err = finish(clear.send(oncrpc.Call{Prog: localio.Program, Vers: localio.Version, Proc: uint32(localio.ProcIdentity)}, nil), nil)
	wantStat(t, "GET_IDENTITY in the clear", err, oncrpc.AuthError)
	c.nc.Close()
	p.wantEnd()
}

// Descriptors that are opened after a failed sync do not vouch for what was written before it.
func TestLocalVerifier(t *testing.T) {
	ts := startLocal(t, "", "")
	c := ts.dial()
	p := ts.meet(c)
	fh := c.create(ts.root, "f", 1000, 1000)
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	v := *ts.verifier.now.Load() // what an UNSTABLE write by RPC has now
	f.mu.Lock()                  // a SETATTR, say
	p.say(&localio.Open{ID: 1, File: fh, UID: 1000, GID: 1000, Write: true})
	time.Sleep(100 * time.Millisecond)
	old := fdatasync
	fdatasync = func(int) error { return unix.EIO } // a write-back failed; this takes the error
	ts.sync(f, false)
	fdatasync = old
	f.mu.Unlock()
	o := hear[*localio.Opened](p)
	ts.cache.put(f)
	if o.Status != wire.OK || o.Verifier == v || o.Verifier != *ts.verifier.now.Load() {
		t.Errorf("%v, verifier %x, was %x, is %x", o.Status, o.Verifier, v, *ts.verifier.now.Load())
	}
}
