package callers

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
)

// fake is a connection.
type fake struct {
	calls atomic.Uint64
	used  atomic.Bool
	ended atomic.Bool
}

func (f *fake) State() (uint64, bool) { return f.calls.Load(), f.used.Load() }
func (f *fake) End()                  { f.ended.Store(true) }

func from(s string) net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }

func enter(t *testing.T, table *Table, addr string) *fake {
	t.Helper()
	f := new(fake)
	if !table.Enter(f, from(addr)) {
		t.Fatalf("no room for %s", addr)
	}
	return f
}

// The connection of an address that was unused for longest makes room for another one of it, unless all are used.
func TestPerAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &Table{Most: 3}
		a, b, c := enter(t, table, "10.0.0.1:1"), enter(t, table, "10.0.0.1:2"), enter(t, table, "[::ffff:10.0.0.1]:3")
		all := []*fake{a, b, c}
		for _, f := range all {
			f.calls.Add(1)
		}
		time.Sleep(lookTime / 2)             // so that looks are between calls
		for _, f := range []*fake{c, a, b} { // the order of their last calls, as a look finds it
			f.calls.Add(1)
			time.Sleep(lookTime)
			synctest.Wait()
		}
		other := enter(t, table, "10.0.0.2:1")
		a.used.Store(true)
		all = append(all, enter(t, table, "10.0.0.1:4"))
		if !c.ended.Load() || a.ended.Load() || b.ended.Load() {
			t.Errorf("ended %v %v %v, want the third alone", a.ended.Load(), b.ended.Load(), c.ended.Load())
		}
		all = append(all, enter(t, table, "10.0.0.1:5"))
		if !b.ended.Load() || a.ended.Load() {
			t.Errorf("ended %v %v, want the second alone", a.ended.Load(), b.ended.Load())
		}
		for _, f := range all {
			f.used.Store(true)
		}
		if table.Enter(new(fake), from("10.0.0.1:6")) {
			t.Error("there is room though all are used")
		}
		if other.ended.Load() {
			t.Error("a connection of another address was ended")
		}
		for _, f := range append(all, other) {
			table.Leave(f)
		}
		if len(table.callers)+len(table.byAddr) > 0 {
			t.Errorf("%d connections of %d addresses are left", len(table.callers), len(table.byAddr))
		}
		time.Sleep(2 * lookTime) // the timer ends
	})
}

// When the share is used up the one that was unused for longest goes, wherever it comes from. An address has its own
// bound before.
func TestAll(t *testing.T) {
	if descriptors.Accepted.Size() > 2048 {
		out, err := exec.Command("sh", "-c", `ulimit -n 1024 && exec "$@"`, "sh", os.Args[0], "-test.run=^TestAll$", "-test.v").CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS: TestAll")) {
			t.Fatalf("in a process with few descriptors: %v\n%s", err, out)
		}
		return
	}
	synctest.Test(t, func(t *testing.T) {
		table := new(Table)
		var all []*fake
		first := enter(t, table, "10.9.9.9:9")
		for host := 0; len(all) < descriptors.Accepted.Size()-1; host++ {
			for range 200 {
				if len(all) == descriptors.Accepted.Size()-1 {
					break
				}
				f := enter(t, table, fmt.Sprintf("10.%d.%d.1:1", host/256, host%256))
				f.used.Store(true)
				all = append(all, f)
			}
		}
		if first.ended.Load() {
			t.Fatal("ended early")
		}
		all = append(all, enter(t, table, "10.8.8.8:8"))
		if !first.ended.Load() {
			t.Error("the first one is there")
		}
		all[len(all)-1].used.Store(true)
		if table.Enter(new(fake), from("10.7.7.7:7")) {
			t.Error("there is room though all are used")
		}
		table.Leave(first)
		if table.Enter(new(fake), from("10.7.7.7:7")) {
			t.Error("what was replaced has left room")
		}
		for _, f := range all {
			table.Leave(f)
		}
		if !descriptors.Accepted.Take() {
			t.Error("nothing is given back")
		}
		descriptors.Accepted.Give()
		time.Sleep(2 * lookTime)
	})
}

// A connection ends if its first call is late, or if it is idle for 10 minutes, but not while it is in use.
func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := new(Table)
		silent, calls, open := enter(t, table, "10.0.0.1:1"), enter(t, table, "10.0.0.1:2"), enter(t, table, "10.0.0.1:3")
		time.Sleep(firstTime - 1)
		calls.calls.Add(1)
		open.calls.Add(1)
		open.used.Store(true)
		synctest.Wait()
		if silent.ended.Load() {
			t.Error("ended early")
		}
		time.Sleep(2 * time.Nanosecond)
		synctest.Wait()
		if !silent.ended.Load() || calls.ended.Load() || open.ended.Load() {
			t.Errorf("after the time for the first call ended %v %v %v", silent.ended.Load(), calls.ended.Load(), open.ended.Load())
		}
		table.Leave(silent)
		time.Sleep(idleTime - firstTime)
		synctest.Wait()
		if calls.ended.Load() {
			t.Error("an idle one ended early")
		}
		time.Sleep(2 * lookTime)
		synctest.Wait()
		if !calls.ended.Load() || open.ended.Load() {
			t.Errorf("after 10 minutes ended %v %v", calls.ended.Load(), open.ended.Load())
		}
		table.Leave(calls)
		open.used.Store(false)
		time.Sleep(idleTime + 2*lookTime)
		synctest.Wait()
		if !open.ended.Load() {
			t.Error("what was closed is there after 10 minutes more")
		}
		table.Leave(open)
		time.Sleep(2 * lookTime)
	})
}

// A line a minute for each address, with how many there were in between; the memory for addresses is bounded.
func TestComplaints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Complaints
		pass := func(addr string, wantDropped int, want bool) {
			t.Helper()
			if dropped, ok := c.Pass(from(addr)); dropped != wantDropped || ok != want {
				t.Errorf("%s: %d, %v, want %d, %v", addr, dropped, ok, wantDropped, want)
			}
		}
		pass("10.0.0.1:1", 0, true)
		pass("10.0.0.1:2", 0, false)
		pass("10.0.0.1:3", 0, false)
		pass("10.0.0.2:1", 0, true)
		time.Sleep(complainEvery)
		pass("10.0.0.1:4", 2, true)
		pass("10.0.0.1:5", 0, false)
		for i := range 2 * maxAddrs {
			c.Pass(from(fmt.Sprintf("10.1.%d.%d:1", i/256, i%256)))
		}
		if len(c.byAddr) > maxAddrs+1 {
			t.Errorf("%d addresses are remembered", len(c.byAddr))
		}
		pass("10.2.0.1:1", 0, false)
		time.Sleep(complainEvery)
		pass("10.2.0.1:1", 0, true)
	})
}
