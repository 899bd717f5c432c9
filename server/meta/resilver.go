package meta

import (
	"context"
	"errors"
	"math"
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
	// resilverLook is how often it is looked for copies to make that could not be made before.
	resilverLook = 10 * time.Second
	// fillPage is how many files are listed at a time.
	fillPage = 256
	// gateBytes is how much of a file is closed to writers at a time; less if copying is slowed down, so that it takes gateTime.
	gateBytes = 64 << 20
	minGate   = 1 << 20
	gateTime  = time.Second / 4
	// gatePatience is how long a range is closed at most by those whom somebody waits for. Writers wait for that.
	gatePatience = 30 * time.Second
	// idlePatience is how long a fill keeps a range closed while clients have not yet given it back, and while it
	// begins.
	idlePatience = time.Second
	// turnWait is how long a fill lets others do when they have waited for it, if its gate was not closed longer.
	turnWait = 100 * time.Millisecond
	// maxLost is how many gates of a fill others may end before it has copied anything. As many again may end by
	// idlePatience.
	maxLost = 3
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
	failed, unmoved layout.FileID // the last ones that could not be filled, or moved: the next pass begins behind them
	since           time.Time     // when there began to be files with copies to be made; zero if there are none
	before          int64         // copied, then
	filesBefore     int64         // files, then

	waiting atomic.Pointer[[]metarpc.WaitingFiles] // what files were waiting for when they were last counted
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

// waitingLoop counts again and again what files wait for, and logs what is new. Counting takes a tenth of the time at
// most. It ends with s.ctx.
func (s *Service) waitingLoop() {
	timer := time.NewTimer(resilverLook)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.ctx.Done():
			return
		}
		began := time.Now()
		sum, err := s.countWaiting(s.ctx)
		timer.Reset(max(resilverLook, 9*time.Since(began)))
		if err != nil {
			if s.ctx.Err() == nil {
				s.log.Warn("it cannot be counted what copies to be made wait for", "error", err)
			}
			continue
		}
		before := s.waiting()
		s.resilver.waiting.Store(&sum)
		for _, w := range sum {
			same := func(o metarpc.WaitingFiles) bool { return o.Device == w.Device }
			switch {
			case slices.ContainsFunc(before, same):
			case w.Device == layout.DeviceID{}:
				s.log.Warn("files have too few copies, and wait for one more data server", "files", w.Files)
			default:
				s.log.Warn("files have too few copies, and wait for a data server", "device", w.Device, "files", w.Files)
			}
		}
	}
}

// waiting is what files were waiting for when they were last counted, in the order of the devices.
func (s *Service) waiting() []metarpc.WaitingFiles {
	if sum := s.resilver.waiting.Load(); sum != nil {
		return *sum
	}
	return nil
}

// countWaiting counts what files of the shard wait for that have copies to be made.
func (s *Service) countWaiting(ctx context.Context) ([]metarpc.WaitingFiles, error) {
	sum := map[layout.DeviceID]int64{}
	var ids []layout.FileID
	from, to := schema.Of(schema.PrefixFill)
	for {
		ids = ids[:0]
		listed := false
		for kv, err := range s.engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: fillPage, KeysOnly: true}) {
			if err != nil {
				return nil, err
			}
			listed = true
			if id := schema.IDOf(kv.Key); s.mine(id) {
				ids = append(ids, id)
			}
			from = catalog.After(kv.Key)
		}
		if !listed {
			break
		}
		if err := s.cfg.Files.Waiting(ctx, ids, sum); err != nil {
			return nil, err
		}
	}
	all := make([]metarpc.WaitingFiles, 0, len(sum))
	for dev, files := range sum {
		all = append(all, metarpc.WaitingFiles{Device: dev, Files: files})
	}
	slices.SortFunc(all, func(a, b metarpc.WaitingFiles) int { return slices.Compare(a.Device[:], b.Device[:]) })
	return all, nil
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
	behind := catalog.After(schema.FillKey(r.failed))
	if s.fillAll(behind, to) {
		s.fillAll(from, behind)
	}
}

// fillAll makes copies of the files that have fill rows in [from, to), and reports whether that were all.
func (s *Service) fillAll(from, to []byte) bool {
	r := &s.resilver
	for s.ctx.Err() == nil {
		var ids []layout.FileID
		listed := 0
		for kv, err := range s.engine.Scan(s.ctx, from, to, catalog.ScanOptions{Limit: fillPage, KeysOnly: true}) {
			if err != nil {
				if s.ctx.Err() == nil {
					s.log.Warn("copies to be made cannot be listed", "error", err)
				}
				return false
			}
			listed++
			if id := schema.IDOf(kv.Key); s.mine(id) && !s.beingMoved(id) { // or whoever moves it sees to all of its copies
				ids = append(ids, id)
			}
			from = catalog.After(kv.Key)
		}
		if listed == 0 {
			return true
		}
		if len(ids) == 0 {
			continue
		}
		if r.since.IsZero() {
			r.since, r.filesBefore, r.before = time.Now(), r.files.Load(), r.copied.Load()
			s.log.Warn("copies of mirrored files are out of date, and are made anew")
		}
		ids, err := s.cfg.Files.MayFill(s.ctx, ids)
		if err != nil {
			if s.ctx.Err() == nil {
				s.log.Warn("it cannot be found out which copies can be made now", "error", err)
			}
			return false
		}
		for _, id := range ids {
			if err := s.fillFile(s.ctx, id); err != nil && !errors.Is(err, errFilled) && s.ctx.Err() == nil {
				s.log.Warn("new copies cannot be made now", "inode", id, "error", err)
				r.failed = id
			}
		}
	}
	return false
}

// moveAll moves data files away from devices that are drained.
func (s *Service) moveAll() {
	behind := s.resilver.unmoved
	if s.moveSome(behind, math.MaxInt64) {
		s.moveSome(0, behind)
	}
}

// moveSome is moveAll for the files behind from, up to to. It reports whether that were all.
func (s *Service) moveSome(from, to layout.FileID) bool {
	for s.ctx.Err() == nil && from < to {
		ids, err := s.cfg.Files.Moving(s.ctx, from, fillPage)
		if err != nil {
			if s.ctx.Err() == nil {
				s.log.Warn("files on data servers that are drained cannot be listed", "error", err)
			}
			return false
		}
		if len(ids) == 0 {
			return true
		}
		for _, id := range ids {
			from = id
			if id > to {
				return true
			}
			if !s.mine(id) {
				continue
			}
			if err := s.fillFile(s.ctx, id); err != nil && !errors.Is(err, errFilled) && s.ctx.Err() == nil {
				s.log.Warn("data files cannot be moved now", "inode", id, "error", err)
				s.resilver.unmoved = id
			}
		}
	}
	return s.ctx.Err() == nil
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
	gates := fillGates{s: s, id: id}
	err = gates.during(ctx, wholeFile, func(ctx context.Context, _ <-chan struct{}) (err error) {
		ctx, cancel := context.WithTimeout(ctx, idlePatience)
		defer cancel()
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
		if err := s.pace(ctx); err != nil {
			return err
		}
		n := s.gateSize()
		s.noteMove(id, done, max(size, done))
		err := gates.during(ctx, layout.Range{Off: done, Len: n}, func(ctx context.Context, enough <-chan struct{}) error {
			upTo, last, err := s.cfg.Files.Fill(ctx, id, row, done, n, s.copiedOf(id), enough)
			if err == nil {
				done, end = upTo, last
			}
			return err
		})
		if err != nil {
			if failed := failedCopies(err); failed != nil && ctx.Err() == nil {
				_, e := s.giveUp(ctx, id, failed) // another try begins with other data files
				err = errors.Join(err, e)
			}
			return err
		}
		size = max(size, end)
	}
	complete, err := s.cfg.Files.EndFill(ctx, id, row)
	if err != nil {
		return err
	}
	if row.Moving {
		// settleMove tells all clients while the file is closed. A client that is slow to answer is waited for here,
		// while the file is still open.
		if err := s.tell(ctx, &metarpc.CopiesStaleArgs{ID: id}); err != nil {
			return err
		}
		err := gates.during(ctx, wholeFile, func(ctx context.Context, _ <-chan struct{}) error {
			ctx, cancel := context.WithTimeout(ctx, gatePatience)
			defer cancel()
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

// pace waits until more may be copied. No range is closed meanwhile.
func (s *Service) pace(ctx context.Context) error {
	s.mu.Lock()
	wait := time.Until(s.resilver.next)
	s.mu.Unlock()
	if wait <= 0 {
		return ctx.Err()
	}
	return retry.Pause(ctx, wait)
}

// count notes that n bytes are copied, for which pace waits afterwards. The columns of a file are copied side by side.
func (s *Service) count(ctx context.Context, n int) error {
	s.resilver.copied.Add(int64(n))
	if s.cfg.Resilver == 0 {
		return ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := time.Now(); s.resilver.next.Before(at) {
		s.resilver.next = at
	}
	s.resilver.next = s.resilver.next.Add(time.Duration(float64(n) / float64(s.cfg.Resilver) * float64(time.Second)))
	return ctx.Err()
}

// unpaced is count for what others wait for.
func (s *Service) unpaced(ctx context.Context, n int) error {
	s.resilver.copied.Add(int64(n))
	return ctx.Err()
}

// gated calls f while nobody can write to a range of the file or change its size: layouts for writing there are taken back,
// sessions that were lost are fenced, and no new ones are granted until f has returned.
func (s *Service) gated(ctx context.Context, id layout.FileID, r layout.Range, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, gatePatience)
	defer cancel()
	return s.closed(ctx, id, r, &gateTerms{}, f)
}

// gateTerms say how long a gate may be closed.
type gateTerms struct {
	recall time.Duration // for how long layouts are waited for; 0: until ctx ends
	yields bool          // and not if somebody waits
	enough chan struct{} // closed when somebody waits for the range or for the file's sizing; nil: that is not heeded
	began  time.Time     // when it was closed
}

// errGateLost: not all layouts were given back while a gate could be kept closed.
var errGateLost = errors.New("clients use the file, and have not given it back in time")

// closed is gated on terms. The error is errGateLost if f was not called because of these.
func (s *Service) closed(ctx context.Context, id layout.FileID, r layout.Range, terms *gateTerms, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	file, err := s.beginSizing(ctx, id)
	if err != nil {
		return err
	}
	defer s.endSizing(file)
	terms.began = time.Now()
	recalling, stop := ctx, cancel
	if terms.recall > 0 {
		recalling, stop = context.WithTimeout(ctx, terms.recall)
		defer stop()
	}
	s.mu.Lock()
	file.stop = cancel
	file.gate = r
	if terms.enough != nil {
		file.wanted = sync.OnceFunc(func() {
			close(terms.enough)
			if terms.yields {
				stop()
			}
		})
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		file.gate, file.wanted = layout.Range{}, nil
		file.gates++
	}()
	err = s.recallRange(recalling, file, r, others(nil))
	if err == nil {
		err = s.settleLost(recalling, file)
	}
	if err != nil {
		if recalling.Err() != nil && ctx.Err() == nil {
			err = errGateLost
		}
		return err
	}
	return f(ctx)
}

// fillGates closes ranges of a file for a fill. Everybody else is more urgent, but does not keep it from ever getting
// on.
type fillGates struct {
	s    *Service
	id   layout.FileID
	lost int       // gates that were lost one after the other
	rest time.Time // until then others have the file
}

// during is gated for a fill. f returns soon after enough is closed, when others wait.
func (g *fillGates) during(ctx context.Context, r layout.Range, f func(ctx context.Context, enough <-chan struct{}) error) error {
	for {
		if wait := time.Until(g.rest); wait > 0 {
			if err := retry.Pause(ctx, wait); err != nil {
				return err
			}
		}
		if g.lost >= maxLost {
			// Clients give back soon what they have just written to the data servers, while all could go on.
			if err := g.s.askBack(ctx, g.id, r); err != nil {
				return err
			}
		}
		terms := gateTerms{recall: idlePatience, yields: g.lost < maxLost, enough: make(chan struct{})}
		err := g.s.closed(ctx, g.id, r, &terms, func(ctx context.Context) error { return f(ctx, terms.enough) })
		wanted := false
		select {
		case <-terms.enough:
			wanted = true
			g.rest = time.Now().Add(max(turnWait, 2*time.Since(terms.began)))
		default:
		}
		if !errors.Is(err, errGateLost) {
			g.lost = 0
			return err
		}
		if g.lost++; !wanted {
			g.lost = max(g.lost, maxLost)
		}
		if g.lost == 2*maxLost {
			return err
		}
	}
}

// askBack has clients give back their layouts of a range. They may get others meanwhile.
func (s *Service) askBack(ctx context.Context, id layout.FileID, r layout.Range) error {
	ctx, cancel := context.WithTimeout(ctx, gatePatience)
	defer cancel()
	s.mu.Lock()
	f := s.file(id)
	f.waiters++ // so that the record stays
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.waiters--
		s.changedFile(f)
	}()
	return s.recallLayouts(ctx, f, r, others(nil))
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
