package datafile

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// followPeriod is how often the rows of devices are looked at for what other processes have done to them.
const followPeriod = time.Second

var (
	errShared = errors.New("NVMe namespaces are only for volumes with one shard: what fences a client from them is its one session")
	errSilent = errors.New("this metadata service is not sure that others have not taken over from it")
)

// shared reports whether other processes may have Managers on the catalog.
func (m *Manager) shared() bool { return m.cfg.Member != [16]byte{} }

// mark is what garbage rows have that are this Manager's to deal with: data files that it has in its pool, or is to remove.
func (m *Manager) mark() []byte {
	if !m.shared() {
		return nil
	}
	return m.cfg.Member[:]
}

// newID returns the id of a new device. Several processes that are told of an empty export at the same time find the same, so that it has one label.
func (m *Manager) newID(at place, root []byte) (id layout.DeviceID) {
	if !m.shared() {
		rand.Read(id[:])
		return id
	}
	h := sha256.New()
	fmt.Fprintf(h, "%x %q %x", m.cfg.Volume, at.String(), root)
	return layout.DeviceID(h.Sum(nil))
}

// deviceRow is a row that was read.
type deviceRow struct {
	id layout.DeviceID
	schema.Device
}

// readRows reads the rows of all devices.
func (m *Manager) readRows(ctx context.Context) (rows []deviceRow, err error) {
	from, to := schema.Of(schema.PrefixDevice)
	for kv, err := range m.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("read devices: %w", err)
		}
		var row deviceRow
		if err := schema.Decode(kv.Value, &row.Device); err != nil || len(kv.Key) != 1+len(row.id) {
			return nil, fmt.Errorf("device row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
		}
		row.id = layout.DeviceID(kv.Key[1:])
		rows = append(rows, row)
	}
	return rows, nil
}

// follow learns what other processes do to devices.
func (m *Manager) follow() {
	t := time.NewTicker(followPeriod)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-m.ctx.Done():
			return
		}
		if err := m.LearnDevices(m.ctx); err != nil && m.ctx.Err() == nil {
			m.log.Warn("what others do to data servers is not known", "error", err)
		}
	}
}

// LearnDevices learns what other processes have done to devices before it is called: Devices tells of that then, and of every device that a
// layout has which one of them has given to a client. It happens by itself every followPeriod.
func (m *Manager) LearnDevices(ctx context.Context) error {
	if !m.shared() {
		return nil
	}
	rows, err := m.readRows(ctx)
	if err != nil {
		return err
	}
	there := map[layout.DeviceID]schema.Device{}
	for _, r := range rows {
		there[r.id] = r.Device
		if _, err := m.device(r.id); err != nil {
			return err
		}
	}
	for _, d := range m.all() {
		d.m.mu.Lock()
		same := slices.Equal(schema.Encode(&d.row), schema.Encode(new(there[d.id])))
		d.m.mu.Unlock()
		if same {
			continue
		}
		if err := d.learn(ctx); err != nil {
			return err
		}
	}
	return nil
}

// learn takes in what the row of a device says that another process may have changed, or deleted.
func (d *device) learn(ctx context.Context) error {
	d.rowMu.Lock()
	defer d.rowMu.Unlock()
	raw, err := d.m.cfg.Engine.Get(ctx, schema.DeviceKey(d.id))
	gone := errors.Is(err, catalog.ErrNotFound)
	var row schema.Device
	if err == nil {
		err = schema.Decode(raw, &row)
	}
	if err != nil && !gone {
		return fmt.Errorf("device %v: %w", d.id, err)
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if gone {
		if d.m.find(d.id) == d {
			d.m.log.Info("data server was removed", "device", d.id, "url", placeOf(&d.row).String())
			d.m.forgetDevice(d)
		}
		return nil
	}
	was := d.row
	d.row = row
	if placeOf(&was) != placeOf(&row) {
		d.m.log.Info("data server has another address", "device", d.id, "url", placeOf(&row).String(), "was", placeOf(&was).String())
		d.doubt()
	}
	if was.Draining != row.Draining {
		d.restock()
	}
	return nil
}

// forgetDevice ends what looks after a device that is no more; m.mu is held.
func (m *Manager) forgetDevice(d *device) {
	m.devices = slices.DeleteFunc(m.devices, func(other *device) bool { return other == d })
	d.stop(errRemoved)
	if d.condition == down {
		m.changeStates()
	}
	m.signal()
}

// learn makes a device known that another process has added; nil if there is none.
func (m *Manager) learn(id layout.DeviceID) (*device, error) {
	var row schema.Device
	raw, err := schema.ReadRow(m.ctx, m.cfg.Engine, schema.DeviceKey(id), &row)
	if err == nil && raw == nil {
		return nil, nil
	}
	if err == nil && row.NQN != "" {
		err = errShared
	}
	if err != nil {
		return nil, fmt.Errorf("device %v: %w", id, err)
	}
	m.log.Info("another metadata service has added a data server", "device", id, "url", placeOf(&row).String())
	return m.introduce(newDevice(m, id, row, nil))
}

// meet makes the devices of a layout known, which another process may have given it.
func (m *Manager) meet(row *schema.Layout) {
	if !m.shared() {
		return
	}
	row.Has(func(file *schema.DataFile) bool {
		if !file.IsAbsent() {
			if _, err := m.device(file.Device); err != nil {
				m.log.Warn("a layout has a data file on a device that cannot be found", "device", file.Device, "error", err)
			}
		}
		return false
	})
	for i := range row.Caches {
		m.device(row.Caches[i].File.Device) // readers can do without
	}
}

// bury finds out which of these members are no more. Their garbage rows that are read from then on say what is garbage for good, as nobody else changes them
// but by deleting. It reports whether there are new ones.
func (m *Manager) bury(ctx context.Context, owners map[[16]byte]struct{}) (died bool, err error) {
	var ids [][16]byte
	var keys [][]byte
	m.mu.Lock()
	for id := range owners {
		if _, dead := m.dead[id]; !dead {
			ids = append(ids, id)
			keys = append(keys, schema.MemberKey(id))
		}
	}
	m.mu.Unlock()
	if len(keys) == 0 {
		return false, nil
	}
	rows, err := m.cfg.Engine.GetMany(ctx, keys)
	if err != nil {
		return false, fmt.Errorf("whose garbage it is: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, row := range rows {
		if row == nil {
			m.dead[ids[i]] = time.Now()
			died = true
		}
	}
	return died, nil
}
