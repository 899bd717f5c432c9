package nvmetcp

import (
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// memSpace is a namespace in memory, at first full of what nobody has written.
type memSpace struct {
	format Format

	mu      sync.Mutex
	changed *sync.Cond
	rnd     *rand.Rand
	now     []byte
	stable  []byte
	dirty   map[uint64]bool // blocks in which now may differ from stable
	lost    uint64
	started []*Request
	queue   []*Request
	private map[*Request][]byte // of those that were detached
	inline  bool                // commands are carried out by Flush
	paused  bool
	shuffle bool
	closed  bool
	refuse  func(*Request) error // what a command ends with instead of being carried out
	after   func(*Request)       // called when a command was carried out, before its Done
	counts  map[wire.Opcode]int
	fua     int
	most    uint32 // blocks of a command
	largest uint32 // of one that reads or writes
	crossed bool   // a command went over a boundary
	next    int64
}

func newMemSpace(t testing.TB, format Format, size int64, seed uint64) *memSpace {
	s := &memSpace{format: format, rnd: rand.New(rand.NewPCG(seed, 11)), now: make([]byte, size), dirty: map[uint64]bool{},
		private: map[*Request][]byte{}, counts: map[wire.Opcode]int{}}
	s.changed = sync.NewCond(&s.mu)
	garbage := make([]byte, 4099)
	for i := range garbage {
		garbage[i] = 0x80 | byte(s.rnd.Uint32()) // what tests write is less
	}
	for at := 0; at < len(s.now); {
		at += copy(s.now[at:], garbage)
	}
	s.stable = slices.Clone(s.now)
	for range 2 {
		// This goroutine is a queue: it carries out what was flushed and ends with the test.
		go s.serve()
	}
	t.Cleanup(func() { s.set(func() { s.closed = true }) })
	return s
}

func (s *memSpace) set(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
	s.changed.Broadcast()
}

func (s *memSpace) Format() Format { return s.format }

func (s *memSpace) Lost() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// fail makes the power fail: of what is not stable each block is lost with this chance.
func (s *memSpace) fail(chance float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost++
	for b := range s.dirty {
		to, from := s.now[b*uint64(s.format.BlockSize):][:s.format.BlockSize], s.stable[b*uint64(s.format.BlockSize):][:s.format.BlockSize]
		if s.rnd.Float64() >= chance {
			to, from = from, to
		}
		copy(to, from)
	}
	clear(s.dirty)
}

func (s *memSpace) count(op wire.Opcode) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[op]
}

func (s *memSpace) Start(r *Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Err = nil
	s.started = append(s.started, r)
}

func (s *memSpace) Flush() {
	s.mu.Lock()
	s.queue = append(s.queue, s.started...)
	clear(s.started)
	s.started = s.started[:0]
	if !s.inline {
		s.changed.Broadcast()
		s.mu.Unlock()
		return
	}
	for len(s.queue) > 0 {
		r := s.queue[0]
		s.queue = slices.Delete(s.queue, 0, 1)
		s.apply(r)
		s.mu.Unlock()
		r.Done(r)
		s.mu.Lock()
	}
	s.mu.Unlock()
}

func (s *memSpace) Withdraw(r *Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, list := range []*[]*Request{&s.started, &s.queue} {
		if i := slices.Index(*list, r); i >= 0 {
			*list = slices.Delete(*list, i, i+1)
			go func() {
				r.Err = ErrWithdrawn
				r.Done(r)
			}()
		}
	}
}

func (s *memSpace) serve() {
	for {
		s.mu.Lock()
		for !s.closed && (s.inline || s.paused || len(s.queue) == 0) {
			s.changed.Wait()
		}
		if s.closed {
			s.mu.Unlock()
			return
		}
		i := 0
		if s.shuffle {
			i = s.rnd.IntN(len(s.queue))
		}
		r := s.queue[i]
		s.queue = slices.Delete(s.queue, i, i+1)
		s.apply(r)
		yield := s.shuffle && s.rnd.IntN(4) == 0
		after := s.after
		s.mu.Unlock()
		if yield {
			runtime.Gosched()
		}
		if after != nil {
			after(r)
		}
		r.Done(r)
	}
}

// apply carries a command out. mu is held.
func (s *memSpace) apply(r *Request) {
	s.counts[r.Op]++
	block := uint64(s.format.BlockSize)
	data := r.Data
	if p, ok := s.private[r]; ok {
		data = p
		delete(s.private, r)
	}
	if s.refuse != nil {
		if r.Err = s.refuse(r); r.Err != nil {
			return
		}
	}
	if r.Op == wire.OpFlush {
		s.stabilise()
		return
	}
	if b := uint64(s.format.Boundary); b > 0 && r.SLBA/b != (r.SLBA+uint64(r.Blocks)-1)/b {
		s.crossed = true
	}
	s.most = max(s.most, r.Blocks)
	if r.Op != wire.OpWriteZeroes {
		s.largest = max(s.largest, r.Blocks)
	}
	n := uint64(r.Blocks) * block
	if r.Blocks == 0 || r.SLBA*block+n > uint64(len(s.now)) {
		r.Err = wire.StatusLBARange
		return
	}
	if r.Op != wire.OpWriteZeroes && uint64(len(data)) != n {
		r.Err = wire.StatusSGLLength
		return
	}
	now := s.now[r.SLBA*block:][:n]
	switch r.Op {
	case wire.OpRead:
		copy(data, now)
		return
	case wire.OpWrite:
		copy(now, data)
	case wire.OpWriteZeroes:
		clear(now)
	default:
		r.Err = wire.StatusInvalidOpcode
		return
	}
	if r.FUA {
		s.fua++
	}
	if r.FUA || !s.format.Cached {
		copy(s.stable[r.SLBA*block:], now)
		return
	}
	s.wrote(int64(r.SLBA*block), int(n))
}

func (s *memSpace) Detach(r *Request) {
	s.mu.Lock()
	for _, list := range []*[]*Request{&s.started, &s.queue} {
		i := slices.Index(*list, r)
		if i < 0 {
			continue
		}
		if r.Op != wire.OpRead {
			s.private[r] = slices.Clone(r.Data)
			break
		}
		*list = slices.Delete(*list, i, i+1)
		s.mu.Unlock()
		r.Err = context.Canceled
		r.Done(r)
		return
	}
	s.mu.Unlock()
}

// A memSpace is also what a server may keep a namespace in (nvme.Backing).

func (s *memSpace) Size() (int64, error) { return int64(len(s.now)), nil }

func (s *memSpace) ReadAt(p []byte, off int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return copy(p, s.now[off:]), nil
}

func (s *memSpace) WriteAt(p []byte, off int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wrote(off, copy(s.now[off:], p))
	return len(p), nil
}

func (s *memSpace) Zero(off, n int64, _ bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.now[off:][:n])
	s.wrote(off, int(n))
	return nil
}

// wrote notes that n bytes at off are not stable. mu is held.
func (s *memSpace) wrote(off int64, n int) {
	block := int64(s.format.BlockSize)
	for b := off / block; b*block < off+int64(n); b++ {
		s.dirty[uint64(b)] = true
	}
}

func (s *memSpace) Sync() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stabilise()
	return nil
}

// stabilise makes all stable. mu is held.
func (s *memSpace) stabilise() {
	block := uint64(s.format.BlockSize)
	for b := range s.dirty {
		copy(s.stable[b*block:][:block], s.now[b*block:][:block])
	}
	clear(s.dirty)
}

// extents gives out n bytes of the namespace in pieces that lie anywhere, of the states that pick chooses. What is valid is
// zeros.
func (s *memSpace) extents(n int64, pick func() layout.ExtentState) []layout.Extent {
	s.mu.Lock()
	defer s.mu.Unlock()
	block := int64(s.format.BlockSize)
	var list []layout.Extent
	for off := int64(0); off < n; {
		size := min(n-off, block<<s.rnd.IntN(9))
		if s.rnd.IntN(8) == 0 {
			size = min(n-off, 1<<20)
		}
		list = append(list, layout.Extent{Off: off, Len: size, State: pick()})
		off += size
	}
	for _, i := range s.rnd.Perm(len(list)) {
		e := &list[i]
		if e.State == layout.ExtentNone {
			continue
		}
		e.Addr = s.next
		s.next += e.Len
		if s.rnd.IntN(4) == 0 {
			s.next += block
		}
		if e.State != layout.ExtentInvalid {
			clear(s.now[e.Addr:][:e.Len])
			clear(s.stable[e.Addr:][:e.Len])
		}
	}
	return list
}

var files int

// file is a data file with n bytes of extents.
func (s *memSpace) file(n int64, pick func() layout.ExtentState) *layout.DataFile {
	extents := s.extents(n, pick)
	s.mu.Lock()
	defer s.mu.Unlock()
	files++
	return &layout.DataFile{Handles: [][]byte{{byte(files >> 8), byte(files), 1}}, Extents: extents, Generation: 1}
}

func invalid() layout.ExtentState   { return layout.ExtentInvalid }
func readWrite() layout.ExtentState { return layout.ExtentReadWrite }

// sized gives the data files of a Target ends, which the suite of all targets looks for, and takes smaller requests.
type sized struct {
	*Target
	mu    sync.Mutex
	sizes map[string]int64
}

func (s *sized) Limits() (rsize, wsize int) { return 64 << 10, 48 << 10 }

func (s *sized) grow(df *layout.DataFile, end int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sizes[string(df.Handles[0])] = max(end, s.sizes[string(df.Handles[0])])
}

func (s *sized) Start(op *layout.Op) {
	done := op.Done
	op.Done = func(op *layout.Op) {
		op.Done = done
		switch {
		case op.Err != nil:
		case op.Kind == layout.OpWrite:
			s.grow(op.File, op.Off+int64(op.N))
		case op.Kind == layout.OpRead:
			s.mu.Lock()
			left := max(s.sizes[string(op.File.Handles[0])]-op.Off, 0)
			s.mu.Unlock()
			if op.EOF = left <= int64(op.N); op.EOF {
				op.N = int(left)
			}
		}
		done(op)
	}
	s.Target.Start(op)
}

func (s *sized) Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, keepSize bool) error {
	err := s.Target.Allocate(ctx, df, col, off, n, keepSize)
	if err == nil && !keepSize {
		for at := off; ; {
			from, to := col.Next(at, off+n)
			if from == to {
				break
			}
			s.grow(df, to)
			at = to
		}
	}
	return err
}

// formats are the kinds of namespace that are tried.
var formats = map[string]Format{
	"512":           {BlockSize: 512, MaxTransfer: 16 << 10, MaxBlocks: 1 << 16},
	"512, cached":   {BlockSize: 512, MaxTransfer: 1 << 20, MaxBlocks: 1 << 16, Boundary: 20, Cached: true},
	"4096, cached":  {BlockSize: 4096, MaxTransfer: 256 << 10, MaxBlocks: 5, Cached: true},
	"4096, bounded": {BlockSize: 4096, MaxTransfer: 1 << 20, MaxBlocks: 1 << 16, Boundary: 4},
}

func newTestTarget(t testing.TB, s Space) *Target {
	target, err := NewTarget(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	return target
}

func TestTargetContract(t *testing.T) {
	for name, format := range formats {
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			open := func(t *testing.T, pick func(rnd *rand.Rand) layout.ExtentState) targettest.Fixture {
				s := newMemSpace(t, format, 20<<20, seed)
				s.shuffle = true
				target := newTestTarget(t, s)
				t.Cleanup(func() {
					s.set(func() {
						if s.crossed || int(s.largest)*format.BlockSize > format.MaxTransfer || int(s.most) > format.MaxBlocks {
							t.Errorf("a transfer had %d blocks, a command %d, crossed a boundary: %v", s.largest, s.most, s.crossed)
						}
					})
				})
				rnd := rand.New(rand.NewPCG(seed, 12))
				return targettest.Fixture{
					Target:  &sized{Target: target, sizes: map[string]int64{}},
					NewFile: func() *layout.DataFile { return s.file(6<<20, func() layout.ExtentState { return pick(rnd) }) },
				}
			}
			targettest.Run(t, func(t *testing.T) targettest.Fixture {
				return open(t, func(rnd *rand.Rand) layout.ExtentState {
					return []layout.ExtentState{layout.ExtentReadWrite, layout.ExtentInvalid}[rnd.IntN(2)]
				})
			})
			targettest.RunSparse(t, func(t *testing.T) targettest.Fixture {
				return open(t, func(*rand.Rand) layout.ExtentState { return layout.ExtentInvalid })
			})
		})
	}
}
