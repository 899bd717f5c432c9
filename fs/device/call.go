package device

import (
	"maps"
	"slices"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// call is a request that go-fuse serves.
type call struct {
	in  []byte
	out []byte
}

var callPool = sync.Pool{New: func() any { return new(call) }}

// call lets a goroutine serve the request that was received.
func (s *Server) call(hdr *header, in *input) {
	size, ok := answerSize(hdr.opcode, &in.head, in.n, s.cfg.Options.MaxWrite)
	if !ok {
		s.refuse(hdr, syscall.EINVAL)
		return
	}
	c := callPool.Get().(*call)
	c.in = c.in[:0]
	for _, b := range in.bytes() {
		c.in = append(c.in, b...)
	}
	c.out = slices.Grow(c.out[:0], size)[:size]
	s.active.Add(1)
	s.mu.Lock()
	s.calls[hdr.unique] = struct{}{}
	s.mu.Unlock()
	go s.serve(c, *hdr) // owns the call; ends with its answer
}

func (s *Server) serve(c *call, hdr header) {
	n, status := s.protocol.HandleRequest([][]byte{c.in}, [][]byte{c.out})
	s.mu.Lock()
	delete(s.calls, hdr.unique)
	s.mu.Unlock()
	switch {
	case n > 0:
		s.send([][]byte{c.out[:n]})
	case status != fuse.OK && answered(hdr.opcode):
		s.fail(hdr.unique, syscall.EIO)
	}
	const keep = 64 << 10
	if cap(c.in) <= keep && cap(c.out) <= keep {
		callPool.Put(c)
	}
	s.active.Done()
}

// callsInFlight are the numbers of the requests that go-fuse is serving.
func (s *Server) callsInFlight() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.calls))
}
