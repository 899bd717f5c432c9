package meta

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// movesAtOnce is how many files are copied at a time because somebody wants them elsewhere.
	movesAtOnce = 4
	// movesKnown is how many may wait for that, or for somebody to ask what has become of them. Whoever wants more asks again.
	movesKnown = 64
	// moveWait is how long a call waits for a move to end before it tells how far that is.
	moveWait = 500 * time.Millisecond
	// moveAgain is when it is tried again to move what could not be moved, doubled with each of moveTries that fail. What is waited for
	// does not count.
	moveAgain = time.Second
	moveTries = 8
	// moveKept is how long it is remembered why a move was given up, if nobody asks.
	moveKept = time.Minute
)

// move is the moving of a file's data to a device that somebody has named. That it is to be is a row in the catalog. What is
// behind ended is guarded by Service.mu.
type move struct {
	id     layout.FileID
	device layout.DeviceID
	ended  chan struct{} // closed when it is over

	over   time.Time // when it ended; zero if it has not
	err    error     // why it was given up
	result metarpc.LayoutMoveResult
}

// layoutMove begins to move a file's data, or tells how far that is.
func (s *Service) layoutMove(ctx context.Context, c *call, a *metarpc.LayoutMoveArgs) (*metarpc.LayoutMoveResult, error) {
	row, _, err := s.regular(ctx, a.ID)
	if err != nil {
		return nil, err
	}
	switch who := s.caller(c); {
	case who.ReadOnly:
		return nil, errReadOnly
	case !who.Owns(subject(&row)):
		return nil, errPerm
	}
	m, err := s.joinMove(ctx, a)
	if err != nil {
		return nil, err
	}
	if m == nil {
		return &metarpc.LayoutMoveResult{Waits: "other files that are being moved"}, nil
	}
	timer := time.NewTimer(moveWait)
	defer timer.Stop()
	select {
	case <-m.ended:
	case <-timer.C:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.err != nil {
		if s.moves[m.id] == m {
			delete(s.moves, m.id) // told
		}
		return nil, m.err
	}
	r := m.result
	return &r, nil
}

// joinMove finds the move of a file to a device, or begins it; nil if there are too many.
func (s *Service) joinMove(ctx context.Context, a *metarpc.LayoutMoveArgs) (*move, error) {
	s.mu.Lock()
	m := s.moves[a.ID]
	switch {
	case m != nil && m.device == a.Device:
		s.mu.Unlock()
		return m, nil
	case m != nil && m.over.IsZero():
		s.mu.Unlock()
		return nil, refusef(metarpc.Status(syscall.EBUSY), "inode %d is being moved to device %v", a.ID, m.device)
	}
	for id, other := range s.moves {
		if !other.over.IsZero() && (id == a.ID || time.Since(other.over) > moveKept) {
			delete(s.moves, id)
		}
	}
	if len(s.moves) >= movesKnown {
		s.mu.Unlock()
		return nil, nil
	}
	m = newMove(a.ID, a.Device)
	s.moves[a.ID] = m
	s.mu.Unlock()
	data, there, err := s.cfg.Files.MoveTo(ctx, a.ID, a.Device)
	switch {
	case err != nil:
		s.endOfMove(m, moveError(ctx, err))
		s.mu.Lock()
		delete(s.moves, m.id) // it has not begun
		s.mu.Unlock()
	case there:
		s.mu.Lock()
		m.result.Finished, m.result.Empty = true, !data
		s.mu.Unlock()
		s.endOfMove(m, nil)
	default:
		s.log.Debug("the data of a file is to be moved", "inode", a.ID, "device", a.Device)
		s.tasks.Go(func() { s.moveFile(m) }) // ends when the data is there, or cannot be moved, or with s.ctx
	}
	return m, nil
}

func newMove(id layout.FileID, device layout.DeviceID) *move {
	return &move{id: id, device: device, ended: make(chan struct{})}
}

// moveError is what a client is told of a move that cannot be.
func moveError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	errno := syscall.EIO
	errors.As(err, &errno)
	return refusef(metarpc.Status(errno), "%v", err)
}

// endOfMove ends a move, with the reason if it was given up.
func (s *Service) endOfMove(m *move, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.err, m.over = err, time.Now()
	if err == nil {
		delete(s.moves, m.id) // whoever asks again finds it there
	}
	close(m.ended)
}

// hopeless reports whether an error means that a device does not take what is to be moved there.
func hopeless(err error) bool {
	var e interface{ Errno() syscall.Errno } // of a data server
	return errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENOSPC) || errors.As(err, &e) && e.Errno() == syscall.ENOSPC
}

// moveFile moves a file's data, once the grace period is over.
func (s *Service) moveFile(m *move) {
	if s.awaitEnd(s.graceOver) != nil {
		return
	}
	for tries := 0; ; {
		select {
		case s.mayMove <- struct{}{}:
		case <-s.ctx.Done():
			return
		}
		err := s.fillFile(s.ctx, m.id)
		<-s.mayMove
		if s.ctx.Err() != nil {
			return
		}
		_, open := s.engine.Get(s.ctx, schema.MoveKey(m.id))
		_, _, gone := s.inode(s.ctx, m.id)
		switch {
		case errors.Is(gone, errStale):
			err = errStale
		case errors.Is(open, catalog.ErrNotFound):
			s.mu.Lock()
			m.result.Finished, m.result.Waits = true, ""
			s.mu.Unlock()
			s.endOfMove(m, nil)
			return
		case hopeless(err):
			s.log.Warn("the data of a file cannot be moved", "inode", m.id, "device", m.device, "error", err)
			err = moveError(s.ctx, err)
		default:
			if err == nil {
				err = errors.New("a data file there could not be written")
			}
			if s.noteWait(m, err) {
				tries = 0
			} else if tries++; tries == moveTries {
				err = refusef(metarpc.Status(syscall.EIO), "%v", err)
				break
			}
			if retry.Pause(s.ctx, moveAgain<<max(tries-1, 0)) != nil {
				return
			}
			continue
		}
		if retry.Persist(s.ctx, s.log, "end of a move", func() error { return s.cfg.Files.StopMove(s.ctx, m.id) }) == nil {
			s.endOfMove(m, err)
			s.resilverSoon() // it clears away what had begun
		}
		return
	}
}

// noteWait notes what a move waits for: for somebody else who copies data of the file, or has it open in passthrough, which it reports, or
// that it is tried again after err.
func (s *Service) noteWait(m *move, err error) (heldUp bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(err, errFilled) {
		m.result.Waits = "what else is copied of the file"
		return true
	}
	if f := s.files[m.id]; f != nil && f.heldUp != nil {
		m.result.Waits = strings.Join(f.pinners(), ", ") + ", where it is open in passthrough"
		return true
	}
	reason := "another try after: " + err.Error()
	m.result.Waits = reason[:min(len(reason), metarpc.MaxText)]
	return false
}

// noteMove notes how far the copying of a file is that somebody wants moved: at done of size bytes, of which n were copied just now.
func (s *Service) noteMove(id layout.FileID, done, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.moves[id]; m != nil {
		m.result.Done, m.result.Size, m.result.Waits = done, size, ""
	}
}

// copiedOf is count for the bytes of a file.
func (s *Service) copiedOf(id layout.FileID) func(context.Context, int) error {
	return func(ctx context.Context, n int) error {
		s.mu.Lock()
		if m := s.moves[id]; m != nil {
			m.result.Done = min(m.result.Done+int64(n), max(m.result.Size, m.result.Done))
		}
		s.mu.Unlock()
		return s.count(ctx, n)
	}
}

// beingMoved reports whether somebody wants the data of a file moved.
func (s *Service) beingMoved(id layout.FileID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.moves[id]
	return m != nil && m.over.IsZero()
}
