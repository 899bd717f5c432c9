package meta

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	// placePatience is how long somebody waits for a place to be written before it is recalled.
	placePatience = time.Second
	// placeAnswer is how long a session may leave such a recall unanswered.
	placeAnswer = 2 * time.Second
	// placeWait is how long a call waits for places before the client is told to ask again, so that such calls do not
	// keep all slots.
	placeWait = 5 * time.Second
)

// reservation is a place where an append of a session goes that has not said yet that it is written.
type reservation struct {
	number uint64
	off    int64
	report // what the session will have written
}

// addPlace keeps a place for a session; s.mu is held.
func (s *Service) addPlace(cl *claim, off, n, at int64) uint64 {
	s.lastPlace++
	cl.places = append(cl.places, reservation{s.lastPlace, off, report{end: off + n, mtime: at}})
	return s.lastPlace
}

// settlePlaces takes note of what a session says of its places: those that are written count as reported. s.mu is held.
func (s *Service) settlePlaces(cl *claim, ended, givenUp []uint64) {
	if cl == nil || len(ended)+len(givenUp) == 0 {
		return
	}
	kept := cl.places[:0]
	for _, p := range cl.places {
		switch {
		case slices.Contains(ended, p.number):
			cl.report = cl.report.and(p.report)
			cl.file.raise(p.end)
		case !slices.Contains(givenUp, p.number):
			kept = append(kept, p)
		}
	}
	cl.places = kept
	s.changedFile(cl.file)
}

// endPlaces counts all places of a session as written, which it has finished; s.mu is held.
func (cl *claim) endPlaces() {
	for _, p := range cl.places {
		cl.report = cl.report.and(p.report)
		cl.file.raise(p.end)
	}
	cl.places = nil
}

// reclaimPlaces takes over the places that a session had at an earlier instance, of a file that is size bytes long
// without them; s.mu is held.
func (s *Service) reclaimPlaces(cl *claim, places []metarpc.Place, size int64) {
	if cl.sess.reclaimed || !cl.open {
		return
	}
	for _, p := range places {
		if slices.ContainsFunc(cl.places, func(have reservation) bool { return have.number == p.Number }) {
			continue
		}
		end := layout.Range{Off: p.Off, Len: p.Len}.End()
		cl.places = append(cl.places, reservation{p.Number, p.Off, report{end: end, mtime: p.Mtime}})
		s.lastPlace = max(s.lastPlace, p.Number)
	}
	cl.file.raise(max(size, cl.file.reported().end))
}

// hasPlaces reports whether there are places of f, which may be nil, that are not written; Service.mu is held.
func (f *file) hasPlaces() bool {
	return f != nil && slices.ContainsFunc(f.claims, func(cl *claim) bool { return len(cl.places) > 0 })
}

// placedEnd is where the last place of f ends, 0 if there is none; Service.mu is held.
func (f *file) placedEnd() (end int64) {
	for _, cl := range f.claims {
		for _, p := range cl.places {
			end = max(end, p.end)
		}
	}
	return end
}

// raise notes that f is to be shown with so many bytes as soon as all places in front of its end are written;
// Service.mu is held.
func (f *file) raise(end int64) {
	if f.hasPlaces() {
		f.shown = max(f.shown, end)
	}
}

// hidePlaces makes attributes of f, which may be nil, end where the first place begins that is not written. They are
// read before that is looked for. Service.mu is held.
func (f *file) hidePlaces(a *metarpc.Attr) {
	if f == nil {
		return
	}
	for _, cl := range f.claims {
		for _, p := range cl.places {
			a.Size = min(a.Size, p.off)
		}
	}
}

// shownWith is hidePlaces for who does not have s.mu.
func (s *Service) shownWith(id layout.FileID, a metarpc.Attr) metarpc.Attr {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[id].hidePlaces(&a)
	return a
}

// waitsFor reports whether a place up to a number keeps what is written behind it, or may be, from being shown;
// Service.mu is held.
func (f *file) waitsFor(upto uint64) bool {
	return slices.ContainsFunc(f.claims, func(cl *claim) bool {
		return slices.ContainsFunc(cl.places, func(p reservation) bool {
			return p.number <= upto && (p.off < f.shown || cl.unfenced)
		})
	})
}

// placesNow is the number of the last place, and whether any of such files has one.
func (s *Service) placesNow(ids []layout.FileID) (upto uint64, any bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lastPlace, slices.ContainsFunc(ids, func(id layout.FileID) bool { return s.files[id].hasPlaces() })
}

// settlePlacesOf waits until files can be shown with all that has been written to them: those who have places have said
// which ones are written, by asking, and there is none in front of what is. Places for which that takes too long are
// recalled.
func (s *Service) settlePlacesOf(ctx context.Context, ids []layout.FileID, asking func(context.Context) error) error {
	upto, any := s.placesNow(ids)
	if !any {
		return asking(ctx)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, placeWait, refusef(metarpc.StatusGrace, "appends to inode %d are not written yet", ids[0]))
	defer cancel()
	late := time.AfterFunc(placePatience, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.grace {
			return // nobody gets a layout to finish anything with; who waits asks again
		}
		for _, id := range ids {
			if f := s.files[id]; f != nil {
				s.startPlaceRecalls(f, upto)
			}
		}
	})
	defer late.Stop()
	err := asking(ctx)
	s.mu.Lock()
	for _, id := range ids {
		f := s.files[id]
		if f == nil {
			continue
		}
		for err == nil && f.waitsFor(upto) {
			err = s.wait(ctx, f)
		}
		s.changedFile(f)
	}
	s.mu.Unlock()
	if err != nil && errors.Is(err, ctx.Err()) {
		err = context.Cause(ctx)
	}
	return err
}

// recallPlaces takes all places of f from those who have them, and returns when each is written or given up. The caller
// has seen to it that none is given meanwhile.
func (s *Service) recallPlaces(ctx context.Context, f *file) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for f.hasPlaces() {
		s.startPlaceRecalls(f, math.MaxUint64)
		if err := s.wait(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// startPlaceRecalls has those who have places of f up to a number write them or give them up; s.mu is held.
func (s *Service) startPlaceRecalls(f *file, upto uint64) {
	for _, cl := range f.claims {
		last := uint64(0)
		for _, p := range cl.places {
			if p.number <= upto {
				last = max(last, p.number)
			}
		}
		if last <= cl.placesRecalled || cl.unfenced {
			continue // that is being done, or the session's end sees to it
		}
		cl.placesRecalled = last
		s.tasks.Go(func() { // ends with the answer, the session, or s.ctx
			args := &metarpc.ReserveRecallArgs{ID: f.id, Upto: last}
			if s.await(s.ctx, cl.sess, newCallback(metarpc.BackReserveRecall, args), placeAnswer) != nil {
				return // its places stay until it can no longer write
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			cl.places = slices.DeleteFunc(cl.places, func(p reservation) bool { return p.number <= last })
			s.changedFile(f)
		})
	}
}
