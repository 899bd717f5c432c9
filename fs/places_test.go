package fs

import (
	"slices"
	"strconv"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
)

func TestPlaces(t *testing.T) {
	p := newPlaces()
	nodes := func(id layout.FileID) (list []uint64) {
		p.all(id, func(node uint64) bool { list = append(list, node); return true })
		return list
	}
	enter := func(at place, id layout.FileID, want uint64, wantFresh bool) uint64 {
		t.Helper()
		node, fresh := p.enter(at, id)
		if node != want || fresh != wantFresh {
			t.Errorf("%d at %v is node %d (fresh: %v), want %d (%v)", id, at, node, fresh, want, wantFresh)
		}
		return node
	}
	x, y, z := place{1, "x"}, place{1, "y"}, place{7, "x"}

	enter(x, 7, 7, false)
	enter(x, 7, 7, false)
	extra := enter(y, 7, firstExtraNode|7, true)
	enter(x, 7, 7, false)
	enter(y, 7, extra, false)
	if !p.several(7) || !slices.Equal(nodes(7), []uint64{7, extra}) || dirOfExtra(extra) != 7 {
		t.Errorf("nodes %d, %#x stands for %d", nodes(7), extra, dirOfExtra(extra))
	}

	// What is renamed here is no other directory for that, wherever its parent has gone.
	p.rename(x, z, false)
	enter(z, 7, 7, false)
	enter(x, 8, 8, false)
	p.rename(x, y, true)
	enter(y, 8, 8, false)
	enter(x, 7, extra, false)
	p.rename(y, x, false) // over the other
	enter(x, 8, 8, false)

	// One that is back, where another was since, may be known elsewhere.
	p.vacate(x)
	enter(x, 8, firstExtraNode|8, true)

	p.forget(extra, 2)
	if p.nodes[extra] == nil {
		t.Error("a node is gone that the kernel has looked up more often than forgotten")
	}
	p.forget(extra, 1)
	if p.nodes[extra] != nil || p.several(7) {
		t.Errorf("nodes %d after the last but one was forgotten", nodes(7))
	}
	p.forget(8, 9)
	p.forget(firstExtraNode|8, 9)
	p.forget(7, 9)

	// File handles. A node without a place gets it with the next lookup, whatever else is known of the directory.
	again := func(node uint64, id layout.FileID, wantFresh bool) {
		t.Helper()
		if fresh := p.again(node, id); fresh != wantFresh {
			t.Errorf("node %#x is fresh: %v, want %v", node, fresh, wantFresh)
		}
	}
	again(9, 9, false)
	p.awaitPlace(9)
	enter(x, 9, 9, false)
	enter(x, 9, 9, false)
	extra = firstExtraNode | 3<<extraShift | 9
	again(extra, 9, true)
	enter(x, 9, 9, false) // it has not asked for its parent
	p.awaitPlace(extra)
	enter(x, 9, extra, false)
	enter(x, 9, extra, false)
	if node := p.parent(9); node != extra {
		t.Errorf("found in node %#x, which has no place", node)
	}
	again(9, 9, false)
	p.awaitPlace(9)
	enter(y, 9, 9, false) // it was renamed meanwhile
	enter(x, 9, extra, false)
	if node := p.parent(10); node != 10 {
		t.Errorf("found in node %#x", node)
	}
	p.awaitPlace(11) // not known any more
	p.forget(9, 9)
	p.forget(extra, 9)
	p.forget(10, 1)

	// One that is known at more places than there are numbers for is taken for one that is known.
	for k := range uint64(maxExtraNodes + 5) {
		p.enter(place{20, strconv.FormatUint(k, 10)}, 20)
	}
	if n := len(nodes(20)); n != maxExtraNodes+1 {
		t.Errorf("%d nodes of one directory", n)
	}
	for _, node := range nodes(20) {
		p.forget(node, 9)
	}
	p.forget(12345, 1) // no directory
	if len(p.nodes)+len(p.at)+len(p.of) != 0 {
		t.Errorf("left over: %v %v %v", p.nodes, p.at, p.of)
	}
}

// lookupNode is LOOKUP of a name in a node, which must lead to a node; 0 means that it must fail, with whatever error.
func (r *rig) lookupNode(in uint64, name string, want uint64) {
	r.t.Helper()
	var out fuse.EntryOut
	h := header(layout.FileID(in))
	status := r.raw.Lookup(nil, &h, name, &out)
	if out.NodeId != want || status.Ok() != (want != 0) {
		r.t.Errorf("%q in node %#x is node %#x, %v; want %#x", name, in, out.NodeId, status, want)
	}
}

// What the kernel knows by file handles alone it is told of again, with the same node ids in each mount.
func TestFileHandles(t *testing.T) {
	s := newService(1, 1<<20)
	first := newRig(t, s)
	mkdir := func(in uint64, name string) uint64 {
		var out fuse.EntryOut
		first.want(first.raw.Mkdir(nil, &fuse.MkdirIn{InHeader: header(layout.FileID(in)), Mode: 0755}, name, &out), 0, "mkdir")
		return out.NodeId
	}
	const root = fuse.FUSE_ROOT_ID
	dir := mkdir(root, "dir")
	sub := mkdir(dir, "sub")
	other := mkdir(root, "other")
	var out fuse.EntryOut
	first.want(first.raw.Mknod(nil, &fuse.MknodIn{InHeader: header(layout.FileID(sub)), Mode: unix.S_IFREG | 0644}, "file", &out), 0, "mknod")
	file := out.NodeId
	first.lookupNode(root, ".", root)
	first.lookupNode(root, "..", 0)
	first.lookupNode(12345, ".", 0)
	first.lookupNode(firstExtraNode+12345, ".", 0)
	first.lookupNode(firstExtraNode|file, ".", 0) // no directory
	first.lookupNode(firstExtraNode|1<<extraShift, ".", 0)

	// It knows a directory by two nodes, as it was renamed on another mount.
	second := newRig(t, s)
	for _, name := range []string{"dir", "other"} {
		h := header(root)
		second.want(second.raw.Lookup(nil, &h, name, &out), 0, "lookup of %s", name)
	}
	second.lookupNode(dir, "sub", sub)
	h := header(layout.FileID(dir))
	first.want(first.raw.Rename(nil, &fuse.RenameIn{InHeader: h, Newdir: other}, "sub", "moved"), 0, "rename")
	extra := firstExtraNode | sub
	second.lookupNode(other, "moved", extra)

	// Later mounts know nothing.
	for _, node := range []uint64{sub, extra} {
		r := newRig(t, s)
		r.lookupNode(file, ".", file)
		r.lookupNode(node, ".", node)
		r.lookupNode(node, "..", other)
		r.lookupNode(other, "..", root)
		r.lookupNode(root, "other", other)
		r.lookupNode(other, "moved", node)
		r.lookupNode(node, "file", file)
	}

	// A mount of a subdirectory shows nothing else.
	r := newRig(t, s, func(c *Config) { c.Root = layout.FileID(other) })
	r.lookupNode(file, ".", file)
	r.lookupNode(sub, ".", sub)
	r.lookupNode(sub, "..", root)
	r.lookupNode(root, "moved", sub)
	r.lookupNode(dir, ".", 0)
	r.lookupNode(other, ".", 0) // the root is node 1

	h = header(layout.FileID(sub))
	first.want(first.raw.Unlink(nil, &h, "file"), 0, "unlink")
	first.lookupNode(file, ".", 0)
}
