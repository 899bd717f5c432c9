package dataplane

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
)

// Write asks for Data to be written at Off of a file. It may be used again once Done was called.
type Write struct {
	Segment *layout.Segment
	Data    []byte // not changed; the plane's from StartWrite until Done was called or Detach has returned
	// Buf, if it is not nil, is memory of Plane.Buffer that begins with Data. The plane keeps it, by references, where it would
	// keep a copy: Data must not change before the last Release.
	Buf *iobuf.Buf
	Off int64
	// Stable is what Done without an error shall mean: layout.Unstable, that the data is at every mirror and the plane
	// keeps a copy until Commit has made it stable; anything else, that it is stable at every mirror.
	Stable layout.Stability
	// Shared says that somebody may write the same bytes whom the plane does not see. So no copy is kept that could be sent again, over
	// what is newer: without an error the data is stable, or with this host's kernel (layout.Op.Kept).
	Shared  bool
	Slowest *Slowest // nil, or is told before Done, unless that comes early as the servers' patience is over
	// Done is called exactly once, from any goroutine, possibly before StartWrite returns. It must be short and must not
	// block.
	Done func(err error)

	req *writeRequest
	gen uint64
}

// StartWrite begins a write and returns at once. Writes of overlapping ranges are carried out in the order of their
// StartWrite, each after the end of the one before.
//
// Every copy that the segment does not call stale is written; the write fails if one fails, when all have answered.
// What the range holds is undefined then and may differ between mirrors until it is written anew, or until the copies
// that failed (see [FailedCopies]) are given up. A copy that leaves unanswered for Config.MirrorTimeout what another
// has answered counts as failed (ErrStuck); the range stays held until it has answered after all, or is given up. A
// copy on a late device counts as failed at once when a good copy has answered; it is not sent the data.
func (f *File) StartWrite(w *Write) {
	if len(w.Data) == 0 {
		w.Done(nil)
		return
	}
	if err := checkWrite(w); err != nil {
		w.Done(fmt.Errorf("write of %d bytes at %d in %v: %w", len(w.Data), w.Off, w.Segment.Range, err))
		return
	}
	q := writeRequests.Get().(*writeRequest)
	q.mu.Lock()
	q.file, q.seg, q.data, q.buf, q.off, q.stable, q.shared, q.done, q.slowest = f, w.Segment, w.Data, w.Buf, w.Off, w.Stable, w.Shared, w.Done, w.Slowest
	w.req, w.gen = q, q.gen
	var granted bool
	q.node, granted = f.locks.acquire(w.Off, w.Off+int64(len(w.Data)), ticket{q, q.gen})
	if !granted {
		q.mu.Unlock()
		return
	}
	q.begin()
}

func checkWrite(w *Write) error {
	switch {
	case w.Off < 0 || !w.Segment.Contains(w.Off, int64(len(w.Data))):
		return layout.ErrBeyondSegment
	case w.Segment.IOMode != layout.IOModeRW:
		return ErrReadOnly
	}
	return nil
}

// Detach gives Data back early: when it returns nothing reads Data any more. A write of which nothing was sent ends with
// context.Canceled and will not happen; any other goes on and keeps its range until the servers have answered. Done is
// called as ever, before or after. Detach may be called any number of times after StartWrite has returned, also when the
// write has ended, as long as w was not used for another write.
func (w *Write) Detach() {
	if w.req != nil {
		w.req.detach(w.gen)
	}
}

// writeRequest is the state of a Write.
type writeRequest struct {
	request
	buf     *iobuf.Buf // begins with data, or nil; the caller's reference
	stable  layout.Stability
	shared  bool
	done    func(error) // nil once it was called
	node    *rangeNode
	orphans *orphans // nil as long as there are none
	lacking bool     // there is no good copy of some of the range that was not given up
	stray   bool     // it has ended for its caller, and counts among the file's strays
}

var writeRequests = sync.Pool{New: func() any {
	q := new(writeRequest)
	q.kind = q
	return q
}}

func (q *writeRequest) resume(gen uint64, err error) {
	q.mu.Lock()
	switch {
	case q.gen != gen:
		q.mu.Unlock()
	case err != nil:
		q.end(err)
	default:
		q.begin()
	}
}

// begin sends the data, or puts the request aside until it can. The range is held. mu is held; begin releases it.
func (q *writeRequest) begin() {
	p, gen := q.file.plane, q.gen
	var err error
	if q.units, err = q.seg.Split(q.units[:0], q.data, q.off, math.MaxInt); err != nil {
		q.end(err)
		return
	}
	for i := range q.units {
		for m := range q.seg.Mirrors {
			df := &q.seg.Mirrors[m].Servers[q.units[i].Server]
			if df.State != layout.CopyStale && p.connect(df.Device, ticket{q, gen}) == nil {
				q.mu.Unlock()
				return
			}
		}
	}
	q.running = true
	q.pending.Store(1)
	if len(q.seg.Mirrors) > 1 {
		p.watch.add(&q.request, p.watch.now()+p.lookAfter())
	}
	for i := range q.units {
		u := &q.units[i]
		size := q.pieceSize(u.Server)
		for off, data := u.Off, u.Data; len(data) > 0; {
			n := min(len(data), size)
			q.send(u.Server, off, data[:n:n])
			data, off = data[n:], off+int64(n)
		}
	}
	q.mu.Unlock()
	q.drop()
}

// pieceSize is the largest write that every mirror takes at once and that fits a buffer.
func (q *writeRequest) pieceSize(server int) int {
	size := q.file.plane.pool.MaxBuf()
	for m := range q.seg.Mirrors {
		df := &q.seg.Mirrors[m].Servers[server]
		if df.State == layout.CopyStale {
			continue
		}
		_, wsize := q.file.plane.device(df.Device).conn.Load().Limits()
		size = min(size, wsize)
	}
	return max(size, 1)
}

// keeps reports whether the data will probably be with this host's kernel when it is written.
func (q *writeRequest) keeps(server int) bool {
	// Of several copies one on a disk that hangs is done without, which takes a copy of the data.
	if len(q.seg.Mirrors) > 1 || q.file.plane.extents.Load() >= maxKept {
		return false
	}
	df := &q.seg.Mirrors[0].Servers[server]
	return q.file.plane.device(df.Device).conn.Load().keeps()
}

// send starts one write at every mirror. Unstable data goes out from what is retained, so that the caller's
// memory is free when the last server has answered and what is sent again later is what was sent before.
func (q *writeRequest) send(server int, off int64, data []byte) {
	p, stable := q.file.plane, q.stable
	var buf *iobuf.Buf
	base := off
	switch {
	case stable != layout.Unstable:
	case q.keeps(server):
	case q.shared:
		stable = layout.DataSync
	case q.buf != nil:
		buf, base = q.buf, q.off
		buf.Ref()
	default:
		if buf = p.Buffer(len(data)); buf != nil {
			copy(buf.Bytes(), data)
			data = buf.Bytes()
		} else {
			stable = layout.DataSync
		}
	}
	sent, sure := false, len(q.seg.Mirrors) > 1 && q.punctual(server)
	for m := range q.seg.Mirrors {
		d := q.file.writable(q.seg, m, server)
		if d == nil {
			continue
		}
		df := &q.seg.Mirrors[m].Servers[server]
		sent = sent || df.State == layout.CopyGood
		pc := pieces.Get().(*piece)
		pc.conn = p.device(df.Device).conn.Load()
		pc.epoch = pc.conn.epoch()
		pc.data = d
		if buf != nil {
			buf.Ref()
			pc.buf, pc.base = buf, base
		}
		pc.op.Kind, pc.op.File, pc.op.Off, pc.op.Data, pc.op.Stable, pc.op.Kept = layout.OpWrite, df, off, data, stable, 0
		pc.op.Leave = buf == nil && q.mayLeave()
		pc.late = pc.conn.dev.lateToWrite()
		if sure && pc.late {
			if !pc.conn.dev.tries() {
				pc.owner, pc.gen = &q.request, q.gen
				pc.state.Store(pieceHeld)
				q.pieces = append(q.pieces, pc)
				if pc.conn.dev.late() {
					pc.conn.dev.ask(df, off) // nobody has, if the plane was told
				}
				continue
			}
			pc.trial, pc.op.Stable = true, max(stable, layout.DataSync)
			p.watch.again(&q.request, p.watch.now()+p.lookSoon())
		}
		q.add(pc)
	}
	if buf != nil {
		buf.Release()
	}
	q.lacking = q.lacking || !sent
}

// punctual reports whether a good copy of a column is to be written whose device is not late.
func (q *writeRequest) punctual(server int) bool {
	for m := range q.seg.Mirrors {
		df := &q.seg.Mirrors[m].Servers[server]
		if df.State == layout.CopyGood && q.file.readable(df) && !q.file.plane.device(df.Device).lateToWrite() {
			return true
		}
	}
	return false
}

// hopeful reports whether what pc is to write has been taken by a good copy, or probably will be soon.
func (q *writeRequest) hopeful(pc *piece) bool {
	return slices.ContainsFunc(q.pieces, func(other *piece) bool {
		if other == pc || other.op.Off != pc.op.Off || other.op.File.State != layout.CopyGood || other.data.forsaken.Load() {
			return false
		}
		switch other.state.Load() {
		case pieceEnded:
			return other.writeResult() == nil
		case pieceOut:
			return !other.conn.dev.lateToWrite() && !other.conn.refuses()
		}
		return false
	})
}

// sendHeld sends pieces that were held back because their devices were late, if the devices no longer are, or no
// other copy will do. It reports whether there were any. mu is held, and a count of pending; the caller flushes.
func (q *writeRequest) sendHeld() bool {
	found := false
	for _, pc := range q.pieces {
		if pc.state.Load() != pieceHeld || pc.data.forsaken.Load() || pc.buf == nil && q.detached {
			continue
		}
		if late := pc.conn.dev.lateToWrite(); !late || !q.hopeful(pc) {
			pc.late = late
			pc.state.Store(pieceOut)
			q.start(pc)
			found = true
		}
	}
	return found
}

// look ends the waiting for copies that were given up, for those on late devices, and for any others that have left
// unanswered for long enough what another copy has answered. It sends what was held back if that has to be.
func (q *writeRequest) look(gen uint64, at int64) {
	if !q.begun(gen) {
		return
	}
	p := q.file.plane
	q.sendHeld()
	var left []*piece
	for _, pc := range q.pieces {
		if pc.state.Load() != pieceOut || !pc.data.forsaken.Load() && !q.overdue(pc, at) {
			continue
		}
		if pc.state.CompareAndSwap(pieceOut, pieceOrphaned) {
			q.orphan(pc, at)
			left = append(left, pc)
		}
	}
	next := p.lookAfter()
	if slices.ContainsFunc(q.pieces, func(pc *piece) bool { return pc.trial && pc.state.Load() == pieceOut }) {
		next = p.lookSoon()
	}
	p.watch.again(&q.request, at+next)
	q.mu.Unlock()
	if len(left) == 0 {
		q.drop()
		return
	}
	go func() { // ends when the caller has its memory back; not here, since a target on the same host may wait for a disk
		for _, pc := range left {
			if pc.buf == nil {
				pc.conn.Detach(&pc.op)
			}
			q.drop()
		}
		q.drop()
	}()
}

// overdue reports whether the request need not wait for pc any longer, as another copy has taken the same.
func (q *writeRequest) overdue(pc *piece, at int64) bool {
	stops := pc.conn.stopping()
	if (pc.alone == 0 || stops) && q.answered(pc) {
		pc.alone = at
	}
	if pc.alone == 0 || stops {
		return false
	}
	dev := pc.conn.dev
	if at-pc.alone >= dev.patience(at) {
		dev.foundLate(pc.op.File, pc.op.Off, pc.alone)
		return true
	}
	if !q.answeredInTime(pc) {
		return false
	}
	if pc.conn.refuses() {
		dev.foundLate(pc.op.File, pc.op.Off, at)
	}
	return dev.lateToWrite()
}

// answeredInTime reports whether a good copy has taken what pc is to write whose device was not late before. Of
// devices that all were, one may be back a little earlier than another.
func (q *writeRequest) answeredInTime(pc *piece) bool {
	for _, other := range q.pieces {
		if other != pc && other.op.Off == pc.op.Off && other.state.Load() == pieceEnded && other.writeResult() == nil &&
			!other.late && other.op.File.State == layout.CopyGood && !other.data.forsaken.Load() {
			return true
		}
	}
	return false
}

// answered reports whether another copy has taken what pc is to write.
func (q *writeRequest) answered(pc *piece) bool {
	for _, other := range q.pieces {
		if other != pc && other.op.Off == pc.op.Off && other.state.Load() == pieceEnded && other.writeResult() == nil {
			return true
		}
	}
	return false
}

// orphan sees to it that the range stays held until the piece has been answered or its copy is given up. If the piece
// has waited for long enough its device is stuck. mu is held.
func (q *writeRequest) orphan(pc *piece, at int64) {
	if q.orphans == nil {
		q.orphans = &orphans{file: q.file}
		q.orphans.count.Store(1) // the request's own
	}
	pc.group = q.orphans
	d := pc.data
	d.mu.Lock()
	defer d.mu.Unlock()
	if pc.over {
		return
	}
	dev := pc.conn.dev
	if pc.alone != 0 && at-pc.alone >= dev.patience(at) && dev.heardWrite.Load() <= pc.alone {
		known := dev.foundStuck()
		pc.stuck = true
		dev.stuck.Add(1)
		dev.stuckAt.Store(at)
		if !known {
			dev.found()
		}
	}
	if !d.forsaken.Load() {
		q.orphans.count.Add(1)
		d.orphans = append(d.orphans, pc)
	}
}

// orphanEnded is the end of a piece that its request no longer waits for.
func (pc *piece) orphanEnded() {
	d := pc.data
	d.mu.Lock()
	pc.over = true
	if pc.stuck {
		pc.conn.dev.stuck.Add(-1)
	}
	i := slices.Index(d.orphans, pc)
	if i >= 0 {
		d.orphans = slices.Delete(d.orphans, i, i+1)
	}
	d.mu.Unlock()
	if pc.buf != nil {
		pc.buf.Release()
	}
	if i >= 0 {
		pc.group.drop()
	}
}

// kept reports whether a good copy that was not given up was to take what is written at off.
func (q *writeRequest) kept(off int64) bool {
	return slices.ContainsFunc(q.pieces, func(pc *piece) bool {
		return pc.op.Off == off && pc.op.File.State == layout.CopyGood && !pc.data.forsaken.Load()
	})
}

func (q *writeRequest) finish() {
	q.mu.Lock()
	if p := q.file.plane; len(q.seg.Mirrors) > 1 {
		q.pending.Store(1)
		if q.sendHeld() {
			q.mu.Unlock()
			p.Flush()
			q.drop()
			return
		}
		q.pending.Store(0)
		p.watch.remove(&q.request)
	}
	q.tellSlowest()
	weak := false
	for _, pc := range q.pieces {
		if pc.data.forsaken.Load() {
			// Who asks for the copy is told that there is none; the others count.
			if !q.kept(pc.op.Off) {
				q.lacking = true
			}
			continue
		}
		err := ErrStuck
		if pc.state.Load() == pieceEnded {
			err = pc.writeResult()
		}
		if err != nil {
			e := opError(&pc.op, err)
			e.Mirrored = len(q.seg.Mirrors) > 1
			q.errs = append(q.errs, e)
			continue
		}
		switch {
		case pc.stableAsAsked():
			pc.data.supersede(pc)
		case pc.buf != nil || pc.op.Kept != 0:
			pc.data.retain(pc)
		default:
			weak = true
		}
	}
	if q.lacking {
		q.errs = append(q.errs, ErrForsaken)
	}
	if weak && len(q.errs) == 0 {
		q.mu.Unlock()
		// This goroutine owns the end of one write whose server answered less than it was asked; it ends with the reply to
		// its COMMITs.
		go q.stabilise()
		return
	}
	q.end(errors.Join(q.errs...))
}

// writeResult checks what the target answered.
func (pc *piece) writeResult() error {
	switch op := &pc.op; {
	case op.Err != nil:
		return op.Err
	case op.N != len(op.Data):
		return fmt.Errorf("%d bytes: %w", op.N, ErrReply)
	}
	return nil
}

// stableAsAsked reports whether the data is on stable storage as the op asked. Less than asked counts as unstable, as do
// values that are none (nfs3: RFC 1813 section 3.3.7 has three).
func (pc *piece) stableAsAsked() bool {
	got := pc.op.Committed
	return got >= max(pc.op.Stable, layout.DataSync) && got <= layout.FileSync
}

// stabilise commits pieces that have no retained copy and should have been stable at once. Should the server have lost
// them meanwhile, the write fails: it was not acknowledged.
func (q *writeRequest) stabilise() {
	var errs []error
	verifiers := map[*dataFile]layout.Verifier{}
	for _, pc := range q.pieces {
		if pc.buf != nil || pc.op.Kept != 0 || pc.state.Load() != pieceEnded || pc.stableAsAsked() {
			continue
		}
		verf, ok := verifiers[pc.data]
		if !ok {
			op := &layout.Op{Kind: layout.OpCommit, File: pc.op.File}
			if err := pc.conn.do(pc.data.ctx, op); err != nil {
				if pc.data.forsaken.Load() {
					continue
				}
				e := opError(op, err)
				e.Mirrored = len(q.seg.Mirrors) > 1
				errs = append(errs, e)
				continue
			}
			verf = op.Verifier
			verifiers[pc.data] = verf
		}
		if verf != pc.op.Verifier {
			errs = append(errs, opError(&pc.op, ErrNotStable))
			continue
		}
		pc.data.supersede(pc)
	}
	q.mu.Lock()
	q.end(errors.Join(errs...))
}

// cancel ends a write that has not begun.
func (q *writeRequest) cancel() {
	q.file.locks.abandon(q.file.plane, q.node)
	q.node = nil
	q.end(context.Canceled)
}

// end ends the write, giving its range free. mu is held; end releases it.
func (q *writeRequest) end(err error) {
	f, node, done, orphans, stray := q.file, q.node, q.done, q.orphans, q.stray
	q.clearRequest()
	q.node, q.done, q.buf, q.orphans, q.lacking, q.stray = nil, nil, nil, nil, false, false
	q.mu.Unlock()
	writeRequests.Put(q)
	switch {
	case orphans != nil:
		if node != nil {
			orphans.node = node
		}
		orphans.drop()
	case node != nil:
		f.locks.release(f.plane, node)
	}
	if stray {
		f.strays.add(-1)
	}
	if done != nil {
		done(err)
	}
}

// expire ends the write for its caller, although the outcome of some piece is not known. The range stays held until
// it is.
func (q *writeRequest) expire(gen uint64, err error) {
	q.mu.Lock()
	if q.gen != gen || q.done == nil {
		q.mu.Unlock()
		return
	}
	done := q.done
	q.done, q.slowest, q.stray = nil, nil, true
	q.file.strays.add(1)
	q.takeBack()
	done(err)
}
