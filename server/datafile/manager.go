package datafile

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

// defaultPolicy fills the fields that a file's own policy leaves open.
var defaultPolicy = layout.Policy{StripeUnit: 1 << 20, StripeCount: 4, Mirrors: 1}

var (
	// ErrNoDevice: no data server can take a new data file now; it is worth asking again later.
	ErrNoDevice = errors.New("no data server can be used now")
	// ErrNoSpace: every data server that can be reached is full. Its errno is ENOSPC.
	ErrNoSpace = fmt.Errorf("every data server is full: %w", syscall.ENOSPC)
	// ErrNoInode: the file was removed meanwhile. Its errno is ESTALE.
	ErrNoInode = fmt.Errorf("the file was removed: %w", syscall.ESTALE)
	// ErrClosed: the Manager is closed.
	ErrClosed = errors.New("datafile: closed")
)

// DefaultPoolSize is how many data files are kept ready on each device.
const DefaultPoolSize = 64

// Config is what a Manager works with.
type Config struct {
	Engine   catalog.Engine // not closed by the Manager
	Volume   [16]byte       // schema.Volume.ID
	Dial     store.Dialer   // nil = store.DialNFS
	Resolve  store.Resolver // nil = store.Resolve
	Log      *slog.Logger   // nil = slog.Default
	PoolSize int            // data files kept ready per device; 0 = DefaultPoolSize

	// Member is this process among several that have a Manager on the catalog at the same time, as in schema.MemberKey; zero = there is no
	// other. Its commits fail once the member row is gone.
	Member [16]byte
	// Alive reports whether nobody can have taken over from this process yet; what is not sent to a data server then is sent later, or never. nil = there is
	// nobody who could.
	Alive func() bool
	// Collects reports whether this process removes what others have left behind on a device. nil = it does.
	Collects func(id layout.DeviceID) bool

	// Secrets are those of the service's host for NVMe subsystems that want authentication; nil = none.
	Secrets *nvmeauth.Secrets

	// Discovery are NVMe discovery controllers that tell the same, host:port, which are followed from the first namespace on, and
	// DiscoveryFile keeps what they told for the next start; see nvmetcp.Initiator.Follow.
	Discovery     []string
	DiscoveryFile string
}

// Validate checks the configuration.
func (c *Config) Validate() error {
	if c.Engine == nil {
		return errors.New("datafile: no catalog")
	}
	if c.Volume == [16]byte{} {
		return errors.New("datafile: no volume id")
	}
	if most := 1 << 12; c.PoolSize < 0 || c.PoolSize > most {
		return fmt.Errorf("datafile: pool of %d data files, want 1 to %d, or 0 for the default", c.PoolSize, most)
	}
	return nil
}

// Manager knows the devices and looks after data files.
type Manager struct {
	cfg   Config
	log   *slog.Logger
	page  int             // garbage rows handled at a time
	ctx   context.Context // ends with Close
	stop  context.CancelFunc
	tasks sync.WaitGroup

	adding sync.Mutex
	files  fileLocks

	copiesKnown atomic.Bool // the catalog has schema.FormatCopies

	mu     sync.Mutex
	closed bool
	nvme   *nvmetcp.Initiator // nil until there is a namespace
	// fenceWait is the constant, but in tests.
	fenceWait time.Duration
	fenced    map[metarpc.SessionID]*fencedSession
	devices   []*device              // in the order of their ids
	dead      map[[16]byte]time.Time // members that are no more, and since when that is known
	changed   chan struct{}          // closed, and replaced, when a pool grows or a device's state changes
	prober    [16]byte               // tells this Manager from others
	epoch     uint64                 // how often it changed which devices are down, and why, or where they are
	news      chan struct{}          // closed, and replaced, when epoch grows
}

// New reads the devices from the catalog and starts looking after them. It does not wait for any data server.
func New(cfg Config) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		cfg.Dial = store.DialNFS
	}
	if cfg.Resolve == nil {
		cfg.Resolve = store.Resolve
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.PoolSize == 0 {
		cfg.PoolSize = DefaultPoolSize
	}
	m := &Manager{
		cfg:       cfg,
		log:       cfg.Log,
		page:      min(512, cfg.Engine.Caps().MaxKeys/2),
		changed:   make(chan struct{}),
		fenceWait: fenceWait,
		fenced:    map[metarpc.SessionID]*fencedSession{},
		dead:      map[[16]byte]time.Time{},
		news:      make(chan struct{}),
	}
	rand.Read(m.prober[:])
	m.ctx, m.stop = context.WithCancel(context.Background())
	rows, err := m.readRows(m.ctx)
	if err != nil {
		m.stop()
		return nil, err
	}
	for _, r := range rows {
		var space *extent.Space
		if r.NQN != "" {
			if m.shared() {
				err = errShared
			} else {
				space, err = extent.Open(m.ctx, cfg.Engine, r.id)
			}
			if err != nil {
				m.stop()
				return nil, fmt.Errorf("read devices: %w", err)
			}
		}
		m.devices = append(m.devices, newDevice(m, r.id, r.Device, space))
	}
	for _, d := range m.devices {
		d.start()
	}
	if m.shared() {
		m.tasks.Go(m.follow) // learns of what other processes do to devices; ends with Close
	}
	return m, nil
}

// Close ends all calls and background work. It does not close the catalog.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return ErrClosed
	}
	m.closed = true
	nvme := m.nvme
	m.mu.Unlock()
	m.stop()
	if nvme != nil { // or what is written there would be waited for
		if err := nvme.Close(); err != nil {
			m.log.Warn("connections to namespaces: close", "error", err)
		}
	}
	m.tasks.Wait()
	return nil
}

// signal wakes everybody who waits for a change; m.mu is held.
func (m *Manager) signal() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// wait waits until changed, which was read under m.mu together with what was found wanting, is closed.
func (m *Manager) wait(ctx context.Context, changed <-chan struct{}) error {
	select {
	case <-changed:
		return nil
	case <-m.ctx.Done():
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// device returns a known device, or one that another process has added.
func (m *Manager) device(id layout.DeviceID) (*device, error) {
	m.mu.Lock()
	d := m.find(id)
	m.mu.Unlock()
	if d == nil && m.shared() {
		var err error
		if d, err = m.learn(id); err != nil {
			return nil, err
		}
	}
	if d == nil {
		return nil, fmt.Errorf("device %v is not known", id)
	}
	return d, nil
}

// find returns a known device or nil; m.mu is held.
func (m *Manager) find(id layout.DeviceID) *device {
	i, ok := slices.BinarySearchFunc(m.devices, id, func(d *device, id layout.DeviceID) int {
		return slices.Compare(d.id[:], id[:])
	})
	if !ok {
		return nil
	}
	return m.devices[i]
}

// all returns the devices known now.
func (m *Manager) all() []*device {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.devices)
}

// AddDevice makes the export at url, nfs://HOST[:PORT]/EXPORT[?mountport=PORT], or the namespace, nvme://HOST[:PORT]/NQN#NSID, a device of the
// volume and waits until it is known whether it works. An export that is one already, which its label tells, keeps its id, and its address is brought up to date; so does one that was
// removed, with numbers that begin where none was ever taken.
// A known address that does not answer gives the device it is known as.
//
// A namespace that is a device already, by its identifiers and its label, gets one more address. One that has anything on it which is not the
// volume's own is only taken with force, and one that a device of the volume is on never.
func (m *Manager) AddDevice(ctx context.Context, url string, force bool) (metarpc.DeviceInfo, error) {
	at, err := parseURL(url)
	if err != nil {
		return metarpc.DeviceInfo{}, err
	}
	m.adding.Lock()
	defer m.adding.Unlock()
	var d *device
	if at.nqn != "" && m.shared() {
		return metarpc.DeviceInfo{}, fmt.Errorf("add %v: %w", at, errShared)
	}
	if at.nqn != "" {
		if d, err = m.addNamespace(ctx, at, force); err != nil {
			return metarpc.DeviceInfo{}, fmt.Errorf("add %v: %w", at, err)
		}
		return m.settledInfo(ctx, d)
	}
	err = findPort(ctx, &at)
	if err == nil {
		d, err = m.add(ctx, at)
	}
	if err != nil {
		return metarpc.DeviceInfo{}, fmt.Errorf("add data server %v: %w", at, explain(err, at.export, os.Geteuid() == 0))
	}
	return m.settledInfo(ctx, d)
}

// settledInfo describes a device when it was looked at.
func (m *Manager) settledInfo(ctx context.Context, d *device) (metarpc.DeviceInfo, error) {
	if err := d.settled(ctx); err != nil {
		return metarpc.DeviceInfo{}, err
	}
	return m.info(ctx, []*device{d})[0], nil
}

// add is AddDevice without the waiting; m.adding is held.
func (m *Manager) add(ctx context.Context, at place) (*device, error) {
	var known *device
	m.mu.Lock()
	for _, d := range m.devices {
		if placeOf(&d.row) == at {
			known = d
		}
	}
	m.mu.Unlock()

	open, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	addrs, err := m.cfg.Resolve(open, at.host, at.port)
	if err != nil {
		if known != nil {
			return known, nil
		}
		return nil, err
	}
	server, err := m.cfg.Dial(at.String(), addrs, at.mountPort)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	st, err := store.Open(open, server, at.export, m.cfg.Volume)
	blank := errors.Is(err, store.ErrNoLabel)
	_, answered := store.Status(err)
	switch {
	case blank && known != nil:
		return nil, fmt.Errorf("it is known as device %v, but the directory of this volume is missing there; is its file system mounted?", known.id)
	case blank:
		id := m.newID(at, st.Root)
		if err := st.Format(open, id); err != nil {
			return nil, err
		}
		if err := st.CheckOwner(open); err != nil {
			return nil, errors.Join(err, st.Unformat(open))
		}
	case err != nil && known != nil && !answered:
		return known, nil
	case err != nil:
		return nil, err
	}

	d, _ := m.device(st.ID)
	m.mu.Lock()
	if known != nil && known != d {
		known.doubt() // another device has its address now
	}
	m.mu.Unlock()
	if d != nil {
		return d, d.move(ctx, at, st.Root)
	}
	row := schema.Device{Host: at.host, Port: at.port, Export: at.export, Root: st.Root, MountPort: at.mountPort}
	if !blank { // it was a device before: its numbers begin behind all that were taken then
		row.Next = uint64(time.Now().Unix()) << 24
	}
	var b catalog.Batch
	b.GuardAbsent(schema.DeviceKey(st.ID))
	b.Put(schema.DeviceKey(st.ID), schema.Encode(&row))
	if err := m.cfg.Engine.Commit(ctx, &b); err != nil {
		return nil, fmt.Errorf("record it: %w", err)
	}
	m.log.Info("data server added", "device", st.ID, "url", at.String())
	return m.introduce(newDevice(m, st.ID, row, nil))
}

// introduce makes a new device known and starts it.
func (m *Manager) introduce(d *device) (*device, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, ErrClosed
	}
	if same := m.find(d.id); same != nil {
		return same, nil
	}
	m.devices = append(m.devices, d)
	slices.SortFunc(m.devices, func(a, b *device) int { return slices.Compare(a.id[:], b.id[:]) })
	d.start()
	return d, nil
}

// Devices returns every device, in the order of ids.
func (m *Manager) Devices(ctx context.Context) []metarpc.DeviceInfo { return m.info(ctx, m.all()) }

func (m *Manager) info(ctx context.Context, devices []*device) []metarpc.DeviceInfo {
	keys := make([][]byte, len(devices))
	for i, d := range devices {
		keys[i] = schema.InUseKey(d.id)
	}
	inUse, err := m.cfg.Engine.GetMany(ctx, keys)
	if err != nil {
		m.log.Warn("numbers of data files cannot be read", "error", err)
		inUse = make([][]byte, len(devices))
	}
	infos := make([]metarpc.DeviceInfo, len(devices))
	defer func() {
		for i := range infos {
			infos[i].Device.Addrs = m.addresses(ctx, infos[i].Device.Addrs)
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, d := range devices {
		infos[i] = d.info()
		counters, err := catalog.DecodeCounters(inUse[i])
		if err != nil {
			m.log.Warn("number of data files", "device", d.id, "error", err)
		}
		infos[i].DataFiles = counters.Field(0)
	}
	return infos
}

// addresses are those of hosts and ports, without what cannot be looked up. A device's own are known once it has been reached.
func (m *Manager) addresses(ctx context.Context, at []string) []string {
	addrs := make([]string, 0, len(at))
	for _, s := range at {
		if _, err := netip.ParseAddrPort(s); err == nil {
			addrs = append(addrs, s)
			continue
		}
		found, err := m.resolvePortals(ctx, []string{s})
		if err != nil {
			m.log.Warn("data server's address cannot be looked up", "host", s, "error", err)
		}
		for _, addr := range found {
			addrs = append(addrs, addr.String())
		}
	}
	return addrs
}

// StatFS returns the space on all data servers in bytes, as last asked. What two exports of one file system share is
// counted once.
func (m *Manager) StatFS() (total, free, avail int64) {
	type fileSystem struct {
		host        string
		fsid, total uint64
	}
	seen := map[fileSystem]bool{}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		s := &d.stat
		if s.Attr.Present {
			fs := fileSystem{d.row.Host, s.Attr.Attr.FSID, s.TotalBytes}
			if seen[fs] {
				continue
			}
			seen[fs] = true
		}
		total = catalog.AddSaturated(total, clip(s.TotalBytes))
		free = catalog.AddSaturated(free, clip(s.FreeBytes))
		avail = catalog.AddSaturated(avail, clip(s.AvailBytes))
	}
	return total, free, avail
}

func clip(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// since is how a point in time is told to people.
func since(t time.Time) string { return t.UTC().Format(time.RFC3339) }
