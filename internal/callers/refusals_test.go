package callers

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// Beyond the free ones refusals slow down their address, and no other one, until they no longer count.
func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Refusals{Free: 4}
		a, again, other := from("10.0.0.1:1"), from("[::ffff:10.0.0.1]:2"), from("10.0.0.2:1")
		turn := func(what string, a string, want time.Duration, ok bool) {
			t.Helper()
			if wait, got := r.Turn(from(a)); wait != want || got != ok {
				t.Errorf("%s: %v %v, want %v %v", what, wait, got, want, ok)
			}
		}
		for i := range 4 {
			if r.Refused(a) || r.Any() {
				t.Fatalf("slow after %d", i+1)
			}
		}
		turn("free ones", "10.0.0.1:1", 0, true)
		if !r.Refused(again) || !r.Any() {
			t.Fatal("not slow after five")
		}
		turn("one more", "10.0.0.1:3", refusalTime, true)
		turn("the next call", "10.0.0.1:3", 2*refusalTime, true)
		turn("another address", "10.0.0.2:1", 0, true)
		time.Sleep(3 * refusalTime)
		turn("paid", "10.0.0.1:1", 0, true)
		if r.Any() {
			t.Error("slow for ever")
		}

		for range 100_000 {
			r.Refused(a)
		}
		turn("very many", "10.0.0.1:1", 0, false)
		if r.Refused(other) {
			t.Error("another address is slow")
		}
		time.Sleep(refusalMost - turnTime)
		turn("after the longest time", "10.0.0.1:1", turnTime, true)
		time.Sleep(turnTime + refusalTime)
		turn("and after all", "10.0.0.1:1", 0, true)

		for range 5 {
			r.Refused(from("[2001:db8:0:1::1]:1"))
		}
		turn("the same network", "[2001:db8:0:1:2::2]:1", refusalTime, true)
		turn("another network", "[2001:db8:0:2::1]:1", 0, true)
	})
}

// Who has very many addresses does not make the server remember all, and is slowed down all the same.
func TestRefusalsOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Refusals{Free: 4}
		addr := netip.MustParseAddr("10.0.0.0")
		slow := 0
		for range 2 * maxAddrs {
			addr = addr.Next()
			if r.Refused(from(netip.AddrPortFrom(addr, 1).String())) {
				slow++
			}
		}
		if slow != maxAddrs-4 || len(r.counts) != maxAddrs+1 {
			t.Errorf("%d slow, %d remembered", slow, len(r.counts))
		}
		time.Sleep(time.Hour)
		r.Refused(from("10.1.0.1:1"))
		if len(r.counts) != 1 || r.Any() {
			t.Errorf("%d remembered", len(r.counts))
		}
	})
}
