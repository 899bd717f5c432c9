package filelock

import (
	"math"
	"slices"
	"sort"
)

// Type is what a lock is.
type Type uint8

const (
	None  Type = iota // no lock; to Set it is to unlock
	Read              // shared
	Write             // exclusive
)

// ToEOF is the last byte of a range that reaches to the end of any file.
const ToEOF = math.MaxInt64

// Lock is a lock of owner O on the bytes Start to End, both included; 0 <= Start <= End.
type Lock[O comparable] struct {
	Owner      O
	Type       Type
	Start, End int64
	PID        uint32 // for people; of the latest Set where locks have been merged
}

// Overlaps reports whether the two have a byte in common.
func (l *Lock[O]) Overlaps(o *Lock[O]) bool { return l.Start <= o.End && o.Start <= l.End }

// Conflicts reports whether the two cannot both be held.
func (l *Lock[O]) Conflicts(o *Lock[O]) bool {
	return l.Owner != o.Owner && (l.Type == Write && o.Type != None || o.Type == Write && l.Type != None) && l.Overlaps(o)
}

// Table has the locks of a file. The zero Table is empty and ready for use.
type Table[O comparable] struct {
	// locks is sorted by Start. Those of one owner neither overlap, nor touch if they are of one type.
	locks []Lock[O]
}

// Len is the number of locks.
func (t *Table[O]) Len() int { return len(t.locks) }

// Conflict returns the lock with the lowest Start that want conflicts with.
func (t *Table[O]) Conflict(want Lock[O]) (Lock[O], bool) {
	for i := range t.locks {
		l := &t.locks[i]
		if l.Start > want.End {
			break
		}
		if l.Conflicts(&want) {
			return *l, true
		}
	}
	return Lock[O]{}, false
}

// Conflicts calls yield for each lock that want conflicts with, until it returns false.
func (t *Table[O]) Conflicts(want Lock[O]) func(yield func(Lock[O]) bool) {
	return func(yield func(Lock[O]) bool) {
		for i := range t.locks {
			l := &t.locks[i]
			if l.Start > want.End || l.Conflicts(&want) && !yield(*l) {
				return
			}
		}
	}
}

// Set gives the owner of l the lock in place of what it has in that range, whoever else has locks there. It returns how
// many more locks the table has than before.
func (t *Table[O]) Set(l Lock[O]) int {
	before := len(t.locks)
	var parts [3]Lock[O] // what there is to insert: the lock and what is left on either side
	add := parts[:0]
	if l.Type != None {
		add = append(add, l)
	}
	kept := t.locks[:0]
	for _, o := range t.locks {
		// Distances, since End+1 may overflow.
		touches := o.Overlaps(&l) || o.Start > l.End && o.Start-l.End == 1 || l.Start > o.End && l.Start-o.End == 1
		switch {
		case o.Owner != l.Owner || !touches:
			kept = append(kept, o)
		case o.Type == l.Type:
			add[0].Start, add[0].End = min(add[0].Start, o.Start), max(add[0].End, o.End)
		case !o.Overlaps(&l):
			kept = append(kept, o)
		default:
			if o.Start < l.Start {
				left := o
				left.End = l.Start - 1
				add = append(add, left)
			}
			if o.End > l.End {
				right := o
				right.Start = l.End + 1
				add = append(add, right)
			}
		}
	}
	clear(t.locks[len(kept):])
	t.locks = kept
	for _, p := range add {
		at := sort.Search(len(t.locks), func(i int) bool { return t.locks[i].Start > p.Start })
		t.locks = slices.Insert(t.locks, at, p)
	}
	t.shrink()
	return len(t.locks) - before
}

// Release takes all locks of an owner away and returns how many there were.
func (t *Table[O]) Release(owner O) int {
	before := len(t.locks)
	t.locks = slices.DeleteFunc(t.locks, func(l Lock[O]) bool { return l.Owner == owner })
	t.shrink()
	return before - len(t.locks)
}

// shrink gives memory back that was needed for a great many locks.
func (t *Table[O]) shrink() {
	if len(t.locks) == 0 {
		t.locks = nil
	} else if cap(t.locks) > 64 && len(t.locks) < cap(t.locks)/4 {
		t.locks = slices.Clone(t.locks)
	}
}

// Owned lists the locks of an owner that overlap [start, end], in the order of their ranges, cut to that range.
func (t *Table[O]) Owned(owner O, start, end int64) []Lock[O] {
	var list []Lock[O]
	for _, l := range t.locks {
		if l.Owner == owner && l.Start <= end && l.End >= start {
			l.Start, l.End = max(l.Start, start), min(l.End, end)
			list = append(list, l)
		}
	}
	return list
}

// All calls yield for every lock, in the order of Start, until it returns false.
func (t *Table[O]) All() func(yield func(Lock[O]) bool) { return slices.Values(t.locks) }
