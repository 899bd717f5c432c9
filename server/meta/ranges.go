package meta

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

const (
	// rangeUnit is what ranges that sessions keep from others are multiples of.
	rangeUnit = 1 << 20
	// holdTime is how long a session keeps such a range at least, so that it gets something done if others want it, too.
	holdTime = 10 * time.Millisecond
	// promiseTime is how long a range that was taken for a session waits for it to ask again.
	promiseTime = 5 * time.Second
)

// exclusive reports whether no two sessions may ever write the same bytes of a file: its copies could differ then. What is on namespaces
// nobody may read either while somebody writes it. Of other files a portion may become shared, see shares.go.
func (s *Service) exclusive(l *schema.Layout) bool {
	return len(l.Mirrors)+len(l.Caches) > 1 || s.cfg.Files.OnNamespaces(*l)
}

// rangeAround are the whole units that hold the n bytes at off.
func rangeAround(off, n int64) layout.Range {
	r := layout.Range{Off: off - off%rangeUnit, Len: layout.ToEOF}
	if end := (layout.Range{Off: off, Len: max(n, 1)}).End(); end <= layout.ToEOF-rangeUnit {
		r.Len = (end+rangeUnit-1)/rangeUnit*rangeUnit - r.Off
	}
	return r
}

// against are the ranges of a claim in which no other session may have a layout of this mode.
func (cl *claim) against(mode layout.IOMode) []layout.Range {
	var ranges []layout.Range
	if cl.writer {
		ranges = cl.ranges
	}
	if mode == layout.IOModeRW && len(cl.reads) > 0 {
		ranges = slices.Concat(ranges, cl.reads)
	}
	return ranges
}

// keeps adds a range to those that a claim has for layouts of this mode.
func (cl *claim) keeps(mode layout.IOMode, r layout.Range) {
	if mode == layout.IOModeRW {
		cl.ranges = with(cl.ranges, r)
	} else {
		cl.reads = with(cl.reads, r)
	}
}

// purpose is what a session is to have a range for.
type purpose struct {
	mode      layout.IOMode
	exclusive bool // nobody else may write it, or if it is read on namespaces, see exclusive; else it may become shared
	pins      bool // its kernel is to write all of the file by itself
}

// holdRange makes the n bytes at off the session's to write, alone, or to read while nobody else writes them, together with what is around them
// and nobody else has in a way that speaks against it, and returns that; or the shared portion that off is in. If others have some of it so, that is
// taken from them, for which Service.mu, which is held, is released; again says so: the caller then looks at everything once more.
func (s *Service) holdRange(ctx context.Context, f *file, cl *claim, why purpose, off, n int64) (held layout.Range, shared, again bool, err error) {
	wanted := rangeAround(off, n)
	if why.pins {
		wanted = wholeFile
	}
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
	mayShare := !why.exclusive && f.mayShare(cl.sess)
	passed := !why.exclusive && f.passesWrites(cl.sess)
	if !why.exclusive {
		if p := f.sharedAt(off); p != nil && mayShare && !p.Overlaps(f.taking) && (!why.pins && !passed || p.Range == wholeFile) {
			cl.shares = with(cl.shares, p.Range)
			cl.granted = time.Now()
			return p.Range, true, false, nil
		} else if p == nil && !why.pins {
			// What lies behind is asked for when it is its turn.
			for _, p := range f.portions {
				if p.shared && p.Off > off && p.Off < wanted.End() {
					wanted.Len = p.Off - wanted.Off
				}
			}
		}
		for _, p := range f.portions {
			if p.shared && !beside(p.Range) {
				free = false
			}
		}
	}
	for _, o := range f.claims {
		if o == cl || o.appends && cl.appends && !why.exclusive {
			continue // what two append is in different places
		}
		for _, r := range o.against(why.mode) {
			if !beside(r) {
				free = false
				busy = busy || time.Since(o.promised) < promiseTime
			}
		}
	}
	if !beside(f.taking) {
		free = false
	}
	if passed && !mayShare {
		return held, false, true, refusef(metarpc.StatusLayoutUnavailable, "inode %d is open in passthrough for writing", f.id)
	}
	if free && !passed {
		held = layout.Range{Off: from, Len: to - from}
		cl.keeps(why.mode, held)
		cl.granted, cl.promised = time.Now(), time.Time{}
		return held, false, false, nil
	}
	if !busy && f.taking.Len == 0 {
		f.taking = layout.Range{Off: wanted.Off, Len: to - wanted.Off}
		var p *portion
		switch {
		case !mayShare:
		case why.pins || passed:
			p = &portion{Range: wholeFile}
		default:
			p = f.changesHands(wanted)
		}
		if p != nil {
			f.taking = p.Range
		}
		for _, shared := range f.portions { // are taken as a whole
			if shared.shared && shared.Overlaps(f.taking) {
				f.taking = with([]layout.Range{f.taking}, shared.Range)[0]
			}
		}
		by := cl.sess
		s.tasks.Go(func() { s.takeRange(f, by, why, p) }) // owns f.taking; ends when those who have the range have given it back, or with s.ctx
	}
	if err := s.wait(ctx, f); err != nil {
		return held, false, true, context.Cause(ctx)
	}
	return held, false, true, nil
}

// takeRange takes the range f.taking from all whose layouts there speak against one for a session, and gives it to that. If p is not nil it is
// taken from all who have it alone, and becomes shared.
func (s *Service) takeRange(f *file, by *session, why purpose, p *portion) {
	s.mu.Lock()
	r := f.taking
	cl := f.claimOf(by)
	appends := cl != nil && cl.appends
	has := func(cl *claim) bool {
		switch {
		case p != nil:
			return slices.ContainsFunc(cl.ranges, r.Overlaps)
		case cl.sess == by, appends && cl.appends && !why.exclusive:
			return false
		}
		return slices.ContainsFunc(cl.against(why.mode), r.Overlaps) || slices.ContainsFunc(cl.shares, r.Overlaps)
	}
	var until time.Time
	for _, cl := range f.claims {
		if end := cl.granted.Add(holdTime); has(cl) && end.After(until) {
			until = end
		}
	}
	s.mu.Unlock()
	err := retry.Pause(s.ctx, time.Until(until))
	if err == nil {
		err = s.recallRange(s.ctx, f, r, has)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	cl = f.claimOf(by)
	may := cl != nil && (cl.writer && why.mode == layout.IOModeRW || cl.open && why.mode == layout.IOModeRead) && by.ctx.Err() == nil
	switch {
	case err != nil:
	case p != nil:
		s.share(f, p)
	case may && (why.exclusive || !f.passesWrites(by)):
		f.portions = slices.DeleteFunc(f.portions, func(p *portion) bool { return p.shared && p.Overlaps(r) })
		cl.keeps(why.mode, r)
		cl.promised = time.Now()
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

// recallLayouts takes the layouts of a range away from those who may write the file, or read some of the range where others may not write, and
// are such. It returns when all have answered or have lost their sessions, or ctx ends.
func (s *Service) recallLayouts(ctx context.Context, f *file, r layout.Range, such func(*claim) bool) error {
	s.mu.Lock()
	// An answer that grants a layout has to be on its way before the recall is.
	for f.granting > 0 {
		if err := s.wait(ctx, f); err != nil {
			s.mu.Unlock()
			return err
		}
	}
	var holders []*session
	for _, cl := range f.claims {
		if (cl.writer || slices.ContainsFunc(cl.reads, r.Overlaps)) && such(cl) {
			holders = append(holders, cl.sess)
		}
	}
	s.mu.Unlock()
	var recalls sync.WaitGroup
	for _, sess := range holders {
		recalls.Go(func() { // ends with the answer, the session, its lease, or ctx
			args := &metarpc.LayoutRecallArgs{ID: f.id, Off: r.Off, Len: r.Len}
			if err := s.callBack(ctx, sess, metarpc.BackLayoutRecall, args); err != nil && ctx.Err() == nil {
				s.log.Warn("layout not given back", "inode", f.id, "session", sess, "error", err)
			}
		})
	}
	recalls.Wait()
	return ctx.Err()
}

// recallReads takes their layouts from all who read a file on namespaces. They may have got others when it returns, from the layout row as it
// is since before.
func (s *Service) recallReads(ctx context.Context, id layout.FileID) error {
	s.mu.Lock()
	f := s.files[id]
	reads := func(cl *claim) bool { return len(cl.reads) > 0 }
	if f == nil || !slices.ContainsFunc(f.claims, reads) {
		s.mu.Unlock()
		return nil
	}
	f.waiters++ // so that the record stays
	s.mu.Unlock()
	err := s.recallLayouts(ctx, f, layout.Range{Len: layout.ToEOF}, reads)
	s.mu.Lock()
	defer s.mu.Unlock()
	for f.unbarred() && err == nil {
		err = s.wait(ctx, f)
	}
	f.waiters--
	s.changedFile(f)
	return err
}
