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
	forsook  atomic.Int32 // data files forsaken
	strays   strays

	mu    sync.Mutex
	files map[fileKey]*dataFile
}

// fileKey names a data file. The narrow and the wide segment of a file have different DataFiles for the same one.
type fileKey struct {
	device layout.DeviceID
	handle string
}

func keyOf(df *layout.DataFile) fileKey { return fileKey{df.Device, string(df.Handles[0])} }

// NewFile makes the state of a file nobody has written to.
func (p *Plane) NewFile() *File { return &File{plane: p} }

// count notes that n more extents are retained.
func (f *File) count(n int) {
	f.unstable.Add(int64(n))
	f.plane.extents.Add(int64(n))
}

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
		d.ctx, d.forsake = context.WithCancel(context.Background())
		f.files[fileKey{df.Device, string(df.Handles[0])}] = d
	}
	d.use.Store(df)
	return d
}

// writable returns the state of a data file that is to be written to, which holds a column of seg; nil if it is a copy that is
// not written any more.
func (f *File) writable(seg *layout.Segment, mirror, column int) *dataFile {
	df := &seg.Mirrors[mirror].Servers[column]
	if df.State == layout.CopyStale {
		return nil
	}
	d := f.dataFile(df)
	if d.forsaken.Load() {
		return nil
	}
	d.column.Store(int32(column))
	if len(seg.Mirrors) > 1 {
		d.mirrored.Store(true)
	}
	return d
}

// readable reports whether a data file is a copy that may be read.
func (f *File) readable(df *layout.DataFile) bool {
	if df.State != layout.CopyGood {
		return false
	}
	if f.forsook.Load() == 0 {
		return true
	}
	d := f.lookup(df)
	return d == nil || !d.forsaken.Load()
}

// Forsake gives copies up for good: they are neither read nor written from now on, whatever segments say. Writes under way
// do not wait for them, and what is retained of them is dropped. Reads that have begun may still bring what they hold. There
// must be another copy of whatever they hold, and nobody else may take these for good any more.
func (f *File) Forsake(copies []*layout.DataFile) {
	for _, df := range copies {
		d := f.dataFile(df)
		d.mu.Lock()
		first := !d.forsaken.Swap(true)
		d.replace(0, math.MaxInt64)
		orphans := d.orphans
		d.orphans = nil
		d.mu.Unlock()
		if !first {
			continue
		}
		f.forsook.Add(1)
		d.forsake()
		for _, pc := range orphans {
			pc.group.drop()
		}
	}
	f.plane.watch.hurry()
}

// Forsook reports whether copies were given up.
func (f *File) Forsook() bool { return f.forsook.Load() > 0 }

// lookup returns the state of a data file, nil if nothing was written to it.
func (f *File) lookup(df *layout.DataFile) *dataFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.files[fileKey{df.Device, string(df.Handles[0])}]
}

// Dirty reports whether Commit has something to do or writes are still under way.
func (f *File) Dirty() bool { return f.unstable.Load() > 0 || !f.locks.idle() }

// Renew makes Commit use the handles and credentials of seg, a newer RW segment of the file, for data files written
// before. StartWrite does the same with its segment. On namespaces there is nothing to renew, and seg need not have extents.
func (f *File) Renew(seg *layout.Segment) {
	for m := range seg.Mirrors {
		for i := range seg.Mirrors[m].Servers {
			df := &seg.Mirrors[m].Servers[i]
			if d := f.lookup(df); d != nil && !d.use.Load().OnNamespace() {
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

// Drop forgets unstable data at and past from, and what was written to INVALID extents there: the file is being truncated,
// or removed (from 0). The caller holds LockRange(from, layout.ToEOF), so that no write or resend is under way there.
func (f *File) Drop(from int64) {
	f.forgetFrom(from)
	f.eachValidator(func(v Validator, df *layout.DataFile) { v.Cut(df, from) })
}

// Surrender forgets unstable data that cannot be made stable, because another client is about to write there. The caller
// keeps new writes out and has waited for those under way.
func (f *File) Surrender(ctx context.Context) error {
	// Once it is forgotten nothing of it is sent again.
	f.forgetFrom(0)
	return f.AwaitStrays(ctx)
}

func (f *File) forgetFrom(from int64) {
	for _, d := range f.dataFiles() {
		d.mu.Lock()
		d.replace(from, math.MaxInt64)
		d.mu.Unlock()
	}
}

// Forsaken reports whether a copy was given up.
func (f *File) Forsaken(df *layout.DataFile) bool {
	d := f.lookup(df)
	return d != nil && d.forsaken.Load()
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
