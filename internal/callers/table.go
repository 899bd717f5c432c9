package callers

import (
	"iter"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
)

const (
	// firstTime is how long the first call may take, and idleTime how long a connection may be unused. Unused
	// connections are looked for every lookTime.
	firstTime = 10 * time.Second
	idleTime  = 10 * time.Minute
	lookTime  = time.Minute
	// An address has 1/addressPart of all connections, and addressLeast at least.
	addressPart  = 8
	addressLeast = 256
)

// Conn is a connection that was accepted.
type Conn interface {
	// State returns how many calls have come, and whether the connection is in use even if no call comes. It does not
	// wait, and does not use the Table.
	State() (calls uint64, used bool)
	// End closes the connection. It does not wait, and does not use the Table.
	End()
}

// Table holds the connections of a server. Its methods may be called from any goroutine.
type Table struct {
	// Most is how many there may be of one address; 0: what doc.go says.
	Most int

	mu      sync.Mutex
	callers map[Conn]*caller
	byAddr  map[netip.Addr]map[*caller]struct{}
	looking bool // a timer is going to call look
}

// caller is a connection in a Table. Guarded by Table.mu.
type caller struct {
	conn  Conn
	addr  netip.Addr
	calls uint64      // when last looked at
	since time.Time   // when it was used last, as far as that was looked at
	first *time.Timer // nil: a call has come
	ended bool        // by the Table
}

// Enter takes a connection in, and Leave must follow. It reports false if there is no room: then the caller closes the
// connection, and does not call Leave.
func (t *Table) Enter(c Conn, from net.Addr) bool {
	addr := addrOf(from)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.callers == nil {
		t.callers, t.byAddr = map[Conn]*caller{}, map[netip.Addr]map[*caller]struct{}{}
	}
	most := t.Most
	if most == 0 {
		most = max(addressLeast, descriptors.Accepted.Size()/addressPart)
	}
	if len(t.byAddr[addr]) >= most && !t.evict(maps.Keys(t.byAddr[addr])) {
		return false
	}
	if !descriptors.Accepted.Take() {
		if !t.evict(maps.Values(t.callers)) {
			return false
		}
		descriptors.Accepted.TakeAnyway() // the other one is about to be closed
	}
	k := &caller{conn: c, addr: addr, since: time.Now()}
	k.first = time.AfterFunc(firstTime, func() { t.late(k) })
	t.callers[c] = k
	if t.byAddr[addr] == nil {
		t.byAddr[addr] = map[*caller]struct{}{}
	}
	t.byAddr[addr][k] = struct{}{}
	if !t.looking {
		t.looking = true
		time.AfterFunc(lookTime, t.look)
	}
	return true
}

// Leave takes in that a connection has ended.
func (t *Table) Leave(c Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.callers[c]
	k.first.Stop()
	delete(t.callers, c)
	if !k.ended {
		t.forget(k)
	}
	descriptors.Accepted.Give()
}

// forget has a caller not count for its address any more. mu is held.
func (t *Table) forget(k *caller) {
	delete(t.byAddr[k.addr], k)
	if len(t.byAddr[k.addr]) == 0 {
		delete(t.byAddr, k.addr)
	}
}

// end ends a connection. mu is held.
func (t *Table) end(k *caller) {
	k.ended = true
	t.forget(k)
	k.conn.End()
}

// evict ends the connection that was unused for longest, and reports false if all are in use. mu is held.
func (t *Table) evict(of iter.Seq[*caller]) bool {
	var oldest *caller
	now := time.Now()
	for k := range of {
		if !k.ended && !t.inUse(k, now) && (oldest == nil || k.since.Before(oldest.since)) {
			oldest = k
		}
	}
	if oldest == nil {
		return false
	}
	t.end(oldest)
	return true
}

// inUse looks at a connection. mu is held.
func (t *Table) inUse(k *caller, now time.Time) bool {
	calls, used := k.conn.State()
	if used || calls != k.calls {
		k.calls, k.since = calls, now
	}
	return used
}

// late ends a connection on which no call has come in time.
func (t *Table) late(k *caller) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if calls, used := k.conn.State(); calls == 0 && !used && !k.ended && t.callers[k.conn] == k {
		t.end(k)
	}
}

// look ends what was not used for long, as long as there are connections.
func (t *Table) look() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for _, k := range t.callers {
		if !k.ended && !t.inUse(k, now) && now.Sub(k.since) >= idleTime {
			t.end(k)
		}
	}
	if t.looking = len(t.callers) > 0; t.looking {
		time.AfterFunc(lookTime, t.look)
	}
}

// addrOf is the address without the port; none for what has no address, such as UNIX sockets.
func addrOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}
