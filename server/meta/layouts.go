package meta

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// layoutWait is how long a call waits for a truncation to end, or for its turn, before the client is told to ask again, so that such calls
// do not keep the slots that the client needs in order to give back what the truncation waits for.
const layoutWait = 500 * time.Millisecond

func (s *Service) layoutGet(ctx context.Context, c *call, a *metarpc.LayoutGetArgs) (*metarpc.LayoutResult, error) {
	row, _, err := s.regular(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	if a.Renew {
		return s.renewed(ctx, c.sess, a.ID)
	}
	if err := s.mayTransfer(c.sess, a); err != nil {
		return nil, err
	}
	if a.IOMode == layout.IOModeRW && a.Pin == metarpc.PinNone {
		return s.grant(ctx, c, a, row)
	}
	r := new(metarpc.LayoutResult)
	var l schema.Layout
	raw, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(a.ID), &l)
	if err != nil {
		return r, err
	}
	if a.IOMode == layout.IOModeRW {
		// A kernel that writes by itself does not stop where a quota ends.
		limited, err := s.quotas.Limited(ctx, a.ID, &row)
		if err != nil {
			return r, err
		}
		if !limited && s.cfg.Files.MayBeWhole(l, row, a.Near) {
			return s.grant(ctx, c, a, row)
		}
		return r, nil // who wants it pinned does not want it otherwise
	}
	if raw == nil {
		return r, nil
	}
	if len(l.Caches) > 0 {
		s.caches.touch(a.ID, 0)
	}
	if s.cfg.Files.OnNamespaces(l) {
		return s.grantRead(ctx, c, a)
	}
	wanted := layout.Range{Off: a.Off, Len: a.Len}
	for _, seg := range s.cfg.Files.Segments(l, layout.IOModeRead) {
		if wanted.Overlaps(layout.Range{Off: seg.Off, Len: seg.Len}) {
			r.Segments = append(r.Segments, seg)
		}
	}
	if a.Pin != metarpc.PinNone {
		r.Pinned, err = s.pin(ctx, c.sess, a, l)
	}
	return r, err
}

// grantRead answers a LayoutGet for reading of a file on namespaces.
func (s *Service) grantRead(ctx context.Context, c *call, a *metarpc.LayoutGetArgs) (*metarpc.LayoutResult, error) {
	if err := s.awaitQuiet(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(a.ID)
	f.waiters++ // so that the record stays
	ended := func() {
		f.waiters--
		s.changedFile(f)
	}
	wanted := layout.Range{Off: a.Off, Len: a.Len}
	if a.Len == layout.ToEOF {
		wanted.Len = 1 // how much of that must be there now is not said
	}
	got, _, err := s.awaitTurn(ctx, f, f.claimOf(c.sess), purpose{mode: layout.IOModeRead, exclusive: true}, wanted)
	if err != nil {
		ended()
		return nil, err
	}
	r := new(metarpc.LayoutResult)
	f.granting++
	s.mu.Unlock()
	r.Segments, err = s.extents(ctx, a, got)
	s.mu.Lock()
	if cl := f.claimOf(c.sess); err == nil && (cl == nil || !slices.ContainsFunc(cl.reads, func(r layout.Range) bool { return r.Contains(got.Off, got.Len) })) {
		err = refusef(metarpc.StatusLayoutUnavailable, "inode %d was closed, or its layouts were given back", a.ID)
	}
	if err != nil {
		f.granting--
		ended()
		return nil, err
	}
	c.after = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.granting--
		ended()
	}
	return r, nil
}

// extents are the segments of a file on namespaces that somebody has got who asked for a, with what can be told of them at once.
func (s *Service) extents(ctx context.Context, a *metarpc.LayoutGetArgs, got layout.Range) ([]metarpc.Segment, error) {
	// The row as it is now: whoever changes it must have back what is granted by it, and finds that this is.
	var l schema.Layout
	raw, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(a.ID), &l)
	if err == nil && raw == nil {
		err = errStale
	}
	if err != nil {
		return nil, err
	}
	var segments []metarpc.Segment
	for _, seg := range clipped(s.cfg.Files.Segments(l, a.IOMode), got.Off, got.End()) {
		// There may be more extents than can be told: what is asked for comes first. What lies before it may be in other data files,
		// which have no space there.
		from := a.Off - a.Off%min(seg.StripeUnit, rangeUnit)
		segments = append(segments, clipped([]metarpc.Segment{seg}, from, got.End())...)
	}
	segments, err = s.cfg.Files.Extents(ctx, l, segments)
	asked := func(seg metarpc.Segment) bool { return (layout.Range{Off: seg.Off, Len: seg.Len}).Contains(a.Off, 1) }
	if err == nil && a.IOMode == layout.IOModeRW && !slices.ContainsFunc(segments, asked) {
		err = refusef(metarpc.StatusLayoutUnavailable, "inode %d: its data files have no space at %d, or have lost it", a.ID, a.Off)
	}
	return segments, err
}

// renewed tells a session how the data files are written now, for what it has written and must make stable. It grants nothing, so
// there is no turn to wait for: others may be waiting for this one to give back what it has. How namespaces are written does not change.
func (s *Service) renewed(ctx context.Context, sess *session, id layout.FileID) (*metarpc.LayoutResult, error) {
	s.mu.Lock()
	cl := sess.claims[id]
	if cl == nil || !cl.writer {
		s.mu.Unlock()
		return nil, errPerm
	}
	err := s.awaitFence(ctx, cl.file)
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	r := new(metarpc.LayoutResult)
	var l schema.Layout
	if _, err = schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l); err == nil {
		r.Segments = s.cfg.Files.Segments(l, layout.IOModeRW)
		err = s.engine.Commit(ctx, new(catalog.Batch)) // a copy that it does not have must not become good again in a crash
	}
	return r, err
}

// awaitFence waits until those are fenced who wrote f before; s.mu is held, and released meanwhile.
func (s *Service) awaitFence(ctx context.Context, f *file) error {
	ctx, cancel := context.WithTimeoutCause(ctx, layoutWait, refusef(metarpc.StatusLayoutUnavailable, "inode %d is being fenced", f.id))
	defer cancel()
	for f.unfenced() {
		if err := s.wait(ctx, f); err != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// grant answers a LayoutGet for writing.
func (s *Service) grant(ctx context.Context, c *call, a *metarpc.LayoutGetArgs, row schema.Inode) (*metarpc.LayoutResult, error) {
	allowed, err := s.quotas.Allowance(ctx, a.ID, &row, a.Off)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(a.ID)
	cl := f.claim(c.sess)
	if !cl.writer && s.grace { // somebody may rely on a lease that only the earlier instance knew of
		s.changedFile(f)
		s.mu.Unlock()
		err := s.awaitGrace(ctx)
		s.mu.Lock()
		if err != nil {
			return nil, err
		}
		f = s.file(a.ID)
		cl = f.claim(c.sess)
	}
	for cl.returning || f.removing { // a row made now could outlive its claim, or its file
		if err := s.wait(ctx, f); err != nil {
			return nil, err
		}
		cl = f.claim(c.sess)
	}
	// Before there is a row, so that a truncation that begins now recalls what is granted here, and before leases are
	// recalled, so that nobody else gets one.
	cl.appends = a.Append && (cl.appends || !cl.writer)
	cl.becomeWriter()
	appends := a.Append || a.Await || cl.awaited || len(cl.places) > 0
	cl.assigning++
	assigned := func() {
		cl.assigning--
		s.changedFile(f)
	}
	s.mu.Unlock()
	p := pending{s: s, by: c.sess}
	err = p.recall(ctx, []metarpc.LeaseItem{{ID: a.ID, Lease: metarpc.LeaseAttrs | metarpc.LeaseData}})
	p.end()
	s.mu.Lock()
	var got layout.Range
	if err == nil {
		got, err = s.awaitGrant(ctx, f, cl, a.Off)
		got.Len = min(got.End(), allowed) - got.Off
	}
	if err != nil {
		assigned()
		return nil, err
	}
	var l schema.Layout
	on, shared := false, false
	for again := true; again; {
		gates := f.gates
		s.mu.Unlock()
		drop, thaw := s.droppable(a.ID)
		l, err = s.cfg.Files.Assign(ctx, a.ID, row, a.Off, min(a.Len, got.End()-a.Off), c.sess.id, appends, a.Near, drop)
		thaw()
		if err == nil {
			err = s.tellGranted(ctx, a.ID, &l)
		}
		if err == nil && len(l.Caches) > 0 {
			_, l.Caches, err = s.dropCaches(ctx, a.ID, anyCache) // but those that are pinned, which are written, too
		}
		if err != nil && ctx.Err() != nil { // the clean-up of the session is to find the writer row if there is to be one
			err = errors.Join(err, s.cfg.Files.AwaitKnown(s.ctx, a.ID))
		}
		if err != nil {
			err = s.assignError(ctx, c, a.ID, err)
		} else if on = s.cfg.Files.OnNamespaces(l); on {
			err = s.awaitQuiet(ctx)
		}
		s.mu.Lock()
		if err == nil {
			why := purpose{mode: layout.IOModeRW, exclusive: s.exclusive(&l), pins: a.Pin != metarpc.PinNone}
			got, shared, err = s.awaitTurn(ctx, f, cl, why, layout.Range{Off: a.Off, Len: a.Len})
		}
		if err != nil {
			if errors.Is(err, errStale) {
				cl.writer = false // whatever row there was went with the file
			}
			assigned()
			return nil, err
		}
		got.Len = min(got.End(), allowed) - got.Off
		cl.awaited = cl.awaited || appends || on
		// A gate that came meanwhile had nothing to recall here, and a layout of before it lacks the copies that it began.
		again = f.gates != gates
	}
	f.granting++
	if allowed < layout.ToEOF {
		f.reach = max(f.reach, min(layout.Range{Off: a.Off, Len: a.Len}.End(), allowed))
	}
	r := new(metarpc.LayoutResult)
	if on {
		s.mu.Unlock()
		r.Segments, err = s.extents(ctx, a, got)
		s.mu.Lock()
		if err != nil {
			f.granting--
			assigned()
			return nil, err
		}
	} else {
		r.Segments = clipped(s.cfg.Files.Segments(l, layout.IOModeRW), got.Off, got.End())
		for i := range r.Segments {
			r.Segments[i].Shared = shared
		}
	}
	c.after = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.granting--
		assigned()
	}
	if a.Pin != metarpc.PinNone {
		s.mu.Unlock()
		r.Pinned, err = s.pin(ctx, c.sess, a, l)
		s.mu.Lock()
	}
	return r, err
}

// grantNew grants the caller a layout for writing of a file that t makes and openNew has opened, if nothing has to be waited for: else none, and the
// client asks when it writes.
func (s *Service) grantNew(ctx context.Context, t *tx, c *call, id layout.FileID, row *schema.Inode, near []layout.DeviceID) ([]metarpc.Segment, error) {
	limited, err := s.quotas.Limited(ctx, id, row)
	if err != nil || limited {
		return nil, err
	}
	l, settle, ok := s.cfg.Files.AssignNew(&t.Batch, id, *row, c.sess.id, near)
	if !ok {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	cl := f.claim(c.sess)
	// Before there is a row, as in grant. Nobody else has anything of the file yet.
	cl.becomeWriter()
	cl.assigning++
	cl.keeps(layout.IOModeRW, wholeFile)
	cl.granted = time.Now()
	f.granting++
	over := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.granting--
		cl.assigning--
		s.changedFile(f)
	}
	t.onOutcome(func(committed bool) {
		settle(t.err)
		if committed {
			c.after = over
		} else {
			over() // the claim goes with the file
		}
	})
	return s.cfg.Files.Segments(l, layout.IOModeRW), nil
}

// awaitTurn is awaitGrant for a session that must be the only one to write what it gets, or read it while nobody writes it, unless that is shared.
func (s *Service) awaitTurn(ctx context.Context, f *file, cl *claim, why purpose, wanted layout.Range) (got layout.Range, shared bool, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, layoutWait, refusef(metarpc.StatusLayoutUnavailable,
		"inode %d is being used by another client there", f.id))
	defer cancel()
	for {
		if got, err = s.awaitGrant(ctx, f, cl, wanted.Off); err != nil {
			return got, false, err
		}
		if why.mode == layout.IOModeRead && (cl == nil || !cl.open) {
			return got, false, refusef(metarpc.Status(syscall.EBADF), "inode %d is not open", f.id)
		}
		held, shared, again, err := s.holdRange(ctx, f, cl, why, wanted.Off, min(wanted.Len, got.End()-wanted.Off))
		if err != nil {
			return got, false, err
		}
		if !again {
			from := max(got.Off, held.Off)
			return layout.Range{Off: from, Len: min(got.End(), held.End()) - from}, shared, nil
		}
	}
}

// awaitGrant returns the range around off of which a layout may be granted to a session, whose claim may be nil. It waits
// for the end of a truncation below off, for data that is being copied there, and until ended sessions that wrote the
// file are fenced. s.mu is held, and released meanwhile.
func (s *Service) awaitGrant(ctx context.Context, f *file, cl *claim, off int64) (got layout.Range, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, layoutWait, refusef(metarpc.StatusLayoutUnavailable,
		"inode %d is being truncated, copied or fenced", f.id))
	defer cancel()
	for f.uncut(cl, off) <= off || f.gate.Contains(off, 1) || f.unfenced() {
		if f.gate.Contains(off, 1) {
			f.want()
		}
		if err := s.wait(ctx, f); err != nil {
			return got, context.Cause(ctx)
		}
	}
	from, limit := int64(0), f.uncut(cl, off)
	switch {
	case f.gate.Len == 0:
	case off < f.gate.Off:
		limit = min(limit, f.gate.Off)
	default:
		from = f.gate.End()
	}
	return layout.Range{Off: from, Len: limit - from}, nil
}

// uncut is where that ends of which layouts may be granted at off although f may be being cut. An append that has its
// place since before that is finished there first. Service.mu is held.
func (f *file) uncut(cl *claim, off int64) (end int64) {
	if f.cut == nil {
		return layout.ToEOF
	}
	end = f.cut.from
	if cl != nil && f.cut.phase == cutRecalling {
		for _, p := range cl.places {
			if p.off <= off && off < p.end {
				end = max(end, p.end)
			}
		}
	}
	return end
}

// clipped cuts off what segments cover before from and from limit on.
func clipped(segments []metarpc.Segment, from, limit int64) []metarpc.Segment {
	for i := range segments {
		seg := &segments[i]
		r := layout.Range{Off: seg.Off, Len: seg.Len}
		off := max(seg.Off, from)
		if end := min(r.End(), limit); end < r.End() || off > seg.Off {
			seg.Off, seg.Len = off, end-off
		}
	}
	return slices.DeleteFunc(segments, func(seg metarpc.Segment) bool { return seg.Len <= 0 })
}

// assignError is what a client is told when its file got no data files.
func (s *Service) assignError(ctx context.Context, c *call, id layout.FileID, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, syscall.ESTALE):
		return errStale
	case errors.Is(err, syscall.ENOSPC):
		return refusef(errNoSpace.Status, "%v", err)
	case errors.Is(err, syscall.EFBIG):
		return refusef(metarpc.Status(syscall.EFBIG), "%v", err)
	case errors.Is(err, catalog.ErrFull), errors.Is(err, catalog.ErrClosed), errors.Is(err, catalog.ErrCorrupt), errors.Is(err, catalog.ErrInvalid):
		return err
	}
	if _, _, gone := s.inode(ctx, id); errors.Is(gone, errStale) {
		return errStale
	}
	return refusef(metarpc.StatusLayoutUnavailable, "%v", err)
}

// layoutReturn forgets that the session may write files, except where it still has something to report, and that it keeps others from writing
// what it reads. That may be lost in a crash, which then costs a needless look at the data files, so it does not wait for the disk.
func (s *Service) layoutReturn(ctx context.Context, c *call, a *metarpc.LayoutReturnArgs) (*metarpc.Empty, error) {
	var keys [][]byte
	var returning []*claim
	s.mu.Lock()
	for _, id := range a.IDs {
		cl := c.sess.claims[id]
		if cl == nil || cl.assigning > 0 {
			continue
		}
		if len(cl.reads) > 0 {
			cl.reads = nil
			s.changedFile(cl.file)
		}
		if !cl.writer || cl.report != (report{}) || len(cl.places) > 0 {
			continue
		}
		cl.writer, cl.appends, cl.awaited, cl.unsure, cl.returning, cl.ranges, cl.shares = false, false, false, false, true, nil, nil
		returning = append(returning, cl)
		keys = append(keys, schema.WriterKey(id, c.sess.id))
	}
	s.mu.Unlock()
	var err error
	for part := range slices.Chunk(keys, s.engine.Caps().MaxKeys) {
		b := catalog.Batch{Deletes: part, Durability: catalog.NoSync}
		failed := s.engine.Commit(ctx, &b)
		if errors.Is(failed, catalog.ErrUnknown) { // a claim that counts as a writer's has its row
			failed = catalog.FindOut(s.ctx, s.engine, &b)
		}
		err = errors.Join(err, failed)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cl := range returning {
		cl.writer, cl.returning = err != nil, false
		s.changedFile(cl.file)
	}
	return &metarpc.Empty{}, err
}

func (s *Service) layoutCommit(ctx context.Context, c *call, a *metarpc.LayoutCommitArgs) (*metarpc.LayoutCommitResult, error) {
	// One report for each file, so that a batch writes no row twice.
	index := make(map[layout.FileID]int, len(a.Reports))
	var reports []fileReport
	for _, r := range s.honest(c.sess, a.Reports) {
		i, ok := index[r.ID]
		if !ok {
			i = len(reports)
			index[r.ID] = i
			reports = append(reports, fileReport{id: r.ID})
		}
		reports[i].end = max(reports[i].end, r.End)
		reports[i].mtime = max(reports[i].mtime, r.Mtime)
		reports[i].atime = max(reports[i].atime, r.Atime)
		reports[i].written = append(reports[i].written, r.Written...)
		if r.Set != (metarpc.Times{}) {
			reports[i].set = r.Set
		}
		reports[i].reserved = append(reports[i].reserved, r.Reserved...)
		if r.Used != 0 {
			reports[i].used = r.Used
		}
	}
	s.mu.Lock()
	for _, r := range a.Reports {
		s.settlePlaces(c.sess.claims[r.ID], r.Ended, r.GivenUp)
	}
	s.mu.Unlock()
	if err := s.validate(ctx, c.sess, reports); err != nil {
		return nil, err
	}
	p := pending{s: s, by: c.sess}
	defer p.end()
	err := p.recall(ctx, s.news(c.sess, reports))
	switch {
	case err != nil:
	case a.Provisional:
		err = s.note(ctx, c.sess, reports)
	default:
		size := max(1, s.engine.Caps().MaxKeys/5) // a guard, a put and three deltas for each
		for part := range slices.Chunk(reports, size) {
			if err = s.record(ctx, c.sess, part); err != nil {
				break
			}
		}
	}
	if err != nil {
		return nil, err
	}
	r := &metarpc.LayoutCommitResult{Attrs: make([]metarpc.Attr, len(a.Reports))}
	for i := range a.Reports {
		r.Attrs[i] = reports[index[a.Reports[i].ID]].attr
	}
	return r, nil
}

// validate makes valid what a session says it has written to namespaces. Once the report is durable, that is.
func (s *Service) validate(ctx context.Context, sess *session, reports []fileReport) error {
	for i := range reports {
		r := &reports[i]
		if len(r.written) == 0 {
			continue
		}
		s.mu.Lock()
		cl := sess.claims[r.id]
		writes := cl != nil && cl.writer
		s.mu.Unlock()
		if !writes {
			return refusef(errPerm.Status, "inode %d: blocks to make valid, from a session that has no layout for writing them", r.id)
		}
		err := s.cfg.Files.Validate(ctx, r.id, r.written)
		if errors.Is(err, syscall.ESTALE) {
			return refusef(errStale.Status, "inode %d: %v", r.id, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// news is what reports make others know wrong: on a file that the session may write they have no leases anyway. So
// clients that answer a recall, and report what they had a layout for, wait for nobody.
func (s *Service) news(sess *session, reports []fileReport) (items []metarpc.LeaseItem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range reports {
		r := &reports[i]
		if cl := sess.claims[r.id]; r.report != (report{}) && (cl == nil || !cl.writer) {
			items = append(items, metarpc.LeaseItem{ID: r.id, Lease: metarpc.LeaseAttrs})
		}
	}
	return items
}

// fileReport is a session's report of one file, and what the file looks like with it.
type fileReport struct {
	id layout.FileID
	report
	atime    int64             // of an inode of any type; kept if the report is durable
	written  []metarpc.Written // made valid before the report is taken
	set      metarpc.Times     // before what is reported
	reserved []metarpc.Place   // not written yet
	used     metarpc.Used      // with what is reported, which a durable report alone says
	attr     metarpc.Attr      // zero if there is no such inode, or not one that can have such a report
}

// of reports whether an inode of this mode can have the report.
func (r *fileReport) of(mode uint32) bool {
	return isRegular(mode) || r.atime != 0 && r.report == report{}
}

func idsOf(reports []fileReport) []layout.FileID {
	ids := make([]layout.FileID, len(reports))
	for i := range reports {
		ids[i] = reports[i].id
	}
	return ids
}

// note keeps reports in memory.
func (s *Service) note(ctx context.Context, sess *session, reports []fileReport) error {
	before := s.said(idsOf(reports)...)
	rows, _, counters, err := s.reportedInodes(ctx, reports)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range reports {
		r := &reports[i]
		if rows[i] == nil {
			continue
		}
		if !isRegular(rows[i].Mode) {
			r.attr = attrOf(r.id, rows[i], counters[i], report{})
			continue
		}
		f := s.file(r.id)
		now, err := s.clip(ctx, f, r.report)
		if err != nil {
			return err
		}
		cl := f.claim(sess)
		cl.report = cl.report.and(now)
		f.raise(now.end)
		s.reclaimPlaces(cl, r.reserved, rows[i].Size)
		cl.unsure = s.awaits(cl) // there may be places besides
		r.attr = attrOf(r.id, rows[i], counters[i], f.reported().and(before[i]).to(sess))
		f.hideCut(&r.attr)
		f.hidePlaces(&r.attr)
		s.changedFile(f)
	}
	return nil
}

// clip takes from a report what a truncation under way has cut off or will. While it is not known whether the new size
// is committed it waits. s.mu is held, and released while it waits.
func (s *Service) clip(ctx context.Context, f *file, r report) (report, error) {
	for f.cut != nil && f.cut.phase == cutCommitting {
		if err := s.wait(ctx, f); err != nil {
			return r, err
		}
	}
	if f.cut != nil && f.cut.phase == cutCutting {
		r.end = min(r.end, f.cut.size)
	}
	return r, nil
}

// hideCut keeps a session that was told of a cut from learning the size before it as if it came after; Service.mu is held.
func (f *file) hideCut(a *metarpc.Attr) {
	if f.cut.announced() {
		a.Size = min(a.Size, f.cut.size)
	}
}

// reportedInodes reads the inodes that reports are about: nil where there is none that can have the report. Counters are
// those of directories.
func (s *Service) reportedInodes(ctx context.Context, reports []fileReport) (rows []*schema.Inode, raw [][]byte, counters []catalog.Counters, err error) {
	keys := make([][]byte, len(reports))
	for i := range reports {
		keys[i] = schema.InodeKey(reports[i].id)
	}
	raw, err = s.engine.GetMany(ctx, keys)
	if err != nil {
		return nil, nil, nil, err
	}
	rows, counters = make([]*schema.Inode, len(reports)), make([]catalog.Counters, len(reports))
	for i := range raw {
		if raw[i] == nil {
			continue
		}
		row := new(schema.Inode)
		if err := schema.DecodeRow(keys[i], raw[i], row); err != nil {
			return nil, nil, nil, err
		}
		if !reports[i].of(row.Mode) {
			continue
		}
		rows[i] = row
		if isDir(row.Mode) {
			if counters[i], err = schema.ReadCounters(ctx, s.engine, reports[i].id); err != nil {
				return nil, nil, nil, err
			}
		}
	}
	return rows, raw, counters, nil
}

// record makes reports durable. Files that others keep changing do not hold up the rest for ever: after some tries it
// goes on with half of the reports at a time.
func (s *Service) record(ctx context.Context, sess *session, reports []fileReport) error {
	const tries = 8
	for try := range retry.Tries {
		if try == tries && len(reports) > 1 {
			half := len(reports) / 2
			if err := s.record(ctx, sess, reports[:half]); err != nil {
				return err
			}
			return s.record(ctx, sess, reports[half:])
		}
		if err := retry.BackOff(ctx, try); err != nil {
			return err
		}
		err := s.tryRecord(ctx, sess, reports)
		guard := (*catalog.GuardError)(nil)
		if !errors.As(err, &guard) && !errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown) {
			return err
		}
	}
	return errContended
}

func (s *Service) tryRecord(ctx context.Context, sess *session, reports []fileReport) error {
	before := s.said(idsOf(reports)...)
	rows, raw, counters, err := s.reportedInodes(ctx, reports)
	if err != nil {
		return err
	}
	clips := make([]report, len(reports))
	used := make([]metarpc.Used, len(reports))
	s.mu.Lock()
	for i := range reports {
		clips[i] = reports[i].report
		if f := s.files[reports[i].id]; f != nil {
			if clips[i], err = s.clip(ctx, f, clips[i]); err != nil {
				s.mu.Unlock()
				return err
			}
			f.raise(clips[i].end)
			used[i] = f.claimOf(sess).counts(reports[i].used)
			s.changedFile(f)
		}
	}
	s.mu.Unlock()
	t := usage.Change{Shard: s.cfg.Shard}
	at := now()
	for i, row := range rows {
		if row == nil {
			continue
		}
		key := schema.InodeKey(reports[i].id)
		before := *row
		if isRegular(row.Mode) {
			applyTimes(row, reports[i].set)
			applyReport(row, clips[i], at)
			if reports[i].writes() {
				row.Used = used[i]
			}
		}
		row.Atime = max(row.Atime, reports[i].atime)
		t.Recharge(&before, row)
		t.GuardEqual(key, raw[i])
		if *row != before {
			t.Put(key, schema.Encode(row))
		}
	}
	// Also if nothing changes: then it is the guards that say so durably.
	err = s.engine.Commit(ctx, &t.Batch)
	if t.ChangesUsage() {
		s.usage.Soon()
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, row := range rows {
		reports[i].attr = metarpc.Attr{}
		if row == nil {
			continue
		}
		reported := before[i]
		f := s.files[reports[i].id]
		if f != nil {
			if reports[i].set.Mask&metarpc.SetMtime != 0 {
				reported.mtime = 0 // nobody else writes, and what was reported was written before that
				for _, cl := range f.claims {
					cl.mtime = 0
				}
			}
			if cl := f.claimOf(sess); cl != nil {
				if cl.end <= row.Size {
					cl.end = 0
				}
				if cl.mtime <= row.Mtime {
					cl.mtime = 0
				}
			}
			f.moves++
			reported = reported.and(f.reported())
		}
		reports[i].attr = attrOf(reports[i].id, row, counters[i], reported.to(sess))
		if f != nil {
			f.hideCut(&reports[i].attr)
			f.hidePlaces(&reports[i].attr)
			s.changedFile(f)
		}
	}
	return nil
}
