package nfs3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// stage brings a request to where a test wants to interrupt it; release lets the server go on.
type stage struct {
	name    string
	arrange func(t *testing.T, srv *server, tg *Target, r *request) (release func())
}

const detachOff = 4096 // of the request under test; nothing else is there

func stages() []stage {
	unflushed := func(t *testing.T, srv *server, tg *Target, r *request) func() {
		ok(t, tg, readOp("warm", 0, 0)) // so that there is a connection
		tg.Start(&r.Op)
		return tg.Flush
	}
	gated := func(act func(gate <-chan struct{}) *action) func(t *testing.T, srv *server, tg *Target, r *request) func() {
		return func(t *testing.T, srv *server, tg *Target, r *request) func() {
			gate := make(chan struct{})
			var once sync.Once
			open := func() { once.Do(func() { close(gate) }) }
			t.Cleanup(open)
			arrived := make(chan struct{})
			var first sync.Once
			srv.script = func(c *callInfo) *action {
				if c.off != detachOff {
					return nil
				}
				var a *action
				first.Do(func() { a = act(gate); close(arrived) })
				return a
			}
			start(tg, r)
			wait(t, arrived, "the call")
			return open
		}
	}
	return []stage{
		{"before the limits are known", func(t *testing.T, srv *server, tg *Target, r *request) func() {
			gate := make(chan struct{})
			srv.script = func(c *callInfo) *action {
				if c.proc == wire.ProcFsinfo {
					return &action{wait: gate}
				}
				return nil
			}
			start(tg, r)
			waittest.Until(t, "FSINFO", func() bool { return srv.calls(wire.ProcFsinfo) == 1 })
			return func() { close(gate) }
		}},
		{"while there is no connection", func(t *testing.T, srv *server, tg *Target, r *request) func() {
			ok(t, tg, readOp("warm", 0, 0))
			addr := srv.addr
			srv.close()
			waittest.Until(t, "the loss", func() bool { return !tg.Stats().Connections[0].Up })
			start(tg, r)
			waittest.Until(t, "the failure", func() bool { return tg.Stats().Err != nil })
			return func() { srv.listen(t, addr.String()) }
		}},
		{"before Flush", unflushed},
		{"while the server works", gated(func(g <-chan struct{}) *action { return &action{wait: g} })},
		{"before the reply", gated(func(g <-chan struct{}) *action { return &action{after: g} })},
		{"before the reply that never comes", gated(func(g <-chan struct{}) *action { return &action{wait: g, hangup: true} })},
		{"in the middle of the reply", func(t *testing.T, srv *server, tg *Target, r *request) func() {
			gate, halfway := make(chan struct{}), make(chan struct{})
			var once sync.Once
			srv.script = func(c *callInfo) (a *action) {
				if c.off == detachOff {
					once.Do(func() { a = &action{half: gate, halfway: halfway} })
				}
				return a
			}
			start(tg, r)
			wait(t, halfway, "half of the reply")
			time.Sleep(10 * time.Millisecond) // for the reader to take what is there
			return func() { close(gate) }
		}},
		{"during a back-off", func(t *testing.T, srv *server, tg *Target, r *request) func() {
			srv.script = func(c *callInfo) *action {
				if c.off == detachOff && c.nth <= 2 {
					return &action{status: wire.ErrJukebox}
				}
				return nil
			}
			start(tg, r)
			waittest.Until(t, "JUKEBOX", func() bool { return tg.Stats().Delayed == 1 })
			return func() {}
		}},
	}
}

// TestDetach interrupts a request at every stage. After Detach the test owns the buffer and scribbles over it: a READ
// must not change it any more, a WRITE must not have used what was scribbled.
func TestDetach(t *testing.T) {
	const size = 300000
	data := pattern(detachOff+size, 20)
	scribble := bytes.Repeat([]byte{0x5a}, size)
	for _, st := range stages() {
		t.Run("READ "+st.name, func(t *testing.T) {
			srv := newServer(t)
			srv.put("f", data)
			tg := newTarget(t, Config{Connections: 1}, srv.addr)
			r := readOp("f", detachOff, size)
			release := st.arrange(t, srv, tg, r)
			tg.Detach(&r.Op)
			copy(r.Data, scribble)
			select {
			case <-r.done:
			default:
				t.Fatal("Done was not called before Detach returned")
			}
			if !errors.Is(r.Err, context.Canceled) || r.Target != nil {
				t.Errorf("error %v, target %v", r.Err, r.Target)
			}
			tg.Detach(&r.Op) // again, for nothing
			release()
			after := readOp("f", 0, 1000)
			ok(t, tg, after)
			if !bytes.Equal(r.Data, scribble) {
				t.Error("the buffer was touched after Detach")
			}
			if !bytes.Equal(after.Data, data[:1000]) {
				t.Error("contents differ")
			}
			waittest.Until(t, "the remains to go", func() bool { return tg.Stats().Outstanding == 0 })
		})
		t.Run("WRITE "+st.name, func(t *testing.T) {
			srv := newServer(t)
			tg := newTarget(t, Config{Connections: 1}, srv.addr)
			r := writeOp("f", detachOff, bytes.Clone(data[detachOff:]))
			release := st.arrange(t, srv, tg, r)
			select {
			case <-r.done:
				t.Fatal("too early")
			default:
			}
			tg.Detach(&r.Op)
			copy(r.Data, scribble)
			tg.Detach(&r.Op)
			release()
			wait(t, r.done, "the WRITE")
			if r.Err != nil || r.N != size {
				t.Errorf("%d bytes, error %v", r.N, r.Err)
			}
			if got := srv.get("f"); !bytes.Equal(got[detachOff:], data[detachOff:]) {
				t.Error("the buffer was used after Detach")
			}
		})
		t.Run("COMMIT "+st.name, func(t *testing.T) {
			if st.name == "before the limits are known" {
				t.Skip("a COMMIT does not wait for them")
			}
			srv := newServer(t)
			tg := newTarget(t, Config{Connections: 1}, srv.addr)
			r := newOp(layout.OpCommit, "f", detachOff, nil)
			release := st.arrange(t, srv, tg, r)
			tg.Detach(&r.Op)
			wait(t, r.done, "the COMMIT")
			if !errors.Is(r.Err, context.Canceled) {
				t.Errorf("error %v", r.Err)
			}
			release()
			ok(t, tg, newOp(layout.OpCommit, "f", 0, nil))
			waittest.Until(t, "the remains to go", func() bool { return tg.Stats().Outstanding == 0 })
		})
	}
}

// TestDetachHalfSent: the server stops reading in the middle of a WRITE, so that the rest of the payload is still to be
// sent when the buffer is taken away.
func TestDetachHalfSent(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	tg := newTarget(t, Config{Connections: 1, WSize: MaxSize}, ln.Addr().(*net.TCPAddr).AddrPort())
	tg.limits = limitsKnown
	data := pattern(12<<20, 21)
	var rs []*request
	for range 2 {
		rs = append(rs, writeOp("f", 0, bytes.Clone(data)))
	}
	start(tg, rs...)
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := refuseJoin(c); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	if _, err := c.Read(buf); err != nil { // part of the first one is on its way
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	for _, r := range rs {
		begin := time.Now()
		tg.Detach(&r.Op)
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("Detach took %v", d)
		}
		clear(r.Data)
	}
	// Hand the stream to a real server, which is to see two sound WRITEs.
	srv := newServer(t)
	srv.mu.Lock()
	srv.script = func(ci *callInfo) *action {
		if ci.proc == wire.ProcWrite && !bytes.Equal(ci.data, data) {
			t.Error("the buffer was used after Detach")
		}
		return nil
	}
	stream := &prefixed{Conn: c, prefix: buf}
	srv.conns[stream] = true
	srv.mu.Unlock()
	srv.wg.Go(func() { srv.serve(stream, 1) })
	for _, r := range rs {
		wait(t, r.done, "WRITE")
		if r.Err != nil {
			t.Error(r.Err)
		}
	}
	if st := tg.Stats(); st.Connects != 1 {
		t.Errorf("%d connections: Detach broke one", st.Connects)
	}
}

// prefixed is a connection with bytes that were read already.
type prefixed struct {
	net.Conn
	prefix []byte
}

func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.prefix) > 0 {
		n := copy(b, p.prefix)
		p.prefix = p.prefix[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

// TestDetachRace detaches requests at random moments, all the time reusing the buffers.
func TestDetachRace(t *testing.T) {
	srv := newServer(t)
	data := pattern(64<<10, 22)
	srv.put("r", data)
	srv.script = func(c *callInfo) *action {
		switch rand.N(300) {
		case 0:
			return &action{hangup: true}
		case 1:
			return &action{limit: 1 + rand.N(c.n+1)}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 2}, srv.addr)
	rounds := 100
	if testing.Short() {
		rounds = 30
	}
	var detached atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			name := fmt.Sprint("w", i)
			buf := make([]byte, len(data))
			for k := range rounds {
				n := 1 + rand.N(len(data))
				r := newOp(layout.OpRead, "r", 0, buf[:n])
				if k%2 == 1 {
					copy(buf, data)
					r = newOp(layout.OpWrite, name, 0, buf[:n])
				}
				start(tg, r)
				if k%3 != 0 {
					for range rand.N(30) {
						time.Sleep(10 * time.Microsecond)
					}
					tg.Detach(&r.Op)
				}
				select {
				case <-r.done:
				default:
					if r.Kind == layout.OpRead && k%3 != 0 {
						// It was ending by itself while it was to be detached.
						detached.Add(-1)
					}
				}
				if k%3 != 0 {
					detached.Add(1)
					clear(buf)
				}
				wait(t, r.done, r.Kind.String())
				switch {
				case errors.Is(r.Err, context.Canceled) && k%3 != 0:
				case r.Err != nil || r.N != n:
					t.Errorf("%v: %d of %d bytes, error %v", r.Kind, r.N, n, r.Err)
				case r.Kind == layout.OpWrite && !bytes.Equal(srv.get(name)[:n], data[:n]):
					t.Errorf("WRITE of %d bytes: contents differ", n)
				case r.Kind == layout.OpRead && k%3 == 0 && !bytes.Equal(buf[:n], data[:n]):
					t.Errorf("READ of %d bytes: contents differ", n)
				}
				if k%3 != 0 && r.Kind == layout.OpRead {
					for _, b := range buf {
						if b != 0 {
							t.Error("the buffer was touched after Detach")
							break
						}
					}
				}
			}
		})
	}
	wg.Wait()
	if detached.Load() == 0 {
		t.Error("nothing was detached in time")
	}
	waittest.Until(t, "the remains to go", func() bool { return tg.Stats().Outstanding == 0 })
}
