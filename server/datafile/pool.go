package datafile

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

const (
	// parallel is how many calls of one kind are outstanding on one data server.
	parallel = 16
	// refusedWait is how long to wait after a data server refused to make a data file.
	refusedWait = 10 * time.Second

	// Synthetic ids are in [firstID, lastID). Real users rarely are; none is the superuser. Some servers take no larger
	// ones, which would be negative in 32 bits. A READ layout's user is lastID, which owns nothing (RFC 8435 section 2.2).
	firstID = 1 << 20
	lastID  = 1<<31 - 1
)

// randomOwner returns a synthetic user and group. Both are drawn anew each time, for neither can be guessed from the
// other.
func randomOwner() layout.Credential {
	return layout.Credential{UID: randomID(), GID: randomID()}
}

func randomID() uint32 {
	var b [8]byte
	rand.Read(b[:])
	return uint32(firstID + binary.BigEndian.Uint64(b[:])%(lastID-firstID))
}

// fill makes data files whenever the pool has fallen below half.
func (d *device) fill() {
	for d.ctx.Err() == nil {
		n := d.wanted()
		if n == 0 {
			d.pause(d.refill, refresh)
			continue
		}
		if err := d.makeFiles(d.ctx, n); err != nil {
			d.refuse(err)
			d.pause(nil, refusedWait)
		}
	}
}

// wanted is how many data files should be made now.
func (d *device) wanted() int {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	have, size := len(d.pool), d.m.cfg.PoolSize
	if have >= d.demand {
		d.demand = 0
	}
	switch {
	case d.condition != up || d.row.Draining || d.pulse.readOnly != nil:
		return 0
	case d.refused != nil:
		return 1 // to see whether it still refuses
	case d.demand > 0:
		size = max(size, d.demand)
	case 2*have >= size && have > 0:
		return 0
	}
	return min(size-have, d.m.page)
}

// refuse records that no data file can be made.
func (d *device) refuse(err error) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if d.ctx.Err() != nil {
		return
	}
	if d.refused == nil {
		d.m.log.Warn("no data file can be made", "device", d.id, "url", placeOf(&d.row).String(), "error", err)
	}
	d.refused = err
	d.asked = time.Time{} // space may have run out
	kick(d.recheck)
	d.m.signal()
}

// makeFiles takes n numbers and makes their files, which join the pool. The first error ends it.
func (d *device) makeFiles(ctx context.Context, n int) error {
	first, err := d.takeNumbers(ctx, n)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	numbers := make(chan uint64)
	var makers sync.WaitGroup
	for range min(n, parallel) {
		makers.Go(func() { // makes files until there are no more numbers
			for number := range numbers {
				if err := d.makeFile(ctx, number); err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := range n {
		numbers <- first + uint64(i)
	}
	close(numbers)
	makers.Wait()
	d.m.mu.Lock()
	d.m.signal()
	d.m.mu.Unlock()
	return context.Cause(ctx)
}

// takeNumbers makes n numbers the device's and their rows garbage, durably, and holds them. It returns the first. Numbers of an attempt that was committed
// without anybody being told are garbage.
func (d *device) takeNumbers(ctx context.Context, n int) (first uint64, err error) {
	var taken []uint64
	forget := func() { // the numbers of an attempt that failed
		d.m.mu.Lock()
		defer d.m.mu.Unlock()
		for _, number := range taken {
			delete(d.held, number)
		}
		taken = taken[:0]
	}
	err = d.rewrite(ctx, func(b *catalog.Batch, row *schema.Device) {
		forget()
		d.m.mu.Lock()
		defer d.m.mu.Unlock()
		first = row.Next
		for range n {
			b.Put(schema.GarbageKey(d.id, row.Next), d.m.mark())
			d.held[row.Next] = struct{}{}
			taken = append(taken, row.Next)
			row.Next++
		}
	})
	if err != nil {
		forget()
	}
	return first, err
}

// makeFile makes the file of a number that is held and puts it into the pool. A number whose file was not made, for
// certain, is garbage afterwards; one whose CREATE may still be executed stays held as long as the Manager lives.
func (d *device) makeFile(ctx context.Context, number uint64) error {
	if ctx.Err() != nil {
		d.drop(number)
		return nil
	}
	owner := randomOwner()
	var handle []byte
	err := d.do(d.ctx, func(st dataStore) (err error) {
		handle, err = st.Create(d.ctx, number, owner)
		return err
	})
	_, answered := store.Status(err)
	switch {
	case errors.Is(err, store.ErrTaken):
		return d.disown(number)
	case answered:
		d.drop(number)
		return err
	case err != nil:
		return err
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	d.stock(schema.DataFile{Device: d.id, Number: number, Handle: handle, UID: owner.UID, GID: owner.GID})
	if d.refused != nil {
		d.refused = nil
		d.m.log.Info("data files can be made again", "device", d.id, "url", placeOf(&d.row).String())
	}
	if len(d.pool)%parallel == 0 { // and when all are made: not for each one, as many may be waiting
		d.m.signal()
	}
	return nil
}

// stock puts a data file that is held into the pool; m.mu is held. A device that is drained has none: there it becomes garbage.
func (d *device) stock(file schema.DataFile) {
	if !d.row.Draining {
		d.pool = append(d.pool, file)
		return
	}
	delete(d.held, file.Number)
	kick(d.sweep)
}

// next takes the first data file out of the pool, which has one; m.mu is held. It stays held until release or putBack.
func (d *device) next() schema.DataFile {
	file := d.pool[0]
	d.pool = d.pool[1:]
	kick(d.refill)
	return file
}

// drop lets a number become garbage.
func (d *device) drop(number uint64) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	delete(d.held, number)
	kick(d.sweep)
}

// disown deletes the garbage row of a number under which the data server has a file that the catalog knows nothing of,
// as after a return to an older catalog. The file is left to fsck.
func (d *device) disown(number uint64) error {
	_, name := schema.DataFileName(number)
	d.m.log.Warn("data server has a file that the catalog does not know: run fsck", "device", d.id, "file", name)
	var b catalog.Batch
	b.Delete(schema.GarbageKey(d.id, number))
	err := d.m.cfg.Engine.Commit(d.ctx, &b)
	if errors.Is(err, catalog.ErrUnknown) {
		err = catalog.FindOut(d.ctx, d.m.cfg.Engine, &b)
	}
	if err != nil {
		return fmt.Errorf("data file %s: %w", name, err) // stays held
	}
	d.drop(number)
	return nil
}
