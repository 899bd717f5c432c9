package fsck

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

// DefaultSettle is enough for what services do at data servers between two commits, if all of those answer.
const DefaultSettle = 2 * time.Second

// looks is how often something is looked at again whose rows change each time.
const looks = 5

// frozen is a catalog as one snapshot shows it, read no faster than pace says.
type frozen struct {
	take func(context.Context) (catalog.Snapshot, error)
	pace *pace

	mu   sync.Mutex // held while another snapshot is taken
	snap catalog.Snapshot
	// renew says that a snapshot that is not kept any more is replaced by a newer one for point reads. What is found then is looked at again
	// anyway.
	renew bool
}

var _ catalog.Engine = (*frozen)(nil)

// freeze takes a snapshot.
func freeze(ctx context.Context, take func(context.Context) (catalog.Snapshot, error), p *pace) (*frozen, error) {
	snap, err := take(ctx)
	if err != nil {
		return nil, err
	}
	return &frozen{take: take, pace: p, snap: snap}, nil
}

func (f *frozen) current() catalog.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.snap
}

// thaw replaces the snapshot old, unless that was done.
func (f *frozen) thaw(ctx context.Context, old catalog.Snapshot) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.snap != old {
		return nil
	}
	snap, err := f.take(ctx)
	if err == nil {
		err = old.Close()
		f.snap = snap
	}
	return err
}

func (f *frozen) Get(ctx context.Context, key []byte) ([]byte, error) {
	for {
		snap := f.current()
		value, err := snap.Get(ctx, key)
		if !f.renew || !errors.Is(err, catalog.ErrSnapshotExpired) {
			return value, err
		}
		if err := f.thaw(ctx, snap); err != nil {
			return nil, err
		}
	}
}

func (f *frozen) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	return f.current().GetMany(ctx, keys)
}

func (f *frozen) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		for row, err := range f.current().Scan(ctx, from, to, opts) {
			if err == nil {
				err = f.pace.wait(ctx, 1)
			}
			if !yield(row, err) || err != nil {
				return
			}
		}
	}
}

// Commit implements [catalog.Engine]: there is none.
func (f *frozen) Commit(context.Context, *catalog.Batch) error {
	return errors.New("fsck: what services use is not changed")
}

// Snapshot implements [catalog.Engine]: it is the same.
func (f *frozen) Snapshot(context.Context) (catalog.Snapshot, error) { return lent{f}, nil }

func (f *frozen) Caps() catalog.Caps { return catalog.Caps{} }
func (f *frozen) Close() error       { return f.current().Close() }

// lent is a snapshot that whoever was given it does not close.
type lent struct{ *frozen }

func (lent) Close() error { return nil }

// pace makes whoever waits do at most rate things a second.
type pace struct {
	rate int64

	mu    sync.Mutex
	began time.Time
	done  int64
}

// wait returns when n things more may have been done.
func (p *pace) wait(ctx context.Context, n int) error {
	if p.rate == 0 {
		return ctx.Err()
	}
	p.mu.Lock()
	if p.began.IsZero() {
		p.began = time.Now()
	}
	p.done += int64(n)
	ahead := time.Duration(float64(p.done)/float64(p.rate)*float64(time.Second)) - time.Since(p.began)
	if ahead < -time.Second { // what was waited for elsewhere is not caught up with
		p.began, p.done = time.Now(), 0
	}
	p.mu.Unlock()
	if ahead < 10*time.Millisecond {
		return ctx.Err()
	}
	timer := time.NewTimer(ahead)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// begin takes the first snapshot.
func (c *checker) begin(ctx context.Context) error {
	if c.cfg.Settle == 0 {
		c.cfg.Settle = DefaultSettle
	}
	return c.refreeze(ctx)
}

// refreeze goes on with a newer snapshot.
func (c *checker) refreeze(ctx context.Context) error {
	p := &pace{rate: c.cfg.Rate}
	if c.frozen != nil {
		p = c.frozen.pace
		c.end()
		c.frozen = nil
	}
	f, err := freeze(ctx, c.cfg.Snapshot, p)
	if err != nil {
		return err
	}
	c.frozen, c.cfg.Engine = f, f
	return nil
}

func (c *checker) end() {
	if c.frozen == nil {
		return
	}
	if err := c.frozen.Close(); err != nil {
		c.cfg.Log.Warn("close a snapshot", "error", err)
	}
}

// online puts the phases in the order for a catalog that services use: first what is about the catalog alone, all of it in one snapshot, and
// then what the data servers have.
func (c *checker) online(phases []phase) []phase {
	later := map[string]bool{"data files": true, "sizes": true, "paths": true}
	var first, last []phase
	for _, p := range phases {
		if later[p.name] {
			last = append(last, p)
		} else {
			first = append(first, p)
		}
	}
	paths := last[len(last)-1]
	first = append(first, phase{"snapshot for data files", func(ctx context.Context) error {
		c.looking = true
		if err := c.refreeze(ctx); err != nil {
			return err
		}
		c.frozen.renew = true
		return nil
	}})
	first = append(first, last[:len(last)-1]...)
	return append(first, phase{"confirmation", c.confirm}, phase{"snapshot for paths", func(ctx context.Context) error {
		if len(c.report.Problems) == 0 {
			return nil
		}
		return c.refreeze(ctx)
	}}, paths)
}

// confirm looks again at what seemed wrong on data servers.
func (c *checker) confirm(ctx context.Context) error {
	before := c.suspects
	c.looking, c.suspects = false, nil
	for look := 1; len(before) > 0; look++ {
		select {
		case <-time.After(c.cfg.Settle):
		case <-ctx.Done():
			return ctx.Err()
		}
		was := map[string]string{}
		for i := range before {
			was[before[i].same()] = before[i].rows
		}
		now, err := c.again(ctx, before)
		if err != nil {
			return err
		}
		before = nil
		for _, p := range now {
			rows, seen := was[p.same()]
			switch {
			case seen && rows == p.rows: // what the catalog has of it was so before the data server was asked, and after it
				c.record(p)
			case look < looks:
				before = append(before, p)
			default:
				c.report.Busy++
			}
		}
	}
	return nil
}

// same is what makes a problem the one that it was when it was looked at before.
func (p *Problem) same() string {
	return fmt.Sprintf("%s %d %s %s", p.Kind, p.Inode, p.Device, p.DataFile)
}

// place is a data file on a device.
type place struct {
	on     *device
	number uint64
}

// again looks at some problems in a newer snapshot, and at their data files, and returns those that are there.
func (c *checker) again(ctx context.Context, problems []Problem) ([]Problem, error) {
	f, err := freeze(ctx, c.cfg.Snapshot, c.frozen.pace)
	if err != nil {
		return nil, err
	}
	n := newChecker(c.cfg)
	n.cfg.Engine, n.frozen, n.volume, n.looking = f, f, c.volume, true
	defer n.end()

	// What is the same in both checkers is what they know of devices by themselves.
	for id, d := range c.devices {
		var row schema.Device
		raw, err := schema.ReadRow(ctx, f, schema.DeviceKey(id), &row)
		if err != nil {
			return nil, err
		}
		if raw == nil {
			continue // it was removed
		}
		n.devices[id] = &device{
			id: id, url: d.url, next: row.Next, had: row.Next, server: d.server, store: d.store, ns: d.ns,
			claims: map[uint64]*claim{}, waste: map[uint64]bool{},
		}
	}
	rows := map[layout.FileID]string{}
	places := map[place]bool{}
	foreign := map[string]*device{}
	whole := map[layout.FileID]bool{} // files whose problem is not about one data file
	var files []layout.FileID
	for i := range problems {
		p := &problems[i]
		if p.Inode != 0 {
			files = append(files, p.Inode)
		}
		switch {
		case p.on == nil:
			whole[p.Inode] = true
		case n.devices[p.on.id] == nil:
		case p.Kind == ForeignFile:
			foreign[p.DataFile] = n.devices[p.on.id]
		case p.rows == "" && p.Inode == 0 && p.number >= c.devices[p.on.id].had && p.number < n.devices[p.on.id].next:
			// It was made since the first snapshot, and is a layout's or garbage: of which, only a new run can tell.
		default:
			places[place{n.devices[p.on.id], p.number}] = true
		}
	}
	slices.Sort(files)
	layouts := map[layout.FileID]*schema.Layout{}
	for _, id := range slices.Compact(files) {
		if layouts[id], rows[id], err = n.recall(ctx, id); err != nil {
			return nil, err
		}
	}
	for id, row := range layouts {
		if row == nil {
			continue
		}
		for i, files := range row.Mirrors {
			for j := range files {
				n.claimAgain(places, whole[id], &files[j], claim{inode: id, mirror: int16(i), column: int32(j)})
			}
		}
		for i := range row.Caches {
			n.claimAgain(places, false, &row.Caches[i].File, claim{inode: id, mirror: isCache})
		}
	}
	for at := range places {
		if err := n.lookAt(ctx, at); err != nil {
			return nil, err
		}
	}
	for name, d := range foreign {
		if err := n.lookForeign(ctx, d, name); err != nil {
			return nil, err
		}
	}
	for _, d := range n.sortedDevices() {
		if d.ns == nil {
			if err := n.checkMissing(ctx, d); err != nil {
				return nil, err
			}
		}
	}
	if err := n.checkSizes(ctx); err != nil {
		return nil, err
	}
	for i := range n.suspects {
		p := &n.suspects[i]
		p.rows = "rows " + rows[p.Inode]
		if p.on != nil {
			p.on = c.devices[p.on.id]
		}
	}
	return n.suspects, nil
}

// recall remembers an inode that is to be looked at again, above all those that were, and returns its layout, nil if it has none, and what
// the catalog has of it, as a text. An inode that is gone is not remembered.
func (c *checker) recall(ctx context.Context, id layout.FileID) (*schema.Layout, string, error) {
	values, err := c.cfg.Engine.GetMany(ctx, [][]byte{schema.InodeKey(id), schema.LayoutKey(id), schema.OrphanKey(id), schema.TruncateKey(id)})
	if err != nil || values[0] == nil {
		return nil, "", err
	}
	var ino schema.Inode
	if err := schema.DecodeRow(schema.InodeKey(id), values[0], &ino); err != nil {
		return nil, "", err
	}
	c.remember(id, &ino)
	n := &c.inodes[len(c.inodes)-1]
	if values[2] != nil {
		n.state |= orphan
	}
	if values[3] != nil {
		n.state |= unsettled
	}
	rows := fmt.Sprintf("%x %x", values, n.state)
	from, to := schema.Of(schema.InodeKey(id)...)
	from[0], to[0] = schema.PrefixWriter, schema.PrefixWriter
	for row, err := range c.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{KeysOnly: true}) {
		if err == nil && len(row.Key) != len(schema.WriterKey(id, [16]byte{})) {
			err = fmt.Errorf("row %q: %w", row.Key, catalog.ErrCorrupt)
		}
		if err != nil {
			return nil, "", err
		}
		if _, err := c.cfg.Engine.Get(ctx, schema.SessionKey([16]byte(row.Key[9:]))); err == nil {
			n.state |= unsettled // without its session nobody finds out the size
		} else if !errors.Is(err, catalog.ErrNotFound) {
			return nil, "", err
		}
		rows += fmt.Sprintf(" %x", row.Key)
	}
	if values[1] == nil || ino.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return nil, rows, nil
	}
	var row schema.Layout
	if err := schema.DecodeRow(schema.LayoutKey(id), values[1], &row); err != nil {
		return nil, "", err
	}
	if c.badLayout(&row) != "" {
		return nil, rows, nil
	}
	return &row, rows, nil
}

// claimAgain notes that a layout has a data file, if that is to be looked at, or all of the file are.
func (c *checker) claimAgain(places map[place]bool, all bool, file *schema.DataFile, by claim) {
	d := c.devices[file.Device]
	if d == nil || file.IsAbsent() || d.claims[file.Number] != nil {
		return
	}
	at := place{d, file.Number}
	if all {
		places[at] = true
	}
	if places[at] {
		d.claims[file.Number] = &by
	}
}

// lookAt looks at a data file.
func (c *checker) lookAt(ctx context.Context, at place) error {
	d := at.on
	if err := c.frozen.pace.wait(ctx, 1); err != nil {
		return err
	}
	switch _, err := c.cfg.Engine.Get(ctx, schema.GarbageKey(d.id, at.number)); {
	case err == nil:
		d.waste[at.number] = true
	case !errors.Is(err, catalog.ErrNotFound):
		return err
	}
	if d.ns != nil {
		if d.claims[at.number] == nil || d.ns.row == nil {
			return nil
		}
		space, err := extent.Open(ctx, c.cfg.Engine, d.id)
		if err != nil {
			return err
		}
		return c.checkClaim(ctx, d, space, at.number)
	}
	return c.call(ctx, d, func(ctx context.Context) error {
		handle, attr, err := d.store.Find(ctx, at.number)
		if status, ok := store.Status(err); ok && (status == nfs3.ErrNoEnt || status == nfs3.ErrStale) {
			return nil // checkMissing tells
		}
		if err != nil {
			return err
		}
		f := store.File{Name: dataFileName(at.number), Number: at.number, Known: attr.Type == nfs3.TypeReg, Handle: handle, Attr: attr}
		return c.checkDataFile(ctx, d, &f)
	})
}

// lookForeign looks for something that is none of the data files.
func (c *checker) lookForeign(ctx context.Context, d *device, name string) error {
	dir, _, _ := strings.Cut(name, "/")
	subdir, err := strconv.ParseUint(dir, 16, 8)
	if err != nil {
		return err
	}
	return c.call(ctx, d, func(ctx context.Context) error {
		return d.store.List(ctx, int(subdir), func(f *store.File) error {
			if f.Name != name {
				return nil
			}
			return c.checkDataFile(ctx, d, f)
		})
	})
}
