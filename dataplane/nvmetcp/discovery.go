package nvmetcp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// maxRecords bounds a discovery log, in records.
	maxRecords = 1 << 14
	// maxSources bounds the discovery controllers that referrals lead to.
	maxSources = 64
	// discoveryKATO is the keep-alive time-out of a discovery connection that stays.
	discoveryKATO = 30 * time.Second
	// movingPause is how long a log that changes while it is read is left alone.
	movingPause = 20 * time.Millisecond
)

// Portal is an address at which a subsystem is reached.
type Portal struct {
	NQN  string // of the subsystem
	Addr string // host:port
	From string // the discovery controller that told of it, host:port
}

// Directory is what discovery has found.
type Directory struct {
	Portals []Portal // by NQN and address, none twice
	Skipped []string // what it told of and why that is not used; by text
}

// Addrs are the addresses of a subsystem.
func (d *Directory) Addrs(nqn string) (addrs []string) {
	for _, p := range d.Portals {
		if p.NQN == nqn {
			addrs = append(addrs, p.Addr)
		}
	}
	return addrs
}

// Subsystems are the names of those that were found.
func (d *Directory) Subsystems() (nqns []string) {
	for _, p := range d.Portals {
		nqns = append(nqns, p.NQN)
	}
	return slices.Compact(nqns)
}

// Missing is the error of a subsystem that was not found.
func (d *Directory) Missing(nqn, hostNQN string, asked []string) error {
	there := "none"
	if nqns := d.Subsystems(); len(nqns) > 0 {
		there = strings.Join(nqns, ", ")
	}
	s := fmt.Sprintf("nvmetcp: discovery at %s tells host %s of no subsystem %s, but of: %s: check the name, and that the target allows this host",
		strings.Join(asked, ", "), hostNQN, nqn, there)
	for _, why := range d.Skipped {
		if strings.Contains(why, nqn) {
			s += "; not used: " + why
		}
	}
	return errors.New(s)
}

// directoryHead begins an encoded Directory; the CRC-32C of the rest follows in hex.
const directoryHead = "weft discovery 1 "

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Encode makes bytes to be kept until the next start.
func (d *Directory) Encode() []byte {
	body, err := json.Marshal(d)
	if err != nil {
		panic(err) // strings
	}
	return append(fmt.Appendf(nil, "%s%08x\n", directoryHead, crc32.Checksum(body, castagnoli)), body...)
}

// DecodeDirectory is the inverse of Encode. It fails for bytes that are damaged or of another version.
func DecodeDirectory(b []byte) (*Directory, error) {
	rest, ok := bytes.CutPrefix(b, []byte(directoryHead))
	if !ok {
		return nil, errors.New("nvmetcp: kept discovery result: of another version, or none")
	}
	sum, body, _ := bytes.Cut(rest, []byte("\n"))
	if want := fmt.Sprintf("%08x", crc32.Checksum(body, castagnoli)); string(sum) != want {
		return nil, fmt.Errorf("nvmetcp: kept discovery result: checksum is %s, says %.8s", want, sum)
	}
	d := new(Directory)
	if err := json.Unmarshal(body, d); err != nil {
		return nil, fmt.Errorf("nvmetcp: kept discovery result: %w", err)
	}
	return d, nil
}

// DiscoveryConfig says whom to ask.
type DiscoveryConfig struct {
	// Controller is what the Config of each connection is made of: all but Addr, Discovery, OnState and OnEvent. SubsysNQN is
	// usually "", for [wire.DiscoveryNQN]; referrals have their own.
	Controller Config
	// Addrs are discovery controllers that tell the same, as host:port. A host begins with the one that a hash of both names
	// chooses, so that many hosts spread over them, and goes on with the others when that fails.
	Addrs []string
	// Known is what is believed until it was asked for, or nil.
	Known *Directory
	// OnChange is told what was found, each time that it is something else, one after the other. It must not call Close. Not used by Discover.
	OnChange func(*Directory)
}

func (c *DiscoveryConfig) validate() error {
	if len(c.Addrs) == 0 {
		return errors.New("nvmetcp: discovery: no address of a discovery controller")
	}
	for _, addr := range c.Addrs {
		cfg := c.config(target{addr, c.Controller.SubsysNQN})
		if err := cfg.Validate(); err != nil {
			return err
		}
	}
	if c.Controller.Log == nil {
		c.Controller.Log = slog.Default()
	}
	orDefault(&c.Controller.ReconnectDelay, DefaultReconnectDelay)
	return nil
}

// target is a discovery controller.
type target struct{ addr, nqn string }

func (c *DiscoveryConfig) config(at target) Config {
	cfg := c.Controller
	cfg.Addr, cfg.SubsysNQN, cfg.Discovery = at.addr, at.nqn, true
	if cfg.SubsysNQN == "" {
		cfg.SubsysNQN = wire.DiscoveryNQN
	}
	return cfg
}

// rank puts the addresses in the order in which this host asks them: by a hash of its name and the address. An address that comes or goes
// changes nothing for the hosts that do not begin with it.
func rank(hostNQN string, addrs []string) []string {
	weight := func(addr string) []byte {
		sum := sha256.Sum256([]byte(hostNQN + "\x00" + addr))
		return sum[:]
	}
	ranked := slices.Clone(addrs)
	slices.SortFunc(ranked, func(a, b string) int { return bytes.Compare(weight(a), weight(b)) })
	return slices.Compact(ranked)
}

// logReader is what is needed of a Controller.
type logReader interface {
	GetLogPage(context.Context, wire.GetLogPage, []byte) error
	Close() error
}

type dialer func(context.Context, Config) (logReader, error)

func connectLog(ctx context.Context, cfg Config) (logReader, error) { return Connect(ctx, cfg) }

// Discover asks once: the first discovery controller that answers, and those that it refers to. A referral that does not answer is told in Skipped.
func Discover(ctx context.Context, cfg DiscoveryConfig) (*Directory, error) {
	return discover(ctx, cfg, connectLog)
}

func discover(ctx context.Context, cfg DiscoveryConfig, dial dialer) (*Directory, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg.Controller.KATO = 0
	ask := func(at target) (record, error) {
		c, err := dial(ctx, cfg.config(at))
		if err != nil {
			return record{}, err
		}
		defer c.Close()
		return readRecord(ctx, c, at)
	}
	var errs []error
	for _, addr := range rank(cfg.Controller.HostNQN, cfg.Addrs) {
		root := target{addr, cfg.config(target{addr, cfg.Controller.SubsysNQN}).SubsysNQN}
		r, err := ask(root)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		records := []record{r}
		visited := map[string]bool{addr: true}
		for next := r.referrals; len(next) > 0; {
			at := next[0]
			next = next[1:]
			if visited[at.addr] || len(visited) == maxSources {
				continue
			}
			visited[at.addr] = true
			r, err := ask(at)
			if err != nil {
				if ctx.Err() != nil {
					return nil, err
				}
				r.skipped = []string{fmt.Sprintf("referral to %s: %v", at.addr, err)}
			}
			records = append(records, r)
			next = append(next, r.referrals...)
		}
		return merge(records), nil
	}
	return nil, errors.Join(errs...)
}

// record is what one discovery controller tells.
type record struct {
	portals    []Portal
	referrals  []target
	skipped    []string
	generation *uint64 // GENCTR; nil: it was not read
}

// merge makes a Directory.
func merge(records []record) *Directory {
	d := new(Directory)
	for _, r := range records {
		d.Portals = append(d.Portals, r.portals...)
		d.Skipped = append(d.Skipped, r.skipped...)
	}
	slices.SortStableFunc(d.Portals, func(a, b Portal) int {
		if c := strings.Compare(a.NQN, b.NQN); c != 0 {
			return c
		}
		return strings.Compare(a.Addr, b.Addr)
	})
	d.Portals = slices.CompactFunc(d.Portals, func(a, b Portal) bool { return a.NQN == b.NQN && a.Addr == b.Addr })
	slices.Sort(d.Skipped)
	d.Skipped = slices.Compact(d.Skipped)
	return d
}

// readRecord reads the log of one discovery controller, again if it changes meanwhile.
func readRecord(ctx context.Context, c logReader, at target) (record, error) {
	fail := func(err error) (record, error) {
		return record{}, fmt.Errorf("nvmetcp: discovery log of %s (%s): %w", at.addr, at.nqn, err)
	}
	for range maxRestarts {
		r, whole, err := readRecordOnce(ctx, c, at)
		if err != nil {
			return fail(err)
		}
		if whole {
			return r, nil
		}
		select {
		case <-time.After(movingPause):
		case <-ctx.Done():
			return fail(ctx.Err())
		}
	}
	return fail(errMoves)
}

func readRecordOnce(ctx context.Context, c logReader, at target) (r record, whole bool, err error) {
	head := func(retain bool) (h wire.DiscoveryHeader, err error) {
		b := make([]byte, wire.DiscoveryHeaderSize)
		if err = c.GetLogPage(ctx, wire.GetLogPage{ID: wire.LogDiscovery, RAE: retain}, b); err == nil {
			err = h.Decode(b)
		}
		return h, err
	}
	before, err := head(true)
	if err != nil {
		return r, false, err
	}
	if before.Records > maxRecords {
		return r, false, fmt.Errorf("it has %d records, which are more than the %d that are read: is this a discovery controller? Let it tell this host less", before.Records, maxRecords)
	}
	r.generation = &before.Generation
	for i, left := uint64(0), before.Records; left > 0; {
		n := min(left, logChunk/wire.DiscoveryEntrySize)
		b := make([]byte, n*wire.DiscoveryEntrySize)
		get := wire.GetLogPage{ID: wire.LogDiscovery, RAE: true, Offset: wire.DiscoveryHeaderSize + i*wire.DiscoveryEntrySize}
		if err := c.GetLogPage(ctx, get, b); err != nil {
			return r, false, err
		}
		for ; len(b) > 0; b = b[wire.DiscoveryEntrySize:] {
			r.add(b, at)
		}
		i, left = i+n, left-n
	}
	after, err := head(false) // which arms the event
	return r, after == before, err
}

// add takes one entry of a log in.
func (r *record) add(b []byte, at target) {
	var e wire.DiscoveryEntry
	err := e.Decode(b)
	addr := ""
	if err == nil {
		addr, err = entryAddr(&e)
	}
	if err != nil {
		r.skipped = append(r.skipped, fmt.Sprintf("%s tells of %.80q at %.80q: %v", at.addr, e.SubsysNQN, e.Address, err))
		return
	}
	switch {
	case e.Subtype == wire.SubtypeNVM:
		r.portals = append(r.portals, Portal{NQN: e.SubsysNQN, Addr: addr, From: at.addr})
	case e.Subtype == wire.SubtypeReferral, e.Subtype == wire.SubtypeDiscovery && e.EFlags&wire.EFlagsDuplicate == 0:
		r.referrals = append(r.referrals, target{addr, e.SubsysNQN})
	case e.Subtype != wire.SubtypeDiscovery:
		r.skipped = append(r.skipped, fmt.Sprintf("%s tells of %q at %s: subtype %d is not known", at.addr, e.SubsysNQN, addr, e.Subtype))
	}
}

// entryAddr is the address that an entry tells, if it can be used.
func entryAddr(e *wire.DiscoveryEntry) (string, error) {
	if e.Transport != wire.TransportTCP {
		return "", fmt.Errorf("transport %d is not TCP", e.Transport)
	}
	if e.TREQ&wire.TREQSecureMask == wire.TREQSecure {
		return "", errors.New("it requires a secure channel (TLS), which weft does not have: allow connections without")
	}
	ip, err := netip.ParseAddr(e.Address)
	if err != nil || e.Family != wire.FamilyIPv4 && e.Family != wire.FamilyIPv6 || ip.IsUnspecified() {
		return "", fmt.Errorf("address family %d, address %q: not one to connect to", e.Family, e.Address)
	}
	port, err := strconv.ParseUint(e.Service, 10, 16)
	if err != nil || port == 0 {
		return "", fmt.Errorf("port %q is not a number", e.Service)
	}
	return net.JoinHostPort(ip.String(), strconv.Itoa(int(port))), nil
}

// Discovery stays connected to discovery controllers and follows what they tell.
type Discovery struct {
	cfg    DiscoveryConfig
	dial   dialer
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	turn sync.Mutex // held while OnChange runs; above mu

	mu      sync.Mutex
	root    *source
	sources map[string]*source // those that are referred to, by address
	now     *Directory
	checked bool          // now was asked for, not only remembered
	changed chan struct{} // closed and made anew with each change
}

// source is one connection to a discovery controller.
type source struct {
	d      *Discovery
	at     []target // the one to be connected to, or for the root those to choose from
	cancel context.CancelFunc
	kick   chan struct{} // capacity 1: the log is to be read, or the connection is lost

	// Guarded by Discovery.mu.
	record
	addr    string // connected to, or last; "": never
	up      bool
	settled bool // it was asked, whether it has answered or not
	err     error
}

// Follow asks the discovery controllers and those that they refer to, and stays connected to them. It returns when they have answered,
// or at once if something is Known, which is then told and verified later. It gives up with the errors of all of cfg.Addrs.
func Follow(ctx context.Context, cfg DiscoveryConfig) (*Discovery, error) {
	return follow(ctx, cfg, connectLog)
}

func follow(ctx context.Context, cfg DiscoveryConfig, dial dialer) (*Discovery, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	orDefault(&cfg.Controller.KATO, discoveryKATO)
	d := &Discovery{cfg: cfg, dial: dial, sources: map[string]*source{}, changed: make(chan struct{})}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	var roots []target
	for _, addr := range rank(cfg.Controller.HostNQN, cfg.Addrs) {
		roots = append(roots, target{addr, cfg.config(target{addr, cfg.Controller.SubsysNQN}).SubsysNQN})
	}
	if cfg.Known != nil {
		d.now = cfg.Known
		d.tell(cfg.Known)
	}
	d.mu.Lock()
	d.root = d.begin(roots)
	d.mu.Unlock()
	for cfg.Known == nil {
		d.mu.Lock()
		now, err, changed := d.now, d.root.err, d.changed
		d.mu.Unlock()
		if now != nil {
			break
		}
		if err == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				err = fmt.Errorf("nvmetcp: discovery at %s: %w", strings.Join(cfg.Addrs, ", "), ctx.Err())
			}
		}
		d.Close()
		return nil, err
	}
	return d, nil
}

// Now is what is known at this moment, and whether that was asked for since the start.
func (d *Discovery) Now() (dir *Directory, checked bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.now, d.checked
}

// Close ends the connections.
func (d *Discovery) Close() error {
	d.cancel()
	d.wg.Wait()
	return nil
}

func (d *Discovery) tell(dir *Directory) {
	if d.cfg.OnChange != nil {
		d.turn.Lock()
		defer d.turn.Unlock()
		d.cfg.OnChange(dir)
	}
}

// begin starts a source. What is known from it counts until it has answered. mu is held.
func (d *Discovery) begin(at []target) *source {
	s := &source{d: d, at: at, kick: make(chan struct{}, 1)}
	if d.cfg.Known != nil {
		for _, p := range d.cfg.Known.Portals {
			if slices.ContainsFunc(at, func(at target) bool { return at.addr == p.From }) {
				s.portals = append(s.portals, p)
			}
		}
	}
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(d.ctx)
	d.wg.Add(1)
	// This goroutine owns the connection; it ends when nothing refers to it any more, or with the Discovery.
	go s.run(ctx)
	return s
}

// run keeps a connection. When it is lost the next of those to choose from is tried at once, and when all have failed again after a while.
func (s *source) run(ctx context.Context) {
	defer s.d.wg.Done()
	var errs []error
	delay := firstDelay
	for i := 0; ; i = (i + 1) % len(s.at) {
		served, err := s.serve(ctx, s.at[i])
		if served {
			errs, delay = nil, firstDelay
		}
		if errs = append(errs, err); len(errs) < len(s.at) && ctx.Err() == nil {
			continue
		}
		s.d.update(s, func() {
			s.settled, s.up, s.err = true, false, errors.Join(errs...)
		})
		errs = nil
		select {
		case <-ctx.Done():
			return
		case <-time.After(jitter(delay)):
		}
		delay = min(2*delay, s.d.cfg.Controller.ReconnectDelay)
	}
}

// serve connects, and reads the log whenever it has changed, until the connection is lost. served tells whether it was read.
func (s *source) serve(ctx context.Context, at target) (served bool, err error) {
	var dirty, down atomic.Bool
	poke := func(flag *atomic.Bool) {
		flag.Store(true)
		select {
		case s.kick <- struct{}{}:
		default:
		}
	}
	cfg := s.d.cfg.config(at)
	cfg.OnState = func(state State) {
		if state != StateLive {
			poke(&down)
		}
	}
	cfg.OnEvent = func(e wire.AsyncEvent) {
		if e.Is(wire.EventDiscoveryChanged) {
			poke(&dirty)
		}
	}
	c, err := s.d.dial(ctx, cfg)
	if err != nil {
		return false, err
	}
	defer c.Close()
	for dirty.Store(true); !down.Load(); {
		if dirty.Swap(false) {
			r, err := readRecord(ctx, c, at)
			if err != nil {
				return served, err
			}
			served = true
			s.d.update(s, func() {
				s.record, s.addr, s.up, s.settled, s.err = r, at.addr, true, true, nil
			})
		}
		select {
		case <-ctx.Done():
			return served, ctx.Err()
		case <-s.kick:
		}
	}
	return served, fmt.Errorf("nvmetcp: discovery at %s (%s): connection lost", at.addr, at.nqn)
}

// update changes a source and tells what has become of the whole.
func (d *Discovery) update(s *source, change func()) {
	d.turn.Lock()
	defer d.turn.Unlock()
	d.mu.Lock()
	if d.ctx.Err() != nil || s != d.root && d.sources[s.at[0].addr] != s {
		d.mu.Unlock()
		return // nobody wants to know any more
	}
	was := s.err
	change()
	if s.err != nil && was == nil {
		d.cfg.Controller.Log.Warn("NVMe discovery does not answer, keeping what it told", "error", s.err)
	}
	settled := d.reach()
	var dir *Directory
	if settled && d.root.read() {
		records := []record{d.root.record}
		for _, s := range d.sources {
			r := s.record
			if s.err != nil {
				r.skipped = append(slices.Clone(r.skipped), fmt.Sprintf("referral to %s: %v", s.at[0].addr, s.err))
			}
			records = append(records, r)
		}
		now := merge(records)
		if d.now == nil || !slices.Equal(now.Portals, d.now.Portals) || !slices.Equal(now.Skipped, d.now.Skipped) {
			dir, d.now = now, now
		}
		d.checked = true
	}
	close(d.changed)
	d.changed = make(chan struct{})
	d.mu.Unlock()
	if dir != nil && d.cfg.OnChange != nil {
		d.cfg.OnChange(dir)
	}
}

// read reports whether the source has ever answered. Discovery.mu is held.
func (s *source) read() bool { return s.generation != nil }

// reach begins the sources that are referred to and ends those that are not any more. It reports whether all were asked. mu is held.
func (d *Discovery) reach() (settled bool) {
	settled = d.root.settled
	wanted := map[string]bool{}
	wanted[d.root.addr] = true
	for next := slices.Clone(d.root.referrals); len(next) > 0; {
		at := next[0]
		next = next[1:]
		if wanted[at.addr] || len(wanted) >= maxSources {
			continue
		}
		wanted[at.addr] = true
		s := d.sources[at.addr]
		if s == nil {
			s = d.begin([]target{at})
			d.sources[at.addr] = s
		}
		settled = settled && s.settled
		next = append(next, s.referrals...)
	}
	for addr, s := range d.sources {
		if !wanted[addr] || addr == d.root.addr {
			s.cancel()
			delete(d.sources, addr)
		}
	}
	return settled
}

// DiscoveryStats is what is known of a connection to a discovery controller.
type DiscoveryStats struct {
	Addr       string // connected to, or to be tried
	Connected  bool
	Err        error  // why it is not
	Generation uint64 // GENCTR of the log
	Portals    int    // that it tells of
}

// Stats returns a snapshot, the one of DiscoveryConfig.Addrs that was chosen first.
func (d *Discovery) Stats() []DiscoveryStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	of := func(s *source) DiscoveryStats {
		st := DiscoveryStats{Addr: s.addr, Connected: s.up, Err: s.err, Portals: len(s.portals)}
		if s.generation != nil {
			st.Generation = *s.generation
		}
		if st.Addr == "" {
			st.Addr = s.at[0].addr
		}
		return st
	}
	list := []DiscoveryStats{of(d.root)}
	for _, addr := range slices.Sorted(maps.Keys(d.sources)) {
		list = append(list, of(d.sources[addr]))
	}
	return list
}
