package targettest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"

	"github.com/weftfs/weft/layout"
)

// maxFile is the largest data file of a Server, in bytes.
const maxFile = 1 << 28

// Error is a refusal by a Server.
type Error struct {
	Op  layout.OpKind
	Err syscall.Errno
}

func (e *Error) Error() string        { return fmt.Sprintf("%v: %v", e.Op, e.Err) }
func (e *Error) Errno() syscall.Errno { return e.Err }

// ErrClosed ends the requests of a target of a Server that was closed.
var ErrClosed = errors.New("target closed")

// Server is a data server in memory.
type Server struct {
	id layout.DeviceID

	mu      sync.Mutex
	changed *sync.Cond // queues, paused or closed
	rnd     *rand.Rand
	files   map[string]*memFile
	boots   uint64 // also the verifier and the epoch
	paused  bool
	shuffle bool
	keep    float64
	counts  map[layout.OpKind]int
	foreign bool
	room    int64 // blocks that may still be taken by Allocate
}

// memFile is a data file: dirty are the ranges in which now may differ from stable.
type memFile struct {
	now, stable []byte
	dirty       [][2]int64

	// Of each block of now, and of stable: what it is. Blocks behind these are holes.
	blocks, stableBlocks []blockState
}

// NewServer makes a server whose device id and random choices come from seed.
func NewServer(seed uint64) *Server {
	s := &Server{rnd: rand.New(rand.NewPCG(seed, 7)), files: map[string]*memFile{}, boots: 1, counts: map[layout.OpKind]int{}, room: maxFile}
	s.changed = sync.NewCond(&s.mu)
	binary.BigEndian.PutUint64(s.id[8:], seed)
	return s
}

// ID is the server's device.
func (s *Server) ID() layout.DeviceID { return s.id }

// NewFile makes an empty data file.
func (s *Server) NewFile() *layout.DataFile {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := fmt.Appendf(nil, "file %d on %v", len(s.files), s.id)
	s.files[string(h)] = &memFile{}
	return &layout.DataFile{Device: s.id, Handles: [][]byte{h}, Cred: layout.Credential{UID: 1000, GID: 1000}}
}

// Shuffle makes the server carry out requests in random order.
func (s *Server) Shuffle() { s.set(func() { s.shuffle = true }) }

// Keep sets the chance with which each unstable write survives a restart; at first it is 0.
func (s *Server) Keep(chance float64) { s.set(func() { s.keep = chance }) }

// Pause makes the server answer nothing until Resume.
func (s *Server) Pause() { s.set(func() { s.paused = true }) }

// Resume ends a Pause.
func (s *Server) Resume() { s.set(func() { s.paused = false }) }

func (s *Server) set(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
	s.changed.Broadcast()
}

// Restart loses unstable data, gives the server a new verifier and moves on the epoch of its targets.
func (s *Server) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.boots++
	for _, f := range s.files {
		for _, r := range f.dirty {
			if s.rnd.Float64() < s.keep {
				f.stabilise(r[0], r[1])
			}
		}
		f.dirty = nil
		f.now, f.blocks = slices.Clone(f.stable), slices.Clone(f.stableBlocks)
	}
}

// Count is how many requests of a kind were carried out.
func (s *Server) Count(kind layout.OpKind) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[kind]
}

// Stable is what a restart that keeps nothing would leave of a data file.
func (s *Server) Stable(df *layout.DataFile) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.files[string(df.Handles[0])].stable)
}

// Contents is what a data file holds now.
func (s *Server) Contents(df *layout.DataFile) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.files[string(df.Handles[0])].now)
}

// Truncate cuts a data file, as the metadata service does.
func (s *Server) Truncate(df *layout.DataFile, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[string(df.Handles[0])]
	f.now, f.stable = f.now[:min(size, int64(len(f.now)))], f.stable[:min(size, int64(len(f.stable)))]
	f.blocks, f.stableBlocks = cutBlocks(f.blocks, size), cutBlocks(f.stableBlocks, size)
	for i := range f.dirty {
		f.dirty[i][0], f.dirty[i][1] = min(f.dirty[i][0], size), min(f.dirty[i][1], size)
	}
}

// extend returns b with at least n bytes, the new ones zero.
func extend(b []byte, n int64) []byte {
	if int64(len(b)) >= n {
		return b
	}
	old := len(b)
	b = slices.Grow(b, int(n)-old)[:n]
	clear(b[old:])
	return b
}

func (f *memFile) stabilise(off, end int64) {
	f.stable = extend(f.stable, end)
	copy(f.stable[off:end], f.now[off:end])
	for i := off / BlockSize; i*BlockSize < end; i++ {
		f.stableBlocks = setBlocks(f.stableBlocks, i*BlockSize, (i+1)*BlockSize, f.blocks[i])
	}
}

// apply carries out a request. mu is held.
func (s *Server) apply(op *layout.Op) {
	s.counts[op.Kind]++
	op.N, op.EOF, op.Err, op.Committed = 0, false, nil, 0
	binary.BigEndian.PutUint64(op.Verifier[:], s.boots)
	f := s.files[string(op.File.Handles[0])]
	end := op.Off + int64(len(op.Data))
	switch {
	case f == nil:
		op.Err = &Error{op.Kind, syscall.ESTALE}
	case op.Off < 0:
		op.Err = &Error{op.Kind, syscall.EINVAL}
	case op.Kind == layout.OpRead:
		if op.Off < int64(len(f.now)) {
			op.N = copy(op.Data, f.now[op.Off:])
		}
		op.EOF = op.Off+int64(op.N) >= int64(len(f.now))
	case op.Kind == layout.OpWrite:
		if op.Off > maxFile-int64(len(op.Data)) {
			op.Err = &Error{op.Kind, syscall.EFBIG}
			return
		}
		f.now = extend(f.now, end)
		op.N = copy(f.now[op.Off:], op.Data)
		f.blocks = setBlocks(f.blocks, op.Off, end, dataBlock)
		if op.Stable == layout.Unstable {
			f.dirty = append(f.dirty, [2]int64{op.Off, end})
		} else {
			f.stabilise(op.Off, end)
		}
		op.Committed = op.Stable
	case op.Kind == layout.OpCommit:
		end := op.Off + op.Count
		f.dirty = slices.DeleteFunc(f.dirty, func(r [2]int64) bool {
			if op.Count != 0 && (r[0] >= end || r[1] <= op.Off) {
				return false
			}
			f.stabilise(r[0], r[1])
			return true
		})
	default:
		op.Err = &Error{op.Kind, syscall.ENOTSUP}
	}
}

// Target is a way to a Server.
type Target struct {
	s            *Server
	rsize, wsize int

	// Guarded by s.mu:
	started []*layout.Op // not flushed
	queue   []*layout.Op
	closed  bool
}

// NewTarget returns a target that takes requests of at most rsize and wsize bytes. The caller closes it.
func (s *Server) NewTarget(rsize, wsize int) *Target {
	t := &Target{s: s, rsize: rsize, wsize: wsize}
	// This goroutine is the connection: it carries out what was flushed and ends with Close.
	go t.serve()
	return t
}

func (t *Target) serve() {
	s := t.s
	for {
		s.mu.Lock()
		for !t.closed && (s.paused || len(t.queue) == 0) {
			s.changed.Wait()
		}
		if t.closed {
			s.mu.Unlock()
			return
		}
		i := 0
		if s.shuffle {
			i = s.rnd.IntN(len(t.queue))
		}
		op := t.queue[i]
		t.queue = slices.Delete(t.queue, i, i+1)
		s.apply(op)
		s.mu.Unlock()
		op.Done(op)
	}
}

// Start implements dataplane.Target.
func (t *Target) Start(op *layout.Op) {
	t.s.mu.Lock()
	closed := t.closed
	if !closed {
		t.started = append(t.started, op)
	}
	t.s.mu.Unlock()
	if closed {
		end(op, ErrClosed)
	}
}

func end(op *layout.Op, err error) {
	op.N, op.EOF, op.Err = 0, false, err
	op.Done(op)
}

// Flush implements dataplane.Target.
func (t *Target) Flush() {
	t.s.mu.Lock()
	t.queue = append(t.queue, t.started...)
	clear(t.started)
	t.started = t.started[:0]
	t.s.changed.Broadcast()
	t.s.mu.Unlock()
}

// Detach implements dataplane.Target.
func (t *Target) Detach(op *layout.Op) {
	t.s.mu.Lock()
	for _, list := range []*[]*layout.Op{&t.started, &t.queue} {
		i := slices.Index(*list, op)
		if i < 0 {
			continue
		}
		if op.Kind == layout.OpWrite {
			op.Data = slices.Clone(op.Data)
			break
		}
		*list = slices.Delete(*list, i, i+1)
		t.s.mu.Unlock()
		end(op, context.Canceled)
		return
	}
	t.s.mu.Unlock()
}

// Limits implements dataplane.Target.
func (t *Target) Limits() (rsize, wsize int) { return t.rsize, t.wsize }

// Epoch implements dataplane.Epocher.
func (t *Target) Epoch() uint64 {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	return t.s.boots
}

// Close implements dataplane.Target.
func (t *Target) Close() error {
	t.s.mu.Lock()
	open := append(t.started, t.queue...)
	t.started, t.queue, t.closed = nil, nil, true
	t.s.changed.Broadcast()
	t.s.mu.Unlock()
	for _, op := range open {
		end(op, ErrClosed)
	}
	return nil
}
