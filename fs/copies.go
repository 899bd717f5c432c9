package fs

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Copies of mirrored data that fail. Whatever becomes of the request that met the failure, the copies may differ from then on, and
// readers must not see now the one and now the other: so every failure is reported, and the file is kept until the service
// has decided. Before that the request is not answered, unless its caller has left.

// OnCopiesStale gives up copies of a file that the service has found to be out of date; when it returns none of them is read
// or written any more. It waits for nothing, so that writes which wait for the service to say so cannot be in its way. It is
// for metaclient.Config.
func (fs *FS) OnCopiesStale(id layout.FileID, copies []metarpc.CopyRef) {
	fs.meta.DropLayout(id, 0)
	i := fs.holdKnown(id)
	if i == nil {
		return
	}
	defer i.drop()
	files := make([]*layout.DataFile, len(copies))
	for n := range copies {
		files[n] = &layout.DataFile{Device: copies[n].Device, Handles: [][]byte{copies[n].Handle}, State: layout.CopyStale}
	}
	i.data.Forsake(files)
}

// doubt has the service decide about copies that may lack what others have. mu is held.
func (i *inode) doubt(failed []*dataplane.Error) {
	i.doubtful = append(i.doubtful, failed...)
	if i.settling {
		return
	}
	i.settling = true
	i.again()
	i.fs.spawn(i.settleCopies) // owns the inode's settling; ends when nothing is in doubt, or with fs.ctx
}

// settleCopies reports copies in doubt until there are none.
func (i *inode) settleCopies() {
	ctx := i.fs.ctx
	for {
		i.mu.Lock()
		failed := i.doubtful
		i.doubtful = nil
		if len(failed) == 0 || ctx.Err() != nil {
			i.settling = false
			i.notify()
			i.letGo()
			i.mu.Unlock()
			i.drop()
			return
		}
		i.mu.Unlock()
		var refs []metarpc.CopyRef
		for _, e := range failed {
			same := func(r metarpc.CopyRef) bool {
				return r.Device == e.Device && slices.Equal(r.Handle, e.File.Handles[0])
			}
			if !slices.ContainsFunc(refs, same) && !i.data.Forsaken(e.File) {
				refs = append(refs, metarpc.CopyRef{Device: e.Device, Handle: e.File.Handles[0]})
			}
		}
		if len(refs) == 0 {
			continue
		}
		i.fs.waiting.log(i.fs.log, slog.LevelWarn, "copies of a file cannot be written; the metadata service is told",
			"file", i.id, "copies", len(refs), "err", failed[0])
		if err := i.reportCopies(ctx, refs, failed[0].Error()); err != nil && ctx.Err() == nil {
			i.fs.log.Warn("copies of a file may differ, and the metadata service does not settle that", "file", i.id, "err", err)
		}
	}
}

// reportCopies asks the service until it has decided.
func (i *inode) reportCopies(ctx context.Context, refs []metarpc.CopyRef, reason string) error {
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		err := i.fs.meta.LayoutError(ctx, i.id, refs, reason)
		if v, _ := classify(err); err == nil || v != wait {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

// settled waits until the service has decided about the copies that err says have failed, and reports whether one of them
// was given up, which makes it worth trying again without it.
func (i *inode) settled(ctx context.Context, err error) (bool, error) {
	failed := dataplane.FailedCopies(err)
	if len(failed) == 0 {
		return false, nil
	}
	defer i.wait()()
	if err := i.await(ctx, func() bool { return !i.settling }); err != nil {
		return false, fmt.Errorf("file %d: %w", i.id, err)
	}
	i.mu.Unlock()
	return slices.ContainsFunc(failed, func(e *dataplane.Error) bool { return i.data.Forsaken(e.File) }), nil
}
