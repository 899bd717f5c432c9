package fs

import (
	"context"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Programs that unpack or copy files set the times of each new one, and its owner to what he is, before they close it. While the lease on the attributes makes
// sure that nobody else changes them, and the layout for writing that nobody learns them without asking us, that is put off until the
// service is told of the file's data (metarpc.SizeReport.Set), or goes with another SETATTR. The owner of a new file is its caller's, so that the service would
// allow it, whatever it makes of root.

// setTimes changes attributes to what was put off.
func setTimes(a *metarpc.Attr, set metarpc.Times) {
	if set.Mask&metarpc.SetAtime != 0 {
		a.Atime = set.Atime
	}
	if set.Mask&metarpc.SetMtime != 0 {
		a.Mtime = set.Mtime
	}
	a.Ctime = max(a.Ctime, set.Ctime)
}

// addTimes adds to a SETATTR what was put off and is not set by it.
func addTimes(args *metarpc.SetAttrArgs, set metarpc.Times) {
	if set.Mask&metarpc.SetAtime != 0 && args.Mask&atimeMask == 0 {
		args.Mask |= metarpc.SetAtime
		args.Atime = set.Atime
	}
	if set.Mask&metarpc.SetMtime != 0 && args.Mask&timeMask == 0 {
		args.Mask |= metarpc.SetMtime
		args.Mtime = set.Mtime
	}
}

// setLater puts off what args ask for, if that is possible, and returns the attributes with it.
func (i *inode) setLater(who metarpc.Cred, args *metarpc.SetAttrArgs) (a attrs, ok bool) {
	if args.Mask&^(metarpc.SetAtime|metarpc.SetMtime|metarpc.SetUID|metarpc.SetGID|metarpc.ClearPrivileges) != 0 {
		return attrs{}, false
	}
	i.mu.Lock()
	recalled := i.recalledLeases
	i.mu.Unlock()
	answer, ok := i.fs.meta.CachedAttr(i.id)
	is := &answer.Attr
	if !ok || who.UID != is.UID || args.Mask&metarpc.SetUID != 0 && args.UID != is.UID || args.Mask&metarpc.SetGID != 0 && args.GID != is.GID {
		return attrs{}, false
	}
	if args.Mask&(metarpc.SetUID|metarpc.SetGID|metarpc.ClearPrivileges) != 0 && (setIDBits(is.Mode) != 0 || is.Flags&metarpc.AttrCapability != 0) {
		return attrs{}, false // which go, whatever the owner is set to
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	// What is dirty is told soon, and what is being told must not be overtaken.
	if !i.born || !i.plain || i.written == i.durable || i.reporting > 0 || i.sizing || i.recalls > 0 || i.recalledLeases != recalled ||
		i.passed != nil || i.reads.any.Load() || i.losing || i.removed || i.gone != nil {
		return attrs{}, false
	}
	set := args.Mask & (metarpc.SetAtime | metarpc.SetMtime)
	if set&metarpc.SetAtime != 0 {
		i.putOff.Atime = args.Atime
	}
	if set&metarpc.SetMtime != 0 {
		i.putOff.Mtime = args.Mtime
		i.mtime = 0 // what was written before is older
		i.epoch++
	}
	i.putOff.Mask |= set
	i.putOff.Ctime = time.Now().UnixNano()
	i.written++
	i.enqueue()
	i.outdate()
	return i.mergeLocked(answer, i.fs.clock.Load()), true
}

// takeAlong reports whether something was put off that a SETATTR is to take along. What it cannot is told first.
func (i *inode) takeAlong(ctx context.Context, who metarpc.Cred, mask metarpc.AttrMask) (bool, error) {
	i.mu.Lock()
	some := i.putOff.Ctime != 0
	i.mu.Unlock()
	if !some {
		return false, nil
	}
	// Times are the owner's to set, and of two settings of one time the second counts.
	answer, ok := i.fs.meta.CachedAttr(i.id)
	if ok && answer.Attr.UID == who.UID && mask&(metarpc.SetSize|timeMask|atimeMask) == 0 {
		return true, nil
	}
	return false, i.fs.tellPutOff(ctx, []*inode{i})
}

// tellPutOff tells what was put off of files of one shard, of which there may be data that is not stable yet.
func (fs *FS) tellPutOff(ctx context.Context, list []*inode) error {
	var errs errorList
	for len(list) > 0 {
		var reports []report
		for _, i := range list {
			i.mu.Lock()
			if i.putOff.Ctime != 0 {
				reports = append(reports, report{i: i, session: i.session(), epoch: i.epoch})
			}
			i.mu.Unlock()
		}
		list = nil
		for batch := range slices.Chunk(reports, metarpc.MaxBatch) {
			outdated, err := fs.tell(ctx, batch, false)
			errs.add(err)
			list = append(list, outdated...)
		}
	}
	return errs.join()
}
