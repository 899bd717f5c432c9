package meta

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/schema"
)

const (
	// rangeUnit is what ranges that one session alone may write are multiples of.
	rangeUnit = 1 << 20
	// holdTime is how long a session keeps such a range at least, so that it gets something done if others want it, too.
	holdTime = 10 * time.Millisecond
	// promiseTime is how long a range that was taken for a session waits for it to ask again.
	promiseTime = 5 * time.Second
)

// exclusive reports whether no two sessions may write the same bytes of the file: its copies could differ then.
func exclusive(l *schema.Layout) bool { return len(l.Mirrors)+len(l.Caches) > 1 }

// rangeAround are the whole units that hold the n bytes at off.
func rangeAround(off, n int64) layout.Range {
	r := layout.Range{Off: off - off%rangeUnit, Len: layout.ToEOF}
	if end := (layout.Range{Off: off, Len: max(n, 1)}).End(); end <= layout.ToEOF-rangeUnit {
		r.Len = (end+rangeUnit-1)/rangeUnit*rangeUnit - r.Off
	}
	return r
}

// holdRange makes the n bytes at off the session's alone to write, together with what is around them and nobody else's, and returns that.
// If others have some of it, that is taken from them, for which Service.mu, which is held, is released; again says so: the caller then looks at
// everything once more.
func (s *Service) holdRange(ctx context.Context, f *file, cl *claim, off, n int64) (held layout.Range, again bool, err error) {
	wanted := rangeAround(off, n)
	from, to := int64(0), int64(layout.ToEOF)
	free, busy := true, false
	beside := func(r layout.Range) bool {
		switch {
		case r.Len == 0:
		case r.Overlaps(wanted):
			return false
		case r.Off >= wanted.End():
			to = min(to, r.Off)
		default:
			from = max(from, r.End())
		}
		return true
	}
	for _, o := range f.claims {
		if o == cl || !o.writer {
			continue
		}
		for _, r := range o.ranges {
			if !beside(r) {
				free = false
				busy = busy || time.Since(o.promised) < promiseTime
			}
		}
	}
	if !beside(f.taking) {
		free = false
	}
	if free {
		held = layout.Range{Off: from, Len: to - from}
		cl.ranges = with(cl.ranges, held)
		cl.granted, cl.promised = time.Now(), time.Time{}
		return held, false, nil
	}
	if !busy && f.taking.Len == 0 {
		f.taking = layout.Range{Off: wanted.Off, Len: to - wanted.Off}
		by := cl.sess
		s.tasks.Go(func() { s.takeRange(f, by) }) // owns f.taking; ends when those who have the range have given it back, or with s.ctx
	}
	if err := s.wait(ctx, f); err != nil {
		return held, true, context.Cause(ctx)
	}
	return held, true, nil
}

// takeRange takes the range f.taking from all who may write there, and gives it to a session.
func (s *Service) takeRange(f *file, by *session) {
	s.mu.Lock()
	r := f.taking
	has := func(cl *claim) bool {
		return cl.writer && cl.sess != by && slices.ContainsFunc(cl.ranges, r.Overlaps)
	}
	var until time.Time
	for _, cl := range f.claims {
		if end := cl.granted.Add(holdTime); has(cl) && end.After(until) {
			until = end
		}
	}
	s.mu.Unlock()
	err := pause(s.ctx, time.Until(until))
	if err == nil {
		err = s.recallRange(s.ctx, f, r, has)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if cl := f.claimOf(by); err == nil && cl != nil && cl.writer && by.ctx.Err() == nil {
		cl.ranges, cl.promised = with(cl.ranges, r), time.Now()
	}
	f.taking = layout.Range{}
	s.changedFile(f)
}

// with adds a range to ranges that share no byte, and which are in order.
func with(ranges []layout.Range, r layout.Range) []layout.Range {
	from, to := r.Off, r.End()
	var kept []layout.Range
	for _, o := range ranges {
		if o.Off > to || o.End() < from {
			kept = append(kept, o)
			continue
		}
		from, to = min(from, o.Off), max(to, o.End())
	}
	at, _ := slices.BinarySearchFunc(kept, from, func(o layout.Range, from int64) int {
		if o.Off < from {
			return -1
		}
		return 1
	})
	return slices.Insert(kept, at, layout.Range{Off: from, Len: to - from})
}

// without takes a range from ranges as with makes them.
func without(ranges []layout.Range, r layout.Range) []layout.Range {
	var left []layout.Range
	for _, o := range ranges {
		if !o.Overlaps(r) {
			left = append(left, o)
			continue
		}
		if o.Off < r.Off {
			left = append(left, layout.Range{Off: o.Off, Len: r.Off - o.Off})
		}
		if o.End() > r.End() {
			left = append(left, layout.Range{Off: r.End(), Len: o.End() - r.End()})
		}
	}
	return left
}

// others are the claims of all sessions but one.
func others(sess *session) func(*claim) bool {
	return func(cl *claim) bool { return cl.sess != sess }
}

// recallLayouts takes the layouts of a range away from those who may write the file and are such. It returns when all have answered or
// have lost their sessions, or ctx ends.
func (s *Service) recallLayouts(ctx context.Context, f *file, r layout.Range, such func(*claim) bool) error {
	s.mu.Lock()
	// An answer that grants a layout has to be on its way before the recall is.
	for f.granting > 0 {
		if err := s.wait(ctx, f); err != nil {
			s.mu.Unlock()
			return err
		}
	}
	var writers []*session
	for _, cl := range f.claims {
		if cl.writer && such(cl) {
			writers = append(writers, cl.sess)
		}
	}
	s.mu.Unlock()
	var recalls sync.WaitGroup
	for _, sess := range writers {
		recalls.Go(func() { // ends with the answer, the session, its lease, or ctx
			args := &metarpc.LayoutRecallArgs{ID: f.id, Off: r.Off, Len: r.Len}
			if err := s.callBack(ctx, sess, metarpc.BackLayoutRecall, args); err != nil {
				s.log.Warn("layout not given back", "inode", f.id, "session", sess, "error", err)
			}
		})
	}
	recalls.Wait()
	return ctx.Err()
}
