package extent

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// Bounds of a namespace's geometry.
const (
	MinUnit  = 1 << 20
	MaxUnit  = 64 << 20
	MaxBlock = 64 << 10

	// Rows of extents have so many units and so many bytes of bitmaps at most.
	maxRowUnits  = 64
	maxRowBitmap = 16 << 10

	// A group has enough units that a run is seldom cut by its end, and a row of 1 KiB; there are enough groups that those who
	// allocate at the same time seldom meet.
	minGroup   = 64
	maxGroup   = 8 << 10
	manyGroups = 64
)

// NewNamespace returns the row of a namespace that has this identity, block size and size, all in bytes, and this allocation unit.
func NewNamespace(id Identity, block, size, unit int64) (schema.Namespace, error) {
	ns := schema.Namespace{NGUID: id.NGUID, EUI64: id.EUI64, UUID: id.UUID, Block: block, Size: size, Unit: unit, Group: minGroup, Label: 1}
	if unit > 0 {
		for ns.Group < maxGroup && ns.Group*manyGroups < size/unit {
			ns.Group *= 2
		}
	}
	return ns, checkNamespace(&ns)
}

// checkNamespace says what no namespace can be like.
func checkNamespace(ns *schema.Namespace) error {
	powerOfTwo := func(n int64) bool { return n > 0 && n&(n-1) == 0 }
	switch {
	case identity(ns) == Identity{}:
		return errors.New("the namespace has neither NGUID nor EUI64 nor UUID, so nobody could recognise it")
	case !powerOfTwo(ns.Block) || ns.Block < layout.MinBlock || ns.Block > MaxBlock:
		return fmt.Errorf("blocks of %d bytes, want a power of two from %d to %d", ns.Block, layout.MinBlock, MaxBlock)
	case !powerOfTwo(ns.Unit) || ns.Unit < MinUnit || ns.Unit > MaxUnit:
		return fmt.Errorf("allocation units of %d bytes, want a power of two from %d to %d", ns.Unit, MinUnit, MaxUnit)
	case ns.Size%ns.Block != 0:
		return fmt.Errorf("a namespace of %d bytes, which is no multiple of its blocks of %d", ns.Size, ns.Block)
	case ns.Size < 4*ns.Unit:
		return fmt.Errorf("a namespace of %d bytes, want at least 4 allocation units of %d", ns.Size, ns.Unit)
	case !powerOfTwo(ns.Group) || ns.Group < minGroup || ns.Group > maxGroup:
		return fmt.Errorf("groups of %d units, want a power of two from %d to %d", ns.Group, minGroup, maxGroup)
	}
	return nil
}

// geometry is how a namespace is cut. Units [first, limit) of it are for data files; the labels are around these.
type geometry struct {
	block, unit int64 // bytes
	blocks      int64 // in a unit
	limit       int64 // units
	group       int64 // units
	perRow      int   // units in a row of extents
}

const first = 1

func geometryOf(ns *schema.Namespace) geometry {
	g := geometry{block: ns.Block, unit: ns.Unit, blocks: ns.Unit / ns.Block, limit: BackupLabel(ns.Size) / ns.Unit, group: ns.Group}
	g.perRow = int(min(maxRowUnits, maxRowBitmap*8/g.blocks))
	return g
}

// groups is how many there are.
func (g *geometry) groups() int64 { return (g.limit + g.group - 1) / g.group }

// image is the units of one group: a bit for each, set if it is not free.
type image []uint64

// empty is a group all of whose units are free, but those that are for no data file.
func (g *geometry) empty(group int64) image {
	m := make(image, g.group/64)
	if group == 0 {
		m.set(0, first)
	}
	if end := (group + 1) * g.group; end > g.limit {
		m.set(g.limit-group*g.group, g.group)
	}
	return m
}

// decodeGroup reads the row of a group, nil if it has none.
func (g *geometry) decodeGroup(group int64, row []byte) (image, error) {
	m := g.empty(group)
	if row == nil {
		return m, nil
	}
	if len(row) != 8*len(m) {
		return nil, fmt.Errorf("group %d: a row of %d bytes, want %d", group, len(row), 8*len(m))
	}
	for i, c := range row {
		m[i/8] |= uint64(c) << (i % 8 * 8)
	}
	return m, nil
}

func (m image) encode() []byte {
	row := make([]byte, 8*len(m))
	for i := range row {
		row[i] = byte(m[i/8] >> (i % 8 * 8))
	}
	return row
}

func (m image) has(i int64) bool { return m[i/64]>>(i%64)&1 != 0 }

func (m image) set(from, to int64) {
	for i := from; i < to; i++ {
		m[i/64] |= 1 << (i % 64)
	}
}

func (m image) clear(from, to int64) {
	for i := from; i < to; i++ {
		m[i/64] &^= 1 << (i % 64)
	}
}

// free is how many bits are not set.
func (m image) free() int64 {
	n := 0
	for _, w := range m {
		n += bits.OnesCount64(^w)
	}
	return int64(n)
}

// next is the first bit from i on that is set, or is not; the end if there is none.
func (m image) next(i int64, set bool) int64 {
	for end := int64(len(m)) * 64; i < end; i = (i/64 + 1) * 64 {
		w := m[i/64]
		if !set {
			w = ^w
		}
		if w >>= i % 64; w != 0 {
			return i + int64(bits.TrailingZeros64(w))
		}
	}
	return int64(len(m)) * 64
}

// run finds free units: at near if there are any, or else the first n that lie together, or else the longest that do. near may be
// negative. There are none if from == to.
func (m image) run(near, n int64) (from, to int64) {
	if near >= 0 && near < int64(len(m))*64 && !m.has(near) {
		return near, min(m.next(near, true), near+n)
	}
	for at := m.next(0, false); at < int64(len(m))*64; {
		end := m.next(at, true)
		if end-at >= n {
			return at, at + n
		}
		if end-at > to-from {
			from, to = at, end
		}
		at = m.next(end, false)
	}
	return from, to
}
