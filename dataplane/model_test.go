package dataplane_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

// model is a file and what it should hold.
type model struct {
	e       *env
	f       *dataplane.File
	seg     *layout.Segment
	narrow  *layout.Segment // [0, unit) of the same file
	rnd     *rand.Rand
	want    []byte
	maxSize int

	touched map[int]bool // blocks that may be data; see holes_test.go
	foreign bool         // some server cannot punch
}

// Random operations on a plane, over servers that restart at any moment and lose unstable data, against a byte slice.
func TestModel(t *testing.T) {
	for _, unit := range []int64{4 << 10, 64 << 10, 1 << 20} {
		for count := 1; count <= 4; count++ {
			for mirrors := 1; mirrors <= 2; mirrors++ {
				t.Run(fmt.Sprintf("unit=%d/count=%d/mirrors=%d", unit, count, mirrors), func(t *testing.T) {
					runModel(t, unit, count, mirrors)
				})
			}
		}
	}
}

func runModel(t *testing.T, unit int64, count, mirrors int) {
	rnd, seed := newRand(t)
	m := &model{
		e: newEnv(t, options{
			servers: count * mirrors, seed: seed, reorder: rnd.IntN(2) == 0, keep: rnd.Float64(),
			wsize: 1 + rnd.IntN(256<<10), rsize: 4096 + rnd.IntN(256<<10), retain: 1 << (20 + rnd.IntN(4)),
		}),
		rnd: rnd, maxSize: int(unit)*count*2 + rnd.IntN(10000), touched: map[int]bool{},
	}
	if rnd.IntN(3) == 0 {
		m.e.servers[rnd.IntN(len(m.e.servers))].Foreign()
		m.foreign = true
	}
	m.maxSize = min(max(m.maxSize, 64<<10), 3<<20)
	m.f = m.e.plane.NewFile()
	m.seg = m.e.segment(unit, count, mirrors)
	m.narrow = &layout.Segment{Range: layout.Range{Len: unit}, IOMode: layout.IOModeRW}
	for i := range m.seg.Mirrors {
		m.narrow.Mirrors = append(m.narrow.Mirrors, layout.Mirror{Servers: m.seg.Mirrors[i].Servers[:1:1]})
	}
	steps := 150
	if raceEnabled || testing.Short() {
		steps = 60
	}
	for step := range steps {
		switch p := rnd.IntN(100); {
		case p < 40:
			m.writes(1 + rnd.IntN(4))
		case p < 60:
			m.read()
		case p < 68:
			m.commit()
		case p < 72:
			m.truncate()
		case p < 80:
			m.punch()
		case p < 84:
			m.allocate()
		case p < 90:
			m.seek()
		default:
			m.e.servers[rnd.IntN(len(m.e.servers))].Restart()
		}
		if t.Failed() {
			t.Fatalf("at step %d", step)
		}
	}
	m.commit()
	for _, s := range m.e.servers {
		s.Restart()
	}
	if len(m.want) > 0 {
		m.e.check(m.f, m.seg, 0, m.want)
	}
	if m.e.plane.Retained() != 0 || m.f.Dirty() {
		t.Errorf("after commit %d bytes are retained, dirty %v", m.e.plane.Retained(), m.f.Dirty())
	}
}

// segmentFor is one of the segments that hold a range.
func (m *model) segmentFor(off, n int) *layout.Segment {
	if m.narrow.Contains(int64(off), int64(n)) && m.rnd.IntN(2) == 0 {
		return m.narrow
	}
	return m.seg
}

// length is a random one, mostly small.
func (m *model) length(limit int) int {
	return 1 + m.rnd.IntN(min(limit, 1<<(1+m.rnd.IntN(21))))
}

// writes starts n writes one after the other, which may overlap, and waits for all. Now and then a server restarts while
// they are under way.
func (m *model) writes(n int) {
	var all []*started
	for range n {
		off := m.rnd.IntN(m.maxSize)
		data := noise(m.rnd, m.length(m.maxSize-off))
		stable := layout.Unstable
		if m.rnd.IntN(8) == 0 {
			stable = layout.DataSync
		}
		m.e.buffers = m.rnd.IntN(2) == 0
		all = append(all, m.e.startWrite(m.f, m.segmentFor(off, len(data)), int64(off), data, stable))
		if len(m.want) < off+len(data) {
			m.want = append(m.want, make([]byte, off+len(data)-len(m.want))...)
		}
		copy(m.want[off:], data)
		m.touch(off, off+len(data))
		if m.rnd.IntN(20) == 0 {
			m.e.servers[m.rnd.IntN(len(m.e.servers))].Restart()
		}
	}
	for _, s := range all {
		if err := s.wait(m.e.t); err != nil {
			m.e.t.Fatalf("write of %d bytes at %d: %v", len(s.wr.Data), s.wr.Off, err)
		}
	}
}

func (m *model) read() {
	off := m.rnd.IntN(m.maxSize)
	n := m.length(m.maxSize - off)
	want := make([]byte, n)
	if off < len(m.want) {
		copy(want, m.want[off:])
	}
	m.e.check(m.f, m.segmentFor(off, n), int64(off), want)
}

// commit checks that everything written so far has become stable at every mirror.
func (m *model) commit() {
	m.e.t.Helper()
	m.e.commit(m.f)
	for i := range m.seg.Mirrors {
		if at := differ(m.e.mirror(m.seg, i, len(m.want), true), m.want); at >= 0 {
			m.e.t.Fatalf("after commit byte %d of mirror %d is not stable", at, i)
		}
	}
}

func (m *model) truncate() {
	size := m.rnd.IntN(m.maxSize)
	unlock, err := m.f.LockRange(m.e.ctx(), int64(size), layout.ToEOF)
	if err != nil {
		m.e.t.Fatal(err)
	}
	m.f.Drop(int64(size))
	for i := range m.seg.Mirrors {
		for j := range m.seg.Mirrors[i].Servers {
			df := &m.seg.Mirrors[i].Servers[j]
			m.e.server(df.Device).Truncate(df, int64(size))
		}
	}
	unlock()
	m.want = m.want[:min(size, len(m.want))]
	m.untouch((size+targettest.BlockSize-1)/targettest.BlockSize*targettest.BlockSize, m.maxSize+targettest.BlockSize)
}

// Several goroutines write, read and commit their own bytes, side by side in the same pages, while servers restart.
func TestConcurrentModel(t *testing.T) {
	for _, c := range []struct {
		count, mirrors int
		buffers        bool
	}{{1, 1, false}, {3, 1, true}, {2, 2, false}, {2, 2, true}} {
		t.Run(fmt.Sprintf("count=%d/mirrors=%d/buffers=%v", c.count, c.mirrors, c.buffers), func(t *testing.T) {
			rnd, seed := newRand(t)
			e := newEnv(t, options{
				servers: c.count * c.mirrors, seed: seed, reorder: true, keep: rnd.Float64(),
				rsize: 20000, wsize: 9000, retain: 2 << 20,
			})
			e.buffers = c.buffers
			f, seg := e.plane.NewFile(), e.segment(16<<10, c.count, c.mirrors)
			const workers, blockSize, blocks, rounds = 4, 3000, 60, 150
			final := make([]byte, workers*blockSize*blocks)
			stop := make(chan struct{})
			var restarts, work sync.WaitGroup
			restarts.Go(func() {
				rnd := rand.New(rand.NewPCG(seed, 99))
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Duration(rnd.IntN(3000)) * time.Microsecond):
						e.servers[rnd.IntN(len(e.servers))].Restart()
					}
				}
			})
			for w := range workers {
				work.Go(func() {
					rnd := rand.New(rand.NewPCG(seed, uint64(w)))
					for range rounds {
						at := (rnd.IntN(blocks)*workers + w) * blockSize
						mine := final[at : at+blockSize]
						from := rnd.IntN(blockSize)
						to := from + 1 + rnd.IntN(blockSize-from)
						switch p := rnd.IntN(10); {
						case p < 6:
							copy(mine[from:to], noise(rnd, to-from))
							e.startWrite(f, seg, int64(at+from), bytes.Clone(mine[from:to]), layout.Unstable).wait(t)
						case p < 9:
							buf := make([]byte, to-from)
							if err := e.startRead(f, seg, int64(at+from), buf).wait(t); err != nil {
								t.Errorf("read: %v", err)
							} else if i := differ(buf, mine[from:to]); i >= 0 {
								t.Errorf("worker %d: byte %d read is not the one last written", w, at+from+i)
							}
						default:
							if err := f.Commit(e.ctx()); err != nil {
								t.Errorf("commit: %v", err)
							}
						}
					}
				})
			}
			work.Wait()
			close(stop)
			restarts.Wait()
			e.commit(f)
			for m := range c.mirrors {
				if i := differ(e.mirror(seg, m, len(final), true), final); i >= 0 {
					t.Errorf("mirror %d: byte %d is not what was written last, or not stable", m, i)
				}
			}
		})
	}
}
