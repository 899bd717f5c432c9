package nfs3

import (
	"fmt"
	"syscall"
)

// Status is an nfsstat3 (RFC 1813 2.6) or a mountstat3 (5.1.2), whose values are a subset of the former. A Status
// other than OK is an error; Err turns OK into nil.
type Status uint32

// The statuses.
const (
	OK             Status = 0
	ErrPerm        Status = 1
	ErrNoEnt       Status = 2
	ErrIO          Status = 5
	ErrNXIO        Status = 6
	ErrAcces       Status = 13
	ErrExist       Status = 17
	ErrXDev        Status = 18
	ErrNoDev       Status = 19
	ErrNotDir      Status = 20
	ErrIsDir       Status = 21
	ErrInval       Status = 22
	ErrFBig        Status = 27
	ErrNoSpc       Status = 28
	ErrROFS        Status = 30
	ErrMLink       Status = 31
	ErrNameTooLong Status = 63
	ErrNotEmpty    Status = 66
	ErrDQuot       Status = 69
	ErrStale       Status = 70
	ErrRemote      Status = 71
	ErrBadHandle   Status = 10001
	ErrNotSync     Status = 10002
	ErrBadCookie   Status = 10003
	ErrNotSupp     Status = 10004
	ErrTooSmall    Status = 10005
	ErrServerFault Status = 10006
	ErrBadType     Status = 10007
	ErrJukebox     Status = 10008
)

// statuses is the one table of statuses, in the order of RFC 1813 2.6. Of several statuses with one errno, the first is
// what StatusOf returns for it.
var statuses = [...]struct {
	status Status
	name   string
	errno  syscall.Errno
}{
	{OK, "NFS3_OK", 0},
	{ErrPerm, "NFS3ERR_PERM", syscall.EPERM},
	{ErrNoEnt, "NFS3ERR_NOENT", syscall.ENOENT},
	{ErrIO, "NFS3ERR_IO", syscall.EIO},
	{ErrNXIO, "NFS3ERR_NXIO", syscall.ENXIO},
	{ErrAcces, "NFS3ERR_ACCES", syscall.EACCES},
	{ErrExist, "NFS3ERR_EXIST", syscall.EEXIST},
	{ErrXDev, "NFS3ERR_XDEV", syscall.EXDEV},
	{ErrNoDev, "NFS3ERR_NODEV", syscall.ENODEV},
	{ErrNotDir, "NFS3ERR_NOTDIR", syscall.ENOTDIR},
	{ErrIsDir, "NFS3ERR_ISDIR", syscall.EISDIR},
	{ErrInval, "NFS3ERR_INVAL", syscall.EINVAL},
	{ErrFBig, "NFS3ERR_FBIG", syscall.EFBIG},
	{ErrNoSpc, "NFS3ERR_NOSPC", syscall.ENOSPC},
	{ErrROFS, "NFS3ERR_ROFS", syscall.EROFS},
	{ErrMLink, "NFS3ERR_MLINK", syscall.EMLINK},
	{ErrNameTooLong, "NFS3ERR_NAMETOOLONG", syscall.ENAMETOOLONG},
	{ErrNotEmpty, "NFS3ERR_NOTEMPTY", syscall.ENOTEMPTY},
	{ErrDQuot, "NFS3ERR_DQUOT", syscall.EDQUOT},
	{ErrStale, "NFS3ERR_STALE", syscall.ESTALE},
	{ErrRemote, "NFS3ERR_REMOTE", syscall.EIO},
	{ErrBadHandle, "NFS3ERR_BADHANDLE", syscall.ESTALE},
	{ErrNotSync, "NFS3ERR_NOT_SYNC", syscall.EIO},
	{ErrBadCookie, "NFS3ERR_BAD_COOKIE", syscall.EIO},
	{ErrNotSupp, "NFS3ERR_NOTSUPP", syscall.EOPNOTSUPP},
	{ErrTooSmall, "NFS3ERR_TOOSMALL", syscall.EIO},
	{ErrServerFault, "NFS3ERR_SERVERFAULT", syscall.EREMOTEIO},
	{ErrBadType, "NFS3ERR_BADTYPE", syscall.EIO},
	{ErrJukebox, "NFS3ERR_JUKEBOX", syscall.EAGAIN},
}

// String returns the name that RFC 1813 gives the status.
func (s Status) String() string {
	for i := range statuses {
		if statuses[i].status == s {
			return statuses[i].name
		}
	}
	return fmt.Sprintf("NFS3 status %d", uint32(s))
}

// Error makes a Status an error; it returns String.
func (s Status) Error() string { return s.String() }

// Err returns nil for OK and otherwise s.
func (s Status) Err() error {
	if s == OK {
		return nil
	}
	return s
}

// Errno returns the errno for an application; 0 for OK, EIO for a status that RFC 1813 does not have. ErrJukebox asks
// to be repeated after a while and is EAGAIN here for a caller that gives up.
func (s Status) Errno() syscall.Errno {
	for i := range statuses {
		if statuses[i].status == s {
			return statuses[i].errno
		}
	}
	return syscall.EIO
}

// StatusOf returns the status with which a server answers when the system refused something with e: the first status
// that has this errno, so that StatusOf(s.Errno()).Errno() is s.Errno(). An errno that no status has is ErrIO.
func StatusOf(e syscall.Errno) Status {
	for i := range statuses {
		if statuses[i].errno == e {
			return statuses[i].status
		}
	}
	return ErrIO
}
