package fs

import (
	"context"
	"errors"
)

// sessionLife stands for our session with the service. What was found out, begun or promised in one session says nothing in
// the next one: between the two, others may have done anything to the files. ctx ends with the session, and with FS.ctx.
type sessionLife struct {
	ctx context.Context
	end context.CancelFunc
}

// beginSession ends the session there is, if any, at once for all who have it.
func (fs *FS) beginSession() {
	next := new(sessionLife)
	next.ctx, next.end = context.WithCancel(fs.ctx)
	if old := fs.session.Swap(next); old != nil {
		old.end()
	}
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
