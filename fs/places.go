package fs

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
)

// place is where a name is: the node id of a directory, as the kernel knows it, and the name in it.
type place struct {
	parent uint64
	name   string
}

// places knows under which node ids the kernel knows directories, and where.
//
// The kernel has one dentry for each inode that is a directory. If a LOOKUP leads to such an inode at another place, because
// it was renamed on another mount, the dentry is moved there, unless that needs locks which rename(2) holds while it looks up
// the names it was given: then the answer is ESTALE (d_splice_alias). So a directory that is found at another place than
// before gets another node id there, and is another inode to the kernel, with the same number. The kernel does not know that
// the two are one, and tells none of them what it does to the other, so it is given nothing to keep of either.
//
// The first node of a directory has its inode number. The zero places is not ready; use newPlaces.
type places struct {
	mu    sync.RWMutex
	nodes map[uint64]*dirNode
	at    map[place]*dirNode // those whose place has not become another's
	of    map[layout.FileID][]*dirNode
	last  uint64 // node id that is no inode number
}

// dirNode is a directory the kernel knows.
type dirNode struct {
	node    uint64
	id      layout.FileID
	place   place
	lookups uint64 // that FORGET has not taken back
}

// firstExtraNode is above all inode numbers, which are positive.
const firstExtraNode = 1 << 63

func newPlaces() *places {
	return &places{
		nodes: map[uint64]*dirNode{}, at: map[place]*dirNode{}, of: map[layout.FileID][]*dirNode{},
		last: firstExtraNode,
	}
}

// enter is called before the kernel is told of a directory at a place, and returns its node id there. With fresh nodes the
// directory is known at other places, too, from now on.
func (p *places) enter(at place, id layout.FileID) (node uint64, fresh bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.at[at]
	if n == nil || n.id != id {
		n = &dirNode{node: uint64(id), id: id, place: at}
		if p.nodes[n.node] != nil {
			p.last++
			n.node = p.last
		}
		p.nodes[n.node] = n
		p.at[at] = n
		p.of[id] = append(p.of[id], n)
		fresh = len(p.of[id]) > 1
	}
	n.lookups++
	return n.node, fresh
}

// forget is FORGET: the kernel takes back so many lookups of a node.
func (p *places) forget(node, lookups uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	if n == nil {
		return // no directory
	}
	if n.lookups -= min(lookups, n.lookups); n.lookups > 0 {
		return
	}
	delete(p.nodes, node)
	if p.at[n.place] == n {
		delete(p.at, n.place)
	}
	rest := p.of[n.id][:0]
	for _, other := range p.of[n.id] {
		if other != n {
			rest = append(rest, other)
		}
	}
	if p.of[n.id] = rest; len(rest) == 0 {
		delete(p.of, n.id)
	}
}

// vacate is called before the kernel is told that there is no directory at a place.
func (p *places) vacate(at place) {
	p.mu.RLock()
	n := p.at[at]
	p.mu.RUnlock()
	if n == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.at, at)
}

// rename is called before the kernel is told that it may move what is at one place to another. It holds the locks of
// both directories, so no lookup comes in between.
func (p *places) rename(from, to place, exchange bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	moved, back := p.at[from], p.at[to]
	p.put(from, nil)
	if exchange {
		p.put(from, back)
	}
	p.put(to, moved)
}

// put has a node, or none, at a place.
func (p *places) put(at place, n *dirNode) {
	if n == nil {
		delete(p.at, at)
		return
	}
	n.place = at
	p.at[at] = n
}

// id is the directory behind a node id that is no inode number, or 0.
func (p *places) id(node uint64) layout.FileID {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if n := p.nodes[node]; n != nil {
		return n.id
	}
	return 0
}

// all calls f with the node ids of a directory, and reports whether there are any.
func (p *places) all(id layout.FileID, f func(node uint64) bool) bool {
	var nodes [4]uint64
	list := nodes[:0]
	p.mu.RLock()
	for _, n := range p.of[id] {
		list = append(list, n.node)
	}
	p.mu.RUnlock()
	for _, node := range list {
		f(node)
	}
	return len(list) > 0
}

// several reports whether the kernel takes a directory for more than one.
func (p *places) several(id layout.FileID) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return len(p.of[id]) > 1
}

// enter is places.enter, and makes the kernel forget what it keeps of a directory that it now knows at several places.
func (fs *FS) enter(at place, id layout.FileID) (node uint64) {
	node, fresh := fs.places.enter(at, id)
	if fresh {
		fs.forgetAttrs(id)
		fs.notify(kernel.forgetNames)
	}
	return node
}

// forgetAttrs makes the kernel forget the attributes of an inode. It reports false if the kernel does not know it.
func (fs *FS) forgetAttrs(id layout.FileID) bool {
	known := true
	if k := fs.kernel.Load(); k != nil {
		fs.given.during(id, func() { known = fs.places.all(id, (*k).forgetAttrs) || (*k).forgetAttrs(fs.node(id)) })
	}
	return known
}

// keepAttr is how long the kernel may keep attributes.
func (fs *FS) keepAttr(a *attrs) time.Duration {
	if a.Mode&unix.S_IFMT == unix.S_IFDIR && fs.places.several(a.ID) {
		return 0
	}
	return a.keep
}
