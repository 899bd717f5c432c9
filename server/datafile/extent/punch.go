package extent

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// Punch makes a range of a data file read as zeros, durably. Units that lie in it are condemned, blocks of other units become invalid. Nobody has
// a layout for writing meanwhile that has any byte of a unit which the range touches.
//
// What is left are parts of valid blocks, two at most: zeros lists them, as bytes of the data file and of the namespace, for somebody to write
// zeros there before the caller says that it is done. After a crash another Punch of the same range gives the same list.
//
// The data file's generation is returned. When nobody can write any more with extents of an earlier one, Release frees what was condemned.
func (s *Space) Punch(ctx context.Context, number uint64, r layout.Range) (zeros []layout.Extent, generation uint64, err error) {
	if err = s.checkRange(r); err == nil {
		p := punch{space: s, number: number, off: r.Off, end: min(r.End(), MaxBytes)}
		for at := r.Off / s.geo.unit; err == nil && at < s.geo.unitsTo(p.end); {
			at, err = p.next(ctx, at)
		}
		zeros, generation = p.zeros, p.generation
	}
	if err != nil {
		return nil, 0, fmt.Errorf("data file %x on namespace %v: %w", number, s.id, err)
	}
	return zeros, generation, nil
}

// Truncate is a Punch of all that is behind size. A data file has no size of its own, so this also takes back what it got for growing.
func (s *Space) Truncate(ctx context.Context, number uint64, size int64) (zeros []layout.Extent, generation uint64, err error) {
	return s.Punch(ctx, number, layout.Range{Off: size, Len: layout.ToEOF})
}

// Remove condemns all that a data file has and forgets it. It may be called again, after a crash or an error. When nobody can write any more what the data
// file had, Release of all generations (math.MaxUint64) frees it. The commits do not wait for the disk: whoever wants it removed has
// recorded that.
func (s *Space) Remove(ctx context.Context, number uint64) error {
	if err := s.remove(ctx, number); err != nil {
		return fmt.Errorf("remove data file %x on namespace %v: %w", number, s.id, err)
	}
	return nil
}

func (s *Space) remove(ctx context.Context, number uint64) error {
	for {
		p := punch{space: s, number: number, end: MaxBytes, lazy: true}
		for at := int64(0); at < s.geo.unitsTo(p.end); {
			var err error
			if at, err = p.next(ctx, at); err != nil {
				return err
			}
		}
		_, raw, err := s.head(ctx, s.engine, number)
		if err != nil || raw == nil {
			return err
		}
		b := catalog.Batch{Durability: catalog.NoSync}
		key := schema.ExtentFileKey(s.id, number)
		_, end := schema.OfDevice(schema.PrefixExtents, s.id, number)
		b.GuardEqual(key, raw)
		b.GuardRangeEmpty(schema.ExtentsKey(s.id, number, 0), end)
		b.Delete(key)
		if err := s.engine.Commit(ctx, &b); !again(err) {
			return err
		}
	}
}

// punch is one call.
type punch struct {
	space      *Space
	number     uint64
	off, end   int64
	lazy       bool // commits need not wait for the disk
	zeros      []layout.Extent
	generation uint64
}

// next deals with the units from at on in one batch, and returns where to go on.
func (p *punch) next(ctx context.Context, at int64) (int64, error) {
	s := p.space
	caps := s.engine.Caps()
	// The data file's row and the counters take 4 entries, each row 3 at most, and each condemned run 1.
	entries := caps.MaxKeys - 4
	for {
		head, raw, err := s.head(ctx, s.engine, p.number)
		if err != nil {
			return 0, err
		}
		p.generation = head.Generation
		to := s.geo.unitsTo(p.end)
		rows, to, err := s.load(ctx, s.engine, p.number, at, to, budget{max(entries/6, 1), caps.MaxBatchBytes / 4})
		if err != nil || raw == nil {
			return to, err
		}
		c := condemnation{generation: head.Generation + 1, most: max(entries/2, 1)}
		zeros := p.zeros
		for _, r := range rows {
			kept := r.units[:0:0]
			for i := range r.units {
				u := r.units[i]
				start, end := u.at*s.geo.unit, (u.at+1)*s.geo.unit
				switch {
				case u.at < at || u.at >= to || end <= p.off || start >= p.end:
				case p.off <= start && end <= p.end:
					if c.add(&s.geo, u.unit) {
						r.changed = true
						continue
					}
					to = u.at // there are too many for one batch
				default:
					zeros = append(zeros, s.edges(&u, p.off, p.end)...)
					// Only blocks that are in the range as a whole become invalid.
					from, last := s.geo.part(u.at, p.off+s.geo.block-1, p.end-s.geo.block+1)
					if u.put(&s.geo, from, last, false) {
						u.generation = c.generation
						r.changed = true
					}
				}
				kept = append(kept, u)
			}
			r.units = kept
		}
		b := catalog.Batch{}
		if p.lazy {
			b.Durability = catalog.NoSync
		}
		for _, r := range rows {
			s.write(&b, p.number, r, false)
		}
		if b.Len() > 0 {
			key := schema.ExtentFileKey(s.id, p.number)
			b.GuardEqual(key, raw)
			head.Generation = c.generation
			head.Units -= c.units
			b.Put(key, schema.Encode(&head))
			for _, run := range c.runs {
				b.Put(schema.CondemnedKey(s.id, p.number, c.generation, run.unit), schema.Encode(&schema.Condemned{Count: run.n}))
			}
			s.count(&b, -c.units, c.units)
			err = s.engine.Commit(ctx, &b)
		}
		if !again(err) {
			p.generation, p.zeros = head.Generation, zeros
			return to, err
		}
	}
}

// edges is the parts of valid blocks of a unit that bytes [off, end) have of it.
func (s *Space) edges(u *unit, off, end int64) (zeros []layout.Extent) {
	start := u.at * s.geo.unit
	edge := func(from, to int64) {
		if from = max(from, start); from < to && to <= start+s.geo.unit && u.is((from-start)/s.geo.block) {
			zeros = append(zeros, layout.Extent{Off: from, Len: to - from, Addr: u.unit*s.geo.unit + from - start})
		}
	}
	if off >= start && off%s.geo.block != 0 {
		edge(off, min(end, off-off%s.geo.block+s.geo.block))
	}
	if block := end - end%s.geo.block; end != block && (block > off || off%s.geo.block == 0) {
		edge(max(block, off), end)
	}
	return zeros
}

// condemnation is the units of a batch that are condemned, as runs that do not cross the end of a group.
type condemnation struct {
	generation uint64
	most       int
	runs       []run
	units      int64
}

// add reports false if there are as many runs as there may be.
func (c *condemnation) add(g *geometry, unit int64) bool {
	if n := len(c.runs); n > 0 && c.runs[n-1].unit+c.runs[n-1].n == unit && unit%g.group != 0 {
		c.runs[n-1].n++
	} else if n == c.most {
		return false
	} else {
		c.runs = append(c.runs, run{unit, 1})
	}
	c.units++
	return true
}

// Waiting is what is condemned of one data file.
type Waiting struct {
	Number     uint64
	Generation uint64 // the latest; a Release of it frees all
	Bytes      int64
}

// Nobody is the number under which fsck condemns units that no data file has. None has it.
const Nobody uint64 = math.MaxUint64

// Condemned calls f with what is condemned of each data file, in the order of their numbers.
func (s *Space) Condemned(ctx context.Context, f func(Waiting) error) error {
	from, to := schema.OfDevice(schema.PrefixCondemned, s.id)
	var w Waiting
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		number, generation, run, err := s.geo.decodeCondemned(kv.Key, kv.Value)
		if err != nil {
			return err
		}
		if number != w.Number && w.Bytes > 0 {
			if err := f(w); err != nil {
				return err
			}
			w.Bytes = 0
		}
		w = Waiting{number, generation, w.Bytes + run.n*s.geo.unit}
	}
	if w.Bytes > 0 {
		return f(w)
	}
	return nil
}

// Ranges calls f with the bytes of the namespace that a Release would free, some at a time.
func (s *Space) Ranges(ctx context.Context, number, generation uint64, f func([]layout.Range) error) error {
	from, to := s.condemned(number, generation)
	for {
		var ranges []layout.Range
		for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: maxRanges}) {
			if err != nil {
				return err
			}
			_, _, run, err := s.geo.decodeCondemned(kv.Key, kv.Value)
			if err != nil {
				return err
			}
			from = catalog.After(kv.Key)
			ranges = append(ranges, layout.Range{Off: run.unit * s.geo.unit, Len: run.n * s.geo.unit})
		}
		if len(ranges) == 0 {
			return nil
		}
		if err := f(ranges); err != nil {
			return err
		}
	}
}

// maxRanges is how many Ranges reads at a time.
const maxRanges = 1024

// condemned is the range of the keys of what a data file has lost up to and including a generation.
func (s *Space) condemned(number, generation uint64) (from, to []byte) {
	from, to = schema.OfDevice(schema.PrefixCondemned, s.id, number)
	if generation < math.MaxUint64 {
		to = schema.CondemnedKey(s.id, number, generation+1, 0)
	}
	return from, to
}

func (g *geometry) decodeCondemned(key, value []byte) (number, generation uint64, r run, err error) {
	var c schema.Condemned
	number, generation, r.unit = schema.CondemnedOf(key)
	err = schema.Decode(value, &c)
	if err == nil && (r.unit < first || c.Count < 1 || c.Count > g.limit-r.unit || r.unit/g.group != (r.unit+c.Count-1)/g.group) {
		err = fmt.Errorf("%d units from %d on", c.Count, r.unit)
	}
	if err != nil {
		return 0, 0, r, fmt.Errorf("condemned row %q: %w: %w", key, catalog.ErrCorrupt, err)
	}
	r.n = c.Count
	return number, generation, r, nil
}

// Release frees what a data file has lost up to and including a generation. Nobody must be able any more to write with extents that were told in an
// earlier one: whoever had them has given them back, or was fenced and the namespace has confirmed that. The commits do not wait for the disk: what is
// not free after a crash is condemned still.
func (s *Space) Release(ctx context.Context, number, generation uint64) error {
	for {
		done, err := s.release(ctx, number, generation)
		if err != nil {
			return fmt.Errorf("free what data file %x had on namespace %v: %w", number, s.id, err)
		}
		if done {
			return nil
		}
	}
}

// release commits one batch. done is false if there is more.
func (s *Space) release(ctx context.Context, number, generation uint64) (done bool, err error) {
	caps := s.engine.Caps()
	most := max(min((caps.MaxKeys-2)/4, caps.MaxBatchBytes/int(s.geo.group)), 1) // a row, and its group, which takes group/8 bytes twice
	from, to := s.condemned(number, generation)
	for {
		b := catalog.Batch{Durability: catalog.NoSync}
		var runs []run
		var freed int64
		view, err := s.engine.Snapshot(ctx) // what is condemned here is not free here
		if err != nil {
			return false, err
		}
		defer view.Close()
		for kv, err := range view.Scan(ctx, from, to, catalog.ScanOptions{Limit: most}) {
			if err != nil {
				return false, err
			}
			_, _, run, err := s.geo.decodeCondemned(kv.Key, kv.Value)
			if err != nil {
				return false, err
			}
			key := slices.Clone(kv.Key)
			b.GuardEqual(key, slices.Clone(kv.Value)) // or somebody else has freed them, and perhaps given them away
			b.Delete(key)
			runs = append(runs, run)
			freed += run.n
		}
		if len(runs) == 0 {
			return true, nil
		}
		a := allocation{ctx: ctx, from: view, b: &b, groups: map[groupName]*group{}}
		for _, run := range runs {
			n := run.unit / s.geo.group
			g, err := a.group(s, n)
			if err != nil {
				return false, err
			}
			i := run.unit % s.geo.group
			if g.units.next(i, false) < i+run.n {
				return false, fmt.Errorf("%w: %d units from %d on are condemned and free; run fsck", catalog.ErrCorrupt, run.n, run.unit)
			}
			g.units.clear(i, i+run.n)
			g.taken = true
		}
		a.put()
		s.count(&b, 0, -freed)
		err = s.engine.Commit(ctx, &b)
		if err == nil {
			for name, g := range a.groups {
				s.note(name.group, g.units)
			}
		}
		if !again(err) {
			return len(runs) < most, err
		}
	}
}
