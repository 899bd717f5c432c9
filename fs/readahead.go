package fs

import (
	"container/list"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/iobuf"
)

// MinReadAhead and MaxReadAhead bound Config.ReadAhead.
const (
	MinReadAhead = 64 << 10
	MaxReadAhead = 1 << 30
)

const (
	// maxPiece is the most that is read ahead by one request, in bytes; pieces end at multiples of it.
	maxPiece = 1 << 20
	// minReads and minAhead are how far a file is read ahead at least: so many reads of the size asked for, or bytes.
	minReads = 4
	minAhead = 32 << 10
	// maxBatch is how many pieces one read starts at most.
	maxBatch = 8
	// aheadShares is how many open files can be read ahead as far as is allowed, all at the same time.
	aheadShares = 16
	// aheadIdle is how long an open file that is not read any more keeps what was read ahead, if others want the memory.
	aheadIdle = 2 * time.Second
)

// readAhead is what the open files of a mount share to be read ahead.
type readAhead struct {
	limit int64 // for one open file, in bytes
	pool  *iobuf.Pool
	free  sync.Pool // of *piece

	mu      sync.Mutex
	windows list.List // of *window: those that have pieces, the one that was given one last at the back
}

// newReadAhead returns nil if nothing is to be read ahead.
func newReadAhead(limit int64) (*readAhead, error) {
	if limit == 0 {
		return nil, nil
	}
	pool, err := iobuf.New(aheadShares * limit)
	if err != nil {
		return nil, fmt.Errorf("memory to read ahead into: %w", err)
	}
	s := &readAhead{limit: limit, pool: pool}
	s.free.New = func() any {
		p := new(piece)
		p.io.Done = p.ended
		return p
	}
	return s, nil
}

// window is what was read ahead of one open file: adjoining pieces, each of which is there or on its way.
//
// It serves one read at a time. Whoever has several under way has by that what reading ahead is for, and gets none of it.
type window struct {
	shared *readAhead // nil: nothing is read ahead

	mu     sync.Mutex
	under  int      // reads under way
	next   int64    // where the last read ended
	run    int64    // bytes read from front to back, up to next
	of     contents // what the pieces are parts of
	pieces []*piece
	waiter *Read // of pieces that are on their way, and the only read under way
	want   int64 // bytes that the waiter is to get

	listed bool          // in shared.windows
	place  *list.Element // there; this and used are guarded by shared.mu
	used   int64         // when it was given a piece (now)
}

// piece is a part of a file. While it is on its way the data plane has io; all else is guarded by the window's mu.
type piece struct {
	w       *window
	i       *inode
	buf     *iobuf.Buf
	reading reading
	io      dataplane.Read
	over    bool // it is not on its way any more
	unused  bool // it is in no window any more, and is freed when it is over
}

func (p *piece) end() int64 { return p.io.Off + int64(len(p.io.Buf)) }

// contents tells one state of a file's contents from another.
type contents struct {
	stamp
	written, changed uint64
	session          *sessionLife
}

// contents is the state of the file's contents, not ok if they may be changing or may change without us hearing of it first.
func (i *inode) contents() (c contents, ok bool) {
	asked := i.fs.clock.Load()
	answer, ok := i.fs.meta.CachedAttr(i.id)
	if !ok {
		return c, false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	a := i.mergeLocked(answer, asked)
	if !a.fresh || i.writes[0]+i.writes[1] > 0 {
		return c, false
	}
	return contents{stamp{a.Size, a.Mtime, a.Ctime}, i.written, i.changed, i.session()}, true
}

// serve is called when r begins, of which n bytes are there to be read. It completes r from what was read ahead, now or when
// that has come, or returns false and leaves it to the caller. The caller flushes the data plane; finish follows when r ends.
func (w *window) serve(r *Read, n int64) bool {
	i, end := r.i, r.Off+n
	w.mu.Lock()
	if w.under++; w.under > 1 {
		w.run, w.next = 0, end
		w.mu.Unlock()
		return false
	}
	inside := len(w.pieces) > 0 && w.pieces[0].io.Off <= r.Off && r.Off < w.end()
	if r.Off == w.next || inside && r.Off > w.next {
		w.run += end - w.next
	} else {
		w.run, inside = n, false
	}
	w.next = end
	var of contents
	front := w.run > n && n <= w.shared.limit/2 // to back
	if front {
		of, front = i.contents()
	}
	if !front || !inside || of != w.of {
		w.drop()
		w.of, inside = of, false
	}
	var started [maxBatch]*piece
	if front {
		w.extend(i, end, n, started[:0])
	}
	served, done := inside && end <= w.end(), false
	switch {
	case !served && inside:
		w.drop() // there is no memory for the rest
	case served && w.ready(end):
		w.take(r.Buf[:n], r.Off)
		done = true
	case served:
		w.waiter, w.want = r, n
	}
	w.mu.Unlock()
	for _, p := range started {
		if p != nil {
			i.data.StartRead(&p.io)
		}
	}
	if done {
		r.succeed(i.clip(int(n), r.Off))
	}
	return served
}

// finish is called when a read that serve was called for has ended.
func (w *window) finish() {
	w.mu.Lock()
	w.under--
	w.mu.Unlock()
}

// forsake reports whether r waits, and ends that: nothing is written to its buffer any more.
func (w *window) forsake(r *Read) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiter != r {
		return false
	}
	w.waiter = nil
	return true
}

// close gives back what was read ahead. No read is under way.
func (w *window) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop()
}

// end is the end of the last piece, 0 if there is none. mu is held.
func (w *window) end() int64 {
	if len(w.pieces) == 0 {
		return 0
	}
	return w.pieces[len(w.pieces)-1].end()
}

// extend adds pieces to the window for a reader that is at off and reads n bytes at a time, and puts those into started that
// are to be read. A file is read ahead as far as it has been read in one go, so that half of what is read is wanted even if
// the reader stops. mu is held.
func (w *window) extend(i *inode, off, n int64, started []*piece) {
	ahead := min(max(w.run, minReads*n, minAhead), w.shared.limit)
	at := off
	if len(w.pieces) > 0 {
		at = w.end() // also if the read goes beyond that: the pieces adjoin
	}
	for len(started) < cap(started) {
		size := min(maxPiece-at%maxPiece, (ahead/2+iobuf.PageSize-1)&^(iobuf.PageSize-1), w.of.size-at)
		if size <= 0 || at+size > off+ahead {
			return
		}
		seg, reading := i.beginRead(at, size)
		if seg == nil {
			return
		}
		var buf *iobuf.Buf
		if seg.Contains(at, size) {
			buf = w.shared.get(w, int(size))
		}
		if buf == nil {
			i.endRead(reading)
			return
		}
		p := w.shared.free.Get().(*piece)
		p.w, p.i, p.buf, p.reading, p.over, p.unused = w, i, buf, reading, false, false
		p.io.Segment, p.io.Buf, p.io.Off = seg, buf.Bytes(), at
		w.pieces = append(w.pieces, p)
		started = append(started, p)
		at += size
	}
}

// ready reports whether everything before off has come. mu is held.
func (w *window) ready(off int64) bool {
	for _, p := range w.pieces {
		if p.io.Off < off && !p.over {
			return false
		}
	}
	return true
}

// take copies what is there from off on to buf, and gives back the pieces that end there. mu is held.
func (w *window) take(buf []byte, off int64) {
	end, passed := off+int64(len(buf)), 0
	for _, p := range w.pieces {
		if from, to := max(off, p.io.Off), min(end, p.end()); from < to {
			copy(buf[from-off:to-off], p.io.Buf[from-p.io.Off:])
		}
		if p.end() <= end {
			p.leave()
			passed++
		}
	}
	w.pieces = slices.Delete(w.pieces, 0, passed)
}

// drop empties the window. mu is held.
func (w *window) drop() {
	if !w.listed {
		return
	}
	for _, p := range w.pieces {
		p.leave()
	}
	clear(w.pieces)
	w.pieces, w.listed = w.pieces[:0], false
	w.shared.remove(w)
}

// leave is called when a piece is not in its window any more. The window's mu is held.
func (p *piece) leave() {
	if p.unused = true; p.over {
		p.free()
	}
}

func (p *piece) free() {
	shared := p.w.shared
	p.buf.Release()
	p.w, p.i, p.buf, p.reading, p.io.Segment, p.io.Buf = nil, nil, nil, reading{}, nil, nil
	shared.free.Put(p)
}

// ended is the data plane's Done.
func (p *piece) ended(_ int, err error) {
	p.i.endRead(p.reading)
	if err == nil {
		err = p.i.believe(p.reading, p.io.Segment)
	}
	w := p.w
	w.mu.Lock()
	if p.over = true; p.unused {
		p.free()
		w.mu.Unlock()
		return
	}
	if err != nil {
		w.drop()
	}
	r := w.waiter
	if r == nil || err == nil && !w.ready(r.Off+w.want) {
		w.mu.Unlock()
		return
	}
	w.waiter = nil
	n := w.want
	if err == nil {
		w.take(r.Buf[:n], r.Off)
	}
	w.mu.Unlock()
	if err != nil {
		r.block(nil) // which meets the same error, or does not
		return
	}
	r.succeed(r.i.clip(int(n), r.Off))
}

// get returns memory for a piece of w, or nil if there is none. w.mu is held.
func (s *readAhead) get(w *window, n int) *iobuf.Buf {
	s.mu.Lock()
	if !w.listed {
		w.listed, w.place = true, s.windows.PushBack(w)
	}
	s.windows.MoveToBack(w.place)
	w.used = now()
	s.mu.Unlock()
	for {
		if buf := s.pool.Get(n); buf != nil {
			return buf
		}
		idle := s.idle()
		if idle == nil {
			return nil
		}
		idle.drop()
		idle.mu.Unlock()
	}
}

// idle returns a window that has not been used for long, with its mu held, or nil.
func (s *readAhead) idle() *window {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := s.windows.Front(); e != nil; e = e.Next() {
		w := e.Value.(*window)
		if now()-w.used < int64(aheadIdle) {
			return nil
		}
		// The order of locks is the other one, so this must not wait.
		if w.mu.TryLock() {
			if w.waiter == nil && len(w.pieces) > 0 {
				return w
			}
			w.mu.Unlock()
		}
	}
	return nil
}

func (s *readAhead) remove(w *window) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.windows.Remove(w.place)
}
