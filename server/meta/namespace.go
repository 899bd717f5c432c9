package meta

import (
	"context"
	"errors"
	"sync"
	"syscall"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// place is a name in a directory, as it was read: with or without an entry.
type place struct {
	dir    layout.FileID
	name   string
	parent schema.Inode
	key    []byte // of the entry
	raw    []byte // the entry as stored; nil if there is none
	entry  schema.Entry
	guess  []byte // the directory's inode as it was stored when somebody read it last; nil if that was now
}

// dirTable remembers what inodes of directories were when they were read last.
type dirTable struct {
	mu   sync.Mutex
	rows map[layout.FileID][]byte
}

// dirsKept is how many a dirTable remembers, each some 200 bytes.
const dirsKept = 1 << 14

func (d *dirTable) get(id layout.FileID) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rows[id]
}

func (d *dirTable) put(id layout.FileID, raw []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, known := d.rows[id]; !known && len(d.rows) >= dirsKept {
		clear(d.rows)
	}
	d.rows[id] = raw
}

// place reads a name in dir, which the caller may look into. That there is no entry is no error, that there is no directory
// is one.
func (s *Service) place(ctx context.Context, who *perm.Caller, dir layout.FileID, name string) (*place, error) {
	p := &place{dir: dir, name: name, key: schema.EntryKey(dir, name)}
	keys := [][]byte{p.key, schema.InodeKey(dir)}
	raw, err := s.engine.GetMany(ctx, keys)
	if err != nil {
		return nil, err
	}
	if raw[1] == nil {
		return nil, s.inRemoved(dir)
	}
	if err := s.enter(ctx, who, p, raw[1]); err != nil {
		return nil, err
	}
	s.dirs.put(dir, raw[1])
	if p.raw = raw[0]; p.raw != nil {
		if err := schema.DecodeRow(keys[0], p.raw, &p.entry); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// newPlace is place for a name that its client takes for new. The first try reads nothing if the directory has been read before: the guards
// of the batch tell whether the directory is still the same, and there is no such entry.
func (s *Service) newPlace(ctx context.Context, who *perm.Caller, t *tx, dir layout.FileID, name string) (*place, error) {
	if raw := s.dirs.get(dir); raw != nil && t.first {
		t.guessed = true
		p := &place{dir: dir, name: name, key: schema.EntryKey(dir, name), guess: raw}
		return p, s.enter(ctx, who, p, raw)
	}
	return s.place(ctx, who, dir, name)
}

// enter takes raw for the inode of p's directory, which the caller may look into.
func (s *Service) enter(ctx context.Context, who *perm.Caller, p *place, raw []byte) error {
	if err := schema.DecodeRow(schema.InodeKey(p.dir), raw, &p.parent); err != nil {
		return err
	}
	if !isDir(p.parent.Mode) {
		return errNotDir
	}
	return s.permission(ctx, who, p.dir, &p.parent, metarpc.AccessExec)
}

func (p *place) exists() bool { return p.raw != nil }

// guard makes t depend on the entry being as it was read.
func (p *place) guard(t *tx) {
	switch {
	case p.exists():
		t.GuardEqual(p.key, p.raw) // and so its directory exists
		return
	case p.guess != nil:
		t.GuardEqual(schema.InodeKey(p.dir), p.guess)
	default:
		t.GuardPresent(schema.InodeKey(p.dir))
	}
	t.GuardAbsent(p.key)
}

// put makes the name one of an inode.
func (p *place) put(t *tx, id layout.FileID, mode uint32) {
	t.Put(p.key, schema.Encode(&schema.Entry{ID: id, Type: mode & syscall.S_IFMT}))
}

func (s *Service) lookup(ctx context.Context, c *call, a *metarpc.NameArgs) (*metarpc.LookupResult, error) {
	if who := s.caller(c); !who.Privileged {
		dir, err := s.directory(ctx, a.Parent)
		if err == nil {
			err = s.permission(ctx, who, a.Parent, &dir, metarpc.AccessExec)
		}
		if err != nil {
			return nil, err
		}
	}
	key := schema.EntryKey(a.Parent, a.Name)
	names := s.lease(c.sess, a.Parent, metarpc.LeaseNames)
	for try := range retry.Tries {
		if err := retry.BackOff(ctx, try); err != nil {
			return nil, err
		}
		var entry schema.Entry
		raw, err := schema.ReadRow(ctx, s.engine, key, &entry)
		if err != nil {
			return nil, err
		}
		if raw == nil {
			if _, err := s.directory(ctx, a.Parent); err != nil {
				s.noNames(c.sess, a.Parent, err)
				return nil, err
			}
			return &metarpc.LookupResult{Names: names}, nil
		}
		var attr metarpc.Attr
		var lease metarpc.Lease
		if s.mine(entry.ID) {
			attr, lease, err = s.show(ctx, c.sess, entry.ID)
		} else {
			attr, err = s.foreignAttr(ctx, entry)
		}
		if !errors.Is(err, errStale) { // else the name went, or went to another inode, in between
			return &metarpc.LookupResult{Attr: attr, Lease: lease, Names: names}, err
		}
	}
	return nil, errContended
}

func (s *Service) parent(ctx context.Context, _ *call, a *metarpc.ParentArgs) (*metarpc.ParentResult, error) {
	row, _, err := s.inode(ctx, a.ID)
	if err == nil && a.Top != layout.RootID {
		if err = s.below(ctx, a.Top, a.ID); errors.Is(err, errAccess) {
			s.usage.ForgetParents() // another service may have renamed a directory
			err = s.below(ctx, a.Top, a.ID)
		}
	}
	return &metarpc.ParentResult{Parent: row.Parent}, err
}

// noNames takes back the lease on the names of what turned out to be no directory.
func (s *Service) noNames(sess *session, id layout.FileID, err error) {
	if errors.Is(err, errStale) || errors.Is(err, errNoEntry) || errors.Is(err, errNotDir) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unlease(sess, id, metarpc.LeaseNames)
	}
}

// directory reads the inode of a directory, ENOENT if it has been removed.
func (s *Service) directory(ctx context.Context, id layout.FileID) (schema.Inode, error) {
	row, _, err := s.inode(ctx, id)
	switch {
	case errors.Is(err, errStale):
		err = s.inRemoved(id)
	case err == nil && !isDir(row.Mode):
		err = errNotDir
	}
	return row, err
}

// insert adds a new inode and its name to t.
func (p *place) insert(t *tx, id layout.FileID, n *newborn) {
	row := &n.row
	row.Parent = p.dir
	t.Grows = true
	n.put(t, id)
	p.guard(t)
	p.put(t, id, row.Mode)
	t.Put(schema.InodeKey(id), schema.Encode(row))
	subdirs := int64(0)
	if isDir(row.Mode) {
		subdirs = 1
	}
	touch(t, p.dir, 1, subdirs, row.Btime)
	t.Charge(row, 1)
	t.affects(p.dir, metarpc.LeaseAttrs|metarpc.LeaseNames)
}

func (s *Service) create(ctx context.Context, c *call, a *metarpc.CreateArgs) (*metarpc.CreateResult, error) {
	return change(ctx, s, c, func(t *tx) (*metarpc.CreateResult, error) {
		who := s.caller(c)
		p, err := s.newPlace(ctx, who, t, a.Parent, a.Name)
		if err != nil {
			return nil, err
		}
		if p.exists() {
			return s.openExisting(ctx, c, p, a)
		}
		if err := s.mayInsert(ctx, who, p); err != nil {
			return nil, err
		}
		id, err := s.numbers.take(ctx, s.cfg.Shard)
		if err != nil {
			return nil, err
		}
		n, err := s.newInode(ctx, who, p, syscall.S_IFREG|a.Mode, a.Umask, now())
		if err != nil {
			return nil, err
		}
		n.row.Policy = s.policy(&p.parent)
		if err := s.quotas.AdmitNew(ctx, p.dir, &n.row); err != nil {
			return nil, err
		}
		s.openNew(t, c.sess, id)
		p.insert(t, id, n)
		r := &metarpc.CreateResult{Attr: attrOf(id, &n.row, nil, report{}), Created: true, Lease: s.leaseNew(t, c, id, metarpc.LeaseAttrs)}
		if a.Layout {
			r.Segments, err = s.grantNew(ctx, t, c, id, &n.row, a.Near)
			r.Granted = len(r.Segments) > 0
		}
		return r, err
	})
}

// leaseNew gives the caller a lease on the inode that t makes, of which nobody else can know yet.
func (s *Service) leaseNew(t *tx, c *call, id layout.FileID, want metarpc.Lease) metarpc.Lease {
	lease := s.lease(c.sess, id, want)
	t.onOutcome(func(committed bool) {
		if !committed {
			s.noLease(c.sess, id)
		}
	})
	return lease
}

// openNew makes a file that t makes open for reading and writing. Others can find and remove it as soon as it is committed,
// so it is open before.
func (s *Service) openNew(t *tx, sess *session, id layout.FileID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cl := s.file(id).claim(sess)
	cl.open, cl.write, cl.opened = true, true, true
	t.onOutcome(func(committed bool) {
		if !committed {
			s.mu.Lock()
			s.gone(s.file(id))
			s.mu.Unlock()
		}
	})
}

func (s *Service) openExisting(ctx context.Context, c *call, p *place, a *metarpc.CreateArgs) (*metarpc.CreateResult, error) {
	switch {
	case a.Exclusive:
		return nil, errExist
	case p.entry.Type == syscall.S_IFDIR:
		return nil, errIsDir
	case p.entry.Type != syscall.S_IFREG:
		return nil, errExist
	case !s.mine(p.entry.ID): // it is opened in the session for its shard
		attr, err := s.foreignAttr(ctx, p.entry)
		return &metarpc.CreateResult{Attr: attr}, err
	}
	attr, lease, err := s.openFile(ctx, c, &metarpc.OpenArgs{ID: p.entry.ID, Access: a.Access})
	if errors.Is(err, errStale) {
		return nil, errRetry
	}
	return &metarpc.CreateResult{Attr: attr, Lease: lease}, err
}

// policy is what a new regular file in a directory gets.
func (s *Service) policy(parent *schema.Inode) schema.Policy {
	return schema.PolicyOf(parent.Policy.Layout().Or(s.volume.Policy.Layout()))
}

func (s *Service) makeNode(ctx context.Context, c *call, a *metarpc.MakeNodeArgs) (*metarpc.AttrResult, error) {
	return change(ctx, s, c, func(t *tx) (*metarpc.AttrResult, error) {
		who := s.caller(c)
		p, err := s.newPlace(ctx, who, t, a.Parent, a.Name)
		if err != nil {
			return nil, err
		}
		if p.exists() {
			return nil, errExist
		}
		if err := s.mayInsert(ctx, who, p); err != nil {
			return nil, err
		}
		if !who.Privileged && isDevice(a) {
			return nil, errPerm
		}
		id, err := s.numbers.take(ctx, s.birthShard(a.Mode))
		if err != nil {
			return nil, err
		}
		n, err := s.newInode(ctx, who, p, a.Mode, a.Umask, now())
		if err != nil {
			return nil, err
		}
		row := &n.row
		lease := metarpc.LeaseAttrs
		switch a.Mode & syscall.S_IFMT {
		case syscall.S_IFDIR:
			lease |= metarpc.LeaseNames
			row.Nlink = 0
			row.Policy = p.parent.Policy
		case syscall.S_IFREG:
			row.Policy = s.policy(&p.parent)
		case syscall.S_IFLNK:
			row.Target = a.Target
			row.Size = int64(len(a.Target))
		case syscall.S_IFCHR, syscall.S_IFBLK:
			row.Rdev = a.Rdev
		}
		if err := s.quotas.AdmitNew(ctx, p.dir, row); err != nil {
			return nil, err
		}
		p.insert(t, id, n)
		return &metarpc.AttrResult{Attr: attrOf(id, row, nil, report{}), Lease: s.leaseNew(t, c, id, lease)}, nil
	})
}

// isDevice reports whether a makes what only root may. A character device 0:0 is a mark that overlayfs makes for anybody.
func isDevice(a *metarpc.MakeNodeArgs) bool {
	t := a.Mode & syscall.S_IFMT
	return t == syscall.S_IFBLK || t == syscall.S_IFCHR && a.Rdev != 0
}

func (s *Service) link(ctx context.Context, c *call, a *metarpc.LinkArgs) (*metarpc.AttrResult, error) {
	lease := s.lease(c.sess, a.ID, metarpc.LeaseAttrs)
	if err := s.settleSize(ctx, c.sess, a.ID); err != nil {
		return nil, err
	}
	return change(ctx, s, c, func(t *tx) (*metarpc.AttrResult, error) {
		who := s.caller(c)
		p, err := s.place(ctx, who, a.Parent, a.Name)
		if err != nil {
			return nil, err
		}
		if p.exists() {
			return nil, errExist
		}
		if err := s.mayInsert(ctx, who, p); err != nil {
			return nil, err
		}
		reported, err := s.reports(ctx, a.ID)
		if err == nil {
			err = s.beginNaming(ctx, t, a.ID)
		}
		if err != nil {
			return nil, err
		}
		row, raw, err := s.inode(ctx, a.ID)
		switch {
		case err != nil:
			return nil, err
		case isDir(row.Mode):
			return nil, errPerm
		case row.Nlink == 0 && !row.Linkable:
			return nil, errNoEntry // nobody can name it, so nobody can name it anew
		case row.Nlink >= maxLinks:
			return nil, errLinks
		}
		t.Grows = true
		p.guard(t)
		t.GuardEqual(schema.InodeKey(a.ID), raw)
		at := now()
		if row.Nlink == 0 {
			row.Linkable = false
			t.Delete(schema.OrphanKey(a.ID))
		}
		row.Nlink++
		row.Ctime = at
		if err := s.moveUsage(ctx, t, a.ID, &row, 0, p.dir); err != nil {
			return nil, err
		}
		t.Put(schema.InodeKey(a.ID), schema.Encode(&row))
		p.put(t, a.ID, row.Mode)
		touch(t, p.dir, 1, 0, at)
		t.affects(p.dir, metarpc.LeaseAttrs|metarpc.LeaseNames)
		t.affects(a.ID, metarpc.LeaseAttrs)
		return &metarpc.AttrResult{Attr: s.shownWith(a.ID, attrOf(a.ID, &row, nil, reported[0].to(c.sess))), Lease: lease}, nil
	})
}

func (s *Service) remove(ctx context.Context, c *call, a *metarpc.RemoveArgs) (*metarpc.RemoveResult, error) {
	who := s.caller(c)
	if who.ReadOnly {
		return nil, errReadOnly
	}
	return change(ctx, s, c, func(t *tx) (*metarpc.RemoveResult, error) {
		p, err := s.place(ctx, who, a.Parent, a.Name)
		if err != nil {
			return nil, err
		}
		if !p.exists() {
			return nil, errNoEntry
		}
		if err := s.mayDelete(ctx, who, p); err != nil {
			return nil, err
		}
		dir := p.entry.Type == syscall.S_IFDIR
		switch {
		case dir && !a.Dir:
			return nil, errIsDir
		case !dir && a.Dir:
			return nil, errNotDir
		}
		at := now()
		p.guard(t)
		t.Delete(p.key)
		subdirs := int64(0)
		if dir {
			subdirs = -1
		}
		touch(t, p.dir, -1, subdirs, at)
		t.affects(p.dir, metarpc.LeaseAttrs|metarpc.LeaseNames)
		return &metarpc.RemoveResult{At: at}, s.unlink(ctx, t, p, at)
	})
}

// unlink adds to t what it does to an inode that the entry of p goes. The entry itself and its directory are the caller's.
func (s *Service) unlink(ctx context.Context, t *tx, p *place, at int64) error {
	entry := p.entry
	row, raw, err := s.inode(ctx, entry.ID)
	if errors.Is(err, errStale) {
		return errRetry
	}
	if err != nil {
		return err
	}
	key := schema.InodeKey(entry.ID)
	t.GuardEqual(key, raw)
	t.affects(entry.ID, metarpc.LeaseAttrs|metarpc.LeaseNames)
	mine := s.mine(entry.ID)
	t.holding.letLastGo(entry.ID)
	if !mine && (isDir(row.Mode) || row.Nlink == 1) {
		t.loses(entry.ID)
	}
	switch {
	case isDir(row.Mode):
		from, to := schema.EntriesAfter(entry.ID, 0)
		for _, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: 1, KeysOnly: true}) {
			if err == nil {
				err = errNotEmpty
			}
			return err
		}
		t.GuardRangeEmpty(from, to)
		counters, err := schema.ReadCounters(ctx, s.engine, entry.ID)
		if err != nil {
			return err
		}
		t.Delete(schema.CountersKey(entry.ID))
		if err := s.usage.TakeBack(ctx, &t.Change, entry.ID, p.dir, 0); err != nil {
			return err
		}
		if mine {
			s.rememberRemoved(entry.ID, row, counters, at)
		}
		return s.destroy(ctx, t, entry.ID, &row)
	case row.Nlink > 1:
		row.Nlink--
		row.Ctime = at
		if row.Parent == p.dir {
			t.Rehome(&row, 0)
		}
		t.Put(key, schema.Encode(&row))
		return nil
	case isRegular(row.Mode):
		keep := !mine // its service decides about it, as soon as it has no name
		if mine {
			var err error
			if keep, err = s.beginRemoval(ctx, t, entry.ID); err != nil {
				return err
			}
		}
		if keep {
			row.Nlink = 0
			row.Ctime = at
			t.Rehome(&row, 0)
			t.Put(key, schema.Encode(&row))
			t.Put(schema.OrphanKey(entry.ID), nil)
			return nil
		}
		if err := s.discard(ctx, t, entry.ID); err != nil {
			return err
		}
	}
	if mine {
		s.rememberRemoved(entry.ID, row, nil, at)
	}
	return s.destroy(ctx, t, entry.ID, &row)
}

// destroy adds to t that an inode goes: its own row, which the caller guards, and its extended attributes, which
// change only together with it.
func (s *Service) destroy(ctx context.Context, t *tx, id layout.FileID, row *schema.Inode) error {
	t.Delete(schema.InodeKey(id))
	t.Charge(row, -1)
	t.onOutcome(func(committed bool) {
		if committed {
			s.unleaseAll(id)
		}
	})
	if row.Xattrs == 0 {
		return nil
	}
	from, to := xattrRange(id)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			return err
		}
		t.Delete(append([]byte(nil), kv.Key...))
	}
	return nil
}

// discard adds to t what goes together with the inode of a regular file: its layout, its data files, and the notes about
// who may be writing it.
func (s *Service) discard(ctx context.Context, t *tx, id layout.FileID) error {
	key := schema.LayoutKey(id)
	var row schema.Layout
	raw, err := schema.ReadRow(ctx, s.engine, key, &row)
	if err != nil {
		return err
	}
	if s.cfg.Files.OnNamespaces(row) { // others are given what it has there
		if err := s.awaitBarred(ctx, id); err != nil {
			return err
		}
	}
	if raw == nil {
		t.GuardAbsent(key)
	} else {
		t.GuardEqual(key, raw)
		t.Delete(key)
		s.cfg.Files.Discard(&t.Batch, id, row)
		if row.Incomplete() {
			t.Delete(schema.FillKey(id))
		}
		t.onOutcome(func(committed bool) {
			if committed {
				for i := range row.Caches {
					s.caches.remove(id, row.Caches[i].File.Device)
				}
				s.cfg.Files.Kick()
			}
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for _, cl := range f.claims {
		if cl.writer {
			t.Delete(schema.WriterKey(id, cl.sess.id))
		}
	}
	if f.cut != nil {
		t.Delete(schema.TruncateKey(id))
	}
	return nil
}
