package fs

import (
	"context"
	"errors"

	"github.com/weftfs/weft/layout"
)

// holdKnown is hold for a file that is open or dirty here, and nil for others.
func (fs *FS) holdKnown(id layout.FileID) *inode {
	s := fs.bucket(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.inodes[id]
	if i != nil {
		i.holds++
	}
	return i
}

// surrender drops data that data servers refuse to make stable with err, since another client waits for the layout and
// may write there. The next fsync or close reports it, as after a lost session. Other errors are returned.
func (i *inode) surrender(ctx context.Context, err error) error {
	i.mu.Lock()
	refused := i.failing && ctx.Err() == nil && !errors.Is(err, errSessionLost)
	i.mu.Unlock()
	if !refused {
		return err
	}
	if e := i.data.Surrender(ctx); e != nil {
		return errors.Join(err, e)
	}
	i.mu.Lock()
	i.late++
	i.lost, i.lostErr = i.late, err
	i.failing, i.backoff, i.retryAt = false, 0, 0
	i.mu.Unlock()
	i.fs.log.Error("written data cannot be made stable, and another client wants to write there: it is lost", "file", i.id, "err", err)
	return i.handOver(ctx)
}

// OnRecall finishes and makes stable what this mount has written to the range of the file, and gives up its layouts
// there; when it returns nil, nothing of ours is on its way to the data servers, nor is a read of what lies on namespaces. It is for
// metaclient.Config.
//
// It waits for data servers and for LayoutCommits, never for an operation of this mount that may itself be waiting for
// the service.
func (fs *FS) OnRecall(ctx context.Context, id layout.FileID, off, n int64) error {
	i := fs.holdKnown(id)
	if i == nil {
		fs.meta.DropLayout(id, off)
		return nil
	}
	defer i.drop()
	i.mu.Lock()
	i.recalls++
	i.recalled++
	i.mu.Unlock()
	defer func() {
		i.mu.Lock()
		i.recalls--
		i.notify()
		i.mu.Unlock()
	}()
	if err := i.await(ctx, func() bool { return i.writes[0]+i.writes[1] == 0 }); err != nil {
		return err
	}
	i.mu.Unlock()
	// On a soft mount a write may have ended for its caller that still is at a data server.
	if err := i.data.AwaitStrays(ctx); err != nil {
		return err
	}
	if err := i.handOver(ctx); err != nil {
		if err = i.surrender(ctx, err); err != nil {
			return err
		}
	}
	// One of before may still be under way, though another has told the same: it must not arrive when the file has been cut.
	if err := i.await(ctx, func() bool { return i.reporting == 0 }); err != nil {
		return err
	}
	i.mu.Unlock()
	if err := i.barReads(ctx, func() { fs.meta.DropLayout(id, off) }); err != nil {
		return err
	}
	defer i.unbarReads()
	// The size is probably about to change.
	i.mu.Lock()
	i.known.Store(false)
	i.mu.Unlock()
	return nil
}
