package metaclient

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	mrand "math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// idOf makes the inode number that the scripted service gives to a name.
func idOf(name string) layout.FileID {
	h := fnv.New32()
	h.Write([]byte(name))
	return layout.FileID(h.Sum32()) + 2
}

// mkdirs answers MAKENODE and counts how often each name was executed.
type mkdirs struct {
	mu    sync.Mutex
	count map[string]int
}

func (m *mkdirs) handle(op metarpc.Op, args any) (metarpc.Status, any) {
	switch a := args.(type) {
	case *metarpc.MakeNodeArgs:
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.count == nil {
			m.count = map[string]int{}
		}
		m.count[a.Name]++
		if m.count[a.Name] > 1 {
			return metarpc.Status(syscall.EEXIST), nil
		}
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: idOf(a.Name)}}
	case *metarpc.IDArgs:
		if op == metarpc.OpStatFS {
			return metarpc.StatusOK, nil
		}
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: a.ID}}
	case *metarpc.OpenArgs:
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: a.ID}}
	}
	return metarpc.StatusOK, nil
}

func mkdir(ctx context.Context, c *Client, name string) error {
	a, err := c.MakeNode(ctx, metarpc.Cred{UID: 1}, &metarpc.MakeNodeArgs{Parent: 1, Name: name, Mode: syscall.S_IFDIR | 0o755})
	if err == nil && a.Attr.ID != idOf(name) {
		err = fmt.Errorf("mkdir %s: got the answer of another call, inode %d", name, a.Attr.ID)
	}
	return err
}

// A connection that is cut at any point of a call costs time but neither the call nor a second execution.
func TestCutAtEachPoint(t *testing.T) {
	for _, point := range []string{"received", "executed", "replied"} {
		t.Run(point, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				var m mkdirs
				s.handle = m.handle
				var cuts atomic.Int32
				s.cut = func(p string, op metarpc.Op) bool {
					return op == metarpc.OpMakeNode && p == point && cuts.Add(1) <= 3
				}
				c := connected(t, s, Config{})
				for i := range 5 {
					if err := mkdir(t.Context(), c, fmt.Sprint("d", i)); err != nil {
						t.Fatal(err)
					}
				}
				for name, n := range m.count {
					if n != 1 {
						t.Errorf("%s was executed %d times", name, n)
					}
				}
				synctest.Wait()
				if len(m.count) != 5 || cuts.Load() < 3 {
					t.Errorf("%d directories, %d cuts", len(m.count), cuts.Load())
				}
			})
		})
	}
	t.Run("before sending", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newService(t)
			var m mkdirs
			s.handle = m.handle
			c := connected(t, s, Config{})
			s.hangUp()
			synctest.Wait() // the client has noticed and waits to connect again
			if st := c.State(); st.Connected || st.Problem == nil {
				t.Fatalf("state %+v", st)
			}
			if err := mkdir(t.Context(), c, "d"); err != nil || m.count["d"] != 1 {
				t.Errorf("%v, executed %d times", err, m.count["d"])
			}
			if st := c.State(); !st.Connected || st.Problem != nil || st.Reconnects != 1 || st.Busy != 0 {
				t.Errorf("state %+v", st)
			}
		})
	})
}

// churn makes directories from many goroutines while connections are cut at random.
func churn(t *testing.T, s *service, c func() *Client, workers, each int) {
	seed := mrand.Uint64()
	t.Logf("seed %d", seed)
	var mu sync.Mutex
	rng := mrand.New(mrand.NewPCG(seed, 1))
	var cuts atomic.Int32 // also after the last answer
	var m mkdirs
	s.handle = m.handle
	s.cut = func(string, metarpc.Op) bool {
		mu.Lock()
		defer mu.Unlock()
		if rng.IntN(100) < 2 {
			cuts.Add(1)
			return true
		}
		return false
	}
	client := c()
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				if err := mkdir(t.Context(), client, fmt.Sprintf("%d-%d", w, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.count) != workers*each {
		t.Errorf("%d directories, want %d", len(m.count), workers*each)
	}
	for name, n := range m.count {
		if n != 1 {
			t.Errorf("%s was executed %d times", name, n)
		}
	}
	if cuts.Load() == 0 {
		t.Error("nothing was cut")
	}
	t.Logf("%d cuts", cuts.Load())
}

func TestChurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		churn(t, s, func() *Client { return connected(t, s, Config{}) }, 40, 50)
	})
}

func TestChurnTCP(t *testing.T) {
	s := newService(t)
	churn(t, s, func() *Client {
		c, err := Dial(t.Context(), Config{Addrs: []string{s.listen()}, Log: quiet()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			c.Close(ctx)
		})
		return only(c)
	}, 8, 20)
}

func TestDialErrors(t *testing.T) {
	raw := func(bytes string) func(net.Conn, *metarpc.Welcome) bool {
		return func(nc net.Conn, w *metarpc.Welcome) bool {
			nc.Write([]byte(bytes))
			return false
		}
	}
	for _, c := range []struct {
		name    string
		welcome func(net.Conn, *metarpc.Welcome) bool
		want    string
	}{
		{"hangs up", raw(""), "service:7049 has closed the connection without an answer"},
		{"another protocol", raw("HTTP/1.1 400 Bad Request\r\n\r\n"), "service:7049 is not a weft metadata service"},
		{"wrong magic", raw("\x00\x00\x00\x08\x92\x01\xa5weird"), "service:7049 is not a weft metadata service"},
		{"huge frame", raw("\x00\x40\x00\x00"), "service:7049 is not a weft metadata service"},
		{"cut", raw("\x00\x00\x00\x08\x92\x01"), "service:7049 has closed the connection without an answer"},
		{"silence", func(net.Conn, *metarpc.Welcome) bool { time.Sleep(time.Hour); return false }, "service:7049 accepts connections but does not answer"},
		{"version", func(nc net.Conn, w *metarpc.Welcome) bool {
			w.Version, w.Status, w.Message = 99, metarpc.StatusVersion, metarpc.Mismatch(metarpc.Spoken, metarpc.Versions{Lowest: 99, Highest: 100})
			return true
		}, "metadata service at service:7049: the client speaks " + metarpc.Spoken.String() + " of the metadata protocol, the service versions 99 to 100: upgrade weft on the client"},
		{"version without a status", func(nc net.Conn, w *metarpc.Welcome) bool {
			w.Version = 99
			return true
		}, "service:7049 answers in version 99 of the metadata protocol, this weft speaks " + metarpc.Spoken.String()},
		{"shutdown", func(nc net.Conn, w *metarpc.Welcome) bool {
			w.Status, w.Message = metarpc.StatusShutdown, "back soon"
			return true
		}, "the metadata service at service:7049 cannot serve now: back soon"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				s.welcome = c.welcome
				began := time.Now()
				_, err := start(t.Context(), Config{Addrs: []string{"service:7049"}, Log: quiet()}, s.dial)
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %q", err, c.want)
				}
				if took := time.Since(began); took > helloTimeout {
					t.Errorf("took %v", took)
				}
			})
		})
	}

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := ln.Addr().String()
	ln.Close()
	if _, err := Dial(t.Context(), Config{Addrs: []string{closed}}); err == nil || !errors.Is(err, syscall.ECONNREFUSED) ||
		!strings.HasPrefix(err.Error(), "connection refused at "+closed+": is weftd meta running there?") {
		t.Errorf("refused: %v", err)
	}
	noHost := func(context.Context, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "nowhere", IsNotFound: true}}
	}
	if _, err := start(t.Context(), Config{Addrs: []string{"nowhere:7049"}}, noHost); err == nil || !strings.HasPrefix(err.Error(), "no such host: nowhere ") {
		t.Errorf("no such host: %v", err)
	}
	if _, err := Dial(t.Context(), Config{Addrs: []string{"noport"}}); err == nil || !strings.Contains(err.Error(), "want HOST:PORT") {
		t.Errorf("no port: %v", err)
	}
	if _, err := Dial(t.Context(), Config{}); err == nil {
		t.Error("no address at all is taken")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(ctx, Config{Addrs: []string{closed}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// Addresses are tried in turn, and the error tells about each.
func TestAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var mu sync.Mutex
		alive := "b:1"
		dial := func(ctx context.Context, addr string) (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			if addr != alive {
				return nil, syscall.ECONNREFUSED
			}
			return s.dial(ctx, addr)
		}
		c, err := start(t.Context(), Config{Addrs: []string{"a:1", "b:1"}, Log: quiet()}, dial)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.State().Addr; got != "b:1" {
			t.Errorf("connected to %s", got)
		}
		mu.Lock()
		alive = "a:1"
		mu.Unlock()
		s.hangUp()
		if _, err := c.StatFS(t.Context(), layout.RootID); err != nil || c.State().Addr != "a:1" {
			t.Errorf("%v, connected to %s", err, c.State().Addr)
		}
		mu.Lock()
		alive = ""
		mu.Unlock()
		s.hangUp()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = c.StatFS(ctx, layout.RootID)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "refused at a:1") || !strings.Contains(err.Error(), "refused at b:1") {
			t.Errorf("nobody there: %v", err)
		}
		if err := c.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close: %v", err)
		}
		s.stop()
	})
}

// blocker holds the calls of one op until it is opened.
type blocker struct {
	op   metarpc.Op
	gate chan struct{}
	next func(op metarpc.Op, args any) (metarpc.Status, any)
	ctx  context.Context
}

func (b *blocker) handle(op metarpc.Op, args any) (metarpc.Status, any) {
	if op == b.op {
		select {
		case <-b.gate:
		case <-b.ctx.Done():
		}
	}
	return b.next(op, args)
}

// A call whose caller has left keeps its slot, is sent again like others, and is executed once.
func TestAbandon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.slots = metarpc.MinSlots // two for ordinary calls
		var m mkdirs
		b := &blocker{op: metarpc.OpMakeNode, gate: make(chan struct{}), next: m.handle, ctx: s.ctx}
		s.handle = b.handle
		c := connected(t, s, Config{})
		for i := range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := mkdir(ctx, c, fmt.Sprint("d", i)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("abandoned call: %v", err)
			}
			cancel()
		}
		if busy := c.State().Busy; busy != 2 {
			t.Errorf("%d slots busy", busy)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.StatFS(ctx, layout.RootID); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("call without a free slot: %v", err)
		}
		if s.executed(metarpc.OpStatFS) != 0 {
			t.Error("it was sent all the same")
		}
		s.hangUp()
		time.Sleep(time.Second)
		close(b.gate)
		if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if m.count["d0"] != 1 || m.count["d1"] != 1 || c.State().Busy != 0 {
			t.Errorf("executed %v, busy %d", m.count, c.State().Busy)
		}
	})
}

// When the session is lost, calls that may have been executed and must not be twice fail, others go on.
func TestSessionLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var m mkdirs
		gate := make(chan struct{})
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpMakeNode || op == metarpc.OpGetAttr {
				select {
				case <-gate:
				case <-s.ctx.Done():
				}
			}
			return m.handle(op, args)
		}
		resets := make(chan [16]byte, 10)
		var c *Client
		c = connected(t, s, Config{OnReset: func(context.Context, int, bool) { resets <- c.Instance() }})
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: 77}); err != nil {
			t.Fatal(err)
		}
		session := c.State().Session

		sent, idempotent := make(chan error), make(chan error)
		go func() { sent <- mkdir(t.Context(), c, "sent") }()
		go func() {
			a, err := c.GetAttr(t.Context(), 5)
			if err == nil && a.Attr.ID != 5 {
				err = fmt.Errorf("inode %d", a.Attr.ID)
			}
			idempotent <- err
		}()
		synctest.Wait()
		s.forget()
		s.hangUp()
		synctest.Wait()
		unsent := make(chan error)
		go func() { unsent <- mkdir(t.Context(), c, "unsent") }()
		synctest.Wait()
		time.Sleep(time.Second)
		close(gate)

		var lost *OutcomeError
		if err := <-sent; !errors.As(err, &lost) || lost.Errno() != syscall.EIO || lost.Op != metarpc.OpMakeNode ||
			!errors.Is(err, errSessionGone) || !strings.Contains(err.Error(), "MAKENODE: outcome unknown") {
			t.Errorf("call that was sent: %v", err)
		}
		if err := <-idempotent; err != nil {
			t.Errorf("call that may be executed twice: %v", err)
		}
		if err := <-unsent; err != nil {
			t.Errorf("call that was not sent: %v", err)
		}
		<-resets
		if n := s.executed(metarpc.OpOpen); n != 2 {
			t.Errorf("OPEN was executed %d times, want once for each session", n)
		}
		if st := c.State(); st.Session == session || st.Busy != 0 {
			t.Errorf("state %+v", st)
		}
	})
}

// A service that answers a call with StatusBadSession did not execute it.
func TestBadSessionReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var m mkdirs
		s.handle = m.handle
		var told atomic.Bool
		s.early = func(op metarpc.Op) metarpc.Status {
			if op == metarpc.OpMakeNode && told.CompareAndSwap(false, true) {
				s.forget()
				return metarpc.StatusBadSession
			}
			return metarpc.StatusOK
		}
		c := connected(t, s, Config{})
		if err := mkdir(t.Context(), c, "d"); err != nil || m.count["d"] != 1 {
			t.Errorf("%v, executed %v", err, m.count)
		}
	})
}

// StatusShutdown makes the client come back and send the same call again.
func TestShutdownReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var m mkdirs
		s.handle = m.handle
		var refusals atomic.Int32
		s.early = func(op metarpc.Op) metarpc.Status {
			if op == metarpc.OpMakeNode && refusals.Add(1) <= 5 {
				return metarpc.StatusShutdown
			}
			return metarpc.StatusOK
		}
		resets := 0
		c := connected(t, s, Config{OnReset: func(context.Context, int, bool) { resets++ }})
		session := c.State().Session
		began := time.Now()
		if err := mkdir(t.Context(), c, "d"); err != nil || m.count["d"] != 1 {
			t.Errorf("%v, executed %v", err, m.count)
		}
		if took := time.Since(began); took < time.Second || took > 10*time.Second {
			t.Errorf("five refusals took %v: the back-off does not grow, or too much", took)
		}
		if c.State().Session != session || resets != 0 {
			t.Errorf("another session, or %d resets", resets)
		}
	})
}

// shutsDown has a service refuse calls with StatusShutdown once down is set.
func shutsDown(s *service) (down *atomic.Bool) {
	down = new(atomic.Bool)
	s.early = func(metarpc.Op) metarpc.Status {
		if down.Load() {
			return metarpc.StatusShutdown
		}
		return metarpc.StatusOK
	}
	return down
}

// A service that shuts down finishes the calls that it has begun. The client takes their answers after StatusShutdown.
func TestShutdownAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var m mkdirs
		executing := make(chan struct{}, 9)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpReserve {
				executing <- struct{}{}
				time.Sleep(time.Second)
				return metarpc.StatusOK, &metarpc.ReserveResult{Off: 5, Mtime: 1}
			}
			return m.handle(op, args)
		}
		down := shutsDown(s)
		c := connected(t, s, Config{})
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: 5}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var places []int64
		got := func(r metarpc.ReserveResult) { places = append(places, r.Off) }
		reserved := make(chan error)
		go func() { reserved <- c.Reserve(ctx, &metarpc.ReserveArgs{ID: 5, Len: 1}, got) }()
		<-executing
		down.Store(true)
		made := make(chan error)
		go func() { made <- mkdir(t.Context(), c, "d") }()
		began := time.Now()
		if err := <-reserved; err != nil || len(places) != 1 || s.executed(metarpc.OpReserve) != 1 || time.Since(began) > time.Second {
			t.Errorf("%v, places %v, %d executions, %v", err, places, s.executed(metarpc.OpReserve), time.Since(began))
		}
		down.Store(false)
		if err := <-made; err != nil || m.count["d"] != 1 {
			t.Errorf("%v, executed %v", err, m.count)
		}
	})
}

// A service that shuts down and does not end is left after a while.
func TestShutdownNeverEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		executing := make(chan struct{}, 2)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpReserve {
				executing <- struct{}{}
				<-s.ctx.Done()
			}
			if op == metarpc.OpOpen {
				return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: 5}}
			}
			return metarpc.StatusOK, nil
		}
		down := shutsDown(s)
		c := connected(t, s, Config{})
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: 5}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go c.Reserve(ctx, &metarpc.ReserveArgs{ID: 5, Len: 1}, func(metarpc.ReserveResult) {})
		<-executing
		down.Store(true)
		go mkdir(ctx, c, "d")
		synctest.Wait()
		hellos := func() int {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.hellos
		}
		before := hellos()
		time.Sleep(leaveWait - time.Second)
		if n := hellos(); n != before {
			t.Errorf("left at once: %d hellos", n-before)
		}
		time.Sleep(2 * time.Second)
		if n := hellos(); n == before {
			t.Error("still there")
		}
	})
}

// A restarted service keeps the session, but what it held in memory must be told again.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = layouts(t, nil)
		reset := make(chan struct{}, 10)
		var c *Client
		c = connected(t, s, Config{OnReset: func(ctx context.Context, _ int, lost bool) {
			if _, err := c.LayoutCommit(ctx, []metarpc.SizeReport{{ID: 9, End: 1}}, true); err != nil {
				t.Errorf("report: %v", err)
			}
			reset <- struct{}{}
		}})
		for id := range layout.FileID(30) {
			if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: id + 10}); err != nil {
				t.Fatal(err)
			}
		}
		c.Release(10)
		if _, err := c.Layout(t.Context(), 9, layout.IOModeRW, 0, 1, Anywhere); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		session := c.State().Session
		s.mu.Lock()
		s.instance = [16]byte{2}
		s.calls = nil
		s.mu.Unlock()
		s.hangUp()
		<-reset
		if got := s.executed(metarpc.OpOpen); got != 29 {
			t.Errorf("%d files were opened again, want 29", got)
		}
		if c.CachedLayout(9, layout.IOModeRW, 0, 1) != nil {
			t.Error("a layout survived")
		}
		if c.State().Session != session || c.Instance() != [16]byte{2} || s.executed(metarpc.OpLayoutCommit) != 1 {
			t.Errorf("state %+v, calls %v", c.State(), s.calls)
		}
		// A mere reconnect is no reset.
		s.hangUp()
		time.Sleep(time.Minute)
		if len(reset) != 0 || s.executed(metarpc.OpOpen) != 29 {
			t.Error("a reconnect was taken for a reset")
		}
	})
}

// A new reset ends the work on the one before, and they never run at once.
func TestResetsInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		running, runs := 0, 0
		c := connected(t, s, Config{OnReset: func(ctx context.Context, _ int, lost bool) {
			running++
			runs++
			if running > 1 {
				t.Error("two at once")
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Hour):
			}
			running--
		}})
		for range 3 {
			s.forget()
			s.hangUp()
			time.Sleep(time.Minute)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if runs != 3 || running != 0 {
			t.Errorf("%d runs, %d running", runs, running)
		}
		if c.State().Reconnects < 3 {
			t.Errorf("state %+v", c.State())
		}
	})
}

// Renew keeps an idle session alive, and only an idle one.
func TestRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		c := connected(t, s, Config{})
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		s.mu.Lock()
		frames := slices.Clone(s.frames)
		s.mu.Unlock()
		if len(frames) < 10 || len(frames) > 31 {
			t.Errorf("%d frames in 10 leases", len(frames))
		}
		for i := 1; i < len(frames); i++ {
			if gap := frames[i].Sub(frames[i-1]); gap > s.lease*2/3 {
				t.Errorf("nothing was sent for %v", gap)
			}
		}
		renews := s.executed(metarpc.OpRenew)
		for range 100 {
			if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if n := s.executed(metarpc.OpRenew); n > renews+1 {
			t.Errorf("%d times Renew while there were calls", n-renews)
		}
	})
}

// Renew has a slot of its own: calls that wait at the service do not cost the session.
func TestRenewWhenAllSlotsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		b := &blocker{op: metarpc.OpStatFS, gate: make(chan struct{}), ctx: s.ctx, next: func(metarpc.Op, any) (metarpc.Status, any) {
			return metarpc.StatusOK, nil
		}}
		s.handle = b.handle
		c := connected(t, s, Config{})
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(5 * time.Minute)
		if n := s.executed(metarpc.OpRenew); n < 10 {
			t.Errorf("%d times Renew in 10 leases", n)
		}
		if got := c.State().Reconnects; got != 0 {
			t.Errorf("%d reconnects", got)
		}
		close(b.gate)
		wg.Wait()
	})
}

// A peer that takes everything and answers nothing is given up within a lease.
func TestDeadPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.cut = func(point string, op metarpc.Op) bool { // swallows what comes on the first connection
			s.mu.Lock()
			deaf := s.hellos == 1
			s.mu.Unlock()
			if deaf {
				<-s.ctx.Done()
			}
			return false
		}
		c := connected(t, s, Config{})
		began := time.Now()
		if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > s.lease+backoffMin {
			t.Errorf("took %v", took)
		}
		if got := c.State().Reconnects; got != 1 {
			t.Errorf("%d reconnects", got)
		}
	})
}

// A service that is there again after a long time is found before a short lease is over.
func TestShortLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.lease = 3 * time.Second
		var away atomic.Bool
		s.welcome = func(net.Conn, *metarpc.Welcome) bool { return !away.Load() }
		c := connected(t, s, Config{})
		away.Store(true)
		s.hangUp()
		time.Sleep(10 * time.Minute)
		away.Store(false)
		began := time.Now()
		if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > s.lease/2 {
			t.Errorf("took %v", took)
		}
	})
}

// What a hostile service can send costs the connection, not the client.
func TestBadFrames(t *testing.T) {
	reply := func(h metarpc.ReplyHeader, result any) []byte {
		b, err := metarpc.AppendReply(nil, metarpc.Version, h, result)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, b := range map[string][]byte{
		"garbage":         []byte("garbage"),
		"no frame":        {0, 0, 0, 0},
		"huge frame":      {0xff, 0xff, 0xff, 0xff},
		"unknown kind":    {0, 0, 0, 2, 0x91, 9},
		"a call":          {0, 0, 0, 2, 0x91, 2},
		"unasked reply":   reply(metarpc.ReplyHeader{Slot: 3, Sequence: 1}, &metarpc.Empty{}),
		"unknown slot":    reply(metarpc.ReplyHeader{Slot: 200, Sequence: 1}, &metarpc.Empty{}),
		"wrong sequence":  reply(metarpc.ReplyHeader{Slot: 0, Sequence: 99}, &metarpc.Empty{}),
		"wrong shape":     {0, 0, 0, 3, 0x92, 3, 0xc0},
		"endless array":   {0, 0, 0, 8, 0x96, 3, 0, 1, 0, 0xa0, 0xdd, 0xff},
		"unasked renewal": reply(metarpc.ReplyHeader{Slot: 0, Sequence: 1}, &metarpc.Empty{}),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				var m mkdirs
				s.handle = m.handle
				c := connected(t, s, Config{})
				s.send(b)
				synctest.Wait()
				if c.State().Connected && name != "garbage" { // garbage may be the start of a long frame
					t.Error("the connection was kept")
				}
				s.hangUp()
				if err := mkdir(t.Context(), c, "d"); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A result that does not decode ends its call.
func TestBadResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			switch op {
			case metarpc.OpReadDir:
				return metarpc.StatusOK, &metarpc.ReadDirResult{Entries: []metarpc.DirEntry{{Name: "a", Cookie: 17, Attr: metarpc.Attr{ID: 2}}}}
			case metarpc.OpLayoutCommit:
				return metarpc.StatusOK, &metarpc.LayoutCommitResult{Attrs: make([]metarpc.Attr, 3)}
			case metarpc.OpLayoutGet:
				return metarpc.StatusOK, &metarpc.LayoutResult{Segments: []metarpc.Segment{{Len: 5}}}
			}
			return metarpc.StatusOK, &metarpc.StatFSResult{Free: 1 << 40}
		}
		c := connected(t, s, Config{})
		ctx := t.Context()
		if _, err := c.GetAttr(ctx, 1); !errors.Is(err, metarpc.ErrMalformed) {
			t.Errorf("another result: %v", err)
		}
		if _, err := c.ReadDir(ctx, metarpc.Cred{}, 1, 17, 10); !errors.Is(err, metarpc.ErrMalformed) {
			t.Errorf("page that does not go on: %v", err)
		}
		if r, err := c.ReadDir(ctx, metarpc.Cred{}, 1, 16, 10); err != nil || len(r.Entries) != 1 {
			t.Errorf("page: %v", err)
		}
		if _, err := c.LayoutCommit(ctx, []metarpc.SizeReport{{ID: 1}}, false); !errors.Is(err, metarpc.ErrMalformed) {
			t.Errorf("other reports: %v", err)
		}
		if _, err := c.Layout(ctx, 1, layout.IOModeRead, 0, 1, Anywhere); !errors.Is(err, metarpc.ErrMalformed) {
			t.Errorf("layout: %v", err)
		}
		if r, err := c.StatFS(ctx, layout.RootID); err != nil || r.Free != 1<<40 {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

// Another file system at the same address is not taken for the one mounted, and does not end its session: that knows no such one says nothing.
func TestOtherVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		c := connected(t, s, Config{})
		id := c.State().Session
		s.mu.Lock()
		volume, sessions := s.volume, s.sessions
		s.volume, s.sessions = [16]byte{0xbb}, map[metarpc.SessionID]*serviceSession{}
		s.mu.Unlock()
		s.hangUp()
		defer func() {
			s.mu.Lock()
			s.volume, s.sessions = volume, sessions
			s.mu.Unlock()
			if _, err := c.StatFS(t.Context(), layout.RootID); err != nil || c.State().Session != id {
				t.Errorf("back at its own volume: %v, session %x instead of %x", err, c.State().Session, id)
			}
		}()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := c.StatFS(ctx, layout.RootID)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "serves another file system") {
			t.Error(err)
		}
	})
}

func TestStatusError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = func(metarpc.Op, any) (metarpc.Status, any) { return metarpc.Status(syscall.ENOENT), nil }
		c := connected(t, s, Config{})
		_, err := c.Lookup(t.Context(), metarpc.Cred{}, 1, "a")
		var status *metarpc.Error
		if !errors.As(err, &status) || status.Errno() != syscall.ENOENT || status.Op != metarpc.OpLookup {
			t.Error(err)
		}
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: 7}); err == nil {
			t.Error("opened")
		}
		time.Sleep(time.Minute)
		if s.executed(metarpc.OpClose) != 0 {
			t.Error("what was never open was closed")
		}
	})
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		b := &blocker{op: metarpc.OpStatFS, gate: make(chan struct{}), ctx: s.ctx, next: func(metarpc.Op, any) (metarpc.Status, any) {
			return metarpc.StatusOK, nil
		}}
		s.handle = b.handle
		c := connected(t, s, Config{OnRecall: func(ctx context.Context, _ layout.FileID, _, _ int64) error {
			<-ctx.Done()
			return ctx.Err()
		}})
		waiting := make(chan error, 30)
		for range cap(waiting) {
			go func() { _, err := c.StatFS(t.Context(), layout.RootID); waiting <- err }()
		}
		s.recall(1, 5, 0, 1)
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		for range cap(waiting) {
			if err := <-waiting; !errors.Is(err, ErrClosed) {
				t.Errorf("call at close: %v", err)
			}
		}
		if s.executed(metarpc.OpEndSession) != 1 {
			t.Error("the session was not ended")
		}
		if _, err := c.StatFS(t.Context(), layout.RootID); !errors.Is(err, ErrClosed) {
			t.Errorf("call after close: %v", err)
		}
		if err := c.Close(t.Context()); err != nil {
			t.Errorf("second close: %v", err)
		}
		if s.hellos != 1 {
			t.Errorf("%d connections", s.hellos)
		}
	})
}

// Nothing of a client is left after Close, on real sockets too.
func TestNoGoroutineLeft(t *testing.T) {
	s := newService(t)
	c, err := Dial(t.Context(), Config{Addrs: []string{s.listen()}, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
		t.Fatal(err)
	}
	s.hangUp()
	if _, err := c.StatFS(t.Context(), layout.RootID); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	// Who has said that it is done may still be on its way out.
	buf := make([]byte, 1<<20)
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		stacks := string(buf[:runtime.Stack(buf, true)])
		if !strings.Contains(stacks, "metaclient.(*Client)") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("left:\n%s", stacks)
		}
	}
}

func TestDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		id := func(n byte) layout.DeviceID { return layout.DeviceID{n} }
		var mu sync.Mutex
		devices := []metarpc.DeviceInfo{{Device: metarpc.Device{ID: id(1), Addrs: []string{"192.0.2.1:2049"}, RSize: 1 << 20}}}
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			mu.Lock()
			defer mu.Unlock()
			if op == metarpc.OpDevices {
				return metarpc.StatusOK, &metarpc.DevicesResult{Devices: slices.Clone(devices)}
			}
			return metarpc.StatusOK, nil
		}
		var told atomic.Int32
		c := connected(t, s, Config{OnDevices: func() { told.Add(1) }})
		ask := func(n byte, want string, calls int) {
			t.Helper()
			d, err := c.Device(t.Context(), id(n))
			got := ""
			if err == nil {
				got = d.Addrs[0].Addr.String()
			}
			if got != want || s.executed(metarpc.OpDevices) != calls {
				t.Errorf("device %d: %q, %v after %d calls; want %q after %d", n, got, err, s.executed(metarpc.OpDevices), want, calls)
			}
		}
		ask(1, "192.0.2.1:2049", 1)
		ask(1, "192.0.2.1:2049", 1)
		ask(2, "", 2)
		mu.Lock()
		devices[0].Device.Addrs[0] = "192.0.2.9:2049"
		devices = append(devices, metarpc.DeviceInfo{Device: metarpc.Device{ID: id(2), Addrs: []string{"192.0.2.2:2049"}}},
			metarpc.DeviceInfo{Device: metarpc.Device{ID: id(3)}}) // whose name the service could not look up
		mu.Unlock()
		ask(2, "192.0.2.2:2049", 3)
		ask(1, "192.0.2.9:2049", 3)
		ask(3, "", 4) // and the others are as they were
		if _, err := c.Device(t.Context(), id(3)); lockStatus(err) != metarpc.StatusLayoutUnavailable {
			t.Errorf("a device without an address: %v", err)
		}
		ask(2, "192.0.2.2:2049", 5)
		s.hangUp()
		synctest.Wait()
		time.Sleep(time.Second)
		ask(1, "192.0.2.9:2049", 6)
		if n := told.Load(); n != 2 {
			t.Errorf("told %d times with two connections", n)
		}

		// It moves, of which the service tells.
		mu.Lock()
		devices[0].Device.Addrs = []string{"192.0.2.10:2049", "192.0.2.11:2049"}
		mu.Unlock()
		ask(1, "192.0.2.9:2049", 6)
		s.tellStates(t, 1, 1)
		ask(1, "192.0.2.10:2049", 7)
		if n := told.Load(); n != 3 {
			t.Errorf("told %d times after news of devices", n)
		}
	})
}

// Every wrapper asks for what it says and hands back what was answered.
func TestCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var got any
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			got = args
			attr := metarpc.Attr{ID: 42}
			switch r := op.NewResult().(type) {
			case *metarpc.AttrResult:
				r.Attr = attr
				return metarpc.StatusOK, r
			case *metarpc.LookupResult:
				r.Attr = attr
				return metarpc.StatusOK, r
			case *metarpc.BytesResult:
				r.Value = []byte("value")
				return metarpc.StatusOK, r
			case *metarpc.NamesResult:
				r.Names = []string{"user.a"}
				return metarpc.StatusOK, r
			case *metarpc.Described:
				r.StripeUnit = 42
				return metarpc.StatusOK, r
			case *metarpc.AddDeviceResult:
				r.Info = metarpc.DeviceInfo{URL: "u", Device: metarpc.Device{Addrs: []string{"192.0.2.1:1"}}}
				return metarpc.StatusOK, r
			case *metarpc.StatusResult:
				r.Program = "weftd"
				return metarpc.StatusOK, r
			case *metarpc.LayoutCommitResult:
				r.Attrs = make([]metarpc.Attr, len(args.(*metarpc.LayoutCommitArgs).Reports))
				r.Attrs[0] = attr
				return metarpc.StatusOK, r
			}
			return metarpc.StatusOK, nil
		}
		c := connected(t, s, Config{})
		ctx, cred := t.Context(), metarpc.Cred{UID: 5}
		number := func(a Answer, err error) (any, error) { return a.Attr.ID, err }
		for _, call := range []struct {
			name string
			do   func() (any, error)
			want any // the result
			args string
		}{
			{"getattr", func() (any, error) { return number(c.GetAttr(ctx, 7)) }, layout.FileID(42), "&{ID:7}"},
			{"setattr", func() (any, error) {
				return number(c.SetAttr(ctx, cred, &metarpc.SetAttrArgs{ID: 7, Mask: metarpc.SetSize, Size: 3}))
			}, layout.FileID(42), "&{ID:7 Mask:8 Mode:0 UID:0 GID:0 Size:3 Atime:0 Mtime:0 Open:false}"},
			{"lookup", func() (any, error) { return number(c.Lookup(ctx, cred, 1, "n")) }, layout.FileID(42), "&{Parent:1 Name:n}"},
			{"link", func() (any, error) { return number(c.Link(ctx, cred, 7, 1, "n")) }, layout.FileID(42), "&{ID:7 Parent:1 Name:n}"},
			{"open", func() (any, error) {
				return number(c.Open(ctx, cred, &metarpc.OpenArgs{ID: 7, Access: metarpc.AccessRead}))
			}, layout.FileID(42), "&{ID:7 Access:4 Reclaim:false Pinned:{Device:00000000000000000000000000000000 Handle:[]}}"},
			{"remove", func() (any, error) { return nil, c.Remove(ctx, cred, 1, "n", true) }, nil, "&{Parent:1 Name:n Dir:true}"},
			{"rename", func() (any, error) {
				return nil, c.Rename(ctx, cred, &metarpc.RenameArgs{OldParent: 1, OldName: "a", NewParent: 2, NewName: "b", Flags: 1})
			}, nil, "&{OldParent:1 OldName:a NewParent:2 NewName:b Flags:1}"},
			{"readlink", func() (any, error) { return c.ReadLink(ctx, cred, 7) }, "value", "&{ID:7}"},
			{"getxattr", func() (any, error) {
				v, err := c.GetXattr(ctx, cred, 7, "user.a")
				return string(v), err
			}, "value", "&{ID:7 Name:user.a Value:[] Flags:0}"},
			{"setxattr", func() (any, error) { return nil, c.SetXattr(ctx, cred, 7, "user.a", []byte{1}, 2) }, nil, "&{ID:7 Name:user.a Value:[1] Flags:2}"},
			{"listxattr", func() (any, error) {
				v, err := c.ListXattr(ctx, cred, 7)
				return strings.Join(v, " "), err
			}, "user.a", "&{ID:7}"},
			{"removexattr", func() (any, error) { return nil, c.RemoveXattr(ctx, cred, 7, "user.a") }, nil, "&{ID:7 Name:user.a Value:[] Flags:0}"},
			{"describe", func() (any, error) {
				d, err := c.DescribeLayout(ctx, 7)
				return d.StripeUnit, err
			}, int64(42), "&{ID:7}"},
			{"add device", func() (any, error) {
				d, err := c.AddDevice(ctx, "nvme://h:1/n#1", true)
				return d.URL, err
			}, "u", "&{URL:nvme://h:1/n#1 Force:true}"},
			{"status", func() (any, error) {
				st, err := c.Status(ctx)
				return st.Program, err
			}, "weftd", "&{}"},
			{"layoutcommit", func() (any, error) {
				reports := make([]metarpc.SizeReport, metarpc.MaxBatch+1)
				for i := range reports {
					reports[i].ID = layout.FileID(i + 1)
				}
				attrs, err := c.LayoutCommit(ctx, reports, true)
				return fmt.Sprint(len(attrs), attrs[0].ID, attrs[metarpc.MaxBatch].ID), err
			}, fmt.Sprint(metarpc.MaxBatch+1, 42, 42), fmt.Sprintf("&{Reports:[{ID:%d End:0 Mtime:0 Atime:0 Written:[] Set:{Mask:0 Atime:0 Mtime:0 Ctime:0} Ended:[] GivenUp:[] Reserved:[] Used:0}] Provisional:true}", metarpc.MaxBatch+1)},
		} {
			result, err := call.do()
			args := strings.ReplaceAll(fmt.Sprintf("%+v", got), "_msgpack:{} ", "")
			args = strings.ReplaceAll(args, "_msgpack:{}", "")
			if err != nil || result != call.want || args != call.args {
				t.Errorf("%s: %v, %v with %s; want %v with %s", call.name, result, err, args, call.want, call.args)
			}
		}
	})
}

// benchService answers GETATTR over TCP with as little work as possible.
func benchService(b *testing.B) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	go func() {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		buf := make([]byte, 64<<10)
		if _, err := metarpc.ReadFrame(nc, nil, metarpc.MaxHello); err != nil {
			return
		}
		out, _ := metarpc.AppendWelcome(nil, &metarpc.Welcome{Magic: metarpc.Magic, Version: metarpc.Version, Session: metarpc.SessionID{1}, Volume: [16]byte{1}, Slots: 128, Lease: 30e9})
		nc.Write(out)
		have := 0
		for {
			n, err := nc.Read(buf[have:])
			if err != nil {
				return
			}
			have += n
			out = out[:0]
			for {
				if have < 4 {
					break
				}
				size := int(binary.BigEndian.Uint32(buf)) + 4
				if have < size {
					break
				}
				h, _, err := metarpc.ParseCall(buf[4:size], metarpc.Version)
				if err != nil {
					return
				}
				out, _ = metarpc.AppendReply(out, metarpc.Version, metarpc.ReplyHeader{Slot: h.Slot, Sequence: h.Sequence}, &metarpc.AttrResult{Attr: metarpc.Attr{ID: 1}})
				have = copy(buf, buf[size:have])
			}
			if _, err := nc.Write(out); err != nil {
				return
			}
		}
	}()
	return ln.Addr().String()
}

func BenchmarkGetAttr(b *testing.B) {
	for _, parallel := range []int{1, 16} {
		b.Run(fmt.Sprint("parallel-", parallel), func(b *testing.B) {
			c, err := Dial(context.Background(), Config{Addrs: []string{benchService(b)}, Log: quiet()})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				c.Close(ctx)
			}()
			b.ReportAllocs()
			b.ResetTimer()
			var wg sync.WaitGroup
			for w := range parallel {
				wg.Go(func() {
					for range (b.N + w) / parallel {
						if _, err := c.GetAttr(context.Background(), 1); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
