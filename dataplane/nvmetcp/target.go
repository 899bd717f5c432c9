package nvmetcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Space is what a [Target] needs of the namespace that its data files lie on.
type Space interface {
	Start(*Request)
	Flush()
	Detach(*Request)
	Withdraw(*Request)
	Format() Format
	// Lost is a number that rises whenever what was written and not flushed may have been lost, before the first answer that
	// shows it.
	Lost() uint64
}

// Target carries requests for data files whose bytes are extents of one namespace (see layout.DataFile). It is a
// dataplane.Target, Epocher, Sparser and Validator.
//
// # Extents
//
// An Op goes by the extents of its own DataFile. What is in no extent, or in a hole, reads as zeros without I/O; a write there, or to an
// extent that is for reading, fails with a [*LayoutError] before anything is sent. An INVALID extent reads as zeros
// without I/O but for those of its blocks that this Target has written: which these are is kept for each data file
// (type written), and only they are ever read, so that what the device held before is seen by nobody. So does a hole, as which a
// layout for reading may show INVALID extents (RFC 8154 section 2.3), though those of our service do not. Data files have no end here: EOF is never told.
//
// An Op becomes one command for each part that lies together, cut to what the namespace takes, straight from and to
// Op.Data. A block at its beginning or end of which it has only some is a command of its own, as a block is what a namespace
// reads and writes at once, with memory of its own. To write to such a block is to read it (an INVALID block that was not
// written is zeros), to change it and to write it, under a lock that others wait for who have some of the same block. It is
// no lock for those who have all of it: requests that overlap are put in order by whoever starts them, as the data
// plane does.
//
// # Stability
//
// Without a volatile write cache all that was written is FILE_SYNC. Otherwise a write is UNSTABLE, or goes out with FUA if more
// is asked for. COMMIT is one Flush for all data files: those that come while one is under way share the next. The verifier
// and the epoch are Space.Lost and the number of Flushes that failed, for these may have thrown away anything.
// What was written to INVALID blocks and is lost so counts as not written: the block may hold anything.
//
// # What was written
//
// The service has to be told which INVALID blocks were written, once they are stable (Written), and when it has made them
// valid that is noted (Validated). They are remembered nevertheless, since older segments may still be used that
// call them INVALID, until whoever uses the segments says that this is over (Forget), the file is cut, or its generation
// changes. A newer generation makes all that is known of older ones void, written or not, and requests with an older one
// fail with a LayoutError. A data file of which nothing is known and for which no request is under way takes up no memory.
//
// # Locks
//
// operation.mu comes before Target.mu. Neither is held while a Done runs or Space.Detach; Space.Start and Space.Withdraw are called with the
// first, so that whoever stops an operation finds either that a command was started or that it is not going to be.
type Target struct {
	space    Space
	format   Format
	block    int64
	most     int64 // bytes of one command that reads or writes
	failures atomic.Uint64
	noZeroes atomic.Bool // the controller has no Write Zeroes
	resting  atomic.Int32
	waiting  atomic.Int32 // len(commits)

	operations, parts sync.Pool

	mu     sync.Mutex
	closed bool
	live   *operation   // not answered
	rest   []*operation // ended without I/O: answered by the next Flush
	ending bool         // somebody is busy with rest
	files  map[string]*written
	fresh  map[*written]struct{} // that have something unstable
	lost   uint64                // as of the last look; what was unstable before is forgotten
	locks  map[int64]*part       // who has the block at this address

	commits  []*operation // wait for the next Flush
	flushing []*operation // wait for the one under way
	busy     bool         // one is under way
	begun    uint64       // counts them
	flush    Request
}

// maxOp is the largest read and write that may be started, in bytes.
const maxOp = 4 << 20

// older is why a LayoutError came about whose extents are too old.
const older = "its extents are of an earlier generation"

var (
	errTargetClosed = errors.New("nvmetcp: target is closed")
	errForsaken     = errors.New("nvmetcp: the copy was given up")
)

// NewTarget makes a target for data files on a namespace. It does no I/O. The Space stays the caller's, who closes it after
// the Target.
func NewTarget(space Space) (*Target, error) {
	f := space.Format()
	if f.BlockSize < layout.MinBlock || f.BlockSize&(f.BlockSize-1) != 0 || f.MaxTransfer < f.BlockSize || f.MaxBlocks < 1 {
		return nil, fmt.Errorf("nvmetcp: a namespace with blocks of %d bytes, %d bytes and %d blocks in one command, cannot have data files", f.BlockSize, f.MaxTransfer, f.MaxBlocks)
	}
	t := &Target{
		space: space, format: f, block: int64(f.BlockSize),
		most:  min(int64(f.MaxTransfer/f.BlockSize), int64(f.MaxBlocks)) * int64(f.BlockSize),
		files: map[string]*written{}, fresh: map[*written]struct{}{}, locks: map[int64]*part{},
	}
	t.lost = t.Epoch()
	t.operations.New = func() any { return &operation{t: t} }
	t.parts.New = func() any {
		p := new(part)
		p.req.Done = p.done
		return p
	}
	t.flush.Done = t.flushed
	return t, nil
}

// Limits implements dataplane.Target.
func (t *Target) Limits() (rsize, wsize int) { return maxOp, maxOp }

// Epoch implements dataplane.Epocher.
func (t *Target) Epoch() uint64 {
	if !t.format.Cached {
		return 0
	}
	return t.space.Lost() + t.failures.Load()
}

// opKind is what an operation does: what layout.OpKind has, and zeroing.
type opKind = layout.OpKind

const opZero opKind = math.MaxUint8

// operation is an Op at the target. It is recycled when the last of its parts has ended; op is nil from when it was answered.
type operation struct {
	t       *Target
	kind    opKind
	off     int64
	end     int64
	fua     bool
	lost    uint64       // Target.lost when it was begun
	pending atomic.Int32 // parts that have not ended, and holds
	known   *written     // of the data file, if it has INVALID blocks in the range
	doubt   bool         // READ: what is read counts only if nothing was lost meanwhile; zeroing: Write Zeroes is used

	mu         sync.Mutex
	op         *layout.Op
	generation uint64 // of op.File
	data       []byte
	err        error
	detached   bool          // data is not ours any more
	stop       error         // why nothing is begun any more
	over       chan struct{} // closed when it has ended, if somebody waits for that
	parts      []*part
	gaps       [][]byte // READ: of data, that are zeros

	prev, next *operation // guarded by Target.mu
}

// Start implements dataplane.Target.
func (t *Target) Start(op *layout.Op) {
	op.N, op.EOF, op.Committed, op.Verifier, op.Kept, op.Err = 0, false, 0, layout.Verifier{}, 0, nil
	n := int64(len(op.Data))
	if op.Kind == layout.OpCommit {
		n = 0
	}
	t.start(op, op.Kind, n)
}

// start begins an operation on n bytes.
func (t *Target) start(op *layout.Op, kind opKind, n int64) {
	o := t.operations.Get().(*operation)
	o.mu.Lock()
	o.kind, o.off, o.end, o.op, o.data, o.generation = kind, op.Off, op.Off+n, op, op.Data, op.File.Generation
	o.fua = t.format.Cached && (kind == opZero || kind == layout.OpWrite && op.Stable != layout.Unstable)
	o.detached, o.stop, o.err, o.known, o.doubt = false, nil, nil, nil, false
	op.Target = o
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		o.op = nil
		o.mu.Unlock()
		t.operations.Put(o)
		op.Err = errTargetClosed
		op.Done(op)
		return
	}
	if o.next = t.live; o.next != nil {
		o.next.prev = o
	}
	t.live = o
	switch {
	case kind == layout.OpCommit:
		o.lost = t.look()
		if t.format.Cached {
			o.pending.Store(1)
			t.commits = append(t.commits, o)
			t.waiting.Add(1)
			t.mu.Unlock()
			o.mu.Unlock()
			return
		}
	case kind != layout.OpRead && kind != layout.OpWrite && kind != opZero:
		o.err = syscall.EOPNOTSUPP
	case op.Off < 0 || op.Off > math.MaxInt64-n:
		o.err = syscall.EFBIG
	default:
		o.err = o.plan()
	}
	t.mu.Unlock()
	o.launch()
	o.mu.Unlock()
	if o.engage() {
		t.mu.Lock()
		t.rest = append(t.rest, o)
		t.resting.Add(1)
		t.mu.Unlock()
	}
}

func (o *operation) name() string {
	if o.kind == opZero {
		return "DEALLOCATE"
	}
	return o.kind.String()
}

// launch clears what is zeros and starts the commands that need no lock. mu is held.
func (o *operation) launch() {
	for _, gap := range o.gaps {
		clear(gap)
	}
	o.pending.Store(int32(len(o.parts)) + 1)
	for _, p := range o.parts {
		if !p.locks {
			o.t.space.Start(&p.req)
		}
	}
}

// engage begins the parts that need a lock and takes off the count that launch has put on beside those of the parts. It
// reports whether all have ended.
func (o *operation) engage() bool {
	for _, p := range o.parts {
		if p.locks {
			p.acquire()
		}
	}
	return o.pending.Add(-1) == 0
}

// plan makes the parts. mu and Target.mu are held.
func (o *operation) plan() error {
	t := o.t
	o.lost = t.look()
	file := o.op.File
	if w := t.files[string(file.Handles[0])]; w != nil {
		if !t.adopt(w, file) {
			return o.refused(o.off, o.end, older)
		}
	}
	x := find(file.Extents, o.off)
	for at := o.off; at < o.end; {
		to, state, delta := o.end, layout.ExtentNone, int64(0)
		if x < len(file.Extents) {
			e := &file.Extents[x]
			if at < e.Off {
				to = min(to, e.Off)
			} else {
				if (e.Off|e.Len|e.Addr)%t.block != 0 {
					o.freeParts()
					return fmt.Errorf("nvmetcp: the layout has an extent of %d bytes at %d, on the namespace at %d: no multiples of its block, %d", e.Len, e.Off, e.Addr, t.block)
				}
				to, state, delta = min(to, e.End()), e.State, e.Addr-e.Off
				x++
			}
		}
		switch {
		case state == layout.ExtentReadWrite, state == layout.ExtentRead && o.kind == layout.OpRead:
			o.cut(at, to, delta, false)
		case state == layout.ExtentInvalid && o.kind == layout.OpWrite:
			o.know(true)
			o.cut(at, to, delta, true)
		case state == layout.ExtentInvalid:
			o.know(false)
			o.sift(at, to, delta)
		case o.kind == layout.OpRead:
			o.know(false)
			o.seekOwn(at, to)
		case state == layout.ExtentNone && o.kind == opZero:
		case state == layout.ExtentNone:
			return o.refused(at, to, "a hole")
		default:
			return o.refused(at, to, "for reading only")
		}
		at = to
	}
	return nil
}

func (o *operation) refused(at, to int64, why string) error {
	o.freeParts()
	return &LayoutError{Op: o.name(), Off: at, Len: to - at, Why: why}
}

// find is the first extent that ends after off.
func find(extents []layout.Extent, off int64) int {
	lo, hi := 0, len(extents)
	for lo < hi {
		if mid := (lo + hi) / 2; extents[mid].End() > off {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// know looks up what is known of the data file, or begins to know something. Target.mu is held.
func (o *operation) know(create bool) {
	if o.known != nil {
		return
	}
	t, file := o.t, o.op.File
	w := t.files[string(file.Handles[0])]
	if w == nil {
		if !create {
			return
		}
		w = &written{key: string(file.Handles[0]), generation: file.Generation}
		t.files[w.key] = w
	}
	w.users++
	o.known = w
}

// sift makes parts of those blocks of an INVALID extent that were written. The others are zeros, as is whatever of them a write
// that has not ended does not have.
func (o *operation) sift(at, to, delta int64) {
	for at < to {
		next, is := to, false
		if o.known != nil {
			next, is = o.known.next(at, to, delta)
		}
		switch {
		case is:
			o.doubt = o.doubt || o.kind == layout.OpRead
			o.cut(at, next, delta, true)
		case o.kind == layout.OpRead:
			o.gap(at, next)
		}
		at = next
	}
}

// seekOwn makes parts of those blocks that were written of what is a hole to readers.
func (o *operation) seekOwn(at, to int64) {
	for at < to {
		next, delta, is := to, int64(0), false
		if o.known != nil {
			next, delta, is = o.known.where(at, to)
		}
		if is {
			o.doubt = true
			o.cut(at, next, delta, true)
		} else {
			o.gap(at, next)
		}
		at = next
	}
}

func (o *operation) gap(at, to int64) { o.gaps = append(o.gaps, o.data[at-o.off:to-o.off]) }

// cut makes parts of [at, to) of the data file, which lies at delta more on the namespace.
func (o *operation) cut(at, to, delta int64, invalid bool) {
	block := o.t.block
	for at < to {
		head := at % block
		if head != 0 || to-at < block {
			next := min(to, at-head+block)
			o.edge(at, next, delta, invalid)
			at = next
			continue
		}
		n := o.t.step(at+delta, to-at-to%block, o.kind == opZero)
		p := o.part(at, delta, invalid)
		p.blocks(at+delta, n, block)
		switch o.kind {
		case layout.OpRead:
			p.req.Op, p.req.Data = wire.OpRead, o.data[at-o.off:][:n:n]
		case layout.OpWrite:
			p.req.Op, p.req.Data = wire.OpWrite, o.data[at-o.off:][:n:n]
		case opZero:
			p.zeroes()
		}
		at += n
	}
}

// step is how much of n bytes at addr, which are whole blocks, one command can take.
func (t *Target) step(addr, n int64, zeroes bool) int64 {
	most := t.most
	if zeroes && !t.noZeroes.Load() {
		most = min(int64(t.format.MaxBlocks), wire.MaxBlocks) * t.block
	} else if zeroes {
		most = min(most, int64(len(zeros))/t.block*t.block)
	}
	n = min(n, most)
	if b := int64(t.format.Boundary) * t.block; b > 0 {
		n = min(n, b-addr%b)
	}
	return n
}

// edge makes a part of [at, to), which lies in one block and is not all of it.
func (o *operation) edge(at, to, delta int64, invalid bool) {
	block := o.t.block
	start := at - at%block
	p := o.part(start, delta, invalid)
	p.blocks(start+delta, block, block)
	if int64(cap(p.scratch)) < block {
		p.scratch = make([]byte, block)
	}
	p.scratch = p.scratch[:block]
	p.partial, p.from, p.to = true, int(at-start), int(to-start)
	if o.kind != opZero {
		p.bytes = o.data[at-o.off : to-o.off : to-o.off]
	}
	p.locks = o.kind != layout.OpRead
	p.req.Op, p.req.Data = wire.OpRead, p.scratch
}

func (o *operation) part(off, delta int64, invalid bool) *part {
	p := o.t.parts.Get().(*part)
	p.o, p.off, p.delta, p.invalid, p.lost = o, off, delta, invalid, o.lost
	p.req.FUA, p.req.Ended = o.fua, o.op.File.Ended
	o.parts = append(o.parts, p)
	return p
}

func (o *operation) freeParts() {
	for i, p := range o.parts {
		p.use, p.req.Data, p.req.Ended = use{}, nil, nil
		o.t.parts.Put(p)
		o.parts[i] = nil
	}
	clear(o.gaps)
	o.parts, o.gaps = o.parts[:0], o.gaps[:0]
}

// fail makes err the operation's, unless there is one.
func (o *operation) fail(err error) {
	o.mu.Lock()
	if o.err == nil {
		o.err = err
	}
	o.mu.Unlock()
}

// drop takes a count off; the last one ends the operation.
func (o *operation) drop() {
	if o.pending.Add(-1) == 0 {
		o.finish()
	}
}

// hold puts a count on, unless the operation is ending.
func (o *operation) hold() bool {
	for {
		n := o.pending.Load()
		if n == 0 {
			return false
		}
		if o.pending.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// finish is run when all parts have ended and nobody holds the operation.
func (o *operation) finish() {
	for o.again() {
		if !o.engage() {
			o.t.space.Flush()
			return
		}
	}
	t := o.t
	if w := o.known; w != nil {
		t.mu.Lock()
		w.users--
		t.tidy(w)
		t.mu.Unlock()
	}
	o.mu.Lock()
	op, err := o.op, o.err
	over := o.over
	o.op, o.data, o.known, o.over = nil, nil, nil, nil
	if err == nil && o.detached && o.kind != layout.OpWrite {
		err = context.Canceled
	}
	o.mu.Unlock()
	if op != nil {
		o.answer(op, err)
	}
	if over != nil {
		close(over)
	}
	o.freeParts()
	t.operations.Put(o)
}

// again begins anew what has to be: a READ of INVALID blocks that may have been lost meanwhile, and zeroing by a controller
// that turns out to have no command for it.
func (o *operation) again() bool {
	t := o.t
	if !o.doubt || o.kind == layout.OpRead && t.Epoch() == o.lost {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.op == nil || o.detached || o.stop != nil {
		return false
	}
	if o.kind == opZero && errors.Is(o.err, wire.StatusInvalidOpcode) {
		t.noZeroes.Store(true)
		o.err = nil
	} else if o.kind == opZero || o.err != nil {
		return false
	}
	o.freeParts()
	o.doubt = false
	t.mu.Lock()
	o.err = o.plan()
	t.mu.Unlock()
	o.launch()
	return true
}

// answer ends the Op, which was the operation's.
func (o *operation) answer(op *layout.Op, err error) {
	t := o.t
	t.mu.Lock()
	if o.next != nil {
		o.next.prev = o.prev
	}
	if o.prev != nil {
		o.prev.next = o.next
	} else {
		t.live = o.next
	}
	o.prev, o.next = nil, nil
	t.mu.Unlock()
	op.Err = err
	if err == nil {
		op.N = int(o.end - o.off)
		switch o.kind {
		case layout.OpWrite:
			op.Committed = layout.FileSync
			if t.format.Cached && !o.fua {
				op.Committed = layout.Unstable
			}
			op.Verifier = verifier(o.lost)
		case layout.OpCommit:
			op.Verifier = verifier(o.lost)
		}
	}
	op.Done(op)
}

func verifier(lost uint64) (v layout.Verifier) {
	binary.BigEndian.PutUint64(v[:], lost)
	return v
}

// Flush implements dataplane.Target.
func (t *Target) Flush() {
	if t.waiting.Load() > 0 {
		t.commit()
	}
	t.space.Flush()
	t.endRest()
}

// endRest ends what needs no I/O.
func (t *Target) endRest() {
	for t.resting.Load() > 0 {
		t.mu.Lock()
		if t.ending || len(t.rest) == 0 {
			t.mu.Unlock()
			return // who ends others ends these too
		}
		t.ending = true
		rest := t.rest
		t.rest = nil
		t.mu.Unlock()
		for _, o := range rest {
			o.finish()
		}
		t.resting.Add(-int32(len(rest)))
		clear(rest)
		t.mu.Lock()
		t.ending = false
		if t.rest == nil {
			t.rest = rest[:0]
		}
		t.mu.Unlock()
	}
}

// Detach implements dataplane.Target.
func (t *Target) Detach(op *layout.Op) {
	o, _ := op.Target.(*operation)
	if o == nil {
		return
	}
	o.mu.Lock()
	switch {
	case o.op != op:
		o.mu.Unlock()
	case o.kind == layout.OpWrite:
		for _, p := range o.parts {
			if p.locks {
				p.bytes = bytes.Clone(p.bytes)
			}
		}
		o.letGo(nil)
	default:
		o.letGo(context.Canceled)
	}
}

// letGo takes the data away from the commands and, if there is an err, ends the Op with it, whatever goes on behind it. mu is
// held; letGo releases it.
func (o *operation) letGo(err error) {
	o.detached = true
	if !o.hold() { // it is ending
		o.mu.Unlock()
		return
	}
	op := o.op
	if err != nil {
		o.op, o.data = nil, nil
	}
	o.mu.Unlock()
	for _, p := range o.parts {
		if !p.locks && (o.kind == layout.OpRead || o.kind == layout.OpWrite) {
			o.t.space.Detach(&p.req)
		}
	}
	if err != nil {
		o.answer(op, err)
	}
	o.drop()
}

// Close implements dataplane.Target. It must not be called from a Done. Whether a write that ends so has been or will be
// carried out is not known.
func (t *Target) Close() error {
	t.mu.Lock()
	t.closed = true
	var live []*operation
	for o := t.live; o != nil; o = o.next {
		live = append(live, o)
	}
	t.mu.Unlock()
	for _, o := range live {
		o.mu.Lock()
		o.stop = errTargetClosed
		if o.op == nil {
			o.mu.Unlock()
		} else {
			o.letGo(errTargetClosed)
		}
	}
	t.endRest()
	return nil
}

// Quiesce implements dataplane.Validator.
func (t *Target) Quiesce(ctx context.Context, df *layout.DataFile) error {
	t.mu.Lock()
	var live []*operation
	for o := t.live; o != nil; o = o.next {
		live = append(live, o)
	}
	t.mu.Unlock()
	var ends []chan struct{}
	for _, o := range live {
		o.mu.Lock()
		// It may be another one by now, for the same data file or not.
		if o.op != nil && o.kind != layout.OpCommit && bytes.Equal(o.op.File.Handles[0], df.Handles[0]) {
			o.stop = errForsaken
			for _, p := range o.parts {
				t.space.Withdraw(&p.req)
			}
			if o.over == nil {
				o.over = make(chan struct{})
			}
			ends = append(ends, o.over)
		}
		o.mu.Unlock()
	}
	t.Flush()
	for _, end := range ends {
		select {
		case <-end:
		case <-ctx.Done():
			return fmt.Errorf("nvmetcp: waiting for the end of what was started on a copy that was given up: %w", ctx.Err())
		}
	}
	return nil
}

// commit starts a Flush for the COMMITs that wait, unless one is under way.
func (t *Target) commit() {
	t.mu.Lock()
	if t.busy || len(t.commits) == 0 {
		t.mu.Unlock()
		return
	}
	t.busy = true
	t.flushing, t.commits = t.commits, t.flushing[:0]
	t.waiting.Store(0)
	t.begun++
	t.look()
	t.mu.Unlock()
	t.flush.Op, t.flush.Data = wire.OpFlush, nil
	t.space.Start(&t.flush)
}

// flushed ends the COMMITs that have waited for a Flush.
func (t *Target) flushed(r *Request) {
	err := translate(r.Err)
	t.mu.Lock()
	var late *layout.TimeoutError
	if err != nil && !errors.As(err, &late) {
		t.failures.Add(1)
	}
	lost, done := t.look(), t.flushing
	if err == nil {
		t.settle()
	}
	t.mu.Unlock()
	for i, o := range done {
		o.lost = lost
		if err != nil {
			o.fail(err)
		}
		o.drop()
		done[i] = nil
	}
	t.mu.Lock()
	t.busy = false
	more := len(t.commits) > 0
	t.mu.Unlock()
	if more {
		t.commit()
		t.space.Flush()
	}
}

// look forgets what was lost, and returns the epoch. mu is held.
func (t *Target) look() uint64 {
	if lost := t.Epoch(); lost != t.lost {
		t.lost = lost
		for w := range t.fresh {
			w.fresh.Cut(0, math.MaxInt64, nop, nop)
			t.tidy(w)
		}
		clear(t.fresh)
	}
	return t.lost
}
