package dataplane

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
)

// Write asks for Data to be written at Off of a file. It may be used again once Done was called.
type Write struct {
	Segment *layout.Segment
	Data    []byte // not changed; the plane's from StartWrite until Done was called or Detach has returned
	Off     int64
	// Stable is what Done without an error shall mean: layout.Unstable, that the data is at every mirror and the plane
	// keeps a copy until Commit has made it stable; anything else, that it is stable at every mirror.
	Stable layout.Stability
	// Done is called exactly once, from any goroutine, possibly before StartWrite returns. It must be short and must not
	// block.
	Done func(err error)

	req *writeRequest
	gen uint64
}

// StartWrite begins a write and returns at once. Writes of overlapping ranges are carried out in the order of their
// StartWrite, each after the end of the one before.
//
// Every mirror is written; the write fails if one fails, when all have answered. What the range holds is undefined then
// and may differ between mirrors until it is written anew.
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
	q.file, q.seg, q.data, q.off, q.stable, q.done = f, w.Segment, w.Data, w.Off, w.Stable, w.Done
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
	stable layout.Stability
	done   func(error)
	node   *rangeNode
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
			if p.connect(q.seg.Mirrors[m].Servers[q.units[i].Server].Device, ticket{q, gen}) == nil {
				q.mu.Unlock()
				return
			}
		}
	}
	q.running = true
	q.pending.Store(1)
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
		c := q.file.plane.device(q.seg.Mirrors[m].Servers[server].Device).conn.Load()
		_, wsize := c.Limits()
		size = min(size, wsize)
	}
	return max(size, 1)
}

// send starts one write at every mirror. Unstable data goes out from the copy that is retained, so that the caller's
// memory is free when the last server has answered and what is sent again later is what was sent before.
func (q *writeRequest) send(server int, off int64, data []byte) {
	p, stable := q.file.plane, q.stable
	var buf *iobuf.Buf
	if stable == layout.Unstable {
		if buf = p.retainBuffer(len(data)); buf != nil {
			copy(buf.Bytes(), data)
			data = buf.Bytes()
		} else {
			stable = layout.DataSync
		}
	}
	for m := range q.seg.Mirrors {
		df := &q.seg.Mirrors[m].Servers[server]
		pc := pieces.Get().(*piece)
		pc.conn = p.device(df.Device).conn.Load()
		pc.epoch = pc.conn.epoch()
		pc.data = q.file.dataFile(df)
		if buf != nil {
			buf.Ref()
			pc.buf = buf
		}
		pc.op.Kind, pc.op.File, pc.op.Off, pc.op.Data, pc.op.Stable = layout.OpWrite, df, off, data, stable
		q.add(pc)
	}
	if buf != nil {
		buf.Release()
	}
}

func (q *writeRequest) finish() {
	q.mu.Lock()
	weak := false
	for _, pc := range q.pieces {
		if err := pc.writeResult(); err != nil {
			q.errs = append(q.errs, opError(&pc.op, err))
			continue
		}
		switch {
		case pc.stableAsAsked():
			pc.data.supersede(pc)
		case pc.buf != nil:
			pc.data.retain(pc)
		default:
			weak = true
		}
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
		if pc.buf != nil || pc.stableAsAsked() {
			continue
		}
		verf, ok := verifiers[pc.data]
		if !ok {
			op := &layout.Op{Kind: layout.OpCommit, File: pc.op.File}
			if err := pc.conn.do(context.Background(), op); err != nil {
				errs = append(errs, opError(op, err))
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
	f, node, done := q.file, q.node, q.done
	q.clearRequest()
	q.node, q.done = nil, nil
	q.mu.Unlock()
	writeRequests.Put(q)
	if node != nil {
		f.locks.release(f.plane, node)
	}
	done(err)
}
