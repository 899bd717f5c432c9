package metaclient

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// cacheFiles is of how many files layouts are kept, those used last. Forgetting one for lack of room gives nothing
// back: there may be writes in flight, and the service may still recall it.
const cacheFiles = 100_000

// fileSegments bounds the cached segments of one file. Files of ours have two.
const fileSegments = 64

// cache holds the layouts that the service has granted and not recalled.
type cache struct {
	limit int

	mu        sync.Mutex
	files     map[layout.FileID]*list.Element
	order     list.List // of *cached, the last used first
	creations map[*creation]struct{}
}

// creation is a call that makes a file, and may be answered with a layout. Of which file is known only then, but what is recalled of it before is
// that layout: an answer that was lost is repeated, and grants nothing anew.
type creation struct {
	recalled []layout.FileID // since the call was begun
}

type cached struct {
	id layout.FileID
	// appends says that the service relies on the session writing only where Reserve has said.
	appends bool
	awaited bool // the service knows that the session appends
	// layout is replaced, never changed: callers have pointers into it.
	layout layout.Layout
}

func (k *cache) len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.files)
}

// find returns a segment for the byte at off, of those that cover part of the n bytes there the one that covers most.
// A layout for writing has to be one for such writes.
func (k *cache) find(id layout.FileID, mode layout.IOMode, off, n int64, writes Writes) *layout.Segment {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.files[id]
	if e == nil || mode == layout.IOModeRW && !e.Value.(*cached).allows(writes) {
		return nil
	}
	k.order.MoveToFront(e)
	s, _ := e.Value.(*cached).layout.Find(mode, off, n)
	return s
}

// plain reports whether there are layouts of a file for writing that are not for appends only.
func (k *cache) plain(id layout.FileID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.files[id]
	return e != nil && !e.Value.(*cached).appends && slices.ContainsFunc(e.Value.(*cached).layout.Segments, forWriting)
}

func forWriting(s layout.Segment) bool { return s.IOMode == layout.IOModeRW }

// allows reports whether the layouts for writing are for such writes.
func (f *cached) allows(writes Writes) bool {
	switch writes {
	case AtPlaces:
		return true
	case AtEnd:
		return !f.appends && f.awaited
	}
	return !f.appends
}

// add takes granted segments in, in place of those that they make useless or wrong. writes is what those for writing
// were asked for. Once others were asked for than for AtPlaces, the service no longer relies on there being nothing
// else. What was granted for AtPlaces is not used for other writes: several sessions may have it.
func (k *cache) add(id layout.FileID, granted []layout.Segment, writes Writes) {
	if len(granted) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.files[id]
	if e == nil {
		if k.files == nil {
			k.files = make(map[layout.FileID]*list.Element)
		}
		e = k.order.PushFront(&cached{id: id})
		k.files[id] = e
		if len(k.files) > k.limit {
			k.remove(k.order.Back())
		}
	}
	k.order.MoveToFront(e)
	f := e.Value.(*cached)
	segments, before := slices.Clone(granted), f.layout.Segments
	if slices.ContainsFunc(granted, forWriting) {
		had := slices.ContainsFunc(before, forWriting)
		switch {
		case writes == AtPlaces && had && !f.appends:
			return // it is asked for again, for all
		case writes != AtPlaces && had && f.appends:
			before = slices.DeleteFunc(slices.Clone(before), forWriting)
		}
		f.appends = writes == AtPlaces
		f.awaited = writes != Anywhere || had && f.awaited
	}
	for _, old := range before {
		left := []layout.Segment{old}
		for i := range granted {
			left = remains(left, &granted[i])
		}
		segments = append(segments, left...)
	}
	f.layout.Segments = segments[:min(len(segments), fileSegments)]
}

// remains is what is left to be used of older segments now that s has been granted. left is not kept.
func remains(left []layout.Segment, s *layout.Segment) (rest []layout.Segment) {
	for _, old := range left {
		switch {
		case replaces(s, &old):
		case outdates(s, &old):
			if n := s.Off - old.Off; n > 0 {
				before := old
				before.Len = n
				rest = append(rest, before)
			}
			if s.End() < old.End() {
				after := old
				if after.Off = s.End(); old.Len != layout.ToEOF {
					after.Len = old.End() - s.End()
				}
				rest = append(rest, after)
			}
		default:
			rest = append(rest, old)
		}
	}
	return rest
}

// outdates reports whether old says of what it has in common with s what is not so any more. On namespaces the bytes of a file come to be where
// they were not when the file is written, of which a segment of before knows nothing. What is granted for reading does not outdate what
// was granted for writing, or reads and writes in turn would have to ask each time: it knows no more, as nobody else has written there. But
// it does so if it is of a newer generation.
func outdates(s, old *layout.Segment) bool {
	if !s.OnNamespaces && !old.OnNamespaces || !s.Overlaps(old.Range) {
		return false
	}
	return s.IOMode == layout.IOModeRW || old.IOMode == layout.IOModeRead || newer(s, old)
}

// newer reports whether a data file that both segments have is of a newer generation in s.
func newer(s, old *layout.Segment) bool {
	for m := range min(len(s.Mirrors), len(old.Mirrors)) {
		was := old.Mirrors[m].Servers
		for i := range s.Mirrors[m].Servers {
			f := &s.Mirrors[m].Servers[i]
			if i < len(was) && f.Generation > was[i].Generation && f.Device == was[i].Device && bytes.Equal(f.Handles[0], was[i].Handles[0]) {
				return true
			}
		}
	}
	return false
}

// replaces reports whether s can do whatever old can.
func replaces(s, old *layout.Segment) bool {
	if s.Off > old.Off || s.End() < old.End() {
		return false
	}
	return s.IOMode == old.IOMode || s.IOMode == layout.IOModeRW && s.Flags&layout.FlagNoReadIO == 0
}

// create is called before a call that makes a file; created follows when that has ended, and returns what was recalled meanwhile.
func (k *cache) create() *creation {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.creations == nil {
		k.creations = make(map[*creation]struct{})
	}
	cr := new(creation)
	k.creations[cr] = struct{}{}
	return cr
}

func (k *cache) created(cr *creation) (recalled []layout.FileID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.creations, cr)
	return cr.recalled
}

// calledBack is recall because the service says so.
func (k *cache) calledBack(id layout.FileID, r layout.Range) {
	k.mu.Lock()
	for cr := range k.creations {
		cr.recalled = append(cr.recalled, id)
	}
	k.mu.Unlock()
	k.recall(id, r, false)
}

// recall forgets the segments that share a byte with r, or only those of them that are on namespaces.
func (k *cache) recall(id layout.FileID, r layout.Range, onNamespaces bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.files[id]
	if e == nil {
		return
	}
	f := e.Value.(*cached)
	var kept []layout.Segment
	for _, s := range f.layout.Segments {
		if !s.Overlaps(r) || onNamespaces && !s.OnNamespaces {
			kept = append(kept, s)
		}
	}
	if f.layout.Segments = kept; kept == nil {
		k.remove(e)
	}
}

// remove forgets a file; k.mu is held.
func (k *cache) remove(e *list.Element) {
	delete(k.files, k.order.Remove(e).(*cached).id)
}

func (k *cache) clear() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.files = nil
	k.order.Init()
}

// CachedLayout returns a segment that may be used for mode and holds off; of the n bytes there it may cover only the
// first. nil means that Layout must be asked, as it must for each append of a file that is only appended to. It does no
// I/O and allocates nothing. The segment is shared: read only.
func (c *Client) CachedLayout(id layout.FileID, mode layout.IOMode, off, n int64) *layout.Segment {
	return c.cache.find(id, mode, off, n, Anywhere)
}

// Writes says for which writes a layout is.
type Writes uint8

const (
	// Anywhere is also for reads.
	Anywhere Writes = iota
	// AtPlaces is only for writes to where Reserve has said.
	AtPlaces
	// AtEnd is Anywhere, and for appends to where the file ends by what the session knows under a lease.
	AtEnd
)

// Layout is CachedLayout that asks the service for what is not known, and waits while no data server can take the
// file. nil without an error is a hole, which only a read can meet. Holes are not remembered: somebody may fill them.
func (c *Client) Layout(ctx context.Context, id layout.FileID, mode layout.IOMode, off, n int64, writes Writes) (*layout.Segment, error) {
	var retry backoff
	for {
		if s := c.cache.find(id, mode, off, n, writes); s != nil {
			return s, nil
		}
		found, err := c.layoutGet(ctx, id, mode, off, n, writes)
		var status *metarpc.Error
		switch {
		case err == nil && found: // look again: it may have been recalled since
		case err == nil && mode == layout.IOModeRead:
			return nil, nil
		case err == nil:
			return nil, fmt.Errorf("%w: no layout for writing inode %d at %d among those granted", metarpc.ErrMalformed, id, off)
		case errors.As(err, &status) && status.Status == metarpc.StatusLayoutUnavailable:
			if !retry.wait(ctx) {
				return nil, fmt.Errorf("inode %d: %w (%w)", id, ctx.Err(), err)
			}
		default:
			return nil, fmt.Errorf("layout of inode %d at %d: %w", id, off, err)
		}
	}
}

// Renew returns segments that say how the data files of a file are written now, of which we have a layout for writing: what was written
// before may be made stable with them, and nothing else be done. It may be called while a recall of the layout is answered.
func (c *Client) Renew(ctx context.Context, id layout.FileID) ([]layout.Segment, error) {
	args := &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: layout.ToEOF, Renew: true}
	var retry backoff
	for {
		var r metarpc.LayoutResult
		err := c.do(ctx, metarpc.OpLayoutGet, metarpc.Cred{}, args, &r, nil)
		var status *metarpc.Error
		switch {
		case err == nil:
			return segmentsOf(r.Segments)
		case errors.As(err, &status) && status.Status == metarpc.StatusLayoutUnavailable:
			if !retry.wait(ctx) {
				return nil, fmt.Errorf("inode %d: %w (%w)", id, ctx.Err(), err)
			}
		default:
			return nil, fmt.Errorf("renewal of the layout of inode %d: %w", id, err)
		}
	}
}

// layoutGet asks the service once, and reports whether what it granted holds off.
func (c *Client) layoutGet(ctx context.Context, id layout.FileID, mode layout.IOMode, off, n int64, writes Writes) (bool, error) {
	ctx, stop := c.patient(ctx)
	defer stop()
	if err := c.grants.take(ctx, id); err != nil {
		return false, c.wrap(metarpc.OpLayoutGet, err)
	}
	if mode == layout.IOModeRead {
		n = layout.ToEOF // asking makes nothing, so have it all; asking to write does
	}
	args := &metarpc.LayoutGetArgs{ID: id, IOMode: mode, Off: off, Len: n, Append: writes == AtPlaces && !c.cache.plain(id), Await: writes == AtEnd}
	if mode == layout.IOModeRW && c.cfg.Near != nil {
		args.Near = c.cfg.Near()
	}
	granted, _, err := c.askLayout(ctx, args)
	if err != nil {
		return false, err
	}
	l := layout.Layout{Segments: granted}
	s, _ := l.Find(mode, off, 1)
	return s != nil, nil
}

// askedFor is which writes a layout is asked for.
func askedFor(args *metarpc.LayoutGetArgs) Writes {
	switch {
	case args.Append:
		return AtPlaces
	case args.Await:
		return AtEnd
	}
	return Anywhere
}

// askLayout asks for segments, which go into the cache. grants.take was called.
func (c *Client) askLayout(ctx context.Context, args *metarpc.LayoutGetArgs) (granted []layout.Segment, pinned metarpc.CopyRef, err error) {
	id := args.ID
	var bad error
	err = c.do(ctx, metarpc.OpLayoutGet, metarpc.Cred{}, args, nil, func(o *outcome) {
		switch {
		case o.err != nil || o.status != metarpc.StatusOK:
			c.grants.end(id, false)
		case o.abandoned: // nobody knows whether the file is still used
			c.grants.stray(id)
			c.grants.end(id, false)
		default:
			granted, pinned, bad = decodeLayout(o.raw)
			c.bind(granted)
			c.cache.add(id, granted, askedFor(args))
			c.grants.end(id, len(granted) > 0)
			if len(pinned.Handle) > 0 {
				c.pins.Store(id, pinned)
			}
		}
	})
	if err == nil {
		err = bad
	}
	return granted, pinned, err
}

// bind has what is granted on namespaces end with the session, which is that of the reply that is being read.
func (c *Client) bind(granted []layout.Segment) {
	c.mu.Lock()
	ended := c.session.ended
	c.mu.Unlock()
	for i := range granted {
		if !granted[i].OnNamespaces {
			continue
		}
		for m := range granted[i].Mirrors {
			files := granted[i].Mirrors[m].Servers
			for n := range files {
				if files[n].OnNamespace() {
					files[n].Ended = ended
				}
			}
		}
	}
}

func decodeLayout(raw []byte) (granted []layout.Segment, pinned metarpc.CopyRef, err error) {
	var r metarpc.LayoutResult
	if err := metarpc.DecodeResult(metarpc.OpLayoutGet, raw, &r); err != nil {
		return nil, pinned, err
	}
	granted, err = segmentsOf(r.Segments)
	return granted, r.Pinned, err
}

func segmentsOf(wire []metarpc.Segment) (list []layout.Segment, err error) {
	for i := range wire {
		s, err := wire[i].Layout()
		if err != nil {
			return nil, err
		}
		list = append(list, *s)
	}
	return list, nil
}

// Pin asks for a copy of an open file on one of the data servers of Config.Lending that has every byte at its offset, and is kept up to
// date until Release: the kernel may read it, or with IOModeRW write it, without asking. nil without an error means that there
// is none now. several says that there are other copies. The layout that comes with it is cached.
func (c *Client) Pin(ctx context.Context, id layout.FileID, mode layout.IOMode, copies metarpc.Pin) (df *layout.DataFile, several bool, err error) {
	args := &metarpc.LayoutGetArgs{ID: id, IOMode: mode, Len: layout.ToEOF, Pin: copies}
	if c.cfg.Lending != nil {
		args.Near = c.cfg.Lending()
	}
	if len(args.Near) == 0 {
		return nil, false, nil
	}
	if mode == layout.IOModeRW {
		args.Len = 1 // more than that would make more data files
	}
	ctx, stop := c.patient(ctx)
	defer stop()
	if err := c.grants.take(ctx, id); err != nil {
		return nil, false, c.wrap(metarpc.OpLayoutGet, err)
	}
	granted, pinned, err := c.askLayout(ctx, args)
	if err != nil || len(pinned.Handle) == 0 {
		return nil, false, err
	}
	for i := range granted {
		for m := range granted[i].Mirrors {
			file := &granted[i].Mirrors[m].Servers[0]
			if file.Device == pinned.Device && len(file.Handles) > 0 && bytes.Equal(file.Handles[0], pinned.Handle) {
				return file, len(granted[i].Mirrors) > 1, nil
			}
		}
	}
	return nil, false, fmt.Errorf("%w: the pinned copy of inode %d is not in its layout", metarpc.ErrMalformed, id)
}

// pinned is what is pinned of a file.
func (c *Client) pinned(id layout.FileID) metarpc.CopyRef {
	ref, _ := c.pins.Load(id)
	pin, _ := ref.(metarpc.CopyRef)
	return pin
}

// DropLayout forgets the cached segments of a file that reach past off, so that the service is asked again. Nothing is
// given back.
func (c *Client) DropLayout(id layout.FileID, off int64) {
	c.cache.recall(id, layout.Range{Off: off, Len: layout.ToEOF}, false)
}

// DropExtents is DropLayout of those segments that are on NVMe namespaces.
func (c *Client) DropExtents(id layout.FileID, off int64) {
	c.cache.recall(id, layout.Range{Off: off, Len: layout.ToEOF}, true)
}

// Forget forgets a file's layouts and gives them back, soon. Nothing of the file may be being written.
func (c *Client) Forget(id layout.FileID) {
	c.cache.recall(id, layout.Range{Len: layout.ToEOF}, false)
	c.grants.letGo(id)
}
