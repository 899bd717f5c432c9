package meta

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// quotaAge is how old what is known of quotas may be for a decision that is not close.
	quotaAge = 200 * time.Millisecond
	// Where there is a quota of bytes a layout for writing reaches behind the end of a file by a quotaShare-th of what is left, but
	// by no less than quotaLeast and no more than quotaMost bytes.
	quotaShare = 4
	quotaLeast = 1 << 20
	quotaMost  = 64 << 20
	// quotaAlign is a multiple of what clients write as a whole.
	quotaAlign = 4 << 10
)

// quota is what is known of one.
type quota struct {
	name  metarpc.QuotaName
	limit schema.Quota
	used  usage // as far as the catalog and the reports of writers say it
	// What has been admitted since the table was read, and before that, as far as it is not certain to be in used.
	recentBytes, recentFiles atomic.Int64
	earlier                  usage
}

// quotaTable is what is known of quotas at some time. Nobody changes it, but for what is counted in it.
type quotaTable struct {
	at      time.Time // when reading it began
	settled bool      // directories had told all they knew at that time
	quotas  map[metarpc.QuotaName]*quota
	trees   bool                    // some are of directories
	growing map[layout.FileID]int64 // bytes in used that files have, and their inode rows do not yet say
	moves   []byte                  // the row that counts when directories changed their parents
}

// quotaState is what the service has of quotas.
type quotaState struct {
	token chan struct{} // has one token, for whoever reads
	table atomic.Pointer[quotaTable]
}

func (q *quotaState) init() {
	q.token = make(chan struct{}, 1)
	q.token <- struct{}{}
}

// likely is what may be used of q: no less than there is, but for what others have done in the last moments.
func (q *quota) likely() usage {
	return usage{q.used.bytes + q.earlier.bytes + q.recentBytes.Load(), q.used.inodes() + q.earlier.files + q.recentFiles.Load(), 0}
}

// exceeds reports whether q does not allow more if so much is used.
func (q *quota) exceeds(used, more usage) bool {
	return more.bytes > 0 && q.limit.Bytes > 0 && used.bytes+more.bytes > q.limit.Bytes ||
		more.inodes() > 0 && q.limit.Files > 0 && used.inodes()+more.inodes() > q.limit.Files
}

// take notes that more has been admitted.
func (q *quota) take(more usage) {
	q.recentBytes.Add(max(more.bytes, 0))
	q.recentFiles.Add(max(more.inodes(), 0))
}

func (q *quota) String() string {
	switch q.name.Kind {
	case metarpc.QuotaTree:
		return fmt.Sprintf("the quota of directory %d", q.name.ID)
	case metarpc.QuotaUser:
		return fmt.Sprintf("the quota of user %d", q.name.ID)
	}
	return fmt.Sprintf("the quota of group %d", q.name.ID)
}

func (q *quota) refusal() error {
	return refusef(metarpc.Status(syscall.EDQUOT), "%v: %d bytes and %d files are used", q, q.used.bytes, q.used.inodes())
}

// payer is what inodes are charged to.
type payer struct {
	home     layout.FileID // 0: none
	uid, gid uint32
	owner    bool // these two count
}

func payerOf(row *schema.Inode) payer {
	return payer{home: row.Parent, uid: row.UID, gid: row.GID, owner: true}
}

// quotasOf are the quotas in t that count what p is charged with.
func (s *Service) quotasOf(ctx context.Context, t *quotaTable, p payer) (list []*quota, err error) {
	add := func(kind metarpc.QuotaKind, id uint64) {
		if q := t.quotas[metarpc.QuotaName{Kind: kind, ID: id}]; q != nil {
			list = append(list, q)
		}
	}
	if p.owner {
		add(metarpc.QuotaUser, uint64(p.uid))
		add(metarpc.QuotaGroup, uint64(p.gid))
	}
	if t.trees && p.home != 0 {
		chain, err := s.ancestors(ctx, p.home)
		if err != nil {
			return nil, err
		}
		for _, dir := range chain {
			add(metarpc.QuotaTree, uint64(dir))
		}
	}
	return list, nil
}

// admit is EDQUOT if p cannot be charged with more. What is not close to a limit is decided by what is known; otherwise directories tell
// first what they know, so that nothing is refused that would fit.
func (s *Service) admit(ctx context.Context, p payer, more usage) error {
	_, err := s.admitMove(ctx, payer{}, p, more)
	return err
}

// admitMove is admit for what was charged to from before. It reports whether its bytes count for more quotas than before.
func (s *Service) admitMove(ctx context.Context, from, to payer, more usage) (limited bool, err error) {
	t, err := s.quotas(ctx)
	for exact := false; err == nil; exact = true {
		if len(t.quotas) == 0 {
			return false, nil
		}
		list, err := s.quotasOf(ctx, t, to)
		if err != nil {
			return false, err
		}
		had, err := s.quotasOf(ctx, t, from)
		if err != nil {
			return false, err
		}
		list = slices.DeleteFunc(list, func(q *quota) bool { return slices.Contains(had, q) })
		i := slices.IndexFunc(list, func(q *quota) bool {
			if exact {
				return q.exceeds(q.used, more)
			}
			return q.exceeds(q.likely(), more)
		})
		switch {
		case i < 0:
			for _, q := range list {
				q.take(more)
				limited = limited || q.limit.Bytes > 0
			}
			return limited, nil
		case exact:
			return false, list[i].refusal()
		}
		if t, err = s.settledQuotas(ctx); err != nil {
			return false, err
		}
	}
	return false, err
}

// admitNew is admit for an inode that is made in a directory, 0 for none.
func (s *Service) admitNew(ctx context.Context, dir layout.FileID, row *schema.Inode) error {
	return s.admit(ctx, payer{dir, row.UID, row.GID, true}, usage{sizeOf(row), 1, 0})
}

// admitChange is admit for an inode's new size and owner.
func (s *Service) admitChange(ctx context.Context, before, after *schema.Inode) error {
	if before.UID != after.UID || before.GID != after.GID {
		from, to := payerOf(before), payerOf(after)
		from.home, to.home = 0, 0
		if _, err := s.admitMove(ctx, from, to, usage{sizeOf(after), 1, 0}); err != nil {
			return err
		}
	}
	if more := sizeOf(after) - sizeOf(before); more > 0 {
		return s.admit(ctx, payerOf(after), usage{bytes: more})
	}
	return nil
}

// admitMoved is admitMove for what has got a name in another directory: an inode that is no directory, if its home goes along, or a directory with all
// that is below it.
func (s *Service) admitMoved(ctx context.Context, id layout.FileID, row *schema.Inode, from, to layout.FileID) (limited bool, err error) {
	if t, err := s.quotas(ctx); err != nil || !t.trees {
		return false, err
	}
	more := usage{sizeOf(row), 1, 0}
	if isDir(row.Mode) {
		counters, err := schema.ReadCounters(ctx, s.engine, id)
		if err != nil {
			return false, err
		}
		more = totalOf(counters).plus(usage{dirs: 1})
	}
	return s.admitMove(ctx, payer{home: from}, payer{home: to}, more)
}

// room is how many bytes a file may have more than its inode row says, and the quota because of which; nil for none. It is exact if it is less
// than enough.
func (s *Service) room(ctx context.Context, id layout.FileID, row *schema.Inode, enough int64) (left int64, tight *quota, err error) {
	t, err := s.quotas(ctx)
	for exact := false; err == nil; exact = true {
		left, tight = layout.ToEOF, nil
		list, err := s.quotasOf(ctx, t, payerOf(row))
		if err != nil {
			return 0, nil, err
		}
		for _, q := range list {
			if q.limit.Bytes == 0 {
				continue
			}
			used := q.used
			if !exact {
				used = q.likely()
			}
			if n := q.limit.Bytes - used.bytes + t.growing[id]; n < left {
				left, tight = n, q
			}
		}
		if exact || left >= enough {
			return max(left, 0), tight, nil
		}
		if t, err = s.settledQuotas(ctx); err != nil {
			return 0, nil, err
		}
	}
	return 0, nil, err
}

// allowance is up to where a file may be written: row is its inode, and off where somebody is about to write. It is EDQUOT if that is too far.
//
// What is written before off is in what the file has. So a file that is written from its beginning to its end is never longer than its
// quotas allow; but several that are written at a time have no part each.
func (s *Service) allowance(ctx context.Context, id layout.FileID, row *schema.Inode, off int64) (end int64, err error) {
	from := max(off, row.Size)
	left, tight, err := s.room(ctx, id, row, layout.Range{Off: from - row.Size, Len: quotaShare * quotaMost}.End())
	if err != nil || tight == nil {
		return layout.ToEOF, err
	}
	end = layout.Range{Off: row.Size, Len: left}.End()
	if end <= off {
		return 0, tight.refusal()
	}
	if share := min(max((end-from)/quotaShare, quotaLeast), quotaMost); end-from > share {
		end = from + share
	}
	if end > layout.ToEOF-quotaAlign {
		return layout.ToEOF, nil
	}
	return (end + quotaAlign - 1) / quotaAlign * quotaAlign, nil
}

// limited reports whether there is a quota that limits how long a file may become.
func (s *Service) limited(ctx context.Context, id layout.FileID, row *schema.Inode) (bool, error) {
	_, tight, err := s.room(ctx, id, row, 0)
	return tight != nil, err
}

// quotas returns what is known of quotas, after reading it anew if that is too old.
func (s *Service) quotas(ctx context.Context) (*quotaTable, error) {
	if t := s.quota.table.Load(); t != nil && time.Since(t.at) < quotaAge {
		return t, nil
	}
	return s.readQuotas(ctx, time.Now().Add(-quotaAge), false)
}

// settledQuotas has directories tell what they know, and reads all anew.
func (s *Service) settledQuotas(ctx context.Context) (*quotaTable, error) {
	return s.readQuotas(ctx, time.Now(), true)
}

// readQuotas returns a table whose reading began after a time, its own or somebody else's. The first one is settled: the service before may
// have ended before directories told what it had admitted.
func (s *Service) readQuotas(ctx context.Context, after time.Time, settled bool) (*quotaTable, error) {
	select {
	case <-s.quota.token:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { s.quota.token <- struct{}{} }()
	before := s.quota.table.Load()
	if before != nil && before.at.After(after) && (before.settled || !settled) {
		return before, nil
	}
	settled = settled || before == nil
	told := s.usage.told.Load()
	t := &quotaTable{at: time.Now(), quotas: map[metarpc.QuotaName]*quota{}, growing: map[layout.FileID]int64{}}
	owners := false
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixQuota, 1+1+8) {
		if err != nil {
			return nil, err
		}
		q := &quota{name: schema.QuotaOf(kv.Key)}
		if err := schema.DecodeRow(kv.Key, kv.Value, &q.limit); err != nil {
			return nil, err
		}
		t.quotas[q.name] = q
		t.trees = t.trees || q.name.Kind == metarpc.QuotaTree
		owners = owners || q.name.Kind != metarpc.QuotaTree
	}
	if t.settled = settled || len(t.quotas) == 0; settled && t.trees {
		if err := s.settleUsage(ctx); err != nil {
			return nil, err
		}
	}
	if t.trees {
		if err := s.readTrees(ctx, before, t); err != nil {
			return nil, err
		}
	}
	if owners {
		if err := s.readOwners(ctx, t); err != nil {
			return nil, err
		}
	}
	if len(t.quotas) > 0 {
		if err := s.readGrowing(ctx, t); err != nil {
			return nil, err
		}
	}
	if before != nil && !t.settled {
		for name, q := range t.quotas {
			if old := before.quotas[name]; old != nil {
				q.earlier = usage{old.recentBytes.Load(), old.recentFiles.Load(), 0}
				if told == nil || told.Before(before.at) {
					q.earlier = q.earlier.plus(old.earlier)
				}
			}
		}
	}
	s.quota.table.Store(t)
	if before != nil && t.narrower(before) {
		s.tasks.Go(s.recallUnlimited) // ends when all have answered, or with s.ctx
	}
	return t, nil
}

// narrower reports whether there is a quota of bytes in t that allows less than it did before.
func (t *quotaTable) narrower(before *quotaTable) bool {
	for name, q := range t.quotas {
		old := before.quotas[name]
		if q.limit.Bytes > 0 && (old == nil || old.limit.Bytes == 0 || old.limit.Bytes > q.limit.Bytes) {
			return true
		}
	}
	return false
}

// readTrees finds out what is below the directories that have quotas.
func (s *Service) readTrees(ctx context.Context, before, t *quotaTable) error {
	moves, err := schema.FindRow(ctx, s.engine, schema.KeyMoves)
	if err != nil {
		return err
	}
	if before == nil || string(before.moves) != string(moves) {
		s.forgetParents() // another service may have moved them
	}
	t.moves = moves
	var trees []*quota
	var keys [][]byte
	for _, q := range t.quotas {
		if q.name.Kind == metarpc.QuotaTree {
			trees = append(trees, q)
			keys = append(keys, schema.CountersKey(layout.FileID(q.name.ID)))
		}
	}
	raw, err := s.engine.GetMany(ctx, keys)
	if err != nil {
		return err
	}
	for i, q := range trees {
		counters, err := schema.DecodeCounters(keys[i], raw[i])
		if err != nil {
			return err
		}
		q.used = totalOf(counters)
	}
	return nil
}

// readOwners finds out what users and groups have that have quotas.
func (s *Service) readOwners(ctx context.Context, t *quotaTable) error {
	return s.owners(ctx, func(uid, gid uint32, u usage) {
		for _, name := range []metarpc.QuotaName{{Kind: metarpc.QuotaUser, ID: uint64(uid)}, {Kind: metarpc.QuotaGroup, ID: uint64(gid)}} {
			if q := t.quotas[name]; q != nil {
				q.used = q.used.plus(u)
			}
		}
	})
}

// owners calls f with what each user and group have.
func (s *Service) owners(ctx context.Context, f func(uid, gid uint32, u usage)) error {
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixOwner, 1+4+4, 1+4+4+2) {
		if err != nil {
			return err
		}
		counters, err := schema.DecodeCounters(kv.Key, kv.Value)
		if err != nil {
			return err
		}
		uid, gid := schema.OwnerOf(kv.Key)
		f(uid, gid, usage{counters.Field(schema.OwnerBytes), counters.Field(schema.OwnerFiles), 0})
	}
	return nil
}

// readGrowing finds out how much longer files of the shard are than their inode rows say: as far as their writers have asked to write. What those of other shards may
// have grown by is in how far a quota can be exceeded.
func (s *Service) readGrowing(ctx context.Context, t *quotaTable) error {
	ends := map[layout.FileID]int64{}
	s.mu.Lock()
	for id, f := range s.files {
		if end := max(f.reach, f.reported().end, f.placedEnd()); end > 0 && f.writtenByOthers(nil) {
			ends[id] = end
		}
	}
	s.mu.Unlock()
	for ids := range slices.Chunk(slices.Collect(maps.Keys(ends)), 1000) {
		keys := make([][]byte, len(ids))
		for i, id := range ids {
			keys[i] = schema.InodeKey(id)
		}
		raw, err := s.engine.GetMany(ctx, keys)
		if err != nil {
			return err
		}
		for i, id := range ids {
			if raw[i] == nil {
				continue
			}
			var row schema.Inode
			if err := schema.DecodeRow(keys[i], raw[i], &row); err != nil {
				return err
			}
			n := ends[id] - row.Size
			if n <= 0 {
				continue
			}
			list, err := s.quotasOf(ctx, t, payerOf(&row))
			if err != nil {
				return err
			}
			for _, q := range list {
				q.used.bytes += n
				t.growing[id] = n
			}
		}
	}
	return nil
}

// recallUnlimited takes layouts for writing back that were granted before there was a quota, or with more of it.
func (s *Service) recallUnlimited() {
	var ids []layout.FileID
	s.mu.Lock()
	for id, f := range s.files {
		if f.writtenByOthers(nil) {
			ids = append(ids, id)
		}
	}
	s.mu.Unlock()
	each(ids, func(id layout.FileID) {
		if err := s.recallOver(id); err != nil && s.ctx.Err() == nil {
			s.log.Warn("layouts from before a quota not given back", "inode", id, "error", err)
		}
	})
}

func (s *Service) recallOver(id layout.FileID) error {
	t, err := s.quotas(s.ctx)
	if err != nil {
		return err
	}
	row, _, err := s.inode(s.ctx, id)
	if err != nil {
		return nil // it is gone
	}
	list, err := s.quotasOf(s.ctx, t, payerOf(&row))
	if err != nil || !slices.ContainsFunc(list, func(q *quota) bool { return q.limit.Bytes > 0 }) {
		return err
	}
	s.mu.Lock()
	f := s.file(id)
	f.waiters++ // so that the record stays
	s.mu.Unlock()
	err = s.recallLayouts(s.ctx, f, layout.Range{Len: layout.ToEOF}, func(cl *claim) bool { return cl.writer })
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiters--
	s.changedFile(f)
	return err
}

func (s *Service) quotaSet(ctx context.Context, c *call, a *metarpc.QuotaSetArgs) (*metarpc.Empty, error) {
	if err := s.admin(c); err != nil {
		return nil, err
	}
	if _, err := s.quotas(ctx); err != nil { // what there was before: who relies on that is recalled
		return nil, err
	}
	key := schema.QuotaKey(a.Name)
	_, err := change(ctx, s, nil, func(t *tx) (*struct{}, error) {
		if a.Name.Kind == metarpc.QuotaTree {
			id := layout.FileID(a.Name.ID)
			if _, err := s.directory(ctx, id); err != nil {
				return nil, err
			}
			t.GuardPresent(schema.InodeKey(id))
		}
		var row schema.Quota
		raw, err := schema.ReadRow(ctx, s.engine, key, &row)
		if err != nil {
			return nil, err
		}
		t.GuardRow(key, raw)
		if a.Bytes != metarpc.QuotaKeep {
			row.Bytes = a.Bytes
		}
		if a.Files != metarpc.QuotaKeep {
			row.Files = a.Files
		}
		if row.Bytes == 0 && row.Files == 0 {
			t.Delete(key)
		} else {
			t.Put(key, schema.Encode(&row))
		}
		return nil, nil
	})
	if err == nil {
		_, err = s.settledQuotas(ctx)
	}
	return &metarpc.Empty{}, err
}

func (s *Service) quotaList(ctx context.Context, c *call, a *metarpc.QuotasArgs) (*metarpc.QuotasResult, error) {
	if err := s.admin(c); err != nil && !errors.Is(err, errReadOnly) {
		return nil, err
	}
	t, err := s.settledQuotas(ctx)
	if err != nil {
		return nil, err
	}
	r := &metarpc.QuotasResult{EOF: true}
	if !a.After {
		q := t.quotas[a.Name]
		if q == nil {
			if q, err = s.unlimited(ctx, a.Name); err != nil {
				return nil, err
			}
		}
		r.Quotas = []metarpc.QuotaInfo{s.quotaInfo(ctx, q)}
		return r, nil
	}
	names := slices.SortedFunc(maps.Keys(t.quotas), compareQuotas)
	at, found := slices.BinarySearchFunc(names, a.Name, compareQuotas)
	if found {
		at++
	}
	for _, name := range names[at:] {
		if len(r.Quotas) == pageOfQuotas {
			r.EOF = false
			break
		}
		r.Quotas = append(r.Quotas, s.quotaInfo(ctx, t.quotas[name]))
	}
	return r, nil
}

// pageOfQuotas is how many quotas one answer tells, whose paths may be long.
const pageOfQuotas = 256

func compareQuotas(a, b metarpc.QuotaName) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID))
}

// unlimited is what is used by whom no quota has been set for.
func (s *Service) unlimited(ctx context.Context, name metarpc.QuotaName) (*quota, error) {
	q := &quota{name: name}
	if name.Kind == metarpc.QuotaTree {
		dir := layout.FileID(name.ID)
		if _, err := s.directory(ctx, dir); err != nil {
			return nil, err
		}
		u, err := s.usageOf(ctx, dir)
		q.used = u
		return q, err
	}
	return q, s.owners(ctx, func(uid, gid uint32, u usage) {
		if name.Kind == metarpc.QuotaUser && uint64(uid) == name.ID || name.Kind == metarpc.QuotaGroup && uint64(gid) == name.ID {
			q.used = q.used.plus(u)
		}
	})
}

func (s *Service) quotaInfo(ctx context.Context, q *quota) metarpc.QuotaInfo {
	info := metarpc.QuotaInfo{Name: q.name, Bytes: q.limit.Bytes, Files: q.limit.Files, UsedBytes: q.used.bytes, UsedFiles: q.used.inodes()}
	if q.name.Kind == metarpc.QuotaTree {
		info.Path = s.pathOf(ctx, layout.FileID(q.name.ID))
	}
	return info
}

// pathOf is the path of a directory for people, empty if it cannot be found. It reads through the directories above, so it takes long if these are big.
func (s *Service) pathOf(ctx context.Context, dir layout.FileID) string {
	path := ""
	for dir != layout.RootID {
		row, _, err := s.inode(ctx, dir)
		if err != nil {
			return ""
		}
		name := ""
		from, to := schema.EntriesAfter(row.Parent, 0)
		for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
			var entry schema.Entry
			if err != nil || schema.Decode(kv.Value, &entry) != nil {
				return ""
			}
			if entry.ID == dir {
				_, _, name = schema.EntryOf(kv.Key)
				break
			}
		}
		if name == "" || len(path)+len(name)+1 > metarpc.MaxText {
			return ""
		}
		path = "/" + name + path
		dir = row.Parent
	}
	return cmp.Or(path, "/")
}

// limitSpace makes what is said of the space of the volume what a directory tree may have in which the inode is.
func (s *Service) limitSpace(ctx context.Context, id layout.FileID, r *metarpc.StatFSResult) error {
	t, err := s.quotas(ctx)
	if err != nil || !t.trees {
		return err
	}
	row, err := s.inodeOrRemoved(ctx, id)
	if err != nil {
		return err
	}
	home := id
	if !isDir(row.Mode) {
		home = row.Parent
	}
	if t, err = s.settledQuotas(ctx); err != nil {
		return err
	}
	list, err := s.quotasOf(ctx, t, payer{home: home})
	if err != nil {
		return err
	}
	left, files := r.Avail, int64(layout.ToEOF)
	var space, inodes *quota // with the least left
	for _, q := range list {
		if n := max(q.limit.Bytes-q.used.bytes, 0); q.limit.Bytes > 0 && (space == nil || n < left) {
			space, left = q, min(left, n)
		}
		if n := q.limit.Files - q.used.inodes(); q.limit.Files > 0 && n < files {
			inodes, files = q, n
		}
	}
	if space != nil {
		used := max(space.used.bytes, 0)
		r.Total, r.Free, r.Avail = used+left, left, left
		r.Files = max(space.used.inodes(), 0)
	}
	if inodes != nil {
		r.Files, r.MaxFiles = max(inodes.used.inodes(), 0), inodes.limit.Files
	}
	return nil
}
