package extent

import (
	"context"
	"fmt"
	"slices"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// Kind is a kind of finding.
type Kind string

// The kinds, and what a repair does.
const (
	BadExtents     Kind = "bad-extents"         // a row of extents that cannot be, or overlaps another: left, and no unit is freed or condemned
	SharedUnits    Kind = "shared-units"        // several data files have them: the later ones lose those without a valid block; others are left
	FileRow        Kind = "wrong-extent-file"   // a data file's row is missing, or does not say what its extents are: set
	BadCondemned   Kind = "bad-condemned"       // a row of condemned units that cannot be, or of which a data file has some, or which are condemned twice: without these
	BadGroup       Kind = "bad-group"           // a row of the map of free units that cannot be: made anew
	FreeUnits      Kind = "units-in-use-free"   // a data file has them, or they are condemned: no longer free
	LostUnits      Kind = "lost-units"          // neither free, nor condemned, nor a data file's: condemned
	SpaceCounters  Kind = "wrong-space-counter" // set
	unitsInFinding      = 8                     // so many are named
)

// Finding is something that is not as it should be.
type Finding struct {
	Kind   Kind
	Number uint64 // of a data file; Nobody if there is none
	Detail string
	Lost   bool // bytes of the data file may be another's
}

// Check holds all that the catalog has of a namespace against each other, with nobody else changing it. It calls found with each finding, and with what
// makes a batch repair it, or nil if nothing safe does. A repair that is wanted is committed before found returns. A repair
// frees nothing and takes nothing from a data file that may have bytes in it. It takes 2 bits of memory for each unit. Check returns how
// much space there is after the repairs.
//
// That a data file has extents though nobody has the data file is no finding: see List.
func (s *Space) Check(ctx context.Context, found func(Finding, func(*catalog.Batch) error) error) (Stat, error) {
	c := &check{space: s, report: found, owned: make(image, (s.geo.limit+63)/64+1), condemned: make(image, (s.geo.limit+63)/64+1), repaired: map[string]bool{}}
	err := c.files(ctx)
	if err == nil {
		err = c.condemnations(ctx)
	}
	if err == nil {
		err = c.groups(ctx)
	}
	if err == nil {
		err = c.counters(ctx)
	}
	if err != nil {
		return Stat{}, fmt.Errorf("check namespace %v: %w", s.id, err)
	}
	total := s.geo.limit - first
	return Stat{Total: total * s.geo.unit, Free: (total - c.taken - c.waiting) * s.geo.unit, Condemned: c.waiting * s.geo.unit}, nil
}

type check struct {
	space            *Space
	report           func(Finding, func(*catalog.Batch) error) error
	owned, condemned image
	taken, waiting   int64           // units that data files have, and that are condemned
	unsure           bool            // there are extents that cannot be read
	repaired         map[string]bool // keys of rows that were put, which the scan in progress may see
}

// file is the data file whose rows are being read.
type file struct {
	number     uint64
	head       schema.ExtentFile
	raw        []byte
	units      int64
	generation uint64 // the highest of its units'
	end        int64  // unit
}

// files looks at all data files.
func (c *check) files(ctx context.Context) error {
	s := c.space
	from, to := schema.OfDevice(schema.PrefixExtents, s.id)
	var f *file
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		if c.repaired[string(kv.Key)] {
			continue
		}
		key, value := slices.Clone(kv.Key), slices.Clone(kv.Value)
		number, _, extents := schema.ExtentsOf(key)
		if f == nil || f.number != number {
			if err := c.file(f); err != nil {
				return err
			}
			f = &file{number: number}
		}
		if !extents {
			if err := schema.Decode(value, &f.head); err != nil {
				f.head = schema.ExtentFile{} // it is set anew
			}
			f.raw = value
			continue
		}
		row, err := s.geo.decodeRow(key, value)
		if err == nil && row.units[0].at < f.end {
			err = fmt.Errorf("unit %d is in two rows", row.units[0].at)
		}
		if err != nil {
			c.unsure = true
			if err := c.report(Finding{Kind: BadExtents, Number: number, Detail: err.Error()}, nil); err != nil {
				return err
			}
			continue
		}
		if err := c.row(f, row); err != nil {
			return err
		}
	}
	return c.file(f)
}

// row looks at a row of extents.
func (c *check) row(f *file, r *row) error {
	s := c.space
	f.end = r.units[len(r.units)-1].at + 1
	f.units += int64(len(r.units))
	var kept []unit
	var empty, full []int64
	for _, u := range r.units {
		f.generation = max(f.generation, u.generation)
		shared := c.owned.has(u.unit)
		switch {
		case shared && u.state == schema.RunInvalid:
			empty = append(empty, u.unit)
			continue
		case shared:
			full = append(full, u.unit)
		}
		kept = append(kept, u)
		c.owned.set(u.unit, u.unit+1)
	}
	if len(full) > 0 {
		p := Finding{Kind: SharedUnits, Number: f.number, Detail: some(full) + " have valid blocks and are another data file's as well", Lost: true}
		if err := c.report(p, nil); err != nil {
			return err
		}
	}
	c.taken += int64(len(r.units))
	if len(empty) == 0 {
		return nil
	}
	p := Finding{Kind: SharedUnits, Number: f.number, Detail: some(empty) + " are another data file's as well"}
	return c.report(p, func(b *catalog.Batch) error {
		r.units, r.changed = kept, true
		s.write(b, f.number, r, false)
		if len(kept) > 0 {
			c.repaired[string(schema.ExtentsKey(s.id, f.number, kept[0].at))] = true
		}
		n := int64(len(empty))
		f.units -= n
		c.taken -= n
		if f.raw != nil && f.head.Units >= n {
			b.GuardEqual(schema.ExtentFileKey(s.id, f.number), f.raw)
			f.head.Units -= n
			f.head.Generation++
			f.raw = schema.Encode(&f.head)
			b.Put(schema.ExtentFileKey(s.id, f.number), f.raw)
		}
		s.count(b, -n, 0)
		return nil
	})
}

// some names units.
func some(units []int64) string {
	if len(units) <= unitsInFinding {
		return fmt.Sprintf("units %v", units)
	}
	return fmt.Sprintf("%d units, from %v on,", len(units), units[:unitsInFinding])
}

// file looks at what a data file's row says, when all its extents are known.
func (c *check) file(f *file) error {
	if f == nil || f.raw != nil && f.head.Units == f.units && f.head.Generation >= max(f.generation, 1) {
		return nil
	}
	p := Finding{Kind: FileRow, Number: f.number, Detail: fmt.Sprintf("it says %d units, generation %d; there are %d, of %d at most", f.head.Units, f.head.Generation, f.units, f.generation)}
	if f.raw == nil {
		p.Detail = fmt.Sprintf("there is none, and extents of %d units", f.units)
	}
	return c.report(p, func(b *catalog.Batch) error {
		key := schema.ExtentFileKey(c.space.id, f.number)
		b.GuardRow(key, f.raw)
		// Nobody knows what was told in the generations that were.
		b.Put(key, schema.Encode(&schema.ExtentFile{Generation: max(f.generation, f.head.Generation) + 1, Units: f.units}))
		return nil
	})
}

// condemnations looks at all condemned units.
func (c *check) condemnations(ctx context.Context) error {
	s := c.space
	from, to := schema.OfDevice(schema.PrefixCondemned, s.id)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		if c.repaired[string(kv.Key)] {
			continue
		}
		key, value := slices.Clone(kv.Key), slices.Clone(kv.Value)
		number, generation, is, err := s.geo.decodeCondemned(key, value)
		p := Finding{Kind: BadCondemned, Number: number}
		if err != nil {
			p.Number, _, _ = schema.CondemnedOf(key)
			p.Detail = err.Error()
			is.n = 0
		}
		keep := condemnation{most: int(is.n)}
		var wrong []int64
		for u := is.unit; u < is.unit+is.n; u++ {
			if c.owned.has(u) || c.condemned.has(u) {
				wrong = append(wrong, u)
				continue
			}
			keep.add(&s.geo, u)
			c.condemned.set(u, u+1)
		}
		c.waiting += is.n
		if err == nil && len(wrong) == 0 {
			continue
		}
		if err == nil {
			p.Detail = some(wrong) + " are a data file's, or condemned twice"
		}
		err = c.report(p, func(b *catalog.Batch) error {
			b.GuardEqual(key, value)
			if len(keep.runs) == 0 || keep.runs[0].unit != is.unit {
				b.Delete(key)
			}
			for _, r := range keep.runs {
				row := schema.CondemnedKey(s.id, number, generation, r.unit)
				c.repaired[string(row)] = true
				b.Put(row, schema.Encode(&schema.Condemned{Count: r.n}))
			}
			n := int64(len(wrong))
			c.waiting -= n
			s.count(b, 0, -n)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// groups holds the map of free units against what is owned and condemned.
func (c *check) groups(ctx context.Context) error {
	s := c.space
	for group := range s.geo.groups() {
		raws, err := s.engine.GetMany(ctx, [][]byte{schema.UnitsKey(s.id, group)})
		if err != nil {
			return err
		}
		if err := c.group(group, raws[0]); err != nil {
			return err
		}
	}
	from, to := schema.OfDevice(schema.PrefixUnits, s.id)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			return err
		}
		if group := schema.UnitsOf(kv.Key); group < 0 || group >= s.geo.groups() {
			key := slices.Clone(kv.Key)
			p := Finding{Kind: BadGroup, Number: Nobody, Detail: fmt.Sprintf("group %d, of %d", group, s.geo.groups())}
			err := c.report(p, func(b *catalog.Batch) error {
				b.Delete(key)
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *check) group(group int64, raw []byte) error {
	s := c.space
	want, begin := s.geo.empty(group), group*s.geo.group
	for i := int64(0); i < s.geo.group && begin+i < s.geo.limit; i++ {
		if c.owned.has(begin+i) || c.condemned.has(begin+i) {
			want.set(i, i+1)
		}
	}
	is, err := s.geo.decodeGroup(group, raw)
	if err != nil {
		fix := func(b *catalog.Batch) error {
			s.putGroup(b, group, raw, want)
			return nil
		}
		if c.unsure {
			fix = nil
		}
		return c.report(Finding{Kind: BadGroup, Number: Nobody, Detail: err.Error()}, fix)
	}
	var free []int64
	for i := range s.geo.group {
		if want.has(i) && !is.has(i) {
			free = append(free, begin+i)
		}
	}
	if len(free) > 0 {
		err := c.report(Finding{Kind: FreeUnits, Number: Nobody, Detail: some(free) + " are a data file's, or condemned"}, func(b *catalog.Batch) error {
			for i := range s.geo.group {
				if want.has(i) {
					is.set(i, i+1)
				}
			}
			s.putGroup(b, group, raw, is)
			raw = is.encode()
			return nil
		})
		if err != nil {
			return err
		}
	}
	lost := condemnation{most: max((s.engine.Caps().MaxKeys-3)/2, 1)}
	for i := range s.geo.group {
		if want.has(i) || !is.has(i) {
			continue
		}
		if !lost.add(&s.geo, begin+i) {
			if err := c.lost(group, raw, lost); err != nil {
				return err
			}
			lost.runs, lost.units = nil, 0
			lost.add(&s.geo, begin+i)
		}
	}
	if lost.units > 0 {
		return c.lost(group, raw, lost)
	}
	return nil
}

// lost reports units that are not free, and nobody's.
func (c *check) lost(group int64, raw []byte, lost condemnation) error {
	s := c.space
	p := Finding{Kind: LostUnits, Number: Nobody, Detail: fmt.Sprintf("%d units, from %d on", lost.units, lost.runs[0].unit)}
	fix := func(b *catalog.Batch) error {
		b.GuardEqual(schema.UnitsKey(s.id, group), raw)
		for _, r := range lost.runs {
			b.Put(schema.CondemnedKey(s.id, Nobody, 0, r.unit), schema.Encode(&schema.Condemned{Count: r.n}))
		}
		c.waiting += lost.units
		s.count(b, 0, lost.units)
		return nil
	}
	if c.unsure {
		fix = nil
	}
	return c.report(p, fix)
}

// counters holds the counters against what was counted.
func (c *check) counters(ctx context.Context) error {
	s := c.space
	key := schema.SpaceKey(s.id)
	raw, err := schema.FindRow(ctx, s.engine, key)
	if err != nil {
		return err
	}
	counters, err := catalog.DecodeCounters(raw)
	if err == nil && counters.Field(schema.SpaceTaken) == c.taken && counters.Field(schema.SpaceCondemned) == c.waiting {
		return nil
	}
	p := Finding{Kind: SpaceCounters, Number: Nobody, Detail: fmt.Sprintf("%d units, %d condemned; there are %d and %d",
		counters.Field(schema.SpaceTaken), counters.Field(schema.SpaceCondemned), c.taken, c.waiting)}
	return c.report(p, func(b *catalog.Batch) error {
		b.GuardRow(key, raw)
		b.Put(key, catalog.EncodeCounters(c.taken, c.waiting))
		return nil
	})
}
