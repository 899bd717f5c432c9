package pebble

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"

	cpebble "github.com/cockroachdb/pebble/v2"

	"github.com/weftfs/weft/server/meta/catalog"
)

// The forms of a stored value, see Stored form in the package comment.
const (
	formRow    = 0
	formChange = 1
	formMisuse = 2
	formDamage = 3
)

// decodeRow returns the value of a row as the caller put it, aliasing stored.
func decodeRow(stored []byte) ([]byte, error) {
	if len(stored) == 0 {
		return nil, fmt.Errorf("%w: a stored value without its form", catalog.ErrCorrupt)
	}
	switch stored[0] {
	case formRow:
		return stored[1:], nil
	case formMisuse:
		return nil, catalog.ErrNotCounters
	case formDamage:
		return nil, fmt.Errorf("%w: a counter row met an operand that makes no sense", catalog.ErrCorrupt)
	}
	return nil, fmt.Errorf("%w: a stored value of unknown form %d", catalog.ErrCorrupt, stored[0])
}

// fieldChange is field = max(field + addend, floor). Without floor it is math.MinInt64.
type fieldChange struct {
	field         int
	addend, floor int64
}

// after returns the change that has the effect of first, then f.
func (f fieldChange) after(first fieldChange) fieldChange {
	floor := f.floor
	if first.floor != math.MinInt64 {
		floor = max(catalog.AddSaturated(first.floor, f.addend), floor)
	}
	return fieldChange{f.field, catalog.AddSaturated(first.addend, f.addend), floor}
}

// change is what a list of deltas does to a row: at most one fieldChange per field, in ascending order.
type change []fieldChange

// add returns c followed by f. It may change c.
func (c change) add(f fieldChange) change {
	i, found := slices.BinarySearchFunc(c, f.field, func(g fieldChange, field int) int { return g.field - field })
	if found {
		c[i] = f.after(c[i])
		return c
	}
	return slices.Insert(c, i, f)
}

// addDelta returns c followed by d.
func (c change) addDelta(d *catalog.Delta) change {
	if d.Op == catalog.OpMax {
		return c.add(fieldChange{field: d.Field, floor: d.N})
	}
	return c.add(fieldChange{field: d.Field, addend: d.N, floor: math.MinInt64})
}

// apply returns the counters after c. It may change the slice it was given.
func (c change) apply(counters catalog.Counters) catalog.Counters {
	for _, f := range c {
		for len(counters) <= f.field {
			counters = append(counters, 0)
		}
		counters[f.field] = max(catalog.AddSaturated(counters[f.field], f.addend), f.floor)
	}
	return counters
}

const (
	hasAddend = 0x40
	hasFloor  = 0x80
)

const _ = uint(hasAddend - catalog.MaxFields) // a field's number fits below the flags

// appendTo appends the operand of c, form included.
func (c change) appendTo(b []byte) []byte {
	b = append(b, formChange)
	for _, f := range c {
		at := len(b)
		b = append(b, byte(f.field))
		if f.addend != 0 {
			b[at] |= hasAddend
			b = binary.AppendVarint(b, f.addend)
		}
		if f.floor != math.MinInt64 {
			b[at] |= hasFloor
			b = binary.AppendVarint(b, f.floor)
		}
	}
	return b
}

// decodeChange reads an operand whose form is formChange. It reports false if the operand is malformed.
func decodeChange(operand []byte) (change, bool) {
	p := operand[1:]
	var c change
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
		f := fieldChange{field: int(head &^ (hasAddend | hasFloor)), floor: math.MinInt64}
		if len(c) > 0 && c[len(c)-1].field >= f.field {
			return nil, false
		}
		var ok bool
		if head&hasAddend != 0 {
			if f.addend, ok = number(); !ok {
				return nil, false
			}
		}
		if head&hasFloor != 0 {
			if f.floor, ok = number(); !ok {
				return nil, false
			}
		}
		c = append(c, f)
	}
	return c, true
}

// counterMerger joins the deltas of counter rows. Its name is stored in the catalog, so that one of another kind, or of a
// later incompatible version, is refused.
var counterMerger = &cpebble.Merger{
	Name: mergerName,
	Merge: func(_, operand []byte) (cpebble.ValueMerger, error) {
		m := new(merger)
		return m, m.MergeOlder(operand)
	},
}

const mergerName = "weft.catalog.counters.1"

// merger collects the operands of one key: the changes, and the row below them once it was seen. It never fails; what
// makes no sense ends in formMisuse or formDamage.
type merger struct {
	changes change
	base    []byte // a stored value of any form but formChange, or nil while none was seen
}

// MergeOlder takes an operand, or the row, that lies below everything taken so far.
func (m *merger) MergeOlder(operand []byte) error {
	if m.base != nil {
		return nil // what lies below a row does not matter
	}
	older, isChange := m.read(operand)
	if !isChange {
		return nil
	}
	for _, f := range m.changes {
		older = older.add(f)
	}
	m.changes = older
	return nil
}

// MergeNewer takes an operand, or a row, that lies above everything taken so far.
func (m *merger) MergeNewer(operand []byte) error {
	newer, isChange := m.read(operand)
	if !isChange {
		m.changes = nil
		return nil
	}
	for _, f := range newer {
		m.changes = m.changes.add(f)
	}
	return nil
}

// read returns the change in operand, or keeps operand as the base and reports false.
func (m *merger) read(operand []byte) (change, bool) {
	if len(operand) > 0 {
		switch operand[0] {
		case formChange:
			if c, ok := decodeChange(operand); ok {
				return c, true
			}
		case formRow, formMisuse:
			m.base = slices.Clone(operand)
			return nil, false
		}
	}
	m.base = []byte{formDamage}
	return nil, false
}

// Finish returns the stored value that all operands make: a row if the bottom is known, otherwise one change.
func (m *merger) Finish(includesBase bool) ([]byte, io.Closer, error) {
	var counters catalog.Counters
	switch {
	case m.base == nil && !includesBase:
		return m.changes.appendTo(nil), nil, nil
	case m.base == nil: // absent: all zeros
	case m.base[0] != formRow || len(m.changes) == 0:
		return m.base, nil, nil
	default:
		var err error
		if counters, err = catalog.DecodeCounters(m.base[1:]); err != nil {
			return []byte{formMisuse}, nil, nil
		}
	}
	counters = m.changes.apply(counters)
	return append([]byte{formRow}, catalog.EncodeCounters(counters...)...), nil, nil
}
