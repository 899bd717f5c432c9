package pebble

import (
	"fmt"
	"io"
	"slices"

	cpebble "github.com/cockroachdb/pebble/v2"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/fold"
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

// appendChange appends the operand of c, form included.
func appendChange(b []byte, c fold.Change) []byte { return c.Append(append(b, formChange)) }

// decodeChange reads an operand whose form is formChange. It reports false if the operand is malformed.
func decodeChange(operand []byte) (fold.Change, bool) { return fold.Decode(operand[1:]) }

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
	changes fold.Change
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
		older = older.Add(f)
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
		m.changes = m.changes.Add(f)
	}
	return nil
}

// read returns the change in operand, or keeps operand as the base and reports false.
func (m *merger) read(operand []byte) (fold.Change, bool) {
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
		return appendChange(nil, m.changes), nil, nil
	case m.base == nil: // absent: all zeros
	case m.base[0] != formRow || len(m.changes) == 0:
		return m.base, nil, nil
	default:
		var err error
		if counters, err = catalog.DecodeCounters(m.base[1:]); err != nil {
			return []byte{formMisuse}, nil, nil
		}
	}
	counters = m.changes.Apply(counters)
	return append([]byte{formRow}, catalog.EncodeCounters(counters...)...), nil, nil
}
