package dataplane

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/internal/rangemap"
	"github.com/weftfs/weft/layout"
)

// dataFile is what the plane knows of one data file: the data written to it that may not be stable yet.
type dataFile struct {
	file *File
	// use is the data file with the newest handles and credentials seen.
	use atomic.Pointer[layout.DataFile]
	// turn is held by whoever commits the data file (one element; settle).
	turn chan struct{}
	// ctx ends when the data file is forsaken, and with it whatever waits for its server.
	ctx     context.Context
	forsake context.CancelFunc
	// forsaken says that the data file is a copy that was given up (File.Forsake). It is set with mu held and stays so.
	forsaken atomic.Bool
	// column is which stripe column the data file holds, mirrored whether others hold it as well.
	column   atomic.Int32
	mirrored atomic.Bool

	mu       sync.Mutex
	orphans  []*piece // pieces of this data file that requests no longer wait for
	retained rangemap.Map[retained]
	clock    uint64          // counts acknowledgements
	verifier layout.Verifier // of the last reply
}

// retained is unstable data in memory, or in that of this host's kernel (kept, see layout.Op).
type retained struct {
	buf      *iobuf.Buf       // a reference; extents cut from one have one each. nil: it is kept
	file     *layout.DataFile // that it was written to
	kept     uint64
	base     int64 // offset in the file of buf's first byte
	verifier layout.Verifier
	epoch    uint64 // of the target before the data was sent
	acked    uint64 // clock of the first acknowledgement
	sent     uint64 // clock of the last acknowledgement
	lost     bool   // the server does not have it, or may not: it must be sent again
}

// target is what it is sent to again: as it is used now, unless it lies where the extents say that it was written by. Those of another
// segment need not have it.
func (r *retained) target(use *layout.DataFile) *layout.DataFile {
	if len(r.file.Extents) > 0 && r.file.Generation == use.Generation {
		return r.file
	}
	return use
}

func (r *retained) bytes(off, end int64) []byte { return r.buf.Bytes()[off-r.base : end-r.base] }

func releaseRetained(r *retained) {
	if r.buf != nil {
		r.buf.Release()
	}
}

func refRetained(r *retained) {
	if r.buf != nil {
		r.buf.Ref()
	}
}

// coveredBy reports whether the data is stable if a COMMIT was answered so.
func (r *retained) coveredBy(commit *layout.Op) bool {
	if r.buf == nil {
		return r.kept == commit.Kept
	}
	return r.verifier == commit.Verifier
}

// replace cuts [off, end) out of what is retained, because newer data was acknowledged or the file was truncated. mu is
// held.
func (d *dataFile) replace(off, end int64) {
	before := d.retained.Len()
	if before > 0 {
		d.retained.Cut(off, end, releaseRetained, refRetained)
		d.file.count(d.retained.Len() - before)
	}
}

// supersede notes a stable write.
func (d *dataFile) supersede(pc *piece) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.verifier = pc.op.Verifier
	d.replace(pc.op.Off, pc.end())
}

// retain takes over the piece's buffer, if it has one, until its data is stable.
func (d *dataFile) retain(pc *piece) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.forsaken.Load() {
		return
	}
	d.verifier = pc.op.Verifier
	d.replace(pc.op.Off, pc.end())
	d.clock++
	d.retained.Insert(pc.op.Off, pc.end(), retained{
		buf: pc.buf, file: pc.op.File, kept: pc.op.Kept, base: pc.base, verifier: pc.op.Verifier, epoch: pc.epoch, acked: d.clock, sent: d.clock,
	})
	d.file.count(1)
	pc.buf = nil
}

// examine reports whether unstable data is retained in [off, end), and whether the server may have lost some of it, going
// by the target's present epoch. It errs on the side of doubt: verifiers of replies that overtook one another make a
// difference too.
func (d *dataFile) examine(off, end int64, epoch uint64) (overlaps, doubt bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.retained.Overlapping(off, end, func(e *rangemap.Entry[retained]) bool {
		overlaps, doubt = true, d.inDoubt(&e.Val, epoch)
		return !doubt
	})
	return overlaps, doubt
}

func (d *dataFile) inDoubt(r *retained, epoch uint64) bool {
	if r.buf == nil {
		return r.lost
	}
	return r.lost || r.verifier != d.verifier || r.epoch != epoch
}

// overlay copies retained data that is in doubt over data read at off.
func (d *dataFile) overlay(data []byte, off int64, epoch uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.retained.Overlapping(off, off+int64(len(data)), func(e *rangemap.Entry[retained]) bool {
		if d.inDoubt(&e.Val, epoch) && e.Val.buf != nil {
			from, to := max(e.Off, off), min(e.End, off+int64(len(data)))
			copy(data[from-off:to-off], e.Val.bytes(from, to))
		}
		return true
	})
}
