package flexfiles

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"
)

// LayoutType is LAYOUT4_FLEX_FILES.
const LayoutType = 4

// Least sizes in bytes, by which counts are checked before anything is allocated for them.
const (
	minDataServer = 16 + 4 + 16 + 4 + 4 + 4
	minMirror     = 4 // without data servers, of which Validate says that there must be some
	minOpaque     = 4
)

// maxString bounds strings, as NFS4_OPAQUE_LIMIT does where the protocol says anything.
const maxString = 1024

// AppendSegment encodes s as a layout4.
func AppendSegment(b []byte, s *layout.Segment) []byte {
	b = appendRange(b, s.Range)
	b = xdr.AppendUint32(b, uint32(s.IOMode))
	b = xdr.AppendUint32(b, LayoutType)
	b = append(b, 0, 0, 0, 0)
	begin := len(b)
	b = AppendLayout(b, s)
	binary.BigEndian.PutUint32(b[begin-4:], uint32(len(b)-begin)) // a multiple of 4
	return b
}

// DecodeSegment takes a layout4. The segment is valid.
func DecodeSegment(d *xdr.Decoder) (*layout.Segment, error) {
	r := decodeRange(d)
	mode := layout.IOMode(d.Uint32())
	decodeType(d)
	body := d.Opaque(math.MaxInt32)
	if err := d.Err(); err != nil {
		return nil, fmt.Errorf("flexfiles: layout: %w", err)
	}
	return DecodeLayout(body, r, mode)
}

// AppendLayout encodes s as an ff_layout4.
func AppendLayout(b []byte, s *layout.Segment) []byte {
	b = xdr.AppendUint64(b, uint64(s.StripeUnit))
	b = xdr.AppendUint32(b, uint32(len(s.Mirrors)))
	for i := range s.Mirrors {
		b = xdr.AppendUint32(b, uint32(len(s.Mirrors[i].Servers)))
		for j := range s.Mirrors[i].Servers {
			b = appendDataFile(b, &s.Mirrors[i].Servers[j])
		}
	}
	b = xdr.AppendUint32(b, uint32(s.Flags))
	return xdr.AppendUint32(b, s.StatsHint)
}

// DecodeLayout decodes body, the whole of an ff_layout4, for the range and iomode that came with it. The segment is valid.
//
// A body is extended with zeros to whole units of four bytes, and bytes behind its last field are ignored: the length that
// knfsd declares is wrong in both directions (see the package comment).
func DecodeLayout(body []byte, r layout.Range, mode layout.IOMode) (*layout.Segment, error) {
	d := xdr.NewDecoder(append(slices.Clip(body), xdr.Padding(len(body))...))
	s := &layout.Segment{Range: r, IOMode: mode}
	unit := d.Uint64()
	if unit > math.MaxInt64 {
		d.Fail(fmt.Errorf("stripe unit %d: %w", unit, xdr.ErrInvalid))
	}
	s.StripeUnit = int64(unit)
	s.Mirrors = make([]layout.Mirror, decodeCount(&d, "mirrors", layout.MaxMirrors, minMirror))
	for i := range s.Mirrors {
		servers := make([]layout.DataFile, decodeCount(&d, "data servers", layout.MaxServers, minDataServer))
		for j := range servers {
			decodeDataFile(&d, &servers[j])
		}
		s.Mirrors[i].Servers = servers
	}
	if len(d.Rest()) > 0 {
		s.Flags = layout.Flags(d.Uint32())
	}
	if len(d.Rest()) > 0 {
		s.StatsHint = d.Uint32()
	}
	err := d.Err()
	if err == nil {
		err = s.Validate()
	}
	if err != nil {
		return nil, fmt.Errorf("flexfiles: layout: %w", err)
	}
	return s, nil
}

// appendDataFile encodes an ff_data_server4.
func appendDataFile(b []byte, f *layout.DataFile) []byte {
	b = append(b, f.Device[:]...)
	b = xdr.AppendUint32(b, f.Efficiency)
	b = append(b, f.Stateid[:]...)
	b = xdr.AppendUint32(b, uint32(len(f.Handles)))
	for _, h := range f.Handles {
		b = xdr.AppendOpaque(b, h)
	}
	b = appendID(b, f.Cred.UID)
	return appendID(b, f.Cred.GID)
}

func decodeDataFile(d *xdr.Decoder, f *layout.DataFile) {
	copy(f.Device[:], d.FixedOpaque(len(f.Device)))
	f.Efficiency = d.Uint32()
	copy(f.Stateid[:], d.FixedOpaque(len(f.Stateid)))
	f.Handles = make([][]byte, decodeCount(d, "file handles", layout.MaxVersions, minOpaque))
	for i := range f.Handles {
		f.Handles[i] = bytes.Clone(d.Opaque(layout.MaxHandle))
	}
	f.Cred.UID = decodeID(d, "user")
	f.Cred.GID = decodeID(d, "group")
}

// appendID encodes a uid or gid as the string it is there.
func appendID(b []byte, id uint32) []byte {
	var digits [10]byte
	return xdr.AppendOpaque(b, strconv.AppendUint(digits[:0], uint64(id), 10))
}

// decodeID takes a string that is a number in its plain form, with no sign and no zeros before it.
func decodeID(d *xdr.Decoder, what string) uint32 {
	s := d.String(maxString)
	if d.Err() != nil {
		return 0
	}
	id, err := strconv.ParseUint(s, 10, 32)
	if err != nil || s != strconv.FormatUint(id, 10) {
		d.Fail(fmt.Errorf("%s %q of an NFSv3 data server is no plain number: %w", what, s, xdr.ErrInvalid))
	}
	return uint32(id)
}

// decodeCount takes the length of an array of at most most elements, of least bytes or more each.
func decodeCount(d *xdr.Decoder, what string, most, least int) int {
	n := d.Uint32()
	if uint64(n) > uint64(most) {
		d.Fail(fmt.Errorf("%d %s where %d are allowed: %w", n, what, most, xdr.ErrTooLong))
		return 0
	}
	if uint64(n)*uint64(least) > uint64(len(d.Rest())) {
		d.Fail(fmt.Errorf("%d %s: %w", n, what, xdr.ErrTruncated))
		return 0
	}
	return int(n)
}

// decodeType takes the layout type, of which there is one here.
func decodeType(d *xdr.Decoder) {
	if t := d.Uint32(); d.Err() == nil && t != LayoutType {
		d.Fail(fmt.Errorf("layout type %d, want %d: %w", t, LayoutType, xdr.ErrInvalid))
	}
}

func appendRange(b []byte, r layout.Range) []byte {
	b = xdr.AppendUint64(b, uint64(r.Off))
	if r.Len == layout.ToEOF {
		return xdr.AppendUint64(b, math.MaxUint64)
	}
	return xdr.AppendUint64(b, uint64(r.Len))
}

func decodeRange(d *xdr.Decoder) layout.Range {
	off, n := d.Uint64(), d.Uint64()
	switch {
	case off > math.MaxInt64:
		d.Fail(fmt.Errorf("offset %d: %w", off, xdr.ErrInvalid))
		return layout.Range{}
	case n == math.MaxUint64:
		n = uint64(layout.ToEOF)
	case n > math.MaxInt64:
		d.Fail(fmt.Errorf("length %d: %w", n, xdr.ErrInvalid))
		return layout.Range{}
	}
	return layout.Range{Off: int64(off), Len: int64(n)}
}
