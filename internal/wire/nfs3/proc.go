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

var procs = [...]struct {
	name       string
	idempotent bool
}{
	ProcNull:        {"NULL", true},
	ProcGetattr:     {"GETATTR", true},
	ProcSetattr:     {"SETATTR", false},
	ProcLookup:      {"LOOKUP", true},
	ProcAccess:      {"ACCESS", true},
	ProcReadlink:    {"READLINK", true},
	ProcRead:        {"READ", true},
	ProcWrite:       {"WRITE", true},
	ProcCreate:      {"CREATE", false},
	ProcMkdir:       {"MKDIR", false},
	ProcSymlink:     {"SYMLINK", false},
	ProcMknod:       {"MKNOD", false},
	ProcRemove:      {"REMOVE", false},
	ProcRmdir:       {"RMDIR", false},
	ProcRename:      {"RENAME", false},
	ProcLink:        {"LINK", false},
	ProcReaddir:     {"READDIR", true},
	ProcReaddirPlus: {"READDIRPLUS", true},
	ProcFsstat:      {"FSSTAT", true},
	ProcFsinfo:      {"FSINFO", true},
	ProcPathconf:    {"PATHCONF", true},
	ProcCommit:      {"COMMIT", true},
}

func (p Proc) String() string {
	if int(p) < len(procs) {
		return procs[p].name
	}
	return fmt.Sprintf("NFS procedure %d", uint32(p))
}

// Idempotent tells whether a call that was perhaps executed may be sent again without a duplicate request cache on the
// server. SETATTR is not because of its guard, nor CREATE because of the modes other than EXCLUSIVE; WRITE is as long
// as the bytes are the same. An unknown procedure is not.
func (p Proc) Idempotent() bool { return int(p) < len(procs) && procs[p].idempotent }

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
