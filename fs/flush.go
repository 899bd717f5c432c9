package fs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// How written data becomes durable without anybody asking for it.
const (
	flushInterval = time.Second           // from the first write to the commit
	flushGather   = 20 * time.Millisecond // at least, also when memory runs short
	flushFiles    = 256                   // committed at once
	flushPatience = 2 * time.Second       // before others are begun: a dead data server must not hold them up
	flushBackoff  = time.Minute           // at most, between two tries of a file that cannot be made stable
	tellGather    = 5 * time.Millisecond  // for the sizes of several files to go in one call
)

// flusher has the inodes that are dirty.
type flusher struct {
	mu   sync.Mutex
	list []*inode      // held
	busy int           // inodes that are being flushed
	kick chan struct{} // list is not empty
}

// enqueue puts the inode on the flusher's list. mu is held.
func (i *inode) enqueue() {
	if i.queued {
		return
	}
	i.queued = true
	i.again()
	f := &i.fs.flusher
	f.mu.Lock()
	f.list = append(f.list, i)
	f.mu.Unlock()
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

// flushLoop is the background flusher. It is idle as long as nothing is dirty, and ends with fs.ctx.
func (fs *FS) flushLoop() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-fs.flusher.kick:
		case <-fs.ctx.Done():
			return
		}
		timer.Reset(flushGather)
		select {
		case <-timer.C:
		case <-fs.ctx.Done():
			return
		}
		timer.Reset(flushInterval - flushGather)
		select {
		case <-timer.C:
		case <-fs.data.Pressure():
		case <-fs.ctx.Done():
			return
		}
		for batch := range slices.Chunk(fs.flusher.take(), flushFiles) {
			done := make(chan struct{})
			// The goroutine owns the batch and ends when its last file is stable, or with fs.ctx.
			fs.spawn(func() {
				defer close(done)
				if err := fs.makeDurable(fs.ctx, batch, fs.flushed); err != nil && fs.ctx.Err() == nil {
					fs.waiting.log(fs.log, slog.LevelWarn, "written data is not stable yet", "err", err)
				}
			})
			timer.Reset(flushPatience)
			select {
			case <-done:
			case <-timer.C:
			}
		}
	}
}

// take empties the list. What it returns is held until it is flushed.
func (f *flusher) take() (batch []*inode) {
	f.mu.Lock()
	list := f.list
	f.list = nil
	f.busy += len(list)
	f.mu.Unlock()
	for _, i := range list {
		i.mu.Lock()
		i.queued = false
		already := i.flushing
		i.flushing = true
		i.mu.Unlock()
		if !already {
			batch = append(batch, i)
			continue
		}
		f.mu.Lock()
		f.busy--
		f.mu.Unlock()
		i.drop()
	}
	return batch
}

// flushed ends the flushing of one file.
func (fs *FS) flushed(i *inode) {
	i.mu.Lock()
	i.flushing = false
	if fs.ctx.Err() == nil && i.dirty() {
		i.enqueue()
	}
	i.letGo()
	i.mu.Unlock()
	i.drop()
	fs.flusher.mu.Lock()
	fs.flusher.busy--
	fs.flusher.mu.Unlock()
}

// anyDirty reports whether there may be a file with data that is not stable.
func (f *flusher) anyDirty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.list) > 0 || f.busy > 0
}

// dirty reports whether there is data that is not stable or a size that is not durable. mu is held.
func (i *inode) dirty() bool { return i.written > i.durable || i.data.Dirty() || len(i.untold()) > 0 }

// untold is what is stable on namespaces and counts only when the service has been told. mu may be held.
func (i *inode) untold() []dataplane.Written {
	if !i.reads.any.Load() {
		return nil
	}
	return i.data.Written()
}

// report is what to tell the service of a file's acknowledged writes.
type report struct {
	i            *inode
	session      *sessionLife
	count, epoch uint64 // inode.written and inode.epoch
	end, mtime   int64
	written      []dataplane.Written // what is to become valid, unless the report is provisional
	set          metarpc.Times       // what was put off, unless the report is provisional; as of when it is sent
	places       metarpc.SizeReport  // what it tells of places of appends; as of when it is sent
}

// report says how things stand. mu is held.
func (i *inode) report() report {
	return report{i: i, session: i.session(), count: i.written, epoch: i.epoch, end: max(i.end, i.reserved.end), mtime: i.mtime}
}

// handOver is makeDurable for those who are about to take the layout away: what is lost already keeps nobody waiting.
func (i *inode) handOver(ctx context.Context) error {
	err := i.makeDurable(ctx)
	if errors.Is(err, errTaken) {
		err = i.makeDurable(ctx)
	}
	return err
}

// makeDurable makes all acknowledged writes of the file durable, with its size and time.
func (i *inode) makeDurable(ctx context.Context) error {
	return i.fs.makeDurable(ctx, []*inode{i}, nil)
}

// makeDurable does that for several files. done, if it is not nil, is called for each one as soon as it is durable or
// has failed; then they are files that nobody waits for, and what has failed before is not tried again at once.
func (fs *FS) makeDurable(ctx context.Context, list []*inode, done func(*inode)) error {
	if len(list) <= 1 || len(fs.sessions) == 1 {
		return fs.makeDurablePart(ctx, list, done)
	}
	return fs.byShard(list, func(part []*inode) error { return fs.makeDurablePart(ctx, part, done) })
}

// makeDurablePart is makeDurable for files of one shard.
func (fs *FS) makeDurablePart(ctx context.Context, list []*inode, done func(*inode)) error {
	type result struct {
		i   *inode
		r   report
		err error
	}
	var errs errorList
	results := make(chan result, flushFiles)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for running := 0; len(list) > 0 || running > 0; {
		for ; len(list) > 0 && running < flushFiles; running++ {
			i := list[0]
			list = list[1:]
			// The goroutine commits one file and ends with that.
			go func() {
				r, err := i.commit(ctx, done != nil)
				results <- result{i, r, err}
			}()
		}
		var finished []*inode
		var reports []report
		take := func(got result) {
			running--
			finished = append(finished, got.i)
			errs.add(got.err)
			if got.r.i != nil {
				reports = append(reports, got.r)
			}
		}
		take(<-results)
		timer.Reset(tellGather)
	gather:
		for running > 0 && len(reports) < metarpc.MaxBatch {
			select {
			case got := <-results:
				take(got)
			case <-timer.C:
				break gather
			}
		}
		// Again for those whose size or time was set meanwhile.
		outdated, err := fs.tell(ctx, reports, false)
		errs.add(err)
		list = append(list, outdated...)
		for _, i := range finished {
			if done != nil && !slices.Contains(outdated, i) {
				done(i)
			}
		}
	}
	return errs.join()
}

// errorList keeps the first few of possibly very many errors.
type errorList struct {
	first []error
	more  int
}

func (l *errorList) add(err error) {
	if err == nil {
		return
	}
	if len(l.first) == 8 {
		l.more++
		return
	}
	l.first = append(l.first, err)
}

func (l *errorList) join() error {
	if l.more > 0 {
		return fmt.Errorf("%w, and %d more errors", errors.Join(l.first...), l.more)
	}
	return errors.Join(l.first...)
}

func (i *inode) commitData(ctx context.Context) error {
	_, arrived := atData(ctx)
	defer arrived()
	return i.data.Commit(ctx)
}

// commit makes the file's data stable and returns what may be told durably then: nothing if r.i is nil.
// unhurried says that a file which could not be made stable is left alone for a while.
func (i *inode) commit(ctx context.Context, unhurried bool) (r report, err error) {
	if err := i.await(ctx, func() bool { return !i.losing }); err != nil {
		return report{}, fmt.Errorf("file %d: commit: %w", i.id, err)
	}
	i.look()
	r = i.report()
	session := r.session
	told := i.durable == i.written
	passed := i.passed != nil // what the kernel has written since it was looked at need not have changed size or time
	dead := i.removed && i.handles == 0 && i.opens == 0 || i.gone != nil
	later := unhurried && i.retryAt > now()
	i.mu.Unlock()
	switch {
	case told && !i.data.Dirty() && !passed && len(i.untold()) == 0 || later:
		return report{}, nil
	case dead:
		return report{}, i.abandon(ctx)
	}
	if err := i.syncPassed(); err != nil {
		i.stabilised(err)
		return report{}, fmt.Errorf("file %d: commit: %w", i.id, err)
	}
	var again retries
	for err = i.commitData(ctx); err != nil && ctx.Err() == nil; err = i.commitData(ctx) {
		if failed := dataplane.FailedCopies(err); len(failed) > 0 {
			i.mu.Lock()
			i.doubt(failed)
			i.mu.Unlock()
			// No new layout is needed without the copy, and none may be had before a recall is answered.
			if gone, _ := i.settled(ctx, err); gone {
				continue
			}
		}
		if again.after(ctx, i, err) != nil {
			break
		}
		e := i.renew(ctx, session)
		if session != i.session() {
			return report{}, fmt.Errorf("file %d: commit: %w", i.id, errSessionLost)
		}
		if e != nil {
			err = e
			break
		}
	}
	var gone *staleError
	switch {
	case err == nil:
		i.stabilised(nil)
	case errors.As(err, &gone):
		i.mu.Lock()
		i.setGone(err)
		i.mu.Unlock()
		return report{}, i.abandon(ctx)
	case ctx.Err() != nil:
		return report{}, fmt.Errorf("file %d: commit: %w", i.id, err)
	default:
		i.stabilised(err)
		return report{}, fmt.Errorf("file %d: commit: %w", i.id, err)
	}
	if r.written = i.untold(); told && len(r.written) == 0 {
		return report{}, nil
	}
	return r, nil
}

// abandon gives up what is not stable of a file that nobody can read any more.
func (i *inode) abandon(ctx context.Context) error {
	unlock, err := i.data.LockRange(ctx, 0, layout.ToEOF)
	if err != nil {
		return err
	}
	defer unlock()
	i.data.Drop(0)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.forget()
	return nil
}

// renew lets what was written under an older layout be committed under the present one: after a fence the data files
// have other owners. What was written in another session must not be sent again with the layouts of this one.
func (i *inode) renew(ctx context.Context, s *sessionLife) error {
	segments, err := i.fs.meta.Renew(ctx, i.id)
	if err != nil {
		return byID(i.id, err)
	}
	if s != i.session() {
		return errSessionLost
	}
	for n := range segments {
		i.data.Renew(&segments[n])
	}
	return nil
}

// tell sends size reports of files of one shard. It returns the files whose report must not be sent any more.
func (fs *FS) tell(ctx context.Context, reports []report, provisional bool) (outdated []*inode, err error) {
	if len(reports) == 0 {
		return nil, nil
	}
	current := &fs.sessions[fs.shardOf(reports[0].i.id)]
	session := current.Load()
	var live []report
	var args []metarpc.SizeReport
	for _, r := range reports {
		i := r.i
		i.mu.Lock()
		if provisional {
			r = i.report() // a place that was written since is told by its end alone, if it is of an earlier instance
		}
		if len(r.written) > 0 {
			r.written = i.untold() // others may have told it since, and answered a recall
		}
		var used metarpc.Used
		if !provisional {
			used = i.used()
			r.set = i.putOff // which does not change while it is on its way
		}
		news := !(i.durable >= r.count && len(r.written) == 0 && r.set.Ctime == 0 || provisional && i.provisional >= r.count)
		switch {
		case i.losing, !news && !i.reserved.toTell():
		case i.epoch != r.epoch || r.session != session:
			outdated = append(outdated, i)
		default:
			i.reporting++
			i.reserved.tell(&r.places)
			live = append(live, r)
			args = append(args, metarpc.SizeReport{
				ID: i.id, End: r.end, Mtime: r.mtime, Written: wireWritten(r.written), Set: r.set,
				Ended: r.places.Ended, GivenUp: r.places.GivenUp, Reserved: r.places.Reserved, Used: used,
			})
			if r.set.Ctime != 0 {
				i.setting++
			}
		}
		i.mu.Unlock()
	}
	if len(live) == 0 {
		return outdated, nil
	}
	// A report must not arrive after a truncation that did not wait for it.
	_, err = carry(ctx, fs, live[0].i.id, func(ctx context.Context) (struct{}, error) {
		send := func(live []report, args []metarpc.SizeReport) error {
			asked := fs.clock.Add(1)
			answers, err := fs.meta.LayoutCommit(session.during(ctx), args, provisional)
			switch {
			case err != nil && session != current.Load():
				err = errSessionLost
			case !isTaken(err) || !slices.ContainsFunc(live, func(r report) bool { return len(r.written) > 0 }):
			case len(live) > 1:
				return errOneTaken
			default:
				err = live[0].taken(err)
			}
			for n, r := range live {
				if err != nil {
					r.told(nil, asked, provisional)
				} else {
					r.told(&answers[n], asked, provisional)
				}
			}
			return err
		}
		err := send(live, args)
		if err != errOneTaken {
			return struct{}{}, err
		}
		var errs errorList
		for n := range live {
			errs.add(send(live[n:n+1], args[n:n+1]))
		}
		return struct{}{}, errs.join()
	})
	return outdated, err
}

// wireWritten is how the service is told what was written.
func wireWritten(written []dataplane.Written) (list []metarpc.Written) {
	for _, w := range written {
		ranges := make([]metarpc.Range, len(w.Ranges))
		for n, r := range w.Ranges {
			ranges[n] = metarpc.Range{Off: r.Off, Len: r.Len}
		}
		list = append(list, metarpc.Written{
			Copy: metarpc.CopyRef{Device: w.File.Device, Handle: w.File.Handles[0]}, Generation: w.File.Generation, Ranges: ranges,
		})
	}
	return list
}

// errTaken is what becomes of data whose place on a namespace the service has taken away before it was told that the data is there;
// errOneTaken says that this is so of one of several files.
var (
	errTaken    = errors.New("the metadata service has taken away the blocks that data was written to, and the data is lost")
	errOneTaken = errors.New("refused for one of several files")
)

// isTaken reports whether the service refuses a report for that reason: the blocks are not the file's any more, or the layout is not ours.
func isTaken(err error) bool {
	var e *metarpc.Error
	return errors.As(err, &e) && (e.Status == metarpc.Status(syscall.ESTALE) || e.Status == metarpc.Status(syscall.EPERM))
}

// taken gives up what a report was to make valid, which is refused with err. The next report is of the size alone.
func (r *report) taken(err error) error {
	i := r.i
	i.data.Validated(r.written) // or it would be told for ever; segments of the generation that it is lost in know nothing of it
	i.fs.meta.DropLayout(i.id, 0)
	err = fmt.Errorf("file %d: %w (%v)", i.id, errTaken, err) // the errno of the refusal is not the application's
	i.mu.Lock()
	i.late++
	i.lost, i.lostErr = i.late, err
	i.mu.Unlock()
	i.fs.log.Error("written data is lost", "file", i.id, "err", err)
	return err
}

// told ends a report that was answered with a, or not at all.
func (r *report) told(a *metarpc.Attr, asked uint64, provisional bool) {
	i := r.i
	i.mu.Lock()
	defer i.mu.Unlock()
	defer i.letGo()
	i.reporting--
	if r.set.Ctime != 0 {
		i.setting--
	}
	i.notify()
	if a == nil {
		return
	}
	i.reserved.told(r.places.Ended, r.places.GivenUp, len(r.places.Reserved) > 0)
	if a.ID == 0 {
		i.setGone(errGone)
		return
	}
	i.provisional = max(i.provisional, r.count)
	if !provisional {
		i.data.Validated(r.written)
		i.durable = max(i.durable, r.count)
		if i.putOff == r.set {
			i.putOff = metarpc.Times{}
		}
		if i.durable == i.written {
			i.end, i.reserved.end, i.mtime = 0, 0, 0
		}
	}
	if i.changed <= asked {
		if i.known.Load() {
			// For this answer nobody else was asked. It may be older than one for which they were, and by which a read goes.
			a.Size = max(a.Size, i.size.Load())
		}
		i.take(a, asked)
	}
	if !provisional {
		i.outdate()
	}
}

var errGone = errors.New("the metadata service does not know it")

// publish makes size and times of the writes acknowledged so far visible to everybody.
func (fs *FS) publish(ctx context.Context, list []*inode) error {
	if len(list) <= 1 || len(fs.sessions) == 1 {
		return fs.publishPart(ctx, list)
	}
	return fs.byShard(list, func(part []*inode) error { return fs.publishPart(ctx, part) })
}

// publishPart is publish for files of one shard.
func (fs *FS) publishPart(ctx context.Context, list []*inode) error {
	var errs errorList
	errs.add(fs.tellPutOff(ctx, list))
	for len(list) > 0 {
		var reports []report
		for _, i := range list {
			i.mu.Lock()
			i.look()
			reports = append(reports, i.report())
			i.mu.Unlock()
		}
		list = nil
		for batch := range slices.Chunk(reports, metarpc.MaxBatch) {
			outdated, err := fs.tell(ctx, batch, true)
			errs.add(err)
			list = append(list, outdated...)
		}
	}
	return errs.join()
}

// flush is close(2): every write has been acknowledged, and others can see it.
func (h *handle) flush(ctx context.Context) error {
	if h.i.fs.stableClose {
		return h.fsync(ctx)
	}
	if err := h.i.drain(ctx); err != nil {
		return err
	}
	if h.i.mayWait() {
		return h.outcome(ctx, nil)
	}
	return h.outcome(ctx, h.i.fs.publish(ctx, []*inode{h.i}))
}

// mayWait reports whether what the service has not been told of need not be told before it is durable: whoever asks for it makes the service ask us, who have a
// layout for writing, and should we be gone, the data files tell the size. So that is for a size alone, as after the time was set, by tar(1) or cp(1),
// and for a file that was made here of which nothing was told yet: should its time be lost with us, it has that at which it was made. Files on namespaces do
// not tell where they end, and what the kernel writes by itself is not known here.
func (i *inode) mayWait() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return (i.mtime == 0 || i.born && i.durable+i.provisional == 0) && i.passed == nil && !i.reads.any.Load()
}

// fsync is fsync(2) and fdatasync(2).
func (h *handle) fsync(ctx context.Context) error {
	return h.outcome(ctx, h.i.makeSafe(ctx))
}

var errFewCopies = errors.New("the file has fewer good copies than it is to have")

// makeSafe is makeDurable that then waits until there are as many good copies as the file is to have at least. A copy
// that is good has all that was acknowledged.
func (i *inode) makeSafe(ctx context.Context) error {
	if err := i.makeDurable(ctx); err != nil {
		return err
	}
	i.mu.Lock()
	exacting := i.exacting
	i.mu.Unlock()
	if !exacting {
		return nil
	}
	defer i.wait()()
	patience := i.fs.patience
	for start, pause := time.Now(), minPause; ; pause = min(2*pause, maxPause) {
		few, err := i.hasFewCopies(ctx)
		if !few || err != nil {
			return err
		}
		if patience.Time > 0 && time.Since(start) >= patience.Time {
			return patience.Over(errFewCopies)
		}
		i.fs.waiting.log(i.fs.log, slog.LevelWarn, "fsync waits for good copies of a file: it has fewer than it is to have", "file", i.id)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		i.fs.meta.DropLayout(i.id, 0)
	}
}

// hasFewCopies reports whether some column of the file has too few good copies. The layouts that are cached are right
// about that: they are dropped before copies become stale.
func (i *inode) hasFewCopies(ctx context.Context) (bool, error) {
	for off, size := int64(0), i.size.Load(); off < size; {
		seg, err := i.fs.meta.Layout(ctx, i.id, layout.IOModeRead, off, size-off, metaclient.Anywhere)
		if err != nil || seg == nil {
			return false, err
		}
		if seg.Few {
			return true, nil
		}
		off = seg.End()
	}
	return false, nil
}

// outcome is what close(2) or fsync(2) that led to err tells.
func (h *handle) outcome(ctx context.Context, err error) error {
	if h.passedLost() {
		return errSessionLost // and what is written from now on, too
	}
	if errors.Is(err, errSessionLost) { // which is told once, when it is known what was lost
		if err := h.i.await(ctx, func() bool { return !h.i.losing }); err != nil {
			return err
		}
		h.i.mu.Unlock()
	}
	if late := h.lateError(); late != nil {
		return late
	}
	return err
}

// Sync makes durable what has been acknowledged.
func (fs *FS) Sync(ctx context.Context) error {
	list := fs.all()
	defer func() {
		for _, i := range list {
			i.drop()
		}
	}()
	return fs.makeDurable(ctx, list, nil)
}

// open opens the file for the session, or again to learn its attributes. If it succeeds, newHandle or cancelOpen must
// follow; until then nobody else lets the file go.
func (i *inode) open(ctx context.Context, who metarpc.Cred, access metarpc.Access) error {
	_, err := i.openAs(ctx, who, access)
	return err
}

// openAs is open that returns the attributes as the service has them.
func (i *inode) openAs(ctx context.Context, who metarpc.Cred, access metarpc.Access) (metarpc.Attr, error) {
	i.mu.Lock()
	i.opens++
	i.mu.Unlock()
	asked := i.fs.clock.Add(1)
	a, err := i.fs.meta.Open(ctx, who, &metarpc.OpenArgs{ID: i.id, Access: access})
	if err != nil {
		i.cancelOpen()
		return metarpc.Attr{}, byID(i.id, err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.opened()
	i.mergeLocked(a, asked)
	i.learn(&a.Attr, asked) // also if the answer has been overtaken by writes
	return a.Attr, nil
}

// opened records that the service has the file open for the session. mu is held.
func (i *inode) opened() {
	if !i.wanted {
		i.wanted = true
		i.again()
	}
}

func (i *inode) cancelOpen() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.opens--
	i.letGo()
}

// newHandle numbers an open file, which is served the way w. reads says that it is open for reading only.
func (i *inode) newHandle(reads bool, w way) uint64 {
	h := &handle{i: i.again(), reads: reads, way: w}
	h.window.shared = i.fs.ahead
	i.mu.Lock()
	i.opens--
	i.handles++
	if !reads {
		i.writers++
	}
	h.late.Store(i.late)
	i.mu.Unlock()
	return i.fs.handles.add(h)
}

// release ends an open file.
func (fs *FS) release(fh uint64) {
	h := fs.handles.remove(fh)
	if h == nil {
		return
	}
	h.unlock()
	h.window.close()
	h.i.newborn.Store(false)
	leave := func() {
		h.i.mu.Lock()
		defer h.i.mu.Unlock()
		h.i.leave(h.way)
		h.i.handles--
		if !h.reads {
			if h.i.writers--; h.i.writers == 0 {
				h.i.notify()
			}
		}
		h.i.letGo()
	}
	if h.reads {
		leave()
	} else { // with its writes
		h.i.fs.given.during(h.i.id, leave)
	}
	h.i.drop()
}

// Close makes everything durable as far as ctx allows, closes what is open, and ends all background work. Requests
// must have ended, but for writes that go on though their callers were killed: those it waits for. The error says what
// remained.
func (fs *FS) Close(ctx context.Context) error {
	for _, fh := range fs.handles.numbers() {
		fs.release(fh)
	}
	err := fs.settle(ctx)
	fs.accesses.close(ctx)
	list := fs.all()
	fs.stop()
	fs.work.Wait()
	for _, i := range fs.flusher.take() {
		i.drop()
	}
	var left []layout.FileID
	for _, i := range list {
		i.mu.Lock()
		if i.dirty() {
			left = append(left, i.id)
		} else {
			i.letGo()
		}
		i.mu.Unlock()
		i.drop()
	}
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("%d files have data that is not stable, the first is inode %d", len(left), left[0]))
	}
	return err
}

// settle waits for the writes under way and makes everything durable.
func (fs *FS) settle(ctx context.Context) error {
	list := fs.all()
	defer func() {
		for _, i := range list {
			i.drop()
		}
	}()
	var errs errorList
	for _, i := range list {
		if err := i.drain(ctx); err != nil {
			errs.add(fmt.Errorf("file %d: writes under way: %w", i.id, err))
		}
	}
	errs.add(fs.makeDurable(ctx, list, nil))
	return errs.join()
}
