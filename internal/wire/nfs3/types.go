package nfs3

import (
	"encoding/hex"
	"fmt"
	"time"

	"github.com/weftfs/weft/internal/wire/xdr"
)

// Sizes in bytes.
const (
	MaxHandle = 64 // NFS3_FHSIZE
	VerfSize  = 8  // NFS3_COOKIEVERFSIZE, NFS3_CREATEVERFSIZE, NFS3_WRITEVERFSIZE

	// MaxPath bounds the names and paths that are decoded. The protocol has no such limit and leaves the one of
	// names to PATHCONF; ours is PATH_MAX for both, so that a server can still answer ErrNameTooLong.
	MaxPath = 4096

	FattrSize = 84 // fattr3

	ReadArgsMax   = handleMax + 12
	ReadHead      = 20                   // results of READ up to the payload, without attributes
	ReadHeadAttrs = ReadHead + FattrSize // with attributes
	WriteHeadMax  = handleMax + 20       // arguments of WRITE up to the payload
	WriteResMax   = 4 + wccMax + 8 + VerfSize
	CommitArgsMax = handleMax + 12
	CommitResMax  = 4 + wccMax + VerfSize

	handleMax      = 4 + MaxHandle
	wccMax         = 4 + 24 + 4 + FattrSize
	dirListTrailer = 4 + 4 // bool 0 that ends the entries, eof
)

// FileHandle is the server's name of a file: up to 64 bytes without meaning to anybody else. It is a value, can be
// compared and can be the key of a map. The zero FileHandle has no bytes.
type FileHandle struct {
	n uint8
	b [MaxHandle]byte // zero from n on, so that == compares handles
}

// NewFileHandle copies b, which may have at most MaxHandle bytes.
func NewFileHandle(b []byte) (FileHandle, error) {
	var h FileHandle
	if len(b) > MaxHandle {
		return h, fmt.Errorf("nfs3: file handle of %d bytes: %w", len(b), xdr.ErrTooLong)
	}
	h.n = uint8(copy(h.b[:], b))
	return h, nil
}

// Bytes returns the handle's bytes; they are part of h and must not be changed.
func (h *FileHandle) Bytes() []byte { return h.b[:h.n:h.n] }

// String returns the handle in hex.
func (h FileHandle) String() string { return hex.EncodeToString(h.b[:h.n]) }

// Append encodes h; it is all the arguments of GETATTR, READLINK, FSSTAT, FSINFO and PATHCONF.
func (h *FileHandle) Append(b []byte) []byte { return xdr.AppendOpaque(b, h.Bytes()) }

// Decode takes a handle.
func (h *FileHandle) Decode(d *xdr.Decoder) error {
	p := d.Opaque(MaxHandle)
	*h = FileHandle{n: uint8(len(p))}
	copy(h.b[:], p)
	return d.Err()
}

// WriteVerf names an instance of a server that has lost no uncommitted data; it is compared for equality only.
type WriteVerf [VerfSize]byte

// CookieVerf goes with the cookies of a directory; zero with cookie 0.
type CookieVerf [VerfSize]byte

// CreateVerf identifies an exclusive CREATE among its repetitions.
type CreateVerf [VerfSize]byte

func decodeVerf(d *xdr.Decoder, v *[VerfSize]byte) { copy(v[:], d.FixedOpaque(VerfSize)) }

// enum takes a value of a type whose values are lo to hi.
func enum[T ~uint32](d *xdr.Decoder, name string, lo, hi T) T {
	v := T(d.Uint32())
	if d.Err() == nil && (v < lo || v > hi) {
		d.Fail(fmt.Errorf("%s %d: %w", name, uint32(v), xdr.ErrInvalid))
		return 0
	}
	return v
}

// Ftype is the type of a file (ftype3, RFC 1813 2.5).
type Ftype uint32

// The types.
const (
	TypeReg  Ftype = 1
	TypeDir  Ftype = 2
	TypeBlk  Ftype = 3
	TypeChr  Ftype = 4
	TypeLnk  Ftype = 5
	TypeSock Ftype = 6
	TypeFifo Ftype = 7
)

// Time is an nfstime3: seconds and nanoseconds since 1970, until 2106.
type Time struct{ Sec, Nsec uint32 }

// Time converts t.
func (t Time) Time() time.Time { return time.Unix(int64(t.Sec), int64(t.Nsec)) }

func (t Time) append(b []byte) []byte {
	b = xdr.AppendUint32(b, t.Sec)
	return xdr.AppendUint32(b, t.Nsec)
}

// decode does not bound Nsec: servers keep the verifier of an exclusive CREATE in a file's times.
func (t *Time) decode(d *xdr.Decoder) {
	t.Sec = d.Uint32()
	t.Nsec = d.Uint32()
}

// SpecData is a device number (specdata3).
type SpecData struct{ Major, Minor uint32 }

// Fattr is the attributes of a file (fattr3).
type Fattr struct {
	Type     Ftype
	Mode     uint32 // permissions, suid, sgid and sticky bit; no type
	Nlink    uint32
	UID, GID uint32
	Size     uint64
	Used     uint64 // bytes of storage
	Rdev     SpecData
	FSID     uint64
	FileID   uint64
	Atime    Time
	Mtime    Time
	Ctime    Time
}

func (a *Fattr) append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(a.Type))
	b = xdr.AppendUint32(b, a.Mode)
	b = xdr.AppendUint32(b, a.Nlink)
	b = xdr.AppendUint32(b, a.UID)
	b = xdr.AppendUint32(b, a.GID)
	b = xdr.AppendUint64(b, a.Size)
	b = xdr.AppendUint64(b, a.Used)
	b = xdr.AppendUint32(b, a.Rdev.Major)
	b = xdr.AppendUint32(b, a.Rdev.Minor)
	b = xdr.AppendUint64(b, a.FSID)
	b = xdr.AppendUint64(b, a.FileID)
	b = a.Atime.append(b)
	b = a.Mtime.append(b)
	return a.Ctime.append(b)
}

func (a *Fattr) decode(d *xdr.Decoder) {
	a.Type = enum(d, "ftype3", TypeReg, TypeFifo)
	a.Mode = d.Uint32()
	a.Nlink = d.Uint32()
	a.UID = d.Uint32()
	a.GID = d.Uint32()
	a.Size = d.Uint64()
	a.Used = d.Uint64()
	a.Rdev.Major = d.Uint32()
	a.Rdev.Minor = d.Uint32()
	a.FSID = d.Uint64()
	a.FileID = d.Uint64()
	a.Atime.decode(d)
	a.Mtime.decode(d)
	a.Ctime.decode(d)
}

// PostOpAttr is attributes that a server may leave out (post_op_attr).
type PostOpAttr struct {
	Present bool
	Attr    Fattr
}

func (a *PostOpAttr) append(b []byte) []byte {
	b = xdr.AppendBool(b, a.Present)
	if a.Present {
		b = a.Attr.append(b)
	}
	return b
}

func (a *PostOpAttr) decode(d *xdr.Decoder) {
	if a.Present = d.Bool(); a.Present {
		a.Attr.decode(d)
	}
}

// PreOpAttr is what a server may tell of a file before a change (pre_op_attr with wcc_attr).
type PreOpAttr struct {
	Present bool
	Size    uint64
	Mtime   Time
	Ctime   Time
}

// WccData is attributes before and after a change (wcc_data). If Before equals what a cache holds, nobody else changed
// the file in between.
type WccData struct {
	Before PreOpAttr
	After  PostOpAttr
}

func (w *WccData) append(b []byte) []byte {
	b = xdr.AppendBool(b, w.Before.Present)
	if w.Before.Present {
		b = xdr.AppendUint64(b, w.Before.Size)
		b = w.Before.Mtime.append(b)
		b = w.Before.Ctime.append(b)
	}
	return w.After.append(b)
}

func (w *WccData) decode(d *xdr.Decoder) {
	if w.Before.Present = d.Bool(); w.Before.Present {
		w.Before.Size = d.Uint64()
		w.Before.Mtime.decode(d)
		w.Before.Ctime.decode(d)
	}
	w.After.decode(d)
}

// PostOpFH is a handle that a server may leave out (post_op_fh3).
type PostOpFH struct {
	Present bool
	FH      FileHandle
}

func (h *PostOpFH) append(b []byte) []byte {
	b = xdr.AppendBool(b, h.Present)
	if h.Present {
		b = h.FH.Append(b)
	}
	return b
}

func (h *PostOpFH) decode(d *xdr.Decoder) {
	if h.Present = d.Bool(); h.Present {
		h.FH.Decode(d)
	}
}

// TimeHow says where a time that is set comes from (time_how).
type TimeHow uint32

// The sources.
const (
	KeepTime   TimeHow = 0 // DONT_CHANGE
	ServerTime TimeHow = 1 // SET_TO_SERVER_TIME
	ClientTime TimeHow = 2 // SET_TO_CLIENT_TIME
)

// Sattr is the attributes to set (sattr3). A field counts if its flag is set, a time if its source is ClientTime.
type Sattr struct {
	SetMode, SetUID, SetGID, SetSize bool
	Mode, UID, GID                   uint32
	Size                             uint64
	AtimeHow, MtimeHow               TimeHow
	Atime, Mtime                     Time
}

func (a *Sattr) append(b []byte) []byte {
	b = appendOptional(b, a.SetMode, a.Mode)
	b = appendOptional(b, a.SetUID, a.UID)
	b = appendOptional(b, a.SetGID, a.GID)
	b = xdr.AppendBool(b, a.SetSize)
	if a.SetSize {
		b = xdr.AppendUint64(b, a.Size)
	}
	b = appendSetTime(b, a.AtimeHow, a.Atime)
	return appendSetTime(b, a.MtimeHow, a.Mtime)
}

func (a *Sattr) decode(d *xdr.Decoder) {
	if a.SetMode = d.Bool(); a.SetMode {
		a.Mode = d.Uint32()
	}
	if a.SetUID = d.Bool(); a.SetUID {
		a.UID = d.Uint32()
	}
	if a.SetGID = d.Bool(); a.SetGID {
		a.GID = d.Uint32()
	}
	if a.SetSize = d.Bool(); a.SetSize {
		a.Size = d.Uint64()
	}
	if a.AtimeHow = enum(d, "time_how", KeepTime, ClientTime); a.AtimeHow == ClientTime {
		a.Atime.decode(d)
	}
	if a.MtimeHow = enum(d, "time_how", KeepTime, ClientTime); a.MtimeHow == ClientTime {
		a.Mtime.decode(d)
	}
}

func appendOptional(b []byte, set bool, v uint32) []byte {
	b = xdr.AppendBool(b, set)
	if set {
		b = xdr.AppendUint32(b, v)
	}
	return b
}

func appendSetTime(b []byte, how TimeHow, t Time) []byte {
	b = xdr.AppendUint32(b, uint32(how))
	if how == ClientTime {
		b = t.append(b)
	}
	return b
}

// Stable says how durable a WRITE is before its reply (stable_how); a greater value is a stronger promise.
type Stable uint32

// The promises.
const (
	Unstable Stable = 0 // until COMMIT none
	DataSync Stable = 1 // the data, and the metadata needed to find it
	FileSync Stable = 2 // data and metadata
)

func (s Stable) String() string {
	switch s {
	case Unstable:
		return "UNSTABLE"
	case DataSync:
		return "DATA_SYNC"
	case FileSync:
		return "FILE_SYNC"
	}
	return fmt.Sprintf("stable_how %d", uint32(s))
}

// CreateMode says what CREATE does when the name exists (createmode3).
type CreateMode uint32

// The modes.
const (
	Unchecked CreateMode = 0 // open it
	Guarded   CreateMode = 1 // fail
	Exclusive CreateMode = 2 // fail unless an earlier CREATE with the same verifier made it
)

// Bits of an ACCESS mask (RFC 1813 3.3.4).
const (
	AccessRead    = 1 << 0
	AccessLookup  = 1 << 1
	AccessModify  = 1 << 2
	AccessExtend  = 1 << 3
	AccessDelete  = 1 << 4
	AccessExecute = 1 << 5
)

// Bits of FsinfoRes.Properties (RFC 1813 3.3.19).
const (
	PropLink        = 1 << 0 // hard links
	PropSymlink     = 1 << 1
	PropHomogeneous = 1 << 3 // PATHCONF is the same for every file
	PropCanSetTime  = 1 << 4 // SETATTR can set times exactly
)
