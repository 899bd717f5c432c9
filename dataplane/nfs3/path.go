package nfs3

import (
	"net"
	"net/netip"
	"time"
)

const (
	// homeTime is how long after a failure an address is tried again whose connections have moved to others.
	homeTime = time.Minute
	// idleTime is after how long without a request a connection is closed, as the Linux client does.
	idleTime = 5 * time.Minute
)

// path is one address of the server. Guarded by Target.mu.
type path struct {
	addr      netip.AddrPort
	bad       bool // the latest attempt failed, and no connection has worked since
	fails     int  // attempts in a row that were no good
	notBefore time.Time
	scouted   bool // a scout is out
}

func (p *path) failed(now time.Time) {
	p.bad = true
	p.fails++
	p.notBefore = now.Add(jitter(min(minDelay<<min(p.fails-1, 20), maxDelay)))
}

// route returns the path that s should use next: its home unless that is bad, then the good one with the fewest
// connections, and if there is none the one that may be tried first.
func (t *Target) route(s *slot) int {
	if !t.paths[s.home].bad {
		return s.home
	}
	users := make([]int, len(t.paths))
	for i := range t.slots {
		if o := &t.slots[i]; o != s && o.running {
			users[o.path]++
		}
	}
	best := s.home
	for i := range t.paths {
		p, b := &t.paths[i], &t.paths[best]
		switch {
		case p.bad != b.bad:
			if b.bad {
				best = i
			}
		case p.bad && p.notBefore.Before(b.notBefore), !p.bad && users[i] < users[best]:
			best = i
		}
	}
	return best
}

// mindHome sees to it that the home of s, which has a connection elsewhere, is tried now and then.
func (t *Target) mindHome(s *slot) {
	if p := &t.paths[s.home]; s.path != s.home && !p.scouted {
		p.scouted = true
		t.wg.Add(1)
		go t.scout(s.home)
	}
}

// scout tries to connect to a path that failed until that works; then connections that moved away from it are given up
// one and all, as soon as nothing is outstanding on them, to be made at home. It ends also when nobody is away from home
// or the Target is closed.
func (t *Target) scout(i int) {
	defer t.wg.Done()
	for {
		timer := time.NewTimer(jitter(t.homeAfter))
		select {
		case <-timer.C:
		case <-t.ctx.Done():
			timer.Stop()
			return
		}
		t.mu.Lock()
		p := &t.paths[i]
		needed := false
		for k := range t.slots {
			s := &t.slots[k]
			needed = needed || s.conn != nil && s.home == i && s.path != i
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
			nc, err := d.DialTCP(t.ctx, "tcp", netip.AddrPort{}, p.addr)
			if err != nil {
				continue
			}
			nc.Close()
		}
		t.mu.Lock()
		p.scouted = false
		p.notBefore = time.Time{}
		t.works(i)
		t.sendHome(i)
		t.mu.Unlock()
		return
	}
}

// works notes that a path can be used.
func (t *Target) works(i int) { t.paths[i].bad = false }

// sendHome retires the connections whose home is path i, and that are elsewhere.
func (t *Target) sendHome(i int) {
	for k := range t.slots {
		s := &t.slots[k]
		if c := s.conn; c != nil && !c.dead && s.home == i && s.path != i {
			c.retired = true
			if c.count == 0 {
				c.fail(errRetired)
			}
		}
	}
}

// giveBack closes the connections on which nothing is outstanding, but leaves one. It returns how many it has closed.
func (t *Target) giveBack() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kept := false
	for i := range t.slots {
		c := t.slots[i].conn
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
	for i := range t.slots[:len(t.slots)-1] {
		if c := t.slots[i].conn; c != nil && !c.dead {
			n++
		}
	}
	return n
}
