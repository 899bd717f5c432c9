package nvmetcp

import (
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// zeros is what is written where the controller has no Write Zeroes.
var zeros [256 << 10]byte

// part is the part of an operation that one command does, or, of a block that is changed, two.
type part struct {
	req     Request
	scratch []byte // one block, once it was needed
	use
}

// use is what a part is for this time.
type use struct {
	o       *operation
	off     int64 // of its first block, in the data file
	delta   int64 // from there to the address on the namespace
	invalid bool
	lost    uint64 // Target.lost when the command was begun

	// Of a block that is not wholly the operation's:
	partial  bool
	from, to int    // which bytes of scratch are
	bytes    []byte // their place in the Op's data; nil: they are made zeros; guarded by operation.mu

	// Of one that is changed:
	locks   bool
	writing bool
	next    *part // waits for the same block, guarded by Target.mu
	last    *part // of those who wait, if this part has the block
}

func (p *part) blocks(addr, n, block int64) {
	p.req.SLBA, p.req.Blocks = uint64(addr/block), uint32(n/block)
}

// zeroes makes the part one that zeroes its blocks.
func (p *part) zeroes() {
	t := p.o.t
	if t.noZeroes.Load() {
		p.req.Op, p.req.Data = wire.OpWrite, zeros[:int64(p.req.Blocks)*t.block]
		return
	}
	p.req.Op = wire.OpWriteZeroes
	p.o.doubt = true
}

// acquire begins the part when nobody else changes its block.
func (p *part) acquire() {
	t, addr := p.o.t, p.off+p.delta
	t.mu.Lock()
	owner := t.locks[addr]
	switch {
	case owner == nil:
		t.locks[addr] = p
	case owner.last == nil:
		owner.next, owner.last = p, p
	default:
		owner.last.next, owner.last = p, p
	}
	t.mu.Unlock()
	if owner == nil {
		p.begin()
	}
}

// begin reads the block, or makes it zeros. The block is held.
func (p *part) begin() {
	o, t := p.o, p.o.t
	t.mu.Lock()
	p.lost = t.look()
	there := !p.invalid || o.known != nil && o.known.has(p, o.generation, t.block)
	t.mu.Unlock()
	switch {
	case there:
		o.mu.Lock()
		stop := o.stop
		if stop == nil {
			p.req.Op, p.req.Data, p.req.FUA = wire.OpRead, p.scratch, false
			t.space.Start(&p.req)
		}
		o.mu.Unlock()
		if stop != nil {
			p.ended(stop)
		}
	case o.kind == opZero:
		p.ended(nil) // it is zeros as it is
	default:
		clear(p.scratch)
		p.write()
	}
}

// write changes the block, of which scratch is the old content, and writes it.
func (p *part) write() {
	o := p.o
	o.mu.Lock()
	if stop := o.stop; stop != nil {
		o.mu.Unlock()
		p.ended(stop)
		return
	}
	if changed := p.scratch[p.from:p.to]; o.kind == opZero {
		clear(changed)
	} else {
		copy(changed, p.bytes)
	}
	p.writing = true
	p.req.Op, p.req.Data, p.req.FUA = wire.OpWrite, p.scratch, o.fua
	o.t.space.Start(&p.req)
	o.mu.Unlock()
}

// done is the end of a command.
func (p *part) done(*Request) {
	o, t := p.o, p.o.t
	err := translate(p.req.Err)
	switch {
	case p.locks && !p.writing && err == nil:
		if p.invalid && t.Epoch() != p.lost {
			p.begin() // what was read may be what the device held before
		} else {
			p.write()
		}
		t.space.Flush()
		return
	case err == nil && p.partial && !p.locks:
		o.mu.Lock()
		if !o.detached {
			copy(p.bytes, p.scratch[p.from:p.to])
		}
		o.mu.Unlock()
	case err == nil && p.invalid && o.kind != layout.OpRead:
		t.mark(p)
	}
	p.ended(err)
}

// ended ends the part; who waits for its block gets it.
func (p *part) ended(err error) {
	o, t := p.o, p.o.t
	if err != nil {
		o.fail(err)
	}
	if p.locks {
		t.mu.Lock()
		next := p.next
		if addr := p.off + p.delta; next == nil {
			delete(t.locks, addr)
		} else {
			t.locks[addr] = next
			if next != p.last {
				next.last = p.last
			}
		}
		t.mu.Unlock()
		if next != nil {
			next.begin()
			t.space.Flush()
		}
	}
	o.drop()
}
