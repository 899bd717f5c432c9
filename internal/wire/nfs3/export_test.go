package nfs3

import "github.com/weftfs/weft/internal/wire/xdr"

// Append encodes the message.
func (a *SymlinkArgs) Append(b []byte) []byte {
	b = a.Where.Append(b)
	b = a.Attr.append(b)
	return xdr.AppendString(b, a.Target)
}

// Append encodes the message.
func (a *MknodArgs) Append(b []byte) []byte {
	b = a.Where.Append(b)
	b = xdr.AppendUint32(b, uint32(a.Type))
	switch a.Type {
	case TypeChr, TypeBlk:
		b = a.Attr.append(b)
		b = xdr.AppendUint32(b, a.Spec.Major)
		b = xdr.AppendUint32(b, a.Spec.Minor)
	case TypeSock, TypeFifo:
		b = a.Attr.append(b)
	}
	return b
}

// Append encodes the message.
func (a *ReaddirArgs) Append(b []byte) []byte {
	b = a.Dir.Append(b)
	b = xdr.AppendUint64(b, a.Cookie)
	b = append(b, a.Verf[:]...)
	return xdr.AppendUint32(b, a.Count)
}
