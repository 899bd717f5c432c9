// Package fold joins the deltas of counter rows, for engines that keep them apart from the rows for a while.
//
// A change of a field means field = max(field + addend, floor), a form that is closed under composition: any mix of Add
// and Max on a field folds into one such pair, so changes can be joined in any grouping that keeps their order.
//
// The stored form of a [Change] is a list of fields in ascending order. Each is a byte with the field's number in the low
// six bits, 0x40 if an addend follows and 0x80 if a floor follows, then those as signed varints.
package fold

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/weftfs/weft/server/catalog"
)

// Field is the change of one field: field = max(field + Addend, Floor). Without floor it is math.MinInt64.
type Field struct {
	Field         int
	Addend, Floor int64
}

// after returns the change that has the effect of first, then f.
func (f Field) after(first Field) Field {
	floor := f.Floor
	if first.Floor != math.MinInt64 {
		floor = max(catalog.AddSaturated(first.Floor, f.Addend), floor)
	}
	return Field{f.Field, catalog.AddSaturated(first.Addend, f.Addend), floor}
}

// Change is what a list of deltas does to a row: at most one Field per field, in ascending order.
type Change []Field

// Add returns c followed by f. It may change c.
func (c Change) Add(f Field) Change {
	i, found := slices.BinarySearchFunc(c, f.Field, func(g Field, field int) int { return g.Field - field })
	if found {
		c[i] = f.after(c[i])
		return c
	}
	return slices.Insert(c, i, f)
}

// AddDelta returns c followed by d. It may change c.
func (c Change) AddDelta(d *catalog.Delta) Change {
	if d.Op == catalog.OpMax {
		return c.Add(Field{Field: d.Field, Floor: d.N})
	}
	return c.Add(Field{Field: d.Field, Addend: d.N, Floor: math.MinInt64})
}

// Apply returns the counters after c. It may change the slice it was given.
func (c Change) Apply(counters catalog.Counters) catalog.Counters {
	for _, f := range c {
		for len(counters) <= f.Field {
			counters = append(counters, 0)
		}
		counters[f.Field] = max(catalog.AddSaturated(counters[f.Field], f.Addend), f.Floor)
	}
	return counters
}

const (
	hasAddend = 0x40
	hasFloor  = 0x80
)

const _ = uint(hasAddend - catalog.MaxFields) // a field's number fits below the flags

// Append appends the stored form of c.
func (c Change) Append(b []byte) []byte {
	for _, f := range c {
		at := len(b)
		b = append(b, byte(f.Field))
		if f.Addend != 0 {
			b[at] |= hasAddend
			b = binary.AppendVarint(b, f.Addend)
		}
		if f.Floor != math.MinInt64 {
			b[at] |= hasFloor
			b = binary.AppendVarint(b, f.Floor)
		}
	}
	return b
}

// Decode reads the stored form of a change. It reports false if that is malformed.
func Decode(p []byte) (Change, bool) {
	var c Change
	number := func() (int64, bool) {
		v, n := binary.Varint(p)
		if n <= 0 {
			return 0, false
		}
		p = p[n:]
		return v, true
	}
	for len(p) > 0 {
		head := p[0]
		p = p[1:]
		f := Field{Field: int(head &^ (hasAddend | hasFloor)), Floor: math.MinInt64}
		if len(c) > 0 && c[len(c)-1].Field >= f.Field {
			return nil, false
		}
		var ok bool
		if head&hasAddend != 0 {
			if f.Addend, ok = number(); !ok {
				return nil, false
			}
		}
		if head&hasFloor != 0 {
			if f.Floor, ok = number(); !ok {
				return nil, false
			}
		}
		c = append(c, f)
	}
	return c, true
}
