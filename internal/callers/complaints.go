package callers

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// complainEvery is how often something is logged about an address, and maxAddrs how many addresses are told apart.
	complainEvery = time.Minute
	maxAddrs      = 1024
)

// Complaints limits what is logged about addresses. The zero Complaints is ready.
type Complaints struct {
	mu      sync.Mutex
	byAddr  map[netip.Addr]*complaint
	cleaned time.Time
}

type complaint struct {
	at      time.Time // of the last line
	dropped int       // since then
}

// Pass reports whether something may be logged about an address now, and how many times it might not since the last
// time.
func (c *Complaints) Pass(a net.Addr) (dropped int, ok bool) {
	addr, now := addrOf(a), time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byAddr == nil {
		c.byAddr = map[netip.Addr]*complaint{}
	}
	if len(c.byAddr) >= maxAddrs && now.Sub(c.cleaned) >= complainEvery {
		c.cleaned = now
		for addr, k := range c.byAddr {
			if now.Sub(k.at) >= complainEvery {
				delete(c.byAddr, addr)
			}
		}
	}
	k := c.byAddr[addr]
	if k == nil && len(c.byAddr) >= maxAddrs {
		addr = netip.Addr{}
		k = c.byAddr[addr]
	}
	if k == nil {
		c.byAddr[addr] = &complaint{at: now}
		return 0, true
	}
	if now.Sub(k.at) < complainEvery {
		k.dropped++
		return 0, false
	}
	dropped = k.dropped
	*k = complaint{at: now}
	return dropped, true
}
