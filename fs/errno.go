package fs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// errno is what the application gets to see of err. It is the one place where errors become errnos. One that carries
// no better errno is EIO, and its chain goes to the log, which alone can show it.
func (fs *FS) errno(err error) (answer syscall.Errno) {
	if err == nil {
		return 0
	}
	defer func() { fs.counts.failed(answer) }()
	if errors.Is(err, context.Canceled) {
		return syscall.EINTR
	}
	e, ok := errnoOf(err)
	if !ok || e == syscall.EIO || ofConnection(e) {
		fs.failing.log(fs.log, slog.LevelError, "input/output error", "err", err)
		return syscall.EIO
	}
	return e
}

// ofConnection reports whether an errno tells of a connection to some server. That is no answer that a program
// expects of a file, and ENOTCONN would say that the mount is dead, which the kernel alone knows.
func ofConnection(e syscall.Errno) bool {
	switch e {
	case syscall.EAGAIN, syscall.ENOTCONN, syscall.EISCONN, syscall.ENOTSOCK, syscall.EPIPE,
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.ESHUTDOWN,
		syscall.ENETDOWN, syscall.ENETUNREACH, syscall.ENETRESET, syscall.EHOSTDOWN, syscall.EHOSTUNREACH,
		syscall.EADDRINUSE, syscall.EADDRNOTAVAIL, syscall.EAFNOSUPPORT:
		return true
	}
	return false
}

// errnoOf finds the errno of an error: that of the outermost type that knows its own, or else a bare one.
func errnoOf(err error) (syscall.Errno, bool) {
	var has interface{ Errno() syscall.Errno }
	if errors.As(err, &has) && has.Errno() != 0 {
		return has.Errno(), true
	}
	var e syscall.Errno
	if errors.As(err, &e) && e != 0 {
		return e, true
	}
	return 0, false
}

// givenUp reports whether a call ended because the mount is soft.
func givenUp(err error) bool {
	var over *layout.TimeoutError
	return errors.As(err, &over)
}

// unsure makes the kernel ask again about these inodes, and the names in them, if err is the end of a change that was given up: whether and when it is made
// nobody knows. Of changes that were interrupted the kernel sees that by itself (EINTR). The client keeps nothing of it before there is an answer.
func (fs *FS) unsure(err error, ids ...layout.FileID) {
	if !givenUp(err) {
		return
	}
	for _, id := range ids {
		fs.forgetAttrs(id)
	}
	fs.expireNames(fs.ctx, ids...)
}

// staleError says that there is no such file any more. On ESTALE the kernel looks the path up again, which tells a
// file that is gone from one that has been replaced.
type staleError struct {
	id  layout.FileID
	err error
}

func (e *staleError) Error() string        { return fmt.Sprintf("file %d has been removed: %v", e.id, e.err) }
func (e *staleError) Unwrap() error        { return e.err }
func (e *staleError) Errno() syscall.Errno { return syscall.ESTALE }

// byID makes ENOENT a staleError: it was a file's number, not a name, that the service did not know.
func byID(id layout.FileID, err error) error {
	var e *metarpc.Error
	if errors.As(err, &e) && e.Status == metarpc.Status(syscall.ENOENT) {
		return &staleError{id, err}
	}
	return err
}

// verdict is what to do about a data request that failed.
type verdict int

const (
	fail    verdict = iota // tell the application
	refetch                // the data server does not take this layout any more: ask for another
	wait                   // the service cannot give a layout just now: ask again
)

// classify decides about an error of the data plane, or of the service when it was asked for a layout. The errno is
// for the application, also when the other verdicts have brought no success after all.
func classify(err error) (verdict, syscall.Errno) {
	var gone *staleError
	var m *metarpc.Error
	switch {
	case errors.Is(err, context.Canceled):
		return fail, syscall.EINTR
	case errors.Is(err, errOtherSession), errors.Is(err, dataplane.ErrForsaken), errors.Is(err, dataplane.ErrNotStable):
		return refetch, syscall.EIO
	case errors.Is(err, dataplane.ErrStuck):
		return wait, syscall.EIO // a copy that nothing can replace is waited for until it answers
	case errors.As(err, &gone):
		return fail, syscall.ESTALE
	case errors.As(err, &m) && (m.Status == metarpc.StatusLayoutUnavailable || m.Status == metarpc.StatusShutdown):
		return wait, syscall.EIO
	case m != nil:
		return fail, m.Errno()
	}
	switch e, _ := errnoOf(err); e {
	case syscall.ESTALE, syscall.EACCES, syscall.EPERM:
		// The data file is gone, or no longer ours: the service fences by changing the owner (RFC 8435 section 2.2).
		return refetch, syscall.EIO
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, syscall.EROFS, syscall.EOPNOTSUPP, syscall.ETIMEDOUT:
		return fail, e
	}
	return fail, syscall.EIO
}

// dataErrno is errno for what classify is for.
func (fs *FS) dataErrno(id layout.FileID, err error) syscall.Errno {
	if err == nil {
		return 0
	}
	_, e := classify(err)
	if e == syscall.EIO {
		fs.failing.log(fs.log, slog.LevelError, "input/output error", "file", id, "err", err)
	}
	return e
}
