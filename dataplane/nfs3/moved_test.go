package nfs3

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nfs3"

	"github.com/weftfs/weft/internal/waittest"
)

func setAddrs(t *testing.T, tg *Target, addrs ...netip.AddrPort) {
	t.Helper()
	if err := tg.SetAddrs(addrs); err != nil {
		t.Fatal(err)
	}
}

// TestMoved: what waits for a server that is gone from its address goes to the one that it has now.
func TestMoved(t *testing.T) {
	old := newServer(t)
	tg := newTarget(t, Config{}, old.addr)
	ok(t, tg, writeOp("f", 0, []byte("hello")))
	old.close()
	w := writeOp("f", 0, []byte("HELLO"))
	start(tg, w)
	waittest.Until(t, "failed attempts", func() bool { return tg.Stats().Err != nil })
	now := newServer(t)
	setAddrs(t, tg, now.addr)
	wait(t, w.done, "WRITE")
	if w.Err != nil || string(now.get("f")) != "HELLO" {
		t.Errorf("error %v, the server has %q", w.Err, now.get("f"))
	}
	waittest.Until(t, "the end of trouble", func() bool { return tg.Stats().Trouble.IsZero() })
	for _, c := range tg.Stats().Connections {
		if c.Addr != now.addr {
			t.Errorf("a connection to %v", c.Addr)
		}
	}
	for _, bad := range [][]netip.AddrPort{nil, {{}}, {now.addr, netip.AddrPortFrom(now.addr.Addr(), 0)}} {
		if tg.SetAddrs(bad) == nil {
			t.Errorf("%v are taken for addresses", bad)
		}
	}
	ok(t, tg, readOp("f", 0, 5))
}

// TestMovedFromSilence: an address that does not answer keeps nobody waiting once it is not the server's any more,
// but for what the server may have got there.
func TestMovedFromSilence(t *testing.T) {
	old, now := newServer(t), newServer(t)
	old.script = func(c *callInfo) *action { return &action{silent: c.proc == wire.ProcWrite} }
	now.put("f", []byte("hello"))
	tg := newTarget(t, Config{Connections: 1}, old.addr)
	w := writeOp("f", 0, []byte("HELLO"))
	start(tg, w)
	waittest.Until(t, "the WRITE comes", func() bool { return old.calls(wire.ProcWrite) > 0 })
	setAddrs(t, tg, now.addr)
	ok(t, tg, readOp("f", 0, 5))
	select {
	case <-w.done:
		t.Errorf("a WRITE ended that the old address had: %v", w.Err)
	default:
	}
	old.close()
	wait(t, w.done, "WRITE")
	if w.Err != nil || string(now.get("f")) != "HELLO" {
		t.Errorf("error %v, the server has %q", w.Err, now.get("f"))
	}
	waittest.Until(t, "as many connections as are configured", func() bool { return len(tg.Stats().Connections) == 2 })
}

// TestMovedWhileDialing: an attempt to connect ends when the address is not the server's any more.
func TestMovedWhileDialing(t *testing.T) {
	silent, now := silentAddress(t), newServer(t)
	tg := newTarget(t, Config{}, silent)
	w := writeOp("f", 0, []byte("hello"))
	start(tg, w)
	setAddrs(t, tg, now.addr)
	wait(t, w.done, "WRITE")
	if st := tg.Stats(); w.Err != nil || st.Err != nil { // the latter if it was waited for
		t.Errorf("error %v, of the connection %v", w.Err, st.Err)
	}
}

// TestMoreAddresses: an address that is added gets its connections, and one that is taken away loses them, while
// requests go on.
func TestMoreAddresses(t *testing.T) {
	srv := newServer(t)
	srv.put("f", make([]byte, 128<<10))
	a, b := newRelay(t, srv.addr), newRelay(t, srv.addr)
	tg := newTarget(t, Config{Connections: 2}, a.addr)
	stop := load(t, tg, 128<<10)
	defer stop()
	has := func(addrs ...netip.AddrPort) func() bool {
		return func() bool {
			up := map[netip.AddrPort]int{}
			conns := tg.Stats().Connections
			for _, c := range conns[:len(conns)-1] {
				if c.Up {
					up[c.Addr]++
				}
			}
			return len(conns) == 2*len(addrs)+1 && len(up) == len(addrs) && !slices.ContainsFunc(addrs, func(addr netip.AddrPort) bool { return up[addr] != 2 })
		}
	}
	waittest.Until(t, "two connections to the one address", has(a.addr))
	for range 3 {
		setAddrs(t, tg, a.addr, b.addr)
		waittest.Until(t, "two connections to each address", has(a.addr, b.addr))
		setAddrs(t, tg, b.addr)
		waittest.Until(t, "two connections to the other address", has(b.addr))
		waittest.Until(t, "none to the first", func() bool { return a.connections() == 0 })
		setAddrs(t, tg, a.addr)
		waittest.Until(t, "two connections to the first address", has(a.addr))
	}
	stop()
}

// TestMovesWhileConcurrent has many goroutines read and write their own ranges while the addresses change.
func TestMovesWhileConcurrent(t *testing.T) {
	srv := newServer(t)
	a, b := newRelay(t, srv.addr), newRelay(t, srv.addr)
	tg := newTarget(t, Config{}, a.addr)
	const workers, size, rounds = 8, 64 << 10, 30
	srv.put("f0", []byte{0})
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			name := fmt.Sprint("f", i%3)
			for k := range rounds {
				data := pattern(size, uint64(i*1000+k))
				ok(t, tg, writeOp(name, int64(i)*size, bytes.Clone(data)))
				r := readOp(name, int64(i)*size, size)
				ok(t, tg, r)
				if !bytes.Equal(r.Data, data) {
					t.Errorf("worker %d round %d differs", i, k)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for i := 0; ; i++ {
		set := [][]netip.AddrPort{{b.addr}, {a.addr, b.addr}, {a.addr}, {b.addr, a.addr}}[i%4]
		setAddrs(t, tg, set...)
		before := tg.Stats().Reads
		for tg.Stats().Reads < before+4 {
			select {
			case <-done:
				if st := tg.Stats(); st.Outstanding != 0 || st.Queued != 0 {
					t.Errorf("stats %+v", st)
				}
				return
			default:
				ok(t, tg, readOp("f0", 0, 1))
			}
		}
	}
}
