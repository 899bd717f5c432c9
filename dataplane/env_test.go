package dataplane_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

var (
	_ dataplane.Target  = (*targettest.Target)(nil)
	_ dataplane.Epocher = (*targettest.Target)(nil)

	errFault = errors.New("fault on demand")
)

// env is a plane over servers in memory, each behind a faulty target without rules.
type env struct {
	t       testing.TB
	plane   *dataplane.Plane
	servers []*targettest.Server
	targets []*faultytest.Target
	buffers bool // what is written is in memory of Plane.Buffer

	found atomic.Int64 // how often a server was found late or stuck
}

type options struct {
	servers      int   // default 1
	retain       int64 // default 64 MiB
	rsize, wsize int   // default 64 KiB
	seed         uint64
	reorder      bool
	keep         float64
}

func newEnv(t testing.TB, o options) *env {
	t.Helper()
	e := &env{t: t}
	byID := map[layout.DeviceID]*faultytest.Target{}
	for i := range max(o.servers, 1) {
		s := targettest.NewServer(o.seed + uint64(i) + 1)
		s.Keep(o.keep)
		if o.reorder {
			s.Shuffle()
		}
		inner := s.NewTarget(def(o.rsize, 64<<10), def(o.wsize, 64<<10))
		target := faultytest.New(inner, faultytest.Config{Seed: o.seed + uint64(i), Reorder: o.reorder})
		e.servers, e.targets = append(e.servers, s), append(e.targets, target)
		byID[s.ID()] = target
		t.Cleanup(func() { target.Close() })
	}
	e.plane = makePlane(t, dataplane.Config{
		Dial:        func(id layout.DeviceID) (dataplane.Target, error) { return byID[id], nil },
		RetainBytes: o.retain, OnDown: func() { e.found.Add(1) },
	})
	return e
}

func def(n, d int) int {
	if n == 0 {
		return d
	}
	return n
}

func newPlane(t testing.TB, retain int64, dial func(layout.DeviceID) (dataplane.Target, error)) *dataplane.Plane {
	t.Helper()
	return makePlane(t, dataplane.Config{Dial: dial, RetainBytes: retain})
}

func makePlane(t testing.TB, cfg dataplane.Config) *dataplane.Plane {
	t.Helper()
	cfg.RetainBytes = cmp.Or(cfg.RetainBytes, 64<<20)
	cfg.MirrorTimeout, cfg.Log = mirrorTimeout, slog.New(slog.DiscardHandler)
	p, err := dataplane.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// segment lays a new file out over the servers: mirror m takes servers from m*count on, round and round.
func (e *env) segment(unit int64, count, mirrors int) *layout.Segment {
	seg := &layout.Segment{Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRW, StripeUnit: unit}
	for m := range mirrors {
		var mir layout.Mirror
		for i := range count {
			mir.Servers = append(mir.Servers, *e.servers[(m*count+i)%len(e.servers)].NewFile())
		}
		seg.Mirrors = append(seg.Mirrors, mir)
	}
	if err := seg.Validate(); err != nil {
		e.t.Fatal(err)
	}
	return seg
}

func (e *env) server(id layout.DeviceID) *targettest.Server {
	for _, s := range e.servers {
		if s.ID() == id {
			return s
		}
	}
	return nil
}

// mirror puts together what is stable of one mirror of a file of the given size, or of all that it holds.
func (e *env) mirror(seg *layout.Segment, m int, size int, stable bool) []byte {
	out := make([]byte, size)
	var columns [][]byte
	for i := range seg.Mirrors[m].Servers {
		df := &seg.Mirrors[m].Servers[i]
		s := e.server(df.Device)
		if stable {
			columns = append(columns, s.Stable(df))
		} else {
			columns = append(columns, s.Contents(df))
		}
	}
	for off := int64(0); off < int64(size); {
		n := int64(size) - off
		if len(columns) > 1 {
			n = min(n, seg.StripeUnit-off%seg.StripeUnit)
		}
		if col := columns[seg.ServerAt(off)]; off < int64(len(col)) {
			copy(out[off:off+n], col[off:])
		}
		off += n
	}
	return out
}

const patience = 60 * time.Second

// started is a request whose end can be waited for.
type started struct {
	done chan struct{}
	n    int
	err  error
	once bool
	read dataplane.Read
	wr   dataplane.Write
}

func (s *started) end(n int, err error) {
	if s.once {
		panic("Done was called twice")
	}
	s.once, s.n, s.err = true, n, err
	close(s.done)
}

func (s *started) wait(t testing.TB) error {
	t.Helper()
	select {
	case <-s.done:
		return s.err
	case <-time.After(patience):
		t.Fatal("a request does not end")
		return nil
	}
}

func (s *started) over() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

func (e *env) startRead(f *dataplane.File, seg *layout.Segment, off int64, buf []byte) *started {
	s := &started{done: make(chan struct{})}
	s.read = dataplane.Read{Segment: seg, Buf: buf, Off: off, Done: s.end}
	f.StartRead(&s.read)
	e.plane.Flush()
	return s
}

func (e *env) startWrite(f *dataplane.File, seg *layout.Segment, off int64, data []byte, stable layout.Stability) *started {
	s := &started{done: make(chan struct{})}
	s.wr = dataplane.Write{Segment: seg, Data: data, Off: off, Stable: stable, Done: func(err error) { s.end(0, err) }}
	if e.buffers {
		if b := e.plane.Buffer(len(data)); b != nil {
			copy(b.Bytes(), data)
			s.wr.Data, s.wr.Buf = b.Bytes(), b
			s.wr.Done = func(err error) {
				b.Release()
				s.end(0, err)
			}
		}
	}
	f.StartWrite(&s.wr)
	e.plane.Flush()
	return s
}

func (e *env) write(f *dataplane.File, seg *layout.Segment, off int64, data []byte) {
	e.t.Helper()
	if err := e.startWrite(f, seg, off, data, layout.Unstable).wait(e.t); err != nil {
		e.t.Fatalf("write of %d bytes at %d: %v", len(data), off, err)
	}
}

func (e *env) check(f *dataplane.File, seg *layout.Segment, off int64, want []byte) {
	e.t.Helper()
	buf := bytes.Repeat([]byte{0xee}, len(want))
	s := e.startRead(f, seg, off, buf)
	if err := s.wait(e.t); err != nil || s.n != len(want) {
		e.t.Fatalf("read of %d bytes at %d: %d, %v", len(want), off, s.n, err)
	}
	if i := differ(buf, want); i >= 0 {
		e.t.Fatalf("read of %d bytes at %d: byte %d is %#x, want %#x", len(want), off, off+int64(i), buf[i], want[i])
	}
}

func (e *env) commit(f *dataplane.File) {
	e.t.Helper()
	if err := f.Commit(e.ctx()); err != nil {
		e.t.Fatalf("commit: %v", err)
	}
}

func (e *env) ctx() context.Context {
	ctx, stop := context.WithTimeout(context.Background(), patience)
	e.t.Cleanup(stop)
	return ctx
}

// differ is the index of the first byte that differs, or -1.
func differ(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

func newRand(t testing.TB) (*rand.Rand, uint64) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 21)), seed
}

// noiseSource is where random contents come from; cutting them out is cheaper than making them.
var noiseSource = sync.OnceValue(func() []byte {
	rnd := rand.New(rand.NewPCG(1, 1))
	b := make([]byte, 8<<20)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
})

func noise(rnd *rand.Rand, n int) []byte {
	src := noiseSource()
	at := rnd.IntN(len(src) - n + 1)
	return bytes.Clone(src[at : at+n])
}
