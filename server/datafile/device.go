package datafile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

const (
	patience  = 10 * time.Second // for calls that somebody waits for, where nothing else is said
	refresh   = 5 * time.Second  // between questions how much space there is
	firstWait = time.Second      // until the next look at a data server that was not met, doubled up to lastWait
	lastWait  = 15 * time.Second

	lookUpPeriod = 30 * time.Second // between look-ups of the host names of a device that can be reached

	probePeriod   = time.Second     // between probes
	probePatience = 2 * time.Second // for the answer to one
	pulsePeriod   = 2 * time.Second // between pulses
	misses        = 2               // so many probes, or pulses, that fail one after the other make a device down

	// justAnswered is how long an answered pulse says that complaints are void. Clients complain later than that of a
	// device that has died.
	justAnswered = 200 * time.Millisecond

	fillTurn      = 50 * time.Millisecond // what a fill has at least while others wait
	fillPatience  = time.Second           // for the calls by which a block is copied
	fillAgain     = 5 * time.Second       // until fills try a device again that failed them; a pulse is sooner
	mostFillAgain = 5 * time.Minute       // fillAgain is doubled up to this
)

// device is one data server, or one namespace, and its pool.
type device struct {
	m    *Manager
	id   layout.DeviceID
	ctx  context.Context // ends with the Manager's, or with errRemoved
	stop context.CancelCauseFunc

	// Each holds a token when its goroutine is to look again.
	recheck, refill, sweep chan struct{}

	rowMu sync.Mutex

	// Of a namespace; otherwise space is nil.
	space    *extent.Space
	changing fileLocks // by the number of a data file that something is done to there

	unwatched chan struct{} // closed when watch has ended
	pulses    sync.WaitGroup
	// Guarded by m.mu.
	row        schema.Device
	condition  condition
	using      context.Context         // ends when the device is up no more; it has ended if it is not
	unuse      context.CancelCauseFunc // ends it
	problem    error                   // why it is down
	since      time.Time               // when the condition began
	moves      uint64                  // how often the address changed
	interrupt  func()                  // ends the look in progress
	server     store.Server
	dialled    place
	tried      []netip.AddrPort // those of server
	renamed    bool             // its host has other ones by now
	shown      place            // where the device has shown itself last
	addrs      []netip.AddrPort // and the addresses it was shown at, which clients are told
	store      dataStore        // nil until the data server has shown that it is the device
	met        time.Time        // when it did
	rsize      uint32
	wsize      uint32
	stat       nfs3.FsstatRes
	asked      time.Time // when stat was asked for; zero: it is to be asked for at once
	missed     int       // probes without an answer, one after the other
	silent     error     // why the latest probe has no answer
	pulse      pulse
	late       bool          // it is up, but has left a call unanswered for lateCopy, and answered no such call nor pulse since
	doubted    time.Time     // when clients complained, or it was found late; zero: it has answered a pulse since
	fillAfter  time.Time     // until then fills do without the device, as they have failed there
	fillWait   time.Duration // how long that was, doubled with each failure; zero: the last fill went well
	refused    error         // why no data file can be made, while that is so
	cached     [2]int64      // bytes of caches begun since stat was asked for, and between the two times before
	loads      map[metarpc.SessionID]clientLoad
	load       float64   // of all clients, as last added up
	mute       bool      // down because it does not answer; else because it takes no writes
	fell       time.Time // since when it is down for that reason
	suspected  time.Time // when a client's complaint had it looked at last
	complaints map[metarpc.SessionID]complaint
	partial    bool // noteComplaints has logged that there are some
	pool       []schema.DataFile
	demand     int                 // the pool is too small for somebody who wants so many at once
	held       map[uint64]struct{} // numbers whose garbage rows are not garbage: being made, in the pool, being assigned
	inherited  uint64              // numbers below it are an earlier Manager's
}

// pulse is what is known of whether a device takes writes; guarded by m.mu.
type pulse struct {
	began    time.Time     // of the one under way; zero: there is none
	worked   time.Time     // when the latest one began that was carried out, or refused by a file system that works
	next     time.Time     // when one is due
	wait     time.Duration // from one that failed to the next
	failed   int           // one after the other
	slow     time.Duration // what the slowest one took, halved with each one that was answered since
	problem  error         // why the latest of them failed
	answered time.Time     // when one was answered
	proved   bool          // one has been answered since the device was down
	readOnly error         // why nothing new can be written, though the file system answers; see unwritable
}

// condition is how a device is.
type condition uint8

const (
	unknown condition = iota // not yet looked at since the start or a change of address
	up
	down
)

func newDevice(m *Manager, id layout.DeviceID, row schema.Device, space *extent.Space) *device {
	ctx, stop := context.WithCancelCause(m.ctx)
	using, unuse := context.WithCancelCause(ctx)
	unuse(errNotMet)
	return &device{
		m:         m,
		id:        id,
		ctx:       ctx,
		stop:      stop,
		recheck:   make(chan struct{}, 1),
		refill:    make(chan struct{}, 1),
		sweep:     make(chan struct{}, 1),
		unwatched: make(chan struct{}),
		row:       row,
		space:     space,
		interrupt: func() {},
		using:     using,
		unuse:     unuse,
		since:     time.Now(),
		loads:     map[metarpc.SessionID]clientLoad{},

		complaints: map[metarpc.SessionID]complaint{},
		held:       map[uint64]struct{}{},
		inherited:  row.Next,
	}
}

// start starts what looks after the device. Each goroutine ends with d.ctx.
func (d *device) start() {
	d.m.tasks.Go(d.watch)      // keeps the connection and knows how the data server is
	d.m.tasks.Go(d.followName) // learns of other addresses of its host
	d.m.tasks.Go(d.fill)       // makes data files
	d.m.tasks.Go(d.collect)    // removes garbage
}

func kick(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pause waits for a token in c, so long at most, or until the device is looked after no more.
func (d *device) pause(c chan struct{}, most time.Duration) {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-d.ctx.Done():
	case <-c:
	case <-t.C:
	}
}

func placeOf(row *schema.Device) place {
	return place{row.Host, row.Port, row.Export, row.MountPort, row.NQN, row.NSID}
}

// watch looks at the data server again and again. It alone makes connections, and closes the last one when it ends.
func (d *device) watch() {
	defer close(d.unwatched)
	defer d.pulses.Wait()
	defer d.disconnect()
	wait := firstWait
	for {
		began := time.Now()
		current, met := d.look()
		switch {
		case d.ctx.Err() != nil:
			return
		case !current:
		case met:
			wait = firstWait
			d.pause(d.recheck, probePeriod-time.Since(began))
		default:
			d.pause(d.recheck, wait)
			wait = min(2*wait, lastWait)
		}
	}
}

// look asks how the data server is and records it. If the address changes meanwhile the outcome is not current. met says
// that the data server has shown that it is the device.
func (d *device) look() (current, met bool) {
	ctx, cancel := context.WithTimeout(d.ctx, patience)
	defer cancel()
	d.m.mu.Lock()
	d.interrupt = cancel
	moves := d.moves
	d.m.mu.Unlock()
	err := d.ask(ctx)
	late := errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, syscall.ECONNREFUSED)
	if late {
		err = fmt.Errorf("no answer: %w", d.m.why(d.url(), err))
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if d.ctx.Err() != nil || moves != d.moves {
		return false, false
	}
	d.silent = err
	switch {
	case err == nil:
		d.missed = 0
	case late && d.condition == up && d.missed+1 < misses:
		d.missed++
		d.silent = nil
	default:
		if _, answered := store.Status(err); !answered {
			d.pulse.next = time.Time{} // when it answers again
		}
	}
	now := time.Now()
	d.judge(now)
	d.noteComplaints(now)
	// A namespace that is down is attached anew each time.
	return true, d.store != nil && (d.space == nil || d.condition == up)
}

// ask asks for an answer, then begins a pulse if it is time for one, and asks now and then how much space there is.
func (d *device) ask(ctx context.Context) error {
	st, err := d.connect(ctx)
	if err != nil {
		return err
	}
	probing, cancel := context.WithTimeout(ctx, probePatience)
	defer cancel()
	if err := st.Null(probing); err != nil {
		return err
	}
	d.m.mu.Lock()
	if d.store == st {
		d.sendPulse(time.Now())
	}
	due := time.Since(d.asked) >= refresh
	d.m.mu.Unlock()
	if !due {
		return nil
	}
	if d.space == nil {
		ctx = probing // a namespace may have to take another path, once keep-alives have found that the first one is dead
	}
	stat, err := st.Stat(ctx)
	if status, _ := store.Status(err); status == nfs3.ErrStale || status == nfs3.ErrBadHandle {
		d.lose(st)
		return fmt.Errorf("the directory of the volume is gone: %w", err)
	}
	if err != nil {
		return err
	}
	d.m.mu.Lock()
	if stat.AvailBytes > d.stat.AvailBytes && d.pulse.readOnly != nil {
		d.pulse.next = time.Time{} // it may have been full
	}
	d.stat, d.asked = stat, time.Now()
	d.addLoads(d.asked)
	d.cached = [2]int64{0, d.cached[0]}
	d.m.mu.Unlock()
	return nil
}

// sendPulse begins a pulse if it is time for one and none is under way. The device has just answered; m.mu is held.
func (d *device) sendPulse(now time.Time) {
	p := &d.pulse
	if !p.began.IsZero() || now.Before(p.next) {
		return
	}
	p.began = now
	st, moves := d.store, d.moves
	d.pulses.Go(func() { // waits as long as it takes, or until the connection is given up
		err := st.Pulse(d.ctx)
		d.m.mu.Lock()
		defer d.m.mu.Unlock()
		d.endPulse(err, moves == d.moves)
	})
}

// endPulse records how a pulse went; m.mu is held. What was learnt at an address that the device no longer has counts
// for nothing.
func (d *device) endPulse(err error, current bool) {
	p, now := &d.pulse, time.Now()
	began, took := p.began, now.Sub(p.began)
	p.next, p.began = p.began.Add(pulsePeriod), time.Time{}
	_, answered := store.Status(err)
	if answered || err == nil {
		d.late, p.answered = false, now
		if !d.doubted.IsZero() {
			d.doubted = time.Time{}
			d.m.signal()
		}
		p.slow = max(min(took, patience), p.slow/2)
	}
	switch {
	case d.ctx.Err() != nil:
		return
	case !current || err != nil && !answered:
		p.next = now
		return
	case err == nil:
		p.wait = 0
	default:
		// A sync that fails makes clients write again what they keep, so there are few of them.
		p.wait = min(max(2*p.wait, pulsePeriod), lastWait)
		p.next = now.Add(p.wait)
	}
	if err == nil || unwritable(err) {
		d.setReadOnly(err)
		p.failed, p.proved, p.worked = 0, true, began
		if d.condition != up {
			kick(d.recheck)
		}
	} else {
		p.failed++
		p.problem = fmt.Errorf("its file system does not take a write: %w", err)
	}
	d.judge(now)
}

// unwritable reports whether a pulse was answered by a file system that works, but takes nothing new.
func unwritable(err error) bool {
	switch status, _ := store.Status(err); status {
	case nfs3.ErrROFS, nfs3.ErrNoSpc, nfs3.ErrDQuot, nfs3.ErrPerm, nfs3.ErrAcces:
		return true
	}
	return false
}

// setReadOnly records why nothing new can be written, and logs a change; m.mu is held.
func (d *device) setReadOnly(err error) {
	was := d.pulse.readOnly
	d.pulse.readOnly = err
	if (err == nil) == (was == nil) {
		return
	}
	log := d.m.log.With("device", d.id, "url", placeOf(&d.row).String())
	if err != nil {
		log.Warn("data server is not writable: it gets no new data files", "error", err)
	} else {
		log.Info("data server is writable again")
	}
	d.asked = time.Time{} // space may have run out
	kick(d.refill)
	kick(d.sweep)
	d.m.signal()
}

// judge decides how the device is; m.mu is held. A device that was down is up again when it answers, and a pulse and the
// question for its space have been answered since.
func (d *device) judge(now time.Time) {
	p := &d.pulse
	most := min(misses*probePatience+2*p.slow, patience)
	if d.space != nil {
		most = patience
	}
	switch {
	case d.silent != nil:
		d.note(d.silent)
	case !p.began.IsZero() && now.Sub(p.began) >= most:
		d.note(errFrozen)
	case p.failed >= misses:
		d.note(p.problem)
	case p.proved && !d.asked.IsZero():
		d.note(nil)
	}
}

// errFrozen: the data server answers, but not to a pulse.
var errFrozen = errors.New("its file system, or disk, does not answer")

// connect returns the store, after making sure that it is the one at the device's address.
func (d *device) connect(ctx context.Context) (dataStore, error) {
	if d.space != nil {
		return d.attach(ctx)
	}
	d.m.mu.Lock()
	at, dialled, server, st, tried, silent := placeOf(&d.row), d.dialled, d.server, d.store, d.tried, d.silent
	moves := d.moves
	if st != nil && at == dialled && silent == nil && !d.renamed {
		d.m.mu.Unlock()
		return st, nil
	}
	d.renamed = false
	d.m.mu.Unlock()

	// A host that cannot be reached may have got another address.
	now, err := d.m.cfg.Resolve(ctx, at.host, at.port)
	if err != nil {
		return nil, err
	}
	if server == nil || at != dialled || !sameAddrs(now, tried) {
		d.disconnect()
		if server, err = d.m.cfg.Dial(at.String(), now, at.mountPort); err != nil {
			return nil, err
		}
		d.m.mu.Lock()
		d.server, d.dialled, d.tried = server, at, now
		d.m.mu.Unlock()
		st, tried = nil, now
	}
	if st != nil {
		return st, nil
	}
	export, err := store.Open(ctx, server, at.export, d.m.cfg.Volume)
	if err != nil {
		return nil, err
	}
	if export.ID != d.id {
		return nil, fmt.Errorf("the data server there is device %v", export.ID)
	}
	st = export
	rsize, wsize, err := st.Info(ctx)
	if err != nil {
		return nil, err
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if moves != d.moves {
		return nil, errMoved
	}
	d.store, d.met, d.rsize, d.wsize = st, time.Now(), rsize, wsize
	d.asked = time.Time{}
	d.show(at, tried)
	return st, nil
}

// show notes by which addresses the device is reached, and has clients told if they may know others; m.mu is held.
func (d *device) show(at place, addrs []netip.AddrPort) {
	first, same := d.addrs == nil, sameAddrs(addrs, d.addrs)
	d.shown, d.addrs = at, addrs
	if same || first && !named(&d.row) {
		return
	}
	if !first {
		d.m.log.Info("data server has other addresses", "device", d.id, "url", at.String(), "addresses", addrs)
	}
	d.m.changeStates()
}

// named reports whether a device is known by the name of a host: then its addresses may change by themselves.
func named(row *schema.Device) bool {
	return slices.ContainsFunc(portals(row), func(at string) bool {
		_, err := netip.ParseAddrPort(at)
		return err != nil
	})
}

// sameAddrs reports whether both have the same addresses, in any order.
func sameAddrs(a, b []netip.AddrPort) bool {
	in := func(list []netip.AddrPort) func(netip.AddrPort) bool {
		return func(addr netip.AddrPort) bool { return !slices.Contains(list, addr) }
	}
	return !slices.ContainsFunc(a, in(b)) && !slices.ContainsFunc(b, in(a))
}

// followName looks up again and again what addresses the device's hosts have, as long as it can be reached; connect
// does otherwise. It ends with d.ctx.
func (d *device) followName() {
	for {
		d.pause(nil, lookUpPeriod)
		if d.ctx.Err() != nil {
			return
		}
		ctx, cancel := context.WithTimeout(d.ctx, patience)
		d.lookUp(ctx)
		cancel()
	}
}

// lookUp has other addresses used that the device's hosts have by now. If none is as before, that is only done once a
// data server has shown there that it is the device: a name may be changed before the data server moves.
func (d *device) lookUp(ctx context.Context) {
	d.m.mu.Lock()
	row, addrs, reached, moves := d.row, d.addrs, d.store != nil, d.moves
	d.m.mu.Unlock()
	if !reached || !named(&row) {
		return
	}
	at := placeOf(&row)
	now, err := d.m.resolvePortals(ctx, portals(&row))
	if err != nil || sameAddrs(now, addrs) {
		return
	}
	if d.space == nil && !slices.ContainsFunc(now, func(addr netip.AddrPort) bool { return slices.Contains(addrs, addr) }) {
		if err := d.isAt(ctx, at, now); err != nil {
			d.m.log.Warn("data server's host has another address, where it is not reached: the old one is used further",
				"device", d.id, "url", at.String(), "addresses", now, "error", err)
			return
		}
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	switch {
	case moves != d.moves:
	case d.space != nil: // its initiator looks names up by itself
		d.show(at, now)
	default:
		d.renamed = true
		kick(d.recheck)
	}
}

// isAt reports, as an error, what is wrong with addresses that are said to be the device's.
func (d *device) isAt(ctx context.Context, at place, addrs []netip.AddrPort) error {
	server, err := d.m.cfg.Dial(at.String(), addrs, at.mountPort)
	if err != nil {
		return err
	}
	defer server.Close()
	st, err := store.Open(ctx, server, at.export, d.m.cfg.Volume)
	if err == nil && st.ID != d.id {
		err = fmt.Errorf("the data server there is device %v", st.ID)
	}
	return err
}

// errNotMet: the device was not looked at yet.
var errNotMet = errors.New("not yet reached")

// errMoved: what was learnt is about an address that the device no longer has, or that it was doubted since.
var errMoved = errors.New("looked at while it moved")

// disconnect ends the calls in progress and forgets the connection.
func (d *device) disconnect() {
	d.m.mu.Lock()
	server := d.server
	d.server, d.store = nil, nil
	d.m.mu.Unlock()
	if server == nil {
		return
	}
	if err := server.Close(); err != nil {
		d.m.log.Warn("data server: close", "device", d.id, "error", err)
	}
}

// lose forgets st, so that the next look opens it anew.
func (d *device) lose(st dataStore) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if d.store == st {
		d.store = nil
	}
}

// note records how a look went and logs a change; m.mu is held.
func (d *device) note(err error) {
	next := up
	if err != nil {
		next = down
	}
	before := d.condition
	d.problem = err
	mute := next == down && d.silent != nil
	changed := (before == down) != (next == down) || mute != d.mute
	if changed {
		d.mute, d.fell = mute, time.Now()
	}
	if before == next {
		if changed {
			d.m.changeStates()
		}
		return
	}
	d.late, d.doubted = false, time.Time{}
	if next == down {
		d.pulse.proved = false
		d.unuse(err)
	} else {
		d.using, d.unuse = context.WithCancelCause(d.ctx)
	}
	log := d.m.log.With("device", d.id, "url", placeOf(&d.row).String())
	switch {
	case next == down:
		log.Warn("data server cannot be used", "error", err)
	case before == down:
		log.Info("data server can be used again", "after", time.Since(d.since).Round(time.Millisecond))
	default:
		log.Info("data server can be used")
	}
	d.condition, d.since = next, time.Now()
	if changed {
		d.m.changeStates()
	}
	kick(d.refill)
	kick(d.sweep)
	d.m.signal()
}

// settled waits until the device was looked at.
func (d *device) settled(ctx context.Context) error {
	for {
		d.m.mu.Lock()
		condition, changed := d.condition, d.m.changed
		d.m.mu.Unlock()
		if condition != unknown {
			return nil
		}
		if err := d.m.wait(ctx, changed); err != nil {
			return err
		}
	}
}

// ready waits for the data server to be met and returns its store.
func (d *device) ready(ctx context.Context) (dataStore, error) {
	for {
		d.m.mu.Lock()
		st, changed, problem := d.store, d.m.changed, d.problem
		d.m.mu.Unlock()
		if errors.Is(context.Cause(d.ctx), errRemoved) {
			return nil, errRemoved
		}
		if st != nil {
			return st, nil
		}
		if err := d.m.wait(ctx, changed); err != nil {
			return nil, errors.Join(err, problem)
		}
	}
}

// do calls f until the data server answers, with success or an error, or ctx ends.
func (d *device) do(ctx context.Context, f func(dataStore) error) error {
	wait := 100 * time.Millisecond
	for {
		st, err := d.ready(ctx)
		if err == nil && d.m.cfg.Alive != nil && !d.m.cfg.Alive() {
			err = errSilent
		}
		if err == nil {
			err = f(st)
			if err == nil {
				return nil
			}
		}
		if _, answered := store.Status(err); answered || errors.Is(err, store.ErrTaken) || ctx.Err() != nil || d.ctx.Err() != nil {
			return fmt.Errorf("data server %v: %w", d.url(), err)
		}
		// The connection was given up under the call, by a change of address for example.
		kick(d.recheck)
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-d.ctx.Done():
		case <-t.C:
		}
		t.Stop()
		wait = min(2*wait, lastWait)
	}
}

func (d *device) url() place {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	return placeOf(&d.row)
}

// rewrite commits a batch with what change makes of the Device row and adds to the batch; it may be called several
// times, also after it was committed, of which nobody was told. rewrite takes the lock of the row.
func (d *device) rewrite(ctx context.Context, change func(*catalog.Batch, *schema.Device)) error {
	d.rowMu.Lock()
	defer d.rowMu.Unlock()
	key := schema.DeviceKey(d.id)
	for {
		old, err := d.m.cfg.Engine.Get(ctx, key)
		if err != nil {
			return fmt.Errorf("device %v: %w", d.id, err)
		}
		var row schema.Device
		if err := schema.Decode(old, &row); err != nil {
			return fmt.Errorf("device %v: %w", d.id, err)
		}
		var b catalog.Batch
		change(&b, &row)
		b.GuardEqual(key, old)
		b.Put(key, schema.Encode(&row))
		err = d.m.cfg.Engine.Commit(ctx, &b)
		if guard := (*catalog.GuardError)(nil); errors.As(err, &guard) || errors.Is(err, catalog.ErrConflict) || errors.Is(err, catalog.ErrUnknown) {
			continue
		}
		if err != nil {
			return fmt.Errorf("device %v: %w", d.id, err)
		}
		d.m.mu.Lock()
		d.row = row
		d.m.mu.Unlock()
		return nil
	}
}

// move records that the device is at another place.
func (d *device) move(ctx context.Context, at place, root []byte) error {
	from := d.url()
	if from != at {
		err := d.rewrite(ctx, func(_ *catalog.Batch, row *schema.Device) {
			row.Host, row.Port, row.Export, row.Root, row.MountPort = at.host, at.port, at.export, root, at.mountPort
		})
		if err != nil {
			return fmt.Errorf("record its new address: %w", err)
		}
		d.m.log.Info("data server has another address", "device", d.id, "url", at.String(), "was", from.String())
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if from != at || d.condition == down {
		d.doubt()
	}
	return nil
}

// doubt makes the data server show again that it is the device; m.mu is held.
func (d *device) doubt() {
	d.unuse(errMoved)
	if d.condition == down {
		d.m.changeStates()
	}
	d.store, d.condition, d.since = nil, unknown, time.Now()
	d.missed, d.mute, d.silent, d.late, d.doubted, d.pulse = 0, false, nil, false, time.Time{}, pulse{began: d.pulse.began}
	d.moves++
	d.interrupt()
	kick(d.recheck)
	d.m.signal()
}

// room is how much a device can take; a greater one is preferred.
type room uint8

const (
	none   room = iota
	little      // under a hundredth of its space is left
	plenty
)

// complain has a pulse sent at once, since a client has said that the device does not answer, or a call was left there.
// Until that is answered fills do not use the device, which is up. A complaint by a fill itself, after failFill, says
// nothing new. m.mu is held.
func (d *device) complain(now time.Time) {
	if d.condition != up || !d.doubted.IsZero() || now.Sub(d.pulse.answered) < justAnswered || now.Before(d.fillAfter) {
		return
	}
	d.doubted = now
	if d.pulse.wait == 0 {
		d.pulse.next = time.Time{}
	}
	kick(d.recheck)
}

// fit reports whether fills may use the device now: it is up, nothing of the last probe and pulse says otherwise, no
// client has complained since, and no fill has failed there just before; m.mu is held.
func (d *device) fit(now time.Time) bool {
	p := &d.pulse
	return d.condition == up && d.doubted.IsZero() && d.missed == 0 && p.failed == 0 && (p.began.IsZero() || now.Sub(p.began) < fillPatience) &&
		!now.Before(d.fillAfter)
}

// failFill has fills do without the device for a while, each time longer. Those that fail together count once.
func (d *device) failFill(err error) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	now := time.Now()
	if now.Before(d.fillAfter) {
		return
	}
	d.fillWait = min(max(2*d.fillWait, fillAgain), mostFillAgain)
	d.fillAfter = now.Add(d.fillWait)
	d.m.log.Warn("copies are not made with this data server for a while",
		"device", d.id, "url", placeOf(&d.row).String(), "for", d.fillWait, "error", err)
}

// whileUp returns a context that ends with ctx, and when the device is up no more.
func (d *device) whileUp(ctx context.Context) (context.Context, func()) {
	d.m.mu.Lock()
	using := d.using
	d.m.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(using, func() { cancel(context.Cause(using)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// leastRoom is so few bytes that less counts as none: the pulse file takes and gives back half of that.
const leastRoom = 128 << 10

// room says whether new data files may go to the device, which is up; m.mu is held.
func (d *device) room() room {
	s := &d.stat
	switch {
	case d.refusal() != nil,
		s.TotalBytes > 0 && s.AvailBytes < leastRoom,
		s.TotalFiles > 0 && s.AvailFiles == 0:
		return none
	case s.AvailBytes < s.TotalBytes/100:
		return little
	}
	return plenty
}

// refusal is why no data file can be made, if the data server has said so; m.mu is held.
func (d *device) refusal() error { return cmp.Or(d.pulse.readOnly, d.refused) }

// info describes the device without DataFiles; m.mu is held.
func (d *device) info() metarpc.DeviceInfo {
	at := placeOf(&d.row)
	addrs := portals(&d.row)
	if d.shown == at && len(d.addrs) > 0 {
		addrs = addrs[:0]
		for _, addr := range d.addrs {
			addrs = append(addrs, addr.String())
		}
	}
	info := metarpc.DeviceInfo{
		Device:    metarpc.Device{ID: d.id, Addrs: addrs, RSize: d.rsize, WSize: d.wsize},
		URL:       at.String(),
		Reachable: d.condition == up,
		Total:     clip(d.stat.TotalBytes),
		Free:      clip(d.stat.FreeBytes),
	}
	if d.space != nil {
		is := d.space.Namespace()
		info.Device.Namespace = []metarpc.Namespace{{
			NQN: at.nqn, NSID: at.nsid, NGUID: is.NGUID, EUI64: is.EUI64, UUID: is.UUID, Block: is.Block, Reserved: d.row.Reserved,
		}}
		info.Device.RSize, info.Device.WSize = 0, 0
		info.Fencing = "keep-alive"
		if d.row.Reserved {
			info.Fencing = "reservations"
		}
	}
	info.Draining = d.row.Draining
	info.Complaints = uint32(d.countComplaints(time.Now()))
	info.Load = int64(min(1000*d.load, 1e15))
	switch {
	case d.condition == unknown:
		info.Problem = "not yet reached, since " + since(d.since)
	case d.condition == down:
		info.Problem = fmt.Sprintf("%v, since %s", d.problem, since(d.since))
	case d.pulse.readOnly != nil:
		info.Problem = fmt.Sprintf("not writable: %v", d.pulse.readOnly)
	case d.refused != nil:
		info.Problem = fmt.Sprintf("no data file can be made: %v", d.refused)
	case d.room() == none:
		info.Problem = "full"
	}
	return info
}

// full reports whether it is space that the device lacks, which is up; m.mu is held.
func (d *device) full() bool {
	if d.refusal() == nil {
		return d.room() == none
	}
	status, _ := store.Status(d.refusal())
	return status == nfs3.ErrNoSpc || status == nfs3.ErrDQuot
}
