package nvmetcp

// MaxBlocks is the most blocks of one Read, Write, Compare or Write Zeroes.
const MaxBlocks = 1 << 16

const (
	rwFUA     = 1 << 30
	rwLimited = 1 << 31
	rwDEAC    = 1 << 25
)

// Range is the arguments of Read, Write, Compare and Write Zeroes.
type Range struct {
	NSID       uint32
	SLBA       uint64 // first block
	Blocks     uint32 // 1 to MaxBlocks
	FUA        bool   // on the media before the completion
	Limited    bool   // limited retry: fail quickly
	Deallocate bool   // of Write Zeroes: the blocks may be deallocated
}

// Command encodes the command op; sgl is for the data, which Write Zeroes has not.
func (r Range) Command(op Opcode, sgl SGL) Command {
	c := Command{Opcode: op, NSID: r.NSID, SGL: sgl, CDW10: uint32(r.SLBA), CDW11: uint32(r.SLBA >> 32), CDW12: uint32(uint16(r.Blocks - 1))}
	if r.FUA {
		c.CDW12 |= rwFUA
	}
	if r.Limited {
		c.CDW12 |= rwLimited
	}
	if r.Deallocate {
		c.CDW12 |= rwDEAC
	}
	return c
}

// Decode takes the arguments of c.
func (r *Range) Decode(c *Command) {
	*r = Range{
		NSID:       c.NSID,
		SLBA:       uint64(c.CDW11)<<32 | uint64(c.CDW10),
		Blocks:     uint32(uint16(c.CDW12)) + 1,
		FUA:        c.CDW12&rwFUA != 0,
		Limited:    c.CDW12&rwLimited != 0,
		Deallocate: c.CDW12&rwDEAC != 0 && c.Opcode == OpWriteZeroes,
	}
}

// Within tells whether the range ends within a namespace of size blocks.
func (r Range) Within(size uint64) bool {
	return r.SLBA <= size && uint64(r.Blocks) <= size-r.SLBA
}

// KeepAlive is the command that does nothing but tell that the host lives.
func KeepAlive() Command { return Command{Opcode: OpKeepAlive, SGL: NoSGL()} }

// Limits of Dataset Management.
const (
	MaxDSMRanges = 256
	DSMRangeSize = 16
)

const dsmDeallocate = 1 << 2

// DSMRange is one range of Dataset Management.
type DSMRange struct {
	SLBA   uint64
	Blocks uint32 // not 0's based
}

// Deallocate is the Dataset Management command that deallocates n ranges (1 to MaxDSMRanges), its data n DSMRange.
func Deallocate(nsid uint32, n int, inCapsule bool) Command {
	sgl := TransportSGL(uint32(n) * DSMRangeSize)
	if inCapsule {
		sgl.Type = SGLInCapsule
	}
	return Command{Opcode: OpDatasetManagement, NSID: nsid, SGL: sgl, CDW10: uint32(uint8(n - 1)), CDW11: dsmDeallocate}
}

// DecodeDSM takes the command: the number of ranges, and whether they are to be deallocated; if not it is advice, which may be
// ignored.
func DecodeDSM(c *Command) (n int, deallocate bool) {
	return int(uint8(c.CDW10)) + 1, c.CDW11&dsmDeallocate != 0
}

// Append encodes the range. Its context attributes are 0.
func (r DSMRange) Append(b []byte) []byte {
	b = le.AppendUint32(b, 0)
	b = le.AppendUint32(b, r.Blocks)
	return le.AppendUint64(b, r.SLBA)
}

// Decode takes the range from the first DSMRangeSize bytes of b.
func (r *DSMRange) Decode(b []byte) error {
	if err := short("range of Dataset Management", b, DSMRangeSize); err != nil {
		return err
	}
	*r = DSMRange{Blocks: le.Uint32(b[4:]), SLBA: le.Uint64(b[8:])}
	return nil
}

// Within tells whether the range ends within a namespace of size blocks.
func (r DSMRange) Within(size uint64) bool {
	return r.SLBA <= size && uint64(r.Blocks) <= size-r.SLBA
}
