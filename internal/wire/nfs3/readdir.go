package nfs3

import (
	"github.com/weftfs/weft/internal/wire/xdr"
)

// ReaddirArgs is the arguments of READDIR (RFC 1813 3.3.16).
type ReaddirArgs struct {
	Dir    FileHandle
	Cookie uint64 // of the last entry that the client has; 0 at the start
	Verf   CookieVerf
	Count  uint32 // most bytes of results, the status not counted
}

// Decode takes the message.
func (a *ReaddirArgs) Decode(d *xdr.Decoder) error {
	a.Dir.Decode(d)
	a.Cookie = d.Uint64()
	decodeVerf(d, (*[VerfSize]byte)(&a.Verf))
	a.Count = d.Uint32()
	return d.Err()
}

// ReaddirPlusArgs is the arguments of READDIRPLUS (RFC 1813 3.3.17).
type ReaddirPlusArgs struct {
	Dir      FileHandle
	Cookie   uint64
	Verf     CookieVerf
	DirCount uint32 // most bytes of what READDIR would return for the same entries
	MaxCount uint32 // most bytes of results, the status not counted
}

// Append encodes the message.
func (a *ReaddirPlusArgs) Append(b []byte) []byte {
	b = a.Dir.Append(b)
	b = xdr.AppendUint64(b, a.Cookie)
	b = append(b, a.Verf[:]...)
	b = xdr.AppendUint32(b, a.DirCount)
	return xdr.AppendUint32(b, a.MaxCount)
}

// Decode takes the message.
func (a *ReaddirPlusArgs) Decode(d *xdr.Decoder) error {
	a.Dir.Decode(d)
	a.Cookie = d.Uint64()
	decodeVerf(d, (*[VerfSize]byte)(&a.Verf))
	a.DirCount = d.Uint32()
	a.MaxCount = d.Uint32()
	return d.Err()
}

// Entry is an entry of a directory as READDIR tells it.
type Entry struct {
	FileID uint64
	Name   string
	Cookie uint64 // with which a READDIR goes on behind this entry
}

// size is the length of the encoded entry, the bool before it included.
func (e *Entry) size() int { return 4 + 8 + 4 + xdr.Padded(len(e.Name)) + 8 }

func (e *Entry) append(b []byte) []byte {
	b = xdr.AppendBool(b, true)
	b = xdr.AppendUint64(b, e.FileID)
	b = xdr.AppendString(b, e.Name)
	return xdr.AppendUint64(b, e.Cookie)
}

func (e *Entry) decode(d *xdr.Decoder) {
	e.FileID = d.Uint64()
	e.Name = d.String(MaxPath)
	e.Cookie = d.Uint64()
}

// EntryPlus is an entry of a directory as READDIRPLUS tells it.
type EntryPlus struct {
	Entry
	Attr PostOpAttr
	FH   PostOpFH
}

// plusSize is what READDIRPLUS adds to the size of the entry.
func (e *EntryPlus) plusSize() int {
	n := 4 + 4
	if e.Attr.Present {
		n += FattrSize
	}
	if e.FH.Present {
		n += 4 + xdr.Padded(len(e.FH.FH.Bytes()))
	}
	return n
}

func (e *EntryPlus) append(b []byte) []byte {
	b = e.Entry.append(b)
	b = e.Attr.append(b)
	return e.FH.append(b)
}

func (e *EntryPlus) decode(d *xdr.Decoder) {
	e.Entry.decode(d)
	e.Attr.decode(d)
	e.FH.decode(d)
}

// ReaddirRes is the results of READDIR, as a client wants them; a server fills a reply with a DirWriter.
type ReaddirRes struct {
	Status  Status
	DirAttr PostOpAttr
	Verf    CookieVerf
	Entries []Entry
	EOF     bool // the last entry of the directory is among them
}

// Append encodes the message.
func (r *ReaddirRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.DirAttr.append(b)
	if r.Status != OK {
		return b
	}
	b = append(b, r.Verf[:]...)
	for i := range r.Entries {
		b = r.Entries[i].append(b)
	}
	return appendDirEnd(b, r.EOF)
}

// Decode takes the message.
func (r *ReaddirRes) Decode(d *xdr.Decoder) error {
	*r = ReaddirRes{Status: Status(d.Uint32())}
	r.DirAttr.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	decodeVerf(d, (*[VerfSize]byte)(&r.Verf))
	for d.Bool() {
		var e Entry
		e.decode(d)
		r.Entries = append(r.Entries, e)
	}
	r.EOF = d.Bool()
	return d.Err()
}

// ReaddirPlusRes is the results of READDIRPLUS, as a client wants them; a server fills a reply with a DirPlusWriter.
type ReaddirPlusRes struct {
	Status  Status
	DirAttr PostOpAttr
	Verf    CookieVerf
	Entries []EntryPlus
	EOF     bool
}

// Append encodes the message.
func (r *ReaddirPlusRes) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(r.Status))
	b = r.DirAttr.append(b)
	if r.Status != OK {
		return b
	}
	b = append(b, r.Verf[:]...)
	for i := range r.Entries {
		b = r.Entries[i].append(b)
	}
	return appendDirEnd(b, r.EOF)
}

// Decode takes the message.
func (r *ReaddirPlusRes) Decode(d *xdr.Decoder) error {
	*r = ReaddirPlusRes{Status: Status(d.Uint32())}
	r.DirAttr.decode(d)
	if r.Status != OK {
		return d.Err()
	}
	decodeVerf(d, (*[VerfSize]byte)(&r.Verf))
	for d.Bool() {
		var e EntryPlus
		e.decode(d)
		r.Entries = append(r.Entries, e)
	}
	r.EOF = d.Bool()
	return d.Err()
}

func appendDirEnd(b []byte, eof bool) []byte {
	b = xdr.AppendBool(b, false)
	return xdr.AppendBool(b, eof)
}

// DirWriter encodes successful results of READDIR entry by entry until the client's limit is reached. Results are
// never longer than the limit, unless it is too small for a reply without entries.
//
//	w := nfs3.NewDirWriter(reply, dirAttr, verf, args.Count)
//	for ... { if !w.Add(&e) { break } }
//	if w.Len() == 0 && !eof { answer ErrTooSmall instead }
//	reply = w.End(eof)
type DirWriter struct {
	b    []byte
	left int // bytes that entries may still take
	n    int
}

// NewDirWriter appends status, attributes and verifier to b. count is that of the arguments; a server bounds it first
// by the longest reply it sends.
func NewDirWriter(b []byte, dirAttr PostOpAttr, verf CookieVerf, count uint32) DirWriter {
	b = xdr.AppendUint32(b, uint32(OK))
	start := len(b)
	b = dirAttr.append(b)
	b = append(b, verf[:]...)
	return DirWriter{b: b, left: int(count) - (len(b) - start) - dirListTrailer}
}

// Add appends e if it fits. When it returns false nothing was appended, and the entry belongs to the client's next
// call.
func (w *DirWriter) Add(e *Entry) bool {
	n := e.size()
	if n > w.left {
		return false
	}
	w.left -= n
	w.n++
	w.b = e.append(w.b)
	return true
}

// Len returns how many entries were added. If there is none although the directory has some, the reply is
// ErrTooSmall instead.
func (w *DirWriter) Len() int { return w.n }

// End ends the list and returns the slice given to NewDirWriter with the results behind it. eof says that the
// directory has no entry behind those that were added.
func (w *DirWriter) End(eof bool) []byte { return appendDirEnd(w.b, eof) }

// DirPlusWriter is a DirWriter for READDIRPLUS, which has two limits.
type DirPlusWriter struct {
	b       []byte
	left    int // bytes of maxcount that entries may still take
	dirLeft int // bytes of dircount that entries may still take
	n       int
}

// NewDirPlusWriter appends status, attributes and verifier to b. dirCount and maxCount are those of the arguments; a
// server bounds maxCount first by the longest reply it sends.
//
// dirCount counts what READDIR would encode for the entries alone. It is there to spare the server attributes and
// handles that the client has no use for (RFC 1813 3.3.17), so it never keeps the first entry out: a client with a
// small one, and they exist, would otherwise not get past a long name.
func NewDirPlusWriter(b []byte, dirAttr PostOpAttr, verf CookieVerf, dirCount, maxCount uint32) DirPlusWriter {
	w := NewDirWriter(b, dirAttr, verf, maxCount)
	return DirPlusWriter{b: w.b, left: w.left, dirLeft: int(dirCount)}
}

// Add appends e if it fits. When it returns false nothing was appended; the entry belongs to the client's next call,
// or can be tried again without attributes and handle.
func (w *DirPlusWriter) Add(e *EntryPlus) bool {
	n := e.size()
	total := n + e.plusSize()
	if total > w.left || n > w.dirLeft && w.n > 0 {
		return false
	}
	w.left -= total
	w.dirLeft -= n
	w.n++
	w.b = e.append(w.b)
	return true
}

// Len returns how many entries were added. If there is none although the directory has some, the reply is
// ErrTooSmall instead.
func (w *DirPlusWriter) Len() int { return w.n }

// End ends the list and returns the slice given to NewDirPlusWriter with the results behind it. eof says that the
// directory has no entry behind those that were added.
func (w *DirPlusWriter) End(eof bool) []byte { return appendDirEnd(w.b, eof) }
