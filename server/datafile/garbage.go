package datafile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// gather is how long garbage is let come together before it is collected.
	gather = 500 * time.Millisecond
	// sweepAgain is when garbage that could not be removed is tried again.
	sweepAgain = time.Minute
	// settle is how long after a data server was met a CREATE of an earlier Manager may still be executed.
	settle = 5 * time.Second
)

// Discard adds to b what makes the data files of file id's layout garbage. The batch also deletes the layout row and guards that it
// is still this row. Call Kick when it is committed.
func (m *Manager) Discard(b *catalog.Batch, id layout.FileID, row schema.Layout) {
	for _, files := range row.Mirrors {
		for i := range files {
			if !files[i].IsAbsent() && (i == 0 || !files[i].Same(&files[0])) { // or it is in all columns
				m.discardFile(b, &files[i])
			}
		}
	}
	for i := range row.Caches {
		m.discardFile(b, &row.Caches[i].File)
	}
	putCaches(b, id, row.Caches, nil)
}

// Kick says that there is garbage to collect.
func (m *Manager) Kick() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		kick(d.sweep)
	}
}

// GarbageCount returns how many data files wait for removal, as far as that is for this process to do.
func (m *Manager) GarbageCount(ctx context.Context) int64 {
	var n int64
	for _, d := range m.all() {
		skip := d.exempt()
		from, to := d.garbageRows()
		for kv, err := range m.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
			if err != nil {
				m.log.Warn("garbage cannot be counted", "error", err)
				return n
			}
			if skip.collectable(numberOf(kv.Key), kv.Value) {
				n++
			}
		}
	}
	return n
}

// garbageRows is the range of the keys of the device's garbage rows.
func (d *device) garbageRows() (from, to []byte) {
	return schema.Of(schema.GarbageKey(d.id, 0)[:1+len(d.id)]...)
}

// numberOf reads the number in a garbage row's key.
func numberOf(key []byte) uint64 { return binary.BigEndian.Uint64(key[1+len(layout.DeviceID{}):]) }

// exempt is what must not be collected: numbers that were held, and numbers that were not yet taken, at one moment. Of what others
// have made garbage, or have taken, only what dead members have left is collected, and only where that is for this process to do.
type exempt struct {
	held   map[uint64]struct{}
	next   uint64
	mine   []byte // what own rows have
	others bool
	dead   map[string]struct{}
}

// exempt must be called before the garbage rows are read: a number that was not held then and has a row later
// is garbage for good. In the other order the row could be an old one of a file that was assigned in between. The same is true of rows
// of members that were dead then.
func (d *device) exempt() exempt {
	m := d.m
	others := m.cfg.Collects == nil || m.cfg.Collects(d.id)
	m.mu.Lock()
	defer m.mu.Unlock()
	e := exempt{held: maps.Clone(d.held), next: d.row.Next, mine: m.mark(), others: others}
	if m.shared() {
		e.dead = map[string]struct{}{}
		for id, since := range m.dead {
			if time.Since(since) >= settle { // what it has sent may be carried out until then
				e.dead[string(id[:])] = struct{}{}
			}
		}
	}
	return e
}

// collectable reports whether a number whose row has such a value is garbage that is to be removed here.
func (e exempt) collectable(number uint64, value []byte) bool {
	if len(e.mine) == 0 || bytes.Equal(value, e.mine) { // who is alone takes what processes have left that shared the catalog before
		_, held := e.held[number]
		return number < e.next && !held
	}
	_, dead := e.dead[string(value)]
	return e.others && (dead || len(value) == 0)
}

// collect removes garbage when told that there is some, and looks for it now and then.
func (d *device) collect() {
	wait := firstWait
	released := d.space == nil
	for d.ctx.Err() == nil {
		again, err := d.sweepAll(d.ctx)
		if left := d.settling(); !released && left > 0 {
			again = min(again, left)
		} else if !released {
			condemnedErr := d.releaseCondemned(d.ctx)
			released = condemnedErr == nil
			err = errors.Join(err, condemnedErr)
		}
		if err == nil {
			wait = firstWait
			d.pause(d.sweep, again)
			d.pause(nil, gather)
			continue
		}
		if d.ctx.Err() == nil {
			d.m.log.Warn("garbage is not collected", "device", d.id, "url", d.url().String(), "error", err)
		}
		d.pause(nil, wait)
		wait = min(2*wait, sweepAgain)
	}
}

// settling is for how long what an earlier Manager has sent may still be carried out; settle if the device was not met yet.
func (d *device) settling() time.Duration {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if d.store == nil {
		return settle
	}
	return settle - time.Since(d.met)
}

// sweepAll removes the garbage there is and returns when to look again. An error is the last one there was; the rest
// was removed all the same.
func (d *device) sweepAll(ctx context.Context) (again time.Duration, err error) {
	again = sweepAgain
	from, to := d.garbageRows()
	for {
		skip := d.exempt()
		var numbers []uint64
		rows := 0
		owners := map[[16]byte]struct{}{}
		for kv, err := range d.m.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: d.m.page}) {
			if err != nil {
				return again, err
			}
			rows++
			from = catalog.After(kv.Key)
			number := numberOf(kv.Key)
			switch {
			case skip.collectable(number, kv.Value):
				numbers = append(numbers, number)
			case skip.others && len(kv.Value) == len(d.m.cfg.Member) && !bytes.Equal(kv.Value, skip.mine):
				owners[[16]byte(kv.Value)] = struct{}{}
			}
		}
		if died, err := d.m.bury(ctx, owners); err != nil {
			return again, err
		} else if died {
			again = min(again, settle)
		}
		if len(numbers) > 0 {
			// A row can be read before it is durable (catalog, Durability). A crash then brings back the layout that
			// has the file, so the file must not be removed before.
			if err := d.m.cfg.Engine.Commit(ctx, &catalog.Batch{}); err != nil {
				return again, err
			}
			settled, pageErr := d.removeFiles(ctx, numbers)
			if ctx.Err() != nil {
				return again, pageErr
			}
			if pageErr != nil {
				err = pageErr
			}
			if !settled {
				again = settle
			}
		}
		if rows < d.m.page {
			return again, err
		}
	}
}

// removeFiles removes data files and then their garbage rows. settled is false if some rows were kept because an
// earlier Manager's CREATE may yet be executed. The error is the last one there was.
func (d *device) removeFiles(ctx context.Context, numbers []uint64) (settled bool, err error) {
	if _, err := d.ready(ctx); err != nil {
		return true, err
	}
	d.m.mu.Lock()
	young := time.Since(d.met) < settle
	inherited := d.inherited
	d.m.mu.Unlock()

	var mu sync.Mutex // guards settled, err and b
	var b catalog.Batch
	b.Durability = catalog.NoSync // a row that comes back is collected again
	settled = true
	work := make(chan uint64)
	var removers sync.WaitGroup
	for range min(len(numbers), parallel) {
		removers.Go(func() { // removes files until there are no more numbers
			for number := range work {
				var found bool
				doErr := d.do(ctx, func(st dataStore) (err error) {
					found, err = st.Remove(ctx, number)
					return err
				})
				mu.Lock()
				switch {
				case doErr != nil:
					err = doErr
				case !found && young && number < inherited:
					settled = false
				default:
					b.Delete(schema.GarbageKey(d.id, number))
				}
				mu.Unlock()
			}
		})
	}
	for _, number := range numbers {
		work <- number
	}
	close(work)
	removers.Wait()
	if commitErr := d.m.cfg.Engine.Commit(ctx, &b); commitErr != nil {
		return settled, commitErr
	}
	return settled, err
}
