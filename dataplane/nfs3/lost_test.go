package nfs3

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// loser is a server that hangs up on the first WRITE.
type loser struct {
	*server
	mu     sync.Mutex
	writes []*callInfo
	names  []conns.Name  // that END was asked of
	ended  chan struct{} // closed when END is answered by true
}

func newLoser(t *testing.T) *loser {
	l := &loser{server: newServer(t), ended: make(chan struct{})}
	l.script = func(c *callInfo) *action {
		if c.proc != wire.ProcWrite {
			return nil
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.writes = append(l.writes, c)
		return &action{hangup: len(l.writes) == 1}
	}
	return l
}

func (l *loser) end(n conns.Name) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.names = append(l.names, n)
	select {
	case <-l.ended:
		return true
	default:
		time.Sleep(time.Millisecond) // servers take their time, too
		return false
	}
}

func (l *loser) asked() (names []conns.Name, writes []*callInfo) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.names, l.writes
}

// busy makes tg have several connections that are up, so that a repetition could go by any of them.
func busy(t *testing.T, tg *Target) {
	t.Helper()
	waittest.Until(t, "two connections are up", func() bool {
		var rs []*request
		for range 16 {
			rs = append(rs, readOp("f", 0, 1<<20))
		}
		ok(t, tg, rs...)
		return tg.Stats().Connects >= 2
	})
}

// TestLost: a WRITE whose connection is lost is not sent again before the server has ended that connection. What
// changes nothing goes on meanwhile.
func TestLost(t *testing.T) {
	srv := newLoser(t)
	srv.ends = srv.end
	srv.put("f", make([]byte, 1<<20))
	tg := newTarget(t, Config{Connections: 2}, srv.addr)
	busy(t, tg)
	w := writeOp("g", 0, []byte("again"))
	start(tg, w)
	waittest.Until(t, "the client asks several times", func() bool { names, _ := srv.asked(); return len(names) > 3 })
	ok(t, tg, readOp("f", 0, 1<<20))
	names, writes := srv.asked()
	if len(writes) != 1 {
		t.Errorf("%d WRITEs before the lost connection has ended", len(writes))
	}
	for _, n := range names {
		if n.Client != tg.client || n.Number == 0 || n != names[0] {
			t.Errorf("END of %v, first of %v", n, names[0])
		}
	}
	if st := tg.Stats(); !errors.Is(st.Err, errUnended) || st.Queued != 1 {
		t.Errorf("stats %+v", st)
	}
	close(srv.ended)
	wait(t, w.done, "WRITE")
	if _, writes := srv.asked(); w.Err != nil || len(writes) != 2 || writes[0].xid != writes[1].xid {
		t.Errorf("error %v, %d WRITEs", w.Err, len(writes))
	}
	waittest.Until(t, "all well", func() bool { return tg.Stats().Trouble.IsZero() })
}

// serverCall is a record with a call that a server makes.
func serverCall(prog uint32, proc conns.Proc) []byte {
	call := oncrpc.Call{Prog: prog, Vers: conns.Version, Proc: uint32(proc)}
	b := call.Append(make([]byte, oncrpc.RecordMarkSize))
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	return b
}

// TestStopping: a server that announces that it stops is stopping until it is back. Any other call from it ends the
// connection.
func TestStopping(t *testing.T) {
	for _, tt := range []struct {
		name  string
		call  []byte
		stops bool
	}{
		{"STOP", serverCall(conns.Program, conns.ProcStop), true},
		{"JOIN", serverCall(conns.Program, conns.ProcJoin), false},
		{"NFS", serverCall(oncrpc.ProgNFS, conns.ProcStop), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			srv := newServer(t)
			srv.put("f", []byte("data"))
			srv.script = func(c *callInfo) *action {
				if c.proc == wire.ProcRead && c.nth == 1 {
					return &action{raw: tt.call}
				}
				return nil
			}
			tg := newTarget(t, Config{Connections: 1}, srv.addr)
			r := readOp("f", 0, 4)
			start(tg, r)
			if tt.stops {
				waittest.Until(t, "the server has announced it", tg.Stopping)
				srv.hangup()
			}
			wait(t, r.done, "READ")
			if r.Err != nil || string(r.Data) != "data" {
				t.Errorf("READ: %v, %q", r.Err, r.Data)
			}
			if tg.Stopping() {
				t.Error("stopping, though it is back")
			}
			if n := tg.Stats().Connects; n != 2 {
				t.Errorf("%d connections, want 2", n)
			}
		})
	}
}

// TestLostCall: so it is with other calls that change something.
func TestLostCall(t *testing.T) {
	srv := newServer(t)
	ended := make(chan struct{})
	var calls, asked int
	var mu sync.Mutex
	srv.ends = func(conns.Name) bool {
		mu.Lock()
		defer mu.Unlock()
		asked++
		select {
		case <-ended:
			return true
		default:
			time.Sleep(time.Millisecond)
			return false
		}
	}
	srv.script = func(c *callInfo) *action {
		if c.proc != wire.ProcRemove {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		calls++
		return &action{hangup: calls == 1}
	}
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	done := make(chan error, 1)
	go func() { done <- tg.Remove(t.Context(), layout.Credential{}, []byte("root"), "f") }()
	waittest.Until(t, "the client asks several times", func() bool { mu.Lock(); defer mu.Unlock(); return asked > 3 })
	mu.Lock()
	if calls != 1 {
		t.Errorf("%d REMOVEs before the lost connection has ended", calls)
	}
	mu.Unlock()
	close(ended)
	if err := <-done; err != nil { // NOENT to the repetition is success
		t.Error(err)
	}
}

// TestLostSoft: the owner of a WRITE that waits for END is told when its patience is over, and Close does not wait.
func TestLostSoft(t *testing.T) {
	srv := newLoser(t)
	srv.ends = srv.end
	tg := newTarget(t, Config{Connections: 1, Patience: layout.Patience{Time: 200 * time.Millisecond, Errno: syscall.ETIMEDOUT}}, srv.addr)
	overdue := make(chan error, 1)
	w := writeOp("g", 0, []byte("again"))
	w.Overdue = func(_ *layout.Op, err error) { overdue <- err }
	start(tg, w)
	select {
	case err := <-overdue:
		if late := (*layout.TimeoutError)(nil); !errors.As(err, &late) {
			t.Errorf("error %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nobody says that the WRITE is overdue")
	}
	if err := tg.Close(); err != nil {
		t.Error(err)
	}
	wait(t, w.done, "WRITE")
	if !errors.Is(w.Err, ErrClosed) {
		t.Errorf("error %v", w.Err)
	}
}

// TestLostRestarted: a server that has none of the connections any more says so, and one that has no END has none to
// tell of.
func TestLostRestarted(t *testing.T) {
	for name, ends := range map[string]func(conns.Name) bool{"weft": func(conns.Name) bool { return true }, "foreign": nil} {
		t.Run(name, func(t *testing.T) {
			srv := newLoser(t)
			srv.ends = func(conns.Name) bool { return false }
			tg := newTarget(t, Config{Connections: 1}, srv.addr)
			ok(t, tg, newOp(layout.OpCommit, "g", 0, nil))
			w := writeOp("g", 0, []byte("again"))
			start(tg, w)
			waittest.Until(t, "the WRITE comes", func() bool { _, writes := srv.asked(); return len(writes) > 0 })
			addr := srv.addr.String()
			srv.close()
			srv.ends = ends
			srv.listen(t, addr)
			wait(t, w.done, "WRITE")
			if w.Err != nil {
				t.Error(w.Err)
			}
		})
	}
}

// TestLostForeign: a server without END gets repetitions from the port that the lost connection had, with the same
// xids, for that is how reply caches know them.
func TestLostForeign(t *testing.T) {
	for range 10 { // somebody else on the machine may get the port meanwhile
		srv := newLoser(t)
		srv.put("f", make([]byte, 1<<20))
		tg := newTarget(t, Config{Connections: 2}, srv.addr)
		busy(t, tg)
		ok(t, tg, writeOp("g", 0, []byte("again")))
		_, writes := srv.asked()
		if len(writes) != 2 || writes[0].xid != writes[1].xid || writes[0].nc == writes[1].nc {
			t.Fatalf("%d WRITEs", len(writes))
		}
		if writes[0].conn.RemoteAddr().String() == writes[1].conn.RemoteAddr().String() {
			return
		}
	}
	t.Error("the WRITE never comes again from the port that it came from first")
}

// TestLostPort: if the port is in use by then, another one will do.
func TestLostPort(t *testing.T) {
	srv := newServer(t)
	tg := newTarget(t, Config{}, srv.addr)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	nc, err := tg.connect(tg.paths[0], l.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
}

// TestRefusesConnections: a server is refused from the first attempt to connect that its host refuses until one works.
func TestRefusesConnections(t *testing.T) {
	srv := newServer(t)
	srv.put("f", []byte("data"))
	tg := newTarget(t, Config{Connections: 2}, srv.addr)
	read := func() *request {
		r := readOp("f", 0, 4)
		start(tg, r)
		return r
	}
	wait(t, read().done, "READ")
	if tg.Refused() {
		t.Error("refused while it serves")
	}
	addr := srv.addr.String()
	srv.close()
	r := read()
	waittest.Until(t, "it refuses connections", tg.Refused)
	srv.listen(t, addr)
	wait(t, r.done, "READ")
	if tg.Refused() {
		t.Error("refused though it has answered")
	}
}
