package nvmetcp

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// ErrClosed ends everything that a Controller had outstanding when it was closed, or that was started afterwards.
var ErrClosed = errors.New("nvmetcp: controller is closed")

// ErrReset is part of the error of what a call of Reset, or the controller's own wish for one, has ended.
var ErrReset = errors.New("reset")

var (
	errControllerLoss = errors.New("away for longer than the controller-loss time-out")
	errHungUp         = errors.New("closed by the controller")
	errTermReq        = errors.New("ended by the controller") // for what it was sent
)

type resetError struct{ reason string }

func (e *resetError) Error() string        { return "reset: " + e.reason }
func (e *resetError) Is(target error) bool { return target == ErrReset }

// StatusError is a command that the controller has answered with an error. Its Class says what to do about it.
type StatusError struct {
	*wire.CommandError
	NSID   uint32 // 0: no namespace
	SLBA   uint64
	Blocks uint32
	Addr   string
	NQN    string        // of the subsystem
	Delay  time.Duration // the controller wants it to be repeated after that, if at all; 0: at once
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("nvmetcp: %s %s: %v%s", e.Addr, e.NQN, e.CommandError, where(e.NSID, e.SLBA, e.Blocks))
}

// Unwrap returns the answer.
func (e *StatusError) Unwrap() error { return e.CommandError }

func where(nsid uint32, slba uint64, blocks uint32) string {
	switch {
	case nsid == 0:
		return ""
	case blocks == 0:
		return fmt.Sprintf(" (namespace %d)", nsid)
	}
	return fmt.Sprintf(" (namespace %d, %d blocks at %d)", nsid, blocks, slba)
}

// PathError is a command that has no answer because there is no connection, or the one it was on was lost.
type PathError struct {
	Addr  string
	NQN   string
	State State // that the controller was in
	// Sent is whether the controller may have got the whole command and so may have carried it out, or may yet do so.
	Sent bool
	// Gone is from when on the controller has given the lost association up, whatever became of it: nothing that was sent on
	// it is carried out after that. Until then a write that was Sent must not be followed by another one to the same
	// blocks on any path, since it may land behind that. Zero if not Sent, or if nobody knows when.
	Gone time.Time
	Err  error // why
}

func (e *PathError) Error() string {
	what := "not sent"
	if e.Sent {
		what = "sent, may have been carried out"
	}
	if e.Err == nil {
		return fmt.Sprintf("nvmetcp: no connection to %s %s (%v): %s", e.Addr, e.NQN, e.State, what)
	}
	return fmt.Sprintf("nvmetcp: connection to %s %s (%v): %v: %s", e.Addr, e.NQN, e.State, e.Err, what)
}

// Unwrap returns why there is no connection.
func (e *PathError) Unwrap() error { return e.Err }

// Errno returns EIO.
func (e *PathError) Errno() syscall.Errno { return syscall.EIO }

// RequestError is a command that was never sent since it cannot be right.
type RequestError struct {
	Op  string
	Err error
}

func (e *RequestError) Error() string { return fmt.Sprintf("nvmetcp: %s: %v", e.Op, e.Err) }

// Unwrap returns what is wrong.
func (e *RequestError) Unwrap() error { return e.Err }

// Errno returns EINVAL.
func (e *RequestError) Errno() syscall.Errno { return syscall.EINVAL }

// DigestError is a read whose data arrived with a wrong digest: repeating it can help.
type DigestError struct {
	Op     string
	NSID   uint32
	SLBA   uint64
	Blocks uint32
	Addr   string
	NQN    string
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("nvmetcp: %s %s: %s: data digest is wrong%s", e.Addr, e.NQN, e.Op, where(e.NSID, e.SLBA, e.Blocks))
}

// Errno returns EIO.
func (e *DigestError) Errno() syscall.Errno { return syscall.EIO }

// TimeoutError is why a connection was given up: a command had no answer for too long.
type TimeoutError struct {
	Op    string
	After time.Duration
}

func (e *TimeoutError) Error() string { return fmt.Sprintf("%s had no answer for %v", e.Op, e.After) }

// Timeout returns true.
func (e *TimeoutError) Timeout() bool { return true }

// ConnectError is an attempt to bring a controller up that failed.
type ConnectError struct {
	Addr   string
	NQN    string
	Step   string // what failed
	Final  bool   // trying again cannot help: the controller said so, or is not one that can be used
	Advice string // what to do; "" if Err says it
	Err    error
}

func (e *ConnectError) Error() string {
	s := fmt.Sprintf("nvmetcp: %s %s: %s: %v", e.Addr, e.NQN, e.Step, e.Err)
	if e.Advice != "" {
		s += ": " + e.Advice
	}
	return s
}

// Unwrap returns the cause.
func (e *ConnectError) Unwrap() error { return e.Err }
