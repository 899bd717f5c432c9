package metarpc

//lint:file-ignore U1000 msgpack finds the fields _msgpack by reflection

import (
	"time"

	"github.com/weftfs/weft/layout"
)

// Magic starts the first frame in each direction.
const Magic = "weft"

// DefaultPort is where a metadata service listens unless told otherwise.
const DefaultPort = 7049

// Bounds of the protocol.
const (
	MaxFrame    = 4 << 20 // bytes of one frame, without its length
	MaxName     = 255     // bytes of a directory entry's name
	MaxSymlink  = 4095    // bytes of a symbolic link's target
	MaxXattr    = 64 << 10
	MaxXattrKey = 255
	MinSlots    = 4 // slots of a session: enough for calls, Renew, and calls that answer a recall
	MaxSlots    = 256
	MaxBatch    = 1024
	MaxRule     = 8192    // bytes of a rule for clients
	MaxRanges   = 1 << 14 // that become valid by one LayoutCommit
	MaxPlaces   = 1 << 14 // of appends that one LayoutCommit tells of
	MaxVerify   = 4 << 20 // bytes compared by one Verify
	MaxPage     = 4096    // entries of one ReadDir page
	MaxGroups   = 65536   // supplementary groups of a credential, as in Linux (NGROUPS_MAX)
	MaxText     = 4096    // bytes of a URL, a host name and other texts about a client
	MaxMessage  = 4096    // bytes of the message that comes with a status

	MaxServices = 1024 // services of one volume
	MaxAddress  = 259  // bytes of HOST:PORT

	MinLease = 10 * time.Millisecond
	MaxLease = 24 * time.Hour
)

// ReportPeriod is how often ReportDevices is repeated while devices do not answer, ReportLifetime how long one counts.
const (
	ReportPeriod   = 5 * time.Second
	ReportLifetime = 3 * ReportPeriod
)

// QuotaKind is what a quota is for.
type QuotaKind uint8

const (
	QuotaTree  QuotaKind = iota + 1 // all that is below a directory
	QuotaUser                       // all that belongs to a user
	QuotaGroup                      // or a group
	quotaEnd
)

// QuotaKeep leaves a limit as it is.
const QuotaKeep = -1

// FirstCookie is the lowest cookie of a directory entry.
const FirstCookie = 16

// SessionID names a session; zero is none.
type SessionID [16]byte

// Kind is the first element of each frame.
type Kind uint8

const (
	KindHello Kind = iota
	KindWelcome
	KindCall
	KindReply
	KindCallBack
	KindBackReply
)

// ClientInfo tells who a client is, for people and for the service's log.
type ClientInfo struct {
	_msgpack struct{} `msgpack:",as_array"`
	ID       [16]byte // random, chosen when the client process starts
	Host     string
	PID      int
	Program  string // "weft 1.2.3"
	Mount    string // mount point, or what else it is doing
}

// Hello is the client's first frame.
type Hello struct {
	_msgpack struct{} `msgpack:",as_array"`
	Magic    string
	Lowest   uint32
	Highest  uint32
	Client   ClientInfo
	Session  SessionID
	Shard    int // of the volume, which the session is for: 0 to layout.MaxShards-1
}

// Versions are those that the client speaks.
func (h *Hello) Versions() Versions { return Versions{h.Lowest, h.Highest} }

// Welcome answers Hello.
type Welcome struct {
	_msgpack struct{} `msgpack:",as_array"`
	Magic    string
	Version  uint32 // of the connection; with StatusVersion the highest that the service speaks
	Status   Status
	Message  string
	Session  SessionID
	Volume   [16]byte // never changes; also with any other status than StatusOK
	Instance [16]byte // changes with each start of the service
	Slots    int      // MinSlots to MaxSlots
	Lease    int64    // nanoseconds, MinLease to MaxLease
	Ring     Ring     // also with StatusMoved
	Top      string   // since version 8: the directory of the volume that the client's rule confines it to; empty: none
}

// Ring says which service has which shard of the volume. It can be out of date.
type Ring struct {
	_msgpack struct{} `msgpack:",as_array"`
	Epoch    uint64   // of two rings the one with the greater epoch is newer
	Services []string // HOST:PORT; none if there is only the service that tells
	Owners   []int    // by shard, 1 to layout.MaxShards of them: an index of Services, or -1 where nobody has it now
}

// Cred is on whose behalf a call is made: the service checks permissions with it, and new files belong to it.
type Cred struct {
	_msgpack struct{} `msgpack:",as_array"`
	UID, GID uint32
	Groups   []uint32 // supplementary
	ByUID    bool     // the client cannot see the caller's groups; the service looks up those of the user
}

// CallHeader comes before a call's arguments.
type CallHeader struct {
	Slot     int
	Sequence uint64
	Op       Op
	Cred     Cred
}

// ReplyHeader comes before a reply's result.
type ReplyHeader struct {
	Slot     int
	Sequence uint64
	Status   Status
	Message  string
}

// BackHeader comes before a callback's arguments.
type BackHeader struct {
	Number uint64
	Op     BackOp
}

// BackReply answers a callback.
type BackReply struct {
	Number uint64
	Status Status
}

// Attr is an inode's attributes. Times are nanoseconds since 1970.
type Attr struct {
	_msgpack                   struct{} `msgpack:",as_array"`
	ID                         layout.FileID
	Mode                       uint32 // type and permission bits as in st_mode
	Nlink                      uint32
	UID, GID                   uint32
	Rdev                       uint32
	Size                       int64
	Atime, Mtime, Ctime, Btime int64
	Flags                      AttrFlags
	Used                       Used `since:"6"` // of a regular file
}

// Used is how much of a regular file is allocated: the bytes, in whole blocks of UsedBlock, plus one; 0 if that is not known. Copies of the same
// bytes count once.
type Used int64

// UsedBlock is the unit in which Used counts, wherever the bytes are.
const UsedBlock = 4096

// UsedLost in a report says that what is known of the file does not hold any more.
const UsedLost Used = -1

// UsedOf is n bytes, rounded up to whole blocks.
func UsedOf(n int64) Used { return Used((n+UsedBlock-1)/UsedBlock*UsedBlock + 1) }

// Bytes returns how many bytes are allocated, if that is known.
func (u Used) Bytes() (n int64, known bool) { return int64(u) - 1, u > 0 }

// AttrFlags tell what need not be asked for.
type AttrFlags uint32

const (
	AttrXattrs     AttrFlags = 1 << iota // has extended attributes, of which the following are some
	AttrACL                              // has an access control list beyond its mode (system.posix_acl_access)
	AttrDefaultACL                       // directory with a list for what is made in it (system.posix_acl_default)
	AttrCapability                       // has file capabilities (security.capability)
	attrFlagsAll   = 1<<iota - 1
)

// Lease says what of an inode a session may keep; see the package comment.
type Lease uint8

const (
	LeaseAttrs Lease = 1 << iota // attributes, extended attributes, the target of a symbolic link
	LeaseNames                   // of a directory: which names it has, to which inodes they belong, and which it lacks
	LeaseData                    // only in recalls: contents that the kernel keeps are out of date
	leaseAll   = 1<<iota - 1
)

// AttrMask says which attributes a SetAttr sets.
type AttrMask uint32

const (
	SetMode AttrMask = 1 << iota
	SetUID
	SetGID
	SetSize
	SetAtime
	SetMtime
	SetAtimeNow // to the service's clock; Atime is ignored
	SetMtimeNow
	// ClearPrivileges takes the set-user-ID bit, the set-group-ID bit of what its group may execute, and file
	// capabilities away, in the same step. It alone is no change of which others would have to know the time.
	ClearPrivileges
	setAll = 1<<iota - 1
)

// Access says what a file is opened for, or a permission is asked for: the bits of access(2).
type Access uint32

const (
	AccessExec  Access = 1
	AccessWrite Access = 2
	AccessRead  Access = 4
	accessAll          = 7
)

// Pin says which copies of a file may be pinned.
type Pin uint8

const (
	PinNone Pin = iota
	PinOnly     // one that is the only one
	PinAny      // or any of several
	pinEnd
)

// MetaState is how a metadata service is.
type MetaState uint8

const (
	MetaUp       MetaState = iota
	MetaDraining           // it gives its shards away, or has none any more
	MetaSilent             // others take its shards
	metaStateEnd
)

// LockType is what a lock is.
type LockType uint8

const (
	LockNone  LockType = iota // as an argument it unlocks; as an answer it says that nothing is in the way
	LockRead                  // shared
	LockWrite                 // exclusive
	lockTypeEnd
)

// Flags of renameat2(2) and setxattr(2).
const (
	RenameNoReplace = 1
	RenameExchange  = 2

	XattrCreate  = 1
	XattrReplace = 2
)

// DirEntry is one name of a ReadDir page.
type DirEntry struct {
	_msgpack struct{} `msgpack:",as_array"`
	Name     string
	Cookie   uint64
	Attr     Attr
	Lease    Lease // on the inode: LeaseAttrs or 0
}

// Arguments and results, one pair for each Op. Names are raw bytes as the application gave them.
type (
	Empty struct {
		_msgpack struct{} `msgpack:",as_array"`
	}
	IDArgs struct { // GetAttr, ReadLink, ListXattr, DescribeLayout, StatFS
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
	}
	// OpenArgs opens a regular file for the session; Access is checked and remembered. A client that opens again what it
	// had open when the service was restarted says Reclaim, and nothing is checked, and which copy it had pinned.
	// Access is AccessExec then if that was for execution.
	OpenArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Access   Access
		Reclaim  bool
		Pinned   CopyRef
	}
	// AttrResult of MakeNode says for a new directory whether there is a lease on its names as well, since when it was empty.
	AttrResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Attr     Attr
		Lease    Lease // on the inode: LeaseAttrs or 0
	}
	// LookupResult has an Attr with ID 0 if there is no such name.
	LookupResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Attr     Attr
		Lease    Lease // on the inode: LeaseAttrs or 0
		Names    Lease // on the directory: LeaseNames or 0
	}
	NameArgs struct { // Lookup
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
		Name     string
	}
	// ParentArgs: the inode must be below the directory Top, or be it.
	ParentArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID, Top  layout.FileID
	}
	// ParentResult is the directory that a directory is in; of any other inode one that has a name of it, 0 if that is
	// not known.
	ParentResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
	}
	SetAttrArgs struct {
		_msgpack     struct{} `msgpack:",as_array"`
		ID           layout.FileID
		Mask         AttrMask
		Mode         uint32 // permission bits
		UID, GID     uint32
		Size         int64
		Atime, Mtime int64
		Open         bool // the size is set, or privileges cleared, through an open file: that the session may write it suffices
	}
	// CreateArgs makes a regular file if there is none of that name, and opens it for the session either way: a new one for
	// reading and writing, one that exists only if Access is granted.
	CreateArgs struct {
		_msgpack  struct{} `msgpack:",as_array"`
		Parent    layout.FileID
		Name      string
		Mode      uint32 // permission bits
		Umask     uint32 // applied unless the directory has a default access control list
		Exclusive bool   // EEXIST if the name exists
		Access    Access
		// Layout asks for a layout for writing of a new file, as it is about to be written; Near is that of LayoutGetArgs.
		Layout bool
		Near   []layout.DeviceID
	}
	// TmpFileArgs makes a regular file without a name, open for the session for reading and writing (O_TMPFILE). Link may
	// give it one.
	TmpFileArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
		Mode     uint32 // permission bits
		Umask    uint32 // as in CreateArgs
	}
	CreateResult struct { // Create, TmpFile
		_msgpack struct{} `msgpack:",as_array"`
		Attr     Attr
		Created  bool
		Lease    Lease // on the inode: LeaseAttrs or 0
		// Granted says that the session has a layout for writing of the new file, which is not the case if it did not ask, or would have had to
		// wait: then LayoutGet does it. Without Segments this is what an earlier instance of the service has done; the layout may have been
		// recalled since.
		Granted  bool
		Segments []Segment
	}
	// MakeNodeArgs makes anything but a regular file for writing: directory, symbolic link, FIFO, socket, device, and
	// regular files by mknod(2).
	MakeNodeArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
		Name     string
		Mode     uint32 // type and permission bits
		Umask    uint32 // as in CreateArgs
		Rdev     uint32
		Target   string // of a symbolic link
	}
	LinkArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Parent   layout.FileID
		Name     string
	}
	RemoveArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
		Name     string
		Dir      bool // rmdir(2) rather than unlink(2)
	}
	RemoveResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		At       int64    // the time that the directory has got
	}
	// RenameArgs: Flags is 0, RenameNoReplace or RenameExchange.
	RenameArgs struct {
		_msgpack  struct{} `msgpack:",as_array"`
		OldParent layout.FileID
		OldName   string
		NewParent layout.FileID
		NewName   string
		Flags     uint32
	}
	ReadDirArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Cookie   uint64 // entries with greater cookies are wanted
		Limit    int    // about so many, at most MaxPage
	}
	ReadDirResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Entries  []DirEntry
		EOF      bool
		Names    Lease // on the directory: LeaseNames or 0
	}
	BytesResult struct { // ReadLink, GetXattr
		_msgpack struct{} `msgpack:",as_array"`
		Value    []byte
	}
	// XattrArgs: Value and Flags (XattrCreate, XattrReplace) are for SetXattr.
	// The attribute weft.layout is a directory's layout policy (layout.ParsePolicy) or a file's layout in that form.
	XattrArgs struct { // GetXattr, SetXattr, RemoveXattr
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Name     string
		Value    []byte
		Flags    uint32
	}
	NamesResult struct { // ListXattr
		_msgpack struct{} `msgpack:",as_array"`
		Names    []string
	}
	// CloseArgs: opens are a set for each session, not counts. The client opens a file for its first open handle and
	// closes it for the last, never both at once; an unlinked file exists while any session has it open.
	CloseArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		IDs      []layout.FileID
	}
	// LayoutGetArgs asks for segments that hold Off and as much of Len as the service likes. IOModeRead on a file or
	// range that has no data file yet answers no segment: it is a hole.
	LayoutGetArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		IOMode   layout.IOMode
		Off, Len int64
		// Append says that the session only writes where Reserve has told it to. Until it asks without this, nobody has to
		// ask it how long the file is.
		Append bool
		// Near are data servers on the client's host, for files that are to lie there (layout.PlacementLocal), and for Pin.
		Near []layout.DeviceID
		// Pin asks for a copy on one of these that is the whole file as it is, to be read, or with IOModeRW written, by who does not
		// ask before each time: the client's kernel. See LayoutResult.
		Pin Pin
		// Renew says that the session asks, of a file that it has a layout for writing of, how its data files are written now, in order to
		// make stable what it has written. Nothing is granted, wherever Off is. Data files on namespaces are answered without extents: how they are
		// written does not change.
		Renew bool
		// Await says that the session also appends under a lease, without Reserve. A restarted service waits for the
		// session to say how long the file is, and does not ask the data files.
		Await bool `since:"8"`
	}
	// ReserveArgs asks for the place of an append: Len bytes at the end of the file, behind all places that others
	// have.
	ReserveArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Len      int64
		Ended    []uint64 `since:"6"` // as in SizeReport
		GivenUp  []uint64 `since:"6"`
	}
	// ReserveResult says with the place when the append was made: that is what everybody is shown of it, now and later.
	// Number is the place's; 0 means that everybody is shown the place at once, and that it is not recalled.
	ReserveResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Off      int64
		Mtime    int64
		Number   uint64 `since:"6"`
	}
	// Place is where an append goes.
	Place struct {
		_msgpack struct{} `msgpack:",as_array"`
		Number   uint64
		Off, Len int64
		Mtime    int64
	}
	// LayoutResult: Pinned is a copy that has every byte of the file at its offset, and is kept up to date until the session
	// closes the file: it does not become stale, and is not moved. No Handle: there is no such copy, or none can be had now.
	LayoutResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Segments []Segment
		Pinned   CopyRef
	}
	// LayoutReturnArgs gives back all layouts of the files; the session no longer writes them.
	LayoutReturnArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		IDs      []layout.FileID
	}
	// SizeReport is one file's part of a LayoutCommit.
	SizeReport struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		End      int64 // first byte after the last one written; 0 = nothing written
		Mtime    int64 // nanoseconds since 1970; 0 = leave
		Atime    int64 // nanoseconds since 1970, of an inode of any type; 0 = leave. Nobody is told of it
		// Written is what becomes valid of the file's data files that lie on NVMe namespaces, before the size is reported. The ranges of
		// one call are MaxRanges at most.
		Written []Written
		Set     Times
		// Ended are the places of Reserve that the session has written, GivenUp those that it does not write any more.
		// Unknown numbers are ignored. Reserved is what it tells a restarted service of the others. There are MaxPlaces
		// in one call at most.
		Ended    []uint64 `since:"6"`
		GivenUp  []uint64 `since:"6"`
		Reserved []Place  `since:"6"`
		// Used is what is allocated of the file with all that the session has written, also what is not reported yet. It counts in a durable report
		// of a session that has been the only one with a layout for writing since it got that.
		Used Used `since:"6"`
	}
	// Times are what the client has set by hand, without asking, of a file that it may write: no report of before counts any more.
	Times struct {
		_msgpack struct{} `msgpack:",as_array"`
		Mask     AttrMask // SetAtime, SetMtime
		Atime    int64    // nanoseconds since 1970, as the others
		Mtime    int64
		Ctime    int64 // when that was, or its owner was set to what he was; 0 = nothing was set
	}
	// Written says of one data file which of its blocks were written to invalid extents, and are on stable storage.
	Written struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Copy       CopyRef
		Generation uint64  // of the data file in the layout by which they were written
		Ranges     []Range // whole blocks, in their order
	}
	Range struct {
		_msgpack struct{} `msgpack:",as_array"`
		Off, Len int64
	}
	// LayoutCommitArgs: with Provisional nothing becomes valid.
	LayoutCommitArgs struct {
		_msgpack    struct{} `msgpack:",as_array"`
		Reports     []SizeReport
		Provisional bool
	}
	// LayoutCommitResult has an attribute record for each report; one with ID 0 stands for a file that is gone.
	LayoutCommitResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Attrs    []Attr
	}
	// Described is a layout for people and tools.
	Described struct {
		_msgpack   struct{} `msgpack:",as_array"`
		StripeUnit int64
		Mirrors    [][]DescribedServer
		Caches     []DescribedCache
	}
	// DescribedCache is a copy of the whole file for readers.
	DescribedCache struct {
		_msgpack struct{} `msgpack:",as_array"`
		Server   DescribedServer
		State    layout.CopyState
		Bytes    int64
	}
	DescribedServer struct {
		_msgpack struct{} `msgpack:",as_array"`
		Device   layout.DeviceID
		Address  string // host:port:/export
		DataFile string // path below the export; empty when there is none yet
	}
	DevicesResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Devices  []DeviceInfo
	}
	// DeviceInfo is a data server as the service knows it.
	DeviceInfo struct {
		_msgpack    struct{} `msgpack:",as_array"`
		Device      Device
		URL         string // nfs://HOST:PORT/EXPORT[?mountport=PORT] or nvme://HOST:PORT/NQN#NSID
		Reachable   bool
		Problem     string // why not, with since when
		Total, Free int64  // bytes, when last asked
		DataFiles   int64  // in use
		Draining    bool   // it gets no new data files, and those it has move elsewhere
		Load        int64  // thousandths of requests that clients have under way there, see LayoutStatsArgs
		Caches      int64  // of the data files in use those that are caches, full or not
		CacheBytes  int64  // what they have
		Fencing     string // of a namespace: how lost clients are kept from it, for people
		Complaints  uint32 `since:"7"` // clients that it does not answer, though it answers the service; see ReportDevicesArgs
	}
	// AddDeviceArgs: URL is nfs://HOST:PORT/EXPORT or nvme://HOST:PORT/NQN#NSID. Adding one that is known, by address and export or by the
	// namespace's identifiers, answers it as it is. With Force a namespace is taken though somebody else's data is on it.
	AddDeviceArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		URL      string
		Force    bool
	}
	// DrainDeviceArgs begins or, with Cancel, ends the draining of a device.
	DrainDeviceArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Device   layout.DeviceID
		Cancel   bool
	}
	// RemoveDeviceArgs takes a device that is drained and empty out of the volume. Removing one that is not known succeeds, since
	// the call may have been sent before.
	RemoveDeviceArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Device   layout.DeviceID
		Lost     bool // it is gone for good: garbage there is forgotten
	}
	AddDeviceResult struct { // AddDevice, DrainDevice
		_msgpack struct{} `msgpack:",as_array"`
		Info     DeviceInfo
	}
	// StatFSResult is about the volume, or, of an inode in a directory that has a quota, about what that one may have.
	StatFSResult struct {
		_msgpack           struct{} `msgpack:",as_array"`
		Total, Free, Avail int64    // bytes over all data servers
		Files              int64    // inodes in use
		MaxFiles           int64    // how many there may be; 0: as many as there is room for
	}
	// QuotaName is what a quota is for: ID is a directory, a user or a group.
	QuotaName struct {
		_msgpack struct{} `msgpack:",as_array"`
		Kind     QuotaKind
		ID       uint64
	}
	// QuotaSetArgs sets how much there may be: 0 is as much as there is room for, QuotaKeep leaves a limit as it is.
	QuotaSetArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Name     QuotaName
		Bytes    int64
		Files    int64
	}
	// QuotasArgs asks for one quota, which need not have been set, or with After for those that have been set and come after it in the
	// order of kinds and numbers, of which the zero one is before all.
	QuotasArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Name     QuotaName
		After    bool
	}
	QuotasResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Quotas   []QuotaInfo
		EOF      bool // there are no more
	}
	// ClientSetArgs sets a rule for clients, as admit.Parse reads it, in place of the one for the same clients, which with Force may cut clients
	// off that no rule lets in then. Without Rule the one for Whose is removed.
	ClientSetArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Whose    string
		Rule     string
		Force    bool
	}
	// ClientListResult has the rules in the order in which they are looked at.
	ClientListResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Rules    []string // of the volume
		Given    []string // that the service was started with, which come after them
	}
	// QuotaInfo tells people of a quota and of what is used of it.
	QuotaInfo struct {
		_msgpack             struct{} `msgpack:",as_array"`
		Name                 QuotaName
		Path                 string // of a directory, from the volume's root; empty if it is not known
		Bytes, Files         int64  // limits; 0: none
		UsedBytes, UsedFiles int64
	}
	// StatusResult tells people how the service is.
	StatusResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Program  string   // "weftd 1.2.3"
		Started  int64    // nanoseconds since 1970
		Grace    bool     // still waiting for clients of an earlier instance
		Sessions []SessionInfo
		Garbage  int64 // data files that wait for removal
		Stale    int64 // files with copies that are still to be made anew
		Copied   int64 // bytes copied for that since the start
		HeldUp   []HeldUp
		Waiting  []WaitingFiles `since:"7"`
		Catalog  CatalogRoom    `since:"9"`
	}
	// CatalogRoom is how much space the catalog has.
	CatalogRoom struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Free, Size int64    // bytes, without the reserve, and of the whole; Size 0: not known
		Reserve    int64    // bytes that are kept for what makes room
		Low        bool     // it will soon be full
		Full       bool     // nothing new can be made
	}
	// WaitingFiles says how many files wait for a data server so that copies can be made, about. A file may wait for
	// several. The zero device is any one more.
	WaitingFiles struct {
		_msgpack struct{} `msgpack:",as_array"`
		Device   layout.DeviceID
		Files    int64
	}
	// HeldUp says that something is not done to a file because sessions have pinned a copy of it.
	HeldUp struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		What     string
		Since    int64 // nanoseconds since 1970
		Hosts    []string
	}
	SessionInfo struct {
		_msgpack struct{} `msgpack:",as_array"`
		Client   ClientInfo
		Address  string
		Renewed  int64 // nanoseconds since 1970
		Opens    int
		Layouts  int
		Calls    uint64 `since:"5"` // since the session was begun, or the service started
	}
	// LockArgs sets a lock of one owner, who is a number that the client chooses, or takes it away (LockNone). Record locks
	// (fcntl(2)) and those of whole files (flock(2)) do not know of each other.
	LockArgs struct { // Lock, TestLock
		_msgpack   struct{} `msgpack:",as_array"`
		ID         layout.FileID
		Owner      uint64
		Flock      bool
		Type       LockType
		Start, End int64  // first and last byte; math.MaxInt64 is the end of every file
		PID        uint32 // for people and F_GETLK
		Wait       bool   // if it is held by others, LockReady is to tell when to ask again
		Reclaim    bool   // the session had it when the service was restarted
		// Alone, of an unlock: it is to be refused with StatusShared if another session has the file open, or had it since
		// a lock was granted.
		Alone bool `since:"6"`
	}
	LockDone struct { // Lock
		_msgpack struct{} `msgpack:",as_array"`
		// Shared: another session has the file open, or had it since the last lock of this session; what is kept of the
		// file may be older than the lock.
		Shared bool `since:"6"`
	}
	// LockResult is the lock that would be in the way; LockNone if there is none.
	LockResult struct { // TestLock
		_msgpack   struct{} `msgpack:",as_array"`
		Type       LockType
		Start, End int64
		PID        uint32
		Host       string // where the owner is; empty for this session
	}
	// LeaseReturnArgs: the session keeps nothing of these inodes, nor of what it asks about them until this is answered.
	LeaseReturnArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		IDs      []layout.FileID
	}
	// LeaseItem is what of one inode must not be kept any longer.
	LeaseItem struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Lease    Lease
	}
	LeaseRecallArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Items    []LeaseItem
	}
	// SizeQueryArgs: the client reports, by a provisional LayoutCommit, what it has written to the files, and then answers.
	SizeQueryArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		IDs      []layout.FileID
	}
	// ReserveRecallArgs: the session gives up the places of the file with a number up to Upto, if nothing is written
	// there. It finishes the appends that it has begun, and may need a layout for that. It reports which places it has
	// written, by a provisional LayoutCommit, and then answers.
	ReserveRecallArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Upto     uint64
	}
	// LockReadyArgs: a lock that was waited for may be free; ask again.
	LockReadyArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Owner    uint64
		Flock    bool
	}
	// LeaseShrinkArgs: give leases back, those used longest ago, until Keep inodes have one.
	LeaseShrinkArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Keep     int
	}
	// CopyRef names a copy of a stripe column: a data file.
	CopyRef struct {
		_msgpack struct{} `msgpack:",as_array"`
		Device   layout.DeviceID
		Handle   []byte
	}
	// LayoutErrorArgs says which copies may lack something that others have.
	LayoutErrorArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Copies   []CopyRef
		Reason   string // for people
	}
	// CopiesStaleArgs names all copies of a file that are stale. What is known of its layout is out of date.
	CopiesStaleArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Copies   []CopyRef
	}
	// LayoutStatsArgs says what the session has done at devices in the last Span nanoseconds, where it has done anything.
	LayoutStatsArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Span     int64
		Devices  []DeviceStats
	}
	// ReportDevicesArgs names all devices that do not answer this client now, or take none of its writes. It counts
	// until the session's next report, and no longer than ReportLifetime.
	ReportDevicesArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Devices  []layout.DeviceID
	}
	// DeviceStatesArgs names the devices that are down, as the service's own probes find, MaxBatch at most. What Prober
	// has said before with a lower Epoch does not count any more.
	DeviceStatesArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Prober   [16]byte // whose probes these are: a process, from its start to its end
		Epoch    uint64   // grows with each change
		Down     []DownDevice
	}
	DownDevice struct {
		_msgpack struct{} `msgpack:",as_array"`
		Device   layout.DeviceID
		Silent   bool  // it answers nothing; otherwise it takes no writes
		For      int64 // nanoseconds since when that is known
	}
	// LayoutMoveArgs wants the data of a file to lie on a device. Asking again tells how far that is.
	LayoutMoveArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Device   layout.DeviceID
	}
	LayoutMoveResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Finished bool     // it lies there
		Empty    bool     // with Finished: the file has no data files yet
		Done     int64    // bytes that have been copied, of Size; both 0 if nothing had to be
		Size     int64    // of the file, as far as known
		Waits    string   // what the moving waits for, for people
	}
	// VerifyArgs has the copies of [Off, Off+Len) of a file compared, MaxVerify bytes at most, while nobody writes there. With Repair copies that
	// are not as the others are made stale, and then made anew.
	VerifyArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Off, Len int64
		Repair   bool
	}
	VerifyResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Next     int64    // where to go on; layout.ToEOF at the end of the file
		Size     int64
		Copies   int  // good ones, of the stripe that has most; 0 if there was nothing to compare
		Stale    bool // it has copies that are to be made anew, which were not compared
		Differ   []Difference
		Repaired bool // all bad copies are stale; false with Repair: a client's kernel uses one, or it is the last of its data
	}
	// Difference is where good copies are not the same. Good have what Majority says most have; if there is no majority it is what the first copy has, and
	// nobody knows which is right.
	Difference struct {
		_msgpack  struct{} `msgpack:",as_array"`
		Off, Len  int64
		Good, Bad []CopyRef
		Majority  bool
	}
	DeviceStats struct {
		_msgpack      struct{} `msgpack:",as_array"`
		Device        layout.DeviceID
		Reads, Writes IOStats
		Outstanding   int64 // requests that are not answered now
	}
	// IOStats is what requests that were answered come to.
	IOStats struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Ops, Bytes uint64
		Time       int64 // nanoseconds from their start to the answer, all together
	}
	// CacheStartArgs asks for a data file to copy the whole file to, on one of the devices, of which the service chooses. The
	// session has the file open.
	CacheStartArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Devices  []layout.DeviceID
		Limit    int64  // bytes that all caches on the device may have; others go, those used longest ago. 0 = no limit
		Run      uint64 // what was asked for with the same number does not go for this
	}
	// CacheStartResult has a segment for writing with nothing but the cache. Without one there is nothing to be done: all of the file
	// is on one of the devices already, or there is no data.
	CacheStartResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Size     int64
		Cached   bool // it is there already
		Segments []Segment
	}
	// CacheDoneArgs says that the cache that Start has granted has all bytes of the file, and is stable.
	CacheDoneArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Copy     CopyRef
	}
	// CacheDropArgs takes caches of a file away; a zero Device is all devices.
	CacheDropArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Device   layout.DeviceID
	}
	CacheDropResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Caches   int
		Bytes    int64
	}
	// MetaDrainArgs has the service at an address give its shards to others and take none, or with Cancel ends that.
	MetaDrainArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Address  string   // HOST:PORT as MetaList says it
		Cancel   bool
	}
	// MetaListResult tells of all services of the volume.
	MetaListResult struct { // MetaList, MetaDrain
		_msgpack struct{} `msgpack:",as_array"`
		Shards   int      // of the volume
		Services []MetaService
	}
	MetaService struct {
		_msgpack struct{} `msgpack:",as_array"`
		Address  string   // HOST:PORT for clients
		Host     string   // for people
		Program  string   // "weftd 1.2.3"
		Started  int64    // nanoseconds since 1970
		State    MetaState
		Silent   int64 // nanoseconds for which nobody has seen that it lives
		Shards   []int // that it has
		Sessions int   // of clients, for these
		// The versions of this protocol that it speaks. Zero: not known.
		Lowest  uint32 `since:"4"`
		Highest uint32 `since:"4"`
	}
	// LayoutRecallArgs: see the package comment.
	LayoutRecallArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Off, Len int64
	}
)

// Segment, DataFile, Extent and Device are the wire forms of package layout's types.
type (
	Segment struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Off, Len   int64
		IOMode     layout.IOMode
		StripeUnit int64
		Mirrors    [][]DataFile
		Flags      layout.Flags
		StatsHint  uint32
		Shared     bool `since:"6"` // other sessions may write the same bytes
		Exacting   bool `since:"7"` // what is synced is to be at several good copies,
		Few        bool `since:"7"` // of which there are too few now
	}
	DataFile struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Device     layout.DeviceID
		Efficiency uint32
		Handle     []byte
		UID, GID   uint32
		State      layout.CopyState
		Generation uint64   `metarpc:"optional"` // these two are left out on NFSv3 servers, where both are
		Extents    []Extent `metarpc:"optional"` // zero; on namespaces Generation is 1 at least
	}
	Extent struct {
		_msgpack       struct{} `msgpack:",as_array"`
		Off, Len, Addr int64
		State          layout.ExtentState
	}
	Device struct {
		_msgpack     struct{} `msgpack:",as_array"`
		ID           layout.DeviceID
		Addrs        []string // IP:port, TCP; none as long as the service has not found out
		RSize, WSize uint32
		Namespace    []Namespace // of an NFSv3 server none, else one
	}
	// Namespace is layout.Namespace.
	Namespace struct {
		_msgpack struct{} `msgpack:",as_array"`
		NQN      string
		NSID     uint32
		NGUID    [16]byte
		EUI64    [8]byte
		UUID     [16]byte
		Block    int64
		Reserved bool
	}
)
