package fs

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// OnLeaseRecall makes the kernel and this mount forget what others are about to change, or may have changed, and lets the
// service know how long the files are that have been written here. It is for metaclient.Config.
//
// It waits for data servers and for LayoutCommits, for READs and WRITEs of the kernel as long as those, too, wait for
// nothing else, and for names of directories no longer than the kernel may keep them (expireNames).
func (fs *FS) OnLeaseRecall(ctx context.Context, items []metarpc.LeaseItem) {
	var held []*inode
	defer func() {
		for _, i := range held {
			i.drop()
		}
	}()
	var names []layout.FileID
	var pages sync.WaitGroup
	for _, it := range items {
		if it.Lease&metarpc.LeaseNames != 0 {
			names = append(names, it.ID)
		}
		i := fs.holdKnown(it.ID)
		if i != nil {
			held = append(held, i)
			i.mu.Lock()
			i.known.Store(false)
			i.reserved.reservedEnd = 0
			i.recalledLeases++
			i.outdate()
			i.doubtPrivileges()
			i.mu.Unlock()
		}
		// What happens here from now on is seen by those who asked the kernel before, too: it does not take answers to
		// questions that are older than this.
		if it.Lease&metarpc.LeaseAttrs != 0 && !fs.forgetAttrs(it.ID) && i != nil && i.newborn.Load() {
			i.forgetNewborn(ctx)
		}
		if fs.pages.forget(it.ID) || it.Lease&metarpc.LeaseData != 0 && i != nil {
			pages.Go(func() { fs.forgetPages(ctx, it.ID, i) }) // waits for one file's pages to be dropped
		}
	}
	fs.expireNames(ctx, names...)
	pages.Wait()
	for _, i := range held {
		if err := i.drain(ctx); err != nil {
			return // nobody waits for us any more
		}
	}
	if err := fs.publish(ctx, held); err != nil && ctx.Err() == nil {
		fs.log.Error("sizes of written files could not be reported for others to see", "err", err)
	}
	// Times that were set here must not arrive after those that others are about to set.
	for _, i := range held {
		if err := i.await(ctx, func() bool { return i.setting == 0 }); err != nil {
			return
		}
		i.mu.Unlock()
	}
}

const (
	// stuckPatience is how long a READ or WRITE may wait for the service before a recall stops waiting for it.
	stuckPatience = 100 * time.Millisecond
	stuckPoll     = 20 * time.Millisecond
	// maxForgetting bounds the threads that are in the kernel to drop pages.
	maxForgetting = 64
)

const (
	// newbornKeep is how long the kernel may keep the attributes that CREATE is answered with: until it has checked them, next to at once.
	newbornKeep = 10 * time.Millisecond
	// A process that was answered has the processor soon, unless it is frozen; then a recall waits no longer than that.
	newbornPatience = time.Second
	newbornPoll     = time.Millisecond
)

// forgetNewborn is forgetAttrs for a file that the kernel is about to make an inode for, with the attributes that it was answered: it waits for that.
func (i *inode) forgetNewborn(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, newbornPatience)
	defer cancel()
	tick := time.NewTicker(newbornPoll)
	defer tick.Stop()
	for i.newborn.Load() && !i.fs.forgetAttrs(i.id) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// forgetPages makes the kernel drop a file's pages, and waits for that unless it may last until the recall itself has been
// answered; then it goes on without anybody waiting. i is nil if the file is not open here.
func (fs *FS) forgetPages(ctx context.Context, id layout.FileID, i *inode) {
	done := make(chan struct{})
	var begun atomic.Bool
	// The goroutine is in the kernel until no request for the pages is under way, or until the mount ends.
	fs.spawn(func() {
		defer close(done)
		fs.forgetting <- struct{}{}
		begun.Store(true)
		fs.given.during(id, func() { fs.notify(func(k kernel) { k.forgetPages(fs.node(id)) }) })
		<-fs.forgetting
	})
	tick := time.NewTicker(stuckPoll)
	defer tick.Stop()
	for since := now(); ; {
		select {
		case <-done:
			return
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		stuck := !begun.Load() && now()-since > int64(stuckPatience) // behind others that are
		if i != nil {
			i.mu.Lock()
			stuck = stuck || i.stuck > 0 && now()-i.stuckSince > int64(stuckPatience)
			i.mu.Unlock()
		}
		if stuck {
			return
		}
	}
}

// OnSizeQuery tells the service how long the files are that have been written here, so that it can tell others. It is for
// metaclient.Config.
func (fs *FS) OnSizeQuery(ctx context.Context, ids []layout.FileID) {
	var list []*inode
	for _, id := range ids {
		if i := fs.holdKnown(id); i != nil {
			defer i.drop()
			list = append(list, i)
			i.mu.Lock()
			i.reserved.asked = len(i.reserved.list) > 0
			i.mu.Unlock()
		}
	}
	if err := fs.publish(ctx, list); err != nil && ctx.Err() == nil {
		fs.log.Error("sizes of written files could not be reported for others to see", "err", err)
	}
}

// OnLost is called when the service of a shard has ended our session, before there is a new one. With the session goes what was not
// stable of the shard's files: others may have written to them since, so it must not be sent any more, and is reported as a late error. It
// is for metaclient.Config, and does not block.
func (fs *FS) OnLost(shard int) {
	list := fs.such(fs.inShard(shard))
	fs.pages.forgetSuch(fs.inShard(shard))
	fs.lose(shard, list)
	for _, i := range list {
		i.drop()
	}
}

// OnReset tells a shard's service that was restarted how long its files are that were written here. What is open has been opened
// again before. After a lost session there is nothing to tell but what has been written in the new one. It is for
// metaclient.Config.
func (fs *FS) OnReset(ctx context.Context, shard int, lost bool) {
	list := fs.such(fs.inShard(shard))
	fs.pages.forgetSuch(fs.inShard(shard))
	for _, i := range list {
		defer i.drop()
		i.mu.Lock()
		i.provisional, i.reserved.reservedEnd = i.durable, 0
		i.reserved.reclaim = !lost
		i.reserved.upto = 0 // of the earlier instance
		i.doubtPrivileges()
		i.known.Store(false)
		i.mu.Unlock()
	}
	if err := fs.publish(ctx, list); err != nil && ctx.Err() == nil {
		fs.log.Error("sizes of written files could not be reported again", "err", err)
	}
}

// errSessionLost is what becomes of unstable data when the service ends the session.
var errSessionLost = errors.New("the metadata service ended the session of this mount, and data that was not stable is lost")

// lose gives up what is not stable of the files of a shard. Until that is done, which takes as long as the writes that are at the data
// servers, nothing of a file is committed. The session ends in between: whoever finds that it has ended sees which files lose
// something, and nothing is dropped before acknowledgements have ceased to count.
func (fs *FS) lose(shard int, list []*inode) {
	var losing []*inode
	var files, bytes int64
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, i := range list {
		i.mu.Lock()
		i.known.Store(false)
		i.recalledLeases++
		i.reserved.lose()
		i.notify() // a recall may wait for them
		i.outdate()
		i.doubtPrivileges()
		if i.passed != nil {
			i.passed.lost = true
		}
		if i.backing != nil {
			i.backing.lost = true
		}
		if !i.losing && (i.dirty() || i.writes[0]+i.writes[1] > 0) {
			i.losing = true
			losing = append(losing, i.again())
		}
		i.mu.Unlock()
		fs.meta.DropLayout(i.id, 0)
	}
	fs.beginSession(shard)
	for _, i := range losing {
		all.Add(1)
		// The goroutine owns the loss of one file and ends with it.
		fs.spawn(func() {
			defer i.drop()
			defer all.Done()
			n, err := i.lose(fs.ctx)
			if err != nil {
				return // closing: what is not stable is reported there
			}
			mu.Lock()
			defer mu.Unlock()
			files, bytes = files+1, bytes+n
		})
	}
	// The goroutine says what was lost when all of it is known.
	fs.spawn(func() {
		all.Wait()
		if files > 0 {
			fs.log.Error("the metadata service ended the session: data that was not stable is lost", "files", files, "bytes", bytes)
		}
	})
}

// lose gives up what is not stable of one file and returns how many bytes that were.
func (i *inode) lose(ctx context.Context) (int64, error) {
	unlock, err := i.data.LockRange(ctx, 0, layout.ToEOF)
	if err != nil {
		return 0, err
	}
	defer unlock()
	n := i.data.Unstable()
	i.data.Drop(0)
	i.data.Forget()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.forget()
	i.reserved.reservedEnd = 0
	i.epoch++
	i.outdate()
	i.known.Store(false)
	i.late++
	i.lost, i.lostErr = i.late, errSessionLost
	i.losing, i.failing = false, false
	i.notify()
	i.letGo()
	return n, nil
}

// stamp tells one state of a file's contents from another.
type stamp struct{ size, mtime, ctime int64 }

// maxStamps bounds keptPages.
const maxStamps = 1 << 16

// keptPages remembers of which files the kernel may have pages that are right: those opened under a lease that has not been
// recalled since. The methods of a nil pointer are for mounts where the kernel keeps none.
type keptPages struct {
	mu     sync.Mutex
	stamps map[layout.FileID]stamp
}

// opened returns the flags to answer open(2) with if the file may be read through the page cache now.
func (p *keptPages) opened(i *inode) (flags uint32, cached bool) {
	if p == nil {
		return 0, false
	}
	i.mu.Lock()
	recalled := i.recalledLeases
	i.mu.Unlock()
	asked := i.fs.clock.Load()
	answer, ok := i.fs.meta.CachedAttr(i.id)
	if !ok {
		return 0, false
	}
	a := i.merge(answer, asked)
	if !a.fresh || a.keep == 0 {
		return 0, false
	}
	// The lease may have been given up and taken again since: then the times tell whether there were changes.
	now := stamp{a.Size, a.Mtime, a.Ctime}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stamps[i.id] == now {
		return fuse.FOPEN_KEEP_CACHE, true
	}
	if len(p.stamps) >= maxStamps {
		for id := range p.stamps {
			delete(p.stamps, id)
			break
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.recalledLeases != recalled {
		return 0, false
	}
	p.stamps[i.id] = now
	return 0, true
}

// forget is called when the file's lease is recalled. It reports whether the kernel may have pages.
func (p *keptPages) forget(id layout.FileID) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, had := p.stamps[id]
	delete(p.stamps, id)
	return had
}

func (p *keptPages) forgetSuch(is func(layout.FileID) bool) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.stamps, func(id layout.FileID, _ stamp) bool { return is(id) })
}
