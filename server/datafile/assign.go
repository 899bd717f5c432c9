package datafile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/schema"
)

// Assign returns a layout row of file id with data files for the n bytes at off, and records that session may write
// them (the writer row), and there whether it is awaited. ino is the file's inode as the caller read it; its policy
// counts. If the rows in the catalog do already, nothing is committed. What a file has is not exchanged, but for
// stale copies, so the layout of a concurrent Assign, and any that was handed out, stays valid until the file is
// fenced.
//
// If there are devices for some copies only, but for at least as many as the policy wants, new columns get these. The
// others are absent, and the file gets a fill row. A device counts that is up and has room, also while its pool is
// empty. The catalog has schema.FormatCopies first; as long as there are services that do not know this, that is an
// error.
//
// Copies on devices that are down become stale with the same commit, each if drop agrees and its column has a good copy
// on a device that is up. drop may be called several times; nil agrees to none.
//
// Errors that callers can tell apart: ErrNoDevice, ErrNoSpace, ErrNoInode, extent.ErrTooFar (EFBIG), those of the catalog. If ctx ends the rows may
// still change, see AwaitKnown.
func (m *Manager) Assign(ctx context.Context, id layout.FileID, ino schema.Inode, off, n int64, session metarpc.SessionID, appends bool, near []layout.DeviceID, drop func(metarpc.CopyRef) bool) (schema.Layout, error) {
	unlock, err := m.files.lock(ctx, id)
	if err != nil {
		return schema.Layout{}, err
	}
	defer unlock()
	policy := ino.Policy.Layout().Or(defaultPolicy)
	end := layout.Range{Off: off, Len: max(n, 1)}.End()
	for {
		row, done, err := m.assign(ctx, id, policy, off, end, session, appends, near, drop)
		if err != nil {
			return schema.Layout{}, fmt.Errorf("data files for inode %d: %w", id, err)
		}
		if done {
			return row, nil
		}
	}
}

// assign is one attempt of Assign; done is false if the rows changed under it.
func (m *Manager) assign(ctx context.Context, id layout.FileID, policy layout.Policy, off, end int64, session metarpc.SessionID, appends bool, near []layout.DeviceID, drop func(metarpc.CopyRef) bool) (row schema.Layout, done bool, err error) {
	layoutKey, writerKey := schema.LayoutKey(id), schema.WriterKey(id, session)
	values, err := m.cfg.Engine.GetMany(ctx, [][]byte{layoutKey, writerKey})
	if err != nil {
		return row, false, err
	}
	old, writer := values[0], values[1] != nil
	var said schema.Writer
	if err := schema.Decode(values[1], &said); err != nil {
		return row, false, fmt.Errorf("writer row: %w", err)
	}
	if old != nil {
		if err := schema.Decode(old, &row); err != nil {
			return row, false, fmt.Errorf("layout row: %w", err)
		}
	} else {
		m.mu.Lock()
		row = m.blank(policy)
		m.mu.Unlock()
	}
	dropped, newFill, err := m.dropDown(ctx, id, &row, drop)
	if err != nil {
		return row, false, err
	}
	var taken []schema.DataFile
	was := row.Incomplete()
	covered := covers(&row, end)
	switch {
	case covered && writer && !dropped && (said.Awaited || !appends) && !m.OnNamespaces(row):
		return row, true, nil
	case !covered && row.Moving:
		return row, false, fmt.Errorf("%w: the file is being moved", ErrNoDevice)
	case !covered:
		if row, taken, err = m.extend(ctx, id, row, policy, end > row.StripeUnit, near); err != nil {
			return row, false, err
		}
		if err := m.allowFewCopies(ctx, &row); err != nil {
			m.putBack(taken)
			return row, false, err
		}
		if !was && row.Incomplete() {
			newFill = true
		}
	}

	says := schema.Writer{Awaited: said.Awaited || appends || m.OnNamespaces(row)}
	requests, err := m.lacking(ctx, &row, off, end-off)
	if err != nil {
		m.putBack(taken)
		return row, false, err
	}
	if covered && writer && !dropped && says == said && len(requests) == 0 {
		return row, true, nil
	}
	inode, firstTaken := 0, 0
	var last *catalog.Batch
	add := func(b *catalog.Batch) {
		last = b
		b.Grows = len(taken) > 0 || len(requests) > 0
		inode = b.GuardPresent(schema.InodeKey(id))
		b.GuardRow(layoutKey, old)
		b.Put(layoutKey, schema.Encode(&row))
		if newFill {
			b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{}))
		}
		if !writer || says != said {
			b.Put(writerKey, schema.Encode(&says))
		}
		firstTaken = own(b, taken)
	}
	if len(requests) > 0 {
		err = m.allocate(ctx, requests, len(row.Mirrors), add)
	} else {
		var b catalog.Batch
		add(&b)
		err = m.cfg.Engine.Commit(ctx, &b)
	}
	if errors.Is(err, catalog.ErrUnknown) {
		if err = m.findOut(ctx, id, last); err == nil {
			m.release(taken)
		} else {
			m.sortOut(id, taken)
		}
	} else {
		m.settle(taken, firstTaken, err)
	}
	var guard *catalog.GuardError
	switch {
	case err == nil:
		return row, true, nil
	case errors.As(err, &guard):
		if guard.Index == inode {
			return row, false, ErrNoInode
		}
		return row, false, nil
	case errors.Is(err, catalog.ErrConflict):
		return row, false, nil
	case errors.Is(err, extent.ErrNoSpace):
		again := m.becameFull(ctx, taken) // and others may not be
		if !again {
			var stale error
			if again, stale = m.giveUpFilling(ctx, id); stale != nil {
				return row, false, stale
			}
		}
		if again {
			return row, false, nil
		}
		return row, false, fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return row, false, err
}

// AssignNew adds to the batch that makes file id, whose inode is ino, what gives it the data files for its first stripe unit and makes session a
// writer, and returns the layout row. It waits for nothing: ok is false, and the batch as it came, if there are not the data files
// ready, they would need space on namespaces, or the catalog is not known to have the format for the row. Otherwise
// settle must be called once, when it is known how the batch's commit ended. It gets nil or the error of the commit, or
// any other error if there was no commit.
func (m *Manager) AssignNew(b *catalog.Batch, id layout.FileID, ino schema.Inode, session metarpc.SessionID, near []layout.DeviceID) (row schema.Layout, settle func(error), ok bool) {
	policy := ino.Policy.Layout().Or(defaultPolicy)
	m.mu.Lock()
	row = m.blank(policy)
	plan, err := m.plan(id, &row, policy, false, near)
	if err != nil || plan.onNamespaces() || !plan.stocked() || plan.fewCopies(&row) && !m.copiesKnown.Load() {
		m.mu.Unlock()
		return row, nil, false
	}
	row, taken := plan.take(row)
	m.mu.Unlock()
	b.GuardAbsent(schema.LayoutKey(id))
	b.Put(schema.LayoutKey(id), schema.Encode(&row))
	if row.Incomplete() {
		b.Put(schema.FillKey(id), schema.Encode(&schema.Fill{}))
	}
	b.Put(schema.WriterKey(id, session), nil)
	firstTaken := own(b, taken)
	return row, func(err error) { m.settle(taken, firstTaken, err) }, true
}

// allowFewCopies sees to it that services which do not know what the row has leave the catalog alone.
func (m *Manager) allowFewCopies(ctx context.Context, row *schema.Layout) error {
	if !row.FewCopies() || m.copiesKnown.Load() {
		return nil
	}
	if err := schema.Raise(ctx, m.cfg.Engine, schema.FormatCopies, m.log); err != nil {
		return fmt.Errorf("no new data file without all copies: %w", err)
	}
	m.copiesKnown.Store(true)
	return nil
}

// blank is the row of a file without data files; m.mu is held.
func (m *Manager) blank(policy layout.Policy) schema.Layout {
	unit := m.unit()
	row := schema.Layout{StripeUnit: min((policy.StripeUnit+unit-1)/unit*unit, layout.MaxStripeUnit)}
	if policy.MinCopies > 1 {
		row.MinCopies = min(policy.MinCopies, policy.Mirrors)
	}
	return row
}

// own adds to a batch that data files of pools are a file's, and returns the index of the first of their guards, which follow one another.
func own(b *catalog.Batch, taken []schema.DataFile) (firstTaken int) {
	firstTaken = len(b.Guards)
	for i := range taken {
		key := schema.GarbageKey(taken[i].Device, taken[i].Number)
		b.GuardPresent(key)
		b.Delete(key)
		b.Add(schema.InUseKey(taken[i].Device), 0, 1)
	}
	return firstTaken
}

// settle releases data files that were taken, or puts them back, when it is known how the commit ended of a batch that own was given.
func (m *Manager) settle(taken []schema.DataFile, firstTaken int, err error) {
	var guard *catalog.GuardError
	switch {
	case err == nil:
		m.release(taken)
		return
	case errors.As(err, &guard):
		if lost := guard.Index - firstTaken; lost >= 0 && lost < len(taken) {
			m.log.Error("a data file lost its garbage row: was its data server declared lost, or is there another metadata service?",
				"device", taken[lost].Device, "number", taken[lost].Number)
			m.release(taken[lost : lost+1])
			taken = slices.Delete(taken, lost, lost+1)
		}
	}
	m.putBack(taken)
}

// covers reports whether the row has the data files for every byte before end.
func covers(row *schema.Layout, end int64) bool {
	have := columns(row)
	return have > 0 && (end <= row.StripeUnit || have == row.Width)
}

// columns is how many data files each mirror has.
func columns(row *schema.Layout) int {
	if len(row.Mirrors) == 0 {
		return 0
	}
	return len(row.Mirrors[0])
}

// extend takes data files from the pools and returns row with them: one in each mirror, or, if wide, all.
func (m *Manager) extend(ctx context.Context, id layout.FileID, row schema.Layout, policy layout.Policy, wide bool, near []layout.DeviceID) (schema.Layout, []schema.DataFile, error) {
	for {
		m.mu.Lock()
		changed := m.changed
		plan, err := m.plan(id, &row, policy, wide, near)
		if err == nil && plan.stocked() {
			row, taken := plan.take(row)
			m.mu.Unlock()
			return row, taken, nil
		}
		m.mu.Unlock()
		waitCtx, cancel := ctx, context.CancelFunc(func() {})
		switch {
		case errors.Is(err, errNotYet):
			waitCtx, cancel = context.WithTimeout(ctx, firstLook)
		case err != nil:
			return row, nil, err
		}
		err = m.wait(waitCtx, changed)
		cancel()
		if err != nil && (ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded)) {
			return row, nil, fmt.Errorf("wait for a new data file: %w", err)
		}
	}
}

// firstLook is for how long new data files wait for a device whose condition is not known yet, so that the first files
// after a start find all of them.
const firstLook = time.Second

// errNotYet: there is such a device, and the others do not suffice for all copies.
var errNotYet = errors.New("devices are being looked at")

// plan says where new data files are to come from.
type plan struct {
	mirrors int
	width   int
	columns [][]*device // new columns, each with a device for every mirror, or for the first ones
}

// plan chooses devices; m.mu is held. Mirrors of one column always are on different devices; apart from that a file
// spreads over as many as there are. Of those that are alike in that and have data files ready the ones with the fewest
// drawbacks come first, and those that are alike in this, too, in turn. A file that is to lie on its writer's host has its first
// copy on one of near, whole. Mirrors for which there is no device are left out, as far as row allows.
func (m *Manager) plan(id layout.FileID, row *schema.Layout, policy layout.Policy, wide bool, near []layout.DeviceID) (*plan, error) {
	have := columns(row)
	p := &plan{mirrors: policy.Mirrors, width: 1}
	if have > 0 {
		p.mirrors = len(row.Mirrors)
	}
	usable, pending, err := m.usable(p.mirrors, nil)
	if pending && (wide || len(usable) < p.mirrors) {
		return nil, errNotYet
	}
	if err != nil && (have == 0 || !errors.Is(err, ErrNoSpace)) {
		return nil, err
	}

	inMirror := make([]map[layout.DeviceID]int, p.mirrors)
	inFile := map[layout.DeviceID]int{}
	for i := range inMirror {
		inMirror[i] = map[layout.DeviceID]int{}
		for j := range have {
			dev := row.Mirrors[i][j].Device
			inMirror[i][dev]++
			inFile[dev]++
		}
	}
	devices := len(usable)
	for dev := range inFile {
		if !slices.ContainsFunc(usable, func(d *device) bool { return d.id == dev }) {
			devices++
		}
	}
	near = slices.DeleteFunc(slices.Clone(near), func(id layout.DeviceID) bool {
		return !slices.ContainsFunc(usable, func(d *device) bool { return d.id == id })
	})
	local := have == 0 && policy.Placement == layout.PlacementLocal && len(near) > 0
	if local {
		policy.StripeCount = 1
	}
	p.width = max(have, min(policy.StripeCount, devices))
	if least := max(row.MinCopies, 1); len(usable) < least {
		if have == 0 {
			return nil, fmt.Errorf("%d copies need as many data servers, there are %d: %w", least, len(usable), ErrNoDevice)
		}
		p.width = have // it goes on where it is
	}
	last := p.width
	if !wide {
		last = 1
	}

	if len(usable) == 0 {
		return p, nil
	}
	var order []*device
	for _, alike := range byDrawbacks(usable) {
		if len(alike) > 0 {
			start := int(spread(id) % uint64(len(alike)))
			order = slices.Concat(order, alike[start:], alike[:start])
		}
	}
	stock := map[*device]int{}
	for _, d := range usable {
		stock[d] = len(d.pool)
	}
	for len(p.columns) < last-have {
		column := make([]*device, 0, p.mirrors)
		for i := range min(p.mirrors, len(usable)) {
			best := slices.MinFunc(order, func(a, b *device) int {
				return cmp.Or(
					compareBool(slices.Contains(column, a), slices.Contains(column, b)),
					compareBool(local && i == 0 && !slices.Contains(near, a.id), local && i == 0 && !slices.Contains(near, b.id)),
					cmp.Compare(inMirror[i][a.id], inMirror[i][b.id]),
					cmp.Compare(inFile[a.id], inFile[b.id]),
					compareBool(stock[a] <= 0, stock[b] <= 0),
				)
			})
			column = append(column, best)
			inMirror[i][best.id]++
			inFile[best.id]++
			stock[best]--
		}
		p.columns = append(p.columns, column)
	}
	return p, nil
}

// onNamespaces reports whether the plan has a data file on a namespace.
func (p *plan) onNamespaces() bool {
	return slices.ContainsFunc(p.columns, func(column []*device) bool {
		return slices.ContainsFunc(column, func(d *device) bool { return d.space != nil })
	})
}

// fewCopies reports whether row, which has no data files yet, gets fewer copies than mirrors, or has MinCopies.
func (p *plan) fewCopies(row *schema.Layout) bool {
	return row.MinCopies != 0 || slices.ContainsFunc(p.columns, func(column []*device) bool { return len(column) < p.mirrors })
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// spread scatters file numbers evenly (the finalizer of SplitMix64), so that patterns in them, such as a directory
// made before each file, do not favour a device.
func spread(id layout.FileID) uint64 {
	z := uint64(id) + 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// usable returns the devices that new data files can go to, or why there is none: those with plenty of room, and if
// these are fewer than wanted also those with little, which come last. pending means that there may soon be more. m.mu
// is held.
func (m *Manager) usable(wanted int, such func(*device) bool) (devices []*device, pending bool, err error) {
	var spare []*device // with little room
	reached := false
	for _, d := range m.devices {
		if d.row.Draining || such != nil && !such(d) {
			continue
		}
		if d.condition != up {
			pending = pending || d.condition == unknown && time.Since(d.since) < firstLook
			continue
		}
		reached = true
		switch d.room() {
		case plenty:
			devices = append(devices, d)
		case little:
			spare = append(spare, d)
		}
	}
	if len(devices) < wanted {
		devices = append(devices, spare...)
	}
	switch {
	case len(devices) > 0:
	case reached:
		err = m.allRefuse()
	default:
		err = fmt.Errorf("%w: none of %d can be reached", ErrNoDevice, len(m.devices))
	}
	return devices, pending, err
}

// allRefuse says why no device that can be reached takes a data file; m.mu is held.
func (m *Manager) allRefuse() error {
	for _, d := range m.devices {
		if d.condition == up && !d.full() {
			return fmt.Errorf("%w: %v: %w", ErrNoDevice, placeOf(&d.row), d.refusal())
		}
	}
	return ErrNoSpace
}

// stocked reports whether the pools have what the plan needs, and has those refilled that do not; Manager.mu is held.
func (p *plan) stocked() bool {
	need := map[*device]int{}
	for _, column := range p.columns {
		for _, d := range column {
			need[d]++
		}
	}
	ok := true
	for d, n := range need {
		if len(d.pool) < n {
			ok = false
			d.demand = max(d.demand, n)
			kick(d.refill)
		}
	}
	return ok
}

// take takes the data files out of the pools and returns row with them; Manager.mu is held.
func (p *plan) take(row schema.Layout) (schema.Layout, []schema.DataFile) {
	var taken []schema.DataFile
	mirrors := make([][]schema.DataFile, p.mirrors)
	for i := range mirrors {
		if columns(&row) > 0 {
			mirrors[i] = slices.Clone(row.Mirrors[i])
		}
		for _, column := range p.columns {
			if i >= len(column) {
				mirrors[i] = append(mirrors[i], schema.Absent())
				continue
			}
			file := column[i].next()
			mirrors[i] = append(mirrors[i], file)
			taken = append(taken, file)
		}
	}
	row.Width, row.Mirrors = p.width, mirrors
	return row, taken
}

// release lets go of data files that are a file's now, or nobody's.
func (m *Manager) release(files []schema.DataFile) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range files {
		if d := m.find(files[i].Device); d != nil {
			delete(d.held, files[i].Number)
		}
	}
}

// putBack returns data files to their pools.
func (m *Manager) putBack(files []schema.DataFile) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range files {
		if d := m.find(files[i].Device); d != nil {
			d.stock(files[i])
		}
	}
	m.signal()
}

// Efficiencies of data files. Caches are read by those on whose host they are, who read nothing else then, and otherwise
// when what all have fails.
const (
	cacheEfficiency  = 0
	mirrorEfficiency = 1
)

// Segments returns the segments that a layout row grants for a mode, none if it has no data files. Each good cache is one more mirror,
// with the same data file in all columns.
func (m *Manager) Segments(row schema.Layout, mode layout.IOMode) []metarpc.Segment {
	have := columns(&row)
	if have == 0 {
		return nil
	}
	m.meet(&row)
	s := metarpc.Segment{Len: row.StripeUnit, IOMode: mode, StripeUnit: row.StripeUnit, Flags: layout.FlagNoIOThruMDS}
	if have == row.Width {
		s.Len = layout.ToEOF
	}
	if row.MinCopies > 1 {
		s.Exacting = true
		for j := range have {
			s.Few = s.Few || row.GoodCopies(j) < row.MinCopies
		}
	}
	grant := func(f *schema.DataFile, efficiency uint32) metarpc.DataFile {
		file := metarpc.DataFile{Device: f.Device, Efficiency: efficiency, Handle: f.Handle, UID: f.UID, GID: f.GID, State: f.State}
		if mode == layout.IOModeRead {
			file.UID = lastID
		}
		return file
	}
	for _, files := range row.Mirrors {
		mirror := make([]metarpc.DataFile, len(files))
		for i := range files {
			mirror[i] = grant(&files[i], mirrorEfficiency)
		}
		s.Mirrors = append(s.Mirrors, mirror)
	}
	for i := range row.Caches {
		if f := &row.Caches[i].File; f.State == layout.CopyGood {
			s.Mirrors = append(s.Mirrors, slices.Repeat([]metarpc.DataFile{grant(f, cacheEfficiency)}, have))
		}
	}
	return []metarpc.Segment{s}
}

// Describe tells people where a file lies. A server that the file may get later has an empty record.
func (m *Manager) Describe(row schema.Layout, ino schema.Inode) metarpc.Described {
	desc := metarpc.Described{StripeUnit: row.StripeUnit}
	if desc.StripeUnit == 0 {
		desc.StripeUnit = ino.Policy.Layout().Or(defaultPolicy).StripeUnit
	}
	for _, files := range row.Mirrors {
		mirror := make([]metarpc.DescribedServer, max(row.Width, len(files)))
		for i := range files {
			if !files[i].IsAbsent() {
				mirror[i] = m.describeFile(&files[i])
			}
		}
		desc.Mirrors = append(desc.Mirrors, mirror)
	}
	for i := range row.Caches {
		c := &row.Caches[i]
		desc.Caches = append(desc.Caches, metarpc.DescribedCache{Server: m.describeFile(&c.File), State: c.File.State, Bytes: c.Bytes})
	}
	return desc
}

// describeFile tells people where a data file is.
func (m *Manager) describeFile(file *schema.DataFile) metarpc.DescribedServer {
	if space := m.space(file.Device); space != nil {
		return m.describeExtents(file, space)
	}
	dir, name := schema.DataFileName(file.Number)
	s := metarpc.DescribedServer{Device: file.Device, DataFile: schema.VolumeDir(m.cfg.Volume) + "/" + dir + "/" + name}
	if d, err := m.device(file.Device); err == nil {
		at := d.url()
		s.Address = at.hostPort() + ":" + at.export
	}
	return s
}

// fileLocks is a lock for each file.
type fileLocks struct {
	mu    sync.Mutex
	files map[layout.FileID]*fileLock
}

type fileLock struct {
	users   int           // holders and those who wait; guarded by fileLocks.mu
	holders int           // who has it, and for whom it is kept; guarded by fileLocks.mu
	token   chan struct{} // who has sent to it holds the lock
}

// lock waits for the lock of a file.
func (l *fileLocks) lock(ctx context.Context, id layout.FileID) (unlock func(), err error) {
	l.mu.Lock()
	f := l.files[id]
	if f == nil {
		f = &fileLock{token: make(chan struct{}, 1)}
		if l.files == nil {
			l.files = map[layout.FileID]*fileLock{}
		}
		l.files[id] = f
	}
	f.users++
	l.mu.Unlock()
	select {
	case f.token <- struct{}{}:
		l.mu.Lock()
		defer l.mu.Unlock()
		f.holders = 1
		return func() { l.leave(id, f, true) }, nil
	case <-ctx.Done():
		l.leave(id, f, false)
		return nil, ctx.Err()
	}
}

// keep has the lock of a file, which the caller holds, held until unlock is called as well.
func (l *fileLocks) keep(id layout.FileID) (unlock func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.files[id]
	f.users++
	f.holders++
	return func() { l.leave(id, f, true) }
}

func (l *fileLocks) leave(id layout.FileID, f *fileLock, holder bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if holder {
		if f.holders--; f.holders == 0 {
			<-f.token
		}
	}
	if f.users--; f.users == 0 {
		delete(l.files, id)
	}
}
