package dataplane

import (
	"sync"
	"sync/atomic"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
)

// piece is one request to one data server that is a part of a read or write.
type piece struct {
	op    layout.Op
	owner *request
	gen   uint64 // of owner
	conn  *conn
	began int64 // watch.now
	took  int64 // nanoseconds, once it has ended

	data  *dataFile
	epoch uint64 // of conn before the start

	buf  *iobuf.Buf // WRITE: holds op.Data, one reference; nil if that is the caller's memory
	base int64      // WRITE: offset in the file of buf's first byte

	// Of mirrored files.
	state atomic.Uint32 // pieceOut, ...
	late  bool          // WRITE: its device was late when it was sent
	trial bool          // WRITE: it was sent to see whether its device is still stuck
	stuck bool          // WRITE: it counts in device.stuck; guarded by data.mu
	group *orphans      // WRITE: once orphaned; guarded by data.mu
	over  bool          // WRITE: orphaned, and answered; guarded by data.mu
	// WRITE: when it was first seen that another copy had answered, or last that the server stops (watch.now); 0 = not
	// yet.
	alone int64

	mirrored bool   // READ: it counts in device.load
	mirror   int    // READ: which one was asked
	tried    uint64 // READ: those that were asked before, see readSpan
	hedge    atomic.Pointer[piece]
	of       *piece // READ: the piece that this one is a hedge of

	// READ of a data file in which something is retained, before the start:
	watch   bool // it overlaps retained data: wrong if the server restarts meanwhile
	suspect bool // some of that was in doubt then
}

var pieces = sync.Pool{New: func() any {
	pc := new(piece)
	pc.op.Done = pc.done
	pc.op.Overdue = pc.overdue
	return pc
}}

func (pc *piece) done(op *layout.Op) {
	dev := pc.conn.dev
	at := dev.plane.watch.now()
	dev.usage.ended(op, at-pc.began)
	dev.hear(op, at, at-pc.began)
	if !pc.state.CompareAndSwap(pieceOut, pieceEnded) {
		pc.orphanEnded()
		return
	}
	pc.took = at - pc.began
	if pc.mirrored {
		pc.timed(at)
	}
	// Once the count is down the piece may be in use elsewhere.
	q := pc.owner
	q.drop()
}

// overdue ends the write for its caller, unless that has ended without the piece.
func (pc *piece) overdue(op *layout.Op, err error) {
	if w, ok := pc.owner.kind.(*writeRequest); ok {
		go w.expire(pc.gen, opError(op, err)) // ends at once; not here, with the target's locks
	}
}

func (pc *piece) free() {
	if pc.state.Load() == pieceOrphaned {
		return // it is still at the target; nobody uses it again
	}
	if pc.buf != nil {
		pc.buf.Release()
	}
	hedge, scratch := pc.of != nil, pc.op.Data
	*pc = piece{op: layout.Op{Done: pc.op.Done, Overdue: pc.op.Overdue}}
	pieces.Put(pc)
	if hedge {
		putScratch(scratch)
	}
}

// end is the first byte after the piece, in the file.
func (pc *piece) end() int64 { return pc.op.Off + int64(len(pc.op.Data)) }

// request is what reads and writes have in common. It is recycled: gen tells its users apart.
//
// The caller's memory is touched only between begin and the end of the last piece, or with mu held after looking at
// detached. Completions take no lock: they count pending down and whoever brings it to zero runs finish.
type request struct {
	file    *File
	seg     *layout.Segment
	data    []byte // the caller's
	off     int64
	kind    finisher
	slowest *Slowest // nil: nobody wants to know

	mu       sync.Mutex
	gen      uint64 // increased when the request ends
	running  bool   // pieces were started and finish has not run; otherwise the request waits for something
	detached bool   // the caller wants its memory back: fail rather than touch it again
	pieces   []*piece
	units    []layout.Piece // scratch of begin
	errs     []error

	pending atomic.Int32

	// Of mirrored files, guarded by watch.mu.
	watched       bool
	due           int64 // when it is to be looked at (watch.now)
	before, after *request
}

// finisher is a read or a write.
type finisher interface {
	waiter
	// finish is called when all pieces have ended.
	finish()
	// look sees whether a request with this gen waits for copies in vain. It is called by watch, at the time at.
	look(gen uint64, at int64)
	// cancel ends a request that waits, because it was detached. mu is held; cancel releases it.
	cancel()
}

// mayLeave reports whether the request may end while a data server has not answered: there are other copies, or the
// mount is soft.
func (q *request) mayLeave() bool {
	return len(q.seg.Mirrors) > 1 || q.file.plane.cfg.Patience.Time > 0
}

// add appends a piece and starts it. mu is held, and a count of pending.
func (q *request) add(pc *piece) {
	pc.owner, pc.gen = q, q.gen
	q.pieces = append(q.pieces, pc)
	q.start(pc)
}

// start starts a piece. mu is held, and a count of pending.
func (q *request) start(pc *piece) {
	dev := pc.conn.dev
	pc.began = dev.plane.watch.now()
	if dev.known.Load() == nil && pc.op.File.Generation == 0 { // what is where on a namespace changes
		dev.known.Store(pc.op.File)
	}
	// A hedge has others that may detach it.
	if pc.conn.quick != nil && pc.of == nil && pc.conn.quick(&pc.op) {
		at := dev.plane.watch.now()
		dev.usage.took(&pc.op, at-pc.began)
		dev.hear(&pc.op, at, at-pc.began)
		pc.took = at - pc.began
		pc.state.Store(pieceEnded)
		if pc.mirrored {
			pc.timed(at)
		}
		return
	}
	dev.usage.outstanding.Add(1)
	q.pending.Add(1)
	pc.conn.start(&pc.op)
}

// drop takes one count off.
func (q *request) drop() {
	if q.pending.Add(-1) == 0 {
		q.kind.finish()
	}
}

// hold adds a count unless finish is due already.
func (q *request) hold() bool {
	for {
		n := q.pending.Load()
		if n == 0 {
			return false
		}
		if q.pending.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// detach takes the caller's memory away from the request, if it is still the one with this gen.
func (q *request) detach(gen uint64) {
	q.mu.Lock()
	if q.gen != gen {
		q.mu.Unlock()
		return
	}
	if !q.running {
		q.kind.cancel()
		return
	}
	q.takeBack()
}

// takeBack takes the caller's memory from a request that is running. mu is held; takeBack releases it.
func (q *request) takeBack() {
	q.detached = true
	held := q.hold() // keeps finish away, and with it whatever changes the pieces
	all := q.pieces  // none is added any more, nor is one sent that was held back and has the caller's memory
	q.mu.Unlock()
	if !held {
		return
	}
	for _, pc := range all {
		if pc.buf == nil && pc.state.Load() != pieceHeld {
			pc.conn.Detach(&pc.op)
		}
	}
	q.drop()
}

// freePieces recycles the pieces. mu is held.
func (q *request) freePieces() {
	for i, pc := range q.pieces {
		pc.free()
		q.pieces[i] = nil
	}
	q.pieces = q.pieces[:0]
}

// clearRequest makes the request as new but for its generation and the memory of its slices. mu is held.
func (q *request) clearRequest() {
	q.gen++
	q.freePieces()
	clear(q.units)
	clear(q.errs)
	q.file, q.seg, q.data, q.off, q.slowest = nil, nil, nil, 0, nil
	q.running, q.detached = false, false
	q.units, q.errs = q.units[:0], q.errs[:0]
}
