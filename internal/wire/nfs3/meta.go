package nfs3

import (
	"github.com/weftfs/weft/internal/wire/xdr"
)

// GetattrRes is the results of GETATTR (RFC 1813 3.3.1).
type GetattrRes struct {
	Status Status
	Attr   Fattr
}

// Append encodes the message.
func (r *GetattrRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	if r.Status == OK {
		b = r.Attr.append(b)
	}
	return b
}

// Decode takes the message.
func (r *GetattrRes) Decode(d *xdr.Decoder) error {
	*r = GetattrRes{Status: Status(d.Uint32())}
	if r.Status == OK {
		r.Attr.decode(d)
	}
	return d.Err()
}

// SetattrArgs is the arguments of SETATTR (RFC 1813 3.3.2). With Guard the server refuses with ErrNotSync unless the
// file's ctime is GuardCtime.
type SetattrArgs struct {
	FH         FileHandle
	Attr       Sattr
	Guard      bool
	GuardCtime Time
}

// Append encodes the message.
func (a *SetattrArgs) Append(b []byte) []byte {
	b = a.FH.Append(b)
	b = a.Attr.append(b)
	b = xdr.AppendBool(b, a.Guard)
	if a.Guard {
		b = a.GuardCtime.append(b)
	}
	return b
}

// Decode takes the message.
func (a *SetattrArgs) Decode(d *xdr.Decoder) error {
	*a = SetattrArgs{}
	a.FH.Decode(d)
	a.Attr.decode(d)
	if a.Guard = d.Bool(); a.Guard {
		a.GuardCtime.decode(d)
	}
	return d.Err()
}

// WccRes is the results of SETATTR (of the file) and of REMOVE and RMDIR (of the directory).
type WccRes struct {
	Status Status
	Wcc    WccData
}

// Append encodes the message.
func (r *WccRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	return r.Wcc.append(b)
}

// Decode takes the message.
func (r *WccRes) Decode(d *xdr.Decoder) error {
	*r = WccRes{Status: Status(d.Uint32())}
	r.Wcc.decode(d)
	return d.Err()
}

// DirOpArgs is a name in a directory (diropargs3): all the arguments of LOOKUP, REMOVE and RMDIR.
type DirOpArgs struct {
	Dir  FileHandle
	Name string
}

// Append encodes the message.
func (a *DirOpArgs) Append(b []byte) []byte {
	b = a.Dir.Append(b)
	return xdr.AppendString(b, a.Name)
}

// Decode takes the message. That the name is not empty, has no slash and is short enough is for the server to see to.
func (a *DirOpArgs) Decode(d *xdr.Decoder) error {
	a.Dir.Decode(d)
	a.Name = d.String(MaxPath)
	return d.Err()
}

// LookupRes is the results of LOOKUP (RFC 1813 3.3.3).
type LookupRes struct {
	Status  Status
	FH      FileHandle
	Attr    PostOpAttr
	DirAttr PostOpAttr // also of a failure
}

// Append encodes the message.
func (r *LookupRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	if r.Status == OK {
		b = r.FH.Append(b)
		b = r.Attr.append(b)
	}
	return r.DirAttr.append(b)
}

// Decode takes the message.
func (r *LookupRes) Decode(d *xdr.Decoder) error {
	*r = LookupRes{Status: Status(d.Uint32())}
	if r.Status == OK {
		r.FH.Decode(d)
		r.Attr.decode(d)
	}
	r.DirAttr.decode(d)
	return d.Err()
}

// AccessArgs is the arguments of ACCESS (RFC 1813 3.3.4).
type AccessArgs struct {
	FH     FileHandle
	Access uint32 // the bits asked for: AccessRead and so on
}

// Append encodes the message.
func (a *AccessArgs) Append(b []byte) []byte {
	b = a.FH.Append(b)
	return xdr.AppendUint32(b, a.Access)
}

// Decode takes the message.
func (a *AccessArgs) Decode(d *xdr.Decoder) error {
	a.FH.Decode(d)
	a.Access = d.Uint32()
	return d.Err()
}

// AccessRes is the results of ACCESS.
type AccessRes struct {
	Status Status
	Attr   PostOpAttr
	Access uint32 // the bits granted
}

// Append encodes the message.
func (r *AccessRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	if r.Status == OK {
		b = xdr.AppendUint32(b, r.Access)
	}
	return b
}

// Decode takes the message.
func (r *AccessRes) Decode(d *xdr.Decoder) error {
	*r = AccessRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	if r.Status == OK {
		r.Access = d.Uint32()
	}
	return d.Err()
}

// ReadlinkRes is the results of READLINK (RFC 1813 3.3.5).
type ReadlinkRes struct {
	Status Status
	Attr   PostOpAttr
	Target string
}

// Append encodes the message.
func (r *ReadlinkRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	if r.Status == OK {
		b = xdr.AppendString(b, r.Target)
	}
	return b
}

// Decode takes the message.
func (r *ReadlinkRes) Decode(d *xdr.Decoder) error {
	*r = ReadlinkRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	if r.Status == OK {
		r.Target = d.String(MaxPath)
	}
	return d.Err()
}

// CreateArgs is the arguments of CREATE (RFC 1813 3.3.8).
type CreateArgs struct {
	Where DirOpArgs
	Mode  CreateMode
	Attr  Sattr      // with Unchecked and Guarded
	Verf  CreateVerf // with Exclusive, which cannot set attributes: SETATTR follows
}

// Append encodes the message.
func (a *CreateArgs) Append(b []byte) []byte {
	b = a.Where.Append(b)
	b = xdr.AppendUint32(b, uint32(a.Mode))
	if a.Mode == Exclusive {
		return append(b, a.Verf[:]...)
	}
	return a.Attr.append(b)
}

// Decode takes the message.
func (a *CreateArgs) Decode(d *xdr.Decoder) error {
	*a = CreateArgs{}
	a.Where.Decode(d)
	a.Mode = enum(d, "createmode3", Unchecked, Exclusive)
	if a.Mode == Exclusive {
		decodeVerf(d, (*[VerfSize]byte)(&a.Verf))
	} else {
		a.Attr.decode(d)
	}
	return d.Err()
}

// CreateRes is the results of CREATE, MKDIR, SYMLINK and MKNOD.
type CreateRes struct {
	Status Status
	FH     PostOpFH
	Attr   PostOpAttr
	DirWcc WccData // also of a failure
}

// Append encodes the message.
func (r *CreateRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	if r.Status == OK {
		b = r.FH.append(b)
		b = r.Attr.append(b)
	}
	return r.DirWcc.append(b)
}

// Decode takes the message.
func (r *CreateRes) Decode(d *xdr.Decoder) error {
	*r = CreateRes{Status: Status(d.Uint32())}
	if r.Status == OK {
		r.FH.decode(d)
		r.Attr.decode(d)
	}
	r.DirWcc.decode(d)
	return d.Err()
}

// MkdirArgs is the arguments of MKDIR (RFC 1813 3.3.9).
type MkdirArgs struct {
	Where DirOpArgs
	Attr  Sattr
}

// Append encodes the message.
func (a *MkdirArgs) Append(b []byte) []byte {
	b = a.Where.Append(b)
	return a.Attr.append(b)
}

// Decode takes the message.
func (a *MkdirArgs) Decode(d *xdr.Decoder) error {
	*a = MkdirArgs{}
	a.Where.Decode(d)
	a.Attr.decode(d)
	return d.Err()
}

// SymlinkArgs is the arguments of SYMLINK (RFC 1813 3.3.10).
type SymlinkArgs struct {
	Where  DirOpArgs
	Attr   Sattr
	Target string
}

// Decode takes the message.
func (a *SymlinkArgs) Decode(d *xdr.Decoder) error {
	*a = SymlinkArgs{}
	a.Where.Decode(d)
	a.Attr.decode(d)
	a.Target = d.String(MaxPath)
	return d.Err()
}

// MknodArgs is the arguments of MKNOD (RFC 1813 3.3.11). Attr counts for TypeChr, TypeBlk, TypeSock and TypeFifo, Spec
// for the first two.
type MknodArgs struct {
	Where DirOpArgs
	Type  Ftype
	Attr  Sattr
	Spec  SpecData
}

// Decode takes the message. Any Type is taken, since the server has an answer for the wrong ones: ErrBadType.
func (a *MknodArgs) Decode(d *xdr.Decoder) error {
	*a = MknodArgs{}
	a.Where.Decode(d)
	a.Type = Ftype(d.Uint32())
	switch a.Type {
	case TypeChr, TypeBlk:
		a.Attr.decode(d)
		a.Spec.Major = d.Uint32()
		a.Spec.Minor = d.Uint32()
	case TypeSock, TypeFifo:
		a.Attr.decode(d)
	}
	return d.Err()
}

// RenameArgs is the arguments of RENAME (RFC 1813 3.3.14).
type RenameArgs struct {
	From, To DirOpArgs
}

// Append encodes the message.
func (a *RenameArgs) Append(b []byte) []byte {
	b = a.From.Append(b)
	return a.To.Append(b)
}

// Decode takes the message.
func (a *RenameArgs) Decode(d *xdr.Decoder) error {
	a.From.Decode(d)
	a.To.Decode(d)
	return d.Err()
}

// RenameRes is the results of RENAME.
type RenameRes struct {
	Status         Status
	FromWcc, ToWcc WccData // of the two directories, also of a failure
}

// Append encodes the message.
func (r *RenameRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.FromWcc.append(b)
	return r.ToWcc.append(b)
}

// Decode takes the message.
func (r *RenameRes) Decode(d *xdr.Decoder) error {
	*r = RenameRes{Status: Status(d.Uint32())}
	r.FromWcc.decode(d)
	r.ToWcc.decode(d)
	return d.Err()
}

// LinkArgs is the arguments of LINK (RFC 1813 3.3.15).
type LinkArgs struct {
	FH   FileHandle
	Link DirOpArgs // the new name
}

// Append encodes the message.
func (a *LinkArgs) Append(b []byte) []byte {
	b = a.FH.Append(b)
	return a.Link.Append(b)
}

// Decode takes the message.
func (a *LinkArgs) Decode(d *xdr.Decoder) error {
	a.FH.Decode(d)
	a.Link.Decode(d)
	return d.Err()
}

// LinkRes is the results of LINK.
type LinkRes struct {
	Status Status
	Attr   PostOpAttr // of the file, also of a failure
	DirWcc WccData    // of the directory of the new name, also of a failure
}

// Append encodes the message.
func (r *LinkRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	return r.DirWcc.append(b)
}

// Decode takes the message.
func (r *LinkRes) Decode(d *xdr.Decoder) error {
	*r = LinkRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	r.DirWcc.decode(d)
	return d.Err()
}

// FsstatRes is the results of FSSTAT (RFC 1813 3.3.18). Avail is what the caller may use; the rest is of the whole
// file system.
type FsstatRes struct {
	Status                            Status
	Attr                              PostOpAttr
	TotalBytes, FreeBytes, AvailBytes uint64
	TotalFiles, FreeFiles, AvailFiles uint64
	Invarsec                          uint32 // for how many seconds nothing will change; 0 if nobody knows
}

// Append encodes the message.
func (r *FsstatRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	if r.Status != OK {
		return b
	}
	b = xdr.AppendUint64(b, r.TotalBytes)
	b = xdr.AppendUint64(b, r.FreeBytes)
	b = xdr.AppendUint64(b, r.AvailBytes)
	b = xdr.AppendUint64(b, r.TotalFiles)
	b = xdr.AppendUint64(b, r.FreeFiles)
	b = xdr.AppendUint64(b, r.AvailFiles)
	return xdr.AppendUint32(b, r.Invarsec)
}

// Decode takes the message.
func (r *FsstatRes) Decode(d *xdr.Decoder) error {
	*r = FsstatRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	r.TotalBytes = d.Uint64()
	r.FreeBytes = d.Uint64()
	r.AvailBytes = d.Uint64()
	r.TotalFiles = d.Uint64()
	r.FreeFiles = d.Uint64()
	r.AvailFiles = d.Uint64()
	r.Invarsec = d.Uint32()
	return d.Err()
}

// FsinfoRes is the results of FSINFO (RFC 1813 3.3.19). Sizes are in bytes; a request beyond Rtmax or Wtmax is cut by
// the server, not refused.
type FsinfoRes struct {
	Status                Status
	Attr                  PostOpAttr
	Rtmax, Rtpref, Rtmult uint32
	Wtmax, Wtpref, Wtmult uint32
	Dtpref                uint32 // count of a READDIR
	MaxFileSize           uint64 // largest offset plus one
	TimeDelta             Time   // resolution of times
	Properties            uint32 // PropLink and so on
}

// Append encodes the message.
func (r *FsinfoRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	if r.Status != OK {
		return b
	}
	b = xdr.AppendUint32(b, r.Rtmax)
	b = xdr.AppendUint32(b, r.Rtpref)
	b = xdr.AppendUint32(b, r.Rtmult)
	b = xdr.AppendUint32(b, r.Wtmax)
	b = xdr.AppendUint32(b, r.Wtpref)
	b = xdr.AppendUint32(b, r.Wtmult)
	b = xdr.AppendUint32(b, r.Dtpref)
	b = xdr.AppendUint64(b, r.MaxFileSize)
	b = r.TimeDelta.append(b)
	return xdr.AppendUint32(b, r.Properties)
}

// Decode takes the message.
func (r *FsinfoRes) Decode(d *xdr.Decoder) error {
	*r = FsinfoRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	r.Rtmax = d.Uint32()
	r.Rtpref = d.Uint32()
	r.Rtmult = d.Uint32()
	r.Wtmax = d.Uint32()
	r.Wtpref = d.Uint32()
	r.Wtmult = d.Uint32()
	r.Dtpref = d.Uint32()
	r.MaxFileSize = d.Uint64()
	r.TimeDelta.decode(d)
	r.Properties = d.Uint32()
	return d.Err()
}

// PathconfRes is the results of PATHCONF (RFC 1813 3.3.20).
type PathconfRes struct {
	Status          Status
	Attr            PostOpAttr
	LinkMax         uint32
	NameMax         uint32
	NoTrunc         bool // a name that is too long is refused, not cut
	ChownRestricted bool
	CaseInsensitive bool
	CasePreserving  bool
}

// Append encodes the message.
func (r *PathconfRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.Attr.append(b)
	if r.Status != OK {
		return b
	}
	b = xdr.AppendUint32(b, r.LinkMax)
	b = xdr.AppendUint32(b, r.NameMax)
	b = xdr.AppendBool(b, r.NoTrunc)
	b = xdr.AppendBool(b, r.ChownRestricted)
	b = xdr.AppendBool(b, r.CaseInsensitive)
	return xdr.AppendBool(b, r.CasePreserving)
}

// Decode takes the message.
func (r *PathconfRes) Decode(d *xdr.Decoder) error {
	*r = PathconfRes{Status: Status(d.Uint32())}
	r.Attr.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	r.LinkMax = d.Uint32()
	r.NameMax = d.Uint32()
	r.NoTrunc = d.Bool()
	r.ChownRestricted = d.Bool()
	r.CaseInsensitive = d.Bool()
	r.CasePreserving = d.Bool()
	return d.Err()
}
