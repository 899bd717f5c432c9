package nfs3

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

const (
	// homeTime is how long after a failure an address is tried again whose connections have moved to others.
	homeTime = time.Minute
	// idleTime is after how long without a request a connection is closed, as the Linux client does.
	idleTime = 5 * time.Minute
)

// path is one address of the server. Guarded by Target.mu, but for what newPath has set.
type path struct {
	addr      netip.AddrPort
	ctx       context.Context // ends with the Target, or when the server is no longer to be found here
	leave     context.CancelFunc
	bad       bool // the latest attempt failed, and no connection has worked since
	fails     int  // attempts in a row that were no good
	notBefore time.Time
	scouted   bool // a scout is out
}

func (t *Target) newPath(addr netip.AddrPort) *path {
	p := &path{addr: addr}
	p.ctx, p.leave = context.WithCancel(t.ctx)
	return p
}

// left reports whether SetAddrs has taken the address away.
func (p *path) left() bool { return p.ctx.Err() != nil }

// SetAddrs makes addrs the addresses of the server, which may have moved. What waits goes to them, and connections to
// others end as soon as nothing is outstanding on them. After an error, which tells what is wrong with addrs, nothing
// has changed.
func (t *Target) SetAddrs(addrs []netip.AddrPort) error {
	if err := checkAddrs(t.cfg.Name, addrs); err != nil {
		return err
	}
	t.mu.Lock()
	t.setAddrs(addrs)
	t.mu.Unlock()
	t.Flush()
	return nil
}

func (t *Target) setAddrs(addrs []netip.AddrPort) {
	if t.closed {
		return
	}
	var paths []*path
	for _, addr := range addrs {
		at := func(p *path) bool { return p.addr == addr }
		if slices.ContainsFunc(paths, at) {
			continue
		}
		if i := slices.IndexFunc(t.paths, at); i >= 0 {
			paths = append(paths, t.paths[i])
		} else {
			paths = append(paths, t.newPath(addr))
		}
	}
	left := slices.DeleteFunc(slices.Clone(t.paths), func(p *path) bool { return slices.Contains(paths, p) })
	if len(left) == 0 && len(paths) == len(t.paths) {
		return // at most in another order
	}
	t.cfg.Log.Info("data server has other addresses", "server", t.cfg.Name, "addresses", addrs)
	for _, p := range left {
		p.leave()
	}
	t.paths = paths
	t.rehome()
	for _, s := range t.slots {
		if c := s.conn; c != nil && !c.dead && (s.path.left() || s.home == nil) {
			c.retire()
		}
	}
	t.dispatch()
}

// rehome makes each path the home of as many slots. A slot whose connection has to end keeps none: what waits gets
// another slot at once.
func (t *Target) rehome() {
	homes := map[*path]int{}
	var slots, homeless []*slot
	lane := t.lane()
	for _, s := range t.slots[:len(t.slots)-1] {
		switch c := s.conn; {
		case c != nil && !c.dead && s.path.left():
			s.home = nil
		case s.home != nil && !s.home.left():
			homes[s.home]++
		case s.running:
			s.home = nil
			homeless = append(homeless, s)
		default:
			s.forgive()
			continue
		}
		slots = append(slots, s)
	}
	for _, p := range t.paths {
		for range t.cfg.Connections - homes[p] {
			if len(homeless) > 0 {
				homeless[0].home, homeless = p, homeless[1:]
			} else {
				slots = append(slots, &slot{t: t, home: p, path: p})
			}
		}
	}
	if lane.home.left() {
		lane.home = t.paths[0]
	}
	t.slots = append(slots, lane)
	for _, s := range t.slots {
		if !s.running {
			s.path = s.home
		}
	}
}

// forgive takes away what the slot, which is given up, adds to the trouble.
func (s *slot) forgive() {
	if s.err == nil {
		return
	}
	s.err = nil
	if s.t.trouble.slots--; s.t.trouble.slots == 0 {
		s.t.trouble.since = time.Time{}
	}
}

// checkAddrs tells what is wrong with the addresses of a server.
func checkAddrs(name string, addrs []netip.AddrPort) error {
	if len(addrs) == 0 {
		return fmt.Errorf("nfs3: data server %q has no address", name)
	}
	for _, a := range addrs {
		if !a.IsValid() || a.Port() == 0 {
			return fmt.Errorf("nfs3: data server %q: bad address %q", name, a)
		}
	}
	return nil
}

func (p *path) failed(now time.Time) {
	p.bad = true
	p.fails++
	p.notBefore = now.Add(jitter(min(minDelay<<min(p.fails-1, 20), maxDelay)))
}

// route returns the path that s should use next: its home unless that is bad, then the good one with the fewest
// connections, and if there is none the one that may be tried first.
func (t *Target) route(s *slot) *path {
	best := s.home
	if best == nil {
		best = t.paths[0]
	}
	if !best.bad {
		return best
	}
	users := map[*path]int{}
	for _, o := range t.slots {
		if o != s && o.running {
			users[o.path]++
		}
	}
	for _, p := range t.paths {
		switch {
		case p.bad != best.bad:
			if best.bad {
				best = p
			}
		case p.bad && p.notBefore.Before(best.notBefore), !p.bad && users[p] < users[best]:
			best = p
		}
	}
	return best
}

// mindHome sees to it that the home of s, which has a connection elsewhere, is tried now and then.
func (t *Target) mindHome(s *slot) {
	if p := s.home; p != nil && s.path != p && !p.scouted {
		p.scouted = true
		t.wg.Add(1)
		go t.scout(p)
	}
}

// scout tries to connect to a path that failed until that works; then connections that moved away from it are given up
// one and all, as soon as nothing is outstanding on them, to be made at home. It ends also when nobody is away from home
// or the path is left.
func (t *Target) scout(p *path) {
	defer t.wg.Done()
	for {
		timer := time.NewTimer(jitter(t.homeAfter))
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			timer.Stop()
			return
		}
		t.mu.Lock()
		needed := false
		for _, s := range t.slots {
			needed = needed || s.conn != nil && s.home == p && s.path != p
		}
		bad := p.bad
		if !needed {
			p.scouted = false
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
		if bad {
			d := net.Dialer{Timeout: min(t.cfg.Timeout, maxDial)}
			nc, err := d.DialTCP(p.ctx, "tcp", netip.AddrPort{}, p.addr)
			if err != nil {
				continue
			}
			nc.Close()
		}
		t.mu.Lock()
		p.scouted = false
		p.notBefore = time.Time{}
		p.bad = false
		t.sendHome(p)
		t.mu.Unlock()
		return
	}
}

// sendHome retires the connections whose home is p, and that are elsewhere.
func (t *Target) sendHome(p *path) {
	for _, s := range t.slots {
		if c := s.conn; c != nil && !c.dead && s.home == p && s.path != p {
			c.retire()
		}
	}
}

// giveBack closes the connections on which nothing is outstanding, but leaves one. It returns how many it has closed.
func (t *Target) giveBack() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kept := false
	for _, s := range t.slots {
		c := s.conn
		switch {
		case c == nil || c.dead:
		case c.count == 0 && kept:
			c.fail(errIdle)
			n++
		default:
			kept = true
		}
	}
	return n
}

// up is how many connections there are for large requests.
func (t *Target) up() int {
	n := 0
	for _, s := range t.slots[:len(t.slots)-1] {
		if c := s.conn; c != nil && !c.dead {
			n++
		}
	}
	return n
}
