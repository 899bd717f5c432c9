package meta

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// atOnce is how many files are worked on at a time in one piece of background work.
	atOnce = 64
	// fenceNotice is how long data servers may take to confirm before it is said that files wait for them.
	fenceNotice = 5 * time.Second
)

// each calls f for all ids, several at once, and returns when all calls have.
func each(ids []layout.FileID, f func(id layout.FileID)) {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(atOnce, len(ids)) {
		workers.Go(func() { // takes the next id until there are none
			for i := next.Add(1); i <= int64(len(ids)); i = next.Add(1) {
				f(ids[i-1])
			}
		})
	}
	workers.Wait()
}

// cleanUp deals with what an ended session leaves behind, until it succeeds or the service stops; then a later instance
// does it.
func (s *Service) cleanUp(sess *session) {
	sess.running.Wait() // their context has ended
	what := fmt.Sprintf("clean-up of session %v", sess)
	row := schema.Session{Client: sess.client, Created: sess.created, Ended: true, Shard: s.cfg.Shard}
	err := retry.Persist(s.ctx, s.log, what, func() error {
		var b catalog.Batch
		b.Put(schema.SessionKey(sess.id), schema.Encode(&row))
		return s.engine.Commit(s.ctx, &b)
	})
	if err != nil {
		return
	}
	sess.mu.Lock()
	left := sess.left
	sess.mu.Unlock()
	s.mu.Lock()
	if !left {
		sess.doubt()
	}
	ids := slices.Collect(maps.Keys(sess.claims)) // nobody adds claims to an ended session
	s.mu.Unlock()
	// Files on namespaces do not hold up the others.
	var plain, barred []layout.FileID
	for _, id := range ids {
		if s.mustBar(sess, id) {
			barred = append(barred, id)
		} else {
			plain = append(plain, id)
		}
	}
	var parts sync.WaitGroup
	parts.Go(func() { // ends when the caches are gone, or with s.ctx
		retry.Persist(s.ctx, s.log, fmt.Sprintf("%s: caches that it has not filled", what), func() error { return s.dropFillings(sess.id) })
	})
	parts.Go(func() { s.leave(sess, what, plain) }) // ends when nothing of the session is left there, or with s.ctx
	parts.Go(func() {                               // ends as the one above
		confirmed := s.awaitConfirmation(sess)
		each(barred, func(id layout.FileID) {
			err := retry.Persist(s.ctx, s.log, fmt.Sprintf("%s: fence it on the namespaces of inode %d", what, id), func() error { return s.bar(sess, id) })
			if err == nil { // other files may be on namespaces that are away
				s.leave(sess, what, []layout.FileID{id})
			}
		})
		confirmed()
	})
	parts.Wait()
	retry.Persist(s.ctx, s.log, what, func() error {
		var replies [][]byte
		for slot := range len(sess.slots) {
			replies = append(replies, schema.ReplyKey(sess.id, slot))
		}
		for part := range slices.Chunk(replies, s.engine.Caps().MaxKeys/2) {
			if err := s.engine.Commit(s.ctx, &catalog.Batch{Deletes: part}); err != nil {
				return err
			}
		}
		if sess.unsure { // the row keeps what may still come from being a session; the next instance deletes it
			return nil
		}
		var b catalog.Batch
		b.Delete(schema.SessionKey(sess.id))
		return s.engine.Commit(s.ctx, &b)
	})
	if s.ctx.Err() == nil {
		s.log.Info("nothing is left of the session", "session", sess, "files", len(ids))
	}
}

// leave is cleanUp for such files, on whose namespaces the session is barred.
func (s *Service) leave(sess *session, what string, ids []layout.FileID) {
	var written []layout.FileID
	s.mu.Lock()
	for _, id := range ids {
		if cl := sess.claims[id]; cl != nil && (cl.writer || cl.report != (report{})) {
			written = append(written, id)
		}
	}
	s.mu.Unlock()
	each(ids, func(id layout.FileID) {
		retry.Persist(s.ctx, s.log, fmt.Sprintf("%s: close inode %d", what, id), func() error { return s.closeFile(s.ctx, sess, id) })
		// Others get the locks of a file that it has written only when what it has written is there for them to read.
		if !slices.Contains(written, id) {
			s.dropLocks(sess, id)
		}
	})
	confirmed := s.awaitConfirmation(sess)
	each(written, func(id layout.FileID) {
		retry.Persist(s.ctx, s.log, fmt.Sprintf("%s: fence inode %d", what, id), func() error { return s.fence(sess, id) })
	})
	confirmed()
	each(written, func(id layout.FileID) {
		retry.Persist(s.ctx, s.log, fmt.Sprintf("%s: inode %d", what, id), func() error { return s.release(sess, id) })
	})
}

// awaitConfirmation says it if data servers take long to fence a session, and when they have done so: then confirmed is called.
func (s *Service) awaitConfirmation(sess *session) (confirmed func()) {
	late := time.AfterFunc(fenceNotice, func() {
		s.log.Warn("data servers have not yet confirmed that the session can no longer write; until then nobody else can write its files",
			"session", sess, "host", sess.client.Host)
	})
	return func() {
		if !late.Stop() && s.ctx.Err() == nil {
			s.log.Info("the session can no longer write", "session", sess)
		}
	}
}

// mustBar reports whether a session that is over may still read or write namespaces that a file is on.
func (s *Service) mustBar(sess *session, id layout.FileID) bool {
	s.mu.Lock()
	cl := sess.claims[id]
	may := cl != nil && cl.unbarred
	s.mu.Unlock()
	if !may {
		return false
	}
	if on, err := s.onNamespaces(s.ctx, id); on || err != nil {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	cl.unbarred = false
	s.changedFile(cl.file)
	return false
}

// bar returns when nothing that a session which was ended without its doing has sent to the namespaces of a file is carried out any more.
func (s *Service) bar(sess *session, id layout.FileID) error {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.mu.Lock()
	cl := sess.claims[id]
	if cl == nil || !cl.unbarred {
		s.mu.Unlock()
		return nil
	}
	cl.unfence = cancel
	s.mu.Unlock()
	// Until then its client may take the session for alive, send what it has not sent yet, and register where it has not registered.
	err := sess.awaitExpired(ctx)
	var l schema.Layout
	if err == nil {
		_, err = schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
	}
	if err == nil && s.cfg.Files.OnNamespaces(l) {
		err = s.cfg.Files.FenceSession(ctx, l, sess.id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	cl.unfence = nil
	if err != nil && cl.unbarred { // else the file is gone
		return err
	}
	cl.unbarred = false
	s.changedFile(cl.file)
	return nil
}

// awaitExpired waits until the client of a session that is over knows that, by its own clock at the latest.
func (sess *session) awaitExpired(ctx context.Context) error {
	select {
	case <-sess.expired:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// onNamespaces reports whether a file has data on a namespace.
func (s *Service) onNamespaces(ctx context.Context, id layout.FileID) (bool, error) {
	var l schema.Layout
	_, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
	return err == nil && s.cfg.Files.OnNamespaces(l), err
}

// awaitBarred waits until all sessions that are over are barred from the namespaces of a file. A client that would wait long is told to ask
// again.
func (s *Service) awaitBarred(ctx context.Context, id layout.FileID) error {
	if err := s.awaitQuiet(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, layoutWait, refusef(metarpc.StatusGrace, "a client that had inode %d is being fenced", id))
	defer cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for f.unbarred() {
		if err := s.wait(ctx, f); err != nil {
			return context.Cause(ctx)
		}
	}
	s.changedFile(f)
	return nil
}

// fence makes the data servers refuse what a session still writes to a file that was ended without its doing. The others
// who write the file need new layouts then. They could also find out by being refused.
func (s *Service) fence(sess *session, id layout.FileID) error {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.mu.Lock()
	cl := sess.claims[id]
	if cl == nil || !cl.unfenced {
		s.mu.Unlock()
		return nil
	}
	cl.unfence = cancel
	s.mu.Unlock()
	// It may have written to a cache what is nowhere else, or the other way round; and copies may differ in what was being written, and the
	// kernel of a reader would go on with the wrong one.
	err := s.awaitNoCaches(ctx, id, lostWriter)
	var thaw func()
	if err == nil {
		thaw, err = s.awaitCopiesUnpinned(ctx, id)
	}
	if err == nil {
		err = s.cfg.Files.Fence(ctx, id)
		thaw()
	}
	if held := heldCopies(err); held != nil {
		err = s.replaceHeld(ctx, cl.file, held, err)
	}
	if err != nil {
		if _, _, gone := s.inode(s.ctx, id); errors.Is(gone, errStale) {
			err = nil
		}
	}
	if err == nil {
		err = s.tellOfCopies(ctx, id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	cl.unfence = nil
	if err != nil {
		return err
	}
	cl.unfenced = false
	cl.places = nil // those that are not written read as zeros, if anything lies behind them
	for _, other := range cl.file.claims {
		if other.writer && s.sessions[other.sess.id] != nil {
			s.tasks.Go(func() { // ends with the answer, the session, its lease, or s.ctx
				s.callBack(s.ctx, other.sess, metarpc.BackLayoutRecall, &metarpc.LayoutRecallArgs{ID: id, Len: layout.ToEOF})
			})
		}
	}
	s.changedFile(cl.file)
	return nil
}

// release makes sure of what a session has written to a file, so that nothing is left of the session there.
func (s *Service) release(sess *session, id layout.FileID) error {
	s.mu.Lock()
	cl := sess.claims[id]
	written := cl != nil && (cl.writer || cl.report != report{})
	s.mu.Unlock()
	if !written {
		s.dropLocks(sess, id)
		return nil
	}
	f, err := s.beginSizing(s.ctx, id)
	if err != nil {
		return err
	}
	defer s.endSizing(f)
	err = s.makeStable(f, sess)
	if err == nil {
		s.dropLocks(sess, id)
	}
	return err
}

// makeStable makes what a session wrote stable, and its size and times durable. The caller has the file's sizing, so
// no truncation comes in between.
func (s *Service) makeStable(f *file, sess *session) error {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.mu.Lock()
	f.stop = cancel
	s.mu.Unlock()
	end, err := s.sync(ctx, f.id)
	row, _, gone := s.inode(s.ctx, f.id)
	if err == nil {
		err = gone
	}
	if err != nil && !errors.Is(gone, errStale) {
		return err
	}
	s.found(f, sess, end, row.Size)
	_, err = change(s.ctx, s, nil, func(t *tx) (*struct{}, error) {
		row, raw, err := s.regular(s.ctx, f.id)
		t.onOutcome(func(committed bool) {
			if committed {
				s.mu.Lock()
				defer s.mu.Unlock()
				if cl := f.claimOf(sess); cl != nil {
					cl.writer, cl.awaited, cl.unsure, cl.report, cl.ranges, cl.shares = false, false, false, report{}, nil, nil
				}
				f.moves++
				s.changedFile(f)
			}
		})
		t.Delete(schema.WriterKey(f.id, sess.id))
		if errors.Is(err, errStale) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		var said report
		if cl := f.claimOf(sess); cl != nil {
			said = cl.report
		}
		s.mu.Unlock()
		before := row
		applyReport(&row, said, now())
		t.Recharge(&before, &row)
		if row != before {
			t.affects(f.id, metarpc.LeaseAttrs)
		}
		row.Used = 0 // it may have written what it has not reported. Nobody has a lease by which it could know more
		if row != before {
			t.GuardEqual(schema.InodeKey(f.id), raw)
			t.Put(schema.InodeKey(f.id), schema.Encode(&row))
		}
		return nil, nil
	})
	return err
}

// found takes what the data files tell of what a session that is over has written for its report, so that others need not
// wait until that is durable, for which leases may have to run out.
func (s *Service) found(f *file, sess *session, end, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cl := f.claimOf(sess)
	if cl == nil {
		return
	}
	if max(end, cl.end) > size && (end > cl.end || cl.mtime == 0) {
		cl.mtime = max(cl.mtime, now()) // it died before it said when it wrote
	}
	if end > size {
		cl.end = max(end, cl.end)
	}
	cl.unsure = false
	f.raise(cl.end)
	s.changedFile(f)
}

// sync makes what is in a file's data files stable and returns where it ends.
func (s *Service) sync(ctx context.Context, id layout.FileID) (end int64, err error) {
	var l schema.Layout
	raw, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
	if err != nil || raw == nil {
		return 0, err
	}
	return s.cfg.Files.Sync(ctx, l)
}

// makeSure finds out how long a file is whose writers have not yet said it to this instance. What they said to an
// earlier one is lost, but others may have seen it, so it must not seem shorter now: its data files tell. If they are
// out of reach for a lease, what is durable has to do. It is called when no session is awaited.
func (s *Service) makeSure(ctx context.Context, id layout.FileID) error {
	waiting, cancel := context.WithTimeout(ctx, s.cfg.Lease)
	defer cancel()
	err := s.awaitAppendersFenced(waiting, id)
	var f *file
	if err == nil {
		f, err = s.beginUnsure(waiting, id)
	}
	end := int64(0)
	if err == nil {
		if f == nil {
			return nil
		}
		defer s.endSizing(f)
		s.mu.Lock()
		f.stop = cancel
		s.mu.Unlock()
		end, err = s.sync(waiting, id)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	row, _, gone := s.inode(ctx, id)
	if gone == nil && err != nil {
		s.log.Warn("size not found out, the last durable one is shown", "inode", id, "error", err)
	}
	if end <= row.Size {
		end = 0 // nothing that its writer would have to report
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f = s.file(id) // that whose sizing could not be had, if so
	for _, cl := range f.claims {
		if cl.unsure && !s.awaits(cl) {
			cl.unsure = false
			cl.end = max(cl.end, end)
		}
	}
	f.raise(end)
	s.changedFile(f)
	return nil
}

// awaits reports whether a session that has not come back yet, or only begun to, has to say before others are told
// how long the file is: what it has appended, or written on namespaces, and where else it may be appending.
// Service.mu is held.
func (s *Service) awaits(cl *claim) bool {
	return cl.awaited && cl.unsure && !cl.sess.reclaimed && s.sessions[cl.sess.id] == cl.sess
}

// awaitsAny reports whether there is such a session; Service.mu is held.
func (s *Service) awaitsAny(f *file) bool { return slices.ContainsFunc(f.claims, s.awaits) }

// awaitTold waits until no session is awaited for any of the files. A client that would wait long is told to ask
// again.
func (s *Service) awaitTold(ctx context.Context, ids ...layout.FileID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	awaited := func(id layout.FileID) bool { return s.files[id] != nil && s.awaitsAny(s.files[id]) }
	if !slices.ContainsFunc(ids, awaited) {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, graceWait, refusef(metarpc.StatusGrace, "clients may still come back that were writing"))
	defer cancel()
	for _, id := range ids {
		for awaited(id) {
			if err := s.wait(ctx, s.files[id]); err != nil {
				return context.Cause(ctx)
			}
		}
		if f := s.files[id]; f != nil {
			s.changedFile(f) // there may be nothing in it
		}
	}
	return nil
}

// awaitAppendersFenced waits until no append that an ended session had under way gets to a file any more, if the data
// files are to tell where that ends.
func (s *Service) awaitAppendersFenced(ctx context.Context, id layout.FileID) error {
	if on, err := s.onNamespaces(ctx, id); on || err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.awaited && cl.unsure && cl.unfenced }) {
		if err := s.wait(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// beginUnsure is beginSizing for as long as the file may be longer than is known. If somebody else has found out it
// returns nil.
func (s *Service) beginUnsure(ctx context.Context, id layout.FileID) (*file, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for f.unsure() && f.sizing {
		f.want()
		if err := s.wait(ctx, f); err != nil {
			return nil, err
		}
	}
	if !f.unsure() {
		s.changedFile(f) // there may be nothing in it
		return nil, nil
	}
	f.sizing = true
	return f, nil
}

// load reads what earlier instances left: sessions that may come back, and work that is not done. What belongs to other shards is passed over.
func (s *Service) load(ctx context.Context) error {
	known := func(id metarpc.SessionID, row schema.Session) *session {
		sess := s.newSession(id, row)
		sess.known, sess.ended = true, row.Ended
		if row.Ended {
			sess.cancel()
		}
		s.sessions[id] = sess
		return sess
	}
	// What belongs to a session is deleted before the session. Should there be a row without one all the same, it is
	// cleaned up as if the session had just ended.
	owner := func(id metarpc.SessionID, key []byte) *session {
		if sess := s.sessions[id]; sess != nil {
			return sess
		}
		s.log.Warn("the catalog has a row of a session that it does not have", "key", fmt.Sprintf("%q", key))
		return known(id, schema.Session{Ended: true})
	}
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixSession, 1+16) {
		if err != nil {
			return err
		}
		var row schema.Session
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return err
		}
		if row.Shard == s.cfg.Shard {
			known([16]byte(kv.Key[1:]), row)
		}
	}
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixReply, 1+16+2) {
		if err != nil {
			return err
		}
		if s.shards > 1 && s.sessions[[16]byte(kv.Key[1:17])] == nil {
			continue // of another shard, whose sessions come and go meanwhile
		}
		var row schema.Reply
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return err
		}
		sess := owner([16]byte(kv.Key[1:17]), kv.Key)
		number := int(binary.BigEndian.Uint16(kv.Key[17:]))
		for number >= len(sess.slots) { // the earlier instance had more
			sess.slots = append(sess.slots, slot{})
		}
		sess.slots[number] = slot{sequence: row.Sequence, frame: row.Frame, restored: true, row: bytes.Clone(kv.Value)}
	}
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixWriter, 1+8+16) {
		if err != nil {
			return err
		}
		if !s.mine(schema.IDOf(kv.Key)) {
			continue
		}
		var row schema.Writer
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return err
		}
		sess := owner([16]byte(kv.Key[9:]), kv.Key)
		cl := s.file(schema.IDOf(kv.Key)).claim(sess)
		cl.writer, cl.unsure, cl.unfenced = true, true, sess.ended // perhaps by its client; to fence it then is needless
		cl.unbarred, cl.crowded, cl.awaited = sess.ended, true, row.Awaited
		cl.ranges = []layout.Range{{Len: layout.ToEOF}} // whichever they are
	}
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixOrphan, 1+8) {
		if err != nil {
			return err
		}
		if id := schema.IDOf(kv.Key); s.mine(id) {
			s.file(id).orphan = true
		}
	}
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixMove, 1+8) {
		if err != nil {
			return err
		}
		id := schema.IDOf(kv.Key)
		if !s.mine(id) {
			continue
		}
		var row schema.Move
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return err
		}
		s.moves[id] = newMove(id, row.Device)
	}
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixTruncate, 1+8) {
		if err != nil {
			return err
		}
		if !s.mine(schema.IDOf(kv.Key)) {
			continue
		}
		var row schema.Truncate
		if err := schema.DecodeRow(kv.Key, kv.Value, &row); err != nil {
			return err
		}
		f := s.file(schema.IDOf(kv.Key))
		f.sizing, f.cut = true, &cut{size: row.Size, from: row.Size, phase: cutCutting}
		on, err := s.onNamespaces(ctx, f.id)
		if err != nil {
			return err
		}
		if on {
			f.cut.from = 0
		}
	}
	return s.loadCaches(ctx)
}

// resume starts the work that earlier instances left, and the grace period if a session may come back.
func (s *Service) resume() {
	var ended []*session
	cuts, orphans := 0, 0
	s.resumeCaches()
	s.mu.Lock()
	for id, sess := range s.sessions {
		if sess.ended {
			ended = append(ended, sess)
			delete(s.sessions, id)
			s.fading[sess] = struct{}{}
		}
	}
	known := len(s.sessions)
	for _, f := range s.files {
		if f.cut != nil {
			cuts++
			s.tasks.Go(func() { s.cutData(f) }) // owns the file's sizing; ends when the data files are cut, or with s.ctx
		}
		if f.orphan {
			orphans++
		}
	}
	for _, m := range s.moves {
		s.tasks.Go(func() { s.moveFile(m) }) // ends when the data is there, or cannot be moved, or with s.ctx
	}
	moves := len(s.moves)
	s.quiet = s.graceOver
	if len(ended) > 0 {
		s.quiet = make(chan struct{})
	}
	s.grace = true
	s.mu.Unlock()
	s.log.Info("metadata service starts", "volume", fmt.Sprintf("%x", s.volume.ID), "sessions", known,
		"ended sessions", len(ended), "truncations", cuts, "files without names", orphans, "moves", moves, "grace", known > 0)
	if known == 0 {
		s.endGrace()
	}
	for _, sess := range ended {
		s.tasks.Go(func() { s.endLeases(sess, false) }) // ends when its client cannot rely on anything, or with s.ctx
		s.tasks.Go(func() { s.cleanUp(sess) })          // ends when nothing of the session is left, or with s.ctx
	}
	if len(ended) > 0 {
		s.tasks.Go(func() { s.awaitStrangers(ended) }) // ends when none of them relies on anything, or with s.ctx
	}
}

// awaitStrangers ends what s.quiet stands for: that somebody may read or write namespaces of whom this instance does not know where. These are clients
// that have not come back yet, and those whose sessions had ended: they notice when their leases are over.
func (s *Service) awaitStrangers(ended []*session) {
	for _, sess := range ended {
		if s.awaitEnd(sess.expired) != nil {
			return
		}
	}
	if s.awaitEnd(s.graceOver) == nil {
		close(s.quiet)
	}
}

// lostWriter is what waits for pins when a session is over that may have written the file.
const lostWriter = "the end of a client that was writing it"

// awaitCopiesUnpinned is awaitUnpinned for a file with several copies.
func (s *Service) awaitCopiesUnpinned(ctx context.Context, id layout.FileID) (thaw func(), err error) {
	var l schema.Layout
	if _, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l); err != nil {
		return nil, err
	}
	if len(l.Mirrors) < 2 {
		return func() {}, nil
	}
	select {
	case <-s.graceOver: // what was pinned before a restart is known now
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.awaitUnpinned(ctx, id, lostWriter)
}
