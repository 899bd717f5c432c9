package fs

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"
	"sync"
	"testing"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	spaceBlock = 512
	spaceUnit  = 4096 // what a file gets at once
)

// space is a namespace in memory, full of what nobody has written. It is a nvmetcp.Space.
type space struct {
	cached bool
	most   int64 // a layout for writing is of so many bytes at most

	mu      sync.Mutex
	data    []byte
	next    int64 // bytes given away
	started []*nvmetcp.Request
	asked   map[wire.Opcode]int
	// held, if it is not nil, is called with each command before it is carried out, and may wait.
	held func(*nvmetcp.Request)
	lost uint64
}

func newSpace(cached bool) *space {
	return &space{cached: cached, most: 1 << 20, data: bytes.Repeat([]byte{0xdd}, 8<<20), asked: map[wire.Opcode]int{}}
}

func (s *space) Format() nvmetcp.Format {
	return nvmetcp.Format{BlockSize: spaceBlock, MaxTransfer: 64 << 10, MaxBlocks: 1 << 16, Cached: s.cached}
}

func (s *space) Lost() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

func (s *space) count(op wire.Opcode) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[op]
}

// hold sets what each command waits for.
func (s *space) hold(held func(*nvmetcp.Request)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = held
}

func (s *space) Start(r *nvmetcp.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = append(s.started, r)
}

func (s *space) Flush() {
	s.mu.Lock()
	list, held := s.started, s.held
	s.started = nil
	s.mu.Unlock()
	for _, r := range list {
		go func() { // ends with the command
			s.mu.Lock()
			s.asked[r.Op]++
			s.mu.Unlock()
			if held != nil {
				held(r)
			}
			s.mu.Lock()
			at := r.SLBA * spaceBlock
			switch r.Op {
			case wire.OpRead:
				copy(r.Data, s.data[at:])
			case wire.OpWrite:
				copy(s.data[at:], r.Data)
			case wire.OpWriteZeroes:
				clear(s.data[at : at+uint64(r.Blocks)*spaceBlock])
			}
			r.Err = nil
			s.mu.Unlock()
			r.Done(r)
		}()
	}
}

// Detach need not do anything: no test gives a buffer up.
func (s *space) Detach(*nvmetcp.Request) {}

// Withdraw need not do anything either: what was started is carried out.
func (s *space) Withdraw(*nvmetcp.Request) {}

// blocks are those of a file on the space.
type blocks struct {
	generation uint64
	units      map[int64]int64 // where they are
	valid      map[int64]bool  // blocks
}

// extents is a segment of a file for a range. s.mu is held.
func (s *service) extents(n *node, mode layout.IOMode, r layout.Range) layout.Segment {
	df := layout.DataFile{
		Device: spaceDevice, Handles: [][]byte{binary.BigEndian.AppendUint64(nil, uint64(n.attr.ID))}, Generation: max(n.blocks.generation, 1),
	}
	var units []int64
	for u := range n.blocks.units {
		if r.Overlaps(layout.Range{Off: u * spaceUnit, Len: spaceUnit}) {
			units = append(units, u)
		}
	}
	slices.Sort(units)
	for _, u := range units {
		for at := u * spaceUnit; at < (u+1)*spaceUnit; at += spaceBlock {
			e := layout.Extent{Off: at, Len: spaceBlock, Addr: n.blocks.units[u] + at - u*spaceUnit, State: layout.ExtentReadWrite}
			switch {
			case mode == layout.IOModeRead && !n.blocks.valid[at/spaceBlock]:
				continue
			case mode == layout.IOModeRead:
				e.State = layout.ExtentRead
			case !n.blocks.valid[at/spaceBlock]:
				e.State = layout.ExtentInvalid
			}
			df.Extents = append(df.Extents, e)
		}
	}
	return layout.Segment{Range: r, IOMode: mode, StripeUnit: s.unit, OnNamespaces: true, Mirrors: []layout.Mirror{{Servers: []layout.DataFile{df}}}}
}

var spaceDevice = layout.DeviceID{0xee}

// grantExtents gives the session a layout for n bytes at off, which nobody else writes then, nor reads if it is for writing. s.mu is held, but not
// all the time.
func (m *session) grantExtents(f *node, mode layout.IOMode, off, n int64) error {
	s, id := m.s, f.attr.ID
	for k := 0; k < len(s.sessions); k++ {
		o := s.sessions[k]
		if o == m || o.holds[id] == 0 || mode == layout.IOModeRead && o.holds[id] == layout.IOModeRead {
			continue
		}
		s.mu.Unlock()
		err := o.fs.OnRecall(context.Background(), id, 0, layout.ToEOF)
		s.mu.Lock()
		if err != nil {
			return err
		}
		delete(o.holds, id)
	}
	m.holds[id] = max(m.holds[id], mode)
	r := layout.Range{Len: layout.ToEOF}
	if mode == layout.IOModeRW {
		from := off / spaceUnit
		to := (off + min(n, s.space.most) + spaceUnit - 1) / spaceUnit
		r = layout.Range{Off: from * spaceUnit, Len: (to - from) * spaceUnit}
		if f.blocks.units == nil {
			f.blocks = blocks{generation: 1, units: map[int64]int64{}, valid: map[int64]bool{}}
		}
		for u := from; u < to; u++ {
			if _, ok := f.blocks.units[u]; !ok {
				f.blocks.units[u] = s.space.next
				s.space.next += 2 * spaceUnit
			}
		}
	}
	seg := s.extents(f, mode, r)
	m.cache[id] = slices.DeleteFunc(slices.Clone(m.cache[id]), func(old layout.Segment) bool {
		return old.Overlaps(r) && (mode == layout.IOModeRW || old.IOMode == layout.IOModeRead)
	})
	m.cache[id] = append(m.cache[id], seg)
	return nil
}

// validate makes blocks valid, and returns false if they have been taken away. s.mu is held.
func (s *service) validate(n *node, written []metarpc.Written) bool {
	for _, w := range written {
		if w.Generation != n.blocks.generation || w.Copy.Device != spaceDevice || binary.BigEndian.Uint64(w.Copy.Handle) != uint64(n.attr.ID) {
			return false
		}
		for _, r := range w.Ranges {
			for at := r.Off; at < r.Off+r.Len; at += spaceBlock {
				n.blocks.valid[at/spaceBlock] = true
			}
		}
	}
	return true
}

// cut takes a file's blocks past its size away, and gives them to somebody else at once. s.mu is held.
func (s *service) cut(n *node, size int64) {
	s.space.mu.Lock()
	defer s.space.mu.Unlock()
	for u, addr := range n.blocks.units {
		for at := u * spaceUnit; at < (u+1)*spaceUnit; at += spaceBlock {
			data := s.space.data[addr+at-u*spaceUnit:][:spaceBlock]
			switch {
			case at >= size:
				delete(n.blocks.valid, at/spaceBlock)
				copy(data, bytes.Repeat([]byte{0xdd}, spaceBlock))
			case at+spaceBlock > size:
				clear(data[size-at:])
			}
		}
		if u*spaceUnit >= size {
			delete(n.blocks.units, u)
		}
	}
	n.blocks.generation++
}

// newSpaceRig is a mount of a service whose files lie on a namespace.
func newSpaceRig(t testing.TB, s *service, change ...func(*Config)) *rig {
	t.Helper()
	target, err := nvmetcp.NewTarget(s.space)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	return newRigOver(t, s, map[layout.DeviceID]dataplane.Target{spaceDevice: target}, change...)
}

func newSpaceService(cached bool) *service {
	s := newService(0, 1<<30)
	s.space = newSpace(cached)
	return s
}
