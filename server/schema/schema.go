package schema

//lint:file-ignore U1000 msgpack finds the fields _msgpack by reflection

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Prefixes of the keys, see the package comment.
const (
	PrefixNamespace = 'a'
	PrefixUnits     = 'b'
	PrefixInUse     = 'c'
	PrefixDevice    = 'd'
	PrefixEntry     = 'e'
	PrefixFill      = 'f'
	PrefixGarbage   = 'g'
	PrefixCache     = 'h'
	PrefixInode     = 'i'
	PrefixExtents   = 'j'
	PrefixCounters  = 'k'
	PrefixLayout    = 'l'
	PrefixOrphan    = 'o'
	PrefixMove      = 'p'
	PrefixCondemned = 'q'
	PrefixReply     = 'r'
	PrefixSession   = 's'
	PrefixTruncate  = 't'
	PrefixWriter    = 'w'
	PrefixXattr     = 'x'
	PrefixSpace     = 'y'
	PrefixBeat      = 'B'
	PrefixDirty     = 'D'
	PrefixMember    = 'M'
	PrefixQuota     = 'Q'
	PrefixShard     = 'S'
	PrefixTold      = 'T'
	PrefixOwner     = 'U'
	PrefixFiles     = 'u'
)

// Keys of single rows.
var (
	KeyClients     = []byte("C")
	KeyImport      = []byte("I")
	KeyMaintenance = []byte("F")
	KeyMoves       = []byte("m")
	KeyNextInode   = []byte("n")
	KeyRing        = []byte("R")
	KeyVolume      = []byte("v")
)

// Fields of a directory's counter row. Times are nanoseconds since 1970; the directory's time is the later of this
// one and the inode row's.
const (
	CounterEntries = iota
	CounterSubdirs
	CounterMtime
	CounterCtime
	CounterBytes    // of the inodes whose home the directory is, see Usage in the package comment
	CounterFiles    // how many these are
	CounterSubBytes // the sum of what its subdirectories have told it: these three
	CounterSubFiles
	CounterSubDirs
)

// Fields of the counter row of an owner.
const (
	OwnerBytes = iota // of inodes
	OwnerFiles        // inodes, directories too
)

// Fields of the row of what a directory has told its parent.
const (
	ToldBytes = iota
	ToldFiles
	ToldDirs
)

// Fields of the counter row of a namespace.
const (
	SpaceTaken     = iota // units that data files have
	SpaceCondemned        // units that are condemned
)

// Formats of catalogs. Each may have what the ones before it have, and needs a program that knows it. Catalogs without
// usage have formats from formatBefore on, by addUsage lower than with it: the service that opens one counts its usage,
// and raises its format.
const (
	Format           = 6 // what the package comment describes, without what the others add
	FormatNamespaces = 7 // it has, or had, devices that are NVMe namespaces
	FormatShards     = 8 // it has, or had, several shards
	FormatCopies     = 9 // policies and layouts with MinCopies, and layouts with absent copies that are to be made

	FormatNewest = FormatCopies // that this program knows

	formatBefore = 3
	addUsage     = Format - formatBefore
)

// CheckFormat says whether a catalog of this format can be used.
func CheckFormat(format int) error {
	if format < formatBefore || format > FormatNewest {
		what := "upgrade weftd on this host"
		if format < formatBefore {
			what = "it takes an earlier weftd to upgrade the catalog"
		}
		return fmt.Errorf("the catalog has format %d, this program knows formats %d to %d: %s", format, formatBefore, FormatNewest, what)
	}
	return nil
}

// CountsUsage reports whether a catalog of this format has the rows of usage.
func CountsUsage(format int) bool { return format >= Format }

// Raised is the format of a catalog that had this one before it got what another format is for: FormatNamespaces or
// FormatShards, or, if it has usage, any.
func Raised(format, to int) int {
	if !CountsUsage(format) {
		to -= addUsage
	}
	return max(format, to)
}

// Volume is the file system as a whole.
type Volume struct {
	_msgpack struct{} `msgpack:",as_array"`
	Format   int
	ID       [16]byte
	Created  int64
	Policy   Policy // for directories that have none
	Shards   int    // among which the metadata services divide the inodes, see layout.ShardOf; 0 is one, and what earlier versions wrote
}

// AddUsage raises the format of a volume that had no rows of usage, and has them now.
func (v *Volume) AddUsage() { v.Format += addUsage }

// ShardCount is how many shards the volume has, at least one.
func (v *Volume) ShardCount() int { return max(v.Shards, 1) }

// Policy is layout.Policy on disk. Its last field is only there if it is not 0: earlier versions do not know it.
type Policy struct {
	StripeUnit  int64
	StripeCount int
	Mirrors     int
	Placement   layout.Placement
	MinCopies   int
}

// Layout returns the policy as package layout's.
func (p Policy) Layout() layout.Policy {
	return layout.Policy{
		StripeUnit: p.StripeUnit, StripeCount: p.StripeCount, Mirrors: p.Mirrors, Placement: p.Placement, MinCopies: p.MinCopies,
	}
}

// PolicyOf is the inverse of Policy.Layout.
func PolicyOf(p layout.Policy) Policy {
	return Policy{
		StripeUnit: p.StripeUnit, StripeCount: p.StripeCount, Mirrors: p.Mirrors, Placement: p.Placement, MinCopies: p.MinCopies,
	}
}

// policyFields is how many fields of a Policy all versions have.
const policyFields = 4

// EncodeMsgpack implements [msgpack.CustomEncoder].
func (p *Policy) EncodeMsgpack(e *msgpack.Encoder) error {
	n := policyFields
	if p.MinCopies != 0 {
		n++
	}
	err := errors.Join(e.EncodeArrayLen(n), e.EncodeInt64(p.StripeUnit), e.EncodeInt(int64(p.StripeCount)),
		e.EncodeInt(int64(p.Mirrors)), e.EncodeUint8(uint8(p.Placement)))
	if err == nil && p.MinCopies != 0 {
		err = e.EncodeInt(int64(p.MinCopies))
	}
	return err
}

// DecodeMsgpack implements [msgpack.CustomDecoder].
func (p *Policy) DecodeMsgpack(d *msgpack.Decoder) error {
	*p = Policy{}
	n, err := d.DecodeArrayLen()
	if err == nil && n != policyFields && n != policyFields+1 {
		err = fmt.Errorf("policy of %d fields", n)
	}
	if err != nil {
		return err
	}
	if p.StripeUnit, err = d.DecodeInt64(); err != nil {
		return err
	}
	if p.StripeCount, err = d.DecodeInt(); err != nil {
		return err
	}
	if p.Mirrors, err = d.DecodeInt(); err != nil {
		return err
	}
	placement, err := d.DecodeUint8()
	if err != nil {
		return err
	}
	p.Placement = layout.Placement(placement)
	if n > policyFields {
		p.MinCopies, err = d.DecodeInt()
	}
	return err
}

// Inode is an inode. A directory's Nlink is not used (it is 2 plus the counter of subdirectories), nor is its Size.
type Inode struct {
	_msgpack                   struct{} `msgpack:",as_array"`
	Mode                       uint32   // type and permission bits as in st_mode
	Nlink                      uint32
	UID, GID                   uint32
	Rdev                       uint32
	Size                       int64
	Atime, Mtime, Ctime, Btime int64             // nanoseconds since 1970
	Parent                     layout.FileID     // of a directory; the root is its own. Of other inodes the home, 0 if it has none, see Usage
	Target                     string            // of a symbolic link
	Policy                     Policy            // directory: for what is made in it; regular file: its own, fixed at birth
	Xattrs                     int               // how many extended attribute rows it has
	Flags                      metarpc.AttrFlags // what those are, see XattrFlags
	Linkable                   bool              // an orphan that has never had a name and may get one
	Used                       metarpc.Used      // of a regular file; 0, which earlier versions wrote, says that it is not known
}

// IsDir reports whether the inode is a directory.
func (i *Inode) IsDir() bool { return i.Mode&syscall.S_IFMT == syscall.S_IFDIR }

// ChargedBytes is what the inode's home and owner are charged with besides the inode itself, see Usage in the package
// comment.
func (i *Inode) ChargedBytes() int64 {
	if i.IsDir() {
		return 0
	}
	return i.Size
}

// XattrACL and the others are the names of attributes that an inode tells of.
const (
	XattrACL        = "system.posix_acl_access"
	XattrDefaultACL = "system.posix_acl_default"
	XattrCapability = "security.capability"
)

// XattrFlags is what an inode says because it has an attribute of this name.
func XattrFlags(name string) metarpc.AttrFlags {
	switch name {
	case XattrACL:
		return metarpc.AttrXattrs | metarpc.AttrACL
	case XattrDefaultACL:
		return metarpc.AttrXattrs | metarpc.AttrDefaultACL
	case XattrCapability:
		return metarpc.AttrXattrs | metarpc.AttrCapability
	}
	return metarpc.AttrXattrs
}

// Entry is a directory entry.
type Entry struct {
	_msgpack struct{} `msgpack:",as_array"`
	ID       layout.FileID
	Type     uint32 // S_IFMT bits
}

// Layout says where a regular file's data files are. Every mirror has Width slots, of which the first len(Servers) have
// a data file: one, for a file no longer than a stripe unit, or all.
type Layout struct {
	_msgpack   struct{} `msgpack:",as_array"`
	StripeUnit int64
	Width      int
	Mirrors    [][]DataFile
	// Moving says that the last mirror is there only for data files that move to another device: it has such as take the place of
	// others, and is absent elsewhere. If it has one data file in all of several columns the file becomes one data file.
	Moving bool
	// Caches are copies of the whole file that only readers have, each on another device. They are no mirrors: none exists while
	// somebody may write the file without writing the cache, too.
	Caches []Cache
	// MinCopies is the file's own, see layout.Policy; 0 is 1.
	MinCopies int
}

// Cache is one data file with all that a file has, whatever the stripes are.
type Cache struct {
	_msgpack struct{}          `msgpack:",as_array"`
	File     DataFile          // its state: filling until it is full, stale when nobody is to read it any more
	Bytes    int64             // what the file had when it was begun
	Made     int64             // when it was full, nanoseconds since 1970
	Session  metarpc.SessionID // who fills it
}

// Ref names the cache's data file.
func (c *Cache) Ref() metarpc.CopyRef { return c.File.Ref() }

// CacheUse is what the row of a cache says by its device: what Layout.Caches has of it, but how to get there.
type CacheUse struct {
	_msgpack struct{} `msgpack:",as_array"`
	State    layout.CopyState
	Bytes    int64
	Made     int64
	Session  metarpc.SessionID // who fills it
}

// Use is the row of the cache by its device.
func (c *Cache) Use() CacheUse {
	return CacheUse{State: c.File.State, Bytes: c.Bytes, Made: c.Made, Session: c.Session}
}

// DataFile is one data file on one device.
type DataFile struct {
	_msgpack struct{} `msgpack:",as_array"`
	Device   layout.DeviceID
	Number   uint64 // names it on the device, see DataFileName
	Handle   []byte
	UID, GID uint32 // synthetic owner
	State    layout.CopyState
}

// Absent is what a mirror has that lacks a column: a copy that is to be made once there is a data server for it, or
// one that the mirror of a file that is Moving does without.
func Absent() DataFile { return DataFile{Handle: []byte{0}, State: layout.CopyStale} }

// IsAbsent reports whether there is no data file.
func (f *DataFile) IsAbsent() bool { return f.Device == layout.DeviceID{} }

// Ref names the data file.
func (f *DataFile) Ref() metarpc.CopyRef { return metarpc.CopyRef{Device: f.Device, Handle: f.Handle} }

// Is reports whether ref names the data file.
func (f *DataFile) Is(ref metarpc.CopyRef) bool {
	return ref.Device == f.Device && bytes.Equal(ref.Handle, f.Handle)
}

// Same reports whether both are one data file.
func (f *DataFile) Same(o *DataFile) bool { return f.Device == o.Device && f.Number == o.Number }

// Copies names the data files of a layout that are in a state.
func (l *Layout) Copies(state layout.CopyState) []metarpc.CopyRef {
	var refs []metarpc.CopyRef
	for _, files := range l.Mirrors {
		for i := range files {
			if files[i].State == state && !files[i].IsAbsent() {
				refs = append(refs, metarpc.CopyRef{Device: files[i].Device, Handle: files[i].Handle})
			}
		}
	}
	return refs
}

// FewCopies reports whether the row has what only FormatCopies has: MinCopies, or absent copies that are to be made.
func (l *Layout) FewCopies() bool {
	mirrors := l.Mirrors
	if l.Moving {
		mirrors = mirrors[:len(mirrors)-1]
	}
	return l.MinCopies != 0 || slices.ContainsFunc(mirrors, func(files []DataFile) bool {
		return slices.ContainsFunc(files, func(file DataFile) bool { return file.IsAbsent() })
	})
}

// GoodCopies is how many good copies a column has.
func (l *Layout) GoodCopies(column int) int {
	n := 0
	for _, files := range l.Mirrors {
		if files[column].State == layout.CopyGood {
			n++
		}
	}
	return n
}

// Gathers reports whether the file is being moved into one data file.
func (l *Layout) Gathers() bool { return l.Moving && OneFile(l.Mirrors[len(l.Mirrors)-1]) }

// OneFile reports whether all of several columns are one data file.
func OneFile(files []DataFile) bool {
	for j := range files {
		if files[j].IsAbsent() || !files[j].Same(&files[0]) {
			return false
		}
	}
	return len(files) > 1
}

// Has reports whether one of the data files is such a one.
func (l *Layout) Has(such func(*DataFile) bool) bool {
	for _, files := range l.Mirrors {
		for i := range files {
			if such(&files[i]) {
				return true
			}
		}
	}
	return false
}

// Incomplete reports whether there are copies that are not good, or absent. Then, and only then, there is a fill row.
func (l *Layout) Incomplete() bool {
	return l.Moving || l.Has(func(file *DataFile) bool { return file.State != layout.CopyGood })
}

// Fill is how far the copies of a file that are being filled have got.
type Fill struct {
	_msgpack struct{} `msgpack:",as_array"`
	Done     int64    // they have all bytes before it
}

// Move is the wish that a file's data lie on a device.
type Move struct {
	_msgpack struct{} `msgpack:",as_array"`
	Device   layout.DeviceID
}

// Device is a data server, or an NVMe namespace, of which there is a Namespace row, too.
type Device struct {
	_msgpack struct{} `msgpack:",as_array"`
	Host     string   // as the administrator gave it
	Port     uint16
	Export   string // of a namespace it is empty
	Root     []byte // handle of the export's root when it was added
	Next     uint64 // no data file of this or a higher number was ever made
	Draining bool   // it gets no new data files, and those it has move elsewhere

	MountPort uint16 // of its MOUNT service; 0 = on Port, or where the port mapper says

	NQN     string // of a namespace: its subsystem, which has a port at Host and Port
	NSID    uint32
	Portals []string // and others, HOST:PORT
	// Reserved says that the service keeps a reservation there, so that clients have to register. It stands here for when the namespace was not yet reached.
	Reserved bool
}

// Namespace is what a device is that is an NVMe namespace. It is cut into units, which are what data files get.
type Namespace struct {
	_msgpack struct{} `msgpack:",as_array"`
	NGUID    [16]byte // zero if it has none, as the two below; it has at least one of them
	EUI64    [8]byte
	UUID     [16]byte
	Block    int64  // bytes; what is written and becomes valid as a whole
	Size     int64  // bytes of the namespace
	Unit     int64  // bytes
	Group    int64  // units that one row of the map of free units is about
	Label    uint64 // generation of its label
}

// ExtentFile is a data file on a namespace.
type ExtentFile struct {
	_msgpack   struct{} `msgpack:",as_array"`
	Generation uint64   // raised when it loses bytes: what was told to clients before may no longer be true
	Units      int64    // that it has
}

// Extents are units of a data file that lie behind each other in it, though not without gaps.
type Extents struct {
	_msgpack struct{} `msgpack:",as_array"`
	Runs     []ExtentRun
}

// ExtentRun is Count units from unit At of a data file on. They are the units from Unit on of the namespace.
type ExtentRun struct {
	_msgpack   struct{} `msgpack:",as_array"`
	At, Unit   int64
	Count      int64
	Generation uint64 // of the data file when it got them, or when blocks of them were made invalid
	State      RunState
	Valid      []byte // if it is RunPartly: a bit for each block of the one unit, the first one the lowest of the first byte
}

// RunState says which blocks of a run are valid.
type RunState uint8

const (
	RunInvalid RunState = iota // none
	RunValid                   // all
	RunPartly                  // some
)

// Condemned are units of a namespace that are neither a data file's nor free.
type Condemned struct {
	_msgpack struct{} `msgpack:",as_array"`
	Count    int64
}

// Session is a client's session.
type Session struct {
	_msgpack struct{} `msgpack:",as_array"`
	Client   metarpc.ClientInfo
	Created  int64
	Ended    bool // nobody may come back to it; the row stays until all it left behind is dealt with
	Shard    int  // of the volume, that it is for
}

// Shard says who serves a shard.
type Shard struct {
	_msgpack struct{} `msgpack:",as_array"`
	Member   [16]byte // zero: nobody
	Epoch    uint64   // raised with each change
}

// Member is a process that serves shards. As long as the row is there, and no longer, the process may change the catalog. Members of other versions read the row, and
// write it anew: fields are only added at its end, those that are missing are zero, and what is not known is kept.
type Member struct {
	Address  string   // HOST:PORT for clients and other members
	Host     string   // for people
	Program  string   // "weftd 1.2.3"
	Started  int64    // nanoseconds since 1970
	Token    [16]byte // who knows it can read the catalog, and so is a member
	Draining bool     // it gives its shards away
	Lease    int64    // nanoseconds for which it can be silent
	Lowest   uint32   // version of the protocol that it speaks with clients
	Highest  uint32   // one
	Format   int      // the highest one of the catalog that it knows

	later []msgpack.RawMessage // fields that this version does not know
}

func (m *Member) fields() []any {
	return []any{&m.Address, &m.Host, &m.Program, &m.Started, &m.Token, &m.Draining, &m.Lease, &m.Lowest, &m.Highest, &m.Format}
}

// EncodeMsgpack implements [msgpack.CustomEncoder].
func (m *Member) EncodeMsgpack(e *msgpack.Encoder) error {
	fields := m.fields()
	err := e.EncodeArrayLen(len(fields) + len(m.later))
	if err == nil {
		err = e.EncodeMulti(fields...)
	}
	for _, raw := range m.later {
		if err == nil {
			err = e.Encode(raw)
		}
	}
	return err
}

// DecodeMsgpack implements [msgpack.CustomDecoder].
func (m *Member) DecodeMsgpack(d *msgpack.Decoder) error {
	const least = 7 // fields that all versions have
	n, err := d.DecodeArrayLen()
	if err == nil && n < least {
		err = fmt.Errorf("member row of %d fields", n)
	}
	fields := m.fields()
	if err == nil {
		err = d.DecodeMulti(fields[:min(n, len(fields))]...)
	}
	for i := len(fields); i < n && err == nil; i++ {
		var raw msgpack.RawMessage
		raw, err = d.DecodeRaw()
		m.later = append(m.later, bytes.Clone(raw))
	}
	return err
}

// Maintenance is a process that has the volume to itself: there are no members, and none joins, as long as the row is there.
type Maintenance struct {
	_msgpack struct{} `msgpack:",as_array"`
	ID       [16]byte // random; its beat row is that of a member of this id
	Program  string   // for people: "weftd fsck --repair"
	Host     string   // for people
	Started  int64    // nanoseconds since 1970
	Lease    int64    // nanoseconds for which it can be silent
}

// Reply is the last answer of a slot that changed the catalog; or says, with an empty frame, that what the service has tried so far to execute the call
// is not committed any more.
type Reply struct {
	_msgpack struct{} `msgpack:",as_array"`
	Sequence uint64
	Frame    []byte // the whole reply frame
	Fences   uint64 // without a frame: counts up with each row that says so, until there is an answer
}

// Truncate is the intent to cut data files.
type Truncate struct {
	_msgpack struct{} `msgpack:",as_array"`
	Size     int64
}

// Writer says of a session that may have written a file what its row says besides. Earlier versions leave the row
// empty, and do not read it.
type Writer struct {
	_msgpack struct{} `msgpack:",as_array"`
	// Awaited says that data files do not tell how long the session has made the file, so that after a restart of the
	// service it is waited for: it appends, and what it has not written yet may lie in front of what others have, or
	// the file is on namespaces.
	Awaited bool
}

// plainLayout is the row of a Layout without caches and MinCopies, and cachedLayout that of one without MinCopies,
// which are the only ones that earlier versions know.
type plainLayout struct {
	_msgpack   struct{} `msgpack:",as_array"`
	StripeUnit int64
	Width      int
	Mirrors    [][]DataFile
	Moving     bool
}

type cachedLayout struct {
	_msgpack   struct{} `msgpack:",as_array"`
	StripeUnit int64
	Width      int
	Mirrors    [][]DataFile
	Moving     bool
	Caches     []Cache
}

// plainReply is the row of a Reply with a frame, which is the only one that earlier versions know.
type plainReply struct {
	_msgpack struct{} `msgpack:",as_array"`
	Sequence uint64
	Frame    []byte
}

// Quota is how much there may be; 0: as much as there is room for.
type Quota struct {
	_msgpack struct{} `msgpack:",as_array"`
	Bytes    int64
	Files    int64 // inodes of any kind
}

// Clients are the rules for clients, as admit.Parse reads them.
type Clients struct {
	_msgpack struct{} `msgpack:",as_array"`
	Rules    []string
}

// plainVolume and plainSession are the rows of a Volume and of a Session as versions wrote them that knew of no shards.
type plainVolume struct {
	_msgpack struct{} `msgpack:",as_array"`
	Format   int
	ID       [16]byte
	Created  int64
	Policy   Policy
}

type plainSession struct {
	_msgpack struct{} `msgpack:",as_array"`
	Client   metarpc.ClientInfo
	Created  int64
	Ended    bool
}

// Encode makes a row of one of the structures above.
func Encode(row any) []byte {
	switch r := row.(type) {
	case *Layout:
		switch {
		case r.MinCopies != 0:
		case len(r.Caches) == 0:
			row = &plainLayout{StripeUnit: r.StripeUnit, Width: r.Width, Mirrors: r.Mirrors, Moving: r.Moving}
		default:
			row = &cachedLayout{StripeUnit: r.StripeUnit, Width: r.Width, Mirrors: r.Mirrors, Moving: r.Moving, Caches: r.Caches}
		}
	case *Reply:
		if r.Fences == 0 {
			row = &plainReply{Sequence: r.Sequence, Frame: r.Frame}
		}
	case *Writer:
		if *r == (Writer{}) {
			return nil
		}
	}
	b, err := msgpack.Marshal(row)
	if err != nil {
		panic("schema: " + err.Error()) // only a type this package does not have can fail
	}
	return b
}

// Decode reads a row that Encode made, in this version or an earlier one.
func Decode(b []byte, row any) error {
	const array = 0x90 // of less than 16 elements
	fields := 0
	if len(b) > 0 && b[0]&0xf0 == array {
		fields = int(b[0] &^ array)
	}
	switch r := row.(type) {
	case *Writer:
		if len(b) == 0 {
			*r = Writer{}
			return nil
		}
	case *Layout:
		if fields == 4 {
			var p plainLayout
			err := msgpack.Unmarshal(b, &p)
			*r = Layout{StripeUnit: p.StripeUnit, Width: p.Width, Mirrors: p.Mirrors, Moving: p.Moving}
			return err
		}
		if fields == 5 {
			var p cachedLayout
			err := msgpack.Unmarshal(b, &p)
			*r = Layout{StripeUnit: p.StripeUnit, Width: p.Width, Mirrors: p.Mirrors, Moving: p.Moving, Caches: p.Caches}
			return err
		}
	case *Volume:
		if fields > 5 { // the format is the first field in all of them
			var format int
			if err := msgpack.Unmarshal(b[1:], &format); err != nil {
				return err
			}
			return errors.Join(CheckFormat(format), fmt.Errorf("volume row of %d fields", fields))
		}
		if fields == 4 {
			var p plainVolume
			err := msgpack.Unmarshal(b, &p)
			*r = Volume{Format: p.Format, ID: p.ID, Created: p.Created, Policy: p.Policy}
			return err
		}
	case *Reply:
		if fields == 2 {
			var p plainReply
			err := msgpack.Unmarshal(b, &p)
			*r = Reply{Sequence: p.Sequence, Frame: p.Frame}
			return err
		}
	case *Session:
		if fields == 3 {
			var p plainSession
			err := msgpack.Unmarshal(b, &p)
			*r = Session{Client: p.Client, Created: p.Created, Ended: p.Ended}
			return err
		}
	}
	return msgpack.Unmarshal(b, row)
}

// idKey is a key of prefix and number, with room for more bytes that follow.
func idKey(prefix byte, id layout.FileID, more int) []byte {
	k := append(make([]byte, 0, 9+more), prefix)
	return binary.BigEndian.AppendUint64(k, uint64(id))
}

func InodeKey(id layout.FileID) []byte    { return idKey(PrefixInode, id, 0) }
func CountersKey(id layout.FileID) []byte { return idKey(PrefixCounters, id, 0) }
func LayoutKey(id layout.FileID) []byte   { return idKey(PrefixLayout, id, 0) }
func FillKey(id layout.FileID) []byte     { return idKey(PrefixFill, id, 0) }
func MoveKey(id layout.FileID) []byte     { return idKey(PrefixMove, id, 0) }
func OrphanKey(id layout.FileID) []byte   { return idKey(PrefixOrphan, id, 0) }
func TruncateKey(id layout.FileID) []byte { return idKey(PrefixTruncate, id, 0) }

// IDOf reads the inode number that follows a key's prefix.
func IDOf(key []byte) layout.FileID { return layout.FileID(binary.BigEndian.Uint64(key[1:9])) }

// EntryKey is the key of name in dir.
func EntryKey(dir layout.FileID, name string) []byte {
	k := idKey(PrefixEntry, dir, 8+len(name))
	k = binary.BigEndian.AppendUint64(k, Cookie(name))
	return append(k, name...)
}

// EntriesAfter is the first possible key of an entry of dir whose cookie is greater than cookie, and the end of dir's.
func EntriesAfter(dir layout.FileID, cookie uint64) (from, to []byte) {
	return binary.BigEndian.AppendUint64(idKey(PrefixEntry, dir, 8), cookie+1), idKey(PrefixEntry, dir+1, 0)
}

// EntryOf takes an entry's key apart.
func EntryOf(key []byte) (dir layout.FileID, cookie uint64, name string) {
	return IDOf(key), binary.BigEndian.Uint64(key[9:17]), string(key[17:])
}

// Cookie is the place of a name in its directory's order: a hash of it, so that it needs no memory and stays the same
// while others come and go. It fits a signed 64-bit directory offset and is at least metarpc.FirstCookie.
func Cookie(name string) uint64 {
	sum := sha256.Sum256([]byte(name))
	return max(binary.BigEndian.Uint64(sum[:8])>>1, metarpc.FirstCookie)
}

func XattrKey(id layout.FileID, name string) []byte {
	return append(idKey(PrefixXattr, id, len(name)), name...)
}

// WriterKey is the key that says session may have written id.
func WriterKey(id layout.FileID, session metarpc.SessionID) []byte {
	return append(idKey(PrefixWriter, id, len(session)), session[:]...)
}

func SessionKey(session metarpc.SessionID) []byte {
	return append([]byte{PrefixSession}, session[:]...)
}

func ReplyKey(session metarpc.SessionID, slot int) []byte {
	return binary.BigEndian.AppendUint16(append([]byte{PrefixReply}, session[:]...), uint16(slot))
}

// MemberKey is the key of a member, which is a random number, new with each start. BeatKey is that of a counter row which the member raises
// as a sign of life.
func MemberKey(id [16]byte) []byte { return append([]byte{PrefixMember}, id[:]...) }
func BeatKey(id [16]byte) []byte   { return append([]byte{PrefixBeat}, id[:]...) }

func ShardKey(shard int) []byte {
	return binary.BigEndian.AppendUint16([]byte{PrefixShard}, uint16(shard))
}

// ShardOfKey reads the shard in a ShardKey; -1 if it is none.
func ShardOfKey(key []byte) int {
	if len(key) != 3 {
		return -1
	}
	return int(binary.BigEndian.Uint16(key[1:]))
}

func DeviceKey(id layout.DeviceID) []byte { return append([]byte{PrefixDevice}, id[:]...) }

// InUseKey is the counter of the data files that layouts have on a device.
func InUseKey(id layout.DeviceID) []byte { return append([]byte{PrefixInUse}, id[:]...) }

func GarbageKey(id layout.DeviceID, number uint64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte{PrefixGarbage}, id[:]...), number)
}

func NamespaceKey(id layout.DeviceID) []byte { return append([]byte{PrefixNamespace}, id[:]...) }

// SpaceKey is the counter of a namespace's units.
func SpaceKey(id layout.DeviceID) []byte { return append([]byte{PrefixSpace}, id[:]...) }

// deviceKey is a key of prefix, device and numbers.
func deviceKey(prefix byte, id layout.DeviceID, numbers ...uint64) []byte {
	k := append(make([]byte, 0, 1+len(id)+8*len(numbers)), prefix)
	k = append(k, id[:]...)
	for _, n := range numbers {
		k = binary.BigEndian.AppendUint64(k, n)
	}
	return k
}

// numberIn reads the i-th number behind the device in a key.
func numberIn(key []byte, i int) uint64 {
	at := 1 + len(layout.DeviceID{}) + 8*i
	return binary.BigEndian.Uint64(key[at : at+8])
}

// UnitsKey is the key of a group of a namespace's units.
func UnitsKey(id layout.DeviceID, group int64) []byte {
	return deviceKey(PrefixUnits, id, uint64(group))
}

// UnitsOf takes apart the key of a group.
func UnitsOf(key []byte) (group int64) { return int64(numberIn(key, 0)) }

func ExtentFileKey(id layout.DeviceID, number uint64) []byte {
	return deviceKey(PrefixExtents, id, number)
}

// ExtentsKey is the key of extents whose first one begins at a unit of the data file. It is behind that of the ExtentFile.
func ExtentsKey(id layout.DeviceID, number uint64, at int64) []byte {
	return deviceKey(PrefixExtents, id, number, uint64(at))
}

// ExtentsOf takes apart an ExtentFileKey, which is none of extents, or an ExtentsKey.
func ExtentsOf(key []byte) (number uint64, at int64, extents bool) {
	if len(key) < len(ExtentsKey(layout.DeviceID{}, 0, 0)) {
		return numberIn(key, 0), 0, false
	}
	return numberIn(key, 0), int64(numberIn(key, 1)), true
}

// CondemnedKey is the key of units that a data file had until it got a generation.
func CondemnedKey(id layout.DeviceID, number, generation uint64, unit int64) []byte {
	return deviceKey(PrefixCondemned, id, number, generation, uint64(unit))
}

// CondemnedOf takes apart a CondemnedKey.
func CondemnedOf(key []byte) (number, generation uint64, unit int64) {
	return numberIn(key, 0), numberIn(key, 1), int64(numberIn(key, 2))
}

// DirtyKey is the counter of a directory whose total may not be what it has told its parent.
func DirtyKey(dir layout.FileID) []byte { return idKey(PrefixDirty, dir, 0) }

// ToldKey is what a directory has told its parent, fields Told....
func ToldKey(dir layout.FileID) []byte { return idKey(PrefixTold, dir, 0) }

// FilesKey is a counter of inodes. There is one for what each shard changes, so that services do not collide at a row that every creation
// changes; together they say how many inodes there are, while one of them may be less than nothing.
func FilesKey(shard int) []byte { return ofShard([]byte{PrefixFiles}, shard) }

// OwnerKey is the counter of what belongs to a user and a group, by what a shard has changed, as a FilesKey.
func OwnerKey(uid, gid uint32, shard int) []byte {
	k := binary.BigEndian.AppendUint32([]byte{PrefixOwner}, uid)
	return ofShard(binary.BigEndian.AppendUint32(k, gid), shard)
}

// OwnerOf takes an OwnerKey apart.
func OwnerOf(key []byte) (uid, gid uint32) {
	return binary.BigEndian.Uint32(key[1:5]), binary.BigEndian.Uint32(key[5:9])
}

// ofShard appends a shard to a key; nothing stands for the first one.
func ofShard(key []byte, shard int) []byte {
	if shard == 0 {
		return key
	}
	return binary.BigEndian.AppendUint16(key, uint16(shard))
}

// QuotaKey is the key of the quota of a directory, a user or a group.
func QuotaKey(name metarpc.QuotaName) []byte {
	return binary.BigEndian.AppendUint64([]byte{PrefixQuota, byte(name.Kind)}, name.ID)
}

// QuotaOf takes a QuotaKey apart.
func QuotaOf(key []byte) metarpc.QuotaName {
	return metarpc.QuotaName{Kind: metarpc.QuotaKind(key[1]), ID: binary.BigEndian.Uint64(key[2:10])}
}

// OfDevice is the range of all keys of a prefix that are about a device, or about a data file there.
func OfDevice(prefix byte, id layout.DeviceID, number ...uint64) (from, to []byte) {
	return Of(deviceKey(prefix, id, number...)...)
}

// CacheKey is the key of the cache of a file on a device.
func CacheKey(dev layout.DeviceID, id layout.FileID) []byte {
	return binary.BigEndian.AppendUint64(append([]byte{PrefixCache}, dev[:]...), uint64(id))
}

// CacheOf takes a cache's key apart.
func CacheOf(key []byte) (dev layout.DeviceID, id layout.FileID) {
	return layout.DeviceID(key[1:17]), layout.FileID(binary.BigEndian.Uint64(key[17:25]))
}

// Of is the range of all keys that start with the given bytes.
func Of(prefix ...byte) (from, to []byte) {
	to = append([]byte(nil), prefix...)
	for i := len(to) - 1; i >= 0; i-- {
		to[i]++
		if to[i] != 0 {
			return prefix, to[:i+1]
		}
	}
	return prefix, nil
}

// DataFileName is a data file's path below the volume's directory on its device.
func DataFileName(number uint64) (dir, name string) {
	const digits = "0123456789abcdef"
	var hex [16]byte
	for i := range hex {
		hex[i] = digits[number>>(60-4*i)&15]
	}
	return string(hex[14:]), string(hex[:])
}

// VolumeDir is the name of a volume's directory in an export.
func VolumeDir(volume [16]byte) string {
	const digits = "0123456789abcdef"
	b := []byte("weft-")
	for _, c := range volume {
		b = append(b, digits[c>>4], digits[c&15])
	}
	return string(b)
}
