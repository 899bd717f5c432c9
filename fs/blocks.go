package fs

import (
	"math"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/rangemap"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// maxBlockRanges is how many separate ranges of one file are counted.
const maxBlockRanges = 1024

// allocation counts what is allocated of a file that this mount alone writes. A write counts when it begins.
type allocation struct {
	state blocksState
	total int64
	// ranges are the whole blocks that are known to be allocated; no two touch. Of those before below it is only known how many there are.
	ranges rangemap.Map[struct{}]
	below  int64
}

type blocksState uint8

const (
	blocksUnasked blocksState = iota // nothing was written: what the service says holds
	blocksCounted                    // total holds
	blocksLost                       // nobody knows
)

// roundUp is n in whole blocks.
func roundUp(n int64) int64 {
	if n > math.MaxInt64-metarpc.UsedBlock {
		return math.MaxInt64
	}
	return (n + metarpc.UsedBlock - 1) / metarpc.UsedBlock * metarpc.UsedBlock
}

// count is called before n bytes at off are written, or reserved. mu is held.
//
// The layout for writing is there by now. A lease that there is as well says that nobody else has written since the service
// told how much is allocated; for what others write from now on the service ignores what we report.
func (i *inode) count(off, n int64) {
	b := &i.blocks
	if b.state == blocksUnasked {
		answer, ok := i.fs.meta.CachedAttr(i.id)
		used, known := answer.Attr.Used.Bytes()
		switch end := roundUp(answer.Attr.Size); {
		case ok && !known:
			b.state = blocksLost
		case !ok || i.passed != nil:
			b.state = blocksCounted
			i.loseBlocks()
		default:
			b.state, b.total = blocksCounted, used
			switch {
			case used == 0:
			case used == end: // no holes
				b.ranges.Insert(0, end, struct{}{})
			default:
				b.below = end
			}
		}
	}
	if b.state != blocksCounted {
		return
	}
	if from := off - off%metarpc.UsedBlock; from >= b.below {
		b.add(from, roundUp(off+n))
	} else {
		i.loseBlocks() // which of them are allocated is not known
	}
	if b.ranges.Len() > maxBlockRanges {
		i.loseBlocks()
	}
}

// add counts whole blocks.
func (b *allocation) add(off, end int64) {
	from, to, had := off, end, int64(0)
	b.ranges.Overlapping(off-1, end+1, func(e *rangemap.Entry[struct{}]) bool {
		from, to, had = min(from, e.Off), max(to, e.End), had+e.End-e.Off
		return true
	})
	if to-from == had {
		return // they are all there
	}
	b.ranges.DeleteFunc(off-1, end+1, func(*rangemap.Entry[struct{}]) bool { return true })
	b.ranges.Insert(from, to, struct{}{})
	b.total += to - from - had
}

// cutBlocks is called when this mount has given the file another size, of which the service knows used. mu is held.
func (i *inode) cutBlocks(size int64, used metarpc.Used) {
	b := &i.blocks
	end := roundUp(size)
	switch {
	case size == 0 && b.state != blocksCounted:
		*b = allocation{} // what was written before is gone
	case b.state != blocksCounted:
	case end < b.below:
		i.loseBlocks()
	default:
		b.ranges.Overlapping(end, math.MaxInt64, func(e *rangemap.Entry[struct{}]) bool {
			b.total -= e.End - max(e.Off, end)
			return true
		})
		nothing := func(*struct{}) {}
		b.ranges.Cut(end, math.MaxInt64, nothing, nothing)
		if i.used() != used {
			i.tellUsed()
		}
	}
}

// loseBlocks is called when it is not known any more how much is allocated, which the service has to hear. mu is held.
func (i *inode) loseBlocks() {
	if i.blocks.state == blocksCounted {
		i.blocks = allocation{state: blocksLost}
		i.tellUsed()
	}
}

// doubtBlocks is loseBlocks when it is not known what became of a write; mu is not held.
func (i *inode) doubtBlocks() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.loseBlocks()
}

// allocated is called after space was reserved or given back. certain says that what was touched is allocated: data servers need not have
// given back what was punched, and what they have behind the end of the file is not counted.
func (i *inode) allocated(certain bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !certain {
		i.loseBlocks()
	} else if i.blocks.state == blocksCounted {
		i.tellUsed()
	}
}

// tellUsed has a report made though nothing was written. mu is held.
func (i *inode) tellUsed() {
	i.written++
	i.enqueue()
}

// used is what a report says. mu is held.
func (i *inode) used() metarpc.Used {
	switch i.blocks.state {
	case blocksCounted:
		return metarpc.UsedOf(i.blocks.total)
	case blocksLost:
		return metarpc.UsedLost
	}
	return 0
}

// showUsed puts into attributes, which are the service's, how much is allocated as it is known here. mu is held.
func (i *inode) showUsed(a *metarpc.Attr) {
	switch {
	case a.Used == 0: // others write the file, too, or have
	case i.blocks.state == blocksCounted:
		a.Used = i.used()
	case i.blocks.state == blocksLost, i.written > i.durable, i.passed != nil:
		a.Used = 0
	}
}

// sectors is st_blocks. Where it is not known how much is allocated it says that something is and something is not, so
// that whoever wants to copy a file without its holes looks for them.
func sectors(a *metarpc.Attr) uint64 {
	const sector = 512
	n := uint64(a.Size+sector-1) / sector
	if used, known := a.Used.Bytes(); known {
		return uint64(used) / sector
	}
	if a.Mode&unix.S_IFMT != unix.S_IFREG || n < 2 {
		return n
	}
	return n - 1
}
