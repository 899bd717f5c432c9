package extent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// maxGrowth is how many bytes more than asked for a data file gets at most, as nobody takes back what it does not use. It gets as many as it has.
	maxGrowth = 64 << 20
	// shyGrowth is the part of the free space that this is not more than.
	shyGrowth = 64
	// maxGrant is how many units a data file gets at a time.
	maxGrant = 4096
	// tries is how many groups are looked at for one that has all that is wanted in one piece.
	tries = 8
)

// Request asks for space for a range of a data file.
type Request struct {
	Space  *Space
	Number uint64        // of the data file
	Column layout.Column // which bytes of the range it is to hold
	layout.Range
}

// Grant is what a data file has after a Request.
type Grant struct {
	Generation uint64 // of the data file
	// Extents are as Lookup gives them for writing. They begin with the block in which the range begins, end with a unit, and have
	// all of the column up to there, which may be less than the range, or more.
	Extents []layout.Extent
}

// Allocate gives data files space, in one durable batch that also has what with adds to it (if with is not nil). All are in one catalog, and no
// data file is named twice. What they have already stays as it is. The new extents are invalid, and as few and as large as possible.
//
// A Grant ends before its range if the rest would not fit the batch, or the namespace; the first unit that is missing in the range is always
// there, or nobody gets anything. It ends later if a data file grows: then it gets about as much again as it has.
//
// with is called again for each attempt; a GuardError of a guard that it added is returned as it is. It must guard that the
// data files are still somebody's: what is given to one after Remove is lost until fsck finds it.
//
// Errors that callers can tell apart: ErrNoSpace, ErrTooFar, ErrInvalid, those of the catalog, ErrNotFound among them if the namespace was dropped.
func Allocate(ctx context.Context, requests []Request, with func(*catalog.Batch)) ([]Grant, error) {
	if len(requests) == 0 {
		return nil, nil
	}
	engine := requests[0].Space.engine
	for surveyed := false; ; {
		var b catalog.Batch
		if with != nil {
			with(&b)
		}
		b.Durability = catalog.Sync
		theirs := len(b.Guards)
		a := allocation{ctx: ctx, from: engine, b: &b, groups: map[groupName]*group{}}
		a.share(engine.Caps(), len(requests))
		grants := make([]Grant, len(requests))
		var err error
		for i := range requests {
			if grants[i], err = a.allocate(&requests[i]); err != nil {
				err = fmt.Errorf("space for data file %x on namespace %v: %w", requests[i].Number, requests[i].Space.id, err)
				break
			}
		}
		if err == nil && b.Len() > 0 {
			a.put()
			err = engine.Commit(ctx, &b)
		}
		a.end(err == nil)
		guard := (*catalog.GuardError)(nil)
		switch {
		case err == nil:
			return grants, nil
		case errors.Is(err, ErrNoSpace) && !surveyed: // perhaps another process has freed some
			surveyed = true
			for i := range requests {
				if err := requests[i].Space.survey(ctx); err != nil {
					return nil, err
				}
			}
		case errors.As(err, &guard) && guard.Index < theirs, !again(err):
			return nil, err
		case errors.As(err, &guard) && guard.Guard.Kind == catalog.Present:
			return nil, fmt.Errorf("a namespace was dropped: %w", catalog.ErrNotFound)
		}
	}
}

// allocation is one attempt of Allocate.
type allocation struct {
	ctx    context.Context
	from   catalog.Reader
	b      *catalog.Batch
	groups map[groupName]*group

	// What one request may use.
	rows   budget // old rows
	pieces int    // groups
	fresh  int    // new rows, if they are full
}

type groupName struct {
	space *Space
	group int64
}

// group is a group that was read.
type group struct {
	old   []byte // nil: it has no row
	units image
	taken bool // units were taken from it
}

// share divides a batch among requests. One takes its row, the namespace's and the counter (4 entries), 4 at most for each old row, which is guarded and may become two
// others, 2 for each group, and 1 for each row that is full of new units.
func (a *allocation) share(caps catalog.Caps, requests int) {
	entries := (caps.MaxKeys-a.b.Len())/requests - 4
	a.rows = budget{rows: max(entries/8, 1), bytes: (caps.MaxBatchBytes - a.b.Bytes()) / requests / 8}
	a.pieces = max(entries/8, 1)
	a.fresh = max(entries/4-1, 1)
}

// allocate adds to the batch what one request needs.
func (a *allocation) allocate(r *Request) (Grant, error) {
	s := r.Space
	if err := s.checkRange(r.Range); err != nil {
		return Grant{}, err
	}
	if r.End() > MaxBytes {
		return Grant{}, fmt.Errorf("%d bytes at %d: %w", r.Len, r.Off, ErrTooFar)
	}
	head, raw, err := s.head(a.ctx, a.from, r.Number)
	if err != nil {
		return Grant{}, err
	}
	from, to := r.Off/s.geo.unit, s.geo.unitsTo(r.End())
	rows, to, err := s.load(a.ctx, a.from, r.Number, from, to, a.rows)
	if err != nil {
		return Grant{}, err
	}
	end := min(r.End(), to*s.geo.unit)
	units := min(a.fresh*s.geo.perRow, maxGrant)
	missing := s.missing(r, rows, r.Off, end, units)
	need := len(missing)
	if need == units {
		end = min(end, (missing[need-1]+1)*s.geo.unit)
	}
	if need > 0 {
		last, err := s.last(a.ctx, r.Number)
		if err != nil {
			return Grant{}, err
		}
		if missing[need-1] > last {
			grow := min(head.Units, maxGrowth/s.geo.unit, s.freeUnits()/shyGrowth, int64(units)) - int64(need)
			missing = append(missing, s.missing(r, nil, max(end, (missing[need-1]+1)*s.geo.unit), math.MaxInt64, int(max(grow, 0)))...)
		}
		runs, err := a.find(r, rows, missing[0], int64(need), int64(len(missing)))
		if err != nil {
			return Grant{}, err
		}
		a.b.GuardPresent(schema.NamespaceKey(s.id))
		if raw == nil {
			head.Generation = 1
			a.b.GuardAbsent(schema.ExtentFileKey(s.id, r.Number))
		} else {
			a.b.GuardEqual(schema.ExtentFileKey(s.id, r.Number), raw)
		}
		n := int64(0)
		var given []unit
		for _, run := range runs {
			for i := range run.n {
				given = append(given, unit{at: missing[n], unit: run.unit + i, generation: head.Generation})
				n++
			}
		}
		if n < int64(need) || n > int64(need) {
			end = given[n-1].at*s.geo.unit + s.geo.unit
		}
		head.Units += n
		a.b.Put(schema.ExtentFileKey(s.id, r.Number), schema.Encode(&head))
		rows = insert(rows, given)
		for _, row := range rows {
			s.write(a.b, r.Number, row, row.units[len(row.units)-1].at == given[n-1].at)
		}
		s.count(a.b, n, 0)
	}
	end = s.geo.unitsTo(end) * s.geo.unit
	d := s.describer(layout.Range{Off: r.Off, Len: end - r.Off}, layout.IOModeRW, layout.MaxExtents)
	for _, row := range rows {
		for i := range row.units {
			if !d.full() {
				d.unit(&row.units[i])
			}
		}
	}
	return Grant{Generation: head.Generation, Extents: d.finish(true)}, nil
}

// missing is which units of the column in [off, end) are in none of the rows, so many at most.
func (s *Space) missing(r *Request, rows []*row, off, end int64, most int) (list []int64) {
	i, j := 0, 0
	for len(list) < most && off < min(end, MaxBytes) {
		from, to := r.Column.Next(off, min(end, MaxBytes))
		if from == to {
			break
		}
		for at := from / s.geo.unit; at*s.geo.unit < to && len(list) < most; at++ {
			for i < len(rows) && rows[i].units[j].at < at {
				if j++; j == len(rows[i].units) {
					i, j = i+1, 0
				}
			}
			if i == len(rows) || rows[i].units[j].at != at {
				list = append(list, at)
			}
			to = max(to, (at+1)*s.geo.unit) // the next one is another
		}
		off = to
	}
	return list
}

// last is the last unit of a data file, -1 if it has none.
func (s *Space) last(ctx context.Context, number uint64) (int64, error) {
	from, to := schema.OfDevice(schema.PrefixExtents, s.id, number)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: 1, Reverse: true}) {
		if err != nil {
			return 0, err
		}
		if _, _, extents := schema.ExtentsOf(kv.Key); extents {
			row, err := s.geo.decodeRow(kv.Key, kv.Value)
			if err != nil {
				return 0, err
			}
			return row.units[len(row.units)-1].at, nil
		}
	}
	return -1, nil
}

// insert puts new units, in their order, into the rows where they belong.
func insert(rows []*row, given []unit) []*row {
	if len(rows) == 0 {
		rows = []*row{{}}
	}
	for i := range given {
		u := given[i]
		r := rows[0]
		for _, next := range rows[1:] {
			if next.at > u.at {
				break
			}
			r = next
		}
		at, _ := slices.BinarySearchFunc(r.units, u.at, func(u unit, at int64) int { return cmp.Compare(u.at, at) })
		r.units = slices.Insert(r.units, at, u)
		r.changed = true
	}
	return rows
}

// run is n units of a namespace from unit on.
type run struct{ unit, n int64 }

// find takes units for a data file whose unit at is the first to be given: as many as wanted if that is possible in few
// pieces, else those that are needed, or at least one.
func (a *allocation) find(r *Request, rows []*row, at, need, want int64) ([]run, error) {
	s := r.Space
	near, begins := s.home(r.Number), true
	for _, row := range rows {
		for i := range row.units {
			if row.units[i].at < at {
				near, begins = row.units[i].unit+1, false
			}
		}
	}
	near = min(near, s.geo.limit-1)
	var runs []run
	got := int64(0)
	take := func(group, hint, n int64, whole bool) error {
		g, err := a.group(s, group)
		if err != nil {
			return err
		}
		from, to := g.units.run(hint, n)
		if from == to || whole && to-from < n && from != hint {
			return nil
		}
		if !g.taken {
			g.taken = true
			s.enter(group)
		}
		g.units.set(from, to)
		runs = append(runs, run{group*s.geo.group + from, to - from})
		got += to - from
		return nil
	}
	home := near / s.geo.group
	if !begins || s.worthwhile(home, 1, true) { // behind what it has, or where it begins
		if err := take(home, near%s.geo.group, want, true); err != nil {
			return nil, err
		}
	}
	groups := s.geo.groups()
	for _, n := range []int64{want, need} {
		looked := 0
		for i := int64(0); i < groups && looked < tries && got < need; i++ {
			group := (home + i) % groups
			if s.worthwhile(group, n-got, true) {
				looked++
				if err := take(group, -1, n-got, true); err != nil {
					return nil, err
				}
			}
		}
	}
	used := map[int64]bool{}
	for i := int64(0); i < groups && got < need; i++ {
		group := (home + i) % groups
		for got < need && s.worthwhile(group, 1, false) {
			if used[group] = true; len(used) > a.pieces-2 && len(runs) > 0 { // two more groups may be among the runs
				return runs, nil
			}
			before := got
			if err := take(group, -1, need-got, false); err != nil {
				return nil, err
			}
			if got == before {
				break
			}
		}
	}
	if got == 0 {
		return nil, ErrNoSpace
	}
	return runs, nil
}

// home is where a data file begins: numbers that follow each other are far apart.
func (s *Space) home(number uint64) int64 {
	const golden = 0x9e3779b97f4a7c15
	group, _ := bits.Mul64((number^uint64(s.id[0]))*golden, uint64(s.geo.groups()))
	return max(int64(group)*s.geo.group, first)
}

// group reads a group, once in an attempt.
func (a *allocation) group(s *Space, n int64) (*group, error) {
	name := groupName{s, n}
	if g := a.groups[name]; g != nil {
		return g, nil
	}
	raws, err := a.from.GetMany(a.ctx, [][]byte{schema.UnitsKey(s.id, n)})
	if err != nil {
		return nil, err
	}
	g := &group{old: raws[0]}
	if g.units, err = s.geo.decodeGroup(n, g.old); err != nil {
		return nil, fmt.Errorf("%w: %w", catalog.ErrCorrupt, err)
	}
	a.groups[name] = g
	s.note(n, g.units)
	return g, nil
}

// put adds the groups from which units were taken to the batch.
func (a *allocation) put() {
	for name, g := range a.groups {
		if g.taken {
			name.space.putGroup(a.b, name.group, g.old, g.units)
		}
	}
}

// putGroup makes a batch replace the row of a group.
func (s *Space) putGroup(b *catalog.Batch, group int64, old []byte, units image) {
	key := schema.UnitsKey(s.id, group)
	b.GuardRow(key, old)
	switch {
	case !slices.Equal(units, s.geo.empty(group)):
		b.Put(key, units.encode())
	case old != nil:
		b.Delete(key)
	}
}

// end ends the attempt.
func (a *allocation) end(done bool) {
	for name, g := range a.groups {
		if g.taken {
			name.space.leave(name.group)
			if done {
				name.space.note(name.group, g.units)
			}
		}
	}
}

// note remembers how many units of a group are free.
func (s *Space) note(group int64, units image) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free[group] = units.free()
}

// freeUnits is how many units are free, as far as is known.
func (s *Space) freeUnits() (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, free := range s.free {
		n += free
	}
	return n
}

// worthwhile reports whether a group may have n free units, and, if that matters, nobody else is taking units from it.
func (s *Space) worthwhile(group, n int64, idle bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.free[group] >= n && !(idle && s.busy[group] > 0)
}

func (s *Space) enter(group int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy[group]++
}

func (s *Space) leave(group int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy[group]--; s.busy[group] == 0 {
		delete(s.busy, group)
	}
}
