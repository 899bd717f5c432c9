package pebble

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	cpebble "github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/server/catalog"
)

const (
	reserveName  = "reserve"
	reserveShare = 50 // divides the size of the disk
	reserveLeast = 4 << 20
	reserveMost  = 1 << 30

	// The reserve is given up in this many parts, since other programs may take what is given up.
	reserveParts = 32

	// openLeast is how many bytes the reserve and the disk must have together for a catalog to be opened.
	openLeast = reserveLeast / reserveParts

	lookEvery    = time.Second            // at the free space of the disk
	restoreAfter = 3 * time.Second        // the last need of the reserve, so that its state does not flap
	retryEvery   = 100 * time.Millisecond // for writes that wait for room
	yieldFor     = 10 * time.Second       // between compactions that find no room
	reclaimEvery = 5 * time.Second

	// reclaimMost is the size, in bytes, of the largest catalog that is compacted as a whole when the disk is full.
	// Pebble compacts a larger one in parts, by itself, once the deletes are in tables.
	reclaimMost = 64 << 20

	// Pebble's own sizes of the level below the one that flushes write, and of tables in the latter.
	baseMost  = 64 << 20
	tableMost = 2 << 20
)

// room is the space of a catalog on its disk, see Room in the package comment.
type room struct {
	dir  string
	log  *slog.Logger
	want int64       // size of a whole reserve, in bytes
	lost func(error) // called when a write fails for lack of room

	opened  atomic.Bool     // writes that find no room wait for it
	short   atomic.Bool     // the reserve is not whole
	waiting atomic.Int32    // writes that wait
	ctx     context.Context // ends when the catalog is closed
	end     context.CancelFunc

	mu         sync.Mutex
	file       *os.File  // the reserve; nil: it could not be created yet
	has        int64     // bytes that the reserve has
	needed     time.Time // when a part of it was last needed
	yielded    time.Time // when a compaction last found no room
	free, size int64     // bytes of the disk
	low        bool
}

// newRoom opens or creates the reserve of the catalog in dir, and allocates what the disk has room for.
func newRoom(dir string, log *slog.Logger, lost func(error)) (*room, error) {
	r := &room{dir: dir, log: log, lost: lost}
	r.ctx, r.end = context.WithCancel(context.Background())
	size, _, err := space(dir)
	if err != nil {
		return nil, err
	}
	r.want = min(max(size/reserveShare, reserveLeast), reserveMost)
	if err := r.open(); err != nil && !isFull(err) {
		return nil, err
	}
	r.look()
	if r.has+r.free < openLeast {
		return nil, errors.Join(r.none(), r.close())
	}
	return r, nil
}

// none is the error when nothing can be written.
func (r *room) none() error {
	return fmt.Errorf("%w: the disk of %s has no room at all: %w", catalog.ErrFull, r.dir, syscall.ENOSPC)
}

// fit bounds compactions so that most of them find room in half of the reserve.
func (r *room) fit(opts *cpebble.Options) {
	opts.LBaseMaxBytes = min(baseMost, r.want/4)
	opts.TargetFileSizes[0] = min(tableMost, r.want/64)
}

func (r *room) close() error {
	if r == nil {
		return nil
	}
	r.end()
	if r.file == nil {
		return nil
	}
	return r.file.Close()
}

// space returns how many bytes the file system of dir has, and how many of them this process may still allocate.
func space(dir string) (size, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = st.Bfree
	}
	return int64(st.Blocks) * st.Frsize, int64(blocks) * st.Frsize, nil
}

func isFull(err error) bool {
	return err != nil && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT))
}

// open opens the reserve or creates an empty one.
func (r *room) open() error {
	f, err := os.OpenFile(filepath.Join(r.dir, reserveName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	has := min(st.Size(), r.want)
	if has < st.Size() {
		err = f.Truncate(has)
	}
	if err == nil && has > 0 && isFull(fallocate(f, 0, has)) { // a program that copied the catalog may have made holes
		has, err = 0, f.Truncate(0)
	}
	if err != nil {
		f.Close()
		return err
	}
	r.file, r.has = f, has
	return nil
}

func fallocate(f *os.File, off, n int64) error {
	for {
		if err := unix.Fallocate(int(f.Fd()), 0, off, n); err != unix.EINTR {
			return err
		}
	}
}

// allocate makes the file longer, from off on, by n allocated bytes.
func allocate(f *os.File, off, n int64) error {
	err := fallocate(f, off, n)
	if err != unix.EOPNOTSUPP && err != unix.ENOSYS {
		return err
	}
	for end := off + n; off < end; off += zeroAhead {
		if _, err := f.WriteAt(zeros[:min(zeroAhead, end-off)], off); err != nil {
			return err
		}
	}
	return nil
}

// restore adds n bytes to the reserve; r.mu is held.
func (r *room) restore(n int64) error {
	if r.file == nil {
		if err := r.open(); err != nil {
			return err
		}
	}
	if err := allocate(r.file, r.has, n); err != nil {
		return errors.Join(err, r.file.Truncate(r.has))
	}
	r.has += n
	return r.file.Sync()
}

// look reads how much of the disk is free, restores the reserve from that, and logs changes of state. It leaves a
// quarter of the reserve's size free, so that a reserve that is whole is not needed again at once.
func (r *room) look() {
	size, free, err := space(r.dir)
	if err != nil {
		return // the disk is gone, and writes fail
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	missing := r.want - r.has
	n := min(missing, free-r.want/4)
	if n > 0 && (n == missing || n >= r.want/reserveParts) && time.Since(r.needed) >= restoreAfter {
		switch err := r.restore(n); {
		case err == nil:
			free -= n
		case !isFull(err):
			r.log.Warn("catalog: cannot keep a reserve on its disk", "dir", r.dir, "err", err)
			r.needed = time.Now().Add(time.Minute)
		}
	}
	r.size, r.free = size, free
	if r.has < r.want {
		r.becomeShort()
		return
	}
	if r.short.CompareAndSwap(true, false) {
		r.log.Info("catalog: its disk has room again", "dir", r.dir, "free_bytes", free)
	}
	switch low := free < 2*r.want || r.low && free < 3*r.want; {
	case low && !r.low:
		r.low = true
		r.log.Warn("catalog: its disk is nearly full; without room nothing new can be made in the volume",
			"dir", r.dir, "free_bytes", free, "size_bytes", size)
	case !low && r.low:
		r.low = false
		r.log.Info("catalog: its disk is no longer nearly full", "dir", r.dir, "free_bytes", free)
	}
}

// becomeShort is called when the reserve is not whole, or will not be; r.mu is held.
func (r *room) becomeShort() {
	if r.short.CompareAndSwap(false, true) {
		r.low = true
		r.log.Error("catalog: its disk is full: nothing new can be made in the volume until there is room; "+
			"reads, and what makes room, go on from a reserve", "dir", r.dir, "reserve_bytes", r.has)
	}
}

// take gives up n bytes of the reserve, and one part at least, but leaves the last keep bytes. It reports false if the
// reserve has no more than those.
func (r *room) take(n, keep int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.becomeShort()
	r.needed = time.Now()
	left := max(r.has-max(n, r.want/reserveParts), keep)
	if left >= r.has || r.file.Truncate(left) != nil {
		return false
	}
	r.has = left
	r.file.Sync() // a file system may reuse blocks only after its journal says that they are free
	return true
}

// makeRoom repeats a write that found no room for n bytes. When the reserve is used up it waits until there is room. It
// fails with ENOSPC, after a call of lost, only if the catalog is being closed or opened: Pebble would retry the flush
// that opens a catalog for ever.
func (r *room) makeRoom(n int64, again func() error) error {
	waits := false
	defer func() {
		if waits {
			r.waiting.Add(-1)
		}
	}()
	for {
		if !r.take(n, 0) {
			if !waits {
				waits = true
				r.waiting.Add(1)
			}
			if !r.opened.Load() || !r.pause(retryEvery) {
				r.lost(r.none())
				return r.none()
			}
		}
		if err := again(); !isFull(err) {
			return err
		}
	}
}

// makeCompactionRoom is makeRoom for a compaction, which may fail with err. It leaves half of the reserve to others.
func (r *room) makeCompactionRoom(n int64, again func() error, err error) error {
	for isFull(err) && r.take(n, r.want/2) {
		err = again()
	}
	if isFull(err) {
		r.mu.Lock()
		r.yielded = time.Now()
		r.mu.Unlock()
	}
	return err
}

// yield delays a compaction after one that found no room.
func (r *room) yield() {
	r.mu.Lock()
	wait := yieldFor - time.Since(r.yielded)
	r.mu.Unlock()
	if wait > 0 {
		r.pause(wait)
	}
}

// pause waits. It reports false if the catalog is closed meanwhile.
func (r *room) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}

// isShort reports whether the reserve is not whole, and so the disk full.
func (r *room) isShort() bool { return r != nil && r.short.Load() }

// isUsedUp reports whether the reserve is used up, too.
func (r *room) isUsedUp() bool { return r != nil && r.waiting.Load() > 0 }

// full is the error for a batch that is refused.
func (r *room) full() error {
	return fmt.Errorf("%w: make room on the disk of %s", catalog.ErrFull, r.dir)
}

// Room implements [catalog.Roomy].
func (e *Engine) Room() catalog.Room {
	r := e.room
	if r == nil {
		return catalog.Room{}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return catalog.Room{Free: r.free, Size: r.size, Reserve: r.has, Low: r.low, Full: r.short.Load()}
}

// keepRoom looks at the disk, and reclaims space of it while it is full, until the catalog is closed.
func (e *Engine) keepRoom() {
	var reclaimed time.Time
	var written uint64
	for e.room.pause(lookEvery) {
		e.room.look()
		if !e.room.short.Load() || time.Since(reclaimed) < reclaimEvery {
			continue
		}
		if now := e.db.Metrics().WAL.BytesIn; now != written {
			e.reclaim()
			reclaimed, written = time.Now(), now
		}
	}
}

// reclaim writes tables without deleted rows, which take space until then. Pebble logs its errors by itself.
func (e *Engine) reclaim() {
	flushed, err := e.db.AsyncFlush()
	if err != nil {
		return
	}
	select {
	case <-flushed:
	case <-e.room.ctx.Done():
		return
	}
	if total := e.db.Metrics().Total(); total.TablesSize <= reclaimMost {
		_ = e.db.Compact(e.room.ctx, nil, lastKey[:], false)
	}
}

// lastKey comes after all keys.
var lastKey = func() (key [catalog.MaxKey + 1]byte) {
	for i := range key {
		key[i] = 0xff
	}
	return key
}()

// roomFS is the file system that Pebble writes through, see Room in the package comment.
type roomFS struct {
	vfs.FS
	room *room
}

// Unwrap implements [vfs.FS].
func (fs *roomFS) Unwrap() vfs.FS { return fs.FS }

// Create implements [vfs.FS].
func (fs *roomFS) Create(name string, category vfs.DiskWriteCategory) (f vfs.File, err error) {
	if fs.PathDir(name) != fs.room.dir { // a file of a checkpoint, which may fail
		return fs.FS.Create(name, category)
	}
	compacts := category == "pebble-compaction"
	if compacts {
		fs.room.yield()
	}
	err = fs.do(compacts, 0, func() (err error) {
		f, err = fs.FS.Create(name, category)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &roomFile{f, fs, compacts}, nil
}

// ReuseForWrite implements [vfs.FS].
func (fs *roomFS) ReuseForWrite(oldname, newname string, category vfs.DiskWriteCategory) (f vfs.File, err error) {
	err = fs.do(false, 0, func() (err error) {
		f, err = fs.FS.ReuseForWrite(oldname, newname, category)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &roomFile{f, fs, false}, nil
}

// Rename implements [vfs.FS].
func (fs *roomFS) Rename(oldname, newname string) error {
	return fs.do(false, 0, func() error { return fs.FS.Rename(oldname, newname) })
}

// do calls f, which may need n bytes, and makes room for it if it finds none.
func (fs *roomFS) do(compacts bool, n int, f func() error) error {
	err := f()
	switch {
	case !isFull(err):
		return err
	case compacts:
		return fs.room.makeCompactionRoom(int64(n), f, err)
	}
	return fs.room.makeRoom(int64(n), f)
}

// roomFile is a file that is written there.
type roomFile struct {
	vfs.File
	fs       *roomFS
	compacts bool // it is an output of a compaction
}

func (f *roomFile) Write(p []byte) (n int, err error) {
	err = f.fs.do(f.compacts, len(p), func() error {
		more, err := f.File.Write(p[n:])
		n += more
		return err
	})
	return n, err
}

// Preallocate implements [vfs.File]. It does nothing while the disk is full.
func (f *roomFile) Preallocate(off, n int64) error {
	if f.fs.room.short.Load() {
		return nil
	}
	return f.File.Preallocate(off, n)
}
