package fs

import (
	"context"
	"errors"
	"sync"

	"github.com/weftfs/weft/layout"
)

// sessionLife stands for our session with the service of one shard. What was found out, begun or promised in one session says nothing in
// the next one: between the two, others may have done anything to the files. ctx ends with the session, and with FS.ctx.
type sessionLife struct {
	ctx context.Context
	end context.CancelFunc
}

// beginSession ends the session of a shard, if there is one, at once for all who have it.
func (fs *FS) beginSession(shard int) {
	next := new(sessionLife)
	next.ctx, next.end = context.WithCancel(fs.ctx)
	if old := fs.sessions[shard].Swap(next); old != nil {
		old.end()
	}
}

// shardOf is an inode's shard.
func (fs *FS) shardOf(id layout.FileID) int {
	if len(fs.sessions) == 1 {
		return 0
	}
	return layout.ShardOf(id, len(fs.sessions))
}

// inShard is for such.
func (fs *FS) inShard(shard int) func(layout.FileID) bool {
	return func(id layout.FileID) bool { return fs.shardOf(id) == shard }
}

// session is the present one of the file's shard.
func (i *inode) session() *sessionLife { return i.fs.sessions[i.fs.shardOf(i.id)].Load() }

// byShard runs f for the files of each shard, so that those of one do not wait for the service of another, and joins the errors.
func (fs *FS) byShard(list []*inode, f func([]*inode) error) error {
	parts := map[int][]*inode{}
	for _, i := range list {
		shard := fs.shardOf(i.id)
		parts[shard] = append(parts[shard], i)
	}
	if len(parts) <= 1 {
		return f(list)
	}
	var mu sync.Mutex
	var errs errorList
	var all sync.WaitGroup
	for _, part := range parts {
		all.Go(func() { // has the files of one shard
			err := f(part)
			mu.Lock()
			defer mu.Unlock()
			errs.add(err)
		})
	}
	all.Wait()
	return errs.join()
}

// errOtherSession is what becomes of a write that was not acknowledged before the session ended: it starts again.
var errOtherSession = errors.New("begun in a session that the metadata service has ended")

// during makes a context for calls that must not be made in another session. It has the values of ctx, not its end.
func (s *sessionLife) during(ctx context.Context) context.Context { return sessionContext{s.ctx, ctx} }

// sessionContext ends like one context and has the values of another.
type sessionContext struct {
	context.Context
	values context.Context
}

func (c sessionContext) Value(key any) any { return c.values.Value(key) }
