package meta

import (
	"slices"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/layout"
)

const (
	// sharedTime is in how much time a portion changes hands twice to become shared, and how long it then is shared before
	// it is measured anew.
	sharedTime = 5 * time.Second
	// maxTakes is how often something of a file is taken in that time before all of it counts as one portion, if it has no
	// more writers than half of that; each may well take its part of the file once.
	maxTakes = 8
	// sharing is the version of the protocol in which sessions know shared segments.
	sharing = 6
)

// wholeFile is all that a file can have.
var wholeFile = layout.Range{Len: layout.ToEOF}

// portion is a part of a file that several sessions write, of which is measured how often it changes hands.
type portion struct {
	layout.Range
	takes  int       // how often, lately
	since  time.Time // it changed hands last, or became shared
	shared bool      // every session may write it, and keeps nothing that it could send again
}

// sharedAt is the shared portion that has the byte at off; nil if none has. Service.mu is held.
func (f *file) sharedAt(off int64) *portion {
	i := slices.IndexFunc(f.portions, func(p *portion) bool { return p.shared && p.Contains(off, 1) })
	if i < 0 {
		return nil
	}
	return f.portions[i]
}

// mayShare reports whether a session and all others that may write f know shared segments; Service.mu is held.
func (f *file) mayShare(by *session) bool {
	return by.version.Load() >= sharing && !slices.ContainsFunc(f.claims, func(cl *claim) bool {
		return cl.writer && cl.sess.version.Load() < sharing
	})
}

// passesWrites reports whether the kernel of another session may be writing f by itself: of that nothing can be taken back. Service.mu
// is held.
func (f *file) passesWrites(by *session) bool {
	return slices.ContainsFunc(f.claims, func(cl *claim) bool {
		return cl.sess != by && cl.open && cl.writer && len(cl.pin.Handle) > 0
	})
}

// changesHands notes that wanted is about to be taken, and returns the portion that becomes shared instead; nil if none does.
// Service.mu is held.
//
// A portion is what was wanted, and twice the portion beside it if that is shared already: sessions that go through a file
// together come to share it soon.
func (f *file) changesHands(wanted layout.Range) *portion {
	now := time.Now()
	f.portions = slices.DeleteFunc(f.portions, func(p *portion) bool { return !p.shared && now.Sub(p.since) > sharedTime })
	if now.Sub(f.takesSince) > sharedTime {
		f.takes, f.takesSince = 0, now
	}
	writers := 0
	for _, cl := range f.claims {
		if cl.writer {
			writers++
		}
	}
	if f.takes++; f.takes > max(maxTakes, 2*writers) {
		return &portion{Range: wholeFile}
	}
	for _, p := range f.portions {
		if !p.shared && p.Contains(wanted.Off, 1) {
			p.takes++
			p.since = now
			if p.takes < 2 {
				return nil
			}
			return p
		}
	}
	p := &portion{Range: wanted, takes: 1, since: now}
	for _, o := range f.portions {
		if o.shared && (o.End() == wanted.Off || o.Off == wanted.End()) {
			p.Len = max(p.Len, 2*o.Len)
		}
	}
	for _, o := range f.portions {
		if o.Off > p.Off {
			p.Len = min(p.Len, o.Off-p.Off)
		}
	}
	f.portions = append(f.portions, p)
	return nil
}

// share makes p shared, after everybody has given back what it had there; Service.mu is held.
func (s *Service) share(f *file, p *portion) {
	f.portions = slices.DeleteFunc(f.portions, func(o *portion) bool { return o.Overlaps(p.Range) })
	f.portions = append(f.portions, p)
	p.shared, p.since = true, time.Now()
	f.waiters++
	s.tasks.Go(func() { s.measureAnew(f, p) }) // has f stay; ends when p is not shared any more, or with s.ctx
}

// measureAnew ends the sharing of p after sharedTime: whoever writes it gets it alone, until it changes hands again.
func (s *Service) measureAnew(f *file, p *portion) {
	still := func() bool { return slices.Contains(f.portions, p) }
	over := false
	for !over {
		if retry.Pause(s.ctx, sharedTime) != nil {
			return
		}
		s.mu.Lock()
		for still() && f.taking.Len > 0 {
			if s.wait(s.ctx, f) != nil {
				s.mu.Unlock()
				return
			}
		}
		over = !still() || !f.passesWrites(nil)
		if over && still() {
			f.taking = p.Range
		}
		s.mu.Unlock()
	}
	if s.recallShared(f, p) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiters--
	s.changedFile(f)
}

// recallShared ends the sharing of p, if it is f.taking.
func (s *Service) recallShared(f *file, p *portion) error {
	s.mu.Lock()
	has := slices.Contains(f.portions, p)
	s.mu.Unlock()
	if !has {
		return nil
	}
	shares := func(cl *claim) bool { return slices.ContainsFunc(cl.shares, p.Overlaps) }
	if err := s.recallRange(s.ctx, f, p.Range, shares); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p.shared, p.takes, p.since = false, 1, time.Now()
	f.taking = layout.Range{}
	s.changedFile(f)
	return nil
}
