package metarpc

import (
	"time"

	"github.com/weftfs/weft/layout"
)

// Version is the one version of the protocol there is.
const Version = 1

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
	MaxPage     = 4096 // entries of one ReadDir page
	MaxText     = 4096 // bytes of a URL, a host name and other texts about a client
	MaxMessage  = 4096 // bytes of the message that comes with a status

	MinLease = 10 * time.Millisecond
	MaxLease = 24 * time.Hour
)

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
}

// Welcome answers Hello.
type Welcome struct {
	_msgpack struct{} `msgpack:",as_array"`
	Magic    string
	Version  uint32
	Status   Status
	Message  string
	Session  SessionID
	Volume   [16]byte // never changes
	Instance [16]byte // changes with each start of the service
	Slots    int      // MinSlots to MaxSlots
	Lease    int64    // nanoseconds, MinLease to MaxLease
}

// Cred is on whose behalf a call is made; new files belong to it.
type Cred struct {
	_msgpack struct{} `msgpack:",as_array"`
	UID, GID uint32
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
}

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
	setAll = 1<<iota - 1
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
}

// Arguments and results, one pair for each Op. Names are raw bytes as the application gave them.
type (
	Empty struct {
		_msgpack struct{} `msgpack:",as_array"`
	}
	IDArgs struct { // GetAttr, ReadLink, Open, ListXattr, DescribeLayout
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
	}
	AttrResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Attr     Attr
	}
	NameArgs struct { // Lookup
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
		Name     string
	}
	SetAttrArgs struct {
		_msgpack     struct{} `msgpack:",as_array"`
		ID           layout.FileID
		Mask         AttrMask
		Mode         uint32 // permission bits
		UID, GID     uint32
		Size         int64
		Atime, Mtime int64
	}
	// CreateArgs makes a regular file if there is none of that name, and opens it for the session either way.
	CreateArgs struct {
		_msgpack  struct{} `msgpack:",as_array"`
		Parent    layout.FileID
		Name      string
		Mode      uint32 // permission bits, umask applied
		Exclusive bool   // EEXIST if the name exists
	}
	CreateResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Attr     Attr
		Created  bool
	}
	// MakeNodeArgs makes anything but a regular file for writing: directory, symbolic link, FIFO, socket, device, and
	// regular files by mknod(2).
	MakeNodeArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		Parent   layout.FileID
		Name     string
		Mode     uint32 // type and permission bits
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
	}
	LayoutResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Segments []Segment
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
	}
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
		Size       int64
		StripeUnit int64
		Mirrors    [][]DescribedServer
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
		URL         string // nfs://HOST:PORT/EXPORT
		Reachable   bool
		Problem     string // why not, with since when
		Total, Free int64  // bytes, when last asked
		DataFiles   int64  // in use
	}
	// AddDeviceArgs: URL is nfs://HOST:PORT/EXPORT. Adding one that is known, by address and export, answers it as it is.
	AddDeviceArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		URL      string
	}
	AddDeviceResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Info     DeviceInfo
	}
	StatFSResult struct {
		_msgpack           struct{} `msgpack:",as_array"`
		Total, Free, Avail int64    // bytes over all data servers
		Files              int64    // inodes in use
	}
	// StatusResult tells people how the service is.
	StatusResult struct {
		_msgpack struct{} `msgpack:",as_array"`
		Program  string   // "weftd 1.2.3"
		Started  int64    // nanoseconds since 1970
		Grace    bool     // still waiting for clients of an earlier instance
		Sessions []SessionInfo
		Garbage  int64 // data files that wait for removal
	}
	SessionInfo struct {
		_msgpack struct{} `msgpack:",as_array"`
		Client   ClientInfo
		Address  string
		Renewed  int64 // nanoseconds since 1970
		Opens    int
		Layouts  int
	}
	// LayoutRecallArgs: see the package comment.
	LayoutRecallArgs struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Off, Len int64
	}
)

// Segment, Mirror, DataFile and Device are the wire forms of package layout's types.
type (
	Segment struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Off, Len   int64
		IOMode     layout.IOMode
		StripeUnit int64
		Mirrors    [][]DataFile
		Flags      layout.Flags
		StatsHint  uint32
	}
	DataFile struct {
		_msgpack   struct{} `msgpack:",as_array"`
		Device     layout.DeviceID
		Efficiency uint32
		Handle     []byte
		UID, GID   uint32
	}
	Device struct {
		_msgpack     struct{} `msgpack:",as_array"`
		ID           layout.DeviceID
		Addrs        []string // IP:port, TCP
		RSize, WSize uint32
	}
)
