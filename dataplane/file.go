package dataplane

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/weftfs/weft/layout"
)

// File is the data state of one inode in this mount: the order of its writes and its unstable data. Keep it as long as
// the file is open or Dirty. Any method may be called at any time from any goroutine.
type File struct {
	plane    *Plane
	locks    rangeLock
	unstable atomic.Int64 // extents retained, over all data files

	mu    sync.Mutex
	files map[fileKey]*dataFile
}

// fileKey names a data file. The narrow and the wide segment of a file have different DataFiles for the same one.
type fileKey struct {
	device layout.DeviceID
	handle string
}

// NewFile makes the state of a file nobody has written to.
func (p *Plane) NewFile() *File { return &File{plane: p} }

// dataFile returns the state of a data file, making it when it is new.
func (f *File) dataFile(df *layout.DataFile) *dataFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.files[fileKey{df.Device, string(df.Handles[0])}]
	if d == nil {
		if f.files == nil {
			f.files = map[fileKey]*dataFile{}
		}
		d = &dataFile{file: f, turn: make(chan struct{}, 1)}
		f.files[fileKey{df.Device, string(df.Handles[0])}] = d
	}
	d.use.Store(df)
	return d
}

// lookup returns the state of a data file, nil if nothing was written to it.
func (f *File) lookup(df *layout.DataFile) *dataFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.files[fileKey{df.Device, string(df.Handles[0])}]
}

// Dirty reports whether Commit has something to do or writes are still under way.
func (f *File) Dirty() bool { return f.unstable.Load() > 0 || !f.locks.idle() }

// Renew makes Commit use the handles and credentials of seg, a newer RW segment of the file, for data files written
// before. StartWrite does the same with its segment.
func (f *File) Renew(seg *layout.Segment) {
	for m := range seg.Mirrors {
		for i := range seg.Mirrors[m].Servers {
			df := &seg.Mirrors[m].Servers[i]
			if d := f.lookup(df); d != nil {
				d.use.Store(df)
			}
		}
	}
}

// LockRange waits for the writes in flight in the n bytes at off, n may be layout.ToEOF, and keeps others out until
// unlock is called. It has its place in the order of writes like one of them. unlock may be called more than once.
func (f *File) LockRange(ctx context.Context, off, n int64) (unlock func(), err error) {
	if off < 0 || n < 0 {
		return nil, fmt.Errorf("lock of %d bytes at %d: negative", n, off)
	}
	end := layout.Range{Off: off, Len: n}.End()
	if end == off {
		return func() {}, nil
	}
	node, err := f.lock(ctx, off, end)
	if err != nil {
		return nil, fmt.Errorf("lock of %v: %w", layout.Range{Off: off, Len: n}, err)
	}
	return sync.OnceFunc(func() { f.locks.release(f.plane, node) }), nil
}

// lock takes [off, end).
func (f *File) lock(ctx context.Context, off, end int64) (*rangeNode, error) {
	w := newWakeup()
	node, granted := f.locks.acquire(off, end, ticket{who: w})
	if granted {
		return node, nil
	}
	select {
	case <-w:
		return node, nil
	case <-ctx.Done():
		f.locks.abandon(f.plane, node)
		return nil, ctx.Err()
	}
}

// Drop forgets unstable data at and past from: the file is being truncated, or removed (from 0). The caller holds
// LockRange(from, layout.ToEOF), so that no write or resend is under way there.
func (f *File) Drop(from int64) {
	for _, d := range f.dataFiles() {
		d.mu.Lock()
		d.replace(from, math.MaxInt64)
		d.mu.Unlock()
	}
}

func (f *File) dataFiles() []*dataFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]*dataFile, 0, len(f.files))
	for _, d := range f.files {
		all = append(all, d)
	}
	return all
}
