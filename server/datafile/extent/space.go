package extent

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"syscall"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

var (
	// ErrNoSpace: the namespace has no free unit. Its errno is ENOSPC.
	ErrNoSpace = fmt.Errorf("the namespace is full: %w", syscall.ENOSPC)
	// ErrStale: the data file has lost bytes, and perhaps got others, since the extents were told. Ask for them again.
	ErrStale = errors.New("the extents are of an earlier generation")
	// ErrNotAllocated: the data file has no such bytes.
	ErrNotAllocated = errors.New("the data file has no extent there")
	// ErrTooFar: a data file has no bytes from MaxBytes on. Its errno is EFBIG.
	ErrTooFar = fmt.Errorf("beyond what a data file on a namespace can have: %w", syscall.EFBIG)
	// ErrInvalid: a range that no caller should come with.
	ErrInvalid = errors.New("extent: invalid range")
)

// Space is the space of one namespace. Its methods may be called concurrently, also by several processes.
type Space struct {
	engine catalog.Engine
	id     layout.DeviceID
	ns     schema.Namespace
	geo    geometry

	mu   sync.Mutex
	free []int64       // units that each group had when it was last looked at
	busy map[int64]int // groups from which somebody is allocating
}

// Add makes a batch add a namespace to the catalog, as device id, all free. The batch may also have rows of the caller's, and raises
// the catalog's format. Blank or not, the namespace's old contents are never seen through weft.
func Add(ctx context.Context, engine catalog.Engine, b *catalog.Batch, id layout.DeviceID, ns schema.Namespace) error {
	if err := checkNamespace(&ns); err != nil {
		return err
	}
	raw, err := engine.Get(ctx, schema.KeyVolume)
	if err != nil {
		return fmt.Errorf("read the volume: %w", err)
	}
	var volume schema.Volume
	if err := schema.Decode(raw, &volume); err != nil {
		return fmt.Errorf("volume row: %w: %w", catalog.ErrCorrupt, err)
	}
	b.GuardEqual(schema.KeyVolume, raw)
	if format := schema.Raised(volume.Format, schema.FormatNamespaces); format != volume.Format {
		volume.Format = format
		if err := schema.RaiseFormat(ctx, engine, b, volume.Format); err != nil {
			return err
		}
		b.Put(schema.KeyVolume, schema.Encode(&volume))
	}
	b.GuardAbsent(schema.NamespaceKey(id))
	b.Put(schema.NamespaceKey(id), schema.Encode(&ns))
	return nil
}

// Open reads what the catalog has of the namespace that is device id.
func Open(ctx context.Context, engine catalog.Engine, id layout.DeviceID) (*Space, error) {
	raw, err := engine.Get(ctx, schema.NamespaceKey(id))
	if err != nil {
		return nil, fmt.Errorf("namespace %v: %w", id, err)
	}
	s := &Space{engine: engine, id: id, busy: map[int64]int{}}
	err = schema.Decode(raw, &s.ns)
	if err == nil {
		err = checkNamespace(&s.ns)
	}
	if err != nil {
		return nil, fmt.Errorf("row of namespace %v: %w: %w", id, catalog.ErrCorrupt, err)
	}
	s.geo = geometryOf(&s.ns)
	if err := s.survey(ctx); err != nil {
		return nil, fmt.Errorf("namespace %v: %w", id, err)
	}
	return s, nil
}

// Namespace returns the row of the namespace.
func (s *Space) Namespace() schema.Namespace { return s.ns }

// Drop makes a batch remove the namespace from the catalog. It does not go through while a data file has extents, or units are condemned.
func (s *Space) Drop(b *catalog.Batch) {
	for _, prefix := range []byte{schema.PrefixExtents, schema.PrefixCondemned, schema.PrefixUnits} {
		b.GuardRangeEmpty(schema.OfDevice(prefix, s.id))
	}
	b.Delete(schema.NamespaceKey(s.id))
	b.Delete(schema.SpaceKey(s.id))
}

// survey finds out how many units each group has free. One whose row cannot be read counts as full.
func (s *Space) survey(ctx context.Context) error {
	free := make([]int64, s.geo.groups())
	for group := range free {
		free[group] = min(s.geo.group, s.geo.limit-int64(group)*s.geo.group)
	}
	free[0] -= first
	from, to := schema.OfDevice(schema.PrefixUnits, s.id)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		group := schema.UnitsOf(kv.Key)
		if group < 0 || group >= s.geo.groups() {
			continue
		}
		free[group] = 0
		if m, err := s.geo.decodeGroup(group, kv.Value); err == nil {
			free[group] = m.free()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = free
	return nil
}

// Stat is how much space there is, in bytes. What is neither free nor condemned, data files have.
type Stat struct {
	Total, Free, Condemned int64
}

// Stat returns how much space there is.
func (s *Space) Stat(ctx context.Context) (Stat, error) {
	raws, err := s.engine.GetMany(ctx, [][]byte{schema.SpaceKey(s.id)})
	if err != nil {
		return Stat{}, err
	}
	counters, err := catalog.DecodeCounters(raws[0])
	if err != nil {
		return Stat{}, fmt.Errorf("units of namespace %v: %w", s.id, err)
	}
	total, taken, condemned := s.geo.limit-first, counters.Field(schema.SpaceTaken), counters.Field(schema.SpaceCondemned)
	return Stat{
		Total: total * s.geo.unit, Free: min(max(total-taken-condemned, 0), total) * s.geo.unit,
		Condemned: min(max(condemned, 0), total) * s.geo.unit,
	}, nil
}

// count makes a batch change the counters.
func (s *Space) count(b *catalog.Batch, taken, condemned int64) {
	if taken != 0 {
		b.Add(schema.SpaceKey(s.id), schema.SpaceTaken, taken)
	}
	if condemned != 0 {
		b.Add(schema.SpaceKey(s.id), schema.SpaceCondemned, condemned)
	}
}

// again reports whether a commit failed because somebody else was faster, so that it is to be built anew.
func again(err error) bool {
	guard := (*catalog.GuardError)(nil)
	return errors.As(err, &guard) || errors.Is(err, catalog.ErrConflict)
}

// File is a data file that has extents or has had some.
type File struct {
	Number     uint64
	Generation uint64
	Bytes      int64 // of the namespace that it takes
}

// File returns what a data file has; nothing if it is not known.
func (s *Space) File(ctx context.Context, number uint64) (File, error) {
	head, _, err := s.head(ctx, s.engine, number)
	return File{Number: number, Generation: head.Generation, Bytes: head.Units * s.geo.unit}, err
}

// List calls f with each data file in the order of their numbers.
func (s *Space) List(ctx context.Context, f func(File) error) error {
	from, to := schema.OfDevice(schema.PrefixExtents, s.id)
	for {
		var kv catalog.Row
		for next, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: 1}) {
			if err != nil {
				return err
			}
			kv = catalog.Row{Key: slices.Clone(next.Key), Value: slices.Clone(next.Value)}
		}
		if kv.Key == nil {
			return nil
		}
		number, _, extents := schema.ExtentsOf(kv.Key)
		file := File{Number: number}
		if !extents {
			var head schema.ExtentFile
			if err := schema.Decode(kv.Value, &head); err != nil {
				return fmt.Errorf("row of data file %x: %w: %w", number, catalog.ErrCorrupt, err)
			}
			file.Generation, file.Bytes = head.Generation, head.Units*s.geo.unit
		}
		if err := f(file); err != nil || number == math.MaxUint64 {
			return err
		}
		from = schema.ExtentFileKey(s.id, number+1)
	}
}

// Lookup returns extents of a data file, and its generation. They cover the range, which is taken as whole blocks, from its beginning without gaps, or as much
// of it as fits so many extents. Holes are layout.ExtentNone; to a reader, what is not valid is one. If the range is to layout.ToEOF,
// nothing is said of what follows the last unit.
func (s *Space) Lookup(ctx context.Context, number uint64, r layout.Range, mode layout.IOMode, most int) ([]layout.Extent, uint64, error) {
	if err := s.checkRange(r); err != nil {
		return nil, 0, err
	}
	view, err := s.engine.Snapshot(ctx) // for a generation that is that of the extents
	if err != nil {
		return nil, 0, err
	}
	defer view.Close()
	head, _, err := s.head(ctx, view, number)
	if err != nil {
		return nil, 0, err
	}
	d := s.describer(r, mode, most)
	for !d.full() && d.at < MaxBytes {
		from := d.at / s.geo.unit
		rows, end, err := s.load(ctx, view, number, from, s.geo.unitsTo(d.end), budget{16, math.MaxInt})
		if err != nil {
			return nil, 0, err
		}
		for _, row := range rows {
			for i := range row.units {
				if !d.full() {
					d.unit(&row.units[i])
				}
			}
		}
		if end == s.geo.unitsTo(d.end) {
			break
		}
		if at := min(end*s.geo.unit, d.end); !d.full() && d.at < at {
			d.add(at-d.at, 0, layout.ExtentNone)
		}
	}
	return d.finish(r.End() != math.MaxInt64), head.Generation, nil
}

func (s *Space) describer(r layout.Range, mode layout.IOMode, most int) *describer {
	off := r.Off / s.geo.block * s.geo.block
	end := s.geo.unitsTo(r.End()) * s.geo.unit
	if r.End() != math.MaxInt64 {
		end = r.End() + min(-r.End()&(s.geo.block-1), math.MaxInt64-r.End())
	}
	return &describer{geo: &s.geo, mode: mode, at: off, end: end, most: most}
}

// unitsTo is how many units bytes up to end take.
func (g *geometry) unitsTo(end int64) int64 {
	return (min(end, MaxBytes) + g.unit - 1) / g.unit
}

// checkRange refuses what is no range.
func (s *Space) checkRange(r layout.Range) error {
	if r.Off < 0 || r.Len <= 0 {
		return fmt.Errorf("%w: %d bytes at %d", ErrInvalid, r.Len, r.Off)
	}
	return nil
}

// Size returns the end of the last valid block of a data file.
func (s *Space) Size(ctx context.Context, number uint64) (int64, error) {
	from, to := schema.OfDevice(schema.PrefixExtents, s.id, number)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Reverse: true}) {
		if err != nil {
			return 0, err
		}
		if _, _, extents := schema.ExtentsOf(kv.Key); !extents {
			break
		}
		row, err := s.geo.decodeRow(kv.Key, kv.Value)
		if err != nil {
			return 0, err
		}
		for i := len(row.units) - 1; i >= 0; i-- {
			u := &row.units[i]
			for block := s.geo.blocks - 1; block >= 0 && u.state != schema.RunInvalid; block-- {
				if u.is(block) {
					return u.at*s.geo.unit + (block+1)*s.geo.block, nil
				}
			}
		}
	}
	return 0, nil
}
