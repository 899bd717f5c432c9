package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/weftfs/weft/layout"
)

// Read asks for the bytes [Off, Off+len(Buf)) of a file. It may be used again once Done was called.
type Read struct {
	Segment *layout.Segment
	Buf     []byte // the plane's from StartRead until Done was called or Detach has returned
	Off     int64
	// Done is called exactly once, from any goroutine, possibly before StartRead returns. It must be short and must not
	// block. n is len(Buf) or, if err is set, 0 with arbitrary contents of Buf.
	Done func(n int, err error)

	req *readRequest
	gen uint64
}

// StartRead begins a read and returns at once. What the data files do not have, being holes or shorter, reads as zeros:
// the caller has clipped the range to the size of the file.
//
// The mirror with the highest efficiency is asked, equal ones in turn; what fails there is asked from the next.
func (f *File) StartRead(r *Read) {
	if len(r.Buf) == 0 {
		r.Done(0, nil)
		return
	}
	if r.Off < 0 || !r.Segment.Contains(r.Off, int64(len(r.Buf))) {
		r.Done(0, fmt.Errorf("read of %d bytes at %d in %v: %w", len(r.Buf), r.Off, r.Segment.Range, layout.ErrBeyondSegment))
		return
	}
	q := readRequests.Get().(*readRequest)
	q.mu.Lock()
	q.file, q.seg, q.data, q.off, q.done = f, r.Segment, r.Buf, r.Off, r.Done
	q.turn = int(f.plane.turn.Add(1) & math.MaxInt32)
	q.todo = append(q.todo, span{r.Off, r.Off + int64(len(r.Buf))})
	r.req, r.gen = q, q.gen
	q.begin()
}

// Detach gives Buf back early: when it returns nothing writes to Buf any more. The read ends with context.Canceled
// unless it was over; Done is called as ever, before or after. Detach may be called any number of times after StartRead
// has returned, also when the read has ended, as long as r was not used for another read.
func (r *Read) Detach() {
	if r.req != nil {
		r.req.detach(r.gen)
	}
}

// span is the bytes [off, end) of a file.
type span struct{ off, end int64 }

// readRequest is the state of a Read.
type readRequest struct {
	request
	done    func(n int, err error)
	turn    int    // decides between equal mirrors
	attempt int    // mirrors tried
	todo    []span // what is to be read in this attempt
	doubts  []*dataFile
	settles int    // how often doubts were settled
	stop    func() // ends settling
}

var readRequests = sync.Pool{New: func() any {
	q := new(readRequest)
	q.kind = q
	return q
}}

func (q *readRequest) resume(gen uint64, err error) {
	q.mu.Lock()
	if q.gen != gen {
		q.mu.Unlock()
		return
	}
	if err != nil {
		q.errs = append(q.errs, err)
		q.attempt++
	}
	q.begin()
}

// begin starts the pieces for what is to do, or puts the request aside until it can. mu is held; begin releases it.
func (q *readRequest) begin() {
	if q.attempt == len(q.seg.Mirrors) {
		q.end(errors.Join(q.errs...))
		return
	}
	p, gen := q.file.plane, q.gen
	mirror := &q.seg.Mirrors[q.pickMirror()]
	var err error
	q.units = q.units[:0]
	for _, s := range q.todo {
		if q.units, err = q.seg.Split(q.units, q.data[s.off-q.off:s.end-q.off], s.off, math.MaxInt); err != nil {
			q.end(err)
			return
		}
	}
	for i := range q.units {
		if p.connect(mirror.Servers[q.units[i].Server].Device, ticket{q, gen}) == nil {
			q.mu.Unlock()
			return
		}
	}
	q.running = true
	q.pending.Store(1)
	for i := range q.units {
		u := &q.units[i]
		df := &mirror.Servers[u.Server]
		c := p.device(df.Device).conn.Load()
		rsize, _ := c.Limits()
		for off, data := u.Off, u.Data; len(data) > 0; {
			n := min(len(data), max(rsize, 1))
			pc := pieces.Get().(*piece)
			pc.conn = c
			pc.op.Kind, pc.op.File, pc.op.Off, pc.op.Data = layout.OpRead, df, off, data[:n:n]
			q.watchRetained(pc)
			q.add(pc)
			data, off = data[n:], off+int64(n)
		}
	}
	q.mu.Unlock()
	q.drop()
}

// pickMirror chooses the mirror for this attempt: in the order of efficiency, where equal ones begin with the turn's.
func (q *readRequest) pickMirror() int {
	mirrors := q.seg.Mirrors
	if len(mirrors) == 1 {
		return 0
	}
	best, equals := uint64(0), 0
	for i := range mirrors {
		switch e := mirrors[i].Efficiency(); {
		case equals == 0 || e > best:
			best, equals = e, 1
		case e == best:
			equals++
		}
	}
	if q.attempt < equals {
		skip := (q.turn + q.attempt) % equals
		for i := range mirrors {
			if mirrors[i].Efficiency() == best {
				if skip == 0 {
					return i
				}
				skip--
			}
		}
	}
	return mirrorOrder(q.seg)[q.attempt]
}

func (q *readRequest) finish() {
	q.mu.Lock()
	q.running = false
	if q.detached {
		q.end(context.Canceled)
		return
	}
	q.todo = q.todo[:0]
	for _, pc := range q.pieces {
		if err := pc.readResult(); err != nil {
			q.errs = append(q.errs, opError(&pc.op, err))
			q.todo = append(q.todo, span{pc.op.Off, pc.end()})
			continue
		}
		clear(pc.op.Data[pc.op.N:])
		if pc.data != nil {
			q.checkRetained(pc)
		}
	}
	q.freePieces()
	switch {
	case len(q.todo) > 0:
		// A mirror failed: the rest of this request is no longer on the fast path.
		q.attempt++
		q.file.plane.later(ticket{q, q.gen})
		q.mu.Unlock()
	case len(q.doubts) > 0:
		q.settle()
	default:
		q.end(nil)
	}
}

// watchRetained notes, before a piece is started, what is known of unstable data it overlaps.
func (q *readRequest) watchRetained(pc *piece) {
	if q.file.unstable.Load() == 0 {
		return
	}
	if pc.data = q.file.lookup(pc.op.File); pc.data != nil {
		pc.epoch = pc.conn.epoch()
		pc.watch, pc.suspect = pc.data.examine(pc.op.Off, pc.end(), pc.epoch)
	}
}

// checkRetained decides whether what a piece has read can be believed. It cannot if the server may have been without
// data that was acknowledged before the read: before the start, at the end, or, the epoch having changed, in
// between. Then all that is in doubt is settled first and the read repeated; once that has been tried in vain, the
// retained bytes count. mu is held.
func (q *readRequest) checkRetained(pc *piece) {
	epoch := pc.conn.epoch()
	_, doubt := pc.data.examine(pc.op.Off, pc.end(), epoch)
	switch {
	case !doubt && !pc.suspect && !(pc.watch && pc.epoch != epoch):
	case q.settles == maxSettles:
		pc.data.overlay(pc.op.Data, pc.op.Off, epoch)
	case !slices.Contains(q.doubts, pc.data):
		q.doubts = append(q.doubts, pc.data)
	}
}

// maxSettles bounds how often one read is repeated because of restarts.
const maxSettles = 4

// settle commits the data files in doubt, which sends again what was lost, and then reads everything anew. mu is held;
// settle releases it.
func (q *readRequest) settle() {
	ctx, stop := context.WithCancel(context.Background())
	f, gen, doubts := q.file, q.gen, slices.Clone(q.doubts)
	q.doubts = q.doubts[:0]
	q.todo = append(q.todo, span{q.off, q.off + int64(len(q.data))})
	q.attempt, q.errs, q.stop = 0, q.errs[:0], stop
	q.settles++
	q.mu.Unlock()
	// This goroutine owns the settling for one read; it ends when the servers have answered or the read is detached.
	go func() {
		defer stop()
		var err error
		for _, d := range doubts {
			err = errors.Join(err, f.settle(ctx, d))
		}
		q.mu.Lock()
		if q.gen != gen {
			q.mu.Unlock()
			return
		}
		if err != nil {
			// What could not be settled stays retained; the next Commit meets the failure again and reports it.
			q.settles = maxSettles
		}
		q.begin()
		f.plane.Flush()
	}()
}

func (q *readRequest) cancel() { q.end(context.Canceled) }

// end ends the read. mu is held; end releases it.
func (q *readRequest) end(err error) {
	done, n := q.done, len(q.data)
	if q.stop != nil {
		q.stop()
	}
	q.clearRequest()
	clear(q.doubts)
	q.done, q.stop, q.attempt, q.settles = nil, nil, 0, 0
	q.todo, q.doubts = q.todo[:0], q.doubts[:0]
	q.mu.Unlock()
	readRequests.Put(q)
	if err != nil {
		n = 0
	}
	done(n, err)
}

// readResult checks what the target answered.
func (pc *piece) readResult() error {
	switch op := &pc.op; {
	case op.Err != nil:
		return op.Err
	case op.N < 0 || op.N > len(op.Data):
		return fmt.Errorf("%d bytes: %w", op.N, ErrReply)
	case op.N < len(op.Data) && !op.EOF:
		return fmt.Errorf("%d bytes and no end of file: %w", op.N, io.ErrUnexpectedEOF)
	}
	return nil
}
