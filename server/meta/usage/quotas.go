package usage

import (
	"cmp"
	"context"
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
	// Where there is a quota of bytes a layout for writing reaches behind the end of a file by a quotaShare-th of what
	// is left, but by no less than quotaLeast and no more than quotaMost bytes.
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
	used  Sum // as far as the catalog and the reports of writers say it
	// What has been admitted since the table was read, and before that, as far as it is not certain to be in used.
	recentBytes, recentFiles atomic.Int64
	earlier                  Sum
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

// Quotas decides what may still be used where there are quotas.
type Quotas struct {
	tree     *Tree
	writing  func() map[layout.FileID]int64
	narrowed func()

	token chan struct{} // has one token, for whoever reads
	table atomic.Pointer[quotaTable]
}

// Quotas returns the quotas on what the tree counts. Both functions are called with the token of quotas held:
//
//	writing   says how far each file of the shard that somebody may be writing was asked to be written, or reported
//	narrowed  hears that some quota of bytes allows less than before; it does not wait for anything that asks quotas
func (t *Tree) Quotas(writing func() map[layout.FileID]int64, narrowed func()) *Quotas {
	qs := &Quotas{tree: t, writing: writing, narrowed: narrowed, token: make(chan struct{}, 1)}
	qs.token <- struct{}{}
	return qs
}

// likely is what may be used of q: no less than there is, but for what others have done in the last moments.
func (q *quota) likely() Sum {
	bytes := q.used.Bytes + q.earlier.Bytes + q.recentBytes.Load()
	return Sum{Bytes: bytes, Files: q.used.Inodes() + q.earlier.Files + q.recentFiles.Load()}
}

// exceeds reports whether q does not allow more if so much is used.
func (q *quota) exceeds(used, more Sum) bool {
	return more.Bytes > 0 && q.limit.Bytes > 0 && used.Bytes+more.Bytes > q.limit.Bytes ||
		more.Inodes() > 0 && q.limit.Files > 0 && used.Inodes()+more.Inodes() > q.limit.Files
}

// take notes that more has been admitted.
func (q *quota) take(more Sum) {
	q.recentBytes.Add(max(more.Bytes, 0))
	q.recentFiles.Add(max(more.Inodes(), 0))
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
	return &metarpc.Error{
		Status:  metarpc.Status(syscall.EDQUOT),
		Message: fmt.Sprintf("%v: %d bytes and %d files are used", q, q.used.Bytes, q.used.Inodes()),
	}
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

// of are the quotas in t that count what p is charged with.
func (qs *Quotas) of(ctx context.Context, t *quotaTable, p payer) (list []*quota, err error) {
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
		chain, err := qs.tree.Ancestors(ctx, p.home)
		if err != nil {
			return nil, err
		}
		for _, dir := range chain {
			add(metarpc.QuotaTree, uint64(dir))
		}
	}
	return list, nil
}

// admit is EDQUOT if p cannot be charged with more. What is not close to a limit is decided by what is known; otherwise
// directories tell first what they know, so that nothing is refused that would fit.
func (qs *Quotas) admit(ctx context.Context, p payer, more Sum) error {
	_, err := qs.admitMove(ctx, payer{}, p, more)
	return err
}

// admitMove is admit for what was charged to from before. It reports whether its bytes count for more quotas than
// before.
func (qs *Quotas) admitMove(ctx context.Context, from, to payer, more Sum) (limited bool, err error) {
	t, err := qs.known(ctx)
	for exact := false; err == nil; exact = true {
		if len(t.quotas) == 0 {
			return false, nil
		}
		list, err := qs.of(ctx, t, to)
		if err != nil {
			return false, err
		}
		had, err := qs.of(ctx, t, from)
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
		if t, err = qs.settled(ctx); err != nil {
			return false, err
		}
	}
	return false, err
}

// AdmitNew is admit for an inode that is made in a directory, 0 for none.
func (qs *Quotas) AdmitNew(ctx context.Context, dir layout.FileID, row *schema.Inode) error {
	return qs.admit(ctx, payer{dir, row.UID, row.GID, true}, Sum{row.ChargedBytes(), 1, 0})
}

// AdmitChange is admit for an inode's new size and owner.
func (qs *Quotas) AdmitChange(ctx context.Context, before, after *schema.Inode) error {
	if before.UID != after.UID || before.GID != after.GID {
		from, to := payerOf(before), payerOf(after)
		from.home, to.home = 0, 0
		if _, err := qs.admitMove(ctx, from, to, Sum{after.ChargedBytes(), 1, 0}); err != nil {
			return err
		}
	}
	if more := after.ChargedBytes() - before.ChargedBytes(); more > 0 {
		return qs.admit(ctx, payerOf(after), Sum{Bytes: more})
	}
	return nil
}

// AdmitMoved is admitMove for what has got a name in another directory: an inode that is no directory, if its home goes
// along, or a directory with all that is below it.
func (qs *Quotas) AdmitMoved(ctx context.Context, id layout.FileID, row *schema.Inode, from, to layout.FileID) (limited bool, err error) {
	if t, err := qs.known(ctx); err != nil || !t.trees {
		return false, err
	}
	more := Sum{row.ChargedBytes(), 1, 0}
	if row.IsDir() {
		counters, err := schema.ReadCounters(ctx, qs.tree.engine, id)
		if err != nil {
			return false, err
		}
		more = totalOf(counters).Plus(Sum{Dirs: 1})
	}
	return qs.admitMove(ctx, payer{home: from}, payer{home: to}, more)
}

// room is how many bytes a file may have more than its inode row says, and the quota because of which; nil for none. It
// is exact if it is less than enough.
func (qs *Quotas) room(ctx context.Context, id layout.FileID, row *schema.Inode, enough int64) (left int64, tight *quota, err error) {
	t, err := qs.known(ctx)
	for exact := false; err == nil; exact = true {
		left, tight = layout.ToEOF, nil
		list, err := qs.of(ctx, t, payerOf(row))
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
			if n := q.limit.Bytes - used.Bytes + t.growing[id]; n < left {
				left, tight = n, q
			}
		}
		if exact || left >= enough {
			return max(left, 0), tight, nil
		}
		if t, err = qs.settled(ctx); err != nil {
			return 0, nil, err
		}
	}
	return 0, nil, err
}

// AdmitLonger is EDQUOT if the quotas of a file have no room for more bytes than its inode row says it has, by so many.
func (qs *Quotas) AdmitLonger(ctx context.Context, id layout.FileID, row *schema.Inode, more int64) error {
	left, tight, err := qs.room(ctx, id, row, more)
	if err == nil && tight != nil && left < more {
		err = tight.refusal()
	}
	return err
}

// Allowance is up to where a file may be written: row is its inode, and off where somebody is about to write. It is
// EDQUOT if that is too far.
//
// What is written before off is in what the file has. So a file that is written from its beginning to its end is never
// longer than its quotas allow; but several that are written at a time have no part each.
func (qs *Quotas) Allowance(ctx context.Context, id layout.FileID, row *schema.Inode, off int64) (end int64, err error) {
	from := max(off, row.Size)
	left, tight, err := qs.room(ctx, id, row, layout.Range{Off: from - row.Size, Len: quotaShare * quotaMost}.End())
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

// Limited reports whether there is a quota that limits how long a file may become.
func (qs *Quotas) Limited(ctx context.Context, id layout.FileID, row *schema.Inode) (bool, error) {
	_, tight, err := qs.room(ctx, id, row, 0)
	return tight != nil, err
}

// LimitsBytes reports whether there is a quota of bytes that counts what a file has. Unlike Limited it may do so by
// what was known some moments ago, however little is left.
func (qs *Quotas) LimitsBytes(ctx context.Context, row *schema.Inode) (bool, error) {
	t, err := qs.known(ctx)
	if err != nil {
		return false, err
	}
	list, err := qs.of(ctx, t, payerOf(row))
	return slices.ContainsFunc(list, func(q *quota) bool { return q.limit.Bytes > 0 }), err
}

// Refresh reads quotas if what is known of them is too old.
func (qs *Quotas) Refresh(ctx context.Context) error {
	_, err := qs.known(ctx)
	return err
}

// Settle has directories tell what they know, and reads all quotas anew.
func (qs *Quotas) Settle(ctx context.Context) error {
	_, err := qs.settled(ctx)
	return err
}

// known returns what is known of quotas, after reading it anew if that is too old.
func (qs *Quotas) known(ctx context.Context) (*quotaTable, error) {
	if t := qs.table.Load(); t != nil && time.Since(t.at) < quotaAge {
		return t, nil
	}
	return qs.read(ctx, time.Now().Add(-quotaAge), false)
}

// settled has directories tell what they know, and reads all anew.
func (qs *Quotas) settled(ctx context.Context) (*quotaTable, error) {
	return qs.read(ctx, time.Now(), true)
}

// read returns a table whose reading began after a time, its own or somebody else's. The first one is settled: the
// service before may have ended before directories told what it had admitted.
func (qs *Quotas) read(ctx context.Context, after time.Time, settled bool) (*quotaTable, error) {
	select {
	case <-qs.token:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { qs.token <- struct{}{} }()
	before := qs.table.Load()
	if before != nil && before.at.After(after) && (before.settled || !settled) {
		return before, nil
	}
	settled = settled || before == nil
	told := qs.tree.told.Load()
	t := &quotaTable{at: time.Now(), quotas: map[metarpc.QuotaName]*quota{}, growing: map[layout.FileID]int64{}}
	owners := false
	for kv, err := range schema.ScanRows(ctx, qs.tree.engine, schema.PrefixQuota, 1+1+8) {
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
		if err := qs.tree.Settle(ctx); err != nil {
			return nil, err
		}
	}
	if t.trees {
		if err := qs.readTrees(ctx, before, t); err != nil {
			return nil, err
		}
	}
	if owners {
		if err := qs.readOwners(ctx, t); err != nil {
			return nil, err
		}
	}
	if len(t.quotas) > 0 {
		if err := qs.readGrowing(ctx, t); err != nil {
			return nil, err
		}
	}
	if before != nil && !t.settled {
		for name, q := range t.quotas {
			if old := before.quotas[name]; old != nil {
				q.earlier = Sum{old.recentBytes.Load(), old.recentFiles.Load(), 0}
				if told == nil || told.Before(before.at) {
					q.earlier = q.earlier.Plus(old.earlier)
				}
			}
		}
	}
	qs.table.Store(t)
	if before != nil && t.narrower(before) {
		qs.narrowed()
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
func (qs *Quotas) readTrees(ctx context.Context, before, t *quotaTable) error {
	moves, err := schema.FindRow(ctx, qs.tree.engine, schema.KeyMoves)
	if err != nil {
		return err
	}
	if before == nil || string(before.moves) != string(moves) {
		qs.tree.ForgetParents() // another service may have moved them
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
	raw, err := qs.tree.engine.GetMany(ctx, keys)
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
func (qs *Quotas) readOwners(ctx context.Context, t *quotaTable) error {
	return qs.owners(ctx, func(uid, gid uint32, u Sum) {
		for _, name := range []metarpc.QuotaName{{Kind: metarpc.QuotaUser, ID: uint64(uid)}, {Kind: metarpc.QuotaGroup, ID: uint64(gid)}} {
			if q := t.quotas[name]; q != nil {
				q.used = q.used.Plus(u)
			}
		}
	})
}

// owners calls f with what each user and group have.
func (qs *Quotas) owners(ctx context.Context, f func(uid, gid uint32, u Sum)) error {
	for kv, err := range schema.ScanRows(ctx, qs.tree.engine, schema.PrefixOwner, 1+4+4, 1+4+4+2) {
		if err != nil {
			return err
		}
		counters, err := schema.DecodeCounters(kv.Key, kv.Value)
		if err != nil {
			return err
		}
		uid, gid := schema.OwnerOf(kv.Key)
		f(uid, gid, Sum{counters.Field(schema.OwnerBytes), counters.Field(schema.OwnerFiles), 0})
	}
	return nil
}

// readGrowing finds out how much longer files of the shard are than their inode rows say: as far as their writers have
// asked to write. What those of other shards may have grown by is in how far a quota can be exceeded.
func (qs *Quotas) readGrowing(ctx context.Context, t *quotaTable) error {
	ends := qs.writing()
	for ids := range slices.Chunk(slices.Collect(maps.Keys(ends)), 1000) {
		keys := make([][]byte, len(ids))
		for i, id := range ids {
			keys[i] = schema.InodeKey(id)
		}
		raw, err := qs.tree.engine.GetMany(ctx, keys)
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
			list, err := qs.of(ctx, t, payerOf(&row))
			if err != nil {
				return err
			}
			for _, q := range list {
				q.used.Bytes += n
				t.growing[id] = n
			}
		}
	}
	return nil
}

// List answers the question of a client that may ask about quotas. Without After, the answer is empty if there is no
// quota of that name, see [Quotas.Unlimited].
func (qs *Quotas) List(ctx context.Context, a *metarpc.QuotasArgs) (*metarpc.QuotasResult, error) {
	t, err := qs.settled(ctx)
	if err != nil {
		return nil, err
	}
	r := &metarpc.QuotasResult{EOF: true}
	if !a.After {
		if q := t.quotas[a.Name]; q != nil {
			r.Quotas = []metarpc.QuotaInfo{qs.info(ctx, q)}
		}
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
		r.Quotas = append(r.Quotas, qs.info(ctx, t.quotas[name]))
	}
	return r, nil
}

// pageOfQuotas is how many quotas one answer tells, whose paths may be long.
const pageOfQuotas = 256

func compareQuotas(a, b metarpc.QuotaName) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID))
}

// Unlimited says what is used of a name that has no quota. If the name is of a directory, that must be there.
func (qs *Quotas) Unlimited(ctx context.Context, name metarpc.QuotaName) (metarpc.QuotaInfo, error) {
	q := &quota{name: name}
	var err error
	if name.Kind == metarpc.QuotaTree {
		q.used, err = qs.tree.Of(ctx, layout.FileID(name.ID))
	} else {
		err = qs.owners(ctx, func(uid, gid uint32, u Sum) {
			if name.Kind == metarpc.QuotaUser && uint64(uid) == name.ID || name.Kind == metarpc.QuotaGroup && uint64(gid) == name.ID {
				q.used = q.used.Plus(u)
			}
		})
	}
	if err != nil {
		return metarpc.QuotaInfo{}, err
	}
	return qs.info(ctx, q), nil
}

func (qs *Quotas) info(ctx context.Context, q *quota) metarpc.QuotaInfo {
	info := metarpc.QuotaInfo{Name: q.name, Bytes: q.limit.Bytes, Files: q.limit.Files, UsedBytes: q.used.Bytes, UsedFiles: q.used.Inodes()}
	if q.name.Kind == metarpc.QuotaTree {
		info.Path = qs.pathOf(ctx, layout.FileID(q.name.ID))
	}
	return info
}

// pathOf is the path of a directory for people, empty if it cannot be found. It reads through the directories above, so
// it takes long if these are big.
func (qs *Quotas) pathOf(ctx context.Context, dir layout.FileID) string {
	path := ""
	for dir != layout.RootID {
		var row schema.Inode
		raw, err := schema.ReadRow(ctx, qs.tree.engine, schema.InodeKey(dir), &row)
		if err != nil || raw == nil {
			return ""
		}
		name := ""
		from, to := schema.EntriesAfter(row.Parent, 0)
		for kv, err := range qs.tree.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
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

// OfTrees reports whether there are quotas of directories.
func (qs *Quotas) OfTrees(ctx context.Context) (bool, error) {
	t, err := qs.known(ctx)
	if err != nil {
		return false, err
	}
	return t.trees, nil
}

// LimitSpace makes what is said of the space of the volume what the directory trees that a directory is in may have.
func (qs *Quotas) LimitSpace(ctx context.Context, home layout.FileID, r *metarpc.StatFSResult) error {
	t, err := qs.settled(ctx)
	if err != nil {
		return err
	}
	list, err := qs.of(ctx, t, payer{home: home})
	if err != nil {
		return err
	}
	left, files := r.Avail, int64(layout.ToEOF)
	var space, inodes *quota // with the least left
	for _, q := range list {
		if n := max(q.limit.Bytes-q.used.Bytes, 0); q.limit.Bytes > 0 && (space == nil || n < left) {
			space, left = q, min(left, n)
		}
		if n := q.limit.Files - q.used.Inodes(); q.limit.Files > 0 && n < files {
			inodes, files = q, n
		}
	}
	if space != nil {
		used := max(space.used.Bytes, 0)
		r.Total, r.Free, r.Avail = used+left, left, left
		r.Files = max(space.used.Inodes(), 0)
	}
	if inodes != nil {
		r.Files, r.MaxFiles = max(inodes.used.Inodes(), 0), inodes.limit.Files
	}
	return nil
}
