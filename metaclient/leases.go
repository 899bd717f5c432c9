package metaclient

import (
	"container/list"
	"slices"
	"strings"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	// leaseInodes is how many inodes there are leases on, and how many names are kept, those used last.
	leaseInodes = 100_000
	// maxMarks bounds the marks of each kind; with more, no answer to a question that was asked before is kept.
	maxMarks = 1 << 14
	// xattrBytes and xattrRoom bound what is kept of extended attributes: of one inode and of all.
	xattrBytes = 8 << 10
	xattrRoom  = 32 << 20
)

// leaseTable is what the service has told of inodes on which there are leases. Whether the leases still hold by our own
// clock is for the caller to know.
//
// An answer is kept only if nothing can have made it wrong since its question was asked. clock counts what can: recalls
// that arrived, and changes by this session that were answered. Marks say for inodes and names at which time of clock
// that last was, and pending of which changes there is no answer yet.
type leaseTable struct {
	limit int
	wake  func() // there are leases to be given back

	mu     sync.Mutex
	inodes map[layout.FileID]*leased
	order  list.List // of *leased, the last used first
	names  list.List // of *leasedName, the last used first
	xattrs int       // bytes

	clock     uint64
	floor     uint64 // answers to questions asked before are not kept
	marks     map[layout.FileID]mark
	nameMarks map[nameKey]uint64
	// Changes that are not answered: of how many an inode's attributes or a name are part.
	pending     map[layout.FileID]int
	nameChanges map[nameKey]int
	unknown     int // changes of inodes of which we do not know which they are
	changes     map[*change]bool
	// generation counts how often everything that is known under LeaseAttrs was forgotten.
	generation uint64

	returns []metarpc.LeaseItem   // to be given back
	giving  map[layout.FileID]int // those, and those of which it is not answered that they are
}

// leased is an inode on which there is a lease.
type leased struct {
	id   layout.FileID
	used *list.Element
	held metarpc.Lease
	// Since when there has been LeaseAttrs, and LeaseNames, by the clock.
	attrsSince, namesSince uint64

	generation uint64 // what follows is worthless if it is not the table's

	known  bool // attr is
	attr   metarpc.Attr
	target string                   // of a symbolic link; "" = not known
	listed bool                     // xnames are all extended attributes
	xnames []string                 // replaced, never changed
	values map[string][]byte        // of extended attributes; nil = there is none
	bytes  int                      // in xnames and values
	names  map[string]*list.Element // in leaseTable.names
	whole  bool                     // of a directory: there are no other names than names, but for those that are being changed
}

type leasedName struct {
	dir   *leased
	name  string
	child layout.FileID // 0 = there is no such name
}

type nameKey struct {
	dir  layout.FileID
	name string
}

type mark struct{ attrs, names uint64 }

// change is a change that this session makes, from before it is asked for until it is answered.
type change struct {
	asked   uint64
	ids     []layout.FileID // whose attributes change
	names   []nameKey       // which change
	meant   bool            // what the names mean is among ids
	unknown bool            // attributes of others may change, too
	dir     layout.FileID   // its attributes change in a way that the answer tells (told); 0 = there is none
	told    bool
}

func newLeaseTable(limit int) *leaseTable {
	return &leaseTable{
		limit: limit, inodes: map[layout.FileID]*leased{}, marks: map[layout.FileID]mark{}, nameMarks: map[nameKey]uint64{},
		pending: map[layout.FileID]int{}, nameChanges: map[nameKey]int{}, giving: map[layout.FileID]int{},
		changes: map[*change]bool{},
	}
}

// ask returns the time at which a question is asked that is sent after.
func (l *leaseTable) ask() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.clock
}

func (l *leaseTable) len() (inodes, names int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.inodes), l.names.Len()
}

// each calls f with the names that lead somewhere.
func (l *leaseTable) each(f func(dir layout.FileID, name string, child layout.FileID)) {
	type known struct {
		dir, child layout.FileID
		name       string
	}
	l.mu.Lock()
	list := make([]known, 0, l.names.Len())
	for e := l.names.Front(); e != nil; e = e.Next() {
		if n := e.Value.(*leasedName); n.child != 0 {
			list = append(list, known{n.dir.id, n.child, n.name})
		}
	}
	l.mu.Unlock() // others ask for names meanwhile
	for _, n := range list {
		f(n.dir, n.name, n.child)
	}
}

// attrs returns an inode's attributes if they are known.
func (l *leaseTable) attrs(id layout.FileID) (attr metarpc.Attr, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.attrsLocked(id)
}

// attrsLocked is attrs; l.mu is held. While a change is not answered, it may have been made or not.
func (l *leaseTable) attrsLocked(id layout.FileID) (attr metarpc.Attr, ok bool) {
	if e := l.use(id); e != nil && e.known && l.pending[id] == 0 {
		return e.attr, true
	}
	return metarpc.Attr{}, false
}

// lookup returns what a name means, with child 0 that there is no such name, and the attributes, with ID 0 if they are not known. ok says that the
// name is known.
func (l *leaseTable) lookup(dir layout.FileID, name string) (child layout.FileID, attr metarpc.Attr, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	child, ok = l.child(dir, name)
	if !ok || child == 0 {
		return child, metarpc.Attr{}, ok
	}
	attr, _ = l.attrsLocked(child)
	return child, attr, true
}

// child returns to which inode a name belongs, 0 if there is none; l.mu is held.
func (l *leaseTable) child(dir layout.FileID, name string) (id layout.FileID, ok bool) {
	d := l.use(dir)
	if d == nil {
		return 0, false
	}
	n := d.names[name]
	if n == nil {
		return 0, d.whole && l.nameChanges[nameKey{dir, name}] == 0
	}
	l.names.MoveToFront(n)
	return n.Value.(*leasedName).child, true
}

// link returns the target of a symbolic link, "" if it is not known.
func (l *leaseTable) link(id layout.FileID) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.use(id); e != nil {
		return e.target
	}
	return ""
}

// xattr returns the value of an extended attribute, nil if there is none. ok says that this is known.
func (l *leaseTable) xattr(id layout.FileID, name string) (value []byte, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.use(id)
	if e == nil {
		return nil, false
	}
	if e.known && e.attr.Flags&xattrFlag(name) == 0 {
		return nil, true
	}
	value, ok = e.values[name]
	return value, ok
}

// xattrFlag is what attributes say of whether there may be an extended attribute.
func xattrFlag(name string) metarpc.AttrFlags {
	switch name {
	case "system.posix_acl_access":
		return metarpc.AttrACL
	case "system.posix_acl_default":
		return metarpc.AttrDefaultACL
	case "security.capability":
		return metarpc.AttrCapability
	}
	return metarpc.AttrXattrs
}

// xattrList returns the names of an inode's extended attributes; they are shared. ok says that they are known.
func (l *leaseTable) xattrList(id layout.FileID) (names []string, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.use(id)
	if e == nil {
		return nil, false
	}
	if e.known && e.attr.Flags&metarpc.AttrXattrs == 0 {
		return nil, true
	}
	return e.xnames, e.listed
}

// use finds an inode and makes it the last used one; l.mu is held.
func (l *leaseTable) use(id layout.FileID) *leased {
	e := l.find(id)
	if e != nil {
		l.order.MoveToFront(e.used)
	}
	return e
}

// find finds an inode; l.mu is held.
func (l *leaseTable) find(id layout.FileID) *leased {
	e := l.inodes[id]
	if e != nil && e.generation != l.generation {
		l.blank(e)
		e.generation = l.generation
	}
	return e
}

// answered keeps the answer to a question about an inode, which came with lease (LeaseAttrs or 0), and reports whether
// it did.
func (l *leaseTable) answered(asked uint64, attr *metarpc.Attr, lease metarpc.Lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.keep(asked, attr, lease)
}

// looked keeps the answer to the question what a name means, and reports what of it was kept. With attr.ID 0 there is no
// such name.
func (l *leaseTable) looked(asked uint64, dir layout.FileID, name string, r *metarpc.LookupResult) (attrs, names bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Attr.ID != 0 {
		attrs = l.keep(asked, &r.Attr, r.Lease)
	}
	return attrs, l.keepName(asked, dir, name, r.Attr.ID, r.Names)
}

// listed keeps a page of a directory, and tells the caller for each entry what was kept.
func (l *leaseTable) listed(asked uint64, dir layout.FileID, r *metarpc.ReadDirResult, tell func(i int, attrs, name bool)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range r.Entries {
		e := &r.Entries[i]
		attrs := l.keep(asked, &e.Attr, e.Lease)
		tell(i, attrs, l.keepName(asked, dir, e.Name, e.Attr.ID, r.Names))
	}
}

// linked keeps the target of a symbolic link.
func (l *leaseTable) linked(asked uint64, id layout.FileID, target string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.under(asked, id); e != nil {
		e.target = target
	}
}

// gotXattr keeps the value of an extended attribute, nil if there is none. It is not to be changed any more.
func (l *leaseTable) gotXattr(asked uint64, id layout.FileID, name string, value []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.under(asked, id)
	n := len(name) + len(value)
	if e == nil || !l.room(e, n) {
		return
	}
	if _, ok := e.values[name]; ok {
		return // the same, as there was no change since
	}
	if e.values == nil {
		e.values = map[string][]byte{}
	}
	e.values[name] = value
	e.bytes += n
	l.xattrs += n
}

// gotList keeps the names of an inode's extended attributes, which are not to be changed any more.
func (l *leaseTable) gotList(asked uint64, id layout.FileID, names []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, name := range names {
		n += len(name) + 16
	}
	e := l.under(asked, id)
	if e == nil || e.listed || !l.room(e, n) {
		return
	}
	e.listed, e.xnames = true, names
	e.bytes += n
	l.xattrs += n
}

// room reports whether n bytes more can be kept of an inode; l.mu is held.
func (l *leaseTable) room(e *leased, n int) bool {
	return e.bytes+n <= xattrBytes && l.xattrs+n <= xattrRoom
}

// fresh reports whether nothing can have changed an inode's attributes since asked; l.mu is held.
func (l *leaseTable) fresh(asked uint64, id layout.FileID) bool {
	return asked >= l.floor && l.unknown == 0 && l.pending[id] == 0 && l.giving[id] == 0 && l.marks[id].attrs <= asked
}

// under returns an inode if an answer without a lease of its own may be kept: there was LeaseAttrs when the question was
// asked, and is now; l.mu is held.
func (l *leaseTable) under(asked uint64, id layout.FileID) *leased {
	e := l.find(id)
	if e == nil || e.held&metarpc.LeaseAttrs == 0 || e.attrsSince > asked || !l.fresh(asked, id) {
		return nil
	}
	return e
}

// keep is answered; l.mu is held. Without a lease of its own an answer is kept under one that there was before.
func (l *leaseTable) keep(asked uint64, attr *metarpc.Attr, lease metarpc.Lease) bool {
	var e *leased
	if lease&metarpc.LeaseAttrs == 0 {
		e = l.under(asked, attr.ID)
	} else if l.fresh(asked, attr.ID) {
		e = l.hold(attr.ID)
		if e.held&metarpc.LeaseAttrs == 0 {
			l.clock++
			e.held, e.attrsSince = e.held|metarpc.LeaseAttrs, l.clock
		}
	}
	if e == nil {
		return false
	}
	e.known, e.attr = true, *attr
	return true
}

// keepName keeps what a name means, child 0 for nothing; l.mu is held. Without a lease of its own an answer is kept under
// one that there was before.
func (l *leaseTable) keepName(asked uint64, dir layout.FileID, name string, child layout.FileID, lease metarpc.Lease) bool {
	k := nameKey{dir, name}
	if asked < l.floor || l.giving[dir] > 0 || l.marks[dir].names > asked || l.nameChanges[k] > 0 || l.nameMarks[k] > asked {
		return false
	}
	d := l.inodes[dir]
	if lease&metarpc.LeaseNames == 0 && (d == nil || d.held&metarpc.LeaseNames == 0 || d.namesSince > asked) {
		return false
	}
	d = l.hold(dir)
	if d.held&metarpc.LeaseNames == 0 {
		l.clock++
		d.held, d.namesSince = d.held|metarpc.LeaseNames, l.clock
	}
	if n := d.names[name]; n != nil {
		n.Value.(*leasedName).child = child
		l.names.MoveToFront(n)
		return true
	}
	if d.names == nil {
		d.names = map[string]*list.Element{}
	}
	name = strings.Clone(name) // which may be a part of something larger
	d.names[name] = l.names.PushFront(&leasedName{dir: d, name: name, child: child})
	for l.names.Len() > l.limit {
		last := l.names.Back()
		if name := last.Value.(*leasedName); name.child != 0 {
			name.dir.whole = false
		}
		l.dropName(last)
	}
	return true
}

// made keeps that a directory which this session has just made is empty, if lease is one on its names; l.mu is held.
func (l *leaseTable) made(asked uint64, id layout.FileID, lease metarpc.Lease) {
	// Whoever has changed its names since has changed its attributes, too.
	if lease&metarpc.LeaseNames == 0 || !l.fresh(asked, id) || l.marks[id].names > asked {
		return
	}
	d := l.hold(id)
	if d.held&metarpc.LeaseNames == 0 {
		l.clock++
		d.held, d.namesSince = d.held|metarpc.LeaseNames, l.clock
	}
	d.whole = true
}

// grown keeps what has become of a directory's attributes by a change that was made, of so many entries and directories among
// them; l.mu is held. What other changes of this session do to them comes on top, in any order.
func (l *leaseTable) grown(ch *change, entries int64, dirs int32, at int64) {
	ch.told = true
	e := l.find(ch.dir)
	if e == nil || !e.known {
		return
	}
	e.attr.Size = max(0, e.attr.Size+entries)
	e.attr.Nlink = uint32(int32(e.attr.Nlink) + dirs)
	e.attr.Mtime, e.attr.Ctime = max(e.attr.Mtime, at), max(e.attr.Ctime, at)
}

// hold returns an inode, taking it in if there is no lease on it; l.mu is held. The one used longest ago may have to go.
func (l *leaseTable) hold(id layout.FileID) *leased {
	e := l.find(id)
	if e != nil {
		return e
	}
	for len(l.inodes) >= l.limit {
		l.giveBack(l.order.Back().Value.(*leased))
	}
	e = &leased{id: id, generation: l.generation}
	e.used = l.order.PushFront(e)
	l.inodes[id] = e
	return e
}

// giveBack forgets an inode and has its leases given back; l.mu is held.
func (l *leaseTable) giveBack(e *leased) {
	l.returns = append(l.returns, metarpc.LeaseItem{ID: e.id, Lease: e.held})
	l.giving[e.id]++
	l.forget(e, metarpc.LeaseAttrs|metarpc.LeaseNames)
	l.wake()
}

// shrink has leases given back until there are some on keep inodes only.
func (l *leaseTable) shrink(keep int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.inodes) > keep {
		l.giveBack(l.order.Back().Value.(*leased))
	}
}

// batch takes up to n inodes whose leases are to be given back; given follows when that is answered.
func (l *leaseTable) batch(n int) []metarpc.LeaseItem {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, len(l.returns))
	items := slices.Clone(l.returns[:n])
	if l.returns = l.returns[n:]; len(l.returns) == 0 {
		l.returns = nil
	}
	return items
}

// given follows batch. The service may have granted a lease before it took it back, so what was asked before is not kept.
func (l *leaseTable) given(items []metarpc.LeaseItem) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clock++
	for _, it := range items {
		less(l.giving, it.ID)
		l.mark(it.ID, metarpc.LeaseAttrs|metarpc.LeaseNames)
	}
}

// recall ends leases, or says that there are none.
func (l *leaseTable) recall(items []metarpc.LeaseItem) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clock++
	for _, it := range items {
		l.mark(it.ID, it.Lease)
		if it.Lease&metarpc.LeaseNames != 0 {
			l.forgetMeanings(func(k nameKey) bool { return k.dir == it.ID })
		}
		if e := l.inodes[it.ID]; e != nil {
			l.forget(e, it.Lease)
		}
	}
}

// clear ends all leases, and returns on what there were any.
func (l *leaseTable) clear() []metarpc.LeaseItem {
	l.mu.Lock()
	defer l.mu.Unlock()
	items := make([]metarpc.LeaseItem, 0, len(l.inodes))
	for id, e := range l.inodes {
		items = append(items, metarpc.LeaseItem{ID: id, Lease: e.held})
	}
	l.forgetMeanings(func(nameKey) bool { return true })
	clear(l.inodes)
	l.order.Init()
	l.names.Init()
	l.xattrs = 0
	l.clock++
	l.floor = l.clock
	clear(l.marks)
	clear(l.nameMarks)
	return items
}

// begin says that a change is about to be asked for, and forgets what it will make wrong. It is to be answered with end.
// unknown says that it may change the attributes of inodes beside ids, of which we do not know which.
func (l *leaseTable) begin(ids []layout.FileID, unknown bool, names ...nameKey) *change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.beginLocked(ids, unknown, names...)
}

// beginIn is begin for a change of one name, of which the answer tells what the directory's attributes are then.
func (l *leaseTable) beginIn(dir layout.FileID, name string) *change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inLocked(dir, l.beginLocked(nil, false, nameKey{dir, name}))
}

// inLocked makes the directory of a change one whose attributes the answer tells; l.mu is held.
func (l *leaseTable) inLocked(dir layout.FileID, ch *change) *change {
	ch.dir = dir
	l.pending[dir]++
	return ch
}

func (l *leaseTable) beginLocked(ids []layout.FileID, unknown bool, names ...nameKey) *change {
	for _, id := range ids {
		l.pending[id]++
		if e := l.inodes[id]; e != nil {
			l.blank(e)
		}
	}
	for _, k := range names {
		if l.nameChanges[k]++; l.nameChanges[k] > 1 {
			l.forgetMeanings(func(other nameKey) bool { return other == k })
		}
		if d := l.inodes[k.dir]; d != nil && d.names[k.name] != nil {
			l.dropName(d.names[k.name])
		}
	}
	if unknown {
		l.unknown++
		l.generation++
	}
	ch := &change{asked: l.clock, ids: ids, names: names, unknown: unknown}
	l.changes[ch] = true
	return ch
}

// forgetMeanings says of changes that are not answered that they may change other inodes than was thought, because names
// may mean something else when they are made; l.mu is held.
func (l *leaseTable) forgetMeanings(of func(nameKey) bool) {
	for ch := range l.changes {
		if ch.meant && slices.ContainsFunc(ch.names, of) {
			l.blind(ch)
		}
	}
}

// blind says that a change may change inodes of which we do not know which; l.mu is held.
func (l *leaseTable) blind(ch *change) {
	if !ch.unknown {
		ch.unknown = true
		l.unknown++
		l.generation++
	}
}

// meant is begin for a change of what names mean and of the inodes that they belong to, which it returns, 0 for none.
// ok is false, and nothing is done, if for one of them it is not known whether there is one, unless force is set: then
// any inode may be changed.
func (l *leaseTable) meant(force bool, ids []layout.FileID, names ...nameKey) (ch *change, children []layout.FileID, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.meantLocked(force, ids, names...)
}

// meantIn is meant for the removal of one name, of which the answer tells what the directory's attributes are then.
func (l *leaseTable) meantIn(force bool, name nameKey) (ch *change, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ch, _, ok = l.meantLocked(force, nil, name); ok {
		l.inLocked(name.dir, ch)
	}
	return ch, ok
}

func (l *leaseTable) meantLocked(force bool, ids []layout.FileID, names ...nameKey) (ch *change, children []layout.FileID, ok bool) {
	// There is nothing to be forgotten, but answers that are on their way must not be kept either.
	unknown := false
	for _, k := range names {
		child, ok := l.child(k.dir, k.name)
		if !ok && !force && len(l.inodes) > 0 {
			return nil, nil, false
		}
		unknown = unknown || !ok
		if child != 0 {
			ids = append(ids, child)
		}
		children = append(children, child)
	}
	ch = l.beginLocked(ids, unknown, names...)
	ch.meant = true
	return ch, children, true
}

// end says that a change was answered. If it was made, keep, which may be nil, keeps what the answer says of it.
func (l *leaseTable) end(ch *change, keep func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.changes, ch)
	for _, id := range ch.ids {
		less(l.pending, id)
	}
	for _, k := range ch.names {
		less(l.nameChanges, k)
	}
	if ch.unknown {
		l.unknown--
	}
	if ch.dir != 0 {
		less(l.pending, ch.dir)
	}
	if keep != nil {
		keep()
	}
	l.clock++
	if ch.dir != 0 {
		l.mark(ch.dir, metarpc.LeaseAttrs)
		if e := l.inodes[ch.dir]; e != nil && !ch.told {
			l.blank(e)
		}
	}
	for _, k := range ch.names {
		if d := l.inodes[k.dir]; d != nil && d.names[k.name] == nil {
			d.whole = false // nobody knows what became of it
		}
	}
	for _, id := range ch.ids {
		l.mark(id, metarpc.LeaseAttrs)
	}
	for _, k := range ch.names {
		if len(l.nameMarks) >= maxMarks {
			l.floor = l.clock
			clear(l.nameMarks)
		}
		l.nameMarks[k] = l.clock
	}
	if ch.unknown {
		l.floor = l.clock
	}
}

// mark makes answers worthless to questions about an inode that were asked before the present time of the clock; l.mu is
// held.
func (l *leaseTable) mark(id layout.FileID, lease metarpc.Lease) {
	if len(l.marks) >= maxMarks {
		l.floor = l.clock
		clear(l.marks)
	}
	m := l.marks[id]
	if lease&metarpc.LeaseAttrs != 0 {
		m.attrs = l.clock
	}
	if lease&metarpc.LeaseNames != 0 {
		m.names = l.clock
	}
	l.marks[id] = m
}

// forget ends leases on an inode; l.mu is held.
func (l *leaseTable) forget(e *leased, lease metarpc.Lease) {
	e.held &^= lease
	if lease&metarpc.LeaseAttrs != 0 {
		l.blank(e)
	}
	if lease&metarpc.LeaseNames != 0 {
		for _, n := range e.names {
			l.names.Remove(n)
		}
		e.names, e.whole = nil, false
	}
	if e.held == 0 {
		l.order.Remove(e.used)
		delete(l.inodes, e.id)
	}
}

// blank forgets what is known of an inode under LeaseAttrs, and keeps the lease; l.mu is held.
func (l *leaseTable) blank(e *leased) {
	l.xattrs -= e.bytes
	e.known, e.target, e.listed, e.xnames, e.values, e.bytes = false, "", false, nil, nil, 0
}

// dropName forgets what a name means; l.mu is held.
func (l *leaseTable) dropName(n *list.Element) {
	name := l.names.Remove(n).(*leasedName)
	delete(name.dir.names, name.name)
}

// less takes one off a count.
func less[K comparable](counts map[K]int, k K) {
	if counts[k]--; counts[k] == 0 {
		delete(counts, k)
	}
}
