package meta

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
)

const (
	// resilverLook is how often it is looked for copies to make that could not be made before.
	resilverLook = 10 * time.Second
	// gateBytes is how much of a file is closed to writers at a time; less if copying is slowed down, so that it takes gateTime.
	gateBytes = 64 << 20
	minGate   = 1 << 20
	gateTime  = time.Second / 4
	// gatePatience is how long a range is closed at most. Writers wait for that.
	gatePatience = 30 * time.Second
)

// resilver is what makes copies of mirrored data anew, see the package comment.
type resilver struct {
	kick   chan struct{} // has a token when there is something to do
	copied atomic.Int64  // bytes since the start
	files  atomic.Int64  // that have got copies since the start

	// Guarded by Service.mu:
	next    time.Time                 // when the next bytes may be copied
	fillers map[layout.FileID]*filler // who copies data of a file

	// Of the worker alone:
	since       time.Time // when there began to be files with copies to be made; zero if there are none
	before      int64     // copied, then
	filesBefore int64     // files, then
}

// filler is somebody who copies data of a file; there is one for a file at a time.
type filler struct {
	urgent bool // others wait for the file
	stop   context.CancelFunc
	ended  chan struct{}
}

// errFilled tells that data of a file is being copied.
var errFilled = errors.New("its data is being copied")

// beginFill makes the caller the one who copies data of a file until he calls end. If there is one already the error is errFilled;
// who is urgent ends what the other does, or, if that is urgent as well, waits for it.
func (s *Service) beginFill(ctx context.Context, id layout.FileID, urgent bool) (filling context.Context, end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		other := s.resilver.fillers[id]
		if other == nil {
			break
		}
		if !urgent {
			return nil, nil, errFilled
		}
		if !other.urgent {
			other.stop()
		}
		s.mu.Unlock()
		select {
		case <-other.ended:
		case <-ctx.Done():
			err = ctx.Err()
		}
		s.mu.Lock()
		if err != nil {
			return nil, nil, err
		}
	}
	filling, stop := context.WithCancel(ctx)
	fl := &filler{urgent: urgent, stop: stop, ended: make(chan struct{})}
	s.resilver.fillers[id] = fl
	return filling, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		stop()
		delete(s.resilver.fillers, id)
		close(fl.ended)
	}, nil
}

// resilverSoon wakes the worker.
func (s *Service) resilverSoon() {
	select {
	case s.resilver.kick <- struct{}{}:
	default:
	}
}

// resilverLoop makes copies as long as there is something to make. It ends with s.ctx.
func (s *Service) resilverLoop() {
	if s.awaitEnd(s.graceOver) != nil {
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-s.resilver.kick:
		case <-timer.C:
		case <-s.ctx.Done():
			return
		}
		s.resilverAll()
		timer.Reset(resilverLook)
	}
}

// awaitEnd waits until a channel is closed or the service stops.
func (s *Service) awaitEnd(ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// resilverAll goes once through all files that have copies to be made.
func (s *Service) resilverAll() {
	r := &s.resilver
	defer func() {
		if s.ctx.Err() == nil && !r.since.IsZero() && s.staleFiles(s.ctx) == 0 {
			s.log.Info("all copies of mirrored files are good again", "after", time.Since(r.since).Round(time.Millisecond),
				"files", r.files.Load()-r.filesBefore, "bytes", r.copied.Load()-r.before)
			r.since = time.Time{}
		}
	}()
	s.dropDrained()
	s.moveAll()
	from, to := schema.Of(schema.PrefixFill)
	for s.ctx.Err() == nil {
		var ids []layout.FileID
		listed := 0
		for kv, err := range s.engine.Scan(s.ctx, from, to, catalog.ScanOptions{Limit: 256, KeysOnly: true}) {
			if err != nil {
				if s.ctx.Err() == nil {
					s.log.Warn("copies to be made cannot be listed", "error", err)
				}
				return
			}
			listed++
			if id := schema.IDOf(kv.Key); s.mine(id) && !s.beingMoved(id) { // or whoever moves it sees to all of its copies
				ids = append(ids, id)
			}
			from = catalog.After(kv.Key)
		}
		if listed == 0 {
			return
		}
		if len(ids) == 0 {
			continue
		}
		if r.since.IsZero() {
			r.since, r.filesBefore, r.before = time.Now(), r.files.Load(), r.copied.Load()
			s.log.Warn("copies of mirrored files are out of date, and are made anew")
		}
		for _, id := range ids {
			if err := s.fillFile(s.ctx, id); err != nil && !errors.Is(err, errFilled) && s.ctx.Err() == nil {
				s.log.Warn("new copies cannot be made now", "inode", id, "error", err)
			}
		}
	}
}

// moveAll moves data files away from devices that are drained.
func (s *Service) moveAll() {
	for from := layout.FileID(0); s.ctx.Err() == nil; {
		ids, err := s.cfg.Files.Moving(s.ctx, from, 256)
		if err != nil && s.ctx.Err() == nil {
			s.log.Warn("files on data servers that are drained cannot be listed", "error", err)
		}
		if err != nil || len(ids) == 0 {
			return
		}
		for _, id := range ids {
			from = id
			if !s.mine(id) {
				continue
			}
			if err := s.fillFile(s.ctx, id); err != nil && !errors.Is(err, errFilled) && s.ctx.Err() == nil {
				s.log.Warn("data files cannot be moved now", "inode", id, "error", err)
			}
		}
	}
}

// fillFile makes new copies of a file for those that are stale, as far as there are data servers for them, and moves what is to move. The
// error is errFilled if somebody is at it already.
func (s *Service) fillFile(ctx context.Context, id layout.FileID) error {
	ctx, end, err := s.beginFill(ctx, id, false)
	if err != nil {
		return err
	}
	defer end()
	// Writers would be troubled for nothing.
	pinned, thaw := s.freezePins(id)
	thaw = sync.OnceFunc(thaw)
	defer thaw()
	if can, err := s.cfg.Files.Fillable(ctx, id, pinned); !can {
		if len(pinned) > 0 && err == nil {
			err = s.heldUpMove(ctx, id)
		}
		return err
	}
	// Whoever still takes a copy for good must not find another file in its place.
	if err := s.tellOfCopies(ctx, id); err != nil {
		return err
	}
	var row schema.Layout
	var done int64
	err = s.gated(ctx, id, layout.Range{Len: layout.ToEOF}, func(ctx context.Context) (err error) {
		row, done, err = s.cfg.Files.StartFill(ctx, id, pinned)
		return err
	})
	thaw() // while data is moved nothing of the file is pinned
	filling := row.Copies(layout.CopyFilling)
	if err != nil || len(filling) == 0 && !row.Moving {
		return err
	}
	size := int64(0)
	if ino, _, err := s.inode(ctx, id); err == nil {
		size = ino.Size
	}
	for end := int64(layout.ToEOF); len(filling) > 0 && done < end; {
		n := s.gateSize()
		s.noteMove(id, done, max(size, done))
		err := s.gated(ctx, id, layout.Range{Off: done, Len: n}, func(ctx context.Context) (err error) {
			end, err = s.cfg.Files.Fill(ctx, id, row, done, n, s.copiedOf(id))
			return err
		})
		if err != nil {
			if ctx.Err() == nil {
				// Which of the data servers is to blame is not known. Another try begins with other data files.
				_, e := s.giveUp(ctx, id, filling)
				err = errors.Join(err, e)
			}
			return err
		}
		done += n
		size = max(size, end)
	}
	complete, err := s.cfg.Files.EndFill(ctx, id, row)
	if err != nil {
		return err
	}
	if row.Moving {
		err := s.gated(ctx, id, layout.Range{Len: layout.ToEOF}, func(ctx context.Context) error {
			return s.settleMove(ctx, id)
		})
		if err != nil {
			return err
		}
	}
	s.resilver.files.Add(1)
	s.log.Debug("new copies of a file are full", "inode", id, "copies", len(filling), "all", complete)
	// Readers may use them. They need not: so nobody is waited for.
	s.tasks.Go(func() { // ends with the answers, or the leases, or s.ctx
		s.tell(s.ctx, &metarpc.CopiesStaleArgs{ID: id})
	})
	return nil
}

// heldUpMove says so if data of a file is not moved because of what is pinned.
func (s *Service) heldUpMove(ctx context.Context, id layout.FileID) error {
	can, err := s.cfg.Files.Fillable(ctx, id, nil)
	if !can {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.files[id]; f != nil && len(f.pinned()) > 0 {
		s.holdUp(f, "the moving of its data")
	}
	return nil
}

// gateSize is how many bytes are copied while their range is closed.
func (s *Service) gateSize() int64 {
	if s.cfg.Resilver == 0 {
		return gateBytes
	}
	return max(minGate, min(gateBytes, int64(float64(s.cfg.Resilver)*gateTime.Seconds())))
}

// pace waits until n more bytes may be copied. The columns of a file are copied side by side.
func (s *Service) pace(ctx context.Context, n int) error {
	s.resilver.copied.Add(int64(n))
	if s.cfg.Resilver == 0 {
		return ctx.Err()
	}
	s.mu.Lock()
	at := time.Now()
	if s.resilver.next.Before(at) {
		s.resilver.next = at
	}
	wait := s.resilver.next.Sub(at)
	s.resilver.next = s.resilver.next.Add(time.Duration(float64(n) / float64(s.cfg.Resilver) * float64(time.Second)))
	s.mu.Unlock()
	if wait == 0 {
		return ctx.Err()
	}
	return pause(ctx, wait)
}

// unpaced is pace for what others wait for.
func (s *Service) unpaced(ctx context.Context, n int) error {
	s.resilver.copied.Add(int64(n))
	return ctx.Err()
}

// gated calls f while nobody can write to a range of the file or change its size: layouts for writing there are taken back,
// sessions that were lost are fenced, and no new ones are granted until f has returned.
func (s *Service) gated(ctx context.Context, id layout.FileID, r layout.Range, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, gatePatience)
	defer cancel()
	file, err := s.beginSizing(ctx, id)
	if err != nil {
		return err
	}
	defer s.endSizing(file)
	s.mu.Lock()
	file.stop = cancel
	file.gate = r
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		file.gate = layout.Range{}
		file.gates++
	}()
	if err := s.recallRange(ctx, file, r, others(nil)); err != nil {
		return err
	}
	if err := s.settleLost(ctx, file); err != nil {
		return err
	}
	return f(ctx)
}

// settleLost is makeStable for what lost sessions have said of a file on namespaces: up to where the inode row says it has data, it is copied.
// The caller has the file's sizing.
func (s *Service) settleLost(ctx context.Context, f *file) error {
	s.mu.Lock()
	var lost []*session
	for _, cl := range f.claims {
		if cl.report != (report{}) && s.sessions[cl.sess.id] == nil {
			lost = append(lost, cl.sess)
		}
	}
	stop := f.stop
	s.mu.Unlock()
	if len(lost) == 0 {
		return nil
	}
	on, err := s.onNamespaces(ctx, f.id)
	if err != nil || !on {
		return err
	}
	defer context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if f.stop != nil {
			f.stop()
		}
	})()
	for _, sess := range lost {
		if err := s.makeStable(f, sess); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f.stop = stop
	return ctx.Err()
}

// staleFiles counts the files of the shard that have copies to be made anew.
func (s *Service) staleFiles(ctx context.Context) (n int64) {
	from, to := schema.Of(schema.PrefixFill)
	for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			s.log.Warn("copies to be made cannot be counted", "error", err)
			return n
		}
		if s.mine(schema.IDOf(kv.Key)) {
			n++
		}
	}
	return n
}
