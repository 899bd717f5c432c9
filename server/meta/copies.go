package meta

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/schema"
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

// giveUp makes copies of a file stale, but for the last good ones and those that are pinned, and tells everybody. kept says that
// there are such.
func (s *Service) giveUp(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef) (kept bool, err error) {
	if err := s.awaitGrace(ctx); err != nil { // what was pinned before a restart is known then
		return false, err
	}
	pins, thaw := s.freezePins(id)
	defer thaw()
	given := slices.DeleteFunc(slices.Clone(copies), func(ref metarpc.CopyRef) bool {
		return slices.ContainsFunc(pins, func(pin metarpc.CopyRef) bool { return samePlace(pin, ref) })
	})
	if kept = len(given) < len(copies); kept {
		s.mu.Lock()
		s.holdUp(s.files[id], "a copy that cannot be written")
		s.mu.Unlock()
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
	return s.tell(ctx, &metarpc.CopiesStaleArgs{ID: id, Copies: stale})
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
	raw, err := s.get(ctx, schema.LayoutKey(id), &l)
	if err != nil || raw == nil {
		return err
	}
	return s.tellStale(ctx, id, l.Copies(layout.CopyStale))
}

// lateCopies finds in an error the copies that it names, see Files.
func lateCopies(err error) []metarpc.CopyRef {
	var late interface{ LateCopies() []metarpc.CopyRef }
	if errors.As(err, &late) {
		return late.LateCopies()
	}
	return nil
}
