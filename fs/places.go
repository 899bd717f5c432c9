package fs

import (
	"context"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
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
// The first node of a directory has its inode number. The ids of further ones contain it, so that a file handle that
// has such an id stays good when the kernel has forgotten the node, and in later mounts.
//
// A directory that the kernel knows by a file handle (lookupNode) has no place at first. The kernel then asks for its
// parent, finds its name by reading that, and looks the name up, which has to lead to the same node. So a node that
// waits for its place gets it, even if the directory has another node there: the kernel can always give a place to a
// dentry that has none. The other node loses the place, as if the directory had been removed there and made anew.
//
// The zero places is not ready; use newPlaces.
type places struct {
	mu    sync.RWMutex
	nodes map[uint64]*dirNode
	at    map[place]*dirNode // those whose place has not become another's
	of    map[layout.FileID][]*dirNode
}

// dirNode is a directory the kernel knows.
type dirNode struct {
	node    uint64
	id      layout.FileID
	place   place
	waits   bool   // for its place
	lookups uint64 // that FORGET has not taken back
}

// A further node of a directory has the highest bit, which no inode number has, a number, and the inode number.
const (
	firstExtraNode = 1 << 63
	extraShift     = 48      // inode numbers are given out one after the other, so they do not reach that
	maxExtraNodes  = 1 << 10 // which bounds the search for one that is free
)

// dirOfExtra is the directory of a node id that is no inode number. It may be 0 in what is no file handle of ours.
func dirOfExtra(node uint64) layout.FileID { return layout.FileID(node & (1<<extraShift - 1)) }

func newPlaces() *places {
	return &places{nodes: map[uint64]*dirNode{}, at: map[place]*dirNode{}, of: map[layout.FileID][]*dirNode{}}
}

// get returns a node of a directory, and makes it if there is none of that id; p.mu is held.
func (p *places) get(node uint64, id layout.FileID) *dirNode {
	n := p.nodes[node]
	if n == nil {
		n = &dirNode{node: node, id: id}
		p.nodes[node] = n
		p.of[id] = append(p.of[id], n)
	}
	return n
}

// another returns a further node of a directory; p.mu is held. If there are too many of them, it is one that is known.
func (p *places) another(id layout.FileID) *dirNode {
	node := uint64(id)
	for k := uint64(0); p.nodes[node] != nil && k < maxExtraNodes; k++ {
		node = firstExtraNode | k<<extraShift | uint64(id)
	}
	return p.get(node, id)
}

// enter is called before the kernel is told of a directory at a place, and returns its node id there. With fresh nodes the
// directory is known at other places, too, from now on.
func (p *places) enter(at place, id layout.FileID) (node uint64, fresh bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := len(p.of[id])
	n := p.at[at]
	if i := slices.IndexFunc(p.of[id], func(n *dirNode) bool { return n.waits }); i >= 0 {
		n = p.of[id][i]
	} else if n == nil || n.id != id {
		n = p.another(id)
	}
	if p.at[at] != n {
		p.put(at, n)
	}
	n.waits = false
	n.lookups++
	return n.node, len(p.of[id]) > max(before, 1)
}

// again is called before the kernel is told of a directory by a node id that it has, as file handles have them; fresh
// is as for enter.
func (p *places) again(node uint64, id layout.FileID) (fresh bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := len(p.of[id])
	p.get(node, id).lookups++
	return len(p.of[id]) > max(before, 1)
}

// awaitPlace is called when the kernel asks for the parent of a directory, which it does if it has no place for it.
func (p *places) awaitPlace(node uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.nodes[node]; n != nil {
		n.waits = true
	}
}

// parent is called before the kernel is told which directory another one is in, and returns a node of that: if there is
// none, one without a place.
func (p *places) parent(id layout.FileID) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	nodes := p.of[id]
	i := max(slices.IndexFunc(nodes, func(n *dirNode) bool { return p.at[n.place] == n }), 0)
	var n *dirNode
	if len(nodes) > 0 {
		n = nodes[i]
	} else {
		n = p.get(uint64(id), id)
	}
	n.lookups++
	return n.node
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
	if p.at[n.place] == n {
		delete(p.at, n.place)
	}
	n.place = at
	p.at[at] = n
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
		fs.nowSeveral(id)
	}
	return node
}

func (fs *FS) nowSeveral(id layout.FileID) {
	fs.forgetAttrs(id)
	fs.expireNames(fs.ctx, id)
}

// lookupNode answers LOOKUP of "." and "..", which the kernel asks for file handles alone (FUSE_EXPORT_SUPPORT): the
// first for an inode of which it has nothing but the node id, the second for a directory that it has found in that way,
// to find its place. The caller needs privileges for that, so permissions are not checked.
//
// Through a mount of a subdirectory nothing else can be reached. What has been removed is ESTALE, though it may be open
// on another mount.
func (r *raw) lookupNode(ctx context.Context, in *fuse.InHeader, up bool, out *fuse.EntryOut) error {
	id := r.fs.id(in.NodeId)
	if id == 0 || up && id == r.fs.root {
		return syscall.ESTALE
	}
	if up || id != r.fs.root && r.fs.root != layout.RootID {
		parent, err := r.fs.meta.Parent(ctx, id, r.fs.root)
		if err != nil {
			return byID(id, err)
		}
		if up {
			id = parent
		}
		if id == 0 {
			return syscall.ESTALE
		}
	}
	a, err := r.fs.getAttr(ctx, id)
	if err != nil {
		return err
	}
	dir := a.Mode&unix.S_IFMT == unix.S_IFDIR && id != r.fs.root // and so it can have several nodes
	switch {
	case up:
		r.fs.places.awaitPlace(in.NodeId)
		if out.NodeId = r.fs.node(id); dir {
			out.NodeId = r.fs.places.parent(id)
		}
	case a.Nlink == 0, !dir && in.NodeId != r.fs.node(id):
		return syscall.ESTALE
	default:
		if out.NodeId = in.NodeId; dir && r.fs.places.again(in.NodeId, id) {
			r.fs.nowSeveral(id)
		}
	}
	r.show(in, &a.Attr)
	fillAttr(&out.Attr, &a.Attr) // nothing of it is to be kept
	return nil
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
