package extent

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
)

// Validate makes blocks of a data file valid that somebody has written, stably, to extents he was told with this generation: those of the
// column in the ranges, which are whole blocks. Doing it again does no harm.
//
// Nothing is committed of a batch that has blocks which the data file does not have (ErrNotAllocated), or has only got, or which became
// invalid again, after that generation (ErrStale); of ranges that take several batches, those before may be valid then. The commits do not wait for
// the disk: the caller's own one does that says how long the file is.
func (s *Space) Validate(ctx context.Context, number, generation uint64, column layout.Column, ranges []layout.Range) error {
	left, err := s.merge(ranges)
	for err == nil && len(left) > 0 {
		var pieces []piece
		pieces, left, err = s.pieces(column, left)
		for err == nil && len(pieces) > 0 {
			pieces, err = s.validate(ctx, number, generation, pieces)
		}
	}
	if err != nil {
		return fmt.Errorf("data file %x on namespace %v: %w", number, s.id, err)
	}
	return nil
}

// piece is bytes [off, end) of a data file.
type piece struct{ off, end int64 }

// maxPieces is how many are made at a time: a range may have more than there is memory for.
const maxPieces = 4096

// merge is the ranges in order, as few as possible.
func (s *Space) merge(ranges []layout.Range) ([]piece, error) {
	var list []piece
	for _, r := range ranges {
		if err := s.checkRange(r); err != nil {
			return nil, err
		}
		if r.End() > MaxBytes {
			return nil, fmt.Errorf("%w: a write to the end of the file", ErrInvalid)
		}
		list = append(list, piece{r.Off, r.End()})
	}
	slices.SortFunc(list, func(a, b piece) int { return cmp.Compare(a.off, b.off) })
	n := 0
	for _, p := range list {
		if n > 0 && p.off <= list[n-1].end {
			list[n-1].end = max(list[n-1].end, p.end)
			continue
		}
		list[n] = p
		n++
	}
	return list[:n], nil
}

// pieces is the first of what the column has of merged ranges, in order, and what of these is left.
func (s *Space) pieces(column layout.Column, ranges []piece) (list, left []piece, err error) {
	for len(ranges) > 0 && len(list) < maxPieces {
		off, end := column.Next(ranges[0].off, ranges[0].end)
		if off == end {
			ranges = ranges[1:]
			continue
		}
		if (off|end)%s.geo.block != 0 {
			return nil, nil, fmt.Errorf("%w: bytes %d to %d, which are no whole blocks of %d", ErrInvalid, off, end, s.geo.block)
		}
		list = append(list, piece{off, end})
		ranges[0].off = end
	}
	return list, ranges, nil
}

// validate commits one batch, and returns what is left.
func (s *Space) validate(ctx context.Context, number, generation uint64, pieces []piece) (rest []piece, err error) {
	caps := s.engine.Caps()
	for {
		b := catalog.Batch{Durability: catalog.NoSync}
		rest = slices.Clone(pieces)
		for len(rest) > 0 && b.Len()+2 <= caps.MaxKeys && 4*b.Bytes() <= caps.MaxBatchBytes {
			at := rest[0].off / s.geo.unit
			rows, _, err := s.load(ctx, s.engine, number, at, at+1, budget{rows: 1})
			if err != nil {
				return nil, err
			}
			if len(rows) > 0 && rows[len(rows)-1].at <= at {
				rest, err = s.mark(&b, number, generation, rows[len(rows)-1], rest)
			} else {
				err = ErrNotAllocated
			}
			if err != nil {
				return nil, err
			}
		}
		if b.Len() == 0 { // all are valid already
			return rest, nil
		}
		if err := s.engine.Commit(ctx, &b); !again(err) {
			return rest, err
		}
	}
}

// mark makes valid what a row has of the pieces, at least the beginning of the first one, and returns the others.
func (s *Space) mark(b *catalog.Batch, number, generation uint64, r *row, pieces []piece) ([]piece, error) {
	begin := pieces[0].off
	for i := range r.units {
		u := &r.units[i]
		start, end := u.at*s.geo.unit, (u.at+1)*s.geo.unit
		for len(pieces) > 0 && pieces[0].off < end {
			p := &pieces[0]
			switch {
			case p.off < start:
				return nil, fmt.Errorf("%w: byte %d", ErrNotAllocated, p.off)
			case u.generation > generation:
				return nil, fmt.Errorf("%w: byte %d was written in generation %d, and is of %d", ErrStale, p.off, generation, u.generation)
			}
			from, to := s.geo.part(u.at, p.off, p.end)
			if u.put(&s.geo, from, to, true) {
				r.changed = true
			}
			if p.off = min(p.end, end); p.off < p.end {
				break
			}
			pieces = pieces[1:]
		}
	}
	if len(pieces) > 0 && pieces[0].off == begin {
		return nil, fmt.Errorf("%w: byte %d", ErrNotAllocated, begin)
	}
	s.write(b, number, r, false)
	return pieces, nil
}
