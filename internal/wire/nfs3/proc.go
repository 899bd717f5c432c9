package nfs3

import "fmt"

// Version is the version of both programs, oncrpc.ProgNFS and oncrpc.ProgMount.
const Version = 3

// Proc is a procedure of the NFS program.
type Proc uint32

// The procedures (RFC 1813 3.3).
const (
	ProcNull Proc = iota
	ProcGetattr
	ProcSetattr
	ProcLookup
	ProcAccess
	ProcReadlink
	ProcRead
	ProcWrite
	ProcCreate
	ProcMkdir
	ProcSymlink
	ProcMknod
	ProcRemove
	ProcRmdir
	ProcRename
	ProcLink
	ProcReaddir
	ProcReaddirPlus
	ProcFsstat
	ProcFsinfo
	ProcPathconf
	ProcCommit
)

var procs = [...]string{
	ProcNull:        "NULL",
	ProcGetattr:     "GETATTR",
	ProcSetattr:     "SETATTR",
	ProcLookup:      "LOOKUP",
	ProcAccess:      "ACCESS",
	ProcReadlink:    "READLINK",
	ProcRead:        "READ",
	ProcWrite:       "WRITE",
	ProcCreate:      "CREATE",
	ProcMkdir:       "MKDIR",
	ProcSymlink:     "SYMLINK",
	ProcMknod:       "MKNOD",
	ProcRemove:      "REMOVE",
	ProcRmdir:       "RMDIR",
	ProcRename:      "RENAME",
	ProcLink:        "LINK",
	ProcReaddir:     "READDIR",
	ProcReaddirPlus: "READDIRPLUS",
	ProcFsstat:      "FSSTAT",
	ProcFsinfo:      "FSINFO",
	ProcPathconf:    "PATHCONF",
	ProcCommit:      "COMMIT",
}

func (p Proc) String() string {
	if int(p) < len(procs) {
		return procs[p]
	}
	return fmt.Sprintf("NFS procedure %d", uint32(p))
}

// MountProc is a procedure of the MOUNT program.
type MountProc uint32

// The procedures (RFC 1813 5.2).
const (
	MountProcNull MountProc = iota
	MountProcMnt
	MountProcDump
	MountProcUmnt
	MountProcUmntAll
	MountProcExport
)

var mountProcNames = [...]string{"NULL", "MNT", "DUMP", "UMNT", "UMNTALL", "EXPORT"}

func (p MountProc) String() string {
	if int(p) < len(mountProcNames) {
		return mountProcNames[p]
	}
	return fmt.Sprintf("MOUNT procedure %d", uint32(p))
}
