package nvmetcp

import (
	"errors"
	"fmt"
	"syscall"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// LayoutError is a request that cannot be carried out with the extents that it came with: another layout is needed.
type LayoutError struct {
	Op       string // "WRITE", "DEALLOCATE", ...
	Off, Len int64  // of the data file's bytes that stand in the way
	Why      string
}

func (e *LayoutError) Error() string {
	return fmt.Sprintf("nvmetcp: %s: bytes %d to %d of the data file: %s: another layout is needed", e.Op, e.Off, e.Off+e.Len, e.Why)
}

// Errno returns ESTALE, as for a file handle that is not valid any more.
func (e *LayoutError) Errno() syscall.Errno { return syscall.ESTALE }

// FencedError is a command that was refused since a reservation keeps this host out, or that was not sent since this host has no session
// any more.
type FencedError struct{ Err error }

func (e *FencedError) Error() string { return fmt.Sprintf("this host is fenced: %v", e.Err) }

// Unwrap returns why: the controller's answer, if there is one.
func (e *FencedError) Unwrap() error { return e.Err }

// Errno returns EACCES, as for credentials that are not valid any more.
func (e *FencedError) Errno() syscall.Errno { return syscall.EACCES }

// translate is the error of a command for those who know layouts.
func translate(err error) error {
	if fenced(err) {
		return &FencedError{err}
	}
	return err
}

// fenced reports whether err is a controller's answer that a reservation keeps this host out.
func fenced(err error) bool {
	status, ok := errors.AsType[wire.Status](err)
	return ok && status.Class() == wire.ClassFenced
}
