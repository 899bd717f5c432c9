package meta

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/faultytest"
	"github.com/weftfs/weft/server/schema"
)

// node is an inode of the model tree.
type node struct {
	forgotten bool // it was gone when the service was restarted
	id        layout.FileID
	mode      uint32
	nlink     int
	size      int64
	target    string
	xattrs    map[string]string
	open      bool

	children map[string]*node // of a directory
	parent   *node            // of a directory that has a name
}

func (n *node) dir() bool     { return n.children != nil }
func (n *node) regular() bool { return n.mode&syscall.S_IFMT == syscall.S_IFREG }

// exists reports whether an inode can still be reached by its number.
func (n *node) exists() bool {
	if n.dir() {
		return n.parent != nil
	}
	return n.nlink > 0 || n.open
}

// below reports whether n is top or lies below it.
func (n *node) below(top *node) bool {
	for ; n.parent != n; n = n.parent {
		if n == top {
			return true
		}
	}
	return n == top
}

// model is what the volume should be.
type model struct {
	root   *node
	all    []*node // also those that are gone
	shards int     // of the volume; 0 is 1
}

// apart reports whether two inodes are of different shards.
func (m *model) apart(a, b *node) bool { return m.shards > 1 && m.shard(a) != m.shard(b) }

func (m *model) shard(n *node) int { return layout.ShardOf(n.id, max(m.shards, 1)) }

// told is what who finds an inode in a directory is told of it.
func (m *model) told(dir, n *node, a metarpc.Attr) metarpc.Attr {
	if m.apart(dir, n) && !n.dir() {
		return metarpc.Attr{ID: a.ID, Mode: a.Mode & syscall.S_IFMT}
	}
	return a
}

func newModel() *model {
	root := &node{id: layout.RootID, mode: syscall.S_IFDIR | 0o755, children: map[string]*node{}}
	root.parent = root
	return &model{root: root, all: []*node{root}}
}

func (m *model) add(dir *node, name string, n *node) {
	dir.children[name] = n
	n.nlink++
	if n.dir() {
		n.parent = dir
	}
	if !slices.Contains(m.all, n) {
		m.all = append(m.all, n)
	}
}

func (m *model) drop(dir *node, name string) {
	n := dir.children[name]
	delete(dir.children, name)
	n.nlink--
	if n.dir() {
		n.parent = nil
	}
}

// remembered reports whether n is a removed inode that the service still knows.
func (n *node) remembered() bool { return !n.exists() && !n.forgotten }

// in checks a directory that something is to be done in, by the service of its shard or by another one.
func in(dir *node, elsewhere bool) syscall.Errno {
	switch {
	case elsewhere && !dir.exists():
		return syscall.ENOENT
	case dir.remembered() && dir.dir():
		return syscall.ENOENT
	case !dir.exists():
		return syscall.ESTALE
	case !dir.dir():
		return syscall.ENOTDIR
	}
	return 0
}

// removal is what unlink(2) or rmdir(2) of an entry answers.
func removal(n *node, dir bool) syscall.Errno {
	switch {
	case n == nil:
		return syscall.ENOENT
	case n.dir() && !dir:
		return syscall.EISDIR
	case !n.dir() && dir:
		return syscall.ENOTDIR
	case len(n.children) > 0:
		return syscall.ENOTEMPTY
	}
	return 0
}

func (m *model) rename(od *node, on string, nd *node, nn string, flags uint32) syscall.Errno {
	if e := in(od, false); e != 0 {
		return e
	}
	if e := in(nd, m.apart(nd, od)); e != 0 {
		return e
	}
	from, to := od.children[on], nd.children[nn]
	swap := flags == metarpc.RenameExchange
	switch {
	case from == nil:
		return syscall.ENOENT
	case flags == metarpc.RenameNoReplace && to != nil:
		return syscall.EEXIST
	case swap && to == nil:
		return syscall.ENOENT
	case from == to:
		return 0
	case from == nd || swap && to == od:
		return syscall.EINVAL
	case !swap && to != nil && from.dir() && !to.dir():
		return syscall.ENOTDIR
	case !swap && to != nil && !from.dir() && to.dir():
		return syscall.EISDIR
	case from.dir() && nd.below(from) || swap && to.dir() && od.below(to):
		return syscall.EINVAL
	case !swap && to != nil && len(to.children) > 0:
		return syscall.ENOTEMPTY
	}
	m.drop(od, on)
	if to != nil {
		m.drop(nd, nn)
	}
	m.add(nd, nn, from)
	if swap {
		m.add(od, on, to)
	}
	return 0
}

// TestModel does random things to a volume and to the model and compares, also what fails, across restarts.
func TestModel(t *testing.T) {
	seed := rand.Uint64()
	steps := 4000
	if testing.Short() {
		steps = 1000
	}
	kinds := maps.Clone(engines)
	kinds["memory, with faults"] = engines["memory"]
	for kind, open := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Logf("seed %d", seed)
			h := newHost(t, open(t))
			if strings.HasSuffix(kind, "faults") {
				if _, err := OpenVolume(t.Context(), h.engine, layout.Policy{StripeUnit: testUnit, StripeCount: 2}, 1); err != nil {
					t.Fatal(err)
				}
				h.config = func(cfg *Config) { cfg.Engine = withFaults(t, h.engine, seed) }
			}
			h.start()
			m := &modelRun{t: t, h: h, c: h.client(), model: newModel(), rng: rand.New(rand.NewPCG(seed, 1))}
			m.c.cred = metarpc.Cred{} // permissions are not what is modelled
			for i := range steps {
				m.step()
				if t.Failed() {
					t.Fatalf("at step %d", i)
				}
				if i%(steps/4) == steps/8 {
					m.restart()
				}
			}
			m.compare(m.root)
			for _, n := range m.all {
				m.stat(n)
			}
			checkCatalog(t, h.engine)
		})
	}
}

// withFaults is an engine with all that callers have to expect of one, closed when the test ends.
func withFaults(t testing.TB, engine catalog.Engine, seed uint64) catalog.Engine {
	e := faultytest.New(keptOpen{engine}, faultytest.Config{
		Seed: seed, Conflict: 0.03, Lost: 0.05, Applied: 0.05, Late: 0.05, LateBy: 5 * time.Millisecond,
	})
	t.Cleanup(func() { e.Close() }) // waits for late commits
	return e
}

type keptOpen struct{ catalog.Engine }

func (keptOpen) Close() error { return nil }

type modelRun struct {
	*model
	t   *testing.T
	h   *host
	c   *client
	rng *rand.Rand
}

// restart kills the service, comes back and reclaims.
func (m *modelRun) restart() {
	m.h.restart()
	m.c.connect()
	for _, n := range m.all {
		n.forgotten = !n.exists()
		if n.open {
			must[metarpc.AttrResult](m.c, metarpc.OpOpen, &metarpc.OpenArgs{ID: n.id})
		}
	}
	m.h.svc.endGrace()
}

func (m *modelRun) anyNode() *node { return m.all[m.rng.IntN(len(m.all))] }

// anyDir is mostly a directory that exists.
func (m *modelRun) anyDir() *node {
	for range 30 {
		if n := m.anyNode(); n.dir() && n.exists() {
			return n
		}
	}
	return m.anyNode()
}

func (m *modelRun) name() string { return string(rune('a' + m.rng.IntN(6))) }

// check compares an outcome.
func (m *modelRun) check(what string, err error, want syscall.Errno) bool {
	m.t.Helper()
	if got := statusOf(err); got != metarpc.Status(want) {
		m.t.Errorf("%s: %v, want %v", what, err, want)
	}
	return err == nil
}

func (m *modelRun) step() {
	m.t.Helper()
	dir, name := m.anyDir(), m.name()
	where := fmt.Sprintf("%q in %d", name, dir.id)
	errno := in(dir, false)
	var here *node
	if errno == 0 {
		here = dir.children[name]
	}
	switch m.rng.IntN(12) {
	case 0, 1: // make something else than an open file
		n := &node{mode: []uint32{syscall.S_IFDIR, syscall.S_IFDIR, syscall.S_IFREG, syscall.S_IFIFO, syscall.S_IFLNK}[m.rng.IntN(5)] | 0o750}
		switch n.mode & syscall.S_IFMT {
		case syscall.S_IFDIR:
			n.children = map[string]*node{}
		case syscall.S_IFLNK:
			n.target = "to-" + name
			n.size = int64(len(n.target))
		}
		if here != nil {
			errno = syscall.EEXIST
		}
		r, err := ask[metarpc.AttrResult](m.c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir.id, Name: name, Mode: n.mode, Target: n.target})
		if m.check("make "+where, err, errno) {
			n.id = r.Attr.ID
			m.add(dir, name, n)
		}
	case 2:
		exclusive := m.rng.IntN(2) == 0
		switch {
		case here == nil:
		case !exclusive && here.dir():
			errno = syscall.EISDIR
		case exclusive || !here.regular():
			errno = syscall.EEXIST
		}
		r, err := ask[metarpc.CreateResult](m.c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir.id, Name: name, Mode: 0o640, Exclusive: exclusive})
		if m.check("create "+where, err, errno) {
			if here == nil {
				here = &node{id: r.Attr.ID, mode: syscall.S_IFREG | 0o640}
				m.add(dir, name, here)
			}
			here.open = true
			if !r.Created && m.apart(dir, here) {
				m.c.open(here.id)
			}
			if r.Attr.ID != here.id {
				m.t.Errorf("create %s: inode %d, want %d", where, r.Attr.ID, here.id)
			}
		}
	case 3:
		n := m.anyNode()
		if errno = in(dir, m.apart(dir, n)); errno != 0 {
			here = nil
		}
		switch {
		case errno != 0:
		case here != nil:
			errno = syscall.EEXIST
		case !n.exists():
			errno = syscall.ESTALE
		case n.dir():
			errno = syscall.EPERM
		case n.nlink == 0:
			errno = syscall.ENOENT
		}
		_, err := ask[metarpc.AttrResult](m.c, metarpc.OpLink, &metarpc.LinkArgs{ID: n.id, Parent: dir.id, Name: name})
		if m.check(fmt.Sprintf("link %d as %s", n.id, where), err, errno) {
			m.add(dir, name, n)
		}
	case 4, 5:
		rmdir := m.rng.IntN(3) == 0
		if here != nil && m.rng.IntN(2) == 0 {
			rmdir = here.dir()
		}
		if errno == 0 {
			errno = removal(here, rmdir)
		}
		_, err := ask[metarpc.RemoveResult](m.c, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir.id, Name: name, Dir: rmdir})
		if m.check("remove "+where, err, errno) {
			m.drop(dir, name)
			m.awaitGone(dir, here)
		}
	case 6, 7, 8:
		to, toName := m.anyDir(), m.name()
		flags := uint32(0)
		if m.rng.IntN(3) == 0 {
			flags = 1 + m.rng.Uint32N(2)
		}
		replaced := to.children[toName]
		want := m.rename(dir, name, to, toName, flags)
		_, err := ask[metarpc.Empty](m.c, metarpc.OpRename, &metarpc.RenameArgs{
			OldParent: dir.id, OldName: name, NewParent: to.id, NewName: toName, Flags: flags,
		})
		if m.check(fmt.Sprintf("rename %s to %q in %d, flags %d", where, toName, to.id, flags), err, want) && replaced != nil {
			m.awaitGone(dir, replaced)
		}
	case 9:
		n := m.anyNode()
		args := &metarpc.SetAttrArgs{ID: n.id, Mask: metarpc.SetMode, Mode: m.rng.Uint32N(0o1000)}
		errno = 0
		if m.rng.IntN(2) == 0 {
			args.Mask |= metarpc.SetSize
			args.Size = m.rng.Int64N(1 << 20)
		}
		switch {
		case n.remembered() && args.Mask&metarpc.SetSize == 0:
		case !n.exists():
			errno = syscall.ESTALE
		case args.Mask&metarpc.SetSize == 0 || n.regular():
		case n.dir():
			errno = syscall.EISDIR
		default:
			errno = syscall.EINVAL
		}
		if errno == 0 && n.mode&syscall.S_IFMT == syscall.S_IFLNK {
			errno = syscall.EOPNOTSUPP
		}
		_, err := ask[metarpc.AttrResult](m.c, metarpc.OpSetAttr, args)
		if m.check(fmt.Sprintf("setattr %d", n.id), err, errno) {
			n.mode = n.mode&syscall.S_IFMT | args.Mode
			if args.Mask&metarpc.SetSize != 0 {
				n.size = args.Size
			}
		}
	case 10:
		n := m.anyNode()
		key := "trusted." + name // any inode may have those
		errno = 0
		_, has := n.xattrs[key]
		if m.rng.IntN(3) == 0 {
			switch {
			case !n.exists():
				errno = syscall.ESTALE
			case !has:
				errno = syscall.ENODATA
			}
			_, err := ask[metarpc.Empty](m.c, metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: n.id, Name: key})
			if m.check(fmt.Sprintf("removexattr %d", n.id), err, errno) {
				delete(n.xattrs, key)
			}
			return
		}
		flags := m.rng.Uint32N(3)
		switch {
		case !n.exists():
			errno = syscall.ESTALE
		case has && flags == metarpc.XattrCreate:
			errno = syscall.EEXIST
		case !has && flags == metarpc.XattrReplace:
			errno = syscall.ENODATA
		}
		value := fmt.Sprint(m.rng.Uint32())
		_, err := ask[metarpc.Empty](m.c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: n.id, Name: key, Value: []byte(value), Flags: flags})
		if m.check(fmt.Sprintf("setxattr %d", n.id), err, errno) {
			if n.xattrs == nil {
				n.xattrs = map[string]string{}
			}
			n.xattrs[key] = value
		}
	case 11:
		n := m.anyNode()
		m.stat(n)
		if n.open {
			m.c.closeFile(n.id)
			n.open = false
			m.stat(n)
		}
	}
}

// stat compares all there is to an inode.
func (m *modelRun) stat(n *node) {
	m.t.Helper()
	r, err := ask[metarpc.AttrResult](m.c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: n.id})
	if n.remembered() {
		if m.check(fmt.Sprintf("getattr of %d, which was removed", n.id), err, 0) && (r.Attr.Nlink != 0 || r.Attr.Mode != n.mode) {
			m.t.Errorf("removed inode %+v, want mode %o", r.Attr, n.mode)
		}
		return
	}
	if !n.exists() {
		m.check(fmt.Sprintf("getattr of %d, which is gone", n.id), err, syscall.ESTALE)
		return
	}
	if !m.check(fmt.Sprintf("getattr %d", n.id), err, 0) {
		return
	}
	nlink, size := n.nlink, n.size
	if n.dir() {
		nlink, size = 2, int64(len(n.children))
		for _, child := range n.children {
			if child.dir() {
				nlink++
			}
		}
	}
	if a := r.Attr; a.ID != n.id || a.Mode != n.mode || int(a.Nlink) != nlink || a.Size != size {
		m.t.Errorf("inode %d: %+v, want mode %#o, %d links, size %d", n.id, a, n.mode, nlink, size)
	}
	names := must[metarpc.NamesResult](m.c, metarpc.OpListXattr, &metarpc.IDArgs{ID: n.id}).Names
	if want := slices.Sorted(maps.Keys(n.xattrs)); !slices.Equal(names, want) {
		m.t.Errorf("inode %d has attributes %q, want %q", n.id, names, want)
	}
	for _, name := range names {
		v := must[metarpc.BytesResult](m.c, metarpc.OpGetXattr, &metarpc.XattrArgs{ID: n.id, Name: name}).Value
		if string(v) != n.xattrs[name] {
			m.t.Errorf("inode %d: %s is %q, want %q", n.id, name, v, n.xattrs[name])
		}
	}
	if n.target != "" {
		if v := must[metarpc.BytesResult](m.c, metarpc.OpReadLink, &metarpc.IDArgs{ID: n.id}).Value; string(v) != n.target {
			m.t.Errorf("link %d leads to %q, want %q", n.id, v, n.target)
		}
	}
}

// awaitGone waits until a file is gone that lost its last name by the service of by's shard, if that leaves the removal to another one.
func (m *modelRun) awaitGone(by, n *node) {
	if m.apart(by, n) && n.regular() && !n.exists() {
		waittest.Until(m.t, fmt.Sprintf("inode %d is removed", n.id), func() bool {
			_, err := m.h.engine.Get(m.t.Context(), schema.InodeKey(n.id))
			return errors.Is(err, catalog.ErrNotFound)
		})
	}
}

// compare walks the tree below a directory.
func (m *modelRun) compare(dir *node) {
	m.t.Helper()
	entries := m.c.list(dir.id, 1+m.rng.IntN(10))
	got := map[string]layout.FileID{}
	for _, e := range entries {
		got[e.Name] = e.Attr.ID
		if a := m.c.attr(e.Attr.ID); dir.children[e.Name] != nil && m.told(dir, dir.children[e.Name], a) != e.Attr {
			m.t.Errorf("entry %q has %+v, its inode %+v", e.Name, e.Attr, a)
		}
		if r := must[metarpc.LookupResult](m.c, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir.id, Name: e.Name}); r.Attr != e.Attr {
			m.t.Errorf("entry %q has %+v, lookup says %+v", e.Name, e.Attr, r.Attr)
		}
	}
	want := map[string]layout.FileID{}
	for name, n := range dir.children {
		want[name] = n.id
	}
	if !maps.Equal(got, want) || len(got) != len(entries) {
		m.t.Errorf("directory %d holds %v, want %v", dir.id, got, want)
	}
	for _, n := range dir.children {
		if n.dir() {
			m.compare(n)
		}
	}
}
