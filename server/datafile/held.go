package datafile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

// heldTime is for how long a data server may put a fence off before the data file counts as held. Whoever is to be fenced has had
// a lease to give it back; a client that was killed, or stood still for a moment, is out of the way in less, and copying the data
// file costs more.
const heldTime = 10 * time.Second

// HeldError says that data files cannot be fenced, though their data servers answer: somebody on the hosts of these has them open for
// writing, and does not give them back.
type HeldError struct {
	Held  []metarpc.CopyRef
	Names []string // of the data files, each with its device
}

func (e *HeldError) Error() string {
	return "somebody on the data server's host has data files open for writing: " + strings.Join(e.Names, ", ")
}

// HeldCopies names them.
func (e *HeldError) HeldCopies() []metarpc.CopyRef { return e.Held }

func (e *HeldError) add(file *schema.DataFile) {
	_, name := schema.DataFileName(file.Number)
	e.Held = append(e.Held, metarpc.CopyRef{Device: file.Device, Handle: file.Handle})
	e.Names = append(e.Names, fmt.Sprintf("%v/%s", file.Device, name))
}

// errHeld: the data server answers, and has put the fence off for heldTime.
var errHeld = errors.New("the data server puts it off")

// fenceFile gives a data file a new owner. It waits for a data server that is away until ctx ends, and for one that says JUKEBOX
// for heldTime; then the error is errHeld.
func (m *Manager) fenceFile(ctx context.Context, file *schema.DataFile, owner layout.Credential) error {
	for {
		calling, cancel := context.WithTimeout(ctx, heldTime)
		err := m.at(calling, file, func(st dataStore) error { return st.Fence(calling, file.Handle, owner) })
		over := calling.Err() != nil
		cancel()
		switch {
		case err == nil || !over || ctx.Err() != nil:
			return err
		case errors.Is(err, store.ErrDelayed):
			return fmt.Errorf("%w: %w", errHeld, err)
		}
	}
}

// StartReplace begins to replace data files of file id that somebody holds: it adds a mirror as for moving, with empty ones that are
// to be filled from them, on the same devices if there is room. The file is not being moved, nobody may have a layout for writing it, and
// nobody gets one until it was fenced. In the layout that it returns nothing else is being filled.
func (m *Manager) StartReplace(ctx context.Context, id layout.FileID, held []metarpc.CopyRef) (schema.Layout, error) {
	row, err := m.startReplace(ctx, id, held)
	if err != nil {
		return row, fmt.Errorf("replace data files of inode %d: %w", id, err)
	}
	return row, nil
}

func (m *Manager) startReplace(ctx context.Context, id layout.FileID, held []metarpc.CopyRef) (row schema.Layout, err error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return row, err
	}
	defer unlock()
	row, _, err = m.filling(ctx, id)
	if err != nil {
		return row, err
	}
	taken, err := m.take(ctx, func() (map[int]*device, error) {
		places := map[int]*device{}
		for j := range columns(&row) {
			for _, files := range row.Mirrors {
				if files[j].State != layout.CopyGood || !slices.ContainsFunc(held, files[j].Is) {
					continue
				}
				d, err := m.instead(&row, j, files[j].Device)
				if err != nil {
					return nil, err
				}
				places[j] = d
				break
			}
		}
		return places, nil
	})
	if err == nil && len(taken) > 0 {
		err = m.addMirror(ctx, id, taken)
	}
	if err == nil {
		row, _, err = m.filling(ctx, id)
	}
	if row.Moving { // whatever else was being filled will be stale after the fence
		for _, files := range row.Mirrors[:len(row.Mirrors)-1] {
			for j := range files {
				if files[j].State == layout.CopyFilling {
					files[j].State = layout.CopyStale
				}
			}
		}
	}
	return row, err
}

// instead finds a device for what takes the place of a data file of a column: that where it is, if there is room, or one that has no
// copy of the column. m.mu is held.
func (m *Manager) instead(row *schema.Layout, column int, at layout.DeviceID) (*device, error) {
	usable, _, err := m.usable(1, nil)
	if err != nil {
		return nil, err
	}
	inColumn := map[layout.DeviceID]bool{}
	for _, files := range row.Mirrors {
		inColumn[files[column].Device] = files[column].State != layout.CopyStale
	}
	usable = slices.DeleteFunc(usable, func(d *device) bool { return d.id != at && inColumn[d.id] })
	if len(usable) == 0 {
		return nil, fmt.Errorf("%w: all that can be reached have copies of the same data", ErrNoDevice)
	}
	return slices.MinFunc(usable, func(a, b *device) int {
		return cmp.Or(compareBool(a.id != at, b.id != at), cmp.Compare(b.stat.AvailBytes, a.stat.AvailBytes))
	}), nil
}

// take takes a data file from the pool of each device that places names by column, and waits for a while until they have them.
// places is called with m.mu held.
func (m *Manager) take(ctx context.Context, places func() (map[int]*device, error)) (map[int]schema.DataFile, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		m.mu.Lock()
		changed := m.changed
		at, err := places()
		need := plan{columns: [][]*device{slices.Collect(maps.Values(at))}}
		if err == nil && need.stocked() {
			taken := map[int]schema.DataFile{}
			for column, d := range at {
				taken[column] = d.next()
			}
			m.mu.Unlock()
			return taken, nil
		}
		m.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if err := m.wait(ctx, changed); err != nil {
			return nil, fmt.Errorf("wait for a new data file: %w", err)
		}
	}
}
