package nfs3

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/porttest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// relay is another address of a server.
type relay struct {
	addr, to netip.AddrPort

	ln net.Listener

	mu      sync.Mutex
	closed  bool
	pairs   map[net.Conn]net.Conn // from clients, to the server
	stalled map[net.Conn]bool     // nothing is passed on any more
	wg      sync.WaitGroup
}

func newRelay(t *testing.T, to netip.AddrPort) *relay {
	r := &relay{to: to, pairs: map[net.Conn]net.Conn{}, stalled: map[net.Conn]bool{}, addr: netip.MustParseAddrPort(porttest.For(t))}
	r.open(t)
	t.Cleanup(func() { r.close(); r.wg.Wait() })
	return r
}

func (r *relay) open(t *testing.T) {
	ln, err := net.Listen("tcp", r.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	r.ln, r.addr = ln, ln.Addr().(*net.TCPAddr).AddrPort()
	r.mu.Lock()
	r.closed = false
	r.mu.Unlock()
	r.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", r.to.String())
			if err != nil {
				c.Close()
				continue
			}
			r.mu.Lock()
			r.pairs[c] = s
			if r.closed {
				c.Close()
				s.Close()
			}
			r.mu.Unlock()
			r.wg.Go(func() { r.copy(c, s, c) })
			r.wg.Go(func() {
				r.copy(s, c, c)
				c.Close()
				s.Close()
				r.mu.Lock()
				delete(r.pairs, c)
				r.mu.Unlock()
			})
		}
	})
}

func (r *relay) copy(dst io.Writer, src io.Reader, client net.Conn) {
	b := make([]byte, 64<<10)
	for {
		n, err := src.Read(b)
		if err != nil {
			return
		}
		r.mu.Lock()
		stalled := r.stalled[client]
		r.mu.Unlock()
		if stalled {
			continue
		}
		if _, err := dst.Write(b[:n]); err != nil {
			return
		}
	}
}

// close makes the address refuse connections, and ends those there are.
func (r *relay) close() {
	r.ln.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for c, s := range r.pairs {
		c.Close()
		s.Close()
	}
}

func (r *relay) connections() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.pairs)
}

// stall makes one connection stand still.
func (r *relay) stall() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.pairs {
		r.stalled[c] = true
		return
	}
}

// load keeps 16 large reads going until the function that it returns is called.
func load(t *testing.T, tg *Target, size int) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					ok(t, tg, readOp("f", 0, size))
				}
			}
		})
	}
	return sync.OnceFunc(func() { close(done); wg.Wait() })
}

// TestAddressesShare: connections are spread over all addresses, move when one fails, and come back when it works again,
// while requests go on.
func TestAddressesShare(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 128<<10))
	a, b := newRelay(t, srv.addr), newRelay(t, srv.addr)
	tg := newTarget(t, Config{Connections: 2}, a.addr, b.addr)
	tg.homeAfter = 50 * time.Millisecond
	stop := load(t, tg, 128<<10)
	defer stop()
	count := func(addr netip.AddrPort) (n int) {
		for _, c := range tg.Stats().Connections[:4] {
			if c.Up && c.Addr == addr {
				n++
			}
		}
		return n
	}
	waittest.Until(t, "two connections to each address", func() bool { return count(a.addr) == 2 && count(b.addr) == 2 })
	a.close()
	waittest.Until(t, "all connections at the other address", func() bool { return count(b.addr) == 4 })
	a.open(t)
	waittest.Until(t, "two connections to each address again", func() bool {
		return count(a.addr) == 2 && count(b.addr) == 2
	})
	waittest.Until(t, "the end of trouble", func() bool { return tg.Stats().Trouble.IsZero() })
	stop()
}

// TestSmallAndLarge: what is small does not wait on a connection that large requests have.
func TestSmallAndLarge(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 1<<20))
	gate := make(chan struct{})
	var mu sync.Mutex
	large, little := map[int]bool{}, map[int]bool{}
	srv.script = func(c *callInfo) *action {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case c.proc == wire.ProcRead && c.n == 1<<20:
			large[c.nc] = true
			return &action{wait: gate}
		case c.proc == wire.ProcGetattr || c.proc == wire.ProcCommit || c.proc == wire.ProcRead:
			little[c.nc] = true
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 2}, srv.addr)
	var rs []*request
	for range 40 { // more than the window takes
		rs = append(rs, readOp("f", 0, 1<<20))
	}
	start(tg, rs...)
	waittest.Until(t, "two connections with large requests", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(large) == 2
	})
	ok(t, tg, readOp("f", 0, 1000)) // makes the lane
	waittest.Until(t, "the lane", func() bool { return tg.Stats().Connections[2].Up })
	mu.Lock()
	clear(little)
	mu.Unlock()
	for range 10 {
		ok(t, tg, readOp("f", 0, smallSize), newOp(layout.OpCommit, "f", 0, nil))
		if _, err := tg.GetAttr(t.Context(), layout.Credential{}, []byte("f")); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	for nc := range little {
		if large[nc] {
			t.Errorf("small requests were sent on connection %d, where large ones are", nc)
		}
	}
	mu.Unlock()
	close(gate)
	for _, r := range rs {
		wait(t, r.done, "READ")
	}
	if len(large) != 2 {
		t.Errorf("large requests on %d connections, want 2", len(large))
	}
}

// TestStalled: one connection of two stands still and is replaced long before the timeout, whether the other one has
// requests or none.
func TestStalled(t *testing.T) {
	for _, busy := range []bool{true, false} {
		t.Run(fmt.Sprintf("busy=%t", busy), func(t *testing.T) {
			t.Parallel()
			srv := newServer(t)
			srv.put("f", make([]byte, 128<<10))
			r := newRelay(t, srv.addr)
			tg := newTarget(t, Config{Connections: 2, Timeout: 16 * time.Second}, r.addr)
			stop := load(t, tg, 128<<10)
			defer func() { stop() }()
			// One that is still being made would fail with another error.
			waittest.Until(t, "two connections", func() bool {
				conns := tg.Stats().Connections
				return conns[0].Up && conns[1].Up
			})
			if !busy {
				stop()
			}
			r.stall()
			if !busy {
				var rs []*request
				for range 16 {
					rs = append(rs, readOp("f", 0, 128<<10))
				}
				start(tg, rs...)
				stop = func() {
					for _, r := range rs {
						wait(t, r.done, "READ")
					}
				}
			}
			waittest.Until(t, "the end of the connection", func() bool { return tg.Stats().Err != nil })
			if st := tg.Stats(); !errors.Is(st.Err, errStalled) {
				t.Errorf("error %v", st.Err)
			}
		})
	}
}

// TestSlowCall: a call that takes long, alone on its connection while the other one is busy, is not sent again.
func TestSlowCall(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 1<<20))
	gate := make(chan struct{})
	nulls := make(chan struct{}, 100)
	srv.script = func(c *callInfo) *action {
		switch c.proc {
		case wire.ProcCommit:
			return &action{wait: gate}
		case wire.ProcNull:
			nulls <- struct{}{}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 2, Timeout: 8 * time.Second}, srv.addr)
	ok(t, tg, readOp("f", 0, 128<<10))
	slow := newOp(layout.OpCommit, "f", 0, nil)
	start(tg, slow)
	end := time.Now().Add(4 * time.Second) // four times the patience
	for asked := false; !asked || time.Now().Before(end); time.Sleep(time.Millisecond) {
		ok(t, tg, readOp("f", 0, 128<<10))
		select {
		case <-nulls:
			asked = true
		default:
		}
	}
	close(gate)
	wait(t, slow.done, "COMMIT")
	if st := tg.Stats(); slow.Err != nil || st.Resent != 0 || st.Err != nil {
		t.Errorf("error %v, stats %+v", slow.Err, st)
	}
}

// TestUnusedClose: connections without requests are closed after a while, and made again when there are some.
func TestUnusedClose(t *testing.T) {
	srv := newServer(t)
	tg := newTarget(t, Config{Connections: 1, Timeout: time.Second}, srv.addr)
	tg.idleAfter = 300 * time.Millisecond
	for range 2 {
		ok(t, tg, writeOp("f", 0, []byte("a")))
		waittest.Until(t, "the close", func() bool { return !tg.Stats().Connections[0].Up })
		if st := tg.Stats(); !st.Trouble.IsZero() || st.Err != nil {
			t.Errorf("stats %+v", st)
		}
	}
	if n := srv.connections(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// TestWindow has servers of several kinds answer, in simulated time.
func TestWindow(t *testing.T) {
	const conns, size = 4, 1 << 20
	for _, tc := range []struct {
		name  string
		takes func(ahead int) time.Duration // for a request with so many bytes ahead of it
		grows bool
	}{
		{"far", func(int) time.Duration { return 20 * time.Millisecond }, true},
		{"slow", func(ahead int) time.Duration { return time.Duration(ahead+size) * 10 }, false}, // 100 MB/s
		{"fast", func(ahead int) time.Duration { return 20*time.Millisecond + time.Duration(ahead/1000) }, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var w window
			w.init(size)
			w.connections(conns)
			if w.size != conns*2*(size+overhead) {
				t.Fatalf("%d bytes at first", w.size)
			}
			type call struct {
				r    rpc
				ends time.Time
			}
			now := time.Unix(1000, 0)
			var calls []*call
			for range 20000 {
				for w.admits(size + overhead) {
					c := &call{r: rpc{count: size, at: now}, ends: now.Add(tc.takes(w.used))}
					w.used += c.r.cost()
					calls = append(calls, c)
				}
				c := calls[0]
				calls = calls[1:]
				if now.Before(c.ends) {
					now = c.ends
				}
				w.answered(&c.r, now)
				w.used -= c.r.cost()
				if w.size < w.least || w.size > w.most {
					t.Fatalf("window of %d bytes, want %d to %d", w.size, w.least, w.most)
				}
			}
			if grown := w.size > w.most*3/4; grown != tc.grows || !grown && w.size > 3*w.least {
				t.Errorf("window of %d MiB after all, from %d to %d are possible", w.size>>20, w.least>>20, w.most>>20)
			}
		})
	}
}
