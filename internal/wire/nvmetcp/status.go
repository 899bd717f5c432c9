package nvmetcp

import (
	"fmt"
	"syscall"
)

// Status is what a controller says about a command: status code type in 10:8, status code in 7:0. What stands beside it in a
// completion (phase, CRD, More, DNR) is not in it. As an error it speaks of an I/O command; see CommandError for others.
type Status uint16

const statusMask Status = 0x7FF

// Generic statuses, and those of I/O commands where the comment says so.
const (
	StatusSuccess          Status = 0x000
	StatusInvalidOpcode    Status = 0x001
	StatusInvalidField     Status = 0x002
	StatusCIDConflict      Status = 0x003
	StatusDataTransfer     Status = 0x004
	StatusPowerLoss        Status = 0x005
	StatusInternal         Status = 0x006
	StatusAborted          Status = 0x007
	StatusSQDeleted        Status = 0x008
	StatusFusedFailed      Status = 0x009
	StatusFusedMissing     Status = 0x00A
	StatusInvalidNamespace Status = 0x00B
	StatusSequence         Status = 0x00C
	StatusSGLSegment       Status = 0x00D
	StatusSGLCount         Status = 0x00E
	StatusSGLLength        Status = 0x00F
	StatusMetadataLength   Status = 0x010
	StatusSGLType          Status = 0x011
	StatusCMB              Status = 0x012
	StatusPRPOffset        Status = 0x013
	StatusAtomicWriteUnit  Status = 0x014
	StatusDenied           Status = 0x015
	StatusSGLOffset        Status = 0x016
	StatusHostID           Status = 0x018
	StatusKeepAliveExpired Status = 0x019
	StatusKeepAliveInvalid Status = 0x01A
	StatusPreempted        Status = 0x01B
	StatusSanitizeFailed   Status = 0x01C
	StatusSanitizing       Status = 0x01D
	StatusSGLGranularity   Status = 0x01E
	StatusCMBQueue         Status = 0x01F
	StatusWriteProtected   Status = 0x020
	StatusInterrupted      Status = 0x021
	StatusTransport        Status = 0x022
	StatusLockedDown       Status = 0x023
	StatusNotReadyMedia    Status = 0x024
	StatusLBARange         Status = 0x080
	StatusCapacity         Status = 0x081
	StatusNotReady         Status = 0x082
	StatusReserved         Status = 0x083 // reservation conflict
	StatusFormatting       Status = 0x084

	StatusAERLimit         Status = 0x105 // admin
	StatusLogPage          Status = 0x109 // admin
	StatusFeatureNotSaved  Status = 0x10D // admin
	StatusFeatureReadOnly  Status = 0x10E // admin
	StatusFeatureNotPerNS  Status = 0x10F // admin
	StatusInvalidCtrlID    Status = 0x11F // admin
	StatusANAGroup         Status = 0x124 // admin
	StatusConnectFormat    Status = 0x180 // Fabrics
	StatusConnectBusy      Status = 0x181 // Fabrics
	StatusConnectParameter Status = 0x182 // Fabrics
	StatusConnectRestart   Status = 0x183 // Fabrics
	StatusConnectHost      Status = 0x184 // Fabrics
	StatusQueueType        Status = 0x185 // Fabrics
	StatusDiscoverRestart  Status = 0x190 // Fabrics
	StatusAuthRequired     Status = 0x191 // Fabrics
	StatusConflictingAttr  Status = 0x180 // I/O
	StatusProtectionInfo   Status = 0x181 // I/O
	StatusReadOnlyRange    Status = 0x182 // I/O
	StatusCommandSizeLimit Status = 0x183 // I/O
	StatusZoneBoundary     Status = 0x1B8 // I/O, as those up to 0x1BF

	StatusWriteFault     Status = 0x280
	StatusReadError      Status = 0x281
	StatusGuardCheck     Status = 0x282
	StatusAppTagCheck    Status = 0x283
	StatusRefTagCheck    Status = 0x284
	StatusCompareFailed  Status = 0x285
	StatusAccessDenied   Status = 0x286
	StatusUnwritten      Status = 0x287
	StatusStorageTag     Status = 0x288
	StatusPathInternal   Status = 0x300
	StatusANALoss        Status = 0x301
	StatusANAInaccess    Status = 0x302
	StatusANATransition  Status = 0x303
	StatusCtrlPathing    Status = 0x360
	StatusHostPathing    Status = 0x370
	StatusHostPathAbort  Status = 0x371
	statusTypePath              = 0x300
	statusTypeCommand           = 0x100
	statusTypeMask              = 0x700
	statusTypeVendor            = 0x700
	statusTypeMediaError        = 0x200
)

// Class is what to do about a status, as Linux does it. Having tried often enough turns a retry into a failure.
type Class uint8

// The classes.
const (
	ClassDone   Class = iota // success
	ClassFail                // the command will not succeed by being repeated
	ClassRetry               // repeat on the same path, after the delay that CRD names
	ClassPath                // repeat on another path; this one may work for other commands
	ClassANA                 // as ClassPath, and read the ANA log before this path is used again
	ClassReset               // reset the controller, then repeat
	ClassRescan              // fail, and look which namespaces there are
	ClassFenced              // somebody else holds a reservation: fail, and give the layout back
	ClassMedia               // fail; another copy may be whole
	ClassAuth                // authenticate again
)

var classNames = [...]string{"done", "fail", "retry", "other path", "other path after ANA log", "reset controller", "rescan", "fenced", "media", "authenticate"}

func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("class %d", uint8(c))
}

type statusRow struct {
	status Status
	set    Set // of statuses of type 1, which mean something else for each
	name   string
	errno  syscall.Errno
	class  Class
}

// statuses is in the order of the specifications: by number, and for one number I/O, admin, Fabrics.
var statuses = []statusRow{
	{StatusSuccess, 0, "success", 0, ClassDone},
	{StatusInvalidOpcode, 0, "invalid command opcode", syscall.EOPNOTSUPP, ClassFail},
	{StatusInvalidField, 0, "invalid field in command", syscall.EIO, ClassFail},
	{StatusCIDConflict, 0, "command ID conflict", syscall.EIO, ClassReset},
	{StatusDataTransfer, 0, "data transfer error", syscall.EIO, ClassRetry},
	{StatusPowerLoss, 0, "aborted due to power loss", syscall.EIO, ClassRetry},
	{StatusInternal, 0, "internal error", syscall.EIO, ClassRetry},
	{StatusAborted, 0, "command abort requested", syscall.EIO, ClassRetry},
	{StatusSQDeleted, 0, "command aborted due to SQ deletion", syscall.EIO, ClassRetry},
	{StatusFusedFailed, 0, "command aborted due to failed fused command", syscall.EIO, ClassFail},
	{StatusFusedMissing, 0, "command aborted due to missing fused command", syscall.EIO, ClassFail},
	{StatusInvalidNamespace, 0, "invalid namespace or format", syscall.EIO, ClassRescan},
	{StatusSequence, 0, "command sequence error", syscall.EIO, ClassReset},
	{StatusSGLSegment, 0, "invalid SGL segment descriptor", syscall.EIO, ClassFail},
	{StatusSGLCount, 0, "invalid number of SGL descriptors", syscall.EIO, ClassFail},
	{StatusSGLLength, 0, "data SGL length invalid", syscall.EIO, ClassFail},
	{StatusMetadataLength, 0, "metadata SGL length invalid", syscall.EIO, ClassFail},
	{StatusSGLType, 0, "SGL descriptor type invalid", syscall.EIO, ClassFail},
	{StatusCMB, 0, "invalid use of controller memory buffer", syscall.EIO, ClassFail},
	{StatusPRPOffset, 0, "PRP offset invalid", syscall.EIO, ClassFail},
	{StatusAtomicWriteUnit, 0, "atomic write unit exceeded", syscall.EIO, ClassFail},
	{StatusDenied, 0, "operation denied", syscall.EACCES, ClassFail},
	{StatusSGLOffset, 0, "SGL offset invalid", syscall.EIO, ClassFail},
	{StatusHostID, 0, "host identifier inconsistent format", syscall.EIO, ClassFail},
	{StatusKeepAliveExpired, 0, "keep alive timer expired", syscall.EIO, ClassReset},
	{StatusKeepAliveInvalid, 0, "keep alive timeout invalid", syscall.EIO, ClassFail},
	{StatusPreempted, 0, "command aborted due to preempt and abort", syscall.EIO, ClassFenced},
	{StatusSanitizeFailed, 0, "sanitize failed", syscall.EIO, ClassFail},
	{StatusSanitizing, 0, "sanitize in progress", syscall.EIO, ClassRetry},
	{StatusSGLGranularity, 0, "SGL data block granularity invalid", syscall.EIO, ClassFail},
	{StatusCMBQueue, 0, "command not supported for queue in CMB", syscall.EIO, ClassFail},
	{StatusWriteProtected, 0, "namespace is write protected", syscall.EROFS, ClassFail},
	{StatusInterrupted, 0, "command interrupted", syscall.EIO, ClassRetry},
	{StatusTransport, 0, "transient transport error", syscall.EIO, ClassRetry},
	{StatusLockedDown, 0, "command prohibited by command and feature lockdown", syscall.EACCES, ClassFail},
	{StatusNotReadyMedia, 0, "admin command media not ready", syscall.EIO, ClassRetry},
	{StatusLBARange, 0, "LBA out of range", syscall.EIO, ClassFail},
	{StatusCapacity, 0, "capacity exceeded", syscall.ENOSPC, ClassFail},
	{StatusNotReady, 0, "namespace not ready", syscall.EIO, ClassRetry},
	{StatusReserved, 0, "reservation conflict", syscall.EIO, ClassFenced},
	{StatusFormatting, 0, "format in progress", syscall.EIO, ClassRetry},

	{StatusAERLimit, SetAdmin, "asynchronous event request limit exceeded", syscall.EIO, ClassFail},
	{StatusLogPage, SetAdmin, "invalid log page", syscall.EIO, ClassFail},
	{StatusFeatureNotSaved, SetAdmin, "feature identifier not saveable", syscall.EIO, ClassFail},
	{StatusFeatureReadOnly, SetAdmin, "feature not changeable", syscall.EIO, ClassFail},
	{StatusFeatureNotPerNS, SetAdmin, "feature not namespace specific", syscall.EIO, ClassFail},
	{StatusInvalidCtrlID, SetAdmin, "invalid controller identifier", syscall.EIO, ClassFail},
	{StatusANAGroup, SetAdmin, "ANA group identifier invalid", syscall.EIO, ClassFail},
	{StatusConflictingAttr, SetIO, "conflicting attributes", syscall.EIO, ClassFail},
	{StatusConnectFormat, SetFabrics, "incompatible format", syscall.EPROTONOSUPPORT, ClassFail},
	{StatusProtectionInfo, SetIO, "invalid protection information", syscall.EIO, ClassFail},
	{StatusConnectBusy, SetFabrics, "controller busy", syscall.EBUSY, ClassRetry},
	{StatusReadOnlyRange, SetIO, "attempted write to read only range", syscall.EROFS, ClassFail},
	{StatusConnectParameter, SetFabrics, "invalid parameters", syscall.EINVAL, ClassFail},
	{StatusCommandSizeLimit, SetIO, "command size limit exceeded", syscall.EIO, ClassFail},
	{StatusConnectRestart, SetFabrics, "restart discovery", syscall.EAGAIN, ClassFail},
	{StatusConnectHost, SetFabrics, "host not allowed", syscall.EACCES, ClassFail},
	{StatusQueueType, SetFabrics, "invalid queue type", syscall.EINVAL, ClassFail},
	{StatusDiscoverRestart, SetFabrics, "discover restart", syscall.EAGAIN, ClassRetry},
	{StatusAuthRequired, SetFabrics, "authentication required", syscall.EACCES, ClassAuth},
	{StatusZoneBoundary, SetIO, "zoned boundary error", syscall.EIO, ClassFail},
	{StatusZoneBoundary + 1, SetIO, "zone is full", syscall.EIO, ClassFail},
	{StatusZoneBoundary + 2, SetIO, "zone is read only", syscall.EROFS, ClassFail},
	{StatusZoneBoundary + 3, SetIO, "zone is offline", syscall.EIO, ClassFail},
	{StatusZoneBoundary + 4, SetIO, "zone invalid write", syscall.EIO, ClassFail},
	{StatusZoneBoundary + 5, SetIO, "too many active zones", syscall.EIO, ClassFail},
	{StatusZoneBoundary + 6, SetIO, "too many open zones", syscall.EIO, ClassFail},
	{StatusZoneBoundary + 7, SetIO, "invalid zone state transition", syscall.EIO, ClassFail},

	{StatusWriteFault, 0, "write fault", syscall.EIO, ClassMedia},
	{StatusReadError, 0, "unrecovered read error", syscall.EIO, ClassMedia},
	{StatusGuardCheck, 0, "end-to-end guard check error", syscall.EIO, ClassMedia},
	{StatusAppTagCheck, 0, "end-to-end application tag check error", syscall.EIO, ClassMedia},
	{StatusRefTagCheck, 0, "end-to-end reference tag check error", syscall.EIO, ClassMedia},
	{StatusCompareFailed, 0, "compare failure", syscall.EIO, ClassFail},
	{StatusAccessDenied, 0, "access denied", syscall.EACCES, ClassFail},
	{StatusUnwritten, 0, "deallocated or unwritten logical block", syscall.EIO, ClassMedia},
	{StatusStorageTag, 0, "end-to-end storage tag check error", syscall.EIO, ClassMedia},

	{StatusPathInternal, 0, "internal path error", syscall.EIO, ClassPath},
	{StatusANALoss, 0, "asymmetric access persistent loss", syscall.EIO, ClassANA},
	{StatusANAInaccess, 0, "asymmetric access inaccessible", syscall.EIO, ClassANA},
	{StatusANATransition, 0, "asymmetric access transition", syscall.EIO, ClassANA},
	{StatusCtrlPathing, 0, "controller pathing error", syscall.EIO, ClassPath},
	{StatusHostPathing, 0, "host pathing error", syscall.EIO, ClassPath},
	{StatusHostPathAbort, 0, "command aborted by host", syscall.EIO, ClassPath},
}

// row looks the status up as one of a command of set.
func (s Status) row(set Set) statusRow {
	for _, row := range statuses {
		if row.status == s && (s&statusTypeMask != statusTypeCommand || row.set == set) {
			return row
		}
	}
	row := statusRow{status: s, errno: syscall.EIO, class: ClassFail}
	switch s & statusTypeMask {
	case statusTypePath:
		row.name, row.class = "unknown path error", ClassPath
	case statusTypeMediaError:
		row.name, row.class = "unknown media error", ClassMedia
	case statusTypeVendor:
		row.name = "vendor specific"
	default:
		row.name = "unknown status"
	}
	return row
}

// Class is what to do about the status of an I/O command.
func (s Status) Class() Class { return s.row(SetIO).class }

// Errno is what an application sees if nothing else can be done about the status of an I/O command; EIO if it is not known.
func (s Status) Errno() syscall.Errno { return s.row(SetIO).errno }

// Text is the status's name for a command of set, with its number.
func (s Status) Text(set Set) string { return fmt.Sprintf("%s (%#03x)", s.row(set).name, uint16(s)) }

func (s Status) String() string { return s.Text(SetIO) }

func (s Status) Error() string { return s.Text(SetIO) }

// CommandError is a command that a controller completed with a status other than success. It is its Status to errors.Is.
type CommandError struct {
	Name   string // of the command
	Set    Set
	Status Status
	CRD    uint8
	DNR    bool
	Result uint64
}

func (e *CommandError) Error() string {
	msg := fmt.Sprintf("%s: %s", e.Name, e.Status.Text(e.Set))
	if e.Set == SetFabrics && e.Status == StatusConnectParameter {
		msg += ": " + ConnectParam(uint32(e.Result)).Error()
	}
	return msg
}

// Unwrap is the status.
func (e *CommandError) Unwrap() error { return e.Status }

// Class is what to do, DNR counted.
func (e *CommandError) Class() Class { return e.Status.row(e.Set).class.heed(e.DNR) }

// heed is the class with DNR, which says that the command would fail on every path.
func (c Class) heed(dnr bool) Class {
	if dnr && (c == ClassRetry || c == ClassPath || c == ClassANA) {
		return ClassFail
	}
	return c
}

// Class is what to do about an I/O command, DNR counted.
func (c *Completion) Class() Class { return c.Status.Class().heed(c.DNR) }

// Errno is what an application sees if nothing else can be done.
func (e *CommandError) Errno() syscall.Errno { return e.Status.row(e.Set).errno }
