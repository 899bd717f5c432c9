package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// fakeLog is a discovery controller.
type fakeLog struct {
	generation uint64
	entries    []wire.DiscoveryEntry
	records    uint64 // if not 0, what the header says
	moves      int    // so many times the log changes while it is read
	refuse     error
	dials      int
	conn       *fakeLogConn
}

// fakeLogs are discovery controllers by address.
type fakeLogs struct {
	mu   sync.Mutex
	logs map[string]*fakeLog
}

type fakeLogConn struct {
	f      *fakeLogs
	log    *fakeLog
	cfg    Config
	closed bool
}

func (f *fakeLogs) dial(_ context.Context, cfg Config) (logReader, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.logs[cfg.Addr]
	if l == nil {
		return nil, fmt.Errorf("%s: no route", cfg.Addr)
	}
	l.dials++
	if l.refuse != nil {
		return nil, l.refuse
	}
	l.conn = &fakeLogConn{f: f, log: l, cfg: cfg}
	return l.conn, nil
}

func (c *fakeLogConn) Close() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.closed = true
	return nil
}

func (c *fakeLogConn) GetLogPage(_ context.Context, get wire.GetLogPage, b []byte) error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	l := c.log
	records := uint64(len(l.entries))
	if l.records != 0 {
		records = l.records
	}
	log := wire.DiscoveryHeader{Generation: l.generation, Records: records}.Append(nil)
	for i := range l.entries {
		log = l.entries[i].Append(log)
	}
	clear(b)
	if get.Offset < uint64(len(log)) {
		copy(b, log[get.Offset:])
	}
	if get.Offset > 0 && l.moves > 0 {
		l.moves--
		l.generation++
	}
	return nil
}

// change changes a log and says so.
func (f *fakeLogs) change(addr string, entries ...wire.DiscoveryEntry) {
	f.mu.Lock()
	l := f.logs[addr]
	l.entries = entries
	l.generation++
	c := l.conn
	open := c != nil && !c.closed
	f.mu.Unlock()
	if open {
		c.cfg.OnEvent(wire.EventDiscoveryChanged)
	}
}

// allow takes connections again.
func (f *fakeLogs) allow(addr string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.logs[addr].refuse = nil
}

// connected reports whether somebody is.
func (f *fakeLogs) connected(addr string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.logs[addr].conn
	return c != nil && !c.closed
}

// lose ends a connection; new ones are refused with err if that is not nil.
func (f *fakeLogs) lose(addr string, err error) {
	f.mu.Lock()
	l := f.logs[addr]
	l.refuse = err
	c := l.conn
	f.mu.Unlock()
	c.cfg.OnState(StateResetting)
}

func entry(subtype uint8, nqn, addr string) wire.DiscoveryEntry {
	i := strings.LastIndexByte(addr, ':')
	e := wire.DiscoveryEntry{Transport: wire.TransportTCP, Family: wire.FamilyIPv4, Subtype: subtype, SubsysNQN: nqn, Address: addr[:i], Service: addr[i+1:]}
	if strings.HasPrefix(addr, "[") {
		e.Family, e.Address = wire.FamilyIPv6, addr[1:i-1]
	}
	return e
}

func nvm(addr string) wire.DiscoveryEntry { return entry(wire.SubtypeNVM, testNQN, addr) }

func referral(addr string) wire.DiscoveryEntry {
	return entry(wire.SubtypeReferral, wire.DiscoveryNQN, addr)
}

const (
	discA = "192.0.2.11:8009"
	discB = "192.0.2.12:8009"
	discC = "192.0.2.13:8009"
)

func discoveryConfig(t *testing.T, addrs ...string) DiscoveryConfig {
	return DiscoveryConfig{
		Controller: Config{HostNQN: hostNQN, HostID: [16]byte{1}, Log: slog.New(slog.NewTextHandler(t.Output(), nil))},
		Addrs:      addrs,
	}
}

// TestDiscover: many entries, in pieces, some twice, some that cannot be used, and referrals that go round.
func TestDiscover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeLogs{logs: map[string]*fakeLog{discA: {}, discB: {}, discC: {refuse: errors.New("not today")}}}
		var want []string
		for i := range 30 {
			addr := fmt.Sprintf("192.0.2.%d:4420", 100+i)
			want = append(want, addr)
			f.logs[discA].entries = append(f.logs[discA].entries, nvm(addr), nvm(addr))
		}
		rdma, tls, bad, odd := nvm(addrA), nvm(addrA), nvm(addrA), nvm(addrA)
		rdma.Transport = wire.TransportRDMA
		tls.TREQ = wire.TREQSecure
		bad.Service = "http"
		odd.Family = 9
		self, twin := entry(wire.SubtypeDiscovery, wire.DiscoveryNQN, discA), entry(wire.SubtypeDiscovery, wire.DiscoveryNQN, "192.0.2.99:8009")
		twin.EFlags = wire.EFlagsDuplicate
		a := f.logs[discA]
		a.entries = append(a.entries, rdma, tls, bad, odd, self, twin, referral(discB), referral(discC))
		a.moves = 3
		f.logs[discB].entries = []wire.DiscoveryEntry{referral(discA), referral(discB), nvm("[2001:db8::1]:4420"), nvm(want[0])}
		want = append(want, "[2001:db8::1]:4420")
		d, err := discover(t.Context(), discoveryConfig(t, discA), f.dial)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(want)
		if got := d.Addrs(testNQN); !slices.Equal(got, want) {
			t.Errorf("addresses %v, want %v", got, want)
		}
		if len(d.Skipped) != 5 {
			t.Errorf("skipped: %q", d.Skipped)
		}
		if f.logs[discA].dials != 1 || f.logs[discB].dials != 1 {
			t.Errorf("connections: %d and %d", f.logs[discA].dials, f.logs[discB].dials)
		}
		if err := d.Missing("nqn.x", hostNQN, []string{discA}); !strings.Contains(err.Error(), testNQN) || !strings.Contains(err.Error(), hostNQN) {
			t.Errorf("missing: %v", err)
		}
		d2, err := DecodeDirectory(d.Encode())
		if err != nil || !slices.Equal(d2.Portals, d.Portals) || !slices.Equal(d2.Skipped, d.Skipped) {
			t.Errorf("decoded: %v, %v", d2, err)
		}
	})
}

func TestDiscoverErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeLogs{logs: map[string]*fakeLog{discA: {entries: []wire.DiscoveryEntry{nvm(addrA)}, moves: 1 << 30}, discB: {records: 1 << 40}, discC: {}}}
		for addr, want := range map[string]string{discA: "changes while it is read", discB: "1099511627776 records", "192.0.2.1:1": "no route"} {
			_, err := discover(t.Context(), discoveryConfig(t, addr), f.dial)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), addr) {
				t.Errorf("%s: %v, want %q", addr, err, want)
			}
		}
		// The next one in the list serves as well, and an empty log is no error.
		d, err := discover(t.Context(), discoveryConfig(t, discA, discB, discC), f.dial)
		if err != nil || len(d.Portals) != 0 {
			t.Errorf("%v, %v", d, err)
		}
		if _, err := discover(t.Context(), discoveryConfig(t), f.dial); err == nil {
			t.Error("nobody to ask is no error")
		}
	})
}

func TestDecodeDirectory(t *testing.T) {
	good := (&Directory{Portals: []Portal{{testNQN, addrA, discA}}}).Encode()
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 1
		if _, err := DecodeDirectory(bad); err == nil {
			t.Errorf("byte %d is wrong: decoded", i)
		}
		if _, err := DecodeDirectory(good[:i]); err == nil {
			t.Errorf("the first %d bytes: decoded", i)
		}
	}
	if _, err := DecodeDirectory(good); err != nil {
		t.Error(err)
	}
}

// TestRank: hosts spread evenly over discovery controllers, and stay with theirs when another one goes.
func TestRank(t *testing.T) {
	addrs := []string{discA, discB, discC}
	first := map[string]int{}
	for i := range 3000 {
		host := fmt.Sprintf("nqn.2024-01.weft.test:host%d", i)
		r := rank(host, addrs)
		first[r[0]]++
		if len(r) != 3 || !slices.Equal(r, rank(host, []string{discC, discB, discA, discB})) {
			t.Fatalf("%s: %v", host, r)
		}
		if without := rank(host, addrs[:2]); r[0] != discC && without[0] != r[0] {
			t.Fatalf("%s goes from %s to %s when %s is gone", host, r[0], without[0], discC)
		}
	}
	for _, addr := range addrs {
		if first[addr] < 800 || first[addr] > 1200 {
			t.Errorf("hosts: %v", first)
		}
	}
}

// TestFollow: entries and referrals come and go, connections are lost, and the last in the list takes over.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeLogs{logs: map[string]*fakeLog{discA: {}, discB: {}, discC: {}}}
		f.change(discA, nvm(addrA), referral(discC))
		f.change(discB, nvm(addrA), referral(discC))
		f.change(discC, nvm(addrB))
		var told [][]string
		cfg := discoveryConfig(t, discA, discB)
		cfg.OnChange = func(d *Directory) { told = append(told, d.Addrs(testNQN)) }
		d, err := follow(t.Context(), cfg, f.dial)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		check := func(want ...string) {
			t.Helper()
			synctest.Wait()
			now, checked := d.Now()
			if got := now.Addrs(testNQN); !slices.Equal(got, want) || !checked || !slices.Equal(told[len(told)-1], want) {
				t.Errorf("addresses %v, told %v, want %v", got, told[len(told)-1], want)
			}
		}
		check(addrA, addrB)
		if len(told) != 1 {
			t.Errorf("told %v before all were asked", told)
		}
		order := rank(hostNQN, cfg.Addrs)
		const addrX = "192.0.2.3:4420"
		f.change(discC, nvm(addrB), nvm(addrX))
		check(addrA, addrB, addrX)
		f.change(discC, nvm(addrX))
		check(addrA, addrX)
		f.change(order[0], nvm(addrA))
		check(addrA)
		if f.connected(discC) {
			t.Error("still connected to what nothing refers to")
		}
		f.change(order[0], nvm(addrA), referral(discC))
		check(addrA, addrX)

		// A lost connection changes nothing, and is made again.
		f.lose(discC, errors.New("gone"))
		time.Sleep(time.Minute)
		now, _ := d.Now()
		if got := now.Addrs(testNQN); !slices.Equal(got, []string{addrA, addrX}) || len(now.Skipped) != 1 {
			t.Errorf("with a referral that is gone: %v, skipped %q", got, now.Skipped)
		}
		f.allow(discC)
		time.Sleep(time.Minute)
		f.change(discC, nvm(addrB))
		check(addrA, addrB)

		f.change(order[1], nvm(addrX), referral(discC))
		f.lose(order[0], errors.New("gone"))
		check(addrB, addrX)
		if st := d.Stats(); st[0].Addr != order[1] || !st[0].Connected || len(st) != 2 {
			t.Errorf("%+v", st)
		}
		f.lose(order[1], errors.New("gone"))
		time.Sleep(time.Minute)
		check(addrB, addrX)
		if st := d.Stats(); st[0].Connected || st[0].Err == nil {
			t.Errorf("%+v", st)
		}
	})
}

// TestFollowKnown: what is remembered is told at once, and corrected when it was asked for; nothing is taken away while a referral has
// not answered.
func TestFollowKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeLogs{logs: map[string]*fakeLog{discA: {refuse: errors.New("booting")}, discC: {refuse: errors.New("booting")}}}
		var told [][]string
		cfg := discoveryConfig(t, discA)
		cfg.Known = &Directory{Portals: []Portal{{testNQN, addrA, discA}, {testNQN, addrB, discC}}}
		cfg.OnChange = func(d *Directory) { told = append(told, d.Addrs(testNQN)) }
		d, err := follow(t.Context(), cfg, f.dial)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		time.Sleep(time.Minute)
		synctest.Wait()
		if _, checked := d.Now(); checked || len(told) != 1 || !slices.Equal(told[0], []string{addrA, addrB}) {
			t.Errorf("told %v, checked %v", told, checked)
		}
		f.change(discA, nvm(addrA), referral(discC))
		f.allow(discA)
		time.Sleep(time.Minute)
		synctest.Wait()
		if now, checked := d.Now(); !checked || !slices.Equal(now.Addrs(testNQN), []string{addrA, addrB}) {
			t.Errorf("with a referral that does not answer: %v, checked %v", now, checked)
		}
		f.change(discC, nvm("192.0.2.3:4420"))
		f.allow(discC)
		time.Sleep(time.Minute)
		synctest.Wait()
		if now, _ := d.Now(); !slices.Equal(now.Addrs(testNQN), []string{addrA, "192.0.2.3:4420"}) {
			t.Errorf("in the end: %v", now)
		}
	})
}

func TestFollowErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeLogs{logs: map[string]*fakeLog{}}
		_, err := follow(t.Context(), discoveryConfig(t, discA, discB), f.dial)
		if err == nil || !strings.Contains(err.Error(), discA) || !strings.Contains(err.Error(), discB) {
			t.Errorf("got %v", err)
		}
	})
}

// TestFollowRandom: after whatever has happened, what is told in the end is what the logs say.
func TestFollowRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			addrs := []string{discA, discB, discC, "192.0.2.14:8009", "192.0.2.15:8009"}
			f := &fakeLogs{logs: map[string]*fakeLog{}}
			for _, addr := range addrs {
				f.logs[addr] = &fakeLog{}
			}
			cfg := discoveryConfig(t, addrs[0])
			cfg.Controller.Log = slog.New(slog.DiscardHandler)
			var last *Directory
			cfg.OnChange = func(d *Directory) { last = d }
			d, err := follow(t.Context(), cfg, f.dial)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			for range 50 {
				addr := addrs[r.IntN(len(addrs))]
				switch r.IntN(4) {
				case 0, 1:
					var entries []wire.DiscoveryEntry
					for range r.IntN(6) {
						entries = append(entries, nvm(fmt.Sprintf("192.0.2.%d:4420", 100+r.IntN(20))))
					}
					for range r.IntN(3) {
						entries = append(entries, referral(addrs[r.IntN(len(addrs))]))
					}
					f.change(addr, entries...)
				case 2:
					if f.connected(addr) {
						f.lose(addr, errors.New("gone"))
					}
				case 3:
					f.allow(addr)
				}
				time.Sleep(time.Duration(r.Int64N(int64(3 * time.Second))))
			}
			for addr := range f.logs {
				f.allow(addr)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			want, err := discover(t.Context(), cfg, f.dial)
			if err != nil {
				t.Fatal(err)
			}
			now, _ := d.Now()
			if !slices.Equal(now.Addrs(testNQN), want.Addrs(testNQN)) || last != nil && !slices.Equal(last.Addrs(testNQN), want.Addrs(testNQN)) {
				t.Errorf("%v, told %v, want %v", now, last, want)
			}
		})
	}
}
