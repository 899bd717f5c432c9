package datafile

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// DrainDevice sets whether a device is drained: it gets no new data files, those it has move
// elsewhere, and those in its pool become garbage.
func (m *Manager) DrainDevice(ctx context.Context, id layout.DeviceID, cancel bool) (metarpc.DeviceInfo, error) {
	d, err := m.device(id)
	if err != nil {
		return metarpc.DeviceInfo{}, fmt.Errorf("drain: %w", err)
	}
	err = d.rewrite(ctx, func(_ *catalog.Batch, row *schema.Device) { row.Draining = !cancel })
	if err != nil {
		return metarpc.DeviceInfo{}, fmt.Errorf("drain: %w", err)
	}
	m.log.Info("data server is drained", "device", id, "url", d.url().String(), "canceled", cancel)
	m.mu.Lock()
	d.restock()
	m.mu.Unlock()
	return m.info(ctx, []*device{d})[0], nil
}

// restock looks at the pool after Draining has changed; m.mu is held.
func (d *device) restock() {
	pool := d.pool
	d.pool = nil
	for _, file := range pool {
		d.stock(file)
	}
	kick(d.refill)
	d.m.signal()
}

// draining returns the devices that are drained.
func (m *Manager) draining() map[layout.DeviceID]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	drained := map[layout.DeviceID]bool{}
	for _, d := range m.devices {
		if d.row.Draining {
			drained[d.id] = true
		}
	}
	return drained
}

// Moving lists files that have data files on devices that are drained: the first ones after from, at most limit. If there are
// none it is quick as long as no device is drained that has data files.
func (m *Manager) Moving(ctx context.Context, from layout.FileID, limit int) (ids []layout.FileID, err error) {
	drained := m.draining()
	inUse := false
	for _, info := range m.Devices(ctx) {
		inUse = inUse || drained[info.Device.ID] && info.DataFiles > 0
	}
	if !inUse {
		return nil, nil
	}
	_, to := schema.Of(schema.PrefixLayout)
	for kv, err := range m.cfg.Engine.Scan(ctx, schema.LayoutKey(from+1), to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("files on data servers that are drained: %w", err)
		}
		var row schema.Layout
		if err := schema.Decode(kv.Value, &row); err != nil {
			return nil, fmt.Errorf("layout row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
		}
		if row.Has(func(file *schema.DataFile) bool { return drained[file.Device] }) {
			if ids = append(ids, schema.IDOf(kv.Key)); len(ids) == limit {
				break
			}
		}
	}
	return ids, nil
}

// movesFor finds devices for the good copies of a layout that are on drained devices and not pinned, each column's
// first. With anyPool the pool of a device may be empty. m.mu is held.
func (m *Manager) movesFor(row *schema.Layout, pinned []metarpc.CopyRef, anyPool bool) map[int]*device {
	if row.Moving {
		return nil
	}
	with := *row
	extra := make([]schema.DataFile, columns(row)) // good, as long as nothing is to be put there
	any := false
	for j := range extra {
		for _, files := range row.Mirrors {
			if d := m.find(files[j].Device); files[j].State == layout.CopyGood && d != nil && d.row.Draining && !slices.ContainsFunc(pinned, files[j].Is) {
				extra[j] = schema.DataFile{Device: d.id, State: layout.CopyStale} // to be replaced
				any = true
				break
			}
		}
	}
	if !any {
		return nil
	}
	with.Mirrors = append(append([][]schema.DataFile{}, row.Mirrors...), extra)
	moves := map[int]*device{}
	for at, d := range m.placesFor(&with, anyPool) {
		if at.mirror == len(row.Mirrors) {
			moves[at.column] = d
		}
	}
	return moves
}

// startMove adds a mirror for the data files that are to move: to the device that somebody has named, or else away from drained ones.
// The file is locked.
func (m *Manager) startMove(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) error {
	row, _, err := m.filling(ctx, id)
	if err != nil || row.Moving {
		return err
	}
	to, err := m.moveTarget(ctx, id)
	if err != nil {
		return err
	}
	taken := map[int]schema.DataFile{}
	if to != (layout.DeviceID{}) {
		if taken, err = m.takeAt(ctx, &row, to, pinned); err != nil {
			return err
		}
	} else {
		m.mu.Lock()
		for j, d := range m.movesFor(&row, pinned, false) {
			taken[j] = d.next()
		}
		m.mu.Unlock()
	}
	if len(taken) == 0 {
		return nil
	}
	return m.addMirror(ctx, id, taken)
}

// addMirror adds the mirror that is there for moving, with data files that are to be filled, by column. If the file is gone they go
// back to where they were taken from. The file is locked.
func (m *Manager) addMirror(ctx context.Context, id layout.FileID, taken map[int]schema.DataFile) error {
	_, done, err := m.filling(ctx, id)
	if err != nil {
		return err
	}
	var files []schema.DataFile
	for _, file := range taken {
		if !slices.ContainsFunc(files, func(other schema.DataFile) bool { return other.Same(&file) }) {
			files = append(files, file)
		}
	}
	used := false
	err = m.relayout(ctx, id, func(b *catalog.Batch, now *schema.Layout) bool {
		if now.Moving { // by an earlier try whose outcome was not known; nobody else changes the file
			used = true
			return false
		}
		for _, file := range files {
			b.GuardPresent(schema.GarbageKey(file.Device, file.Number))
			b.Delete(schema.GarbageKey(file.Device, file.Number))
			b.Add(schema.InUseKey(file.Device), 0, 1)
		}
		extra := make([]schema.DataFile, columns(now))
		for j := range extra {
			file, ok := taken[j]
			if !ok {
				extra[j] = schema.Absent()
				continue
			}
			file.State = layout.CopyFilling
			extra[j] = file
		}
		now.Mirrors = append(now.Mirrors, extra)
		now.Moving = true
		used = true
		if done > 0 { // how far others have got
			b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{}))
		}
		return true
	})
	if err != nil {
		m.sortOut(id, files)
		return err
	}
	if used {
		m.release(files)
	} else { // the file is gone
		m.putBack(files)
	}
	return nil
}

// leaves finds which mirror's data file of a column makes room for the one that moves: -1 if none does, as the moving has lost its reason or
// what would is pinned.
func leaves(row *schema.Layout, j int, to layout.DeviceID, drained map[layout.DeviceID]bool, pinned []metarpc.CopyRef) int {
	last := len(row.Mirrors) - 1
	for i, files := range row.Mirrors[:last] {
		if !slices.ContainsFunc(pinned, files[j].Is) && (drained[files[j].Device] || row.GoodCopies(j) == 1 || row.Mirrors[last][j].Device == to) {
			return i
		}
	}
	return -1
}

// Exchange puts data files that have moved into the places of those they were copied from. What is in the extra mirror then is
// stale. Nobody may write the file meanwhile. What is pinned stays. One data file that all columns move to must be full, or be stale in one of them.
func (m *Manager) Exchange(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) error {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	to, err := m.moveTarget(ctx, id)
	if err != nil {
		return fmt.Errorf("move data files of inode %d: %w", id, err)
	}
	drained := m.draining()
	err = m.relayout(ctx, id, func(_ *catalog.Batch, row *schema.Layout) bool {
		if !row.Moving {
			return false
		}
		last := len(row.Mirrors) - 1
		extra := row.Mirrors[last]
		if row.Gathers() && to != (layout.DeviceID{}) { // all columns or none
			full := !slices.ContainsFunc(extra, func(file schema.DataFile) bool { return file.State == layout.CopyStale })
			for j := range extra {
				extra[j].State = layout.CopyStale
				if full {
					extra[j].State = layout.CopyGood
				}
			}
		}
		for j := range extra {
			if extra[j].State != layout.CopyGood {
				extra[j].State = layout.CopyStale
				continue
			}
			if i := leaves(row, j, to, drained, pinned); i >= 0 {
				row.Mirrors[i][j], extra[j] = extra[j], row.Mirrors[i][j]
			}
			extra[j].State = layout.CopyStale
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("move data files of inode %d: %w", id, err)
	}
	return nil
}

// DropMoved makes garbage of what Exchange has left. If the file's data lies now where somebody wanted it, that is done with.
func (m *Manager) DropMoved(ctx context.Context, id layout.FileID) error {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	to, err := m.moveTarget(ctx, id)
	if err != nil {
		return fmt.Errorf("data files that inode %d was moved from: %w", id, err)
	}
	err = m.relayout(ctx, id, func(b *catalog.Batch, row *schema.Layout) bool {
		last := len(row.Mirrors) - 1
		if !row.Moving || last < 1 {
			return false
		}
		extra := schema.Layout{Mirrors: [][]schema.DataFile{row.Mirrors[last]}}
		for _, file := range row.Mirrors[last] {
			if file.State != layout.CopyStale {
				return false
			}
		}
		m.Discard(b, id, extra)
		row.Mirrors, row.Moving = row.Mirrors[:last], false
		if to != (layout.DeviceID{}) && len(movesTo(row, to, nil)) == 0 {
			unite(row, to)
			b.Delete(schema.MoveKey(id))
		} else {
			unite(row, row.Mirrors[0][0].Device) // if the move was given up when it was all but done
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("data files that inode %d was moved from: %w", id, err)
	}
	m.Kick()
	return nil
}
