package meta

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// layoutError records which copies of a file may lack data, and returns when nobody takes them for good any more.
func (s *Service) layoutError(ctx context.Context, c *call, a *metarpc.LayoutErrorArgs) (*metarpc.Empty, error) {
	s.mu.Lock()
	cl := c.sess.claims[a.ID]
	writes := cl != nil && (cl.writer || cl.assigning > 0)
	s.mu.Unlock()
	if !writes {
		return nil, errPerm // what it wrote in an earlier session is settled with that
	}
	s.log.Debug("a client could not write copies of a file", "inode", a.ID, "copies", len(a.Copies), "session", c.sess,
		"host", c.sess.client.Host, "error", a.Reason)
	_, err := s.giveUp(ctx, a.ID, a.Copies)
	return &metarpc.Empty{}, err
}

// giveUp makes copies of a file stale, but for the last good ones and those that are pinned, and tells everybody. Caches go. kept says that
// there are such that are pinned.
func (s *Service) giveUp(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef) (kept bool, err error) {
	if err := s.awaitGrace(ctx); err != nil { // what was pinned before a restart is known then
		return false, err
	}
	pins, thaw := s.freezePins(id)
	defer thaw()
	given := slices.DeleteFunc(slices.Clone(copies), func(ref metarpc.CopyRef) bool {
		return slices.ContainsFunc(pins, func(pin metarpc.CopyRef) bool { return sameCopy(pin, ref) })
	})
	if kept = len(given) < len(copies); kept {
		s.mu.Lock()
		s.holdUp(s.files[id], "a copy that cannot be written")
		s.mu.Unlock()
	}
	if s.caches.has(id) {
		_, _, err := s.dropCaches(ctx, id, func(c *schema.Cache) bool {
			return slices.ContainsFunc(given, func(ref metarpc.CopyRef) bool { return sameCopy(ref, c.Ref()) })
		})
		if err != nil {
			return kept, err
		}
	}
	stale, err := s.cfg.Files.MarkStale(ctx, id, given)
	if err != nil {
		return kept, err
	}
	return kept, s.tellStale(ctx, id, stale)
}

// tellStale tells all who may read or write a file which of its copies are stale. It returns when each of them has answered, or
// has lost its session and relies on nothing any more, or ctx ends. Clients answer at once, whatever they wait for themselves.
func (s *Service) tellStale(ctx context.Context, id layout.FileID, stale []metarpc.CopyRef) error {
	if len(stale) == 0 {
		return nil
	}
	s.resilverSoon()
	err := s.tell(ctx, &metarpc.CopiesStaleArgs{ID: id, Copies: stale})
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.files[id]; f != nil && err == nil {
		f.told = stale
	}
	return err
}

// droppable returns a function that decides whether a copy of a file may become stale because its data server is
// down, while a layout for writing is granted: not in a grace period, and not if the copy is pinned. No copy gets
// pinned from its first call until thaw is called.
func (s *Service) droppable(id layout.FileID) (drop func(metarpc.CopyRef) bool, thaw func()) {
	var pins []metarpc.CopyRef
	asked, unfreeze := false, func() {}
	drop = func(ref metarpc.CopyRef) bool {
		if !asked {
			asked = true
			pins, unfreeze = s.freezePins(id)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return !s.grace && !slices.ContainsFunc(pins, func(pin metarpc.CopyRef) bool { return sameCopy(pin, ref) })
	}
	return drop, func() { unfreeze() }
}

// tellGranted is tellStale before a layout is granted, unless all know already what is stale.
func (s *Service) tellGranted(ctx context.Context, id layout.FileID, l *schema.Layout) error {
	stale := l.Copies(layout.CopyStale)
	s.mu.Lock()
	f := s.files[id]
	known := f != nil && slices.EqualFunc(f.told, stale, sameCopy)
	s.mu.Unlock()
	if known {
		return nil
	}
	return s.tellStale(ctx, id, stale)
}

// tell is tellStale for any news of copies.
func (s *Service) tell(ctx context.Context, args *metarpc.CopiesStaleArgs) error {
	told := map[*session]bool{}
	s.mu.Lock()
	if f := s.files[args.ID]; f != nil {
		for _, cl := range f.claims {
			told[cl.sess] = true
		}
	}
	for _, sess := range s.sessions {
		if !sess.reclaimed { // it may have the file open, and has not said so to this instance
			told[sess] = true
		}
	}
	for sess := range s.fading {
		told[sess] = true
	}
	s.mu.Unlock()
	var calls sync.WaitGroup
	for sess := range told {
		calls.Go(func() { // ends with the answer, the lease, or ctx
			if err := s.callBack(ctx, sess, metarpc.BackCopiesStale, args); !errors.Is(err, errEnded) {
				return
			}
			select {
			case <-sess.expired:
			case <-ctx.Done():
			}
		})
	}
	calls.Wait()
	return ctx.Err()
}

// tellOfCopies is tellStale with what the catalog says.
func (s *Service) tellOfCopies(ctx context.Context, id layout.FileID) error {
	var l schema.Layout
	raw, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
	if err != nil || raw == nil {
		return err
	}
	return s.tellStale(ctx, id, l.Copies(layout.CopyStale))
}

// heldCopies finds in an error the copies that it names, see Files.
func heldCopies(err error) []metarpc.CopyRef {
	var held interface{ HeldCopies() []metarpc.CopyRef }
	if errors.As(err, &held) {
		return held.HeldCopies()
	}
	return nil
}

// replaceHeld fences a file whose data files somebody holds open, as cause says: they are replaced by copies of them, and whoever
// holds them goes on writing what nobody reads any more. What he writes while they are copied is of unknown outcome, as all that he has
// written since he lost his session. Others may go on writing the file only afterwards.
func (s *Service) replaceHeld(ctx context.Context, f *file, held []metarpc.CopyRef, cause error) error {
	ctx, end, err := s.beginFill(ctx, f.id, true)
	if err != nil {
		return err
	}
	defer end()
	// A kernel that reads or writes the old ones by itself cannot be told to use others; what such have is known after the grace period.
	if err := s.awaitEnd(s.graceOver); err != nil {
		return err
	}
	thaw, err := s.awaitUnpinned(ctx, f.id, "the replacing of data files that a lost client holds open")
	if err != nil {
		return err
	}
	defer thaw()
	if err := s.recallLayouts(ctx, f, layout.Range{Len: layout.ToEOF}, others(nil)); err != nil {
		return err
	}
	moves, err := s.awaitCutting(ctx, f)
	if err != nil {
		return err
	}
	if err := s.endMove(ctx, f.id); err != nil {
		return err
	}
	began := time.Now()
	row, err := s.cfg.Files.StartReplace(ctx, f.id, held)
	if err != nil {
		return err
	}
	for done, size := int64(0), int64(layout.ToEOF); done < size; {
		if done, size, err = s.cfg.Files.Fill(ctx, f.id, row, done, gateBytes, s.unpaced, nil); err != nil {
			return err
		}
	}
	// A truncation that had made its recalls when the session ended may have begun meanwhile. It cuts both, but the copying may
	// have been in between.
	now, err := s.awaitCutting(ctx, f)
	if err == nil && now != moves {
		err = fmt.Errorf("inode %d was truncated while its data files were copied", f.id)
	}
	if err != nil {
		return err
	}
	if _, err := s.cfg.Files.EndFill(ctx, f.id, row); err != nil {
		return err
	}
	// The new ones can be fenced: nobody else knows them.
	if err := s.cfg.Files.Fence(ctx, f.id); err != nil {
		return err
	}
	if err := s.tellOfCopies(ctx, f.id); err != nil {
		return err
	}
	if err := s.settleMove(ctx, f.id); err != nil {
		return err
	}
	s.log.Warn("data files that could not be fenced were replaced", "inode", f.id, "because", cause,
		"after", time.Since(began).Round(time.Millisecond))
	return nil
}

// awaitCutting waits until a file is not being cut, unless that is to begin only when all who wrote the file are fenced. It returns
// file.moves.
func (s *Service) awaitCutting(ctx context.Context, f *file) (moves uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for f.cut != nil && f.cut.phase != cutRecalling {
		if err := s.wait(ctx, f); err != nil {
			return 0, err
		}
	}
	return f.moves, nil
}

// settleMove puts data files that have moved into the places of the old ones, which nobody uses any more when it returns. Nobody
// has a layout for writing the file.
func (s *Service) settleMove(ctx context.Context, id layout.FileID) error {
	pins, thaw := s.freezePins(id)
	defer thaw()
	if err := s.cfg.Files.Exchange(ctx, id, pins); err != nil {
		return err
	}
	// While nobody writes, what some may still read is what the others read.
	if err := s.tellOfCopies(ctx, id); err != nil {
		return err
	}
	return s.cfg.Files.DropMoved(ctx, id)
}

// endMove gives up moving data files of a file, but for those that took the places of others already. Nobody has a layout for
// writing it.
func (s *Service) endMove(ctx context.Context, id layout.FileID) error {
	var l schema.Layout
	raw, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
	if err != nil || raw == nil || !l.Moving {
		return err
	}
	moved := schema.Layout{Mirrors: l.Mirrors[len(l.Mirrors)-1:]}
	if _, err := s.giveUp(ctx, id, append(moved.Copies(layout.CopyGood), moved.Copies(layout.CopyFilling)...)); err != nil {
		return err
	}
	return s.settleMove(ctx, id)
}

// lateCopies finds in an error the copies that it names, see Files.
func lateCopies(err error) []metarpc.CopyRef {
	var late interface{ LateCopies() []metarpc.CopyRef }
	if errors.As(err, &late) {
		return late.LateCopies()
	}
	return nil
}

// failedCopies finds in an error the copies that it names, see Files.
func failedCopies(err error) []metarpc.CopyRef {
	var failed interface{ FailedCopies() []metarpc.CopyRef }
	if errors.As(err, &failed) {
		return failed.FailedCopies()
	}
	return nil
}
