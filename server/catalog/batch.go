package catalog

import (
	"bytes"
	"fmt"
	"slices"
)

// Durability says when a commit returns.
type Durability uint8

const (
	// Sync returns when the commit is durable. Concurrent commits share one sync of the disk.
	Sync Durability = iota
	// NoSync returns when the commit is visible; it is durable once a later Sync commit is.
	NoSync
)

// Batch is what one commit asks for and does. The zero value is an empty batch with Sync.
//
// Its methods keep the slices they are given; nothing is checked before Commit. The fields are for engines.
type Batch struct {
	Guards     []Guard
	Puts       []Row
	Deletes    [][]byte
	Deltas     []Delta
	Durability Durability

	// Grows says that the batch makes the volume larger. An engine that has nothing but a reserve left refuses it with
	// ErrFull, if its guards hold. Batches that remove something, change it, or end what was begun use the reserve.
	Grows bool
}

// GuardKind is the kind of a condition.
type GuardKind uint8

// The conditions a batch can ask for.
const (
	Absent     GuardKind = iota + 1 // Key has no row
	Present                         // Key has a row
	Equal                           // Key has a row with exactly Value
	RangeEmpty                      // no row has Key <= key < To; an empty To means behind the last key
)

// Guard is a condition on the state before the batch.
type Guard struct {
	Kind  GuardKind
	Key   []byte
	Value []byte // of Equal
	To    []byte // of RangeEmpty
}

func (g Guard) String() string {
	switch g.Kind {
	case Absent:
		return fmt.Sprintf("absent %q", g.Key)
	case Present:
		return fmt.Sprintf("present %q", g.Key)
	case Equal:
		return fmt.Sprintf("equal %q", g.Key)
	case RangeEmpty:
		return fmt.Sprintf("range empty %q to %q", g.Key, g.To)
	}
	return fmt.Sprintf("unknown guard kind %d", g.Kind)
}

// GuardAbsent asks that key have no row. It returns the guard's index, as do the other Guard methods.
func (b *Batch) GuardAbsent(key []byte) int { return b.guard(Guard{Kind: Absent, Key: key}) }

// GuardPresent asks that key have a row.
func (b *Batch) GuardPresent(key []byte) int { return b.guard(Guard{Kind: Present, Key: key}) }

// GuardEqual asks that key have a row with exactly this value.
func (b *Batch) GuardEqual(key, value []byte) int {
	return b.guard(Guard{Kind: Equal, Key: key, Value: value})
}

// GuardRow asks that key have the row that was read: one with exactly this value, or none if value is nil.
func (b *Batch) GuardRow(key, value []byte) int {
	if value == nil {
		return b.GuardAbsent(key)
	}
	return b.GuardEqual(key, value)
}

// GuardRangeEmpty asks that no row have from <= key < to. An empty from means the first key, an empty to means
// behind the last.
func (b *Batch) GuardRangeEmpty(from, to []byte) int {
	return b.guard(Guard{Kind: RangeEmpty, Key: from, To: to})
}

func (b *Batch) guard(g Guard) int {
	b.Guards = append(b.Guards, g)
	return len(b.Guards) - 1
}

// Put sets the row of key. Value may be empty.
func (b *Batch) Put(key, value []byte) { b.Puts = append(b.Puts, Row{key, value}) }

// Delete removes the row of key, if there is one.
func (b *Batch) Delete(key []byte) { b.Deletes = append(b.Deletes, key) }

// Add adds n to a field of the counter row of key.
func (b *Batch) Add(key []byte, field int, n int64) {
	b.Deltas = append(b.Deltas, Delta{Op: OpAdd, Field: field, N: n, Key: key})
}

// Max raises a field of the counter row of key to n, if it is lower.
func (b *Batch) Max(key []byte, field int, n int64) {
	b.Deltas = append(b.Deltas, Delta{Op: OpMax, Field: field, N: n, Key: key})
}

// Reset empties b and keeps its memory for reuse.
func (b *Batch) Reset() {
	clear(b.Guards)
	clear(b.Puts)
	clear(b.Deletes)
	clear(b.Deltas)
	*b = Batch{Guards: b.Guards[:0], Puts: b.Puts[:0], Deletes: b.Deletes[:0], Deltas: b.Deltas[:0]}
}

// Len returns the number of entries of b, guards included.
func (b *Batch) Len() int { return len(b.Guards) + len(b.Puts) + len(b.Deletes) + len(b.Deltas) }

// deltaBytes is what Bytes counts for a delta besides its key: an operation, a field and a number.
const deltaBytes = 16

// Bytes returns the size of b: its keys and values, guards included.
func (b *Batch) Bytes() int {
	n := deltaBytes * len(b.Deltas)
	for i := range b.Guards {
		g := &b.Guards[i]
		n += len(g.Key) + len(g.Value) + len(g.To)
	}
	for i := range b.Puts {
		n += len(b.Puts[i].Key) + len(b.Puts[i].Value)
	}
	for _, key := range b.Deletes {
		n += len(key)
	}
	for i := range b.Deltas {
		n += len(b.Deltas[i].Key)
	}
	return n
}

// Check returns ErrInvalid or ErrTooLarge, wrapped with the entry in question, if an engine with these limits has to
// refuse b. Every engine calls it first.
func (b *Batch) Check(caps Caps) error {
	if n := b.Len(); n > caps.MaxKeys {
		return fmt.Errorf("%w: %d entries, at most %d fit one batch", ErrTooLarge, n, caps.MaxKeys)
	}
	if n := b.Bytes(); n > caps.MaxBatchBytes {
		return fmt.Errorf("%w: %d bytes, at most %d fit one batch", ErrTooLarge, n, caps.MaxBatchBytes)
	}
	if b.Durability > NoSync {
		return fmt.Errorf("%w: unknown durability %d", ErrInvalid, b.Durability)
	}
	for i := range b.Guards {
		if err := b.Guards[i].check(caps); err != nil {
			return fmt.Errorf("guard %d: %w", i, err)
		}
	}
	for i := range b.Puts {
		if err := checkKey(b.Puts[i].Key); err != nil {
			return fmt.Errorf("put %d: %w", i, err)
		}
		if err := checkValue(b.Puts[i].Key, b.Puts[i].Value, caps); err != nil {
			return err
		}
	}
	for i, key := range b.Deletes {
		if err := checkKey(key); err != nil {
			return fmt.Errorf("delete %d: %w", i, err)
		}
	}
	for i := range b.Deltas {
		if err := b.Deltas[i].check(); err != nil {
			return fmt.Errorf("delta %d: %w", i, err)
		}
	}
	if key := b.writtenTwice(); key != nil {
		return fmt.Errorf("%w: %q is put or deleted twice", ErrInvalid, key)
	}
	return nil
}

func (g *Guard) check(caps Caps) error {
	switch g.Kind {
	case Absent, Present:
		return checkKey(g.Key)
	case Equal:
		if err := checkKey(g.Key); err != nil {
			return err
		}
		return checkValue(g.Key, g.Value, caps)
	case RangeEmpty:
		if len(g.Key) > MaxKey+1 || len(g.To) > MaxKey+1 { // After of the longest key is a fair bound
			return fmt.Errorf("%w: bound of a range longer than %d bytes", ErrInvalid, MaxKey+1)
		}
		if len(g.To) > 0 && bytes.Compare(g.Key, g.To) >= 0 {
			return fmt.Errorf("%w: range from %q to %q", ErrInvalid, g.Key, g.To)
		}
		return nil
	}
	return fmt.Errorf("%w: %v", ErrInvalid, *g)
}

func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > MaxKey {
		return fmt.Errorf("%w: key of %d bytes, want 1 to %d", ErrInvalid, len(key), MaxKey)
	}
	return nil
}

func checkValue(key, value []byte, caps Caps) error {
	if len(value) > caps.MaxValue {
		return fmt.Errorf("%w: value of %q has %d bytes, at most %d allowed", ErrTooLarge, key, len(value), caps.MaxValue)
	}
	return nil
}

// fewWrites is up to how many puts and deletes comparing all pairs is cheaper than sorting them.
const fewWrites = 16

// writtenTwice returns a key that is put or deleted more than once, or nil.
func (b *Batch) writtenTwice() []byte {
	n := len(b.Puts) + len(b.Deletes)
	if n <= fewWrites {
		for i := range n {
			for j := range i {
				if bytes.Equal(b.written(i), b.written(j)) {
					return b.written(i)
				}
			}
		}
		return nil
	}
	keys := make([][]byte, n)
	for i := range keys {
		keys[i] = b.written(i)
	}
	slices.SortFunc(keys, bytes.Compare)
	for i := 1; i < n; i++ {
		if bytes.Equal(keys[i-1], keys[i]) {
			return keys[i]
		}
	}
	return nil
}

// written returns the key of the i-th put or delete.
func (b *Batch) written(i int) []byte {
	if i < len(b.Puts) {
		return b.Puts[i].Key
	}
	return b.Deletes[i-len(b.Puts)]
}
