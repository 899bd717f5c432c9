package nvmetcp

import (
	"math"

	"github.com/weftfs/weft/internal/rangemap"
	"github.com/weftfs/weft/layout"
)

// written is which blocks of INVALID extents of a data file hold what was written there. Target.mu guards it.
type written struct {
	key        string // the data file's handle
	generation uint64
	users      int // operations that have a pointer to it

	fresh  rangemap.Map[mark] // not stable
	stable rangemap.Map[mark] // and the service does not know that they are
	valid  rangemap.Map[mark]
}

// mark says where blocks are.
type mark struct {
	delta int64  // what their address on the namespace is more than their offset
	begun uint64 // fresh: Target.begun when they were written
}

func nop(*mark) {}

// covers reports whether the byte at lies in one of m's blocks at delta, and up to where that is so or not, at most to.
func covers(m *rangemap.Map[mark], at, to, delta int64) (next int64, is bool) {
	next = to
	m.Overlapping(at, to, func(e *rangemap.Entry[mark]) bool {
		if e.Val.delta != delta {
			return true
		}
		if is = e.Off <= at; is {
			next = min(to, e.End)
		} else {
			next = e.Off
		}
		return false
	})
	return next, is
}

// add makes [off, end) v, joined with its neighbours where these are the same.
func add(m *rangemap.Map[mark], off, end int64, v mark) {
	from, to := off, end
	m.Overlapping(max(off-1, 0), end+1, func(e *rangemap.Entry[mark]) bool {
		if e.Val == v {
			from, to = min(from, e.Off), max(to, e.End)
		}
		return true
	})
	m.Cut(from, to, nop, nop)
	m.Insert(from, to, v)
}

// next reports whether the block at was written, and up to where that is so or not, at most to.
func (w *written) next(at, to, delta int64) (next int64, is bool) {
	maps := [...]*rangemap.Map[mark]{&w.valid, &w.stable, &w.fresh}
	end := at
	for end < to {
		on := false
		for _, m := range maps {
			if next, on = covers(m, end, to, delta); on {
				end = next
				break
			}
		}
		if !on {
			break
		}
	}
	if end > at {
		return end, true
	}
	end = to
	for _, m := range maps {
		next, _ = covers(m, at, to, delta)
		end = min(end, next)
	}
	return end, false
}

// where finds the block at: whether it was written, where, and up to where that is so or not, at most to.
func (w *written) where(at, to int64) (next, delta int64, is bool) {
	next = to
	for _, m := range [...]*rangemap.Map[mark]{&w.valid, &w.stable, &w.fresh} {
		m.Overlapping(at, to, func(e *rangemap.Entry[mark]) bool {
			if is = e.Off <= at; is {
				next, delta = min(to, e.End), e.Val.delta
			} else {
				next = min(next, e.Off)
			}
			return false
		})
		if is {
			break
		}
	}
	return next, delta, is
}

// has reports whether the block of p was written, in this generation.
func (w *written) has(p *part, generation uint64, block int64) bool {
	if w.generation != generation {
		return false
	}
	_, is := w.next(p.off, p.off+block, p.delta)
	return is
}

// settled notes that blocks that were written are stable.
func (w *written) settled(off, end, delta int64) {
	for off < end {
		next, is := covers(&w.valid, off, end, delta)
		if !is {
			add(&w.stable, off, next, mark{delta: delta})
		}
		off = next
	}
}

// validated notes that the service knows of what is stable in [off, end).
func (w *written) validated(off, end int64) {
	w.stable.Overlapping(off, end, func(e *rangemap.Entry[mark]) bool {
		add(&w.valid, max(off, e.Off), min(end, e.End), e.Val)
		return true
	})
	w.stable.Cut(off, end, nop, nop)
}

// mark notes that a part has written its blocks. Those that were fresh before stay what they were: the COMMIT that makes
// their first content stable also tells whether the service may know of them.
func (t *Target) mark(p *part) {
	o, w := p.o, p.o.known
	t.mu.Lock()
	defer t.mu.Unlock()
	if w == nil || w.generation != o.generation {
		return
	}
	off, end := p.off, p.off+int64(p.req.Blocks)*t.block
	if o.fua || !t.format.Cached {
		w.settled(off, end, p.delta)
		return
	}
	if t.look() != p.lost {
		return // it may have been lost since
	}
	for off < end {
		next, is := covers(&w.fresh, off, end, p.delta)
		if !is {
			add(&w.fresh, off, next, mark{p.delta, t.begun})
		}
		off = next
	}
	t.fresh[w] = struct{}{}
}

// settle notes that what was written before the Flush began is stable: all that is still known of that, after a look. mu is
// held.
func (t *Target) settle() {
	for w := range t.fresh {
		w.fresh.DeleteFunc(0, math.MaxInt64, func(e *rangemap.Entry[mark]) bool {
			if e.Val.begun >= t.begun {
				return false
			}
			w.settled(e.Off, e.End, e.Val.delta)
			return true
		})
		if w.fresh.Len() == 0 {
			delete(t.fresh, w)
		}
	}
}

// adopt reports whether the data file is of the generation that is known, which a newer one becomes. mu is held.
func (t *Target) adopt(w *written, df *layout.DataFile) bool {
	if df.Generation > w.generation {
		w.generation = df.Generation
		t.cut(w, 0)
	}
	return df.Generation == w.generation
}

// cut forgets what is known of blocks at and past from. mu is held.
func (t *Target) cut(w *written, from int64) {
	for _, m := range [...]*rangemap.Map[mark]{&w.valid, &w.stable, &w.fresh} {
		m.Cut(from, math.MaxInt64, nop, nop)
	}
	if w.fresh.Len() == 0 {
		delete(t.fresh, w)
	}
}

// tidy forgets w if there is nothing to remember. mu is held.
func (t *Target) tidy(w *written) {
	if w.users == 0 && w.valid.Len()+w.stable.Len()+w.fresh.Len() == 0 {
		delete(t.files, w.key)
	}
}

// about runs do with what is known of a data file in its generation, if anything is.
func (t *Target) about(df *layout.DataFile, do func(w *written)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
	if w := t.files[string(df.Handles[0])]; w != nil {
		if t.adopt(w, df) {
			do(w)
		}
		t.tidy(w)
	}
}

// Written implements dataplane.Validator. What df calls valid need not be told any more.
func (t *Target) Written(df *layout.DataFile) (ranges []layout.Range) {
	t.about(df, func(w *written) {
		for i := range df.Extents {
			if e := &df.Extents[i]; e.State == layout.ExtentReadWrite {
				w.validated(e.Off, e.End())
			}
		}
		w.stable.Overlapping(0, math.MaxInt64, func(e *rangemap.Entry[mark]) bool {
			ranges = append(ranges, layout.Range{Off: e.Off, Len: e.End - e.Off})
			return true
		})
	})
	return ranges
}

// Validated implements dataplane.Validator.
func (t *Target) Validated(df *layout.DataFile, ranges []layout.Range) {
	t.about(df, func(w *written) {
		for _, r := range ranges {
			w.validated(t.roundUp(r.Off), r.End()-r.End()%t.block)
		}
	})
}

// Cut implements dataplane.Validator.
func (t *Target) Cut(df *layout.DataFile, from int64) {
	t.about(df, func(w *written) { t.cut(w, t.roundUp(from)) })
}

// Forget implements dataplane.Validator.
func (t *Target) Forget(df *layout.DataFile) {
	t.about(df, func(w *written) { w.valid.Cut(0, math.MaxInt64, nop, nop) })
}

// roundUp is the end of the block that off is in, if it is not its beginning.
func (t *Target) roundUp(off int64) int64 {
	if rest := off % t.block; rest != 0 {
		off += min(t.block-rest, math.MaxInt64-off)
	}
	return off
}
