package nfs3

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// ErrClosed ends everything that a Target had outstanding when it was closed, or that was started afterwards.
var ErrClosed = errors.New("nfs3: target is closed")

// ErrDelayed is part of the error of a call whose context ended while the server said JUKEBOX to it.
var ErrDelayed = errors.New("nfs3: the server says JUKEBOX")

// Error is a status other than OK that the server gave.
type Error struct {
	Op     string // "READ", "LOOKUP" and so on
	Detail string // of what: a range or a name; may be empty
	Status wire.Status
	Addr   netip.AddrPort
}

func (e *Error) Error() string {
	return fmt.Sprintf("nfs3: %s%s on %v: %v", e.Op, e.Detail, e.Addr, e.Status)
}

// Unwrap returns the status.
func (e *Error) Unwrap() error { return e.Status }

// Errno returns the errno of the status.
func (e *Error) Errno() syscall.Errno { return e.Status.Errno() }

// ReplyError is a reply that carries no status: the server refused the call before it ran the procedure (Err is then an
// *oncrpc.Error), answered without ever making progress, or sent what cannot be understood.
type ReplyError struct {
	Op     string
	Detail string
	Addr   netip.AddrPort
	Err    error
}

func (e *ReplyError) Error() string {
	return fmt.Sprintf("nfs3: %s%s on %v: %v", e.Op, e.Detail, e.Addr, e.Err)
}

// Unwrap returns the cause.
func (e *ReplyError) Unwrap() error { return e.Err }

// Refused reports whether the server has not run the procedure, as far as the reply can be understood.
func (e *ReplyError) Refused() bool { return true }

// Errno returns the errno of a refused call, and otherwise EIO.
func (e *ReplyError) Errno() syscall.Errno {
	var errno interface{ Errno() syscall.Errno }
	if errors.As(e.Err, &errno) {
		return errno.Errno()
	}
	return syscall.EIO
}

var (
	errNoProgress = fmt.Errorf("%d replies in a row without a byte", maxEmpty)
	errRestarts   = fmt.Errorf("verifier changed %d times during one request", maxRestarts)
	errHungUp     = errors.New("closed by the server")
	errSilent     = errors.New("no reply")
	errStalled    = errors.New("no reply, while other connections have some")
	errCut        = errors.New("no packet")
	errSlow       = errors.New("the rest of a reply does not come")
	errUnended    = errors.New("it still carries out what an earlier connection sent")
	errIdle       = errors.New("not used for long")
	errRetired    = errors.New("given up for one to another address")
)

// malformed is why a connection was given up: the server sent something that cannot be understood.
type malformed struct{ err error }

func (e *malformed) Error() string { return "malformed reply: " + e.err.Error() }
func (e *malformed) Unwrap() error { return e.err }

func malformedf(format string, args ...any) error {
	return &malformed{fmt.Errorf(format, args...)}
}
