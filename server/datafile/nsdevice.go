package datafile

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/wire/nfs3"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/schema"
)

// allGenerations is for Space.Release.
const allGenerations = math.MaxUint64

// manyUnits is how many allocation units a namespace has at most, as long as these can be larger.
const manyUnits = 1 << 22

// unitFor is the allocation unit of a namespace of size bytes.
func unitFor(size int64) int64 {
	unit := int64(extent.MinUnit)
	for unit < extent.MaxUnit && size/unit > manyUnits {
		unit *= 2
	}
	return unit
}

// hostKey is the reservation key of the service of a volume.
func hostKey(volume [16]byte) uint64 {
	return max(1, binary.BigEndian.Uint64(volume[8:])^binary.BigEndian.Uint64(volume[:8]))
}

// hostNQN is the name of the service of a volume as an NVMe host.
func hostNQN(volume [16]byte) string {
	return fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%x-%x-%x-%x-%x", volume[:4], volume[4:6], volume[6:8], volume[8:10], volume[10:])
}

// initiator returns the Manager's Initiator, which it makes for the first namespace.
func (m *Manager) initiator() (*nvmetcp.Initiator, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, ErrClosed
	}
	if m.nvme == nil {
		i, err := newInitiator(m.cfg.Volume, m.cfg.Secrets, m.log)
		if err != nil {
			return nil, err
		}
		if len(m.cfg.Discovery) > 0 {
			if err := i.Follow(m.cfg.Discovery, m.cfg.DiscoveryFile); err != nil {
				i.Close()
				return nil, err
			}
		}
		m.nvme = i
	}
	return m.nvme, nil
}

// newInitiator makes the Initiator of a volume's service.
func newInitiator(volume [16]byte, secrets *nvmeauth.Secrets, log *slog.Logger) (*nvmetcp.Initiator, error) {
	return nvmetcp.NewInitiator(nvmetcp.InitiatorConfig{
		HostNQN: hostNQN(volume), HostID: wire.HostID(volume), Key: func() uint64 { return hostKey(volume) },
		Secrets: secrets, Log: log,
	})
}

// identityOf is how a namespace is recognised.
func identityOf(id nvmetcp.ID) extent.Identity {
	return extent.Identity{NGUID: id.NGUID, EUI64: id.EUI64, UUID: id.UUID}
}

// sizeOf is the size of a namespace in bytes.
func sizeOf(ns *nvmetcp.Namespace) int64 {
	return int64(min(ns.Blocks(), math.MaxInt64/uint64(ns.Format().BlockSize))) * int64(ns.Format().BlockSize)
}

// probe reads what tells whose a namespace is.
func (m *Manager) probe(ctx context.Context, ns *nvmetcp.Namespace) (extent.Found, error) {
	size := sizeOf(ns)
	head, tail := make([]byte, min(size, extent.ProbeHead)), make([]byte, min(size, extent.ProbeTail))
	if err := transfer(ctx, ns, wire.OpRead, 0, head); err != nil {
		return extent.Found{}, fmt.Errorf("read its beginning: %w", err)
	}
	if err := transfer(ctx, ns, wire.OpRead, size-int64(len(tail)), tail); err != nil {
		return extent.Found{}, fmt.Errorf("read its end: %w", err)
	}
	return extent.Probe(head, tail, size, m.cfg.Volume), nil
}

// writeLabel writes both copies of a label.
func writeLabel(ctx context.Context, ns *nvmetcp.Namespace, label []byte) error {
	for _, at := range []int64{extent.BackupLabel(sizeOf(ns)), 0} {
		if err := transfer(ctx, ns, wire.OpWrite, at, label); err != nil {
			return fmt.Errorf("write the label: %w", err)
		}
	}
	return nil
}

// portals are the addresses at which a namespace may be reached, as HOST:PORT.
func portals(row *schema.Device) []string {
	return append([]string{placeOf(row).hostPort()}, row.Portals...)
}

// why adds to an error of a namespace that did not answer in time what was wrong with its controllers.
func (m *Manager) why(at place, err error) error {
	m.mu.Lock()
	nvme := m.nvme
	m.mu.Unlock()
	if nvme == nil || !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	for _, s := range nvme.Stats() {
		for _, ns := range s.Namespaces {
			if s.NQN != at.nqn || ns.NSID != at.nsid {
				continue
			}
			if ns.Trouble != nil {
				err = fmt.Errorf("%w: %w", err, ns.Trouble)
			}
			for _, p := range ns.Paths {
				if p.Why != "" {
					err = fmt.Errorf("%w: %s: %s", err, p.Addr, p.Why)
				}
			}
		}
	}
	return err
}

// differs says in what a namespace is not the one that a row tells of; "" if it is.
func differs(ns *nvmetcp.Namespace, row *schema.Namespace) string {
	was := extent.Identity{NGUID: row.NGUID, EUI64: row.EUI64, UUID: row.UUID}
	is, block := identityOf(ns.ID()), int64(ns.Format().BlockSize)
	switch {
	case is != was:
		return fmt.Sprintf("it is another namespace, %v in place of %v", is, was)
	case block != row.Block:
		return fmt.Sprintf("its blocks have %d bytes, and had %d when it was added: was it formatted?", block, row.Block)
	case sizeOf(ns) != row.Size:
		return fmt.Sprintf("it has %d bytes, and had %d when it was added: give it the size that it had", sizeOf(ns), row.Size)
	}
	return ""
}

// attach returns the store, after making sure that the namespace at the device's addresses is the device. What of its label is damaged it mends.
func (d *device) attach(ctx context.Context) (dataStore, error) {
	d.m.mu.Lock()
	row, st, condition, moves := d.row, d.store, d.condition, d.moves
	d.m.mu.Unlock()
	if st != nil && condition == up {
		return st, nil
	}
	nvme, err := d.m.initiator()
	if err != nil {
		return nil, err
	}
	ns, err := nvme.Open(ctx, portals(&row), row.NQN, row.NSID) // which is quick if that was done before
	if err != nil {
		return nil, err
	}
	is := d.space.Namespace()
	if why := differs(ns, &is); why != "" {
		return nil, errors.New(why)
	}
	found, err := d.m.probe(ctx, ns)
	if err != nil {
		return nil, err
	}
	label := extent.LabelOf(d.m.cfg.Volume, d.id, &is)
	switch {
	case found.Content != extent.Ours:
		return nil, fmt.Errorf("its label is gone: there is %s", found.What)
	case *found.Label != label:
		return nil, fmt.Errorf("its label is that of device %v, generation %d", found.Label.Device, found.Label.Generation)
	}
	if err := d.reserve(ctx, ns); err != nil {
		return nil, err
	}
	if found.Damaged {
		if err := writeLabel(ctx, ns, extent.AppendLabel(nil, &label)); err != nil {
			return nil, err
		}
		d.m.log.Warn("one copy of a namespace's label was damaged and is written anew", "device", d.id, "url", placeOf(&row).String())
	}
	if reserved := ns.Format().Reservable; reserved != row.Reserved {
		err := d.rewrite(ctx, func(_ *catalog.Batch, row *schema.Device) { row.Reserved = reserved })
		if err != nil {
			return nil, err
		}
	}
	addrs, err := d.m.resolvePortals(ctx, portals(&row))
	if err != nil {
		d.m.log.Warn("a namespace is not used at all of its addresses", "device", d.id, "url", placeOf(&row).String(), "error", err)
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if moves != d.moves {
		return nil, errMoved
	}
	d.met, d.asked = time.Now(), time.Time{}
	d.store = &namespaceStore{d: d, space: d.space, ns: ns, met: d.met}
	d.rsize, d.wsize = fillBlock, fillBlock
	d.show(placeOf(&row), addrs)
	return d.store, nil
}

// reserve sees to it that only who is registered reads or writes the namespace, if its controller takes reservations.
func (d *device) reserve(ctx context.Context, ns *nvmetcp.Namespace) error {
	if !ns.Format().Reservable {
		return nil
	}
	if err := ns.Reserve(ctx, hostKey(d.m.cfg.Volume)); err != nil {
		return fmt.Errorf("reserve it for this volume: %w", err)
	}
	return nil
}

// reserved makes sure that the reservation is still the service's: somebody may have cleared it, or the controller forgotten it.
func (d *device) reserved(ctx context.Context, ns *nvmetcp.Namespace) error {
	if !ns.Format().Reservable {
		return nil
	}
	r, err := ns.Reservation(ctx)
	if err != nil {
		return fmt.Errorf("ask who has reserved it: %w", err)
	}
	if r.Holder == wire.HostID(d.m.cfg.Volume) && r.Kind == wire.ReserveExclusiveAccessRegisters {
		return nil
	}
	d.m.log.Warn("the reservation of a namespace was lost and is taken again", "device", d.id, "url", d.url().String())
	return d.reserve(ctx, ns)
}

// checkNamespace makes sure that a namespace that was attached is still the device.
func (d *device) checkNamespace(ctx context.Context, ns *nvmetcp.Namespace) error {
	is := d.space.Namespace()
	if why := differs(ns, &is); why != "" {
		return fmt.Errorf("%s: %w", why, nfs3.ErrStale)
	}
	if err := d.reserved(ctx, ns); err != nil {
		return err
	}
	b := make([]byte, extent.LabelSize)
	if err := transfer(ctx, ns, wire.OpRead, 0, b); err != nil {
		return err
	}
	label := extent.LabelOf(d.m.cfg.Volume, d.id, &is)
	found, err := extent.ParseLabel(b)
	if err == nil && *found != label {
		err = fmt.Errorf("it is that of device %v", found.Device)
	}
	if err != nil {
		return fmt.Errorf("the label has changed: %w: %w", err, nfs3.ErrStale)
	}
	return nil
}

// addNamespace is add for a namespace; m.adding is held.
func (m *Manager) addNamespace(ctx context.Context, at place, force bool) (*device, error) {
	known := m.namespaceAt(at)
	open, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	nvme, err := m.initiator()
	if err != nil {
		return nil, err
	}
	ns, err := nvme.Open(open, []string{at.hostPort()}, at.nqn, at.nsid)
	if err != nil {
		if known != nil {
			return known, nil
		}
		return nil, err
	}
	id, size := identityOf(ns.ID()), sizeOf(ns)
	if ns.WriteProtected() {
		return nil, errors.New("the namespace is read-only")
	}
	row, err := extent.NewNamespace(id, int64(ns.Format().BlockSize), size, unitFor(size))
	if err != nil {
		return nil, err
	}
	if ns.Format().Reservable {
		now, err := ns.Reservation(open)
		if err != nil {
			return nil, fmt.Errorf("ask who has reserved it: %w", err)
		}
		if now.Kind != wire.ReserveNone && now.Holder != wire.HostID(m.cfg.Volume) {
			return nil, fmt.Errorf("the host %v has reserved it (%v), which may be the service of another volume: remove it there first", now.Holder, now.Kind)
		}
	}
	found, err := m.probe(open, ns)
	if err != nil {
		return nil, err
	}
	if d := m.namespaceLike(id); d != nil {
		return d, m.addPortal(ctx, d, at, ns, &found)
	}
	if known != nil {
		return nil, fmt.Errorf("it is known as device %v, but there is another namespace now, %v with %s: remove that device first (weft admin device remove --lost)", known.id, id, found.What)
	}
	switch {
	case found.Content == extent.Ours && m.knows(found.Label.Device):
		return nil, fmt.Errorf("the namespace %v has the label of device %v of this volume, which is %v: if it is a copy of that, clear its first and last MiB before it is added, "+
			"which --force does not do, since it may also be the same under another identifier", id, found.Label.Device, found.Label.Identity)
	case found.Content == extent.Blank, force:
	case found.Content == extent.Ours: // it was a device of this volume, which nothing leads to any more
	default:
		return nil, fmt.Errorf("there is %s on the namespace %v; --force destroys it", found.What, id)
	}
	if found.Label != nil {
		row.Label = found.Label.Generation + 1
	}
	return m.newNamespace(ctx, open, at, ns, row)
}

// namespaceAt finds the device that is known to be at a place.
func (m *Manager) namespaceAt(at place) *device {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		if d.row.NQN == at.nqn && d.row.NSID == at.nsid && slices.Contains(portals(&d.row), at.hostPort()) {
			return d
		}
	}
	return nil
}

// namespaceLike finds the device that has one of the identifiers of a namespace.
func (m *Manager) namespaceLike(id extent.Identity) *device {
	for _, d := range m.all() {
		if d.space == nil {
			continue
		}
		is := d.space.Namespace()
		if is.NGUID != [16]byte{} && is.NGUID == id.NGUID || is.EUI64 != [8]byte{} && is.EUI64 == id.EUI64 || is.UUID != [16]byte{} && is.UUID == id.UUID {
			return d
		}
	}
	return nil
}

func (m *Manager) knows(id layout.DeviceID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.find(id) != nil
}

// addPortal records that a namespace that is a device is reached at another place, too, or elsewhere if it cannot be reached where it was.
func (m *Manager) addPortal(ctx context.Context, d *device, at place, ns *nvmetcp.Namespace, found *extent.Found) error {
	is := d.space.Namespace()
	why := differs(ns, &is)
	if why == "" && (found.Content != extent.Ours || found.Label.Device != d.id) {
		why = "its label is gone: there is " + found.What
	}
	if why != "" {
		return fmt.Errorf("it is device %v of this volume, but %s; data of files is on it, so it is not made a new device, even with --force", d.id, why)
	}
	m.mu.Lock()
	row, condition := d.row, d.condition
	m.mu.Unlock()
	elsewhere := row.NQN != at.nqn || row.NSID != at.nsid
	switch {
	case elsewhere && condition == up:
		return fmt.Errorf("it has the identifier %v of device %v, which is %v and can be reached: two namespaces must not have one identifier", identityOf(ns.ID()), d.id, placeOf(&row))
	case !elsewhere && slices.Contains(portals(&row), at.hostPort()):
		m.mu.Lock()
		defer m.mu.Unlock()
		if d.condition == down {
			d.doubt()
		}
		return nil
	case !elsewhere && len(row.Portals)+1 >= layout.MaxAddresses:
		return fmt.Errorf("it is device %v, which has %d addresses already, as many as there may be", d.id, len(row.Portals)+1)
	}
	err := d.rewrite(ctx, func(_ *catalog.Batch, row *schema.Device) {
		if elsewhere {
			row.Host, row.Port, row.NQN, row.NSID, row.Portals = at.host, at.port, at.nqn, at.nsid, nil
		} else if !slices.Contains(row.Portals, at.hostPort()) {
			row.Portals = append(slices.Clone(row.Portals), at.hostPort())
		}
	})
	if err != nil {
		return fmt.Errorf("record its new address: %w", err)
	}
	m.log.Info("namespace has another address", "device", d.id, "url", at.String())
	m.mu.Lock()
	defer m.mu.Unlock()
	d.doubt()
	return nil
}

// newNamespace makes a namespace a device: it writes the label, and then the rows.
func (m *Manager) newNamespace(ctx, open context.Context, at place, ns *nvmetcp.Namespace, row schema.Namespace) (*device, error) {
	var id layout.DeviceID
	rand.Read(id[:])
	label := extent.LabelOf(m.cfg.Volume, id, &row)
	// Nothing else is to be found there by anybody any more.
	size := sizeOf(ns)
	for _, edge := range []layout.Range{{Off: size - min(size, extent.ProbeTail), Len: min(size, extent.ProbeTail)}, {Len: min(size, extent.ProbeHead)}} {
		if err := transfer(open, ns, wire.OpWrite, edge.Off, make([]byte, edge.Len)); err != nil {
			return nil, fmt.Errorf("clear it: %w", err)
		}
	}
	if err := writeLabel(open, ns, extent.AppendLabel(nil, &label)); err != nil {
		return nil, err
	}
	dev := schema.Device{Host: at.host, Port: at.port, NQN: at.nqn, NSID: at.nsid, Reserved: ns.Format().Reservable}
	var b catalog.Batch
	b.GuardAbsent(schema.DeviceKey(id))
	b.Put(schema.DeviceKey(id), schema.Encode(&dev))
	err := extent.Add(ctx, m.cfg.Engine, &b, id, row)
	if err == nil {
		err = m.cfg.Engine.Commit(ctx, &b)
	}
	var space *extent.Space
	if err == nil {
		space, err = extent.Open(ctx, m.cfg.Engine, id)
	}
	if err != nil {
		return nil, fmt.Errorf("record it: %w", err)
	}
	m.log.Info("namespace added", "device", id, "url", at.String(), "namespace", identityOf(ns.ID()).String(), "bytes", row.Size, "unit", row.Unit)
	return m.introduce(newDevice(m, id, dev, space))
}

// wipe makes a namespace that is no device any more blank, if it answers; m.adding is held.
func (m *Manager) wipe(ctx context.Context, d *device, st dataStore) {
	s, ok := st.(*namespaceStore)
	if !ok {
		return
	}
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-d.unwatched: // or it would be reserved again, or a pulse written later
	case <-asking.Done():
	}
	blank := make([]byte, extent.LabelSize)
	err := asking.Err()
	if err == nil {
		err = transfer(asking, s.ns, wire.OpRead, 0, make([]byte, extent.LabelSize))
	}
	if err == nil { // it is waited for: it must not be done when the namespace is a device again
		err = writeLabel(ctx, s.ns, blank)
	}
	if err == nil {
		err = s.ns.Clear(ctx)
	}
	if err != nil {
		m.log.Warn("a namespace that was removed from the volume still has its label, or its reservation", "device", d.id, "url", d.url().String(), "error", err)
	}
}

// resolvePortals is the addresses behind HOST:PORTs. The error says which cannot be resolved; those of the others are
// returned as well.
func (m *Manager) resolvePortals(ctx context.Context, hosts []string) (addrs []netip.AddrPort, err error) {
	for _, hostPort := range hosts {
		host, service, bad := net.SplitHostPort(hostPort)
		port, badPort := strconv.ParseUint(service, 10, 16)
		if bad = errors.Join(bad, badPort); bad != nil {
			err = errors.Join(err, bad)
			continue
		}
		list, failed := m.cfg.Resolve(ctx, host, uint16(port))
		err = errors.Join(err, failed)
		for _, addr := range list {
			if !slices.Contains(addrs, addr) && len(addrs) < layout.MaxAddresses {
				addrs = append(addrs, addr)
			}
		}
	}
	return addrs, err
}

// releaseCondemned frees what earlier Managers have taken from data files and not freed. All of it was taken when nobody had a layout of it any more (see the
// package comment), so that no session has to be waited for, only that what they sent to deallocate it is done.
func (d *device) releaseCondemned(ctx context.Context) error {
	var numbers []uint64
	err := d.space.Condemned(ctx, func(w extent.Waiting) error {
		numbers = append(numbers, w.Number)
		return nil
	})
	for _, number := range numbers {
		unlock, e := d.changing.lock(ctx, layout.FileID(number)) // or it could be free while it is being deallocated
		if e == nil {
			e = d.space.Release(ctx, number, allGenerations)
			unlock()
		}
		err = errors.Join(err, e)
	}
	return err
}
