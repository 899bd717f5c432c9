package datafile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/datafile/extent"
	"github.com/weftfs/weft/server/meta/schema"
)

const (
	// fillBlock is how many bytes are copied at a time.
	fillBlock = 1 << 20
	// fillHole is how many zeros are left out, since nothing else can be where nothing was written.
	fillHole = 64 << 10
)

var zeros [fillHole]byte

// copyPlace is where a copy is in a layout.
type copyPlace struct{ mirror, column int }

// StartFill begins, or goes on, to make new copies of file id for those that are stale: a data file on another device takes the
// place of each, as far as there are devices. It returns the layout, and up to where copies that are being filled are full.
// Nobody may have a layout for writing the file meanwhile. Copies that are pinned do not begin to move.
//
// A copy that was being filled already gets a new owner first, so that nothing that an earlier filler wrote comes late; if its
// data server does not confirm that, it is stale, too.
func (m *Manager) StartFill(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) (row schema.Layout, done int64, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return row, 0, err
	}
	defer unlock()
	if err = m.refence(ctx, id); err == nil {
		err = m.replaceStale(ctx, id)
	}
	if err == nil {
		err = m.startMove(ctx, id, pinned)
	}
	if err == nil {
		row, done, err = m.filling(ctx, id)
	}
	if err != nil {
		return row, 0, fmt.Errorf("new copies for inode %d: %w", id, err)
	}
	return row, done, nil
}

// filling reads a layout, and how far its copies have got.
func (m *Manager) filling(ctx context.Context, id layout.FileID) (row schema.Layout, done int64, err error) {
	values, err := m.cfg.Engine.GetMany(ctx, [][]byte{schema.LayoutKey(id), schema.FillKey(id)})
	if err != nil || values[0] == nil {
		return row, 0, err
	}
	err = schema.Decode(values[0], &row)
	if err == nil && values[1] != nil {
		var fill schema.Fill
		err = schema.Decode(values[1], &fill)
		done = fill.Done
	}
	return row, done, err
}

// errInherited: what an earlier Manager has written to the namespace may still be on its way.
var errInherited = errors.New("an earlier metadata service was filling it")

// refence gives the copies that are being filled new owners. The file is locked.
func (m *Manager) refence(ctx context.Context, id layout.FileID) error {
	row, _, err := m.filling(ctx, id)
	if err != nil {
		return err
	}
	owners := map[copyPlace]layout.Credential{}
	for i, files := range row.Mirrors {
		for j := range files {
			file := &files[j]
			if file.State != layout.CopyFilling {
				continue
			}
			if owner, ok := owners[copyPlace{i, 0}]; ok && j > 0 && file.Same(&files[0]) {
				owners[copyPlace{i, j}] = owner
				continue
			}
			owner := layout.Credential{UID: randomID(), GID: randomID()}
			calling, cancel := context.WithTimeout(ctx, patience)
			d, err := m.device(file.Device)
			if err == nil && d.space != nil && file.Number < d.inherited {
				err = errInherited
			}
			if err == nil {
				err = d.do(calling, func(st dataStore) error { return st.Fence(calling, file.Handle, owner) })
			}
			cancel()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err == nil {
				owners[copyPlace{i, j}] = owner
			}
		}
	}
	return m.relayout(ctx, id, func(_ *catalog.Batch, row *schema.Layout) bool {
		changed := false
		for i, files := range row.Mirrors {
			for j := range files {
				if files[j].State != layout.CopyFilling {
					continue
				}
				changed = true
				if owner, ok := owners[copyPlace{i, j}]; ok {
					files[j].UID, files[j].GID = owner.UID, owner.GID
				} else {
					files[j].State = layout.CopyStale
				}
			}
		}
		return changed
	})
}

// replaceStale puts new data files into the places of stale ones, which become garbage. All copies that are being filled begin
// anew then. The file is locked.
func (m *Manager) replaceStale(ctx context.Context, id layout.FileID) error {
	row, _, err := m.filling(ctx, id)
	if err != nil {
		return err
	}
	taken := map[copyPlace]schema.DataFile{}
	m.mu.Lock()
	for at, d := range m.placesFor(&row) {
		taken[at] = d.next()
	}
	m.mu.Unlock()
	if len(taken) == 0 {
		return nil
	}
	var used []schema.DataFile
	var left []schema.DataFile
	err = m.relayout(ctx, id, func(b *catalog.Batch, row *schema.Layout) bool {
		used, left = nil, nil
		changed := false
		for at, file := range taken {
			old := &row.Mirrors[at.mirror][at.column]
			switch {
			case old.Device == file.Device && old.Number == file.Number: // by an earlier try whose outcome was not known
				used = append(used, file)
				continue
			case old.State != layout.CopyStale:
				left = append(left, file)
				continue
			}
			b.GuardPresent(schema.GarbageKey(file.Device, file.Number))
			b.Delete(schema.GarbageKey(file.Device, file.Number))
			b.Add(schema.InUseKey(file.Device), 0, 1)
			b.Put(schema.GarbageKey(old.Device, old.Number), m.mark())
			b.Add(schema.InUseKey(old.Device), 0, -1)
			*old = file
			old.State = layout.CopyFilling
			used = append(used, file)
			changed = true
		}
		if changed {
			b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{})) // there is one: copies were stale
		}
		return changed
	})
	if err != nil {
		m.sortOut(id, slices.Collect(maps.Values(taken)))
		return err
	}
	if used == nil && left == nil { // the file is gone
		for _, file := range taken {
			left = append(left, file)
		}
	}
	m.release(used)
	m.putBack(left)
	m.Kick()
	return nil
}

// Fillable reports whether StartFill would find something to fill now.
func (m *Manager) Fillable(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) (bool, error) {
	row, _, err := m.filling(ctx, id)
	var to layout.DeviceID
	if err == nil {
		to, err = m.moveTarget(ctx, id)
	}
	if err != nil {
		return false, fmt.Errorf("copies of inode %d: %w", id, err)
	}
	if row.Moving {
		return !m.leavesPinned(&row, to, pinned), nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(row.Copies(layout.CopyFilling)) > 0 || len(m.placesFor(&row)) > 0 || len(m.movesFor(&row, pinned)) > 0 ||
		to != (layout.DeviceID{}) && len(movesTo(&row, to, pinned)) > 0, nil
}

// placesFor finds devices for new data files in the places of the stale copies of a layout: such as have no other copy of the same
// column, and few of the file's data files. Each has enough data files in its pool. m.mu is held.
func (m *Manager) placesFor(row *schema.Layout) map[copyPlace]*device {
	usable, _, _ := m.usable()
	inFile := map[layout.DeviceID]int{}
	inColumn := make([]map[layout.DeviceID]bool, columns(row))
	for j := range inColumn {
		inColumn[j] = map[layout.DeviceID]bool{}
		for _, files := range row.Mirrors {
			if files[j].State != layout.CopyStale {
				inFile[files[j].Device]++
				inColumn[j][files[j].Device] = true
			}
		}
	}
	places := map[copyPlace]*device{}
	stock := map[*device]int{}
	for i, files := range row.Mirrors {
		if row.Moving && i == len(row.Mirrors)-1 {
			break // what fails there is given up, see Exchange
		}
		for j := range files {
			if files[j].State != layout.CopyStale || files[j].IsAbsent() {
				continue
			}
			var best *device
			for _, d := range usable {
				if inColumn[j][d.id] {
					continue
				}
				if len(d.pool) == stock[d] {
					d.demand = max(d.demand, stock[d]+1)
					kick(d.refill)
					continue
				}
				if best == nil || inFile[d.id] < inFile[best.id] {
					best = d
				}
			}
			if best == nil {
				continue
			}
			places[copyPlace{i, j}] = best
			stock[best]++
			inFile[best.id]++
			inColumn[j][best.id] = true
		}
	}
	return places
}

// Fill copies the n bytes at off to those copies of a layout that are being filled. Nobody else may write there meanwhile. It
// returns where the good copies end; what goes on beyond off+n is still to be copied. pace is called with the number of
// bytes before they are copied. After an error the copies that are being filled may be written to later.
func (m *Manager) Fill(ctx context.Context, id layout.FileID, row schema.Layout, off, n int64, pace func(context.Context, int) error) (end int64, err error) {
	now, _, err := m.filling(ctx, id)
	if err != nil {
		return 0, fmt.Errorf("fill copies of inode %d: %w", id, err)
	}
	var mu sync.Mutex // guards end and errs
	var errs []error
	var work sync.WaitGroup
	for j := range columns(&row) {
		var to []*schema.DataFile
		var from []*schema.DataFile
		for i, files := range row.Mirrors {
			switch {
			case files[j].State == layout.CopyFilling:
				to = append(to, &files[j])
			case stillGood(&now, copyPlace{i, j}, &files[j]):
				from = append(from, &files[j])
			}
		}
		if len(to) == 0 {
			continue
		}
		col := layout.Column{Unit: row.StripeUnit, Count: row.Width, Index: j}
		work.Go(func() { // copies one column
			last, err := m.fillColumn(ctx, id, col, from, to, off, off+n, pace)
			mu.Lock()
			defer mu.Unlock()
			end = max(end, last)
			if err != nil {
				errs = append(errs, err)
			}
		})
	}
	work.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, fmt.Errorf("fill copies of inode %d: %w", id, err)
	}
	if end > off+n {
		return end, m.noteFilled(ctx, id, off+n)
	}
	return end, nil
}

// stillGood reports whether a copy that has its place in a layout is good there: since the filling began it may have failed.
func stillGood(now *schema.Layout, at copyPlace, file *schema.DataFile) bool {
	if at.mirror >= len(now.Mirrors) || at.column >= len(now.Mirrors[at.mirror]) {
		return false
	}
	is := &now.Mirrors[at.mirror][at.column]
	return is.State == layout.CopyGood && is.Device == file.Device && is.Number == file.Number
}

// noteFilled records how far a file's copies have got. If that is lost in a crash, so much is copied again.
func (m *Manager) noteFilled(ctx context.Context, id layout.FileID, done int64) error {
	b := catalog.Batch{Durability: catalog.NoSync}
	b.GuardPresent(schema.FillKey(id))
	b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{Done: done}))
	return m.cfg.Engine.Commit(ctx, &b)
}

// fillColumn copies what one of the data files in from has of [off, end) of its column. It returns where that ends.
func (m *Manager) fillColumn(ctx context.Context, id layout.FileID, col layout.Column, from, to []*schema.DataFile, off, end int64, pace func(context.Context, int) error) (last int64, err error) {
	source, size, err := m.source(ctx, from)
	if err == nil && m.space(source.Device) != nil {
		size, err = m.clipped(ctx, id, size)
	}
	if err != nil {
		return 0, err
	}
	buf := make([]byte, fillBlock)
	for at, stop := col.Next(off, min(end, size)); at < stop; at, stop = col.Next(at, min(end, size)) {
		n := int(min(stop-at, m.block(append(slices.Clone(to), source)...)))
		if err := pace(ctx, n); err != nil {
			return 0, err
		}
		data := buf[:n]
		got := 0
		err := m.at(ctx, source, func(st dataStore) (err error) {
			got, err = st.Read(ctx, source.Handle, layout.Credential{UID: source.UID, GID: source.GID}, at, data)
			return err
		})
		if err != nil {
			return 0, err
		}
		clear(data[got:])
		for skip := 0; skip < n; {
			// Zeros need not be written, but for the last bytes, so that the copies are equally long.
			part := data[skip:min(skip+fillHole, n)]
			if bytes.Equal(part, zeros[:len(part)]) && at+int64(skip+len(part)) < size {
				skip += len(part)
				continue
			}
			run := len(part)
			for skip+run < n && !bytes.Equal(data[skip+run:min(skip+run+fillHole, n)], zeros[:min(fillHole, n-skip-run)]) {
				run = min(run+fillHole, n-skip)
			}
			for _, file := range to {
				if err := m.makeRoom(ctx, id, file, at+int64(skip), int64(run)); err != nil {
					return 0, err
				}
				err := m.at(ctx, file, func(st dataStore) error {
					return st.Write(ctx, file.Handle, layout.Credential{UID: file.UID, GID: file.GID}, at+int64(skip), data[skip:skip+run])
				})
				if err != nil {
					return 0, err
				}
			}
			skip += run
		}
		at += int64(n)
		stop = at
	}
	return size, nil
}

// clipped is up to where a data file on a namespace has bytes of the file, though its last block may be longer. Whoever has written there has said
// so, as nobody has a layout for writing what is being copied.
func (m *Manager) clipped(ctx context.Context, id layout.FileID, size int64) (int64, error) {
	raw, err := m.cfg.Engine.Get(ctx, schema.InodeKey(id))
	if err != nil {
		return 0, err
	}
	var ino schema.Inode
	if err := schema.Decode(raw, &ino); err != nil {
		return 0, fmt.Errorf("inode row: %w", err)
	}
	return min(size, ino.Size), nil
}

// makeRoom gives a copy that is being filled space for the n bytes at off, if it is on a namespace and the layout has it still.
func (m *Manager) makeRoom(ctx context.Context, id layout.FileID, file *schema.DataFile, off, n int64) error {
	space := m.space(file.Device)
	if space == nil {
		return nil
	}
	r := layout.Range{Off: off, Len: n}
	for {
		extents, _, err := space.Lookup(ctx, file.Number, r, layout.IOModeRW, maxExtents)
		if err != nil || missing(extents, layout.Column{}, r.Off, r.End()) == r.End() {
			return err
		}
		raw, err := m.cfg.Engine.Get(ctx, schema.LayoutKey(id))
		if err != nil {
			return err
		}
		var row schema.Layout
		if err := schema.Decode(raw, &row); err != nil {
			return fmt.Errorf("layout row: %w", err)
		}
		if !row.Has(func(has *schema.DataFile) bool { return has.Same(file) && has.State == layout.CopyFilling }) {
			return errors.New("the copy is not one of the file's any more that is being filled")
		}
		_, err = extent.Allocate(ctx, []extent.Request{{Space: space, Number: file.Number, Range: r}}, func(b *catalog.Batch) {
			b.GuardEqual(schema.LayoutKey(id), raw)
		})
		if guard := (*catalog.GuardError)(nil); err != nil && !errors.As(err, &guard) && !errors.Is(err, catalog.ErrUnknown) {
			return err
		}
	}
}

// at has f called with the store that a data file is in.
func (m *Manager) at(ctx context.Context, file *schema.DataFile, f func(dataStore) error) error {
	d, err := m.device(file.Device)
	if err == nil {
		err = d.do(ctx, f)
	}
	if err != nil {
		_, name := schema.DataFileName(file.Number)
		err = fmt.Errorf("data file %s: %w", name, err)
	}
	return err
}

// block is how much all these data files' servers take and give at once.
func (m *Manager) block(files ...*schema.DataFile) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := int64(fillBlock)
	for _, file := range files {
		if d := m.find(file.Device); d != nil && d.rsize > 0 && d.wsize > 0 {
			n = min(n, int64(d.rsize), int64(d.wsize))
		}
	}
	return n
}

// isDown reports whether a data file is on a device that is down; m.mu is held.
func (m *Manager) isDown(file *schema.DataFile) bool {
	d := m.find(file.Device)
	return d != nil && d.condition == down
}

// source finds a good copy whose data server answers, and how long it is. Copies on devices that are down are asked
// last.
func (m *Manager) source(ctx context.Context, from []*schema.DataFile) (*schema.DataFile, int64, error) {
	var errs []error
	if len(from) == 0 {
		errs = append(errs, errors.New("no copy is good any more"))
	}
	m.mu.Lock()
	slices.SortStableFunc(from, func(a, b *schema.DataFile) int { return compareBool(m.isDown(a), m.isDown(b)) })
	m.mu.Unlock()
	for _, file := range from {
		asking, cancel := context.WithTimeout(ctx, patience)
		var size int64
		err := m.at(asking, file, func(st dataStore) (err error) {
			size, err = st.Size(asking, file.Handle)
			return err
		})
		cancel()
		if err == nil {
			return file, size, nil
		}
		errs = append(errs, err)
	}
	return nil, 0, errors.Join(errs...)
}

// EndFill makes the copies that were being filled in row good, unless something has become of them. It returns whether all
// copies of the file are good then.
func (m *Manager) EndFill(ctx context.Context, id layout.FileID, row schema.Layout) (complete bool, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return false, err
	}
	defer unlock()
	filled := map[layout.DeviceID]map[uint64]bool{}
	for _, files := range row.Mirrors {
		for j := range files {
			if files[j].State == layout.CopyFilling {
				if filled[files[j].Device] == nil {
					filled[files[j].Device] = map[uint64]bool{}
				}
				filled[files[j].Device][files[j].Number] = true
			}
		}
	}
	err = m.relayout(ctx, id, func(b *catalog.Batch, now *schema.Layout) bool {
		changed := false
		mirrors := now.Mirrors
		if now.Gathers() { // it becomes good when it takes the place of all, or not at all
			mirrors = mirrors[:len(mirrors)-1]
		}
		for _, files := range mirrors {
			for j := range files {
				if files[j].State == layout.CopyFilling && filled[files[j].Device][files[j].Number] {
					files[j].State = layout.CopyGood
					changed = true
				}
			}
		}
		complete = !now.Incomplete()
		return changed
	})
	if err != nil {
		return false, fmt.Errorf("copies of inode %d are full: %w", id, err)
	}
	return complete, nil
}
