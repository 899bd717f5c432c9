package datafile

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sync/errgroup"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/schema"
)

const (
	// maxSegmentExtents is how many extents all data files of a segment have together, so that several segments fit a frame.
	maxSegmentExtents = 1 << 16
	// maxAllocation is how many bytes of a file get space at a time, and openAllocation how many if nobody says how many he will write.
	maxAllocation  = 1 << 30
	openAllocation = 64 << 20
	// fenceWait is how long after its session's end a client that reservations do not keep out can have anything under way: it sends nothing
	// any more, and what it has sent ends with its controllers, which are gone when they have heard nothing for twice the keep-alive time.
	fenceWait = 2*nvmetcp.DefaultKATO + 5*time.Second
	// fenceMemory is for how long it is remembered that a session was fenced, after it was asked for last.
	fenceMemory = time.Hour
)

// space returns the space of a device; nil if it is no namespace.
func (m *Manager) space(id layout.DeviceID) *extent.Space {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := m.find(id); d != nil {
		return d.space
	}
	return nil
}

// OnNamespaces reports whether a layout has a data file on an NVMe namespace.
func (m *Manager) OnNamespaces(row schema.Layout) bool {
	return row.Has(func(file *schema.DataFile) bool { return m.space(file.Device) != nil })
}

// columnOf is which bytes of the file a data file in column j of a layout has.
func columnOf(row *schema.Layout, files []schema.DataFile, j int) layout.Column {
	if row.Width <= 1 || len(files) > 1 && schema.OneFile(files) {
		return layout.Column{}
	}
	return layout.Column{Unit: row.StripeUnit, Count: row.Width, Index: j}
}

// missing is the first byte of a column in [off, end) that has no extent; end if there is none. What follows the last of the extents has none.
func missing(extents []layout.Extent, column layout.Column, off, end int64) int64 {
	last := off
	for i := range extents {
		e := &extents[i]
		if e.State == layout.ExtentNone {
			if from, to := column.Next(max(e.Off, off), min(e.End(), end)); from < to {
				return from
			}
		}
		last = max(last, e.End())
	}
	from, _ := column.Next(last, max(last, end))
	return min(from, end)
}

// lacking lists the space that the data files of a layout still need for the n bytes at off, those first that have the first byte.
func (m *Manager) lacking(ctx context.Context, row *schema.Layout, off, n int64) (requests []extent.Request, err error) {
	r := layout.Range{Off: off, Len: max(n, 1)}
	if row.StripeUnit > 0 { // segments begin there, so that it is to have space, too
		before := off % min(row.StripeUnit, extent.MinUnit)
		r.Off -= before
		if r.End() < math.MaxInt64-before {
			r.Len += before
		}
	}
	if r.End() == math.MaxInt64 {
		r.Len = min(max(row.StripeUnit, 1)*int64(max(row.Width, 1)), openAllocation)
	}
	r.Len = min(r.Len, maxAllocation)
	if r.Off < extent.MaxBytes {
		r.Len = min(r.Len, extent.MaxBytes-r.Off)
	}
	begins := map[uint64]int64{}
	for _, files := range row.Mirrors {
		for j := range files {
			file := &files[j]
			column := columnOf(row, files, j)
			space := m.space(file.Device)
			from, to := column.Next(r.Off, r.End())
			if space == nil || file.State == layout.CopyStale || from == to || column.Count == 0 && j > 0 {
				continue
			}
			if off >= extent.MaxBytes {
				return nil, fmt.Errorf("space at %d: %w", off, extent.ErrTooFar)
			}
			extents, _, err := space.Lookup(ctx, file.Number, r, layout.IOModeRW, maxExtents)
			if err != nil {
				return nil, err
			}
			if len(extents) == maxExtents { // what follows is for later
				to = extents[maxExtents-1].End()
			} else {
				to = r.End()
			}
			if missing(extents, column, r.Off, min(to, r.End())) < min(to, r.End()) {
				requests = append(requests, extent.Request{Space: space, Number: file.Number, Column: column, Range: r})
				begins[file.Number] = from
			}
		}
	}
	slices.SortStableFunc(requests, func(a, b extent.Request) int {
		return compareBool(begins[a.Number] != r.Off, begins[b.Number] != r.Off)
	})
	return requests, nil
}

// allocate gives data files space, in one batch with what with adds. All the first ones, of as many as there are mirrors, get some.
func (m *Manager) allocate(ctx context.Context, requests []extent.Request, mirrors int, with func(*catalog.Batch)) error {
	var b catalog.Batch
	with(&b)
	const entries = 16 // of a request that gets little
	most := max((m.cfg.Engine.Caps().MaxKeys-b.Len())/entries, mirrors)
	_, err := extent.Allocate(ctx, requests[:min(most, len(requests))], with)
	return err
}

// becameFull looks again at how much space the namespaces have that new data files were taken from, and reports whether one is full.
func (m *Manager) becameFull(ctx context.Context, taken []schema.DataFile) (full bool) {
	for i := range taken {
		d, err := m.device(taken[i].Device)
		if err != nil || d.space == nil {
			continue
		}
		stat, err := d.space.Stat(ctx)
		if err != nil {
			continue
		}
		m.mu.Lock()
		d.stat = fsstatOf(stat)
		full = full || d.room() == none
		m.mu.Unlock()
	}
	return full
}

// giveUpFilling makes the copies of a file stale that are being filled on namespaces, and reports whether there are any: nobody is to fail because one
// of them is full. The file is locked.
func (m *Manager) giveUpFilling(ctx context.Context, id layout.FileID) (some bool, err error) {
	err = m.relayout(ctx, id, func(_ *catalog.Batch, row *schema.Layout) bool {
		some = false
		for _, files := range row.Mirrors {
			for j := range files {
				if files[j].State == layout.CopyFilling && m.space(files[j].Device) != nil {
					files[j].State = layout.CopyStale
					some = true
				}
			}
		}
		return some
	})
	return some, err
}

// unit is the largest allocation unit of the namespaces that new data files may go to, of which the stripe unit of a new file is a multiple; 1 if there is none.
// m.mu is held.
func (m *Manager) unit() int64 {
	unit := int64(1)
	for _, d := range m.devices {
		if d.space != nil && !d.row.Draining {
			is := d.space.Namespace()
			unit = max(unit, is.Unit)
		}
	}
	return unit
}

// Extents completes segments of a layout. Segments for writing end where a data file lacks space, which Assign gives, and all where one has more
// extents than fit. A segment of which nothing is left is not returned.
func (m *Manager) Extents(ctx context.Context, row schema.Layout, segments []metarpc.Segment) ([]metarpc.Segment, error) {
	if !m.OnNamespaces(row) {
		return segments, nil
	}
	var done []metarpc.Segment
	for _, s := range segments {
		if err := m.extents(ctx, &s); err != nil {
			return nil, fmt.Errorf("extents of data files: %w", err)
		}
		if s.Len > 0 {
			done = append(done, s)
		}
	}
	return done, nil
}

// extents completes one segment.
func (m *Manager) extents(ctx context.Context, s *metarpc.Segment) error {
	type place struct {
		file    *metarpc.DataFile
		column  layout.Column
		space   *extent.Space
		extents []layout.Extent
	}
	var places []place
	mirrors := make([][]metarpc.DataFile, len(s.Mirrors))
	for i := range s.Mirrors {
		mirrors[i] = slices.Clone(s.Mirrors[i])
		for j := range mirrors[i] {
			p := place{file: &mirrors[i][j], space: m.space(mirrors[i][j].Device)}
			if width := len(mirrors[i]); width > 1 {
				p.column = layout.Column{Unit: s.StripeUnit, Count: width, Index: j}
			}
			if p.space != nil && p.file.State != layout.CopyStale {
				places = append(places, p)
			}
		}
	}
	s.Mirrors = mirrors
	most := max(min(maxExtents, maxSegmentExtents/max(len(places), 1)), 1)
	whole := layout.Range{Off: s.Off, Len: s.Len}.End()
	end := whole
	for i := range places {
		p := &places[i]
		number, err := numberIn(p.file.Handle)
		if err != nil {
			return err
		}
		r := layout.Range{Off: s.Off, Len: layout.ToEOF}
		if end < math.MaxInt64 {
			r.Len = end - s.Off
		}
		p.extents, p.file.Generation, err = p.space.Lookup(ctx, number, r, layout.IOModeRW, most)
		if err != nil {
			return err
		}
		if len(p.extents) == most {
			end = min(end, p.extents[most-1].End())
		}
		if s.IOMode == layout.IOModeRW {
			end = missing(p.extents, p.column, s.Off, end)
		}
		if end <= s.Off {
			s.Len = 0
			return nil
		}
	}
	if end < whole {
		s.Len = end - s.Off
	}
	for i := range places {
		p := &places[i]
		ns := p.space.Namespace()
		last := int64(math.MaxInt64)
		if end < last-ns.Block {
			last = (end + ns.Block - 1) / ns.Block * ns.Block
		}
		for _, e := range p.extents {
			if e.State != layout.ExtentNone && e.Off < last {
				p.file.Extents = append(p.file.Extents, metarpc.Extent{Off: e.Off, Len: min(e.Len, last-e.Off), Addr: e.Addr, State: e.State})
			}
		}
	}
	return nil
}

// errTaken: an error of Validate. Its errno is ESTALE.
var errTaken = fmt.Errorf("blocks were taken away since they were written: %w", syscall.ESTALE)

// Validate makes blocks of file id's data files valid. What is said of copies that the file does not have any more, or that are stale, is not
// done. The commits do not wait for the disk. An error that is ESTALE says that blocks were taken away since.
func (m *Manager) Validate(ctx context.Context, id layout.FileID, written []metarpc.Written) error {
	for i := range written {
		if err := m.validate(ctx, id, &written[i]); err != nil {
			return fmt.Errorf("what was written to inode %d: %w", id, err)
		}
	}
	return nil
}

// validate does one of Validate's. The file is not locked: somebody may be waiting for new data files of it.
func (m *Manager) validate(ctx context.Context, id layout.FileID, w *metarpc.Written) error {
	space := m.space(w.Copy.Device)
	if space == nil {
		return nil
	}
	var refused error
	for {
		row, _, err := m.filling(ctx, id)
		if err != nil {
			return err
		}
		column, has := holds(&row, w.Copy)
		if !has {
			return nil
		}
		if refused != nil { // and the file has it still
			return refused
		}
		number, err := numberIn(w.Copy.Handle)
		if err != nil {
			return err
		}
		ns := space.Namespace()
		if column.Unit%ns.Block != 0 { // a block is of several columns
			column = layout.Column{}
		}
		ranges := make([]layout.Range, len(w.Ranges))
		for i, r := range w.Ranges {
			ranges[i] = layout.Range{Off: r.Off, Len: r.Len}
		}
		err = space.Validate(ctx, number, w.Generation, column, ranges)
		if !errors.Is(err, extent.ErrStale) && !errors.Is(err, extent.ErrNotAllocated) {
			return err
		}
		refused = fmt.Errorf("%w: %w", errTaken, err)
	}
}

// holds reports whether a layout has a data file that is not stale, and which bytes that has.
func holds(row *schema.Layout, ref metarpc.CopyRef) (column layout.Column, has bool) {
	for _, files := range row.Mirrors {
		for j := range files {
			if files[j].State != layout.CopyStale && files[j].Is(ref) {
				return columnOf(row, files, j), true
			}
		}
	}
	return column, false
}

// fencedSession is what is known of a session that is to be fenced.
type fencedSession struct {
	since   time.Time // it was lost
	asked   time.Time // last
	devices map[layout.DeviceID]bool
}

// FenceSession returns when nothing that a session has sent to the namespaces that a layout has data files on is carried out any more: where there are reservations
// the client's registration is taken away, elsewhere it is waited for that its controllers have ended. The session is over, so the client sends nothing
// more. It waits for namespaces that cannot be reached until ctx ends. What was done once for a session and a device is not done again.
func (m *Manager) FenceSession(ctx context.Context, row schema.Layout, session metarpc.SessionID) error {
	now := time.Now()
	m.mu.Lock()
	for id, f := range m.fenced {
		if now.Sub(f.asked) > fenceMemory {
			delete(m.fenced, id)
		}
	}
	f := m.fenced[session]
	if f == nil {
		f = &fencedSession{since: now, devices: map[layout.DeviceID]bool{}}
		m.fenced[session] = f
	}
	f.asked = now
	var devices []*device
	row.Has(func(file *schema.DataFile) bool {
		if d := m.find(file.Device); d != nil && d.space != nil && !f.devices[d.id] && !slices.Contains(devices, d) {
			devices = append(devices, d)
		}
		return false
	})
	m.mu.Unlock()
	var calls errgroup.Group
	for _, d := range devices {
		calls.Go(func() error { // one namespace's fence
			if err := d.fenceSession(ctx, session, f.since); err != nil {
				return fmt.Errorf("fence a client on %v: %w", d.url(), err)
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			f.devices[d.id] = true
			return nil
		})
	}
	return calls.Wait()
}

// fenceSession keeps a session that was lost at a time from the namespace.
func (d *device) fenceSession(ctx context.Context, session metarpc.SessionID, since time.Time) error {
	d.m.mu.Lock()
	reserved, wait := d.row.Reserved, d.m.fenceWait
	d.m.mu.Unlock()
	if reserved {
		return d.do(ctx, func(st dataStore) error {
			return answered(st.(*namespaceStore).ns.Preempt(ctx, hostKey(d.m.cfg.Volume), session.Key()))
		})
	}
	t := time.NewTimer(time.Until(since.Add(wait)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-d.m.ctx.Done():
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// describeExtents tells people where a data file on a namespace is.
func (m *Manager) describeExtents(file *schema.DataFile, space *extent.Space) metarpc.DescribedServer {
	s := metarpc.DescribedServer{Device: file.Device, DataFile: fmt.Sprintf("data file %x", file.Number)}
	if d, err := m.device(file.Device); err == nil {
		s.Address = d.url().String()
	}
	if f, err := space.File(m.ctx, file.Number); err == nil {
		s.DataFile += fmt.Sprintf(", %s allocated", humanize.IBytes(uint64(f.Bytes)))
	}
	return s
}
