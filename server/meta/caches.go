package meta

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// cacheTable knows which caches there are, by device and by file, and when each was used. All but the latter is in the catalog, from
// where it is read at the start. A file that has a cache there has one here; for moments, one may be here that is there no more.
type cacheTable struct {
	mu      sync.Mutex
	devices map[layout.DeviceID]*cacheDevice
	files   map[layout.FileID][]*cached
}

type cacheDevice struct {
	turn    chan struct{} // has one token, for whoever makes room
	bytes   int64
	pending int64     // of these, those of caches that are being filled
	used    list.List // of *cached, the last used first
}

type cached struct {
	id     layout.FileID
	device layout.DeviceID
	use    schema.CacheUse
	run    uint64 // that asked for it last, see metarpc.CacheStartArgs
	at     *list.Element
}

// count adds a cache to a device's sums, or takes it from there.
func (d *cacheDevice) count(use *schema.CacheUse, sign int64) {
	d.bytes += sign * use.Bytes
	if use.State == layout.CopyFilling {
		d.pending += sign * use.Bytes
	}
}

func newCacheTable() cacheTable {
	return cacheTable{devices: map[layout.DeviceID]*cacheDevice{}, files: map[layout.FileID][]*cached{}}
}

// device returns what is known of a device; t.mu is held.
func (t *cacheTable) device(id layout.DeviceID) *cacheDevice {
	d := t.devices[id]
	if d == nil {
		d = &cacheDevice{turn: make(chan struct{}, 1)}
		d.turn <- struct{}{}
		t.devices[id] = d
	}
	return d
}

// find returns a file's cache on a device, nil if there is none; t.mu is held.
func (t *cacheTable) find(id layout.FileID, dev layout.DeviceID) *cached {
	for _, c := range t.files[id] {
		if c.device == dev {
			return c
		}
	}
	return nil
}

// add takes in a cache that there is or will be, as the one used last.
func (t *cacheTable) add(id layout.FileID, dev layout.DeviceID, use schema.CacheUse, run uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d, c := t.device(dev), t.find(id, dev)
	if c == nil {
		c = &cached{id: id, device: dev}
		c.at = d.used.PushFront(c)
		t.files[id] = append(t.files[id], c)
	}
	d.count(&c.use, -1)
	c.use, c.run = use, run
	d.count(&c.use, 1)
	d.used.MoveToFront(c.at)
}

// remove forgets a file's cache on a device.
func (t *cacheTable) remove(id layout.FileID, dev layout.DeviceID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.find(id, dev)
	if c == nil {
		return
	}
	d := t.device(dev)
	d.used.Remove(c.at)
	d.count(&c.use, -1)
	left := slices.DeleteFunc(t.files[id], func(other *cached) bool { return other == c })
	if t.files[id] = left; len(left) == 0 {
		delete(t.files, id)
	}
}

// full notes that a cache can be read.
func (t *cacheTable) full(id layout.FileID, dev layout.DeviceID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.find(id, dev); c != nil {
		d := t.device(dev)
		d.count(&c.use, -1)
		c.use.State, c.use.Session = layout.CopyGood, metarpc.SessionID{}
		d.count(&c.use, 1)
		d.used.MoveToFront(c.at)
	}
}

// good reports whether a file has a cache on a device that can be read.
func (t *cacheTable) good(id layout.FileID, dev layout.DeviceID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.find(id, dev)
	return c != nil && c.use.State == layout.CopyGood
}

// filler is the session that fills a file's cache on a device, zero if there is none.
func (t *cacheTable) filler(id layout.FileID, dev layout.DeviceID) (sess metarpc.SessionID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.find(id, dev); c != nil {
		sess = c.use.Session
	}
	return sess
}

// touch notes that a file is read, and by which run it was asked for if that is not 0.
func (t *cacheTable) touch(id layout.FileID, run uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.files[id] {
		t.devices[c.device].used.MoveToFront(c.at)
		if run != 0 {
			c.run = run
		}
	}
}

// has reports whether a file may have a cache.
func (t *cacheTable) has(id layout.FileID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.files[id]) > 0
}

// usage is how many caches there are on a device, with how many bytes, and how many bytes of these are still being filled.
func (t *cacheTable) usage(dev layout.DeviceID) (count, bytes, pending int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.devices[dev]
	if d == nil {
		return 0, 0, 0
	}
	return int64(d.used.Len()), d.bytes, d.pending
}

// such lists the files that have such a cache.
func (t *cacheTable) such(such func(*cached) bool) (found []cached) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, all := range t.files {
		for _, c := range all {
			if such(c) {
				found = append(found, *c)
			}
		}
	}
	return found
}

// oldest returns the cache on a device that was used longest ago, of those that are full and not asked for by run.
func (t *cacheTable) oldest(dev layout.DeviceID, run uint64, but map[layout.FileID]bool) (layout.FileID, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := t.device(dev).used.Back(); e != nil; e = e.Prev() {
		if c := e.Value.(*cached); c.use.State == layout.CopyGood && (c.run != run || run == 0) && !but[c.id] {
			return c.id, true
		}
	}
	return 0, false
}

// isPin reports whether a cache is among copies.
func isPin(pins []metarpc.CopyRef, c *schema.Cache) bool {
	return slices.ContainsFunc(pins, func(ref metarpc.CopyRef) bool { return sameCopy(ref, c.Ref()) })
}

func anyCache(*schema.Cache) bool { return true }

// dropCaches takes such caches away from a file, but those that are pinned: when it returns, nobody reads them any more. It returns
// those that are gone and those that are left. Meanwhile no copy of the file is pinned (freezePins).
func (s *Service) dropCaches(ctx context.Context, id layout.FileID, such func(*schema.Cache) bool) (gone, left []schema.Cache, err error) {
	if s.caches.has(id) {
		if err := s.awaitGrace(ctx); err != nil { // what was pinned before a restart is known then
			return nil, nil, err
		}
	}
	pins, thaw := s.freezePins(id)
	defer thaw()
	gone, left, err = s.endCaches(ctx, id, func(c *schema.Cache) bool {
		return c.File.State == layout.CopyStale || such(c) && !isPin(pins, c)
	})
	if err != nil {
		s.finishDrop(id)
		return nil, nil, err
	}
	return gone, left, nil
}

// endCaches takes such caches away, which are not pinned: they become stale, durably, everybody is told, and then they are garbage.
func (s *Service) endCaches(ctx context.Context, id layout.FileID, such func(*schema.Cache) bool) (gone, left []schema.Cache, err error) {
	gone, left, err = s.cfg.Files.StaleCaches(ctx, id, such)
	var read []metarpc.CopyRef // nobody reads what was not full
	for i := range gone {
		if gone[i].File.State != layout.CopyFilling {
			read = append(read, gone[i].Ref())
		}
	}
	if err == nil && len(read) > 0 {
		if err = s.tell(ctx, &metarpc.CopiesStaleArgs{ID: id, Copies: read}); err == nil {
			err = s.recallReads(ctx, id)
		}
		if err == nil {
			err = s.cfg.Files.DiscardCaches(ctx, id, read)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	for i := range gone {
		if by := s.caches.filler(id, gone[i].File.Device); by == (metarpc.SessionID{}) || by == gone[i].Session { // or it is a new one
			s.caches.remove(id, gone[i].File.Device)
		}
	}
	s.cfg.Files.Kick()
	return gone, left, nil
}

// finishDrop goes on, in the background, with what dropCaches has begun: with the caches of a file that are stale.
func (s *Service) finishDrop(id layout.FileID) {
	s.tasks.Go(func() { // ends when they are gone, or with s.ctx
		retry.Persist(s.ctx, s.log, fmt.Sprintf("end of caches of inode %d", id), func() error {
			_, _, err := s.endCaches(s.ctx, id, func(c *schema.Cache) bool { return c.File.State == layout.CopyStale })
			return err
		})
	})
}

// awaitNoCaches takes all caches away from a file, waiting for those that are pinned. what is what waits, for people.
func (s *Service) awaitNoCaches(ctx context.Context, id layout.FileID, what string) error {
	if s.caches.has(id) {
		select {
		case <-s.graceOver:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for s.caches.has(id) {
		_, left, err := s.dropCaches(ctx, id, anyCache)
		if err != nil || len(left) == 0 {
			return err
		}
		if err := s.awaitReleased(ctx, id, refsOf(left, anyCache), what); err != nil {
			return err
		}
	}
	return nil
}

// refsOf names such caches.
func refsOf(caches []schema.Cache, such func(*schema.Cache) bool) (refs []metarpc.CopyRef) {
	for i := range caches {
		if such(&caches[i]) {
			refs = append(refs, caches[i].Ref())
		}
	}
	return refs
}

// awaitReleased waits until none of the copies is pinned.
func (s *Service) awaitReleased(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef, what string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for slices.ContainsFunc(f.pinned(), func(pin metarpc.CopyRef) bool {
		return slices.ContainsFunc(copies, func(ref metarpc.CopyRef) bool { return sameCopy(ref, pin) })
	}) {
		s.holdUp(f, what)
		if err := s.wait(ctx, f); err != nil {
			return err
		}
	}
	s.changedFile(f)
	return nil
}

// cacheStart begins a cache, see the package comment.
func (s *Service) cacheStart(ctx context.Context, c *call, a *metarpc.CacheStartArgs) (*metarpc.CacheStartResult, error) {
	if s.caller(c).ReadOnly {
		return nil, errReadOnly
	}
	if err := s.awaitGrace(ctx); err != nil {
		return nil, err
	}
	if err := s.mayTransfer(c.sess, &metarpc.LayoutGetArgs{ID: a.ID, IOMode: layout.IOModeRead}); err != nil {
		return nil, err
	}
	size, row, err := s.sizeAndLayout(ctx, c.sess, a.ID)
	if err != nil || size == 0 || len(row.Mirrors) == 0 {
		return &metarpc.CacheStartResult{Size: size}, err
	}
	for i := range row.Caches {
		if f := &row.Caches[i].File; f.State == layout.CopyGood && slices.Contains(a.Devices, f.Device) {
			if kept, err := s.keepCache(ctx, a, f.Device); kept || err != nil {
				return &metarpc.CacheStartResult{Size: size, Cached: true}, err
			}
		}
	}
	if within(&row, a.Devices) {
		return &metarpc.CacheStartResult{Size: size, Cached: true}, nil
	}
	if slices.ContainsFunc(row.Caches, func(c schema.Cache) bool { return c.File.State == layout.CopyStale }) {
		if _, _, err := s.dropCaches(ctx, a.ID, func(*schema.Cache) bool { return false }); err != nil {
			return nil, err
		}
	}
	dev, err := s.cacheDevice(&row, c.sess, a.Devices, size)
	if err == nil {
		err = s.makeRoom(ctx, a, dev, size, c.sess)
	}
	if err != nil {
		return nil, s.cacheError(ctx, c, a.ID, err)
	}
	var cache schema.Cache
	ok := false
	err = s.gated(ctx, a.ID, layout.Range{Len: layout.ToEOF}, func(ctx context.Context) error {
		err := s.settled(ctx, a.ID, size)
		if err == nil {
			cache, ok, err = s.cfg.Files.StartCache(ctx, a.ID, dev, size, c.sess.id)
		}
		return err
	})
	if (err != nil || !ok) && ctx.Err() == nil { // else it may be in the catalog yet, and the clean-up of the session sees to it
		s.forgetCache(a.ID, dev)
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		err = refusef(metarpc.Status(syscall.EBUSY), "the file is being written, and its writers have not made that stable in %v", gatePatience)
	}
	if err != nil || !ok {
		return &metarpc.CacheStartResult{Size: size}, s.cacheError(ctx, c, a.ID, err)
	}
	return &metarpc.CacheStartResult{Size: size, Segments: s.cfg.Files.CacheSegments(cache)}, nil
}

// settled returns why a file that nobody has a layout for writing is not of this size for good. The caller has its sizing, so nobody must be
// waited for who finds out a size.
func (s *Service) settled(ctx context.Context, id layout.FileID, size int64) error {
	said := s.said(id)[0]
	ino, _, err := s.inode(ctx, id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	switch {
	case f.unsure() || f.hasPlaces() || max(ino.Size, said.end) != size:
		return refusef(metarpc.Status(syscall.EBUSY), "the file is being written")
	case slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.open && cl.write && len(cl.pin.Handle) > 0 }):
		return refusef(metarpc.Status(syscall.EBUSY), "the file is open for writing, in passthrough")
	}
	return nil
}

// sizeAndLayout is how long a file is now, with what its writers say, and where it is.
func (s *Service) sizeAndLayout(ctx context.Context, sess *session, id layout.FileID) (size int64, row schema.Layout, err error) {
	if _, _, err = s.regular(ctx, id); err == nil {
		err = s.settleSize(ctx, sess, id)
	}
	var attr metarpc.Attr
	if err == nil {
		attr, err = s.attributes(ctx, sess, id)
	}
	if err == nil {
		_, err = schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &row)
	}
	return attr.Size, row, err
}

// within reports whether each column of a layout has a good copy on one of the devices.
func within(row *schema.Layout, devices []layout.DeviceID) bool {
	if len(row.Mirrors) == 0 {
		return false
	}
	for j := range row.Mirrors[0] {
		if !slices.ContainsFunc(row.Mirrors, func(files []schema.DataFile) bool {
			return files[j].State == layout.CopyGood && slices.Contains(devices, files[j].Device)
		}) {
			return false
		}
	}
	return true
}

// cacheDevice chooses the device for a cache: that of one the session has begun, or the one with the least bytes of caches of those
// that can take it.
func (s *Service) cacheDevice(row *schema.Layout, sess *session, devices []layout.DeviceID, size int64) (layout.DeviceID, error) {
	for i := range row.Caches {
		if c := &row.Caches[i]; c.Session == sess.id && slices.Contains(devices, c.File.Device) {
			return c.File.Device, nil
		}
	}
	type choice struct {
		id             layout.DeviceID
		bytes, pending int64
	}
	var choices []choice
	for _, id := range devices {
		_, bytes, pending := s.caches.usage(id)
		choices = append(choices, choice{id, bytes, pending})
	}
	slices.SortStableFunc(choices, func(a, b choice) int { return cmp.Compare(a.bytes, b.bytes) })
	var errs []error
	for _, d := range choices {
		err := s.cfg.Files.CacheRoom(d.id, size, d.pending)
		if err == nil {
			return d.id, nil
		}
		errs = append(errs, err)
	}
	return layout.DeviceID{}, errors.Join(errs...)
}

// keepCache keeps a file's cache on a device from those that go for others of the same run. It reports false if it has just gone.
func (s *Service) keepCache(ctx context.Context, a *metarpc.CacheStartArgs, dev layout.DeviceID) (bool, error) {
	release, err := s.caches.take(ctx, dev)
	if err != nil {
		return false, err
	}
	defer release()
	var row schema.Layout
	if _, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(a.ID), &row); err != nil {
		return false, err
	}
	if !slices.ContainsFunc(row.Caches, func(c schema.Cache) bool { return c.File.Device == dev && c.File.State == layout.CopyGood }) {
		return false, nil
	}
	s.caches.touch(a.ID, a.Run)
	return true, nil
}

// take waits until nobody makes room on a device, and lets nobody until release is called.
func (t *cacheTable) take(ctx context.Context, dev layout.DeviceID) (release func(), err error) {
	t.mu.Lock()
	turn := t.device(dev).turn
	t.mu.Unlock()
	select {
	case <-turn:
		return func() { turn <- struct{}{} }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// makeRoom counts a cache that is about to be made, and takes others away from its device until all are within the limit.
func (s *Service) makeRoom(ctx context.Context, a *metarpc.CacheStartArgs, dev layout.DeviceID, size int64, sess *session) error {
	release, err := s.caches.take(ctx, dev)
	if err != nil {
		return err
	}
	defer release()
	if a.Limit > 0 && size > a.Limit {
		return refusef(errNoSpace.Status, "the file has %s, of %s allowed for all", humanize.IBytes(uint64(size)), humanize.IBytes(uint64(a.Limit)))
	}
	use := schema.CacheUse{State: layout.CopyFilling, Bytes: size, Session: sess.id}
	if s.caches.good(a.ID, dev) {
		return refusef(metarpc.Status(syscall.EBUSY), "somebody else has just copied the file there")
	}
	if by := s.caches.filler(a.ID, dev); by != sess.id && by != (metarpc.SessionID{}) {
		return refusef(metarpc.Status(syscall.EBUSY), "somebody else copies the file there")
	}
	s.caches.add(a.ID, dev, use, a.Run)
	pinned := map[layout.FileID]bool{}
	for a.Limit > 0 {
		count, bytes, _ := s.caches.usage(dev)
		if bytes <= a.Limit {
			return nil
		}
		id, ok := s.caches.oldest(dev, a.Run, pinned)
		if !ok {
			s.forgetCache(a.ID, dev)
			return refusef(errNoSpace.Status, "%d files with %s are cached there already, of %s allowed", count-1,
				humanize.IBytes(uint64(bytes-size)), humanize.IBytes(uint64(a.Limit)))
		}
		_, left, err := s.dropCaches(ctx, id, func(c *schema.Cache) bool { return c.File.Device == dev })
		if err != nil {
			s.forgetCache(a.ID, dev)
			return err
		}
		if slices.ContainsFunc(left, func(c schema.Cache) bool { return c.File.Device == dev }) {
			pinned[id] = true
		} else {
			s.caches.remove(id, dev) // should the catalog have had none
		}
	}
	return nil
}

// forgetCache forgets a cache that was about to be made, unless the catalog has it.
func (s *Service) forgetCache(id layout.FileID, dev layout.DeviceID) {
	if raw, err := schema.FindRow(s.ctx, s.engine, schema.CacheKey(dev, id)); err == nil && raw == nil {
		s.caches.remove(id, dev)
	}
}

// cacheError is what a client is told when there can be no cache.
func (s *Service) cacheError(ctx context.Context, c *call, id layout.FileID, err error) error {
	if answer := (*metarpc.Error)(nil); err == nil || errors.As(err, &answer) {
		return err
	}
	if errors.Is(err, syscall.EBUSY) {
		return refusef(metarpc.Status(syscall.EBUSY), "%v", err)
	}
	return s.assignError(ctx, c, id, err)
}

// cacheDone makes a cache that is full good for readers.
func (s *Service) cacheDone(ctx context.Context, c *call, a *metarpc.CacheDoneArgs) (*metarpc.Empty, error) {
	good, err := s.cfg.Files.EndCache(ctx, a.ID, a.Copy, c.sess.id)
	if err != nil {
		return nil, err
	}
	if !good {
		return nil, refusef(metarpc.Status(syscall.EBUSY), "the file was written, or its cache dropped, while it was copied")
	}
	s.caches.full(a.ID, a.Copy.Device)
	// Readers may use it. They need not: so nobody is waited for.
	s.tasks.Go(func() { // ends with the answers, or the leases, or s.ctx
		s.tell(s.ctx, &metarpc.CopiesStaleArgs{ID: a.ID})
	})
	return &metarpc.Empty{}, nil
}

// cacheDrop takes a file's caches away.
func (s *Service) cacheDrop(ctx context.Context, c *call, a *metarpc.CacheDropArgs) (*metarpc.CacheDropResult, error) {
	who := s.caller(c)
	if who.ReadOnly {
		return nil, errReadOnly
	}
	row, _, err := s.regular(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	if s.mayTransfer(c.sess, &metarpc.LayoutGetArgs{ID: a.ID, IOMode: layout.IOModeRead}) != nil {
		if err := s.permission(ctx, who, a.ID, &row, metarpc.AccessRead); err != nil {
			return nil, err
		}
	}
	such := func(c *schema.Cache) bool { return a.Device == layout.DeviceID{} || c.File.Device == a.Device }
	gone, left, err := s.dropCaches(ctx, a.ID, such)
	if refs := refsOf(left, such); err == nil && len(refs) > 0 {
		// It may have been closed already: clients tell a moment later.
		waiting, cancel := context.WithTimeout(ctx, layoutWait)
		if s.awaitReleased(waiting, a.ID, refs, "the eviction of its cache") == nil {
			var more []schema.Cache
			more, left, err = s.dropCaches(ctx, a.ID, such)
			gone = append(gone, more...)
		}
		cancel()
	}
	if err != nil {
		return nil, err
	}
	for i := range left {
		if such(&left[i]) {
			return nil, refusef(metarpc.Status(syscall.EBUSY), "%s has the file open and reads the cache directly", s.pinner(a.ID, &left[i]))
		}
	}
	r := &metarpc.CacheDropResult{Caches: len(gone)}
	for i := range gone {
		r.Bytes += gone[i].Bytes
	}
	return r, nil
}

// pinner is the host of a session that has pinned a cache.
func (s *Service) pinner(id layout.FileID, c *schema.Cache) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.files[id]; f != nil {
		for _, cl := range f.claims {
			if cl.open && sameCopy(cl.pin, c.Ref()) {
				return cl.sess.client.Host
			}
		}
	}
	return "a client"
}

// dropFillings takes away what a session that is over has not filled.
func (s *Service) dropFillings(id metarpc.SessionID) error {
	var errs []error
	for _, c := range s.caches.such(func(c *cached) bool { return c.use.State == layout.CopyFilling && c.use.Session == id }) {
		_, _, err := s.dropCaches(s.ctx, c.id, func(other *schema.Cache) bool {
			return other.File.State == layout.CopyFilling && other.Session == id
		})
		errs = append(errs, err)
		if err == nil {
			s.forgetCache(c.id, c.device) // should it never have got into the catalog
		}
	}
	return errors.Join(errs...)
}

// dropDrained takes away the caches on devices that are drained, but those that are pinned.
func (s *Service) dropDrained() {
	if len(s.caches.such(anyCached)) == 0 {
		return
	}
	for _, info := range s.cfg.Files.Devices(s.ctx) {
		if !info.Draining {
			continue
		}
		for _, c := range s.caches.such(func(c *cached) bool { return c.device == info.Device.ID }) {
			_, _, err := s.dropCaches(s.ctx, c.id, func(other *schema.Cache) bool { return other.File.Device == c.device })
			if err != nil && s.ctx.Err() == nil {
				s.log.Warn("a cache on a data server that is drained cannot be dropped now", "inode", c.id, "error", err)
			}
		}
	}
}

func anyCached(*cached) bool { return true }

// loadCaches reads which caches there are; those made last count as used last.
func (s *Service) loadCaches(ctx context.Context) error {
	var all []cached
	for kv, err := range schema.ScanRows(ctx, s.engine, schema.PrefixCache, 1+16+8) {
		if err != nil {
			return err
		}
		var c cached
		if c.device, c.id = schema.CacheOf(kv.Key); !s.mine(c.id) {
			continue
		}
		if err := schema.DecodeRow(kv.Key, kv.Value, &c.use); err != nil {
			return err
		}
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b cached) int { return cmp.Compare(a.use.Made, b.use.Made) })
	for _, c := range all {
		s.caches.add(c.id, c.device, c.use, 0)
	}
	return nil
}

// resumeCaches sees to it that those go which an earlier instance was about to drop, or nobody fills any more. What sessions that
// have ended have not filled goes with the rest of them.
func (s *Service) resumeCaches() {
	left := map[metarpc.SessionID]bool{}
	for _, c := range s.caches.such(anyCached) {
		switch c.use.State {
		case layout.CopyStale:
			s.finishDrop(c.id)
		case layout.CopyFilling:
			left[c.use.Session] = s.sessions[c.use.Session] == nil
		}
	}
	for id, nobody := range left {
		if nobody {
			s.tasks.Go(func() { // ends when they are gone, or with s.ctx
				retry.Persist(s.ctx, s.log, "end of caches that nobody fills", func() error { return s.dropFillings(id) })
			})
		}
	}
}
