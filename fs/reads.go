package fs

import (
	"context"
	"sync/atomic"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// reads counts the reads of a file that the data plane has. What a segment says of bytes on namespaces holds until the layout is given back or
// the file is cut: before that, every read that goes by it must have ended, or it could bring what has become part of another file.
//
// A read is counted in before it looks for its segment. So whoever has taken the segments away and then waits for the reads that
// have been counted misses none that goes by one of them.
type reads struct {
	// under are those under way, by the turn in which they began. The last bit of turn says which of them a read is counted in that begins
	// now. It changes under inode.mu, when the other one has been seen to be 0: two changes later all that had begun before have ended.
	under [2]atomic.Int64
	turn  atomic.Uint64
	// awaited counts those who wait for reads to end.
	awaited atomic.Int32
	// barred counts the recalls and truncations that keep reads on namespaces out. It goes down under inode.mu.
	barred atomic.Int32
	// any says that there has been a segment on namespaces.
	any atomic.Bool
}

// reading is what has to be known of a read that was counted in.
type reading struct {
	turn    uint64
	session *sessionLife
}

// beginRead counts a read in and returns a cached segment for it, which holds the first of n bytes at off; endRead follows. If there is none
// that may be used now, which is nil, it is not counted in. It does not block.
func (i *inode) beginRead(off, n int64) (*layout.Segment, reading) {
	r := reading{i.reads.turn.Load() & 1, i.session()}
	i.reads.under[r.turn].Add(1)
	seg := i.fs.meta.CachedLayout(i.id, layout.IOModeRead, off, n)
	if seg != nil && seg.OnNamespaces {
		if !i.reads.any.Swap(true) {
			// Who has taken it away meanwhile may not have known that there was one, and waits for no read.
			seg = i.fs.meta.CachedLayout(i.id, layout.IOModeRead, off, n)
		}
		if i.reads.barred.Load() > 0 {
			seg = nil
		}
	}
	if seg == nil {
		i.endRead(r)
	}
	return seg, r
}

// endRead counts a read out.
func (i *inode) endRead(r reading) {
	if i.reads.under[r.turn].Add(-1) == 0 && i.reads.awaited.Load() > 0 {
		i.mu.Lock()
		i.notify()
		i.mu.Unlock()
	}
}

// believe returns errOtherSession if what a read has brought that went by seg must not be given to anybody: with the session, which may have ended
// by our own clock, went the layout.
func (i *inode) believe(r reading, seg *layout.Segment) error {
	if seg.OnNamespaces && (!i.fs.meta.Alive(i.id) || i.session() != r.session) {
		return errOtherSession
	}
	return nil
}

// readSegment is beginRead that asks for what is not known. nil without an error is a hole.
func (i *inode) readSegment(ctx context.Context, off, n int64) (*layout.Segment, reading, error) {
	for {
		if seg, r := i.beginRead(off, n); seg != nil {
			return seg, r, nil
		}
		// Not counted in, as the service may be waiting for us.
		if err := i.await(ctx, func() bool { return i.reads.barred.Load() == 0 }); err != nil {
			return nil, reading{}, err
		}
		i.mu.Unlock()
		seg, err := i.fs.meta.Layout(ctx, i.id, layout.IOModeRead, off, n, metaclient.Anywhere)
		if err != nil {
			return nil, reading{}, byID(i.id, err)
		}
		if seg == nil {
			return nil, reading{}, nil
		}
	}
}

// awaitReads waits for the reads that are under way now. New ones do not keep it waiting.
func (i *inode) awaitReads(ctx context.Context) error {
	r := &i.reads
	r.awaited.Add(1)
	defer r.awaited.Add(-1)
	i.mu.Lock()
	goal := r.turn.Load() + 2
	i.mu.Unlock()
	for {
		err := i.await(ctx, func() bool {
			return r.turn.Load() >= goal || r.under[1-r.turn.Load()&1].Load() == 0
		})
		if err != nil {
			return err
		}
		if r.turn.Load() >= goal {
			i.mu.Unlock()
			return nil
		}
		r.turn.Add(1)
		i.notify()
		i.mu.Unlock()
	}
}

// barReads keeps reads on namespaces out until unbarReads, lets drop take segments away, and waits for the reads that have begun and for
// what may still be at copies that were given up. If it fails they are not kept out.
func (i *inode) barReads(ctx context.Context, drop func()) error {
	i.reads.barred.Add(1)
	drop()
	// Whoever goes by such a segment has said so before it looked whether it is kept out.
	if !i.reads.any.Load() {
		return nil
	}
	err := i.awaitReads(ctx)
	if err == nil {
		err = i.data.Quiesce(ctx)
	}
	if err != nil {
		i.unbarReads()
	}
	return err
}

func (i *inode) unbarReads() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.reads.barred.Add(-1)
	i.notify()
}
