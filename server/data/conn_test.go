package data

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/semaphore"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
)

// pipe connects to the server without a network. What serve returns comes on ended.
func (ts *testServer) pipe() (nc net.Conn, ended chan error) {
	nc, server := net.Pipe()
	ended = make(chan error, 1)
	go func() { ended <- newConn(ts.Server, server).serve() }() // ends with nc
	return nc, ended
}

// marked is a call with its record mark.
func marked(call oncrpc.Call, args []byte) []byte {
	b := rawCall(1, call, args)
	return append(oncrpctest.AppendRecordMark(nil, len(b), true), b...)
}

// A client that stops in the middle of a payload is cut off; one that has nothing to say is not.
func TestStalledPayload(t *testing.T) {
	ts := start(t, "")
	fh := ts.dial().create(ts.root, "f", 1, 1)
	write := marked(nfsCall(wire.ProcWrite, super), (&writeCall{wire.WriteArgs{FH: fh}, make([]byte, 100_000)}).Append(nil))
	synctest.Test(t, func(t *testing.T) {
		nc, ended := ts.pipe()
		go io.Copy(io.Discard, nc) // ends with nc
		begin := time.Now()
		for range 3 {
			nc.Write(write)
			time.Sleep(24 * time.Hour)
		}
		select {
		case err := <-ended:
			t.Fatalf("an idle connection was closed: %v", err)
		default:
		}
		nc.Write(write[:50_000])
		err := <-ended
		if err == nil || !strings.Contains(err.Error(), "the rest of a call") || time.Since(begin) != 72*time.Hour+stallTime {
			t.Errorf("closed after %v: %v", time.Since(begin), err)
		}
		// With the payload there, but not the end of the call, it is the same.
		nc, ended = ts.pipe()
		begin = time.Now()
		oncrpc.PutRecordMark(write, len(write), true)
		nc.Write(write)
		if err := <-ended; err == nil || time.Since(begin) != stallTime {
			t.Errorf("closed after %v: %v", time.Since(begin), err)
		}
	})
	ts.wantNoPayloads()
}

// A client that does not take its replies is cut off; until then it cannot make the server do more and more.
func TestRepliesNotTaken(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	c.setattr(super, fh, wire.Sattr{SetSize: true, Size: 1 << 30})
	getattr := marked(nfsCall(wire.ProcGetattr, super), fh.Append(nil))
	read := marked(nfsCall(wire.ProcRead, super), (&wire.ReadArgs{FH: fh, Count: maxIO}).Append(nil))
	for _, tt := range []struct {
		call []byte
		most int // that are taken
	}{
		{getattr, maxRequests + inputSize/len(getattr) + 1},
		{read, maxRequests + inputSize/len(read) + 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			nc, ended := ts.pipe()
			sent := 0
			go func() { // ends with nc
				for {
					if _, err := nc.Write(tt.call); err != nil {
						return
					}
					sent++
				}
			}()
			synctest.Wait()
			if sent > tt.most {
				t.Errorf("%d calls were taken, want at most %d", sent, tt.most)
			}
			if !ts.payloads.TryAcquire(maxPayloads - maxConnPayloads) {
				t.Error("one connection holds more payload than it may")
			} else {
				ts.payloads.Release(maxPayloads - maxConnPayloads)
			}
			begin := time.Now()
			err := <-ended
			if err == nil || !strings.Contains(err.Error(), "not taken") || time.Since(begin) > stallTime {
				t.Errorf("closed after %v: %v", time.Since(begin), err)
			}
		})
		ts.wantNoPayloads()
		ts.payloads.Release(maxPayloads)
	}
}

// What a client only announces takes no memory, or only what there is for all.
func TestAnnouncedBytes(t *testing.T) {
	const conns, room = 200, 16 << 20
	ts := start(t, "", func(s *Server) { s.payloads = semaphore.NewWeighted(room) })
	fh := ts.dial().create(ts.root, "f", 1, 1)
	null := rawCall(1, nfsCall(wire.ProcNull, super), nil)
	write := rawCall(1, nfsCall(wire.ProcWrite, super), (&wire.WriteArgs{FH: fh, Count: maxIO}).AppendHead(nil))
	for name, tt := range map[string]struct {
		b     []byte
		bound uint64
	}{
		"one record": {append(oncrpctest.AppendRecordMark(nil, maxIO, true), null...), 0},
		"fragments":  {append(oncrpctest.AppendRecordMark(nil, maxIO, false), null...), 0},
		"WRITE":      {append(oncrpctest.AppendRecordMark(nil, maxIO+len(write), true), write...), 2 * room},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		synctest.Test(t, func(t *testing.T) {
			for range conns {
				nc, ended := ts.pipe()
				nc.Write(tt.b)
				defer func() {
					nc.Close()
					<-ended
				}()
			}
			synctest.Wait()
		})
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > conns*128<<10+tt.bound {
			t.Errorf("%s: %d bytes allocated for %d connections", name, n, conns)
		}
	}
	if !ts.payloads.TryAcquire(room) {
		t.Error("memory for payloads was not given back")
	}
}

// Shutdown lets a request that was read end and be answered, and the client sees the end of the connection behind it.
func TestShutdownFinishes(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	waiting := c.send(nfsCall(wire.ProcWrite, super), (&writeCall{wire.WriteArgs{FH: fh}, []byte("data")}).Append(nil))
	for ts.refs(f) < 2 { // until the request has the file
	}
	// The next one has only begun.
	c.nc.Write(oncrpctest.AppendRecordMark(nil, 100, true))
	stopped := make(chan error, 1)
	go func() { stopped <- ts.Shutdown(t.Context()) }() // ends with the request
	for !ts.isClosing() {
	}
	select {
	case <-stopped:
		t.Error("Shutdown did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	f.mu.Unlock()
	ts.cache.put(f)
	var res wire.WriteRes
	if _, err := finish(waiting, &res); err != nil || res.Status != wire.OK {
		t.Errorf("%v, %v", res.Status, err)
	}
	if err := <-stopped; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if data, err := os.ReadFile(ts.export("f")); string(data) != "data" {
		t.Errorf("the file holds %q, %v", data, err)
	}
}

// A connection that the server ends while calls arrive is not reset before the client has its replies.
func TestShutdownIsNoReset(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	c.setattr(super, fh, wire.Sattr{SetSize: true, Size: maxIO})
	nc := ts.dialRaw()
	nc.(*net.TCPConn).SetReadBuffer(64 << 10)
	nc.Write(marked(nfsCall(wire.ProcRead, super), (&wire.ReadArgs{FH: fh, Count: maxIO - 1}).Append(nil)))
	for ts.payloads.TryAcquire(maxPayloads) { // until it is read; what has no padding would be sent without that
		ts.payloads.Release(maxPayloads)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- ts.Shutdown(t.Context()) }() // ends when nc has the reply
	for !ts.isClosing() {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(10 * time.Millisecond) // the reading goroutine ends
	nc.Write(marked(nfsCall(wire.ProcNull, super), nil))
	if rec, err := readRecord(nc); err != nil || len(rec) != wire.ReadReplyHead+maxIO {
		t.Errorf("%d bytes, %v", len(rec), err)
	}
	if _, err := nc.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the connection ended with %v", err)
	}
	nc.Close()
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// Clients that take no replies, or send half a call, hold Shutdown up only until its context ends.
func TestShutdownCuts(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	c.setattr(super, fh, wire.Sattr{SetSize: true, Size: 1 << 30})
	half := ts.dialRaw()
	half.Write(marked(nfsCall(wire.ProcWrite, super), (&writeCall{wire.WriteArgs{FH: fh}, make([]byte, 100_000)}).Append(nil))[:50_000])
	deaf := ts.dialRaw()
	deaf.(*net.TCPConn).SetReadBuffer(4096)
	read := marked(nfsCall(wire.ProcRead, super), (&wire.ReadArgs{FH: fh, Count: maxIO - 1}).Append(nil))
	for range 20 {
		deaf.Write(read)
	}
	most := int64(maxPayloads - maxConnPayloads + bufferSize(maxIO))
	for ts.payloads.TryAcquire(most) { // until READs hold all they may
		ts.payloads.Release(most)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if err := ts.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Shutdown: %v", err)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("Shutdown took %v", d)
	}
	ts.wantNoPayloads()
}

// Nothing is left of a server: no goroutine, no descriptor. Shutdown may be called by many.
func TestNothingIsLeft(t *testing.T) {
	needRoot(t)
	count := func() (goroutines, fds int) {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(list)
	}
	dir := t.TempDir()
	cycle := func() {
		s, err := Open(Config{Dir: dir, LocalDir: localDir, Log: testLog(t)})
		if err != nil {
			t.Fatal(err)
		}
		var serving sync.WaitGroup
		var conns []net.Conn
		for range 3 {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			serving.Go(func() {
				if err := s.Serve(l); err != nil {
					t.Errorf("Serve: %v", err)
				}
			})
			for range 5 {
				nc, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				conns = append(conns, nc)
				nc.Write(marked(nfsCall(wire.ProcCreate, super), (&wire.CreateArgs{Where: wire.DirOpArgs{Dir: s.rootFH, Name: "f"}}).Append(nil)))
				if _, err := readRecord(nc); err != nil {
					t.Fatal(err)
				}
			}
		}
		var stopping sync.WaitGroup
		for range 4 {
			stopping.Go(func() {
				if err := s.Shutdown(t.Context()); err != nil {
					t.Errorf("Shutdown: %v", err)
				}
			})
		}
		for _, nc := range conns {
			if _, err := nc.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("connection ended with %v", err)
			}
			nc.Close()
		}
		stopping.Wait()
		serving.Wait()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Serve(l); err != nil {
			t.Errorf("Serve after Shutdown: %v", err)
		}
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("its listener: %v", err)
		}
	}
	cycle() // what the runtime keeps open for ever is open now
	goroutines, fds := count()
	cycle()
	deadline := time.Now().Add(5 * time.Second)
	for {
		g, f := count()
		if g <= goroutines && f <= fds {
			break
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before; %d descriptors, %d before\n%s", g, goroutines, f, fds, buf[:runtime.Stack(buf, true)])
		}
		time.Sleep(time.Millisecond)
	}
}

// The number of connections is bounded: one that nobody uses makes room for another.
func TestTooManyConnections(t *testing.T) {
	ts := start(t, "", func(s *Server) { s.callers.Most = 2 })
	null := func(nc net.Conn) error {
		nc.Write(marked(nfsCall(wire.ProcNull, super), nil))
		_, err := readRecord(nc)
		return err
	}
	first := []net.Conn{ts.dialRaw(), ts.dialRaw()}
	works := func() (n int) {
		for _, nc := range first {
			if null(nc) == nil {
				n++
			}
		}
		return n
	}
	if n := works(); n != 2 {
		t.Fatalf("%d of 2 connections work", n)
	}
	use := func(n int32) {
		ts.mu.Lock()
		defer ts.mu.Unlock()
		for c := range ts.conns {
			c.sessions.Add(n)
		}
	}
	use(1)
	if null(ts.dialRaw()) == nil {
		t.Error("a third connection was served")
	}
	if n := works(); n != 2 {
		t.Errorf("%d of 2 connections that are in use work", n)
	}
	use(-1)
	err := null(ts.dialRaw())
	for n := 0; n < 100 && err != nil; n++ { // a client may have a reply before its call has ended
		err = null(ts.dialRaw())
	}
	if err != nil {
		t.Errorf("a third connection, when the others are not in use: %v", err)
	}
	if n := works(); n != 1 {
		t.Errorf("%d of the first connections work, want 1", n)
	}
}
