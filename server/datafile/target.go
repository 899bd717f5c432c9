package datafile

import (
	"context"
	"fmt"
	"slices"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// MoveTo records that the data of file id is to lie on a device: one data file there, if the file has one copy of its data, and the
// first copy of each column of a mirrored file. StartFill begins with that. there says that there is nothing to do, data that the file has
// data files at all.
//
// Errors that callers can tell apart: ENODEV and ENOSPC, the device cannot take it; EBUSY, the file is being moved elsewhere.
func (m *Manager) MoveTo(ctx context.Context, id layout.FileID, dev layout.DeviceID) (data, there bool, err error) {
	data, there, err = m.moveTo(ctx, id, dev)
	if err != nil {
		return data, there, fmt.Errorf("move inode %d to device %v: %w", id, dev, err)
	}
	return data, there, nil
}

func (m *Manager) moveTo(ctx context.Context, id layout.FileID, dev layout.DeviceID) (data, there bool, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return false, false, err
	}
	defer unlock()
	row, _, err := m.filling(ctx, id)
	if err != nil || columns(&row) == 0 {
		return false, true, err
	}
	is, err := m.moveTarget(ctx, id)
	if err != nil {
		return true, false, err
	}
	if is != (layout.DeviceID{}) && is != dev {
		return true, false, fmt.Errorf("it is being moved to device %v: %w", is, syscall.EBUSY)
	}
	if !row.Moving && len(movesTo(&row, dev, nil)) == 0 {
		err := m.relayout(ctx, id, func(b *catalog.Batch, row *schema.Layout) bool {
			if is != (layout.DeviceID{}) {
				b.Delete(schema.MoveKey(id))
			}
			return unite(row, dev) || is != (layout.DeviceID{})
		})
		return true, true, err
	}
	if err := m.takes(ctx, dev); err != nil {
		return true, false, err
	}
	err = m.relayout(ctx, id, func(b *catalog.Batch, _ *schema.Layout) bool {
		b.Put(schema.MoveKey(id), schema.Encode(&schema.Move{Device: dev}))
		return true
	})
	return true, false, err
}

// StopMove forgets where the data of a file is to lie. What has begun is given up with the next Exchange.
func (m *Manager) StopMove(ctx context.Context, id layout.FileID) error {
	var b catalog.Batch
	b.Delete(schema.MoveKey(id))
	return m.cfg.Engine.Commit(ctx, &b)
}

// moveTarget reads where the data of a file is to lie; zero if nobody has said so.
func (m *Manager) moveTarget(ctx context.Context, id layout.FileID) (layout.DeviceID, error) {
	var move schema.Move
	_, err := schema.ReadRow(ctx, m.cfg.Engine, schema.MoveKey(id), &move)
	return move.Device, err
}

// movesTo lists the columns of a layout that have to move so that the file's data lies on a device, without those that cannot as the data
// file that would leave is pinned. A file with one copy of its data moves as a whole.
func movesTo(row *schema.Layout, dev layout.DeviceID, pinned []metarpc.CopyRef) (moves []int) {
	mirrors := row.Mirrors
	if row.Moving {
		mirrors = mirrors[:len(mirrors)-1]
	}
	single := len(mirrors) == 1
	for j := range columns(row) {
		here := slices.ContainsFunc(mirrors, func(files []schema.DataFile) bool {
			return files[j].Device == dev && files[j].State != layout.CopyStale
		})
		if !here || single && !mirrors[0][j].Same(&mirrors[0][0]) {
			moves = append(moves, j)
		}
	}
	if len(moves) == 0 || !single {
		return slices.DeleteFunc(moves, func(j int) bool { return slices.ContainsFunc(pinned, mirrors[0][j].Is) })
	}
	moves = moves[:0]
	for j := range columns(row) {
		if slices.ContainsFunc(pinned, mirrors[0][j].Is) {
			return nil
		}
		moves = append(moves, j)
	}
	return moves
}

// leavesPinned reports whether no data file makes room for one that has moved because of what is pinned.
func (m *Manager) leavesPinned(row *schema.Layout, to layout.DeviceID, pinned []metarpc.CopyRef) bool {
	drained := m.draining()
	for j := range columns(row) {
		if row.Mirrors[len(row.Mirrors)-1][j].IsAbsent() {
			continue
		}
		if leaves(row, j, to, drained, nil) >= 0 && leaves(row, j, to, drained, pinned) < 0 {
			return true
		}
	}
	return false
}

// unite makes one column of a layout whose only copy is one data file on a device, and reports whether that changes it.
func unite(row *schema.Layout, dev layout.DeviceID) bool {
	if row.Moving || len(row.Mirrors) != 1 || row.Width == 1 || len(movesTo(row, dev, nil)) > 0 {
		return false
	}
	row.Mirrors, row.Width = [][]schema.DataFile{row.Mirrors[0][:1]}, 1
	return true
}

// takes returns why a device cannot take data that is to be moved there. It waits until the device was looked at.
func (m *Manager) takes(ctx context.Context, dev layout.DeviceID) error {
	d, err := m.device(dev)
	if err != nil {
		return fmt.Errorf("%w: %w", err, syscall.ENODEV)
	}
	if err := d.settled(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case d.row.Draining:
		return fmt.Errorf("the device is being drained: %w", syscall.ENODEV)
	case d.condition != up:
		return fmt.Errorf("the device cannot be reached: %w", syscall.ENODEV)
	case d.room() == none:
		return fmt.Errorf("the device takes no new data files: %w", ErrNoSpace)
	}
	return nil
}

// takeAt takes the data files that a file's data is to move to on a device: one for each column, or one for all if there is one copy.
func (m *Manager) takeAt(ctx context.Context, row *schema.Layout, dev layout.DeviceID, pinned []metarpc.CopyRef) (map[int]schema.DataFile, error) {
	moves := movesTo(row, dev, pinned)
	if len(moves) == 0 {
		return nil, nil
	}
	if err := m.takes(ctx, dev); err != nil {
		return nil, err
	}
	single := len(row.Mirrors) == 1
	taken, err := m.take(ctx, func() (map[int]*device, error) {
		d := m.find(dev)
		if d == nil {
			return nil, syscall.ENODEV
		}
		if single {
			return map[int]*device{0: d}, nil
		}
		places := map[int]*device{}
		for _, j := range moves {
			places[j] = d
		}
		return places, nil
	})
	if err == nil && single {
		for _, j := range moves {
			taken[j] = taken[0]
		}
	}
	return taken, err
}
