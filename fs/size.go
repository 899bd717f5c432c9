package fs

import (
	"context"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// getAttr asks for the attributes of any inode.
func (fs *FS) getAttr(ctx context.Context, id layout.FileID) (a attrs, err error) {
	// What has been overtaken by what happened here is asked for again.
	for {
		if i := fs.peek(id); i != nil {
			i.lookAt()
			i.tellPlaces(ctx)
		}
		asked := fs.clock.Add(1)
		answer, err := fs.meta.GetAttr(ctx, id)
		if err != nil {
			return attrs{}, byID(id, err)
		}
		if a = fs.seen(answer, asked); a.fresh {
			return a, nil
		}
	}
}

// timeMask is what sets the time of the last change of the data.
const timeMask = metarpc.SetMtime | metarpc.SetMtimeNow

// atimeMask is what sets the time of the last access.
const atimeMask = metarpc.SetAtime | metarpc.SetAtimeNow

// setAttr changes attributes. clearSetID says that the file, which is not a directory then, must not keep set-ID bits
// and capabilities: its owner changes, or an ordinary user its size.
func (fs *FS) setAttr(ctx context.Context, who metarpc.Cred, args *metarpc.SetAttrArgs, clearSetID bool) (_ attrs, err error) {
	defer func() { fs.unsure(err, args.ID) }()
	if args.Mask&metarpc.SetMode != 0 && setIDBits(args.Mode) != 0 {
		defer fs.armed(args.ID)
	}
	sized := args.Mask&metarpc.SetSize != 0
	if clearSetID {
		args.Mask |= metarpc.ClearPrivileges // the service does it in the same step; capabilities go with any size
	}
	if sized && args.Mask&timeMask == 0 {
		// By the clock that writes use.
		args.Mask |= metarpc.SetMtime
		args.Mtime = time.Now().UnixNano()
	}
	if args.Mask&atimeMask != 0 {
		if err := fs.accesses.set(ctx, args.ID); err != nil {
			return attrs{}, err
		}
	}
	set := func(ctx context.Context) (metaclient.Answer, error) {
		a, err := fs.meta.SetAttr(ctx, who, args)
		return a, byID(args.ID, err)
	}
	var i *inode
	if sized {
		i = fs.hold(args.ID)
	} else {
		i = fs.holdKnown(args.ID) // only of a file that is written here can a report be on its way, or be put off
	}
	if i != nil {
		defer i.drop()
		if a, ok := i.setLater(who, args); ok {
			return a, nil
		}
		waiting, err := i.takeAlong(ctx, who, args.Mask)
		if err != nil {
			return attrs{}, err
		}
		if !waiting && args.Mask&timeMask == 0 {
			i = nil
		}
	}
	if i == nil {
		asked := fs.clock.Add(1)
		a, err := set(ctx)
		if err != nil {
			return attrs{}, err
		}
		return fs.seen(a, asked), nil
	}
	return i.change(ctx, args, set)
}

// change lets set do what args ask for, which is to change the size or the time of the last change, or what was put off goes with it, in an order
// that no write of this mount, earlier or later, can upset.
func (i *inode) change(ctx context.Context, args *metarpc.SetAttrArgs, set func(context.Context) (metaclient.Answer, error)) (attrs, error) {
	size := int64(-1)
	if args.Mask&metarpc.SetSize != 0 {
		size = args.Size
	}
	if err := i.lockSize(ctx); err != nil {
		return attrs{}, err
	}
	unlock := func() {}
	if size >= 0 {
		var err error
		if unlock, err = i.startCut(ctx, size); err != nil {
			i.unlockSize()
			return attrs{}, err
		}
	}
	// A report may have been begun since.
	if err := i.await(ctx, func() bool { return i.reporting == 0 }); err != nil {
		unlock()
		i.unlockSize()
		return attrs{}, err
	}
	i.look() // what the kernel has written is older than what is set now
	i.retime()
	end, placed, mtime, putOff := i.end, i.reserved.end, i.mtime, i.putOff
	addTimes(args, putOff)
	if size >= 0 {
		i.end, i.reserved.end = min(i.end, size), min(i.reserved.end, size)
	}
	if args.Mask&timeMask != 0 {
		i.mtime = 0
	}
	i.reserved.reservedEnd = 0
	i.epoch++
	epoch := i.epoch
	i.mu.Unlock()
	i.again()
	return carry(ctx, i.fs, i.id, func(ctx context.Context) (attrs, error) {
		defer i.drop()
		defer i.unlockSize()
		defer unlock()
		asked := i.fs.clock.Add(1)
		a, err := set(ctx)
		if err == nil && size >= 0 {
			i.data.Drop(size)
		}
		i.mu.Lock()
		defer i.mu.Unlock()
		i.outdate()
		if err != nil {
			if i.epoch == epoch { // or there is nothing left to report: it was lost with the session
				i.end, i.reserved.end, i.mtime = max(i.end, end), max(i.reserved.end, placed), max(i.mtime, mtime)
			}
			i.epoch++
			i.known.Store(false)
			return attrs{}, err
		}
		if i.putOff == putOff {
			i.putOff = metarpc.Times{}
		}
		i.look()
		if size >= 0 {
			i.cutBlocks(size, a.Attr.Used)
		}
		i.take(&a.Attr, asked)
		i.showUsed(&a.Attr)
		return attrs{Attr: a.Attr, fresh: true}, nil
	})
}

// startCut prepares that the file is cut, by a caller who has lockSize; end follows, when the service has answered.
//
// The service frees what is cut off on namespaces before it answers, having recalled the file, also from us, and data files are of a newer
// generation then. So what was written there is told before (that recall must not wait for the range that is locked here), and nothing is
// read until it is known how long the file is: by then the blocks may be another file's. Segments of before, asked for meanwhile or not, are
// not used any more.
func (i *inode) startCut(ctx context.Context, size int64) (end func(), err error) {
	if i.reads.any.Load() {
		if err := i.handOver(ctx); err != nil {
			return nil, err
		}
	}
	// A commit must not send data past the new end again.
	unlock, err := i.data.LockRange(ctx, size, layout.ToEOF-size)
	if err != nil {
		return nil, err
	}
	drop := func() { i.fs.meta.DropExtents(i.id, size) }
	if err := i.barReads(ctx, drop); err != nil {
		unlock()
		return nil, err
	}
	return func() {
		drop()
		i.unbarReads()
		unlock()
	}, nil
}
