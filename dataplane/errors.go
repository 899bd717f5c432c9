package dataplane

import (
	"errors"
	"fmt"

	"github.com/weftfs/weft/layout"
)

var (
	// ErrClosed ends requests of a plane that was closed.
	ErrClosed = errors.New("data plane closed")
	// ErrReadOnly tells that a write came with a segment that was granted for reading.
	ErrReadOnly = errors.New("layout segment is for reading only")
	// ErrVerifier tells that a server lost unstable data again and again while it was being committed. The data is still
	// retained.
	ErrVerifier = errors.New("write verifier keeps changing")
	// ErrNotStable tells that a server kept less than it was asked for and then lost it, or answered what it must not.
	ErrNotStable = errors.New("data is not stable as asked for")
	// ErrReply tells that a target ended a request with counts that cannot be.
	ErrReply = errors.New("reply has impossible count")
)

// Error is the failure of one request to one data server. A read or write of several pieces joins one for each piece
// that failed (errors.Join).
type Error struct {
	Op     layout.OpKind
	Device layout.DeviceID
	Off    int64
	Len    int
	Err    error
}

func (e *Error) Error() string {
	if e.Op == layout.OpCommit {
		return fmt.Sprintf("COMMIT on device %s: %v", e.Device, e.Err)
	}
	return fmt.Sprintf("%v of %d bytes at %d on device %s: %v", e.Op, e.Len, e.Off, e.Device, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

func opError(op *layout.Op, err error) error {
	return &Error{Op: op.Kind, Device: op.File.Device, Off: op.Off, Len: len(op.Data), Err: err}
}
