package nfs3

import (
	"fmt"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// Limits of MOUNT (RFC 1813 5.1.1).
const (
	MaxMountPath = 1024 // MNTPATHLEN
	MaxMountName = 255  // MNTNAMLEN
)

// maxFlavors bounds the flavors of a MountRes; the protocol does not. Linux has ten.
const maxFlavors = 64

// MountPath is the arguments of MNT and UMNT (RFC 1813 5.2.1 and 5.2.3).
type MountPath struct {
	Path string
}

// Append encodes the message.
func (a *MountPath) Append(b []byte) []byte { return xdr.AppendString(b, a.Path) }

// Decode takes the message.
func (a *MountPath) Decode(d *xdr.Decoder) error {
	a.Path = d.String(MaxMountPath)
	return d.Err()
}

// MountRes is the results of MNT. A failure has no more than its status, one of those that RFC 1813 5.1.2 numbers as
// nfsstat3 does.
type MountRes struct {
	Status  Status
	FH      FileHandle
	Flavors []oncrpc.Flavor // that the export takes, the preferred one first
}

// Append encodes the message.
func (r *MountRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	if r.Status != OK {
		return b
	}
	b = r.FH.Append(b)
	b = xdr.AppendUint32(b, uint32(len(r.Flavors)))
	for _, f := range r.Flavors {
		b = xdr.AppendUint32(b, uint32(f))
	}
	return b
}

// Decode takes the message.
func (r *MountRes) Decode(d *xdr.Decoder) error {
	*r = MountRes{Status: Status(d.Uint32())}
	if r.Status != OK {
		return d.Err()
	}
	r.FH.Decode(d)
	n := d.Uint32()
	if n > maxFlavors {
		d.Fail(fmt.Errorf("%d flavors: %w", n, xdr.ErrTooLong))
		n = 0
	}
	for range n {
		r.Flavors = append(r.Flavors, oncrpc.Flavor(d.Uint32()))
	}
	return d.Err()
}

// MountEntry says that a client once mounted a directory.
type MountEntry struct {
	Host, Dir string
}

// DumpRes is the results of DUMP (RFC 1813 5.2.2).
type DumpRes struct {
	Mounts []MountEntry
}

// Append encodes the message.
func (r *DumpRes) Append(b []byte) []byte {
	for _, m := range r.Mounts {
		b = xdr.AppendBool(b, true)
		b = xdr.AppendString(b, m.Host)
		b = xdr.AppendString(b, m.Dir)
	}
	return xdr.AppendBool(b, false)
}

// Decode takes the message.
func (r *DumpRes) Decode(d *xdr.Decoder) error {
	*r = DumpRes{}
	for d.Bool() {
		var m MountEntry
		m.Host = d.String(MaxMountName)
		m.Dir = d.String(MaxMountPath)
		r.Mounts = append(r.Mounts, m)
	}
	return d.Err()
}

// Export is a directory that can be mounted.
type Export struct {
	Dir    string
	Groups []string // names of those who may mount it; none means everybody
}

// ExportRes is the results of EXPORT (RFC 1813 5.2.5).
type ExportRes struct {
	Exports []Export
}

// Append encodes the message.
func (r *ExportRes) Append(b []byte) []byte {
	for _, e := range r.Exports {
		b = xdr.AppendBool(b, true)
		b = xdr.AppendString(b, e.Dir)
		for _, g := range e.Groups {
			b = xdr.AppendBool(b, true)
			b = xdr.AppendString(b, g)
		}
		b = xdr.AppendBool(b, false)
	}
	return xdr.AppendBool(b, false)
}

// Decode takes the message.
func (r *ExportRes) Decode(d *xdr.Decoder) error {
	*r = ExportRes{}
	for d.Bool() {
		e := Export{Dir: d.String(MaxMountPath)}
		for d.Bool() {
			e.Groups = append(e.Groups, d.String(MaxMountName))
		}
		r.Exports = append(r.Exports, e)
	}
	return d.Err()
}
