package fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Caches: copies of whole files on data servers near to their readers. The service gives out an empty data file, copies nothing, and
// takes caches back from a file before anybody may write it; what is here is the copying, and the ways to ask for it.

const (
	cacheBlock  = 1 << 20  // bytes copied at a time, of which
	cacheWidth  = 8        // are on their way for one file, and
	cacheBlocks = 32       // for all
	cacheCommit = 16 << 20 // bytes between two commits
	cacheRun    = 64 << 10 // bytes that are left out if they are all zeros
	cacheEnd    = 10 * time.Second

	adviceWaiting = 4096 // files that are to be cached in the background
	adviceAtOnce  = 4
)

// Ioctls of a regular file, _IO('W', 0x70) and the next: like posix_fadvise(2), which the kernel does not pass on.
const (
	ioctlWillNeed = 0x5770
	ioctlDontNeed = 0x5771
)

// xattrAdvise is the extended attribute by which scripts do the same, and learn how far it is.
const xattrAdvise = "weft.advise"

// errWritten says that a file has no cache because it was written meanwhile.
var errWritten = fmt.Errorf("it is being written: %w", syscall.EBUSY)

// caching is what a mount copies to caches.
type caching struct {
	blocks chan struct{} // one token for each block on its way

	mu      sync.Mutex
	files   map[layout.FileID]chan struct{}       // being copied; closed when that is over
	advised map[layout.FileID]*context.CancelFunc // what is being cached in the background, or waits for that
	turns   chan struct{}                         // one token for each of those at work
}

func (c *caching) init() {
	c.blocks, c.turns = make(chan struct{}, cacheBlocks), make(chan struct{}, adviceAtOnce)
	c.files, c.advised = map[layout.FileID]chan struct{}{}, map[layout.FileID]*context.CancelFunc{}
}

// CacheRequest says where a file is to be cached.
type CacheRequest struct {
	Devices  []layout.DeviceID // to choose from
	Limit    int64             // bytes of all caches on a device; 0 = no limit
	Run      uint64            // what was asked for with the same number does not go for this
	Progress func(n int64)     // called when n more bytes are done, from any goroutine; nil = nobody wants to know
}

// Cached is what came of a CacheRequest.
type Cached struct {
	Size int64 // of the file
	Made bool  // it was copied; else all of it was there already, or there is nothing to copy
}

// Cache copies a regular file to a data server. When it returns nil readers on that host read it there. What a failure leaves is
// dropped. If somebody writes the file meanwhile, or another client copies it to the same place, the error is EBUSY (errors.Is); ENOSPC if there is
// no room that may be taken from other caches.
func (fs *FS) Cache(ctx context.Context, who metarpc.Cred, id layout.FileID, req CacheRequest) (Cached, error) {
	i := fs.hold(id)
	defer i.drop()
	if err := i.open(ctx, who, metarpc.AccessRead); err != nil {
		return Cached{}, err
	}
	defer i.cancelOpen()
	return i.cache(ctx, who, req)
}

// cache is Cache of a file that is open.
func (i *inode) cache(ctx context.Context, who metarpc.Cred, req CacheRequest) (got Cached, err error) {
	end, err := i.fs.caching.begin(ctx, i.id)
	if err != nil {
		return got, err
	}
	defer end()
	// What was written here must not seem to be written while the file is copied.
	if err := i.makeDurable(ctx); err != nil {
		return got, err
	}
	// The answer is waited for, also if the caller goes: the service may have begun something that has to be ended.
	start, err := i.fs.meta.CacheStart(i.fs.ctx, who, &metarpc.CacheStartArgs{ID: i.id, Devices: req.Devices, Limit: req.Limit, Run: req.Run})
	if err != nil {
		return got, byID(i.id, err)
	}
	got.Size = start.Size
	if len(start.Segments) == 0 {
		return got, nil
	}
	seg, err := start.Segments[0].Layout()
	if err != nil {
		return got, err
	}
	c := &copier{i: i, seg: seg, size: start.Size, file: i.fs.data.NewFile(), progress: req.Progress}
	ref := metarpc.CopyRef{Device: seg.Mirrors[0].Servers[0].Device, Handle: seg.Mirrors[0].Servers[0].Handles[0]}
	err = c.copy(ctx)
	// What is not finished must not stay, nor what was finished be lost, because the caller has gone.
	ending, cancel := context.WithTimeout(i.fs.ctx, cacheEnd)
	defer cancel()
	if err == nil {
		err = i.fs.meta.CacheDone(ending, i.id, ref)
	}
	if err != nil {
		dropped, e := i.fs.meta.CacheDrop(ending, who, i.id, ref.Device)
		if ctx.Err() == nil && e == nil && dropped.Caches == 0 {
			err = errWritten // and its data file went while we wrote to it
		}
		return got, byID(i.id, err)
	}
	i.fs.meta.DropLayout(i.id, 0) // the next one has the cache
	got.Made = true
	return got, nil
}

// begin waits until nobody else here copies a file to a cache.
func (c *caching) begin(ctx context.Context, id layout.FileID) (end func(), err error) {
	for {
		c.mu.Lock()
		other := c.files[id]
		if other == nil {
			over := make(chan struct{})
			c.files[id] = over
			c.mu.Unlock()
			return func() {
				c.mu.Lock()
				delete(c.files, id)
				c.mu.Unlock()
				close(over)
			}, nil
		}
		c.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// copier copies one file to one data file.
type copier struct {
	i        *inode
	seg      *layout.Segment
	size     int64
	file     *dataplane.File // the data file's state
	progress func(int64)
	data     atomic.Int64 // where the last data ended that was found
}

// copy copies everything. The data file is exactly as long as the file then, and stable. When it returns nothing is on its way.
func (c *copier) copy(ctx context.Context) error {
	g, copying := errgroup.WithContext(ctx)
	g.SetLimit(cacheWidth)
	var commit errgroup.Group // one at a time, beside the copying
	defer c.file.Drop(0)
	uncommitted := int64(0)
	for off := int64(0); off < c.size && copying.Err() == nil; {
		if off-c.data.Load() > 2*cacheCommit { // holes are so large more often than zeros are
			next, err := c.nextData(copying, off)
			if err != nil {
				g.Go(func() error { return err })
				break
			}
			c.done(next - off)
			if off = next; off == c.size {
				break
			}
		}
		n := min(cacheBlock, c.size-off)
		at := off
		g.Go(func() error { return c.block(copying, at, int(n)) })
		off += n
		if uncommitted += n; uncommitted >= cacheCommit {
			uncommitted = 0
			if err := commit.Wait(); err != nil {
				g.Go(func() error { return err })
				break
			}
			commit.Go(func() error { return c.file.Commit(ctx) })
		}
	}
	err := errors.Join(g.Wait(), commit.Wait())
	if err == nil {
		err = c.write(ctx, nil, []byte{0}, c.size-1, true)
	}
	if err == nil {
		err = c.file.Commit(ctx)
	}
	return err
}

func (c *copier) done(n int64) {
	if c.progress != nil && n > 0 {
		c.progress(n)
	}
}

// nextData is where there is data, at or behind off, or the end of the file.
func (c *copier) nextData(ctx context.Context, off int64) (int64, error) {
	var again retries
	for off < c.size {
		at, found, next, err := c.i.seekOnce(ctx, off, c.size, false)
		switch {
		case err != nil:
			if err := again.after(ctx, c.i, err); err != nil {
				return 0, err
			}
		case found:
			return at, nil
		default:
			off = next
		}
	}
	return c.size, nil
}

var zeroRun [cacheRun]byte

// block copies the n bytes at off, but runs of zeros.
func (c *copier) block(ctx context.Context, off int64, n int) error {
	fs := c.i.fs
	select {
	case fs.caching.blocks <- struct{}{}:
		defer func() { <-fs.caching.blocks }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var data []byte
	buf := fs.data.Buffer(n)
	if buf != nil {
		defer buf.Release()
		data = buf.Bytes()[:n]
	} else {
		data = make([]byte, n)
	}
	got, err := c.i.read(ctx, data, off, nil)
	if err != nil {
		return err
	}
	if got < n {
		return errWritten // it was cut
	}
	for at := 0; at < n; {
		end := at
		for end < n && !isZero(data[end:min(end+cacheRun, n)]) {
			end = min(end+cacheRun, n)
		}
		if end == at {
			at = min(at+cacheRun, n)
			continue
		}
		whole := buf
		if at > 0 {
			whole = nil
		}
		if err := c.write(ctx, whole, data[at:end], off+int64(at), false); err != nil {
			return err
		}
		for old := c.data.Load(); old < off+int64(end) && !c.data.CompareAndSwap(old, off+int64(end)); old = c.data.Load() {
		}
		at = end
	}
	c.done(int64(n))
	return nil
}

func isZero(b []byte) bool { return bytes.Equal(b, zeroRun[:len(b)]) }

// write writes to the data file. buf is nil or begins with data. last says that data is for making the data file as long as the file
// is, where it is not.
func (c *copier) write(ctx context.Context, buf *iobuf.Buf, data []byte, off int64, last bool) error {
	if last && c.data.Load() == c.size {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	done := make(chan error, 1)
	c.file.StartWrite(&dataplane.Write{Segment: c.seg, Data: data, Buf: buf, Off: off, Stable: layout.Unstable, Done: func(err error) { done <- err }})
	c.i.fs.data.Flush()
	return <-done // also if ctx ends: a write that comes late could come after one of somebody who writes the cache as well
}

// Uncache drops the caches that a file has on devices; what is being copied there from here ends. It returns how many caches there were and
// their bytes. The error is EBUSY if the kernel of some client reads one directly.
func (fs *FS) Uncache(ctx context.Context, who metarpc.Cred, id layout.FileID, devices []layout.DeviceID) (caches int, bytes int64, err error) {
	fs.unadvise(id)
	for _, dev := range devices {
		r, err := fs.meta.CacheDrop(ctx, who, id, dev)
		if err != nil {
			return caches, bytes, byID(id, err)
		}
		caches, bytes = caches+r.Caches, bytes+r.Bytes
	}
	return caches, bytes, nil
}

// near are the data servers on this host; without one there is nothing that advice could be good for.
func (fs *FS) near() ([]layout.DeviceID, error) {
	if fs.nearby != nil {
		if ids := fs.nearby(); len(ids) > 0 {
			return ids, nil
		}
	}
	return nil, syscall.ENODEV
}

// advise has a file cached on this host in the background, or takes that back.
func (fs *FS) advise(ctx context.Context, who metarpc.Cred, id layout.FileID, need bool) error {
	a, err := fs.getAttr(ctx, id)
	switch {
	case err != nil:
		return err
	case a.Mode&unix.S_IFMT == unix.S_IFDIR:
		return syscall.EISDIR
	case a.Mode&unix.S_IFMT != unix.S_IFREG:
		return syscall.EINVAL
	}
	devices, err := fs.near()
	if err != nil {
		return err
	}
	if !need {
		_, _, err := fs.Uncache(ctx, who, id, devices)
		return err
	}
	i := fs.hold(id)
	defer i.drop()
	if err := i.open(ctx, who, metarpc.AccessRead); err != nil {
		return err
	}
	c := &fs.caching
	working, cancel := context.WithCancel(fs.ctx)
	c.mu.Lock()
	full, already := len(c.advised) >= adviceWaiting, c.advised[id] != nil
	if !full && !already {
		c.advised[id] = &cancel
	}
	c.mu.Unlock()
	if full || already {
		cancel()
		i.cancelOpen()
		if full {
			return syscall.EBUSY
		}
		return nil
	}
	i.again()
	fs.spawn(func() { // holds the inode, and has it open; ends when the file is cached, or with working
		defer i.drop()
		defer i.cancelOpen()
		defer cancel()
		var err error
		select {
		case c.turns <- struct{}{}:
			_, err = i.cache(working, who, CacheRequest{Devices: devices})
			<-c.turns
		case <-working.Done():
		}
		c.mu.Lock()
		if c.advised[id] == &cancel {
			delete(c.advised, id)
		}
		c.mu.Unlock()
		if err != nil && working.Err() == nil {
			fs.log.Log(fs.ctx, slog.LevelWarn, "a file that will be needed is not cached", "file", id, "err", err)
		}
	})
	return nil
}

// unadvise ends what advise has begun for a file.
func (fs *FS) unadvise(id layout.FileID) {
	c := &fs.caching
	c.mu.Lock()
	defer c.mu.Unlock()
	if cancel := c.advised[id]; cancel != nil {
		(*cancel)()
		delete(c.advised, id)
	}
}

// advice is how far a file is cached on this host: none, filling or cached.
func (fs *FS) advice(ctx context.Context, id layout.FileID) (string, error) {
	d, err := fs.meta.DescribeLayout(ctx, id)
	if err != nil {
		return "", byID(id, err)
	}
	state := "none"
	fs.caching.mu.Lock()
	if fs.caching.advised[id] != nil {
		state = "filling"
	}
	fs.caching.mu.Unlock()
	devices, _ := fs.near()
	for _, c := range d.Caches {
		for _, dev := range devices {
			switch {
			case c.Server.Device != dev:
			case c.State == layout.CopyGood:
				return "cached", nil
			case c.State == layout.CopyFilling:
				state = "filling"
			}
		}
	}
	return state, nil
}

// setAdvice is advise by the attribute's value.
func (fs *FS) setAdvice(ctx context.Context, who metarpc.Cred, id layout.FileID, value string) error {
	switch value {
	case "willneed":
		return fs.advise(ctx, who, id, true)
	case "dontneed":
		return fs.advise(ctx, who, id, false)
	}
	return syscall.EINVAL
}

// Ioctl is advise for programs. The kernel has no others for a FUSE file system that it does not carry out itself.
func (r *raw) Ioctl(cancel <-chan struct{}, in *fuse.IoctlIn, _ []byte, out *fuse.IoctlOut, _ []byte) fuse.Status {
	if in.Cmd != ioctlWillNeed && in.Cmd != ioctlDontNeed {
		return fuse.Status(syscall.ENOTTY)
	}
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	return r.status(r.fs.advise(ctx, cred(&in.InHeader), r.fs.id(in.NodeId), in.Cmd == ioctlWillNeed))
}
