package metarpc

import (
	"fmt"
	"syscall"
)

// Status is the outcome of a call. Below 1000 it is the Linux errno that the application is to see; above, it is a
// matter between client and service.
type Status uint32

const (
	StatusOK Status = 0

	StatusVersion           Status = 1001 // no common version
	StatusBadSession        Status = 1002 // no such session: it ended, or never was
	StatusBadSequence       Status = 1003 // the slot has gone on
	StatusBadSlot           Status = 1004 // no such slot, or it is busy with another call
	StatusBadArgs           Status = 1005 // the arguments do not decode, or no client of ours would send them
	StatusShutdown          Status = 1006 // the service is going down: connect again and resend
	StatusLayoutUnavailable Status = 1007 // no data server can take the file now: wait and ask again
	StatusInternal          Status = 1008 // the service failed; its log says more
	StatusGrace             Status = 1009 // clients of an earlier instance may still come back: wait and ask again
	StatusLockWait          Status = 1010 // others have the lock; LockReady will tell when to ask again
	StatusFenced            Status = 1011 // others may have changed what the lost session held
	StatusWorking           Status = 1012 // of a callback: data servers keep the client waiting, its answer is still to come
	StatusMoved             Status = 1013 // of a hello: another service has the shard, see Welcome.Ring
	StatusShared            Status = 1014 // of an unlock: make stable what was written under the lock, then unlock
	StatusStuck             Status = 1015 // of a lease recall: the client's own changes stand in its way, the answer comes later
	StatusTurnedBack        Status = 1016 // of a change: it stood in the way of a recall, and nothing was changed
)

// statuses is in the order of the numbers above.
var statuses = []struct {
	status Status
	name   string
	errno  syscall.Errno
}{
	{StatusVersion, "VERSION", syscall.EPROTONOSUPPORT},
	{StatusBadSession, "BADSESSION", syscall.ESTALE},
	{StatusBadSequence, "BADSEQUENCE", syscall.EIO},
	{StatusBadSlot, "BADSLOT", syscall.EIO},
	{StatusBadArgs, "BADARGS", syscall.EINVAL},
	{StatusShutdown, "SHUTDOWN", syscall.EAGAIN},
	{StatusLayoutUnavailable, "LAYOUTUNAVAILABLE", syscall.EAGAIN},
	{StatusInternal, "INTERNAL", syscall.EIO},
	{StatusGrace, "GRACE", syscall.EAGAIN},
	{StatusLockWait, "LOCKWAIT", syscall.EAGAIN},
	{StatusFenced, "FENCED", syscall.EIO},
	{StatusWorking, "WORKING", syscall.EAGAIN},
	{StatusMoved, "MOVED", syscall.EAGAIN},
	{StatusShared, "SHARED", syscall.EAGAIN},
	{StatusStuck, "STUCK", syscall.EAGAIN},
	{StatusTurnedBack, "TURNEDBACK", syscall.ESTALE},
}

// Errno is what the application sees if nothing better can be done; an unknown status is EIO.
func (s Status) Errno() syscall.Errno {
	if s < 1000 {
		return syscall.Errno(s)
	}
	for _, row := range statuses {
		if row.status == s {
			return row.errno
		}
	}
	return syscall.EIO
}

func (s Status) String() string {
	if s == StatusOK {
		return "OK"
	}
	if s < 1000 {
		return syscall.Errno(s).Error()
	}
	for _, row := range statuses {
		if row.status == s {
			return row.name
		}
	}
	return fmt.Sprintf("status(%d)", uint32(s))
}

// Error is a reply other than StatusOK.
type Error struct {
	Op      Op
	Status  Status
	Message string
}

func (e *Error) Error() string {
	if e.Op == 0 { // a hello
		return fmt.Sprintf("metadata service: %v: %s", e.Status, e.Message)
	}
	if e.Message == "" {
		return fmt.Sprintf("metadata service: %v: %v", e.Op, e.Status)
	}
	return fmt.Sprintf("metadata service: %v: %v: %s", e.Op, e.Status, e.Message)
}

// Errno is the status's.
func (e *Error) Errno() syscall.Errno { return e.Status.Errno() }
