package meta

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

func (s *Service) setAttr(ctx context.Context, c *call, a *metarpc.SetAttrArgs) (*metarpc.AttrResult, error) {
	if a.Mask&metarpc.SetSize != 0 {
		return s.setSize(ctx, c, a)
	}
	if setsMtime(a.Mask) {
		if err := s.settleTimes(ctx, c, a); err != nil {
			return nil, err
		}
	}
	lease := s.lease(c.sess, a.ID, metarpc.LeaseAttrs)
	if err := s.settleSize(ctx, c.sess, a.ID); err != nil {
		return nil, err
	}
	arms := false
	r, err := change(ctx, s, c, func(t *tx) (*metarpc.AttrResult, error) {
		said, err := s.reports(ctx, a.ID)
		if err != nil {
			return nil, err
		}
		reported := said[0]
		row, raw, err := s.inode(ctx, a.ID)
		if errors.Is(err, errStale) {
			s.noLease(c.sess, a.ID)
			return s.setRemoved(ctx, c, a)
		}
		if err != nil {
			return nil, err
		}
		if err := s.maySet(ctx, c, &row, a); err != nil {
			return nil, err
		}
		before := row
		if err := s.set(ctx, t, s.caller(c), &row, a, now()); err != nil {
			return nil, err
		}
		if err := s.quotas.AdmitChange(ctx, &before, &row); err != nil {
			return nil, err
		}
		t.Recharge(&before, &row)
		if a.Mask&metarpc.ClearPrivileges != 0 && a.Mask&(metarpc.SetUID|metarpc.SetGID) == 0 && lost(&before, &row) {
			if err := s.disarm(t, c.sess, a.ID); err != nil {
				return nil, err
			}
		}
		arms = gained(&before, &row)
		if row != before {
			t.GuardEqual(schema.InodeKey(a.ID), raw)
			t.Put(schema.InodeKey(a.ID), schema.Encode(&row))
			t.affects(a.ID, metarpc.LeaseAttrs)
		}
		var counters catalog.Counters
		if isDir(row.Mode) {
			if counters, err = s.resetDirTime(ctx, t, a); err != nil {
				return nil, err
			}
		}
		if setsMtime(a.Mask) {
			reported.mtime = 0 // what was written before is older than what is set now
			t.onOutcome(func(committed bool) {
				if committed {
					s.forgetTimes(a.ID)
				}
			})
		}
		return &metarpc.AttrResult{Attr: s.shownWith(a.ID, attrOf(a.ID, &row, counters, reported.to(c.sess))), Lease: lease}, nil
	})
	if err == nil && arms {
		err = s.armed(ctx, c.sess, a.ID)
	}
	return r, err
}

// settleTimes has the other writers of a file make durable what they have written so far, with its time: of two times the
// later is kept, so nobody may still report one of before a says what it is. To ask them how far they have got would not
// do, as they report that once more when it is durable. Whoever writes from here on does so at the same time as a is
// carried out. The caller sees to his own reports.
func (s *Service) settleTimes(ctx context.Context, c *call, a *metarpc.SetAttrArgs) error {
	s.mu.Lock()
	f := s.files[a.ID]
	if !f.writtenByOthers(c.sess) {
		s.mu.Unlock()
		return nil
	}
	f.waiters++ // so that the record stays
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.waiters--
		s.changedFile(f)
	}()
	row, _, err := s.regular(ctx, a.ID)
	if err == nil {
		err = s.maySet(ctx, c, &row, a) // before others are troubled with recalls
	}
	if err == nil {
		err = s.recallLayouts(ctx, f, layout.Range{Len: layout.ToEOF}, func(cl *claim) bool { return cl.writer && cl.sess != c.sess })
	}
	return err
}

// forgetTimes drops the times that sessions have reported of a file.
func (s *Service) forgetTimes(id layout.FileID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.files[id]; f != nil {
		for _, cl := range f.claims {
			cl.mtime = 0
		}
		s.changedFile(f)
	}
}

func setsMtime(m metarpc.AttrMask) bool { return m&(metarpc.SetMtime|metarpc.SetMtimeNow) != 0 }

// resetDirTime takes the time of the last change in a directory back if a sets another one, since of the two the later
// is shown. Only this guards a counter row: creations in the directory that come in between make it start over.
func (s *Service) resetDirTime(ctx context.Context, t *tx, a *metarpc.SetAttrArgs) (catalog.Counters, error) {
	key := schema.CountersKey(a.ID)
	raws, err := s.engine.GetMany(ctx, [][]byte{key})
	if err != nil {
		return nil, err
	}
	raw := raws[0]
	counters, err := schema.DecodeCounters(key, raw)
	if err != nil || !setsMtime(a.Mask) || raw == nil {
		return counters, err
	}
	if len(counters) > schema.CounterMtime {
		counters[schema.CounterMtime] = 0
	}
	t.GuardEqual(key, raw)
	t.Put(key, catalog.EncodeCounters(counters...))
	return counters, nil
}

// cut is the setting of a file's size while data past it may exist or come to exist.
type cut struct {
	size  int64
	from  int64 // no layout is granted past it: size, or on namespaces 0
	phase cutPhase
}

// cutPhase is how far a cut has got, see the package comment.
type cutPhase uint8

const (
	cutRecalling  cutPhase = iota // the size is not set yet: reports are taken
	cutTelling                    // as before, but who has the file open is told that it gets shorter
	cutCommitting                 // it is being set: reports wait
	cutCutting                    // it is set: reports are clipped to it
)

// announced reports whether sessions have been told that the file is cut, and it is not yet. Who is told the size now would
// not hear of it a second time.
func (c *cut) announced() bool {
	return c != nil && (c.phase == cutTelling || c.phase == cutCommitting)
}

// setSize sets a size, and the other attributes of the same call.
func (s *Service) setSize(ctx context.Context, c *call, a *metarpc.SetAttrArgs) (*metarpc.AttrResult, error) {
	row, _, err := s.regular(ctx, a.ID)
	if err == nil {
		err = s.maySet(ctx, c, &row, a) // before others are troubled with recalls
	}
	if err != nil {
		return nil, err
	}
	lease := s.lease(c.sess, a.ID, metarpc.LeaseAttrs)
	f, err := s.beginSizing(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	f.cut = &cut{size: a.Size, from: a.Size}
	s.mu.Unlock()
	p := pending{s: s, by: c.sess}
	r, intent, err := s.commitSize(ctx, c, f, a, lease, &p)
	for errors.Is(err, errLaidOut) {
		r, intent, err = s.commitSize(ctx, c, f, a, lease, &p)
	}
	p.end()
	if err != nil || !intent {
		s.endSizing(f)
		return r, err
	}
	// From here on the truncation happens, whatever becomes of the call and its session.
	done := make(chan struct{})
	s.tasks.Go(func() { // owns the file's sizing; ends when the data files are cut or the file is gone, or with s.ctx
		defer close(done)
		s.cutData(f)
	})
	select {
	case <-done:
		return r, s.ctx.Err()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// beginSizing waits until nobody else finds out or sets the file's size, and takes that right.
func (s *Service) beginSizing(ctx context.Context, id layout.FileID) (*file, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	for f.sizing {
		f.want()
		if err := s.wait(ctx, f); err != nil {
			return nil, err
		}
	}
	f.sizing = true
	return f, nil
}

func (s *Service) endSizing(f *file) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.sizing, f.cut, f.stop = false, nil, nil
	s.changedFile(f)
}

// errLaidOut: while layouts were recalled a file has got data files on namespaces, and has to be recalled as a whole.
var errLaidOut = errors.New("it has got data files on namespaces meanwhile")

// commitSize recalls layouts and commits the size, with an intent if data has to be cut. The caller has the file's
// sizing, and has made the cut.
func (s *Service) commitSize(ctx context.Context, c *call, f *file, a *metarpc.SetAttrArgs, lease metarpc.Lease, p *pending) (r *metarpc.AttrResult, intent bool, err error) {
	// What was reserved at the end of the file is somewhere else, or nowhere, once it has another size. A session that
	// sets one has no append under way.
	s.mu.Lock()
	if cl := f.claimOf(c.sess); cl != nil {
		cl.endPlaces()
	}
	s.mu.Unlock()
	if err := s.recallPlaces(ctx, f); err != nil {
		return nil, false, err
	}
	if err := s.recall(ctx, f, c.sess); err != nil {
		return nil, false, err
	}
	// Leases go before the commit is begun, for which reports have to wait that a client makes before it answers.
	s.mu.Lock()
	f.cut.phase = cutTelling
	var readers []*session
	for _, cl := range f.claims {
		if cl.open && cl.sess != c.sess {
			readers = append(readers, cl.sess)
		}
	}
	s.mu.Unlock()
	items := []metarpc.LeaseItem{{ID: f.id, Lease: metarpc.LeaseAttrs | metarpc.LeaseData}}
	if err := p.recall(ctx, items, readers...); err != nil {
		return nil, false, err
	}
	// Caches that stay are pinned, and are cut like the rest.
	if s.caches.has(f.id) {
		if _, _, err := s.dropCaches(ctx, f.id, anyCache); err != nil {
			return nil, false, err
		}
	}
	r, err = change(ctx, s, c, func(t *tx) (*metarpc.AttrResult, error) {
		s.mu.Lock()
		f.cut.phase = cutCommitting
		written := slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.writer || cl.report != report{} })
		pinned := len(f.pinned()) > 0
		writer := f.reported().writer
		f.crowd(c.sess)
		s.mu.Unlock()
		t.onOutcome(func(committed bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			f.cut.phase = cutTelling
			if committed {
				f.moves++
				f.reach = 0
				f.cut.phase = cutCutting
				for _, cl := range f.claims {
					cl.end = min(cl.end, a.Size)
					cl.mtime = 0
				}
			}
			s.changedFile(f)
		})
		row, raw, err := s.regular(ctx, f.id)
		if err != nil {
			return nil, err
		}
		var l schema.Layout
		rawLayout, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(f.id), &l)
		if err != nil {
			return nil, err
		}
		if f.cut.from > 0 && s.cfg.Files.OnNamespaces(l) {
			return nil, errLaidOut
		}
		intent = rawLayout != nil && (written || a.Size < row.Size || pinned && a.Size > row.Size)
		before, at := row, now()
		if err := s.maySet(ctx, c, &row, a); err != nil {
			return nil, err
		}
		if err := s.set(ctx, t, s.caller(c), &row, a, at); err != nil {
			return nil, err
		}
		if err := s.disarm(t, c.sess, f.id); err != nil { // a file that is executed is not cut either
			return nil, err
		}
		if !setsMtime(a.Mask) {
			row.Mtime = at
		}
		row.Size = a.Size
		row.Used = usedOfCut(&before, a.Size, intent || rawLayout == nil)
		if err := s.quotas.AdmitChange(ctx, &before, &row); err != nil {
			return nil, err
		}
		t.Recharge(&before, &row)
		t.GuardEqual(schema.InodeKey(f.id), raw)
		t.Put(schema.InodeKey(f.id), schema.Encode(&row))
		if intent {
			t.Put(schema.TruncateKey(f.id), schema.Encode(&schema.Truncate{Size: a.Size}))
		}
		return &metarpc.AttrResult{Attr: attrOf(f.id, &row, nil, report{writer: writer}.to(c.sess)), Lease: lease}, nil
	})
	return r, intent, err
}

// recall is recallRange of what lies behind the size of a cut, except from by, who sees to that itself. All of a file on namespaces is recalled, and from
// everybody: what by reads there while the file is cut may be somebody else's then, and who goes on with extents of before the cut for what
// he writes in front of it forgets that he has written when he gets newer ones.
func (s *Service) recall(ctx context.Context, f *file, by *session) error {
	such := others(by)
	on, err := s.onNamespaces(ctx, f.id) // also if nobody has it open: somebody may open it before it is cut
	if err != nil {
		return err
	}
	if on {
		such = others(nil)
		s.mu.Lock()
		f.cut.from = 0
		s.mu.Unlock()
	}
	return s.recallRange(ctx, f, layout.Range{Off: f.cut.from, Len: layout.ToEOF}, such)
}

// recallRange is recallLayouts that also waits until those are fenced who have lost their sessions. The caller has seen to it that
// nothing is granted in the range meanwhile, so none of such has any of it when it returns.
func (s *Service) recallRange(ctx context.Context, f *file, r layout.Range, such func(*claim) bool) error {
	if err := s.recallLayouts(ctx, f, r, such); err != nil {
		return err
	}
	if err := s.awaitKnown(ctx, f.id); err != nil {
		return err
	}
	// What a session still writes that was ended, now or before, would come after the cut.
	s.mu.Lock()
	defer s.mu.Unlock()
	for slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.unfenced || cl.unbarred && such(cl) }) {
		if err := s.wait(ctx, f); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, cl := range f.claims {
		if such(cl) {
			cl.ranges, cl.shares, cl.reads = without(cl.ranges, r), without(cl.shares, r), without(cl.reads, r)
		}
	}
	return nil
}

// awaitKnown waits for s.quiet if a file is on namespaces.
func (s *Service) awaitKnown(ctx context.Context, id layout.FileID) error {
	select {
	case <-s.quiet:
		return nil
	default:
	}
	if on, err := s.onNamespaces(ctx, id); !on {
		return err
	}
	select {
	case <-s.quiet:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// cutData cuts the data files of a file whose cut is committed, and ends its sizing.
func (s *Service) cutData(f *file) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.mu.Lock()
	f.stop = cancel
	size := f.cut.size
	s.mu.Unlock()
	retry.Persist(ctx, s.log, fmt.Sprintf("truncation of inode %d", f.id), func() error {
		keys := [][]byte{schema.InodeKey(f.id), schema.LayoutKey(f.id)}
		raw, err := s.engine.GetMany(ctx, keys)
		if err != nil || raw[0] == nil {
			return err // no inode: its intent went with it
		}
		for raw[1] != nil {
			var l schema.Layout
			if err := schema.DecodeRow(keys[1], raw[1], &l); err != nil {
				return err
			}
			err := s.cfg.Files.Truncate(ctx, l, size)
			if err == nil {
				// A kernel that reads a data file without asking knows no other end.
				err = s.cfg.Files.Grow(ctx, l, s.maybePinned(f, &l), size)
			}
			if err == nil {
				break
			}
			late := lateCopies(err)
			if late == nil {
				return err
			}
			if kept, e := s.giveUp(ctx, f.id, late); e != nil || kept {
				return cmp.Or(e, err) // those that are pinned cannot be given up
			}
			// Once more: a copy may have become the last good one meanwhile.
			if raw, err = s.engine.GetMany(ctx, keys); err != nil {
				return err
			}
		}
		// It must not be repeated by a later instance, when there may be new data: so this is durable before anybody
		// gets a layout again.
		var b catalog.Batch
		b.Delete(schema.TruncateKey(f.id))
		return s.engine.Commit(ctx, &b)
	})
	if s.ctx.Err() == nil {
		s.endSizing(f)
	}
}

// awaitCut waits until the file is not being cut.
func (s *Service) awaitCut(ctx context.Context, id layout.FileID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[id]
	if f == nil {
		return nil
	}
	for f.cut != nil {
		if err := s.wait(ctx, f); err != nil {
			return err
		}
	}
	s.changedFile(f)
	return nil
}
