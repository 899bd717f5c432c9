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
	Slowest *Slowest // nil, or is told before Done
	// Done is called exactly once, from any goroutine, possibly before StartRead returns. It must be short and must not
	// block. n is len(Buf) or, if err is set, 0 with arbitrary contents of Buf.
	Done func(n int, err error)

	req *readRequest
	gen uint64
}

// StartRead begins a read and returns at once. What the data files do not have, being holes or shorter, reads as zeros:
// the caller has clipped the range to the size of the file.
//
// Of the copies that may be read the one that will probably answer first is asked (see load.cost), equal ones in turn; what
// fails there is asked from the next, what is late also from another (see hedgeBudget).
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
	q.file, q.seg, q.data, q.off, q.done, q.slowest = f, r.Segment, r.Buf, r.Off, r.Done, r.Slowest
	q.turn = int(f.plane.turn.Add(1) & math.MaxInt32)
	q.todo = append(q.todo, readSpan{r.Off, r.Off + int64(len(r.Buf)), 0})
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

// readSpan is a span that was asked of some mirrors before: bit m of tried is that of mirror m. Mirrors that have no bit
// are not asked.
type readSpan struct {
	off, end int64
	tried    uint64
}

const maxTried = 64

// readRequest is the state of a Read.
type readRequest struct {
	request
	done    func(n int, err error)
	turn    int               // decides between equal mirrors
	todo    []readSpan        // what is to be read in this attempt
	chosen  []readChoice      // scratch of begin
	dialled layout.DeviceID   // what the request waits for, if it does
	avoid   []layout.DeviceID // devices that could not be dialled
	doubts  []*dataFile
	silent  []silence
	settles int    // how often doubts were settled
	stop    func() // ends settling
}

// silence is a request that was left because its device had not answered it since then.
type silence struct {
	dev   *device
	df    *layout.DataFile
	off   int64
	since int64 // watch.now
}

// readChoice goes with a unit.
type readChoice struct {
	mirror int
	tried  uint64
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
		q.avoid = append(q.avoid, q.dialled)
	}
	q.begin()
}

// begin starts the pieces for what is to do, or puts the request aside until it can. mu is held; begin releases it.
func (q *readRequest) begin() {
	p, gen := q.file.plane, q.gen
	q.units, q.chosen = q.units[:0], q.chosen[:0]
	for _, s := range q.todo {
		before := len(q.units)
		var err error
		if q.units, err = q.seg.Split(q.units, q.data[s.off-q.off:s.end-q.off], s.off, math.MaxInt); err != nil {
			q.end(err)
			return
		}
		for i := before; i < len(q.units); i++ {
			u := &q.units[i]
			m := q.pick(u.Server, s.tried, len(u.Data))
			if m < 0 && len(q.doubts) > 0 {
				q.settle()
				return
			}
			if m < 0 {
				if len(q.errs) == 0 {
					q.errs = append(q.errs, ErrForsaken)
				}
				q.end(errors.Join(q.errs...))
				return
			}
			q.chosen = append(q.chosen, readChoice{m, s.tried})
		}
	}
	for i := range q.units {
		q.dialled = q.seg.Mirrors[q.chosen[i].mirror].Servers[q.units[i].Server].Device
		if p.connect(q.dialled, ticket{q, gen}) == nil {
			q.mu.Unlock()
			return
		}
	}
	q.running = true
	q.pending.Store(1)
	mirrored := len(q.seg.Mirrors) > 1
	due := int64(math.MaxInt64)
	if mirrored {
		p.watch.add(&q.request, due)
	}
	for i := range q.units {
		u := &q.units[i]
		df := &q.seg.Mirrors[q.chosen[i].mirror].Servers[u.Server]
		c := p.device(df.Device).conn.Load()
		rsize, _ := c.Limits()
		for off, data := u.Off, u.Data; len(data) > 0; {
			n := min(len(data), max(rsize, 1))
			pc := q.piece(c, df, off, data[:n:n])
			pc.mirror, pc.tried = q.chosen[i].mirror, q.chosen[i].tried
			if mirrored {
				p.hedges.earn()
				pc.begin()
			}
			q.add(pc)
			if mirrored {
				due = min(due, pc.began+c.dev.load.late())
			}
			data, off = data[n:], off+int64(n)
		}
	}
	if mirrored {
		p.watch.again(&q.request, due)
	}
	q.mu.Unlock()
	q.drop()
}

// piece makes a request for a part of the file.
func (q *readRequest) piece(c *conn, df *layout.DataFile, off int64, data []byte) *piece {
	pc := pieces.Get().(*piece)
	pc.conn = c
	pc.op.Kind, pc.op.File, pc.op.Off, pc.op.Data = layout.OpRead, df, off, data
	pc.op.Leave = q.mayLeave()
	q.watchRetained(pc)
	return pc
}

// pick chooses the copy of a column that n bytes are read from, -1 if there is none that was not tried. One of the
// most efficient of those that are left, in turn, is compared with one of the others, also in turn, see load.cost.
// One on a late device is chosen if there are no others.
func (q *readRequest) pick(server int, tried uint64, n int) int {
	mirrors := q.seg.Mirrors
	if len(mirrors) == 1 && tried == 0 && len(q.avoid) == 0 && q.file.readable(&mirrors[0].Servers[server]) {
		return 0
	}
	late := q.late(server)
	if m := q.pickFrom(server, tried|late, n); m >= 0 || late == 0 {
		return m
	}
	return q.pickFrom(server, tried, n)
}

// late has a bit for each copy of a column that is on a late device, or one that stops.
func (q *readRequest) late(server int) (late uint64) {
	for m := range min(len(q.seg.Mirrors), maxTried) {
		df := &q.seg.Mirrors[m].Servers[server]
		if df.State == layout.CopyStale {
			continue // it may be on no device at all
		}
		d := q.file.plane.device(df.Device)
		if c := d.conn.Load(); d.late() || c != nil && c.stopping() {
			late |= 1 << m
		}
	}
	return late
}

// pickFrom is pick without regard to late devices.
func (q *readRequest) pickFrom(server int, tried uint64, n int) int {
	mirrors := q.seg.Mirrors
	count, equals, best := 0, 0, uint32(0)
	for m := range mirrors {
		if !q.usable(m, server, tried) {
			continue
		}
		count++
		switch e := q.efficiency(m, server); {
		case equals == 0 || e > best:
			best, equals = e, 1
		case e == best:
			equals++
		}
	}
	if count == 0 {
		return -1
	}
	a := q.nth(q.turn%equals, server, tried, best)
	if a < 0 { // a server is no longer near
		a = q.nth(0, server, tried, 0)
	}
	if count == 1 || a < 0 {
		return a
	}
	b := q.nth((q.turn/equals)%(count-1), server, tried|1<<a, 0)
	if b >= 0 && q.cost(b, server, n)*clearly < q.cost(a, server, n) {
		return b
	}
	return a
}

// clearly is how many times the cost of the one must be that of the other for the other to be chosen.
const clearly = 1.5

// nth finds the usable copy number k of those that have at least this efficiency.
func (q *readRequest) nth(k, server int, tried uint64, efficiency uint32) int {
	for m := range q.seg.Mirrors {
		if !q.usable(m, server, tried) || q.efficiency(m, server) < efficiency {
			continue
		}
		if k == 0 {
			return m
		}
		k--
	}
	return -1
}

// usable reports whether a copy may be asked. mu is held.
func (q *readRequest) usable(mirror, server int, tried uint64) bool {
	df := &q.seg.Mirrors[mirror].Servers[server]
	return mirror < maxTried && tried&(1<<mirror) == 0 && q.file.readable(df) &&
		(len(q.avoid) == 0 || !slices.Contains(q.avoid, df.Device))
}

func (q *readRequest) cost(mirror, server, n int) float64 {
	df := &q.seg.Mirrors[mirror].Servers[server]
	p := q.file.plane
	return p.device(df.Device).load.cost(n, q.efficiency(mirror, server), p.watch.now())
}

// efficiency is that of a copy, the greatest if it is near.
func (q *readRequest) efficiency(mirror, server int) uint32 {
	df := &q.seg.Mirrors[mirror].Servers[server]
	if c := q.file.plane.device(df.Device).conn.Load(); c != nil && c.near() {
		return math.MaxUint32
	}
	return df.Efficiency
}

// look asks another copy for what is late (a hedge), as far as the budget allows. It ends the waiting for a copy that
// was given up, is on a late device or one that stops, or has not answered for Config.MirrorTimeout, if there is
// another one that was not asked and is not on such a device. If that one is, it is asked as well.
func (q *readRequest) look(gen uint64, at int64) {
	if !q.begun(gen) {
		return
	}
	p := q.file.plane
	due := int64(math.MaxInt64)
	var left []*piece
	if !q.detached {
		for _, pc := range q.pieces { // the hedges that are added meanwhile need no look
			if pc.of != nil || pc.state.Load() != pieceOut {
				continue
			}
			server := q.seg.ServerAt(pc.op.Off)
			tried := pc.tried | 1<<pc.mirror
			h := pc.hedge.Load()
			if h != nil {
				tried |= 1 << h.mirror
			}
			stuck := pc.began + int64(p.cfg.MirrorTimeout)
			late := pc.began + pc.conn.dev.load.late()
			switch {
			case !q.file.readable(pc.op.File) || at >= stuck || pc.conn.dev.late() || pc.conn.refuses() || pc.conn.stopping():
				m := q.pick(server, tried, len(pc.op.Data))
				switch {
				case m >= 0 && (q.late(server)&(1<<m) == 0 || !q.file.readable(pc.op.File)):
					left = append(left, pc)
				case m >= 0 && h == nil:
					q.startHedge(pc, m, server)
				}
				stuck = at + int64(p.cfg.MirrorTimeout)
			case h == nil && at >= late:
				if m := q.pick(server, tried, len(pc.op.Data)); m >= 0 && p.hedges.spend() {
					q.startHedge(pc, m, server)
				}
			case h == nil:
				stuck = late
			}
			due = min(due, stuck, at+p.lookAfter())
		}
	}
	p.watch.again(&q.request, due)
	q.mu.Unlock()
	if len(left) == 0 {
		q.drop()
		return
	}
	go func() { // ends when nobody reads into their memory; not here, since a target on the same host may wait for a disk
		for _, pc := range left {
			pc.conn.Detach(&pc.op)
			if h := pc.hedge.Load(); h != nil {
				h.conn.Detach(&h.op)
			}
		}
		q.drop()
	}()
}

// startHedge asks another mirror for what pc was to read. mu is held, and a count of pending.
func (q *readRequest) startHedge(pc *piece, mirror, server int) {
	df := &q.seg.Mirrors[mirror].Servers[server]
	c := q.file.plane.device(df.Device).conn.Load()
	if c == nil {
		return
	}
	if rsize, _ := c.Limits(); rsize < len(pc.op.Data) {
		return
	}
	h := q.piece(c, df, pc.op.Off, getScratch(len(pc.op.Data)))
	h.mirror, h.of = mirror, pc
	h.begin()
	pc.hedge.Store(h)
	q.add(h)
	if pc.state.Load() != pieceOut && pc.op.Err == nil { // it has ended meanwhile, and well
		q.pending.Add(1)
		go func() { // ends when nobody reads into the hedge's memory; not here, see timed
			c.Detach(&h.op)
			q.drop()
		}()
	}
}

func (q *readRequest) finish() {
	p := q.file.plane
	if len(q.seg.Mirrors) > 1 {
		p.watch.remove(&q.request)
	}
	q.mu.Lock()
	q.tellSlowest()
	q.running = false
	if q.detached {
		q.end(context.Canceled)
		return
	}
	q.todo = q.todo[:0]
	for _, pc := range q.pieces {
		if pc.of != nil {
			continue
		}
		got, err := pc, pc.readResult()
		tried := pc.tried | 1<<pc.mirror
		if h := pc.hedge.Load(); h != nil {
			tried |= 1 << h.mirror
			if hedged := h.readResult(); err != nil && hedged == nil {
				copy(pc.op.Data, h.op.Data[:h.op.N])
				got, err = h, nil
			} else if err != nil {
				q.errs = append(q.errs, opError(&h.op, hedged))
			}
		}
		if err != nil {
			if errors.Is(err, ErrStuck) {
				q.silent = append(q.silent, silence{pc.conn.dev, pc.op.File, pc.op.Off, pc.began})
			}
			q.errs = append(q.errs, opError(&pc.op, err))
			q.todo = append(q.todo, readSpan{pc.op.Off, pc.end(), tried})
			continue
		}
		clear(pc.op.Data[got.op.N:])
		if got.data != nil && q.doubtful(got) {
			if q.settles == maxSettles {
				got.data.overlay(pc.op.Data, pc.op.Off, got.conn.epoch())
				continue
			}
			// Another copy may be beyond doubt; if none is, begin has them settled.
			q.todo = append(q.todo, readSpan{pc.op.Off, pc.end(), tried})
			if !slices.Contains(q.doubts, got.data) {
				q.doubts = append(q.doubts, got.data)
			}
		}
	}
	q.freePieces()
	if len(q.todo) == 0 {
		for _, s := range q.silent {
			s.dev.foundLate(s.df, s.off, s.since)
		}
		found := len(q.silent) > 0
		q.end(nil)
		if found {
			p.Flush()
		}
		return
	}
	// The rest of this request is no longer on the fast path.
	p.later(ticket{q, q.gen})
	q.mu.Unlock()
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

// doubtful decides whether what a piece has read cannot be believed: the server may have been without data that was
// acknowledged before the read, before the start, at the end, or, the epoch having changed, in between. Then another copy is
// asked, or all that is in doubt is settled first and the read repeated; once that has been tried in vain, the retained bytes
// count. mu is held.
func (q *readRequest) doubtful(pc *piece) bool {
	epoch := pc.conn.epoch()
	_, doubt := pc.data.examine(pc.op.Off, pc.end(), epoch)
	return doubt || pc.suspect || pc.watch && pc.epoch != epoch
}

// maxSettles bounds how often one read is repeated because of restarts.
const maxSettles = 4

// settle commits the data files in doubt, which sends again what was lost, and then reads everything anew. mu is held;
// settle releases it.
func (q *readRequest) settle() {
	ctx, stop := context.WithCancel(context.Background())
	f, gen, doubts := q.file, q.gen, slices.Clone(q.doubts)
	q.doubts = q.doubts[:0]
	q.todo = append(q.todo[:0], readSpan{q.off, q.off + int64(len(q.data)), 0})
	q.errs, q.stop = q.errs[:0], stop
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
	clear(q.silent)
	q.done, q.stop, q.settles = nil, nil, 0
	q.todo, q.doubts, q.avoid = q.todo[:0], q.doubts[:0], q.avoid[:0]
	q.silent = q.silent[:0]
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
	case errors.Is(op.Err, context.Canceled):
		return ErrStuck // the request was not detached
	case op.Err != nil:
		return op.Err
	case op.N < 0 || op.N > len(op.Data):
		return fmt.Errorf("%d bytes: %w", op.N, ErrReply)
	case op.N < len(op.Data) && !op.EOF:
		return fmt.Errorf("%d bytes and no end of file: %w", op.N, io.ErrUnexpectedEOF)
	}
	return nil
}
