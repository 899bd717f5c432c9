package dataplane

import (
	"errors"
	"fmt"
	"slices"

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
	// ErrNotKept tells that what this host's kernel had could not be written to the disk, and that there is no other copy of it here.
	ErrNotKept = errors.New("the disk has not taken what was written")
	// ErrNotStable tells that a server kept less than it was asked for and then lost it, or answered what it must not.
	ErrNotStable = errors.New("data is not stable as asked for")
	// ErrReply tells that a target ended a request with counts that cannot be.
	ErrReply = errors.New("reply has impossible count")
)

var (
	// ErrStuck reports that a copy has not answered for Config.MirrorTimeout what another copy has, or was not waited
	// for because its device is late. The request may have been executed, or may be yet.
	ErrStuck = errors.New("no answer, while another copy has answered")
	// ErrForsaken tells that the segment has no copy left that was not given up.
	ErrForsaken = errors.New("all copies of this layout were given up")
)

// Error is the failure of one request to one data server. A read or write of several pieces joins one for each piece
// that failed (errors.Join).
type Error struct {
	Op     layout.OpKind
	Device layout.DeviceID
	File   *layout.DataFile
	// Mirrored says that there are other copies of what the data file holds, by the layout that was used.
	Mirrored bool
	Off      int64
	Len      int
	Err      error
}

func (e *Error) Error() string {
	if e.Op == layout.OpCommit {
		return fmt.Sprintf("COMMIT on device %s: %v", e.Device, e.Err)
	}
	return fmt.Sprintf("%v of %d bytes at %d on device %s: %v", e.Op, e.Len, e.Off, e.Device, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

func opError(op *layout.Op, err error) *Error {
	return &Error{Op: op.Kind, Device: op.File.Device, File: op.File, Off: op.Off, Len: len(op.Data), Err: err}
}

// FailedCopies finds in the error of a write, of Commit, Punch or Allocate the copies of mirrored data that failed, each once.
// They may differ from the others now.
func FailedCopies(err error) []*Error {
	var failed []*Error
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) {
		case nil:
		case *Error:
			same := func(f *Error) bool { return keyOf(f.File) == keyOf(e.File) }
			if e.Mirrored && e.Op != layout.OpRead && !slices.ContainsFunc(failed, same) {
				failed = append(failed, e)
			}
		case interface{ Unwrap() []error }:
			for _, err := range e.Unwrap() {
				walk(err)
			}
		case interface{ Unwrap() error }:
			walk(e.Unwrap())
		}
	}
	walk(err)
	return failed
}
