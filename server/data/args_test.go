package data

import (
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// Arguments of the procedures that no client of weft's calls.
type (
	readdirArgs wire.ReaddirArgs
	symlinkArgs wire.SymlinkArgs
	mkfifoArgs  struct{ where wire.DirOpArgs }
)

func (a *readdirArgs) Append(b []byte) []byte {
	b = xdr.AppendUint64(a.Dir.Append(b), a.Cookie)
	return xdr.AppendUint32(append(b, a.Verf[:]...), a.Count)
}

func (a *symlinkArgs) Append(b []byte) []byte {
	head := wire.MkdirArgs{Where: a.Where, Attr: a.Attr}
	return xdr.AppendString(head.Append(b), a.Target)
}

func (a *mkfifoArgs) Append(b []byte) []byte {
	b = xdr.AppendUint32(a.where.Append(b), uint32(wire.TypeFifo))
	return append(b, make([]byte, 6*4)...) // no attribute is set
}
