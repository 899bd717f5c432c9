package iobuf

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// PageSize is the alignment of every buffer and the unit in which memory is counted, in bytes.
	PageSize = 4 << 10
	// MaxSize is the largest buffer, in bytes; a pool of less than four times as much has a smaller one.
	MaxSize = 8 << 20
)

// idleAfter is how long a block stays unused before its memory goes back, at least; at most twice as long.
const idleAfter = 5 * time.Second

const maxOrders = 12 // block sizes PageSize<<0 to PageSize<<11 == MaxSize

// Pool hands out buffers of at most Limit bytes altogether.
type Pool struct {
	mem  []byte
	used atomic.Int64 // bytes in buffers
	top  int          // order of the largest blocks, in which the memory is laid out; top+1 lists those without memory

	mu     sync.Mutex
	heads  [maxOrders + 1]int32 // first free block of each order: a page number, or none
	order  []int8               // of the free block that begins at this page, or notFree
	next   []int32              // links of free blocks of one order, by page number
	prev   []int32
	warm   int      // largest blocks that may have memory
	freeAt []uint32 // by largest block: the tick at which it became wholly free
	tick   uint32   // counts runs of trim
	armed  bool     // trim is going to run
}

const (
	none    int32 = -1
	notFree int8  = -1
)

// New makes a pool of at most limit bytes, rounded down to a multiple of its largest block.
func New(limit int64) (*Pool, error) {
	if limit < 4*PageSize || limit > 1<<42 {
		return nil, fmt.Errorf("buffer pool of %d bytes: want %d to %d", limit, 4*PageSize, int64(1)<<42)
	}
	p := &Pool{top: min(bits.Len64(uint64(limit/4/PageSize))-1, maxOrders-1)}
	size := int64(PageSize) << p.top
	limit -= limit % size
	mem, err := reserve(p, limit)
	if err != nil {
		return nil, err
	}
	p.mem = mem
	pages := int(limit / PageSize)
	p.order, p.next, p.prev = make([]int8, pages), make([]int32, pages), make([]int32, pages)
	p.freeAt = make([]uint32, limit/size)
	for i := range p.order {
		p.order[i] = notFree
	}
	for i := range p.heads {
		p.heads[i] = none
	}
	for b := pages - 1<<p.top; b >= 0; b -= 1 << p.top {
		p.push(int32(b), p.top+1)
	}
	return p, nil
}

// Limit is the bound on Used, in bytes.
func (p *Pool) Limit() int64 { return int64(len(p.mem)) }

// MaxBuf is the length of the largest buffer this pool can give, in bytes.
func (p *Pool) MaxBuf() int { return PageSize << p.top }

// Used is how many bytes are in buffers, rounded up to pages each.
func (p *Pool) Used() int64 { return p.used.Load() }

// Buf is a buffer with a count of those who use it.
type Buf struct {
	pool *Pool
	data []byte
	page int32
	refs atomic.Int32
}

var bufs = sync.Pool{New: func() any { return new(Buf) }}

// Get returns a buffer of n bytes with one reference, or nil if the pool cannot give it. Its contents are arbitrary.
func (p *Pool) Get(n int) *Buf {
	if n <= 0 || n > p.MaxBuf() {
		return nil
	}
	pages := (n + PageSize - 1) / PageSize
	p.mu.Lock()
	page := p.alloc(pages)
	p.mu.Unlock()
	if page == none {
		return nil
	}
	p.used.Add(int64(pages) * PageSize)
	b := bufs.Get().(*Buf)
	off := int(page) * PageSize
	b.pool, b.page, b.data = p, page, p.mem[off:off+n:off+n]
	b.refs.Store(1)
	return b
}

// Bytes is the buffer's memory, aligned to PageSize. It must not be used after the last Release.
func (b *Buf) Bytes() []byte { return b.data }

// Ref adds a reference. The caller must have one.
func (b *Buf) Ref() { b.refs.Add(1) }

// Shrink makes the buffer shorter, of n bytes, and gives the pages behind them back. The caller has the only reference.
func (b *Buf) Shrink(n int) {
	if n <= 0 || n > len(b.data) {
		panic(fmt.Sprintf("iobuf: buffer of %d bytes shrunk to %d", len(b.data), n))
	}
	before := b.pages()
	poison(b.data[n:])
	b.data = b.data[:n:n]
	if after := b.pages(); after < before {
		b.pool.release(b.page+after, b.page+before)
	}
}

// pages is how many pages the buffer has.
func (b *Buf) pages() int32 { return int32((len(b.data) + PageSize - 1) / PageSize) }

// release frees the pages [page, end).
func (p *Pool) release(page, end int32) {
	p.used.Add(-int64(end-page) * PageSize)
	p.mu.Lock()
	p.freeRun(page, end)
	p.mu.Unlock()
}

// Release drops a reference; the last one gives the buffer back.
func (b *Buf) Release() {
	switch n := b.refs.Add(-1); {
	case n > 0:
		return
	case n < 0:
		panic("iobuf: buffer released more often than referenced")
	}
	p, page, end := b.pool, b.page, b.page+b.pages()
	poison(b.data)
	b.pool, b.data = nil, nil
	bufs.Put(b)
	p.release(page, end)
}

// alloc takes a run of pages out of the smallest free block that holds it. mu is held.
func (p *Pool) alloc(pages int) int32 {
	want := bits.Len(uint(pages - 1))
	o := want
	for o <= p.top+1 && p.heads[o] == none {
		o++
	}
	if o > p.top+1 {
		return none
	}
	b := p.heads[o]
	p.remove(b, o)
	if o > p.top {
		p.warm++
		o = p.top
	}
	for ; o > want; o-- {
		p.push(b+1<<(o-1), o-1)
	}
	p.freeRun(b+int32(pages), b+1<<want)
	return b
}

// freeRun frees the pages [b, end) as the largest aligned blocks they consist of. mu is held.
func (p *Pool) freeRun(b, end int32) {
	for b < end {
		o := min(bits.TrailingZeros32(uint32(b)), bits.Len32(uint32(end-b))-1, p.top)
		p.free(b, o)
		b += 1 << o
	}
}

// free joins a block with its free buddies and lists the result. mu is held.
func (p *Pool) free(b int32, o int) {
	for o < p.top {
		buddy := b ^ 1<<o
		if p.order[buddy] != int8(o) {
			break
		}
		p.remove(buddy, o)
		b &^= 1 << o
		o++
	}
	p.push(b, o)
	if o == p.top {
		p.freeAt[b>>p.top] = p.tick
		p.arm()
	}
}

func (p *Pool) push(b int32, o int) {
	p.order[b], p.prev[b], p.next[b] = int8(o), none, p.heads[o]
	if p.heads[o] != none {
		p.prev[p.heads[o]] = b
	}
	p.heads[o] = b
}

func (p *Pool) remove(b int32, o int) {
	p.order[b] = notFree
	if p.prev[b] == none {
		p.heads[o] = p.next[b]
	} else {
		p.next[p.prev[b]] = p.next[b]
	}
	if p.next[b] != none {
		p.prev[p.next[b]] = p.prev[b]
	}
}

// arm makes trim run in a while. mu is held.
func (p *Pool) arm() {
	if !p.armed {
		p.armed = true
		time.AfterFunc(idleAfter, p.trim)
	}
}

// trim gives back the memory of blocks that have been free since before the previous run, and runs again as long as
// there are free blocks with memory.
func (p *Pool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.armed = false
	again := false
	for i, at := range p.freeAt {
		b := int32(i) << p.top
		switch {
		case p.order[b] != int8(p.top):
		case at == p.tick:
			again = true
		default:
			// madvise of some MiB takes a while, so nobody waits for it; off the lists nobody takes the block either.
			p.remove(b, p.top)
			p.mu.Unlock()
			giveBack(p.mem[int(b)*PageSize:][:PageSize<<p.top])
			p.mu.Lock()
			p.warm--
			p.push(b, p.top+1)
		}
	}
	p.tick++
	if again {
		p.arm()
	}
}
