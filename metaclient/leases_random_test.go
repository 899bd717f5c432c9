package metaclient

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// tree is a small file system behind a service that follows the rules of leases. It remembers what was true when: each
// applied change has a number, and what is asked of the client must have been true at some time between question and answer.
type tree struct {
	t *testing.T
	s *service
	r *rand.Rand // guarded by mu

	mu       sync.Mutex
	now      uint64 // number of the last change
	inodes   map[layout.FileID]*treeInode
	names    map[nameKey]*truth // inode numbers, 0 for nothing
	last     layout.FileID
	dirs     []layout.FileID
	held     map[layout.FileID]metarpc.Lease // by the client
	changing map[layout.FileID]int
	grace    bool
	granted  int
	recalled int
	number   uint64                   // of the last callback
	waiting  map[uint64]chan struct{} // callbacks that are not answered
}

type treeInode struct {
	dir   bool
	attr  metarpc.Attr
	xattr string
	attrs truth           // Ctime, which is the number of the last change; 0 when the inode is gone
	value truth           // of the number in xattr
	sizes map[int64]int64 // of a directory, by change time
}

// truth is the history of a value.
type truth struct {
	values []uint64
	since  []uint64
}

func (h *truth) set(now, v uint64) {
	h.values, h.since = append(h.values, v), append(h.since, now)
}

func (h *truth) value() uint64 {
	if len(h.values) == 0 {
		return 0
	}
	return h.values[len(h.values)-1]
}

// was reports whether the value was v at some time from one change to another.
func (h *truth) was(v, from, to uint64) bool {
	if len(h.values) == 0 {
		return v == 0
	}
	if v == 0 && from < h.since[0] {
		return true
	}
	for i := range h.values {
		if h.values[i] == v && h.since[i] <= to && (i+1 == len(h.values) || h.since[i+1] > from) {
			return true
		}
	}
	return false
}

const treeDirs, treeNames = 2, 3

func (m *tree) random(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.r.IntN(n)
}

func (m *tree) pause(limit time.Duration) { time.Sleep(time.Duration(m.random(int(limit)))) }

func (m *tree) key() nameKey {
	return nameKey{m.dir(), string(rune('a' + m.random(treeNames)))}
}

// dir is one of the first directories, or one that was made lately.
func (m *tree) dir() layout.FileID {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := m.r.IntN(treeDirs + 2); i < treeDirs {
		return m.dirs[i]
	}
	return m.dirs[max(0, len(m.dirs)-1-m.r.IntN(2))]
}

// touch is a change of an inode's attributes; m.mu is held and m.now counted on.
func (m *tree) touch(ids ...layout.FileID) {
	for _, id := range ids {
		if n := m.inodes[id]; n != nil {
			n.attr.Ctime = int64(m.now)
			if n.dir {
				n.sizes[n.attr.Ctime] = n.attr.Size
			}
			if n.attr.Nlink == 0 && !n.dir {
				n.attrs.set(m.now, 0)
			} else {
				n.attrs.set(m.now, m.now)
			}
		}
	}
}

func (m *tree) grant(id layout.FileID, lease metarpc.Lease) metarpc.Lease {
	if m.changing[id] > 0 || m.r.IntN(5) == 0 {
		return 0
	}
	m.held[id] |= lease
	m.granted++
	return lease
}

func refused(errno syscall.Errno) (metarpc.Status, any) { return metarpc.Status(errno), nil }

func (m *tree) there(id layout.FileID) *treeInode {
	if n := m.inodes[id]; n != nil && (n.dir || n.attr.Nlink > 0) {
		return n
	}
	return nil
}

// affected is whose leases a change takes from others; m.mu is held.
func (m *tree) affected(args any) []metarpc.LeaseItem {
	var items []metarpc.LeaseItem
	name := func(dir layout.FileID, name string) {
		items = append(items, metarpc.LeaseItem{ID: dir, Lease: metarpc.LeaseAttrs | metarpc.LeaseNames})
		if h := m.names[nameKey{dir, name}]; h != nil && h.value() != 0 {
			items = append(items, metarpc.LeaseItem{ID: layout.FileID(h.value()), Lease: metarpc.LeaseAttrs})
		}
	}
	switch a := args.(type) {
	case *metarpc.CreateArgs:
		name(a.Parent, a.Name)
	case *metarpc.MakeNodeArgs:
		name(a.Parent, a.Name)
	case *metarpc.RemoveArgs:
		name(a.Parent, a.Name)
	case *metarpc.LinkArgs:
		name(a.Parent, a.Name)
		items = append(items, metarpc.LeaseItem{ID: a.ID, Lease: metarpc.LeaseAttrs})
	case *metarpc.RenameArgs:
		name(a.OldParent, a.OldName)
		name(a.NewParent, a.NewName)
	case *metarpc.SetAttrArgs:
		items = append(items, metarpc.LeaseItem{ID: a.ID, Lease: metarpc.LeaseAttrs})
	case *metarpc.XattrArgs:
		items = append(items, metarpc.LeaseItem{ID: a.ID, Lease: metarpc.LeaseAttrs})
	}
	return items
}

// apply executes a call; m.mu is held. Leases are granted to the client only, so not if other is set.
func (m *tree) apply(op metarpc.Op, args any, other bool) (metarpc.Status, any) {
	lease := func(id layout.FileID, l metarpc.Lease) metarpc.Lease {
		if other {
			return 0
		}
		return m.grant(id, l)
	}
	bind := func(k nameKey, id layout.FileID) {
		if m.names[k] == nil {
			m.names[k] = &truth{}
		}
		m.names[k].set(m.now, uint64(id))
	}
	find := func(k nameKey) layout.FileID {
		if h := m.names[k]; h != nil {
			return layout.FileID(h.value())
		}
		return 0
	}
	answer := func(id layout.FileID) (metarpc.Status, any) {
		l := lease(id, metarpc.LeaseAttrs)
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: m.inodes[id].attr, Lease: l}
	}
	switch a := args.(type) {
	case *metarpc.IDArgs:
		n := m.there(a.ID)
		if n == nil {
			return refused(syscall.ESTALE)
		}
		return answer(a.ID)
	case *metarpc.NameArgs:
		r := &metarpc.LookupResult{Names: lease(a.Parent, metarpc.LeaseNames)}
		if id := find(nameKey{a.Parent, a.Name}); id != 0 {
			r.Lease = lease(id, metarpc.LeaseAttrs)
			r.Attr = m.inodes[id].attr
		}
		return metarpc.StatusOK, r
	case *metarpc.ReadDirArgs:
		r := &metarpc.ReadDirResult{EOF: true, Names: lease(a.ID, metarpc.LeaseNames)}
		for i := range treeNames {
			name := string(rune('a' + i))
			if id := find(nameKey{a.ID, name}); id != 0 {
				l := lease(id, metarpc.LeaseAttrs)
				r.Entries = append(r.Entries, metarpc.DirEntry{Name: name, Cookie: uint64(16 + i), Attr: m.inodes[id].attr, Lease: l})
			}
		}
		return metarpc.StatusOK, r
	case *metarpc.CreateArgs:
		k := nameKey{a.Parent, a.Name}
		if id := find(k); id != 0 {
			if a.Exclusive {
				return refused(syscall.EEXIST)
			}
			l := lease(id, metarpc.LeaseAttrs)
			return metarpc.StatusOK, &metarpc.CreateResult{Attr: m.inodes[id].attr, Lease: l}
		}
		m.now++
		m.last++
		m.inodes[m.last] = &treeInode{attr: metarpc.Attr{ID: m.last, Nlink: 1, Btime: int64(m.now)}}
		m.inodes[a.Parent].attr.Size++
		bind(k, m.last)
		m.touch(m.last, a.Parent)
		l := lease(m.last, metarpc.LeaseAttrs)
		return metarpc.StatusOK, &metarpc.CreateResult{Attr: m.inodes[m.last].attr, Created: true, Lease: l}
	case *metarpc.MakeNodeArgs:
		k := nameKey{a.Parent, a.Name}
		if find(k) != 0 {
			return refused(syscall.EEXIST)
		}
		m.now++
		m.last++
		m.inodes[m.last] = &treeInode{dir: true, sizes: map[int64]int64{}, attr: metarpc.Attr{ID: m.last, Mode: a.Mode, Btime: int64(m.now)}}
		m.inodes[a.Parent].attr.Size++
		m.inodes[a.Parent].attr.Nlink++
		m.dirs = append(m.dirs, m.last)
		bind(k, m.last)
		m.touch(m.last, a.Parent)
		return metarpc.StatusOK, &metarpc.AttrResult{Attr: m.inodes[m.last].attr, Lease: lease(m.last, metarpc.LeaseAttrs|metarpc.LeaseNames)}
	case *metarpc.OpenArgs:
		if m.there(a.ID) == nil {
			return refused(syscall.ESTALE)
		}
		return answer(a.ID)
	case *metarpc.RemoveArgs:
		k := nameKey{a.Parent, a.Name}
		id := find(k)
		if id == 0 {
			return refused(syscall.ENOENT)
		}
		if m.inodes[id].dir {
			return refused(syscall.EISDIR)
		}
		m.now++
		m.inodes[a.Parent].attr.Size--
		m.inodes[id].attr.Nlink--
		bind(k, 0)
		m.touch(id, a.Parent)
		return metarpc.StatusOK, &metarpc.RemoveResult{At: int64(m.now)}
	case *metarpc.LinkArgs:
		k := nameKey{a.Parent, a.Name}
		if n := m.there(a.ID); n == nil || n.dir {
			return refused(syscall.ESTALE)
		}
		if find(k) != 0 {
			return refused(syscall.EEXIST)
		}
		m.now++
		m.inodes[a.ID].attr.Nlink++
		m.inodes[a.Parent].attr.Size++
		bind(k, a.ID)
		m.touch(a.ID, a.Parent)
		return answer(a.ID)
	case *metarpc.RenameArgs:
		from, to := nameKey{a.OldParent, a.OldName}, nameKey{a.NewParent, a.NewName}
		moved, there := find(from), find(to)
		switch {
		case moved == 0 || a.Flags == metarpc.RenameExchange && there == 0:
			return refused(syscall.ENOENT)
		case a.Flags == metarpc.RenameNoReplace && there != 0:
			return refused(syscall.EEXIST)
		case m.inodes[moved].dir || there != 0 && m.inodes[there].dir:
			return refused(syscall.EISDIR)
		case moved == there:
			return metarpc.StatusOK, nil
		}
		m.now++
		if a.Flags == metarpc.RenameExchange {
			bind(from, there)
		} else {
			bind(from, 0)
			m.inodes[from.dir].attr.Size--
			if there != 0 {
				m.inodes[there].attr.Nlink--
			} else {
				m.inodes[to.dir].attr.Size++
			}
		}
		bind(to, moved)
		m.touch(moved, there, from.dir, to.dir)
		return metarpc.StatusOK, nil
	case *metarpc.SetAttrArgs:
		if m.there(a.ID) == nil {
			return refused(syscall.ESTALE)
		}
		m.now++
		m.touch(a.ID)
		return answer(a.ID)
	case *metarpc.LayoutCommitArgs:
		r := &metarpc.LayoutCommitResult{}
		for _, report := range a.Reports {
			var attr metarpc.Attr
			if n := m.there(report.ID); n != nil {
				m.now++
				m.touch(report.ID)
				attr = n.attr
			}
			r.Attrs = append(r.Attrs, attr)
		}
		return metarpc.StatusOK, r
	case *metarpc.XattrArgs:
		n := m.there(a.ID)
		if n == nil {
			return refused(syscall.ESTALE)
		}
		if op == metarpc.OpGetXattr {
			if n.xattr == "" {
				return refused(syscall.ENODATA)
			}
			return metarpc.StatusOK, &metarpc.BytesResult{Value: []byte(n.xattr)}
		}
		m.now++
		n.xattr, n.attr.Flags = "", 0
		var v uint64
		if op == metarpc.OpSetXattr {
			v = m.now
			n.xattr, n.attr.Flags = fmt.Sprint(v), metarpc.AttrXattrs
		}
		n.value.set(m.now, v)
		m.touch(a.ID)
		return metarpc.StatusOK, nil
	case *metarpc.LeaseReturnArgs:
		for _, id := range a.IDs {
			delete(m.held, id)
		}
		return metarpc.StatusOK, nil
	}
	return metarpc.StatusOK, nil
}

// handle executes a call of the client, which takes a while before and after.
func (m *tree) handle(op metarpc.Op, args any) (metarpc.Status, any) {
	m.pause(2 * time.Millisecond)
	m.mu.Lock()
	if op == metarpc.OpReclaimComplete {
		m.grace = false
	}
	if (m.grace || m.r.IntN(50) == 0) && op.Once() {
		m.mu.Unlock()
		return metarpc.StatusGrace, nil
	}
	if op.Once() {
		m.idle(args)
	}
	status, result := m.apply(op, args, false)
	m.mu.Unlock()
	m.pause(2 * time.Millisecond)
	return status, result
}

// idle waits until nobody else changes what a change affects, and returns that; m.mu is held.
func (m *tree) idle(args any) []metarpc.LeaseItem {
	for {
		items := m.affected(args)
		if !slices.ContainsFunc(items, func(it metarpc.LeaseItem) bool { return m.changing[it.ID] > 0 }) {
			return items
		}
		m.pauseLocked()
	}
}

// change is a random change by another client, after the leases that it affects have been recalled.
func (m *tree) change() {
	op, args := m.any()
	m.mu.Lock()
	if m.grace {
		m.mu.Unlock()
		return
	}
	items := m.idle(args)
	for _, it := range items {
		m.changing[it.ID]++
	}
	m.mu.Unlock()
	for {
		m.mu.Lock()
		var recall []metarpc.LeaseItem
		for _, it := range items {
			if m.held[it.ID]&it.Lease != 0 {
				recall = append(recall, it)
			}
		}
		answered := make(chan struct{})
		if len(recall) == 0 {
			break
		}
		m.number++
		number := m.number
		m.waiting[number] = answered
		m.recalled++
		m.mu.Unlock()
		m.pause(2 * time.Millisecond)
		m.call(metarpc.BackHeader{Number: number, Op: metarpc.BackLeaseRecall}, &metarpc.LeaseRecallArgs{Items: recall})
		select {
		case <-answered:
			m.mu.Lock()
			for _, it := range recall {
				if m.held[it.ID] &^= it.Lease; m.held[it.ID] == 0 {
					delete(m.held, it.ID)
				}
			}
			m.mu.Unlock()
		case <-time.After(50 * time.Millisecond): // the connection may have been lost
		}
	}
	m.pauseLocked()
	m.apply(op, args, true)
	for _, it := range items {
		m.changing[it.ID]--
	}
	m.mu.Unlock()
}

// pauseLocked lets time go by between the last answer and the change.
func (m *tree) pauseLocked() {
	m.mu.Unlock()
	m.pause(time.Millisecond)
	m.mu.Lock()
}

func (m *tree) call(h metarpc.BackHeader, args any) {
	b, err := metarpc.AppendCallBack(nil, metarpc.Version, h, args)
	if err != nil {
		m.t.Error(err)
	}
	m.s.send(b)
}

// backs takes the answers to callbacks, until the service ends.
func (m *tree) backs() {
	for {
		select {
		case b := <-m.s.backs:
			m.mu.Lock()
			if ch := m.waiting[b.Number]; ch != nil {
				close(ch)
				delete(m.waiting, b.Number)
			}
			m.mu.Unlock()
		case <-m.s.ctx.Done():
			return
		}
	}
}

// any makes a random change up.
func (m *tree) any() (metarpc.Op, any) {
	k, k2, id := m.key(), m.key(), m.id()
	switch m.random(9) {
	case 8:
		return metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: k.dir, Name: k.name, Mode: syscall.S_IFDIR}
	case 0, 1:
		return metarpc.OpCreate, &metarpc.CreateArgs{Parent: k.dir, Name: k.name, Exclusive: m.random(2) == 0}
	case 2:
		return metarpc.OpRemove, &metarpc.RemoveArgs{Parent: k.dir, Name: k.name}
	case 3:
		return metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: k.dir, Name: k.name}
	case 4:
		return metarpc.OpRename, &metarpc.RenameArgs{OldParent: k.dir, OldName: k.name, NewParent: k2.dir, NewName: k2.name, Flags: uint32(m.random(3))}
	case 5:
		return metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id}
	case 6:
		return metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: "user.a", Value: []byte("x")}
	default:
		return metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: id, Name: "user.a"}
	}
}

// id is a directory or one of the younger files.
func (m *tree) id() layout.FileID {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.r.IntN(4) == 0 || m.last == treeDirs {
		return layout.FileID(1 + m.r.IntN(treeDirs))
	}
	return m.last - layout.FileID(m.r.IntN(int(min(m.last-treeDirs, 8))))
}

// moment is when a question is asked.
func (m *tree) moment() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

// check fails the test unless v was true since from.
func (m *tree) check(what string, h func() *truth, v, from uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := h()
	if t == nil {
		t = &truth{}
	}
	if !t.was(v, from, m.now) {
		m.t.Errorf("%s is %d, which it was not between changes %d and %d: %v since %v", what, v, from, m.now, t.values, t.since)
	}
}

func (m *tree) checkAttr(id layout.FileID, ctime int64, from uint64) {
	m.check(fmt.Sprintf("change time of inode %d", id), func() *truth { return &m.inodes[id].attrs }, uint64(ctime), from)
}

func (m *tree) checkName(k nameKey, id layout.FileID, from uint64) {
	m.check(fmt.Sprintf("name %s in %d", k.name, k.dir), func() *truth { return m.names[k] }, uint64(id), from)
}

// question asks the client something, and checks the answer.
func (m *tree) question(ctx context.Context, c *Client) {
	k, id, from := m.key(), m.id(), m.moment()
	gone := func(err error) bool {
		var e *metarpc.Error
		return errors.As(err, &e) && e.Status == metarpc.Status(syscall.ESTALE)
	}
	switch m.random(8) {
	case 0, 1, 2:
		a, err := c.Lookup(ctx, metarpc.Cred{}, k.dir, k.name)
		if err != nil && !errors.Is(err, errNoName) {
			return
		}
		m.checkName(k, a.Attr.ID, from)
		if a.Attr.ID != 0 {
			m.checkAttr(a.Attr.ID, a.Attr.Ctime, from)
		}
	case 3:
		page, err := c.ReadDir(ctx, metarpc.Cred{}, k.dir, 0, 10)
		if err != nil {
			return
		}
		for _, e := range page.Entries {
			m.checkName(nameKey{k.dir, e.Name}, e.Attr.ID, from)
			m.checkAttr(e.Attr.ID, e.Attr.Ctime, from)
		}
	case 4:
		v, err := c.GetXattr(ctx, metarpc.Cred{}, id, "user.a")
		if err != nil && !errors.Is(err, errNoXattr) && !isStatus(err, syscall.ENODATA) {
			return
		}
		var n uint64
		fmt.Sscan(string(v), &n)
		m.check(fmt.Sprintf("attribute of inode %d", id), func() *truth { return &m.inodes[id].value }, n, from)
	default:
		a, err := c.GetAttr(ctx, id)
		switch {
		case err == nil:
			m.checkAttr(id, a.Attr.Ctime, from)
			m.mu.Lock()
			if n := m.inodes[id]; n.dir && n.sizes[a.Attr.Ctime] != a.Attr.Size {
				m.t.Errorf("directory %d has %d entries at change %d, not %d", id, n.sizes[a.Attr.Ctime], a.Attr.Ctime, a.Attr.Size)
			}
			m.mu.Unlock()
		case gone(err):
			m.checkAttr(id, 0, from)
		}
	}
}

func isStatus(err error, errno syscall.Errno) bool {
	var e *metarpc.Error
	return errors.As(err, &e) && e.Status == metarpc.Status(errno)
}

// own makes the client change something.
func (m *tree) own(ctx context.Context, c *Client) {
	from := m.moment()
	switch op, args := m.any(); a := args.(type) {
	case *metarpc.CreateArgs:
		if a, created, err := c.Create(ctx, metarpc.Cred{}, a); err == nil && created {
			m.checkAttr(a.Attr.ID, a.Attr.Ctime, from)
		}
	case *metarpc.MakeNodeArgs:
		if a, err := c.MakeNode(ctx, metarpc.Cred{}, a); err == nil {
			m.checkAttr(a.Attr.ID, a.Attr.Ctime, from)
		}
	case *metarpc.RemoveArgs:
		c.Remove(ctx, metarpc.Cred{}, a.Parent, a.Name, false)
	case *metarpc.LinkArgs:
		c.Link(ctx, metarpc.Cred{}, a.ID, a.Parent, a.Name)
	case *metarpc.RenameArgs:
		c.Rename(ctx, metarpc.Cred{}, a)
	case *metarpc.SetAttrArgs:
		if m.random(2) == 0 {
			c.LayoutCommit(ctx, []metarpc.SizeReport{{ID: a.ID}}, true)
		} else {
			c.SetAttr(ctx, metarpc.Cred{}, a)
		}
	case *metarpc.XattrArgs:
		if op == metarpc.OpSetXattr {
			c.SetXattr(ctx, metarpc.Cred{}, a.ID, a.Name, a.Value, 0)
		} else {
			c.RemoveXattr(ctx, metarpc.Cred{}, a.ID, a.Name)
		}
	}
}

// Whatever others and this client change, whatever overtakes what, and whenever connections and the service break
// down: nothing is told from the cache that was not true when it was asked.
func TestLeasesAtRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rounds := 20
	if testing.Short() {
		rounds = 5
	}
	for round := range rounds {
		synctest.Test(t, func(t *testing.T) { leasesAtRandom(t, seed+uint64(round)) })
		if t.Failed() {
			t.Fatalf("in the round of seed %d", seed+uint64(round))
		}
	}
}

func leasesAtRandom(t *testing.T, seed uint64) {
	s := newService(t)
	m := &tree{
		t: t, s: s, r: rand.New(rand.NewPCG(seed, 1)), inodes: map[layout.FileID]*treeInode{}, names: map[nameKey]*truth{},
		held: map[layout.FileID]metarpc.Lease{}, changing: map[layout.FileID]int{}, waiting: map[uint64]chan struct{}{},
		last: treeDirs, now: 1,
	}
	for id := layout.FileID(1); id <= treeDirs; id++ {
		m.inodes[id] = &treeInode{dir: true, sizes: map[int64]int64{}, attr: metarpc.Attr{ID: id}}
		m.dirs = append(m.dirs, id)
		m.touch(id)
	}
	s.handle = m.handle
	s.welcome = func(net.Conn, *metarpc.Welcome) bool { return m.moment() == 1 || m.random(10) != 0 }
	c := connected(t, s, Config{OnLeaseRecall: func(context.Context, []metarpc.LeaseItem) { m.pause(2 * time.Millisecond) }})
	if seed%2 == 0 { // so that leases are given back all the time
		c.leases.mu.Lock()
		c.leases.limit = 5
		c.leases.mu.Unlock()
	}
	s.tasks.Go(m.backs)

	var work sync.WaitGroup
	asked := 0
	for i := range 11 {
		work.Go(func() {
			for range 150 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				switch {
				case i < 5:
					m.question(ctx, c)
					m.mu.Lock()
					asked++
					m.mu.Unlock()
				case i < 8:
					if m.random(10) == 0 {
						cancel()
						ctx, cancel = context.WithTimeout(t.Context(), 2*time.Millisecond)
					}
					m.own(ctx, c)
					m.pause(6 * time.Millisecond)
				default:
					m.change()
					m.pause(10 * time.Millisecond)
				}
				cancel()
				m.pause(time.Millisecond)
			}
		})
	}
	work.Go(func() {
		for range 8 {
			m.pause(200 * time.Millisecond)
			switch m.random(4) {
			case 0, 1:
				s.hangUp()
			case 2: // a restart: nothing is known of leases any more, but nobody changes anything until the client has said so
				s.mu.Lock()
				s.instance[0]++
				s.mu.Unlock()
				m.mu.Lock()
				clear(m.held)
				m.grace = true
				m.mu.Unlock()
				s.hangUp()
			case 3:
				m.mu.Lock()
				m.number++
				number := m.number
				m.mu.Unlock()
				m.call(metarpc.BackHeader{Number: number, Op: metarpc.BackLeaseShrink}, &metarpc.LeaseShrinkArgs{Keep: m.random(5)})
			}
		}
	})
	work.Wait()
	c.leases.mu.Lock()
	pending, names, unknown, changes := len(c.leases.pending), len(c.leases.nameChanges), c.leases.unknown, len(c.leases.changes)
	c.leases.mu.Unlock()
	st := c.State()
	if testing.Verbose() {
		t.Logf("seed %d: %d questions, calls %v, %d leases granted, %d recalls", seed, asked, st.Calls, m.granted, m.recalled)
	}
	if pending+names+unknown+changes > 0 && st.Busy == 0 {
		t.Errorf("nothing is outstanding, but %d inodes and %d names are, %d unknown, %d changes", pending, names, unknown, changes)
	}
}
