package meta

import (
	"context"
	"fmt"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// handler executes a call. args and the result are pointers to the op's types.
type handler func(s *Service, ctx context.Context, c *call, args any) (any, error)

// handlers has one for each op. Answers of ops that may be executed only once are made with change.
var handlers = [...]handler{
	metarpc.OpRenew:          handle((*Service).renewSession),
	metarpc.OpEndSession:     handle((*Service).endSession),
	metarpc.OpGetAttr:        handle((*Service).getAttr),
	metarpc.OpSetAttr:        handle((*Service).setAttr),
	metarpc.OpLookup:         handle((*Service).lookup),
	metarpc.OpCreate:         handle((*Service).create),
	metarpc.OpMakeNode:       handle((*Service).makeNode),
	metarpc.OpLink:           handle((*Service).link),
	metarpc.OpRemove:         handle((*Service).remove),
	metarpc.OpRename:         handle((*Service).rename),
	metarpc.OpReadDir:        handle((*Service).readDir),
	metarpc.OpReadLink:       handle((*Service).readLink),
	metarpc.OpGetXattr:       handle((*Service).getXattr),
	metarpc.OpSetXattr:       handle((*Service).setXattr),
	metarpc.OpListXattr:      handle((*Service).listXattr),
	metarpc.OpRemoveXattr:    handle((*Service).removeXattr),
	metarpc.OpOpen:           handle((*Service).open),
	metarpc.OpClose:          handle((*Service).close),
	metarpc.OpLayoutGet:      handle((*Service).layoutGet),
	metarpc.OpLayoutReturn:   handle((*Service).layoutReturn),
	metarpc.OpLayoutCommit:   handle((*Service).layoutCommit),
	metarpc.OpDescribeLayout: handle((*Service).describeLayout),
	metarpc.OpDevices:        handle((*Service).devices),
	metarpc.OpAddDevice:      handle((*Service).addDevice),
	metarpc.OpStatFS:         handle((*Service).statFS),
	metarpc.OpStatus:         handle((*Service).statusOf),
	metarpc.OpTmpFile:        handle((*Service).tmpFile),
	metarpc.OpReserve:        handle((*Service).reserve),
	metarpc.OpLock:           handle((*Service).lock),
	metarpc.OpTestLock:       handle((*Service).testLock),
	metarpc.OpLeaseReturn:    handle((*Service).leaseReturn),

	metarpc.OpReclaimComplete: handle((*Service).reclaimComplete),
	metarpc.OpLayoutError:     handle((*Service).layoutError),
	metarpc.OpDrainDevice:     handle((*Service).drainDevice),
	metarpc.OpRemoveDevice:    handle((*Service).removeDevice),
	metarpc.OpLayoutStats:     handle((*Service).layoutStats),
	metarpc.OpLayoutMove:      handle((*Service).layoutMove),
	metarpc.OpCacheStart:      handle((*Service).cacheStart),
	metarpc.OpCacheDone:       handle((*Service).cacheDone),
	metarpc.OpCacheDrop:       handle((*Service).cacheDrop),
	metarpc.OpMetaList:        handle((*Service).metaList),
	metarpc.OpMetaDrain:       handle((*Service).metaDrain),
	metarpc.OpQuotaSet:        handle((*Service).quotaSet),
	metarpc.OpQuotas:          handle((*Service).quotaList),
	metarpc.OpClientSet:       handle((*Service).clientSet),
	metarpc.OpClientList:      handle((*Service).clientList),
	metarpc.OpVerify:          handle((*Service).verify),
	metarpc.OpReportDevices:   handle((*Service).reportDevices),
	metarpc.OpParent:          handle((*Service).parent),
}

// execute has a call's handler execute it.
func (s *Service) execute(c *call, args any) (any, error) {
	if int(c.h.Op) >= len(handlers) || handlers[c.h.Op] == nil {
		return nil, refusef(metarpc.StatusBadArgs, "%v is not an op that this service executes", c.h.Op)
	}
	if err := s.refuseForeign(c.h.Op, args); err != nil {
		return nil, err
	}
	if g := c.sess.confinement(); g != nil {
		if err := s.within(c.ctx, g, c.h.Op, args); err != nil {
			return nil, err
		}
	}
	return handlers[c.h.Op](s, c.ctx, c, args)
}

func handle[A, R any](f func(*Service, context.Context, *call, *A) (*R, error)) handler {
	return func(s *Service, ctx context.Context, c *call, args any) (any, error) {
		r, err := f(s, ctx, c, args.(*A))
		if err != nil {
			return nil, err
		}
		return r, nil
	}
}

// Answers of the service that are errnos. Errors of the catalog may hold an errno of its disk, which is not the
// application's; so only an *Error is an answer.
var (
	errExist    = refuse(syscall.EEXIST)
	errNoEntry  = refuse(syscall.ENOENT)
	errNotDir   = refuse(syscall.ENOTDIR)
	errIsDir    = refuse(syscall.EISDIR)
	errNotEmpty = refuse(syscall.ENOTEMPTY)
	errInvalid  = refuse(syscall.EINVAL)
	errLinks    = refuse(syscall.EMLINK)
	errPerm     = refuse(syscall.EPERM)
	errStale    = refuse(syscall.ESTALE)
	errNoData   = refuse(syscall.ENODATA)
	errNoSpace  = refuse(syscall.ENOSPC)
	errAccess   = refuse(syscall.EACCES)
	errReadOnly = refuse(syscall.EROFS)

	errNotSupported = refuse(syscall.EOPNOTSUPP)
)

func refuse(errno syscall.Errno) *metarpc.Error {
	return &metarpc.Error{Status: metarpc.Status(errno)}
}

// refusef is refuse with words for people.
func refusef(status metarpc.Status, format string, args ...any) error {
	return &metarpc.Error{Status: status, Message: fmt.Sprintf(format, args...)}
}
