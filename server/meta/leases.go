package meta

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/turnback"
)

// Where sessions keep taking leases from each other, as in a directory in which several create files, leases cost more than
// they are worth: each change then waits for the others to answer. After a few recalls that follow one another closely none
// is granted for a while.
const (
	contendedAfter = 8
	contendedClose = 200 * time.Millisecond // between two recalls
	contendedFor   = 100 * time.Millisecond // since the last one
)

// contention is how leases on an inode were recalled lately.
type contention struct {
	last    time.Time
	recalls int // so many, each of them close to the one before
}

// noteRecall remembers that leases on an inode are recalled; s.mu is held.
func (s *Service) noteRecall(id layout.FileID) {
	c := s.contended[id]
	if time.Since(c.last) > contendedClose {
		c.recalls = 0
	}
	s.contended[id] = contention{time.Now(), c.recalls + 1}
}

// isContended reports whether no lease on an inode is to be granted because of what became of those before; s.mu is held.
func (s *Service) isContended(id layout.FileID) bool {
	c, ok := s.contended[id]
	return ok && c.recalls >= contendedAfter && time.Since(c.last) < contendedFor
}

// forgetRecalls drops what is too long ago to matter.
func (s *Service) forgetRecalls() {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.contended, func(_ layout.FileID, c contention) bool { return time.Since(c.last) > contendedClose })
}

// leased is an inode on which sessions have leases, or that is being changed. All of it is guarded by Service.mu.
type leased struct {
	holders  []*session // who has leases on it; which ones is in session.leases
	changing int        // changes that recall leases or are being committed; no lease is granted meanwhile
}

// lease gives a session those leases on an inode that it can have now. It comes before the reading of what the session is
// told under them: whatever changes from then on recalls them.
func (s *Service) lease(sess *session, id layout.FileID, want metarpc.Lease) metarpc.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaseUpTo(s.cfg.Leases, sess, id, want)
}

// leaseUpTo is lease if the session has leases on fewer than limit inodes; s.mu is held.
func (s *Service) leaseUpTo(limit int, sess *session, id layout.FileID, want metarpc.Lease) metarpc.Lease {
	l := s.leases[id]
	if !s.mine(id) || l != nil && l.changing > 0 || sess.leases == nil {
		return 0
	}
	// What is shown of a file changes by itself when a place is written, also one of the session's own.
	// Nor is it known yet of a file that a session is awaited for, which may be this one. In the grace period a session
	// may still tell of a place for which it had no layout yet, so that no row says it.
	f := s.files[id]
	if want&metarpc.LeaseAttrs != 0 && (s.grace || f != nil && (f.writtenByOthers(sess) || f.hasPlaces() || s.awaitsAny(f))) {
		return 0
	}
	have := sess.leases[id]
	if have&want != want && s.isContended(id) {
		return 0
	}
	if have == 0 {
		if n := len(sess.leases); n >= limit {
			s.shrink(sess)
			return 0
		}
		if l == nil {
			l = new(leased)
			s.leases[id] = l
		}
		l.holders = append(l.holders, sess)
	}
	sess.leases[id] = have | want
	return want
}

// writtenByOthers reports whether a session other than sess may write f, which may be nil; Service.mu is held.
func (f *file) writtenByOthers(sess *session) bool {
	return f != nil && slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.writer && cl.sess != sess })
}

// shrink asks a session that has as many leases as it can have to give some back, and takes what it then has too many;
// s.mu is held.
func (s *Service) shrink(sess *session) {
	if sess.shrinking {
		return
	}
	sess.shrinking = true
	s.tasks.Go(func() { // ends with the answers, the session, or s.ctx
		keep := s.cfg.Leases / 2
		err := s.callBack(s.ctx, sess, metarpc.BackLeaseShrink, &metarpc.LeaseShrinkArgs{Keep: keep})
		p := pending{s: s}
		var items []metarpc.LeaseItem
		s.mu.Lock()
		for id, lease := range sess.leases {
			if err != nil || len(sess.leases)-len(items) <= keep {
				break
			}
			p.mark(id)
			items = append(items, metarpc.LeaseItem{ID: id, Lease: lease})
		}
		s.mu.Unlock()
		s.recallFrom(s.ctx, sess, items, nil)
		p.end()
		s.mu.Lock()
		defer s.mu.Unlock()
		sess.shrinking = false
	})
}

// unlease takes leases on an inode away from a session; s.mu is held.
func (s *Service) unlease(sess *session, id layout.FileID, lease metarpc.Lease) {
	have := sess.leases[id]
	if have == 0 {
		return
	}
	if have &^= lease; have != 0 {
		sess.leases[id] = have
		return
	}
	delete(sess.leases, id)
	l := s.leases[id]
	i := slices.Index(l.holders, sess)
	last := len(l.holders) - 1
	l.holders[i], l.holders[last] = l.holders[last], nil
	l.holders = l.holders[:last]
	s.dropLeased(id, l)
}

// unleaseAll forgets all leases on an inode that is gone.
func (s *Service) unleaseAll(id layout.FileID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.leases[id]
	if l == nil {
		return
	}
	for _, sess := range l.holders {
		delete(sess.leases, id)
	}
	l.holders = nil
	s.dropLeased(id, l)
}

// dropLeased drops the record of an inode of which it says nothing any more; s.mu is held.
func (s *Service) dropLeased(id layout.FileID, l *leased) {
	if len(l.holders) == 0 && l.changing == 0 {
		delete(s.leases, id)
	}
}

// noLease forgets what a session has of an inode that does not exist.
func (s *Service) noLease(sess *session, id layout.FileID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unlease(sess, id, metarpc.LeaseAttrs|metarpc.LeaseNames)
}

// endLeases takes all leases from a session that has ended, as soon as its client relies on none of them.
func (s *Service) endLeases(sess *session, left bool) {
	for !left && sess.idle() <= s.cfg.Lease {
		if retry.Pause(s.ctx, s.cfg.Lease-sess.idle()+time.Millisecond) != nil {
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range sess.leases {
		s.unlease(sess, id, metarpc.LeaseAttrs|metarpc.LeaseNames)
	}
	sess.leases = nil
	delete(s.fading, sess)
	close(sess.expired)
}

func (s *Service) leaseReturn(_ context.Context, c *call, a *metarpc.LeaseReturnArgs) (*metarpc.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range a.IDs {
		s.unlease(c.sess, id, metarpc.LeaseAttrs|metarpc.LeaseNames)
	}
	return &metarpc.Empty{}, nil
}

// pending is a change of inodes, from the recall of leases until it is visible or given up. The zero pending with s set is
// of no inode.
type pending struct {
	s   *Service
	by  *session                   // who makes the change, and so keeps its leases; nil = none of the sessions
	ids map[layout.FileID]struct{} // marked as changing

	turns bool           // the client of by knows StatusTurnedBack
	wait  *turnback.Wait // nil, or the wait that all waiting of the change is part of
}

// waiting begins to wait for clients, with the context that it returns. The waiting may be turned back, and
// context.Cause then says so. items are what the change affects.
func (p *pending) waiting(ctx context.Context, items []metarpc.LeaseItem) (context.Context, *turnback.Wait) {
	if !p.turns {
		return ctx, nil
	}
	return p.s.waits.Begin(ctx, p.by, items)
}

// recall takes leases away from all other sessions, and sees to it that nobody is given one on these inodes until end is
// called. It returns when everybody has answered or is known not to rely on his leases any more, or ctx ends. Sessions
// in also are told of all items, whether or not they have leases.
//
// The caller must hold nothing that LayoutCommit or LayoutReturn waits for: clients may make these before they answer.
func (p *pending) recall(ctx context.Context, items []metarpc.LeaseItem, also ...*session) error {
	s := p.s
	if len(items) == 0 {
		return nil
	}
	recalls := map[*session][]metarpc.LeaseItem{}
	s.mu.Lock()
	for _, it := range items {
		hit := false
		for _, sess := range p.mark(it.ID).holders {
			if have := sess.leases[it.ID] & it.Lease; have != 0 && sess != p.by && !slices.Contains(also, sess) {
				recalls[sess] = append(recalls[sess], metarpc.LeaseItem{ID: it.ID, Lease: have | it.Lease&metarpc.LeaseData})
				hit = true
			}
		}
		if hit {
			s.noteRecall(it.ID)
		}
		for _, sess := range also {
			recalls[sess] = append(recalls[sess], it)
		}
	}
	s.mu.Unlock()
	if len(recalls) == 0 {
		return nil
	}
	ctx, wait := p.waiting(ctx, items)
	defer wait.End()
	var calls sync.WaitGroup
	for sess, items := range recalls {
		calls.Go(func() { s.recallFrom(ctx, sess, items, cmp.Or(wait, p.wait)) }) // ends with the answers, the end of the session's lease, or ctx
	}
	calls.Wait()
	return context.Cause(ctx)
}

// mark has no leases on an inode granted until end; Service.mu is held.
func (p *pending) mark(id layout.FileID) *leased {
	l := p.s.leases[id]
	if l == nil {
		l = new(leased)
		p.s.leases[id] = l
	}
	if p.ids == nil {
		p.ids = map[layout.FileID]struct{}{}
	}
	if _, ok := p.ids[id]; !ok {
		l.changing++
		p.ids[id] = struct{}{}
	}
	return l
}

// recallFrom takes leases away from one session, for a change that waits, or for none. What stands in the way of it in
// the kernel of the client is turned back.
func (s *Service) recallFrom(ctx context.Context, sess *session, items []metarpc.LeaseItem, wait *turnback.Wait) {
	for part := range slices.Chunk(items, metarpc.MaxBatch) {
		cb := newCallback(metarpc.BackLeaseRecall, &metarpc.LeaseRecallArgs{Items: part})
		cb.stuck = func() { s.waits.TurnBack(sess, part, wait) }
		err := s.await(ctx, sess, cb, s.cfg.Lease)
		switch {
		case errors.Is(err, errEnded):
			// Its client may not have noticed yet.
			select {
			case <-sess.expired:
			case <-ctx.Done():
			}
			return
		case err != nil:
			return
		}
		s.mu.Lock()
		for _, it := range part {
			s.unlease(sess, it.ID, it.Lease)
		}
		s.mu.Unlock()
	}
}

// end says that the change is visible, or will not be.
func (p *pending) end() {
	if len(p.ids) == 0 {
		return
	}
	s := p.s
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range p.ids {
		l := s.leases[id]
		l.changing--
		s.dropLeased(id, l)
	}
	p.ids = nil
}

// sizeQuery is a question to a session that has not been sent yet, or is not answered.
type sizeQuery struct {
	ids  map[layout.FileID]struct{}
	done chan struct{} // closed when the answer is there, or never will be
}

// askWriters has the sessions that may be writing files report how far they have got, except sess, which asks, and those
// that write only where they were told to. With places it also asks who has some, be it sess, which of them are
// written. What a session has to say that is not in touch is found out by makeSure.
func (s *Service) askWriters(ctx context.Context, sess *session, places bool, ids ...layout.FileID) error {
	var queries []*sizeQuery
	s.mu.Lock()
	for _, id := range ids {
		f := s.files[id]
		if f == nil {
			continue
		}
		for _, cl := range f.claims {
			writes := cl.writer && !cl.appends && !cl.unsure && cl.sess != sess
			if !writes && !(places && len(cl.places) > 0) || !cl.sess.inTouch() {
				continue
			}
			q := s.query(cl.sess)
			q.ids[id] = struct{}{}
			if !slices.Contains(queries, q) {
				queries = append(queries, q)
			}
		}
	}
	s.mu.Unlock()
	for _, q := range queries {
		select {
		case <-q.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// inTouch reports whether the session's client knows this instance.
func (sess *session) inTouch() bool {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	return sess.returned && !sess.ended
}

// query returns the next question to a session, which has not been sent; s.mu is held. A session is asked one question at
// a time, so that it does not matter how many look at its files.
func (s *Service) query(sess *session) *sizeQuery {
	if sess.query == nil {
		sess.query = &sizeQuery{ids: map[layout.FileID]struct{}{}, done: make(chan struct{})}
		if !sess.querying {
			sess.querying = true
			s.tasks.Go(func() { s.sendQueries(sess) }) // ends when there are no more questions
		}
	}
	return sess.query
}

func (s *Service) sendQueries(sess *session) {
	for {
		s.mu.Lock()
		q := sess.query
		sess.query = nil
		sess.querying = q != nil
		s.mu.Unlock()
		if q == nil {
			return
		}
		for ids := range slices.Chunk(slices.Collect(maps.Keys(q.ids)), metarpc.MaxBatch) {
			if s.callBack(s.ctx, sess, metarpc.BackSizeQuery, &metarpc.SizeQueryArgs{IDs: ids}) != nil {
				break
			}
		}
		close(q.done)
	}
}

// show is what a session is told of an inode, and what of it it may keep.
func (s *Service) show(ctx context.Context, sess *session, id layout.FileID) (metarpc.Attr, metarpc.Lease, error) {
	lease := s.lease(sess, id, metarpc.LeaseAttrs)
	if err := s.settleSize(ctx, sess, id); err != nil {
		return metarpc.Attr{}, 0, err
	}
	return s.showNow(ctx, sess, id, lease)
}

// showReclaimed is show for a session that opens a file again after a restart. It waits for no other session: that may
// need a layout to answer, and layouts are granted when all sessions have reclaimed. The file may be longer than is told;
// then there is no lease.
func (s *Service) showReclaimed(ctx context.Context, sess *session, id layout.FileID) (metarpc.Attr, metarpc.Lease, error) {
	return s.showNow(ctx, sess, id, s.lease(sess, id, metarpc.LeaseAttrs))
}

func (s *Service) showNow(ctx context.Context, sess *session, id layout.FileID, lease metarpc.Lease) (metarpc.Attr, metarpc.Lease, error) {
	attr, err := s.attributes(ctx, sess, id)
	if errors.Is(err, errStale) {
		s.noLease(sess, id)
	}
	return attr, lease, err
}

// settleSize waits until it can be told how long files are: writers have said it, appends that others follow on are
// written, and a size that others have been told to expect is set.
func (s *Service) settleSize(ctx context.Context, sess *session, ids ...layout.FileID) error {
	if err := s.awaitTold(ctx, ids...); err != nil {
		return err
	}
	err := s.settlePlacesOf(ctx, ids, func(ctx context.Context) error { return s.askWriters(ctx, sess, true, ids...) })
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		f := s.files[id]
		if f == nil || !f.cut.announced() {
			continue
		}
		for f.cut.announced() {
			if err := s.wait(ctx, f); err != nil {
				return err
			}
		}
		s.changedFile(f)
	}
	return nil
}

// withoutLease is a result as it goes into the catalog: when another instance gives it again, no lease is behind it, and a layout
// may have been recalled.
func withoutLease(result any) any {
	switch r := result.(type) {
	case *metarpc.AttrResult:
		if r.Lease != 0 {
			bare := *r
			bare.Lease = 0
			return &bare
		}
	case *metarpc.CreateResult:
		if r.Lease != 0 || len(r.Segments) > 0 {
			bare := *r
			bare.Lease, bare.Segments = 0, nil
			return &bare
		}
	}
	return result
}
