package meta

import (
	"context"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/locktable"
)

// file is what is known in memory of a regular file: who has it open or may write it, and what is being done to it as a
// whole. It exists as long as it says anything. All of it is guarded by Service.mu.
type file struct {
	id         layout.FileID
	told       []metarpc.CopyRef // its copies that are stale, if all know of them who may use the file
	claims     []*claim
	orphan     bool         // has no name left; its last close removes it
	removing   bool         // somebody decides whether it goes, and does it
	sizing     bool         // somebody cuts it or finds out its size
	stop       func()       // ends what sizing stands for, because the file is gone
	cut        *cut         // being shortened
	gate       layout.Range // where no layout is granted that is taken back, because it is being copied; it goes with sizing
	wanted     func()       // told with gate that somebody waits for it or for sizing; nil: that is not heeded
	gates      uint64       // how many gates have ended, under which its layout may have changed
	taking     layout.Range // is being taken from those who have it, for another session; Len 0: nothing is
	portions   []*portion   // what several sessions write, or lately have; see shares.go
	takes      int          // how often something of it was taken in the sharedTime that began with takesSince
	takesSince time.Time
	freezing   int           // somebody relies on what is pinned, or that nothing is
	heldUp     *heldUp       // what cannot be done because of what is pinned; nil: nothing
	granting   int           // layouts that can be taken back whose answer is not yet in its connection's queue
	reach      int64         // its writers, while there are any, have asked to write up to here; where there are quotas of bytes
	placing    int           // places whose answers are not sent yet
	shown      int64         // with places that are not written: how long the file is without those in front of that
	disarms    int           // changes under way that take its privileges away, see programs.go
	moves      uint64        // how often what is reported went into the inode row, or was cut off
	waiters    int           // who needs the record to stay
	changed    chan struct{} // closed at the next change of anything above; nil when nobody waits
}

// claim is what one session has to do with one file.
type claim struct {
	sess  *session
	file  *file
	open  bool
	write bool // with open: for writing as well
	// How many calls are opening it, during which it is open already; with open, whether one of them has succeeded.
	opening   int
	opened    bool
	locks     locktable.Open  // with open
	exec      bool            // with open: for execution, when it had privileges
	executing int             // calls that may be setting exec
	pin       metarpc.CopyRef // with open: a copy that its kernel reads or writes without asking
	writer    bool            // may have a writer row
	crowded   bool            // a writer that somebody else may have written beside, or that an earlier instance knew, see used.go
	ranges    []layout.Range  // of a writer: where it may write and nobody else, see ranges.go
	shares    []layout.Range  // of a writer: where it and others may write
	reads     []layout.Range  // with open, of a file on namespaces: where it may read and nobody else write
	granted   time.Time       // when it last got one of these
	promised  time.Time       // when one was taken for it that it has not been told of yet; zero: there is none
	appends   bool            // a writer that writes only where Reserve has told it to
	unfenced  bool            // the session was ended without its doing: what it still has under way may reach the data files
	unbarred  bool            // the same for namespaces, which it may also read
	unfence   func()          // ends the fencing, because the file is gone
	assigning int             // calls that may be making that row
	returning bool            // it is being deleted
	awaited   bool            // the row says so
	unsure    bool            // the row is of an earlier instance, and what it was told of sizes is not known again yet
	report                    // what the session says of the file and is not yet in its inode row

	places         []reservation // of its appends, which it has not said to be written
	placesRecalled uint64        // up to this number they have been recalled
}

// report is the end and time of a session's writes; zero says nothing.
type report struct {
	end, mtime int64
	writer     *session // in what is said of a file: who may be writing it, see used.go
}

// file returns the record of id, made if there is none; s.mu is held. It lasts until s.mu is released, and after that
// as long as something is in it.
func (s *Service) file(id layout.FileID) *file {
	f := s.files[id]
	if f == nil {
		f = &file{id: id}
		s.files[id] = f
	}
	return f
}

// claim returns what sess has to do with f, made if there is nothing; s.mu is held.
func (f *file) claim(sess *session) *claim {
	cl := sess.claims[f.id]
	if cl == nil {
		cl = &claim{sess: sess, file: f}
		sess.claims[f.id] = cl
		f.claims = append(f.claims, cl)
	}
	return cl
}

// changedFile wakes who waits for a change of f, and drops f and its claims if they say nothing any more; s.mu is held.
func (s *Service) changedFile(f *file) {
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
	if f.heldUp != nil && len(f.pinned()) == 0 {
		f.heldUp = nil
		s.resilverSoon()
	}
	if f.reach > 0 && !f.writtenByOthers(nil) {
		f.reach = 0
	}
	if f.shown > 0 && !f.hasPlaces() {
		f.shown = 0
	}
	f.claims = slices.DeleteFunc(f.claims, func(cl *claim) bool {
		idle := !cl.open && !cl.writer && !cl.unbarred && cl.executing == 0 && cl.assigning == 0 && !cl.returning &&
			cl.report == report{} && len(cl.places) == 0
		if idle {
			delete(cl.sess.claims, f.id)
		}
		return idle
	})
	if len(f.claims) == 0 && !f.orphan && !f.removing && !f.sizing && f.granting == 0 && f.taking.Len == 0 && f.freezing == 0 && f.disarms == 0 && f.placing == 0 && f.waiters == 0 {
		delete(s.files, f.id)
	}
}

// wait releases s.mu until f has changed or ctx ends. f stays the file's record meanwhile.
func (s *Service) wait(ctx context.Context, f *file) error {
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	changed := f.changed
	f.waiters++
	s.mu.Unlock()
	var err error
	select {
	case <-changed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.mu.Lock()
	f.waiters--
	if err != nil {
		s.changedFile(f) // it may have been the last thing that kept f
	}
	return err
}

// want tells those who are copying f, if they want to know, that somebody waits for that; s.mu is held.
func (f *file) want() {
	if f.wanted != nil {
		f.wanted()
	}
}

// opened reports whether any session has f open; s.mu is held.
func (f *file) opened() bool {
	return slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.open })
}

// reported is what all sessions together say of f; s.mu is held.
func (f *file) reported() report {
	var r report
	for _, cl := range f.claims {
		r = r.and(cl.report)
		if cl.writer {
			r.writer = together(r.writer, cl.sess)
		}
	}
	return r
}

// and is what two reports say together.
func (r report) and(o report) report {
	return report{max(r.end, o.end), max(r.mtime, o.mtime), together(r.writer, o.writer)}
}

// said returns what is reported of each of the files, as far as it is known.
func (s *Service) said(ids ...layout.FileID) []report {
	all, _ := s.look(ids)
	return all
}

// reports is said, after finding out about the files of which too little is known.
//
// Read reports before inode rows: a report leaves memory only after it is in the row, so whoever reads in this order never
// misses both.
func (s *Service) reports(ctx context.Context, ids ...layout.FileID) ([]report, error) {
	for {
		all, unsure := s.look(ids)
		if len(unsure) == 0 {
			return all, nil
		}
		for _, id := range unsure {
			if err := s.makeSure(ctx, id); err != nil {
				return nil, err
			}
		}
	}
}

func (s *Service) look(ids []layout.FileID) (all []report, unsure []layout.FileID) {
	all = make([]report, len(ids))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, id := range ids {
		f := s.files[id]
		if f == nil {
			continue
		}
		all[i] = f.reported()
		// A file that is being cut is as long as its row says. Of one that sessions are awaited for the data files
		// tell too much, or nothing: who does not wait is told what is known.
		if f.unsure() && !s.awaitsAny(f) && (f.cut == nil || f.cut.phase != cutCutting) {
			unsure = append(unsure, id)
		}
	}
	return all, unsure
}

// unfenced reports whether sessions that are over may still write f; Service.mu is held.
func (f *file) unfenced() bool {
	return slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.unfenced })
}

// unbarred reports whether sessions that are over may still read or write what f has on namespaces; Service.mu is held.
func (f *file) unbarred() bool {
	return slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.unbarred })
}

// unsure reports whether f may be longer than is known; Service.mu is held.
func (f *file) unsure() bool {
	return slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.unsure })
}

// gone forgets what sessions had to do with a file that no longer exists; s.mu is held.
func (s *Service) gone(f *file) {
	f.orphan = false
	s.forgetLocks(f.id)
	for _, cl := range f.claims {
		cl.open, cl.writer, cl.unsure, cl.unfenced, cl.unbarred, cl.report, cl.reads = false, false, false, false, false, report{}, nil
		cl.places = nil
		if cl.unfence != nil {
			cl.unfence()
		}
	}
	if f.stop != nil {
		f.stop()
	}
	s.changedFile(f)
}
