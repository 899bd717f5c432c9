package layout

import "math"

// Column is which bytes of a file a data file holds: the units u with u mod Count == Index. The zero Column is all bytes,
// as is any other with a Count of at most 1.
type Column struct {
	Unit  int64 // bytes; more than 0 if Count is more than 1
	Count int
	Index int // less than Count
}

// Column returns which bytes server i of each mirror holds.
func (s *Segment) Column(i int) Column {
	if s.Width() == 1 || s.StripeUnit == 0 {
		return Column{}
	}
	return Column{Unit: s.StripeUnit, Count: s.Width(), Index: i}
}

// Next returns the first bytes of the column in [off, end) that lie together. There are none if from == to; both are
// end then.
func (c Column) Next(off, end int64) (from, to int64) {
	if off >= end {
		return end, end
	}
	if c.Count <= 1 {
		return off, end
	}
	count, unit := int64(c.Count), off/c.Unit
	if ahead := (int64(c.Index) - unit%count + count) % count; ahead > 0 {
		if unit > math.MaxInt64/c.Unit-ahead {
			return end, end
		}
		unit += ahead
		off = unit * c.Unit
	}
	if off >= end {
		return end, end
	}
	if end-unit*c.Unit > c.Unit {
		end = (unit + 1) * c.Unit
	}
	return off, end
}
