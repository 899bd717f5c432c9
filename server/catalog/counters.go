package catalog

import (
	"encoding/binary"
	"fmt"
	"math"
)

// MaxFields is how many fields a counter row can have.
const MaxFields = 64

// DeltaOp is what a delta does to its field.
type DeltaOp uint8

// The operations of a delta.
const (
	OpAdd DeltaOp = iota + 1 // field += N
	OpMax                    // field = max(field, N)
)

// Delta is a blind change of one field of a counter row.
type Delta struct {
	Op    DeltaOp
	Field int // 0 to MaxFields-1
	N     int64
	Key   []byte
}

func (d *Delta) check() error {
	if err := checkKey(d.Key); err != nil {
		return err
	}
	if d.Op != OpAdd && d.Op != OpMax {
		return fmt.Errorf("%w: unknown delta operation %d", ErrInvalid, d.Op)
	}
	if d.Field < 0 || d.Field >= MaxFields {
		return fmt.Errorf("%w: counter field %d, want 0 to %d", ErrInvalid, d.Field, MaxFields-1)
	}
	return nil
}

// Apply returns counters with d applied, longer than before if d's field was beyond the end. It may change and
// return the slice it was given.
func (d *Delta) Apply(counters Counters) Counters {
	for len(counters) <= d.Field {
		counters = append(counters, 0)
	}
	switch d.Op {
	case OpAdd:
		counters[d.Field] = AddSaturated(counters[d.Field], d.N)
	case OpMax:
		counters[d.Field] = max(counters[d.Field], d.N)
	}
	return counters
}

// AddSaturated returns a + b, or the end of int64's range that the sum lies beyond.
func AddSaturated(a, b int64) int64 {
	sum := a + b
	switch {
	case a > 0 && b > 0 && sum < 0:
		return math.MaxInt64
	case a < 0 && b < 0 && sum >= 0:
		return math.MinInt64
	}
	return sum
}

// EncodeCounters returns the value of a counter row with these fields.
func EncodeCounters(fields ...int64) []byte {
	value := make([]byte, 0, 8*len(fields))
	for _, n := range fields {
		value = binary.LittleEndian.AppendUint64(value, uint64(n))
	}
	return value
}

// Counters are the fields of a counter row.
type Counters []int64

// Field returns a field, zero if the row is too short to hold it.
func (c Counters) Field(i int) int64 {
	if i < len(c) {
		return c[i]
	}
	return 0
}

// DecodeCounters returns the fields of a counter row's value, or ErrNotCounters. The nil value of an absent row gives
// no fields.
func DecodeCounters(value []byte) (Counters, error) {
	if len(value)%8 != 0 || len(value) > 8*MaxFields {
		return nil, fmt.Errorf("%w: a value of %d bytes", ErrNotCounters, len(value))
	}
	fields := make(Counters, len(value)/8)
	for i := range fields {
		fields[i] = int64(binary.LittleEndian.Uint64(value[8*i:]))
	}
	return fields, nil
}
