package datafile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// removeTime is how long the removal of a device waits for the garbage there to be removed.
	removeTime = 30 * time.Second
	// removeAgain is when it looks again for garbage that could not be removed yet.
	removeAgain = 100 * time.Millisecond
)

// errRemoved: the device is no longer part of the volume.
var errRemoved = errors.New("the data server was removed from the volume")

// RemoveDevice takes a device out of the volume, after the garbage there is removed; lost says that the data server is gone for good,
// so that its garbage is forgotten. A device that is not known counts as removed. After an error it can be done again.
//
// The errno of the error is EBUSY if the device is not drained, or layouts still have data files there.
func (m *Manager) RemoveDevice(ctx context.Context, id layout.DeviceID, lost bool) error {
	m.adding.Lock()
	defer m.adding.Unlock()
	d, err := m.device(id)
	if err != nil {
		return nil
	}
	if err := d.removeRows(ctx, lost); err != nil {
		return fmt.Errorf("remove data server %v: %w", d.url(), err)
	}
	m.log.Info("data server removed", "device", id, "url", d.url().String(), "lost", lost)
	m.mu.Lock()
	st, condition := d.store, d.condition
	m.forgetDevice(d)
	m.mu.Unlock()
	if condition == up && !lost && d.space != nil {
		m.wipe(ctx, d, st)
	}
	return nil
}

// removeRows deletes what the catalog has of a device that nothing leads to any more.
func (d *device) removeRows(ctx context.Context, lost bool) error {
	removing, cancel := context.WithTimeout(ctx, removeTime)
	defer cancel()
	key, inUseKey := schema.DeviceKey(d.id), schema.InUseKey(d.id)
	again := false
	for {
		values, err := d.m.cfg.Engine.GetMany(ctx, [][]byte{key, inUseKey})
		if err != nil {
			return err
		}
		if values[0] == nil { // by an earlier try whose outcome was not known
			return nil
		}
		var row schema.Device
		if err := schema.Decode(values[0], &row); err != nil {
			return fmt.Errorf("device row: %w", err)
		}
		counters, err := catalog.DecodeCounters(values[1])
		if err != nil {
			return fmt.Errorf("number of its data files: %w", err)
		}
		switch n := counters.Field(0); {
		case !row.Draining:
			return fmt.Errorf("it is not drained, do that first (weft admin device drain): %w", syscall.EBUSY)
		case n != 0:
			return fmt.Errorf("files have %d data files there, wait until they have moved (weft admin device ls): %w", n, syscall.EBUSY)
		}
		var b catalog.Batch
		b.GuardEqual(key, values[0])
		b.GuardRow(inUseKey, values[1])
		garbage := b.GuardRangeEmpty(d.garbageRows())
		b.Delete(key)
		b.Delete(inUseKey)
		guards := len(b.Guards)
		if d.space != nil {
			d.space.Drop(&b)
		}
		err = d.m.cfg.Engine.Commit(ctx, &b)
		guard := (*catalog.GuardError)(nil)
		switch isGuard := errors.As(err, &guard); {
		case isGuard && guard.Index == garbage && lost:
			err = d.forgetGarbage(ctx, values[0])
		case isGuard && guard.Index == garbage:
			err = d.removeGarbage(removing)
		case isGuard && guard.Index >= guards:
			err = d.releaseCondemned(ctx)
			if again && err == nil {
				err = errors.New("there is space that no data file has; run weftd fsck --repair")
			}
			again = true
		case isGuard, errors.Is(err, catalog.ErrConflict), errors.Is(err, catalog.ErrUnknown):
			continue
		case err == nil:
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// forgetGarbage deletes some of the garbage rows, if the Device row is still old.
func (d *device) forgetGarbage(ctx context.Context, old []byte) error {
	var b catalog.Batch
	b.GuardEqual(schema.DeviceKey(d.id), old)
	from, to := d.garbageRows()
	var numbers []uint64
	for kv, err := range d.m.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: d.m.page, KeysOnly: true}) {
		if err != nil {
			return err
		}
		b.Delete(slices.Clone(kv.Key))
		if d.space != nil { // what it takes is the catalog's to know
			numbers = append(numbers, numberOf(kv.Key))
		}
	}
	for _, number := range numbers {
		if err := removeExtents(ctx, d.space, number); err != nil {
			return err
		}
	}
	err := d.m.cfg.Engine.Commit(ctx, &b)
	guard := (*catalog.GuardError)(nil)
	if errors.As(err, &guard) || errors.Is(err, catalog.ErrConflict) || errors.Is(err, catalog.ErrUnknown) {
		return nil // what is left is seen by the next look
	}
	return err
}

// removeGarbage removes what garbage there is. Some may be left that cannot be removed yet, if there is no error.
func (d *device) removeGarbage(ctx context.Context) error {
	err := d.settled(ctx)
	if err == nil {
		err = d.trouble()
	}
	if err == nil {
		_, err = d.sweepAll(ctx)
	}
	if err == nil {
		select {
		case <-time.After(removeAgain):
			return nil
		case <-d.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("not done after %v: %w", removeTime, cmp.Or(d.trouble(), ctx.Err()))
	}
	return fmt.Errorf("data files that nobody needs any more cannot be removed there: %w; do it again when they can, "+
		"or declare the data server gone for good with --lost", err)
}

// trouble says why the data server cannot be reached; nil if it can, as far as is known.
func (d *device) trouble() error {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	return d.problem
}
