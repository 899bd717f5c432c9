package datafile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

// LateError says that some copies of a file did not answer for a while, though others of the same columns did.
type LateError struct{ Late []metarpc.CopyRef }

func (e *LateError) Error() string {
	return fmt.Sprintf("%d data files did not answer in time, but other copies of them did", len(e.Late))
}

// LateCopies names them.
func (e *LateError) LateCopies() []metarpc.CopyRef { return e.Late }

// MarkStale records, durably, that copies of file id may lack data, so that nobody is to read or write them any more.
// Fills do not use their devices before these have answered a pulse. The last good copy of a column is never marked,
// nor is a cache, see StaleCaches. It returns all copies of the file that are stale then, and those named that it
// does not have any more.
func (m *Manager) MarkStale(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef) ([]metarpc.CopyRef, error) {
	m.complain(copies)
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	var stale []metarpc.CopyRef
	err = m.relayout(ctx, id, func(_ *catalog.Batch, row *schema.Layout) bool {
		marked := markStale(row, func(file *schema.DataFile) bool { return slices.ContainsFunc(copies, file.Is) })
		stale = row.Copies(layout.CopyStale)
		for _, ref := range copies {
			cache := slices.ContainsFunc(row.Caches, func(c schema.Cache) bool { return c.File.Is(ref) && c.File.State != layout.CopyStale })
			if !cache && !row.Has(func(file *schema.DataFile) bool { return file.Is(ref) }) {
				stale = append(stale, ref) // it was, and another one has taken its place
			}
		}
		return marked > 0
	})
	if err != nil {
		return nil, fmt.Errorf("mark copies of inode %d as stale: %w", id, err)
	}
	return stale, nil
}

// markStale marks the copies that which says, as far as that leaves every column a good one. It returns how many.
func markStale(row *schema.Layout, which func(*schema.DataFile) bool) (marked int) {
	for j := range columns(row) {
		kept := false
		for _, files := range row.Mirrors {
			file := &files[j]
			if file.State != layout.CopyGood || !which(file) {
				continue
			}
			if row.GoodCopies(j) == 1 {
				kept = true
				continue
			}
			file.State = layout.CopyStale
			marked++
		}
		for _, files := range row.Mirrors {
			// One that is being filled may have what the last good one lacks.
			if file := &files[j]; file.State == layout.CopyFilling && (kept || which(file)) {
				file.State = layout.CopyStale
				marked++
			}
		}
	}
	return marked
}

// dropDown marks copies in a row stale that are on devices which are down, if drop agrees and their column has a good
// copy on a device that is up. It reports whether there are any, and whether the file has no fill row yet. The file
// is locked.
func (m *Manager) dropDown(ctx context.Context, id layout.FileID, row *schema.Layout, drop func(metarpc.CopyRef) bool) (dropped, newFill bool, err error) {
	if drop == nil || len(row.Mirrors) < 2 {
		return false, false, nil
	}
	var away []*schema.DataFile
	m.mu.Lock()
	is := func(file *schema.DataFile, condition condition) bool {
		d := m.find(file.Device)
		return d != nil && d.condition == condition
	}
	for j := range columns(row) {
		sound := slices.ContainsFunc(row.Mirrors, func(files []schema.DataFile) bool {
			return files[j].State == layout.CopyGood && is(&files[j], up)
		})
		for i := range row.Mirrors {
			if file := &row.Mirrors[i][j]; sound && file.State != layout.CopyStale && is(file, down) {
				away = append(away, file)
			}
		}
	}
	m.mu.Unlock()
	away = slices.DeleteFunc(away, func(file *schema.DataFile) bool {
		return !drop(metarpc.CopyRef{Device: file.Device, Handle: file.Handle})
	})
	if markStale(row, func(file *schema.DataFile) bool { return slices.Contains(away, file) }) == 0 {
		return false, false, nil
	}
	fill, err := m.cfg.Engine.GetMany(ctx, [][]byte{schema.FillKey(id)})
	if err != nil {
		return false, false, err
	}
	return true, fill[0] == nil, nil
}

// relayout changes a layout row, if there is one and change says so, and keeps the rows of its caches by device in step, and the fill
// row: it is there as long as not all copies are good. change may be called several times. The file is locked.
func (m *Manager) relayout(ctx context.Context, id layout.FileID, change func(*catalog.Batch, *schema.Layout) bool) error {
	key, fillKey := schema.LayoutKey(id), schema.FillKey(id)
	for try := 0; ; try++ {
		values, err := m.cfg.Engine.GetMany(ctx, [][]byte{key, fillKey})
		if err != nil || values[0] == nil {
			return err
		}
		var row schema.Layout
		if err := schema.Decode(values[0], &row); err != nil {
			return fmt.Errorf("layout row: %w", err)
		}
		var b catalog.Batch
		caches := slices.Clone(row.Caches)
		if !change(&b, &row) {
			return nil
		}
		putCaches(&b, id, caches, row.Caches)
		b.GuardEqual(key, values[0])
		b.Put(key, schema.Encode(&row))
		switch incomplete := row.Incomplete(); {
		case incomplete && values[1] == nil:
			b.Put(fillKey, schema.Encode(&schema.Fill{}))
		case !incomplete && values[1] != nil:
			b.Delete(fillKey)
		}
		err = m.commit(ctx, id, &b)
		guard := (*catalog.GuardError)(nil)
		again := errors.As(err, &guard) || errors.Is(err, catalog.ErrConflict)
		if !again || try == maxRelayout {
			return err
		}
	}
}

// maxRelayout is how often a layout row is tried to be changed while others change it.
const maxRelayout = 100

// fenceMirrored is Fence for a file whose columns have several copies. The first copy of each column whose data server has
// confirmed its new owner is what counts from now on; the others are stale. The file is locked.
func (m *Manager) fenceMirrored(ctx context.Context, id layout.FileID, row schema.Layout) error {
	type answer struct {
		mirror  int
		columns []int // several, if they have one data file
		file    *schema.DataFile
		owner   layout.Credential
		err     error
	}
	calling, cancel := context.WithCancel(ctx)
	defer cancel()
	var calls []*answer
	for i, files := range row.Mirrors {
		own := len(calls) // where the calls of this mirror begin
		for j := range files {
			file := &files[j]
			if file.State != layout.CopyGood {
				continue
			}
			same := slices.IndexFunc(calls[own:], func(a *answer) bool { return a.file.Same(file) })
			if same >= 0 {
				calls[own+same].columns = append(calls[own+same].columns, j)
				continue
			}
			calls = append(calls, &answer{
				mirror: i, columns: []int{j}, file: file, owner: randomOwner(),
			})
		}
	}
	answers := make(chan *answer)
	for _, a := range calls {
		go func() { // one data file's calls; ends with their answer or with calling
			a.err = m.fenceFile(calling, a.file, a.owner)
			answers <- a
		}()
	}
	truth := map[int]*answer{} // by column
	held := map[int]bool{}     // columns that have a copy that somebody holds
	var errs []error
	for range calls {
		a := <-answers
		if a.err != nil {
			errs = append(errs, a.err)
		}
		for _, j := range a.columns {
			switch {
			case a.err == nil && truth[j] == nil:
				truth[j] = a
			case errors.Is(a.err, errHeld):
				held[j] = true
			}
		}
		settled := 0
		for j := range columns(&row) {
			if truth[j] != nil || held[j] {
				settled++
			}
		}
		if settled == columns(&row) {
			cancel() // what does not answer is not waited for: there is a copy that can be copied from
		}
	}
	if len(truth) < columns(&row) {
		var holding HeldError
		for _, a := range calls {
			if errors.Is(a.err, errHeld) && slices.ContainsFunc(a.columns, func(j int) bool { return truth[j] == nil }) {
				holding.add(a.file)
			}
		}
		for j := range columns(&row) {
			if truth[j] == nil && !held[j] {
				return errors.Join(errs...)
			}
		}
		return &holding
	}
	return m.relayout(ctx, id, func(_ *catalog.Batch, now *schema.Layout) bool {
		for j, a := range truth {
			file := &now.Mirrors[a.mirror][j]
			file.UID, file.GID = a.owner.UID, a.owner.GID
			for i, files := range now.Mirrors {
				if i != a.mirror {
					files[j].State = layout.CopyStale
				}
			}
		}
		return true
	})
}

// eachCopy calls f for the data files of a layout that are not stale, caches as well, all at once. Of the copies of a
// column one has to end well. Then those on devices that are down or late are given up at once, and others when they
// have not ended for lateCopy after that, not counting the time in which their data servers have announced that they
// stop. Their devices are late then. A LateError names them. It waits for data servers that cannot be reached until ctx
// ends.
func (m *Manager) eachCopy(ctx context.Context, row schema.Layout, f func(context.Context, dataStore, *schema.DataFile) error) error {
	type answer struct {
		file   *schema.DataFile
		column int
		err    error
	}
	calling, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer)
	const allColumns = -1
	open := map[*schema.DataFile]int{} // their columns
	call := func(file *schema.DataFile, j int) {
		if file.State == layout.CopyStale {
			return
		}
		open[file] = j
		go func() { // one data file's calls; ends with their answer or with calling
			d, err := m.device(file.Device)
			if err == nil {
				err = d.do(calling, func(st dataStore) error { return f(calling, st, file) })
			}
			if err != nil {
				_, name := schema.DataFileName(file.Number)
				err = fmt.Errorf("data file %s: %w", name, err)
			}
			answers <- answer{file, j, err}
		}()
	}
	for _, files := range row.Mirrors {
		for j := range files {
			call(&files[j], j)
		}
	}
	for i := range row.Caches {
		call(&row.Caches[i].File, allColumns)
	}
	var over <-chan time.Time // nil until none is needed any more that has not ended
	var spare time.Time       // when that was
	good := map[int]bool{}
	var errs []error
	var failed []metarpc.CopyRef // while another copy may do
	var late []metarpc.CopyRef
	for len(open) > 0 {
		m.mu.Lock()
		changed := m.changed
		m.mu.Unlock()
		select {
		case a := <-answers:
			delete(open, a.file)
			m.answered(a.file.Device, a.err)
			switch {
			case a.err == nil:
				good[a.column] = good[a.column] || a.file.State == layout.CopyGood
			case late == nil:
				errs = append(errs, a.err)
				failed = append(failed, metarpc.CopyRef{Device: a.file.Device, Handle: a.file.Handle})
			}
		case <-over:
			over = nil
		case <-changed: // a device may be down now
		}
		if late != nil {
			continue
		}
		needed := false
		for _, column := range open {
			for j := range columns(&row) {
				needed = needed || !good[j] && (column == j || column == allColumns)
			}
		}
		if needed {
			continue
		}
		if spare.IsZero() {
			spare = time.Now()
			over = time.After(lateCopy)
		}
		away, unmet, stop := m.away(open)
		switch {
		case away:
		case over != nil:
			continue
		case stop || unmet && time.Since(spare) < patience:
			over = time.After(lateCopy)
			continue
		}
		m.foundLate(open)
		for file := range open {
			late = append(late, metarpc.CopyRef{Device: file.Device, Handle: file.Handle})
		}
		cancel()
	}
	if ctx.Err() != nil {
		return errors.Join(append(errs, ctx.Err())...)
	}
	for j := range columns(&row) {
		if !good[j] {
			return errors.Join(errs...)
		}
	}
	if late = append(late, failed...); len(late) > 0 {
		return &LateError{late}
	}
	return nil
}

// lateCopy is for how long a copy on a device that answers is waited for when other copies have what is needed.
const lateCopy = time.Second

// away reports whether all of these data files are on devices that are down or late, whether one is on a device that
// was not looked at yet, and whether one is on a device that has announced that it stops.
func (m *Manager) away(files map[*schema.DataFile]int) (away, unmet, stop bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	away = true
	for file := range files {
		d := m.find(file.Device) // nil: of another process, not yet learnt of
		stops := d != nil && d.condition == up && d.store != nil && d.store.Stopping()
		away = away && d != nil && (d.condition == down || d.late && !stops)
		unmet = unmet || d == nil || d.condition == unknown
		stop = stop || stops
	}
	return away, unmet, stop
}

// foundLate makes the devices of these data files late, which have not answered for lateCopy, and has them looked at.
func (m *Manager) foundLate(files map[*schema.DataFile]int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for file := range files {
		if d := m.find(file.Device); d != nil && d.condition == up && !d.late {
			d.late = true
			d.complain(time.Now())
		}
	}
}

// complain has the devices of copies that could not be written show that they answer.
func (m *Manager) complain(copies []metarpc.CopyRef) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, ref := range copies {
		if d := m.find(ref.Device); d != nil {
			d.complain(time.Now())
		}
	}
}

// settleDoubts waits until the devices that clients have complained of have answered, or have not for fillPatience.
func (m *Manager) settleDoubts(ctx context.Context) error {
	for {
		var until time.Time
		m.mu.Lock()
		changed := m.changed
		for _, d := range m.devices {
			if !d.doubted.IsZero() && d.doubted.Add(fillPatience).After(until) {
				until = d.doubted.Add(fillPatience)
			}
		}
		m.mu.Unlock()
		if !until.After(time.Now()) {
			return nil
		}
		waiting, cancel := context.WithDeadline(ctx, until)
		err := m.wait(waiting, changed)
		cancel()
		if err != nil && (ctx.Err() != nil || errors.Is(err, ErrClosed)) {
			return err
		}
	}
}

// answered ends that a device is late if a call that ended with this error was answered.
func (m *Manager) answered(id layout.DeviceID, err error) {
	if _, answered := store.Status(err); err != nil && !answered {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := m.find(id); d != nil {
		d.late = false
	}
}
