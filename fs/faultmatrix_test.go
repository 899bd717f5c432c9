package fs

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// The fault matrix: every way in which a data server can fail x every call that meets it x when it strikes x how the file
// lies. The data servers are real ones to the NFSv3 client, over TCP; what they hold is in memory, so that what is on stable
// storage can be told from what is not.

// course is what a fault comes to.
type course int

const (
	passes course = iota // strikes some calls; nobody sees an error
	stays                // strikes all calls until it is healed, for which the application waits
	fails                // strikes all calls until the application has its error
)

// fault is a row of the matrix.
type fault struct {
	name   string
	course course
	times  int           // calls that are struck, if it passes; 0: one
	errno  syscall.Errno // the application's, if it fails and there is no other copy
	deed   deed
	told   bool    // what it strikes has failed: of a copy, the service is told
	late   bool    // also met by commits that the application does not ask for by fsync
	only   []phase // nil: all
	procs  []wire.Proc
}

const stripeUnit = 64 << 10

var (
	writesOnly = []wire.Proc{wire.ProcWrite, wire.ProcCommit}
	dataOnly   = []wire.Proc{wire.ProcRead, wire.ProcWrite}
)

// What becomes of connections.
var (
	hangUp  = deed{breaks: func(_ *nfsServer, nc net.Conn) { nc.Close() }}
	resets  = deed{breaks: func(_ *nfsServer, nc net.Conn) { reset(nc) }}
	silence = deed{breaks: func(*nfsServer, net.Conn) {}}
	refused = deed{breaks: func(s *nfsServer, _ net.Conn) { s.cut() }}
	dark    = deed{breaks: func(s *nfsServer, _ net.Conn) { s.darken() }}
)

func restart(s *nfsServer, _ []byte) { s.mem.Restart() }
func fence(s *nfsServer, fh []byte)  { s.owners.fence(fh) }

// faults is the table of errors: what it says is what package fs and the NFSv3 client promise about each of them.
func faults() (list []fault) {
	add := func(f fault) { list = append(list, f) }
	// Answers of NFS. Some ask for another layout and are the application's only when those do not help either.
	add(fault{name: "JUKEBOX", deed: deed{status: wire.ErrJukebox}})
	add(fault{name: "JUKEBOX for long", course: stays, deed: deed{status: wire.ErrJukebox}})
	for _, s := range []wire.Status{wire.ErrAcces, wire.ErrPerm, wire.ErrStale, wire.ErrBadHandle} {
		add(fault{name: s.String(), times: 2, told: true, deed: deed{status: s}})
	}
	add(fault{name: "ACCES for good", course: fails, errno: syscall.EIO, told: true, deed: deed{status: wire.ErrAcces}})
	for _, s := range []wire.Status{wire.ErrIO, wire.ErrNXIO, wire.ErrServerFault, 77777} {
		add(fault{name: s.String(), course: fails, errno: syscall.EIO, told: true, late: s == wire.ErrIO, deed: deed{status: s}})
	}
	for _, s := range []wire.Status{wire.ErrNoSpc, wire.ErrDQuot, wire.ErrFBig, wire.ErrROFS, wire.ErrNotSupp} {
		add(fault{name: s.String(), course: fails, errno: s.Errno(), told: true, late: s == wire.ErrNoSpc, deed: deed{status: s}})
	}
	add(fault{name: "fence", deed: deed{unseen: fence}})
	add(fault{name: "fence and reset", deed: deed{unseen: fence, breaks: resets.breaks}})
	// Refusals of RPC.
	for _, s := range []oncrpc.Stat{oncrpc.ProgMismatch, oncrpc.SystemErr} {
		add(fault{name: s.String(), course: fails, errno: syscall.EIO, told: true, deed: deed{rpc: s}})
	}
	add(fault{name: "PROC_UNAVAIL", course: fails, errno: syscall.EOPNOTSUPP, told: true, deed: deed{rpc: oncrpc.ProcUnavail}})
	add(fault{name: "AUTH_ERROR", times: 2, told: true, deed: deed{rpc: oncrpc.AuthError}})
	// Connections.
	add(fault{name: "hang-up", times: 2, deed: hangUp})
	add(fault{name: "reset", times: 2, deed: resets})
	add(fault{name: "reset again and again", course: stays, deed: resets})
	add(fault{name: "connection refused", course: stays, deed: refused})
	add(fault{name: "black hole", course: stays, late: true, only: []phase{before, after}, deed: dark})
	add(fault{name: "timeout", only: []phase{before, after}, deed: silence})
	add(fault{name: "restart", late: true, deed: deed{unseen: restart, breaks: func(s *nfsServer, _ net.Conn) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.resetAll()
	}}})
	add(fault{name: "restart unseen", procs: writesOnly, deed: deed{unseen: restart}})
	// Short replies.
	add(fault{name: "short reply", times: 2, procs: dataOnly, deed: deed{count: func(n int, p phase) int {
		return [...]int{before: 0, during: n / 2, after: n / 2}[p]
	}}})
	add(fault{name: "empty replies", course: fails, errno: syscall.EIO, told: true, procs: dataOnly, only: []phase{before},
		deed: deed{count: func(int, phase) int { return 0 }}})
	// Wrong replies.
	for name, tamper := range map[string]func(good []byte) []byte{
		"wrong message type": func(b []byte) []byte { return putWord(b, 4, 7) },
		"truncated reply":    func(b []byte) []byte { return record(b[oncrpc.RecordMarkSize:][:26]) },
		"wrong status":       func(b []byte) []byte { return putWord(b, 20, 99) },
	} {
		add(fault{name: name, times: 2, deed: deed{tamper: tamper}})
		add(fault{name: name + " for good", course: fails, errno: syscall.EIO, told: true, deed: deed{tamper: tamper}})
	}
	add(fault{name: "endless record", deed: deed{tamper: func(b []byte) []byte {
		return append(oncrpctest.AppendRecordMark(nil, 1<<31-1, true), bytes.Repeat([]byte{0xa5}, 1000)...)
	}}})
	add(fault{name: "wrong xid", deed: deed{tamper: func(b []byte) []byte {
		b[oncrpc.RecordMarkSize] ^= 0x80
		return b
	}}})
	add(fault{name: "reply twice", times: 2, only: []phase{after}, deed: deed{tamper: func(b []byte) []byte { return append(slices.Clip(b), b...) }}})
	slices.SortStableFunc(list, func(a, b fault) int { return bytes.Compare([]byte(a.name), []byte(b.name)) })
	return list
}

// shape is how the file lies.
type shape struct {
	name    string
	servers int
	mirrors bool
}

var shapes = []shape{{"1 stripe", 1, false}, {"4 stripes", 4, false}, {"2 mirrors", 2, true}}

// act is what the application does when the fault strikes.
type act struct {
	name string
	proc wire.Proc
	late bool // a commit that is not asked for by fsync
}

var acts = []act{
	{"read", wire.ProcRead, false}, {"write", wire.ProcWrite, false}, {"fsync", wire.ProcCommit, false},
	{"close=stable", wire.ProcCommit, true}, {"nothing", wire.ProcCommit, true},
}

func TestFaultMatrix(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	type kase struct {
		f     fault
		act   act
		phase phase
		shape shape
	}
	var cases []kase
	some := rand.New(rand.NewPCG(seed, 0))
	for _, f := range faults() {
		for _, a := range acts {
			for _, p := range []phase{before, during, after} {
				from := shapes
				if testing.Short() {
					from = shapes[some.IntN(len(shapes)):][:1]
				}
				for _, sh := range from {
					if (f.procs == nil || slices.Contains(f.procs, a.proc)) && (f.late || !a.late) && (f.only == nil || slices.Contains(f.only, p)) {
						cases = append(cases, kase{f, a, p, sh})
					}
				}
			}
		}
	}
	t.Logf("%d cases", len(cases))
	// Most of the time cases wait for back-offs and timeouts, so many more run at once than there are processors.
	var running sync.WaitGroup
	slots := make(chan struct{}, 48)
	for n, c := range cases {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			t.Run(fmt.Sprintf("%s/%s/%v/%s", c.f.name, c.act.name, c.phase, c.shape.name), func(t *testing.T) {
				m := newFaultRig(t, c.shape, c.act, rand.New(rand.NewPCG(seed, uint64(n))))
				m.run(c.f, c.act, c.phase)
			})
		})
	}
	running.Wait()
}

// faultRig is a mount with one file on NFSv3 servers, the first of which is to fail.
type faultRig struct {
	*rig
	shape   shape
	servers []*nfsServer
	id      layout.FileID
	fh      uint64
	off     int64  // of what is written anew
	fresh   []byte // what that is
	old     []byte // what the file held before,
	now     []byte // and holds afterwards
}

// patience is how long anything may take.
const patience = time.Minute

func newFaultRig(t *testing.T, sh shape, a act, rnd *rand.Rand) *faultRig {
	s := newService(sh.servers, stripeUnit)
	s.mirrors, s.patience = sh.mirrors, 5*time.Second // what is not struck must not take as long, with so many cases at once
	m := &faultRig{shape: sh}
	targets := map[layout.DeviceID]dataplane.Target{}
	for _, mem := range s.servers {
		srv := newNFSServer(t, mem, s)
		m.servers = append(m.servers, srv)
		target, err := nfs3.New(nfs3.Config{
			Name: mem.ID().String(), Addrs: []netip.AddrPort{srv.addr}, Connections: 2, Timeout: 3 * time.Second, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { target.Close() })
		targets[mem.ID()] = target
	}
	m.rig = newRigOver(t, s, targets, func(c *Config) {
		c.StableClose = a.name == "close=stable"
		c.Log = slog.New(slog.DiscardHandler)
	})
	m.id, m.fh = m.create("f")
	size := sh.servers * stripeUnit
	if sh.mirrors {
		size = stripeUnit
	}
	m.old = randomBytes(rnd, size-rnd.IntN(100))
	m.off = rnd.Int64N(100)
	m.fresh = randomBytes(rnd, len(m.old)-int(m.off)-rnd.IntN(100))
	m.now = slices.Clone(m.old)
	copy(m.now[m.off:], m.fresh)
	m.write(m.id, 0, m.old)
	m.want(m.fsync(m.id, m.fh), 0, "fsync")
	s.changeFiles(func(d *layout.DataFile) {
		if d.Device == s.servers[0].ID() {
			d.Efficiency = 1 << 30 // so that reads come here first
		}
	})
	m.m.DropLayout(m.id, 0)
	return m
}

func randomBytes(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

// run has the fault strike while the application does a, and looks at what it sees, and what is left, then.
func (m *faultRig) run(f fault, a act, p phase) {
	t, bad, replaced := m.t, m.servers[0], m.shape.mirrors
	times := max(f.times, 1)
	if f.course != passes {
		times = -1
	}
	struck := bad.strike(a.proc, p, times, &f.deed)
	if a.proc != wire.ProcWrite {
		m.write(m.id, m.off, m.fresh)
	}
	done := make(chan fuse.Status, 1)
	go func() { done <- m.act(a) }() // ends when the application would go on
	wait := time.After(patience)
	select {
	case <-struck:
	case <-wait:
		t.Fatal("the fault met no call")
	}
	if f.course == stays && !replaced {
		time.Sleep(10 * time.Millisecond)
		select {
		case got := <-done:
			t.Fatalf("%s: %v while the fault lasted", a.name, got)
		default:
		}
		ok(t, bad.heal())
	}
	want := syscall.Errno(0)
	if f.course == fails && !replaced {
		want = f.errno
	}
	select {
	case got := <-done:
		m.want(got, want, "%s", a.name)
	case <-wait:
		t.Fatalf("%s does not end", a.name)
	}
	ok(t, bad.heal())

	// From here on nobody sees anything of it.
	if a.proc == wire.ProcWrite && want != 0 {
		for i, b := range m.read(m.id, 0, len(m.now)) {
			if b != m.old[i] && b != m.now[i] {
				t.Fatalf("after a write that failed, byte %d is neither the old nor the new one", i)
			}
		}
		m.write(m.id, m.off, m.fresh)
	}
	m.want(m.fsync(m.id, m.fh), 0, "fsync afterwards")
	m.wantRead(m.id, 0, len(m.now), m.now)
	m.want(m.flush(m.id, m.fh), 0, "close afterwards")
	m.wantStable()
	told := m.m.called("LayoutError")
	if told > 0 && !replaced {
		t.Errorf("the service was told %d times of copies that there are not", told)
	}
	if replaced && told == 0 && a.proc != wire.ProcRead && (f.told || f.course == stays) {
		t.Error("the service was not told of the copy that failed")
	}
	m.release(m.fh)
}

// act does what is to meet the fault, and returns what the application is told.
func (m *faultRig) act(a act) fuse.Status {
	switch a.name {
	case "read":
		got, status := m.tryRead(m.id, 0, len(m.now))
		if status == fuse.OK && !bytes.Equal(got, m.now) {
			m.t.Error("the read has other bytes than were written")
		}
		return status
	case "write":
		n, status := m.tryWrite(m.id, m.off, m.fresh, unix.O_RDWR)
		if status == fuse.OK && n != len(m.fresh) {
			m.t.Errorf("%d of %d bytes written", n, len(m.fresh))
		}
		return status
	case "fsync":
		return m.fsync(m.id, m.fh)
	case "nothing": // the flusher commits; what it meets is told by close
		for i := m.peek(m.id); ; time.Sleep(time.Millisecond) {
			i.mu.Lock()
			settled := i.failing || !i.dirty()
			i.mu.Unlock()
			if settled {
				break
			}
		}
	}
	return m.flush(m.id, m.fh)
}

// wantStable checks what is on stable storage, in each copy that is not given up.
func (m *faultRig) wantStable() {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	n, good := m.s.nodes[m.id], 0
	for _, copies := range [][]*layout.DataFile{n.files, n.second} {
		for k, d := range copies {
			if d.State != layout.CopyGood {
				continue
			}
			good++
			stable := m.s.server(d.Device).Stable(d)
			for off := k * stripeUnit; off < len(m.now); off += len(copies) * stripeUnit {
				end := min(off+stripeUnit, len(m.now))
				if len(stable) < end || !bytes.Equal(stable[off:end], m.now[off:end]) {
					m.t.Errorf("what is on stable storage of column %d on server %v is not what was written", k, d.Device)
					break
				}
			}
		}
	}
	if good < len(n.files) {
		m.t.Errorf("%d good copies of %d columns", good, len(n.files))
	}
	if n.attr.Size != int64(len(m.now)) {
		m.t.Errorf("the durable size is %d, want %d", n.attr.Size, len(m.now))
	}
}

// changeFiles changes data files as the service knows them.
func (s *service) changeFiles(change func(d *layout.DataFile)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.nodes {
		for _, d := range append(slices.Clone(n.files), n.second...) {
			now := *d
			change(&now)
			n.exchange(d, &now)
		}
	}
}

func (s *service) owns(fh []byte, uid uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.nodes {
		for _, d := range append(slices.Clone(n.files), n.second...) {
			if bytes.Equal(d.Handles[0], fh) {
				return d.Cred.UID == uid
			}
		}
	}
	return false
}

func (s *service) fence(fh []byte) {
	s.changeFiles(func(d *layout.DataFile) {
		if bytes.Equal(d.Handles[0], fh) {
			d.Cred.UID++
		}
	})
}
