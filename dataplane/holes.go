package dataplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"

	"github.com/weftfs/weft/internal/rangemap"
	"github.com/weftfs/weft/layout"
)

// Sparser is what a Target also offers if its server may be able to reserve space and to tell holes from data. What the
// server cannot do ends with an error whose Errno is EOPNOTSUPP; so does everything with a server that is none of weft's.
// The calls block until the server has answered, ctx ends, or the target is closed.
type Sparser interface {
	// Allocate reserves space for the bytes of col in the n bytes at off, which become the data file's size at least unless
	// keepSize is set. Deallocate makes them read as zeros and frees their space. Both are stable when they return nil.
	Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, keepSize bool) error
	Deallocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64) error
	// Seek finds the first byte of col in the n bytes at off that is a hole, or else data. What lies behind the end of the
	// data file is a hole.
	Seek(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, hole bool) (at int64, found bool, err error)
}

// ErrUnsupported tells that a data server cannot reserve space without changing the file. Its errno is EOPNOTSUPP.
var ErrUnsupported error = unsupported{}

type unsupported struct{}

func (unsupported) Error() string        { return "a data server cannot reserve space" }
func (unsupported) Errno() syscall.Errno { return syscall.EOPNOTSUPP }

const (
	// sparseWidth bounds the data files that are asked at the same time.
	sparseWidth = 64
	// fillSize is how many zeros are written at once where a server cannot do better.
	fillSize = 1 << 20
	// fillBlock is what is taken for a hole if it is all zeros: a block of most file systems.
	fillBlock = 4 << 10
)

var zeros [fillSize]byte

// Punch makes the n bytes at off of a file read as zeros, at every mirror. Where the server can, their space is freed and
// that is stable; elsewhere zeros are written like unstable data.
//
// It has its place in the order of writes. If ctx ends first it goes on by itself, holding its range. ended is called
// exactly once, when no request is under way any more; then, if the error is nil, nothing that was retained in the range
// is left to be sent again. After an error what the range holds is undefined, as it is after that of a write.
func (f *File) Punch(ctx context.Context, seg *layout.Segment, off, n int64, ended func(error)) error {
	return f.ordered(ctx, "punch", seg, off, n, ended, func(held *orphans) error {
		err := f.eachDataFile(seg, off, off+n, held, func(s Sparser, d *dataFile, df *layout.DataFile, _ layout.Column) error {
			// All of the range: in a data file there is nothing where other columns are.
			if err := s.Deallocate(d.ctx, df, layout.Column{}, off, n); err != nil {
				return err
			}
			d.mu.Lock()
			d.replace(off, off+n)
			d.mu.Unlock()
			return nil
		})
		if errors.Is(err, ErrUnsupported) {
			err = f.fill(seg, off, off+n, held)
		}
		return err
	})
}

// Allocate sees to it that writes to the n bytes at off do not fail for lack of space, at every mirror. Nothing that can be
// read changes. The data files may become longer unless keepSize is set. ctx and ended are as for Punch.
//
// A server that cannot reserve space is sent zeros where it has nothing but zeros; another client must not write there
// meanwhile. With keepSize that is out of the question, and the error ErrUnsupported.
func (f *File) Allocate(ctx context.Context, seg *layout.Segment, off, n int64, keepSize bool, ended func(error)) error {
	return f.ordered(ctx, "allocation", seg, off, n, ended, func(held *orphans) error {
		err := f.eachDataFile(seg, off, off+n, held, func(s Sparser, d *dataFile, df *layout.DataFile, col layout.Column) error {
			return s.Allocate(d.ctx, df, col, off, n, keepSize)
		})
		if errors.Is(err, ErrUnsupported) && !keepSize {
			err = f.fillHoles(seg, off, off+n, held)
		}
		return err
	})
}

// ordered runs op with the range held, and waits for it as long as ctx and Config.Patience allow.
func (f *File) ordered(ctx context.Context, name string, seg *layout.Segment, off, n int64, ended func(error), op func(held *orphans) error) error {
	describe := func(err error) error {
		if err != nil {
			err = fmt.Errorf("%s of %d bytes at %d in %v: %w", name, n, off, seg.Range, err)
		}
		return err
	}
	var err error
	switch {
	case off < 0 || n < 0 || !seg.Contains(off, n):
		err = layout.ErrBeyondSegment
	case seg.IOMode != layout.IOModeRW:
		err = ErrReadOnly
	}
	if err != nil || n == 0 {
		err = describe(err)
		ended(err)
		return err
	}
	return describe(f.plane.patiently(ctx, func(ctx context.Context) error {
		node, err := f.lock(ctx, off, off+n)
		if err != nil {
			ended(describe(err))
			return err
		}
		result := make(chan error, 1)
		// This goroutine owns the range until the servers have answered, which ends it.
		go func() {
			held := &orphans{file: f}
			held.count.Store(1)
			err := op(held)
			held.node = node
			held.drop()
			ended(describe(err))
			result <- err
		}()
		select {
		case err := <-result:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}))
}

// eachDataFile runs do for each data file, of all copies that are written, that has some of [off, end), as it is used now: on a namespace that is as
// seg has it, since other segments need not have extents there. The error is
// ErrUnsupported if that is all that stood in the way. Copies are waited for as in together; held keeps the range until all
// calls have ended.
func (f *File) eachDataFile(seg *layout.Segment, off, end int64, held *orphans, do func(Sparser, *dataFile, *layout.DataFile, layout.Column) error) error {
	var files []*dataFile
	type place struct{ mirror, column int }
	columns := map[*dataFile][]place{} // several, while the file is moved into one data file
	for i := range seg.Width() {
		if from, to := seg.Column(i).Next(off, end); from == to {
			continue
		}
		good := false
		for m := range seg.Mirrors {
			if d := f.writable(seg, m, i); d != nil {
				if columns[d] == nil {
					files = append(files, d)
				}
				columns[d] = append(columns[d], place{m, i})
				good = good || seg.Mirrors[m].Servers[i].State == layout.CopyGood
			}
		}
		if !good {
			return ErrForsaken
		}
	}
	held.count.Add(int32(len(files)))
	room := make(chan struct{}, sparseWidth)
	results := f.together(files, layout.OpWrite, func(d *dataFile) error {
		defer held.drop()
		room <- struct{}{}
		defer func() { <-room }()
		df := d.use.Load()
		s, err := f.sparser(d.ctx, df)
		for _, at := range columns[d] {
			use := d.use.Load()
			if use.OnNamespace() {
				use = &seg.Mirrors[at.mirror].Servers[at.column]
			}
			if err == nil {
				err = do(s, d, use, seg.Column(at.column))
			}
		}
		if err != nil && !isUnsupported(err) {
			return &Error{Op: layout.OpWrite, Device: df.Device, File: df, Off: off, Err: err}
		}
		return err
	})
	var errs []error
	foreign := false
	for _, err := range results {
		if isUnsupported(err) {
			foreign = true
		} else if err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 && foreign {
		return ErrUnsupported
	}
	return errors.Join(errs...)
}

// sparser returns the target of a data file, ErrUnsupported if it offers no more than reading and writing.
func (f *File) sparser(ctx context.Context, df *layout.DataFile) (Sparser, error) {
	c, err := f.plane.connectWait(ctx, df.Device)
	if err != nil {
		return nil, err
	}
	if s, ok := c.Target.(Sparser); ok {
		return s, nil
	}
	return nil, ErrUnsupported
}

func isUnsupported(err error) bool {
	var e interface{ Errno() syscall.Errno }
	return errors.As(err, &e) && e.Errno() == syscall.EOPNOTSUPP
}

// fill writes zeros to [off, end), which is held.
func (f *File) fill(seg *layout.Segment, off, end int64, held *orphans) error {
	for off < end {
		n := min(end-off, fillSize)
		if err := f.writeHeld(seg, off, zeros[:n], held); err != nil {
			return err
		}
		off += n
	}
	return nil
}

// fillHoles writes zeros to those blocks in [off, end), which is held, that have no other bytes.
func (f *File) fillHoles(seg *layout.Segment, off, end int64, held *orphans) error {
	buf := make([]byte, min(end-off, fillSize))
	for off < end {
		n := min(end-off, fillSize)
		if err := f.readHeld(seg, off, buf[:n]); err != nil {
			return err
		}
		hole := int64(-1) // where the blocks begin that are to be written; -1 if there are none
		for at := int64(0); at < n; {
			next := min(n, at+fillBlock-(off+at)%fillBlock)
			empty := !slices.ContainsFunc(buf[at:next], func(b byte) bool { return b != 0 })
			if empty && hole < 0 {
				hole = at
			}
			if to := at; hole >= 0 && (!empty || next == n) {
				if empty {
					to = next
				}
				if err := f.fill(seg, off+hole, off+to, held); err != nil {
					return err
				}
				hole = -1
			}
			at = next
		}
		off += n
	}
	return nil
}

// writeHeld writes unstable data to a range that is held already.
func (f *File) writeHeld(seg *layout.Segment, off int64, data []byte, held *orphans) error {
	done := make(chan error, 1)
	q := writeRequests.Get().(*writeRequest)
	q.mu.Lock()
	q.file, q.seg, q.data, q.off, q.stable, q.done = f, seg, data, off, layout.Unstable, func(err error) { done <- err }
	held.count.Add(1)
	q.orphans = held
	q.begin()
	f.plane.Flush()
	return <-done
}

// readHeld reads a range that is held. Doubts about retained data are not settled, since that would wait for the range:
// the retained bytes count.
func (f *File) readHeld(seg *layout.Segment, off int64, buf []byte) error {
	done := make(chan error, 1)
	q := readRequests.Get().(*readRequest)
	q.mu.Lock()
	q.file, q.seg, q.data, q.off, q.done = f, seg, buf, off, func(_ int, err error) { done <- err }
	q.todo = append(q.todo, readSpan{off, off + int64(len(buf)), 0})
	q.settles = maxSettles
	q.begin()
	f.plane.Flush()
	return <-done
}

// Seek finds the first byte in the n bytes at off that is in a hole, or else is data. Holes come in blocks of the servers'
// file systems; a server that cannot tell has data only. What is retained is data.
//
// Of each stripe column any mirror will do. They are asked until one answers: the most efficient first, those on late
// devices last.
func (f *File) Seek(ctx context.Context, seg *layout.Segment, off, n int64, hole bool) (at int64, found bool, err error) {
	if off < 0 || n < 0 || !seg.Contains(off, n) {
		return 0, false, fmt.Errorf("seek in %d bytes at %d in %v: %w", n, off, seg.Range, layout.ErrBeyondSegment)
	}
	err = f.plane.patiently(ctx, func(ctx context.Context) (err error) {
		at, found, err = f.seek(ctx, seg, off, n, hole)
		return err
	})
	if err != nil {
		return 0, false, fmt.Errorf("seek in %d bytes at %d: %w", n, off, err)
	}
	return at, found, nil
}

func (f *File) seek(ctx context.Context, seg *layout.Segment, off, n int64, hole bool) (at int64, found bool, err error) {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	room := make(chan struct{}, sparseWidth)
	for i := range seg.Width() {
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			here, ok, err := f.seekColumn(ctx, seg, i, off, off+n, hole)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			}
			if ok && (!found || here < at) {
				at, found = here, true
			}
		})
	}
	wg.Wait()
	return at, found, errors.Join(errs...)
}

func (f *File) seekColumn(ctx context.Context, seg *layout.Segment, i int, off, end int64, hole bool) (at int64, found bool, err error) {
	if off, _ = seg.Column(i).Next(off, end); off == end {
		return 0, false, nil
	}
	var errs []error
	late := func(m int) int {
		if df := &seg.Mirrors[m].Servers[i]; f.readable(df) && f.plane.device(df.Device).late() {
			return 1
		}
		return 0
	}
	order := mirrorOrder(seg)
	slices.SortStableFunc(order, func(a, b int) int { return late(a) - late(b) })
	for _, m := range order {
		df := &seg.Mirrors[m].Servers[i]
		if !f.readable(df) {
			continue
		}
		if at, found, err = f.seekDataFile(ctx, df, seg.Column(i), off, end, hole); err == nil {
			return at, found, nil
		}
		errs = append(errs, fmt.Errorf("device %s: %w", df.Device, err))
	}
	if len(errs) == 0 {
		return 0, false, ErrForsaken
	}
	return 0, false, errors.Join(errs...)
}

// seekDataFile asks the server about what lies between retained extents. Those are looked at before it is asked: data that
// is released meanwhile is stable, and the server finds it.
func (f *File) seekDataFile(ctx context.Context, df *layout.DataFile, col layout.Column, off, end int64, hole bool) (at int64, found bool, err error) {
	s, err := f.sparser(ctx, df)
	if isUnsupported(err) {
		return off, !hole, nil
	}
	if err != nil {
		return 0, false, err
	}
	d := f.lookup(df)
	for {
		if off, _ = col.Next(off, end); off == end {
			return 0, false, nil
		}
		kept := span{end, end}
		if d != nil {
			kept = d.firstRetained(off, end)
		}
		if kept.off <= off {
			if !hole {
				return off, true, nil
			}
			off = kept.end
			continue
		}
		at, found, err = s.Seek(ctx, df, col, off, kept.off-off, hole)
		switch {
		case isUnsupported(err):
			return off, !hole, nil
		case err != nil || found:
			return at, found, err
		}
		off = kept.off
	}
}

// firstRetained is the first part of [off, end) that is retained; empty, at end, if there is none.
func (d *dataFile) firstRetained(off, end int64) span {
	first := span{end, end}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.retained.Overlapping(off, end, func(e *rangemap.Entry[retained]) bool {
		first = span{max(e.Off, off), min(e.End, end)}
		return false
	})
	return first
}

// mirrorOrder lists the mirrors, the most efficient first.
func mirrorOrder(seg *layout.Segment) []int {
	order := make([]int, len(seg.Mirrors))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		ea, eb := seg.Mirrors[a].Efficiency(), seg.Mirrors[b].Efficiency()
		switch {
		case ea > eb:
			return -1
		case ea < eb:
			return 1
		}
		return 0
	})
	return order
}
