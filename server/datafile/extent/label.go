package extent

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// Identity is what a namespace is recognised by, over whatever controller: zero where it has none, in the order of preference.
type Identity struct {
	NGUID [16]byte
	EUI64 [8]byte
	UUID  [16]byte
}

func identity(ns *schema.Namespace) Identity {
	return Identity{NGUID: ns.NGUID, EUI64: ns.EUI64, UUID: ns.UUID}
}

// String is the one that counts.
func (id Identity) String() string {
	switch {
	case id.NGUID != [16]byte{}:
		return fmt.Sprintf("nguid.%x", id.NGUID)
	case id.EUI64 != [8]byte{}:
		return fmt.Sprintf("eui.%x", id.EUI64)
	}
	return fmt.Sprintf("uuid.%x", id.UUID)
}

// Label says whose a namespace is. It is written to its beginning and, as another copy, to its end (BackupLabel).
type Label struct {
	Generation uint64 // raised whenever it is written anew
	Volume     [16]byte
	Device     layout.DeviceID
	Identity   Identity
	Block      int64 // as in schema.Namespace, all below
	Size       int64
	Unit       int64
	Group      int64
}

// LabelOf is the label of a namespace.
func LabelOf(volume [16]byte, id layout.DeviceID, ns *schema.Namespace) Label {
	return Label{
		Generation: ns.Label, Volume: volume, Device: id, Identity: identity(ns),
		Block: ns.Block, Size: ns.Size, Unit: ns.Unit, Group: ns.Group,
	}
}

// Namespace is the row of the namespace that has the label.
func (l *Label) Namespace() schema.Namespace {
	return schema.Namespace{
		NGUID: l.Identity.NGUID, EUI64: l.Identity.EUI64, UUID: l.Identity.UUID,
		Block: l.Block, Size: l.Size, Unit: l.Unit, Group: l.Group, Label: l.Generation,
	}
}

const (
	// LabelSize is how many bytes of the namespace a label takes, a multiple of every block.
	LabelSize = 64 << 10

	labelMagic   = "weftnvme"
	labelVersion = 1
	labelSum     = 148 // where the checksum is: behind all that it is of
	labelEnd     = labelSum + sha256.Size
)

// BackupLabel is where the second copy of the label is on a namespace of so many bytes.
func BackupLabel(size int64) int64 { return size/LabelSize*LabelSize - LabelSize }

var (
	// ErrNoLabel: there is no label at all.
	ErrNoLabel = errors.New("no label")
	// ErrBadLabel: there is something that was a label once, or is one of a later version.
	ErrBadLabel = errors.New("damaged label")
)

// AppendLabel appends the LabelSize bytes of a label, little-endian:
//
//	0    magic "weftnvme"
//	8    version, 4 bytes, and 4 that are zero
//	16   generation, 8
//	24   volume, 16
//	40   device, 16
//	56   NGUID, 16; 72 EUI64, 8; 80 UUID, 16
//	96   block, 8; 104 size, 8; 112 unit, 8; 120 group, 8
//	128  20 that are zero
//	148  SHA-256 of all before, 32
//	180  zeros
func AppendLabel(b []byte, l *Label) []byte {
	start := len(b)
	b = append(b, labelMagic...)
	b = binary.LittleEndian.AppendUint64(b, labelVersion)
	b = binary.LittleEndian.AppendUint64(b, l.Generation)
	b = append(b, l.Volume[:]...)
	b = append(b, l.Device[:]...)
	b = append(b, l.Identity.NGUID[:]...)
	b = append(b, l.Identity.EUI64[:]...)
	b = append(b, l.Identity.UUID[:]...)
	for _, n := range []int64{l.Block, l.Size, l.Unit, l.Group} {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	b = append(b, make([]byte, labelSum-(len(b)-start))...)
	sum := sha256.Sum256(b[start:])
	b = append(b, sum[:]...)
	return append(b, make([]byte, LabelSize-labelEnd)...)
}

// ParseLabel reads a label from the beginning of b. It must be as AppendLabel made it, for many a file system leaves the first bytes alone. Errors
// are ErrNoLabel and ErrBadLabel.
func ParseLabel(b []byte) (*Label, error) {
	if len(b) < LabelSize || string(b[:8]) != labelMagic {
		return nil, ErrNoLabel
	}
	if v := binary.LittleEndian.Uint64(b[8:]); v != labelVersion {
		return nil, fmt.Errorf("%w: version %d, this program knows version %d", ErrBadLabel, v, labelVersion)
	}
	if sum := sha256.Sum256(b[:labelSum]); !bytes.Equal(sum[:], b[labelSum:labelEnd]) {
		return nil, fmt.Errorf("%w: its checksum is wrong", ErrBadLabel)
	}
	if !zero(b[labelEnd:LabelSize]) || !zero(b[128:labelSum]) {
		return nil, fmt.Errorf("%w: something was written over it", ErrBadLabel)
	}
	l := &Label{
		Generation: binary.LittleEndian.Uint64(b[16:]),
		Volume:     [16]byte(b[24:]), Device: layout.DeviceID(b[40:]),
		Identity: Identity{NGUID: [16]byte(b[56:]), EUI64: [8]byte(b[72:]), UUID: [16]byte(b[80:])},
		Block:    int64(binary.LittleEndian.Uint64(b[96:])), Size: int64(binary.LittleEndian.Uint64(b[104:])),
		Unit: int64(binary.LittleEndian.Uint64(b[112:])), Group: int64(binary.LittleEndian.Uint64(b[120:])),
	}
	ns := l.Namespace()
	if err := checkNamespace(&ns); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadLabel, err)
	}
	return l, nil
}
