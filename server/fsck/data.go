package fsck

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"syscall"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

// device is a data server, or a namespace, and what should be on it.
type device struct {
	id     layout.DeviceID
	url    string
	next   uint64 // Device.Next, or what it should be
	had    uint64 // Device.Next
	server store.Server
	store  *store.Store
	ns     *namespace        // nil: it is a data server
	claims map[uint64]*claim // data files that layouts have
	waste  map[uint64]bool   // garbage
	inUse  int64             // data files in layouts, shared ones counted each time
}

// claim is a layout's claim to a data file.
type claim struct {
	inode  layout.FileID
	column int32
	mirror int16 // isCache: it is the file's cache on the device
	seen   bool  // on the data server
}

// isCache is the mirror of claims and slots that are caches.
const isCache = -1

// fileOf is the data file of a claim on a device in the layout, nil if it is not there any more.
func (c *claim) fileOf(row *schema.Layout, dev layout.DeviceID) *schema.DataFile {
	if c.mirror != isCache {
		if int(c.mirror) >= len(row.Mirrors) || int(c.column) >= len(row.Mirrors[c.mirror]) {
			return nil
		}
		return &row.Mirrors[c.mirror][c.column]
	}
	return cacheOn(row, dev)
}

// cacheOn is the data file of the cache on a device, nil if there is none.
func cacheOn(row *schema.Layout, dev layout.DeviceID) *schema.DataFile {
	for i := range row.Caches {
		if f := &row.Caches[i].File; f.Device == dev {
			return f
		}
	}
	return nil
}

// connect reads the volume and the devices and reaches every one.
func (c *checker) connect(ctx context.Context) error {
	value, err := c.cfg.Engine.Get(ctx, schema.KeyVolume)
	if err != nil {
		return fmt.Errorf("volume: %w", err)
	}
	if err := schema.DecodeRow(schema.KeyVolume, value, &c.volume); err != nil {
		return err
	}
	if err := schema.CheckFormat(c.volume.Format); err != nil {
		return err
	}
	rows := map[*device]schema.Device{}
	err = c.scan(ctx, schema.PrefixDevice, func(key, value []byte) error {
		var row schema.Device
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		d := &device{id: layout.DeviceID(key[1:]), next: row.Next, had: row.Next, claims: map[uint64]*claim{}, waste: map[uint64]bool{}}
		u := url.URL{Scheme: "nfs", Host: net.JoinHostPort(row.Host, strconv.Itoa(int(row.Port))), Path: row.Export}
		if row.NQN != "" {
			d.ns = &namespace{}
			u.Scheme, u.Path, u.Fragment = "nvme", "/"+row.NQN, strconv.FormatUint(uint64(row.NSID), 10)
		}
		d.url = u.String()
		c.devices[d.id] = d
		rows[d] = row
		return nil
	})
	if err != nil {
		return err
	}
	return c.each(func(d *device) error {
		row := rows[d]
		return c.call(ctx, d, func(ctx context.Context) error { return d.connect(ctx, &c.cfg, c.volume.ID, &row) })
	})
}

func (d *device) connect(ctx context.Context, cfg *Config, volume [16]byte, row *schema.Device) error {
	if d.ns != nil {
		return d.ns.connect(ctx, cfg, volume, row)
	}
	addrs, err := store.Resolve(ctx, row.Host, row.Port)
	if err != nil {
		return err
	}
	if d.server, err = cfg.Dial(d.url, addrs, row.MountPort); err != nil {
		return err
	}
	if d.store, err = store.Open(ctx, d.server, row.Export, volume); err != nil {
		return err
	}
	if d.store.ID != d.id {
		return fmt.Errorf("it is device %v, the catalog has %v", d.store.ID, d.id)
	}
	return nil
}

func (c *checker) disconnect() {
	for _, d := range c.devices {
		var err error
		switch {
		case d.ns != nil && d.ns.Namespace != nil:
			err = d.ns.Close()
		case d.server != nil:
			err = d.server.Close()
		}
		if err != nil {
			c.cfg.Log.Warn(d.what()+": close", "url", d.url, "error", err)
		}
	}
}

// each calls f for all devices side by side and joins the errors.
func (c *checker) each(f func(*device) error) error {
	devices := c.sortedDevices()
	errs := make([]error, len(devices))
	var wg sync.WaitGroup
	for i, d := range devices {
		wg.Go(func() { errs[i] = f(d) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// call bounds what f asks of a data server and says in the error which one it was.
func (c *checker) call(ctx context.Context, d *device, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	err := f(ctx)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s %s: no answer for %v: %w", d.what(), d.url, c.cfg.Timeout, err)
	}
	return fmt.Errorf("%s %s: %w", d.what(), d.url, err)
}

func (d *device) what() string {
	if d.ns != nil {
		return "namespace"
	}
	return "data server"
}

// checkLayouts reads all layouts and notes which data files they claim.
func (c *checker) checkLayouts(ctx context.Context) error {
	type strayLayout struct{ key, value []byte }
	var strays []strayLayout
	incomplete := map[layout.FileID]bool{}
	var cached []layout.FileID
	err := c.scan(ctx, schema.PrefixLayout, func(key, value []byte) error {
		id := schema.IDOf(key)
		var row schema.Layout
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		if n := c.find(id); n == nil || n.mode&syscall.S_IFMT != syscall.S_IFREG {
			strays = append(strays, strayLayout{key, value})
			return nil
		}
		if why := c.badLayout(&row); why != "" {
			return c.found(ctx, Problem{Kind: BadLayout, Inode: id, Detail: why}, nil)
		}
		if row.FewCopies() {
			if err := c.checkFormat(ctx, schema.FormatCopies); err != nil {
				return err
			}
		}
		for j := range row.Mirrors[0] {
			if row.GoodCopies(j) == 0 {
				p := Problem{Kind: NoGoodCopy, Inode: id, Detail: fmt.Sprintf("column %d", j)}
				if err := c.found(ctx, p, nil); err != nil {
					return err
				}
			}
		}
		if len(row.Caches) > 0 {
			cached = append(cached, id)
		}
		if row.Incomplete() {
			incomplete[id] = true
		}
		for i, files := range row.Mirrors {
			extra := row.Moving && i == len(row.Mirrors)-1
			for j := range files {
				if files[j].State != layout.CopyGood && !(extra && files[j].IsAbsent()) {
					c.report.Copies++
				}
				if files[j].IsAbsent() || j > 0 && row.Moving && files[j].Same(&files[0]) { // the file is moved into one data file
					continue
				}
				d := c.devices[files[j].Device]
				if d == nil {
					_, name := schema.DataFileName(files[j].Number)
					p := Problem{Kind: BadLayout, Inode: id, DataFile: name, Detail: fmt.Sprintf("device %v is not known", files[j].Device)}
					if err := c.found(ctx, p, nil); err != nil {
						return err
					}
					c.unknown[files[j].Device] = true
					continue
				}
				d.inUse++
				if d.claims[files[j].Number] != nil {
					c.shared = append(c.shared, slot{inode: id, mirror: i, column: j})
					continue
				}
				d.claims[files[j].Number] = &claim{inode: id, mirror: int16(i), column: int32(j)}
				if err := c.numberTaken(ctx, d, files[j].Number); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, s := range strays {
		if err := c.strayLayout(ctx, s.key, s.value); err != nil {
			return err
		}
	}
	if err := c.checkCaches(ctx, cached); err != nil {
		return err
	}
	return c.checkFills(ctx, incomplete)
}

// checkCaches looks at the caches that layouts have: after all else that they have, since a cache is nothing to keep.
func (c *checker) checkCaches(ctx context.Context, files []layout.FileID) error {
	rows := map[string]schema.CacheUse{} // by their keys
	for _, id := range files {
		row, _, err := c.layoutOf(ctx, id)
		if err == nil {
			err = c.claimCaches(ctx, id, &row, rows)
		}
		if err != nil {
			return err
		}
	}
	return c.checkCacheRows(ctx, rows)
}

// claimCaches notes the data files of a layout's caches, and what their rows are to be.
func (c *checker) claimCaches(ctx context.Context, id layout.FileID, row *schema.Layout, caches map[string]schema.CacheUse) error {
	for i := range row.Caches {
		cache := &row.Caches[i]
		file := &cache.File
		d := c.devices[file.Device]
		if d == nil {
			p := Problem{Kind: LostCache, Inode: id, Detail: fmt.Sprintf("device %v is not known", file.Device)}
			if err := c.dropCache(ctx, p, nil, file.Device); err != nil {
				return err
			}
			continue
		}
		caches[string(schema.CacheKey(file.Device, id))] = cache.Use()
		d.inUse++
		if d.claims[file.Number] != nil {
			c.shared = append(c.shared, slot{inode: id, mirror: isCache, device: file.Device})
			continue
		}
		d.claims[file.Number] = &claim{inode: id, mirror: isCache}
		if err := c.numberTaken(ctx, d, file.Number); err != nil {
			return err
		}
	}
	return nil
}

// dropCache takes the cache on a device out of a layout. d is nil if the device is not known. Nothing is lost with it.
func (c *checker) dropCache(ctx context.Context, p Problem, d *device, dev layout.DeviceID) error {
	row, old, err := c.layoutOf(ctx, p.Inode)
	if c.looking && errors.Is(err, catalog.ErrNotFound) {
		return nil // removed meanwhile
	}
	if err != nil {
		return err
	}
	return c.found(ctx, p, func(b *catalog.Batch) error {
		row.Caches = slices.DeleteFunc(row.Caches, func(cache schema.Cache) bool { return cache.File.Device == dev })
		putLayout(b, p.Inode, &row, old)
		b.Delete(schema.CacheKey(dev, p.Inode))
		if d != nil {
			b.Add(schema.InUseKey(dev), 0, -1)
			d.inUse--
		}
		return nil
	})
}

// checkCacheRows holds the rows of caches by device against the layouts that have them.
func (c *checker) checkCacheRows(ctx context.Context, caches map[string]schema.CacheUse) error {
	err := c.scan(ctx, schema.PrefixCache, func(key, value []byte) error {
		dev, id := schema.CacheOf(key)
		var use schema.CacheUse
		if err := schema.DecodeRow(key, value, &use); err != nil {
			return err
		}
		want, ok := caches[string(key)]
		delete(caches, string(key))
		p := Problem{Kind: CacheRow, Inode: id, Detail: fmt.Sprintf("on device %v", dev)}
		switch {
		case !ok:
			return c.found(ctx, p, func(b *catalog.Batch) error { b.Delete(key); return nil })
		case use != want:
			return c.found(ctx, p, func(b *catalog.Batch) error { b.Put(key, schema.Encode(&want)); return nil })
		}
		return nil
	})
	for _, key := range slices.Sorted(maps.Keys(caches)) {
		if err == nil {
			dev, id := schema.CacheOf([]byte(key))
			use := caches[key]
			p := Problem{Kind: CacheRow, Inode: id, Detail: fmt.Sprintf("there is none on device %v", dev)}
			err = c.found(ctx, p, func(b *catalog.Batch) error { b.Put([]byte(key), schema.Encode(&use)); return nil })
		}
	}
	return err
}

// checkFills holds the fill rows against the layouts that have copies which are not good.
func (c *checker) checkFills(ctx context.Context, incomplete map[layout.FileID]bool) error {
	err := c.scan(ctx, schema.PrefixFill, func(key, value []byte) error {
		id := schema.IDOf(key)
		var row schema.Fill
		if err := schema.DecodeRow(key, value, &row); err != nil {
			return err
		}
		if incomplete[id] {
			delete(incomplete, id)
			return nil
		}
		return c.found(ctx, Problem{Kind: FillRow, Inode: id, Detail: "all copies are good"}, func(b *catalog.Batch) error {
			b.GuardEqual(key, value)
			b.Delete(key)
			return nil
		})
	})
	for _, id := range slices.Sorted(maps.Keys(incomplete)) {
		if err == nil {
			err = c.found(ctx, Problem{Kind: FillRow, Inode: id, Detail: "there is none"}, func(b *catalog.Batch) error {
				b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{}))
				return nil
			})
		}
	}
	return err
}

// badLayout says what no layout can be like.
func (c *checker) badLayout(row *schema.Layout) string {
	if row.StripeUnit < layout.MinStripeUnit || row.StripeUnit > layout.MaxStripeUnit {
		return fmt.Sprintf("stripe unit of %d bytes", row.StripeUnit)
	}
	most := layout.MaxPolicyMirror
	if row.Moving {
		most++
	}
	if len(row.Mirrors) == 0 || len(row.Mirrors) > most {
		return fmt.Sprintf("%d mirrors", len(row.Mirrors))
	}
	have := len(row.Mirrors[0])
	for _, files := range row.Mirrors {
		if len(files) != have {
			return fmt.Sprintf("mirrors of %d and %d data files", have, len(files))
		}
		for j := range files {
			if files[j].IsAbsent() && files[j].State != layout.CopyStale {
				return fmt.Sprintf("column %d has a copy without a data file that is %v", j, files[j].State)
			}
		}
	}
	if row.MinCopies < 0 || row.MinCopies > layout.MaxPolicyMirror {
		return fmt.Sprintf("%d copies at least", row.MinCopies)
	}
	if have != row.Width && have != 1 || row.Width > layout.MaxStripeCount {
		return fmt.Sprintf("%d of %d data files", have, row.Width)
	}
	return ""
}

// numberTaken makes sure that a number that is in use will not be used again.
func (c *checker) numberTaken(ctx context.Context, d *device, number uint64) error {
	if number < d.next {
		return nil
	}
	_, name := schema.DataFileName(number)
	p := Problem{Kind: NextNumber, Device: d.url, DataFile: name, on: d, number: number, Detail: fmt.Sprintf("the next number is %d", d.next)}
	err := c.found(ctx, p, func(b *catalog.Batch) error {
		return c.changeDevice(ctx, b, d, func(row *schema.Device) { row.Next = number + 1 })
	})
	d.next = number + 1 // reported once, also if it is not repaired
	return err
}

// changeDevice makes a batch put a device row that f has changed.
func (c *checker) changeDevice(ctx context.Context, b *catalog.Batch, d *device, f func(*schema.Device)) error {
	key := schema.DeviceKey(d.id)
	old, err := c.cfg.Engine.Get(ctx, key)
	if err != nil {
		return err
	}
	var row schema.Device
	if err := schema.DecodeRow(key, old, &row); err != nil {
		return err
	}
	f(&row)
	b.GuardEqual(key, old)
	b.Put(key, schema.Encode(&row))
	return nil
}

// layoutOf reads a layout row.
func (c *checker) layoutOf(ctx context.Context, id layout.FileID) (row schema.Layout, value []byte, err error) {
	key := schema.LayoutKey(id)
	if value, err = c.cfg.Engine.Get(ctx, key); err != nil {
		return row, nil, err
	}
	return row, value, schema.DecodeRow(key, value, &row)
}

// putLayout makes a batch put a layout row that was read as old.
func putLayout(b *catalog.Batch, id layout.FileID, row *schema.Layout, old []byte) {
	b.GuardEqual(schema.LayoutKey(id), old)
	b.Put(schema.LayoutKey(id), schema.Encode(row))
}

// strayLayout removes a layout without a regular file; data files that no other layout has become garbage.
func (c *checker) strayLayout(ctx context.Context, key, value []byte) error {
	var row schema.Layout
	if err := schema.DecodeRow(key, value, &row); err != nil {
		return err
	}
	var all, own []schema.DataFile
	for _, files := range row.Mirrors {
		for i := range files {
			if !files[i].IsAbsent() {
				all = append(all, files[i])
			}
		}
	}
	for i := range row.Caches {
		all = append(all, row.Caches[i].File)
	}
	for i := range all {
		d := c.devices[all[i].Device]
		if d == nil {
			continue
		}
		if !c.cfg.Repair {
			d.inUse++ // the device's counter has it
		}
		if d.claims[all[i].Number] == nil {
			own = append(own, all[i])
		}
	}
	p := Problem{Kind: StrayRow, Inode: schema.IDOf(key), Detail: "layout"}
	err := c.found(ctx, p, func(b *catalog.Batch) error {
		b.GuardEqual(key, value)
		b.Delete(key)
		for i := range all {
			b.Add(schema.InUseKey(all[i].Device), 0, -1)
		}
		for i := range own {
			b.Put(schema.GarbageKey(own[i].Device, own[i].Number), nil)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i := range own { // so that they are no orphans as well
		c.devices[own[i].Device].waste[own[i].Number] = true
	}
	return nil
}

// slot is a place in a layout.
type slot struct {
	inode          layout.FileID
	mirror, column int
	device         layout.DeviceID // if mirror is isCache
}

// checkShared deals with the data files that several layouts have, now that all numbers in use are known.
func (c *checker) checkShared(ctx context.Context) error {
	for _, s := range c.shared {
		if err := c.unshare(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// unshare gives a file an empty data file for one that another file has.
func (c *checker) unshare(ctx context.Context, at slot) error {
	row, old, err := c.layoutOf(ctx, at.inode)
	if err != nil {
		return err
	}
	if at.mirror == isCache {
		p := Problem{Kind: LostCache, Inode: at.inode, Device: c.devices[at.device].url, Detail: "its data file is another's as well"}
		return c.dropCache(ctx, p, c.devices[at.device], at.device)
	}
	file := &row.Mirrors[at.mirror][at.column]
	d := c.devices[file.Device]
	_, name := schema.DataFileName(file.Number)
	p := Problem{
		Kind: SharedDataFile, Inode: at.inode, Device: d.url, DataFile: name,
		Lost:   c.cfg.Repair && c.find(at.inode).size > 0 && !replaceable(&row, at.mirror, at.column),
		Detail: fmt.Sprintf("inode %d has it", d.claims[file.Number].inode),
	}
	return c.found(ctx, p, func(b *catalog.Batch) error {
		file.Number = d.next
		var take catalog.Batch // as when the service makes data files
		take.Put(schema.GarbageKey(d.id, file.Number), nil)
		err := c.changeDevice(ctx, &take, d, func(row *schema.Device) { row.Next = file.Number + 1 })
		if err != nil {
			return err
		}
		if err := c.cfg.Engine.Commit(ctx, &take); err != nil {
			return err
		}
		d.next = file.Number + 1
		if err := c.make(ctx, d, file); err != nil {
			return err
		}
		b.Delete(schema.GarbageKey(d.id, file.Number))
		emptied(b, at.inode, &row, at.mirror, at.column)
		putLayout(b, at.inode, &row, old)
		return nil
	})
}

// replaceable reports whether the file loses nothing with a copy: it is not good, or there is another good one.
func replaceable(row *schema.Layout, mirror, column int) bool {
	return row.Mirrors[mirror][column].State != layout.CopyGood || row.GoodCopies(column) > 1
}

// emptied notes that a copy is empty now: it is stale if the file can do without it.
func emptied(b *catalog.Batch, id layout.FileID, row *schema.Layout, mirror, column int) {
	if replaceable(row, mirror, column) {
		row.Mirrors[mirror][column].State = layout.CopyStale
		b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{}))
	}
}

// checkGarbage reads the list of garbage.
func (c *checker) checkGarbage(ctx context.Context) error {
	return c.scan(ctx, schema.PrefixGarbage, func(key, _ []byte) error {
		id := layout.DeviceID(key[1:17])
		number := binary.BigEndian.Uint64(key[17:])
		d := c.devices[id]
		_, name := schema.DataFileName(number)
		if d == nil {
			return c.stray(ctx, key, Problem{DataFile: name, Detail: fmt.Sprintf("garbage on device %v", id)})
		}
		if claim := d.claims[number]; claim != nil {
			return c.found(ctx, Problem{Kind: GarbageInUse, Inode: claim.inode, Device: d.url, DataFile: name}, func(b *catalog.Batch) error {
				b.Delete(key)
				return nil
			})
		}
		d.waste[number] = true
		c.report.Garbage++
		return c.numberTaken(ctx, d, number)
	})
}

// checkDataFiles looks at every data file on every data server, but namespaces.
func (c *checker) checkDataFiles(ctx context.Context) error {
	return c.each(func(d *device) error {
		if d.ns != nil {
			return nil // checkSpaces looks at those
		}
		for i := range store.Subdirs {
			files := 0
			err := c.call(ctx, d, func(ctx context.Context) error {
				return d.store.List(ctx, i, func(f *store.File) error {
					c.mu.Lock()
					defer c.mu.Unlock()
					files++
					c.passed(1, "")
					return c.checkDataFile(ctx, d, f)
				})
			})
			if err == nil && c.frozen != nil {
				err = c.frozen.pace.wait(ctx, files)
			}
			if err != nil {
				return err
			}
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.checkMissing(ctx, d)
	})
}

func (c *checker) checkDataFile(ctx context.Context, d *device, f *store.File) error {
	p := Problem{Device: d.url, DataFile: f.Name, on: d, number: f.Number}
	if !f.Known {
		p.Kind = ForeignFile
		return c.found(ctx, p, nil)
	}
	claim := d.claims[f.Number]
	if claim == nil {
		if d.waste[f.Number] {
			return nil
		}
		if err := c.numberTaken(ctx, d, f.Number); err != nil {
			return err
		}
		p.Kind, p.Detail = OrphanDataFile, fmt.Sprintf("%d bytes", f.Attr.Size)
		return c.found(ctx, p, func(b *catalog.Batch) error {
			b.Put(schema.GarbageKey(d.id, f.Number), nil)
			return nil
		})
	}
	if claim.seen { // a listing may tell a file twice while the directory changes
		return nil
	}
	claim.seen = true
	p.Inode = claim.inode
	row, old, err := c.layoutOf(ctx, claim.inode)
	if c.looking && errors.Is(err, catalog.ErrNotFound) {
		return nil // removed meanwhile
	}
	if err != nil {
		return err
	}
	file := claim.fileOf(&row, d.id)
	if file == nil || file.Number != f.Number {
		return nil
	}
	why, err := c.wrongHandle(ctx, d, file, f)
	if err != nil {
		return err
	}
	if why != "" {
		p.Kind, p.Detail = StaleHandle, why
		err := c.found(ctx, p, func(b *catalog.Batch) error {
			file.Handle = f.Handle
			putLayout(b, claim.inode, &row, old)
			return nil
		})
		if err != nil {
			return err
		}
	}
	if file.State == layout.CopyStale {
		return nil // whose it is and how long does not matter any more
	}
	owner := layout.Credential{UID: file.UID, GID: file.GID}
	if !store.Owned(&f.Attr, owner) {
		p.Kind = Owner
		p.Detail = fmt.Sprintf("uid %d, gid %d, mode %o; want uid %d, gid %d", f.Attr.UID, f.Attr.GID, f.Attr.Mode, owner.UID, owner.GID)
		err := c.found(ctx, p, func(*catalog.Batch) error { return d.store.SetOwner(ctx, f.Handle, owner) })
		if err != nil {
			return err
		}
	}
	if claim.mirror == isCache {
		return nil
	}
	n := c.find(claim.inode)
	// Nobody will see the size of an inode without names again; its writer may have given up without reporting it.
	if size := store.Size(&f.Attr); size > n.size && n.state&(unsettled|orphan) == 0 && file.State == layout.CopyGood {
		c.beyond[n.id] = max(c.beyond[n.id], size)
	}
	return nil
}

// wrongHandle says why the handle in a layout does not lead to the data file; "" if it does.
func (c *checker) wrongHandle(ctx context.Context, d *device, file *schema.DataFile, f *store.File) (string, error) {
	if slices.Equal(file.Handle, f.Handle) {
		return "", nil
	}
	attr, err := d.store.GetAttr(ctx, file.Handle) // a file may have several handles
	_, answered := store.Status(err)
	switch {
	case answered:
		return err.Error(), nil
	case err != nil:
		return "", err
	case attr.FileID != f.Attr.FileID:
		return fmt.Sprintf("it leads to file %d, this is %d", attr.FileID, f.Attr.FileID), nil
	}
	return "", nil
}

// checkMissing looks for data files that layouts have and the data server has not.
func (c *checker) checkMissing(ctx context.Context, d *device) error {
	var numbers []uint64
	for number, claim := range d.claims {
		if !claim.seen {
			numbers = append(numbers, number)
		}
	}
	slices.Sort(numbers)
	for _, number := range numbers {
		claim := d.claims[number]
		dir, name := schema.DataFileName(number)
		row, _, err := c.layoutOf(ctx, claim.inode)
		if c.looking && errors.Is(err, catalog.ErrNotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			return err
		}
		if file := claim.fileOf(&row, d.id); file == nil || file.Number != number {
			continue
		}
		if claim.mirror == isCache {
			p := Problem{Kind: LostCache, Inode: claim.inode, Device: d.url, DataFile: dir + "/" + name, on: d, number: number, Detail: "its data file is missing"}
			if err := c.dropCache(ctx, p, d, d.id); err != nil {
				return err
			}
			continue
		}
		p := Problem{
			Kind: Missing, Inode: claim.inode, Device: d.url, DataFile: dir + "/" + name, on: d, number: number,
			Lost: c.find(claim.inode).size > 0 && !replaceable(&row, int(claim.mirror), int(claim.column)),
		}
		if err := c.found(ctx, p, func(b *catalog.Batch) error { return c.remake(ctx, b, d, claim) }); err != nil {
			return err
		}
	}
	return nil
}

// remake makes a missing data file again, empty, and makes a batch put its handle into the layout.
func (c *checker) remake(ctx context.Context, b *catalog.Batch, d *device, claim *claim) error {
	row, old, err := c.layoutOf(ctx, claim.inode)
	if err != nil {
		return err
	}
	if err := c.make(ctx, d, &row.Mirrors[claim.mirror][claim.column]); err != nil {
		return err
	}
	emptied(b, claim.inode, &row, int(claim.mirror), int(claim.column))
	putLayout(b, claim.inode, &row, old)
	return nil
}

// make makes an empty data file and sets its handle.
func (c *checker) make(ctx context.Context, d *device, file *schema.DataFile) error {
	if d.ns != nil {
		file.Handle = handleOf(file.Number)
		return nil
	}
	return c.call(ctx, d, func(ctx context.Context) (err error) {
		file.Handle, err = d.store.Create(ctx, file.Number, layout.Credential{UID: file.UID, GID: file.GID})
		return err
	})
}

// checkSizes looks at the files whose data goes beyond their size.
func (c *checker) checkSizes(ctx context.Context) error {
	for _, id := range slices.Sorted(maps.Keys(c.beyond)) {
		end := c.beyond[id]
		p := Problem{Kind: BeyondSize, Inode: id, Detail: fmt.Sprintf("%d bytes, data to %d", c.find(id).size, end)}
		err := c.found(ctx, p, func(b *catalog.Batch) error {
			return c.change(ctx, b, id, func(row *schema.Inode) { row.Size, row.Used = max(row.Size, end), 0 })
		})
		if err != nil {
			return err
		}
	}
	return nil
}
