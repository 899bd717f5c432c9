package fs

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// Read asks for the bytes of an open file from Off on.
//
// Whoever starts it fills the first group. From StartRead until Done the Read and Buf belong to the FS. Done is called
// exactly once, from any goroutine, possibly before StartRead returns; it must be short and must not block. n is less
// than len(Buf) at the end of the file. Afterwards the Read may be used again.
type Read struct {
	ID  layout.FileID
	Off int64
	Buf []byte
	// NoAtime says that the time of the last access stays as it is (O_NOATIME).
	NoAtime bool
	// Fh is the open file, if more of it may be read than is asked for; 0 = it may not.
	Fh   uint64
	Done func(n int, errno syscall.Errno)

	transfer
	i       *inode
	window  *window // that has counted it in
	reading reading
	io      dataplane.Read
}

// Write asks to write Data at Off of an open file, or at its end. The rules are those of Read; Data is only read.
type Write struct {
	ID    layout.FileID
	Off   int64
	Data  []byte
	Buf   *iobuf.Buf // nil, or begins with Data: memory of dataplane.Plane.Buffer, which is kept until the data is stable
	Flags uint32     // of open(2): with O_APPEND Off is ignored; O_DSYNC and O_SYNC make the write stable before Done
	// ClearSetID says that the writer may not keep the set-user-ID and set-group-ID bits.
	ClearSetID bool
	// Fh is the open file, should the writer rely on a lock; 0 = there is none.
	Fh   uint64
	Done func(n int, errno syscall.Errno)

	transfer
	i        *inode
	io       dataplane.Write
	admitted admission
}

// transfer is what Reads and Writes have in common. The data plane has the request, until a goroutine takes it over
// because it needs something that may have to be waited for.
type transfer struct {
	mu       sync.Mutex
	detached bool
	cancel   context.CancelFunc // nil while the data plane has the request
	over     chan struct{}      // closed when the goroutine does not touch the buffer any more

	journey
	asked time.Time // when the data plane got it, if somebody traces and it has it still
}

// takeOver is called once the data plane does not have the request, or not any more. It returns false if nobody wants
// it any longer; otherwise the goroutine ends with release.
func (t *transfer) takeOver(parent context.Context) (context.Context, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.detached {
		return nil, false
	}
	t.arrived()
	ctx, cancel := context.WithCancel(journeyContext{metaclient.Soft(parent), &t.journey})
	t.cancel, t.over = cancel, make(chan struct{})
	return ctx, true
}

func (t *transfer) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cancel()
	close(t.over)
}

func (t *transfer) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.detached, t.cancel, t.over = false, nil, nil
	t.journey.reset()
}

// ask is called before the data plane gets the request. The result is nil if nobody wants to know it.
func (t *transfer) ask(fs *FS) *dataplane.Slowest {
	if !fs.tracing() {
		return nil
	}
	t.asked = time.Now()
	return &t.slowest
}

// arrived is called when the data plane does not have the request any more.
func (t *transfer) arrived() {
	if !t.asked.IsZero() {
		t.data.Add(int64(time.Since(t.asked)))
		t.asked = time.Time{}
	}
}

// detach ends the request or takes its buffer from it.
func (t *transfer) detach(io interface{ Detach() }) {
	t.mu.Lock()
	t.detached = true
	cancel, over := t.cancel, t.over
	t.mu.Unlock()
	if cancel == nil {
		io.Detach()
		return
	}
	cancel()
	<-over
}

// Detach gives Buf back: when it returns, nothing writes to it any more. Done is called all the same, perhaps later,
// with EINTR unless the read had been completed. It may be called once StartRead has returned, and waits for no server.
func (r *Read) Detach() {
	if r.window != nil && r.window.forsake(r) {
		r.finish(0, syscall.EINTR)
		return
	}
	r.detach(&r.io)
}

// Detach gives Data back: when it returns, nothing reads it any more. The write may go on from a copy. Done is called
// all the same, perhaps later. It may be called once StartWrite has returned, and waits for no server.
func (w *Write) Detach() { w.detach(&w.io) }

// Flush sends what StartRead and StartWrite have queued. It ends a batch.
func (fs *FS) Flush() { fs.data.Flush() }

// StartRead starts a read and never blocks.
func (fs *FS) StartRead(r *Read) {
	i := fs.peek(r.ID)
	if i == nil {
		r.Done(0, syscall.EBADF)
		return
	}
	r.i, r.window = i, nil
	r.reset()
	n, ok := i.readable(r.Off, len(r.Buf))
	if !ok {
		r.block(nil)
		return
	}
	if n == 0 {
		r.succeed(0)
		return
	}
	r.io.Slowest = r.ask(fs)
	if fs.ahead != nil && r.Fh != 0 {
		if h := fs.handles.get(r.Fh); h != nil {
			r.window = &h.window
			if r.window.serve(r, n) {
				return
			}
		}
	}
	var seg *layout.Segment
	if seg, r.reading = i.beginRead(r.Off, n); seg == nil {
		r.block(nil)
		return
	}
	if !seg.Contains(r.Off, n) {
		i.endRead(r.reading)
		r.block(nil)
		return
	}
	r.io.Segment, r.io.Buf, r.io.Off = seg, r.Buf[:n], r.Off
	if r.io.Done == nil {
		r.io.Done = r.ended
	}
	i.data.StartRead(&r.io)
}

// readable is how many of n bytes at off there are, or not ok if the service must be asked.
func (i *inode) readable(off int64, n int) (int64, bool) {
	if i.known.Load() && off+int64(n) <= i.size.Load() {
		return int64(n), i.fs.meta.Alive(i.id)
	}
	if !i.exact() {
		return 0, false
	}
	return min(int64(n), max(0, i.size.Load()-off)), true
}

// ended is the data plane's Done.
func (r *Read) ended(n int, err error) {
	r.i.endRead(r.reading)
	if err == nil {
		err = r.i.believe(r.reading, r.io.Segment)
	}
	if err != nil {
		r.block(err)
		return
	}
	r.succeed(r.i.clip(n, r.Off))
}

// succeed ends a read that has read n bytes.
func (r *Read) succeed(n int) {
	if !r.NoAtime {
		r.i.fs.accesses.file(r.i)
	}
	r.finish(n, 0)
}

// finish ends a read.
func (r *Read) finish(n int, errno syscall.Errno) {
	r.arrived()
	if r.window != nil {
		r.window.finish()
	}
	r.Done(n, errno)
}

// clip shortens a read of n bytes at off if the file was cut meanwhile.
func (i *inode) clip(n int, off int64) int {
	return int(min(int64(n), max(0, i.size.Load()-off)))
}

// block lets a goroutine read as long as it takes. err is why, if it has been tried.
func (r *Read) block(err error) {
	fs := r.i.fs
	ctx, ok := r.takeOver(fs.ctx)
	if !ok {
		r.finish(0, syscall.EINTR)
		return
	}
	// The goroutine owns the request; it ends with Done, at the latest when a Detach cancels ctx.
	fs.spawn(func() {
		n, err := r.i.read(ctx, r.Buf, r.Off, err)
		r.release()
		if err == nil {
			r.succeed(n)
			return
		}
		r.finish(n, fs.dataErrno(r.ID, err))
	})
}

// read reads like StartRead, but waits for what it needs.
func (i *inode) read(ctx context.Context, buf []byte, off int64, err error) (int, error) {
	var again retries
	for {
		if err != nil {
			if err = again.after(ctx, i, err); err != nil {
				return 0, err
			}
		}
		var n int
		if n, err = i.readOnce(ctx, buf, off); err == nil {
			return n, nil
		}
	}
}

func (i *inode) readOnce(ctx context.Context, buf []byte, off int64) (int, error) {
	resume := i.wait()
	defer func() { resume() }()
	n := len(buf)
	if _, ok := i.readable(off, n); !ok {
		if err := i.refresh(ctx); err != nil {
			return 0, err
		}
	}
	n = i.clip(n, off)
	for done := 0; done < n; {
		at, rest := off+int64(done), buf[done:n]
		seg, reading, err := i.readSegment(ctx, at, int64(len(rest)))
		if err != nil {
			return 0, err
		}
		if seg == nil {
			clear(rest)
			break
		}
		m := min(int64(len(rest)), seg.End()-at)
		resume()
		err = i.readData(ctx, seg, reading, rest[:m], at)
		resume = i.wait()
		if err != nil {
			return 0, err
		}
		done += int(m)
	}
	return i.clip(n, off), nil
}

// readData fills buf from one segment, and counts the read out.
func (i *inode) readData(ctx context.Context, seg *layout.Segment, r reading, buf []byte, off int64) error {
	slowest, arrived := atData(ctx)
	defer arrived()
	ended := make(chan error, 1)
	io := &dataplane.Read{Segment: seg, Buf: buf, Off: off, Slowest: slowest, Done: func(_ int, err error) {
		i.endRead(r)
		if err == nil {
			err = i.believe(r, seg)
		}
		ended <- err
	}}
	i.data.StartRead(io)
	i.fs.data.Flush()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		io.Detach()
		return ctx.Err()
	}
}

// StartWrite starts a write and never blocks.
func (fs *FS) StartWrite(w *Write) {
	i := fs.peek(w.ID)
	if i == nil {
		w.Done(0, syscall.EBADF)
		return
	}
	w.i = i
	w.reset()
	n := int64(len(w.Data))
	if w.Flags&(unix.O_APPEND|unix.O_DSYNC) != 0 {
		w.block(nil)
		return
	}
	i.mu.Lock()
	if !i.admits(false) || !i.plain || i.clears(w.ClearSetID) {
		i.mu.Unlock()
		w.block(nil)
		return
	}
	seg := fs.meta.CachedLayout(w.ID, layout.IOModeRW, w.Off, n)
	if seg == nil || !seg.Contains(w.Off, n) {
		i.mu.Unlock()
		w.block(nil)
		return
	}
	w.admitted = i.admit(seg, w.Off, n)
	i.mu.Unlock()
	w.io.Slowest = w.ask(fs)
	w.io.Segment, w.io.Data, w.io.Buf, w.io.Off, w.io.Shared = seg, w.Data, w.Buf, w.Off, w.admitted.shared
	if w.io.Done == nil {
		w.io.Done = w.ended
	}
	i.data.StartWrite(&w.io)
}

// ended is the data plane's Done.
func (w *Write) ended(err error) {
	w.arrived()
	if err = w.i.finish(w.admitted, w.Off+int64(len(w.Data)), err); err != nil {
		w.block(err)
		return
	}
	w.Done(len(w.Data), 0)
}

// block lets a goroutine write as long as it takes. err is why, if it has been tried.
func (w *Write) block(err error) {
	fs := w.i.fs
	ctx, ok := w.takeOver(fs.ctx)
	if !ok {
		w.i.doubtBlocks()
		w.Done(0, syscall.EINTR)
		return
	}
	// The goroutine owns the request; it ends with Done, at the latest when a Detach cancels ctx.
	fs.spawn(func() {
		n, err := w.write(ctx, err)
		w.release()
		if n < len(w.Data) {
			w.i.doubtBlocks()
		}
		w.Done(n, fs.dataErrno(w.ID, err))
	})
}

// write writes like StartWrite, but waits for what it needs.
func (w *Write) write(ctx context.Context, err error) (int, error) {
	i := w.i
	resume := i.wait()
	cleared := i.clearPrivileges(ctx, w.ClearSetID)
	resume()
	if cleared != nil {
		return 0, cleared
	}
	stable := layout.Unstable
	switch {
	case w.Flags&unix.O_SYNC == unix.O_SYNC:
		stable = layout.FileSync
	case w.Flags&unix.O_DSYNC != 0:
		stable = layout.DataSync
	}
	var n int
	t := terms{through: i.fs.handles.get(w.Fh)}
	if w.Flags&unix.O_APPEND != 0 {
		n, err = i.append(ctx, w.Data, stable, t)
	} else {
		n, err = i.write(ctx, w.Data, w.Off, stable, &t, err)
	}
	if n > 0 && stable != layout.Unstable {
		if err := i.makeSafe(ctx); err != nil {
			return 0, err
		}
	}
	if n > 0 {
		err = nil // the application writes the rest again and gets the error then
	}
	return n, err
}

// append writes at the end of the file.
func (i *inode) append(ctx context.Context, data []byte, stable layout.Stability, t terms) (int, error) {
	n, err := i.appendLeased(ctx, data, stable, t)
	if n == 0 && errors.Is(err, errUnleased) {
		return i.appendReserved(ctx, data, stable, t)
	}
	return n, err
}

// appendLeased finds the end of the file here: under a lease nobody else writes to it, and no other write or truncation
// of this mount changes it meanwhile.
func (i *inode) appendLeased(ctx context.Context, data []byte, stable layout.Stability, t terms) (int, error) {
	resume := i.wait()
	err := i.lockSize(ctx)
	resume()
	if err != nil {
		return 0, err
	}
	defer i.unlockSize()
	i.mu.Lock()
	t.mine, t.leased, t.lease = true, true, i.recalledLeases
	i.mu.Unlock()
	s := i.session()
	leased := i.exact()
	if !leased && i.leaseDue() {
		resume := i.wait()
		err := i.refresh(ctx)
		resume()
		if err != nil {
			return 0, err
		}
		leased = i.exact()
	}
	if !leased {
		return 0, errUnleased
	}
	n, err := i.write(ctx, data, i.size.Load(), stable, &t, nil)
	if errors.Is(err, errUnleased) && t.begun && s != i.session() {
		err = errUncertain
	}
	return n, err
}

// leaseInterval is how often an append asks for a lease first.
const leaseInterval = time.Second

// leaseDue reports whether it is worth asking for a lease: since the last time others may have gone.
func (i *inode) leaseDue() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	at := now()
	if i.leaseAsked != 0 && at-i.leaseAsked < int64(leaseInterval) {
		return false
	}
	i.leaseAsked = at
	return true
}

// appendReserved lets the service find the place: others append, too, or write. Several of one mount go on at once. A
// place that is recalled before anything was written there is no failure. If the session has ended since something was,
// nobody knows whether that is in the file, and the append fails.
func (i *inode) appendReserved(ctx context.Context, data []byte, stable layout.Stability, t terms) (int, error) {
	t.mine = true
	resume := i.wait()
	err := i.await(ctx, func() bool { return !i.sizing })
	if err == nil {
		i.reserved.count++
		i.mu.Unlock()
	}
	resume()
	if err != nil {
		return 0, err
	}
	defer func() {
		i.mu.Lock()
		i.reserved.count--
		i.notify()
		i.mu.Unlock()
	}()
	var again retries
	for {
		resume := i.wait()
		t.place, err = i.reserve(ctx, int64(len(data)), i.session())
		resume()
		if err == nil {
			n, err := i.write(ctx, data, t.place.off, stable, &t, nil)
			i.leavePlace(t.place)
			if !errors.Is(err, errUnleased) {
				return n, err
			}
			if i.uncertain(t.place) {
				return 0, errUncertain
			}
			continue
		}
		if err = again.after(ctx, i, byID(i.id, err)); err != nil {
			return 0, err
		}
	}
}

// write writes data at off and returns how much of it was acknowledged. err is what it led to if it has been tried.
func (i *inode) write(ctx context.Context, data []byte, off int64, stable layout.Stability, t *terms, err error) (int, error) {
	var again retries
	for done := 0; ; {
		if err != nil {
			if err = again.after(ctx, i, err); err != nil {
				return done, err
			}
		}
		if done == len(data) {
			return done, nil
		}
		var n int
		n, err = i.writeOnce(ctx, data[done:], off+int64(done), stable, t)
		done += n
	}
}

// writeOnce writes as much of data as one segment takes.
func (i *inode) writeOnce(ctx context.Context, data []byte, off int64, stable layout.Stability, t *terms) (int, error) {
	resume := i.wait()
	seg, admitted, err := i.acquire(ctx, off, int64(len(data)), t)
	resume()
	if err != nil {
		return 0, err
	}
	slowest, arrived := atData(ctx)
	defer arrived()
	n := min(int64(len(data)), seg.End()-off)
	ended := make(chan error, 1)
	io := &dataplane.Write{Segment: seg, Data: data[:n], Off: off, Stable: stable, Shared: admitted.shared, Slowest: slowest}
	io.Done = func(err error) {
		ended <- i.finish(admitted, off+n, err)
	}
	i.data.StartWrite(io)
	i.fs.data.Flush()
	select {
	case err = <-ended:
	case <-ctx.Done():
		io.Detach()
		err = ctx.Err()
	}
	if err != nil {
		return 0, err
	}
	return int(n), nil
}

// Bounds of retries.
const (
	maxRefetch = 8 // layouts asked for because a data server did not take the one before
	minPause   = 10 * time.Millisecond
	maxPause   = 5 * time.Second
)

// retries is what one request has gone through.
type retries struct {
	refetched int
	pause     time.Duration
}

// after prepares another try after err, or returns the error to give up with.
func (r *retries) after(ctx context.Context, i *inode, err error) error {
	if gone, e := i.settled(ctx, err); gone || e != nil {
		return e
	}
	switch v, _ := classify(err); v {
	case refetch:
		// Without a session the service is waited for, and everything else may be refused for that reason.
		if i.fs.meta.Alive(i.id) {
			r.refetched++
		}
		if r.refetched > maxRefetch {
			return err
		}
		i.fs.meta.DropLayout(i.id, 0)
	case wait:
		// Like every other server that does not answer, the service is waited for until it does.
	default:
		return err
	}
	i.fs.waiting.log(i.fs.log, slog.LevelWarn, "trying again with another layout", "file", i.id, "err", err)
	defer i.wait()()
	r.pause = min(max(2*r.pause, minPause), maxPause)
	timer := time.NewTimer(r.pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
