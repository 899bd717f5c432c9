package device

import (
	"slices"
	"time"

	"github.com/weftfs/weft/internal/iobuf"
)

// receiveBuffer waits for memory for the next request.
func (s *Server) receiveBuffer() *iobuf.Buf {
	if b := s.writes.Get(s.bufferSize()); b != nil {
		return b
	}
	s.starving.Add(1)
	defer s.starving.Add(-1)
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		// A Release from here on is told.
		if b := s.writes.Get(s.bufferSize()); b != nil {
			return b
		}
		select {
		case <-s.memory:
		case <-tick.C:
			s.watchAll(false)
		}
	}
}

// freed is called when memory of a READ or WRITE became free.
func (s *Server) freed(write bool) {
	switch {
	case write && s.starving.Load() > 0:
		select {
		case s.memory <- struct{}{}:
		default:
		}
	case !write && s.queued.Load() > 0:
		s.queueMu.Lock()
		defer s.queueMu.Unlock()
		if !s.admitting && len(s.waiting) > 0 {
			s.admitting = true
			// The goroutine starts READs that have waited; it ends when there are none, or no memory. Whoever has freed the
			// memory may be a connection's reader and has other things to do.
			go s.admit()
		}
	}
}

// enqueue makes a READ wait for memory.
func (s *Server) enqueue(r *Request) {
	s.queueMu.Lock()
	r.waits = true
	s.waiting = append(s.waiting, r)
	s.queued.Add(1)
	s.queueMu.Unlock()
	s.freed(false) // all there was may have become free before
}

// unqueue takes a READ out of the queue and reports whether it was there.
func (s *Server) unqueue(r *Request) bool {
	s.queueMu.Lock()
	defer s.queueMu.Unlock()
	if !r.waits {
		return false
	}
	r.waits = false
	s.waiting = slices.DeleteFunc(s.waiting, func(w *Request) bool { return w == r })
	s.queued.Add(-1)
	return true
}

func (s *Server) admit() {
	for r := s.admitOne(); r != nil; r = s.admitOne() {
		r.begin()
	}
	s.handler.Flush()
}

// admitOne gives memory to the first READ that waits. Without one, or without memory, admitting ends.
func (s *Server) admitOne() *Request {
	s.queueMu.Lock()
	defer s.queueMu.Unlock()
	if len(s.waiting) > 0 {
		r := s.waiting[0]
		if r.buf = s.reads.Get(r.size); r.buf != nil {
			r.Data = r.buf.Bytes()
			r.waits = false
			s.waiting = slices.Delete(s.waiting, 0, 1)
			s.queued.Add(-1)
			return r
		}
	}
	s.admitting = false
	return nil
}
