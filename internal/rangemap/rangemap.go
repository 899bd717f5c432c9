package rangemap

import "slices"

// Map maps ranges that do not overlap to values: a list sorted by offset, cut into leaves of at most leafMax, so
// that an insertion moves little however many there are. The zero value is empty.
type Map[T any] struct {
	leaves [][]Entry[T] // none is empty
	spare  []Entry[T]   // a leaf to reuse, so that a map which has one element now and then does not allocate
	count  int
}

// Entry is the value of the bytes [Off, End).
type Entry[T any] struct {
	Off, End int64
	Val      T
}

const leafMax = 64

// Len is how many entries there are.
func (m *Map[T]) Len() int { return m.count }

// find returns the place of the first entry that ends after off: leaf l, index i. If there is none, l == len(leaves).
func (m *Map[T]) find(off int64) (l, i int) {
	lo, hi := 0, len(m.leaves)
	for lo < hi {
		mid := (lo + hi) / 2
		if leaf := m.leaves[mid]; leaf[len(leaf)-1].End > off {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	if lo == len(m.leaves) {
		return lo, 0
	}
	leaf := m.leaves[lo]
	a, b := 0, len(leaf)
	for a < b {
		mid := (a + b) / 2
		if leaf[mid].End > off {
			b = mid
		} else {
			a = mid + 1
		}
	}
	return lo, a
}

// Insert adds an entry. No other may overlap it.
func (m *Map[T]) Insert(off, end int64, val T) {
	l, i := m.find(off)
	m.insertAt(l, i, Entry[T]{off, end, val})
}

func (m *Map[T]) insertAt(l, i int, e Entry[T]) {
	m.count++
	if l == len(m.leaves) {
		// Behind everything: the last leaf if it has room, else a new one, which leaves full ones full when a file is
		// written from start to end.
		if l > 0 && len(m.leaves[l-1]) < leafMax {
			m.leaves[l-1] = append(m.leaves[l-1], e)
			return
		}
		m.leaves = append(m.leaves, append(m.spare[:0], e))
		m.spare = nil
		return
	}
	leaf := m.leaves[l]
	if len(leaf) == leafMax {
		right := append(make([]Entry[T], 0, leafMax), leaf[leafMax/2:]...)
		clear(leaf[leafMax/2:])
		leaf = leaf[:leafMax/2]
		m.leaves[l] = leaf
		m.leaves = slices.Insert(m.leaves, l+1, right)
		if i > leafMax/2 {
			l, i = l+1, i-leafMax/2
			leaf = right
		}
	}
	m.leaves[l] = slices.Insert(leaf, i, e)
}

// Overlapping calls fn for every entry that has a byte in [off, end), in order, until fn returns false. fn may change
// the value and nothing else.
func (m *Map[T]) Overlapping(off, end int64, fn func(e *Entry[T]) bool) {
	l, i := m.find(off)
	for ; l < len(m.leaves); l, i = l+1, 0 {
		leaf := m.leaves[l]
		for ; i < len(leaf); i++ {
			if leaf[i].Off >= end || !fn(&leaf[i]) {
				return
			}
		}
	}
}

// DeleteFunc removes every entry that has a byte in [off, end) and for which fn returns true.
func (m *Map[T]) DeleteFunc(off, end int64, fn func(e *Entry[T]) bool) {
	l, i := m.find(off)
	for l < len(m.leaves) && m.leaves[l][i].Off < end {
		leaf := m.leaves[l]
		kept := i
		for ; i < len(leaf) && leaf[i].Off < end; i++ {
			if fn(&leaf[i]) {
				continue
			}
			if kept != i {
				leaf[kept] = leaf[i]
			}
			kept++
		}
		if kept != i {
			m.count -= i - kept
			kept += copy(leaf[kept:], leaf[i:])
			clear(leaf[kept:])
			l += m.shrunk(l, leaf[:kept])
		} else {
			l++
		}
		i = 0
	}
}

// shrunk puts a leaf back from which something was removed; it returns 0 if the following leaf has its place now, else 1.
func (m *Map[T]) shrunk(l int, leaf []Entry[T]) int {
	if len(leaf) == 0 {
		m.leaves = slices.Delete(m.leaves, l, l+1)
		m.spare = leaf
		return 0
	}
	m.leaves[l] = leaf
	if l > 0 && len(m.leaves[l-1])+len(leaf) <= leafMax/2 {
		m.leaves[l-1] = append(m.leaves[l-1], leaf...)
		clear(leaf)
		m.leaves = slices.Delete(m.leaves, l, l+1)
		m.spare = leaf[:0]
		return 0
	}
	return 1
}

// Cut makes [off, end) free. Extents that reach into it are trimmed; drop is called for each that vanishes and dup for
// one that becomes two.
func (m *Map[T]) Cut(off, end int64, drop, dup func(val *T)) {
	l, i := m.find(off)
	if l == len(m.leaves) || m.leaves[l][i].Off >= end {
		return
	}
	if e := &m.leaves[l][i]; e.Off < off {
		right := Entry[T]{end, e.End, e.Val}
		e.End = off
		if right.End > end {
			dup(&right.Val)
			l, i = m.find(off)
			m.insertAt(l, i, right)
			return
		}
	}
	if l, i = m.find(end); l < len(m.leaves) && m.leaves[l][i].Off < end {
		m.leaves[l][i].Off = end
	}
	m.DeleteFunc(off, end, func(e *Entry[T]) bool {
		drop(&e.Val)
		return true
	})
}
