package fsck

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/schema"
)

// Namespace is an NVMe namespace, which fsck needs for its label only.
type Namespace interface {
	Identity() extent.Identity
	Block() int64 // bytes, as the next
	Size() int64
	// ReadAt reads whole blocks.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// WriteAt writes whole blocks, which are stable when it returns.
	WriteAt(ctx context.Context, p []byte, off int64) error
	Close() error
}

// namespace is what a device has that is one.
type namespace struct {
	Namespace
	found extent.Found      // at the places of its label
	row   *schema.Namespace // nil until it is known how it is cut
}

// connect reaches the namespace and makes sure that it is the device.
func (n *namespace) connect(ctx context.Context, cfg *Config, volume [16]byte, row *schema.Device) error {
	ns, err := cfg.DialNamespace(ctx, volume, row)
	if err != nil {
		return err
	}
	n.Namespace = ns
	size := ns.Size()
	head, tail := make([]byte, min(size, extent.ProbeHead)), make([]byte, min(size, extent.ProbeTail))
	if err := errors.Join(ns.ReadAt(ctx, head, 0), ns.ReadAt(ctx, tail, size-int64(len(tail)))); err != nil {
		return fmt.Errorf("read the label: %w", err)
	}
	n.found = extent.Probe(head, tail, size, volume)
	return nil
}

// checkLabels holds the labels of namespaces against the catalog.
func (c *checker) checkLabels(ctx context.Context) error {
	for _, d := range c.sortedDevices() {
		if d.ns == nil {
			continue
		}
		if err := c.checkFormat(ctx, schema.FormatNamespaces); err != nil {
			return err
		}
		if err := c.call(ctx, d, func(ctx context.Context) error { return c.checkLabel(ctx, d) }); err != nil {
			return err
		}
	}
	return nil
}

// checkFormat sees to it that programs which do not know a format leave the catalog alone: it has what that is for.
func (c *checker) checkFormat(ctx context.Context, needed int) error {
	format := schema.Raised(c.volume.Format, needed)
	if format == c.volume.Format {
		return nil
	}
	p := Problem{Kind: Format, Detail: fmt.Sprintf("%d, want %d", c.volume.Format, format)}
	c.volume.Format = format // told once
	return c.found(ctx, p, func(b *catalog.Batch) error {
		b.Put(schema.KeyVolume, schema.Encode(&c.volume))
		return nil
	})
}

func (c *checker) checkLabel(ctx context.Context, d *device) error {
	label := d.ns.found.Label
	if d.ns.found.Content != extent.Ours || label.Device != d.id {
		return fmt.Errorf("it has %s, the catalog has it as device %v", d.ns.found.What, d.id)
	}
	key := schema.NamespaceKey(d.id)
	old, err := c.cfg.Engine.Get(ctx, key)
	row := label.Namespace()
	switch {
	case errors.Is(err, catalog.ErrNotFound):
		err = c.found(ctx, Problem{Kind: NamespaceRow, Device: d.url}, func(b *catalog.Batch) error {
			old = schema.Encode(&row)
			b.GuardAbsent(key)
			b.Put(key, old)
			return nil
		})
		if err != nil || !c.cfg.Repair {
			return err
		}
	case err != nil:
		return err
	default:
		if err := schema.DecodeRow(key, old, &row); err != nil {
			return err
		}
	}
	d.ns.row = &row
	is := extent.Identity{NGUID: row.NGUID, EUI64: row.EUI64, UUID: row.UUID}
	switch {
	case d.ns.Identity() != is:
		return fmt.Errorf("it is namespace %v, the catalog has %v", d.ns.Identity(), is)
	case d.ns.Block() != row.Block || d.ns.Size() != row.Size:
		return fmt.Errorf("it has %d bytes in blocks of %d, the catalog has %d in blocks of %d: give it the size that it had", d.ns.Size(), d.ns.Block(), row.Size, row.Block)
	}
	if !d.ns.found.Damaged && *label == extent.LabelOf(c.volume.ID, d.id, &row) {
		return nil
	}
	p := Problem{Kind: Label, Device: d.url, Detail: "it is not what the catalog has"}
	if d.ns.found.Damaged {
		p.Detail = "its copies differ, or one cannot be read"
	}
	return c.found(ctx, p, func(b *catalog.Batch) error {
		row.Label = max(row.Label, label.Generation) + 1
		b.GuardEqual(key, old)
		b.Put(key, schema.Encode(&row))
		want := extent.LabelOf(c.volume.ID, d.id, &row)
		raw := extent.AppendLabel(nil, &want)
		return errors.Join(d.ns.WriteAt(ctx, raw, 0), d.ns.WriteAt(ctx, raw, extent.BackupLabel(d.ns.Size())))
	})
}

// checkSpaces looks at the space of every namespace, and at the rows of namespaces that there are not.
func (c *checker) checkSpaces(ctx context.Context) error {
	for _, d := range c.sortedDevices() {
		if d.ns == nil || d.ns.row == nil {
			continue
		}
		if err := c.checkSpace(ctx, d); err != nil {
			return fmt.Errorf("%s: %w", d.url, err)
		}
	}
	for _, prefix := range []byte{schema.PrefixNamespace, schema.PrefixUnits, schema.PrefixExtents, schema.PrefixCondemned, schema.PrefixSpace} {
		if err := c.strayRows(ctx, prefix); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) checkSpace(ctx context.Context, d *device) error {
	space, err := extent.Open(ctx, c.cfg.Engine, d.id)
	if err != nil {
		return err
	}
	stat, err := space.Check(ctx, func(f extent.Finding, fix func(*catalog.Batch) error) error {
		p := Problem{Kind: Kind(f.Kind), Device: d.url, Detail: f.Detail, Lost: f.Lost}
		if f.Number != extent.Nobody {
			p.DataFile = dataFileName(f.Number)
			if claim := d.claims[f.Number]; claim != nil {
				p.Inode = claim.inode
			}
		}
		return c.found(ctx, p, fix)
	})
	if err != nil {
		return err
	}
	c.report.Spaces = append(c.report.Spaces, Space{
		Device: d.url, Total: stat.Total, Used: stat.Total - stat.Free - stat.Condemned, Condemned: stat.Condemned, Free: stat.Free,
	})
	err = space.List(ctx, func(f extent.File) error { return c.checkExtentFile(ctx, d, f) })
	if err := told(err); err != nil {
		return err
	}
	err = space.Condemned(ctx, func(w extent.Waiting) error {
		if w.Number == extent.Nobody {
			return nil
		}
		return c.numberTaken(ctx, d, w.Number)
	})
	if err := told(err); err != nil {
		return err
	}
	for _, number := range slices.Sorted(maps.Keys(d.claims)) {
		if err := c.checkClaim(ctx, d, space, number); err != nil {
			return err
		}
	}
	return nil
}

// told drops the errors of rows that cannot be read: Check has told of all of them.
func told(err error) error {
	if errors.Is(err, catalog.ErrCorrupt) {
		return nil
	}
	return err
}

// checkExtentFile looks at a data file that has extents.
func (c *checker) checkExtentFile(ctx context.Context, d *device, f extent.File) error {
	if d.claims[f.Number] != nil || d.waste[f.Number] {
		return nil
	}
	if err := c.numberTaken(ctx, d, f.Number); err != nil {
		return err
	}
	p := Problem{Kind: OrphanDataFile, Device: d.url, DataFile: dataFileName(f.Number), Detail: fmt.Sprintf("%d bytes of the namespace", f.Bytes)}
	return c.found(ctx, p, func(b *catalog.Batch) error {
		b.Put(schema.GarbageKey(d.id, f.Number), nil)
		return nil
	})
}

// checkClaim looks at a data file that a layout has.
func (c *checker) checkClaim(ctx context.Context, d *device, space *extent.Space, number uint64) error {
	claim := d.claims[number]
	row, old, err := c.layoutOf(ctx, claim.inode)
	if err != nil {
		return err
	}
	file := claim.fileOf(&row, d.id)
	if file == nil {
		return nil
	}
	if !slices.Equal(file.Handle, handleOf(number)) {
		p := Problem{Kind: StaleHandle, Inode: claim.inode, Device: d.url, DataFile: dataFileName(number), Detail: fmt.Sprintf("%x, want %x", file.Handle, number)}
		err := c.found(ctx, p, func(b *catalog.Batch) error {
			file.Handle = handleOf(number)
			putLayout(b, claim.inode, &row, old)
			return nil
		})
		if err != nil {
			return err
		}
	}
	n := c.find(claim.inode)
	if claim.mirror == isCache || file.State != layout.CopyGood || n.state&(unsettled|orphan) != 0 {
		return nil
	}
	end, err := space.Size(ctx, number) // of a block, all of which is valid
	if err := told(err); err != nil {
		return err
	}
	if block := d.ns.row.Block; end-block >= n.size {
		c.beyond[n.id] = max(c.beyond[n.id], end)
	}
	return nil
}

// strayRows looks for rows about devices that are no namespaces.
func (c *checker) strayRows(ctx context.Context, prefix byte) error {
	from, to := schema.Of(prefix)
	for from != nil {
		var key []byte
		for row, err := range c.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{Limit: 1, KeysOnly: true}) {
			if err != nil {
				return err
			}
			key = slices.Clone(row.Key)
		}
		if key == nil {
			return nil
		}
		dev := layout.DeviceID(key[1:17])
		if d := c.devices[dev]; d != nil && d.ns != nil {
			_, from = schema.OfDevice(prefix, dev)
			continue
		}
		from = catalog.After(key)
		p := Problem{Kind: StrayRow, Detail: fmt.Sprintf("%q, of a namespace: no such device is known", key)}
		fix := func(b *catalog.Batch) error {
			b.Delete(key)
			return nil
		}
		if c.unknown[dev] { // and who knows what a file has there
			fix = nil
		}
		if err := c.found(ctx, p, fix); err != nil {
			return err
		}
	}
	return nil
}

// handleOf is the handle of a data file on a namespace.
func handleOf(number uint64) []byte { return binary.BigEndian.AppendUint64(nil, number) }

func dataFileName(number uint64) string {
	dir, name := schema.DataFileName(number)
	return dir + "/" + name
}
