package layout

import (
	"fmt"
	"syscall"
	"time"
)

// Patience is for how long requests may remain without an answer from their data server, and metadata services without a sign of life, as
// nfs(5) has it: the zero value is "hard", any other "soft" (EIO) or "softerr" (ETIMEDOUT).
type Patience struct {
	Time  time.Duration // 0: for ever
	Errno syscall.Errno // of requests that are given up
}

// Over returns the error of a request that is given up. why is what is known about the reason, or nil.
func (p Patience) Over(why error) error { return &TimeoutError{p, why} }

// TimeoutError ends a request that had no answer for too long.
type TimeoutError struct {
	Patience Patience
	Err      error // the latest trouble with the data server, or nil
}

func (e *TimeoutError) Error() string {
	s := fmt.Sprintf("no answer for %v, given up as the mount is soft", e.Patience.Time)
	if e.Err != nil {
		s += fmt.Sprintf(" (%v)", e.Err)
	}
	return s
}

// Unwrap returns what is known about the reason.
func (e *TimeoutError) Unwrap() error { return e.Err }

// Errno returns what the application gets.
func (e *TimeoutError) Errno() syscall.Errno { return e.Patience.Errno }
