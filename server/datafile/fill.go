package datafile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
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
	until := time.Now().Add(fillPatience)
	var mu sync.Mutex // guards owners
	owners := map[copyPlace]layout.Credential{}
	var calls sync.WaitGroup
	for i, files := range row.Mirrors {
		for j := range files {
			file := &files[j]
			if file.State != layout.CopyFilling || j > 0 && file.Same(&files[0]) {
				continue
			}
			calls.Go(func() { // one data file's call; ends with its answer, or after fillPatience
				owner := randomOwner()
				d, err := m.device(file.Device)
				if err == nil && d.space != nil && file.Number < d.inherited {
					err = errInherited
				}
				if err == nil {
					err = m.fillCall(ctx, file, until, func(ctx context.Context, st dataStore) error { return st.Fence(ctx, file.Handle, owner) })
				}
				mu.Lock()
				defer mu.Unlock()
				for k := range files {
					if err == nil && files[k].State == layout.CopyFilling && files[k].Same(file) {
						owners[copyPlace{i, k}] = owner
					}
				}
			})
		}
	}
	calls.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
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
	for at, d := range m.placesFor(&row, false) {
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
			if !old.IsAbsent() {
				b.Put(schema.GarbageKey(old.Device, old.Number), m.mark())
				b.Add(schema.InUseKey(old.Device), 0, -1)
			}
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

// Fillable reports whether StartFill would find something to fill now. What is to be copied has to be on devices that
// are fit, and so has what is copied to. It waits until devices that clients have complained of have answered, a second
// at most.
func (m *Manager) Fillable(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) (bool, error) {
	if err := m.settleDoubts(ctx); err != nil {
		return false, fmt.Errorf("copies of inode %d: %w", id, err)
	}
	row, _, err := m.filling(ctx, id)
	var to layout.DeviceID
	if err == nil {
		to, err = m.moveTarget(ctx, id)
	}
	if err != nil {
		return false, fmt.Errorf("copies of inode %d: %w", id, err)
	}
	return m.fillable(&row, to, pinned, false), nil
}

// MayFill returns those of the files that Fillable does not deny, or has an error for, which it reads together. A pool
// that is empty only now does not count. It waits as Fillable does.
func (m *Manager) MayFill(ctx context.Context, ids []layout.FileID) ([]layout.FileID, error) {
	if err := m.settleDoubts(ctx); err != nil {
		return nil, fmt.Errorf("copies to be made: %w", err)
	}
	keys := make([][]byte, 0, 2*len(ids))
	for _, id := range ids {
		keys = append(keys, schema.LayoutKey(id), schema.MoveKey(id))
	}
	values, err := m.cfg.Engine.GetMany(ctx, keys)
	if err != nil {
		return nil, fmt.Errorf("layouts with copies to be made: %w", err)
	}
	var may []layout.FileID
	for i, id := range ids {
		var row schema.Layout
		var move schema.Move
		var bad error
		if value := values[2*i]; value != nil {
			bad = schema.Decode(value, &row)
		}
		if value := values[2*i+1]; value != nil {
			bad = errors.Join(bad, schema.Decode(value, &move))
		}
		if bad != nil || m.fillable(&row, move.Device, nil, true) {
			may = append(may, id)
		}
	}
	return may, nil
}

// fillable is Fillable for a layout. With anyPool devices count whose pools are empty.
func (m *Manager) fillable(row *schema.Layout, to layout.DeviceID, pinned []metarpc.CopyRef, anyPool bool) bool {
	begun, fits := m.goesOn(row)
	if !fits || row.Moving {
		return fits && !m.leavesPinned(row, to, pinned)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return begun || len(m.placesFor(row, anyPool)) > 0 || len(m.movesFor(row, pinned, anyPool)) > 0 || m.movable(row, to, pinned)
}

// Waiting counts what the copies wait for that files lack, and adds that to sum: known devices that are not up, or have
// no room, and the zero device if these do not suffice. A file counts once for each. It waits for nothing if there is a
// place for each copy, and a good one that can be read.
func (m *Manager) Waiting(ctx context.Context, ids []layout.FileID, sum map[layout.DeviceID]int64) error {
	keys := make([][]byte, len(ids))
	for i, id := range ids {
		keys[i] = schema.LayoutKey(id)
	}
	values, err := m.cfg.Engine.GetMany(ctx, keys)
	if err != nil {
		return fmt.Errorf("layouts with copies to be made: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, value := range values {
		if value == nil {
			continue // it was removed
		}
		var row schema.Layout
		if err := schema.Decode(value, &row); err != nil {
			return fmt.Errorf("layout row of inode %d: %w", ids[i], err)
		}
		for dev := range m.awaited(&row) {
			sum[dev]++
		}
	}
	return nil
}

// awaited is which devices a layout waits for, see Waiting. m.mu is held.
func (m *Manager) awaited(row *schema.Layout) map[layout.DeviceID]bool {
	all := map[layout.DeviceID]bool{}
	mirrors := row.Mirrors
	if row.Moving {
		mirrors = mirrors[:len(mirrors)-1]
	}
	for j := range columns(row) {
		lacks, whole, source := 0, true, false
		has := map[layout.DeviceID]bool{}
		for _, files := range mirrors {
			file := &files[j]
			d := m.find(file.Device)
			whole = whole && file.State == layout.CopyGood
			if file.State == layout.CopyStale || file.State == layout.CopyFilling && m.isDown(file) {
				lacks++
				continue
			}
			has[file.Device] = true
			source = source || file.State == layout.CopyGood && d != nil && d.condition == up
		}
		if whole {
			continue
		}
		var away []layout.DeviceID
		for _, d := range m.devices {
			switch {
			case has[d.id]:
				if !source && d.condition != up {
					all[d.id] = true
				}
			case d.row.Draining:
			case d.condition == up && d.room() != none:
				lacks--
			default:
				away = append(away, d.id)
			}
		}
		if lacks <= 0 {
			continue
		}
		for _, id := range away {
			all[id] = true
		}
		if lacks > len(away) {
			all[layout.DeviceID{}] = true
		}
	}
	return all
}

// goesOn reports whether a layout has copies that are being filled, and whether all these can be filled now. Those on
// devices that are down it makes stale, as StartFill will.
func (m *Manager) goesOn(row *schema.Layout) (begun, fits bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	fits = true
	for _, files := range row.Mirrors {
		for j := range files {
			switch {
			case files[j].State != layout.CopyFilling:
			case m.isDown(&files[j]):
				files[j].State = layout.CopyStale
			default:
				begun = true
				fits = fits && m.isFit(&files[j], now) && m.hasSource(row, j, now)
			}
		}
	}
	return begun, fits
}

// movable reports whether data of a file can be moved to a device that somebody has named, or that cannot be and
// StartFill says why. m.mu is held.
func (m *Manager) movable(row *schema.Layout, to layout.DeviceID, pinned []metarpc.CopyRef) bool {
	if to == (layout.DeviceID{}) {
		return false
	}
	now, moves := time.Now(), movesTo(row, to, pinned)
	for _, j := range moves {
		if !m.hasSource(row, j, now) {
			return false
		}
	}
	d := m.find(to)
	return len(moves) > 0 && (d == nil || d.condition != up || d.fit(now))
}

// isFit reports whether a data file is on a device that fills may use; m.mu is held.
func (m *Manager) isFit(file *schema.DataFile, now time.Time) bool {
	d := m.find(file.Device)
	return d != nil && d.fit(now)
}

// hasSource reports whether a column has a good copy that a fill may read; m.mu is held.
func (m *Manager) hasSource(row *schema.Layout, j int, now time.Time) bool {
	return slices.ContainsFunc(row.Mirrors, func(files []schema.DataFile) bool {
		return files[j].State == layout.CopyGood && m.isFit(&files[j], now)
	})
}

// placesFor finds devices for new data files in the places of the stale copies of a layout, and of those that are
// absent: such as have no other copy of the same column, plenty of room rather than little, and few of the file's data
// files, and are fit. Each has enough data files in its pool; with anyPool the pool may be empty. The column has a copy
// on a device that is fit, too. m.mu is held.
func (m *Manager) placesFor(row *schema.Layout, anyPool bool) map[copyPlace]*device {
	now := time.Now()
	usable, _, _ := m.usable(len(m.devices), func(d *device) bool { return d.fit(now) })
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
			if files[j].State != layout.CopyStale || !m.hasSource(row, j, now) {
				continue
			}
			var best *device
			roomy := false
			for _, d := range usable { // those with plenty of room come first
				if inColumn[j][d.id] || roomy && d.room() != plenty {
					continue
				}
				roomy = d.room() == plenty
				if len(d.pool) == stock[d] && !anyPool {
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

// FillError says that copies that were being filled have failed, though others may do.
type FillError struct {
	Failed []metarpc.CopyRef
	Err    error
}

func (e *FillError) Error() string { return e.Err.Error() }
func (e *FillError) Unwrap() error { return e.Err }

// FailedCopies names them.
func (e *FillError) FailedCopies() []metarpc.CopyRef { return e.Failed }

// Fill copies the n bytes at off to those copies of a layout that are being filled. Nobody else may write there
// meanwhile. It returns up to where that is done, and where the good copies end; what goes on beyond done is still to
// be copied. copied is called with the number of bytes before they are copied. After an error the copies that are
// being filled may be written to later.
//
// When enough is closed, and fillTurn is over, Fill returns once each column has copied the block that it is at. With
// enough it uses only devices that are fit, gives a block fillPatience, and holds against a device what fails there;
// a FillError names the copies that are not worth another try. If enough is nil others wait for the copying, and all
// is waited for until ctx ends.
func (m *Manager) Fill(ctx context.Context, id layout.FileID, row schema.Layout, off, n int64, copied func(context.Context, int) error, enough <-chan struct{}) (done, end int64, err error) {
	now, _, err := m.filling(ctx, id)
	if err != nil {
		return 0, 0, fmt.Errorf("fill copies of inode %d: %w", id, err)
	}
	done = off + n
	var mu sync.Mutex // guards done, end, errs and failed
	var errs []error
	var failed []metarpc.CopyRef
	var work sync.WaitGroup
	for j := range columns(&row) {
		c := columnFill{
			m: m, id: id, copied: copied, enough: enough, col: layout.Column{Unit: row.StripeUnit, Count: row.Width, Index: j},
		}
		for i, files := range row.Mirrors {
			switch {
			case files[j].State == layout.CopyFilling:
				c.to = append(c.to, &files[j])
			case stillGood(&now, copyPlace{i, j}, &files[j]):
				c.from = append(c.from, &files[j])
			}
		}
		if len(c.to) == 0 {
			continue
		}
		work.Go(func() { // copies one column
			upTo, last, err := c.fill(ctx, off, off+n)
			mu.Lock()
			defer mu.Unlock()
			done, end = min(done, upTo), max(end, last)
			if err == nil {
				return
			}
			errs = append(errs, err)
			if e := (*FillError)(nil); errors.As(err, &e) {
				failed = append(failed, e.Failed...)
			}
		})
	}
	work.Wait()
	if done > off && (end > done || len(errs) > 0) {
		if err := m.noteFilled(ctx, id, done); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		return done, end, nil
	}
	err = fmt.Errorf("fill copies of inode %d: %w", id, errors.Join(errs...))
	if len(failed) > 0 {
		err = &FillError{failed, err}
	}
	return 0, 0, err
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

// columnFill is the filling of one column, from one of the data files in from.
type columnFill struct {
	m        *Manager
	id       layout.FileID
	col      layout.Column
	from, to []*schema.DataFile
	copied   func(context.Context, int) error
	enough   <-chan struct{} // see Fill
}

// fill copies [off, end) of the column. It returns up to where that is done, and where the column ends.
func (c *columnFill) fill(ctx context.Context, off, end int64) (done, size int64, err error) {
	source, size, err := c.source(ctx)
	if err != nil {
		return off, 0, err
	}
	buf := make([]byte, fillBlock)
	began, moved := time.Now(), false
	at, stop := c.col.Next(off, min(end, size))
	for at < stop {
		n := int(min(stop-at, c.m.block(append(slices.Clone(c.to), source)...)))
		if err := c.copied(ctx, n); err != nil {
			return at, 0, err
		}
		var until time.Time
		if c.enough != nil {
			until = time.Now().Add(fillPatience)
		}
		if err := c.read(ctx, source, until, at, buf[:n]); err != nil {
			if c.enough == nil || ctx.Err() != nil {
				return at, 0, err
			}
			was := err
			if source, size, err = c.source(ctx); err != nil { // another one: that device is not fit any more
				return at, 0, errors.Join(was, err)
			}
			buf = make([]byte, fillBlock) // that call may be late
			at, stop = c.col.Next(at, min(end, size))
			continue
		}
		if err := c.write(ctx, until, at, buf[:n], size); err != nil {
			if e := (*FillError)(nil); errors.As(err, &e) && moved && errors.Is(err, errLate) {
				err = e.Err // it is slow, but gets on
			}
			return at, 0, err
		}
		moved = true
		at, stop = c.col.Next(at+int64(n), min(end, size))
		select {
		case <-c.enough:
			if at < stop && time.Since(began) >= fillTurn {
				return at, size, nil
			}
		default:
		}
	}
	if moved {
		c.m.endedWell(append(slices.Clone(c.to), source))
	}
	return end, size, nil
}

// source finds a good copy whose data server answers, and how long the column is.
func (c *columnFill) source(ctx context.Context) (*schema.DataFile, int64, error) {
	source, size, err := c.m.source(ctx, c.from, c.enough == nil)
	if err == nil && c.m.space(source.Device) != nil {
		size, err = c.m.clipped(ctx, c.id, size)
	}
	return source, size, err
}

// read reads len(data) bytes, zeros where there is nothing.
func (c *columnFill) read(ctx context.Context, source *schema.DataFile, until time.Time, off int64, data []byte) error {
	got := 0
	err := c.m.fillCall(ctx, source, until, func(ctx context.Context, st dataStore) (err error) {
		got, err = st.Read(ctx, source.Handle, layout.Credential{UID: source.UID, GID: source.GID}, off, data)
		return err
	})
	clear(data[got:])
	return err
}

// write writes data to all copies that are being filled of a column that is so long. Zeros need not be written, but
// for the last bytes, so that the copies are equally long.
func (c *columnFill) write(ctx context.Context, until time.Time, off int64, data []byte, size int64) error {
	n := len(data)
	for skip := 0; skip < n; {
		part := data[skip:min(skip+fillHole, n)]
		if bytes.Equal(part, zeros[:len(part)]) && off+int64(skip+len(part)) < size {
			skip += len(part)
			continue
		}
		run := len(part)
		for skip+run < n && !bytes.Equal(data[skip+run:min(skip+run+fillHole, n)], zeros[:min(fillHole, n-skip-run)]) {
			run = min(run+fillHole, n-skip)
		}
		at := off + int64(skip)
		for _, file := range c.to {
			if err := c.m.makeRoom(ctx, c.id, file, at, int64(run)); err != nil {
				return err
			}
			err := c.m.fillCall(ctx, file, until, func(ctx context.Context, st dataStore) error {
				return st.Write(ctx, file.Handle, layout.Credential{UID: file.UID, GID: file.GID}, at, data[skip:skip+run])
			})
			if err != nil {
				if _, answered := store.Status(err); answered || errors.Is(err, errLate) {
					err = &FillError{[]metarpc.CopyRef{file.Ref()}, err}
				}
				return err
			}
		}
		skip += run
	}
	return nil
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

// fillCall is at for the call of a fill that gives up after a while: at until, and as soon as the device is up no more.
// That is held against the device, as is an error that it answers. If until is zero the call does not give up.
func (m *Manager) fillCall(ctx context.Context, file *schema.DataFile, until time.Time, f func(context.Context, dataStore) error) error {
	if until.IsZero() {
		return m.at(ctx, file, func(st dataStore) error { return f(ctx, st) })
	}
	d, err := m.device(file.Device)
	if err != nil {
		return err
	}
	using, end := d.whileUp(ctx)
	defer end()
	if using.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("data server %v: %w", d.url(), errNotUp)
	}
	calling, cancel := context.WithDeadline(using, until)
	defer cancel()
	err = m.at(calling, file, func(st dataStore) error { return f(calling, st) })
	if err == nil || ctx.Err() != nil {
		return err
	}
	switch _, answered := store.Status(err); {
	case answered:
	case using.Err() != nil:
		err = fmt.Errorf("%w: %v", err, context.Cause(using))
	default:
		err = fmt.Errorf("%w: %w", errLate, err)
	}
	d.failFill(err)
	return err
}

// errNotUp: a device was not up when it was to be called.
var errNotUp = errors.New("it is not up")

// errLate: a device that is up has not answered in time.
var errLate = errors.New("no answer in time")

// endedWell notes that the devices of these data files have done their part of a fill.
func (m *Manager) endedWell(files []*schema.DataFile) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for _, file := range files {
		if m.isFit(file, now) {
			m.find(file.Device).fillWait = 0
		}
	}
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

// source finds a good copy whose data server answers, and how long it is: on a device that is fit; or, if others wait
// for that, on any, those last that are down.
func (m *Manager) source(ctx context.Context, from []*schema.DataFile, urgent bool) (*schema.DataFile, int64, error) {
	now := time.Now()
	from = slices.Clone(from)
	m.mu.Lock()
	if urgent {
		slices.SortStableFunc(from, func(a, b *schema.DataFile) int { return compareBool(m.isDown(a), m.isDown(b)) })
	} else {
		from = slices.DeleteFunc(from, func(file *schema.DataFile) bool { return !m.isFit(file, now) })
	}
	m.mu.Unlock()
	var errs []error
	if len(from) == 0 {
		errs = append(errs, errors.New("no good copy can be read now"))
	}
	for _, file := range from {
		asking, cancel := context.WithTimeout(ctx, patience)
		until := time.Time{}
		if !urgent {
			until = time.Now().Add(fillPatience)
		}
		var size int64
		err := m.fillCall(asking, file, until, func(ctx context.Context, st dataStore) (err error) {
			size, err = st.Size(ctx, file.Handle)
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
